"""What must hold of an estimator, an optimiser, a sampler and a fold before they run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_dp._tree import filled
from numpyro_dp.core import Estimator, Fold, PyTree
from numpyro_dp.model.held import held_by_function
from numpyro_dp.model.public import UnsupportedModelError
from numpyro_dp.privacy.mechanism import check_blocks, gaussian
from numpyro_dp.privacy.plan import PrivacyReport
from numpyro_dp.run.step import SensitiveState, optimised

__all__ = ["check_fold_holds_no_records", "check_holds_no_records", "check_signal"]


def check_signal(
    problem: Any, estimator: Estimator, params: dict[str, Any], clip_norm: Any
) -> None:
    """Raises unless the estimator fits the model, and ``clip_norm`` the signal's entries."""
    if estimator.check is not None:
        estimator.check(params)

    def signal(params: dict[str, Any], example: PyTree) -> PyTree:
        return estimator.signal(estimator.prepare(jax.random.key(0), params), example)

    if problem.model.structure.summed:
        _check_finite(problem, jax.jit(signal), params)
    if isinstance(clip_norm, Mapping):
        check_blocks(clip_norm, filled(jax.eval_shape(signal, params, problem.blank_example())))


def _check_finite(problem: Any, signal: Callable[..., PyTree], params: dict[str, Any]) -> None:
    """Raises if no invented record has a signal: impossible values of a summed latent, say."""
    for rows in problem.model.structure.layout.invented():
        extra = problem.blank_example()[len(rows) :]
        found = signal(params, tuple(leaf[0] for leaf in rows) + extra)
        if all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(found)):
            return
    raise UnsupportedModelError(
        "No invented record has a finite gradient; records without one count as 0. Where a "
        "discrete latent is summed out, every value of it must leave the density finite: "
        "Poisson(rate * k + 1e-6) instead of Poisson(rate * k), say."
    )


def check_holds_no_records(
    problem: Any,
    build_estimator: Callable[[tuple[Array, ...], PyTree, Any], Estimator],
    settings: Any,
    optim_state: PyTree,
) -> None:
    """Holds what estimator, optimiser and sampler captured to the rule of public values.

    The program of a step on one record has the derivative rules of the model in it too.

    Args:
        problem: Model and guide as functions.
        build_estimator: (public arrays, mechanism state, noise multiplier) -> estimator.
        settings: The driver, with ``clip_norm``, ``optim`` and ``sampler``.
        optim_state: State of the optimiser.
    """
    public, optim, sampler = problem.model.structure.public, settings.optim, settings.sampler

    def step(
        optim_state: PyTree, mechanism_state: PyTree, example: PyTree, shared: PyTree
    ) -> list[Array]:
        estimator = build_estimator(shared, mechanism_state, 0.0)
        prepared = estimator.prepare(jax.random.key(0), optim.get_params(optim_state))
        update = estimator.pull_back(prepared, estimator.signal(prepared, example))
        return jax.tree.leaves(optim.get_params(optimised(optim, update, optim_state)))

    mechanism_state = gaussian(settings.clip_norm, 0.0).init()
    what = "step (the model's derivative, the estimator or the optimiser)"
    example = problem.blank_example()
    public.check(what, step, optim_state, mechanism_state, example, problem.shared)
    if not type(sampler).__module__.startswith("numpyro_dp."):  # written by somebody else
        start = sampler.init(jax.random.key(0), problem.model.structure.layout.num_examples)
        public.check("sampler", sampler.next, start)


def check_fold_holds_no_records(
    fold: Fold | None, session: Any, state: SensitiveState, report: PrivacyReport
) -> PrivacyReport:
    """Holds what a fold captured to the same rule.

    Args:
        fold: The fold, if there is one.
        session: Whose problem has model and guide.
        state: That the run starts with.
        report: Of the run.

    Returns:
        The report with what the fold holds.
    """
    if fold is None:
        return report
    public = session.problem.model.structure.public.copy()
    params = session.problem.constrain(session.settings.optim.get_params(state.optim_state))
    before = public.arrays
    public.check("fold", fold.init, params)
    public.check("fold", fold.update, jax.eval_shape(fold.init, params), params)
    public.take("fold", held_by_function(fold.result))
    further = tuple(each for each in public.arrays if each not in before)
    return dataclasses.replace(report, public=report.public + further)
