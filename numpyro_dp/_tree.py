"""Small operations on pytrees of arrays that several layers need."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from numpyro_dp._compat import custom_vmap

__all__ = ["add", "column", "filled", "pinned", "select", "shapes_of", "squared_norm", "widen"]

_ROW = 1024


def widen(tree: Any) -> Any:
    """Returns the arrays in at least float32, so that squares and sums keep their digits."""
    return jax.tree.map(lambda x: x.astype(jnp.promote_types(x.dtype, jnp.float32)), tree)


def squared_norm(tree: Any) -> Array:
    """Returns the squared Euclidean norm of all entries, in at least float32.

    Long leaves are added up in rows of 1024: rounding is below that of 1024 + size / 1024 terms.
    """
    squares = [_squared_norm(leaf.reshape(-1)) for leaf in jax.tree.leaves(widen(tree))]
    return sum(squares, start=jnp.zeros(()))


def _squared_norm(flat: Array) -> Array:
    rest = flat.size % _ROW
    if flat.size < 2 * _ROW:
        # As a product, not as a sum of squares: XLA vectorises it on a CPU.
        return jnp.dot(flat, flat, precision=lax.Precision.HIGHEST)
    rows = jnp.pad(flat, (0, _ROW - rest if rest else 0)).reshape(-1, _ROW)
    return jnp.sum(jax.vmap(_squared_norm)(rows))


def column(numbers: Array, leaf: Array) -> Array:
    """Returns numbers of rows in a shape that multiplies the rows of a leaf."""
    return numbers.reshape((-1,) + (1,) * (leaf.ndim - 1))


def add(tree: Any, other: Any) -> Any:
    """Returns the sum of two trees, in the dtypes of the first."""
    return jax.tree.map(lambda x, y: x + y.astype(x.dtype), tree, other)


def select(tree: dict[str, Any], names: Any) -> dict[str, Any]:
    """Returns the entries of a dict with the given names."""
    return {name: tree[name] for name in names}


def filled(tree: dict[str, Any]) -> tuple[str, ...]:
    """Returns the names of the entries with arrays: those of ``random_flax_module`` have none."""
    return tuple(name for name, entry in tree.items() if jax.tree.leaves(entry))


def shapes_of(tree: Any) -> dict[str, tuple[int, ...]]:
    """Returns the shape of each leaf by its place."""
    paths = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): jnp.shape(leaf) for path, leaf in paths}


def pinned(live: Array, compute: Callable[..., Any], *operands: Any) -> Any:
    """Returns ``compute(*operands)``, each number of it found once, whatever reads it.

    Without this a compiler may compute a number anew for each reader, and round it in another way
    there: where huge terms cancel, what is added up need not be what was measured. An
    ``optimization_barrier`` does not prevent it on a CPU; the branch of a conditional does.

    Args:
        live: A scalar that is true, in a way that the compiler cannot know: made of an argument of
            the compiled function. Where it is false the result is 0; under ``vmap``, where it is
            false for any.
        compute: Function of arrays to a tree of arrays.
        operands: Its arguments.
    """
    like = jax.eval_shape(compute, *operands)

    def nothing(*_: Any) -> Any:
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), like)

    return lax.cond(_for_all(live), compute, nothing, *operands)


@custom_vmap
def _for_all(live: Array) -> Array:
    """Stays one number under ``vmap``, which would make a conditional of many a choice by entry."""
    return live


@_for_all.def_vmap
def _(size: int, batched: list[bool], live: Array) -> tuple[Array, bool]:
    return jnp.all(live), False
