"""Plots of private posteriors and budgets, with matplotlib.

Each function draws into ``ax``, or into the axes of a new figure, and returns the axes. You choose
size, titles and file with matplotlib: ``plots.forest(found).figure.savefig("visits.svg")``.
Other plots of a posterior come from ArviZ, by ``posterior.to_arviz()``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from numpyro_dp._lazy import stats
from numpyro_dp.posterior.inference_data import draws_by_name
from numpyro_dp.posterior.posterior import Posterior
from numpyro_dp.posterior.summary import entry_name, interval
from numpyro_dp.privacy.statement import true_positive_rates

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["attack", "forest", "utility"]

_MOST = 60  # entries in one plot


def forest(
    found: Mapping[str, object],
    site: str,
    *,
    prob: float = 0.9,
    labels: Sequence[str] | None = None,
    entries: Sequence[int] | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Draws means and intervals of one site, for several posteriors side by side.

    Args:
        found: Posteriors by name: a :class:`~numpyro_dp.Posterior`, the result of a run,
            ``numpyro.infer.MCMC`` after its run, or draws by site.
        site: Name of the site.
        prob: Mass of the intervals.
        labels: Names of all entries of the site. By default the site with indices.
        entries: Which entries to draw, by their number, in this order. By default all.
        ax: Axes of matplotlib.

    Returns:
        The axes.

    Raises:
        ImportError: If matplotlib is not installed.
        ValueError: If ``found`` is empty, a posterior has no such site, the sites have different
            shapes, ``labels`` has another length, or there are more than 60 entries to draw.

    Example:
        >>> import numpy as np
        >>> from numpyro_dp import plots
        >>> draws = {"w": np.random.default_rng(0).normal(size=(1000, 3))}
        >>> ax = plots.forest({"private": draws, "NUTS": draws}, "w", labels=["a", "b", "c"])
        >>> [text.get_text() for text in ax.get_yticklabels()]
        ['a', 'b', 'c']
    """
    if not found:
        raise ValueError("Expected at least one posterior in found, got none.")
    rows = {name: _interval(name, each, site, prob) for name, each in found.items()}
    shapes = {name: mean.shape for name, (mean, *_) in rows.items()}
    shape = next(iter(shapes.values()))
    if len(set(shapes.values())) > 1:
        raise ValueError(f"Site {site!r} has different shapes: {shapes}. Compare equal models.")
    if labels is None:
        labels = [entry_name(site, index) for index in np.ndindex(shape)]
    shown = list(range(math.prod(shape)) if entries is None else entries)
    known = range(math.prod(shape))
    if len(labels) != len(known) or len(shown) > _MOST or not set(shown) <= set(known):
        raise ValueError(
            f"Site {site!r} has {len(known)} entries, got {len(labels)} labels. A plot has room "
            f"for {_MOST} entries: choose some by their numbers from 0 on, entries=[0, 1]."
        )
    names = [labels[each] for each in shown]
    ax = _axes_of(ax, (6.0, 1.0 + 0.16 * len(names) * (len(rows) + 1)))
    places = np.arange(len(names))
    for number, (name, (mean, lower, upper)) in enumerate(rows.items()):
        shift = 0.7 * ((number + 0.5) / len(rows) - 0.5)
        mean, lower, upper = (each.ravel()[shown] for each in (mean, lower, upper))
        ax.hlines(places + shift, lower, upper, color=f"C{number}", linewidth=2)
        ax.plot(mean, places + shift, "o", color=f"C{number}", markersize=4, label=name)
    ax.set_yticks(places, names)
    ax.set_ylim(len(names) - 0.5, -0.5)
    ax.axvline(0, color="0.8", linewidth=1, zorder=0)
    ax.set_xlabel(f"mean and {100 * prob:g} % interval")
    if len(rows) > 1:
        ax.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=2, frameon=False)
    return ax


def utility(
    runs: Any, score: str, *, x: str = "epsilon", by: str | None = None, ax: Axes | None = None
) -> Axes:
    """Draws the mean of a score at each budget, with standard errors over runs.

    Args:
        runs: A mapping of columns or a data frame, one row a run, such as ``sweep.to_frame(...)``.
        score: Column of the score.
        x: Column on the horizontal axis, which is logarithmic.
        by: Column of labels. Each label is one curve.
        ax: Axes of matplotlib.

    Returns:
        The axes.

    Raises:
        ImportError: If matplotlib is not installed.
        ValueError: If a column is missing, or a value of ``x`` is not positive.

    Example:
        >>> from numpyro_dp import plots
        >>> runs = {"epsilon": [0.1, 0.1, 1.0, 1.0], "error": [0.9, 1.1, 0.2, 0.3]}
        >>> plots.utility(runs, "error").get_ylabel()
        'error (mean, standard error of 2 runs)'
    """
    missing = [name for name in (x, score, by) if name is not None and name not in runs]
    if missing:
        raise ValueError(f"The runs have no column {missing[0]!r}. Columns: {', '.join(runs)}.")
    places, values = np.asarray(runs[x], float), np.asarray(runs[score], float)
    if not np.all(places > 0):
        raise ValueError(f"Expected positive values of {x!r}, as its axis is logarithmic.")
    groups = np.asarray(runs[by]) if by is not None else np.full(len(places), "")
    ax, numbers = _axes_of(ax, (6.0, 3.6)), set()
    for group in dict.fromkeys(groups.tolist()):
        at = np.unique(places[groups == group])
        samples = [values[(groups == group) & (places == place)] for place in at]
        numbers |= {len(each) for each in samples}
        errors = [stats.sem(each) if len(each) > 1 else np.nan for each in samples]
        means = [each.mean() for each in samples]
        ax.errorbar(at, means, errors, fmt="o-", capsize=3, markersize=4, label=str(group))
    ax.set_xscale("log")
    ax.set_xticks(np.unique(places), [f"{place:g}" for place in np.unique(places)])
    ax.minorticks_off()
    ax.set_xlabel(x)
    least, most = min(numbers), max(numbers)
    count = f"{most}" if least == most else f"{least} to {most}"
    ax.set_ylabel(f"{score} (mean, standard error of {count} runs)" if most > 1 else score)
    if by is not None:
        ax.legend(title=by, frameon=False)
    return ax


def attack(privacy: Any, *, ax: Axes | None = None) -> Axes:
    """Draws what epsilon means: how well anybody can find out whether a record was in the data.

    Args:
        privacy: ``result.privacy``, a :class:`~numpyro_dp.PrivacyBudget` or a
            :class:`~numpyro_dp.accounting.Statement`, or several by name.
        ax: Axes of matplotlib.

    Returns:
        The axes. No test from the released values lies above the curve. A coin lies on the
        diagonal. A report has pairs of epsilon at several deltas, so its curve is lower than that
        of a budget of the same size.

    Raises:
        ImportError: If matplotlib is not installed.

    Example:
        >>> from numpyro_dp import PrivacyBudget, plots
        >>> ax = plots.attack({"a": PrivacyBudget(1.0, 1e-5), "b": PrivacyBudget(3.0, 1e-5)})
        >>> ax.get_xlabel()
        'false positive rate'
    """
    found = dict(privacy) if isinstance(privacy, Mapping) else {"": privacy}
    rates = np.linspace(0, 1, 201)
    ax = _axes_of(ax, (4.2, 4.2))
    ax.plot([0, 1], [0, 1], color="0.7", linewidth=1, zorder=0)
    for name, each in found.items():
        text = f"epsilon = {each.epsilon:.3g}, delta = {each.delta:.2g}"
        ax.plot(rates, true_positive_rates(each, rates), label=f"{name}: {text}" if name else text)
    ax.legend(loc="lower right", frameon=False, fontsize="small")
    ax.set(xlim=(0, 1), ylim=(0, 1.01), aspect="equal")
    ax.set(xlabel="false positive rate", ylabel="true positive rate, at most")
    return ax


def _axes_of(ax: Axes | None, size: tuple[float, float]) -> Axes:
    """Returns ``ax``, or the axes of a new figure of this size in inches."""
    if ax is not None:
        return ax
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError(
            'Plots need matplotlib, which is not installed. Run pip install "numpyro-dp[plot]".'
        ) from error
    return plt.subplots(figsize=size, layout="constrained")[1]


def _interval(name: str, posterior: Any, site: str, prob: float) -> tuple[np.ndarray, ...]:
    posterior = getattr(posterior, "posterior", posterior)  # of a result
    if hasattr(posterior, "get_samples"):  # numpyro.infer.MCMC
        posterior = posterior.get_samples()
    draws = posterior._fixed_draws if isinstance(posterior, Posterior) else draws_by_name(posterior)
    if site not in draws:
        raise ValueError(f"{name!r} has no site {site!r}. Choose one of: {', '.join(draws)}.")
    return np.mean(draws[site], 0, dtype=np.float64), *interval(draws[site], prob)
