"""Everything that can be added to the package: one row here, and the whole suite runs on it."""

import functools
import importlib.util
import pathlib
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax
import pytest
from correlated import CorrelatedNoise
from flat import grouped
from numpyro.infer.autoguide import AutoDiagonalNormal

from numpyro_dp import DPEM, DPMCMC, DPPBP, DPSEP, DPSVI, SGLD, DPLaplace, RegressionNetwork
from numpyro_dp.accounting import GDP, PLD, PRV, RDP, Best
from numpyro_dp.core import Estimator, MechanismBuilder
from numpyro_dp.estimators import (
    aligned,
    aligned_natural,
    centred,
    natural,
    preconditioned,
    vanilla,
)
from numpyro_dp.laplace.schedule import Kind
from numpyro_dp.laplace.stages import Run, Stages
from numpyro_dp.mechanisms import AdaptiveClip, GaussianMechanism
from numpyro_dp.model.variational import VariationalProblem
from numpyro_dp.posterior import tail_average
from numpyro_dp.samplers import FixedSize, FullBatch, Permutation, Poisson

from . import references

__all__ = [
    "ACCOUNTANTS", "ALL_IN_FULL", "DRIVERS", "ESTIMATORS", "FOLDS", "MECHANISMS", "SAMPLERS",
    "EstimatorRow", "by_row", "example", "pairs_to_run", "rows_to_run", "x64",
]  # fmt: skip


@functools.cache
def example(name: str) -> Any:
    """Returns a module of ``examples/extending``, read from its file as a user's own would be."""
    path = pathlib.Path(__file__).parents[2] / "examples" / "extending" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def by_row(rows: tuple[Any, ...], others: Any = ()) -> Any:
    """``parametrize`` over rows, with their names in ids, and marks of all but the first."""
    marks = [(), *[others] * (len(rows) - 1)]
    params = [pytest.param(r, id=r.name, marks=m) for r, m in zip(rows, marks, strict=True)]
    return pytest.mark.parametrize("row", params)


#: Marks of cases beyond the first that ``.ci/run`` runs too.
ALL_IN_FULL = (pytest.mark.full, pytest.mark.every_case)


class EstimatorRow(NamedTuple):
    """One estimator.

    Attributes:
        build: Makes what ``DPSVI(estimator=...)`` takes.
        reference: ``(bench, key, gradient of NumPyro's loss) -> gradient`` that it must equal
            without clip and noise.
        guides: Names of the automatic guides that it is for; ``None`` means every guide.
        without: Names of guides of the scenarios that it is not for.
        size: Of its signals where the guide's scale is 0.1, in units of those of ``aligned``.
        simulates: Whether it reads other outcomes of a record, for models that can simulate them.
            A record then adds a mean of clipped signals, which may be shorter than the clip norm.
            The signal has no factors, so the driver refuses to release losses.
    """

    name: str
    build: Callable[[], Callable[[VariationalProblem], Estimator]]
    reference: Callable[..., Any] = references.elbo
    guides: tuple[str, ...] | None = None
    without: tuple[str, ...] = ()
    size: float = 1.0
    simulates: bool = False


GAUSSIAN = ("AutoDiagonalNormal", "AutoNormal", "AutoMultivariateNormal")

ESTIMATORS: tuple[EstimatorRow, ...] = (
    EstimatorRow("aligned", aligned),
    EstimatorRow("vanilla", vanilla),
    EstimatorRow("preconditioned", preconditioned, guides=GAUSSIAN),
    EstimatorRow("natural", natural, references.natural, GAUSSIAN, size=0.1),
    EstimatorRow("aligned_natural", aligned_natural, references.natural, GAUSSIAN, size=0.01),
    EstimatorRow(
        "sticking_the_landing",
        example("sticking_the_landing").sticking_the_landing,
        references.path_derivative,
        # No density at a given draw: a flow without inverse, and a site besides the latents.
        without=("AutoBNAFNormal", "by_hand"),
    ),
    EstimatorRow("centred", lambda: centred(aligned()), references.less_simulated, simulates=True),
)


class MechanismRow(NamedTuple):
    """One mechanism with a clip norm as a user writes it."""

    name: str
    mechanism: MechanismBuilder
    clip_norm: Any = 1.5


MECHANISMS: tuple[MechanismRow, ...] = (
    MechanismRow("gaussian", GaussianMechanism()),
    MechanismRow("gaussian by entry", GaussianMechanism(), {"b": 0.5, ...: 2.0}),
    MechanismRow("adaptive", GaussianMechanism(), AdaptiveClip(1.5, share=0.1)),
    MechanismRow("automatic", example("automatic_clipping").AutomaticClipping()),
    MechanismRow("automatic by entry", example("automatic_clipping").AutomaticClipping(0.5),
        {"b": 0.5, ...: 2.0}),
    MechanismRow("correlated", CorrelatedNoise(0.5)),
)  # fmt: skip


class Row(NamedTuple):
    """One value of any other kind."""

    name: str
    value: Any


#: For 40 records.
SAMPLERS = tuple(
    Row(type(each).__name__, each)
    for each in (Poisson(0.2), FixedSize(8), Permutation(8), FullBatch())
)
ACCOUNTANTS = tuple(Row(type(each).__name__, each) for each in (Best(), PLD(), PRV(), RDP(), GDP()))
#: For 80 steps.
FOLDS = (Row("tail_average", tail_average(80)),)


KEY = jax.random.key(0)
LOSSES = frozenset({"loss_release"})


def _params_of(driver: Any, num_steps: int, data: Any) -> tuple[Any, Any]:
    result = driver.run(KEY, num_steps, *data, progress_bar=False)
    return result.params, result.privacy


def _samples_of(driver: Any, _: int, data: Any) -> tuple[Any, Any]:
    driver.run(KEY, *data)
    return driver.get_samples(), driver.privacy


def _draws_of(driver: Any, _: int, data: Any) -> tuple[Any, Any]:
    posterior = driver.run(KEY, *data, progress_bar=False)
    return posterior.sample(KEY, 20), posterior.privacy


def _first_stage(driver: DPLaplace, data: Any) -> tuple[Any, Any]:
    _, prior, guess = driver._prepared_for(data, {})
    plan = driver._schedule(prior.outcomes)
    stages, run = Stages(driver.settings, prior.outcomes, guess.groups), Run(prior, plan, guess)
    state = stages.start(KEY, run, data, {})
    request = run.request(plan.kinds.index(Kind.STAGE))
    return stages, state._replace(optim_state=(request, state.optim_state[1]))


class DriverRow(NamedTuple):
    """One driver.

    Attributes:
        build: ``(model of a mean, settings) -> driver``.
        entry: An entry of its signal, of several.
        columns: Axes of its records x: 1 or 2; a regression has y as well.
        refuses: Part of the message, by name of the mechanism that the driver does not take.
        lacks: Settings of all drivers that it chooses itself.
        run: ``(driver, num_steps, data) -> (what it publishes, report)``.
        num_steps: Steps in the report of ``run(driver, 8, data)``.
        begin: ``(driver, data) -> (driver of its loop, state)``, before a step that reads all of a
            record.
    """

    name: str
    build: Callable[..., Any]
    entry: str
    columns: int = 1
    targets: bool = False
    refuses: dict[str, str] = {}
    lacks: frozenset[str] = LOSSES | {"public", "data_plate", "max_rows_per_unit"}
    run: Callable[[Any, int, Any], tuple[Any, Any]] = _params_of
    num_steps: int = 8
    begin: Callable[[Any, Any], tuple[Any, Any]] = lambda driver, data: (
        driver,
        driver.init(KEY, *data),
    )


DRIVERS: tuple[DriverRow, ...] = (
    DriverRow(
        "DPSVI",
        lambda model, **settings: DPSVI(
            model, AutoDiagonalNormal(model), optax.sgd(0.1), estimator=aligned(),
            **grouped(**settings),
        ),
        "mean",
        lacks=frozenset(),
    ),
    DriverRow("DPLaplace", lambda model, **settings: DPLaplace(model, **grouped(**settings)),
        "score", lacks=LOSSES | {"clip_norm", "mechanism", "num_steps", "sampler"}, run=_draws_of,
        num_steps=20, begin=_first_stage),
    DriverRow("DPSEP", lambda model, **settings: DPSEP(model, **grouped(**settings)), "linear",
        lacks=LOSSES, refuses={"correlated": "DPSEP adds up the variances of independent noise"}),
    DriverRow(
        "DPMCMC",
        lambda model, **settings: DPMCMC(SGLD(model), **grouped(num_warmup=2, num_samples=6,
        progress_bar=False, **settings)),
        "mean",
        refuses={
            "correlated": "DPMCMC takes the noise for the thermal noise",
            "adaptive": "Expected clip_norm as a number",
        },
        lacks=LOSSES | {"num_steps"}, run=_samples_of,
        begin=lambda driver, data: (driver._driver, driver._driver.init(KEY, *data)),
    ),
    DriverRow("DPEM", lambda _, **settings: DPEM(2, **grouped(**settings)), "counts", 2,
        refuses={"correlated": "DPEM adds up the variances of independent noise"}),
    DriverRow("DPPBP", lambda _, **settings: DPPBP(RegressionNetwork((2,)), **grouped(**settings)),
        "linear", 2, True,
        refuses={"correlated": "DPPBP adds up the variances of independent noise"}),
)  # fmt: skip


def pairs_to_run() -> list[Any]:
    """Every driver with every mechanism; those that other tests nearly cover are extended."""
    quick = {"adaptive", "automatic", "correlated"}
    return [
        pytest.param(
            row, each, id=f"{row.name}-{each.name}",
            marks=() if each.name in quick else pytest.mark.extended,
        )
        for row in DRIVERS if "mechanism" not in row.lacks for each in MECHANISMS
    ]  # fmt: skip


def rows_to_run(guides_only: bool = False, simulated: bool = True) -> list[Any]:
    """Rows for ``parametrize``; those that share the ways of ``vanilla`` are extended or slow.

    ``guides_only`` leaves out those that are for some guides alone, and ``simulated=False`` those
    that simulate outcomes.
    """
    marks = {
        "preconditioned": pytest.mark.extended,
        "natural": pytest.mark.slow,
        "aligned_natural": pytest.mark.slow,
        "centred": ALL_IN_FULL,
    }
    every_guide = [row for row in ESTIMATORS if row.guides is None and not row.without]
    rows = [r for r in (every_guide if guides_only else ESTIMATORS) if simulated or not r.simulates]
    return [pytest.param(row, id=row.name, marks=marks.get(row.name, ())) for row in rows]


def x64(enable: bool = True) -> Any:
    """Context manager for double precision, on old and new JAX."""
    if hasattr(jax, "enable_x64"):
        return jax.enable_x64(enable)
    from jax.experimental import enable_x64

    return enable_x64(enable)
