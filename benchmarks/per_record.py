r"""Message passing that is not private: expectation propagation, and assumed density filtering.

``EP`` keeps one site per record, and moves all of them at once from the same q,

.. math::
    q_{-i} = q / f_i, \qquad f_i \leftarrow f_i^{1-\rho}
    \Big(\frac{\mathrm{proj}[p(x_i \mid z)\, q_{-i}]}{q_{-i}}\Big)^{\rho},
    \qquad q \propto p_0 \prod_i f_i.

``PBP`` fits a regression network. By default it goes through the records one by one and moves the
posterior by each, as probabilistic backpropagation does. Every sweep counts the records again. It
starts at the prior with randomly drawn means, which make the units differ, and removes these means
after the first sweep. With ``keep_sites`` it is expectation propagation.

Reference:
    Minka (2001), Expectation propagation, UAI; Hernández-Lobato, Adams (2015), Probabilistic
    backpropagation for scalable learning of Bayesian neural networks, ICML.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from numpyro_dp import SEP
from numpyro_dp.ep.families import divide, multiply, normal
from numpyro_dp.ep.gaussian import Cavity, cavity_of, centre
from numpyro_dp.model.frontend import Call
from numpyro_dp.pbp.estimator import NetworkCavity, network_site

CHUNK = 256  # number of records whose sites are computed at once
START = 100.0  # initial precision of the weights, where each record keeps a site


class Found(NamedTuple):
    """Natural parameters of the posterior."""

    params: dict


class Sites(NamedTuple):
    """The posterior and the site of each record."""

    params: dict
    sites: dict


def damped(good, old, new, rate):
    good &= jnp.all(jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(new)]))
    return jax.tree.map(lambda x, y: jnp.where(good, (1 - rate) * x + rate * y, x), old, new)


def equal(extra, number):
    return jax.tree.map(lambda x: jnp.broadcast_to(x / number, (number, *x.shape)), extra)


def added(sites):
    return jax.tree.map(lambda leaf: leaf.sum(0), sites)


class EP:
    """Expectation propagation of a model with a normal family."""

    def __init__(self, model, family=normal, *, damping=0.5, **options):
        self.sep, self.damping = SEP(model, family, **options), damping

    def run(self, rng_key, num_sweeps, *args, init_params=None):
        structure = self.sep.structure(args, {})
        problem = self.sep.prepare(structure, rng_key, Call(args, {}, init_params)).problem
        family, number = problem.latents.family, problem.num_examples
        start = problem.start(init_params)

        @jax.jit
        def sweeps(records):
            site = problem.site.build(problem)

            def refined(posterior, own, key, example):
                cavity = divide(posterior, own)
                found = site.approximate(site.prepare(key, cavity), example)
                found = centre(found, -cavity_of(cavity).mean)
                return damped(family.is_valid(cavity), own, found, self.damping)

            def one(state, key):
                posterior, sites = state
                keys = jax.random.split(key, number)
                sites = jax.vmap(functools.partial(refined, posterior))(sites, keys, records)
                return (multiply(problem.prior, added(sites)), sites), None

            first = start, equal(divide(start, problem.prior), number)
            return lax.scan(one, first, jax.random.split(rng_key, num_sweeps))[0][0]

        return Found(problem.constrain(sweeps(problem.rows(args, {}).arrays)))


class PBP:
    """Probabilistic backpropagation, or expectation propagation, of a network."""

    def __init__(self, network, *, keep_sites=False, damping=0.05):
        self.network, self.keep_sites, self.damping = network, keep_sites, damping

    def run(self, rng_key, num_sweeps, x, y):
        network, number = self.network, len(x)
        start_key, rng_key = jax.random.split(rng_key)
        size = sum(network.layout(x.shape[1]).sizes)
        mean = jax.random.normal(start_key, (size,))
        concentration, rate = network.noise_prior
        x, y = (jnp.asarray(array, jnp.result_type(float)) for array in (x, y))
        if not self.keep_sites:
            precision = network.weight_precision or 1.0
            params = parameters(mean / math.sqrt(precision), precision, concentration, rate)
            keys = jax.random.split(rng_key, num_sweeps)
            return Found(filter_sweeps(network, params, x, y, keys))
        total = concentration + number / 2
        params = parameters(mean, START, total, (total - 1) * rate / (concentration - 1))
        state = start_network_sites(network, params, number)

        @jax.jit
        def sweeps(state, x, y):
            def step(state, _):
                return ep_sweep(network, state, x, y, self.damping), None

            return lax.scan(step, state, length=num_sweeps)[0]

        return Found(sweeps(state, x, y).params)


def parameters(mean, precision, concentration, rate):
    return {
        "weights_linear": mean * precision,
        "weights_precision": jnp.full(mean.size, precision),
        "noise_concentration": jnp.asarray(concentration),
        "noise_rate": jnp.asarray(rate),
    }


@functools.partial(jax.jit, static_argnums=0)
def filter_sweeps(network, params, x, y, rng_keys):
    """Filters all records once for each key, in a random order."""
    layout = network.layout(x.shape[1])

    def one(params, record):
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

    def sweep(carry, key):
        params, drawn, prior = carry
        params = lax.scan(one, params, jax.random.permutation(key, len(x)))[0]
        # Replace the prior precision of the last sweep, and the drawn means after the first.
        now = network.prior_precision(params)
        precision = jnp.maximum(params["weights_precision"] + now - prior, 1e-3 * now)
        params = params | {
            "weights_linear": params["weights_linear"] - drawn, "weights_precision": precision
        }  # fmt: skip
        return (params, jnp.zeros_like(drawn), now), None

    first = params, params["weights_linear"], params["weights_precision"][0]
    return lax.scan(sweep, first, rng_keys)[0][0]


def start_network_sites(network, params, number):
    """Equal sites whose product with the prior has the given parameters."""
    extra = {
        "linear": params["weights_linear"],
        "precision": params["weights_precision"] - network.prior_precision(params),
        "rate": params["noise_rate"] - network.noise_prior[1],
    }
    return Sites(params, equal(extra, number))


def ep_sweep(network, state, x, y, damping):
    """Moves the sites of all records, each starting from the same posterior."""
    layout, params = network.layout(x.shape[1]), state.params

    def refined(record):
        own, x, y = record
        precision = params["weights_precision"] - own["precision"]
        mean = (params["weights_linear"] - own["linear"]) / precision
        noise = (params["noise_rate"] - own["rate"]) / (params["noise_concentration"] - 1.5)
        site = network_site(layout, NetworkCavity(Cavity(mean, 1 / precision), noise), x, y)
        site["linear"] = site["linear"] + site["precision"] * mean
        return damped(jnp.all(precision > 0) & (noise > 0), own, site, damping)

    sites = lax.map(refined, (state.sites, x, y), batch_size=CHUNK)
    total, prior = added(sites), network.prior_precision(params)
    params = params | {
        "weights_linear": total["linear"],
        "weights_precision": prior + jnp.maximum(total["precision"], 0),
        "noise_rate": network.noise_prior[1] + total["rate"],
    }
    return Sites(params, sites)
