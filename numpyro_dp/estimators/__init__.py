"""Gradient estimators: one file each, three functions each."""

from numpyro_dp.estimators.aligned import aligned
from numpyro_dp.estimators.vanilla import vanilla

__all__ = ["aligned", "vanilla"]
