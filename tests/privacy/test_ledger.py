"""Ledgers: every run is charged before it reads a record, none is lost, and the total holds."""

import contextlib
import json
import math
import os
import pickle
import signal
import sqlite3
import subprocess
import sys
import textwrap
import threading

import jax
import numpy as np
import optax
import pytest
from flat import grouped
from models import mean_of
from numpyro.infer.autoguide import AutoDiagonalNormal

from numpyro_dp import (
    DPMCMC,
    DPSEP,
    DPSVI,
    SGLD,
    BudgetError,
    DPLaplace,
    Ledger,
    LedgerError,
    NoiseReuseError,
    PrivacyBudget,
    fit,
)
from numpyro_dp.privacy.accounting.bounds import GaussianStep
from numpyro_dp.privacy.budget import Spending
from numpyro_dp.run.session import Session
from numpyro_dp.samplers import FullBatch, Poisson

KEY = jax.random.key(0)
TOTAL = PrivacyBudget(2.0, 1e-5)
X = np.random.default_rng(0).normal(size=300).astype(np.float32)

model = mean_of()


def laplace(budget):
    return DPLaplace(model, budget=budget).run(KEY, X).privacy


def svi_of(budget, **options):
    return DPSVI(
        model,
        AutoDiagonalNormal(model),
        optax.adam(0.1),
        **grouped(clip_norm=1.0, sampler=Poisson(0.2), budget=budget, **options),
    )


def svi(budget):
    return svi_of(budget).run(KEY, 20, X, progress_bar=False).privacy


def chain(budget):
    mcmc = DPMCMC(SGLD(model), num_warmup=5, num_samples=10, clip_norm=1.0, sampler=FullBatch(),
                  num_chains=2, budget=budget, progress_bar=False)  # fmt: skip
    mcmc.run(KEY, X)
    return mcmc.privacy


def loop(budget):
    driver = svi_of(budget, num_steps=3)
    state = driver.init(KEY, X)
    for _ in range(3):
        state, _ = driver.update(state, X)
    return driver.privacy(state)


def sep(budget):
    driver = DPSEP(model, clip_norm=1.0, sampler=FullBatch(), budget=budget)
    return driver.run(KEY, 3, X, progress_bar=False).privacy


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


def test_runs_are_composed_and_the_total_stops_one_before_it_reads_a_record(file):
    ledger = Ledger(file, TOTAL)
    for number in range(3):
        report = laplace(ledger.budget(0.9, purpose=f"run {number}"))
        assert "Epsilon here covers this run alone" in str(report)
    spent = ledger.spent().epsilon
    assert 0.9 < spent < 1.8  # three runs of 0.9 cost less than two

    def blocked(*_, **__):
        raise AssertionError("a record was read")

    driver = DPLaplace(model, budget=ledger.budget(1.9, purpose="too much"))
    before = file.read_bytes()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("numpyro_dp.laplace.dplaplace.Stages.stages", blocked)
        with pytest.raises(LedgerError, match="too much.*would spend.*No record was read"):
            driver.run(KEY, X)
    assert file.read_bytes() == before
    # What is left can be spent, and then nothing more.
    report = laplace(ledger.budget(purpose="the rest"))
    assert "Epsilon here covers this run and the earlier ones" in str(report)
    assert report.epsilon == pytest.approx(2.0, rel=0.01)
    assert ledger.spent().epsilon == pytest.approx(2.0, rel=0.01)
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


@pytest.mark.full
def test_the_total_can_be_a_budget_after_the_ledger(file):
    ledger = Ledger(file, TOTAL)
    first = laplace(ledger.budget(1.0, purpose="one"))
    assert TOTAL.after(ledger) == TOTAL.after(first)


@pytest.mark.parametrize("error", [MemoryError(), KeyboardInterrupt(), ValueError("inside")])
def test_a_run_that_fails_stays_charged_until_the_holder_takes_it_back(file, error):
    ledger = Ledger(file, TOTAL)

    def fail(*_, **__):
        raise error

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("numpyro_dp.laplace.dplaplace.Stages.stages", fail)
        with pytest.raises(type(error)):
            laplace(ledger.budget(0.5, purpose="fails"))
    assert ledger.spent().epsilon == pytest.approx(0.5, rel=0.01)
    (row,) = ledger.table()
    assert not row["failed"]
    Ledger(file, TOTAL).take_back(row["run"])
    assert ledger.spending == ()
    assert [row["failed"] for row in ledger.table()] == [True]
    assert "failed, not counted" in str(ledger)


@pytest.mark.full
def test_a_killed_run_stays_charged(file):
    code = f"""
        import os, signal, sys
        import jax, numpyro_dp
        from tests_model import laplace
        import numpyro_dp.laplace.dplaplace as driver
        driver.Stages.stages = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
        ledger = numpyro_dp.Ledger({str(file)!r}, numpyro_dp.PrivacyBudget(2.0, 1e-5))
        laplace(ledger.budget(0.5, purpose="killed"))
    """.replace("tests_model", "test_ledger")
    found = python(code)
    assert found.returncode == -signal.SIGKILL, found.stderr
    ledger = Ledger(file, TOTAL)
    assert [row["purpose"] for row in ledger.table()] == ["killed"]
    assert ledger.spent().epsilon == pytest.approx(0.5, rel=0.01)


def python(code):
    here = os.path.dirname(__file__)
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, cwd=here
    )


@pytest.mark.full
def test_two_processes_lose_no_entry(file):
    code = f"""
        import sys
        import time
        from numpyro_dp import Ledger, PrivacyBudget
        from numpyro_dp.privacy.accounting.bounds import GaussianStep
        from numpyro_dp.privacy.budget import Spending
        ledger = Ledger({str(file)!r}, PrivacyBudget(2.0, 1e-5))
        print("ready", flush=True)
        sys.stdin.readline()  # begin together
        for number in range(300):
            steps = (GaussianStep("none", 1.0, None, 1e4, 1),)
            run = f"{{sys.argv[1]}} {{number}}"
            ledger.charge(Spending(run, "add_or_remove_one", steps, 0.0, 0.0, ()), purpose="test")
            time.sleep(0.005)  # a lock is not fair: let the other one have it
    """
    arguments = [sys.executable, "-c", textwrap.dedent(code)]
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    both = [subprocess.Popen([*arguments, name], **pipes) for name in "ab"]
    assert [each.stdout.readline() for each in both] == ["ready\n"] * 2
    for each in both:
        each.stdin.write("\n")
        each.stdin.flush()
    for each in both:
        each.communicate()
    assert [each.returncode for each in both] == [0, 0]
    names = [each.spending.run for each in Ledger(file, TOTAL).entries]
    assert sorted(names) == sorted(f"{name} {n}" for name in "ab" for n in range(300))
    order = [name[0] for name in names]
    assert order != sorted(order)  # they took turns


def spending(run, noise=10.0, **other):
    steps = (GaussianStep("none", 1.0, None, noise, 1), GaussianStep("poisson", 0.1, None, 5.0, 7))
    return Spending(run, "add_or_remove_one", steps, *(other.get(n, 0.0) for n in "ft"), ("odd",))


def test_a_run_that_was_taken_back_does_not_go_on_uncharged(file):
    """Its checkpoint is still there, and would release values that nobody counts."""
    ledger = Ledger(file, TOTAL)
    ledger.charge(spending("run"), purpose="test")
    ledger.charge(spending("run"), purpose="test", again=True)  # it goes on
    ledger.take_back("run")
    for again in (True, False):
        with pytest.raises(LedgerError, match="as one that released nothing. Start a new run"):
            ledger.charge(spending("run"), purpose="test", again=again)
    assert ledger.spent().epsilon == 0


def test_a_run_that_goes_on_cannot_grow(file):
    ledger = Ledger(file, TOTAL)
    ledger.charge(spending("run"), purpose="test")
    for larger in (spending("run", noise=9.0), spending("run", t=1e-9)):
        with pytest.raises(LedgerError, match="is in .* already"):
            ledger.charge(larger, purpose="test", again=True)


def test_a_ledger_waits_for_another_holder_of_its_lock(file):
    ledger = Ledger(file, TOTAL)
    charge = threading.Thread(target=lambda: ledger.charge(spending("run"), purpose="test"))
    with table(file) as other:
        other.execute("BEGIN IMMEDIATE")
        charge.start()
        charge.join(0.3)
        assert charge.is_alive() and not other.execute("SELECT * FROM runs").fetchall()
        other.execute("ROLLBACK")
    charge.join(30)
    assert [entry.spending.run for entry in ledger.entries] == ["run"]


def test_entries_survive_in_order(file):
    ledger = Ledger(file, TOTAL)
    ledger.charge(spending("b", f=1e-9, t=1e-9), spending("z"), purpose="one")
    other = Ledger(file, TOTAL)
    assert other.entries == ledger.entries
    other.charge(spending("a"), purpose="two")
    assert [each.spending for each in ledger.entries] == [
        spending("b", f=1e-9, t=1e-9), spending("z"), spending("a"),
    ]  # fmt: skip
    with pytest.raises(LedgerError, match="already"):
        other.charge(spending("a"), purpose="again")


@pytest.mark.full
def test_a_process_that_is_killed_while_it_charges_adds_no_run(file):
    """Half of a sweep would be charged, or the file would be damaged."""
    Ledger(file, TOTAL).charge(spending("a"), purpose="one")
    code = f"""
        import os, signal
        from numpyro_dp import Ledger, PrivacyBudget
        from test_ledger import spending
        ledger = Ledger({str(file)!r}, PrivacyBudget(2.0, 1e-5))
        read = ledger._read

        def killed(file):
            if len(file.execute("SELECT run FROM runs").fetchall()) > 1:
                os.kill(os.getpid(), signal.SIGKILL)
            read(file)

        ledger._read = killed
        ledger.charge(*(spending(str(number)) for number in range(5)), purpose="two")
    """
    found = python(code)
    assert found.returncode == -signal.SIGKILL, found.stderr
    assert [each.spending.run for each in Ledger(file, TOTAL).entries] == ["a"]


@pytest.mark.parametrize("change", [
    {"steps": 1},
    {"steps": []},
    {"steps": [["none", 1.0, None, 0.0, 1]]},
    {"steps": [["poisson", 2.0, None, 5.0, 1]]},
    {"steps": [["none", 1.0, None, 5.0, -1]]},
    {"steps": [["none", 1.0, None, math.nan, 1]]},
    {"failure_prob": -1},
    {"total_variation": 2},
    {"run": "b"},
    {"other": 1},
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
    Ledger(file, TOTAL)
    with pytest.raises(LedgerError, match="has the total"):
        Ledger(file, PrivacyBudget(3.0, 1e-5))
    (tmp_path / "notes").write_text("my notes")
    with pytest.raises(LedgerError, match="cannot be used: file is not a database"):
        Ledger(tmp_path / "notes", TOTAL)
    assert (tmp_path / "notes").read_text() == "my notes"
    with table(tmp_path / "other") as other:
        other.execute("CREATE TABLE mine (x)")
    with pytest.raises(LedgerError, match="no ledger of version 1"):
        Ledger(tmp_path / "other", TOTAL)
    (tmp_path / "empty").touch()  # a process was killed when it had made the file
    assert Ledger(tmp_path / "empty", TOTAL).entries == ()
    for total in (PrivacyBudget(1.0), 3.0):
        with pytest.raises(ValueError, match="with a delta"):
            Ledger(tmp_path / "new", total)
    with pytest.raises(ValueError, match="Expected purpose"):
        Ledger(file, TOTAL).budget(1.0, purpose="")


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
    many = Session.run_many
    with monkeypatch.context() as patched:
        calls = []

        def stopped(*args):
            calls.append(1)
            return many(*args) if len(calls) == 1 else pytest.fail("killed")

        patched.setattr(Session, "run_many", stopped)
        with pytest.raises(pytest.fail.Exception, match="killed"):
            driver.sweep(keys, 3, X, **sizes)
    for _ in range(2):
        found = driver.sweep(keys, 3, X, **sizes)
        assert len(ledger.entries) == 8
        assert {each.run for each in found.privacy} == {
            each.spending.run for each in ledger.entries[4:]
        }
    rest = svi_of(ledger.budget(purpose="the rest"))
    with pytest.raises(ValueError, match="all that is left"):
        rest.sweep(keys, 3, X)


@pytest.mark.full
def test_a_refused_sweep_leaves_its_folder_free(file, tmp_path):
    folder, ledger, keys = tmp_path / "folder", Ledger(file, TOTAL), jax.random.split(KEY, 2)

    def sweep(epsilon=0.2):
        driver = svi_of(ledger.budget(1.0, purpose="sweep"))
        return driver.sweep(keys, 3, X, chunk_size=1, checkpoint=folder, epsilon=[epsilon])

    with pytest.raises(LedgerError, match="would spend"):
        sweep(1.9)
    assert [path.name for path in folder.iterdir()] == ["lock"]
    sweep()
    sweep()
    with pytest.raises(ValueError, match="holds another run"):
        sweep(0.1)
    assert len(ledger.entries) == 2


@pytest.mark.full
def test_a_refused_key_is_not_charged_and_a_repetition_goes_on(file, tmp_path):
    ledger, keys = Ledger(file, TOTAL), jax.random.split(KEY, 2)

    def sweep(name, **options):
        driver = svi_of(ledger.budget(0.1, purpose="sweep"), secret_key=7, **options)
        return driver.sweep(keys, 3, X, checkpoint=tmp_path / name)

    sweep("one")
    with pytest.raises(NoiseReuseError):
        sweep("other")
    assert len(ledger.entries) == 2
    sweep("one", repetition=True)
    assert len(ledger.entries) == 2


def test_runs_that_cannot_be_charged_together_are_refused(file):
    ledger = Ledger(file, TOTAL)
    for runs, match in (
        ([spending("a"), spending("a")], "UNIQUE"),
        ([spending("a"), spending("b")._replace(unit="unit of rows")], "One total cannot"),
        ([spending("a")._replace(relation="replace_one")], "has the relation 'replace_one'"),
    ):
        with pytest.raises(LedgerError, match=match):
            ledger.charge(*runs, purpose="many")
    assert not ledger.entries
    assert Ledger(file, TOTAL).entries == ()


@pytest.mark.full
def test_a_run_that_goes_on_is_charged_once(file):
    ledger = Ledger(file, TOTAL)
    driver = svi_of(ledger.budget(1.0, purpose="long"), num_steps=20)
    first = driver.run(KEY, 5, X, progress_bar=False)
    charged = ledger.spent().epsilon
    second = driver.run(KEY, 15, X, init_state=first.state, progress_bar=False)
    assert len(ledger.entries) == 1
    assert ledger.spent().epsilon == charged == pytest.approx(second.privacy.epsilon, rel=1e-6)
    assert first.privacy.epsilon < charged


def test_runs_that_go_missing_stop_all_runs(file):
    ledger = Ledger(file, TOTAL)
    before = file.read_bytes()
    ledger.charge(spending("a"), purpose="one")
    after = file.read_bytes()
    with table(file) as found:
        found.execute("UPDATE runs SET purpose = 'two'")
    changed = file.read_bytes()
    for content, match in (
        (before, "lost the run a"), (changed, "lost the run a"), (b"", "no ledger of version 1"),
        (after[:5000], "cannot be used"),
    ):  # fmt: skip
        file.write_bytes(content)
        with pytest.raises(LedgerError, match=match):
            ledger.charge(spending("b"), purpose="two")
    file.unlink()
    with pytest.raises(LedgerError, match="unable to open"):
        ledger.charge(spending("b"), purpose="two")
    assert not file.exists()
    file.write_bytes(after)
    ledger.charge(spending("b"), purpose="two")
    ledger.take_back("a")
    with table(file) as found:
        found.execute("UPDATE runs SET failed = FALSE")
    with pytest.raises(LedgerError, match="lost the run a"):
        ledger.charge(spending("c"), purpose="two")
    assert len(Ledger(file, TOTAL).entries) == 2
    with pytest.raises(LedgerError, match="no run other"):
        Ledger(file, TOTAL).take_back("other")


def test_a_state_from_outside_the_ledger_is_refused(file):
    ledger = Ledger(file, TOTAL)
    outside = svi_of(PrivacyBudget(0.6, 1e-5), num_steps=10).init(KEY, X)
    inside = svi_of(ledger.budget(0.6, purpose="p"), num_steps=10)
    with pytest.raises(BudgetError, match="ledger="):
        inside.run(KEY, 10, X, init_state=outside, progress_bar=False)
    with pytest.raises(BudgetError, match="ledger="):
        inside.update(outside, X)
    assert ledger.entries == ()


@pytest.mark.full
def test_results_hold_nothing_of_the_ledger(file):
    ledger = Ledger(file, TOTAL)
    result = svi_of(ledger.budget(0.6, purpose="very private")).run(KEY, 5, X, progress_bar=False)
    for part in (result, result.privacy):
        content = pickle.dumps(part)
        assert b"very private" not in content
        assert str(file).encode() not in content


def test_budgets_of_ledgers_are_no_totals(file, tmp_path):
    ledger = Ledger(file, TOTAL)
    with pytest.raises(ValueError, match="new PrivacyBudget"):
        Ledger(tmp_path / "other", ledger.budget(1.0, purpose="p"))
