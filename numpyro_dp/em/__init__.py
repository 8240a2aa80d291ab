"""Private expectation maximisation of mixtures of normals."""

from numpyro_dp.em.dpem import DPEM

__all__ = ["DPEM"]
