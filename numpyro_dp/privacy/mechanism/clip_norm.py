r"""The clip norm of a mechanism: one norm for each group of entries of a signal.

A norm may be fixed, or follow a quantile of the norms of the signals, found privately.
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
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Mapping
from types import EllipsisType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from numpyro_dp._validate import check_real
from numpyro_dp.core import Blocks, Mechanism, MechanismState, Number, PyTree

# Squares of norms beyond these bounds leave the range of float32.
_SMALLEST, _LARGEST = 1e-12, 1e12


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
    quantile: float = 0.9
    learning_rate: float = 0.2
    share: float = 0.01


def indicator_norm(clip: AdaptiveClip) -> Number:
    """Returns the absolute value of a record's indicator in the sum."""
    return clip.initial * (clip.share / (1 - clip.share)) ** 0.5


def indicator_entry(group: Hashable) -> str:
    """Returns the name of the entry of the sum that holds the indicators of a group."""
    return f"below the clip norm of {'the rest' if group is ... else repr(group)} (released)"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ClipNorm:
    """The norm of each group of entries that a mechanism clips together.

    Users pass a number, an :class:`AdaptiveClip`, or a dict of either by entry of the signal.
    :meth:`of` checks it. The norms are the leaves of a pytree, so they can be traced.

    Attributes:
        entries: Names of the groups. ``...`` stands for all entries that are not named.
        norms: Their norms: numbers, arrays, or an ``AdaptiveClip`` each.
        bounded: Whether all norms are finite.
    """

    entries: tuple[Hashable, ...] = dataclasses.field(metadata={"static": True})
    norms: tuple[PyTree, ...]
    bounded: bool = dataclasses.field(default=True, metadata={"static": True})

    @classmethod
    def of(cls, given: object) -> ClipNorm:
        """Checks the ``clip_norm`` that a user passed.

        Raises:
            TypeError: If it is not a number, an ``AdaptiveClip`` or a dict of these.
            ValueError: If a norm is not positive, or a dict is empty.
        """
        if isinstance(given, cls):
            return given
        by_entry = given if isinstance(given, Mapping) else {...: given}
        if not by_entry:
            raise ValueError(
                "clip_norm is an empty dict. Give a norm for each entry of the signal, or for the "
                "key ... that stands for all others."
            )
        # Sorted, so that two dicts with the same norms give the same value.
        entries = tuple(sorted(by_entry, key=lambda entry: (entry is ..., str(entry))))
        name = "clip_norm" if by_entry is not given else "clip_norm[{!r}]"
        norms = tuple(_check_norm(name.format(entry), by_entry[entry]) for entry in entries)
        finite = all(isinstance(norm, AdaptiveClip) or math.isfinite(norm) for norm in norms)
        return cls(entries, norms, finite)

    @property
    def given(self) -> PyTree:
        """What a user would pass: one norm, or a dict of norms."""
        return self.norms[0] if self.entries == (...,) else self.by_entry

    @property
    def by_entry(self) -> dict[Hashable, PyTree]:
        """The norm of each group."""
        return dict(zip(self.entries, self.norms, strict=True))

    @property
    def sensitivity(self) -> Number:
        """The sensitivity of the sum when one record is added or removed."""
        norms = self.fixed().norms
        if len(norms) == 1:
            return norms[0]
        squares = sum(norm * norm for norm in norms)
        return math.sqrt(squares) if isinstance(squares, float) else jnp.sqrt(squares)

    @property
    def adaptive(self) -> tuple[Hashable, ...]:
        """The groups whose norm is an ``AdaptiveClip``."""
        return tuple(e for e, norm in self.by_entry.items() if isinstance(norm, AdaptiveClip))

    @property
    def adapted(self) -> PyTree:
        """The current norm of every ``AdaptiveClip``: one, a dict by entry, or ``None``."""
        if not self.adaptive:
            return None
        if self.entries == (...,):
            return self.norms[0].initial
        # "..." as text, because JAX sorts the keys of a dict.
        return {"..." if e is ... else e: self.by_entry[e].initial for e in self.adaptive}

    def fixed(self) -> ClipNorm:
        """Returns plain norms. An ``AdaptiveClip`` gives two: of the signal and its indicator."""
        found: dict[Hashable, PyTree] = {}
        for entry, norm in self.by_entry.items():
            if isinstance(norm, AdaptiveClip):
                found |= {entry: norm.initial, indicator_entry(entry): indicator_norm(norm)}
            else:
                found[entry] = norm
        return ClipNorm(tuple(found), tuple(found.values()), self.bounded)

    def joined(self, others: Mapping[str, Number]) -> ClipNorm:
        """Returns a copy with the norms of further entries added."""
        return ClipNorm((*self.entries, *others), (*self.norms, *others.values()), self.bounded)

    def as_arrays(self) -> ClipNorm:
        """Returns a copy with arrays instead of numbers."""
        return jax.tree.map(lambda number: jnp.asarray(number, float), self)

    def groups(self, names: tuple[str, ...]) -> Mapping[str | EllipsisType, tuple[str, ...]]:
        """Returns the entries of a signal that are clipped together, by group."""
        own = {name: (name,) for name in names if name in self.entries}
        rest = tuple(name for name in names if name not in self.entries)
        return own | ({...: rest} if rest else {})

    def blocks(self, names: tuple[str, ...]) -> Blocks:
        """Returns these entries without the names of the groups."""
        return tuple(self.groups(names).values())

    def of_blocks(self, names: tuple[str, ...]) -> tuple[PyTree, ...]:
        """Returns the norm of each block."""
        return tuple(self.by_entry[group] for group in self.groups(names))

    def check_entries(self, names: tuple[str, ...]) -> None:
        """Raises ValueError unless every entry of the signal has exactly one norm."""
        named = {entry for entry in self.entries if entry is not ...}
        rest = set(names) - named
        if self.entries != (...,) and (named - set(names) or bool(rest) != (... in self.entries)):
            raise ValueError(
                f"clip_norm must have one norm for each of {sorted(names)}, got the keys "
                f"{sorted(map(str, self.entries))}. Use the key ... for all that are not named."
            )

    def __str__(self) -> str:
        return str(self.given)


def _check_norm(name: str, norm: object) -> float | AdaptiveClip:
    if norm is AdaptiveClip:
        raise TypeError(
            f"{name} is the class AdaptiveClip. Add the parentheses: AdaptiveClip(initial=1.0)."
        )
    if not isinstance(norm, AdaptiveClip):
        remedy = "It bounds the norm of one record's unscaled gradient, in the units of log p."
        if norm == math.inf:
            return math.inf
        return check_real(name, norm, low=_SMALLEST, high=_LARGEST, remedy=remedy)
    start = "It is the norm of the first step. For norms by entry pass a dict of AdaptiveClip(...)."
    return AdaptiveClip(
        check_real(f"{name}.initial", norm.initial, low=_SMALLEST, high=_LARGEST, remedy=start),
        check_real(f"{name}.quantile", norm.quantile, low=0, high=1, low_open=True, high_open=True,
                   remedy="It is the part of the records that should not be clipped."),
        check_real(f"{name}.learning_rate", norm.learning_rate, low=0, high=1e6, low_open=True,
                   remedy="It is the step size of the logarithm of the norm. 0.2 is usual."),
        check_real(f"{name}.share", norm.share, low=1e-6, high=0.99,
                   remedy="It is the part of the privacy cost that is spent on the norm."),
    )  # fmt: skip


def adaptive(base: Mechanism, clip_norm: ClipNorm, batch_size: Any) -> Mechanism:
    """Returns a mechanism that also releases indicators, and updates the clip norms from them.

    ``base`` is a mechanism for ``clip_norm.fixed()``, which includes the norms of the indicators.
    ``batch_size`` is the public expected size of a batch, q N.

    Guarantee:
        Each indicator is bounded, and a function of one record and public values. The next norms
        are functions of released values.
    """

    def extras(
        names: tuple[str, ...], squares: tuple[Array, ...], margin: float = 1.0
    ) -> dict[str, tuple[Array, Number]]:
        finite = jnp.all(jnp.stack([jnp.isfinite(square) for square in squares]), axis=0)
        found = {}
        for group, square in zip(clip_norm.groups(names), squares, strict=True):
            if group in clip_norm.adaptive:
                clip = clip_norm.by_entry[group]
                room = shorter(margin, square.dtype)
                size = jnp.asarray(indicator_norm(clip) * room, square.dtype)
                signs = jnp.where(jnp.sqrt(square) <= clip.initial, size, -size)
                numbers = jnp.where(finite, signs, 0)  # no finite signal counts as half
                found[indicator_entry(group)] = numbers, indicator_norm(clip)
        return found

    def privatise(
        key: Array, total: PyTree, state: MechanismState
    ) -> tuple[PyTree, MechanismState]:
        released, state = base.privatise(key, total, state)
        noisy = dict(released)
        after = state.clip_norm.by_entry
        for group in clip_norm.adaptive:
            after[group] = follow(after[group], noisy.pop(indicator_entry(group)), batch_size)
        norms = dataclasses.replace(state.clip_norm, norms=tuple(after.values()))
        return noisy, state._replace(clip_norm=norms)

    return base._replace(extras=extras, privatise=privatise)


def shorter(norm: Number, dtype: DTypeLike) -> Number:
    """A few units in the last place shorter, so that rounding cannot make a signal too long."""
    return norm * (1 - 8 * float(jnp.finfo(dtype).eps))


def follow(clip: AdaptiveClip, released: Array, batch_size: Number) -> AdaptiveClip:
    """The clip norm of the next step, from the noisy sum of the indicators."""
    below = 0.5 + released / (2 * indicator_norm(clip) * batch_size)
    norm = clip.initial * jnp.exp(-clip.learning_rate * (below - clip.quantile))
    norm = jnp.clip(norm, _SMALLEST, _LARGEST)
    return clip._replace(initial=norm.astype(jnp.result_type(clip.initial)))
