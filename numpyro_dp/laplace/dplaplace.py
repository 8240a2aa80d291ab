"""``DPLaplace``: a normal approximation of the posterior, from one call."""

from __future__ import annotations

import copy
import dataclasses
import math
import os
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from numpyro_dp._validate import check_in
from numpyro_dp.core import Args, Kwargs, PyTree, Values
from numpyro_dp.laplace.guess import FirstGuess, first_guess
from numpyro_dp.laplace.schedule import Kind, Schedule, schedule
from numpyro_dp.laplace.stages import Releases, Run, Stages, most_releases
from numpyro_dp.laplace.suitable import check_suitable
from numpyro_dp.laplace.tail import has_tail
from numpyro_dp.model.density import Model
from numpyro_dp.model.frames import as_arrays
from numpyro_dp.model.frontend import arguments_key
from numpyro_dp.model.outcomes import Outcomes, read_outcomes
from numpyro_dp.model.public import argument_names, record_arguments, values_given
from numpyro_dp.model.structure import ModelStructure
from numpyro_dp.model.units import split_unit
from numpyro_dp.posterior.diagnosis import (
    finding_of_arrival,
    findings_of_normal,
    findings_of_pooling,
    findings_of_spread,
    findings_of_unseen,
)
from numpyro_dp.posterior.from_model import ModelSource
from numpyro_dp.posterior.posterior import Posterior
from numpyro_dp.posterior.prior import ModelPrior, read_prior
from numpyro_dp.privacy.budget import PrivacyBudget
from numpyro_dp.privacy.keys import check_rng_key
from numpyro_dp.privacy.mechanism.staged import StagedGaussian
from numpyro_dp.privacy.once import check_outside_trace
from numpyro_dp.privacy.plan import PrivacyReport
from numpyro_dp.privacy.sampling import FullBatch
from numpyro_dp.run.checkpoint import checkpoint_of, started, without_own_run
from numpyro_dp.run.loop import opened_bar
from numpyro_dp.run.results import Forecast, forecast
from numpyro_dp.run.settings import Execution, Privacy, RunSettings, without
from numpyro_dp.run.state import SensitiveState, plan_for, spent_by


class DPLaplace:
    r"""A differentially private posterior with intervals that include the privacy noise.

    ``run(rng_key, *args)`` takes the whole data set and returns a
    :class:`~numpyro_dp.posterior.Posterior`. You choose no settings. Small releases find the size
    of scores and the scale of each coordinate. Then come seven full batches, and up to twelve more
    while the run is far from the posterior. Each releases the sum of model-centred scores and of
    their curvature, at draws from the posterior so far (:mod:`numpyro_dp.laplace.signal`). A linear
    model with errors in its matrix turns them into the next posterior
    (:mod:`numpyro_dp.laplace.decode`):

    .. math::
        S_j = H(\phi - m_j) + \text{noise}_j + E(\phi - m_j), \qquad
        \phi \mid \theta \sim N(\theta, \kappa H^{-1}), \qquad \theta \sim \text{prior}.

    So intervals include the privacy noise for every budget. With no information from the records
    the posterior is the prior. The result is multiplied by the model's exact prior.

    It supports models with latents that all records share and an outcome that can be simulated.
    Examples are generalised linear models, several outcomes a record, weights, masks, mixtures with
    summed-out assignments, and group effects in their centred form. It also supports times that are
    censored from one side (:mod:`numpyro_dp.laplace.censored`).

    Args:
        model: A NumPyro model.
        budget: Epsilon and delta that the run may spend.
        scales: Public scale of columns by name of the argument: a number, or one for each column,
            of about their root mean square. By default all columns have one scale. A small release
            finds it, or it is 1 if the release would cost too much. The result shows which. A wrong
            scale costs accuracy, not validity.
        robust: Makes intervals for the best fit of a model that need not be right, and for rows
            that depend on each other inside of a unit (``Privacy(max_rows_per_unit=)``). The
            covariance is :math:`H^{-1} J H^{-1}` with the variance J of the scores, as in standard
            errors that are robust or clustered. A tenth of the budget goes into J.
        privacy, execution: As for :class:`~numpyro_dp.DPSVI`.
        **static_kwargs: Public, constant keywords of the model.

    Raises:
        TypeError, ValueError: Name the value, the range and the remedy.

    Example:
        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
        >>> from numpyro_dp import DPLaplace, Privacy, PrivacyBudget
        >>> def model(x, y=None):
        ...     w = numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))
        ...     with numpyro.plate("people", x.shape[0]):
        ...         numpyro.sample("y", dist.Bernoulli(logits=x @ w), obs=y)
        >>> x = jax.random.normal(jax.random.key(1), (5000, 3))
        >>> y = (jax.random.uniform(jax.random.key(2), 5000) < jax.nn.sigmoid(x[:, 0])) * 1
        >>> laplace = DPLaplace(model, budget=PrivacyBudget(1.0, 1e-5),
        ...                     privacy=Privacy(secret_key=2026))
        >>> posterior = laplace.run(jax.random.key(0), x, y)
        >>> table = posterior.summary(prob=0.9)["w"]
        >>> bool(table["lower"][0] < 1 < table["upper"][0])
        True

    Guarantee:
        Everything in the posterior is (epsilon, delta)-differentially private under the budget's
        relation. A release sums up to seven parts of each record. These are the score, the
        curvature and the score's power. The last stage adds how much the outcome's score exceeds
        that power, and with ``robust`` the square of the score. Earlier ones add the loss of
        curvature, and two where the score's norm lies (:mod:`numpyro_dp.laplace.tail`). In this
        order their norms are at most C, :math:`C_H` (Frobenius), :math:`C^2`, :math:`C_e^2`,
        :math:`C^2` (Frobenius), :math:`2 C_H` and 1. Each part is divided by its bound and
        weighted, so a record's whole signal has norm at most 1. The mechanism also clips it to 1.
        Once the tail tells that the model is wrong, the score is released in parts: clipped at the
        smallest norm, and in shells (:mod:`numpyro_dp.laplace.shells`). Each part is divided by its
        own bound. The squares of their weights sum to that of the score.

        The release of the size has one entry in [0, 1]. The release of scales has two entries that
        are clipped to their bounds. N, the number of latents and the budget decide whether each of
        these two is made.

        Step k adds Gaussian noise of standard deviation :math:`\sigma / \sqrt{a_k}`. The share
        :math:`a_k` may depend on earlier releases, and a filter keeps their sum at most 1. So all
        steps together are one Gaussian mechanism of noise multiplier :math:`\sigma`. Draws,
        whitening, clip norms and decode read earlier releases, the prior, N and invented records.
        Simulated outcomes come from secret seeds, one for each record.

    Reference:
        The method is the project's own. For the composition: A. Smith, A. Thakurta (2022), Fully
        adaptive composition for Gaussian differential privacy.
    """

    model: Callable[..., object]
    static_kwargs: Kwargs

    def __init__(
        self,
        model: Callable[..., object],
        *,
        scales: Mapping[str, ArrayLike | Sequence[float]] | None = None,
        robust: bool = False,
        budget: PrivacyBudget | None = None,
        privacy: Privacy = Privacy(),
        execution: Execution = Execution(),
        **static_kwargs: object,
    ) -> None:
        self.model, self.static_kwargs = model, static_kwargs
        self.scales: Values = _check_scales(scales)
        check_in("robust", robust, (False, True))
        self.robust = robust
        own = without(privacy, "DPLaplace", "mechanism", "loss_release")
        # Each entry of the signal is divided by its own bound, so the clip norm of all is 1.
        self.settings: RunSettings = RunSettings(
            clip_norm=1.0, sampler=FullBatch(), budget=budget,
            privacy=dataclasses.replace(own, mechanism=StagedGaussian()), execution=execution,
        )  # fmt: skip
        if self.settings.budget is None and not self.settings.privacy.noise_multiplier:
            raise ValueError(
                "DPLaplace needs privacy noise, because the decode models it. Pass "
                "budget=PrivacyBudget(1.0, 1e-5), or a noise_multiplier above 0."
            )
        self._given = privacy.given_model(model, static_kwargs)
        self._structures: dict[Hashable, ModelStructure] = {}
        self._prepared: dict[Hashable, tuple[Hashable, ModelPrior, FirstGuess]] = {}
        self._drivers: dict[Hashable, Stages] = {}

    def run(
        self,
        rng_key: Array,
        *args: PyTree,
        progress_bar: bool = True,
        stream: bool = False,
        checkpoint: str | os.PathLike[str] | None = None,
        **kwargs: PyTree,
    ) -> Posterior:
        """Returns the private posterior.

        Args:
            rng_key: Key of draws from the posterior and of invented records, not of noise.
            *args: Arguments of the model, with the whole data set.
            progress_bar: Shows what is being done, the releases, and the epsilon spent.
            stream: Leaves the records on the host (arrays, memory maps, ``to_numpy()`` of an Arrow
                column), for data larger than the device's memory. The result is the same.
            checkpoint: Folder for the releases so far, as for :meth:`numpyro_dp.DPSVI.run`.
            **kwargs: Keyword arguments of the model.

        Raises:
            UnsupportedModelError: If the model cannot be private as it is written, or needs another
                driver.
            BudgetError: If earlier runs have spent the budget. The run has then read no record.
            NoiseReuseError: If JAX traces the call, or another run had the same ``secret_key``.
        """
        check_outside_trace("DPLaplace.run")
        check_rng_key(rng_key)
        args, kwargs = as_arrays(args, kwargs)
        settings = without_own_run(self.settings, checkpoint)
        if settings is not self.settings:
            twin = copy.copy(self)  # for this call only, so that a refused call changes nothing
            twin.settings, twin._drivers = settings, {}
            return twin.run(
                rng_key, *args, progress_bar=progress_bar, stream=stream, checkpoint=checkpoint,
                **kwargs,
            )  # fmt: skip
        with opened_bar(progress_bar, unit="release") as bar:
            return self._run(rng_key, args, kwargs, stream, checkpoint, bar)

    def _run(
        self,
        rng_key: Array,
        args: Args,
        kwargs: Kwargs,
        stream: bool,
        checkpoint: str | os.PathLike[str] | None,
        bar: Any,
    ) -> Posterior:
        key, prior, guess = self._prepared_for(args, kwargs)
        outcomes = prior.outcomes
        plan = self._schedule(outcomes)
        if key not in self._drivers:
            self._drivers[key] = Stages(self.settings, outcomes, guess.groups, self.robust)
        # The driver is kept for its compiled programs. `stages` stores what this call releases.
        driver, stages = self._drivers[key], Run(prior, plan, guess, self.robust)
        state = driver.start(rng_key, stages, args, kwargs)
        settings, releases = driver.settings, most_releases(plan)
        report = spent_by(settings, state, releases)
        scales = values_given("scales", {n: np.asarray(s) for n, s in self.scales.items()})
        report = dataclasses.replace(report, public=report.public + scales)
        session = driver._session(args, kwargs)
        rows = (session.host_rows if stream else session.rows)(args, kwargs)
        progress = Releases.before(state.opened, releases)
        kept = checkpoint_of(
            checkpoint, None, "DPLaplace", settings, [report], rng_key,
            lambda: session.program(session.begin(state, 1, 1), rows),
            session.records(args, kwargs), stream=stream,
        )  # fmt: skip

        def left(progress: Releases) -> tuple[list[SensitiveState], int]:
            return [state.closed(progress.state)], releases - int(progress.done)

        run = started(settings, [state], progress, [report], kept, left, lambda: [report])
        with run as (made, (report,)):
            driver.stages(state.closed(made.state), stages, session, rows, made, report, bar, kept)
        return self._posterior(stages, report, rng_key)

    def plan(self, *args: PyTree, **kwargs: PyTree) -> Forecast:
        """Returns how far the noise will move the posterior, at best. Reads no record.

        Args:
            *args: Arguments of the model, or arrays of the same shapes.
            **kwargs: Keyword arguments of the model.
        """
        _, prior, _ = self._prepared_for(*as_arrays(args, kwargs))
        number = prior.outcomes.model.structure.layout.num_examples
        return forecast(plan_for(self.settings, number, 1), prior.outcomes.size, 1)

    def _prepared_for(self, args: Args, kwargs: Kwargs) -> tuple[Hashable, ModelPrior, FirstGuess]:
        """Returns a cache key, the prior and the first guess. All are public."""
        shapes = arguments_key(args, kwargs, self._given.max_rows)
        if shapes not in self._structures:
            self._structures[shapes] = self._given.structure(args, kwargs)
        structure = self._structures[shapes]
        shared = structure.layout.rows(args, kwargs).shared
        # A prior may read public arrays, so their values are part of the key.
        key = shapes, tuple(np.asarray(each).tobytes() for each in shared)
        if key not in self._prepared:
            outcomes = read_outcomes(Model(self._given.fn, structure), shared)
            public_key = jax.random.key(0)  # fixed, so that runs can share what is computed here
            prior = read_prior(outcomes, public_key)
            check_suitable(prior, public_key)
            scales = self._scales_by_number(structure, args, kwargs)
            self._prepared[key] = key, prior, first_guess(prior, scales, public_key)
        return self._prepared[key]

    def _schedule(self, outcomes: Outcomes) -> Schedule:
        number = outcomes.model.structure.layout.num_examples
        noise = plan_for(self.settings, number, 1).noise_multiplier
        return schedule(1 / noise, outcomes.size, number, has_tail(outcomes), self.robust)

    def _scales_by_number(
        self, structure: ModelStructure, args: Args, kwargs: Kwargs
    ) -> dict[int, np.ndarray]:
        """Returns scales by the number of the record array."""
        if not self.scales:
            return {}
        _, kwargs = split_unit(kwargs, structure.layout.max_rows)
        names = [*argument_names(self.model, args), *kwargs]
        unknown = sorted(set(self.scales) - set(names))
        if unknown:
            raise ValueError(
                f"Expected scales= to name arguments of the model among {names}, got {unknown}. "
                "Correct the names."
            )
        found: dict[int, np.ndarray] = {}
        records = record_arguments(self.model, structure.layout.kinds, args, kwargs)
        for number, (name, _) in enumerate(records):
            if name in self.scales:
                shape = structure.layout.shapes[number][0]
                found[number] = _check_scale(name, self.scales[name], shape)
        return found

    def _posterior(self, stages: Run, report: PrivacyReport, rng_key: Array) -> Posterior:
        prior = stages.prior
        precision, linear = stages.likelihood()
        notes = []
        if not self.scales:
            size = "equal" if Kind.SIZE in stages.plan.kinds else "unit"
            notes.append(
                f"Columns were taken to have about {size} scale. "
                "If not, divide by public constants."
            )
        outcomes, releases = prior.outcomes, len(stages.plan.kinds)
        source = ModelSource.of(outcomes.model, outcomes.shared, {})
        of_units = report.max_rows is not None
        records = "units" if of_units else "records"
        method = f"DPLaplace, {releases} releases of {report.plan.num_examples} {records}"
        vectors = prior.vectors(precision, linear, rng_key)
        draws = prior.drawn(vectors)
        findings = ()
        if math.isfinite(report.epsilon):
            moments = prior.decoded.updated(precision, linear)
            findings = findings_of_normal(*moments, prior.decoded)
            findings += findings_of_pooling(prior, vectors, moments[1])
            spread = (1.0, 0.0) if self.robust else stages.spread  # in the intervals
            findings += findings_of_spread(*spread, of_units, bool(outcomes.number), *stages.misfit)
            if not stages.arrived:
                findings += [finding_of_arrival(float(np.max(stages.steps())), prior.decoded)]
            if not any(finding.bad for finding in findings):
                findings += findings_of_unseen(*stages.unseen)
        likelihood = prior.likelihood(precision, linear)
        posterior = source.posterior(
            draws, report, method, tuple(notes), findings=findings, likelihood=likelihood
        )
        posterior.warn()
        return posterior


def share_programs(driver: DPLaplace, earlier: DPLaplace) -> None:
    """Gives a driver what an earlier one of the same model has compiled.

    The two may differ in their budgets alone. All that is shared is public.
    """
    driver._structures, driver._prepared = earlier._structures, earlier._prepared
    drivers = earlier._drivers.items()
    driver._drivers = {key: each.with_budget(driver.settings) for key, each in drivers}


def _check_scales(scales: object) -> Values:
    if scales is None:
        return {}
    if not isinstance(scales, Mapping):
        raise TypeError(
            f"Expected scales= as a dict by argument of the model, got {type(scales).__name__}. "
            'Write scales={"x": [1.0, 40.0]}.'
        )
    return dict(scales)


def _check_scale(name: str, scale: PyTree, shape: tuple[int, ...]) -> np.ndarray:
    try:
        found = np.asarray(scale, np.float64)
        np.broadcast_to(found, shape)
    except (TypeError, ValueError):
        found = np.zeros(())
    if not np.all(np.isfinite(found)) or np.any(found <= 0):
        raise ValueError(
            f"Expected scales of {name!r} as positive numbers, one for all or one for each of its "
            f"columns {shape}, got {scale!r}. Use about the root mean square of each column."
        )
    return found
