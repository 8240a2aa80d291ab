r"""A private posterior predictive check: one noisy table of predictions and ranks.

The posterior has a distribution function F for the outcome y of each record. In a right model,
the interval from :math:`F(y^-)` to :math:`F(y)` is spread evenly over [0, 1], on average over
records with any prediction. For a continuous outcome it is a point, the probability integral
transform. A record adds the parts of its interval in each of ten ranks. They are in the row of its
predicted centre: the mean if outcomes are listed, else that of the middle half of simulated ones.

Reference:
    For the non-randomised transform: C. Czado, T. Gneiting, L. Held (2009), Predictive model
    assessment for count data, Biometrics 65. The private table is the project's own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_dp._compat import jit_once
from numpyro_dp.core import Arrays, PyTree
from numpyro_dp.laplace.signal import LaplaceProblem
from numpyro_dp.model.density import Model
from numpyro_dp.model.frames import as_arrays
from numpyro_dp.model.impossible import masks_around
from numpyro_dp.model.outcomes import Outcomes, read_outcomes
from numpyro_dp.model.public import UnsupportedModelError
from numpyro_dp.model.records import is_finite
from numpyro_dp.posterior.posterior import Posterior
from numpyro_dp.privacy.budget import PrivacyBudget
from numpyro_dp.privacy.keys import check_rng_key
from numpyro_dp.privacy.plan import PrivacyReport
from numpyro_dp.privacy.sampling import FullBatch
from numpyro_dp.run.driver import OneSum
from numpyro_dp.run.settings import Privacy, RunSettings

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_RANKS = _ROWS = 10
_DRAWS = 200  # of the posterior, each with an outcome of the record
_INVENTED = 500  # records whose predictions separate the rows
_NARROW = 1e-6  # smallest width of an outcome's interval, so that it counts as 1 in any case
_SEEN = 3.0  # a row with fewer records than this many standard deviations of its noise is not shown
_WIDTH = 1.645  # of 90 % intervals, in standard errors


class PredictiveCheck(NamedTuple):
    """How the outcomes are distributed next to what a posterior predicts. You may publish it.

    Attributes:
        table: Noisy number of records by row of the prediction, from small to large, and by rank
            of the outcome (10, 10).
        noise: Standard deviation of the noise in each of these numbers.
        edges: Predicted centres that separate the rows (9,). They are those of invented records.
        privacy: What this release spent, without what the posterior did.
    """

    table: np.ndarray
    noise: float
    edges: np.ndarray
    privacy: PrivacyReport

    @property
    def ranks(self) -> tuple[np.ndarray, np.ndarray]:
        """Share of records in each rank, .1 if all is right, and its largest error (10,)."""
        number, sampling = self.privacy.plan.num_examples, (1 - 1 / _RANKS) / _RANKS
        error = np.sqrt(self.noise**2 * _ROWS + number * sampling) / number
        return self.table.sum(axis=0) / number, np.full(_RANKS, error)

    @property
    def residuals(self) -> tuple[np.ndarray, np.ndarray]:
        """Twice the mean rank minus 1 in each row, and its largest standard error (10,).

        It is between -1 and 1, and 0 if all is right. For an outcome of 0 or 1 it is the share of
        ones minus the predicted share, about. The errors are those of a continuous outcome. Of a
        rare outcome they are smaller. ``nan`` where a row has too few records for its noise.
        """
        middles = 2 * (np.arange(_RANKS) + 0.5) / _RANKS - 1
        records, sums = self.table.sum(axis=1), self.table @ middles
        seen = records > _SEEN * self.noise * np.sqrt(_RANKS)
        records = np.where(seen, records, np.nan)
        # The sum and the number of a row have independent noise, and the mean of squares is 1 / 3.
        noise = self.noise**2 * (np.sum(middles**2) + _RANKS * (sums / records) ** 2)
        return sums / records, np.sqrt(noise + records / 3) / records

    def __str__(self) -> str:
        """A line for the ranks, a line for the residuals, and what was spent."""
        lines = [f"{'':26}{'low':>8}{'':56}{'high':>8}"]
        for name, (values, errors) in (
            ("share by rank of outcome", self.ranks), ("residual by prediction", self.residuals),
        ):  # fmt: skip
            lines.append(f"{name:26}" + "".join(f"{value:8.3f}" for value in values))
            lines.append(
                f"{'  90 % interval, +-':26}" + "".join(f"{_WIDTH * e:8.3f}" for e in errors)
            )
        return "\n".join([*lines, repr(self.privacy)])

    def plot(self, axes: tuple[Axes, Axes] | None = None) -> tuple[Axes, Axes]:
        """Draws the shares of ranks and the residuals, with 90 % intervals.

        Args:
            axes: Two axes of matplotlib, by default those of a new figure.
        """
        if axes is None:
            import matplotlib.pyplot as plt

            axes = tuple(plt.subplots(1, 2, figsize=(8, 3), layout="constrained")[1])
        places = (np.arange(_RANKS) + 0.5) / _RANKS
        labels = (
            ("rank of the outcome in its prediction", "share of records", 1 / _RANKS),
            ("rank of the prediction among invented records", "outcomes above prediction", 0.0),
        )
        for ax, (across, up, right), found in zip(
            axes, labels, (self.ranks, self.residuals), strict=True
        ):
            values, errors = found
            ax.axhline(right, color="0.6", linewidth=1)
            ax.errorbar(places, values, yerr=_WIDTH * errors, fmt="o", markersize=4, capsize=2)
            ax.set(xlabel=across, ylabel=up, xlim=(0, 1))
        axes[0].set_ylim(bottom=0)
        return axes


def check(
    posterior: Posterior,
    *args: PyTree,
    budget: PrivacyBudget,
    rng_key: Array,
    privacy: Privacy = Privacy(),
    **kwargs: PyTree,
) -> PredictiveCheck:
    """Compares outcomes with what a posterior predicts, by one noisy table.

    Too many outcomes of the lowest and highest ranks show that the model says too little spread.
    Residuals that bend show that the mean is another function of the columns. Errors of the
    posterior move residuals too, by as much as the predictions are uncertain. Rows are separated by
    predictions of invented records with standard normal columns. Columns that are far from these
    may put all records into one row.

    Args:
        posterior: A posterior of a model with one outcome a record.
        *args: Arguments of the model, with the records.
        budget: Epsilon and delta to spend, such as ``ledger.budget(0.2, purpose="check")``. If the
            posterior was fitted to the same records, the two add up.
        rng_key: Key of draws from the posterior, not of noise.
        privacy: As for :class:`~numpyro_dp.DPSVI`, with what the fit declared public.
        **kwargs: Keyword arguments of the model.

    Raises:
        TypeError, ValueError: If posterior or budget are none, or the posterior has no model.
        UnsupportedModelError: If a record has several outcomes, a censored one, or a weight.
        BudgetError: If earlier runs have spent the budget.

    Example:
        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist, numpyro_dp
        >>> def model(x, y=None):
        ...     w = numpyro.sample("w", dist.Normal(0, 1))
        ...     with numpyro.plate("people", x.shape[0]):
        ...         numpyro.sample("y", dist.Poisson(jnp.exp(w * x)), obs=y)
        >>> x = jax.random.normal(jax.random.key(1), (5000,))
        >>> y = jax.random.poisson(jax.random.key(2), jnp.exp(x / 2))
        >>> posterior = numpyro_dp.fit(model, x, y, epsilon=1.0, rng_key=jax.random.key(0))
        >>> found = numpyro_dp.check(posterior, x, y, budget=numpyro_dp.PrivacyBudget(0.5, 1e-5),
        ...                          rng_key=jax.random.key(3))
        >>> bool(abs(found.ranks[0] - 0.1).max() < 0.1)
        True

    Guarantee:
        One Gaussian release. A record adds the parts of an interval in ten ranks, which are at
        least 0 and sum to 1, in one row of the table. So it adds a vector of norm at most 1, which
        is also its clip norm. A record that is masked, not finite or not possible adds 0. Draws and
        edges come from ``rng_key``, the posterior and invented records. Simulated outcomes come
        from secret seeds, one for each record.
    """
    if not isinstance(posterior, Posterior) or not isinstance(budget, PrivacyBudget):
        raise TypeError(
            "Expected check(posterior, *args, budget=PrivacyBudget(...)) with a Posterior, got "
            f"{type(posterior).__name__} and {type(budget).__name__}. Take result.posterior."
        )
    check_rng_key(rng_key)
    source = posterior._known_source()
    args, kwargs = as_arrays(args, kwargs)
    structure = privacy.given_model(source.fn, {}).structure(args, kwargs)
    shared = structure.layout.rows(args, kwargs).shared
    outcomes = read_outcomes(Model(source.fn, structure), shared)
    one = bool(outcomes.number) or outcomes.scalar
    if not one or outcomes.censored or outcomes.weighted:
        raise UnsupportedModelError(
            "check compares one number a record with its prediction. This model has several "
            "outcomes a record (such as the rows of a unit), a censored one, or weights. Compare "
            "summaries of posterior.predict instead."
        )
    draw_key, edge_key, run_key = jax.random.split(rng_key, 3)
    latents = source.unconstrained(posterior.sample(draw_key, _DRAWS))
    draws = jax.vmap(outcomes.flat)(latents)
    edges = _edges(outcomes, draws, edge_key)
    settings = RunSettings(clip_norm=1.0, sampler=FullBatch(), budget=budget, privacy=privacy)
    public = draws, jnp.asarray(edges, draws.dtype)
    zeros = {"table": jnp.zeros((_ROWS, _RANKS), draws.dtype)}
    driver = OneSum(settings, LaplaceProblem(outcomes), public, zeros, _entries(outcomes))
    found, report = driver.total(run_key, *args, **kwargs)
    return PredictiveCheck(found["table"], report.noise_multiplier, edges, report)


def _predicted(
    outcomes: Outcomes, draws: Array, example: PyTree, key: Array
) -> tuple[Array, Array, Array]:
    """The predicted centre of a record, and the two ends of its outcome's interval of ranks."""
    (own,) = outcomes.own(example).values()
    own = jnp.reshape(own, ()).astype(draws.dtype)
    if outcomes.number:
        listed = outcomes.listed(draws, example)
        chances = jnp.mean(listed.probabilities, axis=1)
        values = listed.values.astype(draws.dtype)
        below, same = (jnp.sum(chances * found) for found in (values < own, listed.observed))
        return jnp.sum(chances * values), below, below + same
    keys = jax.random.split(key, len(draws))
    drawn = jax.vmap(lambda draw, key: outcomes.simulate(draw, example, key))(draws, keys)
    (values,) = drawn.values()
    # Of one half the centre, of the other the ranks: with the same errors, rows with high centres
    # would have low ranks.
    centre, values = jnp.reshape(values, (2, -1)).astype(draws.dtype)
    total = len(values) + 1
    below, same = (jnp.sum(found) / total for found in (values < own, values == own))
    # The mean of the middle half: counts have few medians, and a mean may not exist.
    quarter = len(centre) // 4
    return jnp.mean(jnp.sort(centre)[quarter:-quarter]), below, below + same + 1 / total


def _edges(outcomes: Outcomes, draws: Array, key: Array) -> np.ndarray:
    """Quantiles of the predictions of invented records."""
    rows, _ = outcomes.model.structure.layout.invented_records(_INVENTED)
    keys = jax.random.split(key, _INVENTED)
    found = jit_once(jax.vmap(lambda row, key: _predicted(outcomes, draws, row, key)[0]))(
        rows, keys
    )
    return np.nanquantile(np.asarray(found), np.arange(1, _ROWS) / _ROWS)


def _entries(outcomes: Outcomes) -> Callable[[PyTree, Array, Arrays], dict[str, Array]]:
    """What a record adds to the table, from draws and edges."""

    def signal(public: PyTree, key: Array, example: Arrays) -> dict[str, Array]:
        draws, edges = public
        if not outcomes.number:
            *rows, number = example
            example, key = tuple(rows), jax.random.fold_in(key, number)
        predicted, low, high = _predicted(outcomes, draws, example, key)
        places = jnp.linspace(0, 1, _RANKS + 1, dtype=draws.dtype)
        # Outcomes that are sure or impossible to the posterior have intervals of width 0.
        low = jnp.minimum(low, 1 - _NARROW)
        high = jnp.maximum(high, low + _NARROW)
        parts = jnp.diff(jnp.clip((places - low) / (high - low), 0, 1))
        row = jax.nn.one_hot(jnp.sum(predicted > edges), _ROWS, dtype=parts.dtype)
        (own,) = outcomes.own(example).values()
        good = outcomes.possible(example) & jnp.all(jnp.isfinite(own))
        (site,) = outcomes._sites(draws[0], example)
        for mask in masks_around(site["fn"]):
            good = good & jnp.all(mask)
        good = good & jnp.isfinite(predicted) & is_finite(example)
        return {"table": jnp.where(good, row[:, None] * parts, 0)}

    return signal
