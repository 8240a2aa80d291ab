r"""Preconditioned gradients: vanilla gradients without the factor of the guide's transform.

The gradient with respect to an unconstrained scale :math:`s`, :math:`\sigma = T(s)`, carries the
factor :math:`T'(s)`, which is small if :math:`\sigma` is. The release is the gradient without it,

.. math:: s_i = S\, J^\top g_i, \qquad S = (\partial T/\partial s)^{-\top},

that is, the gradient with respect to the *constrained* parameters. Post-processing multiplies it by
:math:`S^{-1}`, so the noise of the scale shrinks with the signal.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax import Array

from numpyro_dp._tree import add, select
from numpyro_dp.core import Estimator
from numpyro_dp.model.geometry import Coordinates, Geometry, gaussian_geometry
from numpyro_dp.model.variational import VariationalProblem, likelihood_key
from numpyro_dp.vi.estimators.aligned import DrawnPublic
from numpyro_dp.vi.estimators.vanilla import Chart, parametric

__all__ = ["in_coordinates", "preconditioned", "prepare_constrained"]


def preconditioned() -> Callable[[VariationalProblem], Estimator]:
    r"""The estimator that clips the gradient with respect to the constrained parameters.

    For ``AutoDiagonalNormal``, ``AutoNormal`` and ``AutoMultivariateNormal``. The signal of one
    example is a dict with the gradient with respect to each constrained parameter of the guide and
    each parameter of the model. A Cholesky factor has its entries on and below the diagonal.
    Without clip and noise it gives the gradient of the evidence lower bound.

    Returns:
        A function that builds the :class:`~numpyro_dp.core.Estimator` for a model and guide. Pass
        it to :class:`~numpyro_dp.DPSVI` as ``estimator=``. It raises
        :class:`~numpyro_dp.UnsupportedModelError` for other guides.

    Example:
        >>> from numpyro_dp.estimators import preconditioned
        >>> estimator = preconditioned()

    Guarantee:
        The signal reads one record. ``prepare`` and ``pull_back`` read none.

    Reference:
        Jälkö, Prediger, Honkela, Kaski (2024), DPVIm, TMLR, Eq. 17. There the optimiser sees
        the preconditioned gradient. Here it sees the gradient times :math:`S^{-1}`, so only the
        noise changes, and Adam's steps with it.
    """

    def build(problem: VariationalProblem) -> Estimator:
        geometry = gaussian_geometry(problem, "preconditioned()")
        return in_coordinates(problem, geometry, geometry.constrained)

    return build


def in_coordinates(
    problem: VariationalProblem, geometry: Geometry, coordinates: Coordinates
) -> Estimator:
    """The estimator that releases gradients in these coordinates."""

    def at(apply: Callable[..., Any]) -> Callable[..., Any]:
        return lambda params, *given: apply(problem.constrain(params), *given)

    def finish(values: Any, released: dict[str, Any], rest: dict[str, Any]) -> dict[str, Any]:
        return coordinates.back(values, add(coordinates.to(values, rest), released))

    maps = coordinates.to, coordinates.entries, finish, coordinates.frame
    release, entries, finish_at, frame = map(at, maps)
    back = None if coordinates is geometry.constrained else at(geometry.mean.back)
    sums = geometry.sums if problem.num_particles == 1 else None
    prepare = prepare_constrained(problem, geometry)
    return parametric(problem, Chart(prepare, release, entries, finish_at, sums, frame, back))


def prepare_constrained(
    problem: VariationalProblem, geometry: Geometry
) -> Callable[[Array, dict[str, Any]], DrawnPublic]:
    """Returns ``prepare``: one draw and its vjp with respect to packed constrained parameters."""

    def prepare(rng_key: Array, params: dict[str, Any]) -> DrawnPublic:
        # The guide does not read the model's parameters, so they are not transformed.
        packed = geometry.pack(problem.constrain(params)) | select(params, problem.record_params)
        (latents, entropy), vjp = jax.vjp(
            lambda p: problem.draw_at(geometry.unpack(p), rng_key), packed
        )
        return DrawnPublic(params, latents, entropy, vjp, likelihood_key(rng_key))

    return prepare
