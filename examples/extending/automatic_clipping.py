"""Automatic clipping, AUTO-S: every signal gets about the norm C (Bu et al. 2023, NeurIPS)."""

import dataclasses

import jax.numpy as jnp

from numpyro_dp.mechanisms import GaussianMechanism


@dataclasses.dataclass(frozen=True)
class AutomaticClipping:
    """Scales a signal s to ``C s / (|s| + gamma)``, which is shorter than C whatever s is."""

    gamma: float = 0.01

    def __call__(self, clip_norm, noise_multiplier):
        base = GaussianMechanism()(clip_norm, noise_multiplier)

        def scales(names, squares, margin=1.0):
            clipped = base.scales(names, squares, margin)  # 0 where a signal is not finite
            c_max = [norm * margin * (1 - 1e-6) for norm in clip_norm.of_blocks(names)]
            parts = zip(c_max, squares, clipped, strict=True)  # rounding does not reach C
            return tuple(jnp.where(f > 0, c / (s**0.5 + self.gamma), 0) for c, s, f in parts)

        return base._replace(scales=scales)
