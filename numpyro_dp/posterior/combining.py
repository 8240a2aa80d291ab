r"""Inference from several private synthetic data sets.

``posterior.predict(rng_key, ..., num_samples=m)`` draws m sets from the posterior predictive, with
one posterior draw for each set. So they may be published. An analysis of them gives estimates
:math:`q_l` with variances :math:`u_l`. Let :math:`\bar q, \bar u` be their means, and b the
variance of the estimates.
Rubin's rules for the variance of :math:`\bar q` are

.. math::
    T_{missing} = \bar u + (1 + \tfrac1m)\, b, \qquad
    T_{partial} = \bar u + \tfrac1m b, \qquad
    T_{full} = (1 + \tfrac1m)\, b - \bar u.

The rule depends on how the sets were made. Use *full* if every value is drawn from the posterior
predictive, *partial* if records keep some of their own values, and *missing* if synthetic values
fill gaps.

Reference:
    J. P. Reiter, T. E. Raghunathan, "The multiple adaptations of multiple imputation", JASA 102
    (2007), 1462-1471; J. P. Reiter, "Satisfying disclosure restrictions with synthetic data sets",
    J. Official Statistics 18 (2002), for the variance that replaces a negative one.
"""

from __future__ import annotations

import warnings
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from numpyro_dp._lazy import stats
from numpyro_dp._validate import check_in, check_int, check_real
from numpyro_dp.posterior.diagnosis import PosteriorWarning

Values = Float[np.ndarray, "..."]


class Combined(NamedTuple):
    """An estimate from several synthetic sets.

    Attributes:
        estimate: Mean of the estimates.
        sd: Its standard deviation.
        degrees: Degrees of freedom of the t distribution behind the intervals.

    Example:
        >>> import numpy as np
        >>> from numpyro_dp.posterior import combine
        >>> low, high = combine(np.array([1.0, 2.0, 3.0]), np.full(3, 0.1)).interval(0.9)
        >>> bool(low < 2 < high)
        True
    """

    estimate: Values
    sd: Values
    degrees: Values

    def interval(self, level: float = 0.95) -> tuple[Values, Values]:
        """Returns the ends of the central intervals with probability ``level``."""
        check_real("level", level, low=0, high=1, low_open=True, high_open=True)
        half = stats.t.ppf((1 + level) / 2, self.degrees) * self.sd
        return self.estimate - half, self.estimate + half


def combine(
    estimates: Values, variances: Values, kind: str = "full", size_ratio: float = 1.0
) -> Combined:
    """Combines estimates from several synthetic sets by Rubin's rules.

    With ``"full"`` and few sets, the variance can be negative. ``combine`` then uses ``size_ratio``
    times the mean variance of a set (Reiter 2002) and warns: this leaves out the noise of privacy.
    Sets cost no budget, so take a hundred.

    Args:
        estimates: Estimates from each set, shape ``(m, ...)``, m >= 2.
        variances: Squared standard errors of the estimates, with the same shape.
        kind: How the sets were made: ``"full"``, ``"partial"`` or ``"missing"``.
        size_ratio: Records in a synthetic set, divided by records in the original data.

    Raises:
        ValueError: If a value is outside its range, or shapes differ.

    Warns:
        PosteriorWarning: If the variance of an estimate had to be replaced.

    Example:
        >>> import numpy as np
        >>> combined = combine(np.array([1.0, 2.0, 3.0]), np.full(3, 0.1))
        >>> float(combined.estimate), round(float(combined.sd), 3)
        (2.0, 1.111)
    """
    check_in("kind", kind, ("full", "partial", "missing"))
    check_real("size_ratio", size_ratio, low=0, low_open=True)
    q, u = np.asarray(estimates, float), np.asarray(variances, float)
    if q.shape != u.shape or q.ndim == 0:
        raise ValueError(f"Expected variances of shape {q.shape}, got {u.shape}.")
    number = check_int("number of synthetic sets", q.shape[0], low=2)
    if not (u > 0).all():
        raise ValueError(
            f"variances must be above 0, got a smallest value of {u.min()}. Pass squared standard "
            "errors."
        )
    within = u.mean(0)
    between = np.maximum(q.var(0, ddof=1), 1e-12 * within)  # above 0 for equal estimates
    if kind == "full":
        total = (1 + 1 / number) * between - within
        ratio = 1 - within / ((1 + 1 / number) * between)
        degrees = (number - 1) * np.square(ratio)
        negative = total <= 0
        if negative.any():
            warnings.warn(
                f"{number} synthetic sets are too few: the estimates vary less between them than "
                "within one. The variance was replaced by that within one set, which leaves out "
                "the noise of privacy. Draw more sets, such as 100. They cost no budget.",
                PosteriorWarning,
                stacklevel=2,
            )
        total = np.where(negative, size_ratio * within, total)
        degrees = np.where(negative, number - 1, np.maximum(degrees, 1))
    else:
        share = between / number if kind == "partial" else (1 + 1 / number) * between
        total, degrees = within + share, (number - 1) * np.square(1 + within / share)
    return Combined(q.mean(0), np.sqrt(total), degrees)
