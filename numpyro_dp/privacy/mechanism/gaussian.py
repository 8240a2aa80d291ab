r"""The Gaussian mechanism on a sum of clipped signals: the one place that adds noise.

.. math::
    \mathcal{M}(D) = \sum_{i \in D} \min\!\Big(1, \frac{C}{\lVert s_i \rVert_2}\Big)\, s_i
        + \mathcal{N}(0, \sigma^2 C^2 I).

Sum and noise are integers on a fine grid (:mod:`numpyro_dp.privacy.noise`).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_dp._compat import is_tracer
from numpyro_dp._lazy import dpa
from numpyro_dp._tree import widen
from numpyro_dp.core import Mechanism, MechanismBuilder, MechanismState, Number, PyTree, is_whole
from numpyro_dp.privacy.mechanism.clip_norm import ClipNorm, adaptive, shorter
from numpyro_dp.privacy.noise import (
    MOST,
    TOTAL_VARIATION,
    discrete_gaussian,
    on_grid,
    spacing_of,
    whole_on_grid,
)


@dataclasses.dataclass(frozen=True)
class GaussianMechanism:
    r"""Clips signals to their norm and adds Gaussian noise to the sum: the default ``mechanism``.

    With one norm C each signal is scaled to :math:`\lVert s_i\rVert_2 \le C`. With norms by entry,
    each named entry is scaled alone. All others are scaled together to the norm under the key
    ``...`` (Ellipsis). The sensitivity is :math:`\sqrt{\sum_b C_b^2}`. The noise in every
    coordinate has standard deviation ``noise_multiplier`` times the sensitivity. It is a little
    wider for the rounding of d numbers to a grid: by a part of about
    ``noise_multiplier * sqrt(d) / 1.1e8``. Beyond 1/2 a step would release noise alone.

    Example:
        >>> from numpyro_dp.mechanisms import GaussianMechanism
        >>> from numpyro_dp.privacy.mechanism.clip_norm import ClipNorm
        >>> mechanism = GaussianMechanism()(ClipNorm.of({"b": 3.0, ...: 4.0}), 1.5)
        >>> mechanism.sensitivity, mechanism.event
        (5.0, GaussianDpEvent(noise_multiplier=1.5))

    Guarantee:
        ``total`` changes by at most ``sensitivity`` in Euclidean norm when one record is added or
        removed, and by at most twice that when one is replaced. A signal with a NaN or an infinity
        counts as 0. Every other signal is scaled into the ball. One call of ``privatise`` satisfies
        every bound of the Gaussian mechanism with the stated noise multiplier, with errors of
        probabilities of at most ``total_variation``. This holds for the numbers that the program
        computes, not only for real numbers.

    Reference:
        Abadi et al. (2016), Deep learning with differential privacy, CCS.
    """

    def __call__(self, clip_norm: ClipNorm, noise_multiplier: Number) -> Mechanism:
        """Returns the mechanism for these norms and this noise (``core.MechanismBuilder``)."""
        sensitivity = clip_norm.sensitivity
        std = _product(noise_multiplier, sensitivity)

        def scales(
            names: tuple[str, ...], squares: tuple[Array, ...], margin: float = 1.0
        ) -> tuple[Array, ...]:
            # A block that is not finite makes the whole record count as 0.
            finite = jnp.all(jnp.stack([jnp.isfinite(square) for square in squares]), axis=0)
            return tuple(
                _factor(norm * margin, square, finite)
                for norm, square in zip(clip_norm.of_blocks(names), squares, strict=True)
            )

        def privatise(
            key: Array, total: PyTree, state: MechanismState
        ) -> tuple[PyTree, MechanismState]:
            return _with_noise(key, total, sensitivity, noise_multiplier), state

        return Mechanism(
            init=_check_size,
            blocks=clip_norm.blocks,
            norms=lambda names: clip_norm.of_blocks(names) if clip_norm.bounded else None,
            scales=scales,
            privatise=privatise,
            sensitivity=sensitivity,
            noise_scale=std,
            event=_event(noise_multiplier, clip_norm),
            total_variation=TOTAL_VARIATION,
            whole=privatise,
        )


def build_mechanism(
    builder: MechanismBuilder, clip_norm: ClipNorm, noise_multiplier: Number, batch_size: Any = None
) -> Mechanism:
    """Returns the mechanism of a step. Each ``AdaptiveClip`` follows its quantile.

    Norms and noise may be traced. ``batch_size`` is the public expected size of a batch, q N.
    """
    base = builder(clip_norm.fixed(), noise_multiplier)
    return adaptive(base, clip_norm, batch_size) if clip_norm.adaptive else base


def _check_size(total: PyTree) -> tuple[()]:
    """Raises ValueError if a sum has more numbers than the distance of the noise is stated for."""
    size = sum(leaf.size for leaf in jax.tree.leaves(total))
    if size > MOST:
        raise ValueError(
            f"A release may have at most {MOST:,} numbers, got {size:,}: delta includes the "
            "distance of the noise from a Gaussian for that many. Use a smaller model."
        )
    return ()


def _with_noise(key: Array, total: PyTree, sensitivity: Number, noise_multiplier: Number) -> PyTree:
    """Adds one vector of noise to the leaves. Joining the leaves would slow their sums down."""
    leaves, treedef = jax.tree.flatten(total, is_leaf=is_whole)
    numbers = [leaf.number() if is_whole(leaf) else widen(leaf) for leaf in leaves]
    ends = np.cumsum([number.size for number in numbers])
    spacing, told = spacing_of(sensitivity, noise_multiplier, ends[-1], jnp.result_type(*numbers))
    noise = jnp.split(discrete_gaussian(key, ends[-1]), ends[:-1])
    noisy = [
        (whole_on_grid if is_whole(leaf) else on_grid)(
            leaf if is_whole(leaf) else number, part.reshape(number.shape), spacing, told
        )
        for leaf, number, part in zip(leaves, numbers, noise, strict=True)
    ]
    quiet = noise_multiplier == 0
    return treedef.unflatten([jnp.where(quiet, *each) for each in zip(numbers, noisy, strict=True)])


def _product(noise_multiplier: Number, sensitivity: Number) -> Array | float:
    """The standard deviation of the noise. It is 0 without noise, also for an infinite norm."""
    if not is_tracer(noise_multiplier) and not is_tracer(sensitivity):
        return float(noise_multiplier) * float(sensitivity) if noise_multiplier else 0.0
    return jnp.where(noise_multiplier == 0, 0.0, noise_multiplier * sensitivity)


def _factor(clip_norm: Number, squared_norm: Array, finite: Array) -> Array:
    """min(1, C / norm), or 0 if the signal is not finite."""
    norm = jnp.sqrt(squared_norm)
    safe = jnp.where(finite & (norm > 0), norm, 1)
    limit = shorter(clip_norm, norm.dtype)
    factor = jnp.where(norm > limit, limit / safe, 1)
    return jnp.where(finite & jnp.isfinite(norm), factor, 0).astype(norm.dtype)


def _event(noise_multiplier: Number, clip_norm: ClipNorm) -> dpa.DpEvent | None:
    """The event of one call. ``None`` if a value is traced, because only the host knows it then."""
    if any(is_tracer(leaf) for leaf in jax.tree.leaves((noise_multiplier, clip_norm))):
        return None
    if float(noise_multiplier) == 0 or not clip_norm.bounded:
        return dpa.NonPrivateDpEvent()
    return dpa.GaussianDpEvent(float(noise_multiplier))
