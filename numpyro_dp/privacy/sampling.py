r"""Samplers: Poisson, fixed-size without replacement, full batch, and epochs in a random order.

Poisson sampling takes each record independently with probability :math:`q`. The gaps between
neighbouring rows taken are geometric, :math:`P(G \ge g) = (1-q)^g`. So a batch costs
:math:`O(qN)`, and its row :math:`i` is :math:`\sum_{j \le i} (1 + G_j) - 1`. The gaps do not come
from the logarithm of a rounded uniform. Each of their digits comes from one uniform 160-bit integer
(:mod:`numpyro_dp.privacy._batches`). The total variation between a batch and Poisson sampling is
computed, not estimated.

**Guarantee.** A batch fails if more rows are drawn than it can hold. The probability of this is at
most ``failure_prob(N)``. Otherwise its distribution is within ``total_variation(N)`` of the one
that ``amplify`` accounts for. Both are charged to delta, see
:func:`.epsilon_spent`. For a given record, a padded Poisson batch
fails if the *other* records alone fill it. So the failure is the same with and without the record.
Without a failure the record is sampled as accounted for. Earlier batches cannot be computed from
the key in a state.

Reference:
    Y. Zhu, Y.-X. Wang, "Poisson subsampled Renyi differential privacy", ICML 2019. L. Devroye,
    "Non-uniform random variate generation", 1986, X.2 (geometric), XII.2 (distinct draws).
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from numpyro_dp._lazy import dpa
from numpyro_dp._validate import check_int, check_real
from numpyro_dp.core import Batch, Sampler
from numpyro_dp.privacy._batches import (
    SORT_WORDS,
    PoissonPlan,
    distinct_plan,
    fixed_size_batch,
    poisson_batch,
    poisson_plan,
)
from numpyro_dp.privacy.budget import Relation
from numpyro_dp.privacy.random import check_typed_key

_MAX_EXAMPLES = 2**31 - 2
_SPLIT = "Row numbers are 32-bit: split a larger data set."


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SamplerState:
    """State of the samplers in this module: a pytree for ``jit`` and ``scan``.

    Attributes:
        key: Secret key of future batches. Past batches cannot be computed from it.
        num_examples: Size of the data set, static.
        order: Rows in the order of this epoch of a :class:`Permutation`, int32, shape
            ``(num_examples,)``.
        position: Number of the batch in that epoch.
    """

    key: Array = dataclasses.field(repr=False)
    num_examples: int = dataclasses.field(metadata={"static": True})
    order: Array | None = dataclasses.field(default=None, repr=False)
    position: Any = None


class _Exact(Sampler):
    """What most samplers share: nothing fails, and a batch has its exact distribution."""

    def init(self, key: Array, num_examples: int) -> SamplerState:
        """Returns the first state. ``key`` is a secret scalar typed key."""
        return SamplerState(check_typed_key(key), self._check(num_examples))

    def amplify(self, event: dpa.DpEvent, num_examples: int) -> dpa.DpEvent:
        """Returns ``event``, without amplification."""
        self._check(num_examples)
        return event

    def failure_prob(self, num_examples: int) -> float:
        """Returns 0."""
        self._check(num_examples)
        return 0.0

    def total_variation(self, num_examples: int) -> float:
        """Returns 0."""
        self._check(num_examples)
        return 0.0

    def _check(self, num_examples: int) -> int:
        return check_int("num_examples", num_examples, low=1, high=_MAX_EXAMPLES, remedy=_SPLIT)


@dataclasses.dataclass(frozen=True)
class Poisson(_Exact):
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
        >>> from numpyro_dp.privacy.keys import secret_key
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

    def next(self, state: SamplerState) -> tuple[Batch, SamplerState]:
        """Draws one batch of M entries."""
        key, batch = poisson_batch(state.key, self._plan(state.num_examples), state.num_examples)
        return batch, SamplerState(key, state.num_examples)

    def amplify(self, event: dpa.DpEvent, num_examples: int) -> dpa.DpEvent:
        """Returns ``PoissonSampledDpEvent(rate, event)``."""
        self._check(num_examples)
        return dpa.PoissonSampledDpEvent(float(self.rate), event)

    def inclusion_prob(self, num_examples: int) -> float:
        """Returns ``rate``."""
        self._check(num_examples)
        return float(self.rate)

    def failure_prob(self, num_examples: int) -> float:
        """Returns P(Binomial(N - 1, rate) >= M): the other records fill the batch."""
        return self._plan(self._check(num_examples)).failure_prob

    def total_variation(self, num_examples: int) -> float:
        """Returns M * (distance of one gap's distribution from the geometric distribution)."""
        return self._plan(self._check(num_examples)).total_variation

    def _plan(self, num_examples: int) -> PoissonPlan:
        return poisson_plan(float(self.rate), float(self.overflow_prob), num_examples)


@dataclasses.dataclass(frozen=True)
class FixedSize(_Exact):
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
        >>> from numpyro_dp.privacy.keys import secret_key
        >>> sampler = FixedSize(100)
        >>> batch, state = sampler.next(sampler.init(secret_key(0), 30_000))
        >>> len(set(batch.indices.tolist())), bool(batch.mask.all())
        (100, True)

    **Guarantee**: a batch is uniform over subsets unless it fails, with probability at most
    ``failure_prob``. That is below 1e-18 up to a quarter of the data set, and N**2 2**-97 above.
    The order of the entries is random too. A batch of fixed size is not a Poisson batch.
    Accountants support the event of ``amplify`` under the replace-one relation.
    """

    relation: ClassVar[Relation] = "replace_one"
    batch_size: int

    def __post_init__(self) -> None:
        check_int("batch_size", self.batch_size, low=1)

    def next(self, state: SamplerState) -> tuple[Batch, SamplerState]:
        """Draws one batch. The mask is false only in a shortfall (probability below 1e-18)."""
        self._check(state.num_examples)
        key, batch = fixed_size_batch(state.key, int(self.batch_size), state.num_examples)
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
            # A union bound over all pairs of rows.
            return min(number * (number - 1) / 2 * 2.0 ** (-32 * SORT_WORDS), 1.0)
        return distinct_plan(self.batch_size, number).shortfall

    def _check(self, num_examples: int) -> int:
        number = super()._check(num_examples)
        remedy = f"The data set has {number} records. Use a smaller batch, or FullBatch()."
        check_int("batch_size", self.batch_size, low=1, high=number, remedy=remedy)
        return number


@dataclasses.dataclass(frozen=True)
class FullBatch(_Exact):
    """Takes every record at each step: no subsampling, so no amplification.

    Example:
        >>> from numpyro_dp.privacy.keys import secret_key
        >>> sampler = FullBatch()
        >>> batch, _ = sampler.next(sampler.init(secret_key(0), 100))
        >>> batch
        Batch(indices=None, mask=None)

    **Guarantee**: exact, because nothing random is drawn.
    """

    def next(self, state: SamplerState) -> tuple[Batch, SamplerState]:
        """Returns ``Batch(None, None)``: every row in order."""
        return Batch(None, None), state

    def inclusion_prob(self, num_examples: int) -> float:
        """Returns 1."""
        self._check(num_examples)
        return 1.0


@dataclasses.dataclass(frozen=True)
class Permutation(_Exact):
    r"""Goes through the records in a new random order in each epoch.

    An epoch has :math:`T = \lceil N / b \rceil` batches, whose sizes differ by at most one. Batch
    t has the rows at places :math:`\lfloor tN/T \rfloor` to :math:`\lfloor (t+1)N/T \rfloor` of
    the order.

    Args:
        batch_size: Largest size b of a batch, at least 1.

    Example:
        >>> import jax
        >>> from numpyro_dp.privacy.keys import secret_key
        >>> sampler = Permutation(40)
        >>> batch, state = sampler.next(sampler.init(secret_key(0), 100))
        >>> batch.indices.shape, int(batch.mask.sum()), sampler.compositions(100, 7)
        ((34,), 33, 3)

    **Guarantee**: a permuted epoch is *not* Poisson sampling, and is not amplified. A record is in
    one batch of an epoch, and the order does not depend on the records. So, given earlier releases
    and the order, neighbours differ in only one of the T releases of an epoch. An epoch is
    therefore one Gaussian event, not T (parallel composition). A run counts one event for each
    epoch that it begins. This holds even if the order is known.

    Reference:
        F. McSherry, "Privacy integrated queries", SIGMOD 2009 (parallel composition).
    """

    batch_size: int

    def __post_init__(self) -> None:
        check_int("batch_size", self.batch_size, low=1)

    def init(self, key: Array, num_examples: int) -> SamplerState:
        """Returns the state before the first epoch."""
        start = super().init(key, num_examples)
        order = lax.iota(jnp.int32, start.num_examples)
        return dataclasses.replace(start, order=order, position=jnp.zeros((), jnp.int32))

    def next(self, state: SamplerState) -> tuple[Batch, SamplerState]:
        """Draws one batch, and a new order at the start of an epoch."""
        number, edges = state.num_examples, self._edges(state.num_examples)

        def begin(key: Array, _: Array) -> tuple[Array, Array]:
            # The state keeps the child only, so past orders cannot be drawn again from it.
            key, own = jax.random.split(key)
            return key, jax.random.permutation(own, lax.iota(jnp.int32, number))

        # The branch depends on the number of the step alone, which is public.
        key, order = lax.cond(
            state.position == 0, begin, lambda *held: held, state.key, state.order
        )
        first = jnp.asarray(edges[:-1])[state.position]
        last = jnp.asarray(edges[1:])[state.position]
        places = first + lax.iota(jnp.int32, int(np.diff(edges).max()))
        # Batches of one epoch may differ by a row. The mask drops the last place of a smaller one.
        batch = Batch(order[jnp.minimum(places, number - 1)], places < last)
        position = (state.position + 1) % (len(edges) - 1)
        return batch, SamplerState(key, number, order, position.astype(jnp.int32))

    def compositions(self, num_examples: int, num_steps: int) -> int:
        """Returns the number of events: the epochs that the steps begin."""
        return -(-num_steps // (len(self._edges(num_examples)) - 1))

    def inclusion_prob(self, num_examples: int) -> float:
        """Returns 1 / T."""
        return 1 / (len(self._edges(num_examples)) - 1)

    def _edges(self, num_examples: int) -> np.ndarray:
        """First place of each batch in the order, and N."""
        number = -(-self._check(num_examples) // self.batch_size)
        # In 64 bits, because the products exceed 32 bits for large data sets.
        places = np.arange(number + 1, dtype=np.int64) * num_examples // number
        return places.astype(np.int32)
