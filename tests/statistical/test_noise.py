"""The noise on the released sum has the stated distribution, and is never used twice."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from flat import grouped
from gaussian import gaussian
from jax import lax
from jax.flatten_util import ravel_pytree
from numpyro.infer.autoguide import AutoDiagonalNormal
from scipy import stats

from numpyro_dp import DPSVI, secret_key
from numpyro_dp.core import MechanismState
from numpyro_dp.estimators import aligned, aligned_natural, natural, preconditioned, vanilla
from numpyro_dp.samplers import Poisson

STATE = MechanismState(())
CLIPS = {"one norm": 0.8, "norms by entry": {"auto_loc": 0.5, ...: 0.3, "extra": 0.2}}
SIGMA = 5.0  # of the statistic's own standard error


def check_law(draws, scale):
    """Accepts N(0, scale^2) and rejects 0.9 and 1.1 times the scale; ``draws`` (steps, dim)."""
    flat = np.asarray(draws, np.float64).ravel()
    assert stats.kstest(flat, stats.norm(0, scale).cdf).pvalue > 1e-3
    for wrong in (0.9, 1.1):
        assert stats.kstest(flat, stats.norm(0, wrong * scale).cdf).pvalue < 1e-6
    for column in np.asarray(draws, np.float64).T:  # every coordinate has it, not the mixture
        variance = np.mean(column**2) / scale**2
        assert abs(variance - 1) < SIGMA * np.sqrt(2 / len(column))
        assert abs(np.mean(column)) < SIGMA * scale / np.sqrt(len(column))


def largest_correlation(draws, lag):
    """Largest |z| of correlations between coordinates, ``lag`` steps apart, of the squares too."""
    found = 0.0
    for values in (np.asarray(draws, np.float64), np.asarray(draws, np.float64) ** 2):
        standard = (values - values.mean(0)) / values.std(0)
        early, late = standard[: len(standard) - lag], standard[lag:]
        correlations = early.T @ late / len(early)
        if lag == 0:
            correlations = correlations[np.triu_indices(len(correlations), 1)]
        found = max(found, np.abs(correlations).max() * np.sqrt(len(early)))
    return found


def check_independent(draws):
    """No correlation between coordinates (those of different leaves included) or steps."""
    for lag in (0, 1, 2):
        assert largest_correlation(draws, lag) < SIGMA
    repeated = np.array(draws)
    repeated[1:, 0] = draws[:-1, 1]  # the test sees noise used again in the next step
    assert largest_correlation(repeated, 1) > 3 * SIGMA


@pytest.mark.full
@pytest.mark.parametrize("clip", CLIPS.values(), ids=CLIPS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_noise_of_the_mechanism(clip, dtype):
    mechanism = gaussian(clip, 1.7)
    total = {
        "auto_loc": jnp.array([1.0, -2.0, 3.0], dtype),
        "auto_scale": jnp.array(5.0, dtype),
        "extra": jnp.zeros((1, 2), dtype),
    }
    keys = jax.random.split(secret_key(1), 8_000)
    released = jax.jit(jax.vmap(lambda key: mechanism.privatise(key, total, STATE)[0]))(keys)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(released))
    noise = jax.tree.map(lambda leaf, sure: leaf - sure.astype(jnp.float32), released, total)
    draws = np.asarray(jax.vmap(lambda tree: ravel_pytree(tree)[0])(noise))
    assert draws.shape == (8_000, 6)
    expected = 0.8 if clip == 0.8 else np.sqrt(0.5**2 + 0.3**2 + 0.2**2)
    assert mechanism.sensitivity == pytest.approx(expected)
    check_law(draws, 1.7 * expected)
    check_independent(draws)


def model(x, y):
    coef = numpyro.sample("coef", dist.Normal(0, 1).expand([2]).to_event(1))
    bias = numpyro.sample("bias", dist.Normal(0, 1))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Normal(x @ coef + bias, 1), obs=y)


def records():
    rng = np.random.default_rng(0)
    return jnp.asarray(rng.normal(size=(20, 2))), jnp.asarray(rng.normal(size=20))


def driver(estimator=aligned, **options):
    settings = {"noise_multiplier": 1.3, "clip_norm": 0.6, "sampler": Poisson(0.4)} | options
    return DPSVI(
        model,
        AutoDiagonalNormal(model),
        optax.adam(1e-3),
        **grouped(estimator=estimator(), **settings),
    )


@functools.cache
def noise_of_a_run(estimator, key):
    """What consecutive steps of a run release, less the same steps' noiseless sums."""
    svi = driver(estimator, secret_key=key, repetition=True)
    state = svi.init(jax.random.key(0), *records()).opened
    session = svi._session(records(), {})
    rows = session.rows(records(), {})

    def step(state, _):
        new, noisy = session._step(state, rows)
        _, sure = session._step(state._replace(noise_multiplier=jnp.zeros(())), rows)
        difference = jax.tree.map(jnp.subtract, noisy.released.total, sure.released.total)
        return new, ravel_pytree(difference)[0] * session.inclusion_prob

    return np.asarray(jax.jit(lambda s: lax.scan(step, s, None, length=4_000))(state)[1])


@pytest.mark.full
@pytest.mark.parametrize(("estimator", "entries"), [
    (aligned, 3),
    (vanilla, 6),
    pytest.param(preconditioned, 6, marks=pytest.mark.extended),
    pytest.param(natural, 6, marks=pytest.mark.extended),
    (aligned_natural, 3),
])  # fmt: skip
def test_noise_of_whole_steps(estimator, entries):
    draws = noise_of_a_run(estimator, 7)
    assert draws.shape == (4_000, entries)
    check_law(draws, 1.3 * 0.6)
    check_independent(draws)
    assert len(np.unique(draws[:, 0])) > 3_900


@pytest.mark.full
def test_keys_decide_the_noise():
    again = noise_of_a_run.__wrapped__(aligned, 7)
    other = noise_of_a_run(aligned, 8)
    assert np.array_equal(again, noise_of_a_run(aligned, 7))
    both = np.concatenate([again, other], axis=1)
    assert largest_correlation(both, 0) < SIGMA
    assert not np.any(again == other)


@pytest.mark.full
def test_runs_without_a_secret_key_differ_and_with_one_do_not():
    svi, fixed = driver(), driver(secret_key=5, repetition=True)
    keys = [
        np.asarray(jax.random.key_data(key))
        for svi in (svi, svi, fixed, fixed)
        for state in [svi.init(jax.random.key(0), *records())]
        for key in [state.secret_key, state.sampler_state.key]
    ]
    assert np.array_equal(keys[4], keys[6]) and np.array_equal(keys[5], keys[7])
    distinct = [tuple(key) for key in keys[:6]]
    assert len(set(distinct)) == 6  # noise and batches have keys of their own, too
    results = [
        driver(secret_key=key, repetition=True)
        .run(jax.random.key(0), 3, *records(), progress_bar=False)
        .params
        for key in (5, 5, 6)
    ]
    assert np.array_equal(results[0]["auto_loc"], results[1]["auto_loc"])
    assert not np.any(results[0]["auto_loc"] == results[2]["auto_loc"])


@pytest.mark.full
def test_the_guide_key_does_not_decide_the_noise():
    """The public key may be known to everybody: noise and batches must not follow from it."""
    states = [
        driver(secret_key=key, repetition=True).init(jax.random.key(0), *records())
        for key in (1, 2)
    ]
    assert jnp.all(jax.random.key_data(states[0].rng_key) == jax.random.key_data(states[1].rng_key))
    for field in (lambda s: s.secret_key, lambda s: s.sampler_state.key):
        first, second = (np.asarray(jax.random.key_data(field(state))) for state in states)
        assert not np.array_equal(first, second)
