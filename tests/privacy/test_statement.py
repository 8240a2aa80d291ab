"""Privacy statements: what they say, as text, JSON and HTML."""

import functools
import html.parser
import importlib.metadata
import json
import math

import jax
import jax.numpy as jnp
import optax
import pytest
from flat import grouped
from models import mean_of
from numpyro.infer.autoguide import AutoDiagonalNormal
from scipy import stats

from numpyro_dp import DPSVI, DPLaplace, PrivacyBudget, __version__
from numpyro_dp.mechanisms import LossRelease
from numpyro_dp.privacy.statement import Statement, versions
from numpyro_dp.samplers import FullBatch, Poisson

KEY = jax.random.key(0)
X = jnp.ones(200)

model = mean_of(10, plate="patients <b>")


def svi(**options):
    options = {"sampler": FullBatch(), "budget": PrivacyBudget(1.0, 1e-5)} | options
    driver = DPSVI(
        model, AutoDiagonalNormal(model), optax.adam(0.1), **grouped(clip_norm=2.0, **options)
    )
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
    statement = report.statement()
    text = str(report)
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


def test_the_rates_of_attacks_are_bounds_and_close_to_exact_ones():
    """Of a Gaussian mechanism the best test is known."""
    report = of_laplace()
    for rate, bound in report.statement().attack:
        exact = stats.norm.cdf(stats.norm.ppf(rate) + 1 / report.event.noise_multiplier)
        assert exact <= bound <= 1.35 * exact


class Tags(html.parser.HTMLParser):
    """Counts tags, and keeps the text."""

    def __init__(self):
        super().__init__()
        self.open, self.seen, self.text = [], set(), ""

    def handle_starttag(self, tag, attrs):
        self.seen.add(tag)
        if tag != "br":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


@pytest.mark.full
def test_html_is_a_table_without_scripts():
    result = svi()
    for shown in (result, result.privacy, result.posterior):
        tags = Tags()
        tags.feed(shown._repr_html_())
        assert tags.open == []
        assert tags.seen <= {"p", "pre", "table", "caption", "tbody", "tr", "th", "td", "br"}
        assert "plate 'patients <b>'" in tags.text


def test_settings_are_what_the_user_says():
    report = of_laplace()
    assert "does not cover that" in str(report)
    said = report.statement(settings="Chosen on the data of 2020.")
    assert "Settings: Chosen on the data of 2020." in str(said)
    with pytest.raises(TypeError, match="settings as a text"):
        report.statement(settings=None)


@pytest.mark.full
def test_a_run_without_privacy_says_so():
    report = svi(noise_multiplier=0.0, budget=None).privacy
    assert str(report).startswith("Guarantee: NOT PRIVATE")
    assert Statement.from_json(report.to_json()).epsilon == math.inf


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": "x", "version": 1}'])
def test_other_texts_are_no_statement(text):
    with pytest.raises(ValueError, match=r"not a privacy statement|Expected the format"):
        Statement.from_json(text)


def test_figures_are_rounded_up():
    statement = of_laplace().statement()
    shown = float(statement.meaning.split(" at most ")[1].split(" = exp")[0])
    assert 0 <= shown - math.exp(statement.epsilon) < 1e-3
    rates = statement.meaning.split("is right about at most ")[1].split(" of present")[0]
    for text, (_, rate) in zip(rates.split(", "), statement.attack, strict=True):
        assert 0 <= float(text.removesuffix(" %")) - 100 * rate < 1e-2


@pytest.mark.parametrize("change", [
    {"attack": None},
    {"attack": [[0.1]]},
    {"released": None},
    {"epsilon": "a"},
    {"epsilon": -1},
    {"delta": None},
    {"relation": "z"},
    {"versions": 3},
])  # fmt: skip
@pytest.mark.every_case
def test_changed_statements_are_refused(change):
    report = of_laplace()
    with pytest.raises(ValueError, match="not a privacy statement"):
        Statement.from_json(json.dumps(json.loads(report.to_json()) | change))


def test_the_version_is_known_without_metadata(monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    installed = importlib.metadata.version
    monkeypatch.setattr(
        importlib.metadata, "version", lambda n: (missing if n == "numpyro_dp" else installed)(n)
    )
    assert versions()["numpyro_dp"] == __version__
