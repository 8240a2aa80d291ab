"""The exact sum against NumPy's, for every way in which rows fall into lanes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_dp.sums import exact as module
from numpyro_dp.sums.exact import exact_sum

LANE, LANES = module._LANE_ROWS, module._LANES
SOME = [0, 1, 7, 464, 3001, LANES * LANE + LANES - 1]
ROWS = SOME + [size + off for size in (LANE, 2 * LANE, LANES * LANE) for off in (-1, 0, 1)]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("rows", ROWS)
def test_every_row_counts_once(rows, dtype):
    rng = np.random.default_rng(rows)
    norm = 2.0
    terms = rng.integers(-16, 17, size=(rows, 3)) / 16  # products lie on the grid
    weights = norm * rng.integers(-16, 17, size=rows) / 16  # centred rows may have negative ones
    expected = weights @ terms
    terms[weights == 0] = np.nan
    wide = jax.enable_x64 if hasattr(jax, "enable_x64") else jax.experimental.enable_x64
    with wide(dtype == "float64"):
        both = jnp.asarray(terms, dtype), jnp.asarray(weights, dtype)
        found = jax.jit(lambda t, w: exact_sum(lambda at: t[at], w, norm))(*both)
        assert found.dtype == dtype
        np.testing.assert_array_equal(found, expected)


@pytest.mark.every_case
@pytest.mark.parametrize("rows", [5, 1023, 1024, 3001, 40_000])
def test_many_rows_are_whole_numbers_of_the_finest_grid(rows):
    """Sums of rows that all lie in one direction, which the float32 of their sum cannot hold."""
    rng = np.random.default_rng(rows)
    terms = np.round(rng.uniform(0.9, 1.0, size=(rows, 2)) * [1, -1] * 2**21) / 2**21
    found = module.partial_sum(
        lambda at: jnp.asarray(terms, jnp.float32)[at], jnp.ones(rows), 1.0, 2**26
    )
    total = [int(h) * 2**16 + int(low) for h, low in zip(found.high, found.low, strict=True)]
    assert total == [int(x) for x in np.round(terms.sum(0) * 2**21)]
    assert (found.low >= 0).all() and (found.low < 2**16).all()


def test_a_sum_of_halves_is_the_sum(monkeypatch):
    terms = jnp.asarray(np.random.default_rng(0).normal(size=(1000, 3)), jnp.float32)
    whole = exact_sum(lambda at: terms[at], jnp.ones(1000), 8.0)
    monkeypatch.setattr(module, "_MOST_ROWS", 100)
    np.testing.assert_array_equal(exact_sum(lambda at: terms[at], jnp.ones(1000), 8.0), whole)


def test_the_margin_of_a_whole_sum_does_not_grow_with_records():
    few, many = (module.clip_margin(n, 20, jnp.float32, whole=True) for n in (100, 50_000_000))
    assert 0.99999 < many <= few
    assert module.clip_margin(2_000_000, 20, jnp.float32) < 0.6
