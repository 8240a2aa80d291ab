r"""Aligned natural gradients: release the natural gradient of the mean, and derive the rest.

.. math:: s_i = I_m^{-1} \nabla_z \log p(x_i \mid z), \qquad I_m^{-1} = \mathrm{Cov}_q(z).

``pull_back`` inverts this map for the released sum, pulls the sum back through the guide as
:func:`~numpyro_dp.estimators.aligned` does, and adds prior and entropy. It multiplies the result by
the inverse Fisher information :math:`F^{-1}`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

from numpyro_dp._tree import select
from numpyro_dp.core import Estimator, Observation, Released
from numpyro_dp.model.geometry import gaussian_geometry
from numpyro_dp.model.variational import VariationalProblem
from numpyro_dp.vi.estimators.aligned import DrawnPublic, aligned, observed, pull_back_draw
from numpyro_dp.vi.estimators.preconditioned import prepare_constrained

__all__ = ["aligned_natural"]


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
        plain = aligned()(problem).factored

        def each(apply: Any, public: DrawnPublic, latents: Any) -> Any:
            values = problem.constrain(public.params)
            if problem.num_particles == 1:
                return apply(values, latents)
            return jax.vmap(apply, in_axes=(None, 0))(values, latents)

        def whole(public: DrawnPublic, gradient: Any) -> dict[str, Any]:
            return each(geometry.mean.to, public, gradient[0]) | gradient[1]

        def core(public: DrawnPublic, gradient: Any, names: tuple[str, ...]) -> dict[str, Any]:
            return select(whole(public, gradient), names)

        def signal(public: DrawnPublic, example: Any) -> dict[str, Any]:
            return whole(public, jax.grad(plain.scalar, 1)(public, plain.point(public), example))

        def pull_back(public: DrawnPublic, released: Released) -> dict[str, Any]:
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

        factored = plain._replace(core=core, selects=False)
        prepare = prepare_constrained(problem, geometry)
        return Estimator(prepare, signal, pull_back, factored, observe)

    return build
