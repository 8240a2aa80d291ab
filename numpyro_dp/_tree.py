"""Small operations on pytrees of arrays that several layers need."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

__all__ = ["add", "select", "squared_norm", "widen"]


def widen(tree: Any) -> Any:
    """Returns the arrays in at least float32, so that squares and sums keep their digits."""
    return jax.tree.map(lambda x: x.astype(jnp.promote_types(x.dtype, jnp.float32)), tree)


def squared_norm(tree: Any) -> Array:
    """Returns the squared Euclidean norm of all entries, in at least float32."""
    squares = [jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(widen(tree))]
    return sum(squares, start=jnp.zeros(()))


def add(tree: Any, other: Any) -> Any:
    """Returns the sum of two trees, in the dtypes of the first."""
    return jax.tree.map(lambda x, y: x + y.astype(x.dtype), tree, other)


def select(tree: dict[str, Any], names: Any) -> dict[str, Any]:
    """Returns the entries of a dict with the given names."""
    return {name: tree[name] for name in names}
