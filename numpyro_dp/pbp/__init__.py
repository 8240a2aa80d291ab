"""Probabilistic backpropagation for the weights of a network, with and without privacy."""

from numpyro_dp.pbp.driver import DPPBP, PBP
from numpyro_dp.pbp.model import RegressionNetwork

__all__ = ["DPPBP", "PBP", "RegressionNetwork"]
