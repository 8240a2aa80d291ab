"""Post-processing of private iterates, free of privacy cost."""

from numpyro_dp.posterior.averaging import Average, average
from numpyro_dp.posterior.convergence import drift_check, regression_check, split_rhat_check
from numpyro_dp.posterior.noise_aware import NoiseAware, noise_aware
from numpyro_dp.posterior.ornstein_uhlenbeck import (
    averaged_covariance,
    guide_curvature,
    stationary_covariance,
)

__all__ = [
    "Average",
    "NoiseAware",
    "average",
    "averaged_covariance",
    "drift_check",
    "guide_curvature",
    "noise_aware",
    "regression_check",
    "split_rhat_check",
    "stationary_covariance",
]
