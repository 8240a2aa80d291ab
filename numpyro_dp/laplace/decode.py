r"""The posterior of theta given all released values, from a linear model.

Stage j releases the sum of the records' scores around :math:`m_j`. The model of all stages is that
of :mod:`numpyro_dp.posterior.likelihood`: :math:`\phi` is the optimum of the data, :math:`H` the
denoised curvature of the newest stage and :math:`E` its error. All stages share :math:`\phi` and
:math:`E`, because they use the same records. Counting the records again at each stage would make
intervals too narrow.

Everything here is a function of released values and has no privacy cost.

Reference:
    The project's own method: a linear model with errors in its matrix.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools

import numpy as np

from numpyro_dp.laplace.curvature import Stage
from numpyro_dp.posterior.algebra import solve, symmetric, trace_of
from numpyro_dp.posterior.likelihood import Prior, believed_part, decode, matrix_error

FIRST_DISCREPANCY = 0.3  # relative non-linearity that is assumed for draws from the prior
DOUBTED = 0.25  # see believed_curvature
UNCERTAIN_STEP = 0.5  # relative standard deviation of the step of the mean in the first stage
SMALLEST_KAPPA = 0.1
CLIPPED = 0.1  # usual part of the variance of scores that clipping removes
AGREEING = 3.0  # standard errors that an earlier stage may be off along its step


def with_discrepancies(stages: tuple[Stage, ...]) -> tuple[Stage, ...]:
    r"""Returns the stages, each with the distance of its own curvature from the newest one.

    For an earlier stage, the discrepancy is the mean square of :math:`A_j - W_j H W_j` minus the
    variance of its noise. The newest stage has no such estimate yet. Its discrepancy is assumed to
    be a share of the square of its level :math:`\mathrm{tr}(W H W) / d`. The share falls with the
    uncertainty V before the stage:

    .. math:: \min(0.3^2, 1 / (d + 1)) \min(1, \mathrm{tr}(W V W) / \mathrm{tr}(W V_1 W)).

    A GOE error E of variance v has a mean :math:`|E a|^2 = v (d + 1) |a|^2 / 2`. In many dimensions
    the error of :math:`H a` then has half of its square. The discrepancy of earlier stages is not
    used here. The curvature changes most along the line from the mean to the optimum. That is one
    direction of d, which a mean square over all entries hides.

    Args:
        stages: All stages so far, oldest first.
    """
    first, newest, size = stages[0], stages[-1], len(stages[-1].mean)
    found = []
    for stage in stages[:-1]:
        gap = stage.noisy_curvature - stage.whitening @ newest.curvature @ stage.whitening
        # The product has entries at pairs that were not released, and the release has none.
        gap = np.where(stage.pairs, gap, 0)
        excess = np.sum(gap**2) / newest.entries - stage.curvature_noise**2
        found.append(dataclasses.replace(stage, discrepancy=max(0.0, float(excess))))
    width, wide = (trace_of(newest.whitening, stage.covariance) for stage in (newest, first))
    level = trace_of(newest.whitening, newest.curvature_floored) / size
    assumed = min(FIRST_DISCREPANCY**2, 1 / (newest.width + 1)) * level**2 * min(1.0, width / wide)
    return (*found, dataclasses.replace(newest, discrepancy=float(assumed)))


def with_step(
    stages: tuple[Stage, ...], mean: np.ndarray, covariance: np.ndarray
) -> tuple[tuple[Stage, ...], np.ndarray]:
    r"""Returns the stages and the covariance, with the uncertainty of the newest step added.

    The curvature changes along the step of the mean m, but a discrepancy spreads this over all
    directions. So the length of the step :math:`u = m - m_k` gets a standard deviation. Relative to
    the step, it falls with the uncertainty before the stage:

    .. math:: \tfrac12 \min(1, \mathrm{tr}(W V W) / \mathrm{tr}(W V_1 W))^{1/2}\, u.

    This is added to the covariance, and to the errors of the stage in later decodes. It does not
    change the mean of its own stage, because a prior of many latents would pull the mean back.

    Args:
        stages: All stages so far.
        mean: The mean that was decoded from them (d,).
        covariance: The covariance that was decoded from them (d, d).
    """
    newest = stages[-1]
    width, wide = (trace_of(newest.whitening, s.covariance) for s in (newest, stages[0]))
    step = UNCERTAIN_STEP * np.sqrt(min(1.0, width / wide)) * (mean - newest.mean)
    done = dataclasses.replace(newest, step=step)
    return (*stages[:-1], done), covariance + np.outer(step, step)


def sampling_ratio(stage: Stage, noisy_power: float, power_noise: float) -> float:
    r"""Returns kappa, the sampling variance of the clipped scores divided by their slope.

    .. math:: \kappa = x + e + e^2 / 0.1, \qquad x = \text{power} / \mathrm{tr}(W H W),

    limited to [0.1, 1]. Without clipping it is 1. Clipping lowers the variance of the scores more
    than their slope. The last term makes :math:`x` the most likely value, if :math:`1 - \kappa` has
    an exponential prior of mean 0.1 and x a noise of standard deviation e. One e is for caution.

    Args:
        stage: The stage that released the power.
        noisy_power: Sum over records of their expected squared whitened scores, plus noise.
        power_noise: Standard deviation of that noise.
    """
    slope = max(trace_of(stage.whitening, stage.curvature_floored), 1e-9)
    noise = power_noise / slope
    return float(np.clip(noisy_power / slope + noise + noise**2 / CLIPPED, SMALLEST_KAPPA, 1.0))


def excess_ratio(
    power: float, excess: float, noise: tuple[float, float], clip: float, doubt: float
) -> tuple[float, float]:
    r"""Returns the variance of scores relative to what the model says, and its standard error.

    It is at least so large, because the excess has a smaller clip norm :math:`C_e` than the power.
    Each record's observed square is at most :math:`C_e^2`, and has the expected one as its mean. So
    in a correct model the excess varies by at most :math:`C_e^2` times the power, next to its
    noise.

    This holds at the true latents. Draws differ from them by their covariance V, which adds about
    :math:`3u` to the ratio (at most, for a normal or a binary outcome), and moves the variance of a
    count by :math:`\sqrt u`, with :math:`u = \mathrm{tr}(H V) / N`.

    Args:
        power: Sum over records of the expected squared whitened scores, plus noise.
        excess: Sum over records of the excess, plus noise. See
            :mod:`numpyro_dp.laplace.signal`.
        noise: Standard deviations of the two noises.
        clip: The clip norm of the excess.
        doubt: The number u.
    """
    power = max(power, 0.0) + noise[0]  # for caution
    error = np.hypot(noise[1], clip * np.sqrt(power))
    error = np.sqrt((error / power) ** 2 + doubt + (3 * doubt) ** 2)
    return float(1 + excess / power - 3 * doubt), float(error)


def decode_stages(
    prior: Prior,
    stages: tuple[Stage, ...],
    kappa: float,
    begin: tuple[np.ndarray, np.ndarray] | None = None,
    variance: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    r"""Returns mean (d,) and covariance (d, d) of theta given all stages that agree.

    Far from the optimum, the linear model is wrong. So the newest stage is decoded alone. Earlier
    ones follow, newest first. A stage is left out if it contradicts what is known by then. With its
    residual :math:`r = S_j - H (m - m_j)`, the covariance T of r, and :math:`u = m - m_j`, this is

    .. math:: r' T^{-1} r > d + 2 \sqrt{2 d} \quad\text{or}\quad (u'r)^2 > 9\, u' T u.

    Curvature changes most along u, which is one direction of d.

    Args:
        prior: The prior of theta.
        stages: All stages so far, oldest first, from :func:`with_discrepancies`.
        kappa: See :func:`sampling_ratio`. In a wrong model it is larger, by the part of
            :func:`excess_ratio` that is sure.
        begin: Initial mean and covariance of the rounds, from the decode of the previous stage. By
            default the prior's.
        variance: The variance J of the sum of all scores (d, d). The optimum of the data then
            varies by :math:`H^{-1} J H^{-1}` in place of :math:`\kappa H^{-1}`.
    """
    *earlier, newest = stages
    size, curvature = len(prior.mean), believed_curvature(newest)
    slope = newest.curvature_floored
    sampling = slope / kappa if variance is None else slope @ solve(variance, slope)
    kept = (newest,)
    begin = begin or (prior.mean, prior.covariance)
    mean, covariance = _decoded(prior, kept, sampling, begin)
    for stage in reversed(earlier):
        # The newest stage comes last, because its curvature has the errors that stages share.
        errors = _error_covariance((stage, newest), mean, covariance)[:size, :size]
        # The residual has the mean in place of the unknown phi.
        errors = errors + curvature @ covariance @ curvature
        away = mean - stage.mean
        residual = stage.score - curvature @ away
        overall = residual @ solve(errors, residual) / size
        along = (away @ residual) ** 2 / max(away @ errors @ away, 1e-300)
        if overall < 1 + 2 * np.sqrt(2 / size) and along < AGREEING**2:
            kept = (stage, *kept)
            # Decode before the next test: each stage is compared with all that is known by then.
            mean, covariance = _decoded(prior, kept, sampling, (mean, covariance))
    return mean, covariance


def _decoded(
    prior: Prior,
    stages: tuple[Stage, ...],
    sampling: np.ndarray,
    begin: tuple[np.ndarray, np.ndarray],
) -> tuple[np.ndarray, np.ndarray]:
    """Mean and covariance given some stages, from a first guess of both."""
    curvature = believed_curvature(stages[-1])
    targets = np.stack([stage.score + curvature @ stage.mean for stage in stages])
    errors = functools.partial(_error_covariance, stages)
    return decode(prior, targets, curvature, sampling, errors, begin)


def believed_curvature(stage: Stage) -> np.ndarray:
    r"""The curvature without directions that may be only noise, in the coordinates of theta (d, d).

    A GOE error of variance v maps a unit vector to a vector of mean squared length
    :math:`v (d + 1) / 2`. The doubt of an eigenvalue is v d / 4.
    """
    whitened = stage.whitening @ stage.curvature @ stage.whitening
    values, vectors = np.linalg.eigh(symmetric(whitened))
    values = believed_part(values, DOUBTED * stage.curvature_error * stage.width)
    turned = stage.unwhitening @ vectors
    return symmetric((turned * values) @ turned.T)


def _error_covariance(
    stages: tuple[Stage, ...],
    mean: np.ndarray,
    covariance: np.ndarray,
) -> np.ndarray:
    r"""The (K d, K d) covariance of :math:`S_j - H (\phi - m_j)` over all K stages.

    With :math:`a_j = m - m_j` and :math:`M_{jk} = W^{-1} (V + a_j a_k') W^{-1}`, a GOE error of
    variance v has the covariance :math:`v\, W^{-1} (\mathrm{tr}(M) I + M') W^{-1} / 2`. If entries
    have other variances P, it is :math:`W^{-1} (\mathrm{diag}(P\, \mathrm{diag} M) + P \circ M')
    W^{-1} / 2`. An error in the size of the template B has its variance times
    :math:`T M T`, with :math:`T = W^{-1} B`. These two errors come from the newest stage and couple
    all stages. Noise and discrepancy act on the diagonal block of their own stage.
    """
    newest, size, count = stages[-1], len(mean), len(stages)
    away = np.stack([mean - stage.mean for stage in stages])
    own, shape = away @ newest.turned.T, newest.turned.T @ newest.template
    # All terms are linear in V + a a'. That of V is the same for all pairs of stages.
    spread = newest.turned @ covariance @ newest.turned.T
    errors = newest.curvature_error / 2 * np.where(newest.pairs, newest.errors, 0)
    common = _turned_error(newest, spread, errors)
    common += shape @ (newest.template_scale_variance * spread) @ shape.T
    sizes = (shape @ (own[:, :, None] * newest.size_factor)).reshape(count * size, -1)
    blocks = (sizes @ sizes.T).reshape(count, size, count, size) + common[:, None]
    if np.all(newest.pairs) and np.ptp(newest.errors) == 0:  # the same as below, by vectors
        turned = own @ newest.turned
        found = np.kron(own @ own.T, newest.turned.T @ newest.turned).reshape(blocks.shape)
        blocks += newest.curvature_error / 2 * (found + np.einsum("ka,jb->jakb", turned, turned))
    else:
        for j, k in itertools.combinations_with_replacement(range(count), 2):
            found = _turned_error(newest, np.outer(own[j], own[k]), errors)
            blocks[j, :, k] += found
            blocks[k, :, j] += found.T * (j != k)
    for j, stage in enumerate(stages):
        blocks[j, :, j] += (stage.unwhitening * stage.score_noise**2) @ stage.unwhitening
        moment = stage.turned @ (covariance + np.outer(away[j], away[j])) @ stage.turned.T
        blocks[j, :, j] += _turned_error(stage, moment, stage.discrepancy / 2 * stage.pairs)
        if stage.step is not None:
            pulled = newest.curvature @ stage.step
            blocks[j, :, j] += np.outer(pulled, pulled)
    return blocks.reshape(count * size, count * size)


def _turned_error(stage: Stage, moment: np.ndarray, variances: np.ndarray) -> np.ndarray:
    """Covariance (d, d) of E a, for an error E in whitened coordinates. See ``matrix_error``."""
    return stage.turned.T @ matrix_error(moment, variances) @ stage.turned
