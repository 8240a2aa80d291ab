"""Where a likelihood is cut: narrow, and the same value and gradient as the whole."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.scipy.special import logsumexp

from numpyro_dp.sums.affine import find_waist

D = 5


def record(seed=0):
    rng = np.random.default_rng(seed)
    return {
        "x": jnp.asarray(rng.normal(size=D), jnp.float32),
        "v": jnp.asarray(rng.normal(size=2), jnp.float32),
        "y": jnp.asarray(rng.normal(), jnp.float32),
        "k": jnp.asarray(rng.integers(0, 3)),
    }


def logistic(z, row):
    eta = row["x"] @ z
    return row["y"] * eta - jnp.logaddexp(0.0, eta)


def linear(z, row):
    return -((row["y"] - row["x"][:4] @ z[:4]) ** 2) / 2 * jnp.exp(-2 * z[4]) - z[4]


def poisson_with_intercept(z, row):
    eta = z[0] + row["x"][1:] @ z[1:]
    return row["y"] * eta - jnp.exp(eta)


def categorical(z, row):
    logits = row["v"] @ z.reshape(2, 3)
    return logits[row["k"]] - logsumexp(logits)


def group_effects(z, row):
    eta = z[0] + z[1:][row["k"]] + 0.0 * row["y"]
    return -((row["y"] - eta) ** 2)


def offset(z, row):
    """Affine and not linear: the record shifts the predictor."""
    eta = 2 * (row["x"] @ z) + row["y"]
    return jnp.tanh(eta) * row["y"]


def differences(z, row):
    """Moves, sums and concatenations alone lie before the waist."""
    steps = jnp.cumsum(z[::-1])[1] + jnp.concatenate([z[:1], -z[1:2]]).sum()
    return jnp.sin(steps * row["y"]) + jnp.cos(steps)


def chosen_by_record(z, row):
    eta = jnp.where(row["y"] > 0, row["x"] @ z, -(row["x"] @ z))
    return jnp.tanh(eta)


def weights_on_a_log_scale(z, row):
    return -((row["y"] - row["x"] @ jnp.exp(z)) ** 2)


def without_covariates(z, row):
    return -((row["y"] - z[0]) ** 2) * jnp.exp(z[1]) + jnp.sin(z[2]) - z[3] ** 2 + z[4]


def chosen_by_latent(z, row):
    return jnp.where(z[0] > 0, row["x"] @ z, jnp.sin(row["x"] @ z))


def product_of_two(z, row):
    return (row["x"] @ z) * (row["x"][::-1] @ z)


def rounded(z, row):
    """A latent that becomes an integer bends: nothing may pass it as affine."""
    count = (10 * z[0]).astype(jnp.int32)
    return jnp.sin(row["x"] @ z) + count * row["y"] + row["x"][jnp.clip(count, 0, 4)]


def picked_by_latent(z, row):
    return jnp.tanh(z[jnp.clip(jnp.round(z[0]).astype(int), 0, 4)] * row["y"])


def divided(z, row):
    return jnp.tanh((row["x"] @ z) / row["y"]) + row["y"] / (1 + (row["v"] @ z[:2]) ** 2)


def absolute(z, row):
    return -jnp.abs(row["y"] - row["x"] @ z)


def affine_alone(z, row):
    return row["x"] @ z + row["y"]


def loop(z, row):
    def body(total, item):
        return total + item * row["y"], item

    total, items = jax.lax.scan(body, 0.0, z)
    return jnp.sin(total) + items[0] ** 2


# name: how many numbers pass; None if it is all of z.
WIDTHS = {
    logistic: 1, linear: 3, poisson_with_intercept: 1, categorical: 3, group_effects: 1, offset: 1,
    differences: 1, chosen_by_record: 1, weights_on_a_log_scale: None, without_covariates: None,
    chosen_by_latent: None, product_of_two: 2, rounded: None, picked_by_latent: None, divided: 2,
    absolute: 1, affine_alone: 1, loop: None,
}  # fmt: skip


@pytest.mark.every_case
@pytest.mark.parametrize("scalar", WIDTHS, ids=lambda fn: fn.__name__)
def test_value_and_gradient_through_the_waist_are_those_of_the_scalar(scalar):
    size = 6 if scalar is categorical else D
    waist = find_waist(scalar, jnp.zeros(size), record())
    if WIDTHS[scalar] is not None:
        assert waist.size == WIDTHS[scalar]
    assert waist.size <= size

    def both(z, row):
        jacobian = jax.jacrev(waist.values)(jnp.zeros_like(z), row)
        eta = waist.values(z, row)
        assert eta.shape == (waist.size,)
        return waist.rest(eta, row), jax.grad(waist.rest)(eta, row) @ jacobian

    def whole(z, row):
        return scalar(z, row), jax.grad(scalar)(z, row)

    both, whole = jax.jit(both), jax.jit(whole)
    for seed in range(8):  # other records than the one that the cut was found on
        z = jnp.asarray(np.random.default_rng(100 + seed).normal(size=size), jnp.float32)
        row = record(seed)
        for one, other in zip(both(z, row), whole(z, row), strict=True):
            np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5)


@pytest.mark.every_case
@pytest.mark.parametrize(
    "scalar", [without_covariates, weights_on_a_log_scale], ids=lambda f: f.__name__
)
def test_where_nothing_is_narrow_all_latents_pass(scalar):
    waist = find_waist(scalar, jnp.zeros(D), record())
    z = jnp.arange(5.0)
    assert waist.size == D
    np.testing.assert_array_equal(waist.values(z, record()), z)
    assert waist.rest(z, record()) == scalar(z, record())


def test_the_waist_of_shapes_alone():
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), record())
    waist = find_waist(logistic, jax.ShapeDtypeStruct((D,), jnp.float32), shapes)
    assert waist.size == 1
    z = jnp.arange(5.0)
    np.testing.assert_allclose(waist.values(z, record())[0], record()["x"] @ z, rtol=1e-6)
