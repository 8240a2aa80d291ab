"""Which outputs of a traced function depend on which inputs: a forward walk over its program.

It shows that priors and guides do not read the records. The walk is conservative: every output of
an unknown operation depends on every input.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from operator import or_

import jax

from numpyro_dp._compat import (
    CALLED,
    ITERATE_INSIDE,
    LOOKUPS,
    LOOPS,
    Equation,
    Program,
    Variable,
    as_program,
    literal,
    make_program,
    programs_in,
)
from numpyro_dp.core import PyTree, Values


def depends_on_inputs(fn: Callable[..., Values], *args: PyTree) -> list[str]:
    """Returns the names of the entries of the dict ``fn(*args)`` that depend on ``args``.

    Args:
        fn: A function of arrays that returns a dict of pytrees of arrays.
        *args: Arrays or ``jax.ShapeDtypeStruct``. Only shapes are used.
    """
    return [name for name, found in inputs_of(fn, *args).items() if found]


def inputs_of(fn: Callable[..., Values], *args: PyTree) -> dict[str, set[int]]:
    """Returns for each entry of the dict ``fn(*args)`` the inputs that it depends on.

    Inputs are counted as leaves of ``args``. For the arguments see :func:`depends_on_inputs`.
    """
    program, out = make_program(fn, *args)
    number = len(program.inputs)
    # One bit for each input, so that one walk finds all dependences.
    bits = _walk(program, [1 << n for n in range(number)], lambda _, flags: reduce(or_, flags, 0))
    entries = jax.tree.unflatten(jax.tree.structure(out), bits)
    found = {name: reduce(or_, jax.tree.leaves(entry), 0) for name, entry in entries.items()}
    return {name: {n for n in range(number) if own >> n & 1} for name, own in found.items()}


def entries_read(fn: Callable[[Values], PyTree], given: Values) -> frozenset[str]:
    """Returns the names of the entries of a dict that ``fn(given)`` depends on."""
    read = inputs_of(lambda given: {"all": fn(given)}, given)["all"]
    paths = jax.tree_util.tree_leaves_with_path(given)
    return frozenset(path[0].key for number, (path, _) in enumerate(paths) if number in read)


def looks_up(
    fn: Callable[..., Values], size: int, index: PyTree, *args: PyTree
) -> tuple[Program, list[str]]:
    """Finds entries of ``fn(index, *args)`` that use ``index`` to look up one of ``size`` entries.

    Args:
        fn: A function of arrays that returns a dict of pytrees of arrays.
        size: Length of the axis of the table.
        index: The array of indices, or its shape.
        *args: Arrays or shapes.

    Returns:
        The traced program, and the names of entries that are looked up.
    """
    program, out = make_program(fn, index, *args, validated=False)
    index_dependent, picked = 1, 2  # 0 for neither: the largest flag of the inputs is passed on

    def rule(eqn: Equation, flags: list[int]) -> int:
        reads = eqn.primitive.name in LOOKUPS and index_dependent in flags[1:]
        return picked if reads and size in eqn.invars[0].aval.shape else max(flags, default=0)

    seeds = [index_dependent] + [0] * (len(program.inputs) - 1)
    flags = _walk(program, seeds, rule)
    entries = jax.tree.unflatten(jax.tree.structure(out), flags)
    return program, [n for n, entry in entries.items() if picked in jax.tree.leaves(entry)]


def loops_by_inputs(program: Program, number: int) -> bool:
    """Whether a loop of a program may take more rounds for some values of its inputs than others.

    Args:
        program: The program.
        number: How many inputs, from the first, may have other values.
    """
    found: list[str] = []

    def rule(eqn: Equation, flags: list[int]) -> int:
        name, params = eqn.primitive.name, eqn.params
        if not any(flags):
            return 0
        if name in ITERATE_INSIDE:
            found.append(name)
        elif name == "while":
            first, last = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
            (condition,), (body,) = map(programs_in, (params["cond_jaxpr"], params["body_jaxpr"]))
            carry = flags[last:]
            while True:  # until no further value that the loop carries varies
                after = _walk(body, [*flags[first:last], *carry], rule)
                if (after := [int(a or b) for a, b in zip(carry, after, strict=True)]) == carry:
                    break
                carry = after
            if any(_walk(condition, [*flags[:first], *carry], rule)):
                found.append(name)
        else:  # of a branch or of a loop with a fixed number of rounds, each input may vary
            for inner in programs_in(list(params.values())):
                _walk(inner, [1] * len(inner.inputs), rule)
        return 1

    _walk(program, [int(n < number) for n in range(len(program.inputs))], rule)
    return bool(found)


def _walk(
    program: Program, seeds: Sequence[int], rule: Callable[[Equation, list[int]], int]
) -> list[int]:
    flags = dict(zip(program.inputs, seeds, strict=True))

    def read(atom: Variable) -> int:
        # Constants of the program depend on no input.
        return 0 if literal(atom) else flags.get(atom, 0)

    for eqn in program.equations:
        inner = _called(eqn)
        inputs = [read(atom) for atom in eqn.invars]
        if inner is None:
            outputs = [rule(eqn, inputs)] * len(eqn.outvars)
        else:
            outputs = _walk(inner, inputs, rule)
        flags.update(zip(eqn.outvars, outputs, strict=True))
    return [read(atom) for atom in program.outputs]


def _called(eqn: Equation) -> Program | None:
    """Returns the body of a call that maps its inputs and outputs one to one, or None."""
    for name in CALLED:
        body = as_program(eqn.params.get(name))
        # One walk through the body of a loop would miss what a round passes on to the next.
        if body is None or eqn.primitive.name in LOOPS:
            continue
        if len(body.inputs) == len(eqn.invars) and len(body.outputs) == len(eqn.outvars):
            return body
    return None
