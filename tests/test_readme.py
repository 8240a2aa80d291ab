"""The README's code runs as pasted, and the repository keeps its own rules."""

import dataclasses
import inspect
import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conformance.registry import example
from dp_accounting import PoissonSampledDpEvent
from flat import dpsvi
from models import mean_of
from numpyro.infer.autoguide import AutoDiagonalNormal

import numpyro_dp
from numpyro_dp import PrivacyBudget
from numpyro_dp.core import Batch, Estimator, Fold, Sampler
from numpyro_dp.estimators import aligned
from numpyro_dp.mechanisms import GaussianMechanism
from numpyro_dp.posterior import rehearse
from numpyro_dp.samplers import FullBatch

ROOT = pathlib.Path(__file__).parents[1]


def run_code(page, scope):
    for code in re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.S):
        exec(compile(code, page, "exec"), scope)
    return scope


@pytest.mark.full
def test_the_code_runs_as_pasted(capsys):
    scope = run_code("README.md", {})
    printed = capsys.readouterr().out
    assert "epsilon <= " in printed and "add_or_remove_one" in printed
    rows = [line for line in printed.splitlines() if line.startswith(("private", "NUTS"))]
    private, exact = np.array([re.findall(r"-?\d+\.\d*", row) for row in rows], float)
    np.testing.assert_allclose(private, exact, atol=0.3)
    for page in ("docs/svi.md", "docs/methods.md"):  # each goes on from the last one
        run_code(page, scope)
    assert scope["result"].privacy.epsilon <= 1.0
    assert set(scope["posterior"].params) == {"auto_linear", "auto_precision"}
    assert scope["draws"]["y"].shape == (500, 5)


@pytest.mark.full
@pytest.mark.parametrize("page", ["data.md", "moving.md", "regression.md", "settings.md"])
def test_the_code_of_a_page_runs_as_pasted(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_code(f"docs/{page}", {"__name__": page})


def test_documents_link_to_files_that_exist():
    documents = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    for document in documents:
        for target in re.findall(r"\]\((?!http)([^)#]+)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name} -> {target}"


@pytest.mark.full
def test_the_worked_additions_run():
    given = (dataclasses, jax, jnp, Batch, Fold, Estimator, PoissonSampledDpEvent, Sampler)
    names = {each.__name__.rpartition(".")[2]: each for each in given} | {"jnp": jnp}
    names = run_code("docs/extending.md", names | {"__name__": "additions"})
    model = mean_of(10)

    def run(estimator, clip_norm):
        svi = dpsvi(model, AutoDiagonalNormal, optax.adam(0.1), estimator=estimator,
                    clip_norm=clip_norm, sampler=names["Half"](), budget=PrivacyBudget(8.0, 1e-4),
                    secret_key=5, repetition=True)  # fmt: skip
        x = 3 + jax.random.normal(jax.random.key(1), (500,))
        return svi.run(jax.random.key(0), 60, x, progress_bar=False, fold=names["largest"])

    plain, scaled = run(aligned(), 2.0), run(names["scaled"](aligned(), 3.0), 6.0)
    assert abs(plain.params["auto_loc"][0] - 3) < 0.5 and plain.privacy.epsilon <= 8.0
    assert abs(scaled.params["auto_loc"][0] - plain.params["auto_loc"][0]) < 1e-3
    assert plain.folded["auto_loc"][0] >= plain.params["auto_loc"][0]
    # The records tell the mean up to 1 / sqrt(500) = .045.
    widths = [each.posterior.summary()["mean"]["sd"] for each in (plain, scaled)]
    assert 0.04 < widths[0] < 0.2 and abs(widths[1] / widths[0] - 1) < 0.05, widths


@pytest.mark.full
def test_posteriors_of_a_driver_and_a_mechanism_of_ones_own_are_as_wide_as_their_errors():
    newton = example("newton")
    x, truth = jax.random.normal(jax.random.key(1), (3000, 3)), jnp.array([1.0, -0.7, 0.2])
    y = jax.random.bernoulli(jax.random.key(2), jax.nn.sigmoid(x @ truth)) * 1
    own = jax.nn.sigmoid(x @ truth)
    exact = np.sqrt(np.diag(np.linalg.inv(x.T * (own * (1 - own)) @ x + np.eye(3) / 4)))
    common = {"clip_norm": 1.0, "sampler": FullBatch(), "budget": PrivacyBudget(2.0, 1e-6)}

    def ratio_and_error(posterior):
        table = posterior.summary()["w"]
        error = np.abs(table["mean"] - truth) / table["sd"]
        return float(np.mean(table["sd"] / exact)), float(np.max(error))

    driver = newton.PrivateNewton(newton.model, **common)
    for key in jax.random.split(jax.random.key(0), 3):
        ratio, error = ratio_and_error(driver.run(key, 30, x, y, progress_bar=False).posterior)
        assert 1 < ratio < 1.4 and error < 3.5, (ratio, error)
    found = rehearse(
        driver, jax.random.key(3), x, None, num_steps=30, num_simulations=3, progress_bar=False
    )
    assert np.all(found.rmse < 0.2) and np.all(found.sd < 0.2)

    for mechanism in (GaussianMechanism(), example("automatic_clipping").AutomaticClipping()):
        svi = dpsvi(newton.model, AutoDiagonalNormal, optax.adam(0.05), estimator=None,
                    mechanism=mechanism, **common)  # fmt: skip
        run = svi.run(jax.random.key(0), 200, x, y, progress_bar=False)
        ratio, error = ratio_and_error(run.posterior)
        assert 1 < ratio < 1.8 and error < 3.5, (mechanism, ratio, error)


def test_the_ways_through_the_package_are_those_of_the_code():
    text = (ROOT / "docs" / "architecture.md").read_text()
    ways = re.split(r"^## The way of ", text, flags=re.M)[1:]
    assert len(ways) == 4
    for way in ways:
        steps = re.findall(r"^\d\. `([\w/]+\.py)`, `(\w+)`", way, flags=re.M)
        assert 6 <= len(steps) <= 8
        for file, name in steps:
            source = (ROOT / "numpyro_dp" / file).read_text()
            assert re.search(rf"^ *(def|class) {name}\b", source, flags=re.M), (file, name)


def test_each_public_name_has_an_example_and_a_page_that_names_it():
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    text = "".join(page.read_text() for page in pages if page.name != "api.md")
    top = [getattr(numpyro_dp, name) for name in numpyro_dp.__all__]
    faces = [numpyro_dp, *filter(inspect.ismodule, top)]
    assert {"numpyro_dp.core", "numpyro_dp.plots"} <= {face.__name__ for face in faces}
    for name, value in ((name, getattr(face, name)) for face in faces for name in face.__all__):
        assert re.search(rf"\b{name}\b", text), f"no page names {name}"
        if getattr(value, "__module__", "").startswith("numpyro_dp"):
            parts = [value, *(vars(value).values() if inspect.isclass(value) else ())]
            assert any(">>>" in (inspect.getdoc(part) or "") for part in parts), name


@pytest.mark.full
def test_import_is_quiet():
    code = "import numpyro_dp, sys; assert 'matplotlib' not in sys.modules"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
