"""The state of a run, inside its loop and between two calls.

Inside a compiled loop a state is a :class:`RunState`. Between two calls it is a
:class:`SensitiveState`, which packs small leaves into one array. Every array that a compiled call
takes and returns costs time. Many arrays would cost more than the arithmetic of a small step.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from numpyro_dp._compat import is_tracer
from numpyro_dp._tree import is_key, shapes_of
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

_SMALL = 64  # largest number of words of a leaf that is packed


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
        axes: Number of leading axes of every array, for stacked states.

    After ``run`` it also has ``records``, a keyed hash of the records, or of 1,000 rows of large
    arrays. A ``run`` that continues it refuses other records.

    Guarantee:
        A copy from a pickle continues with new noise and batches, unless the run is a repetition
        (:mod:`numpyro_dp.privacy.once`). Two calls of one compiled update with the same state also
        have different noise and batches, unless the secret key was given.
    """

    __slots__ = (
        "_origin", "_small", "identity", "large", "layout", "mutable_state", "nonce",
        "optim_state", "records", "rng_key",
    )  # fmt: skip

    optim_state: PyTree
    rng_key: Array
    mutable_state: None
    large: tuple[Any, ...]
    layout: _Layout
    nonce: Any
    identity: RunIdentity
    records: Any

    def __init__(self, state: RunState, nonce: Any, identity: RunIdentity, axes: int = 0) -> None:
        self.optim_state, self.rng_key, self.mutable_state = state.optim_state, state.rng_key, None
        self._small, self.large, self.layout = _packed(state[2:], axes)
        self._origin = self._small
        self.nonce, self.identity, self.records = nonce, identity, None

    @property
    def small(self) -> Array:
        """Keys, counters and scales as words."""
        return self._small

    @property
    def origin(self) -> Array:
        """The words that held the keys first. A traced function recognises the state by them."""
        return self._origin

    @property
    def opened(self) -> RunState:
        """The state as a loop takes it."""
        rest = _unpacked(self._small, self.large, self.layout)
        return RunState(self.optim_state, self.rng_key, *rest)

    def opened_once(self) -> RunState:
        """The state as a loop takes it, with the nonce joined to its keys."""
        if self.nonce is None:
            return self.opened
        nonce = jnp.asarray(self.nonce)
        return self.opened.with_new_keys(lambda keys: joined(keys, nonce))

    def closed(self, state: RunState) -> SensitiveState:
        """Packs a later state of the same run.

        The nonce stays until the state enters another function. JAX returns at no cost what a
        compiled function does not change.
        """
        return SensitiveState(state, self.nonce, self.identity)

    def _replace(self, **fields: Any) -> SensitiveState:
        """Returns the state with other values of fields of :class:`RunState`, nonce or identity."""
        own = {name: fields.pop(name, getattr(self, name)) for name in ("nonce", "identity")}
        state = SensitiveState(self.opened._replace(**fields), **own, axes=self._small.ndim - 1)
        if not {"secret_key", "sampler_state"} & set(fields):
            state._origin = self._origin
        return state

    def __getattr__(self, name: str) -> Any:
        """Returns packed fields."""
        if name in RunState._fields:
            return getattr(self.opened, name)
        raise AttributeError(f"A SensitiveState has no {name!r}.")

    def __repr__(self) -> str:
        """Shows no key."""
        return (
            "SensitiveState(<holds the keys of noise, batches and draws to come: never publish it>)"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """Makes copies that share no noise with this state."""
        return _copy, (self.opened, self.nonce, self.identity, self._small.ndim - 1, self.records)


def _copy(
    state: RunState, nonce: Any, identity: RunIdentity, axes: int, records: Any
) -> SensitiveState:
    state = state if identity.repetition else state.with_new_keys()
    copied = SensitiveState(state, nonce, identity, axes)
    copied.records = records
    return copied


def _flattened(state: SensitiveState) -> tuple[tuple[Any, ...], Any]:
    # JAX flattens a state whenever it enters a function, so this is where it gets new bits.
    nonce = next_nonce(state._origin, state.nonce)
    children = state.optim_state, state.rng_key, state._small, state.large, nonce
    return children, (state.layout, state.identity)


def _unflattened(public: Any, children: Any) -> SensitiveState:
    state = object.__new__(SensitiveState)
    state.optim_state, state.rng_key, state._small, state.large, state.nonce = children
    state.layout, state.identity = public
    state._origin = state._small
    state.mutable_state = state.records = None
    return state


def _flattened_with_paths(state: SensitiveState) -> tuple[tuple[Any, ...], Any]:
    names = "optim_state", "rng_key", "small", "large", "nonce"
    children, public = _flattened(state)
    return tuple(zip(map(jax.tree_util.GetAttrKey, names), children, strict=True)), public


jax.tree_util.register_pytree_with_keys(
    SensitiveState, _flattened_with_paths, _unflattened, _flattened
)


class _Slot(NamedTuple):
    """Position of a leaf: among the words from ``first`` on, or -1 for an array of its own."""

    first: int
    shape: tuple[int, ...]
    dtype: Any
    generator: Any  # of a key, else None


class _Layout(NamedTuple):
    treedef: Any
    slots: tuple[_Slot, ...]


def _packed(tree: Any, axes: int) -> tuple[Array, tuple[Any, ...], _Layout]:
    """Returns the small leaves as one array of words, the large leaves, and all positions."""
    leaves, treedef = jax.tree.flatten(tree)
    slots, words, large, first = [], [], [], 0
    for leaf in leaves:
        key = is_key(leaf)
        generator = jax.random.key_impl(leaf) if key else None
        data = jax.random.key_data(leaf) if key else leaf
        data = data if hasattr(data, "dtype") else jnp.asarray(data)
        shape = data.shape[axes:]
        if data.dtype.itemsize != 4 or math.prod(shape) > _SMALL:
            slots.append(_Slot(-1, shape, data.dtype, generator))
            large.append(data)
            continue
        slots.append(_Slot(first, shape, data.dtype, generator))
        words.append(data)
        first += math.prod(shape)
    layout = _Layout(treedef, tuple(slots))
    if any(map(is_tracer, words)):
        bits = [lax.bitcast_convert_type(x, jnp.uint32) for x in words]
        flat = [x.reshape(*x.shape[:axes], -1) for x in bits]
        return jnp.concatenate(flat, axis=-1), tuple(large), layout
    # Outside a trace NumPy packs them, because JAX would compile a program for it.
    flat = [np.asarray(x).reshape(*x.shape[:axes], -1).view(np.uint32) for x in words]
    return jnp.asarray(np.concatenate(flat, axis=-1)), tuple(large), layout


def _unpacked(small: Any, large: tuple[Any, ...], layout: _Layout) -> Any:
    """Reverses :func:`_packed`. Leading axes of the arrays stand for several states."""
    rest, leaves = iter(large), []
    traced = is_tracer(small)
    small = small if traced else np.asarray(small)
    for slot in layout.slots:
        if slot.first < 0:
            data = next(rest)
        else:
            words = small[..., slot.first : slot.first + math.prod(slot.shape)]
            shape = (*small.shape[:-1], *slot.shape)
            if traced:
                data = lax.bitcast_convert_type(words, slot.dtype).reshape(shape)
            else:
                data = jnp.asarray(np.ascontiguousarray(words).view(slot.dtype).reshape(shape))
        if slot.generator is not None:
            data = jax.random.wrap_key_data(data, impl=slot.generator)
        leaves.append(data)
    return jax.tree.unflatten(layout.treedef, leaves)


def check_state(state: Any) -> None:
    """Raises TypeError unless this package created the state."""
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
