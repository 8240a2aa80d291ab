r"""Normal distributions in expectation propagation: cavities, and sites from slopes of log Z.

With a cavity N(m, V) and the evidence :math:`Z = \int p(x \mid z) N(z; m, V)\, dz` of one record,

.. math::
    g = \frac{\partial \log Z}{\partial m}, \quad H = g g^T - 2\frac{\partial \log Z}{\partial V},
    \qquad m' = m + V g, \quad V' = V - V H V

are the moments of the tilted distribution. The site is the tilted distribution divided by the
cavity. In coordinates centred at m its natural parameters are

.. math::
    \Lambda_s = (I - HV)^{-1} H, \qquad \eta_s - \Lambda_s m = (I - HV)^{-1} g.

They do not cancel for records with little information. Each eigenvalue of I - HV is the ratio of a
tilted to a cavity variance. A floor on these ratios limits how much one record narrows a posterior.

A precision is a matrix or a vector (its diagonal). Its number of axes shows which.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float

LARGEST_NARROWING = 0.1  # smallest ratio of a tilted to a cavity variance

Natural = dict[str, Array]
Precision = Float[Array, "dim dim"] | Float[Array, " dim"]


class Cavity(NamedTuple):
    """Moments of a normal cavity.

    Attributes:
        mean: Shape ``(dim,)``.
        covariance: A matrix or its diagonal, like the precision.
    """

    mean: Float[Array, " dim"]
    covariance: Precision

    def variance_along(self, direction: Float[Array, " dim"]) -> Float[Array, ""]:
        """Variance of the inner product with a direction."""
        if self.covariance.ndim == 2:
            return direction @ self.covariance @ direction
        return jnp.sum(self.covariance * direction**2)


def cavity_of(natural: Natural) -> Cavity:
    """Returns the moments of a normal distribution with given natural parameters."""
    linear, precision = natural["linear"], natural["precision"]
    if precision.ndim < 2:
        return Cavity(linear / precision, 1 / precision)
    covariance, *_ = inverse_and_log_det(precision)
    return Cavity(covariance @ linear, covariance)


def centre(natural: Natural, at: Float[Array, " dim"]) -> Natural:
    """Moves the origin to ``at``. The linear part becomes the slope at this point."""
    linear, precision = natural["linear"], natural["precision"]
    slope = precision @ at if precision.ndim == 2 else precision * at
    return {"linear": linear - slope, "precision": precision}


def counted_share(value: Array, sd: Array) -> Array:
    """Returns x^2 / (x^2 + sd^2): near 1 far above the noise, near 0 within it, 1 without noise."""
    square = value**2
    return jnp.where(sd > 0, square / jnp.maximum(square + sd**2, jnp.finfo(square.dtype).tiny), 1)


def shrunk(natural: Natural, sd: Array) -> Natural:
    """Shrinks precision and slope along each eigenvector, by how far its eigenvalue exceeds noise.

    Args:
        natural: Natural parameters of all records, centred at a mean.
        sd: Standard deviation at which an eigenvalue counts half. Negative ones count 0.
    """
    linear, precision = natural["linear"], natural["precision"]
    if precision.ndim == 2:
        values, turn = jnp.linalg.eigh((precision + precision.T) / 2)
        rotate = functools.partial(jnp.matmul, precision=lax.Precision.HIGHEST)
        own = shrunk({"linear": rotate(turn.T, linear), "precision": values}, sd)
        matrix = rotate(turn * own["precision"], turn.T)
        return {"linear": rotate(turn, own["linear"]), "precision": (matrix + matrix.T) / 2}
    # Without noise too, a slope along a negative eigenvalue does not count: only the prior would
    # hold it back. Slope and eigenvalue shrink alike, so that the optimum along the eigenvector
    # stays.
    share = jnp.where(precision < 0, 0, counted_share(precision, sd))
    return {"linear": share * linear, "precision": share * jnp.maximum(precision, 0)}


def site_along(cavity: Cavity, direction: Float[Array, " dim"], g: Array, h: Array) -> Natural:
    r"""The site of a record whose likelihood depends on z only through :math:`t = \phi\cdot z`.

    Args:
        cavity: Moments of the cavity.
        direction: :math:`\phi`.
        g: Slope of log Z in the mean of t.
        h: :math:`g^2 - 2\,\partial\log Z/\partial v` with the variance v of t.

    Returns:
        Natural parameters, centred at the mean of the cavity.
    """
    if cavity.covariance.ndim < 2:
        return site_from_slopes(cavity, g * direction, h * direction**2)
    # Along the direction alone, I - HV differs from the identity.
    ratio = jnp.maximum(1 - h * cavity.variance_along(direction), LARGEST_NARROWING)
    precision = h / ratio * jnp.outer(direction, direction)
    return {"linear": g / ratio * direction, "precision": precision}


def site_from_slopes(cavity: Cavity, g: Float[Array, " dim"], h: Precision) -> Natural:
    """The site of a record with any likelihood.

    Args:
        cavity: Moments of the cavity.
        g: Slope of log Z in the mean.
        h: H above. For a diagonal covariance its diagonal.

    Returns:
        Natural parameters, centred at the mean of the cavity.
    """
    if cavity.covariance.ndim < 2:
        ratio = jnp.maximum(1 - h * cavity.covariance, LARGEST_NARROWING)
        return {"linear": g / ratio, "precision": h / ratio}
    h = (h + h.T) / 2
    # The smallest ratio of variances is 1 minus this eigenvalue.
    narrowing = _largest_eigenvalue(h @ cavity.covariance)
    h = h * jnp.minimum(1, (1 - LARGEST_NARROWING) / jnp.maximum(narrowing, 1e-6))
    # I - HV = (P - H) V with P the cavity's precision. Both factors are symmetric, so each can be
    # inverted as a symmetric matrix.
    precision, *_ = inverse_and_log_det(cavity.covariance)
    narrowed, *_ = inverse_and_log_det(precision - h)
    # (I - HV)^-1 H = H + H (P - H)^-1 H, which does not invert H.
    site = h + h @ narrowed @ h
    return {"linear": g + h @ (narrowed @ g), "precision": (site + site.T) / 2}


def inverse_and_log_det(
    matrix: Float[Array, "dim dim"],
) -> tuple[Float[Array, "dim dim"], Bool[Array, ""], Float[Array, ""]]:
    """Inverts a positive definite matrix by sweeping its pivots, and tests whether it is one.

    It avoids LAPACK, because sites of many records are computed in one batch. Batches of LAPACK
    calls in one loop can deadlock on a CPU with few cores (jaxlib 0.10).
    """

    def sweep(k: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        swept, definite, log_det = carry
        pivot = swept[k, k]
        row, column = swept[k] / pivot, swept[:, k]
        own = jnp.arange(len(swept)) == k
        rest = swept - jnp.outer(jnp.where(own, 0, column), jnp.where(own, 0, row))
        edge = jnp.where(own[:, None], row, jnp.where(own, column[:, None] / pivot, rest))
        swept = jnp.where(own[:, None] & own, -1 / pivot, edge)
        # All pivots of a positive definite matrix are positive. NaN is not.
        return swept, definite & (pivot > 0), log_det + jnp.log(pivot)

    start = matrix, jnp.asarray(True), jnp.zeros((), matrix.dtype)
    swept, definite, log_det = lax.fori_loop(0, len(matrix), sweep, start)
    # A matrix that is swept at each pivot is minus its inverse.
    return -(swept + swept.T) / 2, definite, log_det


def _largest_eigenvalue(matrix: Float[Array, "dim dim"]) -> Float[Array, ""]:
    """An upper bound of the largest eigenvalue of a matrix that is similar to a symmetric one.

    A shift makes all eigenvalues positive, and the bound is the trace of the 64th power to the
    power 1 / 64. For the shifted matrix it is too large by at most a factor dim ** (1 / 64).
    """
    shift = jnp.linalg.norm(matrix) * 1.001  # above the norm, so shifted eigenvalues are not all 0
    power = (matrix + shift * jnp.eye(len(matrix), dtype=matrix.dtype)) / jnp.maximum(shift, 1e-30)
    log_scale = jnp.zeros((), matrix.dtype)
    # Six squarings give the 64th power. Each is scaled, or it would overflow.
    for _ in range(6):
        power = power @ power
        size = jnp.maximum(jnp.trace(power), 1e-30)
        power, log_scale = power / size, 2 * log_scale + jnp.log(size)
    return jnp.where(shift > 0, shift * (jnp.exp(log_scale / 64) - 1), 0)
