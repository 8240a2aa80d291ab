"""Sites against what they approximate: closed forms, and moments found by brute force."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from models import given, of, slopes
from scipy import stats

from numpyro_dp import UnsupportedModelError
from numpyro_dp.methods.ep.families import beta, diagonal_normal, dirichlet, gamma, normal, product
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

    def model(x, y):
        weights = numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))
        intercept = numpyro.sample("b", dist.Normal(0, 2))
        with numpyro.plate("records", x.shape[0]):
            numpyro.sample("y", likelihood(x @ weights + intercept), obs=y)

    return model


means = of(
    lambda mean: dist.Normal(mean, 0.5).to_event(1), mean=dist.Normal(0, 1).expand([3]).to_event(1)
)

two_products = given(lambda x, w, v: dist.Normal(x @ w, jnp.exp(x @ v)), w=slopes(), v=slopes())


def records(kind="float", number=5):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(number, 3)).astype(np.float32)
    y = {"float": rng.normal(size=number), "count": rng.poisson(2.0, number)}.get(kind)
    y = rng.integers(0, 2, number) if y is None else y
    return x, y.astype(np.float32 if kind == "float" else np.int32)


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


@pytest.mark.extended
@pytest.mark.parametrize("name", LIKELIHOODS)
@pytest.mark.parametrize(("mean", "variance"), [(0.0, 1.0), (-2.0, 4.0), (0.5, 0.01)])
def test_the_slopes_give_the_moments_of_the_tilted_distribution(name, mean, variance):
    traced, plain, tolerance = LIKELIHOODS[name]
    g, h = tilted_slopes(traced, jnp.float32(mean), jnp.float32(variance), RULE)
    first, second = moments_by_integration(plain, mean, variance)
    sd = np.sqrt(variance)
    assert abs(mean + variance * float(g) - first) < tolerance * sd
    assert abs(variance * float(h) - (1 - second / variance)) < tolerance


@pytest.mark.full
@pytest.mark.parametrize(
    ("count", "variance"), [(0, 100.0), (10, 9.0), (50, 25.0), (1000, 100.0), (1000, 0.01)]
)
def test_the_mode_is_found_where_the_slopes_are_steep(count, variance):
    def poisson(t, numbers=np):
        return count * t - numbers.exp(t)

    found = tilted_slopes(lambda t: poisson(t, jnp), jnp.float32(0), jnp.float32(variance), RULE)
    first, second = moments_by_integration(poisson, 0.0, variance)
    sd = np.sqrt(variance)
    assert abs(variance * float(found[0]) - first) < 1e-2 * sd
    assert abs(variance * float(found[1]) - (1 - second / variance)) < 1e-2


@pytest.mark.parametrize("family", [normal, diagonal_normal])
def test_a_site_times_its_cavity_has_the_projected_moments(family):
    """Moments along the record by quadrature; the others follow from the cavity."""
    rng = np.random.default_rng(1)
    direction = np.array([0.6, -0.8, 0.0], np.float32)
    covariance = {
        normal: np.cov(rng.normal(size=(3, 20))),
        diagonal_normal: np.array([1.0, 0.5, 2.0]),
    }[family].astype(np.float32)
    full = covariance if covariance.ndim == 2 else np.diag(covariance * np.ones(3))
    cavity = Cavity(jnp.array([0.3, -0.2, 1.0]), jnp.asarray(covariance))
    g, h = 0.4, 0.25
    site = site_along(cavity, jnp.asarray(direction), g, h)
    mean = full @ direction * g  # of the tilted distribution, about the cavity's
    tilted = full - h * np.outer(full @ direction, full @ direction)
    if family is normal:
        found = np.linalg.inv(np.linalg.inv(full) + np.asarray(site["precision"]))
        expected = tilted
        linear = np.asarray(site["linear"])
    else:
        expected = np.diag(tilted)
        found = 1 / (1 / covariance + np.asarray(site["precision"]))
        linear = np.asarray(site["linear"])
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    shift = found @ linear if family is normal else found * linear
    np.testing.assert_allclose(shift, mean, rtol=1e-5, atol=1e-6)


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


@pytest.mark.full
def test_conjugate_sites_do_not_depend_on_the_cavity():
    model = glm(lambda t: dist.Normal(t, 0.5))
    x, y = records()
    problem = problem_of(model, normal, x, y)
    example = tuple(jnp.asarray(a)[0] for a in (x, y))
    design = np.array([1.0, *x[0]])  # sites in the order of their names
    for scale in (1.0, 30.0):
        cavity = {k: scale * v for k, v in problem.prior.items()}
        site = site_of(conjugate(), problem, cavity, example)
        np.testing.assert_allclose(site["precision"], np.outer(design, design) / 0.25, rtol=1e-4)
        np.testing.assert_allclose(site["linear"], design * y[0] / 0.25, rtol=1e-4)


@pytest.mark.full
@pytest.mark.parametrize("family", [normal, diagonal_normal])
def test_conjugate_sites_of_a_mean(family):
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    problem = problem_of(means, family, x)
    site = site_of(choose_site(problem), problem, problem.prior, (jnp.asarray(x[1]),))
    expected = {normal: 4 * np.eye(3), diagonal_normal: np.full(3, 4.0)}
    np.testing.assert_allclose(site["precision"], expected[family], rtol=1e-5)
    np.testing.assert_allclose(site["linear"], 4 * x[1], rtol=1e-5)


bernoulli = of(lambda p: dist.Bernoulli(p), p=lambda x: dist.Beta(2.0, 3.0))

categorical_model = of(
    lambda p: dist.Categorical(p), p=lambda x: dist.Dirichlet(jnp.array([1.0, 2.0, 3.0]))
)


def counts(x, hours):
    rate = numpyro.sample("rate", dist.Gamma(2.0, 1.0))
    with numpyro.plate("records", x.shape[0]):
        numpyro.sample("x", dist.Poisson(rate * hours), obs=x)


@pytest.mark.full
@pytest.mark.parametrize(("model", "family", "record", "expected"), [
    (bernoulli, {"p": beta()}, (1,), {"p_log": 1.0, "p_log_complement": 0.0}),
    (bernoulli, {"p": beta()}, (0,), {"p_log": 0.0, "p_log_complement": 1.0}),
    (categorical_model, {"p": dirichlet(3)}, (2,), {"p_log": [0.0, 0.0, 1.0]}),
    (counts, {"rate": gamma()}, (4, 2.5), {"rate_log": 4.0, "rate_rate": 2.5}),
])  # fmt: skip
def test_conjugate_sites_of_other_families(model, family, record, expected):
    example = tuple(jnp.asarray(value) for value in record)
    problem = problem_of(model, family, *(jnp.stack([value] * 12) for value in example))
    site = site_of(choose_site(problem), problem, problem.prior, example)
    for name, value in expected.items():
        np.testing.assert_allclose(site[name], value, atol=2e-4)


zero_inflated = of(lambda rate: dist.ZeroInflatedPoisson(0.5, rate), rate=dist.Gamma(2.0, 1.0))


@pytest.mark.full
def test_a_likelihood_that_is_conjugate_for_some_records_only_is_not():
    problem = problem_of(zero_inflated, {"rate": gamma()}, jnp.arange(5))
    with pytest.raises(UnsupportedModelError, match="conjugate"):
        conjugate().check(problem)


small = given(lambda x, w: dist.Bernoulli(logits=x @ w / 255), w=slopes())


@pytest.mark.full
def test_a_likelihood_that_is_nearly_quadratic_for_small_records_is_not_conjugate():
    x, y = records("binary")
    problem = problem_of(small, normal, x, y)
    with pytest.raises(UnsupportedModelError, match="conjugate"):
        conjugate().check(problem)
    choose_site(problem).check(problem)


@pytest.mark.full
@pytest.mark.parametrize(
    "prior", [dist.Cauchy(0, 100), dist.StudentT(3, 0, 50), dist.Laplace(0, 2000)]
)
def test_wide_priors_that_are_not_normal_are_refused(prior):
    def model(x):
        mean = numpyro.sample("mean", prior)
        with numpyro.plate("records", x.shape[0]):
            numpyro.sample("x", dist.Normal(mean, 1), obs=x)

    with pytest.raises(UnsupportedModelError, match="not quadratic, or flat"):
        problem_of(model, normal, jnp.arange(4.0))


@pytest.mark.full
@pytest.mark.parametrize("builder", [quadrature(), importance(50)])
def test_a_record_that_says_nothing_has_the_site_nought(builder):
    x, y = records("binary")

    def model(x, y):
        weights = numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))
        with numpyro.plate("records", x.shape[0]):
            numpyro.sample("y", dist.Bernoulli(logits=x @ weights), obs=y)

    problem = problem_of(model, normal, x, y)
    site = site_of(builder, problem, problem.prior, (jnp.zeros(3), jnp.asarray(1)))
    for value in site.values():
        np.testing.assert_allclose(value, 0, atol=1e-6)


@pytest.mark.extended
def test_probit_has_the_sites_that_quadrature_finds():
    model = glm(lambda t: dist.Bernoulli(probs=jax.scipy.stats.norm.cdf(t)))
    x, y = records("binary")
    for family in (normal, diagonal_normal):
        problem = problem_of(model, family, x, y)

        def log_evidence(mean, covariance, x, y):
            features = jnp.concatenate([jnp.ones(1), x[0]])
            variance = Cavity(mean, covariance).variance_along(features)
            sign = 2 * y[0] - 1
            return jax.scipy.stats.norm.logcdf(sign * (features @ mean) / jnp.sqrt(1 + variance))

        exact = evidence(log_evidence)
        example = tuple(jnp.asarray(a)[1] for a in (x, y))
        found = site_of(quadrature(), problem, problem.prior, example)
        known = site_of(exact, problem, problem.prior, example)
        for name in known:
            np.testing.assert_allclose(found[name], known[name], atol=2e-4)


@pytest.mark.full
def test_evidence_of_a_mean():
    def log_evidence(mean, covariance, x):
        return jnp.sum(dist.Normal(mean, jnp.sqrt(covariance + 0.25)).log_prob(x[0]))

    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    problem = problem_of(means, diagonal_normal, x)
    site = site_of(evidence(log_evidence), problem, problem.prior, (jnp.asarray(x[1]),))
    np.testing.assert_allclose(site["linear"], 4 * x[1], rtol=1e-4)
    np.testing.assert_allclose(site["precision"], np.full(3, 4.0), rtol=1e-4)


@pytest.mark.extended
@pytest.mark.parametrize("family", [normal, diagonal_normal])
def test_importance_sampling_agrees_with_quadrature(family):
    model = glm(lambda t: dist.Bernoulli(logits=t))
    x, y = records("binary")
    problem = problem_of(model, family, x, y)
    example = tuple(jnp.asarray(a)[0] for a in (x, y))
    exact = site_of(quadrature(), problem, problem.prior, example)
    found = site_of(importance(200_000), problem, problem.prior, example)
    for name in exact:
        np.testing.assert_allclose(found[name], exact[name], atol=0.02)


@pytest.mark.full
def test_a_record_that_is_not_a_number_gives_no_number():
    model = glm(lambda t: dist.Bernoulli(logits=t))
    x, y = records("binary")
    problem = problem_of(model, normal, x, y)
    site = site_of(quadrature(), problem, problem.prior, (jnp.full(3, jnp.nan), jnp.asarray(1)))
    assert not np.isfinite(np.asarray(site["linear"])).any()


@pytest.mark.full
@pytest.mark.parametrize(("likelihood", "kind"), [
    (lambda t: dist.Normal(t, 1.0), "conjugate"),
    (lambda t: dist.Bernoulli(logits=t), "linear"),
    (lambda t: dist.Poisson(jnp.exp(t)), "linear"),
    (lambda t: dist.NegativeBinomial2(jnp.exp(t), 2.0), "linear"),
    (lambda t: dist.Binomial(7, logits=t), "linear"),
    (lambda t: dist.StudentT(3.0, t, 1.0), "linear"),
])  # fmt: skip
def test_the_kind_of_site_is_read_off_the_likelihood(likelihood, kind):
    x, y = records("binary")
    problem = problem_of(glm(likelihood), normal, x, y.astype(np.float32))
    chosen = choose_site(problem)
    chosen.check(problem)
    if kind == "linear":
        with pytest.raises(UnsupportedModelError, match="conjugate"):
            conjugate().check(problem)
    else:
        conjugate().check(problem)


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


def test_a_product_of_families_keeps_its_sites_apart():
    family = product(a=beta(), b=gamma())
    assert set(family.unit) == {"a_log", "a_log_complement", "b_log", "b_rate"}


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
