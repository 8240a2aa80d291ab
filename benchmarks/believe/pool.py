"""When may the releases of several holders be pooled?

Holders have records of one logistic model with five coefficients, and each fits it with its own
budget. ``pool`` multiplies their likelihoods. "central" is one release on the records of all of
them. Coverage is that of the true coefficients by 90 % intervals, error the root mean square of the
means, and width is relative to the posterior without privacy, all records together. "shares" is the
sum over holders of the share of the prior, above which ``pool`` warns if it is more than 1.

    python benchmarks/believe/pool.py --json pool.json
"""

import pathlib
import sys
import warnings

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
from common import experiment_parser, save

from numpyro_dp import fit
from numpyro_dp.posterior import PosteriorWarning, pool

SIZE, SCALE = 5, 0.7  # number of coefficients, and their standard deviation
CELLS = [(5, 4000), (5, 1000), (10, 2000), (10, 1000), (10, 500), (20, 500), (10, 200), (20, 250)]


def model(x, y=None):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([SIZE]).to_event(1))
    with numpyro.plate("records", x.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=x @ w), obs=y)


def exact(x, y):
    """Mode and covariance of the posterior without privacy."""
    mode = np.zeros(SIZE)
    for _ in range(30):
        p = 1 / (1 + np.exp(-x @ mode))
        precision = x.T @ (x * (p * (1 - p))[:, None]) + np.eye(SIZE)
        mode = mode + np.linalg.solve(precision, x.T @ (y - p) - mode)
    return mode, np.linalg.inv(precision)


def one(holders, number, seed, epsilon):
    rng = np.random.default_rng(seed)
    truth = SCALE * rng.normal(size=SIZE)
    x = rng.normal(size=(holders, number, SIZE))
    y = (rng.random((holders, number)) < 1 / (1 + np.exp(-x @ truth))).astype(int)
    mode, covariance = exact(x.reshape(-1, SIZE), y.ravel())
    own = [
        fit(model, *each, epsilon=epsilon, rng_key=jax.random.key(seed), progress_bar=False)
        for each in zip(x, y, strict=True)
    ]
    central = fit(
        model, x.reshape(-1, SIZE), y.ravel(), epsilon=epsilon, rng_key=jax.random.key(seed),
        progress_bar=False,
    )  # fmt: skip
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", PosteriorWarning)
        pooled = pool(own, persons="disjoint")
    sds = np.sqrt(np.diag(covariance))
    shares = [np.mean(np.diag(np.linalg.inv(p.likelihood.precision + np.eye(SIZE)))) for p in own]
    found = {"shares": sum(shares), "warned": any("add up" in str(each.message) for each in told)}
    for name, posterior in (("pooled", pooled), ("central", central)):
        w = posterior.summary()["w"]
        found[f"{name} coverage"] = np.mean((w["lower"] < truth) & (truth < w["upper"]))
        found[f"{name} error"] = np.mean((w["mean"] - truth) ** 2)
        found[f"{name} width"] = np.mean(w["sd"] / sds)
    found["exact coverage"] = np.mean(np.abs(mode - truth) < 1.645 * sds)
    found["exact error"] = np.mean((mode - truth) ** 2)
    return found


def main():
    parser = experiment_parser(__doc__, "2 cells, 2 sets")
    parser.add_argument("--sets", type=int, default=16)
    parser.add_argument("--epsilon", type=float, default=1.0)
    args = parser.parse_args()
    rows = []
    for holders, number in CELLS[:2] if args.quick else CELLS:
        sets = [
            one(holders, number, seed, args.epsilon)
            for seed in range(2 if args.quick else args.sets)
        ]
        row = {"holders": holders, "records": number, "epsilon": args.epsilon, "sets": len(sets)}
        for name in sets[0]:
            values = np.array([each[name] for each in sets], float)
            row[name] = float(np.sqrt(values.mean()) if "error" in name else values.mean())
        row["warned"] = sum(each["warned"] for each in sets)
        rows.append(row)
        print(row, flush=True)
    save(args, rows=rows)


if __name__ == "__main__":
    main()
