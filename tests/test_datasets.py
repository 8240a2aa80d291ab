"""Loaders of benchmarks/datasets.py: known counts, standard splits, and absent files."""

import os
import pathlib
import sys

import numpy as np
import pytest

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "benchmarks"))

import datasets


def need(name):
    folder = os.environ.get("NUMPYRO_DP_DATA", "")
    if not (pathlib.Path(folder) / datasets.FILES[name][0]).is_file():
        pytest.skip(f"needs NUMPYRO_DP_DATA to name a folder that holds {datasets.FILES[name][0]}")


@pytest.mark.full
@pytest.mark.parametrize("design", ["public", "paper"])
def test_adult_has_the_published_counts_and_rates(design):
    need("adult")
    data = datasets.load_adult(design)
    assert data.X_train.shape == (30162, 96) and data.X_test.shape == (15060, 96)
    assert data.X_train.dtype == np.float32 and data.y_train.dtype == np.int32
    assert [round(float(y.mean()), 4) for y in (data.y_train, data.y_test)] == [0.2489, 0.2457]
    assert len(set(data.feature_names)) == 96 and (data.X_train[:, -1] == 1).all()
    assert ("NOT private" in data.source) == (design == "paper")
    if design == "public":
        assert np.linalg.norm(data.X_train, axis=1).max() < 4.5
    else:
        age = data.X_train[:, 0].astype(np.float64)
        assert abs(age.mean()) < 1e-5 and abs(age.std() - 1) < 1e-4


@pytest.mark.full
def test_adult_public_design_reads_no_statistic_from_the_records(monkeypatch):
    need("adult")
    columns, whole = datasets._columns("adult"), datasets.load_adult()
    some = {name: np.r_[column[5000:9000], column[-99:]] for name, column in columns.items()}
    monkeypatch.setattr(datasets, "_columns", lambda name: some)
    part = datasets.load_adult()
    first = sum(all(column[i] != "?" for column in columns.values()) for i in range(5000))
    assert part.feature_names == whole.feature_names
    np.testing.assert_array_equal(part.X_train, whole.X_train[first : first + len(part.X_train)])


@pytest.mark.parametrize(("load", "name", "shape", "splits"), [
    (datasets.load_kin8nm, "kin8nm", (8192, 8), 20),
    (datasets.load_power_plant, "power-plant", (9568, 4), 20),
    (datasets.load_protein, "protein", (45730, 9), 5),
])  # fmt: skip
def test_regression_sets_have_the_published_splits(load, name, shape, splits):
    with pytest.raises(ValueError, match=rf"in \[0, {splits - 1}\], got split={splits}"):
        load(splits)
    need(name)
    stored = np.load(datasets._path(name))
    for split in (0, splits - 1):
        data = load(split)
        assert data.X_train.shape == (len(data.y_train), len(data.feature_names))
        assert data.X_train.shape == (round(0.9 * shape[0]), shape[1])
        for part, X in (("train", data.X_train), ("test", data.X_test)):
            np.testing.assert_array_equal(X, stored["X"][stored[f"{part}_idx_{split}"]])


@pytest.mark.parametrize(("load", "name", "shape", "total", "groups"), [
    (datasets.load_contraception, "contraception", (1934, 5), 759, 60),
    (datasets.load_doctor_visits, "doctor_visits", (5190, 11), 1566, None),
    (datasets.load_rwm5yr, "rwm5yr", (19609, 12), 62282, 6127),
])  # fmt: skip
def test_tables_have_the_known_counts(load, name, shape, total, groups):
    need(name)
    data = load()
    assert data.X.shape == shape == (len(data.y), len(data.feature_names))
    assert data.y.sum() == total and np.isfinite(data.X).all()
    assert groups is None or len(np.bincount(data.group)) == groups


def test_mnist_is_the_original():
    need("mnist")
    data = datasets.load_mnist()
    assert data.X_train.shape == (60000, 28, 28) and data.X_test.shape == (10000, 28, 28)
    assert data.y_train[:5].tolist() == [5, 0, 4, 1, 9] and data.y_test[:3].tolist() == [7, 2, 1]


@pytest.mark.parametrize("folder", ["", "nowhere"])
def test_absence_is_explained_and_the_stand_in_says_so(monkeypatch, folder):
    monkeypatch.setenv("NUMPYRO_DP_DATA", folder)
    with pytest.raises(datasets.DatasetNotFoundError, match=r"NUMPYRO_DP_DATA.*mnist.npz.*https"):
        datasets.load_mnist()
    data = datasets.load_adult_or_bundled()
    assert data.source.startswith("FALLBACK, not Adult") and data.X_train.shape == (455, 31)
    assert np.abs(data.X_train).max() <= 1 and data.feature_names[-1] == "intercept"
