"""``DPSVI``: the interface of ``numpyro.infer.SVI``, with a privacy budget."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable
from typing import Any

import jax.numpy as jnp
import numpy as np
import numpyro
import optax
from jax import Array
from numpyro.infer import SVI, Trace_ELBO, TraceMeanField_ELBO

from numpyro_dp._compat import make_program
from numpyro_dp._validate import check_callable, check_real
from numpyro_dp.core import Args, Estimator, Kwargs, PyTree, Sampler, Values
from numpyro_dp.model.density import Model
from numpyro_dp.model.frontend import Call, Frontend, Prepared, arguments_key, check_loss
from numpyro_dp.model.public import UnsupportedModelError
from numpyro_dp.model.structure import ModelStructure
from numpyro_dp.model.variational import VariationalProblem, guide_kind
from numpyro_dp.posterior.averaging import SHORTEST
from numpyro_dp.posterior.diagnosis import findings_of_run
from numpyro_dp.posterior.from_model import ModelSource, findings_of_drift
from numpyro_dp.posterior.noise_aware import noise_aware
from numpyro_dp.posterior.posterior import Posterior
from numpyro_dp.posterior.scores import posterior_of_scores
from numpyro_dp.privacy.budget import PrivacyBudget
from numpyro_dp.run.driver import Driver
from numpyro_dp.run.results import RunResult
from numpyro_dp.run.settings import Execution, Method, Privacy, RunSettings
from numpyro_dp.run.state import SensitiveState
from numpyro_dp.vi.estimators import aligned
from numpyro_dp.vi.estimators.centred import centred_if_possible
from numpyro_dp.vi.first_widths import NORMAL_GUIDES, first_widths


class DPSVI(Driver):
    r"""Differentially private stochastic variational inference.

    A replacement for ``numpyro.infer.SVI``: ``init``, ``update``, ``run``, ``evaluate`` and
    ``get_params`` have the same signatures and meaning. Pass the *whole* data set to ``update`` and
    ``run``, which draw the batches. In an argument array whose first axis has the size of the data
    plate, each row is one record. Name arrays that hold no record in ``public``. Numbers are
    public.

    Args:
        model: A NumPyro model with a plate over records.
        guide: A reparameterised guide, automatic or hand-written.
        optim: An optax or ``numpyro.optim`` optimiser. It sees the gradient of the negative
            evidence lower bound of the whole data set.
        loss: ``None``, ``Trace_ELBO(num_particles=K)`` or ``TraceMeanField_ELBO(num_particles=K)``.
            All give the same loss: entropies are in closed form if one is known.
        estimator: Which gradient one record contributes (:mod:`numpyro_dp.estimators`). By default
            ``centred(aligned())``, whose fit does not depend on the clip norm. It is ``aligned()``
            if the model cannot simulate an outcome, has more than 300 latents and parameters, or
            if a loss is released.
        clip_norm: Largest norm of one record's signal, in units of its log likelihood gradient,
            unscaled by batch or data size. A number, an
            :class:`~numpyro_dp.mechanisms.AdaptiveClip`, or a dict of either by entry of the
            signal.
        sampler: :class:`~numpyro_dp.samplers.Poisson`, :class:`~numpyro_dp.samplers.FixedSize`,
            :class:`~numpyro_dp.samplers.Permutation` or
            :class:`~numpyro_dp.samplers.FullBatch`.
        budget: Epsilon and delta that the run may spend. They determine the noise.
        num_steps: Steps that the budget must cover, for loops of ``update`` and resumed runs. By
            default ``run`` covers its own steps.
        init_scale: First standard deviations of ``AutoNormal``, ``AutoDiagonalNormal`` and
            ``AutoMultivariateNormal``, in standard deviations of the prior and at most that many
            units. Noise hides the curvature from narrow draws. ``None`` leaves them to the guide.
            So does an ``init_scale`` of the guide, a value in ``init_params``, a run without noise,
            and a model with more than 300 latents.
        privacy: Rarely needed: noise, key, accountant, units, public arguments and more
            (:class:`~numpyro_dp.Privacy`).
        execution: Rarely needed: devices and memory (:class:`~numpyro_dp.Execution`).
        **static_kwargs: Public, constant keywords of model and guide.

    Raises:
        TypeError, ValueError: Name the value, the range and the remedy.

    Example:
        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist, optax
        >>> from numpyro.infer.autoguide import AutoDiagonalNormal
        >>> from numpyro_dp import DPSVI, PrivacyBudget
        >>> from numpyro_dp.estimators import aligned
        >>> from numpyro_dp.samplers import Poisson
        >>> def model(x):
        ...     mean = numpyro.sample("mean", dist.Normal(0, 10))
        ...     with numpyro.plate("records", x.shape[0]):
        ...         numpyro.sample("x", dist.Normal(mean, 1), obs=x)
        >>> x = 3 + jax.random.normal(jax.random.key(1), (1000,))
        >>> svi = DPSVI(model, AutoDiagonalNormal(model), optax.adam(0.05), estimator=aligned(),
        ...             clip_norm=2.0, sampler=Poisson(0.1), budget=PrivacyBudget(2.0, 1e-5))
        >>> result = svi.run(jax.random.key(0), 300, x, progress_bar=False)
        >>> 1.97 < result.privacy.epsilon <= 2.0, abs(result.params["auto_loc"][0] - 3) < 0.5
        (True, Array(True, dtype=bool))

    Guarantee:
        ``result.params``, ``result.posterior``, ``result.scores``, ``result.trace``,
        ``result.folded``, ``result.privacy`` and private losses are (epsilon, delta)-
        differentially private under the budget's relation. Each step is
        the Gaussian mechanism on a clipped sum over a sampled batch. Everything else is
        post-processing or reads no record. The number of records, shapes and dtypes are public.
        The guarantee does not cover ``result.state`` and types named ``Sensitive...``.

        No two runs share noise, however you start them. Two exceptions:
        ``Privacy(repetition=True)``, and a loop inside a function that you compiled, which reads
        one state twice
        (:mod:`numpyro_dp.privacy.once`).

    Reference:
        Jälkö, Prediger, Honkela, Kaski (2024), DPVIm, TMLR.
    """

    guide: Callable[..., object]
    optim: Any

    def __init__(
        self,
        model: Callable[..., object],
        guide: Callable[..., object],
        optim: object,
        loss: object = None,
        *,
        clip_norm: object,
        sampler: Sampler,
        estimator: Callable[[VariationalProblem], Estimator] | None = None,
        budget: PrivacyBudget | None = None,
        num_steps: int | None = None,
        init_scale: float | None = 0.5,
        privacy: Privacy = Privacy(),
        execution: Execution = Execution(),
        **static_kwargs: object,
    ) -> None:
        check_callable("guide", guide)
        self.loss: Trace_ELBO | TraceMeanField_ELBO = check_loss(loss)
        svi = SVI(model, guide, _check_optim(optim), self.loss, **static_kwargs)
        settings = RunSettings(
            clip_norm=clip_norm, sampler=sampler, budget=budget, num_steps=num_steps,
            privacy=privacy, execution=execution,
        )  # fmt: skip
        if estimator is None:
            estimator = centred_if_possible if privacy.loss_release is None else aligned()
        super().__init__(Method(estimator, svi.optim, public_loss=_prior_and_entropy), settings)
        self._model, self.guide, self.optim = model, guide, svi.optim  # ArviZ would want .model
        self.static_kwargs = static_kwargs
        if init_scale is not None:
            check_real("init_scale", init_scale, low=0, low_open=True)
        self._init_scale = None if privacy.noise_multiplier == 0 else init_scale
        self._first_widths: dict[Hashable, dict[str, Array]] = {}
        given = privacy.given_model(model, static_kwargs)
        self._frontend = Frontend(given, svi)

    def stable_update(
        self, svi_state: SensitiveState, *args: PyTree, **kwargs: PyTree
    ) -> tuple[SensitiveState, Array]:
        """Calls :meth:`update`, which always counts a record without a finite signal as 0."""
        return self.update(svi_state, *args, **kwargs)

    def get_params(self, svi_state: SensitiveState) -> Values:
        """Returns the constrained parameters at a state. You may publish them."""
        return self._frontend.constrain(super().get_params(svi_state))

    def evaluate(self, svi_state: SensitiveState, *args: PyTree, **kwargs: PyTree) -> Array:
        """Raises ValueError: the loss on the records is not protected."""
        raise ValueError(
            "The loss on the records is not protected, so it is not shown. Use "
            "Privacy(loss_release=) for a loss curve within the budget, or evaluate on public data "
            "with numpyro.infer.SVI."
        )

    def structure(self, args: Args, kwargs: Kwargs) -> ModelStructure:
        """Reads the model from shapes alone."""
        return self._frontend.given.structure(args, kwargs)

    def prepare(self, structure: ModelStructure, rng_key: Array, call: Call) -> Prepared:
        """Returns the problem and the first state of the optimiser. Reads no record."""
        scale = self._init_scale
        if scale is None:
            return self._frontend.prepare(structure, rng_key, call)
        shapes = arguments_key(call.args, call.kwargs, self.max_rows)

        def first(model: Model, shared: tuple[Array, ...]) -> dict[str, Array]:
            key = shapes, *(np.asarray(x).tobytes() for x in shared)
            if key not in self._first_widths:  # a sweep prepares many runs
                self._first_widths[key] = first_widths(self.guide, model, shared, scale)
            return self._first_widths[key]

        return self._frontend.prepare(structure, rng_key, call, first)

    def posterior_of(
        self, problem: VariationalProblem, result: RunResult, plain: bool
    ) -> Posterior:
        """Returns the posterior of the latents."""
        params, privacy = result.params, result.privacy
        source = ModelSource.of(problem.model, problem.shared, params)
        guide = getattr(self.guide, "__name__", type(self.guide).__name__)
        method = f"{type(self).__name__} with {guide}, {privacy.num_steps} steps"
        if result.scores is not None and privacy.noise_multiplier > 0 and not plain:
            # Without a prior that can be read, the posterior is that of the guide.
            with contextlib.suppress(UnsupportedModelError):
                unbiased = self.method.estimator_of(problem).centring is not None
                return posterior_of_scores(source, problem, result, method, unbiased)
        drift = findings_of_drift(result.trace)
        notes = tuple(finding.text for finding in drift)
        noise, found = privacy.noise_multiplier > 0, [*findings_of_run(result), *drift]
        widened = guide_kind(self.guide) in NORMAL_GUIDES and len(result.trace.steps) >= SHORTEST
        widened = widened and noise and not plain
        if widened:
            params = noise_aware(result, self.guide).params
            notes += ("The intervals are widened by the noise of averaged iterates.",)
        elif noise:
            notes += ("The intervals do not contain the privacy noise of the run.",)
        return source.posterior(
            source.guide_draws(self.guide, params, self.static_kwargs), privacy, method, notes,
            not drift, found, None if widened else False,
        )  # fmt: skip


def _prior_and_entropy(problem: VariationalProblem, params: Values, rng_key: Array) -> Array:
    # It reads no record, so it needs no noise in a released loss.
    latents, entropy = problem.draw(params, rng_key)
    return problem.log_prior(latents, params) + entropy


def _check_optim(optim: object) -> Any:
    """Returns the optimiser, or raises TypeError if it evaluates or reads the loss."""
    if isinstance(optim, numpyro.optim.Minimize):
        raise TypeError(
            "numpyro.optim.Minimize evaluates the loss many times a step, and the loss is private. "
            "Use numpyro.optim.Adam or optax."
        )
    if isinstance(optim, optax.GradientTransformationExtraArgs) and _reads_loss(optim):
        raise TypeError(
            "optim reads the loss, as reduce_on_plateau, polyak_sgd and lbfgs do. The loss is "
            "private. Use an optimiser that reads gradients only, such as optax.adam with a "
            "schedule."
        )
    return optim


def _reads_loss(optim: optax.GradientTransformationExtraArgs) -> bool:
    """Traces an update, and looks for an operation that reads the loss."""
    params = {"x": jnp.ones(2)}

    def update(value: Array) -> PyTree:
        return optim.update(params, optim.init(params), params, value=value)

    try:
        program, _ = make_program(update, jnp.ones(()))
    except TypeError:  # it needs more arguments, such as the loss as a function
        return True
    (value,) = program.inputs
    return any(value is atom for eqn in program.equations for atom in eqn.invars)
