r"""Centred signals: clipping that does not bias the fit (:mod:`numpyro_dp.sums.centred_sums`)."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_dp._tree import select
from numpyro_dp.core import Estimator, Values
from numpyro_dp.model.outcomes import Outcomes, read_outcomes
from numpyro_dp.model.partners import OutcomeModel, centring
from numpyro_dp.model.public import UnsupportedModelError
from numpyro_dp.model.variational import VariationalProblem
from numpyro_dp.run.results import MOST_LATENTS
from numpyro_dp.vi.estimators.aligned import DrawnPublic, aligned


def centred(
    estimator: Callable[[VariationalProblem], Estimator],
) -> Callable[[VariationalProblem], Estimator]:
    r"""Subtracts from each clipped signal its expectation under the model.

    Without this, clipping moves the fit by an amount that grows with the number of records. With
    it, the fit is almost the same for every clip norm, and a small norm only costs information. The
    expectation is over all outcomes of a record if there are at most 16, such as 0 and 1. Otherwise
    the model draws two outcomes in each step, and the differences of the signals are clipped. These
    are longer than signals: for normal outcomes by 1.4. A step computes a slope for each outcome.
    The columns of a generalised linear model are read once for all of them.

    Args:
        estimator: :func:`~numpyro_dp.estimators.aligned`, or another estimator of this module.

    Returns:
        A function that builds the :class:`~numpyro_dp.core.Estimator` for a model and guide. Pass
        it to :class:`~numpyro_dp.DPSVI` as ``estimator=``. It raises
        :class:`~numpyro_dp.UnsupportedModelError` if the model cannot simulate an outcome, or if
        the support of the outcome depends on latents or parameters.

    Example:
        >>> from numpyro_dp.estimators import aligned, centred
        >>> estimator = centred(aligned())

    Guarantee:
        A record's signals have a sum of norm at most the clip norm. They read the record, public
        values, and seeds that are secret and independent of all records.

    Reference:
        The project's own method, see :mod:`numpyro_dp.sums.centred_sums`.
    """
    return lambda problem: _centred(estimator, problem, outcomes_of(problem))


def _centred(
    estimator: Callable[[VariationalProblem], Estimator],
    problem: VariationalProblem,
    outcomes: Outcomes,
) -> Estimator:
    plain = estimator(problem)
    other = OutcomeModel(problem.model, paired=not outcomes.number)
    inner = estimator(problem._replace(model=other))
    names = problem.model.structure.params

    def latents(public: DrawnPublic) -> dict[str, Array]:
        return public.latents

    def params(public: DrawnPublic) -> Values:
        return select(problem.constrain(public.params), names)

    found = centring(outcomes, inner, latents, params if names else None)
    return plain._replace(factored=None, centring=found)


def centred_if_possible(problem: VariationalProblem) -> Estimator:
    """The default of ``DPSVI``: centred aligned gradients for models that allow them, else aligned.

    Models with more than 300 latents and parameters count as networks, where the gradients of
    other outcomes would cost too much.

    Example:
        >>> import numpyro
        >>> from numpyro_dp.extend import Method
        >>> method = Method(centred_if_possible, numpyro.optim.Adam(0.1))
    """
    try:
        outcomes = outcomes_of(problem)
    except UnsupportedModelError:
        return aligned()(problem)
    size = sum(leaf.size for leaf in jax.tree.leaves(problem.model.first_params(problem.shared)))
    if outcomes.size + size > MOST_LATENTS:
        return aligned()(problem)
    return _centred(aligned(), problem, outcomes)


def outcomes_of(problem: VariationalProblem) -> Outcomes:
    """Returns the outcomes of a problem, or raises UnsupportedModelError if there are none."""
    if problem.numbered:
        raise UnsupportedModelError(
            "centred() does not support models or guides that draw random values for each record. "
            "Use the estimator without centred()."
        )
    if problem.num_particles > 1:
        # Scores at one draw have mean 0 for outcomes of that draw, and not for those of another.
        raise UnsupportedModelError(
            f"centred() needs one draw a step, got num_particles={problem.num_particles}. Use "
            "Trace_ELBO(), or the estimator without centred()."
        )
    model = problem.model
    # Kinds and shapes do not depend on the values of parameters. A step fills in its own.
    params = model.first_params(problem.shared)
    outcomes = read_outcomes(model.at(params), problem.shared)._replace(model=model)
    if params:
        flat = jnp.zeros(outcomes.size)
        outcomes.check_mean(params, lambda values: (outcomes.at(values), flat))
    if outcomes.censored:
        raise UnsupportedModelError(
            "centred() does not support censored outcomes, because the model does not say until "
            "when a record would have been observed. Use the estimator without centred()."
        )
    return outcomes
