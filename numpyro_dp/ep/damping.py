r"""Damped steps in natural parameters, kept inside the domain: the optimiser of message passing.

.. math:: \theta \leftarrow \Pi\big(\theta + \rho_t\, \Delta\big).

For a normal family :math:`\Pi` floors the eigenvalues of what the records add to the prior's
precision at a multiple of the standard deviation that privacy noise has in them,

.. math:: s_t = \sigma \sqrt{\textstyle\sum_{u \le t} \rho_u^2 \prod_{u < v \le t} (1 - \rho_v)^2},

times the largest eigenvalue :math:`\sqrt{2d}` of a matrix of such noise where one is released,
so that a direction of which the noise tells more than the records is not taken for a precise one,
nor for one without a posterior. The slope that the records have at the posterior's last mean stays
what it was: floored at the origin, a precision would take the mean along with it. Other families
are only kept inside their domain. All of it is a function of public values and of what was
released.
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
        step: Steps taken.
        natural: Natural parameters of the posterior; private iterates, may be published.
        noise: Squared standard deviation of the noise in the precision.
    """

    step: Array
    natural: Natural
    noise: Array


class Damped:
    """An optimiser with NumPyro's ``init``, ``get_params`` and ``update``.

    Args:
        damping: The rate, or a function of the step number.
        floor: Multiple of the noise's standard deviation that a site precision is floored at.
    """

    def __init__(self, damping: float | Callable[[Array], Array], floor: float) -> None:
        self._rate = damping if callable(damping) else lambda _: jnp.asarray(damping)
        self._floor = floor

    def init(self, params: Natural) -> DampedState:
        """Returns the first state."""
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
            at = cavity_of(state.natural).mean
            floored = family.project(centre(divide(moved, prior), at), smallest)
            natural = multiply(prior, centre(floored, -at))
        else:
            natural = family.project(moved, 1e-6)
        return DampedState(state.step + 1, natural, noise)
