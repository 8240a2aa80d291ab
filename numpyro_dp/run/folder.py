"""A folder that keeps the finished chunks of a sweep, so that it can go on."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import io
import json
import math
import os
import pathlib
import re
import secrets
import zipfile
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh

from numpyro_dp._tree import is_key
from numpyro_dp.core import PyTree
from numpyro_dp.model.held import held_by_program
from numpyro_dp.privacy.keys import as_secret_key
from numpyro_dp.sums.devices import from_first, hash_together

try:
    import fcntl
except ImportError:  # Windows has another lock
    fcntl = None

__all__ = [
    "Folder", "different", "fingerprint", "hash_of", "locked", "seal_of", "traced",
    "write_for_owner",
]  # fmt: skip

_RECORDS, _KEY = "SENSITIVE_records.json", "SENSITIVE_key"  # files of a folder
_SHEET, _NAMES, _CHUNKS = "sweep.json", "names.json", "runs_*.npz"
_PART = 2**24  # bytes of an array that are hashed at once


class Folder:
    """Results of chunks by the number of their first run.

    The folder holds released values, and files that must not be published. One is a salted hash of
    all records together, by which a later call knows that the records are the same. The other is
    the secret key, until the last chunk is finished.

    Args:
        path: The folder. It is created if it does not exist.
        meaning: Description of the runs, as JSON values.
        like: A tree like the result of a chunk. Only structure, shapes and dtypes matter.
        mesh: Devices of the runs. If they belong to several processes, the first one reads and
            writes the files for all.

    Raises:
        ValueError: If the folder holds other runs. The message names the difference.
    """

    path: pathlib.Path

    def __init__(
        self,
        path: str | os.PathLike[str],
        meaning: dict[str, Any],
        like: PyTree,
        mesh: Mesh | None = None,
    ) -> None:
        self.path, self._like, self._mesh = pathlib.Path(path), like, mesh
        meaning = json.loads(json.dumps(meaning))
        self._is_new = False

        def compared() -> bytes:
            sheet = self.path / _SHEET
            self._is_new = not sheet.exists()
            if self._is_new:
                others = [
                    x.name for p in (_KEY, _NAMES, _RECORDS, _CHUNKS) for x in self.path.glob(p)
                ]
                if others:
                    raise ValueError(
                        f"{sheet} is missing, so nobody can tell what {others} are of. Use another "
                        "folder."
                    )
                write_for_owner(sheet, json.dumps(meaning, indent=1).encode())
            found = self._json(_SHEET, sheet.read_bytes())
            different(f"folder={str(path)!r} holds another sweep", found, meaning)
            return b""

        from_first(mesh, compared)

    def forget(self) -> None:
        """Removes what a sweep wrote that was refused before its first step."""

        def removed() -> bytes:
            if self._is_new and not any(self.path.glob(_CHUNKS)):
                for name in (_NAMES, _KEY, _RECORDS, _SHEET):  # the sheet explains the others
                    (self.path / name).unlink(missing_ok=True)
            return b""

        from_first(self._mesh, removed)

    def _kept(self, name: str, fresh: bytes | None = None) -> bytes | None:
        """Returns the content of a file, which is made of ``fresh`` if there is none."""
        path = self.path / name

        def content() -> bytes:
            if fresh is not None and not path.exists():
                write_for_owner(path, fresh)
            return b"+" + path.read_bytes() if path.exists() else b""

        found = from_first(self._mesh, content)
        return found[1:] if found else None

    def _json(self, name: str, content: bytes) -> Any:
        try:
            return json.loads(content)
        except ValueError as error:
            raise ValueError(
                f"{self.path / name} is damaged ({error}). Use another folder."
            ) from error

    def _has(self, pattern: str) -> bool:
        return bool(from_first(self._mesh, lambda: b"+" * any(self.path.glob(pattern))))

    def check_records(self, arrays: tuple[Array, ...]) -> None:
        """Raises ValueError unless the records are those of the sweep that made the folder."""
        content = self._kept(_RECORDS)
        if content is None:
            if self._has(_CHUNKS):
                raise ValueError(
                    f"{self.path / _RECORDS} is missing, so nobody can tell whether the results in "
                    "the folder are of these records. Use another folder."
                )
            salt = from_first(self._mesh, lambda: secrets.token_hex(32).encode()).decode()
            text = json.dumps({"salt": salt, "hash": hash_of(arrays, salt, self._mesh)})
            content = self._kept(_RECORDS, text.encode())
        found = self._json(_RECORDS, content)
        if not hmac.compare_digest(found["hash"], hash_of(arrays, found["salt"], self._mesh)):
            raise ValueError(
                f"folder={str(self.path)!r} holds results of other records. Use another folder."
            )

    def secret(self, fresh: Array, firsts: Iterable[int]) -> Array:
        """Returns the secret key of the sweep that is under way, or keeps a fresh one.

        Args:
            fresh: The key of a new sweep.
            firsts: Number of the first run of every chunk.

        Raises:
            ValueError: If a finished sweep, which has no key any more, lacks a chunk.
        """
        new = np.asarray(jax.random.key_data(fresh)).tobytes()
        content = self._kept(_KEY, None if self._has(_NAMES) or self._has(_CHUNKS) else new)
        if content is None:
            # With another key a missing chunk would be another release, which nobody counts.
            if missing := [first for first in firsts if not self._has(self._chunk(first).name)]:
                raise ValueError(
                    f"{self._chunk(missing[0])} is missing, and the key of its runs was removed "
                    "when the sweep was finished. Use another folder."
                )
            return fresh
        if len(content) != len(new):
            raise ValueError(f"{self.path / _KEY} is damaged. Use another folder.")
        return as_secret_key(content)

    def names(self, fresh: list[str], date: str) -> tuple[list[str], str]:
        """Returns names and date of the runs in their reports, or keeps new ones.

        They are written after the key: where they are and the key is not, the sweep was finished.
        """
        text = json.dumps({"runs": fresh, "date": date})
        found = self._json(_NAMES, self._kept(_NAMES, text.encode()))
        if len(found["runs"]) != len(fresh):
            raise ValueError(f"{self.path / _NAMES} is damaged. Use another folder.")
        return found["runs"], found["date"]

    def forget_secret(self) -> None:
        """Removes the key after the last chunk. It would reveal the noise of all results."""

        def removed() -> bytes:
            (self.path / _KEY).unlink(missing_ok=True)
            return b""

        from_first(self._mesh, removed)

    def load(self, first: int) -> PyTree | None:
        """Returns a finished chunk, or ``None``."""
        path = self._chunk(first)
        content = self._kept(path.name)
        if content is None:
            return None
        try:
            with np.load(io.BytesIO(content)) as stored:
                leaves = [stored[f"leaf{number}"] for number in range(len(stored.files))]
        except (zipfile.BadZipFile, OSError, EOFError, KeyError, ValueError) as error:
            raise ValueError(f"{path} is damaged: {error}. Use another folder.") from error
        expected, structure = jax.tree.flatten(self._like)
        if [x.shape for x in leaves] != [x.shape for x in expected]:
            raise ValueError(
                f"Expected arrays of {[x.shape for x in expected]} in {path}, got "
                f"{[x.shape for x in leaves]}. Use another folder."
            )
        both = zip(leaves, expected, strict=True)  # NumPy's files do not store the name bfloat16
        leaves = [x.view(known.dtype) if x.dtype.kind == "V" else x for x, known in both]
        return jax.tree.unflatten(structure, leaves)

    def save(self, first: int, found: PyTree) -> None:
        """Writes a chunk. The file appears only when it is complete."""
        stored = io.BytesIO()
        np.savez(
            stored,
            **{f"leaf{i}": np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(found))},
        )
        from_first(
            self._mesh, lambda: write_for_owner(self._chunk(first), stored.getvalue()) or b""
        )

    def _chunk(self, first: int) -> pathlib.Path:
        return self.path / f"runs_{first:06d}.npz"


def different(what: str, found: dict[str, Any], meaning: dict[str, Any]) -> None:
    """Raises ValueError if a folder was made by a call with another meaning."""
    for name in sorted(found.keys() | meaning.keys()):
        before, now = str(found.get(name)), str(meaning.get(name))
        if before != now:
            # Long texts differ somewhere: only what follows is worth reading.
            pairs = enumerate(zip(before, now, strict=False))
            same = max(0, next((i for i, (one, other) in pairs if one != other), 0) - 40)
            raise ValueError(
                f"{what}, with {name}={_short(before[same:])} instead of {_short(now[same:])}. Use "
                "another folder, or the arguments of the call that made it."
            )


def hash_of(arrays: tuple[Any, ...], salt: str, mesh: Mesh | None = None) -> str:
    """Returns a keyed hash of arrays. It reads large arrays part by part.

    Processes of a mesh hash the rows that each holds. All get the hash of these hashes.
    """
    found = hmac.new(bytes.fromhex(salt), digestmod=hashlib.sha256)
    for array in arrays:
        found.update(f"{np.shape(array)} {array.dtype};".encode())
        for part in _parts_here(array):
            rows = max(1, _PART // max(1, part.dtype.itemsize * math.prod(np.shape(part)[1:])))
            for first in range(0, len(part), rows):
                found.update(np.ascontiguousarray(part[first : first + rows]).tobytes())
    return hash_together(mesh, found.digest()).hex()


def seal_of(arrays: tuple[Any, ...], salt: str | None = None) -> tuple[str, str]:
    """Returns a salt and a keyed hash of arrays, or of 1,000 rows of each large one."""
    salt = secrets.token_hex(32) if salt is None else salt

    def some(array: Any) -> Any:
        number, dtype = np.shape(array)[0], jax.dtypes.canonicalize_dtype(array.dtype)
        large = math.prod(np.shape(array)) * dtype.itemsize > _PART
        rows = np.linspace(0, number - 1, 1000).astype(int) if large else slice(None)
        # In the dtype that JAX computes with, so that NumPy and JAX arrays of records agree.
        return np.asarray(array[rows]).astype(dtype)

    return salt, hash_of(tuple(map(some, arrays)), salt)


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
def locked(name: str, folder: Any) -> Iterator[pathlib.Path]:
    """Makes a folder for its owner alone, and keeps other processes out of it.

    Args:
        name: Name of the argument, for messages.
        folder: Path of the folder.

    Raises:
        TypeError: If it is no path.
        ValueError: If another process has it, or it cannot be made.
    """
    if not isinstance(folder, str | os.PathLike):
        raise TypeError(f"Expected {name} as the path of a folder, got {type(folder).__name__}.")
    if fcntl is None:
        raise ValueError(f"{name} needs file locks of Linux or macOS. Leave it out.")
    path = pathlib.Path(folder)
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = open(path / "lock", "w", opener=_owner_only)  # noqa: SIM115 - closed below
    except OSError as error:
        raise ValueError(f"{name}={str(path)!r} cannot be a folder: {error}.") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(
                f"Another run uses {name}={str(path)!r} now. Wait for its end, or use another "
                "folder."
            ) from error
        yield path


def write_for_owner(path: pathlib.Path, content: bytes) -> None:
    """Writes a file that only its owner can read. It appears when it is complete, on the disk."""
    begun = path.with_suffix(".begun")
    begun.unlink(missing_ok=True)  # or the file would keep its mode, or follow a link
    with open(begun, "xb", opener=_owner_only) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    begun.replace(path)


def _owner_only(name: str, flags: int) -> int:
    """Opens a file for its owner alone, as the ``opener`` of :func:`open`."""
    return os.open(name, flags, 0o600)


def fingerprint(secret: Array | None) -> str:
    """Returns a hash that distinguishes secret keys. It can confirm a guessed key."""
    if secret is None:
        return "drawn anew by each call"
    data = np.asarray(jax.random.key_data(secret)).tobytes()
    return hashlib.sha256(b"numpyro_dp sweep" + data).hexdigest()


def traced(run: Callable[..., PyTree], arguments: Any, public: PyTree) -> tuple[str, PyTree]:
    """Returns a hash of a function and its public values, and the shapes of its result.

    Of ``arguments`` only the shapes matter, of ``public`` also the values. The hash covers the
    traced program: model, guide, estimator, optimiser, sampler and the arrays they captured.
    """
    program, like = jax.make_jaxpr(run, return_shape=True)(*arguments)
    # Addresses of Python objects in the text differ between processes.
    found = hashlib.sha256(re.sub("0x[0-9a-f]+", "", str(program)).encode())
    for leaf in [*jax.tree.leaves(public), *held_by_program(program)]:
        found.update(np.asarray(jax.random.key_data(leaf) if is_key(leaf) else leaf).tobytes())
    return found.hexdigest(), like


def _short(text: str) -> str:
    return text if len(text) < 200 else text[:200] + " ..."
