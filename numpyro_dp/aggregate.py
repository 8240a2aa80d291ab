r"""The clipped sum over a batch, :math:`\sum_i w_i s_i`, by the definition or faster.

The definition takes the signal of each example, bounds it and adds up. Where the estimator says
that its signal is a linear map of a scalar's gradient (:class:`~numpyro_dp.core.FactoredSignal`),
the norms are found first and one weighted vector-Jacobian product gives the same sum, without an
array of (batch, parameters). The definition stays the reference: tests hold one against the other.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.core import ClosedJaxpr, Jaxpr
from jaxtyping import Bool

from numpyro_dp._tree import select, widen
from numpyro_dp.core import Estimator, FactoredSignal, Mechanism, PyTree
from numpyro_dp.model.dependence import copies_of_inputs

__all__ = ["bounded_sum", "bounded_sum_by_definition"]

_MOVES = ("reshape", "broadcast_in_dim", "squeeze", "expand_dims", "transpose", "slice")


def bounded_sum(
    estimator: Estimator,
    mechanism: Mechanism,
    public: PyTree,
    examples: PyTree,
    mask: Bool[Array, " batch"],
    *,
    finite: bool = False,
) -> dict[str, Any]:
    """Returns the sum of the bounded signals of a batch.

    Args:
        estimator: Whose signal.
        mechanism: Bounds it.
        public: What ``estimator.prepare`` returned.
        examples: Records, leading axis batch.
        mask: bool, shape (batch,): which entries count.
        finite: Whether the records are known to have no NaN and no infinity.

    Returns:
        A dict like the signal, in float32 or wider.

    Guarantee:
        An entry whose mask is false, or whose signal is not finite, contributes exactly 0; every
        other one contributes at most ``mechanism.sensitivity`` in norm.
    """
    if estimator.factored is None or _sums_in_half(estimator.factored, public, examples):
        return bounded_sum_by_definition(estimator, mechanism, public, examples, mask)
    return _factored_sum(estimator, mechanism, public, examples, mask, finite)


def bounded_sum_by_definition(
    estimator: Estimator,
    mechanism: Mechanism,
    public: PyTree,
    examples: PyTree,
    mask: Bool[Array, " batch"],
) -> dict[str, Any]:
    """The same sum, signal by signal: needs memory for (batch, parameters)."""
    signals = jax.vmap(estimator.signal, in_axes=(None, 0))(public, examples)
    bounded, _ = jax.vmap(mechanism.bound)(signals)

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
    finite: bool,
) -> dict[str, Any]:
    factored: FactoredSignal = estimator.factored
    point = factored.point(public)

    def scalars(point: PyTree, examples: PyTree) -> Array:
        return jax.vmap(lambda example: factored.scalar(public, point, example))(examples)

    names = tuple(jax.eval_shape(lambda p, x: estimator.signal(p, x), public, _first(examples)))
    blocks = mechanism.blocks(names)

    def squared_norms(example: PyTree) -> tuple[Array, ...]:
        gradient = jax.grad(factored.scalar, 1)(public, point, example)
        return factored.squared_norms(public, gradient, blocks)

    factors = mechanism.scales(names, jax.vmap(squared_norms)(examples))
    factors = [jnp.where(mask, factor, 0) for factor in factors]
    counts = jnp.stack([factor > 0 for factor in factors]).any(0)
    values, vjp = jax.vjp(lambda p: scalars(p, examples), point)
    vjp = _quiet(vjp, scalars, point, examples, counts, finite)
    total: dict[str, Any] = {}
    for members, factor in zip(blocks, factors, strict=True):
        (gradient,) = vjp(factor.astype(values.dtype))
        signal = factored.expand(public, gradient)
        # If no example counts, nothing may come through, whatever 0 is multiplied with.
        kept = jax.tree.map(lambda leaf: jnp.where(counts.any(), leaf, 0), signal)
        total |= widen(select(kept, members))
    return total


def _quiet(
    vjp: Any, scalars: Any, point: PyTree, examples: PyTree, counts: Array, finite: bool
) -> Any:
    """Makes weight 0 mean 0: replaces what non-counting examples left for the backward pass.

    An example of weight 0 may have left a NaN or an infinity in the residuals of the forward pass,
    and 0 * NaN is NaN. Its residuals are replaced by 1. Residuals that only copy entries of
    records known to be finite are left alone, which saves a pass over the batch.
    """

    def residuals(point: PyTree, examples: PyTree) -> list[Array]:
        return jax.tree.leaves(jax.vjp(lambda p: scalars(p, examples), point)[1])

    batch = counts.shape[0]
    longer = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((batch + 1, *x.shape[1:]), x.dtype), examples
    )
    shapes = jax.eval_shape(residuals, point, longer)
    copies = copies_of_inputs(residuals, len(jax.tree.leaves(point)), point, examples)
    leaves, treedef = jax.tree.flatten(vjp)

    def clean(leaf: Any, longer_shape: Any, copy: bool) -> Any:
        if (copy and finite) or not jnp.issubdtype(jnp.result_type(leaf), jnp.inexact):
            return leaf
        grown = zip(leaf.shape, longer_shape.shape, strict=True)
        axes = [axis for axis, (size, longer) in enumerate(grown) if size != longer]
        if not axes:  # the same for all examples: public
            return leaf
        keep = counts.reshape(tuple(batch if i == axes[0] else 1 for i in range(leaf.ndim)))
        return jnp.where(keep, leaf, 1)

    cleaned = [clean(*item) for item in zip(leaves, shapes, copies, strict=True)]
    return jax.tree.unflatten(treedef, cleaned)


def _sums_in_half(factored: FactoredSignal, public: PyTree, examples: PyTree) -> bool:
    """Whether the backward pass may add up records in fewer bits than float32 has.

    Its rounding would be a change of the total that no clipping bounds.
    """

    def gradient(example: PyTree) -> PyTree:
        return jax.grad(factored.scalar, 1)(public, factored.point(public), example)

    return _computes_in_half(jax.make_jaxpr(gradient)(_first(examples)).jaxpr)


def _computes_in_half(jaxpr: Jaxpr) -> bool:
    def is_jaxpr(value: Any) -> bool:
        return isinstance(value, ClosedJaxpr | Jaxpr)

    for eqn in jaxpr.eqns:
        values = jax.tree.leaves(list(eqn.params.values()), is_leaf=is_jaxpr)
        bodies = [getattr(value, "jaxpr", value) for value in values if is_jaxpr(value)]
        if any(map(_computes_in_half, bodies)):
            return True
        half = {str(var.aval.dtype) for var in eqn.outvars} & {"float16", "bfloat16"}
        if half and not bodies and eqn.primitive.name not in _MOVES:
            return True
    return False


def _first(examples: PyTree) -> PyTree:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), examples)
