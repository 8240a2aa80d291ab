"""Audits with many draws: what an attacker learns is what was claimed."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from flat import dpmcmc, dpsvi
from numpyro.infer.autoguide import AutoDelta, AutoDiagonalNormal

from numpyro_dp import SGHMC, SGLD, PreconditionedSGLD, PrivacyBudget, audit, secret_key
from numpyro_dp.audit import _distinguished
from numpyro_dp.estimators import aligned, vanilla
from numpyro_dp.privacy.mechanism import gaussian
from numpyro_dp.samplers import FullBatch, Poisson

DRAWS = 400_000
FEW = 100_000  # are enough to find noise that is too small by far
BUDGET = PrivacyBudget(1.5, 0.02)


def model(x, y, keep=1.0):
    coef = numpyro.sample("coef", dist.Normal(0, 1).expand([3]).to_event(1))
    if keep < 1:
        x = x * jax.random.bernoulli(numpyro.prng_key(), keep, x.shape) / keep
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=x @ coef), obs=y)


# A mechanism to attack: estimator, sampler, guide, model, and how much of its claim must be found.
SETTINGS = {
    "aligned, full batch": (aligned, FullBatch(), AutoDiagonalNormal, model, 0.8),
    "vanilla, full batch": (vanilla, FullBatch(), AutoDiagonalNormal, model, 0.8),
    "aligned, Poisson": (aligned, Poisson(0.4), AutoDiagonalNormal, model, 0.8),
    "DP-SGD": (aligned, Poisson(0.4), AutoDelta, model, 0.8),
    # One canary in ten is not seen.
    "dropout": (aligned, FullBatch(), AutoDelta, functools.partial(model, keep=0.9), 0.6),
}
USUAL = "aligned, Poisson"
NAMES = [n if n == USUAL else pytest.param(n, marks=pytest.mark.extended) for n in SETTINGS]


def records(canary=True):
    """Ordinary records along two axes, and the canary along the third; NaN where there is none."""
    rng = np.random.default_rng(1)
    x = np.concatenate([rng.normal(size=(7, 2)), np.zeros((7, 1))], axis=1)
    last = [0.0, 0.0, 50.0] if canary else [np.nan] * 3
    return jnp.asarray(np.concatenate([x, [last]])), jnp.asarray([0, 1, 1, 0, 1, 0, 1, 0])


def attacked(name, draws):
    estimator, sampler, guide, attacked_model, _ = SETTINGS[name]
    svi = dpsvi(attacked_model, guide(attacked_model), optax.sgd(1e-3), estimator=estimator(),
                clip_norm=0.7, sampler=sampler, budget=BUDGET)  # fmt: skip
    return audit(svi, jax.random.key(0), *records(), draws=draws)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_one_step_is_as_private_as_claimed_and_no_more(name):
    found = attacked(name, DRAWS)
    assert 1.48 < found.claim <= BUDGET.epsilon
    assert SETTINGS[name][-1] * found.claim < found.lower <= found.claim


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_audit_finds_too_little_noise(name, monkeypatch):
    usual = gaussian.spacing_of
    monkeypatch.setattr(
        gaussian, "spacing_of", lambda norm, noise, *rest: usual(norm, 0.7 * noise, *rest)
    )
    found = attacked(name, FEW)
    assert found.lower > found.claim


@pytest.mark.slow
@pytest.mark.parametrize("kernel", [
    SGLD,
    pytest.param(PreconditionedSGLD, marks=pytest.mark.extended),
    pytest.param(SGHMC, marks=pytest.mark.extended),
])  # fmt: skip
def test_a_sample_of_a_chain_is_as_private_as_claimed_and_no_more(kernel):
    """The first position of a chain along the canary's direction, without and with it."""
    mcmc = dpmcmc(kernel(model), num_warmup=0, num_samples=1, clip_norm=0.7, budget=BUDGET,
                  secret_key=2, repetition=True)  # fmt: skip
    mcmc.run(jax.random.key(0), *records(True))
    driver = mcmc._driver
    start = driver._init(jax.random.key(0), 1, records(True), {}, None).opened
    session = driver._session(records(True), {})

    def position(key, rows):
        state = start._replace(secret_key=key[0], rng_key=jax.random.fold_in(start.rng_key, key[1]))
        found = session._step(state, rows)[0].optim_state
        return driver.method.optim.get_params(found)["coef_auto_loc"][2]

    keys = jax.random.split(secret_key(9), (2, DRAWS))
    worlds = []
    for canary, world in zip((False, True), keys, strict=True):
        rows = session.rows(records(canary), {})
        draws = jax.jit(jax.vmap(lambda *key, rows=rows: position(key, rows)))
        worlds.append(np.asarray(draws(world, jnp.arange(DRAWS))))
    # The canary's score may point either way.
    sign, claim = np.sign(worlds[1].mean() - worlds[0].mean()), mcmc.privacy.epsilon
    bound = _distinguished(sign * worlds[0], sign * worlds[1], BUDGET.delta, 0.95)
    assert 1.48 < claim <= BUDGET.epsilon
    assert 0.8 * claim < bound <= claim
