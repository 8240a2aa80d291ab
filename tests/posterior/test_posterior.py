"""``Posterior``: draws, summaries and words about it, for distributions that are known."""

import copy
import pickle
import types

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from flat import dpmcmc, dpsep, dpsvi, grouped
from models import given, of, slopes
from numpyro.infer.autoguide import AutoDelta, AutoDiagonalNormal

from numpyro_dp import (
    DPEM,
    DPPBP,
    SEP,
    SGLD,
    Posterior,
    Privacy,
    PrivacyBudget,
    RegressionNetwork,
)
from numpyro_dp.extend import Model, prior_of
from numpyro_dp.methods.ep.families import diagonal_normal
from numpyro_dp.posterior import Finding, posterior_samples
from numpyro_dp.posterior.from_model import NOISE_INCLUDED
from numpyro_dp.samplers import FullBatch

X = np.random.default_rng(0).normal(size=(400, 2)).astype(np.float32)
Y = (X @ np.array([1.0, -0.5], np.float32)).astype(np.float32)
KEY = jax.random.key(0)
FAR = Finding("convergence", False, "The run ended 3.0 posterior standard deviations away.")
BUDGET = PrivacyBudget(2.0, 1e-4)
COMMON = {"sampler": FullBatch(), "budget": BUDGET}


def model(x, y=None, *, scale=1.0):
    likelihood = lambda x, w, sd: dist.Normal(x @ w, sd)  # noqa: E731
    given(likelihood, w=slopes(scale), sd=dist.HalfNormal(1))(x, y)


def report(epsilon=1.0):
    return types.SimpleNamespace(epsilon=epsilon, delta=1e-5, relation="add_or_remove_one")


def normal(scale, shape):
    scale = jnp.broadcast_to(jnp.asarray(scale, float), shape)
    return lambda key, n: {"w": scale * jax.random.normal(key, (n, *shape))}


def made(draws, prior, *, unconstrain=lambda draws: draws, epsilon=1.0, **others):
    return Posterior(
        model=model, draws=draws, prior=prior, unconstrain=unconstrain,
        privacy=report(epsilon), method="by hand", **others,
    )  # fmt: skip


def run_svi(guide=AutoDiagonalNormal, steps=60, of=model, args=(X, Y), optim=None, **others):
    optim = optax.adam(0.05) if optim is None else optim
    svi = dpsvi(of, guide, optim, clip_norm=2.0, **COMMON, **others)
    return svi.run(KEY, steps, *args, progress_bar=False)


@pytest.fixture(scope="module")
def fitted():
    guide = AutoDiagonalNormal(model)
    return guide, run_svi(guide, scale=3.0)


def test_summary_of_known_normals():
    scales = np.array([0.2, 0.5, 1.0])
    found = made(normal(scales, (3,)), normal(1.0, (3,))).summary(prob=0.9)["w"]
    n = 4000
    np.testing.assert_allclose(found["mean"], 0, atol=4 * scales.max() / np.sqrt(n))
    np.testing.assert_allclose(found["sd"], scales, rtol=4 / np.sqrt(2 * n))
    # The density at the 5 % quantile is 0.103 / sd: a standard error of 0.218 / (0.103 sqrt(n)).
    for end, sign in (("lower", -1), ("upper", 1)):
        np.testing.assert_allclose(
            found[end] / scales, sign * 1.645, atol=4 * 0.218 / 0.103 / np.sqrt(n)
        )
    np.testing.assert_allclose(found["prior_share"], scales**2, rtol=4 * 2.7 / np.sqrt(n))
    assert found["prior_share"].max() <= 1


def test_shares_of_the_prior():
    """They may exceed 1, but not by chance; they are robust, in unconstrained coordinates."""
    share = made(normal([1.0, 1.2], (2,)), normal(1.0, (2,))).summary()["w"]["prior_share"]
    assert share[0] <= 1
    assert share[1] == pytest.approx(1.44, rel=4 * 2.7 / np.sqrt(4000))

    def heavy(scale):  # logarithms of Cauchy draws, which have no moments
        cauchy = lambda key, n: jnp.clip(jax.random.cauchy(key, (n,)), -80, 80)  # noqa: E731
        return lambda key, n: {"w": jnp.exp(scale * cauchy(key, n))}

    posterior = made(heavy(0.5), heavy(1.0), unconstrain=lambda d: {"w": jnp.log(d["w"])})
    assert posterior.summary()["w"]["prior_share"] == pytest.approx(0.25, rel=0.3)

    def simplex(strength):  # no coordinate for each entry: its own units are used
        return lambda key, n: {"w": jax.random.dirichlet(key, strength * jnp.ones(3), (n,))}

    posterior = made(
        simplex(100.0), simplex(1.0), unconstrain=lambda d: {"w": jnp.log(d["w"][:, :-1])}
    )
    share = posterior.summary()["w"]["prior_share"]
    assert share.shape == (3,)
    assert (share < 0.05).all()


@pytest.mark.parametrize(("scale", "size", "epsilon", "others", "words"), [
    (0.1, 3, 1.0, {}, "Every latent is known well beyond its prior (largest share"),
    (0.5, 3, 1.0, {}, "The records say more than the prior about every latent (largest"),
    (0.95, 4, 1.0, {}, "The budget buys little here: 4 of 4 latents are more than half prior."),
    (0.95, 1, 1.0, {}, "The budget buys little here: 1 of 1 latent is more than half prior."),
    (0.95, 3, np.inf, {}, "The records say little here: 3 of 3 latents are more than half"),
    ([0.95, 0.1, 0.1], 3, 1.0, {}, "1 of 3 latents is more than half prior (largest share"),
    (0.0, 2, 1.0, {}, "No latent has a spread"),
    (0.1, 3, 1.0, {"converged": False}, "If the run has converged: every latent is known"),
    (0.95, 3, 1.0, {"findings": (FAR,)}, "The run ended far from its optimum: 3 of 3 latents"),
])  # fmt: skip
@pytest.mark.every_case
def test_verdicts(scale, size, epsilon, others, words):
    posterior = made(normal(scale, (size,)), normal(1.0, (size,)), epsilon=epsilon, **others)
    assert str(posterior).splitlines()[-1].startswith(words)
    assert ("NOT PRIVATE" in repr(posterior)) == np.isinf(epsilon)


@pytest.mark.parametrize(("size", "count"), [(1, 0), (5, 1), (30, 2), (30, 20)])
@pytest.mark.every_case
def test_at_most_ten_lines(size, count):
    notes = tuple(f"The scale\nof column {i} was a guess: pass scales=." for i in range(count))
    posterior = made(normal(0.1, (size,)), normal(1.0, (size,)), notes=notes)
    lines = repr(posterior).splitlines()
    assert len(lines) <= 10
    assert lines[:2] == [
        f"Posterior of {size} latent{'s' * (size > 1)}, epsilon <= 1 at delta=1e-05 under "
        "add_or_remove_one",
        "by hand",
    ]
    assert ("more: summary()" in repr(posterior)) == (size > 5)
    assert ("more: notes" in repr(posterior)) == (count > 3)
    if count:
        assert "The scale of column 0 was a guess: pass scales=." in lines


def test_one_set_of_draws_serves_all_summaries_and_is_smaller_for_large_models(monkeypatch):
    calls = []

    def draws(key, n):
        calls.append(n)
        return normal(0.5, (2,))(key, n)

    def summaries():
        posterior = made(draws, normal(1.0, (2,)))
        str(posterior), posterior.summary(), posterior.summary(0.5), repr(posterior)

    summaries()
    assert calls == [1, 4000]
    for most, number in ((1200, 600), (2, 200)):
        calls.clear()
        monkeypatch.setattr("numpyro_dp.posterior.posterior._MOST_VALUES", most)
        summaries()
        assert calls == [1, number]


def test_the_table():
    summary = made(normal(0.5, (80,)), normal(1.0, (80,))).summary(prob=0.9)
    assert list(summary) == ["w"] and len(summary) == 1 and summary.prob == 0.9
    lines = repr(summary).splitlines()
    assert lines[0].split() == ["mean", "sd", "5.0%", "95.0%", "prior", "share"]
    assert lines[1].startswith("w[0] ") and lines[-1] == "... and 20 more rows, by site."
    narrow = made(normal(0.5, ()), normal(1.0, ())).summary(prob=0.999)
    assert "0.05%  99.95%" in " ".join(str(narrow).splitlines()[0].split("   "))


@pytest.mark.parametrize(("call", "error", "words"), [
    (lambda p: p.sample(KEY, 0), ValueError, "num_samples=0"),
    (lambda p: p.sample(KEY, 2.0), TypeError, r"num_samples=2\.0"),
    (lambda p: p.sample(0, 3), TypeError, "rng_key"),
    (lambda p: p.predict(3, X), TypeError, "rng_key"),
    (lambda p: p.predict(KEY, X, num_samples=-1), ValueError, "num_samples=-1"),
    (lambda p: p.summary(1.0), ValueError, r"prob=1\.0"),
    (lambda p: p.summary("all"), TypeError, "prob='all'"),
])  # fmt: skip
@pytest.mark.every_case
def test_bad_input(call, error, words):
    with pytest.raises(error, match=words):
        call(made(normal(0.5, ()), normal(1.0, ())))


def test_of_svi(fitted):
    guide, result = fitted
    assert result.posterior is result.posterior
    assert result.posterior.notes == ("The intervals include the noise of privacy.",)
    for name, value in result.sample(KEY, 7).items():
        np.testing.assert_array_equal(value, result.posterior.sample(KEY, 7)[name])
    assert str(result.summary()) == str(result.posterior.summary())
    with pytest.raises(AttributeError, match="A RunResult has no 'samples'"):
        result.samples  # noqa: B018
    posterior = result.plain_posterior
    assert posterior.privacy is result.privacy
    assert posterior.method == "DPSVI with AutoDiagonalNormal, 60 steps"
    draws = posterior.sample(KEY, 7)
    same = posterior_samples(KEY, guide, result.params, 7)
    assert set(draws) == {"w", "sd"}
    for name, value in draws.items():
        np.testing.assert_array_equal(value, same[name])
    predicted = posterior.predict(KEY, X[:3], num_samples=11)
    assert {name: value.shape for name, value in predicted.items()} == {"y": (11, 3)}
    assert posterior.predict(KEY, X[:3], None)["y"].shape == (1000, 3)
    assert any("do not contain the privacy noise" in note for note in posterior.notes)
    tree = result.posterior.to_arviz(50)
    assert tree["posterior"]["w"].shape == (1, 50, 2)
    assert tree.attrs["epsilon"] == result.privacy.epsilon


def test_shares_of_svi_are_of_the_prior_with_static_keywords(fitted):
    """w has a normal prior of scale 3; log sd has a density that is known."""
    result = fitted[1]
    scale = result.params["auto_scale"]  # of w[0], w[1] and log sd
    summary = result.plain_posterior.summary()
    log_prior = np.log(np.abs(np.random.default_rng(1).normal(size=100_000)))
    width = np.diff(np.quantile(log_prior, [0.16, 0.84]))[0]
    quantile = 2 * 0.99446  # of a normal distribution, from 16 to 84 %
    rtol = 4 * 2.7 / np.sqrt(4000)
    np.testing.assert_allclose(
        summary["sd"]["prior_share"], (quantile * scale[2] / width) ** 2, rtol=rtol
    )
    np.testing.assert_allclose(summary["w"]["prior_share"], (scale[:2] / 3) ** 2, rtol=rtol)


def test_a_pickle_has_no_posterior_and_copies_do(fitted):
    result = fitted[1]
    with pytest.raises(ValueError, match=r"posterior_samples\(rng_key, guide, result.params"):
        pickle.loads(pickle.dumps(result)).posterior  # noqa: B018
    for other in (copy.copy(result), copy.deepcopy(result)):
        assert str(other.posterior) == str(result.posterior)


@pytest.mark.extended
def test_a_guide_that_is_a_point_has_the_posterior_of_its_scores():
    posterior = run_svi(AutoDelta, steps=3).posterior
    assert "3 of 3 latents are more than half prior" in str(posterior)
    assert np.all(posterior.summary()["w"]["sd"] > 0.5)


@pytest.mark.extended
def test_local_latents_are_left_out_and_models_keep_their_parameters():
    def with_locals(y, size=None):
        mean = numpyro.sample("mean", dist.Normal(0, 2))
        offset = numpyro.param("offset", 100.0)
        with numpyro.plate("records", len(y) if size is None else size):
            z = numpyro.sample("z", dist.Normal(mean, 1))
            numpyro.sample("y", dist.Normal(z + offset, 1), obs=y)

    def guide(y, size=None):
        location = numpyro.param("location", 0.0)
        numpyro.sample("mean", dist.Normal(location, 0.1))
        slope = numpyro.param("slope", 0.1)
        with numpyro.plate("records", len(y)):
            numpyro.sample("z", dist.Normal(slope * y, 1))

    posterior = run_svi(guide, 2, with_locals, (Y,)).posterior
    assert set(posterior.sample(KEY, 3)) == {"mean"}
    assert posterior.method == "DPSVI with guide, 2 steps"
    predicted = posterior.predict(KEY, None, size=4, num_samples=5)["y"]
    assert predicted.shape == (5, 4)
    assert abs(predicted.mean() - 100) < 5


@pytest.mark.extended
def test_factors_and_improper_priors_are_said():
    def with_factor(prior):
        def model(x):
            mean = numpyro.sample("mean", prior)
            numpyro.factor("belief", -(mean**2))
            with numpyro.plate("records", len(x)):
                numpyro.sample("x", dist.Normal(mean, 1), obs=x)

        return model

    def guide(x):
        numpyro.sample("mean", dist.Normal(numpyro.param("location", 0.0), 0.1))

    improper = with_factor(dist.ImproperUniform(dist.constraints.real, (), ()))
    posterior = run_svi(guide, 2, improper, (Y,)).posterior
    assert np.isnan(posterior.summary()["mean"]["prior_share"])
    assert str(posterior).endswith("the share of the prior is not known.")
    notes = run_svi(guide, 2, with_factor(dist.Normal(0, 1)), (Y,)).posterior.notes
    assert "The share of the prior leaves out the factors ['belief']." in notes


@pytest.mark.extended
def test_supports_may_depend_on_other_latents():
    def nested(y):
        top = numpyro.sample("top", dist.LogNormal(0, 1))
        part = numpyro.sample("part", dist.Uniform(0, top))
        with numpyro.plate("records", len(y)):
            numpyro.sample("y", dist.Normal(part, 1), obs=y)

    def guide(y):
        top = numpyro.sample("top", dist.LogNormal(numpyro.param("location", 0.0), 1.0))
        numpyro.sample("part", dist.Uniform(0, top))

    posterior = run_svi(guide, 1, nested, (Y,), optax.sgd(0.0)).posterior
    shares = [posterior.summary()[name]["prior_share"] for name in ("top", "part")]
    np.testing.assert_allclose(shares, 1, rtol=3 * 2.7 / np.sqrt(4000))  # guide and prior agree


@pytest.mark.extended
def test_of_message_passing():
    known = of(lambda mean: dist.Normal(mean, 1), mean=dist.Normal(0, 2))
    first = SEP(known, damping=1.0).run(KEY, 2, Y, progress_bar=False)
    assert first.posterior.sample(KEY, 4)["mean"].shape == (4,)
    share = first.posterior.summary()["mean"]["prior_share"]
    assert share == pytest.approx(1 / (1 + 4 * len(Y)), rel=4 * 2.7 / np.sqrt(4000))
    assert first.posterior.notes == ()
    assert "NOT PRIVATE" in str(first.posterior)

    result = dpsep(known, diagonal_normal, **COMMON).run(KEY, 2, Y, progress_bar=False)
    assert result.posterior.method == "DPSEP with diagonal_normal, 2 steps"
    assert result.posterior.notes == ("The intervals include the noise of privacy.",)
    plain = result.plain_posterior
    assert plain.notes == ("The intervals do not contain the privacy noise of the run.",)


@pytest.mark.extended
def test_of_a_sampler():
    sizes = {"num_warmup": 2, "num_samples": 6, "num_chains": 2, "clip_norm": 5.0, "scale": 3.0}
    mcmc = dpmcmc(SGLD(model), **sizes, **COMMON)
    with pytest.raises(ValueError, match="no posterior yet. Call run first"):
        mcmc.posterior  # noqa: B018
    mcmc.run(KEY, X, Y)
    posterior, samples = mcmc.posterior, mcmc.get_samples()
    assert posterior.method == "DPMCMC by SGLD, 12 samples of 2 chains"
    assert samples["w"].shape == (12, 2)
    assert posterior.notes[0].startswith("The chains have not mixed")
    draws = posterior.sample(KEY, 4000)  # of the prior
    np.testing.assert_allclose(draws["w"].std(0), 3.0, rtol=0.1)
    mcmc = dpmcmc(SGLD(model, 1e-3), noise_multiplier=0.0, **sizes)
    mcmc.run(KEY, X, Y)
    posterior, samples = mcmc.posterior, mcmc.get_samples()
    draws = posterior.sample(KEY, 24)
    for name, value in samples.items():  # each twice, and pairs of sites stay together
        np.testing.assert_array_equal(np.sort(draws[name], 0), np.sort(np.repeat(value, 2, 0), 0))
    rows = [set(zip(np.asarray(x["w"][:, 0]).tolist(), np.asarray(x["sd"]).tolist(), strict=True))
            for x in (draws, samples)]  # fmt: skip
    assert rows[0] == rows[1]
    assert posterior.predict(KEY, X[:3], num_samples=5)["y"].shape == (5, 3)
    assert posterior.privacy is mcmc.privacy


@pytest.mark.extended
def test_of_a_network():
    network = RegressionNetwork((3,), weight_precision=None)
    result = DPPBP(network, **grouped(clip_norm=1.0, **COMMON)).run(
        KEY, 2, X, Y, progress_bar=False
    )
    posterior = result.posterior
    assert set(posterior.sample(KEY, 2)) == {"weights", "noise_precision", "weight_precision"}
    assert 0.1 < posterior.summary()["weight_precision"]["prior_share"] <= 1
    plain = result.plain_posterior.summary()["weight_precision"]
    assert plain["sd"] == 0 and np.isnan(plain["prior_share"])
    assert NOISE_INCLUDED in posterior.notes
    assert "weight_precision is a point estimate." in result.plain_posterior.notes
    assert posterior.predict(KEY, X[:4], None, num_samples=3)["y"].shape == (3, 4)


@pytest.mark.full
def test_point_estimates_of_mixtures_have_none():
    driver = DPEM(2, **grouped(clip_norm=4.0, scale=0.3, **COMMON))
    with pytest.raises(ValueError, match="DPEM gives point estimates"):
        driver.run(KEY, 2, X, progress_bar=False).posterior  # noqa: B018


@pytest.mark.full
def test_a_prior_with_two_modes_is_not_normal_and_chains_in_both_are_kept():
    """Each component is normal, and so is the density around any one point."""

    def model(x):
        ends = dist.Normal(jnp.array([-3.0, 3.0]), 0.3)
        z = numpyro.sample("z", dist.MixtureSameFamily(dist.Categorical(jnp.full(2, 0.5)), ends))
        w = numpyro.sample("w", dist.StudentT(3, 0, 1))
        with numpyro.plate("records", x.shape[0]):
            numpyro.sample("x", dist.Normal(z + w, 1), obs=x)

    structure = Privacy().given_model(model, {}).structure((np.ones(100),), {})
    prior = prior_of(Model(model, structure), ())
    assert prior.normal is None
    # In order of name: w is known, and z is not. So neither draws of the prior nor normal draws do.
    precision, linear = np.diag([1e4, 1e-3]), np.array([1e4, 0.0])
    modes = []
    for key in jax.random.split(jax.random.key(0), 6):
        draws = prior.posterior(precision, linear, key)(jax.random.key(1), 1000)
        assert abs(draws["w"].mean() - 1) < 0.01
        modes.append(float(jnp.mean(draws["z"] > 0)))
    # A chain does not leave its mode. Two chains that start apart are often in both.
    assert any(0.2 < share < 0.8 for share in modes), modes


def test_effects_have_the_scale_that_a_sharp_likelihood_tells():
    def model(x):
        scale = numpyro.sample("scale", dist.HalfNormal(5.0))
        effect = numpyro.sample("effect", dist.Normal(0, scale).expand([30]).to_event(1))
        with numpyro.plate("x", x.shape[0]):
            numpyro.sample("obs", dist.Normal(effect.sum() + effect[0], 1), obs=x)

    structure = Privacy().given_model(model, {}).structure((np.ones(100),), {})
    prior = prior_of(Model(model, structure), ())
    told, sd = np.linspace(-0.4, 0.4, 30), 0.01
    precision = np.eye(30) / sd**2
    near = prior.near(precision, precision @ told).prior
    # The most likely scale, if that is known well: tau^2 = mean of the squares of effects.
    np.testing.assert_allclose(np.diag(near.covariance), np.mean(told**2), rtol=0.15)
    np.testing.assert_allclose(near.mean, 0, atol=0.05)
    drawn = prior.posterior(precision, precision @ told, KEY)(KEY, 4000)
    np.testing.assert_allclose(drawn["effect"].mean(0), told, atol=sd / 3)
    np.testing.assert_allclose(drawn["effect"].std(0), sd, rtol=0.15)
    assert drawn["scale"].mean() == pytest.approx(np.sqrt(np.mean(told**2)), rel=0.1)
