"""Models as applied statisticians write them: do intervals hold, and is it said where they do not?

Each kind is one model on invented records: a family, a prior, columns, a number of records, and in
some rows outcomes from another distribution than the model's ("wrong"). Latents have the values
that a row gives, which are moderate effects, not draws from the prior. "coverage" is how often a 90
% interval holds a latent: its true value, or if the model is wrong its value at the mode of the
same records without privacy. "exact" is that of the posterior without privacy. "distance" is from
that mode, as a root mean square in its standard deviations, and "width" the ratio of standard
deviations (medians over latents, then means over sets). A set is "far" if a latent is more than 4
reported standard deviations away, and "silent" if none of its findings is BAD then.

    python benchmarks/believe/wild.py --json wild.json --each sets.jsonl
    python benchmarks/believe/wild.py --sets 4 --epsilons 1 --kinds "probit" "change point"
"""

import collections
import concurrent.futures
import json
import multiprocessing
import os
import pathlib
import sys
import tempfile
import time
import warnings

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from common import experiment_parser, save
from coverage import newton
from jax.flatten_util import ravel_pytree
from numpyro.infer import MCMC, NUTS
from numpyro.infer.util import initialize_model, unconstrain_fn

from numpyro_dp import DPLaplace, PrivacyBudget, UnsupportedModelError
from numpyro_dp.posterior import PosteriorWarning

S = numpyro.sample
KINDS = {}
DERIVED = {}  # what is judged in place of the latents: draws by site -> values by name
Z90 = 1.6448536


def kind(name, number=3000, wrong=False):
    def add(make):
        KINDS[name] = make, number, wrong
        return make

    return add


def normal(scale=1.0):
    return lambda dim: dist.Normal(0, scale).expand([dim]).to_event(1)


def regression(outcome, prior=None, **others):
    """A model of weights, further latents and an outcome ``(x @ w, latents) -> distribution``."""
    prior = prior or normal()

    def model(X, y=None):
        w = S("w", prior(X.shape[1]))
        latents = {name: S(name, fn) for name, fn in others.items()}
        with numpyro.plate("records", X.shape[0]):
            S("y", outcome(X @ w, latents), obs=y)

    return model


def design(rng, n, dim, *, intercept=True, scales=None, heavy=False, rho=0.0, rare=None):
    x = rng.standard_t(4, (n, dim)) / np.sqrt(2) if heavy else rng.standard_normal((n, dim))
    x = x @ np.linalg.cholesky(rho + (1 - rho) * np.eye(dim)).T
    if rare is not None:
        x[:, -2:] = rng.random((n, 2)) < rare
    if scales is not None:
        x = x * scales
    if intercept:
        x[:, 0] = 1
    return x.astype(np.float32)


def effects(rng, dim, size=0.5):
    return size * rng.standard_normal(dim)


def bernoulli(eta, _):
    return dist.Bernoulli(logits=eta)


def poisson(eta, _):
    return dist.Poisson(jnp.exp(eta))


def linear(eta, latents):
    return dist.Normal(eta, latents["s"])


LOGIT, COUNTS = regression(bernoulli), regression(poisson, normal(0.7))
LINEAR = regression(linear, s=dist.HalfNormal(1.0))


def simple(name, model, dim=5, size=0.5, number=3000, truth=None, **columns):
    def make(rng, n):
        x, w = design(rng, n, dim, **columns), effects(rng, dim, size)
        if (scales := columns.get("scales")) is not None:
            w = w / scales
        return model, (x,), {"w": w, **(truth or {})}

    KINDS[name] = make, number, False


ORDERED = dist.TransformedDistribution(
    dist.Normal(0, 1.5).expand([3]).to_event(1), dist.transforms.OrderedTransform()
)
CUTS = {"c": np.array([-1.0, 0.2, 1.3])}


def phi(eta):
    return jnp.clip(jax.scipy.stats.norm.cdf(eta), 1e-6, 1 - 1e-6)


def zero_inflated(eta, latents):
    return dist.ZeroInflatedPoisson(gate=latents["p"], rate=jnp.exp(eta))


simple("logistic", LOGIT)
simple("logistic, 60 records", LOGIT, 3, 0.7, 60)
simple("logistic, 500 records", LOGIT, 5, 0.7, 500)
simple("logistic, 100,000 records", LOGIT, 10, 0.5, 100_000)
simple("logistic, a million records", LOGIT, 5, 0.5, 1_000_000)
simple("logistic, 20 columns", LOGIT, 20, 0.5, 5000)
simple("logistic, 60 columns", LOGIT, 60, 0.25, 10_000)
simple("logistic, 150 columns", LOGIT, 150, 0.12, 40_000)
simple("logistic, large effects", LOGIT, 20, 1.0, 10_000)
simple("logistic, one latent", LOGIT, 1, 0.8, 2000)
simple("logistic, heavy columns", LOGIT, 8, 0.5, heavy=True)
simple("logistic, collinear columns", LOGIT, 8, 0.5, rho=0.95)
simple("logistic, rare columns", LOGIT, 6, 0.7, rare=0.01)
simple("logistic, scales .2 to 5", LOGIT, 6, 0.5, scales=np.geomspace(0.2, 5, 6), intercept=False)
simple("logistic, Normal(0, 10)", regression(bernoulli, normal(10.0)), 6)
simple("logistic, Normal(0, 100)", regression(bernoulli, normal(100.0)), 6)
simple("logistic, Cauchy(2.5)",
       regression(bernoulli, lambda d: dist.Cauchy(0, 2.5).expand([d]).to_event(1)))  # fmt: skip
simple("logistic, StudentT(4)",
       regression(bernoulli, lambda d: dist.StudentT(4, 0, 1).expand([d]).to_event(1)))  # fmt: skip
simple("logistic, 30 columns, Laplace prior",
       regression(bernoulli, lambda d: dist.Laplace(0, 0.5).expand([d]).to_event(1)), 30, 0.3,
       8000)  # fmt: skip
simple("probit", regression(lambda eta, _: dist.Bernoulli(probs=phi(eta))))
simple("complementary log-log",
       regression(lambda eta, _: dist.Bernoulli(
           probs=jnp.clip(1 - jnp.exp(-jnp.exp(eta)), 1e-6, 1 - 1e-6))))  # fmt: skip
simple("ordinal", regression(lambda eta, z: dist.OrderedLogistic(eta, z["c"]), c=ORDERED),
       truth=CUTS, intercept=False)  # fmt: skip
FREE = dist.TransformedDistribution(
    dist.Normal(0, 1.5).expand([6]).to_event(1), dist.transforms.OrderedTransform()
)
SEVEN = {"c": np.array([-1.5, -0.8, -0.2, 0.3, 0.9, 1.6])}
simple("ordinal, seven levels", regression(lambda eta, z: dist.OrderedLogistic(eta, z["c"]),
                                           c=FREE), truth=SEVEN, intercept=False)  # fmt: skip
simple("ordinal probit, seven levels", regression(
    lambda eta, z: dist.Categorical(logits=jnp.log(jnp.diff(
        jax.scipy.stats.norm.cdf(z["c"] - eta[:, None]), prepend=0, append=1) + 1e-6)),
    c=FREE), truth=SEVEN, intercept=False)  # fmt: skip


@kind("two components")
def components(rng, n):
    def model(x, y=None):
        p, s = S("p", dist.Beta(2.0, 2.0)), S("s", dist.HalfNormal(1.0).expand([2]).to_event(1))
        base = dist.Normal(0, 2.0).expand([2]).to_event(1)
        m = S("m", dist.TransformedDistribution(base, dist.transforms.OrderedTransform()))
        with numpyro.plate("records", x.shape[0]):
            S("y", dist.MixtureSameFamily(
                dist.Categorical(probs=jnp.stack([p, 1 - p])), dist.Normal(m, s)
            ), obs=y)  # fmt: skip

    truth = {"p": 0.4, "m": np.array([-1.0, 1.5]), "s": np.array([0.6, 0.9])}
    return model, (np.zeros(n, np.float32),), truth


simple("binomial", regression(lambda eta, _: dist.Binomial(10, logits=eta)))
simple("beta-binomial", regression(
    lambda eta, z: dist.BetaBinomial(z["k"] * jax.nn.sigmoid(eta), z["k"] * jax.nn.sigmoid(-eta),
                                     12),
    k=dist.LogNormal(1.5, 0.7)), truth={"k": 5.0})  # fmt: skip
simple("Poisson", COUNTS, size=0.3)
simple("Poisson, Normal(0, 10)", regression(poisson, normal(10.0)), size=0.3)
simple("Poisson, 30 columns", COUNTS, 30, 0.15, 8000)
simple("negative binomial", regression(
    lambda eta, z: dist.NegativeBinomial2(jnp.exp(1 + eta), z["k"]), normal(0.7),
    k=dist.LogNormal(0.5, 0.7)), size=0.3, truth={"k": 2.0})  # fmt: skip
simple("zero-inflated Poisson", regression(zero_inflated, normal(0.7), p=dist.Beta(2, 4)),
       size=0.3, truth={"p": 0.3})  # fmt: skip
simple("geometric", regression(lambda eta, _: dist.Geometric(logits=eta)), size=0.3)
simple("linear", LINEAR, truth={"s": 0.8})
simple("linear, s = .1", LINEAR, truth={"s": 0.1})
simple("linear, 60 columns", LINEAR, 60, 0.3, 8000, truth={"s": 0.8})
simple("linear, textbook priors", regression(linear, normal(10.0), s=dist.HalfCauchy(5.0)),
       truth={"s": 1.0})  # fmt: skip
simple("linear, variance InverseGamma",
       regression(lambda eta, z: dist.Normal(eta, jnp.sqrt(z["v"])), v=dist.InverseGamma(3.0, 2.0)),
       truth={"v": 0.8})  # fmt: skip
simple("Student-t", regression(lambda eta, z: dist.StudentT(4.0, eta, z["s"]),
                               s=dist.HalfNormal(1.0)), truth={"s": 0.7})  # fmt: skip
simple("Laplace noise", regression(lambda eta, z: dist.Laplace(eta, z["s"]),
                                   s=dist.HalfNormal(1.0)), truth={"s": 0.7})  # fmt: skip
simple("log-normal", regression(lambda eta, z: dist.LogNormal(eta, z["s"]),
                                s=dist.HalfNormal(1.0)), truth={"s": 0.5})  # fmt: skip
simple("gamma", regression(lambda eta, z: dist.Gamma(z["k"], z["k"] * jnp.exp(-eta)), normal(0.7),
                           k=dist.LogNormal(0.5, 0.7)), size=0.4, truth={"k": 2.0})  # fmt: skip
simple("beta", regression(
    lambda eta, z: dist.Beta(z["k"] * jax.nn.sigmoid(eta), z["k"] * jax.nn.sigmoid(-eta)),
    k=dist.LogNormal(1.5, 0.7)), truth={"k": 6.0})  # fmt: skip
simple("exponential", regression(lambda eta, _: dist.Exponential(jnp.exp(-eta)), normal(0.7)))
simple("Weibull", regression(lambda eta, z: dist.Weibull(jnp.exp(eta), z["k"]), normal(0.7),
                             k=dist.LogNormal(0.3, 0.5)), truth={"k": 1.5})  # fmt: skip


@kind("survival, half censored")
def survival(rng, n):
    def model(X, left, t=None):
        w, k = S("w", normal(0.7)(X.shape[1])), S("k", dist.LogNormal(0.3, 0.5))
        with numpyro.plate("records", X.shape[0]):
            S("y", dist.RightCensoredDistribution(dist.Weibull(jnp.exp(X @ w), k), left), obs=t)

    x, w = design(rng, n, 5), effects(rng, 5)
    time, until = np.exp(x @ w) * rng.weibull(1.5, n), np.exp(x @ w) * rng.exponential(1.2, n)
    found = np.minimum(time, until)
    return model, (x, (until < time).astype(int)), {"w": w, "k": 1.5}, found


@kind("linear, a fifth below the limit")
def tobit(rng, n):
    def model(X, below, y=None):
        w, s = S("w", normal()(X.shape[1])), S("s", dist.HalfNormal(1.0))
        with numpyro.plate("records", X.shape[0]):
            S("y", dist.LeftCensoredDistribution(dist.Normal(X @ w, s), below), obs=y)

    x, w = design(rng, n, 5), effects(rng, 5)
    y = x @ w + 0.7 * rng.standard_normal(n)
    limit = w[0] - 0.8
    return model, (x, (y < limit).astype(int)), {"w": w, "s": 0.7}, np.maximum(y, limit)


BANDS = np.array([-1.0, -0.3, 0.3, 1.0, 2.0])
simple("incomes in six bands", regression(
    lambda eta, z: dist.Categorical(logits=jnp.log(jnp.diff(
        jax.scipy.stats.norm.cdf((BANDS - eta[:, None]) / z["s"]), prepend=0, append=1
    ) + 1e-6)), s=dist.HalfNormal(1.0)), truth={"s": 0.7})  # fmt: skip


@kind("shares of ten, three classes")
def multinomial(rng, n):
    def model(X, y=None):
        w = S("w", dist.Normal(0, 1).expand([X.shape[1], 3]).to_event(2))
        with numpyro.plate("records", X.shape[0]):
            S("y", dist.Multinomial(10, logits=X @ w), obs=y)

    return model, (design(rng, n, 4),), {"w": 0.5 * rng.standard_normal((4, 3))}


@kind("horseshoe, 60 columns", 8000)
def horseshoe(rng, n):
    def model(X, y=None):
        tau = S("tau", dist.HalfCauchy(0.1))
        local = S("local", dist.HalfCauchy(1.0).expand([X.shape[1]]).to_event(1))
        z = S("z", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
        with numpyro.plate("records", X.shape[0]):
            S("y", dist.Bernoulli(logits=X @ (z * local * tau)), obs=y)

    local = np.where(np.arange(60) < 6, 8.0, 0.3)
    truth = {"tau": 0.1, "local": local, "z": np.where(local > 1, np.sign(rng.normal(size=60)), 0)}
    return model, (design(rng, n, 60, intercept=False),), truth


DERIVED["horseshoe, 60 columns"] = lambda draws: {
    "w": draws["z"] * draws["local"] * np.asarray(draws["tau"])[..., None]
}


@kind("four classes")
def four_classes(rng, n):
    def model(X, y=None):
        w = S("w", dist.Normal(0, 1).expand([X.shape[1], 4]).to_event(2))
        with numpyro.plate("records", X.shape[0]):
            S("y", dist.Categorical(logits=X @ w), obs=y)

    return model, (design(rng, n, 4),), {"w": 0.7 * rng.standard_normal((4, 4))}


@kind("two outcomes")
def two_outcomes(rng, n):
    def model(X, y=None):
        w = S("w", dist.Normal(0, 1).expand([X.shape[1], 2]).to_event(2))
        s = S("s", dist.HalfNormal(1.0).expand([2]).to_event(1))
        with numpyro.plate("records", X.shape[0]):
            S("y", dist.Normal(X @ w, s).to_event(1), obs=y)

    truth = {"w": 0.5 * rng.standard_normal((4, 2)), "s": np.array([0.5, 1.0])}
    return model, (design(rng, n, 4),), truth


def in_groups(likelihood, slopes):
    def model(X, group, y=None):
        w = S("w", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
        t = S("t", dist.HalfNormal(1.0))
        others = {"s": S("s", dist.HalfNormal(1.0))} if likelihood is linear else {}
        with numpyro.plate("groups", 12):
            b = S("b", dist.Normal(0, t))
            if slopes:
                c = S("c", dist.Normal(0, 0.5))
        eta = X @ w + b[group] + (c[group] * X[:, 1] if slopes else 0)
        with numpyro.plate("records", X.shape[0]):
            S("y", likelihood(eta, others), obs=y)

    def make(rng, n):
        truth = {"w": effects(rng, 3), "t": 0.6, "b": 0.6 * rng.standard_normal(12)}
        truth |= {"s": 0.6} if likelihood is linear else {}
        truth |= {"c": 0.4 * rng.standard_normal(12)} if slopes else {}
        return model, (design(rng, n, 3), rng.integers(0, 12, n)), truth

    return make


KINDS["groups, logistic"] = in_groups(bernoulli, False), 4000, False
KINDS["groups, normal"] = in_groups(linear, False), 4000, False
KINDS["varying slopes, logistic"] = in_groups(bernoulli, True), 4000, False
KINDS["varying slopes, normal"] = in_groups(linear, True), 4000, False


@kind("crossed effects")
def crossed(rng, n):
    def model(row, column, y=None):
        a = S("a", dist.Normal(0, 1.0))
        with numpyro.plate("rows", 10):
            r = S("r", dist.Normal(0, 0.7))
        with numpyro.plate("columns", 8):
            c = S("c", dist.Normal(0, 0.7))
        with numpyro.plate("records", row.shape[0]):
            S("y", dist.Bernoulli(logits=a + r[row] + c[column]), obs=y)

    truth = {"a": 0.2, "r": 0.6 * rng.standard_normal(10), "c": 0.6 * rng.standard_normal(8)}
    return model, (rng.integers(0, 10, n), rng.integers(0, 8, n)), truth


@kind("item response", 6000)
def item_response(rng, n):
    def model(person, item, y=None):
        with numpyro.plate("persons", 30):
            able = S("able", dist.Normal(0, 1.0))
        with numpyro.plate("items", 10):
            hard = S("hard", dist.Normal(0, 1.0))
        with numpyro.plate("records", person.shape[0]):
            S("y", dist.Bernoulli(logits=able[person] - hard[item]), obs=y)

    truth = {"able": rng.standard_normal(30), "hard": rng.standard_normal(10)}
    return model, (rng.integers(0, 30, n), rng.integers(0, 10, n)), truth


@kind("Bradley-Terry", 4000)
def bradley_terry(rng, n):
    def model(home, away, y=None):
        with numpyro.plate("teams", 12):
            s = S("s", dist.Normal(0, 1.0))
        with numpyro.plate("records", home.shape[0]):
            S("y", dist.Bernoulli(logits=s[home] - s[away]), obs=y)

    home = rng.integers(0, 12, n)
    away = (home + rng.integers(1, 12, n)) % 12
    return model, (home, away), {"s": rng.standard_normal(12)}


@kind("change point")
def change_point(rng, n):
    def model(t, y=None):
        a, b = S("a", dist.Normal(0, 1.0)), S("b", dist.Normal(0, 1.0))
        c = S("c", dist.Normal(0.5, 0.2))
        with numpyro.plate("records", t.shape[0]):
            S("y", dist.Poisson(jnp.exp(a + b * jax.nn.sigmoid((t - c) * 10))), obs=y)

    return model, (rng.random(n).astype(np.float32),), {"a": 0.5, "b": 1.0, "c": 0.4}


@kind("dose and response")
def dose(rng, n):
    def model(x, y=None):
        top = S("top", dist.Beta(2.0, 2.0))
        middle, steep = S("middle", dist.Normal(0, 1.0)), S("steep", dist.LogNormal(0, 0.5))
        with numpyro.plate("records", x.shape[0]):
            S("y", dist.Bernoulli(probs=top * jax.nn.sigmoid(steep * (x - middle))), obs=y)

    x = rng.standard_normal(n).astype(np.float32)
    return model, (x,), {"top": 0.8, "middle": 0.2, "steep": 1.5}


@kind("rare events")
def rare(rng, n):
    def model(x, y=None):
        p = S("p", dist.Beta(1.0, 1.0).expand([2]).to_event(1))
        with numpyro.plate("records", x.shape[0]):
            S("y", dist.Bernoulli(probs=p[x]), obs=y)

    return model, (rng.integers(0, 2, n),), {"p": np.array([0.01, 0.05])}


@kind("far intercept")
def far_intercept(rng, n):
    return LOGIT, (design(rng, n, 4),), {"w": np.array([-4.0, 0.5, -0.5, 0.3])}


@kind("prior in conflict")
def conflict(rng, n):
    model = regression(bernoulli, normal(0.3))
    return model, (design(rng, n, 4),), {"w": np.array([1.0, -1.0, 0.8, 0.0])}


@kind("spline")
def spline(rng, n):
    x = rng.random(n)
    knots = np.linspace(0, 1, 10)
    basis = np.maximum(0, 1 - np.abs(x[:, None] - knots) * 9).astype(np.float32)
    model = regression(linear, s=dist.HalfNormal(1.0))
    return model, (basis,), {"w": np.sin(5 * knots), "s": 0.4}


@kind("smooth function of 20 waves")
def waves(rng, n):
    x, scale = rng.random(n), np.exp(-0.5 * (np.arange(1, 21) * 0.25) ** 2)
    basis = np.sqrt(2) * np.sin(np.pi * np.outer(x, np.arange(1, 21))) * np.sqrt(scale)
    return LINEAR, (basis.astype(np.float32),), {"w": rng.standard_normal(20), "s": 0.4}


@kind("interactions, 21 columns", 6000)
def interactions(rng, n):
    x = rng.standard_normal((n, 6))
    both = [x[:, a] * x[:, b] for a in range(6) for b in range(a)]
    x = np.column_stack([x, *both]).astype(np.float32)
    return LOGIT, (x,), {"w": 0.3 * rng.standard_normal(21)}


@kind("exposure")
def exposure(rng, n):
    def model(X, time, y=None):
        w = S("w", dist.Normal(0, 0.7).expand([X.shape[1]]).to_event(1))
        with numpyro.plate("records", X.shape[0]):
            S("y", dist.Poisson(time * jnp.exp(X @ w)), obs=y)

    time = rng.uniform(0.2, 3, n).astype(np.float32)
    return model, (design(rng, n, 4), time), {"w": effects(rng, 4, 0.3)}


@kind("two normals")
def two_normals(rng, n):
    def model(x, y=None):
        m = S("m", dist.Normal(jnp.array([-1.0, 1.0]), 1.0).to_event(1))
        p, s = S("p", dist.Beta(2.0, 2.0)), S("s", dist.HalfNormal(1.0))
        parts = dist.Normal(m + 0 * x[:, None], s)
        which = dist.Categorical(probs=jnp.stack([p, 1 - p]))
        with numpyro.plate("records", x.shape[0]):
            S("y", dist.MixtureSameFamily(which, parts), obs=y)

    return model, (np.zeros(n, np.float32),), {"m": np.array([-1.5, 1.5]), "p": 0.4, "s": 0.7}


def wrong(name, model, outcomes, number=3000, size=0.4, dim=4, **truth):
    """A model whose outcomes are ``(x @ w, rng) -> y``."""

    def make(rng, n):
        x, w = design(rng, n, dim), effects(rng, dim, size)
        return model, (x,), {"w": w, **truth}, outcomes(x @ w, rng)

    KINDS[name] = make, number, True


def spread_counts(eta, rng):
    return rng.poisson(np.exp(eta) * rng.gamma(1.0, 1.0, len(eta)))


def few_zeros(eta, rng):
    return rng.poisson(np.exp(eta)) * (rng.random(len(eta)) > 0.3)


def heavy_noise(eta, rng):
    return eta + rng.standard_t(3, len(eta)) / np.sqrt(3)


def outliers(eta, rng):
    return eta + np.where(rng.random(len(eta)) < 0.01, 10, 1) * rng.standard_normal(len(eta))


def another_link(eta, rng):
    return (rng.random(len(eta)) < 1 - np.exp(-np.exp(eta))).astype(int)


def unequal_noise(eta, rng):
    return eta + np.exp(0.5 * eta) * rng.standard_normal(len(eta))


wrong("wrong: counts that vary more", COUNTS, spread_counts)
wrong("wrong: counts that vary more, 30,000", COUNTS, spread_counts, 30_000)
wrong("wrong: too many zeros", COUNTS, few_zeros)
wrong("wrong: Student-t noise", LINEAR, heavy_noise, s=1.0)
wrong("wrong: Student-t noise, 30,000", LINEAR, heavy_noise, 30_000, s=1.0)
wrong("wrong: 1 % outliers", LINEAR, outliers, s=1.0)
wrong("wrong: noise grows", LINEAR, unequal_noise, s=1.0)
wrong("wrong: link", LOGIT, another_link)


# Too hard for most budgets, to see what is said about a posterior that is wrong.
TEXTBOOK = regression(linear, normal(10.0), s=dist.HalfCauchy(5.0))
simple("hard: logistic, 60 large effects", LOGIT, 60, 1.0, 10_000)
simple("hard: logistic, 100 columns", LOGIT, 100, 0.5, 3000)
simple("hard: linear, s = .003", LINEAR, truth={"s": 0.003})
simple("hard: linear, 60 columns, s = .1", LINEAR, 60, 0.5, truth={"s": 0.1})
simple("hard: linear, 40 columns, textbook", TEXTBOOK, 40, 0.5, truth={"s": 0.2})
simple("hard: Poisson, effects of 1.5", regression(poisson, normal(10.0)), 8, 1.5)


def records(name, seed):
    """The model, its arguments with outcomes, and the true latents."""
    make, number, _ = KINDS[name]
    rng = np.random.default_rng([seed, sorted(KINDS).index(name)])
    model, args, truth, *outcomes = make(rng, number)
    args = tuple(jnp.asarray(x) for x in args)
    if outcomes:
        (y,) = outcomes
        y = jnp.asarray(y, jnp.float32 if y.dtype.kind == "f" else jnp.int32)
        return model, (*args, y), truth
    given = {site: jnp.asarray(value, jnp.float32) for site, value in truth.items()}
    fixed = numpyro.handlers.substitute(model, data=given)
    seeded = numpyro.handlers.seed(fixed, jax.random.key(int(rng.integers(2**31))))
    return model, (*args, numpyro.handlers.trace(seeded).get_trace(*args)["y"]["value"]), truth


class Kind:
    """One kind of model, with the posteriors of its sets without privacy."""

    def __init__(self, name, seeds):
        self.name, self.sets = name, {seed: records(name, seed) for seed in seeds}
        self._derived = DERIVED.get(name, lambda draws: draws)
        self.model, args, _ = next(iter(self.sets.values()))
        info = initialize_model(
            jax.random.key(0), self.model, model_args=args, dynamic_args=True, validate_grad=False
        )
        self._names, self._postprocess = list(info.param_info.z), info.postprocess_fn
        _, self._unravel = ravel_pytree(info.param_info.z)

        def value(flat, args):
            return info.potential_fn(*args)(self._unravel(flat))

        self._value, self.gradient = value, jax.jit(jax.grad(value))
        self._hessian = jax.jit(jax.hessian(value))
        self._exact = {seed: self._at_the_mode(*each[1:]) for seed, each in self.sets.items()}

    def _start(self, args, truth):
        """The true latents, unconstrained."""
        values = {n: jnp.asarray(v, jnp.float32) for n, v in truth.items()}
        start = unconstrain_fn(self.model, args, {}, values)
        return ravel_pytree({n: start[n] for n in self._names})[0]

    def mode(self, args, truth):
        """The unconstrained mode without privacy, and the Hessian there."""
        start = self._start(args, truth)
        return newton(lambda z: self.gradient(z, args), lambda z: self._hessian(z, args), start)

    def _at_the_mode(self, args, truth):
        """Mean and standard deviation of each latent in the posterior without privacy."""
        flat = self._start(args, truth)
        try:
            if self.name in DERIVED:  # products of latents are not normal
                raise np.linalg.LinAlgError
            flat, hessian = self.mode(args, truth)
            root = np.linalg.cholesky(np.linalg.inv(hessian))
            drawn = np.random.default_rng(0).standard_normal((4000, len(root))) @ root.T
            drawn = flat + jnp.asarray(drawn, "f4")
        except np.linalg.LinAlgError:  # a density with edges, such as Laplace's, has no such matrix
            kernel = NUTS(potential_fn=lambda z: self._value(z, args))
            mcmc = MCMC(kernel, num_warmup=300, num_samples=400, progress_bar=False)
            mcmc.run(jax.random.key(0), init_params=flat)
            drawn = mcmc.get_samples()
        draws = jax.vmap(lambda z: self._postprocess(*args)(self._unravel(z)))(drawn)
        draws = self._derived(draws)
        return ({n: np.asarray(x).mean(0) for n, x in draws.items()},
                {n: np.asarray(x).std(0) for n, x in draws.items()})  # fmt: skip

    def at(self, epsilon):
        """The results of all sets."""
        laplace = DPLaplace(self.model, budget=PrivacyBudget(epsilon))
        for seed in self.sets:
            given = {"kind": self.name, "epsilon": epsilon, "set": seed}
            try:
                yield given | self._one(laplace, seed)
            except UnsupportedModelError as refused:
                yield given | {"refused": str(refused)[:80]}

    def _one(self, laplace, seed):
        _, args, truth = self.sets[seed]
        begin = time.perf_counter()
        posterior = laplace.run(jax.random.key(seed), *args, progress_bar=False)
        seconds, truth = time.perf_counter() - begin, self._derived(truth)
        names = sorted(truth)
        draws = self._derived(posterior.sample(jax.random.key(0), 4000))
        draws = np.concatenate([np.reshape(draws[n], (4000, -1)) for n in names], 1, dtype=float)
        mean, sd = draws.mean(0), draws.std(0)
        lower, upper = np.quantile(draws, [0.05, 0.95], axis=0)
        mode, own = (joined(each, names) for each in self._exact[seed])
        aim = mode if KINDS[self.name][2] else joined(truth, names)
        bad = sorted({each.name for each in posterior.diagnose().bad})
        far = bool(np.max(np.abs(mean - aim) / sd) > 4)
        return {
            "coverage": float(np.mean((lower < aim) & (aim < upper))),
            "exact": float(np.mean(np.abs(mode - aim) < Z90 * own)),
            "distance": float(np.sqrt(np.median(((mean - mode) / own) ** 2))),
            "width": float(np.median(sd / own)), "least width": float(np.min(sd / own)),
            "far": far, "silent": far and not bad,
            "warned": bool(bad), "seconds": seconds, "findings": bad,
        }  # fmt: skip


def joined(values, names):
    return np.concatenate([np.ravel(np.asarray(values[name], float)) for name in names])


def results_of(name, seeds, epsilons):
    warnings.simplefilter("ignore", PosteriorWarning)
    of_kind = Kind(name, seeds)
    found = [each for epsilon in epsilons for each in of_kind.at(epsilon)]
    jax.clear_caches()
    return found


def row_of(name, epsilon, found):
    """A row of the table from its sets."""
    row = {"kind": name, "epsilon": epsilon, "records": KINDS[name][1], "sets": len(found)}
    if "refused" in found[0]:
        return row | {"refused": found[0]["refused"]}
    row |= {key: float(np.mean([each.get(key, np.nan) for each in found]))
            for key in ("coverage", "exact", "distance", "width", "least width")}  # fmt: skip
    row |= {key: int(np.sum([each[key] for each in found])) for key in ("far", "silent", "warned")}
    row["seconds"] = float(np.median([each["seconds"] for each in found]))
    row["findings"] = sorted({name for each in found for name in each["findings"]})
    return row


def total_of(epsilon, rows):
    """How many sets were far, and how many of these silent, without the kinds that are too hard."""
    own = [row for row in rows if row["epsilon"] == epsilon and "refused" not in row
           and not row["kind"].startswith("hard")]  # fmt: skip
    found = {key: sum(row[key] for row in own) for key in ("sets", "far", "silent", "warned")}
    right = [row["coverage"] for row in own if not KINDS[row["kind"]][2]]
    return {"epsilon": epsilon} | found | {"coverage": float(np.mean(right))}


def told(sets):
    """What findings say of right and of wrong posteriors, for each budget."""
    rows = []
    for epsilon in sorted({each["epsilon"] for each in sets}):
        for far in (False, True):
            alike = [each for each in sets if each["epsilon"] == epsilon and each.get("far") == far]
            names = collections.Counter(name for each in alike for name in each["findings"])
            rows.append({
                "epsilon": epsilon, "posterior": "wrong" if far else "right", "sets": len(alike),
                "warned": sum(each["warned"] for each in alike),
                "findings": [f"{name} {number}" for name, number in names.most_common()],
            })  # fmt: skip
    return rows


def main():
    parser = experiment_parser(__doc__, "three kinds, 1 set")
    parser.add_argument("--sets", type=int, default=12, help="data sets of a kind")
    parser.add_argument("--kinds", nargs="*", default=list(KINDS))
    parser.add_argument("--epsilons", nargs="*", type=float, default=[0.3, 1.0, 3.0])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--each", default=os.devnull, help="a line a set; a run goes on with it")
    args = parser.parse_args()
    sets, names = (1, args.kinds[:3]) if args.quick else (args.sets, args.kinds)
    done = pathlib.Path(args.each)
    each = [json.loads(line) for line in done.read_text().splitlines()] if done.is_file() else []
    left = {}
    for name in names:
        known = collections.Counter(one["set"] for one in each if one["kind"] == name)
        left[name] = [seed for seed in range(sets) if known[seed] < len(args.epsilons)]
    with tempfile.TemporaryDirectory() as programs:
        # The processes inherit these: one core each, and a folder of programs that they share.
        os.environ |= {
            "JAX_COMPILATION_CACHE_DIR": programs,
            "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1",
            "OPENBLAS_NUM_THREADS": "1",
        }
        context = multiprocessing.get_context("spawn")
        pool = concurrent.futures.ProcessPoolExecutor(args.processes, context)
        jobs = [pool.submit(results_of, name, seeds, args.epsilons)
                for name, seeds in left.items() if seeds]  # fmt: skip
        for job in concurrent.futures.as_completed(jobs):
            each += job.result()
            with done.open("a") as file:
                file.writelines(json.dumps(one) + "\n" for one in job.result())
            for epsilon in args.epsilons:
                found = [one for one in job.result() if one["epsilon"] == epsilon]
                row = row_of(found[0]["kind"], epsilon, found)
                print({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()},
                      flush=True)  # fmt: skip
        pool.shutdown()
    groups = {(name, epsilon): [] for name in names for epsilon in args.epsilons}
    each = [one for one in each if (one["kind"], one["epsilon"]) in groups]
    for one in each:
        groups[one["kind"], one["epsilon"]].append(one)
    rows = [row_of(*key, found) for key, found in groups.items()]
    totals = [total_of(epsilon, rows) for epsilon in args.epsilons]
    save(args, rows=rows, totals=totals, told=told(each))


if __name__ == "__main__":
    main()
