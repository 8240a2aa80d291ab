r"""Finds the noise multiplier that spends a budget.

The noise multiplier :math:`z` solves :math:`\varepsilon_{up}(\mathrm{event}(z), \delta) \approx
\varepsilon` from below. The first guess comes from the central limit theorem, by which a run
behaves like one Gaussian mechanism with

.. math:: \mu(z) = \Big(\sum_i n_i\, q_i^2\, (e^{1/z_i^2} - 1)\Big)^{1/2}.

A safeguarded secant in :math:`(\log z, \log\varepsilon)` with the accountant then needs a few
evaluations. The returned bound is the one that
:func:`~numpyro_dp.privacy.accounting.epsilon_spent` gives for the event, so a later report cannot
exceed the budget.

Reference:
    Bu, Dong, Long, Su: Deep Learning with Gaussian Differential Privacy (2020), section 3, for the
    guess. No guarantee depends on it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

from scipy import optimize

from numpyro_dp._lazy import dpa
from numpyro_dp._validate import check_real
from numpyro_dp.privacy.accounting.bounds import (
    Accountant,
    EpsilonBound,
    StepError,
    TotalVariationError,
    UnreliableBoundError,
    describe_event,
    gaussian_steps,
)
from numpyro_dp.privacy.accounting.gdp import gaussian_epsilon
from numpyro_dp.privacy.accounting.spent import Best, epsilon_spent, is_left_out
from numpyro_dp.privacy.budget import PrivacyBudget

__all__ = ["CalibrationError", "calibrate_noise", "clt_mu"]

_SMALLEST, _LARGEST = 1e-3, 1e8
_ACCEPT, _AIM = 0.992, 0.9965
_EVALUATIONS, _SECANTS = 60, 15
_WIDEST_STEP = math.log(8.0)
_NARROWEST_BRACKET = 1e-9


class CalibrationError(ValueError):
    """No noise multiplier spends the budget.

    Example:
        >>> from dp_accounting import GaussianDpEvent
        >>> from numpyro_dp import PrivacyBudget
        >>> try:  # an event that ignores the noise multiplier
        ...     calibrate_noise(lambda noise: GaussianDpEvent(0.5), PrivacyBudget(1.0, 1e-5))
        ... except CalibrationError as error:
        ...     print(str(error).split(":")[0])
        No noise_multiplier in [0.001, 1e+08] meets the budget (epsilon=1, delta=1e-05) under
        add_or_remove_one
    """


def calibrate_noise(
    make_event: Callable[[float], dpa.DpEvent],
    budget: PrivacyBudget,
    *,
    accountant: Accountant | None = None,
    failure_prob: float = 0.0,
    total_variation: float = 0.0,
) -> tuple[float, EpsilonBound]:
    """Returns the noise multiplier that spends the budget, and the bound on what it spends.

    ``make_event`` maps a noise multiplier, relative to the sensitivity under the budget's relation,
    to the event of the whole run. The last three are as in :func:`~.accounting.epsilon_spent`.

    Raises:
        UnsupportedEventError: If the accountant has no bound for such events.
        CalibrationError: If not even the largest noise is enough, or if even the smallest noise
            spends less than the budget.
        TypeError: If ``budget`` is not a :class:`PrivacyBudget`.
        TotalVariationError: If ``failure_prob`` or ``total_variation`` is too large for the budget.

    Example:
        >>> from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
        >>> def run(noise_multiplier):
        ...     step = PoissonSampledDpEvent(0.01, GaussianDpEvent(noise_multiplier))
        ...     return SelfComposedDpEvent(step, 1000)
        >>> noise_multiplier, bound = calibrate_noise(run, PrivacyBudget(1.0, 1e-5))
        >>> 0.99 < bound.epsilon <= 1.0, round(noise_multiplier, 1)
        (True, 1.4)

    **Guarantee**: ``bound.epsilon`` never exceeds ``budget.epsilon``, and is at least 0.99 of it,
    unless the accountant's bound jumps over that range (those of this package do not).
    """
    _check_delta(budget, failure_prob, total_variation)
    judge = Best() if accountant is None else accountant
    search = _Search(make_event, budget, judge, float(failure_prob), float(total_variation))
    log_noise = _first_guess(make_event, budget)
    for _ in range(_EVALUATIONS):
        bound = search.evaluate(log_noise)
        if _ACCEPT * budget.epsilon <= bound.upper <= budget.epsilon:
            return math.exp(log_noise), bound
        following = search.propose()
        if following is None:
            break
        log_noise = following
    if search.strong is not None and search.weak is not None:
        return math.exp(search.strong.log_noise), search.strong.bound
    raise CalibrationError(search.failure())


def _check_delta(budget: PrivacyBudget, failure_prob: float, total_variation: float) -> None:
    """Checks the arguments, and that delta covers the errors of the sampler."""
    if not isinstance(budget, PrivacyBudget):
        raise TypeError(f"Expected budget to be a PrivacyBudget, got {budget!r}.")
    check_real("total_variation", total_variation, low=0.0, high=1.0, high_open=True)
    check_real("failure_prob", failure_prob, low=0.0, high=1.0, high_open=True)
    if failure_prob >= budget.delta:
        raise TotalVariationError(
            f"Expected failure_prob={failure_prob:g} < delta for the budget {budget}. Delta has to "
            "cover batches that overflow. Use a smaller overflow_prob for Poisson batches, or a "
            "larger delta."
        )
    largest = (budget.delta - failure_prob) / (1.0 + math.exp(min(budget.epsilon, 700.0)))
    if total_variation >= largest and not is_left_out(
        budget.epsilon, budget.delta - failure_prob, total_variation
    ):
        raise TotalVariationError(
            f"Expected total_variation={total_variation:g} < {largest:.3g} for the budget "
            f"{budget}. Sampler and noise are not exact enough for it. Use a smaller epsilon."
        )


class _Point(NamedTuple):
    """An evaluation: ``value`` is log(epsilon / aim)."""

    log_noise: float
    value: float
    bound: EpsilonBound


@dataclasses.dataclass
class _Search:
    """A bracketed secant for log(epsilon) as a function of log(noise multiplier)."""

    make_event: Callable[[float], dpa.DpEvent]
    budget: PrivacyBudget
    accountant: Accountant
    failure_prob: float
    total_variation: float
    weak: _Point | None = None  # the largest noise known to be too little
    strong: _Point | None = None  # the smallest noise known to be enough
    points: list[_Point] = dataclasses.field(default_factory=list)
    refused: str = ""

    def evaluate(self, log_noise: float) -> EpsilonBound:
        """Bounds epsilon at a noise multiplier and narrows the bracket."""
        event, budget = self.make_event(math.exp(log_noise)), self.budget
        try:
            bound = epsilon_spent(
                event,
                budget.delta,
                budget.relation,
                accountant=self.accountant,
                failure_prob=self.failure_prob,
                total_variation=self.total_variation,
            )
        except (TotalVariationError, UnreliableBoundError) as error:
            # The accountant has no bound at this noise. An infinite one makes the search go up.
            self.refused = str(error)
            bound = EpsilonBound(None, None, math.inf, budget.delta, budget.relation, event, "none")
        ratio = max(bound.upper / (_AIM * budget.epsilon), 1e-30)
        point = _Point(log_noise, math.log(ratio), bound)
        self.points.append(point)
        if bound.upper > budget.epsilon:
            if self.weak is None or log_noise > self.weak.log_noise:
                self.weak = point
        elif self.strong is None or log_noise < self.strong.log_noise:
            self.strong = point
        return bound

    def propose(self) -> float | None:
        """Returns the next log noise multiplier to try, or ``None`` if none is left."""
        guess = self._secant()
        if self.weak is not None and self.strong is not None:
            low, high = self.weak.log_noise, self.strong.log_noise
            if high - low < _NARROWEST_BRACKET:
                return None
            if len(self.points) > _SECANTS or not low < guess < high:
                return (low + high) / 2.0
            return guess
        guess = min(max(guess, math.log(_SMALLEST)), math.log(_LARGEST))
        return None if guess == self.points[-1].log_noise else guess

    def _secant(self) -> float:
        """Follows the line through the last two points, or the slope of the central limit."""
        last, slope = self.points[-1], -1.2
        if not math.isfinite(last.value):
            return last.log_noise + _WIDEST_STEP
        if len(self.points) > 1 and math.isfinite(self.points[-2].value):
            before = self.points[-2]
            measured = (last.value - before.value) / (last.log_noise - before.log_noise)
            slope = min(measured, -0.3)
        step = -last.value / slope
        return last.log_noise + min(max(step, -_WIDEST_STEP), _WIDEST_STEP)

    def failure(self) -> str:
        """Says why no noise multiplier was found."""
        last, budget = self.points[-1], self.budget
        noise, event = math.exp(last.log_noise), describe_event(last.bound.event)
        spent = f"epsilon <= {last.bound.upper:.4g} at noise_multiplier={noise:.3g} for {event}"
        if self.strong is None:
            told = f" ({self.refused})" if self.refused else ""
            return (
                f"No noise_multiplier in [{_SMALLEST:g}, {_LARGEST:g}] meets the budget {budget}: "
                f"{spent}{told}. Allow a larger epsilon or delta, or take fewer steps."
            )
        return (
            f"Even the smallest noise spends less than the budget {budget}: {spent}. Such a run "
            "needs no noise. Check make_event, or lower the budget."
        )


def _first_guess(make_event: Callable[[float], dpa.DpEvent], budget: PrivacyBudget) -> float:
    """Returns the log noise multiplier of the central limit theorem, or 0 if it has none."""

    def excess(log_noise: float) -> float:
        mu = clt_mu(make_event(math.exp(log_noise)))
        epsilon = gaussian_epsilon(min(mu, 1e3), budget.delta) if mu > 1e-12 else 0.0
        return math.log(max(epsilon, 1e-20) / budget.epsilon)

    low, high = math.log(_SMALLEST), math.log(_LARGEST)
    try:
        if excess(low) <= 0.0 or excess(high) >= 0.0:
            return 0.0
        return float(optimize.brentq(excess, low, high, xtol=1e-3))
    except StepError:
        return 0.0


def clt_mu(event: dpa.DpEvent) -> float:
    """Returns mu of the formula above, or infinity if a step has no noise."""
    total = 0.0
    for step in gaussian_steps(event):
        if step.noise_multiplier == 0.0:
            return math.inf
        inverse = 1.0 / step.noise_multiplier**2
        if step.sampling == "none":
            total += step.count * inverse
        else:  # The exponent is cut at 700: beyond it mu is huge, and exp would overflow.
            total += step.count * step.rate**2 * math.expm1(min(inverse, 700.0))
    return math.sqrt(total)
