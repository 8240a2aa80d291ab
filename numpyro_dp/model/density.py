r"""A NumPyro model as two functions: a public prior, and the likelihood of one record.

In unconstrained coordinates :math:`u`, with :math:`z = T(u)` on each site's support, they are

.. math::
    \log p(z) + \log |\det T'(u)|  \quad\text{and}\quad  \log p(x_i \mid z),

The prior is evaluated on a placeholder for the records, the likelihood on a data set of one record.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Float
from numpyro import handlers
from numpyro.distributions import biject_to

from numpyro_dp._compat import Messenger
from numpyro_dp.core import Arrays, NumPyroFn, PyTree, Site, Sites, Values
from numpyro_dp.model.impossible import indices_inside, value_inside
from numpyro_dp.model.locals import fill_locals, masked_away
from numpyro_dp.model.public import UnsupportedModelError
from numpyro_dp.model.records import Arguments, ModelStructure
from numpyro_dp.model.separation import log_density, one_record, traced
from numpyro_dp.model.units import sum_over_rows


class Model(NamedTuple):
    """A NumPyro model, split into a public and a private part.

    Attributes:
        fn: The NumPyro model, static keywords filled in.
        structure: What :func:`numpyro_dp.model.structure.read_model` found in it.

    Example:
        >>> import numpy as np, numpyro, numpyro.distributions as dist
        >>> from numpyro_dp import Privacy
        >>> def model(x):
        ...     mean = numpyro.sample("mean", dist.Normal(3, 1))
        ...     with numpyro.plate("records", x.shape[0]):
        ...         numpyro.sample("x", dist.Normal(mean, 1), obs=x)
        >>> given = Privacy().given_model(model, {})
        >>> own = Model(given.fn, given.structure((np.ones(100),), {}))
        >>> record = (jnp.asarray(4.0),)
        >>> jax.grad(lambda z: own.log_likelihood({"mean": z}, {}, record, ()))(3.0)
        Array(1., dtype=float32)
    """

    fn: NumPyroFn
    structure: ModelStructure

    def log_prior(self, latents: Values, params: Values, shared: Arrays) -> Float[Array, ""]:
        """Log density of the prior in unconstrained coordinates.

        Args:
            latents: Unconstrained value of each latent site.
            params: Constrained value of each ``numpyro.param`` of the model.
            shared: Public arrays among the model's arguments.

        Returns:
            A scalar: the log prior, its Jacobian, and factors that do not read records.

        Guarantee: reads no record. The model runs on :meth:`Layout.placeholder`.
        """
        layout = self.structure.layout
        trace, jacobian = self._trace(latents, params, layout.placeholder(shared), self.any_key())
        densities = (log_density(trace[name]) for name in self.structure.outside)
        return jacobian + sum(densities, start=jnp.zeros((), jacobian.dtype))

    def log_likelihood(
        self,
        latents: Values,
        params: Values,
        example: Arrays,
        shared: Arrays,
        rng_key: Array | None = None,
        local_values: Values | None = None,
    ) -> Float[Array, ""]:
        """Log likelihood of one record, including ``handlers.scale`` and masks.

        It is NaN for a record that is not :meth:`possible`, with a gradient of NaN or 0.

        If latent sites are in the data plate, this is the joint log density of the record and the
        given latent values, summed over the values of discrete sites.

        Args:
            latents: Unconstrained value of each latent site.
            params: Constrained value of each ``numpyro.param`` of the model.
            example: One row of each record array.
            shared: Public arrays among the model's arguments.
            rng_key: Seeds random draws inside the likelihood, such as dropout.
            local_values: Values of the continuous latent sites in the data plate.

        Guarantee: a function of one record and public values only. The plate's subsampling scale
        is divided out, so the value does not depend on the size of the data set or batch.
        """
        structure = self.structure
        if structure.layout.max_rows is not None:
            rows = self.unchecked.by_row
            keys = None if rng_key is None else jax.random.split(rng_key, example[-1].size)

            def of_row(row: Arrays, key: Array | None) -> Array:
                return rows.log_likelihood(latents, params, row, shared, key)

            found = sum_over_rows(of_row, example, keys)  # each row has a key of its own
            return if_possible(found, self.possible(latents, example, shared, params))
        arguments = structure.layout.example(example, shared)

        def total(choice: Mapping[str, ArrayLike]) -> Array:
            local = {"values": local_values, "choice": choice}
            trace, _ = self._trace(latents, params, arguments, rng_key, **local)
            # A plate of constant size N scales its sites by N here, because it sees one row.
            size = trace[structure.data_plate]["args"][0]
            found = sum(log_density(trace[name]) for name in structure.inside)
            found -= size * sum(masked_away(name, trace[name]["fn"]) for name in choice)
            return found / size if size != 1 else found

        summed = structure.summed
        found = jax.nn.logsumexp(jax.vmap(total)(summed)) if summed else total({})
        return if_possible(found, self.possible(latents, example, shared, params))

    def possible(
        self, latents: Values, example: Arrays, shared: Arrays, params: Values | None = None
    ) -> Array | bool:
        """Whether a record has outcomes inside their supports, and indices inside their tables.

        Only supports that no latent changes count, and indices that no latent changes.
        """
        structure, params = self.structure, params or {}
        if structure.layout.max_rows is not None:
            *rows, counted = example
            of_row = jax.vmap(
                lambda row: jnp.asarray(self.by_row.possible(latents, row, shared, params))
            )
            # A place that does not count must not make its unit drop out.
            return jnp.all(of_row(tuple(rows)) | (counted == 0))
        inside: Array | bool = True
        if structure.indexed:
            # Unchecked, or this check would call itself.
            alone, key = self.unchecked, jax.random.key(0)

            def scalar(point: PyTree, example: Arrays) -> Array:
                return alone.log_likelihood(point[0], point[1], example, shared, key)

            inside = indices_inside(scalar, (latents, params), example)
        if structure.bounded:
            arguments = structure.layout.example(example, shared)
            trace, _ = self._trace(latents, params, arguments, jax.random.key(0))
            for name in structure.bounded:
                inside &= value_inside(trace[name]["fn"], trace[name]["value"])
        return inside

    @property
    def unchecked(self) -> Model:
        """The same model, whose likelihood takes every record as possible."""
        return self._replace(structure=self.structure._replace(bounded=(), indexed=False))

    def at(self, params: Values) -> Model:
        """The model without parameters, which are fixed at these constrained values."""
        fn, structure = handlers.substitute(self.fn, data=params), self.structure
        return Model(fn, structure._replace(params=())) if params else self

    def first_params(self, shared: Arrays) -> Values:
        """The constrained values that the model gives its parameters, before any step.

        Raises:
            UnsupportedModelError: If a prior cannot be drawn from.
        """
        if not self.structure.params:
            return {}
        trace = self.draw_prior(shared, jax.random.key(0))
        values = {name: trace[name]["value"] for name in self.structure.params}
        return jax.tree.map(jnp.asarray, values)

    @property
    def by_row(self) -> Model:
        """The same model with a single row as a record."""
        layout = self.structure.layout._replace(max_rows=None)
        return self._replace(structure=self.structure._replace(layout=layout))

    def trace_prior(self, latents: Values, params: Values, shared: Arrays) -> Sites:
        """NumPyro's trace of the model at the latents, on a placeholder for the records."""
        arguments = self.structure.layout.placeholder(shared)
        return self._trace(latents, params, arguments, self.any_key())[0]

    def draw_prior(self, shared: Arrays, rng_key: Array) -> Sites:
        """NumPyro's trace of a draw from the prior, on a placeholder for the records.

        Raises:
            UnsupportedModelError: If a prior cannot be drawn from.
        """
        plate, arguments = self.structure.data_plate, self.structure.layout.placeholder(shared)
        try:
            return traced(self.fn, plate, arguments, rng_key=rng_key)
        except NotImplementedError as error:
            raise UnsupportedModelError(
                "A prior of this model has no sampler, as is the case for ImproperUniform. "
                "Without a proper prior, the posterior under a small budget may not exist. Use a "
                "proper prior."
            ) from error

    def any_key(self) -> Array | None:
        """A fixed key, if the likelihood makes random draws. The prior does not depend on them."""
        return jax.random.key(0) if self.structure.draws else None

    def _trace(
        self,
        latents: Values,
        params: Values,
        arguments: Arguments,
        rng_key: Array | None,
        **local: PyTree,
    ) -> tuple[Sites, Array]:
        plate = self.structure.data_plate
        filled = fill_locals(one_record(self.fn, plate), plate, **local)
        fn = handlers.substitute(filled, data=params)
        if rng_key is not None:
            fn = handlers.seed(fn, rng_key)
        constrain = constraining(fn, latents)
        trace = arguments.trace(constrain)
        return trace, constrain.log_det


def if_possible(density: Array, inside: Array | bool) -> Array:
    """The density, or NaN, by which a step drops the record.

    The gradient is NaN too, unless a density of -inf has made it 0.
    """
    return density if inside is True else density * jnp.where(inside, 1.0, jnp.nan)


class constraining(Messenger):  # noqa: N801 - a NumPyro handler, named like its peers
    """Substitutes unconstrained values and adds up the log Jacobian of their transforms."""

    def __init__(self, fn: NumPyroFn, latents: Values) -> None:
        self.latents = latents
        dtype = jnp.result_type(float, *latents.values()) if latents else jnp.result_type(float)
        self.log_det: Array = jnp.zeros((), dtype)
        super().__init__(fn)

    def process_message(self, msg: Site) -> None:
        """Sets the value of a latent site that has none."""
        if msg["type"] == "sample" and msg["name"] in self.latents and msg["value"] is None:
            unconstrained = self.latents[msg["name"]]
            # The support at these values, because it may depend on other latents.
            transform = biject_to(msg["fn"].support)
            msg["value"] = transform(unconstrained)
            self.log_det += jnp.sum(transform.log_abs_det_jacobian(unconstrained, msg["value"]))
