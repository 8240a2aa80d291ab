"""One record changes the sum by at most the stated sensitivity, whatever the record is."""

import functools
import itertools
import math

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from gaussian import gaussian
from models import given, slopes

from numpyro_dp.mechanisms import LossRelease
from numpyro_dp.samplers import FixedSize, FullBatch, Permutation, Poisson
from numpyro_dp.sums.bounded import bounded_sum

from .registry import ALL_IN_FULL, DRIVERS, ESTIMATORS, EstimatorRow, by_row, rows_to_run
from .scenarios import DIM, SCENARIOS, bench, by_name, row_numbers, rows_for, single

ROWS = 6
KEY = jax.random.key(11)
ROUNDING = 1 + 1e-5
# Guides of every kind, with the models whose likelihood has heavy and light tails.
NAMES = (
    "multivariate", "bnaf", "logistic", "own_params", "constrained", "two_sites", "delta",
    "diagonal_3", "network",
)  # fmt: skip

FAST = (
    ("multivariate", True), ("logistic", False), ("own_params", False), ("two_sites", True),
    ("delta", True), ("diagonal_3", False), ("network", False),
)  # fmt: skip

SIZES = 1.0, 9.0, 1e6, 1e30, np.inf
HARD = 0.0, np.nan, 1e-30, 1e18, 3e19, *(sign * size for sign in (1, -1) for size in SIZES)
numbers = st.one_of(
    st.sampled_from(HARD),
    st.floats(-4, 4, width=32),
    st.floats(width=32, allow_nan=True, allow_infinity=True),
    st.builds(lambda sign, power: sign * 10.0**power, st.sampled_from([-1, 1]), st.floats(-30, 30)),
)
seeds = st.integers(0, 2**31 - 1)
fast = hypothesis.settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[hypothesis.HealthCheck.data_too_large, hypothesis.HealthCheck.too_slow],
)


def records(arrays, values, seed):
    """Rows like the scenario's, with ``values`` in random places of the floating-point arrays."""
    rng = np.random.default_rng(seed)
    made = []
    for array in arrays:
        rows = np.array(array)[rng.integers(0, array.shape[0], ROWS + 1)]
        if np.issubdtype(rows.dtype, np.floating):
            with np.errstate(over="ignore"):
                drawn = rng.choice(np.asarray(values, np.float64), rows.shape).astype(rows.dtype)
            rows = np.where(rng.random(rows.shape) < 0.4, drawn, rows)
        made.append(rows)
    return tuple(made)


def norm(tree):
    """Euclidean norm, in double precision."""
    leaves = [np.asarray(leaf, np.float64).ravel() for leaf in jax.tree.leaves(tree)]
    return math.sqrt(sum(float(leaf @ leaf) for leaf in leaves))


def change(a, b):
    return norm(jax.tree.map(lambda x, y: np.asarray(x, np.float64) - np.asarray(y), a, b))


@functools.cache
def totals(name, blocks):
    """Compiled sums of a scenario: ``(arrays, seeds) -> {row: total}``, and the sensitivities."""
    pieces = single(name)
    clips = {}
    for row in rows_for(pieces):
        first, *rest = pieces.entries(row)
        clips[row.name] = {first: 0.7} | ({...: 1.1} if rest else {}) if blocks else 1.3

    def sums(arrays, seeds):
        mask = jnp.ones(arrays[0].shape[0], bool)
        return {
            row.name: pieces.total(row)(clips[row.name], pieces.params, KEY, arrays, mask, seeds)
            for row in rows_for(pieces)
        }

    return jax.jit(sums), {name: gaussian(clip, 0.0).sensitivity for name, clip in clips.items()}


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "blocks"),
    [
        pytest.param(name, blocks, marks=[] if (name, blocks) in FAST else [pytest.mark.extended])
        for name in NAMES
        for blocks in (False, True)
    ],
)
def test_dropping_or_replacing_a_record(name, blocks):
    pieces = single(name)
    sums, sensitivity = totals(name, blocks)
    largest = dict.fromkeys(sensitivity, 0.0)

    # What hypothesis draws differs between its versions; these reach every bound in all of them.
    @fast
    @hypothesis.example([50.0, -50.0], 0)
    @hypothesis.example([50.0, -50.0], 1)
    @hypothesis.example([1e3, -1e3], 0)
    @hypothesis.example([1e3, -1e3], 1)
    @hypothesis.given(st.lists(numbers, min_size=1, max_size=12), seeds)
    def check(values, seed):
        pool, numbers = records(pieces.arrays, values, seed), row_numbers(ROWS + 1)
        whole, dropped, replaced = (
            sums(tuple(rows[part] for rows in pool), numbers[part])
            for part in (slice(ROWS), slice(1, ROWS), slice(1, None))
        )
        for row, bound in sensitivity.items():
            assert np.isfinite(norm(whole[row]))
            assert change(whole[row], dropped[row]) <= bound * ROUNDING
            assert change(whole[row], replaced[row]) <= 2 * bound * ROUNDING
            largest[row] = max(largest[row], change(whole[row], dropped[row]) / bound)

    check()
    assert min(largest.values()) > 0.7  # the bound was reached: the test could have failed


@pytest.mark.parametrize("release", [
    pytest.param(None, id="plain", marks=pytest.mark.extended),
    pytest.param(LossRelease(5.0, 0.2), id="with loss"),
])  # fmt: skip
@pytest.mark.parametrize(
    "sampler", [Poisson(0.5), FixedSize(4), Permutation(4), FullBatch()], ids=str
)
@pytest.mark.parametrize("row", rows_to_run())
def test_what_a_step_releases(row, sampler, release):
    """Through the whole step: the change of the released sum, before noise, times q."""
    clip = 0.8 * row.size
    begin = functools.partial(
        bench, by_name("diagonal"), row, clip_norm=clip, sampler=sampler, secret_key=3,
        repetition=True, loss_release=release,
    )  # fmt: skip
    if release is not None and row.simulates:
        with pytest.raises(ValueError, match="loss_release needs an estimator with a factored"):
            begin()
        return
    pieces = begin()
    session = pieces.dpsvi._session(pieces.args, pieces.kwargs)
    state = pieces.dpsvi.init(jax.random.key(1), *pieces.args, **pieces.kwargs).opened
    step = jax.jit(lambda state, rows: session._step(state, rows)[1])
    mechanism = session._mechanism(state.mechanism_state, jnp.zeros(()))
    bound = mechanism.sensitivity
    assert bound == pytest.approx(clip / math.sqrt(1 - (0.2 if release else 0)))
    batch, _ = sampler.next(state.sampler_state)
    size = pieces.arrays[0].shape[0]
    mask = np.ones(size, bool) if batch.mask is None else np.asarray(batch.mask)
    taken = np.arange(size) if batch.indices is None else np.asarray(batch.indices)[mask]
    largest = 0.0

    @fast
    @hypothesis.given(st.lists(numbers, min_size=1, max_size=12), seeds)
    def check(values, seed):
        nonlocal largest
        rng = np.random.default_rng(seed)
        new = records(pieces.arrays, values, seed)
        who = rng.integers(0, size)
        arrays = tuple(np.array(array) for array in pieces.arrays)
        for array, rows in zip(arrays, new, strict=True):
            array[(who + np.arange(ROWS)) % size] = rows[:ROWS]
        blank = tuple(np.array(array) for array in arrays)
        for array in blank:
            array[who] = np.nan  # counts as 0: the record is not there
        rows = [session.rows(data, pieces.kwargs) for data in (arrays, blank)]
        released = [step(state, each).released.total for each in rows]
        moved = change(*released) * session.inclusion_prob
        assert np.isfinite(norm(released[0]))
        assert moved <= bound * ROUNDING * (who in taken)
        largest = max(largest, moved / bound)

    check()
    # With a loss both parts must be at their bounds at once.
    assert largest > (0.9 if release is None else 0.8)


line = given(lambda x, coef: dist.Normal(x @ coef, 1.0), "rows", coef=slopes())


def sum_of(row, args):
    """The sum of clipped signals before noise, as ``(arrays, mask) -> total``."""
    settings = {"clip_norm": 1.0, "noise_multiplier": 0.5, "sampler": FullBatch()}
    given = {name: value for name, value in settings.items() if name not in row.lacks}
    driver, state = row.begin(row.build(line, **given), args)
    session = driver._session(args, {})
    # Away from the start, where the mean site of DPSEP is 0.
    params = session.method.optim.get_params(state.optim_state)
    params = jax.tree.map(lambda leaf: 1.5 * leaf, params)
    estimator = session._estimator((), state.mechanism_state)
    mechanism = session._mechanism(state.mechanism_state, 0.0)

    @jax.jit
    def total(arrays, mask):
        public = estimator.prepare(KEY, params)
        arrays = session.problem.rows(arrays, {}).arrays
        return bounded_sum(estimator, mechanism, public, arrays, mask, seeds=row_numbers(mask.size))

    return total


@by_row(DRIVERS, ALL_IN_FULL)
def test_a_record_with_nan_or_infinity_says_nothing(row):
    """The sum is the one with the record's row masked.

    Message passing adds the term of a record whose site is nothing: minus the mean site, clipped.
    """
    rng, every, who = np.random.default_rng(5), np.ones(12, bool), 4
    x = rng.normal(size=(12, DIM)).astype(np.float32)
    y = x[:, 0] + (3 * (np.arange(12) == who)).astype(np.float32)
    arrays = (x, y) if row.name != "DPEM" else (x,)
    total = sum_of(row, arrays)
    without = total(arrays, np.arange(12) != who)
    assert change(total(arrays, every), without) > 0.1
    if row.name in ("DPSEP", "DPPBP"):
        nothing = total((np.where(np.arange(12)[:, None] == who, np.nan, x), y), every)
        assert 0 < change(nothing, without) <= 1
        without = nothing
    for number, bad in itertools.product(range(len(arrays)), (np.nan, np.inf, -np.inf)):
        spoilt = [np.array(array) for array in arrays]
        spoilt[number].reshape(12, -1)[who, -1] = bad  # one number of the record
        found = total(tuple(spoilt), every)
        for one, other in zip(*map(jax.tree.leaves, (found, without)), strict=True):
            np.testing.assert_array_equal(one, other, err_msg=f"{number} {bad}")


def test_rows_of_the_registry_are_distinct():
    assert all(isinstance(row, EstimatorRow) for row in ESTIMATORS)
    assert len({row.name for row in ESTIMATORS}) == len(ESTIMATORS) >= 2
    assert len({scenario.name for scenario in SCENARIOS}) == len(SCENARIOS)
