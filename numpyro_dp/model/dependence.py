"""What in a traced function depends on what: a forward walk over its jaxpr.

Used to show that priors and guides do not read the records. The walk is conservative: where it does
not know an operation, every output depends on every input.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

__all__ = [
    "depends_on_inputs",
    "looks_up",
]

_LOOKUPS = ("gather", "dynamic_slice")
_CALLS = ("jaxpr", "call_jaxpr")


def depends_on_inputs(fn: Callable[..., dict[str, Any]], *args: Any) -> dict[str, bool]:
    """Returns for each entry of the dict ``fn(*args)`` whether it depends on ``args``.

    Args:
        fn: A function of arrays that returns a dict of pytrees of arrays.
        *args: Arrays or ``jax.ShapeDtypeStruct``; only shapes are used.
    """
    closed, out = jax.make_jaxpr(fn, return_shape=True)(*args)
    seeds = [True] * len(closed.jaxpr.invars)
    flags = _walk(closed.jaxpr, seeds, lambda eqn, flags: any(flags))
    entries = jax.tree.unflatten(jax.tree.structure(out), flags)
    return {name: any(jax.tree.leaves(entry)) for name, entry in entries.items()}


def looks_up(
    fn: Callable[..., dict[str, Any]], size: int, index: Any, *args: Any
) -> tuple[ClosedJaxpr, dict[str, bool]]:
    """Returns a program, and which entries of ``fn(index, *args)`` pick from ``size`` entries.

    Args:
        fn: A function of arrays that returns a dict of pytrees of arrays.
        size: Length of the axis that is looked for.
        index: The array of indices, or its shape.
        *args: Arrays or shapes.
    """
    closed, out = jax.make_jaxpr(fn, return_shape=True)(index, *args)
    index_dependent, picked = 1, 2

    def rule(eqn: Any, flags: list[int]) -> int:
        reads = eqn.primitive.name in _LOOKUPS and index_dependent in flags[1:]
        return picked if reads and size in eqn.invars[0].aval.shape else max(flags, default=0)

    seeds = [index_dependent] + [0] * (len(closed.jaxpr.invars) - 1)
    flags = _walk(closed.jaxpr, seeds, rule)
    entries = jax.tree.unflatten(jax.tree.structure(out), flags)
    return closed, {name: picked in jax.tree.leaves(entry) for name, entry in entries.items()}


def _walk(jaxpr: Jaxpr, seeds: Sequence[int], rule: Callable[[Any, list[int]], int]) -> list[int]:
    flags = dict(zip(jaxpr.invars, seeds, strict=True))

    def read(atom: Any) -> int:
        return False if isinstance(atom, Literal) else flags.get(atom, False)

    for eqn in jaxpr.eqns:
        inner = _called(eqn)
        inputs = [read(atom) for atom in eqn.invars]
        if inner is None:
            outputs = [rule(eqn, inputs)] * len(eqn.outvars)
        else:
            outputs = _walk(inner, inputs, rule)
        flags.update(zip(eqn.outvars, outputs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _called(eqn: Any) -> Jaxpr | None:
    """Returns the body of a call that maps its inputs and outputs one to one, or None."""
    for name in _CALLS:
        body = eqn.params.get(name)
        body = body.jaxpr if isinstance(body, ClosedJaxpr) else body
        if not isinstance(body, Jaxpr) or eqn.primitive.name in ("scan", "while", "cond"):
            continue
        if len(body.invars) == len(eqn.invars) and len(body.outvars) == len(eqn.outvars):
            return body
    return None
