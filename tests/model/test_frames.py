"""Frames of pandas, Polars and PyArrow as arguments, and matrices by what is public."""

import math
import pathlib

import jax
import numpy as np
import numpyro.distributions as dist
import pytest
from flat import grouped
from models import given, logistic, slopes

from numpyro_dp import DPLaplace, PrivacyBudget, check_records, design, fit, summarize_columns
from numpyro_dp.model.frames import as_arrays

pd = pytest.importorskip("pandas")
rng = np.random.default_rng(0)
N = 400
AGE, SEX = rng.uniform(18, 90, N), rng.choice(["f", "m"], N)
Y = (rng.random(N) < 0.5).astype(int)
FRAME = pd.DataFrame({"age": AGE, "sex": SEX, "visits": rng.integers(0, 9, N), "y": Y})


def polars(frame):
    return pytest.importorskip("polars").from_pandas(frame)


def arrow(frame):
    return pytest.importorskip("pyarrow").Table.from_pandas(frame)


BACKENDS = pytest.mark.parametrize("backend", [lambda frame: frame, polars, arrow])


model = logistic()


@pytest.mark.every_case
@BACKENDS
def test_frames_become_arrays(backend):
    frame = backend(FRAME)
    (matrix, labels), _ = as_arrays((backend(FRAME[["age", "visits"]]), frame["y"]), {})
    np.testing.assert_array_equal(matrix, np.column_stack([AGE, FRAME["visits"]]))
    assert (matrix.dtype, labels.dtype) == (np.float64, np.int64)
    np.testing.assert_array_equal(labels, Y)


@pytest.mark.every_case
@BACKENDS
def test_the_dtype_does_not_depend_on_values(backend):
    kinds = {"a": "Float64", "b": "boolean", "c": "Int64"}
    for missing in (False, True):
        frame = pd.DataFrame({
            name: pd.array([None if missing else 1, 0, 1], dtype=kind)
            for name, kind in kinds.items()
        })  # fmt: skip
        own = backend(frame)
        (found,), _ = as_arrays((own["a"],), {})
        assert found.dtype == np.float64
        assert np.isnan(found[0]) == missing
        for name, dtype in (("b", bool), ("c", np.int64)):
            if missing:
                with pytest.raises(ValueError, match="has missing values"):
                    as_arrays((own[name],), {})
            else:
                assert as_arrays((own[name],), {})[0][0].dtype == dtype


@BACKENDS
def test_texts_and_categories_are_refused(backend):
    for frame in (FRAME, FRAME.astype({"sex": "category"})):
        with pytest.raises(TypeError, match=r"'sex'.*numpyro_dp.design"):
            as_arrays((backend(frame),), {})


@pytest.mark.parametrize("name", ["X.npy", pathlib.Path("X")])
def test_the_name_of_a_file_is_refused(name):
    with pytest.raises(TypeError, match=r"name of a file, 'X.*mmap_mode"):
        as_arrays((), {"x": name})
    assert as_arrays(("logit",), {}) == (("logit",), {})
    ids = {"unit": ["scan.npy", "p2"]}
    assert as_arrays((), ids) == ((), ids)  # an error would tell the id of a person


def test_a_plain_arrow_array():
    pa = pytest.importorskip("pyarrow")
    (found,), _ = as_arrays((pa.array([1.5, None]),), {})
    np.testing.assert_array_equal(found, [1.5, np.nan])


@pytest.mark.extended
def test_fits_are_those_of_arrays():
    ids = np.arange(N) // 2

    def fitted(x, y, unit):
        options = grouped(max_rows_per_unit=2, secret_key=3, repetition=True)
        driver = DPLaplace(model, budget=PrivacyBudget(1.0, 1e-5), **options)
        return driver.run(jax.random.key(0), x, y, unit=unit)

    people = pd.Series([f"person {i:04d}" for i in ids])
    by_frame = fitted(FRAME[["age"]] / 100, FRAME["y"], people)
    by_array = fitted(AGE[:, None] / 100, Y, ids)
    key = jax.random.key(1)
    np.testing.assert_array_equal(by_frame.sample(key, 5)["w"], by_array.sample(key, 5)["w"])
    x, y = design(FRAME, {"age": (0, 100), "sex": ["f", "m"]}).matrix, FRAME["y"]
    assert fit(model, x, y, epsilon=1.0, rng_key=key).sample(key, 2)["w"].shape == (2, 3)


@pytest.mark.every_case
@BACKENDS
def test_designs(backend):
    frame = FRAME.copy()
    frame.loc[3, "age"] = np.nan
    frame.loc[4, "sex"] = None
    found = design(backend(frame), {"age": (20, 80), "sex": ["f", "m"]})
    assert found.names == ("intercept", "age", "sex=m")
    age = np.clip((frame["age"].to_numpy() - 50) / 30, -1, 1)
    sex = np.where(frame["sex"].isna(), np.nan, frame["sex"] == "m")
    expected = np.column_stack([np.ones(N), age, sex]).astype(np.float32)
    np.testing.assert_allclose(found.matrix, expected, rtol=1e-6)
    counts = design(backend(frame), {"visits": list(range(9))}, intercept=False)
    np.testing.assert_array_equal(
        counts.matrix, frame["visits"].to_numpy()[:, None] == np.arange(1, 9)
    )
    assert str(AGE[0]) not in repr(found)


def test_a_value_that_is_not_a_number_is_missing_and_nobody_hears_of_it():
    values = np.array([30.0, "secret 70", None, 10**400, "50", np.nan], object)
    frame = {"age": values}
    for each in (frame, pd.DataFrame(frame)):
        found = design(each, {"age": (0, 100)}, intercept=False).matrix[:, 0]
        np.testing.assert_allclose(found, [-0.4, np.nan, np.nan, np.nan, 0, np.nan], atol=1e-6)
    found = summarize_columns(frame, {"age": (0, 100)}, budget=PrivacyBudget(1.0, 1e-2))
    assert set(found.mean) == {"age"}
    for text in (np.array(["secret 70", "30"]), pd.Series(["secret 70", "30"])):
        with pytest.raises(TypeError, match="does not hold numbers") as raised:
            design({"age": text} if isinstance(text, np.ndarray) else text.to_frame("age"),
                   {"age": (0, 100)})  # fmt: skip
        assert raised.value.__cause__ is None and raised.value.__context__ is None


@pytest.mark.parametrize(("columns", "error", "words"), [
    ({"height": (0, 2)}, ValueError, "no columns"),
    ({"age": (80, 20)}, ValueError, "low < high"),
    ({"age": (0, math.inf)}, ValueError, "low < high"),
    ({"age": (0, 1, 2)}, TypeError, "Categories are a list"),
    ({"sex": (0, 1)}, TypeError, "does not hold numbers"),
    ({"sex": ["m", "w"]}, ValueError, "none of its categories"),
    ({"sex": ["f", "m", "m"]}, ValueError, "not distinct"),
    ({"sex": ["f"]}, TypeError, "two or more categories"),
    ({"sex": "category"}, TypeError, "Expected a range"),
    ({}, TypeError, "dict by column"),
    (["age"], TypeError, "dict by column"),
])  # fmt: skip
@pytest.mark.table
def test_bad_columns_are_refused(columns, error, words):
    with pytest.raises(error, match=words) as raised:
        design(FRAME, columns)
    assert f"{AGE[0]:.3f}" not in str(raised.value)


def test_columns_without_names():
    x = rng.normal(size=(5, 2))
    np.testing.assert_array_equal(as_arrays((pd.DataFrame(x),), {})[0][0], x)
    assert design(pd.DataFrame(x), {0: (-9, 9)}).names == ("intercept", "0")
    found = design({"a": np.array([1.0, pd.NA, None], object)}, {"a": (0, 2)}, intercept=False)
    np.testing.assert_array_equal(found.matrix[:, 0], [0, np.nan, np.nan])


TIMES = pd.to_datetime(["2020-01-01", "2020-01-02"])


@pytest.mark.parametrize(("frame", "error", "words"), [
    ({"a": np.ones((3, 2))}, ValueError, "one value for each record"),
    ({"a": np.ones(3), "b": np.ones(2)}, ValueError, "one value for each record"),
    ({"a": TIMES.to_numpy()}, TypeError, "holds times"),
    (pd.DataFrame({"a": TIMES}), TypeError, "holds times"),
])  # fmt: skip
def test_odd_columns_are_refused(frame, error, words):
    with pytest.raises(error, match=words):
        design(frame, dict.fromkeys(frame, (0, 1)))


@pytest.mark.full
def test_a_check_of_records():
    counts = given(lambda x, w: dist.Poisson(jax.numpy.exp(x @ w)), w=slopes())
    x = rng.normal(size=(50, 4))
    x[:, 1], x[:, 2], x[:, 3] = 3.0, 1.0, 1e4 * x[:, 3]
    x[7, 0] = np.inf
    y = np.full(50, 2.0)
    y[9] = 0.5
    x[:, 3] = np.where(np.arange(50) == 9, 0, x[:, 3])
    found = check_records(counts, x / [1, 1, 1, 1e4], y)
    assert found.not_finite.tolist() == [7]
    assert found.impossible.tolist() == [9]
    assert found.constant == ("column 1 of x",)
    assert found.scales == {}
    assert check_records(counts, x[:5] / [1, 1, 1, 1], y[:5]).scales.keys() == {"column 3 of x"}
    assert "7" in str(found)
    assert "7" not in repr(found)
    fine = check_records(model, rng.normal(size=(20, 2)), Y[:20])
    assert "nothing is odd" in str(fine)
