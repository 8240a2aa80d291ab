"""Langevin samplers whose thermal noise is the noise of privacy."""

from numpyro_dp.sgld.balance import sgd_as_sgld, sgld_as_sgd
from numpyro_dp.sgld.kernels import SGHMC, SGLD, PreconditionedSGLD
from numpyro_dp.sgld.mcmc import DPMCMC

__all__ = ["DPMCMC", "SGHMC", "SGLD", "PreconditionedSGLD", "sgd_as_sgld", "sgld_as_sgd"]
