"""Without clip and noise, every estimator that says so gives the gradient of the ELBO itself."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_dp.aggregate import bounded_sum
from numpyro_dp.privacy.mechanism import gaussian

from .registry import ESTIMATORS, x64
from .scenarios import bench, by_name, fast_where, single

ELBO = tuple(row for row in ESTIMATORS if row.equals_elbo)
FAST = (
    "diagonal", "multivariate", "lowrank", "iaf", "bnaf", "normal", "delta", "guide_list",
    "by_hand", "own_params_3", "two_sites",
)  # fmt: skip
FAST_DOUBLE = ("lowrank",)


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

    @jax.jit
    def gradients(params, arrays):
        found = {}
        for row in ELBO:
            estimator = row.build()(pieces.problem)
            mask = jnp.ones(arrays[0].shape[0], bool)
            public = estimator.prepare(step_key, params)
            mechanism = gaussian(np.inf, 0.0)
            total = bounded_sum(estimator, mechanism, public, arrays, mask)
            noisy, _ = mechanism.privatise(jax.random.key(0), total, ())
            found[row.name] = estimator.pull_back(public, noisy)
        return found

    expected = pieces.elbo_gradient(step_key)
    found = gradients(pieces.params, pieces.arrays)
    assert set(found) == {row.name for row in ELBO}
    return {name: relative(gradient, expected) for name, gradient in found.items()}


@pytest.mark.parametrize("name", fast_where(FAST))
def test_gradient_is_the_elbo_gradient(name):
    errors = gradient_errors(single(name))
    assert max(errors.values()) < 1e-5, errors


@pytest.mark.parametrize("name", fast_where(FAST_DOUBLE))
def test_gradient_is_the_elbo_gradient_in_double_precision(name):
    with x64():
        errors = gradient_errors(bench(by_name(name)))
        assert max(errors.values()) < 1e-10, errors
