r"""Expectation propagation with one site per record. Not private: it stores each record's site.

.. math::
    q_{-i} = q / f_i, \qquad f_i \leftarrow f_i^{1-\rho}
    \Big(\frac{\mathrm{proj}[p(x_i \mid z)\, q_{-i}]}{q_{-i}}\Big)^{\rho},
    \qquad q \propto p_0 \prod_i f_i,

for all records at once from the same q (batched), or for one record after the other (sequential).

Reference:
    Minka (2001), Expectation propagation for approximate Bayesian inference, UAI.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from numpyro_dp.ep.families import Natural, damp, divide, multiply
from numpyro_dp.ep.gaussian import cavity_of, centre, is_definite
from numpyro_dp.ep.problem import EPProblem, Site

__all__ = ["SensitiveSites", "batched_sweep", "sequential_sweep", "start_sites"]


class SensitiveSites(NamedTuple):
    """The posterior and the site of each record. Sensitive: never publish it.

    Attributes:
        posterior: Natural parameters of q.
        sites: Natural parameters of each record's site, leading axis ``records``.
    """

    posterior: Natural
    sites: Natural


def start_sites(problem: EPProblem, start: Natural) -> SensitiveSites:
    """Returns equal sites whose product with the prior is ``start``."""
    number = problem.num_examples
    extra = divide(start, problem.prior)
    sites = jax.tree.map(lambda x: jnp.broadcast_to(x / number, (number, *x.shape)), extra)
    return SensitiveSites(start, sites)


def batched_sweep(
    problem: EPProblem, site: Site, state: SensitiveSites, records: Any, rng_key: Array, rate: Array
) -> SensitiveSites:
    """Moves the sites of all records, each starting from the same posterior."""
    keys = jax.random.split(rng_key, problem.num_examples)
    refine = jax.vmap(lambda own, key, example: _refined(
        problem, site, state.posterior, own, key, example, rate
    ))  # fmt: skip
    sites = refine(state.sites, keys, records)
    total = jax.tree.map(lambda leaf: leaf.sum(0), sites)
    return SensitiveSites(multiply(problem.prior, total), sites)


def sequential_sweep(
    problem: EPProblem, site: Site, state: SensitiveSites, records: Any, rng_key: Array, rate: Array
) -> SensitiveSites:
    """Moves the sites one after the other, in a random order."""
    order_key, rng_key = jax.random.split(rng_key)
    order = jax.random.permutation(order_key, problem.num_examples)

    def move(state: SensitiveSites, number: Array) -> tuple[SensitiveSites, None]:
        own = jax.tree.map(lambda leaf: leaf[number], state.sites)
        example = jax.tree.map(lambda leaf: leaf[number], records)
        key = jax.random.fold_in(rng_key, number)
        new = _refined(problem, site, state.posterior, own, key, example, rate)
        posterior = multiply(state.posterior, divide(new, own))
        sites = jax.tree.map(lambda leaf, value: leaf.at[number].set(value), state.sites, new)
        return SensitiveSites(posterior, sites), None

    state, _ = lax.scan(move, state, order)
    total = jax.tree.map(lambda leaf: leaf.sum(0), state.sites)  # drops accumulated rounding errors
    return SensitiveSites(multiply(problem.prior, total), state.sites)


def _refined(
    problem: EPProblem,
    site: Site,
    posterior: Natural,
    own: Natural,
    rng_key: Array,
    example: Any,
    rate: Array,
) -> Natural:
    """The new site of one record, or the old site if its cavity is not a member of the family."""
    normal = problem.latents.is_normal
    cavity = divide(posterior, own)
    found = site.approximate(site.prepare(rng_key, cavity), example)
    if normal:
        found = centre(found, -cavity_of(cavity).mean)
    new = damp(own, found, rate)
    good = is_definite(cavity) if normal else problem.latents.family.is_valid(cavity)
    for leaf in jax.tree.leaves(new):
        good &= jnp.all(jnp.isfinite(leaf))
    return jax.tree.map(lambda after, before: jnp.where(good, after, before), new, own)
