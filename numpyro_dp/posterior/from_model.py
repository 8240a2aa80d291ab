"""A :class:`Posterior` from a NumPyro model and draws of its latent sites."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array
from numpyro import handlers
from numpyro.distributions import biject_to

from numpyro_dp._compat import jit_once
from numpyro_dp._tree import select
from numpyro_dp.core import Kwargs, NumPyroFn, PyTree, Sites, Values
from numpyro_dp.model.density import Model
from numpyro_dp.model.held import is_array
from numpyro_dp.model.outcomes import Outcomes, unconstrained_prior
from numpyro_dp.model.public import PublicValues, UnsupportedModelError
from numpyro_dp.model.records import Arguments, Layout, ModelStructure
from numpyro_dp.model.separation import one_record, traced
from numpyro_dp.posterior.averaging import SHORTEST, drift_check
from numpyro_dp.posterior.densities import Densities, densities_of_model, invented, other_densities
from numpyro_dp.posterior.diagnosis import (
    Finding,
    findings_of_conflict,
    findings_of_guess,
    findings_of_normal,
    findings_of_pooling,
    findings_of_report,
)
from numpyro_dp.posterior.draws import Draws, SiteDraws
from numpyro_dp.posterior.posterior import Posterior
from numpyro_dp.posterior.prior import ModelPrior, constrained, read_prior
from numpyro_dp.posterior.released import Likelihood
from numpyro_dp.posterior.samples import posterior_samples
from numpyro_dp.privacy.plan import PrivacyReport
from numpyro_dp.privacy.statement import Statement
from numpyro_dp.run.results import Trace

NOISE_INCLUDED = "The intervals include the noise of privacy."


class ModelSource(NamedTuple):
    """The parts of a NumPyro model that a posterior needs. It holds no record.

    Attributes:
        fn: The model, with static keywords filled in. A call may override them.
        latents: Names of the global latent sites.
        plate: Name of the plate over records.
        arguments: Arguments of the model, with a placeholder for the records.
        params: Constrained value of each ``numpyro.param`` in the model.
        factors: Names of the factors and observed sites that read no record.
        public: What was accepted as public, or ``None`` for a model of this package.
        alone: Whether no public array is among the arguments. A file can then replace them.

    Example:
        >>> from numpyro_dp.extend import Driver
        >>> class MyDriver(Driver):
        ...     def posterior_of(self, problem, result, plain):
        ...         source = ModelSource.of(problem.model, problem.shared, result.params)
        ...         draws = {"mean": result.trace.params["mean"]}
        ...         return source.posterior(draws, result.privacy, "Mine", noise_included=False)
    """

    fn: Callable[..., object]
    latents: tuple[str, ...]
    plate: str
    arguments: Arguments
    params: Values
    factors: tuple[str, ...] = ()
    public: PublicValues | None = None
    alone: bool = False

    @classmethod
    def of(cls, model: Model, shared: tuple[Array, ...], params: Values) -> ModelSource:
        """Collects these parts from the values that a driver holds.

        Args:
            model: The model.
            shared: Public arrays among the model's arguments.
            params: Constrained parameters of the run. Parameters of the guide are dropped.
        """
        structure = model.structure
        own = {name: params[name] for name in structure.params if name in params}
        return cls(
            model.fn, structure.latents, structure.data_plate,
            structure.layout.placeholder(shared), own, structure.prior_factors, structure.public,
            not shared,
        )  # fmt: skip

    def posterior(
        self,
        draws: Draws | dict[str, Array],
        privacy: PrivacyReport | Statement,
        method: str,
        notes: tuple[str, ...] = (),
        converged: bool = True,
        findings: Iterable[Finding] = (),
        noise_included: bool | None = None,
        likelihood: Likelihood | None = None,
    ) -> Posterior:
        """Returns a :class:`Posterior` with these draws of the global latents, and no others.

        Args:
            draws: ``(rng_key, number) -> values by site``, or stored values by site.
            privacy: Report of the run.
            method: One line that describes the method.
            notes: Sentences for the user.
            converged: Whether the method has converged.
            findings: What the method found.
            noise_included: Whether the draws include the noise of privacy, which the posterior
                then says. ``None`` if it should say nothing.
            likelihood: The released likelihood, if the method has one.
        """
        drawn: Draws = SiteDraws(draws) if isinstance(draws, dict) else draws
        if noise_included:
            notes = (NOISE_INCLUDED, *notes)
        report = privacy if isinstance(privacy, PrivacyReport) else None
        if noise_included is False and report is not None and report.noise_multiplier > 0:
            text = "The intervals leave out the noise of privacy, so they are too narrow."
            findings = (*findings, Finding("intervals", True, text))
        prior: Draws | None = self._prior
        try:
            jax.eval_shape(self._prior_draw, jax.random.key(0))
        except NotImplementedError:  # an improper prior
            prior = None
        if prior is not None and self.factors:
            notes += (f"The share of the prior leaves out the factors {list(self.factors)}.",)
        findings = (*findings, *(findings_of_report(report) if report is not None else ()))
        return Posterior(
            prior=prior, draws=lambda rng_key, number: select(drawn(rng_key, number), self.latents),
            unconstrain=self.unconstrained, privacy=privacy, method=method, notes=notes,
            converged=converged, findings=findings, likelihood=likelihood, source=self,
            **self.fixed_parts,
        )  # fmt: skip

    def read_prior(self, seen: Iterable[str]) -> ModelPrior:
        """Returns the model's prior, for a likelihood of the latent sites ``seen``.

        Raises:
            UnsupportedModelError: If the prior cannot be drawn from.
        """
        return read_prior(self._outcomes(seen), jax.random.key(0))

    def supports(self, seen: Iterable[str]) -> Values | None:
        """Returns NumPyro's constraint of each site, or ``None`` if it depends on other latents."""
        outcomes = self._outcomes(seen)
        found = constrained(outcomes)[1]
        return found and select(found, outcomes.seen)

    def _outcomes(self, seen: Iterable[str]) -> Outcomes:
        """The latents of the model. Its outcomes are left out."""
        leaves, treedef = jax.tree.flatten(tuple(self.arguments))
        kinds = "".join("s" if is_array(leaf) else "c" for leaf in leaves)
        constants = tuple(leaf for leaf in leaves if not is_array(leaf))
        shared = tuple(leaf for leaf in leaves if is_array(leaf))
        # To a prior, all arguments are public: those of records are placeholders.
        layout = Layout(treedef, kinds, constants, (), 1)
        structure = ModelStructure(
            self.plate, layout, self.latents, (), self.factors, (), draws=True
        )
        model = Model(self._filled, structure)
        drawn = jax.eval_shape(lambda: unconstrained_prior(model, shared, jax.random.key(0)))
        shapes = {name: value.shape for name, value in drawn.items()}
        return Outcomes(model, shared, tuple(sorted(seen)), shapes, 0, False, False)

    @classmethod
    def of_file(
        cls, fn: NumPyroFn, saved: Densities, params: Values, public: PublicValues | None
    ) -> ModelSource:
        """The parts of a model whose arguments are invented, as those of a saved posterior.

        Args:
            fn: The model, with static keywords and parameters filled in.
            saved: What :meth:`densities` returned before saving.
            params: Constrained values of the model's parameters.
            public: What was accepted as public.
        """
        arguments = Arguments(*invented(saved["arguments"], 0))
        source = cls(fn, (), saved["plate"], arguments, params, (), public, True)
        _, latents, factors, _ = source._sites(fn)
        return source._replace(latents=latents, factors=factors)

    def with_model(self, fn: NumPyroFn, likelihood: Likelihood) -> ModelSource:
        """Returns the same with another prior.

        Args:
            fn: The model with the other prior, static keywords filled in.
            likelihood: The likelihood of the latents that it has to have.

        Raises:
            ValueError: If its latents or its likelihood are others.
            UnsupportedModelError: If it holds arrays that are not public, or has parameters.
        """
        params, latents, factors, inside = self._sites(fn)
        if params or not all(inside.values()):
            raise UnsupportedModelError(
                "The model has parameters, or latents of single records. Another prior needs "
                "latent sites that all records share."
            )
        if missing := sorted(likelihood.sites.keys() - set(latents)):
            raise ValueError(
                f"The model has no latent sites {missing}, but the run tells about them: it has "
                f"{list(latents)}. Keep their names, and draw them with numpyro.sample from the "
                "other prior, such as Normal(0, tau). A product of latents cannot take their place."
            )
        public = None if self.public is None else self.public.copy()
        if public is not None:

            def values() -> PyTree:
                trace = traced(fn, self.plate, self.arguments)
                sites = select(trace, (*latents, *factors))
                return [[s["fn"].log_prob(s["value"]), s["value"]] for s in sites.values()]

            # Of the run, whose records are placeholders here.
            public.trust(leaf for leaf in jax.tree.leaves(tuple(self.arguments)) if is_array(leaf))
            public.check("model with another prior", values, once=True)
        source = self._replace(fn=fn, latents=latents, params={}, factors=factors, public=public)
        own, other = self.densities(), source.densities()
        if own is None or other is None:
            warnings.warn(
                "The arguments of this model do not allow to compare likelihoods. Make sure that "
                "only the prior differs from that of the run.", stacklevel=3,
            )  # fmt: skip
        elif changed := other_densities(own, other, sorted({*inside, *self.inside})):
            raise ValueError(
                f"The likelihood is another one than that of the run: {changed} are missing, or "
                "have other densities or shapes. Change priors alone. Another likelihood needs "
                "another run."
            )
        return source

    def _sites(
        self, fn: NumPyroFn
    ) -> tuple[list[str], tuple[str, ...], tuple[str, ...], dict[str, bool]]:
        """Names of parameters, latents and factors outside the plate, and of sites inside it.

        Of the last ones also whether they are observed.
        """
        trace = traced(fn, self.plate, self.arguments)
        samples = {name: site for name, site in trace.items() if site["type"] == "sample"}
        inside = {
            name: bool(site["is_observed"]) for name, site in samples.items()
            if any(frame.name == self.plate for frame in site["cond_indep_stack"])
        }  # fmt: skip
        outside = {name: site for name, site in samples.items() if name not in inside}
        return (
            [name for name, site in trace.items() if site["type"] == "param"],
            tuple(name for name, site in outside.items() if not site["is_observed"]),
            tuple(name for name, site in outside.items() if site["is_observed"]),
            inside,
        )

    def with_prior(
        self,
        likelihood: Likelihood,
        rng_key: Array,
        privacy: PrivacyReport | Statement,
        method: str,
        notes: tuple[str, ...] = (),
        converged: bool = True,
        findings: Iterable[Finding] = (),
        prior: ModelPrior | None = None,
    ) -> Posterior:
        """Returns the posterior of a likelihood under the prior of this model.

        Args:
            likelihood: The likelihood.
            rng_key: Key of the draws, if the prior is not normal.
            privacy: Privacy of the runs that gave the likelihood.
            method: As for :meth:`posterior`.
            notes: As for :meth:`posterior`.
            converged: As for :meth:`posterior`.
            findings: What those runs showed.
            prior: The prior, if it has been read.

        Raises:
            ValueError: If latents have other shapes or supports than those of the likelihood.
            UnsupportedModelError: If the prior cannot be drawn from.
        """
        prior = self.read_prior(likelihood.sites) if prior is None else prior
        own = prior.likelihood(likelihood.precision, likelihood.linear)
        likelihood.check_same(own)
        numbers = likelihood.precision, likelihood.linear
        vectors, normal = prior.vectors(*numbers, rng_key), prior.decoded.updated(*numbers)
        findings = [*findings, *findings_of_normal(*normal, prior.decoded)]
        findings += findings_of_pooling(prior, vectors, normal[1])
        findings += findings_of_conflict(*numbers, prior.decoded)
        findings += findings_of_guess(likelihood.approximate, normal[1], prior.decoded)
        return self.posterior(
            prior.drawn(vectors), privacy, method, notes, converged, findings,
            likelihood=dataclasses.replace(own, approximate=likelihood.approximate),
        )  # fmt: skip

    @property
    def inside(self) -> tuple[str, ...]:
        """Names of the sites in the plate over records."""
        return tuple(self._sites(self._filled)[3])

    @property
    def fixed_parts(self) -> dict[str, Any]:
        """Arguments of a posterior that depend on the model alone."""
        public = self.public
        if public is not None:
            public = public.copy()
            public.trust(jax.tree.leaves(self.params))  # released
        return {
            "model": self._filled, "params": self.params, "public": public,
            "densities": self.densities,
        }  # fmt: skip

    def densities(self) -> Densities | None:
        """Log densities of the model at fixed points, see :func:`densities_of_model`."""
        found = densities_of_model(self._filled, self.plate, self.arguments)
        return found and found | {"alone": self.alone}

    def guide_draws(self, guide: Callable[..., object], params: Values, static: Kwargs) -> Draws:
        """Returns the draws of a guide that is called on the placeholder for the records."""
        args, kwargs = self.arguments
        # Bound here, because a keyword of the guide may have the name of a posterior_samples one.
        alone = one_record(lambda: guide(*args, **kwargs, **static), self.plate)
        return lambda rng_key, number: posterior_samples(rng_key, alone, params, number)

    @property
    def _filled(self) -> Callable[..., object]:
        return handlers.substitute(self.fn, data=self.params) if self.params else self.fn

    def _trace(self, rng_key: Array, values: dict[str, Array]) -> Sites:
        """Latent sites on the placeholder. Sites without given values are drawn from the prior."""
        alone = one_record(self._filled, self.plate)
        fn = handlers.seed(handlers.substitute(alone, data=values), rng_key)
        return select(self.arguments.trace(fn), self.latents)

    def _prior_draw(self, rng_key: Array) -> dict[str, Array]:
        return {name: site["value"] for name, site in self._trace(rng_key, {}).items()}

    def _prior(self, rng_key: Array, num_samples: int) -> dict[str, Array]:
        keys = jax.random.split(rng_key, num_samples)
        return jit_once(jax.vmap(self._prior_draw))(keys)

    def unconstrained(self, draws: dict[str, Array]) -> dict[str, Array]:
        """Traces the model at each draw, because supports may depend on other latents."""

        def one(values: dict[str, Array]) -> dict[str, Array]:
            sites = self._trace(jax.random.key(0), values)
            return {
                name: biject_to(site["fn"].support).inv(values[name])
                for name, site in sites.items()
            }

        return jit_once(jax.vmap(one))(draws)


def findings_of_drift(trace: Trace) -> list[Finding]:
    """Whether parameters fail the drift check in the last half of a trace.

    A guide often starts narrow, so a run that has not converged may look too certain. A trace that
    is too short for the check also fails.

    Example:
        >>> steady = np.random.default_rng(0).normal(size=1000)
        >>> findings_of_drift(Trace(np.arange(1, 1001), {"mean": steady}, None))
        []
    """
    length = len(trace.steps)
    values = [np.asarray(value, np.float64) for value in jax.tree.leaves(trace.params)]
    total, passed = sum(value[0].size for value in values), 0
    if length >= SHORTEST:
        check, half = drift_check(), max(SHORTEST, length // 2)
        passed = sum(int(check(x[-half:].reshape(half, -1)).sum()) for x in values if x[0].size)
    if passed == total:
        return []
    return [Finding("convergence", False, (
        f"{total - passed} of {total} parameters have not converged by drift_check."
    ))]  # fmt: skip
