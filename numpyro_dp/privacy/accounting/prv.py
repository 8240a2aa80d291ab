r"""Epsilon with two-sided error bounds, by ``prv_accountant``.

The library returns :math:`\varepsilon_{low} \le \varepsilon \le \varepsilon_{up}` with
:math:`\varepsilon_{up} - \varepsilon_{low} \approx 2 \eta`; the mesh that an error :math:`\eta`
needs has

.. math:: N = \frac{2L}{\eta} \sqrt{\tfrac n2 \log\tfrac{12}{\delta_{err}}}

points for :math:`n` steps on a domain :math:`[-L, L]`. Here :math:`\eta` is a small part of epsilon
unless that makes :math:`N` larger than ``max_points``; then it is the error which that many points
can guarantee. So time and memory are bounded, and the bound gets looser with :math:`\sqrt n`, never
invalid.

**Directions.** The library's Poisson-sampled Gaussian is the *remove* direction, with the mixture
on top. Under composition neither direction dominates the other (Lebeda et al., 2024), so the *add*
direction, :math:`Y = -\log(1 - q + q e^{(x - 1/2)/\sigma^2})` with :math:`x \sim N(0, \sigma^2)`,
is evaluated too, and the larger bounds count. Its Renyi divergence, which sizes the domain, is at
most the other's (Mironov et al., 2019, Theorem 5).

**Rounding.** The library centres each grid by a quadrature of tolerance 1.5e-8 on 11 pieces; the
part of that which survives :math:`n` steps is added to the bounds.

Reference:
    Gopi, Lee, Wutschitz: Numerical Composition of Differential Privacy (2021), Theorem 5.5.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import warnings
from typing import Any

import numpy as np
from scipy import special

from numpyro_dp._lazy import dpa
from numpyro_dp._validate import check_int, check_real
from numpyro_dp.privacy.accounting.bounds import (
    EpsilonBound,
    UnreliableBoundError,
    UnsupportedEventError,
    register,
)
from numpyro_dp.privacy.accounting.steps import GaussianStep, StepError, gaussian_steps
from numpyro_dp.privacy.budget import Relation, check_relation

__all__ = ["PRV"]

_QUADRATURE = 11 * 1.5e-8
_DELTA_ERROR = 1e-3  # part of delta


@register
@dataclasses.dataclass(frozen=True)
class PRV:
    """Privacy random variables, with lower and upper bound.

    Args:
        relative_error: Wanted error, as a part of epsilon; in (0, 1].
        max_points: Largest number of mesh points, at least 1024; bounds time and memory.

    Raises:
        ValueError: If an argument is outside its range.

    Example:
        >>> from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
        >>> step = PoissonSampledDpEvent(0.01, GaussianDpEvent(1.0))
        >>> bound = PRV().epsilon(SelfComposedDpEvent(step, 100), 1e-5, "add_or_remove_one")
        >>> bool(bound.lower < bound.estimate < bound.upper)
        True

    **Guarantee**: the true epsilon is in [``lower``, ``upper``].
    """

    relative_error: float = 0.005
    max_points: int = 1 << 19

    def __post_init__(self) -> None:
        """Checks the fields."""
        check_real("relative_error", self.relative_error, low=0.0, low_open=True, high=1.0)
        check_int("max_points", self.max_points, low=1024)

    @property
    def name(self) -> str:
        """Name."""
        return "PRV"

    def refusal(self, event: dpa.DpEvent, relation: Relation) -> str | None:
        """Returns why the event is not supported, or ``None``."""
        check_relation(relation)
        try:
            steps = gaussian_steps(event)
        except StepError as error:
            return str(error)
        if any(step.sampling == "without_replacement" for step in steps):
            return "prv_accountant has no fixed-size samples"
        if relation == "replace_one" and any(step.sampling == "poisson" for step in steps):
            return "prv_accountant has Poisson samples under 'add_or_remove_one' only"
        return None

    def epsilon(self, event: dpa.DpEvent, delta: float, relation: Relation) -> EpsilonBound:
        """Bounds epsilon from both sides; see :class:`Accountant`.

        Raises:
            UnsupportedEventError: If the library has no random variable for the event.
            UnreliableBoundError: If delta is too small for double precision at so many steps, or
                the library's own checks fail.
        """
        reason = self.refusal(event, relation)
        if reason is not None:
            raise UnsupportedEventError(event, relation, {self.name: reason})
        steps = gaussian_steps(event)
        if not steps or steps[0].noise_multiplier == 0.0:
            value = math.inf if steps else 0.0
            return EpsilonBound(value, value, value, delta, relation, event, self.name)
        self._check_rounding(steps, delta)
        sampled = any(step.sampling == "poisson" for step in steps)
        bounds = [
            self._directed(steps, delta, add) for add in ([False, True] if sampled else [False])
        ]
        lower, estimate, upper = (max(values) for values in zip(*bounds, strict=True))
        return EpsilonBound(
            max(lower, 0.0), max(estimate, 0.0), max(upper, 0.0), delta, relation, event, self.name
        )

    def _check_rounding(self, steps: tuple[GaussianStep, ...], delta: float) -> None:
        # The cdf is computed in double precision: each step's mass is off by about 2^-50.
        rounding = sum(step.count for step in steps) * 2.0**-50
        if rounding > 0.1 * _DELTA_ERROR * delta:
            raise UnreliableBoundError(
                f"PRV resolves delta >= {rounding / (0.1 * _DELTA_ERROR):.3g} at "
                f"{sum(step.count for step in steps)} steps, got delta={delta:g}. Use PLD."
            )

    def _directed(
        self, steps: tuple[GaussianStep, ...], delta: float, add: bool
    ) -> tuple[float, float, float]:
        """Returns (lower, estimate, upper) of one direction."""
        from prv_accountant import accountant as library  # with scipy.signal, which is slow to come
        from scipy.integrate import IntegrationWarning

        variables = [_variable(step, add) for step in steps]
        counts = [step.count for step in steps]
        total, error = sum(counts), _DELTA_ERROR * delta
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            # exp and log overflow at the ends of the library's domain, where it masks the result.
            # A quadrature that did not converge is another matter, and is turned into an error.
            warnings.simplefilter("ignore", RuntimeWarning)
            warnings.simplefilter("error", IntegrationWarning)
            try:
                domain = library.compute_safe_domain_size(variables, counts, 1e-6, error)
                wanted = self.relative_error * max(float(domain) - 3.0, 1e-6)
                mesh = math.sqrt(total / 2.0 * math.log(12.0 / error))
                smallest = 2.0 * float(domain) * mesh / (0.99 * self.max_points)
                eps_error = max(wanted, smallest)
                found = library.PRVAccountant(variables, eps_error, error, counts)
                lower, estimate, upper = found.compute_epsilon(delta, counts)
            except (ArithmeticError, RuntimeError, ValueError, Warning) as reason:
                raise UnreliableBoundError(
                    f"prv_accountant refuses {total} steps at delta={delta:g}: {reason}"
                ) from reason
        slack = total * _QUADRATURE
        return lower - slack, estimate, upper + slack


def _variable(step: GaussianStep, add: bool) -> Any:
    from prv_accountant.privacy_random_variables import (
        GaussianMechanism,
        PoissonSubsampledGaussianMechanism,
    )

    if step.sampling == "none":
        return GaussianMechanism(step.noise_multiplier)
    cls = _add_direction() if add else PoissonSubsampledGaussianMechanism
    return cls(sampling_probability=step.rate, noise_multiplier=step.noise_multiplier)


@functools.cache
def _add_direction() -> type:
    """The privacy random variable of the add direction; see the module's docstring."""
    from prv_accountant.privacy_random_variables import PoissonSubsampledGaussianMechanism

    class AddDirection(PoissonSubsampledGaussianMechanism):
        def cdf(self, t: Any) -> Any:
            """P(Y <= t): the loss falls in x, and is t at 1/2 + s^2 log((e^-t - 1 + q) / q)."""
            rate, sigma = float(self.p), float(self.sigma)
            t = np.asarray(t, dtype=np.float64)
            with np.errstate(over="ignore"):  # exp(-t) = inf for very negative t: the cdf is 0.
                ratio = (np.expm1(-t) + rate) / rate
            inside = ratio > 0.0
            x = 0.5 + sigma**2 * np.log(np.where(inside, ratio, 1.0))
            return np.where(inside, special.ndtr(-x / sigma), 1.0).astype(np.longdouble)

    return AddDirection
