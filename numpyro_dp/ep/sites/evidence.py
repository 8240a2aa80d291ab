r"""Sites from a closed form of the evidence: :math:`\log Z(m, V)` of one record, differentiated.

With it, sites of probit regression, mixtures of normals and similar models are exact. JAX computes
the derivatives that :mod:`numpyro_dp.ep.gaussian` needs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.scipy.stats import norm

from numpyro_dp.ep.gaussian import Cavity, cavity_of, site_from_slopes
from numpyro_dp.ep.problem import EPProblem
from numpyro_dp.ep.sites.base import Site, SiteBuilder
from numpyro_dp.model.public import UnsupportedModelError

__all__ = ["evidence", "probit"]


def evidence(log_evidence: Callable[..., Array]) -> SiteBuilder:
    r"""Sites by the derivatives of a closed form of log Z.

    Args:
        log_evidence: ``(mean, covariance, *args, **kwargs) -> log Z`` of one record, with the
            moments of a normal cavity over all latents (unconstrained, in one vector) and the
            model's arguments for a data set of one record. The covariance has as many axes as the
            family's precision: a matrix, its diagonal, or one number.

    Raises:
        UnsupportedModelError: When the run is prepared, if the family is not normal.
    """

    def check(problem: EPProblem) -> None:
        if not problem.latents.is_normal:
            raise UnsupportedModelError(
                f"evidence() needs a normal family, got {problem.latents.family.name}. Use "
                "site=importance()."
            )

    def build(problem: EPProblem) -> Site:
        layout = problem.model.structure.layout

        def prepare(_: Array, cavity: dict[str, Array]) -> Cavity:
            return cavity_of(cavity)

        def approximate(cavity: Cavity, example: tuple[Array, ...]) -> dict[str, Array]:
            arguments = layout.example(example, problem.shared)

            def log_z(mean: Array, covariance: Array) -> Array:
                return log_evidence(mean, covariance, *arguments.args, **arguments.kwargs)

            g, slope = jax.grad(log_z, (0, 1))(cavity.mean, cavity.covariance)
            axes = cavity.covariance.ndim
            if axes == 2:
                return site_from_slopes(cavity, g, jnp.outer(g, g) - (slope + slope.T))
            if axes == 0:  # one number moves all variances together
                return site_from_slopes(cavity, g, jnp.mean(g**2) - 2 * slope / g.size)
            return site_from_slopes(cavity, g, g**2 - 2 * slope)

        return Site(prepare, approximate)

    return SiteBuilder(build, check)


def probit(features: Callable[..., Array], label: Callable[..., Array]) -> SiteBuilder:
    r"""Exact sites of probit regression, :math:`P(y = 1 \mid z) = \Phi(\phi(x)\cdot z)`.

    .. math:: \log Z = \log\Phi\Big(\frac{\pm\,\phi\cdot m}{\sqrt{1 + \phi^T V \phi}}\Big).

    Args:
        features: The model's arguments for one record -> :math:`\phi(x)`, in the order of the
            latents' vector.
        label: The model's arguments for one record -> 0 or 1.

    Reference:
        Minka (2001), A family of algorithms for approximate Bayesian inference, section 4.2.
    """

    def log_evidence(mean: Array, covariance: Array, *args: Any, **kwargs: Any) -> Array:
        direction = jnp.reshape(features(*args, **kwargs), -1)
        sign = 2 * jnp.reshape(label(*args, **kwargs), ()) - 1
        variance = Cavity(mean, covariance).variance_along(direction)
        return norm.logcdf(sign * (direction @ mean) / jnp.sqrt(1 + variance))

    return evidence(log_evidence)
