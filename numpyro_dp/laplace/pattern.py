r"""What a model alone tells about curvatures: pairs and directions in which they are 0.

A release holds one value for each pair. In models with hundreds of latents, most latents are
effects of groups. A record sees one effect of such a site, so two effects of the site have a
curvature of 0 for every record. These pairs are left out. The whitening is diagonal in these
latents, which keeps the curvature at 0. All other pairs are released.

In some directions no record has a score, such as a shift of an intercept against all effects of
groups, or of all players' strengths. These directions keep their prior.

Both depend only on the model and on invented records.
"""

from __future__ import annotations

import numpy as np

from numpyro_dp.posterior.algebra import spectral_power

MOST_DENSE = 300  # up to this number of latents, the curvature of every pair is released
MOST = 600  # decoding takes time of the order of the cube of their number, and memory of the square
_UNSEEN = 1e-4  # size of scores along a direction that counts as 0, relative to single latents
_LARGE = 20  # smallest site of group effects whose pairs are left out


def group_sites(scores: np.ndarray, sites: np.ndarray) -> np.ndarray:
    """Returns 1 + the site number of each latent that is an effect of a group, and 0 for others.

    Args:
        scores: Scores of invented records, shape (records, d).
        sites: Site number of each latent, shape (d,).
    """
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


def unseen_directions(products: np.ndarray, known: np.ndarray | None = None) -> np.ndarray:
    """Returns directions in which no record has a score, although each of their latents has one.

    Args:
        products: Sum of the outer products of the scores of invented records, shape (d, d).
        known: Directions to leave out, shape (directions, d).

    Returns:
        Linearly independent directions, shape (directions, d).
    """
    sizes = np.sqrt(np.diag(products))
    seen = sizes > 0
    # Scaled to a diagonal of 1, so that the limit below does not depend on units.
    scaled = products[np.ix_(seen, seen)] / np.outer(sizes[seen], sizes[seen])
    if known is not None and len(known):
        along, _ = np.linalg.qr((known * sizes)[:, seen].T)
        # Known directions get a large eigenvalue, so that only new ones are found.
        scaled = scaled + along @ along.T
    values, vectors = np.linalg.eigh(scaled)
    found = np.zeros((int(np.sum(values < _UNSEEN**2)), len(sizes)))
    found[:, seen] = vectors[:, : len(found)].T / sizes[seen]
    return found
