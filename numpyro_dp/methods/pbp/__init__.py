"""Probabilistic backpropagation for the weights of a network, with and without privacy."""

from numpyro_dp.methods.pbp.dppbp import DPPBP
from numpyro_dp.methods.pbp.model import RegressionNetwork
from numpyro_dp.methods.pbp.reference import PBP

__all__ = ["DPPBP", "PBP", "RegressionNetwork"]
