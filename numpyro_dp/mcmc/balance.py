r"""The balance of step size and privacy noise in a Langevin sampler.

Privacy noise of standard deviation :math:`s = \sigma C / q` in a score, times the step size
:math:`\eta`, is all the noise of SGLD at temperature T where

.. math:: \eta\,\sigma^2 C^2 = 2\,T q^2.

So budget, clip norm and number of steps, of which the noise multiplier :math:`\sigma` follows, give
the largest step size.

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
    """What a user asked for; see :class:`~numpyro_dp.DPMCMC`.

    Attributes:
        kernel: With the step size, which may be left out.
        num_warmup: Steps of a chain before its first sample.
        num_samples: Steps after that.
        num_chains: Chains.
        thinning: Every so many steps are kept.
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
        """Steps of a chain."""
        return self.num_warmup + self.num_samples


def check_steps(settings: ChainSettings, num_examples: int) -> None:
    """Raises ValueError for step sizes that are no numbers > 0, and for unfinished epochs.

    Epochs that one chain leaves unfinished are not those of the next. Reads no record.
    """
    _step_sizes(settings)
    count, chains, steps = (
        settings.run.sampler.compositions,
        settings.num_chains,
        settings.num_steps,
    )
    if count(num_examples, chains * steps) != chains * count(num_examples, steps):
        raise ValueError(
            f"Expected whole epochs in each of {chains} chains, got {steps} steps by "
            f"{settings.run.sampler!r}. Choose num_warmup + num_samples to end with an epoch."
        )


def check_heat(settings: ChainSettings, state: SensitiveState, num_examples: int) -> None:
    """Raises ValueError if the privacy noise alone heats the chain above its temperature."""
    kernel, run, sizes = settings.kernel, settings.run, _step_sizes(settings)
    multiplier = float(state.noise_multiplier)
    if sizes is None or multiplier == 0:
        return
    mechanism = build_mechanism(run.mechanism, run.clip_norm, multiplier)
    scale = check_real("noise_scale of mechanism", float(mechanism.noise_scale), low=0,
                       low_open=True, remedy="The noise is the thermal noise.")  # fmt: skip
    largest = kernel.largest_step_size(scale / run.sampler.inclusion_prob(num_examples))
    if sizes.max() > largest * (1 + _SLACK):
        raise ValueError(
            f"Expected step_size <= {largest:.4g}, where privacy noise is all the noise of "
            f"temperature {kernel.temperature:g}, got {sizes.max():.4g}. Take a smaller "
            "step, or step_size=None for the largest; less noise (fewer steps, a smaller clip "
            "norm, a larger batch) allows larger ones."
        )


def _step_sizes(settings: ChainSettings) -> np.ndarray | None:
    """Returns the step size of each step, or ``None`` where it is to be found."""
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
            f"in {num_steps} steps. Bound it from below."
        )
    return sizes
