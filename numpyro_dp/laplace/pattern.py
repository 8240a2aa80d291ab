r"""Which pairs of latents a curvature is released for, where there are many of them.

A release holds a number for each pair. Beyond some hundreds of latents most of them are effects of
groups: a record sees one effect of a site, so that the curvature of two effects of that site is 0
for every record. Such pairs are left out, and the whitening is diagonal in these latents, so that
they stay 0. All other pairs are released.

What is left out depends on the model and on invented records alone.
"""

from __future__ import annotations

import numpy as np

from numpyro_dp.laplace._algebra import spectral_power

__all__ = ["MOST", "MOST_DENSE", "group_sites", "pairs_of", "power_of"]

MOST_DENSE = 300  # with up to so many latents, the curvature of every pair is released
MOST = 600  # time and memory of decoding grow with the cube and the square of their number
_LARGE = 20  # entries of a site of group effects that are worth leaving out


def group_sites(scores: np.ndarray, sites: np.ndarray) -> np.ndarray:
    """Returns a number for each latent: 0, or that of its site if this has effects of groups.

    Args:
        scores: Of invented records, shape (records, d).
        sites: The site of each latent, shape (d,).
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
    """Returns which pairs are released, shape (d, d)."""
    same = (groups[:, None] == groups) & (groups > 0)
    return ~same | np.eye(len(groups), dtype=bool)


def power_of(matrix: np.ndarray, groups: np.ndarray, power: float) -> np.ndarray:
    """Returns M^power of the block of latents that are no effects of groups, and of the diagonal.

    M is positive definite. Other entries of the result are 0.
    """
    dense = groups == 0
    if dense.all():
        return spectral_power(matrix, power)
    found = np.diag(np.maximum(np.diag(matrix), 1e-300) ** power)
    if dense.any():
        block = np.ix_(dense, dense)
        found[block] = spectral_power(matrix[block], power)
    return found
