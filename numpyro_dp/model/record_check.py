"""A look at the records before a run, for the eyes of their holder."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.flatten_util import ravel_pytree

from numpyro_dp.core import Arrays, NumPyroFn, PyTree
from numpyro_dp.model.density import Model
from numpyro_dp.model.frames import as_arrays
from numpyro_dp.model.frontend import GivenModel
from numpyro_dp.model.outcomes import unconstrained_prior
from numpyro_dp.model.public import record_arguments
from numpyro_dp.model.units import split_unit

_DRAWS = 4
_ROWS = 1024  # rows whose gradients are in memory at once
_FAR = 10.0  # a column this many times as large or small as 1 has a scale worth a word


class SensitiveCheck(NamedTuple):
    """What is odd about records. Sensitive: never publish it.

    Attributes:
        not_finite: Rows with a value that is not finite.
        impossible: Other rows without a finite log likelihood and gradient at any draw from the
            prior. Both kinds of rows count as 0 in a run.
        constant: Columns with one value.
        scales: Root mean square of columns that are far from 1.
    """

    not_finite: np.ndarray
    impossible: np.ndarray
    constant: tuple[str, ...]
    scales: dict[str, float]

    def __repr__(self) -> str:
        """Shows nothing of the records."""
        return "SensitiveCheck(<print it for the holder of the records: never publish it>)"

    def __str__(self) -> str:
        found = [
            (self.not_finite, "rows have a value that is not finite, and count as 0"),
            (self.impossible, "rows have no likelihood at draws from the prior, and count as 0"),
        ]
        lines = [f"{len(rows)} {what}: {_shown(rows)}" for rows, what in found if len(rows)]
        lines += [f"{name} has one value" for name in self.constant]
        lines += [
            f"{name} has the root mean square {scale:.3g}: divide it by a public constant"
            for name, scale in self.scales.items()
        ]
        return "\n".join(["For the holder of the records only:", *(lines or ["nothing is odd"])])


def check_records(
    model: NumPyroFn,
    *args: PyTree,
    data_plate: str | None = None,
    max_rows_per_unit: int | None = None,
    **kwargs: PyTree,
) -> SensitiveCheck:
    """Looks for records that would count as 0 in a run, and for odd columns.

    It spends no budget, because nothing of it may be published. Choices that you make by it are
    choices by the records.

    Args:
        model: A NumPyro model.
        *args: Arguments of the model, with the whole data set.
        data_plate: Name of the plate over records, if several plates surround the observed sites.
        max_rows_per_unit: As for a driver, with ``unit=``. All rows of a unit with such a row count
            as 0.
        **kwargs: Keyword arguments of the model.

    Raises:
        UnsupportedModelError: If the model cannot be private as it is written.

    Example:
        >>> import jax.numpy as jnp, numpyro, numpyro.distributions as dist
        >>> def model(x, y):
        ...     w = numpyro.sample("w", dist.Normal(0, 1))
        ...     with numpyro.plate("records", len(x)):
        ...         numpyro.sample("y", dist.Poisson(jnp.exp(w * x)), obs=y)
        >>> x, y = jnp.array([0.1, jnp.nan, 0.3, -0.2]), jnp.array([1.0, 2.0, 0.5, 3.0])
        >>> print(check_records(model, x, y))
        For the holder of the records only:
        1 rows have a value that is not finite, and count as 0: [1]
        1 rows have no likelihood at draws from the prior, and count as 0: [2]
    """
    _, kwargs = split_unit(kwargs, max_rows_per_unit)
    args, kwargs = as_arrays(args, kwargs)
    given = GivenModel(model, {}, data_plate)
    structure = given.structure(args, kwargs)
    arrays, shared, _ = structure.layout.rows(args, kwargs)
    values = [np.asarray(each) for each in arrays]
    finite = np.ones(len(values[0]), bool)
    constant, scales = [], {}
    found = record_arguments(model, structure.layout.kinds, args, kwargs)
    names = [argument + place for argument, place in found]
    for array, argument in zip(values, names, strict=True):
        flat = array.reshape(len(array), -1)
        finite &= np.isfinite(flat).all(1)
        for column in range(flat.shape[1]):
            name = f"column {column} of {argument}" if array.ndim > 1 else argument
            own = flat[np.isfinite(flat[:, column]), column]
            if len(own) > 1 and np.all(own == own[0]) and own[0] != 1:  # 1 is an intercept
                constant.append(name)
            size = float(np.sqrt(np.mean(np.square(own, dtype=np.float64)))) if len(own) else 1.0
            floating = np.issubdtype(array.dtype, np.floating)
            if floating and size and not 1 / _FAR < size < _FAR:
                scales[name] = size
    possible = _possible(Model(given.fn, structure), tuple(map(jnp.asarray, values)), shared)
    return SensitiveCheck(
        np.flatnonzero(~finite), np.flatnonzero(finite & ~possible), tuple(constant), scales
    )


def _possible(model: Model, rows: Arrays, shared: Arrays) -> np.ndarray:
    """Which rows have a finite log likelihood and gradient at one of some draws from the prior."""
    draws = [unconstrained_prior(model, shared, jax.random.key(n)) for n in range(_DRAWS)]

    def at(latents: PyTree, row: PyTree) -> Array:
        slopes = jax.value_and_grad(model.log_likelihood)
        value, slope = slopes(latents, {}, row, shared, model.any_key())
        return jnp.isfinite(value) & jnp.all(jnp.isfinite(ravel_pytree(slope)[0]))

    @jax.jit
    def of_all(draws: PyTree, rows: PyTree) -> Array:
        at_all = jax.vmap(at, (0, None))
        return jax.lax.map(lambda row: jnp.any(at_all(draws, row)), rows, batch_size=_ROWS)

    stacked = jax.tree.map(lambda *each: jnp.stack(each), *draws)
    return np.asarray(of_all(stacked, rows))


def _shown(rows: np.ndarray) -> str:
    return f"{rows[:10].tolist()}" + (" ..." if len(rows) > 10 else "")
