"""Audits with many draws: what an attacker learns is what was claimed."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.infer.autoguide import AutoDelta, AutoDiagonalNormal

from numpyro_dp import (
    DPMCMC,
    DPSVI,
    SGHMC,
    SGLD,
    PreconditionedSGLD,
    Privacy,
    PrivacyBudget,
    audit,
    secret_key,
)
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


class Setting(NamedTuple):
    """A mechanism to attack; ``least`` of its claim must be found."""

    estimator: object
    sampler: object
    guide: object = AutoDiagonalNormal
    model: object = model
    least: float = 0.8


SETTINGS = {
    "aligned, full batch": Setting(aligned, FullBatch()),
    "vanilla, full batch": Setting(vanilla, FullBatch()),
    "aligned, Poisson": Setting(aligned, Poisson(0.4)),
    "DP-SGD": Setting(aligned, Poisson(0.4), AutoDelta),
    # One canary in ten is not seen.
    "dropout": Setting(aligned, FullBatch(), AutoDelta, functools.partial(model, keep=0.9), 0.6),
}
USUAL = "aligned, Poisson"
EXTENDED = ("aligned, full batch", "vanilla, full batch", "DP-SGD", "dropout")


def records(canary=True):
    """Ordinary records along two axes, and the canary along the third; NaN where there is none."""
    rng = np.random.default_rng(1)
    x = np.concatenate([rng.normal(size=(7, 2)), np.zeros((7, 1))], axis=1)
    last = [0.0, 0.0, 50.0] if canary else [np.nan] * 3
    return jnp.asarray(np.concatenate([x, [last]])), jnp.asarray([0, 1, 1, 0, 1, 0, 1, 0])


def attacked(name, draws):
    setting = SETTINGS[name]
    svi = DPSVI(
        setting.model, setting.guide(setting.model), optax.sgd(1e-3),
        estimator=setting.estimator(), clip_norm=0.7, sampler=setting.sampler, budget=BUDGET
    )  # fmt: skip
    return audit(svi, jax.random.key(0), *records(), draws=draws)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.extended) if n in EXTENDED else n for n in SETTINGS]
)
def test_one_step_is_as_private_as_claimed_and_no_more(name):
    found = attacked(name, DRAWS)
    assert 1.48 < found.claim <= BUDGET.epsilon
    assert SETTINGS[name].least * found.claim < found.lower <= found.claim


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [n if n == USUAL else pytest.param(n, marks=pytest.mark.extended) for n in SETTINGS]
)
def test_the_audit_finds_too_little_noise(name, monkeypatch):
    usual = gaussian.spacing_of
    monkeypatch.setattr(
        gaussian, "spacing_of", lambda norm, noise, *rest: usual(norm, 0.7 * noise, *rest)
    )
    found = attacked(name, FEW)
    assert found.lower > found.claim


@functools.cache
def first_samples(kernel):
    """The first position of a chain along the canary's direction, without and with it."""
    mcmc = DPMCMC(kernel(model), num_warmup=0, num_samples=1, clip_norm=0.7, sampler=FullBatch(),
                  budget=BUDGET,
                  privacy=Privacy(secret_key=2, repetition=True), progress_bar=False)  # fmt: skip
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
    sign = np.sign(worlds[1].mean() - worlds[0].mean())
    return sign * worlds[0], sign * worlds[1], mcmc.privacy.epsilon


@pytest.mark.slow
@pytest.mark.parametrize("kernel", [
    SGLD,
    pytest.param(PreconditionedSGLD, marks=pytest.mark.extended),
    pytest.param(SGHMC, marks=pytest.mark.extended),
])  # fmt: skip
def test_a_sample_of_a_chain_is_as_private_as_claimed_and_no_more(kernel):
    without, with_canary, claim = first_samples(kernel)
    assert 1.48 < claim <= BUDGET.epsilon
    bound = _distinguished(without, with_canary, BUDGET.delta, 0.95)
    assert 0.8 * claim < bound <= claim
