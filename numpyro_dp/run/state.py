"""The state of a run, the checks before it goes on, its noise, and what it has spent.

Inside a compiled loop a state is a :class:`RunState`. Between two calls it is a
:class:`SensitiveState`, which gets new bits whenever it enters a function.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_dp._tree import on_device
from numpyro_dp.core import MechanismBuilder, MechanismState, PyTree, Sampler, Values
from numpyro_dp.model.public import PublicArray
from numpyro_dp.privacy import once
from numpyro_dp.privacy.budget import PrivacyBudget, unit_name
from numpyro_dp.privacy.keys import (
    agreed,
    joined,
    keys_of_run,
    next_nonce,
    renewed,
    run_id,
    secret_key,
)
from numpyro_dp.privacy.mechanism.clip_norm import ClipNorm
from numpyro_dp.privacy.mechanism.gaussian import build_mechanism
from numpyro_dp.privacy.mechanism.loss import LossRelease
from numpyro_dp.privacy.plan import BudgetError, Plan, PrivacyReport, make_plan
from numpyro_dp.run.settings import RunSettings
from numpyro_dp.sums.devices import copied, from_first


@dataclasses.dataclass(frozen=True)
class RunIdentity:
    """Public settings that all steps of a run must share for its accounting to hold.

    Attributes:
        num_examples: Number of records.
        sampler: Draws the batches.
        clip_norm: The clip norm of the first step.
        mechanism: Builds the mechanism.
        loss_release: Whether and how a loss curve is released.
        budget: Budget to which the noise was calibrated.
        reproducible: Whether the caller supplied the secret key.
        repetition: Whether the run may repeat the noise of another run.
        method: Settings of the method. Empty for most drivers.
        data_plate: Name of the plate over records.
        public: Arrays that the run accepted as public.
        ledger: Path of the ledger to which the run was charged, or "".
        max_rows: Most rows of a unit, or ``None`` if a record is a row.
        timed: Whether the time of a step may depend on a record.
    """

    num_examples: int
    sampler: Sampler
    clip_norm: ClipNorm
    mechanism: MechanismBuilder
    loss_release: LossRelease | None
    budget: PrivacyBudget | None
    reproducible: bool
    repetition: bool
    method: tuple[object, ...]
    data_plate: str
    public: tuple[PublicArray, ...]
    ledger: str
    max_rows: int | None = None
    timed: bool = False


class RunState(NamedTuple):
    """State of a run inside its loop. Sensitive: it holds the keys of all later steps.

    Attributes:
        optim_state: State of the optimiser. You may publish the iterate in it.
        rng_key: Key of the (public) draws from the guide.
        secret_key: Key of later noise, and of the seeds of each record's own random draws.
        sampler_state: State of the sampler, with the key of later batches.
        mechanism_state: Clip norms of the next step, and the mechanism's memory. The norms are
            public, or functions of released values.
        noise_multiplier: Noise standard deviation over sensitivity.
        step: Number of steps taken.
        max_steps: Number of steps that the plan covers.
        run_id: Hash of the first noise key. Distinguishes the run from others in this process.
    """

    optim_state: PyTree
    rng_key: Array
    secret_key: Array
    sampler_state: PyTree
    mechanism_state: MechanismState
    noise_multiplier: Array
    step: Array
    max_steps: Array
    run_id: Array

    def __repr__(self) -> str:
        """Shows no key."""
        return "RunState(<holds the keys of noise, batches and draws to come: never publish it>)"

    def with_new_keys(self, renew: Callable[[PyTree], PyTree] = renewed) -> RunState:
        """Returns the state with new keys for later noise and batches.

        Args:
            renew: Tree -> the same tree with other keys.
        """
        keys = renew((self.secret_key, self.sampler_state))
        return self._replace(secret_key=keys[0], sampler_state=keys[1])


class SensitiveState:
    """State of a run between two calls. Sensitive: never publish it.

    It holds the keys of all later noise, batches and draws of records. Every step replaces a key by
    its child, so nobody can compute keys of past steps from it. It has the fields of
    :class:`RunState`, and ``mutable_state`` as in ``numpyro.infer.svi.SVIState``, always ``None``.

    Args:
        state: The state inside a loop.
        nonce: 256 bits that join the keys in the next update. They are new each time the state
            enters a compiled or transformed function. ``None`` if the secret key was given, or
            several processes share a run.
        identity: Settings that the steps so far share.

    After ``run`` it also has ``records``, a keyed hash of the records, or of 1,000 rows of large
    arrays. A ``run`` that continues it refuses other records.

    Guarantee:
        A copy from a pickle continues with new noise and batches, unless the run is a repetition
        (:mod:`numpyro_dp.privacy.once`). Two calls of one compiled update with the same state also
        have different noise and batches, unless the secret key was given.

    Example:
        >>> def get_params(self, state: SensitiveState):  # of a driver of your own
        ...     return {"mean": super().get_params(state)["mean"]}
    """

    __slots__ = "identity", "nonce", "opened", "records"

    opened: RunState
    nonce: object
    identity: RunIdentity
    records: tuple[str, str] | None
    mutable_state = None

    def __init__(
        self,
        state: RunState,
        nonce: object,
        identity: RunIdentity,
        records: tuple[str, str] | None = None,
    ) -> None:
        self.opened, self.nonce, self.identity, self.records = state, nonce, identity, records

    def opened_once(self) -> RunState:
        """The state as a loop takes it, with the nonce joined to its keys."""
        if self.nonce is None:
            return self.opened
        nonce = jnp.asarray(self.nonce)
        return self.opened.with_new_keys(lambda keys: joined(keys, nonce))

    def closed(self, state: RunState) -> SensitiveState:
        """A later state of the same run.

        The nonce stays until the state enters another function. JAX returns at no cost what a
        compiled function does not change.
        """
        return SensitiveState(state, self.nonce, self.identity)

    def _replace(self, **fields: Any) -> SensitiveState:
        """Returns the state with other values of fields of :class:`RunState`, nonce or identity."""
        own = {name: fields.pop(name, getattr(self, name)) for name in ("nonce", "identity")}
        return SensitiveState(self.opened._replace(**fields), **own)

    def __getattr__(self, name: str) -> Any:
        """Returns fields of the state."""
        if name in RunState._fields:
            return getattr(self.opened, name)
        raise AttributeError(f"A SensitiveState has no {name!r}.")

    def __repr__(self) -> str:
        """Shows no key."""
        return f"Sensitive{self.opened!r}".replace("RunState", "State")

    def __reduce__(self) -> tuple[object, ...]:
        """Makes copies that share no noise with this state."""
        return _copy, (self.opened, self.nonce, self.identity, self.records)


def _copy(
    state: RunState, nonce: object, identity: RunIdentity, records: tuple[str, str] | None
) -> SensitiveState:
    state = state if identity.repetition else state.with_new_keys()
    return SensitiveState(state, nonce, identity, records)


def _flattened(
    state: SensitiveState,
) -> tuple[tuple[tuple[object, object], ...], RunIdentity]:
    # JAX flattens a state whenever it enters a function, so this is where it gets new bits.
    nonce = next_nonce(state.opened.secret_key, state.nonce)
    names = map(jax.tree_util.GetAttrKey, (*RunState._fields, "nonce"))
    return tuple(zip(names, (*state.opened, nonce), strict=True)), state.identity


jax.tree_util.register_pytree_with_keys(
    SensitiveState,
    _flattened,
    lambda identity, children: SensitiveState(
        RunState(*tuple(children)[:-1]), tuple(children)[-1], identity
    ),
)


def check_state(state: object) -> SensitiveState:
    """Returns the state, or raises TypeError unless this package created it."""
    if state is None:
        raise TypeError(
            "Expected a state, got None. A pickled result has no state, because a state is "
            "sensitive. Pickle result.state by itself to continue in another process."
        )
    if not isinstance(state, SensitiveState):
        raise TypeError(
            f"Expected a state of DPSVI.init, DPSVI.update or result.state, got "
            f"{type(state).__name__}. States of numpyro.infer.SVI do not record what was spent."
        )
    return state


def check_identity(
    state: SensitiveState, identity: RunIdentity, further: tuple[str, ...] = ()
) -> None:
    """Raises unless the settings are those with which the state's steps were accounted for."""
    fields = "num_examples", "sampler", "clip_norm", "mechanism", "loss_release", "method", "ledger"
    for field in (*fields, "max_rows", *further):
        before, now = getattr(state.identity, field), getattr(identity, field)
        if before != now:
            raise BudgetError(
                f"The state's steps were taken and accounted for with {field}={before}, but this "
                f"driver has {field}={now}. Resume with the same setting, or start again with init."
            )


def secret_of(settings: RunSettings) -> Array:
    """Returns the caller's secret key or a new one. It is the same in all processes."""
    given = settings.privacy.secret_key
    return agreed(settings.execution.mesh, secret_key() if given is None else given)


def plan_for(settings: RunSettings, num_examples: int, num_steps: int | None) -> Plan:
    """Returns the plan of a run."""
    return make_plan(
        settings.sampler, num_examples, num_steps,
        functools.partial(build_mechanism, settings.privacy.mechanism, settings.norm_with_loss),
        budget=settings.budget, noise_multiplier=settings.privacy.noise_multiplier,
        accountant=settings.privacy.accountant,
    )  # fmt: skip


def noise_fields(
    settings: RunSettings, secret: Array, plan: Plan, mechanism_state: MechanismState
) -> Values:
    """Returns the fields of a state that decide its noise and its batches."""
    noise_key, batch_key = keys_of_run(secret, plan.earlier)
    # A given key must reproduce the run, and several processes must agree on the noise.
    without_nonce = settings.privacy.secret_key is not None or settings.several_processes
    fields = {
        "secret_key": noise_key,
        "sampler_state": settings.sampler.init(batch_key, plan.num_examples),
        "mechanism_state": mechanism_state,
        "noise_multiplier": on_device(_round_up(plan.noise_multiplier)),
        "run_id": run_id(noise_key),
        "nonce": None if without_nonce else np.zeros(8, np.uint32),
    }
    return copied(settings.execution.mesh, fields)


def registered(
    settings: RunSettings, *states: SensitiveState
) -> contextlib.AbstractContextManager[None]:
    """Registers new runs. Raises if a run has the noise of an earlier run."""
    noisy = [state.run_id for state in states if _has_noise(state)]
    return once.register(noisy, repetition=settings.privacy.repetition)


def charge(
    settings: RunSettings,
    reports: Callable[[], list[PrivacyReport]],
    runs: list[str] | None = None,
    *,
    again: bool = False,
) -> None:
    """Charges new runs to the ledger of their budget, if there is one, before they read a record.

    Args:
        settings: The settings of the runs.
        reports: Returns reports of all steps that they may take.
        runs: Names of the runs, if the reports have others.
        again: Whether an earlier call may have charged them already.

    Raises:
        LedgerError: If the total of the ledger does not cover all of them. Then none is charged.
    """
    charges = settings.charges
    if charges is None:
        return
    made = reports()
    if runs is not None:
        # Under these names a call that continues from a checkpoint finds its own charge.
        made = [dataclasses.replace(x, run=run) for x, run in zip(made, runs, strict=True)]

    def charged() -> bytes:  # in a mesh the first process does it
        spent = (each.spending[-1] for each in made)
        charges.ledger.charge(*spent, purpose=charges.purpose, again=again)
        return b""

    from_first(settings.execution.mesh, charged)


def used(
    settings: RunSettings, state: SensitiveState, num_steps: int
) -> contextlib.AbstractContextManager[bool]:
    """Marks the noise of ``num_steps`` steps as used. Takes this back if the steps fail."""
    if not _has_noise(state):
        # Without noise, nothing can be used twice.
        return contextlib.nullcontext(True)
    return once.use(state.run_id, int(state.step), num_steps, repetition=_repeats(settings, state))


def taken_only(state: SensitiveState) -> None:
    """Says of a run that was stopped that the noise of later steps is not used up."""
    if _has_noise(state):
        once.taken_only(state.run_id, int(state.step))


def with_new_noise(settings: RunSettings, state: SensitiveState) -> SensitiveState:
    """Gives the state fresh keys for its next noise, the same in all processes of a mesh."""
    if _repeats(settings, state) or not _has_noise(state):
        return state
    # The operating system gives each process other bits, and all must add the same noise.
    bits = np.asarray(jax.random.key_data(agreed(settings.execution.mesh, secret_key()))).tobytes()
    opened = state.opened.with_new_keys(lambda keys: renewed(keys, bits))
    return copied(settings.execution.mesh, SensitiveState(opened, state.nonce, state.identity))


def _has_noise(state: SensitiveState) -> bool:
    return float(state.noise_multiplier) != 0


def _repeats(settings: RunSettings, state: SensitiveState) -> bool:
    """Whether the run of the state and the run that continues it are both repetitions."""
    # Both must be. Otherwise a driver with repetition=True could continue a fresh run twice, with
    # the same noise.
    return settings.privacy.repetition and state.identity.repetition


def spent_by(settings: RunSettings, state: SensitiveState, num_steps: int) -> PrivacyReport:
    """Accounts for all steps up to ``num_steps`` with the noise that the state holds."""
    identity, budget = state.identity, settings.budget
    for one, other in ((identity.budget, budget), (budget, identity.budget)):
        if one is not None and one.earlier != getattr(other, "earlier", ()):
            raise BudgetError(
                f"The state has a budget with {len(getattr(identity.budget, 'earlier', ()))} "
                f"earlier runs, {identity.budget}, but the driver has {budget}. Resume this state "
                "with the driver that created it."
            )
    noise, wanted = float(state.noise_multiplier), settings.privacy.noise_multiplier
    if wanted is not None and float(_round_up(wanted)) != noise:
        raise ValueError(
            f"The state has noise_multiplier={noise:.6g}, which a run keeps to its end, but the "
            f"driver has {wanted:.6g}. Build the driver with the noise of the state, or call init."
        )
    # The noise in the state counts, not what the budget would give for this number of steps.
    settings = settings.changed(noise_multiplier=noise)
    return report_for(plan_for(settings, identity.num_examples, num_steps), num_steps, identity)


def report_for(plan: Plan, num_steps: int, identity: RunIdentity) -> PrivacyReport:
    """Returns the report of a run that followed a plan.

    Raises:
        BudgetError: If earlier runs in its budget had other units.
    """
    own = unit_name(identity.max_rows)
    if other := {each.unit for each in getattr(plan.budget, "earlier", ())} - {own}:
        raise BudgetError(
            f"A record of this run is a {own}, and a record of an earlier run in its budget is a "
            f"{other.pop()}. One epsilon cannot cover both. Use the same unit for all runs."
        )
    budget = plan.budget and dataclasses.replace(plan.budget, charges=None)
    return PrivacyReport(
        plan.spent(num_steps),
        num_steps,
        dataclasses.replace(plan, budget=budget),  # a report may be published, a ledger may not
        reproducible=identity.reproducible,
        loss_released=identity.loss_release is not None,
        repetition=identity.repetition,
        data_plate=identity.data_plate,
        public=identity.public,
        max_rows=identity.max_rows,
        timed=identity.timed,
        in_ledger=plan.budget is not None and plan.budget.charges is not None,
    )


def _round_up(noise_multiplier: float) -> np.float32:
    """Rounds to float32 so that the noise is never less than what was accounted for."""
    rounded = np.float32(noise_multiplier)
    # Python floats, because NumPy would round noise_multiplier to float32 before it compares.
    return (
        rounded if float(rounded) >= noise_multiplier else np.nextafter(rounded, np.float32(np.inf))
    )
