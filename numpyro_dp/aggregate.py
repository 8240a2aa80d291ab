r"""The clipped sum over a batch, :math:`\sum_i w_i s_i`, exact (:mod:`numpyro_dp.exact_sum`).

What is weighted and added up is the very gradient whose norm was taken, found once
(:func:`numpyro_dp._tree.pinned`). Where the estimator says that its signal is a linear
map of a scalar's gradient (:class:`~numpyro_dp.core.FactoredSignal`), coordinates of the same norm
are summed before the map; leaves of the point that meet the record in a single product
(:mod:`numpyro_dp.contraction`) need no array of (batch, latents) to find the norm. Where such a
leaf is much larger than the factors of its gradient, as the weights of a dense layer are, it needs
none for the sum either, which then is not exact but as near as its margin allows
(:mod:`numpyro_dp.product_sum`). Kernels of convolutions have a gradient for each record.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool

from numpyro_dp._tree import pinned, select, squared_norm, widen
from numpyro_dp.contraction import Contraction, Split, split_scalar
from numpyro_dp.core import Estimator, FactoredSignal, Mechanism, PyTree
from numpyro_dp.exact_sum import clip_margin, exact_sum, finished, partial_sum
from numpyro_dp.product_sum import is_worthwhile, product_error, product_sum

__all__ = ["bounded_sum", "bounded_sum_by_definition", "record_lengths"]

_NUMBERS = 2**20  # in the signals of a stretch of rows: memory is used again while it is near
_LEAST = 16  # rows of a stretch


def bounded_sum(
    estimator: Estimator,
    mechanism: Mechanism,
    public: PyTree,
    examples: PyTree,
    mask: Bool[Array, " batch"],
    lengths: tuple[Array, ...] = (),
    live: Array | None = None,
) -> dict[str, Any]:
    """Returns the sum of the bounded signals of a batch.

    Args:
        estimator: Whose signal.
        mechanism: Bounds it.
        public: What ``estimator.prepare`` returned.
        examples: Records, leading axis batch.
        mask: bool, shape (batch,): which entries count.
        lengths: What :func:`record_lengths` returned for the records; found anew if empty.
        live: True, where the compiler cannot know it (:func:`numpyro_dp._tree.pinned`);
            whether any entry counts, if ``None``.

    Returns:
        A dict like the signal, in float32 or wider, with the entries of ``mechanism.extras``.

    Guarantee:
        An entry whose mask is false, or whose signal is not finite, contributes exactly 0. When
        the record of one entry is blanked (its signal made 0), the sum moves by at most
        ``mechanism.sensitivity`` in norm, rounding included.
    """
    live = jnp.any(mask) if live is None else live
    if estimator.factored is None:
        return bounded_sum_by_definition(estimator, mechanism, public, examples, mask, live)
    return _factored_sum(estimator, mechanism, public, examples, mask, lengths, live)


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
    live: Array | None = None,
) -> dict[str, Any]:
    """The same sum, signal by signal, by stretches of rows: the whole batch is never in memory."""
    live = jnp.any(mask) if live is None else live
    batch = mask.size
    struct = jax.eval_shape(estimator.signal, public, _first(examples))
    like, names = jax.eval_shape(widen, struct), tuple(struct)
    margin = _margin(_batched(struct), batch)
    blocks = mechanism.blocks(names)
    norms = {members: _norm(mechanism, names, at) for at, members in enumerate(blocks)}

    def of_rows(examples: PyTree, mask: Array) -> tuple[list[PyTree], tuple[Array, ...]]:
        each = jax.vmap(lambda example: estimator.signal(public, example))
        signals = widen(pinned(live, each, examples))
        squares = tuple(jax.vmap(squared_norm)(select(signals, members)) for members in blocks)
        factors = mechanism.scales(names, squares, margin)
        sums = [
            partial_sum(_rows_of(select(signals, b)), jnp.where(mask, factor, 0), norms[b], batch)
            for b, factor in zip(blocks, factors, strict=True)
        ]
        return sums, squares

    size = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(struct))
    rows = max(_LEAST, _NUMBERS // max(size, 1) // _LEAST * _LEAST)
    sums, squares = _over_stretches(of_rows, examples, mask, rows)
    total = _extras(mechanism, names, squares, margin, mask)
    for members, found in zip(blocks, sums, strict=True):
        total |= finished(found, select(like, members), norms[members], batch)
    return total


def _over_stretches(
    of_rows: Callable[[PyTree, Array], tuple[PyTree, PyTree]],
    examples: PyTree,
    mask: Array,
    rows: int,
) -> tuple[PyTree, PyTree]:
    """Adds up the sums that a function finds for stretches of rows; keeps what it has of each row.

    The last stretch is filled with the last row, which does not count there.
    """
    if mask.size <= rows:
        return of_rows(examples, mask)
    number = -(-mask.size // rows)
    at = jnp.arange(number * rows)

    def in_stretches(leaf: Array) -> Array:
        whole = leaf if leaf.shape[0] == at.size else leaf[jnp.minimum(at, mask.size - 1)]
        return whole.reshape(number, rows, *leaf.shape[1:])

    def step(total: PyTree, stretch: PyTree) -> tuple[PyTree, PyTree]:
        found, of_each = of_rows(*stretch)
        return jax.tree.map(jnp.add, total, found), of_each

    counts = (at < mask.size) & mask[jnp.minimum(at, mask.size - 1)]
    each = jax.tree.map(in_stretches, (examples, counts))
    like, _ = jax.eval_shape(of_rows, *jax.tree.map(lambda leaf: leaf[0], each))
    zero = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), like)
    total, of_each = lax.scan(step, zero, each)
    return total, jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[: mask.size], of_each)


def _margin(signals: PyTree, batch: int, coarsest: Any = None) -> float:
    """The margin of a tree of signals with a leading axis; norms may be of a coarser type."""
    leaves = jax.tree.leaves(signals)
    size = sum(math.prod(leaf.shape[1:]) for leaf in leaves)
    dtypes = [leaf.dtype for leaf in leaves] + ([] if coarsest is None else [coarsest])
    return min(clip_margin(batch, size, dtype) for dtype in dtypes)


def _coarsest(arrays: list[Any]) -> Any:
    """The widened type of least precision: norms and products are found in each of them."""
    types = {jnp.promote_types(x.dtype, jnp.float32) for x in arrays}
    return max(types, key=lambda dtype: jnp.finfo(dtype).eps)


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
    return {
        entry: exact_sum(_rows_of(numbers), weights, norm)
        for entry, (numbers, norm) in found.items()
    }


def _rows_of(tree: PyTree) -> Callable[[slice], PyTree]:
    return lambda rows: jax.tree.map(lambda leaf: leaf[rows], tree)


def _factored_sum(
    estimator: Estimator,
    mechanism: Mechanism,
    public: PyTree,
    examples: PyTree,
    mask: Bool[Array, " batch"],
    lengths: tuple[Array, ...],
    live: Array,
) -> dict[str, Any]:
    factored: FactoredSignal = estimator.factored
    split, leaves, treedef = _split(factored, public, examples)
    parts = pinned(live, lambda rows: _gradient_parts(split, leaves, rows), examples)
    struct = jax.eval_shape(estimator.signal, public, _first(examples))
    names = tuple(struct)
    blocks = mechanism.blocks(names)

    @functools.partial(jax.jit, static_argnums=(0, 1))  # traced once for all stretches of rows
    def core(members: tuple[str, ...], norms_only: bool, rows: PyTree) -> PyTree:
        def one(parts: Any, example: PyTree, lengths: tuple[Array, ...]) -> PyTree:
            arrays, known = jax.tree.leaves(example), lengths if norms_only else None
            gradient = treedef.unflatten(_assemble(split, leaves, parts, arrays, known))
            return widen(factored.core(public, gradient, members))

        return jax.vmap(one)(*rows)

    batch = parts, examples, lengths
    products: dict[int, Callable[[Array], Array]] = {}
    if factored.selects:  # leaves of the gradient itself, which is pinned
        products = _products(split, leaves, parts, examples)
        terms = [
            lambda rows, b=members: core(b, False, _rows_of(batch)(rows)) for members in blocks
        ]
        sizes = [core(members, True, batch) for members in blocks]
    else:
        sizes = pinned(live, lambda rows: [core(b, False, rows) for b in blocks], batch)
        terms = [_rows_of(size) for size in sizes]
    squares = tuple(jax.vmap(squared_norm)(size) for size in sizes)
    coarse = _coarsest(jax.tree.leaves((parts, struct, _record_factors(split, examples))))
    error = product_error(mask.size, coarse) if products else 0.0
    margin = 1 / (1 / _margin(_batched(struct), mask.size, coarse) + error)
    factors = mechanism.scales(names, squares, margin)
    total = _extras(mechanism, names, squares, margin, mask)
    for number, (members, factor) in enumerate(zip(blocks, factors, strict=True)):
        norm = _norm(mechanism, names, number)
        weights = jnp.where(mask, factor, 0)
        if products:
            places = factored.core(public, treedef.unflatten(range(len(leaves))), members)
            summed = _sum_with_products(products, places, terms[number], weights, norm)
        else:
            summed = exact_sum(terms[number], weights, norm)
        total |= widen(factored.expand(public, summed, members))
    return total


def _record_factors(split: Split, examples: PyTree) -> list[Any]:
    """Shapes and types of the records' own factors."""
    first = jax.tree.leaves(_first(examples))
    own = [c.record for c in split.contractions if not c.derived]
    return [jax.eval_shape(lambda *leaves, r=record: r(leaves), *first) for record in own]


def _products(
    split: Split, leaves: list[Array], parts: Any, examples: PyTree
) -> dict[int, Callable[[Array], Array]]:
    """For each leaf that is summed as a product of matrices: weights of the rows -> sum."""
    at_products, _, factors = parts
    found = {}
    for c, slopes, factor in zip(split.contractions, at_products, factors, strict=True):
        if not c.outer or slopes.ndim < 2:
            continue
        if factor is None:
            factor = jax.vmap(lambda example, c=c: c.record(jax.tree.leaves(example)))(examples)
        coarse = _coarsest([slopes, factor])
        shapes = leaves[c.leaf].shape, slopes.shape[1:], factor.shape[1:]
        if is_worthwhile(len(slopes), coarse, *shapes):
            multiply = _multiplication(c, leaves[c.leaf])
            found[c.leaf] = functools.partial(product_sum, multiply, widen(slopes), widen(factor))
    return found


def _multiplication(contraction: Contraction, value: Array) -> Callable[[Array, Array], Array]:
    """Slopes and factors of rows -> the sum of their outer products, in the shape of a leaf."""

    def multiply(slopes: Array, factors: Array) -> Array:
        over_rows = jax.vmap(contraction.product, (None, 0))
        _, vjp = jax.vjp(lambda leaf: over_rows(leaf, factors), widen(value))
        return vjp(slopes)[0]

    return multiply


def _sum_with_products(
    products: dict[int, Callable[[Array], Array]],
    places: PyTree,
    terms: Callable[[slice], PyTree],
    weights: Array,
    norm: Any,
) -> PyTree:
    """Sums a block leaf by leaf; ``places`` has the number of each in the gradient."""
    numbers, structure = jax.tree.flatten(places)
    others = [at for at, leaf in enumerate(numbers) if leaf not in products]

    def rest(rows: slice) -> list[Array]:
        found = jax.tree.leaves(terms(rows))
        return [found[at] for at in others]

    sums = dict(zip(others, exact_sum(rest, weights, norm), strict=True)) if others else {}
    sums |= {at: products[leaf](weights) for at, leaf in enumerate(numbers) if leaf in products}
    return structure.unflatten([sums[at] for at in range(len(numbers))])


def _split(
    factored: FactoredSignal, public: PyTree, examples: PyTree
) -> tuple[Split, list[Array], Any]:
    """The scalar cut at its products, the leaves of the point, and their structure."""
    leaves, treedef = jax.tree.flatten(factored.point(public))
    point = treedef.unflatten(leaves)
    split = split_scalar(
        lambda p, x: factored.scalar(public, p, x), point, _first(examples), layers=True
    )
    return split, leaves, treedef


def _gradient_parts(split: Split, leaves: list[Array], examples: PyTree) -> Any:
    """Gradients of one record each, at the products and of other leaves; derived factors.

    In the place of the gradient at a convolution is that of its kernel.
    """
    rest = [leaves[leaf] for leaf in split.rest]
    zeros = [jnp.zeros(c.struct.shape, c.struct.dtype) for c in split.contractions]

    def parts(example: PyTree) -> Any:
        arrays = jax.tree.leaves(example)
        differentiated = jax.grad(split.with_factors, (0, 1), has_aux=True)
        (at_products, at_rest), factors = differentiated(zeros, rest, leaves, arrays)
        for number, (c, factor) in enumerate(zip(split.contractions, factors, strict=True)):
            if c.gradient is not None:
                at_products[number] = c.gradient(leaves[c.leaf], factor, at_products[number])
                factors[number] = None
        return at_products, at_rest, factors

    return jax.vmap(parts)(examples)


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
        if contraction.gradient is not None:
            gradient[contraction.leaf] = part
            continue
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
    square = squared_norm(record)
    # Squares below the smallest number are lost: they count as that number.
    return jnp.sqrt(square + record.size * jnp.finfo(square.dtype).tiny)


def _transposed(contraction: Contraction, leaves: list[Array], record: Array) -> Any:
    value = leaves[contraction.leaf]
    _, vjp = jax.vjp(lambda leaf: contraction.product(leaf, record), value)
    return lambda part: vjp(part)[0]


def _first(examples: PyTree) -> PyTree:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), examples)


def _batched(struct: PyTree) -> PyTree:
    wide = jax.eval_shape(widen, struct)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((1, *x.shape), x.dtype), wide)
