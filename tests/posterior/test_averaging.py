"""Averages of autocorrelated iterates: their standard errors, windows and checks."""

import numpy as np
import pytest
from scipy import signal

from numpyro_dp.posterior import average, drift_check
from numpyro_dp.posterior.averaging import fit_ar1
from numpyro_dp.run.results import Trace


def ar1(length, series, phi, seed=0):
    """Stationary series of variance 1 and mean 0, one a column."""
    rng = np.random.default_rng(seed)
    start = rng.normal(size=series)
    noise = np.sqrt(1 - phi**2) * rng.normal(size=(length, series))
    noise[0] = start
    return signal.lfilter([1], [1, -phi], noise, axis=0)


def trace(values):
    return Trace(np.arange(len(values)), {"x": values})


@pytest.mark.parametrize("phi", [0.0, 0.5, 0.9])
def test_standard_error_of_a_mean(phi):
    """Normalised by the standard error, means of independent series have variance 1."""
    values = ar1(1000, 4000, phi)
    fit = fit_ar1(values)
    scores = values.mean(0) / np.sqrt(fit.variance_of_mean)
    # Standard deviation of a variance of 4000 scores: 0.022; a fit on 1000/19 values adds a little.
    assert abs(scores.var() - 1) < 0.12
    np.testing.assert_allclose(fit.variance.mean(), 1, rtol=0.03)
    np.testing.assert_allclose(np.median(fit.times), (1 + phi) / (1 - phi), rtol=0.06)


def test_intervals_cover():
    values = ar1(1000, 4000, 0.8)
    found = average(trace(values))
    covered = np.abs(found.params["x"]) <= 1.645 * found.dp_sd["x"]
    assert found.converged["x"].mean() > 0.99
    # The longest window that passes is a choice made on the same numbers: a little is lost.
    assert 0.86 < covered.mean() < 0.92


def test_stationary_windows_pass_and_drifting_ones_do_not():
    values = ar1(1000, 500, 0.7)
    assert drift_check()(values).mean() > 0.93
    drifting = values + np.linspace(0, 3, 1000)[:, None]
    for unit in (1.0, 1e-3):
        assert drift_check()(unit * drifting).mean() < 0.02


def test_transient_is_left_out_coordinate_by_coordinate():
    noise = ar1(2000, 2, 0.3)
    start = np.stack([np.zeros(2000), 50 * np.exp(-np.arange(2000) / 250)], axis=1)
    found = average(trace(noise + start))
    assert found.converged["x"].all()
    assert found.window["x"][0] == 1600 > found.window["x"][1]
    assert (np.abs(found.params["x"]) < 4 * found.dp_sd["x"]).all()


def test_unconverged_is_flagged():
    climbing = ar1(1000, 50, 0.5) + np.linspace(0, 20, 1000)[:, None]
    found = average(trace(climbing))
    assert not found.converged["x"].any()
    assert (found.window["x"] == 200).all()
    # A window of few autocorrelation times cannot tell a drift from its noise.
    assert average(trace(ar1(1000, 200, 0.98))).converged["x"].mean() < 0.1
    diverged = np.full((100, 2), np.nan)
    diverged[:, 1] = np.random.default_rng(0).normal(size=100)
    np.testing.assert_array_equal(average(trace(diverged)).converged["x"], [False, True])


def test_given_windows_constant_coordinates_and_shapes():
    values = np.concatenate([ar1(300, 1, 0.0), np.full((300, 1), 2.0)], axis=1).astype(np.float32)
    found = average(trace(values), window=100)
    np.testing.assert_array_equal(found.window["x"], [100, 100])
    np.testing.assert_allclose(found.params["x"], values[-100:].mean(0), rtol=1e-5)
    assert found.dp_sd["x"][1] == 0 and found.converged["x"][1]
    assert found.params["x"].dtype == np.float32
    values = ar1(400, 6, 0.0).reshape(400, 2, 3)
    found = average(Trace(np.arange(400), {"m": values, "s": values[:, 0, 0]}))
    assert found.params["m"].shape == found.dp_sd["m"].shape == (2, 3)
    assert found.params["s"].shape == ()


def test_wrong_input():
    with pytest.raises(ValueError, match=r"at least 20 iterates, got 5.*trace_size"):
        average(trace(np.zeros((5, 1))))
    with pytest.raises(ValueError, match=r"\[20, 100\], got window=300"):
        average(trace(np.zeros((100, 1))), window=300)
    with pytest.raises(ValueError, match="level"):
        drift_check(level=-1.0)
