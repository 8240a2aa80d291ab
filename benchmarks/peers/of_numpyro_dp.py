"""Tasks of `compare.py` by numpyro_dp; for the floor by `numpyro.infer.SVI`, without privacy."""

import functools
import pathlib
import sys
import time

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
import optax
from compiled import arrays, one_step
from jax import lax
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoDiagonalNormal, AutoMultivariateNormal
from worker import serve

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from numpyro_dp import DPSVI, Privacy, PrivacyBudget, secret_key
from numpyro_dp.accounting import RDP
from numpyro_dp.estimators import aligned, vanilla
from numpyro_dp.samplers import FullBatch, Poisson

KEY = jax.random.key(0)
GUIDES = {"mean field": AutoDiagonalNormal, "full rank": AutoMultivariateNormal}
ESTIMATORS = {"aligned": aligned, "vanilla": vanilla}


def model(features, label, mask=None, number=None):
    """Logistic regression; ``mask`` and ``number`` are for padded batches of more records."""
    weights = numpyro.sample("w", dist.Normal(0, 1).expand([features.shape[1]]).to_event(1))
    size = features.shape[0]
    plate = numpyro.plate("records", number or size, subsample_size=size)
    with plate, numpyro.handlers.mask(mask=mask if mask is not None else True):
        numpyro.sample("label", dist.Bernoulli(logits=features @ weights), obs=label)


def driver(method, guide, size=1e-3, privacy=None, **options):
    guide = GUIDES[guide](model)
    if method == "SVI":
        return SVI(model, guide, optax.adam(size), Trace_ELBO())
    # With (1000, 1000) numbers either axis could count records.
    options["privacy"] = Privacy(data_plate="records", **privacy)
    return DPSVI(model, guide, optax.adam(size), estimator=ESTIMATORS[method](), **options)


def step(method, guide, dim, batch):
    """One compiled update on a full batch."""
    data = arrays(batch, dim)
    private = {"clip_norm": 1.0, "sampler": FullBatch(), "privacy": {"noise_multiplier": 1.0}}
    svi = driver(method, guide, **private)
    return one_step(svi.update, svi.init(KEY, *data), data)


def run(method, dim, batch, number):
    """A whole run, Poisson batches drawn inside."""
    data, sampler = arrays(number, dim), Poisson(batch / number)
    if method == "SVI":
        _, loop = plain_loop(data, sampler, number)
        how = {"batches": "Poisson, sampler of numpyro_dp"}
        return how, lambda count: jax.block_until_ready(loop(count).optim_state)
    noise = {"noise_multiplier": 10.0, "accountant": RDP()}
    svi = driver(method, "mean field", clip_norm=1.0, sampler=sampler, privacy=noise)

    def repeat(count):
        jax.block_until_ready(svi.run(KEY, count, *data, progress_bar=False).params)

    return {"batches": "Poisson"}, repeat


def plain_loop(data, sampler, number, size=1e-3, seed=0):
    """SVI, and steps of it on the same batches, in one loop."""
    svi = driver("SVI", "mean field", size)
    start = sampler.init(secret_key(seed), number)
    room = sampler.next(start)[0].indices.shape[0]
    extra = {"number": number}
    first = tuple(array[:room] for array in data)
    state = svi.init(jax.random.key(seed), *first, mask=jnp.ones(room, bool), **extra)

    @jax.jit
    def loop(count, carry, data):
        def one(_, carry):
            state, batches = carry
            batch, batches = sampler.next(batches)
            taken = (array[batch.indices] for array in data)
            return svi.update(state, *taken, mask=batch.mask, **extra)[0], batches

        return lax.fori_loop(0, count, one, carry)

    return svi, lambda count: loop(count, (state, start), data)[0]


def calibrate(rate, steps, epsilon, delta):
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent

    from numpyro_dp.privacy.calibration import calibrate_noise

    def event(noise):
        return SelfComposedDpEvent(PoissonSampledDpEvent(rate, GaussianDpEvent(noise)), steps)

    start = time.perf_counter()
    noise, _ = calibrate_noise(event, PrivacyBudget(epsilon, delta))
    return {"noise multiplier": noise, "seconds": time.perf_counter() - start}, None


def fit(method, records, batch, steps, epsilon, delta, clip_norm, size, seed):
    """Location and scale of a mean-field posterior after a run."""
    data = jnp.asarray(records[0], float), jnp.asarray(records[1], int)
    sampler = Poisson(batch / len(data[0]))
    if method == "SVI":
        svi, loop = plain_loop(data, sampler, len(data[0]), size, seed)
        params, spent = svi.get_params(loop(steps)), None
    else:
        svi = driver(
            method, "mean field", size, clip_norm=clip_norm, sampler=sampler,
            budget=PrivacyBudget(epsilon, delta),
            privacy={"secret_key": secret_key(seed), "repetition": True},
        )  # fmt: skip
        result = svi.run(jax.random.key(seed), steps, *data, progress_bar=False)
        params, spent = result.params, result.privacy.epsilon
    return {
        "loc": params["auto_loc"].tolist(),
        "scale": params["auto_scale"].tolist(),
        "epsilon": spent,
    }, None


if __name__ == "__main__":
    method = sys.argv[1]
    tasks = {name: functools.partial(task, method) for name, task in
             (("step", step), ("run", run), ("fit", fit))}  # fmt: skip
    serve(tasks | {"calibrate": calibrate})
