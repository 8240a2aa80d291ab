r"""Adds the loss of one record to its signal, so that a loss curve can be released privately.

The value of a scalar is also a gradient, :math:`f = \partial_t\,(1 + t) f` at :math:`t = 0`. So the
loss joins the signal as one more entry. It has its own clip norm and the same noise.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_dp.core import Estimator, FactoredSignal, PyTree, Released, Values
from numpyro_dp.privacy.mechanism.clip_norm import ClipNorm

LOSS_ENTRY = "log_likelihood (released)"


class LossRelease(NamedTuple):
    r"""Releases a loss curve along with the gradients, for a part of the budget.

    The log likelihood of each record, clipped to ``[-clip, clip]``, joins its signal as one more
    coordinate, which takes ``share`` of the squared sensitivity. At equal epsilon the gradients get
    :math:`1/\sqrt{1 - share}` times as much noise.

    Attributes:
        clip: Bound on the absolute log likelihood of one record, in nats.
        share: Part of the privacy cost, in (0, 1).

    Example:
        >>> from numpyro_dp.mechanisms import LossRelease
        >>> LossRelease(clip=10.0)  # DPSVI(..., loss_release=), then result.losses
        LossRelease(clip=10.0, share=0.01)
    """

    clip: float
    share: float = 0.01


def with_loss_norm(clip_norm: ClipNorm, release: LossRelease | None) -> ClipNorm:
    """Adds a norm for the loss entry that gives it its share of the squared sensitivity."""
    if release is None:
        return clip_norm
    norm = clip_norm.sensitivity * math.sqrt(release.share / (1 - release.share))
    return clip_norm.joined({LOSS_ENTRY: norm})


def with_loss(estimator: Estimator, scale: float | Array) -> Estimator:
    """Adds ``scale`` times the log likelihood of the record to the signal, as an entry of its own.

    Guarantee: the new entry reads one record, and ``pull_back`` ignores it.
    """
    inner = estimator.factored
    if inner is None:
        raise ValueError(
            "loss_release needs an estimator with a factored signal. Give the estimator a "
            "FactoredSignal, or leave loss_release out."
        )

    def scalar(public: PyTree, point: PyTree, example: PyTree) -> Array:
        value = inner.scalar(public, point[0], example)
        return value + point[1] * scale * jax.lax.stop_gradient(value)

    def point(public: PyTree) -> PyTree:
        start = inner.point(public)
        dtype = jnp.result_type(*jax.tree.leaves(start))
        return start, jnp.zeros((), dtype)

    def core(public: PyTree, gradient: PyTree, names: tuple[str, ...]) -> PyTree:
        rest, entry = _split(names)
        return inner.core(public, gradient[0], rest), dict.fromkeys(entry, gradient[1])

    def expand(public: PyTree, tree: PyTree, names: tuple[str, ...]) -> Values:
        return inner.expand(public, tree[0], _split(names)[0]) | tree[1]

    def signal(public: PyTree, example: PyTree) -> Values:
        entry = scale * inner.scalar(public, inner.point(public), example)
        return estimator.signal(public, example) | {LOSS_ENTRY: entry}

    def without_loss(released: Released) -> Released:
        rest = {name: value for name, value in released.total.items() if name != LOSS_ENTRY}
        return released._replace(total=rest)

    def pull_back(public: PyTree, released: Released) -> PyTree:
        return estimator.pull_back(public, without_loss(released))

    own = estimator.observe
    observe = own and (lambda public, released: own(public, without_loss(released)))
    factored = FactoredSignal(point, scalar, core, expand, inner.selects)
    return Estimator(estimator.prepare, signal, pull_back, factored, observe)


def _split(names: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Splits names into the estimator's own entries and the entry of the loss."""
    rest = tuple(name for name in names if name != LOSS_ENTRY)
    return rest, tuple(name for name in names if name == LOSS_ENTRY)
