"""Records that no model has: an outcome outside its support, or an index outside its table.

JAX reads index -1 as the last entry of a table, and an index beyond the end as the last or as NaN.
A missing category of pandas has the code -1. A log density outside the support may be finite, with
a finite gradient. Such records count as 0, like a record with a value that is not finite.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpyro import handlers
from numpyro.distributions import (
    ExpandedDistribution,
    Independent,
    MaskedDistribution,
    constraints,
)

from numpyro_dp._compat import LOOKUPS, mask_of
from numpyro_dp._program import Constant, Op, ScalarProgram, evaluate, needed, trace_scalar
from numpyro_dp.model.dependence import inputs_of
from numpyro_dp.model.locals import fill_locals, start
from numpyro_dp.model.records import ModelStructure
from numpyro_dp.model.separation import log_density, one_record

__all__ = ["indices_inside", "plain", "value_inside", "with_checks"]

_WRAPPED = (MaskedDistribution, ExpandedDistribution)
_INDEPENDENT = type(constraints.independent(constraints.real, 1))


def with_checks(
    model: Callable[..., Any], structure: ModelStructure, shared: tuple[Array, ...]
) -> ModelStructure:
    """Returns the structure of a model with what has to be checked of each record.

    Args:
        model: The model, static keywords filled in.
        structure: Its structure.
        shared: Public arrays among the arguments.
    """
    layout, plate = structure.layout, structure.data_plate
    alone = handlers.seed(fill_locals(one_record(model, plate), plate), jax.random.key(0))
    begun = handlers.substitute(alone, substitute_fn=start)
    bounded: list[str] = []

    def values(*rows: Array) -> dict[str, Any]:
        trace = layout.arguments(rows, shared).trace(begun)
        bounded.extend(n for n in structure.likelihood if _has_bounds(trace[n]["fn"]))
        return {name: trace[name]["value"] for name in structure.latents + structure.params}

    def bounds(values: dict[str, Any], *rows: Array) -> dict[str, Any]:
        trace = layout.arguments(rows, shared).trace(handlers.substitute(alone, data=values))
        supports = {name: plain(trace[name]["fn"]).support for name in bounded}
        return {n: [jnp.asarray(x) for x in jax.tree.leaves(s)] for n, s in supports.items()}

    def likelihood(values: dict[str, Any], example: tuple[Array, ...]) -> Array:
        trace = layout.example(example, shared).trace(handlers.substitute(alone, data=values))
        found = [log_density(trace[name]) for name in structure.likelihood]
        return sum(found, start=jnp.zeros(()))

    given = jax.eval_shape(values, *layout.one_row())
    moving = range(len(jax.tree.leaves(given)))  # inputs of which a fixed support reads none
    fixed = [name for name, read in inputs_of(bounds, given, *layout.one_row()).items()
             if not read & set(moving)]  # fmt: skip
    rows = tuple(jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in layout.shapes)
    indexed = bool(_lookups(trace_scalar(likelihood, given, rows)))
    return structure._replace(bounded=tuple(fixed), indexed=indexed)


def _has_bounds(fn: Any) -> bool:
    """Whether values of a distribution may be outside its support, entry by entry.

    Constraints of whole vectors and matrices (a simplex, say) hold up to rounding, so they do not
    count. Angles have a density everywhere.
    """
    fn = inner = plain(fn)
    while isinstance(inner, Independent):
        inner = inner.base_dist
    support = inner.support
    while isinstance(support, _INDEPENDENT):
        support = support.base_constraint
    # Masks of single entries of a vector: nothing is known of whole vectors.
    unmasked = not isinstance(inner, MaskedDistribution)
    everywhere = (constraints.real, constraints.circular)
    return unmasked and support.event_dim == 0 and not any(support is each for each in everywhere)


def value_inside(fn: Any, value: Array) -> Array:
    """Whether all entries of a value that count are inside the support of its distribution."""
    inside = plain(fn).support(value)
    while isinstance(fn, _WRAPPED):
        if isinstance(fn, MaskedDistribution):
            inside = inside | ~jnp.asarray(mask_of(fn), bool)
        fn = fn.base_dist
    return jnp.all(inside)


def plain(fn: Any) -> Any:
    """A distribution without its mask and expansion."""
    while isinstance(fn, _WRAPPED):
        fn = fn.base_dist
    return fn


def indices_inside(scalar: Callable[[Any, Any], Array], point: Any, example: Any) -> Array:
    """Whether a record's indices are inside the tables that it looks up, of which there are some.

    Args:
        scalar: ``(point, example) -> log likelihood``.
        point: Latents, or their shapes.
        example: The record.
    """
    program = trace_scalar(scalar, point, example)
    found = _lookups(program)
    program = program._replace(ops=_as_written(program.ops))
    wanted = set().union(*(starts for _, starts in found))
    inputs = dict(zip(program.example, jax.tree.leaves(example), strict=True))
    values = evaluate(needed(program, *wanted), inputs)
    return jnp.all(jnp.stack([_inside(program, op, values) for op, _ in found]))


def _lookups(program: ScalarProgram) -> list[tuple[Op, set[int]]]:
    """Lookups at an index that depends on the record alone, and the values of their indices."""
    of_record, of_point, found = set(program.example), set(program.point), []
    for op in _as_written(program.ops):
        for known in (of_record, of_point):
            if known & _numbers(op.inputs):
                known |= set(op.outputs)
        if op.primitive.name in LOOKUPS:
            starts = _numbers(op.inputs[1:])
            if starts & of_record and not starts & of_point:
                found.append((op, starts))
    return found


def _inside(program: ScalarProgram, op: Op, values: dict[int, Any]) -> Array:
    table, *starts = op.inputs
    shape = jnp.shape(table.value) if isinstance(table, Constant) else program.shapes[table].shape
    starts = [at.value if isinstance(at, Constant) else values[at] for at in starts]
    sizes, axes = op.params["slice_sizes"], range(len(shape))
    if op.primitive.name == "gather":
        axes = op.params["dimension_numbers"].start_index_map
        starts = jnp.moveaxis(jnp.asarray(starts[0]), -1, 0)
    found = jnp.ones((), bool)
    for axis, first in zip(axes, starts, strict=False):  # a dynamic slice has further inputs
        last = shape[axis] - sizes[axis]
        if last:  # a table of one entry has one index, whatever its number
            found &= jnp.all((first >= 0) & (first <= last))
    return found


def _as_written(ops: tuple[Op, ...]) -> tuple[Op, ...]:
    """The operations without those by which JAX makes index -1 the last entry.

    JAX writes ``table[i]`` as a lookup at ``select(i < 0, i, i + size)``. Here it is one at ``i``.
    """
    makers = {out: op for op in ops for out in op.outputs}
    written: dict[int, Any] = {}
    kept = []
    for op in ops:
        op = op._replace(inputs=tuple(_get(written, value) for value in op.inputs))
        if op.primitive.name == "select_n" and len(op.inputs) == 3:
            negative, _, wrapped = (_get(makers, value) for value in op.inputs)
            if _is_wrapped(op.inputs[1], negative, wrapped, written):
                written[op.outputs[0]] = op.inputs[1]
                continue
        kept.append(op)
    return tuple(kept)


def _is_wrapped(index: Any, negative: Any, wrapped: Any, written: dict[int, Any]) -> bool:
    """Whether ``negative`` is index < 0, and ``wrapped`` is index + a constant."""
    for op, name in ((negative, "lt"), (wrapped, "add")):
        if not (isinstance(op, Op) and op.primitive.name == name):
            return False
        if _get(written, op.inputs[0]) != index or not isinstance(op.inputs[1], Constant):
            return False
    return not np.any(negative.inputs[1].value)


def _get(found: dict[int, Any], value: Any) -> Any:
    return value if isinstance(value, Constant) else found.get(value, value)


def _numbers(values: Any) -> set[int]:
    return {value for value in values if not isinstance(value, Constant)}
