r"""Sites of generalised linear models: one integral along :math:`\phi(x)\cdot z` per record.

A likelihood that depends on z only through :math:`t = \phi\cdot z` has a one-dimensional tilted
distribution :math:`p(t) \propto e^{\ell(t)} N(t; m, v)`. Its moments come from adaptive
Gauss-Hermite quadrature, with nodes around its mode, scaled by its curvature there. Then

.. math::
    g = \frac{E\,t - m}{v} = E\,\ell'(t), \qquad
    h = \frac{1 - \mathrm{Var}(t)/v}{v} = -\frac{\mathrm{Cov}(\ell'(t), t)}{v},

in which the second forms follow by partial integration. They do not cancel, so they serve records
with little information. The first forms do not need the slope of a rough likelihood, so they serve
all other records.

:math:`\phi` comes from the likelihood itself, whose gradient in z is a multiple of :math:`\phi` at
every point. ``is_linear`` checks this property on invented records.

Reference:
    J. Naylor, A. Smith, "Applications of a method for the efficient computation of posterior
    distributions", Applied Statistics 31 (1982), for the adaptive nodes.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_dp.extend import UnsupportedModelError, check_int, own_constants, split_scalar
from numpyro_dp.methods.ep.problem import EPProblem, Site, SiteBuilder
from numpyro_dp.methods.ep.sites.conjugate import holds
from numpyro_dp.methods.normal import Cavity, cavity_of, site_along

_TOLERANCE = 1e-3
_CLIMBS = 4
_SHARES, _WIDTHS = own_constants(
    np.array([0.0, 0.03, 0.2, 1.0], np.float32),  # fractions of a Newton step
    np.linspace(-8, 8, 33, dtype=np.float32),  # starts of the search for the mode, in cavity sd
)
(_HALVINGS,) = own_constants((0.5 ** np.arange(16)).astype(np.float32))
_Probed = tuple[Cavity, Array]  # a cavity, and points at which gradients are taken
_STRONG = 0.1  # relative change of the variance above which a record has much information


def quadrature(num_nodes: int = 31) -> SiteBuilder:
    """Sites by one-dimensional quadrature, for likelihoods that depend on z through one product.

    Args:
        num_nodes: Number of nodes of the Gauss-Hermite rule, at least 3.

    Raises:
        UnsupportedModelError: When the run is prepared, if the likelihood is of another kind.

    Reference:
        Minka (2001), A family of algorithms for approximate Bayesian inference, PhD thesis, MIT.
    """
    check_int("num_nodes", num_nodes, low=3, high=200)

    nodes, weights = np.polynomial.hermite_e.hermegauss(num_nodes)
    nodes, log_weights = nodes.astype(np.float32), np.log(weights).astype(np.float32)
    rule = own_constants(nodes, log_weights, nodes**2 / 2)

    def check(problem: EPProblem) -> None:
        if not is_linear(problem):
            raise UnsupportedModelError(
                "quadrature() needs a normal family and a likelihood that depends on all latents "
                "through one product with the record, x @ w + b. For an invented record the "
                "gradient changes its direction. Use site=importance(), or DPSVI."
            )

    def build(problem: EPProblem) -> Site:
        def prepare(_: Array, natural: dict[str, Array]) -> _Probed:
            cavity = cavity_of(natural)
            return cavity, _probes(problem, cavity.mean)

        def approximate(public: _Probed, example: tuple[Array, ...]) -> dict[str, Array]:
            cavity, probes = public
            direction = _direction(problem, probes, example)
            log_likelihood = _along(problem, direction, example)
            speaks = jnp.any(direction != 0)
            variance = jnp.where(speaks, cavity.variance_along(direction), 1)
            slopes = tilted_slopes(log_likelihood, direction @ cavity.mean, variance, rule)
            return site_along(cavity, direction, *(jnp.where(speaks, x, 0) for x in slopes))

        return Site(prepare, approximate)

    return SiteBuilder(build, check, reads_likelihood=True)


def tilted_slopes(
    log_likelihood: Callable[[Array], Array],
    mean: Array,
    variance: Array,
    rule: tuple[Array, Array, Array],
) -> tuple[Array, Array]:
    """Slopes g and h of log Z for a likelihood of one number t.

    Args:
        log_likelihood: t -> log likelihood.
        mean: Cavity mean of t.
        variance: Cavity variance of t, > 0.
        rule: Nodes, log weights and half the squared nodes of a Gauss-Hermite rule for the standard
            normal.
    """
    slope = jax.grad(log_likelihood)

    def log_density(t: Array) -> Array:
        found = log_likelihood(t) - (t - mean) ** 2 / (2 * variance)
        return jnp.where(jnp.isnan(found), -jnp.inf, found)

    def curvature(t: Array) -> Array:
        own = -jax.grad(slope)(t)
        return jnp.where((own > 0) & (own < jnp.inf), own, 0) + 1 / variance

    def climb(_: int, t: Array) -> Array:
        change = (slope(t) - (t - mean) / variance) / curvature(t)
        change = jnp.where(jnp.isfinite(change), change, 0)
        return best(t + change * _SHARES)

    def best(candidates: Array) -> Array:
        return candidates[jnp.argmax(jax.vmap(log_density)(candidates))]

    # The mode of a log-concave density lies between the mean and one step of gradient ascent.
    reach = variance * slope(mean)
    reach = jnp.where(jnp.isfinite(reach), reach, 0)
    start = jnp.concatenate([mean + jnp.sqrt(variance) * _WIDTHS, mean + reach * _HALVINGS])
    mode = jax.lax.fori_loop(0, _CLIMBS, climb, best(start))
    sd = jnp.minimum(1 / jnp.sqrt(curvature(mode)), jnp.sqrt(variance))
    nodes, log_weights, halves_of_squares = rule
    t = mode + sd * nodes
    values, slopes = jax.vmap(jax.value_and_grad(log_likelihood))(t)
    # A likelihood that underflows has no slope, so its node gets no weight.
    good = jnp.isfinite(values) & jnp.isfinite(slopes)
    logits = log_weights + values - (t - mean) ** 2 / (2 * variance) + halves_of_squares
    probabilities = jax.nn.softmax(jnp.where(good, logits, -jnp.inf))  # nan if no node is good
    slopes = jnp.where(good, slopes, 0)
    g = probabilities @ slopes
    tilted_mean = probabilities @ t
    h = -(probabilities @ ((slopes - g) * (t - tilted_mean))) / variance
    ratio = probabilities @ (t - tilted_mean) ** 2 / variance
    strong = jnp.abs(1 - ratio) > _STRONG
    g = jnp.where(strong, (tilted_mean - mean) / variance, g)
    return g, jnp.where(strong, (1 - ratio) / variance, h)


def is_linear(problem: EPProblem) -> bool:
    """Whether each invented record's gradients at several points have the same direction."""
    if not problem.latents.is_normal:
        return False

    @jax.jit
    def slopes(example: tuple[Array, ...]) -> Array:
        points = 2 * jax.random.normal(jax.random.key(0), (4, problem.latents.dim))
        return jax.vmap(jax.grad(problem.log_likelihood), in_axes=(0, None))(points, example)

    def one_direction(example: tuple[Array, ...]) -> bool | None:
        gradients = np.asarray(slopes(example), np.float64)
        norms = np.linalg.norm(gradients, axis=1)
        gradients = gradients[np.isfinite(norms) & (norms > 0)]
        if len(gradients) < 2:
            return None
        units = gradients / np.linalg.norm(gradients, axis=1, keepdims=True)
        along = units @ units[0]
        return bool(np.abs(units - along[:, None] * units[0]).max() <= _TOLERANCE)

    return holds(problem, one_direction)


def _probes(problem: EPProblem, mean: Array) -> Array:
    """Three public points, because a record's gradient may vanish or overflow at one of them."""
    prior = cavity_of(problem.prior)
    spread = prior.covariance if prior.covariance.ndim < 2 else jnp.diag(prior.covariance)
    near = 1e-3 * jnp.sqrt(spread)
    return jnp.stack([near, mean, prior.mean + near])


def _along(
    problem: EPProblem, direction: Array, example: tuple[Array, ...]
) -> Callable[[Array], Array]:
    """Returns the log likelihood of z = direction * t as a function of t.

    If the model combines the record with the latents in single products
    (:mod:`numpyro_dp.sums.contraction`), these are computed once. Each t then costs no more than
    the likelihood of one number.
    """
    leaves, treedef = jax.tree.flatten(problem.latents.unconstrain(direction))
    point, record = jax.eval_shape(lambda *given: given, treedef.unflatten(leaves), example)
    split = split_scalar(
        lambda z, x: problem.model.log_likelihood(z, {}, x, problem.shared), point, record
    )
    if not split.contractions:
        return lambda t: problem.log_likelihood(direction * t, example)
    values = jax.tree.leaves(example)
    factors = [c.product(leaves[c.leaf], c.record(values)) for c in split.contractions]
    zeros = [jnp.zeros_like(leaf) for leaf in leaves]

    def log_likelihood(t: Array) -> Array:
        shifts = [t * factor for factor in factors]
        return split.scalar(shifts, [t * leaves[leaf] for leaf in split.rest], zeros, values)

    return log_likelihood


def _direction(problem: EPProblem, probes: Array, example: tuple[Array, ...]) -> Array:
    """The unit vector phi of a record, or 0 if its likelihood does not depend on z."""
    gradients = jax.vmap(jax.grad(problem.log_likelihood), in_axes=(0, None))(probes, example)
    largest = jnp.max(jnp.abs(gradients), axis=1)
    best = jnp.argmax(jnp.where(jnp.isfinite(largest), largest, -1))
    scaled = gradients[best] / jnp.where(largest[best] > 0, largest[best], 1)
    return scaled / jnp.maximum(jnp.linalg.norm(scaled), 1e-30)
