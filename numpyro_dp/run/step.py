"""One private step, the same for all methods.

The order of calls is the privacy argument. Records enter between ``prepare`` and ``privatise``, and
only the noisy sum leaves. :func:`check_step` looks for records that a part of a step has captured.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from numpyro_dp._compat import make_program, takes_value
from numpyro_dp._tree import filled, widen
from numpyro_dp.core import (
    Arrays,
    Batch,
    Estimator,
    Mechanism,
    MechanismState,
    Observation,
    PyTree,
    Released,
)
from numpyro_dp.model.dependence import loops_by_inputs
from numpyro_dp.model.records import Rows
from numpyro_dp.privacy.mechanism.clip_norm import ClipNorm
from numpyro_dp.privacy.noise import tables
from numpyro_dp.run.loop import HostRows
from numpyro_dp.run.settings import Execution, RunSettings
from numpyro_dp.run.state import RunState
from numpyro_dp.sums.bounded import SumInParts, bounded_sum
from numpyro_dp.sums.devices import copied, on_devices
from numpyro_dp.sums.microbatches import Shards, first_of


class Step(NamedTuple):
    """What one step returns besides the new state.

    Attributes:
        params: The iterate before the step.
        rng_key: Key of the step's draw from the guide.
        released: The noisy sum of the step.
        seen: What it tells about the likelihood, or ``None`` if the estimator does not say.
    """

    params: PyTree
    rng_key: Array
    released: Released
    seen: Observation | None


def build_step(
    private: PrivateParts, draw: Callable[[PyTree], tuple[Batch, PyTree]], centred: bool
) -> Callable[[RunState, Rows], tuple[RunState, Step]]:
    """Composes prepare, signal, clip, sum, privatise and pull back to one step.

    Args:
        private: The parts before and after the sum.
        draw: ``next`` of a sampler.
        centred: Whether the estimator draws outcomes for each record, which needs seeds too.

    Returns:
        ``(state, rows) -> (state, step)``.

    Guarantee:
        Only ``mechanism.privatise`` leads from records to the state. No shape, key or divisor does.
    """
    mesh, few = private.execution.mesh, private.execution.microbatch_size

    def on_batch(rest: PyTree, batch: PyTree, mask: Array, shards: Shards) -> tuple[PyTree, ...]:
        (state, shared), (examples, lengths, seeds) = rest, batch
        before = private.before_sum(state, shared)
        # Always true, but made of an argument, so XLA cannot know it. `pinned` puts the gradients
        # into a branch on it: XLA would drop a constant condition, compute a gradient twice, and
        # could round the copy that is summed in another way than the copy whose norm was taken.
        live = state.step >= 0
        asked = before.estimator, before.mechanism, before.public
        total = bounded_sum(*asked, examples, mask, lengths, live, few, shards, seeds, whole=True)
        state, released = private.after_sum(state, before, total)
        observe = before.estimator.observe
        seen = None if observe is None else observe(before.public, released)
        return state, before.params, before.step_key, released, seen

    everywhere = on_devices(on_batch, mesh)

    def step(state: RunState, rows: Rows) -> tuple[RunState, Step]:
        batch, sampler_state = copied(mesh, draw(state.sampler_state))
        # The row numbers in the last array are public, and seeds must be secret: replace them.
        rows = rows._replace(arrays=rows.arrays[: len(rows.arrays) - private.numbered])
        (examples, lengths), mask = _take(rows, batch.indices, batch.mask)
        seeds = None
        if private.numbered or centred:
            seeds = copied(mesh, _numbers(state.secret_key, mask.size))
        if private.numbered:
            examples = (*examples, seeds)
        state, *found = everywhere((state, rows.shared), (examples, lengths, seeds), mask)
        return state._replace(sampler_state=sampler_state), Step(*found)

    return step


def build_whole_step(private: PrivateParts) -> Callable[[RunState, HostRows], RunState]:
    """Builds the same step on all records, which the host sends in parts.

    The result equals a full batch of :func:`build_step` to the last bit, because the sums of parts
    are integers.

    Returns:
        ``(state, rows) -> state``. It supports methods that sum signals one by one, and mechanisms
        without extra entries.

    Guarantee:
        Only ``mechanism.privatise`` leads from records to the state. Sums of parts stay on the
        device, and only ``privatise`` reads their total.
    """
    private = private._replace(inclusion_prob=1.0)
    mesh, few = private.execution.mesh, private.execution.microbatch_size

    @functools.partial(jax.jit, static_argnums=4)
    def part(state: RunState, shared: Arrays, arrays: Arrays, start: Array, count: int) -> PyTree:
        size = arrays[0].shape[0]
        if private.numbered:
            # Padded, because a slice beyond the end would be moved back to other records' seeds.
            numbers = jnp.pad(_numbers(state.secret_key, count), (0, size))
            arrays = (*arrays, copied(mesh, lax.dynamic_slice_in_dim(numbers, start, size)))

        def on_part(rest: PyTree, examples: PyTree, mask: Array, shards: Shards) -> PyTree:
            state, shared = rest
            parts = private.before_sum(state, shared).parts(first_of(examples), count)
            # Always true, but unknown to XLA: see `live` in build_step.
            return parts.part(examples, mask, state.step >= 0, few, shards)[0]

        # The last part ends with zeros that are not records.
        mask = start + jnp.arange(size) < count
        return on_devices(on_part, mesh)((state, shared), arrays, mask)

    @functools.partial(jax.jit, static_argnums=4)
    def end(state: RunState, shared: Arrays, sums: PyTree, arrays: Arrays, count: int) -> RunState:
        # `arrays` is one row, for its shapes: nothing reads its values.
        examples = (*arrays, jnp.zeros(1, jnp.uint32)) if private.numbered else arrays
        # The state is the one that all parts had, so `prepare` makes the same draw again.
        before = private.before_sum(state, shared)
        total = before.parts(first_of(examples), count).finished(sums)
        return private.after_sum(state, before, total)[0]

    def step(state: RunState, rows: HostRows) -> RunState:
        sums, count = None, rows.num_examples
        for start, arrays in rows.parts():
            found = part(state, rows.shared, arrays, jnp.asarray(start, jnp.int32), count)
            # Sums of integers: their order does not matter, and no rounding depends on a record.
            sums = found if sums is None else jax.tree.map(jnp.add, sums, found)
        return end(state, rows.shared, sums, jax.tree.map(lambda x: x[:1], arrays), count)

    return step


class _BeforeSum(NamedTuple):
    """Values of a step before the sum over records. They do not depend on the batch."""

    rng_key: Array
    step_key: Array
    params: PyTree
    estimator: Estimator
    public: PyTree
    mechanism: Mechanism

    def parts(self, first: PyTree, count: int) -> SumInParts:
        """Returns the sum over ``count`` records. ``first`` has the shapes of one record."""
        asked = self.estimator, self.mechanism, self.public
        return SumInParts(*asked, first, count, whole=True)


class PrivateParts(NamedTuple):
    """The parts of a step before and after the sum over records.

    Attributes:
        estimator: (public arrays of the arguments, mechanism state) -> estimator.
        mechanism: (mechanism state, noise multiplier) -> mechanism.
        optim: An optimiser of NumPyro.
        inclusion_prob: Public probability that a record is in a batch.
        execution: Devices that share the rows of a batch, and rows in memory at a time
            (:mod:`numpyro_dp.sums.bounded`).
        numbered: Whether the last array seeds each record's own draws. A step makes new seeds.
    """

    estimator: Callable[[tuple[Array, ...], MechanismState], Estimator]
    mechanism: Callable[[MechanismState, Array], Mechanism]
    optim: Any
    inclusion_prob: float
    execution: Execution
    numbered: bool

    def before_sum(self, state: RunState, shared: tuple[Array, ...]) -> _BeforeSum:
        """Prepares the sum over records."""
        rng_key, step_key = jax.random.split(state.rng_key)
        params = self.optim.get_params(state.optim_state)
        est = self.estimator(shared, state.mechanism_state)
        mech = self.mechanism(state.mechanism_state, state.noise_multiplier)
        return _BeforeSum(rng_key, step_key, params, est, est.prepare(step_key, params), mech)

    def after_sum(
        self, state: RunState, before: _BeforeSum, total: PyTree
    ) -> tuple[RunState, Released]:
        """Adds noise to the sum. Returns the state after the step, and the released values."""
        # The state keeps only a child of its key, so it does not reveal the noise of past steps.
        secret_key, noise_key = jax.random.split(state.secret_key)
        # The only line of the package that adds privacy noise.
        noisy, adapted = before.mechanism.privatise(noise_key, total, state.mechanism_state)
        released = Released(noisy, before.mechanism.noise_scale)
        # Scaled to all records by a public constant: the size of the batch is private.
        released = jax.tree.map(lambda leaf: leaf / self.inclusion_prob, released)
        update = before.estimator.pull_back(before.public, released)
        state = state._replace(
            optim_state=_optimised(self.optim, update, state.optim_state),
            rng_key=before.rng_key, secret_key=secret_key, mechanism_state=adapted,
            step=state.step + 1,
        )  # fmt: skip
        return state, released


def _optimised(optim: Any, update: PyTree, state: PyTree) -> PyTree:
    """Returns the state of an optimiser after a step."""
    # The loss is sensitive, so Optax transformations that ask for it get nan.
    extra = {"value": jnp.nan} if takes_value(optim) else {}
    return optim.update(update, state, **extra)


def _numbers(secret_key: Array, size: int) -> Array:
    """Returns seeds of the random draws (masks, latents) of each row of a batch.

    They are secret and i.i.d. across records, so removing one record leaves the distribution of the
    others unchanged. They come from a third child of the key: ``after_sum`` uses the first two.
    """
    return jax.random.bits(jax.random.split(secret_key, 3)[2], (size,), jnp.uint32)


def _take(rows: Rows, indices: Array | None, mask: Array | None) -> tuple[PyTree, Array]:
    """Returns the examples of a batch with their lengths, and a mask of those that count."""
    arrays = rows.arrays, rows.lengths
    # The number of records is public, so shapes may depend on it.
    size = rows.arrays[0].shape[0]
    if indices is None:
        return arrays, jnp.ones(size, bool) if mask is None else mask
    # Padding has indices out of range: it reads some row, and the mask below drops it.
    taken = jax.tree.map(lambda array: array.at[indices].get(mode="clip"), arrays)
    # XLA gathers the rows once: without a barrier each sum that reads them could gather again.
    taken = lax.optimization_barrier(taken)
    inside = (indices >= 0) & (indices < size)
    return taken, inside if mask is None else inside & mask


def check_step(
    problem: Any,
    build_estimator: Callable[[tuple[Array, ...], MechanismState], Estimator],
    optim: Any,
    settings: RunSettings,
    optim_state: PyTree,
) -> tuple[PyTree, bool]:
    """Raises if estimator, optimiser, mechanism or sampler captured arrays that may be records.

    It traces a step on one record, so arrays in the model's derivative rules are found too.

    Returns:
        Shapes of the sum of the signals, and whether the time of a step may depend on a record.
    """
    public, shapes = problem.records.public, {}

    def step(
        example: PyTree, optim_state: PyTree, state: MechanismState, shared: PyTree
    ) -> list[Array]:
        estimator = build_estimator(shared, state)
        prepared = estimator.prepare(jax.random.key(0), optim.get_params(optim_state))
        signal = estimator.signal(prepared, example)
        shapes.update(jax.eval_shape(widen, signal))
        update = estimator.pull_back(prepared, Released(signal, jnp.zeros(())))
        found = [optim.get_params(_optimised(optim, update, optim_state))]
        if (centring := estimator.centring) is not None:  # what is drawn for a record
            row = centring.row(
                prepared, example, jnp.zeros((), jnp.uint32), jnp.zeros((), jnp.int32)
            )
            found.append(centring.estimator.signal(prepared, (example, *row)))
        return jax.tree.leaves(found)

    state = MechanismState(settings.clip_norm.as_arrays())
    what = "step (the model's derivative, the estimator or the optimiser)"
    example = problem.blank_example()
    program, _ = make_program(step, example, optim_state, state, problem.shared, validated=False)
    public.check_program(what, program)
    timed = loops_by_inputs(program, len(jax.tree.leaves(example)))
    if not _is_ours(settings.sampler):
        start = settings.sampler.init(jax.random.key(0), problem.num_examples)
        public.check("sampler", settings.sampler.next, start)
    if not _is_ours(settings.privacy.mechanism):
        _check_captured(public, settings, shapes)
    return shapes, timed


def _is_ours(value: object) -> bool:
    return type(value).__module__.startswith("numpyro_dp.")


def _check_captured(public: PyTree, settings: RunSettings, shapes: PyTree) -> None:
    """Raises if a mechanism from outside this package captured arrays that may be records."""
    names = filled(shapes)

    def one_call(noise: Array, norm: ClipNorm, total: PyTree, squares: Arrays) -> PyTree:
        found = settings.privacy.mechanism(norm, noise)
        state = MechanismState(norm, found.init(shapes))
        noisy, _ = found.privatise(jax.random.key(0), total, state)
        return noisy, found.scales(names, squares, 1.0)

    norm = settings.norm_with_loss.fixed().as_arrays()
    squares = tuple(jnp.ones(()) for _ in norm.blocks(names))
    total = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), dict(shapes))
    public.trust(tables())  # it may build on a mechanism of this package
    public.check("mechanism", one_call, jnp.ones(()), norm, total, squares)
