"""Millions of records: how far is the posterior of DPLaplace from the one without privacy?

Logistic regression on an intercept and four normal columns. From 10 million on, records lie in a
file and are streamed. "distance" is the root mean square over latents from the exact mode, in exact
standard deviations, "width" the largest ratio of standard deviations, and "memory" how far the run
raises the peak of the process.

    python benchmarks/believe/large.py --json large.json
"""

import json
import pathlib
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from common import experiment_parser, save

PROGRAM = """
import json, resource, time
import jax, numpy as np, numpyro, numpyro.distributions as dist
from numpyro_dp import DPLaplace, PrivacyBudget

D, BLOCK = 5, 1_000_000
folder, number, stream, seed = {folder!r}, {number}, {stream}, {seed}

def model(x, y=None):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([D]).to_event(1))
    with numpyro.plate("records", x.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=x @ w), obs=y)

def opened(name, *shape, kind="f4"):
    return np.lib.format.open_memmap(folder + name, "w+", kind, (number, *shape))

rng, w = np.random.default_rng(seed), np.array([-1.0, 0.5, -0.3, 0.2, 0.0])
x, y = opened("x.npy", D), opened("y.npy", kind="i4")
blocks = [slice(i, min(i + BLOCK, number)) for i in range(0, number, BLOCK)]
for block in blocks:
    size = block.stop - block.start
    x[block] = np.column_stack([np.ones(size), rng.standard_normal((size, D - 1), "f4")])
    y[block] = rng.random(size) < 1 / (1 + np.exp(-x[block] @ w))
mode = w.copy()
for _ in range(6):
    slope, precision = -mode, np.eye(D)
    for block in blocks:
        rows = x[block].astype(float)
        p = 1 / (1 + np.exp(-rows @ mode))
        slope = slope + rows.T @ (y[block] - p)
        precision = precision + (rows.T * (p * (1 - p))) @ rows
    mode = mode + np.linalg.solve(precision, slope)
sd = np.sqrt(np.diag(np.linalg.inv(precision)))
if not stream:
    x, y = np.array(x), np.array(y)

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6

driver = DPLaplace(model, budget=PrivacyBudget({epsilon}))
before, begin = peak(), time.perf_counter()
posterior = driver.run(jax.random.key(seed), x, y, stream=stream, progress_bar=False)
seconds, table = time.perf_counter() - begin, posterior.summary()["w"]
print(json.dumps({{
    "distance": float(np.sqrt(np.mean(((table["mean"] - mode) / sd) ** 2))),
    "width": float(np.max(table["sd"] / sd)), "seconds": seconds, "memory": peak() - before,
    "findings": [finding.name for finding in posterior.diagnose().bad],
}}))
"""


def run(number, epsilon, seed):
    stream = number >= 10_000_000
    with tempfile.TemporaryDirectory() as folder:
        program = PROGRAM.format(
            folder=folder + "/", number=number, stream=stream, seed=seed, epsilon=epsilon
        )
        found = subprocess.run(
            [sys.executable, "-c", program], check=True, capture_output=True, text=True
        )
    row = {"N": number, "streamed": stream, "epsilon": epsilon, "seed": seed}
    return row | json.loads(found.stdout.splitlines()[-1])


def main():
    parser = experiment_parser(__doc__, "100,000 records")
    parser.add_argument("--numbers", nargs="*", type=int, default=[2_000_000, 50_000_000])
    parser.add_argument("--seeds", type=int, default=1)
    args = parser.parse_args()
    numbers = [100_000] if args.quick else args.numbers
    rows = []
    for number in numbers:
        for seed in range(args.seeds):
            rows.append(run(number, 1.0, seed))
            print(rows[-1], flush=True)
            save(args, rows=rows)


if __name__ == "__main__":
    main()
