"""Draws of any tree of sites, as arrays by name."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from numpyro_dp._validate import check_int

__all__ = ["draws_by_name"]


def draws_by_name(samples: Any, what: str = "samples") -> dict[str, np.ndarray]:
    """Returns the leaves by name, checked to have one leading axis of draws.

    Names of nested entries are joined with dots.

    Raises:
        TypeError: If there are no sites by name.
        ValueError: If the numbers of draws differ.
    """
    if not isinstance(samples, dict) or not jax.tree.leaves(samples):
        raise TypeError(
            f"Expected {what} to be a dict of draws by site, got {type(samples).__name__}. "
            "Pass those of posterior_samples or Predictive."
        )
    leaves = jax.tree_util.tree_flatten_with_path(samples)[0]
    draws = {".".join(map(_part, path)): np.asarray(leaf) for path, leaf in leaves}
    sizes = {name: value.shape[:1] for name, value in draws.items()}
    if len(set(sizes.values())) > 1 or () in sizes.values():
        shapes = {name: value.shape for name, value in draws.items()}
        raise ValueError(
            f"Expected {what} with the draws along the first axis of every site, as many for each, "
            f"got shapes {shapes}."
        )
    check_int(f"number of draws in {what}", next(iter(sizes.values()))[0], low=1)
    return draws


def _part(entry: Any) -> str:
    return str(getattr(entry, "key", getattr(entry, "name", getattr(entry, "idx", entry))))
