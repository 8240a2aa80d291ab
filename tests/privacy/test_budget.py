"""Several runs on the same records within one budget."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from dp_accounting import ComposedDpEvent, GaussianDpEvent, SelfComposedDpEvent
from dp_accounting.pld import PLDAccountant
from flat import dpmcmc, dpsvi
from gaussian import gaussian
from models import mean_of
from numpyro.infer.autoguide import AutoDelta
from privacy.events import poisson

from numpyro_dp import SGLD, PrivacyBudget
from numpyro_dp.estimators import vanilla
from numpyro_dp.privacy.noise import TOTAL_VARIATION
from numpyro_dp.privacy.plan import BudgetError, PrivacyReport, make_plan
from numpyro_dp.samplers import FullBatch, Poisson

NUMBER = 10_000


def planned(sampler, steps, budget, noise=None):
    return make_plan(sampler, NUMBER, steps, functools.partial(gaussian, 1.0), budget=budget,
                     noise_multiplier=noise, accountant=None)  # fmt: skip


def report(sampler, steps, budget, noise=None):
    plan = planned(sampler, steps, budget, noise)
    return PrivacyReport(plan.spent(steps), steps, plan, False)


@pytest.mark.full
def test_the_later_run_has_the_noise_that_the_rest_allows():
    first = report(Poisson(0.02), 500, PrivacyBudget(0.9, 1e-5))
    second = report(FullBatch(), 10, PrivacyBudget(1.0, 1e-5).after(first))
    assert 0.99 < second.epsilon <= 1.0 and "earlier" in str(second)
    by_hand = PLDAccountant()
    by_hand.compose(poisson(0.02, first.noise_multiplier, 500))
    by_hand.compose(SelfComposedDpEvent(GaussianDpEvent(second.noise_multiplier), 10))
    assert by_hand.get_epsilon(1e-5) == pytest.approx(second.epsilon, rel=5e-3)
    third = report(FullBatch(), 5, PrivacyBudget(1.2, 1e-5).after(second))
    assert 1.18 < third.epsilon <= 1.2  # the second stands for the first as well


def test_a_ceiling_counts_what_was_spent():
    first = report(FullBatch(), 10, PrivacyBudget(0.9, 1e-5))
    total = PrivacyBudget(1.0, 1e-5)
    planned(FullBatch(), 10, total, noise=20.0)  # alone it is within
    with pytest.raises(BudgetError, match="at most epsilon=1.0"):
        planned(FullBatch(), 10, total.after(first), noise=20.0)
    with pytest.raises(BudgetError, match=r"Earlier runs \(1\) have spent .*epsilon=0.5"):
        planned(FullBatch(), 10, PrivacyBudget(0.5, 1e-5).after(first))


def test_every_earlier_run_counts_and_counts_once():
    high = PrivacyBudget(50.0, 1e-5)
    one = report(FullBatch(), 3, high, 30.0)
    other = report(FullBatch(), 5, high.after(one), 40.0)
    beside = report(FullBatch(), 7, high.after(one), 50.0)
    every = high.after(other, beside)
    assert len(every.earlier) == 3 and hash(every)
    last = report(FullBatch(), 1, every, 60.0)
    assert isinstance(last.event, ComposedDpEvent) and "3 earlier" in str(last)
    mu = (3 / 30**2 + 5 / 40**2 + 7 / 50**2 + 1 / 60**2) ** 0.5
    alone = report(FullBatch(), 1, high, 1 / mu)
    assert last.epsilon == pytest.approx(alone.epsilon, rel=1e-9)
    assert last.at(1e-7).epsilon == pytest.approx(alone.at(1e-7).epsilon, rel=1e-9)
    for budget in (high.after(one, other, beside), high.after(beside).after(other).after(one)):
        again = report(FullBatch(), 1, budget, 60.0)
        assert again.epsilon == pytest.approx(last.epsilon, rel=1e-12)
    twin = one.of_another_run()
    assert len(high.after(one, twin, one).earlier) == 2


@pytest.mark.full
def test_earlier_runs_are_accounted_under_the_relation_and_others_are_refused():
    total, high = PrivacyBudget(1.0, 1e-5), PrivacyBudget(50.0, 1e-5, "replace_one")
    one = report(FullBatch(), 3, high, 30.0)
    both = report(FullBatch(), 2, high.after(one), 30.0)
    alone = report(FullBatch(), 5, high, 30.0)
    assert both.epsilon == pytest.approx(alone.epsilon, rel=1e-9)
    for change, error, words in (
        (lambda: dataclasses.replace(high.after(one), relation=total.relation), ValueError,
            "'add_or_remove_one' of the budget"),
        (lambda: total.after(one), ValueError, r"'add_or_remove_one' of the budget.*'replace_one'"),
        (lambda: PrivacyBudget(1.0, 1e-5, earlier=(one,)), TypeError, "after"),
        (lambda: total.after(0.5), TypeError, "got float"),
        (lambda: total.after(report(FullBatch(), 10, None, 0.0)), ValueError, "epsilon=inf"),
    ):  # fmt: skip
        with pytest.raises(error, match=words):
            change()


@pytest.mark.full
def test_what_batches_do_beside_the_event_adds_up():
    often, seldom = Poisson(0.02, overflow_prob=1e-9), Poisson(0.05, overflow_prob=1e-8)
    high = PrivacyBudget(50.0, 1e-5)
    one = report(often, 100, high, 2.0)
    two = report(seldom, 30, high.after(one), 2.0)
    last = report(often, 50, high.after(two), 2.0)
    for name in ("failure_prob", "total_variation"):
        own = [getattr(sampler, name)(NUMBER) for sampler in (often, seldom)]
        assert min(own) > 0
        if name == "total_variation":
            own = [each + TOTAL_VARIATION for each in own]  # of the noise of a step
        found = last.plan.errors(50)[name]
        assert found == pytest.approx(150 * own[0] + 30 * own[1])


def test_caveats_of_earlier_runs_are_told():
    plan = planned(FullBatch(), 3, PrivacyBudget(50.0, 1e-5), 30.0)
    shown = PrivacyReport(plan.spent(3), 3, plan, True, repetition=True)
    later = str(report(FullBatch(), 2, PrivacyBudget(50.0, 1e-5).after(shown), 30.0))
    assert "Earlier run: Reproducible run" in later
    assert "Earlier run: repetition=True" in later


model = mean_of(3)


def driver(budget, **options):
    return dpsvi(model, AutoDelta, optax.sgd(1e-3), estimator=vanilla(), budget=budget,
                 secret_key=7, repetition=True, **options)  # fmt: skip


@pytest.mark.extended
def test_a_run_after_another_resumes_with_its_budget_alone():
    x, key, high = jnp.ones(50), jax.random.key(0), PrivacyBudget(1.0, 1e-5)
    first = driver(PrivacyBudget(0.7, 1e-5)).run(key, 5, x, progress_bar=False)
    svi, alone = driver(high.after(first.privacy), num_steps=6), driver(high, num_steps=6)
    begun = svi.run(key, 3, x, progress_bar=False).state
    ended = svi.run(key, 3, x, init_state=begun, progress_bar=False)
    assert 0.99 < svi.privacy(ended.state).epsilon == ended.privacy.epsilon <= 1.0
    without = dpsvi(model, AutoDelta, optax.sgd(1e-3), estimator=vanilla(), noise_multiplier=40.0)
    calls = [(lambda: svi.privacy(alone.run(key, 3, x, progress_bar=False).state), 0)]
    for other in (alone, without):
        calls += [
            (lambda o=other: o.run(key, 3, x, init_state=begun, progress_bar=False), 1),
            (lambda o=other: o.privacy(begun), 1),
        ]
    for call, number in calls:
        with pytest.raises(BudgetError, match=f"state has a budget with {number} earlier runs"):
            call()


@pytest.mark.full
def test_sweeps_and_chains_count_earlier_runs_and_have_other_noise():
    x, key, high = jnp.ones(50), jax.random.key(0), PrivacyBudget(1.0, 1e-5)
    states = [driver(PrivacyBudget(0.7, 1e-5), num_steps=5).init(key, x)]
    first = driver(PrivacyBudget(0.7, 1e-5)).run(key, 5, x, progress_bar=False).privacy
    states += [driver(high.after(first), num_steps=5).init(key, x) for _ in range(2)]
    keys = [str(jax.random.key_data(state.secret_key)) for state in states]
    assert keys[0] != keys[1] == keys[2]  # and can be repeated
    found = driver(high.after(first)).sweep(jax.random.split(key, 2), 3, x, epsilon=[0.9, 1.0])
    assert [round(each.epsilon, 2) for each in found.privacy] == [0.9, 0.9, 1.0, 1.0]
    assert len(high.after(*found.privacy).earlier) == 5
    mcmc = dpmcmc(SGLD(model), num_warmup=2, num_samples=3, num_chains=2, budget=high.after(first))
    mcmc.run(key, x)
    assert 0.99 < mcmc.privacy.epsilon <= 1.0
    assert "1 earlier" in str(mcmc.privacy)


def test_delta_is_found_from_the_number_of_records():
    budget = PrivacyBudget(1.0)
    assert budget.delta is None and "by default" in str(budget)
    assert budget.for_records(1000).delta == 1000**-1.1
    assert budget.for_records(3).delta == 0.01
    assert PrivacyBudget(1.0, 1e-5).for_records(1000).delta == 1e-5
