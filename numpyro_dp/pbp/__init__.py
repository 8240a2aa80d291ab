"""Private message passing for the weights of a network: probabilistic backpropagation."""

from numpyro_dp.pbp.driver import DPPBP, PBP
from numpyro_dp.pbp.model import RegressionNetwork

__all__ = ["DPPBP", "PBP", "RegressionNetwork"]
