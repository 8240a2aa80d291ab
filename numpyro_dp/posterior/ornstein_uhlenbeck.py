r"""What privacy noise of known size does to the iterates, from the curvature alone.

Near the optimum :math:`\xi^*` the loss is about quadratic with curvature :math:`A`, and gradient
descent with step :math:`\alpha` and gradient noise of covariance :math:`Z` is

.. math:: \xi_{t+1} - \xi^* = M (\xi_t - \xi^*) + \alpha\,\mathcal N(0, Z), \qquad M = I - \alpha A,

a discrete Ornstein-Uhlenbeck process. Its stationary covariance solves
:math:`\Sigma = M \Sigma M + \alpha^2 Z`, for small steps :math:`A\Sigma + \Sigma A = \alpha Z`; the
mean of n iterates has the covariance

.. math:: \tfrac1n\big(\Sigma + S\Sigma + \Sigma S^\top\big), \quad
    S = \sum_{k=1}^{n-1}\big(1 - \tfrac kn\big) M^k \;\longrightarrow\; \tfrac1n A^{-1} Z A^{-1},

whatever the step. The noise is known: its standard deviation is printed with every run. The
curvature in the location is that of the posterior, which the guide approximates.

Reference:
    Jälkö, Prediger, Honkela, Kaski (2024), DPVIm, TMLR, section 3.2 and appendix E; Mandt, Hoffman,
    Blei (2017), Stochastic gradient descent as approximate Bayesian inference, JMLR 18.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from jaxtyping import Float
from numpyro.infer import autoguide
from scipy import linalg

from numpyro_dp._validate import check_int, check_real
from numpyro_dp.model.variational import guide_kind

__all__ = ["averaged_covariance", "guide_curvature", "stationary_covariance"]

Matrix = Float[np.ndarray, "dim dim"]


def stationary_covariance(curvature: Matrix, noise: Matrix, step_size: float) -> Matrix:
    """Covariance of single iterates about the optimum.

    Args:
        curvature: Symmetric positive definite A, the Hessian of the loss.
        noise: Covariance Z of the noise on the gradient. For ``aligned()`` and the location that
            is ``(noise_multiplier * sensitivity / rate) ** 2`` times the identity, plus that of
            batches and draws.
        step_size: Of plain gradient descent, in (0, 2 / largest curvature).

    Raises:
        ValueError: If the step is too large for the iterates to stay.

    Example:
        >>> import numpy as np
        >>> stationary_covariance(np.eye(1) * 4.0, np.eye(1), 0.01).round(5)
        array([[0.00128]])
    """
    moved = _contraction(curvature, step_size)
    return linalg.solve_discrete_lyapunov(moved, step_size**2 * np.asarray(noise))


def averaged_covariance(
    curvature: Matrix, noise: Matrix, step_size: float, num_steps: int
) -> Matrix:
    """Covariance of the mean of ``num_steps`` iterates of a converged run.

    Args:
        curvature: As for :func:`stationary_covariance`.
        noise: As for :func:`stationary_covariance`.
        step_size: As for :func:`stationary_covariance`.
        num_steps: Iterates averaged, every one of them.

    Raises:
        ValueError: If a value is outside its range.

    Example:
        >>> import numpy as np
        >>> averaged_covariance(np.eye(1) * 4.0, np.eye(1), 0.01, 100_000).round(9)
        array([[6.25e-07]])
    """
    number = check_int("num_steps", num_steps, low=1)
    stationary = stationary_covariance(curvature, noise, step_size)
    moved = _contraction(curvature, step_size)
    rest = np.linalg.inv(np.eye(len(moved)) - moved)
    ended = np.eye(len(moved)) - np.linalg.matrix_power(moved, number)
    lagged = moved @ (rest - ended @ rest @ rest / number)
    return (stationary + lagged @ stationary + stationary @ lagged.T) / number


def guide_curvature(params: dict[str, Any], guide: Any) -> Matrix:
    """Curvature of the loss in the location of a Gaussian guide: its precision.

    At the optimum of a full-rank guide the precision is the expected Hessian of the loss; a
    mean-field guide has its diagonal.

    Args:
        params: Constrained parameters, as in ``result.params``.
        guide: ``AutoDiagonalNormal`` or ``AutoMultivariateNormal``.

    Raises:
        TypeError: For another guide.

    Example:
        >>> import numpy as np
        >>> from numpyro.infer.autoguide import AutoDiagonalNormal
        >>> guide = AutoDiagonalNormal(lambda: None)
        >>> guide_curvature({"auto_scale": np.array([0.5, 0.1])}, guide)
        array([[  4.,   0.],
               [  0., 100.]])
    """
    kind = guide_kind(guide)
    if kind is autoguide.AutoDiagonalNormal:
        return np.diag(1 / np.square(np.asarray(params[f"{guide.prefix}_scale"], float)))
    if kind is autoguide.AutoMultivariateNormal:
        inverse = np.linalg.inv(np.asarray(params[f"{guide.prefix}_scale_tril"], float))
        return inverse.T @ inverse
    raise TypeError(
        "Expected guide to be an AutoDiagonalNormal or AutoMultivariateNormal, got "
        f"{type(guide).__name__}. Pass a curvature of your own."
    )


def _contraction(curvature: Matrix, step_size: float) -> Matrix:
    """M = I - step * A, checked to bring iterates back."""
    largest = float(np.linalg.eigvalsh(curvature).max())
    check_real(
        "step_size", step_size, low=0, low_open=True, high=2 / largest, high_open=True,
        remedy="Beyond 2 / largest curvature gradient descent diverges.",
    )  # fmt: skip
    return np.eye(len(curvature)) - step_size * np.asarray(curvature)
