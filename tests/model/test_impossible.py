"""A record that no model has counts as nobody: outcomes outside supports, or indices of tables."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from flat import dpsep, dpsvi
from models import given, slopes
from numpyro import handlers
from numpyro.infer.autoguide import AutoDelta

from numpyro_dp import DPLaplace, Privacy, PrivacyBudget, check_records
from numpyro_dp.estimators import aligned, vanilla
from numpyro_dp.laplace.signal import LaplaceProblem, staged_scores
from numpyro_dp.laplace.stages import Run
from numpyro_dp.methods.ep.sites import quadrature
from numpyro_dp.model.impossible import indices_inside
from numpyro_dp.model.structure import read_model

KEY, N = jax.random.key(0), 40
RNG = np.random.default_rng(0)
X = RNG.normal(size=(N, 2)).astype(np.float32)
GROUP, LEVEL = RNG.integers(0, 5, N), RNG.integers(1, 4, N)
COUNTS = RNG.poisson(2.0, N).astype(np.float32)
BAD = 3  # the row that is made impossible


def normal(name, size):
    return numpyro.sample(name, dist.Normal(0, 1).expand([size]).to_event(1))


def outcome(likelihood):
    return given(lambda x, w: likelihood(x @ w), w=slopes())


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
    svi = dpsvi(model, AutoDelta, optax.sgd(1.0), estimator=estimator, clip_norm=0.5,
                noise_multiplier=0.0, secret_key=4, repetition=True, **options or {})  # fmt: skip
    found = svi.run(KEY, 1, *args, progress_bar=False, **unit).params
    return np.concatenate([np.ravel(found[name]) for name in sorted(found)])


@pytest.mark.full
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
    driver = DPLaplace(
        model, budget=PrivacyBudget(1.0, 1e-3), privacy=Privacy(secret_key=1, repetition=True)
    )
    _, prior, guess = driver._prepared_for(args, {})
    plan = driver._schedule(prior.outcomes)
    run = Run(prior, plan, guess)
    problem = LaplaceProblem(prior.outcomes)
    estimator = staged_scores(prior.outcomes, 4)(problem)
    public = estimator.prepare(KEY, run.request(len(plan.shares) - 1))
    rows = tuple(jnp.asarray(each) for each in problem.rows(args, {}).arrays)
    found = jax.vmap(lambda row: estimator.signal(public, row))(rows)
    return np.concatenate([np.asarray(x).reshape(N, -1) for x in found.values()], axis=1)


@pytest.mark.full
@pytest.mark.table
@pytest.mark.parametrize("case", CASES)
def test_an_impossible_record_is_not_in_the_signal_of_laplace(case):
    found = laplace_signal(*CASES[case])
    assert np.all(found[BAD] == 0)
    assert np.all(np.linalg.norm(np.delete(found, BAD, 0), axis=1) > 0)


@pytest.mark.full
@pytest.mark.parametrize("estimator", [aligned(), None])
def test_an_impossible_row_takes_its_unit_out(estimator):
    ids, options = np.arange(N) // 4, {"max_rows_per_unit": 4}
    args, other = (X, changed(COUNTS, -2)), (changed(X, np.nan), COUNTS)
    found, missing = (
        step_of(estimator, poisson, each, options, unit=ids) for each in (args, other)
    )
    np.testing.assert_allclose(found, missing, rtol=1e-4, atol=1e-5)


@pytest.mark.extended
def test_a_site_of_an_impossible_record_is_empty():
    def step(args):
        sep = dpsep(poisson, clip_norm=0.5, noise_multiplier=0.0, secret_key=4, repetition=True,
                    site=quadrature())  # fmt: skip
        return sep.run(KEY, 2, *args, progress_bar=False).params

    negative, missing = step((X, changed(COUNTS, -2))), step((X, changed(COUNTS, np.nan)))
    for name, value in negative.items():
        np.testing.assert_allclose(value, missing[name], rtol=1e-5)


@pytest.mark.full
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


def looked_up(pick, priors=lambda: normal("b", 5)):
    """A normal regression on ``pick(table, the record's group)``."""

    def model(x, group, y=None):
        table = priors()
        with numpyro.plate("records", x.shape[0]):
            eta = jax.vmap(pick, (None, 0))(table, group)
            numpyro.sample("y", dist.Normal(eta + x[:, 0], 1.0), obs=y)

    return model


LEFT_ALONE = {
    "clipped": lambda b, g: b[jnp.clip(g, 0, 4)],
    "of one entry": lambda b, g: b[:1][g],
    "not of the record": lambda b, g: b[2] + g,
    "moved": lambda b, g: b[jnp.where(g < 1, g + 2, g)],
    "not chosen": lambda b, g: jnp.where(g > 0, b[g - 1], 0.0),
    "not chosen below": lambda b, g: jnp.where(g >= 0, b[g], 0.0),
    "clipped by take": lambda b, g: jnp.take(b, g, mode="clip"),
    "not chosen of many": lambda b, g: jnp.where(jnp.arange(2) < 1, b[jnp.stack([2, g])], 0).sum(),
    "not chosen by cond": lambda b, g: jax.lax.cond(g >= 0, lambda: b[g], lambda: 0.0),
}
FOUND = {
    "plain": lambda b, g: b[g],
    "taken": lambda b, g: jnp.take(b, g),
    "many": lambda b, g: b[jnp.stack([g, 2])].sum(),
    "filled above": lambda b, g: jnp.take(b, g, mode="fill", fill_value=0.0),
    "in a loop": lambda b, g: jax.lax.scan(lambda s, k: (s + b[g] * k, 0.0), 0.0, jnp.ones(3))[0],
    "over a row": lambda b, g: jax.lax.scan(lambda s, i: (s + b[i], 0.0), 0.0, jnp.stack([2, g]))[
        0
    ],
    "repeated": lambda b, g: jax.checkpoint(lambda b, g: jnp.sin(b[g]))(b, g),
    "with a rule": lambda b, g: ruled(b, g),
    "in a branch": lambda b, g: jax.lax.cond(b[0] > 9, lambda: 0.0, lambda: b[g]),
    "of an index": lambda b, g: b[jnp.array([3, 1, 0, 2, 4])[g]],
    "of a float": lambda b, g: b[jnp.where(g < 0, jnp.nan, 1.0 * g).astype(int)],
    "by an integer": lambda b, g: b[0] * (1.0 * jnp.array([3, 1, 0, 2, 4])[g]),
}


@jax.custom_jvp
def ruled(b, g):
    return jnp.sin(b[g])


@ruled.defjvp
def _(inputs, slopes):
    b, g = inputs
    return ruled(b, g), jnp.cos(b[g]) * slopes[0][g]


BEYOND = {"plain", "taken", "many", "in a loop", "over a row", "repeated", "with a rule"}


@pytest.mark.every_case
@pytest.mark.parametrize("batched", [False, True])
def test_which_lookups_are_inside(batched):
    """Of an index and of a batch of one, which JAX looks up by another operation."""
    table = jnp.asarray([0.3, -0.2, 0.5, 0.1, 0.7])
    for name, pick in {**LEFT_ALONE, **FOUND}.items():
        own = (
            (lambda b, g, pick=pick: jax.vmap(pick, (None, 0))(b, g[None])[0]) if batched else pick
        )
        inside = [bool(indices_inside(own, table, jnp.asarray(g))) for g in (-1, 2, 5)]
        assert inside[:2] == [name in LEFT_ALONE, True], name
        if name in BEYOND | {"clipped", "clipped by take", "filled above"}:
            assert inside[2] == (name not in BEYOND), name


@pytest.mark.table
@pytest.mark.parametrize("name", ["not chosen", "in a loop", "plain"])
def test_a_check_names_records_with_lookups_outside(name):
    model = looked_up({**LEFT_ALONE, **FOUND}[name])
    found = check_records(model, X, changed(GROUP, -1), X[:, 0]).impossible
    assert list(found) == [BAD] * (name in FOUND)


def test_a_table_of_bytes_may_hold_any_number():
    """Only integers of at least four bytes can stand for nothing."""
    model = looked_up(
        lambda b, g: b[0] + jnp.array([-128, 127, 0], jnp.int8)[g], lambda: normal("b", 5)
    )
    assert not len(check_records(model, X, GROUP % 3, X[:, 0]).impossible)


@pytest.mark.full
@pytest.mark.parametrize("name", ["in a loop", "with a rule"])
def test_a_step_drops_what_a_loop_looks_up_outside(name):
    model, args = looked_up(FOUND[name]), (X, changed(GROUP, -1), X[:, 0])
    found, other = (step_of(aligned(), model, each) for each in (args, nobody(args)))
    np.testing.assert_allclose(found, other, rtol=1e-4, atol=1e-5)
    assert np.all(np.isfinite(found))
