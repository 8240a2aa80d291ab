"""A summary of a posterior as a mapping, and how its figures are printed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from numpyro_dp._validate import check_real

Names = Mapping[str, Sequence[str]]
_SHOWN, _SHOWN_KEYS = 60, ("mean", "sd", "lower", "upper")


class PosteriorSummary(dict[str, dict[str, np.ndarray]]):
    """Summaries by site. It prints as a table.

    Args:
        sites: ``{"mean", "sd", "lower", "upper", "prior_share"}`` by site.
        prob: Mass of the intervals.
        coords: Names of the entries of sites with one dimension.

    Attributes:
        prob: Mass of the intervals.

    Example:
        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
        >>> from numpyro_dp import fit
        >>> def model(x):
        ...     mean = numpyro.sample("mean", dist.Normal(0, 1))
        ...     with numpyro.plate("records", x.shape[0]):
        ...         numpyro.sample("x", dist.Normal(mean, 1), obs=x)
        >>> posterior = fit(model, jnp.full(2000, 0.5), epsilon=1.0, rng_key=jax.random.key(0))
        >>> summary = posterior.summary(prob=0.9)
        >>> bool(summary["mean"]["lower"] < 0.5 < summary["mean"]["upper"])
        True
    """

    prob: float

    def __init__(
        self, sites: dict[str, dict[str, np.ndarray]], prob: float, coords: Names | None = None
    ) -> None:
        super().__init__(sites)
        self.prob, self._coords = prob, coords or {}

    def to_frame(self) -> Any:
        """Returns a ``pandas.DataFrame`` with a row for each entry of a site.

        Raises:
            ImportError: If pandas is not installed.
        """
        import pandas

        rows = {
            entry_name(name, index, self._coords): {k: float(v[index]) for k, v in site.items()}
            for name, site in self.items()
            for index in np.ndindex(site["mean"].shape)
        }
        return pandas.DataFrame.from_dict(rows, orient="index")

    def __str__(self) -> str:
        """The table, or its first 60 rows."""
        tail = 50 * (1 - self.prob)
        header = ["", "mean", "sd", _percent(tail), _percent(100 - tail), "prior share"]
        total = sum(site["mean"].size for site in self.values())
        rows = itertools.islice(entry_rows(self, _SHOWN_KEYS, self._coords), _SHOWN)
        lines = table_lines([header, *rows])
        if total > _SHOWN:
            lines.append(f"... and {total - _SHOWN} more rows, by site.")
        return "\n".join(lines)

    __repr__ = __str__


def interval(draws: np.ndarray, prob: float) -> np.ndarray:
    """The ends of the equal-tailed interval of mass ``prob``, from draws."""
    prob = check_real("prob", prob, low=0, high=1, low_open=True, high_open=True)
    return np.quantile(draws, [(1 - prob) / 2, (1 + prob) / 2], axis=0)


def count_of(number: int) -> str:
    """A number of latents as text."""
    return "1 latent" if number == 1 else f"{number} latents"


def entry_name(name: str, index: tuple[int, ...], coords: Names = MappingProxyType({})) -> str:
    """The name of one entry of a site, such as ``w[0,1]``, or ``w[age]`` if entries have names."""
    if name in coords:
        return f"{name}[{coords[name][index[0]]}]"
    return name + (f"[{','.join(map(str, index))}]" if index else "")


def entry_rows(
    sites: Mapping[str, Mapping[str, np.ndarray]],
    keys: Sequence[str],
    coords: Names = MappingProxyType({}),
) -> Iterator[list[str]]:
    """A row of a table for each entry: its name, its values by key, and the share of the prior."""
    for name, site in sites.items():
        for index in np.ndindex(site["mean"].shape):
            at = {key: float(value[index]) for key, value in site.items()}
            share = "-" if math.isnan(at["prior_share"]) else f"{at['prior_share']:.2f}"
            yield [
                entry_name(name, index, coords),
                *(_shown(at[key], at["sd"]) for key in keys),
                share,
            ]


def _percent(value: float) -> str:
    """A percentage as text, with at least one decimal and as many as it needs."""
    text = f"{value:.6g}"
    return f"{text}%" if "." in text else f"{text}.0%"


def _shown(value: float, sd: float) -> str:
    """Gives a value as text, with enough decimals to show three digits of ``sd``."""
    if not 1e-6 < sd < 1e6:
        return f"{value:.4g}"
    return f"{value:.{max(0, 2 - math.floor(math.log10(sd)))}f}"


def table_lines(rows: Sequence[Sequence[str]]) -> list[str]:
    """Gives one line for each row, with the first column aligned left and the others right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows
    ]
