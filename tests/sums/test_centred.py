"""Centred signals: within the clip norm, and with mean 0 under the model."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from conformance.registry import example
from flat import dpsvi
from models import given
from numpyro.infer import Trace_ELBO
from numpyro.infer.autoguide import AutoDiagonalNormal

from numpyro_dp import DPSVI, Privacy, UnsupportedModelError
from numpyro_dp.core import Centring, Estimator, MechanismState
from numpyro_dp.estimators import aligned, centred, vanilla
from numpyro_dp.mechanisms import AdaptiveClip, GaussianMechanism
from numpyro_dp.privacy.mechanism.clip_norm import ClipNorm
from numpyro_dp.privacy.mechanism.gaussian import build_mechanism
from numpyro_dp.samplers import FullBatch, Poisson
from numpyro_dp.sums.bounded import bounded_sum

D = 3
KEY = jax.random.key(3)


def weights():
    return numpyro.sample("w", dist.Normal(0, 1).expand([D]).to_event(1))


def logistic(x, y=None):
    w = weights()
    with numpyro.plate("records", x.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=x @ w), obs=y)


def counts(x, y=None):
    w = weights()
    with numpyro.plate("records", x.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(x @ w)), obs=y)


grades = given(
    lambda x, w: dist.Categorical(logits=x @ w), w=dist.Normal(0, 1).expand([D, 4]).to_event(2)
)


def noisy(x, y=None):
    w = weights()
    scale = numpyro.sample("scale", dist.LogNormal(0, 0.5))
    with numpyro.plate("records", x.shape[0]):
        numpyro.sample("y", dist.Normal(x @ w, scale), obs=y)


def shifted(x, y=None):
    """With a parameter, which the model optimises."""
    w, shift = weights(), numpyro.param("shift", 0.0)
    with numpyro.plate("records", x.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=x @ w + shift), obs=y)


def scaled(x, y=None):
    w = weights()
    scale = numpyro.param("scale", 1.0, constraint=dist.constraints.positive)
    with numpyro.plate("records", x.shape[0]):
        numpyro.sample("y", dist.Normal(x @ w, scale), obs=y)


MOVED = {"shift": jnp.asarray(1.2), "scale": jnp.asarray(-0.7)}  # unconstrained, not the first ones


def problem_of(model, x, y, estimator):
    """Estimator, public values of a step and its draw."""
    svi = dpsvi(model, AutoDiagonalNormal, optax.adam(0.1), estimator=estimator)
    state = svi.init(jax.random.key(0), x, y)
    session = svi._session((x, y), {})
    params = svi.method.optim.get_params(state.optim_state)
    params |= {name: value for name, value in MOVED.items() if name in params}
    found = session._estimator((), state.mechanism_state)
    return found, found.prepare(KEY, params)


def contribution(estimator, public, x, y, clip, seed=0, mechanism=None):
    """What one record adds to the sum."""
    mechanism = mechanism or plain_mechanism(clip)
    total = compiled(estimator, mechanism)(public, x, y, jnp.full(1, seed, jnp.uint32))
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(total)])


@functools.cache
def plain_mechanism(clip):
    return build_mechanism(GaussianMechanism(), ClipNorm.of(clip), 1.0, 1.0)


@functools.cache
def compiled(estimator, mechanism):
    """Not op by op, which takes several times as long."""

    def one(public, x, y, seeds):
        mask, live = jnp.ones(1, bool), jnp.asarray(True)
        return bounded_sum(
            estimator, mechanism, public, (x[None], y[None]), mask, live=live, seeds=seeds
        )

    return jax.jit(one)


X = np.asarray(np.random.default_rng(0).normal(size=(6, D)) * 3, np.float32)


@pytest.mark.full
@pytest.mark.table
@pytest.mark.parametrize(
    ("model", "values", "base", "clip", "lengthens"),
    [
        (logistic, 2, aligned, 0.05, False), (logistic, 2, vanilla, 0.05, False),
        (logistic, 2, aligned, 100.0, False), (logistic, 2, aligned, 100.0, True),
        (grades, 4, vanilla, 0.05, False), (grades, 4, aligned, 100.0, False),
        (grades, 4, vanilla, 100.0, True), (shifted, 2, aligned, 0.05, False),
        (shifted, 2, vanilla, 100.0, False),
    ],
)  # fmt: skip
def test_the_mean_over_listed_outcomes_is_0(model, values, base, clip, lengthens):
    """A mechanism that lengthens short signals gives negative weights to other outcomes."""
    y = jnp.zeros(len(X), int)
    estimator, public = problem_of(model, X, y, centred(base()))
    latents = {"w": getattr(public, "drawn", public).latents["w"]}
    builder = (
        example("automatic_clipping").AutomaticClipping() if lengthens else GaussianMechanism()
    )
    mechanism = build_mechanism(builder, ClipNorm.of(clip), 1.0, 1.0)
    plain = 0.0
    for x in X:
        logits = x @ latents["w"] + (MOVED["shift"] if model is shifted else 0.0)
        logits = logits if values > 2 else jnp.stack([0.0, logits])
        probs = np.asarray(jax.nn.softmax(logits), np.float64)
        each = [
            contribution(estimator, public, x, jnp.asarray(k), clip, mechanism=mechanism)
            for k in range(values)
        ]
        size = max(np.linalg.norm(one) for one in each)
        assert size <= clip
        assert np.linalg.norm(probs @ each) < 1e-5 * clip  # the grid of sums is 2^-21 clip norms
        own = estimator._replace(centring=None)
        clipped = [contribution(own, public, x, jnp.asarray(k), clip) for k in range(values)]
        plain += np.linalg.norm(probs @ clipped)
    if clip < 1:  # records are clipped: without centring their mean is not 0
        assert plain > clip


@pytest.mark.table
@pytest.mark.parametrize("clip", [0.1, 1.5])
@pytest.mark.parametrize("model", [counts, noisy, scaled])
def test_drawn_outcomes_center_at_every_clip_norm(model, clip):
    """Within five standard errors of 0, where clipped scores are far from it for rare counts."""
    x, number = X[0] / 3, 8000
    estimator, public = problem_of(model, X, jnp.zeros(len(X)), centred(aligned()))
    draw = jax.vmap(lambda key: _drawn(model, public, x, key))
    ys = draw(jax.random.split(jax.random.key(1), number))
    mechanism = build_mechanism(GaussianMechanism(), ClipNorm.of(clip), 1.0, 1.0)

    def of(y, seed, estimator):
        total = bounded_sum(
            estimator, mechanism, public, (jnp.asarray(x)[None], y[None]), jnp.ones(1, bool),
            live=jnp.asarray(True), seeds=seed[None],
        )  # fmt: skip
        return jnp.concatenate([jnp.ravel(leaf) for leaf in jax.tree.leaves(total)])

    def sums(estimator):
        each = jax.jit(jax.vmap(lambda y, seed: of(y, seed, estimator)))
        found = np.asarray(each(ys, jnp.arange(number, dtype=jnp.uint32)), np.float64)
        assert np.linalg.norm(found, axis=1).max() <= clip
        return found.mean(0), found.std(0) / np.sqrt(number)

    mean, errors = sums(estimator)
    assert (np.abs(mean) < 5 * errors + 1e-5 * clip).all()
    if model is counts and clip == 0.1:
        plain, errors = sums(estimator._replace(centring=None))
        assert (np.abs(plain) > 20 * errors).any(), "the check cannot fail"


def _drawn(model, public, x, key):
    latents = public.latents
    mean = x @ latents["w"]
    if model is counts:
        return jax.random.poisson(key, jnp.exp(mean)).astype(float)
    log_scale = MOVED["scale"] if model is scaled else latents["scale"]
    return mean + jnp.exp(log_scale) * jax.random.normal(key)


def test_clipped_records_of_listed_outcomes_use_the_whole_clip_norm():
    clip, y = 0.05, jnp.zeros(len(X), int)
    estimator, public = problem_of(logistic, X, y, centred(aligned()))
    for x in X:  # the likelier outcome has the shorter score, so the other one reaches the norm
        sizes = [np.linalg.norm(contribution(estimator, public, x, jnp.asarray(k), clip))
                 for k in (0, 1)]  # fmt: skip
        assert 0.95 * clip < max(sizes) <= clip


@pytest.mark.full
def test_a_record_that_is_not_finite_counts_as_0():
    estimator, public = problem_of(logistic, X, jnp.zeros(len(X), int), centred(aligned()))
    for bad in (np.nan, np.inf, 1e30):
        found = contribution(estimator, public, jnp.full(D, bad), jnp.asarray(1), 1.0)
        np.testing.assert_array_equal(found, 0)


@pytest.mark.full
def test_one_row_that_is_not_finite_takes_the_others_out():
    def rows(odds, example, seed):  # the coin itself, heads, tails and padding
        heads = jax.nn.sigmoid(odds)
        return (jnp.stack([example[0], 1.0, 0.0, 0.0]), jnp.stack([0.0, heads, 1 - heads, 0.0]))

    coin = Estimator(
        lambda key, odds: odds,
        lambda odds, row: {"w": 3 * (row[0] - jax.nn.sigmoid(odds))},
        lambda odds, released: released.total,
    )
    centring = Centring(coin, 3, rows, listed=True)
    mechanism = build_mechanism(GaussianMechanism(), ClipNorm.of(0.5), 1.0, 100.0)
    for outcome, counts in ((1.0, True), (np.nan, False)):
        found = bounded_sum(
            coin._replace(centring=centring), mechanism, jnp.asarray(0.4), (jnp.array([outcome]),),
            jnp.ones(1, bool), live=jnp.asarray(True), seeds=jnp.zeros(1, jnp.uint32),
        )  # fmt: skip
        assert any(np.any(np.asarray(leaf)) for leaf in jax.tree.leaves(found)) == counts


@pytest.mark.full
def test_batches_are_the_sum_of_their_records_in_any_microbatch():
    y = jnp.asarray(np.random.default_rng(1).integers(2, size=200))
    x = jnp.asarray(np.random.default_rng(2).normal(size=(200, D)), jnp.float32)
    estimator, public = problem_of(logistic, x, y, centred(aligned()))
    norm = ClipNorm.of(AdaptiveClip(0.5))
    mechanism = build_mechanism(GaussianMechanism(), norm, 1.0, 100.0)
    mask = jnp.arange(200) % 3 > 0
    seeds = jnp.zeros(200, jnp.uint32)
    whole, parts = (
        bounded_sum(estimator, mechanism, public, (x, y), mask, live=jnp.asarray(True), rows=rows,
                    seeds=seeds)
        for rows in (None, 7)
    )  # fmt: skip
    each = sum(
        contribution(estimator, public, x[i], y[i], 0.5, mechanism=mechanism)
        for i in range(200) if mask[i]
    )  # fmt: skip
    for found in (whole, parts):
        flat = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(found)])
        np.testing.assert_allclose(flat, each, rtol=5e-3)  # one record has another margin
    state = MechanismState(norm.as_arrays(), ())
    assert mechanism.privatise(jax.random.key(0), whole, state)[0].keys() == {"w"}


@pytest.mark.full
def test_a_model_without_outcomes_is_refused():
    def local(x):
        mean = numpyro.sample("mean", dist.Normal(0, 1))
        with numpyro.plate("records", x.shape[0]):
            numpyro.factor("x", -((x - mean) ** 2))

    svi = dpsvi(local, AutoDiagonalNormal, optax.adam(0.1), estimator=centred(aligned()))
    with pytest.raises(UnsupportedModelError, match="factor"):
        svi.init(jax.random.key(0), jnp.zeros(5))


@pytest.mark.full
def test_models_without_a_prior_to_draw_from_or_with_a_moving_support_are_not_centred():
    def improper(x, y=None):
        shift = numpyro.param("shift", 0.0)
        w = numpyro.sample("w", dist.ImproperUniform(dist.constraints.real, (D,), ()))
        with numpyro.plate("records", x.shape[0]):
            numpyro.sample("y", dist.Bernoulli(logits=x @ w + shift), obs=y)

    def from_a_bound(x, y=None):
        low = numpyro.param("low", -6.0)
        w = weights()
        with numpyro.plate("records", x.shape[0]):
            numpyro.sample("y", dist.TruncatedNormal(x @ w, 1.0, low=low), obs=y)

    def to_a_bound(x, y=None):
        high = numpyro.sample("high", dist.LogNormal(3.0, 0.1))
        with numpyro.plate("records", x.shape[0]):
            numpyro.sample("y", dist.Uniform(0.0, high), obs=y)

    for model in (improper, from_a_bound, to_a_bound):
        estimator, _ = problem_of(model, X, jnp.zeros(len(X), int), None)
        assert estimator.centring is None
    estimator, _ = problem_of(shifted, X, jnp.zeros(len(X), int), None)
    assert estimator.centring is not None


@pytest.mark.full
def test_without_a_clip_norm_a_record_adds_its_plain_signal():
    y = np.arange(len(X)) % 2
    found = []
    for estimator in (None, aligned()):
        svi = dpsvi(logistic, AutoDiagonalNormal, optax.sgd(0.1), estimator=estimator,
                    clip_norm=np.inf, noise_multiplier=0.0)  # fmt: skip
        found.append(svi.run(KEY, 2, X, y, progress_bar=False).params["auto_loc"])
    np.testing.assert_allclose(*found, rtol=1e-5)


@pytest.mark.full
def test_several_draws_a_step_are_refused_and_the_default_does_without():
    svi = dpsvi(logistic, AutoDiagonalNormal, optax.adam(0.1), Trace_ELBO(2),
                estimator=centred(aligned()))  # fmt: skip
    with pytest.raises(UnsupportedModelError, match="needs one draw a step, got num_particles=2"):
        svi.init(KEY, X, np.zeros(len(X), int))
    svi = dpsvi(logistic, AutoDiagonalNormal, optax.adam(0.1), Trace_ELBO(2), estimator=None)
    assert svi.run(KEY, 3, X, np.zeros(len(X), int), progress_bar=False).scores is not None


@pytest.mark.extended
def test_a_clip_norm_moves_plain_fits_and_not_centred_ones():
    """Columns of different lengths, two thirds of the records clipped, no noise to speak of."""
    rng = np.random.default_rng(5)
    x = rng.normal(size=(4000, D)) * np.array([2.0, 1.0, 0.5])
    truth = np.array([1.0, -1.0, 0.5])
    y = (rng.random(4000) < 1 / (1 + np.exp(-x @ truth))).astype(int)
    x = x.astype(np.float32)
    found = {}
    for name, estimator, clip in (
        ("reference", aligned(), 100.0), ("plain", aligned(), 0.2),
        ("centred", centred(aligned()), 0.2),
    ):  # fmt: skip
        svi = dpsvi(logistic, AutoDiagonalNormal, optax.adam(0.03), estimator=estimator,
                    clip_norm=clip, sampler=Poisson(0.2), noise_multiplier=1e-3)  # fmt: skip
        result = svi.run(KEY, 800, x, y, progress_bar=False)
        found[name] = np.asarray(result.posterior.summary()["w"]["mean"])
    errors = {name: np.abs(found[name] - found["reference"]).max() for name in found}
    assert errors["plain"] > 0.4
    assert errors["centred"] < 0.2, errors


@pytest.mark.extended
def test_a_clip_norm_does_not_move_rare_counts():
    """Three in four counts are 0. The clip norm is far below the score of any other count."""
    y = np.random.default_rng(5).poisson(0.3, 5000)

    def rates(y):
        log_rate = numpyro.sample("log_rate", dist.Normal(0, 2))
        with numpyro.plate("records", len(y)):
            numpyro.sample("y", dist.Poisson(jnp.exp(log_rate)), obs=y)

    found = {}
    for name, estimator in (("plain", aligned()), ("centred", centred(aligned()))):
        optim = optax.adam(optax.linear_schedule(0.1, 0, 400))
        svi = DPSVI(rates, AutoDiagonalNormal(rates), optim, estimator=estimator, clip_norm=0.1,
                    sampler=FullBatch(), privacy=Privacy(noise_multiplier=1e-3))  # fmt: skip
        found[name] = svi.run(KEY, 400, y, progress_bar=False).params["auto_loc"][0]
    assert found["plain"] < np.log(0.3) - 1
    assert abs(found["centred"] - np.log(y.mean())) < 0.1
