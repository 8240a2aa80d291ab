r"""Bayes factors of nested models, from a released likelihood (Savage-Dickey).

A nested model fixes some latents at c. If these are independent of the others in the prior, its
Bayes factor against the model of the run is

.. math::
    B = \frac{p(c \mid \text{release})}{p(c)}
      = \frac{\int p(c, \theta_o)\, L(c, \theta_o)\, d\theta_o}{p(c) \int p(\theta)\, L(\theta)\, d\theta}.

With a normal prior both integrals have a closed form. Otherwise they are means over draws of a
Student-t distribution that has the mean and covariance of the posterior.

Reference:
    J. M. Dickey, "The weighted likelihood ratio, linear hypotheses on normal location parameters",
    Annals of Mathematical Statistics 42 (1971), 204-223.
"""  # noqa: E501

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from numpyro.distributions import biject_to
from scipy.special import gammaln, logsumexp

from numpyro_dp.posterior.algebra import factor, solve, symmetric
from numpyro_dp.posterior.prior import ModelPrior
from numpyro_dp.posterior.released import Likelihood, base_support

_DRAWS, _FEWEST = 20_000, 400  # proposals, and how many of them have to count
_DEGREES = 5  # of freedom of the proposals
_WIDE, _POINTS = 12.0, 4001  # grid of a prior: widths sinh(-12) to sinh(12)
_SAME = 0.01  # difference of log densities of a prior that counts as none


class Evidence(NamedTuple):
    """How a nested model compares with the model of a run.

    Attributes:
        log_bayes_factor: Log of the probability of the released values under the nested model, over
            that under the model of the run. Above 0 it favours the nested model.
        error: Standard error of it from a finite number of draws, or 0 if it has a closed form.

    Example:
        >>> Evidence(0.0, 0.0).probability
        0.5
    """

    log_bayes_factor: float
    error: float

    @property
    def probability(self) -> float:
        """Probability of the nested model, if both had the same probability before."""
        return 1 / (1 + math.exp(min(700.0, -self.log_bayes_factor)))


def evidence(prior: ModelPrior, likelihood: Likelihood, fixed: Mapping[str, ArrayLike]) -> Evidence:
    """Returns the Bayes factor of the model in which some latents are fixed.

    Args:
        prior: The prior of the model of the run.
        likelihood: The released likelihood.
        fixed: Values of sites, or of entries such as ``"w[2]"``, in the model's own units.

    Raises:
        ValueError: If a name or value is not that of a latent, if the prior of a fixed latent
            depends on other latents, or if too few draws count.
    """
    places, values = _flat(likelihood, fixed)
    precision, linear = likelihood.precision, likelihood.linear
    if prior.normal is not None:
        after = _log_normal(values, places, *prior.decoded.updated(precision, linear))
        before = _log_normal(values, places, prior.decoded.mean, prior.decoded.covariance)
        return Evidence(after - before, 0.0)
    at_prior = _log_prior_at(prior, np.asarray(prior.draws), prior.seen[places], values)
    draws = np.asarray(prior.vectors(precision, linear, jax.random.key(0))(jax.random.key(1), 4000))
    mean, covariance = draws.mean(axis=0), np.cov(draws.T).reshape(2 * draws.shape[1:])
    inside, all_places = np.arange(len(mean)), prior.seen[places]
    left = np.setdiff1d(inside, all_places)
    gain = solve(covariance[np.ix_(all_places, all_places)], covariance[all_places])
    nested_mean = mean + gain.T @ (values - mean[all_places])
    nested_covariance = covariance - covariance[:, all_places] @ gain

    def density(theta: np.ndarray) -> np.ndarray:
        own = theta[:, prior.seen]
        fit = own @ linear - np.sum((own @ precision) * own, axis=1) / 2
        return fit + prior.log_densities(theta)

    full, error = _log_integral(density, mean, covariance, inside)
    nested, nested_error = _log_integral(density, nested_mean, nested_covariance, left)
    return Evidence(nested - full - at_prior, math.hypot(error, nested_error))


def _flat(likelihood: Likelihood, fixed: Mapping[str, ArrayLike]) -> tuple[np.ndarray, np.ndarray]:
    """Indices in the likelihood's vector, and unconstrained values, of fixed latents."""
    if not fixed:
        raise ValueError('No latent is fixed. Write evidence(w=0), or evidence({"w[2]": 0}).')
    starts = np.cumsum([0, *(math.prod(shape) for shape in likelihood.sites.values())])
    own = dict(zip(likelihood.sites, starts[:-1], strict=True))
    found: dict[int, float] = {}
    for name, value in fixed.items():
        site, entry = re.fullmatch(r"(.*?)(\[.*\])?", name, re.DOTALL).groups()  # type: ignore
        if site not in own:
            raise ValueError(
                f"Expected names among {list(own)}, which the run tells about, got {site!r}."
            )
        support = None if likelihood.supports is None else likelihood.supports[site]
        support = base_support(support)
        if support is None or biject_to(support).domain.event_dim:
            raise ValueError(
                f"Entries of {site!r} cannot be fixed one by one, because its support {support} "
                "ties them together, or is not known. Fix other latents."
            )
        shape = likelihood.sites[site]
        numbers = np.arange(math.prod(shape)).reshape(shape)
        try:
            chosen = numbers[tuple(map(int, entry[1:-1].split(",")))] if entry else numbers
            target = np.broadcast_to(np.asarray(value, np.float64), np.shape(chosen))
        except (IndexError, ValueError) as error:
            raise ValueError(
                f"Expected an entry and a value of {site!r} of shape {shape}, got {name!r} and "
                f"{value!r}: {error}."
            ) from error
        free = np.asarray(biject_to(support).inv(jnp.asarray(target)), np.float64)
        if not np.all(np.isfinite(free)):
            raise ValueError(
                f"Expected a value of {site!r} inside of its support {support}, got {value!r}."
            )
        found |= dict(zip((own[site] + np.ravel(chosen)).tolist(), np.ravel(free), strict=True))
    places = np.array(sorted(found))
    return places, np.array([found[place] for place in places])


def _log_normal(
    values: np.ndarray, places: np.ndarray, mean: np.ndarray, covariance: np.ndarray
) -> float:
    """Log density of some entries of a normal vector, without the constant."""
    root = factor(covariance[np.ix_(places, places)])
    scaled = np.linalg.solve(root, values - mean[places])
    return float(-scaled @ scaled / 2 - np.linalg.slogdet(root)[1])


def _log_integral(
    density: Callable[[np.ndarray], np.ndarray],
    mean: np.ndarray,
    covariance: np.ndarray,
    free: np.ndarray,
) -> tuple[float, float]:
    """Log integral of a log density over some coordinates, and its standard error.

    The others keep their mean.
    """
    rng, size = np.random.default_rng(0), len(free)
    theta = np.tile(mean, (_DRAWS, 1))
    logs = np.zeros(_DRAWS)
    if size:
        root = factor(symmetric(covariance[np.ix_(free, free)]))
        noise = rng.normal(size=(_DRAWS, size))
        noise *= np.sqrt(_DEGREES / rng.chisquare(_DEGREES, size=(_DRAWS, 1)))
        theta[:, free] += noise @ root.T
        power = (_DEGREES + size) / 2
        logs = power * np.log1p(np.sum(noise**2, axis=1) / _DEGREES)
        logs += np.linalg.slogdet(root)[1] + size / 2 * math.log(_DEGREES * math.pi)
        logs += gammaln(_DEGREES / 2) - gammaln(power)
    logs = logs + density(theta)
    logs = np.where(np.isfinite(logs), logs, -np.inf)
    total = float(np.asarray(logsumexp(logs)))
    weights = np.exp(logs - total)
    counted = 1 / np.sum(weights**2)
    if not counted >= _FEWEST:
        raise ValueError(
            f"The Bayes factor is not known: only {counted:.0f} of {_DRAWS} draws count, because "
            "the posterior is far from normal. Fix fewer latents, or compare a model without the "
            "hierarchy."
        )
    return total - math.log(_DRAWS), float(np.sqrt(1 / counted - 1 / _DRAWS))


def _log_prior_at(
    prior: ModelPrior, draws: np.ndarray, places: np.ndarray, values: np.ndarray
) -> float:
    """Log prior density of fixed latents, which must not depend on the others."""
    found = []
    for others in draws[:2]:
        point, total = others.copy(), 0.0
        for place, value in zip(places, values, strict=True):
            low, middle, high = np.quantile(draws[:, place], [0.16, 0.5, 0.84])
            t = np.linspace(-_WIDE, _WIDE, _POINTS)
            scale = max((high - low) / 2, 1e-6)
            grid = np.tile(point, (_POINTS + 1, 1))
            grid[:, place] = np.append(middle + scale * np.sinh(t), value)
            logs = prior.log_densities(grid)
            logs = np.where(np.isfinite(logs), logs, -np.inf)
            steps = scale * np.cosh(t) * (t[1] - t[0])
            total += float(logs[-1] - np.asarray(logsumexp(logs[:-1], b=steps)))
            point[place] = value
        found.append(total)
    if not abs(found[0] - found[1]) < _SAME:
        raise ValueError(
            "The prior of the fixed latents depends on other latents, such as a scale. Fixing them "
            "would change the prior of the others, so this ratio is no Bayes factor. Fix that "
            "scale, or refit with independent priors."
        )
    return float(np.mean(found))
