"""The exact sum against NumPy's, for every way in which rows fall into lanes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_dp.sums import exact as module
from numpyro_dp.sums.exact import exact_sum

LANE, LANES = module._LANE_ROWS, module._LANES
ROWS = [
    0, 1, 7, LANE - 1, LANE, LANE + 1, 2 * LANE - 1, 2 * LANE, 2 * LANE + 1, 464,
    LANES * LANE - 1, LANES * LANE, LANES * LANE + 1, LANES * LANE + LANES - 1, 3001,
]  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("rows", ROWS)
def test_every_row_counts_once(rows, dtype):
    rng = np.random.default_rng(rows)
    norm = 2.0
    terms = rng.integers(-16, 17, size=(rows, 3)) / 16  # products lie on the grid
    weights = norm * rng.integers(0, 17, size=rows) / 16
    expected = weights @ terms
    terms[weights == 0] = np.nan
    wide = jax.enable_x64 if hasattr(jax, "enable_x64") else jax.experimental.enable_x64
    with wide(dtype == "float64"):
        both = jnp.asarray(terms, dtype), jnp.asarray(weights, dtype)
        found = jax.jit(lambda t, w: exact_sum(lambda at: t[at], w, norm))(*both)
        assert found.dtype == dtype
        np.testing.assert_array_equal(found, expected)
