r"""Noise is used once: no two runs share it, however they are started.

Two releases with the same noise can be subtracted: what is left is the exact difference of their
private sums. Four rules prevent it.

1. A secret key comes into being outside every trace (:func:`check_outside_trace`). A function that
   is traced runs once for many calls and many lanes, and all of them would share its key.
2. Within a process each run is known by a hash of its first noise key, with the number of steps
   whose noise is used up (:func:`begin`, :func:`use`). A key that was given twice, and a state that
   was used before, are refused.
3. A state has 256 further bits, its nonce, which are new each time it enters a function that is
   compiled or transformed (:func:`next_nonce`). A compiled update runs without Python, so that
   nobody could refuse its second call with one state: the nonce gives it keys of its own. There
   is no nonce where the key was given, or where several processes have to agree on the noise.
4. A state that goes on, in this process or in another, continues with keys of its own
   (:func:`renewed`): with :math:`k` the state's key and :math:`e` 256 new bits from the operating
   system,

   .. math:: k' = \mathrm{SHA256}(c, k, e).

   Two continuations have independent e, so that their keys are independent and uniform (SHA-256 as
   a random oracle), in whatever process they run; and nobody who knows k alone can tell k'. A
   counter would not do: two processes that read the same file would count alike.

``repetition=True`` of a driver switches rules 2 to 4 off: the run is then a function of its secret
key. The caller promises that it repeats a release, on the same records and settings.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import secrets
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_dp import _compat

__all__ = [
    "NoiseReuseError",
    "begin",
    "check_outside_trace",
    "check_passed_to_trace",
    "forget",
    "in_trace",
    "joined",
    "key_of_lane",
    "next_nonce",
    "renewed",
    "run_id",
    "use",
]

_RUN, _RENEWED = b"numpyro_dp run, version 1: ", b"numpyro_dp resumed run, version 1: "


class NoiseReuseError(ValueError):
    """Noise that would be used a second time."""


def _outside() -> Any:
    """The trace state of a thread that traces nothing, even if this module is imported in one."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(_compat.trace_state()))
    thread.start()
    thread.join()
    return found[0]


_OUTSIDE = _outside()
_lock = threading.Lock()
_used: dict[bytes, int] = {}  # run id -> number of steps whose noise is used up
_nonces: list[Array] = []  # drawn and not handed out yet
_NONCE, _AT_ONCE = 8, 32  # words of a nonce; nonces that are drawn together


def forget() -> None:
    """Forgets all runs and all nonces, as a new process does."""
    _used.clear()
    _nonces.clear()


if hasattr(os, "register_at_fork"):
    # A child knows no state: each goes on with keys of its own. Nor may it share nonces.
    os.register_at_fork(after_in_child=forget)
_entered: weakref.WeakValueDictionary[tuple[int, int], Any] = weakref.WeakValueDictionary()
_traced: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def in_trace() -> bool:
    """Whether JAX traces the calling function (``jit``, ``vmap``, ``grad``, ``scan`` ...)."""
    return _compat.trace_state() != _OUTSIDE


def check_outside_trace(call: str) -> None:
    """Raises where a call that makes a secret key is traced.

    Args:
        call: What was called, as ``DPSVI.run``.
    """
    if in_trace():
        raise NoiseReuseError(
            f"Expected {call} outside of jit, vmap, pmap, shard_map, grad, scan, checkpoint and "
            "eval_shape, got a call while JAX traces a function: its secret key would be made "
            "once, and every call and every lane would have the same noise. Call it outside; for "
            "many runs in one compiled call use sweep, for a compiled loop pass the state of init "
            "to a compiled update."
        )


def check_passed_to_trace(call: str, keys: Sequence[Any]) -> None:
    """Raises unless a traced call was given a state as an argument, and uses it once.

    Args:
        call: What was called.
        keys: The secret keys of the state.
    """
    if not in_trace():
        return
    if _compat.has_named_axes():
        raise NoiseReuseError(
            f"Expected {call} outside of pmap, shard_map and a vmap with axis_name, got one of "
            "them: every device would add the same noise. Pass mesh= to the driver: it shares "
            "the rows of a batch among devices, and adds noise once."
        )
    current = _compat.traced_by()
    for key in keys:
        if _compat.trace_of(key) is not current:
            raise NoiseReuseError(_held(call))
        if _traced.get(id(key)) is key:
            raise NoiseReuseError(
                f"Expected each state to be used once, got the same state in two calls of {call} "
                "in a compiled function: both would have the same noise. Pass the state that the "
                "first call returned to the second."
            )
    for key in keys:
        _traced[id(key)] = key


def _held(call: str) -> str:
    return (
        "Expected the state to be an argument of the function that is compiled or transformed, "
        f"for {call}, got one that the function holds: each call, lane or iteration would have "
        "the same noise. Write jax.jit(lambda state, *data: dp.update(state, *data)), and carry "
        "the state through a scan."
    )


def run_id(noise_key: Array) -> Array:
    """Returns 128 bits by which a run is known; a hash of its first noise key, uint32[4]."""
    words = np.asarray(jax.random.key_data(noise_key)).astype("<u4").tobytes()
    return jnp.asarray(np.frombuffer(hashlib.sha256(_RUN + words).digest()[:16], "<u4"))


@contextlib.contextmanager
def begin(identities: Sequence[Array], *, repetition: bool) -> Iterator[None]:
    """Registers runs that start; takes it back if they fail, since nothing was released then.

    Args:
        identities: Their :func:`run_id`.
        repetition: Whether they may have the noise of earlier ones.

    Raises:
        NoiseReuseError: If a run with the same noise was started in this process.
    """
    names = [_name(identity) for identity in identities]
    with _lock:
        if not repetition and (len(set(names)) < len(names) or any(n in _used for n in names)):
            raise NoiseReuseError(
                "Expected a secret_key that has made no noise in this process, got one that has: "
                "two releases with the same noise can be subtracted, which reveals the records. "
                "Leave secret_key out, pass another one, or, if this run repeats an earlier one on "
                "the same records, say so: repetition=True."
            )
        before = {name: _used.get(name) for name in names}
        _used.update(dict.fromkeys(names, 0))
    try:
        yield
    except BaseException:
        with _lock:
            for name, steps in before.items():
                _used.pop(name) if steps is None else _used.update({name: steps})
        raise


@contextlib.contextmanager
def use(identity: Array, step: int, num_steps: int, *, repetition: bool) -> Iterator[bool]:
    """Uses up the noise of steps of a run; gives it back if the steps fail.

    Args:
        identity: Its :func:`run_id`.
        step: Steps before.
        num_steps: Steps to come.
        repetition: Whether noise may be used again.

    Yields:
        Whether the run was started in this process.

    Raises:
        NoiseReuseError: If the noise of that step was used.
    """
    name = _name(identity)
    with _lock:
        before = _used.get(name)
        if before is not None and step < before and not repetition:
            raise NoiseReuseError(
                f"Expected a state whose noise is unused, got that of step {step} of a run whose "
                f"steps up to {before} have been taken: the same noise on other records, or with "
                "another learning rate, can be subtracted. Go on from the last state, or start "
                "anew with init. (repetition=True of the driver repeats a run.)"
            )
        _used[name] = step + num_steps
    try:
        yield before is not None
    except BaseException:
        with _lock:
            _used.pop(name) if before is None else _used.update({name: before})
        raise


def _name(identity: Array) -> bytes:
    return np.asarray(identity).tobytes()


def renewed(tree: Any, entropy: bytes | None = None) -> Any:
    """Returns a tree whose secret keys go on from the old ones and from new bits.

    Args:
        tree: With typed keys among its leaves; all other leaves stay.
        entropy: The new bits; from the operating system by default.
    """
    entropy = secrets.token_bytes(32) if entropy is None else entropy
    count = iter(range(2**31))

    def one(leaf: Any) -> Any:
        if not (isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)):
            return leaf
        old = np.asarray(jax.random.key_data(leaf)).astype("<u4")
        rows = [
            hashlib.sha256(_RENEWED + entropy + next(count).to_bytes(4) + row.tobytes()).digest()
            for row in old.reshape(-1, old.shape[-1])
        ]
        words = np.frombuffer(b"".join(rows), "<u4").reshape(old.shape)
        return jax.random.wrap_key_data(jnp.asarray(words), impl=jax.random.key_impl(leaf))

    return jax.tree.map(one, tree)


def next_nonce(key: Any, nonce: Any) -> Any:
    """Returns the nonce that a state takes along into a compiled or transformed function.

    Outside a trace: new bits. Inside one, where a state is handed on to a further function: the
    nonce of the state, to which a number is added from the second time on. (The keys of two such
    uses are related by it; ChaCha20 is taken as a pseudorandom function under related keys there.)

    Args:
        key: The array with the secret key of the state.
        nonce: Its nonce, uint32[..., 8]; ``None`` stays.

    Raises:
        NoiseReuseError: If a function that is traced holds the state.
    """
    if nonce is None:
        return None
    if not _compat.is_tracer(key):
        if not isinstance(key, jax.Array | np.ndarray):  # shapes, or positions of axes
            return nonce
        if in_trace():
            raise NoiseReuseError(_held("the update"))
        return _new_nonce(nonce.shape)
    count = 0
    while _entered.get((id(key), count)) is key:
        count += 1
    _entered[id(key), count] = key
    return nonce + np.uint32(count) if count else nonce


def _new_nonce(shape: tuple[int, ...]) -> Array:
    """Returns new bits as an array of JAX: NumPy's would keep a compiled call off its fast path.

    Bits for many calls are drawn and moved to the device at once, since each move takes longer than
    a small step. Each is handed out once: ``list.pop`` is atomic, and a forked process starts anew.
    """
    if shape != (_NONCE,):
        bits = np.frombuffer(secrets.token_bytes(4 * math.prod(shape)), "<u4")
        return jnp.asarray(bits.reshape(shape))
    while True:
        try:
            return _nonces.pop()
        except IndexError:
            bits = np.frombuffer(secrets.token_bytes(4 * _NONCE * _AT_ONCE), "<u4")
            _nonces.extend(_rows(bits.reshape(_AT_ONCE, _NONCE)))


@jax.jit
def _rows(table: Array) -> list[Array]:
    return list(table)


def joined(tree: Any, nonce: Array) -> Any:
    """Returns a tree whose keys have a nonce in them: the exclusive or of the two.

    For 256 uniform bits of nonce, each new key is uniform and independent of the old ones.
    """

    def one(leaf: Any) -> Any:
        if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return leaf
        words = jax.random.key_data(leaf)
        return jax.random.wrap_key_data(
            words ^ nonce[: words.shape[-1]], impl=jax.random.key_impl(leaf)
        )

    return jax.tree.map(one, tree)


@_compat.custom_vmap
def key_of_lane(keys: Any, rest: Any) -> Any:
    """Returns the keys; under ``vmap`` over keys or over the rest, different ones in each lane."""
    return keys


@key_of_lane.def_vmap
def _(size: int, batched: Any, keys: Any, rest: Any) -> tuple[Any, Any]:
    spread = jax.tree.map(
        lambda key, has: key if has else jnp.broadcast_to(key, (size, *key.shape)),
        keys, batched[0],
    )  # fmt: skip
    spread = key_of_lane(spread, rest)  # a vmap around this one

    def fold(key: Array, lane: Array) -> Array:
        if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
            return key
        folded = jax.vmap(jax.random.fold_in, (0, None))(key.reshape(-1), lane)
        return folded.reshape(key.shape)

    lanes = jnp.arange(size)
    own = jax.tree.map(lambda leaf: jax.vmap(fold)(leaf, lanes), spread)
    return own, jax.tree.map(lambda _: True, keys)
