"""Iterate averaging: the mean of each coordinate's iterates after it has converged."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Shaped

from numpyro_dp._validate import check_int
from numpyro_dp.posterior._series import fit_ar1
from numpyro_dp.posterior.convergence import Check, drift_check
from numpyro_dp.run.results import Trace

__all__ = ["Average", "average"]

_FRACTIONS = tuple(0.8**power for power in range(1, 13))  # of the trace: 0.8 down to 0.07
_SHORTEST = 20


class Average(NamedTuple):
    """Averaged iterates. They are post-processing and may be published.

    Attributes:
        params: Mean of the constrained parameters over each coordinate's window. Pass it to
            ``Predictive(model, guide=guide, params=...)``.
        dp_sd: Standard deviation of that mean around the optimum, caused by the noise and the
            batches of the run. It is meaningless for coordinates with ``converged`` false.
        window: Number of kept iterates in each average.
        converged: Whether a window passed the check.
    """

    params: dict[str, Any]
    dp_sd: dict[str, Any]
    window: dict[str, Any]
    converged: dict[str, Any]


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
    if length < _SHORTEST:
        raise ValueError(
            f"Expected a trace of at least {_SHORTEST} iterates, got {length}. Take more steps, or "
            "keep more of them with run(..., trace_size=)."
        )
    if window is not None:
        check_int(
            "window",
            window,
            low=_SHORTEST,
            high=length,
            remedy="It counts kept iterates of the trace.",
        )
    sizes = [window] if window else [math.ceil(share * length) for share in _FRACTIONS]
    sizes = [size for size in sizes if size >= _SHORTEST]
    fallback = window or max(_SHORTEST, length // 5)
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
    converged = chosen > 0
    chosen = np.where(converged, chosen, fallback)
    mean, sd = np.empty(flat.shape[1]), np.empty(flat.shape[1])
    for size in np.unique(chosen):
        some = chosen == size
        last = flat[-size:, some]
        mean[some], sd[some] = last.mean(0), np.sqrt(fit_ar1(last).variance_of_mean)
    results = mean.astype(dtype), sd.astype(dtype), chosen, converged
    return tuple(result.reshape(shape) for result in results)
