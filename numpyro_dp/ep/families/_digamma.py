r"""Gamma and Dirichlet parameters from their mean parameters, by a fixed number of Newton steps.

The equations use :math:`e(a) = \log a - \psi(a) \in (1/2a, 1/a)` and its derivative. A series
computes e without cancellation. Newton's method solves for :math:`\log a`, in which :math:`\log e`
is nearly linear.

Reference:
    Minka (2000), Estimating a Dirichlet Distribution; Minka (2002), Estimating a Gamma
    Distribution; Abramowitz, Stegun (1964), 6.3.18, for the series.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.scipy.special import digamma, logsumexp
from jaxtyping import Float

__all__ = ["excess", "mean_logs", "solve_concentration", "solve_shape"]

_SHIFT = 8  # added to small arguments, because the series is accurate to 1e-12 from here
_SERIES = (1 / 12, -1 / 120, 1 / 252, -1 / 240, 1 / 132, -691 / 32760, 1 / 12)
_STEPS = 20
_LONGEST = 2.0  # longest Newton step in the logarithm


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
