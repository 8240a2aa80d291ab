r"""Steps of a network's posterior: an optimiser that reads only released values.

Precisions and the rate of the noise move by a fraction :math:`\rho` of the released change, as in
:mod:`numpyro_dp.ep.damping`. The part of a precision that comes from records is floored at a
multiple of its noise. The mean moves along the released slope G,

.. math:: m \leftarrow m + \rho_m\, \Lambda^{-1} G, \qquad\text{or}\qquad
    m \leftarrow m + \rho_m\, K^{-1} G.

The first is the step of stochastic expectation propagation. The weights of a network depend on each
other, so their separate precisions are a poor guide to the length of a step, and this form needs
hundreds of small steps. The second uses the curvature K of :mod:`numpyro_dp.pbp.curvature`. It
shortens a step that would change the output for the invented inputs by more than one predictive
standard deviation (root mean square). Both have the same fixed points, at which the slope is 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from numpyro_dp.pbp.estimator import Move
from numpyro_dp.pbp.model import RegressionNetwork

__all__ = ["NetworkSteps", "NetworkStepsState"]

_SMALLEST_NOISE = 1e-4  # smallest noise variance that the records may give

Params = dict[str, Array]


class NetworkStepsState(NamedTuple):
    """State of :class:`NetworkSteps`. All of it may be published.

    Attributes:
        step: Number of steps taken.
        params: Natural parameters of the posterior.
        noise: Variance of the noise in each precision.
    """

    step: Array
    params: Params
    noise: Array


class NetworkSteps:
    """An optimiser with NumPyro's ``init``, ``get_params`` and ``update``.

    Args:
        network: The model.
        damping: Rate of precisions and noise: a number, or a function of the step number.
        step_size: Rate of the mean: a number or a function of the step number. ``None`` means
            ``damping``.
        floor: Smallest precision from records, in standard deviations of its noise.
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
        """Returns the initial state."""
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
        # The released rate is noisy: the floor keeps the noise variance positive.
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
