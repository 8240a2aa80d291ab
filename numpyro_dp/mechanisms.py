"""What clips and adds noise, how a clip norm is found, and private loss curves."""

from numpyro_dp.privacy.mechanism.clip_norm import AdaptiveClip
from numpyro_dp.privacy.mechanism.gaussian import GaussianMechanism
from numpyro_dp.run.loss import LossRelease
from numpyro_dp.vi.simulate import simulated_clip_norm

__all__ = ["AdaptiveClip", "GaussianMechanism", "LossRelease", "simulated_clip_norm"]
