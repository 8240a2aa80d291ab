r"""Closed forms of the dominating pairs of one Gaussian step, which the library is held against.

A pair :math:`(P, Q)` *dominates* a step if no neighbours are easier to tell apart; its privacy loss
is :math:`L = \log dP/dQ` under :math:`P`, and :math:`\delta(\varepsilon) = E_P[(1 - e^{\varepsilon
- L})_+]` bounds the step and, summing independent losses, any adaptive composition. With
:math:`\sigma` the noise in units of one record's norm and :math:`q` the sampling rate:

=================  =======================  =======================  =====================
direction          P                        Q                        source
=================  =======================  =======================  =====================
remove             (1-q) N(0) + q N(1)      N(0)                     Zhu et al., Thm. 11
add                N(0)                     (1-q) N(0) + q N(1)      Zhu et al., Thm. 11
replace            (1-q) N(0) + q N(1)      (1-q) N(0) + q N(-1)     proof in pld.py
=================  =======================  =======================  =====================

With :math:`\delta_G` the curve of the Gaussian mechanism (see ``gdp.py``), the first two are

.. math:: \delta_{remove}(\varepsilon) = q\,\delta_G(\lambda), \;
    \lambda = \log(1 + \tfrac{e^\varepsilon - 1}{q}),
    \qquad \delta_{add}(\varepsilon) = q\,e^{\varepsilon - \lambda}\,\delta_G(\lambda), \;
    \lambda = -\log(1 + \tfrac{e^{-\varepsilon} - 1}{q}),

and the third exceeds :math:`\varepsilon` to the right of :math:`x = \sigma^2 (\tfrac\varepsilon2 +
\mathrm{arsinh}( \tfrac{1-q}{q} e^{1/2\sigma^2} \sinh\tfrac\varepsilon2))`. These are
``dp_accounting``'s ``GaussianPrivacyLoss``, which inverts the loss point by point; here it is one
array operation, without cancellation in the tails.

Reference:
    Zhu, Dong, Wang: Optimal Accounting via Characteristic Functions (2022). Balle, Barthe,
    Gaboardi: Privacy Amplification by Subsampling (2018), Theorem 8. Lebeda et al.: Avoiding
    Pitfalls for Privacy Accounting of Subsampled Mechanisms under Composition (2024): neither add
    nor remove dominates the other.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
import numpy.typing as npt
from scipy import special

from numpyro_dp.privacy.accounting.bounds import GaussianStep

__all__ = ["deltas", "loss_range"]

Direction = Literal["remove", "add", "replace"]
Floats = npt.NDArray[np.float64]

# Mass of the left tail that a grid may move up to its first point: it costs less than
# 1e-9 sqrt(count) standard deviations, and keeps rounding noise out of the grid.
_LOG_LEFT_TAIL = math.log(1e-9)


def loss_range(step: GaussianStep, direction: Direction, log_tail: float) -> tuple[float, float]:
    """Returns losses below which 1e-9, and above which exp(``log_tail``) of the mass lies.

    Example:
        >>> low, high = loss_range(GaussianStep("none", 1.0, None, 1.0, 1), "remove", -20.0)
        >>> round(low, 2), round(high, 2)
        (-6.5, 6.38)
    """
    sigma = _sigma(step, direction)
    right = -sigma * float(special.ndtri_exp(log_tail))
    left = sigma * float(special.ndtri_exp(_LOG_LEFT_TAIL))
    if direction == "add":
        return -_loss(step, sigma, -left), -_loss(step, sigma, -right)
    low, high = _loss(step, sigma, left), _loss(step, sigma, right + 1.0)
    if direction == "remove":
        return low, high
    return low - _loss(step, sigma, -left), high - _loss(step, sigma, -right - 1.0)


def deltas(step: GaussianStep, direction: Direction, epsilons: npt.ArrayLike) -> Floats:
    """Returns delta of the pair at each epsilon, which may be negative.

    Args:
        step: A full-batch or Poisson step; its noise is relative to the sensitivity under the
            relation.
        direction: Row of the table above.
        epsilons: Any shape.

    Example:
        >>> step = GaussianStep("none", 1.0, None, 1.0, 1)
        >>> deltas(step, "remove", [1.0]).round(6).tolist()
        [0.126937]
    """
    eps, rate = np.asarray(epsilons, dtype=np.float64), step.rate
    sigma = _sigma(step, direction)
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        # Infinities and NaN arise only where the result is masked below, or are limits.
        if direction == "remove":
            value = rate * _gaussian(_unsampled(eps, rate), 1.0 / sigma)
            value = np.where(eps > np.log1p(-rate), value, -np.expm1(eps))
        elif direction == "add":
            inner = -_unsampled(-eps, rate)
            value = rate * np.exp(eps - inner) * _gaussian(inner, 1.0 / sigma)
            value = np.where(-eps > np.log1p(-rate), value, 0.0)
        else:
            value = _replace(eps, rate, sigma)
    return np.clip(value, 0.0, 1.0)


def _sigma(step: GaussianStep, direction: Direction) -> float:
    # Replacing moves the mean from +1 to -1: a sensitivity of 2 in units of one record's norm.
    return step.noise_multiplier * (2.0 if direction == "replace" else 1.0)


def _loss(step: GaussianStep, sigma: float, x: float) -> float:
    """Returns the loss of the remove pair at ``x``."""
    plain = (x - 0.5) / sigma**2
    if step.rate == 1.0:
        return plain
    return float(np.logaddexp(math.log1p(-step.rate), math.log(step.rate) + plain))


def _unsampled(eps: Floats, rate: float) -> Floats:
    """Returns log(1 + (exp(eps) - 1) / rate), without overflow or needless cancellation."""
    shifted = eps + np.log1p((rate - 1.0) * np.exp(-eps)) - math.log(rate)
    if rate > 0.5:
        return shifted
    return np.where(eps > 1.0, shifted, np.log1p(np.expm1(np.minimum(eps, 1.0)) / rate))


def _gaussian(eps: Floats, mu: float) -> Floats:
    """Returns the Gaussian mechanism's delta; by Mills' ratio where both of its terms are small."""
    x = eps / mu - mu / 2.0
    right = np.maximum(x, -5.0) / math.sqrt(2.0)
    mills = special.erfcx(right) - special.erfcx(right + mu / math.sqrt(2.0))
    tail = 0.5 * np.exp(-right * right) * mills
    return np.where(x > -5.0, tail, special.ndtr(-x) - np.exp(eps + special.log_ndtr(-x - mu)))


def _replace(eps: Floats, rate: float, sigma: float) -> Floats:
    half = np.abs(eps) / 2.0
    log_sinh = half + np.log(-np.expm1(-2.0 * half)) - math.log(2.0)
    log_sinh = log_sinh + 0.5 / sigma**2 + np.log1p(-rate) - math.log(rate)
    arsinh = np.logaddexp(log_sinh, 0.5 * np.logaddexp(0.0, 2.0 * log_sinh))
    x = sigma**2 * np.sign(eps) * (half + arsinh)
    sampled = rate * (
        special.ndtr((1.0 - x) / sigma) - np.exp(eps + special.log_ndtr((-1.0 - x) / sigma))
    )
    return sampled - (1.0 - rate) * _expm1_times(eps, special.log_ndtr(-x / sigma))


def _expm1_times(eps: Floats, log_factor: Floats) -> Floats:
    """Returns (exp(eps) - 1) exp(log_factor), without overflow."""
    small = np.expm1(np.minimum(eps, 1.0)) * np.exp(log_factor)
    return np.where(eps > 1.0, np.exp(eps + log_factor) - np.exp(log_factor), small)
