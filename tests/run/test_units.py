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
# Two rows of each of 300 units.
TWO, PAIRS = np.repeat(np.arange(300), 2), rng.normal(size=(600, 2)).astype(np.float32)
POSITIVE = (PAIRS[:, 0] > 0) * 1


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
@pytest.mark.every_case
@pytest.mark.parametrize(("ids", "options", "other", "call", "rtol"), [
    (np.arange(len(IDS)), {"max_rows_per_unit": 1, "estimator": aligned()},
        {"estimator": aligned()}, {}, 1e-5),
    (IDS, {"max_rows_per_unit": R}, {"max_rows_per_unit": R}, {"unit": IDS, "stream": True}, 0),
], ids=["units of one row are rows", "streamed units give the same"])  # fmt: skip
def test_runs_that_are_the_same(ids, options, other, call, rtol):
    def params(call, **options):
        own = {"estimator": None, "clip_norm": 0.5, "sampler": Poisson(0.3)} | options
        svi = dpsvi(model, AutoDiagonalNormal, optax.sgd(0.1), secret_key=4, repetition=True, **own)
        return svi.run(KEY, 5, X, Y, progress_bar=False, **call).params

    found = params({"unit": ids}, **options)
    for name, value in params(call, **other).items():
        np.testing.assert_allclose(value, found[name], rtol=rtol)


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
    own = {"budget": PrivacyBudget(1.0, 1e-5), "max_rows_per_unit": 2}
    if kind == "fit":
        report = fit(model, PAIRS, POSITIVE, unit=TWO, rng_key=KEY, **own).privacy
    elif kind == "DPLaplace":
        laplace = DPLaplace(model, **grouped(**own))
        report = laplace.run(KEY, PAIRS, POSITIVE, unit=TWO).privacy
    elif kind == "DPMCMC":
        mcmc = dpmcmc(SGLD(model), num_warmup=2, num_samples=3, **own)
        mcmc.run(KEY, PAIRS, POSITIVE, unit=TWO)
        report = mcmc.privacy
    else:
        svi = dpsvi(model, AutoDiagonalNormal, optax.sgd(0.1), estimator=None, **own)
        assert svi.plan(3, PAIRS, POSITIVE, unit=TWO).num_examples == 300
        report = svi.run(KEY, 3, PAIRS, POSITIVE, unit=TWO, progress_bar=False).privacy
    assert (report.plan.num_examples, report.max_rows) == (300, 2)
    assert "One of 300 units, with all rows of plate 'rows' that have its id." in str(report)
    assert "A person with several ids" in str(report)
    assert "A person with several records" not in str(report)
    with pytest.raises(BudgetError, match="record of this run is a row"):
        DPLaplace(model, budget=PrivacyBudget(3.0, 1e-5).after(report)).run(KEY, PAIRS, POSITIVE)


@pytest.mark.full
def test_a_ledger_counts_one_kind_of_unit(tmp_path):
    ledger = Ledger(tmp_path / "ledger", PrivacyBudget(3.0, 1e-5))

    def run(**unit):
        rows = {"max_rows_per_unit": 2} if unit else {}
        driver = DPLaplace(model, **grouped(budget=ledger.budget(0.5, purpose="test"), **rows))
        driver.run(KEY, PAIRS, POSITIVE, **unit)

    run(unit=TWO)
    with pytest.raises(LedgerError, match="One total cannot cover both"):
        run()
    run(unit=TWO)
    assert len(Ledger(tmp_path / "ledger", PrivacyBudget(3.0, 1e-5)).entries) == 2


@pytest.mark.full
def test_signals_of_units_keep_the_bounds_of_a_stage():
    """The signals of a stage have norm at most 1."""
    data = X * np.where(IDS == 2, 1e3, 1)[:, None].astype(np.float32), Y
    driver = DPLaplace(model, budget=PrivacyBudget(1.0, 1e-5), privacy=Privacy(max_rows_per_unit=R))
    _, prior, guess = driver._prepared_for(data, {"unit": IDS})
    plan = driver._schedule(prior.outcomes)
    stages, run = Stages(driver.settings, prior.outcomes, guess.groups), Run(prior, plan, guess)
    stages.start(KEY, run, data, {"unit": IDS})
    session = stages._session(data, {"unit": IDS})
    estimator = staged_scores(prior.outcomes, 3)(session.problem)
    rows, size, largest = session.rows(data, {"unit": IDS}).arrays, len(np.unique(IDS)), 0
    for release in range(len(plan.shares)):
        public = estimator.prepare(KEY, run.request(release))
        signals = jax.tree.leaves(jax.vmap(estimator.signal, (None, 0))(public, rows))
        norms = np.sqrt(sum(np.square(v).reshape(size, -1).sum(1) for v in signals))
        assert norms.max() <= 1 + 1e-5
        largest = max(largest, norms.max())
    assert largest > 0.05


def units(rows=R, fitted=model):
    return dpsvi(fitted, AutoDiagonalNormal, optax.sgd(0.1), max_rows_per_unit=rows, estimator=None)


def local(x, y):
    mean = numpyro.sample("mean", dist.Normal(0, 1))
    with numpyro.plate("rows", x.shape[0]):
        own = numpyro.sample("own", dist.Normal(mean, 1))
        numpyro.sample("x", dist.Normal(own, 1), obs=x[:, 0])


@pytest.mark.every_case
@pytest.mark.parametrize(("ids", "make", "error", "match"), [
    (None, units, TypeError, "needs the unit of each row"),
    (IDS[:5], units, ValueError, "one id for each row"),
    (np.where(IDS == 2, np.nan, IDS), units, ValueError, "missing ids"),
    (IDS, lambda: units(0), ValueError, "max_rows_per_unit"),
    (IDS, lambda: units(None), TypeError, "unit= needs max_rows_per_unit="),
    (IDS, lambda: units(R, local), UnsupportedModelError, "belong to single rows"),
])  # fmt: skip
def test_bad_ids_are_refused(ids, make, error, match):
    with pytest.raises(error, match=match):
        make().run(KEY, 2, X, Y, **({} if ids is None else {"unit": ids}))


@pytest.mark.full
def test_ids_must_not_be_traced_and_need_a_number_of_rows():
    svi = units()
    state = svi.init(KEY, X, Y, unit=IDS)
    with pytest.raises(TypeError, match="unit= is traced"):
        jax.jit(lambda state, ids: svi.update(state, X, Y, unit=ids))(state, IDS)
    jax.jit(lambda state, x: svi.update(state, x, Y, unit=IDS))(state, X)
    svi.update(state, X, Y, unit=IDS)
    with pytest.raises(TypeError, match="unit= needs max_rows_per_unit="):
        fit(model, X, Y, epsilon=1.0, rng_key=KEY, unit=IDS)


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


def test_texts_that_stand_for_a_missing_id_are_refused():
    for missing in ("nan", "None", "NaT", "<NA>", "NA", " "):
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
    module = pytest.importorskip(library)
    column = module.array if library == "pyarrow" else module.Series

    def units(values, **kind):
        _, kwargs = as_arrays((), {"unit": column(values, **kind)})
        return number_of_units(kwargs["unit"], 3)

    assert units(["a", "b", "a"]) == units([2**53 + 1, 2**53, 2**53]) == 2
    missing = [(["a", None, "b"], {}), ([2**53 + 1, None, 2**53], {})]
    if library == "pandas":
        missing += [([1, None, 2], {"dtype": "Int64"}), (["a", None, "b"], {"dtype": "category"})]
    for values, kind in missing:
        with pytest.raises(ValueError, match="missing ids"):
            units(values, **kind)


@pytest.mark.extended
def test_a_model_may_have_an_argument_of_this_name():
    def own(x, unit):
        w = numpyro.sample("w", dist.Normal(0, 1))
        with numpyro.plate("rows", len(x)):
            numpyro.sample("x", dist.Normal(w * unit, 1), obs=x)

    for unit in (np.where(np.arange(len(X)) == 3, np.nan, X[:, 1]), 2.0):
        units(None, own).run(KEY, 2, X[:, 0], unit=unit, progress_bar=False)


def test_the_allowance_of_small_arrays_counts_units():
    held = np.linspace(0, 1, 80)

    def with_table(x, y=None):
        w = numpyro.sample("w", dist.Normal(0, 1))
        with numpyro.plate("rows", x.shape[0]):
            numpyro.sample("y", dist.Normal(w * jnp.sum(held * x[:, :1], axis=1), 1), obs=y)

    settings, data = {"budget": PrivacyBudget(1.0, 1e-5)}, (PAIRS, PAIRS[:, 0])
    with pytest.raises(UnsupportedModelError):
        DPLaplace(with_table, **grouped(max_rows_per_unit=2, **settings)).plan(*data, unit=TWO)
    DPLaplace(with_table, **grouped(**settings)).plan(*data)


@pytest.mark.full
def test_rehearsal_and_checks_take_units():
    driver = DPLaplace(model, budget=PrivacyBudget(1.0, 1e-5), privacy=Privacy(max_rows_per_unit=2))
    found = rehearse(driver, KEY, PAIRS, None, unit=TWO, num_simulations=2)
    assert "2 simulations" in str(found)
    bad = np.where(np.arange(600)[:, None] == 7, np.nan, PAIRS)
    checked = check_records(model, bad, POSITIVE, unit=TWO, max_rows_per_unit=2)
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
