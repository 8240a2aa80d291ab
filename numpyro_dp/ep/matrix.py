"""Symmetric matrices: inverses by Cholesky, and eigenvalues raised to a floor."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax
from jax.scipy.linalg import cho_solve
from jaxtyping import Bool, Float

__all__ = ["positive_definite", "raise_eigenvalues", "spd_inverse", "symmetric"]


def symmetric(matrix: Float[Array, "d d"]) -> Float[Array, "d d"]:
    """Returns the symmetric part."""
    return (matrix + matrix.T) / 2


def spd_inverse(factor: Float[Array, "d d"]) -> Float[Array, "d d"]:
    """Returns the inverse of the matrix with this Cholesky factor, exactly symmetric."""
    identity = jnp.eye(factor.shape[0], dtype=factor.dtype)
    return symmetric(cho_solve((factor, True), identity))


def positive_definite(matrix: Float[Array, "d d"]) -> Bool[Array, ""]:
    """Returns whether the symmetric part has a Cholesky factor, to rounding."""
    return jnp.all(jnp.isfinite(jnp.linalg.cholesky(symmetric(matrix))))


def raise_eigenvalues(
    matrix: Float[Array, "d d"], floor: float | Float[Array, ""]
) -> Float[Array, "d d"]:
    """Returns the symmetric part with eigenvalues of at least ``floor``.

    One whose eigenvalues are so already does not change. The floor is at least the rounding error
    of the largest eigenvalue, so that the result has a Cholesky factor.
    """
    matrix = symmetric(matrix)
    values, vectors = jnp.linalg.eigh(matrix)
    rounding = 2 * values.size * jnp.finfo(values.dtype).eps * jnp.max(jnp.abs(values))
    least = jnp.maximum(jnp.asarray(floor, values.dtype), rounding)
    scaled = vectors * jnp.maximum(values, least)
    raised = symmetric(jnp.matmul(scaled, vectors.T, precision=lax.Precision.HIGHEST))
    return jnp.where(jnp.min(values) >= least, matrix, raised)
