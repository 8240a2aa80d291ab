"""Shared parts of all sums over a batch: microbatches, margins, and a mechanism's extra entries."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import DTypeLike
from jaxtyping import Bool

from numpyro_dp._compat import custom_vmap
from numpyro_dp._tree import widen
from numpyro_dp.core import Mechanism, Number, PyTree, Values
from numpyro_dp.sums.exact import added, clip_margin, exact_sum

_NUMBERS = 2**20  # values in a microbatch, few enough to stay in a cache
_LEAST = 16  # fewest rows of a microbatch


class Compensated(NamedTuple):
    """A floating-point sum, and the rounding error that it has lost so far."""

    total: Array
    lost: Array

    def add(self, other: Compensated) -> Compensated:
        """Adds two such sums. Only the lost errors are rounded."""
        grown = self.total + other.total
        back = grown - self.total
        error = (self.total - (grown - back)) + (other.total - back)
        return Compensated(grown, self.lost + other.lost + error)


class Shards(NamedTuple):
    """The number of equal parts of a batch, each on its own device.

    Attributes:
        number: Number of parts.
        names: Axes of the mesh, inside ``jax.shard_map``.
    """

    number: int = 1
    names: tuple[str, ...] = ()

    def add(self, tree: PyTree) -> PyTree:
        """Adds the values of all devices, whose order does not matter. Integers add exactly."""
        if self.names:
            return jax.tree.map(self._added, tree, is_leaf=lambda x: isinstance(x, Compensated))
        return tree

    def _added(self, found: PyTree) -> PyTree:
        if isinstance(found, Compensated):
            return _added_on_a_grid(found, self.number, self.names)
        return lax.psum(found, self.names)


def _added_on_a_grid(found: Compensated, number: int, names: tuple[str, ...]) -> Compensated:
    """Adds one such sum of each device, as two integers on a grid that all devices share.

    For d devices, the first integer has a unit of some 2**-30 d times the largest entry. The second
    counts parts of that unit. At most 2**-48 d**2 times the largest entry is lost. For float64 the
    powers are 2**-62 and 2**-98. The order of the devices changes nothing. If an entry is not
    finite, no entry of the result is.
    """
    total, lost = found
    wide = total.dtype == jnp.float64
    integer, bits, finer = (jnp.int64, 62, 50) if wide else (jnp.int32, 30, 21)
    # The sum over all devices must fit the integer too.
    bits -= math.ceil(math.log2(number))
    finer = min(bits, finer)  # the lost part may be some units
    # `near` is the best single value, and `lost` becomes what it leaves out.
    near = total + lost
    lost = lost - (near - total)
    # One exponent for all devices: integers on different grids cannot be added.
    largest = lax.pmax(jnp.max(jnp.abs(near), initial=0), names)
    exponent = jnp.frexp(largest)[1]
    scaled = jnp.ldexp(near, bits - exponent)
    units = jnp.round(scaled)
    rest = jnp.round(jnp.ldexp(scaled - units + jnp.ldexp(lost, bits - exponent), finer))
    units, rest = lax.psum((units.astype(integer), rest.astype(integer)), names)
    most = units.astype(total.dtype)
    less = (units - most.astype(integer)).astype(total.dtype)
    less = less + jnp.ldexp(rest.astype(total.dtype), -finer)
    finite = lax.psum(jnp.sum(~jnp.isfinite(near)), names) == 0  # a maximum may ignore nan
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
    """Adds a function's sums over microbatches, and joins its values for each row.

    The last microbatch ends with the last row. Its rows that are also in the one before do not
    count. Sums cover all devices, and the values for each row cover this device.
    """
    batch = mask.size
    if batch <= rows:
        total, of_each = of_rows(examples, mask)
        return shards.add(total), of_each
    number = -(-batch // rows)
    # Parts of nearly equal size, so that few rows are computed twice.
    rows = min(rows, -(-batch // (number * _LEAST)) * _LEAST)
    number = -(-batch // rows)
    last = batch - rows  # first row of the last one

    def at(start: Array) -> tuple[PyTree, Array]:
        taken = jax.tree.map(
            lambda leaf: lax.dynamic_slice_in_dim(leaf, jnp.minimum(start, last), rows),
            (examples, mask),
        )
        # A row that counts twice would add up to twice its clip norm.
        new = jnp.arange(rows) >= start - last
        return taken[0], taken[1] & new

    def step(total: PyTree, start: Array) -> tuple[PyTree, PyTree]:
        found, of_each = of_rows(*at(start))
        return added(total, found), of_each

    like, _ = jax.eval_shape(lambda start: of_rows(*at(start)), 0)
    zero = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), like)
    total, of_each = lax.scan(step, zero, rows * jnp.arange(number))
    rest = batch - (number - 1) * rows
    return shards.add(total), jax.tree.map(
        lambda x: jnp.concatenate([x[:-1].reshape(-1, *x.shape[2:]), x[-1, rows - rest :]]), of_each
    )


def pinned(live: Array, compute: Callable[..., PyTree], *operands: PyTree) -> PyTree:
    """Evaluates ``compute(*operands)`` once. XLA may not recompute a value for one of its readers.

    Otherwise XLA may compute a value again for each reader, with different rounding. If huge terms
    cancel, the gradient that is summed could then differ from the one whose norm was taken. On a
    CPU, an ``optimization_barrier`` does not prevent this. A branch of a conditional does.

    Args:
        live: A true scalar that the compiler cannot know, because it comes from an argument of the
            compiled function. If it is false the result is 0. Under ``vmap`` the result is 0 if it
            is false for any element.
        compute: Function of arrays to a tree of arrays.
        operands: Arguments of ``compute``.
    """
    like = jax.eval_shape(compute, *operands)

    def nothing(*_: PyTree) -> PyTree:
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), like)

    return lax.cond(_for_all(live), compute, nothing, *operands)


@custom_vmap
def _for_all(live: Array) -> Array:
    """Stays a scalar under ``vmap``, which would turn a conditional on a vector into a select."""
    return live


@_for_all.def_vmap
def _(size: int, batched: list[bool], live: Array) -> tuple[Array, bool]:
    return jnp.all(live), False


def suitable_rows(of_a_row: PyTree) -> int:
    """Returns a suitable number of rows of a microbatch, by the shapes that one row needs."""
    size = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(of_a_row))
    return max(_LEAST, _NUMBERS // max(size, 1) // _LEAST * _LEAST)


def margin_of(
    of_a_row: PyTree,
    batch: int,
    coarse: DTypeLike | None = None,
    rows: int = 1,
    whole: bool = False,
) -> float:
    """The margin of signals by the shapes of one. ``coarse`` is a coarser type of their norms.

    A record has ``rows`` such signals. If ``whole``, the sum is not rounded.
    """
    leaves = jax.tree.leaves(jax.eval_shape(widen, of_a_row))
    size = sum(math.prod(leaf.shape) for leaf in leaves)
    dtypes = [leaf.dtype for leaf in leaves] + ([] if coarse is None else [coarse])
    # One factor scales all entries, so the margin has room for the least precise one.
    return min(clip_margin(batch, size, dtype, rows, whole) for dtype in dtypes)


def coarsest(arrays: list[PyTree]) -> np.dtype:
    """The widened type of least precision. Norms and products are computed in each of them."""
    types = {jnp.promote_types(x.dtype, jnp.float32) for x in arrays}
    return max(types, key=lambda dtype: jnp.finfo(dtype).eps)


def norms_of(mechanism: Mechanism, names: tuple[str, ...]) -> Sequence[Number | None]:
    """The clip norm of each block, each ``None`` without clipping."""
    norms = mechanism.norms(names)
    return [None] * len(mechanism.blocks(names)) if norms is None else norms


def extra_sums(
    mechanism: Mechanism,
    names: tuple[str, ...],
    squares: tuple[Array, ...],
    margin: float,
    mask: Bool[Array, " batch"],
    shards: Shards = WHOLE,
) -> Values:
    """Sums of the entries that the mechanism adds to the signals, also rounded to a grid."""
    if mechanism.extras is None:
        return {}
    # The mechanism bounds these values itself, so each record has the weight 1 or 0.
    weights = mask.astype(squares[0].dtype)
    found = mechanism.extras(names, squares, margin)
    return {
        entry: exact_sum(rows_of(numbers), weights, norm, shards.number, shards.add)
        for entry, (numbers, norm) in found.items()
    }


def rows_of(tree: PyTree) -> Callable[[slice], PyTree]:
    """Returns a function that takes rows of the leaves."""
    return lambda rows: jax.tree.map(lambda leaf: leaf[rows], tree)


def first_of(examples: PyTree) -> PyTree:
    """Shapes of one record, with the types that JAX gives it."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape[1:], jax.dtypes.canonicalize_dtype(x.dtype)),
        examples,
    )
