"""What a sweep has finished, kept in a folder, so that one that stopped goes on."""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import re
import zipfile
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import Array

from numpyro_dp.core import PyTree
from numpyro_dp.model.held import held_by_program

__all__ = ["SweepFolder", "fingerprint", "traced"]


class SweepFolder:
    """Results of chunks by the number of their first run; holds releases alone.

    Args:
        path: The folder; made where it is missing.
        meaning: What the runs are, as JSON takes it.
        like: What a chunk gives; only structure, shapes and types matter.

    Raises:
        ValueError: If the folder holds runs of another meaning; the message says of what.
    """

    def __init__(self, path: str | os.PathLike[str], meaning: dict[str, Any], like: PyTree) -> None:
        self.path, self._like = pathlib.Path(path), like
        self.path.mkdir(parents=True, exist_ok=True)
        meaning = json.loads(json.dumps(meaning))
        sheet = self.path / "sweep.json"
        if not sheet.exists():
            _replace(sheet, json.dumps(meaning, indent=1).encode())
        found = json.loads(sheet.read_text())
        for name in sorted(found.keys() | meaning.keys()):
            if found.get(name) != meaning.get(name):
                raise ValueError(
                    f"Expected folder={str(path)!r} to be of this sweep, got one with {name}="
                    f"{_short(found.get(name))} instead of {_short(meaning.get(name))}. Take "
                    "another folder, or the arguments that it was begun with."
                )

    def load(self, first: int) -> PyTree | None:
        """Returns a finished chunk; ``None`` if it is not there."""
        path = self._chunk(first)
        if not path.exists():
            return None
        try:
            with np.load(path) as stored:
                leaves = [stored[f"leaf{number}"] for number in range(len(stored.files))]
        except (zipfile.BadZipFile, OSError, KeyError, ValueError) as error:
            raise ValueError(f"Expected a whole file, got {path}: {error}. Remove it.") from error
        expected, structure = jax.tree.flatten(self._like)
        if [x.shape for x in leaves] != [x.shape for x in expected]:
            raise ValueError(
                f"Expected arrays of {[x.shape for x in expected]} in {path}, got "
                f"{[x.shape for x in leaves]}. Remove it."
            )
        both = zip(leaves, expected, strict=True)  # NumPy's files do not name bfloat16
        leaves = [x.view(known.dtype) if x.dtype.kind == "V" else x for x, known in both]
        return jax.tree.unflatten(structure, leaves)

    def save(self, first: int, found: PyTree) -> None:
        """Keeps a chunk; a file appears when it is whole."""
        leaves = {f"leaf{i}": np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(found))}
        path = self._chunk(first)
        begun = path.with_suffix(".begun.npz")
        np.savez(begun, **leaves)
        begun.replace(path)

    def _chunk(self, first: int) -> pathlib.Path:
        return self.path / f"runs_{first:06d}.npz"


def fingerprint(secret: Array | None) -> str:
    """What tells one secret key from another; it confirms a key that was guessed."""
    if secret is None:
        return "drawn anew by each call"
    data = np.asarray(jax.random.key_data(secret)).tobytes()
    return hashlib.sha256(b"numpyro_dp sweep" + data).hexdigest()


def traced(run: Callable[..., PyTree], arguments: Any, public: PyTree) -> tuple[str, PyTree]:
    """A hash of what a function computes and from what values; and the shapes of what it gives.

    Of the arguments only shapes matter, of ``public`` the values. The program is the traced one:
    model, guide, estimator, optimiser and sampler are in it, and the arrays that they captured.
    """
    program, like = jax.make_jaxpr(run, return_shape=True)(*arguments)
    found = hashlib.sha256(re.sub("0x[0-9a-f]+", "", str(program)).encode())
    for leaf in [*jax.tree.leaves(public), *held_by_program(program)]:
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        found.update(np.asarray(leaf).tobytes())
    return found.hexdigest(), like


def _replace(path: pathlib.Path, text: bytes) -> None:
    begun = path.with_suffix(".begun")
    begun.write_bytes(text)
    begun.replace(path)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 200 else text[:200] + " ..."
