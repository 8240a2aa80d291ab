r"""A weighted sum over records that does not depend on their order: integers on a grid.

If one term is taken out of a floating-point sum, the sum may move by more than that term. Each
partial sum is rounded, and its rounding depends on all terms before it. With n terms near the clip
norm C, one term may move the sum by some :math:`n^2 2^{-24} C` more than C (Casacuberta et al.
2022). So this module adds integers. It rounds every clipped term by itself to a grid of spacing
:math:`2^{-k} C`. Integers add up exactly, in any order and on any number of devices.

Two rounding errors remain, of one record's own contribution and of the finished sum. Each is at
most a known multiple of the unit roundoff. Terms are clipped to a norm that is smaller than C by a
margin for both (:func:`clip_margin`), so the sensitivity of the result is C.

Reference:
    S. Casacuberta, M. Shoemate, S. Vadhan, C. Wagaman, "Widespread underestimation of sensitivity
    in differentially private libraries and how to fix it", CCS 2022.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from numpyro_dp._tree import column, widen

__all__ = ["clip_margin", "exact_sum", "finished", "partial_sum"]

_LANES = 16  # slices in one pass: compilers handle some twenty well, and forty badly
_LANE_ROWS = 40  # a loop of up to 32 rows is unrolled, which is three times as slow


class _Grid(NamedTuple):
    """How floating-point values of one width become integers.

    Attributes:
        bits: The grid has ``2**bits`` steps in a clip norm.
        integer: Integer type of the sum.
        magic: 1.5 times the power of two whose last place is 1. Adding it rounds to an integer.
    """

    bits: int
    integer: Any
    magic: float


def exact_sum(
    terms: Callable[[slice], Any],
    weights: Array,
    norm: Any,
    parts: int = 1,
    add: Callable[[Any], Any] = lambda part: part,
) -> Any:
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


def partial_sum(terms: Callable[[slice], Any], weights: Array, norm: Any, count: int) -> Any:
    """Returns the same sum of some of ``count`` rows, in steps of the grid.

    Such sums may be added in any order. :func:`finished` converts them to floating point.
    """
    rows, counts = weights.size, weights > 0
    if norm is None:
        return jax.tree.map(
            lambda leaf: jnp.sum(_counted(leaf, counts) * column(weights, leaf), axis=0),
            widen(terms(slice(None))),
        )
    # The barrier makes XLA compute these once for each record, not once for each entry.
    counts, scaled = lax.optimization_barrier((counts, weights / norm))

    def whole(rows: slice) -> Any:
        def rounded(leaf: Array) -> Array:
            grid = _grid(count, leaf.dtype)
            steps = scaled[rows].astype(leaf.dtype) * 2.0**grid.bits
            # Adding magic leaves the rounded value in the last bits, where integers have theirs.
            shifted = _counted(leaf, counts[rows]) * column(steps, leaf) + grid.magic
            return lax.bitcast_convert_type(shifted.astype(leaf.dtype), grid.integer)

        return jax.tree.map(rounded, widen(terms(rows)))

    def from_zero(total: Array, leaf: Array) -> Array:
        grid = _grid(count, leaf.dtype)
        start = lax.bitcast_convert_type(jnp.asarray(grid.magic, leaf.dtype), grid.integer)
        return total - rows * start  # both wrap around in the same way

    like = jax.eval_shape(lambda: widen(terms(slice(0, 1))))
    return jax.tree.map(from_zero, _add_rows(whole, rows), like)


def finished(total: Any, like: Any, norm: Any, count: int) -> Any:
    """Converts a sum over ``count`` rows to floating point, in the types of ``like``."""
    if norm is None:
        return total

    def number(whole: Array, leaf: Array) -> Array:
        spacing = norm / 2.0 ** _grid(count, leaf.dtype).bits
        return whole.astype(leaf.dtype) * jnp.asarray(spacing, leaf.dtype)

    return jax.tree.map(number, total, like)


def clip_margin(batch: int, size: int, dtype: Any, rows: int = 1) -> float:
    r"""Returns the part of the clip norm to clip to, so that rounding fits in the rest.

    It is ``1 / (1 + e)`` for a batch of n rows, signals of d values and a type of unit roundoff u.
    Here ``e`` is the sum of three errors. The grid may lengthen a contribution by
    :math:`\sqrt d\, 2^{-k-1}`. A squared norm may be too small by :math:`d u`. Four roundings of
    each of two sums of norm n C make :math:`8 n u`: three here, and one where the noise is added
    (:mod:`numpyro_dp.privacy.noise`). If a record has several rows, the first two errors occur in
    each.
    """
    unit = float(jnp.finfo(dtype).eps) / 2
    grid = math.sqrt(size) * 2.0 ** -(_grid(batch, dtype).bits + 1)
    each = grid + min(size, 2048 + size // 1024) * unit
    return 1 / (1 + rows * each + 8 * batch * unit)


def _grid(batch: int, dtype: Any) -> _Grid:
    room = math.ceil(math.log2(max(batch, 2)))
    if jnp.dtype(dtype) == jnp.float64:
        return _Grid(min(50, 61 - room), jnp.int64, 1.5 * 2.0**52)
    return _Grid(min(21, 29 - room), jnp.int32, 1.5 * 2.0**23)


def _counted(leaf: Array, counts: Array) -> Array:
    return jnp.where(column(counts, leaf), leaf, 0)


def _add_rows(whole: Callable[[slice], Any], rows: int) -> Any:
    """Sum of integers over rows, modulo their range.

    Rows far apart are added first. That compiles to one pass over long vectors, which also forms
    the terms. A sum over the leading axis alone reads columns, up to five times as slowly on a CPU.
    """
    number = min(max(rows // _LANE_ROWS, 1), _LANES)
    block = rows // number
    lanes = [whole(slice(lane * block, (lane + 1) * block)) for lane in range(number)]
    parts = [functools.reduce(lambda one, other: jax.tree.map(jnp.add, one, other), lanes)]
    if rows % number:
        parts.append(whole(slice(number * block, rows)))
    return jax.tree.map(
        lambda *leaves: sum(jnp.sum(leaf, axis=0, dtype=leaf.dtype) for leaf in leaves), *parts
    )
