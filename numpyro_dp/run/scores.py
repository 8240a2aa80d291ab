r"""Running sums of the released scores of a run, and of the points at which they were released.

Near the optimum :math:`\phi` of the data, the score at a point z is :math:`H(\phi - z)`. So the
scores of all steps and their points z tell where the optimum is, and the curvature H. A loop keeps
the sums that this needs, and no iterates. :mod:`numpyro_dp.posterior.scores` reads them.

Points move because of earlier noise, which would bias a regression of scores on points. So each
point comes with a *shift*: the part of it that was drawn fresh in this step, with mean 0.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_dp.core import Observation

__all__ = ["MOST_LATENTS", "WARMUP", "ScoreSums", "score_sums", "with_observation"]

MOST_LATENTS = 300  # sums hold two matrices of this size
WARMUP = 0.5  # part of the steps of a run that come before the sums


class ScoreSums(NamedTuple):
    """Sums over the steps from ``begins`` on. You may publish them.

    Points are counted from ``origin``, the first point of the sums, so that no digits are lost.

    Attributes:
        begins: First step of the sums.
        count: Number of steps in the sums.
        origin: First point (d,).
        point, score, shift: Sums of points, scores and shifts (d,).
        point_square: Sum of the squared entries of the points (d,).
        noise_square: Sum of the squared standard deviations of the noise of each score (d,).
        shift_shift, score_shift: Sums of the products of shifts and scores with the shifts (d, d).
    """

    begins: Array
    count: Array
    origin: Array
    point: Array
    score: Array
    shift: Array
    point_square: Array
    noise_square: Array
    shift_shift: Array
    score_shift: Array


def score_sums(size: int, first_step: Array, num_steps: Array) -> ScoreSums:
    """Returns empty sums for a run of ``num_steps`` steps from ``first_step`` on."""
    begins = first_step + jnp.floor(WARMUP * num_steps).astype(jnp.int32)
    row, matrix, count = jnp.zeros(size), jnp.zeros((size, size)), jnp.zeros((), jnp.int32)
    return ScoreSums(begins, count, *[row] * 6, matrix, matrix)


def with_observation(sums: ScoreSums, step: Array, seen: Observation) -> ScoreSums:
    """Adds what was released in a step."""
    counts = step >= sums.begins
    origin = jnp.where(counts & (sums.count == 0), seen.point, sums.origin)
    point, weight = seen.point - origin, counts.astype(origin.dtype)
    shift = point if seen.shift is None else seen.shift
    terms = (
        point, seen.score, shift, point**2, seen.noise_scale**2,
        jnp.outer(shift, shift), jnp.outer(seen.score, shift),
    )  # fmt: skip
    # `where`, not a product: a value that overflows before the sums begin must not enter them.
    added = jax.tree.map(lambda sum_, x: sum_ + jnp.where(counts, x, 0), tuple(sums[3:]), terms)
    return ScoreSums(sums.begins, sums.count + weight.astype(jnp.int32), origin, *added)
