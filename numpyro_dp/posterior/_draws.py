"""Posterior draws of a tree of sites, as arrays by name."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from numpyro_dp._validate import check_int

__all__ = ["draws_by_name"]


def draws_by_name(samples: Any, what: str = "samples") -> dict[str, np.ndarray]:
    """Returns the leaves by name, after checking that each has the same leading axis of draws.

    Dots join the names of nested entries.

    Raises:
        TypeError: If ``samples`` is not a dict, or holds no arrays.
        ValueError: If sites have different numbers of draws.
    """
    if not isinstance(samples, dict) or not jax.tree.leaves(samples):
        raise TypeError(
            f"{what} must be a dict of draws by site name and must not be empty, got "
            f"{type(samples).__name__}. Pass the draws of posterior_samples or Predictive."
        )
    leaves = jax.tree_util.tree_flatten_with_path(samples)[0]
    draws = {".".join(map(_part, path)): np.asarray(leaf) for path, leaf in leaves}
    sizes = {name: value.shape[:1] for name, value in draws.items()}
    if len(set(sizes.values())) > 1 or () in sizes.values():
        shapes = {name: value.shape for name, value in draws.items()}
        raise ValueError(
            f"Every site in {what} must have the same number of draws along its first axis, got "
            f"shapes {shapes}. Pass the draws of one call of posterior_samples or Predictive."
        )
    check_int(f"number of draws in {what}", next(iter(sizes.values()))[0], low=1)
    return draws


def _part(entry: Any) -> str:
    return str(getattr(entry, "key", getattr(entry, "name", getattr(entry, "idx", entry))))
