"""Tests a mechanism from outside this package: does it do what it states?

Epsilon follows from the sensitivity and the event that a mechanism states. The trial calls
``scales`` and ``privatise`` on invented values with invented keys. It finds mistakes, but it proves
nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_dp._lazy import dpa
from numpyro_dp._tree import filled
from numpyro_dp.core import Mechanism, MechanismState, PyTree
from numpyro_dp.privacy.keys import as_secret_key
from numpyro_dp.privacy.mechanism.clip_norm import ClipNorm
from numpyro_dp.privacy.mechanism.gaussian import build_mechanism
from numpyro_dp.privacy.sampling import FullBatch
from numpyro_dp.run.loss import with_loss_norm
from numpyro_dp.run.settings import RunSettings

__all__ = ["try_mechanism"]

_NOISE, _MARGIN = 1.7, 0.9  # not 1, which would hide a mechanism that ignores them
_LENGTHS = np.array([0, 1e-6, 0.999, 1, 1.001, 10, 1e10, np.inf, np.nan])  # in clip norms
_NUMBERS = 4096  # invented values in each array of the sum

Build = Callable[[ClipNorm], Mechanism]


def try_mechanism(settings: RunSettings, shapes: PyTree, num_examples: int) -> None:
    """Raises ValueError unless ``scales`` and ``privatise`` do what the mechanism states.

    The ``shapes`` are those of the sum of the signals.
    """

    def build(norm: ClipNorm) -> Mechanism:
        norm = with_loss_norm(norm, settings.loss_release)
        return build_mechanism(settings.mechanism, norm, _NOISE, 1.0)

    if not settings.clip_norm.bounded:  # such a run is not private, and its report says so
        return
    norm, names = settings.clip_norm, filled(shapes)
    try:
        extras = _try_scales(build, norm, names)
        _try_privatise(build, norm, dict(shapes), extras, num_examples)
    except _TrialError as error:
        raise ValueError(
            f"mechanism={settings.mechanism!r} does not do what it states. In a trial on invented "
            f"values with noise_multiplier={_NOISE}, {error}"
        ) from None


class _TrialError(Exception):
    """Says what is wrong, why it matters, and what to do."""


def _try_scales(build: Build, clip_norm: ClipNorm, names: tuple[str, ...]) -> tuple[str, ...]:
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
    wrong = wrong.any(-1) | (sum(added, 0 * finite) != 0) & ~finite
    if wrong.any():
        raise _TrialError(
            f"scales returned the factors {factors[wrong][0]} for a record with the squared norms "
            f"{squares[wrong][0]}. NaN or infinity in one record would then reach the sum. Return "
            "finite factors >= 0, and 0 for all blocks (and extras) if any norm is not finite."
        )
    before, most = np.sqrt(squares[finite].astype(float)), 1 + 8 * jnp.finfo(squares.dtype).eps
    after = before * factors[finite]
    if (long := after > _MARGIN * norms * most).any():
        raise _TrialError(
            f"scales left a block of norm {before[long].max():.4g} at {after[long].max():.4g}. The "
            f"limits, margin * clip norm, are {_MARGIN * norms}. One record could change the sum "
            "by more than epsilon covers. Return factors with factor * norm <= margin * clip norm, "
            "as GaussianMechanism() does."
        )
    total = np.sqrt(np.square(after).sum(-1) + sum(each[finite] ** 2 for each in added)).max()
    if not total <= _MARGIN * sensitivity * most:
        raise _TrialError(
            f"scales left a record at the norm {total:.4g} over all blocks (and extras), more than "
            f"margin * sensitivity = {_MARGIN * sensitivity:.4g}. One record could change the sum "
            "by more than epsilon covers. Scale further down, or state a larger sensitivity."
        )
    return tuple(extras)


def _try_privatise(
    build: Build, clip_norm: ClipNorm, shapes: PyTree, extras: tuple[str, ...], num_examples: int
) -> None:
    """Measures the noise with two keys, two sums and two memories."""
    stated, names = build(clip_norm), filled(shapes)
    sensitivity, scale = float(stated.sensitivity), float(stated.noise_scale)
    event, fresh = stated.event, stated.compose is None
    if not fresh:
        with contextlib.suppress(Exception):  # compose may support only other samplers
            event = stated.compose(FullBatch(), num_examples, 1)
    if isinstance(event, dpa.NonPrivateDpEvent):  # epsilon is infinite, so nothing is claimed
        return
    zeros = jax.tree.map(lambda leaf: jnp.zeros(_NUMBERS, leaf.dtype), shapes)
    ramp = jax.tree.map(lambda x: x + jnp.linspace(-30, 30, _NUMBERS) * sensitivity, zeros)

    @jax.jit
    def call(norm: ClipNorm, key: Any, total: PyTree, memory: PyTree) -> Any:
        state = MechanismState(norm, memory)
        noisy, state = build(norm).privatise(
            key, total | dict.fromkeys(extras, jnp.zeros(())), state
        )
        noise = [jax.tree.map(jnp.subtract, noisy[name], total[name]) for name in names]
        return jnp.stack(jax.tree.leaves(noise)), state.memory

    def noise_of(seed: int, total: PyTree, memory: PyTree) -> tuple[np.ndarray, PyTree]:
        noise, memory = call(clip_norm.as_arrays(), as_secret_key(seed), total, memory)
        return np.asarray(noise, float), memory

    start = stated.init(zeros | dict.fromkeys(extras, jnp.zeros(())))
    noise, memory = noise_of(1, zeros, start)
    variance, fourth = noise.var(-1), np.mean((noise - noise.mean(-1, keepdims=True)) ** 4, -1)
    error = 5 * np.sqrt(abs(fourth - variance**2) / _NUMBERS)  # five standard errors
    least = event.noise_multiplier * sensitivity if isinstance(event, dpa.GaussianDpEvent) else 0
    added = f"privatise added noise of standard deviation {np.sqrt(variance).min():.4g}"
    if not (variance + error >= least**2).all() or not variance.all():
        raise _TrialError(
            f"{added}, but {event} with sensitivity {sensitivity:.4g} means {least:.4g} or more. "
            "Epsilon would be too small. Add noise to every value, and state the event of it."
        )
    if fresh and (abs(variance - scale**2) > error).any():
        raise _TrialError(
            f"{added} to {np.sqrt(variance).max():.4g}, but noise_scale is {scale:.4g}. DPMCMC and "
            "DPSEP rely on noise_scale. Set it to the standard deviation of the noise of a value."
        )
    if abs(noise_of(1, ramp, start)[0] - noise).max() > 1e-3 * sensitivity:
        raise _TrialError(
            "privatise added other noise to another sum with the same key. Noise that depends on "
            "the sum can reveal records. Return total + noise, and draw the noise from key alone."
        )
    if fresh and abs(noise_of(1, zeros, memory)[0] - noise).max() > 1e-3 * sensitivity:
        raise _TrialError(
            "privatise added other noise with another memory and the same key, but compose is "
            "None. Epsilon counts steps as independent. Set compose to the event of a whole run."
        )
    most = abs(np.triu(np.corrcoef([*noise, *noise_of(2, zeros, start)[0]]), 1)).max()
    if not most <= 6 / np.sqrt(_NUMBERS):
        raise _TrialError(
            f"privatise added noise with a correlation of {most:.2g} between two keys or entries. "
            "Anyone can subtract noise that occurs twice. Draw it from key, with a split per entry."
        )
