"""Fixed-size batches: uniform over subsets, distinct, and short only as often as stated."""

import itertools
import math

import jax
import numpy as np
import pytest
from privacy.drawn import batches, membership
from scipy import stats

from numpyro_dp.privacy import _batches
from numpyro_dp.privacy._batches import distinct_plan
from numpyro_dp.privacy.keys import secret_key
from numpyro_dp.privacy.sampling import FixedSize


@pytest.mark.parametrize(("number", "size"), [(8, 2), (12, 3), (6, 3), (5, 4), (4, 4), (9, 1)])
def test_fixed_size_is_uniform_over_subsets(number, size):
    steps = 40_000
    sampler = FixedSize(size)
    indices, mask = batches(sampler, number, steps)
    assert mask.all()
    assert indices.shape == (steps, size)
    assert (membership(indices, mask, number).sum(1) == size).all()
    codes = (1 << indices.astype(np.int64)).sum(1)
    subsets = [sum(1 << i for i in s) for s in itertools.combinations(range(number), size)]
    observed = np.array([(codes == c).sum() for c in subsets])
    assert observed.sum() == steps
    if len(subsets) > 1:
        assert stats.chisquare(observed).pvalue > 1e-4
        # A sampler with one record 20 % more likely is rejected by the same statistic.
        weights = np.array([1.2 if c & 1 else 1.0 for c in subsets])
        assert (
            stats.chisquare(observed, steps * weights / weights.sum()).pvalue < 1e-5
            or size == number
        )
    # The order is uniform too: the first entry does not tell the row.
    assert stats.chisquare(np.bincount(indices[:, 0], minlength=number)).pvalue > 1e-4


@pytest.mark.parametrize(
    ("number", "size"), [(30_000, 300), (10**9, 1000), (1000, 250), (999, 600)]
)
def test_fixed_size_at_scale(number, size):
    sampler = FixedSize(size)
    indices, mask = batches(sampler, number, 200)
    assert mask.all()
    assert ((indices >= 0) & (indices < number)).all()
    assert all(len(set(row)) == size for row in indices.tolist())
    cells = np.bincount((indices.ravel().astype(np.int64) * 16) // number, minlength=16)
    sizes = (
        np.bincount((np.arange(number, dtype=np.int64) * 16) // number) if number < 10**7 else None
    )
    expected = cells.sum() / 16 if sizes is None else sizes / number * cells.sum()
    assert (np.abs(cells - expected) < 5 * np.sqrt(expected)).all()
    assert 0 <= sampler.failure_prob(number) <= 1.01e-18
    assert sampler.total_variation(number) == 0


@pytest.mark.parametrize("number", [1, 3, 7, 65_537, 10**6, 3 * 2**29, 2**31 - 2])
def test_uniform_rows_are_lemires(number):
    words = np.asarray(jax.random.bits(secret_key(5), (4000,))).astype(object)
    products = [int(w) * number for w in words]
    expected = [number if p % 2**32 < 2**32 % number else p >> 32 for p in products]
    rows = _batches._uniform_rows(secret_key(5), 4000, number)
    assert np.asarray(rows).tolist() == expected


def test_rejection_leaves_equal_counts():
    # All 16-bit words of a small model of Lemire's rule: every row keeps as many.
    for number in (3, 7, 100, 1000):
        products = np.arange(2**16) * number
        kept = products[products % 2**16 >= 2**16 % number] >> 16
        assert set(np.bincount(kept, minlength=number)) == {2**16 // number}


@pytest.mark.parametrize(("size", "number"), [(1, 2**31 - 2), (1, 3 * 2**29), (250, 1000), (3, 12)])
def test_shortfall_bound(size, number):
    plan = distinct_plan(size, number)
    reject = (2**32 % number) / 2**32
    good = (1 - (size - 1) / number) * (1 - reject)
    assert 0 <= stats.binom.cdf(size - 1, plan.draws, good) <= 1.01 * plan.shortfall + 1e-300
    assert plan.shortfall <= 1e-18


def test_shortfall_is_masked(monkeypatch):
    # A size of its own: what is compiled for other sizes is not compiled again.
    monkeypatch.setattr(
        _batches, "distinct_plan", lambda *_: _batches.DistinctPlan(draws=4, shortfall=0.4)
    )
    indices, mask = batches(FixedSize(4), 16, 20_000)
    counts = membership(indices, mask, 16).sum(1)
    distinct = 15 * 14 * 13 / 16**3
    assert abs((counts == 4).mean() - distinct) < 5 * math.sqrt(distinct * (1 - distinct) / 20_000)
    assert (indices[~mask] == 0).all()
    assert counts.min() >= 1
