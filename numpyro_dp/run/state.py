"""The state of a run, inside its loop and between two calls.

Inside a compiled loop a state is a :class:`RunState`. Between two calls it is a
:class:`SensitiveState`, which gets new bits whenever it enters a function.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_dp._tree import shapes_of
from numpyro_dp.core import MechanismBuilder, MechanismState, PyTree
from numpyro_dp.model.public import PublicArray
from numpyro_dp.privacy.keys import joined, next_nonce, renewed
from numpyro_dp.privacy.mechanism.clip_norm import ClipNorm
from numpyro_dp.privacy.plan import BudgetError

__all__ = [
    "RunIdentity",
    "RunState",
    "SensitiveState",
    "check_identity",
    "check_not_spent",
    "check_params",
    "check_state",
    "check_steps_fit",
]


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
    sampler: Any
    clip_norm: ClipNorm
    mechanism: MechanismBuilder
    loss_release: Any
    budget: Any
    reproducible: bool
    repetition: bool
    method: tuple[Any, ...]
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

    def with_new_keys(self, renew: Any = renewed) -> RunState:
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
    nonce: Any
    identity: RunIdentity
    records: Any
    mutable_state = None

    def __init__(
        self, state: RunState, nonce: Any, identity: RunIdentity, records: Any = None
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

    def __reduce__(self) -> tuple[Any, ...]:
        """Makes copies that share no noise with this state."""
        return _copy, (self.opened, self.nonce, self.identity, self.records)


def _copy(state: RunState, nonce: Any, identity: RunIdentity, records: Any) -> SensitiveState:
    state = state if identity.repetition else state.with_new_keys()
    return SensitiveState(state, nonce, identity, records)


def _flattened(state: SensitiveState) -> tuple[tuple[Any, ...], Any]:
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
    lambda state: (tuple(child for _, child in _flattened(state)[0]), state.identity),
)


def check_state(state: Any) -> SensitiveState:
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


def check_not_spent(state: SensitiveState) -> None:
    """Raises BudgetError once all steps of the plan have been taken."""
    if int(state.step) >= int(state.max_steps):
        raise BudgetError(
            f"The budget covers {int(state.max_steps)} updates, and all have been taken. Plan for "
            "more with DPSVI(..., num_steps=T)."
        )


def check_steps_fit(state: SensitiveState, num_steps: int) -> None:
    """Raises BudgetError unless the plan covers ``num_steps`` more steps."""
    left = int(state.max_steps) - int(state.step)
    if num_steps > left:
        raise BudgetError(
            f"Expected num_steps <= {left}, got {num_steps}. The budget covers no more after "
            f"{int(state.step)} steps. Plan for all steps with DPSVI(..., num_steps=T)."
        )


def check_params(params: PyTree, expected: PyTree) -> None:
    """Raises unless the parameters of a state have the shapes that these records need."""
    found = shapes_of(params)
    if found != expected:
        raise ValueError(
            f"Expected a state with parameters of the shapes {expected} for these records, got "
            f"{found}. Resume with the records of the run, or start again with init."
        )


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
