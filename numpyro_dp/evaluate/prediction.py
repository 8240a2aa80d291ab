"""How good predictions and intervals are."""

from __future__ import annotations

import numpy as np
from jaxtyping import Shaped
from scipy.special import logsumexp

from numpyro_dp._validate import check_real

__all__ = ["central_intervals", "coverage", "log_predictive_density"]

Draws = Shaped[np.ndarray, "draws ..."]
Values = Shaped[np.ndarray, "..."]


def log_predictive_density(
    log_likelihood: Draws,
) -> Values:
    r"""Returns :math:`\log \frac1S\sum_s p(x_i \mid \theta_s)` for each held-out record, in nats.

    Args:
        log_likelihood: Of each record under each posterior draw, as
            ``numpyro.infer.log_likelihood`` gives it.

    Example:
        >>> import numpy as np
        >>> log_predictive_density(np.log(np.array([[0.2, 0.5], [0.4, 0.5]]))).round(4)
        array([-1.204 , -0.6931])
    """
    values = np.asarray(log_likelihood, float)
    return logsumexp(values, axis=0) - np.log(values.shape[0])


def coverage(
    draws: Draws,
    truth: Values,
    level: float = 0.9,
) -> float:
    """Returns the part of the central intervals that hold the truth.

    Args:
        draws: Posterior draws.
        truth: True values, without the first axis.
        level: Probability of the intervals, in (0, 1).

    Raises:
        ValueError: If the shapes do not fit, or the level is outside its range.

    Example:
        >>> import numpy as np
        >>> draws = np.random.default_rng(0).normal(size=(1000, 3))
        >>> coverage(draws, np.array([0.0, 1.0, 3.0]))
        0.6666666666666666
    """
    if np.shape(draws)[1:] != np.shape(truth):
        raise ValueError(f"Expected truth of shape {np.shape(draws)[1:]}, got {np.shape(truth)}.")
    low, high = central_intervals(draws, level)
    return float(np.mean((low <= truth) & (truth <= high)))


def central_intervals(draws: Draws, level: float = 0.9) -> tuple[Values, Values]:
    """Returns the lower and the upper end of the central intervals of draws.

    Args:
        draws: Posterior (or posterior predictive) draws.
        level: Probability of the intervals, in (0, 1).

    Example:
        >>> import numpy as np
        >>> low, high = central_intervals(np.arange(101.0), 0.5)
        >>> float(low), float(high)
        (25.0, 75.0)
    """
    check_real("level", level, low=0, high=1, low_open=True, high_open=True)
    low, high = np.quantile(draws, [(1 - level) / 2, (1 + level) / 2], axis=0)
    return low, high
