"""The first whitening, from invented records: a public guess of how large scores are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_dp.laplace.pattern import MOST, MOST_DENSE, group_sites
from numpyro_dp.laplace.prior import ModelPrior, generator
from numpyro_dp.model.public import UnsupportedModelError

__all__ = ["FirstGuess", "first_guess"]

_RECORDS = 200
_DRAWS = 40
_SILENT = 0.1  # times its usual size, the score of a latent counts as 0
_MEDIAN = 0.6745  # of |x| for a standard normal x


class FirstGuess(NamedTuple):
    """What invented records say.

    Attributes:
        whitening: Diagonal of the first whitening, shape (d,).
        groups: Sites of group effects, see :func:`~numpyro_dp.laplace.pattern.group_sites`.
    """

    whitening: np.ndarray
    groups: np.ndarray


def first_guess(prior: ModelPrior, scales: Mapping[int, Any], rng_key: Array) -> FirstGuess:
    """Returns the first whitening, and which latents are effects of groups.

    Invented records have normal columns of the given scales (1 by default) and outcomes that the
    model simulates. The scores of a site share one scale unless columns were given scales, so a
    site of group effects is not left with zeros. The typical whitened score then has norm
    sqrt(d / N).

    Args:
        prior: Of the model.
        scales: Scale of the columns of some record arrays, by their number.
        rng_key: Public.

    Raises:
        UnsupportedModelError: If no invented record has a finite score, the model is a neural
            network, or there are too many latents that are no effects of groups.
    """
    outcomes = prior.outcomes
    layout = outcomes.model.structure.layout
    normal, ones = layout.invented(_RECORDS)
    rng = generator(rng_key)
    # Integers are 1: a valid label or count. As two indices that are equal, they may cancel.
    mixed = tuple(
        x if jnp.issubdtype(x.dtype, jnp.floating) else jnp.asarray(rng.integers(2, size=x.shape))
        for x in normal
    )
    candidates = (normal, tuple(abs(x) for x in normal), ones, mixed)
    scorer = _scorer(prior, rng_key)
    for rows in candidates:
        rows = tuple(
            (x * jnp.asarray(scales[n], x.dtype)) if n in scales else x for n, x in enumerate(rows)
        )
        middle, scores = scorer(rows)
        finite = np.all(np.isfinite(scores), axis=1)
        if np.mean(finite) > 0.5 and np.any(scores[finite]):
            break
    else:
        raise UnsupportedModelError(
            "The likelihood has no finite gradient, or a gradient of 0, for all invented records "
            "(normal numbers, ones). Records without a finite gradient count as 0, and the run "
            "would return the prior at the whole cost of privacy. Look for sqrt or log at 0, or a "
            "where() whose other branch is not finite; scale columns to about 1."
        )
    scores = scores[finite]
    _check_not_a_network(middle, scores)
    widths = _widths(prior, np.abs(scores), bool(scales))
    white = np.linalg.norm(scores / widths, axis=1)
    typical = np.median(white[white > 0]) if np.any(white > 0) else 1.0
    number, size = layout.num_examples, scores.shape[1]
    groups = group_sites(scores, _sites(prior))
    _check_number(groups)
    return FirstGuess(np.sqrt(size / number) / (typical * widths), groups)


def _check_not_a_network(middle: np.ndarray, scores: np.ndarray) -> None:
    """Raises if most latents act only where others are not 0, as weights of a network do.

    With all weights at 0 no layer hands anything on, so that their scores are 0 in the middle of
    the prior, and not elsewhere.
    """
    usual = np.sqrt(np.mean(scores**2, axis=0))
    middle = np.where(np.isfinite(middle), middle, np.inf)
    silent = np.sqrt(np.mean(middle**2, axis=0)) < _SILENT * usual
    if np.mean(silent) > 0.5:
        raise UnsupportedModelError(
            "Expected latents that act on the outcome by themselves, got a model where most act "
            "through products with others, as the weights of a neural network do: its posterior "
            "has many modes, and no normal distribution fits them. Use DPSVI, or "
            "DPMCMC(SGLD(model), ...)."
        )


def _check_number(groups: np.ndarray) -> None:
    dense, size = int(np.sum(groups == 0)), len(groups)
    if dense > MOST_DENSE or size > MOST:
        raise UnsupportedModelError(
            f"Expected at most {MOST_DENSE} latents that records see, besides effects of groups, "
            f"and {MOST} in all, got {dense} and {size}: a release holds a curvature for each "
            "pair. Use DPSVI with aligned()."
        )


def _sites(prior: ModelPrior) -> np.ndarray:
    """The number of the site of each latent that records see."""
    counts = [int(np.prod(prior.outcomes.shapes[n])) for n in sorted(prior.outcomes.seen)]
    return np.repeat(np.arange(len(counts)), counts)


def _scorer(prior: ModelPrior, rng_key: Array) -> Callable[[Any], tuple[np.ndarray, np.ndarray]]:
    """Returns ``rows -> scores``: in the middle of the prior, and at draws from it.

    Outcomes are simulated where the score is taken.

    Not at another draw: residuals would be as wide as the prior, and W far too small. Too large a
    W clips more, and later stages mend that; too small a one hides the signal in noise.
    """
    outcomes, decoded, rng = prior.outcomes, prior.decoded, generator(rng_key)
    factor = np.linalg.cholesky(decoded.covariance)
    noise = rng.normal(size=(_DRAWS, len(factor)))
    noise = np.vstack([np.zeros(len(factor)), noise])
    points = jnp.asarray(decoded.mean + noise @ factor.T, jnp.float32)
    words = rng.integers(2**32, size=(_DRAWS, _RECORDS, 2), dtype=np.uint32)
    words = np.concatenate([words[:1], words])
    keys = jax.random.wrap_key_data(words, impl="threefry2x32")

    def one(draw: Array, row: Any, key: Array) -> Array:
        return outcomes.score(draw, row, outcomes.simulate(draw, row, key))

    every = jax.jit(jax.vmap(jax.vmap(one, (None, 0, 0)), (0, None, 0)))

    def scores(rows: tuple[Array, ...]) -> tuple[np.ndarray, np.ndarray]:
        found = np.asarray(every(points, rows, keys), np.float64)
        return found[0], found[1:].reshape(-1, len(factor))

    return scores


def _widths(prior: ModelPrior, sizes: np.ndarray, by_column: bool) -> np.ndarray:
    """A robust standard deviation of each score."""
    outcomes = prior.outcomes
    site = _sites(prior)
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
        middle = np.median(some) / (_MEDIAN if count == 1 else 1) / np.sqrt(count)
        widths[site == n] = middle * np.sqrt(np.maximum(parts, 1e-3))
    return widths
