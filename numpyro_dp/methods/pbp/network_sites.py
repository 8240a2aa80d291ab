r"""Stochastic expectation propagation of a network, in the form of a private step.

The posterior is :math:`q = \prod_j N(w_j; m_j, \lambda_j^{-1})\,\mathrm{Gamma}(\gamma; a, b)`. One
factor f stands for the average record. Given the cavity q / f, record i has the site

.. math::
    h = g^2 - 2\,\frac{\partial\log Z}{\partial v}, \quad \Lambda_i = \frac{h}{1 - v h}, \quad
    \eta_i - \Lambda_i m = \frac{g}{1 - v h}, \quad \Delta a_i = \tfrac12, \quad
    \Delta b_i = \tfrac12\big((y - f)^2 + s_f\big)

(see :mod:`numpyro_dp.methods.pbp.network_moments`). 1 - vh is floored at 0.1. A step releases the
sum over records of the site's difference to f, in three parts that are clipped jointly:

.. math:: u_i = \big(\tau\,(\eta_i - \Lambda_i m),\; \tau w\,\Lambda_i,\; w_b\,\Delta b_i\big),

with :math:`\tau = E[1/\gamma]` at the iterate. :math:`\tau` makes the first part a residual times
the slope of the network, so its size does not change when the estimate of the noise shrinks.
Precisions are released for each weight, or as one number per layer. :math:`\Delta a` is not
released, because N is public.

In coordinates of the curvature (:mod:`numpyro_dp.methods.pbp.network_curvature`) the parts are

.. math:: u_i = \big(\sqrt{N / d}\; L^{-1} (\eta_i - \Lambda_i m),\; \pi w\,\Lambda_i,\;
    w_b\,\Delta b_i / \pi\big),

with :math:`\pi` the mean of :math:`s_f + E[1/\gamma]` for the invented inputs. The root mean square
of the first part is then about the record's residual in predictive standard deviations. This holds
for any network and any units of y. Equal noise in each direction adds the least error to the
output. The last part is half a squared residual in the same units.

**Steps.** The optimiser reads only released values. Precisions and the rate of the noise move by a
fraction :math:`\rho` of the released change, as in :mod:`numpyro_dp.methods.ep.stochastic_ep`. A
precision that comes from records counts as far as it exceeds its noise, and so does its slope. The
mean moves along the released slope G,

.. math:: m \leftarrow m + \rho_m\, \Lambda^{-1} G, \qquad\text{or}\qquad
    m \leftarrow m + \rho_m\, K^{-1} G.

The first is the step of stochastic expectation propagation. The weights of a network depend on each
other, so their separate precisions are a poor guide to the length of a step, and this form needs
hundreds of small steps. The second uses the curvature K
(:mod:`numpyro_dp.methods.pbp.network_curvature`). It shortens a step that would change the output
for the invented inputs by more than one predictive standard deviation (root mean square). Both have
the same fixed points, at which the slope is 0.

Reference:
    Hernández-Lobato, Adams (2015), Probabilistic backpropagation, ICML; Vinaroz, Park (2022),
    Differentially private stochastic expectation propagation, TMLR, section 6.2. The papers match
    the moments of :math:`\gamma` by differences of log Z, which cancel in single precision.
    Here :math:`\Delta b` comes from a variational step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from numpyro_dp.core import Estimator, Released
from numpyro_dp.extend import RecordsProblem
from numpyro_dp.methods.normal import Cavity, counted_share, site_from_slopes
from numpyro_dp.methods.pbp.model import RegressionNetwork
from numpyro_dp.methods.pbp.network_curvature import Curvature, network_curvature
from numpyro_dp.methods.pbp.network_moments import Layers, record_slopes
from numpyro_dp.methods.shared import Rate, schedule

_COUNTS_HALF = 2.0  # a precision of that many standard deviations of its noise counts half
_SMALLEST_NOISE = 1e-4  # smallest noise variance that the records may give

Params = dict[str, Array]


class NetworkCavity(NamedTuple):
    r"""The cavity from which a record's site is computed.

    Attributes:
        weights: Moments of the weights.
        noise: :math:`E[1/\gamma]`.
    """

    weights: Cavity
    noise: Array


class NetworkMove(NamedTuple):
    """Input of the optimiser.

    Attributes:
        slope: Estimated slope of the log posterior in the mean of the weights, at the mean of q.
            ``None`` if it was released in coordinates of the network's curvature.
        direction: Change of the mean in coordinates of the curvature. Without them the slope.
        precision: Estimated change of the precision of each weight.
        rate: Estimated change of the rate of the noise precision.
        noise: Standard deviation of the noise in each entry of ``slope``, or in each coordinate of
            the curvature that ``direction`` comes from.
        precision_noise: Standard deviation of the noise in each entry of ``precision``.
        rate_noise: Standard deviation of the noise in ``rate``.
        num_examples: Number of records.
    """

    slope: Array | None
    direction: Array
    precision: Array
    rate: Array
    noise: Array
    precision_noise: Array
    rate_noise: Array
    num_examples: int


class _NetworkStep(NamedTuple):
    cavity: NetworkCavity
    factor: Params  # the mean factor, centred at the cavity's mean
    unit: Array
    shift: Array  # mean of the cavity minus mean of q
    curvature: Curvature | None


def network_site(layout: Layers, cavity: NetworkCavity, x: Array, y: Array) -> dict[str, Array]:
    """Returns the site of one record, centred at the cavity's mean.

    A site that is not finite is replaced by one that leaves weights and noise as they are.

    Returns:
        ``linear`` and ``precision``, one number per weight, and ``rate``.
    """
    mean, variance = cavity.weights
    found = record_slopes(layout, mean, variance, cavity.noise, x, y)
    site = site_from_slopes(cavity.weights, found.mean, found.mean**2 - 2 * found.variance)
    site["rate"] = ((y - found.output) ** 2 + found.spread) / 2
    good = jnp.all(jnp.array([jnp.all(jnp.isfinite(part)) for part in site.values()]))
    nothing = {"linear": 0.0, "precision": 0.0, "rate": cavity.noise / 2}
    return {name: jnp.where(good, part, nothing[name]) for name, part in site.items()}


def network_ep(
    network: RegressionNetwork,
    by_layer: bool,
    precision_weight: float,
    noise_weight: float,
    ridge: float | None,
) -> Callable[[RecordsProblem], Estimator]:
    """Builds the estimator.

    Args:
        network: The model.
        by_layer: Releases the mean precision of each layer, not the precision of each weight.
        precision_weight: w above.
        noise_weight: w_b above.
        ridge: r in :mod:`numpyro_dp.methods.pbp.network_curvature`, or ``None`` for no curvature.

    Guarantee:
        The signal reads one record. ``prepare`` and ``pull_back`` read none. If a record's site is
        not finite, ``network_site`` replaces it, and its term is clipped like any other. A term
        that overflows counts as 0.
    """

    def build(problem: RecordsProblem) -> Estimator:
        ((inputs,), _), *_ = problem.records.layout.shapes
        layout, number = network.layout(inputs), problem.num_examples

        def prepare(_: Array, params: Params) -> _NetworkStep:
            public = _public(network, number, params)
            if ridge is None:
                return public
            curvature = network_curvature(network, inputs, number, params, ridge)
            return public._replace(unit=curvature.predicted, curvature=curvature)

        def signal(public: _NetworkStep, example: tuple[Array, ...]) -> dict[str, Array]:
            x, y = (part.astype(jnp.result_type(float)) for part in example)
            site = network_site(layout, public.cavity, x, y)
            found = {name: site[name] - public.factor[name] for name in site}
            precision = found["precision"]
            precision = layout.means(precision) if by_layer else precision
            linear, noise = found["linear"], found["rate"]
            if public.curvature is None:
                linear = public.unit * linear
            else:
                linear, noise = public.curvature.whiten(linear), noise / public.unit
            return {
                "linear": linear,
                "precision": public.unit * precision_weight * precision,
                "noise": noise_weight * noise,
            }

        def pull_back(public: _NetworkStep, released: Released) -> NetworkMove:
            total, unit, curvature = released.total, public.unit, public.curvature
            noise = jnp.asarray(released.noise_scale)
            precision = total["precision"] / (unit * precision_weight)
            precision = layout.repeat(precision) if by_layer else precision
            correction = precision * public.shift
            if curvature is None:
                slope = direction = total["linear"] / unit + correction
                scale, rate_unit = unit, 1.0
            else:
                direction = curvature.direction(total["linear"] + curvature.whiten(correction))
                slope, scale, rate_unit = None, curvature.scale, unit
            to_rate = rate_unit / noise_weight
            noises = noise / scale, noise / (precision_weight * unit), noise * to_rate
            return NetworkMove(
                slope, direction, precision, total["noise"] * to_rate, *noises, number
            )

        return Estimator(prepare, signal, pull_back)

    return build


def _public(network: RegressionNetwork, number: int, params: Params) -> _NetworkStep:
    """Cavity and mean factor, computed from released natural parameters."""
    linear, precision = params["weights_linear"], params["weights_precision"]
    concentration, rate = params["noise_concentration"], params["noise_rate"]
    own = {name: value / number for name, value in network.beyond_prior(params).items()}
    variance = 1 / (precision - own["precision"])
    mean = (linear - own["linear"]) * variance
    noise = (rate - own["rate"]) / (concentration - 0.5 - 1)
    centred = own | {"linear": own["linear"] - own["precision"] * mean}
    cavity = NetworkCavity(Cavity(mean, variance), noise)
    return _NetworkStep(
        cavity, centred, rate / (concentration - 1), mean - linear / precision, None
    )


class NetworkStepsState(NamedTuple):
    """State of :class:`NetworkSteps`. All of it may be published.

    Attributes:
        step: Number of steps taken.
        params: Natural parameters of the posterior.
        released: Running mean of the released precisions, without shrinkage.
        noise: Variance of the noise in each precision.
        mean_noise: Variance of the noise that all steps added to the mean of each weight, or of
            each coordinate of the curvature. Later steps take a part of it back.
        moved: Sum of the rates of the mean.
        rate_noise: Variance of the noise in the rate.
    """

    step: Array
    params: Params
    released: Array
    noise: Array
    mean_noise: Array
    moved: Array
    rate_noise: Array


class NetworkSteps:
    """An optimiser with NumPyro's ``init``, ``get_params`` and ``update``.

    Args:
        network: The model.
        damping: Rate of precisions and noise: a number, or a function of the step number.
        step_size: Rate of the mean: a number or a function of the step number. ``None`` means
            ``damping``.
    """

    def __init__(self, network: RegressionNetwork, damping: Rate, step_size: Rate | None) -> None:
        self._network = network
        self._rate = schedule("damping", damping)
        self._step_size = self._rate if step_size is None else schedule("step_size", step_size)

    def init(self, params: Params) -> NetworkStepsState:
        """Returns the initial state."""
        nothing = jnp.zeros_like(params["weights_precision"])
        none = jnp.zeros(())
        start = jnp.zeros((), jnp.int32)
        return NetworkStepsState(start, params, nothing, none, nothing, none, none)

    def get_params(self, state: NetworkStepsState) -> Params:
        """Returns the natural parameters."""
        return state.params

    def update(self, move: NetworkMove, state: NetworkStepsState, **_: object) -> NetworkStepsState:
        """Takes a step."""
        rate, size = self._rate(state.step), self._step_size(state.step)
        noise = (1 - rate) ** 2 * state.noise + (rate * move.precision_noise) ** 2
        old, prior = state.params, self._network.prior_precision(state.params)
        had = old["weights_precision"] - prior
        before = jnp.where(state.step == 0, had, state.released)
        released = before + rate * (had + move.precision - before)
        # A released precision counts as far as it exceeds its noise, and its slope with it.
        sites = jnp.maximum(released, 0)
        share = counted_share(sites, _COUNTS_HALF * jnp.sqrt(noise))
        precision = prior + share * sites
        mean = old["weights_linear"] / old["weights_precision"]
        direction, weight = move.direction, jnp.mean(share)
        spread = jnp.full_like(mean, weight * move.noise)
        if move.slope is not None:
            direction, weight = move.slope / precision, share
            spread = share * move.noise / precision
        direction = weight * direction
        mean_noise = state.mean_noise + (size * spread) ** 2
        moved = state.moved + size * jnp.mean(weight)
        rate_noise = (1 - rate) ** 2 * state.rate_noise + (rate * move.rate_noise) ** 2
        mean = mean + size * direction
        # The released rate is noisy: the floor keeps the noise variance positive.
        own = self._network.noise_prior[1]
        smallest = own + move.num_examples / 2 * _SMALLEST_NOISE
        params = old | {
            "weights_linear": mean * precision,
            "weights_precision": precision,
            "noise_rate": jnp.maximum(old["noise_rate"] + rate * move.rate, smallest),
        }
        return NetworkStepsState(
            state.step + 1, params, released, noise, mean_noise, moved, rate_noise
        )
