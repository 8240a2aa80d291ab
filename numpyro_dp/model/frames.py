"""Data frames as arguments, and columns made into a matrix by public categories and bounds."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import narwhals.stable.v1 as nw
import numpy as np

from numpyro_dp._validate import check_real
from numpyro_dp.core import Args, Kwargs
from numpyro_dp.model.units import UNIT, as_objects

_LIBRARIES = ("pandas", "polars", "pyarrow")
_FILES = (".npy", ".npz", ".csv", ".parquet", ".feather")


def as_arrays(args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    """Returns arguments with NumPy arrays in place of frames and series.

    Shapes and dtypes depend on the types of the columns, and never on their values.

    Raises:
        TypeError: If a column does not hold numbers, or an argument is the name of a file.
        ValueError: If a column of whole numbers has missing values.
    """
    for value in (*args, *kwargs.values()):  # not inside of lists, which may hold texts of records
        if isinstance(value, os.PathLike) or (isinstance(value, str) and value.endswith(_FILES)):
            raise TypeError(
                f"Expected an array or a data frame, got the name of a file, {str(value)!r}. Read "
                "it first. For a .npy file larger than the memory, pass "
                "np.load(name, mmap_mode='r') and stream=True."
            )
        if isinstance(value, list) and value and isinstance(value[0], list):
            raise TypeError(
                "Expected records as an array or a data frame, got a list of lists. Convert it "
                "with numpy.asarray."
            )
    if not any(map(_is_frame, jax.tree.leaves((args, kwargs)))):
        return args, kwargs
    if _is_frame(kwargs.get(UNIT)):  # ids may be texts
        kwargs = kwargs | {UNIT: _ids(kwargs[UNIT])}
    return jax.tree.map(lambda leaf: _as_array(leaf) if _is_frame(leaf) else leaf, (args, kwargs))


class Design(NamedTuple):
    """A matrix with a row for each record.

    Attributes:
        matrix: The matrix, float32.
        names: A name for each column.
    """

    matrix: np.ndarray
    names: tuple[str, ...]

    def __repr__(self) -> str:
        """Shows the names, not the records."""
        return f"Design({len(self.names)} columns: {', '.join(self.names)})"


def design(frame: Any, columns: object, *, intercept: bool = True) -> Design:
    """Makes a matrix of some columns of a frame, by what is public about them.

    A tuple ``(low, high)`` is the range of a number. Numbers outside it are moved to its ends, and
    the range becomes [-1, 1], which suits a prior of scale 1 and ``DPLaplace``. A list has the
    categories of a column. Each but the first becomes a column of zeros and ones. A missing value
    gives ``nan``, and so does a value that is not a number, for a column with a range. Such a
    record counts as 0 in a run (see :func:`~numpyro_dp.check_records`).

    Take ranges and categories from a codebook, not from the records: they are public.

    Args:
        frame: A frame of pandas, Polars or PyArrow, or a dict of arrays.
        columns: For each column to use, its range or its categories.
        intercept: Whether the first column is 1.

    Raises:
        TypeError: If ``columns`` describes a column by anything else, or gives a range for a column
            whose type is that of texts.
        ValueError: If the frame has no such column, a range is empty, or a value is in no category.

    Example:
        >>> import numpy as np
        >>> frame = {"age": np.array([20.0, 60.0, 110.0]), "sex": np.array(["f", "m", "f"])}
        >>> design(frame, {"age": (0, 100), "sex": ["f", "m"]})
        Design(3 columns: intercept, age, sex=m)
        >>> design(frame, {"age": (0, 100), "sex": ["f", "m"]}).matrix.tolist()
        [[1.0, -0.6000000238418579, 0.0], [1.0, 0.20000000298023224, 1.0], [1.0, 1.0, 0.0]]
    """
    parts = read_columns(frame, columns)
    rows = len(next(iter(parts.values())))
    first = {"intercept": np.ones(rows)} if intercept else {}
    matrix = np.column_stack([*first.values(), *parts.values()]).astype(np.float32)
    return Design(matrix, (*first, *parts))


def read_columns(frame: Any, columns: object) -> dict[str, np.ndarray]:
    """The columns of :func:`design` by name, in double precision."""
    if not isinstance(columns, Mapping) or not columns:
        raise TypeError(
            f"Expected columns as a dict by column, such as {{'age': (0, 100)}}, got {columns!r}."
        )
    known = list(frame) if isinstance(frame, Mapping) else nw.from_native(frame).columns
    if missing := [name for name in columns if name not in known]:
        raise ValueError(f"The frame has no columns {missing}. It has {known}.")
    parts = {}
    for name, public in columns.items():
        values, lacking, texts = _column(frame, name)
        if values.ndim != 1 or (parts and len(values) != len(next(iter(parts.values())))):
            raise ValueError(
                f"Expected {name!r} as one value for each record, like the other columns, got the "
                f"shape {values.shape}."
            )
        if isinstance(public, tuple):
            if texts:
                raise TypeError(
                    f"The column {name!r} does not hold numbers, as its range {public} says. Give "
                    "a list of its categories."
                )
            parts |= {str(name): _scaled(str(name), values, public)}
        elif isinstance(public, list) and len(public) > 1:
            parts |= _indicators(str(name), values, lacking, public)
        else:
            raise TypeError(
                f"Expected a range (low, high) or a list of two or more categories for {name!r}, "
                f"got {public!r}."
            )
    return parts


def _is_frame(leaf: object) -> bool:
    # Not their scalars, such as pandas.NA in a list of ids.
    return type(leaf).__module__.split(".")[0] in _LIBRARIES and hasattr(leaf, "__len__")


def _read(frame: Any) -> Any:
    """A frame or series of narwhals."""
    if type(frame).__module__.startswith("pyarrow") and not hasattr(frame, "combine_chunks"):
        import pyarrow

        frame = pyarrow.chunked_array([frame])  # narwhals takes no plain array
    return nw.from_native(frame, allow_series=True)


def _ids(series: Any) -> np.ndarray:
    """Ids as they are, where an array would write a missing one as a number or text."""
    found = _read(series)
    if not isinstance(found, nw.Series):
        return np.asarray(series)
    whole = found.dtype.is_numeric() or found.dtype.is_temporal()
    return found.to_numpy() if whole and not found.null_count() else as_objects(found.to_list())


def _as_array(frame: Any) -> np.ndarray:
    """The numbers of a frame or series, in a dtype that its declared types fix."""
    found = _read(frame)
    if isinstance(found, nw.Series):
        return _numbers(found, found.name or "series")
    return np.column_stack([_numbers(column, str(column.name)) for column in found.iter_columns()])


def _numbers(column: nw.Series, name: str) -> np.ndarray:
    kind = column.dtype
    if not (kind.is_numeric() or kind == nw.Boolean) or kind == nw.Decimal:
        raise TypeError(
            f"Expected numbers in the column {name!r}, got {kind}. Use numpyro_dp.design with "
            "public categories and ranges, or leave the column out."
        )
    if kind.is_float():
        return np.asarray(column.to_numpy(), np.float32 if kind == nw.Float32 else np.float64)
    if column.null_count():  # as a float it would have another dtype than without missing values
        raise ValueError(
            f"The column {name!r} of whole numbers has missing values. Convert it to floats, whose "
            "missing values are nan, or use numpyro_dp.design."
        )
    return np.asarray(column.to_numpy(), bool if kind == nw.Boolean else np.int64)


def _column(frame: Any, name: object) -> tuple[np.ndarray, np.ndarray, bool]:
    """The values of a column, which are missing, and whether its type is that of texts."""
    if isinstance(frame, Mapping):
        values = np.asarray(frame[name])
        lacking = np.array([_is_missing(value) for value in values.tolist()], bool)
        times, texts = values.dtype.kind in "mM", values.dtype.kind in "USTV"
    else:
        (column,) = (each for each in nw.from_native(frame).iter_columns() if each.name == name)
        values, lacking, kind = column.to_numpy(), column.is_null().to_numpy(), column.dtype
        if kind.is_float():
            lacking = lacking | np.isnan(values)
        times = kind in (nw.Datetime, nw.Date, nw.Duration)
        texts = kind in (nw.String, nw.Categorical, nw.Enum)
    if times:
        raise TypeError(
            f"The column {name!r} holds times. Give numbers, such as days since a date."
        )
    return values, lacking, texts


def _is_missing(value: object) -> bool:
    """Whether a value is ``None``, ``nan``, or a missing value of pandas, which has no truth."""
    if value is None:
        return True
    try:
        return bool(value != value)
    except TypeError:
        return True


def _scaled(name: str, values: np.ndarray, ends: tuple[object, ...]) -> np.ndarray:
    """Numbers with their range moved to [-1, 1]."""
    if len(ends) != 2:
        raise TypeError(f"Expected (low, high) for {name!r}, got {ends}. Categories are a list.")
    low, high = (check_real(f"an end of the range of {name!r}", end) for end in ends)
    if not low < high or math.isinf(high - low):
        raise ValueError(f"Expected low < high for {name!r}, got {ends}.")
    numeric = values.dtype.kind in "biuf"
    found = values.astype(float) if numeric else np.array([_number(v) for v in values.tolist()])
    return np.clip(2 * (found - low) / (high - low) - 1, -1, 1)


def _number(value: Any) -> float:
    """A value as a number. Whatever is not one, such as a text, counts as missing."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):  # of which nobody hears: they name the value
        return math.nan


def _indicators(
    name: str, values: np.ndarray, lacking: np.ndarray, categories: list[object]
) -> dict[str, np.ndarray]:
    """A column of zeros and ones for each category but the first."""
    if len(set(categories)) < len(categories):
        raise ValueError(f"The categories of {name!r} are not distinct: {categories}.")
    if values.dtype == object:
        values = values.copy()
        values[lacking] = None  # comparisons with missing values of pandas have no truth
    is_one = {category: np.asarray(values == category, bool) for category in categories}
    if not np.all(sum(is_one.values()) | lacking):
        ends = len(categories) == 2 and all(isinstance(x, int | float) for x in categories)
        hint = f" The ends of a range are a tuple: {tuple(categories)}." if ends else ""
        raise ValueError(
            f"The column {name!r} has values that are none of its categories {categories}. Add "
            f"them, or join them to a public category such as 'other'.{hint}"
        )
    return {
        f"{name}={category}": np.where(lacking, np.nan, own)
        for category, own in list(is_one.items())[1:]
    }
