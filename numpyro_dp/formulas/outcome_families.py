"""Families of outcomes: what is read from the left side, and the distribution given a predictor."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpyro.distributions as dist
from jax import Array

Latents = dict[str, Array]


class OutcomeFamily(NamedTuple):
    """A distribution of outcomes.

    Attributes:
        outcome: What the left side is: ``"number"``, ``"positive"``, ``"share"``, ``"count"``,
            ``"two"``, ``"levels"``, ``"time"`` or ``"trials"``.
        link: Name of the link, which says what a coefficient is.
        ratio: What the exponential of a coefficient is, or "".
        slope: Standard deviation of the prior of a coefficient, when its column has range 2.
        latents: Further latents with their priors.
        likelihood: ``(predictor, latents, other) -> distribution``. The other value is the number
            of trials, or whether a time is censored.
    """

    outcome: str
    link: str
    ratio: str
    slope: float
    latents: dict[str, Any]
    likelihood: Callable[[Array, Latents, Any], Any]


def _beta(eta: Array, z: Latents, _: object) -> Any:
    mean = jnp.clip(1 / (1 + jnp.exp(-eta)), 1e-6, 1 - 1e-6)
    return dist.Beta(mean * z["precision"], (1 - mean) * z["precision"])


def _censored(make: Callable[[Array, Latents], Any]) -> Callable[[Array, Latents, Any], Any]:
    def likelihood(eta: Array, z: Latents, censored: Any) -> Any:
        return make(eta, z) if censored is None else dist.RightCensoredDistribution(
            make(eta, z), censored
        )  # fmt: skip

    return likelihood


_SCALE = {"sigma": dist.HalfNormal(1.0)}
FAMILIES = {
    "normal": OutcomeFamily("number", "identity", "", 2.0, _SCALE,
                     lambda eta, z, _: dist.Normal(eta, z["sigma"])),
    "student": OutcomeFamily("number", "identity", "", 2.0, _SCALE,
                      lambda eta, z, _: dist.StudentT(4.0, eta, z["sigma"])),
    "bernoulli": OutcomeFamily("two", "logit", "odds ratio", 4.0, {},
                        lambda eta, z, _: dist.Bernoulli(logits=eta)),
    "binomial": OutcomeFamily("trials", "logit", "odds ratio", 4.0, {},
                       lambda eta, z, n: dist.Binomial(n, logits=eta)),
    "poisson": OutcomeFamily("count", "log", "rate ratio", 3.0, {},
                      lambda eta, z, _: dist.Poisson(jnp.exp(eta))),
    "negative binomial": OutcomeFamily(
        "count", "log", "rate ratio", 3.0, {"shape": dist.Exponential(1.0)},
        lambda eta, z, _: dist.NegativeBinomial2(jnp.exp(eta), z["shape"])),
    "gamma": OutcomeFamily(
        "positive", "log", "ratio of means", 3.0, {"shape": dist.Gamma(2.0, 0.5)},
        lambda eta, z, _: dist.Gamma(z["shape"], z["shape"] * jnp.exp(-eta))),
    "beta": OutcomeFamily(
        "share", "logit", "odds ratio", 4.0, {"precision": dist.Gamma(2.0, 0.1)}, _beta),
    "weibull": OutcomeFamily(
        "time", "log", "ratio of times", 3.0, {"shape": dist.LogNormal(0.3, 0.5)},
        _censored(lambda eta, z: dist.Weibull(jnp.exp(eta), z["shape"]))),
    "lognormal": OutcomeFamily(
        "time", "log", "ratio of times", 3.0, _SCALE,
        _censored(lambda eta, z: dist.LogNormal(eta, z["sigma"]))),
    "ordinal": OutcomeFamily("levels", "logit", "odds ratio", 4.0, {},
                      lambda eta, z, _: dist.OrderedLogistic(eta, z["thresholds"])),
}  # fmt: skip


def thresholds(levels: int) -> Any:
    """The prior of the thresholds between ordered levels."""
    first = dist.Normal(0.0, 1.5).expand([levels - 1]).to_event(1)
    return dist.TransformedDistribution(first, dist.transforms.OrderedTransform())


def intercept(family: OutcomeFamily, public: Any) -> Any:
    """The prior of the predictor in the middle of all ranges."""
    if family.outcome in ("positive", "time"):
        return dist.Normal(math.log(public[1] / 2), 5.0)
    return dist.Normal(0.0, 2.0 if family.outcome == "number" else 5.0)
