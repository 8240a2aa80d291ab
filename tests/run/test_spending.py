"""What a run adds is never less noise than what it accounts for."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flat import dpsvi
from gaussian import gaussian
from models import mean_of
from numpyro.infer.autoguide import AutoDelta

from numpyro_dp import PrivacyBudget
from numpyro_dp.privacy.accounting.spent import epsilon_spent
from numpyro_dp.privacy.plan import make_plan
from numpyro_dp.samplers import FixedSize, FullBatch, Poisson

model = mean_of(plate="rows")


def driver(sampler, **options):
    return dpsvi(model, AutoDelta, optax.sgd(0.1), sampler=sampler, **options)


@pytest.mark.parametrize("wanted", [0.7, 1.1, 1.3, np.pi, 1 + 2.0**-40, 1 + 2.0**-23, 1e-3, 2e3])
def test_noise_multipliers_are_rounded_up(wanted):
    svi = driver(FullBatch(), noise_multiplier=wanted)
    state = svi.init(jax.random.key(0), jnp.ones(5))
    found = float(state.noise_multiplier)
    assert state.noise_multiplier.dtype == jnp.float32
    assert wanted <= found <= wanted * (1 + 2.0**-23)


class Inexact(FullBatch):
    """Batches whose distribution is a little off, and which now and then fail."""

    def total_variation(self, num_examples):
        return 1e-7

    def failure_prob(self, num_examples):
        return 2e-7


def test_what_batches_do_beside_the_event_is_paid_for_in_every_step():
    mechanism = functools.partial(gaussian, 1.0)
    budget = PrivacyBudget(2.0, 1e-5)
    plan = make_plan(Inexact(), 50, 4, mechanism, budget=budget, noise_multiplier=None,
                     accountant=None)  # fmt: skip
    beside = {"total_variation": 4e-7, "failure_prob": 8e-7}
    paid = epsilon_spent(plan.event(4), 1e-5, "add_or_remove_one", **beside)
    assert plan.spent(4).epsilon == pytest.approx(paid.epsilon, rel=1e-6)
    assert 0.98 * 2 < paid.epsilon <= 2
    for name in beside:  # each of them costs something
        less = epsilon_spent(plan.event(4), 1e-5, "add_or_remove_one", **beside | {name: 0.0})
        assert less.epsilon < 0.998 * paid.epsilon


def test_replacing_a_record_of_a_sample_costs_more():
    """How much more with full batches is in the contracts of mechanisms."""
    noise = []
    for relation in ("add_or_remove_one", "replace_one"):
        svi = driver(Poisson(0.2), budget=PrivacyBudget(1.0, 1e-5, relation), num_steps=3)
        noise.append(float(svi.init(jax.random.key(0), jnp.ones(50)).noise_multiplier))
    assert noise[1] > 1.2 * noise[0]


@pytest.mark.full
def test_a_run_with_batches_of_fixed_size_is_reported_for_the_relation_that_has_a_bound():
    svi = driver(FixedSize(5), noise_multiplier=3.0)
    privacy = svi.run(jax.random.key(0), 2, jnp.ones(50), progress_bar=False).privacy
    assert privacy.relation == "replace_one"
    assert 0 < privacy.epsilon < 100
