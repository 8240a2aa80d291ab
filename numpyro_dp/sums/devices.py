r"""Many devices: each device of a mesh clips and sums its own rows of a batch.

The devices add integers (:mod:`numpyro_dp.sums.exact`), so their number and order change nothing.
Sums that are products of matrices (:mod:`numpyro_dp.sums.products`) become integers first. Every
device draws the same batches, adds the same noise once and runs the same optimiser, from the same
keys. A run returns the same values as on one device, up to rounding inside a record's own gradient.
For dense layers the sum has a rounding error too, within its bound. The rows of a batch move to the
devices that sum them, also between processes.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from numpyro_dp._compat import is_tracer
from numpyro_dp._tree import is_key
from numpyro_dp.core import PyTree
from numpyro_dp.sums.microbatches import WHOLE, Shards

_SENT = 2**27  # bytes sent between processes at once


def on_devices(
    step: Callable[..., PyTree], mesh: Mesh | None
) -> Callable[[PyTree, PyTree, Array], PyTree]:
    """Runs a step on all devices. Each has its part of the batch, and all of the rest.

    A step takes ``(rest, batch, mask, shards=...)``. It must add values that depend on the batch by
    its ``shards``, so that the result is the same on all devices.
    """
    if mesh is None:
        return functools.partial(step, shards=WHOLE)
    shards = Shards(mesh.size, mesh.axis_names)
    each, all_ = PartitionSpec(mesh.axis_names), PartitionSpec()
    mapped = jax.shard_map(
        functools.partial(step, shards=shards),
        mesh=mesh, in_specs=(all_, each, each), out_specs=all_, check_vma=False,
    )  # fmt: skip

    def run(rest: PyTree, batch: PyTree, mask: Array) -> PyTree:
        missing = -mask.size % mesh.size
        if missing:  # rows that do not count
            batch, mask = jax.tree.map(
                lambda leaf: jnp.pad(leaf, ((0, missing), *((0, 0),) * (leaf.ndim - 1))),
                (batch, mask),
            )
        return mapped(rest, batch, mask)

    return run


def spread(mesh: Mesh | None, arrays: tuple[Array | np.ndarray, ...]) -> tuple[Array, ...]:
    """Places records on the devices: spread if their number is divisible, else copied.

    NumPy arrays go straight to the devices that hold their rows. Arrays that are already on the
    devices stay there.
    """
    if mesh is None:
        return tuple(map(jnp.asarray, arrays))
    _check_context(mesh)
    return tuple(_placed(array, mesh, array.shape[0] % mesh.size == 0) for array in arrays)


def copied(mesh: Mesh | None, tree: PyTree) -> PyTree:
    """Copies a tree to all devices."""
    if mesh is None:
        return tree
    _check_context(mesh)
    return jax.tree.map(lambda x: _placed(x, mesh, False) if isinstance(x, jax.Array) else x, tree)


def _check_context(mesh: Mesh) -> None:
    """Raises an error inside a mesh of explicit axes, because its types forbid another mesh."""
    around = jax.sharding.get_abstract_mesh()
    if AxisType.Explicit in around.axis_types:
        raise ValueError(
            f"A run with mesh={dict(mesh.shape)} is inside jax.set_mesh with explicit axes, "
            f"{dict(around.shape)}, whose types forbid another mesh. Leave that block, or set a "
            "mesh of AxisType.Auto."
        )


def from_first(mesh: Mesh | None, make: Callable[[], bytes]) -> bytes:
    """Returns bytes that the first process makes, in all processes of a mesh.

    Raises:
        Exception: What ``make`` raised. Other processes raise a ValueError with its message.
    """
    if mesh is None or not mesh.is_multi_process:
        return make()
    error, message, first = None, b"", jax.process_index() == 0
    if first:
        try:
            message = b"+" + make()
        except Exception as raised:  # the others wait for an answer
            error, message = raised, b"-" + str(raised).encode(errors="replace")
    # The length first, because all processes must offer arrays of one shape.
    size = np.array(divmod(len(message), _SENT), np.int32)
    whole, rest = multihost_utils.broadcast_one_to_all(size).tolist()
    parts = []
    for number, length in enumerate([_SENT] * whole + [rest]):
        part = np.zeros(length, np.uint8)
        if first:
            part[:] = np.frombuffer(message, np.uint8, length, number * _SENT)
        parts.append(np.asarray(multihost_utils.broadcast_one_to_all(part), np.uint8).tobytes())
    found = b"".join(parts)
    if error is not None:
        raise error
    if found[:1] == b"-":
        raise ValueError(f"In the first process: {found[1:].decode()}")
    return found[1:]


def any_process(mesh: Mesh | None, flag: bool) -> bool:
    """Whether a flag is true in any process of a mesh."""
    if mesh is None or not mesh.is_multi_process:
        return flag
    return bool(np.any(multihost_utils.process_allgather(np.int32(flag))))


def hash_together(mesh: Mesh | None, digest: bytes) -> bytes:
    """Returns a hash of the digests of all processes of a mesh, in their order."""
    if mesh is None or not mesh.is_multi_process:
        return digest
    own = np.frombuffer(digest, np.uint8).astype(np.int32)
    all_ = np.asarray(multihost_utils.process_allgather(own)).astype(np.uint8)
    return hashlib.sha256(all_.tobytes()).digest()


def _placed(array: Array | np.ndarray, mesh: Mesh, divided: bool) -> Array:
    spec = PartitionSpec(mesh.axis_names) if divided else PartitionSpec()
    if is_tracer(array):
        return lax.with_sharding_constraint(array, NamedSharding(mesh, spec))
    known = getattr(array, "sharding", None)
    if isinstance(known, NamedSharding) and known.device_set == set(mesh.devices.flat):
        if known.mesh.axis_names == mesh.axis_names and known.mesh.shape == mesh.shape:
            spec = known.spec
        return jax.device_put(array, NamedSharding(mesh, spec))
    if not mesh.is_multi_process:
        return jax.device_put(array, NamedSharding(mesh, spec))
    if is_key(array):
        data = _placed(jax.random.key_data(array), mesh, divided)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(array))
    # Every process holds the whole array.
    whole = np.asarray(array, jax.dtypes.canonicalize_dtype(array.dtype))
    _check_same(whole)
    return jax.make_array_from_callback(
        whole.shape, NamedSharding(mesh, spec), lambda index: whole[index]
    )


def _check_same(array: np.ndarray) -> None:
    """Raises an error unless all processes have the same array."""
    text = f"{array.shape} {array.dtype}".encode() + np.ascontiguousarray(array).tobytes()
    digest = np.frombuffer(hashlib.sha256(text).digest(), np.int32)
    all_ = np.asarray(multihost_utils.process_allgather(digest))
    if (all_ != all_[0]).any():
        raise ValueError(
            f"An array of shape {array.shape} must be the same in all processes, but it differs. "
            "Give all processes the same rng_key and parameters. If each process holds its own "
            "rows, join them with jax.make_array_from_process_local_data."
        )
