r"""The Gaussian mechanism of several steps that share one budget unequally.

The caller sets the share of a step just before it (:func:`asking`). A step with the share a adds
noise of standard deviation :math:`\sigma C / \sqrt a`. It spends :math:`a \mu^2` of the budget
:math:`\mu^2 = 1 / \sigma^2`. The share may depend on earlier releases. A privacy filter adds up
all shares, and stops a step that would bring their sum above 1.
"""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp
from jax import Array

from numpyro_dp._lazy import dpa
from numpyro_dp.core import Mechanism, MechanismState, Number, PyTree, Sampler
from numpyro_dp.privacy.mechanism.clip_norm import ClipNorm
from numpyro_dp.privacy.mechanism.gaussian import GaussianMechanism
from numpyro_dp.privacy.sampling import FullBatch

_UP = 1 + 1e-6  # keeps noise in single precision at least as wide as accounted for
_UNITS = 2**24  # of the squared budget. Whole numbers, so that their sum is exact


@dataclasses.dataclass(frozen=True)
class StagedGaussian:
    """The Gaussian mechanism of full-batch steps that share a budget unequally.

    Guarantee:
        All steps together are ``GaussianDpEvent(noise_multiplier)``, also if the share of a step
        depends on earlier releases. The noise of the steps is independent. A step without a
        share, or with more than is left, releases nothing: it returns NaN.

    Reference:
        A. Smith, A. Thakurta (2022), Fully adaptive composition for Gaussian differential privacy.
        A. Koskela, M. Tobaben, A. Honkela (2023), Individual privacy accounting with Gaussian
        differential privacy, ICLR.
    """

    def __call__(self, clip_norm: ClipNorm, noise_multiplier: Number) -> Mechanism:
        """Returns the mechanism. ``noise_scale`` is for a step that spends the whole budget."""
        base = GaussianMechanism()(clip_norm, noise_multiplier)

        def privatise(
            key: Array, total: PyTree, state: MechanismState
        ) -> tuple[PyTree, MechanismState]:
            spent, asked = state.memory
            given = (asked > 0) & (asked <= _UNITS - spent)
            width = jnp.where(given, _UP * jnp.sqrt(_UNITS / jnp.maximum(asked, 1)), jnp.nan)
            step = GaussianMechanism()(clip_norm, noise_multiplier * width)
            noisy, _ = step.privatise(key, total, state)
            memory = spent + jnp.where(given, asked, 0), jnp.zeros_like(asked)
            return noisy, state._replace(memory=memory)

        def compose(sampler: Sampler, num_examples: int, num_steps: int) -> dpa.DpEvent:
            if not isinstance(sampler, FullBatch):
                raise ValueError(f"Expected sampler=FullBatch() with {self!r}, got {sampler!r}.")
            # Of any number of steps, because each may spend all that is left.
            return base.event or dpa.NonPrivateDpEvent()

        def init(total: PyTree) -> tuple[Array, Array]:
            base.init(total)  # checks the size
            return jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32)

        return base._replace(init=init, privatise=privatise, compose=compose, whole=privatise)


def asking(memory: tuple[Array, Array], share: float) -> tuple[Array, Array]:
    """Returns the memory of a mechanism whose next step may spend a share, rounded down."""
    return memory[0], jnp.asarray(math.floor(share * _UNITS), jnp.int32)
