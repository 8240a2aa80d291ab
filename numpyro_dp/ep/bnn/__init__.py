"""Networks with ReLU layers: moments, sites and steps of probabilistic backpropagation."""

from numpyro_dp.ep.bnn.model import RegressionNetwork

__all__ = ["RegressionNetwork"]
