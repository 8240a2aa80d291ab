r"""Assumed density filtering and expectation propagation of a network. Not private.

Filtering goes through the records one by one and moves the posterior by each,

.. math:: m \leftarrow m + v g, \quad v \leftarrow v - v^2 h, \quad a \leftarrow a + \tfrac12,
    \quad b \leftarrow b + \Delta b_i,

as probabilistic backpropagation does. Every sweep counts the records again. Filtering starts at the
prior with randomly drawn means, which make the units differ, and removes these means after the
first sweep. A prior precision that is not fixed is updated from the weights between sweeps.
Expectation propagation keeps a site for each record and moves all sites at once. This needs memory
for N times the number of weights.

Reference:
    Hernández-Lobato, Adams (2015), Probabilistic backpropagation for scalable learning of Bayesian
    neural networks, ICML; Minka (2001), Expectation propagation, UAI.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax import Array, lax

from numpyro_dp.core import PyTree
from numpyro_dp.extend import Privacy, check_int, check_rng_key
from numpyro_dp.methods.normal import Cavity
from numpyro_dp.methods.pbp.dppbp import DPPBP
from numpyro_dp.methods.pbp.model import NetworkGuide, RegressionNetwork, natural_of
from numpyro_dp.methods.pbp.network_sites import NetworkCavity, network_site
from numpyro_dp.methods.shared import SensitiveEPResult, SensitiveSites, equal_sites
from numpyro_dp.samplers import FullBatch

_CHUNK = 256  # number of records whose sites are computed at once

Params = dict[str, Array]


class PBP:
    """Probabilistic backpropagation and expectation propagation of a network. Not private.

    For stochastic expectation propagation, use
    ``DPPBP(..., clip_norm=math.inf, privacy=Privacy(noise_multiplier=0))``.

    Args:
        network: The model.
        keep_sites: Runs expectation propagation with a site for each record. By default ``PBP``
            runs assumed density filtering record by record, as in the reference.
        damping: Fraction of a site's change that expectation propagation takes, in (0, 1].
        init_scale: Standard deviation of the initial means.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from numpyro_dp import PBP, RegressionNetwork
        >>> x = jax.random.normal(jax.random.key(1), (500, 2))
        >>> y = jnp.abs(x[:, 0]) - 0.8
        >>> network = RegressionNetwork((10,))
        >>> result = PBP(network).run(jax.random.key(0), 20, x, y)
        >>> mean, variance = network.predict(result.params, x)
        >>> bool(jnp.mean((mean - y) ** 2) < 0.1 * jnp.var(y))
        True

    Guarantee:
        None: the result is not private.

    Reference:
        Hernández-Lobato, Adams (2015), Probabilistic backpropagation for scalable learning of
        Bayesian neural networks, ICML.
    """

    def __init__(
        self,
        network: RegressionNetwork,
        *,
        keep_sites: bool = False,
        damping: float = 0.05,
        init_scale: float = 1.0,
    ) -> None:
        # It reads and starts as the private driver does.
        self._driver = DPPBP(
            network, damping=damping, init_scale=init_scale, clip_norm=math.inf,
            sampler=FullBatch(), privacy=Privacy(noise_multiplier=0.0),
        )  # fmt: skip
        self.network: RegressionNetwork = network
        self.guide: NetworkGuide = self._driver.guide
        self.keep_sites: bool = keep_sites
        self._damping = damping

    def run(self, rng_key: Array, num_sweeps: int, x: Array, y: Array) -> SensitiveEPResult:
        """Sweeps over all records ``num_sweeps`` times.

        Args:
            rng_key: Key of the initial means and of the order of records.
            num_sweeps: Number of sweeps.
            x: Inputs, shape (records, inputs).
            y: Targets, shape (records,).
        """
        check_rng_key(rng_key)
        check_int("num_sweeps", num_sweeps, low=1)
        self._driver.structure((x, y), {})
        start_key, rng_key = jax.random.split(rng_key)
        params = self._driver.start(start_key, x.shape[1], len(x))
        if not self.keep_sites:  # filtering starts at the prior and counts the records itself
            precision = self.network.weight_precision or 1.0
            weight = params["weights_precision"]
            means = params["weights_linear"] / weight / math.sqrt(precision)
            prior = jnp.full_like(weight, precision)
            params = natural_of(means, prior, *self.network.noise_prior)
        keys = jax.random.split(rng_key, num_sweeps)
        x, y = (jnp.asarray(each).astype(jnp.result_type(float)) for each in (x, y))
        sweeps = _ep_sweeps if self.keep_sites else _filter_sweeps
        return SensitiveEPResult(*sweeps(self.network, params, x, y, keys, self._damping))


@functools.partial(jax.jit, static_argnums=0)
def _ep_sweeps(
    network: RegressionNetwork, params: Params, x: Array, y: Array, keys: Array, damping: float
) -> tuple[Params, Params]:
    """Moves all sites once for each key. Returns the last posterior and those of all sweeps."""

    def sweep(state: SensitiveSites, _: Array) -> tuple[SensitiveSites, Params]:
        state = ep_sweep(network, state, x, y, damping)
        return state, state.params

    state, trace = lax.scan(sweep, start_network_sites(network, params, len(x)), keys)
    return state.params, trace


@functools.partial(jax.jit, static_argnums=0)
def _filter_sweeps(
    network: RegressionNetwork, params: Params, x: Array, y: Array, keys: Array, _: float
) -> tuple[Params, Params]:
    """Filters all records once for each key, from a normal distribution with drawn means."""

    def sweep(carry: PyTree, key: Array) -> tuple[PyTree, Params]:
        params, drawn, prior = carry
        params = _filtered(network, params, x, y, key)
        # Replace the prior precision of the last sweep, and the drawn means after the first.
        now = network.prior_precision(params)
        precision = jnp.maximum(params["weights_precision"] + now - prior, 1e-3 * now)
        params = params | {
            "weights_linear": params["weights_linear"] - drawn, "weights_precision": precision
        }  # fmt: skip
        return (params, jnp.zeros_like(drawn), now), params

    prior = params["weights_precision"][0]
    last, trace = lax.scan(sweep, (params, params["weights_linear"], prior), keys)
    return last[0], trace


def _filtered(
    network: RegressionNetwork, params: Params, x: Array, y: Array, rng_key: Array
) -> Params:
    """The posterior after all records, in a random order."""
    layout = network.layout(x.shape[1])

    def one(params: Params, record: Array) -> tuple[Params, None]:
        precision, rate = params["weights_precision"], params["noise_rate"]
        mean = params["weights_linear"] / precision
        cavity = Cavity(mean, 1 / precision)
        noise = rate / (params["noise_concentration"] - 1)
        site = network_site(layout, NetworkCavity(cavity, noise), x[record], y[record])
        total = precision + site["precision"]
        good = total > 0
        total = jnp.where(good, total, precision)
        moved = mean + jnp.where(good, site["linear"], 0) / total
        concentration = params["noise_concentration"]
        return natural_of(moved, total, concentration + 0.5, rate + site["rate"]), None

    return lax.scan(one, params, jax.random.permutation(rng_key, len(x)))[0]


def start_network_sites(network: RegressionNetwork, params: Params, number: int) -> SensitiveSites:
    """Returns equal sites whose product with the prior has the given parameters."""
    return equal_sites(params, network.beyond_prior(params), number)


def ep_sweep(
    network: RegressionNetwork, state: SensitiveSites, x: Array, y: Array, damping: float
) -> SensitiveSites:
    """Moves the sites of all records, each starting from the same posterior."""
    layout, params = network.layout(x.shape[1]), state.params

    def refined(record: tuple[dict[str, Array], Array, Array]) -> dict[str, Array]:
        own, x, y = record
        precision = params["weights_precision"] - own["precision"]
        mean = (params["weights_linear"] - own["linear"]) / precision
        noise = (params["noise_rate"] - own["rate"]) / (params["noise_concentration"] - 1.5)
        site = network_site(layout, NetworkCavity(Cavity(mean, 1 / precision), noise), x, y)
        site["linear"] = site["linear"] + site["precision"] * mean
        good = jnp.all(precision > 0) & (noise > 0)
        return {
            name: jnp.where(good, own[name] + damping * (site[name] - own[name]), own[name])
            for name in own
        }

    sites = lax.map(refined, (state.sites, x, y), batch_size=_CHUNK)
    total = jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0), sites)
    prior = network.prior_precision(params)
    params = params | {
        "weights_linear": total["linear"],
        "weights_precision": prior + jnp.maximum(total["precision"], 0),
        "noise_rate": network.noise_prior[1] + total["rate"],
    }
    return SensitiveSites(params, sites)
