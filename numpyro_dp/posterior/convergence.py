r"""Checks whether a private run has converged, for each coordinate of a window of iterates.

A check is a function from a window, shape ``(length, coordinates)``, to a bool for each coordinate.
The iterates of a converged run are an autocorrelated series around the optimum: an
Ornstein-Uhlenbeck process (Jälkö et al. 2024, section 3.2). Before convergence they drift.
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
    r"""Returns a check that a long enough window has no significant slope.

    The check regresses n iterates on time, scaled to [0, 1], and fits an AR(1) to the residuals.
    With variance :math:`s^2` and autocorrelation time :math:`\tau` of that fit, the slope has the
    variance :math:`12 s^2\tau/n`.

    Args:
        level: Largest absolute slope, in standard errors.
        min_times: Smallest length of the window, in autocorrelation times.

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
