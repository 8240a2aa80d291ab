"""First values at which an invented record has a finite signal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_dp.core import PyTree
from numpyro_dp.model.public import UnsupportedModelError

__all__ = ["finite_start", "has_finite_signal"]

_ATTEMPTS = 10  # initial values that finite_start tries


def finite_start(prepare: Callable[[int], Any], finite: Callable[[Any], bool]) -> Any:
    """Returns the first start at which an invented record has a finite signal.

    NumPyro's automatic guides also draw initial values until the gradient is finite, but with
    ``SVI`` they read the records. A record without a finite signal counts as 0. If all records
    count as 0, a run spends its whole budget and returns the prior and noise.

    Args:
        prepare: Number of an attempt -> start.
        finite: Start -> whether an invented record has a finite signal.

    Raises:
        UnsupportedModelError: If no attempt gives such a start.
    """
    for attempt in range(_ATTEMPTS):
        start = prepare(attempt)
        if finite(start):
            return start
    raise UnsupportedModelError(
        "The likelihood has no finite gradient for any invented record (normal values, ones, "
        f"halves, identities), at {_ATTEMPTS} initial values. Records without a finite gradient "
        "count as 0, and the run would return the prior. Look for sqrt or log at 0, a where() "
        "whose other branch is not finite, or initial values that overflow (init_params= or the "
        "guide's init_loc_fn=). If a discrete latent is summed out, every value of it must leave "
        "the density finite: for example Poisson(rate * k + 1e-6) instead of Poisson(rate * k)."
    )


def has_finite_signal(problem: Any, signal: Callable[..., PyTree], params: dict[str, Any]) -> bool:
    """Whether any invented record has a finite signal."""
    normal, ones = problem.records.layout.invented_records()
    # Most sites support 1. Halves serve sites on proportions, and identities those on matrices.
    halves = tuple(leaf // 2 if leaf.dtype.kind in "iub" else leaf / 2 for leaf in ones)
    squares = tuple(_identity_like(leaf) for leaf in ones)
    for rows in (normal, ones, halves, squares):
        extra = problem.blank_example()[len(rows) :]
        found = signal(params, tuple(leaf[0] for leaf in rows) + extra)
        if all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(found)):
            return True
    return False


def _identity_like(rows: Array) -> Array:
    """Returns identities if rows are square matrices, else the rows."""
    square = rows.ndim > 2 and rows.shape[-1] == rows.shape[-2]
    return (
        jnp.broadcast_to(jnp.eye(rows.shape[-1], dtype=rows.dtype), rows.shape) if square else rows
    )
