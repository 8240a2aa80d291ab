r"""Aligned natural gradients: release the natural gradient of the mean, derive the rest from it.

.. math:: s_i = I_m^{-1} \nabla_z \log p(x_i \mid z), \qquad I_m^{-1} = \mathrm{Cov}_q(z).

The released sum is turned back and pulled back through the guide, as
:func:`~numpyro_dp.estimators.aligned` does. Then prior and entropy are added, and the sum is
multiplied by :math:`F^{-1}`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from numpyro_dp._tree import select
from numpyro_dp.core import Estimator, Released
from numpyro_dp.model.geometry import gaussian_geometry
from numpyro_dp.model.variational import VariationalProblem
from numpyro_dp.vi.estimators.aligned import DrawnPublic, aligned, pull_back_draw
from numpyro_dp.vi.estimators.preconditioned import prepare_constrained

__all__ = ["aligned_natural"]


def aligned_natural() -> Callable[[VariationalProblem], Estimator]:
    r"""The estimator that clips the natural gradient of the draw.

    For ``AutoDiagonalNormal``, ``AutoNormal`` and ``AutoMultivariateNormal``. The signal of one
    example is a dict with the covariance of the guide times the gradient with respect to each
    latent site's unconstrained value (leading axis K with K draws), and the plain gradient of each
    parameter of the model. ``clip_norm`` is in units of the latents here, not of their gradient:
    the covariance makes signals smaller, so norms that suit are smaller than for ``aligned()``.
    For ``AutoMultivariateNormal``, of covariance :math:`LL^\top`, the signal is in the frame of the
    guide, :math:`L^\top g`: in posterior standard deviations.

    Returns:
        A function that builds the :class:`~numpyro_dp.core.Estimator` for a model and guide; pass
        it to :class:`~numpyro_dp.DPSVI` as ``estimator=``. It raises
        :class:`~numpyro_dp.UnsupportedModelError` for other guides.

    Example:
        >>> from numpyro_dp.estimators import aligned_natural
        >>> estimator = aligned_natural()

    Guarantee:
        The signal reads one record; ``prepare`` and ``pull_back`` read none.

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
            return each(geometry.mean_signal, public, gradient[0]) | gradient[1]

        def core(public: DrawnPublic, gradient: Any, names: tuple[str, ...]) -> dict[str, Any]:
            return select(whole(public, gradient), names)

        def signal(public: DrawnPublic, example: Any) -> dict[str, Any]:
            return whole(public, jax.grad(plain.scalar, 1)(public, plain.point(public), example))

        def pull_back(public: DrawnPublic, released: Released) -> dict[str, Any]:
            latents = each(geometry.mean_gradient, public, select(released.total, public.latents))
            own = select(released.total, problem.record_params)
            gradient = pull_back_draw(problem, public, latents, own)
            values = problem.constrain(public.params)
            guide = {name: value for name, value in gradient.items() if name not in own}
            natural = geometry.from_local(values, geometry.local(values, guide))
            return natural | select(gradient, own)

        factored = plain._replace(core=core, selects=False)
        return Estimator(prepare_constrained(problem, geometry), signal, pull_back, factored)

    return build
