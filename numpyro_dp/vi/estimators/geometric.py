r"""Gradients in the geometry of a Gaussian guide: preconditioned, natural and aligned natural.

**Preconditioned gradients** are vanilla gradients without the factor of the guide's transform. The
gradient with respect to an unconstrained scale :math:`s`, :math:`\sigma = T(s)`, carries the factor
:math:`T'(s)`, which is small if :math:`\sigma` is. The release is the gradient without it,

.. math:: s_i = S\, J^\top g_i, \qquad S = (\partial T/\partial s)^{-\top},

that is, the gradient with respect to the *constrained* parameters. Post-processing multiplies it by
:math:`S^{-1}`, so the noise of the scale shrinks with the signal.

**Natural gradients** are vanilla gradients times the inverse Fisher information of the guide,

.. math:: s_i = F^{-1} J^\top g_i, \qquad F = E_q[\nabla_\varphi\log q\,\nabla_\varphi\log q^\top],

in closed form for Gaussian guides. Post-processing multiplies prior and entropy by
:math:`F^{-1}`. For a mean-field guide, :math:`F = \mathrm{diag}(\sigma^{-2},\, 2 T'^2
\sigma^{-2})`.

**Aligned natural gradients** release the natural gradient of the mean, and derive the rest,

.. math:: s_i = I_m^{-1} \nabla_z \log p(x_i \mid z), \qquad I_m^{-1} = \mathrm{Cov}_q(z).

``pull_back`` inverts this map for the released sum, pulls the sum back through the guide as
:func:`~numpyro_dp.estimators.aligned` does, and adds prior and entropy. It multiplies the result by
the inverse Fisher information :math:`F^{-1}`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
from jax import Array

from numpyro_dp._tree import add, select
from numpyro_dp.core import Estimator, Observation, PyTree, Released, Values
from numpyro_dp.model.geometry import Coordinates, Geometry, gaussian_geometry
from numpyro_dp.model.variational import VariationalProblem
from numpyro_dp.vi.estimators.aligned import (
    DrawnPublic,
    observed,
    prepare_draw,
    pull_back_draw,
    slopes,
)
from numpyro_dp.vi.estimators.vanilla import Chart, parametric


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
        return _in_coordinates(problem, geometry, geometry.constrained)

    return build


def natural() -> Callable[[VariationalProblem], Estimator]:
    r"""The estimator that clips natural gradients of all variational parameters.

    For ``AutoDiagonalNormal``, ``AutoNormal`` and ``AutoMultivariateNormal``. The signal of one
    example is a dict with the natural gradient of each unconstrained parameter of the guide, and
    the plain gradient of each parameter of the model. For ``AutoMultivariateNormal`` the signal
    holds :math:`L^{-1} dm` and :math:`L^{-1} dL`. Clip norm and noise are in posterior standard
    deviations, and do not change with the basis.

    The optimiser sees natural gradients. Plain gradient descent with a step size of 1/2 or less
    takes steps in the distributions, not in their parameters. Adam rescales the gradients.

    Returns:
        A function that builds the :class:`~numpyro_dp.core.Estimator` for a model and guide. Pass
        it to :class:`~numpyro_dp.DPSVI` as ``estimator=``. It raises
        :class:`~numpyro_dp.UnsupportedModelError` for other guides.

    Example:
        >>> from numpyro_dp.estimators import natural
        >>> estimator = natural()

    Guarantee:
        The signal reads one record. ``prepare`` and ``pull_back`` read none.

    Reference:
        Jälkö, Prediger, Honkela, Kaski (2024), DPVIm, TMLR, Eqs. 13-16. Here F is
        the Fisher information of the parameters of q (Eq. 13 has the gradient with respect to the
        latents).
    """

    def build(problem: VariationalProblem) -> Estimator:
        geometry = gaussian_geometry(problem, "natural()")
        return _in_coordinates(problem, geometry, geometry.natural)

    return build


def aligned_natural() -> Callable[[VariationalProblem], Estimator]:
    r"""The estimator that clips the natural gradient of the draw.

    For ``AutoDiagonalNormal``, ``AutoNormal`` and ``AutoMultivariateNormal``. The signal of one
    example is a dict. Each latent site has the covariance of the guide times the gradient with
    respect to its unconstrained value (leading axis K with K draws). Each parameter of the model
    has its plain gradient.

    ``clip_norm`` is in units of the latents, not of their gradient. The covariance makes signals
    smaller, so use smaller norms than for ``aligned()``. For ``AutoMultivariateNormal`` with
    covariance :math:`LL^\top`, the signal is :math:`L^\top g`, in posterior standard deviations.

    Returns:
        A function that builds the :class:`~numpyro_dp.core.Estimator` for a model and guide. Pass
        it to :class:`~numpyro_dp.DPSVI` as ``estimator=``. It raises
        :class:`~numpyro_dp.UnsupportedModelError` for other guides.

    Example:
        >>> from numpyro_dp.estimators import aligned_natural
        >>> estimator = aligned_natural()

    Guarantee:
        The signal reads one record. ``prepare`` and ``pull_back`` read none.

    Reference:
        Jälkö, Prediger, Honkela, Kaski (2024), DPVIm, TMLR, Algorithm 2 (mean-field).
    """

    def build(problem: VariationalProblem) -> Estimator:
        geometry = gaussian_geometry(problem, "aligned_natural()")

        def each(apply: Callable[..., PyTree], public: DrawnPublic, latents: PyTree) -> PyTree:
            values = problem.constrain(public.params)
            if problem.num_particles == 1:
                return apply(values, latents)
            return jax.vmap(apply, in_axes=(None, 0))(values, latents)

        def whole(public: DrawnPublic, gradient: PyTree) -> Values:
            return each(geometry.mean.to, public, gradient[0]) | gradient[1]

        def pull_back(public: DrawnPublic, released: Released) -> Values:
            latents = each(geometry.mean.back, public, select(released.total, public.latents))
            own = select(released.total, problem.record_params)
            gradient = pull_back_draw(problem, public, latents, own)
            values = problem.constrain(public.params)
            guide = {name: value for name, value in gradient.items() if name not in own}
            natural = geometry.natural.back(values, geometry.natural.to(values, guide))
            return natural | select(gradient, own)

        def observe(public: DrawnPublic, released: Released) -> Observation:
            latents = select(released.total, public.latents)
            back = functools.partial(each, geometry.mean.back, public)
            return observed(problem, public, released, latents, back)

        signal, factored = slopes(problem, whole)
        prepare = _prepare_constrained(problem, geometry)
        return Estimator(prepare, signal, pull_back, factored, observe)

    return build


def _in_coordinates(
    problem: VariationalProblem, geometry: Geometry, coordinates: Coordinates
) -> Estimator:
    """The estimator that releases gradients in these coordinates."""

    def at(apply: Callable[..., PyTree]) -> Callable[..., PyTree]:
        return lambda params, *given: apply(problem.constrain(params), *given)

    def finish(values: Values, released: Values, rest: Values) -> Values:
        return coordinates.back(values, add(coordinates.to(values, rest), released))

    maps = coordinates.to, coordinates.entries, finish, coordinates.frame
    release, entries, finish_at, frame = map(at, maps)
    back = None if coordinates is geometry.constrained else at(geometry.mean.back)
    sums = geometry.sums if problem.num_particles == 1 else None
    prepare = _prepare_constrained(problem, geometry)
    return parametric(problem, Chart(prepare, release, entries, finish_at, sums, frame, back))


def _prepare_constrained(
    problem: VariationalProblem, geometry: Geometry
) -> Callable[[Array, Values], DrawnPublic]:
    """Returns ``prepare``: one draw and its vjp with respect to packed constrained parameters."""

    def pack(params: Values) -> Values:
        # The guide does not read the model's parameters, so they are not transformed.
        return geometry.pack(problem.constrain(params)) | select(params, problem.record_params)

    return prepare_draw(problem, pack, geometry.unpack)
