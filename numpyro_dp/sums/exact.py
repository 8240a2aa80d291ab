r"""A weighted sum over records that does not depend on their order: integers on a grid.

If one term is taken out of a floating-point sum, the sum may move by more than that term. Each
partial sum is rounded, and its rounding depends on all terms before it. With n terms near the clip
norm C, one term may move the sum by some :math:`n^2 2^{-24} C` more than C (Casacuberta et al.
2022). So this module adds integers. It rounds every clipped term by itself to a grid of spacing
:math:`2^{-k} C`. Integers add up exactly, in any order and on any number of devices.

Two rounding errors remain, of one record's own contribution and of the finished sum. Each is at
most a known multiple of the unit roundoff. Terms are clipped to a norm that is smaller than C by a
margin for both (:func:`clip_margin`), so the sensitivity of the result is C. A mechanism may take
the integers (:class:`~numpyro_dp.core.Whole`). Then the finished sum is not rounded, and the margin
does not grow with the number of records.

Reference:
    S. Casacuberta, M. Shoemate, S. Vadhan, C. Wagaman, "Widespread underestimation of sensitivity
    in differentially private libraries and how to fix it", CCS 2022.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from numpyro_dp._tree import column, widen
from numpyro_dp.core import Number, PyTree, Whole, is_whole

_LANES = 16  # slices in one pass: compilers handle some twenty well, and forty badly
_LANE_ROWS = 40  # a loop of up to 32 rows is unrolled, which is three times as slow
# A long sum adds the low 12 bits of its terms and the rest of their bits apart. With this many rows
# neither of the two sums overflows an int32.
_MOST_ROWS, _SPLIT = 2**21, 12


class _Grid(NamedTuple):
    """How floating-point values of one width become integers.

    Attributes:
        bits: The grid has ``2**bits`` steps in a clip norm.
        integer: Integer type of the sum.
        magic: 1.5 times the power of two whose last place is 1. Adding it rounds to an integer.
    """

    bits: int
    integer: DTypeLike
    magic: float


def exact_sum(
    terms: Callable[[slice], PyTree],
    weights: Array,
    norm: Number | None,
    parts: int = 1,
    add: Callable[[PyTree], PyTree] = lambda part: part,
) -> PyTree:
    """Returns the weighted sum of terms, one for each record.

    Args:
        terms: Rows -> their terms: a tree of arrays with a leading axis.
        weights: Weight of each row, shape (batch,). With weight 0 a term does not count, even if it
            is not finite.
        norm: The clip norm, which a weighted term exceeds by rounding only. ``None`` means that
            nothing is clipped: the sum is a plain one, and not private.
        parts: Number of equal parts of the batch. The terms are one of them.
        add: Adds the sums of all parts.

    Returns:
        A tree like the terms, in float32 or wider, without the leading axis.

    Guarantee:
        The sum of integers is exact. Without a row the sum moves by that row's own term, rounded to
        the grid, and by the rounding of the finished sum.
    """
    like = jax.eval_shape(lambda: widen(terms(slice(0, 1))))
    count = parts * weights.size
    return finished(add(partial_sum(terms, weights, norm, count)), like, norm, count)


def partial_sum(
    terms: Callable[[slice], PyTree], weights: Array, norm: Number | None, count: int
) -> PyTree:
    """Returns the same sum of some of ``count`` rows, in steps of the grid.

    Such sums may be added in any order, leaf by leaf up to 2**15 of them, or with their ``add``.
    :func:`finished` converts them to floating point. Sums of float32 are
    :class:`~numpyro_dp.core.Whole`.
    """
    rows, counts = weights.size, jnp.abs(weights) > 0  # false for NaN
    if norm is None:
        return jax.tree.map(
            lambda leaf: jnp.sum(_counted(leaf, counts) * column(weights, leaf), axis=0),
            widen(terms(slice(None))),
        )
    # The barrier makes XLA compute these once for each record, not once for each entry.
    counts, scaled = lax.optimization_barrier((counts, weights / norm))

    def whole(rows: slice) -> PyTree:
        def rounded(leaf: Array) -> Array:
            grid = _grid(count, leaf.dtype)
            steps = scaled[rows].astype(leaf.dtype) * 2.0**grid.bits
            # Adding magic leaves the rounded value in the last bits, where integers have theirs.
            shifted = _counted(leaf, counts[rows]) * column(steps, leaf) + grid.magic
            return lax.bitcast_convert_type(shifted.astype(leaf.dtype), grid.integer)

        return jax.tree.map(rounded, widen(terms(rows)))

    def from_zero(total: Array, times: int) -> Array:
        dtype = jnp.float64 if total.dtype == jnp.int64 else jnp.float32
        grid = _grid(count, dtype)
        start = lax.bitcast_convert_type(jnp.asarray(grid.magic, dtype), grid.integer)
        return total - times * start  # both wrap around in the same way

    return _add_rows(whole, from_zero, 0, rows)


def finished(
    total: PyTree, like: PyTree, norm: Number | None, count: int, whole: bool = False
) -> PyTree:
    """Converts a sum over ``count`` rows to floating point, in the types of ``like``.

    If ``whole``, sums of float32 stay integers, with the spacing of their grid.
    """
    if norm is None:
        return total

    def number(found: PyTree, leaf: Array) -> PyTree:
        spacing = jnp.asarray(norm / 2.0 ** _grid(count, leaf.dtype).bits, leaf.dtype)
        if not is_whole(found):
            return found.astype(leaf.dtype) * spacing
        found = found.carried()._replace(spacing=spacing)
        return found if whole else found.number()

    return jax.tree.map(number, total, like, is_leaf=is_whole)


def clip_margin(
    batch: int, size: int, dtype: DTypeLike, rows: int = 1, whole: bool = False
) -> float:
    r"""Returns the part of the clip norm to clip to, so that rounding fits in the rest.

    It is ``1 / (1 + e)`` for a batch of n rows, signals of d values and a type of unit roundoff u.
    Here ``e`` is the sum of three errors. The grid may lengthen a contribution by
    :math:`\sqrt d\, 2^{-k-1}`. A squared norm may be too small by :math:`d u`. Four roundings of
    each of two sums of norm n C make :math:`8 n u`: three here, and one where the noise is added
    (:mod:`numpyro_dp.privacy.noise`). If the sum stays ``whole``, nothing of it is rounded before
    the noise is added. If a record has several rows, the first two errors occur in each.
    """
    whole = whole and jnp.dtype(dtype) != jnp.float64
    unit = float(jnp.finfo(dtype).eps) / 2
    grid = math.sqrt(size) * 2.0 ** -(_grid(batch, dtype).bits + 1)
    # Beyond 2048 values a squared norm is summed in rows of 1024, so it rounds like fewer terms.
    each = grid + min(size, 2048 + size // 1024) * unit
    return 1 / (1 + rows * each + 8 * batch * unit * (not whole))


def _grid(batch: int, dtype: DTypeLike) -> _Grid:
    # Two limits on the bits. A term plus `magic` must keep the last place 1. The sum of all terms
    # must fit its integers: an int64, or an int32 and 16 bits.
    room = math.ceil(math.log2(max(batch, 2)))
    if jnp.dtype(dtype) == jnp.float64:
        return _Grid(min(50, 61 - room), jnp.int64, 1.5 * 2.0**52)
    return _Grid(min(21, 47 - room), jnp.int32, 1.5 * 2.0**23)


def _counted(leaf: Array, counts: Array) -> Array:
    return jnp.where(column(counts, leaf), leaf, 0)


def _add_rows(
    whole: Callable[[slice], PyTree],
    from_zero: Callable[[Array, int], Array],
    first: int,
    last: int,
) -> PyTree:
    """Sum of integers over rows, each without its start.

    Rows far apart are added first. That compiles to one pass over long vectors, which also forms
    the terms. A sum over the leading axis alone reads columns, up to five times as slowly on a CPU.
    """
    rows = last - first
    if rows > _MOST_ROWS:
        middle = first + rows // 2
        halves = (_add_rows(whole, from_zero, *ends) for ends in ((first, middle), (middle, last)))
        return added(*halves)
    number = min(max(rows // _LANE_ROWS, 1), _LANES)
    block = rows // number
    lanes = [whole(slice(first + at * block, first + (at + 1) * block)) for at in range(number)]
    parts = [functools.reduce(lambda one, other: jax.tree.map(jnp.add, one, other), lanes)]
    total = jax.tree.map(lambda leaf: _summed(leaf, from_zero, number, rows), parts[0])
    if rows % number:
        rest = whole(slice(first + number * block, last))
        total = added(total, jax.tree.map(lambda leaf: _summed(leaf, from_zero, 1, rows), rest))
    return total


def _summed(
    leaf: Array, from_zero: Callable[[Array, int], Array], number: int, rows: int
) -> Array | Whole:
    """The sum over the leading axis of sums of ``number`` integers of ``rows`` in all."""
    if leaf.dtype == jnp.int64:
        return from_zero(jnp.sum(leaf, axis=0), number * len(leaf))
    zero = jnp.zeros((), jnp.float32)
    if rows < 2**10:  # of at most 2**21, so the sum fits
        total = from_zero(jnp.sum(leaf, axis=0, dtype=leaf.dtype), number * len(leaf))
        # The shift rounds down and the mask has the rest, so negative sums are exact too.
        return Whole(total >> 16, total & 0xFFFF, zero)
    # The barrier makes XLA form the terms once, not for each of the two sums.
    each = lax.optimization_barrier(from_zero(leaf, number))
    high, low = (jnp.sum(x, axis=0) for x in (each >> _SPLIT, each & (2**_SPLIT - 1)))
    low = low + ((high & (2 ** (16 - _SPLIT) - 1)) << _SPLIT)
    return Whole(high >> (16 - _SPLIT), low, zero).carried()


def added(one: PyTree, other: PyTree) -> PyTree:
    """Adds two trees of sums. Sums of two arrays, such as ``Whole``, have an ``add`` of their own.

    Arrays have none.
    """

    def adds(leaf: object) -> bool:
        return hasattr(leaf, "add")

    return jax.tree.map(lambda x, y: x.add(y) if adds(x) else x + y, one, other, is_leaf=adds)
