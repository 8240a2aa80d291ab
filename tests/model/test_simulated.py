"""Outcomes that are drawn fast have the law of their distribution."""

from __future__ import annotations

import jax
import numpy as np
import numpyro.distributions as dist
import pytest
import scipy.stats

from numpyro_dp.model.simulated import drawn

DRAWS = 100_000
LAWS = {
    "Poisson, small": (dist.Poisson(0.3), scipy.stats.poisson(0.3)),
    "Poisson": (dist.Poisson(20.0), scipy.stats.poisson(20)),
    "Poisson, largest of the loop": (dist.Poisson(63.9), scipy.stats.poisson(63.9)),
    "Poisson, large": (dist.Poisson(400.0), scipy.stats.poisson(400)),
    "negative binomial": (dist.NegativeBinomial2(3.0, 0.7), scipy.stats.nbinom(0.7, 0.7 / 3.7)),
    "Gamma below 1": (dist.Gamma(0.3, 2.0), scipy.stats.gamma(0.3, scale=0.5)),
    "Gamma": (dist.Gamma(4.0, 2.0), scipy.stats.gamma(4, scale=0.5)),
    "Beta": (dist.Beta(0.5, 3.0), scipy.stats.beta(0.5, 3)),
    "Student": (dist.StudentT(3.0, 1.0, 2.0), scipy.stats.t(3, 1, 2)),
}


def many(fn):
    keys = jax.random.split(jax.random.key(1), DRAWS)
    return np.asarray(jax.jit(jax.vmap(lambda key: drawn(fn, key)))(keys))


@pytest.mark.parametrize("name", LAWS)
def test_draws_have_their_law(name):
    fn, law = LAWS[name]
    found = np.sort(many(fn))
    places = np.unique(found)
    above = np.searchsorted(found, places, side="right") / DRAWS
    below = np.searchsorted(found, places, side="left") / DRAWS
    before = law.cdf(places - 1) if found.dtype.kind == "i" else law.cdf(places)
    gap = max(np.abs(above - law.cdf(places)).max(), np.abs(below - before).max())
    assert gap < 0.006  # a sampler that is right stays below .0052 in 99 of 100 cases
    spread = 5 * law.std() / DRAWS**0.5
    assert found.mean() == pytest.approx(law.mean(), abs=spread)


def test_zero_inflated_counts():
    found = many(dist.ZeroInflatedPoisson(0.3, 2.0))
    assert np.mean(found == 0) == pytest.approx(0.3 + 0.7 * np.exp(-2), abs=0.006)
    assert found.mean() == pytest.approx(1.4, abs=0.02)


@pytest.mark.parametrize("rate", [np.nan, -1.0, np.inf])
def test_a_rate_without_a_law_is_no_count(rate):
    fn = dist.Poisson(1.0)
    fn.rate = np.float32(rate)
    assert np.all(many(fn) == -1)  # outside the support: its score is not finite, or clipped
