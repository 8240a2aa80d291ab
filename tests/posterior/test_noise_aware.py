"""Noise-aware posteriors of real private runs on models whose posterior is known."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flat import dpsvi
from models import mean_of
from numpyro.infer import Predictive
from numpyro.infer.autoguide import (
    AutoDiagonalNormal,
    AutoIAFNormal,
    AutoMultivariateNormal,
    AutoNormal,
)

from numpyro_dp import PrivacyBudget
from numpyro_dp.posterior import average, noise_aware

DIM, NUMBER = 3, 500

model = mean_of(10, size=DIM)


@pytest.fixture(scope="module")
def data():
    return 1 + jax.random.normal(jax.random.key(3), (NUMBER, DIM))


def runs(guide, data, seeds, num_steps, noise_multiplier=None, epsilon=1.0, step=0.02):
    """Initial values are near the optimum: what is tested is the noise about it."""
    budget = None if noise_multiplier else PrivacyBudget(epsilon, 1e-5)
    svi = dpsvi(model, guide, optax.sgd(step * 0.05), clip_norm=8.0, budget=budget,
                noise_multiplier=noise_multiplier)  # fmt: skip
    sd = NUMBER**-0.5
    start = {
        AutoDiagonalNormal: {"auto_loc": jnp.ones(DIM), "auto_scale": jnp.full(DIM, sd)},
        AutoNormal: {"mean_auto_loc": jnp.ones(DIM), "mean_auto_scale": jnp.full(DIM, sd)},
        AutoMultivariateNormal: {"auto_loc": jnp.ones(DIM), "auto_scale_tril": sd * jnp.eye(DIM)},
    }[type(guide)]
    keys = map(jax.random.key, range(seeds))
    return [svi.run(key, num_steps, data, progress_bar=False, init_params=start) for key in keys]


@pytest.mark.extended
def test_standard_errors_match_the_spread_over_runs(data):
    guide = AutoDiagonalNormal(model)
    found = [average(result.trace) for result in runs(guide, data, 60, 4000)]
    loc = np.stack([each.params["auto_loc"] for each in found])
    sd = np.stack([each.dp_sd["auto_loc"] for each in found])
    assert np.mean([each.converged["auto_loc"] for each in found]) > 0.95
    ratio = np.sqrt(np.mean(sd**2) / np.mean(loc.var(0)))
    # 180 values: standard error of a ratio of standard deviations about 0.055.
    assert 0.8 < ratio < 1.2
    exact = np.asarray(data.sum(0) / (NUMBER + 0.01))
    covered = np.abs(loc - exact) <= 1.645 * sd
    assert 0.82 < covered.mean() < 0.97


@pytest.mark.full
@pytest.mark.parametrize("guide_type", [AutoDiagonalNormal, AutoNormal, AutoMultivariateNormal])
def test_widened_by_what_the_noise_did(guide_type, data):
    guide = guide_type(model)
    (result,) = runs(guide, data, 1, 4000)
    posterior = noise_aware(result, guide)
    prefix = "mean_auto" if guide_type is AutoNormal else "auto"
    full = guide_type is AutoMultivariateNormal
    scale = f"{prefix}_scale_tril" if full else f"{prefix}_scale"
    wide, own = posterior.params[scale], posterior.average.params[scale]
    added = np.square(posterior.average.dp_sd[f"{prefix}_loc"])
    if full:
        np.testing.assert_allclose(wide @ wide.T, own @ own.T + np.diag(added), rtol=1e-4)
    else:
        np.testing.assert_allclose(np.square(wide), np.square(own) + added, rtol=1e-5)
    draws = Predictive(guide, params=posterior.params, num_samples=4000)(jax.random.key(0), data)
    sd = np.asarray(draws["mean"]).std(0)
    expected = np.sqrt(np.diag(wide @ wide.T)) if full else wide
    np.testing.assert_allclose(sd, expected, rtol=0.06)


@pytest.mark.extended
def test_says_what_is_not_to_be_trusted(data):
    guide = AutoDiagonalNormal(model)
    (climbing,) = runs(guide, data, 1, 60, noise_multiplier=1e-3, step=1e-4)
    assert noise_aware(climbing, guide).unconverged == 3
    (noisy,) = runs(guide, data, 1, 4000, epsilon=0.2, step=0.004)
    assert noise_aware(noisy, guide).dominated == 3


@pytest.mark.extended
def test_other_guides_are_refused(data):
    guide = AutoIAFNormal(model)
    result = dpsvi(model, guide, optax.adam(1e-3)).run(
        jax.random.key(0), 20, data, progress_bar=False
    )
    with pytest.raises(TypeError, match=r"AutoIAFNormal.*average\(\)"):
        noise_aware(result, guide)
