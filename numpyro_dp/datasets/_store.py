"""Finds a data file, checks that its content is the known one, and downloads it when asked to.

One folder is read: the one that the environment variable ``NUMPYRO_DP_DATA`` names, else the
per-user cache ``$XDG_CACHE_HOME/numpyro_dp`` (``~/.cache/numpyro_dp``). Nothing is downloaded
unless the caller says ``download=True``; the file is then written into that same folder.

What is checked is the SHA-256 of the *content* (the text of a table, the bytes of the arrays), not
of the compressed file. So a file that was downloaded and parsed here, a copy made by others, and a
file compressed by another zlib are held against the same number.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import http.client
import io
import os
import tempfile
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

__all__ = [
    "DATA_VARIABLE",
    "DatasetDownloadError",
    "DatasetIntegrityError",
    "DatasetNotFoundError",
    "Source",
    "data_home",
    "load_arrays",
    "load_columns",
]

DATA_VARIABLE = "NUMPYRO_DP_DATA"
_TIMEOUT_SECONDS = 60.0
_DAMAGED = (OSError, EOFError, zlib.error, zipfile.BadZipFile, ValueError, KeyError, IndexError)


class DatasetNotFoundError(FileNotFoundError):
    """The data set is not in the data folder, and no download was asked for."""


class DatasetIntegrityError(ValueError):
    """A file is truncated or damaged, or holds other data than the published set."""


class DatasetDownloadError(ConnectionError):
    """No address of a data set could be read."""


class Source(NamedTuple):
    """One data set: its file, the SHA-256 of its content, and how to make it from public files.

    Attributes:
        name: The data set's name in messages.
        file: Path inside the data folder; ``.csv.gz`` is a table, ``.npz`` holds arrays.
        sha256: Of the table's text, or of the bytes of ``array_names`` in that order.
        urls: One tuple of mirrors for each public file that is needed.
        parse: From the public files' bytes to the table's text or the named arrays.
        origin: Who published the data, and the addresses.
        licence: What is known of the licence.
        array_names: The arrays that ``sha256`` covers; empty for a table.
    """

    name: str
    file: str
    sha256: str
    urls: tuple[tuple[str, ...], ...]
    parse: Callable[[list[bytes]], str | dict[str, np.ndarray]]
    origin: str
    licence: str
    array_names: tuple[str, ...] = ()


def data_home() -> Path:
    """Returns the folder that the loaders read and that ``download=True`` fills.

    Returns:
        The folder in ``NUMPYRO_DP_DATA`` if that is set and not empty, else the per-user cache
        (which need not exist yet).

    Raises:
        DatasetNotFoundError: If ``NUMPYRO_DP_DATA`` names no folder.

    Example:
        >>> from numpyro_dp.datasets import data_home
        >>> folder = data_home()  # doctest: +SKIP
    """
    named = os.environ.get(DATA_VARIABLE)
    if named:
        folder = Path(named).expanduser()
        if not folder.is_dir():
            raise DatasetNotFoundError(
                f"Expected {DATA_VARIABLE} to name a folder, got {named!r} (resolved to "
                f"{folder.resolve()}). Create it, correct the variable, or unset it to use the "
                "per-user cache."
            )
        return folder
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "numpyro_dp"


def load_columns(source: Source, *, download: bool) -> tuple[dict[str, list[str]], str]:
    """Returns a table's columns as text, in the file's order, and a line that says where from."""
    text, where = _load(source, download)
    header, *rows = csv.reader(io.StringIO(text))
    return dict(zip(header, map(list, zip(*rows, strict=True)), strict=True)), where


def load_arrays(source: Source, *, download: bool) -> tuple[dict[str, np.ndarray], str]:
    """Returns every array in the file, and a line that says where from."""
    return _load(source, download)


def _load(source: Source, download: bool):
    path = data_home() / source.file
    if not path.is_file():
        if not download:
            raise DatasetNotFoundError(_not_found(source, path))
        _download(source, path)
    packed = path.read_bytes()  # an unreadable file keeps its own OSError
    try:
        content = _unpack(source, packed)
        digest = _digest(source, content)
    except _DAMAGED as error:
        raise DatasetIntegrityError(
            f"Expected {path} to hold the data set {source.name!r}, but it cannot be read "
            f"({error}): the file is truncated or damaged. {_replace(source)}"
        ) from error
    if digest != source.sha256:
        raise DatasetIntegrityError(
            f"Expected content with SHA-256 {source.sha256} in {path}, got {digest}: this is not "
            f"the published {source.name!r}. {_replace(source)}"
        )
    return content, f"{source.origin} Read from {path}."


def _not_found(source: Source, path: Path) -> str:
    return (
        f"The data set {source.name!r} was not found: {path} does not exist. Remedies: (1) set the "
        f"environment variable {DATA_VARIABLE} to a folder that holds {source.file}; (2) pass "
        f"download=True to fetch it once from its public source into {path.parent.parent}; (3) use "
        "a set that scikit-learn brings along: load_breast_cancer(), load_digits() or "
        "load_adult_or_bundled()."
    )


def _replace(source: Source) -> str:
    return f"Delete that file and load {source.name!r} again with download=True."


def _unpack(source: Source, packed: bytes) -> str | dict[str, np.ndarray]:
    if not packed:
        raise EOFError("the file is empty")
    if not source.array_names:
        return gzip.decompress(packed).decode("utf-8")
    with np.load(io.BytesIO(packed), allow_pickle=False) as stored:
        return {name: stored[name] for name in stored.files}


def _digest(source: Source, content: str | Mapping[str, np.ndarray]) -> str:
    digest = hashlib.sha256()
    if isinstance(content, str):
        digest.update(content.encode("utf-8"))
    else:
        for name in source.array_names:
            array = np.ascontiguousarray(content[name])
            digest.update(f"{name} {array.dtype.str} {array.shape}\n".encode())
            digest.update(array.data)
    return digest.hexdigest()


def _download(source: Source, path: Path) -> None:
    """Fetches, parses and checks the public files, then puts the result at ``path`` in one step."""
    raw = [_fetch(source, mirrors) for mirrors in source.urls]
    addresses = ", ".join(mirrors[0] for mirrors in source.urls)
    try:
        content = source.parse(raw)
        digest = _digest(source, content)
    except _DAMAGED as error:
        raise DatasetIntegrityError(
            f"The public file of {source.name!r} ({addresses}) has another format than the known "
            f"one: {error}. Get the file {source.file} by other means and set {DATA_VARIABLE}."
        ) from error
    if digest != source.sha256:
        raise DatasetIntegrityError(
            f"Expected content with SHA-256 {source.sha256} from {addresses}, got {digest}: the "
            f"published {source.name!r} has changed, or the transfer was cut short. Nothing was "
            "written."
        )
    _write_atomically(path, _pack(content))


def _fetch(source: Source, mirrors: tuple[str, ...]) -> bytes:
    failures = []
    for url in mirrors:
        request = urllib.request.Request(url, headers={"User-Agent": "numpyro_dp"})
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS) as response:
                return response.read()
        except (OSError, http.client.HTTPException) as error:
            failures.append(f"{url}: {error}")
    raise DatasetDownloadError(
        f"Could not download the data set {source.name!r} ({'; '.join(failures)}). Is this machine "
        f"offline? Download it elsewhere with download=True, copy {source.file} here, and set "
        f"{DATA_VARIABLE} to the folder that holds it."
    )


def _pack(content: str | dict[str, np.ndarray]) -> bytes:
    if isinstance(content, str):
        return gzip.compress(content.encode("utf-8"), mtime=0)
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **content)
    return buffer.getvalue()


def _write_atomically(path: Path, packed: bytes) -> None:
    """Writes beside the target and renames, so that no reader meets half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(packed)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
