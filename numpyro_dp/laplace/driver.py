"""``DPLaplace``: a normal approximation of the posterior whose intervals hold, from one call."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_dp.laplace import curvature, decode
from numpyro_dp.laplace.guess import first_guess
from numpyro_dp.laplace.prior import ModelPrior, read_prior, unconstrained
from numpyro_dp.laplace.schedule import PAIRS, Schedule, clip_norms, first_bounds, schedule
from numpyro_dp.laplace.signal import (
    LaplaceProblem,
    Request,
    StageOptimizer,
    staged_scores,
    symmetric,
)
from numpyro_dp.laplace.suitable import check_suitable
from numpyro_dp.model.density import Model
from numpyro_dp.model.frontend import Prepared, with_static
from numpyro_dp.model.outcomes import Outcomes, read_outcomes
from numpyro_dp.model.public import argument_names, declare
from numpyro_dp.model.structure import ModelStructure, read_model
from numpyro_dp.posterior.posterior import Posterior
from numpyro_dp.privacy.mechanism.staged import StagedGaussian
from numpyro_dp.privacy.once import check_outside_trace
from numpyro_dp.privacy.sampling import FullBatch
from numpyro_dp.run import checks
from numpyro_dp.run.driver import Driver
from numpyro_dp.run.settings import Method, RunSettings, takes_settings
from numpyro_dp.run.spending import begun, plan_for, spent_by
from numpyro_dp.run.state import SensitiveState

__all__ = ["DPLaplace"]


class DPLaplace:
    r"""A differentially private posterior that knows its own noise, without settings.

    ``run(rng_key, *args)`` with the whole data set returns a
    :class:`~numpyro_dp.posterior.Posterior`. Seven full batches each release the sum of
    model-centred scores and of their curvature at draws from the posterior so far
    (:mod:`numpyro_dp.laplace.signal`), and a linear model with errors in its matrix turns them into
    the next posterior (:mod:`numpyro_dp.laplace.decode`):

    .. math::
        S_j = H(\phi - m_j) + \text{noise}_j + E(\phi - m_j), \qquad
        \phi \mid \theta \sim N(\theta, \kappa H^{-1}), \qquad \theta \sim \text{prior}.

    So intervals hold the noise of privacy, whatever the budget: without any information the
    posterior is the prior. The result is multiplied by the model's exact prior.

    It takes models with latents that all records share and an outcome that can be simulated:
    generalised linear models, several outcomes a record, weights, masks, mixtures with summed-out
    assignments, group effects in their centred form.

    Args:
        model: A NumPyro model.
        budget: What the run may spend.
        scales: Public scale of columns, by name of the argument: a number, or one for each column;
            about their root mean square. By default 1 is guessed, and the result says so. A wrong
            guess costs accuracy, not validity.
        noise_multiplier, secret_key, accountant, data_plate, microbatch_size, mesh, public,
            repetition: As for :class:`~numpyro_dp.DPSVI`.
        **static_kwargs: Public, constant keywords of the model.

    Raises:
        TypeError, ValueError: Name the value, the range and the remedy.

    Example:
        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
        >>> from numpyro_dp import DPLaplace, PrivacyBudget
        >>> def model(x, y=None):
        ...     w = numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))
        ...     with numpyro.plate("people", x.shape[0]):
        ...         numpyro.sample("y", dist.Bernoulli(logits=x @ w), obs=y)
        >>> x = jax.random.normal(jax.random.key(1), (5000, 3))
        >>> y = (jax.random.uniform(jax.random.key(2), 5000) < jax.nn.sigmoid(x[:, 0])) * 1
        >>> laplace = DPLaplace(model, budget=PrivacyBudget(1.0, 1e-5), secret_key=2024)
        >>> posterior = laplace.run(jax.random.key(0), x, y)
        >>> table = posterior.summary(prob=0.9)["w"]
        >>> bool(table["lower"][0] < 1 < table["upper"][0])
        True

    Guarantee:
        Everything in the posterior is (epsilon, delta)-differentially private under the budget's
        relation. A release has three parts, each a sum over records of what is at most its bound in
        norm: score C, curvature :math:`C_H` (Frobenius) and the score's power :math:`C^2`; each is
        divided by its bound and weighted, so that a record's whole signal has norm at most 1, and
        the mechanism clips it to 1 all the same. Step k adds Gaussian noise of standard deviation
        :math:`\sigma / \sqrt{a_k}` with shares that sum to 1: all steps together are one Gaussian
        mechanism of noise multiplier :math:`\sigma`. Draws, whitening, clip norms and decode read
        what was released before, the prior, N and invented records. Simulated outcomes come from
        secret numbers, one for each record.

    Reference:
        The method is the project's own; J. Dong, A. Roth, W. J. Su (2022), Gaussian differential
        privacy, JRSS B, for the composition.
    """

    @takes_settings(
        without=(
            "clip_norm", "sampler", "mechanism", "num_steps", "loss_release", "allow_sensitive",
        )
    )  # fmt: skip
    def __init__(
        self,
        model: Callable[..., Any],
        *,
        data_plate: str | None = None,
        scales: Mapping[str, Any] | None = None,
        settings: dict[str, Any],
        **static_kwargs: Any,
    ) -> None:
        checks.check_callable("model", model)
        self.model, self.static_kwargs, self.data_plate = model, static_kwargs, data_plate
        self.scales = _check_scales(scales)
        self.settings = RunSettings(
            clip_norm=1.0, sampler=FullBatch(), mechanism=StagedGaussian((1.0,)), **settings
        )
        if self.settings.budget is None and not self.settings.noise_multiplier:
            raise ValueError(
                "Expected budget= (or a noise_multiplier above 0): the decode must know its noise. "
                "Write budget=PrivacyBudget(1.0, 1e-5)."
            )
        self._declared = declare(self.settings.public, static_kwargs)
        self._drivers: dict[Any, _Stages] = {}

    def run(self, rng_key: Array, *args: Any, **kwargs: Any) -> Posterior:
        """Returns the private posterior.

        Args:
            rng_key: Key of draws of the posterior, and of invented records; not of noise.
            *args: Arguments of the model, with the whole data set.
            **kwargs: Keyword arguments of the model.

        Raises:
            UnsupportedModelError: If the model cannot be private as it is written, or another
                driver is the one that takes it.
            BudgetError: If earlier runs have spent the budget. No record has been read then.
            NoiseReuseError: If JAX traces the call, or another run had the same ``secret_key``.
        """
        check_outside_trace("DPLaplace.run")
        checks.check_rng_key(rng_key)
        fn = with_static(self.model, self.static_kwargs)
        structure = read_model(fn, args, kwargs, self.data_plate, self._declared)
        outcomes = read_outcomes(Model(fn, structure), structure.layout.rows(args, kwargs).shared)
        guess_key, run_key, sample_key = jax.random.split(rng_key, 3)
        prior = read_prior(outcomes, guess_key)
        scales = self._scales_by_number(structure, args, kwargs)
        whitening, _ = first_guess(prior, scales, guess_key)
        check_suitable(prior, guess_key)
        plan = self._schedule(structure, outcomes.size)
        driver = self._driver(plan, outcomes)
        stages = _Run(prior, plan, whitening)
        state = driver.start(run_key, stages, args, kwargs)
        report = spent_by(driver.settings, state, len(plan.shares))
        with begun(driver.settings, state):
            driver.stages(state, stages, args, kwargs, report)
        return self._posterior(stages, report, sample_key, not scales)

    def _schedule(self, structure: ModelStructure, size: int) -> Schedule:
        number = structure.layout.num_examples
        noise = plan_for(self.settings, number, 1).noise_multiplier
        return schedule(1 / noise, size, number)

    def _driver(self, plan: Schedule, outcomes: Outcomes) -> _Stages:
        settings = self.settings.changed(mechanism=StagedGaussian(plan.shares))
        return _Stages(settings, outcomes)

    def _scales_by_number(
        self, structure: ModelStructure, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> dict[int, Any]:
        """Scales by the number of the record array."""
        if not self.scales:
            return {}
        names = [*argument_names(self.model, args), *kwargs]
        unknown = sorted(set(self.scales) - set(names))
        if unknown:
            raise ValueError(
                f"Expected scales= to name arguments of the model among {names}, got {unknown}."
            )
        leaves = jax.tree.leaves_with_path((args, kwargs))
        found: dict[int, Any] = {}
        records = [p for (p, _), kind in zip(leaves, structure.layout.kinds, strict=True)
                   if kind == "r"]  # fmt: skip
        for number, path in enumerate(records):
            name = names[path[1].idx] if path[0].idx == 0 else path[1].key
            if name in self.scales:
                shape = structure.layout.shapes[number][0]
                found[number] = _check_scale(name, self.scales[name], shape)
        return found

    def _posterior(self, stages: _Run, report: Any, rng_key: Array, guessed: bool) -> Posterior:
        prior = stages.prior
        precision, linear = stages.likelihood()
        notes = []
        if guessed:
            notes.append("The scale of columns was guessed to be about 1: scales= says it better.")
        return Posterior(
            model=with_static(self.model, self.static_kwargs),
            draws=prior.posterior(precision, linear, rng_key),
            prior=prior.draw,
            unconstrain=functools.partial(unconstrained, prior.outcomes),
            privacy=report,
            method=f"DPLaplace, {len(stages.plan.shares)} releases of {report.plan.num_examples} "
            "records",
            notes=tuple(notes),
        )


class _Run:
    """What a run has learnt so far: what was released, and what follows from it.

    Attributes:
        prior: Of the model.
        plan: Releases to come and past.
    """

    def __init__(self, prior: ModelPrior, plan: Schedule, diagonal: np.ndarray) -> None:
        self.prior, self.plan = prior, plan
        size = len(diagonal)
        self.seen = np.ones(size, bool)
        self.whitening, self.template = np.diag(diagonal), np.eye(size)
        self.mean, self.covariance = prior.decoded.mean, prior.decoded.covariance
        self.kappa, self.stages = 1.0, ()
        self.size = size
        self.number = prior.outcomes.model.structure.layout.num_examples

    def request(self, release: int) -> Request:
        """What to ask for in a release, in all coordinates."""
        first = bool(self.plan.first) and release == 0
        kept = np.ix_(self.seen, self.seen)
        factor, whitening = np.zeros((self.size, self.size)), np.zeros((self.size, self.size))
        factor[kept] = np.linalg.cholesky(self.covariance)
        whitening[kept] = self.whitening
        mean = np.array(self.prior.decoded.mean)
        mean[self.seen] = self.mean
        numbers = mean, factor, whitening, self._clips(release, first), self.plan.weights(release)
        return Request(jnp.asarray(first), *(jnp.asarray(x, jnp.float32) for x in numbers))

    def read(self, release: int, released: np.ndarray) -> None:
        """Decodes what a release gave."""
        released = np.asarray(released, np.float64)
        score, triangle, power = np.split(released, [self.size, len(released) - 1])
        first = bool(self.plan.first) and release == 0
        clips, weights = self._clips(release, first), self.plan.weights(release)
        mu = self.plan.mu_of(release)
        if first:
            row, scales = clips[0] * score / weights[0], clips[1] * triangle[: self.size]
            noise = clips[0] / mu[0], clips[1] / mu[1]
            self._read_first(scales / weights[1], row, *noise)
            return
        kept = np.ix_(self.seen, self.seen)
        stage = curvature.read_stage(
            self.mean, self.covariance, self.whitening, self.template,
            clips[0] * score[self.seen] / weights[0],
            clips[1] * symmetric(triangle / weights[1])[kept],
            clips[0] / mu[0], clips[1] / mu[1],
        )  # fmt: skip
        self.stages = decode.with_discrepancies((*self.stages, stage))
        noise = clips[0] ** 2 / mu[2]
        noisy = clips[0] ** 2 * power[0] / weights[2]
        stage = self.stages[-1]
        self.kappa = decode.sampling_ratio(stage, noisy, noise)
        begin = self.mean, self.covariance
        self.mean, self.covariance = decode.decode(self._prior, self.stages, self.kappa, begin)
        self.whitening = curvature.next_whitening(stage, self._prior, self.kappa)
        self.template = self.whitening @ stage.curvature_floored @ self.whitening

    def likelihood(self) -> tuple[np.ndarray, np.ndarray]:
        """Precision and linear term of what was released, in all coordinates."""
        precision, linear = decode.released_likelihood(self.mean, self.covariance, self._prior)
        whole, right = np.zeros((self.size, self.size)), np.zeros(self.size)
        whole[np.ix_(self.seen, self.seen)], right[self.seen] = precision, linear
        return whole, right

    @property
    def _prior(self) -> curvature.Prior:
        """That of the coordinates that were seen."""
        mean, covariance = self.prior.decoded.mean, self.prior.decoded.covariance
        if self.seen.all():
            return self.prior.decoded
        kept = np.ix_(self.seen, self.seen)
        return curvature.Prior(mean[self.seen], np.linalg.inv(covariance[kept]))

    def _clips(self, release: int, first: bool) -> np.ndarray:
        """Of the coordinates that were seen."""
        size = int(self.seen.sum())
        if first:
            return first_bounds(size, self.number)
        return clip_norms(size, self.number, float(np.linalg.norm(self.plan.mu_of(release))))

    def _read_first(
        self, scales: np.ndarray, row: np.ndarray, row_noise: float, scale_noise: float
    ) -> None:
        seen = curvature.seen_coordinates(scales, scale_noise)
        prior, diagonal = self.prior.decoded, np.diag(self.whitening)
        self.seen = seen
        self.mean = prior.mean[seen]
        self.covariance = prior.covariance[np.ix_(seen, seen)]
        whitening, mean_row = np.diag(diagonal[seen]), (row[seen], row_noise)
        guess = curvature.start(whitening, scales[seen], scale_noise, mean_row, self.number)
        self.whitening = curvature.first_whitening(self._prior, guess)
        self.template = self.whitening @ guess @ self.whitening


class _Stages(Driver):
    """The driver of the releases of one schedule."""

    def __init__(self, settings: RunSettings, outcomes: Outcomes) -> None:
        method = Method(staged_scores(PAIRS), StageOptimizer(), "DPLaplace")
        super().__init__(method, settings)
        self._outcomes = outcomes

    def get_params(self, state: SensitiveState) -> Any:
        """Returns what is asked of the records."""
        return state.optim_state[0]

    def start(
        self, rng_key: Array, run: _Run, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> SensitiveState:
        """Returns the state before the first release."""
        self._first = run.request(0)
        structure = self._outcomes.model.structure
        return self._init(rng_key, len(run.plan.shares), args, kwargs, None, structure)

    def stages(
        self,
        state: SensitiveState,
        run: _Run,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        report: Any,
    ) -> None:
        """Makes all releases; what they gave is in ``run``."""
        session = self._session(args, kwargs)
        rows = session.rows(args, kwargs)
        for release in range(len(run.plan.shares)):
            _, empty = state.optim_state
            state = state._replace(optim_state=(run.request(release), empty))
            state = session.run(state, rows, 1, 1, False, report)[0]
            run.read(release, state.optim_state[1])

    def _can_start(self, session: Any, prepared: Prepared) -> bool:
        """The first guess has seen finite scores; a signal is finite in any case."""
        return True

    def _structure(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ModelStructure:
        return self._outcomes.model.structure

    def _prepare(
        self,
        structure: ModelStructure,
        rng_key: Array,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        init_params: dict[str, Any] | None,
    ) -> Prepared:
        problem = LaplaceProblem(self._outcomes)
        return Prepared(problem, self.method.optim.init(self._first), rng_key)


def _check_scales(scales: Any) -> dict[str, Any]:
    if scales is None:
        return {}
    if not isinstance(scales, Mapping):
        raise TypeError(
            f"Expected scales= as a dict by argument of the model, got {type(scales).__name__}. "
            'Write scales={"x": [1.0, 40.0]}.'
        )
    return dict(scales)


def _check_scale(name: str, scale: Any, shape: tuple[int, ...]) -> np.ndarray:
    try:
        found = np.asarray(scale, np.float64)
        np.broadcast_to(found, shape)
    except (TypeError, ValueError):
        found = np.zeros(())
    if not np.all(np.isfinite(found)) or np.any(found <= 0):
        raise ValueError(
            f"Expected scales of {name!r} as positive numbers, one for all or one for each of its "
            f"columns {shape}, got {scale!r}."
        )
    return found
