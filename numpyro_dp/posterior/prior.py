r"""The normal prior that decoding uses, and the posterior under the model's own prior.

Decoding needs a normal prior of the latents that records see. If the model's prior is normal, it is
used as it is. Otherwise the normal prior has its median, and the larger of the two widths that hold
its central 68 and 95 %. The prior of group effects becomes narrower once the released values tell
their scale (:meth:`ModelPrior.near`).

The released values then give a likelihood :math:`\exp(b^\top\theta - \theta^\top P \theta / 2)`.
The posterior is this likelihood times the model's *own* prior. It is computed in closed form for a
normal prior. Otherwise draws of the prior, or of its normal approximation, are weighted. If few
weights count, NUTS samples it. This is post-processing and has no privacy cost.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.flatten_util import ravel_pytree
from numpyro.diagnostics import split_gelman_rubin
from numpyro.distributions import biject_to
from numpyro.infer import MCMC, NUTS

from numpyro_dp._compat import is_tracer, jit_once
from numpyro_dp._tree import select
from numpyro_dp.core import Values
from numpyro_dp.model.density import Model
from numpyro_dp.model.outcomes import Outcomes, read_latents, unconstrained_prior
from numpyro_dp.posterior.algebra import factor, symmetric
from numpyro_dp.posterior.draws import Draws, Normal, Vectors, generator
from numpyro_dp.posterior.likelihood import Prior
from numpyro_dp.posterior.released import Likelihood, is_same_support

_DRAWS = 4000
_KEPT = 4000  # draws from a posterior that is not normal
_PROPOSED = 20_000
_CHAINS = 2
_PAIRS, _ROUNDS, _STEP = 128, 30, 0.5  # pairs of draws of effects, and rounds of EM
_FEW = 16  # of them have a Hessian
_LEAST = 0.25  # smallest precision, relative to that of the central part of the prior
_MIXED = 1.2  # largest R-hat of chains that have mixed


class Near(NamedTuple):
    """A normal distribution near the posterior, see :meth:`ModelPrior.near`.

    Attributes:
        mean: Its mean of all latents (all,).
        own: The part of the precision of latents that records see that the prior adds (d, d).
        spread: Covariance of the other latents.
        prior: The normal prior of the latents that records see.
    """

    mean: np.ndarray
    own: np.ndarray
    spread: np.ndarray
    prior: Prior


@dataclasses.dataclass(frozen=True, eq=False)
class ModelPrior:
    """The prior of all latents. It keeps its compiled programs, for the next posterior.

    Attributes:
        outcomes: The outcomes of the model.
        normal: The prior of all latents in unconstrained coordinates, or ``None`` if it is not
            normal.
        seen: Indices, among all latents, of the latents that records see.
        decoded: The exact or approximate normal prior of the latents that records see.
        constrain: Vectors of all latents, shape (draws, all) -> values by site in the model's own
            units.
        draws: Draws of all latents from their prior, shape (draws, all), or ``None`` if it is
            normal.
        supports: NumPyro's constraint of each site, or ``None`` if it depends on other latents.
    """

    outcomes: Outcomes
    normal: Prior | None
    seen: np.ndarray
    decoded: Prior
    constrain: Callable[[Array], dict[str, Array]]
    draws: np.ndarray | None = None
    supports: Mapping[str, Any] | None = None

    def likelihood(self, precision: np.ndarray, linear: np.ndarray) -> Likelihood:
        """Returns the likelihood as a value. The arguments are those of ``vectors``."""
        sites = {name: self.outcomes.shapes[name] for name in sorted(self.outcomes.seen)}
        supports = self.supports and {name: self.supports[name] for name in sites}
        return Likelihood(sites, precision, linear, self.normal is None, supports)

    def posterior(self, precision: np.ndarray, linear: np.ndarray, rng_key: Array) -> Draws:
        """Returns the draws of the posterior, by site. The arguments are those of ``vectors``."""
        return self.drawn(self.vectors(precision, linear, rng_key))

    def vectors(
        self, precision: np.ndarray, linear: np.ndarray, rng_key: Array
    ) -> Normal | Vectors:
        """Returns the draws of the posterior, as unconstrained vectors of all latents.

        Args:
            precision: P of the likelihood of the latents that records see.
            linear: b of this likelihood.
            rng_key: Key of the weighted draws or NUTS, for priors that are not normal.
        """
        if self.normal is not None:
            size = len(self.normal.mean)
            wide, right = np.zeros((size, size)), np.zeros(size)
            wide[np.ix_(self.seen, self.seen)], right[self.seen] = precision, linear
            mean, covariance = self.normal.updated(wide, right)
            return Normal(mean, np.linalg.cholesky(covariance))
        # From the cheapest way to the dearest. Draws of the prior will do if the records tell
        # little, and normal ones if the prior is nearly normal.
        draws = self.draws
        kept = None if draws is None else self._from_prior(draws, precision, linear, rng_key)
        if kept is None:
            kept = self._resampled(precision, linear, rng_key)
        if kept is None:
            kept = self._sampled(precision, linear, rng_key)
        return Vectors(np.asarray(kept))

    def stored(self, rows: np.ndarray, root: np.ndarray) -> Draws:
        """Draws stored vectors (number, all) with noise of covariance ``root @ root.T``."""
        return self.drawn(Vectors(rows, root))

    def drawn(self, vectors: Normal | Vectors) -> Draws:
        """Draws of all latents in unconstrained coordinates, as values by site."""

        def draws(rng_key: Array, num_samples: int) -> dict[str, Array]:
            flat = vectors(rng_key, num_samples)
            return self.constrain(jnp.asarray(flat, jnp.result_type(float)))

        return draws

    def _from_prior(
        self, draws: np.ndarray, precision: np.ndarray, linear: np.ndarray, rng_key: Array
    ) -> np.ndarray | None:
        """Draws from the prior, resampled by weight, or ``None`` if few weights count.

        If a small budget leaves the prior, NUTS would sample a hierarchy badly: the scale of group
        effects makes a funnel.
        """
        theta = draws[:, self.seen]
        fit = theta @ linear - np.sum((theta @ precision) * theta, axis=1) / 2
        return _by_weight(draws, fit, generator(rng_key))

    def _resampled(
        self, precision: np.ndarray, linear: np.ndarray, rng_key: Array
    ) -> np.ndarray | None:
        """Draws under the normal prior, resampled by weight, or ``None`` if few weights count."""
        prior = self.decoded
        # The normal prior covers only latents that records see.
        if len(self.outcomes.seen) < len(self.outcomes.shapes):
            return None
        mean, covariance = prior.updated(precision, linear)
        rng = generator(rng_key)
        theta = mean + rng.normal(size=(_PROPOSED, len(mean))) @ np.linalg.cholesky(covariance).T
        off = theta - prior.mean
        # The likelihood is in both densities and cancels. Left are the two priors.
        logs = self.log_densities(theta) + np.sum((off @ prior.precision) * off, axis=1) / 2
        return _by_weight(theta, logs, rng)

    def _sampled(self, precision: np.ndarray, linear: np.ndarray, rng_key: Array) -> np.ndarray:
        """Draws of several chains of NUTS, which start apart.

        They move in the coordinates of a normal distribution near the posterior. There a sharp
        likelihood has no narrow directions, and single precision is enough. The scale of group
        effects makes a funnel, and a chain may get stuck in its neck. Then the chains disagree, and
        others take shorter steps.
        """
        if self.has_scales:
            mean, own, spread, _ = self.near(precision, linear)
            root = np.zeros((len(mean), len(mean)))
            apart = np.setdiff1d(np.arange(len(mean)), self.seen)
            root[np.ix_(self.seen, self.seen)] = factor(np.linalg.inv(own + precision))
            root[np.ix_(apart, apart)] = factor(spread)
        else:  # every latent is seen
            mean, covariance = self.decoded.updated(precision, linear)
            root = factor(covariance)
        seen = root[self.seen]
        given = [seen.T @ precision @ seen, seen.T @ (linear - precision @ mean[self.seen])]
        given += [mean, root, generator(rng_key).normal(size=(_CHAINS, len(mean)))]
        given = [jnp.asarray(each, jnp.result_type(float)) for each in given]
        given = [jax.random.split(rng_key, _CHAINS), *given]
        chains = np.asarray(self._nuts(0.9, *given))
        if not _mixed(chains):
            first, chains = chains, np.asarray(self._nuts(0.99, *given))
            if not _mixed(chains):  # intervals of all chains are wide where they disagree
                chains = np.concatenate([first, chains])
        return chains.reshape(-1, chains.shape[-1])

    def log_densities(self, theta: np.ndarray) -> np.ndarray:
        """Log densities (number,) of the prior at vectors (number, all) of all latents."""
        return np.asarray(self._log_priors(jnp.asarray(theta, jnp.result_type(float))), np.float64)

    @functools.cached_property
    def _log_priors(self) -> Callable[[Array], Array]:
        return jax.jit(jax.vmap(self.log_prior))

    @property
    def has_scales(self) -> bool:
        """Whether latents that no record sees decide the prior of others: scales of effects."""
        every = sum(int(np.prod(shape)) for shape in self.outcomes.shapes.values())
        return self.normal is None and len(self.seen) < every

    def near(self, precision: np.ndarray, linear: np.ndarray, begin: Near | None = None) -> Near:
        r"""Returns the normal prior of group effects, given what a likelihood tells of their scale.

        The prior of an effect u is as wide as its scale may be. Once the records tell the scale, it
        is much narrower. Let t be the latents that no record sees, such as logs of scales, and f
        the log prior of all latents. The EM algorithm finds the most likely t. Its information is

        .. math:: I = -E_u[\nabla_t^2 f] - \mathrm{Cov}_u(\nabla_t f),

        and the prior of u has the covariance :math:`E_t[-\nabla_u^2 f]^{-1}` over
        :math:`t \sim N(\hat t, I^{-1})`, at most that of ``decoded``.

        Args:
            precision: P of the likelihood of the latents that records see.
            linear: b of this likelihood.
            begin: The result for an earlier likelihood.

        Reference:
            T. A. Louis (1982), Finding the observed information matrix when using the EM algorithm.
        """
        size = len(self.median)
        seen, apart = self.seen, np.setdiff1d(np.arange(size), self.seen)
        units = 1 / np.sqrt(np.diag(self.decoded.precision))
        low, high = np.quantile(self._some[:, apart], [0.1587, 0.8413], axis=0)
        of_scales = np.maximum((high - low) / 2, 1e-6)
        if begin is None:
            # From wide effects, whose scale comes down to what the records say. From effects of 0
            # it would stay at 0.
            mean = self.median.astype(float)
            mean[seen], _ = self.decoded.updated(precision, linear)
            begin = Near(mean, self.decoded.precision, np.diag(of_scales**2), self.decoded)
        mean, own, _, _ = begin
        mean, rng = mean.copy(), generator(jax.random.key(0))
        noise = rng.normal(size=(_PAIRS, size))
        noise = np.concatenate([noise, -noise])
        information = np.diag(of_scales**-2)
        for _ in range(_ROUNDS):
            covariance = np.linalg.inv(own + precision)
            away = noise[:, seen] @ factor(covariance).T
            # With exactly these variances. An error would move a scale that is hardly known.
            away *= np.sqrt(np.diag(covariance) / np.mean(away**2, axis=0))
            points = np.tile(mean, (len(noise), 1))
            points[:, seen] += away
            slopes, bends = self._derivatives(points)
            if not (np.all(np.isfinite(slopes)) and np.all(np.isfinite(bends))):
                return begin
            slope, bend = slopes.mean(0), -bends.mean(0)
            complete = _at_least(bend[np.ix_(apart, apart)], of_scales)
            missing = np.atleast_2d(np.cov(slopes[:, apart].T))
            information = _at_least(complete - missing, of_scales)
            own = own + _STEP * (_at_least(bend[np.ix_(seen, seen)], units) - own)
            pull = slope[seen] + linear - precision @ mean[seen]
            mean[seen] += _STEP * np.linalg.solve(own + precision, pull)
            # Far above its optimum, the log of a scale would step far below it.
            step = np.linalg.solve(complete, slope[apart])
            mean[apart] += _STEP * np.clip(step, -of_scales, of_scales)
        spread = np.linalg.inv(information)
        few = slice(None, None, len(points) // _FEW)  # in pairs, as all of them
        points[few, apart] = mean[apart] + noise[few, apart] @ factor(spread).T
        _, bends = self._derivatives(points)
        if not np.all(np.isfinite(bends)):
            return begin
        parts = [np.linalg.inv(_at_least(-each[np.ix_(seen, seen)], units)) for each in bends]
        values, vectors = np.linalg.eigh(np.mean(parts, axis=0) / np.outer(units, units))
        turned = vectors / units[:, None]
        block = (turned / np.minimum(values, 1)) @ turned.T
        middle = mean[seen] + np.linalg.solve(own, slope[seen])
        return Near(mean, own, spread, Prior(middle, block))

    def _derivatives(self, points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Gradients of the log prior at points (number, all), and Hessians at a few of them."""
        found = self._of_prior(jnp.asarray(points, jnp.result_type(float)))
        return np.asarray(found[0], np.float64), np.asarray(found[1], np.float64)

    @functools.cached_property
    def _of_prior(self) -> Callable[[Array], tuple[Array, Array]]:
        def found(points: Array) -> tuple[Array, Array]:
            slopes = jax.vmap(jax.grad(self.log_prior))(points)
            few = points[:: max(1, len(points) // _FEW)]
            return slopes, jax.lax.map(jax.hessian(self.log_prior), few)

        return jax.jit(found)

    @property
    def nothing(self) -> tuple[np.ndarray, np.ndarray]:
        """Precision and linear term of a likelihood that tells nothing."""
        size = len(self.seen)
        return np.zeros((size, size)), np.zeros(size)

    @functools.cached_property
    def log_prior(self) -> Callable[[Array], Array]:
        """Log density of the prior at the vector of all latents, for use in a traced function."""
        return _log_prior(self.outcomes)

    @functools.cached_property
    def median(self) -> np.ndarray:
        """The prior's median of all latents (all,)."""
        return np.median(self._some, axis=0)

    @functools.cached_property
    def _some(self) -> np.ndarray:
        """Draws of all latents from their prior (draws, all)."""
        if self.draws is not None:
            return self.draws
        return np.asarray(_flat_prior(self.outcomes, jax.random.key(0), 200), np.float64)

    @functools.cached_property
    def _nuts(self) -> Callable[..., Array]:
        """NUTS, compiled once: ``(accepted, keys, precision, linear, starts) -> draws``.

        The draws are of shape (chains, draws, all). More accepted proposals need shorter steps.
        """
        log_prior = self.log_prior

        @jax.jit
        def draws(
            accepted: float, keys: Array, precision: Array, linear: Array, mean: Array, root: Array,
            starts: Array,
        ) -> Array:  # fmt: skip
            def potential(white: Array) -> Array:
                fit = linear @ white - white @ precision @ white / 2
                return -fit - log_prior(mean + root @ white)

            dense = starts.shape[1] <= 50
            kernel = NUTS(potential_fn=potential, dense_mass=dense, target_accept_prob=accepted)
            mcmc = MCMC(
                kernel, num_warmup=500, num_samples=_KEPT // 2 // _CHAINS,
                num_chains=_CHAINS, chain_method="vectorized", progress_bar=False,
            )  # fmt: skip
            mcmc.run(keys, init_params=starts)
            return mean + mcmc.get_samples(group_by_chain=True) @ root.T

        return draws


def prior_of(model: Model, shared: tuple[Array, ...]) -> ModelPrior:
    """Returns the prior of all latents of a model. Reads no record.

    Its ``posterior(precision, linear, rng_key)`` has draws of the posterior for a likelihood that
    is quadratic in unconstrained latents. With zeros it draws from the prior.

    Args:
        model: The model.
        shared: Public arrays among its arguments.

    Raises:
        UnsupportedModelError: If the model has parameters, latents of single records, or a prior
            that cannot be drawn from.

    Example:
        >>> import numpy as np, numpyro, numpyro.distributions as dist
        >>> from numpyro_dp import Privacy
        >>> from numpyro_dp.extend import Model
        >>> def model(x):
        ...     mean = numpyro.sample("mean", dist.Normal(3, 1))
        ...     with numpyro.plate("records", x.shape[0]):
        ...         numpyro.sample("x", dist.Normal(mean, 1), obs=x)
        >>> structure = Privacy().given_model(model, {}).structure((np.ones(100),), {})
        >>> prior_of(Model(model, structure), ()).decoded.mean.round(3)
        array([3.])
    """
    # The prior is public, so a fixed public key will do.
    return read_prior(read_latents(model, shared), jax.random.key(0))


def read_prior(outcomes: Outcomes, rng_key: Array) -> ModelPrior:
    """Reads the prior of a model, and no record."""
    names = sorted(outcomes.shapes)  # the order of ravel_pytree
    marks = [np.full(int(np.prod(outcomes.shapes[n])), n in outcomes.seen) for n in names]
    seen = np.flatnonzero(np.concatenate(marks))
    constrain, supports = constrained(outcomes)
    normal = _normal(outcomes, sum(map(len, marks)))
    if normal is not None:
        # A block of the covariance is the marginal prior. A block of the precision would be that
        # given the other latents.
        covariance = normal.covariance[np.ix_(seen, seen)]
        decoded = Prior(normal.mean[seen], np.linalg.inv(covariance))
        return ModelPrior(outcomes, normal, seen, decoded, constrain, supports=supports)
    flat = np.asarray(_flat_prior(outcomes, rng_key, _DRAWS), np.float64)
    quantiles = np.quantile(flat[:, seen], [0.025, 0.1587, 0.5, 0.8413, 0.975], axis=0)
    lowest, low, middle, high, highest = quantiles
    # Heavy tails need the larger width. A prior that is too narrow also moves the other latents.
    widths = np.maximum(np.maximum((high - low) / 2, (highest - lowest) / 3.92), 1e-6)
    decoded = Prior(middle, np.diag(widths**-2.0))
    return ModelPrior(outcomes, None, seen, decoded, constrain, flat, supports)


def _at_least(matrix: np.ndarray, units: np.ndarray) -> np.ndarray:
    """The matrix with no precision below a part of that of given standard deviations."""
    values, vectors = np.linalg.eigh(symmetric(matrix) * np.outer(units, units))
    turned = vectors / units[:, None]
    return (turned * np.maximum(values, _LEAST)) @ turned.T


def _by_weight(draws: np.ndarray, logs: np.ndarray, rng: np.random.Generator) -> np.ndarray | None:
    """Draws, chosen by weight, or ``None`` if fewer than a quarter of them count."""
    logs = np.where(np.isfinite(logs), logs, -np.inf)
    weights = np.exp(logs - logs.max())
    weights = weights / weights.sum()
    if not np.isfinite(weights).all() or 1 / np.sum(weights**2) < len(logs) / 4:
        return None
    return draws[rng.choice(len(logs), _KEPT, p=weights)]


def _mixed(chains: np.ndarray) -> bool:
    """Whether chains (chains, draws, all) agree."""
    return bool(np.max(split_gelman_rubin(chains)) < _MIXED)


def _unravel(outcomes: Outcomes) -> Callable[[Array], dict[str, Array]]:
    return ravel_pytree({n: np.zeros(shape, "f4") for n, shape in outcomes.shapes.items()})[1]


def _log_prior(outcomes: Outcomes) -> Callable[[Array], Array]:
    unravel = _unravel(outcomes)
    return lambda flat: outcomes.model.log_prior(unravel(flat), {}, outcomes.shared)


def _flat_prior(outcomes: Outcomes, rng_key: Array, number: int) -> Array:
    """Draws from the prior, as unconstrained vectors of all latents."""

    def one(key: Array) -> Array:
        drawn = unconstrained_prior(outcomes.model, outcomes.shared, key)
        return ravel_pytree(select(drawn, outcomes.shapes))[0]

    return jit_once(jax.vmap(one))(jax.random.split(rng_key, number))


def _normal(outcomes: Outcomes, size: int) -> Prior | None:
    """The prior of all latents if their log density is quadratic, else ``None``."""
    log_prior = _log_prior(outcomes)

    def derivatives(flat: Array) -> tuple[Array, Array]:
        return jax.grad(log_prior)(flat), jax.hessian(log_prior)(flat)

    # A density is normal if its second derivative is the same everywhere, also far out.
    points = np.random.default_rng(0).normal(size=(6, size)) * [[1], [1], [1], [10], [10], [100]]
    found = jit_once(jax.vmap(derivatives))(np.asarray(points, np.float32))
    slopes, bends = (np.asarray(each, np.float64) for each in found)
    largest = np.max(np.abs(bends))
    if not np.all(np.isfinite(bends)) or np.max(np.abs(bends - bends[0])) > 1e-4 * largest:
        return None
    precision = -(bends[0] + bends[0].T) / 2
    if np.min(np.linalg.eigvalsh(precision)) <= 1e-9 * largest:
        return None
    prior = Prior(points[0] + np.linalg.solve(precision, slopes[0]), precision)
    # In a mixture each point may be in another component, of the same width.
    pulls = (prior.mean - points) @ precision
    off = np.abs(slopes - pulls).max(axis=1) > 1e-3 * np.abs(pulls).max(axis=1) + 1e-3 * largest
    return None if np.any(off) else prior


def constrained(
    outcomes: Outcomes,
) -> tuple[Callable[[Array], dict[str, Array]], Values | None]:
    """Vectors of all latents, shape (draws, all) -> values by site in the model's own units.

    Also the constraint of each site, or ``None`` if it depends on other latents.
    """
    unravel = _unravel(outcomes)

    def sites(latents: dict[str, Array]) -> Values:
        return select(outcomes.model.trace_prior(latents, {}, outcomes.shared), outcomes.shapes)

    def one(flat: Array) -> dict[str, Array]:
        return {name: site["value"] for name, site in sites(unravel(flat)).items()}

    def by_site(vectors: Array) -> dict[str, Array]:
        latents = jax.vmap(unravel)(vectors)
        return {name: jax.vmap(biject_to(supports[name]))(latents[name]) for name in supports}

    def supports_at(value: float | Array) -> Values:
        latents = {name: jnp.full(shape, value) for name, shape in outcomes.shapes.items()}
        return {name: site["fn"].support for name, site in sites(latents).items()}

    supports: Values = {}
    jax.eval_shape(lambda value: supports.update(supports_at(value)), 0.0)
    others = supports
    if any(map(is_tracer, jax.tree.leaves(supports))):
        # A support that depends on other latents differs between two places.
        supports, others = supports_at(0.0), supports_at(0.3)
    if all(is_same_support(support, others[name]) for name, support in supports.items()):
        return by_site, supports  # needs no trace of the model
    return jax.jit(jax.vmap(one)), None
