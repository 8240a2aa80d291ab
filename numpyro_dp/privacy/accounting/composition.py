r"""Composes privacy losses by one Fourier transform of exponentially tilted grids.

For independent losses with :math:`K(\theta) = \sum_i n_i \log E[e^{\theta L_i}]` and :math:`S =
\sum_i L_i`,

.. math:: P(S = s) = e^{K(\theta) - \theta s}\, \tilde P(S = s),

where under :math:`\tilde P` the losses have the tilted distribution :math:`p\, e^{\theta L} /
E[e^{\theta L}]`. A plain transform has an absolute rounding error, which drowns a delta of 1e-12.
Here :math:`\theta` is put where the target delta lies, so that the error is relative to that delta,
whatever its size. The same :math:`\theta` is the minimiser of

.. math:: \varepsilon(\theta) = \tfrac1\theta \big(K(\theta) - \log\delta + \theta\log\theta
    - (1+\theta)\log(1+\theta)\big),

the epsilon that Renyi DP of order :math:`1 + \theta` grants, which is thereby a by-product.

Reference:
    Canonne, Kamath, Steinke: The Discrete Gaussian (2020), Proposition 12 (the conversion). Gopi,
    Lee, Wutschitz: Numerical Composition of Differential Privacy (2021).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import fft, optimize

from numpyro_dp.privacy.accounting.bounds import UnreliableBoundError
from numpyro_dp.privacy.accounting.discretise import LossGrid, log_mgf, tilt

__all__ = ["Composition", "RenyiBound", "fourier_epsilon", "renyi_bound"]

_LOG_ALIASED = math.log(1e-9)
_WIDEST_WINDOW = 1200.0
_LOG_THETAS = tuple(np.linspace(math.log(1e-3), math.log(1e7), 41).tolist())


@dataclasses.dataclass(frozen=True)
class Composition:
    """Grids of one interval, each with the number of times that it is summed."""

    grids: Sequence[LossGrid]
    counts: Sequence[int]

    @property
    def infinity(self) -> float:
        """Probability that some loss is infinite."""
        pairs = zip(self.grids, self.counts, strict=True)
        return -math.expm1(sum(n * math.log1p(-min(g.infinity, 1 - 1e-16)) for g, n in pairs))

    def log_mgf(self, theta: float) -> float:
        """Returns K(theta) of the finite part."""
        pairs = zip(self.grids, self.counts, strict=True)
        return sum(count * log_mgf(grid, theta) for grid, count in pairs)


class RenyiBound(NamedTuple):
    """The tilt at which a composition meets a delta, and the epsilon that Renyi DP grants there."""

    theta: float
    epsilon: float


def renyi_bound(composition: Composition, delta: float, near: float | None = None) -> RenyiBound:
    """Minimises the epsilon that Renyi DP grants, over all orders.

    Args:
        composition: Grids of one interval.
        delta: In (0, 1).
        near: A tilt near which to look, from a coarser grid; ``None`` looks everywhere.

    Raises:
        UnreliableBoundError: If the mass at infinity alone exceeds ``delta``.

    **Guarantee**: the composition is (``epsilon``, ``delta``)-differentially private.
    """
    finite = delta - composition.infinity
    if finite <= 0.0:
        raise UnreliableBoundError(
            f"Expected a truncated mass {composition.infinity:g} below delta={delta:g}."
        )

    def epsilon(log_theta: float) -> float:
        theta = math.exp(log_theta)
        convert = theta * log_theta - (1.0 + theta) * math.log1p(theta)
        return (composition.log_mgf(theta) + convert - math.log(finite)) / theta

    start = math.log(near) if near is not None else min(_LOG_THETAS, key=epsilon)
    low, high = max(start - 0.7, _LOG_THETAS[0]), min(start + 0.7, _LOG_THETAS[-1])
    found = optimize.minimize_scalar(
        epsilon, bounds=(low, high), method="bounded", options={"xatol": 1e-2}
    )
    # Any tilt gives a valid bound; the search only looks for a good one.
    log_theta, value = min((float(found.x), float(found.fun)), (start, epsilon(start)), key=_second)
    return RenyiBound(math.exp(log_theta), max(value, 0.0))


def _second(pair: tuple[float, float]) -> float:
    return pair[1]


def window(composition: Composition, theta: float) -> tuple[float, float]:
    """Returns an interval outside which the tilted sum lies with probability at most 2e-9."""
    base = composition.log_mgf(theta)
    variance = 0.0
    for grid, count in zip(composition.grids, composition.counts, strict=True):
        distribution = tilt(grid, theta)[1]
        mean = float(np.dot(distribution, grid.losses))
        variance += count * float(np.dot(distribution, (grid.losses - mean) ** 2))
    scale = math.sqrt(-2.0 * _LOG_ALIASED / max(variance, 1e-300))
    steps = scale * np.array([0.25, 0.5, 0.75, 0.9, 1.0, 1.15, 1.5, 2.0, 4.0])
    upper = min((composition.log_mgf(theta + s) - base - _LOG_ALIASED) / s for s in steps)
    lower = max((composition.log_mgf(theta - s) - base - _LOG_ALIASED) / -s for s in steps)
    return lower, upper


def fourier_epsilon(
    composition: Composition, delta: float, start: RenyiBound, bounds: tuple[float, float]
) -> tuple[float, float]:
    """Returns the epsilon of the composed grids, and how fast log(delta) falls with epsilon there.

    Args:
        composition: Grids of one interval.
        delta: In (0, 1).
        start: Result of :func:`renyi_bound`, which gives the tilt.
        bounds: Result of :func:`window`, or a wider interval.

    **Guarantee**: an upper bound. Mass outside the window is wrapped into it (which only adds) and,
    above it, bounded by Chernoff and added; the transform's rounding error is bounded in the
    2-norm and added.
    """
    interval, theta = composition.grids[0].interval, start.theta
    if bounds[1] - bounds[0] > _WIDEST_WINDOW:  # exp(loss) overflows; the Renyi bound is valid too.
        return start.epsilon, start.theta
    first = math.floor(max(bounds[0], -1e300) / interval)
    size = fft.next_fast_len(max(math.ceil(bounds[1] / interval) - first + 1, 16), real=True)
    distribution, log_total = _tilted_distribution(composition, theta, first, size)
    losses = (first + np.arange(size)) * interval
    log_weight = log_total - theta * losses
    probs = distribution * np.exp(np.minimum(log_weight, 600.0))
    above = math.exp(min(log_weight[-1] + _LOG_ALIASED, 0.0))
    error = _rounding(composition, size) * float(np.linalg.norm(distribution))
    target = delta * (1.0 - 1e-9) - composition.infinity - above

    # Sums over the losses above each grid point: delta there is upper - exp(loss - middle) * lower.
    relative = losses - losses[size // 2]
    upper = np.cumsum(probs[::-1])[::-1]
    lower = np.cumsum((probs * np.exp(-relative))[::-1])[::-1]
    weight = np.sqrt(np.cumsum(np.exp(np.minimum(2.0 * log_weight, 600.0))[::-1])[::-1])
    deltas = upper - np.exp(relative) * lower + error * weight
    above_target = np.nonzero(deltas > target)[0]
    if above_target.size == 0:
        return max(float(losses[0]), 0.0), start.theta
    index = int(above_target[-1]) + 1
    if target <= 0.0 or index >= size:
        return start.epsilon, start.theta
    # Between two grid points delta is linear in exp(epsilon).
    mass, scaled = upper[index] + error * weight[index - 1] - target, lower[index]
    root = (
        float(losses[size // 2]) + math.log(mass / scaled) if mass > 0.0 < scaled else losses[index]
    )
    root = min(max(root, float(losses[index - 1])), float(losses[index]))
    slope = float(np.exp(relative[index]) * scaled) / target
    return min(max(float(root), 0.0), start.epsilon), slope


def _tilted_distribution(
    composition: Composition, theta: float, first: int, size: int
) -> tuple[npt.NDArray[np.float64], float]:
    """Returns the tilted distribution of the sum, wrapped into points from ``first`` on, and K."""
    spectrum = np.ones(size // 2 + 1, dtype=np.complex128)
    offset, log_total = 0, 0.0
    for grid, count in zip(composition.grids, composition.counts, strict=True):
        log_sum, distribution = tilt(grid, theta)
        centre = round(float(np.dot(distribution, np.arange(distribution.size))))
        places = (np.arange(distribution.size) - centre) % size
        spectrum *= fft.rfft(np.bincount(places, distribution, minlength=size)) ** count
        offset += count * (grid.first + centre)
        log_total += count * log_sum
    distribution = np.roll(fft.irfft(spectrum, size), (offset - first) % size)
    return np.maximum(distribution, 0.0), log_total


def _rounding(composition: Composition, size: int) -> float:
    """Bounds the relative rounding error of the transforms and powers, in the 2-norm."""
    operations = 8.0 * math.log2(size) * (2.0 + sum(composition.counts))
    return operations * float(np.finfo(np.float64).eps)
