r"""A NumPyro model in the form of message passing: a prior in a family, and one factor per record.

.. math:: q(z) \propto p_0(z) \prod_i f_i(z), \qquad f_i(z) \approx p(x_i \mid z).

A normal family covers all latents, joined to one vector in unconstrained coordinates. Every other
family belongs to one site and covers the constrained values of that site.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array
from jax.flatten_util import ravel_pytree
from jax.typing import ArrayLike
from numpyro.distributions import biject_to

from numpyro_dp.core import Args, Kwargs, NumPyroFn, PyTree, Values
from numpyro_dp.extend import Model, ModelStructure, Records, UnsupportedModelError
from numpyro_dp.methods.ep.families import Family, Natural, product
from numpyro_dp.methods.shared import checked_start

_TOLERANCE = 1e-3
_PREFIX = "auto_"


class Latents(NamedTuple):
    """The variable z, and its maps to the model's latent sites.

    Attributes:
        family: Family of z.
        unconstrain: z -> unconstrained value of each latent site.
        constrain: z -> value of each latent site.
        dim: Length of z if the family is normal over one vector, else 0.
    """

    family: Family
    unconstrain: Callable[[PyTree], dict[str, Array]]
    constrain: Callable[[PyTree], dict[str, Array]]
    dim: int = 0

    @property
    def is_normal(self) -> bool:
        """Whether the family is normal over one vector. If so, sites are centred."""
        return self.dim > 0


class EPProblem(NamedTuple):
    """A model in the form that sites and the estimator need.

    Attributes:
        model: The model.
        latents: Family and coordinates.
        prior: Natural parameters of the prior.
        shared: Public arrays among the model's arguments.
        prior_at: Public arrays -> natural parameters of the prior. May be traced.
        site: The kind of site.
        numbered: False: no record has its own random key.
    """

    model: Model
    latents: Latents
    prior: Natural
    shared: tuple[Array, ...]
    prior_at: Callable[[tuple[Array, ...]], Natural]
    site: Any = None
    numbered: bool = False

    @property
    def records(self) -> Records:
        """How the arguments divide into records and public values."""
        return self.model.structure.records

    @property
    def num_examples(self) -> int:
        """Number of records."""
        return self.model.structure.layout.num_examples

    def at(self, shared: tuple[Array, ...]) -> EPProblem:
        """The same problem with other public arrays."""
        # The prior may read public arrays. Without any, it is the same as before.
        prior = self.prior_at(shared) if shared else self.prior
        return self._replace(shared=shared, prior=prior)

    def log_likelihood(self, z: PyTree, example: tuple[Array, ...]) -> Array:
        """Log likelihood of one record."""
        return self.model.log_likelihood(self.latents.unconstrain(z), {}, example, self.shared)

    def of_arguments(self, fn: Callable[..., PyTree], example: tuple[Array, ...]) -> PyTree:
        """Calls a function of the model's arguments for a data set of one record."""
        given = self.model.structure.layout.example(example, self.shared)
        return fn(*given.args, **given.kwargs)

    def check_normal(self, site: str, remedy: str) -> None:
        """Raises UnsupportedModelError unless the family is normal."""
        if not self.latents.is_normal:
            name = self.latents.family.name
            raise UnsupportedModelError(f"{site} needs a normal family, got {name}. {remedy}")

    @property
    def by_row(self) -> EPProblem:
        """The same problem with a single row as a record, which is what sites read."""
        return self._replace(model=self.model.by_row)

    @staticmethod
    def constrain(params: Natural) -> Natural:
        """Natural parameters under their published names.

        These have a prefix, like the parameters of automatic guides, because a site of the model
        may be called ``precision``.
        """
        return {_PREFIX + name: value for name, value in params.items()}

    def rows(self, args: Args, kwargs: Kwargs) -> Any:
        """Splits arguments into records and public arrays."""
        return self.model.structure.layout.rows(args, kwargs)

    def blank_example(self) -> tuple[Array, ...]:
        """Returns a record of zeros."""
        return self.model.structure.layout.blank()

    def start(self, init_params: Values | None) -> Natural:
        """Returns the initial natural parameters: ``init_params``, or by default the prior's.

        Raises:
            ValueError: If names or shapes do not match, or values are outside the domain.
        """
        if init_params is None:
            return self.prior
        found = checked_start(init_params, self.constrain(self.prior))
        params = {n: jnp.asarray(found[_PREFIX + n], v.dtype) for n, v in self.prior.items()}
        if not bool(self.latents.family.is_valid(params)):
            raise ValueError(
                f"init_params are not inside the domain of {self.latents.family.name}. They must "
                "be finite, with a positive definite precision or positive concentrations and "
                "rates."
            )
        return params

    def invented(self) -> list[tuple[Array, ...]]:
        """Returns invented records for checks: real values of several sizes, integers 0 to 2."""
        normal, ones = self.model.structure.layout.invented()
        found = []
        for number, scale in enumerate((1.0, 0.01, 100.0)):
            for whole in (1, number, (number + 2) % 3):
                found.append(tuple(
                    leaf[0] * scale if jnp.issubdtype(leaf.dtype, jnp.floating)
                    else (leaf[0] * whole).astype(leaf.dtype) for leaf in normal
                ))  # fmt: skip
        return [tuple(leaf[0] for leaf in ones), *found]

    def mixes_latents(self) -> bool:
        """Whether an invented record has a second derivative in two latents at once."""
        # Number 0 is a record of ones. Columns of this one differ.
        row, likelihood = self.invented()[1], self.by_row.log_likelihood
        second = jax.jit(jax.hessian(lambda z: likelihood(z, row)))
        found = np.asarray(second(jnp.full(self.latents.dim, 0.5)))
        return bool(np.any(found != np.diag(np.diag(found))))  # also if it is not finite


class Site(NamedTuple):
    """Approximates the likelihood of one record by a member of the family.

    Attributes:
        prepare: ``(rng_key, cavity) -> public``, from the cavity's natural parameters. Reads no
            record.
        approximate: ``(public, row) -> site``, the natural parameters of the projected tilted
            distribution divided by the cavity. For normal families they are centred at the
            cavity's mean. Reads one row.
    """

    prepare: Callable[[Array, Natural], PyTree]
    approximate: Callable[[PyTree, tuple[Array, ...]], Natural]


class SiteBuilder(NamedTuple):
    """A kind of site, before the model is known.

    Attributes:
        build: Problem -> site. May be traced.
        check: Problem -> ``None``. Raises ``UnsupportedModelError`` if the kind does not fit the
            model. Reads no record.
        reads_likelihood: Whether a record enters only through ``problem.log_likelihood``. Then
            there are sites for its other outcomes too.
    """

    build: Callable[[EPProblem], Site]
    check: Callable[[EPProblem], None]
    reads_likelihood: bool = False


class PosteriorGuide:
    """Draws the model's latent sites from the family at given natural parameters.

    After a run, ``Predictive(model, guide=guide, params=result.params, ...)`` works as with an
    automatic guide.

    Attributes:
        prototype_trace: The problem of the last run, ``None`` before the first run.
    """

    def __init__(self, problem: EPProblem | None = None) -> None:
        self.prototype_trace = problem

    def __call__(self, *args: PyTree, **kwargs: PyTree) -> dict[str, ArrayLike]:
        """Draws the latent sites. Ignores the arguments."""
        problem = self.prototype_trace
        if problem is None:
            raise ValueError(
                "The guide does not know the latent sites before the first run. Call run first."
            )
        natural = {}
        for name, value in problem.prior.items():
            natural[name] = numpyro.param(_PREFIX + name, value)
            if jnp.shape(natural[name]) != jnp.shape(value):
                raise ValueError(
                    f"Expected {_PREFIX + name} of shape {jnp.shape(value)}, as in the last run of "
                    f"the driver, got {jnp.shape(natural[name])}. Use one driver per data set."
                )
        found = problem.latents.family.to_dist(natural)
        if not problem.latents.is_normal:
            return {name: numpyro.sample(name, each) for name, each in found.items()}
        joint = numpyro.sample("_joint_latent", found, infer={"is_auxiliary": True})
        return {
            name: numpyro.sample(name, dist.Delta(value, event_dim=value.ndim))
            for name, value in problem.latents.constrain(joint).items()
        }


def check_conjugate(structure: ModelStructure) -> ModelStructure:
    """Returns the structure of a model, if message passing supports the model.

    Raises:
        UnsupportedModelError: If the model has parameters, latent sites in the data plate, or draws
            random keys.
    """
    if structure.params or structure.local_latents:
        raise UnsupportedModelError(
            "Message passing needs a model with no parameters of its own and no latents per "
            f"record, but this model has {sorted(structure.params + structure.local_latents)}. "
            "Give parameters a prior, integrate out latents of records, or use DPSVI."
        )
    if structure.draws:
        raise UnsupportedModelError(
            "The model draws random keys (for dropout, for example), but message passing needs a "
            "likelihood that depends only on record and latents. Remove the draw, or use DPSVI, "
            "which gives each record its own key in each step."
        )
    return structure


def make_problem(
    fn: NumPyroFn,
    structure: ModelStructure,
    family: Callable[[int], Family] | Mapping[str, Family],
    shared: tuple[Array, ...],
    rng_key: Array,
) -> EPProblem:
    """Returns the problem of a model and a family.

    Args:
        fn: The model, with static keywords filled in.
        structure: The structure of the model.
        family: A constructor of a normal family, which takes the number of latent coordinates, or
            a dict of families by latent site.
        shared: Public arrays among the model's arguments.
        rng_key: Key of a draw from the prior, which gives the shapes of the latents.

    Raises:
        UnsupportedModelError: If the prior is not in the family.
    """
    model = Model(fn, structure)
    draw = _draw(model, shared, rng_key)
    transforms = {name: biject_to(site["fn"].support) for name, site in draw.items()}

    def unconstrain(z: dict[str, Array]) -> dict[str, Array]:
        return {name: transforms[name].inv(value) for name, value in z.items()}

    if isinstance(family, Mapping):
        # A second draw shows whether a prior depends on other latents.
        again = _draw(model, shared, jax.random.fold_in(rng_key, 1))
        _check_product_prior(model, family, draw, again)

        def prior_at(shared: tuple[Array, ...]) -> Natural:
            sites = _draw(model, shared, rng_key)
            return latents.family.from_dist({name: site["fn"] for name, site in sites.items()})

        latents = Latents(product(**family), unconstrain, lambda z: z)
    else:
        flat, unravel = ravel_pytree(unconstrain({n: s["value"] for n, s in draw.items()}))

        def constrain(z: Array) -> dict[str, Array]:
            return {name: transforms[name](value) for name, value in unravel(z).items()}

        latents = Latents(family(flat.size), unravel, constrain, flat.size)
        prior_at = functools.partial(_normal_prior, model, latents)
        _check_normal_prior(model, latents, shared)
    # The prior goes into what is released, so it must not hold records.
    structure.public.check("prior", prior_at, shared)
    prior = jax.jit(prior_at)(shared)
    structure.public.trust(prior.values())  # computed from arrays that were checked above
    return EPProblem(model, latents, prior, shared, prior_at)


def _draw(model: Model, shared: tuple[Array, ...], rng_key: Array) -> dict[str, Any]:
    """The latent sites of a draw from the prior, on a placeholder for the records."""
    trace = model.draw_prior(shared, rng_key)
    return {name: trace[name] for name in model.structure.latents}


def _normal_prior(model: Model, latents: Latents, shared: tuple[Array, ...]) -> Natural:
    """Natural parameters of a normal prior, from the derivatives of its log density at 0."""

    def log_prior(z: Array) -> Array:
        return model.log_prior(latents.unconstrain(z), {}, shared)

    # For a quadratic log density, the slope at 0 is the linear natural parameter.
    zero = jnp.zeros(latents.dim)
    precision = -jax.hessian(log_prior)(zero)
    whole = latents.family.unit["precision"].ndim == 2
    precision = precision if whole else jnp.diag(precision)
    return {"linear": jax.grad(log_prior)(zero), "precision": precision}


def _check_normal_prior(model: Model, latents: Latents, shared: tuple[Array, ...]) -> None:
    """Raises unless the prior is normal, with the structure of the family."""

    @jax.jit
    def derivatives(shared: tuple[Array, ...]) -> tuple[Array, Array, Array]:
        slope = jax.grad(lambda z: model.log_prior(latents.unconstrain(z), {}, shared))
        precision = -jax.jacfwd(slope)(jnp.zeros(latents.dim))
        sd = 1 / jnp.sqrt(jnp.maximum(jnp.diag(precision), 1e-30))
        points = sd * jnp.array([[-3.0], [0.5], [2.0]]) * jnp.ones(latents.dim)
        expected = slope(jnp.zeros(latents.dim)) - points @ precision
        # In units of the prior's own standard deviations.
        return sd[:, None] * precision * sd, sd * jax.vmap(slope)(points), sd * expected

    scaled, found, expected = (np.asarray(x, np.float64) for x in derivatives(shared))
    normal = np.allclose(found, expected, rtol=_TOLERANCE, atol=_TOLERANCE)
    if not (normal and np.isfinite(scaled).all() and np.linalg.eigvalsh(scaled).min() > 1e-6):
        raise UnsupportedModelError(
            f"The joint prior of {list(model.structure.latents)} is not normal in unconstrained "
            "coordinates: its log density is not quadratic, or flat. Use normal or log-normal "
            "priors with fixed scales, give families by site, or use DPSVI."
        )
    correlated = np.abs(scaled - np.diag(np.diag(scaled))).max() > _TOLERANCE
    if correlated and latents.family.unit["precision"].ndim < 2:
        raise UnsupportedModelError(
            f"The prior has correlations, and {latents.family.name} has none. Use family=normal."
        )


def _check_product_prior(
    model: Model, families: Mapping[str, Family], draw: dict[str, Any], other: dict[str, Any]
) -> None:
    """Raises unless the priors are members of the families for all values of other latents."""
    if set(families) != set(draw):
        raise UnsupportedModelError(
            f"Expected a family for each of the latent sites {sorted(draw)}, got "
            f"{sorted(families)}."
        )
    if model.structure.prior_factors:
        raise UnsupportedModelError(
            f"The factors or observed sites {list(model.structure.prior_factors)} are outside the "
            "plate over records, but families by site allow only priors there. Remove them."
        )
    for name in draw:
        try:
            found, again = (families[name].from_dist(d[name]["fn"]) for d in (draw, other))
        except (TypeError, ValueError) as error:
            raise UnsupportedModelError(
                f"The prior of latent site {name!r} is not in its family. {error}"
            ) from error
        if not all(np.allclose(found[k], again[k], rtol=1e-6) for k in again):
            raise UnsupportedModelError(
                f"The prior of latent site {name!r} depends on other latent sites, which families "
                "by site do not allow. Use fixed parameters in the prior, or use DPSVI."
            )
