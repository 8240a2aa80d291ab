"""Many private runs in one compiled call: seeds x learning rates x budgets x clip norms."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from importlib import metadata
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from numpyro_dp._validate import check_real
from numpyro_dp.core import PyTree
from numpyro_dp.model.records import Rows
from numpyro_dp.privacy.mechanism.adaptive import AdaptiveClip
from numpyro_dp.privacy.mechanism.clip_norm import ClipNorm
from numpyro_dp.privacy.plan import PrivacyReport
from numpyro_dp.run.results import PrivateLosses, SensitiveLosses, Trace
from numpyro_dp.run.session import Session
from numpyro_dp.run.settings import RunSettings
from numpyro_dp.run.spending import begun, noise_fields, plan_for, report_for, secret_of
from numpyro_dp.run.state import RunState, SensitiveState
from numpyro_dp.run.sweep_folder import SweepFolder, fingerprint, traced

__all__ = ["SweepPlan", "SweepResult", "SweepRun", "combinations", "run_sweep"]


class SweepRun(NamedTuple):
    """One run of a sweep; its fields are those of :class:`SweepResult` without the leading axis."""

    params: dict[str, Any]
    trace: Trace
    losses: PrivateLosses | SensitiveLosses | None
    privacy: PrivacyReport


class SweepResult(NamedTuple):
    """Results of :meth:`numpyro_dp.DPSVI.sweep`, with a leading axis ``runs``.

    Attributes:
        params: Constrained parameters.
        trace: Thinned private iterates, ``params`` of shape ``(runs, kept, ...)``.
        losses: Loss curves where they were asked for, values of shape ``(runs, kept)``.
        labels: What each run is: arrays ``seed``, ``clip_norm`` and ``noise_multiplier`` of shape
            ``(runs,)``, and ``epsilon``: what it was asked to spend, or has spent without a budget.
            Clip norms that are no numbers are numbered. ``learning_rate``, where it was swept.
        privacy: What each run spends *by itself* (or with earlier runs in the driver's budget).
            Whoever publishes several of them, or the best of them, spends at most the sum of their
            epsilons at the sum of their deltas; ``PrivacyBudget.after`` composes them.
    """

    params: dict[str, Any]
    trace: Trace
    losses: PrivateLosses | SensitiveLosses | None
    labels: dict[str, np.ndarray]
    privacy: tuple[PrivacyReport, ...]

    def one(self, index: int) -> SweepRun:
        """Returns one run, as post-processing takes it."""
        pick = lambda tree: jax.tree.map(lambda leaf: leaf[index], tree)  # noqa: E731
        losses = self.losses and self.losses._replace(values=self.losses.values[index])
        trace = Trace(self.trace.steps, *pick(self.trace[1:]))
        return SweepRun(pick(self.params), trace, losses, self.privacy[index])

    def __repr__(self) -> str:
        """Names the fields, and what publishing costs."""
        number = len(self.privacy)
        total = sum(report.epsilon for report in self.privacy)
        return (
            f"SweepResult({number} runs, params of {sorted(self.params)}, {self.trace!r}). Each "
            f"run spends its own epsilon; all of them together at most epsilon = {total:.4g} at "
            "the sum of their deltas."
        )


class SweepPlan(NamedTuple):
    """What the runs of a sweep have in common; see ``DPSVI.sweep``."""

    settings: RunSettings
    rng_keys: Array
    num_steps: int
    learning_rates: Any
    trace_size: int | None
    chunk_size: int | None


def run_sweep(
    sweep: SweepPlan,
    axes: list[RunSettings],
    starts: list[SensitiveState],
    session: Session,
    rows: Rows,
    folder: Any,
) -> SweepResult:
    """Plans every combination before a record is read, then runs all.

    Args:
        sweep: What the runs have in common.
        axes: Settings of each combination, from :func:`combinations`.
        starts: A first state for each seed.
        session: Compiled functions.
        rows: The records.
        folder: Keeps finished chunks; ``None`` keeps nothing.
    """
    settings, num_steps, rates = sweep.settings, sweep.num_steps, sweep.learning_rates
    secret, number = secret_of(settings), len(starts)
    starts = [_at_rate(start, rate) for rate in _rates(rates) for start in starts]
    plans = [plan_for(each, session.num_examples, num_steps) for each in axes]
    reports = [report_for(plan, num_steps, starts[0].identity) for plan in plans]
    states: list[SensitiveState] = []
    for plan, each in zip(plans, axes, strict=True):
        mechanism_state = session.mechanism_state(each.clip_norm)
        for start in starts:
            own = jax.random.fold_in(secret, len(states))
            fields = noise_fields(settings, own, plan, mechanism_state)
            states.append(start._replace(**fields))
    fitting = len(states)
    if not settings.several_processes:  # which would have to agree
        fitting = runs_that_fit(session.shapes_of_run(states[0], rows, sweep.trace_size), rows)
    chunk = min(sweep.chunk_size or fitting, len(states))
    labels = _labels(axes, reports, number, rates)

    def run(states: RunState, rows: Rows = rows) -> PyTree:
        return session.run_many(states, rows, num_steps, sweep.trace_size)[1:]

    store = None
    if folder:
        meaning = _meaning(sweep, axes, reports, labels, session.num_examples, chunk)
        public = [state.optim_state for state in states], rows.shared
        program, like = traced(run, (_stacked(states[:chunk]), rows), public)
        store = SweepFolder(folder, meaning | {"program": program}, like)
    found = _in_chunks(run, states, chunk, store, functools.partial(begun, settings))
    own = tuple(report.of_another_run() for report in reports for _ in starts)
    return SweepResult(*found, labels, own)


def _meaning(
    sweep: SweepPlan,
    axes: list[RunSettings],
    reports: list[PrivacyReport],
    labels: dict[str, np.ndarray],
    num_examples: int,
    chunk: int,
) -> dict[str, Any]:
    """What must be the same where a folder's chunks are read again."""
    return {name: column.tolist() for name, column in labels.items()} | {
        "rng_keys": np.asarray(jax.vmap(_key_data)(sweep.rng_keys)).tolist(),
        "num_steps": sweep.num_steps, "trace_size": sweep.trace_size, "chunk_size": chunk,
        "records": num_examples,
        "reports": [str(dataclasses.replace(each, repetition=False)) for each in reports],
        "clip_norms": [str(each.clip_norm) for each in axes],
        "mechanism": repr(sweep.settings.mechanism),
        "secret": fingerprint(sweep.settings.secret_key),
        "versions": {name: metadata.version(name) for name in ("jax", "numpyro")},
    }  # fmt: skip


def runs_that_fit(of_a_run: PyTree, rows: Rows) -> int:
    """How many runs side by side need at most a quarter of the device's memory, one at least.

    Args:
        of_a_run: Shapes and types of what one run keeps; twice that is reckoned with.
        rows: The records, on the devices.
    """
    size = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(of_a_run))
    device = min(rows.arrays[0].devices(), key=lambda device: device.id)
    return max(1, _memory(device) // 4 // (2 * size))


def _memory(device: jax.Device) -> int:
    """Bytes of a device's memory, the host's if it does not say; 4 GB if neither does."""
    known = (device.memory_stats() or {}).get("bytes_limit")
    if known is None and hasattr(os, "sysconf"):
        known = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return known or 2**32


def _key_data(key: Array) -> Array:
    return jax.random.key_data(key) if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else key


def _rates(rates: Any) -> list[Any]:
    if rates is None:
        return [None]
    return [
        check_real("learning_rate", rate, low=0.0, low_open=True, high=np.inf, high_open=True)
        for rate in _items("learning_rate", rates)
    ]


def _at_rate(start: SensitiveState, rate: float | None) -> SensitiveState:
    """The state with another step size in its optimiser."""
    if rate is None:
        return start
    named = optax.tree_utils.tree_get_all_with_path(start.optim_state, "learning_rate")
    if not named:
        raise ValueError(
            "Expected an optimiser that keeps its learning_rate in its state, for a sweep over "
            "them. Pass DPSVI(..., optax.inject_hyperparams(optax.adam)(learning_rate=1e-3))."
        )
    value = jnp.asarray(rate, jnp.asarray(named[0][1]).dtype)
    return start._replace(
        optim_state=optax.tree_utils.tree_set(start.optim_state, learning_rate=value)
    )


def _check_keeps(settings: RunSettings, folder: Any) -> None:
    if settings.allow_sensitive:
        raise ValueError(
            f"Expected no folder={str(folder)!r} with allow_sensitive=True: it would keep losses "
            "that nothing protects. Sweep without a folder, or without losses."
        )
    if settings.several_processes:
        raise ValueError(
            f"Expected a mesh of one process for a sweep with folder={str(folder)!r}, got one of "
            "several, which would have to agree on what is finished. Sweep without a folder."
        )


def _stacked(states: list[SensitiveState]) -> RunState:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *(state.opened for state in states))


def _in_chunks(
    run: Callable[[RunState], PyTree],
    states: list[SensitiveState],
    chunk: int,
    store: SweepFolder | None,
    started: Callable[..., AbstractContextManager[None]],
) -> tuple[PyTree, Trace, PrivateLosses | SensitiveLosses | None]:
    parts = []
    # Without a store nothing is left of a sweep that fails: it gives all its keys back.
    with started(*([] if store else states)):
        for first in range(0, len(states), chunk):
            own = states[first : first + chunk]
            # A last chunk of another size would be compiled again: repeats, dropped below.
            some = own + own[-1:] * (chunk - len(own))
            found = store and store.load(first)
            if found is None:
                with started(*(own if store else [])):
                    found = jax.block_until_ready(run(_stacked(some)))
                    if store:
                        store.save(first, found)
            parts.append(found)

    def join(*leaves: Any) -> Any:
        return np.concatenate([np.asarray(leaf) for leaf in leaves])[: len(states)]

    params = jax.tree.map(join, *(part[0] for part in parts))
    trace = Trace(parts[0][1].steps, *jax.tree.map(join, *(part[1][1:] for part in parts)))
    losses = parts[0][2]
    if losses is not None:
        losses = losses._replace(values=join(*(part[2].values for part in parts)))
    return params, trace, losses


def combinations(
    settings: RunSettings, folder: Any, epsilon: Any, noise_multiplier: Any, clip_norm: Any
) -> list[RunSettings]:
    """Returns the settings of each combination of budget, noise and clip norm, the last slowest.

    Raises:
        ValueError: If they contradict each other or the driver.
    """
    if folder:
        _check_keeps(settings, folder)
    noises: list[dict[str, Any]] = [{}]
    if epsilon is not None and noise_multiplier is not None:
        raise ValueError(
            "Expected epsilon or noise_multiplier, got both. The budget sets the noise."
        )
    if epsilon is not None:
        budget = settings.budget
        if budget is None:
            raise ValueError(
                f"Expected a driver with a budget for a sweep over epsilon={list(epsilon)}: its "
                "delta and relation hold for all runs. Pass DPSVI(..., budget=PrivacyBudget(...))."
            )
        budgets = [
            dataclasses.replace(budget, epsilon=value) for value in _items("epsilon", epsilon)
        ]
        noises = [{"budget": each, "noise_multiplier": None} for each in budgets]
    elif noise_multiplier is not None:
        values = _items("noise_multiplier", noise_multiplier)
        noises = [{"noise_multiplier": value} for value in values]
    norms = _clip_norms(clip_norm, settings.clip_norm)
    axes = [settings.changed(clip_norm=norm, **noise) for norm in norms for noise in noises]
    for norm in norms:
        if norm.bounded != settings.clip_norm.bounded:
            raise ValueError(
                f"Expected clip norms that are all finite or all infinite, as that of "
                f"DPSVI(clip_norm={settings.clip_norm}), got {norm}. Use another driver for "
                "unbounded runs."
            )
    return axes


def _labels(
    axes: list[RunSettings], reports: list[PrivacyReport], seeds: int, rates: Any
) -> dict[str, np.ndarray]:
    norms = list(dict.fromkeys(each.clip_norm for each in axes))
    columns = {
        "clip_norm": [
            each.clip_norm.given if isinstance(each.clip_norm.given, float)
            else norms.index(each.clip_norm) for each in axes
        ],
        "epsilon": [
            each.budget.epsilon if each.budget else report.epsilon
            for each, report in zip(axes, reports, strict=True)
        ],
        "noise_multiplier": [report.noise_multiplier for report in reports],
    }  # fmt: skip
    inner = 1 if rates is None else len(rates)
    labels = {name: np.repeat(column, seeds * inner) for name, column in columns.items()}
    labels["seed"] = np.tile(np.arange(seeds), len(axes) * inner)
    if rates is not None:
        labels["learning_rate"] = np.tile(np.repeat(np.asarray(rates, float), seeds), len(axes))
    return labels


def _items(name: str, values: Any) -> list[Any]:
    if isinstance(values, Mapping | str | AdaptiveClip) or not hasattr(values, "__len__"):
        raise TypeError(f"Expected a sequence, got {name}={values!r}. Pass [{values!r}] for one.")
    if not len(values):
        raise ValueError(f"Expected at least one value, got an empty {name}.")
    return list(values)


def _clip_norms(clip_norm: Any, usual: ClipNorm) -> list[ClipNorm]:
    if clip_norm is None:
        return [usual]
    norms = [ClipNorm.of(norm) for norm in _items("clip_norm", clip_norm)]
    for norm in norms:
        if (norm.entries, norm.adaptive) != (usual.entries, usual.adaptive):
            raise ValueError(
                f"Expected clip norms of the form of DPSVI(clip_norm={usual}), got {norm}. Name "
                "the same entries, each with a number in all runs or with an AdaptiveClip in all "
                "of them."
            )
    return norms
