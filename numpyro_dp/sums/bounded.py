r"""The clipped sum over a batch, :math:`\sum_i w_i s_i`, exact (:mod:`numpyro_dp.sums.exact`).

The gradients that are summed are exactly those whose norms were taken, computed once
(:func:`~.microbatches.pinned`). Signals that are a linear map of a scalar's gradient are summed
from the gradient's factors (:mod:`numpyro_dp.sums.factored`). All others are summed one by one.
Both ways use microbatches if the batch is too large for memory.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool

from numpyro_dp._tree import filled, select, widen
from numpyro_dp.core import Centring, Estimator, Mechanism, PyTree, Values
from numpyro_dp.sums.centred_sums import (
    centred_mechanism,
    counted_records,
    over_rows,
    row_norms,
    row_of,
    sum_of_rows,
    with_rows,
)
from numpyro_dp.sums.exact import finished, partial_sum
from numpyro_dp.sums.factored import factored_sum
from numpyro_dp.sums.microbatches import (
    WHOLE,
    Shards,
    extra_sums,
    first_of,
    margin_of,
    norms_of,
    over_microbatches,
    pinned,
    rows_of,
    suitable_rows,
)


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
    seeds: Array | None = None,
    whole: bool = False,
) -> Values:
    """Returns the sum of the bounded signals of a batch.

    Args:
        estimator: Gives the signal of a record.
        mechanism: Clips the signal.
        public: The result of ``estimator.prepare``.
        examples: Records, leading axis batch.
        mask: bool, shape (batch,): which entries count.
        lengths: The result of :func:`record_lengths` for the records. Computed here if empty.
        live: A true value that the compiler does not know (:func:`~.microbatches.pinned`). The
            default is whether any entry counts.
        rows: Rows of a microbatch. By default their gradients hold about a million values.
        shards: The parts of the batch, if devices share it.
        seeds: A secret seed for each record (batch,), if the signals are centred.
        whole: Whether sums of float32 may stay integers (:class:`~numpyro_dp.core.Whole`).

    Returns:
        A dict like the signal, in float32 or wider, with the entries of ``mechanism.extras``.

    Guarantee:
        An entry whose mask is false, or whose signal is not finite, contributes exactly 0. When
        the record of one entry is blanked (its signal made 0), the sum moves by at most
        ``mechanism.sensitivity`` in norm, rounding included.
    """
    live = jnp.any(mask) if live is None else live
    if (centring := estimator.centring) is not None:
        estimator, mechanism = centring.estimator, centred_mechanism(mechanism, centring)
    if (factored := estimator.factored) is not None:
        return factored_sum(
            estimator, factored, mechanism, public, examples, mask, lengths, live, rows, shards,
            centring, seeds,
        )  # fmt: skip
    # The records of all devices: grid and margin must be the same everywhere.
    count = mask.size * shards.number
    parts = SumInParts(estimator, mechanism, public, first_of(examples), count, centring, whole)
    sums, squares = parts.part(examples, mask, live, rows, shards, seeds)
    extras = extra_sums(mechanism, parts.names, squares, parts.margin, mask, shards)
    return parts.finished(sums) | extras


class SumInParts:
    """A clipped sum whose records come in parts. Sums stay integers until all parts are added.

    There are ``count`` records in all parts. ``first`` has the shapes of a record.

    Attributes:
        names: Entries of the signal.
        margin: Part of the clip norm to which signals are clipped.
    """

    names: tuple[str, ...]

    def __init__(
        self,
        estimator: Estimator,
        mechanism: Mechanism,
        public: PyTree,
        first: PyTree,
        count: int,
        centring: Centring | None = None,
        whole: bool = False,
    ) -> None:
        # Only if the mechanism takes integers may the margin leave out the rounding of the sum.
        self._centring, self._whole = centring, whole and mechanism.takes_whole
        self._signal, self._mechanism, self._count = estimator.signal, mechanism, count
        self._public = public
        self._struct = jax.eval_shape(estimator.signal, public, row_of(centring, public, first))
        self._each = 1 if centring is None else centring.number + 1
        self._like, self.names = jax.eval_shape(widen, self._struct), filled(self._struct)
        self.margin: float = margin_of(self._struct, count, rows=self._each, whole=self._whole)
        self._blocks = mechanism.blocks(self.names)
        self._norms = norms_of(mechanism, self.names)

    def part(
        self,
        examples: PyTree,
        mask: Bool[Array, " batch"],
        live: Array,
        rows: int | None = None,
        shards: Shards = WHOLE,
        seeds: Array | None = None,
    ) -> tuple[list[PyTree], tuple[Array, ...]]:
        """Returns the sums of a part, which can be added to others, and its squared norms."""
        centred = self._centring is not None

        def of_rows(batch: PyTree, mask: Array) -> tuple[list[PyTree], tuple[Array, ...]]:
            examples = with_rows(self._centring, self._public, *batch)
            each = over_rows(lambda example: self._signal(self._public, example), centred)
            signals = widen(pinned(live, each, examples))
            own = [select(signals, members) for members in self._blocks]
            squares = tuple(row_norms(block, centred) for block in own)
            probs = examples[-1:] if centred else ()
            factors = self._mechanism.scales(self.names, squares, self.margin, *probs)
            sums = []
            for block, factor, norm in zip(own, factors, self._norms, strict=True):
                if centred:
                    block, factor = sum_of_rows(block, factor), counted_records(factor)
                # Padding is some record too. Its factor becomes 0, so it adds exactly 0.
                weights = jnp.where(mask, factor, 0)
                sums.append(partial_sum(rows_of(block), weights, norm, self._count))
            return sums, tuple(square[0] for square in squares) if centred else squares

        few = suitable_rows([self._struct] * self._each) if rows is None else rows
        return over_microbatches(of_rows, (examples, seeds), mask, few, shards)

    def finished(self, sums: list[PyTree]) -> Values:
        """Returns the sum of all parts in floating point, or as integers."""
        total = dict(self._like)
        for members, found, norm in zip(self._blocks, sums, self._norms, strict=True):
            like = select(self._like, members)
            total |= finished(found, like, norm, self._count, self._whole)
        return total
