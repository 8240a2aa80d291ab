r"""Units of privacy of several rows, such as a person with a row for each visit.

All rows with one id are one record. Its log likelihood is the sum over its rows,

.. math:: \log p(x_i \mid z) = \sum_{r \le R} m_{ir} \log p(x_{ir} \mid z), \; m_{ir} \in \{0, 1\},

and its signal is the gradient of this sum. So the signals of its rows are added before the bound,
and samplers draw units. A unit has at most R rows: further ones are left out. Unused places repeat
the first row of the unit and have the mask 0, so they are as finite as this row.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from numbers import Integral
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_dp._compat import is_tracer
from numpyro_dp.core import Arrays, Kwargs, NumPyroFn, PyTree

UNIT = "unit"  # keyword of the ids
_MISSING = (
    "unit= has missing ids, ids of several types, or ids that are neither numbers nor texts. Rows "
    "without an id would be one record of many people, and 1 and '1' two records of one. Give each "
    "row the id of its unit, in one type."
)
# Texts that pandas reads as missing, and NumPy's and Polars' own, in small letters. A list of texts
# with a missing value becomes one of them before anybody can look.
_MISSING_TEXTS = frozenset((
    "", "nan", "-nan", "none", "null", "nat", "<na>", "na", "n/a", "#na", "#n/a", "#n/a n/a",
    "1.#ind", "-1.#ind", "1.#qnan", "-1.#qnan",
))  # fmt: skip


class Units:
    """Which rows belong to each unit. They are found when somebody asks for rows.

    Args:
        ids: The id of each row.
        num_rows: Number of rows.
        num_units: Number of units.
        max_rows: Most rows of a unit.
    """

    shape: tuple[int, int]

    def __init__(self, ids: object, num_rows: int, num_units: int, max_rows: int) -> None:
        self._ids, self._num_rows, self.shape = ids, num_rows, (num_units, max_rows)

    @functools.cached_property
    def places(self) -> tuple[np.ndarray, np.ndarray]:
        """The result of :func:`group`."""
        return group(self._ids, self._num_rows, self.shape[1])


class Grouped:
    """Rows of an array by unit, shape (units, R, ...). Rows are taken when somebody asks for them.

    Args:
        array: The rows, in the order of the data set. ``None`` for the mask of those that count.
        units: Which rows belong to each unit.
    """

    shape: tuple[int, ...]

    def __init__(self, array: np.ndarray | Array | None, units: Units) -> None:
        self._array, self._units = array, units
        self.shape = units.shape if array is None else (*units.shape, *np.shape(array)[1:])
        self.dtype: np.dtype = np.dtype(np.float32) if array is None else array.dtype

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, units: Any) -> Any:
        """The rows of some units, shape (some units, R, ...)."""
        places, counted = self._units.places
        return counted[units] if self._array is None else self._array[places[units]]


def split_unit(
    kwargs: Kwargs, max_rows: int | None, model: NumPyroFn | None = None
) -> tuple[Any, Kwargs]:
    """Returns the ids of a call and its other keywords.

    Without ``max_rows``, ``unit`` is a keyword of the model like any other.

    Raises:
        TypeError: If ids are missing, or if the ``model`` has no such keyword.
    """
    if max_rows is None:
        if model is not None and UNIT in kwargs and not _takes_unit(model):
            raise TypeError(
                "unit= needs max_rows_per_unit=, the largest number of rows of a unit that are "
                "used. It is public: take it from the plan of the study."
            )
        return None, kwargs
    if UNIT not in kwargs:
        raise TypeError(
            "max_rows_per_unit needs the unit of each row. Pass unit=ids, an array with one id for "
            "each row, or leave out max_rows_per_unit if each row is a person of its own."
        )
    return kwargs[UNIT], {name: value for name, value in kwargs.items() if name != UNIT}


def _takes_unit(model: NumPyroFn) -> bool:
    try:
        parameters = inspect.signature(model).parameters.values()
    except (TypeError, ValueError):
        return True
    kinds = {each.kind for each in parameters}
    return inspect.Parameter.VAR_KEYWORD in kinds or UNIT in {each.name for each in parameters}


def number_of_units(ids: object, num_rows: int) -> int:
    """Returns the number of units, which counts as public like a number of records.

    Raises:
        TypeError, ValueError: If the ids are not an array with one id for each row.
    """
    return len(np.unique(_checked(ids, num_rows)))


def group(ids: object, num_rows: int, max_rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the row at each place of each unit, and which places count, shape (units, R).

    Of a unit with more rows than R, the first R of the data set are kept. This choice depends on
    the rows of the unit alone.
    """
    _, firsts, units, counts = np.unique(
        _checked(ids, num_rows), return_index=True, return_inverse=True, return_counts=True
    )
    order = np.argsort(units, kind="stable")
    ranks = np.arange(num_rows) - np.repeat(np.cumsum(counts) - counts, counts)
    kept = ranks < max_rows
    places = np.repeat(firsts[:, None], max_rows, axis=1).astype(np.int32)
    counted = np.zeros(places.shape, np.float32)
    at = units[order][kept], ranks[kept]
    places[at], counted[at] = order[kept], 1
    return places, counted


def as_objects(values: Any) -> np.ndarray:
    """Values as they are. NumPy would write numbers beside texts as texts, and round integers."""
    found = np.empty(len(values), object)
    found[:] = values
    return found


def sum_over_rows(of_row: Callable[..., Array], example: Arrays, *beside: PyTree) -> Array:
    """Returns the sum of a function over the rows of a unit that count.

    Args:
        of_row: ``(row, *beside) -> number``.
        example: Arrays of the unit's rows, with a leading axis R. The last is the mask.
        *beside: Further trees with this leading axis, or ``None``.
    """
    *rows, counted = example
    values = jax.vmap(of_row)(tuple(rows), *beside)
    return jnp.sum(values * counted.astype(values.dtype))


def _checked(ids: Any, num_rows: int) -> np.ndarray:
    """The ids as an array in which equal entries are equal ids."""
    if is_tracer(ids):
        raise TypeError(
            "unit= is traced, but which rows belong together decides the shapes of the program. "
            "Let the compiled function hold the ids, or call run."
        )
    if np.any(np.ma.getmask(ids)):
        raise ValueError(_MISSING)
    found: np.ndarray = np.asarray(ids) if hasattr(ids, "dtype") else as_objects(ids)
    if found.shape != (num_rows,):
        raise ValueError(
            f"Expected unit= as an array of shape ({num_rows},), one id for each row, got "
            f"{found.shape}. Pass the column of ids."
        )
    if found.dtype == object:
        values = found.tolist()
        kinds = [k for k in (str, bytes, Integral, float) if all(isinstance(v, k) for v in values)]
        if kinds == [Integral] and len({isinstance(v, bool) for v in values}) > 1:
            kinds = []
        if len(kinds) != 1:
            raise ValueError(_MISSING)
        if kinds == [float]:
            own, found = (), found.astype(float)
        else:
            own, found = np.unique(found, return_inverse=True)
    else:
        own = np.unique(found).tolist() if found.dtype.kind in "UTSi" else ()
    if found.dtype.kind == "V":
        raise ValueError(_MISSING)
    if any(_is_missing(each) for each in own):
        raise ValueError(
            "unit= has ids such as 'nan', 'NA', '' or -1, which stand for a missing id (-1 is the "
            "code of a missing category). Rows without an id would be one record of many people. "
            "Drop these rows, or give each its own id."
        )
    if found.dtype.kind in "fc":
        # Beyond, neighbouring integers are one number, and so two people one record.
        if not np.all(np.abs(found) < 2 / np.finfo(found.dtype).eps):
            raise ValueError(
                f"{_MISSING} Ids of dtype {found.dtype} may also be too large to tell apart: use "
                "integers or texts."
            )
    elif found.dtype.kind in "mM" and np.isnat(found).any():
        raise ValueError(_MISSING)
    return found


def _is_missing(value: Any) -> bool:
    """Whether a text or an integer stands for a missing id."""
    if isinstance(value, Integral):
        return value in (-1, np.iinfo(np.int64).min)
    text = value.decode(errors="replace") if isinstance(value, bytes) else value
    return text.strip().lower() in _MISSING_TEXTS
