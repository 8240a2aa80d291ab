"""What a run guarantees, in words for people who decide whether its result may be published.

The contents follow NIST SP 800-226 (2025), which lists what a claim of differential privacy must
say: the unit, the parameters, the trust model, the mechanism, and what it leaves out.
"""

from __future__ import annotations

import dataclasses
import decimal
import html
import importlib.metadata
import json
import math
import platform
import sys
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from numpyro_dp.privacy.accounting.bounds import describe_event
from numpyro_dp.privacy.accounting.spent import is_left_out
from numpyro_dp.privacy.budget import LARGEST_EPSILON, default_delta

if TYPE_CHECKING:
    from numpyro_dp.privacy.plan import PrivacyReport


_FALSE_POSITIVE_RATES = (0.01, 0.05, 0.1)
_OTHER_DELTAS = (1e-3, 1e-2, 3e-2)  # each gives another bound on the true positive rates

_FORMAT = "numpyro_dp privacy statement"
_VERSION = 1
_PACKAGES = ("numpyro_dp", "numpyro", "jax", "numpy", "dp_accounting")
_NEIGHBOURS = {
    "add_or_remove_one": "Two data sets are neighbours if one has one record more than the other.",
    "replace_one": "Two data sets are neighbours if they differ in the values of one record.",
}
_ACTORS = (
    "One holder of the data runs numpyro_dp. The holder sees the records and is trusted. Everybody "
    "else sees released values only."
)


def version_of(package: str) -> str:
    """The installed version. Own metadata are missing if a folder on the path has the code."""
    if package == "numpyro_dp":
        return sys.modules[package].__version__
    return importlib.metadata.version(package)


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that a run depends on."""
    found = {"python": platform.python_version()}
    return found | {name: version_of(name) for name in _PACKAGES}


@dataclasses.dataclass(frozen=True)
class Statement:
    """A privacy statement. It prints as text. You may publish it.

    Attributes:
        unit: What one record is.
        relation: The neighbouring relation.
        epsilon, delta: The guarantee. Epsilon is infinite if the run was not private.
        attack: Pairs of a false positive rate and the largest true positive rate of any test
            whether a record was among the data.
        num_examples: Number of records.
        released: What was released.
        public: Arrays that were taken as public.
        mechanism: Noise, sensitivity and sampler.
        accountant: Name of the accountant.
        composition: How the steps were added up.
        num_steps: Number of steps.
        settings: How the settings of the run were chosen.
        date: Day of the run, as ``YYYY-MM-DD``.
        versions: Versions of the software.
        caveats: What the guarantee leaves out.

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
        >>> statement = result.privacy.statement(settings="Chosen without records.")
        >>> statement.relation, statement.num_examples
        ('add_or_remove_one', 1000)
        >>> false_positives, found = statement.attack[0]  # of any test for one record
        >>> bool(found < 0.1), float(false_positives)
        (True, 0.01)

    Guarantee:
        A function of the report, which reads no record.

    Reference:
        NIST SP 800-226 (2025), Guidelines for evaluating differential privacy guarantees.
    """

    unit: str
    relation: str
    epsilon: float
    delta: float
    attack: tuple[tuple[float, float], ...]
    num_examples: int
    released: tuple[str, ...]
    public: tuple[str, ...]
    mechanism: str
    accountant: str
    composition: str
    num_steps: int
    settings: str
    date: str
    versions: dict[str, str]
    caveats: tuple[str, ...]

    @property
    def private(self) -> bool:
        """Whether epsilon is finite."""
        return math.isfinite(self.epsilon)

    @property
    def neighbours(self) -> str:
        """The relation in words."""
        return _NEIGHBOURS[self.relation]

    @property
    def meaning(self) -> str:
        """What epsilon and delta bound, in words."""
        if not self.private:
            return "The result may reveal everything about any record."
        if self.epsilon > LARGEST_EPSILON:
            return (
                f"This budget promises nothing: with epsilon above {LARGEST_EPSILON:g}, the result "
                "may reveal almost everything about any record."
            )
        odds = ", ".join(f"{100 * rate:g} %" for rate, _ in self.attack)
        right = ", ".join(f"{_rounded_up(100 * rate)} %" for _, rate in self.attack)
        asked = "a record was among the data"
        groups = "absent records", "present records"
        if self.relation == "replace_one":
            asked = "a record had one of two values"
            groups = "records with the other value", "records with it"
        return (
            "A record changes the probability of any result by a factor of at most "
            f"{_rounded_up(math.exp(min(self.epsilon, 700)))} = exp(epsilon), plus delta. Someone "
            f"who tests from the result whether {asked}, and is wrong about {odds} of {groups[0]}, "
            f"is right about at most {right} of {groups[1]}."
        )

    def rows(self) -> list[tuple[str, list[str]]]:
        """The statement as headings and paragraphs."""
        guarantee = f"epsilon <= {self.epsilon:.5g} at delta={self.delta:g} under {self.relation}"
        if not self.private:
            guarantee = "NOT PRIVATE: epsilon is infinite."
        software = ", ".join(f"{name} {number}" for name, number in self.versions.items())
        return [
            ("Guarantee", [guarantee]),
            ("Protected unit", [self.unit, self.neighbours]),
            ("Meaning", [self.meaning]),
            ("Released", list(self.released)),
            ("Taken as public", list(self.public) or ["No array."]),
            ("Trust", [_ACTORS]),
            ("Mechanism", [self.mechanism]),
            ("Accounting", [self.composition]),
            ("Settings", [self.settings]),
            ("Run", [f"{self.date}, {software}"]),
            ("Left out", list(self.caveats)),
        ]

    def __str__(self) -> str:
        """The statement as text."""
        return "\n".join(
            f"{heading}: {texts[0]}" if len(texts) == 1 else "\n  - ".join([f"{heading}:", *texts])
            for heading, texts in self.rows()
        )

    def _repr_html_(self) -> str:
        """The statement as a table for notebooks. It has no scripts and no colours of its own."""
        rows = "".join(
            f'<tr><th scope="row" style="text-align:left;vertical-align:top">{html.escape(head)}'
            f'</th><td style="text-align:left">{"<br>".join(map(html.escape, texts))}</td></tr>'
            for head, texts in self.rows()
        )
        return f"<table><caption>Privacy statement</caption><tbody>{rows}</tbody></table>"

    def to_json(self) -> str:
        """Returns the statement as JSON. :meth:`from_json` reads it. Infinity becomes ``null``."""
        fields = dataclasses.asdict(self)
        fields["epsilon"] = self.epsilon if self.private else None
        return json.dumps({"format": _FORMAT, "version": _VERSION} | fields, indent=2)

    @classmethod
    def from_json(cls, text: str) -> Statement:
        """Reads what :meth:`to_json` wrote.

        Raises:
            ValueError: If the text is not such a statement.
        """
        names = {field.name for field in dataclasses.fields(cls)}
        try:
            found = json.loads(text)
            kind = found.pop("format"), found.pop("version")
            if kind != (_FORMAT, _VERSION) or set(found) != names:
                raise ValueError(
                    f"Expected the format {_FORMAT!r}, version {_VERSION}, got {kind} with entries "
                    f"{sorted(found)}. Read it with the numpyro_dp that wrote it."
                )
            found["epsilon"] = math.inf if found["epsilon"] is None else found["epsilon"]
            found["attack"] = tuple((float(a), float(b)) for a, b in found["attack"])
            lists = {name: tuple(found[name]) for name in ("released", "public", "caveats")}
            made = cls(**found | lists)
            rates = [each for pair in made.attack for each in pair]
            good = made.epsilon >= 0 and 0 < made.delta < 1 and all(0 <= x <= 1 for x in rates)
            if not good or not str(made):
                raise ValueError(f"epsilon={made.epsilon}, delta={made.delta}, rates {rates}")
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise ValueError(f"The text is not a privacy statement: {error!r}.") from error
        return made


def _rounded_up(value: float) -> str:
    """A bound with four digits, which it does not fall below."""
    return f"{decimal.Context(prec=4, rounding=decimal.ROUND_CEILING).create_decimal(value):g}"


def statement_of(report: PrivacyReport, settings: str) -> Statement:
    """Returns the statement of a :class:`~numpyro_dp.PrivacyReport`."""
    plan, private = report.plan, math.isfinite(report.epsilon)
    unit = f"One of {plan.num_examples} records."
    if report.data_plate:
        unit = f"One of {plan.num_examples} records: the indices of plate {report.data_plate!r}."
    if report.max_rows is not None:
        unit = (
            f"One of {plan.num_examples} units, with all rows of plate {report.data_plate!r} that "
            f"have its id. At most {report.max_rows} of them are used. Such a unit is what this "
            "statement calls a record."
        )
    released = ["Noisy sums of clipped contributions of records, and what is computed from them."]
    if report.loss_released:
        released.append("The loss curve is part of the release, with noise of its own.")
    built = plan.mechanism(plan.noise_multiplier)
    at_most = "" if built.compose is None else "at most "
    mechanism = (
        f"Gaussian noise, {at_most}{report.num_steps} steps of {plan.sampler} on "
        f"{plan.num_examples} records, noise multiplier {plan.noise_multiplier:.4g}, sensitivity "
        f"{built.sensitivity:.4g}"
    ) + ("." if built.extras is None else " in the first step (adaptive clip norm).")
    if report.chains > 1:
        mechanism += (
            f" Each of {report.chains} chains took {report.num_steps // report.chains} steps. "
            "Epsilon covers all chains together."
        )
    composition = f"event: {describe_event(report.event)}, by {report.accountant}."
    if plan.earlier:
        composition += (
            f" Epsilon and event cover this run and the {len(plan.earlier)} earlier in its budget."
        )
    rates = _FALSE_POSITIVE_RATES
    attack = true_positive_rates(report, rates) if private else [1.0] * len(rates)
    return Statement(
        unit=unit,
        relation=report.relation,
        epsilon=report.epsilon,
        delta=report.delta,
        attack=tuple(zip(rates, attack, strict=True)),
        num_examples=plan.num_examples,
        released=tuple(released),
        public=tuple(map(str, report.public)),
        mechanism=mechanism,
        accountant=report.accountant,
        composition=composition,
        num_steps=report.num_steps,
        settings=settings,
        date=report.date,
        versions=versions(),
        caveats=tuple(_caveats(report)),
    )


def joint_statement(statements: Sequence[Statement], disjoint: bool) -> Statement:
    """Returns the statement of several releases together.

    Args:
        statements: One for each release.
        disjoint: Whether no record is in the data of two of them. Then one release depends on it,
            and the largest epsilon and delta hold. Otherwise they add up.

    Raises:
        ValueError: If neighbouring relations differ.
    """
    relations = sorted({each.relation for each in statements})
    if len(relations) > 1:
        raise ValueError(
            f"The releases protect records under different relations, {relations}, so no single "
            "guarantee holds for all. Pool releases of one relation."
        )
    number, most = len(statements), max if disjoint else math.fsum
    epsilon = most(each.epsilon for each in statements)
    delta = min(most(each.delta for each in statements), math.nextafter(1, 0))
    how = "No record is in the data of two of them, so the largest epsilon and delta hold."
    if not disjoint:
        how = "A record may be in all of them, so epsilons and deltas are added up."

    def joined(name: str) -> tuple[str, ...]:
        return tuple(dict.fromkeys(text for each in statements for text in getattr(each, name)))

    def listed(name: str) -> str:
        found = [getattr(each, name) for each in statements]
        if len(set(found)) == 1:
            return found[0]
        return " ".join(f"({place}) {text}" for place, text in enumerate(found, 1))

    counts = [each.num_examples for each in statements]
    known = SimpleNamespace(epsilon=epsilon, delta=delta)
    rates = _FALSE_POSITIVE_RATES
    attack = true_positive_rates(known, rates) if math.isfinite(epsilon) else [1.0] * len(rates)
    return dataclasses.replace(
        statements[0],
        unit=f"One record of one of {number} data sets. {listed('unit')}",
        epsilon=epsilon, delta=delta, attack=tuple(zip(rates, attack, strict=True)),
        num_examples=sum(counts) if disjoint else max(counts),
        released=joined("released"), public=joined("public"), mechanism=listed("mechanism"),
        composition=f"{number} releases. {how} {listed('composition')}",
        num_steps=sum(each.num_steps for each in statements), settings=listed("settings"),
        date=max(each.date for each in statements), caveats=joined("caveats"),
    )  # fmt: skip


def true_positive_rates(privacy: Any, rates: Iterable[float]) -> list[float]:
    r"""Bounds the true positive rate of any test whether a record was among the data.

    Each pair of :math:`\varepsilon` and :math:`\delta` bounds it at a false positive rate
    :math:`\alpha` by :math:`e^\varepsilon \alpha + \delta` and by
    :math:`1 - e^{-\varepsilon} (1 - \delta - \alpha)`.

    Args:
        privacy: A report, which has the pairs of several deltas, or a budget or statement with one.
        rates: False positive rates.
    """
    pairs = [(privacy.epsilon, privacy.delta)]
    if hasattr(privacy, "at"):
        others = [privacy.at(delta) for delta in _OTHER_DELTAS if delta > privacy.delta]
        pairs += [(each.epsilon, each.delta) for each in others]
    pairs = [(min(epsilon, 700.0), delta) for epsilon, delta in pairs]
    return [
        min(1.0, *(
            min(math.exp(e) * rate + d, 1 - math.exp(-e) * (1 - d - rate)) for e, d in pairs
        ))
        for rate in rates
    ]  # fmt: skip


def _caveats(report: PrivacyReport) -> list[str]:
    number, delta, earlier = report.plan.num_examples, report.delta, report.plan.earlier
    floating = report.plan.mechanism(report.noise_multiplier).total_variation == 0
    distance = report.plan.errors(report.num_steps)["total_variation"]
    covered = "this run and the earlier ones" if earlier else "this run alone"
    several = "records" if report.max_rows is None else "ids"
    told = [
        (delta > 1 / number,
         f"delta > 1 / {number}: so large a delta allows a run to publish a whole record. "
         "Choose a delta below 1 / number of records."),
        (delta == default_delta(number), "delta is the default, min(0.01, N ** -1.1)."),
        (floating,
         "The mechanism states no distance of its noise from that of its event. If the noise is "
         "drawn in floating point, the guarantee is for real numbers."),
        (is_left_out(report.epsilon, delta, distance),
         "Epsilon is so large that delta leaves out how far noise and batches are from exact "
         "ones."),
        (report.in_ledger,
         f"A ledger counts all runs on these records. Epsilon here covers {covered}, and the "
         "ledger has the sum."),
    ]  # fmt: skip
    return [
        *(text for holds, text in told if holds),
        *report.caveats,
        *(f"Earlier run: {text}" for each in earlier for text in each.caveats),
        f"A person with several {several} is protected for one of them, not for all together.",
        "What is true of the whole population may be learned, also about people in it.",
    ]
