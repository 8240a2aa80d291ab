"""The clip norm of a mechanism: one norm for each group of entries of a signal."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from numpyro_dp._validate import check_real
from numpyro_dp.core import Blocks
from numpyro_dp.privacy.mechanism.adaptive import (
    LARGEST_NORM,
    SMALLEST_NORM,
    AdaptiveClip,
    check_adaptive,
    indicator_entry,
    indicator_norm,
)

__all__ = ["ClipNorm"]


@jax.tree_util.register_pytree_node_class
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

    entries: tuple[Any, ...]
    norms: tuple[Any, ...]
    bounded: bool = True

    @classmethod
    def of(cls, given: Any) -> ClipNorm:
        """Checks the ``clip_norm`` that a user passed.

        Raises:
            TypeError: If it is not a number, an ``AdaptiveClip`` or a dict of these.
            ValueError: If a norm is not positive, or a dict is empty.
        """
        if isinstance(given, cls):
            return given
        if not isinstance(given, Mapping):
            return cls((...,), (_check_norm("clip_norm", given),))._with_bounded()
        if not given:
            raise ValueError(
                "clip_norm is an empty dict. Give a norm for each entry of the signal, or for the "
                "key ... that stands for all others."
            )
        # Sorted, so that two dicts with the same norms give the same value.
        entries = tuple(sorted(given, key=lambda entry: (entry is ..., str(entry))))
        norms = tuple(_check_norm(f"clip_norm[{entry!r}]", given[entry]) for entry in entries)
        return cls(entries, norms)._with_bounded()

    @property
    def given(self) -> Any:
        """What a user would pass: one norm, or a dict of norms."""
        return self.norms[0] if self.entries == (...,) else self.by_entry

    @property
    def by_entry(self) -> dict[Any, Any]:
        """The norm of each group."""
        return dict(zip(self.entries, self.norms, strict=True))

    @property
    def sensitivity(self) -> Any:
        """The sensitivity of the sum when one record is added or removed."""
        norms = self.fixed().norms
        if len(norms) == 1:
            return norms[0]
        squares = sum(norm * norm for norm in norms)
        return math.sqrt(squares) if isinstance(squares, float) else jnp.sqrt(squares)

    @property
    def adaptive(self) -> tuple[Any, ...]:
        """The groups whose norm is an ``AdaptiveClip``."""
        return tuple(e for e, norm in self.by_entry.items() if isinstance(norm, AdaptiveClip))

    @property
    def adapted(self) -> Any:
        """The current norm of every ``AdaptiveClip``: one, a dict by entry, or ``None``."""
        if not self.adaptive:
            return None
        if self.entries == (...,):
            return self.norms[0].initial
        # "..." as text, because JAX sorts the keys of a dict.
        by_entry = self.by_entry
        return {"..." if e is ... else e: by_entry[e].initial for e in self.adaptive}

    def fixed(self) -> ClipNorm:
        """Returns plain norms. An ``AdaptiveClip`` gives two: of the signal and its indicator."""
        found: dict[Any, Any] = {}
        for entry, norm in self.by_entry.items():
            if isinstance(norm, AdaptiveClip):
                found |= {entry: norm.initial, indicator_entry(entry): indicator_norm(norm)}
            else:
                found[entry] = norm
        return ClipNorm(tuple(found), tuple(found.values()), self.bounded)

    def map(self, change: Callable[[Any, Any], Any]) -> ClipNorm:
        """Returns a copy with each norm replaced by ``change(entry, norm)``."""
        return dataclasses.replace(
            self, norms=tuple(change(entry, norm) for entry, norm in self.by_entry.items())
        )

    def joined(self, others: Mapping[Any, Any]) -> ClipNorm:
        """Returns a copy with the norms of further entries added."""
        return ClipNorm((*self.entries, *others), (*self.norms, *others.values()), self.bounded)

    def as_arrays(self) -> ClipNorm:
        """Returns a copy with arrays instead of numbers."""
        return jax.tree.map(lambda number: jnp.asarray(number, float), self)

    def groups(self, names: tuple[str, ...]) -> dict[Any, tuple[str, ...]]:
        """Returns the entries of a signal that are clipped together, by group."""
        own = {name: (name,) for name in names if name in self.entries}
        rest = tuple(name for name in names if name not in self.entries)
        return own | ({...: rest} if rest else {})

    def blocks(self, names: tuple[str, ...]) -> Blocks:
        """Returns these entries without the names of the groups."""
        return tuple(self.groups(names).values())

    def of_blocks(self, names: tuple[str, ...]) -> tuple[Any, ...]:
        """Returns the norm of each block."""
        by_entry = self.by_entry
        return tuple(by_entry[group] for group in self.groups(names))

    def check_entries(self, names: tuple[str, ...]) -> None:
        """Raises ValueError unless every entry of the signal has exactly one norm."""
        named = {entry for entry in self.entries if entry is not ...}
        rest = set(names) - named
        if self.entries != (...,) and (named - set(names) or bool(rest) != (... in self.entries)):
            raise ValueError(
                f"clip_norm must have one norm for each of {sorted(names)}, got the keys "
                f"{sorted(map(str, self.entries))}. Use the key ... for all that are not named."
            )

    def _with_bounded(self) -> ClipNorm:
        finite = all(isinstance(n, AdaptiveClip) or math.isfinite(n) for n in self.norms)
        return dataclasses.replace(self, bounded=finite)

    def tree_flatten(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Returns the norms, and the static fields."""
        return self.norms, (self.entries, self.bounded)

    @classmethod
    def tree_unflatten(cls, static: tuple[Any, ...], norms: tuple[Any, ...]) -> ClipNorm:
        """Builds the value from its norms and static fields."""
        return cls(static[0], tuple(norms), static[1])

    def __str__(self) -> str:
        """What a user would pass."""
        return str(self.given)


def _check_norm(name: str, norm: Any) -> float | AdaptiveClip:
    if isinstance(norm, AdaptiveClip):
        return check_adaptive(name, norm)
    if norm is AdaptiveClip:
        raise TypeError(
            f"{name} is the class AdaptiveClip. Add the parentheses: AdaptiveClip(initial=1.0)."
        )
    remedy = "It bounds the norm of one record's unscaled gradient, in the units of log p."
    if norm == math.inf:
        return math.inf
    return check_real(name, norm, low=SMALLEST_NORM, high=LARGEST_NORM, remedy=remedy)
