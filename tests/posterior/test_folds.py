"""Folds of the private iterates: what they are of a whole trace, in one compilation."""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flat import dpsvi
from jax import lax
from models import mean_of
from numpyro.infer.autoguide import AutoDiagonalNormal
from scipy import signal

from numpyro_dp.core import Fold
from numpyro_dp.posterior import average, tail_average
from numpyro_dp.samplers import Poisson

DIM, NUMBER = 3, 500
COUNT = Fold(lambda params: 0, lambda state, params: state + 1, int)


model = mean_of(10, size=DIM)


X = 1 + np.random.default_rng(0).normal(size=(NUMBER, DIM)).astype(np.float32)
START = {"auto_loc": jnp.ones(DIM), "auto_scale": jnp.full(DIM, NUMBER**-0.5)}


def driver(**changes):
    """Iterates forget half of their deviation in a step."""
    settings = {"clip_norm": 8.0, "noise_multiplier": 4.0, "secret_key": 1, "repetition": True}
    return dpsvi(model, AutoDiagonalNormal, optax.sgd(1e-3), **settings | changes)


@pytest.fixture(scope="module")
def svi():
    """One driver for all tests, so that it compiles seldom."""
    return driver()


def run(svi, num_steps, fold=None, progress_bar=False, **options):
    options = {"init_params": START} | options
    key = jax.random.key(0)
    return svi.run(key, num_steps, X, progress_bar=progress_bar, fold=fold, **options)


def folded(fold, values):
    """What a fold makes of iterates along the first axis."""
    values = jnp.asarray(values)

    def step(state, x):
        return fold.update(state, {"x": x}), None

    state = fold.init({"x": jnp.full_like(values[0], 7.0)})
    return fold.result(jax.jit(lambda s: lax.scan(step, s, values)[0])(state))


def batch_means(values, num_batches):
    """Mean and its standard deviation in float64, from the iterates themselves."""
    values = np.asarray(values, float)
    parts = np.array_split(values, num_batches)
    square = sum(len(part) * (part.mean(0) - values.mean(0)) ** 2 for part in parts)
    return values.mean(0), np.sqrt(square / (num_batches - 1) / len(values))


# Tail averages.


@pytest.mark.full
@pytest.mark.parametrize(
    ("num_steps", "last", "num_batches", "number"),
    [(200, 0.5, 32, 96), (150, 1.0, 20, 140), (151, 0.3, 20, 40), (40, 0.05, 2, 2)],
)
def test_a_tail_average_is_that_of_the_whole_trace(svi, num_steps, last, num_batches, number):
    result = run(svi, num_steps, tail_average(num_steps, last, num_batches))
    assert result.folded.num_iterates == number
    for name, values in result.trace.params.items():
        mean, sd = batch_means(values[-number:], num_batches)
        np.testing.assert_allclose(result.folded.params[name], mean, rtol=1e-5)
        np.testing.assert_allclose(result.folded.dp_sd[name], sd, rtol=1e-3, atol=1e-8)
        assert result.folded.params[name].dtype == result.params[name].dtype


@pytest.mark.full
def test_its_standard_deviation_is_that_of_average(svi):
    """Two estimates of one number: batch means, and an AR(1) fit to the trace."""
    result = run(svi, 4000, tail_average(4000), trace_size=4000)
    other = average(result.trace, window=1984)
    np.testing.assert_allclose(
        result.folded.params["auto_loc"], other.params["auto_loc"], rtol=1e-5
    )
    ratio = result.folded.dp_sd["auto_loc"] / other.dp_sd["auto_loc"]
    # Three values with 31 degrees of freedom: standard error 0.07 of their root mean square.
    assert 0.7 < np.sqrt(np.mean(np.square(ratio))) < 1.3


@pytest.mark.extended
@pytest.mark.parametrize("phi", [0.5, 0.0])
def test_scores_of_means_have_the_right_variance(phi):
    """The variance of t with 31 degrees of freedom is 1.07; 4000 scores know it to 0.026."""
    rng = np.random.default_rng(0)
    noise = np.sqrt(1 - phi**2) * rng.normal(size=(6400, 4000)).astype(np.float32)
    values = signal.lfilter([1], [1, -phi], noise, axis=0).astype(np.float32)
    found = folded(tail_average(6400), values)
    scores = np.asarray(found.params["x"] / found.dp_sd["x"])
    assert 0.95 < scores.var() < 1.2
    for wrong in (0.9, 1.1):
        assert not 0.95 < (scores / wrong).var() < 1.2


def test_long_runs_do_not_lose_digits():
    """A running sum in float32 would be off by more than the standard deviation."""
    values = 1000 + np.random.default_rng(0).normal(size=(200_000, 2)).astype(np.float32)
    found = folded(tail_average(200_000, last=1.0), values)
    mean, sd = batch_means(values, 32)
    np.testing.assert_allclose(found.params["x"], mean, rtol=0, atol=0.1 * sd.min())
    np.testing.assert_allclose(found.dp_sd["x"], sd, rtol=0.02)
    assert (np.abs(values.cumsum(0, dtype=np.float32)[-1] / 200_000 - mean) > sd).any()


def test_by_hand_and_incomplete():
    fold = tail_average(100, num_batches=5)
    values = np.random.default_rng(0).normal(size=(130, 2)).astype(np.float32)
    assert np.isnan(folded(fold, values[:50]).params["x"]).all()
    np.testing.assert_allclose(
        folded(fold, values[:73]).params["x"], values[50:73].mean(0), rtol=1e-5
    )
    beyond = folded(fold, values)  # further batches of the same length
    mean, sd = batch_means(values[50:], 8)
    np.testing.assert_allclose(beyond.params["x"], mean, rtol=1e-5)
    np.testing.assert_allclose(beyond.dp_sd["x"], sd, rtol=1e-4)


@pytest.mark.full
def test_trees_and_low_precision():
    fold = tail_average(64, last=1.0)
    state = fold.init({"net": {"kernel": jnp.zeros((2, 3), jnp.bfloat16)}, "s": jnp.zeros(())})
    for step in range(64):
        state = fold.update(state, {"net": {"kernel": jnp.full((2, 3), step, jnp.bfloat16)},
                                    "s": jnp.asarray(2.0)})  # fmt: skip
    found = fold.result(state)
    np.testing.assert_array_equal(found.params["net"]["kernel"], np.full((2, 3), 31.5))
    assert found.dp_sd["net"]["kernel"].dtype == np.float32
    assert (found.params["s"], found.dp_sd["s"]) == (2, 0)


# In the loop.


@pytest.mark.full
@pytest.mark.parametrize("num_steps", [60, 61])
@pytest.mark.parametrize("trace_size", [None, 7])
def test_a_fold_reads_every_step_whatever_is_kept(svi, num_steps, trace_size):
    assert run(svi, num_steps, COUNT, trace_size=trace_size).folded == num_steps


@pytest.mark.full
def test_a_fold_leaves_the_run_alone_and_results_keep_what_was_folded(svi):
    plain, folding = run(svi, 60), run(svi, 60, COUNT)
    assert plain.folded is None
    np.testing.assert_array_equal(plain.trace.steps, folding.trace.steps)
    for name, value in plain.params.items():
        np.testing.assert_allclose(folding.params[name], value, rtol=1e-5)
    assert folding.privacy.epsilon == plain.privacy.epsilon
    for other in (copy.copy(folding), copy.deepcopy(folding), pickle.loads(pickle.dumps(folding))):
        assert (other.folded, len(other.trace.steps)) == (60, 60)
        assert str(other.privacy) == str(folding.privacy)


@pytest.mark.extended
@pytest.mark.usefixtures("empty_caches")
def test_one_compilation_for_every_length_and_share():
    svi = driver(sampler=Poisson(0.2))
    for num_steps, last, bar in ((50, 0.5, False), (83, 0.7, False), (120, 1.0, True)):
        fold = tail_average(num_steps, last, num_batches=8)
        run(svi, num_steps, fold, progress_bar=bar, trace_size=9)
    run(svi, 30, COUNT, progress_bar=True, trace_size=9)
    (session,) = svi._sessions.values()
    assert [loop._cache_size() for loop in session._folding_loops.values()] == [0, 1, 1]
    assert session._loop_for(None)._cache_size() == 0


@pytest.mark.full
def test_a_resumed_run_folds_its_own_steps(svi):
    first = run(svi, 40, COUNT)
    second = run(svi, 64, tail_average(64, last=1.0), init_state=first.state)
    assert (first.folded, second.folded.num_iterates) == (40, 64)
    mean = np.mean(second.trace.params["auto_loc"], axis=0)
    np.testing.assert_allclose(second.folded.params["auto_loc"], mean, rtol=1e-5)


@pytest.mark.every_case
@pytest.mark.parametrize(("args", "options", "error", "words"), [
    ((0,), {}, ValueError, "num_steps=0"),
    ((0.5,), {}, TypeError, "num_steps=0.5"),
    ((100,), {"last": 0}, ValueError, r"\(0, 1\], got last=0.*share"),
    ((100,), {"num_batches": 1}, ValueError, "num_batches=1"),
    ((60,), {}, ValueError, r">= 32, got number of iterates averaged=30.*num_batches"),
])  # fmt: skip
def test_wrong_input(args, options, error, words):
    with pytest.raises(error, match=words):
        tail_average(*args, **options)
