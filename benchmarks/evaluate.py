"""Scores of predictions.

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


def _mean(probabilities):
    p = np.asarray(probabilities, float)
    if not p.min() >= 0 or np.abs(p.sum(-1) - 1).max() > 1e-3:
        raise ValueError("Expected probabilities >= 0 that sum to 1 over classes.")
    return p if p.ndim == 2 else p.mean(axis=0)
