"""Directions in which no record has a score keep their prior."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from hostile_models import problem_of

from numpyro_dp import DPLaplace, Privacy, PrivacyBudget
from numpyro_dp.laplace import curvature, decode
from numpyro_dp.laplace.guess import first_guess
from numpyro_dp.laplace.stages import Run
from numpyro_dp.posterior.prior import read_prior

N, TEAMS = 3000, 6
RNG = np.random.default_rng(0)
X = RNG.normal(size=(N, 2)).astype(np.float32)
X[:, 0] = 1
FIRST, SECOND = (RNG.integers(TEAMS, size=N).astype(np.int32) for _ in range(2))


def normal(name, *shape):
    return numpyro.sample(name, dist.Normal(0, 1).expand(shape).to_event(len(shape)))


def outcome(logits, y):
    with numpyro.plate("rows", len(logits)):
        family = dist.Categorical if jnp.ndim(logits) > 1 else dist.Bernoulli
        numpyro.sample("y", family(logits=logits), obs=y)


def games(first, second, y):
    skill = normal("skill", TEAMS)
    outcome(skill[first] - skill[second], y)


def intercept(group, other, y):
    outcome(normal("level") + normal("a", TEAMS)[group] + normal("b", TEAMS)[other], y)


def column(x, group, y):
    outcome(x @ normal("w", 2) + normal("b", TEAMS)[group], y)


def slopes(x, y):
    outcome(x @ normal("w", 2), y)


def classes(x, y):
    outcome(x @ normal("w", 2, 3), y)


@pytest.mark.parametrize(
    ("model", "args", "numbers"),
    [
        (games, (FIRST, SECOND), [1]),
        (intercept, (FIRST, SECOND), [2]),
        (column, (X, FIRST), [0, 1, 1]),
        (slopes, (X,), [0]),
        (classes, (X,), [2]),
    ],
)
def test_the_model_says_in_which_directions_no_record_has_a_score(model, args, numbers):
    args = *args, np.ones(N, np.int32)
    outcomes = problem_of(model, args).outcomes
    found = first_guess(read_prior(outcomes, jax.random.key(0)), {}, jax.random.key(0)).unseen
    assert [len(each) for each in found] == numbers
    if model is not column:  # whose first column is 1 in these records, as in the first hypothesis
        found = found[:1]
    flat = jnp.asarray(RNG.normal(size=outcomes.size), jnp.float32)
    for row in range(20):
        record = tuple(jnp.asarray(x[row]) for x in args)
        score = np.asarray(outcomes.score(flat, record, {"y": jnp.asarray(1)}))
        for directions in found[:2]:
            np.testing.assert_allclose(directions @ score, 0, atol=1e-5)


def test_released_curvatures_decide_about_a_direction():
    size, noise, rng = 10, 0.2, np.random.default_rng(1)
    way = np.full((1, size), size**-0.5)
    whitening = np.diag(rng.uniform(0.5, 2, size))
    goe = rng.normal(size=(size, size))
    goe = noise * (goe + goe.T) / 2
    inside = np.linalg.solve(whitening, way[0])
    inside /= np.linalg.norm(inside)
    for true, seen in ((np.eye(size) - np.outer(inside, inside), 0), (np.eye(size), 1)):
        found = curvature.evidence_unseen(way, whitening, true + goe, noise)
        half = np.trace(true) / size / 2
        expected = ((seen - half) ** 2 - seen**2) / (2 * noise**2)
        assert found == pytest.approx(expected, abs=3 / noise)
        assert np.sign(found) == np.sign(expected)
    stage = curvature.read_stage(
        np.zeros(size), np.eye(size), whitening, np.eye(size), np.zeros(size), np.eye(size) + goe,
        0.1, noise, unseen=way,
    )  # fmt: skip
    for matrix in (stage.curvature, decode.believed_curvature(stage)):
        np.testing.assert_allclose(matrix @ way[0], 0, atol=1e-8)
    assert way[0] @ stage.curvature_floored @ way[0] > 0


def test_a_direction_counts_as_unseen_until_released_curvatures_say_otherwise():
    ways = np.eye(4)[:1], np.eye(4)[1:2]
    stages = SimpleNamespace(_unseen=ways, _evidence=np.zeros(2), whitening=np.eye(4))
    # With this noise, a stage has log odds of -1.2 for the second direction.
    for count in (2, 2, 1):
        kept = Run._without_scores(stages, np.diag([0.0, 1, 1, 1]), 0.5)
        np.testing.assert_array_equal(kept, np.eye(4)[:count])


def test_each_site_has_its_own_size_if_the_release_is_sure_of_it():
    size, noise, rng = 31, 0.2, np.random.default_rng(2)
    sites = np.arange(size) // 30
    for true, spread in ((np.where(sites, 12.0, 0.1), 0.05), (np.ones(size), 0.3)):
        goe = rng.normal(size=(size, size))
        noisy = np.diag(true) + noise * (goe + goe.T) / 2
        stage = curvature.read_stage(
            np.zeros(size), np.eye(size), np.eye(size), np.eye(size), np.zeros(size), noisy,
            0.1, noise, sites=sites,
        )  # fmt: skip
        np.testing.assert_allclose(np.diag(stage.curvature), true, atol=spread, rtol=0.03)
        assert stage.curvature_error < noise**2 / 10


@pytest.mark.full
@pytest.mark.parametrize(("model", "args"), [(games, (FIRST, SECOND)), (column, (X, FIRST))])
def test_such_directions_keep_their_prior(model, args):
    y = RNG.integers(2, size=N).astype(np.int32)
    driver = DPLaplace(
        model, budget=PrivacyBudget(1.0, 1e-5), privacy=Privacy(secret_key=1, repetition=True)
    )
    posterior = driver.run(jax.random.key(0), *args, y, progress_bar=False)
    draws = posterior.sample(jax.random.key(1), 4000)
    if model is games:
        level = np.mean(draws["skill"], axis=1)
        expected = TEAMS**-0.5
    else:  # prior of w[0] given w[0] + b
        level = np.asarray(draws["w"][:, 0] - np.sum(draws["b"], axis=1))
        expected = np.sqrt(1 + TEAMS)
    assert np.std(level) == pytest.approx(expected, rel=0.05)
