r"""Sites of any likelihood, from a closed form of the evidence or from importance sampling.

With :math:`\log Z(m, V)` of one record, sites of probit regression, mixtures of normals and similar
models are exact. JAX computes the derivatives that :mod:`numpyro_dp.ep.gaussian` needs.

For importance sampling, public draws :math:`z_k` from the cavity have weights
:math:`p(x \mid z_k)`. The site is the difference of two members of the family. One is fitted to the
weighted draws and the other to the draws without weights. So the sampling error cancels for records
with little information.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.scipy.stats import norm

from numpyro_dp._validate import check_int
from numpyro_dp.ep.families import sample
from numpyro_dp.ep.gaussian import Cavity, cavity_of, site_from_slopes
from numpyro_dp.ep.problem import EPProblem, Site, SiteBuilder
from numpyro_dp.model.public import UnsupportedModelError

__all__ = ["evidence", "importance", "probit"]


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

    return SiteBuilder(build, lambda problem: None, reads_likelihood=True)


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
