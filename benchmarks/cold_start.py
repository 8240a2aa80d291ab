"""How long a fresh process takes to its first result: the README's example, and the same with SVI.

Each repetition starts one process for each, in turn. Seconds are those of the process's own clock,
in three parts: the imports of NumPyro and optax, that of this package, and everything after (data,
driver, run, printed result). Ratios are taken within a repetition; the table has medians.
No cache of compiled programs is used. SVI takes all 5,000 records in each step.
"""

import json
import os
import statistics
import subprocess
import sys

from common import parse_args, write

LABELS = {
    "numpyro": "import NumPyro s", "own": "import numpyro_dp s", "run": "example s",
    "whole": "whole s", "programs": "programs compiled", "compiling": "compiling s",
}  # fmt: skip

PROGRAM = """
import time
begin = time.perf_counter()
import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist, optax
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoDiagonalNormal
numpyro_seconds = time.perf_counter() - begin
begin = time.perf_counter()
if {private}:
    from numpyro_dp import DPSVI, PrivacyBudget
    from numpyro_dp.estimators import aligned
    from numpyro_dp.samplers import Poisson
own_seconds = time.perf_counter() - begin
programs = []
jax.monitoring.register_event_duration_secs_listener(
    lambda name, seconds, **_: programs.append(seconds) if "backend_compile" in name else None
)
begin = time.perf_counter()

def model(X, y=None):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("records", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)

X = jax.random.normal(jax.random.key(1), (5000, 3))
y = (X @ jnp.array([1.0, -2.0, 0.5]) > 0).astype(int)
guide = AutoDiagonalNormal(model)
if {private}:
    svi = DPSVI(model, guide, optax.adam(1e-2), estimator=aligned(), clip_norm=2.0,
                sampler=Poisson(0.02), budget=PrivacyBudget(epsilon=1.0, delta=1e-5))
else:
    svi = SVI(model, guide, optax.adam(1e-2), Trace_ELBO())
result = svi.run(jax.random.key(0), 2000, X, y, progress_bar=False)
jax.block_until_ready(result.params)
run_seconds = time.perf_counter() - begin
import json
print(json.dumps(dict(numpyro=numpyro_seconds, own=own_seconds, run=run_seconds,
                      programs=len(programs), compiling=sum(programs))))
"""


def measure(private):
    environment = {k: v for k, v in os.environ.items() if not k.startswith("JAX_COMPILATION_CACHE")}
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(private=private)],
        env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    result = json.loads(found.stdout.splitlines()[-1])
    return result | {"whole": result["numpyro"] + result["own"] + result["run"]}


def main():
    args = parse_args(__doc__.splitlines()[0])
    pairs = [(measure(False), measure(True)) for _ in range(2 if args.quick else 7)]
    medians = {
        name: {part: statistics.median(pair[which][part] for pair in pairs) for part in LABELS}
        for which, name in enumerate(("SVI", "DPSVI"))
    }
    ratios = {
        part: statistics.median(ours[part] / theirs[part] for theirs, ours in pairs)
        for part in ("run", "whole", "programs", "compiling")
    }
    rows = [{"what": name} | {label: row[part] for part, label in LABELS.items()}
            for name, row in medians.items()]  # fmt: skip
    rows.append({"what": "ratio"} | {LABELS[part]: ratios.get(part) for part in LABELS})
    write(args, {"A fresh process, medians": rows})


if __name__ == "__main__":
    main()
