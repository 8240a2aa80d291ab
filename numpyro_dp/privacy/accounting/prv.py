"""Lower and upper bounds on epsilon by ``prv_accountant``, to check the default accountants."""

from __future__ import annotations

import dataclasses
import math
import warnings
from typing import Any

import numpy as np
from scipy import special

from numpyro_dp._lazy import Lazy
from numpyro_dp.privacy.accounting import bounds
from numpyro_dp.privacy.budget import Relation

_ERROR, _POINTS = 0.005, 1 << 19  # wanted error (part of epsilon), most points of the mesh
_DELTA_ERROR, _QUADRATURE = 1e-3, 11 * 1.5e-8  # part of delta, error of a step's grid
_library, _integrate = Lazy("prv_accountant.accountant"), Lazy("scipy.integrate")
_variables: Any = Lazy("prv_accountant.privacy_random_variables")


@dataclasses.dataclass(frozen=True)
class PRV(bounds.StepAccountant):
    """Bounds full and Poisson batches from both sides (Gopi et al., 2021, Theorem 5.5).

    Guarantee: the true epsilon is between ``lower`` and ``upper``.

    Example:
        >>> import dp_accounting
        >>> event = dp_accounting.SelfComposedDpEvent(dp_accounting.GaussianDpEvent(20.0), 100)
        >>> round(PRV().epsilon(event, 1e-5, "add_or_remove_one").epsilon, 1)
        2.0
    """

    name = "PRV"

    def _bounds(
        self, steps: tuple[bounds.GaussianStep, ...], delta: float, relation: Relation
    ) -> tuple[float, ...]:
        sampling = {step.sampling for step in steps} - {"none"}
        if sampling and (sampling, relation) != ({"poisson"}, "add_or_remove_one"):
            raise bounds.StepError("it needs full batches, or Poisson and 'add_or_remove_one'")
        # Without sampling, both directions are the same.
        found = [_directed(steps, delta, add) for add in {False, bool(sampling)}]
        return tuple(max(0.0, *values) for values in zip(*found, strict=True))


def _directed(steps: tuple[bounds.GaussianStep, ...], delta: float, add: bool) -> tuple[float, ...]:
    """Returns (lower, estimate, upper) of a direction. None dominates (Lebeda et al., 2024)."""
    variables, counts = [_variable(step, add) for step in steps], [step.count for step in steps]
    total, error = sum(counts), _DELTA_ERROR * delta
    with warnings.catch_warnings(), np.errstate(all="ignore"):  # the library masks overflow
        warnings.simplefilter("ignore", RuntimeWarning)
        # An integral that has not converged may be wrong by more than `_QUADRATURE`.
        warnings.simplefilter("error", _integrate.IntegrationWarning)
        try:
            if total * 2.0**-50 > 0.1 * error:  # rounding error of the cdf
                raise ValueError("delta is too small for double precision, use PLD")
            domain = float(_library.compute_safe_domain_size(variables, counts, 1e-6, error))
            least = 2.0 * domain * math.sqrt(total / 2.0 * math.log(12.0 / error)) / _POINTS
            wanted = max(_ERROR * max(domain - 3.0, 1e-6), least / 0.99)
            found = _library.PRVAccountant(variables, wanted, error, counts)
            lower, estimate, upper = found.compute_epsilon(delta, counts)
        except (ArithmeticError, RuntimeError, ValueError, Warning) as why:
            told = f"prv_accountant has no bound for {total} steps at delta={delta:g}: {why}"
            raise bounds.UnreliableBoundError(told) from why
    return lower - total * _QUADRATURE, estimate, upper + total * _QUADRATURE


def _variable(step: bounds.GaussianStep, add: bool) -> Any:
    remove = _variables.PoissonSubsampledGaussianMechanism

    class Add(remove):  # its Renyi divergence is at most that of remove (Mironov et al., 2019)
        def cdf(self, t: np.ndarray) -> np.ndarray:
            """P(Y <= t). The loss falls in x, and is t at 1/2 + s^2 log((e^-t - 1 + q) / q)."""
            rate, sigma, t = float(self.p), float(self.sigma), np.asarray(t, dtype=np.float64)
            ratio = (np.expm1(-t) + rate) / rate  # infinite for very negative t: the cdf is 0
            x = 0.5 + sigma**2 * np.log(np.where(ratio > 0.0, ratio, 1.0))
            return np.where(ratio > 0.0, special.ndtr(-x / sigma), 1.0).astype(np.longdouble)

    if step.sampling == "none":
        return _variables.GaussianMechanism(step.noise_multiplier)
    return (Add if add else remove)(step.rate, step.noise_multiplier)
