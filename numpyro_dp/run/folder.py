"""A folder that keeps the finished chunks of a sweep, so that it can go on."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import pathlib
import re
import secrets
import zipfile
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import Array

from numpyro_dp.core import PyTree
from numpyro_dp.model.held import held_by_program

__all__ = ["Folder", "fingerprint", "traced"]

_RECORDS = "SENSITIVE_records.json"  # file of a folder


class Folder:
    """Results of chunks by the number of their first run.

    The folder holds released values, and one file that must not be published: a salted hash of all
    records together, by which a later call knows that the records are the same.

    Args:
        path: The folder. It is created if it does not exist.
        meaning: Description of the runs, as JSON values.
        like: A tree like the result of a chunk. Only structure, shapes and dtypes matter.

    Raises:
        ValueError: If the folder holds other runs. The message names the difference.
    """

    def __init__(self, path: str | os.PathLike[str], meaning: dict[str, Any], like: PyTree) -> None:
        self.path, self._like = pathlib.Path(path), like
        self.path.mkdir(parents=True, exist_ok=True)
        meaning = json.loads(json.dumps(meaning))
        sheet = self.path / "sweep.json"
        if not sheet.exists():
            begun = sheet.with_suffix(".begun")
            begun.write_text(json.dumps(meaning, indent=1))
            begun.replace(sheet)
        found = json.loads(sheet.read_text())
        for name in sorted(found.keys() | meaning.keys()):
            if found.get(name) != meaning.get(name):
                raise ValueError(
                    f"folder={str(path)!r} holds another sweep, with {name}="
                    f"{_short(found.get(name))} instead of {_short(meaning.get(name))}. Use "
                    "another folder, or the arguments of the sweep that created it."
                )

    def check_records(self, arrays: tuple[Array, ...]) -> None:
        """Raises ValueError unless the records are those of the sweep that made the folder."""
        path = self.path / _RECORDS
        if not path.exists():
            if any(self.path.glob("runs_*.npz")):
                raise ValueError(
                    f"{path} is missing, so nobody can tell whether the results in the folder are "
                    "of these records. Use another folder."
                )
            salt = secrets.token_hex(32)
            begun = path.with_suffix(".begun")
            with open(begun, "w", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
                json.dump({"salt": salt, "hash": _hash_of(arrays, salt)}, file)
            begun.replace(path)
        found = json.loads(path.read_text())
        if not hmac.compare_digest(found["hash"], _hash_of(arrays, found["salt"])):
            raise ValueError(
                f"folder={str(self.path)!r} holds results of other records. Use another folder."
            )

    def load(self, first: int) -> PyTree | None:
        """Returns a finished chunk, or ``None``."""
        path = self._chunk(first)
        if not path.exists():
            return None
        try:
            with np.load(path) as stored:
                leaves = [stored[f"leaf{number}"] for number in range(len(stored.files))]
        except (zipfile.BadZipFile, OSError, KeyError, ValueError) as error:
            raise ValueError(f"{path} is damaged: {error}. Remove it.") from error
        expected, structure = jax.tree.flatten(self._like)
        if [x.shape for x in leaves] != [x.shape for x in expected]:
            raise ValueError(
                f"Expected arrays of {[x.shape for x in expected]} in {path}, got "
                f"{[x.shape for x in leaves]}. Remove it."
            )
        both = zip(leaves, expected, strict=True)  # NumPy's files do not store the name bfloat16
        leaves = [x.view(known.dtype) if x.dtype.kind == "V" else x for x, known in both]
        return jax.tree.unflatten(structure, leaves)

    def save(self, first: int, found: PyTree) -> None:
        """Writes a chunk. The file appears only when it is complete."""
        leaves = {f"leaf{i}": np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(found))}
        path = self._chunk(first)
        begun = path.with_suffix(".begun.npz")
        np.savez(begun, **leaves)
        begun.replace(path)

    def _chunk(self, first: int) -> pathlib.Path:
        return self.path / f"runs_{first:06d}.npz"


def _hash_of(arrays: tuple[Array, ...], salt: str) -> str:
    found = hmac.new(bytes.fromhex(salt), digestmod=hashlib.sha256)
    for array in map(np.asarray, arrays):
        found.update(f"{array.shape} {array.dtype};".encode())
        found.update(np.ascontiguousarray(array).tobytes())
    return found.hexdigest()


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
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        found.update(np.asarray(leaf).tobytes())
    return found.hexdigest(), like


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 200 else text[:200] + " ..."
