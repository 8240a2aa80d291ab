r"""The last score in shells, so that a wrong model widens the latents that clipping biases.

In a wrong model the sum of clipped scores has a bias. It is far from the same in all directions:
counts that vary too much move the intercept, and outcomes far out move a scale. So the last stage
releases the score in parts. With clip norms :math:`C_0 < \dots < C_K` and :math:`c_k` for the clip
at :math:`C_k`, they are :math:`c_0(a)`, and the shells :math:`c_k(a) - c_{k-1}(a)`, which are at
most :math:`C_k - C_{k-1}` long. All parts add up to the score clipped at :math:`C_K`. Had each part
the share :math:`(C_k - C_{k-1}) / C_K` of the budget, the sum would have the noise of that score.
Here the first part has more.

A shell is 0 in most latents, or small, and large in few. So its entries are shrunk, each with its
own evidence: an entry has a mixture of normal priors of mean 0. For the first shell their scales
are parts of the bias that the tail suggests (:mod:`numpyro_dp.laplace.tail`), and for later ones
multiples of what the shell before showed in the same latent. What the last clip norm cuts off is
unknown, except for the bias that the tail suggests. It is spread over latents as the shells are. A
half of it is added where their sign is sure. In a model without a scale of its own, the longest
scores come from the records with the largest outcomes, and may move other latents than shorter ones
do. There a half of the rest, and of what a later shell may be, is the same in all latents.

Everything here is a function of released values and has no privacy cost.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from scipy.special import softmax

from numpyro_dp.laplace.tail import Tail

SHELLS = 4
MIDDLE = 3  # the clip norm of the scores whose squares are released
# Square roots of the parts' shares of the budget for the score.
WEIGHTS = np.sqrt([0.4, *[0.6 / SHELLS] * SHELLS])
_NEAREST, _WIDEST = 2.0, 80.0  # bounds on the last clip norm, over the first one
_NOISE = 1.5  # weight of the noise against the bias
# Scales of the normal priors, and their weights.
_FIRST = np.array([0.03, 0.1, 0.3, 1.0]), np.array([0.4, 0.3, 0.2, 0.1])
_LATER = np.array([0.1, 0.3, 1.0, 3.0]), np.array([0.3, 0.3, 0.25, 0.15])
# The score of a scale is a square, so that what is left beyond the last clip norm may be more.
_LEFT_OF_SCALE = 1.5
_SMALLEST = 0.3  # posterior sds, which sampling alone makes in any latent


def clip_norms(tail: Tail, first: float, size: int, number: int, noise: float) -> np.ndarray:
    """The clip norms of all parts, in units of the smallest one, shape (SHELLS + 1,).

    Args:
        tail: The tail of a wrong model.
        first: The clip norm in a correct model, in these units.
        size: Number of latents d.
        number: Number of records N.
        noise: Standard deviation of the noise of one entry of a score with a clip norm of 1.
    """
    candidates = first * np.geomspace(_NEAREST, _WIDEST, 40)
    errors = [math.hypot(tail.bias(c, size, number), _NOISE * noise * c) for c in candidates]
    return np.geomspace(first, candidates[int(np.argmin(errors))], SHELLS + 1)


def joined(
    parts: np.ndarray, noises: np.ndarray, biases: Sequence[float], of_scale: bool
) -> tuple[np.ndarray, np.ndarray]:
    """The sum of all scores without a clip, and its standard errors, both (d,).

    Args:
        parts: The released parts (SHELLS + 1, d), whitened.
        noises: Standard deviations of their noise (SHELLS + 1,).
        biases: Biases of the scores that are clipped at each clip norm (SHELLS + 1,).
        of_scale: Whether the model has a scale of its own.
    """
    score, variance = parts[0], np.full(parts.shape[1], noises[0] ** 2)
    signed, squares, (scales, weights) = 0 * score, 0 * score, _FIRST
    typical, evenly = np.full_like(score, biases[0]), 0.0 if of_scale else 0.5
    for part, noise in zip(parts[1:], noises[1:], strict=True):
        likely = np.maximum(scales[:, None] * typical, _SMALLEST)
        mean, error = _shrunk(part, noise, likely, weights)
        score, variance = score + mean, variance + error
        square = mean**2 + error
        signed, squares = signed + mean * np.sqrt(square), squares + square
        typical = np.sqrt((1 - evenly) * square + evenly * np.mean(square))
        scales, weights = _LATER
    share = squares / np.sum(squares)
    last = biases[-1] * (_LEFT_OF_SCALE if of_scale else 1)
    added = last / 2 * np.sqrt(share) * signed / squares
    spread = (1 - evenly) * share + evenly / len(score)
    return score + added, np.sqrt(variance + last**2 * spread)


def _shrunk(
    values: np.ndarray, noise: float, scales: np.ndarray, weights: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Means and variances of entries (d,) under a mixture of normal priors with scales (k, d)."""
    total = scales**2 + noise**2
    evidence = np.log(weights)[:, None] - (np.log(total) + values**2 / total) / 2
    chances, gain = softmax(evidence, axis=0), scales**2 / total
    mean = np.sum(chances * gain * values, axis=0)
    squares = np.sum(chances * (gain * noise**2 + (gain * values) ** 2), axis=0)
    return mean, squares - mean**2
