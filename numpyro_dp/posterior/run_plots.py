"""Plots of runs, sweeps and budgets, with matplotlib: see :mod:`numpyro_dp.posterior.plots`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from numpyro_dp._lazy import stats
from numpyro_dp._validate import check_int
from numpyro_dp.posterior.averaging import SHORTEST, average
from numpyro_dp.posterior.plots import axes_of
from numpyro_dp.privacy.plan import PrivacyReport
from numpyro_dp.privacy.statement import true_positive_rates

__all__ = ["attack", "clip_norms", "epsilon_by_step", "iterates", "utility"]

_MOST_CURVES = 8


def iterates(result: Any, name: str, *, ax: Any = None) -> Any:
    """Draws the private iterates of one parameter, and their averages over the last steps.

    Args:
        result: A :class:`~numpyro_dp.RunResult`, or one run of a sweep.
        name: Name of the parameter, such as ``"auto_loc"``. Its first 8 entries are drawn.
        ax: Axes of matplotlib.

    Returns:
        The axes.

    Raises:
        ImportError: If matplotlib is not installed.
        ValueError: If there is no such parameter.

    Example:
        >>> import jax, numpyro, numpyro.distributions as dist, optax
        >>> from numpyro.infer.autoguide import AutoDiagonalNormal
        >>> from numpyro_dp import DPSVI, PrivacyBudget, plots
        >>> from numpyro_dp.samplers import FullBatch
        >>> def model(x):
        ...     mean = numpyro.sample("mean", dist.Normal(0, 10))
        ...     with numpyro.plate("records", x.shape[0]):
        ...         numpyro.sample("x", dist.Normal(mean, 1), obs=x)
        >>> svi = DPSVI(model, AutoDiagonalNormal(model), optax.adam(0.05), clip_norm=2.0,
        ...             sampler=FullBatch(), budget=PrivacyBudget(2.0, 1e-5))
        >>> x = 3 + jax.random.normal(jax.random.key(1), (1000,))
        >>> result = svi.run(jax.random.key(0), 100, x, progress_bar=False)
        >>> len(plots.iterates(result, "auto_loc").get_lines())  # iterates and their average
        2
    """
    trace = result.trace
    if name not in trace.params:
        known = ", ".join(sorted(trace.params))
        raise ValueError(f"The run has no parameter {name!r}. Choose one of: {known}.")
    values = np.asarray(trace.params[name])
    curves = values.reshape(len(values), -1)[:, :_MOST_CURVES]
    ax = axes_of(ax, (6.0, 3.6))
    ax.plot(trace.steps, curves, linewidth=0.8, alpha=0.8)
    if len(trace.steps) >= SHORTEST:
        found = average(trace._replace(params={name: curves}))
        for number in range(curves.shape[1]):
            ax.plot(
                trace.steps[-int(found.window[name][number]) :][[0, -1]],
                [found.params[name][number]] * 2,
                color=f"C{number}" if found.converged[name][number] else "0.4",
                linestyle="-" if found.converged[name][number] else ":",
                linewidth=2.5,
            )
    left_out = values.reshape(len(values), -1).shape[1] - curves.shape[1]
    ax.set(xlabel="step", ylabel=name + (f" ({left_out} entries left out)" * bool(left_out)))
    return ax


def clip_norms(result: Any, *, ax: Any = None) -> Any:
    """Draws the clip norms of a run with :class:`~numpyro_dp.mechanisms.AdaptiveClip`.

    Args:
        result: A :class:`~numpyro_dp.RunResult`, or one run of a sweep.
        ax: Axes of matplotlib.

    Returns:
        The axes.

    Raises:
        ImportError: If matplotlib is not installed.
        ValueError: If the clip norm of the run is fixed.

    Example:
        >>> import jax, numpyro, numpyro.distributions as dist, optax
        >>> from numpyro.infer.autoguide import AutoDiagonalNormal
        >>> from numpyro_dp import DPSVI, PrivacyBudget, plots
        >>> from numpyro_dp.mechanisms import AdaptiveClip
        >>> from numpyro_dp.samplers import FullBatch
        >>> def model(x):
        ...     mean = numpyro.sample("mean", dist.Normal(0, 10))
        ...     with numpyro.plate("records", x.shape[0]):
        ...         numpyro.sample("x", dist.Normal(mean, 1), obs=x)
        >>> svi = DPSVI(model, AutoDiagonalNormal(model), optax.adam(0.05),
        ...             clip_norm=AdaptiveClip(2.0), sampler=FullBatch(),
        ...             budget=PrivacyBudget(2.0, 1e-5))
        >>> x = 3 + jax.random.normal(jax.random.key(1), (1000,))
        >>> result = svi.run(jax.random.key(0), 100, x, progress_bar=False)
        >>> plots.clip_norms(result).get_ylabel()
        'clip norm'
    """
    norms = result.trace.clip_norm
    if norms is None:
        raise ValueError("The clip norm of this run is fixed: there is nothing to draw.")
    ax = axes_of(ax, (6.0, 3.6))
    for name, values in (norms if isinstance(norms, dict) else {"": norms}).items():
        ax.plot(result.trace.steps, values, label="other entries" if name == "..." else name)
    if isinstance(norms, dict):
        ax.legend(frameon=False)
    ax.set(xlabel="step", ylabel="clip norm")
    ax.set_ylim(bottom=0)
    return ax


def epsilon_by_step(report: PrivacyReport, *, num_points: int = 12, ax: Any = None) -> Any:
    """Draws the epsilon that a run has spent after each step, at its delta.

    Args:
        report: ``result.privacy``. Earlier runs in the budget are included.
        num_points: Number of points, each by the accountant of the run.
        ax: Axes of matplotlib.

    Returns:
        The axes.

    Raises:
        ImportError: If matplotlib is not installed.
        TypeError: If ``report`` is not the report of a run of this process.
        ValueError: If the run was not private.

    Example:
        >>> import jax, numpyro, numpyro.distributions as dist
        >>> from numpyro_dp import fit, plots
        >>> def model(x):
        ...     mean = numpyro.sample("mean", dist.Normal(0, 10))
        ...     with numpyro.plate("records", x.shape[0]):
        ...         numpyro.sample("x", dist.Normal(mean, 1), obs=x)
        >>> x = 3 + jax.random.normal(jax.random.key(1), (1000,))
        >>> posterior = fit(model, x, epsilon=1.0, rng_key=jax.random.key(0))
        >>> plots.epsilon_by_step(posterior.privacy).get_xlabel()
        'step'
    """
    check_int("num_points", num_points, low=2)
    if not isinstance(report, PrivacyReport):
        raise TypeError(
            f"Expected the PrivacyReport of a run, got {type(report).__name__}. A saved posterior "
            "has the epsilon of the whole run alone."
        )
    if not math.isfinite(report.epsilon):
        raise ValueError("The run was not private: its epsilon is infinite.")
    grid = np.linspace(0, report.num_steps, num_points + 1)[1:-1]
    steps = sorted({max(1, round(float(step))) for step in grid} - {report.num_steps})
    bounds = [min(report.plan.spent(step).epsilon, report.epsilon) for step in steps]
    ax = axes_of(ax, (6.0, 3.6))
    ax.plot([*steps, report.num_steps], [*bounds, report.epsilon], "o-", markersize=4)
    ax.set(xlabel="step", ylabel=f"epsilon at delta = {report.delta:.3g}", xlim=(0, None))
    ax.set_ylim(bottom=0)
    return ax


def utility(
    runs: Any, score: str, *, x: str = "epsilon", by: str | None = None, ax: Any = None
) -> Any:
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
    ax, numbers = axes_of(ax, (6.0, 3.6)), set()
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


def attack(privacy: Any, *, ax: Any = None) -> Any:
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
    ax = axes_of(ax, (4.2, 4.2))
    ax.plot([0, 1], [0, 1], color="0.7", linewidth=1, zorder=0)
    for name, each in found.items():
        text = f"epsilon = {each.epsilon:.3g}, delta = {each.delta:.2g}"
        ax.plot(rates, true_positive_rates(each, rates), label=f"{name}: {text}" if name else text)
    ax.legend(loc="lower right", frameon=False, fontsize="small")
    ax.set(xlim=(0, 1), ylim=(0, 1.01), aspect="equal")
    ax.set(xlabel="false positive rate", ylabel="true positive rate, at most")
    return ax
