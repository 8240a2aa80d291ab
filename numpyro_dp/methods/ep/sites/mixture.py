r"""Exact sites of a mixture of normals whose means are the latents.

.. math:: p(x \mid \mu) = \sum_j \pi_j\, N(x;\, \mu_j, \sigma^2 I), \qquad
    Z = \sum_j \pi_j\, N(x;\, m_j, S_j), \quad S_j = V_{jj} + \sigma^2 I,

for a normal cavity with means m and covariance V. With :math:`r_j \propto \pi_j N(x; m_j, S_j)` and
:math:`a_j = S_j^{-1}(x - m_j)` the slope of log Z in :math:`m_j` is :math:`r_j a_j`. The matrix H
of :func:`~numpyro_dp.methods.normal.site_from_slopes` is

.. math:: H_{jk} = r_j r_k\, a_j a_k^\top + \delta_{jk}\, r_j (S_j^{-1} - a_j a_j^\top).

Components are correlated if the record may come from several of them. The matrices
:math:`S_j^{-1}` depend only on the cavity, so they are computed once for all records.

Reference:
    Minka (2001), A family of algorithms for approximate Bayesian inference, section 3.2 (the
    clutter problem); Li, Hernández-Lobato, Turner (2015), section 5.2.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from numpyro_dp.extend import UnsupportedModelError, check_real
from numpyro_dp.methods.ep.problem import EPProblem, Site, SiteBuilder
from numpyro_dp.methods.normal import Cavity, cavity_of, inverse_and_log_det, site_from_slopes
from numpyro_dp.methods.shared import check_probs

_TOLERANCE = 1e-3
_LARGEST = 1e12  # the square of much larger scales is infinite


# The cavity; the inverses of S_j, shape (components, d, d), or their diagonals, (components, d);
# log(pi_j) - log det(S_j) / 2.
_MixtureCavity = tuple[Cavity, Array, Array]


def normal_mixture(
    observation: Callable[..., Array], scale: float, probs: ArrayLike | None = None
) -> SiteBuilder:
    r"""Exact sites of a mixture of isotropic normals with known scale and weights.

    Args:
        observation: The model's arguments for one record -> x, with d entries. The latents must be
            the means, one site of shape (components, d).
        scale: :math:`\sigma`, the standard deviation of every component in every direction.
        probs: Weights of the components. By default they are equal.

    Raises:
        UnsupportedModelError: When the run is prepared, if the family is not normal, or if the
            model's likelihood of an invented record differs from the declared one.

    Example:
        (numpyro 0.20 does not accept these components. With it, sum the densities in
        ``numpyro.factor``.)

        >>> import jax.numpy as jnp, numpyro, numpyro.distributions as dist
        >>> from numpyro_dp.methods.ep.sites import normal_mixture
        >>> def model(x):
        ...     means = numpyro.sample("means", dist.Normal(0, 1).expand([4, 2]).to_event(2))
        ...     each = dist.Normal(means, 0.5).to_event(1)
        ...     with numpyro.plate("records", x.shape[0]):
        ...         weights = dist.Categorical(jnp.full(4, 0.25))
        ...         numpyro.sample("x", dist.MixtureSameFamily(weights, each), obs=x)
        >>> site = normal_mixture(lambda x: x[0], 0.5)
    """
    scale = check_real("scale", scale, low=0, high=_LARGEST, low_open=True)
    if not callable(observation):
        raise TypeError(
            "Expected observation to be a function of the model's arguments for one record, such "
            f"as lambda x: x[0], got {type(observation).__name__}."
        )
    probs = None if probs is None else check_probs(probs)

    def read(problem: EPProblem, example: tuple[Array, ...]) -> Array:
        return jnp.reshape(problem.of_arguments(observation, example), -1)

    def shape_of(problem: EPProblem) -> tuple[int, int]:
        """Number of components, and number of coordinates of each."""
        size = read(problem, problem.blank_example()).size
        if size == 0 or problem.latents.dim % size:
            raise UnsupportedModelError(
                f"Expected a multiple of {size} latent coordinates (one mean per component), got "
                f"{problem.latents.dim}. observation must return all {size} entries of a record's "
                "x and nothing else."
            )
        number = problem.latents.dim // size
        if probs is not None and probs.size != number:
            raise UnsupportedModelError(
                f"Expected probs of {number} components, as in the latents, got {probs.size}."
            )
        return number, size

    def log_weights(number: int) -> Array:
        return jnp.full(number, -math.log(number)) if probs is None else jnp.log(probs)

    def check(problem: EPProblem) -> None:
        """Raises unless model and declaration have the same likelihood for invented records."""
        problem.check_normal("normal_mixture()", "Use family=normal.")
        number, size = shape_of(problem)
        constant = size * (math.log(scale) + math.log(2 * math.pi) / 2)

        @jax.jit
        def both(z: Array, example: tuple[Array, ...]) -> tuple[Array, Array]:
            distance = (read(problem, example) - z.reshape(number, size)) / scale
            each = log_weights(number) - jnp.sum(distance**2, -1) / 2
            return problem.log_likelihood(z, example), jax.nn.logsumexp(each) - constant

        normals = jax.random.normal(jax.random.key(0), (4, number, size))
        for example in problem.invented():
            # With means near the record, several components are likely, so wrong weights show.
            near = read(problem, example) + scale * normals[:2]
            for z in (*(2 * normals[2:]).reshape(2, -1), *near.reshape(2, -1)):
                found, expected = map(float, both(z, example))
                if not abs(found - expected) <= _TOLERANCE * max(1.0, abs(expected)):
                    raise UnsupportedModelError(
                        "The likelihood is not a mixture of normals with the latents as means, "
                        f"scale {scale} and the given weights. For an invented record its "
                        f"logarithm is {found:.4g}, not {expected:.4g}. Correct scale, probs or "
                        "observation, or use site=importance()."
                    )

    def build(problem: EPProblem) -> Site:
        number, size = shape_of(problem)

        def prepare(_: Array, natural: dict[str, Array]) -> _MixtureCavity:
            cavity = cavity_of(natural)
            inverse, log_det = _marginals(cavity, number, size, scale)
            return cavity, inverse, log_weights(number) - log_det / 2

        def approximate(public: _MixtureCavity, example: tuple[Array, ...]) -> dict[str, Array]:
            return _site(public, read(problem, example))

        return Site(prepare, approximate)

    return SiteBuilder(build, check)


def _site(public: _MixtureCavity, x: Array) -> dict[str, Array]:
    """The site of a record."""
    cavity, inverse, log_weight = public
    number, size = inverse.shape[:2]
    distance = x - cavity.mean.reshape(number, size)
    full = inverse.ndim == 3
    a = jnp.einsum("jde,je->jd", inverse, distance) if full else inverse * distance
    share = jax.nn.softmax(log_weight - jnp.sum(a * distance, -1) / 2)[:, None]
    g = share * a
    flat = g.reshape(-1)
    if full:
        own = share[..., None] * (inverse - a[:, :, None] * a[:, None, :])
        slots = jnp.arange(number)
        blocks = jnp.zeros((number, size, number, size)).at[slots, :, slots].set(own)
        h = jnp.outer(flat, flat) + blocks.reshape(flat.size, flat.size)
        return site_from_slopes(cavity, flat, h)
    h = g**2 + share * (inverse - a**2)
    return site_from_slopes(cavity, flat, h.reshape(-1))


def _marginals(cavity: Cavity, number: int, size: int, scale: float) -> tuple[Array, Array]:
    """The inverse of the variance of x in each component, and its log determinant."""
    if cavity.covariance.ndim == 2:
        slots = jnp.arange(number)
        blocks = cavity.covariance.reshape(number, size, number, size)[slots, :, slots]
        inverse, _, log_det = jax.vmap(inverse_and_log_det)(blocks + scale**2 * jnp.eye(size))
        return inverse, log_det
    variance = cavity.covariance.reshape(number, size) + scale**2
    return 1 / variance, jnp.sum(jnp.log(variance), -1)
