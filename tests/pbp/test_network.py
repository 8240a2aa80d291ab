"""Networks: moments and slopes, SEP, ADF and EP, DP-SEP, and what may go wrong."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conformance.registry import x64
from flat import grouped
from gaussian import gaussian
from numpyro.infer import MCMC, NUTS, Predictive
from scipy import stats

from numpyro_dp import DPPBP, PBP, PrivacyBudget, RegressionNetwork
from numpyro_dp.core import Released
from numpyro_dp.methods.normal import Cavity
from numpyro_dp.methods.pbp import network_moments, reference
from numpyro_dp.methods.pbp.network_curvature import network_curvature
from numpyro_dp.methods.pbp.network_draws import _left, network_draws
from numpyro_dp.methods.pbp.network_moments import layout_of, output_moments, record_slopes
from numpyro_dp.methods.pbp.network_sites import (
    NetworkCavity,
    NetworkSteps,
    network_ep,
    network_site,
)
from numpyro_dp.model.records import RecordsProblem, read_records
from numpyro_dp.samplers import FullBatch, Poisson
from numpyro_dp.sums.bounded import bounded_sum

KEY = jax.random.key(0)
BUDGET = PrivacyBudget(1.0, 1e-5)
NETWORK = RegressionNetwork((6,))


def records(number, inputs=2, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(number, inputs)).astype(np.float32)
    y = np.abs(x[:, 0]) - 0.8 + 0.1 * rng.normal(size=number)
    return x, y.astype(np.float32)


def weights(layout, seed=0):
    size = sum(layout.sizes)
    mean = jax.random.normal(jax.random.key(seed), (size,))
    return mean, 0.05 + 0.2 * jax.random.uniform(jax.random.key(seed + 1), (size,))


def error(network, params, x, y):
    mean, _ = network.predict(params, x)
    return float(jnp.sqrt(jnp.mean((mean - y) ** 2)))


REPEATED = {"secret_key": 1, "repetition": True}
PLAIN = {"clip_norm": math.inf, "noise_multiplier": 0.0}  # without clip and noise


def driver(network=NETWORK, **options):
    settings = {"clip_norm": 1.0, "noise_multiplier": 1.0, "sampler": FullBatch()}
    return DPPBP(network, **grouped(**settings | options))


def start(x, y, **options):
    """The parameters that a run begins with."""
    pbp = driver(**options)
    return pbp.get_params(pbp.init(KEY, x, y))


def run(pbp, steps, x, y, **options):
    return pbp.run(KEY, steps, x, y, progress_bar=False, **options).params


def estimator_of(x, y, by_layer=True, ridge=None):
    problem = RecordsProblem(read_records(NETWORK, (x, y), {}, len(x)))
    return network_ep(NETWORK, by_layer, 10.0, 0.3, ridge)(problem)


def sd_of_noise(params):
    return float(jnp.sqrt(params["noise_rate"] / (params["noise_concentration"] - 1)))


@pytest.mark.extended
def test_moments_of_one_hidden_layer_are_those_of_draws():
    layout = layout_of(3, (40,))
    mean, variance = weights(layout)
    x = jnp.array([0.3, -1.2, 0.8])
    network = RegressionNetwork((40,))
    draws = mean + jnp.sqrt(variance) * jax.random.normal(KEY, (200_000, mean.size))
    outputs = np.asarray(jax.vmap(lambda w: network.apply(w, x[None])[0])(draws), np.float64)
    found, spread = output_moments(layout, mean, variance, x)
    # Units depend on each other through nothing here: with one hidden layer both moments are exact.
    assert abs(found - outputs.mean()) < 5 * outputs.std() / math.sqrt(len(outputs))
    assert abs(spread / outputs.var() - 1) < 0.02


@pytest.mark.extended
@pytest.mark.parametrize("hidden", [(5,), (4, 3), (4, 3, 2)])
def test_slopes_are_derivatives_of_the_log_evidence_and_make_the_site(hidden):
    layout = layout_of(3, hidden)
    mean, variance = weights(layout)
    x, y, noise = jnp.array([0.5, -1.0, 2.0]), jnp.array(0.7), jnp.array(0.3)

    def log_evidence(mean, variance):
        output, spread = output_moments(layout, mean, variance, x)
        return -((y - output) ** 2 / (spread + noise) + jnp.log(spread + noise)) / 2

    expected = jax.grad(log_evidence, (0, 1))(mean, variance)
    found = record_slopes(layout, mean, variance, noise, x, y)
    np.testing.assert_allclose(found.mean, expected[0], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found.variance, expected[1], rtol=1e-4, atol=1e-5)
    narrowed = variance - variance**2 * (found.mean**2 - 2 * found.variance)
    site = network_site(layout, NetworkCavity(Cavity(mean, variance), noise), x, y)
    total = 1 / variance + site["precision"]
    np.testing.assert_allclose(1 / total, narrowed, rtol=1e-4)
    moved = mean + variance * found.mean  # to the tilted moments
    np.testing.assert_allclose(mean + site["linear"] / total, moved, rtol=1e-4, atol=1e-5)


@pytest.mark.extended
def test_all_forms_learn_and_agree_with_nuts_on_predictions():
    x, y = records(300)
    rest = records(500, seed=1)
    mcmc = MCMC(NUTS(NETWORK), num_warmup=300, num_samples=500, progress_bar=False)
    mcmc.run(KEY, x, y)
    outputs = jax.vmap(lambda w: NETWORK.apply(w, rest[0]))(mcmc.get_samples()["weights"])
    nuts = float(jnp.sqrt(jnp.mean((outputs.mean(0) - rest[1]) ** 2)))
    sep = functools.partial(driver, precision_per_weight=True, **PLAIN)
    found = {
        "adf": PBP(NETWORK).run(KEY, 30, x, y).params,
        "ep": PBP(NETWORK, keep_sites=True, damping=0.05).run(KEY, 400, x, y).params,
        "sep": run(sep(damping=0.05), 600, x, y),
        "curved": run(sep(damping=0.1, ridge=1.0, step_size=0.3), 60, x, y),
    }
    errors = {name: error(NETWORK, params, *rest) for name, params in found.items()}
    assert nuts < 0.15
    assert all(each < 1.6 * nuts for each in errors.values()), (nuts, errors)
    for name, params in found.items():
        assert 0.08 < sd_of_noise(params) < 0.35, name


TWO_NORMS = {"linear": 0.4, ...: 0.3}


@pytest.mark.full
@pytest.mark.parametrize("norm", [0.5, TWO_NORMS])
@pytest.mark.parametrize(
    ("by_layer", "ridge"), [(True, None), (False, None), (True, 5.0), (False, 1e-3)]
)
def test_one_record_moves_the_sum_by_at_most_the_clip_norm(by_layer, ridge, norm):
    rng = np.random.default_rng(1)
    number = 40
    x, y = records(number)
    estimator = estimator_of(x, y, by_layer, ridge)
    params = start(x, y, clip_norm=norm)
    if ridge == 1e-3:  # and hardly any noise, so that scales are extreme
        params["noise_rate"] = 1e-4 * params["noise_rate"]
    mechanism = gaussian(norm, 1.0)

    @jax.jit
    def total(x, y, mask):
        public = estimator.prepare(KEY, params)
        return bounded_sum(estimator, mechanism, public, (x, y), mask)

    strange = [1.0, 1e4, 1e30, -1e38, np.nan, np.inf, 0.0]
    largest = 0.0
    for value in strange:
        for target in strange:
            row = int(rng.integers(number))
            xs, ys = x.copy(), y.copy()
            xs[row] = value * rng.normal(size=2) if np.isfinite(value) else value
            ys[row] = target
            with_it = total(xs, ys, np.ones(number, bool))
            # A mask of its own: the first sum may still be reading the other one.
            without = total(xs, ys, np.arange(number) != row)
            moved = [np.ravel(np.asarray(with_it[k], np.float64) - without[k]) for k in with_it]
            size = np.linalg.norm(np.concatenate(moved))
            assert np.isfinite(size)
            largest = max(largest, size)
    assert 0.9 * 0.5 < largest <= 0.5


def natural_sums(network, params, x, y):
    """Sums of sites in natural parameters, each from the cavity, in float64 and by hand."""
    number = len(x)
    p = {name: np.asarray(value, np.float64) for name, value in params.items()}
    prior = float(network.prior_precision(params))
    linear = p["weights_linear"] * (1 - 1 / number)
    precision = p["weights_precision"] - (p["weights_precision"] - prior) / number
    rate = p["noise_rate"] - (p["noise_rate"] - network.noise_prior[1]) / number
    noise = rate / (p["noise_concentration"] - 1.5)
    cavity = Cavity(jnp.asarray(linear / precision), jnp.asarray(1 / precision))
    sites = [
        network_site(network.layout(x.shape[1]), NetworkCavity(cavity, jnp.asarray(noise)), *record)
        for record in zip(jnp.asarray(x), jnp.asarray(y), strict=True)
    ]
    total = {k: sum(np.asarray(site[k], np.float64) for site in sites) for k in sites[0]}
    mean = np.asarray(cavity.mean, np.float64)
    total["linear"] = total["linear"] + total["precision"] * mean
    return total


@pytest.mark.extended
@pytest.mark.parametrize("weight_precision", [4.0, None])
def test_a_step_without_noise_is_that_of_natural_parameters(weight_precision):
    network, rate = RegressionNetwork((3,), weight_precision=weight_precision), 0.2
    x, y = records(5)
    sep = driver(network, precision_per_weight=True, damping=rate, **PLAIN)
    begin = start(x, y, network=network)
    precision = 20 + 5 * jax.random.uniform(KEY, begin["weights_linear"].shape)
    begin |= {"weights_precision": precision, "noise_rate": jnp.array(5.0)}
    state = sep.init(KEY, x, y, init_params=begin)
    found = sep.get_params(jax.jit(sep.update)(state, x, y)[0])
    sums, prior = natural_sums(network, begin, x, y), float(network.prior_precision(begin))
    change = sums["precision"] - (precision - prior)
    assert (precision + rate * change > prior).all()  # no floor is met
    after = found["weights_precision"]
    np.testing.assert_allclose(after - precision, rate * change, rtol=2e-3, atol=1e-3)
    # The mean moves by the slope at it over the old precision.
    mean = begin["weights_linear"] / precision
    slope = sums["linear"] - begin["weights_linear"] - change * mean
    expected = mean + rate * slope / after
    np.testing.assert_allclose(found["weights_linear"] / after, expected, rtol=2e-3, atol=2e-4)
    np.testing.assert_allclose(found["noise_rate"], 5 + rate * (sums["rate"] + 1), rtol=1e-3)


@pytest.mark.extended
def test_noise_alone_leaves_precisions_at_the_prior():
    x, y = records(50)
    pbp = driver(noise_multiplier=1e4, secret_key=2, precision_per_weight=True, damping=0.2)
    state, step = pbp.init(KEY, x, y), jax.jit(pbp.update)
    unit = sd_of_noise(state.optim_state.params) ** 2
    for number in range(20):
        state, _ = step(state, x, y)
        if number == 0:
            sd, released = np.sqrt(float(state.optim_state.noise)), state.optim_state.released
            assert sd == pytest.approx(0.2 * 1e4 / (10.0 * unit), rel=1e-3)
            assert np.std(released) == pytest.approx(sd, rel=0.5)
            added = np.asarray(state.optim_state.params["weights_precision"]) - 100.0
            assert np.median(added) < 0.1 * sd
    assert np.isfinite(state.optim_state.params["weights_linear"]).all()


@pytest.mark.full
@pytest.mark.parametrize("method", ["adf", "ep", "sep"])
def test_a_sharp_prior_is_the_posterior(method):
    network, data = RegressionNetwork((4,), weight_precision=1e4), records(30)
    params = {
        "sep": lambda: run(
            driver(network, precision_per_weight=True, damping=0.3, **PLAIN), 100, *data
        ),
        "ep": lambda: PBP(network, keep_sites=True, damping=0.3).run(KEY, 60, *data).params,
        "adf": lambda: PBP(network).run(KEY, 2, *data).params,  # counts records in each sweep
    }[method]()
    mean = params["weights_linear"] / params["weights_precision"]
    np.testing.assert_allclose(params["weights_precision"], 1e4, rtol=0.05)
    assert float(jnp.abs(mean).max()) < 0.05


@pytest.mark.full
def test_records_that_are_not_numbers_do_not_narrow_the_noise():
    x, y = records(200)
    half = PBP(NETWORK).run(KEY, 20, x[:100], y[:100]).params
    x[100:] = np.nan
    found = PBP(NETWORK).run(KEY, 20, x, y).params
    assert sd_of_noise(found) ** 2 > 0.9 * sd_of_noise(half) ** 2


@pytest.mark.extended
def test_steps_by_curvature_stay_finite_with_many_records_and_little_ridge():
    x, y = records(100_000, inputs=4)
    network = RegressionNetwork((10,))
    sep = driver(network, sampler=Poisson(0.02), step_size=0.5, damping=0.1, ridge=0.01,
                 **PLAIN, **REPEATED)  # fmt: skip
    params = run(sep, 60, x, y)
    assert all(bool(jnp.isfinite(value).all()) for value in params.values())
    assert error(network, params, x[:2000], y[:2000]) < 3


def test_variance_of_a_rectified_unit_does_not_cancel():
    def exact(a, v):
        grid = np.linspace(-12, 12, 400_001)
        weights = stats.norm.pdf(grid)
        t = np.maximum(a + np.sqrt(v) * grid, 0)
        mean = np.sum(weights * t) / weights.sum()
        return np.sum(weights * (t - mean) ** 2) / weights.sum()

    for a, v in ((3.0, 1e-4), (5.0, 1e-5), (-1.0, 1.0), (0.3, 2.0), (-4.0, 1.0)):
        _, found = network_moments._rectified(jnp.float32(a), jnp.float32(v))
        assert float(found) == pytest.approx(exact(a, v), rel=2e-3)


@pytest.mark.extended
def test_updates_and_runs_give_the_same_with_one_precision_of_each_layer():
    x, y = records(20)
    pbp, own = driver(**REPEATED), start(x, y)
    own["weights_precision"] = 1 + jnp.arange(own["weights_precision"].size, dtype=float)
    state, update = pbp.init(KEY, x, y, init_params=own), jax.jit(pbp.update)
    for _ in range(3):
        state, _ = update(state, x, y)
    params = run(pbp, 3, x, y, init_params=own)
    for name, value in pbp.get_params(state).items():
        np.testing.assert_allclose(value, params[name], rtol=1e-5)
    for layer in NETWORK.layout(2).split(params["weights_precision"]):
        assert float(jnp.std(layer)) < 1e-3 * float(jnp.mean(layer))


@pytest.mark.extended
def test_a_private_run_learns_is_accounted_for_and_predicts():
    x, y = records(4000)
    pbp = driver(
        clip_norm=0.3, sampler=Poisson(0.25), budget=BUDGET, noise_multiplier=None, step_size=0.5,
        ridge=20.0, secret_key=3, repetition=True,
    )  # fmt: skip
    result = pbp.run(KEY, 60, x, y, progress_bar=False)
    assert 0.9 < result.privacy.epsilon <= 1.0
    assert error(NETWORK, result.params, x, y) < 0.4 * y.std()
    mean, variance = NETWORK.predict(result.params, x)
    draws = Predictive(NETWORK, guide=pbp.guide, params=result.params, num_samples=4000)
    y_draws = np.asarray(draws(jax.random.key(1), x[:50])["y"])
    np.testing.assert_allclose(y_draws.mean(0), mean[:50], atol=0.06)
    np.testing.assert_allclose(y_draws.var(0), variance[:50], rtol=0.15)


@pytest.mark.full
@pytest.mark.table
@pytest.mark.parametrize("ridge", [None, 20.0])
@pytest.mark.parametrize("noise", [0.0, 0.01, 1e6])
def test_a_private_posterior_is_the_one_of_the_released_mean(ridge, noise):
    """w given a mean that was released with known noise, from the joint normal distribution."""
    size = sum(NETWORK.layout(2).sizes)
    precision = 1 + np.linspace(5.0, 60.0, size)
    mean = np.linspace(-1.0, 1.0, size)
    params = {"weights_precision": precision, "weights_linear": precision * mean}
    params |= {"noise_concentration": 56.0, "noise_rate": 20.0}
    params = jax.tree.map(jnp.asarray, params)
    released = {"released": precision - 1, "mean_noise": np.full(size, noise), "noise": 0.1}
    state = NetworkSteps(NETWORK, 0.1, None).init(params)
    state = state._replace(**jax.tree.map(jnp.asarray, released))
    draws = network_draws(NETWORK, 2, 100, state, ridge)(KEY, 40_000)
    spread = noise * np.eye(size)
    if ridge is not None:
        inverse = np.asarray(network_curvature(NETWORK, 2, 100, params, ridge).inverse, np.float64)
        spread = noise * inverse.T @ inverse
    # Records give w + noise with variance 1 / D, and the step adds noise of its own to D / Lambda.
    sites = precision - 1
    seen = np.diag(sites / precision)
    total = seen @ seen.T + np.diag(sites / precision**2) + spread
    gain = seen @ np.linalg.inv(total)
    draws_w = np.asarray(draws["weights"], np.float64)
    covariance = np.eye(size) - gain @ seen
    sd = np.sqrt(np.diag(covariance))
    np.testing.assert_allclose(draws_w.mean(0), gain @ mean, atol=0.03 * sd.max())
    np.testing.assert_allclose(draws_w.std(0), sd, rtol=0.03)
    if noise == 0:
        np.testing.assert_allclose(sd, precision**-0.5, rtol=1e-4)
        assert np.mean(draws["noise_precision"]) == pytest.approx(56 / 20, rel=0.02)
    if noise == 1e6:
        np.testing.assert_allclose(draws_w.std(0), 1.0, rtol=0.03)
        assert np.mean(draws["noise_precision"]) == pytest.approx(1, rel=0.02)


def test_noise_that_later_steps_take_back():
    pull, steps, rate = np.array([0.0, 0.1, 1.0]), 30, 0.2
    rng = np.random.default_rng(0)
    mean = np.zeros((100_000, 3))
    for _ in range(steps):
        mean = (1 - rate * pull) * mean + rng.normal(size=mean.shape)
    left = _left(rate * steps, steps, pull)
    np.testing.assert_allclose(mean.var(0) / steps, left, rtol=0.02)


@pytest.mark.extended
@pytest.mark.table
@pytest.mark.parametrize("ridge", [None, 20.0])
def test_steps_keep_the_variance_of_the_noise_in_the_mean(ridge):
    """Of the first step, over many seeds: the spread of the mean of the weights."""
    x, y = records(200)
    pbp = driver(clip_norm=0.5, noise_multiplier=0.05, damping=0.2, ridge=ridge)
    start = pbp.init(KEY, x, y)
    step = jax.jit(pbp.update)
    runs = [step(pbp.init(KEY, x, y), x, y)[0].optim_state for _ in range(200)]
    means = np.stack([s.params["weights_linear"] / s.params["weights_precision"] for s in runs])
    found = means - means.mean(0)
    if ridge is not None:
        curvature = network_curvature(NETWORK, 2, 200, start.optim_state.params, ridge)
        found = found @ np.linalg.inv(np.asarray(curvature.inverse, np.float64))
    ratio = found.var(0) / np.asarray(runs[0].mean_noise)
    assert 0.9 < ratio.mean() < 1.1, ratio


@pytest.mark.extended
def test_a_private_posterior_is_one_however_large_the_noise():
    x, y = records(30)
    for options in ({}, {"ridge": 10.0, "step_size": 0.5}, {"precision_per_weight": True}):
        network = RegressionNetwork((4,), weight_precision=None)
        params = run(driver(network, noise_multiplier=1e3, **REPEATED, **options), 20, x, y)
        assert all(bool(jnp.isfinite(value).all()) for value in params.values())
        assert (params["weights_precision"] > 0).all()
        assert params["noise_rate"] > 0


@pytest.mark.extended
def test_a_prior_on_the_precision_of_weights_follows_their_size():
    network = RegressionNetwork((4,), weight_precision=None)
    size = sum(network.layout(2).sizes)
    params = {"weights_linear": jnp.full(size, 6.0), "weights_precision": jnp.full(size, 2.0)}
    expected = (6 + size / 2) / (6 + size * (9 + 0.5) / 2)
    assert float(network.prior_precision(params)) == pytest.approx(expected, rel=1e-5)
    draws = Predictive(network, num_samples=2000)(KEY, jnp.ones((1, 2)))
    assert stats.kstest(draws["weight_precision"], stats.gamma(6, scale=1 / 6).cdf).pvalue > 1e-3


def begun(change):
    x, y = records(10)
    params = start(x, y)
    return driver().init(KEY, x, y, init_params=params | change(params))


@pytest.mark.parametrize(("make", "error", "message"), [
    *((functools.partial(driver, **{name: value}), ValueError, name) for name, value in (
        ("damping", 0.0), ("step_size", 2.0), ("ridge", -1.0), ("precision_weight", 0.0),
        ("noise_weight", math.nan), ("init_scale", 0.0), ("clip_norm", -1.0))),
    (lambda: RegressionNetwork(()), ValueError, "hidden layer"),
    (lambda: RegressionNetwork((0,)), ValueError, "hidden layer"),
    (lambda: RegressionNetwork((3,), weight_precision=0.0), ValueError, "weight_precision"),
    (lambda: RegressionNetwork((3,), noise_prior=(1.0, 1.0)), ValueError, "concentration"),
    (lambda: PBP(lambda x, y: None), TypeError, "RegressionNetwork"),
    (lambda: PBP(NETWORK).run(KEY, 0, *records(5)), ValueError, "num_sweeps"),
    (lambda: PBP(NETWORK).run(KEY, 1, [[1.0]], np.ones(1)), TypeError, "x as one array"),
    (lambda: RegressionNetwork(50), TypeError, "tuples"),
    (lambda: RegressionNetwork((5,), noise_prior=6.0), TypeError, "tuples"),
    (lambda: RegressionNetwork((5,), noise_prior=(6.0,)), ValueError, "noise_prior"),
    (lambda: PBP(NETWORK).run(KEY, 1, np.ones(5), np.ones(5)), ValueError, "shape"),
    (lambda: PBP(NETWORK).run(KEY, 1, np.ones((5, 2)), np.ones(4)), ValueError, "shape"),
    (lambda: begun(lambda p: {"noise_rate": -p["noise_rate"]}), ValueError, "finite and > 0"),
    (lambda: begun(lambda p: {"noise_concentration": p["noise_concentration"] + 1}), ValueError,
     "number of records"),
    (lambda: begun(lambda p: {"weights_linear": p["weights_linear"][:-1]}), ValueError, "shapes"),
])  # fmt: skip
def test_bad_settings_networks_records_and_starts_are_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.extended
def test_a_sweep_of_expectation_propagation_is_that_of_its_sites():
    network, damping = RegressionNetwork((3,)), 0.4
    x, y = (jnp.asarray(array) for array in records(4))
    params = start(x, y, network=network) | {"noise_rate": jnp.array(4.0)}
    begin = reference.start_network_sites(network, params, 4)
    found = reference.ep_sweep(network, begin, x, y, damping)
    concentration = float(params["noise_concentration"])
    assert concentration == 6.0 + 4 / 2
    for row in range(4):
        own = {name: value[row] for name, value in begin.sites.items()}
        precision = params["weights_precision"] - own["precision"]
        mean = (params["weights_linear"] - own["linear"]) / precision
        # Without this record's share: rate less its own, concentration less 1/2.
        noise = (4.0 - own["rate"]) / (concentration - 0.5 - 1)
        cavity = NetworkCavity(Cavity(mean, 1 / precision), noise)
        site = network_site(network.layout(2), cavity, x[row], y[row])
        site["linear"] = site["linear"] + site["precision"] * mean
        for name, value in site.items():
            expected = own[name] + damping * (value - own[name])
            np.testing.assert_allclose(found.sites[name][row], expected, rtol=1e-3, atol=1e-4)
    rate = 6.0 + float(jnp.sum(found.sites["rate"]))
    assert float(found.params["noise_rate"]) == pytest.approx(rate, rel=1e-5)


def curvature_by_hand(network, params, number):
    """What invented inputs add to the precision, record by record and in float64."""
    mean = params["weights_linear"] / params["weights_precision"]
    noise = sd_of_noise(params) ** 2
    variance = 1 / params["weights_precision"]
    invented = jax.random.normal(jax.random.key(0), (1000, 2))

    def at(values, row):
        return output_moments(network.layout(2), values, variance, row)

    slopes = np.asarray(
        jax.vmap(lambda row: jax.jacobian(lambda m: at(m, row)[0])(mean))(invented), np.float64
    )
    spread = np.asarray(jax.vmap(lambda row: at(mean, row)[1])(invented), np.float64)
    return number / 1000 * (slopes.T / (spread + noise)) @ slopes


@pytest.mark.extended
@pytest.mark.parametrize("weight_precision", [pytest.param(1.0, marks=pytest.mark.extended), 500.0])
def test_slopes_in_coordinates_of_the_curvature(weight_precision):
    network, number, ridge = RegressionNetwork((2,), weight_precision=weight_precision), 50, 3.0
    x, y = records(number)
    params = start(x, y, network=network)
    size = params["weights_linear"].size
    slope = 0.1 * jax.random.normal(jax.random.key(4), (size,))
    curvature = network_curvature(network, 2, number, params, ridge)
    whitened = curvature.whiten(slope)
    by_inputs = curvature_by_hand(network, params, number)
    whole = by_inputs + (ridge + weight_precision) * np.eye(size)
    expected = np.linalg.solve(whole, slope)
    np.testing.assert_allclose(curvature.direction(whitened), expected, rtol=0.01, atol=1e-6)
    directions = np.trace(np.linalg.solve(whole, by_inputs))
    expected = number / directions * np.asarray(slope) @ np.linalg.solve(whole, slope)
    assert float(whitened @ whitened) == pytest.approx(expected, rel=1e-3)
    # One predictive standard deviation for the invented inputs, and no further.
    long = curvature.direction(1e4 * whitened)
    assert float(long @ by_inputs @ long) / number == pytest.approx(1.0, rel=1e-3)

    def cost(linear_map):
        inverse = np.linalg.solve(whole, np.linalg.inv(linear_map))
        size_of_signal = np.trace(linear_map @ by_inputs @ linear_map.T)
        return size_of_signal * np.trace(inverse.T @ by_inputs @ inverse)

    least = cost(np.asarray(curvature.inverse, np.float64))
    assert least == pytest.approx(directions**2, rel=1e-3)
    others = np.random.default_rng(0).normal(size=(20, size, size))
    assert all(cost(each) > 1.01 * least for each in others)
    assert cost(np.eye(size)) > least * (1.01 if weight_precision == 1.0 else 1)


@pytest.mark.extended
@pytest.mark.parametrize("noise", [1.0, 0.01])
def test_a_slope_in_those_coordinates_has_the_size_of_the_residual_in_standard_deviations(noise):
    x = np.random.default_rng(0).normal(size=(500, 2)).astype(np.float32)
    params = start(x, x[:, 0])
    params["weights_linear"] *= 1e4  # variances of the weights that say nothing beside the noise
    params["weights_precision"] *= 1e4
    params["noise_rate"] = noise * (params["noise_concentration"] - 1)
    mean, variance = NETWORK.predict(params, x)
    y = mean + jnp.sqrt(variance) * jax.random.normal(jax.random.key(3), mean.shape)
    estimator = estimator_of(x, x[:, 0], ridge=1.0)
    public = estimator.prepare(KEY, params)
    signals = jax.vmap(lambda x, y: estimator.signal(public, (x, y)))(jnp.asarray(x), y)
    # The residuals in predictive standard deviations, as they were drawn.
    square = float(jnp.mean((y - mean) ** 2 / variance))
    size = jnp.sqrt(jnp.mean(jnp.sum(signals["linear"] ** 2, axis=1)))
    assert float(size) == pytest.approx(math.sqrt(square), rel=0.15)
    half_squares = jnp.mean(signals["noise"]) + 0.3 * public.factor["rate"] / public.unit
    assert float(half_squares) == pytest.approx(0.3 * square / 2, rel=0.01)


@pytest.mark.extended
def test_what_is_released_in_those_coordinates_comes_back():
    number, ridge = 60, 2.0
    x, y = records(number)
    first = start(x, y)
    moves = []
    for each in (None, ridge):
        estimator = estimator_of(x, y, False, each)
        public = estimator.prepare(KEY, first)
        total = bounded_sum(
            estimator, gaussian(math.inf, 0.0), public, (x, y), jnp.ones(number, bool)
        )
        moves.append(estimator.pull_back(public, Released(total, 0.0)))
    plain, curved = moves
    np.testing.assert_allclose(curved.precision, plain.precision, rtol=1e-4)
    assert float(curved.rate) == pytest.approx(float(plain.rate), rel=1e-4)
    by_inputs = curvature_by_hand(NETWORK, first, number)
    size = len(by_inputs)
    prior = float(NETWORK.prior_precision(first))
    expected = np.linalg.solve(by_inputs + (ridge + prior) * np.eye(size), plain.slope)
    change = math.sqrt(expected @ by_inputs @ expected / number)
    np.testing.assert_allclose(
        curved.direction, expected / max(change, 1), rtol=0.01, atol=1e-4 * np.abs(expected).max()
    )
    steps = NetworkSteps(NETWORK, 0.1, 0.5)
    after = steps.update(curved, steps.init(first)).params
    mean = first["weights_linear"] / first["weights_precision"]
    found = after["weights_linear"] / after["weights_precision"] - mean
    np.testing.assert_allclose(found, 0.5 * curved.direction, atol=1e-5)


@pytest.mark.extended
def test_a_rectified_unit_has_its_slopes_twice():
    """Against finite differences of the moments in double precision, and at 0, where tails swap."""
    places = itertools.product((-6.0, -1.0, 0.0, 0.3, 5.0), (0.2, 3.0), (0, 1), (0, 1))
    with x64():
        for a, v, which, argument in places:

            def moment(a, v, which=which):
                return network_moments._rectified(jnp.asarray(a), jnp.asarray(v))[which]

            shift = np.eye(2)[argument] * 1e-4
            for order in (moment, jax.grad(moment, argument)):
                up, down = (order(*(np.array([a, v]) + way * shift)) for way in (1, -1))
                found = jax.grad(order, argument)(a, v)
                np.testing.assert_allclose(found, (up - down) / 2e-4, rtol=2e-4, atol=2e-7)
