"""What clips and adds noise, clip norms that adapt, and private loss curves."""

from numpyro_dp.privacy.mechanism.clip_norm import AdaptiveClip
from numpyro_dp.privacy.mechanism.gaussian import GaussianMechanism
from numpyro_dp.privacy.mechanism.loss import LossRelease

__all__ = ["AdaptiveClip", "GaussianMechanism", "LossRelease"]
