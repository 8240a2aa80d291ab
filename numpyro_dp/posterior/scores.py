r"""The likelihood of released scores: where the optimum of the data is, and how sure that is.

Near the optimum :math:`\phi` of the data, step t released

.. math:: S_t = H (\phi - z_t) + \text{noise}_t

at the public point :math:`z_t` (:mod:`numpyro_dp.run.results`). With the fresh part
:math:`\delta_t` of each point, the curvature follows from

.. math::
    \sum_t (S_t - \bar S)\,\delta_t^\top = -H \sum_t \delta_t\,\delta_t^\top + \text{noise}.

A regression on :math:`z_t` itself would be biased: points follow the noise of earlier steps.
Before the regression, what the rest of the point explains is taken out of both. Steps of the first
half of a run were far from the optimum, where the curvature may be another one, and count less
(``_pooled``).

The curvature is shrunk towards a guess of its shape. The guess is the inverse covariance of
:math:`\delta` times one size, changed in the few directions that stand out of the noise.

Then :math:`\bar S = H (\phi - \bar z) + \overline{\text{noise}} + E (\phi - \bar z)` with the error
E of the curvature, and :math:`\phi \mid \theta \sim N(\theta, H^{-1})`. E has a part from the noise
and a part because no likelihood is exactly quadratic. If the noise is larger than the curvature,
the result is flat, so the posterior is the prior.

Everything here is a function of released values and has no privacy cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from numpyro_dp.model.outcomes import read_outcomes
from numpyro_dp.model.public import UnsupportedModelError
from numpyro_dp.posterior.algebra import spectral_power, symmetric
from numpyro_dp.posterior.diagnosis import (
    Finding,
    finding_of_clipping,
    findings_of_normal,
    findings_of_path,
    findings_of_pooling,
    findings_of_run,
)
from numpyro_dp.posterior.from_model import ModelSource
from numpyro_dp.posterior.likelihood import (
    SMALLEST_SCALE,
    Prior,
    believed_part,
    decode,
    denoise_curvature,
    matrix_error,
    released_likelihood,
)
from numpyro_dp.posterior.moments import Averages, Moments, averages_of, early_distance, mixed
from numpyro_dp.posterior.posterior import Posterior
from numpyro_dp.posterior.prior import prior_of
from numpyro_dp.run.results import RunResult

_FIXED = "The parameters {} are fixed at their estimates. The intervals do not contain their error."

_BEND = 0.6  # relative change of the curvature over a distance of one prior standard deviation
_MOST_BEND = 0.6  # relative change at any distance
_FLOOR = 0.03  # smallest eigenvalue, relative to the mean of the positive parts
_SPREAD = 0.1  # columns of real data are correlated, which no guess of a curvature knows
_ALONG = 0.1  # part of the error of a curvature that is along its own eigenvectors
_SEEN = 4.0  # standard errors of the mean eigenvalue of noise
_DOUBT = 3.0  # standard errors of an eigenvalue at which half of it counts
_FLATTEST = 1e-3  # smallest variance of the shifts in a direction, relative to the largest


def posterior_of_scores(
    source: ModelSource, problem: Any, result: RunResult, method: str, unbiased: bool,
    others: Sequence[Finding] = (),
) -> Posterior:  # fmt: skip
    """Returns the posterior of a run that kept sums of its scores.

    Args:
        source: The model of the posterior.
        problem: Has the ``model``, and the ``shared`` public arrays.
        result: The result of the run.
        method: One line that describes the method.
        unbiased: Whether clipping did not see the outcomes.
        others: Findings of the driver.

    Raises:
        UnsupportedModelError: If the model has no prior to multiply the likelihood with.

    Example:
        >>> from numpyro_dp.extend import Driver
        >>> class MyDriver(Driver):  # its estimator has ``observe``
        ...     def posterior_of(self, problem, result, plain):
        ...         source = ModelSource.of(problem.model, problem.shared, result.params)
        ...         return posterior_of_scores(source, problem, result, "My method", unbiased=False)
    """
    model, public_key = problem.model.at(source.params), jax.random.key(0)
    prior = prior_of(model, problem.shared)
    averages, decoded = averages_of(result.scores, prior.seen), prior.decoded
    precision, linear = 0 * decoded.precision, 0 * decoded.mean  # of a run that tells nothing
    # Averages that are not finite say that the run went wrong. The findings then warn of it.
    path = (np.inf, np.inf, np.inf)
    if averages is not None:
        plan = result.privacy.plan
        prob = plan.sampler.inclusion_prob(plan.num_examples)
        precision, linear = scores_likelihood(averages, decoded, prob)
    mean, covariance = decoded.updated(precision, linear)
    if averages is not None:
        path = _path(averages, mean, np.diag(covariance), np.diag(decoded.covariance))
    # The likelihood is made of released values, so a fixed public key will do.
    vectors = prior.vectors(precision, linear, public_key)
    draws = prior.drawn(vectors)
    findings = [*findings_of_path(*path), *findings_of_normal(mean, covariance, decoded)]
    findings += findings_of_pooling(prior, vectors, covariance)
    findings += [*findings_of_run(result), *others]
    if not unbiased:
        try:
            avoidable = read_outcomes(model, problem.shared).number > 0
        except UnsupportedModelError:
            avoidable = False
        findings.append(finding_of_clipping(avoidable))
    notes = (_FIXED.format(sorted(source.params)),) * bool(source.params)
    return source.posterior(
        draws, result.privacy, method, notes, findings=findings, noise_included=True,
        likelihood=prior.likelihood(precision, linear),
    )  # fmt: skip


def _path(
    averages: Averages, mean: np.ndarray, variances: np.ndarray, prior: np.ndarray
) -> tuple[float, float, float]:
    """Root mean square distance of the points from the mean, and how far they wander.

    The first two are in posterior standard deviations, the last is the second in those of the
    prior. How far points wander leaves out fresh draws. Latents that are mostly prior do not count
    in the first, because their points say nothing. Points do not wander if curvatures were
    released, because the posterior then does not rest on how far they move.
    """
    known = variances < prior / 2
    squares = (mean - averages.point) ** 2 / variances
    distance = np.sqrt(np.mean(squares[known])) if known.any() else 0.0
    if averages.curvature is not None:
        return float(distance), 0.0, 0.0
    wander = np.maximum(averages.spread - averages.fresh, 0)
    own, of_prior = (float(np.sqrt(np.mean(wander / each))) for each in (variances, prior))
    return float(distance), own, of_prior


def scores_likelihood(
    averages: Averages, prior: Prior, inclusion_prob: float
) -> tuple[np.ndarray, np.ndarray]:
    r"""Returns the normal likelihood :math:`\exp(b' \theta - \theta' P \theta / 2)` of a run.

    Args:
        averages: Averages of the released scores.
        prior: A normal prior of the latents. The likelihood is used with another prior later.
        inclusion_prob: Probability that a record is in a batch.

    Returns:
        P (d, d), positive semidefinite, and b (d,).
    """
    found = _curvature(averages, prior)
    # A batch has more or fewer records than expected. Its sum varies by (1 - q) / q H.
    batches = (1 - inclusion_prob) / inclusion_prob * found.floored
    noise = np.diag(averages.noise) + batches
    mean, covariance = _decoded(averages, found, prior, noise / averages.count)
    return released_likelihood(mean, covariance, prior)


class _Curvature(NamedTuple):
    """The curvature in the coordinates of theta, and its error in whitened ones."""

    early: float  # part of it that comes from the first half of the run
    unwhitening: np.ndarray
    template: np.ndarray  # whitened
    scale_variance: float  # of the size of the template
    error: float  # GOE variance of the error, whitened
    believed: np.ndarray
    floored: np.ndarray


def _curvature(averages: Averages, prior: Prior) -> _Curvature:
    """Finds the curvature."""
    if averages.curvature is None:
        moments, early = _pooled(averages, prior)
        entries, (whitening, noisy, sizes) = None, _regression(moments)
        noise_sd, noise_share = moments.dof**-0.5, _noise_share(sizes)
    else:  # it was released in the coordinates of theta
        entries, noisy, early = averages.entries, symmetric(averages.curvature), 0.0
        whitening, sizes = np.eye(len(noisy)), np.ones(len(noisy))
        noise_sd, noise_share = np.sqrt(averages.curvature_noise / averages.count), 1.0
    unwhitening = np.linalg.inv(whitening)
    template, doubt = _template(noisy, sizes, noise_sd)
    denoised, error, scale_variance = denoise_curvature(
        noisy, template, noise_sd, entries, noise_share, _SPREAD
    )
    own, axes = np.linalg.eigh(denoised)
    positive = np.mean(np.maximum(own, 0))
    level = max(positive, SMALLEST_SCALE * np.trace(template) / len(own))
    turned = unwhitening.T @ axes
    floored = symmetric((turned * np.maximum(own, _FLOOR * level)) @ turned.T)
    # Of an eigenvalue within the noise only a part counts, or noise would count as information.
    inside = sizes[:, None] * denoised * sizes
    relative, frame = np.linalg.eigh(symmetric(inside))
    wrong = np.sum((frame.T @ doubt) * frame.T, axis=1)  # variance along each direction
    # Points stay away from the optimum where the curvature is small. So what counts is the error of
    # eigenvalues, whose mean square is d / 2 times the variance of the error of an entry.
    wrong += _ALONG * len(own) / 2 * error * ((frame**2).T @ sizes**2) ** 2
    counted = believed_part(relative, _DOUBT**2 * wrong)
    if not _is_seen(noisy, noise_sd):
        counted = np.zeros_like(counted)
    turned = unwhitening.T @ (frame / sizes[:, None])
    believed = symmetric((turned * counted) @ turned.T)
    return _Curvature(early, unwhitening, template, scale_variance, error, believed, floored)


def _pooled(averages: Averages, prior: Prior) -> tuple[Moments, float]:
    r"""Moments of the steps among ``averages``, and as far as it helps, of those before.

    The curvature before is another one, because the points were elsewhere. Let :math:`b^2` be the
    variance of its relative change and :math:`v` the relative variance that noise gives
    to a regression on the steps before. These count :math:`v / (v + b^2)`, as if b were noise.
    """
    before, after = averages.moments
    _, noisy, _ = _regression(both := mixed(before, after, 1.0))
    size, told = len(noisy), before.count * np.trace(before.shift_shift)
    of_after = after.count * np.trace(after.shift_shift)
    level = max(float(np.trace(noisy)) / size, 0.0)
    noise = (size + 1) / 2 / (both.dof * max(told / (told + of_after), 1e-30))
    far = np.diag(prior.precision) @ early_distance(averages) / size
    weight = float(noise / (noise + _BEND**2 * far * level**2))
    return mixed(before, after, weight), weight * told / (weight * told + of_after)


def _noise_share(sizes: np.ndarray) -> float:
    """Sum of the variances of the noise of all entries, relative to that of a GOE matrix.

    The variances are 1 / dof on the diagonal. Elsewhere they are smaller by the factor
    sqrt(l_i l_j) / (l_i + l_j), which is at most 1 / 2.
    """
    squares, size = sizes**2, len(sizes)
    shares = np.outer(squares, squares) / np.add.outer(squares**2, squares**2)
    return float(np.sum(shares) + size / 2) / (size * (size + 1) / 2)


def _regression(moments: Moments) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    r"""Regresses scores on shifts.

    Let C be the covariance of the shifts, B that of scores and shifts, and R that of the residuals.
    The symmetric least squares solution of :math:`H C = -B` solves

    .. math:: R^{-1} H C + C H R^{-1} = -(R^{-1} B + B' R^{-1}).

    A matrix M with :math:`R^{-1} = M M'` and :math:`C = M \Lambda M'` makes this an equation for
    each entry of :math:`M' H M`. With :math:`W = M \Lambda^{1/4}`, the error of :math:`W' H W` is
    at most that of a GOE matrix with variance 1 / count.

    Returns:
        W, the solution :math:`W' H W`, and :math:`\Lambda^{1/4}`: divided by it twice, an identity
        matrix becomes :math:`W' C^{-1} W`.
    """
    values, vectors = np.linalg.eigh(symmetric(moments.shift_shift))
    # Directions in which the shifts hardly varied would get a slope made of noise.
    values = np.maximum(values, _FLATTEST * values.max())
    shifts, cross = (vectors * values) @ vectors.T, moments.score_shift
    explained = cross @ ((vectors / values) @ vectors.T) @ cross.T
    # The residuals have at least the noise of privacy.
    known = np.sqrt(np.maximum(moments.noise, 1e-30))
    dof = max(moments.dof - len(known), 1) / moments.count
    residual = symmetric((moments.score_score - explained) / dof / np.outer(known, known))
    sizes, axes = np.linalg.eigh(residual)
    residual = (axes * np.maximum(sizes, 1)) @ axes.T * np.outer(known, known)
    root, inverse_root = spectral_power(residual, 0.5), spectral_power(residual, -0.5)
    ratios, turn = np.linalg.eigh(symmetric(root @ shifts @ root))
    ratios = np.maximum(ratios, 1e-12 * ratios.max())
    both = turn.T @ inverse_root @ cross @ root @ turn
    solution = -(both + both.T) / (ratios[:, None] + ratios)
    sizes = ratios**0.25
    return inverse_root @ (turn * sizes), sizes[:, None] * solution * sizes, sizes


def _is_seen(noisy: np.ndarray, noise_sd: float) -> bool:
    """Whether a curvature has any eigenvalue, or a mean of them, that noise does not explain.

    Without this, two runs of pure noise in a hundred would give a posterior narrower than the
    prior.
    """
    size = len(noisy)
    # The trace of noise has the standard deviation noise_sd sqrt(d).
    if np.trace(noisy) > _SEEN * noise_sd * np.sqrt(size):
        return True
    return bool(np.linalg.eigvalsh(noisy)[-1] > _largest_of_noise(size) * noise_sd)


def _largest_of_noise(size: int) -> float:
    """Size of the largest eigenvalue of unit GOE noise that one matrix in a thousand exceeds."""
    return np.sqrt(2 * size) * (1 + 1.7 * size ** (-2 / 3))  # Tracy, Widom (1996)


def _template(
    noisy: np.ndarray, sizes: np.ndarray, noise_sd: float
) -> tuple[np.ndarray, np.ndarray]:
    r"""A guess of the whitened curvature: C^-1 times a size, and what stands out of the noise.

    A GOE matrix of variance :math:`v` has its largest eigenvalue at :math:`\sqrt{2 d v}`, the edge.
    An eigenvalue :math:`\lambda` that exceeds the others by more is due to one of size
    :math:`(\lambda + \sqrt{\lambda^2 - \text{edge}^2}) / 2` (Benaych-Georges, Nadakuditi, 2011).

    Returns:
        The guess, and the variances of its sizes as a matrix, relative to C^-1.
    """
    size = len(noisy)
    values, vectors = np.linalg.eigh(symmetric(sizes[:, None] * noisy * sizes))
    noise_sd = noise_sd * float(np.mean(sizes**2))
    edge, rest, large = np.sqrt(2 * size) * noise_sd, list(values), []
    enough = _largest_of_noise(size) * noise_sd * size / max(size - 1, 1)
    while len(rest) > 1:
        others = max(float(np.mean(rest[:-1])), 0.0)
        excess = rest[-1] - others
        if excess <= enough:
            break
        rest.pop()
        large.append(others + (excess + np.sqrt(excess**2 - edge**2)) / 2)
    # The trace is known best of all, so what does not stand out has the size that is left of it.
    left = (float(np.sum(values)) - sum(large)) / len(rest)
    left = max(left, noise_sd / np.sqrt(size), _FLOOR * abs(float(np.mean(values))), 1e-12)
    found = np.concatenate([np.full(len(rest), left), large[::-1]])
    turned = vectors / sizes[:, None]
    # The variance of each size: of a mean of many entries, or of a largest eigenvalue.
    variances = np.concatenate(
        [np.full(len(rest), noise_sd**2 / len(rest)), [edge**2] * len(large)]
    )
    return symmetric((turned * found) @ turned.T), symmetric((vectors * variances) @ vectors.T)


def _decoded(
    averages: Averages, found: _Curvature, prior: Prior, noise: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Mean and covariance of theta. ``noise`` is the covariance of the mean of the noise."""
    size, turn = len(noise), found.unwhitening
    shape, root = turn.T @ found.template, spectral_power(found.floored, 0.5)

    def errors(mean: np.ndarray, covariance: np.ndarray) -> np.ndarray:
        """Covariance of the noise and of E (phi - z)."""
        away = mean - averages.point
        moment = covariance + np.outer(away, away)
        own = turn @ moment @ turn.T
        noisy = found.error / 2 * (turn.T @ matrix_error(own) @ turn)
        noisy += found.scale_variance * shape @ own @ shape.T
        # No likelihood is exactly quadratic. The change is relative to H, in its own coordinates.
        far, farther = (
            np.trace(prior.precision @ (moment + np.diag(spread))) / size
            for spread in (averages.spread, early_distance(averages))
        )
        bent = root @ matrix_error(root @ moment @ root) @ root
        # It keeps its sign, because most likelihoods are log-concave.
        bend = 1 / (1 / (_BEND**2 * far + 1e-300) + 1 / _MOST_BEND**2)
        noisy += bend / (size + 1) * bent
        # Between the first half and the optimum it changes along the whole way, mostly in size.
        early = found.early**2 * _BEND**2 * farther * found.floored @ moment @ found.floored
        return noise + noisy + early

    target = averages.score + found.believed @ averages.point
    begin = prior.mean, prior.covariance
    return decode(prior, target[None], found.believed, found.floored, errors, begin)
