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
import numpy as np
from dp_accounting.dp_event import DpEvent, GaussianDpEvent, NonPrivateDpEvent
from jax import Array

from numpyro_dp._tree import filled, squared_norm, widen
from numpyro_dp._validate import check_real
from numpyro_dp.core import Blocks, Mechanism, PyTree
from numpyro_dp.privacy.adaptive import (
    LARGEST_NORM,
    SMALLEST_NORM,
    AdaptiveClip,
    check_adaptive,
    follow,
    indicator_norm,
    indicators,
)
from numpyro_dp.privacy.random import standard_normal

__all__ = [
    "ClipNorm",
    "adapted_norms",
    "check_blocks",
    "check_clip_norm",
    "clip_sensitivity",
    "gaussian",
    "is_bounded",
]

ClipNorm = float | AdaptiveClip | Mapping[Any, float | AdaptiveClip]


def gaussian(
    clip_norm: Any, noise_multiplier: Any, bounded: bool | None = None, batch_size: Any = None
) -> Mechanism:
    r"""Clips signals to ``clip_norm`` and adds Gaussian noise to their sum.

    With one norm C the whole signal is scaled to :math:`\lVert s_i\rVert_2 \le C`. With a dict of
    norms, every named entry is scaled by itself, and the entries that are not named together to the
    norm under the key ``...`` (Ellipsis); the sensitivity is :math:`\sqrt{\sum_b C_b^2}`. The noise
    has standard deviation ``noise_multiplier`` times the sensitivity in every coordinate, and is
    drawn in float32 or wider.

    The norm of an :class:`~numpyro_dp.AdaptiveClip` is that of its field ``initial``. What it adds
    to the sum adds its square to that of the sensitivity; ``privatise`` gives the norm of the next
    step.

    Args:
        clip_norm: C > 0, or a dict of such norms by entry of the signal; each may be an
            ``AdaptiveClip``. ``inf`` is for tests: it is not private.
        noise_multiplier: Noise standard deviation over sensitivity, >= 0. 0 is not private.
            Both may be traced values.
        bounded: Whether all norms are finite; traced ones are by default.
        batch_size: Public number of records in a batch to be expected, q N, by which an
            ``AdaptiveClip`` divides.

    Returns:
        A :class:`~numpyro_dp.core.Mechanism` over signals that are dicts of arrays. Its state is
        the tuple of the clip norms, of an ``AdaptiveClip`` with the norm of the step to come.

    Guarantee:
        ``total`` changes by at most ``sensitivity`` in Euclidean norm when one record is added or
        removed (twice that when one is replaced): a signal with a NaN or an infinity counts as 0,
        every other one is scaled into the ball.  One call of ``privatise`` is the Gaussian
        mechanism with the stated noise multiplier, up to floating-point arithmetic (Mironov 2012).

    Reference:
        Abadi et al. (2016), Deep learning with differential privacy, CCS.
    """
    sensitivity = clip_sensitivity(clip_norm)
    bounded = is_bounded(clip_norm) if bounded is None else bounded

    def privatise(key: Array, total: PyTree, state: PyTree) -> tuple[PyTree, PyTree]:
        std = jnp.where(noise_multiplier == 0, 0.0, noise_multiplier * sensitivity)
        noisy = _with_noise(key, widen(total), std)
        return _followed(clip_norm, batch_size, noisy, state)

    return Mechanism(
        init=lambda: tuple(
            jax.tree.map(lambda x: jnp.asarray(x, float), norm)
            for norm in _by_entry(clip_norm).values()
        ),
        **_clipping(clip_norm, bounded),
        privatise=privatise,
        sensitivity=sensitivity,
        event=_event(noise_multiplier, sensitivity),
    )


def _with_noise(key: Array, total: PyTree, std: Array) -> PyTree:
    """Adds one vector of noise to the leaves, which are not joined: that would form sums slowly."""
    leaves, treedef = jax.tree.flatten(total)
    ends = np.cumsum([leaf.size for leaf in leaves])
    dtype = jnp.result_type(*leaves)
    noise = jnp.split(std.astype(dtype) * standard_normal(key, (ends[-1],), dtype), ends[:-1])
    return treedef.unflatten([
        (leaf + part.reshape(leaf.shape)).astype(leaf.dtype)
        for leaf, part in zip(leaves, noise, strict=True)
    ])  # fmt: skip


def _clipping(clip_norm: Any, bounded: bool) -> dict[str, Any]:
    """The parts of a mechanism that bound a signal."""
    own = _own_entries(clip_norm)

    def blocks(names: tuple[str, ...]) -> Blocks:
        return tuple(members for _, members in _blocks(clip_norm, names))

    def each(names: tuple[str, ...]) -> list[Any]:
        return [_by_entry(clip_norm)[name] for name, _ in _blocks(clip_norm, names)]

    def norms(names: tuple[str, ...]) -> tuple[Any, ...] | None:
        return tuple(_norm_of(norm) for norm in each(names)) if bounded else None

    def scales(
        names: tuple[str, ...], squares: tuple[Array, ...], margin: float = 1.0
    ) -> tuple[Array, ...]:
        finite = _all_finite(squares)
        return tuple(
            _factor(_norm_of(norm) * margin, square, finite)
            for norm, square in zip(each(names), squares, strict=True)
        )

    def extras(
        names: tuple[str, ...], squares: tuple[Array, ...], margin: float = 1.0
    ) -> dict[str, tuple[Array, Any]]:
        finite, found = _all_finite(squares), {}
        for (name, _), square in zip(_blocks(clip_norm, names), squares, strict=True):
            if name in own:
                norm, room = _by_entry(clip_norm)[name], margin * _shrink(square.dtype)
                numbers = indicators(norm, square, finite, room)
                found[own[name]] = numbers, indicator_norm(norm)
        return found

    def bound(signal: dict[str, Any]) -> tuple[dict[str, Any], Array]:
        wide, names = widen(signal), filled(signal)
        squares = tuple(squared_norm([wide[name] for name in members]) for members in blocks(names))
        bounded = dict(signal)
        for members, factor in zip(blocks(names), scales(names, squares), strict=True):
            for name in members:
                bounded[name] = jax.tree.map(
                    lambda leaf, factor=factor: jnp.where(factor > 0, leaf, 0) * factor, wide[name]
                )
        return bounded, jnp.sqrt(sum(squares))

    parts = {"blocks": blocks, "norms": norms, "scales": scales, "bound": bound}
    return parts | ({"extras": extras} if own else {})


def _followed(
    clip_norm: Any, batch_size: Any, noisy: PyTree, state: PyTree
) -> tuple[PyTree, PyTree]:
    """Takes the indicators out of the noisy sum, and their norms to the next step."""
    own = _own_entries(clip_norm)
    if not own:
        return noisy, state
    after = tuple(  # a loss has no norm in the state: it comes last
        follow(norm, noisy[own[name]], batch_size) if name in own else norm
        for name, norm in zip(_by_entry(clip_norm), state, strict=False)
    )
    return {name: leaf for name, leaf in noisy.items() if name not in own.values()}, after


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
    if not isinstance(clip_norm, Mapping | AdaptiveClip):
        return clip_norm
    norms = _by_entry(clip_norm).values()
    parts = [_norm_of(norm) for norm in norms]
    parts += [indicator_norm(norm) for norm in norms if isinstance(norm, AdaptiveClip)]
    squares = sum(part * part for part in parts)
    return math.sqrt(squares) if isinstance(squares, float | int) else jnp.sqrt(squares)


def is_bounded(clip_norm: Any) -> bool:
    """Returns whether every norm is finite; a traced one is taken to be."""
    norms = [_norm_of(norm) for norm in _by_entry(clip_norm).values()]
    return all(isinstance(norm, jax.core.Tracer) or math.isfinite(norm) for norm in norms)


def adapted_norms(clip_norm: Any) -> Any:
    """Returns the norms of every ``AdaptiveClip``: one, a dict by entry, or ``None``.

    The norm of the entries that are not named is under the key ``"..."``, which sorts.
    """
    if isinstance(clip_norm, Mapping):
        norms = {"..." if name is ... else name: norm for name, norm in clip_norm.items()}
        found = {n: norm.initial for n, norm in norms.items() if isinstance(norm, AdaptiveClip)}
        return found or None
    return clip_norm.initial if isinstance(clip_norm, AdaptiveClip) else None


def check_clip_norm(clip_norm: Any) -> ClipNorm:
    """Returns a valid clip norm, or raises naming the value and the range.

    Raises:
        TypeError: If it is neither a number, nor an ``AdaptiveClip``, nor a dict of such.
        ValueError: If a norm is not positive, or a dict is empty.
    """
    if not isinstance(clip_norm, Mapping):
        return _check_norm("clip_norm", clip_norm)
    if not clip_norm:
        raise ValueError("Expected clip_norm to name the entries of the signal, got an empty dict.")
    return {name: _check_norm(f"clip_norm[{name!r}]", norm) for name, norm in clip_norm.items()}


def _check_norm(name: str, norm: Any) -> float | AdaptiveClip:
    if isinstance(norm, AdaptiveClip):
        return check_adaptive(name, norm)
    if norm is AdaptiveClip:
        raise TypeError(
            f"Expected {name}=AdaptiveClip(initial=1.0), got the class. Add the parentheses."
        )
    remedy = "It bounds the norm of one record's unscaled gradient, in the units of log p."
    if norm == math.inf:
        return math.inf
    return check_real(name, norm, low=SMALLEST_NORM, high=LARGEST_NORM, remedy=remedy)


def _by_entry(clip_norm: Any) -> Mapping[Any, Any]:
    return clip_norm if isinstance(clip_norm, Mapping) else {...: clip_norm}


def _norm_of(norm: Any) -> Any:
    return norm.initial if isinstance(norm, AdaptiveClip) else norm


def _own_entries(clip_norm: Any) -> dict[Any, str]:
    """Entries of the sum that hold the indicators, by the key of the block they belong to."""
    return {
        name: f"below the clip norm of {'the rest' if name is ... else repr(name)} (released)"
        for name, norm in _by_entry(clip_norm).items()
        if isinstance(norm, AdaptiveClip)
    }


def _blocks(clip_norm: Any, names: tuple[str, ...]) -> list[tuple[Any, tuple[str, ...]]]:
    """The key of each block, and its entries."""
    if not isinstance(clip_norm, Mapping):
        return [(..., names)]
    blocks = [(name, (name,)) for name in names if name in clip_norm]
    rest = tuple(name for name in names if name not in clip_norm)
    return [*blocks, (..., rest)] if rest else blocks


def _all_finite(squares: tuple[Array, ...]) -> Array:
    return jnp.all(jnp.stack([jnp.isfinite(square) for square in squares]), axis=0)


def _shrink(dtype: Any) -> float:
    """Rounding must not push a norm above its bound: shrink by a few units in the last place."""
    return 1 - 8 * float(jnp.finfo(dtype).eps)


def _factor(clip_norm: Any, squared_norm: Array, finite: Array) -> Array:
    """min(1, C / norm), and 0 where the signal is not finite."""
    norm = jnp.sqrt(squared_norm)
    safe = jnp.where(finite & (norm > 0), norm, 1)
    limit = clip_norm * _shrink(norm.dtype)
    factor = jnp.where(norm > limit, limit / safe, 1)
    return jnp.where(finite & jnp.isfinite(norm), factor, 0).astype(norm.dtype)


def _event(noise_multiplier: Any, sensitivity: Any) -> DpEvent | None:
    """The event of one call; None when the parameters are traced and the host knows them."""
    if isinstance(noise_multiplier, jax.core.Tracer) or isinstance(sensitivity, jax.core.Tracer):
        return None
    if float(noise_multiplier) == 0 or math.isinf(sensitivity):
        return NonPrivateDpEvent()
    return GaussianDpEvent(float(noise_multiplier))
