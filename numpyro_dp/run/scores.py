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

MOST_LATENTS = 300  # sums hold three matrices of this size
WARMUP = 0.5  # part of the steps of a run that come before the sums


class ScoreSums(NamedTuple):
    """Sums over the steps from ``begins`` on. You may publish them.

    Points are counted from ``origin``, the first point of the sums, so that no digits are lost.

    Attributes:
        begins: First step of the sums.
        count: Number of steps in the sums.
        origin: First point (d,).
        point, score: Sums of points and scores (d,).
        point_square: Sum of the squared entries of the points (d,).
        noise_square: Sum of the squared standard deviations of the noise of each score (d,).
        shift: Sum of the shifts (d,).
        shift_shift, score_shift, score_score: Sums of the products of shifts with shifts, of
            scores with shifts, and of scores with scores (d, d).
        curvature: Sum of the released curvatures (d, d) or (d,). If there are any, the four
            fields above are ``None``.
        curvature_square: Sum of the squared standard deviations of their noise.
    """

    begins: Array
    count: Array
    origin: Array
    point: Array
    score: Array
    point_square: Array
    noise_square: Array
    shift: Array | None
    shift_shift: Array | None
    score_shift: Array | None
    score_score: Array | None
    curvature: Array | None
    curvature_square: Array | None


def score_sums(like: Observation, first_step: Array, num_steps: Array) -> ScoreSums:
    """Returns empty sums for a run of ``num_steps`` steps from ``first_step`` on.

    ``like`` has the shapes of an observation.
    """
    begins = first_step + jnp.floor(WARMUP * num_steps).astype(jnp.int32)
    origin, count = jnp.zeros(like.point.shape), jnp.zeros((), jnp.int32)
    shapes = jax.eval_shape(lambda seen: _terms(seen, seen.point), like)
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    return ScoreSums(begins, count, origin, **zeros)


def with_observation(sums: ScoreSums, step: Array, seen: Observation) -> ScoreSums:
    """Adds what was released in a step."""
    counts = step >= sums.begins
    origin = jnp.where(counts & (sums.count == 0), seen.point, sums.origin)
    # `where`, not a product: a value that overflows before the sums begin must not enter them.
    added = {
        name: None if term is None else getattr(sums, name) + jnp.where(counts, term, 0)
        for name, term in _terms(seen, origin).items()
    }
    return ScoreSums(sums.begins, sums.count + counts.astype(jnp.int32), origin, **added)


def _terms(seen: Observation, origin: Array) -> dict[str, Array | None]:
    """What an observation adds to each sum."""
    point = seen.point - origin
    found: dict[str, Array | None] = dict.fromkeys(ScoreSums._fields[3:])
    found |= {"point": point, "score": seen.score, "point_square": point**2}
    found["noise_square"] = seen.noise_scale**2
    if seen.curvature is not None:
        return found | {
            "curvature": seen.curvature, "curvature_square": jnp.asarray(seen.curvature_noise) ** 2,
        }  # fmt: skip
    shift = point if seen.shift is None else seen.shift
    return found | {
        "shift": shift,
        "shift_shift": jnp.outer(shift, shift),
        "score_shift": jnp.outer(seen.score, shift),
        "score_score": jnp.outer(seen.score, seen.score),
    }
