"""The decode on releases that a Gaussian linear model made: no records, no JAX."""

import dataclasses
import importlib.util
import os
import pathlib
import types

import numpy as np
import pytest

from numpyro_dp.laplace import curvature, schedule
from numpyro_dp.laplace import decode as decoding
from numpyro_dp.laplace.curvature import denoise_scales, first_whitening, next_whitening, read_stage
from numpyro_dp.laplace.pattern import group_sites, pairs_of, power_of
from numpyro_dp.posterior import algebra, likelihood
from numpyro_dp.posterior.likelihood import matrix_error

N = 2_000
BUDGET_SHARES = np.array([0.05, 0.06, 0.08, 0.11, 0.15, 0.20, 0.35])
CURVATURE_SHARES = np.array([0.7, 0.7, 0.6, 0.5, 0.5, 0.4, 0.3])
NORMAL_90 = 1.6448536269514722


def goe(size, rng):
    """Standard deviation 1 on the diagonal and 1 / sqrt 2 off it."""
    upper = np.triu(rng.normal(size=(size, size)), 1) / np.sqrt(2)
    return upper + upper.T + np.diag(rng.normal(size=size))


def precision_of(size, rng, kind="full"):
    if kind == "diagonal":
        return np.diag(1 / rng.uniform(0.5, 2, size) ** 2)
    root = rng.normal(size=(size, 2 * size)) / np.sqrt(2 * size)
    return root @ root.T + 0.2 * np.eye(size)


def truth(size, rng, kind="full"):
    """Prior, theta, the true curvature of N records, and the optimum of their data."""
    prior = likelihood.Prior(rng.normal(size=size), precision_of(size, rng, kind))
    theta = rng.multivariate_normal(prior.mean, prior.covariance)
    mixing = np.eye(size) + 0.4 * rng.normal(size=(size, size)) / np.sqrt(size)
    curvature = 0.25 * N * mixing @ mixing.T
    return prior, theta, curvature, rng.multivariate_normal(theta, np.linalg.inv(curvature))


def releases(size, mu, index):
    """Noise of score, curvature and power in one stage of a run with Gaussian privacy mu."""
    radius = np.sqrt(size) + 1.2
    clip, curvature_clip = 1.2 * radius / np.sqrt(N), 1.2 * radius**2 / N
    stage = mu * np.sqrt(BUDGET_SHARES[index])
    part = CURVATURE_SHARES[index]
    score = stage * np.sqrt(0.98 * (1 - part))
    return clip / score, curvature_clip / (stage * np.sqrt(0.98 * part)), clip**2 / (0.14 * stage)


def stage_at(size, curvature=None, noise=(0.1, 1e-7), covariance=None, mean=None, score=None,
             whitening=None, template=None):  # fmt: skip
    """A stage, in coordinates that are white and with a score of 0 unless given."""
    one, zero = np.eye(size), np.zeros(size)
    defaults = (mean, zero), (covariance, one), (whitening, one), (template, one), (score, zero)
    given = (default if value is None else value for value, default in defaults)
    return read_stage(*given, one if curvature is None else curvature, *noise)


def capped(mean, covariance, prior):
    """The covariance of the posterior under the prior of the decode, which is never wider."""
    precision, _ = likelihood.released_likelihood(mean, covariance, prior)
    return np.linalg.inv(precision + prior.precision)


def run(size, mu, rng, kind="full", watch=None, rounds=7):
    """Seven stages on releases of a linear model; returns the prior, theta, mean and covariance."""
    prior, theta, curvature, optimum = truth(size, rng, kind)
    guess = np.diag(np.diag(curvature) * rng.uniform(0.7, 1.4, size))
    whitening = first_whitening(prior, guess)
    template = whitening @ guess @ whitening
    mean, covariance, stages = prior.mean, prior.covariance, ()
    for index in range(rounds):
        score_noise, curvature_noise, power_noise = releases(size, mu, index)
        whitened = whitening @ curvature @ whitening
        released = types.SimpleNamespace(
            score=whitening @ curvature @ (optimum - mean) + score_noise * rng.normal(size=size),
            curvature=whitened + curvature_noise * goe(size, rng),
            power=np.trace(whitened) + power_noise * rng.normal(),
        )
        stage = read_stage(
            mean, covariance, whitening, template, released.score, released.curvature,
            score_noise, curvature_noise,
        )  # fmt: skip
        stages = decoding.with_discrepancies((*stages, stage))
        kappa = decoding.sampling_ratio(stages[-1], released.power, power_noise)
        begin = mean, covariance
        mean, covariance = decoding.decode_stages(prior, stages, kappa, begin)
        whitening = next_whitening(stages[-1], prior, kappa)
        if watch:
            watch(prior, released, power_noise, stages, kappa, begin, mean, covariance, whitening)
        template = whitening @ stages[-1].curvature_floored @ whitening
    return prior, theta, mean, capped(mean, covariance, prior)


def score_of(found):
    """Coverage of 90 % intervals, mean square of standardised errors and mean log density."""
    _, theta, mean, covariance = found
    variance = np.diag(covariance)
    square = (theta - mean) ** 2 / variance
    log_density = -(square + np.log(2 * np.pi * variance)) / 2
    return np.mean(square < NORMAL_90**2), np.mean(square), np.mean(log_density)


@pytest.mark.extended
def test_intervals_cover_and_budgets_pay():
    rng = np.random.default_rng(1)
    log_scores = []
    for mu, repeats in ((0.1, 200), (1.0, 50)):
        scores = [score_of(run(4, mu, rng)) for _ in range(repeats)]
        coverage, square, log_score = np.mean(scores, axis=0)
        assert 0.80 < coverage < 0.98, mu
        # With half of the noise the intervals still cover .83, but the square is 1.5.
        assert 0.6 < square < 1.25, mu
        log_scores.append(log_score)
    assert log_scores[0] + 0.2 < log_scores[1]


def exact_stages(rng, size=3, kappa=0.6):
    """Three stages with a known curvature, and the posterior from the joint normal."""
    prior, _, curvature, optimum = truth(size, rng)
    stages, precision, linear = [], np.zeros((size, size)), np.zeros(size)
    for noise in (2.0, 0.7, 1.3):
        whitening = first_whitening(prior, curvature * rng.uniform(0.3, 3))
        whitened = whitening @ curvature @ whitening
        mean = optimum + 0.1 * rng.normal(size=size)
        score = whitening @ curvature @ (optimum - mean) + noise * rng.normal(size=size)
        stages.append(
            stage_at(
                size, whitened, (noise, 1e-7), prior.covariance, mean, score, whitening, whitened
            )
        )
        slope = whitening @ curvature / noise
        precision += slope.T @ slope
        linear += slope.T @ (score / noise + slope @ mean)
    # What the stages say of the optimum, widened by the sampling of the optimum around theta.
    spread = np.linalg.inv(precision) + kappa * np.linalg.inv(curvature)
    total = np.linalg.inv(np.linalg.inv(spread) + prior.precision)
    pull = np.linalg.solve(spread, np.linalg.solve(precision, linear))
    return prior, tuple(stages), kappa, total @ (pull + prior.precision @ prior.mean), total


def test_a_known_curvature_gives_the_exact_posterior():
    rng = np.random.default_rng(8)
    for _ in range(5):
        prior, stages, kappa, exact_mean, exact = exact_stages(rng)
        mean, covariance = decoding.decode_stages(prior, stages, kappa)
        widths = np.sqrt(np.diag(exact))
        np.testing.assert_allclose((mean - exact_mean) / widths, 0, atol=1e-3)
        np.testing.assert_allclose(covariance / np.outer(widths, widths),
                                   exact / np.outer(widths, widths), atol=1e-3)  # fmt: skip


def test_the_error_covariance_is_that_of_simulated_errors():
    rng = np.random.default_rng(9)
    size, repeats = 2, 40_000
    _, stages, _, mean, covariance = exact_stages(rng, size)
    changes = {"curvature_error": 0.5, "template_scale_variance": 0.3}
    changes |= {"discrepancy": 0.4, "score_noise": 0.5}
    stages = tuple(
        dataclasses.replace(stage, template=stage.template + np.diag([0.4, 0]), **changes)
        for stage in stages[:2]
    )
    covariance = 0.01 * covariance / np.max(covariance)
    newest = stages[-1]
    theta = rng.multivariate_normal(mean, covariance, size=repeats)

    def ensemble(variance):
        upper = np.triu(rng.normal(size=(repeats, size, size)), 1) / np.sqrt(2)
        diagonal = rng.normal(size=(repeats, size))[:, :, None] * np.eye(size)
        return np.sqrt(variance) * (upper + upper.transpose(0, 2, 1) + diagonal)

    size_error = np.sqrt(newest.template_scale_variance) * rng.normal(size=(repeats, 1, 1))
    shared = ensemble(newest.curvature_error) + size_error * newest.template
    errors = []
    for stage in stages:
        away = theta - stage.mean
        common = np.einsum("rab,rb->ra", shared, away @ newest.unwhitening) @ newest.unwhitening
        own = np.einsum("rab,rb->ra", ensemble(stage.discrepancy), away @ stage.unwhitening)
        own = own + stage.score_noise * rng.normal(size=(repeats, size))
        errors.append(common + own @ stage.unwhitening)
    errors = np.concatenate(errors, axis=1)
    simulated = errors.T @ errors / repeats
    found = decoding._error_covariance(stages, mean, covariance)
    widths = np.sqrt(np.diag(simulated))
    difference = (found - simulated) / np.outer(widths, widths)
    np.testing.assert_allclose(difference, 0, atol=0.04)
    assert np.max(np.abs(found[:size, size:] / np.outer(widths[:size], widths[size:]))) > 0.2


def test_without_information_the_prior_is_left():
    rng = np.random.default_rng(2)
    for kind in ("full", "diagonal") * 10:
        prior, _, mean, covariance = run(4, 1e-4, rng, kind)
        ratios = np.linalg.eigvals(prior.precision @ covariance).real
        assert np.all((ratios > 0.95) & (ratios < 1 + 1e-9))
        assert np.all(np.abs(mean - prior.mean) < 0.3 * np.sqrt(np.diag(prior.covariance)))


@pytest.fixture(scope="module")
def reference():
    """The project's NumPy reference, which is not part of the package."""
    beside = pathlib.Path(__file__).parents[3] / "shared" / "reference"
    folder = pathlib.Path(os.environ.get("NUMPYRO_DP_REFERENCE", beside))
    path = folder / "staged_gaussian.py"
    if not path.is_file():
        pytest.skip("The reference is not here: set NUMPYRO_DP_REFERENCE to its folder.")
    spec = importlib.util.spec_from_file_location("staged_gaussian", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_agrees_with_the_reference(reference, monkeypatch):
    monkeypatch.setattr(decoding, "believed_curvature", lambda stage: stage.curvature)
    # Ours is uniform in the logarithm of the spread, where the reference is in the spread itself.
    monkeypatch.setattr(np, "linspace", np.geomspace)
    theirs, settings, compared = [], reference.DEFAULT, []

    def close(ours, other):
        np.testing.assert_allclose(ours, other, rtol=1e-6, atol=1e-6 * np.max(np.abs(other)))

    def watch(prior, released, power_noise, stages, kappa, begin, mean, covariance, whitening):
        if len(stages) == 1:
            theirs.clear()
        new = stages[-1]
        denoised, error, scale_variance = reference.denoise_curvature(
            released.curvature, new.template, new.curvature_noise, settings.curvature_scale_sd
        )
        close(new.curvature, new.unwhitening @ denoised @ new.unwhitening)
        close([new.curvature_error, new.template_scale_variance], [error, scale_variance])
        values, vectors = reference.floored_eigen(denoised)
        inverse = np.linalg.inv(new.whitening)
        floored = inverse @ (vectors * values) @ vectors.T @ inverse
        theirs.append(
            reference.Stage(
                new.mean, new.covariance, new.whitening, inverse, inverse @ released.score,
                new.score_noise, released.curvature, new.curvature_noise, new.template,
                scale_variance, inverse @ denoised @ inverse, floored, error,
            )
        )  # fmt: skip
        reference.update_discrepancies(theirs, settings.first_discrepancy)
        for ours, other in zip(stages[:-1], theirs[:-1], strict=True):
            close(ours.discrepancy, other.discrepancy)
        # Where ours differs: the reference assumes of the newest stage what was measured before.
        theirs[-1] = dataclasses.replace(theirs[-1], discrepancy=new.discrepancy)
        close(new.curvature_floored, floored)
        silent = types.SimpleNamespace(normal=lambda: 0.0)
        own = reference.release_kappa(
            released.power, np.sqrt(power_noise), 1.0, theirs[-1], settings.kappa_floor, silent
        )
        slope = algebra.trace_of(new.whitening, new.curvature_floored)
        if settings.kappa_floor < own < 1:  # ours is more cautious if noise is large
            close(kappa, min(1.0, own + (power_noise / slope) ** 2 / decoding.CLIPPED))
        sds = np.sqrt(np.diag(prior.covariance))
        their_mean, their_covariance, _ = reference.decode(
            prior.mean, sds, theirs, kappa, np.ones(len(theirs)), begin
        )
        own_mean, own_covariance = decoding._decoded(
            prior, stages, stages[-1].curvature_floored / kappa, begin
        )
        close(own_mean, their_mean)
        close(own_covariance, their_covariance)
        # Ours raises eigenvalues to the ridge, where the reference adds it to each of them.
        values, vectors = np.linalg.eigh(new.whitening @ new.curvature_floored @ new.whitening)
        ridge = 1.5 * np.sqrt(new.curvature_error * len(values))
        raised = inverse @ (vectors * np.maximum(values, ridge)) @ vectors.T @ inverse
        power = 0.4 + 0.1 / (1 + (2 * ridge / values.mean()) ** 2)
        known = dataclasses.replace(theirs[-1], curvature=raised)
        own_settings = dataclasses.replace(settings, ridge=0.0, whitening_power=power)
        close(whitening, reference.next_whitening(known, sds, kappa, own_settings))
        compared.append(len(stages))

    rng = np.random.default_rng(3)
    for size, mu in [(1, 1.0), (4, 0.1), (4, 1.0), (4, 10.0), (9, 0.5), (15, 2.0)] * 3:
        run(size, mu, rng, "diagonal", watch)
    assert len(compared) == 18 * 7


def test_scales_agree_with_the_reference(reference):
    for noise_sd in (0.01, 0.3, 1.0):
        scales = np.linspace(-2, 3, 21) * max(noise_sd, 0.3)
        expected = reference.denoise_scales(scales, noise_sd)
        np.testing.assert_allclose(denoise_scales(scales, noise_sd), expected, rtol=1e-6)
    assert denoise_scales(np.array([0.0]), 1e4) == pytest.approx(1.0, rel=1e-3)


@pytest.fixture
def last_stages():
    """Prior, seven stages that agree, kappa and begin, and what they give."""
    kept = []
    run(4, 5.0, np.random.default_rng(4), "diagonal", lambda *values: kept.append(values))
    prior, _, _, stages, kappa, begin, mean, covariance, _ = kept[-1]
    return prior, stages, kappa, begin, mean, covariance


def test_a_stage_that_contradicts_later_ones_is_left_out_and_the_newest_stands(last_stages):
    prior, stages, kappa, begin, _, covariance = last_stages
    wrong = dataclasses.replace(stages[3], score=stages[3].score + 20 * np.abs(stages[3].score))
    newest = dataclasses.replace(stages[-1], score=stages[-1].score + 1e4)
    for changed, kept in (
        ((*stages[:3], wrong, *stages[4:]), (*stages[:3], *stages[4:])),
        ((*stages[:-1], newest), (newest,)),
    ):
        found, expected = (
            decoding.decode_stages(prior, each, kappa, begin) for each in (changed, kept)
        )
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_array_equal(one, other)
        if len(kept) > 1:
            assert np.trace(found[1]) > np.trace(covariance)


def test_curvature_along_a_long_step_is_put_back():
    size = 12
    step = np.full(size, size**-0.5)
    true = np.eye(size) - 0.8 * np.outer(step, step)  # curvature falls along the way alone
    noise, rng = 0.15, np.random.default_rng(0)

    def stages(spread):
        """Before the step is looked at and after it, and the curvatures along it."""
        released = true + noise * goe(size, rng)
        before = stage_at(size, released, (0.1, noise), spread * np.eye(size), step)
        after = curvature.with_steps(before, step)
        return after, *(step @ stage.curvature @ step for stage in (before, after))

    narrow = [stages(0.001) for _ in range(40)]
    before, after = np.mean([each[1:] for each in narrow], axis=0)
    assert before > 0.45
    assert after == pytest.approx(0.2, abs=0.12)
    assert np.all(np.linalg.eigvalsh(narrow[-1][0].curvature_floored) > 0)
    _, before, after = stages(1.0)  # the step is inside of the uncertainty
    assert after == pytest.approx(before)


def test_the_excess_of_observed_outcomes():
    ratio, error = decoding.excess_ratio(10.0, 5.0, (0.0, 3.0), 2.0, 0.0)
    assert ratio == 1.5
    assert error == pytest.approx(np.sqrt(9 + 4 * 10) / 10)
    # Draws that are far from the truth explain a part, and leave more doubt.
    doubtful = decoding.excess_ratio(10.0, 5.0, (0.0, 3.0), 2.0, 0.04)
    assert doubtful == pytest.approx((1.38, np.sqrt(error**2 + 0.04 + 0.12**2)))
    # A power below its noise does not make the ratio large.
    ratio, error = decoding.excess_ratio(-1.0, 5.0, (2.0, 3.0), 2.0, 0.0)
    assert 1 < ratio < 1 + 2 * error


def test_a_released_variance_takes_the_place_of_the_curvature():
    rng, prior = np.random.default_rng(0), likelihood.Prior(np.zeros(3), 1e-6 * np.eye(3))
    root = rng.normal(size=(3, 6))
    variance, whitening = root @ root.T + np.eye(3), np.diag([1.0, 2.0, 0.5])
    stage = stage_at(3, np.eye(3), whitening=whitening, noise=(1e-6, 1e-7))
    slope = stage.curvature_floored
    found = curvature.variance_of(stage, whitening @ variance @ whitening, 1e-7, 1.0)
    np.testing.assert_allclose(found, variance, rtol=1e-3, atol=1e-3)
    _, covariance = decoding.decode_stages(prior, (stage,), 1.0, None, found)
    inverse = np.linalg.inv(slope)
    np.testing.assert_allclose(covariance, inverse @ found @ inverse, rtol=0.02)
    # Without information it is that of a correct model, and it never falls far below that.
    nothing = curvature.variance_of(stage, np.zeros((3, 3)), 1e6, 1.0)
    np.testing.assert_allclose(nothing, slope, rtol=0.05, atol=1e-6)
    least = curvature.variance_of(stage, np.zeros((3, 3)), 1e-7, 1.0)
    np.testing.assert_allclose(least, curvature.LEAST_VARIANCE * slope, rtol=1e-3, atol=1e-6)


def test_the_next_whitening_of_a_diagonal_curvature():
    prior = likelihood.Prior(np.zeros(3), np.diag([1.0, 2.0, 3.0]))
    whitening, curvature = np.diag([0.5, 0.2, 0.1]), np.diag([4.0, 25.0, 100.0])
    whitened = whitening @ curvature @ whitening
    own = {"covariance": prior.covariance, "whitening": whitening, "template": whitened}
    stage = stage_at(3, whitened, (1.0, 1e-6), **own)
    stage = dataclasses.replace(stage, curvature_error=0.04)
    # The ridge, .52, raises no eigenvalue (all are 1).
    power = 0.4 + 0.1 / (1 + (2 * 1.5 * 0.2 * np.sqrt(3)) ** 2)
    expected = (np.diag(prior.precision) + np.diag(curvature)) ** -power
    found = next_whitening(stage, prior, 0.5)
    np.testing.assert_allclose(np.diag(found) / found[0, 0], expected / expected[0], rtol=1e-6)
    assert np.trace(found @ curvature @ found) == pytest.approx(0.5 * 3)
    assert decoding.sampling_ratio(stage, 1.5, 0.3) == pytest.approx(1.8 / 3 + 0.1**2 / 0.1)
    assert decoding.sampling_ratio(stage, 9.0, 0.3) == 1.0
    assert decoding.sampling_ratio(stage, -9.0, 0.3) == 0.1
    # An earlier stage with half of the curvature: the gap is half of it, in that stage's units.
    half = stage_at(3, whitened / 2, (1.0, 1e-6), **own)
    earlier, newest = decoding.with_discrepancies((half, stage))
    assert earlier.discrepancy == pytest.approx(np.sum((whitened / 2) ** 2) / 6, rel=1e-5)
    assert newest.discrepancy == pytest.approx(0.3**2, rel=1e-5)
    assert half.discrepancy == 0.0
    narrow = dataclasses.replace(stage, covariance=prior.covariance / 9)
    assert decoding.with_discrepancies((half, narrow))[-1].discrepancy == pytest.approx(0.1**2)


@pytest.mark.parametrize("size", [1, 2, 6])
@pytest.mark.every_case
def test_odd_releases_leave_everything_finite(size):
    rng = np.random.default_rng(size)
    for case in range(12):
        prior = likelihood.Prior(np.zeros(size), precision_of(size, rng))
        mean, covariance, stages = prior.mean, prior.covariance, ()
        whitening = first_whitening(prior, np.diag(10.0 ** rng.uniform(-3, 5, size)))
        template = np.eye(size)
        for _ in range(4):
            noise = 10.0 ** rng.uniform(-8, 6) * (case != 3)
            curvature = (-3.0 if case % 2 else 0.0) * noise * np.eye(size) - 50.0 * (case == 3)
            score = 30 * noise * rng.normal(size=size)
            released = curvature + noise * goe(size, rng)
            stage = read_stage(mean, covariance, whitening, template, score, released, noise, noise)
            stages = decoding.with_discrepancies((*stages, stage))
            kappa = decoding.sampling_ratio(stages[-1], -noise, noise)
            mean, covariance = decoding.decode_stages(prior, stages, kappa, (mean, covariance))
            whitening = next_whitening(stages[-1], prior, kappa)
            template = whitening @ stages[-1].curvature_floored @ whitening
            assert np.all(np.isfinite(mean)) and np.all(np.isfinite(whitening))
            assert np.all(np.linalg.eigvalsh(whitening) > 0)
            assert np.all(np.linalg.eigvalsh(capped(mean, covariance, prior)) > 0)


def test_the_cap_and_the_likelihood():
    rng = np.random.default_rng(6)
    for _ in range(20):
        prior = likelihood.Prior(rng.normal(size=5), precision_of(5, rng))
        factors = np.exp(rng.normal(size=5))
        turn = np.linalg.qr(rng.normal(size=(5, 5)))[0]
        root = np.linalg.cholesky(prior.covariance) @ turn
        wide, mean = (root * factors) @ root.T, rng.normal(size=5)
        precision, linear = likelihood.released_likelihood(mean, wide, prior)
        assert np.linalg.eigvalsh(precision)[0] > -1e-9
        total = precision + prior.precision
        narrowed = (root * np.minimum(factors, 1)) @ root.T
        np.testing.assert_allclose(np.linalg.inv(total), narrowed, atol=1e-9)
        back = np.linalg.solve(total, linear + prior.precision @ prior.mean)
        np.testing.assert_allclose(back, mean, atol=1e-9)


def test_the_next_whitening_knows_how_expected_curvatures_move():
    rng = np.random.default_rng(0)
    whitened = np.eye(3) + 0.2 * goe(3, rng)
    stage = stage_at(3, whitened)
    moved = curvature.moved(stage, np.array([1.0, 4.0, 1.0]), np.array([0.25, 1e9, 0.0]))
    factors = np.array([0.5, 2.0, 0.2])  # at most these
    np.testing.assert_allclose(moved.curvature, stage.curvature * np.outer(factors, factors))
    same = curvature.moved(stage, np.zeros(3), np.zeros(3))  # invented records see nothing
    np.testing.assert_array_equal(same.curvature, stage.curvature)


def test_a_whitening_narrows_where_curvature_is_surely_lost():
    rng, size = np.random.default_rng(0), 12
    stage = stage_at(size)
    true = np.append(np.zeros(size - 1), 3.0)
    none, found = curvature.Loss.before(size), curvature.Loss.before(size)
    narrowed = 0
    for trial in range(100):
        noise = rng.normal(size=size)
        none, ratios = none.read(stage, 2.0 * noise, 2.0)
        narrowed += np.any(ratios > 1.5)
        if trial < 6:
            found, ratios = found.read(stage, true + 1.5 * noise, 1.5)
    assert narrowed <= 2  # noise alone
    assert found.factors[-1] < 0.9 and np.all(found.factors[:-1] > 0.95)
    sure, ratios = curvature.Loss.before(size).read(stage, true, 1e-6)
    assert ratios[-1] == pytest.approx(4, rel=1e-3) and np.all(ratios[:-1] == 1)
    assert sure.factors[-1] == pytest.approx(4**-0.25, rel=1e-3)
    for _ in range(20):
        sure, _ = sure.read(stage, true, 1e-6)
    assert sure.factors[-1] ** 2 == pytest.approx(curvature.NARROWEST)
    _, ratios = curvature.Loss.before(size).read(stage, np.full(size, 3.0), 1e-6)
    np.testing.assert_allclose(ratios, 1)  # nothing is to be gained


def test_the_start_finds_a_curvature_along_the_mean_row():
    rng = np.random.default_rng(7)
    rows = 0.05 * (rng.normal(size=(500, 3)) + np.array([3, 0, -2]))  # h_i: curvature h_i h_i'
    exact = rows.T @ rows
    whitening = np.diag([0.5, 2.0, 1.0])
    scales = np.diag(whitening @ exact @ whitening)
    total = (rows @ whitening).sum(axis=0)
    found = curvature.start(whitening, scales, 1e-3, (total, 1e-6), len(rows))
    np.testing.assert_allclose(np.diag(found), np.diag(exact), rtol=1e-2)
    np.testing.assert_allclose(found, exact, atol=0.06 * exact.max())
    noise_only = curvature.start(whitening, scales, 1e-3, (total, 1e6), len(rows))
    np.testing.assert_allclose(noise_only, curvature.start(whitening, scales, 1e-3))
    first = first_whitening(likelihood.Prior(np.zeros(3), np.eye(3)), found)
    assert np.trace(first @ found @ first) == pytest.approx(3)


def test_clip_norms_grow_if_records_are_clipped_and_the_budget_can_pay():
    size, number, slow = 10, 10_000, schedule.GROWTH
    assert schedule.next_growth(slow, 1.0) == slow
    fast = schedule.next_growth(slow, 0.8)
    assert slow < fast == schedule.next_growth(fast, 1.0) <= schedule.next_growth(fast, 0.1) < 1
    for mu in (0.01, 0.1, 0.3, 1.0):
        few, many = (schedule.clip_norms(size, number, mu, growth) for growth in (slow, fast))
        noise = many[0] / mu  # the sampling error of a whitened score is 1
        paid = noise <= 0.251 * (np.sqrt(size) + 1.2) / np.sqrt(size)
        assert np.all(many >= few) and (paid or np.array_equal(many, few))
    assert np.all(many > few)  # at the largest budget


def test_errors_of_the_released_pairs_alone():
    """A simulated error on some pairs has the covariance that is used."""
    rng, size = np.random.default_rng(12), 6
    groups = np.array([0, 0, 1, 1, 1, 2])
    pairs = pairs_of(groups)
    assert pairs.sum() == size**2 - 6
    stage = stage_at(size, noise=(0.1, 0.1, groups))
    assert stage.entries == np.triu(pairs).sum()
    one, other = rng.normal(size=(2, size))
    noise = rng.normal(size=(40_000, size, size))
    errors = np.where(pairs, (noise + noise.swapaxes(1, 2)) / 2, 0)  # 1 on the diagonal
    errors[:, range(size), range(size)] = noise[:, range(size), range(size)]
    found = np.einsum("nij,j,nkl,l->ik", errors, one, errors, other) / len(errors)
    expected = matrix_error(np.outer(one, other), stage.pairs) / 2
    np.testing.assert_allclose(found, expected, atol=0.06)


def test_a_power_of_the_dense_block_alone():
    groups = np.array([0, 0, 3, 3])
    matrix = np.array([[2.0, 1, 1, 0], [1, 3, 0, 1], [1, 0, 4, 1], [0, 1, 1, 9]])
    found = power_of(matrix, groups, -0.5)
    np.testing.assert_allclose(found[:2, :2] @ found[:2, :2], np.linalg.inv(matrix[:2, :2]))
    np.testing.assert_allclose(np.diag(found)[2:], [1 / 2, 1 / 3])
    assert not found[2, 3] and not found[:2, 2:].any()
    np.testing.assert_array_equal(
        group_sites(np.eye(5)[[0, 1, 2, 0]] > 0, np.arange(5)), np.zeros(5)
    )


def test_the_length_of_a_step_is_uncertain_along_it_alone(last_stages):
    prior, stages, kappa, begin, *_ = last_stages
    mean, covariance = decoding.decode_stages(prior, stages, kappa, begin)
    done, wider = decoding.with_step(stages, mean, covariance)
    first, later = stages[0], done[-1].step
    values = np.linalg.eigvalsh(wider - covariance)
    assert values[-1] == pytest.approx(later @ later) and abs(values[:-1]).max() < 1e-9 * values[-1]
    _, own = decoding.with_step((first,), mean, covariance)
    step = 0.5 * (mean - first.mean)
    np.testing.assert_allclose(own - covariance, np.outer(step, step), atol=1e-12)
    # A stage whose step is uncertain says less, along the step.
    newest = dataclasses.replace(done[-1], step=None)
    older = (dataclasses.replace(done[0], step=4 * step), *done[1:-1], newest)
    _, loose = decoding.decode_stages(prior, older, kappa, begin)
    along = step / np.linalg.norm(step)
    assert along @ loose @ along >= along @ covariance @ along


def test_a_direction_that_no_record_sees_gets_less_information(monkeypatch):
    """Eleven of twelve eigenvalues are 1, the last one is 0; only noise is measured there."""
    rng, size, number = np.random.default_rng(3), 12, 40
    prior = likelihood.Prior(np.zeros(size), np.eye(size))
    found, plain = [], []
    for _ in range(number):
        noise = rng.normal(size=(size, size))
        released = np.diag([1.0] * (size - 1) + [0]) + (noise + noise.T) / 50
        score, whitening = rng.normal(size=size), np.eye(size) / np.sqrt(50)
        stage = stage_at(size, released, (0.3, 2 / 50), score=score, whitening=whitening)
        kept = decoding.believed_curvature(stage)
        np.testing.assert_allclose(np.diag(kept)[:-1], np.diag(stage.curvature)[:-1], rtol=0.03)
        found.append(decoding.decode_stages(prior, (stage,), 1.0)[1][-1, -1])
        with monkeypatch.context() as patch:
            patch.setattr(decoding, "believed_curvature", lambda stage: stage.curvature)
            plain.append(decoding.decode_stages(prior, (stage,), 1.0)[1][-1, -1])
    assert 1 - np.mean(found) < 0.8 * (1 - np.mean(plain))  # the prior's variance is 1
