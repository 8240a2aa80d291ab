r"""A normal prior, and a normal likelihood of released values: how both are found and multiplied.

Released scores follow a linear model with errors in its matrix,

.. math::
    S_j = H (\phi - m_j) + \text{noise}_j + E_j (\phi - m_j), \qquad
    \phi \mid \theta \sim N(\theta, \kappa H^{-1}), \qquad \theta \sim N(p_0, \Lambda^{-1}).

All drivers that release scores decode them with :func:`decode`. They differ in what they know of H,
and in its errors E. Decoding needs a normal prior. Its result is divided by that prior again, so
that the likelihood that is left can be multiplied by the model's own prior
(:mod:`numpyro_dp.posterior.prior`).

Everything here is a function of released values and has no privacy cost.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cached_property

import numpy as np
from scipy.special import softmax

from numpyro_dp.posterior.algebra import inverse, roots, solve, symmetric

SCALE_SD = 3.0  # prior sd of a curvature's size, relative to the guess of it
SMALLEST_SCALE = 0.05  # smallest size of a curvature, relative to the guess of it
LEAST_SPREAD = 0.01  # of a curvature around its guess, relative to its level
_ROUNDS = 24  # most updates of the covariance of the errors, which depends on theta
_UNDAMPED = 4  # number of rounds with a full step. Later rounds take half a step
_SETTLED = 0.02  # change of the mean, in posterior sds, that ends the rounds
_SETTLED_VARIANCE = 0.5  # largest change of the log of a variance then


@dataclasses.dataclass(frozen=True, eq=False)
class Prior:
    """The normal prior that is used for decoding.

    Attributes:
        mean: Mean (d,).
        precision: Precision matrix (d, d), positive definite.
    """

    mean: np.ndarray
    precision: np.ndarray

    @cached_property
    def covariance(self) -> np.ndarray:
        """The inverse of the precision (d, d)."""
        return inverse(self.precision)

    def updated(self, precision: np.ndarray, linear: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Mean and covariance of its product with a normal likelihood of natural parameters."""
        covariance = inverse(precision + self.precision)
        return covariance @ (linear + self.precision @ self.mean), covariance


def denoise_curvature(
    noisy: np.ndarray,
    template: np.ndarray,
    noise_sd: float,
    entries: float | None = None,
    noise_share: float = 1.0,
    least_spread: float = LEAST_SPREAD,
) -> tuple[np.ndarray, float, float]:
    r"""Shrinks a noisy curvature towards a guess of its shape.

    The model is :math:`A = H + t G` with :math:`H \sim c B + v G'`. The size :math:`c` has the
    prior :math:`N(1, 3^2)`. The logarithm of the spread :math:`v` is uniform on a grid, up to that
    of tr(cB) / d. In few dimensions a release does not tell it, and the guess is often good.

    Args:
        noisy: The released matrix A, symmetric (d, d).
        template: The guess B, positive definite (d, d).
        noise_sd: The noise t on the diagonal.
        entries: Number of released pairs, by default all. Other pairs are 0 in A and B.
        noise_share: Sum of the variances of all entries of the noise, relative to that of t G. If t
            is a bound, a spread would otherwise seem to be noise.
        least_spread: Smallest spread, relative to tr(cB) / d.

    Returns:
        The posterior mean of H (d, d), the GOE variance of its error, and the part of the variance
        of c that is left in it.
    """
    size = len(noisy)
    entries = size * (size + 1) / 2 if entries is None else entries
    smallest = 1e-9 * np.trace(template) / size  # noise of 0 would divide by 0
    noise = max(noise_sd, smallest) ** 2
    size_mean, size_variance = size_of(noisy, template, noise)
    guess = size_mean * template
    spread = (np.geomspace(least_spread, 1, 60) * np.trace(guess) / size) ** 2
    gain, error = gain_of(noisy - guess, entries, spread, noise, noise_share)
    return guess + gain * (noisy - guess), error, float(size_variance * (1 - gain) ** 2)


def gain_of(
    gap: np.ndarray, entries: float, spread: np.ndarray, noise: float, noise_share: float = 1.0
) -> tuple[float, float]:
    """Part of a gap between a noisy matrix and its guess that is no noise, and its error variance.

    Args:
        gap: The gap, or a part of it (rows, columns).
        entries: Number of its independent entries.
        spread: Variances that the part without noise may have.
        noise: Variance of the noise.
        noise_share: As for :func:`denoise_curvature`.
    """
    distance = np.sum(gap**2)
    total = spread + noise_share * noise
    weight = softmax(-(entries * np.log(total) + distance / total) / 2)
    # The share is left out here: if the noise is only a bound, the matrix is shrunk more.
    gains = spread / (spread + noise)
    gain = weight @ gains
    # The gain is uncertain too. Its error multiplies the distance to the guess.
    return float(gain), float(noise * gain + weight @ (gains - gain) ** 2 * distance / entries)


def size_of(
    noisy: np.ndarray, template: np.ndarray, noise: float, scale_sd: float = SCALE_SD
) -> tuple[float, float]:
    """Size c of a noisy matrix c B + noise, relative to B, with prior N(1, sd^2), and its variance.

    Noise may make it negative, but a curvature is not. So it is at least .05.
    """
    variance = 1 / (np.sum(template**2) / noise + scale_sd**-2)
    mean = variance * (np.sum(noisy * template) / noise + scale_sd**-2)
    return float(max(mean, SMALLEST_SCALE)), float(variance)


def believed_part(values: np.ndarray, doubt: np.ndarray | float) -> np.ndarray:
    r"""Eigenvalues x of a curvature as they count, :math:`x^3 / (x^2 + \text{doubt})`, at least 0.

    Without information from the records, an eigenvalue is not 0 but noise. It would count as
    information.
    """
    values = np.maximum(values, 0)
    return values**3 / np.maximum(values**2 + doubt, 1e-300)


def matrix_error(moment: np.ndarray, variances: np.ndarray | None = None) -> np.ndarray:
    """Twice the covariance of E a and E b for a GOE error E of variance 1 and ``moment`` = a b'.

    Args:
        moment: The matrix a b', or a mean of such matrices (d, d).
        variances: The GOE variance of each entry of E, by default 1 (d, d).
    """
    if variances is None:
        return np.trace(moment) * np.eye(len(moment)) + moment.T
    return np.diag(variances @ np.diag(moment)) + variances * moment.T


def decode(
    prior: Prior,
    targets: np.ndarray,
    curvature: np.ndarray,
    sampling: np.ndarray,
    errors: Callable[[np.ndarray, np.ndarray], np.ndarray],
    begin: tuple[np.ndarray, np.ndarray],
) -> tuple[np.ndarray, np.ndarray]:
    r"""Mean (d,) and covariance (d, d) of theta in the linear model of the released scores.

    Let R be the covariance of the errors and X = R^-1 (I, ..., I)'. Then, with
    :math:`J = H (I, ..., I) X H` and :math:`H_+ = H / \kappa`, the posterior has

    .. math:: V^{-1} = \Lambda + J (J + H_+)^{-1} H_+, \qquad
        m = V (H_+ (J + H_+)^{-1} H X' y + \Lambda p_0), \qquad y_j = S_j + H m_j.

    R depends on m and V, because an error of H grows with the distance from the points. So rounds
    follow until both settle.

    Args:
        prior: The normal prior of theta.
        targets: The values y (K, d).
        curvature: The part of H that may count as information (d, d).
        sampling: The inverse of the sampling covariance of phi, positive definite (d, d).
        errors: Returns R (K d, K d) at a mean and a covariance.
        begin: A first guess of both.
    """
    mean, covariance = begin
    everywhere = np.tile(np.eye(targets.shape[1]), (len(targets), 1))
    for index in range(_ROUNDS):
        weights = solve(errors(mean, covariance), everywhere)
        precision = symmetric(curvature @ (everywhere.T @ weights) @ curvature)
        pull = curvature @ (weights.T @ targets.ravel())
        parts = solve(precision + sampling, np.column_stack([sampling, pull]))
        new_covariance = inverse(prior.precision + symmetric(precision @ parts[:, :-1]))
        new_mean = new_covariance @ (sampling @ parts[:, -1] + prior.precision @ prior.mean)
        sds = np.sqrt(np.maximum(np.diag(new_covariance), 1e-300))
        settled = np.max(np.abs(new_mean - mean) / sds) < _SETTLED
        settled &= np.max(np.abs(np.log(sds**2 / np.diag(covariance)))) < _SETTLED_VARIANCE
        # A farther mean has larger errors, which pull it back. Half steps end such a swing.
        step = 1.0 if settled or index < _UNDAMPED else 0.5
        mean = mean + step * (new_mean - mean)
        covariance = covariance + step * (new_covariance - covariance)
        if settled and index > 0:
            break
    return mean, covariance


def released_likelihood(
    mean: np.ndarray, covariance: np.ndarray, prior: Prior
) -> tuple[np.ndarray, np.ndarray]:
    r"""Returns the Gaussian likelihood of the released values, for use with another prior.

    The likelihood is :math:`\exp(b' \theta - \theta' P \theta / 2)` with
    :math:`P = V^{-1} - \Lambda`, without its negative part, and
    :math:`b = (P + \Lambda) m - \Lambda p_0`.

    Args:
        mean: Posterior mean m (d,).
        covariance: Posterior covariance V (d, d).
        prior: The prior that was used for decoding.

    Returns:
        P, positive semidefinite (d, d), and b (d,).
    """
    root, _ = roots(prior.precision)
    # Ratios of posterior to prior variance, along directions that are independent under both. In
    # these coordinates the prior is standard normal, so the result does not depend on units.
    values, vectors = np.linalg.eigh(symmetric(root.T @ covariance @ root))
    # A decode may be wider than its prior, but a likelihood cannot take information away.
    ratios = np.clip(values, 1e-14, 1.0)
    turned = root @ vectors
    precision = symmetric((turned * (1 / ratios - 1)) @ turned.T)
    return precision, precision @ mean + prior.precision @ (mean - prior.mean)
