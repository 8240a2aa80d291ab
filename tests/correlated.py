"""Correlated noise: a mechanism with a memory and an event of its own, written as a user would."""

import dataclasses
import math

import jax
import jax.numpy as jnp
from dp_accounting.dp_event import GaussianDpEvent

from numpyro_dp.core import Mechanism
from numpyro_dp.mechanisms import GaussianMechanism
from numpyro_dp.samplers import FullBatch


@dataclasses.dataclass(frozen=True)
class CorrelatedNoise:
    r"""Step t gets the noise z_t - decay * z_{t-1}: the matrix mechanism with C = (I - decay S)^-1.

    The sums X of all T steps are C^-1 (C X + Z). A record that takes part in every step moves X by
    at most sqrt(T) times the sensitivity, and C X by at most 1 / (1 - decay) times that.
    """

    decay: float = 0.5

    def __call__(self, clip_norm, noise_multiplier) -> Mechanism:
        base = GaussianMechanism()(clip_norm, noise_multiplier)

        def privatise(key, total, state):
            fresh, _ = base.privatise(key, jax.tree.map(jnp.zeros_like, total), state)
            add = jax.tree.map(lambda z, last: z - self.decay * last, fresh, state.memory)
            noisy = jax.tree.map(lambda x, noise: x + noise, total, add)
            return noisy, state._replace(memory=fresh)

        def compose(sampler, num_examples, num_steps):
            if not isinstance(sampler, FullBatch):
                raise ValueError(f"Expected sampler=FullBatch() with {self!r}, got {sampler!r}.")
            gain = (1 - self.decay**num_steps) / (1 - self.decay) * math.sqrt(num_steps)
            return GaussianDpEvent(base.event.noise_multiplier / gain)

        return base._replace(
            init=lambda total: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), total),
            privatise=privatise,
            noise_scale=base.noise_scale * math.sqrt(1 + self.decay**2),
            compose=compose,
        )
