"""Metrics against cases done by hand, and against sampling."""

import numpy as np
import pytest
from scipy import stats

from numpyro_dp.evaluate import (
    calibration_error,
    coverage,
    gaussian_kl,
    log_predictive_density,
    mean_proportional_absolute_error,
    proportional_absolute_error,
    standardised_error,
)


def test_errors_relative_to_the_start():
    optimum, start = np.array([1.0, -1.0, 0.0]), np.array([3.0, -1.1, 5.0])
    for metric in (mean_proportional_absolute_error, proportional_absolute_error):
        assert metric(optimum, optimum, start) == 0
        assert metric(start, optimum, start) == pytest.approx(1)
    found = np.array([1.0, 0.0, 0.0])  # a step of 1 from a start that is 0.1 away
    assert mean_proportional_absolute_error(found, optimum, start) == pytest.approx(10 / 3)
    assert proportional_absolute_error(found, optimum, start) == pytest.approx(1 / 7.1)


def test_kl_of_gaussians_is_the_mean_log_ratio():
    rng = np.random.default_rng(0)
    mean, other = rng.normal(size=(2, 3))
    covariance, wide = (a @ a.T + np.eye(3) for a in rng.normal(size=(2, 3, 3)))
    p, q = stats.multivariate_normal(mean, covariance), stats.multivariate_normal(other, wide)
    draws = p.rvs(200_000, random_state=1)
    ratios = p.logpdf(draws) - q.logpdf(draws)
    error = ratios.std() / np.sqrt(len(ratios))
    assert abs(gaussian_kl(mean, covariance, other, wide) - ratios.mean()) < 4 * error
    assert gaussian_kl(mean, np.diag(covariance), mean, np.diag(np.diag(covariance))) == 0


def test_standardised_error():
    assert standardised_error(np.array([[2.0]]), np.array([[0.0]]), np.array([[4.0]])) == 0.5


def test_predictive_density_of_a_conjugate_model():
    rng = np.random.default_rng(0)
    means, x = rng.normal(1, 0.5, size=100_000), np.array([-1.0, 0.0, 2.0])
    found = log_predictive_density(stats.norm(means[:, None], 1).logpdf(x))
    np.testing.assert_allclose(found, stats.norm(1, np.sqrt(1.25)).logpdf(x), atol=0.02)


@pytest.mark.parametrize("level", [0.5, 0.9])
def test_coverage_of_calibrated_draws(level):
    rng = np.random.default_rng(0)
    centres = rng.normal(size=2000)
    draws, truth = centres + rng.normal(size=(400, 2000)), centres + rng.normal(size=2000)
    assert abs(coverage(draws, truth, level) - level) < 4 * np.sqrt(level * (1 - level) / 2000)
    assert coverage(centres + 0.5 * (draws - centres), truth, level) < level - 0.1


@pytest.mark.parametrize("equal_mass", [False, True])
def test_calibration_error_by_hand(equal_mass):
    # Two bins of 4: mean probability 0.2 against 0.5, and 0.8 against 0.75.
    p = np.array([0.1, 0.2, 0.2, 0.3, 0.7, 0.8, 0.8, 0.9])
    y = np.array([0, 1, 0, 1, 1, 1, 0, 1])
    expected, largest = calibration_error(p, y, bins=2, equal_mass=equal_mass)
    assert expected == pytest.approx((0.3 + 0.05) / 2)
    assert largest == pytest.approx(0.3)


def test_calibration_error_of_the_truth_vanishes():
    rng = np.random.default_rng(0)
    p = rng.random(200_000)
    y = rng.random(200_000) < p
    for equal_mass in (False, True):
        assert calibration_error(p, y, equal_mass=equal_mass)[0] < 0.006
        assert calibration_error(p**2, y, equal_mass=equal_mass)[0] > 0.1


def test_a_probability_of_one_is_in_the_last_bin():
    assert calibration_error(np.array([1.0, 1.0]), np.array([1, 0]), bins=10) == (0.5, 0.5)


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: proportional_absolute_error(np.ones(2), np.ones(3), np.ones(2)), "one shape"),
        (lambda: proportional_absolute_error(np.ones(2), np.ones(2), np.ones(2)), "differ from"),
        (lambda: mean_proportional_absolute_error(*np.ones((3, 2))), "2 equal coordinates"),
        (lambda: standardised_error(*np.zeros((3, 2))), "sd > 0"),
        (lambda: coverage(np.ones((5, 2)), np.ones(3)), "shape"),
        (lambda: coverage(np.ones((5, 2)), np.ones(2), 1.0), "level=1.0"),
        (lambda: calibration_error(np.array([1.5]), np.array([1])), "in \\[0, 1\\]"),
        (lambda: calibration_error(np.array([0.5]), np.array([2])), "0 or 1"),
        (lambda: calibration_error(np.array([0.5]), np.array([1]), bins=0), "bins=0"),
        (lambda: calibration_error(np.array([0.5]), np.array([1, 1])), "shape"),
    ],
)
def test_wrong_input(call, match):
    with pytest.raises(ValueError, match=match):
        call()
