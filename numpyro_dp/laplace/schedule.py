"""How a run splits its budget, and the clip norms of each stage. All of it is public.

The constants were chosen on simulated logistic, Poisson, linear and mixture models and on four real
designs. Results depend little on them. Other splits, clip norms of 1.2 to 2, and 4 to 24 draws
change a log score by .03.
"""

from __future__ import annotations

import enum
import math
from typing import NamedTuple

import numpy as np

# Antithetic pairs of draws in a stage. Twice as many do not come nearer to the mode, unless the
# draws also have to average the errors of outcomes that are simulated independently.
PAIRS, PAIRS_INDEPENDENT = 12, 24
_SIZE = 0.01  # part of mu^2 for the size of a typical score
SIZE_RANGE = 64.0  # that size may be up to this factor below or above the public guess
_PRIOR_SIZE = 1.0  # prior standard deviation of the log of that size
_SCALES = (0.02, 0.03)  # parts of mu^2 for the mean row and the scales of the curvature
_STAGES = (0.05, 0.06, 0.08, 0.11, 0.15, 0.20, 0.35)  # parts of the rest of mu^2
_CURVATURE = (0.7, 0.7, 0.6, 0.5, 0.5, 0.4, 0.3)  # part of a stage, the rest for scores
_CURVATURE_FAR = 0.6
# A step of the mean is too long if a latent moves by more posterior standard deviations than this,
# or if the mean square over all latents is larger. More stages follow, before the last four.
FAR = 5.0
NEAR = 0.5  # also if the next draws have a smaller part of the covariance than this
WIDE = 4.0  # or the posterior is this much wider than the curvature says that it could be
LAST = 4
MOST_FAR = 12  # largest number of such stages
# Share of each. Far away, scores are large, and more precision than NOISE_FAR of them is wasted.
SHARE_FAR, MOST_SHARE_FAR, NOISE_FAR = 0.03, 0.06, 0.5
RESERVE = 0.25  # part of the budget that such stages leave for the planned ones
# The run has not arrived if the last step of a latent is longer than LONGEST + sqrt(2 log d), which
# grows like the largest of d normal numbers, or the root mean square is longer than
# LONG (1 + 1 / sqrt d).
LONGEST, LONG = 2.0, 1.5
ALONG = 2.5  # posterior sds of the last two steps along the way from the prior's mean
LOSS_BOUND = 2.0  # on a record's loss of curvature, over that on the curvature
# Below this kappa so many records are clipped that no column alone is to blame for lost curvature.
LEAST_KAPPA = 0.7
_POWER = 0.02  # part of a stage
_LOSS = 0.02  # part of a stage, except for the last
_EXCESS = 0.02  # part of the last stage
_VARIANCE = 0.3  # part of the last stage, if intervals are robust: a tenth of the budget
_TAIL = (0.0, 0.0, 0.0, 0.0, 0.2, 0.15, 0.0)  # parts of the stages, if outcomes are simulated
# The tail has more, up to this factor, if mu sqrt(N / d) is above _LITTLE_NOISE. Scores then have
# little noise to lose, and a count of few records far out has much.
_MOST_TAIL, _LITTLE_NOISE = 2.5, 8.0
_CLIP = 1.2
GROWTH = 0.2  # growth of clip norms, until many records are clipped
_MOST_GROWTH = 0.6
_UNCLIPPED = 0.97  # the kappa of a stage in which few records are clipped
_LARGEST_NOISE = 0.25  # largest noise sd relative to the sampling error, if clip norms grow
_SCALE_CLIP = 3.0
_ROW_CLIP = 1.3


class Kind(enum.IntEnum):
    """The values that a release sums over the records."""

    # It has to be 0: signals test `kind > 0` for the releases before the stages.
    STAGE = 0  # scores, curvature, its loss and power, in some the excess, tail and variance
    SCALES = 1  # the mean row, and the scale of each coordinate
    SIZE = 2  # the size of a typical score


class Schedule(NamedTuple):
    """The releases of a run.

    Attributes:
        mu: Privacy cost of all releases together, in Gaussian differential privacy.
        kinds: The kind of each release.
        parts: Parts of the squared budget for score, curvature, power, its excess, the loss, the
            tail and the variance, for each release.
    """

    mu: float
    kinds: tuple[Kind, ...]
    parts: tuple[tuple[float, ...], ...]

    @property
    def shares(self) -> tuple[float, ...]:
        """Part of the squared budget for each release. The parts sum to 1."""
        found = [math.fsum(part) for part in self.parts]
        return tuple(share / math.fsum(found) for share in found)

    def with_stage(self, release: int, share: float) -> Schedule:
        """Returns the schedule with one more stage before a release. Later releases spend less.

        Args:
            release: Number of the release.
            share: Part of the squared budget that the stage spends.
        """
        # What the stage spends is taken from later ones. So the sum of all parts stays the same,
        # and with it the privacy cost.
        spent = share * math.fsum(math.fsum(part) for part in self.parts)
        later = math.fsum(math.fsum(part) for part in self.parts[release:])
        rest = [tuple((1 - spent / later) * x for x in part) for part in self.parts[release:]]
        parts = (*self.parts[:release], _stage(spent, _CURVATURE_FAR), *rest)
        return Schedule(self.mu, (*self.kinds[:release], Kind.STAGE, *self.kinds[release:]), parts)

    def weights(self, release: int) -> np.ndarray:
        """Square roots of the parts of one release, shape (7,). Their squares sum to 1."""
        part = np.array(self.parts[release])
        return np.sqrt(part / part.sum())

    def mu_of(self, release: int) -> np.ndarray:
        """The mu that each entry of a release spends, shape (7,)."""
        return self.mu * math.sqrt(self.shares[release]) * self.weights(release)


def schedule(
    mu: float, size: int, number: int, tail: bool = False, robust: bool = False
) -> Schedule:
    """Returns the releases of a run.

    Args:
        mu: The mu that all releases may spend.
        size: Number of latents.
        number: Number of records.
        tail: Whether two stages release the tail, see :mod:`numpyro_dp.laplace.tail`.
        robust: Whether the last stage releases the variance of scores.
    """
    early = {}
    # A release with more noise than the prior's spread would tell next to nothing.
    if _size_noise(number, mu * math.sqrt(_SIZE)) <= _PRIOR_SIZE:
        early[Kind.SIZE] = (0.0, 0.0, _SIZE, 0.0, 0.0, 0.0, 0.0)
    # The public guess of each scale is 1. A release with more noise is not worth its cost.
    if _scale_bounds(size, number)[1] / (mu * math.sqrt(_SCALES[1])) <= 1:
        early[Kind.SCALES] = (*_SCALES, 0.0, 0.0, 0.0, 0.0, 0.0)
    left = 1 - math.fsum(part for parts in early.values() for part in parts)
    stages, told = [], mu * math.sqrt(number / size) / _LITTLE_NOISE
    more = min(max(1.0, told), _MOST_TAIL)
    for share, curvature, part in zip(_STAGES, _CURVATURE, _TAIL, strict=True):
        last = len(stages) == len(_STAGES) - 1
        others = _EXCESS * last, more * part * tail, _VARIANCE * (robust and last)
        stages.append(_stage(left * share, curvature, *others))
    kinds = (*early, *[Kind.STAGE] * len(stages))
    return Schedule(mu, kinds, (*early.values(), *stages))


def _stage(
    spent: float, curvature: float, excess: float = 0.0, tail: float = 0.0, variance: float = 0.0
) -> tuple[float, ...]:
    """Parts of a stage."""
    # The loss changes the next whitening, and the last stage has none.
    loss = 0.0 if excess else _LOSS
    rest = 1 - _POWER - excess - loss - tail - variance
    parts = rest * (1 - curvature), rest * curvature, _POWER, excess, loss, tail, variance
    return tuple(spent * part for part in parts)


def _size_noise(number: int, mu: float) -> float:
    """Standard deviation of the noise on the log size of a typical score."""
    # An entry between 0 and 1 stands for the range from -log(SIZE_RANGE) to log(SIZE_RANGE).
    return 2 * math.log(SIZE_RANGE) / (number * mu)


def believed_size(total: float, number: int, mu: float) -> float:
    """Returns the estimated log of the size of a typical whitened score, over its public guess.

    The log size has a normal prior around the guess. Each record sends a value in [0, 1], which is
    0.5 for a score of the guessed size. See :func:`~numpyro_dp.laplace.staged_scores.entries`.

    Args:
        total: Sum of these values over records, plus noise.
        number: Number of records.
        mu: The mu that the release spends.
    """
    log_size = (total / number - 0.5) * 2 * math.log(SIZE_RANGE)
    gain = _PRIOR_SIZE**2 / (_PRIOR_SIZE**2 + _size_noise(number, mu) ** 2)
    return gain * float(np.clip(log_size, -math.log(SIZE_RANGE), math.log(SIZE_RANGE)))


def bounds(kind: Kind, size: int, number: int, mu: float, growth: float) -> np.ndarray:
    """Bounds on one record's first and second entry in a release, and on its excess, shape (3,)."""
    if kind is Kind.SIZE:
        found = np.array([SIZE_RANGE * math.sqrt(size / number), 1.0])
    else:
        found = _scale_bounds(size, number) if kind else clip_norms(size, number, mu, growth)
    # The excess keeps the smallest clip norm: a few outcomes far out would only add noise.
    least = _CLIP * (math.sqrt(size) + 1.2) / math.sqrt(number)
    return np.append(found, min(found[0], least))


def clip_norms(size: int, number: int, mu: float, growth: float) -> np.ndarray:
    r"""Bounds on one record's score and curvature in a stage that spends ``mu``.

    A whitened normal score has a norm near sqrt(size / number), with a standard deviation of .7 /
    sqrt(number). So few scores reach the bound. If the noise is small, with
    :math:`x = \mu \sqrt{N / d} > 1`, the bound grows as x to the power ``growth``. The growth stops
    when the noise is a quarter of the sampling error, but the power is never below ``GROWTH``.
    """
    radius = math.sqrt(size) + 1.2
    over = max(1.0, mu * math.sqrt(number / size))
    factor = max(_CLIP * over**GROWTH, min(_CLIP * over**growth, _LARGEST_NOISE * over))
    return np.array([factor * radius / math.sqrt(number), factor * radius**2 / number])


def next_growth(growth: float, kappa: float) -> float:
    """Returns the growth of clip norms from the next stage on.

    ``kappa`` falls below 1 if records are clipped. Clipping does not bias the parameters of a
    correct model. In a wrong model, clipped records have too little influence on the best fit. So
    the clip norms grow if the budget allows it.

    Args:
        growth: The growth in the previous stage.
        kappa: The kappa of the stage, see :func:`~numpyro_dp.laplace.decode.sampling_ratio`.
    """
    return min(_MOST_GROWTH, growth + 2 * max(0.0, _UNCLIPPED - kappa))


def _scale_bounds(size: int, number: int) -> np.ndarray:
    """Bounds on one record's row and scales in the release of scales."""
    return np.array([_ROW_CLIP * math.sqrt(size / number), _SCALE_CLIP * math.sqrt(size) / number])
