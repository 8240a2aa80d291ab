r"""The clipped sum over a batch, :math:`\sum_i w_i s_i`, exact (:mod:`numpyro_dp.sums.exact`).

What is weighted and added up is the very gradient whose norm was taken, found once
(:func:`numpyro_dp._tree.pinned`). Signals that are a linear map of a scalar's gradient are summed
from the gradient's factors (:mod:`numpyro_dp.sums.factored`), all others one by one; both by
microbatches where a batch is not to be in memory as a whole.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool

from numpyro_dp._tree import filled, pinned, select, squared_norm, widen
from numpyro_dp.core import Estimator, Mechanism, PyTree
from numpyro_dp.sums.exact import finished, partial_sum
from numpyro_dp.sums.factored import factored_sum
from numpyro_dp.sums.microbatches import (
    WHOLE,
    Shards,
    extra_sums,
    first_of,
    margin_of,
    norm_of,
    over_microbatches,
    rows_of,
    suitable_rows,
)

__all__ = ["SumInParts", "bounded_sum", "bounded_sum_by_definition"]


def bounded_sum(
    estimator: Estimator,
    mechanism: Mechanism,
    public: PyTree,
    examples: PyTree,
    mask: Bool[Array, " batch"],
    lengths: tuple[Array, ...] = (),
    live: Array | None = None,
    rows: int | None = None,
    shards: Shards = WHOLE,
) -> dict[str, Any]:
    """Returns the sum of the bounded signals of a batch.

    Args:
        estimator: Whose signal.
        mechanism: Bounds it.
        public: What ``estimator.prepare`` returned.
        examples: Records, leading axis batch.
        mask: bool, shape (batch,): which entries count.
        lengths: What :func:`record_lengths` returned for the records; found anew if empty.
        live: True, where the compiler cannot know it (:func:`numpyro_dp._tree.pinned`);
            whether any entry counts, if ``None``.
        rows: Rows of the batch that are in memory at a time; by default so many that what is
            kept of them has about a million numbers.
        shards: What part of the batch these rows are, where devices share it.

    Returns:
        A dict like the signal, in float32 or wider, with the entries of ``mechanism.extras``.

    Guarantee:
        An entry whose mask is false, or whose signal is not finite, contributes exactly 0. When
        the record of one entry is blanked (its signal made 0), the sum moves by at most
        ``mechanism.sensitivity`` in norm, rounding included.
    """
    live = jnp.any(mask) if live is None else live
    if estimator.factored is None:
        one_by_one = bounded_sum_by_definition
        return one_by_one(estimator, mechanism, public, examples, mask, live, rows, shards)
    return factored_sum(estimator, mechanism, public, examples, mask, lengths, live, rows, shards)


def bounded_sum_by_definition(
    estimator: Estimator,
    mechanism: Mechanism,
    public: PyTree,
    examples: PyTree,
    mask: Bool[Array, " batch"],
    live: Array | None = None,
    rows: int | None = None,
    shards: Shards = WHOLE,
) -> dict[str, Any]:
    """The same sum, signal by signal, by microbatches: the whole batch is never in memory."""
    count = mask.size * shards.number
    parts = SumInParts(estimator, mechanism, public, first_of(examples), count)
    sums, squares = parts.part(examples, mask, live, rows, shards)
    extras = extra_sums(mechanism, parts.names, squares, parts.margin, mask, shards)
    return parts.finished(sums) | extras


class SumInParts:
    """A bounded sum whose records come in parts: integers, until all have been added up.

    Args:
        estimator: Whose signal.
        mechanism: Bounds it.
        public: What ``estimator.prepare`` returned.
        first: Shapes of one record.
        count: Records of all parts.

    Attributes:
        names: Entries of the signal.
        margin: Part of the clip norm that signals are scaled to.
    """

    def __init__(
        self, estimator: Estimator, mechanism: Mechanism, public: PyTree, first: PyTree, count: int
    ) -> None:
        self._signal, self._mechanism, self._count = estimator.signal, mechanism, count
        self._public, self._struct = public, jax.eval_shape(estimator.signal, public, first)
        self._like, self.names = jax.eval_shape(widen, self._struct), filled(self._struct)
        self.margin = margin_of(self._struct, count)
        self._blocks = mechanism.blocks(self.names)
        self._norms = [norm_of(mechanism, self.names, at) for at in range(len(self._blocks))]

    def part(
        self,
        examples: PyTree,
        mask: Bool[Array, " batch"],
        live: Array | None = None,
        rows: int | None = None,
        shards: Shards = WHOLE,
    ) -> tuple[list[PyTree], tuple[Array, ...]]:
        """Sums of some of the records, to be added to others, and their squared norms."""
        live = jnp.any(mask) if live is None else live

        def of_rows(examples: PyTree, mask: Array) -> tuple[list[PyTree], tuple[Array, ...]]:
            each = jax.vmap(lambda example: self._signal(self._public, example))
            signals = widen(pinned(live, each, examples))
            own = [select(signals, members) for members in self._blocks]
            squares = tuple(jax.vmap(squared_norm)(block) for block in own)
            factors = self._mechanism.scales(self.names, squares, self.margin)
            sums = [
                partial_sum(rows_of(block), jnp.where(mask, factor, 0), norm, self._count)
                for block, factor, norm in zip(own, factors, self._norms, strict=True)
            ]
            return sums, squares

        few = suitable_rows(self._struct) if rows is None else rows
        return over_microbatches(of_rows, examples, mask, few, shards)

    def finished(self, sums: list[PyTree]) -> dict[str, Any]:
        """The numbers of the sum of all parts."""
        total = dict(self._like)
        for members, found, norm in zip(self._blocks, sums, self._norms, strict=True):
            total |= finished(found, select(self._like, members), norm, self._count)
        return total
