"""Pictures of calibration and uncertainty, on matplotlib axes; they read predictions alone.

Forests, traces and predictive checks are ArviZ's: it takes ``to_arviz(draws, result.privacy)``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from jaxtyping import Integer, Real

from numpyro_dp.evaluate.classification import calibration_error, reliability
from numpyro_dp.evaluate.prediction import central_intervals

__all__ = ["plot_class_probabilities", "plot_intervals", "plot_reliability"]


def plot_reliability(
    axis: Any,
    probabilities: Real[np.ndarray, "*draws records classes"],
    labels: Integer[np.ndarray, " records"],
    bins: int = 15,
    equal_mass: bool = False,
) -> Any:
    """Draws accuracy against confidence, with the expected and the largest error.

    Args:
        axis: A matplotlib axis, which is returned.
        probabilities: Of each class; averaged over draws.
        labels: Class of each record.
        bins: Number of bins.
        equal_mass: Bins with as many records each.

    Example:
        >>> import matplotlib.pyplot as plt, numpy as np
        >>> p = np.random.default_rng(0).dirichlet(np.ones(3), 100)
        >>> figure, axis = plt.subplots()
        >>> plot_reliability(axis, p, p.argmax(1)).get_xlabel()
        'confidence'
    """
    p = np.asarray(probabilities, float)
    p = p.mean(axis=0) if p.ndim == 3 else p
    top, right = p.max(1), p.argmax(1) == np.asarray(labels)
    found = reliability(top, right, bins, equal_mass)
    expected, largest = calibration_error(top, right, bins, equal_mass)
    width = 0.9 / bins
    axis.bar(found.confidence, found.accuracy, width=width, color="tab:blue", label="accuracy")
    axis.bar(
        found.confidence, found.confidence - found.accuracy, width=width, bottom=found.accuracy,
        facecolor="none", edgecolor="tab:red", hatch="///", label="gap",
    )  # fmt: skip
    axis.plot([0, 1], [0, 1], color="black", linewidth=0.8, linestyle="--")
    axis.set(xlim=(0, 1), ylim=(0, 1), xlabel="confidence", ylabel="accuracy")
    axis.set_title(f"ECE {expected:.3f}, MCE {largest:.3f}")
    axis.legend(loc="upper left", framealpha=0.9)
    return axis


def plot_class_probabilities(
    axis: Any,
    draws: Real[np.ndarray, "draws classes"],
    label: int | None = None,
    bins: int = 10,
) -> Any:
    """Draws a histogram over posterior draws of each class's probability, for one record.

    Args:
        axis: A matplotlib axis, which is returned.
        draws: Probability of each class under each draw.
        label: The true class, drawn in red.
        bins: Number of bins.

    Example:
        >>> import matplotlib.pyplot as plt, numpy as np
        >>> draws = np.random.default_rng(0).dirichlet(np.ones(3), 50)
        >>> figure, axis = plt.subplots()
        >>> plot_class_probabilities(axis, draws, label=1).get_ylabel()
        'draws'
    """
    draws = np.asarray(draws, float)
    if draws.ndim != 2:
        raise ValueError(f"Expected draws of shape (draws, classes), got {draws.shape}.")
    number = draws.shape[1]
    greys = [f"{0.35 + 0.5 * k / max(number - 1, 1):.2f}" for k in range(number)]
    colours = ["tab:red" if k == label else greys[k] for k in range(number)]
    axis.hist(
        list(draws.T), bins=np.linspace(0, 1, bins + 1), color=colours,
        label=[str(k) for k in range(number)],
    )  # fmt: skip
    axis.set(xlim=(0, 1), xlabel="probability of a class", ylabel="draws")
    return axis


def plot_intervals(
    axis: Any,
    x: Real[np.ndarray, " points"],
    draws: Real[np.ndarray, "draws points"],
    levels: tuple[float, ...] = (0.5, 0.9),
) -> Any:
    """Draws the mean over draws and central intervals of a function of one input.

    Args:
        axis: A matplotlib axis, which is returned.
        x: Inputs.
        draws: Values at the inputs, one row a draw.
        levels: Probabilities of the intervals.

    Example:
        >>> import matplotlib.pyplot as plt, numpy as np
        >>> x = np.linspace(0, 1, 20)
        >>> figure, axis = plt.subplots()
        >>> _ = plot_intervals(axis, x, np.random.default_rng(0).normal(size=(50, 20)))
    """
    order, draws = np.argsort(x), np.asarray(draws, float)
    for level in sorted(levels, reverse=True):
        low, high = central_intervals(draws, level)
        axis.fill_between(
            np.asarray(x)[order], low[order], high[order], color="tab:blue", alpha=0.25,
            linewidth=0, label=f"{level:.0%} interval",
        )  # fmt: skip
    axis.plot(np.asarray(x)[order], draws.mean(axis=0)[order], color="tab:blue", label="mean")
    return axis
