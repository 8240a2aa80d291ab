"""Posterior draws of the latent sites, from a guide and private parameters."""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np
from jax import Array
from numpyro import handlers
from numpyro.infer import Predictive

from numpyro_dp._validate import check_int
from numpyro_dp.core import PyTree, Sites, Values


def posterior_samples(
    rng_key: Array,
    guide: Callable[..., object],
    params: Values,
    num_samples: int,
    *args: PyTree,
    **kwargs: PyTree,
) -> dict[str, Array]:
    """Draws the latent sites from an automatic or hand-written guide, in the model's own units.

    The draws equal those of NumPyro's ``Predictive(guide, params=params, num_samples=...)``,
    without auxiliary sites such as the joint vector of an automatic guide. To predict from these
    draws, use ``Predictive(model, posterior_samples=draws, params=params)``.

    Args:
        rng_key: Key of the draws. It need not be secret.
        guide: The guide of the run.
        params: ``result.params``, or the ``params`` of :func:`~numpyro_dp.posterior.average`,
            :func:`~numpyro_dp.posterior.noise_aware` or :func:`~numpyro_dp.posterior.tail_average`.
        num_samples: Number of draws.
        *args: Arguments of a hand-written guide. Automatic guides need none. Global latents do not
            depend on records, so you can pass any rows. Local latents are drawn for the rows that
            you pass.
        **kwargs: Keywords of the guide.

    Returns:
        Draws by site with a leading axis ``num_samples``.

    Raises:
        ValueError: If ``num_samples`` is below 1, an automatic guide has not been set up, or
            ``params`` lacks a parameter of the guide or has another shape.

    Example:
        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
        >>> from numpyro.infer.autoguide import AutoDiagonalNormal
        >>> def model(x):
        ...     mean = numpyro.sample("mean", dist.Normal(0, 10).expand([2]).to_event(1))
        ...     sd = numpyro.sample("sd", dist.HalfNormal(1))
        ...     with numpyro.plate("records", x.shape[0]):
        ...         numpyro.sample("x", dist.Normal(mean, sd).to_event(1), obs=x)
        >>> guide = AutoDiagonalNormal(model)
        >>> _ = numpyro.handlers.seed(guide, jax.random.key(0))(jnp.zeros((1, 2)))  # or a run
        >>> params = {"auto_loc": jnp.array([3.0, 1.0, 0.0]), "auto_scale": jnp.full(3, 0.1)}
        >>> draws = posterior_samples(jax.random.key(0), guide, params, 100)
        >>> {name: value.shape for name, value in draws.items()}
        {'mean': (100, 2), 'sd': (100,)}

    Guarantee:
        Reads only its arguments. Draws of global latents may be published. Draws of local latents
        from an encoder describe the rows that you pass.
    """
    check_int("num_samples", num_samples, low=1)
    if getattr(guide, "prototype_trace", guide) is None:  # an automatic guide
        raise ValueError(
            f"This {type(guide).__name__} has not been set up by a run. Without records, it would "
            "treat observed sites as latent. Pass the guide of the run."
        )
    with handlers.block(), handlers.trace() as trace:
        handlers.seed(guide, rng_key)(*args, **kwargs)
    _check_params(trace, params)
    sites = [
        name for name, site in trace.items()
        if site["type"] == "deterministic"
        or (site["type"] == "sample" and not site["infer"].get("is_auxiliary", False))
    ]  # fmt: skip
    predictive = Predictive(guide, params=params, num_samples=num_samples, return_sites=sites)
    return predictive(rng_key, *args, **kwargs)


def _check_params(trace: Sites, params: Values) -> None:
    """Raises ValueError if a parameter of the guide is missing or has another shape."""
    wanted = {n: site["value"] for n, site in trace.items() if site["type"] == "param"}
    if missing := sorted(set(wanted) - set(params)):
        raise ValueError(
            f"The guide has the parameters {sorted(wanted)}, but params lacks {missing}. Without "
            "them, these would be draws of a guide that was never trained. Pass the params of the "
            "run together with its guide."
        )
    for name, value in wanted.items():
        shapes = [list(map(np.shape, jax.tree.leaves(x))) for x in (value, params[name])]
        if shapes[0] != shapes[1]:
            raise ValueError(
                f"The guide's parameter {name!r} has arrays of shapes {shapes[0]}, but params has "
                f"{shapes[1]}. Pass the params of a run of this guide."
            )
