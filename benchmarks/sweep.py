"""How much longer do 20 seeds x 4 epsilons take than one run? `DPSVI.sweep` on Adult.

Logistic regression, mean-field guide, aligned gradients, 400 epochs of Poisson batches at rate
0.01. Both are timed with everything compiled, in turn.

    NUMPYRO_DP_DATA=... python benchmarks/sweep.py --json sweep.json
"""

import time

import jax
import numpy as np
from common import make_parser, write
from datasets import load_adult_or_bundled
from dpvim.adult import adult_svi

from numpyro_dp.estimators import aligned

EPSILONS = [1.0, 2.0, 4.0, 10.0]


def seconds(call):
    start = time.perf_counter()
    jax.block_until_ready(call().params)
    return time.perf_counter() - start


def main():
    parser = make_parser(__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--epochs", type=int, default=400)
    parser.add_argument("--chunk", type=int, help="runs in lockstep; all of them by default")
    args = parser.parse_args()
    seeds, epochs = (3, 20) if args.quick else (args.seeds, args.epochs)
    data = load_adult_or_bundled()
    records, num_steps = (data.X_train, data.y_train), round(epochs / 0.01)
    svi = adult_svi(aligned(), 2.0, 1e-3, len(data.y_train))
    keys = jax.random.split(jax.random.key(0), seeds)

    sizes = {"trace_size": 100, "chunk_size": args.chunk}

    def one():
        return svi.run(keys[0], num_steps, *records, progress_bar=False)

    def many():
        return svi.sweep(keys, num_steps, *records, epsilon=EPSILONS, **sizes)

    first = {"one run": seconds(one), "sweep": seconds(many)}
    before = [seconds(one) for _ in range(3)]  # the sweep is long: runs before and after it
    later = {"sweep": [seconds(many)], "one run": before + [seconds(one) for _ in range(3)]}
    medians = {name: float(np.median(values)) for name, values in later.items()}
    row = {"records": len(data.y_train), "steps": num_steps, "runs": seeds * len(EPSILONS)}
    row |= {f"{name}, s": value for name, value in medians.items()}
    row |= {f"first {name}, s": value for name, value in first.items()}
    row["ratio"] = medians["sweep"] / medians["one run"]
    write(args, {"rows": [row]})


if __name__ == "__main__":
    main()
