r"""Tails of Gaussian noise on a symmetric matrix, and the checks that :mod:`.theory` shares.

**The setting, and three lemmas.** B is positive definite, :math:`P = B^{-1}`, :math:`W = P^{1/2}`.
E is symmetric, its upper triangle independent :math:`N(0, s^2)`; so :math:`E = s\sum_k g_k H_k`
with :math:`H_k = e_i e_i^\top` or :math:`e_i e_j^\top + e_j e_i^\top`. Put :math:`S = WEW`, which
is symmetric (:math:`\Sigma^{-1}E` is not) and has the eigenvalues :math:`\lambda_i` of :math:`PE`.

1. Since :math:`\sum_k H_k M H_k = \mathrm{tr}(M)I + M - \mathrm{diag}(M)`, one has
   :math:`V := \mathbb{E}S^2 = s^2 W(\mathrm{tr}(P)I + P - \mathrm{diag}(P))W`, and with
   :math:`v = \Vert V\Vert` Tropp's Theorem 4.6.1, used for S and -S, says
   :math:`\Pr(\Vert S\Vert \ge t) \le f(t) = 2d\,e^{-t^2/2v}`.
2. :math:`\varphi(\lambda) = \log(1+\lambda) + 1/(1+\lambda) - 1` and
   :math:`\psi(\lambda) = \lambda - \log(1+\lambda)` are
   :math:`\lambda^2\int_0^1 u\,(1+u\lambda)^{-2}du` and
   :math:`\lambda^2\int_0^1 u\,(1+u\lambda)^{-1}du`. So both, divided by :math:`\lambda^2`, fall as
   :math:`\lambda` grows, and where :math:`\Vert S\Vert \le t < 1` their sums over i are at most
   :math:`c(t)\Vert S\Vert_F^2`, with :math:`c(t) = \varphi(-t)/t^2`, or :math:`\psi(-t)/t^2`.
3. A form :math:`Q = \sum_i w_i g_i^2` with :math:`0 \le w_i \le w`, :math:`\sum_i w_i = m` has
   :math:`\log\mathbb{E}e^{uQ} \le -\frac{m}{2w}\log(1-2uw)`, as :math:`-\log(1-2ux)/x` increases.
   So :math:`\Pr(Q \ge a) \le \exp(-\frac{m}{2w}(\frac am - 1 - \log\frac am))` for :math:`a > m`,
   :math:`\Pr(Q \ge m + 2\sqrt{mwL} + 2wL) \le e^{-L}`, and :math:`\Pr(Q \ge a) \le m/a` by Markov.
   For :math:`Q = \Vert S\Vert_F^2`: :math:`m = \mathrm{tr}V`, :math:`w = 2s^2\Vert P\Vert^2`
   (half of it for d = 1); for :math:`Q = \Vert Sx\Vert^2`: :math:`m = x^\top Vx`,
   :math:`w = 2s^2\Vert P\Vert\,\Vert Wx\Vert^2`.

Reference:
    Tropp (2015), An introduction to matrix concentration inequalities, Foundations and Trends in
    Machine Learning 8, Theorem 4.6.1. Laurent, Massart (2000), Adaptive estimation of a quadratic
    functional by model selection, Annals of Statistics 28, Lemma 1, for the second tail of lemma 3.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from jaxtyping import Shaped

from .._validate import check_real

__all__ = [
    "Form",
    "Noise",
    "check_definite",
    "check_level",
    "check_scales",
    "check_vector",
    "curvature",
    "event_radii",
    "form_quantile",
    "form_tail",
    "series_tail",
    "symmetric_noise",
]

Array = Shaped[np.ndarray, "..."]

_SERIES_BELOW = 1e-3  # where the closed form of c(t) would lose digits to cancellation


class Noise(NamedTuple):
    """The noise S relative to the matrix B that it is added to."""

    inverse: np.ndarray
    """P."""
    norm: float
    """The spectral norm of P."""
    second: np.ndarray
    """V, the expectation of S squared."""
    variance: float
    """v, the spectral norm of V."""
    top: float
    """An upper bound of the largest weight of the squared Frobenius norm of S."""


class Form(NamedTuple):
    """A constant plus a non-negative Gaussian form, for every t: its mean m and top weight w."""

    constant: np.ndarray | float
    mean: np.ndarray
    top: np.ndarray


def symmetric_noise(base: Array, scale: float) -> Noise:
    """Lemmas 1 and 3 for the matrix B, (dim, dim), and the standard deviation s of the noise."""
    values, vectors = np.linalg.eigh(base)
    inverse = vectors / values @ vectors.T
    root = vectors / np.sqrt(values) @ vectors.T
    inner = np.trace(inverse) * np.eye(len(base)) + inverse - np.diag(np.diag(inverse))
    second = scale**2 * root @ inner @ root
    norm = float(1.0 / values[0])
    top = scale**2 * norm**2 * (1.0 if len(base) == 1 else 2.0)
    return Noise(inverse, norm, second, float(np.linalg.norm(second, 2)), top)


def curvature(radius: np.ndarray, function: str) -> np.ndarray:
    """Lemma 2: c(t) for "phi" or "psi", for every t in [0, 1)."""
    small = radius < _SERIES_BELOW
    t = np.where(small, 0.5, radius)
    near = np.where(small, radius, 0.0)
    if function == "phi":
        exact = (np.log1p(-t) + t / (1.0 - t)) / t**2
        return np.where(small, 1 / 2 + near * (2 / 3 + near * (3 / 4 + near)), exact)
    exact = -(np.log1p(-t) + t) / t**2
    return np.where(small, 1 / 2 + near * (1 / 3 + near * (1 / 4 + near)), exact)


def series_tail(radius: np.ndarray, variance: float, dim: int) -> np.ndarray:
    """Lemma 1: f(t) for every t, and 0 without noise."""
    if variance == 0.0:
        return np.zeros_like(radius)
    return 2.0 * dim * np.exp(-np.square(radius) / (2.0 * variance))


def event_radii(failure: float, variance: float, dim: int) -> tuple[np.ndarray, np.ndarray]:
    """Shares of ``failure``, rising to 1, and the t at which f(t) is that share of it."""
    share = np.logspace(-4.0, 0.0, 81)
    return share, np.sqrt(2.0 * variance * np.log(2.0 * dim / (failure * share)))


def form_tail(threshold: float, form: Form) -> np.ndarray:
    """Lemma 3: a bound of the probability that the form reaches ``threshold``, for every t."""
    tiny = np.finfo(float).tiny
    mean, top = np.maximum(form.mean, tiny), np.maximum(form.top, tiny)
    ratio = np.maximum(np.maximum(threshold - form.constant, 0.0) / mean, 1.0)
    return np.minimum(1.0 / ratio, np.exp(-0.5 * mean / top * (ratio - 1.0 - np.log(ratio))))


def form_quantile(failure: np.ndarray, form: Form) -> np.ndarray:
    """Lemma 3: what the form stays below with probability ``1 - failure``, for every t."""
    log = np.log(1.0 / failure)
    bernstein = form.mean + 2.0 * np.sqrt(form.mean * form.top * log) + 2.0 * form.top * log
    return form.constant + np.minimum(form.mean / failure, bernstein)


def check_definite(
    name: str, matrix: Array, dim: int | None = None, *, semi: bool = False
) -> np.ndarray:
    """Returns a symmetric positive (semi-)definite matrix in float64, or raises ValueError."""
    value = np.asarray(matrix, float)
    if value.ndim != 2 or value.shape[0] != value.shape[1] or not len(value):
        raise ValueError(f"Expected {name} of shape (dim, dim), got {value.shape}.")
    if dim is not None and len(value) != dim:
        raise ValueError(f"Expected {name} of shape ({dim}, {dim}), got {value.shape}.")
    size = np.abs(value).max()
    if not np.isfinite(size) or np.abs(value - value.T).max() > 1e-8 * size:
        raise ValueError(f"Expected {name} finite and symmetric. Pass (M + M.T) / 2.")
    value = (value + value.T) / 2.0
    least = np.linalg.eigvalsh(value)[0]
    if least < -1e-10 * size if semi else least <= 0.0:
        kind = "positive semi-definite" if semi else "positive definite"
        raise ValueError(
            f"Expected {name} {kind}, got a smallest eigenvalue of {least:.3g}. "
            "Raise its eigenvalues, or pass the matrix before the noise."
        )
    return value


def check_vector(name: str, vector: Array, dim: int) -> np.ndarray:
    """Returns a finite vector of ``dim`` numbers in float64, or raises ValueError."""
    value = np.asarray(vector, float)
    if value.shape != (dim,):
        raise ValueError(f"Expected {name} of shape ({dim},), got {value.shape}.")
    if not np.isfinite(value).all():
        raise ValueError(f"Expected {name} finite, got {value}. Remove NaN and infinity.")
    return value


def check_scales(**scales: float) -> list[float]:
    """Returns standard deviations, finite and not negative, or raises."""
    remedy = "It is the standard deviation of one entry of the noise."
    top = math.nextafter(math.inf, 0.0)
    return [
        check_real(name, scale, low=0.0, high=top, remedy=remedy) for name, scale in scales.items()
    ]


def check_level(probability: object) -> float:
    """Returns a probability in the open interval (0, 1), or raises."""
    return check_real(
        "probability",
        probability,
        low=0.0,
        high=1.0,
        low_open=True,
        high_open=True,
        remedy="It is that with which the bound is to hold, such as 0.95.",
    )
