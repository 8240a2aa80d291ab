r"""Vanilla gradients: per-example gradients with respect to all variational parameters.

.. math:: s_i = \nabla_\varphi \log p(x_i \mid z_\varphi(\eta)) = J^\top g_i,
    \qquad J = \partial z/\partial\varphi,\; g_i = \nabla_z \log p(x_i \mid z).

The draw is shared by the batch, so no array of (batch, parameters) is needed: the norm is
:math:`g_i^\top J J^\top g_i`, and the clipped sum is :math:`J^\top \sum_i w_i g_i`. For Gaussian
guides each parameter entry moves one coordinate of the draw, and :math:`JJ^\top` is diagonal.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.flatten_util import ravel_pytree

from numpyro_dp._tree import add, select, squared_norm, widen
from numpyro_dp.core import Blocks, Estimator, FactoredSignal
from numpyro_dp.estimators.aligned import (
    DrawnPublic,
    block_norms,
    prepare_draw,
    pull_back_draw,
)
from numpyro_dp.model.variational import VariationalProblem

__all__ = ["ROUNDING", "Chart", "parametric", "vanilla"]

ROUNDING = 32  # multiples of the unit roundoff that a product with J may be off by


class VanillaPublic(NamedTuple):
    """Public values of one step.

    Attributes:
        drawn: The draw and its vector-Jacobian product.
        gram: For each parameter p the diagonal of J_p J_p^T as a tree like the latents, where
            that is all there is, or a root of it.
    """

    drawn: DrawnPublic
    gram: dict[str, Any]


def vanilla() -> Callable[[VariationalProblem], Estimator]:
    r"""The estimator of the first DPVI: clip the gradient of all variational parameters together.

    The signal of one example is a dict with the gradient with respect to each unconstrained
    parameter; ``clip_norm`` may be a dict with the same keys. Prior and entropy see no data and
    stay outside the clip.

    Returns:
        A function that builds the :class:`~numpyro_dp.Estimator` for a model and guide; pass it
        to :class:`~numpyro_dp.DPSVI` as ``estimator=``.

    Example:
        >>> from numpyro_dp import vanilla
        >>> estimator = vanilla()

    Guarantee:
        The signal reads one record; ``prepare`` and ``pull_back`` read none.

    Reference:
        Jälkö, Dikmen, Honkela (2017), Differentially private variational inference for
        non-conjugate models, UAI.
    """

    def build(problem: VariationalProblem) -> Estimator:
        chart = Chart(
            prepare_draw(problem),
            lambda params, gradient: gradient,
            lambda params, released, rest: add(rest, released),
            problem.coordinate_sums(),
        )
        return parametric(problem, chart)

    return build


class Chart(NamedTuple):
    """Coordinates in which the gradient of all variational parameters is released.

    Attributes:
        prepare: ``(rng_key, params) -> DrawnPublic``; its vector-Jacobian product gives gradients
            in coordinates of its own.
        release: ``(params, gradient) -> signal``: a linear map from those coordinates, of the
            guide's own parameters, to the entries of the signal.
        finish: ``(params, released, rest) -> gradient`` in unconstrained coordinates; ``rest`` is
            that of prior and entropy, in the coordinates of ``prepare``.
        sums: How entries of the signal belong to coordinates of the draw, where each belongs to
            one (see :meth:`~numpyro_dp.model.variational.VariationalProblem.coordinate_sums`).
    """

    prepare: Callable[[Array, dict[str, Any]], DrawnPublic]
    release: Callable[[dict[str, Any], dict[str, Any]], dict[str, Any]]
    finish: Callable[[dict[str, Any], dict[str, Any], dict[str, Any]], dict[str, Any]]
    sums: dict[str, Callable[[Array], Any]] | None


def parametric(problem: VariationalProblem, chart: Chart) -> Estimator:
    """Returns the estimator that releases the gradient of all parameters in some coordinates."""
    names = problem.model_params
    shared_names = set(names) & problem.guide_params

    def scalar(public: VanillaPublic, point: Any, example: Any) -> Array:
        return problem.log_likelihood(*point, example, public.drawn.rng_key)

    def point(public: VanillaPublic) -> Any:
        return public.drawn.latents, select(public.drawn.params, names)

    def expand(public: VanillaPublic, gradient: Any) -> dict[str, Any]:
        latents, model_params = gradient
        like = jax.tree.map(lambda g, z: g.astype(z.dtype), latents, public.drawn.latents)
        pulled = _pulled(public.drawn, like)
        own = {name: add(pulled.pop(name), model_params[name]) for name in names}
        return chart.release(public.drawn.params, pulled) | own

    def signal(public: VanillaPublic, example: Any) -> dict[str, Any]:
        return expand(public, jax.grad(scalar, 1)(public, point(public), example))

    def squared_norms(public: VanillaPublic, gradient: Any, blocks: Blocks) -> tuple[Array, ...]:
        if shared_names:  # parameters of model and guide at once: no shorter way
            return block_norms(expand(public, gradient), blocks)
        squares = []
        for members in blocks:
            grams = [public.gram[name] for name in members if name in public.gram]
            own = [gradient[1][name] for name in members if name in names]
            squares.append(_quadratic(grams, gradient[0]) + squared_norm(own))
        return tuple(squares)

    def pull_back(public: VanillaPublic, released: dict[str, Any]) -> dict[str, Any]:
        zeros = jax.tree.map(jnp.zeros_like, public.drawn.latents)
        rest = jax.tree.map(jnp.negative, pull_back_draw(problem, public.drawn, zeros, {}))
        own = {name: add(rest.pop(name), released[name]) for name in names}
        guide = select(released, rest)
        gradient = chart.finish(public.drawn.params, guide, rest) | own
        return jax.tree.map(jnp.negative, gradient)

    def prepare(rng_key: Array, params: dict[str, Any]) -> VanillaPublic:
        drawn = chart.prepare(rng_key, params)
        return VanillaPublic(drawn, {} if shared_names else _gram(problem, chart, drawn))

    factored = FactoredSignal(point, scalar, squared_norms, expand)
    return Estimator(prepare, signal, pull_back, factored)


def _pulled(drawn: DrawnPublic, latents: Any) -> dict[str, Any]:
    """Gradient of all parameters from that of the draw, in the coordinates of the chart."""
    (gradient,) = drawn.vjp((latents, jnp.zeros_like(drawn.entropy)))
    return dict(gradient)


def _gram(problem: VariationalProblem, chart: Chart, drawn: DrawnPublic) -> dict[str, Any]:
    """Returns J_p J_p^T for each guide parameter p: its diagonal where that is all, or a root."""
    own = set(problem.model_params)

    def rows(latents: Any) -> dict[str, Any]:
        pulled = _pulled(drawn, latents)
        return chart.release(drawn.params, select(pulled, set(pulled) - own))

    if chart.sums is not None:
        # Rows of J share no parameter: the entries of J^T 1 are those of J itself.
        entries = rows(jax.tree.map(jnp.ones_like, drawn.latents))
        return {name: chart.sums[name](_square(widen(entries[name]))) for name in entries}
    flat, unravel = ravel_pytree(drawn.latents)
    jacobian = jax.vmap(lambda row: rows(unravel(row)))(jnp.eye(flat.size))
    return {name: _root(jacobian[name], flat.size) for name in jacobian}


def _square(entries: Array) -> Array:
    """Squares; what would vanish below the smallest number becomes that number."""
    return jnp.square(entries) + jnp.finfo(entries.dtype).tiny


class _Root(NamedTuple):
    """R with R^T R = J J^T for one parameter, and the Frobenius norm of J."""

    factor: Array
    size: Array


def _root(jacobian: Any, rows: int) -> _Root:
    """Returns the triangular root of J J^T for a tree of arrays with leading axis ``rows``."""
    leaves = [leaf.reshape(rows, -1) for leaf in jax.tree.leaves(widen(jacobian))]
    matrix = jnp.concatenate(leaves, axis=1)
    return _Root(jnp.linalg.qr(matrix.T, mode="r"), jnp.sqrt(squared_norm(matrix)))


def _quadratic(grams: list[Any], latents: dict[str, Any]) -> Array:
    """Returns the squared norm of J^T g, rounding included: never too small.

    Where J is nearly singular, J^T g may be small although J and g are large; the multiplication
    with J^T then has an error that clipping does not see. The norm grows by a bound on it.
    """
    if not grams:
        return jnp.zeros(())
    if isinstance(grams[0], dict):  # diagonals: no sums, no cancellation
        weights: dict[str, Array] = {}
        for gram in grams:  # one reduction for each site, not for each parameter
            weights |= {site: weights.get(site, 0) + weight for site, weight in gram.items()}
        squares = {site: jnp.square(widen(latents[site])) for site in weights}
        terms = [_dot(weight, squares[site]) for site, weight in weights.items()]
        return sum(terms, start=jnp.zeros(()))
    flat = widen(ravel_pytree(latents)[0])
    norm = jnp.sqrt(squared_norm([root.factor @ flat for root in grams]))
    error = ROUNDING * jnp.finfo(flat.dtype).eps * jnp.sqrt(squared_norm(flat))
    return jnp.square(norm + error * sum(root.size for root in grams))


def _dot(weights: Array, squares: Array) -> Array:
    # As a product, not as a sum of products: XLA vectorises it on a CPU.
    return jnp.dot(weights.reshape(-1), squares.reshape(-1), precision=lax.Precision.HIGHEST)
