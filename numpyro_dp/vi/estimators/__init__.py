"""Gradient estimators."""

from numpyro_dp.vi.estimators.aligned import aligned
from numpyro_dp.vi.estimators.centred import centred
from numpyro_dp.vi.estimators.geometric import aligned_natural, natural, preconditioned
from numpyro_dp.vi.estimators.vanilla import vanilla

__all__ = ["aligned", "aligned_natural", "centred", "natural", "preconditioned", "vanilla"]
