"""Rehearsals: runs on simulated records, and what they say about intervals."""

import math

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from flat import dpmcmc, dpsep, dpsvi
from models import given, slopes
from numpyro.infer.autoguide import AutoDiagonalNormal

from numpyro_dp import DPEM, SGLD, DPLaplace, Privacy, PrivacyBudget
from numpyro_dp.posterior import choose, rehearse
from numpyro_dp.samplers import FullBatch

KEY = jax.random.key(0)
X = np.asarray(np.random.default_rng(0).normal(size=(1500, 2)), np.float32)
BUDGET = PrivacyBudget(2.0, 1e-5)


def model(x, y=None, *, scale=1.0):
    given(lambda x, w: dist.Bernoulli(logits=x @ w), w=slopes(scale))(x, y)


DRIVERS = {
    "DPLaplace": (lambda **common: DPLaplace(model, **common), {}),
    "DPSVI": (
        lambda **common: dpsvi(
            model, AutoDiagonalNormal, optax.adam(0.02), estimator=None, **common
        ),
        {"num_steps": 500},
    ),
    # Its sites are not centred, so its clip norm must not bite.
    "DPSEP": (lambda **common: dpsep(model, clip_norm=3.0, **common), {"num_steps": 15}),
    "DPMCMC": (
        lambda **common: dpmcmc(SGLD(model), num_warmup=200, num_samples=500, **common), {},
    ),
}  # fmt: skip


@pytest.mark.full  # tests/posterior/test_scores.py has other drivers
@pytest.mark.parametrize("name", DRIVERS)
def test_intervals_hold_the_truth_and_know_more_than_the_prior(name):
    build, settings = DRIVERS[name]
    found = rehearse(build(budget=BUDGET, scale=0.5), KEY, X, None, num_simulations=12, **settings)
    assert found.cover[0.9].shape == (12,)
    assert found.cover[0.9].mean() > 0.7
    assert found.cover[0.5].mean() < 0.9
    assert found.log_score.mean() > found.prior_log_score.mean()
    # Latents are drawn from the prior of the static keyword, and rmse is in its units.
    assert 0.01 < found.rmse.mean() < 0.9
    assert "12 simulations" in str(found)


@pytest.mark.extended
def test_the_prior_rehearses_as_the_prior():
    laplace = DPLaplace(model, budget=PrivacyBudget(0.001, 1e-5))
    found = rehearse(laplace, KEY, X, None, num_simulations=24)
    np.testing.assert_allclose(found.sd, 1, atol=0.1)
    gap = found.log_score - found.prior_log_score
    error = gap.std(ddof=1) / math.sqrt(len(gap))
    assert error < 0.05
    assert abs(gap.mean()) < 4 * error


@pytest.mark.extended
def test_outcomes_go_where_they_belong():
    def named(x, *, label=None):
        w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
        with numpyro.plate("records", x.shape[0]):
            numpyro.sample("label", dist.Normal(x @ w, 1), obs=label)

    found = rehearse(DPLaplace(named, budget=BUDGET), KEY, X, num_simulations=2)
    assert np.isfinite(found.log_score).all()
    calls = []

    def fill(simulated, args, kwargs):
        calls.append(sorted(simulated))
        return (args[0], simulated["y"]), kwargs

    rehearse(DPLaplace(model, budget=BUDGET), KEY, X, None, num_simulations=2,
             simulated_data_to_args=fill)  # fmt: skip
    assert calls == [["y"], ["y"]]


def test_what_cannot_be_rehearsed_is_refused():
    with pytest.raises(ValueError, match="secret_key can run once"):
        rehearse(DPLaplace(model, budget=BUDGET, privacy=Privacy(secret_key=1)), KEY, X, None)
    with pytest.raises(ValueError, match="simulated no outcome"):
        rehearse(DPLaplace(model, budget=BUDGET), KEY, X, np.zeros(len(X), int))
    with pytest.raises(TypeError, match="needs a driver of a NumPyro model"):
        rehearse(DPEM(2, clip_norm=1.0, sampler=FullBatch(), budget=BUDGET), KEY, X)


@pytest.mark.extended
def test_the_better_half_goes_on_and_bad_settings_lose(capsys):
    built = []

    def build(clip_norm):
        built.append(clip_norm)
        return dpsep(model, clip_norm=clip_norm, budget=BUDGET)

    grid = [{"clip_norm": c, "num_steps": 10} for c in (1e-3, 3.0, 1e3, 1e6)]
    found = choose(build, grid, KEY, X, None, num_simulations=8)
    assert found.settings == {"clip_norm": 3.0, "num_steps": 10}
    assert built == [1e-3, 3.0, 1e3, 1e6, 3.0]  # the last one is to run
    shown = capsys.readouterr().err
    assert "24/24" in shown, shown  # 4 settings on 4 data sets, and 2 on 4 more
    assert [len(scores) for _, scores in found.scores] == [8, 8, 4, 4]
    (_, best), (_, second), *_, (_, last) = found.scores
    assert np.mean(best) > np.mean(second) > np.mean(last)
    assert np.mean(best) > np.mean(found.prior)
    lower = best[:4] - last  # on the data sets that both saw
    line = next(line for line in str(found).splitlines() if line.endswith(str(found.scores[-1][0])))
    assert f"{np.mean(lower):.3g} ({np.std(lower, ddof=1) / 2:.2g})" in line
    assert str(found).splitlines()[-1].endswith("the prior")
    assert found.driver.run(KEY, 10, X, np.zeros(len(X), int), progress_bar=False)
    with pytest.raises(ValueError, match="empty grid"):
        choose(build, [], KEY, X, None)
