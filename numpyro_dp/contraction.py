r"""Finds the parameters that a scalar sees through a single product with the record.

For :math:`f(\theta, x)` with :math:`\theta = (w, v)` that reads :math:`w` only through
:math:`\eta = x \cdot w`, each coordinate of the gradient is one product,

.. math:: \nabla_w f = r\, x, \qquad r = \partial f/\partial\eta,

so a sum :math:`\sum_i c_i r_i x_i` may be taken as one matrix-vector product without any array of
(records, parameters), and no term of a record can be larger than its gradient. Where a coordinate
is a *sum* of products (w used twice, several rows of x in one record), huge terms of one record may
cancel in its gradient and not in the sum over records: rounding would then move the sum by more
than the clip norm. Those parameters are not split, and their gradients are taken record by record.

The record's factor may be any function of the record alone: its entries, moved or converted, or
features made of them (scaled columns, an intercept, products), which are marked as derived.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

__all__ = ["Contraction", "Split", "split_scalar"]

_MOVES = (
    "reshape", "squeeze", "expand_dims", "transpose", "broadcast_in_dim", "copy", "copy_p", "slice",
)  # fmt: skip
_CALLS = ("jit", "pjit", "closed_call", "core_call")


class _Constant:
    """A value that the program holds; compared by identity."""

    def __init__(self, value: Any) -> None:
        self.value = value


class _Op(NamedTuple):
    primitive: Any
    params: dict[str, Any]
    inputs: tuple[Any, ...]  # numbers of values, or constants
    outputs: tuple[int, ...]


class _Program(NamedTuple):
    ops: tuple[_Op, ...]
    point: tuple[int, ...]
    example: tuple[int, ...]
    output: Any
    shapes: dict[int, Any]


class Contraction(NamedTuple):
    """A leaf of the point that enters through one product.

    Attributes:
        leaf: Number of the leaf among the leaves of the point.
        op: Number of the operation that forms the product.
        product: ``(leaf value, the record's factor) -> product`` of one record, linear in both.
        record: ``example leaves -> the record's factor`` in the product.
        derived: Whether the factor is computed, not just moved: two programs may round it
            differently, so it must be computed once.
        outer: Whether the gradient is an outer product, of norm ``|r| |record|``.
        struct: Shape and dtype of the product.
    """

    leaf: int
    op: int
    product: Callable[[Array, Array], Array]
    record: Callable[[Sequence[Array]], Array]
    derived: bool
    outer: bool
    struct: jax.ShapeDtypeStruct


class Split(NamedTuple):
    """A scalar whose contractions have been cut out.

    Attributes:
        contractions: The leaves that enter through one product.
        rest: Numbers of the other leaves.
        scalar: ``(shifts, rest values, all leaves, example leaves) -> scalar``, where the shifts
            are added to the products.
    """

    contractions: tuple[Contraction, ...]
    rest: tuple[int, ...]
    scalar: Callable[..., Array]


def split_scalar(scalar: Callable[[Any, Any], Array], point: Any, example: Any) -> Split:
    """Cuts a scalar at the single products of its parameters with the record.

    Args:
        scalar: ``(point, example) -> scalar``.
        point: Where it will be differentiated.
        example: One record, or its shapes.

    Returns:
        The split; with no contraction if none is recognised.
    """
    program = _trace(scalar, point, example)
    found = [_contraction(program, leaf) for leaf in range(len(program.point))]
    contractions = tuple(c for c in found if c is not None)
    rest = tuple(leaf for leaf, c in enumerate(found) if c is None)
    cuts = {contraction.op: number for number, contraction in enumerate(contractions)}

    def shifted(shifts: Any, rest_values: Any, leaves: Any, example_leaves: Any) -> Array:
        values = list(leaves)
        for leaf, value in zip(rest, rest_values, strict=True):
            values[leaf] = value
        inputs = (*zip(program.point, values, strict=True),
                  *zip(program.example, example_leaves, strict=True))  # fmt: skip
        environment = _evaluate(program.ops, dict(inputs), lambda op, value: (
            value + shifts[cuts[op]] if op in cuts else value
        ))  # fmt: skip
        return _read(environment, program.output)

    return Split(contractions, rest, shifted)


def _contraction(program: _Program, leaf: int) -> Contraction | None:
    """Follows a leaf through operations that only move it to one product with the record."""
    alone = _of_the_record(program)
    current, chain = program.point[leaf], []
    while True:
        users = [number for number, op in enumerate(program.ops) if current in op.inputs]
        if len(users) != 1 or program.output == current:
            return None
        op = program.ops[users[0]]
        chain.append(users[0])
        if op.primitive.name == "dot_general":
            return _product(program, leaf, chain, current, alone)
        if not _moves(program, op):
            return None
        (current,) = op.outputs


def _product(
    program: _Program, leaf: int, chain: list[int], current: int, alone: dict[int, bool]
) -> Contraction | None:
    op = program.ops[chain[-1]]
    left, right = op.inputs
    if left == right or {left, right} - {current} - set(alone):
        return None
    side = 1 if left == current else 0  # where the record is
    contracted, batch = op.params["dimension_numbers"]
    shape = program.shapes[op.inputs[side]].shape
    summed = {*contracted[side], *batch[side]}
    free = math.prod(size for axis, size in enumerate(shape) if axis not in summed)
    out = program.shapes[op.outputs[0]]
    numbers = (program.point[leaf], left, right, *op.outputs)
    wide = all(
        jnp.finfo(program.shapes[number].dtype).bits >= 32 for number in numbers
        if jnp.issubdtype(program.shapes[number].dtype, jnp.floating)
    )  # fmt: skip
    if free != 1 or not wide or not jnp.issubdtype(out.dtype, jnp.floating):
        return None
    factor = op.inputs[side]
    *moves, dot = (program.ops[number] for number in chain)
    exact = {"precision": (lax.Precision.HIGHEST, lax.Precision.HIGHEST)}
    needed = (*moves, dot._replace(params=dot.params | exact))
    made = _needed(program, factor)

    def product(value: Array, record_value: Array) -> Array:
        inputs = {program.point[leaf]: value, factor: record_value}
        environment = _evaluate(needed, inputs, lambda _, result: result)
        return environment[op.outputs[0]]

    def record(example_leaves: Sequence[Array]) -> Array:
        inputs = dict(zip(program.example, example_leaves, strict=True))
        return _evaluate(made, inputs, lambda _, result: result)[factor]

    struct = jax.ShapeDtypeStruct(out.shape, out.dtype)
    derived = not alone[factor]
    return Contraction(leaf, chain[-1], product, record, derived, not batch[side], struct)


def _needed(program: _Program, value: int) -> tuple[_Op, ...]:
    """The operations that a value is made of, in order."""
    wanted, kept = {value}, []
    for op in reversed(program.ops):
        if wanted & set(op.outputs):
            wanted |= {number for number in op.inputs if isinstance(number, int)}
            kept.append(op)
    return tuple(reversed(kept))


def _of_the_record(program: _Program) -> dict[int, bool]:
    """Values that are functions of the record alone, and whether they are its entries, moved."""
    alone = dict.fromkeys(program.example, True)
    public: set[int] = set()  # made of constants
    for op in program.ops:
        own = [number for number in op.inputs if not isinstance(number, _Constant)]
        own = [number for number in own if number not in public]
        if not own:
            public |= set(op.outputs)
        elif all(number in alone for number in own):
            moved = _moves(program, op) and alone[own[0]]
            alone |= dict.fromkeys(op.outputs, moved)
    return alone


def _moves(program: _Program, op: _Op) -> bool:
    """Whether an operation has one input and keeps each of its entries once."""
    if len(op.inputs) != 1 or len(op.outputs) != 1 or isinstance(op.inputs[0], _Constant):
        return False
    source, target = program.shapes[op.inputs[0]], program.shapes[op.outputs[0]]
    if op.primitive.name == "convert_element_type":
        return jnp.issubdtype(target.dtype, jnp.floating) and jnp.finfo(target.dtype).bits >= 32
    return op.primitive.name in _MOVES and math.prod(source.shape) == math.prod(target.shape)


def _trace(scalar: Callable[[Any, Any], Array], point: Any, example: Any) -> _Program:
    closed = jax.make_jaxpr(scalar)(point, example)
    ops: list[_Op] = []
    shapes: dict[int, Any] = {}

    def fresh(variable: Any) -> int:
        shapes[len(shapes)] = variable.aval
        return len(shapes) - 1

    numbers = [fresh(variable) for variable in closed.jaxpr.invars]
    (output,) = _flatten(closed.jaxpr, numbers, closed.consts, ops, fresh)
    split = len(jax.tree.leaves(point))
    return _Program(tuple(ops), tuple(numbers[:split]), tuple(numbers[split:]), output, shapes)


def _flatten(
    jaxpr: Jaxpr, inputs: Sequence[Any], consts: Sequence[Any], ops: list[_Op],
    fresh: Callable[[Any], int],
) -> list[Any]:  # fmt: skip
    """Appends the operations of a jaxpr, calls written out, and returns its outputs."""
    environment = dict(zip(jaxpr.invars, inputs, strict=True))
    environment |= {v: _Constant(c) for v, c in zip(jaxpr.constvars, consts, strict=True)}

    def read(atom: Any) -> Any:
        return _Constant(atom.val) if isinstance(atom, Literal) else environment[atom]

    for eqn in jaxpr.eqns:
        values = [read(atom) for atom in eqn.invars]
        body = eqn.params.get("jaxpr")
        if eqn.primitive.name in _CALLS and isinstance(body, ClosedJaxpr):
            outputs = _flatten(body.jaxpr, values, body.consts, ops, fresh)
        else:
            outputs = [fresh(variable) for variable in eqn.outvars]
            ops.append(_Op(eqn.primitive, eqn.params, tuple(values), tuple(outputs)))
        environment |= dict(zip(eqn.outvars, outputs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _evaluate(
    ops: Sequence[_Op], environment: dict[int, Any], change: Callable[[int, Any], Any]
) -> dict[int, Any]:
    for number, op in enumerate(ops):
        values = [_read(environment, value) for value in op.inputs]
        bound = op.primitive.get_bind_params(op.params)
        functions, params = bound if isinstance(bound, tuple) else ((), bound)  # jax < 0.8, later
        results = op.primitive.bind(*functions, *values, **params)
        results = results if op.primitive.multiple_results else [change(number, results)]
        environment |= dict(zip(op.outputs, results, strict=True))
    return environment


def _read(environment: dict[int, Any], value: Any) -> Any:
    return value.value if isinstance(value, _Constant) else environment[value]
