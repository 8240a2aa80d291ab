"""Yardsticks of others: one slope by least squares, and three binary columns.

OLS: N = 1,000, y = beta0 + beta1 x1 + beta2 x2 + noise with beta = (0, 1, 2), |x| < 5 and |y| < 20,
delta = 1e-5. Reported is the root mean square error of beta1 and how often a nominal 95 % interval
holds it. Toy: logistic regression on three binary columns, N = 2,000, and the width of nominal 95 %
intervals. Each run has data and noise of its own.

    python benchmarks/believe/yardsticks.py --json yardsticks.json
"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from common import average_row, experiment_parser, save

from numpyro_dp import DPLaplace, PrivacyBudget


def least_squares(x, y=None):
    beta = numpyro.sample("beta", dist.Normal(0, 3).expand([x.shape[1]]).to_event(1))
    noise = numpyro.sample("noise", dist.LogNormal(0, 1))
    with numpyro.plate("records", x.shape[0]):
        numpyro.sample("y", dist.Normal(x @ beta, noise), obs=y)


def binary(x, y=None):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([x.shape[1]]).to_event(1))
    with numpyro.plate("records", x.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=x @ w), obs=y)


def ols_data(rng, number=1000):
    x = np.clip(rng.normal(0, 1.5, (number, 2)), -5, 5)
    y = np.clip(x @ [1.0, 2.0] + rng.normal(size=number), -20, 20)
    return np.column_stack([np.ones(number), x]), y, np.array([0.0, 1.0, 2.0]), 1


def toy_data(rng, number=2000):
    x = (rng.random((number, 3)) < 0.5).astype(float)
    truth = np.array([1.0, -0.5, 0.3])
    y = rng.random(number) < 1 / (1 + np.exp(-x @ truth))
    return x, y, truth, None


CASES = {"OLS": (least_squares, "beta", ols_data), "toy": (binary, "w", toy_data)}


def main():
    parser = experiment_parser(__doc__, "5 runs")
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--epsilon", type=float, default=1.0)
    args = parser.parse_args()
    rows = []
    for name, (model, site, make) in CASES.items():
        driver, found = DPLaplace(model, budget=PrivacyBudget(args.epsilon, 1e-5)), []
        for seed in range(5 if args.quick else args.runs):
            x, y, truth, chosen = make(np.random.default_rng(seed))
            kind = jnp.float32 if name == "OLS" else jnp.int32
            records = jnp.asarray(x, jnp.float32), jnp.asarray(y, kind)
            posterior = driver.run(jax.random.key(seed), *records)
            draws = np.asarray(posterior.sample(jax.random.key(1), 4000)[site], float)
            low, high = np.quantile(draws, [0.025, 0.975], axis=0)
            kept = slice(None) if chosen is None else [chosen]
            found.append({
                "squared error": np.mean((draws.mean(0) - truth)[kept] ** 2),
                "coverage of 95 %": np.mean(((low < truth) & (truth < high))[kept]),
                "width": np.mean((high - low)[kept]),
            })  # fmt: skip
        row = {"case": name, "epsilon": args.epsilon, **average_row(found)}
        row["rmse"] = row["squared error"] ** 0.5
        rows.append(row)
        print({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
    save(args, rows=rows)


if __name__ == "__main__":
    main()
