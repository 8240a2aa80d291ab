r"""Renyi differential privacy: the loosest accountant, and one for any delta.

.. math:: \varepsilon = \min_\alpha \; n\,\rho(\alpha) + \log\tfrac{\alpha - 1}{\alpha}
    - \frac{\log(\delta \alpha)}{\alpha - 1}

``dp_accounting`` computes the divergences :math:`\rho(\alpha)` of one step. This module bounds
their rounding error and adds it for all steps. For very small sampling rates the error exceeds the
divergence itself, and the library would turn a negative divergence into epsilon 0.

**Relations.** The library reads a ``GaussianDpEvent`` as noise / sensitivity under any relation,
like this package. Under ``replace_one`` it supports full batches and fixed-size samples without
replacement (noise relative to the doubled sensitivity), but not Poisson samples. Under
``add_or_remove_one`` it supports full batches and Poisson samples, but not fixed-size samples.

Reference:
    Mironov: Renyi Differential Privacy (2017). Mironov, Talwar, Zhang: Renyi DP of the Sampled
    Gaussian Mechanism (2019). Wang, Balle, Kasiviswanathan: Subsampled RDP (2019), Theorem 27.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
from scipy import special

from numpyro_dp._lazy import dpa
from numpyro_dp.privacy.accounting.bounds import (
    EpsilonBound,
    GaussianStep,
    StepAccountant,
    StepError,
    UnsupportedEventError,
    canonical_event,
)
from numpyro_dp.privacy.budget import Relation, neighboring_relation


def _orders(largest: float, ratio: float) -> tuple[float, ...]:
    """Fractional orders below 11, whole ones to 64, then a geometric sequence of whole ones."""
    orders = [1.0 + x / 10.0 for x in range(1, 100)] + [float(x) for x in range(11, 65)]
    while orders[-1] * ratio <= largest:
        orders.append(float(math.ceil(orders[-1] * ratio)))
    return tuple(orders)


# A Poisson-sampled divergence of order a is a sum of a terms, hence the smaller range.
_SAMPLED_ORDERS = _orders(4e3, 1.25)
_CLOSED_FORM_ORDERS = _orders(1e7, 1.1)


@dataclasses.dataclass(frozen=True)
class RDP(StepAccountant):
    """Renyi accountant of ``dp_accounting``, with rounding bounded.

    Args:
        orders: Orders above 1 to minimise over. ``None`` chooses them for the event, up to 4e3 for
            sampled steps and up to 1e7 for full batches.

    Raises:
        ValueError: If an order is not above 1.01, below which the conversion is unstable.

    Example:
        >>> from dp_accounting import GaussianDpEvent
        >>> round(RDP().epsilon(GaussianDpEvent(1.0), 1e-5, "add_or_remove_one").epsilon, 2)
        4.73

    **Guarantee**: ``upper`` is not below the true epsilon. It is usually 3 to 15 % above it.
    """

    name = "RDP"
    orders: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if self.orders is not None and not (self.orders and min(self.orders) > 1.01):
            raise ValueError(
                f"orders={self.orders!r} is not a non-empty tuple of numbers > 1.01. Omit orders "
                "to let RDP choose them for the event."
            )

    def epsilon(self, event: dpa.DpEvent, delta: float, relation: Relation) -> EpsilonBound:
        """Bounds epsilon (see :class:`Accountant`).

        Raises:
            UnsupportedEventError: If ``dp_accounting`` has no divergence for the event.
        """
        try:
            return super().epsilon(event, delta, relation)
        except UnsupportedEventError:  # the library knows other noise too, such as Laplace
            if not _is_known(event, relation):
                raise
        orders = self.orders or _SAMPLED_ORDERS
        upper, _ = epsilon_and_order(event, (), delta, relation, orders)
        return EpsilonBound(None, None, upper, delta, relation, event, self.name)

    def _bounds(
        self, steps: tuple[GaussianStep, ...], delta: float, relation: Relation
    ) -> tuple[None, None, float]:
        event = canonical_event(steps)
        if not _is_known(event, relation):
            sampled = " or ".join(sorted({step.sampling for step in steps} - {"none"}))
            raise StepError(
                f"dp_accounting has no Renyi divergence for {sampled} samples under {relation!r}"
            )
        return None, None, epsilon_and_order(event, steps, delta, relation, self.orders)[0]


def epsilon_and_order(
    event: dpa.DpEvent, steps: tuple[GaussianStep, ...], delta: float, relation: Relation,
    orders: tuple[float, ...] | None = None,
) -> tuple[float, float]:  # fmt: skip
    """Returns the bound of a private event, and the order that gives it.

    ``steps`` is its normal form, or is empty if it has none.
    """
    from absl import logging

    # Full batches have a closed form, without sums that lose digits.
    sampled = sum(step.count for step in steps if step.sampling != "none")
    orders = orders or (_SAMPLED_ORDERS if sampled else _CLOSED_FORM_ORDERS)
    library = dpa.rdp.RdpAccountant(orders, neighboring_relation(relation))
    # Its log of orders that it skips is hidden. A skipped order only loosens the bound.
    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.ERROR)
    try:
        divergence = library.compose(event).rdp
    finally:
        logging.set_verbosity(verbosity)
    array = np.asarray(orders, dtype=np.float64)
    # Bounds the rounding error of the library's log-space sums of ``order`` terms, per order.
    terms = array + 4.0 * special.gammaln(array + 1.0) + 16.0
    rounding = sampled * terms * float(np.finfo(np.float64).eps) / (array - 1.0)
    # A divergence is never negative, so a value below 0 is rounding.
    divergence = np.maximum(divergence + rounding, 0.0)
    epsilon, order = dpa.rdp.compute_epsilon(array.tolist(), divergence, delta)
    return float(epsilon), float(order)


def _is_known(event: dpa.DpEvent, relation: Relation) -> bool:
    return dpa.rdp.RdpAccountant([2.0], neighboring_relation(relation)).supports(event)
