"""Private figures of columns."""

import math

import jax
import numpy as np
import pytest

from numpyro_dp import Ledger, PrivacyBudget, summarize_columns
from numpyro_dp.formulas.columns import _bound, _terms

RANGES = {"age": (0, 100), "income": (0.0, 2e5)}


def frame(number, seed=0):
    rng = np.random.default_rng(seed)
    income = np.where(rng.random(number) < 0.1, np.nan, rng.lognormal(10, 0.5, number))
    return {"age": rng.uniform(20, 60, number), "income": income}


def test_figures_are_those_of_the_columns():
    data = frame(20_000)
    found = summarize_columns(data, RANGES, budget=PrivacyBudget(3.0, 1e-5), quantiles=(0.1, 0.5))
    for name, values in data.items():
        error = found.mean_error[name]
        assert abs(found.mean[name] - np.nanmean(values)) < 5 * error < 0.01 * RANGES[name][1]
        assert found.sd[name] == pytest.approx(np.nanstd(values), rel=0.1)
        assert found.scale[name] == pytest.approx(np.sqrt(np.nanmean(values**2)), rel=0.05)
        for prob, quantile in found.quantiles[name].items():
            assert abs(quantile - np.nanquantile(values, prob)) < 0.02 * RANGES[name][1]
    assert found.privacy.epsilon <= 3.0
    assert "income" in str(found)


@pytest.mark.full
def test_the_stated_noise_is_the_noise():
    data, off = frame(2000), []
    for seed in range(30):
        found = summarize_columns(data, RANGES, budget=PrivacyBudget(1.0, 1e-5), secret_key=seed)
        off += [(found.mean[n] - np.nanmean(x)) / found.mean_error[n] for n, x in data.items()]
    assert 0.75 < np.std(off) < 1.25
    assert abs(np.mean(off)) < 0.4


def test_what_noise_hides_is_not_shown():
    found = summarize_columns(
        frame(300), RANGES, budget=PrivacyBudget(0.01, 1e-5), quantiles=(0.5,)
    )
    for name, (low, high) in RANGES.items():
        assert math.isnan(found.mean[name])
        assert math.isnan(found.sd[name])
        assert math.isnan(found.quantiles[name][0.5])
        uniform = math.hypot((low + high) / 2, (high - low) / math.sqrt(12))
        assert found.scale[name] == pytest.approx(uniform)


@pytest.mark.every_case
@pytest.mark.parametrize("histogram", [False, True])
def test_no_record_adds_more_than_the_bound(histogram):
    parts = ("count", "first", "second", "bins")[: 3 + histogram]
    bound = _bound(3, histogram)
    rng = np.random.default_rng(0)
    rows = np.clip(3 * rng.normal(size=(500, 3)), -1, 1).astype(np.float32)
    rows[rng.random(rows.shape) < 0.1] = np.nan
    rows[0] = 1.0
    found = jax.vmap(lambda row: _terms((row,)))(rows)
    norms = np.sqrt(sum(np.square(found[part]).reshape(500, -1).sum(1) for part in parts))
    assert max(norms) == pytest.approx(bound)
    assert max(norms) <= bound * (1 + 1e-6)


def test_it_is_charged(tmp_path):
    ledger = Ledger(tmp_path / "ledger", PrivacyBudget(1.0, 1e-5))
    summarize_columns(frame(300), RANGES, budget=ledger.budget(0.2, purpose="scales"))
    assert [row["purpose"] for row in ledger.table()] == ["scales"]


def test_ranges_are_needed():
    with pytest.raises(TypeError, match="Expected a range"):
        summarize_columns(frame(10), {"age": ["a", "b"]}, budget=PrivacyBudget(1.0, 1e-5))
    with pytest.raises(ValueError, match="quantile"):
        summarize_columns(frame(10), RANGES, budget=PrivacyBudget(1.0, 1e-5), quantiles=(1.5,))
