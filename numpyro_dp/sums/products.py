r"""A weighted sum of outer products, as products of matrices over blocks of rows.

The gradient of the weights of a layer is, for each record, slope times input. The sum

.. math:: S = \sum_i w_i\, r_i\, x_i^\top

needs no array of (records, weights). It is not exact like :mod:`numpyro_dp.sums.exact`, but its
rounding is bounded. One product of matrices over k rows has an error of at most
:math:`\gamma_k \sum_i \lvert w_i r_i x_i^\top\rvert` in each entry, in any order of addition. Here
:math:`\gamma_k = k u / (1 - k u)`, with u the unit roundoff. More than four blocks are added with
their rounding errors carried along (two-sum). Sums of several parts of a batch are added as
integers of twice the length. Either costs at most 3 u more.

By the triangle inequality, the sum of n terms of norm at most C has an error of at most
:math:`(k + 8)\, n\, u\, C` in norm. Two sums differ by at most twice that, beyond what their
terms do.
Terms are clipped to a norm that is smaller than C by that margin, too. This holds if products of
matrices are computed in full precision by the usual sums, as libraries do on CPUs and GPUs. If a
batch is too long for a small margin, gradients are summed one by one.

Reference:
    N. Higham, Accuracy and stability of numerical algorithms, 2nd ed. 2002, sections 3.5 and 4.3.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from numpyro_dp._tree import column
from numpyro_dp.sums.microbatches import Compensated

_LONGEST = 64  # rows of one product of matrices
_SHORTEST = 8
_FEW = 4  # blocks that are added without compensation
_ALLOWED = 0.01  # largest margin, as a part of the clip norm
_PLATFORMS = ("cpu", "gpu", "cuda", "rocm")  # their products in full precision are usual sums


def is_worthwhile(
    batch: int, dtype: DTypeLike, shape: tuple[int, ...], *factors: tuple[int, ...]
) -> bool:
    """Whether to sum gradients of a shape as products.

    They must have at least four times as many values as their factors together. The rounding of
    this many rows must fit in a hundredth of the clip norm, which holds for up to some 5,200 rows
    in float32.
    """
    shorter = math.prod(shape) >= 4 * sum(math.prod(factor) for factor in factors)
    allowed = product_error(batch, dtype) <= _ALLOWED
    return shorter and allowed and jax.default_backend() in _PLATFORMS


def product_error(batch: int, dtype: DTypeLike) -> float:
    """Returns the bound on what rounding adds to the sensitivity, in clip norms.

    The type is the coarsest one of the factors.
    """
    return _error(longest_product(batch, dtype), batch, dtype)


def product_sum(
    multiply: Callable[[Array, Array], Array],
    slopes: Array,
    factors: Array,
    weights: Array,
    longest: int,
) -> Compensated:
    """Returns the weighted sum of products of each row's slope and factor.

    ``multiply`` maps slopes and factors of some rows to the sum of their outer products, by one
    product of matrices in full precision. A row of weight 0 does not count, even if it is not
    finite. One product has at most ``longest`` rows, :func:`longest_product` of the whole batch.
    """
    batch = weights.size
    counts, weights = jnp.abs(weights) > 0, weights.astype(slopes.dtype)
    # Both factors become 0, because a weight of 0 times a NaN is NaN.
    slopes = jnp.where(column(counts, slopes), slopes * column(weights, slopes), 0)
    factors = jnp.where(column(counts, factors), factors, 0)
    rows = max(1, min(longest, batch))
    missing = -batch % rows
    if missing:  # rows of zeros fill the last block
        slopes, factors = (
            jnp.pad(x, ((0, missing), *((0, 0),) * (x.ndim - 1))) for x in (slopes, factors)
        )
    blocks = [x.reshape(-1, rows, *x.shape[1:]) for x in (slopes, factors)]
    if len(blocks[0]) <= _FEW:
        terms = [multiply(*block) for block in zip(*blocks, strict=True)]
        return _whole(functools.reduce(jnp.add, terms))
    first = _whole(multiply(blocks[0][0], blocks[1][0]))

    def add(total: Compensated, block: tuple[Array, ...]) -> tuple[Compensated, None]:
        return total.add(_whole(multiply(*block))), None

    return lax.scan(add, first, tuple(x[1:] for x in blocks))[0]


def _whole(total: Array) -> Compensated:
    return Compensated(total, jnp.zeros_like(total))


def longest_product(batch: int, dtype: DTypeLike) -> int:
    """Rows of one product of matrices: the largest power of two with an allowed error."""
    rows = _LONGEST
    while rows > _SHORTEST and _error(rows, batch, dtype) > _ALLOWED:
        rows //= 2
    return rows


def _error(rows: int, batch: int, dtype: DTypeLike) -> float:
    """2 (k + 8) n u."""
    # `eps` is 2 u.
    return (rows + 8) * batch * float(jnp.finfo(dtype).eps)
