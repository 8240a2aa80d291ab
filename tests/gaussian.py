"""The Gaussian mechanism of a clip norm as a user writes it, or of traced numbers."""

import jax

from numpyro_dp.privacy.mechanism.clip_norm import ClipNorm
from numpyro_dp.privacy.mechanism.gaussian import GaussianMechanism, build_mechanism


def gaussian(clip_norm, noise_multiplier, batch_size=None):
    norms = clip_norm if isinstance(clip_norm, dict) else {...: clip_norm}
    if any(isinstance(norm, jax.Array) for norm in norms.values()):  # nothing to check
        norm = ClipNorm(tuple(norms), tuple(norms.values()))
    else:
        norm = ClipNorm.of(clip_norm)
    return build_mechanism(GaussianMechanism(), norm, noise_multiplier, batch_size)
