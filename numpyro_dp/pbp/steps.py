r"""Steps of a network's posterior: an optimiser, fed with what was released and nothing else.

Precisions and the rate of the noise move by a part :math:`\rho` of the released change, as in
:mod:`numpyro_dp.ep.damping`; what the records add to a precision is floored at a multiple of the
noise in it. The mean moves along the released slope G,

.. math:: m \leftarrow m + \rho_m\, \Lambda^{-1} G, \qquad\text{or}\qquad
    m \leftarrow m + \rho_m\, K^{-1} G.

The first is the step of stochastic expectation propagation. Weights of a network depend on each
other, so that their precisions tell little of how far a step may go; it needs hundreds of small
ones. The second takes the curvature K of :mod:`numpyro_dp.pbp.curvature`; a direction that
would change the output for its inputs by more than one predictive standard deviation (root mean
square) is shortened to that. Both have the same fixed points, where the slope is 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from numpyro_dp.pbp.estimator import Move
from numpyro_dp.pbp.model import RegressionNetwork

__all__ = ["NetworkSteps", "NetworkStepsState"]

_SMALLEST_NOISE = 1e-4  # of the variance that y may be found to have around the output

Params = dict[str, Array]


class NetworkStepsState(NamedTuple):
    """State of :class:`NetworkSteps`; all of it may be published.

    Attributes:
        step: Steps taken.
        params: Natural parameters of the posterior.
        noise: Squared standard deviation of the noise in each precision.
    """

    step: Array
    params: Params
    noise: Array


class NetworkSteps:
    """An optimiser with NumPyro's ``init``, ``get_params`` and ``update``.

    Args:
        network: The model.
        damping: Rate of precisions and noise: a number, or a function of the step number.
        step_size: Rate of the mean, likewise; that of the precisions if ``None``.
        floor: Multiple of the noise's standard deviation that a site precision is floored at.
    """

    def __init__(
        self,
        network: RegressionNetwork,
        damping: Any,
        step_size: Any,
        floor: float,
    ) -> None:
        self._network, self._floor = network, floor
        self._rate = _schedule(damping)
        self._step_size = self._rate if step_size is None else _schedule(step_size)

    def init(self, params: Params) -> NetworkStepsState:
        """Returns the first state."""
        return NetworkStepsState(jnp.zeros((), jnp.int32), params, jnp.zeros(()))

    def get_params(self, state: NetworkStepsState) -> Params:
        """Returns the natural parameters."""
        return state.params

    def update(self, move: Move, state: NetworkStepsState, **_: Any) -> NetworkStepsState:
        """Takes a step."""
        rate, size = self._rate(state.step), self._step_size(state.step)
        noise = (1 - rate) ** 2 * state.noise + (rate * move.precision_noise) ** 2
        old, prior = state.params, self._network.prior_precision(state.params)
        sites = old["weights_precision"] + rate * move.precision - prior
        precision = prior + jnp.maximum(sites, self._floor * jnp.sqrt(noise))
        mean = old["weights_linear"] / old["weights_precision"]
        direction = move.direction
        if direction is None:
            direction = move.slope / precision
        mean = mean + size * direction
        own = self._network.noise_prior[1]
        smallest = own + move.num_examples / 2 * _SMALLEST_NOISE
        params = old | {
            "weights_linear": mean * precision,
            "weights_precision": precision,
            "noise_rate": jnp.maximum(old["noise_rate"] + rate * move.rate, smallest),
        }
        return NetworkStepsState(state.step + 1, params, noise)


def _schedule(rate: Any) -> Callable[[Array], Array]:
    chosen = rate if callable(rate) else lambda _: jnp.asarray(rate)
    return lambda step: jnp.clip(jnp.asarray(chosen(step), jnp.result_type(float)), 0, 1)
