"""How good predictions and intervals are."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Shaped
from scipy.special import logsumexp

from numpyro_dp._validate import check_int, check_real

__all__ = ["calibration_error", "coverage", "log_predictive_density"]

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
    check_real("level", level, low=0, high=1, low_open=True, high_open=True)
    if np.shape(draws)[1:] != np.shape(truth):
        raise ValueError(f"Expected truth of shape {np.shape(draws)[1:]}, got {np.shape(truth)}.")
    low, high = np.quantile(draws, [(1 - level) / 2, (1 + level) / 2], axis=0)
    return float(np.mean((low <= truth) & (truth <= high)))


def calibration_error(
    probabilities: Float[np.ndarray, " records"],
    outcomes: Shaped[np.ndarray, " records"],
    bins: int = 15,
    equal_mass: bool = False,
) -> tuple[float, float]:
    r"""Expected and largest calibration error of predicted probabilities.

    .. math:: \mathrm{ECE} = \sum_b \tfrac{n_b}{n}\, |\bar y_b - \bar p_b|, \qquad
        \mathrm{MCE} = \max_b |\bar y_b - \bar p_b|.

    For several classes pass the largest probability, and whether that class was right.

    Args:
        probabilities: Predicted probability of the outcome, in [0, 1].
        outcomes: Whether it came: 0 or 1.
        bins: Number of bins; empty ones do not count.
        equal_mass: Bins with as many records each, instead of equally wide ones.

    Raises:
        ValueError: If a value is outside its range, or the shapes differ.

    Example:
        >>> import numpy as np
        >>> p, y = np.array([0.1, 0.1, 0.9, 0.9]), np.array([0, 0, 1, 0])
        >>> tuple(round(error, 3) for error in calibration_error(p, y, bins=2))
        (0.25, 0.4)

    Reference:
        Guo, Pleiss, Sun, Weinberger (2017), On calibration of modern neural networks, ICML.
    """
    check_int("bins", bins, low=1)
    p, y = np.asarray(probabilities, float), np.asarray(outcomes, float)
    if p.shape != y.shape:
        raise ValueError(f"Expected outcomes of shape {p.shape}, got {y.shape}.")
    if p.size == 0 or p.min() < 0 or p.max() > 1 or not np.isin(y, (0, 1)).all():
        raise ValueError("Expected at least one probability in [0, 1], and outcomes 0 or 1.")
    if equal_mass:
        place = np.empty(p.size, int)
        place[np.argsort(p, kind="stable")] = np.arange(p.size) * bins // p.size
    else:
        place = np.minimum((p * bins).astype(int), bins - 1)
    counts = np.bincount(place, minlength=bins)
    gaps = np.abs(np.bincount(place, y - p, minlength=bins))
    held = counts > 0
    return float(gaps.sum() / p.size), float(np.max(gaps[held] / counts[held]))
