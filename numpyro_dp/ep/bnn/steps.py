r"""Steps of a network's posterior: an optimiser, fed with what was released and nothing else.

Precisions and the rate of the noise move by a part :math:`\rho` of the released change, as in
:mod:`numpyro_dp.ep.damping`; what the records add to a precision is floored at a multiple of the
noise in it. The mean moves along the released slope G,

.. math:: m \leftarrow m + \rho_m\, \Lambda^{-1} G, \qquad\text{or}\qquad
    m \leftarrow m + \rho_m\, (K + r I)^{-1} G.

The first is the step of stochastic expectation propagation. Weights of a network depend on each
other, so that their precisions tell little of how far a step may go; it needs hundreds of small
ones. The second takes the curvature that the network itself has at m for *invented* inputs,

.. math:: K = \Lambda_0 + N\, E_{x \sim N(0, I)}\Big[
    \frac{1}{s_f + E[1/\gamma]}\, \frac{\partial f}{\partial m}\frac{\partial f}{\partial m}^\top
    \Big],

which reads no record: all inputs should have about unit scale for it. A direction that would
change the output for these inputs by more than one predictive standard deviation (root mean square)
is shortened to that. Both have the same fixed points, where the slope is 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_dp.ep.bnn.estimator import Move
from numpyro_dp.ep.bnn.model import RegressionNetwork
from numpyro_dp.ep.bnn.moments import output_moments

__all__ = ["NetworkSteps", "NetworkStepsState"]

_INVENTED = 1000  # inputs for the curvature
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
        ridge: r above; ``None`` for the step by the posterior's own precision.
        floor: Multiple of the noise's standard deviation that a site precision is floored at.
    """

    def __init__(
        self,
        network: RegressionNetwork,
        damping: Any,
        step_size: Any,
        ridge: float | None,
        floor: float,
    ) -> None:
        self._network, self._ridge, self._floor = network, ridge, floor
        self._rate = _schedule(damping)
        self._step_size = self._rate if step_size is None else _schedule(step_size)

    def init(self, params: Params) -> NetworkStepsState:
        """Returns the first state."""
        return NetworkStepsState(jnp.zeros((), jnp.int32), params, jnp.zeros(()))

    def get_params(self, state: NetworkStepsState) -> Params:
        """Returns the natural parameters."""
        return state.params

    def update(self, gradient: Move, state: NetworkStepsState, **_: Any) -> NetworkStepsState:
        """Takes a step."""
        rate, size = self._rate(state.step), self._step_size(state.step)
        noise = (1 - rate) ** 2 * state.noise + (rate * gradient.precision_noise) ** 2
        old, prior = state.params, self._network.prior_precision(state.params)
        sites = old["weights_precision"] + rate * gradient.precision - prior
        precision = prior + jnp.maximum(sites, self._floor * jnp.sqrt(noise))
        mean = old["weights_linear"] / old["weights_precision"]
        mean = mean + size * self._direction(gradient, old, mean, precision, prior)
        own = self._network.noise_prior[1]
        smallest = own + gradient.num_examples / 2 * _SMALLEST_NOISE
        params = old | {
            "weights_linear": mean * precision,
            "weights_precision": precision,
            "noise_rate": jnp.maximum(old["noise_rate"] + rate * gradient.rate, smallest),
        }
        return NetworkStepsState(state.step + 1, params, noise)

    def _direction(
        self, gradient: Move, params: Params, mean: Array, precision: Array, prior: Array
    ) -> Array:
        if self._ridge is None:
            return gradient.slope / precision
        variance = 1 / params["weights_precision"]
        noise = params["noise_rate"] / (params["noise_concentration"] - 1)
        number = gradient.num_examples
        unit = _curvature(self._network, gradient.num_inputs, mean, variance, noise)
        # The last part keeps the factorisation from failing in single precision.
        ridge = prior + self._ridge + 1e-6 * number * jnp.trace(unit)
        curvature = number * unit + ridge * jnp.eye(mean.size, dtype=mean.dtype)
        found = jax.scipy.linalg.solve(curvature, gradient.slope, assume_a="pos")
        change = jnp.sqrt(jnp.maximum(found @ unit @ found, 0))
        shorter = found / jnp.maximum(change, 1)
        return jnp.where(jnp.all(jnp.isfinite(shorter)), shorter, 0)


def _curvature(
    network: RegressionNetwork, num_inputs: int, mean: Array, variance: Array, noise: Array
) -> Array:
    """Expected outer product of the output's slope, over invented inputs, in units of its noise."""
    layout = network.layout(num_inputs)
    inputs = jax.random.normal(jax.random.key(0), (_INVENTED, num_inputs), mean.dtype)

    def weighted_slope(x: Array) -> Array:
        output = jax.value_and_grad(lambda m: output_moments(layout, m, variance, x), has_aux=True)
        (_, spread), slope = output(mean)
        return slope / jnp.sqrt(spread + noise)

    slopes = jax.vmap(weighted_slope)(inputs)
    return slopes.T @ slopes / _INVENTED


def _schedule(rate: Any) -> Callable[[Array], Array]:
    chosen = rate if callable(rate) else lambda _: jnp.asarray(rate)
    return lambda step: jnp.clip(jnp.asarray(chosen(step), jnp.result_type(float)), 0, 1)
