r"""Tight epsilon of full-batch and Poisson-sampled Gaussian runs, by privacy loss distributions.

The grid follows the event. Splitting a loss between two grid points that are :math:`h` apart, so
that :math:`P`- and :math:`Q`-mass are kept, raises :math:`\log E[e^{\theta L}]` by about
:math:`\theta(1+\theta)h^2/12`. With :math:`n` steps and the tilt :math:`\theta` of
:mod:`.composition` the epsilon is therefore too large by

.. math:: \Delta\varepsilon \approx n\,(1 + \theta)\,h^2 / 12,

and :math:`h` is chosen so that this is a given small part of epsilon. That makes about
:math:`4\sqrt{n / \mathrm{gap}}` points of the composed loss, whatever the noise: 4e5 steps take a
fraction of a second where a fixed grid is either too coarse or too long.

The composition is ours and not ``dp_accounting``'s because that one has a fixed grid and an
absolute rounding error, about 1e-16 times the number of steps, which forbids small deltas. The
tests hold this accountant against it.

**Relations.** Under ``replace_one`` a Poisson-sampled step is bounded by a pair of its own, proved
in :mod:`.pairs`. It is the one that ``dp_accounting`` calls ``AdjacencyType.REPLACE``; the
library's PLD doubles the sensitivity there by itself, while our events have it doubled already.
"""

from __future__ import annotations

import dataclasses
import math

from dp_accounting import DpEvent

from numpyro_dp._validate import check_int, check_real
from numpyro_dp.privacy.accounting.bounds import (
    EpsilonBound,
    UnreliableBoundError,
    UnsupportedEventError,
    register,
)
from numpyro_dp.privacy.accounting.composition import (
    Composition,
    RenyiBound,
    fourier_epsilon,
    renyi_bound,
    window,
)
from numpyro_dp.privacy.accounting.discretise import discretise
from numpyro_dp.privacy.accounting.pairs import Direction, deltas, directions, loss_range
from numpyro_dp.privacy.accounting.steps import GaussianStep, StepError, gaussian_steps
from numpyro_dp.privacy.budget import Relation, check_relation

__all__ = ["PLD"]

_MAX_STEP_POINTS = 1 << 17
_TRUNCATED = 1e-6  # part of delta that truncated tails may use up
_REFINEMENTS = 8
_SMALLEST_DELTA = 1e-250


@register
@dataclasses.dataclass(frozen=True)
class PLD:
    r"""Privacy loss distributions with a grid adapted to the event.

    Args:
        relative_gap: Part of epsilon that the grid may add to it; in (0, 0.1].
        max_points: Largest number of points of the composed loss, at least 1024. Beyond it the
            grid is coarser and the bound looser (``upper - estimate`` says how much), never
            invalid.

    Raises:
        ValueError: If an argument is outside its range.

    Example:
        >>> from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
        >>> step = PoissonSampledDpEvent(0.01, GaussianDpEvent(1.0))
        >>> bound = PLD().epsilon(SelfComposedDpEvent(step, 1000), 1e-5, "add_or_remove_one")
        >>> round(bound.epsilon, 2)
        1.83

    **Guarantee**: ``upper`` is not below the true epsilon; ``estimate`` is it less the first-order
    excess of the grid, and no bound.

    Reference:
        Koskela, Jälkö, Honkela: Computing Tight DP Guarantees Using FFT (2020). Doroshenko et al.:
        Connect the Dots (2022).
    """

    relative_gap: float = 5e-4
    max_points: int = 1 << 20

    def __post_init__(self) -> None:
        """Checks the fields."""
        check_real("relative_gap", self.relative_gap, low=0.0, low_open=True, high=0.1)
        check_int("max_points", self.max_points, low=1024)

    @property
    def name(self) -> str:
        """Name."""
        return "PLD"

    def refusal(self, event: DpEvent, relation: Relation) -> str | None:
        """Returns why the event is not supported, or ``None``."""
        check_relation(relation)
        try:
            steps = gaussian_steps(event)
        except StepError as error:
            return str(error)
        if any(step.sampling == "without_replacement" for step in steps):
            return "no dominating pair is known for fixed-size samples under composition"
        return None

    def epsilon(self, event: DpEvent, delta: float, relation: Relation) -> EpsilonBound:
        """Bounds epsilon; see :class:`Accountant`.

        Raises:
            UnsupportedEventError: If the event draws fixed-size samples, or is not Gaussian.
            UnreliableBoundError: If double precision does not resolve the loss of one step.
        """
        reason = self.refusal(event, relation)
        if reason is not None:
            raise UnsupportedEventError(event, relation, {self.name: reason})
        steps = gaussian_steps(event)
        estimate = upper = 0.0
        if steps and steps[0].noise_multiplier == 0.0:
            estimate = upper = math.inf
        elif steps:
            for direction in directions(steps, relation):
                value, excess = self._directed(steps, direction, delta, upper)
                upper = max(upper, value)
                estimate = max(estimate, value - excess, 0.0)
        estimate = min(estimate, upper)
        return EpsilonBound(math.nan, estimate, upper, delta, relation, event, self.name)

    def _directed(
        self, steps: tuple[GaussianStep, ...], direction: Direction, delta: float, known: float
    ) -> tuple[float, float]:
        """Returns the upper bound of one direction and the grid's excess in it."""
        if sum(step.count * float(deltas(step, direction, 0.0)) for step in steps) <= delta:
            return 0.0, 0.0
        total = sum(step.count for step in steps)
        if delta < _SMALLEST_DELTA:
            raise UnreliableBoundError(f"Expected delta={delta:g} >= {_SMALLEST_DELTA:g} for PLD.")
        log_tail = math.log(_TRUNCATED) + math.log(delta) - math.log(total)
        ranges = [loss_range(step, direction, log_tail) for step in steps]
        # A loss may be all but constant, far from 0.
        width = max(max(high - low, 0.01 * max(abs(low), abs(high))) for low, high in ranges)
        finest, interval = width / _MAX_STEP_POINTS, width / 512
        theta: float | None = None
        for _ in range(_REFINEMENTS):
            composition = _composition(steps, direction, log_tail, interval)
            start = renyi_bound(composition, delta, theta)
            value, slope, theta = start.epsilon, start.theta, start.theta
            if value <= known:  # The other direction decides.
                break
            # The Renyi bound exceeds epsilon by about log(theta ...) / theta: aim below it.
            wanted = self._interval(0.7 * start.epsilon, start.theta, total)
            settled = interval <= max(1.1 * wanted, finest)
            if settled:
                bounds = self._window(composition, start)
                points = (bounds[1] - bounds[0]) / interval
                if points > self.max_points:
                    finest = interval = 1.05 * interval * points / self.max_points
                    continue
                value, slope = fourier_epsilon(composition, delta, start, bounds)
                # With few steps delta may fall much faster than at the tilt.
                wanted = self._interval(value, slope, total)
                settled = interval <= max(2.0 * wanted, finest)
            if settled:
                break
            interval = max(wanted, finest)
        return value, total * (1.0 + slope) * interval**2 / 12.0

    def _interval(self, epsilon: float, slope: float, total: int) -> float:
        """Returns the interval whose excess is ``relative_gap`` of epsilon."""
        target = self.relative_gap * max(epsilon, 1e-3 / (1.0 + slope))
        return math.sqrt(12.0 * target / (total * (1.0 + slope)))

    def _window(self, composition: Composition, start: RenyiBound) -> tuple[float, float]:
        """Returns where the composed loss is computed: the window, and 0 if that is near."""
        lower, upper = window(composition, start.theta)
        near = upper <= self.max_points * composition.grids[0].interval
        return (0.0 if near and 0.0 < lower < 0.5 * upper else lower), upper


def _composition(
    steps: tuple[GaussianStep, ...], direction: Direction, log_tail: float, interval: float
) -> Composition:
    grids = [discretise(step, direction, log_tail, interval) for step in steps]
    return Composition(grids, [step.count for step in steps])
