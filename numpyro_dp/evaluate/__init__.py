"""How good is a posterior: distances to a reference, coverage, prediction, calibration."""

from numpyro_dp.evaluate.distances import (
    gaussian_kl,
    mean_proportional_absolute_error,
    proportional_absolute_error,
    standardised_error,
)
from numpyro_dp.evaluate.prediction import calibration_error, coverage, log_predictive_density

__all__ = [
    "calibration_error",
    "coverage",
    "gaussian_kl",
    "log_predictive_density",
    "mean_proportional_absolute_error",
    "proportional_absolute_error",
    "standardised_error",
]
