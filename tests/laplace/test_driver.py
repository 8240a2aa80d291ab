"""DPLaplace: what a run spends, repeats and finds."""

import functools
import itertools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from flat import grouped
from models import given, of

from numpyro_dp import (
    DPLaplace,
    NoiseReuseError,
    PrivacyBudget,
    UnsupportedModelError,
    fit,
)
from numpyro_dp.laplace import decode, guess, pattern
from numpyro_dp.posterior.prior import ModelPrior
from numpyro_dp.privacy.plan import BudgetError
from numpyro_dp.run import loop

KEY = jax.random.key(0)
D = 3
BUDGET = PrivacyBudget(1.0, 1e-5)


def glm(family, prior=dist.Normal(0, 1), **priors):  # noqa: B008
    """A generalised linear model with a weight for each column, and further latents."""
    return given(
        lambda x, w, **others: family(x @ w, **others), "rows",
        w=lambda x: prior.expand([x.shape[1]]).to_event(1), **priors,
    )  # fmt: skip


FAMILIES = {
    "logistic": lambda eta: dist.Bernoulli(logits=eta),
    "counts": lambda eta: dist.Poisson(jnp.exp(eta)),
}
logistic = glm(FAMILIES["logistic"])
counts = glm(FAMILIES["counts"], dist.Normal(0, 0.5))
linear = glm(lambda eta, s: dist.Normal(eta, s), s=dist.HalfNormal(1.0))
textbook = glm(  # with the priors of textbooks
    lambda eta, a, s: dist.Normal(a + eta, s), dist.Normal(0, 10),
    a=dist.Normal(0, 100), s=dist.HalfCauchy(5.0),
)  # fmt: skip


def intercepts(group, y):
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    with numpyro.plate("groups", 6):
        effect = numpyro.sample("effect", dist.Normal(0, scale))
    with numpyro.plate("rows", group.shape[0]):
        numpyro.sample("y", dist.Normal(effect[group], 1.0), obs=y)


def apart():
    """Groups whose outcomes differ, and do not vary within a group."""
    group = np.arange(3000) % 6
    return jnp.asarray(group), jnp.asarray(np.linspace(-2, 2, 6)[group], jnp.float32)


def yes_or_no(rng, eta):
    return (rng.random(len(eta)) < 1 / (1 + np.exp(-np.asarray(eta, float)))).astype(np.int32)


def normal_outcomes(seed, number, w, spread):
    """Predictors and outcomes of a linear model."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(number, len(w))).astype(np.float32)
    return x, (x @ w + spread * rng.normal(size=number)).astype(np.float32)


FOUR = np.array([0.5, -1.0, 0.2, 0.7])


@functools.cache
def records(number=2000, seed=1):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(number, D)).astype(np.float32)
    return jnp.asarray(x), jnp.asarray(yes_or_no(rng, x @ np.array([1.0, -0.5, 0.0])))


@functools.cache
def outcome_counts(number=1000):
    x, _ = records(number)
    rng = np.random.default_rng(2)
    return x, jnp.asarray(rng.poisson(np.exp(x @ np.array([0.3, -0.3, 0.0]))).astype(np.int32))


def draws(posterior, name="w", number=4000):
    return np.asarray(posterior.sample(jax.random.key(3), number)[name], np.float64)


def run(model=logistic, args=None, key=KEY, **options):
    options = {"budget": BUDGET} | options
    return DPLaplace(model, **grouped(**options)).run(key, *(records() if args is None else args))


def repeated(model, args, secret_key, **options):
    """A run whose noise is always the same."""
    return run(model, args, secret_key=secret_key, repetition=True, **options)


def test_the_budget_is_spent_and_no_more():
    """Under both relations, and after an earlier run. Replacing a record needs twice the noise."""
    spent = []
    for relation in ("add_or_remove_one", "replace_one"):
        privacy = run(budget=PrivacyBudget(0.7, 1e-5, relation)).privacy
        assert 0.69 < privacy.epsilon <= 0.7
        assert (privacy.relation, privacy.delta) == (relation, 1e-5)
        assert privacy.num_steps == 21  # the size, the scales, seven stages and up to twelve more
        assert "rows" in str(privacy)
        spent.append(privacy)
    assert spent[1].noise_multiplier == pytest.approx(2 * spent[0].noise_multiplier, rel=0.02)
    second = run(budget=PrivacyBudget(1.2, 1e-5).after(spent[0])).privacy
    assert 1.15 < second.epsilon <= 1.2
    with pytest.raises(BudgetError):
        run(budget=PrivacyBudget(0.6, 1e-5).after(spent[0]))


@pytest.mark.full
def test_a_secret_key_repeats_a_run_where_that_was_asked_for():
    posterior = run(secret_key=11)
    with pytest.raises(NoiseReuseError, match="secret_key"):
        run(secret_key=11)
    again = repeated(logistic, records(), 11)
    np.testing.assert_array_equal(draws(posterior), draws(again))
    assert again.privacy.repetition
    laplace = DPLaplace(logistic, budget=BUDGET)
    one, other = (laplace.run(KEY, *records()) for _ in range(2))  # with new noise
    means = [draws(each).mean(0) for each in (posterior, one, other)]
    for first, second in itertools.combinations(means, 2):
        assert np.abs(first - second).max() > 1e-4
    assert not other.privacy.reproducible


def exact(x, y, prior_sd=1.0):
    """Mode and covariance of the logistic posterior."""
    x, y, z = np.asarray(x, float), np.asarray(y, float), np.zeros(x.shape[1])
    for _ in range(30):
        p = 1 / (1 + np.exp(-x @ z))
        precision = x.T * (p * (1 - p)) @ x + np.eye(len(z)) / prior_sd**2
        z = z + np.linalg.solve(precision, x.T @ (y - p) - z / prior_sd**2)
    return z, np.linalg.inv(precision)


def test_with_a_large_budget_it_is_the_posterior():
    found = draws(run(budget=PrivacyBudget(1e3, 1e-5), scales={"x": 1.0}))
    mean, covariance = exact(*records())
    sd = np.sqrt(np.diag(covariance))
    assert np.abs((found.mean(0) - mean) / sd).max() < 0.35
    np.testing.assert_allclose(found.std(0) / sd, 1, atol=0.15)
    gap = np.corrcoef(found.T) - covariance / np.outer(sd, sd)
    assert np.abs(gap).max() < 0.15


@pytest.mark.full
@pytest.mark.parametrize("model", [logistic, counts], ids=["logistic", "counts"])
def test_microbatches_and_streams_change_the_rounding_alone(model, monkeypatch):
    args = records(1003) if model is logistic else outcome_counts(1003)
    known = draws(repeated(model, args, 5))
    for size in (37, 300):
        found = draws(repeated(model, args, 5, microbatch_size=size))
        assert np.abs((found - known) / known.std(0)).max() < 0.02
    monkeypatch.setattr(loop, "_BYTES", 400 * 16)  # parts of 400, 400 and 203 records
    laplace = DPLaplace(model, **grouped(budget=BUDGET, secret_key=5, repetition=True))
    found = draws(laplace.run(KEY, *map(np.asarray, args), stream=True))
    np.testing.assert_allclose(found, known, rtol=1e-5, atol=1e-6)


@pytest.mark.extended
def test_scales_are_noted_and_change_the_first_guess_alone():
    guessed, told = run(secret_key=9), run(secret_key=10, scales={"x": [1.0, 1.0, 1.0]})
    assert any("Columns were taken" in note for note in guessed.notes)
    assert not told.notes
    assert [str(each) for each in told.privacy.public] == ["scales['x']: float32[3]"]
    far = draws(run(args=(records()[0] * jnp.array([1.0, 100.0, 0.01]), records()[1]),
                    scales={"x": [1.0, 100.0, 0.01]}))  # fmt: skip
    assert np.isfinite(far).all()
    assert abs(far.mean(0)[0] - 1) < 5 * far.std(0)[0]
    assert far.std(0)[2] > 0.8  # a column of .01 says nothing


@pytest.mark.extended
def test_a_column_of_booleans_may_be_a_mask():
    def masked(x, seen, y):
        w = numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))
        with numpyro.plate("records", len(x)), numpyro.handlers.mask(mask=seen):
            numpyro.sample("y", dist.Bernoulli(logits=x @ w), obs=y)

    x, y = records()
    seen = np.arange(len(y)) % 4 > 0
    y = np.where(seen, y, 0)
    found = run(masked, (x, seen, y)).summary()["w"]
    kept = run(logistic, (x[seen], y[seen])).summary()["w"]
    far = np.abs(found["mean"] - kept["mean"]) / np.hypot(found["sd"], kept["sd"])
    assert far.max() < 5


@pytest.mark.full
def test_fit_takes_it_where_it_can_and_says_why_not():
    x, y = records()
    posterior = fit(logistic, x, y, epsilon=1.0, rng_key=KEY)
    assert posterior.method.startswith("DPLaplace")
    assert posterior.privacy.epsilon <= 1

    prior = dist.ImproperUniform(dist.constraints.real_vector, (), (D,))
    improper = given(lambda x, w: dist.Bernoulli(logits=x @ w), w=prior)
    notes = fit(improper, x, y, epsilon=1.0, rng_key=KEY).notes
    assert any("not take this model: A prior of this model has no sampler" in n for n in notes)


MEAN_OF_SLOPES = 0.0


@pytest.mark.full
def test_fit_compiles_a_model_once_and_sees_when_it_changes(monkeypatch):
    """Not again for other budgets and keys, but when a global that the model reads has changed."""
    programs = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, _, **__: programs.append(name) if "backend_compile" in name else None
    )
    model = given(
        lambda x, w: dist.Bernoulli(logits=x @ w),
        w=lambda x: dist.Normal(MEAN_OF_SLOPES, 0.01).expand([D]).to_event(1),
    )
    x, y = records()

    def run(key, **options):
        del programs[:]
        found = fit(model, x, y, rng_key=jax.random.key(key), progress_bar=False, **options)
        return found, len(programs)

    first, compiled = run(0, epsilon=1.0)
    second, again = run(1, budget=PrivacyBudget(0.5, 1e-6))
    assert again < 4 < compiled
    assert 0.45 < second.privacy.epsilon <= 0.5 and second.privacy.delta == 1e-6
    assert 0.9 < first.privacy.epsilon <= 1
    monkeypatch.setitem(globals(), "MEAN_OF_SLOPES", 3.0)
    third, _ = run(2, epsilon=1.0)
    assert (np.abs(first.summary()["w"]["mean"]) < 0.1).all()
    assert (np.abs(third.summary()["w"]["mean"] - 3) < 0.1).all()
    jax.monitoring.clear_event_listeners()


def two_memberships(first, second, y):
    effect = numpyro.sample("effect", dist.Normal(0, 1).expand([6]).to_event(1))
    with numpyro.plate("rows", first.shape[0]):
        numpyro.sample("y", dist.Normal(effect[first] + effect[second], 1.0), obs=y)


@pytest.fixture
def few_are_dense(monkeypatch):
    """As if four latents were many."""

    def lower():
        for module in (pattern, guess):
            monkeypatch.setattr(module, "MOST_DENSE", 4)
        monkeypatch.setattr(pattern, "_LARGE", 6)

    return lower


@pytest.mark.full
def test_pairs_stay_if_a_record_sees_two_effects_of_a_site(few_are_dense):
    few_are_dense()
    first = jnp.arange(600, dtype=jnp.int32) % 6
    with pytest.raises(UnsupportedModelError, match="4 latents"):
        run(two_memberships, (first, first[::-1], jnp.zeros(600)))


@pytest.mark.extended
def test_other_priors_do_not_follow_an_uncertain_step(monkeypatch):
    """The likelihood has no linear term in a direction without precision."""
    monkeypatch.setattr(decode, "UNCERTAIN_STEP", 20.0)
    seen = []
    posterior = ModelPrior.posterior

    def spy(self, precision, linear, rng_key):
        seen.append((precision, linear))
        return posterior(self, precision, linear, rng_key)

    monkeypatch.setattr(ModelPrior, "posterior", spy)
    run(intercepts, apart(), budget=PrivacyBudget(0.3, 1e-5))
    ((precision, linear),) = seen
    values, vectors = np.linalg.eigh(precision)
    assert np.all(np.abs(vectors.T @ linear) < 10 * (np.sqrt(np.abs(values)) + values))


@pytest.mark.full
def test_without_information_a_hierarchy_is_drawn_from_its_prior(monkeypatch):
    """NUTS would sample the funnel of scale and effects badly."""
    monkeypatch.delattr(ModelPrior, "_sampled")
    # At epsilon .001, the noise of privacy moves a mean by more than .1 in every fourth run.
    found = run(intercepts, apart(), budget=PrivacyBudget(1e-5, 1e-7))
    scale = np.abs(np.random.default_rng(0).normal(size=100_000))
    sample = draws(found, "scale"), draws(found, "effect")
    expected = (
        scale,
        np.repeat(scale[:, None], 6, axis=1) * np.random.default_rng(1).normal(size=(100_000, 6)),
    )
    for ours, exact in zip(sample, expected, strict=True):
        assert np.all(np.abs(ours.mean(0) - exact.mean(0)) < 0.1 * exact.std(0))
        assert np.all(np.abs(ours.std(0) / exact.std(0) - 1) < 0.1)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore::numpyro_dp.posterior.PosteriorWarning")
def test_many_groups_of_few_records_keep_their_scale():
    """Under the wide prior of their scale, 60 effects would be lost in the noise."""

    def model(group, y):
        middle, s = (
            numpyro.sample("middle", dist.Normal(0, 5)),
            numpyro.sample("s", dist.Exponential()),
        )
        scale = numpyro.sample("scale", dist.HalfNormal(5.0))
        with numpyro.plate("groups", 60):
            effect = numpyro.sample("effect", dist.Normal(0, scale))
        with numpyro.plate("rows", group.shape[0]):
            numpyro.sample("y", dist.Normal(middle + effect[group], s), obs=y)

    rng = np.random.default_rng(3)
    group = np.repeat(np.arange(60), 40).astype(np.int32)
    effect = 0.5 * rng.normal(size=60)
    y = (1 + effect[group] + rng.normal(size=len(group))).astype(np.float32)
    found = run(model, (group, y), budget=PrivacyBudget(3.0, 1e-5)).summary(prob=0.9)
    lower, upper = (np.asarray(found["effect"][end]) for end in ("lower", "upper"))
    assert np.mean((lower < effect) & (effect < upper)) > 0.8
    assert np.mean(upper - lower) < 2 * 3.29 / np.sqrt(40 + 4)  # twice the exact width
    assert abs(found["scale"]["mean"] - 0.5) < 3 * found["scale"]["sd"] < 0.5


@pytest.mark.extended
def test_double_precision_adds_no_public_array():
    with jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64():
        rng = np.random.default_rng(0)
        x, y = jnp.asarray(rng.normal(size=(400, 14))), jnp.asarray(rng.integers(2, size=400))
        assert run(args=(x, y)).privacy.public == ()


@pytest.mark.extended
def test_a_hierarchy_is_sampled_under_its_own_prior_and_pairs_of_effects_can_be_left_out(
    few_are_dense,
):
    rng = np.random.default_rng(4)
    group = rng.integers(0, 6, 4000).astype(np.int32)
    effect = np.array([1.0, -1.0, 0.5, -0.5, 0.2, 0.0])
    y = (effect[group] + rng.normal(size=4000)).astype(np.float32)
    posterior = run(intercepts, (group, y))
    scale, known = draws(posterior, "scale"), draws(posterior, "effect")
    assert scale.min() > 0
    assert 0.3 < np.median(scale) < 1.3
    assert known.std(0).max() < 0.5
    few_are_dense()
    found = draws(run(intercepts, (group, y)), "effect")
    sd = np.sqrt(known.var(0) + found.var(0))
    assert np.all(np.abs(found.mean(0) - known.mean(0)) < 4 * sd)
    np.testing.assert_allclose(found.std(0), known.std(0), rtol=0.5)
    for each in (known, found):
        assert np.all(np.abs(each.mean(0) - effect) < 4 * each.std(0))


@pytest.mark.extended
def test_a_scale_far_from_its_prior_is_reached_by_more_stages():
    """Each stage moves the log of a scale by half at most, and the sum of their shares is 1."""
    for spread, more in ((0.03, True), (0.7, False)):
        posterior = repeated(linear, normal_outcomes(5, 4000, FOUR, spread), 7)
        releases = int(posterior.method.split()[1])  # DPLaplace, 9 releases of 4000 records
        assert (releases > 11) == more
        assert posterior.privacy.epsilon == pytest.approx(1.0, rel=0.01)
        found = posterior.summary()
        for name, true in (("w", FOUR), ("s", spread)):
            assert np.all(np.abs(found[name]["mean"] - true) < 4 * found[name]["sd"])
        assert found["s"]["mean"] == pytest.approx(spread, rel=0.25)
        assert "arrival" not in [finding.name for finding in posterior.diagnose().bad]


@pytest.mark.extended
@pytest.mark.filterwarnings("ignore::numpyro_dp.posterior.PosteriorWarning")
def test_sixty_columns_are_within_their_intervals():
    rng = np.random.default_rng(6)
    x = rng.normal(size=(10_000, 60)).astype(np.float32)
    w = np.r_[1, -1, 0.7, 0.5, np.zeros(56)]
    y = yes_or_no(rng, x @ w)
    held = []
    for key in (8, 9, 10):
        posterior = repeated(logistic, (x, y), key)
        found = posterior.summary()["w"]
        errors = (found["mean"] - w) / found["sd"]
        held.append(np.mean(np.abs(errors) < 1.645))
        assert np.all(np.abs(errors[:4]) < 3)
        assert found["mean"] @ w / (w @ w) == pytest.approx(1, abs=0.15)
        assert "arrival" not in [finding.name for finding in posterior.diagnose().bad]
    assert np.mean(held) > 0.8


@pytest.mark.full
def test_rows_far_out_in_one_column_keep_their_weight():
    """Few rows tell most about the second effect. With small weights its sd is 1.3 times exact."""
    rng = np.random.default_rng(12)
    x = rng.normal(size=(4000, 8)).astype(np.float32)
    x[:, 0], heavy = 1, rng.random(4000) < 0.06
    x[:, 1] = np.where(heavy, rng.uniform(3, 8, 4000), 0)
    w = np.r_[-1.4, 0, 0.3 * rng.normal(size=6)]
    y = yes_or_no(rng, x @ w + 1.8 * heavy)
    mode, covariance = exact(x, y)
    found = []
    for secret in range(2):
        posterior = repeated(logistic, (x, y), secret, budget=PrivacyBudget(3.0, 1e-5))
        table = posterior.summary()["w"]
        assert np.all(np.abs(table["mean"] - mode) < 3 * table["sd"])
        found.append(table["sd"][1])
    assert np.mean(found) < 1.2 * np.sqrt(covariance[1, 1])


@pytest.mark.full
@pytest.mark.table
@pytest.mark.parametrize(("prior", "epsilon"), [
    (dist.Normal(0, 10), 0.7), (dist.Normal(0, 100), 0.7), (dist.Cauchy(0, 2.5), 0.7),
    (dist.Normal(0, 10), 0.005),
])  # fmt: skip
@pytest.mark.parametrize("family", FAMILIES)
def test_a_wide_prior_is_no_obstacle_or_it_is_named(prior, epsilon, family):
    rng = np.random.default_rng(7)
    x = rng.normal(size=(4000, 6)).astype(np.float32)
    w = 0.4 * rng.normal(size=6)
    y = rng.poisson(np.exp(x @ w)) if family == "counts" else yes_or_no(rng, x @ w)
    args = x, y.astype(np.int32)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        posterior = repeated(
            glm(FAMILIES[family], prior), args, 9, budget=PrivacyBudget(epsilon, 1e-5)
        )
    if epsilon < 0.01:
        assert any("standard deviation of 10" in str(each.message) for each in caught)
        return
    found = posterior.summary()["w"]
    errors = (found["mean"] - w) / found["sd"]
    assert not posterior.diagnose().bad
    assert np.max(np.abs(errors)) < 4 and np.max(found["sd"]) < 0.2


@pytest.mark.full
@pytest.mark.parametrize("key", [1, 2, 3])
@pytest.mark.parametrize(("model", "scale"), [(linear, 0.01), (textbook, 1.0)])
def test_a_scale_far_from_its_prior_has_intervals_that_are_narrow_and_hold(model, scale, key):
    """On the way to a hundredth, the curvature of weights grows ten thousand times.

    Under textbook priors, draws have residuals far from those at their mean.
    """
    found = repeated(model, normal_outcomes(6, 4000, FOUR, scale), key).summary()
    own = scale / np.sqrt(4000)  # without privacy
    for name, true in (("a", 0), ("w", FOUR), ("s", scale)):
        if name in found:
            assert np.all(np.abs(found[name]["mean"] - true) < 4 * found[name]["sd"])
            assert np.all(found[name]["sd"] < 3 * own)


@pytest.mark.full
def test_outcomes_need_no_moments():
    """NumPyro has neither mean nor variance of most transformed distributions."""
    log_logistic = glm(
        lambda eta, s: dist.TransformedDistribution(
            dist.Logistic(eta, s), dist.transforms.ExpTransform()
        ),
        s=dist.HalfNormal(1),
    )
    rng, w = np.random.default_rng(0), np.array([0.5, -0.3, 0.0])
    x = rng.normal(size=(3000, 3)).astype(np.float32)
    y = np.exp(x @ w + 0.5 * rng.logistic(size=3000)).astype(np.float32)
    found = repeated(log_logistic, (x, y), 1).summary()
    for name, true in (("w", w), ("s", 0.5)):
        assert np.all(np.abs(found[name]["mean"] - true) < 4 * found[name]["sd"])
        assert np.all(found[name]["sd"] < 0.03)


@pytest.mark.full
@pytest.mark.parametrize("key", [1, 4, 7])
def test_thresholds_of_seven_levels_are_found(key):
    """Under their prior hardly any outcome has a middle level, and scores of others are long."""

    def levels(eta, c):
        below = jax.scipy.stats.norm.cdf(c - eta[:, None])
        return dist.Categorical(logits=jnp.log(jnp.diff(below, prepend=0, append=1) + 1e-6))

    free = dist.TransformedDistribution(
        dist.Normal(0, 1.5).expand([6]).to_event(1), dist.transforms.OrderedTransform()
    )
    rng = np.random.default_rng(5)
    x, w = rng.normal(size=(3000, 4)).astype(np.float32), np.array([0.5, -0.3, 0.2, 0.0])
    y = np.digitize(x @ w + rng.normal(size=3000), [-1.5, -0.8, -0.2, 0.3, 0.9, 1.6])
    posterior = repeated(glm(levels, c=free), (x, y.astype(np.int32)), key)
    found = posterior.summary()["w"]
    # Without privacy the standard deviations are .02.
    assert np.all(np.abs(found["mean"] - w) < 4 * found["sd"]) and np.all(found["sd"] < 0.05)
    assert not posterior.diagnose().bad


@pytest.mark.full
@pytest.mark.filterwarnings("ignore::numpyro_dp.posterior.PosteriorWarning")
def test_a_run_that_never_arrives_keeps_a_budget_for_its_last_stages():
    """Stages that are added take their part from later ones. Once they took more than there was."""
    base = dist.Normal(0, 2).expand([3]).to_event(1)
    ordered = dist.TransformedDistribution(base, dist.transforms.OrderedTransform())
    three = of(
        lambda p, m, s: dist.MixtureSameFamily(dist.Categorical(probs=p), dist.Normal(m, s)),
        p=dist.Dirichlet(2 * jnp.ones(3)), m=ordered, s=dist.HalfNormal(1),
    )  # fmt: skip
    rng, means = np.random.default_rng(0), np.array([-2, 0, 2.5])
    y = means[rng.integers(3, size=3000)] + 0.5 * rng.normal(size=3000)
    found = repeated(three, (y.astype(np.float32),), 5).summary()["m"]
    assert np.all(np.abs(found["mean"] - means) < 4 * found["sd"])


@pytest.mark.extended
@pytest.mark.parametrize("key", [1, 2, 3])
def test_a_mean_far_from_its_prior_is_found_with_few_latents(key):
    """In two dimensions a release tells little of the spread of a curvature around its guess."""

    model = of(lambda m, s: dist.Normal(m, s), m=dist.Normal(0, 100), s=dist.HalfNormal(20))
    y = (52 + 8 * np.random.default_rng(0).normal(size=500)).astype(np.float32)
    found = repeated(model, (y,), key, budget=PrivacyBudget(1.5, 1e-5)).summary()
    assert abs(found["m"]["mean"] - 52) < 4 * found["m"]["sd"] < 4


@pytest.mark.extended
@pytest.mark.filterwarnings("ignore::numpyro_dp.posterior.PosteriorWarning")
def test_a_scale_that_first_grows_and_then_falls_is_followed():
    """Residuals of a prior of 30 weights are five times those of the truth, and tell nothing."""
    w = 0.3 * np.random.default_rng(8).normal(size=30)
    found = repeated(linear, normal_outcomes(9, 6000, w, 0.5), 8).summary()
    own = 0.5 / np.sqrt(6000)  # without privacy
    assert np.sqrt(np.mean((found["w"]["mean"] - w) ** 2)) < 2 * own
    assert np.all(found["w"]["sd"] < 2.5 * own)
    assert found["s"]["mean"] == pytest.approx(0.5, abs=0.05)


@pytest.mark.extended
def test_intervals_hold_the_noise_of_privacy():
    """Standardised errors over runs with fresh noise and fresh records."""
    errors = []
    for seed in range(12):
        rng = np.random.default_rng(seed)
        w = rng.normal(size=D)
        x = records()[0][:1000]
        y = (rng.random(1000) < 1 / (1 + np.exp(-np.asarray(x) @ w))).astype(np.int32)
        found = draws(run(args=(x, jnp.asarray(y)), key=jax.random.key(seed)))
        errors.append((found.mean(0) - w) / found.std(0))
    inside = np.mean(np.abs(errors) < 1.6449)
    assert inside > 0.9 - 4 * np.sqrt(0.09 / 36)
    assert 0.6 < np.sqrt(np.mean(np.square(errors))) < 1.5


@pytest.mark.full
def test_robust_intervals_are_those_of_a_sandwich():
    """Ten trials that are alike where a column is large. The model takes them as independent."""
    model = glm(lambda eta: dist.Binomial(10, logits=eta))
    rng = np.random.default_rng(0)
    x = rng.normal(size=(4000, 3)).astype(np.float32)
    p = 1 / (1 + np.exp(-x @ [0.3, 0.5, -0.2]))
    alike = np.where(np.abs(x[:, 1]) > 1, rng.beta(2.3 * p, 2.3 * (1 - p)), p)
    y, w = rng.binomial(10, alike), np.zeros(3)
    for _ in range(20):
        mean = 1 / (1 + np.exp(-x @ w))
        inverse = np.linalg.inv(x.T @ (x * (10 * mean * (1 - mean))[:, None]))
        w = w + inverse @ x.T @ (y - 10 * mean)
    scores = x * (y - 10 * mean)[:, None]
    exact = np.sqrt(np.diag(inverse @ scores.T @ scores @ inverse))
    plain, robust = (
        DPLaplace(model, budget=PrivacyBudget(5.0, 1e-4), robust=each).run(KEY, x, y).summary()
        for each in (False, True)
    )
    assert np.all(np.abs(robust["w"]["sd"] / exact - 1) < 0.15)
    assert plain["w"]["sd"][1] < 0.8 * exact[1]


@pytest.mark.full
def test_robust_intervals_allow_for_survey_weights():
    def model(x, weight, y=None):
        w = numpyro.sample("w", dist.Normal(0, 1.5).expand([2]).to_event(1))
        with numpyro.plate("rows", len(x)), numpyro.handlers.scale(scale=weight):
            numpyro.sample("y", dist.Bernoulli(logits=x @ w), obs=y)

    rng = np.random.default_rng(0)
    x = rng.normal(size=(6000, 2)).astype(np.float32)
    y = (rng.random(6000) < 1 / (1 + np.exp(-x @ [0.5, -0.2]))).astype(np.int32)
    weight = rng.choice([0.25, 0.5, 1.0, 3.0], 6000, p=[0.3, 0.3, 0.2, 0.2]).astype(np.float32)
    w = np.zeros(2)
    for _ in range(20):
        mean = 1 / (1 + np.exp(-x @ w))
        inverse = np.linalg.inv(x.T @ (x * (weight * mean * (1 - mean))[:, None]))
        w = w + inverse @ x.T @ (weight * (y - mean))
    scores = x * (weight * (y - mean))[:, None]
    exact = np.sqrt(np.diag(inverse @ scores.T @ scores @ inverse))
    found = DPLaplace(model, budget=PrivacyBudget(5.0, 1e-4), robust=True).run(KEY, x, weight, y)
    assert np.all(np.abs(found.summary()["w"]["sd"] / exact - 1) < 0.12)
    assert np.all(np.sqrt(np.diag(inverse)) < 0.8 * exact)


def test_fit_passes_robust_on_and_refuses_it_where_it_cannot_be():
    def networks_alike(x, y=None):
        w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
        z = numpyro.sample("z", dist.Normal(0, 1).expand([2]).to_event(1))
        with numpyro.plate("records", len(x)):
            numpyro.sample("y", dist.Normal((w * z).sum() + x, 1), obs=y)

    with pytest.raises(UnsupportedModelError):
        fit(networks_alike, jnp.ones(200), jnp.ones(200), epsilon=1.0, rng_key=KEY, robust=True)
