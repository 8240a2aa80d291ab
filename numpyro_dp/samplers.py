"""How batches are drawn, for ``sampler=`` of every driver."""

from numpyro_dp.privacy.sampling import FixedSize, FullBatch, Permutation, Poisson

__all__ = ["FixedSize", "FullBatch", "Permutation", "Poisson"]
