r"""Reads an event as a multiset of Gaussian steps.

Every accountant here starts from the same normal form of a run, :math:`\{(s_i, q_i, z_i, n_i)\}`.
Entry i stands for :math:`n_i` Gaussian mechanisms of noise multiplier :math:`z_i`, each on a sample
drawn by method :math:`s_i` at rate :math:`q_i`. Several Gaussians on one sample are one Gaussian,

.. math:: z = \big(\textstyle\sum_j n_j / z_j^2\big)^{-1/2}.

A Poisson sample of rate 1 and a sample of all records are full batches. Equal steps are counted
together.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

from numpyro_dp._lazy import dpa
from numpyro_dp.privacy.accounting.bounds import describe_event

__all__ = ["GaussianStep", "StepError", "canonical_event", "gaussian_steps"]

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

    Args:
        event: Any nesting of compositions, Poisson and fixed-size samples, and Gaussians.

    Raises:
        StepError: If a part of the event is of another kind. The message names that part.
        ValueError: If a count, rate or noise multiplier is outside its range.

    Example:
        >>> from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
        >>> step = PoissonSampledDpEvent(0.5, GaussianDpEvent(2.0))
        >>> gaussian_steps(SelfComposedDpEvent(step, 3))[0][:2]
        ('poisson', 0.5)
    """
    counts: dict[tuple[Sampling, float, tuple[int, int] | None, float], int] = {}
    full_batch = 0.0
    for step in _walk(event, 1):
        if step.noise_multiplier == 0.0:
            return (step,)
        if step.sampling == "none":
            full_batch += step.count / step.noise_multiplier**2
        else:
            key = step[:4]
            counts[key] = counts.get(key, 0) + step.count
    steps = [GaussianStep(*key, count) for key, count in counts.items()]
    if full_batch > 0.0:
        steps.insert(0, GaussianStep("none", 1.0, None, 1.0 / math.sqrt(full_batch), 1))
    return tuple(steps)


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


def _walk(event: dpa.DpEvent, count: int) -> list[GaussianStep]:
    match event:
        case dpa.NoOpDpEvent():
            return []
        case dpa.NonPrivateDpEvent():
            return [GaussianStep("none", 1.0, None, 0.0, 1)] if count else []
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
            return [] if math.isinf(noise) else [GaussianStep("none", 1.0, None, noise, count)]
        case dpa.PoissonSampledDpEvent():
            return _sampled("poisson", float(event.sampling_probability), None, event, count)
        case dpa.SampledWithoutReplacementDpEvent():
            size = (int(event.sample_size), int(event.source_dataset_size))
            if size[1] < 1:
                raise ValueError(f"Expected source_dataset_size={size[1]} >= 1 in {event!r}.")
            return _sampled("without_replacement", size[0] / size[1], size, event, count)
        case _:
            raise StepError(f"{describe_event(event)} is not a (sampled) Gaussian mechanism")


def _sampled(
    sampling: Sampling, rate: float, size: tuple[int, int] | None, event: dpa.DpEvent, count: int
) -> list[GaussianStep]:
    if not 0.0 <= rate <= 1.0:
        raise ValueError(f"Expected a sampling rate in [0, 1], got {rate} in {event!r}.")
    inner = gaussian_steps(event.event)
    if rate == 0.0 or not inner:
        return []
    if len(inner) > 1 or inner[0].sampling != "none":
        raise StepError(f"{describe_event(event)} samples from a sample")
    noise = inner[0].noise_multiplier
    if noise == 0.0:
        return [GaussianStep("none", 1.0, None, 0.0, 1)]
    if rate == 1.0:
        return [GaussianStep("none", 1.0, None, noise, count)]
    return [GaussianStep(sampling, rate, size, noise, count)]
