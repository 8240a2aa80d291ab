"""Real outcomes: how far is DPLaplace from the posterior without privacy?

Logistic regressions of real sets. "distance" is the root mean square error of the private mean in
standard deviations of the posterior without privacy (the normal approximation at its mode), "width"
the geometric mean of the ratios of standard deviations. The held-out log-likelihood is a mean over
the records of a fifth that was held out, by draws of the posterior.

    python benchmarks/believe/real.py --json real.json

RAND HIE comes with statsmodels. The others are read from the folder that NUMPYRO_DP_DATA names.
"""

import pathlib
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import numpy as np
from common import average_row, experiment_parser, logistic_model, save
from scipy.special import expit, log_expit, logsumexp

from numpyro_dp import DPLaplace, PrivacyBudget
from numpyro_dp.datasets import (
    DatasetNotFoundError,
    load_adult,
    load_contraception,
    load_doctor_visits,
)


def rand_hie():
    """Any visit to a doctor in a year; columns over public constants, and an intercept."""
    from statsmodels.datasets import randhie

    data = randhie.load_pandas().data
    columns = data.drop(columns="mdvis").to_numpy(float) / [2, 1, 2, 3, 1, 10, 1, 1, 1]
    return np.column_stack([np.ones(len(data)), columns]), data["mdvis"].to_numpy() > 0


def adult():
    data = load_adult()
    x, y = np.concatenate([data.X_train, data.X_test]), np.concatenate([data.y_train, data.y_test])
    return x.astype(float), y > 0


def doctor_visits():
    data = load_doctor_visits()
    most = {"illness": 5, "health": 12}  # by the survey's questions
    scale = np.array([most.get(name, 1) for name in data.feature_names])
    return np.column_stack([np.ones(len(data.y)), data.X / scale]), np.asarray(data.y) > 0


def contraception():
    data = load_contraception()
    columns = np.asarray(data.X, float)
    columns = columns / np.where(np.array([n == "age" for n in data.feature_names]), 10, 1)
    return np.column_stack([np.ones(len(data.y)), columns]), np.asarray(data.y) > 0


SETS = {f.__name__: f for f in (rand_hie, doctor_visits, contraception, adult)}


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


def held_out(draws, x, y):
    """Mean log predictive density over draws."""
    logits = x @ draws.T
    each = np.where(y[:, None], log_expit(logits), log_expit(-logits))
    return float(np.mean(logsumexp(each, axis=1) - np.log(draws.shape[0])))


def main():
    parser = experiment_parser(__doc__, "RAND HIE alone, 2 seeds")
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--sets", nargs="*", default=list(SETS))
    parser.add_argument("--epsilons", nargs="*", type=float, default=[0.3, 1.0, 3.0, 10.0])
    args = parser.parse_args()
    rows = []
    for name in args.sets[:1] if args.quick else args.sets:
        try:
            x, y = SETS[name]()
        except DatasetNotFoundError as error:
            print(f"{name}: left out, {error}")
            continue
        order = np.random.default_rng(0).permutation(len(y))
        test, train = order[: len(y) // 5], order[len(y) // 5 :]
        mean, covariance = at_the_mode(x[train], y[train])
        sd = np.sqrt(np.diag(covariance))
        exact = np.random.default_rng(1).multivariate_normal(mean, covariance, 1000)
        base = np.mean(y[train])
        known = {
            "set": name, "N": len(train), "d": x.shape[1],
            "base rate": float(np.mean(np.where(y[test], np.log(base), np.log1p(-base)))),
            "not private": held_out(exact, x[test], y[test]),
        }  # fmt: skip
        private = jnp.asarray(x[train], jnp.float32), jnp.asarray(y[train], jnp.int32)
        for epsilon in args.epsilons:
            driver = DPLaplace(logistic_model, budget=PrivacyBudget(epsilon, 1e-5))
            found = []
            for seed in range(2 if args.quick else args.seeds):
                start = time.perf_counter()
                draws = driver.run(jax.random.key(seed), *private).sample(jax.random.key(1), 4000)
                w = np.asarray(draws["w"], float)
                found.append({
                    "distance": float(np.sqrt(np.mean(((w.mean(0) - mean) / sd) ** 2))),
                    "width": float(np.exp(np.mean(np.log(w.std(0) / sd)))),
                    "held out": held_out(w[:1000], x[test], y[test]),
                    "seconds": time.perf_counter() - start,
                })  # fmt: skip
            row = {**known, "epsilon": epsilon, **average_row(found)}
            row["worst distance"] = max(each["distance"] for each in found)
            rows.append(row)
            print(
                {k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}, flush=True
            )
    save(args, rows=rows)


if __name__ == "__main__":
    main()
