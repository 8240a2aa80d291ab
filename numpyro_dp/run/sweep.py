"""Many private runs in one compiled call: seeds x learning rates x budgets x clip norms."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping
from typing import Any, NamedTuple, SupportsInt

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from numpyro_dp._validate import check_real
from numpyro_dp.core import Args, PyTree, Values
from numpyro_dp.model.records import Rows
from numpyro_dp.privacy.keys import as_secret_key
from numpyro_dp.privacy.mechanism.clip_norm import AdaptiveClip, ClipNorm
from numpyro_dp.privacy.plan import PrivacyReport
from numpyro_dp.run.checkpoint import checkpoint_of, started, traced
from numpyro_dp.run.results import PrivateLosses, Trace
from numpyro_dp.run.session import Session
from numpyro_dp.run.settings import RunSettings
from numpyro_dp.run.state import (
    RunState,
    SensitiveState,
    noise_fields,
    plan_for,
    report_for,
    secret_of,
)


class SweepRun(NamedTuple):
    """One run of a sweep: the fields of :class:`SweepResult` without the leading axis.

    It has no ``posterior``, because a sweep keeps no sums of scores. Call ``run`` for that.
    """

    params: Values
    trace: Trace
    losses: PrivateLosses | None
    privacy: PrivacyReport


class SweepResult(NamedTuple):
    """Results of :meth:`numpyro_dp.DPSVI.sweep`, with a leading axis ``runs``.

    Attributes:
        params: Constrained parameters.
        trace: Thinned private iterates, with ``params`` of shape ``(runs, kept, ...)``.
        losses: Loss curves if the driver returns them, with values of shape ``(runs, kept)``.
        labels: Settings of each run, as arrays of shape ``(runs,)``: ``seed``, ``clip_norm``,
            ``noise_multiplier``, ``epsilon``, and ``learning_rate`` if you swept it. ``epsilon`` is
            the budget, or the epsilon spent without a budget. A clip norm that is not a number
            appears as its position.
        privacy: What each run spends *by itself*, or with earlier runs in the driver's budget. If
            you publish several runs, or the best of them, you spend at most the sum of their
            epsilons at the sum of their deltas. ``PrivacyBudget.after`` composes them.
    """

    params: Values
    trace: Trace
    losses: PrivateLosses | None
    labels: dict[str, np.ndarray]
    privacy: tuple[PrivacyReport, ...]

    def one(self, index: int) -> SweepRun:
        """Returns one run, for post-processing."""
        pick = lambda tree: jax.tree.map(lambda leaf: leaf[index], tree)  # noqa: E731
        losses = self.losses and self.losses._replace(values=self.losses.values[index])
        trace = Trace(self.trace.steps, *pick(self.trace[1:]))
        return SweepRun(pick(self.params), trace, losses, self.privacy[index])

    def to_frame(self, **scores: object) -> Any:
        """Returns a pandas data frame with one row for each run.

        Args:
            **scores: Further columns: a function of :meth:`one` that gives a number, or an array of
                shape ``(runs,)``.

        Returns:
            The ``labels``, the epsilon and delta that each run spent (``epsilon_spent``,
            ``delta``), and the scores. A score that reads records is sensitive.

        Raises:
            ImportError: If pandas is not installed.
            ValueError: If a score has the name of another column, or another shape.
        """
        try:
            import pandas as pd
        except ImportError as error:
            raise ImportError(
                "to_frame needs pandas, which is not installed. Run pip install pandas, or read "
                "labels and params."
            ) from error
        columns: dict[str, np.ndarray] = dict(self.labels)
        columns["epsilon_spent"] = np.array([report.epsilon for report in self.privacy])
        columns["delta"] = np.array([report.delta for report in self.privacy])
        runs = [self.one(index) for index in range(len(self.privacy))]
        for name, score in scores.items():
            if name in columns:
                raise ValueError(f"The frame has a column {name!r} already. Rename the score.")
            values = (
                np.array([score(run) for run in runs]) if callable(score) else np.asarray(score)
            )
            if values.shape != (len(runs),):
                raise ValueError(
                    f"Expected one number for each of {len(runs)} runs, got an array of shape "
                    f"{values.shape} for {name!r}."
                )
            columns[name] = values
        return pd.DataFrame(columns)

    def __repr__(self) -> str:
        """Names the fields and the cost of publishing."""
        number = len(self.privacy)
        total = sum(report.epsilon for report in self.privacy)
        return (
            f"SweepResult({number} runs, params of {sorted(self.params)}, {self.trace!r}). Each "
            f"run spends its own epsilon. All runs together spend at most epsilon = {total:.4g} at "
            "the sum of their deltas."
        )


class SweepProgress(NamedTuple):
    """How far a sweep is. Sensitive until it is finished.

    Attributes:
        secret: Words of its secret key, unless the caller gave it. Zeros after the last chunk: the
            key would reveal the noise of all results.
        done: Number of finished runs.
        found: Their results, with zeros for runs to come.
    """

    secret: np.ndarray
    done: SupportsInt
    found: PyTree


def run_sweep(
    settings: RunSettings,
    axes: list[RunSettings],
    starts: list[SensitiveState],
    session: Session,
    rows: Rows,
    records: Args,
    *,
    rng_keys: Array,
    num_steps: int,
    rates: Any,
    trace_size: int | None,
    chunk_size: int | None,
    checkpoint: str | os.PathLike[str] | None,
) -> SweepResult:
    """Plans all combinations before it reads a record, then runs them.

    ``axes`` come from :func:`combinations`, and ``starts`` has a first state for each seed.
    ``records`` are the arrays as they were passed. ``DPSVI.sweep`` describes the other arguments.
    """
    seeds = len(starts)
    if rates is not None:
        starts = [
            _at_rate(start, rate) for rate in _items("learning_rate", rates) for start in starts
        ]
    plans = [plan_for(each, session.num_examples, num_steps) for each in axes]
    reports = [report_for(plan, num_steps, starts[0].identity) for plan in plans]

    def states_of(secret: Array) -> list[SensitiveState]:
        found: list[SensitiveState] = []
        for plan, each in zip(plans, axes, strict=True):
            mechanism_state = session.mechanism_state(each.clip_norm)
            for start in starts:
                # Each run has a key of its own, so that no two runs share noise.
                own = jax.random.fold_in(secret, len(found))
                fields = noise_fields(settings, own, plan, mechanism_state)
                found.append(start._replace(**fields))
        return found

    secret = secret_of(settings)
    states, number = states_of(secret), len(axes) * len(starts)
    fitting = number
    if not settings.several_processes:  # they would have to agree on the size of a chunk
        fitting = _runs_that_fit(session, states[0], rows, trace_size)
    chunk = min(chunk_size or fitting, number)
    labels = _labels(axes, reports, seeds, rates)
    # Each run has a name of its own. A ledger counts runs of one name once.
    own = [report.of_another_run() for report in reports for _ in starts]
    _, course = session.slots(states[0].opened, num_steps, trace_size, number=chunk)

    def run(states: RunState, rows: Rows = rows) -> PyTree:
        *found, losses = session.run_many(rows, session.begin_many(states, num_steps, trace_size))
        return *found, None if settings.privacy.loss_release is None else losses

    def blank(like: PyTree) -> PyTree:
        return jax.tree.map(lambda x: np.zeros((number, *x.shape[1:]), x.dtype), like)

    words = np.asarray(jax.random.key_data(secret)) * (settings.privacy.secret_key is None)
    progress, program = SweepProgress(words, np.int32(0), None), ""
    if checkpoint is not None:
        public = [state.optim_state for state in states], rows.shared
        program, like = traced(run, (_stacked(states[:chunk]), rows), public)
        progress = progress._replace(found=blank(like))
    kept = checkpoint_of(
        checkpoint, None, "sweep", settings, reports, rng_keys, lambda: program, records,
        **{name: column.tolist() for name, column in labels.items()},
        num_steps=num_steps, trace_size=trace_size, chunk_size=chunk,
        clip_norms=[str(each.clip_norm) for each in axes],
    )  # fmt: skip

    def left(progress: SweepProgress) -> tuple[list[SensitiveState], int]:
        nonlocal states
        if progress.done == number:
            return [], 0
        if kept is not None and kept.resumed and settings.privacy.secret_key is None:
            # The key of the call that was killed. Runs without a result start again with its noise.
            states = states_of(as_secret_key(progress.secret.tobytes()))
        return states, num_steps

    with started(settings, states, progress, own, kept, left, lambda: own) as (progress, own):
        found = progress.found
        for first in range(int(progress.done), number, chunk):
            some = states[first : first + chunk]
            # A shorter last chunk would be compiled again. Repeat a run instead, and drop it.
            part = jax.block_until_ready(run(_stacked(some + some[-1:] * (chunk - len(some)))))
            found = blank(part) if found is None else found
            done = first + len(some)
            for into, leaf in zip(jax.tree.leaves(found), jax.tree.leaves(part), strict=True):
                into[first:done] = np.asarray(leaf)[: len(some)]
            if kept is not None:
                secret = progress.secret * (done < number)
                kept.save(SweepProgress(secret, np.int32(done), found))
    params, iterates, norms, values = found
    losses = None if values is None else PrivateLosses(course.steps, values)
    return SweepResult(params, Trace(course.steps, iterates, norms), losses, labels, tuple(own))


def _runs_that_fit(
    session: Session, state: SensitiveState, rows: Rows, trace_size: int | None
) -> int:
    """Returns how many runs fit in a quarter of the device's memory, at least one."""

    def size(leaf: PyTree, leading: int = 1) -> int:
        return leading * math.prod(leaf.shape) * leaf.dtype.itemsize

    batch, _ = jax.eval_shape(session.settings.sampler.next, state.sampler_state)
    drawn = batch.indices is not None
    records = batch.indices.size if drawn else session.num_examples
    params = jax.tree.leaves(session.method.optim.get_params(state.optim_state))
    numbers = sum(leaf.size for leaf in params)
    # Of each run, besides the records that all share: the state, the trace, and its batch.
    one = sum(map(size, jax.tree.leaves(state.optim_state)))
    one += sum(size(leaf, trace_size or 10) for leaf in params)
    one += sum(size(x, records) // session.num_examples for x in rows.arrays * drawn)
    # Microbatches hold about a million float32. The step needs four times the parameters.
    one += 4 * (min(records * numbers, 2**20) + 4 * numbers)
    # Twice that memory, to be sure.
    return max(1, _memory(jax.tree.leaves(rows.arrays)[0]) // 4 // (2 * one))


def _memory(array: Array) -> int:
    """Returns the bytes of its first device's memory, else of the host's memory, else 4 GB."""
    device = min(array.devices(), key=lambda device: device.id)
    known = (device.memory_stats() or {}).get("bytes_limit")
    if known is None and hasattr(os, "sysconf"):
        known = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return known or 2**32


def _at_rate(start: SensitiveState, rate: float) -> SensitiveState:
    """Sets the step size in the state's optimiser."""
    rate = check_real("learning_rate", rate, low=0.0, low_open=True, high=np.inf, high_open=True)
    named = optax.tree_utils.tree_get_all_with_path(start.optim_state, "learning_rate")
    if not named:
        raise ValueError(
            "A sweep over learning_rate needs an optimiser that keeps it in its state. Pass "
            "DPSVI(..., optax.inject_hyperparams(optax.adam)(learning_rate=1e-3))."
        )
    value = jnp.asarray(rate, jnp.asarray(named[0][1]).dtype)
    return start._replace(
        optim_state=optax.tree_utils.tree_set(start.optim_state, learning_rate=value)
    )


def _stacked(states: list[SensitiveState]) -> RunState:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *(state.opened for state in states))


def combinations(
    settings: RunSettings, epsilon: Any, noise_multiplier: Any, clip_norm: Any
) -> list[RunSettings]:
    """Returns settings for all combinations of budget, noise and clip norm, which varies slowest.

    Raises:
        ValueError: If the arguments contradict each other or the driver.
    """
    noises: list[dict[str, object]] = [{}]
    if epsilon is not None and noise_multiplier is not None:
        raise ValueError(
            "Expected epsilon or noise_multiplier, got both. The budget sets the noise. Drop one."
        )
    if epsilon is not None:
        budget = settings.budget
        if budget is None:
            raise ValueError(
                f"A sweep over epsilon={list(epsilon)} needs a driver with a budget, for delta and "
                "relation. Pass DPSVI(..., budget=PrivacyBudget(...))."
            )
        budgets = [dataclasses.replace(budget, epsilon=each) for each in _items("epsilon", epsilon)]
        noises = [{"budget": each, "noise_multiplier": None} for each in budgets]
    elif noise_multiplier is not None:
        values = _items("noise_multiplier", noise_multiplier)
        noises = [{"noise_multiplier": value} for value in values]
    norms = _clip_norms(clip_norm, settings.clip_norm)
    axes = [settings.changed(clip_norm=norm, **noise) for norm in norms for noise in noises]
    for norm in norms:
        # All runs share one compiled program, which either clips or does not.
        if norm.bounded != settings.clip_norm.bounded:
            raise ValueError(
                "Expected clip norms that are all finite or all infinite, like "
                f"DPSVI(clip_norm={settings.clip_norm}), got {norm}. Use another driver for runs "
                "without clipping."
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
                "the same entries. Give each a number in all runs, or an AdaptiveClip in all runs."
            )
    return norms
