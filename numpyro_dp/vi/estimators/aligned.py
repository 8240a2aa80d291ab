r"""Aligned gradients: release the gradient of the draw, and derive the rest from it.

With a draw :math:`z = z_\varphi(\eta)` shared by the batch, only

.. math:: s_i = \nabla_z \log p(x_i \mid z)

is clipped and summed. The released sum :math:`\tilde s` gives the gradient of the evidence lower
bound for *all* variational parameters by post-processing:

.. math::
    \tilde g = \Big(\frac{\partial z}{\partial\varphi}\Big)^{\!\top}
        \big(\tilde s / q + \nabla_z \log p(z)\big) + \nabla_\varphi H(q_\varphi).

So the noise of the scale parameters is aligned with their signal.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.flatten_util import ravel_pytree

from numpyro_dp._tree import add, select
from numpyro_dp.core import Estimator, FactoredSignal, Observation, PyTree, Released, Values
from numpyro_dp.model.variational import VariationalProblem, likelihood_key

_OTHER_DRAWS = 4


class DrawnPublic(NamedTuple):
    """Public values of one step.

    Attributes:
        params: Unconstrained parameters.
        latents: The draw.
        entropy: Entropy estimate of the draw.
        vjp: Maps cotangents of (latents, entropy) to cotangents of the parameters, in the
            coordinates of the estimator.
        rng_key: Seeds draws in the likelihood.
        entries: Entries of the Jacobian of the draw by parameter of the guide, empty if the
            estimator does not use them.
    """

    params: Values
    latents: Values
    entropy: Array
    vjp: Callable[..., PyTree]
    rng_key: Array
    entries: dict[str, Array]


def aligned() -> Callable[[VariationalProblem], Estimator]:
    r"""The aligned gradient estimator, for every reparameterised guide.

    The signal of one example is a dict of gradients: with respect to the unconstrained value of
    each latent site (leading axis K with K draws), and to each parameter of the model.
    ``clip_norm`` may be a dict with the same keys.

    For a mean-field guide this is Algorithm 1 of the paper, for a Cholesky guide its section 3.1.2.
    Low-rank and flow guides use the same vector-Jacobian product.

    Returns:
        A function that builds the :class:`~numpyro_dp.core.Estimator` for a model and guide. Pass
        it to :class:`~numpyro_dp.DPSVI` as ``estimator=``.

    Example:
        >>> from numpyro_dp.estimators import aligned
        >>> estimator = aligned()

    Guarantee:
        The signal reads one record. ``prepare`` and ``pull_back`` read none.

    Reference:
        Jälkö, Prediger, Honkela, Kaski (2024), DPVIm: Differentially private variational
        inference improved, TMLR, Algorithm 1.
    """

    def build(problem: VariationalProblem) -> Estimator:
        def release(_: DrawnPublic, gradient: tuple[Values, Values]) -> Values:
            return gradient[0] | gradient[1]

        signal, factored = slopes(problem, release)

        def pull_back(public: DrawnPublic, released: Released) -> Values:
            latents = select(released.total, public.latents)
            own = select(released.total, problem.record_params)
            return pull_back_draw(problem, public, latents, own)

        def observe(public: DrawnPublic, released: Released) -> Observation:
            return observed(problem, public, released, select(released.total, public.latents))

        prepare = prepare_draw(problem)
        return Estimator(prepare, signal, pull_back, factored._replace(selects=True), observe)

    return build


def slopes(
    problem: VariationalProblem, release: Callable[[DrawnPublic, PyTree], Values]
) -> tuple[Callable[[DrawnPublic, PyTree], Values], FactoredSignal]:
    """The signal of one record, as a function and as a linear map of a gradient.

    Args:
        problem: Model and guide.
        release: ``(public, gradient) -> signal``. The gradient of the log likelihood has two parts:
            with respect to the draw, and to the parameters of the model.
    """

    def scalar(public: DrawnPublic, point: PyTree, example: PyTree) -> Array:
        return problem.log_likelihood(point[0], point[1], example, public.rng_key)

    def point(public: DrawnPublic) -> tuple[Values, Values]:
        return public.latents, select(public.params, problem.record_params)

    def core(public: DrawnPublic, gradient: PyTree, names: tuple[str, ...]) -> Values:
        return select(release(public, gradient), names)

    def signal(public: DrawnPublic, example: PyTree) -> Values:
        return release(public, jax.grad(scalar, 1)(public, point(public), example))

    return signal, FactoredSignal(point, scalar, core, lambda public, tree, names: tree)


def prepare_draw(
    problem: VariationalProblem,
    pack: Callable[[Values], Values] | None = None,
    unpack: Callable[[Values], Values] | None = None,
) -> Callable[[Array, Values], DrawnPublic]:
    """Returns ``prepare``: one draw and its vector-Jacobian product.

    Args:
        problem: Model and guide.
        pack: From the unconstrained parameters to the coordinates of the product, by default
            the parameters themselves.
        unpack: From these coordinates to constrained parameters.
    """
    unpack = unpack or problem.constrain

    def prepare(rng_key: Array, params: Values) -> DrawnPublic:
        packed = pack(params) if pack else params
        (latents, entropy), vjp = jax.vjp(lambda p: problem.draw_at(unpack(p), rng_key), packed)
        return DrawnPublic(params, latents, entropy, vjp, likelihood_key(rng_key), {})

    return prepare


def observed(
    problem: VariationalProblem,
    public: DrawnPublic,
    released: Released,
    score: Values,
    change: Callable[[Values], Values] | None = None,
) -> Observation:
    """Returns the draw of a step and the score that was released at it.

    With K draws a step, it is their mean and the sum of their scores.

    Args:
        problem: Model and guide.
        public: Public values of the step.
        released: Gives the noise in each entry of ``score``.
        score: Released values by latent site.
        change: The linear map from ``score`` to the gradient with respect to the draw, if there is
            one.
    """
    many = problem.num_particles > 1

    def mean_of(latents: dict[str, Array]) -> Array:
        return _joined(latents, jnp.mean if many else None)

    point, mean = mean_of(public.latents), problem.mean(public.params)
    if mean is not None:
        shift = point - _joined(mean, None)
    else:
        # The mean of a few other draws stands for the mean of the guide.
        keys = jax.random.split(jax.random.fold_in(public.rng_key, 2), _OTHER_DRAWS)
        others = jax.vmap(lambda key: mean_of(problem.draw(public.params, key)[0]))(keys)
        # With K others, point - mean has a variance larger by 1 / K than its covariance with the
        # point.
        shift = (point - jnp.mean(others, axis=0)) * (_OTHER_DRAWS / (_OTHER_DRAWS + 1))
    squares = jax.tree.map(jnp.ones_like, score)
    if change is not None:
        values, unravel = ravel_pytree(score)
        units = jax.vmap(unravel)(jnp.eye(values.size, dtype=values.dtype))
        score, rows = change(score), jax.vmap(change)(units)
        squares = jax.tree.map(lambda leaf: jnp.sum(leaf**2, axis=0), rows)
    total = jnp.sum if many else None
    noise = released.noise_scale * jnp.sqrt(_joined(squares, total))
    return Observation(point, shift, _joined(score, total), noise)


def _joined(tree: dict[str, Array], reduce: Callable[..., Array] | None) -> Array:
    """Values of all sites as one vector, reduced over the draws of a step if there are several."""
    if reduce is not None:
        tree = jax.tree.map(lambda leaf: reduce(leaf, axis=0), tree)
    return ravel_pytree(tree)[0]


def pull_back_draw(
    problem: VariationalProblem, public: DrawnPublic, latents: Values, record_params: Values
) -> Values:
    """Completes likelihood gradients to the gradient of the negative evidence lower bound.

    The result is in the coordinates of ``public.vjp``.

    Args:
        problem: Model and guide.
        public: Public values of the step.
        latents: Gradient of the log likelihood with respect to the draw.
        record_params: Gradient of the log likelihood with respect to ``problem.record_params``.
    """
    prior, prior_params = jax.grad(problem.log_prior, (0, 1))(public.latents, public.params)
    (gradient,) = public.vjp((add(prior, latents), jnp.ones_like(public.entropy)))
    for name in problem.record_params:  # the prior reads no other parameter
        gradient[name] = add(gradient[name], prior_params[name])
    gradient |= {name: add(gradient[name], value) for name, value in record_params.items()}
    return jax.tree.map(jnp.negative, gradient)
