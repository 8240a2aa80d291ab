r"""The outcomes that a record could have had under a model, simulated or listed.

The observed sites in the data plate are the outcome y of a record, and its other values are x. A
model that can be simulated gives the scores of other outcomes at the same x. Private scores are
centred by the mean of these scores.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.flatten_util import ravel_pytree
from numpyro import handlers
from numpyro.distributions import biject_to

from numpyro_dp._compat import Messenger
from numpyro_dp.core import Arrays, NumPyroFn, PyTree, Site, Sites, Values
from numpyro_dp.model import censoring
from numpyro_dp.model.density import Model, constraining
from numpyro_dp.model.dependence import depends_on_inputs, entries_read
from numpyro_dp.model.impossible import masks_around, unwrapped
from numpyro_dp.model.public import UnsupportedModelError
from numpyro_dp.model.separation import altered, is_factor, one_record
from numpyro_dp.model.simulated import drawn
from numpyro_dp.model.units import sum_over_rows

_MOST_VALUES = 16  # With more values, simulating outcomes costs less than listing them.


class Listed(NamedTuple):
    """All outcomes that a record could have had.

    Attributes:
        observed: Marks the record's own outcome, shape (K,). All false if it is outside the
            support.
        values: The outcomes, shape (K,).
        probabilities: Probability of each outcome, shape (K, R).
    """

    observed: Array
    values: Array
    probabilities: Array


class Outcomes(NamedTuple):
    """A model's distribution of the outcome of one record.

    Attributes:
        model: The model.
        shared: Public arrays among its arguments.
        seen: Names of the latent sites that the likelihood of a record depends on.
        shapes: Unconstrained shapes of the latent sites.
        number: Number of possible outcomes, or 0 if they cannot be listed.
        scalar: Whether the outcome is a scalar.
        weighted: Whether records have weights (``handlers.scale``).
        censored: Whether the outcome is censored. Its log likelihood is then the log hazard of an
            event, or the log reversed hazard for left censoring.
    """

    model: Model
    shared: Arrays
    seen: tuple[str, ...]
    shapes: Mapping[str, tuple[int, ...]]
    number: int
    scalar: bool
    weighted: bool
    censored: bool = False

    def at(self, params: Values) -> Outcomes:
        """The same with the model's parameters fixed at these constrained values."""
        return self._replace(model=self.model.at(params))

    @property
    def size(self) -> int:
        """Number of latent entries that the likelihood depends on."""
        return sum(int(np.prod(self.shapes[name])) for name in self.seen)

    def latents(self, flat: Array) -> dict[str, Array]:
        """Latents by site from a vector of those in ``seen``. The other latents are zero."""
        zeros = {name: jnp.zeros(self.shapes[name], flat.dtype) for name in self.seen}
        found = ravel_pytree(zeros)[1](flat)
        return {n: found.get(n, jnp.zeros(s, flat.dtype)) for n, s in self.shapes.items()}

    def flat(self, latents: Values) -> Array:
        """The vector of the latents in ``seen``."""
        return ravel_pytree({name: latents[name] for name in self.seen})[0]

    def log_likelihood(
        self, flat: Array, example: Arrays, outcome: Values | None, *, weighted: bool = True
    ) -> Array:
        """Log likelihood of one record with the given outcome. See also :meth:`possible`.

        Args:
            flat: Latents, shape (size,).
            example: One row of each record array.
            outcome: Value of each observed site. ``None`` for the record's own.
            weighted: Whether the record's weight is included.
        """
        if self._of_units:
            own = self._by_row
            return sum_over_rows(
                lambda row, y: own.log_likelihood(flat, row, y, weighted=weighted),
                example, outcome,
            )  # fmt: skip
        if self.censored:
            return self._log_hazard(flat, example, outcome, weighted)
        fn = handlers.substitute(self.model.fn, data=outcome or {})
        if self.weighted and not weighted:
            fn = _without_weights(fn, self._names, self.model.structure.data_plate)
        # `possible` checks a record once, not each outcome that it could have had.
        model, latents = self.model.unchecked._replace(fn=fn), self.latents(flat)
        return model.log_likelihood(latents, {}, example, self.shared, model.any_key())

    def score(self, flat: Array, example: Arrays, outcome: Values | None, **how: bool) -> Array:
        """Gradient of :meth:`log_likelihood` in the latents."""
        return jax.grad(self.log_likelihood)(flat, example, outcome, **how)

    def possible(self, example: Arrays) -> Array | bool:
        """Whether a record has an outcome in its support, and indices inside their tables."""
        return self.model.possible(self.latents(jnp.zeros(self.size)), example, self.shared)

    def simulate(
        self, flat: Array, example: Arrays, rng_key: Array, levels: Array | None = None
    ) -> Values:
        """Draws an outcome of one record. Does not read the observed outcome.

        A single value may be drawn at ``levels`` of its distribution
        (:func:`~numpyro_dp.model.simulated.drawn`).
        """
        if self._of_units:
            *rows, counted = example
            keys = jax.random.split(rng_key, counted.size)
            by_row = self._by_row
            return jax.vmap(lambda row, key: by_row.simulate(flat, row, key))(tuple(rows), keys)
        drawn = self._drawn(flat, example, rng_key, levels if self.scalar else None)
        sites = self._sites(flat, example)
        kinds = {site["name"]: jnp.asarray(site["value"]).dtype for site in sites}
        # Counts may be stored as floats, and values as integers.
        return {n: x.astype(jnp.promote_types(x.dtype, kinds[n])) for n, x in drawn.items()}

    def support(self, example: Arrays) -> Array:
        """The K outcomes that one record could have had."""
        # Any latents will do: `check_mean` has shown that the support is fixed.
        (site,) = self._sites(jnp.zeros(self.size), example)
        return site["fn"].enumerate_support(expand=False).reshape(-1)

    def probability(self, value: Array, flat: Array, example: Arrays) -> Array:
        """The probability of a listed outcome of one record, or 0 if it is not a number."""
        (site,) = self._sites(flat, example)
        log_prob = unwrapped(site["fn"]).log_prob(jnp.broadcast_to(value, jnp.shape(site["value"])))
        return jnp.clip(jnp.nan_to_num(jnp.exp(log_prob.sum()), nan=0.0), 0, 1)

    def listed(self, flats: Array, example: Arrays) -> Listed:
        """Lists the outcomes of one record, with their probabilities at R vectors of latents.

        Outcomes are the first axis, so that a sum over them adds a few long vectors.
        """
        values = self.support(example)
        at_each = jax.vmap(self.probability, (None, 0, None))
        probabilities = jax.vmap(at_each, (0, None, None))(values, flats, example)
        # The sum is then at most 1, whatever values the record holds.
        probabilities = probabilities / jnp.maximum(jnp.sum(probabilities, axis=0), 1)
        (site,) = self._sites(flats[0], example)
        value = jnp.reshape(site["value"], ())
        # A cast of the outcome to an integer would turn NaN and 0.7 into 0.
        wide = jnp.promote_types(value.dtype, values.dtype)
        return Listed(values.astype(wide) == value.astype(wide), values, probabilities)

    def own(self, example: Arrays) -> dict[str, Array]:
        """The record's own outcome, by observed site, in the type of simulated ones."""
        if self._of_units:
            return jax.vmap(self._by_row.own)(tuple(example[:-1]))
        flat = jnp.zeros(self.size)
        own = {site["name"]: jnp.asarray(site["value"]) for site in self._sites(flat, example)}
        if self.censored:  # times may be stored as integers
            return {n: x.astype(jnp.promote_types(x.dtype, jnp.float32)) for n, x in own.items()}
        drawn = jax.eval_shape(self._drawn, flat, example, jax.random.key(0))
        return {n: x.astype(jnp.promote_types(x.dtype, drawn[n].dtype)) for n, x in own.items()}

    def as_outcome(self, value: Array, own: Values) -> dict[str, Array]:
        """One listed value in the form of ``own``."""
        return {name: jnp.full(x.shape, value.astype(x.dtype)) for name, x in own.items()}

    def moments(self, flat: Array, example: Arrays) -> tuple[Array, Array] | None:
        """Mean and variance of a single outcome, or ``None`` if NumPyro has none."""
        if not self.scalar:
            return None
        fn = self._distribution(flat, example)
        try:
            return jnp.reshape(fn.mean, ()), jnp.reshape(fn.variance, ())
        except NotImplementedError:
            return None

    def check_mean(self, given: PyTree, at: Callable[[PyTree], tuple[Outcomes, Array]]) -> None:
        """Raises if the scores of other outcomes need not have mean 0.

        They do not if the support of the outcome, or its weight, moves with what is estimated.

        Args:
            given: Latents or parameters.
            at: Gives outcomes and latents at such values.
        """

        def bounds(given: PyTree) -> Values:
            here, flat = at(given)
            rows = here._by_row
            sites = rows._sites(flat, rows.model.structure.layout.blank())
            public = {s["name"]: (unwrapped(s["fn"]).support, s["scale"]) for s in sites}
            return {n: list(map(jnp.asarray, jax.tree.leaves(x))) for n, x in public.items()}

        for name in depends_on_inputs(bounds, given):
            raise UnsupportedModelError(
                f"The support or the weight of the outcome {name!r} depends on latents or "
                "parameters. Its score then has no mean 0, so other outcomes do not centre it. Use "
                "DPSVI, without centred()."
            )

    def event(self, example: Arrays) -> Array:
        """Whether a record's event was observed, so it is not censored."""
        return ~jnp.reshape(self._distribution(jnp.zeros(self.size), example).censored, ())

    def passed(self, flat: Array, example: Arrays, value: Array) -> Array:
        """The compensator at a value: minus the log of the survival function."""
        fn = self._distribution(flat, example)
        return jnp.nan_to_num(-censoring.log_tail(fn, jnp.reshape(value, ())))

    def time_of(self, flat: Array, example: Arrays, passed: Array) -> Array:
        """The value at which the compensator is ``passed``: the inverse of :meth:`passed`."""
        return censoring.value_at(self._distribution(flat, example), passed)

    def _log_hazard(
        self, flat: Array, example: Arrays, outcome: Values | None, weighted: bool
    ) -> Array:
        (site,) = self._sites(flat, example)
        value = site["value"] if outcome is None else outcome[site["name"]]
        fn, value = unwrapped(site["fn"]), jnp.reshape(value, ())
        found = fn.base_dist.log_prob(value).reshape(()) - censoring.log_tail(fn, value)
        scale = 1 if site["scale"] is None or not weighted else site["scale"]
        for factor in (scale, *masks_around(site["fn"])):  # a mask is 0 for what does not count
            found *= jnp.asarray(factor, float).reshape(())
        return found

    def _drawn(
        self, flat: Array, example: Arrays, rng_key: Array, levels: Array | None = None
    ) -> dict[str, Array]:
        own_key, rest_key = jax.random.split(rng_key)
        keys = dict(zip(self._names, jax.random.split(own_key, len(self._names)), strict=True))

        def draw(msg: Site) -> None:
            if msg["type"] == "sample" and msg["name"] in keys:
                found = _drawn(msg["fn"], keys[msg["name"]], levels)
                msg["value"], msg["is_observed"] = found, False

        trace = self._trace(altered(self.model.fn, draw), flat, example, rest_key)
        return {name: trace[name]["value"] for name in self._names}

    @property
    def _of_units(self) -> bool:
        """Whether a record has several rows."""
        return self.model.structure.layout.max_rows is not None

    @property
    def _by_row(self) -> Outcomes:
        return self._replace(model=self.model.by_row)

    @property
    def _names(self) -> tuple[str, ...]:
        return self.model.structure.likelihood

    def _sites(self, flat: Array, example: Arrays) -> list[Site]:
        trace = self._trace(self.model.fn, flat, example, jax.random.key(0))
        return [trace[name] for name in self._names]

    def _distribution(self, flat: Array, example: Arrays) -> Any:
        """The distribution of the one observed site, without its mask and expansion."""
        (site,) = self._sites(flat, example)
        return unwrapped(site["fn"])

    def _trace(self, fn: NumPyroFn, flat: Array, example: Arrays, rng_key: Array) -> Sites:
        layout = self.model.structure.layout
        fn = one_record(fn, self.model.structure.data_plate)
        fn = constraining(handlers.seed(fn, rng_key), self.latents(flat))
        return layout.example(example, self.shared).trace(fn)


def read_outcomes(model: Model, shared: Arrays) -> Outcomes:
    """Reads the kind of the records' outcomes, from shapes alone.

    Raises:
        UnsupportedModelError: If the outcomes cannot be simulated.

    Example:
        >>> import numpyro, numpyro.distributions as dist
        >>> from numpyro_dp import Privacy
        >>> def model(y):
        ...     w = numpyro.sample("w", dist.Normal(0, 1))
        ...     with numpyro.plate("records", y.shape[0]):
        ...         numpyro.sample("y", dist.Bernoulli(logits=w), obs=y)
        >>> structure = Privacy().given_model(model, {}).structure((np.ones(100, int),), {})
        >>> read_outcomes(Model(model, structure), ()).number  # 0 and 1
        2
    """
    found, by_row = read_latents(model, shared), model.by_row
    found.check_mean(jnp.zeros(found.size), lambda flat: (found, flat))
    facts = _kind(found._replace(model=by_row), by_row.structure.layout.blank())
    if found._of_units:  # outcomes of several rows are a vector, and too many to list
        if facts["censored"]:
            raise UnsupportedModelError(
                "Censored outcomes of several rows of a unit are not supported here. Use DPSVI."
            )
        facts |= {"number": 0, "scalar": False}
    return found._replace(**facts)


def read_latents(model: Model, shared: Arrays) -> Outcomes:
    """Reads the latents alone: the outcomes need not be such that they can be simulated.

    Raises:
        UnsupportedModelError: If the model has parameters, or latents of single records, or a prior
            that cannot be drawn from, or if no latent changes the likelihood.
    """
    structure = model.structure
    if structure.params:
        raise UnsupportedModelError(
            f"The model has the parameters {list(structure.params)}, but this method supports "
            "latent sites only, because parameters have no prior. Use numpyro.sample for them, or "
            "DPSVI, which optimises parameters."
        )
    if structure.local_latents:
        raise UnsupportedModelError(
            f"The latent sites {list(structure.local_latents)} are inside the data plate, but this "
            "method supports only latents that all records share. Integrate them out, or use DPSVI "
            "with a guide that has an encoder."
        )
    drawn = jax.eval_shape(lambda: unconstrained_prior(model, shared, jax.random.key(0)))
    shapes = {name: value.shape for name, value in drawn.items()}
    found = Outcomes(model, shared, structure.latents, shapes, 0, False, False)
    example = structure.layout.blank()

    def density(latents: Values) -> Array:
        return model.log_likelihood(latents, {}, example, shared, model.any_key())

    read = entries_read(density, {name: np.zeros(shape, "f4") for name, shape in shapes.items()})
    seen = tuple(name for name in structure.latents if name in read)
    if not seen:
        raise UnsupportedModelError(
            "No latent site changes the likelihood of a record, so the records cannot inform the "
            "posterior. Use a latent site in the distribution of the observed site."
        )
    return found._replace(seen=seen)


def unconstrained_prior(model: Model, shared: Arrays, rng_key: Array) -> dict[str, Array]:
    """Draws the latent sites from their prior, in unconstrained coordinates.

    Raises:
        UnsupportedModelError: If a prior cannot be drawn from.
    """
    trace = model.draw_prior(shared, rng_key)
    return {
        name: biject_to(trace[name]["fn"].support).inv(trace[name]["value"])
        for name in model.structure.latents
    }


def _kind(outcomes: Outcomes, example: Arrays) -> Values:
    """Number of outcomes that can be listed, and other facts about them."""
    facts, plate = {}, outcomes.model.structure.data_plate

    def look(flat: Array, example: Arrays) -> Values:
        sites = outcomes._sites(flat, example)
        trace = outcomes._trace(outcomes.model.fn, flat, example, jax.random.key(0))
        size = trace[plate]["args"][0]
        for site in sites:
            _check_drawable(site)
        single = len(sites) == 1 and all(np.size(site["value"]) == 1 for site in sites)
        facts["scalar"] = single and sites[0]["fn"].event_dim == 0
        facts["censored"] = any(censoring.is_censored(unwrapped(site["fn"])) for site in sites)
        scales = [site["scale"] for site in sites]
        plain = (s is None or (np.isscalar(s) and s in (1, size)) for s in scales)
        facts["weighted"] = not all(plain)
        return outcomes.simulate(flat, example, jax.random.key(0))

    try:
        jax.eval_shape(look, jnp.zeros(outcomes.size), example)
    except NotImplementedError as error:
        raise UnsupportedModelError(
            "This method simulates outcomes, but the distribution of the outcome has no sample: "
            f"{error or type(error).__name__}. Use DPSVI for this model."
        ) from error
    facts["number"] = 0
    if facts["censored"]:
        censoring.check(outcomes._names, facts["scalar"])
    elif facts["scalar"] and not outcomes.model.structure.summed:
        facts["number"] = _number_of_values(outcomes, example)
    return facts


def _number_of_values(outcomes: Outcomes, example: Arrays) -> int:
    """Number of possible outcomes. 0 if there are too many, or if it depends on the record."""
    try:
        found = jax.eval_shape(outcomes.support, example).size
    except (NotImplementedError, TypeError, ValueError, jax.errors.JAXTypeError):
        return 0
    return found if found <= _MOST_VALUES else 0


def _check_drawable(site: Site) -> None:
    name, fn = site["name"], unwrapped(site["fn"])
    if is_factor(fn):
        raise UnsupportedModelError(
            f"This method simulates outcomes, but the factor {name!r} does not show which "
            "value is the outcome. Write it as numpyro.sample(..., obs=y), or use DPSVI."
        )
    if censoring.is_censored(fn):
        censoring.check_base(name, fn)


def _drawn(fn: Any, rng_key: Array, levels: Array | None) -> Array:
    own = unwrapped(fn)
    # An expansion to more entries needs a draw for each of them.
    if np.prod(own.shape()) != np.prod(fn.shape()):
        return fn.sample(rng_key)
    return drawn(own, rng_key, levels).reshape(fn.shape())


class _without_weights(Messenger):  # noqa: N801
    """Removes record weights: the scale of observed sites is the plate's size only."""

    def __init__(self, fn: NumPyroFn, names: tuple[str, ...], plate: str) -> None:
        self.names, self.plate, self.size = names, plate, 1
        super().__init__(fn)

    def process_message(self, msg: Site) -> None:
        if msg["type"] == "plate" and msg["name"] == self.plate:
            self.size = msg["args"][0]  # 1 if the model reads it from the shape of a record array
        if msg["type"] == "sample" and msg["name"] in self.names:
            msg["scale"] = float(self.size)
