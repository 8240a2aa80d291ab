r"""The signal of a record in one stage: its score, centred by the model, and its curvature.

The public values are draws :math:`z_r` of the posterior so far, a partner :math:`t_r` of each among
them, a symmetric whitening W, and clip norms C and :math:`C_H`. With
:math:`c(a) = a \min(1, C / \lVert a \rVert)` and :math:`g(z; x, y) = \nabla_z \log p(y \mid x, z)`,

.. math::
    s_i &= v_i \operatorname{mean}_r \big[ c(W g(z_r; x_i, y_i))
        - E_{y' \sim p(\cdot \mid x_i, t_r)}\, c(W g(z_r; x_i, y')) \big], \\
    H_i &= v_i \operatorname{sym} \operatorname{mean}_r
        E_{y' \sim p(\cdot \mid x_i, t_r)} \big[ c(W g(z_r; x_i, y'))\, (W g(t_r; x_i, y'))^\top
        \big],

The weight :math:`v_i \le 1` ensures :math:`\lVert s_i\rVert \le C` and
:math:`\lVert H_i\rVert_F \le C_H`. It does not depend on :math:`y_i`. So the mean of :math:`s_i` is
zero at the truth for any C: clipping causes no bias. :math:`H_i` is the exact slope of the clipped
mean (Stein's identity).

If the outcomes can be listed, the expectations are exact, with :math:`t_r = z_r` and a weight for
each draw. Otherwise they use two simulated outcomes for each draw. Each of the two has its own
centre, and the weight that follows from the other one, so that weight and centre are independent.

The power is the expected squared norm of the weighted, clipped score. The excess is the squared
norm for the observed outcome :math:`y_i` minus the expected one, both clipped to a norm
:math:`C_e \le C`. Its mean is 0 in a correct model, and positive if outcomes vary more than the
model says. Only the last stage releases it. The others release the loss, which is what weights and
clips take from the diagonal of the curvature (:class:`numpyro_dp.laplace.curvature.Loss`). Two
stages release the tail of simulated outcomes (:mod:`numpyro_dp.laplace.tail`).

With ``robust``, the last stage also releases :math:`J_i = s_i s_i^\top`. Its sum estimates how much
the scores of all records vary together, whether the model is right or not. Its Frobenius norm is at
most :math:`C^2`. In a model that is known to be wrong, scores are released in parts
(:mod:`numpyro_dp.laplace.shells`). The weight is then that of the part with the least room, and
:math:`J_i` has the score clipped at a norm in the middle.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float

from numpyro_dp._tree import on_device
from numpyro_dp.core import Args, Estimator, Kwargs, PyTree, Released, Values
from numpyro_dp.laplace.censored import censored
from numpyro_dp.laplace.shells import MIDDLE, SHELLS
from numpyro_dp.laplace.staged_scores import (
    TINY,
    Scores,
    bounded_by,
    entries,
    in_shells,
    outer_products,
    partners,
    shortened,
    square,
    total,
)
from numpyro_dp.laplace.tail import SIZES, sizes
from numpyro_dp.model.dependence import depends_on_inputs
from numpyro_dp.model.outcomes import Outcomes
from numpyro_dp.model.records import Records, Rows

_REPLICATES = 2
_GOLDEN = 0.6180339887  # multiples of it are evenly spread, and not in step with those of 1 / R
# Draws stay near the mean. This causes no bias, because each draw alone gives a score of mean 0 at
# the truth, with the curvature as its slope. Under the wide prior of a scale, a far draw has scores
# a thousand times as large as the others. The weight that bounds all scores would then be nearly 0.
# If outcomes are listed, each draw has its own weight, and draws may be farther away. Their
# curvature is then nearer to the curvature between the mean and the optimum.
_FARTHEST_LISTED, _FARTHEST = 1.0, 0.4
# Coordinates add up: a predictor of d of them varies by d times as much, and the mean score over
# such draws is that of a flattened model, whose root is too far out.
_TOGETHER = 3.0


class Request(NamedTuple):
    """The public values that define one release.

    Attributes:
        kind: A :class:`~numpyro_dp.laplace.schedule.Kind`.
        mean: Mean of the draws, shape (d,).
        factor: Cholesky factor of the covariance of the draws, shape (d, d).
        whitening: Symmetric matrix W, shape (d, d). It is zero in coordinates that are left out.
        clips: (C, C_H, C_e). Before the stages, bounds on the row and the scales, or on the size.
        weights: Square roots of the parts of the release's budget for the seven entries of the
            signal, shape (7,). Their squares sum to 1.
        shells: Clip norms of the parts of the score, increasing up to C, and square roots of their
            shares, shape (2, SHELLS + 1). With one part, all norms are C. See
            :mod:`numpyro_dp.laplace.shells`.
    """

    kind: Array
    mean: Float[Array, " d"]
    factor: Float[Array, "d d"]
    whitening: Float[Array, "d d"]
    clips: Float[Array, " 3"]
    weights: Float[Array, " 7"]
    shells: Float[Array, "2 k"]


class LaplaceProblem(NamedTuple):
    """A model and its outcomes, as a ``Problem`` for the loop of all drivers.

    Attributes:
        outcomes: The outcomes of the model.
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
        """Whether each record has a secret number that seeds its simulated outcomes."""
        return not self.outcomes.number

    def at(self, shared: tuple[Array, ...]) -> LaplaceProblem:
        """Returns the same problem with other public arrays."""
        return self._replace(outcomes=self.outcomes._replace(shared=shared))

    def rows(self, args: Args, kwargs: Kwargs) -> Rows:
        """Splits arguments into records and public arrays."""
        rows = self.records.layout.rows(args, kwargs)
        numbers = (on_device(np.arange(self.num_examples), np.uint32),) * self.numbered
        return rows._replace(arrays=(*rows.arrays, *numbers))

    def blank_example(self) -> tuple[Array, ...]:
        """Returns zeros with the shapes of one record."""
        return (*self.records.layout.blank(), *(on_device(0, np.uint32),) * self.numbered)

    def constrain(self, params: PyTree) -> PyTree:
        """Returns the request as it is, because it is public."""
        return params


class StageOptimizer:
    """Stores the released values of a stage. The host decodes them and makes the next request.

    Args:
        pairs: Whether each entry of the curvature is released, shape (d, d).
        tail: Whether the tail is.
        robust: Whether the variance is.
    """

    def __init__(self, pairs: np.ndarray, tail: bool, robust: bool = False) -> None:
        self._entries = int(np.sum(np.triu(pairs))) * (1 + robust) + SIZES * tail
        self._scores = 1 + SHELLS * tail

    def init(self, request: Request) -> tuple[Request, Array]:
        """Returns the state: the request, and zeros in place of released values."""
        # Each part of the score and the loss have d entries. Power and excess have one.
        vectors = (self._scores + 1) * request.mean.size
        return request, on_device(np.zeros(vectors + self._entries + 2, "f4"))

    def get_params(self, state: tuple[Request, Array]) -> Request:
        """Returns the request."""
        return state[0]

    def update(
        self, released: Array, state: tuple[Request, Array], **_: object
    ) -> tuple[Request, Array]:
        """Stores the released values."""
        return state[0], released


def staged_scores(
    outcomes: Outcomes, antithetic: int, pairs: np.ndarray | None = None, robust: bool = False
) -> Callable[[LaplaceProblem], Estimator]:
    """Returns the function ``problem -> estimator``.

    In a stage the signal has up to seven entries: the score, the upper triangle of the curvature,
    the score's power, the excess of the power, the loss, the tail, and the variance. Entries off
    the diagonal are multiplied by root 2, which makes the norm of the triangle the Frobenius norm.
    Each entry is divided by its bound and multiplied by its weight. So the signal has norm at most
    1.

    Args:
        outcomes: The outcomes of the model.
        antithetic: Number of antithetic pairs of draws in a stage.
        pairs: Whether each entry of the curvature is released, shape (d, d). By default all are.
        robust: Whether the variance is among the entries.

    Guarantee:
        The bounds hold for any model, any record and any outcome, finite or not. Weights
        bring sums of clipped scores below the bounds. Values that are not finite count as 0. Before
        the stages, entries are clipped to their bounds, and the size to [0, 1]. Draws come from
        ``rng_key`` and read no record. A secret number of the record seeds its simulated outcomes.
    """
    size = outcomes.size
    places = np.nonzero(np.triu(np.ones((size, size), bool) if pairs is None else pairs))

    @jax.jit  # traced once for all callers
    def signal_of(
        public: tuple[Request, Array, Array], shared: PyTree, example: PyTree
    ) -> dict[str, Array]:
        request, draws, key = public
        own = outcomes._replace(shared=shared)
        if not own.number:
            *rows, number = example
            # With one key for all records, errors of their simulated outcomes would add up.
            example, key = tuple(rows), jax.random.fold_in(key, number)
        scores = Scores(own, request.whitening, example, places)
        one = _listed if own.number else censored if own.censored else _simulated
        score, *parts = one(scores, request, draws, key)
        names = ("score", "curvature", "power", "excess", "loss", "tail")
        # Only simulated outcomes have shells and a tail. Other kinds return five parts.
        shells, parts = parts[5:], parts[:5]
        found = {n: w * p for n, w, p in zip(names, request.weights, (score, *parts), strict=False)}
        if shells:
            norms, shares = request.shells
            found["score"] = shares[0] * found["score"]
            found["shells"] = request.weights[0] * shares[1:, None] * shells[0]
            # The score clipped at a norm in the middle, so at most 1 long too.
            inner = jnp.diff(norms)[:MIDDLE] @ shells[0][:MIDDLE]
            score = (norms[0] * score + inner) / norms[MIDDLE]
        if robust:
            # The score is at most 1 long, so its square is too.
            variance = jnp.where(request.kind > 0, 0, square(score, places))
            found["variance"] = request.weights[6] * variance
        return found

    def build(problem: LaplaceProblem) -> Estimator:
        def prepare(rng_key: Array, request: Request) -> tuple[Request, Array, Array]:
            draw_key, outcome_key = jax.random.split(rng_key)
            half = jax.random.normal(draw_key, (antithetic, request.mean.size), request.mean.dtype)
            farthest = _FARTHEST_LISTED if problem.outcomes.number else _FARTHEST
            half = jnp.clip(half, -farthest, farthest) @ request.factor.T
            half *= min(1.0, _TOGETHER / math.sqrt(request.mean.size))
            # In pairs, so that the draws have exactly the mean that the decode takes for them.
            draws = request.mean + jnp.concatenate([half, -half])
            return request, draws, outcome_key

        def signal(public: tuple[Request, Array, Array], example: PyTree) -> dict[str, Array]:
            return signal_of(public, problem.shared, example)

        def pull_back(public: PyTree, released: Released) -> Array:
            total = released.total
            names = "tail", "shells", "variance"
            others = [jnp.ravel(total[name]) for name in names if name in total]
            return jnp.concatenate([
                total["score"], total["curvature"], total["power"][None], total["excess"][None],
                total["loss"],
                *others,
            ])  # fmt: skip

        return Estimator(prepare, signal, pull_back)

    return build


def symmetric(triangle: np.ndarray, pairs: np.ndarray | None = None) -> np.ndarray:
    """The symmetric matrix of a released curvature, with 0 for pairs that were not released."""
    if pairs is None:
        size = int((np.sqrt(8 * triangle.size + 1) - 1) / 2)
        pairs = np.ones((size, size), bool)
    rows, columns = np.nonzero(np.triu(pairs))
    found = np.zeros(pairs.shape)
    found[rows, columns] = triangle / np.where(rows == columns, 1, np.sqrt(2))
    return found + np.triu(found, 1).T


def _listed(scores: Scores, request: Request, draws: Array, _: Array) -> tuple[Array, ...]:
    """The entries of the signal divided by their bounds, for outcomes that can be listed."""
    outcomes, (score_clip, curvature_clip, _) = scores.outcomes, request.clips
    listed = outcomes.listed(draws, scores.example)
    chances = listed.probabilities

    def at(value: Array, draw: Array) -> tuple[Array, Array]:
        outcome = outcomes.as_outcome(value, scores.own)
        # Stein's identity needs the slope of the distribution of outcomes. A record's weight does
        # not change this distribution.
        return scores.at(draw, outcome), scores.at(draw, outcome, weighted=False)

    slopes, slope = jax.vmap(jax.vmap(at, (None, 0)), (0, None))(listed.values, draws)
    # The barrier keeps XLA from fusing this into sums, which would take one exponential at a time.
    chances, slopes, slope = lax.optimization_barrier((chances, slopes, slope))
    slopes, norm = scores.bounded(slopes)
    slope, slope_norm = scores.bounded(slope)  # differs if the record has a weight
    bound = jnp.sum(chances * norm * slope_norm, axis=0)
    # The largest norm over all outcomes, so that the weight does not see the observed one.
    limits = score_clip / (jnp.max(norm, axis=0) + TINY), curvature_clip / (bound + TINY)
    weight = jnp.where(request.kind > 0, 1, jnp.minimum(1, jnp.minimum(*limits)))
    weight = weight * jnp.any(listed.observed)  # an outcome outside the support adds nothing
    each = weight * chances / len(draws)
    values = listed.values[:, None]
    centred = values - jnp.sum(chances * values, axis=0)
    spread = jnp.sqrt(jnp.sum(chances * centred**2, axis=0) + TINY)
    # The release of scales needs the vector along the row in place of the score.
    # No centre is needed: with one weight for all outcomes, the expected score is exactly 0.
    observed = weight * listed.observed[:, None] / len(draws)
    sent = jnp.where(request.kind > 0, each * centred / spread, observed)
    score = total(sent[..., None] * slopes)
    product = outer_products(each[..., None] * slopes, slope)
    power = jnp.mean(weight**2 * jnp.sum(chances * norm**2, axis=0))
    curved = chances * norm * slope_norm
    kept = jnp.sum(weight * curved) / (jnp.sum(curved) + TINY)
    squares = jnp.minimum(weight * norm, request.clips[2]) ** 2
    excess = jnp.mean(jnp.sum((listed.observed[:, None] - chances) * squares, axis=0))
    return entries(scores, request, score, product, power, excess, kept)


def are_independent(outcomes: Outcomes) -> bool:
    """Whether the simulated outcomes of a record are drawn independently of each other.

    Several values are, such as the rows of a unit, and mixtures. Others take even levels of their
    distribution.
    """
    if outcomes.number or outcomes.censored:
        return False
    blank, flat = outcomes.model.structure.layout.blank(), jnp.zeros(outcomes.size)

    def drawn(levels: Array) -> Values:
        return outcomes.simulate(flat, blank, jax.random.key(0), levels)

    return not depends_on_inputs(drawn, jnp.zeros(2))


def _simulated(scores: Scores, request: Request, draws: Array, key: Array) -> tuple[Array, ...]:
    """The entries of the signal over their bounds, from outcomes simulated at partners."""
    outcomes, (score_clip, curvature_clip, _) = scores.outcomes, request.clips
    number, (edges, _) = len(draws), request.shells
    thickness = jnp.diff(edges, prepend=0)
    others = partners(draws, request.kind)
    key, level_key = jax.random.split(key)
    keys = jax.random.split(key, (number, _REPLICATES))
    # Evenly spread over the distribution, so that few outcomes give a good mean. Each level alone
    # is uniform, and the two halves are independent.
    one, other = jax.random.uniform(level_key, (2, _REPLICATES), draws.dtype)
    turn = jnp.arange(number)[:, None]
    levels = jnp.stack([turn / number + one, turn * _GOLDEN + other], axis=-1) % 1

    def at(draw: Array, partner: Array, keys: Array, levels: Array) -> tuple[PyTree, ...]:
        def replicate(key: Array, levels: Array) -> tuple[Values, Array, Array]:
            # Without the barrier, XLA may simulate again for each reader.
            outcome = outcomes.simulate(partner, scores.example, key, levels)
            outcome = lax.optimization_barrier(outcome)
            one, other = scores.at(draw, outcome), scores.at(partner, outcome, weighted=False)
            return outcome, one, other

        return (
            outcomes.moments(draw, scores.example),
            scores.at(draw, scores.own),
            *jax.vmap(replicate)(keys, levels),
        )

    moments, own, outcome, there, slope = jax.vmap(at)(draws, others, keys, levels)
    there, norm = scores.bounded(there)
    slope, slope_norm = scores.bounded(slope)
    clipped, short = shortened(there, norm, score_clip), jnp.minimum(norm, score_clip)
    # Observed and simulated scores have the same clips, so that the difference has mean 0.
    own_slopes, own_norm = scores.bounded(own)
    observed = in_shells(own_slopes, own_norm, edges)
    centres = in_shells(there, norm, edges)
    # Of each shell's mean square, at most its thickness times its mean length.
    square = jnp.mean(jnp.minimum(norm, edges[0]) ** 2, axis=0)
    lengths = jnp.diff(jnp.mean(jnp.minimum(norm[..., None], edges), axis=0), axis=-1)
    squares = jnp.concatenate([square[:, None], thickness[1:] * lengths], axis=-1)
    spare = 2 * squares / (number * thickness + TINY)
    room = thickness / (thickness + scores.bounded(centres)[1] + spare + TINY)
    limits = (
        curvature_clip / (jnp.mean(short * slope_norm, axis=0) + TINY),
        jnp.min(jnp.where(thickness > 0, room, 1), axis=-1),
    )
    weights = jnp.where(request.kind > 0, 1, jnp.minimum(1, jnp.minimum(*limits)))
    # Without an outcome, the centre alone would be a bias.
    weights = weights * jnp.any(jnp.all(jnp.isfinite(own), axis=-1))
    # The weight of one half of the outcomes goes with the centre of the other half, because a
    # weight that depended on its own centre would be a bias. Clipping what exceeds the bound would
    # be one too, so there is spare room for the difference of the two centres.
    weight, crossed = jnp.mean(weights), weights[::-1]
    product = outer_products(crossed[:, None] * clipped, slope) / norm.size
    score, *shells = jnp.mean(crossed[:, None, None] * (observed - centres), axis=0)
    if moments is not None:
        (value,), (mean, variance) = outcome.values(), moments
        centred = value.reshape(norm.shape).astype(norm.dtype) - mean[:, None]
        along = centred / jnp.sqrt(variance + TINY)[:, None]
        row = total(along[..., None] * clipped) / norm.size
        score = jnp.where(request.kind > 0, row, score)
    else:
        score = jnp.where(request.kind > 0, 0, score)
    seen, likely = (jnp.minimum(each, request.clips[2]) ** 2 for each in (own_norm, norm))
    excess = weight**2 * (jnp.mean(seen) - jnp.mean(likely))
    kept = weight * jnp.sum(short * slope_norm) / (jnp.sum(norm * slope_norm) + TINY)
    own = entries(scores, request, score, product, weight**2 * jnp.mean(short**2), excess, kept)
    tail = weight * (sizes(own_norm, request.clips[2]) - sizes(norm, request.clips[2]))
    shells = bounded_by(jnp.stack(shells) @ scores.frame, thickness[1:, None])
    tail, shells = (jnp.where(request.kind > 0, 0, each) for each in (tail, shells))
    return *own, tail, shells
