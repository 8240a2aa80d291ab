"""What is public besides the records: what somebody said is, and what is small.

A record is a row of an argument. Every other array that reaches a model, a guide, an initialiser or
a callback was either named by the user (``public=``, a static keyword of the constructor), or is a
constant that the function holds by itself: in a closure, a global, an object. Such constants are
found in the traced program and in all programs inside it, those of ``jit``, ``scan``, ``cond`` and
of derivative rules included. They pass if all of them together are few numbers and none has the
shape of the records. Nobody can tell a small table of constants from a small statistic of the
records, so the report lists each array that was taken as public.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_dp._compat import CUSTOM_BATCHING, Program, make_program, wrapped_model
from numpyro_dp.model.held import (
    held_by_function,
    held_by_program,
    is_array,
    is_key,
    numbers_in_program,
    refused_calls,
)

__all__ = [
    "Declared",
    "PublicArray",
    "PublicValues",
    "UnsupportedModelError",
    "argument_names",
    "declare",
    "first_values",
    "holds_records",
    "own_constants",
    "smallness",
]

_FEW, _MOST = 100, 1000  # numbers that a table of constants may have: of few records, of many
_MANY = 50  # below, a multiple of the number of records is too common a size to mean anything
_NEAR = 20  # below, a size near the number of records is too common to mean anything


_own: set[Any] = set()


class UnsupportedModelError(ValueError):
    """A model or guide that cannot be made private as it is written."""


class PublicArray(NamedTuple):
    """An array that was taken as public.

    Attributes:
        place: Where it came from.
        shape: Its shape.
        dtype: Name of its dtype.
    """

    place: str
    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        """Place, dtype and shape in a few words."""
        return f"{self.place}: {self.dtype}{list(self.shape)}"


class Declared(NamedTuple):
    """What a user said is public.

    Attributes:
        names: Names of arguments of the model.
        arrays: Arrays that model, guide or initialisers hold, with their places.
    """

    names: tuple[str, ...] = ()
    arrays: tuple[tuple[str, Any], ...] = ()


def declare(public: Any = (), static: Mapping[str, Any] | None = None) -> Declared:
    """Returns what ``public=`` and the static keywords of a driver say.

    Args:
        public: Names of arguments, and arrays (or pytrees of them, modules of flax.nnx included).
        static: Static keywords of model and guide.

    Raises:
        TypeError: If an entry is neither a name nor holds an array.
    """
    if isinstance(public, str) or not isinstance(public, Iterable) or is_array(public):
        raise TypeError(
            "Expected public= to be a sequence of names of arguments and of arrays, got "
            f"{type(public).__name__}. Write public=['table'], or public=[array]."
        )
    names, arrays = [], []
    for number, entry in enumerate(public):
        if isinstance(entry, str):
            names.append(entry)
            continue
        found = list(_arrays_in(entry))
        if not found:
            raise TypeError(
                "Expected every entry of public= to be the name of an argument, or to hold an "
                f"array, got a {type(entry).__name__}. Write public=['table'], or public=[array]."
            )
        arrays += [(f"public=[...] number {number}", leaf) for leaf in found]
    for name, value in (static or {}).items():
        arrays += [(f"static keyword {name!r}", leaf) for leaf in _arrays_in(value)]
    return Declared(tuple(names), tuple(arrays))


def first_values(init_params: Mapping[str, Any] | None) -> tuple[PublicArray, ...]:
    """Returns what a report says of first values that the user passed."""
    return tuple(
        PublicArray(f"init_params[{name!r}]", tuple(np.shape(leaf)), str(jnp.result_type(leaf)))
        for name, value in (init_params or {}).items()
        for leaf in jax.tree.leaves(value)
    )


def argument_names(model: Callable[..., Any], args: tuple[Any, ...]) -> list[str]:
    """Returns the names of positional arguments by the model's signature."""
    inner = model
    while inner is not None:
        model, inner = inner, wrapped_model(inner)
    try:
        parameters = list(inspect.signature(model).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    by_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    known = [each.name for each in parameters if each.kind in by_place]
    return [known[i] if i < len(known) else f"args[{i}]" for i in range(len(args))]


def own_constants(*arrays: Any) -> tuple[Any, ...]:
    """Returns constants of this package, which pass wherever they are found."""
    _own.update(map(_digest, arrays))
    return arrays


def smallness(number: int) -> int:
    """How many undeclared numbers pass as constants where there are so many records."""
    return max(_FEW, min(number, _MOST))


def holds_records(shape: tuple[int, ...], number: int) -> bool:
    """Whether an array may hold all records: an axis of about their number, or a flattened table.

    Args:
        shape: Its shape.
        number: Number of records.
    """
    if number < 2:
        return False
    near = number // 10 if number >= _NEAR else 0
    flattened = len(shape) == 1 and number >= _MANY and shape[0] % number == 0 and shape[0] > 0
    return flattened or any(abs(size - number) <= near for size in shape)


class PublicValues:
    """Arrays that were taken as public in one model and guide, and the rule for further ones.

    Args:
        declared: What the user said is public.
        plate: Name of the data plate.
        number: Number of records.
        arguments: Public arrays among the arguments.
    """

    def __init__(
        self, declared: Declared, plate: str, number: int, arguments: tuple[PublicArray, ...] = ()
    ) -> None:
        self.plate, self.number = plate, number
        self._declared = {_digest(array): place for place, array in declared.arrays}
        self._taken: dict[Any, PublicArray] = dict(enumerate(arguments))
        self._trusted: set[Any] = set()
        self._numbers = 0
        for place, array in declared.arrays:
            if place.startswith("static"):
                self._taken[_digest(array)] = _described(place, array)

    @property
    def arrays(self) -> tuple[PublicArray, ...]:
        """What was taken as public so far."""
        return tuple(self._taken.values())

    def __eq__(self, other: object) -> bool:
        """Whether the same was taken."""
        return isinstance(other, PublicValues) and self.arrays == other.arrays

    __hash__ = None  # type: ignore[assignment]

    def copy(self) -> PublicValues:
        """The same, for what belongs to one run alone."""
        other = copy.copy(self)
        other._taken = dict(self._taken)
        return other

    def check(self, what: str, fn: Callable[..., Any], *args: Any, any_size: bool = False) -> None:
        """Refuses a function that calls the host, or holds arrays that nobody said are public.

        Args:
            what: Words for the function.
            fn: Traced on the shapes of its arguments.
            *args: Arrays or shapes.
            any_size: Refuses an array of any size that was not declared or found before.

        Raises:
            UnsupportedModelError: Names the shape and the remedies.
        """
        self.check_program(what, make_program(fn, *args)[0], any_size=any_size)

    def check_program(self, what: str, program: Program, *, any_size: bool = False) -> None:
        """The same for a program that has been traced."""
        for name in refused_calls(program):
            if name == CUSTOM_BATCHING:
                raise UnsupportedModelError(
                    f"The {what} has a rule of its own for batches (jax.custom_batching."
                    "custom_vmap): the rule would see the records of a batch together, before "
                    "they are clipped. Write the function without one; vmap finds a rule itself."
                )
            raise UnsupportedModelError(
                f"The {what} calls the host ({name}), where records could be read, printed or "
                "kept without clip and noise. Take the callback out: leave out jax.debug.print, "
                "and compute with jax.numpy instead of pure_callback."
            )
        numbers, limit = len(numbers_in_program(program)), smallness(self.number)
        if numbers > limit:
            raise UnsupportedModelError(
                f"The {what} has {numbers} different single numbers in its program, as a loop over "
                f"a list of numbers writes them. At most {limit} pass beside {self.number} "
                "records, since they might be values of records. Pass records as arguments; pass "
                "public numbers as one array, and say so: public=[array] of the driver."
            )
        held = held_by_program(program)
        held = (jax.random.key_data(x) if is_key(x) and x.size > 1 else x for x in held)
        held = (x for x in held if not is_key(x))
        # A single number of NumPy is like one of Python: part of the program's text.
        held = (x for x in held if isinstance(x, jax.Array) or np.size(x) > 1)
        held = (x for x in held if not _says_nothing(x, self.number))
        self.take(what, held, any_size=any_size)

    def trust(self, arrays: Iterable[Any]) -> None:
        """Lets constants pass that a library made."""
        self._trusted |= {_digest(array) for array in arrays if not is_key(array)}

    def take(self, what: str, arrays: Iterable[Any], *, any_size: bool = False) -> None:
        """Takes arrays as public, or refuses them.

        Args:
            what: Words for what holds them.
            arrays: The arrays.
            any_size: Refuses an array of any size that was not declared.
        """
        for array in arrays:
            digest = _digest(array)
            if digest in self._declared:
                self._taken[digest] = _described(self._declared[digest], array)
            elif digest in self._taken or digest in self._trusted | _own:
                continue
            elif any_size:
                raise UnsupportedModelError(
                    f"The {what} holds an array of shape {np.shape(array)}, which becomes a first "
                    "value and is published without noise. Where it reads no record, pass it as "
                    "init_params= of run or init, or say that it is public: public=[array]."
                )
            else:
                self._take_small(what, digest, array)

    def _take_small(self, what: str, digest: Any, array: Any) -> None:
        shape, limit = np.shape(array), smallness(self.number)
        remedy = (
            "Pass records as arguments, with one row for each. If the array is public, say so: "
            "public=[array] of the driver, or pass it to the model as a static keyword of the "
            "constructor."
        )
        if holds_records(shape, self.number):
            raise UnsupportedModelError(
                f"The {what} holds an array of shape {shape}, with an entry for each record of "
                f"plate {self.plate!r} (or about as many), that is no argument: it would be read "
                f"without clip and noise. {remedy}"
            )
        self._numbers += int(np.prod(shape))
        if self._numbers > limit:
            raise UnsupportedModelError(
                f"The {what} holds an array of shape {shape} that is no argument; with it, arrays "
                f"that nobody declared have {self._numbers} numbers. At most {limit} pass as "
                f"constants beside {self.number} records. {remedy}"
            )
        self._taken[digest] = _described(f"held by the {what}", array)


def _arrays_in(value: Any) -> Iterator[Any]:
    """Arrays among the leaves of a value; those of an nnx module that is no pytree are its state's.

    An object that is neither is looked through by its attributes.
    """
    leaves = jax.tree.leaves(value)
    if any(is_array(leaf) for leaf in leaves):
        yield from (leaf for leaf in leaves if is_array(leaf))
    elif not isinstance(value, str | int | float | complex | bool | type | None):
        yield from held_by_function(value)


def _says_nothing(array: Any, number: int) -> bool:
    """Whether one or two numbers say all of an array: an identity, or equal entries or steps.

    So do those of a triangle: its mask, and the rows and columns of its entries.
    """
    if np.size(array) < 2:
        return False
    values = np.asarray(array)
    first = values.flat[0]
    matrix = values.reshape(-1, *values.shape[-2:])[0] if values.ndim > 2 else values
    if any((values == each).all() for each in _of_triangles(matrix)):
        return True
    if holds_records(values.shape, number):  # records may happen to be all alike
        return False
    if (values == first).all():
        return True
    if values.ndim != 1 or not np.issubdtype(values.dtype, np.integer):
        return False
    steps = np.diff(values)
    return bool((steps == steps[0]).all())


def _of_triangles(values: Any) -> Iterator[np.ndarray]:
    """Tables of a given shape that make triangular matrices, in NumPyro's transforms, say."""
    rows = len(values)
    if values.ndim == 2 and values.shape[1] == rows:
        yield values[0, 0] * np.eye(rows)
        for lower in (np.tri(rows, k=offset) for offset in (-1, 0)):
            yield from (lower, lower.T, 1 - lower, 1 - lower.T)
    elif values.ndim == 2 and values.shape[1] == 2:
        yield np.stack([np.arange(rows)] * 2, 1)  # places of a diagonal
    elif values.ndim == 1 and np.issubdtype(values.dtype, np.integer):
        size = math.isqrt(2 * rows)  # there are size * (size + 1) / 2 entries, or as many less size
        for side, offset in ((size, 0), (size + 1, 1)):
            if side * (side + 1 - 2 * offset) == 2 * rows:
                yield from np.tril_indices(side, -offset)
                yield from np.triu_indices(side, offset)


def _described(place: str, array: Any) -> PublicArray:
    return PublicArray(place, tuple(np.shape(array)), str(array.dtype))


def _digest(array: Any) -> Any:
    """What tells arrays apart: shape and values, in the precision in which JAX takes them."""
    values = np.asarray(array)
    values = values.astype(jax.dtypes.canonicalize_dtype(values.dtype))
    text = np.ascontiguousarray(values).tobytes()
    return values.shape, values.dtype.name, hashlib.sha256(text).digest()
