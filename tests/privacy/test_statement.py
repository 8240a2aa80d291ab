"""Privacy statements: what they say, as text, JSON and HTML."""

import functools
import importlib.metadata
import json
import math
from xml.etree import ElementTree

import jax
import jax.numpy as jnp
import optax
import pytest
from flat import dpsvi
from models import mean_of
from numpyro.infer.autoguide import AutoDiagonalNormal
from scipy import stats

from numpyro_dp import DPLaplace, PrivacyBudget, __version__
from numpyro_dp.mechanisms import LossRelease
from numpyro_dp.privacy.statement import Statement, versions
from numpyro_dp.samplers import Poisson

KEY = jax.random.key(0)
X = jnp.ones(200)

model = mean_of(10, plate="patients <b>")


def svi(**options):
    options = {"budget": PrivacyBudget(1.0, 1e-5), "clip_norm": 2.0} | options
    driver = dpsvi(model, AutoDiagonalNormal, optax.adam(0.1), **options)
    return driver.run(KEY, 20, X, progress_bar=False)


@functools.cache
def of_laplace():
    return DPLaplace(model, budget=PrivacyBudget(1.0, 0.02)).run(KEY, X).privacy


@functools.cache
def of_batches():
    return svi(sampler=Poisson(0.1), secret_key=5, loss_release=LossRelease(8.0)).privacy


@functools.cache
def of_two():
    budget = PrivacyBudget(1.0, 1e-5)
    return svi(budget=budget.after(svi(budget=PrivacyBudget(0.5, 1e-5)).privacy)).privacy


@pytest.mark.full
@pytest.mark.table
@pytest.mark.parametrize("kind", [of_laplace, of_batches, of_two])
def test_a_statement_has_all_forms(kind):
    report = kind()
    statement, text = report.statement(), str(report)
    assert text == str(statement)
    for words in (
        f"epsilon <= {report.epsilon:.5g} at delta={report.delta:g} under add_or_remove_one",
        "One of 200 records: the indices of plate 'patients <b>'.",
        "one has one record more than the other",
        " = exp(epsilon), plus delta",
        f"{report.num_steps} steps of",
        f"by {report.accountant}.",
        report.date,
        f"jax {jax.__version__}",
    ):
        assert words in text, words
    assert ("delta > 1 / 200" in text) == (kind is of_laplace)
    assert ("Reproducible run" in text) == (kind is of_batches)
    assert ("loss curve is part of the release" in text) == (kind is of_batches)
    assert ("this run and the 1 earlier" in text) == (kind is of_two)
    found = json.loads(report.to_json(), parse_constant=pytest.fail)
    assert found["epsilon"] == report.epsilon
    assert Statement.from_json(report.to_json()) == statement
    assert "does not cover that" in text
    said = report.statement(settings="Chosen on the data of 2020.")
    assert "Settings: Chosen on the data of 2020." in str(said)
    with pytest.raises(TypeError, match="settings as a text"):
        report.statement(settings=None)


@pytest.mark.full
def test_html_is_a_table_without_scripts():
    result = svi()
    for shown in (result, result.privacy, result.posterior):
        page = shown._repr_html_().replace("<br>", "<br/>")
        root = ElementTree.fromstring(f"<p>{page}</p>")  # every tag is closed
        tags = {each.tag for each in root.iter()}
        assert tags <= {"p", "pre", "table", "caption", "tbody", "tr", "th", "td", "br"}
        assert "plate 'patients <b>'" in "".join(root.itertext())


@pytest.mark.full
def test_a_run_without_privacy_says_so():
    report = svi(noise_multiplier=0.0, budget=None).privacy
    assert str(report).startswith("Guarantee: NOT PRIVATE")
    assert Statement.from_json(report.to_json()).epsilon == math.inf


def test_figures_are_rounded_up_and_rates_of_attacks_are_bounds_close_to_exact_ones():
    report = of_laplace()
    statement = report.statement()
    shown = float(statement.meaning.split(" at most ")[1].split(" = exp")[0])
    assert 0 <= shown - math.exp(statement.epsilon) < 1e-3
    rates = statement.meaning.split("is right about at most ")[1].split(" of present")[0]
    for text, (rate, bound) in zip(rates.split(", "), statement.attack, strict=True):
        assert 0 <= float(text.removesuffix(" %")) - 100 * bound < 1e-2
        # Of a Gaussian mechanism the best test is known.
        exact = stats.norm.cdf(stats.norm.ppf(rate) + 1 / report.event.noise_multiplier)
        assert exact <= bound <= 1.35 * exact


@pytest.mark.full
@pytest.mark.parametrize("change", [
    {"attack": None}, {"attack": [[0.1]]}, {"released": None}, {"epsilon": "a"}, {"epsilon": -1},
    {"delta": None}, {"relation": "z"}, {"versions": 3}, "", "[]", "{}",
    '{"format": "x", "version": 1}',
])  # fmt: skip
@pytest.mark.every_case
def test_changed_statements_and_other_texts_are_refused(change):
    text = change
    if isinstance(change, dict):
        text = json.dumps(json.loads(of_laplace().to_json()) | change)
    with pytest.raises(ValueError, match=r"not a privacy statement|Expected the format"):
        Statement.from_json(text)


def test_the_version_is_known_without_metadata(monkeypatch):
    installed = importlib.metadata.version

    def version(name):
        if name == "numpyro_dp":
            raise importlib.metadata.PackageNotFoundError(name)
        return installed(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert versions()["numpyro_dp"] == __version__
