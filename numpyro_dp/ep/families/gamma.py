r"""Gamma, beta and Dirichlet families.

The coefficients of logarithms are shapes and concentrations minus 1, so the natural parameters of
the constant function are zeros. For a shape below about 0.01 in single precision, the natural
parameter is close to -1 and holds fewer than 5 digits of the shape.

A fixed number of Newton steps turns mean parameters into natural parameters. The equations use
:math:`e(a) = \log a - \psi(a) \in (1/2a, 1/a)` and its derivative. A series computes e without
cancellation. Newton's method solves for :math:`\log a`, in which :math:`\log e` is nearly linear.

Reference:
    Wainwright, Jordan (2008), section 3; Minka (2000), Estimating a Dirichlet Distribution, and
    Minka (2002), Estimating a Gamma Distribution, for the inverse maps; Abramowitz, Stegun (1964),
    6.3.18, for the series.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax import Array, lax
from jax.scipy.special import digamma, logsumexp
from jaxtyping import Bool, Float

from numpyro_dp._validate import check_int
from numpyro_dp.ep.families.base import (
    Family,
    Natural,
    Number,
    all_finite,
    full,
    least_log,
    unit,
    unwrap,
)

__all__ = [
    "beta",
    "dirichlet",
    "excess",
    "gamma",
    "mean_logs",
    "solve_concentration",
    "solve_shape",
]

_SHIFT = 8  # added to small arguments, because the series is accurate to 1e-12 from here
_SERIES = (1 / 12, -1 / 120, 1 / 252, -1 / 240, 1 / 132, -691 / 32760, 1 / 12)
_STEPS = 20
_LONGEST = 2.0  # longest Newton step in the logarithm


def gamma(shape: tuple[int, ...] = ()) -> Family:
    r"""Returns the family of independent gamma distributions.

    The natural parameters are ``log`` :math:`a - 1` and ``rate`` :math:`b`, both with this shape.
    The statistics are :math:`(\log z, -z)`.
    ``project`` raises :math:`a` and :math:`b` separately to the floor. ``from_dist`` takes Gamma
    and Exponential.

    Args:
        shape: Shape of one value.

    Example:
        >>> import jax.numpy as jnp
        >>> natural = {"log": jnp.array(1.0), "rate": jnp.array(4.0)}
        >>> float(gamma().to_dist(natural).mean)
        0.5
    """
    _check_shape(shape)
    name = f"gamma({shape})"
    return Family(
        name=name,
        unit=unit(log=shape, rate=shape),
        statistics=lambda z: {"log": jnp.log(z), "rate": -z},
        to_natural=_gamma_to_natural,
        is_valid=_gamma_is_valid,
        project=_gamma_project,
        to_dist=lambda natural: _joint(dist.Gamma(natural["log"] + 1, natural["rate"])),
        from_dist=partial(_gamma_from_dist, name, shape),
    )


def beta(shape: tuple[int, ...] = ()) -> Family:
    r"""Returns the family of independent beta distributions.

    The natural parameters are ``log`` :math:`\alpha - 1` and ``log_complement`` :math:`\beta - 1`,
    both with this shape. The statistics are :math:`(\log z, \log(1 - z))`.
    ``project`` raises :math:`\alpha` and :math:`\beta` to the floor. ``from_dist`` takes Beta.

    Args:
        shape: Shape of one value.

    Example:
        >>> import jax.numpy as jnp
        >>> natural = {"log": jnp.array(0.0), "log_complement": jnp.array(2.0)}
        >>> float(beta().to_dist(natural).mean)
        0.25
    """
    _check_shape(shape)
    name = f"beta({shape})"
    return Family(
        name=name,
        unit=unit(log=shape, log_complement=shape),
        statistics=lambda z: {"log": jnp.log(z), "log_complement": jnp.log1p(-z)},
        to_natural=_beta_to_natural,
        is_valid=_above_minus_one,
        project=_raise_logs,
        to_dist=_beta_to_dist,
        from_dist=partial(_beta_from_dist, name, shape),
    )


def dirichlet(size: int) -> Family:
    r"""Returns the family of Dirichlet distributions.

    The natural parameter is ``log`` :math:`\alpha - 1` of shape ``(size,)``. The statistic is
    :math:`\log z`. ``project`` raises each :math:`\alpha_i` to the floor. ``from_dist`` takes
    Dirichlet.

    Args:
        size: Number of proportions, at least 2.

    Example:
        >>> import jax.numpy as jnp
        >>> dirichlet(3).to_dist({"log": jnp.array([0.0, 1.0, 0.0])}).mean
        Array([0.25, 0.5 , 0.25], dtype=float32)
    """
    check_int("size", size, low=2, remedy="The number of proportions.")
    name = f"dirichlet({size})"
    return Family(
        name=name,
        unit=unit(log=(size,)),
        statistics=lambda z: {"log": jnp.log(z)},
        to_natural=lambda mean: {"log": solve_concentration(mean["log"]) - 1},
        is_valid=_above_minus_one,
        project=_raise_logs,
        to_dist=lambda natural: dist.Dirichlet(natural["log"] + 1),
        from_dist=partial(_dirichlet_from_dist, name, size),
    )


def _gamma_to_natural(mean: Natural) -> Natural:
    value = -mean["rate"]
    shape = solve_shape(jnp.log(value) - mean["log"])
    return {"log": shape - 1, "rate": shape / value}


def _gamma_is_valid(natural: Natural) -> Bool[Array, ""]:
    inside = jnp.all(natural["log"] > -1) & jnp.all(natural["rate"] > 0)
    return inside & all_finite(natural)


def _gamma_project(natural: Natural, floor: Number) -> Natural:
    rate = natural["rate"]
    least = jnp.asarray(floor, rate.dtype)
    return {"log": least_log(natural["log"], floor), "rate": jnp.maximum(rate, least)}


def _gamma_from_dist(name: str, shape: tuple[int, ...], given: Any) -> Natural:
    base = unwrap(name, given, (dist.Gamma, dist.Exponential), shape)
    rate = full(base.rate, shape)
    if isinstance(base, dist.Exponential):
        return {"log": jnp.zeros_like(rate), "rate": rate}
    return {"log": full(base.concentration, shape) - 1, "rate": rate}


def _beta_to_natural(mean: Natural) -> Natural:
    means = jnp.stack([mean["log"], mean["log_complement"]], -1)
    concentration = solve_concentration(means)
    return {"log": concentration[..., 0] - 1, "log_complement": concentration[..., 1] - 1}


def _beta_to_dist(natural: Natural) -> dist.Distribution:
    return _joint(dist.Beta(natural["log"] + 1, natural["log_complement"] + 1))


def _beta_from_dist(name: str, shape: tuple[int, ...], given: Any) -> Natural:
    base = unwrap(name, given, (dist.Beta,), shape)
    return {
        "log": full(base.concentration1, shape) - 1,
        "log_complement": full(base.concentration0, shape) - 1,
    }


def _dirichlet_from_dist(name: str, size: int, given: Any) -> Natural:
    base = unwrap(name, given, (dist.Dirichlet,), (size,))
    return {"log": full(base.concentration, (size,)) - 1}


def _above_minus_one(natural: Natural) -> Bool[Array, ""]:
    inside = jnp.array([jnp.all(value > -1) for value in natural.values()])
    return jnp.all(inside) & all_finite(natural)


def _raise_logs(natural: Natural, floor: Number) -> Natural:
    return {name: least_log(value, floor) for name, value in natural.items()}


def _joint(given: dist.Distribution) -> dist.Distribution:
    """Makes all batch dimensions part of one value."""
    return given.to_event(len(given.batch_shape)) if given.batch_shape else given


def _check_shape(shape: tuple[int, ...]) -> None:
    if not isinstance(shape, tuple):
        raise TypeError(
            f"Expected a tuple of sizes, got shape={shape!r}. Write shape=(3,), or omit shape."
        )
    for size in shape:
        check_int("size", size, low=1, remedy="Each size of shape counts entries.")


@jax.jit
def excess(a: Float[Array, ...]) -> Float[Array, ...]:
    r"""Returns :math:`\log a - \psi(a)` with a small relative error for all :math:`a > 0`."""
    small = a < _SHIFT
    inverse = 1 / jnp.where(small, a + _SHIFT, a)
    series = jnp.zeros_like(a)
    for coefficient in reversed(_SERIES):
        series = coefficient + jnp.square(inverse) * series
    steps = jnp.arange(_SHIFT, dtype=a.dtype)
    recurrence = jnp.sum(1 / (a[..., None] + steps), -1) - jnp.log1p(_SHIFT / a)
    return inverse * (0.5 + inverse * series) + jnp.where(small, recurrence, 0)


@jax.jit
def solve_shape(target: Float[Array, ...]) -> Float[Array, ...]:
    r"""Returns the :math:`a` with ``excess(a) == target``, or NaN unless ``target`` > 0."""
    goal = jnp.log(target)

    def log_excess(log_shape: Array) -> Array:
        return jnp.log(excess(jnp.exp(log_shape)))

    def step(_: int, log_shape: Array) -> Array:
        value, slope = jax.jvp(log_excess, (log_shape,), (jnp.ones_like(log_shape),))
        return log_shape - jnp.clip((value - goal) / slope, -_LONGEST, _LONGEST)

    start = -math.log(2) - goal  # for large a, excess(a) tends to 1 / (2 a) from above
    return jnp.exp(lax.fori_loop(0, _STEPS, step, start.astype(goal.dtype)))


@jax.jit
def mean_logs(concentration: Float[Array, "... n"]) -> Float[Array, "... n"]:
    r"""Returns :math:`\psi(\alpha_i) - \psi(\sum_j \alpha_j)`, the mean of the log proportions."""
    total = jnp.sum(concentration, -1, keepdims=True)
    return jnp.log(concentration / total) - excess(concentration) + excess(total)


@jax.jit
def solve_concentration(means: Float[Array, "... n"]) -> Float[Array, "... n"]:
    r"""Returns the concentrations with ``mean_logs(concentration) == means``.

    Runs Newton's method for :math:`v = \log\alpha`. With :math:`k(a) = a\psi'(a) - 1`,
    :math:`\bar\alpha = \sum_j\alpha_j` and :math:`p = \alpha / \bar\alpha`, the Jacobian is
    :math:`\mathrm{diag}(1 + k(\alpha_i)) - (1 + k(\bar\alpha))\,1 p^\top`, which has an inverse in
    closed form.

    Returns:
        The concentrations, or NaN unless :math:`\sum_i e^{m_i} < 1`. All means of Dirichlet
        distributions satisfy this.
    """
    size = means.shape[-1]

    def total(values: Array) -> Array:
        return jnp.sum(values, -1, keepdims=True)

    def step(_: int, logs: Array) -> Array:
        concentration = jnp.exp(logs)
        residual = mean_logs(concentration) - means
        curvature, of_total = _curvature(concentration), _curvature(total(concentration))
        weights = concentration / total(concentration) / (1 + curvature)
        determinant = total(weights * (curvature - of_total))
        shift = (1 + of_total) * total(weights * residual) / determinant
        change = (residual + shift) / (1 + curvature)
        return logs - jnp.clip(change, -_LONGEST, _LONGEST)

    gap = -logsumexp(means, axis=-1, keepdims=True)
    guess = jnp.where(gap > 0, (size - 1) / (2 * gap), jnp.nan)  # the sum, good if it is large
    start = jnp.log(_inverse_digamma(means + digamma(guess)))
    return jnp.exp(lax.fori_loop(0, _STEPS, step, start))


def _curvature(a: Array) -> Array:
    r"""Returns :math:`a\psi'(a) - 1 > 0`."""
    return -a * jax.jvp(excess, (a,), (jnp.ones_like(a),))[1]


def _inverse_digamma(y: Array) -> Array:
    """A rough inverse of the digamma function (Minka 2000, appendix C)."""
    switch, euler = -2.22, 0.5772156649
    low = -1 / (jnp.minimum(y, switch) + euler)
    return jnp.where(y >= switch, jnp.exp(jnp.maximum(y, switch)) + 0.5, low)
