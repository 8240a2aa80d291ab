"""How wide the draws of a normal guide are at the start of a private run.

NumPyro's guides start at a standard deviation of 0.1. Without noise that is good, because the
likelihood is much narrower than the prior. A private run finds the curvature of the likelihood from
scores at different draws, and noise hides it if they are too close. So its guide starts wide.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.flatten_util import ravel_pytree
from numpyro.infer import autoguide

from numpyro_dp.model.density import Model
from numpyro_dp.model.outcomes import read_latents
from numpyro_dp.model.public import UnsupportedModelError
from numpyro_dp.model.variational import guide_kind
from numpyro_dp.posterior.prior import read_prior
from numpyro_dp.run.results import MOST_LATENTS

NORMAL_GUIDES: tuple[type, ...] = (
    autoguide.AutoNormal, autoguide.AutoDiagonalNormal, autoguide.AutoMultivariateNormal
)  # fmt: skip

_OF_NUMPYRO = 0.1  # init_scale of its guides


def first_widths(
    guide: Any, model: Model, shared: tuple[Array, ...], scale: float
) -> dict[str, Array]:
    """Returns initial standard deviations by parameter of a guide. Reads no record.

    They are ``scale`` times the prior's, and at most ``scale`` in unconstrained coordinates. The
    dict is empty if the guide is not normal with a width of its own for each latent, if it has
    another ``init_scale`` than NumPyro's default, or if the prior cannot be read.
    """
    kind = guide_kind(guide)
    # A width that the user has chosen stays.
    if kind not in NORMAL_GUIDES or guide._init_scale != _OF_NUMPYRO:
        return {}
    try:
        outcomes = read_latents(model.at(model.first_params(shared)), shared)
        # Larger runs keep no sums of scores, so nothing would use the wide draws.
        if outcomes.size > MOST_LATENTS:
            return {}
        prior = read_prior(outcomes, jax.random.key(0))
    except UnsupportedModelError:
        return {}
    zeros = {name: jnp.zeros(shape) for name, shape in outcomes.shapes.items()}
    flat, unravel = ravel_pytree(zeros)
    # Latents that no record sees have no curvature to be found.
    widths = np.full(flat.size, _OF_NUMPYRO)
    widths[prior.seen] = scale * np.minimum(np.sqrt(np.diag(prior.decoded.covariance)), 1)
    found = jnp.asarray(widths, flat.dtype)
    if kind is autoguide.AutoNormal:
        return {f"{name}_{guide.prefix}_scale": own for name, own in unravel(found).items()}
    if kind is autoguide.AutoDiagonalNormal:
        return {f"{guide.prefix}_scale": found}
    return {f"{guide.prefix}_scale_tril": jnp.diag(found)}
