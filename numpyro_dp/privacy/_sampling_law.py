r"""The host's side of the samplers: thresholds, padded sizes, and how far they are from exact.

A geometric number :math:`G`, :math:`P(G \ge g) = (1-q)^g`, has independent digits in any mixed
radix. A digit is the count of thresholds :math:`t_m = \mathrm{round}(2^{96} P(D \ge m))` above a
uniform 96-bit word; its law is off by at most :math:`\sum_m |2^{-96} t_m - P(D \ge m)|` in total
variation. Probabilities are decimals of 80 or more digits, computed once for each (q, N).

**Guarantee.** The bounds in a plan are upper bounds: quantisation is summed from the thresholds
in use, tails come from a geometric series that majorises them.
"""

from __future__ import annotations

import functools
import math
from decimal import Context, Decimal, localcontext
from typing import NamedTuple

from scipy import stats

__all__ = [
    "WORD_BITS",
    "Digit",
    "DistinctPlan",
    "PoissonPlan",
    "binomial_tail",
    "distinct_plan",
    "poisson_plan",
]

WORD_BITS = 96
_RADIX = 12  # few thresholds and few words: the fastest of 8, 12, 16, 24, 32, 64 on a CPU
_SHORTFALL_PROB = 1e-18


class Digit(NamedTuple):
    place: int  # B_j, what the digit is multiplied with
    thresholds: tuple[int, ...]  # descending; the digit is the number of those above the word


class PoissonPlan(NamedTuple):
    size: int
    digits: tuple[Digit, ...]
    jump: tuple[int, ...]  # threshold of the event that the gap is beyond all digits, if kept
    total_variation: float


class DistinctPlan(NamedTuple):
    draws: int
    shortfall: float


@functools.lru_cache(maxsize=256)
def poisson_plan(rate: float, overflow_prob: float, num_examples: int) -> PoissonPlan:
    """Padded size, thresholds of the gaps' digits, and their distance from Poisson sampling."""
    size, overflow = _smallest_size(num_examples, rate, overflow_prob)
    if rate == 1:
        return PoissonPlan(size, (), (), overflow)
    # Enough decimals for 2**-96 after the cancellations in 1 - q and 1 - s**r.
    with localcontext(Context(prec=80 + 2 * math.ceil(-math.log10(rate)))):
        log_keep = (1 - Decimal(rate)).ln()
        # Digits up to N, or to where the tail is below half a unit of the words.
        bits_each = -math.log1p(-rate) / math.log(2)
        beyond = num_examples * bits_each > WORD_BITS + 1
        reach = math.ceil((WORD_BITS + 1) / bits_each) if beyond else num_examples
        places, error = [], Decimal(0)
        while (end := math.prod(radix for radix, _ in places)) < reach:
            places.append((min(_RADIX, -(-reach // end)), end))
        digits = []
        for radix, place in places:
            last = (log_keep * place * radix).exp()
            probs = [((log_keep * place * m).exp() - last) / (1 - last) for m in range(1, radix)]
            thresholds, off = _quantise(probs)
            digits += [Digit(place, thresholds)] if thresholds else []
            error += off
        jump, off = _quantise([(log_keep * end).exp()])
        return PoissonPlan(size, tuple(digits), jump, overflow + size * float(error + off))


def _quantise(probs: list[Decimal]) -> tuple[tuple[int, ...], Decimal]:
    """Thresholds of ``WORD_BITS`` bits without the zeros, and the sum of the rounding errors."""
    scale = 2**WORD_BITS
    rounded = [min(int((p * scale).to_integral_value()), scale - 1) for p in probs]
    error = sum(
        (abs(p - Decimal(t) / scale) for p, t in zip(probs, rounded, strict=True)), Decimal(0)
    )
    return tuple(t for t in rounded if t), error


def _smallest_size(trials: int, prob: float, tail_prob: float) -> tuple[int, float]:
    """Smallest M >= 1 with P(Binomial > M) <= ``tail_prob``, and a bound on that probability."""
    low, high = 1, trials
    while low < high:
        middle = (low + high) // 2
        if binomial_tail(middle, trials, prob) <= tail_prob:
            high = middle
        else:
            low = middle + 1
    return low, binomial_tail(low, trials, prob)


def binomial_tail(size: int, trials: int, prob: float) -> float:
    """Upper bound on P(Binomial(trials, prob) > size), within a few percent of it."""
    if size >= trials or prob == 0:
        return 0.0
    if prob == 1:
        return 1.0
    tail = float(stats.binom.sf(size, trials, prob))
    # Far tails do not rest on SciPy: the mass at size + 1 times a geometric series bounds them.
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
