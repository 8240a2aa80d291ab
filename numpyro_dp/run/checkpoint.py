"""Checkpoints: files from which the same call continues a run that was stopped or killed.

A folder has one file, ``SENSITIVE_checkpoint``. It has a first line with format and version, the
SHA-256 of all that follows, and arrays in NumPy's ``npz`` format without pickled objects. The array
``about`` is JSON. Its ``meaning`` is what must be the same in a call that continues, with a hash of
the compiled program. It also has a keyed hash of all records together (``salt``, ``records``), and
the name and date of the privacy report (``run``, ``date``). The other arrays are the progress of
the run, with the keys of all later noise.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import hmac
import io
import json
import os
import pathlib
import pickle
import secrets
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh

from numpyro_dp._tree import is_key
from numpyro_dp._validate import check_int
from numpyro_dp.core import PyTree
from numpyro_dp.privacy.plan import PrivacyReport
from numpyro_dp.privacy.statement import version_of
from numpyro_dp.run.folder import different, fingerprint, hash_of, locked, write_for_owner
from numpyro_dp.run.settings import RunSettings
from numpyro_dp.run.spending import begun, charge, used
from numpyro_dp.run.state import SensitiveState
from numpyro_dp.sums.devices import any_process, copied, from_first

__all__ = ["Checkpoint", "check_every", "meaning_of", "started", "without_own_run"]

_FILE = "SENSITIVE_checkpoint"
_HEAD = b"numpyro_dp checkpoint, version 1\n"


class Checkpoint:
    r"""Keeps the progress of a run in a folder. A context manager, which locks the folder.

    Args:
        folder: The folder. It is made if there is none.
        every: About how many steps lie between two checkpoints. By default a 25th of the run.
        meaning: From :func:`meaning_of`.
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
        meaning: dict[str, Any],
        records: tuple[Any, ...],
        mesh: Mesh | None = None,
    ) -> None:
        self.every, self._meaning = every, json.loads(json.dumps(meaning))
        self._records, self._place, self._mesh = records, folder, mesh
        self._about: dict[str, Any] = {}
        self._found: list[np.ndarray] | None = None

    def __enter__(self) -> Checkpoint:
        """Locks the folder and reads what it holds."""
        with contextlib.ExitStack() as stack:

            def opened() -> bytes:
                folder = stack.enter_context(locked("checkpoint", self._place))
                if not (folder / _FILE).exists():
                    return b""
                content = _content(folder / _FILE)
                what = f"checkpoint={str(folder)!r} holds another run"
                different(what, _stored(content)[0]["meaning"], self._meaning)
                return content

            content = from_first(self._mesh, opened)
            self._folder = pathlib.Path(self._place)
            if content:
                self._about, self._found = _stored(content)
                self._check_records()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        """Unlocks the folder."""
        self._stack.close()

    @property
    def resumed(self) -> bool:
        """Whether the folder had the progress of an earlier call."""
        return self._found is not None

    def start(
        self, settings: RunSettings, progress: PyTree, report: PrivacyReport
    ) -> tuple[PyTree, PrivacyReport]:
        """Returns the progress to go on from, and the report with the run's name and date.

        Without an earlier call it writes the progress before the first step. A run that is killed
        later is then charged to a ledger once.
        """
        if self._found is None:
            own = {"run": report.run, "date": report.date, "salt": secrets.token_hex(32)}
            own = json.loads(from_first(self._mesh, lambda: json.dumps(own).encode()))
            records = hash_of(self._records, own["salt"], self._mesh)
            self._about = own | {"meaning": self._meaning, "records": records}
            self.save(progress)
        else:
            leaves, structure = jax.tree.flatten(progress)
            found = [_like(*pair) for pair in zip(self._found, leaves, strict=True)]
            progress = copied(settings.mesh, jax.tree.unflatten(structure, found))
        named = dataclasses.replace(report, run=self._about["run"], date=self._about["date"])
        return progress, named

    def forget(self) -> None:
        """Removes the progress of a run that was refused before its first step."""

        def removed() -> bytes:
            (self._folder / _FILE).unlink(missing_ok=True)
            return b""

        from_first(self._mesh, removed)

    def save(self, progress: PyTree) -> None:
        """Writes the progress. The file is replaced only when the new one is complete."""
        leaves = [
            np.asarray(jax.random.key_data(leaf) if is_key(leaf) else leaf)
            for leaf in jax.tree.leaves(progress)
        ]
        # NumPy's files do not store the names of dtypes such as bfloat16: only bytes go there.
        arrays = {f"{i}": np.frombuffer(leaf.tobytes(), np.uint8) for i, leaf in enumerate(leaves)}
        about = np.frombuffer(json.dumps(self._about).encode(), np.uint8)
        stored = io.BytesIO()
        np.savez(stored, about=about, **arrays)
        body = stored.getvalue()
        content = _HEAD + hashlib.sha256(body).digest() + body
        from_first(self._mesh, lambda: write_for_owner(self._folder / _FILE, content) or b"")

    def _check_records(self) -> None:
        found = hash_of(self._records, self._about["salt"], self._mesh)
        if not hmac.compare_digest(self._about["records"], found):
            raise ValueError(
                f"checkpoint={str(self._folder)!r} holds a run on other records. The noise of its "
                "next steps must not meet other values. Use another folder."
            )


def _content(path: pathlib.Path) -> bytes:
    """Returns the content of a file that is whole."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error}. Use another folder.") from error
    first, body = content[: len(_HEAD)], content[len(_HEAD) + 32 :]
    if first != _HEAD:
        raise ValueError(
            f"{path} is damaged, or of another version of numpyro_dp. Use another folder."
        )
    if hashlib.sha256(body).digest() != content[len(_HEAD) : len(_HEAD) + 32]:
        raise ValueError(f"{path} is damaged, so its run cannot go on. Use another folder.")
    return content


def _stored(content: bytes) -> tuple[dict[str, Any], list[np.ndarray]]:
    """Returns what a file says about its run, and its arrays."""
    with np.load(io.BytesIO(content[len(_HEAD) + 32 :])) as stored:
        arrays = [stored[f"{i}"] for i in range(len(stored.files) - 1)]
        return json.loads(stored["about"].tobytes()), arrays


@contextlib.contextmanager
def started(
    settings: RunSettings,
    states: list[SensitiveState],
    progress: PyTree,
    report: PrivacyReport,
    kept: Checkpoint | None,
    left: Callable[[PyTree], tuple[list[SensitiveState], int]],
    covered: int | None,
) -> Iterator[tuple[PyTree, PrivacyReport]]:
    """Registers and charges a run before it reads a record, and finds its progress.

    Args:
        settings: The settings of the run.
        states: Its first states.
        progress: Its progress before the first step.
        report: The report of the whole run.
        kept: Its checkpoint, or ``None``.
        left: Progress -> states, and the number of steps that each has left.
        covered: All steps that it may take, or ``None`` for a run that goes on from a state. Such a
            run was registered and charged before.

    Yields:
        The progress from which to go on, and the report with the run's name and date.

    Guarantee:
        A checkpoint is written after its run is registered, so noise that was used is never
        written to a new one. Steps that a checkpoint has left are marked as used in this process.
    """
    with contextlib.ExitStack() as stack:
        if kept is not None:
            stack.enter_context(kept)
        resumed = kept is not None and kept.resumed
        if covered is not None and not resumed:
            stack.enter_context(begun(settings, *states))
        if kept is not None:
            progress, report = kept.start(settings, progress, report)
        try:
            now, steps = left(progress)
            for state in now if steps else ():
                stack.enter_context(used(settings, state, steps))
            if covered is not None:
                charge(settings, now[0], covered, report.run, again=resumed)
        except ValueError:  # a refusal. After another error the run may have been charged
            if kept is not None and not resumed:
                kept.forget()
            raise
        yield progress, report


def check_every(every: Any, checkpoint: Any) -> None:
    """Raises unless ``every`` is ``None``, or an integer >= 1 beside a checkpoint."""
    if every is None:
        return
    check_int("every", every, low=1)
    if checkpoint is None:
        raise ValueError("every= says how often a checkpoint is written. Pass checkpoint= too.")


def without_own_run(settings: RunSettings, folder: Any) -> RunSettings:
    """Returns settings whose budget does not count the run of a folder as an earlier run.

    A budget for what is left of a ledger counts all runs in it. If a call continues a run, the
    ledger has this run already. Processes of a mesh use the ledger of the first one.
    """
    if settings.charges is None or (folder is None and not settings.several_processes):
        return settings
    mine = settings.budget.earlier

    def others() -> bytes:
        path = None if folder is None else pathlib.Path(folder) / _FILE
        own = _stored(_content(path))[0]["run"] if path and path.exists() else ""
        return pickle.dumps(tuple(each for each in mine if each.run != own))

    earlier = pickle.loads(from_first(settings.mesh, others))
    if not any_process(settings.mesh, earlier != mine):
        return settings
    return settings.changed(budget=dataclasses.replace(settings.budget, earlier=earlier))


def meaning_of(
    driver: str,
    settings: RunSettings,
    report: PrivacyReport,
    rng_key: Array,
    program: str,
    **own: Any,
) -> dict[str, Any]:
    """Returns what must be the same when a call continues a run.

    Args:
        driver: Name of the driver.
        settings: Its settings.
        report: Report of the whole run.
        rng_key: Key of the call.
        program: Hash of the compiled program and of public values.
        **own: Further JSON values.
    """
    devices = jax.devices() if settings.mesh is None else settings.mesh.devices.flatten()
    versions = ("numpyro_dp", "jax", "jaxlib", "numpyro", "numpy")
    return own | {
        "driver": driver,
        "versions": {name: version_of(name) for name in versions},
        "device": f"{devices[0].platform} {devices[0].device_kind}",
        "devices": 1 if settings.mesh is None else len(devices),
        "processes": jax.process_count() if settings.several_processes else 1,
        "rng_key": np.asarray(jax.random.key_data(rng_key)).tolist(),
        "clip_norm": str(settings.clip_norm),
        "mechanism": repr(settings.mechanism),
        "secret_key": fingerprint(settings.secret_key),
        "report": str(dataclasses.replace(report, date="")),
        "program": program,
    }


def _like(found: np.ndarray, leaf: Any) -> Any:
    """Returns stored bytes as an array like a leaf."""
    if not is_key(leaf):
        array = np.frombuffer(found.tobytes(), leaf.dtype).reshape(leaf.shape)
        return array if isinstance(leaf, np.ndarray | np.generic) else jnp.asarray(array)
    data = jax.random.key_data(leaf)
    array = jnp.asarray(np.frombuffer(found.tobytes(), data.dtype).reshape(data.shape))
    return jax.random.wrap_key_data(array, impl=jax.random.key_impl(leaf))
