r"""Sites of any likelihood, from a closed form of the evidence or from importance sampling.

With :math:`\log Z(m, V)` of one record, sites of probit regression, mixtures of normals and similar
models are exact. JAX computes the derivatives that :mod:`numpyro_dp.methods.normal` needs.

For importance sampling, public draws :math:`z_k` from the cavity have weights
:math:`p(x \mid z_k)`. The site is the difference of two members of the family. One is fitted to the
weighted draws and the other to the draws without weights. So the sampling error cancels for records
with little information.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_dp.core import PyTree
from numpyro_dp.extend import check_int
from numpyro_dp.methods.ep.families import sample
from numpyro_dp.methods.ep.problem import EPProblem, Site, SiteBuilder
from numpyro_dp.methods.normal import Cavity, cavity_of, site_from_slopes


def evidence(log_evidence: Callable[..., Array]) -> SiteBuilder:
    r"""Sites by the derivatives of a closed form of log Z.

    Args:
        log_evidence: ``(mean, covariance, *args, **kwargs) -> log Z`` of one record, with the
            moments of a normal cavity over all latents (unconstrained, in one vector) and the
            model's arguments for a data set of one record. The covariance has as many axes as the
            family's precision: a matrix, or its diagonal.

    Raises:
        UnsupportedModelError: When the run is prepared, if the family is not normal.

    Example:
        Probit regression with a full precision,
        :math:`\log Z = \log\Phi\big(\pm x\cdot m / \sqrt{1 + x^T V x}\big)` (Minka 2001).

        >>> import jax.numpy as jnp
        >>> from jax.scipy.stats import norm
        >>> def log_evidence(mean, covariance, x, y):
        ...     sign, variance = 2 * y[0] - 1, x[0] @ covariance @ x[0]
        ...     return norm.logcdf(sign * (x[0] @ mean) / jnp.sqrt(1 + variance))
        >>> site = evidence(log_evidence)
    """

    def check(problem: EPProblem) -> None:
        problem.check_normal("evidence()", "Use family=normal, or conjugate().")

    def build(problem: EPProblem) -> Site:
        def approximate(cavity: Cavity, example: tuple[Array, ...]) -> dict[str, Array]:
            slopes_of = functools.partial(jax.grad(log_evidence, (0, 1)), *cavity)
            g, slope = problem.of_arguments(slopes_of, example)
            if cavity.covariance.ndim == 2:
                return site_from_slopes(cavity, g, jnp.outer(g, g) - (slope + slope.T))
            return site_from_slopes(cavity, g, g**2 - 2 * slope)

        return Site(lambda _, cavity: cavity_of(cavity), approximate)

    return SiteBuilder(build, check)


def importance(num_draws: int = 1000) -> SiteBuilder:
    """Sites by importance sampling, for a normal family. They are noisy and slow.

    Args:
        num_draws: Number of draws from the cavity in each step. All records share them.
    """
    check_int("num_draws", num_draws, low=10)

    def check(problem: EPProblem) -> None:
        problem.check_normal("importance()", "Use family=normal, or DPSVI.")

    def build(problem: EPProblem) -> Site:
        family = problem.latents.family

        def prepare(rng_key: Array, cavity: dict[str, Array]) -> PyTree:
            return sample(family, rng_key, cavity, (num_draws,)), cavity_of(cavity)

        def approximate(public: PyTree, example: tuple[Array, ...]) -> dict[str, Array]:
            draws, cavity = public
            values = jax.vmap(problem.log_likelihood, in_axes=(0, None))(draws, example)
            return _normal_site(cavity, draws, jax.nn.softmax(values))

        return Site(prepare, approximate)

    return SiteBuilder(build, check, reads_likelihood=True)


def _normal_site(cavity: Cavity, draws: Array, weights: Array) -> dict[str, Array]:
    """Uses slopes of log Z: moments of the weighted draws minus moments of the draws."""
    extra = weights - 1 / len(weights)
    centred = draws - cavity.mean
    shift = extra @ centred  # V g
    if cavity.covariance.ndim < 2:
        g = shift / cavity.covariance
        second = extra @ centred**2 - shift**2  # minus V H V
        return site_from_slopes(cavity, g, -second / cavity.covariance**2)
    precision = jnp.linalg.inv(cavity.covariance)
    second = (centred * extra[:, None]).T @ centred - jnp.outer(shift, shift)
    return site_from_slopes(cavity, precision @ shift, -precision @ second @ precision)
