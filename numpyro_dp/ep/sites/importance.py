r"""Sites by importance sampling, for any likelihood.

Public draws :math:`z_k` from the cavity have weights :math:`p(x \mid z_k)`. The site is the
difference of two members of the family. One is fitted to the weighted draws and the other to the
draws without weights. So the sampling error cancels for records with little information.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_dp._validate import check_int
from numpyro_dp.ep.families import sample
from numpyro_dp.ep.gaussian import Cavity, cavity_of, site_from_slopes
from numpyro_dp.ep.problem import EPProblem
from numpyro_dp.ep.sites.base import Site, SiteBuilder

__all__ = ["importance"]


def importance(num_draws: int = 1000) -> SiteBuilder:
    """Sites by importance sampling. They are noisy and slow.

    Args:
        num_draws: Number of draws from the cavity in each step. All records share them.
    """
    check_int("num_draws", num_draws, low=10)

    def build(problem: EPProblem) -> Site:
        family = problem.latents.family

        def prepare(rng_key: Array, cavity: dict[str, Array]) -> Any:
            draws = sample(family, rng_key, cavity, (num_draws,))
            moments = cavity_of(cavity) if problem.latents.is_normal else None
            return draws, moments

        def approximate(public: Any, example: tuple[Array, ...]) -> dict[str, Array]:
            draws, cavity = public
            values = jax.vmap(problem.log_likelihood, in_axes=(0, None))(draws, example)
            weights = jax.nn.softmax(values)
            if cavity is not None:
                return _normal_site(cavity, draws, weights)
            statistics = jax.vmap(family.statistics)(draws)
            tilted = jax.tree.map(lambda s: jnp.tensordot(weights, s, 1), statistics)
            plain = jax.tree.map(lambda s: s.mean(0), statistics)
            after, before = family.to_natural(tilted), family.to_natural(plain)
            return jax.tree.map(jnp.subtract, after, before)

        return Site(prepare, approximate)

    return SiteBuilder(build, lambda problem: None)


def _normal_site(cavity: Cavity, draws: Array, weights: Array) -> dict[str, Array]:
    """Uses slopes of log Z: moments of the weighted draws minus moments of the draws."""
    extra = weights - 1 / len(weights)
    centred = draws - cavity.mean
    shift = extra @ centred  # V g
    if cavity.covariance.ndim < 2:
        g = shift / cavity.covariance
        second = extra @ centred**2 - shift**2  # minus V H V
        h = -second / cavity.covariance**2
        if cavity.covariance.ndim == 0:
            h = jnp.mean(h)
        return site_from_slopes(cavity, g, h)
    precision = jnp.linalg.inv(cavity.covariance)
    second = (centred * extra[:, None]).T @ centred - jnp.outer(shift, shift)
    return site_from_slopes(cavity, precision @ shift, -precision @ second @ precision)
