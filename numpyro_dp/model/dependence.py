"""Which outputs of a traced function depend on which inputs: a forward walk over its jaxpr.

It shows that priors and guides do not read the records. The walk is conservative: every output of
an unknown operation depends on every input.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from numpyro_dp._compat import CALLED, LOOKUPS, LOOPS, Program, as_program, literal, make_program

__all__ = [
    "depends_on_inputs",
    "looks_up",
]


def depends_on_inputs(fn: Callable[..., dict[str, Any]], *args: Any) -> dict[str, bool]:
    """Returns for each entry of the dict ``fn(*args)`` whether it depends on ``args``.

    Args:
        fn: A function of arrays that returns a dict of pytrees of arrays.
        *args: Arrays or ``jax.ShapeDtypeStruct``. Only shapes are used.
    """
    program, out = make_program(fn, *args)
    flags = _walk(program, [True] * len(program.inputs), lambda eqn, flags: any(flags))
    entries = jax.tree.unflatten(jax.tree.structure(out), flags)
    return {name: any(jax.tree.leaves(entry)) for name, entry in entries.items()}


def looks_up(
    fn: Callable[..., dict[str, Any]], size: int, index: Any, *args: Any
) -> tuple[Program, dict[str, bool]]:
    """Finds entries of ``fn(index, *args)`` that use ``index`` to look up one of ``size`` entries.

    Args:
        fn: A function of arrays that returns a dict of pytrees of arrays.
        size: Length of the axis of the table.
        index: The array of indices, or its shape.
        *args: Arrays or shapes.

    Returns:
        The traced program, and for each entry whether it is looked up.
    """
    program, out = make_program(fn, index, *args, validated=False)
    index_dependent, picked = 1, 2  # 0 for neither: the largest flag of the inputs is passed on

    def rule(eqn: Any, flags: list[int]) -> int:
        reads = eqn.primitive.name in LOOKUPS and index_dependent in flags[1:]
        return picked if reads and size in eqn.invars[0].aval.shape else max(flags, default=0)

    seeds = [index_dependent] + [0] * (len(program.inputs) - 1)
    flags = _walk(program, seeds, rule)
    entries = jax.tree.unflatten(jax.tree.structure(out), flags)
    return program, {name: picked in jax.tree.leaves(entry) for name, entry in entries.items()}


def _walk(
    program: Program, seeds: Sequence[int], rule: Callable[[Any, list[int]], int]
) -> list[int]:
    flags = dict(zip(program.inputs, seeds, strict=True))

    def read(atom: Any) -> int:
        return False if literal(atom) else flags.get(atom, False)

    for eqn in program.equations:
        inner = _called(eqn)
        inputs = [read(atom) for atom in eqn.invars]
        if inner is None:
            outputs = [rule(eqn, inputs)] * len(eqn.outvars)
        else:
            outputs = _walk(inner, inputs, rule)
        flags.update(zip(eqn.outvars, outputs, strict=True))
    return [read(atom) for atom in program.outputs]


def _called(eqn: Any) -> Program | None:
    """Returns the body of a call that maps its inputs and outputs one to one, or None."""
    for name in CALLED:
        body = as_program(eqn.params.get(name))
        if body is None or eqn.primitive.name in LOOPS:
            continue
        if len(body.inputs) == len(eqn.invars) and len(body.outputs) == len(eqn.outvars):
            return body
    return None
