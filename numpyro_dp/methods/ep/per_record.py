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

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from numpyro_dp.core import Arrays, PyTree, Values
from numpyro_dp.extend import Call, check_int, check_real, check_rng_key
from numpyro_dp.methods.ep.dpsep import SEP
from numpyro_dp.methods.ep.families import Family, Natural, divide, multiply, normal
from numpyro_dp.methods.ep.problem import EPProblem, PosteriorGuide
from numpyro_dp.methods.normal import cavity_of, centre
from numpyro_dp.methods.shared import SensitiveEPResult, SensitiveSites, equal_sites

# Posterior, site, key and row of a record -> its new site.
_Refine = Callable[[Natural, Natural, Array, PyTree], Natural]


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
        model: Callable[..., object],
        family: Callable[[int], Family] | Mapping[str, Family] = normal,
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
        def sweeps(state: SensitiveSites, rows: PyTree) -> tuple[SensitiveSites, Natural]:
            own = problem.at(rows.shared)
            refine = _refiner(own, self.damping)

            def one(state: SensitiveSites, key: Array) -> tuple[SensitiveSites, Natural]:
                state = sweep(own, refine, state, rows.arrays, key)
                return state, problem.constrain(state.params)

            return lax.scan(one, state, jax.random.split(rng_key, num_sweeps))

        start = problem.start(init_params)
        # The prior is not a site. What the start has beyond it is shared by all records.
        begin = equal_sites(start, divide(start, problem.prior), problem.num_examples)
        state, trace = sweeps(begin, rows)
        return SensitiveEPResult(problem.constrain(state.params), trace)


def _batched_sweep(
    problem: EPProblem, refine: _Refine, state: SensitiveSites, records: Arrays, rng_key: Array
) -> SensitiveSites:
    """Moves the sites of all records, each starting from the same posterior."""
    keys = jax.random.split(rng_key, problem.num_examples)
    sites = jax.vmap(refine, (None, 0, 0, 0))(state.params, state.sites, keys, records)
    return _joined(problem, sites)


def _sequential_sweep(
    problem: EPProblem, refine: _Refine, state: SensitiveSites, records: Arrays, rng_key: Array
) -> SensitiveSites:
    """Moves the sites one after the other, in a random order."""
    order_key, rng_key = jax.random.split(rng_key)
    order = jax.random.permutation(order_key, problem.num_examples)

    def move(state: SensitiveSites, number: Array) -> tuple[SensitiveSites, None]:
        own, example = jax.tree.map(lambda leaf: leaf[number], (state.sites, records))
        new = refine(state.params, own, jax.random.fold_in(rng_key, number), example)
        # Only the change, so that a step does not add up all sites.
        posterior = multiply(state.params, divide(new, own))
        sites = jax.tree.map(lambda leaf, value: leaf.at[number].set(value), state.sites, new)
        return SensitiveSites(posterior, sites), None

    state, _ = lax.scan(move, state, order)
    return _joined(problem, state.sites)  # drops accumulated rounding errors


def _joined(problem: EPProblem, sites: Natural) -> SensitiveSites:
    total = jax.tree.map(lambda leaf: leaf.sum(0), sites)
    return SensitiveSites(multiply(problem.prior, total), sites)


def _refiner(problem: EPProblem, rate: float) -> _Refine:
    """Returns the new site of a record, or the old one if its cavity is not in the family."""
    site = problem.site.build(problem)

    def refine(posterior: Natural, own: Natural, rng_key: Array, example: PyTree) -> Natural:
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

    return refine
