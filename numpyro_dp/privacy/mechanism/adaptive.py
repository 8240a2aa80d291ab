r"""A clip norm that follows a quantile of the norms of the signals, found privately.

In a step with clip norm C every record adds one more coordinate to the sum,

.. math::
    r_i = (2 b_i - 1)\, C_b, \qquad b_i = 1[\lVert s_i \rVert \le C], \qquad
    C_b = C \sqrt{\frac{\mathrm{share}}{1 - \mathrm{share}}},

which gets noise like the others. With the noisy sum :math:`\tilde r` and the public expected size
of a batch, qN, the norm of the next step is

.. math::
    C \exp\big(-\eta\, (\tilde b - \gamma)\big), \qquad
    \tilde b = \frac12 + \frac{\tilde r}{2 C_b\, q N}.

The divisor is public. A record outside the batch counts as half below the norm, so the random size
of a batch changes the estimate little.

Reference:
    G. Andrew, O. Thakkar, H. B. McMahan, S. Ramaswamy, "Differentially private learning with
    adaptive clipping", NeurIPS 2021.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from numpyro_dp._validate import check_real
from numpyro_dp.core import Mechanism, MechanismState, PyTree

if TYPE_CHECKING:
    from numpyro_dp.privacy.mechanism.clip_norm import ClipNorm

__all__ = [
    "LARGEST_NORM",
    "SMALLEST_NORM",
    "AdaptiveClip",
    "adaptive",
    "check_adaptive",
    "follow",
    "indicator_entry",
    "indicator_norm",
]

# Squares of norms beyond these bounds leave the range of float32.
SMALLEST_NORM, LARGEST_NORM = 1e-12, 1e12


class AdaptiveClip(NamedTuple):
    r"""A clip norm that follows a quantile of the norms of the records' signals.

    After each step the norm is multiplied by :math:`\exp(-\eta(\tilde b - \gamma))`. Here
    :math:`\tilde b` is a private estimate of the share of signals that are at most as long as the
    norm. The estimate takes ``share`` of the squared sensitivity. At equal epsilon the gradients
    get :math:`1/\sqrt{1 - share}` times as much noise as with a fixed norm. The estimate has a
    standard deviation of ``noise_multiplier / (2 sqrt(share) q N)``.

    A record without a finite signal counts as half below the norm.

    Attributes:
        initial: Clip norm of the first step, > 0.
        quantile: Part gamma of the signals that should not be clipped, in (0, 1).
        learning_rate: Step size eta of the logarithm of the norm, > 0.
        share: Part of the privacy cost that the estimate takes, in [1e-6, 0.99].

    Example:
        >>> from numpyro_dp.mechanisms import AdaptiveClip
        >>> AdaptiveClip(initial=5.0, quantile=0.9)
        AdaptiveClip(initial=5.0, quantile=0.9, learning_rate=0.2, share=0.01)

    Guarantee:
        A step has the same event as a step with a fixed clip norm and the same noise multiplier.
        Given earlier releases, it is a Gaussian mechanism on a sum of sensitivity
        :math:`\sqrt{C^2 + C_b^2}`. The noise in every coordinate is this sensitivity times the
        multiplier. Later norms are functions of earlier releases (adaptive composition). The norms
        themselves are released: you may publish ``result.trace.clip_norm``.

    Reference:
        Andrew, Thakkar, McMahan, Ramaswamy (2021), Differentially private learning with adaptive
        clipping, NeurIPS.
    """

    initial: float = 1.0
    quantile: float = 0.5
    learning_rate: float = 0.2
    share: float = 0.01


def check_adaptive(name: str, clip: AdaptiveClip) -> AdaptiveClip:
    """Returns the clip norm if its fields are valid.

    Args:
        name: Name of the argument.
        clip: The clip norm.

    Raises:
        TypeError: If a field is not a number.
        ValueError: If a field is outside its range.
    """
    start = "It is the norm of the first step. For norms by entry pass a dict of AdaptiveClip(...)."
    either = {"low_open": True, "high_open": True}
    return AdaptiveClip(
        check_real(f"{name}.initial", clip.initial, low=SMALLEST_NORM, high=LARGEST_NORM,
                   remedy=start),
        check_real(f"{name}.quantile", clip.quantile, low=0, high=1, **either,
                   remedy="It is the part of the records that should not be clipped."),
        check_real(f"{name}.learning_rate", clip.learning_rate, low=0, high=1e6, low_open=True,
                   remedy="It is the step size of the logarithm of the norm. 0.2 is usual."),
        check_real(f"{name}.share", clip.share, low=1e-6, high=0.99,
                   remedy="It is the part of the privacy cost that is spent on the norm."),
    )  # fmt: skip


def indicator_norm(clip: AdaptiveClip) -> Any:
    """Returns the absolute value of a record's indicator in the sum."""
    return clip.initial * (clip.share / (1 - clip.share)) ** 0.5


def indicator_entry(group: Any) -> str:
    """Returns the name of the entry of the sum that holds the indicators of a group."""
    return f"below the clip norm of {'the rest' if group is ... else repr(group)} (released)"


def adaptive(base: Mechanism, clip_norm: ClipNorm, batch_size: Any) -> Mechanism:
    """Returns a mechanism that also releases indicators, and updates the clip norms from them.

    Args:
        base: A mechanism for ``clip_norm.fixed()``, which includes the norms of the indicators.
        clip_norm: The norms of this step.
        batch_size: Public expected size of a batch, q N.

    Guarantee:
        Each indicator is bounded, and a function of one record and public values. The next norms
        are functions of released values.
    """

    def extras(
        names: tuple[str, ...], squares: tuple[Array, ...], margin: float = 1.0
    ) -> dict[str, tuple[Array, Any]]:
        finite = jnp.all(jnp.stack([jnp.isfinite(square) for square in squares]), axis=0)
        found = {}
        for group, square in zip(clip_norm.groups(names), squares, strict=True):
            if group in clip_norm.adaptive:
                clip = clip_norm.by_entry[group]
                # A few units in the last place shorter, so that rounding cannot make it too long.
                room = margin * (1 - 8 * float(jnp.finfo(square.dtype).eps))
                size = jnp.asarray(indicator_norm(clip) * room, square.dtype)
                signs = jnp.where(jnp.sqrt(square) <= clip.initial, size, -size)
                numbers = jnp.where(finite, signs, 0)  # no finite signal counts as half
                found[indicator_entry(group)] = numbers, indicator_norm(clip)
        return found

    def privatise(
        key: Array, total: PyTree, state: MechanismState
    ) -> tuple[PyTree, MechanismState]:
        noisy, state = base.privatise(key, total, state)
        own = {group: indicator_entry(group) for group in clip_norm.adaptive}

        def after(group: Any, norm: Any) -> Any:
            return follow(norm, noisy[own[group]], batch_size) if group in own else norm

        rest = {name: leaf for name, leaf in noisy.items() if name not in own.values()}
        return rest, state._replace(clip_norm=state.clip_norm.map(after))

    return base._replace(extras=extras, privatise=privatise)


def follow(clip: AdaptiveClip, released: Array, batch_size: Any) -> AdaptiveClip:
    """The clip norm of the next step, from the noisy sum of the indicators."""
    below = 0.5 + released / (2 * indicator_norm(clip) * batch_size)
    norm = clip.initial * jnp.exp(-clip.learning_rate * (below - clip.quantile))
    norm = jnp.clip(norm, SMALLEST_NORM, LARGEST_NORM)
    return clip._replace(initial=norm.astype(jnp.result_type(clip.initial)))
