r"""Divergences of normal distributions in natural parameters, and of a clipped posterior.

**A clipped posterior.** The sites hold :math:`(\eta - \eta_0, \Lambda - \Lambda_0)`; clipping
multiplies them by :math:`a` and :math:`b`, so that :math:`\eta_C = a\eta + (1-a)\eta_0`,
:math:`\Lambda_C = b\Lambda + (1-b)\Lambda_0`. Let :math:`\pi_i, u_i` be the eigenvalues and
eigenvectors of :math:`\Lambda^{-1/2}\Lambda_0\Lambda^{-1/2}`, :math:`r_i = b + (1-b)\pi_i`,
:math:`g_i = u_i^\top\Lambda^{-1/2}(\eta_C - \Lambda_C\Lambda^{-1}\eta)`. Then
:math:`\Lambda^{-1/2}\Lambda_C\Lambda^{-1/2}` has the eigenvalues :math:`r_i`, and

.. math:: \mathrm{KL}(q\Vert q_C) = \tfrac12\sum_i\big(r_i - 1 - \log r_i + g_i^2/r_i\big),
    \quad \mathrm{KL}(q_C\Vert q) = \tfrac12\sum_i\big(1/r_i - 1 + \log r_i + g_i^2/r_i^2\big).

Without a prior :math:`r_i = b` and :math:`\sum_i g_i^2 = (a-b)^2\,\eta^\top\Lambda^{-1}\eta`.

Reference:
    Vinaroz, Park (2022), Differentially private stochastic expectation propagation, Transactions on
    Machine Learning Research, Appendix A.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Shaped
from scipy import linalg

from .._validate import check_real
from ._concentration import check_definite, check_vector

__all__ = ["Divergences", "clipped_sep_divergence", "natural_gaussian_kl"]

Array = Shaped[np.ndarray, "..."]


class Divergences(NamedTuple):
    """``forward``, KL(q || p), and ``reverse``, KL(p || q), in nats."""

    forward: float
    reverse: float


def natural_gaussian_kl(
    linear: Array, precision: Array, other_linear: Array, other_precision: Array
) -> Divergences:
    r"""Divergences of two normal distributions given by natural parameters.

    With :math:`q = N(\Lambda^{-1}\eta, \Lambda^{-1})`, :math:`p` likewise,
    :math:`\delta = \Lambda_p^{-1}\eta_p - \Lambda^{-1}\eta`:

    .. math:: \mathrm{KL}(q\Vert p) = \tfrac12\big(\log|\Lambda| - \log|\Lambda_p|
        + \mathrm{tr}(\Lambda_p\Lambda^{-1}) - d + \delta^\top\Lambda_p\delta\big).

    Args:
        linear: :math:`\eta` of q, (dim,).
        precision: :math:`\Lambda` of q, (dim, dim), positive definite.
        other_linear: :math:`\eta_p`, (dim,).
        other_precision: :math:`\Lambda_p`, (dim, dim), positive definite.

    Returns:
        KL(q || p) and KL(p || q).

    Raises:
        ValueError: If shapes differ or a precision is not positive definite.

    Example:
        >>> import numpy as np
        >>> natural_gaussian_kl(np.zeros(2), np.eye(2), np.ones(2), np.eye(2))
        Divergences(forward=1.0, reverse=1.0)
    """
    base = check_definite("precision", precision)
    other = check_definite("other_precision", other_precision, len(base))
    etas = (
        check_vector("linear", linear, len(base)),
        check_vector("other_linear", other_linear, len(base)),
    )
    roots = (np.linalg.cholesky(base), np.linalg.cholesky(other))
    first, second = (
        linalg.cho_solve((root, True), eta) for root, eta in zip(roots, etas, strict=True)
    )
    logs = 2.0 * (np.log(np.diag(roots[0])).sum() - np.log(np.diag(roots[1])).sum())

    def one_way(root: np.ndarray, target: np.ndarray, log_ratio: float) -> float:
        ratio = linalg.solve_triangular(root, target, lower=True)
        shift = target.T @ (second - first)
        return float(0.5 * (log_ratio + np.square(ratio).sum() - len(base) + shift @ shift))

    return Divergences(one_way(*roots, logs), one_way(*roots[::-1], -logs))


def clipped_sep_divergence(
    linear: Array,
    precision: Array,
    scale: float,
    precision_scale: float | None = None,
    *,
    prior_linear: Array | None = None,
    prior_precision: Array | None = None,
) -> Divergences:
    r"""Divergences between a posterior and the one whose sites were scaled down by clipping.

    The closed form at the top of this file, exactly. Without a prior (Appendix A) and with one
    common factor b the mean stays, and :math:`\mathrm{KL}(q\Vert q_C) = \frac d2(b - 1 - \log b)`
    whatever the posterior.

    Args:
        linear: :math:`\eta` of the posterior, (dim,).
        precision: :math:`\Lambda` of the posterior, (dim, dim), positive definite.
        scale: a, in (0, 1]: for a clipping threshold C, ``min(1, C / norm)`` of a site.
        precision_scale: b, in (0, 1]; that of ``scale`` if None.
        prior_linear: :math:`\eta_0`, (dim,), which is not clipped; 0 if None.
        prior_precision: :math:`\Lambda_0`, (dim, dim), positive semi-definite; 0 if None.

    Returns:
        KL(q || q_C) and KL(q_C || q).

    Raises:
        ValueError: If shapes differ, a factor is outside (0, 1] or a precision is not definite.

    Example:
        >>> import numpy as np
        >>> clipped_sep_divergence(np.ones(2), np.eye(2), 0.5).forward.__round__(6)
        0.193147

    Reference:
        Vinaroz, Park (2022), DP-SEP, Appendix A.
    """
    precision = check_definite("precision", precision)
    dim = len(precision)
    linear = check_vector("linear", linear, dim)
    a = check_real("scale", scale, low=0.0, high=1.0, low_open=True)
    b = a
    if precision_scale is not None:
        b = check_real("precision_scale", precision_scale, low=0.0, high=1.0, low_open=True)
    eta0 = np.zeros(dim) if prior_linear is None else prior_linear
    eta0 = check_vector("prior_linear", eta0, dim)
    prior = np.zeros((dim, dim)) if prior_precision is None else prior_precision
    prior = check_definite("prior_precision", prior, dim, semi=True)
    values, vectors = np.linalg.eigh(precision)
    root = vectors / np.sqrt(values) @ vectors.T
    share, basis = np.linalg.eigh(root @ prior @ root)
    excess = (1.0 - b) * (np.maximum(share, 0.0) - 1.0)
    mean = root @ (root @ linear)
    moved = (a - b) * linear + (1.0 - a) * eta0 - (1.0 - b) * (prior @ mean)
    squares = np.square(basis.T @ (root @ moved))
    ratio, logs = 1.0 + excess, np.log1p(excess)
    forward = (excess - logs + squares / ratio).sum()
    reverse = (logs - excess / ratio + squares / ratio**2).sum()
    return Divergences(float(0.5 * forward), float(0.5 * reverse))
