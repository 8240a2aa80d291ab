"""Small operations on pytrees of arrays."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import DTypeLike

_ROW = 1024
Tree = TypeVar("Tree")


def on_device(values: object, dtype: DTypeLike | None = None) -> Array:
    """A new array on the device. ``jnp.asarray`` would compile a program for each shape."""
    return jax.device_put(np.asarray(values, dtype))


def is_key(leaf: object) -> bool:
    """Whether a leaf is an array of random keys."""
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def widen(tree: Tree) -> Tree:
    """Casts the arrays to at least float32. Squares and sums then keep their digits."""
    return jax.tree.map(lambda x: x.astype(jnp.promote_types(x.dtype, jnp.float32)), tree)


def squared_norm(tree: object) -> Array:
    """Returns the squared Euclidean norm of all entries, in at least float32.

    Long leaves are summed in rows of 1024. This rounds like 1024 + size / 1024 terms, or less.
    """
    squares = [_squared_norm(leaf.reshape(-1)) for leaf in jax.tree.leaves(widen(tree))]
    return sum(squares, start=jnp.zeros(()))


def _squared_norm(flat: Array) -> Array:
    rest = flat.size % _ROW
    if flat.size < 2 * _ROW:
        # A dot product, because XLA vectorises it on a CPU and not the sum of squares.
        return jnp.dot(flat, flat, precision=lax.Precision.HIGHEST)
    rows = jnp.pad(flat, (0, _ROW - rest if rest else 0)).reshape(-1, _ROW)
    return jnp.sum(jax.vmap(_squared_norm)(rows))


def column(numbers: Array, leaf: Array) -> Array:
    """Reshapes one value for each row to multiply the rows of a leaf."""
    return numbers.reshape((-1,) + (1,) * (leaf.ndim - 1))


def add(tree: Tree, other: object) -> Tree:
    """Returns the sum of two trees, in the dtypes of the first."""
    return jax.tree.map(lambda x, y: x + y.astype(x.dtype), tree, other)


def select(tree: dict[str, Tree], names: Iterable[str]) -> dict[str, Tree]:
    """Returns the entries of a dict with the given names."""
    return {name: tree[name] for name in names}


def filled(tree: Mapping[str, object]) -> tuple[str, ...]:
    """Returns the names of the entries with arrays. ``random_flax_module`` leaves empty ones."""
    return tuple(name for name, entry in tree.items() if jax.tree.leaves(entry))


def shapes_of(tree: object) -> dict[str, tuple[int, ...]]:
    """Returns the shape of each leaf by its path in the tree."""
    paths = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): jnp.shape(leaf) for path, leaf in paths}
