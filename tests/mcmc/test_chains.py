"""Chains side by side: own noise and batches each, distributed as the dynamics say."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from correlated import CorrelatedNoise
from flat import dpmcmc, dpsvi
from models import scored
from numpyro.infer import Trace_ELBO
from numpyro.infer.autoguide import AutoDelta

from numpyro_dp import SGHMC, SGLD, PreconditionedSGLD
from numpyro_dp.extend import Chains
from numpyro_dp.samplers import FullBatch, Poisson

DIM, CHAINS, STEPS = 16, 3, 1500
SIGMA = 5.0  # of the statistic's own standard error

linear = scored(lambda x, w: x @ w, w=dist.Normal(0, 1).expand([DIM]).to_event(1))


def positions(x, **options):
    """Positions of all chains, which start at the same place: (chains, steps + 1, DIM)."""
    mcmc = dpmcmc(num_warmup=0, num_samples=STEPS, num_chains=CHAINS, clip_norm=2.0,
                  data_plate="records", **options)  # fmt: skip
    mcmc.run(jax.random.key(0), jnp.asarray(x), init_params={"w": jnp.zeros(DIM)})
    found = np.asarray(mcmc.get_samples(group_by_chain=True)["w"], np.float64)
    return np.concatenate([np.zeros((CHAINS, 1, DIM)), found], axis=1)


def check_unrelated(chains):
    """No correlation between two series of the same shape, at most two steps apart."""
    for (one, other), lag in itertools.product(itertools.permutations(chains, 2), (0, 1, 2)):
        early, late = one[: len(one) - lag].ravel(), other[lag:].ravel()
        assert abs(np.corrcoef(early, late)[0, 1]) * np.sqrt(early.size) < SIGMA


@pytest.mark.full
def test_each_chain_has_noise_of_its_own():
    """Records that are not numbers count as nothing: all that moves a chain is prior and noise."""
    multiplier, scale = 30.0, 60.0  # of the noise: the multiplier times the clip norm
    found = positions(np.full((5, DIM), np.nan), kernel=SGLD(linear), sampler=FullBatch(),
                      noise_multiplier=multiplier, secret_key=1)  # fmt: skip
    step = 2 / scale**2  # the largest: all noise is that of privacy
    before, after = found[:, :-1], found[:, 1:]
    noise = ((after - before) / step + before) / scale
    for chain in noise:
        assert abs(np.mean(chain**2) - 1) < SIGMA * np.sqrt(2 / chain.size)
    check_unrelated(noise)


@pytest.mark.full
def test_each_chain_has_batches_of_its_own():
    """Record i pulls at coordinate i alone: without noise each step shows who was in its batch."""
    rate, step = 0.4, 1e-3
    found = positions(
        np.eye(DIM), kernel=SGLD(linear, step, temperature=1e-12), sampler=Poisson(rate),
        noise_multiplier=0.0, secret_key=2,
    )  # fmt: skip
    before, after = found[:, :-1], found[:, 1:]
    pulls = ((after - before) / step + before) * rate
    taken = np.round(pulls)
    np.testing.assert_allclose(pulls, taken, atol=0.1)
    assert set(np.unique(taken)) == {0, 1}
    for chain in taken:
        assert abs(chain.mean() - rate) < SIGMA * np.sqrt(rate * (1 - rate) / chain.size)
    check_unrelated(taken)


@pytest.mark.parametrize("kernel", [SGLD, PreconditionedSGLD, SGHMC])
def test_draws_make_up_for_what_privacy_noise_leaves(kernel):
    """Both together have the variance of the dynamics, at the temperature that was asked for."""
    step, noise, temperature = 1e-3, 5.0, 0.7
    made = kernel(linear, step, temperature=temperature)
    lost = made.friction if kernel is SGHMC else 1.0
    nothing, one = jnp.zeros(DIM), jnp.ones(DIM)
    after = made.move(jnp.asarray(1), nothing, jnp.asarray(noise), one, made.start(nothing))
    moved = np.asarray(after[0], np.float64)
    total = moved**2 + (step * noise) ** 2
    np.testing.assert_allclose(total, 2 * lost * step * temperature, rtol=1e-4)
    assert (step * noise) ** 2 > 0.01 * total.max()  # it is a part of it that the check sees


@pytest.mark.parametrize("chains, changes, match", [
    (Chains(4, 0, 10, 1), {"mechanism": CorrelatedNoise()}, "Several chains would spend more"),
    (Chains(1, 0, 10, 1), {"num_steps": 10}, "num_steps=10 too"),
])  # fmt: skip
def test_chains_of_any_driver_are_runs_of_their_own(chains, changes, match):
    """The event of one run with correlated noise is not that of four."""
    driver = dpsvi(linear, AutoDelta, numpyro.optim.SGD(0.1), Trace_ELBO(), data_plate="records",
                   estimator=None)  # fmt: skip
    settings = driver.settings
    if "mechanism" in changes:
        changes = {"privacy": dataclasses.replace(settings.privacy, **changes)}
    driver = driver.with_settings(dataclasses.replace(settings, **changes))
    for call in (chains.plan, functools.partial(chains.run, rng_key=jax.random.key(0))):
        with pytest.raises(ValueError, match=match):
            call(driver, args=(jnp.zeros((20, DIM)),), kwargs={})


@pytest.mark.parametrize("sizes", [(0, 0, 1, 1), (1, -1, 9, 1), (1, 0, 10, 3), (1, 0, 2, 3)])
def test_chains_refuse_wrong_sizes(sizes):
    with pytest.raises(ValueError, match="Expected"):
        Chains(*sizes)
