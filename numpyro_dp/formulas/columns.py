r"""Private means, standard deviations and quantiles of columns, such as their public scales.

A number v of a column with the public range :math:`[l, h]` becomes :math:`u = (2v - l - h) / (h-l)`
in :math:`[-1, 1]`. For each column a record adds

.. math:: \big(1,\; u,\; u^2 - \tfrac12,\; e_{b(u)}\big),

or zeros if its value is missing. The last part has a 1 in the bin b(u) of a histogram, and is left
out without quantiles. So a record of d columns has norm at most :math:`\sqrt{2.25\,d}`, or
:math:`\sqrt{3.25\,d}` with quantiles.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from scipy.optimize import isotonic_regression

from numpyro_dp._validate import check_real
from numpyro_dp.core import Arrays, PyTree
from numpyro_dp.model.frames import design
from numpyro_dp.model.records import RecordsProblem, read_records
from numpyro_dp.privacy.budget import PrivacyBudget
from numpyro_dp.privacy.plan import PrivacyReport
from numpyro_dp.privacy.sampling import FullBatch
from numpyro_dp.run.driver import OneSum
from numpyro_dp.run.settings import Privacy, RunSettings

_BINS = 64
_HIDDEN = 0.1  # noise in a mean (half ranges) or a share of records, above which it is not shown


class ColumnSummary(NamedTuple):
    """Private figures of columns. You may publish them.

    Attributes:
        mean: Mean of each column. ``nan`` where noise hides it, here and below.
        mean_error: Standard deviation of the privacy noise in it, about.
        sd: Standard deviation of each column.
        scale: Root mean square of each column, for ``DPLaplace(..., scales=)`` or to divide the
            column by. Where noise hides it, that of a column which is uniform on its range.
        quantiles: For each column the quantiles that were asked for, by probability.
        privacy: The privacy report.
    """

    mean: dict[str, float]
    mean_error: dict[str, float]
    sd: dict[str, float]
    scale: dict[str, float]
    quantiles: dict[str, dict[float, float]]
    privacy: PrivacyReport

    def __str__(self) -> str:
        """A line for each column, and what was spent."""
        width = max(map(len, self.mean))
        lines = [f"{'':{width}} {'mean':>10} {'noise':>8} {'sd':>10}"]
        for name, mean in self.mean.items():
            shown = "".join(f"  {p:g}: {v:.4g}" for p, v in self.quantiles[name].items())
            lines.append(
                f"{name:{width}} {mean:10.4g} {self.mean_error[name]:8.2g} "
                f"{self.sd[name]:10.4g}{shown}"
            )
        return "\n".join([*lines, repr(self.privacy)])


def summarize_columns(
    frame: Any,
    ranges: Mapping[str, tuple[float, float]],
    *,
    budget: PrivacyBudget,
    quantiles: Sequence[float] = (),
    secret_key: object = None,
) -> ColumnSummary:
    r"""Releases means, standard deviations and quantiles of columns by one noisy sum.

    Args:
        frame: A frame of pandas, Polars or PyArrow, or a dict of arrays. A row is a record.
        ranges: The public range (low, high) of each column. Values outside count as its ends.
        budget: Epsilon and delta to spend, such as ``ledger.budget(0.1, purpose="scales")``.
        quantiles: Probabilities of quantiles, such as ``(0.25, 0.5, 0.75)``. They come from a
            histogram of 64 bins, and cost the other figures accuracy.
        secret_key: As for :class:`~numpyro_dp.DPSVI`.

    Raises:
        TypeError, ValueError: If a range or a quantile is not one, or a column does not hold
            numbers.
        BudgetError: If earlier runs have spent the budget.

    Example:
        >>> import numpy as np
        >>> from numpyro_dp import PrivacyBudget
        >>> rng = np.random.default_rng(0)
        >>> frame = {"age": rng.uniform(20, 60, 10_000), "income": rng.normal(3e4, 5e3, 10_000)}
        >>> found = summarize_columns(frame, {"age": (0, 100), "income": (0, 1e5)},
        ...                           budget=PrivacyBudget(1.0, 1e-5))
        >>> abs(found.mean["age"] - 40) < 2, abs(found.sd["income"] - 5e3) < 1e3
        (True, True)

    Guarantee:
        All figures are computed from one Gaussian release and the number of records, which is
        public. The norm above bounds what a record adds, so nothing is clipped.
    """
    for name, ends in ranges.items():
        if not isinstance(ends, tuple):
            raise TypeError(f"Expected a range (low, high) for {name!r}, got {ends!r}.")
    probs = [check_real("a quantile", p, low=0, high=1, low_open=True, high_open=True)
             for p in quantiles]  # fmt: skip
    matrix, names = design(frame, ranges, intercept=False)
    size, parts = len(names), ("count", "first", "second", "bins")[: 3 + bool(probs)]
    zeros = {part: jnp.zeros((size, _BINS) if part == "bins" else size) for part in parts}

    def signal(public: PyTree, key: Array, example: Arrays) -> dict[str, Array]:
        return {part: _terms(example)[part] for part in parts}

    settings = RunSettings(
        clip_norm=_bound(size, bool(probs)), sampler=FullBatch(), budget=budget,
        privacy=Privacy(secret_key=secret_key),
    )  # fmt: skip
    records = read_records(lambda x: None, (matrix,), {}, len(matrix))
    driver = OneSum(settings, RecordsProblem(records), (), zeros, signal)
    sums, privacy = driver.total(jax.random.key(0), matrix)
    noise = settings.noise_scale(privacy.noise_multiplier, len(matrix))
    return _summary(dict(zip(names, ranges.values(), strict=True)), sums, noise, probs, privacy)


def _summary(
    ranges: dict[str, tuple[float, float]],
    sums: dict[str, np.ndarray],
    noise: float,
    probs: list[float],
    privacy: PrivacyReport,
) -> ColumnSummary:
    found = ColumnSummary({}, {}, {}, {}, {}, privacy)
    for at, (name, (low, high)) in enumerate(ranges.items()):
        half, middle = (high - low) / 2, (high + low) / 2
        count = max(sums["count"][at], 1.0)
        mean, square = sums["first"][at] / count, sums["second"][at] / count + 0.5
        error = noise / count * math.sqrt(1 + mean**2)  # of the mean, whose count is noisy too
        hidden = error > _HIDDEN
        found.mean[name] = math.nan if hidden else float(middle + half * np.clip(mean, -1, 1))
        found.mean_error[name] = half * error
        # The noise of the mean moves its square by twice the mean.
        variance, spread = square - mean**2, 2 * noise / count * math.sqrt(1 + 4 * mean**2)
        seen = not hidden and variance > spread
        found.sd[name] = half * math.sqrt(min(variance, 1)) if seen else math.nan
        # Where noise hides the records, the scale is that of a uniform column.
        centre = middle if hidden else found.mean[name]
        found.scale[name] = math.hypot(centre, found.sd[name] if seen else half / math.sqrt(3))
        found.quantiles[name] = {}
        if probs:
            shares = np.cumsum(sums["bins"][at]) / count
            shares = np.clip(isotonic_regression(shares).x, 0, 1)
            ends = np.linspace(low, high, _BINS + 1)
            sure = noise / count * math.sqrt(_BINS / 2) < _HIDDEN
            for prob in probs:
                value = float(np.interp(prob, [0, *shares], ends))
                found.quantiles[name][prob] = value if sure else math.nan
    return found


def _bound(size: int, histogram: bool) -> float:
    return math.sqrt((3.25 if histogram else 2.25) * size)


def _terms(example: Arrays) -> dict[str, Array]:
    """What a record adds for each column."""
    (u,) = example
    known = jnp.isfinite(u)
    counted, u = known.astype(u.dtype), jnp.where(known, u, 0)
    place = jnp.clip(jnp.floor((u + 1) / 2 * _BINS).astype(int), 0, _BINS - 1)
    bins = counted[:, None] * jax.nn.one_hot(place, _BINS, dtype=u.dtype)
    return {"count": counted, "first": u, "second": counted * (u**2 - 0.5), "bins": bins}
