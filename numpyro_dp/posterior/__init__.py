"""Post-processing of private iterates, free of privacy cost."""

from numpyro_dp.posterior.averaging import Average, average, trace_sd
from numpyro_dp.posterior.convergence import drift_check, regression_check, split_rhat_check
from numpyro_dp.posterior.folds import TailAverage, exponential_average, tail_average
from numpyro_dp.posterior.inference_data import to_arviz
from numpyro_dp.posterior.noise_aware import NoiseAware, noise_aware
from numpyro_dp.posterior.ornstein_uhlenbeck import (
    averaged_covariance,
    guide_curvature,
    stationary_covariance,
)
from numpyro_dp.posterior.posterior import Posterior
from numpyro_dp.posterior.posterior_summary import PosteriorSummary
from numpyro_dp.posterior.samples import posterior_samples
from numpyro_dp.posterior.summary import Summary, summary
from numpyro_dp.posterior.synthetic import Combined, combine, synthetic_data

__all__ = [
    "Average",
    "Combined",
    "NoiseAware",
    "Posterior",
    "PosteriorSummary",
    "Summary",
    "TailAverage",
    "average",
    "averaged_covariance",
    "combine",
    "drift_check",
    "exponential_average",
    "guide_curvature",
    "noise_aware",
    "posterior_samples",
    "regression_check",
    "split_rhat_check",
    "stationary_covariance",
    "summary",
    "synthetic_data",
    "tail_average",
    "to_arviz",
    "trace_sd",
]
