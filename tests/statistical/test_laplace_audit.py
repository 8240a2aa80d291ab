"""A white-box audit of all releases of DPLaplace, by the sum of all releases."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree
from models import logistic

from numpyro_dp import Privacy, PrivacyBudget, secret_key
from numpyro_dp.audit import _distinguished
from numpyro_dp.core import MechanismState
from numpyro_dp.laplace.guess import FirstGuess
from numpyro_dp.laplace.schedule import Kind, Schedule, schedule
from numpyro_dp.laplace.shells import SHELLS, WEIGHTS
from numpyro_dp.laplace.signal import Request
from numpyro_dp.laplace.stages import Run, Stages
from numpyro_dp.model.density import Model
from numpyro_dp.model.outcomes import read_outcomes
from numpyro_dp.model.public import declare
from numpyro_dp.model.structure import read_model
from numpyro_dp.posterior.prior import read_prior
from numpyro_dp.privacy.mechanism.staged import StagedGaussian, asking
from numpyro_dp.run.settings import RunSettings
from numpyro_dp.run.state import plan_for, spent_by
from numpyro_dp.samplers import FullBatch

DRAWS = 100_000
FEW = 25_000  # are enough to find noise that is too small by far
BUDGET = PrivacyBudget(1.0, 0.02)


model = logistic()


def records(canary):
    """The canary's score, curvature, power, loss and variance reach their bounds 1, 3, 1, 6, 1."""
    rng = np.random.default_rng(1)
    x = np.concatenate([rng.normal(size=(7, 2)), np.zeros((7, 1))], axis=1)
    last = [0.0, 0.0, 6.0] if canary else [np.nan] * 3
    x = jnp.asarray(np.concatenate([x, [last]]), jnp.float32)
    return x, jnp.asarray([0, 1, 1, 0, 1, 0, 1, 1])


def worlds(noise_factor, draws):
    """The best statistic of all releases, without and with the canary; and the claim."""
    args = records(True)
    structure = read_model(model, args, {}, None, declare())
    shared = structure.layout.rows(args, {}).shared
    outcomes = read_outcomes(Model(model, structure), shared)
    settings = RunSettings(clip_norm=1.0, sampler=FullBatch(), budget=BUDGET,
    privacy=Privacy(secret_key=2, mechanism=StagedGaussian(), repetition=True))  # fmt: skip
    plan = schedule(1 / plan_for(settings, 8, 1).noise_multiplier, 3, 8, robust=True)
    early = (
        (0.0, 0.0, 0.01, 0.0, 0.0, 0.0, 0.0),
        (0.02, 0.03, 0.0, 0.0, 0.0, 0.0, 0.0),
    )  # so few records would not get these
    plan = Schedule(plan.mu, (Kind.SIZE, Kind.SCALES, *plan.kinds), (*early, *plan.parts))
    unseen = (np.zeros((0, 3)),)
    guess = FirstGuess(
        np.ones(3), np.zeros(3, int), np.zeros(3, int), unseen, lambda *_: (1.0, np.ones(3)),
        lambda *_: np.zeros(3), lambda *_: np.ones(1),
    )  # fmt: skip
    driver = Stages(settings, outcomes, guess.groups, True)
    prior = read_prior(outcomes, jax.random.key(0))
    state = driver.start(jax.random.key(1), Run(prior, plan, guess, True), args, {})
    claim = spent_by(driver.settings, state, len(plan.shares)).epsilon
    session, state = driver._session(args, {}), state.opened
    rows = [session.rows(records(canary), {}) for canary in (False, True)]

    def released(state, rows, release):
        request = Request(
            jnp.asarray(int(plan.kinds[release])), jnp.zeros(3), jnp.zeros((3, 3)), jnp.eye(3),
            jnp.asarray([1.0, 3.0, 1.0]), jnp.asarray(plan.weights(release), jnp.float32),
            jnp.asarray([np.linspace(0.2, 1, SHELLS + 1), WEIGHTS], jnp.float32),
        )  # fmt: skip
        state = state._replace(
            optim_state=(request, state.optim_state[1]),
            mechanism_state=MechanismState(
                state.mechanism_state.clip_norm,
                asking((jnp.zeros((), jnp.int32),) * 2, plan.shares[release]),
            ),
        )
        new, step = session._step(state, rows)
        return new, ravel_pytree(step.released.total)[0]

    quiet = state._replace(noise_multiplier=jnp.zeros(()))
    directions = []
    for release in range(len(plan.shares)):
        without, with_it = (released(quiet, world, release)[1] for world in rows)
        directions.append(with_it - without)
        # The room for rounding. The excess of the last stage is 0, as both outcomes have one norm.
        largest = np.sqrt(1 - plan.weights(release)[3] ** 2)
        assert jnp.linalg.norm(directions[-1]) == pytest.approx(largest, rel=0.01)

    noise = state.noise_multiplier * noise_factor

    def score(key, world):
        now, total = state._replace(secret_key=key, noise_multiplier=noise), 0.0
        for release, share in enumerate(plan.shares):
            new, found = released(now, world, release)
            now = now._replace(secret_key=new.secret_key)
            total += share * (found @ directions[release])
        return total

    keys = jax.random.split(secret_key(9), (2, draws))
    found = [np.asarray(jax.jit(jax.vmap(functools.partial(score, world=world)))(own))
             for world, own in zip(rows, keys, strict=True)]  # fmt: skip
    return *found, claim


@pytest.mark.slow
def test_all_releases_are_as_private_as_claimed_and_no_more():
    without, with_canary, claim = worlds(1.0, DRAWS)
    assert 0.98 < claim <= BUDGET.epsilon
    bound = _distinguished(without, with_canary, BUDGET.delta, 0.95)
    assert 0.7 * claim < bound <= claim
    # The audit finds too little noise.
    without, with_canary, claim = worlds(0.7, FEW)
    assert _distinguished(without, with_canary, BUDGET.delta, 0.95) > claim
