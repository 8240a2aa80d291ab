r"""Clipped sums of gradients, computed from the factors of each record's gradient.

An estimator may declare that its signal is a linear map of a scalar's gradient
(:class:`~numpyro_dp.core.FactoredSignal`). Then coordinates of the same norm are summed before the
map. A leaf of the point that meets the record in a single product
(:mod:`numpyro_dp.sums.contraction`) needs no array of (batch, latents) for its norm. A leaf that is
much larger than the factors of its gradient, like the weights of a dense layer, needs no such array
for its sum either. That sum is not exact, but the margin covers its error
(:mod:`numpyro_dp.sums.products`). Kernels of convolutions have a gradient for each record.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Bool

from numpyro_dp._tree import filled, squared_norm, widen
from numpyro_dp.core import Centring, Estimator, FactoredSignal, Mechanism, Number, PyTree, Values
from numpyro_dp.sums.centred_sums import (
    counted_records,
    row_norms,
    row_of,
    sum_of_rows,
    with_rows,
)
from numpyro_dp.sums.contraction import Contraction, Split, split_scalar
from numpyro_dp.sums.exact import finished, partial_sum
from numpyro_dp.sums.microbatches import (
    WHOLE,
    Compensated,
    Shards,
    coarsest,
    extra_sums,
    first_of,
    margin_of,
    norms_of,
    over_microbatches,
    pinned,
    rows_of,
    suitable_rows,
)
from numpyro_dp.sums.products import is_worthwhile, longest_product, product_error, product_sum

_PARTS = (0, 0, None)  # rows of a record have their own slopes and share its factors


def record_lengths(estimator: Estimator, public: PyTree, arrays: PyTree) -> tuple[Array, ...]:
    """Returns lengths of the records' factors that are the same in each step, each of shape (N,).

    They are the factors in the products with parameters (:mod:`numpyro_dp.sums.contraction`). With
    their lengths, the norm of a gradient needs no array of (batch, latents).

    The values of ``public`` do not matter.
    """
    if (centring := estimator.centring) is not None:
        estimator = centring.estimator
    if estimator.factored is None:
        return ()
    row = row_of(centring, public, first_of(arrays))
    cut = _cut(estimator.factored, public, row, centring is not None)
    # A derived factor is computed in each step anyway, and must not be rounded in two ways.
    wanted = [c for c in cut.contractions if c.outer and not c.derived]
    return tuple(
        jax.vmap(lambda example, c=c: _length(c.record(cut.arrays(example))))(arrays)
        for c in wanted
    )


def factored_sum(
    estimator: Estimator,
    factored: FactoredSignal,
    mechanism: Mechanism,
    public: PyTree,
    examples: PyTree,
    mask: Bool[Array, " batch"],
    lengths: tuple[Array, ...],
    live: Array,
    rows: int | None = None,
    shards: Shards = WHOLE,
    centring: Centring | None = None,
    seeds: Array | None = None,
) -> Values:
    """The sum of :func:`numpyro_dp.sums.bounded.bounded_sum`, in microbatches of ``rows``.

    With ``centring``, a record has several rows, which together are within the clip norm. They
    share the factors of the record, and their slopes are added up before they meet these. So this
    sum is one pass over the records too.
    """
    centred = centring is not None
    row = row_of(centring, public, first_of(examples))
    cut = _cut(factored, public, row, centred)
    struct = jax.eval_shape(estimator.signal, public, row)
    # All devices use one grid, so it is chosen for the records of all of them.
    names, count = filled(struct), mask.size * shards.number
    blocks = mechanism.blocks(names)
    norms = norms_of(mechanism, names)
    # Shapes for a batch of one record.
    one = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((1, *x.shape), x.dtype), first_of((examples, seeds))
    )
    shapes = jax.eval_shape(lambda *x: cut.gradient_parts(with_rows(centring, public, *x)), *one)
    # The least precise dtype of any value decides how much rounding the margin has to cover.
    coarse = coarsest(jax.tree.leaves((shapes, struct, cut.leaves, cut.record_factors(examples))))
    chosen: dict[int, int] = {}
    # Products of matrices sum leaves of the gradient, so coordinates have to be such leaves.
    if factored.selects:
        chosen = _as_products(cut, shapes, examples, coarse, count, centred)
    error = product_error(count, coarse) if chosen else 0.0
    longest = longest_product(count, coarse)
    # One margin for both roundings: of the exact sums to a grid, and of the products of matrices.
    rows_each = centring.number + 1 if centring else 1
    margin = 1 / (1 / margin_of(struct, count, coarse, rows_each) + error)
    plans = [_plan(cut, chosen, members) for members in blocks]
    core = _core(cut)

    def of_rows(inputs: PyTree, mask: Array) -> tuple[list[PyTree], tuple[Array, ...]]:
        records, lengths, seeds = inputs

        def with_parts(records: PyTree, seeds: Array | None) -> tuple[PyTree, Array | None]:
            rows = with_rows(centring, public, records, seeds)
            return cut.gradient_parts(rows), rows[-1] if centred else None

        # The last array of a centred row is the probability of its outcome.
        parts, probs = pinned(live, with_parts, records, seeds)
        batch = parts, records, lengths
        # The norm and the sum must read the same rounded values. If the coordinates are leaves of
        # the gradient, it is enough that its parts are pinned. Else the coordinates are pinned.
        if factored.selects:
            sizes = [core(members, True, centred, batch) for members in blocks]
        else:
            sizes = pinned(live, lambda *b: [core(m, False, centred, b) for m in blocks], *batch)
        # Squares, because a mechanism may join blocks, and the root would round once more.
        squares = tuple(row_norms(size, centred) for size in sizes)
        sums = []
        probs = (probs,) if centred else ()
        for at, factor in enumerate(mechanism.scales(names, squares, margin, *probs)):
            held = parts if factored.selects else sizes[at]
            if centred:
                held = _of_records(parts, factor) if factored.selects else sum_of_rows(held, factor)
                factor = counted_records(factor)
            # Padding of a batch is some record too. Its weight is 0, so it adds exactly 0.
            weights = jnp.where(mask, factor, 0)

            def rest(rows: slice, at: int = at, held: PyTree = held) -> list[Array]:
                found = rows_of(held)(rows)
                if factored.selects:
                    found = core(blocks[at], False, False, (found, *rows_of(batch[1:])(rows)))
                return [jax.tree.leaves(found)[place] for place in plans[at].rest]

            exact = partial_sum(rest, weights, norms[at], count) if plans[at].rest else []
            each = {
                place: _product(cut, held, records, chosen[leaf], weights, longest)
                for place, leaf in plans[at].products.items()
            }
            sums.append((exact, each))
        return sums, tuple(square[0] for square in squares) if centred else squares

    # Rows are chosen by what a record keeps in memory: parts of its gradient, and coordinates that
    # are not such parts.
    kept = shapes, [] if factored.selects else [plan.like for plan in plans] * rows_each
    few = suitable_rows(kept) if rows is None else rows
    sums, squares = over_microbatches(of_rows, (examples, lengths, seeds), mask, few, shards)
    # Shapes of the signal, until the blocks below replace them by sums. Empty entries stay.
    total = struct | extra_sums(mechanism, names, squares, margin, mask, shards)
    for plan, members, norm, found in zip(plans, blocks, norms, sums, strict=True):
        summed = _placed(plan, found, norm, count)
        total |= widen(factored.expand(public, summed, members))
    return total


def _core(cut: _Cut) -> Callable[[tuple[str, ...], bool, bool, PyTree], PyTree]:
    """Returns a function from rows of (parts, records, lengths) to the coordinates of a block.

    With ``norms_only`` it may return smaller arrays of the same norm. If ``centred``, parts have an
    axis for the rows of a record.
    """

    @functools.partial(jax.jit, static_argnums=(0, 1, 2))  # traced once for all microbatches
    def core(members: tuple[str, ...], norms_only: bool, centred: bool, rows: PyTree) -> PyTree:
        def one(parts: PyTree, record: PyTree, lengths: tuple[Array, ...]) -> PyTree:
            known = lengths if norms_only else None
            return widen(cut.core(_assemble(cut, parts, cut.arrays(record), known), members))

        each = jax.vmap(one)
        return (jax.vmap(each, (_PARTS, None, None)) if centred else each)(*rows)

    return core


def _of_records(parts: PyTree, weights: Array) -> PyTree:
    """The weighted sums of the parts of the rows of each record, which share its factors."""
    *slopes, factors = parts
    return (*sum_of_rows(slopes, weights), factors)


def _placed(plan: _Plan, sums: PyTree, norm: Number | None, count: int) -> PyTree:
    """Joins the exact sums of a block and its sums by products."""
    exact, products = sums
    found = finished(exact, [plan.like[at] for at in plan.rest], norm, count)
    placed = dict(zip(plan.rest, found, strict=True))
    # Compensated sums keep the low bits that the total lost. They are added back once, at the end.
    placed |= {at: product.total + product.lost for at, product in products.items()}
    return plan.structure.unflatten([placed[at] for at in range(len(plan.like))])


class _Plan(NamedTuple):
    """How a block of entries is summed.

    Attributes:
        structure: Of its coordinates.
        like: Shape and type of each leaf of them.
        rest: Places of the leaves that are summed exactly.
        products: Place -> leaf of the point, for the leaves that are summed as products of
            matrices.
    """

    structure: Any
    like: list[jax.ShapeDtypeStruct]
    rest: list[int]
    products: dict[int, int]


def _plan(cut: _Cut, chosen: dict[int, int], members: tuple[str, ...]) -> _Plan:
    struct = jax.eval_shape(lambda leaves: widen(cut.core(leaves, members)), cut.leaves)
    like, structure = jax.tree.flatten(struct)
    products: dict[int, int] = {}
    if chosen:  # Coordinates are leaves of the gradient. Numbers in their place show which.
        numbers = jax.tree.leaves(cut.core(range(len(cut.leaves)), members))
        products = {at: leaf for at, leaf in enumerate(numbers) if leaf in chosen}
    rest = [at for at in range(len(like)) if at not in products]
    return _Plan(structure, like, rest, products)


def _as_products(
    cut: _Cut, shapes: PyTree, records: PyTree, coarse: DTypeLike, batch: int, centred: bool
) -> dict[int, int]:
    """Leaves that are summed as products of matrices -> numbers of their contractions."""
    at_products, _, factors = shapes
    found = {}
    for number, c in enumerate(cut.contractions):
        slopes = at_products[number]
        # With one slope for each record the gradient is as small as the factor: nothing is saved.
        slope = slopes.shape[1 + centred :]
        if not c.outer or not slope:
            continue
        factor = factors[number]
        if factor is None:
            factor = jax.eval_shape(lambda rows, c=c: _own_factors(cut, c, rows), records)
        sizes = cut.leaves[c.leaf].shape, slope, factor.shape[1:]
        if is_worthwhile(batch, coarse, *sizes):
            found[c.leaf] = number
    return found


def _own_factors(cut: _Cut, contraction: Contraction, records: PyTree) -> Array:
    # Computed again instead of kept: it only moves entries of the record.
    return jax.vmap(lambda record: contraction.record(cut.arrays(record)))(records)


def _product(
    cut: _Cut, parts: PyTree, records: PyTree, number: int, weights: Array, longest: int
) -> Compensated:
    """The weighted sum of one leaf's gradients, by products of matrices of ``longest`` rows."""
    at_products, _, factors = parts
    contraction = cut.contractions[number]
    slopes, factor = at_products[number], factors[number]
    factor = _own_factors(cut, contraction, records) if factor is None else factor

    # The transpose of all rows' products is one product of matrices, moved into the leaf's shape.
    def multiply(slopes: Array, factors: Array) -> Array:
        over_rows = jax.vmap(contraction.product, (None, 0))
        leaf = widen(cut.leaves[contraction.leaf])
        _, vjp = jax.vjp(lambda leaf: over_rows(leaf, factors), leaf)
        return vjp(slopes)[0]

    return product_sum(multiply, widen(slopes), widen(factor), weights, longest)


class _Cut(NamedTuple):
    """A scalar cut at its products, the leaves of its point, and coordinates of its gradient.

    Attributes:
        split: The scalar.
        leaves: Leaves of its point.
        others: Number of leaves of an example that differ between the rows of a record.
        core: ``(leaves of a gradient, entries) -> coordinates`` of these entries of the signal.
    """

    split: Split
    leaves: list[Array]
    others: int
    core: Callable[[Iterable[PyTree], tuple[str, ...]], PyTree]

    @property
    def contractions(self) -> tuple[Contraction, ...]:
        return self.split.contractions

    def arrays(self, record: PyTree) -> list[Any]:
        """The leaves of an example. Nothing stands for what differs between its rows."""
        return [*jax.tree.leaves(record), *[None] * self.others]

    def record_factors(self, records: PyTree) -> list[jax.ShapeDtypeStruct]:
        """Shapes and types of the records' own factors."""
        first, own = first_of(records), [c.record for c in self.contractions if not c.derived]
        return [jax.eval_shape(lambda x, r=factor: r(self.arrays(x)), first) for factor in own]

    def gradient_parts(self, examples: PyTree) -> PyTree:
        """Each record's gradients at the products and of other leaves, and derived factors.

        For a convolution, the gradient of the kernel replaces the gradient at the product.
        """
        rest = [self.leaves[leaf] for leaf in self.split.rest]
        # Shifts of the products: the gradients with respect to them are the slopes.
        # A product itself is not an argument, so JAX cannot differentiate with respect to it.
        zeros = [jnp.zeros(c.struct.shape, c.struct.dtype) for c in self.contractions]

        def parts(example: PyTree) -> PyTree:
            arrays = jax.tree.leaves(example)
            differentiated = jax.grad(self.split.with_factors, (0, 1), has_aux=True)
            (at_products, at_rest), factors = differentiated(zeros, rest, self.leaves, arrays)
            for number, (c, factor) in enumerate(zip(self.contractions, factors, strict=True)):
                if c.gradient is not None:
                    slope = at_products[number]
                    # The gradient replaces slope and input, so the input is not kept for each
                    # record.
                    at_products[number] = c.gradient(self.leaves[c.leaf], factor, slope)
                    factors[number] = None
            return at_products, at_rest, factors

        if not self.others:
            return jax.vmap(parts)(examples)
        each = jax.vmap(lambda record, *row: parts((record, *row)))
        axes = None, *[0] * (len(examples) - 1)
        return jax.vmap(each, axes, _PARTS)(*examples)


def _cut(factored: FactoredSignal, public: PyTree, row: PyTree, centred: bool) -> _Cut:
    leaves, treedef = jax.tree.flatten(factored.point(public))
    point, scalar = treedef.unflatten(leaves), functools.partial(factored.scalar, public)
    own = len(jax.tree.leaves(row[0] if centred else row))
    # All rows of a record share its factors, and not the inputs of a layer.
    split = split_scalar(scalar, point, row, layers=not centred, own=own)
    others = len(jax.tree.leaves(row)) - own
    return _Cut(split, leaves, others, lambda gradient, members: factored.core(
        public, treedef.unflatten(gradient), members
    ))  # fmt: skip


def _assemble(
    cut: _Cut, parts: PyTree, example: list[Array], lengths: tuple[Array, ...] | None
) -> list[Array]:
    """Returns the gradient of one record from its parts.

    With ``lengths``, a leaf may be replaced by a smaller array of the same norm.
    """
    gradient: list[Any] = [None] * len(cut.leaves)
    at_products, at_rest, factors = parts
    # Lengths come in the order of `record_lengths`: outer contractions with a factor of the record.
    known = iter(lengths or ())
    for contraction, part, factor in zip(cut.contractions, at_products, factors, strict=True):
        if contraction.gradient is not None:
            gradient[contraction.leaf] = part
            continue
        record = contraction.record(example) if factor is None else factor
        if lengths is None or not contraction.outer:
            value = cut.leaves[contraction.leaf]
            _, vjp = jax.vjp(lambda leaf, c=contraction, r=record: c.product(leaf, r), value)
            gradient[contraction.leaf] = vjp(part)[0]
        else:
            # An outer product has the norm |slope| |record|, which slope times |record| has too.
            length = None if contraction.derived else next(known, None)
            length = _length(record) if length is None else length
            gradient[contraction.leaf] = widen(part) * length
    for leaf, part in zip(cut.split.rest, at_rest, strict=True):
        gradient[leaf] = part
    return gradient


def _length(record: Array) -> Array:
    """Euclidean norm of a record's factor, not below the exact norm except for rounding."""
    square = squared_norm(record)
    # Squares below the smallest normal number are lost. Each counts as that number, so that the
    # norm is not too small.
    return jnp.sqrt(square + record.size * jnp.finfo(square.dtype).tiny)
