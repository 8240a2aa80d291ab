r"""Many devices: rows of a batch are spread over a mesh, each device bounds and sums its own.

The sums that devices add up are integers (:mod:`numpyro_dp.exact_sum`), so that their number and
order change nothing; sums that are products of matrices (:mod:`numpyro_dp.product_sum`) are
gathered and added with their rounding errors carried along. Batches are drawn, noise is added and
the optimiser runs on every device alike, from the same keys: what a run returns is that of one
device, but for rounding inside a record's own gradient.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from numpyro_dp.core import PyTree
from numpyro_dp.stretches import Compensated, over_stretches

__all__ = ["agreed", "copied", "over_devices", "spread"]


def over_devices(
    of_rows: Callable[[PyTree, Array], tuple[PyTree, PyTree]],
    examples: PyTree,
    mask: Array,
    rows: int,
    mesh: Mesh | None,
) -> tuple[PyTree, PyTree]:
    """As :func:`numpyro_dp.stretches.over_stretches`, each device of a mesh for its own rows."""
    if mesh is None:
        return over_stretches(of_rows, examples, mask, rows)
    batch = mask.size
    missing = -batch % mesh.size
    if missing:  # rows that do not count
        examples, mask = jax.tree.map(
            lambda leaf: jnp.pad(leaf, ((0, missing), *((0, 0),) * (leaf.ndim - 1))),
            (examples, mask),
        )
    names = mesh.axis_names

    def own(examples: PyTree, mask: Array) -> tuple[PyTree, PyTree]:
        sums, of_each = over_stretches(of_rows, examples, mask, rows)
        added = functools.partial(_added, names=names, number=mesh.size)
        return jax.tree.map(added, sums, is_leaf=_is_compensated), of_each

    each, all_ = PartitionSpec(names), PartitionSpec()
    mapped = jax.shard_map(
        own, mesh=mesh, in_specs=(each, each), out_specs=(all_, each), check_vma=False
    )
    sums, of_each = mapped(examples, mask)
    return sums, jax.tree.map(lambda leaf: leaf[:batch], of_each)


def _added(found: Any, names: tuple[str, ...], number: int) -> Any:
    if not _is_compensated(found):
        return lax.psum(found, names)
    parts = jax.tree.map(lambda leaf: lax.all_gather(leaf, names), found)
    each = [jax.tree.map(lambda leaf, at=at: leaf[at], parts) for at in range(number)]
    return functools.reduce(Compensated.add, each)


def _is_compensated(leaf: Any) -> bool:
    return isinstance(leaf, Compensated)


def spread(mesh: Mesh | None, arrays: tuple[Array, ...]) -> tuple[Array, ...]:
    """Places records on the devices: spread where their number is divisible, else copied.

    Arrays that are on these devices already stay where they are.
    """
    if mesh is None:
        return arrays
    return tuple(_placed(array, mesh, array.shape[0] % mesh.size == 0) for array in arrays)


def copied(mesh: Mesh | None, tree: PyTree) -> PyTree:
    """Places what all devices have alike."""
    return tree if mesh is None else jax.tree.map(lambda leaf: _placed(leaf, mesh, False), tree)


def _placed(array: Array, mesh: Mesh, divided: bool) -> Array:
    spec = PartitionSpec(mesh.axis_names) if divided else PartitionSpec()
    if isinstance(array, jax.core.Tracer):
        return lax.with_sharding_constraint(array, NamedSharding(mesh, spec))
    known = array.sharding
    if isinstance(known, NamedSharding) and known.device_set == set(mesh.devices.flat):
        return jax.device_put(array, NamedSharding(mesh, known.spec))
    if not mesh.is_multi_process:
        return jax.device_put(array, NamedSharding(mesh, spec))
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        data = _placed(jax.random.key_data(array), mesh, divided)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(array))
    whole = np.asarray(array)  # every process has all of it
    return jax.make_array_from_callback(
        whole.shape, NamedSharding(mesh, spec), lambda index: whole[index]
    )


def agreed(mesh: Mesh | None, secret: Array) -> Array:
    """The secret key of the first process, where a mesh has devices of several."""
    if mesh is None or not mesh.is_multi_process:
        return secret
    data = multihost_utils.broadcast_one_to_all(jax.random.key_data(secret))
    return jax.random.wrap_key_data(jnp.asarray(data), impl=jax.random.key_impl(secret))
