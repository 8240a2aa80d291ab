r"""Formulas as columns of a matrix, by a codebook alone.

The parser is formulaic's. It reads the text and no record. Each factor of a term becomes columns by
what the codebook says:

- a number with a range (low, high): the number, moved into it, over half of its length.
- a list of categories: zeros and ones for each but the first. In ``a:b`` without ``a`` it is each,
  because the term would otherwise lose a direction.
- ``bs(name, knots=[...], degree=3)``: the B-splines of the range, without the first.
- arithmetic of one number, such as ``log(age)`` or ``I(age**2)``.

A term is the product of its factors. Its public centre, the product of the middles, is subtracted,
because columns far from 0 go along with the intercept.
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

from numpyro_dp.model.frames import design

Codebook = Mapping[str, Any]
_GROUP = re.compile(r"\+?\s*\(([^()|]*?)(\|\|?)\s*([A-Za-z_]\w*)\s*\)")
_FUNCTIONS = {"log": np.log, "log1p": np.log1p, "exp": np.exp, "sqrt": np.sqrt, "abs": np.abs}
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
    """

    label: str
    name: str
    values: Callable[[Mapping[str, np.ndarray]], np.ndarray]
    centre: float
    unit: float


class Column(NamedTuple):
    """A column of the matrix: a product of factors, minus a public centre."""

    factors: tuple[Factor, ...]

    @property
    def label(self) -> str:
        """Name of the coefficient."""
        return ":".join(each.label for each in self.factors)

    @property
    def centre(self) -> float:
        """What is subtracted."""
        return math.prod(each.centre for each in self.factors)

    @property
    def unit(self) -> float:
        """How much of the column a unit of each of its variables is."""
        return math.prod(each.unit for each in self.factors)

    def values(self, base: Mapping[str, np.ndarray]) -> np.ndarray:
        """The column of a data set."""
        factors = [each.values(base) for each in self.factors]
        return np.prod(factors, axis=0) - self.centre


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
        columns: Columns of the matrix, without the intercept.
        groups: Group effects.
        codebook: What is public about each column that occurs.
    """

    outcome: tuple[str, ...]
    columns: tuple[Column, ...]
    groups: tuple[Group, ...]
    codebook: Codebook

    def arrays(self, frame: Any, names: Iterable[str]) -> dict[str, np.ndarray]:
        """Base columns of a data set: by range in [-1, 1], by category as zeros and ones."""
        public = {name: self.codebook[name] for name in names}
        matrix, found = design(frame, public, intercept=False) if public else (np.zeros((0, 0)), ())
        return dict(zip(found, np.asarray(matrix, np.float64).T, strict=True))

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
        from formulaic.errors import FormulaSyntaxError
    except ImportError as error:
        raise ImportError(
            "Formulas need formulaic. Install numpyro-dp[formula], or write the NumPyro model and "
            "call fit."
        ) from error
    if not isinstance(text, str) or text.count("~") != 1:
        raise ValueError(f"Expected a formula such as 'y ~ age + sex', got {text!r}.")
    left, right = text.split("~")
    groups = [match.groups() for match in _GROUP.finditer(right)]
    plain = _GROUP.sub("", right).strip().lstrip("+").strip() or "1"

    def terms_of(side: str) -> list[tuple[str, ...]]:
        try:
            parsed: Any = Parser.from_spec(side)
            return [tuple(str(f.expr) for f in term.factors) for term in parsed]
        except (FormulaSyntaxError, AttributeError, TypeError) as error:
            raise ValueError(f"{side.strip()!r} is not a formula: {error}.") from error

    if "|" in plain:
        raise ValueError(
            f"Expected group effects as (1 | region) or (1 + x || region), got {plain!r}."
        )
    terms = terms_of(plain)
    if ("1",) not in terms:
        raise ValueError(
            "A formula without an intercept is not supported: columns are centred at the middle of "
            "their ranges. Leave out '- 1' and '+ 0'."
        )
    columns = _columns([term for term in terms if term != ("1",)], codebook)
    outcome = _outcome(left.strip(), codebook)
    found = []
    for side, bar, by in groups:
        if not isinstance(codebook.get(by), list):
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
    return Formula(outcome, tuple(columns), tuple(found), codebook)


def _outcome(left: str, codebook: Codebook) -> tuple[str, ...]:
    call = re.fullmatch(r"(?:Surv|cbind|p)\(\s*(\w+)\s*,\s*(\w+)\s*\)", left)
    names = call.groups() if call else (left,)
    _check_known(names, codebook)
    return names


def _check_known(names: Iterable[str], codebook: Codebook) -> None:
    if missing := sorted(set(names) - set(codebook)):
        raise ValueError(
            f"The codebook says nothing about {missing}. Give a range (low, high) for numbers, and "
            "a list for categories. They are public, so do not take them from the records."
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
        columns += [Column(product) for product in itertools.product(*factors)]
    return columns


def _factors(text: str, full: bool, codebook: Codebook) -> list[Factor]:
    """The columns of one factor of a term."""
    tree = ast.parse(text.strip("{}"), mode="eval").body
    called = getattr(getattr(tree, "func", None), "id", None)
    if called in _READS_RECORDS:
        raise ValueError(
            f"{text} would take {_READS_RECORDS[called]} from the records. Numbers are scaled by "
            "their range in the codebook already. For curves write bs(x, knots=[...])."
        )
    if called in ("C", "I") and isinstance(tree, ast.Call) and len(tree.args) == 1:
        tree = tree.args[0]
        called = getattr(getattr(tree, "func", None), "id", None)
    names = sorted({
        node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id not in
        (*_FUNCTIONS, "bs")
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
        ast.BinOp, ast.UnaryOp, ast.Name, ast.Load, ast.Constant, ast.Call, ast.operator,
        ast.unaryop,
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
    knots = np.asarray(ast.literal_eval(given["knots"]), float)
    degree = ast.literal_eval(given["degree"]) if "degree" in given else 3
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
