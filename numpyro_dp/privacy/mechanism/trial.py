"""Tries a mechanism on invented numbers, and compares it with what it states."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_dp._lazy import dpa, stats
from numpyro_dp.core import Mechanism, MechanismBuilder, MechanismState, PyTree
from numpyro_dp.privacy.keys import as_secret_key
from numpyro_dp.privacy.mechanism.clip_norm import ClipNorm
from numpyro_dp.privacy.mechanism.gaussian import build_mechanism
from numpyro_dp.privacy.sampling import FullBatch

_NOISE, _MARGIN = 1.7, 0.9  # not 1, which would hide a mechanism that ignores them
_LENGTHS = np.array([0, 1e-6, 0.999, 1, 1.001, 10, 1e10, np.inf, np.nan])  # in clip norms
_NUMBERS = 4096  # invented values in each entry of the sum
_BY_CHANCE = 1e-6  # probability that noise as stated is taken for other noise

Build = Callable[[ClipNorm], Mechanism]


def check_mechanism(mechanism: MechanismBuilder, clip_norm: Any = 1.0) -> None:
    """Tries a mechanism of your own on invented numbers, for your tests. It proves nothing.

    The sum has two arrays, ``"a"`` and ``"b"``, with thousands of numbers. Samples of the noise are
    compared with the stated event if it is Gaussian or Laplace.

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
    if np.ndim(stated.noise_scale) or isinstance(stated.noise_scale, dict):
        raise _lie(
            f"noise_scale is {stated.noise_scale!r}",
            "Noise has one standard deviation in all entries. To weight blocks, scale entries in "
            "an estimator.",
        )
    norms = np.array(stated.norms(names) or [sensitivity] * len(blocks), float)
    with np.errstate(over="ignore", invalid="ignore"):
        parts = [np.ones(len(blocks)), *np.eye(len(blocks))]  # all blocks together, each alone
        rows = [np.where(part, size, 0) * norms for part in parts for size in _LENGTHS]
        squares = np.asarray(jnp.asarray(np.square(rows), float))

    @jax.jit
    def call(norm: ClipNorm, squares: PyTree) -> PyTree:
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
    def call(norm: ClipNorm, key: Array, total: PyTree, memory: PyTree) -> PyTree:
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
