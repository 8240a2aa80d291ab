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

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from numpyro_dp.core import PyTree, Values
from numpyro_dp.extend import Call, check_int, check_real, check_rng_key
from numpyro_dp.methods.ep.dpsep import SEP
from numpyro_dp.methods.ep.families import Natural, divide, multiply, normal
from numpyro_dp.methods.ep.problem import EPProblem, PosteriorGuide, Site
from numpyro_dp.methods.normal import cavity_of, centre
from numpyro_dp.methods.shared import SensitiveEPResult

__all__ = ["EP"]


class EP:
    """Expectation propagation with one site per record: the non-private reference.

    Args:
        model: A NumPyro model with a plate over records. See :class:`~numpyro_dp.DPSEP`.
        family: Family of the posterior. See :class:`~numpyro_dp.DPSEP`.
        damping: Fraction of a site's change that is taken, in (0, 1].
        sequential: Updates the posterior after each site, as Minka does. By default all sites move
            from the same posterior.
        **others: ``site``, ``data_plate``, ``public`` and static keywords, as for
            :class:`~numpyro_dp.DPSEP`.

    Example:
        >>> import jax, numpyro, numpyro.distributions as dist
        >>> from numpyro_dp import EP
        >>> def model(x):
        ...     mean = numpyro.sample("mean", dist.Normal(0, 10))
        ...     with numpyro.plate("records", x.shape[0]):
        ...         numpyro.sample("x", dist.StudentT(4.0, mean, 1), obs=x)
        >>> x = 3 + jax.random.t(jax.random.key(1), 4.0, (99,))
        >>> result = EP(model).run(jax.random.key(0), 20, x)
        >>> result
        SensitiveEPResult(params of ['auto_linear', 'auto_precision']: not private)
        >>> mean = result.params["auto_linear"][0] / result.params["auto_precision"][0, 0]
        >>> bool(abs(mean - 3) < 0.5)
        True

    Guarantee:
        None: the result is not private.

    Reference:
        Minka (2001), Expectation propagation for approximate Bayesian inference, UAI.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        family: Any = normal,
        *,
        damping: float = 0.5,
        sequential: bool = False,
        **others: Any,
    ) -> None:
        self.damping: float = check_real("damping", damping, low=0, low_open=True, high=1)
        self.sequential = sequential
        self._reader = SEP(model, family, **others)
        self.guide: PosteriorGuide = self._reader.guide

    def run(
        self,
        rng_key: Array,
        num_sweeps: int,
        *args: PyTree,
        init_params: Values | None = None,
        **kwargs: PyTree,
    ) -> SensitiveEPResult:
        """Sweeps over all records ``num_sweeps`` times.

        Args:
            rng_key: Key of draws and of the order of records.
            num_sweeps: Number of sweeps.
            *args: Arguments of the model, with the whole data set.
            init_params: Initial natural parameters. By default those of the prior.
            **kwargs: Keyword arguments of the model.
        """
        check_rng_key(rng_key)
        check_int("num_sweeps", num_sweeps, low=1)
        structure = self._reader.structure(args, kwargs)
        problem = self._reader.problem_of(structure, rng_key, Call(args, kwargs, init_params))
        rows = problem.rows(args, kwargs)
        sweep = _sequential_sweep if self.sequential else _batched_sweep

        @jax.jit
        def sweeps(state: SensitiveSites, rows: PyTree) -> tuple[SensitiveSites, dict[str, Array]]:
            own = problem.at(rows.shared)
            site = problem.site.build(own)

            def one(state: SensitiveSites, key: Array) -> tuple[SensitiveSites, dict[str, Array]]:
                state = sweep(own, site, state, rows.arrays, key, self.damping)
                return state, problem.constrain(state.posterior)

            return jax.lax.scan(one, state, jax.random.split(rng_key, num_sweeps))

        state, trace = sweeps(_start_sites(problem, problem.start(init_params)), rows)
        return SensitiveEPResult(problem.constrain(state.posterior), trace)


class SensitiveSites(NamedTuple):
    """The posterior and the site of each record. Sensitive: never publish it.

    Attributes:
        posterior: Natural parameters of q.
        sites: Natural parameters of each record's site, leading axis ``records``.
    """

    posterior: Natural
    sites: Natural


def _start_sites(problem: EPProblem, start: Natural) -> SensitiveSites:
    """Returns equal sites whose product with the prior is ``start``."""
    number = problem.num_examples
    # The prior is not a site. What the start has beyond it is shared by all records.
    extra = divide(start, problem.prior)
    sites = jax.tree.map(lambda x: jnp.broadcast_to(x / number, (number, *x.shape)), extra)
    return SensitiveSites(start, sites)


def _batched_sweep(
    problem: EPProblem, site: Site, state: SensitiveSites, records: Any, rng_key: Array, rate: float
) -> SensitiveSites:
    """Moves the sites of all records, each starting from the same posterior."""
    keys = jax.random.split(rng_key, problem.num_examples)
    refine = jax.vmap(lambda own, key, example: _refined(
        problem, site, state.posterior, own, key, example, rate
    ))  # fmt: skip
    sites = refine(state.sites, keys, records)
    total = jax.tree.map(lambda leaf: leaf.sum(0), sites)
    return SensitiveSites(multiply(problem.prior, total), sites)


def _sequential_sweep(
    problem: EPProblem, site: Site, state: SensitiveSites, records: Any, rng_key: Array, rate: float
) -> SensitiveSites:
    """Moves the sites one after the other, in a random order."""
    order_key, rng_key = jax.random.split(rng_key)
    order = jax.random.permutation(order_key, problem.num_examples)

    def move(state: SensitiveSites, number: Array) -> tuple[SensitiveSites, None]:
        own = jax.tree.map(lambda leaf: leaf[number], state.sites)
        example = jax.tree.map(lambda leaf: leaf[number], records)
        key = jax.random.fold_in(rng_key, number)
        new = _refined(problem, site, state.posterior, own, key, example, rate)
        # Only the change, so that a step does not add up all sites.
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
    example: PyTree,
    rate: float,
) -> Natural:
    """The new site of one record, or the old site if its cavity is not a member of the family."""
    cavity = divide(posterior, own)
    found = site.approximate(site.prepare(rng_key, cavity), example)
    if problem.latents.is_normal:
        # A normal site is centred at the mean of its cavity. Products need one common origin.
        found = centre(found, -cavity_of(cavity).mean)
    new = jax.tree.map(lambda old, x: (1 - rate) * old + rate * x, own, found)
    good = problem.latents.family.is_valid(cavity)
    for leaf in jax.tree.leaves(new):
        good &= jnp.all(jnp.isfinite(leaf))
    return jax.tree.map(lambda after, before: jnp.where(good, after, before), new, own)
