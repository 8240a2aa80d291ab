"""What is recognised as a single product with the record, and that it changes no gradient."""

from typing import Any

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


def plain(w: Any, x: Any) -> Any:
    return jnp.sin(x @ w)


def scaled(w: Any, x: Any) -> Any:
    return jnp.sin((x - SHIFT) / SCALE @ w)


def with_intercept(w: Any, x: Any) -> Any:
    return jnp.sin(jnp.concatenate([jnp.ones(1), x[:2]]) @ w)


def polynomial(w: Any, x: Any) -> Any:
    return jnp.sin(x[0] ** jnp.arange(3.0) @ w)


def twice(w: Any, x: Any) -> Any:
    return jnp.sin(x @ w) + jnp.cos((x + 1) @ w)


def transformed(w: Any, x: Any) -> Any:
    return jnp.sin(x @ jnp.exp(w))


def two_rows(w: Any, x: Any) -> Any:
    return jnp.sin(jnp.stack([x, 2 * x]) @ w).sum()


@pytest.mark.parametrize(
    ("scalar", "derived"),
    [(plain, False), (scaled, True), (with_intercept, True), (polynomial, True)],
)
def test_one_product_with_features_of_the_record(scalar: Any, derived: bool) -> None:
    split = split_scalar(scalar, W, X)
    (contraction,) = split.contractions
    assert contraction.derived == derived and contraction.outer
    residual = jax.grad(split.scalar)([jnp.zeros(())], [], [W], [X])[0]
    factor = contraction.record([X])
    np.testing.assert_allclose(residual * factor, jax.grad(scalar)(W, X), rtol=1e-6)
    np.testing.assert_allclose(split.scalar([jnp.zeros(())], [], [W], [X]), scalar(W, X))
    product = contraction.product(W, factor)
    np.testing.assert_allclose(product, factor @ W, rtol=1e-6)


@pytest.mark.parametrize("scalar", [twice, transformed, two_rows])
def test_other_uses_are_left_alone(scalar: Any) -> None:
    assert split_scalar(scalar, W, X).contractions == ()


@pytest.mark.full
def test_lengths_found_once_give_the_same_sum() -> None:
    pieces = single("logistic")
    estimator = aligned()(pieces.problem)
    public = estimator.prepare(jax.random.key(5), pieces.params)
    mask = jnp.arange(len(pieces.arrays[0])) != 3
    lengths = record_lengths(estimator, public, pieces.arrays)
    (length,) = lengths
    np.testing.assert_allclose(length, np.linalg.norm(pieces.arrays[0], axis=1), rtol=1e-6)
    arguments = estimator, gaussian(0.5, 0.0), public, pieces.arrays, mask
    found, expected = bounded_sum(*arguments, lengths), bounded_sum(*arguments)
    for name in expected:
        np.testing.assert_allclose(found[name], expected[name], atol=2e-6)
    # They are what the norms come from: with longer ones, every record counts less.
    longer = bounded_sum(*arguments, (1e3 * length,))
    assert all(np.abs(longer[n]).max() < 0.1 * np.abs(expected[n]).max() for n in expected)
