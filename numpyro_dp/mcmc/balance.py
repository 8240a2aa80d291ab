r"""What budget, step size, clip norm and number of steps of a Langevin sampler say of each other.

Privacy noise of standard deviation :math:`s = \sigma C / q` in a score, times the step size
:math:`\eta`, is all the noise of SGLD at temperature T where

.. math:: \eta\,\sigma^2 C^2 = 2\,T q^2.

The noise multiplier :math:`\sigma` and the number of steps are bound by the accountant to the
budget. So any three of budget, step size, clip norm and steps leave the fourth to be found.

As a sub-class of DP-SGD (Theorem 1 of Zhang et al.): with n records and expected batches of B, SGLD
with step size :math:`\eta` takes the steps of DP-SGD on the *mean* loss with learning rate
:math:`n\eta` and noise multiplier :math:`B\sqrt{2T} / (n \sqrt\eta\, C)`; at T = 1/2 that is the
paper's :math:`|B| / (n \sqrt\eta\, C)`.

Reference:
    Zhang, Bu, Chen, Long (2021), Differentially private Bayesian neural networks on accuracy,
    privacy and reliability, Theorem 1 and appendix D. Their accountant, a central limit theorem
    for Gaussian differential privacy, is an approximation and no bound; here the plan's is used.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_dp._validate import check_int, check_real
from numpyro_dp.mcmc.kernels import SGLD
from numpyro_dp.privacy.accounting import TotalVariationError
from numpyro_dp.privacy.mechanism.clip_norm import ClipNorm
from numpyro_dp.privacy.mechanism.gaussian import build_mechanism
from numpyro_dp.privacy.plan import BudgetError
from numpyro_dp.run.settings import RunSettings
from numpyro_dp.run.spending import plan_for
from numpyro_dp.run.state import SensitiveState

__all__ = [
    "ChainSettings",
    "Resolved",
    "SGDSettings",
    "SGLDSettings",
    "check_heat",
    "check_settings",
    "resolve",
    "sgd_as_sgld",
    "sgld_as_sgd",
]

_MOST_STEPS = 10**7
_SLACK = 1e-5  # noise multipliers are rounded up to float32


class SGDSettings(NamedTuple):
    """Settings of DP-SGD on the mean loss.

    Attributes:
        learning_rate: Of the mean loss.
        noise_multiplier: Noise over clip norm.
        clip_norm: C.
    """

    learning_rate: float
    noise_multiplier: float
    clip_norm: float


class SGLDSettings(NamedTuple):
    """Settings of SGLD.

    Attributes:
        step_size: Of the score of the whole data set.
        clip_norm: C.
        temperature: T.
    """

    step_size: float
    clip_norm: float
    temperature: float


class ChainSettings(NamedTuple):
    """What a user asked for; see :class:`~numpyro_dp.DPMCMC`.

    Attributes:
        kernel: With the step size, which may be left out.
        num_warmup: Steps of a chain before its first sample.
        num_samples: Steps after that, or ``None``.
        num_chains: Chains.
        thinning: Every so many steps are kept.
        clip_norm: C, or ``None``.
        noise_multiplier: If given.
        run: The settings that all drivers share; a norm or noise that is left out stands there as
            1, until :func:`resolve` has found it.
    """

    kernel: SGLD
    num_warmup: int
    num_samples: int | None
    num_chains: int
    thinning: int
    clip_norm: ClipNorm | None
    noise_multiplier: float | None
    run: RunSettings

    @property
    def noise_is_open(self) -> bool:
        """Whether neither budget nor noise is given."""
        return self.run.budget is None and self.noise_multiplier is None


class Resolved(NamedTuple):
    """What was found for a run.

    Attributes:
        run: Settings with the clip norm and, where no budget finds it, the noise multiplier.
        num_samples: Steps of a chain after warm-up.
    """

    run: RunSettings
    num_samples: int


def sgld_as_sgd(
    step_size: float,
    clip_norm: float,
    num_examples: int,
    batch_size: float,
    temperature: float = 1.0,
) -> SGDSettings:
    r"""Returns the DP-SGD whose steps are those of SGLD.

    .. math:: \eta_{SGD} = n\eta, \qquad \sigma = \frac{B \sqrt{2T}}{n \sqrt\eta\, C}.

    Args:
        step_size: Of SGLD, as in :class:`~numpyro_dp.SGLD`.
        clip_norm: C.
        num_examples: n.
        batch_size: Expected size of a batch, B = q n.
        temperature: 1/2 gives the paper's form.

    Example:
        >>> from numpyro_dp import sgld_as_sgd
        >>> found = sgld_as_sgd(1e-5, 1.5, 60_000, 256, temperature=0.5)
        >>> round(found.learning_rate, 6), round(found.noise_multiplier, 4)
        (0.6, 0.8995)

    Reference:
        Zhang, Bu, Chen, Long (2021), Theorem 1.
    """
    _check(step_size=step_size, clip_norm=clip_norm, batch_size=batch_size, temperature=temperature)
    check_int("num_examples", num_examples, low=1)
    noise = batch_size * math.sqrt(2 * temperature / step_size) / (num_examples * clip_norm)
    return SGDSettings(num_examples * step_size, noise, clip_norm)


def sgd_as_sgld(
    learning_rate: float,
    noise_multiplier: float,
    clip_norm: float,
    num_examples: int,
    batch_size: float,
) -> SGLDSettings:
    r"""Returns the SGLD whose steps are those of DP-SGD; the noise makes its temperature.

    .. math:: \eta = \eta_{SGD} / n, \qquad T = \frac{\eta\,(\sigma C n / B)^2}{2}.

    (The paper fixes T = 1/2, which only the clip norm :math:`B / (\sqrt{n\,\eta_{SGD}}\,\sigma)`
    has.)

    Args:
        learning_rate: Of the mean loss.
        noise_multiplier: Noise over clip norm.
        clip_norm: C.
        num_examples: n.
        batch_size: Expected size of a batch, B = q n.

    Example:
        >>> from numpyro_dp import sgd_as_sgld
        >>> found = sgd_as_sgld(0.25, 1.3, 256 / (60_000 * 0.25) ** 0.5 / 1.3, 60_000, 256)
        >>> round(found.temperature, 6)
        0.5

    Reference:
        Zhang, Bu, Chen, Long (2021), Theorem 1.
    """
    _check(learning_rate=learning_rate, noise_multiplier=noise_multiplier, clip_norm=clip_norm,
           batch_size=batch_size)  # fmt: skip
    check_int("num_examples", num_examples, low=1)
    step_size = learning_rate / num_examples
    noise = noise_multiplier * clip_norm * num_examples / batch_size
    return SGLDSettings(step_size, clip_norm, step_size * noise**2 / 2)


def check_settings(settings: ChainSettings) -> None:
    """Raises unless at most one of budget (or noise), step size, clip norm and samples is missing.

    Reads nothing but the settings.
    """
    budget, norm, step_size = settings.run.budget, settings.clip_norm, settings.kernel.step_size
    given = {
        "budget": None if settings.noise_is_open else 0,
        "step_size": step_size,
        "clip_norm": norm,
        "num_samples": settings.num_samples,
    }
    missing = [name for name, value in given.items() if value is None]
    if len(missing) > 1:
        raise ValueError(
            "Expected all but one of budget (or noise_multiplier), step_size, clip_norm and "
            f"num_samples, got none of {missing}. The one left out follows from the others."
        )
    if settings.num_samples is None and (budget is None or callable(step_size)):
        raise ValueError(
            "Expected a budget and a constant step size where num_samples=None. They say how "
            "many steps there may be."
        )
    if missing and settings.noise_multiplier == 0:
        raise ValueError(
            f"Expected {missing[0]} to be given where noise_multiplier=0: without noise nothing "
            "follows from the rest."
        )


def resolve(settings: ChainSettings, num_examples: int) -> Resolved:
    """Finds what was left out. Reads no record."""
    kernel, run, samples = settings.kernel, settings.run, settings.num_samples
    chains = settings.num_chains
    known = 1 if samples is None else settings.num_warmup + samples
    sizes = step_sizes(kernel, known)
    if samples is not None:
        _check_epochs(run.sampler, num_examples, known, chains)
    if sizes is not None and (
        settings.clip_norm is None or samples is None or settings.noise_is_open
    ):
        # Standard deviation in the sum at which the privacy noise is all the noise.
        prob = run.sampler.inclusion_prob(num_examples)
        scale = prob * math.sqrt(kernel.largest_step_size(1.0) / float(sizes.max()))
        if settings.clip_norm is None:  # no noise multiplier depends on the clip norm
            plan = plan_for(run, num_examples, chains * known)
            run = run.changed(clip_norm=scale / _noise_scale(run, plan.noise_multiplier))
        elif settings.noise_multiplier is None:
            run = run.changed(noise_multiplier=scale / _noise_scale(run, 1.0))
    if samples is None:
        samples = _most_samples(settings, run, num_examples)
        _check_epochs(run.sampler, num_examples, settings.num_warmup + samples, chains)
    return Resolved(run, samples)


def check_heat(
    settings: ChainSettings, found: Resolved, state: SensitiveState, num_examples: int
) -> None:
    """Raises ValueError if the privacy noise alone heats the chain above its temperature."""
    sizes = step_sizes(settings.kernel, settings.num_warmup + found.num_samples)
    multiplier = float(state.noise_multiplier)
    if sizes is None or multiplier == 0:
        return
    prob = found.run.sampler.inclusion_prob(num_examples)
    largest = settings.kernel.largest_step_size(_noise_scale(found.run, multiplier) / prob)
    if sizes.max() > largest * (1 + _SLACK):
        raise ValueError(
            f"Expected step_size <= {largest:.4g}, where privacy noise is all the noise of "
            f"temperature {settings.kernel.temperature:g}, got {sizes.max():.4g}. Take a smaller "
            "step, or step_size=None for the largest; less noise (fewer steps, a smaller clip "
            "norm, a larger batch) allows larger ones."
        )


def _noise_scale(run: RunSettings, noise_multiplier: float) -> float:
    """The standard deviation of the noise in the sum, which grows with multiplier and norm."""
    mechanism = build_mechanism(run.mechanism, run.clip_norm, noise_multiplier)
    return check_real("noise_scale of mechanism", float(mechanism.noise_scale), low=0,
                      low_open=True, remedy="The noise is the thermal noise.")  # fmt: skip


def step_sizes(kernel: SGLD, num_steps: int) -> np.ndarray | None:
    """Returns the step size of each step, or ``None`` where it is to be found."""
    if kernel.step_size is None:
        return None
    if not callable(kernel.step_size):
        return np.asarray([kernel.step_size], np.float64)
    steps = jnp.arange(num_steps)
    sizes = jax.vmap(lambda step: jnp.asarray(kernel.step_size(step), float))(steps)
    sizes = np.asarray(sizes, np.float64)
    if not (np.isfinite(sizes).all() and (sizes > 0).all()):
        raise ValueError(
            f"Expected step_size to return finite numbers > 0, got {sizes.min()} to {sizes.max()} "
            f"in {num_steps} steps. Bound it from below."
        )
    return sizes


def _most_samples(settings: ChainSettings, run: RunSettings, num_examples: int) -> int:
    """The largest number of samples, a multiple of ``thinning``, that the budget covers."""
    thinning = settings.thinning

    def fits(units: int) -> bool:
        steps = settings.num_chains * (settings.num_warmup + units * thinning)
        try:
            plan_for(run, num_examples, steps)
        except (BudgetError, TotalVariationError):
            return False
        return True

    if not fits(1):
        raise BudgetError(
            f"Expected room for one sample after {settings.num_warmup} steps of warm-up, but at "
            f"the noise multiplier {run.noise_multiplier:.4g} that step size and clip norm make, "
            f"they exceed {run.budget}. Take smaller steps, a smaller clip norm or less warm-up."
        )
    low, high = 1, 2
    while fits(high) and high * thinning < _MOST_STEPS:
        low, high = high, 2 * high
    while high - low > max(1, low // 1000):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low * thinning


def _check_epochs(sampler: Any, num_examples: int, num_steps: int, chains: int) -> None:
    """Epochs that one chain leaves unfinished are not those of the next."""
    count = sampler.compositions
    if count(num_examples, chains * num_steps) != chains * count(num_examples, num_steps):
        raise ValueError(
            f"Expected whole epochs in each of {chains} chains, got {num_steps} steps by "
            f"{sampler!r}. Choose num_warmup + num_samples to end with an epoch."
        )


def _check(**values: float) -> None:
    for name, value in values.items():
        check_real(name, value, low=0, low_open=True)
