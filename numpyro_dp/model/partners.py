"""The record with other outcomes: rows that centre a clipped signal (``sums/centred_sums.py``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from numpyro import handlers

from numpyro_dp.core import Arrays, Centring, Estimator, PyTree, Values
from numpyro_dp.model.density import Model, if_possible
from numpyro_dp.model.outcomes import Outcomes
from numpyro_dp.model.records import ModelStructure
from numpyro_dp.model.units import sum_over_rows

_DRAWN = 2  # outcomes that are drawn for each record, if they cannot be listed


class OutcomeModel(NamedTuple):
    """A model whose examples are (record, outcome to use for it, probability).

    Attributes:
        model: The model.
        paired: Whether its log likelihood is that of the record minus that of the other outcome.

    Example:
        >>> import numpy as np, numpyro, numpyro.distributions as dist
        >>> from numpyro_dp import Privacy
        >>> def model(y):
        ...     w = numpyro.sample("w", dist.Normal(0, 1))
        ...     with numpyro.plate("records", y.shape[0]):
        ...         numpyro.sample("y", dist.Bernoulli(logits=w), obs=y)
        >>> structure = Privacy().given_model(model, {}).structure((np.ones(100, int),), {})
        >>> other = OutcomeModel(Model(model, structure))
        >>> example = (jnp.ones((), int),), {"y": jnp.zeros((1,), int)}, 0.5
        >>> latents = {"w": jnp.asarray(2.0)}
        >>> round(float(other.log_likelihood(latents, {}, example, ())), 2)  # of y = 0
        -2.13
    """

    model: Model
    paired: bool = False

    @property
    def by_row(self) -> OutcomeModel:
        """The same model with a single row as a record."""
        return self._replace(model=self.model.by_row)

    @property
    def structure(self) -> ModelStructure:
        """The structure of the model."""
        return self.model.structure

    def log_prior(self, *arguments: PyTree) -> Array:
        """The prior of the model."""
        return self.model.log_prior(*arguments)

    def log_likelihood(
        self,
        latents: PyTree,
        params: PyTree,
        example: PyTree,
        shared: PyTree,
        rng_key: Array | None = None,
    ) -> Array:
        """Log likelihood of one record with the given outcome, or the difference to it."""
        record, outcome, _ = example
        if self.model.structure.layout.max_rows is not None:
            by_row = self.by_row
            return sum_over_rows(
                lambda row, y: by_row.log_likelihood(latents, params, (row, y, None), shared),
                record, outcome,
            )  # fmt: skip
        model = self.model.unchecked
        other = model._replace(fn=handlers.substitute(model.fn, data=outcome))
        found = other.log_likelihood(latents, params, record, shared, rng_key)
        if self.paired:
            found = model.log_likelihood(latents, params, record, shared, rng_key) - found
        # Also with another outcome: the record itself is impossible, and no row of it may count.
        return if_possible(found, self.model.possible(latents, record, shared, params))


def centring(
    outcomes: Outcomes,
    inner: Estimator,
    latents: Callable[[PyTree], dict[str, Array]],
    params: Callable[[PyTree], Values] | None = None,
) -> Centring:
    """Returns the centring of an estimator of scores.

    Args:
        outcomes: The outcomes of a record.
        inner: The estimator, built on an :class:`OutcomeModel`, ``paired`` if outcomes are drawn.
        latents: ``public -> latents`` of the step, at which the scores are taken.
        params: ``public -> params``, constrained, if the model has parameters.

    Example:
        >>> from numpyro_dp.extend import OutcomeModel, read_outcomes
        >>> def build(problem):  # problem has model and shared, estimator_of(problem) is yours
        ...     outcomes = read_outcomes(problem.model, problem.shared)
        ...     other = problem._replace(model=OutcomeModel(problem.model))
        ...     found = centring(outcomes, estimator_of(other), lambda public: public.latents)
        ...     return estimator_of(problem)._replace(centring=found)
    """
    number = outcomes.number or _DRAWN - 1

    def row(public: PyTree, example: Arrays, seed: Array, k: Array) -> PyTree:
        here = outcomes.at(params(public)) if params is not None else outcomes
        flat, own = here.flat(latents(public)), here.own(example)
        if not here.number:  # the outcome of a pair
            drawn = here.simulate(flat, example, jax.random.fold_in(jax.random.key(seed), k))
            typed = jax.tree.map(lambda one, other: other.astype(one.dtype), own, drawn)
            return typed, jnp.full((), 1 / (number + 1))
        value = here.support(example)[jnp.maximum(k - 1, 0)]
        listed = here.as_outcome(value, own)
        outcome = jax.tree.map(lambda one, other: jnp.where(k == 0, one, other), own, listed)
        return outcome, here.probability(value, flat, example)

    return Centring(inner, number, row, listed=bool(outcomes.number))
