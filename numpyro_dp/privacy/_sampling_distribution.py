r"""Constants that the samplers compute once on the host: thresholds, padded sizes, error bounds.

A geometric number :math:`G` has :math:`P(G \ge g) = (1-q)^g`. Its digits in a mixed radix are
independent. For each digit the sampler draws a uniform 160-bit word. The digit is the number of
thresholds :math:`t_m = \mathrm{round}(2^{160} P(D \ge m))` above that word. Its total variation
from the exact distribution is at most :math:`\sum_m |2^{-160} t_m - P(D \ge m)|`.
Probabilities are decimals of 100 or more digits, computed once for each (q, N).

**Guarantee.** The bounds in a plan are upper bounds. The quantisation error is summed from the
thresholds in use. A geometric series bounds the far tails.
"""

from __future__ import annotations

import functools
import math
from decimal import Context, Decimal, localcontext
from typing import NamedTuple

from numpyro_dp._lazy import stats

__all__ = [
    "WORD_BITS",
    "Digit",
    "DistinctPlan",
    "PoissonPlan",
    "binomial_tail",
    "distinct_plan",
    "poisson_plan",
]

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
    size, overflow = _smallest_size(num_examples, rate, overflow_prob)
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
    rounded = [min(int((p * scale).to_integral_value()), scale - 1) for p in probs]
    error = sum(
        (abs(p - Decimal(t) / scale) for p, t in zip(probs, rounded, strict=True)), Decimal(0)
    )
    return tuple(t for t in rounded if t), error


def _smallest_size(trials: int, prob: float, tail_prob: float) -> tuple[int, float]:
    """Smallest M with P(Binomial(trials - 1) >= M) <= ``tail_prob``, and a bound on that.

    This tail is the probability that the other records leave a given record no place.
    """
    low, high = 1, trials
    while low < high:
        middle = (low + high) // 2
        if binomial_tail(middle - 1, trials - 1, prob) <= tail_prob:
            high = middle
        else:
            low = middle + 1
    return low, binomial_tail(low - 1, trials - 1, prob)


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
    return min(tail * (1 + 1e-9), 1.0)


@functools.lru_cache(maxsize=256)
def distinct_plan(batch_size: int, num_examples: int) -> DistinctPlan:
    """Draws that leave fewer than ``batch_size`` distinct rows with probability below 1e-18."""
    reject = (2**32 % num_examples) / 2**32
    # Before the batch is full, a draw is wasted with at most this probability.
    wasted = 1 - (1 - (batch_size - 1) / num_examples) * (1 - reject)
    low, high = batch_size, 4 * batch_size + 400
    while low < high:
        middle = (low + high) // 2
        if binomial_tail(middle - batch_size, middle, wasted) <= _SHORTFALL_PROB:
            high = middle
        else:
            low = middle + 1
    return DistinctPlan(low, binomial_tail(low - batch_size, low, wasted))
