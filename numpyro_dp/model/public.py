"""Decides which arrays are public: those that the user names, and small ones.

A record is a row of an argument. Any other array that reaches a model, a guide, an initialiser or a
callback is public only if the user names it or if it is small. The user names it in ``public=`` or
as a static keyword of the constructor. Arrays that a function captures (in a closure, a global or
an object) are found in the traced program and in all programs inside it.

Small means: all such arrays together have at most :func:`allowance` entries, which is 100 or a
quarter of the number of records, whichever is less. Every entry counts, whatever its value. If
zeros or identities were free, the decision would depend on the values of records. The report lists
every accepted array, because code cannot distinguish a table of constants from a statistic of the
records.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import inspect
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from numpyro_dp._compat import CUSTOM_BATCHING, Program, make_program, wrapped_model
from numpyro_dp._tree import is_key
from numpyro_dp.core import Args, Kwargs, NumPyroFn, PyTree
from numpyro_dp.model.held import (
    held_by_function,
    held_by_program,
    is_array,
    numbers_in_program,
    refused_calls,
    written_by_jax,
)

#: Shape, dtype and hash of the values of an array.
Digest = tuple[tuple[int, ...], str, bytes]
_own: set[Digest] = set()
_CAPTURED = "captured"
_WORDS, _KEYS = 8, 2  # of a usual random key, and how many of them may be constants


class UnsupportedModelError(ValueError):
    """The model or guide cannot be made private as it is written.

    Example:
        >>> import jax.numpy as jnp, numpyro, numpyro.distributions as dist
        >>> from numpyro_dp import DPLaplace, PrivacyBudget, UnsupportedModelError
        >>> def model(x):
        ...     mean = numpyro.sample("mean", dist.Normal(0, 1))
        ...     numpyro.sample("x", dist.Normal(mean, 1).expand(x.shape), obs=x)  # no plate
        >>> try:
        ...     DPLaplace(model, budget=PrivacyBudget(1.0, 1e-5)).plan(jnp.ones(1000))
        ... except UnsupportedModelError as error:
        ...     print(str(error).split(",")[0])
        Observed site 'x' is in no plate
    """


class PublicArray(NamedTuple):
    """An array that was accepted as public.

    Attributes:
        place: Where the array was found.
        shape: Its shape.
        dtype: Name of its dtype.
    """

    place: str
    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        """Place, dtype and shape in one line."""
        return f"{self.place}: {self.dtype}{list(self.shape)}"


class Declared(NamedTuple):
    """What the user declared public.

    Attributes:
        names: Names of arguments of the model.
        arrays: Arrays that model, guide or initialisers capture, with their places.
        captured: Whether everything that model and guide capture is public.
    """

    names: tuple[str, ...] = ()
    arrays: tuple[tuple[str, ArrayLike], ...] = ()
    captured: bool = False


def declare(public: PyTree = (), static: Mapping[str, object] | None = None) -> Declared:
    """Returns what ``public=`` and the static keywords of a driver declare public.

    Args:
        public: Names of arguments, arrays, pytrees of arrays or modules of flax.nnx. The entry
            ``"captured"`` stands for everything that model and guide capture. It may also be passed
            without a list.
        static: Static keywords of model and guide.

    Raises:
        TypeError: If an entry is not a name and holds no array.
    """
    public = [public] if public == _CAPTURED else public
    if isinstance(public, str) or not isinstance(public, Iterable) or is_array(public):
        raise TypeError(
            "public= must be a list of names of arguments and of arrays, got "
            f"{type(public).__name__}. Write public=['table'], public=[array], or "
            "public='captured' for everything that model and guide hold."
        )
    names, arrays, captured = [], [], False
    for number, entry in enumerate(public):
        if isinstance(entry, str):
            captured |= entry == _CAPTURED
            names += [entry] if entry != _CAPTURED else []
            continue
        found = list(_arrays_in(entry))
        if not found:
            raise TypeError(
                "Every entry of public= must be the name of an argument, or hold an array, got a "
                f"{type(entry).__name__}. Write public=['table'], or public=[array]."
            )
        arrays += [(f"public=[...] number {number}", leaf) for leaf in found]
    for name, value in (static or {}).items():
        arrays += [(f"static keyword {name!r}", leaf) for leaf in _arrays_in(value)]
    return Declared(tuple(names), tuple(arrays), captured)


def values_given(keyword: str, values: Mapping[str, PyTree] | None) -> tuple[PublicArray, ...]:
    """Returns the report's entries for values that the user passed to a keyword, by name."""
    return tuple(
        PublicArray(f"{keyword}[{name!r}]", tuple(np.shape(leaf)), str(jnp.result_type(leaf)))
        for name, value in (values or {}).items()
        for leaf in jax.tree.leaves(value)
    )


def argument_names(model: NumPyroFn, args: Args) -> list[str]:
    """Returns the names of positional arguments from the model's signature."""
    inner, parameters = model, []
    while inner is not None:
        try:
            parameters = list(inspect.signature(inner, follow_wrapped=False).parameters.values())
        except (TypeError, ValueError):
            parameters = []
        # A wrapper may order arguments in its own way. Only `*args` has those of what it wraps.
        if parameters and parameters[0].kind is not inspect.Parameter.VAR_POSITIONAL:
            break
        inner = wrapped_model(inner)
    by_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    known = [each.name for each in parameters if each.kind in by_place]
    return [known[i] if i < len(known) else f"args[{i}]" for i in range(len(args))]


def record_arguments(
    model: NumPyroFn, kinds: Sequence[str], args: Args, kwargs: Kwargs
) -> list[tuple[str, str]]:
    """Returns, for each array of records, the name of its argument and its place in it.

    Args:
        model: The model.
        kinds: Kind of each array of the arguments, where ``"r"`` stands for records.
        args: Positional arguments.
        kwargs: Keyword arguments.
    """
    leaves = zip(named_leaves(model, args, kwargs), kinds, strict=True)
    return [
        (name, jax.tree_util.keystr(path[2:])) for (name, path, _), kind in leaves if kind == "r"
    ]


def named_leaves(model: NumPyroFn, args: Args, kwargs: Kwargs) -> Iterator[tuple[str, Any, Any]]:
    """The name of its argument, the path and the value of each leaf of the arguments."""
    names = argument_names(model, args)
    for path, leaf in jax.tree_util.tree_leaves_with_path((args, kwargs)):
        yield (names[path[1].idx] if path[0].idx == 0 else path[1].key), path, leaf


def own_constants(*arrays: ArrayLike) -> tuple[Any, ...]:
    """Registers constants of an estimator, such as nodes of a rule, and returns them.

    They are accepted as public wherever a program holds them, so they must not depend on records.

    Example:
        >>> (nodes,) = own_constants(np.linspace(-1, 1, 200))
    """
    _own.update(map(_digest, arrays))
    return arrays


def allowance(number: int) -> int:
    """Returns how many entries all undeclared arrays together may have, for ``number`` records."""
    return min(100, number // 4)


def single_allowance(number: int) -> int:
    """Returns how many different single numbers code and arguments may have.

    This is :func:`allowance`, but at least 25, because constants of the optimiser and of densities
    count too.
    """
    return max(25, allowance(number))


class PublicValues:
    """The accepted public arrays of one model and guide, and the check of further arrays.

    Args:
        declared: What the user declared public.
        plate: Name of the data plate.
        number: Number of records.
        arguments: Public arrays among the arguments.
    """

    plate: str
    number: int

    def __init__(
        self, declared: Declared, plate: str, number: int, arguments: tuple[PublicArray, ...] = ()
    ) -> None:
        self.plate, self.number = plate, number
        self._captured = declared.captured
        self._declared = {_digest(array): place for place, array in declared.arrays}
        # Keys are digests of values. A tuple has one entry for each array with these values.
        # Arguments have numbers as keys, because only their shapes are known here.
        self._taken: dict[Digest | int, tuple[PublicArray, ...]] = dict(enumerate(zip(arguments)))
        self._trusted: set[Digest] = set()
        self._numbers = 0
        for place, array in declared.arrays:
            if place.startswith("static"):
                self._taken[_digest(array)] = (_described(place, array),)

    @property
    def arrays(self) -> tuple[PublicArray, ...]:
        """The arrays that were accepted as public so far."""
        return tuple(each for equal in self._taken.values() for each in equal)

    def __eq__(self, other: object) -> bool:
        """Whether both have accepted the same arrays."""
        return isinstance(other, PublicValues) and self.arrays == other.arrays

    __hash__: None = None  # type: ignore[assignment]

    def copy(self) -> PublicValues:
        """A copy, to which one run can add its own arrays."""
        other = copy.copy(self)
        other._taken, other._trusted = dict(self._taken), set(self._trusted)
        return other

    def to_json(self) -> dict[str, Any]:
        """What was accepted, without its values: hashes of all arrays."""
        known = self._declared.keys() | self._trusted | self._taken.keys()
        # Arguments have numbers as keys, and no digest.
        digests = sorted((*key[:2], key[2].hex()) for key in known if isinstance(key, tuple))
        return {
            "plate": self.plate, "number": self.number, "captured": self._captured,
            "arrays": [[list(shape), dtype, text] for shape, dtype, text in digests],
        }  # fmt: skip

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> PublicValues:
        """Public values that accept the same arrays as those that :meth:`to_json` wrote."""
        public = cls(Declared(captured=found["captured"]), found["plate"], found["number"])
        public._trusted = {
            (tuple(shape), dtype, bytes.fromhex(text)) for shape, dtype, text in found["arrays"]
        }
        return public

    def check(self, what: str, fn: Callable[..., object], *args: PyTree, **how: Any) -> None:
        """Raises if a function calls the host, or captures arrays that are not public.

        Args:
            what: Name of the function, for the message.
            fn: The function. It is traced on the shapes of its arguments.
            *args: Arrays or shapes.
            **how: As for :meth:`check_program`.

        Raises:
            UnsupportedModelError: If the function calls the host, or captures such an array.
        """
        program, _ = make_program(fn, *args, validated=False)
        self.check_program(what, program, **how)

    def check_program(self, what: str, program: Program, **how: Any) -> None:
        """The check of :meth:`check` for a traced program.

        Args:
            what: Name of the program, for the message.
            program: The program.
            **how: As for :meth:`take`.
        """
        for name in refused_calls(program):
            if name == CUSTOM_BATCHING:
                raise UnsupportedModelError(
                    f"The {what} has a custom batching rule (jax.custom_batching.custom_vmap). "
                    "The rule would see all records of a batch together, before they are clipped. "
                    "Write the function without it, and vmap derives a rule itself."
                )
            raise UnsupportedModelError(
                f"The {what} calls the host ({name}), which could print or store records without "
                "clipping and noise. Remove the callback: leave out jax.debug.print, and compute "
                "with jax.numpy instead of pure_callback."
            )
        self._check_numbers(what, program)
        held = held_by_program(program)
        # A NumPy array with one entry is a literal, like a Python number. _check_numbers counts it.
        held = [x for x in held if isinstance(x, jax.Array) or np.size(x) > 1]
        self.take(what, held, **how)

    def _check_numbers(self, what: str, program: Program) -> None:
        """Raises if a program has many single numbers, as a Python loop over records would give."""
        limit = single_allowance(self.number)
        numbers = numbers_in_program(program)
        if self._captured or len(numbers) <= limit:
            return
        # Constants that JAX itself writes come from no record.
        own = len(numbers - written_by_jax().numbers)
        if own > limit:
            raise UnsupportedModelError(
                f"The {what} has {own} different single numbers in its program, for example from a "
                f"loop over a list of numbers. At most {limit} are allowed with {self.number} "
                "records, because they might be values of records. Pass records as arguments. Put "
                "public numbers into one array, and name it in public=[array] of fit or Privacy."
            )

    def trust(self, arrays: Iterable[ArrayLike]) -> None:
        """Accepts constants of a library, without listing them in the report."""
        self._trusted |= {_digest(array) for array in arrays if not is_key(array)}

    def take(
        self, what: str, arrays: Iterable[ArrayLike], *, no_new: str = "", once: bool = False,
        plain: bool = False,
    ) -> None:  # fmt: skip
        """Accepts arrays as public, or raises.

        Args:
            what: Name of the function that holds the arrays, for the message.
            arrays: The arrays.
            no_new: Why small arrays are refused too, unless they were declared or accepted before.
            once: Whether equal arrays count separately, so that many small arrays cannot hold a
                column with few distinct values. For a program that evaluates the function once: in
                one that evaluates it several times, NumPy code makes equal copies.
            plain: Whether ``no_new`` spares arrays of one value and numbers 0, 1, 2 ... They tell
                no more than a single number.
        """
        # An object counts once, however often the program reads it.
        objects = {_identity(array): array for array in _without_few_keys(arrays)}
        found: dict[Digest, int] = {}
        for array in objects.values():
            digest, plain_one = _digest(array), no_new and plain and _is_plain(array)
            found[digest] = found.get(digest, 0) + 1
            if digest in self._declared:
                self._taken[digest] = (_described(self._declared[digest], array),)
            elif digest in self._trusted | _own or digest in _of_jax() or plain_one:
                continue
            elif len(self._taken.get(digest, ())) < (found[digest] if once else 1):
                if no_new and not self._captured:
                    raise UnsupportedModelError(
                        f"The {what} holds an array of shape {np.shape(array)}, {no_new}"
                    )
                self._take_small(what, digest, array)

    def _take_small(self, what: str, digest: Digest, array: ArrayLike) -> None:
        limit = allowance(self.number)
        self._numbers += int(np.size(array))
        if self._numbers > limit and not self._captured:
            raise UnsupportedModelError(
                f"The {what} holds an array of shape {np.shape(array)} that is not an argument. "
                f"With it, such arrays have {self._numbers} entries. At most {limit} are allowed "
                f"with {self.number} records (plate {self.plate!r}), because they are read "
                "without clipping and noise, and might come from records. Pass records as "
                "arguments, with one row for each. If the array is public, name it in "
                "public=[array] of fit or Privacy, or pass it as a static keyword of the "
                "constructor. If NumPy computes it inside the model from public arrays, you cannot "
                "name it: pass public='captured', for everything that model and guide hold."
            )
        place = _described(f"held by the {what}", array)
        self._taken[digest] = (*self._taken.get(digest, ()), place)


@functools.cache
def _of_jax() -> frozenset[Digest]:
    return frozenset(map(_digest, written_by_jax().arrays))


def _without_few_keys(arrays: Iterable[ArrayLike]) -> Iterator[ArrayLike]:
    """Arrays, with the words of random keys. One or two usual keys are left out.

    A model may hold a key, as that of a fixed random projection. Many keys could be a column.
    """
    arrays = list(arrays)
    yield from (array for array in arrays if not is_key(array))
    keys = [jax.random.key_data(array) for array in arrays if is_key(array)]
    # Equal keys count once, since copies of a key tell nothing more.
    few = {array.tobytes() for array in map(np.asarray, keys) if array.size <= _WORDS}
    yield from (array for array in keys if array.size > _WORDS or len(few) > _KEYS)


def _is_plain(array: ArrayLike) -> bool:
    """Whether an array has one value, or the numbers 0, 1, 2 ..."""
    values = np.ravel(np.asarray(array))
    return bool(np.all(values == values[:1]) or np.all(values == np.arange(values.size)))


def _arrays_in(value: object) -> Iterator[ArrayLike]:
    """Arrays among the leaves of a value, or in its attributes if it is not a pytree."""
    leaves = jax.tree.leaves(value)
    if any(is_array(leaf) for leaf in leaves):
        yield from (leaf for leaf in leaves if is_array(leaf))
    elif not isinstance(value, str | int | float | complex | bool | type | None):
        yield from held_by_function(value)


def _identity(array: ArrayLike) -> Hashable:
    """Identifies an array object. For NumPy by memory, because JAX wraps such arrays again."""
    if isinstance(array, jax.Array):
        return id(array)
    view = np.asarray(array)
    return view.__array_interface__["data"][0], view.shape, view.strides


def _described(place: str, array: Any) -> PublicArray:
    return PublicArray(place, tuple(np.shape(array)), str(array.dtype))


def _digest(array: ArrayLike) -> Digest:
    """Identifies an array by shape, dtype and values, in JAX's precision."""
    values = np.asarray(array)
    # NumPy's float64 enters a program as float32, and must still be recognised there.
    values = values.astype(jax.dtypes.canonicalize_dtype(values.dtype))
    text = np.ascontiguousarray(values).tobytes()
    return values.shape, values.dtype.name, hashlib.sha256(text).digest()
