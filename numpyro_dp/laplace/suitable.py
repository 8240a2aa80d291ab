"""Checks that ``DPLaplace`` supports a model. The error names a driver that does."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpyro.distributions import biject_to
from numpyro.distributions.transforms import ExpTransform

from numpyro_dp._compat import jit_once
from numpyro_dp.model.public import UnsupportedModelError
from numpyro_dp.posterior.draws import generator
from numpyro_dp.posterior.prior import ModelPrior


def check_suitable(prior: ModelPrior, rng_key: Array) -> None:
    """Raises for a model that needs another driver. It reads no record.

    Raises:
        UnsupportedModelError: With the reason and the remedy.
    """
    scale, effect = _scaled_effect(prior, rng_key)
    if scale:
        raise UnsupportedModelError(
            f"The likelihood uses {effect!r} multiplied by {scale!r}. No normal distribution fits "
            "the posterior of the two. Write the effect in its centred form, "
            f"numpyro.sample({effect!r}, dist.Normal(location, {scale})), without a reparam "
            "handler. Or use DPSVI."
        )


def _scaled_effect(prior: ModelPrior, rng_key: Array) -> tuple[str, str]:
    """Names a scale s and an effect b if the likelihood depends on them only through s * b.

    Such a likelihood does not change along (log s + t, exp(-t) b). So its slope in log s equals the
    sum of b times its slope in b.
    """
    outcomes = prior.outcomes
    if len(outcomes.seen) < 2:
        return "", ""
    trace = outcomes.model.draw_prior(outcomes.shared, rng_key)
    supports = {name: biject_to(trace[name]["fn"].support) for name in outcomes.seen}
    scales = [n for n, t in supports.items() if isinstance(t, ExpTransform)]
    effects = [n for n in outcomes.seen if n not in scales and np.size(trace[n]["value"]) > 1]
    if not scales or not effects:
        return "", ""
    normal, _ = outcomes.model.structure.layout.invented_records(8)
    flat = jnp.asarray(generator(rng_key).normal(0.1, 0.5, outcomes.size), jnp.float32)

    def slopes(row: tuple[Array, ...]) -> dict[str, Array]:
        outcome = outcomes.simulate(flat, row, rng_key)
        return outcomes.latents(outcomes.score(flat, row, outcome))

    found, at = jit_once(jax.vmap(slopes))(normal), outcomes.latents(flat)
    for scale in scales:
        for effect in effects:
            along = jnp.sum(found[effect] * at[effect], axis=tuple(range(1, found[effect].ndim)))
            own = found[scale].reshape(8, -1).sum(1)
            # Slopes of 0 would agree by chance.
            if np.all(np.abs(own) > 0) and np.allclose(own, along, rtol=1e-3, atol=1e-7):
                return scale, effect
    return "", ""
