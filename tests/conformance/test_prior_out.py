"""No information in, prior out: at epsilon 0.001 every driver reports the prior, and not noise."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from flat import dpmcmc, dpsep, dpsvi, grouped
from models import given, logistic, slopes
from numpyro.infer import Predictive
from numpyro.infer.autoguide import AutoDiagonalNormal, AutoMultivariateNormal

from numpyro_dp import (
    DPPBP,
    SGHMC,
    SGLD,
    DPLaplace,
    PreconditionedSGLD,
    PrivacyBudget,
    RegressionNetwork,
)
from numpyro_dp import estimators as estimators_of
from numpyro_dp.posterior.from_model import NOISE_INCLUDED
from numpyro_dp.samplers import FullBatch, Poisson

N, D = 400, 3
BUDGET = PrivacyBudget(0.001, 1e-5)
X = np.asarray(np.random.default_rng(0).normal(size=(N, D)), np.float32)


def groups(x, y=None):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([D]).to_event(1))
    scale = numpyro.sample("scale", dist.LogNormal(-1, 0.5))
    with numpyro.plate("groups", 4):
        effect = numpyro.sample("effect", dist.Normal(0, scale))
    with numpyro.plate("records", x.shape[0]):
        group = jnp.clip(jnp.floor(x[:, 0] + 2), 0, 3).astype(int)
        numpyro.sample("y", dist.Bernoulli(logits=x @ w + effect[group]), obs=y)


MODELS = {
    "logistic": logistic(),
    "counts": given(lambda x, w: dist.Poisson(jnp.exp(x @ w)), w=slopes(0.5)),
    "linear": given(
        lambda x, w, scale: dist.Normal(x @ w, scale), w=slopes(), scale=dist.LogNormal(0, 0.5)
    ),
    "groups": groups,
}


def by_svi(estimator=None, guide=AutoDiagonalNormal, sampler=FullBatch()):  # noqa: B008
    def run(model, key, x, y):
        svi = dpsvi(
            model, guide, optax.adam(1e-2), estimator=estimator, sampler=sampler, budget=BUDGET
        )
        return svi.run(key, 400, x, y, progress_bar=False).posterior

    return run


def by_sep(model, key, x, y):
    return dpsep(model, budget=BUDGET).run(key, 20, x, y, progress_bar=False).posterior


def by_chain(kernel):
    def run(model, key, x, y):
        mcmc = dpmcmc(kernel(model), num_warmup=100, num_samples=400, budget=BUDGET)
        mcmc.run(key, x, y)
        return mcmc.posterior

    return run


def by_laplace(model, key, x, y):
    return DPLaplace(model, budget=BUDGET).run(key, x, y)


ESTIMATORS = "aligned", "vanilla", "preconditioned", "natural", "aligned_natural"
DRIVERS = {
    "DPSVI": by_svi(),
    "DPSVI, Poisson": by_svi(sampler=Poisson(0.1)),
    "DPSVI, full rank": by_svi(guide=AutoMultivariateNormal),
    **{f"DPSVI, {name}": by_svi(getattr(estimators_of, name)()) for name in ESTIMATORS},
    "DPSVI, centred vanilla": by_svi(estimators_of.centred(estimators_of.vanilla())),
    "DPSEP": by_sep,
    **{f"DPMCMC, {k.__name__}": by_chain(k) for k in (SGLD, PreconditionedSGLD, SGHMC)},
    "DPLaplace": by_laplace,
}


@functools.cache
def prior_of(name):
    draws = Predictive(MODELS[name], num_samples=4000)(jax.random.key(9), X[:1])
    return {n: np.asarray(value, np.float64) for n, value in draws.items() if n != "y"}


def unconstrained(draws):
    found = {n: np.log(v) if n == "scale" else np.asarray(v, np.float64) for n, v in draws.items()}
    return np.concatenate([found[n].reshape(len(found[n]), -1) for n in sorted(found)], axis=1)


def held_out(draws, x, y):
    """Log of the mean likelihood of a record under draws of the weights of ``logistic``."""
    logits = x @ np.asarray(draws["w"], np.float64).T
    logs = np.where(y[:, None] > 0, -np.logaddexp(0, -logits), -np.logaddexp(0, logits))
    return float(np.mean(np.log(np.mean(np.exp(logs), axis=1))))


# All models by one driver of each kind, and some other drivers on one model; the rest is extended.
KINDS = "DPSVI", "DPSEP", "DPLaplace"
OTHERS = "DPSVI, full rank", "DPSVI, vanilla", "DPMCMC, SGLD", "DPMCMC, SGHMC"
PAIRS = [
    pytest.param(
        driver, model,
        marks=() if driver in KINDS or (driver in OTHERS and model == "logistic")
        else pytest.mark.extended,
    )
    for driver in DRIVERS for model in MODELS
    if not (driver == "DPSEP" and model in ("groups", "linear"))  # likelihoods of one x @ w
]  # fmt: skip


@pytest.mark.full
@pytest.mark.table
@pytest.mark.parametrize(("driver", "model"), PAIRS)
def test_the_posterior_is_the_prior(driver, model):
    rng = np.random.default_rng(3)
    # Far from the prior's mean, so that a leak of the records would show.
    y = (X @ np.ones(D) > 0).astype(int) if model in ("logistic", "groups") else None
    y = rng.poisson(np.exp(X @ np.full(D, 0.7))) if model == "counts" else y
    y = X @ np.full(D, 2.0) + rng.normal(size=N) if y is None else y
    y = np.asarray(y, np.float32 if model == "linear" else np.int32)
    draws = DRIVERS[driver](MODELS[model], jax.random.key(1), X, y).sample(jax.random.key(2), 4000)
    check_prior(unconstrained(draws), unconstrained(prior_of(model)))
    if model == "logistic":
        assert held_out(draws, X, y) > held_out(prior_of(model), X, y) - 0.01


@pytest.mark.extended
@pytest.mark.table
@pytest.mark.parametrize("options", [{}, {"ridge": 20.0, "step_size": 0.3}], ids=["plain", "ridge"])
@pytest.mark.parametrize("num_steps", [40, 200])
def test_the_posterior_of_a_network_is_the_prior(options, num_steps):
    network, rng = RegressionNetwork((5,)), np.random.default_rng(3)
    y = np.asarray(X @ np.full(D, 2.0) + rng.normal(size=N), np.float32)
    pbp = DPPBP(network, **grouped(clip_norm=0.5, sampler=FullBatch(), budget=BUDGET, **options))
    posterior = pbp.run(jax.random.key(1), num_steps, X, y, progress_bar=False).posterior
    assert NOISE_INCLUDED in posterior.notes
    draws = posterior.sample(jax.random.key(2), 4000)
    prior = Predictive(network, num_samples=4000)(jax.random.key(9), X[:1])
    vectors = [
        np.column_stack([given["weights"], np.log(given["noise_precision"])])
        for given in (draws, prior)
    ]
    check_prior(*vectors)

    def density(given):
        outputs = jax.vmap(network.apply, (0, None))(jnp.asarray(given["weights"]), X)
        scale = 1 / jnp.sqrt(given["noise_precision"])[:, None]
        logs = dist.Normal(outputs, scale).log_prob(y)
        return float(jnp.mean(jax.nn.logsumexp(logs, axis=0)))

    assert density(draws) > density(prior) - 0.01


def check_prior(found, prior):
    """Whether draws have the moments of those of the prior."""
    ratio = found.std(0) / prior.std(0)
    moved = (found.mean(0) - prior.mean(0)) / prior.std(0)
    assert ratio.min() > 0.85, ratio
    assert 0.95 < ratio.mean() < 1.1, ratio
    assert np.abs(moved).max() < 0.5, moved
    assert np.sqrt(np.mean(moved**2)) < 0.25, moved
