"""Ledgers: every run is charged before it reads a record, none is lost, and the total holds."""

import contextlib
import json
import math
import pickle
import shutil
import sqlite3
import threading

import jax
import numpy as np
import optax
import pytest
from flat import dpmcmc, dpsep, dpsvi
from models import mean_of
from numpyro.infer.autoguide import AutoDiagonalNormal

from numpyro_dp import (
    SGLD,
    BudgetError,
    DPLaplace,
    Ledger,
    LedgerError,
    NoiseReuseError,
    PrivacyBudget,
    fit,
)
from numpyro_dp.laplace.stages import Stages
from numpyro_dp.privacy.accounting.bounds import GaussianStep
from numpyro_dp.privacy.budget import Spending
from numpyro_dp.run.session import Session
from numpyro_dp.samplers import Poisson

KEY = jax.random.key(0)
TOTAL = PrivacyBudget(2.0, 1e-5)
X = np.random.default_rng(0).normal(size=300).astype(np.float32)

model = mean_of()


def laplace(budget):
    return DPLaplace(model, budget=budget).run(KEY, X).privacy


def svi_of(budget, **options):
    return dpsvi(
        model, AutoDiagonalNormal, optax.adam(0.1), sampler=Poisson(0.2), budget=budget, **options
    )


def svi(budget):
    return svi_of(budget).run(KEY, 20, X, progress_bar=False).privacy


def chain(budget):
    mcmc = dpmcmc(SGLD(model), num_warmup=5, num_samples=10, num_chains=2, budget=budget)
    mcmc.run(KEY, X)
    return mcmc.privacy


def loop(budget):
    driver = svi_of(budget, num_steps=3)
    state = driver.init(KEY, X)
    for _ in range(3):
        state, _ = driver.update(state, X)
    return driver.privacy(state)


def sep(budget):
    return dpsep(model, budget=budget).run(KEY, 3, X, progress_bar=False).privacy


@contextlib.contextmanager
def table(path):
    """The database of a ledger, open for changes by hand."""
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as found:
        yield found


@pytest.fixture
def file(tmp_path):
    return tmp_path / "visits.ledger"


@pytest.mark.full
@pytest.mark.table
@pytest.mark.parametrize("run", [laplace, svi, chain, loop, sep])
def test_every_driver_is_charged_once_with_its_event(run, file):
    ledger = Ledger(file, TOTAL)
    report = run(ledger.budget(0.5, purpose="a table"))
    (entry,) = ledger.entries
    assert entry.spending.steps == report.spending[-1].steps
    assert entry.spending.run == report.run or run is loop
    assert ledger.spent().epsilon == pytest.approx(report.epsilon, rel=1e-6)
    (row,) = ledger.table()
    assert row["purpose"] == "a table"
    assert row["epsilon"] == pytest.approx(report.epsilon, rel=1e-6)
    assert "a table" in str(ledger)
    assert file.stat().st_mode & 0o777 == 0o600
    again = Ledger(file, TOTAL)
    assert again.entries == ledger.entries
    assert pickle.loads(pickle.dumps(ledger)).entries == ledger.entries


@pytest.mark.full
def test_runs_are_composed_and_the_total_stops_one_before_it_reads_a_record(file, monkeypatch):
    ledger = Ledger(file, TOTAL)
    for number in range(3):
        report = laplace(ledger.budget(0.9, purpose=f"run {number}"))
        assert "Epsilon here covers this run alone" in str(report)
    assert 0.9 < ledger.spent().epsilon < 1.8  # three runs of 0.9 cost less than two
    before = file.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(Stages, "stages", lambda *_, **__: pytest.fail("a record was read"))
        with pytest.raises(LedgerError, match="too much.*would spend.*No record was read"):
            laplace(ledger.budget(1.9, purpose="too much"))
    assert file.read_bytes() == before
    # What is left can be spent, and then nothing more.
    report = laplace(ledger.budget(purpose="the rest"))
    assert "Epsilon here covers this run and the earlier ones" in str(report)
    for spent in (report, ledger.spent()):
        assert spent.epsilon == pytest.approx(2.0, rel=0.01)
    with pytest.raises(LedgerError, match="more.*would spend"):
        laplace(ledger.budget(0.5, purpose="more"))


def test_fit_takes_a_budget_of_a_ledger(file):
    ledger = Ledger(file, TOTAL)
    posterior = fit(model, X, budget=ledger.budget(0.5, purpose="one call"), rng_key=KEY)
    assert [row["purpose"] for row in ledger.table()] == ["one call"]
    assert ledger.spent().epsilon == posterior.privacy.epsilon
    for wrong in ({}, {"epsilon": 1.0, "budget": TOTAL}, {"delta": 1e-5, "budget": TOTAL}):
        with pytest.raises(TypeError, match=r"either epsilon \(and delta\) or budget"):
            fit(model, X, rng_key=KEY, **wrong)


@pytest.mark.parametrize("error", [MemoryError(), KeyboardInterrupt(), ValueError("inside")])
def test_a_run_that_fails_stays_charged_until_the_holder_takes_it_back(file, error, monkeypatch):
    ledger = Ledger(file, TOTAL)

    def fail(*_, **__):
        # It is on the disk before the first record is read, so a killed run stays charged too.
        assert [row["purpose"] for row in Ledger(file, TOTAL).table()] == ["fails"]
        raise error

    monkeypatch.setattr(Stages, "stages", fail)
    with pytest.raises(type(error)):
        laplace(ledger.budget(0.5, purpose="fails"))
    assert ledger.spent().epsilon == pytest.approx(0.5, rel=0.01)
    (row,) = ledger.table()
    assert not row["failed"]
    Ledger(file, TOTAL).take_back(row["run"])
    assert ledger.spending == ()
    assert [row["failed"] for row in ledger.table()] == [True]
    assert "failed, not counted" in str(ledger)


def spending(run, noise=10.0, **other):
    steps = (GaussianStep("none", 1.0, None, noise, 1), GaussianStep("poisson", 0.1, None, 5.0, 7))
    return Spending(run, "add_or_remove_one", steps, *(other.get(n, 0.0) for n in "ft"), ("odd",))


def test_a_run_that_goes_on_cannot_grow_and_one_that_was_taken_back_does_not_go_on(file):
    """Its checkpoint is still there, and would release values that nobody counts."""
    ledger = Ledger(file, TOTAL)
    ledger.charge(spending("run"), purpose="test")
    for larger in (spending("run", noise=9.0), spending("run", t=1e-9)):
        with pytest.raises(LedgerError, match="is in .* already"):
            ledger.charge(larger, purpose="test", again=True)
    ledger.charge(spending("run"), purpose="test", again=True)  # it goes on
    ledger.take_back("run")
    for again in (True, False):
        with pytest.raises(LedgerError, match="as one that released nothing. Start a new run"):
            ledger.charge(spending("run"), purpose="test", again=again)
    assert ledger.spent().epsilon == 0


def test_entries_survive_in_order_and_others_cannot_be_charged_together(file):
    ledger = Ledger(file, TOTAL)
    ledger.charge(spending("b", f=1e-9, t=1e-9), spending("z"), purpose="one")
    other = Ledger(file, TOTAL)
    assert other.entries == ledger.entries
    other.charge(spending("a"), purpose="two")
    all_runs = [spending("b", f=1e-9, t=1e-9), spending("z"), spending("a")]
    assert [each.spending for each in ledger.entries] == all_runs
    for runs, match in (
        ([spending("a")], "already"),
        ([spending("c"), spending("c")], "UNIQUE"),
        ([spending("c"), spending("d")._replace(unit="unit of rows")], "One total cannot"),
        ([spending("c")._replace(relation="replace_one")], "has the relation 'replace_one'"),
    ):
        with pytest.raises(LedgerError, match=match):
            ledger.charge(*runs, purpose="many")
    for each in (ledger, Ledger(file, TOTAL)):
        assert [entry.spending for entry in each.entries] == all_runs


def test_a_process_that_is_killed_while_it_charges_adds_no_run(file, tmp_path, monkeypatch):
    """Half of a sweep would be charged, or the file would be damaged."""
    ledger, place = Ledger(file, TOTAL), tmp_path / "as a kill leaves it"
    ledger.charge(spending("a"), purpose="one")
    read = ledger._read

    def killed(opened):
        if len(opened.execute("SELECT run FROM runs").fetchall()) > 1:
            place.mkdir()
            for each in file.parent.glob(f"{file.name}*"):  # with the journal
                shutil.copy(each, place)
        read(opened)

    with monkeypatch.context() as patched:
        patched.setattr(ledger, "_read", killed)
        ledger.charge(*(spending(str(number)) for number in range(5)), purpose="two")
    assert len(ledger.entries) == 6
    assert len(list(place.iterdir())) == 2
    assert [each.spending.run for each in Ledger(place / file.name, TOTAL).entries] == ["a"]


def test_a_ledger_waits_for_another_holder_of_its_lock_and_counts_its_run(file):
    """So that no entry is lost, and two runs that fit one by one do not both start."""
    ledger, found = Ledger(file, TOTAL), []

    def charge():
        try:
            ledger.charge(spending("late", noise=2.8), purpose="test")
        except LedgerError as error:
            found.append(str(error))

    thread = threading.Thread(target=charge)
    with table(file) as other:
        other.execute("BEGIN IMMEDIATE")
        thread.start()
        thread.join(0.3)
        assert thread.is_alive() and not other.execute("SELECT * FROM runs").fetchall()
        row = ["early", "2026-01-01", "first", json.dumps(spending("early", noise=2.8)._asdict())]
        other.execute("INSERT INTO runs VALUES (?, ?, ?, ?, FALSE)", row)
        other.execute("COMMIT")
    thread.join(30)
    assert [entry.spending.run for entry in ledger.entries] == ["early"]
    assert "(1) would spend" in found[0]
    Ledger(file.with_name("other"), TOTAL).charge(spending("late", noise=2.8), purpose="alone")


@pytest.mark.parametrize("change", [
    {"steps": 1}, {"steps": []}, {"steps": [["none", 1.0, None, 0.0, 1]]},
    {"steps": [["poisson", 2.0, None, 5.0, 1]]}, {"steps": [["none", 1.0, None, 5.0, -1]]},
    {"steps": [["none", 1.0, None, math.nan, 1]]}, {"failure_prob": -1}, {"total_variation": 2},
    {"run": "b"}, {"other": 1},
])  # fmt: skip
@pytest.mark.every_case
def test_damage_stops_all_runs(file, change):
    ledger = Ledger(file, TOTAL)
    ledger.charge(spending("a"), purpose="one")
    with table(file) as found:
        ((text,),) = found.execute("SELECT spending FROM runs")
        found.execute("UPDATE runs SET spending = ?", [json.dumps(json.loads(text) | change)])
    for call in (lambda: ledger.charge(spending("d"), purpose="one"), lambda: Ledger(file, TOTAL)):
        with pytest.raises(LedgerError, match="damaged"):
            call()


def test_other_totals_and_files_are_refused(file, tmp_path):
    ledger = Ledger(file, TOTAL)
    (tmp_path / "notes").write_text("my notes")
    with table(tmp_path / "other") as other:
        other.execute("CREATE TABLE mine (x)")
    for name, total, error, match in (
        (file.name, PrivacyBudget(3.0, 1e-5), LedgerError, "has the total"),
        ("notes", TOTAL, LedgerError, "cannot be used: file is not a database"),
        ("other", TOTAL, LedgerError, "no ledger of version 1"),
        ("new", PrivacyBudget(1.0), ValueError, "with a delta"),
        ("new", 3.0, ValueError, "with a delta"),
        ("new", ledger.budget(1.0, purpose="p"), ValueError, "new PrivacyBudget"),
    ):
        with pytest.raises(error, match=match):
            Ledger(tmp_path / name, total)
    assert (tmp_path / "notes").read_text() == "my notes"
    (tmp_path / "empty").touch()  # a process was killed when it had made the file
    assert Ledger(tmp_path / "empty", TOTAL).entries == ()
    with pytest.raises(ValueError, match="Expected purpose"):
        ledger.budget(1.0, purpose="")


@pytest.mark.full
def test_a_sweep_charges_each_of_its_runs(file, tmp_path, monkeypatch):
    ledger = Ledger(file, TOTAL)
    driver, keys = svi_of(ledger.budget(1.0, purpose="sweep")), jax.random.split(KEY, 2)
    with monkeypatch.context() as patched:
        patched.setattr(Session, "run_many", lambda *_: pytest.fail("a record was read"))
        with pytest.raises(LedgerError, match=r"These 4 runs \(sweep\)"):
            driver.sweep(keys, 3, X, epsilon=[1.0, 1.5])
        assert not ledger.entries
    result = driver.sweep(keys, 3, X, epsilon=[0.2, 0.4])
    assert [row["purpose"] for row in ledger.table()] == ["sweep"] * 4
    assert TOTAL.after(ledger) == TOTAL.after(*result.privacy)
    sizes = {"epsilon": [0.2, 0.4], "chunk_size": 2, "checkpoint": tmp_path / "folder"}
    many, calls = Session.run_many, iter([1])
    with monkeypatch.context() as patched, pytest.raises(ZeroDivisionError):
        patched.setattr(Session, "run_many", lambda *a: many(*a) if next(calls, 0) else 1 / 0)
        driver.sweep(keys, 3, X, **sizes)
    for _ in range(2):
        found = driver.sweep(keys, 3, X, **sizes)
        assert len(ledger.entries) == 8
        assert {each.run for each in found.privacy} == {
            each.spending.run for each in ledger.entries[4:]
        }
    with pytest.raises(ValueError, match="all that is left"):
        svi_of(ledger.budget(purpose="the rest")).sweep(keys, 3, X)


@pytest.mark.extended
def test_a_refused_sweep_leaves_its_folder_free_and_a_refused_key_is_not_charged(file, tmp_path):
    ledger, keys = Ledger(file, TOTAL), jax.random.split(KEY, 2)

    def sweep(name, epsilon=0.1, **options):
        driver = svi_of(ledger.budget(1.0, purpose="sweep"), **options)
        folder = {"chunk_size": 1, "checkpoint": tmp_path / name}
        return driver.sweep(keys, 3, X, epsilon=[epsilon], **folder)

    with pytest.raises(LedgerError, match="would spend"):
        sweep("folder", 1.9)
    assert [path.name for path in (tmp_path / "folder").iterdir()] == ["lock"]
    sweep("folder")
    sweep("folder")
    with pytest.raises(ValueError, match="holds another run"):
        sweep("folder", 0.2)
    assert len(ledger.entries) == 2
    sweep("one", secret_key=7)
    with pytest.raises(NoiseReuseError):
        sweep("other", secret_key=7)
    sweep("one", secret_key=7, repetition=True)  # goes on
    assert len(ledger.entries) == 4


@pytest.mark.full
def test_a_run_that_goes_on_is_charged_once_and_its_result_holds_nothing_of_the_ledger(file):
    ledger = Ledger(file, TOTAL)
    driver = svi_of(ledger.budget(1.0, purpose="very private"), num_steps=20)
    first = driver.run(KEY, 5, X, progress_bar=False)
    charged = ledger.spent().epsilon
    second = driver.run(KEY, 15, X, init_state=first.state, progress_bar=False)
    assert len(ledger.entries) == 1
    assert ledger.spent().epsilon == charged == pytest.approx(second.privacy.epsilon, rel=1e-6)
    assert first.privacy.epsilon < charged
    for part in (second, second.privacy):
        content = pickle.dumps(part)
        assert b"very private" not in content and str(file).encode() not in content


def test_runs_that_go_missing_stop_all_runs(file):
    ledger = Ledger(file, TOTAL)
    before = file.read_bytes()
    ledger.charge(spending("a"), purpose="one")
    after = file.read_bytes()
    with table(file) as found:
        found.execute("UPDATE runs SET purpose = 'two'")
    for content, match in (
        (before, "lost the run a"), (file.read_bytes(), "lost the run a"),
        (b"", "no ledger of version 1"), (after[:5000], "cannot be used"),
        (None, "unable to open"),
    ):  # fmt: skip
        file.unlink() if content is None else file.write_bytes(content)
        with pytest.raises(LedgerError, match=match):
            ledger.charge(spending("b"), purpose="two")
    assert not file.exists()
    file.write_bytes(after)
    ledger.charge(spending("b"), purpose="two")
    ledger.take_back("a")
    with table(file) as found:
        found.execute("UPDATE runs SET failed = FALSE")
    with pytest.raises(LedgerError, match="lost the run a"):
        ledger.charge(spending("c"), purpose="two")
    other = Ledger(file, TOTAL)
    assert len(other.entries) == 2
    with pytest.raises(LedgerError, match="no run other"):
        other.take_back("other")


def test_a_state_from_outside_the_ledger_is_refused(file):
    ledger = Ledger(file, TOTAL)
    outside = svi_of(PrivacyBudget(0.6, 1e-5), num_steps=10).init(KEY, X)
    inside = svi_of(ledger.budget(0.6, purpose="p"), num_steps=10)
    for call in (lambda: inside.run(KEY, 10, X, init_state=outside, progress_bar=False),
                 lambda: inside.update(outside, X)):  # fmt: skip
        with pytest.raises(BudgetError, match="ledger="):
            call()
    assert ledger.entries == ()
