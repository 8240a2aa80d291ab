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
from models import given, of, scored
from numpyro.infer import Trace_ELBO
from numpyro.infer.autoguide import AutoDiagonalNormal

from numpyro_dp import UnsupportedModelError
from numpyro_dp.core import Centring, Estimator, MechanismState
from numpyro_dp.estimators import aligned, centred, vanilla
from numpyro_dp.mechanisms import AdaptiveClip, GaussianMechanism
from numpyro_dp.privacy.mechanism.clip_norm import ClipNorm
from numpyro_dp.privacy.mechanism.gaussian import build_mechanism
from numpyro_dp.samplers import Poisson
from numpyro_dp.sums.bounded import bounded_sum

D = 3
KEY = jax.random.key(3)


WEIGHTS = dist.Normal(0, 1).expand([D]).to_event(1)
logistic = given(lambda x, w: dist.Bernoulli(logits=x @ w), w=WEIGHTS)
counts = given(lambda x, w: dist.Poisson(jnp.exp(x @ w)), w=WEIGHTS)
noisy = given(
    lambda x, w, scale: dist.Normal(x @ w, scale), w=WEIGHTS, scale=dist.LogNormal(0, 0.5)
)


grades = given(
    lambda x, w: dist.Categorical(logits=x @ w), w=dist.Normal(0, 1).expand([D, 4]).to_event(2)
)


# With a parameter, which the model optimises.
shifted = given(lambda x, w: dist.Bernoulli(logits=x @ w + numpyro.param("shift", 0.0)), w=WEIGHTS)


scaled = given(
    lambda x, w: dist.Normal(
        x @ w, numpyro.param("scale", 1.0, constraint=dist.constraints.positive)
    ),
    w=WEIGHTS,
)


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


def flat(tree):
    return jnp.concatenate([jnp.ravel(leaf) for leaf in jax.tree.leaves(tree)])


def contribution(estimator, public, x, y, clip, mechanism=None):
    """What one record adds to the sum."""
    mechanism = mechanism or plain_mechanism(clip)
    return np.asarray(compiled(estimator, mechanism)(public, x, y, jnp.full(1, 0, jnp.uint32)))


@functools.cache
def plain_mechanism(clip):
    return build_mechanism(GaussianMechanism(), ClipNorm.of(clip), 1.0, 1.0)


def added(estimator, mechanism, public, x, y, seeds):
    mask, batch = jnp.ones(1, bool), (x[None], y[None])
    return flat(
        bounded_sum(estimator, mechanism, public, batch, mask, live=jnp.asarray(True), seeds=seeds)
    )


@functools.cache
def compiled(estimator, mechanism):
    """Not op by op, which takes several times as long."""
    return jax.jit(functools.partial(added, estimator, mechanism))


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
    estimator, public = problem_of(model, X, jnp.zeros(len(X), int), centred(base()))
    w = getattr(public, "drawn", public).latents["w"]
    mechanism = plain_mechanism(clip)
    if lengthens:
        builder = example("automatic_clipping").AutomaticClipping()
        mechanism = build_mechanism(builder, ClipNorm.of(clip), 1.0, 1.0)

    def of_all(estimator, mechanism=None):
        return [contribution(estimator, public, x, jnp.asarray(k), clip, mechanism)
                for k in range(values)]  # fmt: skip

    plain = 0.0
    for x in X:
        logits = x @ w + (MOVED["shift"] if model is shifted else 0.0)
        logits = logits if values > 2 else jnp.stack([0.0, logits])
        probs, each = np.asarray(jax.nn.softmax(logits), np.float64), of_all(estimator, mechanism)
        size = max(np.linalg.norm(one) for one in each)
        assert size <= clip
        assert np.linalg.norm(probs @ each) < 1e-5 * clip  # the grid of sums is 2^-21 clip norms
        plain += np.linalg.norm(probs @ of_all(estimator._replace(centring=None)))
        if clip < 1 and model is logistic and base is aligned:
            assert size > 0.95 * clip  # the likelier outcome is shorter, the other reaches the norm
    if clip < 1:  # records are clipped: without centring their mean is not 0
        assert plain > clip


@pytest.mark.table
@pytest.mark.parametrize("clip", [0.1, 1.5])
@pytest.mark.parametrize("model", [counts, noisy, scaled])
def test_drawn_outcomes_center_at_every_clip_norm(model, clip):
    """Within five standard errors of 0, where clipped scores are far from it for rare counts."""
    x, number = jnp.asarray(X[0] / 3), 8000
    estimator, public = problem_of(model, X, jnp.zeros(len(X)), centred(aligned()))
    mean, key = x @ public.latents["w"], jax.random.key(1)
    if model is counts:
        ys = jax.random.poisson(key, jnp.exp(mean), (number,)).astype(float)
    else:
        log_scale = MOVED["scale"] if model is scaled else public.latents["scale"]
        ys = mean + jnp.exp(log_scale) * jax.random.normal(key, (number,))

    def sums(estimator):
        one = functools.partial(added, estimator, plain_mechanism(clip), public, x)
        each = jax.jit(jax.vmap(lambda y, seed: one(y, seed[None])))
        found = np.asarray(each(ys, jnp.arange(number, dtype=jnp.uint32)), np.float64)
        assert np.linalg.norm(found, axis=1).max() <= clip
        return found.mean(0), found.std(0) / np.sqrt(number)

    mean, errors = sums(estimator)
    assert (np.abs(mean) < 5 * errors + 1e-5 * clip).all()
    if model is counts and clip == 0.1:
        plain, errors = sums(estimator._replace(centring=None))
        assert (np.abs(plain) > 20 * errors).any(), "the check cannot fail"


@pytest.mark.full
def test_a_record_that_is_not_finite_counts_as_0():
    estimator, public = problem_of(logistic, X, jnp.zeros(len(X), int), centred(aligned()))
    for bad in (np.nan, np.inf, 1e30):
        found = contribution(estimator, public, jnp.full(D, bad), jnp.asarray(1), 1.0)
        np.testing.assert_array_equal(found, 0)


@pytest.mark.full
def test_one_row_that_is_not_finite_takes_the_others_out():
    def row(odds, example, seed, k):  # the coin itself, heads and tails
        heads = jax.nn.sigmoid(odds)
        return jnp.stack([example[0], 1.0, 0.0])[k], jnp.stack([0.0, heads, 1 - heads])[k]

    coin = Estimator(
        lambda key, odds: odds,
        lambda odds, row: {"w": 3 * (row[1] - jax.nn.sigmoid(odds))},
        lambda odds, released: released.total,
    )
    centring = Centring(coin, 2, row, listed=True)
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
    mask, seeds, live = jnp.arange(200) % 3 > 0, jnp.zeros(200, jnp.uint32), jnp.asarray(True)
    each = sum(
        contribution(estimator, public, x[i], y[i], 0.5, mechanism) for i in np.flatnonzero(mask)
    )
    for rows in (None, 7):
        found = bounded_sum(
            estimator, mechanism, public, (x, y), mask, live=live, rows=rows, seeds=seeds
        )
        np.testing.assert_allclose(flat(found), each, rtol=5e-3)  # one record has another margin
    state = MechanismState(norm.as_arrays(), ())
    assert mechanism.privatise(jax.random.key(0), found, state)[0].keys() == {"w"}


@pytest.mark.full
def test_models_without_a_prior_to_draw_from_or_with_a_moving_support_are_not_centred():
    improper = given(
        lambda x, w: dist.Bernoulli(logits=x @ w + numpyro.param("shift", 0.0)),
        w=dist.ImproperUniform(dist.constraints.real, (D,), ()),
    )
    from_a_bound = given(
        lambda x, w: dist.TruncatedNormal(x @ w, 1.0, low=numpyro.param("low", -6.0)), w=WEIGHTS
    )
    to_a_bound = given(lambda x, high: dist.Uniform(0.0, high), high=dist.LogNormal(3.0, 0.1))
    for model in (improper, from_a_bound, to_a_bound, shifted):
        estimator, _ = problem_of(model, X, jnp.zeros(len(X), int), None)
        assert (estimator.centring is None) == (model is not shifted)


@pytest.mark.full
def test_what_cannot_be_centred_is_refused_and_the_default_does_without():
    local = scored(lambda x, mean: -((x - mean) ** 2), mean=dist.Normal(0, 1))
    y = np.arange(len(X)) % 2
    for model, loss, args, words in (
        (local, Trace_ELBO(), (jnp.zeros(5),), "factor"),
        (logistic, Trace_ELBO(2), (X, y), "needs one draw a step, got num_particles=2"),
    ):
        own = dpsvi(model, AutoDiagonalNormal, optax.adam(0.1), loss, estimator=centred(aligned()))
        with pytest.raises(UnsupportedModelError, match=words):
            own.init(KEY, *args)
    svi = dpsvi(logistic, AutoDiagonalNormal, optax.adam(0.1), Trace_ELBO(2), estimator=None)
    assert svi.run(KEY, 3, X, y, progress_bar=False).scores is not None
    found = []  # without a clip norm a record adds its plain signal
    for estimator in (None, aligned()):
        svi = dpsvi(logistic, AutoDiagonalNormal, optax.sgd(0.1), estimator=estimator,
                    clip_norm=np.inf, noise_multiplier=0.0)  # fmt: skip
        found.append(svi.run(KEY, 2, X, y, progress_bar=False).params["auto_loc"])
    np.testing.assert_allclose(*found, rtol=1e-5)


@pytest.mark.extended
def test_a_clip_norm_moves_plain_fits_and_not_centred_ones():
    """Columns of different lengths, two thirds of the records clipped, no noise to speak of."""
    rng = np.random.default_rng(5)
    x = rng.normal(size=(4000, D)) * np.array([2.0, 1.0, 0.5])
    y = (rng.random(4000) < 1 / (1 + np.exp(-x @ np.array([1.0, -1.0, 0.5])))).astype(int)
    reference, plain, other = (
        dpsvi(logistic, AutoDiagonalNormal, optax.adam(0.03), estimator=estimator, clip_norm=clip,
              sampler=Poisson(0.2), noise_multiplier=1e-3)
        .run(KEY, 800, x.astype(np.float32), y, progress_bar=False)
        .posterior.summary()["w"]["mean"]
        for estimator, clip in ((aligned(), 100.0), (aligned(), 0.2), (centred(aligned()), 0.2))
    )  # fmt: skip
    assert np.abs(plain - reference).max() > 0.4
    assert np.abs(other - reference).max() < 0.2


@pytest.mark.extended
def test_a_clip_norm_does_not_move_rare_counts():
    """Three in four counts are 0. The clip norm is far below the score of any other count."""
    y = np.random.default_rng(5).poisson(0.3, 5000)
    rates = of(lambda log_rate: dist.Poisson(jnp.exp(log_rate)), log_rate=dist.Normal(0, 2))
    plain, other = (
        dpsvi(rates, AutoDiagonalNormal, optax.adam(optax.linear_schedule(0.1, 0, 400)),
              estimator=estimator, clip_norm=0.1, noise_multiplier=1e-3)
        .run(KEY, 400, y, progress_bar=False).params["auto_loc"][0]
        for estimator in (aligned(), centred(aligned()))
    )  # fmt: skip
    assert plain < np.log(0.3) - 1
    assert abs(other - np.log(y.mean())) < 0.1
