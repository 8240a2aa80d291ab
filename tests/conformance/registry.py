"""Every estimator of the package: one row here, and the whole suite runs on it."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import pytest

from numpyro_dp import aligned, aligned_natural, natural, preconditioned, vanilla
from numpyro_dp.core import Estimator
from numpyro_dp.model.variational import VariationalProblem

__all__ = ["ESTIMATORS", "EstimatorRow", "rows_to_run", "x64"]


class EstimatorRow(NamedTuple):
    """One estimator.

    Attributes:
        name: For test ids.
        build: Makes what ``DPSVI(estimator=...)`` takes.
        equals_elbo: Whether, without clip and noise, it gives the gradient of the evidence lower
            bound itself. The others give it times the inverse Fisher information.
        guides: Names of the automatic guides that it is for; ``None`` means every guide.
        size: Of its signals where the guide's scale is 0.1, in units of those of ``aligned``.
    """

    name: str
    build: Callable[[], Callable[[VariationalProblem], Estimator]]
    equals_elbo: bool = True
    guides: tuple[str, ...] | None = None
    size: float = 1.0


GAUSSIAN = ("AutoDiagonalNormal", "AutoNormal", "AutoMultivariateNormal")

ESTIMATORS: tuple[EstimatorRow, ...] = (
    EstimatorRow("aligned", aligned),
    EstimatorRow("vanilla", vanilla),
    EstimatorRow("preconditioned", preconditioned, guides=GAUSSIAN),
    EstimatorRow("natural", natural, equals_elbo=False, guides=GAUSSIAN, size=0.1),
    EstimatorRow("aligned_natural", aligned_natural, equals_elbo=False, guides=GAUSSIAN, size=0.01),
)


def rows_to_run(guides_only: bool = False) -> list[Any]:
    """Rows for ``parametrize``; those that share the ways of ``vanilla`` are extended or slow."""
    marks = {
        "preconditioned": pytest.mark.extended,
        "natural": pytest.mark.slow,
        "aligned_natural": pytest.mark.slow,
    }
    rows = [row for row in ESTIMATORS if row.guides is None or not guides_only]
    return [pytest.param(row, id=row.name, marks=marks.get(row.name, ())) for row in rows]


def x64(enable: bool = True) -> Any:
    """Context manager for double precision, on old and new JAX."""
    if hasattr(jax, "enable_x64"):
        return jax.enable_x64(enable)
    from jax.experimental import enable_x64

    return enable_x64(enable)
