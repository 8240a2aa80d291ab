"""Checks of arguments, and of an estimator, an optimiser, a sampler, a mechanism and a fold.

Each error names the value, the range and the remedy. No check reads a record.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_dp._tree import filled, shapes_of, widen
from numpyro_dp._validate import check_int
from numpyro_dp.core import Estimator, Fold, MechanismState, PyTree, Released
from numpyro_dp.model.held import held_by_function
from numpyro_dp.model.public import UnsupportedModelError
from numpyro_dp.privacy.mechanism.clip_norm import ClipNorm
from numpyro_dp.privacy.mechanism.gaussian import build_mechanism
from numpyro_dp.privacy.plan import BudgetError, PrivacyReport
from numpyro_dp.run.mechanism_trial import try_mechanism
from numpyro_dp.run.settings import Method, RunSettings
from numpyro_dp.run.state import RunIdentity, SensitiveState
from numpyro_dp.run.step import optimised

__all__ = [
    "check_callable",
    "check_estimator",
    "check_fold",
    "check_holds_no_records",
    "check_identity",
    "check_independent_noise",
    "check_not_spent",
    "check_num_steps",
    "check_params",
    "check_reverse_mode",
    "check_rng_key",
    "check_rng_keys",
    "check_signal",
    "check_sizes",
    "check_state",
    "check_steps_fit",
    "finite_start",
]

_ATTEMPTS = 10  # initial values that finite_start tries


def check_callable(name: str, value: Any) -> None:
    """Raises TypeError unless a model or guide can be called."""
    if not callable(value):
        raise TypeError(
            f"Expected {name} to be a function with NumPyro primitives, got "
            f"{type(value).__name__}. Pass arguments in the order DPSVI(model, guide, optim, ...)."
        )


def check_estimator(estimator: Any) -> None:
    """Raises TypeError unless a builder of an estimator can be called with a problem."""
    builds = not isinstance(estimator, type)
    try:
        inspect.signature(estimator).bind(object())
    except (TypeError, ValueError):
        builds = False
    if not builds:
        raise TypeError(
            f"estimator={estimator!r} does not build an estimator. Add the parentheses: aligned(), "
            "aligned_natural() or vanilla()."
        )


def check_independent_noise(builder: Any, clip_norm: ClipNorm, reason: str) -> None:
    """Raises ValueError if a mechanism correlates steps and a driver gives a reason against it."""
    if reason and build_mechanism(builder, clip_norm, 1.0).compose is not None:
        raise ValueError(
            f"mechanism={builder!r} adds noise that depends on the noise of earlier steps. "
            f"{reason}, so the result would be wrong. Use mechanism=GaussianMechanism(), or DPSVI."
        )


def check_rng_key(rng_key: Any) -> None:
    """Raises TypeError unless ``rng_key`` is a JAX key, typed or raw."""
    if isinstance(rng_key, jax.Array | np.ndarray):
        typed = jnp.issubdtype(rng_key.dtype, jax.dtypes.prng_key) and rng_key.shape == ()
        if typed or (rng_key.dtype == np.uint32 and rng_key.ndim == 1):
            return
    raise TypeError(
        f"Expected rng_key to be a JAX key, got {type(rng_key).__name__}. Pass jax.random.key(0)."
    )


def check_rng_keys(rng_keys: Any) -> None:
    """Raises TypeError unless ``rng_keys`` is a vector of JAX keys, typed or raw."""
    if isinstance(rng_keys, jax.Array | np.ndarray) and rng_keys.shape and rng_keys.shape[0]:
        typed = jnp.issubdtype(rng_keys.dtype, jax.dtypes.prng_key)
        if rng_keys.ndim == 1 if typed else rng_keys.dtype == np.uint32 and rng_keys.ndim == 2:
            return
    shown = type(rng_keys).__name__ + str(getattr(rng_keys, "shape", ""))
    raise TypeError(
        f"Expected rng_keys to be a vector of JAX keys, one for each seed, got {shown}. Pass "
        "jax.random.split(jax.random.key(0), number_of_seeds)."
    )


def check_num_steps(num_steps: Any, most: int) -> int:
    """Returns the number of steps. The error does not print an array: it may hold records."""
    if np.ndim(num_steps):
        raise TypeError(
            f"Expected num_steps to be an integer >= 1, got an array of shape "
            f"{np.shape(num_steps)}. Call run(rng_key, num_steps, *args)."
        )
    return check_int("num_steps", num_steps, low=1, high=most)


def check_sizes(**sizes: int | None) -> None:
    """Raises unless each value is None or an integer >= 1."""
    for name, value in sizes.items():
        if value is not None:
            check_int(name, value, low=1)


def check_state(state: Any) -> None:
    """Raises TypeError unless this package created the state."""
    if state is None:
        raise TypeError(
            "Expected a state, got None. A pickled result has no state, because a state is "
            "sensitive. Pickle result.state by itself to continue in another process."
        )
    if not isinstance(state, SensitiveState):
        raise TypeError(
            f"Expected a state of DPSVI.init, DPSVI.update or result.state, got "
            f"{type(state).__name__}. States of numpyro.infer.SVI do not record what was spent."
        )


def check_not_spent(state: SensitiveState) -> None:
    """Raises BudgetError once all steps of the plan have been taken."""
    if int(state.step) >= int(state.max_steps):
        raise BudgetError(
            f"The budget covers {int(state.max_steps)} updates, and all have been taken. Plan for "
            "more with DPSVI(..., num_steps=T)."
        )


def check_steps_fit(state: SensitiveState, num_steps: int) -> None:
    """Raises BudgetError unless the plan covers ``num_steps`` more steps."""
    left = int(state.max_steps) - int(state.step)
    if num_steps > left:
        raise BudgetError(
            f"Expected num_steps <= {left}, got {num_steps}. The budget covers no more after "
            f"{int(state.step)} steps. Plan for all steps with DPSVI(..., num_steps=T)."
        )


def check_reverse_mode(forward_mode_differentiation: bool) -> None:
    """Raises ValueError if forward mode is asked for."""
    if forward_mode_differentiation:
        raise ValueError(
            "Expected forward_mode_differentiation=False, got True. Gradients of single records "
            "use reverse mode. Leave it out."
        )


def check_params(params: PyTree, expected: PyTree) -> None:
    """Raises unless the parameters of a state have the shapes that these records need."""
    found = shapes_of(params)
    if found != expected:
        raise ValueError(
            f"Expected a state with parameters of the shapes {expected} for these records, got "
            f"{found}. Resume with the records of the run, or start again with init."
        )


def check_identity(
    state: SensitiveState, identity: RunIdentity, further: tuple[str, ...] = ()
) -> None:
    """Raises unless the settings are those with which the state's steps were accounted for."""
    fields = "num_examples", "sampler", "clip_norm", "mechanism", "loss_release", "method"
    for field in (*fields, *further):
        before, now = getattr(state.identity, field), getattr(identity, field)
        if before != now:
            raise BudgetError(
                f"The state's steps were taken and accounted for with {field}={before}, but this "
                f"driver has {field}={now}. Resume with the same setting, or start again with init."
            )


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


def check_fold(
    fold: Fold | None, session: Any, state: SensitiveState, num_steps: int, report: PrivacyReport
) -> PrivacyReport:
    """Raises unless a fold fits a loop of ``num_steps`` steps and captured no records.

    Returns:
        The report of the run, with the public arrays of the fold.
    """
    if fold is None:
        return report
    if not isinstance(fold, Fold):
        raise TypeError(
            "Expected fold to be built by a call, such as tail_average(num_steps), or a Fold, got "
            f"{type(fold).__name__}."
        )
    if fold.num_steps not in (None, num_steps):
        raise ValueError(
            f"Expected a fold for the {num_steps} steps of this run, got one for "
            f"{fold.num_steps}. Pass the same num_steps to both: every run starts a new fold."
        )
    params = session.problem.constrain(session.method.optim.get_params(state.optim_state))
    first = jax.eval_shape(fold.init, params)
    before, after = (
        jax.tree.map(lambda array: f"{array.dtype.name}{list(array.shape)}", each)
        for each in (first, jax.eval_shape(fold.update, first, params))
    )
    if before != after:
        raise TypeError(
            "Expected fold.update to return the shapes and dtypes of fold.init, "
            f"{before}, got {after}. Keep them constant."
        )
    public = session.problem.records.public.copy()
    known = public.arrays
    public.check("fold", fold.init, params)
    public.check("fold", fold.update, first, params)
    public.take("fold", held_by_function(fold.result))
    further = tuple(each for each in public.arrays if each not in known)
    return dataclasses.replace(report, public=report.public + further)
