"""Records that no model has: an outcome outside its support, or an index outside its table.

JAX reads index -1 as the last entry of a table, and an index beyond the end as the last or as NaN.
A missing category of pandas has the code -1. A log density outside the support may be finite, with
a finite gradient. Such records count as 0, like a record with a value that is not finite.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.lax import GatherScatterMode
from jax.typing import ArrayLike, DTypeLike
from numpyro.distributions import (
    Distribution,
    ExpandedDistribution,
    Independent,
    MaskedDistribution,
    constraints,
)

from numpyro_dp._compat import CALLS, LOOKUPS, MOVES, RULED, as_program, bind, mask_of, programs_in
from numpyro_dp._program import (
    Constant,
    Op,
    Operand,
    ScalarProgram,
    evaluate,
    flat,
    trace_scalar,
    value_of,
)
from numpyro_dp._tree import is_key
from numpyro_dp.core import Arrays, NumPyroFn, PyTree, Values
from numpyro_dp.model.dependence import depends_on_inputs
from numpyro_dp.model.locals import fill_locals, start
from numpyro_dp.model.records import ModelStructure
from numpyro_dp.model.separation import layers, log_density, traced

_WRAPPED = (MaskedDistribution, ExpandedDistribution)
_CALLS = (*CALLS, *RULED)
# Not ``while``: marks could keep its condition true for ever, and it has no gradient.
_BODIES = ("scan", "cond")
_INDEPENDENT = type(constraints.independent(constraints.real, 1))


def with_checks(model: NumPyroFn, structure: ModelStructure, shared: Arrays) -> ModelStructure:
    """Returns the structure of a model with what has to be checked of each record.

    Args:
        model: The model, static keywords filled in.
        structure: Its structure.
        shared: Public arrays among the arguments.
    """
    layout, plate = structure.layout, structure.data_plate
    filled = fill_locals(model, plate)
    # Filled while `values` is traced, which is before `bounds` reads it.
    bounded: list[str] = []

    def values(*rows: Array) -> Values:
        trace = traced(filled, plate, layout.arguments(rows, shared), start=start)
        bounded.extend(n for n in structure.likelihood if _has_bounds(trace[n]["fn"]))
        return {name: trace[name]["value"] for name in structure.latents + structure.params}

    def bounds(values: Values) -> Values:
        trace = traced(filled, plate, layout.placeholder(shared), values)
        supports = {name: unwrapped(trace[name]["fn"]).support for name in bounded}
        return {n: [jnp.asarray(x) for x in jax.tree.leaves(s)] for n, s in supports.items()}

    def likelihood(values: Values, example: Arrays) -> Array:
        trace = traced(filled, plate, layout.example(example, shared), values)
        found = [log_density(trace[name]) for name in structure.likelihood]
        return sum(found, start=jnp.zeros(()))

    given = jax.eval_shape(values, *layout.one_row())
    moving = depends_on_inputs(bounds, given)
    indexed = bool(_lookups(trace_scalar(likelihood, given, layout.blank(), _CALLS)))
    fixed = tuple(name for name in bounded if name not in moving)
    return structure._replace(bounded=fixed, indexed=indexed)


def _has_bounds(fn: Distribution) -> bool:
    """Whether values of a distribution may be outside its support, entry by entry.

    Constraints of whole vectors and matrices (a simplex, say) hold up to rounding, so they do not
    count. Angles have a density everywhere.
    """
    inner = next(each for each in layers(unwrapped(fn)) if not isinstance(each, Independent))
    # NumPyro declares None, the value of its base class.
    support = cast(constraints.Constraint, inner.support)
    while isinstance(support, _INDEPENDENT):
        support = support.base_constraint
    # Masks of single entries of a vector: nothing is known of whole vectors.
    unmasked = not isinstance(inner, MaskedDistribution)
    everywhere = (constraints.real, constraints.circular)
    return unmasked and support.event_dim == 0 and not any(support is each for each in everywhere)


def value_inside(fn: Distribution, value: Array) -> Array:
    """Whether all entries of a value that count are inside the support of its distribution."""
    inside = unwrapped(fn).support(value)
    for mask in masks_around(fn):
        inside = inside | ~jnp.asarray(mask, bool)
    return jnp.all(inside)


def unwrapped(fn: Distribution) -> Any:
    """A distribution without its mask and expansion."""
    return next(each for each in layers(fn) if not isinstance(each, _WRAPPED))


def masks_around(fn: Distribution) -> list[ArrayLike]:
    """The masks that :func:`unwrapped` takes away."""
    around = itertools.takewhile(lambda each: isinstance(each, _WRAPPED), layers(fn))
    return [mask_of(each) for each in around if isinstance(each, MaskedDistribution)]


def indices_inside(
    scalar: Callable[[PyTree, PyTree], Array], point: PyTree, example: PyTree
) -> Array:
    """Whether a record's log likelihood depends on no index outside its table.

    A lookup outside its table is like NaN: what depends on it is NaN too, unless a ``where`` does
    not choose it.

    Args:
        scalar: ``(point, example) -> log likelihood``.
        point: Latents.
        example: The record.
    """
    program = trace_scalar(scalar, point, example, _CALLS)
    inputs = dict(
        zip((*program.point, *program.example), jax.tree.leaves((point, example)), strict=True)
    )
    marked = _marked(program.ops, inputs, _lookups(program))
    return jnp.isfinite(marked(program.output))


def _lookups(program: ScalarProgram) -> set[int]:
    """Results of lookups at an index of the record alone, and of loops that look up."""
    of_record, of_point, found = set(program.example), set(program.point), set()
    for op in program.ops:
        for known in (of_record, of_point):
            if known & _value_numbers(op.inputs):
                known |= set(op.outputs)
        if op.primitive.name in LOOKUPS:
            starts = _value_numbers(op.inputs[1:])
            if starts & of_record and not starts & of_point:
                found |= set(op.outputs)
        elif of_record & _value_numbers(op.inputs) and _looks_up(op):
            found |= set(op.outputs)
    return found


def _looks_up(op: Op) -> bool:
    """Whether an operation is a lookup, or a loop or a branch with a lookup inside."""
    bodies = programs_in(list(op.params.values())) if op.primitive.name in _BODIES else ()
    inner = (each for body in bodies for each in flat(body, _CALLS).ops)
    return op.primitive.name in LOOKUPS or any(map(_looks_up, inner))


def _marked(
    ops: tuple[Op, ...], inputs: dict[int, ArrayLike], looked_up: set[int] | None = None
) -> Callable[[Operand], Any]:
    """Runs operations with lookups that give :func:`_nothing` outside their tables.

    Args:
        ops: The operations, in order.
        inputs: Values by their number.
        looked_up: Results of the lookups and loops that count, or ``None`` for all.

    Returns:
        ``number -> value``.
    """
    written, wrapped = _as_written(ops)
    found = evaluate(written, dict(inputs))
    # For an array: its value, with nothing in some entries. For a single number: whether it is
    # nothing. Most operations of a likelihood have single numbers, and need not run again.
    marks: dict[int, Array] = {}

    def size(number: Operand) -> int:
        return np.size(value_of(found, number))

    def marked(number: Operand) -> Any:
        value = value_of(found, number)
        if isinstance(number, Constant) or number not in marks or is_key(value):
            return value
        if size(number) > 1:
            return marks[number]
        return jnp.where(marks[number], _nothing(value.dtype), value)

    for op in written:
        name, outputs = op.primitive.name, set(op.outputs)
        reached = _value_numbers(op.inputs) & marks.keys()
        looks = name in LOOKUPS and (looked_up is None or bool(looked_up & outputs))
        runs = name in _BODIES and (bool(reached) or looked_up is None or bool(looked_up & outputs))
        casts = name == "convert_element_type" and _is_cast(found, op)
        if not (reached or looks or runs or casts):
            continue
        alone = all(size(number) == 1 for number in reached | outputs)
        if alone and not (looks or runs or casts):
            marks |= dict.fromkeys(outputs, _mark(op, found, marks))
            continue
        values = [marked(number) for number in op.inputs]
        params = _with_marks(op.params) if runs else op.params
        results = bind(op.primitive, params, values)
        if looks:
            results = [_looked_up(op, values, results[0], bool(wrapped & outputs))]
        elif name == "convert_element_type":
            results = [_converted(values[0], results[0])]
        for number, result in zip(op.outputs, results, strict=True):
            lost = _is_nothing(result)
            # A value that is not finite by itself was not lost by a lookup.
            if not casts:  # XLA may convert NaN to the very integer that stands for nothing
                lost &= ~_is_nothing(jnp.asarray(value_of(found, number)))
            marks[number] = result if size(number) > 1 else lost.reshape(())
    return marked


def _mark(op: Op, found: dict[int, Any], marks: dict[int, Array]) -> Array:
    """Whether a result of one number is nothing, from which of its inputs are."""
    own = [jnp.asarray(isinstance(x, int) and marks.get(x, False)) for x in op.inputs]
    if op.primitive.name == "select_n":
        # What is not chosen does not matter.
        chosen = jnp.reshape(value_of(found, op.inputs[0]), ())
        return own[0] | jax.lax.select_n(chosen, *own[1:])
    return functools.reduce(jnp.logical_or, own)


def _with_marks(params: dict[str, object]) -> dict[str, object]:
    """The parameters of a loop or a branch, whose programs run by :func:`_marked`."""

    def marked(value: object) -> object:
        if isinstance(value, tuple):
            return tuple(marked(each) for each in value)
        program = as_program(value)
        if program is None:
            return value
        body = flat(program, _CALLS)

        def run(*inputs: Array) -> list[Array]:
            found = _marked(body.ops, dict(zip(body.inputs, inputs, strict=True)))
            return [found(output) for output in body.outputs]

        shapes = [jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in program.inputs]
        return jax.make_jaxpr(run)(*shapes)

    return {name: marked(value) for name, value in params.items()}


def _looked_up(op: Op, values: list[Any], result: Array, wrapped: bool) -> Array:
    """The result of a lookup, or :func:`_nothing` where its index is outside the table.

    A program that says what stands outside (``jnp.take`` with ``mode="clip"``, or with a number as
    ``fill_value``) means it. JAX still makes -1 the last entry if ``wrapped``.
    """
    table, *starts = values
    sizes, axes, beyond = op.params["slice_sizes"], range(jnp.ndim(table)), False
    if op.primitive.name == "gather":
        numbers, mode = op.params["dimension_numbers"], op.params["mode"]
        axes, starts = numbers.start_index_map, jnp.moveaxis(starts[0], -1, 0)
        if mode == GatherScatterMode.CLIP and not wrapped:
            return result
        beyond = mode == GatherScatterMode.FILL_OR_DROP and _is_number(op.params["fill_value"])
    inside = jnp.ones((), bool)
    for axis, first in zip(axes, starts, strict=False):  # a dynamic slice has further inputs
        last = jnp.shape(table)[axis] - sizes[axis]
        if last:  # a table of one entry has one index, whatever its number
            inside &= (first >= 0) & (beyond | (first <= last))
    if op.primitive.name == "gather":
        inside = jnp.broadcast_to(inside, jnp.shape(values[1])[:-1])
        inside = jnp.expand_dims(inside, numbers.offset_dims)
    return jnp.where(inside, result, _nothing(result.dtype))


def _is_number(fill: Any) -> bool:
    """Whether a lookup is filled by a number, not by NaN or JAX's own choice."""
    return fill is not None and bool(np.isfinite(fill)) and fill != np.iinfo(np.int32).min


def _nothing(dtype: DTypeLike) -> Array:
    """What a lookup outside its table gives: NaN, or the lowest integer, which is no index."""
    if jnp.issubdtype(dtype, jnp.inexact):
        return jnp.asarray(jnp.nan, dtype)
    if jnp.issubdtype(dtype, jnp.signedinteger):
        return jnp.asarray(jnp.iinfo(dtype).min, dtype)
    # Unsigned integers and booleans have no value to spare.
    return jnp.zeros((), dtype)


def _is_nothing(value: Array) -> Array:
    if jnp.issubdtype(value.dtype, jnp.inexact):
        return ~jnp.isfinite(value)  # NumPyro gives logits of NaN the log probability -inf
    # In 8 or 16 bits the lowest integer is a usual value.
    wide = jnp.issubdtype(value.dtype, jnp.signedinteger) and value.dtype.itemsize >= 4
    return value == _nothing(value.dtype) if wide else jnp.zeros((), bool)


def _is_cast(found: dict[int, Any], op: Op) -> bool:
    """Whether an operation makes floats integers."""
    before, after = (jnp.asarray(value_of(found, x[0])).dtype for x in (op.inputs, op.outputs))
    return jnp.issubdtype(before, jnp.inexact) and jnp.issubdtype(after, jnp.signedinteger)


def _converted(value: ArrayLike, result: Array) -> Array:
    """A conversion between floats and integers that keeps :func:`_nothing`."""
    kinds = [jnp.issubdtype(x.dtype, jnp.inexact) for x in map(jnp.asarray, (value, result))]
    if kinds[0] == kinds[1] or result.dtype == bool:
        return result
    return jnp.where(_is_nothing(jnp.asarray(value)), _nothing(result.dtype), result)


def _as_written(ops: tuple[Op, ...]) -> tuple[tuple[Op, ...], set[int]]:
    """The operations without those by which JAX makes index -1 the last entry.

    JAX writes ``table[i]`` as a lookup at ``select(i < 0, i, i + size)``. Here it is one at ``i``.

    Returns:
        The operations, and the results of lookups at such an index.
    """
    makers = {out: op for op in ops for out in op.outputs}
    written: dict[int, Operand] = {}
    kept, moved, wrapping = [], set(), set()
    for op in ops:
        if _value_numbers(op.inputs) & (written.keys() | moved):
            if op.primitive.name in (*MOVES, "concatenate", "convert_element_type"):
                moved |= set(op.outputs)
            elif op.primitive.name in LOOKUPS:
                wrapping |= set(op.outputs)
        op = op._replace(inputs=tuple(_resolved(written, value) for value in op.inputs))
        if op.primitive.name == "select_n" and len(op.inputs) == 3:
            negative, _, wrapped = (_resolved(makers, value) for value in op.inputs)
            if _is_wrapped(op.inputs[1], negative, wrapped, written):
                written[op.outputs[0]] = op.inputs[1]
                continue
        kept.append(op)
    return tuple(kept), wrapping


def _is_wrapped(
    index: Operand, negative: Any, wrapped: Op | Operand, written: dict[int, Operand]
) -> bool:
    """Whether ``negative`` is index < 0, and ``wrapped`` is index + a constant."""
    for op, name in ((negative, "lt"), (wrapped, "add")):
        if not (isinstance(op, Op) and op.primitive.name == name):
            return False
        if _resolved(written, op.inputs[0]) != index or not isinstance(op.inputs[1], Constant):
            return False
    return not np.any(negative.inputs[1].value)


def _resolved(found: dict[int, Any], value: Any) -> Any:
    return value if isinstance(value, Constant) else found.get(value, value)


def _value_numbers(values: Iterable[Operand]) -> set[int]:
    return {value for value in values if not isinstance(value, Constant)}
