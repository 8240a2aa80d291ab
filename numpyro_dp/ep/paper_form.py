r"""DP-SEP as it is printed: Algorithm 3 of Vinaroz and Park, with the accounting that holds for it.

A record's site is clipped in natural parameters as they are (not centred, and not less the mean
site), and for every record of a batch

.. math:: \theta \leftarrow \theta + \frac{\gamma}{N}\,(\bar\theta_{f_n} - \theta_f),
    \qquad \theta_f = \frac{\theta - \theta_0}{N},
    \qquad \Vert\theta_f\Vert \le C \text{ after the step.}

With :math:`\gamma = 1` that moves the posterior by 1/N of what stochastic expectation propagation
would: N steps see all records and move it by the site of an average one. :math:`\gamma = N` is the
update of SEP. The sensitivity of the sum of clipped sites is C when a record is added or removed,
2C when one is replaced; that of :math:`\theta` is :math:`\gamma/N` times this, and the noise is
scaled alike. (Proposition 1 says :math:`2\gamma C/N`, which is the second.) Batches are accounted
as they are drawn: records in the order of a permutation, as printed, are no subsample of an epoch.

Reference:
    Vinaroz, Park (2022), Differentially private stochastic expectation propagation, TMLR,
    Algorithm 3.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_dp.core import Estimator, Released, Sampler
from numpyro_dp.ep.damping import Damped, DampedState
from numpyro_dp.ep.estimator import finite_or_nothing, packing_of
from numpyro_dp.ep.families import divide, multiply, power
from numpyro_dp.ep.gaussian import cavity_of, centre
from numpyro_dp.ep.problem import EPProblem

__all__ = ["Printed", "paper_form"]

Natural = dict[str, Array]


class _Public(NamedTuple):
    site: Any
    factor: Natural
    centre: Array | None


class _Direction(NamedTuple):
    """What a step adds to the natural parameters, and what they are projected to."""

    direction: Natural
    problem: EPProblem


def paper_form(gamma: float, sampler: Sampler) -> Callable[[EPProblem], Estimator]:
    """Builds the estimator.

    Args:
        gamma: The printed damping, > 0.
        sampler: Draws the batches, one record each in the paper.

    Guarantee:
        The signal reads one record; ``prepare`` and ``pull_back`` read none. A record whose site
        is not finite counts as nothing.
    """

    def build(problem: EPProblem) -> Estimator:
        method, packing = problem.site.build(problem), packing_of(problem, 1.0, False)
        number = problem.num_examples
        rate = gamma * sampler.inclusion_prob(number) / number

        def prepare(rng_key: Array, params: Natural) -> _Public:
            factor = power(divide(params, problem.prior), 1 / number)
            cavity = divide(params, factor)
            at = cavity_of(cavity).mean if problem.latents.is_normal else None
            return _Public(method.prepare(rng_key, cavity), factor, at)

        def signal(public: _Public, example: tuple[Array, ...]) -> dict[str, Array]:
            found = method.approximate(public.site, example)
            if public.centre is not None:
                found = centre(found, -public.centre)
            return packing.pack(finite_or_nothing(found))

        def pull_back(public: _Public, released: Released) -> _Direction:
            sites = packing.unpack(released.total)
            return _Direction(power(divide(sites, power(public.factor, number)), rate), problem)

        return Estimator(prepare, signal, pull_back)

    return build


class Printed(Damped):
    """The step of Algorithm 3, as an optimiser.

    Args:
        bound: C, which the norm of the mean site is scaled to.
    """

    def __init__(self, bound: float) -> None:
        super().__init__(1.0, 0.0)  # its rate is in the direction
        self._bound = bound

    def update(self, move: _Direction, state: DampedState, **_: Any) -> DampedState:
        """Takes a step, and brings the posterior and the mean site back into their domains."""
        problem = move.problem
        moved = problem.latents.family.project(multiply(state.natural, move.direction), 1e-6)
        extra = divide(moved, problem.prior)
        leaves = jax.tree.leaves(packing_of(problem, 1.0, False).pack(extra))
        norm = jnp.sqrt(sum(jnp.sum(leaf**2) for leaf in leaves)) / problem.num_examples
        scale = jnp.where(norm > self._bound, self._bound / jnp.maximum(norm, self._bound), 1.0)
        natural = multiply(problem.prior, power(extra, scale))
        return DampedState(state.step + 1, natural, state.noise)
