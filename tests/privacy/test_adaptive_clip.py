"""Adaptive clip norms in whole runs: what they track, and what they cost."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from flat import dpsvi
from losses import exact_losses
from numpyro.infer.autoguide import AutoDiagonalNormal
from statistical.test_noise import check_law, noise_of_steps

from numpyro_dp import BudgetError, PrivacyBudget, secret_key
from numpyro_dp.mechanisms import AdaptiveClip, LossRelease
from numpyro_dp.privacy.mechanism.clip_norm import _LARGEST, _SMALLEST, follow
from numpyro_dp.samplers import Poisson

KEY = jax.random.key(0)
NUMBER = 400


def model(x):
    """The gradient of a record is the record, whatever the draw: its norm is known."""
    for name, column in (("a", x[:, 0]), ("b", x[:, 1])):
        z = numpyro.sample(name, dist.Normal(0, 1))
        with numpyro.plate("rows", x.shape[0]):
            numpyro.factor(f"{name}_factor", z * column)


def records():
    return np.random.default_rng(0).normal(size=(NUMBER, 2)).astype(np.float32) * [1.0, 30.0]


def driver(clip_norm, **options):
    settings = {"noise_multiplier": 0.0, "secret_key": 3, "repetition": True} | options
    return dpsvi(model, AutoDiagonalNormal, optax.adam(1e-3), clip_norm=clip_norm, **settings)


def run(svi, steps, rng_key=KEY, **options):
    return svi.run(rng_key, steps, records(), progress_bar=False, **options)


def share_below(clip_norms, norms):
    return np.mean(norms <= np.asarray(clip_norms)[..., None], axis=-1)


# What the norm tracks.

SWEPT = {
    "clip_norm": [AdaptiveClip(1.0, quantile=0.5), AdaptiveClip(20.0, quantile=0.9, share=0.2)],
    "noise_multiplier": [0.0, 5.0],
}
KEYS = jax.random.split(KEY, 1)


@pytest.fixture(scope="module")
def swept():
    return driver(AdaptiveClip()).sweep(KEYS, 300, records(), **SWEPT)


@pytest.mark.full
@pytest.mark.parametrize(("index", "quantile"), [(0, 0.5), (2, 0.9)])
def test_without_noise_the_norm_goes_to_the_quantile(swept, index, quantile):
    norms = np.linalg.norm(records(), axis=1)
    found = swept.one(index).trace.clip_norm
    assert found.shape == (300,)
    assert abs(found[-1] / np.quantile(norms, quantile) - 1) < 0.02
    assert abs(share_below(found[0], norms) - quantile) > 0.3  # it had a way to go
    assert math.isinf(swept.one(index).privacy.epsilon)


@pytest.mark.extended
def test_each_run_of_a_sweep_is_the_run_of_its_settings(swept):
    np.testing.assert_array_equal(swept.labels["clip_norm"], [0, 0, 1, 1])
    alone = run(
        driver(SWEPT["clip_norm"][1], noise_multiplier=5.0,
               secret_key=jax.random.fold_in(secret_key(3), 3), repetition=True),
        300, rng_key=KEYS[0],
    )  # fmt: skip
    one = swept.one(3)
    np.testing.assert_allclose(one.trace.clip_norm, alone.trace.clip_norm, rtol=1e-4)
    np.testing.assert_allclose(one.params["auto_loc"], alone.params["auto_loc"], rtol=1e-4)
    assert one.trace.clip_norm[-1] != swept.one(2).trace.clip_norm[-1]


def test_a_sweep_refuses_norms_of_another_form():
    svi = driver(AdaptiveClip())
    with pytest.raises(ValueError, match="an AdaptiveClip in all runs"):
        svi.sweep(KEYS, 3, records(), clip_norm=[1.0])
    with pytest.raises(TypeError, match=r"Expected a sequence.*AdaptiveClip"):
        svi.sweep(KEYS, 3, records(), clip_norm=AdaptiveClip())


@pytest.mark.extended
def test_norms_by_entry_go_to_quantiles_of_their_own_and_a_released_loss_follows_them():
    clips = {"a": AdaptiveClip(5.0, quantile=0.8), ...: AdaptiveClip(5.0, 0.5, learning_rate=0.5)}
    released = run(driver(clips, loss_release=LossRelease(1e4, 0.1)), 150)
    found = released.trace.clip_norm
    sizes = np.abs(records())
    assert abs(found["a"][-1] / np.quantile(sizes[:, 0], 0.8) - 1) < 0.03
    assert abs(found["..."][-1] / np.quantile(sizes[:, 1], 0.5) - 1) < 0.03
    # Without noise the curve is the loss itself, though its scale in the sum changes.
    plain = run(driver(clips), 150)
    np.testing.assert_allclose(found["a"], plain.trace.clip_norm["a"], rtol=1e-4)
    exact = exact_losses(driver(clips), KEY, 150, records())
    np.testing.assert_allclose(released.losses.values, exact, rtol=2e-4, atol=0.5)
    assert np.abs(exact).mean() > 20  # a scale of the wrong step would be wrong by 5 % at first


@pytest.mark.full
def test_with_noise_the_norm_stays_about_the_quantile_and_the_estimate_has_noise_of_its_share():
    clip = AdaptiveClip(30.0, quantile=0.7, learning_rate=0.1, share=0.2)
    svi = driver(clip, noise_multiplier=20.0)
    norms = np.asarray(run(svi, 16_000, trace_size=16_000).trace.clip_norm, np.float64)
    below = share_below(norms[:-1], np.linalg.norm(records(), axis=1))
    scale = 20.0 / (2 * math.sqrt(clip.share) * NUMBER)
    noise = -np.diff(np.log(norms)) / clip.learning_rate - below + clip.quantile
    check_law(noise[:, None], scale)
    # log C moves by -eta (b + e - gamma), so the mean of b follows from those of e and the moves.
    kept = norms[1000:]
    error = 5 * scale / math.sqrt(len(kept) - 1)
    error += abs(np.log(kept[-1] / kept[0])) / (clip.learning_rate * (len(kept) - 1))
    assert abs(np.mean(below[1000:]) - clip.quantile) < error + 1e-4
    assert error < 0.01


@pytest.mark.extended
def test_the_noise_of_the_gradient_grows_by_the_share():
    """What steps release less their noiseless sums, in units of the norm of the step."""
    share = 0.3
    svi = driver(AdaptiveClip(2.0, share=share), noise_multiplier=1.3, sampler=Poisson(0.2))
    draws, clip = noise_of_steps(svi, (records(),), 8_000)
    norms = clip.given.initial
    assert draws.shape == (8_000, 2)
    assert norms.max() / norms.min() > 1.5
    check_law(draws / norms[:, None], 1.3 / math.sqrt(1 - share))  # 1.3 itself is 0.84 times that


# What it costs, and how it runs.


@pytest.mark.extended
@pytest.mark.usefixtures("empty_caches")
def test_updates_and_resumed_runs_are_one_run_at_the_cost_of_a_fixed_norm():
    options = {"noise_multiplier": None, "budget": PrivacyBudget(1.0, 1e-5), "num_steps": 12}
    svi = driver(AdaptiveClip(2.0, share=0.36), **options)
    whole = run(svi, 12)
    first = run(svi, 5)
    second = run(svi, 7, init_state=first.state)
    joined = np.concatenate([first.trace.clip_norm, second.trace.clip_norm])
    np.testing.assert_allclose(joined, whole.trace.clip_norm, rtol=1e-5)
    states = [svi.init(KEY, records())]
    for _ in range(12):
        states.append(svi.update(states[-1], records())[0])
    clips = [state.mechanism_state.clip_norm.given for state in states]
    shapes = {tuple((x.shape, x.dtype, x.weak_type) for x in clip) for clip in clips}
    assert len(shapes) == 1
    np.testing.assert_allclose([*clips[-1]], [joined[-1], 0.9, 0.2, 0.36], rtol=1e-5)
    session = svi._session((records(),), {})
    assert session._loop_for(None)._cache_size() == session._update._cache_size() == 1
    report = svi.privacy(states[-1])
    assert 0.99 < report.epsilon == whole.privacy.epsilon <= 1.0
    fixed = driver(2.0, **options).init(KEY, records())
    assert fixed.noise_multiplier == states[0].noise_multiplier
    assert "sensitivity 2.5 in the first step (adaptive clip norm)" in str(report)
    with pytest.raises(BudgetError, match=r"clip_norm=AdaptiveClip\(initial=2.0"):
        run(driver(AdaptiveClip(2.5, share=0.36), **options), 1, init_state=first.state)


@pytest.mark.parametrize(("quantile", "end"), [(0.01, _SMALLEST), (0.99, _LARGEST)])
def test_norms_stop_at_the_ends_of_their_range(quantile, end):
    clip = AdaptiveClip(3.0, quantile, learning_rate=1e5)
    nothing = jnp.zeros(())  # blank records count as half below the norm
    for _ in range(2):
        clip = follow(clip, nothing, 100.0)
    assert clip.initial == np.float32(end)
