"""Checkpoints: the file from which the same call continues a run that was stopped or killed.

A folder has one file, ``SENSITIVE_checkpoint``: the SHA-256 of what follows, a line of JSON, and
the bytes of all arrays of the progress, with the keys of later noise. The JSON has what must be the
same in a call that continues (``meaning``), with a hash of the compiled program. It also has a
keyed hash of all records together (``salt``, ``records``), and names and date of the privacy
reports (``runs``, ``date``).
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import hmac
import json
import math
import os
import pathlib
import pickle
import re
import secrets
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh

from numpyro_dp._tree import is_key
from numpyro_dp._validate import check_int
from numpyro_dp.core import Args, PyTree, Values
from numpyro_dp.model.held import held_by_program
from numpyro_dp.privacy.plan import PrivacyReport
from numpyro_dp.privacy.statement import version_of
from numpyro_dp.run.settings import RunSettings
from numpyro_dp.run.state import SensitiveState, charge, registered, used
from numpyro_dp.sums.devices import any_process, copied, from_first, hash_together

try:
    import fcntl
except ImportError:  # Windows has another lock
    fcntl = None

_FILE = "SENSITIVE_checkpoint"
_FORMAT = b"numpyro_dp checkpoint, version 2\n"  # its hash is that of this line and the content
_PART = 2**24  # bytes of an array that are hashed at once


class Checkpoint:
    r"""Keeps the progress of a run in a folder. A context manager, which locks the folder.

    Args:
        folder: The folder. It is made if there is none.
        every: About how many steps lie between two checkpoints. By default a 25th of the run.
        meaning: What must be the same in a call that continues, as JSON values.
        records: All arrays of records.
        mesh: Devices of the run. If they belong to several processes, the first one reads and
            writes the file for all.

    Raises:
        ValueError: If the folder holds another run, the progress of other records, or a damaged
            file. The message names the difference.

    Guarantee:
        The call that continues has the keys of the call that was killed. So it repeats its noise on
        the same steps, with the same records, program and settings. The two are one run, which
        releases one result: a killed run has returned nothing. Other records and settings are
        refused, so noise never meets other values. The file has keys of later noise and batches.
        Whoever reads it can remove that noise, so it can be read by its owner alone. A finished
        run leaves its progress, and the same call then returns the same result.
    """

    every: int | None

    def __init__(
        self,
        folder: str | os.PathLike[str],
        every: int | None,
        meaning: dict[str, object],
        records: Args,
        mesh: Mesh | None = None,
    ) -> None:
        self.every, self._meaning = every, json.loads(json.dumps(meaning))
        self._records, self._folder, self._mesh = records, folder, mesh
        self._about: dict[str, Any] = {}
        self._found: bytes | None = None

    def __enter__(self) -> Checkpoint:
        """Locks the folder and reads what it holds."""
        with contextlib.ExitStack() as stack:

            def opened() -> bytes:
                content = _content(stack.enter_context(locked(self._folder)))
                if content:
                    self._check_meaning(_split(content)[0]["meaning"])
                return content

            # Only the first process locks, reads and compares. The others get its result or error.
            content = from_first(self._mesh, opened)
            if content:
                self._about, self._found = _split(content)
                # In every process, because each may hold other rows of the records.
                own = hash_of(self._records, self._about["salt"], self._mesh)
                if not hmac.compare_digest(self._about["records"], own):
                    raise ValueError(
                        f"checkpoint={str(self._folder)!r} holds a run on other records. The noise "
                        "of its next steps must not meet other values. Use another folder."
                    )
            # Keeps the lock until __exit__. After an error above, the stack unlocks at once.
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        """Unlocks the folder."""
        self._stack.close()

    @property
    def resumed(self) -> bool:
        """Whether the folder had the progress of an earlier call."""
        return self._found is not None

    def resume(
        self, progress: PyTree, reports: list[PrivacyReport]
    ) -> tuple[PyTree, list[PrivacyReport]]:
        """Returns the progress to go on from, and the reports with their names and date.

        Without an earlier call it writes the progress before the first step. A run that is killed
        later is then charged to a ledger once.
        """
        if self._found is None:
            names = [each.run for each in reports]
            own = {"runs": names, "date": reports[0].date, "salt": secrets.token_hex(32)}
            # Names and salt are random, so the first process makes them for all.
            own = json.loads(from_first(self._mesh, lambda: json.dumps(own).encode()))
            records = hash_of(self._records, own["salt"], self._mesh)
            self._about = own | {"meaning": self._meaning, "records": records}
            self.save(progress)
        else:
            progress = copied(self._mesh, _filled(progress, self._found))
        runs, date = self._about["runs"], self._about["date"]
        return progress, [
            dataclasses.replace(each, run=run, date=date)
            for each, run in zip(reports, runs, strict=True)
        ]

    def forget(self) -> None:
        """Removes the progress of a run that was refused before its first step."""
        path = pathlib.Path(self._folder) / _FILE
        from_first(self._mesh, lambda: path.unlink(missing_ok=True) or b"")

    def save(self, progress: PyTree) -> None:
        """Writes the progress. The file is replaced only when the new one is complete."""
        about = json.dumps(self._about).encode() + b"\n"
        body = about + b"".join(_data(x).tobytes() for x in jax.tree.leaves(progress))
        content = hashlib.sha256(_FORMAT + body).digest() + body
        path = pathlib.Path(self._folder) / _FILE
        from_first(self._mesh, lambda: write_for_owner(path, content) or b"")

    def _check_meaning(self, found: Values) -> None:
        """Raises ValueError if the file was made by a call with another meaning."""
        for name in sorted(found.keys() | self._meaning.keys()):
            before, now = str(found.get(name)), str(self._meaning.get(name))
            if before != now:
                # Long texts differ somewhere: only what follows is worth reading.
                pairs = enumerate(zip(before, now, strict=False))
                same = max(0, next((i for i, (one, other) in pairs if one != other), 0) - 40)
                before, now = (
                    text if len(text) < 200 else text[:200] + " ..."
                    for text in (before[same:], now[same:])
                )
                raise ValueError(
                    f"checkpoint={str(self._folder)!r} holds another run, with {name}={before} "
                    f"instead of {now}. Use another folder, or the arguments of the call that made "
                    "it."
                )


def _content(folder: pathlib.Path) -> bytes:
    """Returns what a whole file says, or nothing if there is no file."""
    try:
        content = (folder / _FILE).read_bytes()
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise ValueError(
            f"{folder / _FILE} cannot be read: {error}. Use another folder."
        ) from error
    if hashlib.sha256(_FORMAT + content[32:]).digest() != content[:32]:
        raise ValueError(
            f"{folder / _FILE} is damaged, or of another version of numpyro_dp, so its run cannot "
            "go on. Use another folder."
        )
    return content[32:]


def _split(content: bytes) -> tuple[dict[str, Any], bytes]:
    """Returns what a file says about its run, and the bytes of its arrays."""
    # JSON writes no newline itself, so the first one ends it.
    about, _, data = content.partition(b"\n")
    return json.loads(about), data


def _data(leaf: PyTree) -> np.ndarray:
    return np.asarray(jax.random.key_data(leaf) if is_key(leaf) else leaf)


def _filled(progress: PyTree, content: bytes) -> PyTree:
    """Returns a tree of arrays like the leaves of ``progress``, with the values of stored bytes."""
    first = 0

    def one(leaf: PyTree) -> np.ndarray | Array:
        nonlocal first
        like = _data(leaf)
        # A copy, because bytes are read-only and a sweep writes into these arrays.
        found = np.ndarray(like.shape, like.dtype, content, first).copy()
        first += found.nbytes
        if isinstance(leaf, np.ndarray | np.generic):
            return found
        if is_key(leaf):
            return jax.random.wrap_key_data(jnp.asarray(found), impl=jax.random.key_impl(leaf))
        return jnp.asarray(found)

    return jax.tree.map(one, progress)


@contextlib.contextmanager
def started(
    settings: RunSettings,
    states: list[SensitiveState],
    progress: PyTree,
    reports: list[PrivacyReport],
    kept: Checkpoint | None,
    left: Callable[[PyTree], tuple[list[SensitiveState], int]],
    charged: Callable[[], list[PrivacyReport]] | None,
) -> Iterator[tuple[PyTree, list[PrivacyReport]]]:
    """Registers and charges runs before they read a record, and finds their progress.

    From a progress ``left`` gives states, and the number of steps that each has left. ``charged``
    returns the reports of all steps that the runs may take. It is ``None`` for a run that goes on
    from a state, because that was registered and charged before.

    Yields:
        The progress from which to go on, and the reports with their names and date.

    Guarantee:
        A checkpoint is written after its run is registered, so noise that was used is never
        written to a new one. Steps that a checkpoint has left are marked as used in this process.
    """
    with contextlib.ExitStack() as stack:
        if kept is not None:
            stack.enter_context(kept)
        resumed = kept is not None and kept.resumed
        if charged is not None and not resumed:
            stack.enter_context(registered(settings, *states))
        if kept is not None:
            # Names are written before the charge. If the process dies in between, the next call
            # finds them, and the ledger counts the run once.
            progress, reports = kept.resume(progress, reports)
        try:
            now, steps = left(progress)
            # A finished run has no step left, so it uses no noise.
            for state in now if steps else ():
                stack.enter_context(used(settings, state, steps))
            if charged is not None:
                charge(settings, charged, [each.run for each in reports], again=resumed)
        except ValueError:  # a refusal. After another error the run may have been charged
            if kept is not None and not resumed:
                kept.forget()
            raise
        yield progress, reports


def check_every(every: object, checkpoint: object) -> None:
    """Raises unless ``every`` is ``None``, or an integer >= 1 beside a checkpoint."""
    if every is None:
        return
    check_int("every", every, low=1)
    if checkpoint is None:
        raise ValueError("every= says how often a checkpoint is written. Pass checkpoint= too.")


def without_own_run(settings: RunSettings, folder: str | os.PathLike[str] | None) -> RunSettings:
    """Returns settings whose budget does not count the run of a folder as an earlier run.

    A budget for what is left of a ledger counts all runs in it. If a call continues a run, the
    ledger has this run already. Processes of a mesh use the ledger of the first one.
    """
    budget, apart = settings.budget, folder is None and not settings.several_processes
    if budget is None or budget.charges is None or apart:
        return settings
    mine = budget.earlier

    def others() -> bytes:
        content = b"" if folder is None else _content(pathlib.Path(folder))
        own = _split(content)[0]["runs"] if content else ()
        return pickle.dumps(tuple(each for each in mine if each.run not in own))

    earlier = pickle.loads(from_first(settings.execution.mesh, others))
    if not any_process(settings.execution.mesh, earlier != mine):
        return settings
    return settings.changed(budget=dataclasses.replace(budget, earlier=earlier))


def checkpoint_of(
    folder: str | os.PathLike[str] | None,
    every: int | None,
    driver: str,
    settings: RunSettings,
    reports: Sequence[PrivacyReport],
    rng_key: Array,
    program: Callable[[], str],
    records: Args,
    **own: object,
) -> Checkpoint | None:
    """Returns the checkpoint of a run, or ``None`` without a folder.

    ``driver`` is a name, and ``program`` returns a hash of the compiled program and of public
    values. ``own`` are further JSON values that must be the same when a call continues the run.
    """
    if folder is None:
        return None
    mesh = settings.execution.mesh
    devices = jax.devices() if mesh is None else mesh.devices.flatten()
    versions = ("numpyro_dp", "jax", "jaxlib", "numpyro", "numpy")
    secret = settings.privacy.secret_key  # its hash can confirm a guess of it
    meaning = {
        "driver": driver,
        # Another version or device may round differently. The same noise would then cover other
        # sums.
        "versions": {name: version_of(name) for name in versions},
        "device": f"{devices[0].platform} {devices[0].device_kind}",
        "devices": 1 if mesh is None else len(devices),
        "processes": jax.process_count() if settings.several_processes else 1,
        "rng_key": _data(jax.random.key_data(rng_key)).tolist(),
        "clip_norm": str(settings.clip_norm),
        "mechanism": repr(settings.privacy.mechanism),
        "secret_key": secret is not None and hashlib.sha256(_data(secret).tobytes()).hexdigest(),
        # The call that continues may come on another day, or as a repetition.
        "report": [str(dataclasses.replace(x, repetition=False, date="")) for x in reports],
        "program": program(),
    } | own
    return Checkpoint(folder, every, meaning, records, mesh)


def traced(run: Callable[..., PyTree], arguments: Args, public: PyTree) -> tuple[str, PyTree]:
    """Returns a hash of a function and its public values, and the shapes of its result.

    Of ``arguments`` only the shapes matter, of ``public`` also the values. The hash covers the
    traced program: model, guide, estimator, optimiser, sampler and the arrays they captured.
    """
    program, like = jax.make_jaxpr(run, return_shape=True)(*arguments)
    # Addresses of Python objects in the text differ between processes.
    found = hashlib.sha256(re.sub("0x[0-9a-f]+", "", str(program)).encode())
    for leaf in [*jax.tree.leaves(public), *held_by_program(program)]:
        found.update(_data(leaf).tobytes())
    return found.hexdigest(), like


def hash_of(arrays: Args, salt: str, mesh: Mesh | None = None, most: int | None = None) -> str:
    """Returns a keyed hash of arrays, in the dtypes of JAX. It reads large arrays part by part.

    Processes of a mesh hash the rows that each holds. All get the hash of these hashes. With
    ``most``, it covers only so many rows of a large array.
    """
    found = hmac.new(bytes.fromhex(salt), digestmod=hashlib.sha256)
    for array in arrays:
        shape, dtype = np.shape(array), jax.dtypes.canonicalize_dtype(array.dtype)
        # Shapes too, or entries could move from one array to the next.
        found.update(f"{shape} {dtype};".encode())
        if most is not None and math.prod(shape) * dtype.itemsize > _PART:
            array = array[np.linspace(0, shape[0] - 1, most).astype(int)]
        for part in _parts_here(array):
            own = jax.dtypes.canonicalize_dtype(part.dtype)
            rows = max(1, _PART // max(1, own.itemsize * math.prod(np.shape(part)[1:])))
            for first in range(0, len(part), rows):
                found.update(np.asarray(part[first : first + rows], own).tobytes())
    return hash_together(mesh, found.digest()).hex()


def _parts_here(array: Any) -> list[Any]:
    """The array, or its parts that this process holds."""
    if not isinstance(array, Array):
        return [array]
    if array.is_fully_addressable:
        return [np.asarray(array)]  # JAX would compile slices
    parts = {str(each.index): each for each in array.addressable_shards}  # copies count once
    return [
        x for index, each in sorted(parts.items())
        for x in (np.frombuffer(index.encode(), np.uint8), np.asarray(each.data))
    ]  # fmt: skip


@contextlib.contextmanager
def locked(folder: object) -> Iterator[pathlib.Path]:
    """Makes a folder for its owner alone, and keeps other processes out of it.

    Raises:
        TypeError: If it is no path.
        ValueError: If another process has it, or it cannot be made.
    """
    if not isinstance(folder, str | os.PathLike):
        raise TypeError(
            f"Expected checkpoint as the path of a folder, got {type(folder).__name__}."
        )
    if fcntl is None:
        raise ValueError("checkpoint needs file locks of Linux or macOS. Leave it out.")
    path = pathlib.Path(folder)
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = open(path / "lock", "w", opener=_owner_only)  # noqa: SIM115 - closed below
    except OSError as error:
        raise ValueError(f"checkpoint={str(path)!r} cannot be a folder: {error}.") from error
    with file:
        try:
            # The system drops this lock when the process ends, also if it is killed.
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(
                f"Another run uses checkpoint={str(path)!r} now. Wait for its end, or use another "
                "folder."
            ) from error
        yield path


def write_for_owner(path: pathlib.Path, content: bytes) -> None:
    """Writes a file that only its owner can read. It appears when it is complete, on the disk."""
    unfinished = path.with_suffix(".begun")
    unfinished.unlink(missing_ok=True)  # or the file would keep its mode, or follow a link
    with open(unfinished, "xb", opener=_owner_only) as file:
        file.write(content)
        file.flush()
        # On the disk before the file gets its name, or a crash could leave a damaged file there.
        os.fsync(file.fileno())
    unfinished.replace(path)


def _owner_only(name: str, flags: int) -> int:
    """Opens a file for its owner alone, as the ``opener`` of :func:`open`."""
    return os.open(name, flags, 0o600)
