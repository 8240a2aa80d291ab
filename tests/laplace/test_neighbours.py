"""One record changes what a release adds up by at most 1, through the step of a whole run."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hostile_models import (
    MODELS,
    hostile_records,
    ordinary_records,
    problem_of,
    random_request,
)

from numpyro_dp import Privacy
from numpyro_dp.laplace.guess import first_guess
from numpyro_dp.laplace.schedule import schedule
from numpyro_dp.laplace.stages import Run, Stages
from numpyro_dp.laplace.tail import has_tail
from numpyro_dp.posterior.prior import read_prior
from numpyro_dp.privacy.mechanism.staged import StagedGaussian, asking
from numpyro_dp.run.settings import RunSettings
from numpyro_dp.samplers import FullBatch

ROUNDING, N = 1 + 1e-5, 20


def step_of(model, args):
    """Compiled ``(request, release, record arrays) -> released sum`` without noise."""
    outcomes = problem_of(model, args).outcomes
    prior = read_prior(outcomes, jax.random.key(0))
    plan = schedule(1.0, outcomes.size, N, has_tail(outcomes), robust=True)
    settings = RunSettings(
        clip_norm=1.0, sampler=FullBatch(),
        privacy=Privacy(mechanism=StagedGaussian(), noise_multiplier=1.0, secret_key=3,
        repetition=True),
    )  # fmt: skip
    guess = first_guess(prior, {}, jax.random.key(0))
    driver = Stages(settings, outcomes, guess.groups, robust=True)
    run = Run(prior, plan, guess, robust=True)
    state = driver.start(jax.random.key(1), run, args, {}).opened
    session = driver._session(args, {})
    quiet = state._replace(noise_multiplier=jnp.zeros(()))

    @jax.jit
    def released(request, arrays):
        asked = quiet.mechanism_state._replace(memory=asking(quiet.mechanism_state.memory, 1.0))
        now = quiet._replace(optim_state=(request, quiet.optim_state[1]), mechanism_state=asked)
        return session._step(now, session.rows(arrays, {}))[1].released.total

    return released, outcomes.size


def change(one, other):
    leaves = [np.asarray(one[n], np.float64) - np.asarray(other[n]) for n in one]
    return np.sqrt(sum((leaf**2).sum() for leaf in leaves))


@pytest.mark.full
@pytest.mark.parametrize("name", ["two sites", "bernoulli", "poisson", "weighted, known size"])
def test_a_record_changes_the_sum_by_at_most_1(name):
    """Numbers by which outcomes are simulated stay with the other records: their keys are i.i.d."""
    model, kinds, _ = MODELS[name]
    released, size = step_of(model, ordinary_records(kinds, N, 0))
    rng, largest = np.random.default_rng(4), 0.0
    for trial in range(12):
        arrays = hostile_records(kinds, N, trial)
        request = random_request(size, trial % 3 == 0, rng)
        whole = released(request, arrays)
        assert all(np.isfinite(leaf).all() for leaf in whole.values())
        for who in range(0, N, 3):
            without = tuple(np.array(array) for array in arrays)
            without[0][who] = np.nan  # x of NaN: the record counts as 0
            moved = change(whole, released(request, without))
            assert moved <= ROUNDING
            largest = max(largest, moved)
    assert largest > 0.5
