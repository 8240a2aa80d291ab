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


def predictor(z, row):
    return row["x"] @ z


def of_predictor(density):
    return lambda z, row: density(predictor(z, row), row["y"])


def poisson_with_intercept(z, row):
    eta = z[0] + row["x"][1:] @ z[1:]
    return row["y"] * eta - jnp.exp(eta)


def categorical(z, row):
    logits = row["v"] @ z.reshape(2, 3)
    return logits[row["k"]] - logsumexp(logits)


def differences(z, row):
    """Moves, sums and concatenations alone lie before the waist."""
    steps = jnp.cumsum(z[::-1])[1] + jnp.concatenate([z[:1], -z[1:2]]).sum()
    return jnp.sin(steps * row["y"]) + jnp.cos(steps)


def rounded(z, row):
    """A latent that becomes an integer bends: nothing may pass it as affine."""
    count = (10 * z[0]).astype(jnp.int32)
    return jnp.sin(row["x"] @ z) + count * row["y"] + row["x"][jnp.clip(count, 0, 4)]


def loop(z, row):
    def body(total, item):
        return total + item * row["y"], item

    total, items = jax.lax.scan(body, 0.0, z)
    return jnp.sin(total) + items[0] ** 2


# name: the scalar, and how many numbers pass; None if it may be all of z, ALL if it is.
ALL = D
SCALARS = {
    "logistic": (of_predictor(lambda eta, y: y * eta - jnp.logaddexp(0.0, eta)), 1),
    "linear": (lambda z, row: -((row["y"] - row["x"][:4] @ z[:4]) ** 2) / 2 * jnp.exp(-2 * z[4])
        - z[4], 2),
    "Poisson with intercept": (poisson_with_intercept, 1),
    "categorical": (categorical, 3),
    "group effects": (lambda z, row: -((row["y"] - z[0] - z[1:][row["k"]] - 0.0 * row["y"]) ** 2),
        1),
    # Affine and not linear: the record shifts the predictor.
    "offset": (of_predictor(lambda eta, y: jnp.tanh(2 * eta + y) * y), 1),
    "differences": (differences, 1),
    "chosen by record": (lambda z, row: jnp.tanh(
        jnp.where(row["y"] > 0, predictor(z, row), -predictor(z, row))), 1),
    "weights on a log scale": (lambda z, row: -((row["y"] - row["x"] @ jnp.exp(z)) ** 2), ALL),
    "without covariates": (lambda z, row: -((row["y"] - z[0]) ** 2) * jnp.exp(z[1]) + jnp.sin(z[2])
        - z[3] ** 2 + z[4], ALL),
    "chosen by latent": (lambda z, row: jnp.where(
        z[0] > 0, predictor(z, row), jnp.sin(predictor(z, row))), None),
    "product of two": (lambda z, row: predictor(z, row) * (row["x"][::-1] @ z), 2),
    "rounded": (rounded, None),
    "picked by latent": (lambda z, row: jnp.tanh(
        z[jnp.clip(jnp.round(z[0]).astype(int), 0, 4)] * row["y"]), None),
    "divided": (lambda z, row: jnp.tanh(predictor(z, row) / row["y"])
        + row["y"] / (1 + (row["v"] @ z[:2]) ** 2), 2),
    "absolute": (of_predictor(lambda eta, y: -jnp.abs(y - eta)), 1),
    "affine alone": (of_predictor(lambda eta, y: eta + y), 1),
    "loop": (loop, None),
}  # fmt: skip


@pytest.mark.every_case
@pytest.mark.parametrize(("scalar", "width"), SCALARS.values(), ids=SCALARS)
def test_value_and_gradient_through_the_waist_are_those_of_the_scalar(scalar, width):
    size = 6 if scalar is categorical else D
    shapes = jax.eval_shape(lambda: (jnp.zeros(size), record()))
    waist = find_waist(scalar, *shapes)
    assert waist.size == width if width else waist.size <= size
    if width == ALL:  # where nothing is narrow, all latents pass as they are
        z = jnp.arange(5.0)
        np.testing.assert_array_equal(waist.values(z, record()), z)
        assert waist.rest(z, record()) == scalar(z, record())

    def both(z, row):
        jacobian = jax.jacrev(waist.values)(jnp.zeros_like(z), row)
        eta = waist.values(z, row)
        assert eta.shape == (waist.size,)
        return waist.rest(eta, row), jax.grad(waist.rest)(eta, row) @ jacobian

    both, whole = jax.jit(both), jax.jit(jax.value_and_grad(scalar))
    for seed in range(8):  # other records than the one that the cut was found on
        z = jnp.asarray(np.random.default_rng(100 + seed).normal(size=size), jnp.float32)
        row = record(seed)
        for one, other in zip(both(z, row), whole(z, row), strict=True):
            np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5)
