"""Several accountants on one run, and the approximation that is none of them."""

import functools
import math

import pytest
from gaussian import gaussian
from scipy.stats import norm

from numpyro_dp import PrivacyBudget
from numpyro_dp.accounting import compare_accountants
from numpyro_dp.privacy.plan import PrivacyReport, make_plan
from numpyro_dp.samplers import FixedSize, FullBatch, Poisson


def report(sampler, noise, steps, relation="add_or_remove_one", number=60_000):
    budget = PrivacyBudget(1e6, 1e-5, relation)
    plan = make_plan(sampler, number, steps, functools.partial(gaussian, 1.0), budget=budget,
                     noise_multiplier=noise, accountant=None)  # fmt: skip
    return PrivacyReport(plan.spent(steps), steps, plan, False)


@pytest.mark.full
def test_the_limit_theorem_can_lie_below_the_truth():
    # Batches of 256 of 60,000 in 15 epochs.
    found = compare_accountants(report(Poisson(256 / 60_000), 1.3, 15 * 234))
    assert found.approximation < found.bounds["PLD"] <= found.bounds["RDP"]
    mu = 256 / 60_000 * math.sqrt(15 * 234 * (math.exp(1 / 1.69) - 1))
    epsilon = found.approximation
    delta = norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu)
    assert delta == pytest.approx(1e-5, rel=1e-4)
    assert found.bounds["PRV"] == pytest.approx(found.bounds["PLD"], rel=0.05)
    printed = str(found)
    assert "PLD      epsilon <= " in printed
    assert "no guarantee" in printed


def test_full_batches_are_exact_for_all_but_renyi():
    found = compare_accountants(report(FullBatch(), 20.0, 100))
    assert not found.refusals
    assert found.approximation == pytest.approx(found.bounds["GDP"], rel=1e-6)
    assert found.bounds["PLD"] == pytest.approx(found.bounds["GDP"], rel=5e-3)


@pytest.mark.full
def test_what_has_no_approximation_says_so():
    found = compare_accountants(report(FixedSize(100), 2.0, 10, "replace_one", 10_000))
    assert math.isnan(found.approximation)
    assert found.bounds["PLD"] < found.bounds["RDP"]
    assert "PRV" in found.refusals
    with pytest.raises(TypeError, match="got str"):
        compare_accountants("report")
