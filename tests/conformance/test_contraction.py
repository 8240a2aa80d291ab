"""What is recognised as a single product with the record, and that it changes no gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gaussian import gaussian

from numpyro_dp.estimators import aligned
from numpyro_dp.sums.bounded import bounded_sum
from numpyro_dp.sums.contraction import split_scalar
from numpyro_dp.sums.factored import record_lengths

from .scenarios import single

W, X = jnp.array([0.5, -1.0, 2.0]), jnp.array([1.0, 2.0, -0.5])
SHIFT, SCALE = jnp.array([0.1, 0.2, 0.3]), jnp.array([2.0, 1.0, 0.5])


SCALARS = {  # and whether the features are computed from the record
    "plain": (lambda w, x: jnp.sin(x @ w), False),
    "scaled": (lambda w, x: jnp.sin((x - SHIFT) / SCALE @ w), True),
    "with an intercept": (lambda w, x: jnp.sin(jnp.concatenate([jnp.ones(1), x[:2]]) @ w), True),
    "polynomial": (lambda w, x: jnp.sin(x[0] ** jnp.arange(3.0) @ w), True),
}
OTHERS = {
    "twice": lambda w, x: jnp.sin(x @ w) + jnp.cos((x + 1) @ w),
    "transformed": lambda w, x: jnp.sin(x @ jnp.exp(w)),
    "two rows": lambda w, x: jnp.sin(jnp.stack([x, 2 * x]) @ w).sum(),
}


@pytest.mark.parametrize("name", SCALARS)
def test_one_product_with_features_of_the_record(name):
    scalar, derived = SCALARS[name]
    split = split_scalar(scalar, W, X)
    (contraction,) = split.contractions
    assert contraction.derived == derived and contraction.outer
    residual = jax.grad(split.scalar)([jnp.zeros(())], [], [W], [X])[0]
    factor = contraction.record([X])
    np.testing.assert_allclose(residual * factor, jax.grad(scalar)(W, X), rtol=1e-6)
    np.testing.assert_allclose(split.scalar([jnp.zeros(())], [], [W], [X]), scalar(W, X))
    np.testing.assert_allclose(contraction.product(W, factor), factor @ W, rtol=1e-6)


@pytest.mark.parametrize("name", OTHERS)
def test_other_uses_are_left_alone(name):
    assert split_scalar(OTHERS[name], W, X).contractions == ()


@pytest.mark.full
def test_lengths_found_once_give_the_same_sum():
    pieces = single("logistic")
    estimator = aligned()(pieces.problem)
    public = estimator.prepare(jax.random.key(5), pieces.params)
    mask = jnp.arange(len(pieces.arrays[0])) != 3
    (length,) = record_lengths(estimator, public, pieces.arrays)
    np.testing.assert_allclose(length, np.linalg.norm(pieces.arrays[0], axis=1), rtol=1e-6)
    arguments = estimator, gaussian(0.5, 0.0), public, pieces.arrays, mask
    found, expected = bounded_sum(*arguments, (length,)), bounded_sum(*arguments)
    for name in expected:
        np.testing.assert_allclose(found[name], expected[name], atol=2e-6)
    # They are what the norms come from: with longer ones, every record counts less.
    longer = bounded_sum(*arguments, (1e3 * length,))
    assert all(np.abs(longer[n]).max() < 0.1 * np.abs(expected[n]).max() for n in expected)
