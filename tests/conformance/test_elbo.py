"""Without clip and noise, each estimator gives the gradient that its row names."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gaussian import gaussian

from numpyro_dp.core import MechanismState, Released
from numpyro_dp.sums.bounded import bounded_sum

from .registry import x64
from .scenarios import NAMES, bench, by_name, fast_where, row_numbers, rows_for, single

FAST = (
    "diagonal", "multivariate", "lowrank", "iaf", "normal", "delta", "guide_list", "by_hand",
    "simplex_param", "exp",
)  # fmt: skip


def relative(found, expected):
    """Largest difference over the largest entry, of trees with equal structure and shapes."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    pairs = list(zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True))
    assert all(a.shape == b.shape and a.dtype == b.dtype for a, b in pairs)
    size = max(float(jnp.max(jnp.abs(b))) for _, b in pairs)
    assert np.isfinite(size) and size > 0.01
    return max(float(jnp.max(jnp.abs(a - b))) for a, b in pairs) / size


def gradient_errors(pieces):
    """Error of each estimator against ``jax.grad`` of NumPyro's loss with the same draw."""
    step_key = jax.random.split(jax.random.key(3))[1]  # what SVI.update hands to the loss
    rows = rows_for(pieces)

    @jax.jit
    def gradients(params, arrays):
        found = {}
        for row in rows:
            estimator = row.build()(pieces.problem)
            mask = jnp.ones(arrays[0].shape[0], bool)
            public = estimator.prepare(step_key, params)
            mechanism = gaussian(np.inf, 0.0)
            seeds = row_numbers(mask.size)
            total = bounded_sum(estimator, mechanism, public, arrays, mask, seeds=seeds)
            noisy, _ = mechanism.privatise(jax.random.key(0), total, MechanismState(()))
            found[row.name] = estimator.pull_back(public, Released(noisy, 0.0))
        return found

    expected = pieces.elbo_gradient(step_key)
    found = gradients(pieces.params, pieces.arrays)
    references = {row.reference: row.reference(pieces, step_key, expected) for row in rows}
    return {row.name: relative(found[row.name], references[row.reference]) for row in rows}


@pytest.mark.full
@pytest.mark.parametrize("name", fast_where(FAST))
def test_gradient_is_the_elbo_gradient(name):
    errors = gradient_errors(single(name))
    assert max(errors.values()) < 1e-5, errors


@pytest.mark.extended
@pytest.mark.parametrize("name", NAMES)
def test_gradient_is_the_elbo_gradient_in_double_precision(name):
    with x64():
        errors = gradient_errors(bench(by_name(name)))
        assert max(errors.values()) < 1e-10, errors
