"""ChaCha20 against RFC 8439 and as a JAX generator; the Gaussian against N(0, 1)."""

import hashlib
import math
import secrets
import struct
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from scipy import stats

from numpyro_dp.privacy import keys, random
from numpyro_dp.privacy.keys import as_secret_key, secret_key
from numpyro_dp.privacy.random import CHACHA20

KEY = bytes(range(32))


def words(data):
    return struct.unpack(f"<{len(data) // 4}I", data)


def keystream(key, nonce, counter, blocks=1):
    counters = jnp.arange(counter, counter + blocks, dtype=jnp.uint32)
    out = random._blocks(jnp.array(words(key), jnp.uint32), words(nonce), counters)
    return np.asarray(out).T.astype("<u4").tobytes()


def test_block_function_rfc_2_3_2():
    nonce = bytes.fromhex("000000090000004a00000000")
    expected = (
        "10f1e7e4d13b5915500fdd1fa32071c4c7d1f4c733c068030422aa9ac3d46c4e"
        "d2826446079faa0914c2d705d98b02a2b5129cd1de164eb9cbd083e8a2503c4e"
    )
    assert keystream(KEY, nonce, 1).hex() == expected


@pytest.mark.parametrize(("key", "nonce", "counter", "expected"), [
    (
        bytes(32),
        bytes(12),
        0,
        "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
        "da41597c5157488d7724e03fb8d84a376a43b8f41518a11cc387b669b2ee6586",
    ),
    (
        bytes(32),
        bytes(12),
        1,
        "9f07e7be5551387a98ba977c732d080dcb0f29a048e3656912c6533e32ee7aed"
        "29b721769ce64e43d57133b074d839d531ed1f28510afb45ace10a1f4b794d6f",
    ),
    (
        bytes(31) + b"\x01",
        bytes(12),
        1,
        "3aeb5224ecf849929b9d828db1ced4dd832025e8018b8160b82284f3c949aa5a"
        "8eca00bbb4a73bdad192b5c42f73f2fd4e273644c8b36125a64addeb006c13a0",
    ),
    (
        b"\x00\xff" + bytes(30),
        bytes(12),
        2,
        "72d54dfbf12ec44b362692df94137f328fea8da73990265ec1bbbea1ae9af0ca"
        "13b25aa26cb4a648cb9b9d1be65b2c0924a66c54d545ec1b7374f4872e99f096",
    ),
    (
        bytes(32),
        bytes(11) + b"\x02",
        0,
        "c2c64d378cd536374ae204b9ef933fcd1a8b2288b3dfa49672ab765b54ee27c7"
        "8a970e0e955c14f3a88e741b97c286f75f8fc299e8148362fa198a39531bed6d",
    ),
])  # fmt: skip
def test_block_function_rfc_a_1(key, nonce, counter, expected):
    assert keystream(key, nonce, counter).hex() == expected


def test_encryption_rfc_2_4_2():
    nonce = bytes.fromhex("000000000000004a00000000")
    text = (
        b"Ladies and Gentlemen of the class of '99: If I could offer you only one tip for the "
        b"future, sunscreen would be it."
    )
    cipher = bytes(a ^ b for a, b in zip(text, keystream(KEY, nonce, 1, 2), strict=False))
    assert cipher.hex() == (
        "6e2e359a2568f98041ba0728dd0d6981e97e7aec1d4360c20a27afccfd9fae0b"
        "f91b65c5524733ab8f593dabcd62b3571639d624e65152ab8f530c359f0861d8"
        "07ca0dbf500d6a6156a38e088a22b65e52bc514d16ccf806818ce91ab7793736"
        "5af90bbf74a35be6b40b8eedf2785e42874d"
    )


def reference_block(key, nonce, counter):
    """ChaCha20 in plain Python, for values the RFC does not list."""

    def rotate(x, n):
        return ((x << n) | (x >> (32 - n))) & 0xFFFFFFFF

    start = [*words(b"expand 32-byte k"), *key, counter, *nonce]
    s = list(start)
    columns = [(i, 4 + i, 8 + i, 12 + i) for i in range(4)]
    diagonals = [(i, 4 + (i + 1) % 4, 8 + (i + 2) % 4, 12 + (i + 3) % 4) for i in range(4)]
    for a, b, c, d in (columns + diagonals) * 10:
        for x, y, z, n in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
            s[x] = (s[x] + s[y]) & 0xFFFFFFFF
            s[z] = rotate(s[z] ^ s[x], n)
    return [(x + y) & 0xFFFFFFFF for x, y in zip(s, start, strict=True)]


def test_domains_are_the_documented_blocks():
    key = as_secret_key(KEY)
    raw = words(KEY)
    bits = np.asarray(jax.random.bits(key, (48,))).reshape(16, 3)
    for i in range(3):
        assert bits[:, i].tolist() == reference_block(raw, (random._BITS, 0, 0), i)
    children = jax.random.key_data(jax.random.split(key, (2, 2))).reshape(4, 8)
    for i in range(4):
        assert children[i].tolist() == reference_block(raw, (random._SPLIT, 0, 0), i)[:8]
    folded = jax.random.key_data(jax.random.fold_in(key, 0xDEADBEEF))
    assert folded.tolist() == reference_block(raw, (random._FOLD, 0xDEADBEEF, 0), 0)[:8]
    seeded = jax.random.key_data(jax.random.key(-5, impl=CHACHA20))
    low, high = 2**32 - 5, 2**32 - 1 if jax.config.jax_enable_x64 else 0
    assert seeded.tolist() == reference_block([0] * 8, (random._SEED, low, high), 0)[:8]


def test_domains_differ():
    assert len({random._BITS, random._SPLIT, random._FOLD, random._SEED}) == 4
    key = secret_key(1)
    streams = [key, *jax.random.split(key, 3), *(jax.random.fold_in(key, i) for i in range(3))]
    draws = {jax.random.bits(k, (8,)).tobytes() for k in streams}
    data = {jax.random.key_data(k).tobytes() for k in streams}
    assert len(draws | data) == 14


@pytest.mark.parametrize("width", [8, 16, 32])
def test_bit_widths(width):
    key = secret_key(2)
    bits = np.asarray(jax.random.bits(key, (100_003,), f"uint{width}"))
    assert bits.dtype == f"uint{width}"
    ones = np.unpackbits(bits.view(np.uint8)).mean()
    assert abs(ones - 0.5) < 5 * 0.5 / math.sqrt(bits.size * width)
    counts = np.bincount(bits.view(np.uint8), minlength=256)
    assert stats.chisquare(counts).pvalue > 1e-4
    assert jax.random.bits(key, (0, 3), f"uint{width}").shape == (0, 3)
    assert jax.random.bits(key, (), f"uint{width}").shape == ()


def test_64_bit_words_and_seeds():
    with jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64():
        bits = np.asarray(jax.random.bits(secret_key(2), (50_001,), jnp.uint64))
        assert bits.dtype == np.uint64
        assert stats.chisquare(np.bincount(bits.view(np.uint8), minlength=256)).pvalue > 1e-4
        seeds = [3, 3 + 2**32, -3]
        keys = {jax.random.key_data(jax.random.key(s, impl=CHACHA20)).tobytes() for s in seeds}
        assert len(keys) == 3


def test_transformations_agree_with_the_plain_call():
    keys = jax.random.split(secret_key(3), 3)
    plain = np.stack([jax.random.bits(k, (5, 7)) for k in keys])

    def draw(k):
        return jax.random.bits(k, (5, 7))

    np.testing.assert_array_equal(jax.vmap(draw)(keys), plain)
    np.testing.assert_array_equal(jax.jit(jax.vmap(draw))(keys), plain)
    np.testing.assert_array_equal(lax.scan(lambda c, k: (c, draw(k)), 0, keys)[1], plain)
    folded = jax.vmap(jax.random.fold_in)(keys, jnp.arange(3))
    single = [jax.random.key_data(jax.random.fold_in(k, i)) for i, k in enumerate(keys)]
    np.testing.assert_array_equal(jax.random.key_data(folded), np.stack(single))


@pytest.mark.full
def test_jax_random_functions_take_the_keys():
    key = secret_key(4)
    copy = jax.random.wrap_key_data(jax.random.key_data(key), impl=CHACHA20)
    assert jax.random.key_impl(copy) == CHACHA20
    assert copy.dtype == key.dtype
    for value in (
        jax.random.normal(jax.random.clone(key), (10,)),
        jax.random.uniform(copy, (10,)),
        jax.random.laplace(key, (10,)),
    ):
        assert bool(jnp.isfinite(value).all())
    assert sorted(jax.random.permutation(key, 10).tolist()) == list(range(10))
    assert jax.random.choice(key, 10, (4,), replace=False).shape == (4,)


@pytest.mark.full
def test_import_makes_no_array():
    code = (
        "import jax.numpy as jnp, jax._src.xla_bridge as bridge\n"
        "import numpyro_dp.privacy.random, numpyro_dp.privacy.sampling\n"
        "raise SystemExit(bridge.backends_are_initialized())"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.operating_system_keys
def test_keys_come_from_the_operating_system():
    assert keys.secrets is secrets
    first, second = secret_key(), secret_key()
    assert jax.random.key_data(first).tolist() != jax.random.key_data(second).tolist()


def test_secret_keys():
    first, second = secret_key(), secret_key()
    assert first.shape == ()
    assert jax.random.key_impl(first) == CHACHA20
    assert jax.random.key_data(first).tolist() != jax.random.key_data(second).tolist()
    assert jax.random.key_data(secret_key(KEY)).tolist() == list(words(KEY))
    same = [
        secret_key(5),
        as_secret_key(5),
        as_secret_key(np.int64(5)),
        jax.jit(as_secret_key)(secret_key(5)),
    ]
    assert len({jax.random.key_data(k).tobytes() for k in same}) == 1
    large = as_secret_key(2**300)
    assert jax.random.key_data(large).tolist() != jax.random.key_data(secret_key(0)).tolist()
    assert jax.random.key_data(as_secret_key(KEY.hex())).tolist() == list(words(KEY))


@pytest.mark.parametrize(("make", "error", "match"), [
    (lambda: jax.random.key(0), TypeError, r"Use secret_key\(\)"),
    (lambda: jax.random.PRNGKey(0), TypeError, r"ArrayImpl\(2,\)"),
    (lambda: jax.random.split(secret_key(0)), ValueError, "scalar key"),
    (lambda: b"short", ValueError, "got 5 bytes"),
    (lambda: "0g" * 32, ValueError, "64 hexadecimal digits"),
    (lambda: "ab" * 31, ValueError, "got 31 bytes"),
    (lambda: -1, ValueError, ">= 0"),
    (lambda: True, TypeError, "got bool"),
    (lambda: 1.5, TypeError, "got float"),
    (lambda: np.zeros(8, np.uint32), TypeError, "got ndarray"),
])  # fmt: skip
def test_other_keys_are_refused(make, error, match):
    with pytest.raises(error, match=match):
        as_secret_key(make())


def test_too_many_blocks_are_refused():
    with pytest.raises(ValueError, match="several keys"):
        random._counters(2**32 + 1)


def test_integers_have_a_domain_of_their_own():
    words = np.asarray(jax.random.key_data(as_secret_key(7))).astype("<u4").tobytes()
    text = b"numpyro_dp.privacy.random: integer seed, version 1: 0x7"
    assert words == hashlib.sha256(text).digest()
