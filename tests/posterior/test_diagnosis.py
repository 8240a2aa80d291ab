"""Diagnoses of posteriors: bad runs are found, good ones are not."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from flat import dpmcmc, dpsep, dpsvi
from models import given, logistic, of, slopes
from numpyro.infer.autoguide import AutoDiagonalNormal, AutoIAFNormal

from numpyro_dp import SGLD, DPLaplace, Privacy, PrivacyBudget
from numpyro_dp.estimators import aligned
from numpyro_dp.extend import Model, prior_of
from numpyro_dp.mechanisms import AdaptiveClip
from numpyro_dp.methods.ep.families import diagonal_normal, normal
from numpyro_dp.posterior import PosteriorWarning
from numpyro_dp.posterior.diagnosis import (
    findings_of_normal,
    findings_of_path,
    findings_of_pooling,
    findings_of_shares,
)
from numpyro_dp.posterior.likelihood import Prior

N, D = 2000, 2
RNG = np.random.default_rng(0)
X = RNG.normal(size=(N, D)).astype(np.float32)
Y = (RNG.random(N) < 1 / (1 + np.exp(-X @ np.array([1.0, -1.0])))).astype(int)

model = logistic()


def run(*, steps=600, rate=0.02, epsilon=3.0, delta=1e-5, guide=AutoDiagonalNormal, **others):
    budget = PrivacyBudget(epsilon, delta)
    svi = dpsvi(model, guide, optax.adam(rate), budget=budget, **{"estimator": None} | others)
    return svi.run(jax.random.key(0), steps, X, Y, progress_bar=False)


def bad(diagnosis):
    return {finding.name for finding in diagnosis.bad}


@pytest.mark.full
def test_a_good_run_is_not_bad():
    diagnosis = run().diagnose()
    assert diagnosis.findings == ()
    assert str(diagnosis) == "No problem was found."


@pytest.mark.full
@pytest.mark.parametrize("epsilon", [10.0, 10.5])
def test_a_budget_that_promises_nothing_is_told(epsilon):
    driver = DPLaplace(
        model, budget=PrivacyBudget(epsilon, 1e-5), privacy=Privacy(secret_key=1, repetition=True)
    )
    posterior = driver.run(jax.random.key(0), X, Y, progress_bar=False)
    above = epsilon > 10
    assert ("promises nothing" in str(posterior).splitlines()[0]) is above
    assert ("epsilon=10.5 promises nothing" in str(posterior.diagnose())) is above
    assert ("promises nothing" in str(posterior.privacy)) is above
    assert not posterior.diagnose().bad


CASES = {
    "delta": {"delta": 1e-3},
    "clip norm": {"clip_norm": AdaptiveClip(100.0, learning_rate=0.5)},
    "values": {"rate": float("inf")},
    "intervals": {"guide": AutoIAFNormal},
    "prior": {"epsilon": 0.01},
    "clipping": {"estimator": aligned()},
}


@pytest.mark.full
@pytest.mark.table
@pytest.mark.parametrize("name", CASES)
def test_bad_runs_are_found(name):
    result = run(**CASES[name])
    if name == "intervals":  # a flow is not normal, and its own draws leave out the noise
        diagnosis = result.plain_posterior.diagnose()
    else:
        with pytest.warns(PosteriorWarning, match="Do not believe this posterior yet"):
            diagnosis = result.posterior.diagnose()
    assert name in bad(diagnosis), diagnosis
    assert str(diagnosis).startswith("BAD ")


@pytest.mark.full
def test_a_run_that_stopped_early_has_wide_intervals_that_hold_and_a_note():
    result = run(steps=200, rate=2e-4, epsilon=100.0)
    findings = {finding.name: finding for finding in result.diagnose().findings}
    assert not findings["convergence"].bad
    table = result.posterior.summary()["w"]
    assert (table["sd"] > 0.2).all()
    assert (np.abs(table["mean"] - np.array([1.0, -1.0])) < 1.645 * table["sd"]).all()


def test_points_that_move_far_and_posteriors_far_from_the_prior_are_bad():
    assert findings_of_path(0.5, 1.5, 0.3) == []
    assert findings_of_path(0.5, 3.0, 0.02) == []  # the likelihood is quadratic that far
    assert findings_of_path(0.5, 300.0, 0.02)[0].name == "steps"  # columns are large
    assert {f.name for f in findings_of_path(4.0, 9.0, 0.3) if f.bad} == {"convergence", "steps"}
    prior = Prior(np.zeros(2), np.eye(2))
    assert findings_of_normal(np.ones(2), np.eye(2) / 9, prior) == []
    assert findings_of_normal(np.full(2, 5.0), np.eye(2) / 9, prior)[0].name == "conflict"
    (finding,) = findings_of_shares(np.array([0.1, 0.9]), True)
    assert not finding.bad  # a posterior that is partly prior is a note
    assert "1 of 2 latents" in finding.text


apart = of(
    lambda mean: dist.Normal(mean, 1).to_event(1), mean=dist.Normal(0, 1).expand([2]).to_event(1)
)


@pytest.mark.full
@pytest.mark.parametrize(("model", "family", "shared", "told"), [
    (apart, diagonal_normal, False, set()),  # records mix no latents
    (model, normal, False, set()), (model, diagonal_normal, False, {"independent"}),
    (model, normal, True, {"independent"}),
])  # fmt: skip
def test_a_family_that_knows_no_correlation_is_told(model, family, shared, told):
    sep = dpsep(model, family, shared_precision=shared, clip_norm=5.0 if model is apart else 1.0,
                budget=PrivacyBudget(3.0, 1e-5))  # fmt: skip
    args = (X,) if model is apart else (X, Y)
    result = sep.run(jax.random.key(0), 10, *args, progress_bar=False)
    assert bad(result.diagnose()) == told


@pytest.mark.full
def test_chains_that_stand_still_are_found_and_are_the_prior():
    mcmc = dpmcmc(SGLD(model), num_warmup=50, num_samples=200, budget=PrivacyBudget(0.01, 1e-5))
    mcmc.run(jax.random.key(0), X, Y)
    with pytest.warns(PosteriorWarning, match="have not mixed"):
        mcmc.posterior  # noqa: B018
    assert "mixing" in bad(mcmc.posterior.diagnose())
    assert jnp.allclose(mcmc.posterior.summary()["w"]["sd"], 1.0, rtol=0.1)


counts = given(lambda x, w: dist.Poisson(jnp.exp(x @ w)), w=slopes())

values = given(lambda x, w: dist.Normal(x @ w, 1.0), w=slopes())


@pytest.mark.extended
def test_a_right_model_with_many_latents_is_not_said_to_be_wrong():
    """Draws far from the truth make residuals larger, too."""
    rng, wrong = np.random.default_rng(3), 0
    laplace = DPLaplace(model, budget=PrivacyBudget(1.0, 1e-5))
    for seed in range(12):
        x, w = rng.normal(size=(1000, 20)).astype(np.float32), rng.normal(size=20)
        y = (rng.random(1000) < 1 / (1 + np.exp(-x @ w))).astype(int)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PosteriorWarning)
            wrong += "misfit" in bad(laplace.run(jax.random.key(seed), x, y).diagnose())
    assert wrong == 0


@pytest.mark.full
@pytest.mark.parametrize("kind", ["counts", "values"])
def test_outcomes_that_vary_more_than_the_model_says_are_found(kind):
    slope = X @ np.array([0.5, -0.5])
    if kind == "counts":
        rate, spread = np.exp(slope), RNG.gamma(0.5, 2.0, size=N)
        given, good, wild = counts, RNG.poisson(rate), RNG.poisson(rate * spread)
    else:
        given, good, wild = values, slope + RNG.normal(size=N), slope + RNG.standard_cauchy(N)
    laplace = DPLaplace(given, budget=PrivacyBudget(3.0, 1e-5))
    sds = []
    for outcomes, names in ((good, set()), (wild, {"misfit"})):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PosteriorWarning)
            posterior = laplace.run(jax.random.key(0), X, outcomes.astype(np.float32))
        assert bad(posterior.diagnose()) - {"arrival"} == names
        sds.append(np.mean(posterior.summary()["w"]["sd"]))
    assert sds[1] > 1.1 * sds[0]


@pytest.mark.full
def test_effects_that_only_their_scale_makes_alike_are_named():
    """Released values with an error of 3 and no scatter at all, and with an error of 0.2."""

    def model(x):
        scale = numpyro.sample("scale", dist.HalfCauchy(1.0))
        with numpyro.plate("groups", 25):
            effect = numpyro.sample("effect", dist.Normal(0, scale))
        with numpyro.plate("records", x.shape[0]):
            numpyro.sample("x", dist.Normal(effect[0], 1), obs=x)

    structure = Privacy().given_model(model, {}).structure((np.ones(100),), {})
    prior = prior_of(Model(model, structure), ())
    truth = np.random.default_rng(0).normal(size=25)
    for error, values, names in ((3.0, 0 * truth, ["pooling"]), (0.2, truth, [])):
        likelihood = np.eye(25) / error**2, values / error**2
        vectors = prior.vectors(*likelihood, jax.random.key(0))
        _, covariance = prior.decoded.updated(*likelihood)
        found = findings_of_pooling(prior, vectors, covariance)
        assert [each.name for each in found] == names
        assert all(each.bad and "about effect" in each.text for each in found)
