"""Finds the arrays that a function captures, and calls that cannot be checked.

In a traced program these arrays are constants and literals, also of inner programs (``jit``,
``scan``, ``cond`` and rules for derivatives). Arrays that tracing does not show are found by a
search through the function's closure, defaults and attributes.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.scipy.special
import numpy as np
import numpyro.distributions as dist
from jax.typing import ArrayLike

from numpyro_dp._compat import (
    CUSTOM_BATCHING,
    HOST_CALLS,
    PLACES,
    Equation,
    Program,
    as_program,
    literal,
    make_program,
)
from numpyro_dp._tree import is_key
from numpyro_dp.model.simulated import drawn

# Their functions hold no records of the user. A search through them would reach their registries,
# caches and half of the interpreter.
_LIBRARIES = ("builtins", "equinox", "flax", "jax", "jaxlib", "numpy", "numpyro", "optax", "scipy")


def is_array(leaf: object) -> bool:
    """Whether a value is an array or scalar of JAX or NumPy."""
    return isinstance(leaf, jax.Array | np.ndarray | np.generic)


def held_by_program(found: object) -> Iterator[ArrayLike]:
    """Constants and literals of a traced program and of all programs inside it."""
    for each in _walk(found):
        if isinstance(each, Program):
            yield from (value for _, value in each.constants)
            for equation in each.equations:
                yield from (value for atom in equation.invars for value in literal(atom))
        elif isinstance(each, jax.Array | np.ndarray):
            yield each


def _walk(found: object) -> Iterator[object]:
    """The programs in a value and inside these programs, and everything else that is in them."""
    program = as_program(found)
    if program is not None:
        yield program
        # Inner programs of scan, cond, jit and custom rules are parameters of their equation.
        found = [equation.params for equation in program.equations]
    if isinstance(found, Mapping):
        found = list(found.values())
    if isinstance(found, list | tuple):
        for each in found:
            yield from _walk(each)
    else:
        yield found


def _programs(found: object) -> Iterator[Program]:
    return (each for each in _walk(found) if isinstance(each, Program))


def numbers_in_program(found: object) -> set[float]:
    """The distinct single numbers in a traced program and in all programs inside it.

    These are literals, including returned ones, and NumPy arrays with one entry.
    """
    # A set, because a constant that code repeats tells no more than one. Many different numbers may
    # be a table of records, written out.
    own: set[float] = set()
    for program in _programs(found):
        atoms = [atom for each in program.equations for atom in each.invars]
        values = [value for atom in [*atoms, *program.outputs] for value in literal(atom)]
        values += [x for _, x in program.constants if not isinstance(x, jax.Array)]
        values += _places(program)
        own |= {_number(np.ravel(x)[0]) for x in values if _is_number(x)}
    return own


def _places(program: Program) -> list[int]:
    """Numbers by which a program cuts, pads and raises to powers.

    Those that are not larger than how often it does so are left out, as for a loop over columns.
    """
    found = [
        int(number)
        for equation in program.equations
        for name in PLACES.get(equation.primitive.name, ())
        for number in jax.tree.leaves(equation.params[name])
    ]
    often = sum(equation.primitive.name in PLACES for equation in program.equations)
    return [number for number in found if number > often]


def _is_number(value: ArrayLike) -> bool:
    """Whether a value is one number, not a key or the tangent of an integer (``float0``)."""
    return not is_key(value) and np.size(value) == 1 and np.result_type(value).kind in "biufc"


class Written(NamedTuple):
    """Constants that a library writes into traced programs.

    Attributes:
        numbers: Single numbers.
        arrays: Tables, such as the coefficients of a polynomial.
    """

    numbers: frozenset[float]
    arrays: tuple[ArrayLike, ...]


@functools.cache
def written_by_jax() -> Written:
    """Constants of special functions and random draws of JAX and this package, and of derivatives.

    For example, ``random.binomial`` has a table for Stirling's approximation.
    """
    special, random, key = jax.scipy.special, jax.random, jax.random.key(0)
    functions = [
        *(special.ndtri, special.log_ndtr, special.erfinv, special.gammaln, special.digamma),
        *(special.i0e, special.i1e, special.expi),
        *(lambda x, draw=draw: draw(key, x) for draw in (random.gamma, random.poisson)),
        *(lambda x, draw=draw: draw(key, x, x) for draw in (random.beta, random.binomial)),
        *(lambda x, f=f: f(x, x) for f in (special.betaln, special.gammainc, special.zeta)),
        lambda x: special.betainc(2.0, 3.0, x),
        *(lambda x, f=f: drawn(f(x), key) for f in (dist.Poisson, dist.Gamma, dist.StudentT)),
        lambda x: drawn(dist.BetaBinomial(x, x, 9), key),
        lambda x: (random.normal(key) + random.cauchy(key) + random.t(key, x)) * x,
    ]
    one = jnp.ones(())
    programs = [make_program(lambda x, fn=fn: jax.jvp(fn, (x,), (x,)), one)[0] for fn in functions]
    tables = [x for program in programs for x in held_by_program(program) if np.size(x) > 1]
    return Written(frozenset().union(*map(numbers_in_program, programs)), tuple(tables))


def _number(value: ArrayLike) -> float:
    """A literal as a number. All values that are not finite count as one number."""
    number = complex(value).real
    return number if np.isfinite(number) else np.inf


def held_by_function(fn: object) -> list[ArrayLike]:
    """Arrays that a user's function can reach. Functions of libraries are not searched.

    The search covers partial arguments, closures, defaults, attributes of objects, and globals that
    the code names. It does not find an array that the code reads from a module's attribute.
    """
    found: list[ArrayLike] = []
    _search(fn, found, set(), 0)
    return found


def _search(value: Any, found: list[ArrayLike], seen: set[int], depth: int) -> None:
    # Depth: hand-written nesting fits into eight levels. For example, a partial of a method of an
    # object with a dict of lists of arrays needs five. The limit bounds the recursion in chains of
    # objects. Most callers also check the traced program, which shows any array in use.
    # Ids: references may be cyclic, objects may be unhashable, and == compares arrays by entry.
    if id(value) in seen or depth > 8:
        return
    seen.add(id(value))
    parts: list[object] = []
    if is_array(value):
        found.append(value)
    elif isinstance(value, functools.partial):
        parts = [value.func, *value.args, *value.keywords.values()]
    elif isinstance(value, types.MethodType):
        parts = [value.__func__, value.__self__]
    elif isinstance(value, types.FunctionType):
        if _of_a_library(value):
            return
        cells = [_content(cell) for cell in value.__closure__ or ()]
        named = [value.__globals__.get(name) for name in _names(value.__code__)]
        defaults = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        parts = [*cells, *defaults, *named]
    elif isinstance(value, Mapping):
        parts = list(value.values())  # not the keys: arrays cannot be keys
    elif isinstance(value, list | tuple | set):
        parts = list(value)
    elif hasattr(value, "__wrapped__"):  # for example a function under jax.jit
        parts = [value.__wrapped__]
    elif hasattr(value, "__dict__") and not isinstance(value, type | types.ModuleType):
        parts = list(vars(value).values())
        # A call of an object runs the __call__ of its class, whose closure may hold arrays.
        parts += [vars(each).get("__call__") for each in type(value).__mro__]
    for part in parts:
        _search(part, found, seen, depth + 1)


def _of_a_library(value: object) -> bool:
    return (getattr(value, "__module__", None) or "").partition(".")[0] in _LIBRARIES


def _content(cell: types.CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # the variable has no value yet
        return None


def _names(code: types.CodeType) -> set[str]:
    """Names that a function's code looks up, including the code of inner functions."""
    inner = (each for each in code.co_consts if isinstance(each, types.CodeType))
    return set(code.co_names).union(*map(_names, inner))


def _equations_in(found: object) -> Iterator[Equation]:
    """The operations of a program and of all programs inside it."""
    return (equation for program in _programs(found) for equation in program.equations)


def computes_in_half(found: object) -> bool:
    """Whether a program, or a program inside it, has floating-point values of 16 bits or fewer."""
    atoms = (atom for each in _equations_in(found) for atom in (*each.invars, *each.outvars))
    dtypes = (getattr(atom.aval, "dtype", None) for atom in atoms)
    kept = (dtype for dtype in dtypes if dtype is not None)
    return any(jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4 for dtype in kept)


def refused_calls(found: object) -> Iterator[str]:
    """Names of host calls and of custom batching rules in a program and all programs inside it."""
    for name in (each.primitive.name for each in _equations_in(found)):
        if name == CUSTOM_BATCHING or any(word in name for word in HOST_CALLS):
            yield name
