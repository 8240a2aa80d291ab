"""Mixtures of normals: exact sites, DP-SEP from a start without data, and DP-EM."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from flat import grouped
from gaussian import gaussian
from jax.scipy.stats import multivariate_normal
from numpyro.infer import MCMC, NUTS, init_to_value
from scipy.optimize import linear_sum_assignment
from sklearn.mixture import GaussianMixture

from numpyro_dp import DPEM, DPSEP, SEP, Privacy, PrivacyBudget, UnsupportedModelError
from numpyro_dp.methods.em.statistics import expected_statistics
from numpyro_dp.methods.ep.families import beta, diagonal_normal, normal
from numpyro_dp.methods.ep.problem import check_conjugate, make_problem
from numpyro_dp.methods.ep.sites import evidence, normal_mixture
from numpyro_dp.model.public import declare
from numpyro_dp.model.structure import read_model
from numpyro_dp.samplers import FullBatch, Poisson
from numpyro_dp.sums.bounded import bounded_sum

KEY = jax.random.key(0)
BUDGET = PrivacyBudget(1.0, 1e-5)
PROBS = np.array([0.5, 0.3, 0.2])


def mixture(x, number=4, scale=0.5, probs=None):
    size = x.shape[1]
    means = numpyro.sample("means", dist.Normal(0, 1).expand([number, size]).to_event(2))
    weights = jnp.full(number, 1 / number) if probs is None else jnp.asarray(probs)
    each = dist.Normal(means, scale).to_event(1)
    with numpyro.plate("records", x.shape[0]):  # MixtureSameFamily refuses these in numpyro 0.20
        terms = jnp.log(weights) + each.log_prob(x[:, None])
        numpyro.factor("x", jax.nn.logsumexp(terms, axis=-1))


def three(x):
    return mixture(x, 3, 0.7, PROBS)


def first(x, *_):
    return x[0]


def simulate(seed, number=1000):
    rng = np.random.default_rng(seed)
    means = rng.normal(size=(4, 4))
    x = means[rng.integers(4, size=number)] + 0.5 * rng.normal(size=(number, 4))
    return x.astype(np.float32), means


def posterior_means(params, number=4):
    precision = np.asarray(params["auto_precision"], np.float64)
    covariance = np.linalg.inv(precision if precision.ndim == 2 else np.diag(precision))
    return (covariance @ np.asarray(params["auto_linear"], np.float64)).reshape(number, -1)


def apart(found, expected):
    """Distance of two sets of means, matched."""
    squares = ((found[:, None] - expected[None]) ** 2).sum(-1)
    return math.sqrt(squares[linear_sum_assignment(squares)].sum())


@pytest.mark.extended
@pytest.mark.parametrize(
    "family", [pytest.param(normal, marks=pytest.mark.extended), diagonal_normal]
)
def test_sites_are_those_of_the_closed_form_of_the_evidence(family):
    """Differentiated automatically, of a cavity whose components are correlated."""
    x = np.random.default_rng(0).normal(size=(5, 2)).astype(np.float32)
    structure = check_conjugate(read_model(three, (x,), {}, None, declare("captured")))
    problem = make_problem(three, structure, family, (), KEY)

    def log_evidence(mean, covariance, x):
        full = covariance if covariance.ndim == 2 else jnp.diag(covariance)
        each = [
            multivariate_normal.logpdf(
                x[0], mean[k : k + 2], full[k : k + 2, k : k + 2] + 0.49 * jnp.eye(2)
            )
            for k in (0, 2, 4)
        ]
        return jax.nn.logsumexp(jnp.log(PROBS) + jnp.stack(each))

    root = np.random.default_rng(1).normal(size=(6, 6))
    precision = {
        normal: root @ root.T / 6 + np.eye(6), diagonal_normal: 1 + np.arange(6.0),
    }[family]  # fmt: skip
    cavity = {
        "linear": jnp.asarray(np.random.default_rng(2).normal(size=6), jnp.float32),
        "precision": jnp.asarray(precision, jnp.float32),
    }
    kinds = normal_mixture(first, 0.7, PROBS), evidence(log_evidence)
    kinds[0].check(problem)
    for row in range(5):
        found, expected = (
            site.approximate(site.prepare(KEY, cavity), (jnp.asarray(x[row]),))
            for site in (kind.build(problem) for kind in kinds)
        )
        for name in expected:
            np.testing.assert_allclose(found[name], expected[name], rtol=1e-3, atol=1e-4)


@pytest.mark.full
@pytest.mark.parametrize(("site", "message"), [
    (normal_mixture(first, 0.6, PROBS), "scale 0.6"),
    (normal_mixture(first, 0.7), "weights"),
    (normal_mixture(first, 0.7, [0.5, 0.31, 0.19]), "weights"),
    (normal_mixture(first, 0.7, [0.5, 0.5]), "probs of 3"),
    (normal_mixture(lambda x: jnp.ones(4), 0.7), "multiple of 4"),
])  # fmt: skip
def test_what_is_declared_of_a_mixture_is_checked_on_invented_records(site, message):
    x = np.zeros((5, 2), np.float32)
    with pytest.raises(UnsupportedModelError, match=message):
        SEP(three, site=site, privacy=Privacy(public="captured")).run(KEY, 1, x, progress_bar=False)


@pytest.mark.full
def test_what_is_no_mixture_is_refused():
    with pytest.raises(ValueError, match="scale"):
        normal_mixture(first, 0.0)
    with pytest.raises(TypeError, match="observation"):
        normal_mixture("x", 0.5)
    with pytest.raises(ValueError, match="add up to 1"):
        normal_mixture(first, 0.5, [0.5, 0.6])

    def coin(x):
        p = numpyro.sample("p", dist.Beta(1.0, 1.0))
        with numpyro.plate("records", x.shape[0]):
            numpyro.sample("x", dist.Bernoulli(p), obs=x)

    with pytest.raises(UnsupportedModelError, match="normal family"):
        SEP(coin, {"p": beta()}, site=normal_mixture(first, 0.5)).run(KEY, 1, jnp.ones(3, int))


@pytest.mark.extended
def test_batch_sep_is_near_a_long_nuts_run():
    x, means = simulate(0)
    kernel = NUTS(mixture, init_strategy=init_to_value(values={"means": jnp.asarray(means)}))
    mcmc = MCMC(kernel, num_warmup=500, num_samples=8000, progress_bar=False)
    mcmc.run(KEY, x)
    draws = np.asarray(mcmc.get_samples()["means"], np.float64).reshape(8000, -1)
    start = {"auto_linear": jnp.asarray(100 * means.ravel(), jnp.float32),
             "auto_precision": 100 * jnp.eye(16)}  # fmt: skip
    sep = SEP(mixture, site=normal_mixture(first, 0.5))
    params = sep.run(KEY, 30, x, init_params=start, progress_bar=False).params
    in_means = np.linalg.norm(posterior_means(params).ravel() - draws.mean(0))
    covariance = np.linalg.inv(np.asarray(params["auto_precision"], np.float64))
    assert (in_means + np.linalg.norm(covariance - np.cov(draws.T))) / 2 < 0.002


@pytest.mark.extended
def test_private_means_are_found_from_a_start_without_data():
    sep = DPSEP(mixture, diagonal_normal, site=normal_mixture(first, 0.5), clip_norm=5.0,
                precision_weight=0.3, shared_precision=4, damping=0.1, sampler=FullBatch(),
                budget=BUDGET)  # fmt: skip
    found = []
    for seed in range(6):
        x, means = simulate(seed)
        start = 0.3 * np.random.default_rng([seed, 1]).normal(size=16)
        begin = {"auto_linear": jnp.asarray(start, jnp.float32), "auto_precision": jnp.ones(16)}
        result = sep.run(jax.random.key(seed), 50, x, init_params=begin, progress_bar=False)
        assert result.privacy.epsilon <= 1.0
        found.append(apart(posterior_means(result.params), means))
    assert sum(distance < 0.5 for distance in found) >= 4


@pytest.mark.extended
def test_shared_precision_of_each_component():
    x, means = simulate(3, 4000)
    start = {"auto_linear": jnp.asarray(100 * means.ravel(), jnp.float32),
             "auto_precision": jnp.full(16, 100.0)}  # fmt: skip
    sep = DPSEP(mixture, diagonal_normal, site=normal_mixture(first, 0.5), clip_norm=5.0,
                shared_precision=4, sampler=FullBatch(), budget=BUDGET,
                privacy=Privacy(secret_key=3, repetition=True))  # fmt: skip
    result = sep.run(KEY, 5, x, init_params=start, progress_bar=False)
    found = np.asarray(result.params["auto_precision"]).reshape(4, 4)
    np.testing.assert_allclose(found, found[:, :1] * np.ones(4), rtol=1e-5)
    assert np.ptp(found[:, 0]) > 1 and found.min() > 1000
    with pytest.raises(ValueError, match="divide the 16"):
        DPSEP(mixture, diagonal_normal, site=normal_mixture(first, 0.5), clip_norm=5.0,
              shared_precision=3, sampler=FullBatch(), budget=BUDGET,
              num_steps=2).init(KEY, x)  # fmt: skip


@pytest.mark.full
def test_expectation_maximisation_without_noise_is_that_of_scikit_learn():
    x, means = simulate(1, 600)
    start = means + 0.3
    peer = GaussianMixture(4, max_iter=7, tol=0, reg_covar=0, init_params="random",
                           weights_init=[0.25] * 4, means_init=start,
                           precisions_init=np.tile(np.eye(4), (4, 1, 1)))  # fmt: skip
    with pytest.warns(Warning, match="converge"):
        peer.fit(x.astype(np.float64))
    em = DPEM(4, clip_norm=math.inf, privacy=Privacy(noise_multiplier=0.0), sampler=FullBatch())
    params = em.run(KEY, 7, x, init_params={"means": start}, progress_bar=False).params
    np.testing.assert_allclose(params["means"], peer.means_, atol=2e-3)
    np.testing.assert_allclose(params["probs"], peer.weights_, atol=1e-3)
    np.testing.assert_allclose(params["covariances"], peer.covariances_, atol=2e-3)


@pytest.mark.full
@pytest.mark.parametrize("with_squares", [True, False])
def test_one_record_moves_the_statistics_by_at_most_the_clip_norm(with_squares):
    em = DPEM(3, clip_norm=0.7, privacy=Privacy(noise_multiplier=1.0), sampler=FullBatch(),
              scale=None if with_squares else 0.5)  # fmt: skip
    x = np.random.default_rng(0).normal(size=(20, 2)).astype(np.float32)
    state, problem = em.init(KEY, x), em._session((x,), {}).problem
    estimator, mechanism = expected_statistics(with_squares)(problem), gaussian(0.7, 1.0)

    @jax.jit
    def total(x, mask):
        public = estimator.prepare(KEY, state.optim_state.params)
        return bounded_sum(estimator, mechanism, public, (x,), mask)

    rng, full, moved = np.random.default_rng(2), jnp.ones(20, bool), []
    for _ in range(25):
        some = rng.random(x.shape) < 0.3
        heavy = [0.0, 1.0, -1e3, 1e6, 3e19, 1e30, math.nan, math.inf, -math.inf]
        rows = jnp.where(some, rng.choice(heavy, x.shape), x).astype(x.dtype)
        everything = total(rows, full)
        for out in (0, 7):
            rest = total(rows, full.at[out].set(False))
            change = [np.asarray(everything[n], float) - np.asarray(rest[n], float) for n in rest]
            assert all(np.isfinite(part).all() for part in change)
            moved.append(math.sqrt(sum((part**2).sum() for part in change)))
    assert 0.6 < max(moved) <= 0.7 * (1 + 1e-5)


@pytest.mark.full
def test_a_private_mixture_is_one_however_large_the_noise():
    x, _ = simulate(0, 200)
    em = DPEM(4, clip_norm={"counts": 1.0, "sums": 2.0, "squares": 4.0}, sampler=Poisson(0.1),
              budget=PrivacyBudget(0.05, 1e-5), damping=0.3,
              privacy=Privacy(secret_key=1, repetition=True))  # fmt: skip
    result = em.run(KEY, 30, x, progress_bar=False)
    assert result.privacy.epsilon <= 0.05 and result.privacy.num_steps == 30
    trace = result.trace.params
    assert all(np.isfinite(np.asarray(leaf)).all() for leaf in trace.values())
    np.testing.assert_allclose(np.asarray(trace["probs"]).sum(-1), 1, rtol=1e-5)
    assert np.linalg.eigvalsh(np.asarray(trace["covariances"])).min() > 5e-4
    assert np.asarray(trace["probs"]).min() > 0


@pytest.mark.parametrize(("options", "data", "error", "message"), [
    ({"num_components": 0}, None, ValueError, "num_components"),
    ({"scale": 0.0}, None, ValueError, "scale"),
    ({"probs": [0.5, 0.6]}, None, ValueError, "add up to 1"),
    ({"damping": 0.0}, None, ValueError, "damping"),
    ({"init_scale": -1.0}, None, ValueError, "init_scale"),
    ({"smallest_variance": 0.0}, None, ValueError, "smallest_variance"),
    ({"clip_norm": {"sums": 1.0}}, np.ones((5, 2)), ValueError, "clip_norm"),
    ({}, np.ones(5), ValueError, "shape"),
    ({}, np.ones((5, 2), complex), ValueError, "real"),
    ({}, [[1.0, 2.0]], TypeError, "one array"),
    ({"probs": "even"}, None, ValueError, "add up to 1"),
])  # fmt: skip
def test_wrong_arguments_of_expectation_maximisation(options, data, error, message):
    usual = {"num_components": 2, "clip_norm": 1.0, "sampler": FullBatch(), "budget": BUDGET}
    with pytest.raises(error, match=message):
        DPEM(**grouped(**usual | options)).run(KEY, 2, data)


@pytest.mark.parametrize(("begin", "message"), [
    ({"means": np.zeros(3)}, "init_params with shapes among"),
    ({"means": np.full((2, 2), np.nan)}, "finite"),
    ({"covariances": np.stack([np.eye(2), -np.eye(2)])}, "not symmetric, or not positive"),
    ({"covariances": np.tile([[1.0, 0.5], [0.0, 1.0]], (2, 1, 1))}, "symmetric"),
    ({"probs": np.ones(2)}, "add up to 1"),
])  # fmt: skip
def test_wrong_starts_of_expectation_maximisation(begin, message):
    em = DPEM(2, clip_norm=1.0, sampler=FullBatch(), budget=BUDGET, num_steps=2)
    with pytest.raises(ValueError, match=message):
        em.init(KEY, np.ones((5, 2)), init_params=begin)


@pytest.mark.full
def test_what_is_known_has_no_start_and_a_state_no_other_width():
    x, _ = simulate(0, 50)
    em = DPEM(2, clip_norm=1.0, sampler=FullBatch(), budget=BUDGET, num_steps=4, scale=0.5)
    with pytest.raises(ValueError, match="covariances"):
        em.init(KEY, x, init_params={"covariances": np.tile(np.eye(4), (2, 1, 1))})
    state = em.run(KEY, 2, x=x, progress_bar=False).state
    with pytest.raises(ValueError, match="shapes"):
        em.run(KEY, 2, x[:, :1], init_state=state, progress_bar=False)


def test_weights_of_narrow_components_are_checked_too():
    def narrow(x):
        mixture(x, 3, 0.01, PROBS)

    with pytest.raises(UnsupportedModelError, match="weights"):
        sep = SEP(narrow, site=normal_mixture(first, 0.01), privacy=Privacy(public="captured"))
        sep.run(KEY, 1, np.zeros((5, 2), np.float32))
