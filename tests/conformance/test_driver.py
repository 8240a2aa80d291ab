"""What leaves a run, how it compiles, and that it is ``SVI`` where nothing is private."""

import functools
import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from flat import grouped
from losses import exact_losses
from numpyro.infer.autoguide import AutoDiagonalNormal

from numpyro_dp import DPSVI, PrivacyBudget
from numpyro_dp.estimators import aligned
from numpyro_dp.mechanisms import LossRelease
from numpyro_dp.run.results import PrivateLosses
from numpyro_dp.samplers import FixedSize, FullBatch, Permutation, Poisson

from .references import elbo
from .registry import ESTIMATORS
from .scenarios import bench, by_name, reference_svi

FAST_RUNS = ("own_params",)
SLOW_RUNS = (
    "diagonal",
    "multivariate",
    "normal",
    "iaf",
)  # gradients are compared for all guides in test_elbo


def slow_row(name):
    return pytest.param(name, marks=pytest.mark.extended)


SAMPLERS = (Poisson(0.3), FixedSize(4), Permutation(4), FullBatch())
REFERENCED = tuple(row for row in ESTIMATORS if row.reference is elbo and row.guides is None)


@pytest.mark.extended
@pytest.mark.parametrize("name", [*FAST_RUNS, *(slow_row(name) for name in SLOW_RUNS)])
def test_thirty_steps_are_those_of_svi(name):
    scenario = by_name(name)
    first = bench(scenario, REFERENCED[0])
    svi = reference_svi(scenario)
    key = jax.random.key(2)
    expected = svi.run(key, 30, *first.args, progress_bar=False, **first.kwargs)
    start = svi.get_params(svi.init(key, *first.args, **first.kwargs))
    for row in REFERENCED:
        pieces = bench(scenario, row)
        result = pieces.dpsvi.run(key, 30, *pieces.args, progress_bar=False, **pieces.kwargs)
        assert result.params.keys() == expected.params.keys()
        ends, starts, found = map(jax.tree.leaves, (expected.params, start, result.params))
        moved = max(float(jnp.max(jnp.abs(a - b))) for a, b in zip(ends, starts, strict=True))
        assert moved > 0.1
        for value, reference in zip(found, ends, strict=True):
            np.testing.assert_allclose(value, reference, rtol=5e-4, atol=5e-4 * moved)
        assert int(result.state.step) == 30
        assert result.privacy.epsilon == np.inf
        assert "NOT PRIVATE" in str(result.privacy)


def mean_model(x):
    mean = numpyro.sample("mean", dist.Normal(0, 10).expand([2]).to_event(1))
    with numpyro.plate("records", x.shape[0]):
        numpyro.sample("x", dist.Normal(mean, 1).to_event(1), obs=x)


def points(size=12):
    return jnp.asarray(np.random.default_rng(3).normal(size=(size, 2)))


def driver(**options):
    settings = {
        "estimator": aligned(),
        "clip_norm": 1.0,
        "sampler": Poisson(0.3),
        "noise_multiplier": 1.1,
    }
    guide = AutoDiagonalNormal(mean_model)
    return DPSVI(mean_model, guide, optax.adam(0.01), **grouped(**settings | options))


def structure_of(tree):
    return jax.tree.structure(tree), [
        (x.shape, x.dtype, getattr(x, "weak_type", False)) for x in jax.tree.leaves(tree)
    ]


def pairs():
    """Every estimator with every sampler; by default the two samplers that keep most state."""
    usual = {
        "aligned": SAMPLERS[0], "natural": SAMPLERS[2],
    }  # fmt: skip
    for row in ESTIMATORS:
        for sampler in SAMPLERS:
            marks = () if usual.get(row.name) is sampler else pytest.mark.extended
            yield pytest.param(row, sampler, id=f"{row.name}-{sampler}", marks=marks)


@pytest.mark.extended
@pytest.mark.usefixtures("empty_caches")
@pytest.mark.parametrize(("row", "sampler"), list(pairs()))
def test_state_is_stable_and_every_length_uses_one_compilation(row, sampler):
    # A batch of fixed size is accounted for under replace-one alone.
    budget = PrivacyBudget(50.0, 1e-2, "replace_one")
    svi = driver(estimator=row.build(), sampler=sampler, noise_multiplier=40.0, budget=budget,
                 num_steps=2500)  # fmt: skip
    x = points()
    state = svi.init(jax.random.key(0), x)
    shapes = structure_of(state)
    first = svi.run(jax.random.key(0), 3, x, progress_bar=False)
    session = svi._session((x,), {})
    assert structure_of(first.state) == shapes
    for steps in (1, 7, 1100, 2500):
        result = svi.run(jax.random.key(steps), steps, x, progress_bar=False)
        assert int(result.state.step) == steps
    assert session._loop_for(None)._cache_size() == 1
    assert svi._session((x,), {}) is session
    for _ in range(3):
        state, _ = svi.update(state, x)
        assert structure_of(state) == shapes
    assert session._update._cache_size() == 1


@pytest.mark.extended
def test_a_loop_of_updates_is_a_run():
    x = points()
    svi = driver(secret_key=4, repetition=True)
    result = svi.run(jax.random.key(0), 5, x, progress_bar=False)
    state = svi.init(jax.random.key(0), x)
    values = []
    for _ in range(5):
        state, value = svi.update(state, x)
        values.append(value)
    np.testing.assert_allclose(svi.get_params(state)["auto_loc"], result.params["auto_loc"],
                               rtol=1e-5)  # fmt: skip
    assert np.isnan(values).all()


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_parameters_keep_their_dtype(dtype):
    svi = driver()
    result = svi.run(jax.random.key(0), 2, points().astype(dtype), progress_bar=False)
    assert {leaf.dtype for leaf in result.params.values()} == {jnp.dtype("float32")}
    assert all(np.isfinite(leaf).all() for leaf in result.params.values())


# What must not leave.


def secrets_of(svi, state):
    """Words of every key that a run holds or was given."""
    keys = [svi.settings.privacy.secret_key, state.secret_key, state.sampler_state.key]
    return {int(word) for key in keys for word in np.ravel(jax.random.key_data(key))}


def leaves_with_keys(tree):
    return [
        leaf
        for leaf in jax.tree.leaves(tree)
        if hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    ]


@pytest.mark.full
@pytest.mark.parametrize("progress_bar", [False, True])
def test_nothing_sensitive_is_in_the_result_or_on_the_screen(progress_bar, capfd, caplog):
    x = points()
    svi = driver(secret_key=9, repetition=True)
    result = svi.run(jax.random.key(0), 50, x, progress_bar=progress_bar)
    assert result.losses is None
    public = [result.params, tuple(result.trace), result.privacy]
    assert leaves_with_keys(public) == []
    # The keys of draws, noise and batches: the check can fail.
    assert len(leaves_with_keys(result.state.opened)) == 3
    screen = capfd.readouterr()
    assert screen.out == "" and caplog.text == ""
    texts = [repr(result), str(result), repr(result.state), str(result.privacy), screen.err]
    numbers = {int(word) for text in texts for word in re.findall(r"\d+", text)}
    assert not numbers & secrets_of(svi, result.state)
    assert repr(result.state) == str(result.state)
    assert not re.search(r"\d", repr(result.state))
    assert "Array" not in repr(result.state)
    assert "Reproducible" in str(result.privacy)
    if progress_bar:  # steps and epsilon, a rate and times: no loss, norm or batch size
        assert re.search(r"50/50", screen.err) and "epsilon" in screen.err
        assert set(re.findall(r"[a-z]{3,}", screen.err)) <= {
            "epsilon",
            "step",
            "reading",
            "compiling",
            "the",
            "model",
        }
    else:
        assert screen.err == ""


@pytest.mark.full
def test_fields_of_the_result_hold_no_batch():
    result = driver().run(jax.random.key(0), 4, points(), progress_bar=False)
    assert result._fields == ("params", "state", "losses")
    lazy = {"_make_posterior", "_posterior"}
    assert set(vars(result)) == {"trace", "privacy", "folded", "scores"} | lazy
    assert result.folded is None and result._posterior is None
    (problem,) = result._make_posterior.args  # the model, and public arguments alone
    assert problem.shared == ()
    assert set(result.trace._fields) == {"steps", "params", "clip_norm"}
    assert result.trace.clip_norm is None  # it is fixed
    sizes = {np.shape(leaf) for leaf in jax.tree.leaves([result.params, result.trace.params])}
    assert sizes == {(2,), (4, 2)}
    # Counters, vectors of two latents, and of both halves of the run products of scores, shifts and
    # centres: no shape is that of records or a batch.
    sums = {np.shape(leaf) for leaf in jax.tree.leaves(result.scores)}
    assert sums <= {(), (2,), (2, 2), (2, 6), (2, 6, 6)}


@pytest.mark.extended
def test_losses_are_released_or_not_shown():
    x = points()
    svi = driver(loss_release=LossRelease(10.0))
    result = svi.run(jax.random.key(0), 4, x, progress_bar=False)
    assert isinstance(result.losses, PrivateLosses) and np.isfinite(result.losses.values).all()
    assert np.isnan(svi.update(svi.init(jax.random.key(0), x), x)[1])
    with pytest.raises(ValueError, match="not protected"):
        svi.evaluate(result.state, x)
    assert driver().run(jax.random.key(0), 4, x, progress_bar=False).losses is None


@pytest.mark.extended
def test_a_released_loss_is_the_loss_where_nothing_is_clipped():
    x = points()
    quiet = {"noise_multiplier": 0.0, "sampler": FullBatch(), "secret_key": 1, "repetition": True}
    released = driver(loss_release=LossRelease(1e4), **quiet)
    losses = released.run(jax.random.key(0), 6, x, progress_bar=False).losses.values
    exact = exact_losses(driver(**quiet), jax.random.key(0), 6, x)
    np.testing.assert_allclose(losses, exact, rtol=1e-4)
    clipped = driver(loss_release=LossRelease(1e-3), **quiet)
    found = clipped.run(jax.random.key(0), 6, x, progress_bar=False).losses.values
    assert np.all(found < exact - 1)  # every log likelihood was cut to -0.001


@pytest.mark.full
@pytest.mark.parametrize("bad", [np.nan, pytest.param(np.inf, marks=pytest.mark.extended)])
@pytest.mark.parametrize("row", ESTIMATORS, ids=lambda row: row.name)
def test_a_record_that_is_not_finite_changes_nothing_else(row, bad):
    """With the record appended, the same keys release the same totals."""
    x = points()
    longer = jnp.concatenate([x, jnp.asarray([[0.3, bad]])])
    svi = driver(
        estimator=row.build(),
        clip_norm=row.size,
        sampler=FullBatch(),
        secret_key=6,
        repetition=True,
    )
    steps = {}
    for data in (x, longer):
        state = svi.init(jax.random.key(0), data).opened
        session = svi._session((data,), {})
        rows = session.rows((data,), {})
        released = jax.jit(lambda s, r, session=session: session._step(s, r)[1].released.total)
        steps[len(data)] = released(state, rows)
    # Two rows of each record leave room for the rounding of longer sums, which clips them shorter.
    relative = 1e-6 if row.simulates else 0
    for name, value in steps[12].items():
        np.testing.assert_allclose(steps[13][name], value, rtol=relative, atol=2e-6)
    runs = [svi.run(jax.random.key(0), 5, data, progress_bar=False).params for data in (x, longer)]
    for name, value in runs[0].items():
        np.testing.assert_allclose(runs[1][name], value, rtol=1e-5, atol=1e-6)
    ordinary = jnp.concatenate([x, jnp.asarray([[0.3, 0.2]])])
    other = svi.run(jax.random.key(0), 5, ordinary, progress_bar=False).params
    assert np.abs(other["auto_loc"] - runs[0]["auto_loc"]).max() > 1e-4


@pytest.mark.full
def test_public_functions_of_the_estimators_take_no_records():
    """``prepare`` and ``pull_back`` have no argument through which a record could come."""
    pieces = bench(by_name("diagonal"))
    for row in ESTIMATORS:
        estimator = row.build()(pieces.problem)
        parameters = functools.partial(lambda fn: tuple(inspect.signature(fn).parameters))
        assert len(parameters(estimator.prepare)) == 2
        assert len(parameters(estimator.pull_back)) == 2
        assert len(parameters(estimator.signal)) == 2


@pytest.mark.full
def test_the_budget_is_what_the_noise_costs():
    svi = driver(budget=PrivacyBudget(1.0, 1e-3), noise_multiplier=None, sampler=FullBatch())
    result = svi.run(jax.random.key(0), 10, points(), progress_bar=False)
    assert 0.99 < result.privacy.epsilon <= 1.0
    assert float(result.state.noise_multiplier) == pytest.approx(result.privacy.noise_multiplier)
