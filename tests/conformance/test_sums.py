"""The fast clipped sum equals the definition, whatever the records hold."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gaussian import gaussian

from numpyro_dp._tree import squared_norm
from numpyro_dp.estimators import vanilla
from numpyro_dp.mechanisms import AdaptiveClip
from numpyro_dp.privacy.mechanism.loss import LOSS_ENTRY, with_loss
from numpyro_dp.sums.bounded import bounded_sum

from .references import bounded_sum_by_definition
from .scenarios import ROWS, fast_where, row_numbers, rows_for, single

FAST = ("own_params", "two_sites", "simplex_param")
BLOCKS = ("multivariate", "iaf", "normal", "guide_list", "own_params", "shared_param", "two_sites")
FAST_BLOCKS = ("shared_param",)
KEY = jax.random.key(5)


def released_loss(row):
    """The row with the loss of the record as one more entry of its signal."""
    return row._replace(build=lambda: lambda problem: with_loss(row.build()(problem), 0.05))


def norms_of(pieces, row, arrays):
    """Norm of each record's signal."""
    estimator = row.build()(pieces.problem)

    def norms(params, arrays):
        public = estimator.prepare(KEY, params)
        signals = jax.vmap(estimator.signal, (None, 0))(public, arrays)
        return jax.vmap(lambda signal: jnp.sqrt(squared_norm(signal)))(signals)

    return np.asarray(jax.jit(norms)(pieces.params, arrays))


@functools.cache
def both(name, wrap=lambda row: row):
    """Compiled: ``(clip norms by row, params, arrays, mask) -> {row: (fast, definition)}``."""
    pieces = single(name)

    def sums(clip_norms, params, arrays, mask):
        found = {}
        for row in rows_for(pieces, wrap is released_loss):
            estimator = wrap(row).build()(pieces.problem)
            mechanism = gaussian(clip_norms[row.name], 0.0)
            data = estimator, mechanism, estimator.prepare(KEY, params), arrays, mask
            found[row.name] = [
                each(*data, seeds=row_numbers(mask.size))
                for each in (bounded_sum, bounded_sum_by_definition)
            ]
        return found

    return jax.jit(sums)


def spoil(arrays, rows_and_values):
    """Writes values into rows of every array of floating-point numbers."""
    for row, value in rows_and_values:
        arrays = tuple(
            array.at[row].set(value) if jnp.issubdtype(array.dtype, jnp.inexact) else array
            for array in arrays
        )
    return arrays


def distance(a, b):
    parts = jax.tree.map(lambda x, y: jnp.max(jnp.abs(x - y)), a, b)
    return max(map(float, jax.tree.leaves(parts)))


def is_zero(tree):
    return not any(np.any(leaf) for leaf in jax.tree.leaves(tree))


def equal(a, b):
    return jax.tree.all(jax.tree.map(np.array_equal, a, b))


BAD = [(1, np.nan), (3, np.inf), (4, -np.inf), (6, 1e30), (8, 1e12)]


def check_sums(sums, pieces, clips, sizes):
    """Everything that the sum of one scenario must do; ``sizes`` are the largest norms."""
    every = jnp.ones(ROWS, bool)
    some = jnp.asarray(np.random.default_rng(0).integers(0, 2, ROWS).astype(bool)).at[1].set(False)
    cases = {
        "plain": (pieces.arrays, every),
        "masked": (pieces.arrays, some),
        "bad records": (spoil(pieces.arrays, BAD), every),
        "bad padding": (spoil(pieces.arrays, BAD), some),
        "one left": (spoil(pieces.arrays, [(i, np.nan) for i in range(1, ROWS)]), every),
    }
    results = {case: sums(clips, pieces.params, *data) for case, data in cases.items()}
    for case, result in results.items():
        for name, (fast, definition) in result.items():
            assert jax.tree.structure(fast) == jax.tree.structure(definition)
            assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(fast))
            assert distance(fast, definition) < 1e-5 * sizes[name], (case, name)

    def of(arrays, mask):
        return sums(clips, pieces.params, arrays, mask)

    # NaN and infinite records count as 0, and leave the others alone (floats only are spoilt).
    nan_only = of(spoil(pieces.arrays, [(1, np.nan)]), every)
    without = of(pieces.arrays, every.at[1].set(False))
    # What is under the mask does not matter, to the last bit.
    for row in (0, 5):
        hidden = spoil(pieces.arrays, [(row, 1e30), (row + 1, np.nan)])
        mask = every.at[row].set(False).at[row + 1].set(False)
        assert equal(of(hidden, mask), of(pieces.arrays, mask))
    nothing = jnp.zeros(ROWS, bool)
    empty, worthless = (of(each, nothing) for each in (pieces.arrays, spoil(pieces.arrays, BAD)))
    hopeless = of(spoil(pieces.arrays, [(i, np.nan) for i in range(ROWS)]), every)
    for name in clips:
        assert equal(nan_only[name], without[name])
        assert not is_zero(without[name])
        assert all(is_zero(zero[name]) for zero in (empty, worthless, hopeless))


@pytest.mark.full
@pytest.mark.parametrize("name", fast_where(FAST))
def test_fast_sum_is_the_definition(name):
    pieces = single(name)
    clips = {}
    for row in rows_for(pieces):  # half of the records are clipped
        norms = norms_of(pieces, row, pieces.arrays)
        assert norms.min() < norms.max()
        clips[row.name] = jnp.asarray(np.median(norms))
    check_sums(both(name), pieces, clips, {name: float(clip) for name, clip in clips.items()})


@pytest.mark.full
@pytest.mark.parametrize(
    "name", [n if n in FAST_BLOCKS else pytest.param(n, marks=pytest.mark.extended) for n in BLOCKS]
)
def test_fast_sum_is_the_definition_with_norms_by_entry_and_a_loss(name):
    pieces = single(name)
    keys = {}  # the first entry, the rest, and the loss
    for row in rows_for(pieces, losses=True):
        first, *rest = pieces.entries(row)
        keys[row.name] = {first: 0.4} | ({...: 0.7} if rest else {}) | {LOSS_ENTRY: 0.05}

    @jax.jit
    def sums(values, params, arrays, mask):
        # Ellipsis and strings do not sort, so the dicts are put together inside.
        clips = {row: dict(zip(keys[row], values[row], strict=True)) for row in keys}
        return both(name, released_loss).__wrapped__(clips, params, arrays, mask)

    values = {row: tuple(map(jnp.asarray, clip.values())) for row, clip in keys.items()}
    check_sums(sums, pieces, values, dict.fromkeys(keys, 1.0))


@pytest.mark.extended
def test_every_block_is_clipped_to_its_own_norm():
    pieces = single("multivariate")
    mask = jnp.zeros(ROWS, bool).at[2].set(True)
    for row in rows_for(pieces):
        first, *rest = pieces.entries(row)
        clip = {first: 1e-3, ...: 2e-3}
        total = jax.jit(functools.partial(pieces.total(row), clip))
        found = total(pieces.params, KEY, pieces.arrays, mask)
        norm = float(jnp.linalg.norm(found[first].ravel()))
        others = np.sqrt(sum(float(jnp.sum(found[name] ** 2)) for name in rest))
        for size, clip in ((norm, 1e-3), (others, 2e-3)):
            assert (0.3 if row.simulates else 1 - 1e-5) * clip <= size <= clip * (1 + 1e-5)


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_records_of_half_precision_are_summed_in_single(dtype):
    pieces = single("logistic")
    copies = 4096 // ROWS
    arrays = tuple(jnp.concatenate([array[:1]] * copies) for array in pieces.arrays)
    arrays = (arrays[0].astype(dtype), arrays[1])
    mask = jnp.ones(copies, bool)
    for row in rows_for(pieces):
        compiled = jax.jit(pieces.total(row))
        total = compiled(0.5, pieces.params, KEY, arrays, mask)
        one = compiled(0.5, pieces.params, KEY, arrays, mask & (jnp.arange(copies) < 1))
        assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(total))
        assert distance(total, jax.tree.map(lambda x: copies * x, one)) < 1e-3 * 0.5


@pytest.mark.parametrize("sum_of", [bounded_sum, bounded_sum_by_definition])
@pytest.mark.parametrize("clip", [0.4, np.inf])
def test_microbatches_have_the_sum_of_the_whole(clip, sum_of):
    pieces = single("own_params")
    estimator = vanilla()(pieces.problem)
    rng = np.random.default_rng(3)
    arrays = tuple(jnp.asarray(np.resize(leaf, (75, *leaf.shape[1:]))) for leaf in pieces.arrays)
    arrays = spoil(arrays, [(2, np.nan), (70, np.inf)])
    mask = jnp.asarray(rng.random(75) < 0.7)
    # An adaptive norm counts records besides.
    mechanism = gaussian(AdaptiveClip(clip, share=0.2) if clip < np.inf else clip, 0.0)
    public = estimator.prepare(KEY, pieces.params)

    def total(size):
        return jax.jit(functools.partial(sum_of, estimator, mechanism, public, rows=size))(
            arrays, mask
        )

    whole = total(None)
    assert len(whole) == len(pieces.params) + (clip < np.inf)  # with the count
    # Asked for 40 rows, 75 records make two microbatches of 38; they share one row, counted once.
    for size in (1, 16, 40):
        parts = total(size)
        for name in whole:
            np.testing.assert_allclose(whole[name], parts[name], rtol=1e-5, atol=1e-6)
