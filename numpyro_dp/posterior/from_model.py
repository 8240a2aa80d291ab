"""A :class:`Posterior` from a NumPyro model and draws of its latent sites."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import jax
import numpy as np
from jax import Array
from numpyro import handlers
from numpyro.distributions import biject_to

from numpyro_dp._compat import jit_once
from numpyro_dp._tree import select
from numpyro_dp.core import Kwargs, Sites, Values
from numpyro_dp.model.density import Model
from numpyro_dp.model.public import PublicValues
from numpyro_dp.model.records import Arguments
from numpyro_dp.model.separation import one_record
from numpyro_dp.posterior.averaging import SHORTEST, drift_check
from numpyro_dp.posterior.densities import densities_of_model
from numpyro_dp.posterior.diagnosis import Finding, findings_of_report
from numpyro_dp.posterior.draws import Draws, SiteDraws
from numpyro_dp.posterior.posterior import Posterior
from numpyro_dp.posterior.samples import posterior_samples
from numpyro_dp.privacy.plan import PrivacyReport
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
        )  # fmt: skip

    def posterior(
        self,
        draws: Draws | dict[str, Array],
        privacy: PrivacyReport,
        method: str,
        notes: tuple[str, ...] = (),
        converged: bool = True,
        findings: Iterable[Finding] = (),
        noise_included: bool | None = None,
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
        """
        drawn: Draws = SiteDraws(draws) if isinstance(draws, dict) else draws
        if noise_included:
            notes = (NOISE_INCLUDED, *notes)
        if noise_included is False and privacy.noise_multiplier > 0:
            text = "The intervals leave out the noise of privacy, so they are too narrow."
            findings = (*findings, Finding("intervals", True, text))
        prior: Draws | None = self._prior
        try:
            jax.eval_shape(self._prior_draw, jax.random.key(0))
        except NotImplementedError:  # an improper prior
            prior = None
        if prior is not None and self.factors:
            notes += (f"The share of the prior leaves out the factors {list(self.factors)}.",)
        findings = (*findings, *findings_of_report(privacy))
        public = self.public
        if public is not None:
            public = public.copy()
            public.trust(jax.tree.leaves(self.params))  # released
        return Posterior(
            model=self._filled, prior=prior,
            draws=lambda rng_key, number: select(drawn(rng_key, number), self.latents),
            unconstrain=self.unconstrained, privacy=privacy, method=method, notes=notes,
            converged=converged, findings=findings, params=self.params, public=public,
            densities=lambda: densities_of_model(self._filled, self.plate, self.arguments),
        )  # fmt: skip

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
