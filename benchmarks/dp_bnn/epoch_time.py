"""Time and memory of a step of Bayesian networks, each method against its step without privacy.

Table 1 of Zhang et al. (2021) has times per epoch. Here: an MLP of 128 units and the CNN of that
paper (16 kernels of 8 x 8, 32 of 4 x 4, 32 units) on images of 28 x 28, 256 of them in each step,
for the MLP also 1,024 as in `mnist.py`. Images are random: no time depends on them. Times are those
of whole runs by turns: medians of the difference of a long run and one of ten steps; the floor is
`numpyro.infer.SVI.update` on the same images.
Memory is what XLA plans for temporaries of one step, beside that of a step that holds a gradient of
each record (batch x P numbers); there also for a network of ten million weights at 1,024 images.
``--memory`` finds no times.

    python benchmarks/dp_bnn/epoch_time.py --json epoch_time.json
"""

import pathlib
import statistics
import sys
import time

import jax
import optax
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoDelta, AutoDiagonalNormal
from numpyro.infer.initialization import init_to_sample

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from common import make_parser, save, write
from images import CNN, MLP, Wide, model_of, random_images

from numpyro_dp import DPMCMC, DPSVI, SGLD, Privacy
from numpyro_dp.estimators import aligned
from numpyro_dp.samplers import FullBatch

BATCH = 256
CASES = [(MLP, BATCH, 300, 15), (MLP, 4 * BATCH, 150, 15), (CNN, BATCH, 50, 7)]  # steps, rounds


def without_privacy(model, guide_type, data):
    svi = SVI(model, guide_of(model, guide_type), optax.sgd(1e-4), Trace_ELBO())
    state, update = svi.init(jax.random.key(0), *data), jax.jit(svi.update)

    def run(steps):
        now = state
        for _ in range(steps):
            now, _ = update(now, *data)
        jax.block_until_ready(now)

    return run


def guide_of(model, guide_type):
    scale = {} if guide_type is AutoDelta else {"init_scale": 0.01}
    return guide_type(model, init_loc_fn=init_to_sample, **scale)


OPTIONS = {"clip_norm": 1.0, "sampler": FullBatch(), "privacy": Privacy(noise_multiplier=1.0)}


def variational(model, guide_type, data):
    svi = DPSVI(model, guide_of(model, guide_type), optax.sgd(1e-4), estimator=aligned(), **OPTIONS)
    return lambda steps: jax.block_until_ready(
        svi.run(jax.random.key(0), steps, *data, progress_bar=False).params
    )


def langevin(model, data):
    def run(steps):
        chain = chains.setdefault(steps, DPMCMC(
            SGLD(model, temperature=1e-3, init_strategy=init_to_sample), num_warmup=0,
            num_samples=steps, thinning=steps, progress_bar=False, **OPTIONS,
        ))  # fmt: skip
        chain.run(jax.random.key(0), *data)
        jax.block_until_ready(chain.get_samples())

    chains = {}
    return run


def runs(network, data):
    plain = model_of(network, activation="relu")
    weights = model_of(network, "normal", activation="relu")
    dropped = model_of(network, dropout=0.2, activation="relu")
    return {
        "SGD": without_privacy(plain, AutoDelta, data),
        "DP-SGD": variational(plain, AutoDelta, data),
        "DP-SGLD": langevin(weights, data),
        "MC dropout": without_privacy(dropped, AutoDelta, data),
        "DP-MC dropout": variational(dropped, AutoDelta, data),
        "BBP": without_privacy(weights, AutoDiagonalNormal, data),
        "DP-BBP, aligned": variational(weights, AutoDiagonalNormal, data),
    }


def seconds_per_step(calls, steps, rounds):
    """Medians over rounds of what this many steps take more than ten of them, over their number."""

    def elapsed(call, steps):
        begin = time.perf_counter()
        call(steps)
        return time.perf_counter() - begin

    found = {name: [] for name in calls}
    for number in range(rounds + 1):
        for name, call in calls.items():
            each = (elapsed(call, 10 + steps) - elapsed(call, 10)) / steps
            found[name] += [each] if number else []  # the first round compiles
    return {name: statistics.median(values) for name, values in found.items()}


def planned(network, batch):
    """MB of temporaries of one private step, of the weights, and of a gradient for each record."""
    data, model = random_images(batch), model_of(network, activation="relu")
    svi = DPSVI(model, guide_of(model, AutoDelta), optax.sgd(1e-4), estimator=aligned(), **OPTIONS)
    state = svi.init(jax.random.key(0), *data)
    step = jax.jit(svi.update).lower(state, *data).compile()
    size = sum(leaf.size for leaf in jax.tree.leaves(svi.get_params(state)))
    return {
        "network": network.__name__, "images": batch, "weights": size, "weights, MB": 4e-6 * size,
        "step, MB": step.memory_analysis().temp_size_in_bytes / 1e6,
        # Of dense layers: sum, noise and gradient beside the weights, and a million numbers of
        # records (microbatch_size).
        "bound, MB": 4 * 4e-6 * size + 4e-6 * 2**20,
        "a gradient for each record, MB": 4e-6 * size * batch,
    }  # fmt: skip


def main():
    parser = make_parser(__doc__.splitlines()[0])
    parser.add_argument("--memory", action="store_true", help="no times")
    parser.add_argument("--networks", nargs="+", default=["MLP", "CNN"], help="that are timed")
    args = parser.parse_args()
    times = []
    cases = [] if args.memory else CASES[: 1 if args.quick else None]
    for network, batch, steps, rounds in cases:
        if network.__name__ not in args.networks:
            continue
        calls = runs(network, random_images(batch))
        seconds = seconds_per_step(calls, steps, 1 if args.quick else rounds)
        for name, each in seconds.items():
            floor = "SGD" if "SGLD" in name else name.replace("DP-", "").replace(", aligned", "")
            times.append({
                "network": network.__name__, "images": batch, "method": name,
                "ms a step": 1e3 * each, "times its non-private step": each / seconds[floor],
                "times DP-SGD": each / seconds["DP-SGD"],
            })  # fmt: skip
        save(args, Time=times)  # what has been found so far
    sizes = [(network, batch) for network in (MLP, CNN, Wide) for batch in (BATCH, 4 * BATCH)]
    tables = {"Memory": [planned(*each) for each in sizes[: 1 if args.quick else None]]}
    write(args, ({"Time": times} if times else {}) | tables)


if __name__ == "__main__":
    main()
