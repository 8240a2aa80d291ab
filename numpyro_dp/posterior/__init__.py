"""Post-processing of private iterates, free of privacy cost."""

from numpyro_dp.posterior.averaging import Average, average
from numpyro_dp.posterior.convergence import drift_check, regression_check, split_rhat_check
from numpyro_dp.posterior.noise_aware import NoiseAware, noise_aware

__all__ = [
    "Average",
    "NoiseAware",
    "average",
    "drift_check",
    "noise_aware",
    "regression_check",
    "split_rhat_check",
]
