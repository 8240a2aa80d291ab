"""The view of a model and its guide that gradient estimators use."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from numpyro.distributions import constraints
from numpyro.infer import autoguide

from numpyro_dp._compat import latent_sites, same_distribution, unpack_latent
from numpyro_dp.core import Args, Arrays, Kwargs, PyTree, Values
from numpyro_dp.model.density import Model
from numpyro_dp.model.guide import Guide
from numpyro_dp.model.records import Records, Rows

_LOWER_CHOLESKY = (
    constraints.scaled_unit_lower_cholesky,
    constraints.lower_cholesky,
    constraints.softplus_lower_cholesky,
)


_KINDS = (
    autoguide.AutoNormal,
    autoguide.AutoDelta,
    autoguide.AutoDiagonalNormal,
    autoguide.AutoLowRankMultivariateNormal,
    autoguide.AutoMultivariateNormal,
)


def likelihood_key(rng_key: Array) -> Array:
    """Key for draws inside the likelihood in a step. Differs from all keys of the guide's draws."""
    return jax.random.fold_in(rng_key, 2**31)


class VariationalProblem(NamedTuple):
    """A model and guide as functions of the optimiser's unconstrained parameters.

    Attributes:
        model: The model.
        guide: The guide.
        constrain: Unconstrained parameters -> constrained parameters.
        shared: Public arrays among the model's arguments.
        num_particles: Draws per step, K.

    Example:
        >>> def first_draw(problem: VariationalProblem):
        ...     key = jax.random.key(0)
        ...     return lambda params: problem.draw(params, key)[0]  # latents by site
    """

    model: Model
    guide: Guide
    constrain: Callable[[Values], Values]
    shared: Arrays
    num_particles: int

    def at(self, shared: Arrays) -> VariationalProblem:
        """The same with other public arrays."""
        return self._replace(shared=shared)

    def draw(self, params: Values, rng_key: Array) -> tuple[dict[str, Array], Array]:
        """Draws the latents. If K > 1, they have a leading axis K.

        Returns:
            Latents by site and the mean of the entropy estimates.
        """
        return self.draw_at(self.constrain(params), rng_key)

    def draw_at(self, values: Values, rng_key: Array) -> tuple[dict[str, Array], Array]:
        """Draws like :meth:`draw`, from the *constrained* parameters."""
        if self.num_particles == 1:
            return self._draw_one(values, rng_key)
        keys = jax.random.split(rng_key, self.num_particles)
        latents, entropies = jax.vmap(self._draw_one, in_axes=(None, 0))(values, keys)
        return latents, jnp.mean(entropies)

    def log_density(self, latents: Values, params: Values) -> Array:
        """Mean over draws of the guide's log density in unconstrained coordinates."""

        def one(values: dict[str, Array]) -> Array:
            return self.guide.log_density(self.constrain(params), values, self.shared)

        return self._mean(one, latents)

    def log_prior(self, latents: Values, params: Values) -> Array:
        """Mean over draws of the log prior in unconstrained coordinates."""

        def one(values: dict[str, Array]) -> Array:
            return self.model.log_prior(values, self.constrain(params), self.shared)

        return self._mean(one, latents)

    def log_likelihood(
        self, latents: Values, params: Values, example: PyTree, rng_key: Array
    ) -> Array:
        """Mean over draws of the log likelihood of one record.

        With local latents it is the record's part of the evidence lower bound, see
        :mod:`numpyro_dp.model.locals`. If records are numbered, the last entry of ``example`` seeds
        the record's own random draws. It is the row's index, or a secret number in a private step.
        """
        constrained = self.constrain(params)
        if self.numbered:
            *arrays, number = example
            rng_key = jax.random.fold_in(jax.random.fold_in(rng_key, 0), number)
            example = tuple(arrays)
        local = self.guide.local_params is not None
        of_record = self.guide.local_bound if local else self.model.log_likelihood

        def one(values: dict[str, Array], key: Array = rng_key) -> Array:
            return of_record(values, constrained, example, self.shared, key)

        if local and self.num_particles > 1:  # each draw of the record's latents has its own key
            return self._mean(one, latents, jax.random.split(rng_key, self.num_particles))
        return self._mean(one, latents)

    @property
    def records(self) -> Records:
        """How arguments split into records and public values."""
        return self.model.structure.records

    @property
    def num_examples(self) -> int:
        """Number of records."""
        return self.model.structure.layout.num_examples

    def rows(self, args: Args, kwargs: Kwargs) -> Rows:
        """Splits arguments into records and public arrays."""
        layout = self.model.structure.layout
        arrays, shared = layout.rows(args, kwargs)[:2]
        if self.numbered:
            arrays = (*arrays, jnp.arange(layout.num_examples, dtype=jnp.uint32))
        return Rows(arrays, shared)

    def blank_example(self) -> Arrays:
        """Returns zeros in place of a record."""
        blank = self.model.structure.layout.blank()
        return (*blank, jnp.zeros((), jnp.uint32)) if self.numbered else blank

    @property
    def numbered(self) -> bool:
        """Whether examples end with a number that seeds the record's own random draws.

        They do if the guide draws local latents or the model asks for keys (for dropout, say).
        """
        return self.guide.local_params is not None or self.model.structure.draws

    @property
    def record_params(self) -> tuple[str, ...]:
        """Names of the parameters whose gradients read records: the model's and the encoder's."""
        own = self.model.structure.params
        return own + tuple(sorted((self.guide.local_params or frozenset()) - set(own)))

    @property
    def guide_params(self) -> frozenset[str]:
        """Names of the parameters that the draw of the global latents reads."""
        return self.guide.params

    def coordinate_sums(self) -> dict[str, Callable[[Array], PyTree]] | None:
        """Functions that sum each guide parameter over the entries for one latent coordinate.

        For Gaussian guides, each entry of the (unconstrained) parameters moves only one coordinate
        of the draw. For each parameter, the returned function takes an array of its shape and
        sums the entries of each coordinate. The result is a tree of latents.

        Returns:
            A dict of these functions, or ``None`` if that structure is not known to hold.
        """
        if self.guide.auto is None or self.num_particles > 1:
            return None
        return coordinate_sums(self.guide.auto)

    def mean(self, params: Values) -> dict[str, Array] | None:
        """Returns the mean of a draw by site, or ``None`` if the guide may not be normal."""
        auto: Any = self.guide.auto
        kind, values = guide_kind(auto), self.constrain(params)
        if kind is None or kind is autoguide.AutoDelta:  # whose location is constrained
            return None
        if kind is autoguide.AutoNormal:
            return {site: values[f"{site}_{auto.prefix}_loc"] for site in latent_sites(auto)}
        return dict(unpack_latent(auto, values[f"{auto.prefix}_loc"]))

    def _mean(self, one: Callable[..., Array], *by_draw: PyTree) -> Array:
        """Mean of a function of one draw over the draws of a step."""
        return one(*by_draw) if self.num_particles == 1 else jnp.mean(jax.vmap(one)(*by_draw))

    def _draw_one(self, values: Values, rng_key: Array) -> tuple[dict[str, Array], Array]:
        guide_key = jax.random.split(rng_key)[1]  # numpyro splits into model and guide seeds
        return self.guide.draw(values, guide_key, self.shared)


def guide_kind(auto: object) -> type | None:
    """Returns the NumPyro class that has the same distribution as an automatic guide.

    A subclass that changes only constraints or initial values has its parent's distribution:

        class ExpNormal(AutoDiagonalNormal):
            scale_constraint = constraints.positive  # T = exp
    """
    for kind in _KINDS:
        if isinstance(auto, kind):
            return kind if same_distribution(auto, kind) else None
    return None


def coordinate_sums(auto: Any) -> dict[str, Callable[..., PyTree]] | None:
    """:meth:`VariationalProblem.coordinate_sums` of an automatic guide."""
    kind = guide_kind(auto)
    if kind in (autoguide.AutoNormal, autoguide.AutoDelta):
        suffixes = ("loc",) if kind is autoguide.AutoDelta else ("loc", "scale")
        names = ((site, suffix) for site in latent_sites(auto) for suffix in suffixes)
        return {f"{s}_{auto.prefix}_{suffix}": lambda v, s=s: {s: v} for s, suffix in names}
    prefix, unpack = getattr(auto, "prefix", ""), functools.partial(unpack_latent, auto)
    if kind is autoguide.AutoDiagonalNormal:
        return {f"{prefix}_{name}": unpack for name in ("loc", "scale")}
    if kind is autoguide.AutoLowRankMultivariateNormal:
        whole = {f"{prefix}_{name}": unpack for name in ("loc", "scale")}
        return whole | {f"{prefix}_cov_factor": lambda v: unpack(v.sum(-1))}
    if kind is autoguide.AutoMultivariateNormal and auto.scale_tril_constraint in _LOWER_CHOLESKY:
        dim = auto.latent_dim
        rows = jnp.concatenate([jnp.tril_indices(dim, -1)[0], jnp.arange(dim)])
        by_row = functools.partial(jax.ops.segment_sum, segment_ids=rows, num_segments=dim)
        return {f"{prefix}_loc": unpack, f"{prefix}_scale_tril": lambda v: unpack(by_row(v))}
    return None
