r"""What a model says a record's outcome could have been: simulated, or listed.

The observed sites in the data plate are the outcome y of a record, and all else it holds is x. A
model that can be simulated gives, besides the score of what was observed, the scores of what might
have been observed at the same x. Their mean is the expectation that a private score is centred by.
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
from numpyro.distributions import ExpandedDistribution, MaskedDistribution, biject_to

from numpyro_dp._compat import Messenger
from numpyro_dp.model import censoring
from numpyro_dp.model.density import Model
from numpyro_dp.model.dependence import depends_on_inputs
from numpyro_dp.model.public import UnsupportedModelError
from numpyro_dp.model.separation import is_factor, one_record
from numpyro_dp.model.simulated import drawn

__all__ = ["Outcomes", "read_outcomes"]

_MOST_VALUES = 16  # listed; beyond that simulated outcomes cost less


class Listed(NamedTuple):
    """All outcomes that a record could have had.

    Attributes:
        observed: Which of them is the record's own, shape (K,); none if it is outside the support.
        values: The outcomes, shape (K,).
        probabilities: Of each, shape (K, R).
    """

    observed: Array
    values: Array
    probabilities: Array


class Outcomes(NamedTuple):
    """The outcome of one record as a model has it.

    Attributes:
        model: The model.
        shared: Public arrays among its arguments.
        seen: Names of the latent sites that the likelihood of a record depends on.
        shapes: Unconstrained shapes of the latent sites.
        number: How many outcomes there are, where they can be listed; else 0.
        scalar: Whether the outcome is a single number.
        weighted: Whether records have weights (``handlers.scale``).
        censored: Whether the outcome is a censored one; its log likelihood is then the log hazard
            of an event (the reversed one where it is censored from the left).
    """

    model: Model
    shared: tuple[Array, ...]
    seen: tuple[str, ...]
    shapes: Mapping[str, tuple[int, ...]]
    number: int
    scalar: bool
    weighted: bool
    censored: bool = False

    @property
    def size(self) -> int:
        """Number of latents that records see."""
        return sum(int(np.prod(self.shapes[name])) for name in self.seen)

    def latents(self, flat: Array) -> dict[str, Array]:
        """Values by site from one vector of those that are seen; zeros for the others."""
        zeros = {name: jnp.zeros(self.shapes[name], flat.dtype) for name in self.seen}
        found = ravel_pytree(zeros)[1](flat)
        return {n: found.get(n, jnp.zeros(s, flat.dtype)) for n, s in self.shapes.items()}

    def log_likelihood(
        self, flat: Array, example: tuple[Array, ...], outcome: Any, *, weighted: bool = True
    ) -> Array:
        """Log likelihood of one record with this outcome in the place of its own.

        Args:
            flat: Latents, shape (size,).
            example: One row of each record array.
            outcome: Value of each observed site; ``None`` for the record's own.
            weighted: Whether the record's weight counts.
        """
        if self.censored:
            return self._log_hazard(flat, example, outcome, weighted)
        fn = self.model.fn if outcome is None else _observing(self.model.fn, outcome)
        if self.weighted and not weighted:
            fn = _without_weights(fn, self._names, self.model.structure.data_plate)
        model, key = self.model._replace(fn=fn), self._any_key()
        return model.log_likelihood(self.latents(flat), {}, example, self.shared, key)

    def score(self, flat: Array, example: tuple[Array, ...], outcome: Any, **how: Any) -> Array:
        """Gradient of :meth:`log_likelihood` in the latents."""
        return jax.grad(self.log_likelihood)(flat, example, outcome, **how)

    def simulate(self, flat: Array, example: tuple[Array, ...], rng_key: Array) -> Any:
        """Draws an outcome of one record; what was observed is not read."""
        own_key, rest_key = jax.random.split(rng_key)
        fn = _unobserved(self.model.fn, self._names, own_key)
        trace = self._trace(fn, flat, example, rest_key)
        return {name: trace[name]["value"] for name in self._names}

    def listed(self, flats: Array, example: tuple[Array, ...]) -> Listed:
        """Lists the outcomes of one record, with their probabilities at R vectors of latents.

        Outcomes are the first axis: sums over the few of them are then sums of long vectors.
        """
        (site,) = self._sites(flats[0], example)
        values = site["fn"].enumerate_support(expand=False).reshape(-1)
        value, shape = jnp.reshape(site["value"], ()), jnp.shape(site["value"])

        def log_prob(value: Array, flat: Array) -> Array:
            (site,) = self._sites(flat, example)
            return _plain(site["fn"]).log_prob(jnp.broadcast_to(value, shape)).sum()

        logs = jax.vmap(jax.vmap(log_prob, (None, 0)), (0, None))(values, flats)
        probabilities = jnp.clip(jnp.nan_to_num(jnp.exp(logs), nan=0.0), 0, 1)
        probabilities = probabilities / jnp.maximum(jnp.sum(probabilities, axis=0), 1)
        return Listed(values == value.astype(values.dtype), values, probabilities)

    def own(self, example: tuple[Array, ...]) -> dict[str, Array]:
        """The record's own outcome: the value of each observed site."""
        sites = self._sites(jnp.zeros(self.size), example)
        return {site["name"]: jnp.asarray(site["value"]) for site in sites}

    def as_outcome(self, value: Array, own: dict[str, Array]) -> dict[str, Array]:
        """One listed value in the place of a record's own."""
        return {name: jnp.full(x.shape, value.astype(x.dtype)) for name, x in own.items()}

    def moments(self, flat: Array, example: tuple[Array, ...]) -> tuple[Array, Array]:
        """Mean and variance of a single outcome."""
        (site,) = self._sites(flat, example)
        fn = _plain(site["fn"])
        return jnp.reshape(fn.mean, ()), jnp.reshape(fn.variance, ())

    def event(self, example: tuple[Array, ...]) -> Array:
        """Whether a record has its event, and is not censored."""
        (site,) = self._sites(jnp.zeros(self.size), example)
        return ~jnp.reshape(_plain(site["fn"]).censored, ())

    def passed(self, flat: Array, example: tuple[Array, ...], value: Array) -> Array:
        """How much of the compensator has passed at a value: minus log of the survival function."""
        (site,) = self._sites(flat, example)
        return jnp.nan_to_num(-censoring.log_tail(_plain(site["fn"]), jnp.reshape(value, ())))

    def time_of(self, flat: Array, example: tuple[Array, ...], passed: Array) -> Array:
        """The value at which so much of it has passed."""
        (site,) = self._sites(flat, example)
        return censoring.value_at(_plain(site["fn"]), passed)

    def _log_hazard(
        self, flat: Array, example: tuple[Array, ...], outcome: Any, weighted: bool
    ) -> Array:
        (site,) = self._sites(flat, example)
        fn, value = _plain(site["fn"]), site["value"] if outcome is None else outcome[site["name"]]
        value = jnp.reshape(value, ())
        found = fn.base_dist.log_prob(value).reshape(()) - censoring.log_tail(fn, value)
        scale = 1 if site["scale"] is None or not weighted else site["scale"]
        return found * jnp.reshape(scale, ()) * _mask_of(site["fn"])

    @property
    def _names(self) -> tuple[str, ...]:
        return self.model.structure.likelihood

    def _any_key(self) -> Array | None:
        return jax.random.key(0) if self.model.structure.draws else None

    def _sites(self, flat: Array, example: tuple[Array, ...]) -> list[dict[str, Any]]:
        trace = self._trace(self.model.fn, flat, example, jax.random.key(0))
        return [trace[name] for name in self._names]

    def _trace(
        self, fn: Callable[..., Any], flat: Array, example: tuple[Array, ...], rng_key: Array
    ) -> dict[str, Any]:
        layout = self.model.structure.layout
        fn = one_record(fn, self.model.structure.data_plate)
        fn = _at(handlers.seed(fn, rng_key), self.latents(flat))
        return layout.example(example, self.shared).call(handlers.trace(fn).get_trace)


def read_outcomes(model: Model, shared: tuple[Array, ...]) -> Outcomes:
    """Reads what the records' outcomes are, on shapes alone.

    Raises:
        UnsupportedModelError: If they cannot be simulated; names the site and another driver.
    """
    structure = model.structure
    _check(structure)
    drawn = jax.eval_shape(lambda: unconstrained_prior(model, shared, jax.random.key(0)))
    shapes = {name: value.shape for name, value in drawn.items()}
    found = Outcomes(model, shared, structure.latents, shapes, 0, False, False)
    example = structure.layout.blank()

    def densities(latents: dict[str, Array]) -> dict[str, Array]:
        key = jax.random.key(0) if structure.draws else None
        return {"all": model.log_likelihood(latents, {}, example, shared, key)}

    floats = {name: jnp.zeros(shape) for name, shape in shapes.items()}
    seen = tuple(
        name
        for name in structure.latents
        if depends_on_inputs(lambda v, n=name: densities(floats | {n: v}), floats[name])["all"]
    )
    if not seen:
        raise UnsupportedModelError(
            "No latent site changes the likelihood of a record, so the records cannot inform the "
            "posterior. Use a latent site in the distribution of the observed site."
        )
    found = found._replace(seen=seen)
    return found._replace(**_kind(found, example))


def unconstrained_prior(
    model: Model, shared: tuple[Array, ...], rng_key: Array
) -> dict[str, Array]:
    """Draws the latent sites from their prior, in unconstrained coordinates.

    Raises:
        UnsupportedModelError: If a prior cannot be drawn from.
    """
    try:
        trace = model.draw_prior(shared, rng_key)
    except NotImplementedError as error:
        raise UnsupportedModelError(
            "A prior of this model has no sampler; ImproperUniform is an example. "
            "Without a proper prior a small budget has no answer. Give it a proper prior."
        ) from error
    return {
        name: biject_to(trace[name]["fn"].support).inv(trace[name]["value"])
        for name in model.structure.latents
    }


def _check(structure: Any) -> None:
    if structure.params:
        raise UnsupportedModelError(
            f"Expected latent sites alone, got the parameters {list(structure.params)}: they have "
            "no prior. Use numpyro.sample for them, or DPSVI, which optimises parameters."
        )
    if structure.local_latents:
        raise UnsupportedModelError(
            f"Expected latents that all records share, got {list(structure.local_latents)} in the "
            "data plate. Integrate them out, or use DPSVI with a guide that has an encoder."
        )


def _kind(outcomes: Outcomes, example: tuple[Array, ...]) -> dict[str, Any]:
    """Number of outcomes that can be listed, and what else is known of them."""
    size, facts = outcomes.model.structure.layout.num_examples, {}

    def look(flat: Array, example: tuple[Array, ...]) -> Any:
        sites = outcomes._sites(flat, example)
        for site in sites:
            _check_drawable(site)
        single = len(sites) == 1 and all(np.size(site["value"]) == 1 for site in sites)
        facts["scalar"] = single and sites[0]["fn"].event_dim == 0
        facts["censored"] = any(censoring.is_censored(_plain(site["fn"])) for site in sites)
        scales = [site["scale"] for site in sites]
        facts["weighted"] = any(not (s is None or np.isscalar(s)) for s in scales)
        facts["weighted"] |= any(np.isscalar(s) and s not in (1, size) for s in scales)
        return outcomes.simulate(flat, example, jax.random.key(0))

    try:
        jax.eval_shape(look, jnp.zeros(outcomes.size), example)
    except NotImplementedError as error:
        raise UnsupportedModelError(
            "Expected an outcome that can be simulated, got a distribution without sample: "
            f"{error or type(error).__name__}. Use DPSVI for this model."
        ) from error
    facts["number"] = 0
    if facts["censored"]:
        censoring.check(outcomes._names, facts["scalar"])
    elif facts["scalar"] and not outcomes.model.structure.summed:
        facts["number"] = _number_of_values(outcomes, example)
    return facts


def _number_of_values(outcomes: Outcomes, example: tuple[Array, ...]) -> int:
    """How many values the outcome may have; 0 if they are too many, or the record decides it."""

    def values(flat: Array, example: tuple[Array, ...]) -> Array:
        return outcomes.listed(flat[None], example).values

    try:
        found = jax.eval_shape(values, jnp.zeros(outcomes.size), example).size
    except (NotImplementedError, TypeError, ValueError, jax.errors.JAXTypeError):
        return 0
    return found if found <= _MOST_VALUES else 0


def _check_drawable(site: dict[str, Any]) -> None:
    name, fn = site["name"], _plain(site["fn"])
    if is_factor(fn):
        raise UnsupportedModelError(
            f"Expected outcomes that can be simulated, got the factor {name!r}, whose outcome the "
            "model does not name. Write it as numpyro.sample(..., obs=y), or use DPSVI."
        )
    if censoring.is_censored(fn):
        censoring.check_base(name, fn)


def _plain(fn: Any) -> Any:
    """A distribution without its mask and expansion: that of the outcome."""
    while type(fn) in (MaskedDistribution, ExpandedDistribution):
        fn = fn.base_dist
    return fn


def _mask_of(fn: Any) -> Any:
    """1 where a distribution counts, 0 where it is masked."""
    found = 1
    while type(fn) in (MaskedDistribution, ExpandedDistribution):
        if isinstance(fn, MaskedDistribution):
            found = found * jnp.asarray(fn._mask, float).reshape(())
        fn = fn.base_dist
    return found


class _observing(Messenger):  # noqa: N801 - a NumPyro handler, named like its peers
    """Gives observed sites other values."""

    def __init__(self, fn: Callable[..., Any], values: Mapping[str, Array]) -> None:
        self.values = values
        super().__init__(fn)

    def process_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] == "sample" and msg["name"] in self.values:
            msg["value"] = self.values[msg["name"]]


class _unobserved(Messenger):  # noqa: N801
    """Draws observed sites in the place of what was observed."""

    def __init__(self, fn: Callable[..., Any], names: tuple[str, ...], rng_key: Array) -> None:
        self.keys = dict(zip(names, jax.random.split(rng_key, len(names)), strict=True))
        super().__init__(fn)

    def process_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] == "sample" and msg["name"] in self.keys:
            msg["value"], msg["is_observed"] = _drawn(msg["fn"], self.keys[msg["name"]]), False


def _drawn(fn: Any, rng_key: Array) -> Array:
    plain = _plain(fn)
    if np.prod(plain.shape()) != np.prod(fn.shape()):
        return fn.sample(rng_key)
    return drawn(plain, rng_key).reshape(fn.shape())


class _without_weights(Messenger):  # noqa: N801
    """Leaves observed sites the scale that the size of the plate gives them alone."""

    def __init__(self, fn: Callable[..., Any], names: tuple[str, ...], plate: str) -> None:
        self.names, self.plate, self.size = names, plate, 1
        super().__init__(fn)

    def process_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] == "plate" and msg["name"] == self.plate:
            self.size = msg["args"][0]  # 1 if it is the length of an array of records
        if msg["type"] == "sample" and msg["name"] in self.names:
            msg["scale"] = float(self.size)


class _at(Messenger):  # noqa: N801
    """Puts latent sites at unconstrained values."""

    def __init__(self, fn: Callable[..., Any], latents: Mapping[str, Array]) -> None:
        self.latents = latents
        super().__init__(fn)

    def process_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] == "sample" and msg["value"] is None and msg["name"] in self.latents:
            msg["value"] = biject_to(msg["fn"].support)(self.latents[msg["name"]])
