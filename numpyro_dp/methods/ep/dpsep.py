"""``DPSEP`` and ``SEP``: expectation propagation, with and without a privacy budget."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from jax import Array

from numpyro_dp import extend
from numpyro_dp.core import Args, Kwargs, Sampler
from numpyro_dp.methods.ep.families import Family, diagonal_normal, normal, product
from numpyro_dp.methods.ep.problem import EPProblem, PosteriorGuide, check_conjugate, make_problem
from numpyro_dp.methods.ep.sites import SiteBuilder, choose_site
from numpyro_dp.methods.ep.stochastic_ep import Damped, stochastic_ep
from numpyro_dp.posterior import Finding, Posterior
from numpyro_dp.samplers import FullBatch

_INDEPENDENT = "DPSEP adds up the variances of independent noise to find what of a precision counts"
_APART = (
    "The family has no precisions between latents, so the posterior takes them as independent "
    "given the records. With correlated columns it can be far off and too narrow. Use "
    "family=normal with shared_precision=False."
)
_SHARED = "True releases one number for all coordinates, k one for each of k blocks."


class DPSEP(extend.Driver):
    r"""Differentially private stochastic expectation propagation.

    Approximates the posterior by a member of an exponential family. Each step moves its natural
    parameters by a noisy, clipped sum of the records' sites
    (:mod:`numpyro_dp.methods.ep.stochastic_ep`).
    The methods ``init``, ``update``, ``run`` and ``sweep`` work as in :class:`~numpyro_dp.DPSVI`.

    ``result.params`` are natural parameters: ``auto_linear`` and ``auto_precision``, or
    ``auto_{site}_{statistic}`` with families by site. The guide draws the latents from them. Use
    ``Predictive(model, guide=sep.guide, params=result.params, num_samples=1000)``.

    Args:
        model: A NumPyro model with a plate over records. All latents are global.
        family: ``normal`` (one precision matrix over all latents) or ``diagonal_normal``. These
            need a prior that is normal in unconstrained coordinates. Or a dict of families by
            latent site, in which each prior is a member of its family.
        site: How a record's likelihood is approximated: ``conjugate()``, ``quadrature()``,
            ``evidence(log_evidence)``, ``normal_mixture(...)`` or ``importance()``. By default
            ``conjugate()`` if it fits the likelihood, else ``quadrature()``.
        damping: Fraction of a step that is taken, in (0, 1], or a function of the step number (a
            JAX array). Results outside [0, 1] are clipped to it.
        clip_norm: Largest norm of one record's site, with the cavity's mean as the origin. The
            linear part has the unit of the slope of its log likelihood. With
            ``unbiased_clipping=False``, it is the norm of the site minus the mean site.
        precision_weight: Weight of the precision relative to the linear part in that norm. If
            coordinates have scale s, 1/s is a natural choice.
        shared_precision: ``True`` releases one precision for all coordinates. A number k releases
            k of them, each for ``dim / k`` consecutive coordinates of the latents' vector (a
            component of a mixture).
        unbiased_clipping: Whether a site is multiplied by the smallest factor that clips it with
            any outcome that the record could have had, so that clipping does not bias the
            posterior. This needs a normal family, one of the sites ``conjugate()``,
            ``quadrature()`` and ``importance()``, and at most 16 outcomes, such as 0 and 1. Other
            runs clip each site by itself, as in the paper and with ``False``.
        sampler, budget, num_steps, privacy, execution: As for :class:`~numpyro_dp.DPSVI`. The site
            of a unit of several rows is the product of the sites of its rows, each at the cavity of
            the unit, and is clipped as a whole.
        **static_kwargs: Public, constant keywords of the model.

    Raises:
        TypeError, ValueError: If an argument is out of range.

    Example:
        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
        >>> from numpyro_dp import DPSEP, PrivacyBudget
        >>> from numpyro_dp.samplers import FullBatch
        >>> from numpyro_dp.methods.ep.families import beta
        >>> def model(x):
        ...     p = numpyro.sample("p", dist.Beta(1.0, 1.0))
        ...     with numpyro.plate("records", x.shape[0]):
        ...         numpyro.sample("x", dist.Bernoulli(p), obs=x)
        >>> x = jnp.arange(1000) % 4 == 0
        >>> sep = DPSEP(model, {"p": beta()}, clip_norm=1.0, sampler=FullBatch(),
        ...             budget=PrivacyBudget(1.0, 1e-5))
        >>> result = sep.run(jax.random.key(0), 4, x.astype(int), progress_bar=False)
        >>> 200 < result.params["auto_p_log"] < 300, round(result.privacy.epsilon, 1)
        (Array(True, dtype=bool), 1.0)

    Guarantee:
        ``result.params``, ``result.trace`` and ``result.privacy`` are (epsilon, delta)-
        differentially private under the budget's relation. Each step is the Gaussian mechanism on
        a sum of clipped sites. Each site depends on one record and on released values only. The
        prior, the mean site, damping and shrinkage read no record. No record's site is
        stored. The number of records is public.

    Reference:
        Vinaroz, Park (2022), Differentially private stochastic expectation propagation, TMLR.
        :mod:`numpyro_dp.methods.ep.stochastic_ep` has the differences.
    """

    guide: PosteriorGuide

    def __init__(
        self,
        model: Callable[..., object],
        family: Callable[[int], Family] | Mapping[str, Family] = normal,
        *,
        clip_norm: Any,
        sampler: Sampler,
        site: SiteBuilder | None = None,
        damping: float | Callable[[Array], Array] = 0.5,
        precision_weight: float = 1.0,
        shared_precision: bool | int = False,
        unbiased_clipping: bool = True,
        budget: extend.PrivacyBudget | None = None,
        num_steps: int | None = None,
        privacy: extend.Privacy = extend.Privacy(),
        execution: extend.Execution = extend.Execution(),
        **static_kwargs: object,
    ) -> None:
        settings = extend.RunSettings(
            clip_norm=clip_norm, sampler=sampler, budget=budget, num_steps=num_steps,
            privacy=privacy, execution=execution,
        )  # fmt: skip
        _check(family, site, precision_weight, shared_precision)
        self._given = privacy.given_model(model, static_kwargs)
        self._family, self._site, self.guide = family, site, PosteriorGuide()
        release = precision_weight, shared_precision, bool(unbiased_clipping)
        method = extend.Method(
            stochastic_ep(*release), Damped(damping), (_name_of(family), *release), _INDEPENDENT
        )
        super().__init__(method, settings)

    def get_params(self, state: extend.SensitiveState) -> dict[str, Array]:
        """Returns the natural parameters of a state. They may be published."""
        return EPProblem.constrain(super().get_params(state))

    def structure(self, args: Args, kwargs: Kwargs) -> extend.ModelStructure:
        """Reads only the shapes of the arguments."""
        return check_conjugate(self._given.structure(args, kwargs))

    def problem_of(
        self, structure: extend.ModelStructure, rng_key: Array, call: extend.Call
    ) -> EPProblem:
        """Finds the prior and the kind of site. Reads no record."""
        shared = structure.layout.rows(call.args, call.kwargs).shared
        problem = self.known_problem(call)
        if problem is not None:
            # It was checked for these shapes. Only the public arrays may differ.
            problem = problem.at(shared)
        else:
            problem = make_problem(self._given.fn, structure, self._family, shared, rng_key)
            site = self._site or choose_site(problem.by_row)
            site.check(problem.by_row)
            problem = problem._replace(site=site)
        self.guide.prototype_trace = problem
        return problem

    def prepare(
        self, structure: extend.ModelStructure, rng_key: Array, call: extend.Call
    ) -> extend.Prepared:
        """Returns the problem and its start. Reads no record."""
        problem = self.problem_of(structure, rng_key, call)
        start = self.method.optim.init(problem.start(call.init_params))
        return extend.Prepared(problem, start, rng_key)

    def posterior_of(self, problem: EPProblem, result: extend.RunResult, plain: bool) -> Posterior:
        """Returns the posterior of the latents."""
        params, privacy = result.params, result.privacy
        source = extend.ModelSource.of(problem.model, problem.shared, params)
        method = f"{type(self).__name__} with {_name_of(self._family)}, {privacy.num_steps} steps"
        noisy = privacy.noise_multiplier > 0
        if result.scores is not None and noisy and not plain:
            unbiased = self.method.estimator_of(problem).centring is not None
            released = result.scores.curvature
            # Diagonal precisions are too sure if the likelihood couples the latents.
            apart = released is not None and _is_diagonal(released) and problem.mixes_latents()
            told = (Finding("independent", True, _APART),) * apart
            return extend.posterior_of_scores(source, problem, result, method, unbiased, told)
        guide = PosteriorGuide(problem)  # self.guide may already belong to a later run
        draws, findings = source.guide_draws(guide, params, {}), extend.findings_of_run(result)
        notes = ("The intervals do not contain the privacy noise of the run.",) * noisy
        return source.posterior(
            draws, privacy, method, notes, findings=findings, noise_included=False
        )

    def _session(self, args: Args, kwargs: Kwargs) -> Any:
        session: Any = super()._session(args, kwargs)
        self.guide.prototype_trace = session.problem
        return session


def _is_diagonal(precision: Array) -> bool:
    """Whether the released precisions of several latents have none between them."""
    off = precision.ndim == 2 and np.any(precision - np.diag(np.diag(precision)))
    return len(precision) > 1 and not off


class SEP(DPSEP):
    """Stochastic expectation propagation without privacy: no noise, and no clipping by default.

    Args:
        model: A NumPyro model with a plate over records. See :class:`DPSEP`.
        family: Family of the posterior. See :class:`DPSEP`.
        clip_norm: Largest norm of a record's site ("clipped SEP"). By default sites are not
            clipped.
        sampler: How batches are drawn. By default each step uses every record.
        **others: Further arguments of :class:`DPSEP`.

    Example:
        >>> import jax, numpyro, numpyro.distributions as dist
        >>> from numpyro_dp import SEP
        >>> def model(x):
        ...     mean = numpyro.sample("mean", dist.Normal(0, 10))
        ...     with numpyro.plate("records", x.shape[0]):
        ...         numpyro.sample("x", dist.Normal(mean, 1), obs=x)
        >>> x = 3 + jax.random.normal(jax.random.key(1), (99,))
        >>> result = SEP(model, damping=1.0).run(jax.random.key(0), 2, x, progress_bar=False)
        >>> round(float(result.params["auto_precision"][0, 0]), 2)
        99.01

    Guarantee:
        None: the result is not private, and its report says so.

    Reference:
        Li, Hernández-Lobato, Turner (2015), Stochastic expectation propagation, NeurIPS.
    """

    def __init__(
        self,
        model: Callable[..., object],
        family: Callable[[int], Family] | Mapping[str, Family] = normal,
        *,
        clip_norm: Any = math.inf,
        sampler: Sampler | None = None,
        privacy: extend.Privacy = extend.Privacy(),
        **others: Any,
    ) -> None:
        if "budget" in others or privacy.noise_multiplier is not None:
            raise TypeError(
                "SEP adds no noise, so it takes no budget and no noise_multiplier. Use DPSEP."
            )
        sampler = FullBatch() if sampler is None else sampler
        # By default nothing is clipped, and sites of all outcomes would only take time.
        others.setdefault("unbiased_clipping", False)
        super().__init__(
            model,
            family,
            clip_norm=clip_norm,
            sampler=sampler,
            privacy=dataclasses.replace(privacy, noise_multiplier=0.0),
            **others,
        )


def _check(
    family: object, site: object, precision_weight: object, shared_precision: object
) -> None:
    """Raises unless family and site are of the right kind, and the numbers suit the family."""
    if isinstance(family, Mapping):
        product(**family)  # raises for what is no family
        if matrices := [name for name, each in family.items() if each.name.startswith("normal(")]:
            raise ValueError(
                f"normal() is no family by site, but {matrices} have it. Use diagonal_normal(), or "
                "family=normal for all latents."
            )
        if precision_weight != 1 or shared_precision:
            raise ValueError(
                "With families by site, expected precision_weight=1.0 and shared_precision=False, "
                f"got {precision_weight} and {shared_precision}. Use a normal family."
            )
    elif family not in (normal, diagonal_normal):
        raise TypeError(
            "Expected family to be one of the functions normal or diagonal_normal of "
            "numpyro_dp.methods.ep.families, not called, or a dict of families by latent site, "
            f"such as {{'p': beta()}}, got {getattr(family, 'name', family)!r}."
        )
    if site is not None and not isinstance(site, SiteBuilder):
        raise TypeError(
            "Expected site to be built by a call, such as quadrature() or importance() of "
            f"numpyro_dp.methods.ep.sites, got {site!r}."
        )
    extend.check_real("precision_weight", precision_weight, low=0, low_open=True)
    if not isinstance(shared_precision, bool):
        extend.check_int("shared_precision", shared_precision, low=1, remedy=_SHARED)


def _name_of(family: Any) -> str:
    if isinstance(family, Mapping):
        return ", ".join(f"{name}: {each.name}" for name, each in family.items())
    return family.__name__
