"""What test_devices.py runs in processes of its own: the same runs, on the devices there are."""

import functools
import json
import os
import pathlib
import sys
from unittest import mock

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from flat import dpmcmc, dpsep, dpsvi
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from models import logistic
from numpyro.contrib.module import flax_module
from numpyro.infer import Trace_ELBO
from numpyro.infer.autoguide import AutoDelta, AutoDiagonalNormal

from numpyro_dp import SGLD, Ledger, PrivacyBudget
from numpyro_dp.estimators import vanilla
from numpyro_dp.mechanisms import AdaptiveClip, LossRelease
from numpyro_dp.run.checkpoint import Checkpoint
from numpyro_dp.samplers import FixedSize, FullBatch, Permutation, Poisson

N, DIM = 96, 5


regression = logistic()


class Net(nn.Module):
    sizes: tuple = (64, 64)
    rate: float = 0.0

    @nn.compact
    def __call__(self, x):
        for size in self.sizes:
            x = nn.tanh(nn.Dense(size)(x))
        x = nn.Dropout(self.rate, deterministic=False)(x) if self.rate else x
        return nn.Dense(2)(x)


def scaled(x, y, scale):
    """A model with a public argument."""
    w = numpyro.sample("w", dist.Normal(0, 1).expand([DIM]).to_event(1))
    with numpyro.plate("records", x.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=x @ w * scale[0]), obs=y)


def by_hand(x, y):
    loc = numpyro.param("loc", jnp.zeros(DIM))
    numpyro.sample("w", dist.Normal(loc, 0.5).to_event(1))


def with_codes(x, y):
    shift = numpyro.sample("shift", dist.Normal(0, 1))
    with numpyro.plate("records", x.shape[0]):
        code = numpyro.sample("code", dist.Normal(0, 1))
        numpyro.sample("y", dist.Bernoulli(logits=x[:, 0] * code + shift), obs=y)


def encoder(x, y):
    numpyro.sample("shift", dist.Normal(numpyro.param("loc", 0.0), 0.1))
    slope = numpyro.param("slope", 0.1)
    with numpyro.plate("records", x.shape[0]):
        numpyro.sample("code", dist.Normal(slope * x[:, 0], 1))


def with_dropout(x, y):
    net = flax_module("net", Net((16,), 0.5), input_shape=(1, DIM), apply_rng=["dropout"])
    with numpyro.plate("records", x.shape[0]):
        logits = net(x, rngs={"dropout": numpyro.prng_key()})
        numpyro.sample("y", dist.Categorical(logits=logits), obs=y)


def network(x, y):
    net = flax_module("net", Net(), input_shape=(1, DIM))
    with numpyro.plate("records", x.shape[0]):
        numpyro.sample("y", dist.Categorical(logits=net(x)), obs=y)


def records(number):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(number, DIM)).astype(np.float32)
    return x, (x[:, 0] > 0).astype(np.int32)


def driver(mesh, sampler=Poisson(0.2), model=regression, guide=AutoDiagonalNormal, **options):  # noqa: B008
    relation = "replace_one" if isinstance(sampler, FixedSize) else "add_or_remove_one"
    settings = {"secret_key": 1, "repetition": True, "clip_norm": 0.5}
    settings["budget"] = PrivacyBudget(2.0, 1e-5, relation)
    return dpsvi(model, guide, optax.adam(0.05), sampler=sampler, mesh=mesh, **settings | options)


def cases(mesh):
    """Name -> (driver, number of records)."""
    one, plain = functools.partial(driver, mesh), vanilla()
    net = functools.partial(one, Poisson(0.5), network, AutoDelta, estimator=plain)
    own = {"secret_key": 1, "repetition": True, "budget": PrivacyBudget(2.0, 1e-5), "mesh": mesh}
    return {
        "Poisson": (one(), N),
        "vanilla": (one(estimator=plain), N),
        "fixed size": (one(FixedSize(13)), N),
        "permutation": (one(Permutation(12)), N),
        "full batch": (one(FullBatch()), N),
        "as products": (net(), N),
        "microbatches": (net(microbatch_size=3), N),
        "not divisible": (one(FullBatch()), N + 3),
        "message passing": (dpsep(regression, sampler=Poisson(0.2), **own), N),
        "by hand": (one(guide=by_hand, estimator=plain), N),
        "several draws": (one(estimator=plain, loss=Trace_ELBO(3)), N),
        "latents": (one(model=with_codes, guide=encoder), N),
        "dropout": (one(model=with_dropout, guide=AutoDelta, estimator=plain), N),
        "public argument": (one(model=scaled, public=["scale"]), N),
        "adaptive": (one(clip_norm=AdaptiveClip(1.0), loss_release=LossRelease(5.0)), N + 3),
    }


def flat(tree):
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)]).tolist()


def run(svi, data, steps=5, **options):
    result = svi.run(jax.random.key(0), steps, *data, progress_bar=False, **options)
    shards = [s for x in svi._session(data, {}).rows(data, {}).arrays for s in x.addressable_shards]
    return {
        "params": flat(result.params),
        "epsilon": result.privacy.epsilon,
        "rows": max(shard.data.shape[0] for shard in shards),
        "devices": len(jax.tree.leaves(result.params)[0].sharding.device_set),
        "secret": str(np.asarray(jax.random.key_data(result.state.secret_key)).tolist()),
    }


def updates(svi, data):
    """The same steps by a compiled update."""
    state = svi.init(jax.random.key(0), *data)
    step = jax.jit(svi.update)
    for _ in range(5):
        state, _ = step(state, *data)
    return {"params": flat(svi.get_params(state)), "epsilon": 0.0, "devices": jax.device_count(),
            "secret": "updates"}  # fmt: skip


def chains(mesh, data):
    mcmc = dpmcmc(
        SGLD(regression, None), num_warmup=2, num_samples=4, num_chains=2, clip_norm=0.5,
        sampler=Poisson(0.2), budget=PrivacyBudget(2.0, 1e-5), secret_key=1, repetition=True,
        mesh=mesh,
    )  # fmt: skip
    mcmc.run(jax.random.key(0), *data)
    samples = mcmc.get_samples()["w"]
    return {"params": np.asarray(samples).ravel().tolist(), "epsilon": mcmc.privacy.epsilon,
            "devices": len(samples.sharding.device_set), "secret": "chains"}  # fmt: skip


def swept(mesh, data):
    """Two runs side by side."""
    result = driver(mesh).sweep(jax.random.key(0)[None], 5, *data, epsilon=[1.0, 2.0])
    return {"params": flat(result.params["auto_loc"]), "devices": jax.device_count(),
            "epsilon": result.privacy[1].epsilon, "secret": "swept"}  # fmt: skip


def elsewhere():
    """The same run from a state, or on records, of another mesh; what a mesh around it does."""
    eight, four = (jax.make_mesh((n,), ("r",), devices=jax.devices()[:n]) for n in (8, 4))
    square = jax.make_mesh((2, 4), ("a", "b"))
    data, key = records(N), jax.random.key(0)

    svi = functools.partial(driver, num_steps=5)
    found = {"run": run(svi(None), data)}
    begun = svi(eight).run(key, 3, *data, progress_bar=False).state
    for name, mesh in (("on four", four), ("on a square", square), ("on one", None)):
        result = svi(mesh).run(key, 2, *data, init_state=begun, progress_bar=False)
        found[name] = {"params": flat(result.params["auto_loc"])}
    placed = NamedSharding(square, PartitionSpec("b"))
    found["foreign"] = run(svi(eight), [jax.device_put(array, placed) for array in data])
    explicit = jax.make_mesh((8,), ("r",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(explicit):
        try:
            run(svi(eight), data)
        except ValueError as error:
            found["explicit"] = str(error)
    return found


def kept(mesh, rank, place, dies):
    """A run with a ledger and a checkpoint, killed after its second file, or continued."""
    place = pathlib.Path(place)
    x, y = records(N)
    half = slice(rank * N // 2, (rank + 1) * N // 2)
    where = NamedSharding(mesh, PartitionSpec("records"))

    def halves(*arrays):
        return [jax.make_array_from_process_local_data(where, array[half]) for array in arrays]

    # Only the first process may touch these files, as if the others had another disk.
    def own(name):
        return place / (name if rank == 0 else f"{name} of the other")

    ledger = Ledger(own("ledger"), PrivacyBudget(2.0, 1e-5))

    def fitted(folder, arrays, epsilon=0.5):
        budget = ledger.budget(epsilon, purpose=folder)
        result = driver(mesh, budget=budget).run(
            jax.random.key(0), 20, *arrays, progress_bar=False, checkpoint=own(folder), every=4
        )
        leaves = [*jax.tree.leaves(result.params), *jax.tree.leaves(result.trace.params)]
        name = result.privacy.run
        return [np.asarray(leaf).ravel().tolist() for leaf in leaves], name

    saved, save = [], Checkpoint.save

    def dying(self, progress):
        save(self, progress)
        saved.append(1)
        if len(saved) == 3:
            os._exit(9)

    if dies:
        Checkpoint.save = dying
        fitted("run", halves(x, y))
    found = {"continued": fitted("run", halves(x, y)), "whole": fitted("whole", halves(x, y))}
    for name, call in {
        "other records": lambda: fitted("run", halves(x + 1, y)),
        "too much": lambda: fitted("more", halves(x, y), epsilon=1.9),
    }.items():
        try:
            call()
        except ValueError as error:
            found[name] = f"{type(error).__name__}: {error}"
    svi = driver(mesh, budget=ledger.budget(0.1, purpose="sweep"))
    for name in ("swept", "swept again"):
        result = svi.sweep(
            jax.random.split(jax.random.key(0), 2), 4, *halves(x, y),
            checkpoint=own("sweep"), chunk_size=1,
        )  # fmt: skip
        names = [report.run for report in result.privacy]
        found[name] = [flat(result.params["auto_loc"]), names]
    # A bar in one process alone, and a budget that other processes read from another file.
    rest = driver(mesh, budget=ledger.budget(purpose="rest"))
    calls = {"checkpoint": own("rest"), "progress_bar": rank == 0}
    found["rest"] = [
        rest.run(jax.random.key(0), 6, *halves(x, y), **calls).params["auto_loc"].tolist()
        for _ in range(2)
    ]
    for name, broken in (("full disk", "write_for_owner"), ("refused sweep", None)):
        try:
            if broken:
                with mock.patch(f"numpyro_dp.run.checkpoint.{broken}", side_effect=OSError(name)):
                    fitted("disk", halves(x, y), epsilon=1e-3)
            rest.sweep(jax.random.split(jax.random.key(0), 2), 4, *halves(x, y))
        except (OSError, ValueError) as error:
            found[name] = str(error)
    found["entries"] = [row["purpose"] for row in ledger.table()]
    found["files"] = sorted(path.name for path in place.iterdir())
    return found


def disagreeing(mesh, rank):
    """What processes are told that hold different records as if they were the same."""
    x, y = records(N)
    try:
        run(driver(mesh), (x + rank, y))
    except ValueError as error:
        return str(error)
    return "nothing"


def main():
    asked, processes = sys.argv[1].split(","), len(sys.argv) > 2
    if processes:
        address, rank = sys.argv[2], int(sys.argv[3])
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(address, 2, rank)
    mesh = None
    if jax.device_count() > 1:
        mesh = jax.make_mesh((jax.device_count(),), ("records",))
    found = {}
    for name, (svi, number) in cases(mesh).items():
        if name not in asked:
            continue
        data = records(number)
        extra = (np.array([0.5], np.float32),) * (name == "public argument")
        if processes and number % 4 == 0:  # each process holds its own half
            half = slice(rank * number // 2, (rank + 1) * number // 2)
            where = NamedSharding(mesh, PartitionSpec("records"))
            data = [jax.make_array_from_process_local_data(where, array[half]) for array in data]
        found[name] = run(svi, (*data, *extra))
    if "streamed" in asked and not processes:  # of several processes it is refused
        found["streamed"] = run(driver(mesh), records(N), stream=True)
    if "updates" in asked:
        data = tuple(map(jnp.asarray, records(N)))
        found["updates"] = updates(driver(mesh, num_steps=5), data)
    if "chains" in asked:
        found["chains"] = chains(mesh, records(N))
    if "swept" in asked:
        found["swept"] = swept(mesh, records(N))
    if "fresh keys" in asked:
        found["fresh keys"] = run(driver(mesh, secret_key=None, repetition=False), records(N))
    if "elsewhere" in asked:
        found = elsewhere()
    if asked[0] in ("kept", "killed"):
        found = kept(mesh, rank, sys.argv[4], dies=asked[0] == "killed")
    if "disagreeing" in asked:
        found["disagreeing"] = disagreeing(mesh, rank)
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
