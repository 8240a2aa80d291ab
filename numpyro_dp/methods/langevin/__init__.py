"""Langevin samplers that use the privacy noise as their thermal noise."""

from numpyro_dp.methods.langevin.dpmcmc import DPMCMC
from numpyro_dp.methods.langevin.kernels import SGHMC, SGLD, PreconditionedSGLD

__all__ = ["DPMCMC", "SGHMC", "SGLD", "PreconditionedSGLD"]
