"""The compiled functions of a driver for arguments of one shape: a private step and its loop."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
import secrets
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_dp._compat import jit_once
from numpyro_dp._tree import filled, on_device, shapes_of
from numpyro_dp.core import (
    Args,
    Batch,
    Estimator,
    Fold,
    Kwargs,
    Mechanism,
    MechanismState,
    Observation,
    Problem,
    PyTree,
    Released,
    Values,
)
from numpyro_dp.model.frontend import Prepared
from numpyro_dp.model.held import held_by_function
from numpyro_dp.model.public import PublicArray
from numpyro_dp.model.records import Rows, has_finite_signal
from numpyro_dp.model.units import Grouped
from numpyro_dp.privacy.keys import key_of_lane
from numpyro_dp.privacy.mechanism.clip_norm import ClipNorm, indicator_entry
from numpyro_dp.privacy.mechanism.gaussian import build_mechanism
from numpyro_dp.privacy.mechanism.loss import LOSS_ENTRY, LossRelease, with_loss, with_loss_norm
from numpyro_dp.privacy.plan import PrivacyReport
from numpyro_dp.run.checkpoint import Checkpoint, hash_of, traced
from numpyro_dp.run.loop import (
    Course,
    HostRows,
    Progress,
    build_loop,
    drawn_size,
    fetched_batch,
    follow,
    streamed,
    with_bar,
)
from numpyro_dp.run.results import (
    MOST_LATENTS,
    PrivateLosses,
    ScoreSums,
    Trace,
    score_sums,
    with_observation,
)
from numpyro_dp.run.settings import Method, RunSettings
from numpyro_dp.run.state import RunIdentity, RunState, SensitiveState
from numpyro_dp.run.step import PrivateParts, Step, build_step, build_whole_step, check_step
from numpyro_dp.sums.devices import any_process, copied, spread
from numpyro_dp.sums.factored import record_lengths

_MAX_TRACE = 1000
_MAX_TRACE_NUMBERS = 10**7
_SEALED = 1000  # rows of a large array by which a state knows its records


class Session:
    """Compiled functions for one model, guide and shape of arguments.

    Attributes:
        problem: Model and guide as functions.
        num_examples: Number of records.
        num_latents: Number of latents that the method sees, or else of its parameters.
        param_shapes: Shapes of the parameters by path.
    """

    problem: Problem
    settings: RunSettings
    method: Method
    num_latents: int

    def __init__(self, settings: RunSettings, method: Method, prepared: Prepared) -> None:
        self.problem = problem = prepared.problem
        self.settings, self.method = settings, method
        self.num_examples: int = problem.num_examples
        self.inclusion_prob: float = settings.sampler.inclusion_prob(self.num_examples)
        # The size of the data set is public and fixed, so one session serves one size.
        estimator = self._estimator(problem.shared, MechanismState(settings.clip_norm.as_arrays()))
        self._centred = estimator.centring is not None
        self._build(settings.sampler.next)
        params = method.optim.get_params(prepared.optim_state)
        self.param_shapes: dict[str, tuple[int, ...]] = shapes_of(params)
        self.num_latents = sum(leaf.size for leaf in jax.tree.leaves(params))
        # Checks that need no record run here, so that errors come before any budget is spent.

        def signal(params: Values, example: PyTree) -> PyTree:
            return estimator.signal(estimator.prepare(jax.random.key(0), params), example)

        norm = settings.norm_with_loss
        if norm.entries != (...,):
            norm.check_entries(filled(jax.eval_shape(signal, params, problem.blank_example())))
        self._signal = jit_once(signal)
        self._like = self._shapes_seen(estimator, params)
        self._total, self._timed = check_step(
            problem, self._estimator, method.optim, settings, prepared.optim_state
        )

    def finite(self, params: Values) -> bool:
        """Whether an invented record has a finite signal."""
        return has_finite_signal(self.problem, self._signal, params)

    def _shapes_seen(self, estimator: Estimator, params: PyTree) -> Observation | None:
        """Shapes of what a step releases about the likelihood, or ``None`` for no sums of it."""
        mechanism = self._mechanism(MechanismState(self.settings.clip_norm.as_arrays()), 1.0)
        observe = estimator.observe
        # The sums treat the noise of steps as independent.
        if observe is None or mechanism.compose is not None:
            return None

        def observation(params: PyTree, example: PyTree) -> Observation:
            public = estimator.prepare(jax.random.key(0), params)
            total = estimator.signal(public, example)
            return observe(public, Released(total, jnp.zeros(())))

        found = jax.eval_shape(observation, params, self.problem.blank_example())
        self.num_latents = found.point.size
        return found if self.num_latents <= MOST_LATENTS else None

    def _build(self, draw: Callable[[PyTree], tuple[Batch, PyTree]]) -> None:
        """Sets the functions of a step whose batches come from ``draw``."""
        private = PrivateParts(
            self._estimator, self._mechanism, self.method.optim, self.inclusion_prob,
            self.settings.execution, self.problem.numbered,
        )  # fmt: skip
        self._step = build_step(private, draw, self._centred)
        self._whole = build_whole_step(private)  # compiled at its first call
        # The loop is another program. It needs no guard, because `run` checks budget and noise on
        # the host.
        self._update = jax.jit(self._guarded_step)
        # One per fold.update, so that runs with the same fold share a compilation.
        self._folding_loops: dict[Callable[..., PyTree] | None, Callable[..., PyTree]] = {}
        alone = self._loop_for(None)
        self._loop_many = jax.jit(jax.vmap(alone, in_axes=(0, 0, None, None, None, None)))
        self._streams: dict[int, Session] = {}  # sessions for streamed batches, by batch size

    def with_budget(self, settings: RunSettings) -> Session:
        """Returns the same compiled functions with settings that differ in the budget."""
        twin = copy.copy(self)
        twin.settings = settings
        return twin

    def identity(self, *public: PublicArray) -> RunIdentity:
        """Returns what all steps of a new run share. ``public`` joins the model's public arrays."""
        settings, records = self.settings, self.problem.records
        charges = settings.charges
        return RunIdentity(
            self.num_examples,
            settings.sampler,
            settings.clip_norm,
            settings.privacy.mechanism,
            settings.privacy.loss_release,
            settings.budget,
            settings.privacy.secret_key is not None,
            settings.privacy.repetition,
            self.method.values,
            records.data_plate,
            records.public.arrays + public,
            "" if charges is None else str(charges.ledger.path),
            records.layout.max_rows,
            self._timed,
        )

    def mechanism_state(self, clip_norm: ClipNorm) -> MechanismState:
        """Returns the mechanism's state before the first step."""
        state = MechanismState(clip_norm)
        # Any noise will do: the memory of a mechanism depends on shapes alone.
        mechanism, total = self._mechanism(state, 1.0), dict(self._total)
        if mechanism.extras is not None:
            total |= {indicator_entry(group): jnp.zeros(()) for group in clip_norm.adaptive}
        return MechanismState(clip_norm.as_arrays(), mechanism.init(total))

    def rows(self, args: Args, kwargs: Kwargs) -> Rows:
        """Splits arguments into records and public arrays."""
        rows = self.problem.rows(args, kwargs)
        mesh = self.settings.execution.mesh
        arrays = tuple(each[:] if isinstance(each, Grouped) else each for each in rows.arrays)
        return rows._replace(arrays=spread(mesh, arrays), shared=copied(mesh, rows.shared))

    def update(
        self, state: SensitiveState, args: Args, kwargs: Kwargs
    ) -> tuple[SensitiveState, Array]:
        """Takes one step. The value is ``nan``."""
        return self._update(state, self.rows(args, kwargs))

    def begin(
        self,
        state: SensitiveState,
        num_steps: int,
        trace_size: int | None,
        *,
        warmup: int = 0,
        fold: Fold | None = None,
    ) -> tuple[Course, Progress]:
        """Returns the course of a run, and its progress before the first step.

        Args:
            state: The state before the first step.
            num_steps: Number of steps whose iterates are kept.
            trace_size: Largest number of iterates to keep.
            warmup: Number of steps before them.
            fold: Reads the iterate after every step.
        """
        opened, scores, folded = state.opened, None, None
        buffer, course = self.slots(opened, num_steps, trace_size, warmup)
        if self._like is not None:
            scores = score_sums(self._like, int(opened.step), course.num_steps)
        if fold is not None:
            # With fixed dtypes, so that all calls share a compilation.
            folded = jax.tree.map(
                lambda x: jnp.asarray(x, jnp.result_type(x)),
                fold.init(self.problem.constrain(self._params(opened))),
            )
        return course, Progress(_Carry(opened, scores, folded), buffer, np.int32(0))

    def check_fold(
        self, fold: Fold | None, state: SensitiveState, num_steps: int, report: PrivacyReport
    ) -> PrivacyReport:
        """Raises unless a fold fits a loop of ``num_steps`` steps and captured no records.

        Returns:
            The report of the run, with the public arrays of the fold.
        """
        if fold is None:
            return report
        if not isinstance(fold, Fold):
            raise TypeError(
                "Expected fold to be built by a call, such as tail_average(num_steps), or a Fold, "
                f"got {type(fold).__name__}."
            )
        if fold.num_steps not in (None, num_steps):
            raise ValueError(
                f"Expected a fold for the {num_steps} steps of this run, got one for "
                f"{fold.num_steps}. Pass the same num_steps to both: every run starts a new fold."
            )
        params = self.problem.constrain(self._params(state.opened))
        first = jax.eval_shape(fold.init, params)
        before, after = (
            jax.tree.map(lambda array: f"{array.dtype.name}{list(array.shape)}", each)
            for each in (first, jax.eval_shape(fold.update, first, params))
        )
        if before != after:
            raise TypeError(
                "Expected fold.update to return the shapes and dtypes of fold.init, "
                f"{before}, got {after}. Keep them constant."
            )
        public = self.problem.records.public.copy()
        known = public.arrays
        public.check("fold", fold.init, params)
        public.check("fold", fold.update, first, params)
        public.take("fold", held_by_function(fold.result))
        further = tuple(each for each in public.arrays if each not in known)
        return dataclasses.replace(report, public=report.public + further)

    def run(
        self,
        state: SensitiveState,
        rows: Rows | HostRows,
        begun: tuple[Course, Progress],
        report: PrivacyReport,
        *,
        fold: Fold | None = None,
        bar: Any = None,
        kept: Checkpoint | None = None,
    ) -> Finished:
        """Runs the steps that a course has left.

        Args:
            state: The state before the first step of the course.
            rows: The records.
            begun: From :meth:`begin`, perhaps with the progress of a checkpoint.
            report: Report of the whole run.
            fold: As for :meth:`begin`.
            bar: A progress bar, from :func:`~numpyro_dp.run.loop.opened_bar`.
            kept: Where to keep the progress.

        Raises:
            KeyboardInterrupt: If Ctrl-C was pressed before there was an iterate to keep.
        """
        course, progress = begun
        done, before, loop = int(progress.done), int(state.step), self._loop_for(fold)
        # Only a bar and a checkpoint need several calls, between which the device waits.
        # Processes of a mesh take the same calls, even if only one of them shows a bar.
        watched = kept is not None or any_process(self.settings.execution.mesh, bar is not None)
        calls = course.calls(done, kept and kept.every, watched)
        if isinstance(rows, HostRows) and calls:
            # Only the host knows which rows it fetched, so it gives the batches to the step.
            opened = progress.carry.state
            stream = self._streamed(opened)
            loop = streamed(
                stream._loop_for(fold), self.settings.sampler, opened.sampler_state, rows, calls
            )
        # The bar shows steps and epsilon, which are public, and no loss.
        calls = with_bar(bar, calls, before, done, course.num_steps, report)
        progress, stopped = follow(
            loop, progress, rows, calls, kept, watched, self.settings.execution.mesh
        )
        filled = course.filled(int(progress.done))
        if not filled:
            raise KeyboardInterrupt
        carry, buffer = progress.carry, progress.buffer
        folded = None if fold is None else fold.result(carry.folded)
        # Rounding up the stride can leave slots at the end without an iterate.
        (iterates, norms), values = jax.tree.map(lambda leaf: leaf[:filled], buffer)
        steps = before + course.steps[:filled]
        trace = Trace(steps, jax.vmap(self.problem.constrain)(iterates), norms)
        # Without a release the buffer has zeros in place of losses.
        shown = self.settings.privacy.loss_release is not None
        losses = PrivateLosses(steps, np.asarray(values)) if shown else None
        return Finished(state.closed(carry.state), losses, trace, folded, carry.scores, stopped)

    def begin_many(
        self, states: RunState, num_steps: int, trace_size: int | None, warmup: int = 0
    ) -> tuple[Course, Progress]:
        """As :meth:`begin`, for many states, stacked along a leading axis."""
        number = states.step.shape[0]
        # Runs of a sweep differ in numbers alone, so the first one gives the shapes of all.
        first = jax.tree.map(lambda leaf: leaf[0], states)
        # Fewer slots than for one run, because the traces of all runs are in memory at once.
        buffer, course = self.slots(first, num_steps, trace_size, warmup, number)
        buffer = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (number, *leaf.shape)), buffer)
        return course, Progress(_Carry(states, None, None), buffer, np.int32(0))

    def run_many(
        self, rows: Rows, begun: tuple[Course, Progress], kept: Checkpoint | None = None
    ) -> tuple[PyTree, PyTree, PyTree, Array]:
        """Runs many states in lockstep.

        Returns:
            Constrained parameters, those of the trace with its clip norms, and the losses, each
            with the leading axis of the states.

        Raises:
            KeyboardInterrupt: If Ctrl-C was pressed and there is a checkpoint to continue from.
        """
        course, progress = begun
        watched = kept is not None
        calls = course.calls(int(progress.done), kept and kept.every, watched)
        progress, stopped = follow(
            self._loop_many, progress, rows, calls, kept, watched, self.settings.execution.mesh
        )
        if stopped:
            raise KeyboardInterrupt
        filled = jax.tree.map(lambda leaf: leaf[:, : course.slots], progress.buffer)
        (iterates, norms), values = filled
        constrain = jax.vmap(self.problem.constrain)
        params = constrain(jax.vmap(self._params)(progress.carry.state))
        return params, jax.vmap(constrain)(iterates), norms, values

    def program(
        self, begun: tuple[Course, Progress], rows: Rows | HostRows, fold: Fold | None = None
    ) -> str:
        """Returns a hash of the compiled loop and of public values. Reads shapes of records."""
        progress, zero = begun[1], jnp.zeros((), jnp.int32)
        arrays = [(x.shape, jax.dtypes.canonicalize_dtype(x.dtype)) for x in rows.arrays]
        if isinstance(rows, HostRows) and rows.numbered:
            arrays.append(((rows.num_examples,), jnp.dtype(jnp.uint32)))
        shapes = Rows(tuple(jax.ShapeDtypeStruct(*each) for each in arrays), rows.shared)
        arguments = progress.carry, progress.buffer, shapes, zero, zero, zero
        # Values of public leaves only: the rest of the progress has keys, and the rows are records.
        public = rows.shared, progress.carry.state.optim_state, progress.carry.folded
        return traced(self._loop_for(fold), arguments, public)[0]

    def host_rows(self, args: Args, kwargs: Kwargs) -> HostRows:
        """Splits arguments as :meth:`rows` does, but leaves the records on the host."""
        if self.settings.several_processes:
            raise ValueError(
                "stream=True does not support a mesh of several processes. Leave stream out, and "
                "pass arrays from jax.make_array_from_process_local_data."
            )
        arrays, shared, _ = self.problem.records.layout.rows(args, kwargs)
        return HostRows(arrays, shared, self.num_examples, self.problem.numbered)

    def records(self, args: Args, kwargs: Kwargs) -> Args:
        """Returns all arrays of records, as they were passed."""
        return self.problem.records.layout.rows(args, kwargs).arrays

    def seal(self, records: Args, salt: str | None = None) -> tuple[str, str] | None:
        """Returns a salt and a keyed hash of the records, or of some rows of large arrays.

        ``None`` if processes share them.
        """
        # A process may hold a part of the rows only.
        if self.settings.several_processes:
            return None
        salt = secrets.token_hex(32) if salt is None else salt
        return salt, hash_of(records, salt, most=_SEALED)

    def _streamed(self, state: RunState) -> Session:
        """Returns this session with batches that the host has fetched."""
        size = drawn_size(self.settings.sampler, state.sampler_state)
        if size not in self._streams:
            # A copy shares the checks and shapes, and gets its own compiled step.
            self._streams[size] = copy.copy(self)
            self._streams[size]._build(functools.partial(fetched_batch, size))
        return self._streams[size]

    def _params(self, state: RunState) -> PyTree:
        return self.method.optim.get_params(state.optim_state)

    def _loop_for(self, fold: Fold | None) -> Callable[..., PyTree]:
        """Returns a loop that also updates sums of scores, and a fold if there is one."""
        update = fold and fold.update  # not the fold: folds with the same update share the loop

        def step(carry: _Carry, rows: Rows) -> tuple[_Carry, Array]:
            before, scores, folded = carry
            state, taken = self._step(before, rows)
            if scores is not None and taken.seen is not None:
                scores = with_observation(scores, before.step, taken.seen)
            if update is not None:
                folded = update(folded, self.problem.constrain(self._params(state)))
            return _Carry(state, scores, folded), self._value(before, rows, taken)

        if update not in self._folding_loops:
            self._folding_loops[update] = build_loop(step, self._kept, self._measure)
        return self._folding_loops[update]

    def on_all(self, state: SensitiveState, rows: HostRows) -> SensitiveState:
        """Takes a step on all records, which the host sends in parts."""
        return state.closed(self._whole(state.opened, rows))

    def slots(
        self,
        state: RunState,
        num_steps: int,
        trace_size: int | None,
        warmup: int = 0,
        number: int = 1,
    ) -> tuple[PyTree, Course]:
        """Returns a buffer for the iterates of a run, and its course."""
        kept = self._kept(state)
        numbers = number * sum(leaf.size for leaf in jax.tree.leaves(kept))
        size = trace_size or min(_MAX_TRACE, max(10, _MAX_TRACE_NUMBERS // max(numbers, 1)))
        # Even distances, because averages over the trace weigh every slot alike.
        stride = math.ceil(num_steps / size)
        slots, rest = divmod(num_steps, stride)
        start = (kept, np.zeros((), np.float32))
        # NumPy makes the buffer, because jnp.zeros would compile a program for each shape.
        buffer = jax.tree.map(
            lambda leaf: on_device(np.zeros((size, *leaf.shape), leaf.dtype)), start
        )
        return buffer, Course(warmup + rest, slots, stride)

    def _kept(self, state: RunState) -> PyTree:
        """Returns what a trace keeps of a state: parameters, and clip norms that adapt."""
        return self._params(state), state.mechanism_state.clip_norm.adapted

    def _estimator(self, shared: tuple[Array, ...], state: MechanismState) -> Estimator:
        estimator = self.method.estimator_of(self.problem.at(shared))
        if not self.settings.clip_norm.bounded:
            estimator = estimator._replace(centring=None)  # nothing is clipped
        release = self.settings.privacy.loss_release
        if release is None:
            return estimator
        return with_loss(estimator, _loss_scale(release, state))

    def _mechanism(self, state: MechanismState, noise_multiplier: Array | float) -> Mechanism:
        norm = with_loss_norm(state.clip_norm, self.settings.privacy.loss_release)
        # The expected size: the size of a drawn batch is private.
        batch_size = self.inclusion_prob * self.num_examples
        return build_mechanism(self.settings.privacy.mechanism, norm, noise_multiplier, batch_size)

    def _measure(self, state: RunState, rows: Rows) -> Rows:
        """Finds the lengths of the records once for a loop, because no step changes them."""
        estimator = self._estimator(rows.shared, state.mechanism_state)
        public = estimator.prepare(state.rng_key, self._params(state))
        return rows._replace(lengths=record_lengths(estimator, public, rows.arrays))

    def _guarded_step(self, state: SensitiveState, rows: Rows) -> tuple[SensitiveState, Array]:
        """A step for :meth:`update`, safe inside compiled code, which cannot raise errors."""
        # The nonce gives two calls with one state different noise. Lanes of a vmap can share a
        # state, so each lane gets its own keys, also if only the rows differ between lanes.
        before = state.opened_once()
        start = before.with_new_keys(lambda keys: key_of_lane(keys, (before, rows)))
        new, _ = self._step(start, rows)
        # Beyond the budget the result is dropped, so no more is released.
        active = before.step < before.max_steps
        new = jax.tree.map(lambda after, before: jnp.where(active, after, before), new, before)
        return state.closed(new), jnp.full((), jnp.nan)

    def _value(self, state: RunState, rows: Rows, step: Step) -> Array:
        """The loss of a step from ``state``, if it was released."""
        release, public_loss = self.settings.privacy.loss_release, self.method.public_loss
        if release is None or public_loss is None:  # Driver refuses a release without a loss
            return jnp.zeros(())
        # The norm of this step. In the state after it, an adaptive norm has moved.
        scale = _loss_scale(release, state.mechanism_state)
        log_likelihood = step.released.total[LOSS_ENTRY] / scale
        # Key and parameters of the step give its draw again.
        problem = self.problem.at(rows.shared)
        return -(log_likelihood + public_loss(problem, step.params, step.rng_key))


class Finished(NamedTuple):
    """What a run leaves.

    Attributes:
        state: The state after its last step.
        losses: Losses, if the run shows or releases them.
        trace: Thinned iterates.
        folded: Result of the fold.
        scores: Sums of released scores, if the method has them.
        stopped: Whether Ctrl-C was pressed.
    """

    state: SensitiveState
    losses: PrivateLosses | None
    trace: Trace
    folded: PyTree
    scores: ScoreSums | None
    stopped: bool


class _Carry(NamedTuple):
    state: RunState
    scores: ScoreSums | None
    folded: PyTree


def _loss_scale(release: LossRelease, state: MechanismState) -> Array:
    """Returns the factor that maps the bound on a log likelihood to its clip norm."""
    # The norm may adapt, and the share of the loss in the sensitivity must stay the same.
    return with_loss_norm(state.clip_norm, release).by_entry[LOSS_ENTRY] / release.clip
