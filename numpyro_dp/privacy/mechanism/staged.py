r"""One Gaussian release in parts: each step spends its share of a budget.

Step k adds noise of standard deviation :math:`\sigma C / \sqrt{a_k}` with
:math:`\sum_k a_k = 1`. Let :math:`\mu = 1 / \sigma` be the parameter of Gaussian differential
privacy. Step k spends :math:`a_k \mu^2` of :math:`\mu^2`. All steps together are *one* Gaussian
mechanism with noise multiplier :math:`\sigma`, even if later steps depend on earlier releases.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
from jax import Array

from numpyro_dp._lazy import dpa
from numpyro_dp.core import Mechanism, MechanismState, PyTree, Sampler
from numpyro_dp.privacy.mechanism.clip_norm import ClipNorm
from numpyro_dp.privacy.mechanism.gaussian import GaussianMechanism
from numpyro_dp.privacy.sampling import FullBatch

__all__ = ["StagedGaussian"]

_UP = 1 + 1e-6  # keeps noise in single precision at least as wide as accounted for


@dataclasses.dataclass(frozen=True)
class StagedGaussian:
    """The Gaussian mechanism of full-batch steps that share a budget unequally.

    Args:
        shares: Part of the squared budget that each step spends. They sum to 1.

    Guarantee:
        All steps together are ``GaussianDpEvent(noise_multiplier)``. The noise of the steps is
        independent. A step beyond the last share releases nothing: it returns NaN.

    Reference:
        J. Dong, A. Roth, W. J. Su (2022), Gaussian differential privacy, JRSS B, Corollary 2:
        the mu of Gaussian mechanisms compose as a root of a sum of squares, adaptively too.
    """

    shares: tuple[float, ...]

    def __post_init__(self) -> None:
        positive = bool(self.shares) and all(share > 0 for share in self.shares)  # false for NaN
        if not (positive and abs(math.fsum(self.shares) - 1) <= 1e-9):
            raise ValueError(f"Expected positive shares that sum to 1, got {self.shares}.")

    def __call__(self, clip_norm: ClipNorm, noise_multiplier: Any) -> Mechanism:
        """Returns the mechanism. ``noise_scale`` is for a step that spends the whole budget."""
        base = GaussianMechanism()(clip_norm, noise_multiplier)

        def privatise(
            key: Array, total: PyTree, state: MechanismState
        ) -> tuple[PyTree, MechanismState]:
            # Beyond the table the noise is NaN, so that such a step releases nothing.
            widths = jnp.asarray([_UP / math.sqrt(share) for share in self.shares])
            width = widths.at[state.memory].get(mode="fill", fill_value=jnp.nan)
            step = GaussianMechanism()(clip_norm, noise_multiplier * width)
            noisy, _ = step.privatise(key, total, state)
            return noisy, state._replace(memory=state.memory + 1)

        def compose(sampler: Sampler, num_examples: int, num_steps: int) -> dpa.DpEvent:
            if not isinstance(sampler, FullBatch):
                raise ValueError(f"Expected sampler=FullBatch() with {self!r}, got {sampler!r}.")
            spent = min(1.0, math.fsum(self.shares[:num_steps]))
            return dpa.GaussianDpEvent(base.event.noise_multiplier / math.sqrt(spent))

        def init(total: PyTree) -> Array:
            base.init(total)  # checks the size
            return jnp.zeros((), jnp.int32)

        return base._replace(init=init, privatise=privatise, compose=compose)
