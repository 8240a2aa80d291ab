r"""The pairs of latents whose curvature is released, for models with many latents.

A release holds one value for each pair. In models with hundreds of latents, most latents are
effects of groups. A record sees one effect of such a site, so two effects of the site have a
curvature of 0 for every record. These pairs are left out. The whitening is diagonal in these
latents, which keeps the curvature at 0. All other pairs are released.

The choice depends only on the model and on invented records.
"""

from __future__ import annotations

import numpy as np

from numpyro_dp.posterior.algebra import spectral_power

__all__ = ["MOST", "MOST_DENSE", "group_sites", "pairs_of", "power_of"]

MOST_DENSE = 300  # up to this number of latents, the curvature of every pair is released
MOST = 600  # decoding takes time of the order of the cube of their number, and memory of the square
_LARGE = 20  # smallest site of group effects whose pairs are left out


def group_sites(scores: np.ndarray, sites: np.ndarray) -> np.ndarray:
    """Returns 1 + the site number of each latent that is an effect of a group, and 0 for others.

    Args:
        scores: Scores of invented records, shape (records, d).
        sites: Site number of each latent, shape (d,).
    """
    if len(sites) <= MOST_DENSE:
        return np.zeros(len(sites), int)
    found = np.zeros(len(sites), int)
    for site in np.unique(sites):
        own = sites == site
        at_once = np.sum(scores[:, own] != 0, axis=1).max(initial=0)
        if np.sum(own) >= _LARGE and at_once <= 1:
            found[own] = site + 1
    return found


def pairs_of(groups: np.ndarray) -> np.ndarray:
    """Returns whether each pair is released, shape (d, d)."""
    same = (groups[:, None] == groups) & (groups > 0)
    return ~same | np.eye(len(groups), dtype=bool)


def power_of(matrix: np.ndarray, groups: np.ndarray, power: float) -> np.ndarray:
    """Returns M^power of a positive definite M, with group effects treated as independent.

    The block of the other latents gets its matrix power, and each group effect the power of its
    diagonal entry. All other entries of the result are 0.
    """
    dense = groups == 0
    if dense.all():
        return spectral_power(matrix, power)
    found = np.diag(np.maximum(np.diag(matrix), 1e-300) ** power)
    if dense.any():
        block = np.ix_(dense, dense)
        found[block] = spectral_power(matrix[block], power)
    return found
