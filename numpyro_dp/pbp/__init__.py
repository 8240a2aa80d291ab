"""Probabilistic backpropagation for the weights of a network, with and without privacy."""

from numpyro_dp.pbp.dppbp import DPPBP
from numpyro_dp.pbp.model import RegressionNetwork
from numpyro_dp.pbp.reference import PBP

__all__ = ["DPPBP", "PBP", "RegressionNetwork"]
