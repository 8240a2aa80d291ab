"""How long does `fit` take from the call to the posterior, and how much memory?

Logistic regression on 20 normal columns. "fresh" is the first call in a process of its own, after
imports, compilation included; "warm" is the next call with other keys. Medians over processes. The
memory is how far a run with N records raises the peak of a process that has run 20,000 before;
"records" is the size of the columns and outcomes. Streamed records lie in a file.

    python benchmarks/believe/speed.py --json speed.json
"""

import json
import pathlib
import statistics
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from common import experiment_parser, save

START = """
import resource, time
import jax, jax.numpy as jnp, numpy as np, numpyro, numpyro.distributions as dist
from numpyro_dp import DPLaplace, PrivacyBudget, fit

def model(x, y=None):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([x.shape[1]]).to_event(1))
    with numpyro.plate("records", x.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=x @ w), obs=y)

def made(number):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(number, 20)).astype(np.float32)
    return x, (rng.random(number) < 1 / (1 + np.exp(-x[:, 0]))).astype(np.int32)

driver = DPLaplace(model, budget=PrivacyBudget(1.0, 1e-5))
x, y = made(20_000)
def run(seed):
    begin = time.perf_counter()
    posterior = fit(model, x, y, epsilon=1.0, rng_key=jax.random.key(seed), progress_bar=False)
    jax.block_until_ready(posterior.sample(jax.random.key(1), 1000))
    return time.perf_counter() - begin
"""
TIME = """
print([run(0), run(1)])
"""
MEMORY = """
run(0)
path, number, stream = {path!r}, {number}, {stream}
x, y = (np.load(path + name + ".npy", mmap_mode="r" if stream else None) for name in "xy")
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
before = peak()
driver.run(jax.random.key(0), x, y, stream=stream)
print([peak() - before])
"""


def output(program):
    found = subprocess.run([sys.executable, "-c", START + program],
                           capture_output=True, text=True, check=True)  # fmt: skip
    return json.loads(found.stdout.splitlines()[-1])


def main():
    parser = experiment_parser(__doc__, "one process each, 200,000 records")
    parser.add_argument("--processes", type=int, default=5)
    args = parser.parse_args()
    times = [output(TIME) for _ in range(1 if args.quick else args.processes)]
    fresh, warm = (statistics.median(each) for each in zip(*times, strict=True))
    rows = [{"N": 20_000, "fresh s": fresh, "warm s": warm}]
    print(rows[0], flush=True)
    number = 200_000 if args.quick else 1_000_000
    with tempfile.TemporaryDirectory() as folder:
        write = "x, y = made({n}); np.save({p!r} + 'x', x); np.save({p!r} + 'y', y); print('[]')"
        path = folder + "/"
        output(write.format(n=number, p=path))
        for stream in (False, True):
            (peak,) = output(MEMORY.format(path=path, number=number, stream=stream))
            row = {"N": number, "stream": stream, "records MB": number * 84 / 1e6, "peak MB": peak}
            print(row, flush=True)
            rows.append(row)
    save(args, rows=rows)


if __name__ == "__main__":
    main()
