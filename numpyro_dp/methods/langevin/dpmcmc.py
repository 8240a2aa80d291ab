"""``DPMCMC``: the interface of ``numpyro.infer.MCMC``, with a privacy budget."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpyro.diagnostics import print_summary
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoDelta

from numpyro_dp._compat import POINT_SUFFIX
from numpyro_dp._validate import check_int, check_real
from numpyro_dp.core import Sampler
from numpyro_dp.methods.langevin.kernels import SGLD, as_optimizer, langevin
from numpyro_dp.methods.langevin.mixing import draws_of_chains, mixing_of
from numpyro_dp.model.density import Model
from numpyro_dp.model.frames import as_arrays
from numpyro_dp.model.frontend import Call, Frontend, Prepared
from numpyro_dp.model.public import UnsupportedModelError
from numpyro_dp.model.records import Rows
from numpyro_dp.model.structure import ModelStructure
from numpyro_dp.posterior.diagnosis import Finding, without_noise
from numpyro_dp.posterior.draws import SiteDraws
from numpyro_dp.posterior.from_model import ModelSource
from numpyro_dp.posterior.posterior import Posterior
from numpyro_dp.posterior.scores import NOISE_INCLUDED
from numpyro_dp.privacy.budget import PrivacyBudget
from numpyro_dp.privacy.keys import check_rng_key
from numpyro_dp.privacy.mechanism.gaussian import build_mechanism
from numpyro_dp.privacy.once import check_outside_trace
from numpyro_dp.privacy.plan import PrivacyReport
from numpyro_dp.run.checkpoint import (
    Checkpoint,
    check_every,
    checkpoint_of,
    started,
    without_own_run,
)
from numpyro_dp.run.course import Course, Progress, opened_bar
from numpyro_dp.run.driver import Driver
from numpyro_dp.run.forecast import Forecast, forecast
from numpyro_dp.run.score_sums import MOST_LATENTS
from numpyro_dp.run.session import Session
from numpyro_dp.run.settings import Execution, Method, Privacy, RunSettings, without
from numpyro_dp.run.spending import noise_fields, plan_for, secret_of, spent_by
from numpyro_dp.run.state import SensitiveState

__all__ = ["DPMCMC"]

_SLACK = 1e-5  # noise multipliers are rounded up to float32
_INDEPENDENT = "DPMCMC takes the noise for the thermal noise of its chains, which is independent"


class DPMCMC:
    r"""Differentially private Markov chain Monte Carlo by stochastic gradient Langevin dynamics.

    Use it like ``numpyro.infer.MCMC``. Call ``run(rng_key, *args)`` with the whole data set, then
    ``print_summary()``, or ``get_samples()`` for ``Predictive(model, posterior_samples=...)``.

    The noise that makes the scores private is also the noise of the dynamics. It limits the step
    size :math:`\eta`. With clip norm C, inclusion probability q, noise multiplier :math:`\sigma`
    and temperature T,

    .. math:: \eta\,\sigma^2 C^2 \le 2\,T q^2 \quad (\text{SGHMC with friction a: } 2\,a\,T q^2).

    The default is the largest step size. If the step is smaller, the kernel adds the missing
    Langevin noise. If it is larger, ``run`` raises an error.

    Args:
        kernel: :class:`~numpyro_dp.SGLD`, :class:`~numpyro_dp.PreconditionedSGLD` or
            :class:`~numpyro_dp.SGHMC`.
        num_warmup: Steps of a chain before its first sample. They cost budget like all others.
        num_samples: Steps of a chain after warmup.
        num_chains: Number of chains, which run in one compiled call. All chains share the budget:
            each has its own noise and batches, and their steps compose.
        thinning: One of this many steps is kept. Must divide ``num_samples``.
        clip_norm: Largest norm of one record's score: a number, or a dict by latent site.
        sampler, budget, privacy, execution: As for :class:`~numpyro_dp.DPSVI`.
        progress_bar: Shows what is being done, and steps and epsilon spent if there is one chain.
        **static_kwargs: Public, constant keywords of the model.

    Raises:
        TypeError, ValueError: If an argument is out of range.

    Example:
        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
        >>> from numpyro_dp import DPMCMC, Privacy, PrivacyBudget, SGLD
        >>> from numpyro_dp.samplers import FullBatch
        >>> def model(x):
        ...     mean = numpyro.sample("mean", dist.Normal(0, 10))
        ...     with numpyro.plate("records", x.shape[0]):
        ...         numpyro.sample("x", dist.Normal(mean, 1), obs=x)
        >>> x = 3 + jax.random.normal(jax.random.key(1), (2000,))
        >>> mcmc = DPMCMC(SGLD(model), num_warmup=100, num_samples=300, clip_norm=5.0,
        ...               sampler=FullBatch(), budget=PrivacyBudget(4.0, 1e-5),
        ...               privacy=Privacy(secret_key=2024), progress_bar=False)
        >>> mcmc.run(jax.random.key(0), x)
        >>> samples = mcmc.get_samples()
        >>> samples["mean"].shape, bool(abs(samples["mean"].mean() - 3) < 0.2)
        ((300,), True)

    Guarantee:
        Samples, summaries and ``privacy`` of all chains together are (epsilon, delta)-
        differentially private under the budget's relation. Each step of each chain is the Gaussian
        mechanism on a clipped sum over a sampled batch. Priors, step sizes and further noise read
        no record. Preconditioners read released scores. The number of records is public.

    Reference:
        Zhang, Bu, Chen, Long (2021), Differentially private Bayesian neural networks on accuracy,
        privacy and reliability, Algorithm 2.
    """

    kernel: SGLD
    num_chains: int

    def __init__(
        self,
        kernel: SGLD,
        *,
        num_warmup: int,
        num_samples: int,
        clip_norm: Any,
        sampler: Sampler,
        num_chains: int = 1,
        thinning: int = 1,
        progress_bar: bool = True,
        budget: PrivacyBudget | None = None,
        privacy: Privacy = Privacy(),
        execution: Execution = Execution(),
        **static_kwargs: Any,
    ) -> None:
        check_int("num_warmup", num_warmup, low=0)
        check_int("num_chains", num_chains, low=1)
        check_int("thinning", thinning, low=1)
        check_int("num_samples", num_samples, low=1)
        if num_samples % thinning:
            raise ValueError(
                f"Expected num_samples to be a multiple of thinning={thinning}, got {num_samples}. "
                f"Use {num_samples + -num_samples % thinning}."
            )
        self.settings: RunSettings = RunSettings(
            clip_norm=clip_norm, sampler=sampler, budget=budget,
            privacy=without(privacy, "DPMCMC", "loss_release"), execution=execution,
        )  # fmt: skip
        _check(kernel, self.settings)
        self.kernel, self.num_chains = kernel, num_chains
        self._sizes, self._num_steps = (num_warmup, num_samples, thinning), num_warmup + num_samples
        self._progress_bar = progress_bar
        guide = AutoDelta(kernel.model, init_loc_fn=kernel.init_strategy)
        svi = SVI(kernel.model, guide, as_optimizer(kernel), Trace_ELBO(), **static_kwargs)
        self._frontend = Frontend(privacy.given_model(kernel.model, static_kwargs), svi)
        self._driver = _Chain(self._frontend, self.settings)
        self._samples: dict[str, Array] | None = None
        self._report: PrivacyReport | None = None
        self._posterior: Posterior | None = None
        self._make_posterior: Callable[[], Posterior] | None = None

    def run(
        self,
        rng_key: Array,
        *args: Any,
        init_params: dict[str, Any] | None = None,
        checkpoint: Any = None,
        every: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Runs the chains.

        Args:
            rng_key: Key of initial positions and of the Langevin noise that ``run`` adds.
            *args: Arguments of the model, with the whole data set.
            init_params: Initial values of latent sites, the same for all chains. They are public.
                By default the kernel's ``init_strategy`` chooses them for each chain.
            checkpoint: Folder for the progress of the chains, as for :meth:`numpyro_dp.DPSVI.run`.
            every: About how many steps lie between two checkpoints. By default a 25th of the run.
            **kwargs: Keyword arguments of the model.

        Raises:
            UnsupportedModelError: If the model cannot be private as it is written.
            BudgetError: If the steps do not fit the budget. ``run`` has read no record then.
            ValueError: If a step is too large for the noise. ``run`` has read no record then.
            NoiseReuseError: If JAX traces the call, or another run had the same ``secret_key``.
        """
        check_outside_trace("DPMCMC.run")
        check_rng_key(rng_key)
        check_every(every, checkpoint)
        args, kwargs = as_arrays(args, kwargs)
        with opened_bar(self._progress_bar, self._num_steps) as bar:
            self._run(rng_key, args, kwargs, init_params, checkpoint, every, bar)

    def _run(
        self,
        rng_key: Array,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        init_params: dict[str, Any] | None,
        checkpoint: Any,
        every: int | None,
        bar: Any,
    ) -> None:
        settings = without_own_run(self.settings, checkpoint)
        structure = self._frontend.given.structure(args, kwargs)
        driver, num_examples = self._driver.with_settings(settings), structure.layout.num_examples
        step_sizes, chains = self.kernel.step_sizes(self._num_steps), self.num_chains
        self._check_epochs(num_examples)
        if init_params is not None:
            init_params = _named(init_params, structure.latents)
        keys = list(jax.random.split(rng_key, chains)) if chains > 1 else [rng_key]
        total = chains * self._num_steps
        starts = [driver._init(key, total, args, kwargs, init_params, structure) for key in keys]
        self._check_heat(step_sizes, float(starts[0].noise_multiplier), num_examples)
        states = driver.with_own_noise(starts, total)
        report = dataclasses.replace(spent_by(settings, states[0], total), chains=chains)
        session = driver._session(args, kwargs)
        rows = session.rows(args, kwargs)
        course, progress = driver.begin(session, states, self._sizes)
        kept = checkpoint_of(
            checkpoint, every, "DPMCMC", settings, [report], rng_key,
            lambda: session.program(driver.begin(session, states[:1], self._sizes), rows),
            session.records(args, kwargs), sizes=self._sizes, chains=chains,
        )  # fmt: skip

        def left(progress: Progress) -> tuple[list[SensitiveState], int]:
            carry = progress.carry
            opened = (
                [carry.state]
                if chains == 1
                else [jax.tree.map(lambda leaf, i=i: leaf[i], carry) for i in range(chains)]
            )
            now = [first.closed(each) for first, each in zip(states, opened, strict=True)]
            return now, course.num_steps - int(progress.done)

        run = started(settings, states, progress, [report], kept, left, lambda: [report])
        with run as (progress, (report,)):
            draws = driver.chains(session, states, (course, progress), rows, report, bar, kept)
        self._report = report  # set last: if this run fails, results of the run before it stay
        self._samples = {site: draws[f"{site}{POINT_SUFFIX}"] for site in structure.latents}
        shared = structure.layout.rows(args, kwargs).shared
        self._posterior = None
        self._make_posterior = functools.partial(self._posterior_of, structure, shared, report)

    def plan(self, *args: Any, **kwargs: Any) -> Forecast:
        """Returns how far the noise will move the posterior, at best. Reads no record.

        Args:
            *args: Arguments of the model, or arrays of the same shapes.
            **kwargs: Keyword arguments of the model.
        """
        session = self._driver._session(*as_arrays(args, kwargs))
        chains, number = self.num_chains, session.num_examples
        plan = plan_for(self.settings, number, chains * self._num_steps)
        return forecast(plan, session.num_latents, chains * self._sizes[1])

    def _check_epochs(self, num_examples: int) -> None:
        """The accountant counts epochs of all chains together, but a chain cannot finish another's.

        Reads no record.
        """
        sampler, chains, steps = self.settings.sampler, self.num_chains, self._num_steps
        count = sampler.compositions
        if count(num_examples, chains * steps) != chains * count(num_examples, steps):
            raise ValueError(
                f"Each of {chains} chains must run whole epochs, but num_warmup + num_samples="
                f"{steps} steps of {sampler!r} end inside one. Choose a multiple of an epoch."
            )

    def _check_heat(self, sizes: np.ndarray | None, multiplier: float, num_examples: int) -> None:
        """Raises ValueError if the privacy noise alone heats the chain above its temperature."""
        if sizes is None or multiplier == 0:
            return
        kernel = self.kernel
        scale = check_real("noise_scale of mechanism", self._noise_scale(multiplier, num_examples),
                           low=0, low_open=True, remedy="It is the thermal noise.")  # fmt: skip
        largest = kernel.largest_step_size(scale)
        if sizes.max() > largest * (1 + _SLACK):
            raise ValueError(
                f"Expected step_size <= {largest:.4g}, got {sizes.max():.4g}. With a larger step, "
                "the privacy noise alone heats the chain above temperature "
                f"{kernel.temperature:g}. Take a smaller step, or step_size=None for the largest. "
                "Less noise allows larger steps: fewer steps, a smaller clip norm or a larger "
                "batch."
            )

    @property
    def posterior(self) -> Posterior:
        """The :class:`~numpyro_dp.Posterior` of the last run.

        It draws the samples of all chains in random order, each with the error that privacy noise
        leaves in the mean of the chains. If the chains have not mixed, it is the prior and says so
        (:mod:`numpyro_dp.methods.langevin.mixing`). :meth:`get_samples` has the samples as they
        are. Models with more than 300 latents get the samples as they are here, too.
        """
        if self._make_posterior is None:
            raise ValueError("There is no posterior yet. Call run first.")
        if self._posterior is None:
            self._posterior = self._make_posterior()
            self._posterior.warn()
        return self._posterior

    def _posterior_of(
        self, structure: ModelStructure, shared: tuple[Array, ...], report: PrivacyReport
    ) -> Posterior:
        kernel, samples = self.kernel, self.get_samples()
        model = Model(self._frontend.given.fn, structure)
        source = ModelSource.of(model, shared, {})
        number = len(next(iter(samples.values())))
        size = sum(value[0].size for value in samples.values())
        chains = "1 chain" if report.chains == 1 else f"{report.chains} chains"
        method = f"DPMCMC by {type(kernel).__name__}, {number} samples of {chains}"
        mixing = mixing_of(self.get_samples(group_by_chain=True))
        said = (
            f"the largest R-hat is {mixing.rhat:.2f}, the fewest effective draws {mixing.size:.0f}"
        )
        scale = self._noise_scale(report.noise_multiplier, report.plan.num_examples)
        remedy = (
            "A larger epsilon or more records help, more steps within one budget hardly do. "
            "DPLaplace and DPSEP need no mixing."
        )
        found = [] if mixing.good else [
            Finding("mixing", True, f"The chains have not mixed: {said}. {remedy}")
        ]  # fmt: skip
        if scale > 0 and size <= MOST_LATENTS:
            notes = (NOISE_INCLUDED,)
            if not mixing.good:
                notes = (f"The chains have not mixed ({said}), so this is the prior.",)
            variance = scale**2 / (report.chains * self._sizes[1])
            with contextlib.suppress(UnsupportedModelError):
                free = source.unconstrained(samples)
                draws = draws_of_chains(model, shared, free, mixing.good, variance)
                return source.posterior(draws, report, method, notes, findings=found)

        notes = () if mixing.good else (f"The chains have not mixed: {said}.",)
        found += without_noise(scale > 0)
        return source.posterior(SiteDraws(samples), report, method, notes, mixing.good, found)

    def _noise_scale(self, multiplier: float, num_examples: int) -> float:
        """Standard deviation of the privacy noise in an entry of a score of all records."""
        run = self.settings
        mechanism = build_mechanism(run.privacy.mechanism, run.clip_norm, multiplier)
        return float(mechanism.noise_scale) / run.sampler.inclusion_prob(num_examples)

    @property
    def privacy(self) -> PrivacyReport:
        """The privacy report of the last run, for all chains together."""
        if self._report is None:
            raise ValueError("There is no privacy report yet. Call run first.")
        return self._report

    def get_samples(self, group_by_chain: bool = False) -> dict[str, Array]:
        """Returns the constrained samples by site. They may be published.

        Args:
            group_by_chain: Keeps a leading axis of chains.
        """
        if self._samples is None:
            raise ValueError("There are no samples yet. Call run first.")
        if group_by_chain:
            return dict(self._samples)
        return {name: value.reshape(-1, *value.shape[2:]) for name, value in self._samples.items()}

    def print_summary(self, prob: float = 0.9) -> None:
        """Prints NumPyro's summary of the samples. For the privacy report, see ``privacy``.

        Effective sample sizes and R-hat refer to the chain at the kernel's temperature.

        Args:
            prob: Probability of the intervals.
        """
        samples = {name: np.asarray(value) for name, value in self.get_samples(True).items()}
        print_summary(samples, prob=prob)


class _Chain(Driver):
    """The driver of the chains, with all arguments checked."""

    def __init__(self, frontend: Frontend, settings: RunSettings) -> None:
        method = Method(langevin(), frontend.svi.optim, independent_noise=_INDEPENDENT)
        super().__init__(method, settings)
        self._frontend = frontend

    def get_params(self, state: SensitiveState) -> dict[str, Any]:
        """Returns the constrained position."""
        return self._frontend.svi.get_params(state)

    def with_own_noise(self, starts: list[SensitiveState], total: int) -> list[SensitiveState]:
        """Gives each chain its own noise and batches."""
        if len(starts) == 1:
            return starts
        # Chains with the same noise would reveal the difference of their clipped sums.
        settings = self.settings
        secret, first = secret_of(settings), starts[0]
        plan = plan_for(settings, first.identity.num_examples, total)
        own = [jax.random.fold_in(secret, chain) for chain in range(len(starts))]
        fields = [noise_fields(settings, each, plan, first.mechanism_state) for each in own]
        return [start._replace(**each) for start, each in zip(starts, fields, strict=True)]

    def chains(
        self,
        session: Session,
        states: list[SensitiveState],
        begun: tuple[Course, Progress],
        rows: Rows,
        report: PrivacyReport,
        bar: Any,
        kept: Checkpoint | None,
    ) -> dict[str, Array]:
        """Returns the kept positions by parameter, with leading axes for chains and draws."""
        if len(states) > 1:
            if bar is not None:
                bar.set_description_str(f"compiling and running {len(states)} chains")
            params = session.run_many(rows, begun, kept)[1]
            if bar is not None:
                bar.update(bar.total)
            return params
        found = session.run(states[0], rows, begun, report, bar=bar, kept=kept)
        if found.stopped:
            raise KeyboardInterrupt
        return jax.tree.map(lambda leaf: leaf[None], found.trace.params)

    def begin(
        self, session: Session, states: list[SensitiveState], sizes: tuple[int, int, int]
    ) -> tuple[Course, Progress]:
        """Returns the course of the chains, and their progress before the first step."""
        warmup, samples, thinning = sizes
        kept = samples // thinning
        if len(states) == 1:
            return session.begin(states[0], samples, kept, warmup=warmup)
        opened = (state.opened for state in states)
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *opened)
        return session.begin_many(stacked, samples, kept, warmup)

    def structure(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ModelStructure:
        """Reads only the shapes of the arguments."""
        return self._frontend.given.structure(args, kwargs)

    def prepare(self, structure: ModelStructure, rng_key: Array, call: Call) -> Prepared:
        """Reads no record."""
        prepared = self._frontend.prepare(structure, rng_key, call)
        position = self.method.optim.get_params(prepared.optim_state)
        # random_flax_module leaves parameters without entries: all entries became latent sites.
        if own := [name for name in structure.params if jax.tree.leaves(position[name])]:
            raise UnsupportedModelError(
                f"The model has the parameters {own}, but a sampler needs a prior for each. Use "
                "numpyro.sample, or random_flax_module with a prior for all of them."
            )
        return prepared


def _named(init_params: Any, latents: tuple[str, ...]) -> dict[str, Any]:
    if not isinstance(init_params, Mapping) or set(init_params) - set(latents):
        given = sorted(init_params) if isinstance(init_params, Mapping) else init_params
        raise ValueError(
            f"Expected init_params as a dict by latent site, among {list(latents)}, got {given!r}."
        )
    return {f"{site}{POINT_SUFFIX}": value for site, value in init_params.items()}


def _check(kernel: Any, run: RunSettings) -> None:
    if not isinstance(kernel, SGLD):
        raise TypeError(
            f"Expected a kernel such as SGLD(model), got {type(kernel).__name__}. NumPyro's "
            "own kernels evaluate the whole likelihood in each step and cannot be private."
        )
    if run.clip_norm.adaptive:
        raise TypeError(
            "Expected clip_norm as a number, or numbers by site, got an AdaptiveClip. It would "
            "change the noise, and so the temperature, during the run. Pass a number."
        )
    if run.privacy.noise_multiplier == 0 and kernel.step_size is None:
        raise ValueError(
            "Without noise (noise_multiplier=0) there is no largest step size. Pass a step_size to "
            "the kernel."
        )
