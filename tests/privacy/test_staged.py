"""The Gaussian mechanism whose steps share a budget, each as it asks for."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dp_accounting.dp_event import GaussianDpEvent
from gaussian import gaussian
from scipy import stats

from numpyro_dp.core import MechanismState
from numpyro_dp.privacy.keys import secret_key
from numpyro_dp.privacy.mechanism.clip_norm import ClipNorm
from numpyro_dp.privacy.mechanism.staged import StagedGaussian, asking
from numpyro_dp.samplers import FixedSize, FullBatch, Permutation, Poisson

SHARES = (0.05, 0.15, 0.3, 0.5)
CLIP, SIGMA = 0.7, 1.5
NUMBER = 40_000


def mechanism(sigma=SIGMA, clip=CLIP):
    return StagedGaussian()(ClipNorm.of(clip).fixed(), sigma)


def all_steps(key, number=NUMBER, shares=SHARES):
    """Noise of each step on a sum of zeros; every step has a key of its own, as in a run."""
    staged, total = mechanism(), {"a": jnp.zeros(number - 1), "b": jnp.zeros(())}
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


@pytest.mark.every_case
@pytest.mark.parametrize("shares", [SHARES, (1 / 3, 2 / 3), (0.02 / 1.02, 1 / 1.02), (1.0,)])
def test_noise_is_never_narrower_than_what_is_accounted_for(shares):
    """Rounding to single precision goes up: widths as the mechanism multiplies them.

    Noise of few numbers: rounding many to the grid would need more of it.
    """
    staged, plain = mechanism(1.0, 1.0), gaussian(1.0, 1.0)
    zero, state = jnp.zeros(4), MechanismState((), staged.init(()))
    unit, _ = plain.privatise(secret_key(1), zero, MechanismState(()))
    for share in shares:
        state = state._replace(memory=asking(state.memory, share))
        noisy, state = staged.privatise(secret_key(1), zero, state)
        ratio = np.asarray(noisy, np.float64) / np.asarray(unit, np.float64)
        assert 1 <= ratio.min() * math.sqrt(share) < 1 + 1e-5


@pytest.mark.every_case
@pytest.mark.parametrize("sigma", [0.3, 1.5, 40.0])
def test_any_number_of_steps_is_one_gaussian_event_of_full_batches(sigma):
    for steps in (1, 4, 17):
        event = mechanism(sigma).compose(FullBatch(), 100, steps)
        assert isinstance(event, GaussianDpEvent)
        assert event.noise_multiplier == pytest.approx(sigma, rel=1e-12)
    for sampler in (Poisson(0.5), FixedSize(4), Permutation(4)):
        with pytest.raises(ValueError, match=r"Expected sampler=FullBatch\(\)"):
            mechanism(sigma).compose(sampler, 8, 2)


@pytest.mark.full
def test_a_share_that_follows_the_noise_is_still_paid_for():
    """The attacker asks for more after a release that looks like his guess, or for all at once.

    The likelihood ratio of all releases is that of one Gaussian mechanism, whatever he asks for.
    """
    mu, repeats, rng = 1 / SIGMA, 200_000, np.random.default_rng(0)
    world = np.arange(2)[:, None]
    logs, share = np.zeros((2, repeats)), 0.2
    for _ in range(2):
        seen = world + rng.normal(size=(2, repeats)) / (mu * np.sqrt(share))
        logs += share * mu**2 * (seen - 0.5)
        share = np.where(seen > 0.5, 0.8, 0.1)  # of what is left, after what was seen
    for level in np.linspace(0.02, 0.5, 9):
        power = np.mean(logs[1] > np.quantile(logs[0], 1 - level))
        most = stats.norm.cdf(stats.norm.ppf(level) + mu)
        assert power < most + 4 * np.sqrt(most * (1 - most) / repeats)


@pytest.mark.parametrize(("shares", "released"), [
    ((*SHARES, 1e-6), [0, 1, 2, 3]), ((0.5, 0.0, 0.5), [0, 2]), ((0.7, 0.31, 0.3, 1e-3), [0, 2]),
    ((1.01, 1.0), [1]), ((-0.5, 1.0), [1]), ((0.1,) * 12, list(range(10))),
])  # fmt: skip
def test_what_would_exceed_the_budget_is_no_release(shares, released):
    noise = all_steps(secret_key(4), number=10, shares=shares)
    assert np.flatnonzero(np.isfinite(noise).all(1)).tolist() == released
    assert np.isnan(np.delete(noise, released, 0)).all()


def test_a_step_that_does_not_ask_is_not_paid_and_is_no_release():
    def twice(key, sigma):
        staged, zero = mechanism(sigma), jnp.zeros(3)
        state = MechanismState((), asking(staged.init(zero), 0.5))
        first, state = staged.privatise(key, zero, state)
        return first, *staged.privatise(key, zero, state)

    first, second, state = twice(secret_key(1), SIGMA)
    assert np.isfinite(first).all() and np.isnan(second).all()
    assert int(state.memory[0]) == 2**23
    compiled, *_ = jax.jit(twice)(secret_key(1), SIGMA)  # with a traced multiplier
    np.testing.assert_allclose(compiled, first, rtol=1e-6)
