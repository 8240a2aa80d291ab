"""A table of posterior draws: mean, standard deviation, median and interval of each coordinate."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from numpyro_dp._validate import check_int, check_real
from numpyro_dp.posterior._draws import draws_by_name
from numpyro_dp.posterior._table import shown, table_lines

__all__ = ["Summary", "summary"]

_SHOWN = 60

Values = Float[np.ndarray, " coords"]


class Summary(NamedTuple):
    """One row for each scalar coordinate; prints itself as a table.

    Attributes:
        names: Names of the coordinates, such as ``w[0]``.
        mean: Means.
        sd: Standard deviations.
        median: Medians.
        low: Lower ends of the equal-tailed intervals.
        high: Upper ends.
        level: Probability of the intervals.
        num_draws: Number of draws behind them.
    """

    names: tuple[str, ...]
    mean: Values
    sd: Values
    median: Values
    low: Values
    high: Values
    level: float
    num_draws: int

    def __str__(self) -> str:
        """The table; of long ones the first rows."""
        tail = (1 - self.level) / 2
        header = ["", "mean", "sd", "median", f"{100 * tail:.4g}%", f"{100 * (1 - tail):.4g}%"]
        columns = zip(self.mean, self.sd, self.median, self.low, self.high, strict=True)
        rows = [
            [name, *(shown(value, values[1]) for value in values)]
            for name, values, _ in zip(self.names, columns, range(_SHOWN), strict=False)
        ]
        lines = table_lines([header, *rows])
        if len(self.names) > _SHOWN:
            lines.append(f"... and {len(self.names) - _SHOWN} more rows, in the fields.")
        return "\n".join(lines)

    __repr__ = __str__


def summary(samples: dict[str, Any], level: float = 0.95) -> Summary:
    """Summarises posterior draws by scalar coordinate.

    The intervals are those of the draws. They know of the privacy noise if the draws do: see
    :func:`~numpyro_dp.noise_aware`, which also says where a run has not converged.

    Args:
        samples: Draws by site with a leading axis of draws, from
            :func:`~numpyro_dp.posterior_samples` or ``Predictive``; trees of sites will do.
        level: Probability of the equal-tailed intervals, in (0, 1).

    Raises:
        TypeError: If ``samples`` is no dict.
        ValueError: If ``level`` is outside its range, numbers of draws differ, or there is only
            one.

    Example:
        >>> import numpy as np
        >>> draws = np.random.default_rng(0).normal(size=(2000, 2))
        >>> print(summary({"w": 1 + 0.1 * draws, "scale": np.exp(draws[:, 0])}, level=0.9))
                 mean      sd  median      5%     95%
        scale    1.59    1.86    0.97    0.19    5.24
        w[0]    0.998   0.100   0.997   0.833   1.166
        w[1]   0.9994  0.0995  0.9963  0.8400  1.1636

    Guarantee:
        Reads the draws alone: a summary may be published if they may. Those from private
        parameters may; predictions for private records describe these records too.
    """
    check_real("level", level, low=0, high=1, low_open=True, high_open=True)
    draws = draws_by_name(samples)
    number = next(iter(draws.values())).shape[0]
    check_int("number of draws", number, low=2, remedy="One draw has no standard deviation.")
    names = [
        name + (f"[{','.join(map(str, index))}]" if index else "")
        for name, value in draws.items()
        for index in np.ndindex(value.shape[1:])
    ]
    flat = np.concatenate(
        [value.reshape(number, -1).astype(np.float64) for value in draws.values()], axis=1
    )
    low, median, high = np.quantile(flat, [(1 - level) / 2, 0.5, (1 + level) / 2], axis=0)
    return Summary(
        tuple(names), flat.mean(0), flat.std(0, ddof=1), median, low, high, float(level), number
    )
