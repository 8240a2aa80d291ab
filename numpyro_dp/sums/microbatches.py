"""What sums over a batch have in common: microbatches, margins, and what a mechanism adds."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool

from numpyro_dp._tree import widen
from numpyro_dp.core import Mechanism, PyTree
from numpyro_dp.sums.exact import clip_margin, exact_sum

__all__ = [
    "WHOLE",
    "Compensated",
    "Shards",
    "coarsest",
    "extra_sums",
    "first_of",
    "margin_of",
    "norm_of",
    "over_microbatches",
    "rows_of",
    "suitable_rows",
]

_NUMBERS = 2**20  # of a microbatch: memory is used again while it is near
_LEAST = 16  # rows of a microbatch


class Compensated(NamedTuple):
    """A sum of floating-point numbers, and what its rounding has lost so far."""

    total: Array
    lost: Array

    def add(self, other: Compensated) -> Compensated:
        """Adds two such sums; one rounding is left, of what was lost."""
        grown = self.total + other.total
        back = grown - self.total
        error = (self.total - (grown - back)) + (other.total - back)
        return Compensated(grown, self.lost + other.lost + error)


class Shards(NamedTuple):
    """How many parts of the same size a batch has, each on a device of its own.

    Attributes:
        number: Of parts.
        names: Axes of the mesh, inside ``jax.shard_map``.
    """

    number: int = 1
    names: tuple[str, ...] = ()

    def add(self, tree: PyTree) -> PyTree:
        """Adds up what every device has, whatever their order: integers exactly."""
        if self.names:
            return jax.tree.map(self._added, tree, is_leaf=_is_compensated)
        return tree

    def _added(self, found: Any) -> Any:
        if _is_compensated(found):
            return _added_on_a_grid(found, self.number, self.names)
        return lax.psum(found, self.names)


def _added_on_a_grid(found: Compensated, number: int, names: tuple[str, ...]) -> Compensated:
    """Adds up one such sum of each device, as two integers on a grid that all of them share.

    Integers of 32 (64) bits, the first in units of some 2**-30 (2**-62) times the devices of the
    largest entry, the second in parts of a unit. At most 2**-48 (2**-98) times the square of their
    number of the largest entry is lost; their order changes nothing. Where an entry is not finite,
    nothing is.
    """
    total, lost = found
    wide = total.dtype == jnp.float64
    integer, bits, finer = (jnp.int64, 62, 50) if wide else (jnp.int32, 30, 21)
    bits -= math.ceil(math.log2(number))
    finer = min(bits, finer)  # what is lost may be some units
    near = total + lost
    lost = lost - (near - total)
    largest = lax.pmax(jnp.max(jnp.abs(near), initial=0), names)
    exponent = jnp.frexp(largest)[1]
    scaled = jnp.ldexp(near, bits - exponent)
    units = jnp.round(scaled)
    rest = jnp.round(jnp.ldexp(scaled - units + jnp.ldexp(lost, bits - exponent), finer))
    units, rest = lax.psum((units.astype(integer), rest.astype(integer)), names)
    most = units.astype(total.dtype)
    less = (units - most.astype(integer)).astype(total.dtype)
    less = less + jnp.ldexp(rest.astype(total.dtype), -finer)
    finite = lax.psum(jnp.sum(~jnp.isfinite(near)), names) == 0  # a maximum may pass over nan
    return Compensated(
        jnp.where(finite, jnp.ldexp(most, exponent - bits), jnp.nan),
        jnp.where(finite, jnp.ldexp(less, exponent - bits), jnp.nan),
    )


WHOLE = Shards()


def over_microbatches(
    of_rows: Callable[[PyTree, Array], tuple[PyTree, PyTree]],
    examples: PyTree,
    mask: Array,
    rows: int,
    shards: Shards = WHOLE,
) -> tuple[PyTree, PyTree]:
    """Adds up the sums that a function finds for microbatches; keeps what it has of each row.

    The last microbatch ends with the last row; rows of it that the one before had do not count.
    Sums are those of all devices, what is kept is of this one.
    """
    total, of_each = _over_microbatches(of_rows, examples, mask, rows)
    return shards.add(total), of_each


def _over_microbatches(
    of_rows: Callable[[PyTree, Array], tuple[PyTree, PyTree]],
    examples: PyTree,
    mask: Array,
    rows: int,
) -> tuple[PyTree, PyTree]:
    batch = mask.size
    if batch <= rows:
        return of_rows(examples, mask)
    number = -(-batch // rows)
    rows = min(rows, -(-batch // (number * _LEAST)) * _LEAST)
    number = -(-batch // rows)
    last = batch - rows  # where the last one starts

    def at(start: Array) -> tuple[PyTree, Array]:
        taken = jax.tree.map(
            lambda leaf: lax.dynamic_slice_in_dim(leaf, jnp.minimum(start, last), rows),
            (examples, mask),
        )
        new = jnp.arange(rows) >= start - last
        return taken[0], taken[1] & new

    def step(total: PyTree, start: Array) -> tuple[PyTree, PyTree]:
        found, of_each = of_rows(*at(start))
        return jax.tree.map(_add, total, found, is_leaf=_is_compensated), of_each

    like, _ = jax.eval_shape(lambda start: of_rows(*at(start)), 0)
    zero = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), like)
    total, of_each = lax.scan(step, zero, rows * jnp.arange(number))
    rest = batch - (number - 1) * rows
    return total, jax.tree.map(
        lambda x: jnp.concatenate([x[:-1].reshape(-1, *x.shape[2:]), x[-1, rows - rest :]]), of_each
    )


def suitable_rows(of_a_row: PyTree) -> int:
    """Returns how many rows a microbatch suitably has, by the shapes of what is kept of one row."""
    size = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(of_a_row))
    return max(_LEAST, _NUMBERS // max(size, 1) // _LEAST * _LEAST)


def _is_compensated(leaf: Any) -> bool:
    return isinstance(leaf, Compensated)


def _add(one: Any, other: Any) -> Any:
    return one.add(other) if _is_compensated(one) else one + other


def margin_of(of_a_row: PyTree, batch: int, coarse: Any = None) -> float:
    """The margin of signals by the shapes of one; norms may be of a coarser type."""
    leaves = jax.tree.leaves(jax.eval_shape(widen, of_a_row))
    size = sum(math.prod(leaf.shape) for leaf in leaves)
    dtypes = [leaf.dtype for leaf in leaves] + ([] if coarse is None else [coarse])
    return min(clip_margin(batch, size, dtype) for dtype in dtypes)


def coarsest(arrays: list[Any]) -> Any:
    """The widened type of least precision: norms and products are found in each of them."""
    types = {jnp.promote_types(x.dtype, jnp.float32) for x in arrays}
    return max(types, key=lambda dtype: jnp.finfo(dtype).eps)


def norm_of(mechanism: Mechanism, names: tuple[str, ...], block: int) -> Any:
    """The clip norm of a block; ``None`` where nothing is clipped."""
    norms = mechanism.norms(names)
    return None if norms is None else norms[block]


def extra_sums(
    mechanism: Mechanism,
    names: tuple[str, ...],
    squares: tuple[Array, ...],
    margin: float,
    mask: Bool[Array, " batch"],
    shards: Shards = WHOLE,
) -> dict[str, Any]:
    """Sums of what the mechanism adds to the signals; each number is rounded to a grid too."""
    if mechanism.extras is None:
        return {}
    weights = mask.astype(squares[0].dtype)
    found = mechanism.extras(names, squares, margin)
    return {
        entry: exact_sum(rows_of(numbers), weights, norm, shards.number, shards.add)
        for entry, (numbers, norm) in found.items()
    }


def rows_of(tree: PyTree) -> Callable[[slice], PyTree]:
    """Returns rows -> these rows of the leaves."""
    return lambda rows: jax.tree.map(lambda leaf: leaf[rows], tree)


def first_of(examples: PyTree) -> PyTree:
    """Shapes of one record, and types as JAX takes them."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape[1:], jax.dtypes.canonicalize_dtype(x.dtype)),
        examples,
    )
