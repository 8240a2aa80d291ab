r"""The Gaussian mechanism on a sum of clipped signals: the one place that adds noise.

.. math::
    \mathcal{M}(D) = \sum_{i \in D} \min\!\Big(1, \frac{C}{\lVert s_i \rVert_2}\Big)\, s_i
        + \mathcal{N}(0, \sigma^2 C^2 I).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from dp_accounting.dp_event import DpEvent, GaussianDpEvent, NonPrivateDpEvent
from jax import Array
from jax.flatten_util import ravel_pytree

from numpyro_dp._tree import squared_norm, widen
from numpyro_dp._validate import check_real
from numpyro_dp.core import Blocks, Mechanism, PyTree
from numpyro_dp.privacy.random import standard_normal

__all__ = ["ClipNorm", "check_blocks", "check_clip_norm", "clip_sensitivity", "gaussian"]

ClipNorm = float | Mapping[Any, float]


def gaussian(clip_norm: Any, noise_multiplier: Any, bounded: bool | None = None) -> Mechanism:
    r"""Clips signals to ``clip_norm`` and adds Gaussian noise to their sum.

    With one norm C the whole signal is scaled to :math:`\lVert s_i\rVert_2 \le C`. With a dict of
    norms, every named entry is scaled by itself, and the entries that are not named together to the
    norm under the key ``...`` (Ellipsis); the sensitivity is :math:`\sqrt{\sum_b C_b^2}`. The noise
    has standard deviation ``noise_multiplier`` times the sensitivity in every coordinate, and is
    drawn in float32 or wider.

    Args:
        clip_norm: C > 0, or a dict of such norms by entry of the signal. ``inf`` is for tests: it
            is not private.
        noise_multiplier: Noise standard deviation over sensitivity, >= 0. 0 is not private.
            Both may be traced values.
        bounded: Whether all norms are finite; traced ones are by default.

    Returns:
        A :class:`~numpyro_dp.core.Mechanism` over signals that are dicts of arrays. Its state is
        the tuple of the clip norms.

    Guarantee:
        ``total`` changes by at most ``sensitivity`` in Euclidean norm when one record is added or
        removed (twice that when one is replaced): a signal with a NaN or an infinity counts as 0,
        every other one is scaled into the ball.  One call of ``privatise`` is the Gaussian
        mechanism with the stated noise multiplier, up to floating-point arithmetic (Mironov 2012).

    Reference:
        Abadi et al. (2016), Deep learning with differential privacy, CCS.
    """
    each = list(clip_norm.values()) if isinstance(clip_norm, Mapping) else [clip_norm]
    sensitivity = clip_sensitivity(clip_norm)
    if bounded is None:
        bounded = all(isinstance(norm, jax.core.Tracer) or math.isfinite(norm) for norm in each)

    def privatise(key: Array, total: PyTree, state: PyTree) -> tuple[PyTree, PyTree]:
        flat, unravel = ravel_pytree(widen(total))
        std = jnp.where(noise_multiplier == 0, 0.0, noise_multiplier * sensitivity)
        noise = standard_normal(key, flat.shape, flat.dtype)
        return unravel(flat + std.astype(flat.dtype) * noise), state

    return Mechanism(
        init=lambda: tuple(jnp.asarray(norm, float) for norm in each),
        **_clipping(clip_norm, bounded),
        privatise=privatise,
        sensitivity=sensitivity,
        event=_event(noise_multiplier, sensitivity),
    )


def _clipping(clip_norm: Any, bounded: bool) -> dict[str, Any]:
    """The parts of a mechanism that bound a signal."""

    def blocks(names: tuple[str, ...]) -> Blocks:
        return tuple(members for members, _ in _blocks(clip_norm, names))

    def norms(names: tuple[str, ...]) -> tuple[Any, ...] | None:
        return tuple(norm for _, norm in _blocks(clip_norm, names)) if bounded else None

    def scales(
        names: tuple[str, ...], squares: tuple[Array, ...], margin: float = 1.0
    ) -> tuple[Array, ...]:
        finite = jnp.all(jnp.stack([jnp.isfinite(square) for square in squares]), axis=0)
        limits = [norm * margin for _, norm in _blocks(clip_norm, names)]
        return tuple(
            _factor(limit, square, finite) for limit, square in zip(limits, squares, strict=True)
        )

    def bound(signal: dict[str, Any]) -> tuple[dict[str, Any], Array]:
        wide, names = widen(signal), tuple(signal)
        squares = tuple(squared_norm([wide[name] for name in members]) for members in blocks(names))
        bounded = {}
        for members, factor in zip(blocks(names), scales(names, squares), strict=True):
            for name in members:
                bounded[name] = jax.tree.map(
                    lambda leaf, factor=factor: jnp.where(factor > 0, leaf, 0) * factor, wide[name]
                )
        return bounded, jnp.sqrt(sum(squares))

    return {"blocks": blocks, "norms": norms, "scales": scales, "bound": bound}


def check_blocks(clip_norm: ClipNorm, names: tuple[str, ...]) -> None:
    """Raises unless every entry of the signal has exactly one norm.

    Raises:
        ValueError: Lists the entries and the keys.
    """
    if not isinstance(clip_norm, Mapping):
        return
    keys = {key for key in clip_norm if key is not ...}
    rest = set(names) - keys
    if keys - set(names) or bool(rest) != (... in clip_norm):
        raise ValueError(
            f"Expected clip_norm to have one norm for each of {sorted(names)} (or the key ... for "
            f"all that are not named), got the keys {sorted(map(str, clip_norm))}."
        )


def clip_sensitivity(clip_norm: Any) -> Any:
    """Returns the sensitivity of the sum when one record is added or removed."""
    if not isinstance(clip_norm, Mapping):
        return clip_norm
    squares = sum(norm * norm for norm in clip_norm.values())
    return math.sqrt(squares) if isinstance(squares, float | int) else jnp.sqrt(squares)


def check_clip_norm(clip_norm: Any) -> ClipNorm:
    """Returns a valid clip norm, or raises naming the value and the range.

    Raises:
        TypeError: If it is neither a number nor a dict of numbers.
        ValueError: If a norm is not positive, or a dict is empty.
    """
    if not isinstance(clip_norm, Mapping):
        return _check_norm("clip_norm", clip_norm)
    if not clip_norm:
        raise ValueError("Expected clip_norm to name the entries of the signal, got an empty dict.")
    return {name: _check_norm(f"clip_norm[{name!r}]", norm) for name, norm in clip_norm.items()}


def _check_norm(name: str, norm: Any) -> float:
    """Beyond these bounds squares leave the range of float32, and norms are no norms any more."""
    remedy = "It bounds the norm of one record's unscaled gradient, in the units of log p."
    if norm == math.inf:
        return math.inf
    return check_real(name, norm, low=1e-12, high=1e12, remedy=remedy)


def _blocks(clip_norm: Any, names: tuple[str, ...]) -> list[tuple[tuple[str, ...], Any]]:
    if not isinstance(clip_norm, Mapping):
        return [(names, clip_norm)]
    blocks = [((name,), clip_norm[name]) for name in names if name in clip_norm]
    rest = tuple(name for name in names if name not in clip_norm)
    return [*blocks, (rest, clip_norm[...])] if rest else blocks


def _factor(clip_norm: Any, squared_norm: Array, finite: Array) -> Array:
    """min(1, C / norm), and 0 where the signal is not finite."""
    norm = jnp.sqrt(squared_norm)
    safe = jnp.where(finite & (norm > 0), norm, 1)
    # Rounding must not push a norm above C: shrink by a few units in the last place.
    shrink = 1 - 8 * jnp.finfo(norm.dtype).eps
    factor = jnp.where(norm > clip_norm * shrink, clip_norm * shrink / safe, 1)
    return jnp.where(finite & jnp.isfinite(norm), factor, 0).astype(norm.dtype)


def _event(noise_multiplier: Any, sensitivity: Any) -> DpEvent | None:
    """The event of one call; None when the parameters are traced and the host knows them."""
    if isinstance(noise_multiplier, jax.core.Tracer) or isinstance(sensitivity, jax.core.Tracer):
        return None
    if float(noise_multiplier) == 0 or math.isinf(sensitivity):
        return NonPrivateDpEvent()
    return GaussianDpEvent(float(noise_multiplier))
