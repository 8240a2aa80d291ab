"""Loaders: published counts, integrity, errors, fallback, and the parsers of the public formats."""

import functools
import gzip
import io
import os
import sys
import urllib.error

import numpy as np
import pytest

from numpyro_dp import datasets
from numpyro_dp.datasets import _sources, _store, adult, bundled, tables

NPZ_WITH_SPLITS = ("kin8nm", "power-plant", "protein-tertiary-structure")


@pytest.fixture
def stored(request):
    """Skips the test, with the reason, where the data folder lacks one of the named sets."""

    def need(*names):
        for name in names:
            path = datasets.data_home() / _sources.SOURCES[name].file
            if not path.is_file():
                pytest.skip(
                    f"needs {path}: set {_store.DATA_VARIABLE} to a folder that holds the data"
                )

    return need


@pytest.fixture
def empty_home(tmp_path, monkeypatch):
    """An empty data folder, and no network: an attempt to use it fails as it does offline."""
    monkeypatch.setenv(_store.DATA_VARIABLE, str(tmp_path))

    def offline(request, timeout):
        raise urllib.error.URLError("no route to host")

    monkeypatch.setattr("urllib.request.urlopen", offline)
    return tmp_path


def serve(monkeypatch, answers):
    """Answers each download with the bytes whose key ends the address; returns what was asked."""
    asked = []

    def urlopen(request, timeout):
        asked.append(request.full_url)
        assert request.full_url.startswith("https://") and timeout > 0
        for ending, content in answers.items():
            if request.full_url.endswith(ending):
                return io.BytesIO(content)
        raise urllib.error.HTTPError(request.full_url, 404, "Not Found", None, None)

    monkeypatch.setattr("urllib.request.urlopen", urlopen)
    return asked


load_adult_once = functools.cache(datasets.load_adult)


def finite(*arrays):
    return all(np.isfinite(array).all() for array in arrays)


# Published facts


@pytest.mark.full
@pytest.mark.parametrize("design", ["public", "paper"])
def test_adult_has_the_published_counts_and_rates(stored, design):
    stored("adult")
    data = load_adult_once(design=design)
    assert data.X_train.shape == (30162, 96) and data.X_test.shape == (15060, 96)
    assert data.X_train.dtype == np.float32 and data.y_train.dtype == np.int32
    assert round(float(data.y_train.mean()), 4) == 0.2489
    assert round(float(data.y_test.mean()), 4) == 0.2457
    assert len(set(data.feature_names)) == 96 and data.feature_names[-1] == "intercept"
    assert (data.X_train[:, -1] == 1).all() and finite(data.X_train, data.X_test)
    assert not data.is_fallback and ("NOT private" in data.source) == (design == "paper")


def test_adult_public_design_reads_no_statistic_from_the_records(stored, monkeypatch):
    stored("adult")
    whole = load_adult_once(design="public")
    columns, where = _store.load_columns(_sources.SOURCES["adult"], download=False)
    some = {name: column[5000:9000] + column[-99:] for name, column in columns.items()}
    monkeypatch.setattr(adult, "load_columns", lambda source, download: (some, where))
    part = datasets.load_adult()
    assert part.feature_names == whole.feature_names
    complete = sum(all(cells[i] != "?" for cells in columns.values()) for i in range(5000))
    np.testing.assert_array_equal(
        part.X_train, whole.X_train[complete : complete + len(part.X_train)]
    )
    assert part.row_norm_bound == whole.row_norm_bound


@pytest.mark.full
def test_adult_rows_keep_the_public_norm_bound(stored):
    stored("adult")
    data = load_adult_once(design="public")
    norms = np.linalg.norm(np.concatenate([data.X_train, data.X_test]), axis=1)
    assert norms.max() <= data.row_norm_bound < 6.0
    assert np.median(norms) < 2.5 and norms.max() < 4.5
    assert load_adult_once(design="paper").row_norm_bound is None


def test_adult_public_scale_is_bounded_for_any_value():
    values = np.array([-1e9, 0.0, 40.0, 1e9])
    bound = sum(np.max(adult._public_scale(name, values) ** 2) for name in adult._NUMERIC)
    total = 1 + len(adult._LEVELS) + bound
    np.testing.assert_allclose(total, adult._public_row_norm_bound() ** 2)


def test_adult_constants_cover_the_data_and_references_are_levels(stored):
    for name, reference in adult._REFERENCE.items():
        assert reference in adult._LEVELS[name]
        assert list(adult._LEVELS[name]) == sorted(adult._LEVELS[name])
    stored("adult")
    columns, _ = _store.load_columns(_sources.SOURCES["adult"], download=False)
    for name, levels in adult._LEVELS.items():
        assert set(columns[name]) - {"?"} <= set(levels)


def test_adult_paper_design_is_z_scored_on_training_records(stored):
    stored("adult")
    data = load_adult_once(design="paper")
    for name in ("age", "fnlwgt", "capital_gain", "capital_loss", "hours_per_week"):
        column = data.X_train[:, data.feature_names.index(name)].astype(np.float64)
        assert abs(column.mean()) < 1e-5 and abs(column.std() - 1) < 1e-4
    assert not set(data.feature_names) & {f"{k}={v}" for k, v in adult._REFERENCE.items()}
    assert "workclass=Never-worked" not in data.feature_names  # no complete record has it


REGRESSION = [
    (datasets.load_kin8nm, (8192, 8), 19, "kin8nm"),
    (datasets.load_power_plant, (9568, 4), 19, "power-plant"),
    (datasets.load_protein, (45730, 9), 4, "protein-tertiary-structure"),
]


@pytest.mark.parametrize("load, shape, last, name", REGRESSION)
def test_regression_sets_have_the_standard_splits(stored, load, shape, last, name):
    stored(name)
    for split in (0, last):
        data = load(split=split)
        num_train = round(0.9 * shape[0])
        assert data.X_train.shape == (num_train, shape[1])
        assert data.X_test.shape == (shape[0] - num_train, shape[1])
        assert data.X_train.dtype == np.float32 and data.y_train.dtype == np.float64
        assert finite(data.X_train, data.X_test, data.y_train, data.y_test)
        assert len(data.feature_names) == shape[1] and f"split {split}" in data.source
    assert not np.array_equal(load(split=0).y_test, load(split=1).y_test)


@pytest.mark.parametrize("load, shape, last, name", REGRESSION)
def test_a_bad_split_index_is_refused(load, shape, last, name):
    with pytest.raises(ValueError, match=rf"in \[0, {last}\], got split={last + 1}"):
        load(split=last + 1)
    with pytest.raises(ValueError, match="split=-1"):
        load(split=-1)
    with pytest.raises(TypeError, match=r"split=0.5"):
        load(split=0.5)


@pytest.mark.parametrize("name", NPZ_WITH_SPLITS)
def test_every_stored_split_equals_the_recomputed_one(stored, name):
    stored(name)
    arrays, _ = _store.load_arrays(_sources.SOURCES[name], download=False)
    if "train_idx_0" not in arrays:
        pytest.skip("the data folder was filled by a download: no splits are stored")
    for split in range(5 if name.startswith("protein") else 20):
        train, test = datasets.standard_split(len(arrays["X"]), split)
        np.testing.assert_array_equal(train, arrays[f"train_idx_{split}"])
        np.testing.assert_array_equal(test, arrays[f"test_idx_{split}"])


def test_standard_split_is_the_documented_recipe():
    state = np.random.RandomState(1)
    for split in range(3):
        order = state.choice(range(101), 101, replace=False)
        train, test = datasets.standard_split(101, split)
        np.testing.assert_array_equal(np.concatenate([train, test]), order)
        assert len(train) == 91 and train.dtype == np.int32


def test_contraception_has_sixty_districts(stored):
    stored("contraception")
    data = datasets.load_contraception()
    assert data.X.shape == (1934, 5) and data.y.sum() == 759 and data.X.dtype == np.float32
    assert data.feature_names == ("age", "urban", "livch=1", "livch=2", "livch=3+")
    counts = np.bincount(data.group)
    assert len(counts) == 60 and counts.min() == 2 and counts.max() == 118
    assert set(data.group_labels) == set(range(1, 62)) - {54} and data.group_name == "district"
    assert data.X[0].tolist() == [np.float32(18.44), 1, 0, 0, 1] and finite(data.X)


def test_doctor_visits_has_the_published_moments(stored):
    stored("doctor_visits")
    data = datasets.load_doctor_visits()
    assert data.X.shape == (5190, 11) and data.y.max() == 9 and data.group is None
    assert round(float(data.y.mean()), 3) == 0.302 and round(float(data.y.var(ddof=1)), 3) == 0.637
    np.testing.assert_allclose(data.X[0], [1, 0.19, 0.55, 1, 4, 1, 1, 0, 0, 0, 0], rtol=1e-6)
    assert finite(data.X)


@pytest.mark.full
def test_rwm5yr_keeps_persons(stored):
    stored("rwm5yr")
    data = datasets.load_rwm5yr()
    assert data.X.shape == (19609, 12) and data.y.max() == 121 and finite(data.X)
    assert round(float(data.y.mean()), 2) == 3.18 and round(float((data.y == 0).mean()), 3) == 0.386
    counts = np.bincount(data.group)
    assert len(counts) == 6127 and counts.min() == 1 and counts.max() == 5
    assert data.group_labels[0] == 1 and data.group_labels[-1] == 7028
    assert datasets.load_rwm5yr(target="hospvis").y.max() == 51
    with pytest.raises(ValueError, match="target='id'"):
        datasets.load_rwm5yr(target="id")


def test_acs_keeps_codes_as_text(stored):
    stored("acs_na2019_1000")
    columns = datasets.load_acs_na2019().columns
    assert len(columns) == 24 and all(len(column) == 1000 for column in columns.values())
    assert next(iter(columns)) == "PUMA" and len(np.unique(columns["PUMA"])) == 20
    assert columns["AGEP"].dtype == np.int64 and columns["DENSITY"].dtype == np.float64
    assert "N" in columns["DVET"]


def test_mnist_is_the_original(stored):
    stored("mnist")
    data = datasets.load_mnist()
    assert data.X_train.shape == (60000, 28, 28) and data.X_test.shape == (10000, 28, 28)
    assert data.X_train.dtype == data.y_train.dtype == np.uint8
    assert data.y_train[:5].tolist() == [5, 0, 4, 1, 9] and data.y_test[:3].tolist() == [7, 2, 1]


def test_loading_twice_gives_the_same(stored):
    pytest.importorskip("sklearn")
    stored("contraception", "kin8nm")
    for load in (datasets.load_contraception, datasets.load_kin8nm, datasets.load_breast_cancer):
        for one, other in zip(load(), load(), strict=True):
            np.testing.assert_array_equal(one, other)


# Where files are looked for, and what is said when they are not there


LOADERS = [
    datasets.load_adult,
    datasets.load_contraception,
    datasets.load_doctor_visits,
    datasets.load_rwm5yr,
    datasets.load_acs_na2019,
    datasets.load_kin8nm,
    datasets.load_power_plant,
    datasets.load_protein,
    datasets.load_mnist,
]


@pytest.mark.parametrize("load", LOADERS)
def test_an_absent_file_names_three_remedies_and_downloads_nothing(empty_home, monkeypatch, load):
    asked = serve(monkeypatch, {})
    with pytest.raises(datasets.DatasetNotFoundError) as caught:
        load()
    message = str(caught.value)
    assert "NUMPYRO_DP_DATA" in message and "download=True" in message
    assert "load_adult_or_bundled" in message and not asked


@pytest.mark.parametrize("load", LOADERS)
def test_offline_names_the_remedy_and_leaves_no_file(empty_home, load):
    with pytest.raises(datasets.DatasetDownloadError, match=r"offline.*NUMPYRO_DP_DATA"):
        load(download=True)
    assert not [path for path in empty_home.rglob("*") if path.is_file()]


def test_a_variable_that_names_no_folder_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setenv(_store.DATA_VARIABLE, str(tmp_path / "nowhere"))
    with pytest.raises(datasets.DatasetNotFoundError, match=r"to name a folder, got .*nowhere"):
        datasets.load_adult()


def test_without_the_variable_the_cache_is_read(tmp_path, monkeypatch):
    monkeypatch.delenv(_store.DATA_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert datasets.data_home() == tmp_path / "numpyro_dp"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert datasets.data_home() == tmp_path / ".cache" / "numpyro_dp"


@pytest.mark.parametrize("keep", [0, 2, 2000])
@pytest.mark.parametrize("name, load", [("contraception", LOADERS[1]), ("kin8nm", LOADERS[5])])
def test_a_truncated_file_is_refused(stored, tmp_path, monkeypatch, name, load, keep):
    stored(name)
    source = _sources.SOURCES[name]
    content = (datasets.data_home() / source.file).read_bytes()
    target = tmp_path / source.file
    target.parent.mkdir()
    target.write_bytes(content[:keep])
    monkeypatch.setenv(_store.DATA_VARIABLE, str(tmp_path))
    with pytest.raises(datasets.DatasetIntegrityError, match="truncated or damaged"):
        load()


def test_one_changed_value_is_refused(stored, tmp_path, monkeypatch):
    stored("contraception")
    source = _sources.SOURCES["contraception"]
    text = gzip.decompress((datasets.data_home() / source.file).read_bytes())
    target = tmp_path / source.file
    target.parent.mkdir()
    monkeypatch.setenv(_store.DATA_VARIABLE, str(tmp_path))
    target.write_bytes(gzip.compress(text, compresslevel=1))  # compressed otherwise: the same data
    assert datasets.load_contraception().y.sum() == 759
    target.write_bytes(gzip.compress(text.replace(b"18.44", b"18.45", 1)))
    with pytest.raises(datasets.DatasetIntegrityError, match="Expected content with SHA-256"):
        datasets.load_contraception()


def test_a_stored_split_that_differs_is_refused(stored, monkeypatch):
    stored("kin8nm")
    arrays, where = _store.load_arrays(_sources.SOURCES["kin8nm"], download=False)
    train, _ = datasets.standard_split(8192, 2)
    changed = {**arrays, "train_idx_2": train[::-1]}
    monkeypatch.setattr(datasets.arrays, "load_arrays", lambda source, download: (changed, where))
    assert datasets.load_kin8nm(split=1).X_test.shape == (819, 8)
    with pytest.raises(datasets.DatasetIntegrityError, match="train rows of split 2"):
        datasets.load_kin8nm(split=2)


# Downloads: the public formats, rebuilt from the stored data, give the stored data back


def raw_adult(columns):
    parts = {"train": [], "test": ["|1x3 Cross validator"]}
    for cells in zip(*columns.values(), strict=True):
        *values, split = cells
        parts[split].append(", ".join(values) + ("." if split == "test" else ""))
    files = {"train": "adult.data", "test": "adult.test"}
    return {files[split]: ("\n".join(lines) + "\n\n").encode() for split, lines in parts.items()}


def raw_csv(columns, ending, first, quote=False):
    def cell(value):
        return f'"{value}"' if quote else value

    lines = [",".join(map(cell, [first, *columns]))]
    rows = enumerate(zip(*columns.values(), strict=True), start=1)
    lines += [",".join(map(cell, [str(number), *values])) for number, values in rows]
    return {ending: ("\n".join(lines) + "\n").encode()}


@pytest.mark.full
@pytest.mark.parametrize(
    "name, load, build",
    [
        ("adult", LOADERS[0], raw_adult),
        ("contraception", LOADERS[1], lambda c: raw_csv(c, "Contraception.csv", "", quote=True)),
        ("doctor_visits", LOADERS[2], lambda c: raw_csv(c, "AER/DoctorVisits.csv", "")),
        ("rwm5yr", LOADERS[3], lambda c: raw_csv(c, "COUNT/rwm5yr.csv", "rownames")),
        ("acs_na2019_1000", LOADERS[4], lambda c: raw_csv(c, "na2019_1000.csv", "")),
    ],
)
def test_a_downloaded_table_is_the_stored_one(stored, tmp_path, monkeypatch, name, load, build):
    stored(name)
    expected = load()._replace(source="")
    columns, _ = _store.load_columns(_sources.SOURCES[name], download=False)
    monkeypatch.setenv(_store.DATA_VARIABLE, str(tmp_path))
    asked = serve(monkeypatch, build(columns))
    for loaded in (load(download=True), load()):  # the second reads what the first has written
        for one, other in zip(loaded._replace(source=""), expected, strict=True):
            np.testing.assert_equal(one, other)
    assert len(asked) == len(_sources.SOURCES[name].urls)
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == [f"{name}.csv.gz"]


def test_downloaded_arrays_are_the_stored_ones(stored, tmp_path, monkeypatch):
    stored("power-plant")
    expected = datasets.load_power_plant(split=7)
    arrays, _ = _store.load_arrays(_sources.SOURCES["power-plant"], download=False)
    buffer = io.StringIO()
    np.savetxt(buffer, np.column_stack([arrays["X"].astype(np.float64), arrays["y"]]))
    monkeypatch.setenv(_store.DATA_VARIABLE, str(tmp_path))
    serve(monkeypatch, {"power-plant/data/data.txt": buffer.getvalue().encode()})
    loaded = datasets.load_power_plant(split=7, download=True)
    for one, other in zip(loaded[:4], expected[:4], strict=True):
        np.testing.assert_array_equal(one, other)


def idx(array):
    sizes = np.array(array.shape, dtype=">u4").tobytes()
    return b"\x00\x00\x08" + bytes([array.ndim]) + sizes + array.tobytes()


@pytest.mark.full
def test_mnist_comes_from_the_second_mirror_when_the_first_fails(stored, tmp_path, monkeypatch):
    stored("mnist")
    expected = datasets.load_mnist()
    files = zip(
        _sources._MNIST_FILES.values(),
        (expected[0], expected[1], *expected[2:4]),
        strict=True,
    )
    answers = {
        f"cvdf-datasets/mnist/{file}": gzip.compress(idx(array), compresslevel=0)
        for file, array in files
    }
    monkeypatch.setenv(_store.DATA_VARIABLE, str(tmp_path))
    monkeypatch.setattr(np, "savez_compressed", np.savez)  # spares seconds of zlib
    asked = serve(monkeypatch, answers)
    loaded = datasets.load_mnist(download=True)
    assert len(asked) == 8
    for one, other in zip(loaded[:4], expected[:4], strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_changed_public_file_is_refused_and_not_written(empty_home, monkeypatch):
    serve(monkeypatch, {"Contraception.csv": b'"","woman"\n"1","1"\n'})
    with pytest.raises(datasets.DatasetIntegrityError, match="Nothing was written"):
        datasets.load_contraception(download=True)
    serve(monkeypatch, {"adult.data": b"<html>moved</html>\n", "adult.test": b""})
    with pytest.raises(datasets.DatasetIntegrityError, match="Expected 15 cells in line 1"):
        datasets.load_adult(download=True)
    assert not [path for path in empty_home.rglob("*") if path.is_file()]


def test_a_failed_write_leaves_nothing_behind(tmp_path, monkeypatch):
    target = tmp_path / "set" / "set.npz"

    def fail(source, destination):
        raise PermissionError("read-only")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(PermissionError):
        _store._write_atomically(target, b"content")
    assert list(target.parent.iterdir()) == []


# Parsers, on lines as the public files have them


def test_parse_adult_reads_uci_quirks():
    train = b"39, State-gov, 77516, Bachelors, 13, Never-married, Adm-clerical, Not-in-family, "
    train += b"White, Male, 2174, 0, 40, United-States, <=50K\n\n"
    test = b"|1x3 Cross validator\n18, ?, 103497, Some-college, 10, Never-married, ?, Own-child, "
    test += b"White, Female, 0, 0, 30, United-States, >50K.\n\n"
    header, first, second = _sources.parse_adult([train, test]).splitlines()
    assert header.split(",") == [*_sources.ADULT_COLUMNS, "split"]
    assert first.startswith("39,State-gov,77516,") and first.endswith("United-States,<=50K,train")
    assert second.split(",")[1] == "?" and second.endswith(",>50K,test")


def test_parse_rdatasets_drops_row_names_quotes_and_float_noise():
    raw = b'"","woman","livch","age"\n"1","1","3+",18.44\n'
    assert _sources.parse_csv_without_row_names([raw]) == "woman,livch,age\n1,3+,18.44\n"
    raw = b"rownames,id,hhninc,educ\n1,1,3.04999995231628,15\n13,5,0.649999976158142,11.81\n"
    assert _sources.parse_rwm5yr([raw]) == "id,hhninc,educ\n1,3.05,15\n5,0.65,11.81\n"


def test_parse_benchmark_text_takes_the_last_column_as_target():
    parsed = _sources.parse_benchmark_text([b" 8.34 40.77 1.01084e+03 90.01 480.48\n\n"])
    assert parsed["X"].dtype == np.float32 and parsed["X"].shape == (1, 4)
    assert parsed["y"].tolist() == [480.48]


def test_parse_idx_refuses_what_is_no_idx_file():
    image = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)
    np.testing.assert_array_equal(_sources.parse_idx(idx(image)), image)
    for broken in (b"", b"<html>", idx(image)[:-1]):
        with pytest.raises(ValueError):
            _sources.parse_idx(broken)


def test_every_source_is_complete():
    for name, source in _sources.SOURCES.items():
        assert source.name == name and len(source.sha256) == 64 and source.licence
        assert all(url.startswith("https://") for mirrors in source.urls for url in mirrors)
        assert source.file.endswith(".npz" if source.array_names else ".csv.gz")


# Bundled sets


def test_bundled_sets_are_bounded_and_split():
    pytest.importorskip("sklearn")
    for data, shape in (
        (datasets.load_breast_cancer(), (455, 31)),
        (datasets.load_digits(), (1438, 64)),
    ):
        assert data.X_train.shape == shape and data.X_train.dtype == np.float32
        norms = np.linalg.norm(np.concatenate([data.X_train, data.X_test]), axis=1)
        assert norms.max() <= data.row_norm_bound and len(data.feature_names) == shape[1]
        assert finite(data.X_train) and not data.is_fallback


def test_missing_scikit_learn_is_explained(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(ImportError, match="pip install scikit-learn"):
        datasets.load_digits()


def test_the_stand_in_for_adult_says_that_it_is_one(empty_home):
    pytest.importorskip("sklearn")
    data = datasets.load_adult_or_bundled()
    assert data.is_fallback and data.source.startswith("FALLBACK, not Adult")
    assert data.target_name == "benign" and data.feature_names[-1] == "intercept"
    with pytest.raises(datasets.DatasetDownloadError):
        datasets.load_adult_or_bundled(download=True)  # an error, not a silent stand-in


@pytest.mark.full
def test_adult_itself_is_taken_where_it_is(stored):
    stored("adult")
    data = datasets.load_adult_or_bundled()
    assert not data.is_fallback and data.target_name == "income>50K"


def test_a_damaged_adult_is_no_reason_for_the_stand_in(tmp_path, monkeypatch):
    monkeypatch.setenv(_store.DATA_VARIABLE, str(tmp_path))
    (tmp_path / "adult").mkdir()
    (tmp_path / "adult" / "adult.csv.gz").write_bytes(b"\x1f\x8b")
    with pytest.raises(datasets.DatasetIntegrityError):
        datasets.load_adult_or_bundled()


def test_train_validation_split_is_a_deterministic_partition():
    train, validation = datasets.train_validation_split(30162, 0.1, seed=4)
    assert len(validation) == 3016 and train.dtype == validation.dtype == np.int32
    np.testing.assert_array_equal(np.sort(np.concatenate([train, validation])), np.arange(30162))
    np.testing.assert_array_equal(train, datasets.train_validation_split(30162, 0.1, seed=4)[0])
    assert not np.array_equal(train, datasets.train_validation_split(30162, 0.1, seed=5)[0])


@pytest.mark.parametrize(
    "arguments, error, match",
    [
        ((1, 0.5, 0), ValueError, "num_rows=1"),
        ((10, 1.0, 0), ValueError, "fraction=1.0"),
        ((10, 0.01, 0), ValueError, "leaves a row on either side"),
        ((10, 0.5, -1), ValueError, "seed=-1"),
        ((10.0, 0.5, 0), TypeError, "num_rows=10.0"),
    ],
)
def test_train_validation_split_refuses(arguments, error, match):
    with pytest.raises(error, match=match):
        datasets.train_validation_split(*arguments)


def test_unknown_design_is_refused():
    with pytest.raises(ValueError, match="'public', 'paper'"):
        datasets.load_adult(design="raw")


def test_importing_reads_nothing_and_needs_no_scikit_learn():
    assert bundled.__name__ in sys.modules and tables.__name__ in sys.modules
    for module in (_store, _sources, adult, bundled, tables):
        assert not {"sklearn", "pandas", "numpyro", "jax"} & set(vars(module))
