"""Tries the parts of a run on invented records, before a step reads a record.

The parts are the model and estimator, the optimiser, the sampler, the mechanism and the fold. They
come from the user, so they may fail, and they may hold arrays that are records.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_dp._compat import make_program
from numpyro_dp._lazy import dpa, stats
from numpyro_dp._tree import filled, widen
from numpyro_dp.core import (
    Estimator,
    Fold,
    Mechanism,
    MechanismBuilder,
    MechanismState,
    PyTree,
    Released,
)
from numpyro_dp.model.dependence import loops_by_inputs
from numpyro_dp.model.held import held_by_function
from numpyro_dp.model.public import UnsupportedModelError
from numpyro_dp.privacy.keys import as_secret_key
from numpyro_dp.privacy.mechanism.clip_norm import ClipNorm
from numpyro_dp.privacy.mechanism.gaussian import build_mechanism
from numpyro_dp.privacy.noise import tables
from numpyro_dp.privacy.plan import PrivacyReport
from numpyro_dp.privacy.sampling import FullBatch
from numpyro_dp.run.settings import Method, RunSettings
from numpyro_dp.run.state import SensitiveState
from numpyro_dp.run.step import optimised

__all__ = ["check_fold", "check_mechanism", "check_signal", "check_signal_program", "finite_start"]

_ATTEMPTS = 10  # initial values that finite_start tries
_NOISE, _MARGIN = 1.7, 0.9  # not 1, which would hide a mechanism that ignores them
_LENGTHS = np.array([0, 1e-6, 0.999, 1, 1.001, 10, 1e10, np.inf, np.nan])  # in clip norms
_NUMBERS = 4096  # invented values in each entry of the sum
_BY_CHANCE = 1e-6  # probability that noise as stated is taken for other noise

Build = Callable[[ClipNorm], Mechanism]


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
    normal, ones = problem.records.layout.invented_records()
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


def check_signal_program(
    problem: Any,
    build_estimator: Callable[[tuple[Array, ...], MechanismState], Estimator],
    method: Method,
    settings: RunSettings,
    optim_state: PyTree,
) -> tuple[PyTree, bool]:
    """Raises if estimator, optimiser, mechanism or sampler captured arrays that may be records.

    It traces a step on one record, so arrays in the model's derivative rules are found too.

    Returns:
        Shapes of the sum of the signals, and whether the time of a step may depend on a record.
    """
    public, optim, shapes = problem.records.public, method.optim, {}

    def step(
        example: PyTree, optim_state: PyTree, state: MechanismState, shared: PyTree
    ) -> list[Array]:
        estimator = build_estimator(shared, state)
        prepared = estimator.prepare(jax.random.key(0), optim.get_params(optim_state))
        signal = estimator.signal(prepared, example)
        shapes.update(jax.eval_shape(widen, signal))
        update = estimator.pull_back(prepared, Released(signal, jnp.zeros(())))
        found = [optim.get_params(optimised(optim, update, optim_state))]
        if (centring := estimator.centring) is not None:  # what is drawn for a record
            rows = centring.rows(prepared, example, jnp.zeros((), jnp.uint32))
            found.append(jax.vmap(lambda row: centring.estimator.signal(prepared, row))(rows))
        return jax.tree.leaves(found)

    state = MechanismState(settings.clip_norm.as_arrays())
    what = "step (the model's derivative, the estimator or the optimiser)"
    example = problem.blank_example()
    program, _ = make_program(step, example, optim_state, state, problem.shared, validated=False)
    public.check_program(what, program)
    timed = loops_by_inputs(program, len(jax.tree.leaves(example)))
    if not _is_ours(settings.sampler):
        start = settings.sampler.init(jax.random.key(0), problem.num_examples)
        public.check("sampler", settings.sampler.next, start)
    if not _is_ours(settings.privacy.mechanism):
        _check_captured(public, settings, shapes)
    return shapes, timed


def _is_ours(value: Any) -> bool:
    return type(value).__module__.startswith("numpyro_dp.")


def _check_captured(public: Any, settings: RunSettings, shapes: PyTree) -> None:
    """Raises if a mechanism from outside this package captured arrays that may be records."""
    names = filled(shapes)

    def one_call(noise: Array, norm: ClipNorm, total: PyTree, squares: Any) -> Any:
        found = settings.privacy.mechanism(norm, noise)
        state = MechanismState(norm, found.init(shapes))
        noisy, _ = found.privatise(jax.random.key(0), total, state)
        return noisy, found.scales(names, squares, 1.0)

    norm = settings.norm_with_loss.fixed().as_arrays()
    squares = tuple(jnp.ones(()) for _ in norm.blocks(names))
    total = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), dict(shapes))
    public.trust(tables())  # it may build on a mechanism of this package
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


def check_mechanism(mechanism: MechanismBuilder, clip_norm: Any = 1.0) -> None:
    """Tries a mechanism of your own on invented numbers, for your tests. It proves nothing.

    The sum has two entries, ``"a"`` and ``"b"``. Samples of the noise are compared with the stated
    event if it is Gaussian or Laplace.

    Args:
        mechanism: Builds the mechanism.
        clip_norm: A finite clip norm, as for :class:`~numpyro_dp.DPSVI`.

    Raises:
        ValueError: If a record is left longer than the sensitivity, NaN or infinity counts, or the
            noise has another distribution than stated, is not independent, or depends on the sum.

    Example:
        >>> from numpyro_dp.mechanisms import GaussianMechanism
        >>> check_mechanism(GaussianMechanism(), clip_norm={"a": 0.5, ...: 2.0})
    """
    norm, names = ClipNorm.of(clip_norm), ("a", "b")

    def build(norm: ClipNorm) -> Mechanism:
        return build_mechanism(mechanism, norm, _NOISE, 1.0)

    extras = _check_scales(build, norm, names)
    _check_noise(build, norm, names, extras)


def _lie(what: str, why: str) -> ValueError:
    return ValueError(f"The mechanism does not do what it states: {what}. {why}")


def _check_scales(build: Build, clip_norm: ClipNorm, names: tuple[str, ...]) -> tuple[str, ...]:
    """Tries records of many norms, in each block and in all. Returns the names of extras."""
    stated = build(clip_norm)
    sensitivity, blocks = float(stated.sensitivity), stated.blocks(names)
    norms = np.array(stated.norms(names) or [sensitivity] * len(blocks), float)
    with np.errstate(over="ignore", invalid="ignore"):
        parts = [np.ones(len(blocks)), *np.eye(len(blocks))]  # all blocks together, each alone
        rows = [np.where(part, size, 0) * norms for part in parts for size in _LENGTHS]
        squares = np.asarray(jnp.asarray(np.square(rows), float))

    @jax.jit
    def call(norm: ClipNorm, squares: Any) -> Any:
        found = build(norm)
        extras = found.extras(names, squares, _MARGIN) if found.extras else {}
        return found.scales(names, squares, _MARGIN), extras

    factors, extras = jax.device_get(call(clip_norm.as_arrays(), tuple(squares.T)))
    factors, added = np.stack(factors, -1), [abs(number) for number, _ in extras.values()]
    finite = np.isfinite(squares).all(-1)
    wrong = ~np.isfinite(factors) | (factors < 0) | ~finite[:, None] & (factors != 0)
    if (wrong.any(-1) | (sum(added, 0 * finite) != 0) & ~finite).any():
        raise _lie(
            f"scales returned the factors {factors[wrong.any(-1)]}",
            "Return finite factors >= 0, and 0 for all blocks (and extras) if any norm is not "
            "finite. Else NaN or infinity in one record would reach the sum.",
        )
    after = np.sqrt(squares[finite].astype(float)) * factors[finite]
    total = np.sqrt(np.square(after).sum(-1) + sum(each[finite] ** 2 for each in added))
    most = _MARGIN * (1 + 8 * jnp.finfo(squares.dtype).eps)
    if (after > most * norms).any() or not (total <= most * sensitivity).all():
        raise _lie(
            f"scales left a record of norm {total.max():.4g}, with blocks of up to {after.max(0)}",
            f"The limits are margin * sensitivity = {_MARGIN * sensitivity:.4g}, and margin * clip "
            f"norm = {_MARGIN * norms}. One record could change the sum by more than epsilon "
            "covers. Scale further down, or state a larger sensitivity.",
        )
    return tuple(extras)


def _check_noise(
    build: Build, clip_norm: ClipNorm, names: tuple[str, ...], extras: tuple[str, ...]
) -> None:
    """Compares the noise of two keys, two sums and two memories with what is stated."""
    stated = build(clip_norm)
    sensitivity, fresh, event = float(stated.sensitivity), stated.compose is None, stated.event
    if stated.compose is not None:
        with contextlib.suppress(Exception):  # compose may support only other samplers
            event = stated.compose(FullBatch(), 12, 1)
    nothing = dict.fromkeys(extras, jnp.zeros(()))
    zeros = dict.fromkeys(names, jnp.zeros(_NUMBERS))
    ramp = dict.fromkeys(names, jnp.linspace(-30, 30, _NUMBERS) * sensitivity)

    @jax.jit
    def call(norm: ClipNorm, key: Any, total: PyTree, memory: PyTree) -> Any:
        state = MechanismState(norm, memory)
        noisy, state = build(norm).privatise(key, total | nothing, state)
        return jnp.stack([noisy[name] - total[name] for name in names]), state.memory

    def noise_of(seed: int, total: PyTree, memory: PyTree) -> tuple[np.ndarray, PyTree]:
        noise, memory = call(clip_norm.as_arrays(), as_secret_key(seed), total, memory)
        return np.asarray(noise, float), memory

    start = stated.init(zeros | nothing)
    noise, memory = noise_of(1, zeros, start)
    shape, unit = stats.norm, 1.0
    if isinstance(event, dpa.LaplaceDpEvent):
        shape, unit = stats.laplace(scale=2**-0.5), 2**0.5
    known = isinstance(event, dpa.GaussianDpEvent | dpa.LaplaceDpEvent)
    least = event.noise_multiplier * unit * sensitivity if known else 0.0
    sizes = [float(stated.noise_scale)] * len(noise) if fresh else noise.std(-1)
    for own, size in zip(noise, sizes, strict=True):
        alike = stats.kstest(own / size, shape.cdf).pvalue > _BY_CHANCE if known else own.std() > 0
        if not alike or size < least * (1 if fresh else 0.9) - 1e-6 * least:
            raise _lie(
                f"privatise added noise of standard deviation {own.std():.4g}, where noise_scale "
                f"is {size:.4g} and {event} means {least:.4g} or more",
                "Epsilon would be too small. Add noise to every value, and state its event and "
                "standard deviation.",
            )
    if abs(noise_of(1, ramp, start)[0] - noise).max() > 1e-3 * sensitivity:
        raise _lie(
            "privatise added other noise to another sum with the same key",
            "Such noise can reveal records. Return total + noise, and draw the noise from the key.",
        )
    if fresh and abs(noise_of(1, zeros, memory)[0] - noise).max() > 1e-3 * sensitivity:
        raise _lie(
            "privatise added other noise with another memory and the same key, but compose is None",
            "Epsilon counts steps as independent. Set compose to the event of a whole run.",
        )
    most = abs(np.triu(np.corrcoef([*noise, *noise_of(2, zeros, start)[0]]), 1)).max()
    if not most <= 6 / np.sqrt(_NUMBERS):
        raise _lie(
            f"privatise added noise with a correlation of {most:.2g} between two keys or entries",
            "Anyone can subtract noise that occurs twice. Draw it from the key, split per entry.",
        )
