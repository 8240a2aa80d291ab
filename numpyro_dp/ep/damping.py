r"""Damped steps in natural parameters, kept inside the domain: the optimiser of message passing.

.. math:: \theta \leftarrow \Pi\big(\theta + \rho_t\, \Delta\big).

For a normal family, the records add a matrix to the prior's precision. :math:`\Pi` floors the
eigenvalues of this matrix at a multiple of the standard deviation of their privacy noise,

.. math:: s_t = \sigma \sqrt{\textstyle\sum_{u \le t} \rho_u^2 \prod_{u < v \le t} (1 - \rho_v)^2}.

If a full matrix is released, :math:`s_t` is multiplied by :math:`\sqrt{2d}`, the largest eigenvalue
of a matrix of such noise. Without the floor, noise alone could make a direction look precise or
improper. :math:`\Pi` keeps the slope that the records have at the posterior's last mean, because a
floor on natural parameters centred at the origin would move the mean. Other families are only kept
inside their domain. The step reads only public and released values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from numpyro_dp.ep.estimator import Move
from numpyro_dp.ep.families import divide, multiply
from numpyro_dp.ep.gaussian import cavity_of, centre

__all__ = ["Damped", "DampedState"]

Natural = dict[str, Array]


class DampedState(NamedTuple):
    """State of :class:`Damped`.

    Attributes:
        step: Number of steps taken.
        natural: Natural parameters of the posterior. They may be published.
        noise: Variance of the noise in the precision.
    """

    step: Array
    natural: Natural
    noise: Array


class Damped:
    """An optimiser with NumPyro's ``init``, ``get_params`` and ``update``.

    Args:
        damping: The rate, or a function of the step number.
        floor: Smallest precision from records, in standard deviations of its noise.
    """

    def __init__(self, damping: float | Callable[[Array], Array], floor: float) -> None:
        self._rate = damping if callable(damping) else lambda _: jnp.asarray(damping)
        self._floor = floor

    def init(self, params: Natural) -> DampedState:
        """Returns the initial state."""
        return DampedState(jnp.zeros((), jnp.int32), params, jnp.zeros(()))

    def get_params(self, state: DampedState) -> Natural:
        """Returns the natural parameters."""
        return state.natural

    def update(self, move: Move, state: DampedState, **_: Any) -> DampedState:
        """Takes a step."""
        problem = move.problem
        family, prior = problem.latents.family, problem.prior
        rate = jnp.clip(jnp.asarray(self._rate(state.step), jnp.result_type(float)), 0, 1)
        noise = (1 - rate) ** 2 * state.noise + (rate * move.noise_scale) ** 2
        moved = {name: value + rate * move.direction[name] for name, value in state.natural.items()}
        if problem.latents.is_normal:
            smallest = self._floor * jnp.sqrt(noise)
            # Centre at the last mean, so that the floor keeps the records' slope there.
            at = cavity_of(state.natural).mean
            floored = family.project(centre(divide(moved, prior), at), smallest)
            natural = multiply(prior, centre(floored, -at))
        else:
            natural = family.project(moved, 1e-6)
        return DampedState(state.step + 1, natural, noise)
