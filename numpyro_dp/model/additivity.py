r"""Checks that the log likelihood of several records is the sum over single records.

Drivers evaluate the likelihood record by record. If a model scales by the number of rows or centres
columns by their mean, the run is still private, but it fits another model than
``numpyro.infer.SVI``. This check runs the model on a few invented records, together and one by one:

.. math:: \log p(x_1, x_2, x_3 \mid z) = \sum_i \log p(x_i \mid z), \qquad
          \log p(z \mid 3 \text{ rows}) = \log p(z \mid 1 \text{ row}).
"""

from __future__ import annotations

import functools
import math
import warnings

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_dp._compat import jit_once
from numpyro_dp.core import Arrays, NumPyroFn, Values
from numpyro_dp.model.locals import fill_locals, in_plate, start
from numpyro_dp.model.public import UnsupportedModelError
from numpyro_dp.model.records import ModelStructure
from numpyro_dp.model.separation import log_density, traced

_ROWS = 3
# Relative, and just above the rounding error for a few records. In half precision the check still
# finds a factor of the number of rows, but not a shift by a hundredth of a record's rank.
_TOLERANCE, _HALF_TOLERANCE = 1e-4, 1e-2


_REMEDY = (
    "The likelihood is evaluated one record at a time, so the run would fit another model. "
    "Compute scales and averages from public values. Pass them to a driver as static keywords, "
    "DPSVI(..., scale=s), or to fit(..., scale=s, public=['scale'])."
)


def check_additive(model: NumPyroFn, structure: ModelStructure, shared: Arrays, half: bool) -> None:
    """Raises if the model's densities depend on how many records it gets at once.

    The check is skipped if the joint density of the invented records is not finite, or if the model
    cannot run on so few records.

    Args:
        model: The model, static keywords filled in.
        structure: Its structure.
        shared: Public arrays among the arguments.
        half: Whether the model computes in half precision.

    Raises:
        UnsupportedModelError: If a density depends on the number of rows.
    """
    if structure.layout.num_examples == 1:
        return

    # Values of a likelihood that makes its own random draws cannot be compared.
    likelihood = () if structure.draws else structure.inside
    # Compiled as one program, because op-by-op evaluation takes a second for a small model.
    densities = jit_once(functools.partial(_together_and_alone, model, structure, shared))
    for rows in structure.layout.invented(_ROWS):
        try:
            together, singles = jax.device_get(densities(rows))
        except UnsupportedModelError:
            raise
        except (TypeError, ValueError, IndexError):
            continue  # the model needs its own number of rows, or particular values
        for names, what, parts in (
            (likelihood, "likelihood", singles),
            (structure.outside, "prior", singles[:1]),
        ):
            joint, *alone = (sum(float(each[n]) for n in names) for each in (together, *parts))
            if not is_sum(joint, alone, _HALF_TOLERANCE if half else _TOLERANCE):
                shapes = [shape for shape, _ in structure.layout.shapes]
                hint = ""
                if (1,) in shapes:  # beside a predictor of shape (N,) it stands for all pairs
                    hint = "If an outcome y has the shape (N, 1), pass y[:, 0]. "
                raise UnsupportedModelError(
                    f"The {what} depends on the number of records that the model gets at once "
                    f"(sites {list(names)}): it mixes records, as X.mean(0) does, or computes with "
                    f"X.shape[0]. {hint}{_REMEDY}"
                )


def _together_and_alone(
    model: NumPyroFn, structure: ModelStructure, shared: Arrays, rows: Arrays
) -> tuple[Values, list[Values]]:
    """Log densities of all records together, and of each record alone."""
    plate = structure.data_plate

    def densities(rows: Arrays, numbers: Array) -> Values:
        filled = fill_locals(model, plate, rows=numbers)
        arguments, number = structure.layout.arguments(rows, shared), rows[0].shape[0]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invented values may be outside a site's support
            trace = traced(filled, plate, arguments, start=start, num_rows=number)
            size = trace[plate]["args"][0]
            return {
                name: log_density(site) * (number / size if in_plate(site, plate) else 1)
                for name, site in trace.items()
                if site["type"] == "sample"
            }

    together = densities(rows, jnp.arange(_ROWS))
    try:
        return together, [
            densities(tuple(leaf[i : i + 1] for leaf in rows), jnp.arange(i, i + 1))
            for i in range(_ROWS)
        ]
    except (TypeError, ValueError, IndexError) as error:
        raise UnsupportedModelError(
            f"The model runs on {_ROWS} records but not on a single one: it mixes "
            f"records, or reads x.shape[0] ({error}). {_REMEDY}"
        ) from error


def is_sum(joint: float, alone: list[float], tolerance: float = _TOLERANCE) -> bool:
    """Whether ``joint`` is the sum of ``alone``. A ``joint`` that is not finite passes."""
    if not math.isfinite(joint):
        return True
    if not all(map(math.isfinite, alone)):
        return False  # for example, a model that divides by the standard deviation of its rows
    size = abs(joint) + sum(map(abs, alone))
    return abs(joint - sum(alone)) <= tolerance * size + 1e-6
