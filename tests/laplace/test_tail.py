"""The norms of scores next to what the model says."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from models import given, slopes

from numpyro_dp import DPLaplace, Privacy, PrivacyBudget
from numpyro_dp.laplace.schedule import schedule
from numpyro_dp.laplace.shells import SHELLS, WEIGHTS, clip_norms, joined
from numpyro_dp.laplace.tail import SIZES, Tail, sizes

N = 3000


linear = given(lambda x, w, s: dist.Normal(x @ w, s), w=slopes(), s=dist.HalfNormal(1.0))
counts = given(lambda x, w: dist.Poisson(jnp.exp(0.5 + x @ w)), w=slopes(0.5))


def line(x):
    return x @ [0.5, -0.5, 0.2]


def rate(x):
    return np.exp(0.5 + x @ [0.2, -0.2, 0.1])


def fitted(model, outcome, number):
    rng = np.random.default_rng(number)
    x = rng.standard_normal((N, 3)).astype(np.float32)
    y = jnp.asarray(outcome(x, rng), jnp.float32 if model is linear else jnp.int32)
    laplace = DPLaplace(model, budget=PrivacyBudget(2.0, 1e-5), privacy=Privacy(secret_key=number))
    return laplace.run(jax.random.key(number), jnp.asarray(x), y, progress_bar=False)


NORMS = np.linalg.norm(np.random.default_rng(1).standard_normal((4000, 4)), axis=1) / 4


def read(counts, noise, doubt=4.0, number=N, norms=NORMS):
    """The tail of counts whose classes have noise of standard deviation ``noise``."""
    weights = np.sqrt(np.append(np.full(6, 1 / 6), 2 / 3))
    return Tail.read(weights * counts, weights[0] * noise, number, doubt, norms)


def test_sizes_share_all_norms_and_differ_by_one_at_most():
    unit, rng = jnp.asarray(2.0), np.random.default_rng(0)
    found = sizes(2 * jnp.asarray([[0.1, 0.4], [0.99, 1.01], [3.0, 1e9]]), unit)
    assert found.shape == (SIZES,)
    np.testing.assert_allclose(found[:6] * np.sqrt(6) * 6, [2, 1, 1, 1, 0, 1], rtol=1e-6)
    far = ((0.1**4 + 0.4**4 + 0.99**4 + 1.01**4 + 3**4) / 3.5**4 + 1) / 6
    assert found[6] * np.sqrt(1.5) == pytest.approx(far, rel=1e-5)
    norms = [jnp.zeros(1), jnp.full(1, 1e9), *map(jnp.asarray, 30 * rng.random((50, 2)) ** 3)]
    all_of = np.stack([sizes(norm, unit) for norm in norms])
    apart = np.linalg.norm(all_of[:, None] - all_of, axis=-1)
    assert np.max(apart) == pytest.approx(1, rel=1e-6)


def test_noise_alone_is_no_misfit():
    rng = np.random.default_rng(0)
    noises = 37 / np.append(np.ones(6), 2)
    tails = [read(noises * rng.standard_normal(SIZES), 37.0) for _ in range(200)]
    assert sum(tail.misplaced > 0 for tail in tails) <= 2
    right = read(np.zeros(SIZES), 37.0)
    assert right.bias(1.0, 4, N) == 0


def test_two_usual_misfits_are_found_where_all_classes_together_tell_nothing():
    """Errors of classes at epsilon .3 in 3,000 records, of Student-t noise and of counts."""
    rng, noises = np.random.default_rng(1), 94 / np.append(np.ones(6), 2)
    heavy, large = (
        np.array([170, -210, -35, 40, 15, 0, 45]),
        np.array([-340, 60, 170, 95, 20, 0, 85]),
    )
    for errors, least, part in ((heavy, 50, 0.8), (large, 90, 0.6)):
        tails = [read(errors + noises * rng.standard_normal(SIZES), 94.0) for _ in range(100)]
        sure = [tail for tail in tails if tail.sure]
        assert len(sure) >= least
        misplaced = np.median([tail.misplaced for tail in sure])
        assert 0.8 < misplaced / np.linalg.norm(errors[:6]) < 1.4
        # Heavy tails bias a scale, which takes more than a bias of counts.
        usual = np.median([tail.bias(1.0, 4, N) / tail.misplaced for tail in sure])
        assert usual == pytest.approx(part * np.sqrt(4 / N), rel=0.01)


def test_clip_norms_follow_the_tail_and_the_noise():
    body = np.array([-200.0, 120, 50, 20, 10, 0, 0])
    tail = read(body, 20.0)
    quiet, loud = (clip_norms(tail, 1.3, 6, N, noise) for noise in (0.1, 3.0))
    assert quiet[0] == loud[0] == pytest.approx(1.3)
    assert loud[-1] == pytest.approx(2 * 1.3) and quiet[-1] > 2 * loud[-1]
    np.testing.assert_allclose(quiet[1:] / quiet[:-1], quiet[1] / quiet[0])
    far = body.copy()
    far[5] = 300  # outliers far out
    assert clip_norms(read(far, 20.0), 1.3, 6, N, 0.3)[-1] > 2 * quiet[-1]
    assert tail.bias(quiet[-1], 6, N) < tail.bias(1.0, 6, N)
    core = read(np.array([200.0, -120, -50, 20, 10, 0, 0]), 20.0)  # around a scale
    assert core.bias(1.0, 6, N) > 1.2 * tail.bias(1.0, 6, N)


@pytest.mark.parametrize("noise", [0.3, 1.0, 5.0])
def test_shells_find_the_latent_that_clipping_biases(noise):
    """One latent of five has a bias, and the clip at a norm of 16 cuts off a tenth of it."""
    rng, norms = np.random.default_rng(0), np.geomspace(1, 16, SHELLS + 1)
    noises = noise * np.diff(norms, prepend=0) / WEIGHTS
    of_all = 12 * norms**-0.8
    errors, widths = [], []
    for _ in range(300):
        parts = rng.normal(scale=0.3, size=(SHELLS + 1, 5))
        parts[:, 4] += np.diff(-of_all, prepend=0)
        sampled = np.sum(parts, axis=0)
        sampled[4] += of_all[-1]  # the sum without a clip
        released = parts + noises[:, None] * rng.normal(size=parts.shape)
        score, error = joined(released, noises, 1.3 * of_all, True)
        errors.append((score - sampled) / error)
        widths.append(error)
    covered = np.mean(np.abs(errors) < 1.645, axis=0)
    assert np.all(covered[:4] > 0.9) and covered[4] > 0.65
    # A bias of 12 that was the same in all latents would widen each by 5.
    assert np.mean(np.array(widths)[:, :4]) < 2 * noises[0] + 1.5


def test_a_few_records_far_out_are_seen_and_stay_seen():
    """The chi-square over all classes has no power for 1 % of many records."""
    moved = np.array([-30.0, -80, -20, 80, 50, 20, 150])
    one = read(moved, 34.0, number=16_000)
    assert np.sum((one.counts**2 / one.variances)[:6]) < 18.5
    assert one.misplaced >= 1.5 * one.far == 225
    assert one.bias(1.2, 14, 16_000) > one.bias(6.0, 14, 16_000) > 0
    assert read(-moved, 34.0, number=16_000).misplaced == 0
    later = read(-0.8 * moved, 34.0, number=16_000)
    assert not later.sure
    assert later.joined(one).sure and later.joined(one).far < one.far


def test_what_the_model_expects_is_known_from_invented_records():
    """Long tails of the model itself are no misfit, and short ones make few records visible."""
    counts = np.array([0.0, 0, 0, 0, 0, 0, 13])
    heavy = np.abs(np.random.default_rng(2).standard_t(1.5, 4000)) / 2
    short, long = read(counts, 8.0), read(counts, 8.0, norms=heavy)
    assert short.sure and not long.sure
    assert np.all(short.own <= long.own) and short.own[-1] < long.own[-1] / 4


def test_as_many_records_as_noise_hides_are_named():
    quiet, loud = (read(np.zeros(SIZES), noise) for noise in (3.0, 40.0))
    assert not quiet.sure and 0 < quiet.unseen.far < loud.unseen.far / 5
    assert loud.unseen.bias(1.3, 6, N) > 1 > quiet.unseen.bias(1.3, 6, N)


def test_two_tails_count_by_their_precision():
    near, far = (read(np.full(SIZES, 10.0 * k), 20.0, 40.0 * k**4) for k in (1, 2))
    joined = near.joined(far)
    parts = far.variances / (near.variances + far.variances)
    np.testing.assert_allclose(joined.counts, parts * 10 + (1 - parts) * 20)
    assert np.all(joined.counts < 11)
    equal = near.joined(near)
    np.testing.assert_allclose(equal.own, near.own)
    np.testing.assert_allclose(equal.noise, near.noise / 2)


@pytest.mark.full
@pytest.mark.table
@pytest.mark.parametrize(("model", "outcome", "wrong"), [
    (linear, lambda x, rng: line(x) + rng.standard_t(3, N) / np.sqrt(3), True),
    (linear, lambda x, rng: line(x) + rng.standard_normal(N), False),
    (counts, lambda x, rng: rng.poisson(rate(x) * rng.gamma(1, 1, N)), True),
    (counts, lambda x, rng: rng.poisson(rate(x)), False),
], ids=["Student", "normal", "negative binomial", "Poisson"])  # fmt: skip
def test_a_wrong_distribution_is_told_and_a_right_one_is_not(model, outcome, wrong):
    found = [fitted(model, outcome, number).diagnose() for number in (1, 2)]
    told = ["misfit" in [each.name for each in one.findings] for one in found]
    assert told == [wrong, wrong]


def test_records_far_out_may_be_very_far():
    """Without a usual shape the classes say how far, and without them little is assumed."""
    near, away = np.zeros(SIZES), np.zeros(SIZES)
    near[[1, 3, 6]], away[[1, 5, 6]] = (-20, 20, 20), (-20, 20, 20)
    sharp = [read(counts, 2.0) for counts in (near, away)]
    assert sharp[1].bias(2.0, 4, N) > 3 * sharp[0].bias(2.0, 4, N) > 0
    blurred = [read(counts, np.where(np.arange(SIZES) == 6, 2.0, 60.0)) for counts in (near, away)]
    assert blurred[1].bias(2.0, 4, N) < 1.5 * blurred[0].bias(2.0, 4, N)


def test_the_tail_has_more_of_a_budget_that_leaves_little_noise():
    few, many = (schedule(mu, 4, 3000, tail=True) for mu in (0.2, 1.0))
    for plan in (few, many):
        np.testing.assert_allclose(math.fsum(plan.shares), 1)
    tails = [sum(part[5] for part in plan.parts) for plan in (few, many)]
    assert 0.05 < tails[0] < 0.07 and 0.13 < tails[1] < 0.16
