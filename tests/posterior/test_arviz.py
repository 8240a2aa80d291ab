"""Draws for ArviZ: with what was spent, and without records. Holds before and after ArviZ 1.0."""

import sys

try:
    import arviz
except FileNotFoundError:  # ArviZ 0.23 writes today's date to a file; two workers at once collide.
    import arviz
import jax
import matplotlib
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from flat import dpmcmc, dpsvi
from numpyro.infer import Predictive
from numpyro.infer.autoguide import AutoNormal

from numpyro_dp import SGLD, PrivacyBudget
from numpyro_dp.posterior import posterior_samples, to_arviz
from numpyro_dp.samplers import Poisson

SECRET = 77.125
COMMON = {"sampler": Poisson(0.2), "budget": PrivacyBudget(1.0, 1e-3)}
X = np.random.default_rng(0).normal(size=(50, 2)).astype(np.float32)
Y = np.full(50, SECRET, np.float32)


def model(x, y=None):
    w = numpyro.sample("net/w", dist.Normal(0, 1).expand([2]).to_event(1))
    scale = numpyro.sample("scale", dist.HalfNormal(1))
    with numpyro.plate("records", x.shape[0]):
        numpyro.sample("y", dist.Normal(x @ w, scale), obs=y)


@pytest.fixture(scope="module")
def made():
    """A run, its draws and their predictions."""
    guide = AutoNormal(model)
    result = dpsvi(model, guide, optax.adam(0.05), **COMMON).run(
        jax.random.key(0), 20, X, Y, progress_bar=False
    )
    draws = posterior_samples(jax.random.key(1), guide, result.params, 100)
    predicted = Predictive(model, posterior_samples=draws)(jax.random.key(2), X[:3])
    return result, draws, predicted


def names(tree):
    """Names of the groups."""
    groups = tree.groups
    found = groups() if callable(groups) else groups
    return {name.strip("/") for name in found} - {""}


@pytest.mark.full
def test_draws_are_one_chain_and_no_record_is_there(made):
    result, draws, predicted = made
    assert names(to_arviz(draws, result.privacy)) == {"posterior"}
    tree = to_arviz(
        draws, result.privacy, posterior_predictive=predicted, coords={"column": ["a", "b"]},
        dims={"net.w": ["column"]},
    )  # fmt: skip
    assert names(tree) == {"posterior", "posterior_predictive"}
    posterior = tree["posterior"]
    assert set(posterior.data_vars) == {"net.w", "scale"}
    assert posterior["net.w"].dims[:2] == ("chain", "draw")
    assert posterior["net.w"].sel(column="b").shape == (1, 100)
    np.testing.assert_array_equal(posterior["net.w"].values, np.asarray(draws["net/w"])[None])
    np.testing.assert_array_equal(
        tree["posterior_predictive"]["y"].values, np.asarray(predicted["y"])[None]
    )
    assert arviz.summary(tree)["mean"].shape == (3,)
    assert "sensitive" not in tree.attrs
    assert str(SECRET) not in repr(tree.attrs) + str(tree)
    for group in names(tree):
        for value in tree[group].data_vars.values():
            assert not (value.values == SECRET).any()
    few = {name: value[:7] for name, value in predicted.items()}
    tree = to_arviz(draws, result.privacy, posterior_predictive=few)
    assert tree["posterior_predictive"]["y"].shape == (1, 7, 3)


@pytest.mark.full
def test_records_are_marked(made):
    result, draws, _ = made
    tree = to_arviz(draws, result.privacy, sensitive_observed_data={"y": Y})
    assert names(tree) == {"posterior", "observed_data"}
    assert tree["observed_data"]["y"].shape == (50,)
    for part in (tree, tree["posterior"], tree["observed_data"]):
        assert "never publish" in part.attrs["sensitive"]
    assert "epsilon" not in tree["observed_data"].attrs


@pytest.mark.full
def test_attributes_say_what_was_spent(made):
    result, draws, predicted = made
    tree = to_arviz(draws, result.privacy, posterior_predictive=predicted)
    for part in (tree, tree["posterior"], tree["posterior_predictive"]):
        attrs = part.attrs
        assert attrs["epsilon"] == result.privacy.epsilon <= 1.0
        assert (attrs["delta"], attrs["relation"]) == (1e-3, "add_or_remove_one")
        assert (attrs["accountant"], attrs["num_steps"]) == (result.privacy.accountant, 20)
        assert "Poisson(rate=0.2" in attrs["privacy"]
        assert "differentially private posterior" in attrs["draws"]
        kinds = {type(value) for name, value in attrs.items() if name != "sample_dims"}
        assert kinds == {str, int, float}  # what netCDF can hold


@pytest.mark.extended
def test_chains_of_a_sampler():
    mcmc = dpmcmc(SGLD(model), num_warmup=5, num_samples=20, num_chains=2, **COMMON)
    mcmc.run(jax.random.key(0), X, Y)
    draws = mcmc.get_samples(group_by_chain=True)
    tree = to_arviz(draws, mcmc.privacy, group_by_chain=True)
    assert tree["posterior"]["net.w"].shape == (2, 20, 2)
    np.testing.assert_array_equal(tree["posterior"]["scale"].values, draws["scale"])
    assert "chains" in tree.attrs["draws"]
    assert tree.attrs["num_steps"] == 50  # of both chains together
    assert np.isfinite(arviz.summary(tree)["r_hat"].astype(float)).all()
    with pytest.raises(ValueError, match="two leading axes, of chains and of draws"):
        to_arviz(mcmc.get_samples(), mcmc.privacy, group_by_chain=True)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of matplotlib, by ArviZ's own calls
def test_its_plots(made):
    """Forests and predictive checks are ArviZ's own: they read what is made here."""
    matplotlib.use("Agg")
    result, draws, _ = made
    predicted = Predictive(model, posterior_samples=draws)(jax.random.key(2), X)
    tree = to_arviz(
        draws, result.privacy, posterior_predictive=predicted,
        sensitive_observed_data={"y": Y + X[:, 0]},
    )  # fmt: skip
    forest = arviz.plot_forest(tree)
    check = getattr(arviz, "plot_ppc", None) or arviz.plot_ppc_dist  # before and after 1.0
    predictive = check(tree)
    if isinstance(forest, np.ndarray):  # matplotlib axes, before 1.0
        labels = {tick.get_text() for tick in forest[0].get_yticklabels()}
        assert len(labels) == 3
        assert "scale" in labels
        assert predictive.get_xlabel() == "y"


@pytest.mark.full
def test_the_ways_of_arviz_that_would_copy_records_do_not_work(made):
    """They need attributes that a driver leaves out."""
    svi = dpsvi(model, AutoNormal, optax.adam(0.05), **COMMON)
    if hasattr(arviz, "from_numpyro_svi"):  # ArviZ 1.x
        with pytest.raises(AttributeError, match="model"):
            arviz.from_numpyro_svi(svi, svi_result=made[0], model_args=(X, Y))
    mcmc = dpmcmc(SGLD(model), num_warmup=2, num_samples=4, **COMMON)
    mcmc.run(jax.random.key(0), X, Y)
    with pytest.raises(AttributeError, match="DPMCMC"):
        arviz.from_numpyro(mcmc)


def test_wrong_input(made, monkeypatch):
    result, draws, _ = made
    with pytest.raises(TypeError, match=r"PrivacyReport, got RunResult.*result.privacy"):
        to_arviz(draws, result)
    with pytest.raises(TypeError, match="posterior_predictive must be a dict of draws"):
        to_arviz(draws, result.privacy, posterior_predictive=np.zeros(3))
    with pytest.raises(ValueError, match=r"first axis.*\(5,\).*\(6, 2\)"):
        to_arviz({"a": np.zeros(5), "b": np.zeros((6, 2))}, result.privacy)
    monkeypatch.setitem(sys.modules, "arviz", None)
    with pytest.raises(ImportError, match=r"numpyro-dp\[plot\]"):
        to_arviz(draws, result.privacy)
