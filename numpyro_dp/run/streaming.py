"""Runs on records that stay on the host, and fetches each batch ahead of its step.

The device draws the batches. The same keys give the same batches as with all records on the device,
so a run spends and returns the same. Rows come from anything that NumPy can index by row numbers:
an array in memory, a memory map of a file, or an Arrow column in one piece by its ``to_numpy()``. A
thread fetches the rows of the next steps while the device works.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from numpyro_dp.core import Batch, PyTree, Sampler
from numpyro_dp.model.records import Rows
from numpyro_dp.run.state import RunState

__all__ = ["Fetched", "HostRows", "StreamedLoop", "drawn_size"]

_BYTES = 2**26  # largest size of the rows of a chunk
_LONGEST = 256  # largest number of steps of a chunk


class FetchedState(NamedTuple):
    """State of :class:`Fetched`.

    Attributes:
        step: Number of the next batch of the chunk.
        mask: Which rows count, shape (steps, batch).
    """

    step: Array
    mask: Array


class Fetched(NamedTuple):
    """A sampler that returns the rows of a chunk in their order, because they are drawn already."""

    size: int

    def next(self, state: FetchedState) -> tuple[Batch, FetchedState]:
        """Returns the next batch of the chunk."""
        rows = state.step * self.size + jnp.arange(self.size)
        return Batch(rows, state.mask[state.step]), state._replace(step=state.step + 1)


class HostRows(NamedTuple):
    """The records, on the host.

    Attributes:
        arrays: Arrays that NumPy can index by row numbers. The first axis counts records.
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


class _Chunk(NamedTuple):
    """Rows of some steps, the state of :class:`Fetched`, and the sampler's state after them."""

    arrays: tuple[Array, ...]
    state: FetchedState
    after: PyTree


class StreamedLoop:
    """A loop like that from :func:`numpyro_dp.run.step.build_loop`, which fetches its rows.

    Args:
        loop: A loop of ``build_loop`` whose steps take batches of :class:`Fetched`.
        sampler: Draws the batches.
        state: State of the sampler before the first batch.
        host: The records.
        calls: Arguments ``(first, count, stride)`` of all calls, in order. The thread needs them to
            fetch ahead.
    """

    def __init__(
        self,
        loop: Callable[..., tuple[PyTree, PyTree]],
        sampler: Sampler,
        state: PyTree,
        host: HostRows,
        calls: list[tuple[int, int, int]],
    ) -> None:
        size = drawn_size(sampler, state)
        self._length = max(1, min(_LONGEST, _BYTES // max(1, host.bytes_of_row * size)))
        draw = functools.partial(_drawn, sampler, host.num_examples, self._length)
        counts = [count * steps for call in calls for _, count, steps in self._parts(*call)]
        self._loop, self._shared = loop, host.shared
        self._chunks = _fetch(draw, state, host, counts)

    def __call__(
        self, carry: PyTree, buffer: PyTree, _: HostRows, first: Any, count: Any, stride: Any
    ) -> tuple[PyTree, PyTree]:
        """Runs ``stride`` steps for each of ``count`` slots."""
        means: dict[int, Any] = {}  # mean value of each slot that several chunks fill
        for slot, number, steps in self._parts(int(first), int(count), int(stride)):
            chunk = next(self._chunks)
            rows = Rows(chunk.arrays, self._shared)
            carry, buffer = self._loop(
                _with_batches(carry, chunk.state), buffer, rows,
                *(jnp.asarray(n, jnp.int32) for n in (slot, number, steps)),
            )  # fmt: skip
            # The sampler's own state again, as a run with all records on the device would have it.
            carry = _with_batches(carry, chunk.after)
            if steps < int(stride):
                kept, values = buffer
                means[slot] = means.get(slot, 0.0) + values[slot] * (steps / int(stride))
                buffer = kept, values.at[slot].set(means[slot])
        return carry, buffer

    def _parts(self, first: int, count: int, stride: int) -> Iterator[tuple[int, int, int]]:
        """Splits a call into parts ``(first, count, steps per slot)`` that fit a chunk."""
        if stride <= self._length:
            few = self._length // stride
            for slot in range(first, first + count, few):
                yield slot, min(few, first + count - slot), stride
            return
        for slot in range(first, first + count):
            for done in range(0, stride, self._length):
                yield slot, 1, min(self._length, stride - done)


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


def _with_batches(carry: PyTree, sampler_state: PyTree) -> PyTree:
    """Sets the sampler's state in a run's state, alone or in a pair with a fold's state."""
    if isinstance(carry, RunState):
        return carry._replace(sampler_state=sampler_state)
    return carry._replace(state=carry.state._replace(sampler_state=sampler_state))


def _fetch(
    draw: Callable[..., Any], state: PyTree, host: HostRows, counts: list[int]
) -> Iterator[_Chunk]:
    """Yields chunks of ``counts`` steps, and fetches the next chunk meanwhile."""

    def prepare(state: PyTree, count: int) -> _Chunk:
        rows, mask, after = draw(state, count)
        taken = host.take(np.asarray(rows)[:count].ravel(), rows.size)
        return _Chunk(taken, FetchedState(jnp.zeros((), jnp.int32), mask), after)

    with ThreadPoolExecutor(1) as thread:
        # Batches depend on keys alone and not on results, so they can be drawn ahead of the steps.
        coming = thread.submit(prepare, state, counts[0])
        for count in [*counts[1:], 0]:
            chunk = coming.result()
            if count:
                coming = thread.submit(prepare, chunk.after, count)
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
