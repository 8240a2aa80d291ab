r"""The clipped sum over a batch, :math:`\sum_i w_i s_i`, by the definition or faster.

The definition takes the signal of each example, bounds it and adds up. Where the estimator says
that its signal is a linear map of a scalar's gradient (:class:`~numpyro_dp.core.FactoredSignal`),
the weighted sum is taken before the map, without an array of (batch, parameters); and leaves of the
point that meet the record in a single product (:mod:`numpyro_dp.contraction`) are summed by one
weighted matrix product, without an array of (batch, latents) either. The definition stays the
reference: tests hold one against the other.

Rounding is part of the proof. What is weighted and added up is the very gradient whose norm was
taken (a barrier keeps the compiler from computing it twice, in two ways), so no record can
contribute more than its clip norm, up to the rounding of that contribution itself.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool

from numpyro_dp._tree import select, widen
from numpyro_dp.contraction import Split, split_scalar
from numpyro_dp.core import Estimator, FactoredSignal, Mechanism, PyTree

__all__ = ["bounded_sum", "bounded_sum_by_definition"]


def bounded_sum(
    estimator: Estimator,
    mechanism: Mechanism,
    public: PyTree,
    examples: PyTree,
    mask: Bool[Array, " batch"],
) -> dict[str, Any]:
    """Returns the sum of the bounded signals of a batch.

    Args:
        estimator: Whose signal.
        mechanism: Bounds it.
        public: What ``estimator.prepare`` returned.
        examples: Records, leading axis batch.
        mask: bool, shape (batch,): which entries count.

    Returns:
        A dict like the signal, in float32 or wider.

    Guarantee:
        An entry whose mask is false, or whose signal is not finite, contributes exactly 0; every
        other one contributes at most ``mechanism.sensitivity`` in norm.
    """
    if estimator.factored is None:
        return bounded_sum_by_definition(estimator, mechanism, public, examples, mask)
    return _factored_sum(estimator, mechanism, public, examples, mask)


def bounded_sum_by_definition(
    estimator: Estimator,
    mechanism: Mechanism,
    public: PyTree,
    examples: PyTree,
    mask: Bool[Array, " batch"],
) -> dict[str, Any]:
    """The same sum, signal by signal: needs memory for (batch, parameters)."""
    signals = jax.vmap(estimator.signal, in_axes=(None, 0))(public, examples)
    bounded, _ = jax.vmap(mechanism.bound)(lax.optimization_barrier(signals))

    def add_up(leaf: Array) -> Array:
        counts = mask.reshape(mask.shape + (1,) * (leaf.ndim - 1))
        return jnp.sum(jnp.where(counts, leaf, 0), axis=0)

    return jax.tree.map(add_up, bounded)


def _factored_sum(
    estimator: Estimator,
    mechanism: Mechanism,
    public: PyTree,
    examples: PyTree,
    mask: Bool[Array, " batch"],
) -> dict[str, Any]:
    factored: FactoredSignal = estimator.factored
    leaves, treedef = jax.tree.flatten(factored.point(public))
    point = treedef.unflatten(leaves)
    split = split_scalar(lambda p, x: factored.scalar(public, p, x), point, _first(examples))
    parts = _gradient_parts(split, leaves, examples)
    names = tuple(jax.eval_shape(estimator.signal, public, _first(examples)))
    blocks = mechanism.blocks(names)

    def squared_norms(parts: Any, example: PyTree) -> tuple[Array, ...]:
        arrays = jax.tree.leaves(example)
        gradient = treedef.unflatten(_assemble(split, leaves, parts, arrays, factored.isometric))
        return factored.squared_norms(public, gradient, blocks)

    factors = mechanism.scales(names, jax.vmap(squared_norms)(parts, examples))
    total: dict[str, Any] = {}
    for members, factor in zip(blocks, factors, strict=True):
        summed = _weighted_sum(split, leaves, parts, examples, jnp.where(mask, factor, 0))
        total |= widen(select(factored.expand(public, treedef.unflatten(summed)), members))
    return total


def _gradient_parts(split: Split, leaves: list[Array], examples: PyTree) -> Any:
    """Gradients of one record each: at the products, and of the leaves without one."""
    rest = [leaves[leaf] for leaf in split.rest]
    zeros = [jnp.zeros(c.struct.shape, c.struct.dtype) for c in split.contractions]

    def parts(example: PyTree) -> Any:
        gradient = jax.grad(split.scalar, (0, 1))
        return gradient(zeros, rest, leaves, jax.tree.leaves(example))

    return lax.optimization_barrier(jax.vmap(parts)(examples))


def _assemble(
    split: Split, leaves: list[Array], parts: Any, example: list[Array], norms_only: bool
) -> list[Array]:
    """Returns the gradient of one record from its parts, or leaves of the same norms."""
    gradient: list[Any] = [None] * len(leaves)
    for contraction, part in zip(split.contractions, parts[0], strict=True):
        if norms_only and contraction.outer:
            record = widen(contraction.record(example)).reshape(-1)
            square = jnp.dot(record, record, precision=lax.Precision.HIGHEST)
            # Squares below the smallest number are lost: they count as that number.
            length = jnp.sqrt(square + record.size * jnp.finfo(record.dtype).tiny)
            gradient[contraction.leaf] = widen(part) * length
        else:
            gradient[contraction.leaf] = _transposed(contraction, leaves, example)(part)
    for leaf, part in zip(split.rest, parts[1], strict=True):
        gradient[leaf] = part
    return gradient


def _weighted_sum(
    split: Split,
    leaves: list[Array],
    parts: Any,
    examples: PyTree,
    weights: Array,
) -> list[Array]:
    """Returns the weighted sum of the gradients of all records; weight 0 means 0."""
    counts = weights > 0

    def weigh(part: Array) -> Array:
        axes = (-1,) + (1,) * (part.ndim - 1)
        return jnp.where(counts.reshape(axes), widen(part) * weights.reshape(axes), 0)

    total: list[Any] = [None] * len(leaves)
    for leaf, part in zip(split.rest, parts[1], strict=True):
        total[leaf] = jnp.sum(weigh(part), axis=0)
    if split.contractions:
        arrays = [_only(counts, array) for array in jax.tree.leaves(examples)]
        for contraction, part in zip(split.contractions, parts[0], strict=True):
            total[contraction.leaf] = _contract(contraction, leaves, arrays, weigh(part))
    return total


def _contract(contraction: Any, leaves: list[Array], arrays: list[Array], part: Array) -> Array:
    def products(value: Array) -> Array:
        return jax.vmap(lambda *example: contraction.product(value, example))(*arrays)

    _, vjp = jax.vjp(products, leaves[contraction.leaf])
    return vjp(part.astype(contraction.struct.dtype))[0]


def _transposed(contraction: Any, leaves: list[Array], example: list[Array]) -> Any:
    value = leaves[contraction.leaf]
    _, vjp = jax.vjp(lambda leaf: contraction.product(leaf, example), value)
    return lambda part: vjp(part)[0]


def _only(counts: Array, array: Array) -> Array:
    """Sets the rows that do not count to 0: what they hold may be a NaN, and 0 * NaN is NaN."""
    return jnp.where(counts.reshape((-1,) + (1,) * (array.ndim - 1)), array, 0)


def _first(examples: PyTree) -> PyTree:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), examples)
