"""One release, many analyses: a likelihood as a value, other priors, pooling, Bayes factors."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from models import given
from numpyro.infer import MCMC, NUTS
from numpyro.infer.util import log_density

import numpyro_dp
from numpyro_dp import DPLaplace, PrivacyBudget
from numpyro_dp.model.public import UnsupportedModelError
from numpyro_dp.posterior import PosteriorWarning, pool
from numpyro_dp.posterior.saved import read_file, write_file

KEY = jax.random.key(0)
RNG = np.random.default_rng(0)
X = RNG.normal(size=(2000, 2)).astype(np.float32)
Y = (X @ np.array([0.5, 0.0]) + 2 * RNG.normal(size=2000)).astype(np.float32)


def regression(w=dist.Normal(0, 1), noise=2.0, likelihood=dist.Normal):  # noqa: B008
    """A linear model with known noise, whose likelihood is normal."""
    return given(lambda x, w: likelihood(x @ w, noise), w=w.expand([2]).to_event(1))


def released(model, y=Y, epsilon=1.0, key=KEY):
    return DPLaplace(model, budget=PrivacyBudget(epsilon, 1e-5)).run(
        key, X, y, progress_bar=False
    )  # fmt: skip


@pytest.fixture(scope="module")
def posterior():
    return released(regression())


@pytest.fixture(scope="module")
def scaled():
    return released(given(
        lambda x, w, s: dist.Normal(x @ w, s),
        w=dist.Normal(0, 1).expand([2]).to_event(1), s=dist.HalfNormal(3),
    ))  # fmt: skip


def normal_of(likelihood, precision):
    covariance = np.linalg.inv(likelihood.precision + precision * np.eye(2))
    return covariance @ likelihood.linear, covariance


def is_near(posterior, mean, covariance, by=1e-3):
    """Whether the normal draws have a mean and covariance, in standard deviations."""
    own = posterior._source.read_prior(posterior.likelihood.sites).decoded.updated(
        posterior.likelihood.precision, posterior.likelihood.linear
    )
    sds = np.sqrt(np.diag(covariance))
    return np.all(np.abs(own[0] - mean) < by * sds) and np.allclose(own[1], covariance, 2 * by)


@pytest.mark.full
def test_the_distribution_has_the_likelihood_of_the_release(scaled):
    own = scaled.likelihood
    assert list(own.sites) == ["s", "w"] and own.precision.shape == (3, 3) and own.approximate

    def log(w, s):
        def model():
            numpyro.sample("release", own({"w": w, "s": s}), obs=own.value)

        return float(log_density(model, (), {}, {})[0])

    def quadratic(w, s):
        theta = np.array([np.log(s), *w])
        return own.linear @ theta - theta @ own.precision @ theta / 2

    here, there = (np.array([0.5, 0.1]), 2.0), (np.array([0.4, -0.1]), 2.1)
    assert log(*here) - log(*there) == pytest.approx(quadratic(*here) - quadratic(*there), abs=0.05)


@pytest.mark.full
def test_a_larger_model_samples_what_the_posterior_is(scaled):
    own = scaled.likelihood

    def model():
        w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
        s = numpyro.sample("s", dist.HalfNormal(3))
        numpyro.sample("release", own({"w": w, "s": s}), obs=own.value)

    mcmc = MCMC(NUTS(model), num_warmup=300, num_samples=1000, progress_bar=False)
    mcmc.run(KEY)
    for name, site in scaled.summary().items():
        drawn = np.asarray(mcmc.get_samples()[name])
        assert np.all(np.abs(drawn.mean(0) - site["mean"]) < 0.2 * site["sd"])
        assert np.allclose(drawn.std(0), site["sd"], rtol=0.15)


@pytest.mark.full
def test_a_call_wants_all_latents_in_their_shapes(scaled):
    own = scaled.likelihood
    with pytest.raises(ValueError, match="values of"):
        own({"w": jnp.zeros(2)})
    with pytest.raises(ValueError, match="shape"):
        own({"w": jnp.zeros(3), "s": 1.0})
    with pytest.raises(ValueError, match="load"):
        dataclasses.replace(own, supports=None)({"w": jnp.zeros(2), "s": 1.0})


@pytest.mark.parametrize("sd", [1.0, 0.5, 3.0])
def test_refit_is_the_product_with_the_other_prior(posterior, sd):
    other = posterior.refit(regression(dist.Normal(0, sd)))
    assert is_near(other, *normal_of(posterior.likelihood, sd**-2.0))
    assert other.privacy is posterior.privacy


@pytest.mark.full
def test_refit_under_a_hierarchy_shrinks(posterior):
    def horseshoe(x, y=None):
        tau = numpyro.sample("tau", dist.HalfCauchy(0.1))
        local = numpyro.sample("local", dist.HalfCauchy(1).expand([2]).to_event(1))
        w = numpyro.sample("w", dist.Normal(0, tau * local).to_event(1))
        with numpyro.plate("records", len(x)):
            numpyro.sample("y", dist.Normal(x @ w, 2.0), obs=y)

    other, own = posterior.refit(horseshoe).summary(), posterior.summary()
    assert sorted(other) == ["local", "tau", "w"]
    assert abs(other["w"]["mean"][1]) < abs(own["w"]["mean"][1])
    assert other["w"]["mean"][0] == pytest.approx(own["w"]["mean"][0], abs=3 * own["w"]["sd"][0])


def renamed(x, y=None):
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([2]).to_event(1))
    with numpyro.plate("records", len(x)):
        numpyro.sample("y", dist.Normal(x @ beta, 2.0), obs=y)


def captured(x, y=None):
    numpyro.factor("records_again", dist.Normal(jnp.asarray(Y), 1).log_prob(0.0).sum())
    return regression()(x, y)


@pytest.mark.parametrize(
    ("model", "error", "text"),
    [
        (regression(noise=1.0), ValueError, "likelihood is another"),
        (regression(likelihood=dist.Laplace), ValueError, "likelihood is another"),
        (regression(dist.HalfNormal(1)), ValueError, "likelihood is another|support"),
        (renamed, ValueError, r"no latent sites \['w'\]"),
        (captured, UnsupportedModelError, "not an argument"),
        (3, TypeError, "function"),
    ],
)
def test_refit_refuses_other_models(posterior, model, error, text):
    with pytest.raises(error, match=text):
        posterior.refit(model)


def test_a_prior_in_conflict_is_said(posterior):
    with pytest.warns(PosteriorWarning, match="disagree"):
        other = posterior.refit(regression(dist.Normal(5, 0.1)))
    assert [found.name for found in other.diagnose().bad] == ["conflict"]


@pytest.mark.full
def test_a_likelihood_that_was_guessed_is_said():
    model = regression(dist.StudentT(4.0))  # not normal
    little = DPLaplace(model, budget=PrivacyBudget(0.05, 1e-3)).run(
        KEY, X[:40], Y[:40], progress_bar=False
    )  # fmt: skip
    other = little.refit(regression(dist.Normal(0, 1)))
    assert "likelihood" in [found.name for found in other.diagnose().findings]


def test_a_file_keeps_the_likelihood(posterior, tmp_path):
    posterior.save(path := tmp_path / "a.posterior")
    alone, known = numpyro_dp.load(path), numpyro_dp.load(path, regression())
    for each in (alone, known):
        assert np.array_equal(each.likelihood.precision, posterior.likelihood.precision)
    with pytest.raises(ValueError, match="load"):
        alone.refit(regression())
    other = known.refit(regression(dist.Normal(0, 0.5)))
    assert is_near(other, *normal_of(posterior.likelihood, 4.0))
    assert pool([alone, known], persons="overlapping").likelihood.sites == {"w": (2,)}


@pytest.mark.full
def test_public_arguments_are_not_in_a_file(tmp_path):
    def model(x, scale, y=None):
        w = numpyro.sample("w", dist.Normal(0, scale).to_event(1))
        with numpyro.plate("records", len(x)):
            numpyro.sample("y", dist.Normal(x @ w, 2.0), obs=y)

    budget, scale = PrivacyBudget(1.0, 1e-5), np.array([1.0, 2.0])
    privacy = numpyro_dp.Privacy(public=["scale"])
    found = DPLaplace(model, budget=budget, privacy=privacy).run(KEY, X, scale, Y)
    found.save(path := tmp_path / "a.posterior")
    assert np.array_equal(found.refit(model).likelihood.linear, found.likelihood.linear)
    with pytest.raises(ValueError, match="before saving"):
        numpyro_dp.load(path, model).refit(model)


def test_methods_without_a_likelihood_say_so(posterior):
    chains = numpyro_dp.posterior.Posterior(
        model=None, draws=posterior.sample, prior=None, unconstrain=None,
        privacy=posterior.privacy, method="Chains",
    )  # fmt: skip
    with pytest.raises(ValueError, match="Chains does not release"):
        _ = chains.likelihood


def test_pooled_likelihoods_multiply_with_one_prior(posterior):
    other = released(regression(), Y, 0.5, jax.random.key(1))
    pooled = pool([posterior, other], persons="disjoint")
    joint = dataclasses.replace(
        posterior.likelihood,
        precision=posterior.likelihood.precision + other.likelihood.precision,
        linear=posterior.likelihood.linear + other.likelihood.linear,
    )  # fmt: skip
    assert is_near(pooled, *normal_of(joint, 1.0))
    report = pooled.privacy
    assert report.epsilon == posterior.privacy.epsilon and report.num_examples == 4000
    same = pool([posterior, other], persons="overlapping").privacy
    assert same.epsilon == pytest.approx(posterior.privacy.epsilon + other.privacy.epsilon)
    assert same.delta == pytest.approx(2e-5) and same.num_examples == 2000


@pytest.mark.full
def test_pool_refuses_what_does_not_belong_together(posterior, scaled):
    with pytest.raises(ValueError, match="persons="):
        pool([posterior, posterior], persons="some")
    with pytest.raises(TypeError, match="two or more"):
        pool([posterior], persons="overlapping")
    with pytest.raises(ValueError, match="run had"):
        pool([posterior, scaled], persons="overlapping")
    noisier = released(regression(noise=3.0))
    with pytest.raises(ValueError, match="another model"):
        pool([posterior, noisier], persons="overlapping")


@pytest.mark.full
def test_pool_warns_if_single_releases_tell_little():
    small = DPLaplace(regression(), budget=PrivacyBudget(0.3, 1e-3))
    own = [small.run(KEY, X[:60], Y[:60], progress_bar=False)] * 8
    with pytest.warns(PosteriorWarning, match="add up"):
        pool(own, persons="disjoint")


@pytest.mark.full
def test_holders_that_differ_are_said(posterior):
    other = X @ np.array([0.5, 1.0]) + 2 * RNG.normal(size=2000)
    other = released(regression(), other.astype(np.float32), key=jax.random.key(3))
    with pytest.warns(PosteriorWarning, match="differ by more than chance"):
        pool([posterior, other], persons="disjoint")


@pytest.mark.full
def test_latents_that_differ_by_holder(posterior):
    """The exact marginals of a normal model, on a grid of tau."""
    likelihoods = [posterior.likelihood, released(
        regression(), (X @ np.array([0.9, 0.0]) + 2 * RNG.normal(size=2000)).astype(np.float32),
        key=jax.random.key(2),
    ).likelihood]  # fmt: skip
    other = dataclasses.replace(posterior.likelihood)
    twin = numpyro_dp.posterior.Posterior(
        model=None, draws=posterior.sample, prior=None, unconstrain=None,
        privacy=posterior.privacy, method="Twin",
        likelihood=dataclasses.replace(other, linear=likelihoods[1].linear,
                                       precision=likelihoods[1].precision),
    )  # fmt: skip
    found = pool([posterior, twin], persons="disjoint", random="site").summary()
    assert found["w_site"]["mean"].shape == (2, 2) and found["w_site_sd"]["mean"].shape == (2,)
    grid = np.abs(np.random.default_rng(1).normal(size=(4000, 2))) * 0.5  # tau from its prior
    logs, means, squares = [], [], []
    for tau in grid:
        precision, linear, log = np.eye(2), np.zeros(2), 0.0
        for each in likelihoods:
            centre, spread = np.linalg.solve(each.precision, each.linear), np.diag(tau**2)
            inner = np.linalg.inv(np.linalg.inv(each.precision) + spread)
            precision, linear = precision + inner, linear + inner @ centre
            log += np.linalg.slogdet(inner)[1] / 2 - centre @ inner @ centre / 2
        mean = np.linalg.solve(precision, linear)
        logs.append(log + linear @ mean / 2 - np.linalg.slogdet(precision)[1] / 2)
        means.append(mean)
        squares.append(mean**2 + np.diag(np.linalg.inv(precision)))
    weights = np.exp(np.array(logs) - max(logs))
    weights /= weights.sum()
    mean = weights @ np.array(means)
    sd = np.sqrt(weights @ np.array(squares) - mean**2)
    assert np.allclose(found["w"]["mean"], mean, atol=0.15 * sd.max())
    assert np.allclose(found["w"]["sd"], sd, rtol=0.2)
    assert np.allclose(found["w_site_sd"]["mean"], weights @ grid, rtol=0.25)


def test_a_bayes_factor_is_that_of_the_normal_model(posterior):
    own = posterior.likelihood
    mean, covariance = normal_of(own, 1.0)
    at, before = (dist.Normal(m, s).log_prob(0.0) for m, s in (
        (mean[1], np.sqrt(covariance[1, 1])), (0.0, 1.0)
    ))  # fmt: skip
    found = posterior.evidence({"w[1]": 0})
    assert found.log_bayes_factor == pytest.approx(float(at - before), abs=1e-3)
    assert found.error == 0
    # The same by draws, since this prior is not quite normal.
    by_draws = posterior.refit(regression(dist.StudentT(1000.0))).evidence({"w[1]": 0})
    assert by_draws.log_bayes_factor == pytest.approx(float(at - before), abs=0.03)
    assert 0 < by_draws.error < 0.02
    models = posterior.compare(none={"w": 0}, first={"w[1]": 0})
    assert sum(models.values()) == pytest.approx(1) and models["none"] < 0.01
    assert models["first"] / models["all"] == pytest.approx(np.exp(found.log_bayes_factor), 1e-3)


@pytest.mark.full
def test_a_fixed_scale_has_the_bayes_factor_of_a_grid(scaled):
    prior = scaled._source.read_prior(scaled.likelihood.sites)
    own, logs = scaled.likelihood, np.linspace(-1, 2, 3001)
    # Without w, whose prior is standard normal, the likelihood of log s is normal.
    inner = own.precision[1:, 1:] + np.eye(2)
    gain = np.linalg.solve(inner, own.precision[1:, 0])
    precision = own.precision[0, 0] - own.precision[0, 1:] @ gain
    linear = own.linear[0] - gain @ own.linear[1:]
    density = dist.HalfNormal(3).log_prob(np.exp(logs)) + logs
    fit = linear * logs - precision * logs**2 / 2
    total = np.log(np.sum(np.exp(fit + density - fit.max())) * (logs[1] - logs[0])) + fit.max()
    at = np.log(2.0)
    found = scaled.evidence(s=2.0)
    assert prior.normal is None
    exact = linear * at - precision * at**2 / 2 - total
    assert found.log_bayes_factor == pytest.approx(exact, abs=0.03)


@pytest.mark.full
def test_evidence_refuses_what_is_no_bayes_factor(posterior):
    def hierarchy(x, y=None):
        tau = numpyro.sample("tau", dist.HalfNormal(1))
        w = numpyro.sample("w", dist.Normal(0, tau).expand([2]).to_event(1))
        with numpyro.plate("records", len(x)):
            numpyro.sample("y", dist.Normal(x @ w, 2.0), obs=y)

    for fixed, text in [({}, "No latent"), ({"v": 0}, "names"), ({"w[7]": 0}, "entry")]:
        with pytest.raises(ValueError, match=text):
            posterior.evidence(fixed)
    with pytest.raises(ValueError, match="depends on other latents"):
        posterior.refit(hierarchy).evidence(w=0)


def test_a_probability_counts_draws(posterior):
    site = posterior.summary()["w"]
    expected = dist.Normal(*(site[name][1] for name in ("mean", "sd"))).cdf(0.0)
    found = posterior.probability(lambda latents: latents["w"][1] < 0)
    assert found == pytest.approx(float(expected), abs=0.03)


def test_a_file_of_before_has_no_likelihood(posterior, tmp_path):
    posterior.save(path := tmp_path / "a.posterior")
    about, arrays = read_file(path)
    del about["likelihood"]
    arrays = {name: x for name, x in arrays.items() if not name.startswith("likelihood/")}
    write_file(path, about, arrays)
    old = numpyro_dp.load(path, regression())
    assert str(old.summary()) == str(posterior.summary())
    with pytest.raises(ValueError, match="does not release"):
        old.refit(regression())
