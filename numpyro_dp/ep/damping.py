r"""Damped steps in natural parameters, kept inside the domain: the optimiser of message passing.

.. math:: \theta \leftarrow \Pi\big(\theta + \rho_t\, \Delta\big).

For a normal family :math:`\Pi` floors the eigenvalues of what the records add to the prior's
precision at a multiple of the standard deviation that privacy noise has in them,

.. math:: s_t = \sigma \sqrt{\textstyle\sum_{u \le t} \rho_u^2 \prod_{u < v \le t} (1 - \rho_v)^2},

times the largest eigenvalue :math:`\sqrt{2d}` of a matrix of such noise where one is released,
so that a direction of which the noise tells more than the records is not taken for a precise one,
nor for one without a posterior. It is a function of public values and of what was released.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from numpyro_dp.ep.estimator import Move
from numpyro_dp.ep.families import Family, divide, multiply

__all__ = ["Damped", "DampedState"]

Natural = dict[str, Array]


class DampedState(NamedTuple):
    """State of :class:`Damped`.

    Attributes:
        step: Steps taken.
        natural: Natural parameters of the posterior; private iterates, may be published.
        noise: Squared standard deviation of the noise in them.
    """

    step: Array
    natural: Natural
    noise: Array


class Damped:
    """An optimiser with NumPyro's ``init``, ``get_params`` and ``update``.

    Args:
        damping: The rate, or a function of the step number.
        floor: Multiple of the noise's standard deviation that a site precision is floored at.
        domain: ``() -> (family, prior)``, known once the model has been read.
    """

    def __init__(
        self,
        damping: float | Callable[[Array], Array],
        floor: float,
        domain: Callable[[], tuple[Family, Natural]],
    ) -> None:
        self._rate = damping if callable(damping) else lambda _: jnp.asarray(damping)
        self._floor = floor
        self._domain = domain

    def init(self, params: Natural) -> DampedState:
        """Returns the first state."""
        return DampedState(jnp.zeros((), jnp.int32), params, jnp.zeros(()))

    def get_params(self, state: DampedState) -> Natural:
        """Returns the natural parameters."""
        return state.natural

    def update(self, gradient: Move, state: DampedState, **_: Any) -> DampedState:
        """Takes a step."""
        family, prior = self._domain()
        rate = jnp.asarray(self._rate(state.step), jnp.result_type(float))
        noise = (1 - rate) ** 2 * state.noise + (rate * gradient.noise_scale) ** 2
        moved = {
            name: value + rate * gradient.direction[name] for name, value in state.natural.items()
        }
        smallest = self._floor * jnp.sqrt(noise)
        if set(prior) == {"linear", "precision"}:
            if prior["precision"].ndim == 2:  # the largest eigenvalue of a matrix of noise
                smallest *= math.sqrt(2 * len(prior["linear"]))
            natural = multiply(prior, family.project(divide(moved, prior), smallest))
        else:
            natural = family.project(moved, jnp.maximum(smallest, 1e-6))
        return DampedState(state.step + 1, natural, noise)
