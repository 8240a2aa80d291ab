"""Censored distributions of NumPyro: the time at which an event has become so likely, and back."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax import Array
from jax.scipy.special import log_ndtr, ndtri

from numpyro_dp.model.public import UnsupportedModelError

__all__ = ["check", "check_base", "is_censored", "log_tail", "value_at"]

_EDGE = 1e-7  # quantiles nearer to 0 or 1 are infinite in float32


def is_censored(fn: Any) -> bool:
    """Whether a distribution is a censored one, of any kind."""
    return "Censored" in type(fn).__name__


def check(names: tuple[str, ...], scalar: bool) -> None:
    """Raises unless a censored outcome is the only one of a record, and one number."""
    if not scalar:
        raise UnsupportedModelError(
            f"Expected a censored outcome of one number alone, got the sites {list(names)}. "
            "Use DPSVI for this model."
        )


def check_base(name: str, fn: Any) -> None:
    """Raises for censoring from both sides, and where no quantiles are known."""
    if not isinstance(fn, dist.LeftCensoredDistribution | dist.RightCensoredDistribution):
        raise UnsupportedModelError(
            f"Expected censoring from one side, got {type(fn).__name__} at {name!r}. Use DPSVI."
        )
    try:
        value_at(fn, jnp.full((), 0.5))
    except (NotImplementedError, ImportError, AttributeError) as error:
        raise UnsupportedModelError(
            f"Expected a censored distribution with quantiles (icdf), got "
            f"{type(fn.base_dist).__name__} at {name!r}. Weibull, LogNormal and Normal "
            "have them; or use DPSVI."
        ) from error


def log_tail(fn: Any, value: Array) -> Array:
    """Log probability of an outcome beyond a value, on the side on which it is censored."""
    base = _inner(fn.base_dist)
    right = isinstance(fn, dist.RightCensoredDistribution)
    if isinstance(base, dist.Normal):
        away = (value - base.loc) / base.scale
        return log_ndtr(-away if right else away).reshape(())
    if isinstance(base, dist.Weibull) and right:
        return -((value / base.scale) ** base.concentration).reshape(())
    if isinstance(base, dist.Exponential) and right:
        return -(value * base.rate).reshape(())
    return type(fn)(fn.base_dist, True).log_prob(value).reshape(())


def value_at(fn: Any, passed: Array) -> Array:
    """The value beyond which an outcome is with probability ``exp(-passed)``, the shape of that."""
    base = _inner(fn.base_dist)
    right = isinstance(fn, dist.RightCensoredDistribution)
    if isinstance(base, dist.Weibull):  # without icdf in NumPyro
        own = passed if right else -jnp.log1p(-jnp.exp(-passed))
        return base.scale * own ** (1 / base.concentration)
    tail = jnp.exp(-passed) if right else -jnp.expm1(-passed)  # above the value
    if isinstance(base, dist.Normal):
        return base.loc - base.scale * ndtri(jnp.maximum(tail, 1e-30))
    below = jnp.clip(1 - tail, _EDGE, 1 - _EDGE)
    flat = jax.vmap(lambda p: jnp.reshape(fn.base_dist.icdf(p), ()))(below.reshape(-1))
    return flat.reshape(passed.shape)


def _inner(fn: Any) -> Any:
    while type(fn) is dist.ExpandedDistribution:
        fn = fn.base_dist
    return fn
