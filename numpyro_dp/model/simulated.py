"""Samplers of outcomes that take the same number of operations for every record.

JAX's samplers loop until the last of many elements is accepted, so that a step with one large rate
takes longer. Here, a count inverts its distribution function in a fixed number of steps, or by an
expansion for large rates. A gamma takes the first accepted of a few tries.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array, lax
from jax.typing import ArrayLike
from numpyro.distributions.discrete import ZeroInflatedProbs

_LARGE = 10.0  # For larger means, the expansion is wrong in less than 1 of 2,000 draws.
# At smaller means, a count exceeds this with a probability below 1e-11. A uniform number of float32
# resolves 1e-7, so the tail beyond that is never drawn.
_STEPS = 40
# Single values whose distribution function NumPyro inverts.
_INVERTED = (
    dist.Normal, dist.Laplace, dist.Logistic, dist.Cauchy, dist.Gumbel, dist.Exponential,
    dist.Uniform,
)  # fmt: skip
_TRIES = 4  # Each try of a gamma is accepted with probability 0.95.


def drawn(fn: Any, rng_key: Array, levels: Array | None = None) -> Array:
    """Draws from a distribution: in a fixed number of operations if it can, else ``fn.sample``.

    Args:
        fn: The distribution.
        rng_key: Key of the draw.
        levels: Two independent uniform numbers (2,), for a single value. If its distribution
            function can be inverted, the draw is the value at the first level. A gamma takes it
            for its first try. A mixture takes the second one for what is drawn last. So draws with
            even levels are evenly spread.
    """
    if not type(fn).__module__.startswith("numpyro."):  # a subclass has its own sampler
        return fn.sample(rng_key)
    first, second = jax.random.split(rng_key)
    level, last = (None, None) if levels is None else levels
    kind = type(fn)  # narrowed in place of fn: NumPyro's own types of parameters are too wide

    def whole(values: ArrayLike) -> Array:  # each entry of a batch is drawn by itself
        return jnp.broadcast_to(values, fn.batch_shape)

    if issubclass(kind, dist.Poisson):
        return _poisson(rng_key, whole(fn.rate), level).astype(jnp.int32)
    if issubclass(kind, dist.GammaPoisson):  # negative binomial
        rate = _gamma(first, whole(fn.concentration), level) / fn.rate
        return _poisson(second, rate, last).astype(jnp.int32)
    if issubclass(kind, dist.BinomialProbs | dist.BinomialLogits):
        return _binomial(rng_key, fn.total_count, whole(fn.probs), level).astype(jnp.int32)
    if issubclass(kind, dist.BetaBinomial):
        probs = _beta(first, whole(fn.concentration1), whole(fn.concentration0))
        return _binomial(second, fn.total_count, probs, level).astype(jnp.int32)
    if issubclass(kind, ZeroInflatedProbs):
        none = jax.random.bernoulli(second, whole(fn.gate))
        return jnp.where(none, 0, drawn(fn.base_dist, first, levels))
    if issubclass(kind, dist.Gamma):
        return _gamma(rng_key, whole(fn.concentration), level) / fn.rate
    if issubclass(kind, dist.Beta):
        return _beta(rng_key, whole(fn.concentration1), whole(fn.concentration0), level, last)
    if issubclass(kind, dist.StudentT):
        df = whole(fn.df)
        spread = jnp.sqrt(df / (2 * _gamma(first, df / 2, level)))
        normal = _normal_of(_uniform(second, df, last))
        return fn.loc + fn.scale * spread * normal
    wrapped = issubclass(kind, dist.Independent | dist.ExpandedDistribution)
    if wrapped and math.prod(fn.shape()) == math.prod(fn.base_dist.shape()):
        return drawn(fn.base_dist, rng_key, levels).reshape(fn.shape())
    if kind.sample is dist.TransformedDistribution.sample:  # such as InverseGamma
        value = drawn(fn.base_dist, rng_key, levels)
        for transform in fn.transforms:
            value = transform(value)
        return value
    if issubclass(kind, dist.MixtureSameFamily) and not fn.event_dim:
        values = drawn(fn.component_distribution, first)
        chosen = fn.mixing_distribution.sample(second)[..., None]
        chosen = jnp.broadcast_to(chosen, (*values.shape[:-1], 1))
        return jnp.take_along_axis(values, chosen, axis=-1)[..., 0]
    if level is not None and issubclass(kind, _INVERTED):
        return fn.icdf(whole(jnp.clip(level, 1e-7, 1 - 1e-7)))
    if level is not None and issubclass(kind, dist.Weibull):
        return fn.scale * whole(-jnp.log1p(-jnp.clip(level, 1e-7, 1 - 1e-7))) ** (
            1 / fn.concentration
        )
    return fn.sample(rng_key)


def _beta(rng_key: Array, one: ArrayLike, other: ArrayLike, *levels: Array | None) -> Array:
    first, second = jax.random.split(rng_key)
    level, last = levels or (None, None)
    one, other = _gamma(first, one, level), _gamma(second, other, last)
    return jnp.clip(one / (one + other), 1e-7, 1 - 1e-7)


def _gamma(rng_key: Array, shape: ArrayLike, level: Array | None = None) -> Array:
    """A gamma of scale 1: the first accepted of some tries by Marsaglia and Tsang (2000)."""
    shape = jnp.asarray(shape, jnp.result_type(float))
    few = shape < 1
    size = jnp.where(few, shape + 1, shape) - 1 / 3
    boost, *uniforms = _uniforms(rng_key, shape, 2 * _TRIES + 1)
    if level is not None:  # for what decides most about the value
        boost = jnp.where(few, level, boost)
        uniforms[0] = jnp.where(few, uniforms[0], level)
    found, done = jnp.ones_like(shape), jnp.zeros(shape.shape, bool)
    # The mean is left if no try is accepted: once in 150,000 draws.
    for one, other in zip(uniforms[::2], uniforms[1::2], strict=True):
        normal = _normal_of(one)
        cube = (1 + normal / jnp.sqrt(9 * size)) ** 3
        log_cube = jnp.log(jnp.where(cube > 0, cube, 1))
        good = (cube > 0) & (jnp.log(other) < normal**2 / 2 + size * (1 - cube + log_cube))
        found, done = jnp.where(good & ~done, cube, found), done | good
    return jnp.maximum(size * found * jnp.where(few, boost ** (1 / shape), 1), 1e-30)


def _poisson(rng_key: Array, rate: ArrayLike, level: Array | None = None) -> Array:
    r"""Inverts the distribution function at a uniform number u.

    If the rate :math:`\lambda` is large, with :math:`\Phi(w) = u`, the count is the integer part of

    .. math::
        \lambda + \sqrt\lambda w + \tfrac{2 + w^2}{6} - \tfrac{2 w + w^3}{72 \sqrt\lambda}
        + \tfrac{-16 + 7 w^2 + 3 w^4}{810 \lambda}.

    Reference:
        M. B. Giles (2016), Algorithm 955: Approximation of the inverse Poisson cumulative
        distribution function, ACM Trans. Math. Softw. 42.
    """
    rate = jnp.asarray(rate, jnp.result_type(float))
    large = rate > _LARGE
    small_rate, large_rate = jnp.where(large, 1.0, rate), jnp.where(large, rate, _LARGE)
    uniform = _uniform(rng_key, rate, level)
    small = _inverted(uniform, jnp.exp(-small_rate), lambda count: small_rate / (count + 1))
    w, root = _normal_of(uniform), jnp.sqrt(large_rate)
    found = large_rate + root * w + (2 + w**2) / 6 - (2 * w + w**3) / (72 * root)
    found += (-16 + 7 * w**2 + 3 * w**4) / (810 * large_rate)
    found = jnp.where(large, jnp.maximum(jnp.floor(found), 0), small)
    return jnp.where(jnp.isfinite(rate) & (rate >= 0), found, -1)


def _binomial(
    rng_key: Array, total: ArrayLike, probs: ArrayLike, level: Array | None = None
) -> Array:
    """Inverts the distribution function of the rarer event, or expands it as Cornish and Fisher."""
    total, probs = (jnp.asarray(x, jnp.result_type(float)) for x in (total, probs))
    total, probs = jnp.broadcast_arrays(total, probs)
    rare = jnp.minimum(probs, 1 - probs)
    large = total * rare > _LARGE
    few, many = jnp.where(large, 0.0, rare), jnp.where(large, rare, 0.5)
    uniform = _uniform(rng_key, probs, level)
    odds = few / (1 - few)
    none = jnp.exp(total * jnp.log1p(-few))
    small = _inverted(uniform, none, lambda count: odds * (total - count) / (count + 1))
    size = jnp.where(large, total, 1.0)
    variance = size * many * (1 - many)
    w, sd = _normal_of(uniform), jnp.sqrt(variance)
    skew, tails = 1 - 2 * many, 1 - 6 * many * (1 - many)  # times sd and variance
    found = size * many + sd * w + 0.5 + skew * (w**2 - 1) / 6
    found += (3 * tails * (w**3 - 3 * w) - 2 * skew**2 * (2 * w**3 - 5 * w) - 3 * w) / (72 * sd)
    found = jnp.clip(jnp.where(large, jnp.floor(found), small), 0, total)
    valid = (probs >= 0) & (probs <= 1) & (total >= 0) & jnp.isfinite(total)
    return jnp.where(valid, jnp.where(probs > rare, total - found, found), -1)


def _uniforms(rng_key: Array, like: Array, number: int) -> list[Array]:
    """Uniform numbers in (0, 1), from one word of the generator for each entry of ``like``.

    The words after the first are mixed from it and a counter (the finaliser of MurmurHash3), which
    takes a tenth of the time. Simulated outcomes need no more: no guarantee rests on them.
    """
    word, salt = jax.random.bits(rng_key, (2, *like.shape), jnp.uint32)
    found = []
    for _ in range(number):
        word = word + np.uint32(0x9E3779B9)
        mixed = _mixed(_mixed(word) + salt)
        found.append(((mixed >> 8).astype(like.dtype) + 0.5) * 2.0**-24)
    return found


def _mixed(word: Array) -> Array:
    word = (word ^ (word >> 16)) * np.uint32(0x85EBCA6B)
    word = (word ^ (word >> 13)) * np.uint32(0xC2B2AE35)
    return word ^ (word >> 16)


def _uniform(rng_key: Array, like: Array, level: Array | None) -> Array:
    if level is None:
        return jax.random.uniform(rng_key, like.shape, like.dtype)
    return jnp.broadcast_to(level, like.shape).astype(like.dtype)


def _inverted(uniform: Array, none: Array, ratio: Callable[[Array], Array]) -> Array:
    """A count with probability ``none`` of 0 and ``ratio(k)`` of k + 1 relative to k."""

    def more(number: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        count, chance, rest = carry
        chance = chance * ratio(number.astype(rest.dtype))
        return count + (rest >= 0), chance, jnp.where(rest >= 0, rest - chance, rest)

    begin = jnp.zeros_like(uniform), none, uniform - none
    return lax.fori_loop(0, _STEPS, more, begin, unroll=8)[0]


def _normal_of(uniform: Array) -> Array:
    # `ndtri` is more exact in tails that no uniform number of float32 reaches, and slower.
    return math.sqrt(2) * lax.erf_inv(jnp.clip(2 * uniform - 1, -1 + 2e-7, 1 - 2e-7))
