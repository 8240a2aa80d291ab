"""Which gradient one record contributes, for ``DPSVI(estimator=...)``."""

from numpyro_dp.vi.estimators import (
    aligned,
    aligned_natural,
    centred,
    natural,
    preconditioned,
    vanilla,
)

__all__ = ["aligned", "aligned_natural", "centred", "natural", "preconditioned", "vanilla"]
