r"""``Likelihood``: what a run released about the latents, as a value of its own.

The posterior of a run is the model's prior times a normal likelihood of the unconstrained latents,

.. math:: L(\theta) \propto \exp(b^\top \theta - \theta^\top P \theta / 2)
    \propto \exp(-\lVert y - R \theta \rVert^2 / 2), \qquad P = R^\top R, \quad R^\top y = b.

So the released values act like one observation y of a normal distribution with mean
:math:`R \theta` and unit variances.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array
from numpyro.distributions import biject_to, constraints
from numpyro.distributions.constraints import Constraint

from numpyro_dp.core import Values


@dataclasses.dataclass(frozen=True, eq=False)
class Likelihood:
    r"""The released likelihood of a run, normal in the unconstrained latents.

    It is ``posterior.likelihood``. Use it as one observation in any NumPyro model, which then has
    the privacy of the run and costs no further budget.

    Attributes:
        sites: Unconstrained shape of each latent site that records inform. Vectors hold the sites
            in this order.
        precision: The matrix P (d, d), positive semidefinite.
        linear: The vector b (d,).
        approximate: Whether decoding used a normal prior in place of the model's own. Under another
            prior, the likelihood may then be slightly off.
        supports: NumPyro's constraint of each site. ``None`` if it depends on other latents, or if
            the posterior comes from a file and its model was not given.

    Example:
        >>> import jax, numpyro, numpyro.distributions as dist
        >>> from numpyro_dp import fit
        >>> def model(x):
        ...     mean = numpyro.sample("mean", dist.Normal(0, 10))
        ...     with numpyro.plate("records", x.shape[0]):
        ...         numpyro.sample("x", dist.Normal(mean, 1), obs=x)
        >>> x = 3 + jax.random.normal(jax.random.key(1), (1000,))
        >>> likelihood = fit(model, x, epsilon=1.0, rng_key=jax.random.key(0)).likelihood
        >>> likelihood.sites, likelihood.precision.shape
        ({'mean': ()}, (1, 1))
        >>> def larger():
        ...     mean = numpyro.sample("mean", dist.StudentT(3, 0, 1))
        ...     numpyro.sample("release", likelihood({"mean": mean}), obs=likelihood.value)

    Guarantee:
        A function of released and public values, which you may publish.
    """

    sites: Mapping[str, tuple[int, ...]]
    precision: np.ndarray
    linear: np.ndarray
    approximate: bool
    supports: Mapping[str, Constraint] | None = None

    @functools.cached_property
    def _root(self) -> tuple[np.ndarray, np.ndarray]:
        """R, and y."""
        scale = np.sqrt(np.maximum(np.diag(self.precision), np.finfo(float).tiny))
        values, vectors = np.linalg.eigh(self.precision / np.outer(scale, scale))
        sizes = np.sqrt(np.maximum(values, 0))
        pulled = vectors.T @ (self.linear / scale)
        seen = sizes > 1e-7 * sizes[-1]
        value = np.where(seen, pulled / np.where(seen, sizes, 1), 0)
        return (vectors * np.where(seen, sizes, 0)).T * scale, value

    @property
    def value(self) -> np.ndarray:
        """The vector y (d,), for ``obs=``."""
        return self._root[1]

    def __call__(self, latents: Values) -> dist.Distribution:
        """Returns the distribution of :attr:`value` given the latents.

        Args:
            latents: Value of each site, in the model's own units. Other sites are ignored.

        Raises:
            ValueError: If a site is missing, has another shape, or if supports are not known.
        """
        theta = self.flat(latents)
        root = jnp.asarray(self._root[0], theta.dtype)
        return dist.Normal(root @ theta, 1.0).to_event(1)

    def flat(self, latents: Values) -> Array:
        """The unconstrained vector (d,) of latents in the model's own units.

        Raises:
            ValueError: As for a call.
        """
        if self.supports is None:
            raise ValueError(
                "The supports of the latents are not known, or depend on other latents. If the "
                "posterior comes from a file, call load(path, model)."
            )
        parts = []
        for name, shape in self.sites.items():
            if name not in latents:
                raise ValueError(
                    f"Expected values of {list(self.sites)}, got {sorted(latents)}. Give a value "
                    "to each site."
                )
            free = biject_to(self.supports[name]).inv(jnp.asarray(latents[name], float))
            if jnp.shape(free) != tuple(shape):
                raise ValueError(
                    f"Expected {name!r} of unconstrained shape {tuple(shape)}, got "
                    f"{jnp.shape(free)}. Give it the shape that it had in the run."
                )
            parts.append(jnp.ravel(free))
        return jnp.concatenate(parts)

    def check_same(self, other: Likelihood) -> None:
        """Raises if the latents of another likelihood are not the same.

        Raises:
            ValueError: If names, shapes or supports differ.
        """
        if self.sites != other.sites:
            raise ValueError(
                f"The latents are {dict(other.sites)}, but the run had {dict(self.sites)} in "
                "unconstrained shapes. Keep names and shapes."
            )
        if self.supports is None or other.supports is None:
            return
        for name, support in self.supports.items():
            if not is_same_support(support, other.supports[name]):
                raise ValueError(
                    f"The support of {name!r} is {other.supports[name]}, but in the run it was "
                    f"{support}. Use a prior with that support."
                )


def base_support(support: Any) -> Any:
    """The constraint of a single entry, if entries are independent."""
    while isinstance(support, constraints.independent):
        support = support.base_constraint
    return support


def is_same_support(one: Any, other: Any) -> bool:
    """Whether supports are constraints of NumPyro with equal values, or values are equal.

    The number of independent axes does not count, because shapes are compared elsewhere.
    """
    one, other = base_support(one), base_support(other)
    if not isinstance(one, Constraint):
        return np.array_equal(one, other)
    if type(one) is not type(other) or type(one).__module__ != Constraint.__module__:
        return False
    return all(map(is_same_support, one.tree_flatten()[0], other.tree_flatten()[0]))
