"""The Gaussian mechanism whose steps share a budget, each as it asks for."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dp_accounting.dp_event import GaussianDpEvent
from scipy import stats

from numpyro_dp.core import MechanismState
from numpyro_dp.mechanisms import GaussianMechanism
from numpyro_dp.privacy.accounting.spent import epsilon_spent
from numpyro_dp.privacy.keys import secret_key
from numpyro_dp.privacy.mechanism.clip_norm import ClipNorm
from numpyro_dp.privacy.mechanism.staged import StagedGaussian, asking
from numpyro_dp.samplers import FixedSize, FullBatch, Permutation, Poisson

SHARES = (0.05, 0.15, 0.3, 0.5)
CLIP, SIGMA = 0.7, 1.5
NUMBER = 40_000


def mechanism(sigma=SIGMA):
    return StagedGaussian()(ClipNorm.of(CLIP).fixed(), sigma)


def all_steps(key, sigma=SIGMA, number=NUMBER, shares=SHARES):
    """Noise of each step on a sum of zeros; every step has a key of its own, as in a run."""
    staged, total = mechanism(sigma), {"a": jnp.zeros(number - 1), "b": jnp.zeros(())}
    state, found = MechanismState((), staged.init(total)), []
    for step, share in enumerate(shares):
        state = state._replace(memory=asking(state.memory, share))
        noisy, state = staged.privatise(jax.random.fold_in(key, step), total, state)
        found.append(np.append(np.asarray(noisy["a"], np.float64), noisy["b"]))
    return np.stack(found)


def test_noise_of_a_step_has_its_width_and_steps_are_independent():
    """5 sigma, at which 10 % more or less noise would be seen many times over."""
    noise = all_steps(secret_key(3))
    for row, share in zip(noise, SHARES, strict=True):
        width = SIGMA * CLIP / math.sqrt(share)
        error = 5 / math.sqrt(2 * NUMBER)
        assert abs(row.std() / width - 1) < error < 0.05
        assert stats.kstest(row / width, "norm").pvalue > 1e-4
        for wrong in (0.9, 1.1):
            assert abs(row.std() / (wrong * width) - 1) > error
            assert stats.kstest(row / (wrong * width), "norm").pvalue < 1e-6
    correlation = np.corrcoef(noise) - np.eye(len(SHARES))
    assert np.abs(correlation).max() < 5 / math.sqrt(NUMBER)


def test_noise_is_never_narrower_than_what_is_accounted_for():
    """Rounding to single precision goes up: widths as the mechanism multiplies them.

    Noise of few numbers: rounding many to the grid would need more of it.
    """
    for shares in (SHARES, (1 / 3, 2 / 3), (0.02 / 1.02, 1 / 1.02), (1.0,)):
        staged = StagedGaussian()(ClipNorm.of(1.0).fixed(), 1.0)
        plain = GaussianMechanism()(ClipNorm.of(1.0).fixed(), 1.0)
        zero, state = jnp.zeros(4), MechanismState((), staged.init(()))
        for share in shares:
            state = state._replace(memory=asking(state.memory, share))
            noisy, state = staged.privatise(secret_key(1), zero, state)
            unit, _ = plain.privatise(secret_key(1), zero, MechanismState(()))
            ratio = np.asarray(noisy, np.float64) / np.asarray(unit, np.float64)
            assert 1 <= ratio.min() * math.sqrt(share) < 1 + 1e-5


@pytest.mark.every_case
@pytest.mark.parametrize("sigma", [0.3, 1.5, 40.0])
def test_any_number_of_steps_is_one_gaussian_event(sigma):
    for steps in (1, 4, 17):
        event = mechanism(sigma).compose(FullBatch(), 100, steps)
        assert isinstance(event, GaussianDpEvent)
        assert event.noise_multiplier == pytest.approx(sigma, rel=1e-12)


@pytest.mark.full
def test_a_share_that_follows_the_noise_is_still_paid_for():
    """The attacker asks for more after a release that looks like his guess, or for all at once.

    The likelihood ratio of all releases is that of one Gaussian mechanism, whatever he asks for.
    """
    mu, repeats, rng = 1 / SIGMA, 200_000, np.random.default_rng(0)
    logs = np.zeros((2, repeats))
    for world in range(2):
        first = 0.2
        seen = world + rng.normal(size=repeats) / (mu * np.sqrt(first))
        logs[world] += first * mu**2 * (seen - 0.5)
        rest = np.where(seen > 0.5, 0.8, 0.1)  # of what is left, after what was seen
        seen = world + rng.normal(size=repeats) / (mu * np.sqrt(rest))
        logs[world] += rest * mu**2 * (seen - 0.5)
    for level in np.linspace(0.02, 0.5, 9):
        limit = np.quantile(logs[0], 1 - level)
        power = np.mean(logs[1] > limit)
        most = stats.norm.cdf(stats.norm.ppf(level) + mu)
        assert power < most + 4 * np.sqrt(most * (1 - most) / repeats)


def test_the_exact_epsilon_of_all_steps():
    """Of N(0, 1) against N(mu, 1), by Balle and Wang's formula."""
    mu, delta = 1 / SIGMA, 1e-5
    grid = np.linspace(0, 12, 200_001)
    cdf = stats.norm.cdf
    deltas = cdf(mu / 2 - grid / mu) - np.exp(grid) * cdf(-mu / 2 - grid / mu)
    exact = grid[np.argmax(deltas <= delta)]
    event = mechanism().compose(FullBatch(), 100, len(SHARES))
    assert epsilon_spent(event, delta).upper == pytest.approx(exact, abs=2e-3)


@pytest.mark.parametrize(
    ("shares", "released"),
    [((*SHARES, 1e-6), 4), ((0.5, 0.0, 0.5), [0, 2]), ((0.7, 0.31, 0.3, 1e-3), [0, 2]),
     ((1.01, 1.0), [1]), ((-0.5, 1.0), [1]), ((0.1,) * 12, 10)],
)  # fmt: skip
def test_what_would_exceed_the_budget_is_no_release(shares, released):
    noise = all_steps(secret_key(4), number=10, shares=shares)
    released = list(range(released)) if isinstance(released, int) else released
    assert np.flatnonzero(np.isfinite(noise).all(1)).tolist() == released
    assert np.isnan(np.delete(noise, released, 0)).all()


def test_a_step_that_asks_twice_is_paid_once_and_one_that_does_not_ask_is_none():
    staged, zero = mechanism(), jnp.zeros(3)
    state = MechanismState((), asking(staged.init(zero), 0.5))
    noisy, state = staged.privatise(secret_key(1), zero, state)
    assert np.isfinite(noisy).all()
    noisy, state = staged.privatise(secret_key(2), zero, state)
    assert np.isnan(noisy).all()
    assert int(state.memory[0]) == 2**23


def test_under_jit_and_with_a_traced_multiplier():
    def one(key, sigma):
        staged = mechanism(sigma)
        state = MechanismState((), asking(staged.init(()), 0.3))
        return staged.privatise(key, jnp.zeros(5), state)[0]

    key = secret_key(5)
    np.testing.assert_allclose(jax.jit(one)(key, 2.0), one(key, 2.0), rtol=1e-6)


@pytest.mark.every_case
@pytest.mark.parametrize("sampler", [Poisson(0.5), FixedSize(4), Permutation(4)], ids=str)
def test_other_samplers_are_refused(sampler):
    with pytest.raises(ValueError, match=r"Expected sampler=FullBatch\(\)"):
        mechanism().compose(sampler, 8, 2)
