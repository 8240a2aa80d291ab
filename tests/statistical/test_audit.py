"""A white-box audit of one private step: what an attacker learns is what was claimed.

A canary record whose clipped signal has norm C in a direction of its own is in the data, or not.
The attacker knows everything but that, and sees the released sum: the likelihood ratio is monotone
in its component along the direction. Clopper-Pearson bounds on the errors of the best threshold
(chosen on other draws) give a lower bound on epsilon.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax.flatten_util import ravel_pytree
from numpyro.infer.autoguide import AutoDelta, AutoDiagonalNormal
from scipy import stats

from numpyro_dp import DPMCMC, DPSVI, SGHMC, SGLD, PreconditionedSGLD, PrivacyBudget, secret_key
from numpyro_dp.estimators import aligned, vanilla
from numpyro_dp.samplers import FullBatch, Poisson

DRAWS = 400_000  # per world; half of them choose the threshold
BUDGET = PrivacyBudget(1.5, 0.02)
CONFIDENCE = 0.975  # of each error: 95 % of both


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
EXTENDED = ("vanilla, full batch", "DP-SGD", "dropout")


def records(canary):
    """Ordinary records along two axes, and the canary along the third; NaN where there is none."""
    rng = np.random.default_rng(1)
    x = np.concatenate([rng.normal(size=(7, 2)), np.zeros((7, 1))], axis=1)
    last = [0.0, 0.0, 50.0] if canary else [np.nan] * 3
    return jnp.asarray(np.concatenate([x, [last]])), jnp.asarray([0, 1, 1, 0, 1, 0, 1, 0])


@functools.cache
def scores(name, noise_factor):
    """Released component along the canary's direction, without and with it; and the claim."""
    setting = SETTINGS[name]
    svi = DPSVI(
        setting.model, setting.guide(setting.model), optax.sgd(1e-3),
        estimator=setting.estimator(),
        clip_norm=0.7, sampler=setting.sampler, budget=BUDGET, num_steps=1, secret_key=2,
        repetition=True,
    )  # fmt: skip
    claim = svi.run(jax.random.key(0), 1, *records(True), progress_bar=False).privacy.epsilon
    state = svi.init(jax.random.key(0), *records(True)).opened
    session = svi._session(records(True), {})
    rows = [session.rows(records(canary), {}) for canary in (False, True)]

    def released(state, rows):
        return (
            ravel_pytree(session._step(state, rows)[1].released.total)[0] * session.inclusion_prob
        )

    noise = state.noise_multiplier * noise_factor
    keys = jax.random.split(secret_key(9), (2, DRAWS, 2))

    # The direction is the signal of the canary: found where a batch has it, without noise.
    quiet = state._replace(noise_multiplier=jnp.zeros(()))
    for attempt in range(20):
        tried = quiet._replace(
            sampler_state=setting.sampler.init(jax.random.fold_in(secret_key(4), attempt), 8)
        )
        signal = released(tried, rows[1]) - released(tried, rows[0])
        if jnp.linalg.norm(signal) > 0:
            break
    assert jnp.linalg.norm(signal) == pytest.approx(0.7, rel=1e-5)
    direction = signal / jnp.linalg.norm(signal)

    def score(keys, rows):
        sampler_state = setting.sampler.init(keys[1], 8)
        new = state._replace(
            secret_key=keys[0], sampler_state=sampler_state, noise_multiplier=noise
        )
        return released(new, rows) @ direction

    worlds = [
        np.asarray(jax.jit(jax.vmap(functools.partial(score, rows=world)))(world_keys))
        for world, world_keys in zip(rows, keys, strict=True)
    ]
    return *worlds, claim


def epsilon_bounds(false_positives, false_negatives, trials, delta, confidence=None):
    """Epsilon from the two errors; with ``confidence`` from their Clopper-Pearson upper bounds."""
    errors = [np.asarray(false_positives), np.asarray(false_negatives)]
    if confidence is None:
        fpr, fnr = ((count + 0.5) / trials for count in errors)
    else:
        fpr, fnr = (stats.beta.ppf(confidence, count + 1, trials - count) for count in errors)
    with np.errstate(invalid="ignore", divide="ignore"):
        first = np.log(np.maximum(1 - delta - fnr, 0) / fpr)
        second = np.log(np.maximum(1 - delta - fpr, 0) / fnr)
    return np.maximum(first, second)


def audit(without, with_canary, delta):
    """Lower bound on epsilon at ``delta``, with the threshold chosen on one half of the draws."""
    half = len(without) // 2
    thresholds = np.quantile(np.concatenate([without[:half], with_canary[:half]]),
                             np.linspace(1e-4, 1 - 1e-4, 2001))  # fmt: skip

    def errors(part, threshold):
        false_positives = half - np.searchsorted(np.sort(without[part]), threshold, side="right")
        return false_positives, np.searchsorted(np.sort(with_canary[part]), threshold, side="right")

    chosen = epsilon_bounds(*errors(slice(0, half), thresholds), half, delta, CONFIDENCE)
    threshold = thresholds[np.nanargmax(chosen)]
    return float(epsilon_bounds(*errors(slice(half, None), threshold), half, delta, CONFIDENCE))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.extended) if n in EXTENDED else n for n in SETTINGS],
)
def test_one_step_is_as_private_as_claimed_and_no_more(name):
    without, with_canary, claim = scores(name, 1.0)
    assert 1.48 < claim <= BUDGET.epsilon
    bound = audit(without, with_canary, BUDGET.delta)
    assert SETTINGS[name].least * claim < bound <= claim


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [n if n == USUAL else pytest.param(n, marks=pytest.mark.extended) for n in SETTINGS],
)
def test_the_audit_finds_too_little_noise(name):
    without, with_canary, claim = scores(name, 0.7)
    assert audit(without, with_canary, BUDGET.delta) > claim


def test_the_audit_of_a_gaussian_that_is_known():
    """The attack itself: bounds on N(0, 1) against N(mu, 1) lie below the exact epsilon."""
    rng = np.random.default_rng(3)
    mu, delta, epsilon = 1.0, 0.02, 0.0
    normal = stats.norm
    grid = np.linspace(0, 10, 100_001)
    deltas = normal.cdf(mu / 2 - grid / mu) - np.exp(grid) * normal.cdf(-mu / 2 - grid / mu)
    epsilon = float(grid[np.argmax(deltas <= delta)])
    found = audit(rng.normal(size=DRAWS), mu + rng.normal(size=DRAWS), delta)
    assert 0.85 * epsilon < found <= epsilon
    assert audit(rng.normal(size=DRAWS), rng.normal(size=DRAWS), delta) < 0.05


@functools.cache
def first_samples(kernel):
    """The first position of a chain along the canary's direction, without and with it."""
    mcmc = DPMCMC(kernel(model), num_warmup=0, num_samples=1, clip_norm=0.7, sampler=FullBatch(),
                  budget=BUDGET, secret_key=2, repetition=True, progress_bar=False)  # fmt: skip
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
@pytest.mark.parametrize(
    "kernel",
    [
        SGLD,
        pytest.param(PreconditionedSGLD, marks=pytest.mark.extended),
        pytest.param(SGHMC, marks=pytest.mark.extended),
    ],
)
def test_a_sample_of_a_chain_is_as_private_as_claimed_and_no_more(kernel):
    without, with_canary, claim = first_samples(kernel)
    assert 1.48 < claim <= BUDGET.epsilon
    bound = audit(without, with_canary, BUDGET.delta)
    assert 0.8 * claim < bound <= claim
