"""Rubin's rules: by hand, and by what they promise, over many repetitions."""

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_dp import fit
from numpyro_dp.posterior import PosteriorWarning, combine


def test_rules_by_hand():
    q, u = np.array([1.0, 3.0]), np.array([0.5, 1.5])  # b = 2, mean u = 1
    assert combine(q, u, "missing").sd == pytest.approx(np.sqrt(1 + 3))
    assert combine(q, u, "partial").sd == pytest.approx(np.sqrt(1 + 1))
    full = combine(q, u, "full")
    assert (full.estimate, full.sd) == (2, pytest.approx(np.sqrt(3 - 1)))
    missing = combine(q, u, "missing")
    assert missing.degrees == pytest.approx((1 + 1 / 3) ** 2)
    low, high = missing.interval(0.95)
    assert high - 2 == pytest.approx(2 - low)


def test_a_negative_variance_is_replaced():
    with pytest.warns(PosteriorWarning, match="2 synthetic sets are too few"):
        found = combine(np.array([1.0, 1.001]), np.array([0.5, 0.5]), size_ratio=2.0)
    assert found.sd == pytest.approx(1.0)


def repetitions(number=400, size=200, sets=100):
    """Estimates of a normal mean from synthetic sets, drawn from the exact posterior."""
    rng = np.random.default_rng(0)
    observed = rng.normal(1, 1, (number, size)).mean(1)
    draws = observed + rng.normal(size=(sets, number)) / np.sqrt(size)
    made = draws + rng.normal(size=(sets, number)) / np.sqrt(size)
    return made, np.full(made.shape, 1 / size)


def test_intervals_cover_where_the_rule_fits():
    made = repetitions()
    full, wide, narrow = (combine(*made, kind) for kind in ("full", "missing", "partial"))
    low, high = full.interval(0.95)
    assert 0.92 < np.mean((low <= 1) & (high >= 1)) < 0.985
    assert np.median(wide.sd / full.sd) > 1.3  # the rule for gaps is too wide here
    assert np.median(narrow.sd) > np.median(full.sd) * 0.9


@pytest.mark.extended
def test_synthetic_sets_follow_the_posterior_predictive():
    """One draw of the posterior for each set, so the sets differ by the noise of privacy."""

    def model(x, number):
        mean = numpyro.sample("mean", dist.Normal(0, 10))
        with numpyro.plate("records", number):
            numpyro.sample("x", dist.Normal(mean, 1), obs=x)

    x = 3 + jax.random.normal(jax.random.key(1), (200,))
    posterior = fit(model, x, 200, epsilon=0.3, rng_key=jax.random.key(0), progress_bar=False)
    sets = posterior.predict(jax.random.key(2), None, 50, num_samples=2000)
    assert set(sets) == {"x"} and sets["x"].shape == (2000, 50)
    means, found = np.asarray(sets["x"]).mean(1), posterior.summary()["mean"]
    assert means.mean() == pytest.approx(found["mean"], abs=5 * float(means.std()) / 2000**0.5)
    assert means.std() == pytest.approx(np.sqrt(found["sd"] ** 2 + 1 / 50), rel=0.06)


@pytest.mark.parametrize(("call", "match"), [
    (lambda: combine(np.ones(1), np.ones(1)), "sets=1"),
    (lambda: combine(np.ones(3), np.ones(2)), "shape"),
    (lambda: combine(np.ones(3), np.zeros(3)), "variances must be above 0"),
    (lambda: combine(np.ones(3), np.ones(3), "rubin"), "kind='rubin'"),
    (lambda: combine(np.arange(3), np.full(3, 0.1)).interval(1.0), "level=1.0"),
])  # fmt: skip
def test_wrong_input(call, match):
    with pytest.raises(ValueError, match=match):
        call()
