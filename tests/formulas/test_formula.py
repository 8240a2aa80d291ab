"""Formulas: the same columns as formulaic's, by the codebook alone, and no record read."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import pytest
from numpyro import handlers

from numpyro_dp import regression
from numpyro_dp.formulas.outcome_families import FAMILIES
from numpyro_dp.formulas.regression import RegressionModel
from numpyro_dp.formulas.terms import _FUNCTIONS, read_formula

CODEBOOK = {
    "y": (-3, 3), "a": (18, 90), "b": (0.5, 4), "s": ["f", "m"], "g": ["u", "v", "w"],
    "h": ["k", "l", "o", "p"], "n": (0, 50), "two": (0, 1), "level": ["low", "mid", "high"],
    "share": (0, 1), "time": (0, 10), "event": ["no", "yes"],
    "texts": ("f", "m"), "one": ["x"], "sigma": (0, 1), "trials": (0, 20), "off": (-1, 1),
}  # fmt: skip
FORMULAS = [
    "a", "a + b", "s", "g", "a + s", "a * s", "a:s", "a + a:s", "s + a:s", "a * b", "a:b", "s * g",
    "g + s:g", "a * s * g", "(a + b + s)**2", "a + I(a**2)", "log(b)", "I(log(b))",
    "sqrt(b) * s", "a + b + s + g + h", "a * g + b * s", "h:a", "a/s", "I(a / 10) + g",
    "exp(b / 4)", "a + b - b", "C(s)", "log1p(b):g + g", "a + I(a**2) + I(a**3)", "abs(a) * g",
]  # fmt: skip


@pytest.fixture(scope="module")
def frame():
    rng, number = np.random.default_rng(0), 60
    found = {name: rng.uniform(*public, number) if isinstance(public, tuple)
             else rng.choice(public, number) for name, public in CODEBOOK.items()
             if name != "texts"}  # fmt: skip
    found["n"], found["trials"] = rng.poisson(2.0, number), rng.integers(5, 20, number)
    found["two"] = rng.integers(0, 2, number)
    return found


def named(label):
    """A name of formulaic as ours."""
    plain = re.sub(r"C\((\w+)\)", r"\1", label)
    return re.sub(r"\[(?:T\.)?(\w+)\]", r"=\1", plain)


@pytest.mark.parametrize("text", FORMULAS)
def test_the_predictor_is_that_of_formulaic(text, frame):
    """With coefficients per unit of a variable, moved to where all variables are 0."""
    formulaic, pandas = pytest.importorskip("formulaic"), pytest.importorskip("pandas")
    model = RegressionModel(read_formula(f"y ~ {text}", CODEBOOK), FAMILIES["normal"])
    given = {n: x for n, x in model.arguments(frame).items() if n != "y"}
    levels = {n: pandas.Categorical(frame[n], public) if isinstance(public, list) else frame[n]
              for n, public in CODEBOOK.items() if n in frame}  # fmt: skip
    matrix = formulaic.model_matrix(text, pandas.DataFrame(levels), context=_FUNCTIONS)
    matrix.columns = [named(name) for name in matrix.columns]
    labels = [column.label for column in model.formula.columns]
    assert sorted(labels) == sorted(set(matrix.columns) - {"Intercept"})
    rng = np.random.default_rng(1)
    latents = {name: rng.normal() * c.unit for name, c in
               zip(labels, model.formula.columns, strict=True)}  # fmt: skip
    values = {n: jnp.float32(v) for n, v in (latents | {"middle": 0.3, "sigma": 1.0}).items()}
    fixed = handlers.seed(handlers.substitute(model, values), jax.random.key(0))
    middle, half = model.location
    eta = middle + half * handlers.trace(fixed).get_trace(**given)["y"]["fn"].loc
    raw = {frozenset(label.split(":")): label for label in labels}
    moved = dict.fromkeys(labels, 0.0)  # as the table moves the centre of variables back to 0
    constant = 0.3
    for column in model.formula.columns:
        for term, part in column.expanded.items():
            if term:
                moved[raw[term]] += part * latents[column.label]
            else:
                constant += part * latents[column.label]
    wanted = constant + sum(moved[name] * matrix[name].to_numpy() for name in labels)
    np.testing.assert_allclose(eta, wanted, atol=2e-4 * max(1, np.std(wanted)))


def test_a_curve_is_what_is_left_of_it_next_to_its_variable():
    """On a range far from 0, a number and its square are nearly the same column."""
    formula = read_formula("y ~ I(a**2) + s * a + log(a)", CODEBOOK)
    every = {"a": np.linspace(18, 90, 1000), "s": np.resize(["f", "m"], 1000)}
    base = formula.arrays(every, ["a", "s"])
    columns = {c.label: c.values(base) for c in formula.columns}
    curves = np.stack([columns[name] for name in ("a", "I(a ** 2)", "log(a)")])
    np.testing.assert_allclose(np.corrcoef(curves), np.eye(3), atol=0.02)
    np.testing.assert_allclose(np.ptp(curves, axis=1), 2, rtol=1e-2)
    with pytest.raises(ValueError, match="nearly the same as"):
        read_formula("y ~ a + I(2 * a)", CODEBOOK)


def test_splines_have_public_knots(frame):
    read = read_formula("y ~ bs(b, knots=[1, 2])", CODEBOOK)
    assert [c.label for c in read.columns] == [f"bs(b)[{n}]" for n in range(1, 6)]
    centres = [column.factors[0].centre for column in read.columns]
    base = read.arrays(frame, ["b"])
    values = np.column_stack([c.values(base) for c in read.columns]) + centres
    assert np.all(values >= -1e-6) and np.all(values.sum(1) <= 1 + 1e-6)
    ends = read.arrays({"b": np.array([0.5, 4.0, np.nan])}, ["b"])
    last = read.columns[-1].values(ends) + centres[-1]
    np.testing.assert_allclose(last[:2], [0, 1], atol=1e-6)
    assert np.isnan(last[2])


@pytest.mark.parametrize(("text", "says"), [
    ("y ~ scale(a)", "the standard deviation from the records"),
    ("y ~ center(a)", "the mean from the records"),
    ("y ~ poly(a, 2)", "from the records"),
    ("y ~ bs(a, df=4)", "Knots are public"),
    ("y ~ bs(a, knots=[200])", "inside its range"),
    ("y ~ a - 1", "without an intercept"),
    ("y ~ 0 + a", "without an intercept"),
    ("y ~ weight", "codebook says nothing about .'weight'."),
    ("z ~ a", "codebook says nothing about .'z'."),
    ("y ~ a + (a | g)", "Write .a .. g. for independent"),
    ("y ~ (1 | a)", "no list of categories"),
    ("y ~ a | g", "Expected group effects as"),
    ("y ~ log(s)", "is no number"),
    ("y ~ a**2", "Write I.x..2. for a square"),
    ("y ~ a^2", "for a square"),
    ("y ~ I(a^2)", "not supported"),
    ("y ~ C(a)", "needs a list"),
    ("y ~ y + a", "cannot be the outcome"),
    ("y ~ g + (1 | g) + (1 | g)", "stand for several"),
    ("y ~ bs(a, knots=[30]) + bs(a, knots=[40])", "stand for several"),
    ("y ~ bs(a, knots=[30], degree=1.5)", "whole number"),
    ("y ~ bs(a, knots=k)", "codebook says nothing|as numbers"),
    ("y ~ a (1 | g)", "Expected group effects"),
    ("y ~ offset(a)", "as offset="),
    ("y ~ log10(b)", "not supported"),
    ("log(y) ~ a", "Transform the outcome"),
    ("y ~ .", "is not a formula|codebook"),
    ("y ~ my var", "is not a formula"),
    ("y ~ texts", "Expected .low, high. or a list"),
    ("y ~ one", "Expected .low, high. or a list"),
    ("y ~ sigma", "stand for several"),
    ("y ~ I(a + b)", "Expected one column"),
    ("y ~ I(a.mean())", "not supported"),
    ("y ~ I(open('x'))", "not supported"),
    ("y ~ s:g", "write s . g"),
    ("y ~ I(__import__('os'))", "not supported"),
    ("y ~ log(off)", "constant or not finite"),
    ("y ~ a +", "is not a formula"),
    ("a + b", "Expected a formula"),
])  # fmt: skip
def test_hostile_formulas_are_refused(text, says):
    with pytest.raises(ValueError, match=says):
        read_formula(text, CODEBOOK)


@pytest.mark.parametrize(("left", "family", "says"), [
    ("y", "bernoulli", "a list of two categories"), ("s", "normal", "a range"),
    ("level", "bernoulli", "two categories"), ("y", "poisson", "a range from 0"),
    ("n", "beta", "the range"), ("s", "ordinal", "three or more levels"),
    ("n", "binomial", "cbind"), ("Surv(time, event)", "normal", "a column"),
    ("cbind(n, trials)", "weibull", "Surv"), ("Surv(time, n)", "weibull", "the event"),
    ("y", "cauchy", "family"),
])  # fmt: skip
def test_outcomes_must_fit_the_family(left, family, says, frame):
    with pytest.raises(ValueError, match=says):
        regression(f"{left} ~ a", frame, CODEBOOK, family=family, epsilon=1.0)


def test_frames_are_checked(frame):
    with pytest.raises(ValueError, match="none of its categories"):
        regression("y ~ s", frame | {"s": np.full(60, "x")}, CODEBOOK, epsilon=1.0)
    with pytest.raises(ValueError, match="no columns"):
        regression("y ~ a", {"y": frame["y"]}, CODEBOOK, epsilon=1.0)
    with pytest.raises(TypeError, match="Expected codebook as a dict"):
        regression("y ~ a", frame, ["a"], epsilon=1.0)


LEFT = {"bernoulli": "two", "binomial": "cbind(n, trials)", "poisson": "n", "gamma": "time",
        "negative binomial": "n", "beta": "share", "ordinal": "level", "normal": "y",
        "student": "y", "weibull": "Surv(time, event)", "lognormal": "time"}  # fmt: skip


@pytest.mark.parametrize("family", list(FAMILIES))
def test_a_missing_value_makes_a_record_drop_out(family, frame):
    """By a column of nan, an outcome of nan or -1, or a category of -1. All others stay."""
    model = RegressionModel(
        read_formula(f"{LEFT[family]} ~ a * s + (1 + b || g)", CODEBOOK), FAMILIES[family], "off"
    )
    holes = {name: np.array(values, object) for name, values in frame.items()}
    used = ["a", "s", "g", "b", "off", *model.formula.outcome[:1]]
    for place, name in enumerate(used):
        holes[name][place] = None
    given = model.arguments(holes)
    wrong = [np.isnan(np.column_stack([given["X"], given["offset"]])).any(axis=1),
             np.isnan(given["y"]) | (given["y"] < -0.5) & (family not in ("normal", "student")),
             given["codes"][:, 0] < 0]  # fmt: skip
    np.testing.assert_array_equal(np.any(wrong, axis=0), np.arange(60) < len(used))
    with numpyro.validation_enabled(False):
        whole = {name: values[len(used) :] for name, values in given.items()}
        trace = handlers.trace(handlers.seed(model, jax.random.key(0))).get_trace(**whole)
    assert np.all(np.isfinite(trace["y"]["fn"].log_prob(trace["y"]["value"])))
