"""A unit of several rows is one record: its signals are added up and clipped once."""

import math
import pathlib
import runpy

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from flat import dpmcmc, dpsep, dpsvi, grouped
from models import logistic
from numpyro.infer.autoguide import AutoDelta, AutoDiagonalNormal

from numpyro_dp import (
    DPSEP,
    DPSVI,
    SEP,
    SGLD,
    BudgetError,
    DPLaplace,
    Ledger,
    LedgerError,
    Privacy,
    PrivacyBudget,
    UnsupportedModelError,
    check_records,
    fit,
)
from numpyro_dp.estimators import aligned, centred, vanilla
from numpyro_dp.laplace.signal import staged_scores
from numpyro_dp.laplace.stages import Run, Stages
from numpyro_dp.model.frames import as_arrays
from numpyro_dp.model.units import Grouped, Units, group, number_of_units
from numpyro_dp.posterior import rehearse
from numpyro_dp.samplers import FullBatch, Poisson

KEY, R = jax.random.key(0), 3
rng = np.random.default_rng(0)
IDS = np.array([7, 2, 7, 2, 9, 2, 2, 4, 7, 5, 5, 2])
X = rng.normal(size=(len(IDS), 2)).astype(np.float32)
Y = rng.integers(0, 2, len(IDS))

model = logistic("rows")


def kept_rows():
    """The rows of each unit that count, by a loop."""
    return [np.flatnonzero(unit == IDS)[:R] for unit in np.unique(IDS)]


def total(estimator, x=X, y=Y, ids=IDS, clip=0.3):
    """The sum of clipped scores in one step from w = init, read off a step of gradient descent."""
    svi = dpsvi(model, AutoDelta, optax.sgd(1.0), estimator=estimator, clip_norm=clip,
                noise_multiplier=0.0, max_rows_per_unit=R, secret_key=4,
                repetition=True)  # fmt: skip
    start = {"w_auto_loc": jnp.array([0.3, -0.2])}
    call = {"init_params": start, "progress_bar": False, "unit": ids}
    found = svi.run(KEY, 1, x, y, **call).params["w_auto_loc"]
    # The step adds the scores of the records, and that of the prior, -w, which leaves their sum.
    return np.asarray(found)


@pytest.mark.table
@pytest.mark.parametrize("estimator", [aligned(), vanilla()])
def test_the_sum_is_that_of_clipped_sums(estimator):
    w, expected = np.array([0.3, -0.2]), np.zeros(2)
    for rows in kept_rows():
        residual = Y[rows] - 1 / (1 + np.exp(-X[rows] @ w))
        score = residual @ X[rows]
        expected += score * min(1, 0.3 / np.linalg.norm(score))
    np.testing.assert_allclose(total(estimator), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.table
@pytest.mark.parametrize("estimator", [aligned(), vanilla(), centred(aligned())])
def test_a_neighbour_lacks_all_rows_of_a_unit(estimator):
    own = (IDS == 2)[:, None]
    # A unit that is not finite counts as none, and the seeds of the others stay as they are.
    with_, without = (total(estimator, np.where(own, f * X, X)) for f in (np.float32(1e3), np.nan))
    assert 1e-3 < np.linalg.norm(with_ - without) <= 0.3 * (1 + 1e-5)


def test_further_rows_of_a_unit_are_left_out():
    few = np.concatenate(kept_rows())
    np.testing.assert_array_equal(total(aligned()), total(aligned(), X[few], Y[few], IDS[few]))


@pytest.mark.full
def test_a_row_that_is_not_finite_takes_its_unit_out():
    x = X.copy()
    x[np.flatnonzero(IDS == 7)[1]] = np.nan
    found = total(aligned(), x), total(aligned(), X[IDS != 7], Y[IDS != 7], IDS[IDS != 7])
    np.testing.assert_allclose(*found, rtol=1e-5)


def test_groups():
    places, counted = group(IDS, len(IDS), R)
    for unit, rows in enumerate(kept_rows()):
        assert list(places[unit][counted[unit] > 0]) == list(rows)
        assert set(places[unit]) == set(rows)  # places that do not count repeat a row of the unit
    np.testing.assert_array_equal(group(IDS.astype(str), len(IDS), R)[1].sum(), counted.sum())
    units = Units(IDS, len(IDS), len(places), R)
    grouped = Grouped(X, units)
    assert grouped.shape == (*places.shape, 2)
    np.testing.assert_array_equal(grouped[:], X[places])
    np.testing.assert_array_equal(Grouped(None, units)[:], counted)
    np.testing.assert_array_equal(grouped[np.array([3, 0])], X[places[[3, 0]]])


@pytest.mark.full
def test_units_of_one_row_are_rows():
    own = {"clip_norm": 0.5, "sampler": Poisson(0.3), "noise_multiplier": 1.0, "secret_key": 4,
           "repetition": True, "estimator": aligned()}  # fmt: skip
    guide = AutoDiagonalNormal(model)
    by_row = DPSVI(model, guide, optax.sgd(0.1), **grouped(**own)).run(
        KEY, 5, X, Y, progress_bar=False
    )
    by_unit = DPSVI(model, guide, optax.sgd(0.1), **grouped(max_rows_per_unit=1, **own)).run(
        KEY, 5, X, Y, progress_bar=False, unit=np.arange(len(IDS))
    )
    for name, value in by_row.params.items():
        np.testing.assert_allclose(value, by_unit.params[name], rtol=1e-5)


@pytest.mark.full
def test_streamed_units_give_the_same():
    own = {"clip_norm": 0.5, "sampler": Poisson(0.4), "noise_multiplier": 1.0, "secret_key": 4,
           "repetition": True}  # fmt: skip
    svi = DPSVI(
        model, AutoDiagonalNormal(model), optax.sgd(0.1), **grouped(max_rows_per_unit=R, **own)
    )
    call = {"progress_bar": False, "unit": IDS}
    found = [svi.run(KEY, 5, X, Y, stream=stream, **call) for stream in (False, True)]
    for name, value in found[0].params.items():
        np.testing.assert_array_equal(value, found[1].params[name])


@pytest.mark.extended
def test_message_passing_adds_the_sites_of_rows():
    few, own = np.concatenate(kept_rows()), {"noise_multiplier": 0.0, "sampler": FullBatch()}
    by_row = SEP(model).run(KEY, 30, X[few], Y[few], progress_bar=False)
    sep = DPSEP(model, **grouped(clip_norm=math.inf, max_rows_per_unit=R, **own))
    by_unit = sep.run(KEY, 30, X, Y, unit=IDS, progress_bar=False)
    for name, value in by_row.params.items():
        # The cavity of a unit leaves out the mean factor of a unit, and that of a row one of a row.
        np.testing.assert_allclose(value, by_unit.params[name], rtol=0.05, atol=0.05)


@pytest.mark.extended
def test_message_passing_clips_the_site_of_a_unit():
    changes = []
    for factor in (100.0, np.nan):
        x = np.where((IDS == 2)[:, None], np.float32(factor) * X, X)
        sep = dpsep(model, clip_norm=0.3, max_rows_per_unit=R, noise_multiplier=0.0, damping=1.0)
        state = sep.run(KEY, 1, x, Y, unit=IDS, progress_bar=False).state
        released = state.optim_state.released
        changes.append(np.concatenate([np.ravel(released[n]) for n in sorted(released)]))
    # A unit that is not finite counts as one without information, so two records are compared. The
    # prior has mean 0, so linear terms are where they are clipped.
    assert 1e-3 < np.linalg.norm(changes[0] - changes[1]) <= 2 * 0.3


@pytest.mark.full
@pytest.mark.table
@pytest.mark.parametrize("kind", ["DPSVI", "DPMCMC", "DPLaplace", "fit"])
def test_reports_count_units(kind):
    ids, own = np.repeat(np.arange(300), 2), {"max_rows_per_unit": 2}
    x = rng.normal(size=(600, 2)).astype(np.float32)
    y = (x[:, 0] > 0) * 1
    budget = PrivacyBudget(1.0, 1e-5)
    if kind == "fit":
        report = fit(model, x, y, unit=ids, budget=budget, rng_key=KEY, **own).privacy
    elif kind == "DPLaplace":
        report = DPLaplace(model, **grouped(budget=budget, **own)).run(KEY, x, y, unit=ids).privacy
    elif kind == "DPMCMC":
        mcmc = dpmcmc(SGLD(model), num_warmup=2, num_samples=3, budget=budget, **own)
        mcmc.run(KEY, x, y, unit=ids)
        report = mcmc.privacy
    else:
        svi = DPSVI(
            model,
            AutoDiagonalNormal(model),
            optax.sgd(0.1),
            **grouped(clip_norm=1.0, budget=budget, sampler=FullBatch(), **own),
        )
        assert svi.plan(3, x, y, unit=ids).num_examples == 300
        report = svi.run(KEY, 3, x, y, unit=ids, progress_bar=False).privacy
    assert (report.plan.num_examples, report.max_rows) == (300, 2)
    assert "One of 300 units, with all rows of plate 'rows' that have its id." in str(report)
    assert "A person with several ids" in str(report)
    assert "A person with several records" not in str(report)
    with pytest.raises(BudgetError, match="record of this run is a row"):
        DPLaplace(model, budget=PrivacyBudget(3.0, 1e-5).after(report)).run(KEY, x, y)


@pytest.mark.full
def test_a_ledger_counts_one_kind_of_unit(tmp_path):
    ledger = Ledger(tmp_path / "ledger", PrivacyBudget(3.0, 1e-5))
    ids = np.repeat(np.arange(300), 2)
    x = rng.normal(size=(600, 2)).astype(np.float32)
    y = (x[:, 0] > 0) * 1

    def run(**unit):
        rows = {"max_rows_per_unit": 2} if unit else {}
        driver = DPLaplace(model, **grouped(budget=ledger.budget(0.5, purpose="test"), **rows))
        return driver.run(KEY, x, y, **unit)

    run(unit=ids)
    with pytest.raises(LedgerError, match="One total cannot cover both"):
        run()
    run(unit=ids)
    assert len(Ledger(tmp_path / "ledger", PrivacyBudget(3.0, 1e-5)).entries) == 2


def laplace_signals(x, y, ids):
    """The signals of a stage, which have norm at most 1."""
    driver = DPLaplace(model, budget=PrivacyBudget(1.0, 1e-5), privacy=Privacy(max_rows_per_unit=R))
    _, prior, guess = driver._prepared_for((x, y), {"unit": ids})
    plan = driver._schedule(prior.outcomes)
    stages, run = Stages(driver.settings, prior.outcomes, guess.groups), Run(prior, plan, guess)
    stages.start(KEY, run, (x, y), {"unit": ids})
    session = stages._session((x, y), {"unit": ids})
    estimator = staged_scores(prior.outcomes, 3)(session.problem)
    found = []
    for release in range(len(plan.shares)):
        public = estimator.prepare(KEY, run.request(release))
        rows = session.rows((x, y), {"unit": ids}).arrays
        signals = jax.vmap(lambda example, public=public: estimator.signal(public, example))(rows)
        found.append(sum(np.sum(np.square(v), axis=tuple(range(1, np.ndim(v))))
                         for v in jax.tree.leaves(signals)))  # fmt: skip
    return np.sqrt(found)


@pytest.mark.full
def test_signals_of_units_keep_the_bounds_of_a_stage():
    x = X * np.where(IDS == 2, 1e3, 1)[:, None].astype(np.float32)
    norms = laplace_signals(x, Y, IDS)
    assert norms.shape[1] == len(np.unique(IDS))
    assert norms.max() <= 1 + 1e-5
    assert norms.max() > 0.05


def test_bad_ids_are_refused():
    svi = dpsvi(model, AutoDiagonalNormal, optax.sgd(0.1), max_rows_per_unit=R, estimator=None)
    with pytest.raises(TypeError, match="needs the unit of each row"):
        svi.run(KEY, 2, X, Y)
    with pytest.raises(ValueError, match="one id for each row"):
        svi.run(KEY, 2, X, Y, unit=IDS[:5])
    with pytest.raises(ValueError, match="missing ids"):
        svi.run(KEY, 2, X, Y, unit=np.where(IDS == 2, np.nan, IDS))
    state = svi.init(KEY, X, Y, unit=IDS)
    with pytest.raises(TypeError, match="unit= is traced"):
        jax.jit(lambda state, ids: svi.update(state, X, Y, unit=ids))(state, IDS)
    jax.jit(lambda state, x: svi.update(state, x, Y, unit=IDS))(state, X)
    with pytest.raises(ValueError, match="max_rows_per_unit"):
        DPSVI(model, AutoDiagonalNormal(model), optax.sgd(0.1), clip_norm=1.0,
              sampler=FullBatch(), privacy=Privacy(noise_multiplier=1.0, max_rows_per_unit=0)).run(
                  KEY, 2, X, Y, unit=IDS)  # fmt: skip
    svi.update(state, X, Y, unit=IDS)


def test_ids_without_a_number_of_rows_are_refused():
    svi = dpsvi(model, AutoDiagonalNormal, optax.sgd(1.0), estimator=None)
    for call in (
        lambda: fit(model, X, Y, epsilon=1.0, rng_key=KEY, unit=IDS),
        lambda: svi.run(KEY, 3, X, Y, unit=IDS),
    ):
        with pytest.raises(TypeError, match="unit= needs max_rows_per_unit="):
            call()


def test_latents_of_rows_are_refused():
    def local(x):
        mean = numpyro.sample("mean", dist.Normal(0, 1))
        with numpyro.plate("rows", x.shape[0]):
            own = numpyro.sample("own", dist.Normal(mean, 1))
            numpyro.sample("x", dist.Normal(own, 1), obs=x)

    svi = dpsvi(local, AutoDiagonalNormal, optax.sgd(0.1), max_rows_per_unit=R, estimator=None)
    with pytest.raises(UnsupportedModelError, match="belong to single rows"):
        svi.run(KEY, 2, X[:, 0], unit=IDS)


@pytest.mark.every_case
@pytest.mark.parametrize("ids", [
    np.array(["a", None, "b"], object),
    np.array(["a", np.nan, "b"], object),
    np.array([1, 1.0, 2], object),
    np.array([1, "1", 2], object),
    np.array([None, None, None], object),
    np.array(["2020-01-01", "NaT", "2020-01-02"], "datetime64[D]"),
    np.array([1.0, np.nan, 2.0]),
    ["a", float("nan"), "b"],
    [1, 2.0, 3],
    [2**53, 2**53 + 1, 1.0],
    np.array([2**53, 2**53 + 1, 1.0]),
    np.array([2**24, 2**24 + 1, 1], np.float32),
    np.ma.array([1, 2, 3], mask=[False, True, False]),
])  # fmt: skip
def test_missing_and_mixed_ids_are_refused(ids):
    with pytest.raises(ValueError, match="missing ids, ids of several types"):
        group(ids, 3, 2)


@pytest.mark.parametrize("missing", ["nan", "None", "NaT", "<NA>", "NA", " "])
def test_texts_that_stand_for_a_missing_id_are_refused(missing):
    for ids in (["a", missing, "b"], np.array(["a", missing, "b"])):
        with pytest.raises(ValueError, match="stand for a missing id"):
            group(ids, 3, 2)


def test_ids_are_read_by_value():
    """NumPy would make neighbours beyond 2^53, or bytes that end in a zero, one id."""
    for ids in ([2**53, 2**53 + 1, 5], [2**70, 2**70 + 1, 5], [b"a", b"a\0", b"b"]):
        assert number_of_units(ids, 3) == 3
    for ids in (["a", "b", "a"], [1.0, 2.0, 1.0], (np.int64(1), 2, 1), np.ma.array([1, 2, 1])):
        assert group(ids, 3, 2)[1].tolist() == [[1, 1], [1, 0]]


@pytest.mark.every_case
@pytest.mark.parametrize("library", ["pandas", "polars", "pyarrow"])
def test_ids_of_frames(library):
    def column(values):
        module = pytest.importorskip(library)
        return module.array(values) if library == "pyarrow" else module.Series(values)

    def units(values):
        _, kwargs = as_arrays((), {"unit": column(values)})
        return number_of_units(kwargs["unit"], 3)

    assert units(["a", "b", "a"]) == units([2**53 + 1, 2**53, 2**53]) == 2
    for values in (["a", None, "b"], [2**53 + 1, None, 2**53]):
        with pytest.raises(ValueError, match="missing ids"):
            units(values)


def test_missing_ids_of_a_nullable_and_of_a_categorical_column():
    pandas = pytest.importorskip("pandas")
    for values, kind in (([1, None, 2], "Int64"), (["a", None, "b"], "category")):
        _, kwargs = as_arrays((), {"unit": pandas.Series(values, dtype=kind)})
        with pytest.raises(ValueError, match="missing ids"):
            number_of_units(kwargs["unit"], 3)


@pytest.mark.extended
def test_a_model_may_have_an_argument_of_this_name():
    def own(x, unit):
        w = numpyro.sample("w", dist.Normal(0, 1))
        with numpyro.plate("rows", len(x)):
            numpyro.sample("x", dist.Normal(w * unit, 1), obs=x)

    svi = DPSVI(own, AutoDiagonalNormal(own), optax.sgd(0.1), clip_norm=1.0,
                sampler=FullBatch(), privacy=Privacy(noise_multiplier=1.0))  # fmt: skip
    unit = np.where(np.arange(len(X)) == 3, np.nan, X[:, 1])
    svi.run(KEY, 2, X[:, 0], unit=unit, progress_bar=False)
    svi.run(KEY, 2, X[:, 0], unit=2.0, progress_bar=False)


def test_the_allowance_of_small_arrays_counts_units():
    held = np.linspace(0, 1, 80)

    def with_table(x, y=None):
        w = numpyro.sample("w", dist.Normal(0, 1))
        with numpyro.plate("rows", x.shape[0]):
            numpyro.sample("y", dist.Normal(w * jnp.sum(held * x[:, :1], axis=1), 1), obs=y)

    x = rng.normal(size=(600, 2)).astype(np.float32)
    ids = np.repeat(np.arange(300), 2)
    settings = {"budget": PrivacyBudget(1.0, 1e-5)}
    with pytest.raises(UnsupportedModelError):
        DPLaplace(with_table, **grouped(max_rows_per_unit=2, **settings)).plan(x, x[:, 0], unit=ids)
    DPLaplace(with_table, **grouped(**settings)).plan(x, x[:, 0])


@pytest.mark.full
def test_rehearsal_and_checks_take_units():
    ids, x = np.repeat(np.arange(200), 2), rng.normal(size=(400, 2)).astype(np.float32)
    driver = DPLaplace(model, budget=PrivacyBudget(1.0, 1e-5), privacy=Privacy(max_rows_per_unit=2))
    found = rehearse(driver, KEY, x, None, unit=ids, num_simulations=2)
    assert "2 simulations" in str(found)
    bad = np.where(np.arange(400)[:, None] == 7, np.nan, x)
    checked = check_records(model, bad, (x[:, 0] > 0) * 1, unit=ids, max_rows_per_unit=2)
    assert checked.not_finite.tolist() == [7]


@pytest.mark.full
def test_a_driver_of_rows_takes_no_units():
    """A driver of one's own knows of no persons unless it reads a NumPyro model."""
    place = pathlib.Path(__file__).parents[2] / "examples" / "extending" / "clipped_mean.py"
    settings = {"clip_norm": 3.0, "sampler": FullBatch(), "budget": PrivacyBudget(1.0)}
    driver = runpy.run_path(str(place))["ClippedMean"](
        0.2, privacy=Privacy(max_rows_per_unit=R), **settings
    )
    with pytest.raises(TypeError, match="ClippedMean has no use for .'max_rows_per_unit'."):
        driver.run(KEY, 2, X, unit=IDS, progress_bar=False)
