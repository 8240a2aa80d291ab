"""Draws of a posterior: of vectors, and of stored values."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_dp.core import Values

Draws = Callable[[Array, int], dict[str, Array]]


def generator(rng_key: Array) -> np.random.Generator:
    """A NumPy generator seeded by a JAX key, for draws without a compiled program."""
    return np.random.default_rng(np.asarray(jax.random.key_data(rng_key)).ravel())


def _permuted(rng_key: Array, number: int, num_samples: int) -> Array:
    """Row numbers in random order. None comes twice before every other has come once."""
    keys = jax.random.split(rng_key, -(-num_samples // number))
    return jnp.concatenate([jax.random.permutation(key, number) for key in keys])[:num_samples]


class Normal(NamedTuple):
    """Vectors from a normal distribution of mean (d,), covariance root @ root.T (d, d)."""

    mean: np.ndarray
    root: np.ndarray

    def __call__(self, rng_key: Array, num_samples: int) -> np.ndarray:
        """Returns vectors (num_samples, d)."""
        noise = generator(rng_key).normal(size=(num_samples, len(self.mean)))
        return self.mean + noise @ self.root.T


class Vectors(NamedTuple):
    """Stored vectors (number, d) in random order, with noise of covariance root @ root.T if any."""

    rows: np.ndarray
    root: np.ndarray | None = None

    def __call__(self, rng_key: Array, num_samples: int) -> np.ndarray:
        """Returns vectors (num_samples, d). They repeat if more are asked for than are stored."""
        order, own = jax.random.split(rng_key)
        chosen = self.rows[np.asarray(_permuted(order, len(self.rows), num_samples))]
        if self.root is None:
            return chosen
        return chosen + generator(own).normal(size=chosen.shape) @ self.root.T


class SiteDraws(NamedTuple):
    """Stored values by site, with a leading axis of draws, in random order."""

    values: Values

    def __call__(self, rng_key: Array, num_samples: int) -> dict[str, Array]:
        """Returns draws by site. They repeat if more are asked for than are stored."""
        number = len(next(iter(self.values.values())))
        rows = _permuted(rng_key, number, num_samples)
        return {name: jnp.asarray(value)[rows] for name, value in self.values.items()}
