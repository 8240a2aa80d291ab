"""Posteriors in files: what may be published, without code and without records.

**Format, version 1.** A file is a zip archive. ``about.json`` has these entries.

``format`` and ``version`` come first. ``method``, ``notes``, ``findings`` and ``converged`` are
those of the posterior.

``privacy`` is the statement (:class:`~numpyro_dp.accounting.Statement`).

``model`` has log densities of the model at invented records (module ``densities``),
or ``null`` if they could not be found. ``public`` has hashes of the arrays that were public.

``latents`` has the unconstrained shape and the support of each site. For stored draws it has the
shape of the value.

``draws`` is ``"normal"`` (arrays ``mean``, ``root``), ``"rows"`` (``rows``, perhaps ``root``) or
``"sites"`` (an array for each site).

``arrays`` has shape and SHA-256 of each array, which is the member ``<name>.npy``. ``sha256`` is
of all other entries, as JSON with sorted names.

Members are in NumPy's format without pickled objects. The names of arrays begin with the part that
they belong to: ``draws/``, ``shares/`` (of the prior), ``params/`` (of the model), ``released/``.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import pathlib
import stat
import tempfile
import zipfile
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from numpyro_dp.posterior.draws import (
    FlatDraws,
    Normal,
    Rows,
    SiteDraws,
    Sites,
    support_from_json,
    support_to_json,
)

__all__ = ["part_of", "read_posterior", "write_posterior"]

FORMAT, VERSION = "numpyro_dp posterior", 1

_STORED = 4000  # draws of a posterior that has no other form
_FIRST_DAY = (1980, 1, 1, 0, 0, 0)  # of zip: equal posteriors give equal files


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
        about: What ``about.json`` has beside the draws.
        arrays: Arrays beside the draws.
    """
    about, arrays = dict(about), dict(arrays)
    if not isinstance(draws, FlatDraws) or draws.sites is None:
        if not isinstance(draws, SiteDraws):
            draws = SiteDraws(draws(jax.random.key(0), _STORED))
            about["notes"] = [*about["notes"], f"The file has {_STORED} draws of the posterior."]
        kind, found = "sites", draws.values
        about["latents"] = {n: {"shape": list(np.shape(v)[1:])} for n, v in found.items()}
    else:
        kind = "normal" if isinstance(draws.vectors, Normal) else "rows"
        found = {n: x for n, x in draws.vectors._asdict().items() if x is not None}
        about["latents"] = {
            name: {"shape": list(shape), "support": support_to_json(draws.sites.supports[name])}
            for name, shape in draws.sites.shapes.items()
        }
    arrays |= {f"draws/{name}": np.asarray(value) for name, value in found.items()}
    members = {name: _as_npy(value) for name, value in arrays.items()}
    about |= {"format": FORMAT, "version": VERSION, "draws": kind}
    about["arrays"] = {
        name: {"shape": list(arrays[name].shape), "sha256": hashlib.sha256(content).hexdigest()}
        for name, content in members.items()
    }
    about["sha256"] = _hash_of(about)
    text = json.dumps(about, indent=2, allow_nan=False).encode()
    # Written beside the target and moved, so that a file is whole or not there.
    target = pathlib.Path(path).resolve()  # a link stays one
    with tempfile.NamedTemporaryFile(dir=target.parent, delete=False) as file:
        try:
            with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
                archive.writestr(_member("about.json"), text)
                for name, content in members.items():
                    archive.writestr(_member(f"{name}.npy"), content)
            file.close()
            mode = stat.S_IMODE(target.stat().st_mode) if target.exists() else 0o644
            os.chmod(file.name, mode)
            os.replace(file.name, target)
        except BaseException:
            os.unlink(file.name)
            raise


def read_posterior(path: Any, make: Callable[..., Any]) -> Any:
    """Reads a posterior.

    Args:
        path: The file.
        make: Called with draws, what ``about.json`` has, and the arrays.

    Returns:
        What ``make`` returns. An error of it means that the file is damaged.

    Raises:
        FileNotFoundError: If there is no file.
        ValueError: If the file is damaged, or is not a posterior of this version.
    """
    content = pathlib.Path(path).read_bytes()
    try:
        about, arrays = _read(content)
        known = about.get("format"), about.get("version")
        if known == (FORMAT, VERSION):
            return make(_draws_of(about, arrays), about, arrays)
    # A damaged file may break zip, JSON and NumPy in any way.
    except Exception as error:
        raise ValueError(
            f"{path} is not a saved posterior, or the file is damaged: {error} Save the posterior "
            "again, or copy the file again."
        ) from error
    raise ValueError(
        f"Expected {path} as {FORMAT!r} of version {VERSION}, got {known[0]!r} of version "
        f"{known[1]!r}. Read it with the numpyro_dp that wrote it."
    )


def _read(content: bytes) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        about = json.loads(archive.read("about.json"))
        arrays = {}
        for name, told in about["arrays"].items():
            member = archive.read(f"{name}.npy")
            if hashlib.sha256(member).hexdigest() != told["sha256"]:
                raise ValueError(f"The array {name!r} was changed.")
            arrays[name] = np.load(io.BytesIO(member), allow_pickle=False)
            if arrays[name].dtype.kind not in "biufc":
                raise ValueError(f"The array {name!r} has no numbers.")
    if _hash_of(about) != about["sha256"]:
        raise ValueError("about.json was changed.")
    return about, arrays


def _hash_of(about: dict[str, Any]) -> str:
    """A hash of all other entries."""
    rest = {name: value for name, value in about.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, allow_nan=False).encode()).hexdigest()


def _draws_of(about: dict[str, Any], arrays: dict[str, np.ndarray]) -> FlatDraws | SiteDraws:
    found = part_of(arrays, "draws")
    if about["draws"] == "sites":
        if set(found) != set(about["latents"]) or len({len(value) for value in found.values()}) > 1:
            raise ValueError("Stored draws do not fit the latents.")
        return SiteDraws(found)
    latents = about["latents"]
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


def _member(name: str) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name, _FIRST_DAY)
    info.compress_type = zipfile.ZIP_DEFLATED
    return info


def _as_npy(value: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, value, allow_pickle=False)
    return file.getvalue()
