"""Plots of private posteriors and budgets, with matplotlib: axes in, axes out."""

from numpyro_dp.posterior.plots import attack, forest, prior_share, utility

__all__ = ["attack", "forest", "prior_share", "utility"]
