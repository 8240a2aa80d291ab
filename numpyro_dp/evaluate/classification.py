r"""How good class probabilities are, and what their uncertainty is made of.

Probabilities have the shape (records, classes), or (draws, records, classes) with one draw of the
posterior each: those are averaged over draws, :math:`\bar p = \frac1S\sum_s p_s`, which is the
posterior predictive probability.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Integer, Real

from numpyro_dp._validate import check_int

__all__ = [
    "EntropyParts",
    "Reliability",
    "VarianceParts",
    "accuracy",
    "brier_score",
    "calibration_error",
    "decompose_entropy",
    "decompose_variance",
    "log_score",
    "reliability",
]

Probabilities = Real[np.ndarray, "*draws records classes"]
Labels = Integer[np.ndarray, " records"]


class Reliability(NamedTuple):
    """Confidence and accuracy of predictions, bin by bin; empty bins are left out.

    Attributes:
        confidence: Mean predicted probability in each bin.
        accuracy: Part of the outcomes that came.
        count: Number of records.
    """

    confidence: Float[np.ndarray, " bins"]
    accuracy: Float[np.ndarray, " bins"]
    count: Integer[np.ndarray, " bins"]


class VarianceParts(NamedTuple):
    """Predictive variance of each record.

    Attributes:
        epistemic: Variance over draws of the predicted mean.
        aleatoric: Mean over draws of the predicted variance.
    """

    epistemic: Real[np.ndarray, ...]
    aleatoric: Real[np.ndarray, ...]


class EntropyParts(NamedTuple):
    """Entropy of each record's posterior predictive, in nats.

    Attributes:
        epistemic: Mutual information of class and weights: total less aleatoric.
        aleatoric: Mean over draws of the entropy.
    """

    epistemic: Float[np.ndarray, " records"]
    aleatoric: Float[np.ndarray, " records"]


def accuracy(probabilities: Probabilities, labels: Labels) -> float:
    """Returns the part of the records whose most probable class is right.

    Example:
        >>> import numpy as np
        >>> accuracy(np.array([[0.9, 0.1], [0.4, 0.6], [0.7, 0.3]]), np.array([0, 1, 1])).round(3)
        np.float64(0.667)
    """
    mean, labels = _checked(probabilities, labels)
    return np.mean(mean.argmax(1) == labels)


def log_score(probabilities: Probabilities, labels: Labels) -> float:
    r"""Returns the mean over records of :math:`\log \bar p(y)`, in nats; larger is better.

    Example:
        >>> import numpy as np
        >>> log_score(np.array([[0.5, 0.5], [0.25, 0.75]]), np.array([0, 1])).round(4)
        np.float64(-0.4904)
    """
    mean, labels = _checked(probabilities, labels)
    with np.errstate(divide="ignore"):
        return np.mean(np.log(mean[np.arange(len(labels)), labels]))


def brier_score(probabilities: Probabilities, labels: Labels) -> float:
    r"""Returns the mean over records of :math:`\sum_k (\bar p_k - [y = k])^2`; smaller is better.

    Example:
        >>> import numpy as np
        >>> brier_score(np.array([[0.5, 0.5], [0.0, 1.0]]), np.array([0, 1]))
        np.float64(0.25)

    Reference:
        Brier (1950), Verification of forecasts expressed in terms of probability.
    """
    mean, labels = _checked(probabilities, labels)
    right = np.arange(mean.shape[1]) == labels[:, None]
    return np.mean(np.sum((mean - right) ** 2, axis=1))


def reliability(
    probabilities: Real[np.ndarray, " records"],
    outcomes: Real[np.ndarray, " records"],
    bins: int = 15,
    equal_mass: bool = False,
) -> Reliability:
    """Returns what a reliability diagram shows.

    For several classes pass the largest probability, and whether that class was right.

    Args:
        probabilities: Predicted probability of the outcome, in [0, 1].
        outcomes: Whether it came: 0 or 1.
        bins: Number of bins.
        equal_mass: Bins with as many records each, instead of equally wide ones.

    Raises:
        ValueError: If a value is outside its range, or the shapes differ.

    Example:
        >>> import numpy as np
        >>> p, y = np.array([0.1, 0.2, 0.8, 0.9]), np.array([0, 0, 1, 0])
        >>> found = reliability(p, y, bins=2)
        >>> found.confidence.round(2), found.accuracy, found.count
        (array([0.15, 0.85]), array([0. , 0.5]), array([2, 2]))
    """
    check_int("bins", bins, low=1)
    p, y = np.asarray(probabilities, float), np.asarray(outcomes, float)
    if p.shape != y.shape:
        raise ValueError(f"Expected outcomes of shape {p.shape}, got {y.shape}.")
    if p.size == 0 or not (p.min() >= 0 and p.max() <= 1) or not np.isin(y, (0, 1)).all():
        raise ValueError("Expected at least one probability in [0, 1], and outcomes 0 or 1.")
    if equal_mass:
        place = np.empty(p.size, int)
        place[np.argsort(p, kind="stable")] = np.arange(p.size) * bins // p.size
    else:
        place = np.minimum((p * bins).astype(int), bins - 1)
    count = np.bincount(place, minlength=bins)
    held = count > 0
    sums = (np.bincount(place, values, minlength=bins)[held] for values in (p, y))
    return Reliability(*(total / count[held] for total in sums), count[held])


def calibration_error(
    probabilities: Real[np.ndarray, " records"],
    outcomes: Real[np.ndarray, " records"],
    bins: int = 15,
    equal_mass: bool = False,
) -> tuple[float, float]:
    r"""Expected and largest calibration error of predicted probabilities.

    .. math:: \mathrm{ECE} = \sum_b \tfrac{n_b}{n}\, |\bar y_b - \bar p_b|, \qquad
        \mathrm{MCE} = \max_b |\bar y_b - \bar p_b|.

    Args:
        probabilities: As for :func:`reliability`, as all others; empty bins do not count.
        outcomes: Whether it came: 0 or 1.
        bins: Number of bins.
        equal_mass: Bins with as many records each.

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
    found = reliability(probabilities, outcomes, bins, equal_mass)
    gaps = np.abs(found.accuracy - found.confidence)
    return float(gaps @ found.count / found.count.sum()), float(gaps.max())


def decompose_variance(
    means: Real[np.ndarray, "draws ..."], variances: Real[np.ndarray, ...]
) -> VarianceParts:
    r"""Splits the predictive variance: :math:`\mathrm{Var}_s(\mu_s) + E_s(\sigma_s^2)`.

    Args:
        means: Predicted mean of each record under each draw.
        variances: Predicted variance likewise (or one that is broadcast to it).

    Example:
        >>> import numpy as np
        >>> decompose_variance(np.array([[0.0], [2.0]]), np.array([[1.0], [3.0]]))
        VarianceParts(epistemic=array([1.]), aleatoric=array([2.]))
    """
    means = np.asarray(means, float)
    variances = np.broadcast_to(np.asarray(variances, float), means.shape)
    return VarianceParts(means.var(axis=0), variances.mean(axis=0))


def decompose_entropy(
    probabilities: Real[np.ndarray, "draws records classes"],
) -> EntropyParts:
    r"""Splits the entropy of the posterior predictive, :math:`H(\bar p) = I + E_s H(p_s)`.

    Args:
        probabilities: Of each class for each record under each draw.

    Example:
        >>> import numpy as np
        >>> draws = np.array([[[1.0, 0.0], [0.5, 0.5]], [[0.0, 1.0], [0.5, 0.5]]])
        >>> found = decompose_entropy(draws)
        >>> found.epistemic.round(3), found.aleatoric.round(3)
        (array([0.693, 0.   ]), array([0.   , 0.693]))

    Reference:
        Depeweg, Hernández-Lobato, Doshi-Velez, Udluft (2018), Decomposition of uncertainty in
        Bayesian deep learning, ICML.
    """
    draws = np.asarray(probabilities, float)
    if draws.ndim != 3 or draws.size == 0:
        raise ValueError(
            f"Expected probabilities of shape (draws, records, classes), got {draws.shape}."
        )
    _check_probabilities(draws)
    aleatoric = _entropy(draws).mean(axis=0)
    return EntropyParts(np.maximum(_entropy(draws.mean(axis=0)) - aleatoric, 0), aleatoric)


def _entropy(p: np.ndarray) -> np.ndarray:
    return -np.sum(p * np.log(np.where(p > 0, p, 1)), axis=-1)


def _checked(probabilities: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    p, labels = np.asarray(probabilities, float), np.asarray(labels)
    if p.ndim not in (2, 3) or labels.shape != p.shape[-2:-1] or p.size == 0:
        raise ValueError(
            "Expected probabilities of shape (records, classes) or (draws, records, classes) and "
            f"labels of shape (records,), got {p.shape} and {labels.shape}."
        )
    _check_probabilities(p)
    if labels.dtype.kind not in "iu" or labels.min() < 0 or labels.max() >= p.shape[-1]:
        raise ValueError(
            f"Expected integer labels in 0..{p.shape[-1] - 1}, got {labels.dtype} from "
            f"{labels.min()} to {labels.max()}."
        )
    return (p if p.ndim == 2 else p.mean(axis=0)), labels


def _check_probabilities(p: np.ndarray) -> None:
    if not (p.min() >= 0) or np.abs(p.sum(-1) - 1).max() > 1e-3:
        raise ValueError("Expected probabilities >= 0 that sum to 1 over classes. Use a softmax.")
