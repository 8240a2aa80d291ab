"""The course of a run: its steps in calls of a compiled loop, a progress bar, and Ctrl-C."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from numpyro_dp.core import PyTree
from numpyro_dp.privacy.accounting import RDP, UnsupportedEventError
from numpyro_dp.privacy.plan import PrivacyReport
from numpyro_dp.run.checkpoint import Checkpoint
from numpyro_dp.sums.devices import any_process

__all__ = ["Call", "Course", "Progress", "follow", "opened_bar", "with_bar"]

Call = tuple[int, int, int]  # first slot, number of slots, steps per slot


class Course(NamedTuple):
    """Which steps a run takes, and where it keeps iterates.

    Attributes:
        rest: Steps that fill no slot. They come first, so that the last iterate is kept.
        slots: Number of iterates to keep.
        stride: Steps for each of them.
    """

    rest: int
    slots: int
    stride: int

    @property
    def num_steps(self) -> int:
        """All steps of the run."""
        return self.rest + self.slots * self.stride

    @property
    def steps(self) -> np.ndarray:
        """The number of steps after which each slot is filled."""
        return self.rest + self.stride * np.arange(1, self.slots + 1)

    def filled(self, done: int) -> int:
        """Returns how many slots are full after ``done`` steps."""
        return max(0, done - self.rest) // self.stride

    def calls(self, done: int, steps: int | None) -> list[Call]:
        """Returns the calls of the loop after ``done`` steps.

        Args:
            done: Number of steps that earlier calls took.
            steps: About how many steps a call takes. ``None`` for as many as possible.
        """
        left, found = self.rest - done, []
        while left > 0:
            now = min(left, steps or left)
            # Slot 0 is only lent: the first call that fills slots overwrites it.
            found.append((0, 1, now))
            left -= now
        slot = self.filled(done)
        many = max(1, steps // self.stride) if steps else self.slots
        for first in range(slot, self.slots, many):
            found.append((first, min(many, self.slots - first), self.stride))
        return found


class Progress(NamedTuple):
    """How far a run is. Sensitive: it holds the keys of all later steps.

    Attributes:
        carry: What the loop carries from step to step.
        buffer: Iterates and values of the slots.
        done: Number of steps taken.
    """

    carry: PyTree
    buffer: PyTree
    done: Any


def follow(
    loop: Callable[..., tuple[PyTree, PyTree]],
    progress: Progress,
    rows: Any,
    calls: Iterable[Call],
    kept: Checkpoint | None = None,
    watched: bool = False,
    mesh: Mesh | None = None,
) -> tuple[Progress, bool]:
    """Returns the progress after calls of a loop, and whether Ctrl-C was pressed.

    Args:
        loop: ``loop(carry, buffer, rows, first, count, stride)``, compiled.
        progress: The progress before.
        rows: The records.
        calls: From :meth:`Course.calls`.
        kept: Where to keep the progress after every call.
        watched: Whether Ctrl-C ends the loop after the present call.
        mesh: Devices of the run. Ctrl-C in one of their processes stops all after the same call.
    """
    with _stop_at_interrupt() if watched else contextlib.nullcontext(lambda: False) as stopped:
        for call in calls:
            numbers = (jnp.asarray(number, jnp.int32) for number in call)
            carry, buffer = loop(progress.carry, progress.buffer, rows, *numbers)
            jax.block_until_ready(buffer)  # or a bar would run ahead of the device
            progress = Progress(carry, buffer, np.int32(int(progress.done) + call[1] * call[2]))
            if kept is not None:
                kept.save(progress)
            if watched and any_process(mesh, stopped()):
                return progress, True
        return progress, False


@contextlib.contextmanager
def _stop_at_interrupt() -> Iterator[Callable[[], bool]]:
    """Yields a function that tells whether Ctrl-C was pressed. A second Ctrl-C interrupts at once.

    Python may raise ``KeyboardInterrupt`` between any two lines. A run stops between two calls of
    its loop instead, so that all steps it has taken are counted and kept.
    """
    pressed: list[bool] = []
    usual = signal.getsignal(signal.SIGINT)
    # Python accepts signal handlers in the main thread alone.
    own_thread = threading.current_thread() is threading.main_thread()
    if not own_thread or usual is not signal.default_int_handler:
        yield lambda: False  # a program that has its own handler keeps it
        return

    def press(number: int, frame: Any) -> None:
        if pressed:
            signal.default_int_handler(number, frame)
        pressed.append(True)
        sys.stderr.write("\nStopping after these steps. Press Ctrl-C again to stop at once.\n")

    signal.signal(signal.SIGINT, press)
    try:
        yield lambda: bool(pressed)
    finally:
        signal.signal(signal.SIGINT, usual)


@contextlib.contextmanager
def opened_bar(shown: bool, total: int | None = None, unit: str = "step") -> Iterator[Any]:
    """Yields a progress bar that says what a run does before its first step, or ``None``.

    Args:
        shown: Whether there is a bar.
        total: All steps of the run, if they are known.
        unit: What is counted.
    """
    if not shown:
        yield None
        return
    from tqdm.auto import tqdm  # NumPyro's choice. Imported here, because the import is slow

    with tqdm(total=total, desc="reading the model", unit=unit) as bar:
        yield bar


def with_bar(
    bar: Any, calls: Iterable[Call], before: int, done: int, total: int, report: PrivacyReport
) -> Iterable[Call]:
    """Yields the calls while a bar shows steps and epsilon spent.

    The epsilon shown is an upper bound for the steps so far: the smaller of the RDP bound and the
    bound of the whole run. The bar updates it only if that takes at most 1% of the time, so it says
    until which step the bound holds.

    Args:
        bar: From :func:`opened_bar`. With ``None`` nothing is shown.
        calls: Calls of the loop.
        before: Steps before this run, which the report counts.
        done: Steps of this run before the calls.
        total: All steps of this run.
        report: Report of the whole run.
    """
    if bar is None:
        yield from calls
        return

    def bound(num_steps: int) -> float:
        try:
            spent = report.plan.spent(num_steps, accountant=RDP()).epsilon
        except UnsupportedEventError:
            # The bound of the whole run holds for its first steps too.
            return report.epsilon
        return min(spent, report.epsilon)

    bar.total, bar.initial, bar.n = total, done, done
    bar.set_description_str("compiling the step")  # until the first call returns
    start, spent, cost = time.perf_counter(), 0.0, 0.1  # seconds: all bounds, the next bound
    for call in calls:
        yield call
        if bar.desc:
            bar.set_description_str("", refresh=False)
        now = time.perf_counter()
        done += call[1] * call[2]
        if done == total:
            bar.set_postfix_str(f"epsilon <= {report.epsilon:.3g}", refresh=False)
        elif spent + cost < 0.01 * (now - start):
            shown = bound(before + done)
            cost = time.perf_counter() - now
            spent += cost
            text = f"epsilon <= {shown:.3g} until step {before + done}"
            bar.set_postfix_str(text, refresh=False)
        bar.update(call[1] * call[2])
