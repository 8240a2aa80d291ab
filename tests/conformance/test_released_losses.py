"""A released loss has the noise and the clip of an entry of the signal, in what a run returns."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import optax
import pytest
from flat import dpsvi
from models import scored
from numpyro.infer.autoguide import AutoDelta
from scipy import stats

from numpyro_dp.mechanisms import LossRelease

DIM, STEPS, RATE = 2, 4000, 1e-3
NOISE, SHARE = 2.0, 0.2
SIGMA = 5.0  # of the statistic's own standard error

# The log likelihood of a record is linear: its gradient is the record.
linear = scored(
    lambda x, w: x[:, :DIM] @ w + x[:, DIM], w=dist.Normal(0, 1).expand([DIM]).to_event(1)
)


def run(x, clip, steps, **options):
    svi = dpsvi(
        linear, AutoDelta, optax.sgd(RATE), loss_release=LossRelease(clip, SHARE), **options
    )
    start = {"w_auto_loc": jnp.zeros(DIM)}
    result = svi.run(jax.random.key(0), steps, jnp.asarray(x), progress_bar=False,
                     init_params=start, trace_size=steps)  # fmt: skip
    after = np.asarray(result.trace.params["w_auto_loc"], np.float64)
    return np.asarray(result.losses.values, np.float64), np.concatenate([np.zeros((1, DIM)), after])


def without_prior(losses, iterates):
    """What the losses say of the records: their log likelihoods."""
    return -losses - stats.norm.logpdf(iterates[:-1]).sum(1)


@functools.cache
def noise_of_a_run():
    """Noise in the released sums of log likelihoods, and in those of gradients."""
    x = 0.1 * np.random.default_rng(0).normal(size=(20, DIM + 1)).astype(np.float32)
    clip = 50.0
    losses, iterates = run(x, clip, STEPS, noise_multiplier=NOISE, secret_key=1)
    total = x.astype(np.float64).sum(0)
    exact = iterates[:-1] @ total[:DIM] + total[DIM]
    gradients = np.diff(iterates, axis=0) / RATE + iterates[:-1] - total[:DIM]
    # In units of the noise, which is that of the sensitivity sqrt(C^2 + C_loss^2).
    sensitivity = 1 / np.sqrt(1 - SHARE)
    scale = sensitivity * np.sqrt(SHARE) / clip
    values = without_prior(losses, iterates) - exact
    return values * scale / (NOISE * sensitivity), gradients / (NOISE * sensitivity)


@pytest.mark.full
def test_the_noise_of_a_released_loss_is_that_of_its_share():
    values, gradients = noise_of_a_run()
    assert stats.kstest(values, "norm").pvalue > 1e-3
    for noise in (values, gradients):
        assert abs(np.mean(noise**2) - 1) < SIGMA * np.sqrt(2 / noise.size) < 1 - 0.9**2


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_the_noise_of_a_released_loss_is_its_own(lag):
    values, gradients = noise_of_a_run()
    size = STEPS - lag
    for coordinate in [values] * (lag > 0) + list(gradients.T):
        for early, late in ((values, coordinate), (coordinate, values)):
            found = np.corrcoef(early[:size], late[lag:])[0, 1]
            assert abs(found) * np.sqrt(size) < SIGMA


@pytest.mark.parametrize("value", [1e6, -1e6])
def test_the_log_likelihood_of_a_record_is_clipped(value):
    """Without noise one record moves the released sum by the bound, whatever it is."""
    x = np.zeros((6, DIM + 1), np.float32)
    losses, iterates = run(x, 3.0, 2, noise_multiplier=0.0)
    np.testing.assert_allclose(without_prior(losses, iterates), 0, atol=1e-4)
    x[4, DIM] = value
    losses, iterates = run(x, 3.0, 2, noise_multiplier=0.0)
    np.testing.assert_allclose(without_prior(losses, iterates), np.sign(value) * 3, rtol=1e-3)
