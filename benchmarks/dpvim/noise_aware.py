"""Do intervals of averaged iterates cover? DPVIm, section 3.2, on models with a known optimum.

Bayesian linear regression, N = 10,000, d = 10, columns independent or correlated (equicorrelation
0.8), mean-field guide, aligned gradients; add or remove one, delta = 1e-5, 20,000 steps of Poisson
batches at rate 0.01, Adam with a fixed step and no momentum, from the prior. For each coordinate of
the location: does the 90 % interval mean +- 1.645 dp_sd hold the mean-field optimum, and what is
the predicted standard deviation over the actual one (the spread of the means over seeds)? A run of
a tenth of the steps, which may not have converged, must be flagged then. The variance is found by
an AR(1) fit; with momentum (--momentum 0.9) iterates oscillate, and the fit errs on the wide side.

    python benchmarks/dpvim/noise_aware.py --json out.json --figure out.png
"""

import pathlib
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from numpyro.infer.autoguide import AutoDiagonalNormal

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from common import experiment_parser, panels, save

from numpyro_dp import DPSVI, PrivacyBudget
from numpyro_dp.estimators import aligned
from numpyro_dp.posterior import average
from numpyro_dp.samplers import Poisson

NUMBER, DIM, NOISE = 10_000, 10, 1.0
CORRELATIONS = {"independent": 0.0, "correlated": 0.8}


def model(x, y):
    weights = numpyro.sample("w", dist.Normal(0, 1).expand([x.shape[1]]).to_event(1))
    with numpyro.plate("records", x.shape[0]):
        numpyro.sample("y", dist.Normal(x @ weights, NOISE), obs=y)


def simulate(correlation):
    """Records, and the exact mean-field optimum."""
    rng = np.random.default_rng(0)
    covariance = np.full((DIM, DIM), correlation) + (1 - correlation) * np.eye(DIM)
    x = rng.normal(size=(NUMBER, DIM)) @ np.linalg.cholesky(covariance).T
    y = x @ rng.normal(size=DIM) + NOISE * rng.normal(size=NUMBER)
    precision = x.T @ x / NOISE**2 + np.eye(DIM)
    optimum = np.linalg.solve(precision, x.T @ y / NOISE**2)
    return (jnp.asarray(x, jnp.float32), jnp.asarray(y, jnp.float32)), optimum, precision


def runs(data, epsilons, num_steps, args):
    """All seeds and epsilons in one call."""
    svi = DPSVI(
        model,
        AutoDiagonalNormal(model),
        optax.adam(args.step_size, b1=args.momentum),
        estimator=aligned(),
        clip_norm=args.clip_norm,
        sampler=Poisson(0.01),
        budget=PrivacyBudget(epsilon=1.0, delta=1e-5),
    )
    keys = jax.random.split(jax.random.key(0), args.seeds)
    return svi.sweep(keys, num_steps, *data, epsilon=epsilons, chunk_size=args.chunk)


def assess(found, chosen, optimum):
    """Coverage and sharpness of the averaged locations of some runs."""
    means, sds, converged, last = [], [], [], []
    for index in chosen:
        run = found.one(index)
        mean = average(run.trace)
        means.append(mean.params["auto_loc"])
        sds.append(mean.dp_sd["auto_loc"])
        converged.append(mean.converged["auto_loc"])
        last.append(run.params["auto_loc"])
    means, sds, converged, last = map(np.asarray, (means, sds, converged, last))
    covered = np.abs(means - optimum) <= 1.645 * sds
    each = covered.mean(1)
    return {
        "converged": float(converged.mean()),
        "coverage": float(covered.mean()),
        "coverage_error": float(each.std(ddof=1) / np.sqrt(len(each))),
        "sd_ratio": float(np.sqrt(np.mean(sds**2) / np.mean(means.var(0, ddof=1)))),
        "error_of_mean": float(np.sqrt(np.mean((means - optimum) ** 2))),
        "error_of_last": float(np.sqrt(np.mean((last - optimum) ** 2))),
        "predicted": sds.mean(0).tolist(),
        "actual": means.std(0, ddof=1).tolist(),
    }


def experiment(args):
    rows = []
    for name, correlation in CORRELATIONS.items():
        data, optimum, precision = simulate(correlation)
        for label, num_steps in (("full", args.steps), ("a tenth", args.steps // 10)):
            start = time.perf_counter()
            found = runs(data, args.epsilon, num_steps, args)
            seconds = time.perf_counter() - start
            for epsilon in args.epsilon:
                chosen = np.flatnonzero(found.labels["epsilon"] == epsilon)
                row = {"columns": name, "epsilon": epsilon, "run": label, "steps": num_steps}
                row |= assess(found, chosen, optimum)
                row["posterior_sd"] = float(np.sqrt(np.mean(1 / np.diag(precision))))
                row["seconds"] = seconds / len(args.epsilon)
                rows.append(row)
                numbers = {k: round(v, 4) for k, v in row.items() if isinstance(v, float)}
                print(name, label, numbers, flush=True)
    return rows


def draw(rows, path):
    """Predicted against actual standard deviations."""
    with panels(path, size=(4.6, 4.2)) as ((axis,),):
        for row in rows:
            if row["run"] == "full":
                label = f"{row['columns']}, epsilon {row['epsilon']:g}"
                axis.loglog(row["actual"], row["predicted"], "o", markersize=4, label=label)
        limits = axis.get_xlim()
        axis.plot(limits, limits, color="grey", linewidth=0.8)
        axis.set(xlabel="sd of the averaged iterate over seeds", ylabel="predicted from one run")
        axis.legend()


def main():
    parser = experiment_parser(__doc__, quick="10 seeds, 4,000 steps")
    parser.add_argument("--epsilon", type=float, nargs="+", default=[1.0, 0.2])
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--step-size", type=float, default=5e-2)
    parser.add_argument("--momentum", type=float, default=0.0, help="Adam's b1")
    parser.add_argument("--clip-norm", type=float, default=10.0)
    parser.add_argument("--chunk", type=int, default=50, help="runs in lockstep")
    args = parser.parse_args()
    if args.quick:
        args.seeds, args.steps, args.chunk = 10, 4_000, 20
    rows = experiment(args)
    if args.figure:
        draw(rows, args.figure)
    save(args, rows=rows)


if __name__ == "__main__":
    main()
