r"""Aligned natural gradients: release the natural gradient of the mean, derive the rest from it.

.. math:: s_i = I_m^{-1} \nabla_z \log p(x_i \mid z), \qquad I_m^{-1} = \mathrm{Cov}_q(z).

The released sum is turned back by :math:`I_m`, pulled back through the guide as by
:func:`~numpyro_dp.aligned`, joined by prior and entropy, and multiplied with :math:`F^{-1}`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_dp._tree import select, squared_norm
from numpyro_dp.core import Blocks, Estimator, FactoredSignal
from numpyro_dp.estimators.aligned import DrawnPublic, aligned, block_norms, pull_back_draw
from numpyro_dp.estimators.preconditioned import prepare_constrained
from numpyro_dp.estimators.vanilla import ROUNDING
from numpyro_dp.model.geometry import gaussian_geometry
from numpyro_dp.model.variational import VariationalProblem

__all__ = ["aligned_natural"]


def aligned_natural() -> Callable[[VariationalProblem], Estimator]:
    r"""The estimator that clips the natural gradient of the draw.

    For ``AutoDiagonalNormal``, ``AutoNormal`` and ``AutoMultivariateNormal``. The signal of one
    example is a dict with the covariance of the guide times the gradient with respect to each
    latent site's unconstrained value (leading axis K with K draws), and the plain gradient of each
    parameter of the model. ``clip_norm`` is in units of the latents here, not of their gradient:
    the covariance makes signals smaller, so norms that suit are smaller than for ``aligned()``.

    Returns:
        A function that builds the :class:`~numpyro_dp.Estimator` for a model and guide; pass it
        to :class:`~numpyro_dp.DPSVI` as ``estimator=``. It raises
        :class:`~numpyro_dp.UnsupportedModelError` for other guides.

    Example:
        >>> from numpyro_dp import aligned_natural
        >>> estimator = aligned_natural()

    Guarantee:
        The signal reads one record; ``prepare`` and ``pull_back`` read none.

    Reference:
        Jälkö, Prediger, Honkela, Kaski (2024), DPVIm, TMLR, Algorithm 2; for the Cholesky guide
        by the same rule, beyond the paper.
    """

    def build(problem: VariationalProblem) -> Estimator:
        geometry = gaussian_geometry(problem, "aligned_natural()")
        plain = aligned()(problem).factored

        def each(apply: Any, public: DrawnPublic, latents: Any) -> Any:
            values = problem.constrain(public.params)
            if problem.num_particles == 1:
                return apply(values, latents)
            return jax.vmap(apply, in_axes=(None, 0))(values, latents)

        def expand(public: DrawnPublic, gradient: Any) -> dict[str, Any]:
            return each(geometry.covariance, public, gradient[0]) | gradient[1]

        def signal(public: DrawnPublic, example: Any) -> dict[str, Any]:
            gradient = jax.grad(plain.scalar, 1)(public, plain.point(public), example)
            return expand(public, gradient)

        def squared_norms(public: DrawnPublic, gradient: Any, blocks: Blocks) -> tuple[Array, ...]:
            squares = block_norms(expand(public, gradient), blocks)
            if geometry.diagonal:
                return squares
            # The product with a full covariance may cancel: a bound on its rounding is added.
            trace = geometry.trace(problem.constrain(public.params))
            size = trace * jnp.sqrt(squared_norm(gradient[0]))
            error = ROUNDING * jnp.finfo(size.dtype).eps * size
            latents = set(gradient[0])
            return tuple(
                jnp.square(jnp.sqrt(square) + error) if latents & set(members) else square
                for square, members in zip(squares, blocks, strict=True)
            )

        def pull_back(public: DrawnPublic, released: dict[str, Any]) -> dict[str, Any]:
            latents = each(geometry.precision, public, select(released, public.latents))
            own = select(released, problem.model_params)
            gradient = pull_back_draw(problem, public, latents, own)
            values = problem.constrain(public.params)
            guide = {name: value for name, value in gradient.items() if name not in own}
            return geometry.natural(values, guide) | select(gradient, own)

        factored = FactoredSignal(plain.point, plain.scalar, squared_norms, expand)
        return Estimator(prepare_constrained(problem, geometry), signal, pull_back, factored)

    return build
