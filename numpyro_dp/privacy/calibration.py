r"""Finds the noise multiplier that spends a budget.

The noise multiplier :math:`z` solves :math:`\varepsilon_{up}(\mathrm{event}(z), \delta) \approx
\varepsilon` from below. The first guess comes from the central limit theorem, by which a run
behaves like one Gaussian mechanism with

.. math:: \mu(z) = \Big(\sum_i n_i\, q_i^2\, (e^{1/z_i^2} - 1)\Big)^{1/2}.

Brent's method in :math:`(\log z, \log\varepsilon)` with the accountant then needs a few
evaluations. The returned bound is the one that
:func:`.epsilon_spent` gives for the event, so a later report cannot
exceed the budget.

Reference:
    Bu, Dong, Long, Su: Deep Learning with Gaussian Differential Privacy (2020), section 3, for the
    guess. No guarantee depends on it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import cast

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
from numpyro_dp.privacy.accounting.spent import check_errors, epsilon_spent
from numpyro_dp.privacy.budget import PrivacyBudget

_SMALLEST, _LARGEST = 1e-3, 1e8
_ACCEPT, _AIM = 0.992, 0.9965
_SLOPE = 1.2  # about how fast log epsilon falls with the logarithm of the noise
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
    to the event of the whole run. The last three are as in :func:`.epsilon_spent`.

    Raises:
        UnsupportedEventError: If the accountant has no bound for such events.
        CalibrationError: If not even the largest noise is enough, or if even the smallest noise
            spends less than the budget.
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
    delta = check_real("delta", budget.delta)
    check_errors(delta, failure_prob, total_variation, budget.epsilon)
    low, high = math.log(_SMALLEST), math.log(_LARGEST)
    refused, tried = "", dict[float, EpsilonBound]()  # bounds by the logarithm of the noise

    def excess(log_noise: float) -> float:
        """Log of epsilon over the aim, or 0 if epsilon is accepted, where a search for 0 ends."""
        nonlocal refused
        if log_noise not in tried:
            event = make_event(math.exp(log_noise))
            try:
                bound = epsilon_spent(
                    event, delta, budget.relation, accountant=accountant,
                    failure_prob=failure_prob, total_variation=total_variation,
                )  # fmt: skip
            except (TotalVariationError, UnreliableBoundError) as error:
                # The accountant has no bound at this noise. Infinite, it makes the search go up.
                refused = f" ({error})"
                bound = EpsilonBound(None, None, math.inf, delta, budget.relation, event, "none")
            tried[log_noise] = bound
        spent = tried[log_noise].upper / budget.epsilon
        return 0.0 if _ACCEPT <= spent <= 1.0 else math.log(min(max(spent / _AIM, 0.1), 10.0))

    near = far = _first_guess(make_event, budget.epsilon, delta)
    gap = excess(near)
    step = gap / _SLOPE
    while gap * excess(far) > 0.0 and low < far < high:
        near, far, step = far, min(max(far + step, low), high), 2.0 * step
    if gap * excess(far) <= 0.0:
        optimize.brentq(excess, near, far, xtol=_NARROWEST_BRACKET, disp=False)
    enough = {place: bound for place, bound in tried.items() if bound.upper <= budget.epsilon}
    if enough and gap * excess(far) <= 0.0:
        # With the least noise, if the bound jumps.
        best = max(enough, key=lambda place: (enough[place].upper, -place))
        return math.exp(best), enough[best]
    bound = tried[far]
    spent = (
        f"epsilon <= {bound.upper:.4g} at noise_multiplier={math.exp(far):.3g} "
        f"for {describe_event(bound.event)}"
    )
    if not enough:
        raise CalibrationError(
            f"No noise_multiplier in [{_SMALLEST:g}, {_LARGEST:g}] meets the budget {budget}: "
            f"{spent}{refused}. Allow a larger epsilon or delta, or take fewer steps."
        )
    raise CalibrationError(
        f"Even the smallest noise spends less than the budget {budget}: {spent}. Such a run needs "
        "no noise. Check make_event, or lower the budget."
    )


def _first_guess(make_event: Callable[[float], dpa.DpEvent], target: float, delta: float) -> float:
    """Returns the log noise multiplier of the central limit theorem, or 0 if it has none."""

    def excess(log_noise: float) -> float:
        mu = clt_mu(make_event(math.exp(log_noise)))
        epsilon = gaussian_epsilon(min(mu, 1e3), delta) if mu > 1e-12 else 0.0
        return math.log(max(epsilon, 1e-20) / target)

    low, high = math.log(_SMALLEST), math.log(_LARGEST)
    try:
        if excess(low) <= 0.0 or excess(high) >= 0.0:
            return 0.0
        # SciPy's type is that of all its options.
        return cast(float, optimize.brentq(excess, low, high, xtol=1e-3))
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
