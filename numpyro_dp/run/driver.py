"""The base class of all drivers: settings and a method around one private step."""

from __future__ import annotations

import abc
import copy
import dataclasses
import functools
import inspect
import os
import types
from collections.abc import Callable, Hashable
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_dp._compat import is_tracer
from numpyro_dp._tree import shapes_of
from numpyro_dp._validate import check_int, check_num_steps, check_sizes
from numpyro_dp.core import (
    Args,
    Arrays,
    Estimator,
    Fold,
    Kwargs,
    PyTree,
    Released,
    Values,
)
from numpyro_dp.model.frames import as_arrays
from numpyro_dp.model.frontend import Call, Prepared, arguments_key
from numpyro_dp.model.public import UnsupportedModelError, values_given
from numpyro_dp.model.records import Records, array_shapes
from numpyro_dp.model.structure import ModelStructure
from numpyro_dp.privacy.keys import check_rng_key, check_rng_keys
from numpyro_dp.privacy.mechanism.gaussian import build_mechanism
from numpyro_dp.privacy.once import check_outside_trace, check_passed_to_trace, in_trace
from numpyro_dp.privacy.plan import BudgetError, PrivacyReport
from numpyro_dp.run.checkpoint import check_every, checkpoint_of, started, without_own_run
from numpyro_dp.run.loop import Progress, opened_bar
from numpyro_dp.run.results import WARMUP, Forecast, RunInterrupted, RunResult, forecast
from numpyro_dp.run.session import Session
from numpyro_dp.run.settings import OF_MODELS, Method, RunSettings, without
from numpyro_dp.run.state import (
    RunState,
    SensitiveState,
    charge,
    check_identity,
    check_state,
    noise_fields,
    plan_for,
    registered,
    secret_of,
    spent_by,
    taken_only,
    used,
    with_new_noise,
)
from numpyro_dp.run.sweep import SweepResult, combinations, run_sweep
from numpyro_dp.sums.devices import copied

_UNLIMITED = np.iinfo(np.int32).max
_ATTEMPTS = 10  # first values that a driver tries


class Driver(abc.ABC):
    """Plans, runs and accounts for private steps. A subclass says what is fitted.

    Args:
        method: Estimator and optimiser.
        settings: What all drivers share.

    Attributes:
        reads_model: Whether ``structure`` reads a NumPyro model. Without one, the constructor
            refuses settings that only a model gives a meaning.
        records_of_model: Whether ``structure`` returns the records of a model alone.
    """

    reads_model: ClassVar[bool] = True
    records_of_model: ClassVar[bool] = False
    method: Method
    settings: RunSettings

    def __init__(self, method: Method, settings: RunSettings) -> None:
        useless = ("loss_release",) * (method.public_loss is None)
        useless += OF_MODELS * (not self.reads_model)
        without(settings.privacy, self.name, *useless)
        _check_estimator(method.estimator)
        builder, reason = settings.privacy.mechanism, method.independent_noise
        if reason and build_mechanism(builder, settings.norm_with_loss, 1.0).compose is not None:
            raise ValueError(
                f"mechanism={builder!r} adds noise that depends on the noise of earlier steps. "
                f"{reason}, so the result would be wrong. Use mechanism=GaussianMechanism(), or "
                "DPSVI."
            )
        self.method, self.settings = method, settings
        self._sessions: dict[Hashable, Session] = {}

    @property
    def max_rows(self) -> int | None:
        """Most rows of a unit, or ``None`` if a record is a row."""
        return self.settings.privacy.max_rows_per_unit

    @property
    def name(self) -> str:
        """Name of the driver in messages."""
        return type(self).__name__

    def get_params(self, state: SensitiveState) -> Values:
        """Returns the parameters at a state. You may publish them."""
        return self.method.optim.get_params(check_state(state).optim_state)

    @abc.abstractmethod
    def structure(self, args: Args, kwargs: Kwargs) -> ModelStructure | Records:
        """Reads the model from shapes alone."""

    @abc.abstractmethod
    def prepare(self, structure: Any, rng_key: Array, call: Call) -> Prepared:
        """Returns the problem and the first state of the optimiser. Reads no record."""

    def plan(self, num_steps: int, *args: PyTree, **kwargs: PyTree) -> Forecast:
        """Returns how far the noise will move the posterior of a run, at best. Reads no record.

        Args:
            num_steps: Number of steps of the run.
            *args: Arguments of the model (and guide), or arrays of the same shapes.
            **kwargs: Keyword arguments of the model (and guide).

        Raises:
            BudgetError: If the steps do not fit the budget.
        """
        check_num_steps(num_steps, _UNLIMITED - 1)
        session = self._session(*as_arrays(args, kwargs))
        plan = plan_for(self.settings, session.num_examples, num_steps)
        return forecast(plan, session.num_latents, (1 - WARMUP) * num_steps)

    def init(
        self,
        rng_key: Array,
        *args: PyTree,
        init_params: Values | None = None,
        **kwargs: PyTree,
    ) -> SensitiveState:
        """Returns the initial state. Reads shapes, but no record.

        Args:
            rng_key: Key of initial values and draws from the posterior, not of noise or batches.
            *args: Arguments of the model (and guide), with the whole data set.
            init_params: Initial values of parameters by name, as for ``SVI.init``.
            **kwargs: Keyword arguments of the model (and guide).

        Raises:
            UnsupportedModelError: If the model or guide cannot be private as it is written.
            BudgetError: If the plan exceeds the budget, or has a budget but no ``num_steps``.
            NoiseReuseError: If JAX traces the call, or the ``secret_key`` was used before.
        """
        check_outside_trace(f"{self.name}.init")
        check_rng_key(rng_key)
        args, kwargs = as_arrays(args, kwargs)
        state = self._init(rng_key, self.settings.num_steps, args, kwargs, init_params)
        # All steps of the plan are charged now, because nobody counts the calls of a compiled
        # update. If the ledger refuses, the run is not registered either.
        with registered(self.settings, state):
            charge(self.settings, lambda: [spent_by(self.settings, state, int(state.max_steps))])
            return state

    def update(
        self,
        svi_state: SensitiveState,
        *args: PyTree,
        forward_mode_differentiation: bool = False,
        **kwargs: PyTree,
    ) -> tuple[SensitiveState, Array]:
        """Takes one private step on a batch drawn from the data set.

        A call beyond the steps of the budget raises an error outside ``jit``. Inside ``jit`` it
        returns the state unchanged.

        Args:
            svi_state: From :meth:`init` or :meth:`update`. Use each state once. A state from
                another process continues with new noise.
            *args: Arguments of the model (and guide), with the whole data set.
            forward_mode_differentiation: Not supported.
            **kwargs: Keyword arguments of the model (and guide).

        Returns:
            The new state, and ``nan`` in place of the loss, which is private.

        Raises:
            NoiseReuseError: If the state was used before, or a traced function captures it.

        Guarantee:
            Under ``vmap`` each lane has its own noise and batches, even if lanes share a state.
            Each call of a compiled update has its own too, unless you gave the ``secret_key``.
        """
        _check_reverse_mode(forward_mode_differentiation)
        check_state(svi_state)
        check_passed_to_trace(f"{self.name}.update", [svi_state.secret_key])
        args, kwargs = as_arrays(args, kwargs)
        session = self._session(args, kwargs)
        # No plan is made here, so the budget must be the one for which init found the noise.
        self._check_fits(svi_state, session, ("budget",))
        if in_trace():
            # Compiled code cannot raise. It drops steps beyond the budget, and the nonce of the
            # state gives it new keys.
            return session.update(svi_state, args, kwargs)
        if int(svi_state.step) >= int(svi_state.max_steps):
            raise BudgetError(
                f"The budget covers {int(svi_state.max_steps)} updates, and all have been taken. "
                "Plan for more with DPSVI(..., num_steps=T)."
            )
        with used(self.settings, svi_state, 1) as known:
            # A state that this process did not start may continue elsewhere too: it gets new noise.
            state = svi_state if known else with_new_noise(self.settings, svi_state)
            return session.update(copied(self.settings.execution.mesh, state), args, kwargs)

    def privacy(self, svi_state: SensitiveState) -> PrivacyReport:
        """Returns what the steps so far have spent, for a loop of :meth:`update`.

        Args:
            svi_state: A state of this driver, outside ``jit``.

        Raises:
            ValueError: If no step has been taken.
            BudgetError: If the state belongs to another sampler, clip norm or method.
        """
        check_state(svi_state)
        check_int("number of steps taken", int(svi_state.step), low=1, remedy="Call update first.")
        own = self.settings
        identity = dataclasses.replace(
            svi_state.identity, sampler=own.sampler, clip_norm=own.clip_norm,
            mechanism=own.privacy.mechanism, loss_release=own.privacy.loss_release,
            method=self.method.values,
        )  # fmt: skip
        check_identity(svi_state, identity)
        return spent_by(own, svi_state, int(svi_state.step))

    def run(
        self,
        rng_key: Array,
        num_steps: int,
        *args: PyTree,
        progress_bar: bool = True,
        stable_update: bool = False,
        forward_mode_differentiation: bool = False,
        init_state: SensitiveState | None = None,
        init_params: Values | None = None,
        trace_size: int | None = None,
        fold: Fold | None = None,
        stream: bool = False,
        checkpoint: str | os.PathLike[str] | None = None,
        every: int | None = None,
        **kwargs: PyTree,
    ) -> RunResult:
        """Runs ``num_steps`` private steps in one compiled loop.

        Args:
            rng_key: Key of initial values and draws from the posterior.
            num_steps: Number of steps.
            *args: Arguments of the model (and guide), with the whole data set.
            progress_bar: Shows what is being done, the steps, and the epsilon spent.
            stable_update: Has no effect: steps are always stable. ``SVI`` has this argument.
            forward_mode_differentiation: Not supported.
            init_state: State to resume from, once. The plan of the first run must cover all steps.
                Fresh random bits join its keys, so processes that resume it share no noise.
            init_params: Initial values of parameters by name.
            trace_size: Largest number of iterates to keep, evenly spaced. By default 1000, or
                fewer if those would hold more than 10 million values.
            fold: Reads the iterate after every step, for ``result.folded``. Each run restarts it.
            stream: Leaves the records on the host (arrays, memory maps, ``to_numpy()`` of an Arrow
                column), for data larger than the device's memory. The result is the same.
            checkpoint: Folder for the progress of the run. If the run is stopped or killed, the
                same call continues it, also in another process, and gives the same result bit for
                bit. It is charged to a ledger once. Keep the folder as secret as the records: it
                has the keys of the noise. Continue a run from its folder or from a state, not from
                both.
            every: About how many steps lie between two checkpoints. By default a 25th of the run.
            **kwargs: Keyword arguments of the model (and guide).

        Raises:
            BudgetError: If the steps do not fit the budget. The run has then read no record.
            NoiseReuseError: If JAX traces the call, or if noise would be used twice: the state was
                used before, or another run had the same ``secret_key``.
            RunInterrupted: If Ctrl-C was pressed. It has the result so far. Runs with a progress
                bar or a checkpoint stop between two of their parts.
            ValueError: If the folder of ``checkpoint`` is damaged, or has a run with other records
                or settings.
        """
        check_outside_trace(f"{self.name}.run")
        check_rng_key(rng_key)
        check_num_steps(num_steps, _UNLIMITED - 1)
        check_sizes(trace_size=trace_size)
        _check_reverse_mode(forward_mode_differentiation)
        check_every(every, checkpoint)
        args, kwargs = as_arrays(args, kwargs)
        # The ledger may have this run already, if an earlier call began it.
        driver = self.with_settings(without_own_run(self.settings, checkpoint))
        settings, is_new = driver.settings, init_state is None
        salt, known = getattr(init_state, "records", None) or (None, None)
        with opened_bar(progress_bar, num_steps) as bar:
            if is_new:
                covered = settings.num_steps or num_steps
                start = driver._init(rng_key, covered, args, kwargs, init_params)
            else:
                check_state(init_state)
                start = copied(settings.execution.mesh, init_state)
            session = driver._session(args, kwargs)
            driver._check_fits(start, session)
            left = int(start.max_steps) - int(start.step)
            if num_steps > left:
                raise BudgetError(
                    f"Expected num_steps <= {left}, got {num_steps}. The budget covers no more "
                    f"after {int(start.step)} steps. Plan for all steps with DPSVI(..., "
                    "num_steps=T)."
                )
            records = session.records(args, kwargs)
            seal = session.seal(records, salt)
            # `seal` used the salt of the state, so equal records give an equal hash.
            if known is not None and seal != (salt, known):
                raise ValueError(
                    "These are not the records of the run that init_state comes from. Steps on "
                    "both would be reported as one run. Pass the same records, or start a new run "
                    "with init_params=result.params."
                )
            report = spent_by(settings, start, int(start.step) + num_steps)
            report = session.check_fold(fold, start, num_steps, report)
            rows = (session.host_rows if stream else session.rows)(args, kwargs)
            # Another process may resume the same state, so the noise to come must be new.
            first = start if is_new else with_new_noise(settings, start)
            course, progress = session.begin(first, num_steps, trace_size, fold=fold)
            kept = checkpoint_of(
                checkpoint, every, driver.name, settings, [report], rng_key,
                lambda: session.program((course, progress), rows, fold), records,
                num_steps=num_steps, trace_size=trace_size,
                state=None if is_new else [int(start.run_id[0]), int(start.step)],
            )  # fmt: skip

            def to_take(progress: Progress) -> tuple[list[SensitiveState], int]:
                return [first.closed(progress.carry.state)], num_steps - int(progress.done)

            # All steps that the state may take, also in later calls: those are not charged again.
            every_step = (lambda: [spent_by(settings, start, covered)]) if is_new else None
            run = started(settings, [first], progress, [report], kept, to_take, every_step)
            with run as (progress, (report,)):
                found = session.run(
                    start, rows, (course, progress), report, fold=fold, bar=bar, kept=kept
                )  # fmt: skip
            taken = int(found.state.step)
            if found.stopped:
                # The report counts the steps taken, not those planned. It stays the report of this
                # run.
                report = dataclasses.replace(
                    spent_by(settings, found.state, taken), run=report.run, public=report.public
                )
                taken_only(found.state)
            make = functools.partial(driver.posterior_of, session.problem.at(rows.shared))
            result = RunResult(
                driver.get_params(found.state), found.state, found.losses, found.trace, report,
                found.folded, make, found.scores,
            )  # fmt: skip
            # A later run then refuses to continue this state on other records.
            found.state.records = seal
            if found.stopped:
                raise RunInterrupted(result, num_steps, checkpoint is not None)
            return result

    def known_problem(self, call: Call) -> Any:
        """Returns the problem of an earlier call with arguments of the same shapes, or ``None``."""
        known = self._sessions.get(arguments_key(call.args, call.kwargs, self.max_rows))
        return None if known is None else known.problem

    def with_settings(self, settings: RunSettings) -> Self:
        """Returns a driver with other settings, for one call: a refused call changes nothing."""
        if settings is self.settings:
            return self
        twin = copy.copy(self)
        # The sessions were compiled for the old settings.
        twin.settings, twin._sessions = settings, {}
        return twin

    def with_budget(self, settings: RunSettings) -> Self:
        """Returns a driver with settings that differ in the budget, with the compiled programs."""
        twin = copy.copy(self)
        # A budget sets the noise, which a program reads from the state.
        sessions = self._sessions.items()
        twin._sessions = {key: session.with_budget(settings) for key, session in sessions}
        twin.settings = settings
        return twin

    def sweep(
        self,
        rng_keys: Array,
        num_steps: int,
        *args: PyTree,
        epsilon: Any = None,
        noise_multiplier: Any = None,
        clip_norm: Any = None,
        learning_rate: Any = None,
        init_params: Values | None = None,
        trace_size: int | None = None,
        chunk_size: int | None = None,
        checkpoint: str | os.PathLike[str] | None = None,
        **kwargs: PyTree,
    ) -> SweepResult:
        """Runs seeds x learning rates x budgets x clip norms at once, in one compiled call.

        Run r has the secret key ``fold_in(secret_key, r)``. ``run`` gives the same with that key.

        Args:
            rng_keys: Keys of initial values and draws from the guide, shape ``(seeds,)``.
            num_steps: Number of steps.
            *args: Arguments of the model (and guide), with the whole data set.
            epsilon: Sequence of epsilons to spend. Delta and relation come from the budget.
            noise_multiplier: Sequence of noise multipliers, instead of ``epsilon``.
            clip_norm: Sequence of clip norms.
            learning_rate: Sequence of step sizes. Needs an optimiser that keeps it in its state:
                ``optax.inject_hyperparams(optax.adam)(learning_rate=1)``.
            init_params: Initial values of parameters by name.
            trace_size: Largest number of iterates to keep of each run.
            chunk_size: Runs computed in lockstep. By default as many as fit a quarter of memory.
            checkpoint: Folder for finished chunks, as for :meth:`run`.
            **kwargs: Keyword arguments of the model (and guide).

        Returns:
            A :class:`~numpyro_dp.run.sweep.SweepResult`. Seeds vary fastest, then learning rates.

        Example:
            >>> result = svi.sweep(jax.random.split(key, 20), 4000, X, y,
            ...                    epsilon=[1.0, 2.0, 4.0, 10.0])  # doctest: +SKIP

        Raises:
            BudgetError, NoiseReuseError: As :meth:`run`.
            ValueError: If the folder holds another sweep, or the optimiser has no learning rate.

        Guarantee:
            Each run spends what its report says. If you publish several runs, or the best of them,
            you spend the sum. A budget of a ledger charges all runs, before any reads a record.
        """
        check_outside_trace(f"{self.name}.sweep")
        check_num_steps(num_steps, _UNLIMITED - 1)
        check_sizes(trace_size=trace_size, chunk_size=chunk_size)
        check_rng_keys(rng_keys)
        args, kwargs = as_arrays(args, kwargs)
        settings = without_own_run(self.settings, None)
        # Such a budget is all that the ledger has left, and a sweep gives it to every run.
        if settings.budget and settings.charges is not None and settings.budget.earlier:
            raise ValueError(
                "Each run of a sweep would spend all that is left of the ledger. Say what one run "
                "may spend: ledger.budget(0.1, purpose=...)."
            )
        axes = combinations(self.settings, epsilon, noise_multiplier, clip_norm)
        structure = self.structure(args, kwargs)
        common = num_steps, args, kwargs, init_params, structure
        # Only their first values are used: each run of the sweep gets noise of its own.
        starts = [self._init(key, *common) for key in rng_keys]
        session = self._session(args, kwargs)
        rows, records = session.rows(args, kwargs), session.records(args, kwargs)
        return run_sweep(
            self.settings, axes, starts, session, rows, records, rng_keys=rng_keys,
            num_steps=num_steps, rates=learning_rate, trace_size=trace_size, chunk_size=chunk_size,
            checkpoint=checkpoint,
        )  # fmt: skip

    def posterior_of(self, problem: Any, result: RunResult, plain: bool) -> Any:
        """Makes ``result.posterior``. Drivers with a posterior override this.

        Args:
            problem: The problem that :meth:`prepare` returned. It holds no record.
            result: The result of the run.
            plain: Whether to leave out the noise of privacy, to show what it adds.
        """
        raise ValueError(
            f"{self.name} gives point estimates and has no posterior over latents. Use "
            "result.params."
        )

    def _init(
        self,
        rng_key: Array,
        num_steps: int | None,
        args: Args,
        kwargs: Kwargs,
        init_params: Values | None,
        structure: ModelStructure | Records | None = None,
    ) -> SensitiveState:
        structure = self.structure(args, kwargs) if structure is None else structure
        settings = self.settings
        if isinstance(structure, Records) and not self.records_of_model:
            without(settings.privacy, self.name, *OF_MODELS)
        # First, so that a plan that exceeds the budget raises before anything is compiled.
        plan = plan_for(settings, structure.layout.num_examples, num_steps)
        key = arguments_key(args, kwargs, self.max_rows)
        # NumPyro's automatic guides also draw initial values until the gradient is finite, but with
        # SVI they read the records. A record without a finite signal counts as 0. If all do, a run
        # spends its whole budget and returns the prior and noise.
        for attempt in range(_ATTEMPTS):
            own = jax.random.fold_in(rng_key, attempt) if attempt else rng_key
            prepared = self.prepare(structure, own, Call(args, kwargs, init_params))
            if key not in self._sessions:
                self._sessions[key] = Session(settings, self.method, prepared)
            session = self._sessions[key]
            if self._can_start(session, prepared):
                break
        else:
            raise UnsupportedModelError(
                "The likelihood has no finite gradient for any invented record (normal values, "
                f"ones, halves, identities), at {_ATTEMPTS} initial values. Records without a "
                "finite gradient count as 0, and the run would return the prior. Look for sqrt or "
                "log at 0, a where() whose other branch is not finite, or initial values that "
                "overflow (init_params= or the guide's init_loc_fn=). If a discrete latent is "
                "summed out, every value of it must leave the density finite: for example "
                "Poisson(rate * k + 1e-6) instead of Poisson(rate * k)."
            )
        identity = dataclasses.replace(
            session.identity(*values_given("init_params", init_params)),
            reproducible=settings.privacy.secret_key is not None,
            repetition=settings.privacy.repetition,
        )  # fmt: skip
        noise = noise_fields(
            settings, secret_of(settings), plan, session.mechanism_state(settings.clip_norm)
        )
        nonce = noise.pop("nonce")
        state = RunState(
            optim_state=prepared.optim_state,
            rng_key=prepared.rng_key,
            step=jnp.zeros((), jnp.int32),
            max_steps=jnp.asarray(_UNLIMITED if settings.budget is None else num_steps, jnp.int32),
            **noise,
        )
        return copied(settings.execution.mesh, SensitiveState(state, nonce, identity))

    def _can_start(self, session: Session, prepared: Prepared) -> bool:
        """Whether an invented record has a finite signal at the start."""
        return session.finite(self.method.optim.get_params(prepared.optim_state))

    def _check_fits(
        self, state: SensitiveState, session: Session, further: tuple[str, ...] = ()
    ) -> None:
        """Raises unless a state belongs to these settings and to records of these shapes."""
        check_identity(state, session.identity(), further)
        found = shapes_of(self.method.optim.get_params(state.optim_state))
        if found != session.param_shapes:
            raise ValueError(
                f"Expected a state with parameters of the shapes {session.param_shapes} for these "
                f"records, got {found}. Resume with the records of the run, or start again with "
                "init."
            )

    def _session(self, args: Args, kwargs: Kwargs) -> Session:
        key = arguments_key(args, kwargs, self.max_rows)
        if key not in self._sessions:
            if any(is_tracer(leaf) for leaf in jax.tree.leaves((args, kwargs))):
                raise ValueError(
                    "A compiled update needs a call of init before, with arguments of the same "
                    "shapes, each passed in the same way (by place or by name). init has not seen "
                    f"the shapes {[s for _, s in array_shapes(args, kwargs)]}. Call it outside jit."
                )
            structure = self.structure(args, kwargs)
            # Any key will do, because the state brings its own parameters.
            prepared = self.prepare(structure, jax.random.key(0), Call(args, kwargs))
            self._sessions[key] = Session(self.settings, self.method, prepared)
        return self._sessions[key]


def _check_estimator(estimator: Callable[..., object]) -> None:
    """Raises TypeError unless a builder of an estimator can be called with a problem."""
    builds = not isinstance(estimator, type)
    try:
        inspect.signature(estimator).bind(object())
    except (TypeError, ValueError):
        builds = False
    if not builds:
        raise TypeError(
            f"estimator={estimator!r} does not build an estimator. Add the parentheses: aligned(), "
            "aligned_natural() or vanilla()."
        )


def _check_reverse_mode(forward_mode_differentiation: bool) -> None:
    """Raises ValueError if forward mode is asked for."""
    if forward_mode_differentiation:
        raise ValueError(
            "Expected forward_mode_differentiation=False, got True. Gradients of single records "
            "use reverse mode. Leave it out."
        )


class OneSum(Driver):
    """A driver of one release: a noisy sum over all records. Its parameters are the sums.

    Args:
        settings: With full batches, and the clip norm of all entries of a record together.
        problem: What the records are.
        public: Public values. As parameters, because arrays that a signal holds would count as
            possible records.
        zeros: Zeros of the shape of each entry of the signal.
        signal: ``(public, key, record) -> entries``.
    """

    records_of_model: ClassVar[bool] = True

    def __init__(
        self,
        settings: RunSettings,
        problem: Any,
        public: PyTree,
        zeros: Values,
        signal: Callable[[PyTree, Array, Arrays], Values],
    ) -> None:
        self._problem = problem

        def prepare(key: Array, params: Values) -> tuple[PyTree, Array]:
            return params["public"], key

        def of_record(public: tuple[PyTree, Array], example: Arrays) -> Values:
            return signal(*public, example)

        def pull_back(public: PyTree, released: Released) -> Values:
            return released.total

        keeping = types.SimpleNamespace(
            init=lambda _: zeros | {"public": public},
            get_params=lambda state: state,
            update=lambda released, state, **_: state | released,
        )
        estimator = Estimator(prepare, of_record, pull_back)
        super().__init__(Method(lambda problem: estimator, keeping, ("one sum",)), settings)

    def structure(self, args: Args, kwargs: Kwargs) -> Records:
        """Reads shapes."""
        return self._problem.records

    def prepare(self, structure: Records, rng_key: Array, call: Call) -> Prepared:
        """Reads no record."""
        return Prepared(self._problem, self.method.optim.init(None), rng_key)

    def total(
        self, rng_key: Array, *args: PyTree, **kwargs: PyTree
    ) -> tuple[Values, PrivacyReport]:
        """Returns the noisy sums of all entries, and the report."""
        result = self.run(rng_key, 1, *args, progress_bar=False, **kwargs)
        found = {n: np.asarray(v, np.float64) for n, v in result.params.items() if n != "public"}
        return found, result.privacy
