"""Do intervals of DPLaplace hold the truth on real columns, with simulated outcomes?

The columns are those of the sets of real.py, four fifths of the rows. For each run weights are
drawn from N(0, 1) and outcomes of a logistic regression from them. Figures are means over runs, of
weights ("weights 90" is how often a nominal 90 % interval holds one) and of the linear predictors
of 500 held-out rows ("predictors 90"), which is what a prediction needs.

    python benchmarks/believe/designs.py --json designs.json
"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import numpy as np
from common import average_row, experiment_parser, logistic_model, save
from coverage import DELTA, Z90, figures
from real import DatasetNotFoundError, split

from numpyro_dp import DPLaplace, PrivacyBudget

SETS = ["rand_hie", "doctor_visits", "contraception", "rwm5yr", "adult"]


def design(name, epsilons, runs):
    """A row for each budget."""
    _, (x, _), (held_out, _) = split(name)
    rows = []
    for epsilon in epsilons:
        driver, found = DPLaplace(logistic_model, budget=PrivacyBudget(epsilon, DELTA)), []
        for seed in range(runs):
            rng = np.random.default_rng([seed, 1])
            truth = rng.normal(size=x.shape[1])
            chances = 1 / (1 + np.exp(-np.asarray(x, float) @ truth))
            y = jnp.asarray(rng.random(len(x)) < chances, jnp.int32)
            posterior = driver.run(jax.random.key(seed), x, y)
            draws = np.asarray(posterior.sample(jax.random.key(1), 4000)["w"], float)
            row = figures(truth, draws.mean(0), draws.std(0))
            at = np.asarray(held_out[:500], float)
            off = np.abs(at @ (draws.mean(0) - truth)) / (draws @ at.T).std(0)
            found.append({
                "weights 90": row["cover 90"], "weights 50": row["cover 50"],
                "predictors 90": np.mean(off < Z90), "log score": row["log score"],
            })  # fmt: skip
        row = {"set": name, "N": len(x), "d": x.shape[1], "epsilon": epsilon, **average_row(found)}
        print({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
        rows.append(row)
    return rows


def main():
    parser = experiment_parser(__doc__, "RAND HIE alone, 3 runs")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--sets", nargs="*", default=SETS)
    parser.add_argument("--epsilons", nargs="*", type=float, default=[0.3, 1.0, 3.0])
    args = parser.parse_args()
    rows = []
    for name in args.sets[:1] if args.quick else args.sets:
        try:
            rows += design(name, args.epsilons, 3 if args.quick else args.runs)
        except DatasetNotFoundError as error:
            print(f"{name}: left out, {error}")
        jax.clear_caches()
    save(args, rows=rows)


if __name__ == "__main__":
    main()
