"""Langevin samplers whose thermal noise is the noise of privacy."""

from numpyro_dp.mcmc.driver import DPMCMC
from numpyro_dp.mcmc.kernels import SGHMC, SGLD, PreconditionedSGLD

__all__ = ["DPMCMC", "SGHMC", "SGLD", "PreconditionedSGLD"]
