r"""The score of the posterior at a point, with the noise that is in it.

For a sampler's position u (the latents in unconstrained coordinates) the signal of one record is

.. math:: s_i = \nabla_u \log p(x_i \mid u),

and the released sum :math:`\tilde s`, divided by the inclusion probability q, gives

.. math:: \tilde g = \tilde s / q + \nabla_u \log p(u),

the score of the posterior with normal noise of the known standard deviation
:math:`\sigma C / q` in every coordinate, and that of subsampling and clipping.

Reference:
    Zhang, Bu, Chen, Long (2021), Differentially private Bayesian neural networks on accuracy,
    privacy and reliability, Algorithm 2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
from jax import Array

from numpyro_dp._compat import POINT_SUFFIX
from numpyro_dp._tree import add
from numpyro_dp.core import Estimator, Released
from numpyro_dp.model.variational import VariationalProblem
from numpyro_dp.vi.estimators.aligned import DrawnPublic, aligned

__all__ = ["Score", "langevin"]


class Score(NamedTuple):
    """What a step tells a sampler.

    Attributes:
        gradient: Estimate of the score, by parameter of the point guide.
        noise_scale: Standard deviation of the privacy noise in each of its coordinates.
        rng_key: Key of what the sampler draws; not secret.
    """

    gradient: dict[str, Array]
    noise_scale: Array
    rng_key: Array


def langevin() -> Callable[[VariationalProblem], Estimator]:
    """The estimator of samplers: for a point guide, whose parameters are the position.

    Guarantee:
        The signal reads one record; ``prepare`` and ``pull_back`` read none.
    """

    def build(problem: VariationalProblem) -> Estimator:
        base = aligned()(problem)

        def pull_back(public: DrawnPublic, released: Released) -> Score:
            prior = jax.grad(problem.log_prior)(public.latents, public.params)
            score = add(prior, {site: released.total[site] for site in prior})
            gradient = {f"{site}{POINT_SUFFIX}": score[site] for site in public.latents}
            # Parameters of which nothing is left: all their entries are latents.
            gradient |= {name: public.params[name] for name in problem.record_params}
            key = jax.random.fold_in(public.rng_key, 1)  # child 0 is for what records draw
            return Score(gradient, released.noise_scale, key)

        return base._replace(pull_back=pull_back)

    return build
