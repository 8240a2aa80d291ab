"""Fast samplers for many outcomes at once, each with its own key.

JAX's samplers loop until the last of many elements is accepted. Here, a count takes one uniform
number, or one normal number if its rate is large. A gamma takes the first accepted of a few tries.
The module's other distributions are built from these.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax import Array, lax
from numpyro.distributions.discrete import ZeroInflatedProbs

__all__ = ["drawn"]

_LARGE = 64.0  # For larger rates, the square of a normal number is as accurate.
_LONGEST = 160  # At smaller rates, a count exceeds this with probability below 1e-20.
_TRIES = 4  # Each try of a gamma is accepted with probability 0.95.


def drawn(fn: Any, rng_key: Array) -> Array:
    """Draws from a scalar distribution: with a fast sampler if there is one, else ``fn.sample``."""
    kind = type(fn)
    if kind is dist.Poisson:
        return _poisson(rng_key, fn.rate).astype(jnp.int32)
    if isinstance(fn, dist.GammaPoisson):  # negative binomial
        first, second = jax.random.split(rng_key)
        rate = _gamma(first, fn.concentration) / fn.rate
        return _poisson(second, rate).astype(jnp.int32)
    if isinstance(fn, ZeroInflatedProbs):
        first, second = jax.random.split(rng_key)
        none = jax.random.bernoulli(second, fn.gate)
        return jnp.where(none, 0, drawn(fn.base_dist, first))
    if kind is dist.Gamma:
        return _gamma(rng_key, fn.concentration) / fn.rate
    if kind is dist.Beta:
        first, second = jax.random.split(rng_key)
        one, other = _gamma(first, fn.concentration1), _gamma(second, fn.concentration0)
        return jnp.clip(one / (one + other), 1e-7, 1 - 1e-7)
    if kind is dist.StudentT:
        first, second = jax.random.split(rng_key)
        spread = jnp.sqrt(fn.df / (2 * _gamma(first, fn.df / 2)))
        return fn.loc + fn.scale * spread * jax.random.normal(second, jnp.shape(spread))
    return fn.sample(rng_key)


def _gamma(rng_key: Array, shape: Any) -> Array:
    """A gamma of scale 1: the first accepted of some tries by Marsaglia and Tsang (2000)."""
    shape = jnp.asarray(shape, jnp.result_type(float))
    normal_key, uniform_key, boost_key = jax.random.split(rng_key, 3)
    few = shape < 1
    level = jnp.where(few, shape + 1, shape) - 1 / 3
    normal = jax.random.normal(normal_key, (_TRIES, *shape.shape), shape.dtype)
    uniform = jax.random.uniform(uniform_key, normal.shape, shape.dtype, minval=1e-30)
    cube = (1 + normal / jnp.sqrt(9 * level)) ** 3
    good = cube > 0
    log_cube = jnp.log(jnp.where(good, cube, 1))
    good &= jnp.log(uniform) < normal**2 / 2 + level * (1 - cube + log_cube)
    found = jnp.ones_like(shape)  # the mean, if no try is accepted: once in 150,000 draws
    for one, accepted in zip(cube[::-1], good[::-1], strict=True):
        found = jnp.where(accepted, one, found)
    boost = jax.random.uniform(boost_key, shape.shape, shape.dtype, minval=1e-30)
    return jnp.maximum(level * found * jnp.where(few, boost ** (1 / shape), 1), 1e-30)


def _poisson(rng_key: Array, rate: Any) -> Array:
    r"""Inverts the distribution function, or squares a normal number if the rate is large.

    With :math:`s^2 = \lambda - 0.2`, the integer nearest to :math:`(s + z / 2)^2 - 0.05` has mean
    :math:`\lambda` and variance :math:`\lambda` up to 0.01.
    """
    rate = jnp.asarray(rate, jnp.result_type(float))
    large = rate > _LARGE
    few = jnp.where(large, 1.0, rate)
    uniform = jax.random.uniform(rng_key, rate.shape, rate.dtype)

    def more(carry: tuple[Array, ...]) -> Array:
        count, _, rest = carry
        return jnp.any(rest >= 0) & (jnp.max(count) < _LONGEST)

    def add(carry: tuple[Array, ...]) -> tuple[Array, ...]:
        count, chance, rest = carry
        below = rest >= 0
        count = count + below
        chance = jnp.where(below, chance * few / jnp.maximum(count, 1), chance)
        return count, chance, jnp.where(below, rest - chance, rest)

    first = jnp.exp(-few)
    begin = jnp.zeros_like(rate), first, uniform - first
    small = lax.while_loop(more, add, begin)[0]
    normal = jax.scipy.special.ndtri(jnp.clip(uniform, 1e-7, 1 - 1e-7))
    root = jnp.sqrt(jnp.maximum(rate - 0.2, 0)) + normal / 2
    found = jnp.where(large, jnp.maximum(jnp.round(root**2 - 0.05), 0), small)
    return jnp.where(jnp.isfinite(rate) & (rate >= 0), found, -1)
