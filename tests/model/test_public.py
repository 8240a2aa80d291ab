"""A record is a row of an argument: what is refused, what is accepted, and what a report lists."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from flat import grouped
from hostile import (
    HOSTILE,
    KEY,
    NOISY,
    PATIENT_OF,
    PATIENTS,
    Call,
    D,
    N,
    X,
    Y,
    column_means,
    delta,
    guided,
    located,
    mcmc,
    regression,
    sep,
    svi,
    visits,
)
from numpyro.infer.autoguide import AutoDelta, AutoNormal
from numpyro.infer.initialization import init_to_value
from ordinary import ORDINARY

from numpyro_dp import DPSEP, DPSVI, SGLD, DPLaplace
from numpyro_dp.model.public import PublicValues, argument_names, declare

ROWS = {row.name: row for row in HOSTILE}
REFUSED = [row for row in HOSTILE if row.parts is not None]
SAFE = [row for row in HOSTILE if row.parts is None]
SLACK = 1e-3

# One row for each way of a record around its argument: these are in the README's tier.
KINDS = {
    "a_jitted_helper_standardises", "the_body_of_a_scan", "a_branch_of_cond",
    "the_rule_of_a_custom_derivative", "a_rule_for_batches_that_mixes_records", "a_partial_model",
    "a_default_argument", "records_by_condition", "many_small_captured_arrays",
    "a_column_of_two_values_as_many_arrays", "a_column_of_records_that_are_all_alike",
    "a_pure_callback_in_the_model", "a_guide_that_publishes_column_means", "a_start_at_the_means",
    "a_fold_that_adds_records", "an_optimiser_that_adds_records",
    "an_estimator_that_adds_records_afterwards", "a_list_of_rows", "a_table_of_patients",
    "a_gram_matrix", "a_panel_with_time_first", "a_second_table_beside_a_mixture",
    "records_written_out_by_a_loop_over_a_list",
}  # fmt: skip


# Shapes decide: records of NaN give the same message.
BLIND = {
    "a_jitted_helper_standardises", "a_table_of_patients", "a_gram_matrix", "a_start_at_the_means",
}  # fmt: skip
# Those that need no guide, optimiser or fold.
OF_A_MODEL = sorted(KINDS - {
    "a_column_of_records_that_are_all_alike", "a_guide_that_publishes_column_means",
    "a_start_at_the_means", "a_fold_that_adds_records", "an_optimiser_that_adds_records",
    "an_estimator_that_adds_records_afterwards", "a_second_table_beside_a_mixture",
})  # fmt: skip


def as_parameters(rows: Any, mark: Callable[[int, Any], Any]) -> list[Any]:
    """Rows with their marks and names."""
    return [
        pytest.param(row, id=row.name, marks=mark(number, row) or ())
        for number, row in enumerate(rows)
    ]


def test_names_are_taken_once() -> None:
    assert {row.name for row in REFUSED} >= KINDS
    for table in (HOSTILE, ORDINARY):
        assert len({row.name for row in table}) == len(table)


@pytest.mark.table
@pytest.mark.parametrize(
    "row", as_parameters(REFUSED, lambda _, row: row.name in KINDS and pytest.mark.every_case)
)
def test_what_is_hostile_is_refused(row: Any) -> None:
    with pytest.raises((ValueError, TypeError)) as error:
        row.build().initialise()
    message = str(error.value)
    assert type(error.value).__module__.split(".")[0] in ("builtins", "numpyro_dp"), message
    for part in row.parts:
        assert part in message
    if row.name in BLIND:
        call = row.build()
        args = jax.tree.map(lambda leaf: taken_out(np.array(leaf)), call.args)
        with pytest.raises(type(error.value)) as other:
            call._replace(args=args).initialise()
        assert str(other.value) == message


@pytest.mark.table
@pytest.mark.parametrize("name", OF_A_MODEL)
@pytest.mark.usefixtures("no_run")
def test_a_hostile_model_is_refused_by_laplace_too(name: str) -> None:
    call = ROWS[name].build()
    assert call.driver is DPSVI
    other = ("guide", "optim", "estimator", *NOISY)
    kept = {key: value for key, value in call.options.items() if key not in other}
    with pytest.raises((ValueError, TypeError)) as error:
        DPLaplace(**grouped(noise_multiplier=1.0, **kept)).run(KEY, *call.args, **call.kwargs)
    for part in ROWS[name].parts:
        assert part in str(error.value)


def without_noise(call: Call) -> Call:
    """The same call with steps that move by what is released.

    One secret key for all calls: other records then have the same seeds of their own draws, as
    under a distribution that does not depend on the record that changes.
    """
    changes: dict[str, Any] = {"noise_multiplier": 0.0, "secret_key": 11, "repetition": True}
    if call.driver is DPSVI:
        changes["optim"] = optax.sgd(1.0)
    if call.driver is DPSEP:
        changes["damping"] = 1.0
    return call._replace(options=call.options | changes)


def released(call: Call, driver: Any, change: Any) -> dict[str, np.ndarray]:
    """Where one step arrives, after a change of one record."""

    def changed(leaf: Any) -> Any:
        leaf = np.array(leaf)
        leaf[3] = change(leaf[3])
        return leaf

    args = tuple(
        jax.tree.map(changed, arg) if place in call.records else arg
        for place, arg in enumerate(call.args)
    )
    values = call._replace(args=args).steps(1, driver)
    return {name: np.asarray(value, np.float64) for name, value in values.items()}


def as_it_is(values: np.ndarray) -> np.ndarray:
    return values


def taken_out(values: np.ndarray) -> np.ndarray:
    """A record of NaN counts as 0."""
    return np.full_like(values, np.nan) if values.dtype.kind == "f" else values


def pulled_far(values: np.ndarray) -> np.ndarray:
    return 100 * values + 50 if values.dtype.kind == "f" else np.zeros_like(values)


def distance(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> float:
    return float(np.sqrt(sum(np.square(one[name] - other[name]).sum() for name in one)))


@pytest.mark.table
@pytest.mark.parametrize("row", as_parameters(SAFE, lambda *_: ()))
def test_what_is_accepted_is_safe(row: Any) -> None:
    """No record moves the sum by more than the clip norm, nor its replacement by more than two."""
    call = without_noise(row.build())
    leaves = jax.tree.leaves([call.args[place] for place in call.records])
    clip_norm = call.options["clip_norm"]
    driver = call.make()
    whole, far = released(call, driver, as_it_is), released(call, driver, pulled_far)
    assert all(np.isfinite(value).all() for value in whole.values())
    assert distance(whole, far) <= 2 * clip_norm + SLACK
    reads = distance(whole, far) > 0
    if any(leaf.dtype.kind == "f" for leaf in leaves):
        without = released(call, driver, taken_out)
        assert distance(whole, without) <= clip_norm + SLACK
        assert distance(far, without) <= clip_norm + SLACK
        reads = reads or distance(whole, without) > 0
    assert reads


def tier(number: int, row: Any) -> Any:
    """All slow rows and every sixth of the others: .ci/run has no time for more."""
    return pytest.mark.slow if row.slow else number % 6 and pytest.mark.extended


@pytest.mark.table
@pytest.mark.parametrize("row", as_parameters(ORDINARY, tier))
def test_what_is_ordinary_is_accepted(row: Any) -> None:
    row.build().initialise()


@pytest.mark.slow
@pytest.mark.parametrize(
    "row", as_parameters(ORDINARY, lambda number, _: number % 24 and pytest.mark.extended)
)
def test_what_is_ordinary_runs(row: Any) -> None:
    values = row.build().steps(2)
    assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(values))


MEANS, KNOTS = X.mean(0), jnp.linspace(-1, 1, 12)
TABLE, COLUMN = jnp.asarray(X) + 0, jnp.asarray(Y) + 0
LINE = np.linspace(0, 1, N, dtype=np.float32)
VARIANCE = X.var() * np.eye(D, dtype=np.float32)
BY_VISIT = (X, Y, PATIENTS, PATIENT_OF)


def with_scale(x, y, z):
    located(likelihood=lambda mean: dist.Normal(mean, 1 + jnp.mean(z) ** 2))(x, y)


def interpolated(x, w):
    return jax.jit(lambda x: jnp.interp(x, KNOTS, KNOTS))(x) @ w


# What a report lists: a place, and a shape.
REPORTS: dict[str, tuple[Any, list[tuple[str, tuple[int, ...]]]]] = {
    "records alone": (lambda: svi(regression, X, Y), []),
    "an argument": (lambda: svi(visits, *BY_VISIT, public=["patients"]), [("patients", (25, 2))]),
    "an argument of DPSEP": (lambda: sep(visits, *BY_VISIT, public=["patients"]),
        [("patients", (25, 2))]),
    "an argument of a sampler": (lambda: mcmc(SGLD(visits, 1e-3), *BY_VISIT, public=["patients"]),
        [("patients", (25, 2))]),
    "an argument with a row for each record": (lambda: delta(with_scale, X, Y, Y + 1, public=["z"]),
        [("z", (N,))]),
    "a static keyword, and none that is no array": (
        lambda: svi(
            located(lambda x, w, grid, name: x @ w + jnp.mean(grid)), X, Y, grid=LINE, name="wide"
        ), [("grid", (N,))],
    ),
    "means that NumPy computed before the model was traced": (
        lambda: svi(
            located(lambda x, w: (x - jnp.asarray(MEANS)) @ w), X, Y,
            guide=guided(lambda: jnp.asarray(MEANS[:2]).sum()),
        ), [("model", (3,)), ("guide", (2,))],
    ),
    "what an inner program captures": (lambda: svi(located(interpolated), X, Y),
        [("model", (12,))]),
    "a start": (
        lambda: svi(
            regression, X, Y, public=[MEANS],
            guide=AutoNormal(regression, init_loc_fn=init_to_value(values={"w": MEANS})),
        ), [("", (3,))],
    ),
    "captured records that are declared, in whatever program": (
        lambda: svi(
            located(lambda x, w: jax.jit(lambda x: x - TABLE.mean(0))(x) @ w), X, Y, public=[TABLE]
        ), [("", (N, D))],
    ),
    "captured records that are declared in a pytree": (
        lambda: svi(
            located(lambda x, w: (x - TABLE.mean(0)) @ w + COLUMN.mean()), X, Y,
            public=[{"first": TABLE, "second": (COLUMN,)}],
        ), [("", (N, D)), ("", (N,))],
    ),
    "a small statistic": (lambda: svi(located(lambda x, w: x @ jnp.asarray(VARIANCE) @ w), X, Y),
        [("model", (D, D))]),
}  # fmt: skip
RARE = {
    "an argument of a sampler", "what an inner program captures", "a small statistic",
    "an argument of DPSEP", "captured records that are declared in a pytree",
}  # fmt: skip


def assert_listed(privacy: Any, expected: list[tuple[str, tuple[int, ...]]]) -> None:
    """These places and shapes are entries, and nothing else; the printed report shows them."""
    assert isinstance(privacy.public, tuple)
    assert sorted(each.shape for each in privacy.public) == sorted(shape for _, shape in expected)
    for place, shape in expected:
        found = [each for each in privacy.public if place in each.place and each.shape == shape]
        assert len(found) == 1 and np.dtype(found[0].dtype) == np.float32
        assert found[0].place in str(privacy)
        assert str(list(shape))[1:-1] in str(privacy)


@pytest.mark.full
@pytest.mark.every_case
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.extended] * (n in RARE)) for n in REPORTS]
)
def test_a_report_lists_what_is_public_and_nothing_else(name: str) -> None:
    build, expected = REPORTS[name]
    privacy = build().report()
    plate = "visits" if ("patients", (25, 2)) in expected else "records"
    assert privacy.data_plate == plate and plate in str(privacy)
    assert_listed(privacy, expected)


def with_scalars(*more: Any) -> Any:
    few = [jnp.asarray(value) for value in Y[:25]]
    return svi(located(lambda x, w, scalars: x @ w + sum(scalars)), X, Y, [*few, *more])


NAMES = ["patient", "'x'", "'y'", "'patients'", "'patient_of'"]
DECLARED: dict[str, tuple[Any, list[str]]] = {
    "another array than the declared one": (
        lambda: svi(
            located(lambda x, w: x @ w + column_means() @ w), X, Y, public=[jnp.zeros((N, D))]
        ), ["(60, 3)"],
    ),
    "a name that is not there": (lambda: svi(visits, *BY_VISIT, public=["patient"]), NAMES),
    "that of DPSEP": (lambda: sep(visits, *BY_VISIT, public=["patient"]), NAMES),
    "a name alone": (lambda: svi(visits, *BY_VISIT, public="patients"), ["public"]),
    **{f"another kind, {value}": (
        lambda value=value: svi(visits, *BY_VISIT, public=value), ["public"]
    ) for value in (3, [3.5], [None])},
    "all records": (lambda: svi(regression, X, Y, public=["x", "y"]), ["60"]),
    "arguments are no captured arrays": (lambda: svi(visits, *BY_VISIT, public="captured"),
        ["(25, 2)"]),
    "too many scalars": (lambda: with_scalars(jnp.asarray(0.0)), ["26 arrays of one number"]),
}  # fmt: skip


@pytest.mark.parametrize("name", DECLARED)
def test_what_is_declared_public_wrongly_is_refused(name: str) -> None:
    build, parts = DECLARED[name]
    with pytest.raises((ValueError, TypeError)) as error:
        build().initialise()
    for part in parts:
        assert part in str(error.value)


@pytest.mark.full
def test_scalars_are_small_while_they_are_few() -> None:
    with_scalars().initialise()


@pytest.mark.parametrize(("number", "allowed"), [(60, 15), (200, 50), (400, 100), (10**6, 100)])
def test_undeclared_arrays_have_a_quarter_of_the_records_and_at_most_a_hundred_entries(
    number: int, allowed: int
) -> None:
    """Whatever their shape and values; only the whole counts, and all of it is listed."""

    def held(*tables: Any) -> Any:
        public = PublicValues(declare(), "records", number)
        public.check("model", lambda x: x + sum(jnp.sum(jnp.asarray(t)) for t in tables), 0.0)
        return sorted(each.shape for each in public.arrays)

    for table in (np.ones, np.zeros, np.arange, lambda n: np.sin(np.arange(n))):
        assert held(table(allowed)) == [(allowed,)]
        assert held(table(5), np.cos(np.arange(allowed - 5))) == sorted([(5,), (allowed - 5,)])
        with pytest.raises(ValueError, match=f"{allowed + 1} entries. At most {allowed} are"):
            held(table(allowed + 1))
        with pytest.raises(ValueError, match=f"{allowed + 5} entries"):
            held(np.cos(np.arange(allowed)), table(5))
    with pytest.raises(ValueError, match="entries"):
        held(3.5 * np.eye(21))


@pytest.mark.extended
def test_everything_that_is_captured_may_be_declared_public() -> None:
    """And is listed, whatever NumPy made of it before JAX saw it."""
    points = X[:20]
    loc = located(lambda x, w: x @ w + jnp.asarray(points[:, None] - points).mean())
    with pytest.raises(ValueError, match="NumPy computes it inside the model.*'captured'"):
        svi(loc, X, Y, public=[points]).initialise()
    for public in ("captured", ["captured"]):
        assert_listed(svi(loc, X, Y, public=public).report(), [("model", (20, 20, D))])
    svi(visits, *BY_VISIT, public=["patients", "captured"]).initialise()


def test_a_sweep_refuses_as_a_run_does() -> None:
    driver = svi(visits, X, Y).make()
    with pytest.raises(ValueError, match=r"\(25, 2\)"):
        driver.sweep(jax.random.split(KEY, 2), 2, X, Y, PATIENTS, PATIENT_OF)


@pytest.mark.full
def test_a_guide_of_another_driver_is_checked_again() -> None:
    """A guide that one driver has set up is read anew by the next."""
    guide = AutoDelta(regression)
    svi(regression, X, Y, guide=guide).steps(1)
    holding = located(lambda x, w: (x - column_means()) @ w)
    with pytest.raises(ValueError, match=r"\(60, 3\)"):
        svi(holding, X, Y, guide=guide).initialise()


def test_names_of_arguments_are_those_of_the_wrapper() -> None:
    """``public=["t"]`` must not declare the argument that stands where an inner model has t."""

    def inner(y: Any, z: Any, t: Any) -> None: ...

    reordered = functools.wraps(inner)(lambda t, y, z: None)
    passed_on = functools.wraps(inner)(lambda *args: None)
    args = (1, 2, 3)
    assert argument_names(reordered, args) == ["t", "y", "z"]
    for model in (inner, passed_on, jax.jit(inner), numpyro.handlers.seed(inner, 0)):
        assert argument_names(model, args) == ["y", "z", "t"]
    assert argument_names(lambda *values: None, args) == ["args[0]", "args[1]", "args[2]"]
