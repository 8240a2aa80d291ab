"""``DPMCMC``: the interface of ``numpyro.infer.MCMC``, with a privacy budget."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import numpyro
from jax import Array
from numpyro.diagnostics import print_summary
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoDelta

from numpyro_dp import extend
from numpyro_dp.core import Args, Kwargs, PyTree, Sampler, Values
from numpyro_dp.methods.langevin.kernels import POINT_SUFFIX, SGLD, LangevinSteps, langevin
from numpyro_dp.methods.langevin.mixing import draws_of_chains, mixing_of
from numpyro_dp.posterior import Finding, Posterior

_SLACK = 1e-5  # noise multipliers are rounded up to float32
_REMEDY = (
    "A larger epsilon or more records help, more steps within one budget hardly do. DPLaplace and "
    "DPSEP need no mixing."
)
_MOST_LATENTS = 300  # with more, covariances of the draws cost too much
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
        budget: extend.PrivacyBudget | None = None,
        privacy: extend.Privacy = extend.Privacy(),
        execution: extend.Execution = extend.Execution(),
        **static_kwargs: object,
    ) -> None:
        self._chains = extend.Chains(num_chains, num_warmup, num_samples, thinning)
        self.settings: extend.RunSettings = extend.RunSettings(
            clip_norm=clip_norm, sampler=sampler, budget=budget,
            privacy=privacy, execution=execution,
        )  # fmt: skip
        _check(kernel, self.settings)
        self.kernel, self.num_chains = kernel, num_chains
        self._progress_bar = progress_bar
        guide = AutoDelta(kernel.model, init_loc_fn=kernel.init_strategy)
        # It finds the first position. The kernel then moves it.
        svi = SVI(kernel.model, guide, numpyro.optim.SGD(1.0), Trace_ELBO(), **static_kwargs)
        frontend = extend.Frontend(privacy.given_model(kernel.model, static_kwargs), svi)
        self._driver = _Chain(kernel, frontend, self.settings)
        self._last: Any = None  # what the chains of the last run found
        self._posterior: Posterior | None = None

    def run(
        self,
        rng_key: Array,
        *args: PyTree,
        init_params: Values | None = None,
        checkpoint: str | os.PathLike[str] | None = None,
        every: int | None = None,
        **kwargs: PyTree,
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
        # If this run fails, results of the run before it stay.
        self._last = self._chains.run(
            self._driver, rng_key, args, kwargs, init_params=init_params, checkpoint=checkpoint,
            every=every, progress_bar=self._progress_bar, check=self._check_heat,
        )  # fmt: skip
        self._posterior = None

    def plan(self, *args: PyTree, **kwargs: PyTree) -> extend.Forecast:
        """Returns how far the noise will move the posterior, at best. Reads no record.

        Args:
            *args: Arguments of the model, or arrays of the same shapes.
            **kwargs: Keyword arguments of the model.
        """
        return self._chains.plan(self._driver, args, kwargs)

    def _check_heat(self, multiplier: float, num_examples: int) -> None:
        """Raises ValueError if the privacy noise alone heats the chain above its temperature."""
        kernel = self.kernel
        sizes = kernel.step_sizes(self._chains.num_steps)
        if sizes is None or multiplier == 0:
            return
        scale = extend.check_real(
            "noise_scale of mechanism", self.settings.noise_scale(multiplier, num_examples),
            low=0, low_open=True, remedy="It is the thermal noise.",
        )  # fmt: skip
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
        found = self._found("is no posterior")
        if self._posterior is None:
            self._posterior = self._posterior_of(found.problem, found.privacy)
            self._posterior.warn()
        return self._posterior

    def _found(self, nothing: str) -> Any:
        if self._last is None:
            raise ValueError(f"There {nothing} yet. Call run first.")
        return self._last

    def _posterior_of(self, problem: Any, report: extend.PrivacyReport) -> Posterior:
        kernel, samples = self.kernel, self.get_samples()
        source = extend.ModelSource.of(problem.model, problem.shared, {})
        number = len(next(iter(samples.values())))
        size = sum(value[0].size for value in samples.values())
        chains = "1 chain" if report.chains == 1 else f"{report.chains} chains"
        method = f"DPMCMC by {type(kernel).__name__}, {number} samples of {chains}"
        mixing = mixing_of(self.get_samples(group_by_chain=True))
        scale = self.settings.noise_scale(report.noise_multiplier, report.plan.num_examples)
        said, good = f"The chains have not mixed: {mixing}.", mixing.good
        findings = () if good else (Finding("mixing", True, f"{said} {_REMEDY}"),)
        if scale > 0 and size <= _MOST_LATENTS:
            variance = scale**2 / (report.chains * self._chains.num_samples)
            with contextlib.suppress(extend.UnsupportedModelError):
                draws = draws_of_chains(problem, source.unconstrained(samples), good, variance)
                prior = f"The chains have not mixed ({mixing}), so this is the prior."
                notes, included = ((), True) if good else ((prior,), None)
                return source.posterior(draws, report, method, notes, True, findings, included)
        notes = () if good else (said,)
        return source.posterior(samples, report, method, notes, good, findings, False)

    @property
    def privacy(self) -> extend.PrivacyReport:
        """The privacy report of the last run, for all chains together."""
        return self._found("is no privacy report").privacy

    def get_samples(self, group_by_chain: bool = False) -> dict[str, Array]:
        """Returns the constrained samples by site. They may be published.

        Args:
            group_by_chain: Keeps a leading axis of chains.
        """
        found = self._found("are no samples")
        latents = found.problem.model.structure.latents
        samples = {site: found.params[f"{site}{POINT_SUFFIX}"] for site in latents}
        if group_by_chain:
            return samples
        return {name: value.reshape(-1, *value.shape[2:]) for name, value in samples.items()}

    def print_summary(self, prob: float = 0.9) -> None:
        """Prints NumPyro's summary of the samples. For the privacy report, see ``privacy``.

        Effective sample sizes and R-hat refer to the chain at the kernel's temperature.

        Args:
            prob: Probability of the intervals.
        """
        samples = {name: np.asarray(value) for name, value in self.get_samples(True).items()}
        print_summary(samples, prob=prob)


class _Chain(extend.Driver):
    """The driver of the chains, with all arguments checked."""

    def __init__(
        self, kernel: SGLD, frontend: extend.Frontend, settings: extend.RunSettings
    ) -> None:
        method = extend.Method(langevin, LangevinSteps(kernel), independent_noise=_INDEPENDENT)
        super().__init__(method, settings)
        self._frontend = frontend

    @property
    def name(self) -> str:
        """Name of the driver in messages."""
        return "DPMCMC"

    def structure(self, args: Args, kwargs: Kwargs) -> extend.ModelStructure:
        """Reads only the shapes of the arguments."""
        return self._frontend.given.structure(args, kwargs)

    def prepare(
        self, structure: extend.ModelStructure, rng_key: Array, call: extend.Call
    ) -> extend.Prepared:
        """Reads no record."""
        if call.init_params is not None:
            call = call._replace(init_params=_named(call.init_params, structure.latents))
        prepared = self._frontend.prepare(structure, rng_key, call)
        position = self._frontend.svi.optim.get_params(prepared.optim_state)
        # random_flax_module leaves parameters without entries: all entries became latent sites.
        if own := [name for name in structure.params if jax.tree.leaves(position[name])]:
            raise extend.UnsupportedModelError(
                f"The model has the parameters {own}, but a sampler needs a prior for each. Use "
                "numpyro.sample, or random_flax_module with a prior for all of them."
            )
        return prepared._replace(optim_state=self.method.optim.init(position))


def _named(init_params: object, latents: tuple[str, ...]) -> Values:
    if not isinstance(init_params, Mapping) or set(init_params) - set(latents):
        given = sorted(init_params) if isinstance(init_params, Mapping) else init_params
        raise ValueError(
            f"Expected init_params as a dict by latent site, among {list(latents)}, got {given!r}."
        )
    return {f"{site}{POINT_SUFFIX}": value for site, value in init_params.items()}


def _check(kernel: object, run: extend.RunSettings) -> None:
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
