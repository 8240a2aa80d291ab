"""Models that draw keys of their own: a mask for each record, and another in each step."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from flat import dpmcmc, dpsep, dpsvi
from flax import nnx
from jax.flatten_util import ravel_pytree
from models import of
from numpyro.contrib.module import flax_module, nnx_module
from numpyro.infer import Predictive
from numpyro.infer.autoguide import AutoDelta

from numpyro_dp import SGLD, UnsupportedModelError, secret_key
from numpyro_dp.model.structure import read_model
from numpyro_dp.run import step


def masked(x):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([64]).to_event(1))
    with numpyro.plate("records", x.shape[0]):
        keep = jax.random.bernoulli(numpyro.prng_key(), 0.5, (x.shape[0], 64))
        numpyro.sample("x", dist.Normal(2 * keep @ w, 1), obs=x)


plain = of(lambda w: dist.Normal(w.sum(), 1), w=dist.Normal(0, 1).expand([64]).to_event(1))


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dropout(0.5, deterministic=False)(nn.relu(nn.Dense(16)(x)))
        return nn.Dense(1)(x)[..., 0]


def with_flax(dropout):
    def model(x, y=None):
        kinds = {"apply_rng": ["dropout"]} if dropout else {}
        module = Net() if dropout else nn.Dense(1)
        net = flax_module("net", module, input_shape=(1, 3), **kinds)
        rngs = {"dropout": numpyro.prng_key()} if dropout else None
        with numpyro.plate("records", x.shape[0]):
            numpyro.sample("y", dist.Normal(net(x, rngs=rngs).reshape(-1), 1), obs=y)

    return model


KEY = jax.random.key(0)
ONES = np.ones(50, np.float32)
X = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)


def driver(model, guide=AutoDelta, **options):
    """Full batches; without noise unless told otherwise."""
    options = {"noise_multiplier": 0.0, "secret_key": 1, "repetition": True} | options
    return dpsvi(model, guide, optax.sgd(1.0), **options)


def end(model, *args, steps=1, **options):
    """Parameters after a run, as one vector."""
    found = driver(model, **options).run(KEY, steps, *args, progress_bar=False).params
    return np.asarray(ravel_pytree(found)[0], np.float64)


def nothing_to_learn(x, y=None):
    """The guide of a network whose weights are parameters of the model."""


def signals(model, x, key):
    svi = driver(model)
    state = svi.init(KEY, x)
    (session,) = svi._sessions.values()
    estimator = svi.method.estimator(session.problem)
    public = estimator.prepare(key, svi.optim.get_params(state.optim_state))
    rows = session.rows((x,), {}).arrays
    return np.asarray(jax.vmap(lambda row: estimator.signal(public, row)["w"])(rows))


@pytest.mark.extended
def test_each_record_has_a_mask_of_its_own_in_each_step():
    one, again, other = (signals(masked, ONES, jax.random.key(seed)) for seed in (1, 1, 2))
    kept = one != 0
    assert len(np.unique(kept, axis=0)) == 50
    assert 0.45 < kept.mean() < 0.55
    np.testing.assert_array_equal(one, again)
    assert (kept != (other != 0)).mean() > 0.4


@pytest.mark.full
@pytest.mark.parametrize(("model", "same"), [(masked, False), (plain, True)])
def test_what_records_draw_is_secret(model, same):
    """Masks by public keys and row numbers would all be others where one record is taken out."""

    one, again, other = (end(model, ONES, secret_key=secret) for secret in (1, 1, 2))
    np.testing.assert_array_equal(one, again)
    assert np.array_equal(one, other) is same


@pytest.mark.full
@pytest.mark.parametrize(("model", "x", "rest", "guide", "huge", "least"), [
    (masked, ONES, (), AutoDelta, 1e6, 0.99),
    (with_flax(True), X, (jnp.zeros(40),), nothing_to_learn, 1e4, 0.98),
])  # fmt: skip
def test_a_record_that_draws_counts_as_any_other(model, x, rest, guide, huge, least):
    """One that is not finite as nothing, one that is huge by the clip norm."""

    def moved(value):
        changed = x.copy()
        changed[7] = value
        return end(model, changed, *rest, guide=guide)

    nothing = moved(np.nan)
    assert np.isfinite(nothing).all()
    np.testing.assert_array_equal(nothing, moved(np.inf))
    assert least < np.linalg.norm(moved(huge) - nothing) <= 1 + 1e-6


@pytest.mark.full
@pytest.mark.parametrize("by_place", [False, True])
def test_a_record_taken_out_leaves_the_draws_of_others(monkeypatch, by_place):
    """With matched numbers one record moves a sum by the clip norm; by their places, by more."""
    rng = np.random.default_rng(3)
    numbers, x = rng.integers(2**32, size=50, dtype=np.uint32), rng.choice([-50.0, 50.0], 50)

    def total(kept):
        given = jnp.arange(len(kept), dtype=jnp.uint32) if by_place else jnp.asarray(numbers[kept])
        monkeypatch.setattr(step, "_numbers", lambda key, size: given[:size])
        return end(masked, x[kept])

    rows = np.arange(50)
    moved = np.linalg.norm(total(rows) - total(np.delete(rows, 7)))
    if by_place:
        assert moved > 1.5
    else:
        assert 0.99 < moved <= 1 + 1e-6


@pytest.mark.extended
def test_a_run_that_goes_on_draws_as_one_that_did_not_stop():
    def noisy():
        return driver(masked, noise_multiplier=1.0, num_steps=4)

    half = noisy().run(KEY, 2, ONES, progress_bar=False)
    rest = noisy().run(KEY, 2, ONES, init_state=half.state, progress_bar=False)
    whole = end(masked, ONES, steps=4, noise_multiplier=1.0, num_steps=4)
    np.testing.assert_array_equal(whole, ravel_pytree(rest.params)[0])


@pytest.mark.full
def test_numbers_of_records_are_drawn_in_each_step():
    x = np.ones(3000, np.float32)
    svi = driver(masked)
    state = svi.init(KEY, x).opened
    (session,) = svi._sessions.values()
    rows, found = session.rows((x,), {}), []
    for _ in range(2):
        found.append(np.asarray(step._numbers(state.secret_key, 3000)))
        state, _ = session._step(state, rows)
    for numbers in found:
        assert numbers.dtype == np.uint32 and len(np.unique(numbers)) > 2990
        assert abs(numbers.astype(float).mean() / 2**32 - 0.5) < 0.02
        assert abs(np.corrcoef(numbers, np.arange(3000))[0, 1]) < 0.08
    assert abs(np.corrcoef(*found)[0, 1]) < 0.08


@pytest.mark.full
def test_microbatches_change_no_draw():
    whole, parts = (end(masked, ONES, steps=2, **each) for each in ({}, {"microbatch_size": 7}))
    np.testing.assert_allclose(whole, parts, rtol=1e-5, atol=1e-7)


@pytest.mark.extended
def test_each_run_of_a_sweep_draws_by_secret_numbers_of_its_own():
    found = driver(masked).sweep(KEY[None], 1, ONES, clip_norm=[1.0, 1.0])
    one, other = np.asarray(found.params["w_auto_loc"])
    assert not np.array_equal(one, other)
    for index, params in enumerate((one, other)):
        alone = end(masked, ONES, secret_key=jax.random.fold_in(secret_key(1), index))
        np.testing.assert_allclose(params, alone, rtol=1e-4, atol=1e-6)


@pytest.mark.full
def test_each_chain_draws_by_secret_numbers_of_its_own(monkeypatch):
    numbers, drawn = [], step._numbers

    def seen(key, size):
        found = drawn(key, size)
        jax.debug.callback(lambda value: numbers.append(np.asarray(value)), found)
        return found

    monkeypatch.setattr(step, "_numbers", seen)
    mcmc = dpmcmc(SGLD(masked, 1e-3), num_warmup=1, num_samples=2, num_chains=2)
    mcmc.run(KEY, ONES)
    jax.effects_barrier()
    assert len(numbers) == 6 and all(len(np.unique(row)) == 50 for row in numbers)
    assert len(np.unique(np.concatenate(numbers))) == 300


def test_message_passing_refuses_a_model_that_draws():
    with pytest.raises(UnsupportedModelError, match="draws random keys"):
        dpsep(masked).run(KEY, 1, X[:, 0])


@pytest.mark.full
def test_dropout_of_nnx_draws_where_it_is_called():
    class Dropping(nnx.Module):
        def __init__(self, rngs, own):
            self.layer = nnx.Linear(3, 8, rngs=rngs)
            self.dropout = nnx.Dropout(0.5, rngs=rngs if own else None)

        def __call__(self, x, rngs=None):
            return self.dropout(self.layer(x), rngs=rngs).sum(-1)

    def model_of(own):
        def model(x, y=None):
            net = nnx_module("net", Dropping(nnx.Rngs(0), own))
            rngs = {} if own else {"rngs": nnx.Rngs(dropout=numpyro.prng_key())}
            with numpyro.plate("records", x.shape[0]):
                numpyro.sample("y", dist.Normal(net(x, **rngs).reshape(-1), 1), obs=y)

        return model

    assert read_model(model_of(False), (X, X[:, 0]), {}).draws
    with pytest.raises(UnsupportedModelError, match="Dropout"):
        read_model(model_of(True), (X, X[:, 0]), {})


@pytest.mark.extended
def test_dropout_of_flax_is_kept_on_in_prediction():
    rng = np.random.default_rng(1)
    x = rng.normal(size=(400, 3)).astype(np.float32)
    y = (np.abs(x[:, 0]) - 0.8).astype(np.float32)
    model = with_flax(True)
    svi = dpsvi(model, nothing_to_learn, optax.adam(0.02), clip_norm=20.0,
                noise_multiplier=0.1)  # fmt: skip
    result = svi.run(KEY, 200, x, y, progress_bar=False)
    predict = Predictive(model, params=result.params, num_samples=50, parallel=True)
    draws = np.asarray(predict(jax.random.key(1), jnp.asarray(x))["y"])
    assert draws.shape == (50, 400)
    assert np.mean((draws.mean(0) - y) ** 2) < 0.5 * y.var()
