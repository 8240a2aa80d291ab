"""The loop of a run: which steps it takes, in which calls, and from where their rows come.

A :class:`Course` splits the steps into calls of one compiled loop (:func:`build_loop`). Between two
calls, :func:`follow` writes a checkpoint and looks for Ctrl-C, and :func:`with_bar` shows progress.

Records may stay on the host (:class:`HostRows`). The device then draws the batches, and a thread
fetches their rows while the device works (:func:`streamed`). The same keys give the same
batches as with all records on the device, so a run spends and returns the same.
"""

from __future__ import annotations

import contextlib
import functools
import math
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import Any, NamedTuple, SupportsInt

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh

from numpyro_dp.core import Batch, PyTree, Sampler
from numpyro_dp.model.records import Rows
from numpyro_dp.privacy.accounting.bounds import UnsupportedEventError
from numpyro_dp.privacy.accounting.rdp import RDP
from numpyro_dp.privacy.plan import PrivacyReport
from numpyro_dp.run.checkpoint import Checkpoint
from numpyro_dp.sums.devices import any_process

LoopCall = tuple[int, int, int]  # first slot, number of slots, steps per slot

_BYTES = 2**26  # largest size of the rows that are fetched at once
_LONGEST = 256  # largest number of steps whose rows are fetched at once


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

    def calls(self, done: int, every: int | None, in_parts: bool) -> list[LoopCall]:
        """Returns the calls of the loop after ``done`` steps.

        A call takes about ``every`` steps. If this is ``None``, it takes a 25th of the run if the
        host needs parts of it, else as many steps as possible.
        """
        steps = every or (max(1, self.num_steps // 25) if in_parts else None)
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
    done: SupportsInt


def build_loop(
    step: Callable[[PyTree, Rows], tuple[PyTree, Array]],
    read: Callable[[PyTree], PyTree],
    measure: Callable[[PyTree, Rows], Rows],
) -> Callable[..., tuple[PyTree, PyTree]]:
    """Returns a compiled loop that runs steps and keeps an iterate of each slot.

    Args:
        step: ``(carry, rows) -> (carry, value)`` with a scalar value. ``carry.state`` is the state
            of the run. The carry may have further sums.
        read: ``state -> iterate``, the iterate to keep.
        measure: ``(state, rows) -> rows`` with the lengths of the records.

    Returns:
        ``loop(carry, buffer, rows, first, count, stride)``. For each slot from ``first``, it runs
        ``stride`` steps, then writes the iterate and the mean value into that slot of the buffer.
        ``first``, ``count`` and ``stride`` are traced, so one compilation serves every length.
    """

    def loop(
        carry: PyTree, buffer: PyTree, rows: Rows, first: Array, count: Array, stride: Array
    ) -> tuple[PyTree, PyTree]:
        # Before the loop: XLA does not always move what is constant out of a loop.
        rows = measure(carry.state, rows)

        def one_step(_: Array, before: tuple[PyTree, Array]) -> tuple[PyTree, Array]:
            carry, total = before
            carry, value = step(carry, rows)
            return carry, total + value.astype(total.dtype)

        def one_slot(slot: Array, before: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
            carry, buffer = before
            # The mean value of a slot, which is a loss only if the run releases it.
            zero = jnp.zeros((), jnp.float32)
            carry, total = lax.fori_loop(0, stride, one_step, (carry, zero))
            kept = (read(carry.state), total / stride)
            buffer = jax.tree.map(
                lambda into, leaf: lax.dynamic_update_index_in_dim(into, leaf, slot, 0),
                buffer,
                kept,
            )
            return carry, buffer

        return lax.fori_loop(first, first + count, one_slot, (carry, buffer))

    return jax.jit(loop)


def follow(
    loop: Callable[..., tuple[PyTree, PyTree]],
    progress: Progress,
    rows: PyTree,
    calls: Iterable[LoopCall],
    kept: Checkpoint | None = None,
    watched: bool = False,
    mesh: Mesh | None = None,
) -> tuple[Progress, bool]:
    """Returns the progress after calls of a loop, and whether Ctrl-C was pressed.

    If ``watched``, Ctrl-C ends the loop after the present call. In one process of a mesh it stops
    all processes after the same call.

    Args:
        loop: From :func:`build_loop`.
        progress: The progress before.
        rows: The records.
        calls: From :meth:`Course.calls`.
        kept: Where to keep the progress after every call.
        watched: Whether to look for Ctrl-C.
        mesh: Devices of the run.
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

    def press(number: int, frame: FrameType | None) -> None:
        if pressed:
            signal.default_int_handler(number, frame)
        pressed.append(True)
        sys.stderr.write("\nStopping after these steps. Press Ctrl-C again to stop at once.\n")

    signal.signal(signal.SIGINT, press)
    try:
        yield lambda: bool(pressed)
    finally:
        signal.signal(signal.SIGINT, usual)


_READING = "{desc} [{elapsed}]"
_RUNNING = "{bar:20} {unit} {n_fmt} of {total_fmt}{postfix} [{elapsed}, {remaining} left] {desc}"


@contextlib.contextmanager
def opened_bar(shown: bool, total: int | None = None, unit: str = "step") -> Iterator[Any]:
    """Yields a progress bar that says what a run does before its first step, or ``None``."""
    if not shown:
        yield None
        return
    from tqdm.auto import tqdm  # NumPyro's choice. Imported here, because the import is slow

    form = _READING if total is None else _RUNNING
    with tqdm(total=total, desc="reading the model", unit=unit, bar_format=form) as bar:
        yield bar


def with_bar(
    bar: Any, calls: Iterable[LoopCall], before: int, done: int, total: int, report: PrivacyReport
) -> Iterable[LoopCall]:
    """Yields the calls while a bar shows steps and epsilon spent.

    The epsilon shown is an upper bound for the steps so far: the smaller of the RDP bound and the
    bound of the whole run. The bar updates it only if that takes at most 1% of the time, so it says
    until which step the bound holds.

    The report of the whole run also counts ``before`` steps before this run. Of the ``total`` steps
    of this run, ``done`` were taken before the calls.
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

    bar.total, bar.initial, bar.n, bar.bar_format = total, done, done, _RUNNING
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


class HostRows(NamedTuple):
    """Records that stay on the host.

    Attributes:
        arrays: Arrays that NumPy can index by row numbers: in memory, a memory map of a file, or an
            Arrow column in one piece by its ``to_numpy()``. The first axis counts records.
        shared: Public arrays.
        num_examples: Number of records.
        numbered: Whether a last array seeds each record's own draws. A step makes new seeds.
    """

    arrays: tuple[Any, ...]
    shared: tuple[Array, ...]
    num_examples: int
    numbered: bool

    def take(self, rows: np.ndarray, size: int) -> tuple[Array, ...]:
        """Returns rows on the device, with zeros up to ``size``."""
        return self._on_device([np.asarray(array[rows]) for array in self.arrays], size)

    def parts(self) -> Iterator[tuple[int, tuple[Array, ...]]]:
        """Yields parts of equal size: the number of the first row, and the arrays.

        The last part ends with zeros. Seeds of records are left out.
        """
        size = min(self.num_examples, max(1, _BYTES // max(1, self.bytes_of_row)))
        for start in range(0, self.num_examples, size):
            own = [np.asarray(array[start : start + size]) for array in self.arrays]
            yield start, self._on_device(own, size)[: len(own)]

    @property
    def bytes_of_row(self) -> int:
        """Size of a row of all arrays."""
        return sum(x.dtype.itemsize * math.prod(np.shape(x)[1:]) for x in self.arrays)

    def _on_device(self, arrays: list[np.ndarray], size: int) -> tuple[Array, ...]:
        # All chunks have one size, so that they share a compilation.
        def padded(found: np.ndarray) -> Array:
            if len(found) == size:
                return jnp.asarray(found)
            whole = np.zeros((size, *found.shape[1:]), found.dtype)
            whole[: len(found)] = found
            return jnp.asarray(whole)

        return (*map(padded, arrays), *[jnp.zeros(size, jnp.uint32)] * self.numbered)


def fetched_batch(size: int, state: tuple[Array, Array]) -> tuple[Batch, tuple[Array, Array]]:
    """Returns the next batch of a chunk, whose rows are in order because they are drawn already.

    Args:
        size: Rows of a batch.
        state: The number of the batch in the chunk, and which rows count, of shape (steps, size).
    """
    step, mask = state
    rows = step * size + jnp.arange(size)
    return Batch(rows, mask[step]), (step + 1, mask)


def streamed(
    loop: Callable[..., tuple[PyTree, PyTree]],
    sampler: Sampler,
    state: PyTree,
    host: HostRows,
    calls: list[LoopCall],
) -> Callable[..., tuple[PyTree, PyTree]]:
    """Returns a loop like ``loop``, which fetches its rows from the host.

    Args:
        loop: From :func:`build_loop`. Its steps take a :func:`fetched_batch`.
        sampler: Draws the batches.
        state: State of the sampler before the first batch.
        host: The records.
        calls: All calls, in order. The thread needs them to fetch ahead.
    """
    size = drawn_size(sampler, state)
    length = max(1, min(_LONGEST, _BYTES // max(1, host.bytes_of_row * size)))
    draw = functools.partial(_drawn, sampler, host.num_examples, length)
    counts = [count * steps for call in calls for _, count, steps in _parts(length, *call)]
    chunks = _fetch(draw, state, host, counts)

    def with_batches(carry: PyTree, state: PyTree) -> PyTree:
        return carry._replace(state=carry.state._replace(sampler_state=state))

    def streaming(
        carry: PyTree, buffer: PyTree, _: HostRows, first: Array, count: Array, stride: Array
    ) -> tuple[PyTree, PyTree]:
        means: dict[int, Array] = {}  # mean value of each slot that several chunks fill
        for slot, number, steps in _parts(length, int(first), int(count), int(stride)):
            arrays, batches, after = next(chunks)
            numbers = (jnp.asarray(n, jnp.int32) for n in (slot, number, steps))
            rows = Rows(arrays, host.shared)
            carry, buffer = loop(with_batches(carry, batches), buffer, rows, *numbers)
            # The sampler's own state again, as a run with all records on the device would have it.
            carry = with_batches(carry, after)
            if steps < int(stride):
                kept, values = buffer
                means[slot] = means.get(slot, 0.0) + values[slot] * (steps / int(stride))
                buffer = kept, values.at[slot].set(means[slot])
        return carry, buffer

    return streaming


def _parts(length: int, first: int, count: int, stride: int) -> Iterator[LoopCall]:
    """Splits a call into calls of at most ``length`` steps."""
    if stride <= length:
        few = length // stride
        for slot in range(first, first + count, few):
            yield slot, min(few, first + count - slot), stride
        return
    for slot in range(first, first + count):
        for done in range(0, stride, length):
            yield slot, 1, min(length, stride - done)


def drawn_size(sampler: Sampler, state: PyTree) -> int:
    """Returns the padded size of a batch.

    Raises:
        ValueError: If every step reads all records.
    """
    batch = jax.eval_shape(sampler.next, state)[0]
    if batch.indices is None:
        raise ValueError(
            f"Expected a sampler that draws some records with stream=True, got {sampler!r}. "
            "It reads all records in every step. Use Poisson(rate), for example."
        )
    return batch.indices.size


def _fetch(
    draw: Callable[..., PyTree], state: PyTree, host: HostRows, counts: list[int]
) -> Iterator[tuple[PyTree, ...]]:
    """Yields chunks of ``counts`` steps, and fetches the next chunk meanwhile.

    A chunk has rows, a state for :func:`fetched_batch`, and the sampler's state after its steps.
    """

    def prepare(state: PyTree, count: int) -> tuple[PyTree, ...]:
        rows, mask, after = draw(state, count)
        taken = host.take(np.asarray(rows)[:count].ravel(), rows.size)
        return taken, (jnp.zeros((), jnp.int32), mask), after

    with ThreadPoolExecutor(1) as thread:
        # Batches depend on keys alone and not on results, so they can be drawn ahead of the steps.
        coming = thread.submit(prepare, state, counts[0])
        for count in [*counts[1:], 0]:
            chunk = coming.result()
            if count:
                coming = thread.submit(prepare, chunk[2], count)
            yield chunk


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _drawn(
    sampler: Sampler, num_examples: int, length: int, state: PyTree, count: Array
) -> tuple[Array, Array, PyTree]:
    """Returns rows and masks of ``count`` batches, padded to ``length``, and the new state."""

    def one(state: PyTree, at: Array) -> tuple[PyTree, tuple[Array, Array]]:
        batch, new = sampler.next(state)
        indices = jnp.asarray(batch.indices)  # which `drawn_size` has seen
        inside = (indices >= 0) & (indices < num_examples)
        mask = inside if batch.mask is None else inside & batch.mask
        # Draws beyond `count` only fill the chunk. They must not advance the key, or later batches
        # would differ from those of a run on the device.
        new = jax.tree.map(lambda after, before: jnp.where(at < count, after, before), new, state)
        # Padding reads some row, and the mask drops it.
        return new, (jnp.clip(indices, 0, num_examples - 1), mask)

    after, (rows, mask) = lax.scan(one, state, jnp.arange(length))
    return rows, mask, after
