"""Every estimator of the package: one row here, and the whole suite runs on it."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from numpyro_dp import aligned, vanilla
from numpyro_dp.core import Estimator
from numpyro_dp.model.variational import VariationalProblem

__all__ = ["ESTIMATORS", "EstimatorRow", "x64"]


class EstimatorRow(NamedTuple):
    """One estimator.

    Attributes:
        name: For test ids.
        build: Makes what ``DPSVI(estimator=...)`` takes.
        equals_elbo: Whether, without clip and noise, it gives the gradient of the evidence lower
            bound itself (a preconditioned or natural one does not: give it a reference instead).
    """

    name: str
    build: Callable[[], Callable[[VariationalProblem], Estimator]]
    equals_elbo: bool = True


ESTIMATORS: tuple[EstimatorRow, ...] = (
    EstimatorRow("aligned", aligned),
    EstimatorRow("vanilla", vanilla),
)


def x64(enable: bool = True) -> Any:
    """Context manager for double precision, on old and new JAX."""
    if hasattr(jax, "enable_x64"):
        return jax.enable_x64(enable)
    from jax.experimental import enable_x64

    return enable_x64(enable)
