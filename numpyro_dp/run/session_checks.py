"""Checks of an estimator, an optimiser, a sampler, a mechanism and a fold before they run."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_dp._tree import filled, widen
from numpyro_dp.core import Estimator, Fold, MechanismState, PyTree, Released
from numpyro_dp.model.held import held_by_function
from numpyro_dp.model.public import UnsupportedModelError
from numpyro_dp.privacy.mechanism.clip_norm import ClipNorm
from numpyro_dp.privacy.plan import PrivacyReport
from numpyro_dp.run.mechanism_trial import try_mechanism
from numpyro_dp.run.settings import Method, RunSettings
from numpyro_dp.run.state import SensitiveState
from numpyro_dp.run.step import optimised

__all__ = [
    "check_fold_holds_no_records",
    "check_holds_no_records",
    "check_signal",
    "finite_start",
]

_ATTEMPTS = 10


def check_signal(
    problem: Any, estimator: Estimator, params: dict[str, Any], clip_norm: ClipNorm
) -> Callable[[dict[str, Any]], bool]:
    """Raises unless ``clip_norm`` names entries of the estimator's signal.

    Returns:
        ``params -> bool``: whether any invented record has a finite signal at ``params``.
    """

    def signal(params: dict[str, Any], example: PyTree) -> PyTree:
        return estimator.signal(estimator.prepare(jax.random.key(0), params), example)

    if clip_norm.entries != (...,):
        entries = filled(jax.eval_shape(signal, params, problem.blank_example()))
        clip_norm.check_entries(entries)
    return functools.partial(_finite, problem, jax.jit(signal))


def finite_start(prepare: Callable[[int], Any], finite: Callable[[Any], bool]) -> Any:
    """Returns the first start at which an invented record has a finite signal.

    NumPyro's automatic guides also draw initial values until the gradient is finite, but with
    ``SVI`` they read the records. A record without a finite signal counts as 0. If all records
    count as 0, a run spends its whole budget and returns the prior and noise.

    Args:
        prepare: Number of an attempt -> start.
        finite: Start -> whether an invented record has a finite signal.

    Raises:
        UnsupportedModelError: If no attempt gives such a start.
    """
    for attempt in range(_ATTEMPTS):
        start = prepare(attempt)
        if finite(start):
            return start
    raise UnsupportedModelError(
        "The likelihood has no finite gradient for any invented record (normal values, ones, "
        f"halves, identities), at {_ATTEMPTS} initial values. Records without a finite gradient "
        "count as 0, and the run would return the prior. Look for sqrt or log at 0, a where() "
        "whose other branch is not finite, or initial values that overflow (init_params= or the "
        "guide's init_loc_fn=). If a discrete latent is summed out, every value of it must leave "
        "the density finite: for example Poisson(rate * k + 1e-6) instead of Poisson(rate * k)."
    )


def _finite(problem: Any, signal: Callable[..., PyTree], params: dict[str, Any]) -> bool:
    """Whether any invented record has a finite signal."""
    normal, ones = problem.records.layout.invented()
    # Most sites support 1. Halves serve sites on proportions, and identities those on matrices.
    halves = tuple(leaf // 2 if leaf.dtype.kind in "iub" else leaf / 2 for leaf in ones)
    squares = tuple(_identity_like(leaf) for leaf in ones)
    for rows in (normal, ones, halves, squares):
        extra = problem.blank_example()[len(rows) :]
        found = signal(params, tuple(leaf[0] for leaf in rows) + extra)
        if all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(found)):
            return True
    return False


def _identity_like(rows: Array) -> Array:
    """Returns identities if rows are square matrices, else the rows."""
    square = rows.ndim > 2 and rows.shape[-1] == rows.shape[-2]
    return (
        jnp.broadcast_to(jnp.eye(rows.shape[-1], dtype=rows.dtype), rows.shape) if square else rows
    )


def check_holds_no_records(
    problem: Any,
    build_estimator: Callable[[tuple[Array, ...], MechanismState], Estimator],
    method: Method,
    settings: RunSettings,
    optim_state: PyTree,
) -> PyTree:
    """Raises if estimator, optimiser, mechanism or sampler captured arrays that may be records.

    It traces a step on one record, so arrays in the model's derivative rules are found too.

    Args:
        problem: Model and guide as functions.
        build_estimator: (public arrays, mechanism state) -> estimator.
        method: Method with the optimiser.
        settings: Settings with the clip norm, the mechanism and the sampler.
        optim_state: State of the optimiser.

    Returns:
        Shapes of the sum of the signals.
    """
    public, optim, shapes = problem.records.public, method.optim, {}

    def step(
        optim_state: PyTree, state: MechanismState, example: PyTree, shared: PyTree
    ) -> list[Array]:
        estimator = build_estimator(shared, state)
        prepared = estimator.prepare(jax.random.key(0), optim.get_params(optim_state))
        signal = estimator.signal(prepared, example)
        shapes.update(jax.eval_shape(widen, signal))
        update = estimator.pull_back(prepared, Released(signal, jnp.zeros(())))
        return jax.tree.leaves(optim.get_params(optimised(optim, update, optim_state)))

    state = MechanismState(settings.clip_norm.as_arrays())
    what = "step (the model's derivative, the estimator or the optimiser)"
    public.check(what, step, optim_state, state, problem.blank_example(), problem.shared)
    if not _is_ours(settings.sampler):
        start = settings.sampler.init(jax.random.key(0), problem.num_examples)
        public.check("sampler", settings.sampler.next, start)
    if not _is_ours(settings.mechanism):
        _check_mechanism(public, settings, shapes)
        try_mechanism(settings, shapes, problem.num_examples)
    return shapes


def _is_ours(value: Any) -> bool:
    return type(value).__module__.startswith("numpyro_dp.")


def _check_mechanism(public: Any, settings: RunSettings, shapes: PyTree) -> None:
    """Raises if a mechanism from outside this package captured arrays that may be records."""
    names = filled(shapes)

    def one_call(noise: Array, norm: ClipNorm, total: PyTree, squares: Any) -> Any:
        found = settings.mechanism(norm, noise)
        state = MechanismState(norm, found.init(shapes))
        noisy, _ = found.privatise(jax.random.key(0), total, state)
        return noisy, found.scales(names, squares, 1.0)

    norm = settings.norm_with_loss.fixed().as_arrays()
    squares = tuple(jnp.ones(()) for _ in norm.blocks(names))
    total = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), dict(shapes))
    public.check("mechanism", one_call, jnp.ones(()), norm, total, squares)


def check_fold_holds_no_records(
    fold: Fold | None, session: Any, state: SensitiveState, report: PrivacyReport
) -> PrivacyReport:
    """Raises if a fold captured arrays that may be records.

    Args:
        fold: The fold, or ``None``.
        session: Session with the problem.
        state: State with which the run starts.
        report: Report of the run.

    Returns:
        The report, with the public arrays of the fold.
    """
    if fold is None:
        return report
    public = session.problem.records.public.copy()
    params = session.problem.constrain(session.method.optim.get_params(state.optim_state))
    before = public.arrays
    public.check("fold", fold.init, params)
    public.check("fold", fold.update, jax.eval_shape(fold.init, params), params)
    public.take("fold", held_by_function(fold.result))
    further = tuple(each for each in public.arrays if each not in before)
    return dataclasses.replace(report, public=report.public + further)
