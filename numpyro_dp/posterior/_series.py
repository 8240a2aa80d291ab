r"""The variance of the mean of an autocorrelated series, from one series of length n.

For a stationary AR(1) series of variance :math:`s^2` and lag-one correlation :math:`\phi`,

.. math::
    \mathrm{Var}(\bar x) = \frac{s^2}{n}\,\tau_n, \qquad
    \tau_n = \frac{1+\phi}{1-\phi} - \frac{2\phi(1-\phi^n)}{n(1-\phi)^2},

and the sample variance about the mean is too small by that amount. The sample correlation is too
small by :math:`(1 + 3\phi)/n` (Kendall 1954). :func:`fit_ar1` corrects both.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Float

__all__ = ["Series", "fit_ar1"]

_LARGEST = 0.9999


class Series(NamedTuple):
    """Results of an AR(1) fit for each of several series.

    Attributes:
        variance: Stationary variance.
        times: Integrated autocorrelation time, in iterates. The series is worth ``n / times``
            independent values.
        variance_of_mean: Variance of the mean of the series.
    """

    variance: Float[np.ndarray, " series"]
    times: Float[np.ndarray, " series"]
    variance_of_mean: Float[np.ndarray, " series"]


def fit_ar1(values: Float[np.ndarray, "length series"]) -> Series:
    """Fits an AR(1) to each column, and assumes that its mean is constant."""
    length = values.shape[0]
    centred = values - values.mean(0)
    square = (centred**2).mean(0)
    moving = square > 0
    product = (centred[1:] * centred[:-1]).sum(0) / length
    phi = np.divide(product, square, out=np.zeros_like(square), where=moving)
    # Solves sample phi = phi - (1 + 3 phi) / n, Kendall's bias, for phi.
    phi = np.clip((length * phi + 1) / max(length - 3, 1), 0.0, _LARGEST)
    times = (1 + phi) / (1 - phi)
    finite = times - 2 * phi * (1 - phi**length) / (length * (1 - phi) ** 2)
    finite = np.maximum(finite, 1.0)
    variance = square / np.maximum(1 - finite / length, 0.05)
    return Series(variance, times, variance * finite / length)
