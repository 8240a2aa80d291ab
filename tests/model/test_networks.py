"""Networks of flax, nnx and equinox through NumPyro's own modules, with the results of SVI."""

from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from flat import dpmcmc, dpsvi
from flax import nnx
from numpyro.contrib.module import (
    eqx_module,
    flax_module,
    nnx_module,
    random_eqx_module,
    random_flax_module,
    random_nnx_module,
)
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoDelta, AutoDiagonalNormal
from numpyro.infer.initialization import init_to_sample

from numpyro_dp import SGLD
from numpyro_dp.estimators import vanilla
from numpyro_dp.model.separation import UnsupportedModelError
from numpyro_dp.samplers import Poisson

KEY, D, UNITS = jax.random.key(0), 3, 8
X = np.random.default_rng(0).normal(size=(20, D)).astype(np.float32)
Y = X[:, 0] * X[:, 1]


class Linen(nn.Module):
    norm: str = "none"
    dtype: Any = None  # of what is computed; weights have single precision

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(UNITS, dtype=self.dtype)(x)
        if self.norm == "group":
            x = nn.GroupNorm(num_groups=2)(x)
        return nn.Dense(1, dtype=self.dtype)(jnp.tanh(x)).astype(jnp.float32)


class Nnx(nnx.Module):
    def __init__(self, rngs, norm="none"):
        self.first = nnx.Linear(D, UNITS, rngs=rngs)
        self.last = nnx.Linear(UNITS, 1, rngs=rngs)
        kinds = {"batch": nnx.BatchNorm, "layer": nnx.LayerNorm}
        self.norm = kinds[norm](UNITS, rngs=rngs) if norm in kinds else lambda x: x

    def __call__(self, x):
        return self.last(jnp.tanh(self.norm(self.first(x))))


class Eqx(eqx.Module):
    first: eqx.nn.Linear
    last: eqx.nn.Linear

    def __init__(self, key):
        first, last = jax.random.split(key)
        self.first = eqx.nn.Linear(D, UNITS, key=first)
        self.last = eqx.nn.Linear(UNITS, 1, key=last)

    def __call__(self, x):
        return self.last(jnp.tanh(self.first(x)))


PRIOR = dist.Normal(0, 1)
SCALE_MIXTURE = dist.MixtureSameFamily(
    dist.Categorical(probs=jnp.array([0.5, 0.5])), dist.Normal(0, jnp.array([1.0, 0.05]))
)
NETWORKS = {
    "flax": lambda: flax_module("net", Linen(), input_shape=(1, D)),
    "flax, group norm": lambda: flax_module("net", Linen("group"), input_shape=(1, D)),
    "flax, remat": lambda: flax_module("net", nn.remat(Linen)(), input_shape=(1, D)),
    "flax, half precision": lambda: flax_module(
        "net", nn.remat(Linen)(dtype=jnp.bfloat16), input_shape=(1, D)
    ),
    "random flax": lambda: random_flax_module("net", Linen(), PRIOR, input_shape=(1, D)),
    "random flax, Laplace": lambda: random_flax_module(
        "net", Linen(), dist.Laplace(0, 0.5), input_shape=(1, D)
    ),
    "random flax, mixture": lambda: random_flax_module(
        "net", Linen(), SCALE_MIXTURE, input_shape=(1, D)
    ),
    "nnx": lambda: nnx_module("net", Nnx(nnx.Rngs(0))),
    "nnx, layer norm": lambda: nnx_module("net", Nnx(nnx.Rngs(0), "layer")),
    "random nnx": lambda: random_nnx_module("net", Nnx(nnx.Rngs(0)), PRIOR),
    "equinox": lambda: jax.vmap(eqx_module("net", Eqx(KEY))),
    "random equinox": lambda: jax.vmap(random_eqx_module("net", Eqx(KEY), PRIOR)),
}


def model_of(make):
    def model(x, y):
        net = make()
        with numpyro.plate("records", x.shape[0]):
            numpyro.sample("y", dist.Normal(net(x)[..., 0], 0.5), obs=y)

    return model


def private(model, **options):
    guide = AutoDelta(model, init_loc_fn=init_to_sample)
    return dpsvi(model, guide, optax.sgd(1e-3), **options)


@pytest.mark.extended
@pytest.mark.parametrize("name", NETWORKS)
def test_without_noise_and_clip_networks_train_as_in_svi(name):
    model = model_of(NETWORKS[name])
    guide = AutoDelta(model, init_loc_fn=init_to_sample)
    plain = SVI(model, guide, optax.sgd(1e-3), Trace_ELBO())
    expected = plain.run(KEY, 5, X, Y, progress_bar=False).params
    found = private(model, clip_norm=np.inf, noise_multiplier=0.0)
    found = found.run(KEY, 5, X, Y, progress_bar=False).params
    assert {*found} == {*expected}
    atol = 3e-3 if "half" in name else 1e-6  # SVI adds records up in half precision, too
    for ours, theirs in zip(*map(jax.tree.leaves, (dict(found), expected)), strict=True):
        assert ours.dtype == jnp.float32
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=atol)


@pytest.mark.extended
@pytest.mark.parametrize("name", ["random flax, Laplace", "random flax, mixture"])
def test_a_posterior_of_weights_is_drawn(name):
    """Bayes by backprop."""
    model = model_of(NETWORKS[name])
    guide = AutoDiagonalNormal(model, init_loc_fn=init_to_sample, init_scale=0.05)
    params = dpsvi(model, guide, optax.sgd(1e-3)).run(KEY, 5, X, Y, progress_bar=False).params
    draws = guide.sample_posterior(KEY, params, sample_shape=(3,))
    assert draws["net/Dense_0.kernel"].shape == (3, D, UNITS)
    assert all(np.isfinite(value).all() for value in draws.values())


@pytest.mark.full
@pytest.mark.parametrize("name", ["nnx", "random equinox", "flax, half precision"])
def test_a_record_moves_the_gradient_by_at_most_the_clip_norm(name):
    svi = private(model_of(NETWORKS[name]), noise_multiplier=0.0)
    state = svi.init(KEY, X, Y)
    other = X.copy()
    other[3] = 1e4

    def moved(x):
        before = jax.tree.leaves(svi.get_params(state))
        after = jax.tree.leaves(svi.get_params(svi.update(state, x, Y)[0]))
        # A step of SGD over its size is the clipped sum.
        return np.concatenate([
            np.ravel(np.asarray(a, np.float64) - b) / 1e-3
            for a, b in zip(after, before, strict=True)
        ])  # fmt: skip

    distance = np.linalg.norm(moved(X) - moved(other))
    assert 0.1 < distance < 2.001  # one record is replaced: twice the clip norm


@pytest.mark.extended
def test_norms_by_entry_need_not_name_an_entry_without_numbers():
    """``random_flax_module`` leaves one, of the shapes of the weights, in the parameters."""
    model = model_of(NETWORKS["random flax"])

    def driver(*rest):
        norms = {"auto_loc": 1.0, "auto_scale": 0.5} | dict.fromkeys(rest, 2.0)
        return dpsvi(model, AutoDiagonalNormal, optax.sgd(1e-3), estimator=vanilla(),
                     clip_norm=norms)  # fmt: skip

    found = driver().run(KEY, 2, X, Y, progress_bar=False)
    assert found.privacy.plan.sensitivity == pytest.approx(1.25**0.5)
    assert {*found.params} == {"auto_loc", "auto_scale", "net$params"}
    for rest in ("net$params", ...):
        with pytest.raises(ValueError, match=r"each of \['auto_loc', 'auto_scale'\]"):
            driver(rest).init(KEY, X, Y)


def test_batch_norm_is_refused_by_name():
    model = model_of(lambda: nnx_module("net", Nnx(nnx.Rngs(0), "batch")))
    with pytest.raises(UnsupportedModelError, match=r"Mutable state at \['net\$state'\]"):
        private(model).init(KEY, X, Y)


class Wide(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(40)(jnp.repeat(x, 10, axis=-1))  # weights are summed as products of matrices
        return nn.Dense(1)(jnp.tanh(x))


@pytest.mark.extended
def test_small_microbatches_give_the_same_run():
    model = model_of(lambda: flax_module("net", Wide(), input_shape=(1, D)))
    options = {"secret_key": 1, "repetition": True, "sampler": Poisson(0.6)}
    runs = [
        private(model, microbatch_size=size, **options).run(KEY, 3, X, Y, progress_bar=False).params
        for size in (None, 3)
    ]
    for one, two in zip(*map(jax.tree.leaves, runs), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-6)


@pytest.mark.extended
def test_small_microbatches_give_the_same_chains():
    model = model_of(lambda: random_flax_module("net", Wide(), PRIOR, input_shape=(1, D)))
    runs = []
    for size in (None, 3):
        mcmc = dpmcmc(SGLD(model, 1e-6), num_warmup=1, num_samples=3, num_chains=2, secret_key=1,
                      repetition=True, microbatch_size=size)  # fmt: skip
        mcmc.run(KEY, X, Y)
        runs.append(mcmc.get_samples(group_by_chain=True))
    for name, value in runs[0].items():
        assert value.shape[:2] == (2, 3)
        np.testing.assert_allclose(value, runs[1][name], rtol=1e-4, atol=1e-6)
