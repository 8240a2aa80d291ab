r"""The Wishart family, of positive definite matrices.

.. math:: \log p(X) = \tfrac{\nu-d-1}{2} \log\det X - \tfrac12 \mathrm{tr}(V^{-1}X) - A, \quad
    A = \tfrac{\nu}{2}(d \log 2 + \log\det V) + \log\Gamma_d(\tfrac\nu2).

Reference:
    Wainwright, Jordan (2008), section 3; Minka (2001).
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpyro.distributions as dist
from jax import Array
from jax.scipy.special import multigammaln
from jaxtyping import Bool, Float

from numpyro_dp._validate import check_int
from numpyro_dp.ep.families._digamma import solve_shape, total_excess
from numpyro_dp.ep.families._matrix import (
    log_det,
    positive_definite,
    raise_eigenvalues,
    spd_inverse,
    symmetric,
)
from numpyro_dp.ep.families.base import (
    Family,
    Natural,
    Number,
    full,
    least_log,
    no_base,
    unit,
    unwrap,
)

__all__ = ["wishart"]


def wishart(dim: int) -> Family:
    r"""Returns the Wishart family.

    Natural parameters ``log_det`` :math:`(\nu - d - 1)/2`, a scalar, and ``scale_inverse``
    :math:`V^{-1}`, of which only the symmetric part matters; statistics
    :math:`(\log\det X, -X/2)`. Mean parameters are turned into natural ones by Newton's method.
    ``project`` raises the eigenvalues of :math:`V^{-1}` to the floor, and :math:`(\nu - d + 1)/2`,
    the shape of the least determined direction, likewise.

    Args:
        dim: :math:`d`, at least 1.

    Example:
        >>> import jax.numpy as jnp
        >>> mean = wishart(2).to_mean({"log_det": jnp.array(1.0), "scale_inverse": jnp.eye(2)})
        >>> mean["scale_inverse"]  # -E X / 2, with nu = 5
        Array([[-2.5, -0. ],
               [-0. , -2.5]], dtype=float32)

    Reference:
        Wainwright, Jordan (2008), section 3; Bishop (2006), appendix B.
    """
    check_int("dim", dim, low=1, remedy="The number of rows of the matrix.")
    name = f"wishart({dim})"
    return Family(
        name=name,
        unit=unit(log_det=(), scale_inverse=(dim, dim)),
        log_partition=_log_partition,
        statistics=_statistics,
        log_base=no_base,
        to_mean=_to_mean,
        to_natural=_to_natural,
        is_valid=_is_valid,
        project=_project,
        to_dist=_to_dist,
        from_dist=partial(_from_dist, name, dim),
    )


def _parts(natural: Natural) -> tuple[int, Array, Array]:
    """Dimension, degrees of freedom and Cholesky factor of the inverse scale."""
    dim = natural["scale_inverse"].shape[-1]
    return dim, 2 * natural["log_det"] + (dim + 1), jnp.linalg.cholesky(natural["scale_inverse"])


def _log_partition(natural: Natural) -> Float[Array, ""]:
    dim, freedom, factor = _parts(natural)
    return freedom / 2 * (dim * math.log(2) - log_det(factor)) + multigammaln(freedom / 2, dim)


def _statistics(z: Float[Array, "d d"]) -> Natural:
    return {"log_det": log_det(jnp.linalg.cholesky(z)), "scale_inverse": -z / 2}


def _to_mean(natural: Natural) -> Natural:
    dim, freedom, factor = _parts(natural)
    log_det_mean = dim * jnp.log(freedom) - log_det(factor)
    mean_log_det = log_det_mean - total_excess(natural["log_det"] + 1, dim)
    return {"log_det": mean_log_det, "scale_inverse": -freedom / 2 * spd_inverse(factor)}


def _to_natural(mean: Natural) -> Natural:
    dim = mean["scale_inverse"].shape[-1]
    factor = jnp.linalg.cholesky(-2 * mean["scale_inverse"])
    shape = solve_shape(log_det(factor) - mean["log_det"], dim)
    freedom = 2 * shape + (dim - 1)
    return {"log_det": shape - 1, "scale_inverse": freedom * spd_inverse(factor)}


def _is_valid(natural: Natural) -> Bool[Array, ""]:
    shape = natural["log_det"]
    return (shape > -1) & jnp.isfinite(shape) & positive_definite(natural["scale_inverse"])


def _project(natural: Natural, floor: Number) -> Natural:
    return {
        "log_det": least_log(natural["log_det"], floor),
        "scale_inverse": raise_eigenvalues(natural["scale_inverse"], floor),
    }


def _to_dist(natural: Natural) -> dist.Wishart:
    _, freedom, _ = _parts(natural)
    return dist.Wishart(freedom, rate_matrix=symmetric(natural["scale_inverse"]))


def _from_dist(name: str, dim: int, given: Any) -> Natural:
    base = unwrap(name, given, (dist.Wishart,), (dim, dim))
    freedom = full(base.concentration, ())
    rate = base.rate_matrix.astype(freedom.dtype)
    return {"log_det": (freedom - (dim + 1)) / 2, "scale_inverse": rate}
