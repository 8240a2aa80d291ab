"""How much longer do 20 seeds x 4 epsilons take than one run? `DPSVI.sweep` on Adult.

Logistic regression, mean-field guide, aligned gradients, 400 epochs of Poisson batches at rate
0.01. Both are timed with everything compiled, in turn.

    NUMPYRO_DP_DATA=... python benchmarks/sweep.py --json sweep.json
"""

import pathlib
import sys
import time

import jax
import numpy as np
import optax
from common import parse_args, write

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "examples"))

from adult import make_guide, model

from numpyro_dp import DPSVI, Poisson, PrivacyBudget, aligned
from numpyro_dp.datasets import load_adult_or_bundled

EPSILONS = [1.0, 2.0, 4.0, 10.0]


def seconds(call):
    start = time.perf_counter()
    jax.block_until_ready(call().params)
    return time.perf_counter() - start


def main():
    args = parse_args(__doc__.splitlines()[0])
    seeds, epochs, rounds = (3, 20, 1) if args.quick else (20, 400, 3)
    data = load_adult_or_bundled()
    records, num_steps = (data.X_train, data.y_train), round(epochs / 0.01)
    svi = DPSVI(
        model,
        make_guide(),
        optax.adam(1e-3),
        estimator=aligned(),
        clip_norm=2.0,
        sampler=Poisson(0.01),
        budget=PrivacyBudget(epsilon=1.0, delta=1 / len(data.y_train)),
    )
    keys = jax.random.split(jax.random.key(0), seeds)

    def one():
        return svi.run(keys[0], num_steps, *records, progress_bar=False)

    def many():
        return svi.sweep(keys, num_steps, *records, epsilon=EPSILONS, trace_size=100)

    first = {"one run": seconds(one), "sweep": seconds(many)}
    later = {"one run": [], "sweep": []}
    for _ in range(rounds):
        later["one run"].append(seconds(one))
        later["sweep"].append(seconds(many))
    medians = {name: float(np.median(values)) for name, values in later.items()}
    row = {"records": len(data.y_train), "steps": num_steps, "runs": seeds * len(EPSILONS)}
    row |= {f"{name}, s": value for name, value in medians.items()}
    row |= {f"first {name}, s": value for name, value in first.items()}
    row["ratio"] = medians["sweep"] / medians["one run"]
    write(args, "sweep", {data.source.split(",")[0]: [row]})


if __name__ == "__main__":
    main()
