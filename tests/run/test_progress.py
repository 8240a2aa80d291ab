"""The bar says what a run does from its first second, and what it has spent."""

import pickle
import re

import jax
import optax
import pytest
from flat import dpmcmc, dpsvi
from models import mean_of
from numpyro.infer.autoguide import AutoDiagonalNormal

from numpyro_dp import SGLD, PrivacyBudget, fit

BUDGET = PrivacyBudget(1.0, 1e-5)


model = mean_of(10)


X = 3 + jax.random.normal(jax.random.key(1), (500,))


def svi():
    return dpsvi(model, AutoDiagonalNormal, optax.adam(0.05), clip_norm=2.0, estimator=None,
                 budget=BUDGET)  # fmt: skip


def run_fit(x):
    return fit(model, x, epsilon=1.0, rng_key=jax.random.key(0)).privacy


def run_svi(x):
    return svi().run(jax.random.key(0), 60, x).privacy


def run_mcmc(x, chains=1):
    mcmc = dpmcmc(SGLD(model), num_warmup=10, num_samples=20, num_chains=chains, clip_norm=5.0,
                  budget=BUDGET, progress_bar=True)  # fmt: skip
    mcmc.run(jax.random.key(0), x)
    return mcmc.privacy


@pytest.mark.full
@pytest.mark.parametrize("run", [run_fit, run_svi, run_mcmc])
@pytest.mark.table
def test_a_bar_reads_compiles_and_counts(run, capsys):
    privacy = run(X)
    lines = re.split(r"[\r\n]+", capsys.readouterr().err.strip())
    last = lines[-1]
    assert "reading the model" in lines[0]
    assert any("compiling the step" in line for line in lines)
    assert not any("?release" in line or "?step" in line for line in lines)
    done, total = map(int, re.search(r"(\d+) of (\d+)", last).groups())
    # A report of stages counts as many as there may be.
    assert done == total <= privacy.num_steps
    assert done == privacy.num_steps or run is run_fit
    assert f"epsilon <= {privacy.epsilon:.3g}" in last


@pytest.mark.full
def test_a_bar_of_several_chains_ends(capsys):
    run_mcmc(X, chains=2)
    assert "30 of 30" in re.split(r"[\r\n]+", capsys.readouterr().err.strip())[-1]


@pytest.mark.full
def test_print_of_a_result_is_its_posterior_with_a_verdict(capsys):
    result = svi().run(jax.random.key(0), 60, X, progress_bar=False)
    assert capsys.readouterr().err == ""
    assert str(result) == str(result.posterior)
    assert len(str(result).splitlines()) <= 10
    assert "share of the prior" in str(result).splitlines()[-1]
    assert "<table" in result._repr_html_() and "mean" in result._repr_html_()
    bare = pickle.loads(pickle.dumps(result))  # it has no model, and so no posterior
    assert str(bare) == repr(bare)
    assert repr(bare).startswith("RunResult(params of ['auto_loc', 'auto_scale']")
    assert "auto_loc" in bare._repr_html_() and "<table" in bare._repr_html_()
