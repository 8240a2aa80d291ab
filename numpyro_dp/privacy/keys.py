"""The keys of runs: secret keys, the id of a run, its nonces, and keys of lanes and later steps.

The rules that they serve are in :mod:`numpyro_dp.privacy.once`.
"""

from __future__ import annotations

import hashlib
import math
import numbers
import os
import secrets
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from numpyro_dp import _compat
from numpyro_dp._tree import is_key, on_device
from numpyro_dp.core import PyTree
from numpyro_dp.privacy.budget import Spending
from numpyro_dp.privacy.once import (
    NoiseReuseError,
    check_outside_trace,
    held_by_a_function,
    in_trace,
)
from numpyro_dp.privacy.random import CHACHA20, KEY_WORDS, check_typed_key

_INT_CONTEXT = b"numpyro_dp.privacy.random: integer seed, version 1: "
_RUN, _RENEWED = b"numpyro_dp run, version 1: ", b"numpyro_dp resumed run, version 1: "
_nonces: list[Array] = []  # drawn but not handed out yet
_AT_ONCE = 32  # nonces drawn at once
if hasattr(os, "register_at_fork"):  # a forked child must not share nonces with its parent
    os.register_at_fork(after_in_child=_nonces.clear)
# States that were seen in a trace, by the id of their key. The references are weak, because Python
# may give the id of a deleted key to a new one.
_entered: weakref.WeakValueDictionary[tuple[int, int], Array] = weakref.WeakValueDictionary()


def secret_key(seed: int | bytes | str | None = None) -> Array:
    """Returns a scalar ChaCha20 key with 256 bits from the operating system.

    Args:
        seed: ``None`` for a secret key. Anything else gives a reproducible key by
            :func:`as_secret_key`. People who know the seed can remove the noise.

    Raises:
        NoiseReuseError: If it is called without a seed while JAX traces a function. Every call and
            lane of that function would share the key.
        TypeError: If the seed is of another type.
        ValueError: If a seed of bytes or hexadecimal digits does not have 256 bits.

    Example:
        >>> import jax
        >>> key = secret_key()
        >>> key.shape, jax.random.key_data(key).shape
        ((), (8,))
        >>> jax.random.normal(key, (3,)).shape
        (3,)

    **Guarantee**: without a seed the key comes from ``secrets.token_bytes(32)`` and nothing else.
    """
    if seed is None:
        # JAX would make the key once, as a constant of the function.
        check_outside_trace("secret_key()")
        seed = secrets.token_bytes(4 * KEY_WORDS)
    return as_secret_key(seed)


def as_secret_key(key: Array | bytes | str | int) -> Array:
    """Returns a scalar ChaCha20 key made from, or equal to, the argument.

    Args:
        key: A scalar ChaCha20 key is returned unchanged, also under ``jit``. 32 bytes or 64
            hexadecimal digits are read as in RFC 8439. An integer >= 0 is hashed with SHA-256. Its
            key is reproducible, and no more secret than the integer.

    Raises:
        TypeError: If the key is of another generator or another type. ``jax.random.key(0)``, for
            example, has 64 bits of state and at most 32 bits of entropy.
        ValueError: If the key is not a scalar, the bytes or digits are not 256 bits, or the
            integer is negative. The message never shows the value, which may be secret.

    Example:
        >>> import jax
        >>> a, b = as_secret_key(7), as_secret_key(bytes(range(32)).hex())
        >>> bool((jax.random.bits(a, (4,)) == jax.random.bits(as_secret_key(a), (4,))).all())
        True

    **Guarantee**: only keys of ChaCha20 pass. Distinct integers give distinct keys, unless SHA-256
    collides.
    """
    if isinstance(key, jax.Array):
        if (kind := jax.random.key_impl(check_typed_key(key))) != CHACHA20:
            raise TypeError(
                f"Expected a ChaCha20 key, got a key of {kind}. Its state has too few bits. Use "
                "secret_key(), or secret_key(seed) for a reproducible run."
            )
        return key
    if isinstance(key, str):
        try:
            key = bytes.fromhex(key)
        except ValueError:
            raise ValueError(
                "A key given as text must have 64 hexadecimal digits. Use secret_key() for a fresh "
                "secret key."
            ) from None
    elif isinstance(key, numbers.Integral) and not isinstance(key, bool):
        if int(key) < 0:
            raise ValueError("The integer seed is negative. Use a seed >= 0.")
        key = hashlib.sha256(_INT_CONTEXT + hex(int(key)).encode()).digest()
    if not isinstance(key, (bytes, bytearray)):
        raise TypeError(
            "Expected a ChaCha20 key, 32 bytes, 64 hexadecimal digits or an integer, got "
            f"{type(key).__name__}. Use secret_key() for a fresh secret key."
        )
    if len(key) != 4 * KEY_WORDS:
        raise ValueError(
            f"Expected a key of 32 bytes (64 hexadecimal digits), got {len(key)} bytes."
        )
    words = [int.from_bytes(key[i : i + 4], "little") for i in range(0, len(key), 4)]
    return jax.random.wrap_key_data(on_device(words, np.uint32), impl=CHACHA20)


def agreed(mesh: Mesh | None, secret: Array) -> Array:
    """Returns the secret key of the first process, if a mesh has devices of several processes."""
    if mesh is None or not mesh.is_multi_process:
        return secret
    data = multihost_utils.broadcast_one_to_all(jax.random.key_data(secret))
    return jax.random.wrap_key_data(jnp.asarray(data), impl=jax.random.key_impl(secret))


def keys_of_run(secret: Array, earlier: tuple[Spending, ...]) -> tuple[Array, Array]:
    """Returns the keys of noise and of batches, for a run after the earlier ones of its budget."""
    # A child of the key: the caller may have used the same key as the public rng_key. Earlier runs
    # of the budget select another child, so that no run repeats their noise.
    # Without names, which are random: a repetition must find the same child.
    spent = repr([each._replace(run="") for each in earlier])
    child = int.from_bytes(hashlib.sha256(spent.encode()).digest()[:4]) if earlier else 0
    return _children(secret, np.uint32(child))  # JAX takes no Python integer of 32 bits


@jax.jit
def _children(secret: Array, child: Array) -> tuple[Array, Array]:
    """Splits a child of the key. One program is faster than two calls."""
    noise_key, batch_key = jax.random.split(jax.random.fold_in(secret, child))
    return noise_key, batch_key


def run_id(noise_key: Array) -> Array:
    """Returns the id of a run: 128 bits of a hash of its first noise key, uint32[4]."""
    # A hash, because every later state has the id. It must not give away the first key.
    words = np.asarray(jax.random.key_data(noise_key)).astype("<u4").tobytes()
    return on_device(np.frombuffer(hashlib.sha256(_RUN + words).digest()[:16], "<u4"))


def renewed(tree: PyTree, entropy: bytes | None = None) -> PyTree:
    """Returns a tree with new secret keys, made from the old ones and new random bits.

    By default the operating system gives the new bits.
    """
    entropy = secrets.token_bytes(32) if entropy is None else entropy
    count = iter(range(2**31))

    def one(leaf: Array) -> Array:
        old = np.asarray(jax.random.key_data(leaf)).astype("<u4")
        rows = [
            # Numbered, so that two equal keys do not become equal again.
            hashlib.sha256(_RENEWED + entropy + next(count).to_bytes(4) + row.tobytes()).digest()
            for row in old.reshape(-1, old.shape[-1])
        ]
        words = np.frombuffer(b"".join(rows), "<u4").reshape(old.shape)
        return jax.random.wrap_key_data(jnp.asarray(words), impl=jax.random.key_impl(leaf))

    return _with_keys(one, tree)


def _with_keys(change: Callable[[Array], Array], tree: PyTree) -> PyTree:
    """Returns a tree with other keys. All leaves that are not keys stay the same."""
    return jax.tree.map(lambda leaf: change(leaf) if is_key(leaf) else leaf, tree)


def next_nonce(key: PyTree, nonce: PyTree) -> PyTree:
    """Returns the nonce with which a state enters a compiled or transformed function.

    Outside a trace the nonce is new. Inside a trace, a state may be passed on to further functions.
    Its nonce stays the same for the first of them, and a counter is added to it for each further
    one. The keys of these uses are related. The guarantee then needs ChaCha20 to be a pseudorandom
    function under related keys.

    Args:
        key: The array with the secret key of the state.
        nonce: Its nonce, uint32[..., 8]. ``None`` stays ``None``.

    Raises:
        NoiseReuseError: If a traced function holds the state as a constant.
    """
    if nonce is None:
        return None
    if not _compat.is_tracer(key):
        if not isinstance(key, jax.Array | np.ndarray):  # JAX passes shapes or axis numbers
            return nonce
        if in_trace():
            # A key inside a trace that is no tracer is a constant: every call would repeat its
            # noise.
            raise NoiseReuseError(held_by_a_function("the update"))
        return _new_nonce(nonce.shape)
    count = 0
    while _entered.get((id(key), count)) is key:
        count += 1
    _entered[id(key), count] = key
    return nonce + np.uint32(count) if count else nonce


def _new_nonce(shape: tuple[int, ...]) -> Array:
    """Returns new bits as a JAX array, because a NumPy array would slow a compiled call down.

    Bits for many calls are drawn and moved to the device at once, because one move takes longer
    than a small step. Each nonce is handed out once: ``list.pop`` is atomic, and a forked process
    starts with an empty list.
    """
    if shape != (KEY_WORDS,):
        bits = np.frombuffer(secrets.token_bytes(4 * math.prod(shape)), "<u4")
        return jnp.asarray(bits.reshape(shape))
    while True:
        try:
            return _nonces.pop()
        except IndexError:
            bits = np.frombuffer(secrets.token_bytes(4 * KEY_WORDS * _AT_ONCE), "<u4")
            _nonces.extend(_rows(bits.reshape(_AT_ONCE, KEY_WORDS)))


@jax.jit
def _rows(table: Array) -> list[Array]:
    return list(table)


def joined(tree: PyTree, nonce: Array) -> PyTree:
    """Returns a tree in which each key is replaced by its exclusive or with the nonce.

    If the nonce has 256 uniform bits, each new key is uniform and independent of the old ones.
    """

    def one(leaf: Array) -> Array:
        words = jax.random.key_data(leaf)
        return jax.random.wrap_key_data(
            words ^ nonce[: words.shape[-1]], impl=jax.random.key_impl(leaf)
        )

    return _with_keys(one, tree)


@_compat.custom_vmap
def key_of_lane(keys: PyTree, rest: PyTree) -> PyTree:
    """Returns the keys. Under ``vmap`` over keys or ``rest`` each lane gets different keys."""
    return keys


@key_of_lane.def_vmap
def _(size: int, batched: PyTree, keys: PyTree, rest: PyTree) -> tuple[PyTree, PyTree]:
    spread = jax.tree.map(
        lambda key, has: key if has else jnp.broadcast_to(key, (size, *key.shape)),
        keys, batched[0],
    )  # fmt: skip
    spread = key_of_lane(spread, rest)  # for a vmap around this one

    # Lanes that share a key would add the same noise, so each folds in its number.
    def fold(key: Array, lane: Array) -> Array:
        folded = jax.vmap(jax.random.fold_in, (0, None))(key.reshape(-1), lane)
        return folded.reshape(key.shape)

    lanes = jnp.arange(size)
    own = _with_keys(lambda key: jax.vmap(fold)(key, lanes), spread)
    return own, jax.tree.map(lambda _: True, keys)


def check_rng_key(rng_key: object) -> None:
    """Raises TypeError unless ``rng_key`` is a JAX key, typed or raw.

    Example:
        >>> check_rng_key(jax.random.key(0))
    """
    if not _holds_keys(rng_key, 0):
        raise TypeError(
            f"Expected rng_key to be a JAX key, got {type(rng_key).__name__}. Pass "
            "jax.random.key(0)."
        )


def check_rng_keys(rng_keys: object) -> None:
    """Raises TypeError unless ``rng_keys`` is a vector of JAX keys, typed or raw."""
    if not _holds_keys(rng_keys, 1):
        shown = type(rng_keys).__name__ + str(getattr(rng_keys, "shape", ""))
        raise TypeError(
            f"Expected rng_keys to be a vector of JAX keys, one for each seed, got {shown}. Pass "
            "jax.random.split(jax.random.key(0), number_of_seeds)."
        )


def _holds_keys(found: Any, ndim: int) -> bool:
    """Whether an array holds at least one key in this number of axes, typed or raw."""
    if is_key(found):
        return found.ndim == ndim and found.size > 0
    raw = isinstance(found, jax.Array | np.ndarray) and found.dtype == np.uint32
    return raw and found.ndim == ndim + 1 and found.size > 0
