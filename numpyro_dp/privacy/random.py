r"""Cryptographically secure randomness: ChaCha20 as a JAX generator.

A key is 256 bits. With :math:`F_k(n, c)` the ChaCha20 block function (512 bits) of key :math:`k`,
nonce :math:`n` and block counter :math:`c`,

.. math::
    \mathrm{bits}(k) = \{F_k(n_{bits}, 0), F_k(n_{bits}, 1), \dots\}, \qquad
    \mathrm{split}_i(k) = F_k(n_{split}, i)_{0..255}, \qquad
    \mathrm{fold}_d(k) = F_k((n_{fold}, d), 0)_{0..255}.

The keys are ordinary typed JAX keys: ``jax.random`` functions, ``jit``, ``vmap`` and ``scan`` take
them. Exception: ``jax.random.poisson``, which JAX offers for threefry only.

**Guarantee.** The three domains are distinct nonces, so bits, children and folded keys of one key
are values of :math:`F_k` at distinct inputs. If :math:`F` is a pseudo-random function, each child
is indistinguishable from a fresh uniform key. By induction over the tree (a hybrid argument), all
streams drawn from :math:`m` keys are then indistinguishable from independent uniform bits, up to
:math:`m` times the advantage against ChaCha20. A key cannot be computed from its outputs, so
a state that holds only the child of a split cannot reproduce earlier draws. This holds for keys
with 256 unpredictable bits, as :func:`numpyro_dp.privacy.keys.secret_key` makes them. A key from
``jax.random.key(0, impl=CHACHA20)`` has at most as much entropy as its seed. Use it in tests only.

Reference:
    Y. Nir, A. Langley, "ChaCha20 and Poly1305 for IETF Protocols", RFC 8439, 2018.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax import Array, lax

from numpyro_dp._compat import define_prng_impl
from numpyro_dp._tree import is_key
from numpyro_dp._validate import check_int

KEY_WORDS = 8
_BLOCK_WORDS = 16
_MAX_BLOCKS = 2**32
_CONSTANTS = (0x61707865, 0x3320646E, 0x79622D32, 0x6B206574)  # "expand 32-byte k"
# First word of the nonce: what the block is for. The values are arbitrary, and must differ.
_BITS, _SPLIT, _FOLD, _SEED = 0x62697473, 0x73706C74, 0x666F6C64, 0x73656564


def check_typed_key(key: Array) -> Array:
    """Returns ``key`` if it is a scalar typed key of any generator, or raises."""
    if not is_key(key):
        raise TypeError(
            f"Expected a typed key, got {type(key).__name__}{getattr(key, 'shape', '')}. Use "
            "secret_key(), or jax.random.wrap_key_data(data, impl=CHACHA20) for eight words."
        )
    if key.shape:
        raise ValueError(f"Expected a scalar key, got keys of shape {key.shape}. Use jax.vmap.")
    return key


def _rotate(x: Array, count: int) -> Array:
    return (x << count) | (x >> (32 - count))


def _quarter_rounds(a: Array, b: Array, c: Array, d: Array) -> tuple[Array, Array, Array, Array]:
    """Four quarter rounds at once, one for each row of the arguments."""
    for of_d, of_b in ((16, 12), (8, 7)):
        a = a + b
        d = _rotate(d ^ a, of_d)
        c = c + d
        b = _rotate(b ^ c, of_b)
    return a, b, c, d


def _double_round(_: Array, state: Array) -> Array:
    a, b, c, d = _quarter_rounds(*state)
    # Each half is one pass over the state. Without the barrier XLA would compute the first twice.
    state = lax.optimization_barrier(
        jnp.stack([a, jnp.roll(b, -1, 0), jnp.roll(c, -2, 0), jnp.roll(d, -3, 0)])
    )
    a, b, c, d = _quarter_rounds(*state)
    return jnp.stack([a, jnp.roll(b, 1, 0), jnp.roll(c, 2, 0), jnp.roll(d, 3, 0)])


# Compiled, because outside a trace JAX would compile the operations of a key one by one, some
# thirty programs in a new process. Inside a trace, inline=True removes the call.
@functools.partial(jax.jit, inline=True)
def _blocks(key: Array, nonce: tuple[Array | int, ...], counters: Array) -> Array:
    """ChaCha20 blocks of one key and nonce, shape (16, counters), uint32.

    The state has shape (4, 4, counters), RFC 8439's matrix for each block. Four quarter rounds of
    all blocks are then one vector operation. The rounds stay in a loop, because XLA takes minutes
    to compile them unrolled.
    """
    rows = [jnp.uint32(word) for word in _CONSTANTS], [*key[:4]], [*key[4:]]
    last = [counters, *(jnp.asarray(word).astype(jnp.uint32) for word in nonce)]
    start = jnp.stack(
        [
            jnp.stack([jnp.broadcast_to(word, counters.shape) for word in row])
            for row in (*rows, last)
        ]
    )
    end = lax.fori_loop(0, 10, _double_round, start)
    # Without this addition the rounds could be undone, and the bits would reveal the key.
    return (start + end).reshape(_BLOCK_WORDS, -1)


def _whole_vectors(number: int) -> int:
    """Rounds a number of blocks up to whole vectors of a CPU.

    Ten blocks take three times as long as twenty-four.
    """
    return number if number <= 4 else max(24, -(-number // 8) * 8)


def _counters(number: int) -> Array:
    # The block counter has 32 bits. Beyond them, blocks would repeat.
    check_int("blocks", number, low=0, high=_MAX_BLOCKS, remedy="Draw from several keys.")
    return lax.iota(jnp.uint32, number)


def _random_bits(key: Array, bit_width: int, shape: tuple[int, ...]) -> Array:
    """The keystream's words in a fixed order: the first word of every block, then the second, ...

    The RFC's order would transpose (16, blocks), which costs a consumer up to five times as much.
    Leaving out blocks that only fill a vector would cost as much.
    """
    size = math.prod(shape)
    blocks = _counters(_whole_vectors(-(-size * bit_width // (32 * _BLOCK_WORDS))))
    bits = _blocks(key, (_BITS, 0, 0), blocks).reshape(-1)
    if bit_width == 64:
        low, high = bits.astype(jnp.uint64).reshape(2, -1)
        bits = (high << 32) | low
    elif bit_width < 32:
        bits = lax.bitcast_convert_type(bits, jnp.dtype(f"uint{bit_width}")).reshape(-1)
    return bits[:size].reshape(shape)


def _split(key: Array, shape: tuple[int, ...]) -> Array:
    children = _blocks(key, (_SPLIT, 0, 0), _counters(math.prod(shape)))[:KEY_WORDS]
    return children.T.reshape(*shape, KEY_WORDS)


def _fold_in(key: Array, data: Array | int) -> Array:
    return _blocks(key, (_FOLD, data, 0), _counters(1))[:KEY_WORDS, 0]


def _seed(seed: Array) -> Array:
    seed = jnp.asarray(seed)
    wide = seed.dtype.itemsize == 8
    high = lax.shift_right_logical(seed, seed.dtype.type(32)) if wide else jnp.uint32(0)
    low = seed & seed.dtype.type(0xFFFFFFFF) if wide else seed
    zero = jnp.zeros(KEY_WORDS, jnp.uint32)
    return _blocks(zero, (_SEED, low, high), _counters(1))[:KEY_WORDS, 0]


# Defined once, so that all its keys have one type. This makes no array and registers no name.
CHACHA20 = define_prng_impl(
    key_shape=(KEY_WORDS,),
    seed=_seed,
    split=_split,
    random_bits=_random_bits,
    fold_in=_fold_in,
    name="chacha20",
    tag="cc20",
)
