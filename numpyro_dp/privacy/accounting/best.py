"""The default accountant: the smallest valid upper bound of several accountants."""

from __future__ import annotations

import dataclasses

from numpyro_dp._lazy import dpa
from numpyro_dp._validate import check_real
from numpyro_dp.privacy.accounting.bounds import (
    Accountant,
    EpsilonBound,
    UnreliableBoundError,
    UnsupportedEventError,
    describe_event,
)
from numpyro_dp.privacy.accounting.gdp import GDP
from numpyro_dp.privacy.accounting.pld import PLD
from numpyro_dp.privacy.accounting.rdp import RDP
from numpyro_dp.privacy.budget import Relation, check_relation

__all__ = ["Best"]


@dataclasses.dataclass(frozen=True)
class Best:
    r"""Asks several accountants and keeps the smallest upper bound.

    The search stops at the first accountant whose own estimate is within ``good_enough`` of its
    upper bound, because the others cannot improve on it. GDP is exact, PLD's grid costs 0.05 % of
    epsilon, and RDP's conversion several percent. So RDP is asked only for events that GDP and PLD
    do not support.

    Args:
        accountants: The accountants, in the order in which they are asked.
        good_enough: Relative distance of ``upper`` to ``estimate`` at which the search stops, in
            [0, 1]. With 0 all are asked, unless one is exact.

    Raises:
        ValueError: If there are no accountants, or ``good_enough`` is outside its range.

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
    good_enough: float = 0.004

    def __post_init__(self) -> None:
        """Checks the fields."""
        check_real("good_enough", self.good_enough, low=0.0, high=1.0)
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
        check_relation(relation)
        best: EpsilonBound | None = None
        reasons: dict[str, str] = {}
        unreliable = False
        for accountant in self.accountants:
            try:
                bound = accountant.epsilon(event, delta, relation)
            except UnsupportedEventError as error:
                reasons[accountant.name] = error.reasons.get(accountant.name, str(error))
                continue
            except UnreliableBoundError as error:
                reasons[accountant.name] = str(error)
                unreliable = True
                continue
            if best is None or bound.upper < best.upper:
                best = bound
            if self._settles(bound):
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

    def _settles(self, bound: EpsilonBound) -> bool:
        """Whether the bound is tight enough, by its accountant's own estimate, to stop."""
        if bound.estimate is None:
            return False
        return bound.upper == bound.estimate or (
            bound.upper - bound.estimate <= self.good_enough * bound.upper
        )
