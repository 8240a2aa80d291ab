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

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from numpyro_dp.ep.gaussian import Cavity
from numpyro_dp.pbp.estimator import NetworkCavity, network_site
from numpyro_dp.pbp.model import RegressionNetwork

__all__ = ["SensitiveNetworkSites", "ep_sweep", "filter_sweeps", "start_network_sites"]

_CHUNK = 256  # number of records whose sites are computed at once

Params = dict[str, Array]


class SensitiveNetworkSites(NamedTuple):
    """The posterior and the site of each record. Sensitive: never publish it.

    Attributes:
        params: Natural parameters of q.
        sites: ``linear``, ``precision`` and ``rate`` of each record, leading axis ``records``.
    """

    params: Params
    sites: dict[str, Array]


def filter_sweeps(
    network: RegressionNetwork, params: Params, x: Array, y: Array, rng_keys: Array
) -> tuple[Params, Params]:
    """Filters all records once for each key, from a normal distribution with drawn means.

    Returns:
        The final posterior, and the posterior after each sweep with a leading axis.
    """

    def sweep(carry: Any, key: Array) -> tuple[Any, Params]:
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
    (params, *_), trace = lax.scan(sweep, (params, params["weights_linear"], prior), rng_keys)
    return params, trace


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
        return {
            "weights_linear": moved * total,
            "weights_precision": total,
            "noise_concentration": params["noise_concentration"] + 0.5,
            "noise_rate": rate + site["rate"],
        }, None

    return lax.scan(one, params, jax.random.permutation(rng_key, len(x)))[0]


def start_network_sites(
    network: RegressionNetwork, params: Params, number: int
) -> SensitiveNetworkSites:
    """Returns equal sites whose product with the prior has the given parameters."""
    extra = {
        "linear": params["weights_linear"],
        "precision": params["weights_precision"] - network.prior_precision(params),
        "rate": params["noise_rate"] - network.noise_prior[1],
    }
    share = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf / number, (number, *leaf.shape)), extra)
    return SensitiveNetworkSites(params, share)


def ep_sweep(
    network: RegressionNetwork, state: SensitiveNetworkSites, x: Array, y: Array, damping: Array
) -> SensitiveNetworkSites:
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
    return SensitiveNetworkSites(params, sites)
