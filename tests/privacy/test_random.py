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
wide = jax.enable_x64 if hasattr(jax, "enable_x64") else jax.experimental.enable_x64


def words(data):
    return struct.unpack(f"<{len(data) // 4}I", data)


@pytest.mark.parametrize(("key", "nonce", "counter", "expected"), [
    (KEY, "000000090000004a00000000", 1,
        "10f1e7e4d13b5915500fdd1fa32071c4c7d1f4c733c068030422aa9ac3d46c4e"
        "d2826446079faa0914c2d705d98b02a2b5129cd1de164eb9cbd083e8a2503c4e"),
    (bytes(32), "000000000000000000000000", 0,
        "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
        "da41597c5157488d7724e03fb8d84a376a43b8f41518a11cc387b669b2ee6586"),
    (b"\x00\xff" + bytes(30), "000000000000000000000000", 2,
        "72d54dfbf12ec44b362692df94137f328fea8da73990265ec1bbbea1ae9af0ca"
        "13b25aa26cb4a648cb9b9d1be65b2c0924a66c54d545ec1b7374f4872e99f096"),
    (bytes(32), "000000000000000000000002", 0,
        "c2c64d378cd536374ae204b9ef933fcd1a8b2288b3dfa49672ab765b54ee27c7"
        "8a970e0e955c14f3a88e741b97c286f75f8fc299e8148362fa198a39531bed6d"),
])  # fmt: skip
def test_block_function_is_that_of_the_rfc(key, nonce, counter, expected):
    """Sections 2.3.2 and A.1."""
    counters = jnp.asarray([counter], jnp.uint32)
    found = random._blocks(jnp.array(words(key), jnp.uint32), words(bytes.fromhex(nonce)), counters)
    assert np.asarray(found).T.astype("<u4").tobytes().hex() == expected


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
    assert len({random._BITS, random._SPLIT, random._FOLD, random._SEED}) == 4
    key, raw = as_secret_key(KEY), words(KEY)
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
    with pytest.raises(ValueError, match="several keys"):
        random._counters(2**32 + 1)


@pytest.mark.parametrize("width", [8, 16, 32, 64])
def test_bit_widths(width):
    with wide(width == 64):
        key = secret_key(2)
        bits = np.asarray(jax.random.bits(key, (100_003,), f"uint{width}"))
        assert bits.dtype == f"uint{width}"
        ones = np.unpackbits(bits.view(np.uint8)).mean()
        assert abs(ones - 0.5) < 5 * 0.5 / math.sqrt(bits.size * width)
        counts = np.bincount(bits.view(np.uint8), minlength=256)
        assert stats.chisquare(counts).pvalue > 1e-4
        for shape in ((0, 3), ()):
            assert jax.random.bits(key, shape, f"uint{width}").shape == shape
        seeds = [3, -3, 3 + 2**32] if width == 64 else [3, -3]
        keys = {jax.random.key_data(jax.random.key(s, impl=CHACHA20)).tobytes() for s in seeds}
        assert len(keys) == len(seeds)


def test_transformations_agree_with_the_plain_call():
    def draw(key, number):
        return jax.random.bits(jax.random.fold_in(key, number), (5, 7))

    both = jax.random.split(secret_key(3), 3), jnp.arange(3)
    plain = np.stack([draw(key, i) for i, key in enumerate(both[0])])
    scanned = lax.scan(lambda _, each: (0, draw(*each)), 0, both)[1]
    for found in (jax.vmap(draw)(*both), jax.jit(jax.vmap(draw))(*both), scanned):
        np.testing.assert_array_equal(found, plain)


@pytest.mark.full
def test_jax_random_functions_take_the_keys():
    key = secret_key(4)
    copy = jax.random.wrap_key_data(jax.random.key_data(key), impl=CHACHA20)
    assert jax.random.key_impl(copy) == CHACHA20 and copy.dtype == key.dtype
    for draw in (jax.random.normal, jax.random.uniform, jax.random.laplace):
        assert jnp.isfinite(draw(jax.random.clone(copy), (10,))).all()
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
    assert first.shape == () and jax.random.key_impl(first) == CHACHA20
    text = b"numpyro_dp.privacy.random: integer seed, version 1: 0x5"
    of_five = words(hashlib.sha256(text).digest())
    data = lambda key: tuple(jax.random.key_data(key).tolist())  # noqa: E731
    for given in (5, np.int64(5), secret_key(5)):
        assert data(as_secret_key(given)) == of_five
    assert data(jax.jit(as_secret_key)(secret_key(5))) == data(secret_key(5)) == of_five
    for given in (KEY, KEY.hex()):
        assert data(as_secret_key(given)) == words(KEY)
    assert len({data(key) for key in (first, second, as_secret_key(2**300), secret_key(0))}) == 4


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
