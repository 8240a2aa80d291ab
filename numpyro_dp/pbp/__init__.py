"""Probabilistic backpropagation for the weights of a network, with privacy."""

from numpyro_dp.pbp.driver import DPPBP
from numpyro_dp.pbp.model import RegressionNetwork

__all__ = ["DPPBP", "RegressionNetwork"]
