"""What an adaptive clip norm adds to the sum: bounded like a signal, and read by nobody else."""

import functools
import itertools
import math

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gaussian import gaussian
from models import scored, slopes
from numpyro.infer.autoguide import AutoDiagonalNormal

from numpyro_dp.mechanisms import AdaptiveClip
from numpyro_dp.privacy.mechanism.clip_norm import indicator_norm
from numpyro_dp.sums.bounded import bounded_sum

from .references import bounded_sum_by_definition
from .registry import ESTIMATORS
from .scenarios import bench, single
from .test_neighbours import ROUNDING, ROWS, change, fast, norm, numbers, records, seeds
from .test_sums import KEY, norms_of, spoil

FIRST_TWO = ESTIMATORS[:2]  # aligned, and vanilla: coordinates that are summed before a map
CASES = pytest.mark.parametrize(
    ("row", "blocks"),
    [(FIRST_TWO[0], True), (FIRST_TWO[1], False)],
    ids=["aligned, norms by entry", "vanilla, one norm"],
)
INDICATOR = "below the clip norm of the rest (released)"
SHARE = 0.3


def clip_for(pieces, row, blocks):
    """A norm between those of two records, so that rounding decides no indicator."""
    norms = np.sort(norms_of(pieces, row, pieces.arrays))
    middle = float(norms[4] + norms[5]) / 2
    assert norms[5] - norms[4] > 1e-3 * middle
    clip = AdaptiveClip(middle, share=SHARE)
    if not blocks:
        return clip
    first, *_ = pieces.entries(row)
    return {first: AdaptiveClip(0.4, quantile=0.9, share=0.2), ...: clip}


@functools.cache
def sums(row, blocks):
    """Compiled ``(arrays, mask) -> (fast, definition)``, and the clip norm."""
    pieces = single("diagonal")
    estimator = row.build()(pieces.problem)
    clip = clip_for(pieces, row, blocks)
    mechanism = gaussian(clip, 0.0)

    def both(arrays, mask):
        data = estimator, mechanism, estimator.prepare(KEY, pieces.params), arrays, mask
        return bounded_sum(*data), bounded_sum_by_definition(*data)

    return jax.jit(both), clip


@pytest.mark.full
@CASES
def test_indicators_are_counted_and_fast_is_the_definition(row, blocks):
    pieces = single("diagonal")
    both, clip = sums(row, blocks)
    size = pieces.arrays[0].shape[0]
    every = jnp.ones(size, bool)
    found = both(pieces.arrays, every)
    for fast_leaf, leaf in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_allclose(fast_leaf, leaf, atol=1e-5 * gaussian(clip, 0.0).sensitivity)
    if not blocks:  # five records of ten are below the norm
        side = clip.initial * math.sqrt(SHARE / (1 - SHARE))
        assert float(found[0][INDICATOR]) == pytest.approx(0, abs=1e-6)
        one = both(pieces.arrays, every & (jnp.arange(size) < 1))[0][INDICATOR]
        assert abs(float(one)) == pytest.approx(side, rel=2e-5)
    # NaN counts as exactly nothing, for indicators too; so does what the mask hides.
    spoilt = both(spoil(pieces.arrays, [(1, np.nan)]), every)[0]
    without = both(pieces.arrays, every.at[1].set(False))[0]
    assert jax.tree.all(jax.tree.map(np.array_equal, spoilt, without))
    assert any(np.any(found[0][name] != spoilt[name]) for name in found[0] if "below" in name)
    nothing = both(spoil(pieces.arrays, [(i, np.nan) for i in range(size)]), every)[0]
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(nothing))


@pytest.mark.full
@CASES
def test_dropping_a_record_moves_the_sum_by_at_most_the_sensitivity(row, blocks):
    pieces = single("diagonal")
    both, clip = sums(row, blocks)
    bound, largest = gaussian(clip, 0.0).sensitivity, 0.0
    if not blocks:
        assert bound == pytest.approx(clip.initial / math.sqrt(1 - SHARE))

    @fast
    @hypothesis.example([50.0, -50.0], 0)
    @hypothesis.example([50.0, -50.0], 1)
    @hypothesis.given(st.lists(numbers, min_size=1, max_size=12), seeds)
    def check(values, seed):
        nonlocal largest
        pool = records(pieces.arrays, values, seed)
        arrays = tuple(np.array(array) for array in pieces.arrays)
        for array, rows in zip(arrays, pool, strict=True):
            array[:ROWS] = rows[:ROWS]
        every = jnp.ones(arrays[0].shape[0], bool)
        whole, dropped = (both(arrays, mask)[0] for mask in (every, every.at[0].set(False)))
        assert np.isfinite(norm(whole))
        assert change(whole, dropped) <= bound * ROUNDING
        largest = max(largest, change(whole, dropped) / bound)

    check()
    assert largest > 0.99  # signal and indicators at their bounds at once


@pytest.mark.extended
def test_sums_of_many_indicators_are_exact():
    """Floats added up would move by more: the bound holds without any allowance for rounding."""
    size = 30_000
    x = np.zeros((size, 4), np.float32)
    x[:, 0] = np.where(np.arange(size) % 3, 1e6, 1e-3)
    scenario = single("diagonal").scenario._replace(
        model=scored(lambda x, w: x @ w, "rows", w=slopes()),
        guide=AutoDiagonalNormal,
        args=lambda rng: (jnp.asarray(x),),
    )
    for row in FIRST_TWO:
        pieces = bench(scenario, row)
        clip = AdaptiveClip(0.37, share=0.23)
        total = jax.jit(functools.partial(pieces.total(row), clip, pieces.params, KEY))
        sums = [total(pieces.arrays, jnp.arange(size) >= number) for number in range(30)]
        moves = [change(*two) / gaussian(clip, 0.0).sensitivity for two in itertools.pairwise(sums)]
        assert 0.98 < max(moves) <= 1
        entries = [float(found[INDICATOR]) for found in sums]
        assert 0.98 < max(abs(np.diff(entries))) / indicator_norm(clip) <= 1


@pytest.mark.full
def test_an_estimator_does_not_see_the_indicators():
    seen = []

    def build(problem):
        estimator = ESTIMATORS[0].build()(problem)

        def pull_back(public, released):
            seen.append(set(released.total))
            return estimator.pull_back(public, released)

        return estimator._replace(pull_back=pull_back)

    row = ESTIMATORS[0]._replace(build=lambda: build)
    pieces = bench(single("diagonal").scenario, row, clip_norm=AdaptiveClip(), noise_multiplier=1.0)
    state = pieces.dpsvi.init(jax.random.key(0), *pieces.args).opened
    session = pieces.dpsvi._session(pieces.args, {})
    step = jax.eval_shape(session._step, state, session.rows(pieces.args, {}))[1]
    seen.append(set(step.released.total))
    assert len(seen) > 1
    assert all(names == set(pieces.entries(ESTIMATORS[0])) for names in seen)
