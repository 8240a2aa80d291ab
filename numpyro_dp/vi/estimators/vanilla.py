r"""Vanilla gradients: per-example gradients with respect to all variational parameters.

.. math:: s_i = \nabla_\varphi \log p(x_i \mid z_\varphi(\eta)) = J^\top g_i,
    \qquad J = \partial z/\partial\varphi,\; g_i = \nabla_z \log p(x_i \mid z).

For Gaussian guides each parameter entry moves one coordinate of the draw, so :math:`JJ^\top` is a
diagonal :math:`R^2`. Then :math:`v_i = R g_i` has the same norm as :math:`s_i`, and the clipped sum
is :math:`J^\top R^{-1} \sum_i w_i v_i`. So Gaussian guides need no array of shape (batch,
parameters). Other guides do.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_dp._tree import add, select, widen
from numpyro_dp.core import Estimator, Observation, PyTree, Released, Values
from numpyro_dp.model.variational import VariationalProblem
from numpyro_dp.vi.estimators.aligned import (
    DrawnPublic,
    observed,
    prepare_draw,
    pull_back_draw,
    slopes,
)


def vanilla() -> Callable[[VariationalProblem], Estimator]:
    r"""The estimator of the first DPVI, which clips the gradient of all variational parameters.

    The signal of one example is a dict with the gradient with respect to each unconstrained
    parameter. ``clip_norm`` may be a dict with the same keys. Prior and entropy read no data, so
    they are not clipped.

    Returns:
        A function that builds the :class:`~numpyro_dp.core.Estimator` for a model and guide. Pass
        it to :class:`~numpyro_dp.DPSVI` as ``estimator=``.

    Example:
        >>> from numpyro_dp.estimators import vanilla
        >>> estimator = vanilla()

    Guarantee:
        The signal reads one record. ``prepare`` and ``pull_back`` read none.

    Reference:
        Jälkö, Dikmen, Honkela (2017), Differentially private variational inference for
        non-conjugate models, UAI.
    """

    def build(problem: VariationalProblem) -> Estimator:
        chart = Chart(
            prepare_draw(problem),
            lambda params, gradient: gradient,
            lambda params, gradient: gradient,
            lambda params, released, rest: add(rest, released),
            problem.coordinate_sums(),
        )
        return parametric(problem, chart)

    return build


class Chart(NamedTuple):
    """Coordinates in which the gradient of all variational parameters is released.

    Attributes:
        prepare: ``(rng_key, params) -> DrawnPublic``. Its vector-Jacobian product gives gradients
            in the coordinates of ``prepare``.
        release: ``(params, gradient) -> signal``. A linear map from the coordinates of ``prepare``,
            for the guide's own parameters, to the entries of the signal.
        entries: ``(params, J^T 1) -> entries``. The signal of a gradient with a 1 in every
            coordinate of ``frame``.
        finish: ``(params, released, rest) -> gradient`` in unconstrained coordinates. ``rest`` is
            the gradient of prior and entropy, in the coordinates of ``prepare``.
        sums: Maps entries of the signal to coordinates of the draw, if each belongs to one (see
            :meth:`~numpyro_dp.model.variational.VariationalProblem.coordinate_sums`).
        frame: ``(params, latents) -> latents``. The linear map to the coordinates of ``sums``.
        back: ``(params, entries of the locations by site) -> gradient with respect to the draw``.
            ``None`` if they are the same.
    """

    prepare: Callable[[Array, Values], DrawnPublic]
    release: Callable[[Values, Values], Values]
    entries: Callable[[Values, Values], Values]
    finish: Callable[[Values, Values, Values], Values]
    sums: dict[str, Callable[[Array], PyTree]] | None
    frame: Callable[[Values, PyTree], PyTree] = lambda params, latents: latents
    back: Callable[[Values, PyTree], PyTree] | None = None


def parametric(problem: VariationalProblem, chart: Chart) -> Estimator:
    """Returns the estimator that releases the gradient of all parameters in a chart."""
    names = problem.record_params
    shared = bool(set(names) & problem.guide_params)

    def whole(public: DrawnPublic, gradient: PyTree) -> Values:
        latents, record_params = gradient
        pulled = _pulled(public, latents)
        own = {name: add(pulled.pop(name), record_params[name]) for name in names}
        return chart.release(public.params, pulled) | own

    def prepare(rng_key: Array, params: Values) -> DrawnPublic:
        drawn = chart.prepare(rng_key, params)
        return drawn if general else drawn._replace(entries=_entries(chart, drawn, names))

    def pull_back(public: DrawnPublic, released: Released) -> Values:
        zeros = jax.tree.map(jnp.zeros_like, public.latents)
        rest = jax.tree.map(jnp.negative, pull_back_draw(problem, public, zeros, {}))
        own = {name: add(rest.pop(name), released.total[name]) for name in names}
        guide = select(released.total, rest)
        gradient = chart.finish(public.params, guide, rest) | own
        return jax.tree.map(jnp.negative, gradient)

    # The slope of a location is the slope of the draw.
    sums = chart.sums or {}
    locations = [name for name in sums if name.endswith("loc")]

    def observe(public: DrawnPublic, released: Released) -> Observation:
        score: dict[str, Array] = {}
        for name in locations:
            score |= sums[name](released.total[name])
        back = chart.back and functools.partial(chart.back, public.params)
        return observed(problem, public, released, score, back)

    # A parameter that model and guide share has entries of both kinds.
    general = bool(problem.guide_params) and (shared or chart.sums is None)
    signal, factored = slopes(problem, whole)
    if not general:  # otherwise the sum needs an array of shape (batch, parameters)
        core, expand = _by_coordinate(chart)
        factored = factored._replace(core=core, expand=expand)
    # Without parameters of the guide, each entry is the gradient of one parameter of the model.
    factored = factored._replace(selects=not problem.guide_params)
    known = None if general or not locations else observe
    return Estimator(prepare, signal, pull_back, factored, known)


def _by_coordinate(chart: Chart) -> tuple[Callable[..., PyTree], Callable[..., Values]]:
    """Sums coordinates of the draw, each scaled by the norm of its row of J."""
    sums = chart.sums or {}

    def roots(public: DrawnPublic, names: tuple[str, ...]) -> dict[str, Array]:
        squares: dict[str, Array] = {}
        for name in names:
            entries = widen(public.entries[name])
            # Squares may underflow to 0: the smallest normal number keeps the division finite.
            for site, value in sums[name](jnp.square(entries)).items():
                squares[site] = squares.get(site, jnp.finfo(value.dtype).tiny) + value
        return {site: jnp.sqrt(square) for site, square in squares.items()}

    def core(public: DrawnPublic, gradient: PyTree, names: tuple[str, ...]) -> PyTree:
        guide = tuple(name for name in names if name in public.entries)
        latents = widen(chart.frame(public.params, gradient[0]))
        scaled = {site: root * latents[site] for site, root in roots(public, guide).items()}
        return scaled, {name: gradient[1][name] for name in names if name not in guide}

    def expand(public: DrawnPublic, tree: PyTree, names: tuple[str, ...]) -> Values:
        guide = tuple(name for name in names if name in public.entries)
        scale = roots(public, guide)
        result = dict(tree[1])
        for name in guide:
            entries = widen(public.entries[name])
            sites, transpose = jax.vjp(sums[name], entries)
            ratio = entries / transpose(select(scale, sites))[0]
            result[name] = ratio * transpose(select(tree[0], sites))[0]
        return result

    return core, expand


def _entries(chart: Chart, drawn: DrawnPublic, record_params: tuple[str, ...]) -> dict[str, Array]:
    """Returns the entries of J. Rows do not overlap, so these are the entries of J^T 1."""
    pulled = _pulled(drawn, jax.tree.map(jnp.ones_like, drawn.latents))
    return chart.entries(drawn.params, {n: v for n, v in pulled.items() if n not in record_params})


def _pulled(drawn: DrawnPublic, latents: PyTree) -> Values:
    """Pulls the gradient of the draw back to all parameters, in the coordinates of the chart."""
    like = jax.tree.map(lambda g, z: g.astype(z.dtype), latents, drawn.latents)
    (gradient,) = drawn.vjp((like, jnp.zeros_like(drawn.entropy)))
    return dict(gradient)
