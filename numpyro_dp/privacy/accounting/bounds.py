r"""The interface of accountants: bounds, errors, and events as a multiset of Gaussian steps.

Every accountant here starts from the same normal form of a run, :math:`\{(s_i, q_i, z_i, n_i)\}`.
Entry i stands for :math:`n_i` Gaussian mechanisms of noise multiplier :math:`z_i`, each on a sample
drawn by method :math:`s_i` at rate :math:`q_i`. Several Gaussians on one sample are one Gaussian,

.. math:: z = \big(\textstyle\sum_j n_j / z_j^2\big)^{-1/2}.

A Poisson sample of rate 1 and a sample of all records are full batches. Equal steps are counted
together.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from typing import Literal, NamedTuple, Protocol, runtime_checkable

from numpyro_dp._lazy import dpa
from numpyro_dp.privacy.budget import Relation, check_relation


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


class StepAccountant:
    """An accountant that reads the normal form of an event."""

    name = ""

    def epsilon(self, event: dpa.DpEvent, delta: float, relation: Relation) -> EpsilonBound:
        """Bounds epsilon (see :class:`Accountant`)."""
        check_relation(relation)
        try:
            steps = gaussian_steps(event)
            triple = (0.0, 0.0, 0.0)
            if steps and steps[0].noise_multiplier == 0.0:
                triple = (math.inf, math.inf, math.inf)
            elif steps:
                triple = self._bounds(steps, delta, relation)
        except StepError as error:
            raise UnsupportedEventError(event, relation, {self.name: str(error)}) from error
        return EpsilonBound(*triple, delta, relation, event, self.name)

    def _bounds(
        self, steps: tuple[GaussianStep, ...], delta: float, relation: Relation
    ) -> tuple[float | None, float | None, float]:
        """Returns ``lower``, ``estimate`` and ``upper``. Raises StepError if there is no bound."""
        raise NotImplementedError


class UnreliableBoundError(ValueError):
    """The bound exists, but rounding or the size of the grid makes its value unreliable."""


class TotalVariationError(ValueError):
    """The run differs from the accounted mechanism by more than delta can cover."""


class UnsupportedEventError(ValueError):
    """An accountant has no bound for an event under a relation.

    ``reasons`` maps the name of an accountant to why it has no bound.

    Example:
        >>> from dp_accounting import UnsupportedDpEvent
        >>> from numpyro_dp.accounting import PLD, UnsupportedEventError
        >>> try:
        ...     PLD().epsilon(UnsupportedDpEvent(), 1e-5, "add_or_remove_one")
        ... except UnsupportedEventError as error:
        ...     print(list(error.reasons))
        ['PLD']
    """

    def __init__(self, event: dpa.DpEvent, relation: Relation, reasons: dict[str, str]) -> None:
        """Keeps the arguments, from which a pickle is made."""
        super().__init__(event, relation, reasons)
        self.event: dpa.DpEvent = event
        self.relation: Relation = relation
        self.reasons: dict[str, str] = reasons

    def __str__(self) -> str:
        told = "; ".join(f"{name}: {reason}" for name, reason in self.reasons.items())
        return (
            f"No bound for the event {describe_event(self.event)} under relation="
            f"{self.relation!r} ({told}). Best(), the default, has bounds for full and Poisson "
            "batches under both relations, and for batches of a fixed size under 'replace_one'."
        )


def describe_event(event: dpa.DpEvent) -> str:
    """Returns a form for people, such as ``100 x Poisson(0.01, Gaussian(1.5))``."""
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


Sampling = Literal["none", "poisson", "without_replacement"]


class StepError(ValueError):
    """The event is not a composition of (sampled) Gaussian mechanisms."""


class GaussianStep(NamedTuple):
    """``count`` Gaussian mechanisms, each on its own sample.

    Attributes:
        sampling: How the sample is drawn. ``"none"`` is the full batch.
        rate: Probability that a record is in the sample, 1 for the full batch.
        size: (sample size, data set's size) of a sample without replacement, else ``None``.
        noise_multiplier: Noise / sensitivity under the relation. With 0 nothing is private.
        count: Number of mechanisms.
    """

    sampling: Sampling
    rate: float
    size: tuple[int, int] | None
    noise_multiplier: float
    count: int


def gaussian_steps(event: dpa.DpEvent) -> tuple[GaussianStep, ...]:
    """Returns the normal form of an event. The empty tuple spends nothing.

    Raises:
        StepError: If a part of the event is of another kind. The message names that part.
        ValueError: If a count, rate or noise multiplier is outside its range.
    """
    counts: collections.Counter[GaussianStep] = collections.Counter()
    full_batch = 0.0
    for step in _walk(event, 1):
        # One step without noise makes the whole run not private.
        if step.noise_multiplier == 0.0:
            return (step,)
        if step.sampling == "none":
            full_batch += step.count / step.noise_multiplier**2
        else:
            counts[step._replace(count=1)] += step.count
    steps = tuple(step._replace(count=count) for step, count in counts.items())
    return (_full_batch(1.0 / math.sqrt(full_batch)), *steps) if full_batch > 0.0 else steps


def canonical_event(steps: tuple[GaussianStep, ...]) -> dpa.DpEvent:
    """Returns the event whose normal form is ``steps``."""
    events: list[dpa.DpEvent] = []
    for step in steps:
        event: dpa.DpEvent = dpa.GaussianDpEvent(step.noise_multiplier)
        if step.sampling == "poisson":
            event = dpa.PoissonSampledDpEvent(step.rate, event)
        elif step.size is not None:
            event = dpa.SampledWithoutReplacementDpEvent(step.size[1], step.size[0], event)
        events.append(dpa.SelfComposedDpEvent(event, step.count))
    return dpa.ComposedDpEvent(events)


def _full_batch(noise_multiplier: float, count: int = 1) -> GaussianStep:
    return GaussianStep("none", 1.0, None, noise_multiplier, count)


def _walk(event: dpa.DpEvent, count: int) -> list[GaussianStep]:
    match event:
        case dpa.NoOpDpEvent():
            return []
        case dpa.NonPrivateDpEvent():
            return [_full_batch(0.0)]
        case dpa.SelfComposedDpEvent():
            if event.count < 0:
                raise ValueError(f"Expected count={event.count} >= 0 in {describe_event(event)}.")
            return _walk(event.event, count * event.count) if event.count else []
        case dpa.ComposedDpEvent():
            return [step for part in event.events for step in _walk(part, count)]
        case dpa.GaussianDpEvent():
            noise = float(event.noise_multiplier)
            if not noise >= 0.0:
                raise ValueError(f"Expected noise_multiplier={noise} >= 0 in {event!r}.")
            # Infinite noise spends nothing.
            return [] if math.isinf(noise) else [_full_batch(noise, count)]
        case dpa.PoissonSampledDpEvent():
            sampling, rate, size = "poisson", float(event.sampling_probability), None
        case dpa.SampledWithoutReplacementDpEvent():
            size = (int(event.sample_size), int(event.source_dataset_size))
            if size[1] < 1:
                raise ValueError(f"Expected source_dataset_size={size[1]} >= 1 in {event!r}.")
            sampling, rate = "without_replacement", size[0] / size[1]
        case _:
            raise StepError(f"{describe_event(event)} is not a (sampled) Gaussian mechanism")
    if not 0.0 <= rate <= 1.0:
        raise ValueError(f"Expected a sampling rate in [0, 1], got {rate} in {event!r}.")
    inner = gaussian_steps(event.event)
    if rate == 0.0 or not inner:
        return []
    # Gaussians on one sample are joined to one already, so this is a sample of a sample.
    if len(inner) != 1 or inner[0].sampling != "none":
        raise StepError(f"{describe_event(event)} samples from a sample")
    noise = inner[0].noise_multiplier
    if noise == 0.0 or rate == 1.0:
        return [_full_batch(noise, count)]
    return [GaussianStep(sampling, rate, size, noise, count)]
