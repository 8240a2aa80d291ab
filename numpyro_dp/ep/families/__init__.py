"""Natural-parameter algebra of exponential families.

A member of a family is a flat dict of arrays, its natural parameters; products of densities are
sums of those. Each constructor returns a :class:`Family`, the functions that go with them.
"""

from numpyro_dp.ep.families.base import (
    Family,
    Natural,
    damp,
    divide,
    inner,
    kl,
    multiply,
    power,
    sample,
)
from numpyro_dp.ep.families.gamma import beta, categorical, dirichlet, gamma
from numpyro_dp.ep.families.normal import diagonal_normal, isotropic_normal, normal
from numpyro_dp.ep.families.product import product
from numpyro_dp.ep.families.wishart import wishart

__all__ = [
    "Family",
    "Natural",
    "beta",
    "categorical",
    "damp",
    "diagonal_normal",
    "dirichlet",
    "divide",
    "gamma",
    "inner",
    "isotropic_normal",
    "kl",
    "multiply",
    "normal",
    "power",
    "product",
    "sample",
    "wishart",
]
