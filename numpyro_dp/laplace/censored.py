r"""The signal of a record with a censored outcome.

A right-censored record is observed until a time T, at which it has an event (:math:`\delta = 1`)
or leaves. The model does not describe how long a record could be observed at most. So outcomes
cannot be simulated. Still, the event's counting process minus its compensator is a martingale under
the true latents. So is its integral over any function of time that does not look ahead. With the
hazard :math:`\lambda_z` at latents z and :math:`h_z(u) = \nabla_z \log \lambda_z(u)`, the signal is

.. math::
    s_i &= v_i \operatorname{mean}_r \Big[ \delta\, c(W h_{z_r}(T))
        - \int_0^T c(W h_{z_r}(u))\, \lambda_{t_r}(u)\, du \Big], \\
    H_i &= v_i \operatorname{sym} \operatorname{mean}_r \int_0^T
        c(W h_{z_r}(u))\, (W h_{t_r}(u))^\top \lambda_{t_r}(u)\, du,

Without the clip c, :math:`s_i` is the score itself. If T is later than a time :math:`L_i`, the
integrals end at :math:`L_i`, and a later event does not count. :math:`L_i` is the last time before
the score could exceed its bound. It depends only on :math:`x_i` and the latents, and so causes no
bias. The weight :math:`v_i` bounds the curvature, as for other outcomes. Left-censored outcomes use
the reversed hazard, with time running backwards.

Reference:
    For the martingale: O. Aalen (1978), Nonparametric inference for a family of counting processes,
    Ann. Statist. 6. The bounded version is the project's own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from numpyro_dp.laplace.staged_scores import (
    TINY,
    Scores,
    entries,
    outer_products,
    partners,
    shortened,
)
from numpyro_dp.model.public import own_constants

if TYPE_CHECKING:
    from numpyro_dp.laplace.signal import Request

_NODES = 6  # of the quadrature over time
# Times, in units of the compensator, at which the bound is checked. An event is later than the last
# of them with a probability below .02.
_GRID = 4.0 * (np.arange(1, 9) / 8) ** 2


def censored(scores: Scores, request: Request, draws: Array, _: Array) -> tuple[Array, ...]:
    """The entries of the signal divided by their bounds, for a censored outcome."""
    outcomes, (score_clip, curvature_clip, excess_clip) = scores.outcomes, request.clips
    # Early is a release before the stages. It has other entries, and no weight.
    others, early = partners(draws, request.kind), request.kind > 0
    places, widths, grid = _quadrature()

    def at(passed: Array) -> tuple[Array, Array, Array]:
        """Clipped scores, scores of partners, and products of norms, at times (R, K)."""

        def one(draw: Array, partner: Array, passed: Array) -> tuple[Array, Array]:
            def slopes(value: Array) -> tuple[Array, Array]:
                outcome = outcomes.as_outcome(value, scores.own)
                return scores.at(draw, outcome), scores.at(partner, outcome, weighted=False)

            return jax.vmap(slopes)(outcomes.time_of(partner, scores.example, passed))

        there, slope = lax.optimization_barrier(jax.vmap(one)(draws, others, passed))
        there, norm = scores.bounded(there)
        slope, slope_norm = scores.bounded(slope)
        short = jnp.minimum(norm, score_clip)
        return shortened(there, norm, score_clip), slope, short * slope_norm

    there, _, curved = at(jnp.broadcast_to(grid, (len(draws), len(grid))))
    steps = jnp.diff(grid, prepend=0.0)
    gone = jnp.cumsum(steps[:, None] * _middles(there), axis=1)
    spent = jnp.cumsum(steps * _middles(curved), axis=1)
    fits = early | (_larger(scores, gone, there) <= score_clip)
    # A time at which the bound holds again, after one at which it did not, does not count.
    fits = jnp.cumprod(fits, axis=1, dtype=grid.dtype)
    end = jnp.max(fits * grid, axis=1)
    # The curvature up to the end of all times, not up to the observed one. A weight that saw the
    # outcome would cause a bias.
    most = jnp.mean(jnp.max(fits * spent, axis=1))
    weight = jnp.where(early, 1, jnp.minimum(1, curvature_clip / (most + TINY)))

    def own(draw: Array, partner: Array) -> tuple[Array, Array]:
        (value,) = scores.own.values()
        return outcomes.passed(partner, scores.example, value), scores.at(draw, scores.own)

    passed, last = lax.optimization_barrier(jax.vmap(own)(draws, others))
    seen = jnp.minimum(passed, end)
    there, slope, _ = at(seen[:, None] * places)
    mass = seen[:, None] * widths
    gone = jnp.sum(mass[..., None] * there, axis=1)
    event = outcomes.event(scores.example) & (passed < end)
    jump, jump_norm = scores.bounded(last)
    each = event[:, None] * shortened(jump, jump_norm, score_clip) - gone
    # The release of scales needs a vector r along the row. By Cauchy, r r' is at most H.
    row = gone / jnp.sqrt(seen + TINY)[:, None]
    score = weight * jnp.mean(jnp.where(early, row, each), axis=0)
    product = weight * outer_products(mass[..., None] * there, slope) / len(draws)
    norm = scores.bounded(there)[1]
    power = weight**2 * jnp.mean(jnp.sum(mass * norm**2, axis=1))
    # The compensator of the square of the jump, so the excess has mean 0 in a correct model.
    likely = jnp.sum(mass * jnp.minimum(norm, excess_clip) ** 2, axis=1)
    excess = weight**2 * jnp.mean(event * jnp.minimum(jump_norm, excess_clip) ** 2 - likely)
    # A quadrature may be too large, and `entries` does not clip the power of a stage.
    power = jnp.minimum(power, score_clip**2)
    return entries(scores, request, score, product, power, excess, weight)


def _middles(values: Array) -> Array:
    """Means of neighbours along the second axis. The first value stays as it is."""
    return (values + jnp.concatenate([values[:, :1], values[:, :-1]], axis=1)) / 2


def _larger(scores: Scores, gone: Array, jump: Array) -> Array:
    """The larger norm of the score with and without an event now."""
    return jnp.maximum(scores.bounded(gone)[1], scores.bounded(jump - gone)[1])


def _quadrature() -> tuple[Array, Array, Array]:
    """Nodes x^3 on (0, 1) with Gauss-Legendre nodes x, their weights, and the grid.

    The cube puts more nodes near 0, because log hazards may grow as log u there.
    """
    nodes, weights = np.polynomial.legendre.leggauss(_NODES)
    nodes = (nodes + 1) / 2
    found = nodes**3, 3 * nodes**2 * weights / 2, _GRID
    return own_constants(*(x.astype(np.float32) for x in found))
