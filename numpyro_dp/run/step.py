"""One private step, and the loop that runs it: compiled once, whatever the method.

The composition is the privacy argument. Records enter in one place, between ``prepare`` and
``privatise``; what leaves that place is the privatised sum and nothing else.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh

from numpyro_dp._compat import takes_value
from numpyro_dp.core import (
    Batch,
    Estimator,
    Mechanism,
    MechanismState,
    PyTree,
    Released,
)
from numpyro_dp.model.records import Rows
from numpyro_dp.run.state import RunState
from numpyro_dp.run.streaming import HostRows
from numpyro_dp.sums.bounded import SumInParts, bounded_sum
from numpyro_dp.sums.devices import copied, on_devices
from numpyro_dp.sums.microbatches import Shards, first_of

__all__ = ["Step", "build_loop", "build_step", "build_whole_step", "optimised"]


class Step(NamedTuple):
    """What one step leaves behind besides the new state.

    Attributes:
        params: The iterate before the step.
        rng_key: Key of the step's draw from the guide.
        released: What the step released.
        examples: The batch; sensitive.
        mask: Which entries of the batch count; sensitive.
    """

    params: PyTree
    rng_key: Array
    released: Released
    examples: PyTree
    mask: Array


def build_step(
    estimator: Callable[[tuple[Array, ...], MechanismState], Estimator],
    mechanism: Callable[[MechanismState, Array], Mechanism],
    draw: Callable[[PyTree], tuple[Batch, PyTree]],
    optim: Any,
    inclusion_prob: float,
    microbatch_size: int | None = None,
    mesh: Mesh | None = None,
    numbered: bool = False,
) -> Callable[[RunState, Rows], tuple[RunState, Step]]:
    """Composes prepare, signal, bound, sum, privatise and pull back to one step.

    Args:
        estimator: (public arrays of the arguments, mechanism state) -> estimator.
        mechanism: (mechanism state, noise multiplier) -> mechanism.
        draw: ``next`` of a sampler.
        optim: An optimiser of NumPyro.
        inclusion_prob: The public probability that a record is in a batch.
        microbatch_size: Rows that are in memory at a time (:mod:`numpyro_dp.sums.bounded`).
        mesh: Devices that share the rows of a batch.
        numbered: Whether the last array numbers the records; a step numbers its rows afresh.

    Returns:
        ``(state, rows) -> (state, step)``.

    Guarantee:
        Only ``mechanism.privatise`` leads from records to the state; no shape, key or divisor does.
    """
    private = _Private(estimator, mechanism, optim, inclusion_prob)

    def on_batch(rest: PyTree, batch: PyTree, mask: Array, shards: Shards) -> tuple[PyTree, ...]:
        (state, shared), (examples, lengths) = rest, batch
        begun = private.begun(state, shared)
        live = state.step >= 0  # always, but no compiler knows
        asked = begun.estimator, begun.mechanism, begun.public
        total = bounded_sum(*asked, examples, mask, lengths, live, microbatch_size, shards)
        state, released = private.ended(state, begun, total)
        return state, begun.params, begun.step_key, released

    everywhere = on_devices(on_batch, mesh)

    def step(state: RunState, rows: Rows) -> tuple[RunState, Step]:
        batch, sampler_state = copied(mesh, draw(state.sampler_state))
        rows = rows._replace(arrays=rows.arrays[: len(rows.arrays) - numbered])
        (examples, lengths), mask = _take(rows, batch.indices, batch.mask)
        if numbered:
            examples = (*examples, copied(mesh, _numbers(state.secret_key, mask.size)))
        state, *found = everywhere((state, rows.shared), (examples, lengths), mask)
        return state._replace(sampler_state=sampler_state), Step(*found, examples, mask)

    return step


def build_whole_step(
    estimator: Callable[[tuple[Array, ...], MechanismState], Estimator],
    mechanism: Callable[[MechanismState, Array], Mechanism],
    optim: Any,
    microbatch_size: int | None = None,
    mesh: Mesh | None = None,
    numbered: bool = False,
) -> Callable[[RunState, HostRows], RunState]:
    """The same step on all records, which stay on the host and come in parts.

    It gives what :func:`build_step` gives with a full batch, to the last bit: the sums of parts are
    integers.

    Returns:
        ``(state, rows) -> state``, for methods whose signals are summed one by one, and mechanisms
        without entries of their own.

    Guarantee:
        That of :func:`build_step`. Sums of parts stay on the device, and nothing reads them but
        their total's privatisation.
    """
    private = _Private(estimator, mechanism, optim, 1.0)

    @functools.partial(jax.jit, static_argnums=4)
    def part(state: RunState, shared: Any, arrays: Any, start: Array, count: int) -> PyTree:
        size = arrays[0].shape[0]
        if numbered:
            numbers = jnp.pad(_numbers(state.secret_key, count), (0, size))
            arrays = (*arrays, copied(mesh, lax.dynamic_slice_in_dim(numbers, start, size)))

        def on_part(rest: PyTree, examples: PyTree, mask: Array, shards: Shards) -> PyTree:
            state, shared = rest
            parts = private.begun(state, shared).parts(first_of(examples), count)
            return parts.part(examples, mask, state.step >= 0, microbatch_size, shards)[0]

        mask = start + jnp.arange(size) < count
        return on_devices(on_part, mesh)((state, shared), arrays, mask)

    @functools.partial(jax.jit, static_argnums=4)
    def end(state: RunState, shared: Any, sums: PyTree, arrays: Any, count: int) -> RunState:
        examples = (*arrays, jnp.zeros(1, jnp.uint32)) if numbered else arrays
        begun = private.begun(state, shared)
        total = begun.parts(first_of(examples), count).finished(sums)
        return private.ended(state, begun, total)[0]

    def step(state: RunState, rows: HostRows) -> RunState:
        sums, count = None, rows.num_examples
        for start, arrays in rows.parts():
            found = part(state, rows.shared, arrays, jnp.asarray(start, jnp.int32), count)
            sums = found if sums is None else jax.tree.map(jnp.add, sums, found)
        return end(state, rows.shared, sums, jax.tree.map(lambda x: x[:1], arrays), count)

    return step


class _Begun(NamedTuple):
    """A step before the sum over records: all of it is public, or the mechanism's."""

    rng_key: Array
    step_key: Array
    params: PyTree
    estimator: Estimator
    public: PyTree
    mechanism: Mechanism

    def parts(self, first: PyTree, count: int) -> SumInParts:
        """The sum over ``count`` records; ``first`` has the shapes of one of them."""
        return SumInParts(self.estimator, self.mechanism, self.public, first, count)


class _Private(NamedTuple):
    """What a step does before and after the sum over records."""

    estimator: Callable[[tuple[Array, ...], MechanismState], Estimator]
    mechanism: Callable[[MechanismState, Array], Mechanism]
    optim: Any
    inclusion_prob: float

    def begun(self, state: RunState, shared: tuple[Array, ...]) -> _Begun:
        """Finds all that the sum over records needs."""
        rng_key, step_key = jax.random.split(state.rng_key)
        params = self.optim.get_params(state.optim_state)
        est = self.estimator(shared, state.mechanism_state)
        mech = self.mechanism(state.mechanism_state, state.noise_multiplier)
        return _Begun(rng_key, step_key, params, est, est.prepare(step_key, params), mech)

    def ended(self, state: RunState, begun: _Begun, total: PyTree) -> tuple[RunState, Released]:
        """Privatises: the state after the step, and what it released."""
        secret_key, noise_key = jax.random.split(state.secret_key)
        noisy, adapted = begun.mechanism.privatise(noise_key, total, state.mechanism_state)
        released = _over(self.inclusion_prob, Released(noisy, begun.mechanism.noise_scale))
        update = begun.estimator.pull_back(begun.public, released)
        state = state._replace(
            optim_state=optimised(self.optim, update, state.optim_state),
            rng_key=begun.rng_key, secret_key=secret_key, mechanism_state=adapted,
            step=state.step + 1,
        )  # fmt: skip
        return state, released


def _over(inclusion_prob: float, released: Released) -> Released:
    """Estimates of sums over all records: a public constant divides, never the size of a batch."""
    return jax.tree.map(lambda leaf: leaf / inclusion_prob, released)


def build_loop(
    step: Callable[[PyTree, Rows], tuple[PyTree, Array]],
    read: Callable[[PyTree], PyTree],
    measure: Callable[[PyTree, Rows], Rows],
) -> Callable[..., tuple[PyTree, PyTree]]:
    """Returns a compiled loop that runs steps and keeps every so many iterates.

    Args:
        step: ``(state, rows) -> (state, value)`` with a scalar value, averaged between records.
            The state is a :class:`RunState`, alone or in a pair with that of a fold.
        read: ``state -> iterate``, what is kept.
        measure: ``(state, rows) -> rows`` with the lengths of each record.

    Returns:
        ``loop(state, buffer, rows, first, count, stride)``: for each slot from ``first``, runs
        ``stride`` steps and writes the iterate and the mean value into the slot of the buffer.
        ``first``, ``count`` and ``stride`` are traced, so one compilation serves every length.
    """

    def loop(
        state: PyTree, buffer: PyTree, rows: Rows, first: Array, count: Array, stride: Array
    ) -> tuple[PyTree, PyTree]:
        rows = measure(state, rows)

        def one_step(_: Array, carry: tuple[PyTree, Array]) -> tuple[PyTree, Array]:
            state, total = carry
            state, value = step(state, rows)
            return state, total + value.astype(total.dtype)

        def one_slot(slot: Array, carry: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
            state, buffer = carry
            zero = jnp.zeros((), jnp.float32)
            state, total = lax.fori_loop(0, stride, one_step, (state, zero))
            kept = (read(state), total / stride)
            buffer = jax.tree.map(
                lambda into, leaf: lax.dynamic_update_index_in_dim(into, leaf, slot, 0),
                buffer,
                kept,
            )
            return state, buffer

        return lax.fori_loop(first, first + count, one_slot, (state, buffer))

    return jax.jit(loop)


def optimised(optim: Any, update: PyTree, state: PyTree) -> PyTree:
    """Returns the state of an optimiser after a step."""
    # Optax transformations that read the loss are given nan: it is sensitive.
    extra = {"value": jnp.nan} if takes_value(optim) else {}
    return optim.update(update, state, **extra)


def _numbers(secret_key: Array, size: int) -> Array:
    """Numbers by which the rows of a batch draw for themselves (masks, latents).

    They are secret and i.i.d. across records, so removing one leaves the others' distribution
    unchanged. They come from a third child of the key; the first two are taken.
    """
    return jax.random.bits(jax.random.split(secret_key, 3)[2], (size,), jnp.uint32)


def _take(rows: Rows, indices: Array | None, mask: Array | None) -> tuple[PyTree, Array]:
    """Returns the examples of a batch with their lengths, and which of them count."""
    arrays = rows.arrays, rows.lengths
    size = rows.arrays[0].shape[0]
    if indices is None:
        return arrays, jnp.ones(size, bool) if mask is None else mask
    taken = jax.tree.map(lambda array: array.at[indices].get(mode="clip"), arrays)
    taken = lax.optimization_barrier(taken)  # gathered once, not in each sum that reads it
    inside = (indices >= 0) & (indices < size)
    return taken, inside if mask is None else inside & mask
