"""Which part of a model's arguments is records, and which is public.

An argument array whose first axis has the size of the data plate holds one record a row; everything
else is public and reaches the model as it is. A likelihood is only ever evaluated on one record
(:meth:`Layout.arguments`), priors and guides only on a placeholder, so that neither can see
the data.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

__all__ = [
    "Arguments",
    "Layout",
    "Rows",
    "array_shapes",
    "check_arrays",
    "split_arguments",
]


class Rows(NamedTuple):
    """The records, ready for a step.

    Attributes:
        arrays: The arrays whose first axis counts records.
        shared: Public arrays.
        lengths: Numbers of each record that a loop has found once for all its steps.
    """

    arrays: tuple[Array, ...]
    shared: tuple[Array, ...]
    lengths: tuple[Array, ...] = ()


class Layout(NamedTuple):
    """How to put a model's arguments together again; hashable, so that it can be static.

    Attributes:
        treedef: Structure of ``(args, kwargs)``.
        kinds: One letter for each leaf: ``r`` record array, ``s`` shared array, ``c`` constant.
        constants: The constants, in order.
        shapes: Shape without the first axis and dtype of each record array.
        num_examples: Number of records.
    """

    treedef: Any
    kinds: str
    constants: tuple[Any, ...]
    shapes: tuple[tuple[tuple[int, ...], str], ...]
    num_examples: int

    def arguments(self, arrays: tuple[Array, ...], shared: tuple[Array, ...]) -> Arguments:
        """Returns the call arguments with the record arrays filled in."""
        sources = {"r": iter(arrays), "s": iter(shared), "c": iter(self.constants)}
        args, kwargs = jax.tree.unflatten(
            self.treedef, [next(sources[kind]) for kind in self.kinds]
        )
        return Arguments(args, kwargs)

    def example(self, example: tuple[Array, ...], shared: tuple[Array, ...]) -> Arguments:
        """Returns the call arguments for one record, as a data set of one row."""
        return self.arguments(tuple(leaf[None] for leaf in example), shared)

    def rows(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Rows:
        """Splits call arguments into records, where they are, and public arrays."""
        _, arrays, shared = split_arguments(args, kwargs, self.num_examples)
        return Rows(arrays, shared)

    def blank(self) -> tuple[Array, ...]:
        """Returns zeros in the place of a record."""
        return tuple(jnp.zeros(shape, dtype) for shape, dtype in self.shapes)

    def placeholder(self, shared: tuple[Array, ...], num_rows: int = 1) -> Arguments:
        """Returns the call arguments with ones in the place of the records.

        Ones are valid scales, weights, counts and labels; zeros often are not.
        """
        ones = tuple(jnp.ones((num_rows, *shape), dtype) for shape, dtype in self.shapes)
        return self.arguments(ones, shared)

    def invented(self, num_rows: int = 1) -> tuple[tuple[Array, ...], ...]:
        """Returns record arrays to try a model on: normal numbers, and the ones of a placeholder.

        Integers are 1 in both: a valid label, count or index.
        """
        ones = tuple(jnp.ones((num_rows, *shape), dtype) for shape, dtype in self.shapes)
        keys = jax.random.split(jax.random.key(1), len(ones))
        normal = tuple(
            jax.random.normal(key, leaf.shape).astype(leaf.dtype)
            if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf
            for key, leaf in zip(keys, ones, strict=True)
        )  # fmt: skip
        return normal, ones


class Arguments(NamedTuple):
    """Positional and keyword arguments of a model or guide."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def call(self, fn: Callable[..., Any]) -> Any:
        """Calls ``fn`` with these arguments."""
        return fn(*self.args, **self.kwargs)


def array_shapes(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, Any]]:
    """Returns the path and shape of every array among the arguments."""
    leaves = jax.tree_util.tree_leaves_with_path((args, kwargs))
    return [(_path_name(path), np.shape(leaf)) for path, leaf in leaves if _is_array(leaf)]


def check_arrays(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raises for arguments that look like data and are no arrays of numbers, or are empty.

    The message names the argument and its type, and shows no value.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path((args, kwargs)):
        if _is_array(leaf):
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
    args: tuple[Any, ...], kwargs: dict[str, Any], num_examples: int
) -> tuple[Layout, tuple[Any, ...], tuple[Array, ...]]:
    """Splits arguments into records and public values.

    Args:
        args: Positional arguments of the model.
        kwargs: Keyword arguments of the model.
        num_examples: Full size of the data plate.

    Returns:
        The layout, the record arrays (first axis ``num_examples``), as they were given, and the
        shared arrays.

    Raises:
        ValueError: If no array has a row for each record, or if one has its records along
            another axis than the first.
    """
    leaves, treedef = jax.tree_util.tree_flatten_with_path((args, kwargs))
    kinds, constants, rows, shared = "", [], [], []
    for path, leaf in leaves:
        if not _is_array(leaf):
            kinds += "c"
            constants.append(leaf)
        elif np.ndim(leaf) and np.shape(leaf)[0] == num_examples:
            kinds += "r"
            rows.append(leaf)
        elif num_examples > 1 and num_examples in np.shape(leaf):
            raise ValueError(
                f"Expected records along the first axis, got argument {_path_name(path)} of shape "
                f"{np.shape(leaf)} with the data plate's size {num_examples} along a later axis. "
                "Transpose it (and transpose it back inside the model), or pass it as a static "
                "keyword of the constructor if it is public."
            )
        else:
            kinds += "s"
            shared.append(jnp.asarray(leaf))
    numbers = [leaf for leaf in constants if isinstance(leaf, int | float | complex)]
    if 1 < num_examples <= len(numbers):
        raise TypeError(
            f"Expected arrays, got {len(numbers)} Python numbers among the arguments for "
            f"{num_examples} records. Convert lists of records with jnp.asarray: numbers are "
            "public constants."
        )
    if not rows:
        found = array_shapes(args, kwargs)
        raise ValueError(
            f"Expected an argument array with {num_examples} rows, the size of the data plate, got "
            f"{found}. Pass the whole data set (batches are drawn inside), and let the plate's "
            "size be its number of rows."
        )
    shapes = tuple(
        (np.shape(leaf)[1:], jax.dtypes.canonicalize_dtype(leaf.dtype).name) for leaf in rows
    )
    layout = Layout(treedef, kinds, tuple(constants), shapes, num_examples)
    _check_hashable(layout)
    return layout, tuple(rows), tuple(shared)


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray | np.generic)


def _path_name(path: tuple[Any, ...]) -> str:
    which, *rest = path
    name = "args" if getattr(which, "idx", 0) == 0 else "kwargs"
    return name + jax.tree_util.keystr(tuple(rest))


def _check_hashable(layout: Layout) -> None:
    for constant in layout.constants:
        try:
            hash(constant)
        except TypeError as error:
            raise TypeError(
                "Expected arrays or hashable constants as arguments of the model, got a "
                f"{type(constant).__name__}. Convert it to an array."
            ) from error
