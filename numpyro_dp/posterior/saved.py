"""Posteriors in files: what may be published, without code and without records.

**Format, version 1.** A file is in the format of ``safetensors``: arrays, and texts. Its only text
is ``about``, which is JSON with these entries.

``format`` and ``version`` come first. ``method``, ``notes``, ``findings`` and ``converged`` are
those of the posterior.

``privacy`` is the statement (:class:`~numpyro_dp.accounting.Statement`).

``model`` has log densities of the model at invented records (module ``densities``),
or ``null`` if they could not be found. ``public`` has hashes of the arrays that were public.

``likelihood`` has the unconstrained shapes of the latents of :class:`Likelihood`, and whether it
is approximate. Its numbers are arrays. Without a likelihood, the entry is missing.

``sha256`` is of all other entries, as JSON with sorted names, and of all arrays.

The names of arrays begin with the part that they belong to: ``draws/`` (values by site, with a
leading axis of draws), ``shares/`` (of the prior), ``params/`` (of the model), ``released/``,
``likelihood/``.
"""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import shutil
import tempfile
from typing import Any

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save

FORMAT: dict[str, str | int] = {"format": "numpyro_dp posterior", "version": 1}


def write_file(
    path: str | os.PathLike[str], about: dict[str, object], arrays: dict[str, np.ndarray]
) -> None:
    """Writes text and arrays. An existing file is replaced as a whole, or stays."""
    about = FORMAT | about
    # One text, because safetensors writes several in any order. Equal posteriors give equal files.
    text = json.dumps(about | {"sha256": _hash_of(about, arrays)})
    content = save(arrays, {"about": text})
    target = pathlib.Path(path).resolve()  # a link stays one
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        part = pathlib.Path(folder, "part")
        part.write_bytes(content)
        if target.exists():
            shutil.copymode(target, part)
        os.replace(part, target)


def read_file(path: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Reads text and arrays.

    Raises:
        ValueError: If they are not those that were written.
    """
    with safe_open(path, framework="numpy") as file:
        metadata = file.metadata()
        arrays = {name: file.get_tensor(name) for name in sorted(file.keys())}
    about = json.loads(metadata["about"])
    if about.pop("sha256") != _hash_of(about, arrays):
        raise ValueError("Its text or an array was changed.")
    return about, arrays


def _hash_of(about: dict[str, object], arrays: dict[str, np.ndarray]) -> str:
    kinds = {name: [x.dtype.name, x.shape] for name, x in sorted(arrays.items())}
    found = hashlib.sha256(json.dumps([about, kinds], sort_keys=True, allow_nan=False).encode())
    for name in kinds:
        found.update(arrays[name].tobytes())
    return found.hexdigest()


def part_of(arrays: dict[str, np.ndarray], part: str) -> dict[str, np.ndarray]:
    """The arrays of a part, by their names in it."""
    start = f"{part}/"
    return {n.removeprefix(start): value for n, value in arrays.items() if n.startswith(start)}
