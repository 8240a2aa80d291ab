"""Private expectation maximisation of mixtures of normals."""

from numpyro_dp.em.driver import DPEM

__all__ = ["DPEM"]
