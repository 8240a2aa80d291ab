r"""The balance of step size and privacy noise in a Langevin sampler.

The privacy noise in a score has standard deviation :math:`s = \sigma C / q`. Times the step size
:math:`\eta`, it is all the noise of SGLD at temperature T if

.. math:: \eta\,\sigma^2 C^2 = 2\,T q^2.

Budget, clip norm and number of steps determine the noise multiplier :math:`\sigma`, and so the
largest step size.

SGLD is a sub-class of DP-SGD (Theorem 1 of Zhang et al.). With n records and expected batches of B,
SGLD with step size :math:`\eta` takes the steps of DP-SGD on the *mean* loss with learning rate
:math:`n\eta` and noise multiplier :math:`B\sqrt{2T} / (n \sqrt\eta\, C)`. At T = 1/2 this is the
paper's :math:`|B| / (n \sqrt\eta\, C)`.

Reference:
    Zhang, Bu, Chen, Long (2021), Differentially private Bayesian neural networks on accuracy,
    privacy and reliability, Theorem 1 and appendix D. Their accountant, a central limit theorem
    for Gaussian differential privacy, is an approximation and not a bound. It is not used here.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_dp._validate import check_real
from numpyro_dp.mcmc.kernels import SGLD
from numpyro_dp.privacy.mechanism.gaussian import build_mechanism
from numpyro_dp.run.settings import RunSettings
from numpyro_dp.run.state import SensitiveState

__all__ = ["ChainSettings", "check_heat", "check_steps"]

_SLACK = 1e-5  # noise multipliers are rounded up to float32


class ChainSettings(NamedTuple):
    """Settings of :class:`~numpyro_dp.DPMCMC`.

    Attributes:
        kernel: The kernel, with its step size or ``None`` for the largest.
        num_warmup: Steps of a chain before its first sample.
        num_samples: Steps of a chain after warmup.
        num_chains: Number of chains.
        thinning: One of this many steps is kept.
        run: The settings that all drivers share.
    """

    kernel: SGLD
    num_warmup: int
    num_samples: int
    num_chains: int
    thinning: int
    run: RunSettings

    @property
    def num_steps(self) -> int:
        """Number of steps of a chain."""
        return self.num_warmup + self.num_samples


def check_steps(settings: ChainSettings, num_examples: int) -> None:
    """Raises ValueError for step sizes that are not numbers > 0, and for unfinished epochs.

    The accountant counts epochs of all chains together, but a chain cannot finish the epoch of
    another. Reads no record.
    """
    _step_sizes(settings)
    count, chains, steps = (
        settings.run.sampler.compositions,
        settings.num_chains,
        settings.num_steps,
    )
    if count(num_examples, chains * steps) != chains * count(num_examples, steps):
        raise ValueError(
            f"Each of {chains} chains must run whole epochs, but num_warmup + num_samples={steps} "
            f"steps of {settings.run.sampler!r} end inside one. Choose a multiple of an epoch."
        )


def check_heat(settings: ChainSettings, state: SensitiveState, num_examples: int) -> None:
    """Raises ValueError if the privacy noise alone heats the chain above its temperature."""
    kernel, run, sizes = settings.kernel, settings.run, _step_sizes(settings)
    multiplier = float(state.noise_multiplier)
    if sizes is None or multiplier == 0:
        return
    mechanism = build_mechanism(run.mechanism, run.clip_norm, multiplier)
    scale = check_real("noise_scale of mechanism", float(mechanism.noise_scale), low=0,
                       low_open=True, remedy="It is the thermal noise.")  # fmt: skip
    largest = kernel.largest_step_size(scale / run.sampler.inclusion_prob(num_examples))
    if sizes.max() > largest * (1 + _SLACK):
        raise ValueError(
            f"Expected step_size <= {largest:.4g}, got {sizes.max():.4g}. With a larger step, the "
            f"privacy noise alone heats the chain above temperature {kernel.temperature:g}. Take a "
            "smaller step, or step_size=None for the largest. Less noise allows larger steps: "
            "fewer steps, a smaller clip norm or a larger batch."
        )


def _step_sizes(settings: ChainSettings) -> np.ndarray | None:
    """Returns the step size of each step, or ``None`` for the largest."""
    size, num_steps = settings.kernel.step_size, settings.num_steps
    if size is None:
        return None
    if not callable(size):
        return np.asarray([size], np.float64)
    sizes = jax.vmap(lambda step: jnp.asarray(size(step), float))(jnp.arange(num_steps))
    sizes = np.asarray(sizes, np.float64)
    if not (np.isfinite(sizes).all() and (sizes > 0).all()):
        raise ValueError(
            f"Expected step_size to return finite numbers > 0, got {sizes.min()} to {sizes.max()} "
            f"in {num_steps} steps. Set a positive lower limit."
        )
    return sizes
