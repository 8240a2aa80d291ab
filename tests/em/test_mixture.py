"""Mixtures of normals: exact sites, DP-SEP from a start without data, and DP-EM."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from flat import grouped
from gaussian import gaussian, largest_move, moments
from jax.scipy.stats import multivariate_normal
from models import mixture, of
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


four, three = mixture(4), mixture(3, 0.7, PROBS)


def first(x, *_):
    return x[0]


def simulate(seed, number=1000):
    rng = np.random.default_rng(seed)
    means = rng.normal(size=(4, 4))
    x = means[rng.integers(4, size=number)] + 0.5 * rng.normal(size=(number, 4))
    return x.astype(np.float32), means


def near(means, precision=100.0):
    """A start at the means."""
    return {"auto_linear": jnp.asarray(precision * means.ravel(), jnp.float32),
            "auto_precision": jnp.full(16, precision)}  # fmt: skip


def private(**options):
    settings = {"clip_norm": 5.0, "shared_precision": 4, "sampler": FullBatch(), "budget": BUDGET}
    return DPSEP(four, diagonal_normal, site=normal_mixture(first, 0.5), **settings | options)


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


coin = of(lambda p: dist.Bernoulli(p), p=lambda x: dist.Beta(1.0, 1.0))
narrow = mixture(3, 0.01, PROBS)


@pytest.mark.full
@pytest.mark.parametrize(("model", "families", "site", "error", "message"), [
    (three, None, lambda: normal_mixture(first, 0.6, PROBS), UnsupportedModelError, "scale 0.6"),
    (three, None, lambda: normal_mixture(first, 0.7), UnsupportedModelError, "weights"),
    (three, None, lambda: normal_mixture(first, 0.7, [0.5, 0.31, 0.19]), UnsupportedModelError,
     "weights"),
    (narrow, None, lambda: normal_mixture(first, 0.01), UnsupportedModelError, "weights"),
    (three, None, lambda: normal_mixture(first, 0.7, [0.5, 0.5]), UnsupportedModelError,
     "probs of 3"),
    (three, None, lambda: normal_mixture(lambda x: jnp.ones(4), 0.7), UnsupportedModelError,
     "multiple of 4"),
    (coin, {"p": beta()}, lambda: normal_mixture(first, 0.5), UnsupportedModelError,
     "normal family"),
    (three, None, lambda: normal_mixture(first, 0.0), ValueError, "scale"),
    (three, None, lambda: normal_mixture("x", 0.5), TypeError, "observation"),
    (three, None, lambda: normal_mixture(first, 0.5, [0.5, 0.6]), ValueError, "add up to 1"),
])  # fmt: skip
def test_what_is_declared_of_a_mixture_is_checked_on_invented_records(
    model, families, site, error, message
):
    x = np.ones(3, int) if model is coin else np.zeros((5, 2), np.float32)
    with pytest.raises(error, match=message):
        sep = SEP(model, families or normal, site=site(), privacy=Privacy(public="captured"))
        sep.run(KEY, 1, x, progress_bar=False)


@pytest.mark.extended
def test_batch_sep_is_near_a_long_nuts_run():
    x, means = simulate(0)
    kernel = NUTS(four, init_strategy=init_to_value(values={"means": jnp.asarray(means)}))
    mcmc = MCMC(kernel, num_warmup=500, num_samples=8000, progress_bar=False)
    mcmc.run(KEY, x)
    draws = np.asarray(mcmc.get_samples()["means"], np.float64).reshape(8000, -1)
    start = near(means) | {"auto_precision": 100 * jnp.eye(16)}
    sep = SEP(four, site=normal_mixture(first, 0.5))
    found, covariance = moments(sep.run(KEY, 30, x, init_params=start, progress_bar=False).params)
    in_means = np.linalg.norm(found - draws.mean(0))
    assert (in_means + np.linalg.norm(covariance - np.cov(draws.T))) / 2 < 0.002


@pytest.mark.extended
def test_private_means_are_found_from_a_start_without_data():
    sep, close = private(precision_weight=0.3, damping=0.1), 0
    for seed in range(6):
        x, means = simulate(seed)
        begin = near(0.3 * np.random.default_rng([seed, 1]).normal(size=16), 1.0)
        result = sep.run(jax.random.key(seed), 50, x, init_params=begin, progress_bar=False)
        assert result.privacy.epsilon <= 1.0
        found = moments(result.params)[0].reshape(4, 1, 4)
        squares = ((found - means[None]) ** 2).sum(-1)
        close += math.sqrt(squares[linear_sum_assignment(squares)].sum()) < 0.5
    assert close >= 4


@pytest.mark.extended
def test_shared_precision_of_each_component():
    x, means = simulate(3, 4000)
    sep = private(privacy=Privacy(secret_key=3, repetition=True))
    result = sep.run(KEY, 5, x, init_params=near(means), progress_bar=False)
    found = np.asarray(result.params["auto_precision"]).reshape(4, 4)
    np.testing.assert_allclose(found, found[:, :1] * np.ones(4), rtol=1e-5)
    assert np.ptp(found[:, 0]) > 1 and found.min() > 1000
    with pytest.raises(ValueError, match="divide the 16"):
        private(shared_precision=3, num_steps=2).init(KEY, x)


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

    assert 0.6 < largest_move(total, x) <= 0.7 * (1 + 1e-5)


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


ROWS = np.ones((5, 2))


@pytest.mark.parametrize(("options", "data", "begin", "error", "message"), [
    ({"num_components": 0}, ROWS, None, ValueError, "num_components"),
    ({"scale": 0.0}, ROWS, None, ValueError, "scale"),
    ({"probs": [0.5, 0.6]}, ROWS, None, ValueError, "add up to 1"),
    ({"probs": "even"}, ROWS, None, ValueError, "add up to 1"),
    ({"damping": 0.0}, ROWS, None, ValueError, "damping"),
    ({"init_scale": -1.0}, ROWS, None, ValueError, "init_scale"),
    ({"smallest_variance": 0.0}, ROWS, None, ValueError, "smallest_variance"),
    ({"clip_norm": {"sums": 1.0}}, ROWS, None, ValueError, "clip_norm"),
    ({}, np.ones(5), None, ValueError, "shape"),
    ({}, np.ones((5, 2), complex), None, ValueError, "real"),
    ({}, [[1.0, 2.0]], None, TypeError, "one array"),
    ({}, ROWS, {"means": np.zeros(3)}, ValueError, "init_params with shapes among"),
    ({}, ROWS, {"means": np.full((2, 2), np.nan)}, ValueError, "finite"),
    ({}, ROWS, {"covariances": np.stack([np.eye(2), -np.eye(2)])}, ValueError, "not positive"),
    ({}, ROWS, {"covariances": np.tile([[1.0, 0.5], [0, 1]], (2, 1, 1))}, ValueError, "symmetric"),
    ({}, ROWS, {"probs": np.ones(2)}, ValueError, "add up to 1"),
    ({"scale": 0.5}, ROWS, {"covariances": np.tile(np.eye(2), (2, 1, 1))}, ValueError,
     "covariances"),
])  # fmt: skip
def test_wrong_arguments_and_starts_of_expectation_maximisation(
    options, data, begin, error, message
):
    usual = {"num_components": 2, "clip_norm": 1.0, "sampler": FullBatch(), "budget": BUDGET}
    with pytest.raises(error, match=message):
        DPEM(**grouped(**usual | options)).run(KEY, 2, data, init_params=begin)


@pytest.mark.full
def test_a_state_does_not_serve_data_of_another_width():
    em = DPEM(2, clip_norm=1.0, sampler=FullBatch(), budget=BUDGET, num_steps=4)
    state = em.run(KEY, 2, ROWS, progress_bar=False).state
    with pytest.raises(ValueError, match="shapes"):
        em.run(KEY, 2, ROWS[:, :1], init_state=state, progress_bar=False)
