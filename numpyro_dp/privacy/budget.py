r"""The privacy budget, and how its relation changes the noise.

A mechanism is :math:`(\varepsilon, \delta)`-differentially private under a relation if

.. math:: P[M(D) \in A] \le e^\varepsilon P[M(D') \in A] + \delta

for every event :math:`A` and every pair of data sets that are neighbours under the relation. An
epsilon means little without its relation: replacing a record costs about twice as much as adding
or removing one.

**Convention of this package.** A query adds noise of standard deviation ``noise_multiplier *
clip_norm`` to a *sum* of vectors of norm at most ``clip_norm``. That sum moves by ``clip_norm``
when a record is added or removed, and by ``2 * clip_norm`` when one is replaced. The
``noise_multiplier`` field of an *event* is always the noise divided by the sensitivity **under the
relation of the budget** (:data:`SENSITIVITY`).
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

from numpyro_dp._lazy import dpa
from numpyro_dp._validate import check_in, check_real
from numpyro_dp.core import Relation

if TYPE_CHECKING:
    from numpyro_dp.privacy.accounting.bounds import GaussianStep
    from numpyro_dp.privacy.ledger import Charges


# Largest distance between the sums of two neighbours, in clip norms.
SENSITIVITY: dict[str, float] = {"add_or_remove_one": 1.0, "replace_one": 2.0}
# A larger epsilon promises nothing: a test that is wrong about 1 % of absent records may be right
# about all present ones.
LARGEST_EPSILON = 10.0


def default_delta(num_examples: int) -> float:
    """The delta of a run for which the user gave none: N ** -1.1, and at most 0.01."""
    return min(1e-2, float(num_examples) ** -1.1)


def check_relation(relation: object) -> Relation:
    """Returns ``relation`` if this package supports it.

    Raises:
        ValueError: If not. The message lists the choices.
    """
    check_in(
        "relation",
        relation,
        get_args(Relation),
        remedy="'add_or_remove_one' is the usual choice. 'replace_one' keeps num_examples fixed.",
    )
    return relation  # type: ignore[return-value]


def neighboring_relation(relation: Relation) -> dpa.NeighboringRelation:
    """Returns the ``dp_accounting`` name of a relation."""
    return dpa.NeighboringRelation[check_relation(relation).upper()]


class Spending(NamedTuple):
    """What one run has spent, as later runs on the same records account for it.

    Attributes:
        run: Name of the run, so that it is counted once.
        relation: The neighbouring relation.
        steps: Normal form of its event (:func:`~.accounting.bounds.gaussian_steps`).
        failure_prob, total_variation: See :func:`.epsilon_spent`.
        caveats: What epsilon does not cover, as the report says it.
        unit: What one record is (:func:`unit_name`).
    """

    run: str
    relation: Relation
    steps: tuple[GaussianStep, ...]
    failure_prob: float
    total_variation: float
    caveats: tuple[str, ...]
    unit: str = "row"


def unit_name(max_rows: int | None) -> str:
    """Returns ``"row"`` if a record is a row, else ``"unit of rows"``."""
    return "row" if max_rows is None else "unit of rows"


@dataclasses.dataclass(frozen=True)
class PrivacyBudget:
    r"""The :math:`(\varepsilon, \delta)` that a run may spend, and the relation they refer to.

    Args:
        epsilon: Positive and finite.
        delta: A probability in (0, 1), below ``1 / num_examples``. The default is
            ``min(0.01, num_examples ** -1.1)``, and the report says so.
        relation: ``"add_or_remove_one"`` (neighbours differ by the presence of one record) or
            ``"replace_one"`` (neighbours have the same size and differ by the value of one record).
        earlier: What earlier runs have spent of the budget. Set by :meth:`after`.
        charges: The ledger that counts runs. Set by :meth:`numpyro_dp.Ledger.budget`.

    Raises:
        TypeError: If ``epsilon`` or ``delta`` is not a real number.
        ValueError: If a value is outside its range, such as ``delta=0``.

    Example:
        >>> print(PrivacyBudget(epsilon=1.0, delta=1e-5))
        (epsilon=1, delta=1e-05) under add_or_remove_one

    Reference:
        Dwork, Roth: The Algorithmic Foundations of Differential Privacy (2014), Definition 2.4.
    """

    epsilon: float
    delta: float | None = None
    relation: Relation = "add_or_remove_one"
    earlier: tuple[Spending, ...] = dataclasses.field(default=(), kw_only=True)
    charges: Charges | None = dataclasses.field(
        default=None, kw_only=True, compare=False, repr=False
    )

    def __post_init__(self) -> None:
        epsilon = check_real(
            "epsilon", self.epsilon, low=0.0, low_open=True, high=float("inf"), high_open=True,
            remedy="Choose a finite budget, for example epsilon=1.0.",
        )  # fmt: skip
        if self.delta is not None:
            delta = check_real(
                "delta", self.delta, low=0.0, high=1.0, low_open=True, high_open=True,
                remedy="Gaussian noise gives no guarantee with delta=0. Choose a delta below "
                "1 / num_examples, for example 1e-5.",
            )  # fmt: skip
            object.__setattr__(self, "delta", delta)
        object.__setattr__(self, "epsilon", epsilon)
        check_relation(self.relation)
        if not all(isinstance(each, Spending) for each in self.earlier):
            raise TypeError(
                "earlier does not hold the spending of runs. Do not set it. Call "
                "budget.after(result.privacy) instead."
            )
        for each in self.earlier:
            if each.relation != self.relation:
                raise ValueError(
                    f"The relation {self.relation!r} of the budget is not the relation of an "
                    f"earlier run, {each.relation!r}. One epsilon cannot cover both. Use the same "
                    "relation for all runs."
                )

    def for_records(self, num_examples: int) -> PrivacyBudget:
        """The same budget, with the default delta for this many records if none was given."""
        return dataclasses.replace(self, delta=self.delta or default_delta(num_examples))

    def after(self, *reports: Any) -> PrivacyBudget:
        """Returns the budget of a further run on records that earlier runs have used.

        The new run gets the noise with which **all runs together** spend this budget. Its report
        covers all runs together. It has its own noise even if you pass the secret key of an
        earlier run.

        Args:
            *reports: ``result.privacy`` of each earlier run, or a :class:`~numpyro_dp.Ledger`. If
                the budget of a run came from ``after``, its report includes the runs before it.
                Each run counts once.

        Raises:
            TypeError: If an argument is not a report.
            ValueError: If a report has another relation, or its run was not private.

        Example:
            >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist, optax
            >>> from numpyro.infer.autoguide import AutoDiagonalNormal
            >>> from numpyro_dp import DPSVI, PrivacyBudget
            >>> from numpyro_dp.estimators import aligned
            >>> from numpyro_dp.samplers import FullBatch
            >>> def model(x):
            ...     mean = numpyro.sample("mean", dist.Normal(0, 1))
            ...     with numpyro.plate("records", x.shape[0]):
            ...         numpyro.sample("x", dist.Normal(mean, 1), obs=x)
            >>> def fit(budget):
            ...     svi = DPSVI(model, AutoDiagonalNormal(model), optax.adam(0.1), clip_norm=1.0,
            ...                 estimator=aligned(), sampler=FullBatch(), budget=budget)
            ...     return svi.run(jax.random.key(0), 10, jnp.ones(50), progress_bar=False)
            >>> total = PrivacyBudget(1.0, 1e-3)
            >>> first = fit(PrivacyBudget(0.8, 1e-3))
            >>> second = fit(total.after(first.privacy))
            >>> 0.99 < second.privacy.epsilon <= 1.0
            True

        **Guarantee**: the guarantee of the report covers all of these runs together. Fix the total
        budget, the list of runs, their samplers, numbers of steps and shares before the first run.
        Model, columns, initial values, step sizes and clip norms may depend on released values.
        If all runs use full batches, steps and noise may too: in any order the runs are one
        Gaussian event (Smith and Thakurta 2022). A run that you leave out is not accounted for.
        """
        found = {each.run: each for each in self.earlier}
        for report in reports:
            if not hasattr(type(report), "spending"):
                raise TypeError(f"Expected result.privacy, got {type(report).__name__}.")
            found |= {each.run: each for each in report.spending}
        return dataclasses.replace(self, earlier=tuple(found.values()))

    def __str__(self) -> str:
        shared = ", together with earlier runs" if self.earlier else ""
        delta = "by default" if self.delta is None else f"{self.delta:g}"
        return f"(epsilon={self.epsilon:g}, delta={delta}) under {self.relation}{shared}"
