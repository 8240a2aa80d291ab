r"""Rehearsals: the complete private run on simulated records, whose truth is known.

For each simulation, latents are drawn from the prior, outcomes from the model at public or invented
covariates, and the driver runs on them with its own budget. A nominal interval should hold the
truth in as many cases as it says. Arguments have the names of
``numpyro.infer.calibration.vsbc_diagnostic``.

A rehearsal reads no record and costs no budget.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpyro import handlers
from numpyro.distributions import biject_to

from numpyro_dp._lazy import stats
from numpyro_dp._validate import check_int
from numpyro_dp.core import Args, Kwargs, PyTree, Values
from numpyro_dp.model.frontend import GivenModel
from numpyro_dp.model.public import argument_names
from numpyro_dp.model.units import split_unit
from numpyro_dp.posterior.diagnosis import PosteriorWarning
from numpyro_dp.posterior.summary import interval
from numpyro_dp.privacy.keys import check_rng_key
from numpyro_dp.run.loop import opened_bar

_PROBS = (0.5, 0.8, 0.9)


class Rehearsal(NamedTuple):
    """What the simulations showed. It prints as a few lines.

    All values are means over the latents of each simulation, shape ``(num_simulations,)``, in
    unconstrained coordinates.

    Attributes:
        cover: Share of latents inside the nominal interval, by its mass: 0.5, 0.8 and 0.9.
        log_score: Log density of the truth under a normal distribution with the posterior's mean
            and standard deviation. Higher is better. ``prior_log_score`` is that of the prior.
        prior_log_score: The same for the prior.
        bias: Mean of posterior mean minus truth, in posterior standard deviations.
        rmse: Root mean square of posterior mean minus truth, in prior standard deviations.
        sd: Posterior standard deviation, in prior standard deviations.

    Example:
        >>> import numpy as np
        >>> found = Rehearsal(  # as rehearse() returns it, for two simulations
        ...     cover={0.5: np.array([0.4, 0.6]), 0.9: np.array([0.9, 1.0])},
        ...     log_score=np.array([0.5, 0.7]), prior_log_score=np.array([-1.4, -1.4]),
        ...     bias=np.array([0.1, -0.1]), rmse=np.array([0.1, 0.2]), sd=np.array([0.2, 0.2]),
        ... )
        >>> float(found.cover[0.9].mean())
        0.95
    """

    cover: dict[float, np.ndarray]
    log_score: np.ndarray
    prior_log_score: np.ndarray
    bias: np.ndarray
    rmse: np.ndarray
    sd: np.ndarray

    def __str__(self) -> str:
        """Means with standard errors over simulations."""
        lines = [f"{len(self.sd)} simulations"]
        for prob, held in self.cover.items():
            lines.append(f"{100 * prob:.0f} % intervals hold the truth in {shown(100 * held)} %")
        lines.append(f"log score {shown(self.log_score)} (prior: {shown(self.prior_log_score)})")
        lines.append(f"bias {shown(self.bias)} posterior standard deviations")
        lines.append(f"rmse {shown(self.rmse)}, sd {shown(self.sd)} prior standard deviations")
        return "\n".join(lines)

    __repr__ = __str__


def rehearse(
    driver: Any,
    rng_key: Array,
    *args: PyTree,
    num_steps: int | None = None,
    num_simulations: int = 20,
    num_samples: int = 1000,
    simulated_data_to_args: Callable[..., tuple[Args, Kwargs]] | None = None,
    progress_bar: bool = True,
    **kwargs: PyTree,
) -> Rehearsal:
    """Runs a driver on records that its own model simulates.

    Args:
        driver: A :class:`~numpyro_dp.DPLaplace`, :class:`~numpyro_dp.DPSVI`,
            :class:`~numpyro_dp.DPSEP`, :class:`~numpyro_dp.DPMCMC` or driver of your own with a
            posterior, without a ``secret_key``.
        rng_key: Key of latents, outcomes and runs.
        *args: Arguments of the model: public or invented covariates, with as many rows as there
            are records, and ``None`` in place of the outcome. Do not pass private records.
        num_steps: Number of steps of a run, for drivers whose ``run`` needs it.
        num_simulations: Number of simulated data sets.
        num_samples: Draws from each posterior.
        simulated_data_to_args: ``(simulated, args, kwargs) -> (args, kwargs)``, with simulated
            values by observed site. By default they replace the argument of the same name, or the
            only one that is ``None``.
        progress_bar: Shows how many simulations are done.
        **kwargs: Keyword arguments of the model.

    Raises:
        ValueError: If the driver has a ``secret_key``, or if it is not clear which argument is the
            outcome.

    Example:
        >>> import jax, numpyro, numpyro.distributions as dist
        >>> from numpyro_dp import DPLaplace, PrivacyBudget
        >>> from numpyro_dp.posterior import rehearse
        >>> def model(x, y=None):
        ...     w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
        ...     with numpyro.plate("people", x.shape[0]):
        ...         numpyro.sample("y", dist.Bernoulli(logits=x @ w), obs=y)
        >>> invented = jax.random.normal(jax.random.key(1), (2000, 2))
        >>> laplace = DPLaplace(model, budget=PrivacyBudget(1.0, 1e-5))
        >>> found = rehearse(laplace, jax.random.key(0), invented, None, num_simulations=5,
        ...                  progress_bar=False)
        >>> print(str(found).splitlines()[0])
        5 simulations

    Guarantee:
        Reads only its arguments, which you declare public. No budget is spent.
    """
    check_rng_key(rng_key)
    check_int("num_simulations", num_simulations, low=2)
    runs = SimulatedRuns(driver, args, kwargs, num_steps, num_samples, simulated_data_to_args)
    with opened_bar(progress_bar, num_simulations, unit="simulation") as bar:
        runs.run(jax.random.split(rng_key, num_simulations), bar)
    return runs.found()


class SimulatedRuns:
    """The simulated runs of one driver so far."""

    def __init__(
        self, driver: Any, args: Args, kwargs: Kwargs, num_steps: int | None = None,
        num_samples: int = 1000,
        simulated_data_to_args: Callable[..., tuple[Args, Kwargs]] | None = None,
    ) -> None:  # fmt: skip
        self._driver, self._given, self._num_samples = driver, _given_of(driver), num_samples
        self._args, self._kwargs = args, kwargs
        if driver.settings.privacy.secret_key is not None:
            raise ValueError(
                "A driver with a secret_key can run once, but a rehearsal runs it many times. "
                "Build the driver without secret_key for the rehearsal."
            )
        self._steps = () if num_steps is None else (num_steps,)
        self._fill = simulated_data_to_args or _filler(self._given, args)
        takes_bar = "progress_bar" in inspect.signature(driver.run).parameters
        self._quiet = {"progress_bar": False} if takes_bar else {}
        self.rows: list[tuple[object, ...]] = []
        self.prior: np.ndarray | None = None

    def run(self, keys: Array, bar: Any) -> None:
        """Adds one run for each key."""
        for key in keys:
            draw_key, run_key, sample_key = jax.random.split(key, 3)
            latents, simulated, maps = _simulated(self._given, draw_key, self._args, self._kwargs)
            args, kwargs = self._fill(simulated, self._args, self._kwargs)
            if bar is not None:
                bar.set_description("rehearsing")
            with warnings.catch_warnings():
                # The figures say what becomes of runs that would be warned of.
                warnings.simplefilter("ignore", PosteriorWarning)
                result = self._driver.run(run_key, *self._steps, *args, **self._quiet, **kwargs)
                own = self._driver if result is None else result
                posterior = getattr(own, "posterior", own)
            if self.prior is None:  # the same for all simulations
                self.prior = _vectors(posterior.prior_draws(sample_key, self._num_samples), maps)
            draws = _vectors(posterior.sample(sample_key, self._num_samples), maps)
            truth = _vectors({n: jnp.asarray(v)[None] for n, v in latents.items()}, maps)[0]
            self.rows.append(_figures(truth, draws, self.prior))
            if bar is not None:
                bar.update()

    def found(self) -> Rehearsal:
        """The figures of all runs."""
        cover, *rest = (np.asarray(column) for column in zip(*self.rows, strict=True))
        return Rehearsal({p: np.asarray(c) for p, c in zip(_PROBS, cover.T, strict=True)}, *rest)


def _given_of(driver: Any) -> GivenModel:
    """The model of a driver."""
    for holder in (driver, getattr(driver, "_frontend", None), getattr(driver, "_reader", None)):
        found = getattr(holder, "_given", None) or getattr(holder, "given", None)
        if isinstance(found, GivenModel):
            return found
    raise TypeError(
        f"rehearse needs a driver of a NumPyro model, got {type(driver).__name__}. Use DPLaplace, "
        "DPSVI, DPSEP or DPMCMC."
    )


def _simulated(
    given: GivenModel, rng_key: Array, args: Args, kwargs: Kwargs
) -> tuple[dict[str, Array], dict[str, Array], Values]:
    """Latents, outcomes, and the maps to unconstrained coordinates."""
    _, kwargs = split_unit(kwargs, given.max_rows)
    trace = handlers.trace(handlers.seed(given.fn, rng_key)).get_trace(*args, **kwargs)
    # Without a plate, the size of the first array tells.
    rows = next((len(x) for x in jax.tree.leaves((args, kwargs)) if np.ndim(x)), None)
    latents, simulated, maps = {}, {}, {}
    for name, site in trace.items():
        if site["type"] != "sample" or site["is_observed"]:
            continue
        plate = given.data_plate
        if any(f.name == plate if plate else f.size == rows for f in site["cond_indep_stack"]):
            simulated[name] = site["value"]
        else:
            latents[name] = site["value"]
            maps[name] = biject_to(site["fn"].support).inv
    if not simulated:
        raise ValueError(
            "The model simulated no outcome. Pass None in place of the outcome, and covariates "
            "with as many rows as there are records."
        )
    return latents, simulated, maps


def _filler(given: GivenModel, args: Args) -> Callable[..., tuple[Args, Kwargs]]:
    """Puts simulated outcomes into the arguments of the same name, or into the only ``None``."""
    names = list(inspect.signature(given.model).parameters)
    known = argument_names(given.model, args)

    def fill(simulated: dict[str, Array], args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        own, rest = list(args), dict(kwargs)
        empty = [at for at, value in enumerate(args) if value is None]
        for site, value in simulated.items():
            if site in known and args[known.index(site)] is None:
                own[known.index(site)] = value
            elif len(simulated) == 1 and len(empty) == 1:
                own[empty[0]] = value
            elif site in names and rest.get(site) is None:
                rest[site] = value
            else:
                raise ValueError(
                    f"No argument is named like the observed site {site!r}, and not exactly one "
                    "argument is None. Pass simulated_data_to_args."
                )
        return tuple(own), rest

    return fill


def _vectors(draws: dict[str, Array], maps: Values) -> np.ndarray:
    """Draws by site as unconstrained vectors."""
    parts = [np.asarray(maps[name](jnp.asarray(draws[name])), np.float64) for name in sorted(maps)]
    return np.concatenate([part.reshape(len(part), -1) for part in parts], axis=1)


def _figures(truth: np.ndarray, draws: np.ndarray, prior: np.ndarray) -> tuple[object, ...]:
    held = []
    for prob in _PROBS:
        lower, upper = interval(draws, prob)
        held.append(np.mean((lower < truth) & (truth < upper)))
    both = [(x.mean(0), x.std(0)) for x in (draws, prior)]
    (mean, sd), (_, prior_sd) = both
    off = mean - truth
    return (
        held, *(np.mean(stats.norm.logpdf(truth, *each)) for each in both),
        np.mean(off / sd), np.sqrt(np.mean((off / prior_sd) ** 2)), np.mean(sd / prior_sd),
    )  # fmt: skip


def shown(values: np.ndarray) -> str:
    """Their mean, and its standard error in brackets."""
    error = np.std(values, ddof=1) / np.sqrt(len(values))
    return f"{np.mean(values):.3g} ({error:.2g})"
