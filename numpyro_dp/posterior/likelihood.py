r"""A normal prior, and a normal likelihood of released values: how both are found and multiplied.

Decoding of released values needs a normal prior. Its result is divided by that prior again, so that
the likelihood that is left can be multiplied by the model's own prior
(:mod:`numpyro_dp.posterior.prior`).

Everything here is a function of released values and has no privacy cost.
"""

from __future__ import annotations

import dataclasses
from functools import cached_property

import numpy as np
from scipy.special import softmax

from numpyro_dp.posterior.algebra import inverse, roots, symmetric

SCALE_SD = 3.0  # prior sd of a curvature's size, relative to the guess of it
SMALLEST_SCALE = 0.05  # smallest size of a curvature, relative to the guess of it
LEAST_SPREAD = 0.01  # of a curvature around its guess, relative to its level


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
    distance = np.sum((noisy - guess) ** 2)
    spread = (np.geomspace(least_spread, 1, 60) * np.trace(guess) / size) ** 2
    total = spread + noise_share * noise
    weight = softmax(-(entries * np.log(total) + distance / total) / 2)
    # The share is left out here: if the noise is only a bound, the matrix is shrunk more.
    gains = spread / (spread + noise)
    gain = weight @ gains
    # The gain is uncertain too. Its error multiplies the distance to the guess.
    error = noise * gain + weight @ (gains - gain) ** 2 * distance / entries
    return guess + gain * (noisy - guess), float(error), float(size_variance * (1 - gain) ** 2)


def size_of(
    noisy: np.ndarray, template: np.ndarray, noise: float, scale_sd: float = SCALE_SD
) -> tuple[float, float]:
    """Size c of a noisy matrix c B + noise, relative to B, with prior N(1, sd^2), and its variance.

    Noise may make it negative, but a curvature is not. So it is at least .05.
    """
    variance = 1 / (np.sum(template**2) / noise + scale_sd**-2)
    mean = variance * (np.sum(noisy * template) / noise + scale_sd**-2)
    return float(max(mean, SMALLEST_SCALE)), float(variance)


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
