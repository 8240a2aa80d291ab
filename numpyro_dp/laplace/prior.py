r"""The prior of a model as the decode takes it, and the posterior under the prior itself.

While releases are decoded, the prior of the latents that records see is a normal one: exactly,
where the model's prior is normal, else with its median and the width that holds its central 68 %.
What was released is then turned into a likelihood
:math:`\exp(b^\top\theta - \theta^\top P \theta / 2)`, and the posterior is that likelihood times
the model's *own* prior: in closed form if it is normal, by NUTS otherwise. That is post-processing,
free of privacy cost.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.flatten_util import ravel_pytree
from numpyro.distributions import biject_to
from numpyro.infer import MCMC, NUTS

from numpyro_dp.laplace.curvature import Prior
from numpyro_dp.model.outcomes import Outcomes, unconstrained_prior

__all__ = ["ModelPrior", "read_prior", "unconstrained"]

_DRAWS = 4000
_KEPT = 4000  # draws of NUTS


class ModelPrior(NamedTuple):
    """The prior of all latents.

    Attributes:
        outcomes: With the model.
        normal: Mean and precision of all latents in unconstrained coordinates, where their prior
            is normal; else ``None``.
        seen: Places of the latents that records see, among all.
        decoded: The normal prior of those, exact or not.
    """

    outcomes: Outcomes
    normal: tuple[np.ndarray, np.ndarray] | None
    seen: np.ndarray
    decoded: Prior

    def constrain(self, flat: Array) -> dict[str, Array]:
        """All latents, shape (draws, all), in the model's own units by site."""
        return _constrained(self.outcomes)(flat)

    def draw(self, rng_key: Array, num_samples: int) -> dict[str, Array]:
        """Draws from the prior by site, in the model's own units."""
        outcomes = self.outcomes
        keys = jax.random.split(rng_key, num_samples)

        def one(key: Array) -> dict[str, Array]:
            trace = outcomes.model.draw_prior(outcomes.shared, key)
            return {name: trace[name]["value"] for name in outcomes.model.structure.latents}

        return jax.jit(jax.vmap(one))(keys)

    def posterior(
        self, precision: np.ndarray, linear: np.ndarray, rng_key: Array
    ) -> Callable[[Array, int], dict[str, Array]]:
        """Returns ``(rng_key, num_samples) -> draws by site`` of the posterior.

        Args:
            precision: P of the likelihood of the latents that records see.
            linear: b of it.
            rng_key: Key of NUTS, where it is needed.
        """
        if self.normal is not None:
            mean, covariance = self._closed_form(precision, linear)
            return functools.partial(self._normal_draws, mean, np.linalg.cholesky(covariance))
        kept = self._sampled(precision, linear, rng_key)
        return functools.partial(self._kept_draws, kept)

    def _closed_form(self, precision: np.ndarray, linear: np.ndarray) -> tuple[Any, Any]:
        mean, total = self.normal[0], self.normal[1].copy()
        right = total @ mean
        total[np.ix_(self.seen, self.seen)] += precision
        right[self.seen] += linear
        covariance = np.linalg.inv((total + total.T) / 2)
        return covariance @ right, (covariance + covariance.T) / 2

    def _normal_draws(
        self, mean: np.ndarray, factor: np.ndarray, rng_key: Array, num_samples: int
    ) -> dict[str, Array]:
        noise = jax.random.normal(rng_key, (num_samples, len(mean)))
        return self.constrain(jnp.asarray(mean + np.asarray(noise) @ factor.T, noise.dtype))

    def _kept_draws(self, kept: Array, rng_key: Array, num_samples: int) -> dict[str, Array]:
        again = num_samples > len(kept)
        rows = jax.random.choice(rng_key, len(kept), (num_samples,), replace=again)
        return self.constrain(kept[rows])

    def _sampled(self, precision: np.ndarray, linear: np.ndarray, rng_key: Array) -> Array:
        outcomes, seen = self.outcomes, jnp.asarray(self.seen)
        unravel = _unravel(outcomes)
        own, slope = jnp.asarray(precision, jnp.float32), jnp.asarray(linear, jnp.float32)

        def potential(flat: Array) -> Array:
            theta = flat[seen]
            fit = slope @ theta - theta @ own @ theta / 2
            return -fit - outcomes.model.log_prior(unravel(flat), {}, outcomes.shared)

        start_key, run_key = jax.random.split(rng_key)
        start = _flat_prior(outcomes, start_key, 200)
        start = jnp.median(start, axis=0)
        wide = np.asarray(self.decoded.precision) + precision
        right = self.decoded.precision @ self.decoded.mean + linear
        start = start.at[seen].set(jnp.asarray(np.linalg.solve(wide, right), start.dtype))
        kernel = NUTS(potential_fn=potential, dense_mass=len(start) <= 50, target_accept_prob=0.9)
        mcmc = MCMC(kernel, num_warmup=1000, num_samples=_KEPT, progress_bar=False)
        mcmc.run(run_key, init_params=start)
        return mcmc.get_samples()


def read_prior(outcomes: Outcomes, rng_key: Array) -> ModelPrior:
    """Reads the prior of a model; no record is read."""
    flat = np.asarray(_flat_prior(outcomes, rng_key, _DRAWS), np.float64)
    marks = {name: jnp.full(s, float(name in outcomes.seen)) for name, s in outcomes.shapes.items()}
    seen = np.flatnonzero(np.asarray(ravel_pytree(marks)[0]))
    normal = _normal(outcomes, flat[:3])
    if normal is not None:
        covariance = np.linalg.inv(normal[1])[np.ix_(seen, seen)]
        return ModelPrior(outcomes, normal, seen, Prior(normal[0][seen], np.linalg.inv(covariance)))
    low, middle, high = np.quantile(flat[:, seen], [0.1587, 0.5, 0.8413], axis=0)
    widths = np.maximum((high - low) / 2, 1e-6)
    return ModelPrior(outcomes, None, seen, Prior(middle, np.diag(widths**-2.0)))


def _unravel(outcomes: Outcomes) -> Callable[[Array], dict[str, Array]]:
    return ravel_pytree({name: jnp.zeros(shape) for name, shape in outcomes.shapes.items()})[1]


def _flat_prior(outcomes: Outcomes, rng_key: Array, number: int) -> Array:
    """Draws from the prior as vectors of all latents, unconstrained."""

    def one(key: Array) -> Array:
        drawn = unconstrained_prior(outcomes.model, outcomes.shared, key)
        return ravel_pytree({name: drawn[name] for name in outcomes.shapes})[0]

    return jax.jit(jax.vmap(one))(jax.random.split(rng_key, number))


def _normal(outcomes: Outcomes, points: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """Mean and precision of all latents if their log density is quadratic, else ``None``."""
    unravel = _unravel(outcomes)

    def log_prior(flat: Array) -> Array:
        return outcomes.model.log_prior(unravel(flat), {}, outcomes.shared)

    at = jnp.asarray(points, jnp.float32)
    bend = jax.jit(jax.vmap(jax.hessian(log_prior)))
    slopes, bends = jax.jit(jax.vmap(jax.grad(log_prior)))(at), np.asarray(bend(at), np.float64)
    size = np.max(np.abs(bends))
    if not np.all(np.isfinite(bends)) or np.max(np.abs(bends - bends[0])) > 1e-4 * size:
        return None
    precision = -(bends[0] + bends[0].T) / 2
    if np.min(np.linalg.eigvalsh(precision)) <= 1e-9 * size:
        return None
    return points[0] + np.linalg.solve(precision, np.asarray(slopes[0], np.float64)), precision


def _constrained(outcomes: Outcomes) -> Callable[[Array], dict[str, Array]]:
    """Vectors of all latents, shape (draws, all) -> values by site in the model's own units."""
    unravel = _unravel(outcomes)

    def one(flat: Array) -> dict[str, Array]:
        latents = unravel(flat)
        trace = outcomes.model.trace_prior(latents, {}, outcomes.shared)
        return {name: trace[name]["value"] for name in outcomes.shapes}

    return jax.jit(jax.vmap(one))


def unconstrained(outcomes: Outcomes, draws: dict[str, Array]) -> dict[str, Array]:
    """Draws by site in unconstrained coordinates."""

    def one(values: dict[str, Array]) -> dict[str, Array]:
        trace = outcomes.model.draw_prior(outcomes.shared, jax.random.key(0))
        return {n: biject_to(trace[n]["fn"].support).inv(v) for n, v in values.items()}

    return jax.jit(jax.vmap(one))(draws)
