"""Plots of private posteriors, runs and budgets, with matplotlib: axes in, axes out."""

from numpyro_dp.posterior.plots import (
    attack,
    clip_norms,
    coverage,
    epsilon_by_step,
    forest,
    iterates,
    prior_share,
    reliability,
    utility,
)

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
