r"""The default accountant, and what a run spent, including the errors of its sampler.

If the outputs of a run are within total variation :math:`\tau` of an
:math:`(\varepsilon, d)`-private one, on every data set, then

.. math:: P'(A) \le P(A) + \tau \le e^\varepsilon Q(A) + d + \tau
    \le e^\varepsilon Q'(A) + d + (1 + e^\varepsilon)\,\tau,

so the run is :math:`(\varepsilon, d + (1 + e^\varepsilon)\tau)`-private. This covers batches drawn
with probabilities rounded to 160 bits, and noise drawn from a table.

A failure costs less. Let :math:`E` be an event that has the same probability under both
neighbouring data sets, with :math:`1 - P(E) \le f`. Let the run be :math:`(\varepsilon, d)`-private
given :math:`E`. Then

.. math:: P'(A) \le P'(A \cap E) + f \le e^\varepsilon Q'(A \cap E) + d + f
    \le e^\varepsilon Q'(A) + d + f.

This covers a padded Poisson batch that overflows. :math:`E` is then the event that the *other*
records leave the given record a place in every batch.
"""

from __future__ import annotations

import dataclasses
import math

from numpyro_dp._lazy import dpa
from numpyro_dp._validate import check_real
from numpyro_dp.privacy.accounting.bounds import (
    Accountant,
    EpsilonBound,
    TotalVariationError,
    UnreliableBoundError,
    UnsupportedEventError,
    describe_event,
)
from numpyro_dp.privacy.accounting.gdp import GDP
from numpyro_dp.privacy.accounting.pld import PLD
from numpyro_dp.privacy.accounting.rdp import RDP
from numpyro_dp.privacy.budget import Relation, check_relation

_SHARE = 1e-3  # largest part of delta that is first reserved for the total variation
_RESERVED = 1e3  # or this times the total variation: enough for epsilon up to 6
_TINY, _HUGE = 1e-25, 30.0  # a total variation and an epsilon: exp(30) 1e-25 is 1e-12
_ITERATIONS = 20
_CLOSE = 0.004  # relative distance of an upper bound to its estimate that ends the search


@dataclasses.dataclass(frozen=True)
class Best:
    r"""Asks several accountants and keeps the smallest upper bound.

    The search stops at the first accountant whose own estimate is within 0.4 % of its upper bound,
    because the others cannot improve much on it. GDP is exact, PLD's grid costs 0.05 % of
    epsilon, and RDP's conversion several percent. So RDP is asked only for events that GDP and PLD
    do not support.

    Args:
        accountants: The accountants, in the order in which they are asked.

    Raises:
        ValueError: If there are no accountants.

    Example:
        >>> from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
        >>> Best().epsilon(GaussianDpEvent(1.0), 1e-5, "add_or_remove_one").accountant
        'GDP'
        >>> step = PoissonSampledDpEvent(0.1, GaussianDpEvent(1.0))
        >>> Best().epsilon(step, 1e-5, "replace_one").accountant
        'PLD'

    **Guarantee**: each of the bounds is valid, so their minimum is valid too.
    """

    accountants: tuple[Accountant, ...] = (GDP(), PLD(), RDP())

    def __post_init__(self) -> None:
        if not self.accountants:
            raise ValueError("accountants=() is empty. Pass at least one accountant.")

    @property
    def name(self) -> str:
        """Name, with the names of the accountants."""
        return f"Best({', '.join(accountant.name for accountant in self.accountants)})"

    def epsilon(self, event: dpa.DpEvent, delta: float, relation: Relation) -> EpsilonBound:
        """Returns the smallest upper bound. Its ``accountant`` names the accountant that found it.

        Raises:
            UnsupportedEventError: If no accountant supports the event. It lists each reason.
            UnreliableBoundError: If some support it, but none can compute a reliable bound.
        """
        best: EpsilonBound | None = None
        reasons: dict[str, str] = {}
        unreliable = False
        for accountant in self.accountants:
            try:
                bound = accountant.epsilon(event, delta, relation)
            except (UnsupportedEventError, UnreliableBoundError) as error:
                name = accountant.name
                reasons[name] = getattr(error, "reasons", {}).get(name, str(error))
                unreliable |= isinstance(error, UnreliableBoundError)
                continue
            if best is None or bound.upper < best.upper:
                best = bound
            if bound.estimate is not None and bound.estimate >= (1.0 - _CLOSE) * bound.upper:
                break
        if best is not None:
            return best
        if unreliable:
            told = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
            raise UnreliableBoundError(
                f"No reliable bound for {describe_event(event)} at delta={delta:g} under "
                f"relation={relation!r} ({told})."
            )
        raise UnsupportedEventError(event, relation, reasons)


def epsilon_spent(
    event: dpa.DpEvent,
    delta: float,
    relation: Relation = "add_or_remove_one",
    *,
    accountant: Accountant | None = None,
    failure_prob: float = 0.0,
    total_variation: float = 0.0,
) -> EpsilonBound:
    r"""Bounds the epsilon of a run.

    With :math:`\delta' = \delta - f`, it looks for a large :math:`d` that satisfies
    :math:`d + (1 + e^{\varepsilon(d)})\tau \le \delta'`. It starts at
    :math:`d = \delta' - \min(10^{-3} \delta', 10^3 \tau)`. If that is too large, it iterates
    :math:`d \leftarrow \delta' - (1 + e^{\varepsilon(d)})\tau`.

    Args:
        event: The accounted mechanism, with noise multipliers relative to the sensitivity under
            ``relation``.
        delta: In (0, 1).
        relation: ``"add_or_remove_one"`` or ``"replace_one"``.
        accountant: Bounds epsilon. ``None`` means :class:`Best`.
        failure_prob: Probability in [0, 1) that any step of the *whole* run fails. The failure must
            not depend on the protected record.
        total_variation: Distance in [0, 1) of the run from the accounted mechanism, over the
            *whole* run. The sum over its steps is enough. Below 1e-25 it is left out if epsilon
            exceeds 30 and delta cannot cover it: such an epsilon protects nobody.

    Raises:
        UnsupportedEventError: If the accountant has no bound for the event.
        UnreliableBoundError: If the accountant cannot compute a reliable bound.
        TotalVariationError: If ``failure_prob`` or ``total_variation`` is too large for any
            epsilon to hold at ``delta``. The message says how small it must be.
        ValueError: If an argument is outside its range.

    Example:
        >>> from dp_accounting import GaussianDpEvent
        >>> print(epsilon_spent(GaussianDpEvent(2.0), 1e-5))
        epsilon <= 1.9931 (in [1.9931, 1.9931]) at delta=1e-05 under add_or_remove_one, by GDP
        >>> round(epsilon_spent(GaussianDpEvent(2.0), 1e-5, total_variation=1e-7).epsilon, 3)
        2.004

    **Guarantee**: the run is (``epsilon``, ``delta``)-differentially private.

    Reference:
        Dwork, Roth: Algorithmic Foundations (2014), section 3.5 (statistical distance).
    """
    check_relation(relation)
    delta = check_real("delta", delta, low=0.0, high=1.0, low_open=True, high_open=True)
    failure, tau = check_errors(delta, failure_prob, total_variation)
    judge = Best() if accountant is None else accountant
    if tau == 0.0:
        return dataclasses.replace(judge.epsilon(event, delta - failure, relation), delta=delta)
    bound = _with_total_variation(event, delta - failure, relation, judge, tau)
    return dataclasses.replace(bound, delta=delta)


def is_left_out(epsilon: float, delta: float, total_variation: float) -> bool:
    """Whether a bound leaves out a total variation, which is tiny beside a huge epsilon."""
    tiny = total_variation < _TINY and _HUGE < epsilon < math.inf
    return tiny and _factor(epsilon) * total_variation > delta


def _factor(epsilon: float) -> float:
    """How much delta a total variation of 1 takes: 1 + exp(epsilon)."""
    # exp(710) overflows. At 700 no delta is enough, unless the total variation is below 1e-304.
    return 1.0 + math.exp(min(epsilon, 700.0))


def check_errors(
    delta: float, failure_prob: float, total_variation: float, epsilon: float = -math.inf
) -> tuple[float, float]:
    """Returns the errors of a run's sampler if delta covers them, at an epsilon if one is given."""
    failure, tau = (
        check_real(name, value, low=0.0, high=1.0, high_open=True,
                   remedy="It is a probability, over all steps of the run.")
        for name, value in (("failure_prob", failure_prob), ("total_variation", total_variation))
    )  # fmt: skip
    if failure >= delta:
        raise TotalVariationError(
            f"Expected failure_prob={failure:g} < delta={delta:g}. Delta has to cover batches that "
            "overflow. Use a smaller overflow_prob for Poisson batches, or a larger delta."
        )
    largest = (delta - failure) / _factor(epsilon)
    if epsilon > 0.0 and tau >= largest and not is_left_out(epsilon, delta - failure, tau):
        raise TotalVariationError(
            f"Expected total_variation={tau:g} < {largest:.3g} for epsilon={epsilon:g} at "
            f"delta={delta:g}. Sampler and noise are not exact enough. Use a smaller epsilon."
        )
    return failure, tau


def _with_total_variation(
    event: dpa.DpEvent, delta: float, relation: Relation, judge: Accountant, tau: float
) -> EpsilonBound:
    share = min(_SHARE, _RESERVED * tau / delta)
    inner = (1.0 - share) * delta
    bounds = []
    for _ in range(_ITERATIONS):
        bounds.append(bound := judge.epsilon(event, inner, relation))
        leak = _factor(bound.upper) * tau
        # No lower bound is kept: one at a smaller delta is none at this delta.
        if math.isinf(bound.upper) or inner + leak <= delta:
            return dataclasses.replace(bound, lower=None, delta=delta)
        # A little more than the leak, because epsilon grows as `inner` shrinks.
        inner = delta - 1.01 * leak
        if inner <= 0.0:
            break
    if is_left_out(bounds[0].upper, delta, tau):
        return dataclasses.replace(bounds[0], lower=None, delta=delta)
    needed = share * delta / _factor(bounds[0].upper)
    raise TotalVariationError(
        f"total_variation={tau:g} is too large for delta={delta:g}: no epsilon was found with "
        "d + (1 + exp(epsilon)) * total_variation <= delta. total_variation <= "
        f"{needed:.3g} is enough. Otherwise use more noise, which lowers epsilon, or raise delta."
    )
