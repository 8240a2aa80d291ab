"""Plots of private posteriors, runs and budgets, with matplotlib: axes in, axes out."""

from numpyro_dp.posterior.plots import coverage, forest, prior_share, reliability
from numpyro_dp.posterior.run_plots import attack, clip_norms, epsilon_by_step, iterates, utility

__all__ = [
    "attack",
    "clip_norms",
    "coverage",
    "epsilon_by_step",
    "forest",
    "iterates",
    "prior_share",
    "reliability",
    "utility",
]
