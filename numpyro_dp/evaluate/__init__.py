"""How good is a posterior: distances to a reference, coverage, prediction, calibration."""

from numpyro_dp.evaluate.classification import (
    accuracy,
    brier_score,
    calibration_error,
    decompose_entropy,
    decompose_variance,
    log_score,
    reliability,
)
from numpyro_dp.evaluate.distances import (
    gaussian_kl,
    mean_proportional_absolute_error,
    proportional_absolute_error,
    standardised_error,
)
from numpyro_dp.evaluate.plots import plot_class_probabilities, plot_intervals, plot_reliability
from numpyro_dp.evaluate.prediction import central_intervals, coverage, log_predictive_density
from numpyro_dp.evaluate.temperature import tempered, tempering_guide, tempering_model

__all__ = [
    "accuracy",
    "brier_score",
    "calibration_error",
    "central_intervals",
    "coverage",
    "decompose_entropy",
    "decompose_variance",
    "gaussian_kl",
    "log_predictive_density",
    "log_score",
    "mean_proportional_absolute_error",
    "plot_class_probabilities",
    "plot_intervals",
    "plot_reliability",
    "proportional_absolute_error",
    "reliability",
    "standardised_error",
    "tempered",
    "tempering_guide",
    "tempering_model",
]
