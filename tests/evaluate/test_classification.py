"""Scores of class probabilities against numbers found by hand."""

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import pytest

from numpyro_dp.evaluate import (
    accuracy,
    brier_score,
    calibration_error,
    central_intervals,
    coverage,
    decompose_entropy,
    decompose_variance,
    log_score,
    plot_class_probabilities,
    plot_intervals,
    plot_reliability,
    reliability,
)

DRAWS = np.array(
    [[[0.8, 0.2, 0.0], [0.1, 0.6, 0.3]], [[0.4, 0.6, 0.0], [0.3, 0.2, 0.5]]]
)  # two draws, two records, three classes
LABELS = np.array([0, 2])


def test_scores_of_draws_are_those_of_their_mean():
    mean = np.array([[0.6, 0.4, 0.0], [0.2, 0.4, 0.4]])
    for each in (DRAWS, mean):
        assert accuracy(each, LABELS) == 0.5  # the first of equal classes wins
        assert log_score(each, LABELS) == pytest.approx((np.log(0.6) + np.log(0.4)) / 2)
        assert brier_score(each, LABELS) == pytest.approx((0.32 + 0.04 + 0.16 + 0.36) / 2)
    assert log_score(mean, np.array([2, 0])) == -np.inf


@pytest.mark.parametrize("equal_mass", [False, True])
def test_reliability_and_its_errors_by_hand(equal_mass):
    p = np.array([0.05, 0.15, 0.25, 0.95, 0.65, 0.75])
    y = np.array([0, 1, 0, 1, 1, 0])
    found = reliability(p, y, bins=2, equal_mass=equal_mass)
    np.testing.assert_allclose(found.confidence, [0.15, 2.35 / 3])
    np.testing.assert_allclose(found.accuracy, [1 / 3, 2 / 3])
    assert found.count.tolist() == [3, 3]
    expected, largest = calibration_error(p, y, bins=2, equal_mass=equal_mass)
    gaps = 1 / 3 - 0.15, 2.35 / 3 - 2 / 3
    assert expected == pytest.approx(sum(gaps) / 2)
    assert largest == pytest.approx(max(gaps))


def test_bins_of_equal_mass_and_width_differ_where_they_must():
    p = np.array([0.01, 0.02, 0.03, 0.99])
    y = np.array([0, 0, 1, 1])
    assert reliability(p, y, bins=2).count.tolist() == [3, 1]
    assert reliability(p, y, bins=2, equal_mass=True).count.tolist() == [2, 2]
    assert len(reliability(p, y, bins=100).count) == 4  # empty ones are left out
    # Bins count by their size: gaps of 1/3 - 0.02 and 0.01; of 0.015 and 1 - 0.51.
    wide = 0.75 * (1 / 3 - 0.02) + 0.25 * 0.01, 1 / 3 - 0.02
    assert calibration_error(p, y, bins=2) == pytest.approx(wide)
    mass = 0.5 * 0.015 + 0.5 * 0.49, 0.49
    assert calibration_error(p, y, bins=2, equal_mass=True) == pytest.approx(mass)


def test_parts_add_up_to_the_whole():
    rng = np.random.default_rng(0)
    means, sds = rng.normal(size=(200_000, 2)) * [1, 2], np.array([3.0, 1.0])
    parts = decompose_variance(means, sds**2)
    whole = (means + sds * rng.normal(size=means.shape)).var(axis=0)
    np.testing.assert_allclose(parts.epistemic + parts.aleatoric, whole, rtol=0.02)
    entropy = decompose_entropy(DRAWS)
    mean = np.array([[0.6, 0.4], [0.2, 0.4]])
    first = -np.sum(mean[0] * np.log(mean[0]))
    assert entropy.epistemic[0] + entropy.aleatoric[0] == pytest.approx(first)
    alike = decompose_entropy(np.repeat(DRAWS[:1], 3, axis=0))
    np.testing.assert_allclose(alike.epistemic, 0, atol=1e-12)


def test_intervals_hold_what_they_say():
    draws = np.random.default_rng(0).normal(size=(20_000, 3))
    low, high = central_intervals(draws, 0.8)
    np.testing.assert_allclose(low, -1.2816, atol=0.05)
    np.testing.assert_allclose(high, 1.2816, atol=0.05)
    assert coverage(draws, np.array([0.0, 1.2, 1.4]), 0.8) == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: accuracy(DRAWS[0], np.array([0, 3])), "integer labels in 0..2"),
        (lambda: accuracy(DRAWS[0], np.array([0.0, 1.0])), "integer labels"),
        (lambda: accuracy(DRAWS[0], np.array([0])), r"got \(2, 3\) and \(1,\)"),
        (lambda: accuracy(DRAWS[0], LABELS[:, None]), r"labels of shape \(records,\)"),
        (lambda: decompose_entropy(3 * DRAWS), "sum to 1"),
        (lambda: brier_score(2 * DRAWS, LABELS), "sum to 1"),
        (lambda: brier_score(np.full((2, 3), np.nan), LABELS), "sum to 1"),
        (lambda: decompose_entropy(DRAWS[0]), r"\(draws, records, classes\)"),
        (lambda: reliability(np.array([np.nan]), np.array([1])), "in \\[0, 1\\]"),
    ],
)
def test_bad_values_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_pictures_show_the_numbers():
    rng = np.random.default_rng(0)
    p, labels = rng.dirichlet(np.ones(3), 500), rng.integers(0, 3, 500)
    _, axes = plt.subplots(1, 3)
    plot_reliability(axes[0], p[None], labels, bins=10)
    found = reliability(p.max(1), p.argmax(1) == labels, 10)
    heights = [bar.get_height() for bar in axes[0].containers[0]]
    np.testing.assert_allclose(heights, found.accuracy)
    expected, largest = calibration_error(p.max(1), p.argmax(1) == labels, 10)
    assert axes[0].get_title() == f"ECE {expected:.3f}, MCE {largest:.3f}"
    plot_class_probabilities(axes[1], p, label=2)
    assert sum(bar.get_height() for group in axes[1].containers for bar in group) == 3 * 500
    plot_intervals(axes[2], np.arange(3.0), p)
    np.testing.assert_allclose(axes[2].lines[0].get_ydata(), p.mean(axis=0))
    plt.close("all")
