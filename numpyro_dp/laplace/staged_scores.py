r"""Scores of one record at many draws, as few coordinates each, and the entries of its signal."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from numpyro_dp.core import PyTree, Values
from numpyro_dp.laplace.schedule import LOSS_BOUND, SIZE_RANGE, Kind
from numpyro_dp.model.dependence import depends_on_inputs
from numpyro_dp.model.outcomes import Outcomes
from numpyro_dp.model.public import own_constants
from numpyro_dp.sums.affine import Waist, find_waist

if TYPE_CHECKING:
    from numpyro_dp.laplace.signal import Request

TINY = 1e-12
_PARTNER = 4  # partners are a quarter of the draws away. Half would be the antithetic draw
_FEW = 4  # up to this size, sums are faster than matrix products


class Scores:
    """Whitened scores of one record, at many draws and for many outcomes.

    A score is ``a @ frame`` with few coordinates a (:mod:`numpyro_dp.sums.affine`). The frame
    depends on the record and is the same at all draws.

    Args:
        outcomes: The outcomes of the model.
        whitening: Symmetric matrix, shape (d, d).
        example: The record.
        places: Rows and columns of the released entries of the curvature, by default the upper
            triangle.
    """

    outcomes: Outcomes
    example: PyTree
    own: dict[str, Array]
    frame: Array

    def __init__(
        self,
        outcomes: Outcomes,
        whitening: Array,
        example: PyTree,
        places: tuple[np.ndarray, ...] | None = None,
    ) -> None:
        self.outcomes, self.example, self.own = outcomes, example, outcomes.own(example)
        self.places: tuple[np.ndarray, ...] = (
            np.triu_indices(outcomes.size) if places is None else places
        )
        zero, given = jnp.zeros(outcomes.size, whitening.dtype), (example, self.own)
        self._waists = {True: find_waist(_scalar(outcomes, True), zero, given)}
        if outcomes.weighted:  # same coordinates with and without the weight
            self._waists = {w: Waist(zero.size, lambda z, _: z, _scalar(outcomes, w))
                            for w in (True, False)}  # fmt: skip
        waist = self._waists[True]
        # One frame serves all outcomes of the record, so it must not depend on the outcome.
        if waist.size < zero.size and _frame_reads_outcome(waist, zero, given):
            waist = self._waists[True] = Waist(zero.size, lambda z, _: z, _scalar(outcomes, True))
        self._narrow = waist.size < zero.size
        frame = whitening
        if self._narrow:
            frame = jax.jacrev(waist.values)(zero, given) @ whitening
        # With a frame of 0, all entries of the signal are 0.
        possible = outcomes.possible(example) & jnp.all(jnp.isfinite(frame))
        frame = jnp.where(possible, frame, 0)
        gram = _product(frame, frame.T) if self._narrow else None
        # Without the barrier, XLA may compute these again for each draw.
        self.frame, self._gram = lax.optimization_barrier((frame, gram))

    def at(self, draw: Array, outcome: Values, *, weighted: bool = True) -> Array:
        """The coordinates a of the score of an outcome, shape (p,)."""
        waist = self._waists[weighted or not self.outcomes.weighted]
        given = (self.example, outcome)
        values = waist.values(draw, given)
        if waist.size > _FEW:
            return jax.grad(waist.rest)(values, given)
        # One coordinate at a time: XLA does not vectorise what it computes while it joins them.
        of_each = jax.grad(lambda each: waist.rest(jnp.stack(each), given))(list(values))
        return jnp.stack(lax.optimization_barrier(of_each))

    def bounded(self, slopes: Array) -> tuple[Array, Array]:
        """The coordinates, set to 0 for scores that are not finite, and the norms of the scores."""
        if self._narrow:
            # The norm of a @ F from the small matrix F F', without the d coordinates.
            square = jnp.sum(_product(slopes, self._gram) * slopes, axis=-1)
        else:
            square = jnp.sum((slopes @ self.frame) ** 2, axis=-1)
        # Rounding may make the square of a very short score negative.
        norm = jnp.sqrt(jnp.maximum(square, 0))
        good = norm < 1e18  # so the square is finite in float32. False for NaN
        return jnp.where(good[..., None], slopes, 0), jnp.where(good, norm, 0)


def _product(one: Array, other: Array) -> Array:
    """``one @ other``. For small matrices it uses sums, as XLA multiplies them record by record."""
    if min(*one.shape[-2:], *other.shape) > _FEW:
        return one @ other
    return jnp.sum(one[..., None] * other, axis=-2)


def outer_products(slopes: Array, others: Array) -> Array:
    """Sum of outer products of vectors over the first two axes, shape (p, p)."""
    if slopes.shape[-1] > _FEW:
        return jnp.einsum("abp,abq->pq", slopes, others)
    return total(slopes[..., :, None] * others[..., None, :])


def total(terms: Array) -> Array:
    """Sum over the first two axes. It is a product, because XLA sums term by term on a CPU."""
    return jnp.tensordot(jnp.ones(terms.shape[:2], terms.dtype), terms, 2)


def _frame_reads_outcome(waist: Waist, zero: Array, given: PyTree) -> bool:
    """Whether the frame of a score depends on the outcome."""
    example, own = jax.tree.map(lambda leaf: jnp.zeros(jnp.shape(leaf), leaf.dtype), given)

    def frame(own: PyTree) -> dict[str, Array]:
        return {"frame": jax.jacrev(waist.values)(zero, (example, own))}

    return bool(depends_on_inputs(frame, own))


def _scalar(outcomes: Outcomes, weighted: bool) -> Callable[[Array, PyTree], Array]:
    def scalar(draw: Array, given: PyTree) -> Array:
        return outcomes.log_likelihood(draw, *given, weighted=weighted)

    return scalar


def partners(draws: Array, kind: Array) -> Array:
    """Another draw for each draw. Before the stages, the draw itself."""
    return jnp.where(kind > 0, draws, jnp.roll(draws, len(draws) // _PARTNER + 1, axis=0))


def shortened(slopes: Array, norm: Array, limit: Array) -> Array:
    """The scores, clipped to norm ``limit``."""
    return slopes * jnp.minimum(1, limit / (norm + TINY))[..., None]


def in_shells(slopes: Array, norm: Array, edges: Array) -> Array:
    """The mean of scores clipped at the first edge, and what each next edge adds, (..., k, p)."""
    factors = jnp.minimum(1, edges / (norm[..., None] + TINY))
    clipped = jnp.mean(factors[..., None] * slopes[..., None, :], axis=0)
    return jnp.diff(clipped, prepend=0, axis=-2)


def entries(
    scores: Scores,
    request: Request,
    score: Array,
    product: Array,
    power: Array,
    excess: Array,
    kept: Array,
) -> tuple[Array, Array, Array, Array, Array]:
    r"""The first five entries of the signal, divided by their bounds.

    In a stage they are score, curvature, power, the excess of the observed outcome's power, and the
    loss of curvature. If a share q of a curvature with the diagonal h is ``kept``, the loss is
    :math:`h (1 - q) / q`, clipped to its bound.

    In the release of scales, the first entry is a vector along the record's row,
    :math:`u_i = E[W g (y - m)] / \mathrm{sd}(y)`. The second entry starts with the diagonal of the
    curvature. :math:`u_i u_i^\top` is at most the curvature (Cauchy), and equal to it in a
    generalised linear model.

    The release of the size uses only the third entry, the log of the power. It is 0 at the public
    guess divided by ``SIZE_RANGE``, and 1 at the guess times ``SIZE_RANGE``.
    """
    frame, (score_clip, curvature_clip, excess_clip) = scores.frame, request.clips
    triangle, diagonal = _released(frame, (product + product.T) / 2, scores.places)
    scales = jnp.zeros_like(triangle).at[: len(diagonal)].set(diagonal)
    triangle = jnp.where(request.kind == Kind.SCALES, scales, triangle)
    vector = jnp.sum(score[:, None] * frame, axis=0)
    # Listed outcomes are below their bounds by construction. For others, this clips.
    vector = bounded_by(vector, request.shells[0, 0])
    triangle = bounded_by(triangle, curvature_clip)
    power = power / score_clip**2
    excess = jnp.clip(jnp.nan_to_num(excess / excess_clip**2, nan=0.0), -1, 1)
    log_power = 1 + jnp.log(power) / (4 * np.log(SIZE_RANGE))
    # The log of a power of 0 is -inf, which also counts as 0.
    sized = jnp.clip(jnp.nan_to_num(log_power, nan=0.0), 0, 1)
    power = jnp.where(request.kind == Kind.SCALES, 0, power)
    alone = request.kind == Kind.SIZE
    vector, triangle = (jnp.where(alone, 0, x) for x in (vector, triangle))
    loss = bounded_by(diagonal * (1 - kept) / (kept + TINY), LOSS_BOUND * curvature_clip)
    excess, loss = (jnp.where(request.kind > 0, 0, x) for x in (excess, loss))
    return vector, triangle, jnp.where(alone, sized, power), excess, loss


def bounded_by(vectors: Array, bound: Array) -> Array:
    """Vectors divided by their bound and clipped to norm 1, or 0 if they are not finite."""
    vectors = jnp.where(jnp.all(jnp.isfinite(vectors), axis=-1, keepdims=True), vectors, 0)
    # A vector that is longer than the bound is divided by its own norm instead.
    norms = jnp.linalg.norm(vectors, axis=-1, keepdims=True)
    return vectors / jnp.maximum(jnp.maximum(norms, bound), TINY)


def _released(frame: Array, product: Array, places: tuple[np.ndarray, ...]) -> tuple[Array, Array]:
    """Entries of F' P F at ``places``, off the diagonal times root 2, and its diagonal."""
    half = _product(product, frame)
    rows, columns, widths = _at(places)
    few = 4 * len(places[0]) < frame.shape[1] ** 2 and len(frame) <= _FEW
    if few:  # the whole matrix would be larger than what is released
        found = jnp.sum(frame[:, rows] * half[:, columns], axis=0)
        return found * widths.astype(found.dtype), jnp.sum(frame * half, axis=0)
    whole = _product(frame.T, half)
    return whole[rows, columns] * widths.astype(whole.dtype), jnp.diagonal(whole)


def square(vector: Array, places: tuple[np.ndarray, ...]) -> Array:
    """Entries of v v' at ``places``, off the diagonal times root 2."""
    rows, columns, widths = _at(places)
    return vector[rows] * vector[columns] * widths.astype(vector.dtype)


def _at(places: tuple[np.ndarray, ...]) -> tuple[Array, Array, Array]:
    """Rows, columns, and root 2 for pairs off the diagonal."""
    rows, columns = own_constants(*(np.asarray(place, np.uint32) for place in places))
    (widths,) = own_constants(np.where(places[0] == places[1], 1.0, np.sqrt(2.0)).astype("f4"))
    # A NumPy array in another precision would be a new constant.
    return rows, columns, jnp.asarray(widths)
