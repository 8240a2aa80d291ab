r"""What a record sends in one stage: its score, centred by the model, and its curvature.

Public: draws :math:`z_r` of the posterior so far, for each a partner :math:`t_r` among them, a
symmetric whitening W, and clip norms C and :math:`C_H`. With
:math:`c(a) = a \min(1, C / \lVert a \rVert)` and :math:`g(z; x, y) = \nabla_z \log p(y \mid x, z)`,

.. math::
    s_i &= v_i \operatorname{mean}_r \big[ c(W g(z_r; x_i, y_i))
        - E_{y' \sim p(\cdot \mid x_i, t_r)}\, c(W g(z_r; x_i, y')) \big], \\
    H_i &= v_i \operatorname{sym} \operatorname{mean}_r
        E_{y' \sim p(\cdot \mid x_i, t_r)} \big[ c(W g(z_r; x_i, y'))\, (W g(t_r; x_i, y'))^\top
        \big],

where the weight :math:`v_i \le 1` keeps :math:`\lVert s_i\rVert \le C` and
:math:`\lVert H_i\rVert_F \le C_H` and never sees :math:`y_i`. So the mean of :math:`s_i` is zero at
the truth whatever C is (clipping biases nothing), and :math:`H_i` is the exact slope of that mean
(Stein's identity), clip included. Outcomes that can be listed are, with :math:`t_r = z_r` and
weights by draw; of others two are simulated for each draw.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float

from numpyro_dp.core import Estimator, PyTree, Released
from numpyro_dp.laplace.schedule import SIZE_RANGE, Kind
from numpyro_dp.model.dependence import depends_on_inputs
from numpyro_dp.model.outcomes import Outcomes
from numpyro_dp.model.public import own_constants
from numpyro_dp.model.records import Records, Rows
from numpyro_dp.sums.affine import Waist, find_waist

__all__ = ["LaplaceProblem", "Request", "StageOptimizer", "staged_scores", "symmetric"]

_TINY = 1e-12
_REPLICATES = 2
# Draws stay near the mean. Each draw alone gives a score of mean 0 at the truth with the curvature
# as its slope, so that nothing is biased. Under the wide prior of a scale, a far draw has scores a
# thousand times as large as the others, and the weight that bounds the scores of all draws would
# silence the record. Where outcomes are listed, each draw has a weight of its own: draws may then
# be farther away, and their curvature is nearer to that of the way from the mean to the optimum.
_FARTHEST_LISTED, _FARTHEST = 1.0, 0.4
_FEW = 4  # numbers through which a score depends on the latents
_PARTNER = 4  # partners are a quarter of the draws away, so that none is a draw's mirror image


class Request(NamedTuple):
    """What a stage asks of the records; public.

    Attributes:
        kind: A :class:`~numpyro_dp.laplace.schedule.Kind`.
        mean: Of the draws, shape (d,).
        factor: Cholesky factor of their covariance, shape (d, d).
        whitening: W, symmetric, shape (d, d); zero in coordinates that are left out.
        clips: (C, C_H); before the stages, bounds of the row and of scales, or of the size.
        weights: Roots of the parts of the stage's budget for the three entries of the signal, shape
            (3,); the squares sum to 1.
    """

    kind: Array
    mean: Float[Array, " d"]
    factor: Float[Array, "d d"]
    whitening: Float[Array, "d d"]
    clips: Float[Array, " 2"]
    weights: Float[Array, " 3"]


class LaplaceProblem(NamedTuple):
    """A model as its outcomes have it, for the loop that all drivers share.

    Attributes:
        outcomes: The outcomes of records.
    """

    outcomes: Outcomes

    @property
    def records(self) -> Records:
        """How arguments split into records and public values."""
        return self.outcomes.model.structure.records

    @property
    def shared(self) -> tuple[Array, ...]:
        """Public arrays among the arguments."""
        return self.outcomes.shared

    @property
    def num_examples(self) -> int:
        """Number of records."""
        return self.outcomes.model.structure.layout.num_examples

    @property
    def numbered(self) -> bool:
        """Whether a record has a secret number, by which its outcomes are simulated."""
        return not self.outcomes.number

    def at(self, shared: tuple[Array, ...]) -> LaplaceProblem:
        """The same with other public arrays."""
        return self._replace(outcomes=self.outcomes._replace(shared=shared))

    def rows(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Rows:
        """Splits arguments into records and public arrays."""
        rows = self.records.layout.rows(args, kwargs)
        numbers = (jnp.arange(self.num_examples, dtype=jnp.uint32),) * self.numbered
        return rows._replace(arrays=(*rows.arrays, *numbers))

    def blank_example(self) -> tuple[Array, ...]:
        """Returns zeros in the place of one record."""
        return (*self.records.layout.blank(), *(jnp.zeros((), jnp.uint32),) * self.numbered)

    def constrain(self, params: PyTree) -> PyTree:
        """Returns what was asked, which is public."""
        return params


class StageOptimizer:
    """Keeps what a stage released; the host decodes it and asks for the next."""

    def init(self, request: Request) -> tuple[Request, Array]:
        """Returns the state: what is asked, and nothing released yet."""
        size = request.mean.size
        return request, jnp.zeros(size + size * (size + 1) // 2 + 1)

    def get_params(self, state: tuple[Request, Array]) -> Request:
        """Returns what is asked."""
        return state[0]

    def update(
        self, released: Array, state: tuple[Request, Array], **_: Any
    ) -> tuple[Request, Array]:
        """Puts down what was released."""
        return state[0], released


def staged_scores(outcomes: Outcomes, pairs: int) -> Callable[[LaplaceProblem], Estimator]:
    """Returns problem -> estimator.

    In a stage the signal has three entries: the score, the upper triangle of the curvature (off the
    diagonal times root 2, so that its norm is the Frobenius norm) and the score's power, each over
    its bound and times its weight. Its norm is at most 1.

    Args:
        outcomes: Of the model.
        pairs: Antithetic pairs of draws in a stage.

    Guarantee:
        The three bounds hold for any model, any record and any outcome, finite or not: weights
        bring sums of scores that are clipped one by one below them, and what is not finite counts
        as 0. Before the stages the entries are clipped to their bounds, and the size to [0, 1].
        Draws come from ``rng_key`` and read no record; simulated outcomes come from a secret number
        of the record.
    """

    @jax.jit  # so that it is traced once, whoever asks
    def signal_of(public: tuple[Request, Array, Array], shared: Any, example: PyTree) -> Any:
        request, draws, key = public
        own = outcomes._replace(shared=shared)
        if not own.number:
            *rows, number = example
            example, key = tuple(rows), jax.random.fold_in(key, number)
        scores = _Scores(own, request.whitening, example)
        one = _listed if own.number else _simulated
        parts = one(scores, request, draws, key)
        names = ("score", "curvature", "power")
        return {n: w * part for n, w, part in zip(names, request.weights, parts, strict=True)}

    def build(problem: LaplaceProblem) -> Estimator:
        def prepare(rng_key: Array, request: Request) -> tuple[Request, Array, Array]:
            draw_key, outcome_key = jax.random.split(rng_key)
            half = jax.random.normal(draw_key, (pairs, request.mean.size), request.mean.dtype)
            farthest = _FARTHEST_LISTED if problem.outcomes.number else _FARTHEST
            half = jnp.clip(half, -farthest, farthest) @ request.factor.T
            draws = request.mean + jnp.concatenate([half, -half])
            return request, draws, outcome_key

        def signal(public: tuple[Request, Array, Array], example: PyTree) -> dict[str, Array]:
            return signal_of(public, problem.shared, example)

        def pull_back(public: Any, released: Released) -> Array:
            total = released.total
            return jnp.concatenate([
                total["score"], total["curvature"], total["power"][None]
            ])  # fmt: skip

        return Estimator(prepare, signal, pull_back)

    return build


def symmetric(triangle: np.ndarray) -> np.ndarray:
    """The symmetric matrix of a released curvature."""
    size = int((np.sqrt(8 * triangle.size + 1) - 1) / 2)
    rows, columns = np.triu_indices(size)
    found = np.zeros((size, size))
    found[rows, columns] = triangle / np.where(rows == columns, 1, np.sqrt(2))
    return found + np.triu(found, 1).T


def _triangle(matrix: Array) -> Array:
    """The upper triangle, off the diagonal times root 2."""
    rows, columns = own_constants(*np.asarray(np.triu_indices(matrix.shape[0]), np.uint32))
    (widths,) = own_constants(np.where(rows == columns, 1.0, np.sqrt(2.0)).astype(np.float32))
    return matrix[rows, columns] * widths.astype(matrix.dtype)


class _Scores:
    """Whitened scores of one record, at many draws and for many outcomes.

    A score is ``a @ frame`` with few numbers a (:mod:`numpyro_dp.sums.affine`), and the frame is
    the record's own at all draws.
    """

    def __init__(self, outcomes: Outcomes, whitening: Array, example: PyTree) -> None:
        self.outcomes, self.example, self.own = outcomes, example, outcomes.own(example)
        zero, given = jnp.zeros(outcomes.size, whitening.dtype), (example, self.own)
        self._waists = {True: find_waist(_scalar(outcomes, True), zero, given)}
        if outcomes.weighted:  # the same numbers for both
            self._waists = {w: Waist(zero.size, lambda z, _: z, _scalar(outcomes, w))
                            for w in (True, False)}  # fmt: skip
        waist = self._waists[True]
        if waist.size < zero.size and _frame_reads_outcome(waist, zero, given):
            waist = self._waists[True] = Waist(zero.size, lambda z, _: z, _scalar(outcomes, True))
        self._narrow = waist.size < zero.size
        frame = whitening
        if self._narrow:
            frame = jax.jacrev(waist.values)(zero, given) @ whitening
        frame = jnp.where(jnp.all(jnp.isfinite(frame)), frame, 0)
        gram = _product(frame, frame.T) if self._narrow else None
        # Found once a record, not once a draw.
        self.frame, self._gram = lax.optimization_barrier((frame, gram))

    def at(self, draw: Array, outcome: Any, *, weighted: bool = True) -> Array:
        """The numbers a of the score of an outcome, shape (p,)."""
        waist = self._waists[weighted or not self.outcomes.weighted]
        given = (self.example, outcome)
        return jax.grad(waist.rest)(waist.values(draw, given), given)

    def bounded(self, slopes: Array) -> tuple[Array, Array]:
        """The same numbers, 0 where the score is not finite, and the norms of the scores."""
        if self._narrow:
            square = jnp.sum(_product(slopes, self._gram) * slopes, axis=-1)
        else:
            square = jnp.sum((slopes @ self.frame) ** 2, axis=-1)
        norm = jnp.sqrt(jnp.maximum(square, 0))
        good = norm < 1e18  # whose square is finite in float32; false for NaN
        return jnp.where(good[..., None], slopes, 0), jnp.where(good, norm, 0)


def _product(one: Array, other: Array) -> Array:
    """``one @ other``. XLA multiplies small matrices record by record: sums are faster then."""
    if min(*one.shape[-2:], *other.shape) > _FEW:
        return one @ other
    return jnp.sum(one[..., None] * other, axis=-2)


def _products(slopes: Array, others: Array) -> Array:
    """Sum of outer products of vectors over the first two axes, shape (p, p)."""
    if slopes.shape[-1] > _FEW:
        return jnp.einsum("abp,abq->pq", slopes, others)
    return _total(slopes[..., :, None] * others[..., None, :])


def _total(terms: Array) -> Array:
    """Sum over the first two axes, as a product: XLA's sums take one term at a time on a CPU."""
    return jnp.tensordot(jnp.ones(terms.shape[:2], terms.dtype), terms, 2)


def _frame_reads_outcome(waist: Waist, zero: Array, given: PyTree) -> bool:
    """Whether scores of other outcomes have another frame than that of the record's own."""
    example, own = jax.tree.map(lambda leaf: jnp.zeros(jnp.shape(leaf), leaf.dtype), given)

    def frame(own: PyTree) -> dict[str, Array]:
        return {"frame": jax.jacrev(waist.values)(zero, (example, own))}

    return depends_on_inputs(frame, own)["frame"]


def _scalar(outcomes: Outcomes, weighted: bool) -> Callable[[Array, Any], Array]:
    def scalar(draw: Array, given: Any) -> Array:
        return outcomes.log_likelihood(draw, *given, weighted=weighted)

    return scalar


def _clipped(slopes: Array, norm: Array, limit: Array) -> Array:
    return slopes * jnp.minimum(1, limit / (norm + _TINY))[..., None]


def _listed(scores: _Scores, request: Request, draws: Array, _: Array) -> tuple[Array, ...]:
    """Score, curvature and power over their bounds, for outcomes that can be listed."""
    outcomes, (score_clip, curvature_clip) = scores.outcomes, request.clips
    listed = outcomes.listed(draws, scores.example)
    chances = listed.probabilities

    def at(value: Array, draw: Array) -> tuple[Array, Array]:
        outcome = outcomes.as_outcome(value, scores.own)
        return scores.at(draw, outcome), scores.at(draw, outcome, weighted=False)

    slopes, slope = jax.vmap(jax.vmap(at, (None, 0)), (0, None))(listed.values, draws)
    # Found once: a sum that computes its terms itself takes one exponential at a time.
    chances, slopes, slope = lax.optimization_barrier((chances, slopes, slope))
    slopes, norm = scores.bounded(slopes)
    slope, slope_norm = scores.bounded(slope)  # differs where the record has a weight
    bound = jnp.sum(chances * norm * slope_norm, axis=0)
    limits = score_clip / (jnp.max(norm, axis=0) + _TINY), curvature_clip / (bound + _TINY)
    weight = jnp.where(request.kind > 0, 1, jnp.minimum(1, jnp.minimum(*limits)))
    each = weight * chances / len(draws)
    values = listed.values[:, None]
    centred = values - jnp.sum(chances * values, axis=0)
    spread = jnp.sqrt(jnp.sum(chances * centred**2, axis=0) + _TINY)
    # The release of scales asks for the vector along the row in the place of the score.
    observed = weight * listed.observed[:, None] / len(draws)
    sent = jnp.where(request.kind > 0, each * centred / spread, observed)
    score = _total(sent[..., None] * slopes)
    product = _products(each[..., None] * slopes, slope)
    power = jnp.mean(weight**2 * jnp.sum(chances * norm**2, axis=0))
    return _parts(scores, request, score, product, power)


def _simulated(scores: _Scores, request: Request, draws: Array, key: Array) -> tuple[Array, ...]:
    """The same from outcomes that are simulated at each draw's partner."""
    outcomes, (score_clip, curvature_clip) = scores.outcomes, request.clips
    number = len(draws)
    partners = jnp.roll(draws, number // _PARTNER + 1, axis=0)
    partners = jnp.where(request.kind > 0, draws, partners)
    keys = jax.random.split(key, (number, _REPLICATES))

    def at(draw: Array, partner: Array, keys: Array) -> tuple[Any, ...]:
        def replicate(key: Array) -> tuple[Any, Array, Array]:
            outcome = outcomes.simulate(partner, scores.example, key)
            one, other = scores.at(draw, outcome), scores.at(partner, outcome, weighted=False)
            return outcome, one, other

        moments = outcomes.moments(draw, scores.example) if outcomes.scalar else (0.0, 1.0)
        return moments, scores.at(draw, scores.own), *jax.vmap(replicate)(keys)

    (mean, variance), own, outcome, there, slope = jax.vmap(at)(draws, partners, keys)
    there, norm = scores.bounded(there)
    slope, slope_norm = scores.bounded(slope)
    clipped, short = _clipped(there, norm, score_clip), jnp.minimum(norm, score_clip)
    observed = jnp.mean(_clipped(*scores.bounded(own), score_clip), axis=0)
    centre = jnp.mean(clipped, axis=(0, 1))
    size = scores.bounded(centre)[1]
    limits = (
        curvature_clip / (jnp.mean(short * slope_norm) + _TINY),
        (score_clip / (score_clip + size)),
    )
    weight = jnp.where(request.kind > 0, 1, jnp.minimum(1, jnp.minimum(*limits)))
    product = weight * _products(clipped, slope) / norm.size
    score = weight * (observed - centre)
    if outcomes.scalar:
        (value,) = outcome.values()
        centred = value.reshape(norm.shape).astype(norm.dtype) - mean[:, None]
        along = centred / jnp.sqrt(variance + _TINY)[:, None]
        row = _total(along[..., None] * clipped) / norm.size
        score = jnp.where(request.kind > 0, row, score)
    else:
        score = jnp.where(request.kind > 0, 0, score)
    return _parts(scores, request, score, product, weight**2 * jnp.mean(short**2))


def _parts(
    scores: _Scores, request: Request, score: Array, product: Array, power: Array
) -> tuple[Array, Array, Array]:
    r"""The three entries over their bounds.

    In a stage they are score, curvature and power. In the release of scales they are the vector
    along the record's row, :math:`u_i = E[W g (y - m)] / \mathrm{sd}(y)`, and the diagonal of the
    curvature in the first places of the second entry. :math:`u_i u_i^\top` is at most the curvature
    (Cauchy), and equal to it in a generalised linear model. The release of the size has the third
    entry alone, the log of the power, from 0 at 1 / range to 1 at range times the public guess.
    """
    frame, (score_clip, curvature_clip) = scores.frame, request.clips
    curvature = _product(frame.T, _product((product + product.T) / 2, frame))
    triangle = _triangle(curvature)
    scales = jnp.zeros_like(triangle).at[: len(curvature)].set(jnp.diagonal(curvature))
    triangle = jnp.where(request.kind == Kind.SCALES, scales, triangle)
    vector = jnp.sum(score[:, None] * frame, axis=0)
    # By construction these are in their balls in a stage; before the stages they are clipped here.
    vector, triangle = _ball(vector, score_clip), _ball(triangle, curvature_clip)
    power = power / score_clip**2
    log_power = 1 + jnp.log(power) / (4 * np.log(SIZE_RANGE))
    sized = jnp.clip(jnp.nan_to_num(log_power, nan=0.0), 0, 1)
    power = jnp.where(request.kind == Kind.SCALES, 0, power)
    alone = request.kind == Kind.SIZE
    return *(jnp.where(alone, 0, x) for x in (vector, triangle)), jnp.where(alone, sized, power)


def _ball(vector: Array, bound: Array) -> Array:
    """A vector over its bound, of norm at most 1; 0 where it is not finite."""
    vector = jnp.where(jnp.all(jnp.isfinite(vector)), vector, 0)
    return vector / jnp.maximum(jnp.linalg.norm(vector), bound)
