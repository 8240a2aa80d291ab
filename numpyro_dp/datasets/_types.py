"""What a loader returns: plain NumPy arrays, names, and where they came from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

__all__ = ["ColumnTable", "SplitData", "TabularData"]


class SplitData(NamedTuple):
    """A data set with its published (or, where ``source`` says so, our own) train/test split.

    Attributes:
        X_train: Inputs, float32 ``(N, D)``; uint8 ``(N, 28, 28)`` for MNIST.
        y_train: Targets ``(N,)``: int32 classes, uint8 for MNIST, float64 for regression.
        X_test: Inputs of the test records.
        y_test: Targets of the test records.
        feature_names: One name per column of ``X_train``, in order.
        target_name: What ``y`` is.
        source: Where these numbers came from, with the preprocessing that was done here.
        licence: What is known of the licence of the data.
        row_norm_bound: A public number that no Euclidean norm of a row of ``X`` exceeds, whatever
            the records; None where the columns are unbounded. A logistic regression's signal is
            ``(y - p) x``, so ``clip_norm=row_norm_bound`` never clips.
        is_fallback: True when another data set stands in for the one that was asked for.
    """

    X_train: np.ndarray
    y_train: np.ndarray
    X_test: np.ndarray
    y_test: np.ndarray
    feature_names: tuple[str, ...]
    target_name: str
    source: str
    licence: str
    row_norm_bound: float | None = None
    is_fallback: bool = False


class TabularData(NamedTuple):
    """A data set without a published split; ``group`` is the index of the plate, if it has one.

    Attributes:
        X: Inputs, float32 ``(N, D)``, in the units of the source.
        y: Targets, int32 ``(N,)``.
        feature_names: One name per column of ``X``, in order.
        target_name: What ``y`` is.
        source: Where these numbers came from.
        licence: What is known of the licence of the data.
        group: int32 ``(N,)`` in ``[0, num_groups)``, or None.
        group_labels: The source's label of each group, ``(num_groups,)``, or None.
        group_name: What a group is (``"district"``, ``"person"``), or None.
    """

    X: np.ndarray
    y: np.ndarray
    feature_names: tuple[str, ...]
    target_name: str
    source: str
    licence: str
    group: np.ndarray | None = None
    group_labels: np.ndarray | None = None
    group_name: str | None = None


class ColumnTable(NamedTuple):
    """A table of named columns, as published.

    Attributes:
        columns: Name to array ``(N,)``, in the order of the file: int64, float64, or text where a
            cell of the column is no number.
        source: Where these numbers came from.
        licence: What is known of the licence of the data.
    """

    columns: Mapping[str, np.ndarray]
    source: str
    licence: str
