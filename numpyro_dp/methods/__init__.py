"""Methods beside the two that :func:`numpyro_dp.fit` uses. They import public names only."""
