"""Yardsticks of others: one slope by least squares, three binary columns, and Adult reduced.

OLS: N = 1,000, y = beta0 + beta1 x1 + beta2 x2 + noise with beta = (0, 1, 2), |x| < 5 and |y| < 20,
delta = 1e-5. Reported is the root mean square error of beta1 and how often a nominal 95 % interval
holds it. Toy: logistic regression on three binary columns, N = 2,000, and the width of nominal 95 %
intervals. Adult: income on age, race and sex, 7 coefficients, delta = 1 / N^2. Each run takes N
records of the 45,222 complete ones with replacement, and the coefficients of all of them are the
truth. "width ratio" is to the normal approximation without privacy on the same records. Each run
has data and noise of its own. Adult is read from the folder that NUMPYRO_DP_DATA names.

    python benchmarks/believe/yardsticks.py --json yardsticks.json
"""

import functools
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from common import average_row, experiment_parser, save
from datasets import load_adult
from scipy.special import expit

from numpyro_dp import DPLaplace, PrivacyBudget


def at_the_mode(x, y):
    """Mean and covariance of the normal approximation under weights N(0, 1)."""
    w = np.zeros(x.shape[1])
    for _ in range(50):
        p = expit(x @ w)
        bend = x.T @ (x * (p * (1 - p))[:, None]) + np.eye(len(w))
        step = np.linalg.solve(bend, x.T @ (y - p) - w)
        w = w + step
        if np.abs(step).max() < 1e-8:
            break
    return w, np.linalg.inv(bend)


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


@functools.cache
def adult():
    data = load_adult()
    x = np.concatenate([data.X_train, data.X_test]).astype(float)
    y = np.concatenate([data.y_train, data.y_test]) > 0
    kept = [n == "age" or n.startswith(("race", "sex", "intercept")) for n in data.feature_names]
    x = x[:, kept]
    return x, y, at_the_mode(x, y)[0]


def adult_data(rng):
    x, y, truth = adult()
    rows = rng.integers(len(y), size=len(y))
    return x[rows], y[rows], truth, None


CASES = {
    "OLS": (least_squares, "beta", ols_data),
    "toy": (binary, "w", toy_data),
    "adult": (binary, "w", adult_data),
}


def main():
    parser = experiment_parser(__doc__, "5 runs")
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--epsilon", type=float, default=1.0)
    parser.add_argument("--cases", nargs="*", default=list(CASES))
    args = parser.parse_args()
    rows = []
    for name in args.cases:
        model, site, make = CASES[name]
        found, held = [], []
        for seed in range(5 if args.quick else args.runs):
            x, y, truth, chosen = make(np.random.default_rng(seed))
            if not seed:
                delta = 1 / len(y) ** 2 if name == "adult" else 1e-5
                driver = DPLaplace(model, budget=PrivacyBudget(args.epsilon, delta))
            kind = jnp.float32 if name == "OLS" else jnp.int32
            records = jnp.asarray(x, jnp.float32), jnp.asarray(y, kind)
            posterior = driver.run(jax.random.key(seed), *records)
            draws = np.asarray(posterior.sample(jax.random.key(1), 4000)[site], float)
            low, high = np.quantile(draws, [0.025, 0.975], axis=0)
            kept = slice(None) if chosen is None else [chosen]
            held.append(((low < truth) & (truth < high))[kept])
            row = {
                "squared error": np.mean((draws.mean(0) - truth)[kept] ** 2),
                "coverage of 95 %": np.mean(held[-1]),
                "width": np.mean((high - low)[kept]),
            }
            if name != "OLS":
                exact = np.sqrt(np.diag(at_the_mode(x, y)[1]))
                row["width ratio"] = np.exp(np.mean(np.log((high - low) / (2 * 1.96 * exact))))
            found.append(row)
        row = {"case": name, "epsilon": args.epsilon, **average_row(found)}
        row["rmse"] = row["squared error"] ** 0.5
        row["least coverage of a coefficient"] = float(np.min(np.mean(held, axis=0)))
        rows.append(row)
        print({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
    save(args, rows=rows)


if __name__ == "__main__":
    main()
