"""Posteriors in files: what may be published, without code and without records.

**Format, version 1.** A file is in the format of ``safetensors``: arrays, and texts. Its only text
is ``about``, which is JSON with these entries.

``format`` and ``version`` come first. ``method``, ``notes``, ``findings`` and ``converged`` are
those of the posterior.

``privacy`` is the statement (:class:`~numpyro_dp.accounting.Statement`).

``model`` has log densities of the model at invented records (module ``densities``),
or ``null`` if they could not be found. ``public`` has hashes of the arrays that were public.

``latents`` has the unconstrained shape and the support of each site. For stored draws it has the
shape of the value.

``draws`` is ``"normal"`` (arrays ``mean``, ``root``), ``"rows"`` (``rows``, perhaps ``root``) or
``"sites"`` (an array for each site).

``sha256`` is of all other entries, as JSON with sorted names, and of all arrays.

The names of arrays begin with the part that they belong to: ``draws/``, ``shares/`` (of the prior),
``params/`` (of the model), ``released/``.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import pathlib
import shutil
import tempfile
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from safetensors import safe_open
from safetensors.numpy import save

from numpyro_dp.posterior.draws import (
    FlatDraws,
    Normal,
    Rows,
    SiteDraws,
    Sites,
    support_from_json,
    support_to_json,
)

__all__ = ["FORMAT", "draws_of", "part_of", "read_file", "write_posterior"]

FORMAT = {"format": "numpyro_dp posterior", "version": 1}

_STORED = 4000  # draws of a posterior that has no other form


def write_posterior(
    path: Any,
    draws: Callable[..., Any],
    about: dict[str, Any],
    arrays: dict[str, np.ndarray],
) -> None:
    """Writes a posterior.

    Args:
        path: The file.
        draws: Draws of the posterior.
        about: What the text has beside the draws.
        arrays: Arrays beside the draws.
    """
    if not isinstance(draws, FlatDraws) or draws.sites is None:
        if not isinstance(draws, SiteDraws):
            draws = SiteDraws(draws(jax.random.key(0), _STORED))
            note = f"The file has {_STORED} draws of the posterior."
            about = about | {"notes": [*about["notes"], note]}
        kind, found = "sites", draws.values
        latents = {name: {"shape": list(np.shape(x)[1:])} for name, x in found.items()}
    else:
        kind = "normal" if isinstance(draws.vectors, Normal) else "rows"
        found = {name: x for name, x in draws.vectors._asdict().items() if x is not None}
        latents = {
            name: {"shape": list(shape), "support": support_to_json(draws.sites.supports[name])}
            for name, shape in draws.sites.shapes.items()
        }
    arrays = arrays | {f"draws/{name}": np.asarray(x) for name, x in found.items()}
    about = FORMAT | about | {"latents": latents, "draws": kind}
    # One text, because safetensors writes several in any order. Equal posteriors give equal files.
    text = json.dumps(about | {"sha256": _hash_of(about, arrays)})
    content = save(arrays, {"about": text})
    # Written beside the target and moved, so that a file is whole or not there.
    target = pathlib.Path(path).resolve()  # a link stays one
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        part = pathlib.Path(folder, "part")
        part.write_bytes(content)
        if target.exists():
            shutil.copymode(target, part)
        os.replace(part, target)


def read_file(path: Any) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Reads text and arrays.

    Raises:
        ValueError: If they are not those that were written.
    """
    with safe_open(path, framework="numpy") as file:
        metadata = file.metadata()
        arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no dict
    about = json.loads(metadata["about"])
    if about.pop("sha256") != _hash_of(about, arrays):
        raise ValueError("Its text or an array was changed.")
    return about, arrays


def _hash_of(about: dict[str, Any], arrays: dict[str, np.ndarray]) -> str:
    kinds = {name: [x.dtype.name, x.shape] for name, x in sorted(arrays.items())}
    found = hashlib.sha256(json.dumps([about, kinds], sort_keys=True, allow_nan=False).encode())
    for name in kinds:
        found.update(arrays[name].tobytes())
    return found.hexdigest()


def draws_of(about: dict[str, Any], arrays: dict[str, np.ndarray]) -> FlatDraws | SiteDraws:
    """The draws of a file.

    Raises:
        Exception: If its parts do not fit.
    """
    found, latents = part_of(arrays, "draws"), about["latents"]
    if about["draws"] == "sites":
        if set(found) != set(latents) or len({len(value) for value in found.values()}) > 1:
            raise ValueError("Stored draws do not fit the latents.")
        return SiteDraws(found)
    sites = Sites(
        {name: tuple(each["shape"]) for name, each in latents.items()},
        {name: support_from_json(each["support"]) for name, each in latents.items()},
    )
    vectors = {"normal": Normal, "rows": Rows}[about["draws"]](**found)
    size = sum(math.prod(shape) for shape in sites.shapes.values())
    if vectors[0].shape[-1] != size or any(np.ndim(x) == 2 and x.shape[1] != size for x in vectors):
        raise ValueError(f"Draws do not have the {size} values of the latents.")
    draws = FlatDraws(vectors, sites.constrain, sites)
    draws(jax.random.key(0), 1)  # raises if a support has no map, or values are no numbers
    return draws


def part_of(arrays: dict[str, np.ndarray], part: str) -> dict[str, np.ndarray]:
    """The arrays of a part, by their names in it."""
    start = f"{part}/"
    return {n.removeprefix(start): value for n, value in arrays.items() if n.startswith(start)}
