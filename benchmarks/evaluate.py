"""Scores of predictions, and pictures of them.

Class probabilities have the shape (draws, records, classes), or (records, classes). Scores are
those of their mean over draws, which is the posterior predictive probability.
"""

import numpy as np
from scipy.special import logsumexp


def accuracy(probabilities, labels):
    """Part of the records whose most probable class is right."""
    return np.mean(_mean(probabilities).argmax(1) == labels)


def log_score(probabilities, labels):
    """Mean over records of the log probability of the label, in nats."""
    with np.errstate(divide="ignore"):
        return np.mean(np.log(_mean(probabilities)[np.arange(len(labels)), labels]))


def brier_score(probabilities, labels):
    """Mean over records of the squared distance to the label, summed over classes."""
    mean = _mean(probabilities)
    right = np.arange(mean.shape[1]) == np.asarray(labels)[:, None]
    return np.mean(np.sum((mean - right) ** 2, axis=1))


def reliability(probabilities, outcomes, bins=15):
    """Mean probability, part that came and number of records, of each equally wide bin in use."""
    p, y = np.asarray(probabilities, float), np.asarray(outcomes, float)
    place = np.minimum((p * bins).astype(int), bins - 1)
    count = np.bincount(place, minlength=bins)
    held = count > 0
    sums = [np.bincount(place, values, minlength=bins)[held] for values in (p, y)]
    return *(total / count[held] for total in sums), count[held]


def calibration_error(probabilities, outcomes, bins=15):
    """Expected and largest calibration error of Guo et al. (2017)."""
    confidence, right, count = reliability(probabilities, outcomes, bins)
    gaps = np.abs(right - confidence)
    return float(gaps @ count / count.sum()), float(gaps.max())


def log_predictive_density(log_likelihood):
    """Log of the mean over draws (rows) of the likelihood of each record."""
    values = np.asarray(log_likelihood, float)
    return logsumexp(values, axis=0) - np.log(values.shape[0])


def plot_reliability(axis, probabilities, labels, bins=15):
    """Accuracy against confidence, with the expected and the largest error."""
    p = _mean(probabilities)
    top, right = p.max(1), p.argmax(1) == labels
    confidence, height, _ = reliability(top, right, bins)
    expected, largest = calibration_error(top, right, bins)
    width = 0.9 / bins
    axis.bar(confidence, height, width=width, color="tab:blue", label="accuracy")
    axis.bar(
        confidence, confidence - height, width=width, bottom=height,
        facecolor="none", edgecolor="tab:red", hatch="///", label="gap",
    )  # fmt: skip
    axis.plot([0, 1], [0, 1], color="black", linewidth=0.8, linestyle="--")
    axis.set(xlim=(0, 1), ylim=(0, 1), xlabel="confidence", ylabel="accuracy")
    axis.set_title(f"ECE {expected:.3f}, MCE {largest:.3f}")
    axis.legend(loc="upper left", framealpha=0.9)


def plot_class_probabilities(axis, draws, label, bins=10):
    """Histogram over draws of each class's probability, for one record; the true class is red."""
    number = draws.shape[1]
    greys = [f"{0.35 + 0.5 * k / max(number - 1, 1):.2f}" for k in range(number)]
    colours = ["tab:red" if k == label else greys[k] for k in range(number)]
    axis.hist(
        list(draws.T), bins=np.linspace(0, 1, bins + 1), color=colours,
        label=[str(k) for k in range(number)],
    )  # fmt: skip
    axis.set(xlim=(0, 1), xlabel="probability of a class", ylabel="draws")


def _mean(probabilities):
    p = np.asarray(probabilities, float)
    if not p.min() >= 0 or np.abs(p.sum(-1) - 1).max() > 1e-3:
        raise ValueError("Expected probabilities >= 0 that sum to 1 over classes.")
    return p if p.ndim == 2 else p.mean(axis=0)
