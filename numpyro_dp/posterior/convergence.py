r"""Has a private run converged? Checks of a window of iterates, one answer for each coordinate.

A check is a function from a window, shape ``(length, coordinates)``, to a bool for each coordinate.
The iterates of a converged run are an autocorrelated series about the optimum (an
Ornstein-Uhlenbeck process, Jälkö et al. 2024, section 3.2); one that has not converged drifts.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from jaxtyping import Bool, Float
from numpyro.diagnostics import split_gelman_rubin

from numpyro_dp._validate import check_real
from numpyro_dp.posterior._series import fit_ar1

__all__ = ["Check", "drift_check", "regression_check", "split_rhat_check"]

Check = Callable[[Float[np.ndarray, "length coords"]], Bool[np.ndarray, " coords"]]


def regression_check(threshold: float) -> Check:
    """The paper's check: the slope over the window, scaled to [0, 1], is small.

    The slope is in units of the parameter, so one threshold does not suit all: a slow drift of a
    parameter with a small scale passes. Use :func:`drift_check` unless you compare with the paper.

    Args:
        threshold: Largest absolute slope.

    Example:
        >>> import numpy as np
        >>> window = np.stack([np.linspace(0, 1, 100), np.zeros(100)], axis=1)
        >>> regression_check(0.5)(window)
        array([False,  True])

    Reference:
        Jälkö, Prediger, Honkela, Kaski (2024), DPVIm, TMLR, section 3.2 (its code has the slope
        without the absolute value).
    """
    check_real("threshold", threshold, low=0, low_open=True)

    def check(window: Float[np.ndarray, "length coords"]) -> Bool[np.ndarray, " coords"]:
        return np.abs(_slopes(window)) <= threshold

    return check


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


def split_rhat_check(threshold: float = 1.05) -> Check:
    """The two halves of the window agree: split R-hat, from ``numpyro.diagnostics``.

    Args:
        threshold: Largest R-hat.

    Example:
        >>> import numpy as np
        >>> noise = np.random.default_rng(0).normal(size=(1000, 2))
        >>> split_rhat_check()(noise + np.linspace(0, 1, 1000)[:, None] * np.array([0.0, 2.0]))
        array([ True, False])
    """
    check_real("threshold", threshold, low=1)

    def check(window: Float[np.ndarray, "length coords"]) -> Bool[np.ndarray, " coords"]:
        with np.errstate(invalid="ignore", divide="ignore"):
            rhat = np.asarray(split_gelman_rubin(window[None]))
        return np.where(np.ptp(window, axis=0) == 0, True, rhat <= threshold)

    return check


def _slopes(window: Float[np.ndarray, "length coords"]) -> Float[np.ndarray, " coords"]:
    time = np.linspace(0, 1, window.shape[0]) - 0.5
    return time @ (window - window.mean(0)) / (time @ time)
