"""Sites against what they approximate: closed forms, and moments found by brute force."""

import jax
import jax.numpy as jnp
import models
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from models import given, of, slopes
from scipy import stats

from numpyro_dp import UnsupportedModelError
from numpyro_dp.methods.ep.families import beta, diagonal_normal, dirichlet, gamma, normal
from numpyro_dp.methods.ep.problem import check_conjugate, make_problem
from numpyro_dp.methods.ep.sites import choose_site, conjugate, evidence, importance, quadrature
from numpyro_dp.methods.ep.sites.quadrature import tilted_slopes
from numpyro_dp.methods.normal import (
    LARGEST_NARROWING,
    Cavity,
    cavity_of,
    shrunk,
    site_along,
    site_from_slopes,
)
from numpyro_dp.model.structure import read_model

KEY = jax.random.key(0)
NODES, WEIGHTS = np.polynomial.hermite_e.hermegauss(31)
RULE = (
    NODES.astype(np.float32),
    np.log(WEIGHTS).astype(np.float32),
    NODES.astype(np.float32) ** 2 / 2,
)


def glm(likelihood):
    """A generalised linear model with three weights and an intercept."""
    priors = {"w": dist.Normal(0, 1).expand([3]).to_event(1), "b": dist.Normal(0, 2)}
    return given(lambda x, w, b: likelihood(x @ w + b), **priors)


logistic = glm(lambda t: dist.Bernoulli(logits=t))
probit = glm(lambda t: dist.Bernoulli(probs=jax.scipy.stats.norm.cdf(t)))
means = of(
    lambda mean: dist.Normal(mean, 0.5).to_event(1), mean=dist.Normal(0, 1).expand([3]).to_event(1)
)
two_products = given(lambda x, w, v: dist.Normal(x @ w, jnp.exp(x @ v)), w=slopes(), v=slopes())
small = given(lambda x, w: dist.Bernoulli(logits=x @ w / 255), w=slopes())
bernoulli = of(lambda p: dist.Bernoulli(p), p=lambda x: dist.Beta(2.0, 3.0))
categorical_model = of(
    lambda p: dist.Categorical(p), p=lambda x: dist.Dirichlet(jnp.array([1.0, 2.0, 3.0]))
)
zero_inflated = of(lambda rate: dist.ZeroInflatedPoisson(0.5, rate), rate=dist.Gamma(2.0, 1.0))


def counts(x, hours):
    rate = numpyro.sample("rate", dist.Gamma(2.0, 1.0))
    with numpyro.plate("records", x.shape[0]):
        numpyro.sample("x", dist.Poisson(rate * hours), obs=x)


def records(kind="float", number=5):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(number, 3)).astype(np.float32)
    y = rng.normal(size=number).astype(np.float32)
    return x, y if kind == "float" else rng.integers(0, 2, number).astype(np.int32)


def problem_of(model, family, *args):
    structure = check_conjugate(read_model(model, args, {}, None))
    return make_problem(model, structure, family, (), KEY)


def site_of(builder, problem, cavity, example):
    @jax.jit
    def approximate(cavity, example):
        site = builder.build(problem)
        return site.approximate(site.prepare(KEY, cavity), example)

    return approximate(cavity, example)


def moments_by_integration(log_likelihood, mean, variance):
    """Mean and variance of the tilted distribution of one number."""

    def log_density(t):
        return log_likelihood(t) - (t - mean) ** 2 / (2 * variance)

    grid = np.linspace(mean - 80 * np.sqrt(variance), mean + 80 * np.sqrt(variance), 1_600_001)
    with np.errstate(over="ignore"):
        weights = np.exp(log_density(grid) - log_density(grid).max())
    first = weights @ grid / weights.sum()
    return first, weights @ (grid - first) ** 2 / weights.sum()


def narrow(t):
    return -0.5 * ((t - 1) / 0.01) ** 2


LIKELIHOODS = {
    "logistic": (lambda t: -jnp.logaddexp(0.0, -t), lambda t: -np.logaddexp(0.0, -t), 1e-4),
    "poisson": (lambda t: 3 * t - jnp.exp(t), lambda t: 3 * t - np.exp(t), 1e-4),
    "student": (lambda t: dist.StudentT(3.0, 1.0, 0.5).log_prob(t),
        lambda t: stats.t(3.0, 1.0, 0.5).logpdf(t), 3e-2),
    "narrow": (narrow, narrow, 1e-4),
    "laplace": (lambda t: -jnp.abs(t - 0.3), lambda t: -np.abs(t - 0.3), 4e-2),
}  # fmt: skip


def steep(count):
    return (lambda t: count * t - jnp.exp(t), lambda t: count * t - np.exp(t), 1e-2)


@pytest.mark.extended
@pytest.mark.parametrize(("likelihood", "mean", "variance"), [
    *((each, *at) for each in LIKELIHOODS.values() for at in ((0, 1.0), (-2, 4.0), (0.5, 0.01))),
    *((steep(count), 0.0, variance) for count, variance in (
        (0, 100.0), (10, 9.0), (50, 25.0), (1000, 100.0), (1000, 0.01))),
])  # fmt: skip
def test_the_slopes_give_the_moments_of_the_tilted_distribution(likelihood, mean, variance):
    traced, plain, tolerance = likelihood
    g, h = tilted_slopes(traced, jnp.float32(mean), jnp.float32(variance), RULE)
    first, second = moments_by_integration(plain, mean, variance)
    assert abs(mean + variance * float(g) - first) < tolerance * np.sqrt(variance)
    assert abs(variance * float(h) - (1 - second / variance)) < tolerance


@pytest.mark.parametrize("family", [normal, diagonal_normal])
def test_a_site_times_its_cavity_has_the_projected_moments(family):
    """Moments along the record by quadrature; the others follow from the cavity."""
    rng, g, h = np.random.default_rng(1), 0.4, 0.25
    direction = np.array([0.6, -0.8, 0.0], np.float32)
    full = np.cov(rng.normal(size=(3, 20))) if family is normal else np.diag([1.0, 0.5, 2.0])
    covariance = full if family is normal else np.diag(full)
    cavity = Cavity(jnp.array([0.3, -0.2, 1.0]), jnp.asarray(covariance, jnp.float32))
    site = {n: np.asarray(v) for n, v in site_along(cavity, jnp.asarray(direction), g, h).items()}
    tilted = full - h * np.outer(full @ direction, full @ direction)
    precision = site["precision"] if family is normal else np.diag(site["precision"])
    found = np.linalg.inv(np.linalg.inv(full) + precision)
    expected = tilted if family is normal else np.diag(np.diag(tilted))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-7)
    shift = full @ direction * g  # of the tilted distribution, about the cavity's
    np.testing.assert_allclose(found @ site["linear"], shift, rtol=1e-5, atol=1e-6)


@pytest.mark.full
def test_slopes_of_any_likelihood_give_the_exact_site_of_a_normal_one():
    rng = np.random.default_rng(2)
    covariance = np.cov(rng.normal(size=(4, 30)))
    precision = 0.1 * np.cov(rng.normal(size=(4, 30)))  # of the likelihood
    slope = rng.normal(size=4)  # of the log likelihood at the cavity's mean
    inside = np.linalg.inv(np.eye(4) + precision @ covariance)
    cavity = Cavity(jnp.zeros(4), jnp.asarray(covariance, jnp.float32))
    g, h = inside @ slope, inside @ precision
    site = site_from_slopes(cavity, jnp.asarray(g, jnp.float32), jnp.asarray(h, jnp.float32))
    np.testing.assert_allclose(site["precision"], precision, atol=1e-6)
    np.testing.assert_allclose(site["linear"], slope, rtol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("dim", [1, 2, 6])
def test_no_record_narrows_a_cavity_by_more_than_the_floor(dim):
    cavity = Cavity(jnp.zeros(dim), jnp.eye(dim))
    h = jnp.diag(jnp.array([5.0, -0.5, 0.2, 0.1, 0.0, 0.0])[:dim])
    site = site_from_slopes(cavity, jnp.ones(dim), h)
    variances = np.linalg.eigvalsh(np.linalg.inv(np.eye(dim) + np.asarray(site["precision"])))
    assert variances.min() > 0.999 * LARGEST_NARROWING
    flat = site_along(Cavity(jnp.zeros(1), jnp.ones((1, 1))), jnp.ones(1), 1.0, 5.0)
    assert float(flat["precision"][0, 0]) == pytest.approx(5 / LARGEST_NARROWING)


@pytest.mark.full
def test_definiteness_is_that_of_the_eigenvalues():
    rng = np.random.default_rng(3)
    for _ in range(20):
        matrix = rng.normal(size=(5, 5))
        matrix = matrix @ matrix.T - rng.uniform(0, 2) * np.eye(5)
        natural = {"linear": jnp.zeros(5), "precision": jnp.asarray(matrix, jnp.float32)}
        smallest = np.linalg.eigvalsh(matrix).min()
        assert bool(normal(5).is_valid(natural)) == (smallest > 0)
        if smallest > 0.01:
            inverse = cavity_of(natural).covariance
            np.testing.assert_allclose(inverse @ matrix, np.eye(5), atol=1e-3)


def evidence_of_a_mean(mean, covariance, x):
    return jnp.sum(dist.Normal(mean, jnp.sqrt(covariance + 0.25)).log_prob(x[0]))


X, Y = records()
DESIGN = np.array([1.0, *X[0]])  # sites in the order of their names
THREE = jnp.array([3.0, 4.0, 5.0])
NOUGHT = {"linear": np.zeros(3), "precision": np.zeros((3, 3))}


@pytest.mark.full
@pytest.mark.parametrize(("model", "family", "site", "record", "expected"), [
    (glm(lambda t: dist.Normal(t, 0.5)), normal, conjugate(), (X[0], Y[0]),
     {"precision": np.outer(DESIGN, DESIGN) / 0.25, "linear": DESIGN * Y[0] / 0.25}),
    (means, normal, None, (THREE,), {"precision": 4 * np.eye(3), "linear": 4 * THREE}),
    (means, diagonal_normal, None, (THREE,), {"precision": np.full(3, 4.0), "linear": 4 * THREE}),
    (means, diagonal_normal, evidence(evidence_of_a_mean), (THREE,),
     {"precision": np.full(3, 4.0), "linear": 4 * THREE}),
    (bernoulli, {"p": beta()}, None, (1,), {"p_log": 1.0, "p_log_complement": 0.0}),
    (bernoulli, {"p": beta()}, None, (0,), {"p_log": 0.0, "p_log_complement": 1.0}),
    (categorical_model, {"p": dirichlet(3)}, None, (2,), {"p_log": [0.0, 0.0, 1.0]}),
    (counts, {"rate": gamma()}, None, (4, 2.5), {"rate_log": 4.0, "rate_rate": 2.5}),
    (models.logistic(), normal, quadrature(), (jnp.zeros(3), 1), NOUGHT),
    (models.logistic(), normal, importance(50), (jnp.zeros(3), 1), NOUGHT),
])  # fmt: skip
def test_sites_that_are_known(model, family, site, record, expected):
    """Whatever the cavity."""
    example = tuple(jnp.asarray(value) for value in record)
    problem = problem_of(model, family, *(jnp.stack([value] * 12) for value in example))
    for scale in (1.0, 30.0):
        cavity = {name: scale * value for name, value in problem.prior.items()}
        found = site_of(site or choose_site(problem), problem, cavity, example)
        for name, value in expected.items():
            np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=2e-4)


REGRESSION = X, records("binary")[1].astype(np.float32), normal


@pytest.mark.full
@pytest.mark.parametrize(("model", "fits", "x", "y", "family"), [
    (zero_inflated, False, jnp.arange(5), None, {"rate": gamma()}),
    (small, False, *records("binary"), normal),  # nearly quadratic
    (logistic, False, *REGRESSION),
    (glm(lambda t: dist.Normal(t, 1.0)), True, *REGRESSION),
    (glm(lambda t: dist.Poisson(jnp.exp(t))), False, *REGRESSION),
    (glm(lambda t: dist.NegativeBinomial2(jnp.exp(t), 2.0)), False, *REGRESSION),
    (glm(lambda t: dist.Binomial(7, logits=t)), False, *REGRESSION),
    (glm(lambda t: dist.StudentT(3.0, t, 1.0)), False, *REGRESSION),
])  # fmt: skip
def test_whether_a_likelihood_is_conjugate_is_read_off_it(model, fits, x, y, family):
    problem = problem_of(model, family, *(x,) if y is None else (x, y))
    if fits:
        conjugate().check(problem)
    else:
        with pytest.raises(UnsupportedModelError, match="conjugate"):
            conjugate().check(problem)
    if family is normal:
        choose_site(problem).check(problem)


@pytest.mark.full
@pytest.mark.parametrize(
    "prior", [dist.Cauchy(0, 100), dist.StudentT(3, 0, 50), dist.Laplace(0, 2000)]
)
def test_wide_priors_that_are_not_normal_are_refused(prior):
    model = of(lambda mean: dist.Normal(mean, 1), mean=prior)
    with pytest.raises(UnsupportedModelError, match="not quadratic, or flat"):
        problem_of(model, normal, jnp.arange(4.0))


def evidence_of_probit(mean, covariance, x, y):
    features = jnp.concatenate([jnp.ones(1), x[0]])
    variance = Cavity(mean, covariance).variance_along(features)
    sign = 2 * y[0] - 1
    return jax.scipy.stats.norm.logcdf(sign * (features @ mean) / jnp.sqrt(1 + variance))


@pytest.mark.extended
@pytest.mark.parametrize("family", [normal, diagonal_normal])
@pytest.mark.parametrize(("model", "site", "row", "tolerance"), [
    (probit, evidence(evidence_of_probit), 1, 2e-4), (logistic, importance(200_000), 0, 0.02),
])  # fmt: skip
def test_other_sites_agree_with_quadrature(model, site, row, tolerance, family):
    x, y = records("binary")
    problem = problem_of(model, family, x, y)
    example = tuple(jnp.asarray(a)[row] for a in (x, y))
    expected = site_of(quadrature(), problem, problem.prior, example)
    found = site_of(site, problem, problem.prior, example)
    for name in found:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-7, atol=tolerance)
    broken = (jnp.full(3, jnp.nan), example[1])  # no number comes of a record that is none
    assert not np.isfinite(site_of(quadrature(), problem, problem.prior, broken)["linear"]).any()


@pytest.mark.full
def test_a_likelihood_of_no_known_kind_is_refused_with_the_remedies():
    x, y = records()
    problem = problem_of(two_products, normal, x, y)
    with pytest.raises(UnsupportedModelError, match="site=importance"):
        choose_site(problem)
    with pytest.raises(UnsupportedModelError, match="changes its direction"):
        quadrature().check(problem)
    importance().check(problem)


def test_other_sites_want_a_normal_family():
    problem = problem_of(bernoulli, {"p": beta()}, jnp.array([0, 1, 1]))
    for kind in (quadrature(), importance(), evidence(lambda *_: 0.0)):
        with pytest.raises(UnsupportedModelError, match="normal family"):
            kind.check(problem)


@pytest.mark.every_case
@pytest.mark.parametrize("sd", [0.0, 0.1])
@pytest.mark.parametrize("full", [True, False])
def test_a_slope_along_a_negative_eigenvalue_does_not_count(full, sd):
    values = np.array([4.0, -3.0])
    turn = np.array([[0.8, -0.6], [0.6, 0.8]]) if full else np.eye(2)
    precision = turn * values @ turn.T if full else values
    share = 16 / (16 + sd**2)
    found = shrunk(
        {"linear": jnp.asarray(turn @ np.ones(2)), "precision": jnp.asarray(precision)}, sd
    )
    np.testing.assert_allclose(turn.T @ found["linear"], [share, 0], atol=1e-6)
    kept = turn.T @ found["precision"] @ turn if full else np.diag(found["precision"])
    np.testing.assert_allclose(kept, np.diag([4 * share, 0]), atol=1e-5)
