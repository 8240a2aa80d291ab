"""The interface of accountants: bounds, errors and descriptions of events."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Protocol, TypeVar, get_args, runtime_checkable

from numpyro_dp._lazy import dpa
from numpyro_dp.privacy.budget import Relation

__all__ = [
    "Accountant",
    "EpsilonBound",
    "TotalVariationError",
    "UnreliableBoundError",
    "UnsupportedEventError",
    "describe_event",
    "register",
    "supported_by",
]


@dataclasses.dataclass(frozen=True)
class EpsilonBound:
    """What an event spends at a delta, with error bounds.

    Attributes:
        lower: Lower bound on the true epsilon, or ``None``.
        estimate: The accountant's best guess, or ``None``.
        upper: Upper bound on the true epsilon. The guarantee uses this value.
        delta: The delta of the bounds.
        relation: The relation of the bounds.
        event: The event that was accounted for.
        accountant: Name of the accountant that found it.

    Example:
        >>> from dp_accounting import GaussianDpEvent
        >>> print(EpsilonBound(0.9, 0.95, 1.0, 1e-5, "replace_one", GaussianDpEvent(2.0), "PRV"))
        epsilon <= 1 (in [0.9, 1]) at delta=1e-05 under replace_one, by PRV

    **Guarantee**: the event is (``epsilon``, ``delta``)-differentially private under ``relation``.
    """

    lower: float | None
    estimate: float | None
    upper: float
    delta: float
    relation: Relation
    event: dpa.DpEvent
    accountant: str

    @property
    def epsilon(self) -> float:
        """The upper bound, which is what a report may promise."""
        return self.upper

    def __str__(self) -> str:
        """One line."""
        known = "" if self.lower is None else f" (in [{self.lower:.5g}, {self.upper:.5g}])"
        return (
            f"epsilon <= {self.upper:.5g}{known} at delta={self.delta:g} "
            f"under {self.relation}, by {self.accountant}"
        )


@runtime_checkable
class Accountant(Protocol):
    """Bounds the epsilon of an event. Implementations are frozen dataclasses."""

    @property
    def name(self) -> str:
        """Name, shown next to every epsilon."""
        ...

    def epsilon(self, event: dpa.DpEvent, delta: float, relation: Relation) -> EpsilonBound:
        """Bounds the epsilon of ``event`` at ``delta`` under ``relation``.

        Raises:
            UnsupportedEventError: If the accountant has no bound for the event and relation.
            UnreliableBoundError: If it has a bound, but cannot compute it reliably.
        """
        ...


class _Registered(Accountant, Protocol):
    def refusal(self, event: dpa.DpEvent, relation: Relation) -> str | None: ...


class UnreliableBoundError(ValueError):
    """The bound exists, but rounding or the size of the grid makes its value unreliable."""


class TotalVariationError(ValueError):
    """The run differs from the accounted mechanism by more than delta can cover."""


class UnsupportedEventError(ValueError):
    """An accountant has no bound for an event under a relation.

    Args:
        event: The event.
        relation: The relation.
        reasons: Accountant's name -> why it has no bound.
    """

    def __init__(self, event: dpa.DpEvent, relation: Relation, reasons: dict[str, str]) -> None:
        """Composes the message, with the accountants that support the event."""
        self.event, self.relation, self.reasons = event, relation, dict(reasons)
        told = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
        able = supported_by(event)
        remedy = f"It is supported by {', '.join(able)}." if able else "No accountant supports it."
        super().__init__(
            f"No bound for the event {describe_event(event)} under relation={relation!r} ({told}). "
            f"{remedy}"
        )

    def __reduce__(self) -> tuple[object, ...]:
        """Rebuilds the error from its arguments, for instance in another process."""
        return type(self), (self.event, self.relation, self.reasons)


_KNOWN: list[_Registered] = []
_AccountantType = TypeVar("_AccountantType", bound=Callable[[], _Registered])


def register(accountant: _AccountantType) -> _AccountantType:
    """Class decorator: error messages name this accountant if it supports an event."""
    _KNOWN.append(accountant())
    return accountant


def supported_by(event: dpa.DpEvent) -> tuple[str, ...]:
    """Returns the accountants that support the event, each with the relation.

    Example:
        >>> from dp_accounting import GaussianDpEvent, SampledWithoutReplacementDpEvent
        >>> import numpyro_dp.privacy.accounting
        >>> supported_by(SampledWithoutReplacementDpEvent(1000, 10, GaussianDpEvent(1.0)))
        ("RDP under 'replace_one'",)
    """
    return tuple(
        f"{accountant.name} under {relation!r}"
        for accountant in _KNOWN
        for relation in get_args(Relation)
        if accountant.refusal(event, relation) is None
    )


def describe_event(event: dpa.DpEvent) -> str:
    """Returns a readable one-line form of an event.

    Example:
        >>> from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
        >>> step = PoissonSampledDpEvent(0.01, GaussianDpEvent(1.5))
        >>> describe_event(SelfComposedDpEvent(step, 100))
        '100 x Poisson(0.01, Gaussian(1.5))'
    """
    match event:
        case dpa.SelfComposedDpEvent():
            return f"{event.count} x {describe_event(event.event)}"
        case dpa.ComposedDpEvent():
            shown = [describe_event(part) for part in event.events[:4]]
            more = len(event.events) - len(shown)
            return "[" + ", ".join(shown + ([f"and {more} more"] if more else [])) + "]"
        case dpa.PoissonSampledDpEvent():
            return f"Poisson({event.sampling_probability:g}, {describe_event(event.event)})"
        case dpa.SampledWithoutReplacementDpEvent():
            size, total = event.sample_size, event.source_dataset_size
            return f"WithoutReplacement({size} of {total}, {describe_event(event.event)})"
        case dpa.GaussianDpEvent():
            return f"Gaussian({event.noise_multiplier:g})"
        case _:
            return repr(event)
