"""Splits a model's arguments into records and public values.

An argument array whose first axis has the size of the data plate holds one record in each row. The
user must declare every other argument array public (:mod:`numpyro_dp.model.public`). Likelihoods
are evaluated on one record only (:meth:`Layout.arguments`). Priors and guides get a placeholder, so
they cannot read records.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpyro import handlers

from numpyro_dp._tree import on_device
from numpyro_dp.core import Args, Arrays, Kwargs, NumPyroFn, PyTree, Sites, Values
from numpyro_dp.model.held import is_array
from numpyro_dp.model.public import (
    Declared,
    PublicArray,
    PublicValues,
    argument_names,
    named_leaves,
    single_allowance,
)
from numpyro_dp.model.units import Grouped, Units, split_unit


class Rows(NamedTuple):
    """The records, ready for a step.

    Attributes:
        arrays: The arrays whose first axis counts records.
        shared: Public arrays.
        lengths: Values of each record that a loop computes once for all its steps.
    """

    arrays: tuple[Array | Grouped | jax.ShapeDtypeStruct, ...]
    shared: Arrays
    lengths: Arrays = ()


class Layout(NamedTuple):
    """How to rebuild a model's arguments. Hashable, so it can be static under ``jit``.

    Attributes:
        treedef: Structure of ``(args, kwargs)``.
        kinds: One letter for each leaf: ``r`` record array, ``s`` shared array, ``c`` constant.
        constants: The constants, in order.
        shapes: Shape without the first axis, and dtype, of each record array.
        num_examples: Number of records.
        public: Descriptions of the shared arrays.
        max_rows: Most rows of a unit, or ``None`` if a row is a record. Then a record has arrays of
            ``max_rows`` rows, and a mask (:mod:`numpyro_dp.model.units`).
    """

    treedef: Any
    kinds: str
    constants: tuple[object, ...]
    shapes: tuple[tuple[tuple[int, ...], str], ...]
    num_examples: int
    public: tuple[PublicArray, ...] = ()
    max_rows: int | None = None

    def arguments(self, arrays: tuple[PyTree, ...], shared: Arrays) -> Arguments:
        """Returns the call arguments with the record arrays filled in."""
        sources = {"r": iter(arrays), "s": iter(shared), "c": iter(self.constants)}
        leaves = [next(sources[kind]) for kind in self.kinds]
        return Arguments(*jax.tree.unflatten(self.treedef, leaves))

    def example(self, example: Arrays, shared: Arrays) -> Arguments:
        """Returns the call arguments for one row, as a data set of one row."""
        return self.arguments(tuple(leaf[None] for leaf in example), shared)

    def rows(self, args: Args, kwargs: Kwargs) -> Rows:
        """Splits call arguments into records, on their present device, and public arrays."""
        ids, kwargs = split_unit(kwargs, self.max_rows)
        leaves = list(zip(self.kinds, jax.tree.leaves((args, kwargs)), strict=True))
        shared = tuple(jnp.asarray(leaf) for kind, leaf in leaves if kind == "s")
        arrays = tuple(leaf for kind, leaf in leaves if kind == "r")
        if self.max_rows is not None:
            units = Units(ids, len(arrays[0]), self.num_examples, self.max_rows)
            arrays = tuple(Grouped(each, units) for each in (*arrays, None))
        return Rows(arrays, shared)

    def blank(self) -> Arrays:
        """Returns zeros in place of a record."""
        rows = () if self.max_rows is None else (self.max_rows,)
        mask = () if self.max_rows is None else (((), "float32"),)
        return tuple(jnp.zeros((*rows, *shape), kind) for shape, kind in (*self.shapes, *mask))

    def one_row(self) -> list[jax.ShapeDtypeStruct]:
        """Returns the shapes of the record arrays of a data set of one row."""
        return [jax.ShapeDtypeStruct((1, *shape), dtype) for shape, dtype in self.shapes]

    def placeholder(self, shared: Arrays, num_rows: int = 1) -> Arguments:
        """Returns the call arguments with ones in place of the records.

        Ones are valid scales, weights, counts and labels. Zeros often are not.
        """
        # Not of NumPy: in a trace, an array that it made would count as one that the model holds.
        ones = tuple(jnp.ones((num_rows, *shape), dtype) for shape, dtype in self.shapes)
        return self.arguments(ones, shared)

    def invented_records(self, number: int = 1) -> tuple[Arrays, ...]:
        """Returns two sets of invented records, as :meth:`invented` does for rows."""
        if self.max_rows is None:
            return self.invented(number)
        shape = number, self.max_rows
        return tuple(
            (*(x.reshape(*shape, *x.shape[1:]) for x in rows), on_device(np.ones(shape, "f4")))
            for rows in self.invented(number * self.max_rows)
        )

    def invented(self, num_rows: int = 1) -> tuple[Arrays, ...]:
        """Returns two sets of invented rows for checks: normal numbers, and ones.

        Integers are 1 in both sets, because 1 is a valid label, count or index.
        """
        # NumPy, because JAX would compile.
        ones = tuple(on_device(np.ones((num_rows, *shape), kind)) for shape, kind in self.shapes)
        # Numbers of a fixed seed: invented records must not depend on the real ones.
        rng = np.random.default_rng(1)
        normal = tuple(
            on_device(rng.normal(size=leaf.shape), leaf.dtype)
            if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf
            for leaf in ones
        )  # fmt: skip
        return normal, ones


def has_finite_signal(problem: Any, signal: Callable[..., PyTree], params: Values) -> bool:
    """Whether any invented record has a finite signal."""
    normal, ones = problem.records.layout.invented_records()
    # Most sites support 1. Halves serve sites on proportions, and identities those on matrices.
    normal, ones = (tuple(map(np.asarray, rows)) for rows in (normal, ones))
    halves = tuple(x // 2 if x.dtype.kind in "iub" else (x / 2).astype(x.dtype) for x in ones)
    squares = tuple(_identity_like(leaf) for leaf in ones)
    for rows in (normal, ones, halves, squares):
        extra = problem.blank_example()[len(rows) :]
        found = signal(params, tuple(leaf[0] for leaf in rows) + extra)
        if all(np.isfinite(np.asarray(leaf)).all() for leaf in jax.tree.leaves(found)):
            return True
    return False


def is_finite(example: Arrays) -> Array:
    """Whether all numbers of a record are finite.

    Some densities are finite where a column is not: that of 0 under ``Bernoulli(logits=nan)`` is 1.
    """
    floats = [leaf for leaf in example if jnp.issubdtype(leaf.dtype, jnp.floating)]
    return jnp.all(jnp.array([jnp.all(jnp.isfinite(leaf)) for leaf in floats]))


def _identity_like(rows: np.ndarray) -> np.ndarray:
    """Returns identities if rows are square matrices, else the rows."""
    square = rows.ndim > 2 and rows.shape[-1] == rows.shape[-2]
    return np.broadcast_to(np.eye(rows.shape[-1], dtype=rows.dtype), rows.shape) if square else rows


class Records(NamedTuple):
    """The split of the arguments, and the public arrays.

    Attributes:
        layout: How arguments split.
        public: The accepted public arrays, and the check of further arrays.
        data_plate: Name of the plate over records.

    Example:
        >>> import numpy as np
        >>> from numpyro_dp.extend import read_records
        >>> read_records(lambda x: None, (np.ones((100, 2)),), {}, 100).layout.shapes
        (((2,), 'float32'),)
    """

    layout: Layout
    public: PublicValues
    data_plate: str


class ModelStructure(NamedTuple):
    """Static facts about a model.

    Attributes:
        data_plate: Name of the plate over records.
        layout: How arguments split into records and public values.
        latents: Names of the (global) latent sites.
        likelihood: Names of the observed sites in the data plate.
        prior_factors: Names of factors and observed sites outside the data plate. They read no
            record.
        params: Names of the model's own ``numpyro.param`` sites.
        local_latents: Names of the continuous latent sites in the data plate.
        summed: The discrete latent sites in the data plate, with the indices of their values in
            each combination.
        draws: Whether the model asks for random keys, for example for dropout.
        bounded: Names of the observed sites whose values may be outside of a fixed support.
        indexed: Whether a record looks up entries of a table by an index of its own.
        public: The accepted public arrays.

    Example:
        >>> import numpyro, numpyro.distributions as dist
        >>> from numpyro_dp import Privacy
        >>> def model(x):
        ...     mean = numpyro.sample("mean", dist.Normal(3, 1))
        ...     with numpyro.plate("records", x.shape[0]):
        ...         numpyro.sample("x", dist.Normal(mean, 1), obs=x)
        >>> given = Privacy().given_model(model, {})
        >>> given.structure((np.ones(100),), {}).latents
        ('mean',)
    """

    data_plate: str
    layout: Layout
    latents: tuple[str, ...]
    likelihood: tuple[str, ...]
    prior_factors: tuple[str, ...]
    params: tuple[str, ...]
    local_latents: tuple[str, ...] = ()
    summed: dict[str, np.ndarray] = {}  # noqa: RUF012 - never written to
    draws: bool = False
    public: PyTree = None
    bounded: tuple[str, ...] = ()
    indexed: bool = False

    @property
    def inside(self) -> tuple[str, ...]:
        """Names of all sites in the data plate."""
        return self.likelihood + self.local_latents + tuple(self.summed)

    @property
    def outside(self) -> tuple[str, ...]:
        """Names of the global latent sites and of factors that read no record."""
        return self.latents + self.prior_factors

    @property
    def records(self) -> Records:
        """The split of the arguments, and the public arrays."""
        return Records(self.layout, self.public, self.data_plate)


class Arguments(NamedTuple):
    """Positional and keyword arguments of a model or guide."""

    args: Args
    kwargs: Kwargs

    def call(self, fn: Callable[..., PyTree]) -> PyTree:
        """Calls ``fn`` with these arguments."""
        return fn(*self.args, **self.kwargs)

    def trace(self, fn: NumPyroFn) -> Sites:
        """NumPyro's trace of ``fn`` on these arguments."""
        return self.call(handlers.trace(fn).get_trace)


class RecordsProblem(NamedTuple):
    """A problem that is nothing but records: what a session needs where no model is read.

    Attributes:
        records: How arguments split into records and public values.
        shared: Public arrays; none.

    Example:
        >>> import numpy as np
        >>> from numpyro_dp.extend import read_records
        >>> records = read_records(lambda x: None, (np.ones((100, 2)),), {}, 100)
        >>> RecordsProblem(records).num_examples
        100
    """

    records: Records
    shared: Arrays = ()

    @property
    def num_examples(self) -> int:
        """Number of records."""
        return self.records.layout.num_examples

    @property
    def numbered(self) -> bool:
        """No record draws for itself."""
        return False

    def at(self, shared: Arrays) -> RecordsProblem:
        """Returns the same with these public arrays."""
        return self._replace(shared=shared)

    def constrain(self, params: Values) -> Values:
        """Returns the parameters as they are published."""
        return params

    def rows(self, args: Args, kwargs: Kwargs) -> Rows:
        """Returns the records."""
        return self.records.layout.rows(args, kwargs)

    def blank_example(self) -> Arrays:
        """Returns zeros in the place of a record."""
        return self.records.layout.blank()


def split_arrays(tree: PyTree) -> tuple[list[Array | np.ndarray], Callable[[PyTree], PyTree]]:
    """Returns the arrays in a tree, and a function that puts other arrays in their places."""
    leaves, treedef = jax.tree.flatten(tree)
    slots = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array | np.ndarray)]

    def fill(arrays: PyTree) -> PyTree:
        filled = list(leaves)
        for slot, array in zip(slots, arrays, strict=True):
            filled[slot] = array
        return jax.tree.unflatten(treedef, filled)

    return [leaves[slot] for slot in slots], fill


def array_shapes(args: Args, kwargs: Kwargs) -> list[tuple[str, tuple[int, ...]]]:
    """Returns the path and shape of every array among the arguments."""
    leaves = jax.tree_util.tree_leaves_with_path((args, kwargs))
    return [(_path_name(path), np.shape(leaf)) for path, leaf in leaves if is_array(leaf)]


def check_arrays(args: Args, kwargs: Kwargs) -> None:
    """Raises for arguments that look like data but are not arrays of numbers, or are empty.

    The message names the argument and its type, but never a value, which could be a record's.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path((args, kwargs)):
        if is_array(leaf):
            if np.ndim(leaf) and np.shape(leaf)[0] == 0:
                raise ValueError(
                    f"Expected at least one record, got {_path_name(path)} of shape "
                    f"{np.shape(leaf)}. Pass the whole data set."
                )
            if any(jnp.issubdtype(leaf.dtype, kind) for kind in (np.number, np.bool_)):
                continue
            what, remedy = f"an array of dtype {leaf.dtype}", "Encode it as numbers"
        elif hasattr(leaf, "__array__"):
            what, remedy = f"a {type(leaf).__name__}", "Convert it with numpy.asarray"
        else:
            continue
        raise TypeError(
            f"Expected numbers in NumPy or JAX arrays, got {what} as {_path_name(path)}. {remedy}, "
            "or pass it as a static keyword of the constructor if it is public."
        )


def split_arguments(
    args: Args,
    kwargs: Kwargs,
    num_examples: int,
    model: NumPyroFn,
    plate: str,
    declared: Declared,
    plate_is_named: bool = False,
    num_records: int | None = None,
) -> Layout:
    """Finds out which arguments are records, and which are public.

    Args:
        args: Positional arguments of the model.
        kwargs: Keyword arguments of the model.
        num_examples: Full size of the data plate.
        model: The model, whose signature has the names of the arguments.
        plate: Name of the data plate.
        declared: What the user declared public.
        plate_is_named: Whether the user named the plate. Then square arrays count as records.
        num_records: Number of records, if they are units of several rows.

    Raises:
        ValueError: If an undeclared array does not have a row for each record, or if it could be
            read either way. Also if no array has a row for each record, or if ``public=`` has a
            name that is not an argument.
    """
    known = (*argument_names(model, args), *kwargs)
    if unknown := [name for name in declared.names if name not in known]:
        raise ValueError(
            f"public= has {unknown}, but the model's arguments are {sorted(known)}. Use the names "
            "in the model's signature."
        )
    kinds, constants, rows, public, refused = "", [], [], [], []
    for name, path, leaf in named_leaves(model, args, kwargs):
        place = _place(path, name)
        if not is_array(leaf):
            kinds += "c"
            constants.append(leaf)
        # An array of one number is public like a Python number. `_check_few_numbers` limits them.
        elif name in declared.names or not np.ndim(leaf):
            kinds += "s"
            public.append(PublicArray(place, np.shape(leaf), str(leaf.dtype)))
        else:
            # Not public, so a record array, even if its shape says otherwise: then it is refused.
            kinds += "r"
            rows.append(leaf)
            refused += _ambiguity(place, name, leaf, num_examples, plate, plate_is_named)
    scalars = sum(not each.shape for each in public)
    _check_few_numbers(constants, scalars, num_records or num_examples)
    _check_there_are_records(args, kwargs, num_examples, rows, declared.names)
    # After the checks above, whose messages name the likelier mistake.
    if refused:
        raise ValueError(refused[0])
    _check_no_list_of_records(args, kwargs, num_examples)
    shapes = tuple(
        (np.shape(leaf)[1:], jax.dtypes.canonicalize_dtype(leaf.dtype).name) for leaf in rows
    )
    _check_hashable(constants)
    treedef = jax.tree.structure((args, kwargs))
    return Layout(treedef, kinds, tuple(constants), shapes, num_examples, tuple(public))


def read_records(
    signature: NumPyroFn, args: Args, kwargs: Kwargs, num_examples: int, data_plate: str = "records"
) -> Records:
    """Returns the records of a method without a NumPyro model. Each row of an array is a record.

    Args:
        signature: A function whose signature names the arguments. It is not called.
        args: Positional arguments.
        kwargs: Keyword arguments.
        num_examples: Number of records.
        data_plate: Name for the records in the report.

    Example:
        >>> import numpy as np
        >>> x, y = np.ones((100, 2)), np.ones(100)
        >>> read_records(lambda x, y: None, (x, y), {}, 100).layout.num_examples
        100
    """
    check_arrays(args, kwargs)
    layout = split_arguments(args, kwargs, num_examples, signature, data_plate, Declared(), True)
    return Records(layout, PublicValues(Declared(), data_plate, num_examples), data_plate)


def _check_there_are_records(
    args: Args, kwargs: Kwargs, number: int, rows: list[Array | np.ndarray], public: tuple[str, ...]
) -> None:
    found = array_shapes(args, kwargs)
    if not any(shape[:1] == (number,) for _, shape in found):
        raise ValueError(
            f"The data plate has size {number}, so an argument array with {number} rows is needed, "
            f"got {found}. Pass the whole data set to run, init and update, and let the plate's "
            "size be its number of rows. Do not pass records to the constructor, whose keywords "
            "are public. Arrays inside an object count only if the object is a pytree "
            "(jax.tree_util.register_dataclass)."
        )
    if not rows:
        raise ValueError(
            f"No argument array holds the {number} records: public={list(public)} names all of "
            f"{found}. Name only public arguments, not the records."
        )


def _ambiguity(
    place: str, name: str, leaf: Array | np.ndarray, number: int, plate: str, plate_is_named: bool
) -> list[str]:
    """Error messages for an array that is not clearly an array of records. Empty if it is."""
    shape = np.shape(leaf)
    say = f"If it comes from no record, declare it public: public=[{name!r}]."
    if shape[0] != number:
        how = "If it holds values of records, give it one row for each record."
        if number > 1 and number in shape:
            how = f"Transpose it (and transpose it back inside the model). {how}"
        elif len(shape) == 1 and jnp.issubdtype(leaf.dtype, np.integer):
            # Declaring these public would publish which records they are.
            how = (
                "If it lists some of the records (missing rows, say), do not declare it public: "
                f"pass a mask with one entry for each record instead. {how}"
            )
        if shape[0] > number:
            how += f" If the array with {number} rows has its records in columns, transpose it."
        return [
            f"Expected {number} rows (plate {plate!r}) in every argument array, got {place} of "
            f"shape {shape}. {how} {say}"
        ]
    if number > 1 and number in shape[1:] and not plate_is_named:
        return [
            f"Cannot tell which axis of {place} counts records: its shape {shape} has {number} "
            f"entries along several axes, and plate {plate!r} has {number} records. If each row "
            f"belongs to one record, pass Privacy(data_plate={plate!r}). A matrix between records "
            f"(distances, a Gram matrix) cannot be passed, because a row involves all records. "
            f"{say}"
        ]
    return []


def _check_few_numbers(constants: list[object], scalars: int, num_examples: int) -> None:
    """Raises for lists of records, because Python numbers and 0-d arrays count as public."""
    numbers = [leaf for leaf in constants if isinstance(leaf, int | float | complex)]
    for found, what in ((len(numbers), "Python numbers"), (scalars, "arrays of one number")):
        # As many numbers as records may be a column of the data.
        if 1 < num_examples <= found or found > single_allowance(num_examples):
            raise TypeError(
                f"The arguments contain {found} {what} for {num_examples} records. Numbers count "
                "as public constants, but these may be records. Convert lists of records with "
                "jnp.asarray."
            )


def _check_no_list_of_records(args: Args, kwargs: Kwargs, number: int) -> None:
    """Raises for a list with one array per record, which would be read as a list of columns."""

    def is_list(node: PyTree) -> bool:
        # With two records, a pair of columns would look the same.
        several = isinstance(node, list | tuple) and len(node) == number > 2
        return several and all(map(is_array, node))

    for path, leaf in jax.tree_util.tree_leaves_with_path((args, kwargs), is_leaf=is_list):
        if is_list(leaf) and len(path) > 1:
            raise ValueError(
                f"Expected one array with a row for each record, got a {type(leaf).__name__} of "
                f"{number} arrays as {_path_name(path)}. Join them with jnp.stack."
            )


def _path_name(path: tuple[Hashable, ...]) -> str:
    which, *rest = path
    name = "args" if getattr(which, "idx", 0) == 0 else "kwargs"
    return name + jax.tree_util.keystr(tuple(rest))


def _place(path: tuple[Hashable, ...], name: str) -> str:
    """Describes an argument by its name and its path."""
    where = _path_name(path)
    inside = jax.tree_util.keystr(tuple(path[2:]))
    return f"argument {where}" if name == where else f"argument {name}{inside} ({where})"


def _check_hashable(constants: list[object]) -> None:
    for constant in constants:
        try:
            # Constants are static under jit, which compares them by their hash.
            hash(constant)
        except TypeError as error:
            raise TypeError(
                f"An argument of the model is a {type(constant).__name__}, which is neither an "
                "array nor hashable, so it cannot be a constant. If it is public, pass it as a "
                "static keyword of the constructor, or make it a frozen dataclass. If it holds "
                "records, pass their arrays, or register its class as a pytree "
                "(jax.tree_util.register_dataclass)."
            ) from error
