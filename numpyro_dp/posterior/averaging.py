r"""Averages of iterates after convergence, and the AR(1) fit behind their errors.

A check is a function from a window, shape ``(length, coordinates)``, to a bool for each coordinate.
The iterates of a converged run are an autocorrelated series around the optimum: an
Ornstein-Uhlenbeck process (Jälkö et al. 2024, section 3.2). Before convergence they drift.

For a stationary AR(1) series of variance :math:`s^2` and lag-one correlation :math:`\phi`,

.. math::
    \mathrm{Var}(\bar x) = \frac{s^2}{n}\,\tau_n, \qquad
    \tau_n = \frac{1+\phi}{1-\phi} - \frac{2\phi(1-\phi^n)}{n(1-\phi)^2},

and the sample variance about the mean is too small by that amount. The sample correlation is too
small by :math:`(1 + 3\phi)/n` (Kendall 1954). :func:`fit_ar1` corrects both.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Shaped

from numpyro_dp._validate import check_int, check_real
from numpyro_dp.core import Values
from numpyro_dp.run.results import Trace

SHORTEST = 20  # iterates of a trace that can be averaged or checked
_FRACTIONS = tuple(0.8**power for power in range(1, 13))  # of the trace: 0.8 down to 0.07
_LARGEST = 0.9999  # correlation

Check = Callable[[Float[np.ndarray, "length coords"]], Bool[np.ndarray, " coords"]]


class Average(NamedTuple):
    """Averaged iterates. They are post-processing and may be published.

    Attributes:
        params: Mean of the constrained parameters over each coordinate's window. Pass it to
            ``Predictive(model, guide=guide, params=...)``.
        dp_sd: Standard deviation of that mean around the optimum, caused by the noise and the
            batches of the run. It is meaningless for coordinates with ``converged`` false.
        window: Number of kept iterates in each average.
        converged: Whether a window passed the check.

    Example:
        >>> import numpy as np
        >>> from numpyro_dp.posterior import average
        >>> from numpyro_dp.run.results import Trace
        >>> noise = np.random.default_rng(0).normal(size=1000)
        >>> found = average(Trace(np.arange(1000), {"loc": 3 + noise}))  # in use: result.trace
        >>> bool(abs(found.params["loc"] - 3) < 4 * found.dp_sd["loc"])
        True
    """

    params: Values
    dp_sd: Values
    window: Values
    converged: Values


def average(trace: Trace, check: Check | None = None, window: int | None = None) -> Average:
    """Averages each coordinate over the longest window of last iterates that has converged.

    If no window of a coordinate passes the check, ``average`` takes the last fifth of the trace
    and sets ``converged`` to false.

    Args:
        trace: ``result.trace`` of a run.
        check: The check of a window, by default :func:`~numpyro_dp.posterior.drift_check`.
        window: A fixed number of kept iterates, which is also checked. By default ``average``
            chooses one for each coordinate.

    Raises:
        ValueError: If the trace holds fewer than 20 iterates, or fewer than ``window``.

    Example:
        >>> import numpy as np
        >>> from numpyro_dp.run.results import Trace
        >>> noise = np.random.default_rng(0).normal(size=(1000, 2))
        >>> start = 5 * np.exp(-np.arange(1000) / 30)
        >>> mean = average(Trace(np.arange(1000), {"loc": 3 + noise + start[:, None]}))
        >>> mean.converged["loc"], np.round(mean.params["loc"], 1)
        (array([ True,  True]), array([3., 3.]))

    Guarantee:
        Reads only the private iterates.

    Reference:
        Polyak, Juditsky (1992), SIAM J. Control Optim. 30; Jälkö, Prediger, Honkela, Kaski (2024),
        DPVIm, TMLR, section 3.2.
    """
    length = len(trace.steps)
    if length < SHORTEST:
        raise ValueError(
            f"Expected a trace of at least {SHORTEST} iterates, got {length}. Take more steps, or "
            "keep more of them with run(..., trace_size=)."
        )
    if window is not None:
        check_int("window", window, low=SHORTEST, high=length,
                  remedy="It counts kept iterates of the trace.")  # fmt: skip
    sizes = [window] if window else [math.ceil(share * length) for share in _FRACTIONS]
    sizes = [size for size in sizes if size >= SHORTEST]
    fallback = window or max(SHORTEST, length // 5)
    check = drift_check() if check is None else check
    parts = {
        name: _average(np.asarray(value), sizes, fallback, check)
        for name, value in trace.params.items()
    }
    return Average(*({name: part[i] for name, part in parts.items()} for i in range(4)))


def _average(
    values: Shaped[np.ndarray, "length ..."], sizes: list[int], fallback: int, check: Check
) -> tuple[np.ndarray, ...]:
    shape, dtype = values.shape[1:], values.dtype
    flat = values.reshape(values.shape[0], -1).astype(np.float64)
    chosen = np.zeros(flat.shape[1], int)
    for size in sizes:  # longest first: a coordinate takes the first window that passes
        open_ = chosen == 0
        if open_.any():
            passed = check(flat[-size:, open_])
            chosen[np.flatnonzero(open_)[passed]] = size
    # Sizes are at least SHORTEST, so 0 means that no window has passed.
    converged = chosen > 0
    chosen = np.where(converged, chosen, fallback)
    mean, sd = np.empty(flat.shape[1]), np.empty(flat.shape[1])
    for size in np.unique(chosen):
        some = chosen == size
        last = flat[-size:, some]
        mean[some], sd[some] = last.mean(0), np.sqrt(fit_ar1(last).variance_of_mean)
    results = mean.astype(dtype), sd.astype(dtype), chosen, converged
    return tuple(result.reshape(shape) for result in results)


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
        time = np.linspace(0, 1, length) - 0.5
        centred = window - window.mean(0)
        slopes = time @ centred / (time @ time)
        fit = fit_ar1(centred - time[:, None] * slopes)
        error = np.sqrt(12 * fit.variance * fit.times / length)
        return (np.abs(slopes) <= level * error) & (length >= min_times * fit.times)

    return check


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
    # Below 0, the mean would seem surer than that of independent iterates.
    phi = np.clip((length * phi + 1) / max(length - 3, 1), 0.0, _LARGEST)
    times = (1 + phi) / (1 - phi)
    finite = times - 2 * phi * (1 - phi**length) / (length * (1 - phi) ** 2)
    finite = np.maximum(finite, 1.0)
    # In a window of few autocorrelation times, this would divide by a number near 0.
    variance = square / np.maximum(1 - finite / length, 0.05)
    return Series(variance, times, variance * finite / length)
