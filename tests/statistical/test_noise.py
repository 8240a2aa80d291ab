"""The noise on the released sum has the stated distribution, and is never used twice."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from flat import dpsvi
from gaussian import gaussian
from jax import lax
from jax.flatten_util import ravel_pytree
from numpyro.infer.autoguide import AutoDiagonalNormal
from scipy import stats

from numpyro_dp import secret_key
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
    return dpsvi(model, AutoDiagonalNormal, optax.adam(1e-3), estimator=estimator(),
                 noise_multiplier=1.3, clip_norm=0.6, sampler=Poisson(0.4), **options)  # fmt: skip


def fixed(key, estimator=aligned):
    return driver(estimator, secret_key=key, repetition=True)


def noise_of_steps(svi, args, number):
    """What consecutive steps release, less the same steps' noiseless sums; and the clip norms."""
    state = svi.init(jax.random.key(0), *args).opened
    session = svi._session(args, {})
    rows = session.rows(args, {})

    def step(state, _):
        new, noisy = session._step(state, rows)
        _, sure = session._step(state._replace(noise_multiplier=jnp.zeros(())), rows)
        difference = jax.tree.map(jnp.subtract, noisy.released.total, sure.released.total)
        norm = state.mechanism_state.clip_norm
        return new, (ravel_pytree(difference)[0] * session.inclusion_prob, norm)

    return jax.jit(lambda s: lax.scan(step, s, None, length=number))(state)[1]


@pytest.mark.full
@pytest.mark.parametrize(("estimator", "entries"), [
    (aligned, 3),
    (vanilla, 6),
    pytest.param(preconditioned, 6, marks=pytest.mark.extended),
    pytest.param(natural, 6, marks=pytest.mark.extended),
    (aligned_natural, 3),
])  # fmt: skip
def test_noise_of_whole_steps(estimator, entries):
    draws, _ = noise_of_steps(fixed(7, estimator), records(), 4_000)
    assert draws.shape == (4_000, entries)
    check_law(draws, 1.3 * 0.6)
    check_independent(draws)
    assert len(np.unique(draws[:, 0])) > 3_900
    if estimator is aligned:  # the secret key decides it
        np.testing.assert_array_equal(draws, noise_of_steps(fixed(7), records(), 4_000)[0])
        other, _ = noise_of_steps(fixed(8), records(), 4_000)
        assert largest_correlation(np.concatenate([draws, other], axis=1), 0) < SIGMA
        assert not np.any(draws == other)


@pytest.mark.full
def test_the_secret_key_decides_noise_and_batches_and_the_public_key_does_not():
    """The public key may be known to everybody. Without a secret key each run has another one."""
    svi, rng_key = driver(), jax.random.key(0)
    found = [each.init(rng_key, *records()) for each in (svi, svi, fixed(5), fixed(6), fixed(5))]
    assert len({str(jax.random.key_data(state.rng_key)) for state in found}) == 1
    keys = [tuple(np.asarray(jax.random.key_data(key)))
            for state in found for key in (state.secret_key, state.sampler_state.key)]  # fmt: skip
    assert keys[8:] == keys[4:6]
    assert len(set(keys)) == 8  # noise and batches have keys of their own, too
    one, again, other = (
        fixed(key).run(rng_key, 3, *records(), progress_bar=False).params["auto_loc"]
        for key in (5, 5, 6)
    )
    assert np.array_equal(one, again)
    assert not np.any(one == other)
