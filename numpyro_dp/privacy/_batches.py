r"""How batches are drawn, and constants of the draws that the host computes once.

A geometric number :math:`G` has :math:`P(G \ge g) = (1-q)^g`. In a mixed radix,
:math:`G = \sum_j D_j B_j`, its digits are independent, with

.. math::
    P(D_j \ge m) = \frac{s_j^m - s_j^{r_j}}{1 - s_j^{r_j}}, \quad s_j = (1-q)^{B_j},
    \quad 0 \le m < r_j.

For each digit the sampler draws a uniform 160-bit word. The digit is the number of
thresholds :math:`t_m = \mathrm{round}(2^{160} P(D \ge m))` above that word. Its total variation
from the exact distribution is at most :math:`\sum_m |2^{-160} t_m - P(D \ge m)|`.
Probabilities are decimals of 100 or more digits, computed once for each (q, N).

**Guarantee.** The bounds in a plan are upper bounds. The quantisation error is summed from the
thresholds in use. A geometric series bounds the far tails.
"""

from __future__ import annotations

import bisect
import functools
import math
from decimal import Context, Decimal, localcontext
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from numpyro_dp._compat import custom_vmap
from numpyro_dp._lazy import stats
from numpyro_dp.core import Batch

SORT_WORDS = 3  # 32-bit words of a sort key
WORD_BITS = 160  # the error of a gap is so small that even exp(50) times as much is negligible
_RADIX = 16  # largest radix of all digits but the last: of 8 to 64, the fastest on a CPU
_RARE = 1e-4  # probability, for one batch, that a gap is long enough to need more thresholds
_SHORTFALL_PROB = 1e-18


class Digit(NamedTuple):
    place: int  # B_j, the weight of the digit
    thresholds: tuple[int, ...]  # descending. The digit is the number of thresholds above the word
    common: int  # this many thresholds decide, unless the word is below the next one


class PoissonPlan(NamedTuple):
    size: int
    digits: tuple[Digit, ...]
    jump: tuple[int, ...]  # threshold of the event that the gap exceeds all digits, if not 0
    failure_prob: float
    total_variation: float


class DistinctPlan(NamedTuple):
    draws: int
    shortfall: float


@functools.lru_cache(maxsize=256)
def poisson_plan(rate: float, overflow_prob: float, num_examples: int) -> PoissonPlan:
    """Padded size, thresholds of the gaps' digits, and their distance from Poisson sampling."""
    # The tail is the probability that the other records leave a given record no place.
    size = 1 + bisect.bisect_left(
        range(1, num_examples), True,
        key=lambda m: binomial_tail(m - 1, num_examples - 1, rate) <= overflow_prob,
    )  # fmt: skip
    # More than size - 1 other records leave a given record no place.
    overflow = binomial_tail(size - 1, num_examples - 1, rate)
    if rate == 1:
        return PoissonPlan(size, (), (), 0.0, 0.0)
    # Enough decimals for 2**-160 after the cancellations in 1 - q and 1 - s**r.
    with localcontext(Context(prec=100 + 2 * math.ceil(-math.log10(rate)))):
        log_keep = (1 - Decimal(rate)).ln()
        # Digits cover gaps up to N, or up to a tail of at most half a unit of the words.
        bits_each = -math.log1p(-rate) / math.log(2)
        beyond = num_examples * bits_each > WORD_BITS + 1
        reach = math.ceil((WORD_BITS + 1) / bits_each) if beyond else num_examples
        digits, error, end = [], Decimal(0), 1
        usual = math.ceil(min(reach, math.log(size / _RARE) / -math.log1p(-rate)))
        for radix, place in _places(usual, reach):
            last = (log_keep * place * radix).exp()
            probs = [((log_keep * place * m).exp() - last) / (1 - last) for m in range(1, radix)]
            thresholds, off = _quantise(probs)
            common = sum(size * t > _RARE * 2**WORD_BITS for t in thresholds)
            digits += [Digit(place, thresholds, common)] if thresholds else []
            error, end = error + off, radix * place
        jump, off = _quantise([(log_keep * end).exp()])
        return PoissonPlan(size, tuple(digits), jump, overflow, size * float(error + off))


def _places(usual: int, reach: int) -> list[tuple[int, int]]:
    """Radix and place of each digit. Few small digits cover ``usual``, the last ``reach``."""
    number = 1
    while _RADIX**number < usual:
        number += 1
    radix = next(radix for radix in range(1, _RADIX + 1) if radix**number >= usual)
    places = [(radix, radix**j) for j in range(number - 1)]
    return [*places, (-(-reach // radix ** (number - 1)), radix ** (number - 1))]


def _quantise(probs: list[Decimal]) -> tuple[tuple[int, ...], Decimal]:
    """Thresholds of ``WORD_BITS`` bits without the zeros, and the sum of the rounding errors."""
    scale = 2**WORD_BITS
    # A threshold of 2**160 would need one more bit. `error` counts this change too.
    rounded = [min(int((p * scale).to_integral_value()), scale - 1) for p in probs]
    error = sum(
        (abs(p - Decimal(t) / scale) for p, t in zip(probs, rounded, strict=True)), Decimal(0)
    )
    return tuple(t for t in rounded if t), error


def binomial_tail(size: int, trials: int, prob: float) -> float:
    """Upper bound on P(Binomial(trials, prob) > size), within a few percent of it."""
    if size >= trials or prob == 0:
        return 0.0
    if prob == 1:
        return 1.0
    tail = float(stats.binom.sf(size, trials, prob))
    # SciPy's far tails may be inaccurate: bound them by the mass at size + 1 times a geometric
    # series.
    first = size + 1
    ratio = (trials - first) * prob / ((first + 1) * (1 - prob))
    if tail < 1e-6 and ratio < 1:
        chosen = math.lgamma(trials + 1) - math.lgamma(first + 1) - math.lgamma(trials - first + 1)
        log_mass = chosen + first * math.log(prob) + (trials - first) * math.log1p(-prob)
        # lgamma of 2**31 is 4e10: rounding is below 1e-4 in the logarithm.
        tail = max(tail, math.exp(log_mass + 1e-4) / (1 - ratio))
    # Rounded up, because delta has to cover this probability.
    return min(tail * (1 + 1e-9), 1.0)


@functools.lru_cache(maxsize=256)
def distinct_plan(batch_size: int, num_examples: int) -> DistinctPlan:
    """Draws that leave fewer than ``batch_size`` distinct rows with probability below 1e-18."""
    # The part of all words that `_uniform_rows` rejects.
    reject = (2**32 % num_examples) / 2**32
    # Before the batch is full, a draw is wasted with at most this probability.
    wasted = 1 - (1 - (batch_size - 1) / num_examples) * (1 - reject)

    draws = batch_size + bisect.bisect_left(
        range(batch_size, 4 * batch_size + 400), True,
        key=lambda draws: binomial_tail(draws - batch_size, draws, wasted) <= _SHORTFALL_PROB,
    )  # fmt: skip
    return DistinctPlan(draws, binomial_tail(draws - batch_size, draws, wasted))


@functools.partial(jax.jit, static_argnames=("plan", "number"))
def poisson_batch(key: Array, plan: PoissonPlan, number: int) -> tuple[Array, Batch]:
    # The new state gets a child of the key, from which past batches cannot be computed.
    key, coarse, fine = jax.random.split(key, 3)
    gaps = _geometric(coarse, fine, plan, number)
    # Sums saturate at N + 1 <= 2**31 - 1, so the sum of two terms fits an unsigned 32-bit word.
    end = jnp.uint32(number + 1)
    rows = lax.associative_scan(lambda a, b: jnp.minimum(a + b, end), gaps + jnp.uint32(1))
    mask = rows <= jnp.uint32(number)
    indices = jnp.where(mask, rows - jnp.uint32(1), jnp.uint32(0)).astype(jnp.int32)
    return key, Batch(indices, mask)


@functools.partial(jax.jit, static_argnames=("size", "number"))
def fixed_size_batch(key: Array, size: int, number: int) -> tuple[Array, Batch]:
    key, draw = jax.random.split(key)
    if 4 * size <= number:
        rows = _uniform_rows(draw, distinct_plan(size, number).draws, number)
        return key, _first_distinct(rows, size, number)
    words = jax.random.bits(draw, (SORT_WORDS, number), jnp.uint32)
    # Random keys of 96 bits: sorted by them, the rows are in a random order.
    rows = lax.sort((*words, lax.iota(jnp.int32, number)), num_keys=SORT_WORDS)[-1]
    return key, Batch(rows[:size], jnp.ones(size, bool))


def _geometric(coarse: Array, fine: Array, plan: PoissonPlan, limit: int) -> Array:
    """Geometric numbers (uint32), cut at ``limit``, one for each entry of the batch."""
    jump = [Digit(limit, plan.jump, len(plan.jump))] if plan.jump else []
    digits = [*plan.digits, *jump]
    if not digits:
        return jnp.zeros(plan.size, jnp.uint32)
    words = jax.random.bits(coarse, shape := (len(digits), plan.size), jnp.uint32)
    # One comparison for each threshold: XLA fuses these better than a reduction. The first 32 bits
    # and the common thresholds usually decide. If the bits equal those of a threshold, or are below
    # the common thresholds, the remaining bits are drawn.
    rare = jnp.zeros(plan.size, bool)
    for digit, word in zip(digits, words, strict=True):
        first = [jnp.uint32(t >> (WORD_BITS - 32)) for t in digit.thresholds]
        for threshold in first[: digit.common]:
            rare |= word == threshold
        for threshold in first[digit.common : digit.common + 1]:
            rare |= word <= threshold

    def refined(_: None) -> Array:
        rest = jax.random.bits(fine, (WORD_BITS // 32 - 1, *shape), jnp.uint32)
        # With the same first words: to look at more bits must not change a digit that was clear.
        return _place_digits_exactly(digits, (words, *rest), limit)

    def common(_: None) -> Array:
        few = [digit._replace(thresholds=digit.thresholds[: digit.common]) for digit in digits]
        return _place_digits(few, words, limit)

    return lax.cond(_any(rare), refined, common, None)


@custom_vmap
def _any(flags: Array) -> Array:
    """Whether any flag is set, under ``vmap`` in any batch. It does not change the digits."""
    return flags.any()


_any.def_vmap(lambda size, batched, flags: (_any(flags.reshape(-1)), False))


def _place_digits(digits: list[Digit], words: Array, limit: int) -> Array:
    """Sum of digit * place, cut at ``limit``, from the first 32 bits of each digit's word.

    The sum of all digits is below 2 * limit, so it does not overflow.
    """
    total = jnp.zeros(words.shape[1:], jnp.uint32)
    for digit, word in zip(digits, words, strict=True):
        count = jnp.zeros_like(total)
        for threshold in digit.thresholds:
            count += (word < jnp.uint32(threshold >> (WORD_BITS - 32))).astype(jnp.uint32)
        total = jnp.minimum(total + count * jnp.uint32(digit.place), jnp.uint32(limit))
    return total


def _place_digits_exactly(digits: list[Digit], words: tuple[Array, ...], limit: int) -> Array:
    """The same from all bits. One loop over all thresholds compiles fast."""
    each = [(row, digit.place, t) for row, digit in enumerate(digits) for t in digit.thresholds]
    rows, places = (jnp.asarray(column, jnp.uint32) for column in list(zip(*each, strict=True))[:2])
    table = jnp.asarray([_parts(threshold) for *_, threshold in each])

    def add(i: Array, total: Array) -> Array:
        below = _below([word[rows[i]] for word in words], table[i])
        return jnp.minimum(total + below.astype(jnp.uint32) * places[i], jnp.uint32(limit))

    return lax.fori_loop(0, len(each), add, jnp.zeros(words[0].shape[1:], jnp.uint32))


def _parts(threshold: int) -> np.ndarray:
    """The 32-bit words of a threshold, most significant first."""
    shifts = range(WORD_BITS - 32, -1, -32)
    return np.array([threshold >> shift & 0xFFFFFFFF for shift in shifts], np.uint32)


def _below(words: list[Array], parts: Array) -> Array:
    """Whether the integer of the words, most significant first, is below that of the parts."""
    below = jnp.zeros(words[0].shape, bool)
    for position in reversed(range(len(words))):
        part = parts[position]
        below = (words[position] < part) | ((words[position] == part) & below)
    return below


def _uniform_rows(key: Array, draws: int, number: int) -> Array:
    """Exactly uniform rows (uint32) in [0, number), or ``number`` for a rejected draw.

    Lemire's method: the row is the high word of word * number. A low word below 2**32 mod number
    is rejected, so that the same number of words remains for each row.
    """
    word = jax.random.bits(key, (draws,), jnp.uint32)
    low, high = word & 0xFFFF, word >> 16
    n_low, n_high = jnp.uint32(number & 0xFFFF), jnp.uint32(number >> 16)
    cross = high * n_low + (low * n_low >> 16)
    middle = low * n_high + (cross & 0xFFFF)
    row = high * n_high + (cross >> 16) + (middle >> 16)
    return jnp.where(
        word * jnp.uint32(number) < jnp.uint32(2**32 % number), jnp.uint32(number), row
    )


def _first_distinct(rows: Array, size: int, number: int) -> Batch:
    """The first ``size`` distinct rows in order of appearance, without rejected draws."""
    order = lax.iota(jnp.int32, rows.shape[0])
    # Puts equal rows together, the one that was drawn first in front.
    rows, order = lax.sort((rows, order), num_keys=2)
    repeated = jnp.concatenate([jnp.zeros(1, bool), rows[1:] == rows[:-1]])
    order = jnp.where(repeated | (rows == number), jnp.int32(rows.shape[0]), order)
    # Back to the order of the draws, with repeated and rejected ones last.
    order, rows = lax.sort((order, rows), num_keys=1, is_stable=True)
    mask = order[:size] < rows.shape[0]
    return Batch(jnp.where(mask, rows[:size], 0).astype(jnp.int32), mask)
