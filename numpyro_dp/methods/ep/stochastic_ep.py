r"""Stochastic expectation propagation in the form of a private step.

One factor f stands for the average record, :math:`q \propto p_0 f^N`. Given the cavity
:math:`q / f`, record i has a site :math:`\theta_i` (tilted over cavity), and a step moves

.. math:: \theta_q \leftarrow \theta_q + \rho\, \frac{1}{q} \sum_{i \in B} (\theta_i - \theta_f),

with inclusion probability q and damping :math:`\rho`. At the fixed point the sites average to f.
The step releases this sum after clipping each record's term to the norm C. The sensitivity is C
when a record is added or removed. The coordinates need little noise:

.. math:: u_i = \big(\eta_i - \Lambda_i m,\; w\,\Lambda_i\big).

They are *centred* at the cavity's mean m. There the linear part is a slope and not the difference
of two large numbers. The two parts have one joint clip norm and a relative weight w. A precision
matrix is released with all its entries and made symmetric afterwards. Norm and noise are the same
as for the upper triangle with off-diagonal entries times :math:`\sqrt 2`.

**Unbiased clipping** multiplies a site by the smallest factor that clips it with any outcome that
the record could have had (:mod:`numpyro_dp.sums.centred_sums`). It does not see the outcome. So the
mean of the slopes stays 0 under the model, and slope and precision keep their ratio. Then
:math:`\theta_i` is clipped without :math:`\theta_f`: a multiple of :math:`\theta_f` would stay
wherever a factor is below 1, and with it the noise of earlier steps.

**Damped steps.** The optimiser of message passing keeps a running mean r of the released sums of
sites, in natural parameters. Its noise has the standard deviation

.. math:: s_t = \sigma \sqrt{\textstyle\sum_{u \le t} \rho_u^2 \prod_{u < v \le t} (1 - \rho_v)^2}.

A released value counts only as far as it exceeds its noise. For a normal family this is a rule for
the eigenvalues x of the precision, and for the slope at the posterior's last mean along their
directions,

.. math:: x \to g(x)\,x, \quad \text{slope} \to g(x)\,\text{slope}, \qquad
    g(x) = \frac{x_+^2}{x_+^2 + (2 s_t)^2}.

If a full matrix is released, :math:`s_t` is multiplied by :math:`\sqrt{2d}`, the largest eigenvalue
of a matrix of such noise. For other families the rule holds for each natural parameter. The
posterior is the prior times what counts. So noise alone gives the prior, and not certainty. The
step reads only public and released values.

Reference:
    Li, Hernández-Lobato, Turner (2015), Stochastic expectation propagation, NeurIPS; Vinaroz,
    Park (2022), Differentially private stochastic expectation propagation, TMLR.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_dp.core import Arrays, Estimator, Number, Observation, PyTree, Released
from numpyro_dp.extend import OutcomeModel, UnsupportedModelError, centring, read_outcomes
from numpyro_dp.methods.ep.families import Natural, divide, multiply, power
from numpyro_dp.methods.ep.problem import EPProblem, Site
from numpyro_dp.methods.normal import cavity_of, centre, counted_share, shrunk
from numpyro_dp.methods.shared import schedule

_COUNTS_HALF = 2.0  # a value of that many standard deviations of its noise counts half


class SiteMove(NamedTuple):
    """Input of the damped optimiser.

    Attributes:
        direction: Estimate of the sum over all records of site minus mean factor.
        noise_scale: Standard deviation of this step's noise in an eigenvalue of the precision. For
            families that are not normal, in each natural parameter.
        problem: The problem, which has the prior and the family.
    """

    direction: Natural
    noise_scale: Number
    problem: EPProblem


class _CentredCavity(NamedTuple):
    site: PyTree
    factor: Natural  # the mean factor, centred
    centre: tuple[Array, ...]  # its mean, of normal families alone


def stochastic_ep(
    precision_weight: float = 1.0,
    shared_precision: bool | int = False,
    unbiased_clipping: bool = False,
) -> Callable[[EPProblem], Estimator]:
    """Builds the estimator.

    Args:
        precision_weight: w above, > 0: the weight of the precision in the joint norm.
        shared_precision: ``True`` releases only the mean of a precision's diagonal. A number k
            releases k such means, each over a block of ``dim / k`` coordinates.
        unbiased_clipping: Whether clipping does not see the outcome, where all can be listed.

    Guarantee:
        The signal reads one record. ``prepare`` and ``pull_back`` read none. With unbiased
        clipping, a site is multiplied by at most its own factor, and a record with a site that is
        not finite for some outcome counts as 0. Else a site that is not finite is replaced by
        zeros, as if the record had no information, and its term is clipped like any other.
    """

    def build(problem: EPProblem) -> Estimator:
        outcomes = _outcomes_of(problem) if unbiased_clipping else None
        method = problem.site.build(problem.by_row)
        packing = _packing_of(problem, precision_weight, shared_precision)

        def prepare(rng_key: Array, params: Natural) -> _CentredCavity:
            # Computed from released values alone: the mean factor needs no site of a record.
            factor = power(divide(params, problem.prior), 1 / problem.num_examples)
            cavity = divide(params, factor)
            at = (cavity_of(cavity).mean,) if problem.latents.is_normal else ()
            centred = centre(factor, *at) if at else factor
            return _CentredCavity(method.prepare(rng_key, cavity), centred, at)

        def signal_of(method: Site) -> Callable[[_CentredCavity, Arrays], dict[str, Array]]:
            approximate = method.approximate
            if problem.records.layout.max_rows is not None:

                def approximate(public: PyTree, example: tuple[Array, ...], /) -> Natural:
                    # `counted` is 0 for rows that only fill up a unit.
                    *rows, counted = example
                    sites = jax.vmap(lambda row: method.approximate(public, row))(tuple(rows))
                    return jax.tree.map(lambda leaf: jnp.tensordot(counted, leaf, 1), sites)

            def signal(public: _CentredCavity, example: PyTree) -> dict[str, Array]:
                found = approximate(public.site, example)
                if outcomes is None:  # else a record that is not finite counts as 0 anyway
                    found = divide(_finite_or_nothing(found), public.factor)
                return packing.pack(found)

            return signal

        def sites_of(public: _CentredCavity, released: Released) -> Natural:
            """The noisy sum of the sites of all records."""
            total = packing.unpack(released.total)
            # Without centring, each record sent its site minus the mean factor.
            return multiply(total, power(public.factor, number)) if outcomes is None else total

        def pull_back(public: _CentredCavity, released: Released) -> SiteMove:
            direction = divide(sites_of(public, released), power(public.factor, number))
            # Back to the origin at 0, where the optimiser has the posterior.
            for point in public.centre:
                direction = centre(direction, -point)
            return SiteMove(direction, released.noise_scale * packing.noise, problem)

        def observe(public: _CentredCavity, released: Released) -> Observation:
            """The sum of the sites themselves, at the cavity's mean."""
            sites, (point,) = sites_of(public, released), public.centre
            slope_noise = released.noise_scale * jnp.ones(problem.latents.dim)
            noise = released.noise_scale * packing.entry_noise
            return Observation(point, None, sites["linear"], slope_noise, sites["precision"], noise)

        number = problem.num_examples
        known = observe if problem.latents.is_normal else None
        plain = Estimator(prepare, signal_of(method), pull_back, observe=known)
        if outcomes is None:
            return plain
        # The same site with other outcomes of the record, to find the factor.
        other = problem._replace(model=OutcomeModel(problem.model))
        # Prepare and pull back stay: all outcomes share one cavity.
        inner = plain._replace(signal=signal_of(problem.site.build(other)))
        latents = problem.latents.unconstrain
        found = centring(outcomes, inner, lambda public: latents(*public.centre))
        return plain._replace(centring=found._replace(scaled=True))

    return build


def _outcomes_of(problem: EPProblem) -> Any:
    """The outcomes of a record, or ``None`` if sites of all outcomes cannot be computed."""
    if not (problem.latents.is_normal and problem.site.reads_likelihood):
        return None
    try:
        found = read_outcomes(problem.model, problem.shared)
    except UnsupportedModelError:
        return None
    return found if found.number else None


def _finite_or_nothing(natural: Natural) -> Natural:
    """Returns the site if it is finite, else zeros."""
    leaves = jax.tree.leaves(natural)
    finite = jnp.all(jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in leaves]))
    return jax.tree.map(lambda leaf: jnp.where(finite, leaf, 0), natural)


class _Packing(NamedTuple):
    pack: Callable[[Natural], dict[str, Array]]
    unpack: Callable[[dict[str, Array]], Natural]
    # Standard deviations for unit noise in what is released: in an eigenvalue of the precision, and
    # in an entry of its diagonal. If entries share one noise, that of independent entries with a
    # trace as uncertain.
    noise: float
    entry_noise: float


def _packing_of(problem: EPProblem, weight: float, shared: bool | int) -> _Packing:
    """Maps natural parameters to the released coordinates, and back."""
    if not problem.latents.is_normal:
        return _Packing(lambda natural: natural, lambda released: released, 1.0, 1.0)
    dim, whole = problem.latents.dim, problem.prior["precision"].ndim == 2
    groups = int(shared)  # `True` counts as one block
    if shared and dim % groups:
        raise ValueError(
            f"Expected shared_precision to divide the {dim} latent coordinates, got {groups}."
        )

    def pack(natural: Natural) -> dict[str, Array]:
        precision = natural["precision"]
        if shared:
            diagonal = jnp.diagonal(precision) if whole else precision
            precision = jnp.mean(diagonal.reshape(groups, -1), -1)
        return {"linear": natural["linear"], "precision": weight * precision}

    def unpack(released: dict[str, Array]) -> Natural:
        precision = released["precision"] / weight
        if shared:
            precision = jnp.repeat(precision, dim // groups)
            precision = jnp.diag(precision) if whole else precision
        elif whole:
            precision = (precision + precision.T) / 2
        return {"linear": released["linear"], "precision": precision}

    # The largest eigenvalue of a symmetric matrix of such noise is about sqrt(2 d).
    spread = math.sqrt(2 * dim) if whole and not shared else 1.0
    alike = dim // groups if shared else 1
    return _Packing(pack, unpack, spread / weight, math.sqrt(alike) / weight)


class DampedState(NamedTuple):
    """State of :class:`Damped`.

    Attributes:
        step: Number of steps taken.
        natural: Natural parameters of the posterior. They may be published.
        released: Running mean of the released sums of sites, without shrinkage.
        noise: Variance of its noise, in an eigenvalue or a natural parameter.
    """

    step: Array
    natural: Natural
    released: Natural
    noise: Array


class Damped:
    """An optimiser with NumPyro's ``init``, ``get_params`` and ``update``.

    Args:
        damping: The rate, or a function of the step number.
    """

    def __init__(self, damping: float | Callable[[Array], Array]) -> None:
        self._rate = schedule("damping", damping)

    def init(self, params: Natural) -> DampedState:
        """Returns the initial state, as if no sites had been released."""
        nothing = jax.tree.map(jnp.zeros_like, params)
        return DampedState(jnp.zeros((), jnp.int32), params, nothing, jnp.zeros(()))

    def get_params(self, state: DampedState) -> Natural:
        """Returns the natural parameters."""
        return state.natural

    def update(self, move: SiteMove, state: DampedState, **_: object) -> DampedState:
        """Takes a step."""
        problem = move.problem
        prior, rate = problem.prior, self._rate(state.step)
        noise = (1 - rate) ** 2 * state.noise + (rate * move.noise_scale) ** 2
        # The direction is the released sum of sites minus what the posterior has.
        had = divide(state.natural, prior)
        # A start other than the prior counts like a released sum without noise.
        before = jax.tree.map(functools.partial(jnp.where, state.step == 0), had, state.released)
        change = divide(multiply(had, move.direction), before)
        released = multiply(before, power(change, rate))
        sd = _COUNTS_HALF * jnp.sqrt(noise)
        if problem.latents.is_normal:
            at = cavity_of(state.natural).mean  # so that the slope there counts as its precision
            natural = multiply(prior, centre(shrunk(centre(released, at), sd), -at))
        else:
            counted = {
                # Only linear ones may be negative.
                name: x * counted_share(x if name.endswith("linear") else jnp.maximum(x, 0), sd)
                for name, x in released.items()
            }
            natural = problem.latents.family.project(multiply(prior, counted), 1e-6)
        return DampedState(state.step + 1, natural, released, noise)
