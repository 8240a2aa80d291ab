"""A state is bound to the records, sampler and clip norm of its run."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flat import dpsvi
from models import mean_of
from numpyro.infer.autoguide import AutoDiagonalNormal

from numpyro_dp import BudgetError, PrivacyBudget, secret_key
from numpyro_dp.mechanisms import LossRelease
from numpyro_dp.run.checkpoint import hash_of
from numpyro_dp.samplers import FixedSize, Poisson

KEY, X, QUIET = jax.random.key(0), jnp.ones(50), {"progress_bar": False}

model = mean_of()


def driver(**changes):
    settings = {"sampler": Poisson(0.2), "noise_multiplier": 5.0} | changes
    return dpsvi(model, AutoDiagonalNormal, optax.sgd(0.1), **settings)


@pytest.fixture(scope="module")
def state():
    return driver(secret_key=3).run(KEY, 3, X, **QUIET).state


@pytest.mark.table
@pytest.mark.full
@pytest.mark.parametrize(("changes", "rows", "field"), [
    ({}, 40, "num_examples=50"),
    ({"sampler": Poisson(0.1)}, 50, "sampler=Poisson"),
    ({"sampler": FixedSize(10)}, 50, "sampler=Poisson"),
    ({"clip_norm": 2.0}, 50, "clip_norm=1.0"),
    ({"loss_release": LossRelease(1.0)}, 50, "loss_release=None"),
])  # fmt: skip
def test_another_setting_is_refused(state, changes, rows, field):
    other = driver(**changes)
    with pytest.raises(BudgetError, match=field):
        other.run(KEY, 2, X[:rows], **QUIET, init_state=state)
    with pytest.raises(BudgetError, match=field):
        other.update(state, X[:rows])


@pytest.mark.full
def test_other_records_are_refused(state):
    """Also by a state from a pickle."""
    other = driver(secret_key=3, repetition=True)
    changed = X.at[7].add(1e-3)
    for given in (state, pickle.loads(pickle.dumps(state))):
        with pytest.raises(ValueError, match="not the records of the run"):
            other.run(KEY, 2, changed, **QUIET, init_state=given)
    wide = np.linspace(0, 1, 50)  # float64, which JAX rounds to float32
    assert hash_of((wide,), "00") == hash_of((jnp.asarray(wide),), "00")
    large = np.ones((50_000, 100), np.float32)  # more than 16 MiB: 1,000 rows are compared
    all_, some = hash_of((large,), "00"), hash_of((large,), "00", most=1000)
    large[123] = 0
    assert hash_of((large,), "00", most=1000) == some
    assert hash_of((large,), "00") != all_
    large[::2] = 0
    assert hash_of((large,), "00", most=1000) != some


@pytest.mark.full
def test_a_resumed_run_says_what_it_spent_in_all(state):
    svi = driver()
    assert svi.privacy(state).num_steps == 3
    result = svi.run(KEY, 2, X, **QUIET, init_state=state)
    params, new, losses = result
    assert set(params) == {"auto_loc", "auto_scale"} and losses is None
    assert int(new.step) == result.privacy.num_steps == 5
    assert result.privacy.reproducible
    again = svi.privacy(new)
    assert again.epsilon == result.privacy.epsilon > svi.privacy(state).epsilon
    with pytest.raises(ValueError, match="Call update first"):
        svi.privacy(svi.init(KEY, X))
    other = driver(noise_multiplier=None, budget=PrivacyBudget(0.1, 1e-5), num_steps=2)
    with pytest.raises(BudgetError, match="budget=None"):
        other.update(state, X)


def test_noise_and_batches_have_no_key_in_common_with_a_public_key():
    key = secret_key(5)
    state = driver(secret_key=key).init(key, X)
    keys = [state.rng_key, state.secret_key, state.sampler_state.key]
    keys += [jax.random.split(k)[i] for k in keys for i in (0, 1)]
    assert len({jax.random.key_data(k).tobytes() for k in keys}) == len(keys)


@pytest.mark.full
def test_no_step_beyond_the_plan():
    svi = driver(noise_multiplier=None, budget=PrivacyBudget(1.0, 1e-3), num_steps=5)
    more = {"init_state": svi.run(KEY, 3, X, **QUIET).state, **QUIET}
    with pytest.raises(BudgetError, match="num_steps <= 2"):
        svi.run(KEY, 3, X, **more)
    assert svi.run(KEY, 2, X, **more).privacy.num_steps == 5
