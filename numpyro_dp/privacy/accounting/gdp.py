r"""Exact epsilon of Gaussian mechanisms without sampling.

A composition of Gaussian mechanisms with noise multipliers :math:`z_t`, adaptive or not, is as
private as one Gaussian mechanism with :math:`\mu = (\sum_t 1/z_t^2)^{1/2}`. That mechanism spends
exactly

.. math:: \delta(\varepsilon) = \Phi\!\big(\!-\tfrac\varepsilon\mu + \tfrac\mu2\big)
    - e^\varepsilon\, \Phi\!\big(\!-\tfrac\varepsilon\mu - \tfrac\mu2\big)
    = \varphi(x) \big(m(x) - m(x + \mu)\big), \quad x = \tfrac\varepsilon\mu - \tfrac\mu2,

where :math:`m(x) = (1 - \Phi(x)) / \varphi(x)` is Mills' ratio. The second form neither overflows
nor underflows at any delta.

Reference:
    Balle, Wang: Improving the Gaussian Mechanism (2018), Theorem 8. Dong, Roth, Su: Gaussian
    Differential Privacy (2022), Corollaries 1 and 3.
"""

from __future__ import annotations

import dataclasses
import math
from typing import cast

import numpy as np
from scipy import optimize, special

from numpyro_dp.privacy.accounting.bounds import GaussianStep, StepAccountant, StepError
from numpyro_dp.privacy.budget import Relation

_ROOT_ERROR = 1e-10


@dataclasses.dataclass(frozen=True)
class GDP(StepAccountant):
    """Exact accountant for full-batch runs, under both relations.

    Example:
        >>> from dp_accounting import GaussianDpEvent
        >>> print(GDP().epsilon(GaussianDpEvent(1.0), 1e-5, "add_or_remove_one"))
        epsilon <= 4.3772 (in [4.3772, 4.3772]) at delta=1e-05 under add_or_remove_one, by GDP

    **Guarantee**: ``upper`` is the true epsilon, up to a relative excess of 1e-10.
    """

    name = "GDP"

    def _bounds(
        self, steps: tuple[GaussianStep, ...], delta: float, relation: Relation
    ) -> tuple[float, float, float]:
        if any(step.sampling != "none" for step in steps):
            raise StepError("it is exact for full batches only")
        # The normal form has one step for all full batches.
        value = gaussian_epsilon(1.0 / steps[0].noise_multiplier, delta)
        return value * (1.0 - 2.0 * _ROOT_ERROR), value, value


def gaussian_log_delta(epsilon: float, mu: float) -> float:
    r"""Returns :math:`\log \delta(\varepsilon)` of a Gaussian mechanism.

    ``mu`` is sensitivity / noise.
    """
    x = epsilon / mu - mu / 2.0
    # For smaller x, Mills' ratio grows like exp(x^2 / 2), so logarithms are used below.
    if x > -5.0:
        mills = special.erfcx(x / math.sqrt(2.0)) - special.erfcx((x + mu) / math.sqrt(2.0))
        if mills <= 0.0:  # mu is below the rounding error of x: m(x) - m(x + mu) -> -m'(x) mu.
            slope = 1.0 - x * math.sqrt(math.pi / 2.0) * special.erfcx(x / math.sqrt(2.0))
            return -0.5 * x * x - 0.5 * math.log(2.0 * math.pi) + math.log(max(slope, 1e-300) * mu)
        return -0.5 * x * x + math.log(0.5 * mills)
    log_upper = float(special.log_ndtr(-x))
    log_lower = epsilon + float(special.log_ndtr(-x - mu))
    # The difference is negative, except for rounding: then log1p would be NaN.
    return log_upper + float(np.log1p(-np.exp(min(log_lower - log_upper, -1e-300))))


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Returns the smallest epsilon of a Gaussian mechanism with ``mu`` = sensitivity / noise.

    **Guarantee**: not below the true value, and above it by a factor of at most 1 + 1e-10.
    """
    target = math.log(delta)
    if gaussian_log_delta(0.0, mu) <= target:
        return 0.0
    high = mu * mu / 2.0 + mu * math.sqrt(2.0 * -target) + mu
    while gaussian_log_delta(high, mu) > target:
        high *= 2.0
    root = optimize.brentq(
        lambda epsilon: gaussian_log_delta(epsilon, mu) - target, 0.0, high, xtol=1e-15 * high
    )
    # SciPy's type is that of all its options.
    # Rounded up by more than the tolerance of the search.
    return cast(float, root) * (1.0 + _ROOT_ERROR) + 2e-15 * high
