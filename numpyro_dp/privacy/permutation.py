"""Epochs in a random order: every record once, in batches that do not overlap."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from numpyro_dp._lazy import dpa

from .._validate import check_int
from ..core import Batch, Sampler
from .random import check_typed_key

__all__ = ["Permutation", "PermutationState"]


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["key", "order", "position"],
    meta_fields=["num_examples"],
)
@dataclasses.dataclass(frozen=True)
class PermutationState:
    """State of :class:`Permutation`: a pytree for ``jit`` and ``scan``.

    Attributes:
        key: Secret key of future orders.
        order: Rows in the order of this epoch, int32, shape ``(num_examples,)``.
        position: Number of the batch in the epoch.
        num_examples: Rows of the data set, static.
    """

    key: Array = dataclasses.field(repr=False)
    order: Array = dataclasses.field(repr=False)
    position: Array
    num_examples: int


@dataclasses.dataclass(frozen=True)
class Permutation(Sampler):
    r"""Goes through the records in a new random order in each epoch.

    An epoch has :math:`T = \lceil N / b \rceil` batches, whose sizes differ by at most one. Batch
    t has the rows at places :math:`\lfloor tN/T \rfloor` to :math:`\lfloor (t+1)N/T \rfloor` of
    the order.

    Args:
        batch_size: Largest size b of a batch, at least 1.

    Example:
        >>> import jax
        >>> from numpyro_dp.privacy.random import secret_key
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
        """Checks the size."""
        check_int("batch_size", self.batch_size, low=1)

    def init(self, key: Array, num_examples: int) -> PermutationState:
        """Returns the state before the first epoch."""
        self._edges(num_examples)
        zero = jnp.zeros((), jnp.int32)
        order = lax.iota(jnp.int32, num_examples)
        return PermutationState(check_typed_key(key), order, zero, num_examples)

    def next(self, state: PermutationState) -> tuple[Batch, PermutationState]:
        """Draws one batch, and a new order at the start of an epoch."""
        number, edges = state.num_examples, self._edges(state.num_examples)

        def begin(key: Array, _: Array) -> tuple[Array, Array]:
            key, own = jax.random.split(key)
            return key, jax.random.permutation(own, lax.iota(jnp.int32, number))

        key, order = lax.cond(
            state.position == 0, begin, lambda *held: held, state.key, state.order
        )
        first = jnp.asarray(edges[:-1])[state.position]
        last = jnp.asarray(edges[1:])[state.position]
        places = first + lax.iota(jnp.int32, int(np.diff(edges).max()))
        batch = Batch(order[jnp.minimum(places, number - 1)], places < last)
        position = (state.position + 1) % (len(edges) - 1)
        return batch, PermutationState(key, order, position.astype(jnp.int32), number)

    def amplify(self, event: dpa.DpEvent, num_examples: int) -> dpa.DpEvent:
        """Returns ``event``, without amplification."""
        self._edges(num_examples)
        return event

    def compositions(self, num_examples: int, num_steps: int) -> int:
        """Returns the number of events: the epochs that the steps begin."""
        return -(-num_steps // (len(self._edges(num_examples)) - 1))

    def inclusion_prob(self, num_examples: int) -> float:
        """Returns 1 / T."""
        return 1 / (len(self._edges(num_examples)) - 1)

    def failure_prob(self, num_examples: int) -> float:
        """Returns 0."""
        self._edges(num_examples)
        return 0.0

    def total_variation(self, num_examples: int) -> float:
        """Returns 0: the guarantee holds for every order."""
        self._edges(num_examples)
        return 0.0

    def _edges(self, num_examples: int) -> np.ndarray:
        """First place of each batch in the order, and N."""
        remedy = "Use a data set of fewer than 2**31 - 1 records."
        check_int("num_examples", num_examples, low=1, high=2**31 - 2, remedy=remedy)
        number = -(-num_examples // self.batch_size)
        places = np.arange(number + 1, dtype=np.int64) * num_examples // number
        return places.astype(np.int32)
