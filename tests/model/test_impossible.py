"""A record that no model has counts as nobody: outcomes outside supports, or indices of tables."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro import handlers
from numpyro.infer.autoguide import AutoDelta

from numpyro_dp import DPSEP, DPSVI, DPLaplace, PrivacyBudget, check_records
from numpyro_dp.ep.sites import quadrature
from numpyro_dp.estimators import aligned, vanilla
from numpyro_dp.laplace.signal import LaplaceProblem, staged_scores
from numpyro_dp.laplace.stages import Run
from numpyro_dp.model.structure import read_model
from numpyro_dp.samplers import FullBatch

KEY, N = jax.random.key(0), 40
RNG = np.random.default_rng(0)
X = RNG.normal(size=(N, 2)).astype(np.float32)
GROUP, LEVEL = RNG.integers(0, 5, N), RNG.integers(1, 4, N)
COUNTS = RNG.poisson(2.0, N).astype(np.float32)
BAD = 3  # the row that is made impossible


def normal(name, size):
    return numpyro.sample(name, dist.Normal(0, 1).expand([size]).to_event(1))


def outcome(likelihood):
    def model(x, y=None):
        w = normal("w", 2)
        with numpyro.plate("records", x.shape[0]):
            numpyro.sample("y", likelihood(x @ w), obs=y)

    return model


poisson = outcome(lambda eta: dist.Poisson(jnp.exp(eta)))
bernoulli = outcome(lambda eta: dist.Bernoulli(logits=eta))
gamma = outcome(lambda eta: dist.Gamma(2.0, 2 * jnp.exp(eta)))


def groups(x, group, level, y=None):
    """Indices from 0 and from 1, a table of two axes, and a public table."""
    b, c, d = normal("b", 5), normal("c", 3), normal("d", 20).reshape(5, 4)
    offset = jnp.asarray([0.1, -0.1, 0.2, 0.0, 0.3])
    with numpyro.plate("records", x.shape[0]):
        eta = x[:, 0] + b[group] + c[level - 1] + d[group, level] + offset[group]
        numpyro.sample("y", dist.Bernoulli(logits=eta), obs=y)


def changed(array, value):
    array = np.array(array)
    array[BAD] = value
    return array


# name: (model, arguments of which row BAD is impossible)
CASES = {
    "a negative count": (poisson, (X, changed(COUNTS, -2))),
    "a fractional count": (poisson, (X, changed(COUNTS, 0.5))),
    "a label of 2": (bernoulli, (X, changed(COUNTS > 1, 0) + 2 * (np.arange(N) == BAD))),
    "a negative time": (gamma, (X, changed(COUNTS + 0.1, -1.0))),
    "a missing group": (groups, (X, changed(GROUP, -1), LEVEL, GROUP > 2)),
    "a group beyond the end": (groups, (X, changed(GROUP, 5), LEVEL, GROUP > 2)),
    "a level below the first": (groups, (X, GROUP, changed(LEVEL, 0), GROUP > 2)),
    "a level beyond the last": (groups, (X, GROUP, changed(LEVEL, 4), GROUP > 2)),
}


def nobody(args):
    """The same records with NaN in place of the bad one."""
    return (changed(args[0], np.nan), *args[1:])


def step_of(estimator, model, args, options=None, **unit):
    """Where a step of gradient descent arrives: the sum of signals, and the prior's."""
    svi = DPSVI(
        model, AutoDelta(model), optax.sgd(1.0), estimator=estimator, clip_norm=0.5,
        sampler=FullBatch(), noise_multiplier=0.0, secret_key=4, repetition=True, **(options or {})
    )  # fmt: skip
    found = svi.run(KEY, 1, *args, progress_bar=False, **unit).params
    return np.concatenate([np.ravel(found[name]) for name in sorted(found)])


@pytest.mark.table
@pytest.mark.parametrize(
    ("case", "estimator"),
    [("a negative count", None), *((case, aligned()) for case in CASES), ("a label of 2", None),
     ("a missing group", vanilla())],
)  # fmt: skip
def test_an_impossible_record_counts_as_0(case, estimator):
    model, args = CASES[case]
    found, other = (step_of(estimator, model, each) for each in (args, nobody(args)))
    np.testing.assert_allclose(found, other, rtol=1e-4, atol=1e-5)
    assert list(check_records(model, *args).impossible) == [BAD]


def laplace_signal(model, args):
    """The signals of all records in a stage."""
    driver = DPLaplace(model, budget=PrivacyBudget(1.0, 1e-3), secret_key=1, repetition=True)
    _, prior, guess = driver._prepared_for(args, {})
    plan = driver._schedule(prior.outcomes.model.structure, prior.outcomes.size)
    run = Run(prior, plan, guess)
    problem = LaplaceProblem(prior.outcomes)
    estimator = staged_scores(prior.outcomes, 4)(problem)
    public = estimator.prepare(KEY, run.request(len(plan.shares) - 1))
    rows = tuple(jnp.asarray(each) for each in problem.rows(args, {}).arrays)
    found = jax.vmap(lambda row: estimator.signal(public, row))(rows)
    return np.concatenate([np.asarray(x).reshape(N, -1) for x in found.values()], axis=1)


@pytest.mark.table
@pytest.mark.parametrize("case", CASES)
def test_an_impossible_record_is_not_in_the_signal_of_laplace(case):
    found = laplace_signal(*CASES[case])
    assert np.all(found[BAD] == 0)
    assert np.all(np.linalg.norm(np.delete(found, BAD, 0), axis=1) > 0)


@pytest.mark.parametrize("estimator", [aligned(), None])
def test_an_impossible_row_takes_its_unit_out(estimator):
    ids, options = np.arange(N) // 4, {"max_rows_per_unit": 4}
    args, other = (X, changed(COUNTS, -2)), (changed(X, np.nan), COUNTS)
    found, missing = (
        step_of(estimator, poisson, each, options, unit=ids) for each in (args, other)
    )
    np.testing.assert_allclose(found, missing, rtol=1e-4, atol=1e-5)


@pytest.mark.full
def test_a_site_of_an_impossible_record_is_empty():
    def step(args):
        sep = DPSEP(poisson, clip_norm=0.5, sampler=FullBatch(), noise_multiplier=0.0,
                    site=quadrature(), secret_key=4, repetition=True)  # fmt: skip
        return sep.run(KEY, 2, *args, progress_bar=False).params

    negative, missing = step((X, changed(COUNTS, -2))), step((X, changed(COUNTS, np.nan)))
    for name, value in negative.items():
        np.testing.assert_allclose(value, missing[name], rtol=1e-5)


def test_what_is_masked_may_have_any_value():
    def model(x, y, known):
        w = normal("w", 2)
        with numpyro.plate("records", x.shape[0]), handlers.mask(mask=known):
            numpyro.sample("y", dist.Poisson(jnp.exp(x @ w)), obs=y)

    args = X, changed(COUNTS, -999), np.arange(N) != BAD
    assert not len(check_records(model, *args).impossible)
    other = X, changed(COUNTS, 1), args[2]
    np.testing.assert_array_equal(step_of(aligned(), model, args), step_of(aligned(), model, other))


@pytest.mark.parametrize(
    ("likelihood", "checked"),
    [
        (dist.Poisson, True), (lambda eta: dist.Bernoulli(logits=eta), True),
        (lambda eta: dist.Poisson(jnp.exp(eta)).mask(True), True),
        (lambda eta: dist.Normal(eta, 1.0), False),
        (lambda eta: dist.VonMises(eta, 1.0), False),  # any angle has a density
        (lambda eta: dist.Uniform(0.0, jnp.exp(eta)), False),  # moves with the latents
    ],
)  # fmt: skip
def test_which_supports_are_looked_at(likelihood, checked):
    assert read_model(outcome(likelihood), (X, COUNTS), {}).bounded == ("y",) * checked


def test_indices_that_are_safe_are_left_alone():
    """Clipped indices, a table of one entry, arithmetic, and an index that is not the record's."""

    def model(x, group, y=None):
        b, one = normal("b", 5), normal("one", 1)
        with numpyro.plate("records", x.shape[0]):
            eta = b[jnp.clip(group, 0, 4)] + one[group] + b[2] + x[:, -1]
            eta += b[jnp.where(group < 1, group + 2, group)]
            numpyro.sample("y", dist.Normal(eta, 1.0), obs=y)

    assert not len(check_records(model, X, changed(GROUP, -1), X[:, 0]).impossible)
