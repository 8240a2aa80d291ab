"""Forecasts: a bound on the effect of noise, from sizes and settings alone."""

import jax
import numpy as np
import optax
import pytest
from flat import dpmcmc, dpsep, dpsvi
from models import logistic
from numpyro.infer.autoguide import AutoDiagonalNormal

from numpyro_dp import SGLD, BudgetError, DPLaplace, PrivacyBudget
from numpyro_dp.samplers import Poisson

X = np.random.default_rng(0).normal(size=(2000, 3)).astype(np.float32)
Y = np.zeros(len(X), int)
BUDGET = PrivacyBudget(1.0, 1e-5)

model = logistic()


def svi(**options):
    return dpsvi(model, AutoDiagonalNormal, optax.adam(0.01), estimator=None, **options)


def forecasts(budget):
    mcmc = dpmcmc(SGLD(model), num_warmup=100, num_samples=100, budget=budget)
    return {
        "DPLaplace": DPLaplace(model, budget=budget).plan(X, Y),
        "DPSVI": svi(budget=budget).plan(200, X, Y),
        "DPSEP": dpsep(model, clip_norm=2.0, budget=budget).plan(20, X, Y),
        "DPMCMC": mcmc.plan(X, Y),
    }


@pytest.mark.full
def test_drivers_agree_on_what_a_budget_allows():
    found = forecasts(BUDGET)
    assert {(each.num_examples, each.num_latents) for each in found.values()} == {(2000, 3)}
    alone = found.pop("DPLaplace").noise
    # The other drivers count half of their steps. Up to that, only the budget matters.
    assert all(each.noise == pytest.approx(2**0.5 * alone, rel=0.02) for each in found.values())


@pytest.mark.full
def test_the_bound_is_the_formula_and_says_what_it_means():
    found = svi(sampler=Poisson(0.1), noise_multiplier=30.0).plan(400, X, Y)
    assert found.noise == pytest.approx(30.0 * (3 / (0.1**2 * 200 * 2000)) ** 0.5)
    assert found.width == pytest.approx((1 + found.noise**2) ** 0.5)
    assert "as much as" in str(found)
    assert "The noise decides" in str(forecasts(PrivacyBudget(0.01, 1e-5))["DPSVI"])


def test_posteriors_are_no_narrower_than_the_bound():
    chances = 1 / (1 + np.exp(-X @ np.array([1.0, -1.0, 0.0])))
    y = (np.random.default_rng(1).random(len(X)) < chances) * 1
    information = (X * (chances * (1 - chances))[:, None]).T @ X
    exact = np.sqrt(np.diag(np.linalg.inv(information + np.eye(3))))
    laplace = DPLaplace(model, budget=BUDGET)
    sd = laplace.run(jax.random.key(0), X, y).summary()["w"]["sd"]
    assert (sd > 0.95 * laplace.plan(X, y).width * exact).all()


def test_a_plan_that_exceeds_the_budget_is_refused():
    with pytest.raises(BudgetError):
        svi(budget=BUDGET.after(), noise_multiplier=1.0).plan(1000, X, Y)
