"""The samplers' distributions: exact, from the thresholds; frequencies, with k-sigma bounds."""

import collections
import itertools
import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dp_accounting.dp_event import (
    GaussianDpEvent,
    PoissonSampledDpEvent,
    SampledWithoutReplacementDpEvent,
)
from jax import lax
from scipy import stats

from numpyro_dp.privacy import _batches
from numpyro_dp.privacy._batches import WORD_BITS, binomial_tail, distinct_plan, poisson_plan
from numpyro_dp.privacy.keys import secret_key
from numpyro_dp.privacy.sampling import FixedSize, FullBatch, Permutation, Poisson


def batches(sampler, num_examples, steps, seed=0):
    """Indices and masks of consecutive steps, from one compiled scan."""

    def step(state, _):
        return sampler.next(state)[::-1]

    state = sampler.init(secret_key(seed), num_examples)
    return map(np.asarray, jax.jit(lambda s: lax.scan(step, s, None, length=steps))(state)[1])


def membership(indices, mask, num_examples):
    """0/1 matrix (steps, records); fails if a record is twice in a batch."""
    counts = np.zeros((len(indices), num_examples), np.int32)
    rows = np.broadcast_to(np.arange(len(indices))[:, None], indices.shape)
    np.add.at(counts, (rows[mask], indices[mask]), 1)
    assert counts.max() <= 1
    return counts


def inclusion_scores(taken, rate):
    """Largest |z| of the records' and of the pairs' frequencies, under independence at ``rate``."""
    steps, records = taken.shape
    centred = (taken.astype(np.float32) - rate) / math.sqrt(rate * (1 - rate))
    pairs = centred.T @ centred / math.sqrt(steps)
    single = centred.sum(0, dtype=float) / math.sqrt(steps)
    return np.abs(single).max(), np.abs(pairs[np.triu_indices(records, 1)]).max()


def count_pvalue(counts, trials, rate):
    """Chi-square of batch sizes against Binomial(trials, rate), cells of 10 expected or more."""
    expected = stats.binom.pmf(np.arange(trials + 1), trials, rate) * len(counts)
    keep = expected >= 10
    observed = np.bincount(counts, minlength=trials + 1)
    both = ([*each[keep], each[~keep].sum()] for each in (observed, expected))
    return stats.chisquare(*both).pvalue


# Poisson: the distribution of a gap, exactly.


def gap_distribution(plan, limit):
    """Probabilities of min(gap, limit) as fractions, from the integer thresholds alone."""
    distribution = {0: Fraction(1)}
    for place, thresholds, _ in plan.digits:
        tail = [Fraction(1), *(Fraction(t, 2**WORD_BITS) for t in thresholds), Fraction(0)]
        digit = [a - b for a, b in itertools.pairwise(tail)]
        assert min(digit) >= 0 and sum(digit) == 1
        combined = collections.defaultdict(Fraction)
        for (value, p), (m, q) in itertools.product(distribution.items(), enumerate(digit)):
            combined[min(value + m * place, limit)] += p * q
        distribution = combined
    jump = Fraction(plan.jump[0], 2**WORD_BITS) if plan.jump else Fraction(0)
    distribution = {value: p * (1 - jump) for value, p in distribution.items()}
    return distribution | {limit: distribution.get(limit, 0) + jump}


@pytest.mark.full
@pytest.mark.parametrize(
    ("rate", "number"),
    [(0.01, 3000), (0.3, 500), (0.003, 1), (0.01, 40), (1e-7, 1500), (0.999, 50), (0.5, 33)],
)
def test_gaps_are_geometric_to_the_last_bit(rate, number):
    plan = poisson_plan(rate, 1e-18, number)
    distribution = gap_distribution(plan, number)
    keep = 1 - Fraction(rate)
    power = [Fraction(1)]
    for _ in range(number):
        power.append(power[-1] * keep)
        if power[-1].denominator.bit_length() > 4000:  # shorten what is far below 2**-160
            power[-1] = Fraction(int(power[-1] * 2**3000), 2**3000)
    truth = {g: power[g] * (1 - keep) for g in range(number)} | {number: power[number]}
    distance = sum(abs(distribution.get(g, 0) - p) for g, p in truth.items()) / 2
    assert sum(distribution.values()) == 1
    assert distance <= 100 * 2.0**-WORD_BITS
    assert plan.size * float(distance) <= plan.total_variation
    assert plan.failure_prob == binomial_tail(plan.size - 1, number - 1, rate)
    # A wrong distribution is seen: thresholds of another rate.
    other = gap_distribution(poisson_plan(rate * (1 - 1e-9), 1e-18, number), number)
    assert sum(abs(other.get(g, 0) - p) for g, p in truth.items()) / 2 > 1e-18


@pytest.mark.parametrize("place", [0, 1, 2])
def test_words_against_thresholds(place):
    # The comparison of five 32-bit words is that of 160-bit integers, at and around a threshold.
    threshold = 0x80000000_00000001_FFFFFFFF_00000000_7FFFFFFF
    for shift in (-(2**128), -(2**64), -(2**32), -1, 0, 1, 2**32, 2**64, 2**128):
        value = threshold + shift * (place + 1)
        words = [jnp.uint32((value >> s) & 0xFFFFFFFF)[None] for s in (128, 96, 64, 32, 0)]
        assert bool(_batches._below(words, _batches._parts(threshold))[0]) == (value < threshold)


@pytest.mark.full
def test_ties_are_refined():
    # With thresholds whose first word is 0 or all ones, ties are certain and the rest decides.
    half = (2**31) << (WORD_BITS - 64)
    plan = _batches.PoissonPlan(4, (), (half,), 0.0, 0.0)
    low = _batches._geometric(secret_key(1), secret_key(2), plan, 7)
    assert set(np.asarray(low).tolist()) <= {0, 7}
    rest = jax.random.bits(secret_key(3), (WORD_BITS // 32 - 1, 1, 10_000))
    words = jnp.zeros((1, 10_000), jnp.uint32), *rest
    taken = _batches._place_digits_exactly([_batches.Digit(7, (half,), 1)], words, 7) == 7
    assert abs(taken.mean() - 0.5) < 5 * 0.5 / 100


@pytest.mark.full
@pytest.mark.parametrize(("rate", "number"), [(0.01, 30_000), (3e-4, 10**6), (0.7, 40)])
def test_long_gaps_are_the_same_by_either_way(rate, number):
    # Thresholds beyond the common ones are looked at only where a word asks for it.
    plan = poisson_plan(rate, 1e-18, number)
    assert any(digit.common < len(digit.thresholds) for digit in plan.digits)
    fewer = plan._replace(digits=tuple(d._replace(common=d.common // 2) for d in plan.digits))
    usual, careful = (
        jax.jit(lambda keys, p=p: _batches._geometric(*keys, p, number)) for p in (plan, fewer)
    )
    for seed in range(20):
        keys = jax.random.split(secret_key(seed))
        assert (usual(keys) == careful(keys)).all()


# Poisson: padded size, failures and total variation.


@pytest.mark.parametrize(("number", "rate"), [(200, 0.125), (60, 0.5), (1000, 2.0**-8)])
def test_binomial_tail_is_a_tight_upper_bound(number, rate):
    top, base = rate.as_integer_ratio()
    masses = [math.comb(number, k) * top**k * (base - top) ** (number - k)
              for k in range(number + 1)]  # fmt: skip
    for size in range(int(number * rate), min(number, int(number * rate) + 60)):
        exact = sum(masses[size + 1 :]) / base**number
        assert exact <= binomial_tail(size, number, rate) <= 1.3 * exact + 1e-300
    assert binomial_tail(number, number, rate) == 0


@pytest.mark.parametrize("number", [1, 2, 10, 30_000, 10**6, 2**31 - 2])
@pytest.mark.parametrize("rate", [1e-7, 1e-3, 0.3])
def test_padded_size_is_the_smallest(number, rate):
    sampler = Poisson(rate)
    size = sampler._plan(number).size
    assert 1 <= size <= number
    assert sampler.total_variation(number) <= size * 100 * 2.0**-WORD_BITS
    assert sampler.failure_prob(number) <= 1e-18
    if size > 1:  # up to the rounding of log-gamma at 2**31
        assert stats.binom.sf(size - 2, number - 1, rate) > 0.98e-18
    # 400,000 steps stay far below any delta in use, at epsilon 50 too.
    assert 4e5 * sampler.failure_prob(number) < 1e-12
    if size < 10**5:
        assert 4e5 * math.exp(50) * sampler.total_variation(number) < 1e-12


def cut_mixture(values, rate, size, noise, grid):
    """Density of the noisy sum of a Poisson batch that keeps its first ``size`` rows."""
    density = np.zeros_like(grid)
    for taken in itertools.product([0, 1], repeat=len(values)):
        rows = [value for value, one in zip(values, taken, strict=True) if one][:size]
        weight = rate ** sum(taken) * (1 - rate) ** (len(values) - sum(taken))
        density += weight * stats.norm.pdf(grid, sum(rows), noise)
    return density


def test_failures_cost_their_probability_and_no_more():
    # Records of norm 1, batches cut at M = 2 of 4 records: a record may push another one out.
    rate, size, noise, epsilon = 0.4, 2, 0.8, 1.0
    grid, step = np.linspace(-8, 8, 4001, retstep=True)

    def divergence(one, other, size=size):
        p, q = (cut_mixture(values, rate, size, noise, grid) for values in (one, other))
        worse = (np.maximum(a - math.exp(epsilon) * b, 0).sum() for a, b in ((p, q), (q, p)))
        return step * max(worse)

    ideal = divergence([1.0], [], 1)
    failure = binomial_tail(size - 1, 3, rate)
    worst = max(
        divergence([*others[:place], 1.0, *others[place:]], others)
        for others in itertools.product([-1.0, 0.0, 1.0], repeat=3)
        for place in range(4)
    )
    assert worst <= ideal + failure
    assert worst > 1.02 * ideal  # cutting does cost something


@pytest.mark.full
def test_overflow_is_cut_and_counted():
    sampler, number, steps = Poisson(0.2, overflow_prob=0.3), 50, 20_000
    size = sampler._plan(number).size
    overflow = stats.binom.sf(size - 1, number - 1, 0.2)
    assert overflow <= 0.3 < stats.binom.sf(size - 2, number - 1, 0.2)
    assert sampler.failure_prob(number) == pytest.approx(overflow, rel=1e-6)
    indices, mask = batches(sampler, number, steps)
    assert indices.shape == (steps, size)
    counts = membership(indices, mask, number).sum(1)
    full = stats.binom.sf(size - 1, number, 0.2)  # exactly M rows, or cut
    short = stats.binom.cdf(size - 3, number, 0.2)
    for found, prob in ((counts == size, full), (counts <= size - 3, short)):
        assert abs(found.mean() - prob) < 5 * math.sqrt(prob * (1 - prob) / steps)


# Poisson: frequencies.


@pytest.mark.parametrize(("number", "rate", "steps"), [
    (40, 0.02, 20_000),
    (40, 0.3, 20_000),
    pytest.param(40, 0.9, 20_000, marks=pytest.mark.slow),
    pytest.param(200, 0.05, 400_000, marks=pytest.mark.slow),
])  # fmt: skip
def test_poisson_inclusion(number, rate, steps):
    taken = membership(*batches(Poisson(rate), number, steps, seed=11), number)
    single, pair = inclusion_scores(taken, rate)
    assert single < 5
    assert pair < 6
    assert count_pvalue(taken.sum(1), number, rate) > 1e-4
    # A sampler at another rate is rejected by the same statistics.
    for wrong in (0.9 * rate, 1.1 * rate):
        assert count_pvalue(taken.sum(1), number, wrong) < 1e-8
    if steps > 20_000:
        assert inclusion_scores(taken, 1.02 * rate)[0] > 5
    if rate == 0.3:
        assert inclusion_scores(taken, 1.1 * rate)[0] > 8
        # A fixed-size batch has the right marginals and the wrong pairs.
        fixed = membership(*batches(FixedSize(12), number, steps), number)
        single, pair = inclusion_scores(fixed, rate)
        assert single < 5 < 6 < pair


@pytest.mark.full
@pytest.mark.parametrize(("number", "rate"), [
    (30_000, 0.01),
    pytest.param(10**6, 3e-4, marks=pytest.mark.slow),
    pytest.param(2**31 - 2, 1e-7, marks=pytest.mark.slow),
])  # fmt: skip
def test_poisson_at_scale(number, rate):
    steps, variance = 1500, number * rate * (1 - rate)
    indices, mask = batches(Poisson(rate), number, steps)
    counts, taken = mask.sum(1), indices[mask].astype(np.int64)
    assert abs(counts.mean() - number * rate) < 5 * math.sqrt(variance / steps)
    assert abs(counts.var() / variance - 1) < 5 * math.sqrt(2 / steps)
    assert (mask[:, :-1] >= mask[:, 1:]).all()
    assert ((indices >= 0) & (indices < number)).all()
    assert (indices[~mask] == 0).all()
    assert np.diff(indices.astype(np.int64), axis=1)[mask[:, 1:]].min() >= 1
    # Uniform over the rows: a gap distribution that is off by 1 % shifts the cells' counts. Every
    # residue modulo 32 alike, so the lowest digit is right.
    for cells in (np.bincount(taken * 64 // number), np.bincount(taken % 32)):
        assert stats.chisquare(cells).pvalue > 1e-4


@pytest.mark.full
@pytest.mark.parametrize("sampler", [Poisson(0.3), FixedSize(3)])
def test_steps_are_independent(sampler):
    number, steps = 20, 20_000
    taken = membership(*batches(sampler, number, steps), number)
    rate = sampler.inclusion_prob(number)
    centred = (taken - rate) / math.sqrt(rate * (1 - rate))
    for lag in (1, 2):
        cross = centred[:-lag].T @ centred[lag:] / math.sqrt(steps - lag)
        assert np.abs(cross).max() < 5.5
    # The same statistic sees a batch that is used twice.
    repeated = np.repeat(centred[: steps // 2], 2, axis=0)
    assert np.abs(repeated[:-1].T @ repeated[1:]).max() / math.sqrt(steps) > 50


@pytest.mark.parametrize(("rate", "number"), [
    (1e-300, 100), (5e-324, 100), (1e-7, 100), (1 - 2**-53, 100), (0.25, 1), (1.0, 1), (1.0, 7),
    (1.0, 1000),
])  # fmt: skip
def test_extreme_rates_and_numbers(rate, number):
    indices, mask = batches(Poisson(rate), number, 2000)
    expected = rate * number
    error = math.sqrt(expected * (1 - rate) / 2000)
    assert abs(mask.sum(1).mean() - expected) <= 5 * error + 1e-2
    assert Poisson(rate).failure_prob(number) <= (rate < 1) * 1.01e-18
    assert Poisson(rate).total_variation(number) <= 1e-40
    if rate == 1.0:
        assert mask.all() and (indices == np.arange(number)).all()


def test_amplification():
    event = GaussianDpEvent(1.0)
    for sampler, made, prob in (
        (Poisson(0.1), PoissonSampledDpEvent(0.1, event), 0.1),
        (FixedSize(10), SampledWithoutReplacementDpEvent(100, 10, event), 0.1),
        (FixedSize(60), SampledWithoutReplacementDpEvent(100, 60, event), 0.6),
        (Permutation(30), event, 0.25), (FullBatch(), event, 1.0),
    ):  # fmt: skip
        assert sampler.amplify(event, 100) == made
        assert sampler.inclusion_prob(100) == prob
    assert FullBatch().total_variation(100) == FullBatch().failure_prob(100) == 0
    steps = (1, 4, 5, 8, 9)  # an epoch is one event
    assert [Permutation(30).compositions(100, step) for step in steps] == [1, 1, 2, 2, 3]


@pytest.mark.parametrize(("make", "error", "match"), [
    (lambda: Poisson(float("nan")), ValueError, "rate=nan"),
    (lambda: Poisson(0.1, overflow_prob=0.0), ValueError, "overflow_prob=0.0"),
    (lambda: FixedSize(2.0), TypeError, "batch_size=2.0"),
    (lambda: FixedSize(11).init(secret_key(0), 10), ValueError, "has 10 records"),
    (lambda: FixedSize(11).inclusion_prob(10), ValueError, "smaller batch"),
    (lambda: Poisson(0.1).init(secret_key(0), 0), ValueError, "num_examples=0"),
    (lambda: Poisson(0.1).init(secret_key(0), 2**31 - 1), ValueError, "32-bit"),
    (lambda: Poisson(0.1).init(jax.random.PRNGKey(0), 10), TypeError, "typed key"),
    (lambda: FullBatch().init(jax.random.split(secret_key(0)), 10), ValueError, "vmap"),
])  # fmt: skip
def test_errors(make, error, match):
    with pytest.raises(error, match=match):
        make()


# Permuted epochs.


@pytest.mark.parametrize(("number", "size"), [(100, 30), (100, 100), (7, 3), (5, 1), (10, 99)])
def test_each_epoch_has_every_record_once(number, size):
    per_epoch = -(-number // size)
    indices, mask = batches(Permutation(size), number, 3 * per_epoch)
    sizes = mask.sum(1)
    assert sizes.max() - sizes.min() <= 1
    assert sizes.max() <= size
    epochs = indices[mask].reshape(3, number)
    np.testing.assert_array_equal(np.sort(epochs), [np.arange(number)] * 3)
    if number > 20:
        assert (epochs[0] != epochs[1]).any()


def test_orders_are_uniform():
    indices, mask = batches(Permutation(1), 4, 4 * 6000)
    assert mask.all()
    orders = indices.reshape(6000, 4) @ np.array([64, 16, 4, 1])
    _, counts = np.unique(orders, return_counts=True)
    assert len(counts) == 24
    assert stats.chisquare(counts).pvalue > 1e-3


# Batches of a fixed size: uniform over subsets, distinct, and short only as often as stated.


@pytest.mark.parametrize(("number", "size"), [(8, 2), (12, 3), (6, 3), (5, 4), (4, 4), (9, 1)])
def test_fixed_size_is_uniform_over_subsets(number, size):
    steps = 40_000
    indices, mask = batches(FixedSize(size), number, steps)
    assert mask.all() and indices.shape == (steps, size)
    assert (membership(indices, mask, number).sum(1) == size).all()
    codes = (1 << indices.astype(np.int64)).sum(1)
    subsets = [sum(1 << i for i in s) for s in itertools.combinations(range(number), size)]
    observed = np.array([(codes == c).sum() for c in subsets])
    assert observed.sum() == steps
    if size < number:
        assert stats.chisquare(observed).pvalue > 1e-4
        # A sampler with one record 20 % more likely is rejected by the same statistic.
        weights = np.array([1.2 if c & 1 else 1.0 for c in subsets])
        assert stats.chisquare(observed, steps * weights / weights.sum()).pvalue < 1e-5
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
    edges = [-(-cell * number // 16) for cell in range(17)]  # the first row of each cell
    expected = np.diff(edges) / number * cells.sum()
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
