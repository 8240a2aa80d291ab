"""Censored records: the score itself without bounds, and of mean 0 with them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hostile_models import (
    KEY,
    MODELS,
    ordinary_records,
    problem_of,
    request_of,
    signals,
    with_numbers,
)
from test_signal import curvature_of, score_of

CENSORED = [name for name in MODELS if "censored" in name]


def copies(name, number, seed):
    """Copies of one record with outcomes of the model, censored at random; their own scores."""
    model, kinds, _ = MODELS[name]
    rng = np.random.default_rng(seed)
    problem = problem_of(model, ordinary_records(kinds, 20, seed))
    outcomes = problem.outcomes
    z = jnp.asarray(0.3 * rng.normal(size=outcomes.size), jnp.float32)
    x = rng.normal(size=3).astype(np.float32)
    one = tuple(map(jnp.asarray, (x, np.float32(1), np.int32(0))))
    keys = jax.random.split(jax.random.key(seed), number)
    drawn = np.asarray(jax.jit(jax.vmap(lambda k: outcomes.simulate(z, one, k)["y"]))(keys))
    limit = rng.choice(drawn.ravel(), number) + 0.3 * abs(rng.normal(size=number))
    beyond = drawn.ravel() < limit if "left" in name else drawn.ravel() > limit
    y = np.where(beyond, limit, drawn.ravel()).astype(np.float32)
    arrays = np.repeat(x[None], number, 0), y, beyond.astype(np.int32)

    def log_likelihood(z, row):
        return outcomes.model.log_likelihood(outcomes.latents(z), {}, row, outcomes.shared, None)

    own = jax.jit(jax.vmap(jax.grad(log_likelihood), (None, 0)))(z, tuple(map(jnp.asarray, arrays)))
    return problem, np.asarray(z), arrays, np.asarray(own, np.float64)


@pytest.mark.parametrize("name", CENSORED)
def test_without_bounds_it_is_the_score(name):
    problem, z, arrays, own = copies(name, 200, 3)
    request = request_of(len(z), mean=z, clips=(1e4, 1e6, 1.0))
    found = signals(problem, 2)(request, KEY, with_numbers(problem, arrays, 1))
    near = np.abs(own).max(axis=1) < 10  # beyond, an event is later than records are looked at
    assert near.mean() > 0.95
    np.testing.assert_allclose(score_of(found, request)[near], own[near], atol=0.02)


@pytest.mark.full
@pytest.mark.parametrize("name", CENSORED)
@pytest.mark.parametrize("clips", [(1.0, 1.0, 0.5), (0.5, 0.2, 0.2)], ids=["some", "most"])
def test_with_bounds_it_is_0_on_average_and_the_curvature_is_its_slope(name, clips):
    number = 30_000
    problem, z, arrays, own = copies(name, number, 6)
    request = request_of(len(z), mean=z, clips=clips)
    found = signals(problem, 2)(request, KEY, with_numbers(problem, arrays, 1))
    scores, curvatures = score_of(found, request), curvature_of(found, request)
    spread = scores.std(0)
    assert np.all(np.abs(scores.mean(0)) <= 4 * spread / np.sqrt(number) + 0.02 * spread)
    products = scores[:, :, None] * own[:, None, :]
    products = (products + products.swapaxes(1, 2)) / 2
    excess, power = (np.asarray(found[name], np.float64) for name in ("excess", "power"))
    assert abs(excess.mean()) <= 4 * excess.std() / np.sqrt(number) + 0.02 * power.mean()
    error = 4.5 * (products - curvatures).std(0) / np.sqrt(number)
    size = np.abs(curvatures.mean(0)).max()
    assert np.all(np.abs((products - curvatures).mean(0)) <= error + 0.05 * size)
