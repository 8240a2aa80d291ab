"""Plots show what they say: positions of points are the values themselves."""

import sys
import types

import jax
import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import optax
import pytest
from flat import dpsvi
from models import logistic
from numpyro.infer.autoguide import AutoDiagonalNormal

from numpyro_dp import PrivacyBudget, fit, plots
from numpyro_dp.samplers import Poisson

matplotlib.use("Agg")


model = logistic()


@pytest.fixture(scope="module")
def records():
    X = jax.random.normal(jax.random.key(1), (2000, 3))
    return X, jax.random.bernoulli(jax.random.key(2), jax.nn.sigmoid(X[:, 0])).astype(int)


@pytest.fixture(scope="module")
def posterior(records):
    return fit(model, *records, epsilon=1.0, rng_key=jax.random.key(0))


def points(ax):
    """Horizontal and vertical places of the markers of each curve."""
    return [line.get_xydata() for line in ax.lines if line.get_marker() == "o"]


def segments(ax):
    return np.concatenate([each.get_segments() for each in ax.collections])


@pytest.mark.full
def test_a_forest_has_means_and_intervals(posterior):
    draws = {"w": np.random.default_rng(0).normal(size=(4000, 3))}
    ax = plots.forest({"private": posterior, "draws": draws}, "w", prob=0.8, labels=list("abc"))
    summary = posterior.summary(0.8)["w"]
    own, other = points(ax)
    np.testing.assert_allclose(own[:, 0], summary["mean"])
    np.testing.assert_allclose(other[:, 0], draws["w"].mean(0))
    lines = segments(ax)
    np.testing.assert_allclose(lines[:3, 0, 0], summary["lower"])
    np.testing.assert_allclose(lines[3:, 1, 0], np.quantile(draws["w"], 0.9, axis=0))
    np.testing.assert_allclose(lines[:3, 0, 1], own[:, 1], err_msg="an interval has its mean")
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["private", "draws"]
    assert "80 %" in ax.get_xlabel()
    ax = plots.forest({"private": posterior}, "w", entries=[2, 0], labels=list("abc"))
    np.testing.assert_allclose(points(ax)[0][:, 0], posterior.summary()["w"]["mean"][[2, 0]])
    assert [text.get_text() for text in ax.get_yticklabels()] == ["c", "a"]
    figure, axes = plt.subplots(1, 2)
    assert plots.forest({"": posterior}, "w", ax=axes[1]) is axes[1]
    assert len(figure.axes) == 2
    plt.close(figure)


@pytest.mark.extended
def test_a_forest_takes_results_and_samplers(posterior, records):
    from numpyro.infer import MCMC, NUTS

    mcmc = MCMC(NUTS(model), num_warmup=20, num_samples=50, progress_bar=False)
    mcmc.run(jax.random.key(0), *records)
    result = types.SimpleNamespace(posterior=posterior)  # as all results have it
    own, other = points(plots.forest({"result": result, "NUTS": mcmc}, "w"))
    np.testing.assert_allclose(own[:, 0], posterior.summary()["w"]["mean"])
    np.testing.assert_allclose(other[:, 0], mcmc.get_samples()["w"].mean(0), rtol=1e-5)


@pytest.mark.extended
def test_a_frame_of_a_sweep(records):
    svi = dpsvi(model, AutoDiagonalNormal, optax.adam(0.05), sampler=Poisson(0.1),
                budget=PrivacyBudget(1.0, 1e-5))  # fmt: skip
    swept = svi.sweep(jax.random.split(jax.random.key(0), 2), 20, *records, epsilon=[0.5, 1.0])
    frame = swept.to_frame(first=lambda run: float(run.params["auto_loc"][0]), number=range(4))
    assert frame.epsilon.tolist() == swept.labels["epsilon"].tolist()
    np.testing.assert_array_equal(frame["first"], swept.params["auto_loc"][:, 0])
    assert frame.epsilon_spent.tolist() == [report.epsilon for report in swept.privacy]
    means = points(plots.utility(frame, "first"))[0]
    np.testing.assert_allclose(means[:, 1], frame.groupby("epsilon")["first"].mean(), rtol=1e-6)
    with pytest.raises(ValueError, match="column 'seed' already"):
        swept.to_frame(seed=range(4))
    with pytest.raises(ValueError, match="each of 4 runs"):
        swept.to_frame(first=[1.0])


def test_utility_has_means_and_standard_errors():
    runs = {"epsilon": [1.0, 0.1, 1.0, 0.1, 1.0, 1.0], "error": [1, 5, 3, 9, 10, 20]}
    ax = plots.utility(runs | {"of": list("aaaabb")}, "error", by="of")
    np.testing.assert_allclose(points(ax)[0], [[0.1, 7], [1, 2]])
    np.testing.assert_allclose(points(ax)[1], [[1, 15]])
    np.testing.assert_allclose(segments(ax)[1][:, 1], [1, 3])
    assert ax.get_xscale() == "log"
    with pytest.raises(ValueError, match="no column 'loss'"):
        plots.utility(runs, "loss")
    with pytest.raises(ValueError, match="positive"):
        plots.utility({"epsilon": [0.0], "error": [1.0]}, "error")


@pytest.mark.full
def test_an_attack_is_bounded_by_both_inequalities_and_better_by_several_deltas(posterior):
    ax = plots.attack(PrivacyBudget(1.0, 1e-3))
    rates, bound = ax.lines[1].get_data()
    expected = [min(np.e * a + 1e-3, 1 - (1 - 1e-3 - a) / np.e, 1) for a in rates]
    np.testing.assert_allclose(bound, expected)
    both = {"run": posterior.privacy, "pair": posterior.privacy.bound}
    of_run, of_pair = (line.get_ydata() for line in plots.attack(both).lines[1:])
    assert np.all(of_run <= of_pair)
    assert np.any(of_run < of_pair - 0.01)
    assert of_run[10] == dict(posterior.privacy.statement().attack)[0.05]


@pytest.mark.every_case
@pytest.mark.parametrize(("shapes", "options", "message"), [
    ({}, {}, "at least one"),
    ({"a": (5, 3)}, {"site": "v"}, "no site 'v'"),
    ({"a": (5, 3), "b": (5, 2)}, {}, "different"),
    ({"a": (5, 61)}, {}, "61 entries"),
    ({"a": (5, 3)}, {"labels": ["a"]}, "3 entries, got 1 labels"),
    ({"a": (5, 3)}, {"entries": [3]}, "numbers from 0 on"),
])  # fmt: skip
def test_errors_of_a_forest(shapes, options, message):
    found = {name: {"w": np.zeros(shape)} for name, shape in shapes.items()}
    with pytest.raises(ValueError, match=message):
        plots.forest(found, **{"site": "w"} | options)


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match="numpyro-dp\\[plot\\]"):
        plots.attack(PrivacyBudget(1.0, 1e-3))
