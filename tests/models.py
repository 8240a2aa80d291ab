"""Models of one line: named priors, and what each record adds given their values.

A prior is a distribution, or a function of the first column that returns one, as ``slopes`` does:
one that is made of arrays should be, since a model that captures arrays has public values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist

__all__ = ["given", "logistic", "mean_of", "mixture", "of", "scored", "slopes"]


def _values(x: Any, priors: dict[str, Any]) -> dict[str, Any]:
    built = {k: p if isinstance(p, dist.Distribution) else p(x) for k, p in priors.items()}
    return {name: numpyro.sample(name, prior) for name, prior in built.items()}


def slopes(scale: float = 1) -> Callable[[Any], Any]:
    """A normal prior with an entry for each column of x."""
    return lambda x: dist.Normal(0, scale).expand([x.shape[1]]).to_event(1)


def of(likelihood: Callable[..., Any], plate: str = "records", **priors: Any) -> Callable[..., Any]:
    """A model of x alone: ``likelihood`` gets the values by name."""

    def model(x):
        values = _values(x, priors)
        with numpyro.plate(plate, x.shape[0]):
            numpyro.sample("x", likelihood(**values), obs=x)

    return model


def given(
    likelihood: Callable[..., Any], plate: str = "records", **priors: Any
) -> Callable[..., Any]:
    """A model of y given x, which ``likelihood`` gets before the values."""

    def model(x, y=None):
        values = _values(x, priors)
        with numpyro.plate(plate, x.shape[0]):
            numpyro.sample("y", likelihood(x, **values), obs=y)

    return model


def scored(
    density: Callable[..., Any], plate: str = "records", **priors: Any
) -> Callable[..., Any]:
    """A model of x whose log-likelihood is computed by hand."""

    def model(x):
        values = _values(x, priors)
        with numpyro.plate(plate, x.shape[0]):
            numpyro.factor("y", density(x, **values))

    return model


def mean_of(prior: float = 1, size: int = 0, plate: str = "records") -> Callable[..., Any]:
    """Numbers, or vectors of ``size`` entries, with a normal mean and unit variance."""
    if not size:
        return of(lambda mean: dist.Normal(mean, 1), plate, mean=dist.Normal(0, prior))
    each = dist.Normal(0, prior).expand([size]).to_event(1)
    return of(lambda mean: dist.Normal(mean, 1).to_event(1), plate, mean=each)


def mixture(number: int, scale: float = 0.5, probs: Any = None) -> Callable[..., Any]:
    """A mixture of normals with unknown means and, unless given, equal weights."""

    def density(x, means):
        weights = jnp.full(number, 1 / number) if probs is None else jnp.asarray(probs)
        each = dist.Normal(means, scale).to_event(1).log_prob(x[:, None])
        return jax.nn.logsumexp(jnp.log(weights) + each, axis=-1)

    return scored(
        density, means=lambda x: dist.Normal(0, 1).expand([number, x.shape[1]]).to_event(2)
    )


def logistic(plate: str = "records") -> Callable[..., Any]:
    """A logistic regression with standard normal weights."""
    return given(lambda x, w: dist.Bernoulli(logits=x @ w), plate, w=slopes())
