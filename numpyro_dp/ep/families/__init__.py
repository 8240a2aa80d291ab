"""Natural-parameter algebra of exponential families.

A member of a family is a flat dict of arrays, its natural parameters. To multiply densities, add
natural parameters. Each constructor returns a :class:`Family`, which holds the family's functions.
"""

from numpyro_dp.ep.families.base import (
    Family,
    Natural,
    damp,
    divide,
    multiply,
    power,
    product,
    sample,
)
from numpyro_dp.ep.families.gamma import beta, dirichlet, gamma
from numpyro_dp.ep.families.normal import diagonal_normal, isotropic_normal, normal

__all__ = [
    "Family",
    "Natural",
    "beta",
    "damp",
    "diagonal_normal",
    "dirichlet",
    "divide",
    "gamma",
    "isotropic_normal",
    "multiply",
    "normal",
    "power",
    "product",
    "sample",
]
