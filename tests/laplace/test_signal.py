"""What one record sends: bounded whatever it is, of mean 0 at the truth, with its exact slope."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from hostile_models import (
    KEY,
    MODELS,
    hostile_records,
    norms,
    ordinary_records,
    problem_of,
    random_request,
    request_of,
    rooted,
    signals,
    with_numbers,
)
from models import given

from numpyro_dp.laplace.schedule import LOSS_BOUND, Kind, believed_size, bounds
from numpyro_dp.laplace.shells import WEIGHTS
from numpyro_dp.laplace.signal import symmetric
from numpyro_dp.laplace.staged_scores import Scores

ROUNDING = 1 + 1e-5
LISTED = [name for name, row in MODELS.items() if row[2]]


ENTRIES = ("score", "curvature", "power", "excess", "loss", "tail")


@pytest.mark.table
@pytest.mark.parametrize("name", MODELS)
def test_no_record_sends_more_than_its_bound(name):
    """For random whitenings, clips and draws, in each kind of release."""
    model, kinds, listed = MODELS[name]
    number = 20 if "known" in name else 200
    problem = problem_of(model, ordinary_records(kinds, number, 0))
    assert (problem.outcomes.number > 0) == listed
    every, largest, rng = signals(problem, 3), np.zeros(6), np.random.default_rng(1)
    for trial in range(6):
        arrays = with_numbers(problem, hostile_records(kinds, number, trial))
        for kind in Kind:
            request = random_request(problem.outcomes.size, kind, rng)
            found = every(request, jax.random.key(trial), arrays)
            assert all(np.isfinite(leaf).all() for leaf in found.values())
            assert norms(found).max() <= ROUNDING
            for at, entry in enumerate(e for e in ENTRIES if e in found):
                weight = float(request.weights[at])
                sizes = norms({"one": found[entry]})
                assert sizes.max() <= weight * ROUNDING
                largest[at] = max(largest[at], sizes.max() / max(weight, 1e-9))
    assert largest[1] > 0.9  # the bound is reached


def at_one_point(problem, rng, **options):
    """A request whose draws are one point, with a whitening that is not diagonal."""
    size = problem.outcomes.size
    mean, whitening = 0.3 * rng.normal(size=size), np.eye(size) + 0.3 * rooted(rng, size, 0.1)
    return request_of(size, mean=mean, whitening=whitening, **options), mean, whitening


def score_of(found, request):
    return np.asarray(found["score"], np.float64) * float(request.clips[0] / request.weights[0])


def curvature_of(found, request):
    factor = float(request.clips[1] / request.weights[1])
    return np.stack([symmetric(np.asarray(row, np.float64)) for row in found["curvature"]]) * factor


def repeated(arrays, place, values):
    """All records with each of the outcomes: arrays of len(values) * N rows."""
    size = len(arrays[0])
    rows = [np.tile(array, (len(values),) + (1,) * (array.ndim - 1)) for array in arrays]
    rows[place] = np.repeat(values, size).astype(arrays[place].dtype)
    return tuple(rows)


@pytest.mark.table
@pytest.mark.parametrize("name", LISTED)
@pytest.mark.parametrize("clips", [
    pytest.param((1.0, 1.0, 0.5), id="clipped"),
    pytest.param((100.0, 1000.0, 1.0), id="free", marks=pytest.mark.extended),
])  # fmt: skip
def test_listed_outcomes_have_score_0_on_average_and_the_curvature_is_its_slope(name, clips):
    model, kinds, _ = MODELS[name]
    size = 20
    arrays = ordinary_records(kinds, size, 3)
    problem, rng = problem_of(model, arrays), np.random.default_rng(2)
    outcomes = problem.outcomes
    request, mean, whitening = at_one_point(problem, rng, clips=clips)
    every = signals(problem, 2)

    def chances(z):
        return np.asarray(
            jax.vmap(
                lambda row: outcomes.listed(jnp.asarray(z, jnp.float32)[None], row).probabilities
            )(tuple(map(jnp.asarray, arrays)))[..., 0], np.float64,
        )  # fmt: skip

    number = outcomes.number
    found = every(request, KEY, repeated(arrays, 1, np.arange(number)))
    scores = score_of(found, request).reshape(number, size, -1)
    curvature = curvature_of(found, request).reshape(number, size, *whitening.shape)
    # It does not see the outcome.
    np.testing.assert_allclose(curvature[1:], curvature[:-1], atol=2e-6 * np.abs(curvature).max())
    at_z = chances(mean)
    middle = np.einsum("nk,knd->nd", at_z, scores)
    np.testing.assert_allclose(middle, 0, atol=1e-5 * np.abs(scores).max())
    step = 1e-2
    slope = np.stack([
        np.einsum("nk,knd->nd",
                  (chances(mean + step * axis) - chances(mean - step * axis)) / (2 * step), scores)
        for axis in whitening
    ], axis=-1)  # fmt: skip
    slope = (slope + slope.swapaxes(1, 2)) / 2
    np.testing.assert_allclose(curvature[0], slope, atol=3e-3 * np.abs(slope).max())
    # Outside the support.
    for odd in (-1, number, 99):
        outside = every(request, KEY, repeated(arrays, 1, [odd]))
        for entry in outside.values():
            np.testing.assert_array_equal(np.asarray(entry), 0)


@pytest.mark.parametrize(
    ("name", "odd"), [("bernoulli", [np.nan, 0.7, -0.5, 2]), ("poisson", [np.nan, np.inf, -np.inf])]
)
def test_outcomes_that_are_missing_or_in_between_add_nothing(name, odd):
    model, kinds, _ = MODELS[name]
    x, y = ordinary_records(kinds, len(odd) + 1, 4)
    x, y = np.tile(x[-1:], (len(y), 1)), np.array([*odd, 1], np.float32)
    problem = problem_of(model, (x, y))
    request, *_ = at_one_point(problem, np.random.default_rng(5))
    found = signals(problem, 2)(request, KEY, with_numbers(problem, (x, y)))
    for entry in found.values():
        np.testing.assert_array_equal(np.asarray(entry)[:-1], 0)
        assert np.any(np.asarray(entry)[-1])


def test_bernoulli_in_closed_form():
    model, kinds, _ = MODELS["bernoulli"]
    x, y = ordinary_records(kinds, 40, 4)
    x[:5] *= 30
    problem, rng = problem_of(model, (x, y)), np.random.default_rng(5)
    for clips in ((0.5, 0.2, 0.2), (2.0, 0.3, 0.2), (1e3, 1e6, 0.2)):
        request, mean, whitening = at_one_point(problem, rng, clips=clips)
        found = signals(problem, 2)(request, KEY, (x, y))
        p = 1 / (1 + np.exp(-x.astype(float) @ mean))
        rows = x @ whitening
        norm = np.linalg.norm(rows, axis=1)
        weight = np.minimum(clips[0] / (np.maximum(p, 1 - p) * norm),
                            clips[1] / (p * (1 - p) * norm**2))  # fmt: skip
        weight = np.minimum(1, weight)
        score = (weight * (y - p))[:, None] * rows
        curvature = (weight * p * (1 - p))[:, None, None] * rows[:, :, None] * rows[:, None, :]
        np.testing.assert_allclose(score_of(found, request), score, atol=2e-5 * np.abs(score).max())
        scale = np.abs(curvature).max()
        np.testing.assert_allclose(curvature_of(found, request), curvature, atol=2e-5 * scale)
        chance = np.where(y > 0, p, 1 - p)
        own, other = (np.minimum(weight * gap * norm, 0.2) for gap in (1 - chance, chance))
        loss = ((1 - weight) * p * (1 - p))[:, None] * rows**2 / (LOSS_BOUND * clips[1])
        for at, entry, expected, atol in (
            (2, "power", weight**2 * p * (1 - p) * norm**2 / clips[0] ** 2, 1e-7),
            (3, "excess", (1 - chance) * (own**2 - other**2) / 0.2**2, 1e-6),
            (4, "loss", loss / np.maximum(1, np.linalg.norm(loss, axis=1, keepdims=True)), 1e-6),
        ):
            sent = np.asarray(found[entry]) / float(request.weights[at])
            np.testing.assert_allclose(sent, expected, rtol=1e-4, atol=atol)


def simulated_copies(name, number, seed, pairs, clips):
    """Copies of one record whose outcomes are simulated at the point of all draws."""
    model, kinds, _ = MODELS[name]
    arrays = ordinary_records(kinds, 20, seed)
    problem, rng = problem_of(model, arrays), np.random.default_rng(seed)
    outcomes = problem.outcomes
    request, mean, whitening = at_one_point(problem, rng, clips=clips)
    one = tuple(jnp.asarray(array[0]) for array in arrays)
    keys = jax.random.split(jax.random.key(seed), number)
    z = jnp.asarray(mean, jnp.float32)
    drawn = jax.jit(jax.vmap(lambda key: outcomes.simulate(z, one, key)))(keys)
    copies = [np.repeat(np.asarray(array)[None], number, 0) for array in one]
    sites = ["y"] if "count" not in drawn else ["y", "count"]
    for place, site in enumerate(sites, 1):
        copies[place] = np.asarray(drawn[site]).reshape(number).astype(copies[place].dtype)
    found = signals(problem, pairs)(request, KEY, with_numbers(problem, tuple(copies), seed))
    excess = np.asarray(found["excess"], np.float64)

    def slope(key):
        outcome = outcomes.simulate(z, one, key)
        return outcomes.score(z, one, outcome) / (1 if "weighted" not in name else one[2])

    own = np.asarray(jax.jit(jax.vmap(slope))(keys), np.float64) @ whitening
    return score_of(found, request), curvature_of(found, request), own, excess


SIMULATED = [name for name in MODELS if name not in LISTED and "censored" not in name]


@pytest.mark.full
@pytest.mark.parametrize("name", SIMULATED)
@pytest.mark.parametrize("clips", [
    pytest.param((1.5, 2.0, 1.0), id="clipped"),
    pytest.param((1e3, 1e6, 1.0), id="free", marks=pytest.mark.extended),
])  # fmt: skip
def test_simulated_outcomes_have_score_0_on_average_and_the_curvature_is_its_slope(name, clips):
    number = 8_000
    scores, curvatures, own, excess = simulated_copies(name, number, 6, 12, clips)
    error = scores.std(0) / np.sqrt(number)
    assert np.all(np.abs(scores.mean(0)) <= 4 * error + 1e-7)
    products = scores[:, :, None] * own[:, None, :]
    gap = (products + products.swapaxes(1, 2)) / 2 - curvatures
    assert np.all(np.abs(gap.mean(0)) <= 4.5 * gap.std(0) / np.sqrt(number) + 1e-6)
    # Observed outcomes have the power that the model expects.
    assert abs(excess.mean()) <= 4 * excess.std() / np.sqrt(number)


@pytest.mark.full
def test_the_weight_of_rare_counts_does_not_know_their_centre():
    """If both came from the same outcomes, the mean score would be 20 standard errors from 0."""
    rate, counts, size = 0.2, np.arange(6), 20_000
    x = np.ones((size, 3), np.float32)
    problem = problem_of(MODELS["poisson"][0], (x, np.zeros(size, np.int32)))
    request = request_of(3, mean=[np.log(rate) / 3] * 3, clips=(0.3, 10.0, 1.0))
    x, y, numbers = with_numbers(problem, (x, np.zeros(size, np.int32)))
    found = signals(problem, 2)(request, KEY, repeated((x, y, numbers), 1, counts))
    chances = np.exp(-rate) * rate**counts / [1, 1, 2, 6, 24, 120]
    scores = np.einsum("k,knd->nd", chances, score_of(found, request).reshape(6, size, 3))
    error = scores.std(0) / np.sqrt(size)
    assert np.all(np.abs(scores.mean(0)) < 4 * error)


@pytest.mark.extended
@pytest.mark.parametrize(("name", "types"), [
    ("poisson", (np.int32, np.float32, np.uint8)), ("linear", (np.float32, np.int32)),
    ("bernoulli", (np.int32, np.float32, np.bool_)), ("censored, Weibull", (np.float32, np.int32)),
])  # fmt: skip
def test_the_type_of_stored_outcomes_changes_nothing(name, types):
    model, kinds, _ = MODELS[name]
    x, y, *rest = ordinary_records(kinds, 20, 4)
    sent = []
    for kind in types:
        whole = (1 + np.abs(np.round(y))) % (2 if name == "bernoulli" else 9)
        arrays = x, whole.astype(kind), *rest
        problem = problem_of(model, arrays)
        request = request_of(problem.outcomes.size, clips=(1.0, 2.0, 1.0))
        found = signals(problem, 2)(request, KEY, with_numbers(problem, arrays, 1))
        sent.append(np.concatenate([np.ravel(part) for part in found.values()]))
    for other in sent[1:]:
        np.testing.assert_allclose(other, sent[0], rtol=1e-5, atol=1e-6)


class _Paired(dist.Distribution):
    """log p = y . eta - (1 . eta)^2 / 2 + ...: what is affine in z depends on the outcome."""

    support = dist.constraints.real_vector

    def __init__(self, eta):
        self.eta = eta
        super().__init__(jnp.shape(eta)[:-1], jnp.shape(eta)[-1:])

    def sample(self, key, sample_shape=()):
        return self.eta.sum(-1, keepdims=True) + jax.random.normal(key, self.eta.shape)

    def log_prob(self, value):
        along = jnp.einsum("...k,...k->...", value, self.eta)
        return along - self.eta.sum(-1) ** 2 / 2


_paired = given(lambda x, w: _Paired(x @ w), w=dist.Normal(0, 1).expand([3, 2]).to_event(2))


def test_scores_of_other_outcomes_where_the_record_s_own_is_in_the_affine_part():
    rng = np.random.default_rng(8)
    x, y = (rng.normal(size=(20, k)).astype(np.float32) for k in (3, 2))
    outcomes = problem_of(_paired, (x, y)).outcomes
    z, row = jnp.asarray(rng.normal(size=6), jnp.float32), (jnp.asarray(x[0]), jnp.asarray(y[0]))
    scores = Scores(outcomes, jnp.eye(6), row)
    for outcome in (outcomes.own(row), outcomes.simulate(z, row, KEY)):
        found = scores.at(z, outcome) @ scores.frame
        np.testing.assert_allclose(found, outcomes.score(z, row, outcome), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("times", [0.1, 1.0, 8.0])
def test_the_size_of_scores_is_found_whatever_the_scale_of_columns(times):
    model, kinds, _ = MODELS["bernoulli"]
    x, y = ordinary_records(kinds, N := 400, 3)
    problem, size = problem_of(model, (x, y)), x.shape[1]
    guess = np.eye(size) * np.sqrt(4 / N)  # p (1 - p) is 1 / 4 at 0, and columns have variance 1
    clips = bounds(Kind.SIZE, size, N, 1.0, 0.2)
    request = request_of(
        size, kind=Kind.SIZE, whitening=guess, clips=clips, weights=(0, 0, 1, 0, 0, 0, 0)
    )
    found = signals(problem, 2)(request, KEY, (times * x, y))
    assert not np.any(found["score"]) and not np.any(found["curvature"])
    total = np.sum(np.asarray(found["power"], np.float64))
    typical = np.median(np.linalg.norm(times * x, axis=1)) / np.sqrt(size)
    assert believed_size(total, N, 100.0) == pytest.approx(np.log(typical), abs=0.3)
    assert abs(believed_size(total + 1e3, N, 1e-4)) < 0.01  # all noise: the public guess stays


@pytest.mark.parametrize("name", ["poisson", "linear"])
def test_shells_add_up_to_the_clipped_score(name):
    model, kinds, _ = MODELS[name]
    arrays = ordinary_records(kinds, 200, 3)
    problem, rng = problem_of(model, arrays), np.random.default_rng(2)
    clips, norms = (6.0, 1e6, 1.0), np.array([1.0, 1.5, 2.5, 4.0, 6.0])
    one, mean, whitening = at_one_point(problem, rng, clips=clips)
    parts = request_of(
        problem.outcomes.size, mean=mean, whitening=whitening, clips=clips, shells=(norms, WEIGHTS)
    )
    arrays, every = with_numbers(problem, arrays), signals(problem, 24)
    whole = score_of(every(one, KEY, arrays), one)
    found = every(parts, KEY, arrays)
    thickness = np.diff(norms, prepend=0) / WEIGHTS
    each = np.concatenate([found["score"][:, None], found["shells"]], axis=1)
    total = np.einsum("k,nkd->nd", thickness, each) / float(parts.weights[0])
    long = np.linalg.norm(whole, axis=1) > 0.5
    assert np.sum(long) > 50
    total, whole = total[long], whole[long]
    # The weight of a record is that of the part with the least room.
    ratio = np.sum(total * whole, axis=1) / np.sum(whole**2, axis=1)
    assert np.all((ratio > 0.3) & (ratio < 1.2)) and 0.7 < np.median(ratio) < 1.05
    np.testing.assert_allclose(total, ratio[:, None] * whole, atol=0.1 * np.abs(whole).max())
    assert np.any(np.abs(found["shells"]).max(axis=(0, 2)) > 0.01)
    assert not np.any(every(one, KEY, arrays)["shells"])
