r"""Declares that the likelihood sees a latent site only through a product with the record.

For a likelihood :math:`\log p(x \mid w, v) = h(\phi(x)\cdot w,\; v,\; x)` the gradient in w is
:math:`r\,\phi(x)` with one number :math:`r = \partial h/\partial(\phi\cdot w)`, so its norm
:math:`|r|\,\Vert\phi(x)\Vert` needs no gradient per record. Such products are found in the traced
likelihood where they are products there (:mod:`numpyro_dp.sums.contraction`). Where they are
written in another way, a sum of elementwise products or a loop, the features are declared, and w is
put in as

.. math:: w' = \phi\, \frac{\phi\cdot w}{\Vert\phi\Vert^2},

which the likelihood cannot tell from w, and in which the product can be found.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_dp.core import Estimator
from numpyro_dp.model.variational import VariationalProblem

__all__ = ["linear"]

_TOLERANCE = 1e-3


def linear(
    estimator: Callable[[VariationalProblem], Estimator],
    features: dict[str, Callable[..., Array]],
) -> Callable[[VariationalProblem], Estimator]:
    """Wraps an estimator for a likelihood that is linear in the record, though not written so.

    Write ``X @ w`` in the model where you can: then nothing need be declared.

    Args:
        estimator: Such as ``aligned()``.
        features: Name of a latent site -> function of the model's arguments, for a data set of one
            record, that returns the features of that record in the shape of the site.

    Returns:
        What to pass to :class:`~numpyro_dp.DPSVI` as ``estimator=``.

    Raises:
        ValueError: When the run is prepared, if a name is no latent site, features have another
            shape, or the gradient of an invented record is not a multiple of its features.

    Example:
        >>> import jax.numpy as jnp, numpyro, numpyro.distributions as dist
        >>> from numpyro_dp import aligned, linear
        >>> def model(X, y=None):
        ...     w = numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))
        ...     with numpyro.plate("records", X.shape[0]):
        ...         numpyro.sample("y", dist.Bernoulli(logits=jnp.sum(X * w, -1)), obs=y)
        >>> estimator = linear(aligned(), {"w": lambda X, y: X[0]})

    Guarantee:
        Whatever is declared, the signal is a function of one record and is clipped as such: a
        wrong declaration makes a wrong posterior, not a leak. The check reads no record.
    """
    functions = features.values() if isinstance(features, dict) else [features]
    if not callable(estimator) or not features or not all(map(callable, functions)):
        given = ", ".join(type(function).__name__ for function in functions)  # and no numbers
        raise TypeError(
            "Expected linear(aligned(), {'w': lambda X, y: X[0]}): an estimator, and a function of "
            f"the model's arguments for each site, got a {type(estimator).__name__} and "
            f"[{given}]."
        )
    return lambda problem: _build(estimator(problem), features, problem)


def _build(
    inner: Estimator, features: dict[str, Callable[..., Array]], problem: VariationalProblem
) -> Estimator:
    factored = inner.factored
    if factored is None or problem.num_particles > 1:
        raise ValueError(
            "Expected an estimator with a factored signal and one draw per step, got one "
            f"with num_particles={problem.num_particles}. Leave linear() out."
        )
    _check_sites(problem, features)

    def scalar(public: Any, point: Any, example: Any) -> Array:
        latents = dict(point[0])
        for name, function in features.items():
            latents[name] = _through(_features(problem, function, example), latents[name])
        return factored.scalar(public, (latents, *point[1:]), example)

    def check(params: dict[str, Any]) -> None:
        if inner.check is not None:
            inner.check(params)
        public = inner.prepare(jax.random.key(0), params)
        _check_linear(problem, features, public, factored.point(public), factored.scalar)

    return inner._replace(factored=factored._replace(scalar=scalar), check=check)


def _through(features: Array, weights: Array) -> Array:
    flat = features.astype(weights.dtype).reshape(-1)
    square = jnp.maximum(jnp.dot(flat, flat), jnp.finfo(flat.dtype).tiny)
    product = jnp.dot(flat, weights.reshape(-1))
    return (jax.lax.stop_gradient(flat) * (product / square)).reshape(weights.shape)


def _features(problem: VariationalProblem, function: Callable[..., Array], example: Any) -> Array:
    layout = problem.model.structure.layout
    arguments = layout.example(example[: len(layout.shapes)], problem.shared)
    return arguments.call(function)


def _check_sites(problem: VariationalProblem, features: dict[str, Any]) -> None:
    latents = problem.model.structure.latents
    for name in features:
        if name not in latents:
            raise ValueError(
                f"Expected linear() to name latent sites {list(latents)}, got {name!r}."
            )


def _check_linear(
    problem: VariationalProblem,
    features: dict[str, Any],
    public: Any,
    point: Any,
    scalar: Callable[..., Array],
) -> None:
    """Is the gradient of invented records a multiple of their features?"""
    layout, verified = problem.model.structure.layout, set()
    for rows in layout.invented():
        example = tuple(leaf[0] for leaf in rows) + problem.blank_example()[len(rows) :]
        gradient = jax.grad(scalar, 1)(public, point, example)[0]
        for name, function in features.items():
            found = np.asarray(gradient[name], np.float64)
            given = np.asarray(_features(problem, function, example), np.float64)
            if given.size != found.size:
                raise ValueError(
                    f"Expected features of site {name!r} with the shape {found.shape} of the site, "
                    f"got {given.shape}. Return those of one record, X[0]."
                )
            found, given = found.ravel(), given.ravel()
            rest = found - given * (given @ found) / max(given @ given, 1e-300)
            if not np.isfinite(rest).all() or not found.any():
                continue
            verified.add(name)
            if np.abs(rest).max() > _TOLERANCE * np.abs(found).max():
                raise ValueError(
                    f"Expected the likelihood to see site {name!r} only through its product with "
                    "the declared features: for an invented record the gradient is no multiple of "
                    "them. Correct the features, or leave linear() out."
                )
    if unknown := sorted(set(features) - verified):
        raise ValueError(
            f"The declared features of {unknown} cannot be verified: no invented record has a "
            "finite gradient other than 0. Leave linear() out."
        )
