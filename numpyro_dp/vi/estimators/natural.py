r"""Natural gradients: vanilla gradients times the inverse Fisher information of the guide.

.. math:: s_i = F^{-1} J^\top g_i, \qquad F = E_q[\nabla_\varphi\log q\,\nabla_\varphi\log q^\top],

in closed form for Gaussian guides. Post-processing multiplies prior and entropy by
:math:`F^{-1}`. For a mean-field guide, :math:`F = \mathrm{diag}(\sigma^{-2},\, 2 T'^2
\sigma^{-2})`.
"""

from __future__ import annotations

from collections.abc import Callable

from numpyro_dp.core import Estimator
from numpyro_dp.model.geometry import gaussian_geometry
from numpyro_dp.model.variational import VariationalProblem
from numpyro_dp.vi.estimators.preconditioned import in_coordinates

__all__ = ["natural"]


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
        return in_coordinates(problem, geometry, geometry.natural)

    return build
