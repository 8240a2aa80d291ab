"""Noise on a grid: its law with exact numbers, by samples, and as the mechanism adds it."""

import decimal
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gaussian import gaussian
from jax import lax
from scipy import stats

from numpyro_dp import PrivacyBudget
from numpyro_dp.core import MechanismState, Whole
from numpyro_dp.privacy import noise
from numpyro_dp.privacy.accounting.gdp import gaussian_log_delta
from numpyro_dp.privacy.accounting.spent import epsilon_spent
from numpyro_dp.privacy.keys import secret_key
from numpyro_dp.privacy.noise import MOST, STD, TOTAL_VARIATION, discrete_gaussian, on_grid
from numpyro_dp.privacy.plan import PrivacyReport, make_plan
from numpyro_dp.privacy.sampling import FullBatch

# One sample for all tests of the distribution, and bounds from its own size.
SIZE = 4_000_001
wide = jax.enable_x64 if hasattr(jax, "enable_x64") else jax.experimental.enable_x64
EXACT = decimal.Context(prec=80, Emin=-(10**6))


@pytest.fixture(scope="module")
def sample():
    return np.asarray(discrete_gaussian(secret_key(6), SIZE))


def exact_law(std, most):
    """The discrete Gaussian on -most ... most with exact numbers."""
    with decimal.localcontext(EXACT):
        weights = [(-decimal.Decimal(a * a) / (2 * std**2)).exp() for a in range(-most, most + 1)]
        total = sum(weights)
        return [each / total for each in weights]


def theta(std):
    """Largest relative error of a sum of exp(-(a - c)^2 / 2 std^2) over integers a, for any c."""
    return 2.1 * math.exp(-2 * math.pi**2 * std**2)


def test_the_stated_distance_holds_with_exact_numbers():
    # The probabilities of 0, 1, ... that Walker's method gives, in units of 2^-159.
    found = [0] * 2**14
    for place, words in enumerate(noise._table().T.tolist()):
        row = functools.reduce(lambda high, low: high << 32 | low, words)
        alias, threshold = row >> 145, row & (2**145 - 1)
        found[place] += threshold
        found[alias] += 2**145 - threshold
    assert sum(found) == 2**159
    law = exact_law(decimal.Decimal(1120), 2**14 + 1000)[2**14 + 1000 :]
    with decimal.localcontext(EXACT):
        stated = [law[0], *(2 * each for each in law[1:])]
        # Values beyond the table are missing in `found`. Those beyond the law are below 2^-170.
        found = [decimal.Decimal(each) / 2**159 for each in found] + [0] * 1001
        one = float(sum(abs(a - b) for a, b in zip(stated, found, strict=True)) / 2)
    fine, factor = 1120, 320
    middle = fine * math.hypot(1, factor)
    widths = [a * b / math.hypot(a, factor * b) for a, b in ((fine, fine), (fine, middle))]
    assert 2.0**-160 < one < 2.0**-146
    assert min(widths) > 3.4
    of_one_number = 3 * one + 2 * sum(map(theta, widths)) + 2 * theta(math.sqrt(6))
    assert of_one_number < 2.0**-144
    assert MOST * 2.0**-144 == TOTAL_VARIATION
    assert math.isclose(STD, math.hypot(fine, factor * middle), rel_tol=1e-15)


@pytest.mark.full
@pytest.mark.parametrize(("fine", "coarse", "factor"), [(4, 4, 2), (3, 5, 2)])
def test_a_sum_of_two_is_discrete_gaussian_too(fine, coarse, factor):
    """The lemma of the docstring at sizes where all sums can be written down."""
    one = exact_law(decimal.Decimal(fine), 12 * fine)
    two = exact_law(decimal.Decimal(coarse), 12 * coarse)
    wide = 12 * fine + factor * 12 * coarse
    law = exact_law(decimal.Decimal(fine**2 + (factor * coarse) ** 2).sqrt(EXACT), wide)
    found = [decimal.Decimal(0)] * len(law)
    with decimal.localcontext(EXACT):
        for i, p in enumerate(one):
            for j, q in enumerate(two):
                found[i + factor * j] += p * q
        off = float(sum(abs(a - b) for a, b in zip(law, found, strict=True)) / 2)
    assert off < 2 * theta(fine * coarse / math.hypot(fine, factor * coarse)) + 1e-30
    # The lemma can fail: with a factor that is too large, the sum has gaps.
    assert theta(1 / math.hypot(1, 8)) > 1


@pytest.mark.full
def test_rounded_real_noise_is_discrete_gaussian():
    """R(G) of the docstring, at the small variance 7^2 + 6, by integrals of high precision."""
    ys = np.linspace(-90, 90, 400_001)
    dense = stats.norm.pdf(ys, scale=7)
    around = np.floor(ys)[:, None] + np.arange(-20, 22)
    weight = np.exp(-((around - ys[:, None]) ** 2) / 12)
    weight /= weight.sum(1, keepdims=True)
    found = np.zeros(400)
    np.add.at(found, around.astype(int) + 200, weight * dense[:, None])
    found *= ys[1] - ys[0]
    law = np.array(exact_law(decimal.Decimal(55).sqrt(), 100), float)
    np.testing.assert_allclose(found[100:301], law, atol=1e-15)


@pytest.mark.parametrize("std", [3.0, 5.0])
def test_neighbours_of_a_coarse_grid_obey_the_gaussian_bound(std):
    """The hockey-stick divergence of two numbers, on grids on which the difference is large."""
    law = np.array(exact_law(decimal.Decimal(std), int(12 * std)), float)
    ours, exceeded = np.pad(np.outer(law, law), 8), 0
    for shift in ((1, 0), (1, 1), (2, 1), (3, 0), (4, 3), (5, 5)):
        other = np.roll(ours, shift, (0, 1))
        for epsilon in (0.01, 0.1, 0.5, 1.0, 2.0, 4.0):
            delta = np.maximum(ours - math.exp(epsilon) * other, 0).sum()
            mu = np.hypot(*shift)
            log_delta = gaussian_log_delta(epsilon, mu / math.sqrt(std**2 - 6))
            assert delta <= math.exp(log_delta) * (1 + 1e-9) + 1e-15
            exceeded += delta > math.exp(gaussian_log_delta(epsilon, mu / std)) * (1 + 1e-6)
    assert exceeded > 5  # with all of the variance the bound is false


def test_words_decide_as_one_long_number_even_if_they_tie(monkeypatch):
    """All 160 bits of a draw, near its threshold: below it is the place, else the alias."""
    table, rng, number = noise._table().T, np.random.default_rng(0), 3000
    place, sign = rng.integers(0, 2**14, (3, number)), rng.integers(0, 2, (3, number))
    row = np.moveaxis(table[place], -1, 0)  # (5, 3, number)
    words = row.copy()
    words[0] = place << 18 | sign << 17 | (row[0] & 0x1FFFF)
    # Most words tie, each is sometimes off by one.
    off = rng.choice([0, 1, -1], (4, 3, number), p=(0.6, 0.2, 0.2))
    words[1:] += off.astype(np.uint32)
    monkeypatch.setattr(jax.random, "fold_in", lambda key, word: word)
    monkeypatch.setattr(jax.random, "bits", lambda word, *how: jnp.asarray(words)[word])
    found = noise._drawn(0, number)

    def joined(columns):
        parts = [columns[0] & 0x1FFFF, *columns[1:]]
        return functools.reduce(lambda high, low: high * 2**32 + low.astype(object), parts, 0)

    below = (joined(words) < joined(row)).astype(bool)
    size = np.where(below, place, row[0] >> 17)
    fine, middle, coarse = np.where(sign, -size, size)
    np.testing.assert_array_equal(found, fine + 320 * (middle + 320 * coarse))
    assert (words[1:4] == row[1:4]).all(0).sum() > 100  # the last word decides


@pytest.mark.full
def test_moments_and_correlations_of_the_sample(sample):
    z = sample / STD
    for power, mean, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs((z**power).mean() - mean) < 5 * math.sqrt(variance / SIZE)
    half = SIZE // 2
    for a, b in ((z[:half], z[half : 2 * half]), (z[:-1], z[1:]), (z[:-4096], z[4096:])):
        root = math.sqrt(a.size)
        assert abs((a * b).mean() * root) < 5
        assert abs(((a**2 - 1) * (b**2 - 1)).mean() / 2 * root) < 5


@pytest.mark.full
def test_every_digit_of_the_sample_is_even(sample):
    """All integers occur: the fine part fills the gaps of the coarse parts evenly."""
    for base in (2, 3, 320, 320**2):
        expected = SIZE * np.bincount(np.arange(base) % 64) / base
        assert stats.chisquare(np.bincount(sample % base % 64), expected).pvalue > 1e-5
    # The test can fail: the coarse part alone leaves gaps.
    gaps = np.bincount(sample // 320 * 320 % 320 % 64, minlength=64)
    assert (gaps == 0).any()


@pytest.mark.full
@pytest.mark.table
@pytest.mark.parametrize("bound", [3.0, 4.0, 4.5])
def test_tail_frequencies(sample, bound):
    expected = stats.norm.sf(bound) * SIZE
    for sign in (1, -1):
        count = (sign * sample > bound * STD).sum()
        assert abs(count - expected) < 5 * math.sqrt(expected)
    if bound <= 4:
        for scale in (0.9, 1.1):
            scaled = (scale * np.abs(sample) > bound * STD).sum()
            assert abs(scaled - 2 * expected) > 5 * math.sqrt(2 * expected)


@pytest.mark.slow
def test_far_tail_frequencies():
    def count(total, key):
        z = jnp.abs(discrete_gaussian(key, 1_000_000))
        bounds = jnp.array([4.0, 5.0, 5.5]) * STD
        return total + (z[:, None] > bounds).sum(0, dtype=jnp.int32), None

    keys = jax.random.split(secret_key(7), 200)
    # As users have it, whatever XLA_FLAGS says for quick compilation: 200 million draws.
    optimised = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 3})
    counts = np.asarray(optimised(lambda k: lax.scan(count, jnp.zeros(3, jnp.int32), k)[0])(keys))
    expected = 2 * stats.norm.sf([4.0, 5.0, 5.5]) * 2e8
    assert (np.abs(counts - expected) < 5 * np.sqrt(expected)).all()


def added(multiplier, clip=2.0, size=100_000, total=0.0, dtype=jnp.float32):
    """What the mechanism adds to each number of a sum, in units of the documented deviation."""
    mechanism = gaussian(clip, multiplier)
    sums = {"a": jnp.full(size, total, dtype)}
    noisy, _ = mechanism.privatise(secret_key(3), sums, MechanismState(clip))
    part = multiplier * math.sqrt(size) / STD
    wider = 1 / (1 - part) if part < 0.5 else 1
    return (np.asarray(noisy["a"], np.float64) - total) / (multiplier * clip * wider)


def chi_square_rejects(z):
    """Whether 200 bins of equal probability of N(0, 1) have other counts than expected."""
    counts = np.histogram(stats.norm.cdf(z), 200, (0, 1))[0]
    return stats.chisquare(counts).pvalue < 1e-4


@pytest.mark.table
@pytest.mark.parametrize("multiplier", [0.01, 0.3, 1.0, 30.0, 1e5])
def test_chi_square_of_the_mechanism(multiplier):
    z = added(multiplier)
    assert not chi_square_rejects(z)
    for scale in (0.9, 1.1):
        assert chi_square_rejects(scale * z)


@pytest.mark.full
def test_float64_sums_get_the_same_noise():
    with wide(True):
        found = added(1.0, dtype=jnp.float64)
    np.testing.assert_allclose(found, added(1.0), atol=1e-5)


@pytest.mark.table
@pytest.mark.parametrize(
    "integer", [0, 1, -1, 2**16, -(2**16), 2**24 + 2, 2**26 + 5, -(2**30), 2**40, 2**50]
)
def test_a_release_depends_on_the_integer_alone(integer):
    """Pairs of a sum and a noise with the same total give the same bits."""
    parts = [0, 1, -1, 2, 5, 2**16 - 1, 2**16, 2**16 + 1, -(2**20), 2**26, -(2**26)]
    parts = np.array([*parts, 2**26 + 1, 2**26 - 3, 2**27 + 1])  # too long for a float32
    with wide(True):
        exact = (integer - parts).astype(np.float32)
        kept = exact.astype(np.float64) == integer - parts  # sums that float32 can hold
        steps, parts = jnp.asarray(exact[kept]), jnp.asarray(parts[kept], jnp.int32)
        released = np.asarray(on_grid(steps, parts, jnp.float32(1), jnp.asarray(True)))
    assert len(released) > 1
    assert len(set(released.tolist())) == 1
    np.testing.assert_allclose(released[0], integer, rtol=2e-7)


def whole(integers, spacing):
    """Sums of any size, in steps of a grid."""
    high = np.array([each >> 16 for each in integers], np.int32)
    low = np.array([each & 0xFFFF for each in integers], np.int32)
    return Whole(jnp.asarray(high), jnp.asarray(low), jnp.float32(spacing))


@pytest.mark.every_case
@pytest.mark.parametrize("ratio", [1e-8, 3e-4, 0.5, 1.0, 51.7, 6e4, 1e6])
def test_a_release_of_whole_sums_depends_on_an_integer_alone(ratio):
    rng = np.random.default_rng(0)
    integers = [0, 1, -1, 2**46 - 1, -(2**46), 2**32, -(2**32) - 1]
    integers += [int(x) for most in (2**46, 2**20) for x in rng.integers(-most, most, 100)]
    spacing, wanted = 2.0**-21, 2.0**-21 / ratio
    # The numbers p and s of a release, as Python numbers.
    part, shift = np.frexp(np.float32(spacing) / np.float32(wanted) * np.float32(1 - 2.0**-20))
    factor, shift = (65535, 0) if shift > 16 else (int(part * 2.0**16), 16 - int(shift))
    assert 1 - 2.0**-14 < factor / 2**shift / ratio <= 1 or ratio > 2**16
    half = 2**shift // 2
    rounded = [(each * factor + half) >> shift for each in integers]
    own = spacing * 2.0**shift / factor
    assert own >= wanted
    run = jax.jit(lambda n, z: noise.whole_on_grid(n, z, jnp.float32(wanted), jnp.asarray(True)))
    drawn = rng.integers(-(2**30), 2**30, len(integers))
    released = np.asarray(run(whole(integers, spacing), jnp.asarray(drawn, jnp.int32)), np.float64)
    exact = [(one + int(other)) * own for one, other in zip(rounded, drawn, strict=True)]
    np.testing.assert_allclose(released, exact, rtol=5e-7, atol=own)
    # Noise that brings each sum to the same integer: the same bits.
    near = [at for at, each in enumerate(rounded) if abs(each) < 2**30]
    chosen = whole([integers[at] for at in near], spacing)
    for target in (0, 5, -(2**29) - 1):
        brought = jnp.asarray([target - rounded[at] for at in near], jnp.int32)
        same = np.asarray(run(chosen, brought))
        assert len(set(same.tolist())) == 1 and len(near) > 1
        assert same[0] == pytest.approx(target * own, rel=1e-6, abs=1e-30)


def test_whole_sums_far_below_the_noise_are_not_in_the_release():
    wanted = jnp.float32(2.0**14)
    sums = whole([2**40, -5], 2.0**-21), whole([0, 0], 2.0**-21)
    one, other = (
        noise.whole_on_grid(each, jnp.asarray([7, -9], jnp.int32), wanted, True) for each in sums
    )
    np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(one, np.array([7, -9]) * float(wanted))


@pytest.mark.table
@pytest.mark.parametrize("multiplier", [0.1, 1.0, 100.0, 1e5])
def test_integers_of_neighbours_differ_by_the_sensitivity_at_most(multiplier):
    rng, number, clip = np.random.default_rng(0), 400, 2.0
    spacing, told = noise.spacing_of(clip, multiplier, number, jnp.float32)
    zero, release = jnp.zeros(number, jnp.int32), jax.jit(on_grid)
    allowed = STD / multiplier
    assert bool(told)

    def moved(*sums):
        one, two = (
            np.asarray(release(jnp.asarray(x, jnp.float32), zero, spacing, told), np.float64)
            for x in sums
        )
        return np.linalg.norm(one - two) / float(spacing)

    for size in (1e-6, 1.0, 1e3):
        for power in (1, 3, 100):  # one number may change, or all
            own = rng.normal(size=number) * rng.random(number) ** power
            total = size * rng.normal(size=number)
            # The sums leave this room for the rounding of their result, and of 1 / spacing.
            clipped = clip / (1 + 8 * np.linalg.norm(total) / clip * 2.0**-24)
            assert moved(total, total + clipped * own / np.linalg.norm(own)) <= allowed
    # Sums at the middle between two points of the grid: all numbers move for almost nothing.
    middle = (np.arange(number) + 0.5) * float(spacing)
    steps = moved(middle * (1 - 1e-6), middle * (1 + 1e-6))
    assert steps == pytest.approx(math.sqrt(number), rel=0.1)
    assert allowed * float(spacing) > clip + 0.99 * float(spacing) * steps


def test_beyond_the_grid_a_release_is_noise_alone():
    def released(total, multiplier):
        sums = {"a": jnp.full(1000, total)}
        noisy, _ = gaussian(2.0, multiplier).privatise(secret_key(3), sums, MechanismState(2.0))
        return np.asarray(noisy["a"])

    assert abs(released(1e5, 1.0).mean() - 1e5) < 1
    np.testing.assert_array_equal(released(0.0, 1e7), released(1e12, 1e7))
    assert not chi_square_rejects(added(1e7))


def test_sums_of_too_many_numbers_and_other_keys_are_refused():
    mechanism = gaussian(1.0, 1.0)
    mechanism.init({"a": jax.ShapeDtypeStruct((MOST - 1,), jnp.float32), "b": jnp.zeros(1)})
    with pytest.raises(ValueError, match=r"at most 16,777,216 numbers, got 16,777,217"):
        mechanism.init({"a": jax.ShapeDtypeStruct((MOST + 1,), jnp.float32)})
    with pytest.raises(TypeError, match="typed key"):
        discrete_gaussian(jax.random.PRNGKey(0), 3)
    with pytest.raises(ValueError, match="vmap"):
        discrete_gaussian(jax.random.split(secret_key(0)), 3)


def planned(budget=None, noise=None, **changes):
    def make(multiplier):
        return gaussian(1.0, multiplier)._replace(**changes)

    return make_plan(
        FullBatch(), 1000, 100, make, budget=budget, noise_multiplier=noise, accountant=None
    )


def test_delta_includes_the_distance():
    assert gaussian(1.0, 1.0).total_variation == TOTAL_VARIATION
    # With a distance that matters, each of the steps takes its part of delta.
    plain, usual, worse = (
        planned(noise=20.0, total_variation=distance).spent(100)
        for distance in (0.0, TOTAL_VARIATION, 2e-7)
    )
    assert 1 <= usual.epsilon / plain.epsilon < 1 + 1e-6
    inner = worse.delta - 100 * 2e-7 * (1 + math.exp(worse.epsilon))
    assert worse.epsilon > 1.01 * plain.epsilon
    assert worse.epsilon >= epsilon_spent(worse.event, inner).epsilon


@pytest.mark.full
def test_a_huge_epsilon_leaves_the_distance_out_and_says_so():
    def report(budget, noise=None):
        plan = planned(budget, noise)
        return PrivacyReport(plan.spent(100), 100, plan, False)

    text = "leaves out how far noise and batches are from exact"
    huge = report(PrivacyBudget(1e3, 1e-5))
    both = report(PrivacyBudget(200.0, 1e-5).after(report(PrivacyBudget(45.0, 1e-5))))
    assert 900 < huge.epsilon <= 1e3 and text in str(huge)
    assert 45 < both.epsilon <= 200 and text in str(both)
    for small in (
        report(PrivacyBudget(50.0, 1e-5)),
        report(PrivacyBudget(1e3, 1e-5), noise=60.0),  # what is spent matters, not the budget
        report(PrivacyBudget(3.0, 1e-5).after(report(PrivacyBudget(1.0, 1e-5)))),
    ):
        assert text not in str(small)
        assert small.spending[-1].total_variation == 100 * TOTAL_VARIATION
    alone = report(None, noise=1.0)
    within = report(PrivacyBudget(1e3, 1e-5), noise=1.0).at(alone.delta)
    assert alone.epsilon == pytest.approx(within.epsilon)
