"""``regression``: a private regression from a formula, a frame and a codebook."""

from __future__ import annotations

import dataclasses
import math
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array
from numpyro import handlers

from numpyro_dp._validate import check_in
from numpyro_dp.fit import fit
from numpyro_dp.formulas.outcome_families import FAMILIES, OutcomeFamily, intercept, thresholds
from numpyro_dp.formulas.terms import Codebook, Column, Formula, read_formula
from numpyro_dp.posterior.posterior import Posterior
from numpyro_dp.posterior.summary import entry_name, interval, table_lines
from numpyro_dp.privacy.budget import PrivacyBudget
from numpyro_dp.privacy.statement import Statement

_MIDDLE = "middle"  # site of the predictor in the middle of all columns
_POINTS = 21  # of a range, for effects
_DRAWS, _EFFECT_DRAWS = 4000, 1000
# Models of the last calls: fit has compiled programs for each function that it knows.
_kept: OrderedDict[str, RegressionModel] = OrderedDict()
_MOST_KEPT = 8
Arrays = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True, eq=False)
class RegressionModel:
    """A formula and a family as a NumPyro model. It holds public values alone.

    Attributes:
        formula: The formula.
        family: The family.
        offset: Name of a column that is added to the predictor, or "".
    """

    formula: Formula
    family: OutcomeFamily
    offset: str = ""

    @property
    def location(self) -> tuple[float, float]:
        """Middle and half length of the range of the outcome, if the model scales it."""
        if self.family.outcome != "number":
            return 0.0, 1.0
        low, high = self.formula.codebook[self.formula.outcome[0]]
        return (low + high) / 2, (high - low) / 2

    def _slope(self, site: str, column: Column, scale: float) -> Array:
        """A coefficient, in units of the variables, and then for the column."""
        unit = column.unit * scale
        return jnp.asarray(numpyro.sample(site, dist.Normal(0.0, self.family.slope * unit))) / unit

    def __call__(
        self,
        X: Array,
        codes: Any = None,  # an array, if the formula has groups
        other: Array | None = None,
        offset: Array | None = None,
        y: Array | None = None,
    ) -> None:
        """The model. ``X`` has the columns of the formula, then those of its groups."""
        formula, family = self.formula, self.family
        middle, scale = self.location
        public = formula.codebook[formula.outcome[0]]
        eta = jnp.zeros(X.shape[0]) if offset is None else offset / scale
        latents: dict[str, Any] = {}
        if family.outcome == "levels":
            latents["thresholds"] = numpyro.sample("thresholds", thresholds(len(public)))
        else:
            first = intercept(family, public)
            value = numpyro.sample(_MIDDLE, dist.Normal(middle + first.loc * scale,
                                                       first.scale * scale))  # fmt: skip
            eta = eta + (value - middle) / scale
        for place, column in enumerate(formula.columns):
            eta = eta + self._slope(column.label, column, scale) * X[:, place]
        for name, prior in family.latents.items():
            if name == "sigma":  # of the outcome, in its own units
                latents[name] = numpyro.sample(name, dist.HalfNormal(scale)) / scale
            else:
                latents[name] = numpyro.sample(name, prior)
        place = len(formula.columns)
        for number, group in enumerate(formula.groups):
            categories = len(formula.codebook[group.by])
            for column, site in zip(group.columns, group.sites, strict=True):
                unit = scale if column is None else column.unit * scale
                sd = numpyro.sample(f"sd({site})", dist.HalfNormal(family.slope / 2 * unit))
                with numpyro.plate(f"categories of {site}", categories):
                    effects = jnp.asarray(numpyro.sample(site, dist.Normal(0.0, sd))) / unit
                found = effects[codes[:, number]]
                if column is not None:
                    found, place = found * X[:, place], place + 1
                eta = eta + found
        with numpyro.plate("records", X.shape[0]):
            numpyro.sample("y", family.likelihood(eta, latents, other), obs=y)

    def arguments(self, frame: Any, outcome: bool = True) -> Arrays:
        """The arguments of the model for a frame."""
        formula = self.formula
        base = formula.arrays(frame, formula.variables)
        columns = [*formula.columns]
        columns += [c for group in formula.groups for c in group.columns if c is not None]
        values = [column.values(base) for column in columns]
        codes = [formula.codes(frame, group.by) for group in formula.groups]
        if not outcome and any(np.any(each < 0) for each in codes):
            raise ValueError("A row to predict has no category of a group. Give each row one.")
        found: Arrays = {}
        if outcome or self.family.outcome == "trials":
            found |= self._outcome(frame, outcome)
        if codes:
            found["codes"] = np.column_stack(codes)
        if self.offset:
            low, high = formula.codebook[self.offset]
            found["offset"] = (low + high) / 2 + (high - low) / 2 * self._ranged(frame, self.offset)
        first = frame[next(iter(frame))] if isinstance(frame, Mapping) else frame
        rows = len(next(iter((*values, *found.values())), first))
        found["X"] = np.column_stack(values) if values else np.zeros((rows, 1))
        return {n: x.astype(np.float32 if x.dtype.kind == "f" else np.int32)
                for n, x in found.items()}  # fmt: skip

    def _ranged(self, frame: Any, name: str) -> np.ndarray:
        (values,) = self.formula.arrays(frame, [name]).values()
        return values

    def _whole(self, frame: Any, name: str) -> np.ndarray:
        """Whole numbers inside their range, or the numbers of categories. -1 where missing."""
        public = self.formula.codebook[name]
        if isinstance(public, list):
            return self.formula.codes(frame, name)
        low, high = public
        found = np.rint((low + high) / 2 + (high - low) / 2 * self._ranged(frame, name))
        return np.where(np.isnan(found), -1, np.nan_to_num(found)).astype(np.int32)

    def _outcome(self, frame: Any, outcome: bool) -> Arrays:
        """The outcome, and the number of trials or whether a time is censored."""
        name, *others = self.formula.outcome
        kind, found = self.family.outcome, {}
        if kind == "trials":
            found["other"] = np.maximum(self._whole(frame, others[0]), 0)
        if not outcome:
            return found
        if kind in ("two", "count", "levels", "trials"):
            return found | {"y": self._whole(frame, name)}
        values = self._ranged(frame, name)
        if kind != "number":
            low, high = self.formula.codebook[name]
            values = (low + high) / 2 + (high - low) / 2 * values
        if kind == "share":
            values = np.clip(values, 1e-4, 1 - 1e-4)
        if kind == "time" and others:
            event = self._whole(frame, others[0])
            values = np.where(event < 0, np.nan, values)
            found["other"] = np.where(event == 1, 0, 1)
        return found | {"y": values}


class Regression:
    """A private regression. ``print`` shows a table of coefficients and a verdict.

    Attributes:
        posterior: The :class:`~numpyro_dp.Posterior` of all latents, in the variables' own units.
        model: The NumPyro model, to read and to call.

    Example:
        See :func:`regression` for a run.

        >>> found.effects("age")["mean"]  # doctest: +SKIP
        >>> found.posterior.evidence({"age": 0.0}).probability  # doctest: +SKIP
    """

    posterior: Posterior
    model: RegressionModel

    def __init__(self, text: str, posterior: Posterior, model: RegressionModel) -> None:
        self._text, self.posterior, self.model = text, posterior, model

    def table(self, prob: float = 0.9, groups: bool = False) -> list[dict[str, Any]]:
        """Returns a row for each coefficient, as for ``pandas.DataFrame``.

        The intercept is the predictor where all numbers are 0 and all categories the first ones.
        Other coefficients are for one unit of the variable.

        Args:
            prob: Mass of the intervals.
            groups: Whether effects of single categories of groups are rows too.
        """
        draws = {n: np.asarray(x, np.float64) for n, x in
                 self.posterior.sample(jax.random.key(0), _DRAWS).items()}  # fmt: skip
        formula = self.model.formula
        named = {frozenset(f.label for f in c.factors): c.label for c in formula.columns}
        found = {"Intercept": draws[_MIDDLE]} if _MIDDLE in draws else {}
        found |= {column.label: np.zeros(_DRAWS) for column in formula.columns}
        named[frozenset()] = "Intercept"
        for column in formula.columns:
            for labels, part in column.expanded.items():
                if (term := named[labels]) in found:
                    found[term] = found[term] + part * draws[column.label]
        for group in formula.groups if groups else ():
            for site in group.sites:
                each = zip(formula.codebook[group.by], draws[site].T, strict=True)
                found |= {f"{site}={category}": values for category, values in each}
        ratio, summary = self.model.family.ratio, self.posterior.summary()
        rows = []
        for term, values in found.items():
            lower, upper = interval(values, prob)
            row = {"term": term, "estimate": float(np.mean(values)), "sd": float(np.std(values)),
                   "lower": float(lower), "upper": float(upper)}  # fmt: skip
            if ratio and term != "Intercept":
                with np.errstate(over="ignore"):
                    ends = np.exp([row["estimate"], lower, upper]).tolist()
                names = ratio, f"{ratio}, lower", f"{ratio}, upper"
                row |= dict(zip(names, ends, strict=True))
            row["positive"] = float(np.mean(values > 0))
            # A term that others moved has no prior of its own.
            if term in summary and np.array_equal(values, draws[term]):
                row["prior_share"] = float(summary[term]["prior_share"])
            rows.append(row)
        return rows

    def __str__(self) -> str:
        """The formula, a line for each coefficient, other latents, and the posterior's verdict."""
        family, rows = self.model.family, self.table()
        ratio = [family.ratio] * bool(family.ratio)
        lines = [["", "estimate", "90 % interval", *ratio, "P(> 0)", "share of the prior"]]
        for row in rows:
            digits = max(0, 2 - math.floor(math.log10(max(row["sd"], 1e-12))))
            value, low, high = (f"{row[key]:.{digits}f}" for key in ("estimate", "lower", "upper"))
            ratios = [f"{row[name]:.3g}" if name in row else "" for name in ratio]
            share = f"{row['prior_share']:.2f}" if "prior_share" in row else ""
            lines.append([row["term"], value, f"{low} to {high}", *ratios,
                          f"{row['positive']:.2f}", share])  # fmt: skip
        summary = self.posterior.summary()
        shown = {_MIDDLE, *(row["term"] for row in rows)}
        shown |= {site for group in self.model.formula.groups for site in group.sites}
        also = [
            f"{entry_name(name, index)} {own['mean'][index]:.3g} ({own['lower'][index]:.3g} to "
            f"{own['upper'][index]:.3g})"
            for name, own in summary.items() if name not in shown
            for index in np.ndindex(np.shape(own["mean"]))
        ]  # fmt: skip
        spent, *_, verdict = str(self.posterior).splitlines()
        text = [f"{self._text}, {family.link} link", *table_lines(lines)]
        text += ["Also: " + ", ".join(also)] * bool(also)
        return "\n".join(map(str.rstrip, [*text, spent.split(", ", 1)[1], verdict]))

    __repr__ = __str__

    def predict(
        self, frame: Any, rng_key: Array | None = None, num_samples: int = 1000
    ) -> np.ndarray:
        """Draws outcomes for the rows of a frame, shape (num_samples, rows).

        Levels and categories are numbers from 0, in the order of the codebook. Times are not
        censored.

        Args:
            frame: A frame or dict with the columns of the right side.
            rng_key: Key of the draws.
            num_samples: Number of draws.

        Guarantee:
            You may publish predictions for public rows, not for the private records.
        """
        key = jax.random.key(0) if rng_key is None else rng_key
        given = self.model.arguments(frame, outcome=False)
        draws = self.posterior.predict(key, **given, num_samples=num_samples)["y"]
        middle, half = self.model.location
        return np.asarray(draws) * (half if half != 1 else 1) + (middle if middle else 0)

    def effects(self, name: str, prob: float = 0.9) -> dict[str, np.ndarray]:
        """Returns the expected outcome along one variable, the others in the middle of the range.

        Categories of other variables are the first ones, and group effects are 0. For trials it is
        the share of successes.

        Args:
            name: The variable.
            prob: Mass of the intervals.

        Returns:
            ``{"value", "mean", "lower", "upper"}``: values of the variable, and the expectation.
        """
        formula, codebook = self.model.formula, self.model.formula.codebook
        check_in("name", name, formula.variables)
        public = codebook[name]
        values = public if isinstance(public, list) else np.linspace(public[0], public[1], _POINTS)
        frame: dict[str, Any] = {}
        wanted = (*formula.variables, *(g.by for g in formula.groups), self.model.offset)
        if self.model.family.outcome == "trials":
            wanted = (*wanted, formula.outcome[1])
        for other in filter(None, wanted):
            of = codebook[other]
            one = of[0] if isinstance(of, list) else sum(of) / 2
            frame[other] = np.array(values if other == name else [one] * len(values))
        given = self.model.arguments(frame, outcome=False)
        draws = self.posterior.sample(jax.random.key(0), _EFFECT_DRAWS)
        zeros = {site for group in formula.groups for site in group.sites}

        def expected(draw: dict[str, Array]) -> Array:
            latents = {n: jnp.zeros_like(x) if n in zeros else x for n, x in draw.items()}
            seeded = handlers.seed(handlers.substitute(self.model, latents), jax.random.key(0))
            fn = handlers.trace(seeded).get_trace(**given)["y"]["fn"]
            if self.model.family.outcome == "levels":
                return fn.probs @ jnp.arange(fn.probs.shape[-1])
            return fn.mean / given["other"] if "other" in given else fn.mean

        middle, half = self.model.location
        means = middle + half * np.asarray(jax.vmap(expected)(draws))
        tail = (1 - prob) / 2
        lower, upper = np.quantile(means, [tail, 1 - tail], axis=0)
        return {"value": np.array(values), "mean": means.mean(0), "lower": lower, "upper": upper}

    def statement(self) -> Statement:
        """Returns the privacy statement."""
        privacy = self.posterior.privacy
        return privacy if isinstance(privacy, Statement) else privacy.statement()


def regression(
    formula: str,
    frame: Any,
    codebook: Codebook,
    *,
    family: str = "normal",
    epsilon: float | None = None,
    delta: float | None = None,
    budget: PrivacyBudget | None = None,
    offset: str = "",
    unit: str | None = None,
    max_rows_per_unit: int | None = None,
    robust: bool = False,
    rng_key: Array | None = None,
    progress_bar: bool = True,
) -> Regression:
    """Fits a regression that a formula describes, and returns private coefficients by name.

    The codebook says what is public: the range of each number and the categories of each text.
    Numbers outside their range are moved to its ends. So neither levels nor scales nor knots come
    from the records. A record with a missing value counts as 0.

    Args:
        formula: Such as ``"visits ~ age * sex + bs(income, knots=[2, 5]) + (1 | region)"``. Group
            effects are independent: ``(1 + age || region)``. Survival: ``"Surv(time, event) ~ x"``,
            with 1 or the second category for an event. Binomial:
            ``"cbind(successes, trials) ~ x"``.
        frame: A frame of pandas, Polars or PyArrow, or a dict of arrays.
        codebook: For each column a tuple ``(low, high)`` or a list of categories. Take it from the
            plan of the study, not from the records.
        family: One of ``"normal"``, ``"student"`` (4 degrees of freedom), ``"bernoulli"``,
            ``"binomial"``, ``"poisson"``, ``"negative binomial"``, ``"gamma"``, ``"beta"``,
            ``"weibull"``, ``"lognormal"`` and ``"ordinal"``.
        epsilon: Privacy to spend, as for :func:`~numpyro_dp.fit`.
        delta: As for ``fit``.
        budget: As for ``fit``.
        offset: Column that is added to the predictor.
        unit: Column of ids, if a person has several rows.
        max_rows_per_unit: Most rows of a person that are used.
        robust: As for ``fit``.
        rng_key: Key of draws from the posterior, not of noise. By default a fixed one.
        progress_bar: As for ``fit``.

    Priors: a coefficient has a normal prior around 0, with a standard deviation of 4 (logit
    links) or 3 (logarithms) when its variable goes through half of its range. Few records use all
    of a range, so this is weak. For ``"normal"`` and ``"student"`` it is 2, and the outcome counts
    in halves of its range too. ``fit.model`` is the NumPyro model.

    Raises:
        ImportError: If formulaic is not installed.
        ValueError, TypeError: If the formula, the codebook or the family do not fit.

    Example:
        >>> import numpy as np
        >>> from numpyro_dp import regression
        >>> rng = np.random.default_rng(0)
        >>> frame = {"age": rng.uniform(20, 80, 4000), "sex": rng.choice(["f", "m"], 4000)}
        >>> logit = 0.05 * (frame["age"] - 50) + 0.7 * (frame["sex"] == "m")
        >>> frame["ill"] = (rng.random(4000) < 1 / (1 + np.exp(-logit))).astype(int)
        >>> codebook = {"age": (18, 90), "sex": ["f", "m"], "ill": (0, 1)}
        >>> found = regression("ill ~ age + sex", frame, codebook, family="bernoulli", epsilon=1.0,
        ...                    progress_bar=False)
        >>> [row["term"] for row in found.table()]
        ['Intercept', 'age', 'sex=m']
        >>> bool(0.03 < found.table()[1]["estimate"] < 0.07)
        True

    Guarantee:
        That of :func:`~numpyro_dp.fit`: names, ranges and categories come from the formula and the
        codebook, which are public. The matrix has one row for each record, and depends on it alone.
    """
    check_in("family", family, tuple(FAMILIES))
    if not isinstance(codebook, Mapping):
        raise TypeError(
            f"Expected codebook as a dict by column, got {type(codebook).__name__}. Write "
            '{"age": (18, 90), "sex": ["f", "m"]}.'
        )
    key = repr((formula, sorted(codebook.items(), key=str), family, offset))
    model = _kept.pop(key, None) or _model(formula, codebook, family, offset)
    _kept[key] = model
    while len(_kept) > _MOST_KEPT:
        _kept.popitem(last=False)
    given: dict[str, Any] = model.arguments(frame)
    if unit is not None:
        try:
            given["unit"] = frame[unit]
        except (KeyError, ValueError) as error:
            raise ValueError(f"The frame has no column {unit!r}, as unit= says.") from error
    posterior = fit(
        model, epsilon=epsilon, delta=delta, budget=budget, robust=robust,
        rng_key=jax.random.key(0) if rng_key is None else rng_key, progress_bar=progress_bar,
        max_rows_per_unit=max_rows_per_unit, **given,
    )  # fmt: skip
    names = {site: codebook[g.by] for g in model.formula.groups for site in g.sites}
    return Regression(formula, posterior.named(**names), model)


def _model(formula: str, codebook: Codebook, family: str, offset: str) -> RegressionModel:
    found = RegressionModel(read_formula(formula, dict(codebook)), FAMILIES[family], offset)
    _check_outcome(found, family)
    if offset and not isinstance(codebook.get(offset), tuple):
        raise ValueError(f"The codebook has no range for the offset {offset!r}.")
    return found


def _check_outcome(model: RegressionModel, family: str) -> None:
    """Raises ValueError if the left side does not fit the family."""
    outcome = model.formula.outcome
    name = outcome[0]
    public: Any = model.formula.codebook[name]
    kind = model.family.outcome
    call = model.formula.call
    wanted = {"trials": ("cbind",), "time": ("", "Surv")}.get(kind, ("",))
    if call not in wanted:
        sides = {"": "a column", "cbind": "cbind(successes, trials)", "Surv": "Surv(time, event)"}
        raise ValueError(
            f"Expected {' or '.join(sides[each] for each in wanted)} on the left of a {family!r} "
            f"formula, got {sides[call]}."
        )
    if call == "Surv":
        event: Any = model.formula.codebook[outcome[1]]
        if event != (0, 1) and not (isinstance(event, list) and len(event) == 2):
            raise ValueError(
                f"Expected the event {outcome[1]!r} as (0, 1), or as a list of two categories of "
                f"which the second is the event, in the codebook, got {event!r}."
            )
    levels = isinstance(public, list)
    described = {
        "two": "(0, 1), or a list of two categories", "levels": "a list of three or more levels",
        "number": "a range", "positive": "a range from 0", "share": "the range (0, 1)",
        "count": "a range from 0", "time": "a range from 0", "trials": "a range from 0",
    }[kind]  # fmt: skip
    fits = {
        "two": public == (0, 1) or (levels and len(public) == 2),
        "levels": levels and len(public) > 2, "number": not levels,
        "share": not levels and min(public) >= 0 and max(public) <= 1,
    }.get(kind, not levels and min(public) >= 0)  # fmt: skip
    if not fits:
        raise ValueError(
            f"Expected the outcome {name!r} of a {family!r} regression with {described} in the "
            f"codebook, got {public!r}."
        )
