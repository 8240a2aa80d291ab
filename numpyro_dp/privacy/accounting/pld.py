r"""Tight epsilon of Gaussian runs by privacy loss distributions.

``dp_accounting`` computes and composes the distributions, with pessimistic rounding
(Connect-the-Dots: a discrete loss that dominates the true one). This module chooses the grid and
accounts for the errors that the library leaves out.

**The grid follows the event.** Splitting a loss between two grid points at distance :math:`h`, with
:math:`P`- and :math:`Q`-mass kept, raises :math:`\log E[e^{\theta L}]` by about
:math:`\theta(1+\theta)h^2/12`. Let :math:`n` be the number of steps and :math:`1 + \theta` the
order at which Renyi DP meets delta. Epsilon is then too large by about

.. math:: \Delta\varepsilon \approx n\,(1 + \theta)\,h^2 / 12,

and :math:`h` is chosen so that this is a given small part of epsilon. The library's default of 1e-4
for every event is too coarse for many steps of little noise, and too fine for others.

**Rounding.** The library composes by a Fourier transform of length m in double precision. With
:math:`u = 2^{-52}`, each coefficient of a distribution is wrong by at most :math:`4 \log_2(m)\,u`
(as in Higham's theorem 24.2, in the 1-norm). Its n-th power is wrong by n times that, relative to
the power before. So the 2-norm of the composed distribution p has the relative error
:math:`4 \log_2(m)\,(2 + n)\,u`, and a delta adds up at most m entries:

.. math:: \mathrm{error} \le 4 \log_2(m)\,(2 + n)\,u\,\sqrt m\,\Vert p\Vert_2.

PLD charges this error to delta, and raises an error if it exceeds a tenth of delta. With 2,000
steps it is about 5e-11. Use :class:`.RDP` for smaller deltas.

**Relations.** Under ``add_or_remove_one`` the library composes the two directions, and epsilon is
the larger of the two. Under ``replace_one`` a Poisson-sampled step is dominated by the pair

.. math:: P = (1-q) N(0) + q N(1), \qquad Q = (1-q) N(0) + q N(-1).

*Proof.* Fix the sample of the other records (joint convexity of the divergence) and shift it away.
The outputs are :math:`(1-q) N(0) + q N(x)` and :math:`(1-q) N(0) + q N(x')` with :math:`\|x\|,
\|x'\| \le 1`. For a set :math:`A` with :math:`N(0)(A) = a`, Neyman and Pearson give :math:`N(x)(A)
\le \Phi(\Phi^{-1}(a) + 1/\sigma)` and :math:`N(x')(A) \ge \Phi(\Phi^{-1}(a) - 1/\sigma)`, so

.. math:: P(A) - e^\varepsilon Q(A) \le (1-q)(1 - e^\varepsilon) a
    + q\,\Phi(\Phi^{-1}(a) + \tfrac1\sigma) - q e^\varepsilon\,\Phi(\Phi^{-1}(a) - \tfrac1\sigma),

with equality for :math:`x = -x' = 1` and half-lines :math:`A`. This is the library's
``REPLACE_ONE``. Its standard deviation is in norms of one record, while the noise multiplier of our
events is relative to the doubled sensitivity.

**Samples of a fixed size**, m of n records under ``replace_one``. Let :math:`h_z(\varepsilon)` be
the delta of the Gaussian mechanism with noise multiplier z, and :math:`q = m / n`. For
:math:`\varepsilon \ge 0` a step has the delta

.. math:: h(\varepsilon) = q\, h_z\big(\log(1 + (e^\varepsilon - 1) / q)\big),

(Balle, Barthe, Gaboardi, Theorem 9, which is tight). The relation is symmetric, so h bounds both
directions, and :math:`H_{e^{-\varepsilon}}(P, Q) = 1 - e^{-\varepsilon} + e^{-\varepsilon}
H_{e^\varepsilon}(Q, P)` gives a bound at negative values. Together they are one convex function of
:math:`e^\varepsilon`: at 1 its slope rises by :math:`(1 - q)\, h_z(0)`. So a pair of distributions
has it as its deltas, and dominates the step. Such pairs compose (Zhu, Dong, Wang, Theorem 10), and
Connect-the-Dots needs nothing but these deltas.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import numpy as np
from scipy import special

from numpyro_dp._lazy import dpa
from numpyro_dp._validate import check_int, check_real
from numpyro_dp.privacy.accounting.bounds import (
    GaussianStep,
    StepAccountant,
    StepError,
    UnreliableBoundError,
    canonical_event,
)
from numpyro_dp.privacy.accounting.rdp import epsilon_and_order
from numpyro_dp.privacy.budget import SENSITIVITY, Relation, neighboring_relation

_TRUNCATED = 1e-6  # part of delta that truncated tails may use up
_ROUNDING = 0.1  # part of delta that rounding may use up
_LARGEST_LOSS = 1e6
_SMALLEST_DELTA = 1e-14
_FINEST = 0.01  # largest spacing of the grid, as a part of epsilon
_ORDERS = (1.25, 1.5, 2.0, 3.0, *(float(2**k) for k in range(2, 12)))
_UNIT = float(np.finfo(np.float64).eps)


@dataclasses.dataclass(frozen=True)
class PLD(StepAccountant):
    r"""Privacy loss distributions of ``dp_accounting`` with a grid adapted to the event.

    Args:
        relative_gap: Part of epsilon that the grid may add to it, in (0, 0.1].
        max_points: Largest number of points of one step's loss, at least 1024. Beyond it the grid
            is coarser and the bound looser, but still valid. ``upper - estimate`` shows by how
            much.

    Raises:
        ValueError: If an argument is outside its range.

    Example:
        >>> from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
        >>> step = PoissonSampledDpEvent(0.01, GaussianDpEvent(1.0))
        >>> bound = PLD().epsilon(SelfComposedDpEvent(step, 1000), 1e-5, "add_or_remove_one")
        >>> round(bound.epsilon, 2)
        1.83

    **Guarantee**: ``upper`` is not below the true epsilon, rounding included. ``estimate`` is
    ``upper`` minus the first-order excess of the grid, and is not a bound.

    Reference:
        Koskela, Jälkö, Honkela: Computing Tight DP Guarantees Using FFT (2020). Doroshenko et al.:
        Connect the Dots (2022). Zhu, Dong, Wang: Optimal Accounting via Characteristic Functions
        (2022), Theorem 11 for add or remove. Lebeda et al.: Avoiding Pitfalls for Privacy
        Accounting of Subsampled Mechanisms under Composition (2024). Balle, Barthe, Gaboardi:
        Privacy Amplification by Subsampling (2018). Higham: Accuracy and Stability of Numerical
        Algorithms (2002).
    """

    name = "PLD"
    relative_gap: float = 5e-4
    max_points: int = 1 << 17

    def __post_init__(self) -> None:
        check_real("relative_gap", self.relative_gap, low=0.0, low_open=True, high=0.1)
        check_int("max_points", self.max_points, low=1024)

    def _bounds(
        self, steps: tuple[GaussianStep, ...], delta: float, relation: Relation
    ) -> tuple[None, float, float]:
        kinds = {step.sampling for step in steps}
        if "without_replacement" in kinds and relation != "replace_one":
            raise StepError("fixed-size samples have a bound under replace_one alone")
        if kinds >= {"without_replacement", "poisson"}:
            raise StepError(
                "fixed-size and Poisson samples together have no bound to choose a grid by"
            )
        if delta < _SMALLEST_DELTA:
            raise UnreliableBoundError(
                f"Expected delta >= {_SMALLEST_DELTA:g} for PLD, ten times its rounding error in "
                f"one step, got delta={delta:g}. Use RDP(), or a larger delta."
            )
        total = sum(step.count for step in steps)
        # Only to choose the grid. Renyi DP has no divergence for Poisson samples under replace-one.
        # The divergence for add-or-remove at the same noise / sensitivity is close to it.
        near = "replace_one" if "without_replacement" in kinds else "add_or_remove_one"
        start, order = epsilon_and_order(canonical_event(steps), steps, delta, near, _ORDERS)
        interval = self._interval(steps, start, total * order)
        value, slope = self._at(steps, delta, relation, interval)
        # For few steps epsilon may be far below its Renyi bound, and delta may fall much faster.
        order = max(order, slope)
        finer = self._interval(steps, value, total * order, value * _FINEST)
        if finer < 0.9 * interval:
            interval, (value, slope) = finer, self._at(steps, delta, relation, finer)
        excess = total * max(order, slope) * interval**2 / 12.0
        return None, max(value - excess, 0.0), value

    def _at(
        self, steps: tuple[GaussianStep, ...], delta: float, relation: Relation, interval: float
    ) -> tuple[float, float]:
        """Returns the upper bound of the composition on a grid, and how fast delta falls there."""
        total, parts = sum(step.count for step in steps), []
        cut = delta * _TRUNCATED / (2 * len(steps))
        for step in steps:
            tail = _log_tail(total) + math.log(delta)
            if step.sampling == "without_replacement":
                one = _of_fixed_size(step, interval, tail)
            else:
                one = dpa.pld.privacy_loss_distribution.from_gaussian_mechanism(
                    step.noise_multiplier * SENSITIVITY[relation],
                    value_discretization_interval=interval,
                    log_mass_truncation_bound=tail,
                    sampling_prob=step.rate,
                    neighboring_relation=neighboring_relation(relation),
                )
            parts.append(one.self_compose(step.count, cut) if step.count > 1 else one)
        whole = functools.reduce(lambda one, other: one.compose(other, cut), parts)
        # Epsilon is the larger one of two directions, so the larger error counts.
        error = max(_rounding(pmf, total) for pmf in (whole._pmf_remove, whole._pmf_add))
        if not error <= _ROUNDING * delta:  # also true for NaN
            raise UnreliableBoundError(
                f"Expected delta >= {error / _ROUNDING:.3g} for PLD of {total} steps, ten times "
                f"its rounding error, got delta={delta:g}. Use RDP(), or a larger delta."
            )
        # Rounding may have made a delta too small by `error`. A smaller delta gives a larger
        # epsilon.
        value = float(whole.get_epsilon_for_delta(delta - error))
        if not 0.0 < value < math.inf:
            return value, 1.0
        before = float(whole.get_delta_for_epsilon(0.98 * value))
        return value, 1.0 + math.log(max(before / delta, 1.0)) / (0.02 * value)

    def _interval(
        self, steps: tuple[GaussianStep, ...], epsilon: float, orders: float, most: float = math.inf
    ) -> float:
        """Returns the interval whose excess is ``relative_gap`` of a rough epsilon, within limits.

        ``orders`` is the number of steps times the order of Renyi DP. ``most`` is the largest
        interval that is fine enough for few steps.
        """
        smallest = min(step.noise_multiplier for step in steps)
        total = sum(step.count for step in steps)
        width = 0.5 / smallest**2 + math.sqrt(-2.0 * _log_tail(total) + 60.0) / smallest
        if width > _LARGEST_LOSS:
            raise UnreliableBoundError(
                f"Expected privacy losses up to about {_LARGEST_LOSS:g} for PLD, got {width:.3g} "
                f"in one step: the noise multiplier {smallest:g} protects nothing. Use more noise."
            )
        wanted = math.sqrt(12.0 * self.relative_gap * max(epsilon, 1e-6) / orders)
        # On a finer grid the rounding of one-step deltas would outweigh the gain.
        resolved = math.sqrt(24.0 * _UNIT * width)
        return max(min(wanted, max(most, 1e-9)), width / self.max_points, resolved)


def _of_fixed_size(
    step: GaussianStep, interval: float, log_tail: float
) -> dpa.pld.privacy_loss_distribution.PrivacyLossDistribution:
    """The loss of a step with a sample of a fixed size under ``replace_one``."""
    mu, q = 1.0 / step.noise_multiplier, step.rate
    # Beyond this loss, the delta of the Gaussian mechanism is below that of the tail.
    plain = mu**2 / 2 + mu * math.sqrt(2.0 * max(0.0, math.log(q) - log_tail))
    last = math.ceil((plain + math.log(q + (1 - q) * math.exp(-plain))) / interval) + 1
    losses = interval * np.arange(last + 1)
    # log(1 + (e^x - 1) / q), which is at least x.
    inner = losses + np.log1p((1 / q - 1) * -np.expm1(-losses))
    above, below = (special.log_ndtr(sign * mu / 2 - inner / mu) for sign in (1.0, -1.0))
    # The exponent is at most 0 for real numbers. Rounding must not make a delta negative.
    deltas = -q * np.exp(above) * np.expm1(np.minimum(inner + below - above, 0.0))
    mirrored = -np.expm1(-losses) + np.exp(-losses) * deltas
    # Loss 0 is in both halves, so the mirrored one leaves it out.
    pmf = dpa.pld.pld_pmf.create_pmf_pessimistic_connect_dots(
        interval, np.arange(-last, last + 1), np.concatenate([mirrored[:0:-1], deltas])
    )
    return dpa.pld.privacy_loss_distribution.PrivacyLossDistribution(pmf)


def _log_tail(total: int) -> float:
    """Log of the part of delta that the truncated tails of one step may use up."""
    return math.log(_TRUNCATED / (4 * total))


def _rounding(pmf: Any, total: int) -> float:
    """Bounds the error of a delta by rounding in the library's transforms."""
    probs = np.asarray(pmf.to_dense_pmf()._probs)
    size = max(probs.size, 2)
    operations = 4.0 * math.log2(size) * (2.0 + total)
    return operations * _UNIT * math.sqrt(size) * float(np.linalg.norm(probs))
