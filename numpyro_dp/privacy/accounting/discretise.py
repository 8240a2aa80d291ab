r"""The privacy loss of one Gaussian step, on a grid.

A step is described by a *dominating pair* :math:`(P, Q)`; its privacy loss is :math:`L = \log dP/dQ`
under :math:`P`, and :math:`\delta(\varepsilon) = E_P[(1 - e^{\varepsilon - L})_+]` bounds the step and,
summing independent losses, any adaptive composition. With :math:`\sigma` the noise in units of one
record's norm and :math:`q` the sampling rate:

=================  =======================  =======================  =====================
direction          P                        Q                        source
=================  =======================  =======================  =====================
remove             (1-q) N(0) + q N(1)      N(0)                     Zhu et al., Thm. 11
add                N(0)                     (1-q) N(0) + q N(1)      Zhu et al., Thm. 11
replace            (1-q) N(0) + q N(1)      (1-q) N(0) + q N(-1)     proof below
=================  =======================  =======================  =====================

*Replace, under Poisson sampling.* Fix the sample of the other records (joint convexity of the
divergence) and shift it away. The outputs are :math:`(1-q) N(0) + q N(x)` and :math:`(1-q) N(0) + q
N(x')` with :math:`\|x\|, \|x'\| \le 1`. For a set :math:`A` with :math:`N(0)(A) = a`, Neyman and Pearson give
:math:`N(x)(A) \le \Phi(\Phi^{-1}(a) + 1/\sigma)` and :math:`N(x')(A) \ge \Phi(\Phi^{-1}(a) - 1/\sigma)`, so

.. math:: P(A) - e^\varepsilon Q(A) \le (1-q)(1 - e^\varepsilon) a
    + q\,\Phi(\Phi^{-1}(a) + \tfrac1\sigma) - q e^\varepsilon\,\Phi(\Phi^{-1}(a) - \tfrac1\sigma),

with equality for :math:`x = -x' = 1` and half-lines :math:`A`. Hence that pair dominates.

The grid is Connect-the-Dots': the discrete loss has the true :math:`\delta(\varepsilon)` at every grid
point and a larger one between them, so it stays dominating under composition.

Reference:
    Zhu, Dong, Wang: Optimal Accounting via Characteristic Functions (2022). Doroshenko et al.:
    Connect the Dots (2022), Algorithm 1. Lebeda et al.: Avoiding Pitfalls for Privacy Accounting of
    Subsampled Mechanisms under Composition (2024): neither add nor remove dominates the other.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from dp_accounting.pld import privacy_loss_mechanism as plm

from numpyro_dp.privacy.accounting.bounds import UnreliableBoundError
from numpyro_dp.privacy.accounting.steps import GaussianStep
from numpyro_dp.privacy.budget import Relation

__all__ = ["LossGrid", "delta_at_zero", "directions", "discretise", "log_mgf", "loss_range", "tilt"]

# Mass of the left tail that is moved up to the grid's first point: it costs less than
# 1e-9 sqrt(count) standard deviations, and keeps rounding noise out of the grid.
_LOG_LEFT_TAIL = math.log(1e-9)
# The grid's own excess outweighs the rounding of one-step deltas (eps each) if interval^2 / 12 is above
# points * interval * eps; twice that is asked for.
_MAX_INTERVAL = 50.0
_MIN_INTERVAL = 24.0 * float(np.finfo(np.float64).eps)


class LossGrid(NamedTuple):
    """A discrete privacy loss: ``probs[i]`` at ``(first + i) * interval``, the rest at infinity."""

    first: int
    interval: float
    probs: npt.NDArray[np.float64]
    infinity: float

    @property
    def losses(self) -> npt.NDArray[np.float64]:
        """The grid's points."""
        return (self.first + np.arange(self.probs.size)) * self.interval


def directions(steps: tuple[GaussianStep, ...], relation: Relation) -> tuple[plm.AdjacencyType, ...]:
    """Returns the directions that must be accounted for; the epsilon is the largest of theirs."""
    if relation == "replace_one":
        return (plm.AdjacencyType.REPLACE,)
    if all(step.sampling == "none" for step in steps):
        return (plm.AdjacencyType.REMOVE,)  # Without sampling the pair is symmetric.
    return (plm.AdjacencyType.REMOVE, plm.AdjacencyType.ADD)


def loss_range(
    step: GaussianStep, direction: plm.AdjacencyType, log_tail: float
) -> tuple[float, float]:
    """Returns losses below which 1e-9, and above which exp(``log_tail``) of the mass lies."""
    upper = _loss(step, direction, log_tail).connect_dots_bounds().epsilon_upper
    lower = _loss(step, direction, _LOG_LEFT_TAIL).connect_dots_bounds().epsilon_lower
    return float(lower), float(upper)


def delta_at_zero(step: GaussianStep, direction: plm.AdjacencyType) -> float:
    """Returns the total variation distance of the pair."""
    return float(_loss(step, direction, _LOG_LEFT_TAIL).get_delta_for_epsilon(0.0))


def discretise(
    step: GaussianStep, direction: plm.AdjacencyType, log_tail: float, interval: float
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
        raise UnreliableBoundError(
            f"Expected a grid interval >= {_MIN_INTERVAL * (last - first):.3g}, got {interval:.3g}: "
            "double precision does not resolve the loss of one step. Use fewer steps or less noise."
        )
    if interval > _MAX_INTERVAL:
        raise UnreliableBoundError(
            f"Expected privacy losses up to about 1e7, got {upper:.3g} in one step: the noise multiplier "
            f"{step.noise_multiplier:g} protects nothing. Use more noise."
        )
    epsilons = np.arange(first, last + 1) * interval
    try:
        deltas = _loss(step, direction, log_tail).get_delta_for_epsilon(epsilons)
    except ValueError as error:
        raise UnreliableBoundError(f"The loss of {step} cannot be inverted: {error}") from error
    deltas = np.minimum.accumulate(np.asarray(deltas, dtype=np.float64))
    slopes = np.diff(deltas) / math.expm1(interval)
    probs = np.zeros_like(deltas)
    probs[0] = 1.0 - deltas[0]
    probs[:-1] += slopes
    probs[1:] -= slopes * math.exp(interval)
    return LossGrid(first, interval, np.maximum(probs, 0.0), float(deltas[-1]))


def log_mgf(grid: LossGrid, theta: float) -> float:
    r"""Returns :math:`\log E[e^{\theta L}]` of the finite part."""
    return _exponentials(grid, theta)[0]


def tilt(grid: LossGrid, theta: float) -> tuple[float, npt.NDArray[np.float64]]:
    r"""Returns :math:`\log E[e^{\theta L}]` and the tilted law :math:`p e^{\theta L} / E[e^{\theta L}]`."""
    log_sum, law = _exponentials(grid, theta)
    return log_sum, law / np.sum(law)


def _exponentials(grid: LossGrid, theta: float) -> tuple[float, npt.NDArray[np.float64]]:
    exponent = theta * grid.losses
    shift = float(np.max(exponent[grid.probs > 0.0]))
    # Above the shift there is no mass; below e^-200 of it, rounding up is harmless and avoids
    # subnormal numbers, which are slow.
    law = grid.probs * np.exp(np.clip(exponent - shift, -200.0, 0.0))
    if abs(shift) >= 1.0:
        return shift + math.log(float(np.sum(law))), law
    # log1p keeps the precision where the sum is close to 1.
    excess = float(np.sum(grid.probs * np.expm1(np.minimum(exponent, shift))))
    return math.log1p(excess + (float(np.sum(grid.probs)) - 1.0)), law


def _loss(
    step: GaussianStep, direction: plm.AdjacencyType, log_tail: float
) -> plm.GaussianPrivacyLoss:
    # The library's REPLACE pair moves the mean from +1 to -1: its noise is relative to the norm of
    # one record, ours to the sensitivity under the relation, which is twice that.
    scale = 2.0 if direction is plm.AdjacencyType.REPLACE else 1.0
    return plm.GaussianPrivacyLoss(
        scale * step.noise_multiplier,
        sampling_prob=step.rate,
        adjacency_type=direction,
        log_mass_truncation_bound=log_tail,
    )
