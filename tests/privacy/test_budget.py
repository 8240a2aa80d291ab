"""Several runs on the same records within one budget."""

import functools

import pytest
from dp_accounting import ComposedDpEvent, GaussianDpEvent, PoissonSampledDpEvent
from dp_accounting import SelfComposedDpEvent as Several
from dp_accounting.pld import PLDAccountant

from numpyro_dp import FixedSize, FullBatch, Poisson, PrivacyBudget, compare_accountants
from numpyro_dp.privacy.calibration import CalibrationError
from numpyro_dp.privacy.mechanism import gaussian
from numpyro_dp.privacy.plan import BudgetError, PrivacyReport, make_plan

NUMBER = 10_000


def planned(sampler, steps, budget, noise=None):
    return make_plan(sampler, NUMBER, steps, functools.partial(gaussian, 1.0), budget=budget,
                     noise_multiplier=noise, accountant=None)  # fmt: skip


def report(sampler, steps, budget, noise=None):
    plan = planned(sampler, steps, budget, noise)
    return PrivacyReport(plan.spent(steps), steps, plan, False)


def test_the_later_run_has_the_noise_that_the_rest_allows():
    total = PrivacyBudget(1.0, 1e-5)
    first = report(Poisson(0.02), 500, PrivacyBudget(0.9, 1e-5))
    second = report(FullBatch(), 10, total.after(first))
    assert 0.99 < second.epsilon <= 1.0
    by_hand = PLDAccountant()
    by_hand.compose(Several(PoissonSampledDpEvent(0.02, GaussianDpEvent(first.noise_multiplier)),
                            500))  # fmt: skip
    by_hand.compose(Several(GaussianDpEvent(second.noise_multiplier), 10))
    assert by_hand.get_epsilon(1e-5) == pytest.approx(second.epsilon, rel=5e-3)
    assert "earlier" in str(second)
    third = report(FullBatch(), 5, PrivacyBudget(1.2, 1e-5).after(second))
    assert 1.18 < third.epsilon <= 1.2  # the second stands for the first as well


def test_gaussian_runs_compose_exactly():
    first = report(FullBatch(), 9, PrivacyBudget(50.0, 1e-5), 30.0)
    alone = report(FullBatch(), 13, PrivacyBudget(50.0, 1e-5), 30.0)
    both = report(FullBatch(), 4, PrivacyBudget(50.0, 1e-5).after(first), 30.0)
    assert both.epsilon == pytest.approx(alone.epsilon, rel=1e-9)
    assert both.at(1e-7).epsilon == pytest.approx(alone.at(1e-7).epsilon, rel=1e-9)
    assert compare_accountants(both).bounds["GDP"] == pytest.approx(both.epsilon, rel=1e-9)
    assert compare_accountants(both).approximation == pytest.approx(both.epsilon, rel=1e-6)


def test_a_ceiling_counts_what_was_spent():
    first = report(FullBatch(), 10, PrivacyBudget(0.9, 1e-5))
    total = PrivacyBudget(1.0, 1e-5)
    planned(FullBatch(), 10, total, noise=20.0)  # alone it is within
    with pytest.raises(BudgetError, match="at most epsilon=1.0"):
        planned(FullBatch(), 10, total.after(first), noise=20.0)
    with pytest.raises(CalibrationError, match="together with earlier runs"):
        planned(FullBatch(), 10, PrivacyBudget(0.5, 1e-5).after(first))


def test_what_batches_do_beside_the_event_adds_up():
    sampler = Poisson(0.02, overflow_prob=1e-9)
    first = report(sampler, 100, PrivacyBudget(1.0, 1e-5))
    one = sampler.failure_prob(NUMBER)
    assert first.spending.failure_prob == pytest.approx(100 * one)
    assert one > 0
    second = report(sampler, 50, PrivacyBudget(2.0, 1e-5).after(first))
    assert second.spending.failure_prob == pytest.approx(150 * one)


def test_what_can_not_be_added_is_refused():
    total = PrivacyBudget(1.0, 1e-5)
    other = report(FixedSize(100), 10, PrivacyBudget(1.0, 1e-5, "replace_one"))
    with pytest.raises(ValueError, match=r"'add_or_remove_one' of the budget.*'replace_one'"):
        total.after(other)
    with pytest.raises(TypeError, match="got float"):
        total.after(0.5)
    with pytest.raises(ValueError, match="epsilon=inf"):
        total.after(report(FullBatch(), 10, None, 0.0))


def test_an_event_of_the_whole_can_be_read():
    first = report(Poisson(0.02), 500, PrivacyBudget(0.9, 1e-5))
    second = report(FullBatch(), 10, PrivacyBudget(1.0, 1e-5).after(first))
    assert isinstance(second.event, ComposedDpEvent)
    assert hash(PrivacyBudget(1.0, 1e-5).after(first))
