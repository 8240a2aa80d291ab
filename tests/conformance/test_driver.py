"""What leaves a run, how it compiles, and that it is ``SVI`` where nothing is private."""

import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flat import dpsvi
from losses import exact_losses
from models import mean_of
from numpyro.infer.autoguide import AutoDiagonalNormal

from numpyro_dp import PrivacyBudget
from numpyro_dp.mechanisms import LossRelease
from numpyro_dp.run.results import PrivateLosses
from numpyro_dp.samplers import FixedSize, FullBatch, Permutation, Poisson

from .references import elbo
from .registry import ESTIMATORS
from .scenarios import bench, by_name, reference_svi

SAMPLERS = (Poisson(0.3), FixedSize(4), Permutation(4), FullBatch())
REFERENCED = tuple(row for row in ESTIMATORS if row.reference is elbo and row.guides is None)


# Gradients are compared for all guides in test_elbo.
@pytest.mark.extended
@pytest.mark.parametrize("name", ["own_params", "diagonal", "multivariate", "normal", "iaf"])
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


mean_model = mean_of(10, 2)
X = jnp.asarray(np.random.default_rng(3).normal(size=(12, 2)))
QUIET = {"progress_bar": False}


def driver(**options):
    settings = {"sampler": Poisson(0.3), "noise_multiplier": 1.1} | options
    return dpsvi(mean_model, AutoDiagonalNormal, optax.adam(0.01), **settings)


def structure_of(tree):
    return jax.tree.structure(tree), [
        (x.shape, x.dtype, getattr(x, "weak_type", False)) for x in jax.tree.leaves(tree)
    ]


@pytest.mark.extended
@pytest.mark.usefixtures("empty_caches")
@pytest.mark.parametrize("sampler", SAMPLERS, ids=str)
@pytest.mark.parametrize("row", ESTIMATORS, ids=lambda row: row.name)
def test_state_is_stable_and_every_length_uses_one_compilation(row, sampler):
    # A batch of fixed size is accounted for under replace-one alone.
    budget = PrivacyBudget(50.0, 1e-2, "replace_one")
    svi = driver(estimator=row.build(), sampler=sampler, noise_multiplier=40.0, budget=budget,
                 num_steps=2500)  # fmt: skip
    state = svi.init(jax.random.key(0), X)
    shapes = structure_of(state)
    first = svi.run(jax.random.key(0), 3, X, **QUIET)
    session = svi._session((X,), {})
    assert structure_of(first.state) == shapes
    for steps in (1, 7, 1100, 2500):
        result = svi.run(jax.random.key(steps), steps, X, **QUIET)
        assert int(result.state.step) == steps
    assert session._loop_for(None)._cache_size() == 1
    assert svi._session((X,), {}) is session
    for _ in range(3):
        state, _ = svi.update(state, X)
        assert structure_of(state) == shapes
    assert session._update._cache_size() == 1


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_parameters_keep_their_dtype(dtype):
    result = driver().run(jax.random.key(0), 2, X.astype(dtype), **QUIET)
    assert {leaf.dtype for leaf in result.params.values()} == {jnp.dtype("float32")}
    assert all(np.isfinite(leaf).all() for leaf in result.params.values())


def secrets_of(svi, state):
    """Words of every key that a run holds or was given."""
    keys = [svi.settings.privacy.secret_key, state.secret_key, state.sampler_state.key]
    return {int(word) for key in keys for word in np.ravel(jax.random.key_data(key))}


def number_of_keys(tree):
    dtypes = [leaf.dtype for leaf in jax.tree.leaves(tree) if hasattr(leaf, "dtype")]
    return sum(jnp.issubdtype(dtype, jax.dtypes.prng_key) for dtype in dtypes)


@pytest.mark.full
@pytest.mark.parametrize("progress_bar", [False, True])
def test_nothing_sensitive_is_in_the_result_or_on_the_screen(progress_bar, capfd, caplog):
    svi = driver(secret_key=9, repetition=True)
    result = svi.run(jax.random.key(0), 50, X, progress_bar=progress_bar)
    assert result.losses is None
    assert number_of_keys([result.params, tuple(result.trace), result.privacy]) == 0
    # The keys of draws, noise and batches: the check can fail.
    assert number_of_keys(result.state.opened) == 3
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
        words = {"epsilon", "step", "reading", "compiling", "the", "model"}
        assert set(re.findall(r"[a-z]{3,}", screen.err)) <= words
    else:
        assert screen.err == ""


@pytest.mark.full
def test_fields_of_the_result_hold_no_batch():
    result = driver().run(jax.random.key(0), 4, X, **QUIET)
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
    key, quiet = jax.random.key(0), {"noise_multiplier": 0.0, "sampler": FullBatch()}
    quiet |= {"secret_key": 1, "repetition": True}
    exact = exact_losses(driver(**quiet), key, 6, X)
    for clip, holds in (
        (1e4, lambda found: np.testing.assert_allclose(found, exact, rtol=1e-4)),
        (1e-3, lambda found: np.testing.assert_array_less(found, exact - 1)),  # all were cut
    ):
        svi = driver(loss_release=LossRelease(clip), **quiet)
        result = svi.run(key, 6, X, **QUIET)
        assert isinstance(result.losses, PrivateLosses)
        holds(result.losses.values)
        with pytest.raises(ValueError, match="not protected"):
            svi.evaluate(result.state, X)
    noisy = driver(loss_release=LossRelease(10.0))
    assert np.isfinite(noisy.run(key, 4, X, **QUIET).losses.values).all()
    for svi in (noisy, driver()):
        assert np.isnan(svi.update(svi.init(key, X), X)[1])
    assert driver().run(key, 4, X, **QUIET).losses is None


@pytest.mark.full
@pytest.mark.parametrize("bad", [np.nan, pytest.param(np.inf, marks=pytest.mark.extended)])
@pytest.mark.parametrize("row", ESTIMATORS, ids=lambda row: row.name)
def test_a_record_that_is_not_finite_changes_nothing_else(row, bad):
    """With the record appended, the same keys release the same totals."""
    svi = driver(
        estimator=row.build(), clip_norm=row.size, sampler=FullBatch(), secret_key=6,
        repetition=True,
    )  # fmt: skip
    steps = []
    for last in (None, bad, 0.2):
        data = X if last is None else jnp.concatenate([X, jnp.asarray([[0.3, last]])])
        state, session = svi.init(jax.random.key(0), data).opened, svi._session((data,), {})
        step = jax.jit(lambda s, r, session=session: session._step(s, r)[1].released.total)
        steps.append(step(state, session.rows((data,), {})))
    without, spoilt, ordinary = steps
    # Two rows of each record leave room for the rounding of longer sums, which clips them shorter.
    relative = 1e-6 if row.simulates else 0
    for name, value in without.items():
        np.testing.assert_allclose(spoilt[name], value, rtol=relative, atol=2e-6)
    assert max(np.abs(ordinary[name] - without[name]).max() for name in without) > 1e-4


@pytest.mark.full
def test_public_functions_of_the_estimators_take_no_records():
    """``prepare`` and ``pull_back`` have no argument through which a record could come."""
    for row in ESTIMATORS:
        estimator = row.build()(bench(by_name("diagonal")).problem)
        for function in (estimator.prepare, estimator.pull_back, estimator.signal):
            assert len(inspect.signature(function).parameters) == 2
