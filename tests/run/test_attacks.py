"""Audits find what is claimed, and bugs."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import optax
import pytest
from flat import dpmcmc, dpsep, dpsvi
from models import given, logistic, slopes
from numpyro.infer.autoguide import AutoDelta, AutoDiagonalNormal
from scipy import stats

from numpyro_dp import DPPBP, SGLD, DPLaplace, PrivacyBudget, RegressionNetwork, audit, audit_run
from numpyro_dp.audit import _distinguished, _guessed, _shared
from numpyro_dp.estimators import aligned
from numpyro_dp.privacy.mechanism import gaussian
from numpyro_dp.run import step
from numpyro_dp.samplers import FullBatch, Poisson

BUDGET, KEY, DRAWS = PrivacyBudget(1.5, 0.02), jax.random.key(0), 20_000
rng = np.random.default_rng(1)
X = np.zeros((8, 3), np.float32)
X[:7, :2], X[7, 2] = rng.normal(size=(7, 2)), 50
Y = np.array([0, 1, 1, 0, 1, 0, 1, 0])

model = logistic("rows")


OWN = {"clip_norm": 0.7, "budget": BUDGET}


def svi(**more):
    return dpsvi(model, AutoDiagonalNormal, optax.sgd(1e-3), **{"estimator": None} | OWN | more)


DRIVERS = {
    "DPSVI": lambda: (svi(), Y),
    "Poisson": lambda: (svi(sampler=Poisson(0.4), estimator=aligned()), Y),
    "DPSEP": lambda: (dpsep(model, **OWN), Y),
    "DPMCMC": lambda: (dpmcmc(SGLD(model), num_warmup=0, num_samples=1, **OWN), Y),
    # A record that is not finite counts as one without information, and not as none.
    "DPPBP": lambda: (DPPBP(RegressionNetwork((3,)), sampler=FullBatch(), **OWN),
                      np.where(Y.cumsum() == 4, 500.0, Y)),
}  # fmt: skip


@pytest.mark.full
@pytest.mark.table
@pytest.mark.parametrize("name", DRIVERS)
def test_a_step_is_as_private_as_claimed_and_no_more(name):
    driver, y = DRIVERS[name]()
    found = audit(driver, KEY, X, y, draws=DRAWS)
    assert found.holds
    assert 0.7 * found.claim < found.lower <= found.claim <= 1.5
    assert "epsilon >=" in str(found)


@pytest.mark.full
def test_too_little_noise_is_found(monkeypatch):
    usual = gaussian.spacing_of
    monkeypatch.setattr(
        gaussian, "spacing_of", lambda norm, noise, *rest: usual(norm, 0.7 * noise, *rest)
    )
    found = audit(svi(), KEY, X, Y, draws=DRAWS)
    assert found.lower > found.claim
    assert not found.holds
    assert "THE CLAIM IS WRONG" in str(found)


wide = given(lambda x, w: dist.Normal(x @ w, 1), "rows", w=slopes())


def one_run(**changes):
    x = np.concatenate([50 * np.eye(60), 0.01 * rng.normal(size=(20, 60))]).astype(np.float32)
    y = np.concatenate([np.full(60, 50.0), np.zeros(20)]).astype(np.float32)
    settings = {"budget": PrivacyBudget(8.0, 1e-5)} | changes
    driver = dpsvi(wide, AutoDelta, optax.sgd(1e-4), sampler=Poisson(0.5), **settings)
    return audit_run(driver, KEY, 10, x, y, canaries=range(60), guesses=40)


@pytest.mark.extended
def test_one_run():
    found = one_run()
    assert 0.2 < found.lower <= found.claim
    # Almost no noise, so that nearly all guesses are right.
    assert one_run(budget=PrivacyBudget(40.0, 1e-5)).lower > 1.5


@pytest.mark.extended
def test_noise_that_two_steps_share_is_found(monkeypatch):
    """One step is as private as claimed, so `audit` sees nothing."""
    usual = step.PrivateParts.after_sum

    def reused(self, state, begun, total):
        new, released = usual(self, state, begun, total)
        return new._replace(secret_key=state.secret_key), released

    arguments = KEY, 6, X, Y
    assert audit_run(svi(), *arguments, canaries=range(8)).holds
    monkeypatch.setattr(step.PrivateParts, "after_sum", reused)
    found = audit_run(svi(), *arguments, canaries=range(8))
    assert found.lower == math.inf
    assert "steps share their noise" in str(found)


@pytest.mark.parametrize("size", [1, 30])
@pytest.mark.parametrize("scales", [1.0, 100.0])
def test_independent_noise_is_not_taken_for_shared(size, scales):
    scale = np.where(np.arange(size) < size // 2, scales, 1.0)
    drawn = [scale * np.random.default_rng(seed).normal(size=(13, size)) for seed in range(300)]
    assert not any(map(_shared, drawn))
    one, other = drawn[0][0], drawn[0][1]
    signs = np.resize([1, -1], 13)[:, None]
    assert _shared(np.tile(one, (13, 1)))
    assert _shared(signs * one)
    assert _shared(np.resize([one, other], (13, size)))
    if size > 1:
        assert _shared(np.vstack([drawn[0], drawn[0][4]]))  # two steps alone


def test_the_bounds_of_a_gaussian_that_is_known():
    mu, delta = 1.0, 0.02
    grid = np.linspace(0, 10, 100_001)
    deltas = stats.norm.cdf(mu / 2 - grid / mu)
    deltas -= np.exp(grid) * stats.norm.cdf(-mu / 2 - grid / mu)
    epsilon = float(grid[np.argmax(deltas <= delta)])
    draws = rng.normal(size=(2, 400_000))
    assert 0.85 * epsilon < _distinguished(draws[0], mu + draws[1], delta, 0.95) <= epsilon
    assert _distinguished(*draws, delta, 0.95) < 0.05


def test_the_bound_of_guesses_holds():
    """Randomised response is epsilon-private, and its guesses are binomial."""
    epsilon, number = 1.0, 100
    right = rng.binomial(number, 1 / (1 + np.exp(-epsilon)), size=400)
    bounds = [_guessed(number, number, int(n), 0.0, 0.95) for n in right]
    assert np.mean(np.array(bounds) <= epsilon) > 0.9
    assert np.mean(bounds) > 0.5 * epsilon
    assert _guessed(number, number, 80, 1e-3, 0.95) < _guessed(number, number, 80, 0.0, 0.95)


@pytest.mark.full
def test_what_cannot_be_attacked():
    with pytest.raises(TypeError, match="whose steps are alike"):
        audit(DPLaplace(model, budget=BUDGET), KEY, X, Y)
    with pytest.raises(ValueError, match="moves no sum"):
        audit(svi(), KEY, np.where(X == 50, np.nan, X), Y, draws=1000)
    with pytest.raises(ValueError, match="draws"):
        audit(svi(), KEY, X, Y, draws=10)
    assert audit(svi(), KEY, jnp.asarray(X), jnp.asarray(Y), draws=1000, canary=0).holds
