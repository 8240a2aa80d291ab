r"""The posterior of a network that includes the noise of privacy.

A run released the mean m of the weights with noise of covariance M
(:class:`~numpyro_dp.methods.pbp.network_sites.NetworkStepsState`), and what the records add to
their precisions, :math:`D = \mathrm{diag}(\Lambda_j - \lambda)`. With :math:`\eta = \Lambda m`,

.. math:: \eta \mid w \sim N(D w,\; D + \Lambda M \Lambda),

so the posterior of the weights is normal with

.. math::
    P = \lambda I + D (D + \Lambda M \Lambda)^{-1} D, \qquad
    P\,\mathrm{mean} = D (D + \Lambda M \Lambda)^{-1} \eta.

Without noise this is :math:`N(m, \Lambda^{-1})`. With little information it is the prior. If slopes
were released in coordinates of the curvature K, each step adds noise of covariance
:math:`\propto K^{-1}`, and takes back a part of the noise before it, as if inputs were the invented
ones. So directions that the output hardly depends on return to the prior first.

What the records add to the noise precision counts as far as its rate exceeds the noise of privacy,
and what noise in the weights adds to residuals. Everything here is a function of released values
and has no privacy cost.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_dp.methods.pbp.model import RegressionNetwork
from numpyro_dp.methods.pbp.network_curvature import network_curvature
from numpyro_dp.methods.pbp.network_sites import NetworkStepsState

_SEEN = 3.0  # standard errors above which a released precision is more than its noise


def network_draws(
    network: RegressionNetwork,
    num_inputs: int,
    num_examples: int,
    state: NetworkStepsState,
    ridge: float | None,
) -> Callable[[Array, int], dict[str, Array]]:
    """Returns draws of the latents of ``network`` after the steps of a private run.

    Args:
        network: The model.
        num_inputs: Number of inputs of the network.
        num_examples: Number of records.
        state: The state after the last step.
        ridge: r in :mod:`numpyro_dp.methods.pbp.network_curvature`, or ``None`` for no curvature.
    """
    params = state.params
    precision, eta = (
        np.asarray(params[f"weights_{name}"], np.float64) for name in ("precision", "linear")
    )
    prior = float(network.prior_precision(params))
    noise = np.asarray(state.mean_noise, np.float64)
    seen = np.asarray(state.released) > _SEEN * np.sqrt(float(state.noise))
    sites = np.where(seen, np.maximum(precision - prior, 0), 0)
    curvature = network_curvature(network, num_inputs, num_examples, params, ridge or 0.0)
    spread = np.diag(noise)  # weights depend on each other: no step need take noise back
    if ridge is not None:
        inverse_root = np.asarray(curvature.inverse, np.float64)
        own = num_examples * np.asarray(curvature.unit, np.float64) + prior * np.eye(len(noise))
        kept, axes = np.linalg.eigh(inverse_root @ own @ inverse_root.T)
        left = _left(float(state.moved), int(state.step), np.clip(kept, 0, 1))
        root = inverse_root.T @ (axes * np.sqrt(left * noise[0]))
        spread = root @ root.T
    released = np.diag(sites) + precision[:, None] * spread * precision
    informed = np.flatnonzero(sites > 0)  # the others keep their prior
    block = np.ix_(informed, informed)
    sides = np.column_stack([np.diag(sites)[block], eta[informed]])
    # Rounding may make it singular, and the budget is spent.
    weights = np.linalg.pinv(released[block], hermitian=True) @ sides
    total, linear = prior * np.eye(len(eta)), np.zeros_like(eta)
    total[block] += sites[informed, None] * weights[:, :-1]
    linear[informed] = sites[informed] * weights[:, -1]
    values, axes = np.linalg.eigh(total)
    root = axes / np.sqrt(np.maximum(values, prior))  # smaller ones are rounding errors
    mean = root @ (root.T @ linear)
    concentration, rate = network.noise_prior
    # Noise in the weights makes residuals larger.
    larger = float(np.sum(np.asarray(curvature.unit, np.float64) * spread))
    larger *= num_examples / 2 * float(curvature.predicted)
    added = max(float(params["noise_rate"]) - rate - larger, 1e-30)
    share = added**2 / (added**2 + larger**2 + float(state.rate_noise))
    concentration += share * (float(params["noise_concentration"]) - concentration)
    rate += share * added

    def draws(rng_key: Array, num_samples: int) -> dict[str, Array]:
        own, noises, sizes = jax.random.split(rng_key, 3)
        normal = np.asarray(jax.random.normal(own, (num_samples, len(mean))), np.float64)
        weights = jnp.asarray(mean + normal @ root.T, jnp.result_type(float))
        found = {
            "weights": weights,
            "noise_precision": jax.random.gamma(noises, concentration, (num_samples,)) / rate,
        }
        if network.weight_precision is None:  # given the weights, it is a gamma distribution
            shape = 6 + len(mean) / 2
            scale = 6 + jnp.sum(weights**2, axis=1) / 2
            found["weight_precision"] = jax.random.gamma(sizes, shape, (num_samples,)) / scale
        return found

    return draws


def _left(moved: float, num_steps: int, pull: np.ndarray) -> np.ndarray:
    """Part of the noise of all steps that is left after the last.

    A step at rate s takes back the part s times ``pull`` of the noise before it. With T steps,
    (1 - a^(2 T)) / (T (1 - a^2)) is left, with a = 1 - s pull.
    """
    if num_steps == 0:
        return np.ones_like(pull)
    square = (1 - moved / num_steps * pull) ** 2
    powers = np.where(
        square < 1, (1 - square**num_steps) / np.maximum(1 - square, 1e-12), num_steps
    )
    return np.minimum(powers / num_steps, 1)
