r"""Has a private run converged? Checks of a window of iterates, one answer for each coordinate.

A check is a function from a window, shape ``(length, coordinates)``, to a bool for each coordinate.
The iterates of a converged run are an autocorrelated series about the optimum (an
Ornstein-Uhlenbeck process, Jälkö et al. 2024, section 3.2); one that has not converged drifts.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from jaxtyping import Bool, Float

from numpyro_dp._validate import check_real
from numpyro_dp.posterior._series import fit_ar1

__all__ = ["Check", "drift_check"]

Check = Callable[[Float[np.ndarray, "length coords"]], Bool[np.ndarray, " coords"]]


def drift_check(level: float = 2.0, min_times: float = 50.0) -> Check:
    r"""The slope is within its own standard error, and the window is long enough to tell.

    The residuals of the regression are fitted by an AR(1) of variance :math:`s^2` and
    autocorrelation time :math:`\tau`; the slope over [0, 1] of n points then has the variance
    :math:`12 s^2\tau/n`.

    Args:
        level: Largest absolute slope in standard errors.
        min_times: Fewest autocorrelation times that the window must hold.

    Example:
        >>> import numpy as np
        >>> noise = np.random.default_rng(0).normal(size=(1000, 2))
        >>> drift_check()(noise + np.linspace(0, 1, 1000)[:, None] * np.array([0.0, 1.0]))
        array([ True, False])
    """
    check_real("level", level, low=0, low_open=True)
    check_real("min_times", min_times, low=1)

    def check(window: Float[np.ndarray, "length coords"]) -> Bool[np.ndarray, " coords"]:
        length = window.shape[0]
        slopes = _slopes(window)
        time = np.linspace(0, 1, length) - 0.5
        fit = fit_ar1(window - window.mean(0) - time[:, None] * slopes)
        error = np.sqrt(12 * fit.variance * fit.times / length)
        return (np.abs(slopes) <= level * error) & (length >= min_times * fit.times)

    return check


def _slopes(window: Float[np.ndarray, "length coords"]) -> Float[np.ndarray, " coords"]:
    time = np.linspace(0, 1, window.shape[0]) - 0.5
    return time @ (window - window.mean(0)) / (time @ time)
