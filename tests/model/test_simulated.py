"""Simulated outcomes have their distribution, and take the same operations for every record."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import optax
import pytest
import scipy.stats
from flat import dpsvi
from models import given
from numpyro.infer.autoguide import AutoDiagonalNormal

from numpyro_dp._compat import make_program
from numpyro_dp.estimators import aligned
from numpyro_dp.model.dependence import loops_by_inputs
from numpyro_dp.model.simulated import drawn

DRAWS = 100_000
LAWS = {
    "Poisson, small": (dist.Poisson(0.3), scipy.stats.poisson(0.3)),
    "Poisson": (dist.Poisson(20.0), scipy.stats.poisson(20)),
    "Poisson, largest of the table": (dist.Poisson(9.9), scipy.stats.poisson(9.9)),
    "Poisson, smallest of the expansion": (dist.Poisson(10.1), scipy.stats.poisson(10.1)),
    "Poisson, large": (dist.Poisson(400.0), scipy.stats.poisson(400)),
    "negative binomial": (dist.NegativeBinomial2(3.0, 0.7), scipy.stats.nbinom(0.7, 0.7 / 3.7)),
    "Gamma below 1": (dist.Gamma(0.3, 2.0), scipy.stats.gamma(0.3, scale=0.5)),
    "Gamma": (dist.Gamma(4.0, 2.0), scipy.stats.gamma(4, scale=0.5)),
    "Beta": (dist.Beta(0.5, 3.0), scipy.stats.beta(0.5, 3)),
    "binomial": (dist.Binomial(12, 0.4), scipy.stats.binom(12, 0.4)),
    "binomial, often": (dist.Binomial(30, logits=4.0), scipy.stats.binom(30, 1 / (1 + np.exp(-4)))),
    "binomial, large": (dist.Binomial(500, 0.06), scipy.stats.binom(500, 0.06)),
    "beta-binomial": (dist.BetaBinomial(2.0, 3.0, 15), scipy.stats.betabinom(15, 2, 3)),
    "Chi-squared": (dist.Chi2(3.0), scipy.stats.chi2(3)),
    "inverse gamma": (dist.InverseGamma(5.0, 2.0), scipy.stats.invgamma(5, scale=2)),
    "expanded": (dist.Poisson(3.0).expand([]), scipy.stats.poisson(3)),
    "Normal": (dist.Normal(1.0, 2.0), scipy.stats.norm(1, 2)),
    "Laplace": (dist.Laplace(1.0, 2.0), scipy.stats.laplace(1, 2)),
    "Gumbel": (dist.Gumbel(1.0, 2.0), scipy.stats.gumbel_r(1, 2)),
    "Weibull": (dist.Weibull(2.0, 1.5), scipy.stats.weibull_min(1.5, scale=2)),
    "Exponential": (dist.Exponential(2.0), scipy.stats.expon(scale=0.5)),
    "Student": (dist.StudentT(3.0, 1.0, 2.0), scipy.stats.t(3, 1, 2)),
}


def many(fn, with_levels=False):
    keys = jax.random.split(jax.random.key(1), DRAWS)
    levels = jax.random.uniform(jax.random.key(2), (DRAWS, 2)) if with_levels else None
    return np.asarray(jax.jit(jax.vmap(lambda key, at: drawn(fn, key, at)))(keys, levels))


@pytest.mark.parametrize("with_levels", [False, True])
@pytest.mark.parametrize("name", LAWS)
def test_draws_have_their_law(name, with_levels):
    fn, law = LAWS[name]
    found = np.sort(many(fn, with_levels))
    places = np.unique(found)
    above = np.searchsorted(found, places, side="right") / DRAWS
    below = np.searchsorted(found, places, side="left") / DRAWS
    before = law.cdf(places - 1) if found.dtype.kind == "i" else law.cdf(places)
    gap = max(np.abs(above - law.cdf(places)).max(), np.abs(below - before).max())
    assert gap < 0.006  # a sampler that is right stays below .0052 in 99 of 100 cases
    spread = 5 * law.std() / DRAWS**0.5
    assert found.mean() == pytest.approx(law.mean(), abs=spread)


@pytest.mark.parametrize(("fn", "share"), [
    (dist.Normal(1.0, 2.0), 0.25), (dist.Poisson(0.5), 0.4), (dist.Poisson(30.0), 0.25),
    (dist.LogNormal(0.0, 0.5), 0.4), (dist.Exponential(2.0), 0.4), (dist.Gamma(4.0), 0.4),
    (dist.Gamma(0.3), 0.7), (dist.NegativeBinomial2(3.0, 1.5), 0.5), (dist.Weibull(1.0, 2.0), 0.25),
])  # fmt: skip
def test_draws_at_even_levels_have_nearly_the_mean(fn, share):
    """The variance of the mean of 16 draws, as a share of that of independent draws."""

    def mean(key):
        start = jax.random.uniform(key, (2,))
        levels = (jnp.arange(16)[:, None] * jnp.asarray([1 / 16, 0.618034]) + start) % 1
        return jax.vmap(lambda key, at: drawn(fn, key, at))(
            jax.random.split(key, 16), levels
        ).mean()

    means = np.asarray(jax.jit(jax.vmap(mean))(jax.random.split(jax.random.key(3), 4000)))
    error = 5 * means.std() / 4000**0.5 + 1e-3 * float(fn.variance) ** 0.5
    assert abs(means.mean() - float(fn.mean)) < error
    assert means.var() < share * float(fn.variance) / 16


PARTS = dist.Gamma(jnp.array([2.0, 40.0]), jnp.array([2.0, 2.0]))
MIXED = dist.MixtureSameFamily(dist.Categorical(jnp.array([0.25, 0.75])), PARTS)


@pytest.mark.every_case
@pytest.mark.parametrize(("fn", "below", "share", "mean", "spread"), [
    (dist.ZeroInflatedPoisson(0.3, 2.0), 0.5, 0.3 + 0.7 * np.exp(-2), 1.4, 0.02),
    (MIXED, 7, 0.25, 0.25 + 0.75 * 20, 0.15),
], ids=["zero-inflated", "mixture"])  # fmt: skip
def test_a_law_of_two_parts(fn, below, share, mean, spread):
    found = many(fn)
    assert np.mean(found < below) == pytest.approx(share, abs=0.006)
    assert found.mean() == pytest.approx(mean, abs=spread)


@pytest.mark.extended
def test_entries_of_an_outcome_are_independent():
    """Also if they share a parameter, which then has one entry."""
    for fn in (
        dist.NegativeBinomial2(jnp.full(2, 30.0), 1.0), dist.Gamma(2.0, jnp.ones(2)),
        dist.StudentT(5.0, jnp.zeros(2), 1.0), dist.Poisson(5.0).expand([2]),
        dist.ZeroInflatedPoisson(0.3, jnp.full(2, 2.0)), dist.Beta(2.0, jnp.ones(2)),
    ):  # fmt: skip
        found = many(fn.to_event(1))
        assert found.shape == (DRAWS, 2)
        assert abs(np.corrcoef(found.T)[0, 1]) < 4 / DRAWS**0.5, fn


def test_a_subclass_has_its_own_sampler():
    class Seven(dist.Poisson):
        def sample(self, key, sample_shape=()):
            return jnp.full(sample_shape + self.batch_shape, 7)

    assert np.all(many(Seven(1.0)) == 7)


FIXED = [
    dist.Poisson(jnp.ones(1)), dist.NegativeBinomial2(jnp.ones(1), 2.0),
    dist.Normal(jnp.ones(1), 1),
    dist.Binomial(jnp.full(1, 9), jnp.full(1, 0.3)), dist.BetaBinomial(1.0, jnp.ones(1), 4),
    dist.ZeroInflatedPoisson(0.1, jnp.ones(1)), dist.Gamma(jnp.ones(1)), dist.Chi2(jnp.ones(1)),
    dist.Beta(jnp.ones(1), 2.0), dist.StudentT(jnp.ones(1)), dist.InverseGamma(jnp.ones(1), 1.0),
    dist.LogNormal(jnp.ones(1), 1.0), dist.Exponential(jnp.ones(1)), dist.Weibull(1.0, jnp.ones(1)),
    dist.Bernoulli(logits=jnp.ones(1)), dist.Categorical(logits=jnp.ones((1, 3))),
    dist.OrderedLogistic(jnp.ones(1), jnp.array([-1.0, 1.0])), dist.Geometric(jnp.full(1, 0.3)),
    dist.MixtureSameFamily(
        dist.Categorical(jnp.ones(2) / 2), dist.Gamma(jnp.ones((1, 2)), jnp.ones(2))),
]  # fmt: skip


def loops(fn, *args):
    return loops_by_inputs(make_program(fn, *args)[0], len(args))


@pytest.mark.every_case
@pytest.mark.parametrize("fn", FIXED, ids=lambda fn: type(fn).__name__)
def test_the_number_of_operations_does_not_depend_on_the_record(fn):
    leaves, treedef = jax.tree.flatten(fn)

    def draw(*leaves):
        return drawn(jax.tree.unflatten(treedef, leaves), jax.random.key(0))

    assert not loops(draw, *leaves)


@pytest.mark.parametrize(("fn", "expected"), [
    (lambda x: dist.Poisson(x).sample(jax.random.key(0)), True),
    (lambda x: dist.Gamma(x).sample(jax.random.key(0)), True),
    (lambda x: jax.lax.while_loop(lambda s: s < 9, lambda s: s + x, 0.0), True),
    (lambda x: jax.lax.while_loop(lambda s: s[0] < 9, lambda s: (s[0] + s[1], s[1] * x),
                                  (0.0, 1.0)), True),
    (lambda x: jax.lax.while_loop(lambda s: s[0] < 9, lambda s: (s[0] + 1, s[1] * x),
                                  (0, 1.0)), False),
    (lambda x: jax.lax.fori_loop(0, 5, lambda i, s: s * x, 1.0), False),
    (lambda x: jax.lax.fori_loop(0, x.astype(int), lambda i, s: s * 2, 1.0), True),
    (lambda x: jax.jit(lambda x: jax.lax.scan(
        lambda s, _: (jax.lax.fori_loop(0, 3, lambda i, t: t * x, s), None), x, None, 4
    )[0])(x), False),
])  # fmt: skip
def test_loops_are_found(fn, expected):
    assert loops(fn, 2.0) is expected


@pytest.mark.parametrize("rate", [np.nan, -1.0, np.inf])
def test_a_rate_without_a_law_is_no_count(rate):
    fn = dist.Poisson(1.0)
    fn.rate = np.float32(rate)
    assert np.all(many(fn) == -1)  # outside the support: its score is not finite, or clipped


@pytest.mark.extended
@pytest.mark.parametrize("estimator", [None, aligned()])
def test_a_report_says_if_records_decide_how_long_a_step_takes(estimator):
    """Counts of the default estimator are drawn; angles are drawn by JAX's loop, or not at all."""
    x = np.linspace(-1, 1, 40)
    for likelihood, y, drawn_in_a_loop in (
        (lambda eta: dist.Poisson(jnp.exp(eta)), np.ones(40, int), False),
        (lambda eta: dist.Binomial(20, logits=eta), np.ones(40, int), False),
        (lambda eta: dist.VonMises(eta, 1.0), x, False),  # the loop depends on chance alone
        (lambda eta: dist.VonMises(0.0, jnp.exp(eta)), x, True),
    ):
        model = given(lambda x, w, fn=likelihood: fn(x * w), w=dist.Normal(0, 1))
        svi = dpsvi(model, AutoDiagonalNormal, optax.adam(0.1), estimator=estimator)
        report = svi.run(jax.random.key(0), 1, x, y, progress_bar=False).privacy
        assert report.timed is (drawn_in_a_loop and estimator is None)
        assert ("length depends on a record" in str(report)) is report.timed
