"""Do intervals hold the truth on real columns, with simulated outcomes? At what cost?

The columns are those of the sets of real.py, four fifths of the rows. For each run weights are
drawn from N(0, 1) and outcomes of a logistic regression from them. Figures are means over runs, of
weights ("weights 90" is how often a nominal 90 % interval holds one) and of the linear predictors
of 500 held-out rows ("predictors 90"), which is what a prediction needs. "error" is the root mean
square error of a weight. "seconds" is the median time of a run after the first. Drivers have the
settings that coverage.py shows.

    python benchmarks/believe/designs.py --json designs.json
"""

import pathlib
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import numpy as np
from common import average_row, experiment_parser, logistic_model, save
from coverage import DELTA, DRIVERS, Z90, figures
from real import DatasetNotFoundError, split

from numpyro_dp import PrivacyBudget

SETS = ["rand_hie", "doctor_visits", "contraception", "rwm5yr", "adult"]


def design(name, epsilon, drivers, runs):
    """A row for each driver."""
    _, (x, _), (held_out, _) = split(name)
    at, budget, found = np.asarray(held_out[:500], float), PrivacyBudget(epsilon, DELTA), {}
    built = {driver: DRIVERS[driver](logistic_model, budget, len(x)) for driver in drivers}
    for seed in range(runs):
        rng = np.random.default_rng([seed, 1])
        truth = rng.normal(size=x.shape[1])
        chances = 1 / (1 + np.exp(-np.asarray(x, float) @ truth))
        y = jnp.asarray(rng.random(len(x)) < chances, jnp.int32)
        for driver, run in built.items():
            start = time.perf_counter()
            draws = np.asarray(run(jax.random.key(seed), x, y)[driver]["w"], float)
            seconds = time.perf_counter() - start
            row = figures(truth, draws.mean(0), draws.std(0))
            off = np.abs(at @ (draws.mean(0) - truth)) / (draws @ at.T).std(0)
            found.setdefault(driver, []).append({
                "weights 90": row["cover 90"], "weights 50": row["cover 50"],
                "predictors 90": np.mean(off < Z90), "log score": row["log score"],
                "squared error": row["squared error"], "seconds": seconds,
            })  # fmt: skip
    rows = []
    for driver, each in found.items():
        row = {"set": name, "N": len(x), "d": x.shape[1], "driver": driver, "epsilon": epsilon}
        row |= average_row(each)
        row["error"] = row["squared error"] ** 0.5
        row["seconds"] = float(np.median([one["seconds"] for one in each[1:] or each]))
        print({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
        rows.append(row)
    return rows


def over_sets(rows):
    """Means over the sets, for each driver and budget."""
    cells = {}
    for row in rows:
        cells.setdefault((row["driver"], row["epsilon"]), []).append(row)
    names = ("weights 90", "predictors 90", "error", "log score", "seconds")
    return [
        {"driver": driver, "epsilon": epsilon, "sets": len(each)}
        | {name: float(np.mean([row[name] for row in each])) for name in names}
        for (driver, epsilon), each in cells.items()
    ]


def main():
    parser = experiment_parser(__doc__, "RAND HIE alone, 3 runs")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--sets", nargs="*", default=SETS)
    parser.add_argument("--drivers", nargs="*", default=list(DRIVERS))
    parser.add_argument("--epsilons", nargs="*", type=float, default=[0.3, 1.0, 3.0])
    args = parser.parse_args()
    rows = []
    for name in args.sets[:1] if args.quick else args.sets:
        try:
            for epsilon in args.epsilons:
                rows += design(name, epsilon, args.drivers, 3 if args.quick else args.runs)
        except DatasetNotFoundError as error:
            print(f"{name}: left out, {error}")
        jax.clear_caches()
    save(args, rows=rows, over_sets=over_sets(rows))


if __name__ == "__main__":
    main()
