"""Data sets that scikit-learn brings along, scaled by public constants, and a split helper.

scikit-learn is no dependency of the package (``pip install "numpyro_dp[examples]"`` brings it).
Neither set has a published split: a fifth of the rows, chosen by a fixed seed, is the test set.
"""

from __future__ import annotations

import math

import numpy as np

from numpyro_dp._validate import check_int, check_real
from numpyro_dp.datasets._types import SplitData

__all__ = ["load_breast_cancer", "load_digits", "train_validation_split"]

_TEST_FRACTION = 0.2
_SPLIT_SEED = 0
# Minimum and maximum of each feature as published in the data set's description, in column order.
_BREAST_CANCER_RANGES = (
    (6.981, 28.11),
    (9.71, 39.28),
    (43.79, 188.5),
    (143.5, 2501.0),
    (0.053, 0.163),
    (0.019, 0.345),
    (0.0, 0.427),
    (0.0, 0.201),
    (0.106, 0.304),
    (0.05, 0.097),
    (0.112, 2.873),
    (0.36, 4.885),
    (0.757, 21.98),
    (6.802, 542.2),
    (0.002, 0.031),
    (0.002, 0.135),
    (0.0, 0.396),
    (0.0, 0.053),
    (0.008, 0.079),
    (0.001, 0.03),
    (7.93, 36.04),
    (12.02, 49.54),
    (50.41, 251.2),
    (185.2, 4254.0),
    (0.071, 0.223),
    (0.027, 1.058),
    (0.0, 1.252),
    (0.0, 0.291),
    (0.156, 0.664),
    (0.055, 0.208),
)


def train_validation_split(
    num_rows: int, fraction: float, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns row numbers for training and validation; they depend on no record.

    Args:
        num_rows: Number of rows (public).
        fraction: Share of the rows that is held out, in (0, 1); ``round(fraction * num_rows)``.
        seed: Seed of the split. It is public: use no key that also draws noise.

    Returns:
        ``(train_idx, validation_idx)``: int32, each in ascending order, an exact partition.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is out of range, or one of the two parts would be empty.

    Example:
        >>> train, validation = train_validation_split(10, 0.2, seed=0)
        >>> len(train), len(validation)
        (8, 2)
    """
    num_rows = check_int("num_rows", num_rows, low=2)
    fraction = check_real("fraction", fraction, low=0.0, high=1.0, low_open=True, high_open=True)
    seed = check_int("seed", seed, low=0)
    held_out = round(fraction * num_rows)
    if not 0 < held_out < num_rows:
        raise ValueError(
            f"Expected a fraction that leaves a row on either side, got fraction={fraction!r} of "
            f"num_rows={num_rows}."
        )
    order = np.random.default_rng(seed).permutation(num_rows).astype(np.int32)
    return np.sort(order[held_out:]), np.sort(order[:held_out])


def load_breast_cancer() -> SplitData:
    """Returns scikit-learn's breast cancer set (569 records) with an intercept as last column.

    Each feature is mapped from its published range to [-1, 1] and clipped there, so the norm of a
    row is at most sqrt(31).

    Returns:
        The data: ``X`` float32 ``(455, 31)`` and ``(114, 31)``, ``y`` int32 (1: benign).

    Raises:
        ImportError: If scikit-learn is not installed.

    Example:
        >>> load_breast_cancer().X_train.shape
        (455, 31)
    """
    stored = _scikit_learn_datasets().load_breast_cancer()
    low, high = np.array(_BREAST_CANCER_RANGES).T
    scaled = np.clip(2.0 * (stored.data - low) / (high - low) - 1.0, -1.0, 1.0)
    X = np.concatenate([scaled, np.ones((len(scaled), 1))], axis=1)
    names = (*(str(name).replace(" ", "_") for name in stored.feature_names), "intercept")
    return _split(
        X,
        stored.target,
        names,
        "benign",
        "UCI Breast Cancer Wisconsin (Diagnostic), bundled with scikit-learn; published ranges "
        "mapped to [-1, 1].",
    )


def load_digits() -> SplitData:
    """Returns scikit-learn's 8 x 8 digits (1,797 images), pixels divided by their maximum, 16.

    Returns:
        The data: ``X`` float32 ``(1438, 64)`` and ``(359, 64)`` in [0, 1], ``y`` int32 0..9.

    Raises:
        ImportError: If scikit-learn is not installed.

    Example:
        >>> load_digits().X_test.shape
        (359, 64)
    """
    stored = _scikit_learn_datasets().load_digits()
    names = tuple(str(name) for name in stored.feature_names)
    source = "UCI Optical Recognition of Handwritten Digits, test part, bundled with scikit-learn."
    return _split(stored.data / 16.0, stored.target, names, "digit", source)


def _scikit_learn_datasets():
    try:
        from sklearn import datasets
    except ImportError as error:
        raise ImportError(
            "The bundled data sets need scikit-learn, which is not installed: "
            'pip install scikit-learn, or pip install "numpyro_dp[examples]".'
        ) from error
    return datasets


def _split(X, y, names: tuple[str, ...], target: str, source: str) -> SplitData:
    train, test = train_validation_split(len(X), _TEST_FRACTION, _SPLIT_SEED)
    X, y = X.astype(np.float32), y.astype(np.int32)
    return SplitData(
        X_train=X[train],
        y_train=y[train],
        X_test=X[test],
        y_test=y[test],
        feature_names=names,
        target_name=target,
        source=f"{source} Our split: a fifth for testing, seed {_SPLIT_SEED}.",
        licence="UCI Machine Learning Repository; see scikit-learn's description of the set",
        row_norm_bound=math.sqrt(len(names)),
    )
