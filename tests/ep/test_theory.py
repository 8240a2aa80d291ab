"""What clipping and noise cost a Gaussian posterior: closed forms, and bounds by simulation."""

import math

import numpy as np
import pytest
from scipy import integrate, stats

from numpyro_dp.ep import _concentration, theory

DRAWS = 4000
SIGMAS = 4.0

# dim, noise on the mean or the linear parameter, noise on the matrix
NOISES = [
    (1, 0.1, 0.05),
    (2, 0.3, 0.1),
    (5, 0.1, 0.02),
    (5, 0.0, 0.06),
    (5, 0.2, 0.0),
    (10, 0.1, 0.03),
]


def _rng(*seed):
    return np.random.default_rng(seed)


def _definite(dim, rng):
    factor = rng.normal(size=(dim, dim))
    return np.eye(dim) + factor @ factor.T / dim


def _symmetric(rng, draws, dim, scale):
    entries = scale * rng.normal(size=(draws, dim, dim))
    return np.triu(entries) + np.swapaxes(np.triu(entries, 1), 1, 2)


def _kl(mean, cov, other_mean, other_cov):
    """Divergences of many pairs, straight from the definition; infinite where none exists."""
    mean, other_mean = np.broadcast_arrays(mean, other_mean)
    cov, other_cov = np.broadcast_arrays(cov, other_cov)
    fine = np.minimum(np.linalg.eigvalsh(cov)[:, 0], np.linalg.eigvalsh(other_cov)[:, 0]) > 0
    cov, other_cov, shift = cov[fine], other_cov[fine], (other_mean - mean)[fine]
    inverse = np.linalg.inv(other_cov)
    logs = np.linalg.slogdet(other_cov)[1] - np.linalg.slogdet(cov)[1]
    trace = np.einsum("nij,nji->n", inverse, cov)
    square = np.einsum("ni,nij,nj->n", shift, inverse, shift)
    out = np.full(len(fine), np.inf)
    out[fine] = 0.5 * (logs + trace - cov.shape[-1] + square)
    return out


def _moment_draws(cov, sd1, sd2, direction, rng, draws=DRAWS):
    dim = len(cov)
    mean = np.zeros((draws, dim))
    noisy = (sd1 * rng.normal(size=(draws, dim)), cov + _symmetric(rng, draws, dim, sd2))
    clean = (mean, np.broadcast_to(cov, noisy[1].shape))
    return _kl(*clean, *noisy) if direction == "forward" else _kl(*noisy, *clean)


def _shifted(noisy, floor):
    lift = np.maximum(0.0, floor - np.linalg.eigvalsh(noisy)[:, 0])
    return noisy + lift[:, None, None] * np.eye(noisy.shape[-1])


def _raised(noisy, floor):
    values, vectors = np.linalg.eigh(noisy)
    return np.einsum("nij,nj,nkj->nik", vectors, np.maximum(values, floor), vectors)


def _natural_draws(
    linear, precision, sd1, sd2, floor, direction, rng, draws=DRAWS, repair=_shifted
):
    """The divergence averaged over e, exactly, for many E."""
    noisy = repair(precision + _symmetric(rng, draws, len(precision), sd2), floor)
    cov, other = np.linalg.inv(precision)[None], np.linalg.inv(noisy)
    mean, other_mean = (cov @ linear), other @ linear
    # Of e, whose covariance is sd1^2 I, the divergences hold a square alone.
    if direction == "forward":
        return _kl(mean, cov, other_mean, other) + 0.5 * sd1**2 * np.einsum("nii->n", other)
    spread = np.einsum("nij,jk,nki->n", other, precision, other)
    return _kl(other_mean, other, mean, cov) + 0.5 * sd1**2 * spread


def _assert_holds(values, bound, probability):
    """Fewer values lie above than are allowed, but for SIGMAS standard errors."""
    allowed = 1.0 - probability
    error = math.sqrt(allowed * probability / len(values))
    assert np.mean(values > bound) <= allowed + SIGMAS * error


# Closed forms


@pytest.mark.parametrize("dim", [1, 2, 6])
def test_natural_kl_is_the_gaussian_kl(dim):
    rng = _rng(1, dim)
    first, second = _definite(dim, rng), 3.0 * _definite(dim, rng)
    eta, other = rng.normal(size=(2, dim))
    found = theory.natural_gaussian_kl(eta, first, other, second)
    q = np.linalg.solve(first, eta)[None], np.linalg.inv(first)[None]
    p = np.linalg.solve(second, other)[None], np.linalg.inv(second)[None]
    assert found.forward == pytest.approx(_kl(*q, *p)[0], rel=1e-10)
    assert found.reverse == pytest.approx(_kl(*p, *q)[0], rel=1e-10)


def test_natural_kl_is_the_mean_log_ratio():
    rng = _rng(2)
    first, second = _definite(3, rng), _definite(3, rng)
    eta, other = rng.normal(size=(2, 3))
    q = stats.multivariate_normal(np.linalg.solve(first, eta), np.linalg.inv(first))
    p = stats.multivariate_normal(np.linalg.solve(second, other), np.linalg.inv(second))
    draws = q.rvs(100_000, random_state=rng)
    ratio = q.logpdf(draws) - p.logpdf(draws)
    found = theory.natural_gaussian_kl(eta, first, other, second).forward
    error = ratio.std() / math.sqrt(len(ratio))
    assert abs(ratio.mean() - found) < SIGMAS * error
    assert abs(ratio.mean() - 1.1 * found) > SIGMAS * error


@pytest.mark.parametrize("scales", [(0.3, None), (0.3, 0.8), (1.0, 0.01), (1e-3, 1.0)])
@pytest.mark.parametrize("prior", [False, True])
def test_clipped_divergence_is_the_gaussian_kl(scales, prior):
    rng = _rng(3)
    dim = 4
    eta0, prior_precision = np.zeros(dim), np.zeros((dim, dim))
    given = {}
    if prior:
        eta0, prior_precision = rng.normal(size=dim), np.diag([0.0, 0.5, 1.0, 2.0])
        given = {"prior_linear": eta0, "prior_precision": prior_precision}
    site = _definite(dim, rng) if not prior else _definite(dim, rng) - 0.1 * np.eye(dim)
    eta, precision = rng.normal(size=dim) + eta0, prior_precision + site
    a, b = scales[0], scales[0] if scales[1] is None else scales[1]
    clipped = eta0 + a * (eta - eta0), prior_precision + b * (precision - prior_precision)
    found = theory.clipped_sep_divergence(eta, precision, *scales, **given)
    expected = theory.natural_gaussian_kl(eta, precision, *clipped)
    np.testing.assert_allclose(found, expected, rtol=1e-9)


def test_clipping_by_one_factor_costs_the_same_whatever_the_posterior():
    rng = _rng(4)
    for dim in (1, 3):
        found = theory.clipped_sep_divergence(rng.normal(size=dim), _definite(dim, rng), 0.25)
        assert found.forward == pytest.approx(0.5 * dim * (0.25 - 1.0 - math.log(0.25)))
        assert found.reverse == pytest.approx(0.5 * dim * (4.0 - 1.0 + math.log(0.25)))
    none = theory.clipped_sep_divergence(np.ones(3), np.eye(3), 1.0)
    assert none == (0.0, 0.0)


# The lemmas of the two proofs


def _basis(dim):
    for i in range(dim):
        for j in range(i, dim):
            matrix = np.zeros((dim, dim))
            matrix[i, j] = matrix[j, i] = 1.0
            yield matrix


@pytest.mark.parametrize("dim", [1, 2, 5])
def test_noise_statistics_are_those_of_the_series(dim):
    rng = _rng(5, dim)
    base = _definite(dim, rng)
    noise = _concentration.symmetric_noise(base, 0.3)
    values, vectors = np.linalg.eigh(base)
    root = vectors / np.sqrt(values) @ vectors.T
    series = [0.3 * root @ h @ root for h in _basis(dim)]
    second = sum(a @ a for a in series)
    np.testing.assert_allclose(noise.second, second, rtol=1e-10)
    assert noise.variance == pytest.approx(np.linalg.norm(second, 2))
    weights = np.linalg.eigvalsh([[np.sum(a * b) for a in series] for b in series])
    assert weights.sum() == pytest.approx(np.trace(second))
    assert weights.max() <= noise.top * (1 + 1e-12) <= 4.0 * weights.max()


def test_printed_variance_statistic_is_the_larger_of_the_two():
    # Tropp's theorem for a matrix that is not symmetric wants the larger of two norms.
    rng = _rng(6)
    for dim in (1, 2, 4):
        inverse = np.linalg.inv(_definite(dim, rng))
        series = [inverse @ h for h in _basis(dim)]
        printed = np.linalg.norm(sum(a @ a.T for a in series), 2)
        other = np.linalg.norm(sum(a.T @ a for a in series), 2)
        assert printed == pytest.approx(dim * np.linalg.norm(inverse, 2) ** 2)
        assert other <= printed * (1 + 1e-12)


@pytest.mark.parametrize(("name", "power"), [("phi", 2), ("psi", 1)])
def test_curvature_is_its_integral(name, power):
    # Both sides of the switch to the series, which may only be above.
    for t in (0.0, 1e-6, 9e-4, 2e-3, 0.1, 0.9, 0.999):
        exact = integrate.quad(lambda u, t=t: u * (1.0 - u * t) ** -power, 0.0, 1.0)[0]
        found = float(_concentration.curvature(np.array([t]), name)[0])
        assert found == pytest.approx(exact, rel=1e-8)


def test_tail_of_a_form_holds_and_is_not_wide():
    rng = _rng(7)
    weights = np.array([1.0, 0.5, 0.5, 0.1, 0.1])
    values = np.square(rng.normal(size=(200_000, 5))) @ weights
    form = _concentration.Form(0.0, np.array([weights.sum()]), np.array([weights.max()]))
    for failure in (0.5, 0.1, 0.01):
        bound = float(_concentration.form_quantile(np.array([failure]), form)[0])
        _assert_holds(values, bound, 1.0 - failure)
        assert bound < 3.0 * np.quantile(values, 1.0 - failure)
        assert np.mean(values > bound) <= _concentration.form_tail(bound, form)[0] <= failure


@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_forms_are_the_mean_divergence_of_little_noise(direction):
    rng = _rng(19)
    base, eta = _definite(3, rng), rng.normal(size=3)
    noise, zero = _concentration.symmetric_noise(base, 2e-3), np.zeros(1)
    moment = theory._moment_form(zero, noise, 2e-3, direction).mean[0]
    values = _moment_draws(base, 2e-3, 2e-3, direction, rng)
    assert abs(values.mean() - moment) < SIGMAS * values.std() / math.sqrt(DRAWS)
    assert values.std() / math.sqrt(DRAWS) < 0.02 * moment
    form = theory._natural_form(zero, noise, base, eta, 2e-3, direction)
    natural = form.constant[0] + form.mean[0]
    values = _natural_draws(eta, base, 2e-3, 2e-3, 1e-3, direction, rng)
    assert abs(values.mean() - natural) < SIGMAS * values.std() / math.sqrt(DRAWS)
    assert values.std() / math.sqrt(DRAWS) < 0.02 * natural


@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_bounds_on_the_event_are_reached(direction):
    # E = -t B has ||S|| = t and is the worst case of both proofs.
    rng = _rng(20)
    base, eta, e, t = _definite(3, rng), rng.normal(size=3), rng.normal(size=3), 0.4
    still = _concentration.symmetric_noise(base, 0.0)
    curve = _concentration.curvature(np.array([t]), "phi" if direction == "forward" else "psi")[0]
    grow = theory._moment_form(np.array([t]), still, 1.0, direction).mean[0]
    grow /= 0.5 * np.trace(np.linalg.inv(base))
    pair = (np.zeros(3), base[None]), (e[None], (1.0 - t) * base[None])
    exact = _kl(*pair[0], *pair[1]) if direction == "forward" else _kl(*pair[1], *pair[0])
    worst = 0.5 * (curve * 3 * t**2 + grow * e @ np.linalg.solve(base, e))
    assert exact[0] == pytest.approx(worst)

    found = theory._repaired(base, eta, 0.0, t, 1e-3, direction)
    exact = theory.natural_gaussian_kl(eta, base, eta, (1.0 - t) * base)
    assert found == pytest.approx(getattr(exact, direction))
    inverse, moving = np.linalg.inv(base), _concentration.symmetric_noise(base, 0.1)
    form = theory._natural_form(np.array([t]), moving, base, 0.0 * eta, 1.0, direction)
    curve = form.mean[0] / (0.5 * np.trace(moving.second))
    grow = form.constant[0] / (0.5 * np.trace(inverse))
    worst = 0.5 * (curve * 3 * t**2 + grow * t**2 * eta @ inverse @ eta)
    assert worst == pytest.approx(found)
    # What e adds: half of tr(A^-1), or of tr(A^-1 B A^-1), for A = (1 - t) B.
    power = 1 if direction == "forward" else 2
    assert form.constant[0] == pytest.approx(0.5 * np.trace(inverse) / (1.0 - t) ** power)


# Noise on the mean and the covariance


@pytest.mark.parametrize("direction", ["forward", "reverse"])
@pytest.mark.parametrize("case", NOISES)
def test_moment_bound_holds_and_is_near(case, direction):
    dim, sd1, sd2 = case
    rng = _rng(8, dim)
    cov = _definite(dim, rng)
    values = _moment_draws(cov, sd1, sd2, direction, rng)
    for probability in (0.5, 0.9, 0.99):
        found = theory.moment_noise_bound(
            cov, sd1, sd2, probability=probability, direction=direction
        )
        assert found.probability == probability
        _assert_holds(values, found.bound, probability)
        # A sixth of the bound is exceeded too often, so it is no more than six times too large.
        assert found.bound < 6.0 * np.quantile(values, probability)
        with pytest.raises(AssertionError):
            _assert_holds(values, found.bound / 10.0, probability)


@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_moment_probability_of_a_threshold_holds(direction):
    rng = _rng(9)
    cov = _definite(3, rng)
    values = _moment_draws(cov, 0.2, 0.06, direction, rng)
    for threshold in [*np.quantile(values, [0.5, 0.99]).tolist(), 0.3, 1.0]:
        found = theory.moment_noise_bound(cov, 0.2, 0.06, threshold=threshold, direction=direction)
        assert found.bound == threshold
        _assert_holds(values, threshold, found.probability)
    assert found.probability > 0.99
    small = theory.moment_noise_bound(cov, 0.2, 0.06, threshold=1e-6, direction=direction)
    assert small.probability == 0.0


def test_moment_threshold_and_probability_agree():
    cov = _definite(4, _rng(10))
    for probability in (0.5, 0.9, 0.999):
        bound = theory.moment_noise_bound(cov, 0.1, 0.05, probability=probability).bound
        again = theory.moment_noise_bound(cov, 0.1, 0.05, threshold=bound).probability
        assert probability - 1e-3 * (1 - probability) <= again < 1.0


def test_moment_bound_vanishes_with_the_noise():
    cov = _definite(4, _rng(11))
    bounds = [
        theory.moment_noise_bound(cov, 0.1 * s, 0.1 * s, probability=0.95).bound
        for s in (1.0, 0.1, 0.01, 0.0)
    ]
    assert 50 < bounds[1] / bounds[2] < 200
    assert bounds[0] > bounds[1] > bounds[2] > bounds[3] == 0.0
    sure = theory.moment_noise_bound(cov, 0.0, 0.0, threshold=1e-9)
    assert sure.probability == 1.0


def test_moment_bound_says_nothing_of_a_covariance_that_is_lost():
    cov = np.eye(2)
    assert theory.moment_noise_bound(cov, 0.1, 2.0, probability=0.9).bound == math.inf
    assert theory.moment_noise_bound(cov, 0.1, 2.0, threshold=100.0).probability == 0.0


def test_printed_theorem_is_false_for_a_large_threshold():
    rng = _rng(12)
    values = _moment_draws(np.eye(2), 0.1, 1.0, "forward", rng)
    printed = theory.moment_noise_bound_as_printed(np.eye(2), 0.1, 1.0, 50.0, 0.5, 4.0)
    assert printed.probability > 0.9
    with pytest.raises(AssertionError):
        _assert_holds(values, printed.bound, printed.probability)
    assert np.mean(values > 50.0) > 0.5
    corrected = theory.moment_noise_bound(np.eye(2), 0.1, 1.0, threshold=50.0)
    _assert_holds(values, 50.0, corrected.probability)


def test_printed_theorem_does_not_vanish_with_the_noise():
    cov = np.eye(3)
    constants = 0.5, 2.0
    none = theory.moment_noise_bound_as_printed(cov, 0.0, 0.0, 1.0, *constants)
    # d / 2a (A - 1)(1 - tau) / (A tau)
    assert none.probability == pytest.approx(1.0 - 1.5 * 0.5)
    printed = theory.moment_noise_bound_as_printed(cov, 0.05, 0.02, 1.0, *constants)
    corrected = theory.moment_noise_bound(cov, 0.05, 0.02, threshold=1.0)
    assert printed.probability < 0.3
    assert corrected.probability > 0.999


def test_printed_formula():
    cov = np.diag([0.5, 2.0])
    spread = math.sqrt(2.0 * 2.0 * (0.1 * 2.0) ** 2 * math.log(4.0))
    last = (0.2**2 * 2.5 + 1.0) * (1.5 + 0.6 + spread - 1.0) / (1.5 * 0.6)
    expected = (math.log(1.0 + spread) - 1.0 + last) * 2.0 / (2.0 * 3.0)
    found = theory.moment_noise_bound_as_printed(cov, 0.2, 0.1, 3.0, 0.6, 1.5)
    assert found.probability == pytest.approx(1.0 - expected)


# Noise on the natural parameters


def test_average_over_the_linear_noise_is_its_closed_form():
    # What the simulations below take as given.
    rng = _rng(13)
    precision, eta = _definite(2, rng), rng.normal(size=2)
    for direction in ("forward", "reverse"):
        exact = _natural_draws(eta, precision, 0.5, 0.3, 0.1, direction, _rng(14), draws=1)[0]
        noisy = precision + _symmetric(_rng(14), 1, 2, 0.3)[0]
        noisy = noisy + max(0.0, 0.1 - np.linalg.eigvalsh(noisy)[0]) * np.eye(2)
        other_eta = eta + 0.5 * rng.normal(size=(50_000, 2))
        q = np.linalg.solve(precision, eta)[None], np.linalg.inv(precision)[None]
        cov = np.broadcast_to(np.linalg.inv(noisy), (len(other_eta), 2, 2))
        p = other_eta @ np.linalg.inv(noisy), cov
        values = _kl(*q, *p) if direction == "forward" else _kl(*p, *q)
        assert abs(values.mean() - exact) < SIGMAS * values.std() / math.sqrt(len(values))


@pytest.mark.parametrize("direction", ["forward", "reverse"])
@pytest.mark.parametrize("case", NOISES)
def test_natural_bound_holds_and_is_near(case, direction):
    dim, sd1, sd2 = case
    rng = _rng(15, dim)
    precision, eta = _definite(dim, rng), rng.normal(size=dim)
    values = _natural_draws(eta, precision, sd1, sd2, 0.01, direction, rng)
    for probability in (0.5, 0.9, 0.99):
        found = theory.natural_noise_bound(
            eta, precision, sd1, sd2, floor=0.01, probability=probability, direction=direction
        )
        assert found.probability == probability
        _assert_holds(values, found.bound * (1 + 1e-9), probability)
        assert found.bound < 8.0 * np.quantile(values, probability)
        with pytest.raises(AssertionError):
            _assert_holds(values, found.bound / 10.0, probability)


@pytest.mark.parametrize("direction", ["forward", "reverse"])
@pytest.mark.parametrize(("sd2", "floor"), [(0.5, 0.2), (1.0, 0.5), (3.0, 0.1), (0.05, 3.0)])
@pytest.mark.parametrize("repair", [_shifted, _raised])
def test_natural_bound_holds_where_the_precision_is_repaired(repair, sd2, floor, direction):
    rng = _rng(16)
    precision, eta = _definite(3, rng), rng.normal(size=3)
    values = _natural_draws(eta, precision, 0.1, sd2, floor, direction, rng, repair=repair)
    noisy = precision + _symmetric(_rng(17), DRAWS, 3, sd2)
    assert np.mean(np.linalg.eigvalsh(noisy)[:, 0] < floor) > 0.03
    for probability in (0.05, 0.5, 0.99):
        found = theory.natural_noise_bound(
            eta, precision, 0.1, sd2, floor=floor, probability=probability, direction=direction
        )
        assert math.isfinite(found.bound)
        _assert_holds(values, found.bound, probability)


def test_natural_bound_vanishes_with_the_noise():
    rng = _rng(18)
    precision, eta = _definite(4, rng), rng.normal(size=4)
    bounds = [
        theory.natural_noise_bound(
            eta, precision, 0.1 * s, 0.1 * s, floor=0.01, probability=0.95
        ).bound
        for s in (1.0, 0.1, 0.01, 0.0)
    ]
    assert 50 < bounds[1] / bounds[2] < 200
    assert bounds[0] > bounds[1] > bounds[2] > bounds[3] == 0.0


# Refusals


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: theory.moment_noise_bound(-np.eye(2), 0.1, 0.1, threshold=1.0), "definite"),
        (lambda: theory.moment_noise_bound(np.ones(2), 0.1, 0.1, threshold=1.0), "shape"),
        (lambda: theory.moment_noise_bound(np.eye(2), -0.1, 0.1, threshold=1.0), "mean_scale"),
        (
            lambda: theory.moment_noise_bound(np.eye(2), 0.1, math.inf, threshold=1.0),
            "covariance_s",
        ),
        (lambda: theory.moment_noise_bound(np.eye(2), 0.1, 0.1, threshold=0.0), "threshold"),
        (lambda: theory.moment_noise_bound(np.eye(2), 0.1, 0.1, probability=1.0), "probability"),
        (lambda: theory.moment_noise_bound(np.eye(2), 0.1, 0.1), "one of"),
        (
            lambda: theory.moment_noise_bound(np.eye(2), 0.1, 0.1, threshold=1.0, direction="up"),
            "direction",
        ),
        (lambda: theory.moment_noise_bound_as_printed(np.eye(2), 0.1, 0.1, 1.0, 2.0, 1.0), "upper"),
        (lambda: theory.clipped_sep_divergence(np.ones(2), np.eye(2), 0.0), "scale"),
        (lambda: theory.clipped_sep_divergence(np.ones(2), np.eye(2), 1.0, 1.5), "precision_scale"),
        (lambda: theory.clipped_sep_divergence(np.ones(3), np.eye(2), 1.0), "linear of shape"),
        (
            lambda: theory.clipped_sep_divergence(
                np.ones(2), np.eye(2), 1.0, prior_precision=-np.eye(2)
            ),
            "semi-definite",
        ),
        (
            lambda: theory.natural_gaussian_kl(
                np.ones(2), np.array([[1.0, 0.5], [0.0, 1.0]]), np.ones(2), np.eye(2)
            ),
            "symmetric",
        ),
        (
            lambda: theory.natural_noise_bound(
                np.ones(2), np.eye(2), 0.1, 0.1, floor=0.0, probability=0.9
            ),
            "floor",
        ),
        (
            lambda: theory.natural_noise_bound(
                np.array([1.0, math.nan]), np.eye(2), 0.1, 0.1, floor=0.1, probability=0.9
            ),
            "finite",
        ),
    ],
)
def test_errors_name_the_value(call, match):
    with pytest.raises(ValueError, match=match):
        call()
