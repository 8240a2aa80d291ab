"""What a run returns, and its progress bar."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from numpyro_dp.privacy.accounting import RDP, UnsupportedEventError
from numpyro_dp.privacy.plan import Plan, PrivacyReport
from numpyro_dp.run.state import SensitiveState

__all__ = [
    "PrivateLosses",
    "RunResult",
    "SensitiveLosses",
    "SensitiveValueError",
    "Trace",
    "progress_chunks",
    "progress_ranges",
]


class SensitiveValueError(ValueError):
    """A value was asked for that only the holder of the records may see."""


class Trace(NamedTuple):
    """Private iterates, thinned; post-processing of the release, so they may be published.

    Attributes:
        steps: Number of the step after which each iterate was kept, shape ``(kept,)``.
        params: Constrained parameters with a leading axis ``kept``.
        clip_norm: The clip norm of the step after each of them, where it is an
            :class:`~numpyro_dp.mechanisms.AdaptiveClip`: shape ``(kept,)``, or a dict by entry of
            the signal (``"..."`` for entries without a name). ``None`` if all norms are fixed.
    """

    steps: Int[np.ndarray, " kept"]
    params: dict[str, Any]
    clip_norm: Any = None

    def __repr__(self) -> str:
        """Shows the size, not the numbers."""
        return f"Trace({len(self.steps)} iterates of {sorted(self.params)})"


class PrivateLosses(NamedTuple):
    """A loss curve released through the mechanism; may be published.

    Attributes:
        steps: Last step of each window.
        values: Mean over the window of the noisy negative evidence lower bound of clipped
            log likelihoods.
    """

    steps: Int[np.ndarray, " kept"]
    values: Float[np.ndarray, "... kept"]


class SensitiveLosses(NamedTuple):
    """A loss curve without protection; never publish it.

    Attributes:
        steps: Last step of each window.
        values: Mean over the window of the negative evidence lower bound on the batch.
    """

    steps: Int[np.ndarray, " kept"]
    values: Float[np.ndarray, "... kept"]

    def __repr__(self) -> str:
        """Shows no value."""
        return f"SensitiveLosses(<{len(self.values)} values: never publish them>)"


class _RunResult(NamedTuple):
    params: dict[str, Any]
    state: SensitiveState | None
    losses: PrivateLosses | SensitiveLosses | None


class RunResult(_RunResult):
    """Result of a private run: a triple like ``SVIRunResult``, and more.

    Attributes:
        params: Constrained parameters; may be published.
        state: To resume from; sensitive. A pickle of the result leaves it out (``None``).
        losses: :class:`PrivateLosses`, :class:`SensitiveLosses`, or ``None``.
        trace: Thinned private iterates; may be published.
        privacy: What was spent; may be published.
        folded: What ``run(..., fold=...)`` made of the iterates after every step, else ``None``;
            may be published.
        posterior: Draws, predictions and a summary of the latents; may be published.
    """

    trace: Trace
    privacy: PrivacyReport
    folded: Any
    _make_posterior: Callable[..., Any] | None
    _posterior: Any

    def __new__(
        cls,
        params: dict[str, Any],
        state: SensitiveState | None,
        losses: PrivateLosses | SensitiveLosses | None,
        trace: Trace,
        privacy: PrivacyReport,
        folded: Any = None,
        make_posterior: Callable[..., Any] | None = None,
    ) -> RunResult:
        """Makes the triple and adds what SVI's result does not have.

        ``make_posterior`` is called with the result when the posterior is first asked for.
        """
        result = super().__new__(cls, params, state, losses)
        result.trace, result.privacy, result.folded = trace, privacy, folded
        result._make_posterior, result._posterior = make_posterior, None
        return result

    @property
    def posterior(self) -> Any:
        """The :class:`~numpyro_dp.Posterior` of the latents, at ``params``.

        Raises:
            ValueError: If the result comes from a pickle, which cannot hold the model, or from a
                driver of point estimates.
        """
        if self._make_posterior is None:
            raise ValueError(
                "Expected the result of a run of this process for posterior, got one without its "
                "model: a pickle does not hold it. Draw with posterior_samples(rng_key, guide, "
                "result.params, num_samples), or pickle what you need of the posterior."
            )
        if self._posterior is None:
            self._posterior = self._make_posterior(self)
        return self._posterior

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles all but the state, which is sensitive, and the model, which may not be picklable.

        Pickle ``result.state`` by itself.
        """
        return RunResult, (self.params, None, self.losses, self.trace, self.privacy, self.folded)

    def __copy__(self) -> RunResult:
        """A copy in this process has the same state."""
        return RunResult(*self, self.trace, self.privacy, self.folded, self._make_posterior)

    def __deepcopy__(self, memo: dict[int, Any]) -> RunResult:
        """A copy in this process has the same state."""
        rest = copy.deepcopy((self.losses, self.trace, self.privacy, self.folded), memo)
        params = copy.deepcopy(self.params, memo)
        return RunResult(params, self.state, *rest, self._make_posterior)

    def __repr__(self) -> str:
        """Names the fields and shows what was spent."""
        return f"RunResult(params of {sorted(self.params)}, {self.trace!r}, {self.privacy})"


def progress_ranges(num_slots: int) -> list[tuple[int, int]]:
    """Returns ``(first_slot, count)`` of each chunk of :func:`progress_chunks`."""
    chunk = max(1, num_slots // 25)
    return [(at, min(chunk, num_slots - at)) for at in range(0, num_slots, chunk)]


def progress_chunks(
    num_slots: int, stride: int, done: int, plan: Plan, total_epsilon: float
) -> Iterator[tuple[int, int]]:
    """Yields ``(first_slot, count)`` chunks under a bar that shows steps and epsilon spent.

    The epsilon shown is an upper bound for the steps so far: the smaller of the RDP bound and the
    bound of the whole run. It is refreshed only while that costs little of the time passed.

    Args:
        num_slots: Slots to run in all.
        stride: Steps per slot.
        done: Steps taken before.
        plan: What the steps spend.
        total_epsilon: Bound of the whole run.
    """
    from tqdm.auto import tqdm  # as in NumPyro; slow to import, so only for those who watch

    start, spent, cost = time.perf_counter(), 0.0, 0.1  # seconds: so far, of the next bound
    with tqdm(total=num_slots * stride, unit="step") as bar:
        for first, count in progress_ranges(num_slots):
            yield first, count
            finished = (first + count) * stride
            now = time.perf_counter()
            last = first + count == num_slots
            if spent + cost < 0.01 * (now - start) and not last:
                shown = min(_rdp_epsilon(plan, done + finished), total_epsilon)
                cost = time.perf_counter() - now
                spent += cost
                bar.set_postfix_str(f"epsilon <= {shown:.3g}", refresh=False)
            elif last:
                bar.set_postfix_str(f"epsilon <= {total_epsilon:.3g}", refresh=False)
            bar.update(count * stride)


def _rdp_epsilon(plan: Plan, num_steps: int) -> float:
    try:
        return plan.spent(num_steps, accountant=RDP()).epsilon
    except UnsupportedEventError:
        return float("inf")
