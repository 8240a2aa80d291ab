"""Draws of a posterior that can be written to a file: vectors, and their sites."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpyro.distributions import biject_to, constraints

__all__ = [
    "FlatDraws", "Normal", "Rows", "SiteDraws", "Sites", "generator", "permuted",
    "support_from_json", "support_to_json",
]  # fmt: skip


def generator(rng_key: Array) -> np.random.Generator:
    """A NumPy generator seeded by a JAX key, for draws without a compiled program."""
    return np.random.default_rng(np.asarray(jax.random.key_data(rng_key)).ravel())


def permuted(rng_key: Array, number: int, num_samples: int) -> Array:
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


class Rows(NamedTuple):
    """Stored vectors (number, d) in random order, with noise of covariance root @ root.T if any."""

    rows: np.ndarray
    root: np.ndarray | None = None

    def __call__(self, rng_key: Array, num_samples: int) -> np.ndarray:
        """Returns vectors (num_samples, d). They repeat if more are asked for than are stored."""
        order, own = jax.random.split(rng_key)
        chosen = self.rows[np.asarray(permuted(order, len(self.rows), num_samples))]
        if self.root is None:
            return chosen
        return chosen + generator(own).normal(size=chosen.shape) @ self.root.T


class Sites(NamedTuple):
    """The sites that vectors of unconstrained values stand for, in alphabetical order.

    Attributes:
        shapes: Unconstrained shape by site.
        supports: Support by site.
    """

    shapes: dict[str, tuple[int, ...]]
    supports: dict[str, Any]

    @classmethod
    def of(cls, outcomes: Any) -> Sites | None:
        """Returns the latent sites of a model, or ``None`` if a support depends on other latents.

        Args:
            outcomes: A :class:`~numpyro_dp.model.outcomes.Outcomes`.
        """

        def written(value: float) -> tuple[Any, Any]:
            latents = {n: jnp.full(shape, value) for n, shape in outcomes.shapes.items()}
            trace = outcomes.model.trace_prior(latents, {}, outcomes.shared)
            supports = {name: trace[name]["fn"].support for name in outcomes.shapes}
            return supports, {name: support_to_json(each) for name, each in supports.items()}

        try:
            (supports, one), (_, other) = written(0.0), written(0.3)
        except (TypeError, ValueError):  # a support that is not NumPyro's, or of invalid arguments
            return None
        return cls(dict(outcomes.shapes), supports) if one == other else None

    def constrain(self, vectors: Array) -> dict[str, Array]:
        """Vectors (draws, d) -> values by site in the model's own units."""
        found, start = {}, 0
        for name in sorted(self.shapes):
            shape = self.shapes[name]
            end = start + int(np.prod(shape))
            free = vectors[:, start:end].reshape(len(vectors), *shape)
            found[name] = jax.vmap(biject_to(self.supports[name]))(free)
            start = end
        return found


class FlatDraws(NamedTuple):
    """Draws of unconstrained vectors, as values by site.

    Attributes:
        vectors: ``(rng_key, num_samples) -> vectors``.
        constrain: Vectors -> values by site.
        sites: What ``constrain`` does, or ``None`` if only the model knows, as for supports that
            depend on other latents.
    """

    vectors: Normal | Rows
    constrain: Callable[[Array], dict[str, Array]]
    sites: Sites | None

    def __call__(self, rng_key: Array, num_samples: int) -> dict[str, Array]:
        """Returns draws by site, with a leading axis ``num_samples``."""
        return self.constrain(
            jnp.asarray(self.vectors(rng_key, num_samples), jnp.result_type(float))
        )


class SiteDraws(NamedTuple):
    """Stored values by site, with a leading axis of draws, in random order."""

    values: dict[str, Any]

    def __call__(self, rng_key: Array, num_samples: int) -> dict[str, Array]:
        """Returns draws by site. They repeat if more are asked for than are stored."""
        number = len(next(iter(self.values.values())))
        rows = permuted(rng_key, number, num_samples)
        return {name: jnp.asarray(value)[rows] for name, value in self.values.items()}


def support_to_json(support: Any) -> Any:
    """Returns a support as names, numbers and lists.

    Raises:
        TypeError: If it is not one of NumPyro's constraints.
    """
    for name, known in vars(constraints).items():
        if known is support:
            return name
    kind = type(support)
    if getattr(constraints, kind.__name__, None) is not kind:
        raise TypeError(f"{support!r} is not a constraint of NumPyro.")
    values, (names, rest) = support.tree_flatten()
    fields = dict(zip(names, values, strict=True)) | rest
    return {"kind": kind.__name__, **{name: _to_json(value) for name, value in fields.items()}}


def _to_json(value: Any) -> Any:
    if isinstance(value, constraints.Constraint):
        return {"support": support_to_json(value)}
    if isinstance(value, int | float | bool):
        return value
    array = np.asarray(value)
    if array.dtype.kind not in "biuf":
        raise TypeError(f"{value!r} is not a number.")
    return {"array": array.tolist(), "dtype": array.dtype.name}


def support_from_json(found: Any) -> Any:
    """Returns the support that :func:`support_to_json` wrote.

    Raises:
        ValueError: If NumPyro has no such constraint.
    """
    if isinstance(found, str):
        known = getattr(constraints, found, None)
        if not isinstance(known, constraints.Constraint):
            raise ValueError(f"NumPyro has no constraint {found!r}.")
        return known
    kind = getattr(constraints, found["kind"], None)
    if not (isinstance(kind, type) and issubclass(kind, constraints.Constraint)):
        raise ValueError(f"NumPyro has no constraint {found['kind']!r}.")
    fields = {name: _from_json(value) for name, value in found.items() if name != "kind"}
    return kind.tree_unflatten(((), fields), ())


def _from_json(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if "support" in value:
        return support_from_json(value["support"])
    return np.asarray(value["array"], value["dtype"])
