"""Linear algebra that never raises, on symmetric matrices that noise may make indefinite."""

from __future__ import annotations

import numpy as np
import scipy.linalg

TINY = 1e-300  # keeps a division by zero finite
EDGE = 1e-13  # smallest eigenvalue that counts, relative to the largest


def symmetric(matrix: np.ndarray) -> np.ndarray:
    """Returns the symmetric part of a square matrix."""
    return (matrix + matrix.T) / 2


def trace_of(whitening: np.ndarray, matrix: np.ndarray) -> float:
    """Returns tr(W M W) for symmetric W and M."""
    return float(np.sum((whitening @ matrix) * whitening))


def roots(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Factors a positive semidefinite matrix as M = R R' and returns R and its inverse.

    The matrix is first scaled to a unit diagonal, which removes the units of coordinates.
    Eigenvalues that are not positive become a small positive value.
    """
    diagonal = np.abs(np.diag(matrix))
    scale = np.sqrt(np.maximum(diagonal, EDGE * diagonal.max(initial=0.0) + TINY))
    values, vectors = np.linalg.eigh(symmetric(matrix) / np.outer(scale, scale))
    widths = np.sqrt(np.maximum(values, EDGE * max(values[-1], 1.0)))
    return scale[:, None] * vectors * widths, (vectors / widths).T / scale


def factor(matrix: np.ndarray) -> np.ndarray:
    """Returns F with F F' = M: the Cholesky factor if M has one, else a root."""
    try:
        return np.linalg.cholesky(symmetric(matrix))
    except np.linalg.LinAlgError:
        return roots(matrix)[0]


def solve(matrix: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Solves M X = B for a matrix M that is positive definite up to rounding."""
    matrix = symmetric(matrix)
    try:
        lower = scipy.linalg.cho_factor(matrix, lower=True, check_finite=False)
        solution = scipy.linalg.cho_solve(lower, right, check_finite=False)
        if np.all(np.isfinite(solution)):
            return solution
    except np.linalg.LinAlgError:
        pass
    _, inverse_root = roots(matrix)
    return inverse_root.T @ (inverse_root @ right)


def inverse(matrix: np.ndarray) -> np.ndarray:
    """Returns the inverse of a matrix that is positive definite up to rounding."""
    return symmetric(solve(matrix, np.eye(len(matrix))))


def spectral_power(matrix: np.ndarray, power: float) -> np.ndarray:
    """Returns M^power of a positive definite matrix, by its eigenvalues."""
    values, vectors = np.linalg.eigh(symmetric(matrix))
    values = np.maximum(values, EDGE * np.abs(values).max() + TINY)
    return symmetric((vectors * values**power) @ vectors.T)
