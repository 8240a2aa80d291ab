"""The tasks of `compare.py` by jax-privacy 2.0, in the environment of `jax_privacy.txt`.

Its clipped gradients of NumPyro's ELBO, one draw from the guide for the whole batch; the gradient
of prior and entropy, which sees no record, is added after the noise.
"""

import functools
import time

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from compiled import arrays, one_step
from jax_privacy import accounting, batch_selection, clipping, noise_addition
from numpyro.infer import Trace_ELBO
from numpyro.infer.autoguide import AutoDiagonalNormal, AutoMultivariateNormal
from numpyro.infer.util import transform_fn
from worker import serve


class PlainCholesky(AutoMultivariateNormal):
    """The default's transform has a backward pass that is slow for many records: 50 times so."""

    scale_tril_constraint = dist.constraints.lower_cholesky


GUIDES = {"mean field": AutoDiagonalNormal, "full rank": PlainCholesky}


def prior(dim):
    return numpyro.sample("w", dist.Normal(0, 1).expand([dim]).to_event(1))


def model(features, label):
    weights = prior(features.shape[1])
    with numpyro.plate("records", features.shape[0]):
        numpyro.sample("label", dist.Bernoulli(logits=features @ weights), obs=label)


class Private:
    """Clipped gradients, noise and Adam for a guide."""

    def __init__(self, guide, data, clip_norm, noise, size=1e-3, seed=0):
        dim = data[0].shape[1]
        self.guide = GUIDES[guide](model)
        self.key = jax.random.key(seed)
        with numpyro.handlers.seed(rng_seed=seed):
            found = numpyro.handlers.trace(self.guide).get_trace(*data)
        sites = {name: site for name, site in found.items() if site["type"] == "param"}
        inverse = {
            name: dist.biject_to(site["kwargs"].get("constraint", dist.constraints.real))
            for name, site in sites.items()
        }
        self.constrain = functools.partial(transform_fn, inverse)
        self.params = {name: inverse[name].inv(site["value"]) for name, site in sites.items()}
        self.optim = optax.adam(size)
        self.noise = noise_addition.gaussian_privatizer(
            stddev=clip_norm * noise, prng_key=jax.random.key(seed + 1)
        )
        elbo = Trace_ELBO()

        def weights(params, key):
            placed = numpyro.handlers.substitute(self.guide, self.constrain(params))
            draws = numpyro.handlers.trace(numpyro.handlers.seed(placed, key)).get_trace(*data)
            return draws["_auto_latent"]["value"]

        def negative_log_likelihood(params, features, label, key):
            logits = features @ weights(params, key)
            return -dist.Bernoulli(logits=logits).log_prob(label).sum()

        def prior_and_entropy(params, key):
            return elbo.loss(key, self.constrain(params), lambda *_: prior(dim), self.guide, *data)

        self.clipped = clipping.clipped_grad(
            negative_log_likelihood, l2_clip_norm=clip_norm, batch_argnums=(1, 2)
        )
        self.rest = jax.grad(prior_and_entropy)

    def start(self):
        return self.params, self.optim.init(self.params), self.noise.init(self.params), self.key

    def update(self, state, features, label, is_padding_example=None, share=1.0):
        params, optim_state, noise_state, key = state
        key, draw = jax.random.split(key)
        extra = {} if is_padding_example is None else {"is_padding_example": is_padding_example}
        total = self.clipped(params, features, label, draw, **extra)
        noisy, noise_state = self.noise.update(sum_of_clipped_grads=total, noise_state=noise_state)
        gradient = jax.tree.map(lambda a, b: a / share + b, noisy, self.rest(params, draw))
        updates, optim_state = self.optim.update(gradient, optim_state)
        return optax.apply_updates(params, updates), optim_state, noise_state, key


def step(guide, dim, batch):
    data = arrays(batch, dim)
    private = Private(guide, data, 1.0, 1.0)
    return one_step(
        lambda *state_and_data: (private.update(*state_and_data),), private.start(), data
    )


def poisson_run(private, data, batch, gathered="host"):
    """Steps on batches of its Poisson sampler, padded to multiples of 64.

    The records of a batch are gathered on the host, or on the device by their row numbers.
    """
    number = len(data[0])
    share = batch / number
    if gathered == "host":
        data = tuple(map(np.asarray, data))
        update = jax.jit(functools.partial(private.update, share=share))
    else:

        @jax.jit
        def update(state, rows, data):
            taken = (array[jnp.maximum(rows, 0)] for array in data)
            return private.update(state, *taken, rows == -1, share)

    def repeat(count, seed=0):
        state = private.start()
        sampling = batch_selection.CyclicPoissonSampling(
            share, count, partition_type=batch_selection.PartitionType.INDEPENDENT
        )
        for rows in sampling.batch_iterator(number, rng=seed):
            rows = batch_selection.pad_to_multiple_of(rows, 64)
            if gathered == "host":
                state = update(state, *(array[rows] for array in data), rows == -1)
            else:
                state = update(state, rows, data)
        return jax.block_until_ready(state)

    return repeat


def run(dim, batch, number, batches):
    """A whole run, in one of three ways; in the compiled loop a mask over all rows draws them."""
    data = arrays(number, dim)
    private = Private("mean field", data, 1.0, 10.0)
    ways = {
        "drawn and gathered on the host": poisson_run,
        "drawn on the host": functools.partial(poisson_run, gathered="device"),
        "drawn in the loop": looped_run,
    }
    return {"batches": batches}, ways[batches](private, data, batch)


def looped_run(private, data, batch):
    """The same in one compiled loop: its sampler is not in it, a mask over all rows is."""
    number = len(data[0])
    room = int(batch + 8 * batch**0.5)

    @jax.jit
    def loop(count, state, data):
        def one(_, carry):
            state, key = carry
            key, own = jax.random.split(key)
            chosen = jax.random.bernoulli(own, batch / number, (number,))
            rows = jnp.nonzero(chosen, size=room, fill_value=number)[0]
            taken = (array[jnp.minimum(rows, number - 1)] for array in data)
            return private.update(state, *taken, rows == number, batch / number), key

        return jax.lax.fori_loop(0, count, one, (state, jax.random.key(7)))

    start = private.start()
    return lambda count: jax.block_until_ready(loop(count, start, data))


def calibrate(rate, steps, epsilon, delta):
    start = time.perf_counter()
    accountant = accounting.analysis.DpsgdTrainingAccountant(
        accounting.accountants.PldAccountantConfig()
    )
    noise = accounting.calibrate.calibrate_noise_multiplier(
        target_epsilon=epsilon, accountant=accountant, batch_sizes=round(rate * 1_000_000),
        num_updates=steps, num_samples=1_000_000, target_delta=delta,
    )  # fmt: skip
    return {"noise multiplier": float(noise), "seconds": time.perf_counter() - start}, None


@functools.cache
def sigma(*arguments):
    return calibrate(*arguments)[0]["noise multiplier"]


def fit(records, batch, steps, epsilon, delta, clip_norm, size, seed):
    data = jnp.asarray(records[0], float), jnp.asarray(records[1], int)
    noise = sigma(batch / len(data[0]), steps, epsilon, delta)
    private = Private("mean field", data, clip_norm, noise, size, seed)
    params = private.constrain(poisson_run(private, data, batch)(steps, seed)[0])
    return {
        "loc": params["auto_loc"].tolist(),
        "scale": params["auto_scale"].tolist(),
        "epsilon": None,
    }, None


if __name__ == "__main__":
    serve({
        "step": step, "run": run, "calibrate": calibrate, "fit": fit,
    })  # fmt: skip
