r"""Running sums of the released scores of a run, and of the points at which they were released.

Near the optimum :math:`\phi` of the data, the score at a point z is :math:`H(\phi - z)`. So the
scores of all steps and their points z tell where the optimum is, and the curvature H. A loop keeps
the sums that this needs, and no iterates. :mod:`numpyro_dp.posterior.scores` reads them.

Points move because of earlier noise, which would bias a regression of scores on points. So each
point comes with a *shift*: the part of it that was drawn fresh in this step, with mean 0. The rest
of the point is the *centre* of the step.

Points and scores count from the second half of a run on, when the points are near the optimum.
Products of scores and shifts are added up for both halves. A guide becomes narrow, and a narrow
draw tells little about the curvature.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_dp.core import Observation

__all__ = ["MOST_LATENTS", "WARMUP", "ScoreSums", "score_sums", "with_observation"]

MOST_LATENTS = 300  # sums hold a few matrices of this size
WARMUP = 0.5  # part of the steps of a run that come before the sums of points and scores


class ScoreSums(NamedTuple):
    """Sums over the steps of a run. You may publish them.

    Points are counted from an origin, the first point of the sums, so that no digits are lost.

    Attributes:
        begins: First step of all sums but ``products``.
        count: Number of steps in them.
        origin: Their first point (d,).
        point, score: Sums of points and scores (d,).
        point_square, shift_square: Sums of the squared entries of points and shifts (d,).
        noise_square: Sum of the squared standard deviations of the noise of each score (d,).
        curvature: Sum of the released curvatures (d, d) or (d,). If there are any, ``products`` is
            ``None``.
        curvature_square: Sum of the squared standard deviations of their noise.
        products: Sums of products over the steps with finite values.
    """

    begins: Array
    count: Array
    origin: Array
    point: Array
    score: Array
    point_square: Array
    shift_square: Array
    noise_square: Array
    curvature: Array | None = None
    curvature_square: Array | None = None
    products: Products | None = None


class Products(NamedTuple):
    """Sums of products of score, shift and centre, side by side as one vector u (3 d,).

    They have a leading axis for the steps before and after the other sums begin.

    Attributes:
        origin: First centre of each half (2, d), from which its centres are counted.
        count: Number of steps (2,).
        noise_square: Sum of the squared standard deviations of the noise of each score (2, d).
        sum: Sum of u (2, 3 d).
        square: Sum of the products of u with itself (2, 3 d, 3 d).
    """

    origin: Array
    count: Array
    noise_square: Array
    sum: Array
    square: Array


def score_sums(like: Observation, first_step: Array, num_steps: Array) -> ScoreSums:
    """Returns empty sums for a run of ``num_steps`` steps from ``first_step`` on.

    ``like`` has the shapes of an observation.
    """
    begins = first_step + jnp.floor(WARMUP * num_steps).astype(jnp.int32)
    count = jnp.zeros((), jnp.int32)
    empty = jax.tree.map(jnp.zeros_like, like)
    sums = ScoreSums(begins, count, empty.point, **_terms(empty, empty.point), products=None)
    if like.shift is not None:
        size = like.point.size
        halves = [jnp.zeros((2, *shape), like.point.dtype) for shape in (
            (size,), (3 * size,), (3 * size, 3 * size)
        )]  # fmt: skip
        products = Products(halves[0], jnp.zeros(2, jnp.int32), *halves)
        sums = sums._replace(products=products)
    return sums


def with_observation(sums: ScoreSums, step: Array, seen: Observation) -> ScoreSums:
    """Adds what was released in a step."""
    counts = step >= sums.begins
    origin = jnp.where(counts & (sums.count == 0), seen.point, sums.origin)
    # `where`, not a product: a value that overflows before the sums begin must not enter them.
    added = {
        name: getattr(sums, name) + jnp.where(counts, term, 0)
        for name, term in _terms(seen, origin).items()
    }
    found = ScoreSums(sums.begins, sums.count + counts.astype(jnp.int32), origin, **added)
    if sums.products is None or seen.shift is None:
        return found
    return found._replace(products=_with_products(sums.products, counts, seen, seen.shift))


def _terms(seen: Observation, origin: Array) -> dict[str, Array]:
    """What an observation adds to each sum but the products."""
    point, noise = seen.point - origin, seen.curvature_noise
    terms = {
        "point": point,
        "score": seen.score,
        "point_square": point**2,
        "shift_square": jnp.zeros_like(point) if seen.shift is None else seen.shift**2,
        "noise_square": seen.noise_scale**2,
        "curvature": seen.curvature,
        "curvature_square": None if noise is None else jnp.asarray(noise) ** 2,
    }
    return {name: term for name, term in terms.items() if term is not None}


def _with_products(products: Products, half: Array, seen: Observation, shift: Array) -> Products:
    """Adds a step, unless a value of it is not finite."""
    centre = seen.point - shift
    finite = jnp.all(jnp.isfinite(jnp.concatenate([seen.score, shift, centre])))
    half = half.astype(jnp.int32)
    before = products.origin[half]
    origin = jnp.where(finite & (products.count[half] == 0), centre, before)
    both = jnp.concatenate([seen.score, shift, centre - origin])
    added = jnp.asarray(1), seen.noise_scale**2, both, jnp.outer(both, both)
    sums = [
        total.at[half].add(jnp.where(finite, term, 0).astype(total.dtype))
        for total, term in zip(products[1:], added, strict=True)
    ]
    return Products(products.origin.at[half].set(origin), *sums)
