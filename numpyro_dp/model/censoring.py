"""Censored distributions of NumPyro: log survival function and its inverse."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax import Array
from jax.scipy.special import log_ndtr, ndtri

from numpyro_dp.model.public import UnsupportedModelError

_EDGE = 1e-7  # quantiles nearer to 0 or 1 are infinite in float32


def is_censored(fn: object) -> bool:
    """Whether a distribution is a censored one, of any kind."""
    return "Censored" in type(fn).__name__


def check(names: tuple[str, ...], scalar: bool) -> None:
    """Raises unless a record has one censored outcome, and that outcome is a scalar."""
    if not scalar:
        raise UnsupportedModelError(
            "This method supports a censored outcome only if it is the record's one outcome and "
            f"a scalar. The observed sites are {list(names)}. Use DPSVI for this model."
        )


def check_base(name: str, fn: object) -> None:
    """Raises for interval censoring, and if the base distribution has no quantile function."""
    if not isinstance(fn, dist.LeftCensoredDistribution | dist.RightCensoredDistribution):
        raise UnsupportedModelError(
            f"Site {name!r} is a {type(fn).__name__}, but this method supports censoring from one "
            "side only (left or right). Use DPSVI for this model."
        )
    try:
        value_at(fn, jnp.full((), 0.5))
    except (NotImplementedError, ImportError, AttributeError) as error:
        raise UnsupportedModelError(
            f"The censored site {name!r} has the distribution {type(fn.base_dist).__name__}, for "
            "which no quantiles (icdf) are available. Use Weibull, LogNormal or Normal, or use "
            "DPSVI for this model."
        ) from error


def log_tail(fn: Any, value: Array) -> Array:
    """Log probability of an outcome beyond ``value``: above for right censoring, else below."""
    base = _inner(fn.base_dist)
    # Of its type, because NumPyro's own types of parameters are too wide.
    kind, right = type(base), isinstance(fn, dist.RightCensoredDistribution)
    if issubclass(kind, dist.Normal):
        away = (value - base.loc) / base.scale
        return log_ndtr(-away if right else away).reshape(())
    if issubclass(kind, dist.Weibull) and right:
        return -((value / base.scale) ** base.concentration).reshape(())
    if issubclass(kind, dist.Exponential) and right:
        return -(value * base.rate).reshape(())
    return type(fn)(fn.base_dist, True).log_prob(value).reshape(())


def value_at(fn: Any, passed: Array) -> Array:
    """The value beyond which an outcome lies with probability ``exp(-passed)``.

    The result has the shape of ``passed``.
    """
    base = _inner(fn.base_dist)
    kind, right = type(base), isinstance(fn, dist.RightCensoredDistribution)
    if issubclass(kind, dist.Weibull):  # NumPyro has no icdf for it
        own = passed if right else -jnp.log1p(-jnp.exp(-passed))
        return base.scale * own ** (1 / base.concentration)
    tail = jnp.exp(-passed) if right else -jnp.expm1(-passed)  # above the value
    if issubclass(kind, dist.Normal):
        return base.loc - base.scale * ndtri(jnp.maximum(tail, 1e-30))
    below = jnp.clip(1 - tail, _EDGE, 1 - _EDGE)
    flat = jax.vmap(lambda p: jnp.reshape(fn.base_dist.icdf(p), ()))(below.reshape(-1))
    return flat.reshape(passed.shape)


def _inner(fn: Any) -> Any:
    while type(fn) is dist.ExpandedDistribution:
        fn = fn.base_dist
    return fn
