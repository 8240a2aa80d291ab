r"""A noisy score of the posterior at a point, and the scale of its noise.

For a sampler's position u (the latents in unconstrained coordinates) the signal of one record is

.. math:: s_i = \nabla_u \log p(x_i \mid u),

and the released sum :math:`\tilde s`, divided by the inclusion probability q, gives

.. math:: \tilde g = \tilde s / q + \nabla_u \log p(u),

an estimate of the score of the posterior. Its privacy noise is normal with known standard deviation
:math:`\sigma C / q` in every coordinate. Subsampling and clipping add further errors.

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
    """Input of a sampler's step.

    Attributes:
        gradient: Estimate of the score, by parameter of the point guide.
        noise_scale: Standard deviation of the privacy noise in each coordinate of the score.
        rng_key: Key of the sampler's own draws. It is not secret.
    """

    gradient: dict[str, Array]
    noise_scale: Array
    rng_key: Array


def langevin() -> Callable[[VariationalProblem], Estimator]:
    """The estimator of samplers, for a point guide. The guide's parameters are the position.

    Guarantee:
        The signal reads one record. ``prepare`` and ``pull_back`` read none.
    """

    def build(problem: VariationalProblem) -> Estimator:
        base = aligned()(problem)

        def pull_back(public: DrawnPublic, released: Released) -> Score:
            prior = jax.grad(problem.log_prior)(public.latents, public.params)
            score = add(prior, {site: released.total[site] for site in prior})
            gradient = {f"{site}{POINT_SUFFIX}": score[site] for site in public.latents}
            # Parameters without entries: all their entries became latent sites.
            gradient |= {name: public.params[name] for name in problem.record_params}
            key = jax.random.fold_in(public.rng_key, 1)  # child 0 is for draws of records
            return Score(gradient, released.noise_scale, key)

        return base._replace(pull_back=pull_back)

    return build
