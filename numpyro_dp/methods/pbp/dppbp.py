"""``DPPBP``: private message passing for regression networks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_dp import extend
from numpyro_dp.core import Args, Kwargs, Sampler, Values
from numpyro_dp.methods.pbp.model import NetworkGuide, RegressionNetwork, natural_of
from numpyro_dp.methods.pbp.network_draws import network_draws
from numpyro_dp.methods.pbp.network_sites import NetworkSteps, network_ep
from numpyro_dp.methods.shared import checked_start
from numpyro_dp.posterior import Posterior

_INDEPENDENT = "DPPBP adds up the variances of independent noise to find what of a precision counts"
_START = 100.0  # initial precision of the weights: small variances keep the initial means distinct


class DPPBP(extend.Driver):
    r"""Differentially private probabilistic backpropagation: DP-SEP of a regression network.

    Call ``run(rng_key, num_steps, x, y)``. The posterior has independent normal weights and a gamma
    noise precision, and ``result.params`` are its natural parameters. For mean and variance of y,
    call ``network.predict(result.params, x)``. For draws, use
    ``Predictive(network, guide=pbp.guide, params=result.params, ...)``. The methods ``init``,
    ``update`` and ``sweep`` work as in :class:`~numpyro_dp.DPSVI`. For formulas, see
    :mod:`numpyro_dp.methods.pbp.network_sites`.

    Scale inputs and targets to about unit variance **by public constants**. Means and standard
    deviations of the records would be further releases, which this budget does not cover.

    Args:
        network: The model.
        clip_norm: Largest norm of one record's contribution. Its unit is a residual times the slope
            of the network in its weights. With ``ridge``, the unit is a residual in predictive
            standard deviations, and 0.5 to 1 works well. ``{"linear": 0.7, ...: 0.2}`` clips slopes
            separately, and ``precision`` and ``noise`` together. Then large residuals, whose slopes
            are clipped, still inform the noise. ``math.inf`` without noise is SEP.
        sampler, budget, num_steps, privacy, execution: As for :class:`~numpyro_dp.DPSVI`.
        damping: Fraction of the precisions and of the noise rate that a step replaces, in (0, 1],
            or a function of the step number.
        step_size: Rate of the mean, in (0, 1], or a function of the step number. By default it
            equals ``damping``, as in SEP.
        ridge: If given, slopes are released in coordinates of a curvature: the network's curvature
            for invented N(0, I) inputs, plus this precision. The mean moves by the same curvature.
            This puts less noise into the output and needs fewer, larger steps. 20 to 200 works for
            a few thousand records at epsilon = 1. With a much smaller ridge noise dominates, and a
            much larger one makes small steps.
        precision_per_weight: Releases one precision per weight, not one per layer. Without it, a
            layer starts with the mean of the precisions in ``init_params``.
        precision_weight: Weight of precisions relative to slopes in the joint norm.
        noise_weight: Weight of half a squared residual in the joint norm. With ``ridge`` the square
            is in units of the predictive variance, and a tenth of the default works well.
        init_scale: Standard deviation of the initial means, which are drawn from ``rng_key``.

    Raises:
        TypeError, ValueError: If an argument is out of range.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from numpyro_dp import DPPBP, Privacy, PrivacyBudget, RegressionNetwork
        >>> from numpyro_dp.samplers import FullBatch
        >>> x = jax.random.normal(jax.random.key(1), (5000, 2))
        >>> y = jnp.abs(x[:, 0]) - 0.8
        >>> network = RegressionNetwork((10,))
        >>> pbp = DPPBP(network, clip_norm=0.3, sampler=FullBatch(), step_size=0.3, ridge=20.0,
        ...             damping=0.1, budget=PrivacyBudget(2.0, 1e-5),
        ...             privacy=Privacy(secret_key=2025))
        >>> result = pbp.run(jax.random.key(0), 40, x, y, progress_bar=False)
        >>> mean, variance = network.predict(result.params, x)
        >>> bool(jnp.mean((mean - y) ** 2) < 0.05 * jnp.var(y))
        True

    Guarantee:
        ``result.params``, ``result.trace`` and ``result.privacy`` are (epsilon, delta)-
        differentially private under the budget's relation. Each step is the Gaussian mechanism on
        a sum of clipped sites. Each site depends on one record and on released values only. Prior,
        mean factor, curvature and shrinkage read no record. N is public.

    Reference:
        Vinaroz, Park (2022), Differentially private stochastic expectation propagation, TMLR,
        section 6.2; Hernández-Lobato, Adams (2015), ICML.
    """

    reads_model = False
    network: RegressionNetwork
    guide: NetworkGuide

    def __init__(
        self,
        network: RegressionNetwork,
        *,
        clip_norm: Any,
        sampler: Sampler,
        damping: float | Callable[[Array], Array] = 0.05,
        step_size: float | Callable[[Array], Array] | None = None,
        ridge: float | None = None,
        precision_per_weight: bool = False,
        precision_weight: float = 10.0,
        noise_weight: float = 0.3,
        init_scale: float = 1.0,
        budget: extend.PrivacyBudget | None = None,
        num_steps: int | None = None,
        privacy: extend.Privacy = extend.Privacy(),
        execution: extend.Execution = extend.Execution(),
    ) -> None:
        if not isinstance(network, RegressionNetwork):
            raise TypeError(
                f"Expected a RegressionNetwork, such as RegressionNetwork((50,)), got "
                f"{type(network).__name__}. For other models use DPSEP or DPSVI."
            )
        if ridge is not None:
            extend.check_real("ridge", ridge, low=0, low_open=True)
        self.network: RegressionNetwork = network
        self.ridge = ridge
        extend.check_real("precision_weight", precision_weight, low=0, low_open=True)
        extend.check_real("noise_weight", noise_weight, low=0, low_open=True)
        self.init_scale: float = extend.check_real("init_scale", init_scale, low=0, low_open=True)
        self.guide, self._by_layer = NetworkGuide(network), not precision_per_weight
        values = str(network), precision_per_weight, precision_weight, noise_weight, ridge
        estimator = network_ep(network, self._by_layer, precision_weight, noise_weight, ridge)
        steps = NetworkSteps(network, damping, step_size)
        method = extend.Method(estimator, steps, values, _INDEPENDENT)
        settings = extend.RunSettings(
            clip_norm=clip_norm, sampler=sampler, budget=budget, num_steps=num_steps,
            privacy=privacy, execution=execution,
        )  # fmt: skip
        super().__init__(method, settings)

    def structure(self, args: Args, kwargs: Kwargs) -> extend.Records:
        """Reads only the shapes of the arguments."""
        return _read(self.network, args, kwargs)

    def prepare(
        self, structure: extend.Records, rng_key: Array, call: extend.Call
    ) -> extend.Prepared:
        """Reads no record."""
        ((inputs,), _), *_ = structure.layout.shapes
        number = structure.layout.num_examples
        start = self.start(rng_key, inputs, number)
        given = call.init_params
        params = start if given is None else _check_init(given, start)
        if self._by_layer:  # a step moves all weights of a layer alike, so they must start alike
            layout, own = self.network.layout(inputs), params["weights_precision"]
            alike = layout.repeat(layout.means(own))
            params |= {"weights_linear": params["weights_linear"] / own * alike,
                       "weights_precision": alike}  # fmt: skip
        problem = extend.RecordsProblem(structure)
        return extend.Prepared(problem, self.method.optim.init(params), rng_key)

    def start(self, rng_key: Array, num_inputs: int, number: int) -> dict[str, Array]:
        """Returns the initial parameters. Reads no record."""
        size = sum(self.network.layout(num_inputs).sizes)
        concentration, rate = self.network.noise_prior
        # Steps never change the concentration, so it starts at its value for N records. The rate
        # gives 1 / gamma its prior mean.
        total = concentration + number / 2
        mean = self.init_scale * jax.random.normal(rng_key, (size,))
        noise_rate = (total - 1) * rate / (concentration - 1)
        return natural_of(mean, jnp.full(size, _START), total, noise_rate)

    def posterior_of(
        self, problem: extend.RecordsProblem, result: extend.RunResult, plain: bool
    ) -> Posterior:
        """Returns the posterior of the latents."""
        params, privacy = result.params, result.privacy
        records, network = problem.records, self.network
        known = network.weight_precision is not None
        latents = ("weights", "noise_precision", *("weight_precision",) * (not known))
        arguments = records.layout.placeholder(())
        source = extend.ModelSource(network, latents, records.data_plate, arguments, {})
        method = f"{type(self).__name__} of {network}, {privacy.num_steps} steps"
        drift = extend.findings_of_drift(result.trace)
        notes = tuple(finding.text for finding in drift)
        findings = (*extend.findings_of_run(result), *drift)
        included = not plain and privacy.noise_multiplier > 0
        if included:
            ((inputs,), _), *_ = records.layout.shapes
            state: Any = result.state  # only a result from a pickle has none, nor a posterior
            sizes = inputs, problem.num_examples
            draws = network_draws(network, *sizes, state.optim_state, self.ridge)
        else:
            draws = source.guide_draws(self.guide, params, {})
            notes += ("weight_precision is a point estimate.",) * (not known)
        return source.posterior(draws, privacy, method, notes, not drift, findings, included)


def _read(network: RegressionNetwork, args: Args, kwargs: Kwargs) -> extend.Records:
    """Checks shapes and types of the records, then reads their layout."""
    given = dict(zip(("x", "y"), args, strict=False)) | kwargs
    if set(given) != {"x", "y"} or len(args) + len(kwargs) != 2:
        raise TypeError(
            f"Expected two arrays x and y, got {len(args)} positional arguments and the keywords "
            f"{sorted(kwargs)}. Pass inputs and targets of all records."
        )
    for name, value in given.items():
        if not isinstance(value, np.ndarray | jax.Array):
            raise TypeError(
                f"Expected {name} as one array, got {type(value).__name__}. Use numpy.asarray."
            )
    shapes = {name: np.shape(value) for name, value in given.items()}
    good = len(shapes["x"]) == 2 and shapes["y"] == shapes["x"][:1] and 0 not in shapes["x"]
    if not good or any(np.iscomplexobj(value) for value in given.values()):
        raise ValueError(
            "Expected real x of shape (records, inputs) and y of shape (records,), got shapes "
            f"{shapes}. Pass x[:, None] if there is one input, y[:, 0] if y has a second axis."
        )
    return extend.read_records(network, (given["x"], given["y"]), {}, len(given["x"]))


def _check_init(init_params: Values, like: dict[str, Array]) -> dict[str, Array]:
    found = checked_start(init_params, like)
    for name, value in found.items():
        least = -math.inf if name == "weights_linear" else 0
        if not (np.isfinite(value) & (value > least)).all():
            raise ValueError(
                f"init_params[{name!r}] must be finite and > {least}, but its entries are from "
                f"{value.min()} to {value.max()}."
            )
    concentration = float(like["noise_concentration"])
    if not math.isclose(found["noise_concentration"], concentration, rel_tol=1e-5):
        raise ValueError(
            "The number of records sets init_params['noise_concentration']: expected "
            f"{concentration}, got {found['noise_concentration']}. Leave that entry unchanged."
        )
    return {name: jnp.asarray(value, like[name].dtype) for name, value in found.items()}
