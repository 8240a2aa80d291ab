"""Gradient estimators, one file for each."""

from numpyro_dp.vi.estimators.aligned import aligned
from numpyro_dp.vi.estimators.aligned_natural import aligned_natural
from numpyro_dp.vi.estimators.centred import centred
from numpyro_dp.vi.estimators.natural import natural
from numpyro_dp.vi.estimators.preconditioned import preconditioned
from numpyro_dp.vi.estimators.vanilla import vanilla

__all__ = ["aligned", "aligned_natural", "centred", "natural", "preconditioned", "vanilla"]
