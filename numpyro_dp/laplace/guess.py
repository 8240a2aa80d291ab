"""The first whitening: a public guess of the size of scores, from invented records."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_dp._compat import jit_once
from numpyro_dp._tree import on_device
from numpyro_dp.core import PyTree
from numpyro_dp.laplace.pattern import MOST, MOST_DENSE, group_sites, unseen_directions
from numpyro_dp.model.outcomes import Outcomes
from numpyro_dp.model.public import UnsupportedModelError
from numpyro_dp.posterior.algebra import factor
from numpyro_dp.posterior.draws import generator
from numpyro_dp.posterior.prior import ModelPrior

_RECORDS = 200
_DRAWS = 40
_TOGETHER = 2.0  # standard deviations of a draw in all coordinates together
_MOST_COLUMNS = 40  # that are tried as constant
_PER_LATENT = 4  # records for each latent, to find directions without scores
_SAME_SIZE = 1.5  # largest factor between mean squares of scores that counts as about the same
_HALVES = 16
_BLUR, _BLUR_SURE, _BLUR_ROUNDS = (0.2, 0.6), 3.0, 8  # information of a record in the draws
_SILENT = 0.1  # below this part of its usual size, the score of a latent counts as 0
_ScoresAt = Callable[..., np.ndarray]
_MEDIAN = 0.6745  # of |x| for a standard normal x


class FirstGuess(NamedTuple):
    """Results from invented records.

    Attributes:
        whitening: Diagonal of the first whitening, shape (d,).
        groups: Sites of group effects whose pairs are not released, see
            :func:`~numpyro_dp.laplace.pattern.group_sites`.
        classes: All sites of group effects.
        unseen: Directions without scores, shape (directions, d) each. Those of the model come
            first, then those that it has if a column is constant.
        near: ``(mean, covariance) -> (share, sizes)``. At draws with this share of the covariance,
            scores of invented records have about the same size as at the mean. The sizes are their
            mean squares there (d,).
        blurred: ``(mean, covariance) -> ratios`` (2, d), see :func:`_blurred`.
        norms: ``(mean, whitening) -> norms`` of whitened scores (records,). Their mean square is 1.
    """

    whitening: np.ndarray
    groups: np.ndarray
    classes: np.ndarray
    unseen: tuple[np.ndarray, ...]
    near: Callable[[np.ndarray, np.ndarray], tuple[float, np.ndarray]]
    blurred: Callable[[np.ndarray, np.ndarray], np.ndarray]
    norms: Callable[[np.ndarray, np.ndarray], np.ndarray]


def first_guess(prior: ModelPrior, scales: Mapping[int, np.ndarray], rng_key: Array) -> FirstGuess:
    """Returns the first whitening, and the sites of group effects.

    Invented records have normal columns with the given scales (1 by default) and outcomes that the
    model simulates. Without given scales, the scores of a site share one scale. So a site of group
    effects is not left with zeros. The typical whitened score has norm sqrt(d / N).

    Args:
        prior: The prior of the model.
        scales: Scale of the columns of some record arrays, by the number of the array.
        rng_key: A public key.

    Raises:
        UnsupportedModelError: If no invented record has a finite score, the model is a neural
            network, or the model has too many latents.
    """
    outcomes = prior.outcomes
    layout = outcomes.model.structure.layout
    normal, ones = layout.invented_records(_RECORDS)
    rng = generator(rng_key)
    # In `normal`, integers are 1, which is a valid label or count. Two equal indices may cancel, so
    # `mixed` draws them from {0, 1}.
    mixed = tuple(
        x
        if jnp.issubdtype(x.dtype, jnp.floating)
        else on_device(rng.integers(2, size=x.shape), x.dtype)
        for x in normal
    )
    # Some likelihoods allow only positive columns, others only small labels or indices.
    candidates = (normal, tuple(on_device(np.abs(x)) for x in normal), ones, mixed)
    scores_at, decoded = _scores_at(prior, rng_key), prior.decoded
    part, _ = _near(scores_at, mixed, decoded.mean, decoded.covariance)
    points = _points(decoded.mean, part * decoded.covariance, rng_key)
    for rows in candidates:
        rows = tuple(
            (x * jnp.asarray(scales[n], x.dtype)) if n in scales else x for n, x in enumerate(rows)
        )
        middle, *at_draws = scores_at(points, rows)
        scores = np.concatenate(at_draws)
        finite = np.all(np.isfinite(scores), axis=1)
        if np.mean(finite) > 0.5 and np.any(scores[finite]):
            break
    else:
        raise UnsupportedModelError(
            "The likelihood has no finite gradient, or a gradient of 0, for all invented records "
            "(normal values, ones). Records without a finite gradient count as 0. The run would "
            "spend its budget and return the prior. Look for sqrt or log at 0, or a where() with a "
            "branch that is not finite. Scale columns to about 1."
        )
    scores = scores[finite]
    _check_not_a_network(middle, scores)
    widths = _widths(prior, np.abs(scores), bool(scales))
    white = np.linalg.norm(scores / widths, axis=1)
    typical = np.median(white[white > 0]) if np.any(white > 0) else 1.0
    number, size = layout.num_examples, scores.shape[1]
    # With equal indices, a record of w[i] + w[j] would seem to see one group.
    mixed = _with_indices(mixed, outcomes, rng)
    distinct = np.concatenate(scores_at(points, mixed)[1:])
    classes = group_sites(np.concatenate([scores, np.nan_to_num(distinct)]), sites_of(prior))
    groups = classes if size > MOST_DENSE else np.zeros(size, int)
    _check_number(groups)
    unseen = _unseen(scores_at, points, mixed, rng)
    near = functools.partial(_near, scores_at, mixed, listed=bool(outcomes.number))
    blurred = functools.partial(_blurred, scores_at, mixed)
    norms = functools.partial(_norms, scores_at, mixed)
    first = np.sqrt(size / number) / (typical * widths)
    return FirstGuess(first, groups, classes, unseen, near, blurred, norms)


def _with_indices(
    rows: tuple[Array, ...], outcomes: Outcomes, rng: np.random.Generator
) -> tuple[Array, ...]:
    """The rows, with integers up to the largest size of a latent that indices may have."""
    sizes = {size for shape in outcomes.shapes.values() for size in shape if size > 2}
    if not sizes or not any(jnp.issubdtype(x.dtype, jnp.integer) for x in rows):
        return rows
    possible = jit_once(jax.vmap(outcomes.possible))
    before = np.mean(np.asarray(possible(rows)))
    for n, x in enumerate(rows):
        if not jnp.issubdtype(x.dtype, jnp.integer):
            continue
        # The largest size that is possible. With a smaller one, no record would see the last
        # groups.
        for size in sorted(sizes, reverse=True):
            other = on_device(rng.integers(size, size=x.shape), x.dtype)
            tried = (*rows[:n], other, *rows[n + 1 :])
            # Fewer possible records show that the numbers are too large for this array.
            if np.mean(np.asarray(possible(tried))) >= before:
                rows = tried
                break
    return rows


def _unseen(
    scores_at: _ScoresAt, points: np.ndarray, rows: tuple[Array, ...], rng: np.random.Generator
) -> tuple[np.ndarray, ...]:
    """Directions without scores: of the model, and of the model if a column is constant.

    A column of ones and effects of groups have such a direction, which the model does not show.
    Only lookups have it, so other models get no columns.
    """
    host = tuple(np.asarray(x) for x in rows)

    def directions(rows: tuple[np.ndarray, ...], known: np.ndarray | None) -> np.ndarray:
        products = np.zeros((points.shape[1],) * 2)
        for _ in range(1 + _PER_LATENT * len(products) // _RECORDS):
            # New combinations of the same values.
            mixed = tuple(x[rng.permutation(len(x))] for x in rows)
            found = np.concatenate(scores_at(points, mixed))
            found = found[np.isfinite(found).all(1)]
            products += found.T @ found
        return unseen_directions(products, known)

    found = [directions(host, None)]
    if any(np.issubdtype(x.dtype, np.integer) and np.max(x, initial=0) > 1 for x in host):
        columns = ((n, index) for n, x in enumerate(host) if np.issubdtype(x.dtype, np.floating)
                   for index in np.ndindex(x.shape[1:]))  # fmt: skip
        for n, index in itertools.islice(columns, _MOST_COLUMNS):
            constant = host[n].copy()
            constant[:, *index] = 1
            found.append(directions((*host[:n], constant, *host[n + 1 :]), found[0]))
    return found[0], *(each for each in found[1:] if len(each))


def _around(mean: np.ndarray, covariance: np.ndarray) -> np.ndarray:
    """The mean, and draws that are near it."""
    # The same numbers in each call, so that changes of sizes come from mean and covariance.
    noise = np.clip(np.random.default_rng(0).normal(size=(_DRAWS, len(mean))), -1, 1)
    noise *= min(1.0, _TOGETHER / np.sqrt(len(mean)))
    return np.vstack([mean, mean + noise @ factor(covariance).T])


def _mean_squares(scores: np.ndarray) -> np.ndarray:
    # A median, because a far draw of a scale has enormous scores.
    return np.nan_to_num(np.median(np.mean(scores**2, axis=1), axis=0))


def _near(
    scores_at: _ScoresAt,
    rows: tuple[Array, ...],
    mean: np.ndarray,
    covariance: np.ndarray,
    listed: bool = False,
) -> tuple[float, np.ndarray]:
    """The largest of 1, 1 / 2, 1 / 4 ... at which scores keep their size, and these sizes.

    At draws from a wide prior, a logistic model is sure of each outcome, the rate of a count
    overflows, and outcomes of the mean are far from those of a draw. Scores then tell little. A
    prior of unit scale is not so wide. The curvature of ``listed`` outcomes, such as classes, is
    bounded. Its change is left to releases, so that all sizes are 1.
    """
    centre = np.tile(mean, (1 + _DRAWS, 1))
    usual, own, part = _mean_squares(scores_at(centre, rows)), np.ones_like(mean), 1.0
    for part in 0.5 ** np.arange(_HALVES):
        draws = _around(mean, part * covariance)
        own, other = (_mean_squares(scores_at(draws, rows, at)) for at in (draws, centre))
        with np.errstate(divide="ignore", invalid="ignore"):
            ratios = np.log(np.stack([own, other]) / usual)
        ratios = ratios[:, np.isfinite(ratios).all(0)]
        if ratios.size and np.all(np.abs(np.median(ratios, axis=1)) < np.log(_SAME_SIZE)):
            break
    return float(part), np.ones_like(mean) if listed else own


def _blurred(
    scores_at: _ScoresAt, rows: tuple[Array, ...], mean: np.ndarray, covariance: np.ndarray
) -> np.ndarray:
    r"""The mean score over tr(H V): at the mean if the truth is a draw, and the other way round.

    Errors of many latents add up to residuals that look like noise of the outcome. So a scale seems
    larger than it is, by the second order of a score: :math:`\tfrac12 \sum_{kl} V_{kl}\,
    \partial_k \partial_l g`. Scores at draws around the truth are off in the same way. Invented
    records tell the size of both for each latent. Ratios that may be chance are 0.
    """
    half = np.clip(np.random.default_rng(1).normal(size=(_DRAWS // 2, len(mean))), -2, 2)
    draws = np.vstack([half, -half]) @ factor(covariance).T  # so that the first order cancels
    centre = np.tile(mean, (1 + _DRAWS, 1))
    for _ in range(_BLUR_ROUNDS):
        around = np.vstack([mean, mean + draws])
        found = scores_at(centre, rows, around)[1:]
        size = float(np.nan_to_num(np.median(np.einsum("rnd,rd->rn", found, draws).mean(1))))
        if _BLUR[0] < size < _BLUR[1]:
            break
        # Much nearer draws show no second order. Much farther ones show higher orders too.
        draws *= np.clip(np.sqrt(np.mean(_BLUR) / max(size, 1e-3)), 0.1, 10)
    other = scores_at(around, rows, centre)[1:]
    used = np.isfinite(found).all(axis=(1, 2)) & np.isfinite(other).all(axis=(1, 2))
    if not _BLUR[0] < size < _BLUR[1] or np.mean(used) < 0.5:
        return np.zeros((2, len(mean)))
    total = np.sum(found[used].mean(1) * draws[used], axis=1).mean()
    ratios = []
    for scores in (found[used], other[used]):
        bias = scores.mean((0, 1))
        error = np.sqrt(np.mean(scores**2, axis=(0, 1)) / scores[..., 0].size)
        ratios.append(np.where(np.abs(bias) > _BLUR_SURE * error, bias / total, 0.0))
    return np.stack(ratios)


def _norms(
    scores_at: _ScoresAt, rows: tuple[Array, ...], mean: np.ndarray, whitening: np.ndarray
) -> np.ndarray:
    """Norms of whitened scores at the mean. The columns of the records may have any scale."""
    scores = np.concatenate(scores_at(np.tile(mean, (1 + _DRAWS, 1)), rows)) @ whitening
    scores = scores[np.isfinite(scores).all(1)]
    sizes = np.sqrt(np.mean(scores**2, axis=0))
    scores = scores / np.where(sizes > 0, sizes, 1) / np.sqrt(max(1, np.sum(sizes > 0)))
    return np.linalg.norm(scores, axis=1)


def _check_not_a_network(middle: np.ndarray, scores: np.ndarray) -> None:
    """Raises if most latents act only through products with others, as weights of a network do.

    With all weights at 0, the layers pass nothing on. So the scores of the weights are 0 at the
    centre of the prior, but not elsewhere.
    """
    # A median, because a few draws from the prior of a log rate have enormous scores.
    usual = np.ma.median(np.ma.masked_equal(np.abs(scores), 0), axis=0).filled(0)
    middle = np.ma.masked_equal(np.where(np.isfinite(middle), middle, np.inf), 0)
    silent = np.sqrt(np.ma.mean(middle**2, axis=0)).filled(0) < _SILENT * usual
    if np.mean(silent) > 0.5:
        raise UnsupportedModelError(
            "Most latents of this model act on the outcome only through products with other "
            "latents, like the weights of a neural network. Such a posterior has many modes, and "
            "no normal distribution fits it. Use DPSVI, or DPMCMC(SGLD(model), ...)."
        )


def _check_number(groups: np.ndarray) -> None:
    dense, size = int(np.sum(groups == 0)), len(groups)
    if dense > MOST_DENSE or size > MOST:
        raise UnsupportedModelError(
            f"DPLaplace takes at most {MOST_DENSE} latents that records see, apart from effects of "
            f"groups, and {MOST} in all, got {dense} and {size}. Each release holds a curvature "
            "for every pair of latents. Use DPSVI with aligned()."
        )


def sites_of(prior: ModelPrior) -> np.ndarray:
    """The site number of each latent that records see."""
    counts = [int(np.prod(prior.outcomes.shapes[n])) for n in sorted(prior.outcomes.seen)]
    return np.repeat(np.arange(len(counts)), counts)


def _points(mean: np.ndarray, covariance: np.ndarray, rng_key: Array) -> np.ndarray:
    """The mean, and draws around it."""
    noise = generator(rng_key).normal(size=(_DRAWS, len(mean)))
    noise = np.vstack([np.zeros(len(mean)), noise])
    return mean + noise @ np.linalg.cholesky(covariance).T


def _scores_at(prior: ModelPrior, rng_key: Array) -> _ScoresAt:
    """Returns ``(points, rows, at=points) -> scores``, of shape (points, rows, d).

    The outcomes of a score are simulated at its own draw, or ``at`` others. For W it is the own
    one. At another draw, residuals would be as wide as the prior, and W would be far too small. A W
    that is too large only clips more, and later stages correct that. A W that is too small hides
    the signal in noise.
    """
    outcomes = prior.outcomes

    def one(draw: Array, at: Array, row: PyTree, key: Array) -> Array:
        return outcomes.score(draw, row, outcomes.simulate(at, row, key))

    every = jit_once(jax.vmap(jax.vmap(one, (None, None, 0, 0)), (0, 0, None, 0)))
    words = generator(rng_key).integers(2**32, size=(_DRAWS, _RECORDS, 2), dtype=np.uint32)
    # The same keys in each call, so that differences of scores come from the points.
    keys = on_device(np.concatenate([words[:1], words]))
    keys = jax.random.wrap_key_data(keys, impl="threefry2x32")

    def scores(
        points: np.ndarray, rows: tuple[Array, ...], at: np.ndarray | None = None
    ) -> np.ndarray:
        both = (np.asarray(x, np.float32) for x in (points, points if at is None else at))
        return np.asarray(every(*both, rows, keys), np.float64)

    return scores


def _widths(prior: ModelPrior, sizes: np.ndarray, by_column: bool) -> np.ndarray:
    """Robust standard deviation of the score of each latent."""
    outcomes = prior.outcomes
    site = sites_of(prior)
    widths = np.ones(len(site))
    for n in range(len(outcomes.seen)):
        own = sizes[:, site == n]
        norm = np.linalg.norm(own, axis=1)
        some = norm[norm > 0]
        if not len(some):
            continue
        count = own.shape[1]
        parts = np.mean((own[norm > 0] / some[:, None]) ** 2, axis=0) * count
        if not by_column or np.sum(parts > 0) < count:
            parts = np.ones(count)
        # The median of |x| is .67 sds for one normal number. The norm of many is near its own root
        # mean square.
        middle = np.median(some) / (_MEDIAN if count == 1 else 1) / np.sqrt(count)
        # The floor keeps the whitening finite for a column that is nearly always 0.
        widths[site == n] = middle * np.sqrt(np.maximum(parts, 1e-3))
    return widths
