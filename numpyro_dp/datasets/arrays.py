"""The UCI regression sets with their standard splits, and MNIST.

A standard split comes from NumPy's legacy generator, seeded with 1 once: for k = 0, 1, ... one
permutation p of the rows, train = p[:round(0.9 N)], test = the rest. The splits are recomputed
here; where the file stores them too, the two must agree.

Reference:
    Hernandez-Lobato and Adams (2015), "Probabilistic Backpropagation for Scalable Learning of
    Bayesian Neural Networks", ICML (the splits); Gal and Ghahramani (2016), "Dropout as a Bayesian
    Approximation", ICML (the files).
"""

from __future__ import annotations

import numpy as np

from numpyro_dp._validate import check_int
from numpyro_dp.datasets._sources import SOURCES
from numpyro_dp.datasets._store import DatasetIntegrityError, load_arrays
from numpyro_dp.datasets._types import SplitData

__all__ = ["load_kin8nm", "load_mnist", "load_power_plant", "load_protein", "standard_split"]

_TRAIN_FRACTION = 0.9
_SPLIT_SEED = 1


def standard_split(num_rows: int, split: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the row numbers of one standard 90/10 split, in the benchmark's order.

    Args:
        num_rows: Number of rows.
        split: Index of the split, from 0.

    Returns:
        ``(train_idx, test_idx)``, int32, a partition of the rows.

    Raises:
        TypeError: If an argument is no integer.
        ValueError: If ``num_rows < 2`` or ``split < 0``.

    Example:
        >>> train, test = standard_split(8192, split=0)
        >>> len(train), len(test)
        (7373, 819)
    """
    num_rows = check_int("num_rows", num_rows, low=2)
    split = check_int("split", split, low=0)
    generator = np.random.RandomState(_SPLIT_SEED)
    for _ in range(split + 1):
        order = generator.choice(num_rows, num_rows, replace=False)
    num_train = round(_TRAIN_FRACTION * num_rows)
    return order[:num_train].astype(np.int32), order[num_train:].astype(np.int32)


def load_kin8nm(*, split: int = 0, download: bool = False) -> SplitData:
    """Returns kin8nm: 8,192 x 8, the distance of a simulated robot arm's end from a target.

    Args:
        split: Standard split, 0..19.
        download: Whether to fetch the data if the data folder lacks it.

    Returns:
        The data, not standardised: ``X`` float32, ``y`` float64.

    Raises:
        TypeError: If ``split`` is no integer.
        ValueError: If ``split`` is not in 0..19.
        DatasetNotFoundError: If the file is absent and ``download`` is false.
        DatasetIntegrityError: If the file is damaged or not the published data.
        DatasetDownloadError: If a download was asked for and failed.

    Example:
        >>> load_kin8nm(split=3).X_test.shape  # doctest: +SKIP
        (819, 8)
    """
    names = tuple(f"theta{joint}" for joint in range(1, 9))
    target = "distance_of_end_effector_from_target"
    return _load_regression("kin8nm", names, target, split, 20, download)


def load_power_plant(*, split: int = 0, download: bool = False) -> SplitData:
    """Returns the combined-cycle power plant set: 9,568 x 4, net hourly electrical output in MW.

    Args:
        split: Standard split, 0..19.
        download: Whether to fetch the data if the data folder lacks it.

    Returns:
        The data, not standardised: ``X`` float32 (temperature, exhaust vacuum, ambient pressure,
        relative humidity), ``y`` float64. 41 rows are duplicates.

    Raises:
        TypeError, ValueError, DatasetNotFoundError, DatasetIntegrityError, DatasetDownloadError:
            As :func:`load_kin8nm`.

    Example:
        >>> load_power_plant().feature_names  # doctest: +SKIP
        ('AT', 'V', 'AP', 'RH')
    """
    return _load_regression("power-plant", ("AT", "V", "AP", "RH"), "PE", split, 20, download)


def load_protein(*, split: int = 0, download: bool = False) -> SplitData:
    """Returns the protein tertiary structure set: 45,730 x 9, RMSD in Angstrom (0..21).

    Args:
        split: Standard split, 0..4 (this set has five).
        download: Whether to fetch the data if the data folder lacks it.

    Returns:
        The data, not standardised (F5 spans 3e5..5e6): ``X`` float32, ``y`` float64. 1,711 rows
        are duplicates, and 6.6 % of the test inputs of split 0 are also in its training part.

    Raises:
        TypeError, ValueError, DatasetNotFoundError, DatasetIntegrityError, DatasetDownloadError:
            As :func:`load_kin8nm`; ``split`` is in 0..4.

    Example:
        >>> load_protein(split=4).X_train.shape  # doctest: +SKIP
        (41157, 9)
    """
    names = tuple(f"F{number}" for number in range(1, 10))
    return _load_regression("protein-tertiary-structure", names, "RMSD", split, 5, download)


def load_mnist(*, download: bool = False) -> SplitData:
    """Returns MNIST: 60,000 and 10,000 images, uint8, in the original order.

    Args:
        download: Whether to fetch the data if the data folder lacks it.

    Returns:
        The data: ``X`` uint8 ``(N, 28, 28)`` in 0..255, ``y`` uint8 0..9; divide by the public
        maximum 255 for inputs in [0, 1]. ``feature_names`` is empty.

    Raises:
        DatasetNotFoundError: If the file is absent and ``download`` is false.
        DatasetIntegrityError: If the file is damaged or not the published data.
        DatasetDownloadError: If a download was asked for and failed.

    Example:
        >>> load_mnist().X_train.shape  # doctest: +SKIP
        (60000, 28, 28)
    """
    source = SOURCES["mnist"]
    stored, where = load_arrays(source, download=download)
    return SplitData(
        *(stored[name] for name in source.array_names),
        feature_names=(),
        target_name="digit",
        source=where,
        licence=source.licence,
    )


def _load_regression(
    name: str,
    feature_names: tuple[str, ...],
    target_name: str,
    split: int,
    num_splits: int,
    download: bool,
) -> SplitData:
    split = check_int("split", split, low=0, high=num_splits - 1)
    source = SOURCES[name]
    stored, where = load_arrays(source, download=download)
    X, y = stored["X"], stored["y"]
    train, test = standard_split(len(X), split)
    for part, index in (("train", train), ("test", test)):
        kept = stored.get(f"{part}_idx_{split}")
        if kept is not None and not np.array_equal(kept, index):
            raise DatasetIntegrityError(
                f"Expected the stored {part} rows of split {split} of {name!r} to be the standard "
                "split, but they differ from the recomputed ones. Replace the file, or delete it "
                "and load again with download=True."
            )
    return SplitData(
        X_train=X[train],
        y_train=y[train],
        X_test=X[test],
        y_test=y[test],
        feature_names=feature_names,
        target_name=target_name,
        source=f"{where} Standard split {split}.",
        licence=source.licence,
    )
