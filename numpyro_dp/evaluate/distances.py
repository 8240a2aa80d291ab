"""Distances between what a private run found and a reference, such as the non-private optimum."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Shaped
from scipy import linalg

__all__ = [
    "gaussian_kl",
    "mean_proportional_absolute_error",
    "proportional_absolute_error",
    "standardised_error",
]

Array = Shaped[np.ndarray, "..."]


def mean_proportional_absolute_error(found: Array, optimum: Array, start: Array) -> float:
    r"""The paper's MPAE, :math:`\frac1D\sum_d |\xi_d - \xi_d^*| / |\xi_d^{(0)} - \xi_d^*|`.

    0 is the optimum, 1 is no better than the start. A coordinate that starts near its optimum makes
    it as large as you like: for a random start its expectation is infinite. Report
    :func:`proportional_absolute_error` beside it.

    Args:
        found: Parameters of a run.
        optimum: Those it should have found; the same shape.
        start: Those it began with; the same shape.

    Raises:
        ValueError: If shapes differ, or a coordinate starts at its optimum.

    Example:
        >>> import numpy as np
        >>> mean_proportional_absolute_error(np.array([1.0, 2.0]), np.zeros(2), np.full(2, 2.0))
        0.75

    Reference:
        Jälkö, Prediger, Honkela, Kaski (2024), DPVIm, TMLR, Eq. 23.
    """
    found, optimum, start = _same_shape(found=found, optimum=optimum, start=start)
    begun = np.abs(start - optimum)
    if not begun.all():
        raise ValueError(
            f"Expected start to differ from optimum, got {int((begun == 0).sum())} equal "
            "coordinates. Use proportional_absolute_error."
        )
    return float(np.mean(np.abs(found - optimum) / begun))


def proportional_absolute_error(found: Array, optimum: Array, start: Array) -> float:
    r"""Its robust form, :math:`\sum_d |\xi_d - \xi_d^*| / \sum_d |\xi_d^{(0)} - \xi_d^*|`.

    Args:
        found: Parameters of a run.
        optimum: Those it should have found; the same shape.
        start: Those it began with; the same shape.

    Raises:
        ValueError: If shapes differ, or the start is the optimum.

    Example:
        >>> import numpy as np
        >>> proportional_absolute_error(np.array([1.0, 2.0]), np.zeros(2), np.array([0.0, 4.0]))
        0.75
    """
    found, optimum, start = _same_shape(found=found, optimum=optimum, start=start)
    begun = np.abs(start - optimum).sum()
    if begun == 0:
        raise ValueError("Expected start to differ from optimum, got equal arrays.")
    return float(np.abs(found - optimum).sum() / begun)


def standardised_error(found: Array, reference: Array, sd: Array) -> float:
    r"""Root mean square of :math:`(m_d - m_d^*) / s_d`: errors in posterior standard deviations.

    Args:
        found: Posterior means of a run.
        reference: Posterior means of the reference; the same shape.
        sd: Posterior standard deviations of the reference, positive; the same shape.

    Raises:
        ValueError: If shapes differ or a standard deviation is not positive.

    Example:
        >>> import numpy as np
        >>> standardised_error(np.array([1.0, 1.0]), np.zeros(2), np.array([1.0, 0.5])).__round__(3)
        1.581
    """
    found, reference, sd = _same_shape(found=found, reference=reference, sd=sd)
    if not (sd > 0).all():
        raise ValueError(f"Expected sd > 0, got a smallest value of {sd.min()}.")
    return float(np.sqrt(np.mean(np.square((found - reference) / sd))))


def gaussian_kl(
    mean: Float[np.ndarray, " dim"],
    covariance: Array,
    other_mean: Float[np.ndarray, " dim"],
    other_covariance: Array,
) -> float:
    r"""Kullback-Leibler divergence :math:`\mathrm{KL}(N(m, S) \,\Vert\, N(m', S'))`, in nats.

    Args:
        mean: m.
        covariance: S, a matrix, or a vector of variances.
        other_mean: m'.
        other_covariance: S', a matrix, or a vector of variances.

    Raises:
        numpy.linalg.LinAlgError: If a covariance is not positive definite.

    Example:
        >>> import numpy as np
        >>> gaussian_kl(np.zeros(2), np.ones(2), np.ones(2), np.eye(2))
        1.0
    """
    first, second = (
        np.linalg.cholesky(np.diag(c) if np.ndim(c) == 1 else np.asarray(c, float))
        for c in (covariance, other_covariance)
    )
    ratio = linalg.solve_triangular(second, first, lower=True)
    shift = linalg.solve_triangular(second, np.asarray(other_mean) - mean, lower=True)
    logs = np.log(np.diag(second)).sum() - np.log(np.diag(first)).sum()
    return float(0.5 * (np.square(ratio).sum() + shift @ shift - len(first)) + logs)


def _same_shape(**arrays: Array) -> tuple[np.ndarray, ...]:
    values = tuple(np.asarray(array, float) for array in arrays.values())
    if len({value.shape for value in values}) > 1:
        shapes = ", ".join(f"{name} {np.shape(array)}" for name, array in arrays.items())
        raise ValueError(f"Expected arrays of one shape, got {shapes}.")
    return values
