r"""A ledger: a file that counts what all runs on one data set have spent, and stops a run.

**Format, version 1.** A SQLite database. The table ``total`` has epsilon, delta and relation. The
table ``runs`` has a row for each run: its name, date and purpose, its
:class:`~numpyro_dp.privacy.budget.Spending` as JSON, and whether it ``failed``. No row is removed.
A process that is killed may leave a second file, ``-journal``. Keep it with the first one: SQLite
needs it to repair that.

A run is charged before it reads a record, with everything that its plan may release. A run that is
killed, stopped or ends with an exception stays charged, because exceptions may follow released
values. The holder of the data can mark it as one that released nothing (``take_back``). One
transaction of SQLite reads what was spent and adds runs: no other process writes in between, and a
process that is killed meanwhile has added nothing. Its run did not begin. The runs of a sweep are
charged together. In a mesh of several processes the first process charges.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import math
import os
import pathlib
import sqlite3
from collections.abc import Iterator
from typing import Any, NamedTuple

from numpyro_dp.privacy.accounting.bounds import EpsilonBound, GaussianStep, canonical_event
from numpyro_dp.privacy.accounting.spent import epsilon_spent
from numpyro_dp.privacy.budget import PrivacyBudget, Spending

_VERSION = 1
_WAIT = 3600.0  # seconds until a process gives up waiting for others, which need one each
_NO_RUN = "What was spent is not known, so no run may start. Restore a copy that has all runs."


class LedgerError(ValueError):
    """A ledger that is damaged, belongs to another total, or has too little left for a run.

    Example:
        >>> import pathlib, tempfile
        >>> from numpyro_dp import Ledger, LedgerError, PrivacyBudget
        >>> path = pathlib.Path(tempfile.mkdtemp(), "survey.ledger")
        >>> ledger = Ledger(path, PrivacyBudget(1.0, 1e-6))
        >>> try:
        ...     Ledger(path, PrivacyBudget(2.0, 1e-6))
        ... except LedgerError as error:
        ...     print("refused: the file has another total")
        refused: the file has another total
    """


class Entry(NamedTuple):
    """A run in a ledger.

    Attributes:
        spending: What it spent.
        date: When it was charged, in UTC.
        purpose: What it was for.
        failed: Whether the holder of the data said that it released nothing. It does not count.
    """

    spending: Spending
    date: str
    purpose: str
    failed: bool = False


class Ledger:
    r"""A file that counts what all runs on one data set have spent.

    A budget from :meth:`budget` charges its run. All runs together spend at most ``total``: their
    events are composed, which costs less than to add their epsilons. A run that would exceed the
    total raises an error before it reads a record. Several processes may use one file.

    Args:
        path: The file. If there is none, it is made.
        total: What all runs together may spend, with a delta.

    Raises:
        LedgerError: If the file has another total, or cannot be read.
        ValueError: If ``total`` is not a new budget with a delta.
        OSError: If the file cannot be made.

    Example:
        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist, os, tempfile
        >>> from numpyro_dp import DPLaplace, Ledger, PrivacyBudget
        >>> def model(x):
        ...     mean = numpyro.sample("mean", dist.Normal(0, 1))
        ...     with numpyro.plate("records", x.shape[0]):
        ...         numpyro.sample("x", dist.Normal(mean, 1), obs=x)
        >>> folder = tempfile.TemporaryDirectory()
        >>> ledger = Ledger(os.path.join(folder.name, "visits.ledger"), PrivacyBudget(1.0, 1e-5))
        >>> for purpose in ("first look", "paper"):
        ...     budget = ledger.budget(0.6, purpose=purpose)
        ...     posterior = DPLaplace(model, budget=budget).run(jax.random.key(0), jnp.ones(1000))
        >>> print(round(ledger.spent().epsilon, 2), [row["purpose"] for row in ledger.table()])
        0.87 ['first look', 'paper']
        >>> DPLaplace(model, budget=ledger.budget(0.6, purpose="more")).run(
        ...     jax.random.key(0), jnp.ones(1000))  # doctest: +IGNORE_EXCEPTION_DETAIL
        Traceback (most recent call last):
        LedgerError: ...
        >>> folder.cleanup()

    Guarantee:
        All runs that it has charged are together (epsilon, delta)-differentially private within
        ``total``. Fix the noise of each run independently of released values, or use full batches
        (:meth:`~numpyro_dp.PrivacyBudget.after`). Continue a state once, in one process. Runs
        without a ledger are not counted. Keep the file with the records: purposes and dates are
        yours to publish or not.
    """

    path: pathlib.Path
    total: PrivacyBudget

    def __init__(self, path: str | os.PathLike[str], total: PrivacyBudget) -> None:
        old = isinstance(total, PrivacyBudget) and (total.earlier or total.charges)
        if not isinstance(total, PrivacyBudget) or total.delta is None or old:
            raise ValueError(
                f"Expected total as a new PrivacyBudget with a delta, got {total}. The delta "
                "covers all runs together: PrivacyBudget(3.0, 1e-6)."
            )
        self.path, self.total, self._delta = pathlib.Path(path).resolve(), total, total.delta
        self._entries: dict[str, Entry] = {}  # those that were seen in the file
        os.close(os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600))
        with self._transaction() as file:
            # A process that was killed may have left an empty file.
            if not file.execute("SELECT * FROM sqlite_master").fetchall():
                file.execute("CREATE TABLE total (epsilon, delta, relation)")
                file.execute("CREATE TABLE runs (run PRIMARY KEY, date, purpose, spending, failed)")
                of_total = total.epsilon, total.delta, total.relation
                file.execute("INSERT INTO total VALUES (?, ?, ?)", of_total)
                file.execute(f"PRAGMA user_version = {_VERSION}")
            self._read(file)

    def __reduce__(self) -> tuple[object, ...]:
        """A pickle has the path and the total, and no entry."""
        return Ledger, (self.path, self.total)

    def __repr__(self) -> str:
        """The path and the total."""
        return f"Ledger({str(self.path)!r}, {self.total})"

    def budget(self, epsilon: float | None = None, *, purpose: str) -> PrivacyBudget:
        """Returns a budget that charges its runs to this ledger.

        Args:
            epsilon: What a run alone may spend, at the delta of the total. By default all that is
                left: the run and those before it then spend the total, and its report covers all.
            purpose: What the run is for.

        Raises:
            ValueError: If ``purpose`` is not a text, or ``epsilon`` is out of range.
        """
        if not isinstance(purpose, str) or not purpose.strip():
            raise ValueError(f"Expected purpose as a text that is not empty, got {purpose!r}.")
        found = self.total.after(self)
        if epsilon is not None:
            found = PrivacyBudget(epsilon, self.total.delta, self.total.relation)
        return dataclasses.replace(found, charges=Charges(self, purpose))

    @property
    def entries(self) -> tuple[Entry, ...]:
        """All runs, also those of other processes."""
        with self._transaction() as file:
            self._read(file)
        return tuple(self._entries.values())

    @property
    def spending(self) -> tuple[Spending, ...]:
        """What the runs have spent. So ``total.after(ledger)`` is a budget for what is left."""
        return tuple(each.spending for each in self.entries if not each.failed)

    def spent(self) -> EpsilonBound:
        """Returns the bound on what all runs together have spent, at the delta of the total."""
        return self._bound(self.spending)

    def table(self) -> list[dict[str, Any]]:
        """Returns a row for each run, as for ``pandas.DataFrame``."""
        return [
            {
                "run": each.spending.run, "date": each.date, "purpose": each.purpose,
                "epsilon": 0.0 if each.failed else self._bound((each.spending,)).epsilon,
                "delta": self.total.delta, "failed": each.failed,
            }
            for each in self.entries
        ]  # fmt: skip

    def __str__(self) -> str:
        """A line for each run, and what is spent."""
        rows = [
            f"{row['date']}  epsilon {row['epsilon']:<8.4g} {row['purpose']}"
            + (" (failed, not counted)" if row["failed"] else "")
            for row in self.table()
        ]
        spent = self.spent().epsilon
        return "\n".join([*rows, f"All runs: epsilon <= {spent:.4g} of {self.total}"])

    def charge(self, *runs: Spending, purpose: str, again: bool = False) -> None:
        """Adds runs, if the total covers them all.

        Args:
            *runs: What each of them will spend.
            purpose: What they are for.
            again: Whether they may be in the ledger already, because a checkpoint or a folder
                continues them.

        Raises:
            LedgerError: If all runs together would spend more than the total.
        """
        with self._transaction() as file:
            self._read(file)
            added = [each for each in runs if not (again and self._is_known(each))]
            if not added:
                return
            others = [each.spending for each in self._entries.values() if not each.failed]
            self._check_kinds(added, others)
            bound = self._bound((*others, *added))
            if bound.epsilon > self.total.epsilon * (1 + 1e-9):
                who = "This run" if len(added) == 1 else f"These {len(added)} runs"
                raise LedgerError(
                    f"{who} ({purpose}) and those in {self.path} ({len(others)}) would spend "
                    f"epsilon={bound.epsilon:.4g}. The total is {self.total}. No record was read. "
                    "Take a smaller epsilon, or none for what is left."
                )
            now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
            file.executemany(
                "INSERT INTO runs VALUES (?, ?, ?, ?, FALSE)",
                [(each.run, now, purpose, json.dumps(each._asdict())) for each in added],
            )
            self._read(file)

    def take_back(self, run: str) -> None:
        """Marks a run as one that released nothing, so that it does not count.

        Only do this if you know it, as of a run that had too little memory to begin. A run that
        raised an error after its first step has released values, which its error may show.

        Args:
            run: Name of the run, as in :meth:`table`.

        Raises:
            LedgerError: If there is no such run.
        """
        with self._transaction() as file:
            self._read(file)
            if run not in self._entries:
                raise LedgerError(f"{self.path} has no run {run}.")
            file.execute("UPDATE runs SET failed = TRUE WHERE run = ?", [run])
            self._read(file)

    def _is_known(self, spending: Spending) -> bool:
        known = self._entries.get(spending.run)
        if known is None or known.failed:
            return False
        # Caveats are texts about the call, which may differ when it is repeated.
        return known.spending._replace(caveats=()) == spending._replace(caveats=())

    def _check_kinds(self, added: list[Spending], others: list[Spending]) -> None:
        """Raises LedgerError unless runs are new, and all of one unit and relation."""
        for each in added:
            if known := self._entries.get(each.run):
                raise LedgerError(
                    f"The run {each.run} is in {self.path} already"
                    + (", as one that released nothing." if known.failed else ".")
                    + " Start a new run: without a checkpoint or folder, or with another."
                )
            if each.relation != self.total.relation:
                raise LedgerError(
                    f"The run has the relation {each.relation!r}, and the total of {self.path} has "
                    f"{self.total.relation!r}. Take budgets from ledger.budget(...)."
                )
        units = sorted({each.unit for each in (*added, *others)})
        if len(units) > 1:
            raise LedgerError(
                f"In some runs of {self.path} a record is a {units[0]}, in others a {units[1]}. "
                "One total cannot cover both. Use the same unit, or another ledger for other "
                "records."
            )

    def _bound(self, spendings: tuple[Spending, ...]) -> EpsilonBound:
        beside = {
            name: min(math.fsum(getattr(each, name) for each in spendings), 1 - 1e-12)
            for name in ("failure_prob", "total_variation")
        }
        event = canonical_event(tuple(step for each in spendings for step in each.steps))
        return epsilon_spent(event, self._delta, self.total.relation, accountant=None, **beside)

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """Opens the file and keeps other processes from it. An exception leaves it as it was."""
        place = f"{self.path.as_uri()}?mode=rw"
        try:
            with contextlib.closing(
                sqlite3.connect(place, uri=True, timeout=_WAIT, isolation_level=None)
            ) as file:
                file.execute("BEGIN IMMEDIATE")
                yield file
                file.execute("COMMIT")
        except sqlite3.Error as error:
            raise LedgerError(f"{self.path} cannot be used: {error}. {_NO_RUN}") from error

    def _read(self, file: sqlite3.Connection) -> None:
        """Reads all runs, and checks that none is gone that was there before."""
        (version,) = file.execute("PRAGMA user_version").fetchone()
        if version != _VERSION:
            raise LedgerError(f"{self.path} is no ledger of version {_VERSION}. {_NO_RUN}")
        try:
            (of_total,) = file.execute("SELECT epsilon, delta, relation FROM total")
            total = PrivacyBudget(*of_total)
            rows = file.execute("SELECT * FROM runs ORDER BY rowid")
            found = {run: _entry(run, *rest) for run, *rest in rows}
        except (ValueError, KeyError, TypeError) as error:
            raise LedgerError(f"{self.path} is damaged ({error!r}). {_NO_RUN}") from error
        if total != self.total:
            raise LedgerError(
                f"{self.path} has the total {total}, not {self.total}. Open it with its own total. "
                "A data set has one total for all time."
            )
        for run, known in self._entries.items():
            if found.get(run) not in (known, known._replace(failed=True)):
                raise LedgerError(f"{self.path} has lost the run {run}. {_NO_RUN}")
        self._entries = found


def _entry(run: str, date: str, purpose: str, text: str, failed: int) -> Entry:
    """Reads a row, and checks that it has a run of finite epsilon."""
    found = json.loads(text)
    caveats = tuple(found.pop("caveats"))
    steps = tuple(
        GaussianStep(sampling, rate, size and tuple(size), noise, count)
        for sampling, rate, size, noise, count in found.pop("steps")
    )
    spending = Spending(**found, steps=steps, caveats=caveats)
    noisy = (0 < s.rate <= 1 and 0 < s.noise_multiplier < math.inf and s.count > 0 for s in steps)
    errors = spending.failure_prob, spending.total_variation
    if spending.run != run or not steps or not all(noisy) or not all(0 <= x < 1 for x in errors):
        raise ValueError(f"the row of {run}: {text}")
    return Entry(spending, date, purpose, bool(failed))


class Charges(NamedTuple):
    """Which ledger a budget charges, and for what."""

    ledger: Ledger
    purpose: str
