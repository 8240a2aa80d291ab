"""Private expectation maximisation of mixtures of normals."""

from numpyro_dp.methods.em.dpem import DPEM

__all__ = ["DPEM"]
