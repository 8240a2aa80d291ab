r"""Normal families: full, diagonal and isotropic precision.

.. math:: \log p(z) = \eta^\top z - \tfrac12 z^\top\Lambda z + \mathrm{const}.

The mean is :math:`\Lambda^{-1}\eta`. In all three families ``project`` raises the eigenvalues of
the precision to the floor and does not change the linear coefficient. So the mean does not change
in directions above the floor, and shrinks with the variance in the others.

Reference:
    Wainwright, Jordan (2008), section 3; Minka (2001).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array, lax
from jax.scipy.linalg import cho_solve
from jaxtyping import Bool

from numpyro_dp._validate import check_int
from numpyro_dp.ep.families.base import (
    Family,
    Natural,
    Number,
    all_finite,
    full,
    unit,
    unwrap,
)
from numpyro_dp.ep.matrix import (
    positive_definite,
    raise_eigenvalues,
    spd_inverse,
    symmetric,
)

__all__ = ["diagonal_normal", "isotropic_normal", "normal"]

_DIM = "The number of coordinates."


def normal(dim: int) -> Family:
    r"""Returns the family of multivariate normal distributions.

    The natural parameters are ``linear`` :math:`\eta = \Sigma^{-1}m` of shape ``(dim,)`` and
    ``precision`` :math:`\Lambda = \Sigma^{-1}` of shape ``(dim, dim)``. Only the symmetric part of
    the precision matters. The statistics are :math:`(z, -zz^\top/2)`. ``from_dist`` takes
    MultivariateNormal and Normal.

    Args:
        dim: Number of coordinates, at least 1.

    Example:
        >>> import jax.numpy as jnp
        >>> natural = {"linear": jnp.array([1.0, 2.0]), "precision": jnp.diag(jnp.array([1.0, 2]))}
        >>> normal(2).to_dist(natural).mean.round(3)
        Array([1., 1.], dtype=float32)
    """
    check_int("dim", dim, low=1, remedy=_DIM)
    name = f"normal({dim})"
    return Family(
        name=name,
        unit=unit(linear=(dim,), precision=(dim, dim)),
        statistics=lambda z: {"linear": z, "precision": -jnp.outer(z, z) / 2},
        to_natural=_full_to_natural,
        is_valid=_full_is_valid,
        project=_full_project,
        to_dist=_full_to_dist,
        from_dist=partial(_full_from_dist, name, dim),
    )


def diagonal_normal(dim: int) -> Family:
    r"""Returns the family of normal distributions of independent coordinates.

    The natural parameters are ``linear`` :math:`m/\sigma^2` and ``precision`` :math:`1/\sigma^2`,
    both of shape ``(dim,)``. The statistics are :math:`(z, -z^2/2)`. ``from_dist`` takes Normal.

    Args:
        dim: Number of coordinates, at least 1.

    Example:
        >>> import numpyro.distributions as dist
        >>> natural = diagonal_normal(2).from_dist(dist.Normal(3.0, 0.5).expand([2]).to_event())
        >>> natural["linear"], natural["precision"]
        (Array([12., 12.], dtype=float32), Array([4., 4.], dtype=float32))
    """
    check_int("dim", dim, low=1, remedy=_DIM)
    name = f"diagonal_normal({dim})"
    return Family(
        name=name,
        unit=unit(linear=(dim,), precision=(dim,)),
        statistics=lambda z: {"linear": z, "precision": -jnp.square(z) / 2},
        to_natural=_diagonal_to_natural,
        is_valid=_positive_precision,
        project=_raise_precision,
        to_dist=_diagonal_to_dist,
        from_dist=lambda given: _coordinates(unwrap(name, given, (dist.Normal,), (dim,)), dim),
    )


def isotropic_normal(dim: int) -> Family:
    r"""Returns the family of normal distributions with one variance for all coordinates.

    The natural parameters are ``linear`` :math:`m/\sigma^2` of shape ``(dim,)`` and ``precision``
    :math:`1/\sigma^2`, a scalar. The statistics are :math:`(z, -|z|^2/2)`. ``from_dist`` takes
    Normal, and raises ValueError if its scales differ. With several scales, call it outside
    ``jit``.

    Args:
        dim: Number of coordinates, at least 1.

    Example:
        >>> import jax.numpy as jnp
        >>> natural = {"linear": jnp.array([2.0, 4.0]), "precision": jnp.array(2.0)}
        >>> isotropic_normal(2).to_dist(natural).mean
        Array([1., 2.], dtype=float32)
    """
    check_int("dim", dim, low=1, remedy=_DIM)
    name = f"isotropic_normal({dim})"
    return Family(
        name=name,
        unit=unit(linear=(dim,), precision=()),
        statistics=lambda z: {"linear": z, "precision": -jnp.sum(jnp.square(z)) / 2},
        to_natural=_isotropic_to_natural,
        is_valid=_positive_precision,
        project=_raise_precision,
        to_dist=_diagonal_to_dist,
        from_dist=partial(_isotropic_from_dist, name, dim),
    )


def _full_to_natural(mean: Natural) -> Natural:
    loc = mean["linear"]
    factor = jnp.linalg.cholesky(-2 * mean["precision"] - jnp.outer(loc, loc))
    return {"linear": cho_solve((factor, True), loc), "precision": spd_inverse(factor)}


def _full_is_valid(natural: Natural) -> Bool[Array, ""]:
    return jnp.all(jnp.isfinite(natural["linear"])) & positive_definite(natural["precision"])


def _full_project(natural: Natural, floor: Number) -> Natural:
    precision = raise_eigenvalues(natural["precision"], floor)
    return {"linear": natural["linear"], "precision": precision}


def _full_to_dist(natural: Natural) -> dist.MultivariateNormal:
    factor = jnp.linalg.cholesky(natural["precision"])
    loc = cho_solve((factor, True), natural["linear"])
    return dist.MultivariateNormal(loc, precision_matrix=symmetric(natural["precision"]))


def _full_from_dist(name: str, dim: int, given: Any) -> Natural:
    base = unwrap(name, given, (dist.MultivariateNormal, dist.Normal), (dim,))
    if isinstance(base, dist.Normal):
        natural = _coordinates(base, dim)
        return {"linear": natural["linear"], "precision": jnp.diag(natural["precision"])}
    loc = full(base.loc, (dim,))
    precision = base.precision_matrix.astype(loc.dtype)
    linear = jnp.matmul(precision, loc, precision=lax.Precision.HIGHEST)
    return {"linear": linear, "precision": precision}


def _diagonal_to_natural(mean: Natural) -> Natural:
    precision = 1 / (-2 * mean["precision"] - jnp.square(mean["linear"]))
    return {"linear": precision * mean["linear"], "precision": precision}


def _diagonal_to_dist(natural: Natural) -> dist.Distribution:
    """Serves the diagonal and the isotropic family."""
    loc = natural["linear"] / natural["precision"]
    return dist.Normal(loc, 1 / jnp.sqrt(natural["precision"])).to_event(1)


def _isotropic_to_natural(mean: Natural) -> Natural:
    loc = mean["linear"]
    precision = loc.size / (-2 * mean["precision"] - jnp.sum(jnp.square(loc)))
    return {"linear": precision * loc, "precision": precision}


def _isotropic_from_dist(name: str, dim: int, given: Any) -> Natural:
    base = unwrap(name, given, (dist.Normal,), (dim,))
    if jnp.size(base.scale) > 1:
        scales = np.asarray(base.scale)
        if np.any(scales != scales.flat[0]):
            raise ValueError(
                f"Expected for {name} one scale for all coordinates, got {scales}. For different "
                f"scales, use diagonal_normal({dim})."
            )
    natural = _coordinates(base, dim)
    return {"linear": natural["linear"], "precision": natural["precision"][0]}


def _positive_precision(natural: Natural) -> Bool[Array, ""]:
    return jnp.all(natural["precision"] > 0) & all_finite(natural)


def _raise_precision(natural: Natural, floor: Number) -> Natural:
    precision = natural["precision"]
    least = jnp.asarray(floor, precision.dtype)
    return {"linear": natural["linear"], "precision": jnp.maximum(precision, least)}


def _coordinates(base: dist.Normal, dim: int) -> Natural:
    """Natural parameters of each coordinate."""
    loc, scale = (full(value, (dim,)) for value in (base.loc, base.scale))
    precision = 1 / jnp.square(scale)
    return {"linear": precision * loc, "precision": precision}
