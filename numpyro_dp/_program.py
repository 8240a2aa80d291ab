"""A scalar function of a point and a record as a flat list of operations, and their evaluation."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from numpyro_dp._compat import (
    CALLED,
    CALLS,
    Primitive,
    Program,
    ShapedArray,
    Variable,
    as_program,
    bind,
    literal,
    make_program,
)


class Constant:
    """A constant of the program, compared by identity."""

    def __init__(self, value: ArrayLike) -> None:
        self.value = value


#: An input of an operation: the number of a value, or a constant.
Operand = int | Constant


class Op(NamedTuple):
    """An operation.

    Attributes:
        primitive: Its primitive.
        params: Its parameters.
        inputs: Numbers of values, or constants.
        outputs: Numbers of values.
    """

    # Numbers, not JAX's variables, which calls of one function share after they are inlined.
    primitive: Primitive
    params: dict[str, Any]
    inputs: tuple[Any, ...]
    outputs: tuple[int, ...]


class ScalarProgram(NamedTuple):
    """The program of a scalar.

    Attributes:
        ops: The operations, in order.
        point: Numbers of the leaves of the point.
        example: Numbers of the leaves of the record.
        output: Number of the scalar.
        shapes: Shape and dtype of each value.
    """

    ops: tuple[Op, ...]
    point: tuple[int, ...]
    example: tuple[int, ...]
    output: Any
    shapes: dict[int, ShapedArray]


class FlatProgram(NamedTuple):
    """A program with calls inlined.

    Attributes:
        ops: The operations, in order.
        inputs: Numbers of the inputs.
        outputs: Numbers of the outputs, or constants.
        shapes: Shape and dtype of each value.
    """

    ops: tuple[Op, ...]
    inputs: tuple[int, ...]
    outputs: tuple[Operand, ...]
    shapes: dict[int, ShapedArray]


def trace_scalar(
    scalar: Callable[..., Array], point: object, example: object, calls: tuple[str, ...] = CALLS
) -> ScalarProgram:
    """Returns the operations that compute a scalar, of arguments with these shapes.

    Args:
        scalar: ``(point, example) -> scalar``.
        point: Arrays or shapes.
        example: Arrays or shapes.
        calls: Operations whose programs are inlined.
    """
    # Shapes alone, because the program must not depend on the devices that hold the arrays.
    bare = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (point, example))
    found = flat(make_program(scalar, *bare)[0], calls)
    split = len(jax.tree.leaves(point))
    # One output, because the scalar is the log likelihood of one record.
    (output,) = found.outputs
    inputs = found.inputs[:split], found.inputs[split:]
    ops, renamed = _computed_once(found.ops)
    output = renamed.get(output, output)
    whole = ScalarProgram(ops, *inputs, output, found.shapes)
    return whole if isinstance(output, Constant) else whole._replace(ops=needed(whole, output))


def _computed_once(ops: Sequence[Op]) -> tuple[tuple[Op, ...], dict[Operand, int]]:
    """Leaves out operations that repeat earlier ones. Returns also the new numbers of their values.

    A difference of two log likelihoods of one record computes its products twice.
    """
    kept: list[Op] = []
    seen: dict[Hashable, tuple[int, ...]] = {}
    renamed: dict[Operand, int] = {}
    for op in ops:
        inputs: tuple[Any, ...] = tuple(renamed.get(number, number) for number in op.inputs)
        same = op.primitive, tuple(op.params.items()), tuple(map(_compared, inputs))
        try:
            before = seen.setdefault(same, op.outputs)
        except TypeError:  # a parameter without a hash, such as an array
            before = op.outputs
        if before is op.outputs:
            kept.append(op._replace(inputs=inputs))
        else:
            renamed |= dict(zip(op.outputs, before, strict=True))
    return tuple(kept), renamed


def _compared(value: Operand) -> Hashable:
    """What makes two inputs equal: the number of a value, or type and digits of a scalar."""
    held = value.value if isinstance(value, Constant) else None
    if held is not None and not isinstance(held, Array) and np.ndim(held) == 0:
        return str(jnp.result_type(held)), repr(np.asarray(held).item())
    return value


def flat(program: Program, calls: tuple[str, ...] = CALLS) -> FlatProgram:
    """Returns a program as a list of operations, with the programs of ``calls`` inlined."""
    ops: list[Op] = []
    shapes: dict[int, ShapedArray] = {}

    def fresh(variable: Variable) -> int:
        shapes[len(shapes)] = variable.aval
        return len(shapes) - 1

    inputs = tuple(fresh(variable) for variable in program.inputs)
    outputs = _flatten(program, inputs, ops, fresh, calls)
    return FlatProgram(tuple(ops), inputs, tuple(outputs), shapes)


def _flatten(
    program: Program,
    inputs: Sequence[Operand],
    ops: list[Op],
    fresh: Callable[[Variable], int],
    calls: tuple[str, ...],
) -> list[Operand]:
    """Appends the operations of a program with calls inlined, and returns its outputs."""
    environment = dict(zip(program.inputs, inputs, strict=True))
    environment |= {variable: Constant(held) for variable, held in program.constants}

    def read(atom: Variable) -> Operand:
        found = literal(atom)
        return Constant(found[0]) if found else environment[atom]

    for eqn in program.equations:
        values = [read(atom) for atom in eqn.invars]
        bodies = [as_program(eqn.params[name]) for name in CALLED if name in eqn.params]
        # A call hides operations. A loop stays one operation: its body runs more than once.
        if eqn.primitive.name in calls and (body := next(iter(bodies), None)):
            outputs = _flatten(body, values, ops, fresh, calls)
        else:
            outputs = [fresh(variable) for variable in eqn.outvars]
            ops.append(Op(eqn.primitive, eqn.params, tuple(values), tuple(outputs)))
        environment |= dict(zip(eqn.outvars, outputs, strict=True))
    return [read(atom) for atom in program.outputs]


def evaluate(
    ops: Sequence[Op],
    environment: dict[int, Any],
    change: Callable[[int, Array], Array] = lambda _, value: value,
) -> dict[int, Any]:
    """Runs operations.

    Args:
        ops: The operations, in order.
        environment: Values by their number. The outputs are added to it.
        change: ``(number of the operation, its value) -> value to continue with``.
    """
    for number, op in enumerate(ops):
        values = [value_of(environment, value) for value in op.inputs]
        results = bind(op.primitive, op.params, values)
        results = results if op.primitive.multiple_results else [change(number, results[0])]
        environment |= dict(zip(op.outputs, results, strict=True))
    return environment


def value_of(environment: dict[int, Any], value: Operand) -> Any:
    """The value of an input of an operation, or of the output of a program."""
    return value.value if isinstance(value, Constant) else environment[value]


def needed(program: ScalarProgram, *values: int) -> tuple[Op, ...]:
    """The operations that compute some values, in order."""
    # Backwards, so that each operation comes after all that read its outputs.
    wanted, kept = set(values), []
    for op in reversed(program.ops):
        if wanted & set(op.outputs):
            wanted |= {number for number in op.inputs if isinstance(number, int)}
            kept.append(op)
    return tuple(reversed(kept))
