"""Langevin samplers: exact posteriors, Theorem 1, the largest step size, and chains."""

import dataclasses
import math

import dp_accounting as dpa
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from flat import dpsvi, grouped
from models import mean_of
from numpyro.contrib.module import random_flax_module
from numpyro.infer import Predictive
from numpyro.infer.autoguide import AutoDelta
from numpyro.infer.util import potential_energy

from numpyro_dp import (
    DPMCMC,
    SGHMC,
    SGLD,
    BudgetError,
    PreconditionedSGLD,
    PrivacyBudget,
    UnsupportedModelError,
)
from numpyro_dp.mechanisms import AdaptiveClip, GaussianMechanism
from numpyro_dp.samplers import FullBatch, Permutation, Poisson

KEY = jax.random.key(0)
DIM, NUMBER = 8, 100
BUDGET = PrivacyBudget(2.0, 1e-5)


gaussian_mean = mean_of(size=DIM)


def records(number=NUMBER):
    rng = np.random.default_rng(1)
    return (rng.normal(size=(number, DIM)) + np.arange(DIM) / 4).astype(np.float32)


def all_the_noise(step_size, clip_norm, temperature=1.0, prob=1.0, friction=1.0):
    """The noise multiplier at which the privacy noise is the thermal noise."""
    return prob * math.sqrt(2 * friction * temperature / step_size) / clip_norm


def sampler(kernel, **options):
    options = {
        "num_warmup": 50, "num_samples": 100, "clip_norm": 20.0, "sampler": FullBatch(),
        "secret_key": 3, "repetition": True, "progress_bar": False,
    } | options  # fmt: skip
    return DPMCMC(kernel, **grouped(**options))


KERNELS = {
    "sgld": lambda **options: SGLD(gaussian_mean, 2e-4, **options),
    "preconditioned": lambda **options: PreconditionedSGLD(gaussian_mean, 2e-4, **options),
    "sghmc": lambda **options: SGHMC(gaussian_mean, 1e-4, friction=0.2, **options),
}


@pytest.mark.extended
@pytest.mark.parametrize(("name", "temperature", "noise"), [
    ("sgld", 1.0, None), ("sgld", 0.5, None), ("preconditioned", 1.0, None),
    ("preconditioned", 0.5, None), ("sghmc", 1.0, None), ("sghmc", 0.5, None),
    ("sgld", 1.0, 0.3),  # draws fill what the privacy noise leaves
])  # fmt: skip
def test_the_conjugate_posterior_where_nothing_is_clipped(name, temperature, noise):
    x = records()
    kernel = KERNELS[name](temperature=temperature)
    friction = getattr(kernel, "friction", 1.0)
    noise = noise or all_the_noise(kernel.step_size, 100.0, temperature, friction=friction)
    mcmc = sampler(
        kernel, clip_norm=100.0, noise_multiplier=noise, num_warmup=1000,
        num_samples=30_000, thinning=10, num_chains=4,
    )  # fmt: skip
    mcmc.run(KEY, x)
    draws = np.asarray(mcmc.get_samples()["mean"], np.float64)
    exact = x.sum(0) / (NUMBER + 1)
    sd = math.sqrt(temperature / (NUMBER + 1))
    if noise != 0.3:
        assert np.abs(draws.mean(0) - exact).max() < 0.1 * sd / math.sqrt(temperature)
    spread = np.sqrt(np.mean((draws - exact) ** 2))
    assert spread == pytest.approx(sd, rel=0.05)


@pytest.mark.full
@pytest.mark.parametrize(
    "batch", [pytest.param(FullBatch(), id="full", marks=pytest.mark.extended), Poisson(0.2)]
)
def test_theorem_1(batch):
    x, step_size, steps = records(), 3e-4, 30
    printed = batch.inclusion_prob(NUMBER) / (math.sqrt(step_size) * 2.0)
    common = {"clip_norm": 2.0, "sampler": batch, "noise_multiplier": printed}
    mcmc = sampler(SGLD(gaussian_mean, step_size, 0.5), num_warmup=0, num_samples=steps, **common)
    mcmc.run(KEY, x)
    svi = dpsvi(gaussian_mean, AutoDelta, optax.sgd(step_size), estimator=None, secret_key=3,
                repetition=True, **common)  # fmt: skip
    result = svi.run(KEY, steps, x, progress_bar=False, trace_size=steps)
    np.testing.assert_allclose(
        mcmc.get_samples()["mean"], result.trace.params["mean_auto_loc"], rtol=1e-4, atol=1e-6
    )
    assert mcmc.privacy.epsilon == pytest.approx(result.privacy.epsilon)


def positive(x):
    scale = numpyro.sample("scale", dist.Gamma(2.0, 1.0))
    weights = numpyro.sample("weights", dist.Dirichlet(jnp.ones(3)))
    with numpyro.plate("records", x.shape[0]):
        numpyro.sample("x", dist.Normal(weights[0] - weights[1], scale), obs=x)


@pytest.mark.extended
def test_the_score_is_that_of_the_unconstrained_posterior():
    x = records()[:, 0]
    start = {"scale": jnp.asarray(1.7), "weights": jnp.array([0.2, 0.5, 0.3])}
    step = 1e-3
    mcmc = sampler(
        SGLD(positive, step, temperature=1e-12), clip_norm=math.inf, noise_multiplier=0.0,
        num_warmup=0, num_samples=1,
    )  # fmt: skip
    mcmc.run(KEY, x, init_params=start)
    found = {name: value[0] for name, value in mcmc.get_samples().items()}
    supports = {"scale": dist.constraints.positive, "weights": dist.constraints.simplex}
    maps = {name: dist.biject_to(support) for name, support in supports.items()}
    free = {name: maps[name].inv(value) for name, value in start.items()}
    slope = jax.grad(lambda u: potential_energy(positive, (x,), {}, u))(free)
    for name, transform in maps.items():
        expected = transform(free[name] - step * slope[name])
        np.testing.assert_allclose(found[name], expected, rtol=1e-4)
        assert np.abs(found[name] - start[name]).max() > 1e-4


TOO_LONG = "Expected step_size <= "


@pytest.mark.extended
def test_the_largest_step_is_the_default():
    x, options = records(2000), {"budget": BUDGET, "clip_norm": 10.0}
    mcmc = sampler(SGLD(gaussian_mean), **options)
    mcmc.run(KEY, x)
    largest = 2 / (10 * mcmc.privacy.noise_multiplier) ** 2
    spelled = sampler(SGLD(gaussian_mean, largest * (1 - 1e-6)), **options)
    spelled.run(KEY, x)
    found, expected = (each.get_samples()["mean"] for each in (spelled, mcmc))
    np.testing.assert_allclose(found, expected, rtol=0.02, atol=0.002)
    with pytest.raises(ValueError, match=TOO_LONG):
        sampler(SGLD(gaussian_mean, 1.01 * largest), **options).run(KEY, x)


@pytest.mark.full
def test_decaying_steps_keep_the_temperature_bound():
    noise = all_the_noise(2e-5, 4.0)

    def steps(step_size, noise):
        mcmc = sampler(SGLD(gaussian_mean, step_size), clip_norm=4.0, noise_multiplier=noise)
        mcmc.run(KEY, records(1000))

    steps(lambda t: 2e-5 / (1 + t / 50), noise)
    for rate, times in ((lambda t: 2e-5 / (1 + t / 50), 1.01), (lambda t: 2e-5 * (1 + t), 1)):
        with pytest.raises(ValueError, match=TOO_LONG):
            steps(rate, times * noise)


@dataclasses.dataclass(frozen=True)
class MoreNoise:
    """The Gaussian mechanism with twice the noise, and the event of half of it."""

    def __call__(self, clip_norm, noise_multiplier):
        base = GaussianMechanism()(clip_norm, noise_multiplier)
        return GaussianMechanism()(clip_norm, 2 * noise_multiplier)._replace(event=base.event)


@pytest.mark.full
def test_the_noise_of_the_mechanism_is_the_thermal_noise():
    def chain(mechanism, step_size):
        options = {"clip_norm": 3.0, "noise_multiplier": 1.0, "num_warmup": 0, "num_samples": 2}
        return sampler(SGLD(gaussian_mean, step_size), mechanism=mechanism, **options)

    largest = 2 / 6.0**2  # of the noise 2 * 1.0 * 3.0
    chain(MoreNoise(), 0.999 * largest).run(KEY, records())
    with pytest.raises(ValueError, match=f"Expected step_size <= {largest:.4g}"):
        chain(MoreNoise(), 1.01 * largest).run(KEY, records())
    silent = dataclasses.make_dataclass("Silent", [], bases=(MoreNoise,), frozen=True, namespace={
        "__call__": lambda self, *args: GaussianMechanism()(*args)._replace(
            noise_scale=0.0, event=dpa.NonPrivateDpEvent())
    })()  # fmt: skip
    with pytest.raises(ValueError, match="noise_scale of mechanism=0.0"):
        chain(silent, 1e-5).run(KEY, records())


@pytest.mark.extended
def test_chains_share_the_budget_and_their_samples_go_where_those_of_mcmc_go(capsys):
    x, options = records(1000), {"budget": BUDGET, "num_warmup": 20, "num_samples": 60}
    alone = sampler(SGLD(gaussian_mean), **options)
    with pytest.raises(ValueError, match="Call run first"):
        alone.get_samples()
    alone.run(KEY, x)
    both = sampler(SGLD(gaussian_mean), num_chains=3, thinning=4, **options)
    both.run(KEY, x)
    assert both.privacy.num_steps == 3 * 80
    assert "Each of 3 chains took 80 steps" in str(both.privacy)
    assert "chains" not in str(alone.privacy)
    assert both.privacy.epsilon <= 2.0
    assert both.privacy.noise_multiplier > 1.6 * alone.privacy.noise_multiplier
    by_chain = both.get_samples(group_by_chain=True)["mean"]
    assert by_chain.shape == (3, 15, DIM)
    assert both.get_samples()["mean"].shape == (45, DIM)
    assert np.abs(np.corrcoef(by_chain[:, -1])[np.triu_indices(3, 1)]).max() < 0.9999
    assert len(np.unique(by_chain[:, -1, 0])) == 3
    draws = Predictive(gaussian_mean, alone.get_samples())(KEY, np.zeros((4, DIM)))
    assert "x" not in draws or draws["x"].shape == (60, 4, DIM)
    alone.print_summary()
    assert "mean[0]" in capsys.readouterr().out


def with_param(x):
    scale = numpyro.param("scale", 1.0, constraint=dist.constraints.positive)
    mean = numpyro.sample("mean", dist.Normal(0, 1))
    with numpyro.plate("records", x.shape[0]):
        numpyro.sample("x", dist.Normal(mean, scale).expand([DIM]).to_event(1), obs=x)


def sgld(step_size=None, **changes):
    """A call that runs a chain."""
    return lambda: sampler(SGLD(gaussian_mean, step_size), **{"budget": BUDGET} | changes).run(
        KEY, records(1000)
    )


EPOCHS = {"sampler": Permutation(100), "num_chains": 4, "num_warmup": 0, "num_samples": 5}


@pytest.mark.parametrize(("call", "error", "message"), [
    (sgld(budget=None), ValueError, "Expected a budget or a noise_multiplier"),
    (sgld(clip_norm=None), TypeError, "clip_norm=None"),
    (sgld(clip_norm=math.inf), BudgetError, "finite clip_norm"),
    (sgld(num_samples=None), TypeError, "num_samples"),
    (sgld(num_samples=10, thinning=4), ValueError, "multiple of thinning=4, got 10"),
    (sgld(num_chains=0), ValueError, "num_chains=0"),
    (sgld(num_warmup=-1), ValueError, "num_warmup=-1"),
    (sgld(clip_norm=AdaptiveClip(1.0)), TypeError, "AdaptiveClip"),
    (sgld(clip_norm=-1.0), ValueError, "clip_norm=-1.0"),
    (sgld(budget=None, noise_multiplier=0.0), ValueError, "Pass a step_size"),
    (sgld(budget=1.0), TypeError, "PrivacyBudget"),
    (sgld(**EPOCHS), ValueError, "whole epochs"),
    (sgld(1e-4, **EPOCHS), ValueError, "whole epochs"),
    (sgld(lambda t: -1e-4 + 0 * t), ValueError, "finite numbers > 0"),
    (sgld(lambda t: 1e-4 * t), ValueError, "finite numbers > 0"),
    (lambda: sampler(SGLD(gaussian_mean, 1e-4), noise_multiplier=1.0).run(
        KEY, records(), init_params={"men": 0.0}), ValueError, "men"),
    (lambda: SGLD(gaussian_mean, step_size=-1.0), ValueError, "step_size"),
    (lambda: SGLD(gaussian_mean, temperature=0.0), ValueError, "temperature"),
    (lambda: SGHMC(gaussian_mean, friction=1.5), ValueError, "friction"),
    (lambda: PreconditionedSGLD(gaussian_mean, decay=1.0), ValueError, "decay"),
    (lambda: sampler(numpyro.infer.NUTS(gaussian_mean), budget=BUDGET), TypeError,
     "Expected a kernel such as SGLD"),
    (lambda: sampler(SGLD(with_param), budget=BUDGET).run(KEY, records()), UnsupportedModelError,
     "scale"),
])  # fmt: skip
def test_bad_settings_steps_and_models_are_named(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_the_preconditioner_slows_coordinates_with_large_scores():
    kernel = PreconditionedSGLD(gaussian_mean, 1e-3, decay=0.5, damping=0.1)
    zero, steady = jnp.zeros(2), jnp.array([1.0, 10.0])
    state = kernel.start(zero)
    for step in range(3):
        before = state[0]
        state = kernel.move(jnp.asarray(step), steady, jnp.asarray(0.0), zero, state)
    least = 0.1 * math.sqrt(101 / 2)
    expected = 1e-3 * steady * (least + 1) / (least + steady)
    np.testing.assert_allclose(state[0] - before, expected, rtol=1e-5)
    # Draws and privacy noise together have the variance 2 rate T, coordinate by coordinate.
    moved = kernel.move(jnp.asarray(3), zero, jnp.asarray(5.0), jnp.ones(2), state)[0] - state[0]
    rate = 1e-3 * (least + 1) / (least + steady)
    np.testing.assert_allclose(moved**2 + (5 * rate) ** 2, 2 * rate, rtol=1e-4)


class Dense(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(1)(nn.tanh(nn.Dense(8)(x)))[..., 0]


def flax_network(x, y=None):
    net = random_flax_module("net", Dense(), dist.Normal(0, 1), input_shape=(1, DIM))
    with numpyro.plate("records", x.shape[0]):
        numpyro.sample("y", dist.Normal(net(x), 0.5), obs=y)


@pytest.mark.extended
def test_networks_of_flax_are_sampled():
    x = records(1000)
    y = np.tanh(x[:, 0]).astype(np.float32)
    mcmc = sampler(SGLD(flax_network, temperature=0.3), budget=PrivacyBudget(8.0, 1e-5),
                   clip_norm=2.0, num_warmup=150, num_samples=50)  # fmt: skip
    mcmc.run(KEY, x, y)
    draws = Predictive(flax_network, mcmc.get_samples())(KEY, x)["y"]
    assert draws.shape == (50, 1000)
    assert np.mean((draws.mean(0) - y) ** 2) < 0.5 * y.var()
