r"""Privacy losses on a grid, and their exponential tilts.

The grid is Connect-the-Dots': with the points :math:`\varepsilon_i = ih` and the deltas
:math:`\delta_i` of a dominating pair (:mod:`.pairs`), the discrete loss has the mass

.. math:: p_i = \frac{(\delta_{i+1} - \delta_i) - e^h (\delta_i - \delta_{i-1})}{e^h - 1}

at :math:`\varepsilon_i` and the rest at infinity. Its delta is the true one at every grid point and
larger between them, so that it dominates the pair, also under composition.

Reference:
    Doroshenko et al.: Connect the Dots (2022), Algorithm 1.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np
import numpy.typing as npt

from numpyro_dp.privacy.accounting.bounds import UnreliableBoundError
from numpyro_dp.privacy.accounting.pairs import Direction, deltas, loss_range
from numpyro_dp.privacy.accounting.steps import GaussianStep

__all__ = ["LossGrid", "discretise", "log_mgf", "tilt"]

_MAX_INTERVAL = 50.0
# The grid's own excess outweighs the rounding of one-step deltas (eps each) if interval^2 / 12 is
# above points * interval * eps; twice that is asked for.
_MIN_INTERVAL = 24.0 * float(np.finfo(np.float64).eps)


@dataclasses.dataclass(frozen=True)
class LossGrid:
    """A discrete privacy loss: ``probs[i]`` at ``(first + i) * interval``, the rest at infinity."""

    first: int
    interval: float
    probs: npt.NDArray[np.float64]
    infinity: float

    @functools.cached_property
    def losses(self) -> npt.NDArray[np.float64]:
        """The grid's points."""
        return (self.first + np.arange(self.probs.size)) * self.interval

    @functools.cached_property
    def log_probs(self) -> npt.NDArray[np.float64]:
        """Log of the masses."""
        with np.errstate(divide="ignore"):  # Points without mass have -inf.
            return np.log(self.probs)


def discretise(
    step: GaussianStep, direction: Direction, log_tail: float, interval: float
) -> LossGrid:
    """Discretises the loss of one step by Connect-the-Dots.

    Args:
        step: A full-batch or Poisson step; its noise multiplier is relative to the sensitivity
            under the relation.
        direction: Row of the table above.
        log_tail: Log of the mass that may be sent to infinity.
        interval: Distance of the grid's points.

    Raises:
        UnreliableBoundError: If rounding spoils a grid so fine.

    **Guarantee**: the grid's loss dominates the step's, up to rounding of the one-step deltas.
    """
    lower, upper = loss_range(step, direction, log_tail)
    first = math.floor(lower / interval)
    last = max(math.ceil(upper / interval), first + 1)
    if interval < _MIN_INTERVAL * (last - first):
        smallest = _MIN_INTERVAL * (last - first)
        raise UnreliableBoundError(
            f"Expected a grid interval >= {smallest:.3g}, got {interval:.3g}: "
            "double precision does not resolve the loss of one step. Use fewer steps or less noise."
        )
    if interval > _MAX_INTERVAL:
        raise UnreliableBoundError(
            f"Expected privacy losses up to about 1e7, got {upper:.3g} in one step: the noise "
            f"multiplier {step.noise_multiplier:g} protects nothing. Use more noise."
        )
    curve = deltas(step, direction, np.arange(first, last + 1) * interval)
    curve = np.minimum.accumulate(curve)
    slopes = np.diff(curve) / math.expm1(interval)
    probs = np.zeros_like(curve)
    probs[0] = 1.0 - curve[0]
    probs[:-1] += slopes
    probs[1:] -= slopes * math.exp(interval)
    return LossGrid(first, interval, np.maximum(probs, 0.0), float(curve[-1]))


def log_mgf(grid: LossGrid, theta: float) -> float:
    r"""Returns :math:`\log E[e^{\theta L}]` of the finite part."""
    return _exponentials(grid, theta)[0]


def tilt(grid: LossGrid, theta: float) -> tuple[float, npt.NDArray[np.float64]]:
    r"""Returns :math:`\log E[e^{\theta L}]` and the distribution tilted by :math:`e^{\theta L}`."""
    log_sum, distribution = _exponentials(grid, theta)
    return log_sum, distribution / np.sum(distribution)


def _exponentials(grid: LossGrid, theta: float) -> tuple[float, npt.NDArray[np.float64]]:
    exponent = theta * grid.losses
    log_probs = grid.log_probs + exponent
    shift = float(np.max(log_probs))
    # Below e^-200 of the largest, rounding up is harmless and avoids slow subnormal numbers.
    distribution = np.exp(np.maximum(log_probs - shift, -200.0))
    largest = float(np.max(np.abs(exponent)))
    if largest >= 1.0:
        return shift + math.log(float(np.sum(distribution))), distribution
    # log1p keeps the precision where the sum is close to 1.
    excess = float(np.sum(grid.probs * np.expm1(exponent)))
    return math.log1p(excess + (float(np.sum(grid.probs)) - 1.0)), distribution
