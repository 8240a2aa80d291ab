r"""What clipping and noise cost a Gaussian posterior, in Kullback-Leibler divergence.

Everything compares two multivariate normal distributions: q, the posterior of stochastic
expectation propagation (SEP), and p, the same after one clipped or noisy release. "Forward" is
:math:`\mathrm{KL}(q \Vert p)`, "reverse" :math:`\mathrm{KL}(p \Vert q)`, in nats. Both versions of
Theorem 4.1 are proved anew: the printed proofs treat as certain that the eigenvalues of a Gaussian
matrix stay between two constants, which is likely at best. S, P, W, V, f(t), :math:`\varphi`,
:math:`\psi` and the lemmas 1 to 3 below are in ``numpyro_dp/ep/_concentration.py``.

**Noise on the moments** (2021). :math:`q = N(\mu, \Sigma)`, :math:`p = N(\mu + e, \Sigma + E)`;
e has independent :math:`N(0, \sigma_1^2)` entries, E is symmetric with an independent
:math:`N(0, \sigma_2^2)` upper triangle, independent of e. KL is infinite where
:math:`\Sigma + E` is not positive definite. For every t in (0, 1), with :math:`B = \Sigma`,

.. math:: \Pr(\mathrm{KL} \ge a) \le f(t) + \Pr(Q_t \ge a),\quad
    Q_t = \tfrac{c(t)}2\Vert S\Vert_F^2 + \tfrac{h(t)}2\, e^\top\Sigma^{-1}e,

with :math:`c(t) = \varphi(-t)/t^2`, :math:`h(t) = 1/(1-t)` forward and
:math:`c(t) = \psi(-t)/t^2`, :math:`h = 1` reverse.
Proof. :math:`2\mathrm{KL}(q\Vert p) = \sum_i\varphi(\lambda_i) + e^\top W(I+S)^{-1}We`,
:math:`2\mathrm{KL}(p\Vert q) = \sum_i\psi(\lambda_i) + e^\top\Sigma^{-1}e`. Where
:math:`\Vert S\Vert < t`, both are at most :math:`2Q_t` by lemma 2; lemma 1 is the probability of
the rest, and lemma 3 the tail of :math:`Q_t`.

**Noise on the natural parameters** (2022). q has :math:`\eta, \Lambda`; p has
:math:`\eta + e, \Lambda + E + F`, with e and E as above and the repair
:math:`F = \max(0, \kappa - \lambda_{\min}(\Lambda + E))I`. KL is averaged over e, and the
probability is over E. Put :math:`B = \Lambda`, :math:`x = \Lambda^{-1/2}\eta`. With probability
:math:`1 - f(t)`, for every t:

- :math:`\mathbb{E}_e\mathrm{KL} \le \frac12[d\max(\psi(l-1), \psi(r))
  + \frac1l(\sigma_1^2\mathrm{tr}P + r^2\Vert x\Vert^2)]` forward, and the same with
  :math:`\varphi` and :math:`1/l^2` reverse, where :math:`r = t + k\Vert P\Vert`,
  :math:`l = \max(1-t, \kappa/\Vert\Lambda\Vert)`, :math:`k = \max(0, \kappa - (1-t)\lambda)` and
  :math:`\lambda` is the smallest eigenvalue of :math:`\Lambda` for t < 1 and else the largest;
- if t < 1 and k = 0, :math:`\mathbb{E}_e\mathrm{KL} \le \frac h2\sigma_1^2\mathrm{tr}P
  + \frac{c(t)}2\Vert S\Vert_F^2 + \frac h2\Vert Sx\Vert^2` with :math:`h = 1/(1-t)`,
  :math:`c = \psi(-t)/t^2` forward, :math:`h = 1/(1-t)^2`, :math:`c = \varphi(-t)/t^2` reverse,
  of which the last two terms are a form of lemma 3.

Proof. Let :math:`R = S + WFW` have the eigenvalues :math:`\rho_i`. Then
:math:`2\mathbb{E}_e\mathrm{KL}(q\Vert p) = \sum_i\psi(\rho_i)
+ \sigma_1^2\mathrm{tr}(W(I+R)^{-1}W) + x^\top R(I+R)^{-1}Rx`, and the reverse has :math:`\varphi`
and :math:`(I+R)^{-2}`. Where :math:`\Vert S\Vert < t`, :math:`F \le kI`, so
:math:`\Vert R\Vert \le r`, and :math:`I + R \ge lI`: F only adds, and
:math:`\Lambda + E + F \ge \kappa I`. Both functions fall before 0 and rise after it. Where k = 0,
R = S, and lemma 2 applies. Of F the proof uses :math:`0 \le F \le kI` and the floor alone, so it
covers the repair that raises each eigenvalue below :math:`\kappa` to it, too.

Reference:
    Vinaroz, Park (2021), Differentially private stochastic expectation propagation (DP-SEP),
    arXiv:2111.13219, Theorem 4.1; the same (2022), Transactions on Machine Learning Research,
    Theorem 4.1 and Appendix A. Tropp (2015), An introduction to matrix concentration inequalities,
    Theorem 4.6.1.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from jaxtyping import Shaped

from .._validate import check_in, check_real
from ._concentration import (
    Form,
    Noise,
    check_definite,
    check_level,
    check_scales,
    check_vector,
    curvature,
    event_radii,
    form_quantile,
    form_tail,
    series_tail,
    symmetric_noise,
)
from ._divergence import Divergences, clipped_sep_divergence, natural_gaussian_kl

__all__ = [
    "Divergences",
    "KLBound",
    "clipped_sep_divergence",
    "moment_noise_bound",
    "moment_noise_bound_as_printed",
    "natural_gaussian_kl",
    "natural_noise_bound",
]

Array = Shaped[np.ndarray, "..."]


class KLBound(NamedTuple):
    """``bound`` in nats, and the least ``probability`` with which the divergence stays below it."""

    bound: float
    probability: float


def moment_noise_bound_as_printed(
    covariance: Array,
    mean_scale: float,
    covariance_scale: float,
    threshold: float,
    lower: float,
    upper: float,
) -> KLBound:
    r"""Theorem 4.1 of 2021 as printed, for comparison only: **it is not a theorem**.

    For :math:`p = N(\mu + e, \Sigma + E)`, :math:`q = N(\mu, \Sigma)`, the paper states

    .. math:: \Pr(\mathrm{KL}(q\Vert p) \ge a) \le \tfrac{d}{2a}\Big[\log(1+z) - 1 +
        (\sigma_1^2\mathrm{tr}\Sigma^{-1} + 1)\frac{A + \tau + z - 1}{A\tau}\Big],
        \quad z = \sqrt{2v\log 2d},\ v = d\,\sigma_2^2\,\Vert\Sigma^{-1}\Vert^2,

    where :math:`\tau < 1 + \lambda_{\min}(\Sigma^{-1}E) < A` "for any E". No such constants exist,
    E being Gaussian: with positive probability :math:`\Sigma + E` is not positive definite and KL
    is infinite, so its expectation, which Markov's inequality needs, is infinite too. As the
    threshold grows, the printed probability tends to 1, which is false; as the noise vanishes, it
    does not, unless one of the constants is 1. (Eq. 29 of the proof also lacks a factor 1/2, which
    the statement has.) Use :func:`moment_noise_bound`.

    Args:
        covariance: :math:`\Sigma`, (dim, dim), positive definite.
        mean_scale: :math:`\sigma_1 \ge 0`, standard deviation of the noise on the mean.
        covariance_scale: :math:`\sigma_2 \ge 0`, that of the noise on the covariance.
        threshold: a > 0.
        lower: :math:`\tau > 0`.
        upper: A, larger than ``lower``.

    Returns:
        The threshold, and 1 minus the printed expression, moved into [0, 1].

    Raises:
        ValueError: If a value is outside its range.

    Example:
        >>> import numpy as np
        >>> moment_noise_bound_as_printed(np.eye(2), 0.1, 1.0, 50.0, 0.5, 4.0)[1].__round__(3)
        0.936

    Reference:
        Vinaroz, Park (2021), DP-SEP, Theorem 4.1 and Appendix B.1.
    """
    inverse = np.linalg.inv(check_definite("covariance", covariance))
    sd1, sd2 = check_scales(mean_scale=mean_scale, covariance_scale=covariance_scale)
    threshold = check_real("threshold", threshold, low=0.0, low_open=True)
    lower = check_real("lower", lower, low=0.0, low_open=True)
    upper = check_real("upper", upper, low=lower, low_open=True)
    dim = len(inverse)
    spread = sd2 * np.linalg.norm(inverse, 2) * math.sqrt(2.0 * dim * math.log(2 * dim))
    inverse_eigenvalue = (upper + lower + spread - 1.0) / (upper * lower)
    moved = (sd1**2 * np.trace(inverse) + 1.0) * inverse_eigenvalue
    tail = 0.5 * dim / threshold * (math.log1p(spread) - 1.0 + moved)
    return KLBound(threshold, float(np.clip(1.0 - tail, 0.0, 1.0)))


def moment_noise_bound(
    covariance: Array,
    mean_scale: float,
    covariance_scale: float,
    *,
    threshold: float | None = None,
    probability: float | None = None,
    direction: str = "forward",
) -> KLBound:
    r"""Theorem 4.1 of 2021, corrected: noise on the mean and the covariance.

    :math:`\Pr(\mathrm{KL} \ge a) \le \min_t[f(t) + \Pr(Q_t \ge a)]`, or the a for which this is the
    given number; assumptions, :math:`Q_t` and proof at the top of this file. The tail of
    :math:`Q_t` is the better of Markov's and an exponential one.

    Args:
        covariance: :math:`\Sigma`, (dim, dim), positive definite.
        mean_scale: :math:`\sigma_1 \ge 0`, standard deviation of each entry of e.
        covariance_scale: :math:`\sigma_2 \ge 0`, standard deviation of each entry of E.
        threshold: a > 0, to be told the probability. Give this or ``probability``.
        probability: In (0, 1), to be told a bound that holds with it.
        direction: "forward", KL(q || p), or "reverse", KL(p || q).

    Returns:
        Infinity, or probability 0, where :math:`\Vert S\Vert < 1` is not likely enough.

    Raises:
        ValueError: If a value is outside its range, or not one of the two is given.

    Guarantee:
        :math:`\Pr(\mathrm{KL} < \mathrm{bound}) \ge \mathrm{probability}`, ``<=`` without noise.
        Both numbers depend on the posterior and are not private.

    Example:
        >>> import numpy as np
        >>> moment_noise_bound(np.eye(2), 0.1, 0.05, probability=0.95).bound.__round__(4)
        0.0969

    Reference:
        Vinaroz, Park (2021), DP-SEP, Theorem 4.1; Tropp (2015), Theorem 4.6.1.
    """
    base = check_definite("covariance", covariance)
    sd1, sd2 = check_scales(mean_scale=mean_scale, covariance_scale=covariance_scale)
    check_in("direction", direction, ("forward", "reverse"))
    if (threshold is None) == (probability is None):
        raise ValueError(
            f"Expected one of threshold={threshold!r} and probability={probability!r}. "
            "Give the one that is known; the other is returned."
        )
    noise = symmetric_noise(base, sd2)
    if probability is None:
        return _moment_probability(threshold, noise, sd1, direction)
    level = check_level(probability)
    share, radius = event_radii(1.0 - level, noise.variance, len(base))
    inside = (radius < 1.0) & (share < 1.0)
    if not inside.any():
        return KLBound(math.inf, level)
    form = _moment_form(radius[inside], noise, sd1, direction)
    found = form_quantile((1.0 - level) * (1.0 - share[inside]), form)
    return KLBound(float(found.min()), level)


def natural_noise_bound(
    linear: Array,
    precision: Array,
    linear_scale: float,
    precision_scale: float,
    *,
    floor: float,
    probability: float,
    direction: str = "forward",
) -> KLBound:
    r"""Theorem 4.1 of 2022, corrected: noise on the natural parameters.

    The least of the bounds at the top of this file, the first with
    :math:`f(t) = 1 - \mathrm{probability}`, the second over a grid of smaller f(t), of which
    lemma 3 gets the rest; assumptions and proof are there.

    Args:
        linear: :math:`\eta`, (dim,).
        precision: :math:`\Lambda`, (dim, dim), positive definite.
        linear_scale: :math:`\sigma_1 \ge 0`, standard deviation of each entry of e.
        precision_scale: :math:`\sigma_2 \ge 0`, standard deviation of each entry of E.
        floor: :math:`\kappa > 0`, the least eigenvalue the released precision is given.
        probability: In (0, 1), over E.
        direction: "forward", KL(q || p), or "reverse", KL(p || q).

    Returns:
        Finite for every noise; 0 without it, if ``floor`` is at most the smallest eigenvalue.

    Raises:
        ValueError: If a value is outside its range or shapes differ.

    Guarantee:
        :math:`\Pr_E(\mathbb{E}_e\mathrm{KL} \le \mathrm{bound}) \ge \mathrm{probability}`.
        The bound depends on the posterior and is not private.

    Example:
        >>> import numpy as np
        >>> noise = {"linear_scale": 0.1, "precision_scale": 0.05, "floor": 0.01}
        >>> natural_noise_bound(np.ones(2), np.eye(2), **noise, probability=0.9).bound.__round__(4)
        0.0792

    Reference:
        Vinaroz, Park (2022), DP-SEP, Theorem 4.1; Tropp (2015), Theorem 4.6.1.
    """
    base = check_definite("precision", precision)
    eta = check_vector("linear", linear, len(base))
    sd1, sd2 = check_scales(linear_scale=linear_scale, precision_scale=precision_scale)
    floor = check_real("floor", floor, low=0.0, low_open=True)
    level = check_level(probability)
    check_in("direction", direction, ("forward", "reverse"))
    noise = symmetric_noise(base, sd2)
    share, radius = event_radii(1.0 - level, noise.variance, len(base))
    sure = _repaired(base, eta, sd1, radius[-1], floor, direction)
    inside = (radius < 1.0) & (share < 1.0)
    inside &= floor <= (1.0 - radius) * np.linalg.eigvalsh(base)[0]
    if not inside.any():
        return KLBound(sure, level)
    form = _natural_form(radius[inside], noise, base, eta, sd1, direction)
    found = form_quantile((1.0 - level) * (1.0 - share[inside]), form)
    return KLBound(float(min(sure, found.min())), level)


def _moment_probability(threshold: object, noise: Noise, sd1: float, direction: str) -> KLBound:
    """The probability for a threshold, at the best t of a grid."""
    value = check_real("threshold", threshold, low=0.0, low_open=True)
    radius = np.linspace(0.0, 1.0, 1001)[:-1]
    tail = form_tail(value, _moment_form(radius, noise, sd1, direction))
    left = tail + series_tail(radius, noise.variance, len(noise.second))
    return KLBound(value, float(max(0.0, 1.0 - left.min())))


def _moment_form(radius: np.ndarray, noise: Noise, sd1: float, direction: str) -> Form:
    """The form Q of the bound for moments, for every t."""
    forward = direction == "forward"
    curve = curvature(radius, "phi" if forward else "psi")
    grow = 1.0 / (1.0 - radius) if forward else np.ones_like(radius)
    mean = curve * np.trace(noise.second) + grow * sd1**2 * np.trace(noise.inverse)
    top = np.maximum(curve * noise.top, grow * sd1**2 * noise.norm)
    return Form(0.0, 0.5 * mean, 0.5 * top)


def _natural_form(
    radius: np.ndarray, noise: Noise, base: np.ndarray, eta: np.ndarray, sd1: float, direction: str
) -> Form:
    """The second bound for natural parameters, for every t."""
    forward = direction == "forward"
    curve = curvature(radius, "psi" if forward else "phi")
    grow = (1.0 - radius) ** (-1.0 if forward else -2.0)
    values, vectors = np.linalg.eigh(base)
    x, mean = (vectors / np.sqrt(values)) @ (vectors.T @ eta), noise.inverse @ eta
    return Form(
        0.5 * grow * sd1**2 * np.trace(noise.inverse),
        0.5 * (curve * np.trace(noise.second) + grow * (x @ noise.second @ x)),
        0.5 * noise.top * (curve + grow * (mean @ mean) / noise.norm),
    )


def _repaired(
    base: np.ndarray, eta: np.ndarray, sd1: float, t: float, floor: float, direction: str
) -> float:
    """The first bound for natural parameters, at one t."""
    values = np.linalg.eigvalsh(base)
    shift = max(0.0, floor - (1.0 - t) * values[0 if t < 1.0 else -1])
    r = t + shift / values[0]
    least = max(1.0 - t, floor / values[-1])
    ends = np.array([least - 1.0, r])
    if direction == "forward":
        worst, power = (ends - np.log1p(ends)).max(), 1
    else:
        worst, power = (np.log1p(ends) - ends / (1.0 + ends)).max(), 2
    moved = sd1**2 * (1.0 / values).sum() + r**2 * (eta @ np.linalg.solve(base, eta))
    return float(0.5 * (len(base) * worst + moved / least**power))
