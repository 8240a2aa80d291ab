"""Posteriors from sums of released scores, on scores that are simulated."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from flat import dpsvi
from models import given, mean_of, slopes
from numpyro.infer.autoguide import AutoDiagonalNormal

from numpyro_dp import PrivacyBudget
from numpyro_dp.core import Observation
from numpyro_dp.posterior.from_model import NOISE_INCLUDED
from numpyro_dp.posterior.likelihood import Prior
from numpyro_dp.posterior.moments import averages_of
from numpyro_dp.posterior.scores import scores_likelihood
from numpyro_dp.run.results import score_sums, with_observation


def rows(seed, *shape):
    """Points, shifts and scores of steps that follow no model."""
    rng = np.random.default_rng(seed)
    return tuple(rng.normal(size=shape).astype(np.float32) for _ in range(3))


def sums_of(points, shifts, scores, noise):
    """The sums that a loop would keep of these steps."""
    size = points.shape[1]
    row = jnp.zeros(size)
    like = Observation(row, row, row, row)
    sums = score_sums(like, 0, len(points))

    def step(sums, each):
        index, *seen = each
        return with_observation(sums, index, Observation(*seen, jnp.full(size, noise))), None

    each = jnp.arange(len(points)), *map(jnp.asarray, (points, shifts, scores))
    return jax.lax.scan(step, sums, each)[0]


def simulated(size, tau, rng, steps=1000, width=0.3, strong=0.0):
    """A quadratic likelihood whose truth is drawn from the prior; points follow the noise."""
    basis = np.linalg.qr(rng.normal(size=(size, size)))[0]
    curvature = (basis * np.exp(rng.normal(size=size) * 0.5)) @ basis.T * 50
    curvature += strong * 50 * np.ones((size, size))
    truth = rng.normal(size=size)
    optimum = truth + np.linalg.solve(np.linalg.cholesky(curvature).T, rng.normal(size=size))
    position, points, shifts, scores = np.zeros(size), [], [], []
    rate = 0.5 / (np.linalg.eigvalsh(curvature)[-1] + tau)
    for _ in range(steps):
        shift = width * rng.normal(size=size)
        score = curvature @ (optimum - position - shift) + tau * rng.normal(size=size)
        points.append(position + shift)
        shifts.append(shift)
        scores.append(score)
        position = position + rate * (score - position - shift)
    return truth, sums_of(*(np.asarray(x, np.float32) for x in (points, shifts, scores)), tau)


def posterior(sums, size):
    prior = Prior(np.zeros(size), np.eye(size))
    precision, linear = scores_likelihood(averages_of(sums, np.arange(size)), prior, 1.0)
    covariance = np.linalg.inv(precision + np.eye(size))
    return covariance @ linear, np.sqrt(np.diag(covariance))


@pytest.mark.table
@pytest.mark.parametrize("strong", [0.0, 2.0])
@pytest.mark.parametrize("tau", [1.0, 30.0, 300.0, 3000.0])
def test_intervals_hold_the_truth(tau, strong):
    """Nominal 90 %: between 82 and 98 % of 30 x 6 latents, whatever the noise."""
    rng, size = np.random.default_rng(int(tau + strong)), 6
    held, widths = [], []
    for _ in range(30):
        truth, sums = simulated(size, tau, rng, strong=strong)
        mean, sd = posterior(sums, size)
        held.append(np.abs(truth - mean) < 1.645 * sd)
        widths.append(sd)
    assert 0.82 <= np.mean(held) <= 0.98, (np.mean(held), np.mean(widths))
    if tau == 1.0:
        assert np.mean(widths) < 0.25
    if tau == 3000.0:
        assert np.mean(widths) > 0.85


def test_no_information_gives_the_prior_and_much_gives_the_truth():
    rng = np.random.default_rng(0)
    for size in (1, 2, 10) * 5:
        _, sums = simulated(size, 1e5, rng)
        mean, sd = posterior(sums, size)
        assert (np.abs(mean) < 0.3).all()
        assert (sd > 0.93).all()
    for size in (1, 2):  # few latents
        truth, sums = simulated(size, 10.0, np.random.default_rng(size))
        mean, sd = posterior(sums, size)
        assert (np.abs(truth - mean) < 4 * sd).all()
        assert (sd < 0.5).all()


def test_sums_leave_out_the_first_steps_and_what_is_not_finite_in_them():
    points, shifts, scores = rows(1, 10, 2)
    scores[:3] = np.inf
    sums = sums_of(points, shifts, scores, 1.0)
    assert int(sums.count) == 5
    found = averages_of(sums, np.arange(2))
    np.testing.assert_allclose(found.point, points[5:].mean(0), rtol=1e-5)
    np.testing.assert_allclose(found.score, scores[5:].mean(0), rtol=1e-5)
    np.testing.assert_allclose(found.fresh, np.mean(shifts[5:] ** 2, axis=0), rtol=1e-5)


def test_products_count_from_the_first_step_on_without_what_centres_explain():
    points, shifts, scores = rows(1, 40, 2)
    scores[:3] = np.inf
    moments = averages_of(sums_of(points, shifts, scores, 1.0), np.arange(2)).moments
    for found, half in zip(moments, (slice(3, 20), slice(20, None)), strict=True):
        number = len(points[half])
        assert (found.count, found.dof) == (number, number - 2)
        centres = np.column_stack([np.ones(number), (points - shifts)[half]])
        np.testing.assert_allclose(found.centre, centres.mean(0)[1:], rtol=1e-4, atol=1e-5)
        score, shift = (
            x[half] - centres @ np.linalg.lstsq(centres, x[half], rcond=None)[0]
            for x in (scores, shifts)
        )
        for seen, expected in (
            (found.shift_shift, shift.T @ shift),
            (found.score_shift, score.T @ shift),
            (found.score_score, score.T @ score),
        ):
            np.testing.assert_allclose(seen, expected / number, rtol=1e-4, atol=1e-5)


def test_latents_can_be_left_out_of_the_products():
    steps = rows(2, 40, 3)
    found = averages_of(sums_of(*steps, 1.0), np.array([1, 2]))
    expected = averages_of(sums_of(*(x[:, 1:] for x in steps), 1.0), np.arange(2))
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6), found, expected
    )


def test_runs_without_finite_values_have_no_averages():
    gap, huge = np.full((10, 2), np.nan), np.full((10, 2), 1e30)  # its squares are infinite
    for steps in ((gap, gap, gap), (huge, gap * 0, huge), (huge, huge, gap * 0)):
        sums = sums_of(*(each.astype(np.float32) for each in steps), 1.0)
        assert averages_of(sums, np.arange(2)) is None
    assert averages_of(types.SimpleNamespace(count=0), np.arange(2)) is None


@pytest.mark.full
def test_a_guide_that_is_narrow_before_it_arrives():
    """Steps of 0.1 make a guide narrow within 40 of 300 steps. Later draws show no curvature."""

    x = 3 + jax.random.normal(jax.random.key(1), (1000,))
    svi = dpsvi(mean_of(10), AutoDiagonalNormal, optax.adam(0.1), clip_norm=4.0,
                budget=PrivacyBudget(1.0, 1e-5))  # fmt: skip
    found = [svi.run(jax.random.key(0), 300, x, progress_bar=False) for _ in range(5)]
    summaries = [result.posterior.summary()["mean"] for result in found]
    assert max(each["sd"] for each in summaries) < 0.15
    assert max(abs(each["mean"] - jnp.mean(x)) / each["sd"] for each in summaries) < 4


@pytest.mark.extended
def test_a_parameter_is_fixed_and_latents_have_intervals_with_the_noise():
    def model(x, y):
        noise = numpyro.param("noise", 1.0, constraint=dist.constraints.positive)
        given(lambda x, w: dist.Normal(x @ w, noise), w=slopes())(x, y)

    rng, truth = np.random.default_rng(0), np.array([1.0, -0.5, 2.0])
    x = rng.normal(size=(2000, 3)).astype(np.float32)
    y = (x @ truth + rng.normal(size=2000)).astype(np.float32)

    def draws(epsilon):
        svi = dpsvi(model, AutoDiagonalNormal, optax.adam(0.02), clip_norm=2.0,
                    budget=PrivacyBudget(epsilon, 1e-5), estimator=None)  # fmt: skip
        posterior = svi.run(jax.random.key(0), 400, x, y, progress_bar=False).posterior
        assert posterior.notes[0] == NOISE_INCLUDED
        assert "['noise'] are fixed" in posterior.notes[1]
        return np.asarray(posterior.sample(jax.random.key(1), 4000)["w"])

    prior, known = draws(1e-3), draws(10.0)
    assert np.all(np.abs(prior.mean(0)) < 0.1)
    np.testing.assert_allclose(prior.std(0), 1, rtol=0.05)
    assert np.all(known.std(0) < 0.15)
    assert np.all(np.abs(known.mean(0) - truth) < 4 * known.std(0))
