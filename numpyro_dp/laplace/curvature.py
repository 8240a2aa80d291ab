r"""Denoises the released curvatures, and computes the whitening of the next release.

A stage releases the sum :math:`A` of the records' curvatures in whitened coordinates. Its noise has
standard deviation :math:`t` on the diagonal and :math:`t / \sqrt 2` off the diagonal. Write
:math:`G` for such a noise matrix with :math:`t = 1` (a Gaussian orthogonal ensemble, GOE). Its "GOE
variance" is the variance of an entry on the diagonal.

Everything here is a function of released values and has no privacy cost.
"""

from __future__ import annotations

import dataclasses
import itertools
from functools import cached_property
from typing import NamedTuple

import numpy as np
from scipy.special import log_ndtr, softmax

from numpyro_dp.laplace.pattern import pairs_of, power_of
from numpyro_dp.posterior.algebra import inverse, roots, solve, symmetric, trace_of
from numpyro_dp.posterior.likelihood import (
    LEAST_SPREAD,
    SMALLEST_SCALE,
    Prior,
    denoise_curvature,
    gain_of,
    size_of,
)

# Prior sds of the size of a site's curvature, relative to that of all sites. Most sites have nearly
# the size of the guess, and few a very different one.
SITE_SDS = 0.03, 0.1, 0.3, 1.0, 3.0
FLOOR = 0.03  # smallest eigenvalue, relative to the mean of the positive parts
RIDGE = 1.5  # sds of the curvature's error below which the next whitening sees no eigenvalue
# A full whitening has the power 1 / 2. It is used if the error is small.
NEXT_POWER, FULLER = 0.4, 0.1
FIRST_POWER = 0.25  # weak, because a full whitening would give rare columns all of the noise
SMALLEST_DIAGONAL = 0.003  # smallest denoised scale. The public guess is 1
LEAST_ALONG = 0.05  # of the curvature along a step, as a part of the denoised one
RATIOS = 0.2, 2.0  # of expected scores at the next draws to those at the last ones
LEAST_KEPT = 0.1  # of the mean curvature. A smaller one has no share that is lost
LEAST_VARIANCE = 0.5  # of scores in any direction, over what the model says
NARROWEST = 0.2  # smallest factor on a whitening
LEFT_ON_DIAGONAL = 0.1  # smallest part of the diagonal that is left next to the mean row


@dataclasses.dataclass(frozen=True, eq=False)
class Stage:
    """The released values of one stage, and estimates computed from them.

    Attributes:
        mean: Mean of the stage's normal draws of the parameters (d,).
        covariance: Covariance of the parameters, as known before the stage (d, d).
        whitening: The whitening W, symmetric and positive definite (d, d).
        unwhitening: The inverse of W (d, d).
        score: The noisy sum of scores, in the coordinates of theta (d,).
        score_noise: Standard deviation of the noise on each coordinate of W times ``score``, one
            for all or (d,).
        noisy_curvature: The noisy sum of curvatures, whitened (d, d).
        curvature_noise: Standard deviation of the noise on the diagonal of ``noisy_curvature``.
        template: Whitened guess of the curvature, the target of the shrinkage (d, d).
        template_scale_variance: Variance of the size of ``template`` that is left in ``curvature``,
            or covariances of its sizes at each pair of latents (d, d).
        curvature: The denoised curvature, in the coordinates of theta (d, d).
        curvature_floored: ``curvature`` with all eigenvalues raised above 0 (d, d).
        curvature_error: GOE variance of the error that is left in ``curvature``, whitened.
        errors: The GOE variance of each entry, over ``curvature_error`` (d, d).
        groups: Sites of group effects, see :func:`~numpyro_dp.laplace.pattern.group_sites` (d,).
        spread: Covariance of the draws, over ``covariance``.
        discrepancy: GOE variance of this stage's own curvature, whitened, around the newest one.
        turned: ``unwhitening`` without the directions that no record sees (d, d).
        step: Standard deviation of this stage's step of the mean, along the step (d,). See
            :func:`~numpyro_dp.laplace.decode.with_step`. ``None`` for the newest stage.
    """

    mean: np.ndarray
    covariance: np.ndarray
    whitening: np.ndarray
    unwhitening: np.ndarray
    score: np.ndarray
    score_noise: float | np.ndarray
    noisy_curvature: np.ndarray
    curvature_noise: float
    template: np.ndarray
    template_scale_variance: float | np.ndarray
    curvature: np.ndarray
    curvature_floored: np.ndarray
    curvature_error: float
    errors: np.ndarray
    groups: np.ndarray
    turned: np.ndarray
    spread: float = 1.0
    discrepancy: float = 0.0
    step: np.ndarray | None = None

    @cached_property
    def pairs(self) -> np.ndarray:
        """Which entries of the curvature were released (d, d)."""
        return pairs_of(self.groups)

    @cached_property
    def size_factor(self) -> np.ndarray:
        """F with F F' = ``template_scale_variance`` (d, sites)."""
        size = len(self.pairs)
        values, vectors = np.linalg.eigh(
            np.broadcast_to(self.template_scale_variance, (size, size))
        )
        kept = values > 1e-12 * max(values[-1], 1e-300)
        return vectors[:, kept] * np.sqrt(values[kept])

    @property
    def entries(self) -> float:
        """Number of released pairs."""
        return (float(np.sum(self.pairs)) + len(self.pairs)) / 2

    @property
    def width(self) -> float:
        """Mean number of released pairs for each latent, which is d if all were released."""
        return float(np.sum(self.pairs)) / len(self.pairs)


def read_stage(
    mean: np.ndarray,
    covariance: np.ndarray,
    whitening: np.ndarray,
    template: np.ndarray,
    whitened_score: np.ndarray,
    noisy_curvature: np.ndarray,
    score_noise: float | np.ndarray,
    curvature_noise: float,
    groups: np.ndarray | None = None,
    unseen: np.ndarray | None = None,
    spread: float = 1.0,
    sites: np.ndarray | None = None,
    classes: np.ndarray | None = None,
) -> Stage:
    """Denoises the released values of a stage.

    Args:
        mean: Mean of the stage's draws (d,).
        covariance: Covariance of the parameters, as known before the stage (d, d).
        whitening: The whitening W, symmetric and positive definite (d, d).
        template: Whitened guess of the curvature, positive definite (d, d).
        whitened_score: Sum over records of their whitened scores, plus noise (d,).
        noisy_curvature: Sum over records of their whitened curvatures, plus noise (d, d).
        score_noise: Standard deviation of the noise on each coordinate of the score, or (d,).
        curvature_noise: Standard deviation of the noise on the diagonal of the curvature. Off the
            diagonal it is smaller by the square root of 2.
        groups: Sites of group effects (d,), by default none.
        unseen: Directions in which the curvature is 0 (k, d), by default none.
        spread: Covariance of the stage's draws, over ``covariance``.
        sites: Number of the site of each latent (d,), by default the same for all.
        classes: 1 + the site number of each effect of groups, and 0 for others (d,).

    Returns:
        The stage. Its discrepancy is still 0, and
        :func:`~numpyro_dp.laplace.decode.with_discrepancies` sets it.
    """
    groups = np.zeros(len(mean), int) if groups is None else groups
    pairs = pairs_of(groups)
    noisy_curvature, template = symmetric(noisy_curvature), np.where(pairs, template, 0)
    template, site_variances = _sized(noisy_curvature, template, curvature_noise, sites)
    classes = np.zeros(len(mean), int) if classes is None else classes
    denoised, errors, scale_variance = _denoised(
        noisy_curvature, template, curvature_noise, pairs, classes
    )
    error = float(np.sum(errors * pairs) / np.sum(pairs))
    unwhitening, seen = inverse(whitening), np.eye(len(mean))
    if unseen is not None and len(unseen):
        # In whitened coordinates a direction u of theta is W^-1 u.
        along, _ = np.linalg.qr(unwhitening @ unseen.T)
        seen = seen - along @ along.T
    # The template is positive definite. So shrinkage gave unseen directions a curvature.
    denoised = seen @ denoised @ seen
    values, vectors = _floored(denoised, template)
    return Stage(
        mean=mean,
        covariance=covariance,
        whitening=whitening,
        unwhitening=unwhitening,
        score=unwhitening @ whitened_score,
        score_noise=score_noise,
        noisy_curvature=noisy_curvature,
        curvature_noise=curvature_noise,
        template=template,
        template_scale_variance=scale_variance + site_variances,
        curvature=symmetric(unwhitening @ denoised @ unwhitening),
        curvature_floored=symmetric(unwhitening @ (vectors * values) @ vectors.T @ unwhitening),
        curvature_error=error,
        errors=errors / error,
        groups=groups,
        turned=seen @ unwhitening,
        spread=spread,
    )


def _denoised(
    noisy: np.ndarray,
    template: np.ndarray,
    noise_sd: float,
    pairs: np.ndarray,
    classes: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, float]:
    """The denoised curvature, GOE variances of its entries (d, d), and that of the template's size.

    Each pair of classes has its own spread. Two effects of groups have hardly a curvature. Those of
    an effect and a weight may be far from the guess, if the column varies between groups.
    """
    known, size = np.unique(classes), len(noisy)
    noise = max(noise_sd, 1e-9 * np.trace(template) / size) ** 2
    size_mean, size_variance = size_of(noisy, template, noise)
    guess = size_mean * template
    spread = (np.geomspace(LEAST_SPREAD, 1, 60) * np.trace(guess) / size) ** 2
    gains, errors = np.zeros_like(noisy), np.zeros_like(noisy)
    for one, other in itertools.combinations_with_replacement(known, 2):
        both = (classes[:, None] == one) & (classes == other)
        both |= both.T
        own = both & pairs
        entries = (np.sum(own) + np.sum(np.diag(own))) / 2
        gains[both], errors[both] = gain_of((noisy - guess)[own], entries, spread, noise)
    mean = float(np.sum(gains * pairs) / np.sum(pairs))
    return guess + gains * (noisy - guess), errors, size_variance * (1 - mean) ** 2


def _sized(
    noisy: np.ndarray, template: np.ndarray, noise_sd: float, sites: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray | float]:
    """The template with the size that each site has, and what is unsure of these sizes (d, d).

    A residual scale that was far away changes the curvature of all weights alike, but not its own.
    The curvature of a site is a mean over its latents, so it has less noise than one latent's.
    """
    if sites is None or len(np.unique(sites)) == 1:
        return template, 0.0
    noise = max(noise_sd, 1e-9 * np.trace(template) / len(template)) ** 2
    size, _ = size_of(noisy, template, noise)
    template, sizes, variances = size * template, np.ones(len(template)), np.zeros_like(template)
    for site in np.unique(sites):
        own = np.ix_(sites == site, sites == site)
        found, variance = _site_size(noisy[own], template[own], noise)
        sizes[sites == site], variances[own] = np.sqrt(found), variance / found**2
    return np.outer(sizes, sizes) * template, variances


def _site_size(noisy: np.ndarray, template: np.ndarray, noise: float) -> tuple[float, float]:
    """Posterior mean and variance of the size of a site, relative to its template."""
    means, variances = np.transpose([size_of(noisy, template, noise, sd) for sd in SITE_SDS])
    # The size alone is known with this variance, and has the evidence of a normal distribution.
    own = noise / np.sum(template**2)
    seen, total = own * np.sum(noisy * template) / noise, own + np.square(SITE_SDS)
    weights = softmax(-(np.log(total) + (seen - 1) ** 2 / total) / 2)
    mean = weights @ means
    return float(mean), float(weights @ (variances + (means - mean) ** 2))


def evidence_unseen(
    directions: np.ndarray, whitening: np.ndarray, noisy_curvature: np.ndarray, noise_sd: float
) -> float:
    r"""The log of how much likelier a released curvature is, if it is 0 along some directions.

    Let x be the mean of q'Aq over k orthonormal q in whitened coordinates, and l = tr(A) / d. The
    other hypothesis is that records see half of what they see of other directions:

    .. math:: k\, ((x - l / 2)^2 - x^2) / 2 t^2.

    Args:
        directions: The directions, in the coordinates of theta (k, d).
        whitening: The whitening W (d, d).
        noisy_curvature: The released curvature A (d, d).
        noise_sd: Standard deviation t of the noise on its diagonal.
    """
    along, _ = np.linalg.qr(solve(whitening, directions.T))
    count, size = len(directions), len(whitening)
    seen = np.trace(along.T @ noisy_curvature @ along) / count
    # Noise may make the trace negative, but a curvature is not.
    half = max(np.trace(noisy_curvature), 0.0) / size / 2
    return float(count * ((seen - half) ** 2 - seen**2) / (2 * noise_sd**2))


def with_steps(stage: Stage, *steps: np.ndarray) -> Stage:
    r"""Returns the stage with the curvature along the way as it was released.

    The denoised curvature is shrunk to that of the stage before. On a long way, curvature changes
    along the way, which is one direction of d, so the shrinkage hides it. Newton's steps would then
    be too short. One number is hardly noisy, so it is put back. For a step u,
    :math:`q = W^{-1} u / |W^{-1} u|`, and a stage that drew from :math:`N(m, V)`,

    .. math::
        D \mathrel{+}= \frac{a}{a + t^2} \max(0, 1 - 2 d / u' V^{-1} u)\, (q'Aq - q'Dq)\, q q',
        \qquad a = (q'Dq / 2)^2.

    A step inside of the uncertainty changes nothing.

    Args:
        stage: The newest stage.
        *steps: Steps of the mean that led to it, each (d,).
    """
    denoised = stage.whitening @ stage.curvature @ stage.whitening
    for step in steps:
        turned = stage.unwhitening @ step
        length, far = np.linalg.norm(turned), step @ solve(stage.spread * stage.covariance, step)
        if far <= 2 * len(step):
            continue
        along = turned / length
        now, seen = along @ denoised @ along, along @ stage.noisy_curvature @ along
        gain = (now / 2) ** 2 / ((now / 2) ** 2 + stage.curvature_noise**2)
        # Noise may also make the curvature along the step negative. Then a small part is kept.
        change = gain * (1 - 2 * len(step) / far) * (max(seen, LEAST_ALONG * now) - now)
        denoised = denoised + change * np.outer(along, along)
    values, vectors = _floored(denoised, stage.template)
    turned = stage.unwhitening @ vectors
    return dataclasses.replace(
        stage,
        curvature=symmetric(stage.unwhitening @ denoised @ stage.unwhitening),
        curvature_floored=symmetric((turned * values) @ turned.T),
    )


def variance_of(stage: Stage, noisy: np.ndarray, noise_sd: float, kappa: float) -> np.ndarray:
    r"""The variance J of the sum of all scores, in the coordinates of theta (d, d).

    It is shrunk towards :math:`\kappa H`, which it is in a correct model. No direction falls below
    ``LEAST_VARIANCE`` times that.

    Args:
        stage: The stage that released it.
        noisy: Sum of squares of whitened scores, plus noise (d, d).
        noise_sd: Standard deviation of the noise on its diagonal.
        kappa: See :func:`~numpyro_dp.laplace.decode.sampling_ratio`.
    """
    guess = kappa * symmetric(stage.whitening @ stage.curvature_floored @ stage.whitening)
    found, _, _ = denoise_curvature(noisy, guess, noise_sd, stage.entries)
    root, inverse_root = roots(guess)
    values, vectors = np.linalg.eigh(symmetric(inverse_root @ found @ inverse_root.T))
    turned = stage.unwhitening @ root @ vectors
    return symmetric((turned * np.maximum(values, LEAST_VARIANCE)) @ turned.T)


def moved(stage: Stage, before: np.ndarray, after: np.ndarray) -> Stage:
    r"""Returns the stage with the curvature that the model expects at the next draws.

    If the mean moves, curvatures change with it: those of weights with the square of a residual
    scale. A whitening from the last curvature would then hide the next release in noise, or clip
    it. With :math:`r = \sqrt{\text{after} / \text{before}}`, between 1 / 5 and 2, the curvature
    becomes :math:`H_{kl} r_k r_l`.

    Args:
        stage: The newest stage.
        before: Mean squares of scores of invented records at the draws of the stage (d,).
        after: The same at the next draws (d,).
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = np.sqrt(after / before)
    # Without scores of invented records, a latent keeps its curvature.
    ratios = np.clip(np.where(np.isfinite(ratios), ratios, 1.0), *RATIOS)
    factors = np.outer(ratios, ratios)
    return dataclasses.replace(
        stage,
        curvature=stage.curvature * factors,
        curvature_floored=stage.curvature_floored * factors,
    )


class Loss(NamedTuple):
    r"""The curvature that weights of records took away, over what is left, for each latent.

    Records with large values in one column have long scores, so their weight is small. The
    whitening follows the curvature that is left, which makes these scores still longer. Much of
    what is known about the latent gets lost, and in a wrong model the fit moves away from that of
    all records. Therefore the whitening narrows in a latent that surely loses more than others.

    Attributes:
        precision: Precision of the mean ratio since the last change of the factor, shape (d,).
        sums: The same times the mean ratio (d,).
        factors: Square roots of the factors on the diagonal of the whitening (d,).
    """

    precision: np.ndarray
    sums: np.ndarray
    factors: np.ndarray

    @classmethod
    def before(cls, size: int) -> Loss:
        """Nothing is known to be lost."""
        return cls(np.zeros(size), np.zeros(size), np.ones(size))

    def read(self, stage: Stage, loss: np.ndarray, noise: float) -> tuple[Loss, np.ndarray]:
        r"""Returns the loss after a stage, and the ratios r of all curvature to what is left.

        With :math:`x = ` loss / diag(W H W), averaged over stages, and its standard error e,

        .. math:: r = 1 + \max(0, x - (1 + \sqrt{2 \log d})\, e) / (1 + e^2),

        divided by the smallest r. A factor is multiplied by :math:`r^{-1/4}`.

        Args:
            stage: The stage.
            loss: Released loss of whitened curvature (d,).
            noise: Its standard deviation.
        """
        kept = np.diag(stage.whitening @ stage.curvature_floored @ stage.whitening)
        kept = np.maximum(kept, LEAST_KEPT * np.mean(kept))
        precision = self.precision + (kept / noise) ** 2
        sums = self.sums + loss * kept / noise**2
        # About the largest of d standard normal numbers, so that noise alone narrows nothing.
        least = (1 + np.sqrt(2 * np.log(len(loss)))) / np.sqrt(precision)
        sure = np.maximum(sums / precision - least, 0)
        ratios = 1 + sure * precision / (1 + precision)
        ratios = ratios / np.min(ratios)
        factors = np.maximum(self.factors * ratios**-0.25, np.sqrt(NARROWEST))
        # A narrower whitening loses less, so what was seen before no longer counts.
        precision, sums = (np.where(sure > 0, 0, each) for each in (precision, sums))
        return Loss(precision, sums, factors), ratios


def next_whitening(stage: Stage, prior: Prior, kappa: float) -> np.ndarray:
    r"""Returns the whitening of the next stage.

    .. math:: W \propto (\Lambda + W_{old}^{-1} \max(A, r)\, W_{old}^{-1})^{-q}, \qquad
        \mathrm{tr}(W H W) = \kappa d

    Here :math:`\Lambda` is the prior precision, A is the curvature in the old whitened coordinates,
    and max raises its eigenvalues to :math:`r = 1.5\, p \sqrt d`. The GOE variance of its error is
    :math:`p^2`, so r is about the largest eigenvalue of the error. This keeps the whitening from
    stretching a direction whose curvature is small by chance. A direction that is surely seen is
    whitened in full if the noise is small: with the mean l of its eigenvalues, raised above 0,

    .. math:: q = 0.4 + 0.1 / (1 + (2 r / l)^2).

    A small residual scale needs that. Its own curvature stays near 2 N, while that of the weights
    grows with every step. An error of the same size in all whitened directions would hide it.

    Args:
        stage: The newest stage.
        prior: The prior.
        kappa: See :func:`~numpyro_dp.laplace.decode.sampling_ratio`. Clipping lowers the released
            curvature. Without kappa the whitening would grow in return, and the next stage would
            clip even more.
    """
    size = len(prior.mean)
    whitened = stage.whitening @ stage.curvature @ stage.whitening
    values, vectors = _floored(whitened, stage.template)
    ridge = RIDGE * np.sqrt(stage.curvature_error * stage.width)
    power = NEXT_POWER + FULLER / (1 + (2 * ridge / np.mean(values)) ** 2)
    raised = np.maximum(values, ridge)
    raised = stage.unwhitening @ (vectors * raised) @ vectors.T @ stage.unwhitening
    whitening = power_of(prior.precision + raised, stage.groups, -power)
    return whitening * np.sqrt(kappa * size / trace_of(whitening, stage.curvature_floored))


def first_whitening(
    prior: Prior, curvature: np.ndarray, groups: np.ndarray | None = None
) -> np.ndarray:
    """Returns W proportional to (prior precision + H)^(-1/4), with tr(W H W) = d.

    Args:
        prior: The prior.
        curvature: A positive definite guess H of the curvature, from :func:`start` (d, d).
        groups: Sites of group effects (d,), by default none.
    """
    groups = np.zeros(len(curvature), int) if groups is None else groups
    whitening = power_of(prior.precision + curvature, groups, -FIRST_POWER)
    return whitening * np.sqrt(len(curvature) / trace_of(whitening, curvature))


def denoise_scales(scales: np.ndarray, noise_sd: float) -> np.ndarray:
    """Returns posterior means of non-negative scales whose public guess is 1.

    The prior of each scale is exponential with mean 1. Its posterior is a normal distribution with
    mean ``scale - noise_sd**2``, cut off below 0.

    Args:
        scales: Scales plus noise (d,).
        noise_sd: Standard deviation of the noise.
    """
    noise_sd = max(noise_sd, 1e-12)
    place = scales / noise_sd - noise_sd
    # Far below 0, the two terms of the exact mean cancel. There we expand it in 1 / depth.
    depth = np.maximum(-place, 30.0)
    near = np.maximum(place, -30.0)
    hazard = np.exp(-(near**2) / 2 - np.log(2 * np.pi) / 2 - log_ndtr(near))
    tail = (1 - 2 / depth**2 + 10 / depth**4) / depth
    mean = noise_sd * np.where(place < -30.0, tail, near + hazard)
    return np.maximum(mean, SMALLEST_DIAGONAL)


def start(
    whitening: np.ndarray,
    scales: np.ndarray,
    noise_sd: float,
    mean_row: tuple[np.ndarray, float] | None = None,
    num_examples: int = 1,
) -> np.ndarray:
    r"""Returns a guess of the curvature from the small releases before the stages.

    The guess is a diagonal matrix. ``mean_row`` adds a matrix of rank one along the mean row of the
    design, and the diagonal decreases by the same amount. Let record i have the curvature
    :math:`h_i h_i'` and let :math:`r = \sum_i h_i`. By the Cauchy-Schwarz inequality,
    :math:`r r' / N` is at most the sum of the records' curvatures.

    Args:
        whitening: The public whitening (d, d).
        scales: Noisy diagonal of the whitened curvature (d,).
        noise_sd: Standard deviation of the noise on ``scales``.
        mean_row: Sum over records of the whitened :math:`h_i` plus noise (d,), and the standard
            deviation of that noise on each coordinate.
        num_examples: Number of records N.

    Returns:
        A positive definite matrix in the coordinates of theta (d, d).
    """
    diagonal = denoise_scales(scales, noise_sd) / np.diag(whitening) ** 2
    if mean_row is None:
        return np.diag(diagonal)
    total, row_noise = mean_row
    power = np.sum(total**2)
    # Part of the squared length that is not noise. Noise alone has d times its variance.
    signal = max(0.0, 1 - len(total) * row_noise**2 / power) if power > 0 else 0.0
    row = np.sqrt(signal) * (inverse(whitening) @ total)
    along = np.outer(row, row) / num_examples
    return np.diag(np.maximum(diagonal - np.diag(along), LEFT_ON_DIAGONAL * diagonal)) + along


def _floored(whitened: np.ndarray, template: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Eigenvalues, raised to at least 3 % of their mean, and eigenvectors.

    If no eigenvalue is positive because of the noise, the floor is 3 % of the smallest size that
    the curvature may have.
    """
    values, vectors = np.linalg.eigh(symmetric(whitened))
    level = max(np.mean(np.maximum(values, 0)), SMALLEST_SCALE * np.trace(template) / len(values))
    return np.maximum(values, FLOOR * level), vectors
