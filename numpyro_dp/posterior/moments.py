"""Averages over the steps of a run, from the sums of :mod:`numpyro_dp.run.results`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from numpyro_dp.posterior.algebra import symmetric

if TYPE_CHECKING:
    from numpyro_dp.run.results import Products

_STILL = 1e-6  # smallest part of the movement of the centres in a direction that is movement


class Moments(NamedTuple):
    """Covariances of scores and shifts, less what the centres of the steps explain of both.

    Attributes:
        count: Number of steps.
        dof: Degrees of freedom that are left, one more than those after a regression on shifts.
        noise: Variances of the noise of one score (d,).
        shift_shift, score_shift, score_score: Covariances of shifts with shifts, of scores with
            shifts, and of scores with scores (d, d).
        centre, centre_spread: Mean and variances of the centres (d,).
    """

    count: float
    dof: float
    noise: np.ndarray
    shift_shift: np.ndarray
    score_shift: np.ndarray
    score_score: np.ndarray
    centre: np.ndarray
    centre_spread: np.ndarray


class Averages(NamedTuple):
    """Averages over the steps of a run, for d latents.

    Attributes:
        count: Number of steps.
        point: Mean of the points (d,).
        spread: Variances of the points (d,).
        fresh: Variances of the shifts among them (d,).
        score: Mean of the scores (d,).
        noise: Variances of the noise of one score (d,).
        moments: What tells the curvature, from the steps before and among these. Empty if it was
            released.
        curvature: Mean of the released curvatures (d, d), or ``None``.
        curvature_noise: Variance of the noise of one of them, in an entry of the diagonal.
        entries: Number of different entries of such a curvature.
    """

    count: int
    point: np.ndarray
    spread: np.ndarray
    fresh: np.ndarray
    score: np.ndarray
    noise: np.ndarray
    moments: tuple[Moments, ...] = ()
    curvature: np.ndarray | None = None
    curvature_noise: float = 0.0
    entries: int = 0


def averages_of(sums: Any, seen: np.ndarray) -> Averages | None:
    """Returns averages of the latents ``seen``, or ``None`` if there are none that are finite.

    Args:
        sums: A :class:`~numpyro_dp.run.results.ScoreSums`.
        seen: Numbers of the latents that records inform.
    """
    count = int(sums.count)
    if count < 2:
        return None
    point, square, fresh, score, noise = (
        np.asarray(total, np.float64)[seen] / count
        for total in (sums.point, sums.point_square, sums.shift_square, sums.score,
                      sums.noise_square)
    )  # fmt: skip
    centre, spread = np.asarray(sums.origin, np.float64)[seen], np.maximum(square - point**2, 0)
    found = Averages(count, centre + point, spread, fresh, score, noise)
    finite = all(np.all(np.isfinite(part)) for part in found[:6])
    if sums.products is not None:  # they have counts of their own, one for each half of the run
        if not (finite and np.all(np.isfinite(sums.products.square))):
            return None
        moments = _moments_of(sums.products, seen, 0), _moments_of(sums.products, seen, 1)
        # Scores at one single point tell no curvature.
        moved = max(np.trace(each.shift_shift) for each in moments) > 0
        return found._replace(moments=moments) if moved else None
    curvature, size = np.asarray(sums.curvature, np.float64) / count, len(seen)
    full = curvature.ndim == 2
    curvature = curvature[np.ix_(seen, seen)] if full else np.diag(curvature[seen])
    entries = size * (size + 1) // 2 if full else size
    noise = float(sums.curvature_square) / count
    if not (finite and np.all(np.isfinite(curvature)) and np.isfinite(noise)):
        return None
    return found._replace(curvature=curvature, curvature_noise=noise, entries=entries)


def _moments_of(products: Products, seen: np.ndarray, half: int) -> Moments:
    """Returns what a regression of scores on shifts needs.

    Far from the optimum most of a score comes from the centre of its step. Scores and shifts are
    regressed on it first. This does not bias the curvature: shifts are drawn after the centre.
    """
    products = products._make(np.asarray(part)[half] for part in products)
    count, size = max(int(products.count), 1), len(seen)
    rows = np.concatenate([seen + part * products.origin.size for part in range(3)])
    total = np.asarray(products.sum, np.float64)[rows] / count
    square = np.asarray(products.square, np.float64)[np.ix_(rows, rows)] / count
    square -= np.outer(total, total)
    both, centre = slice(None, 2 * size), slice(2 * size, None)
    spread = np.maximum(np.diag(square)[centre], 0)
    # Each centre in its own unit, so that the limit below does not depend on units.
    scale = np.sqrt(np.maximum(spread, 1e-300))
    values, axes = np.linalg.eigh(symmetric(square[centre, centre] / np.outer(scale, scale)))
    moved = values > _STILL * size
    axes = axes[:, moved] / np.sqrt(values[moved])
    explained = (square[both, centre] / scale) @ axes
    square[both, both] -= explained @ explained.T
    # Each direction that was taken out costs one degree of freedom.
    dof = count - int(np.sum(moved))
    if dof <= 1:  # the centres explain everything
        square[both, both] = 0
    return Moments(
        count,
        max(dof, 1),
        np.asarray(products.noise_square, np.float64)[seen] / count,
        square[size : 2 * size, size : 2 * size],
        square[:size, size : 2 * size],
        square[:size, :size],
        np.asarray(products.origin, np.float64)[seen] + total[centre],
        spread,
    )


def early_distance(averages: Averages) -> np.ndarray:
    """Mean squared distances of the steps of the first half from the later points (d,)."""
    if not averages.moments:
        return np.zeros_like(averages.point)
    before, _ = averages.moments
    return (before.centre - averages.point) ** 2 + before.centre_spread


def mixed(before: Moments, after: Moments, weight: float) -> Moments:
    """Moments of both, the first with a weight."""
    counts = np.array([weight * before.count, after.count])
    parts = counts / np.sum(counts)
    found = (parts[0] * x + parts[1] * y for x, y in zip(before[2:], after[2:], strict=True))
    return Moments(float(np.sum(counts)), weight * before.dof + after.dof, *found)
