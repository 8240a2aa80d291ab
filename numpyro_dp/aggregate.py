r"""The clipped sum over a batch, :math:`\sum_i w_i s_i`, exact.

A sum of floating-point numbers moves by more than the number that is taken out of it: each partial
sum is rounded, and how depends on all terms before it. With n terms near the clip norm C one term
may move the sum by some :math:`n^2 2^{-24} C` more than C (Casacuberta et al. 2022). So what is
added up here are integers: every bounded signal is rounded to a grid of spacing
:math:`2^{-k} C`, by itself, and integers add up exactly, in any order and on any number of devices.

What remains is rounding of one record's own contribution and of the finished sum, each at a known
multiple of the unit roundoff; the norm to which signals are scaled is smaller than C by a margin
that covers both (:func:`clip_margin`), so the sensitivity of the result is C.

What is weighted and added up is the very gradient whose norm was taken (a barrier keeps the
compiler from computing it twice, in two ways). Where the estimator says that its signal is a linear
map of a scalar's gradient (:class:`~numpyro_dp.core.FactoredSignal`), coordinates of the same norm
are summed before the map; leaves of the point that meet the record in a single product
(:mod:`numpyro_dp.contraction`) need no array of (batch, latents) to find the norm.

Reference:
    S. Casacuberta, M. Shoemate, S. Vadhan, C. Wagaman, "Widespread underestimation of sensitivity
    in differentially private libraries and how to fix it", CCS 2022.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool

from numpyro_dp._tree import select, squared_norm, widen
from numpyro_dp.contraction import Contraction, Split, split_scalar
from numpyro_dp.core import Estimator, FactoredSignal, Mechanism, PyTree

__all__ = ["bounded_sum", "bounded_sum_by_definition", "clip_margin", "record_lengths"]


class _Grid(NamedTuple):
    """How numbers of one width become integers.

    Attributes:
        bits: The grid has ``2**bits`` steps in a clip norm.
        integer: Integers that hold the sum.
        magic: 1.5 times the power of two whose last place is 1: adding it rounds to an integer.
    """

    bits: int
    integer: Any
    magic: float


def bounded_sum(
    estimator: Estimator,
    mechanism: Mechanism,
    public: PyTree,
    examples: PyTree,
    mask: Bool[Array, " batch"],
    lengths: tuple[Array, ...] = (),
) -> dict[str, Any]:
    """Returns the sum of the bounded signals of a batch.

    Args:
        estimator: Whose signal.
        mechanism: Bounds it.
        public: What ``estimator.prepare`` returned.
        examples: Records, leading axis batch.
        mask: bool, shape (batch,): which entries count.
        lengths: What :func:`record_lengths` returned for the records; found anew if empty.

    Returns:
        A dict like the signal, in float32 or wider, with the entries of ``mechanism.extras``.

    Guarantee:
        An entry whose mask is false, or whose signal is not finite, contributes exactly 0. When
        the record of one entry is blanked (its signal made 0), the sum moves by at most
        ``mechanism.sensitivity`` in norm, rounding included.
    """
    if estimator.factored is None:
        return bounded_sum_by_definition(estimator, mechanism, public, examples, mask)
    return _factored_sum(estimator, mechanism, public, examples, mask, lengths)


def record_lengths(
    estimator: Estimator, public: PyTree, arrays: tuple[Array, ...]
) -> tuple[Array, ...]:
    """Returns numbers of each record that do not change from step to step, each of shape (N,).

    They are the lengths of the records' factors in the products with parameters
    (:mod:`numpyro_dp.contraction`): with them a gradient's norm is found without an array of
    (batch, latents).

    Args:
        estimator: Whose signal.
        public: What ``estimator.prepare`` returned; its values do not matter.
        arrays: All records.
    """
    if estimator.factored is None:
        return ()
    split, _, _ = _split(estimator.factored, public, arrays)
    wanted = [c for c in split.contractions if c.outer and not c.derived]
    return tuple(
        jax.vmap(lambda example, c=c: _length(c.record(jax.tree.leaves(example))))(arrays)
        for c in wanted
    )


def bounded_sum_by_definition(
    estimator: Estimator,
    mechanism: Mechanism,
    public: PyTree,
    examples: PyTree,
    mask: Bool[Array, " batch"],
) -> dict[str, Any]:
    """The same sum, signal by signal: needs memory for (batch, parameters)."""
    signals = jax.vmap(estimator.signal, in_axes=(None, 0))(public, examples)
    signals = widen(lax.optimization_barrier(signals))
    names = tuple(signals)
    blocks = mechanism.blocks(names)
    squares = [jax.vmap(squared_norm)(select(signals, members)) for members in blocks]
    margin = _margin(signals, mask.size)
    factors = mechanism.scales(names, tuple(squares), margin)
    total = _extras(mechanism, names, tuple(squares), margin, mask)
    for number, (members, factor) in enumerate(zip(blocks, factors, strict=True)):
        norm = _norm(mechanism, names, number)
        total |= _sum(select(signals, members), jnp.where(mask, factor, 0), norm)
    return total


def clip_margin(batch: int, size: int, dtype: Any) -> float:
    r"""Returns what part of the clip norm signals are scaled to, so that rounding fits in the rest.

    Args:
        batch: Rows of the batch, n.
        size: Numbers in a signal, d.
        dtype: float32 or float64, of unit roundoff u.

    Returns:
        ``1 / (1 + e)`` with ``e`` the sum of: :math:`\sqrt d\, 2^{-k-1}`, by which the grid may
        lengthen a contribution; :math:`d u`, by which a squared norm may be too small; and
        :math:`8 n u`, three roundings of each of two sums of norm n C, and one to spare.
    """
    unit = float(jnp.finfo(dtype).eps) / 2
    grid = math.sqrt(size) * 2.0 ** -(_grid(batch, dtype).bits + 1)
    return 1 / (1 + grid + min(size, 2048 + size // 1024) * unit + 8 * batch * unit)


def _grid(batch: int, dtype: Any) -> _Grid:
    room = math.ceil(math.log2(max(batch, 2)))
    if jnp.dtype(dtype) == jnp.float64:
        return _Grid(min(50, 61 - room), jnp.int64, 1.5 * 2.0**52)
    return _Grid(min(21, 29 - room), jnp.int32, 1.5 * 2.0**23)


def _margin(signals: PyTree, batch: int) -> float:
    """The margin of a tree of signals with a leading axis."""
    leaves = jax.tree.leaves(signals)
    size = sum(math.prod(leaf.shape[1:]) for leaf in leaves)
    return min(clip_margin(batch, size, leaf.dtype) for leaf in leaves)


def _norm(mechanism: Mechanism, names: tuple[str, ...], block: int) -> Any:
    norms = mechanism.norms(names)
    return None if norms is None else norms[block]


def _extras(
    mechanism: Mechanism,
    names: tuple[str, ...],
    squares: tuple[Array, ...],
    margin: float,
    mask: Bool[Array, " batch"],
) -> dict[str, Any]:
    """Sums of what the mechanism adds to the signals; each number is rounded to a grid too."""
    if mechanism.extras is None:
        return {}
    weights = mask.astype(squares[0].dtype)
    found = mechanism.extras(names, squares, margin)
    return {entry: _sum(numbers, weights, norm) for entry, (numbers, norm) in found.items()}


def _sum(tree: PyTree, weights: Array, norm: Any) -> PyTree:
    """Weighted sum over the leading axis: exact, of terms rounded to the grid of a clip norm."""
    counts = weights > 0

    def add_up(leaf: Array) -> Array:
        axes = (-1,) + (1,) * (leaf.ndim - 1)
        terms = jnp.where(counts.reshape(axes), leaf, 0)
        if norm is None:  # nothing is clipped: no grid, and nothing is private
            return jnp.sum(terms * weights.reshape(axes), axis=0)
        grid = _grid(leaf.shape[0], leaf.dtype)
        steps = 2.0**grid.bits / norm
        shifted = terms * (weights * steps).astype(leaf.dtype).reshape(axes) + grid.magic
        whole = lax.bitcast_convert_type(shifted.astype(leaf.dtype), grid.integer)
        start = lax.bitcast_convert_type(jnp.asarray(grid.magic, leaf.dtype), grid.integer)
        total = jnp.sum(whole - start, axis=0, dtype=grid.integer)
        return total.astype(leaf.dtype) * jnp.asarray(norm / 2.0**grid.bits, leaf.dtype)

    return jax.tree.map(add_up, widen(tree))


def _factored_sum(
    estimator: Estimator,
    mechanism: Mechanism,
    public: PyTree,
    examples: PyTree,
    mask: Bool[Array, " batch"],
    lengths: tuple[Array, ...],
) -> dict[str, Any]:
    factored: FactoredSignal = estimator.factored
    split, leaves, treedef = _split(factored, public, examples)
    parts = _gradient_parts(split, leaves, examples)
    struct = jax.eval_shape(estimator.signal, public, _first(examples))
    names = tuple(struct)
    blocks = mechanism.blocks(names)

    def core(members: tuple[str, ...], norms_only: bool) -> PyTree:
        def one(parts: Any, example: PyTree, lengths: tuple[Array, ...]) -> PyTree:
            arrays, known = jax.tree.leaves(example), lengths if norms_only else None
            gradient = treedef.unflatten(_assemble(split, leaves, parts, arrays, known))
            return widen(factored.core(public, gradient, members))

        return jax.vmap(one)(parts, examples, lengths)

    if factored.selects:  # leaves of the gradient itself, which the barrier has fixed
        terms = [core(members, False) for members in blocks]
        lengths = [core(members, True) for members in blocks]
    else:
        terms = lengths = lax.optimization_barrier([core(members, False) for members in blocks])
    squares = tuple(jax.vmap(squared_norm)(length) for length in lengths)
    margin = _margin(_batched(struct), mask.size)
    factors = mechanism.scales(names, squares, margin)
    total = _extras(mechanism, names, squares, margin, mask)
    for number, (members, factor) in enumerate(zip(blocks, factors, strict=True)):
        norm = _norm(mechanism, names, number)
        summed = _sum(terms[number], jnp.where(mask, factor, 0), norm)
        total |= widen(factored.expand(public, summed, members))
    return total


def _split(
    factored: FactoredSignal, public: PyTree, examples: PyTree
) -> tuple[Split, list[Array], Any]:
    """The scalar cut at its products, the leaves of the point, and their structure."""
    leaves, treedef = jax.tree.flatten(factored.point(public))
    point = treedef.unflatten(leaves)
    split = split_scalar(lambda p, x: factored.scalar(public, p, x), point, _first(examples))
    return split, leaves, treedef


def _gradient_parts(split: Split, leaves: list[Array], examples: PyTree) -> Any:
    """Gradients of one record each, at the products and of other leaves; derived factors."""
    rest = [leaves[leaf] for leaf in split.rest]
    zeros = [jnp.zeros(c.struct.shape, c.struct.dtype) for c in split.contractions]

    def parts(example: PyTree) -> Any:
        arrays = jax.tree.leaves(example)
        gradient = jax.grad(split.scalar, (0, 1))(zeros, rest, leaves, arrays)
        factors = [c.record(arrays) if c.derived else None for c in split.contractions]
        return *gradient, factors

    return lax.optimization_barrier(jax.vmap(parts)(examples))


def _assemble(
    split: Split,
    leaves: list[Array],
    parts: Any,
    example: list[Array],
    lengths: tuple[Array, ...] | None,
) -> list[Array]:
    """Returns the gradient of one record from its parts; with lengths, leaves of the same norms."""
    gradient: list[Any] = [None] * len(leaves)
    at_products, at_rest, factors = parts
    known = iter(lengths or ())
    for contraction, part, factor in zip(split.contractions, at_products, factors, strict=True):
        record = contraction.record(example) if factor is None else factor
        if lengths is None or not contraction.outer:
            gradient[contraction.leaf] = _transposed(contraction, leaves, record)(part)
        else:
            length = None if contraction.derived else next(known, None)
            length = _length(record) if length is None else length
            gradient[contraction.leaf] = widen(part) * length
    for leaf, part in zip(split.rest, at_rest, strict=True):
        gradient[leaf] = part
    return gradient


def _length(record: Array) -> Array:
    """Euclidean norm of a record's factor, at least its exact one but for rounding."""
    flat = widen(record).reshape(-1)
    square = jnp.dot(flat, flat, precision=lax.Precision.HIGHEST)
    # Squares below the smallest number are lost: they count as that number.
    return jnp.sqrt(square + flat.size * jnp.finfo(flat.dtype).tiny)


def _transposed(contraction: Contraction, leaves: list[Array], record: Array) -> Any:
    value = leaves[contraction.leaf]
    _, vjp = jax.vjp(lambda leaf: contraction.product(leaf, record), value)
    return lambda part: vjp(part)[0]


def _first(examples: PyTree) -> PyTree:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), examples)


def _batched(struct: PyTree) -> PyTree:
    wide = jax.eval_shape(widen, struct)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((1, *x.shape), x.dtype), wide)
