"""The Gaussian mechanism of a clip norm as a user writes it."""

from numpyro_dp.privacy.mechanism.clip_norm import ClipNorm
from numpyro_dp.privacy.mechanism.gaussian import GaussianMechanism, build_mechanism


def gaussian(clip_norm, noise_multiplier, batch_size=None):
    norm = ClipNorm.of(clip_norm)
    return build_mechanism(GaussianMechanism(), norm, noise_multiplier, batch_size)
