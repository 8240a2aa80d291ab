r"""Samplers: Poisson, fixed-size without replacement, and full batch.

Poisson sampling takes each record independently with probability :math:`q`. The gaps between
neighbouring rows taken are geometric, :math:`P(G \ge g) = (1-q)^g`. So a batch costs
:math:`O(qN)`, and its row :math:`i` is :math:`\sum_{j \le i} (1 + G_j) - 1`. The gaps do not come
from the logarithm of a rounded uniform. In a mixed radix, :math:`G = \sum_j D_j B_j`, the digits
of a geometric number are independent, with

.. math::
    P(D_j \ge m) = \frac{s_j^m - s_j^{r_j}}{1 - s_j^{r_j}}, \quad s_j = (1-q)^{B_j},
    \quad 0 \le m < r_j.

Each digit comes from one uniform 160-bit integer, which is compared with constants of the host.
The total variation between a batch and Poisson sampling is computed, not estimated.

**Guarantee.** A batch fails if more rows are drawn than it can hold. The probability of this is at
most ``failure_prob(N)``. Otherwise its distribution is within ``total_variation(N)`` of the one
that ``amplify`` accounts for. Both are charged to delta, see
:func:`~numpyro_dp.privacy.accounting.epsilon_spent`. For a given record, a padded Poisson batch
fails if the *other* records alone fill it. So the failure is the same with and without the record.
Without a failure the record is sampled as accounted for. Earlier batches cannot be computed from
the key in a state.

Reference:
    Y. Zhu, Y.-X. Wang, "Poisson subsampled Renyi differential privacy", ICML 2019. L. Devroye,
    "Non-uniform random variate generation", 1986, X.2 (geometric), XII.2 (distinct draws).
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from numpyro_dp._compat import custom_vmap
from numpyro_dp._lazy import dpa

from .._validate import check_int, check_real
from ..core import Batch, Sampler
from ._sampling_distribution import WORD_BITS, Digit, PoissonPlan, distinct_plan, poisson_plan
from .random import check_typed_key

__all__ = ["FixedSize", "FullBatch", "Poisson", "SamplerState"]

_MAX_EXAMPLES = 2**31 - 2
_SPLIT = "Row numbers are 32-bit: split a larger data set."
_SORT_WORDS = 3  # 32-bit words of a sort key


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["key"], meta_fields=["num_examples"]
)
@dataclasses.dataclass(frozen=True)
class SamplerState:
    """State of the samplers in this module: a pytree for ``jit`` and ``scan``.

    Attributes:
        key: Secret key of future batches. Past batches cannot be computed from it.
        num_examples: Size of the data set, static.
    """

    key: Array = dataclasses.field(repr=False)
    num_examples: int


@dataclasses.dataclass(frozen=True)
class Poisson(Sampler):
    """Takes each record independently with probability ``rate``.

    A batch has the smallest fixed size M with P(Binomial(N - 1, rate) >= M) <= ``overflow_prob``.
    If more rows are drawn, the last ones are dropped. ``failure_prob`` accounts for that.

    Args:
        rate: Probability q that a record is in a batch, in (0, 1].
        overflow_prob: Largest probability, for one step, that a batch does not fit.

    Raises:
        TypeError: If an argument is not a real number.
        ValueError: If an argument is outside its range.

    Example:
        >>> import jax
        >>> from numpyro_dp.privacy.random import secret_key
        >>> sampler = Poisson(0.01)
        >>> batch, state = sampler.next(sampler.init(secret_key(0), 30_000))
        >>> batch.indices.shape, sampler.inclusion_prob(30_000)
        ((464,), 0.01)
        >>> sampler.failure_prob(30_000) < 1e-18, sampler.total_variation(30_000) < 1e-42
        (True, True)

    **Guarantee**: indices under the mask are sorted and distinct. The distribution of a batch that
    does not fail is within ``total_variation`` of Poisson sampling, also under ``vmap``.
    """

    rate: float
    overflow_prob: float = 1e-18

    def __post_init__(self) -> None:
        check_real("rate", self.rate, low=0, low_open=True, high=1)
        check_real(
            "overflow_prob", self.overflow_prob, low=0, low_open=True, high=1, high_open=True
        )

    def init(self, key: Array, num_examples: int) -> SamplerState:
        """Returns the first state. ``key`` is a secret scalar typed key."""
        return SamplerState(check_typed_key(key), _check_examples(num_examples))

    def next(self, state: SamplerState) -> tuple[Batch, SamplerState]:
        """Draws one batch of M entries."""
        key, batch = _poisson_batch(state.key, self._plan(state.num_examples), state.num_examples)
        return batch, SamplerState(key, state.num_examples)

    def amplify(self, event: dpa.DpEvent, num_examples: int) -> dpa.DpEvent:
        """Returns ``PoissonSampledDpEvent(rate, event)``."""
        _check_examples(num_examples)
        return dpa.PoissonSampledDpEvent(float(self.rate), event)

    def inclusion_prob(self, num_examples: int) -> float:
        """Returns ``rate``."""
        _check_examples(num_examples)
        return float(self.rate)

    def failure_prob(self, num_examples: int) -> float:
        """Returns P(Binomial(N - 1, rate) >= M): the other records fill the batch."""
        return self._plan(_check_examples(num_examples)).failure_prob

    def total_variation(self, num_examples: int) -> float:
        """Returns M * (distance of one gap's distribution from the geometric distribution)."""
        return self._plan(_check_examples(num_examples)).total_variation

    def _plan(self, num_examples: int) -> PoissonPlan:
        return poisson_plan(float(self.rate), float(self.overflow_prob), num_examples)


@dataclasses.dataclass(frozen=True)
class FixedSize(Sampler):
    """Takes ``batch_size`` distinct records. Every subset of that size is equally likely.

    Up to a quarter of the data set, it draws independent uniform rows and keeps the first
    ``batch_size`` distinct ones, in O(b log b). Above a quarter, it takes the first rows of a
    random permutation, in O(N log N).

    Args:
        batch_size: Number b of records in a batch, at most the size of the data set.

    Raises:
        TypeError: If ``batch_size`` is not an integer.
        ValueError: If ``batch_size`` < 1. Calls also raise it if the data set is smaller.

    Example:
        >>> from numpyro_dp.privacy.random import secret_key
        >>> sampler = FixedSize(100)
        >>> batch, state = sampler.next(sampler.init(secret_key(0), 30_000))
        >>> len(set(batch.indices.tolist())), bool(batch.mask.all())
        (100, True)

    **Guarantee**: a batch is uniform over subsets unless it fails, with probability at most
    ``failure_prob``. That is below 1e-18 up to a quarter of the data set, and N**2 2**-97 above.
    The order of the entries is random too. A batch of fixed size is not a Poisson batch.
    Accountants support the event of ``amplify`` under the replace-one relation.
    """

    relation = "replace_one"
    batch_size: int

    def __post_init__(self) -> None:
        check_int("batch_size", self.batch_size, low=1)

    def init(self, key: Array, num_examples: int) -> SamplerState:
        """Returns the first state. ``key`` is a secret scalar typed key."""
        return SamplerState(check_typed_key(key), self._check(num_examples))

    def next(self, state: SamplerState) -> tuple[Batch, SamplerState]:
        """Draws one batch. The mask is false only in a shortfall (probability below 1e-18)."""
        self._check(state.num_examples)
        key, batch = _fixed_size_batch(state.key, int(self.batch_size), state.num_examples)
        return batch, SamplerState(key, state.num_examples)

    def amplify(self, event: dpa.DpEvent, num_examples: int) -> dpa.DpEvent:
        """Returns ``SampledWithoutReplacementDpEvent(num_examples, batch_size, event)``."""
        return dpa.SampledWithoutReplacementDpEvent(
            self._check(num_examples), int(self.batch_size), event
        )

    def inclusion_prob(self, num_examples: int) -> float:
        """Returns ``batch_size / num_examples``."""
        return self.batch_size / self._check(num_examples)

    def failure_prob(self, num_examples: int) -> float:
        """Returns P(too few distinct draws), or P(two equal sort keys) for large fractions.

        Neither depends on the records. Without a failure all subsets are exactly equally likely.
        """
        number = self._check(num_examples)
        if 4 * self.batch_size > number:
            return min(number * (number - 1) / 2 * 2.0 ** (-32 * _SORT_WORDS), 1.0)
        return distinct_plan(self.batch_size, number).shortfall

    def total_variation(self, num_examples: int) -> float:
        """Returns 0."""
        self._check(num_examples)
        return 0.0

    def _check(self, num_examples: int) -> int:
        check_int(
            "batch_size",
            self.batch_size,
            low=1,
            high=_check_examples(num_examples),
            remedy=f"The data set has {num_examples} records. Use a smaller batch, or FullBatch().",
        )
        return int(num_examples)


@dataclasses.dataclass(frozen=True)
class FullBatch(Sampler):
    """Takes every record at each step: no subsampling, so no amplification.

    Example:
        >>> from numpyro_dp.privacy.random import secret_key
        >>> sampler = FullBatch()
        >>> batch, _ = sampler.next(sampler.init(secret_key(0), 100))
        >>> batch
        Batch(indices=None, mask=None)

    **Guarantee**: exact, because nothing random is drawn.
    """

    def init(self, key: Array, num_examples: int) -> SamplerState:
        """Returns the state, which never changes."""
        return SamplerState(check_typed_key(key), _check_examples(num_examples))

    def next(self, state: SamplerState) -> tuple[Batch, SamplerState]:
        """Returns ``Batch(None, None)``: every row in order."""
        return Batch(None, None), state

    def amplify(self, event: dpa.DpEvent, num_examples: int) -> dpa.DpEvent:
        """Returns ``event``."""
        _check_examples(num_examples)
        return event

    def inclusion_prob(self, num_examples: int) -> float:
        """Returns 1."""
        _check_examples(num_examples)
        return 1.0

    def failure_prob(self, num_examples: int) -> float:
        """Returns 0."""
        _check_examples(num_examples)
        return 0.0

    def total_variation(self, num_examples: int) -> float:
        """Returns 0."""
        _check_examples(num_examples)
        return 0.0


def _check_examples(num_examples: int) -> int:
    return check_int("num_examples", num_examples, low=1, high=_MAX_EXAMPLES, remedy=_SPLIT)


@functools.partial(jax.jit, static_argnames=("plan", "number"))
def _poisson_batch(key: Array, plan: PoissonPlan, number: int) -> tuple[Array, Batch]:
    key, coarse, fine = jax.random.split(key, 3)
    gaps = _geometric(coarse, fine, plan, number)
    # Sums saturate at N + 1 <= 2**31 - 1, so the sum of two terms fits an unsigned 32-bit word.
    end = jnp.uint32(number + 1)
    rows = lax.associative_scan(lambda a, b: jnp.minimum(a + b, end), gaps + jnp.uint32(1))
    mask = rows <= jnp.uint32(number)
    indices = jnp.where(mask, rows - jnp.uint32(1), jnp.uint32(0)).astype(jnp.int32)
    return key, Batch(indices, mask)


@functools.partial(jax.jit, static_argnames=("size", "number"))
def _fixed_size_batch(key: Array, size: int, number: int) -> tuple[Array, Batch]:
    key, draw = jax.random.split(key)
    if 4 * size <= number:
        rows = _uniform_rows(draw, distinct_plan(size, number).draws, number)
        return key, _first_distinct(rows, size, number)
    words = jax.random.bits(draw, (_SORT_WORDS, number), jnp.uint32)
    rows = lax.sort((*words, lax.iota(jnp.int32, number)), num_keys=_SORT_WORDS)[-1]
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
    rows, order = lax.sort((rows, order), num_keys=2)
    repeated = jnp.concatenate([jnp.zeros(1, bool), rows[1:] == rows[:-1]])
    order = jnp.where(repeated | (rows == number), jnp.int32(rows.shape[0]), order)
    order, rows = lax.sort((order, rows), num_keys=1, is_stable=True)
    mask = order[:size] < rows.shape[0]
    return Batch(jnp.where(mask, rows[:size], 0).astype(jnp.int32), mask)
