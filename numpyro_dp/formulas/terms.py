r"""Formulas as columns of a matrix, by a codebook alone.

The parser is formulaic's. It reads the text and no record. Each factor of a term becomes columns by
what the codebook says:

- a number with a range (low, high): the number, moved into it, over half of its length.
- a list of categories: zeros and ones for each but the first. In ``a:b`` without ``a`` it is each,
  because the term would otherwise lose a direction.
- ``bs(name, knots=[...], degree=3)``: the B-splines of the range, without the first.
- arithmetic of one number, such as ``log(age)`` or ``I(age**2)``.

A term is the product of its factors. Each factor is centred at its public middle, because columns
far from 0 go along with the intercept. A curve of a number, such as ``I(age**2)`` beside ``age``,
becomes what is left of it next to the terms of that number before it. Otherwise noise would hide
the difference between the two. Coefficients are moved back afterwards.
"""

from __future__ import annotations

import ast
import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
from scipy.interpolate import BSpline

from numpyro_dp.model.frames import read_columns

Codebook = Mapping[str, Any]
_GROUP = re.compile(r"(^|\+)\s*\(((?:[^()|]|\([^()]*\))*?)(\|\|?)\s*([A-Za-z_]\w*)\s*\)")
_FUNCTIONS = {"log": np.log, "log1p": np.log1p, "exp": np.exp, "sqrt": np.sqrt, "abs": np.abs}
OWN_SITES = {"middle", "sigma", "shape", "precision", "thresholds", "y", "records"}
_ALIKE = 1e-4  # smallest part of a curve that may be left
_GRID = 201  # public points of a range, from which sizes and centres of curves are taken
_READS_RECORDS = {
    "scale": "the standard deviation", "center": "the mean", "standardize": "the mean",
    "poly": "all values", "cr": "quantiles", "cc": "quantiles", "ns": "quantiles",
}  # fmt: skip


class Factor(NamedTuple):
    """A column of one variable.

    Attributes:
        label: How it is called.
        name: The variable.
        values: The base columns of the data set -> the column.
        centre: A public middle of it.
        unit: One unit of the variable is this much of the column.
        moved: How much of other terms a unit of this one takes away, by the label of their factor.
    """

    label: str
    name: str
    values: Callable[[Mapping[str, np.ndarray]], np.ndarray]
    centre: float
    unit: float
    moved: tuple[tuple[str, float], ...] = ()


class Column(NamedTuple):
    """A column of the matrix: a product of factors.

    Attributes:
        factors: The factors.
        centred: Whether each factor is centred. It is if the formula has all terms that this adds.
            A product of factors far from 0 would go along with one of them.
    """

    factors: tuple[Factor, ...]
    centred: tuple[bool, ...]

    @property
    def label(self) -> str:
        """Name of the coefficient."""
        return ":".join(each.label for each in self.factors)

    @property
    def unit(self) -> float:
        """How much of the column a unit of each of its variables is."""
        return math.prod(each.unit for each in self.factors)

    @property
    def _constant(self) -> float:
        return 0.0 if any(self.centred) else math.prod(each.centre for each in self.factors)

    def values(self, base: Mapping[str, np.ndarray]) -> np.ndarray:
        """The column of a data set."""
        pairs = zip(self.factors, self.centred, strict=True)
        factors = [each.values(base) - each.centre * centred for each, centred in pairs]
        return np.prod(factors, axis=0) - self._constant

    @property
    def expanded(self) -> dict[frozenset[str], float]:
        """The terms of variables that are not centred: how much of each, for one unit of its own.

        A term is given by the labels of its factors. The empty one is the intercept.
        """
        found = {frozenset[str](): -self._constant / self.unit}
        places = [place for place, centred in enumerate(self.centred) if centred]
        for number in range(len(places) + 1):
            for left in itertools.combinations(places, number):
                kept = [f for place, f in enumerate(self.factors) if place not in left]
                moved = math.prod(-self.factors[place].centre for place in left)
                part = moved * math.prod(f.unit for f in kept) / self.unit
                labels = frozenset(f.label for f in kept)
                found[labels] = found.get(labels, 0.0) + part
        if len(self.factors) == 1:
            found |= {frozenset([label]): -part for label, part in self.factors[0].moved}
        return found


class Group(NamedTuple):
    """Effects that differ by the category of a column.

    Attributes:
        by: The column.
        columns: The columns whose coefficients differ. ``None`` is the intercept.
    """

    by: str
    columns: tuple[Column | None, ...]

    @property
    def sites(self) -> list[str]:
        """A name for the effects of each column, such as ``1|region``."""
        return [f"{'1' if column is None else column.label}|{self.by}" for column in self.columns]


class Formula(NamedTuple):
    """A formula and the codebook it was read with.

    Attributes:
        outcome: The left side: a column, or two (time and event, successes and trials).
        call: ``"Surv"`` or ``"cbind"`` if it has two, else "".
        columns: Columns of the matrix, without the intercept.
        groups: Group effects.
        codebook: What is public about each column that occurs.
    """

    outcome: tuple[str, ...]
    call: str
    columns: tuple[Column, ...]
    groups: tuple[Group, ...]
    codebook: Codebook

    def arrays(self, frame: Any, names: Iterable[str]) -> dict[str, np.ndarray]:
        """Base columns of a data set: by range in [-1, 1], by category as zeros and ones."""
        public = {name: self.codebook[name] for name in names}
        return read_columns(frame, public) if public else {}

    @property
    def variables(self) -> tuple[str, ...]:
        """The columns of a frame on the right side, without those of groups."""
        every = (*self.columns, *(c for g in self.groups for c in g.columns if c is not None))
        return tuple({factor.name: None for column in every for factor in column.factors})

    def codes(self, frame: Any, by: str) -> np.ndarray:
        """The number of the category of each record, and -1 where it is missing."""
        base = self.arrays(frame, [by])
        indicators = np.column_stack(list(base.values()))
        number = indicators @ np.arange(1, indicators.shape[1] + 1)
        return np.where(np.isnan(number), -1, np.nan_to_num(number)).astype(np.int32)


def read_formula(text: str, codebook: Codebook) -> Formula:
    """Reads a formula. No record is read.

    Raises:
        ImportError: If formulaic is not installed.
        ValueError: If the formula has columns that the codebook has not, or functions that read
            records.
    """
    try:
        from formulaic import Formula as Parser
    except ImportError as error:
        raise ImportError(
            "Formulas need formulaic. Install numpyro-dp[formula], or write the NumPyro model and "
            "call fit."
        ) from error
    if not isinstance(text, str) or text.count("~") != 1:
        raise ValueError(f"Expected a formula such as 'y ~ age + sex', got {text!r}.")
    left, right = text.split("~")
    groups = [match.groups()[1:] for match in _GROUP.finditer(right)]
    plain = _GROUP.sub("", right).strip().lstrip("+").strip() or "1"
    if power := re.search(r"\w+\s*(\*\*|\^)\s*\d", re.sub(r"[A-Za-z_]\w*\([^()]*\)", "", plain)):
        raise ValueError(
            f"{power[0]!r} is the variable itself in a formula. Write I(x**2) for a square, and "
            "(a + b)**2 for interactions."
        )

    def terms_of(side: str) -> list[tuple[str, ...]]:
        try:
            parsed: Any = Parser.from_spec(side)
            found = [tuple(str(f.expr).strip("`") for f in term.factors) for term in parsed]
        except Exception as error:  # of the parser, which has several kinds
            told = re.sub(r"\x1b\[[0-9;]*m", "", str(error)).split("\n")[0]
            raise ValueError(f"{side.strip()!r} is not a formula: {told}") from error
        return [tuple(_plain(each, codebook) for each in term) for term in found]

    if "|" in plain:
        raise ValueError(
            f"Expected group effects as '+ (1 | region)' or '+ (1 + x || region)', got {plain!r}."
        )
    terms = terms_of(plain)
    if ("1",) not in terms:
        raise ValueError(
            "A formula without an intercept is not supported: columns are centred at the middle of "
            "their ranges. Leave out '- 1' and '+ 0'."
        )
    columns = _columns([term for term in terms if term != ("1",)], codebook)
    outcome, call = _outcome(left.strip(), codebook)
    found = []
    for side, bar, by in groups:
        _check_known([by], codebook)
        if not isinstance(codebook[by], list):
            raise ValueError(f"The codebook has no list of categories for the group {by!r}.")
        inner = terms_of(side.strip() or "1")
        slopes = _columns([term for term in inner if term != ("1",)], codebook)
        if slopes and bar == "|":
            raise ValueError(
                f"({side.strip()} | {by}) has correlated effects, which are not supported. Write "
                f"({side.strip()} || {by}) for independent ones."
            )
        first = (None,) * (("1",) in inner)
        found.append(Group(by, (*first, *slopes)))
    read = Formula(outcome, call, tuple(columns), tuple(found), codebook)
    if both := sorted(set(outcome) & set(read.variables)):
        raise ValueError(f"{both} cannot be the outcome and explain it.")
    names = [c.label for c in columns] + [site for group in found for site in group.sites]
    if twice := sorted({name for name in names if names.count(name) > 1 or name in OWN_SITES}):
        raise ValueError(
            f"The names {twice} stand for several coefficients, or for parts of the model. Leave "
            f"out what is double, and give variables other names than {sorted(OWN_SITES)}."
        )
    return read


def _plain(text: str, codebook: Codebook) -> str:
    """A factor without ``C( )``, which is needed for categories in other languages."""
    inner = re.fullmatch(r"C\(\s*(\w+)\s*\)", text)
    if inner is None:
        return text
    _check_known([inner[1]], codebook)
    if not isinstance(codebook[inner[1]], list):
        raise ValueError(f"{text} needs a list of categories of {inner[1]!r} in the codebook.")
    return inner[1]


def _outcome(left: str, codebook: Codebook) -> tuple[tuple[str, ...], str]:
    call = re.fullmatch(r"(Surv|cbind)\(\s*(\w+)\s*,\s*(\w+)\s*\)", left)
    names = call.groups()[1:] if call else (left.strip("`"),)
    if call is None and left not in codebook and "(" in left:
        raise ValueError(
            f"Expected a column, Surv(time, event) or cbind(successes, trials) on the left, got "
            f"{left!r}. Transform the outcome before the run."
        )
    _check_known(names, codebook)
    return names, call[1] if call else ""


def _check_known(names: Iterable[str], codebook: Codebook) -> None:
    if missing := sorted(set(names) - set(codebook)):
        raise ValueError(
            f"The codebook says nothing about {missing}. Give a range (low, high) for numbers, and "
            "a list for categories. They are public, so do not take them from the records."
        )
    for name in names:
        public: Any = codebook[name]
        if isinstance(public, list):
            fits = len(set(public)) == len(public) > 1
        else:
            fits = isinstance(public, tuple) and len(public) == 2
            fits = fits and all(isinstance(x, int | float | np.number) for x in public)
            fits = fits and math.isfinite(public[1] - public[0]) and public[0] < public[1]
        if not fits:
            raise ValueError(
                f"Expected (low, high) or a list of two or more categories for {name!r} in the "
                f"codebook, got {public!r}."
            )


def _columns(terms: list[tuple[str, ...]], codebook: Codebook) -> list[Column]:
    """The columns of all terms."""
    known = {frozenset(term) for term in terms} | {frozenset()}
    columns = []
    for term in terms:
        # A term that has no margin without a factor needs all categories of this factor.
        full = [
            frozenset(term) - {expr} not in known and isinstance(codebook.get(expr), list)
            for expr in term
        ]
        if sum(full) > 1:
            raise ValueError(
                f"{':'.join(term)} needs the effects of its variables: write {' * '.join(term)}."
            )
        factors = [_factors(*pair, codebook) for pair in zip(term, full, strict=True)]
        centred: list[str] = []
        for expr in () if any(full) else term:
            subsets = (
                each for number in range(len(centred) + 1)
                for each in itertools.combinations(centred, number)
            )  # fmt: skip
            if all(frozenset(term) - {expr, *each} in known for each in subsets):
                centred.append(expr)
        mask = tuple(expr in centred for expr in term)
        columns += [Column(product, mask) for product in itertools.product(*factors)]
    return _without_shared_parts(columns, codebook)


def _without_shared_parts(columns: list[Column], codebook: Codebook) -> list[Column]:
    """The columns, with each curve of a number in place of what is left of it next to others.

    The parts are those of least squares on the public range. The number itself comes first.
    """
    found, known = list(columns), dict[str, list[Factor]]()
    places = [
        place for place, column in enumerate(columns)
        if len(column.factors) == 1 and isinstance(codebook[column.factors[0].name], tuple)
        and not column.factors[0].label.startswith("bs(")
    ]  # fmt: skip
    for place in sorted(places, key=lambda n: columns[n].factors[0].name != columns[n].label):
        factor = columns[place].factors[0]
        others = known.setdefault(factor.name, [])
        if others:
            found[place] = Column((_left_of(factor, tuple(others)),), (True,))
        others.append(factor)
    return found


def _left_of(factor: Factor, others: tuple[Factor, ...]) -> Factor:
    """What is left of a factor next to others of its variable, over half of its length."""
    grid = [_on_grid(factor.name, each.values) for each in (factor, *others)]
    away = np.stack([each - each.mean() for each in grid[1:]], axis=1)
    parts = np.linalg.lstsq(away, grid[0] - grid[0].mean(), rcond=None)[0]
    left = grid[0] - np.stack(grid[1:], axis=1) @ parts
    half = float(np.ptp(left)) / 2
    if half < _ALIKE * np.ptp(grid[0]):
        raise ValueError(
            f"{factor.label} is nearly the same as {[each.label for each in others]} on the range "
            "in the codebook. Leave it out."
        )

    def values(base: Mapping[str, np.ndarray]) -> np.ndarray:
        taken = (part * each.values(base) for part, each in zip(parts, others, strict=True))
        return (factor.values(base) - sum(taken)) / half

    moved = tuple((each.label, float(part * each.unit / factor.unit))
                  for each, part in zip(others, parts, strict=True))  # fmt: skip
    centre, unit = float(left.mean()) / half, factor.unit / half
    return Factor(factor.label, factor.name, values, centre, unit, moved)


def _factors(text: str, full: bool, codebook: Codebook) -> list[Factor]:
    """The columns of one factor of a term."""
    tree: Any = ast.fix_missing_locations(ast.Name(text, ast.Load()))
    if text not in codebook:
        try:
            tree = ast.parse(text.strip("{}"), mode="eval").body
        except SyntaxError as error:
            _check_known([text], codebook)
            raise ValueError(f"{text!r} is no arithmetic of a column.") from error
    called = getattr(getattr(tree, "func", None), "id", None)
    if called in _READS_RECORDS:
        raise ValueError(
            f"{text} would take {_READS_RECORDS[called]} from the records. Numbers are scaled by "
            "their range in the codebook already. For curves write bs(x, knots=[...])."
        )
    if called == "offset":
        raise ValueError("Pass the column of an offset as offset=, not in the formula.")
    if called == "I" and len(tree.args) == 1:
        tree = tree.args[0]
        called = getattr(getattr(tree, "func", None), "id", None)
    calls = {getattr(n.func, "id", "") for n in ast.walk(tree) if isinstance(n, ast.Call)}
    if unknown := sorted(calls - {*_FUNCTIONS, "bs"}):
        raise ValueError(
            f"{text} has {unknown}, which is not supported in a formula. Use + - * / **, "
            f"{sorted(_FUNCTIONS)} and bs(x, knots=[...]), or make the column before the run."
        )
    names = sorted({
        node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id not in calls
    })  # fmt: skip
    _check_known(names, codebook)
    if len(names) != 1:
        raise ValueError(f"Expected one column in {text!r}, got {names}. Make it before the run.")
    (name,) = names
    public = codebook[name]
    if isinstance(public, list):
        if not isinstance(tree, ast.Name):
            raise ValueError(f"{text} is no number: the codebook has categories for {name!r}.")
        return _indicators(name, public, full)
    if called == "bs":
        return _splines(text, tree, name, public)
    return [_number(text if not isinstance(tree, ast.Name) else name, tree, name, public)]


def _indicators(name: str, categories: list[Any], full: bool) -> list[Factor]:
    others = [f"{name}={category}" for category in categories[1:]]

    def first(base: Mapping[str, np.ndarray]) -> np.ndarray:
        return 1 - np.sum([base[other] for other in others], axis=0)

    centre = 1 / len(categories)
    found = [Factor(o, name, lambda base, o=o: base[o], centre, 1.0) for o in others]
    return [Factor(f"{name}={categories[0]}", name, first, centre, 1.0)] * full + found


def _values(name: str, public: tuple[float, float]) -> Callable[[Mapping[str, Any]], np.ndarray]:
    """The number itself, inside of its range."""
    low, high = public
    return lambda base: (low + high) / 2 + (high - low) / 2 * base[name]


def _on_grid(name: str, values: Callable[[Mapping[str, Any]], np.ndarray]) -> np.ndarray:
    return np.asarray(values({name: np.linspace(-1, 1, _GRID)}))


def _number(text: str, tree: ast.expr, name: str, public: tuple[float, float]) -> Factor:
    """A number, or arithmetic of one."""
    raw = _values(name, public)
    compute = _compiled(text, tree, name)

    def values(base: Mapping[str, np.ndarray]) -> np.ndarray:
        return compute(raw(base))

    with np.errstate(all="ignore"):
        grid = _on_grid(name, values)
    if not np.all(np.isfinite(grid)) or np.ptp(grid) == 0:
        raise ValueError(f"{text} is constant or not finite on the range {public} of {name!r}.")
    half, middle = np.ptp(grid) / 2, (grid.max() + grid.min()) / 2
    return Factor(
        text, name, lambda base: values(base) / half, float(middle / half), float(1 / half)
    )


def _compiled(text: str, tree: ast.expr, name: str) -> Callable[[np.ndarray], np.ndarray]:
    """A function of one number, made of arithmetic and a few functions."""
    allowed = (
        ast.BinOp, ast.UnaryOp, ast.Name, ast.Load, ast.Constant, ast.Call, ast.Add, ast.Sub,
        ast.Mult, ast.Div, ast.Pow, ast.USub, ast.UAdd,
    )  # fmt: skip
    for node in ast.walk(tree):
        call = isinstance(node, ast.Call)
        number = not isinstance(node, ast.Constant) or isinstance(node.value, int | float)
        if not (isinstance(node, allowed) and number) or (
            call and (getattr(node.func, "id", None) not in _FUNCTIONS or node.keywords)
        ):
            raise ValueError(
                f"{text} is not supported in a formula. Use + - * / ** and {sorted(_FUNCTIONS)} of "
                "one column, or bs(x, knots=[...])."
            )
    code = compile(ast.Expression(tree), "formula", "eval")

    def compute(values: np.ndarray) -> np.ndarray:
        with np.errstate(all="ignore"):  # a missing value stays one
            return np.asarray(eval(code, {"__builtins__": {}, **_FUNCTIONS, name: values}))

    return compute


def _splines(text: str, tree: Any, name: str, public: tuple[float, float]) -> list[Factor]:
    """B-splines between public knots."""
    given = {each.arg: each.value for each in tree.keywords}
    if set(given) - {"knots", "degree"} or "knots" not in given or len(tree.args) != 1:
        raise ValueError(
            f"Expected bs({name}, knots=[...]), got {text}. Knots are public: df= would take them "
            "from the records."
        )
    try:
        knots = np.asarray(ast.literal_eval(given["knots"]), float)
        degree = ast.literal_eval(given["degree"]) if "degree" in given else 3
    except (ValueError, TypeError) as error:
        raise ValueError(f"Expected the knots of {text} as numbers, such as [2, 5].") from error
    if not isinstance(degree, int) or not 0 < degree < 6:
        raise ValueError(f"Expected degree= of {text} as a whole number from 1 to 5.")
    low, high = public
    if knots.ndim != 1 or not np.all((low < knots) & (knots < high)):
        raise ValueError(f"Expected knots of {name!r} inside its range {public}, got {knots}.")
    places = np.concatenate([[low] * (degree + 1), np.sort(knots), [high] * (degree + 1)])
    raw = _values(name, public)

    def splines(base: Mapping[str, np.ndarray]) -> np.ndarray:
        values = np.clip(raw(base), low, high)
        found = BSpline.design_matrix(np.nan_to_num(values, nan=low), places, degree).toarray()
        return np.where(np.isnan(values)[:, None], np.nan, found)

    means = splines({name: np.linspace(-1, 1, _GRID)}).mean(axis=0)
    return [
        Factor(
            f"bs({name})[{n}]", name, lambda base, n=n: splines(base)[:, n], float(means[n]), 1.0
        )
        for n in range(1, len(means))
    ]
