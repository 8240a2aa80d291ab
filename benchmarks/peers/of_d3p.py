"""The tasks of `compare.py` by d3p 0.2.0, in the environment of `d3p.txt`."""

import functools
import time

import d3p.random as strong_rng
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from compiled import arrays, one_step
from d3p.dputil import approximate_sigma_remove_relation
from d3p.minibatch import subsample_batchify_data
from d3p.svi import DPSVI
from jax import lax
from numpyro import optim
from numpyro.distributions import constraints
from numpyro.infer import Trace_ELBO
from numpyro.infer.autoguide import AutoDiagonalNormal, AutoMultivariateNormal
from worker import serve

GUIDES = {"mean field": AutoDiagonalNormal, "full rank": AutoMultivariateNormal}


def model(features, label, number):
    weights = numpyro.sample("w", dist.Normal(0, 1).expand([features.shape[1]]).to_event(1))
    size = features.shape[0]
    with numpyro.plate("records", number, subsample_size=size):
        numpyro.sample("label", dist.Bernoulli(logits=features @ weights), obs=label)


def driver(guide, number, clip_norm, noise, size=1e-3, **options):
    static = functools.partial(model, number=number)
    guide = GUIDES[guide](static)
    return DPSVI(static, guide, optim.Adam(size), Trace_ELBO(), clip_norm, noise, **options)


def step(guide, dim, batch):
    data = arrays(batch, dim)
    svi = driver(guide, batch, 1.0, 1.0)
    return one_step(svi.update, svi.init(strong_rng.PRNGKey(0), *data), data)


def loop_of(svi, data, batch):
    """Steps on batches of fixed size (0.2.0 has no Poisson sampling), in one compiled loop."""
    start, take = subsample_batchify_data(data, batch_size=batch)

    @jax.jit
    def loop(count, state, batches):
        def one(at, state):
            return svi.update(state, *take(at, batches))[0]

        return lax.fori_loop(0, count, one, state)

    return start, loop


def run(dim, batch, number):
    data = arrays(number, dim)
    svi = driver("mean field", number, 1.0, 10.0)
    start, loop = loop_of(svi, data, batch)
    state = svi.init(strong_rng.PRNGKey(0), *(array[:batch] for array in data))
    batches = start(strong_rng.PRNGKey(1))[1]
    return {"batches": "fixed size"}, lambda count: jax.block_until_ready(
        loop(count, state, batches).optim_state
    )


def calibrate(rate, steps, epsilon, delta):
    start = time.perf_counter()
    noise, spent, _ = approximate_sigma_remove_relation(epsilon, delta, rate, steps)
    seconds = time.perf_counter() - start
    return {"noise multiplier": float(noise), "epsilon": float(spent), "seconds": seconds}, None


def fit(records, batch, steps, epsilon, delta, clip_norm, size, seed):
    data = jnp.asarray(records[0], float), jnp.asarray(records[1], int)
    number = len(data[0])
    noise, spent, _ = sigma(epsilon, delta, batch / number, steps)
    svi = driver("mean field", number, clip_norm, noise, size)
    start, loop = loop_of(svi, data, batch)
    first, second = strong_rng.split(strong_rng.PRNGKey(seed), 2)
    state = svi.init(first, *(array[:batch] for array in data))
    params = svi.get_params(loop(steps, state, start(second)[1]))
    return {
        "loc": params["auto_loc"].tolist(),
        "scale": params["auto_scale"].tolist(),
        "epsilon": float(spent),
    }, None


@functools.cache
def sigma(*arguments):
    return approximate_sigma_remove_relation(*arguments)


class _OneDraw(dist.Normal):
    """A normal distribution whose draw is given, so that all records share it."""

    def __init__(self, loc, scale, draw):
        super().__init__(loc, scale)
        self.draw = draw

    def sample(self, key, sample_shape=()):
        return self.loc + self.scale * self.draw


def gradient(records, number, clip_norm, loc, raw_scale, draw):
    """What one step without noise hands to the optimiser, at one draw for all records."""
    features, label = np.asarray(records[0], np.float32), np.asarray(records[1], np.int32)
    dim = features.shape[1]

    def guide(features, label):
        where = numpyro.param("loc", jnp.zeros(dim))
        scale = numpyro.param("scale", jnp.ones(dim), constraint=constraints.softplus_positive)
        numpyro.sample("w", _OneDraw(where, scale, jnp.asarray(draw, jnp.float32)).to_event(1))

    static = functools.partial(model, number=number)
    svi = DPSVI(static, guide, optim.SGD(1.0), Trace_ELBO(), clip_norm, 0.0)
    state = svi.init(strong_rng.PRNGKey(0), features, label)
    at = {"loc": jnp.asarray(loc, jnp.float32), "scale": jnp.asarray(raw_scale, jnp.float32)}
    state = state._replace(optim_state=svi.optim.init(at))
    moved = svi.optim.get_params(svi.update(state, features, label)[0].optim_state)
    return {name: (at[name] - moved[name]).tolist() for name in at}, None


if __name__ == "__main__":
    serve({
        "step": step, "run": run, "calibrate": calibrate, "fit": fit, "gradient": gradient,
    })  # fmt: skip
