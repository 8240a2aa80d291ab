"""The plan of a run, made before the run reads a record, and reports of what it spent."""

from __future__ import annotations

import dataclasses
import datetime
import math
import uuid
from collections.abc import Callable

from numpyro_dp._lazy import dpa
from numpyro_dp.core import Mechanism, Number, Sampler
from numpyro_dp.privacy.accounting.bounds import (
    Accountant,
    EpsilonBound,
    TotalVariationError,
    canonical_event,
    gaussian_steps,
)
from numpyro_dp.privacy.accounting.spent import epsilon_spent
from numpyro_dp.privacy.budget import (
    SENSITIVITY,
    PrivacyBudget,
    Relation,
    Spending,
    default_delta,
    unit_name,
)
from numpyro_dp.privacy.calibration import calibrate_noise
from numpyro_dp.privacy.statement import Statement, statement_of

_SETTINGS = (
    "Not said how model, columns and settings were chosen. If they were tuned on these records, "
    "this statement does not cover that."
)


def _today() -> str:
    return datetime.datetime.now(datetime.UTC).date().isoformat()


class BudgetError(ValueError):
    """A run that would spend more than its budget allows.

    Example:
        >>> import numpyro, numpyro.distributions as dist, optax
        >>> from numpyro.infer.autoguide import AutoDiagonalNormal
        >>> from numpyro_dp import DPSVI, BudgetError, PrivacyBudget
        >>> from numpyro_dp.samplers import FullBatch
        >>> def model(x):
        ...     mean = numpyro.sample("mean", dist.Normal(0, 1))
        ...     with numpyro.plate("records", x.shape[0]):
        ...         numpyro.sample("x", dist.Normal(mean, 1), obs=x)
        >>> try:
        ...     DPSVI(model, AutoDiagonalNormal(model), optax.adam(0.1), clip_norm=float("inf"),
        ...           sampler=FullBatch(), budget=PrivacyBudget(1.0, 1e-5))
        ... except BudgetError as error:
        ...     print(str(error).split(", so")[0])
        clip_norm=inf does not limit a record
    """


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a run draws batches, adds noise and counts what it spends.

    Attributes:
        sampler: Draws the batches.
        num_examples: Public size of the data set.
        noise_multiplier: Noise standard deviation / sensitivity (add or remove one).
        mechanism: Noise multiplier -> mechanism of one step, with its sensitivity and event.
        budget: The budget of the run, or ``None``.
        delta: The delta at which epsilon is reported.
        relation: The neighbouring relation.
        accountant: Bounds epsilon.
    """

    sampler: Sampler
    num_examples: int
    noise_multiplier: float
    mechanism: Callable[[float], Mechanism]
    budget: PrivacyBudget | None
    delta: float
    relation: Relation
    accountant: Accountant | None

    @property
    def sensitivity(self) -> Number:
        """Sensitivity of the first step's clipped sum when one record is added or removed."""
        return self.mechanism(self.noise_multiplier).sensitivity

    def event(self, num_steps: int) -> dpa.DpEvent:
        """The event of ``num_steps`` steps and of earlier runs, under the plan's relation."""
        own = self.own_event(num_steps)
        return dpa.ComposedDpEvent([*self.earlier_events, own]) if self.earlier else own

    def own_event(self, num_steps: int) -> dpa.DpEvent:
        """The event of ``num_steps`` steps alone."""
        # The mechanism states noise / sensitivity for add-or-remove. Sums of replace-one neighbours
        # differ by up to twice that sensitivity, so relative to it the noise is half as large.
        mechanism = self.mechanism(self.noise_multiplier / SENSITIVITY[self.relation])
        sampler, number = self.sampler, self.num_examples
        if mechanism.event is None or isinstance(mechanism.event, dpa.NonPrivateDpEvent):
            return dpa.NonPrivateDpEvent()
        # Noise that depends on earlier noise has an event of the whole run, not of one step.
        if mechanism.compose is not None:
            return mechanism.compose(sampler, number, num_steps)
        step = sampler.amplify(mechanism.event, number)
        return dpa.SelfComposedDpEvent(step, sampler.compositions(number, num_steps))

    @property
    def earlier_events(self) -> list[dpa.DpEvent]:
        """The events of earlier runs."""
        return [canonical_event(each.steps) for each in self.earlier]

    @property
    def earlier(self) -> tuple[Spending, ...]:
        """What earlier runs have spent of the budget."""
        return () if self.budget is None else self.budget.earlier

    def spent(
        self, num_steps: int, *, delta: float | None = None, accountant: Accountant | None = None
    ) -> EpsilonBound:
        """Bounds the epsilon of ``num_steps`` steps, and of earlier runs in the budget.

        Raises:
            TotalVariationError: If the plan has a budget and no finite epsilon holds. Without a
                budget the method returns an infinite epsilon: the run is not private.
        """
        event, delta = self.event(num_steps), self.delta if delta is None else delta
        judge, beside = accountant or self.accountant, self.errors(num_steps)
        try:
            return epsilon_spent(event, delta, self.relation, accountant=judge, **beside)
        except TotalVariationError:
            if self.budget is not None:
                raise
            return EpsilonBound(None, None, math.inf, delta, self.relation, event, "none")

    def errors(self, num_steps: int, *, own: bool = False) -> dict[str, float]:
        """Errors of sampler and noise that the event leaves out, by a union bound over the steps.

        They include those of earlier runs, unless you ask for the own ones.
        """
        sampler, number = self.sampler, self.num_examples
        of_noise = self.mechanism(self.noise_multiplier).total_variation
        found = {
            "failure_prob": sampler.failure_prob(number) * num_steps,
            "total_variation": (sampler.total_variation(number) + of_noise) * num_steps,
        }
        for name in () if own else found:
            found[name] += sum(getattr(each, name) for each in self.earlier)
            # A union bound may exceed 1, and is then no probability. No delta covers it either way.
            found[name] = min(found[name], 1.0 - 1e-12)
        return found


@dataclasses.dataclass(frozen=True)
class PrivacyReport:
    """What a run and the earlier runs in its budget have spent. Print it. You may publish it.

    Attributes:
        bound: The epsilon bound with delta, relation, event and accountant.
        num_steps: Steps taken, including those before a resume.
        plan: The plan of the run.
        reproducible: Whether the caller supplied the secret key.
        loss_released: Whether the run released a loss curve.
        run: Name of the run.
        chains: Number of chains of a sampler. They share the steps, and so the budget.
        repetition: Whether the caller declared that the run repeats another run with its noise.
        data_plate: Name of the plate over records. Each index of it is one protected record.
        public: Arrays that were taken as public: arguments, static keywords, and constants of
            model and guide. Each has a place, a shape and a dtype.
        date: Day of the report, in UTC, as ``YYYY-MM-DD``.
        max_rows: Most rows of a unit, if a protected record is a unit of several rows.
        in_ledger: Whether a ledger counts the run.
        timed: Whether the time of a step may depend on a record.

    Example:
        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist, optax
        >>> from numpyro.infer.autoguide import AutoDiagonalNormal
        >>> from numpyro_dp import DPSVI, PrivacyBudget
        >>> from numpyro_dp.samplers import FullBatch
        >>> def model(x):
        ...     mean = numpyro.sample("mean", dist.Normal(0, 1))
        ...     with numpyro.plate("records", x.shape[0]):
        ...         numpyro.sample("x", dist.Normal(mean, 1), obs=x)
        >>> svi = DPSVI(model, AutoDiagonalNormal(model), optax.adam(0.1), clip_norm=1.0,
        ...             sampler=FullBatch(), budget=PrivacyBudget(1.0, 1e-5))
        >>> result = svi.run(jax.random.key(0), 200, jnp.full(1000, 0.5), progress_bar=False)
        >>> result.privacy.epsilon <= 1, result.privacy.delta
        (True, 1e-05)
        >>> print(str(result.privacy).splitlines()[0])
        Guarantee: epsilon <= 0.99999 at delta=1e-05 under add_or_remove_one
    """

    bound: EpsilonBound
    num_steps: int
    plan: Plan
    reproducible: bool
    loss_released: bool = False
    run: str = dataclasses.field(default_factory=lambda: uuid.uuid4().hex, compare=False)
    chains: int = 1
    repetition: bool = False
    data_plate: str = ""
    public: tuple[object, ...] = ()
    date: str = dataclasses.field(default_factory=_today, compare=False)
    max_rows: int | None = None
    in_ledger: bool = False
    timed: bool = False

    @property
    def epsilon(self) -> float:
        """Upper bound on epsilon, earlier runs included. Infinite if the run is not private."""
        return self.bound.epsilon

    @property
    def delta(self) -> float:
        """The delta of the guarantee."""
        return self.bound.delta

    @property
    def relation(self) -> Relation:
        """The neighbouring relation of the guarantee."""
        return self.bound.relation

    @property
    def event(self) -> dpa.DpEvent:
        """The ``dp_accounting`` event of the run."""
        return self.bound.event

    @property
    def accountant(self) -> str:
        """Name of the accountant that found the bound."""
        return self.bound.accountant

    @property
    def noise_multiplier(self) -> float:
        """Noise standard deviation over the sensitivity when one record is added or removed."""
        return self.plan.noise_multiplier

    @property
    def spending(self) -> tuple[Spending, ...]:
        """What each earlier run in the budget and this run have spent, one entry for each.

        Raises:
            ValueError: If the run was not private.
        """
        if not math.isfinite(self.epsilon):
            raise ValueError(
                "The run was not private: it spent epsilon=inf. No budget is left after it. Give "
                "the earlier run a budget or noise."
            )
        plan = self.plan
        own = Spending(
            self.run, plan.relation, gaussian_steps(plan.own_event(self.num_steps)),
            caveats=self.caveats, **plan.errors(self.num_steps, own=True),
            unit=unit_name(self.max_rows),
        )  # fmt: skip
        return (*plan.earlier, own)

    def of_another_run(self) -> PrivacyReport:
        """Returns the same report for a separate run of the same plan."""
        return dataclasses.replace(self, run=uuid.uuid4().hex)

    @property
    def caveats(self) -> tuple[str, ...]:
        """What epsilon does not cover."""
        told = [
            (self.reproducible,
             "Reproducible run: the guarantee holds against people who do not know secret_key, "
             "and only if no other run on overlapping records uses that key."),
            (self.repetition,
             "repetition=True: another run may have the same noise. The guarantee holds if both "
             "used the same records and the same settings. The two then count as one run."),
            (self.timed,
             "The model has a loop whose length depends on a record, as of a sampler that "
             "rejects. Epsilon does not cover the time of a step: let nobody measure it."),
        ]  # fmt: skip
        return tuple(text for holds, text in told if holds)

    def at(self, delta: float) -> EpsilonBound:
        """Returns the epsilon of the same run at another delta."""
        return self.plan.spent(self.num_steps, delta=delta)

    def statement(self, settings: str = _SETTINGS) -> Statement:
        """Returns what the run guarantees, as text, JSON and HTML.

        Args:
            settings: How clip norm, rate, steps and other settings were chosen. If they were tuned
                on these records, say here whether a budget covers that.

        Raises:
            TypeError: If ``settings`` is not a text.
        """
        if not isinstance(settings, str):
            raise TypeError(f"Expected settings as a text, got {type(settings).__name__}.")
        return statement_of(self, settings)

    def to_json(self) -> str:
        """The :meth:`statement` as JSON."""
        return self.statement().to_json()

    def __str__(self) -> str:
        """The :meth:`statement` as text."""
        return str(self.statement())

    def __repr__(self) -> str:
        """The guarantee in one line."""
        return str(self.bound) if math.isfinite(self.epsilon) else "NOT PRIVATE"

    def _repr_html_(self) -> str:
        return self.statement()._repr_html_()


def make_plan(
    sampler: Sampler,
    num_examples: int,
    num_steps: int | None,
    mechanism: Callable[[float], Mechanism],
    *,
    budget: PrivacyBudget | None,
    noise_multiplier: float | None,
    accountant: Accountant | None,
) -> Plan:
    """Finds the noise for a run before it reads a record.

    The budget must cover ``num_steps``. Without a ``noise_multiplier`` it sets the noise. Otherwise
    the noise is checked against it. The other arguments are fields of :class:`Plan`.

    Raises:
        BudgetError: If the run would spend more than the budget, or if a budget has no
            ``num_steps``.
    """
    budget = budget and budget.for_records(num_examples)
    delta = (budget and budget.delta) or default_delta(num_examples)
    relation = budget.relation if budget else sampler.relation
    noise = 0.0 if noise_multiplier is None else noise_multiplier
    plan = Plan(sampler, num_examples, noise, mechanism, budget, delta, relation, accountant)
    if budget is None:
        return plan
    if num_steps is None:
        raise BudgetError(
            "Pass num_steps together with a budget: the noise depends on the number of steps. Use "
            "DPSVI(..., num_steps=T) for a loop of T updates, or call run()."
        )
    if noise_multiplier is None:
        beside = plan.errors(num_steps)
        if plan.earlier:  # which may have spent the budget alone
            nothing = dpa.ComposedDpEvent(plan.earlier_events)
            spent = epsilon_spent(nothing, delta, relation, accountant=accountant, **beside)
            if spent.epsilon >= budget.epsilon:
                raise BudgetError(
                    f"Earlier runs ({len(plan.earlier)}) have spent the budget {budget}: {spent}. "
                    "Nothing more can be released within it. A further run needs a larger budget."
                )
        noise, _ = calibrate_noise(
            lambda z: dataclasses.replace(plan, noise_multiplier=z).event(num_steps),
            budget, accountant=accountant, **beside,
        )  # fmt: skip
        return dataclasses.replace(plan, noise_multiplier=noise)
    epsilon = plan.spent(num_steps).epsilon
    if epsilon > budget.epsilon:
        raise BudgetError(
            f"{num_steps} steps with noise_multiplier={noise} would spend epsilon={epsilon:.4g}. "
            f"The budget allows at most epsilon={budget.epsilon}. Take fewer steps or more noise, "
            "or omit noise_multiplier so that the budget sets it."
        )
    return plan
