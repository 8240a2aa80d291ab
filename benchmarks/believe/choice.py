"""Are settings that a rehearsal chose as good as the best of their grid?

choose() sees invented columns only: an intercept, and independent uniform values. Then every
setting of the grid runs on other records. "chosen" is the root mean square error of the posterior
mean with the chosen setting, and "middle" the median of the grid. "best" is the error of an oracle,
which knows the records: it takes the setting with the smallest error in one half of the runs, and
its error is that in the other half, both ways. So it does not profit from lucky noise. On simulated
records the error is to the true weights, in prior standard deviations, over fresh sets. On real
outcomes it is to the mean of NUTS, over runs with fresh noise.

    python benchmarks/believe/choice.py --json choice.json
"""

import itertools
import pathlib
import sys
import warnings

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import numpy as np
import optax
from common import experiment_parser, logistic_model, save
from coverage import DELTA, columns, truth_of, unconstrained
from coverage import logistic as simulated
from numpyro.infer.autoguide import AutoDiagonalNormal
from real import DatasetNotFoundError, by_nuts, split

from numpyro_dp import DPSEP, DPSVI, PrivacyBudget
from numpyro_dp.posterior import PosteriorWarning, choose
from numpyro_dp.samplers import FullBatch, Poisson

SETS = ["simulated", "contraception", "doctor_visits", "adult"]
GRIDS = {
    "DPSVI": [
        {"rate": rate, "num_steps": steps}
        for rate, steps in itertools.product((1e-3, 5e-3, 2e-2), (300, 2000))
    ],
    "DPSEP": [
        {"clip_norm": clip, "num_steps": steps}
        for clip, steps in itertools.product((0.3, 1.0, 3.0), (5, 20))
    ],
}


def logistic(features, label=None):
    return logistic_model(features, label)


def builder(driver, budget, number):
    def svi(rate):
        sampler = Poisson(1000 / number) if number > 1000 else FullBatch()
        return DPSVI(logistic, AutoDiagonalNormal(logistic), optax.adam(rate), clip_norm=1.0,
                     sampler=sampler, budget=budget)  # fmt: skip

    def sep(clip_norm):
        return DPSEP(logistic, clip_norm=clip_norm, sampler=FullBatch(), budget=budget)

    return {"DPSVI": svi, "DPSEP": sep}[driver]


def problems(name, runs):
    """Pairs of records and what the posterior mean should be."""
    if name != "simulated":
        _, (x, y), _ = split(name)
        exact = unconstrained(logistic, by_nuts(logistic, x, y), x).mean(0)
        return [(x, y, exact)] * runs
    found = []
    for seed in range(runs):
        rng = np.random.default_rng([seed, 5])
        x = columns(3000, 8, 0.0, rng)
        latents, y = truth_of(simulated, x, jax.random.key(rng.integers(2**31)))
        found.append((x, y, np.asarray(latents["w"])))
    return found


def squares_of(driver, steps, cases):
    """Mean squared error of the posterior mean in each run."""
    squares = []
    for seed, (x, y, exact) in enumerate(cases):
        result = driver.run(jax.random.key(seed), steps, x, y, progress_bar=False)
        draws = np.asarray(result.posterior.sample(jax.random.key(1), 2000)["w"], float)
        squares.append(np.mean((draws.mean(0) - exact) ** 2))
    return np.asarray(squares)


def oracle(squares):
    """Root mean square error of the setting that was best in the other half of the runs."""
    halves, found = (squares[:, ::2], squares[:, 1::2]), []
    for one, other in (halves, halves[::-1]):
        found.extend(other[np.argmin(one.mean(axis=1))])
    return float(np.sqrt(np.mean(found)))


def compare(name, driver, epsilon, runs, simulations):
    cases = problems(name, runs)
    number, dim = cases[0][0].shape
    build = builder(driver, PrivacyBudget(epsilon, DELTA), number)
    if name == "simulated":
        invented = columns(number, dim, 0.0, np.random.default_rng(99))
    else:
        values = np.random.default_rng(99).random((number, dim))
        values[:, 0] = 1
        invented = jnp.asarray(values, jnp.float32)
    choice = choose(
        build, GRIDS[driver], jax.random.key(7), invented, None, num_simulations=simulations
    )
    squares = []
    for settings in GRIDS[driver]:
        own = dict(settings)
        steps = own.pop("num_steps")
        squares.append(squares_of(build(**own), steps, cases))
    squares = np.asarray(squares)
    errors, chosen = np.sqrt(squares.mean(axis=1)), GRIDS[driver].index(choice.settings)
    row = {
        "set": name, "driver": driver, "epsilon": epsilon, "choice": choice.settings,
        "chosen": float(errors[chosen]), "best": oracle(squares),
        "spread": float(np.std(np.sqrt(squares[chosen])) / np.sqrt(len(cases))),
        "middle": float(np.median(errors)), "worst": float(errors.max()),
    }  # fmt: skip
    row["ratio"] = row["chosen"] / row["best"]
    print({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
    return row


def main():
    parser = experiment_parser(__doc__, "simulated records, DPSEP, 3 runs")
    parser.add_argument("--runs", type=int, default=40)
    parser.add_argument("--simulations", type=int, default=16)
    parser.add_argument("--sets", nargs="*", default=SETS)
    parser.add_argument("--drivers", nargs="*", default=list(GRIDS))
    parser.add_argument("--epsilons", nargs="*", type=float, default=[1.0])
    args = parser.parse_args()
    warnings.simplefilter("ignore", PosteriorWarning)
    runs, simulations, sets, drivers = args.runs, args.simulations, args.sets, args.drivers
    if args.quick:
        runs, simulations, sets, drivers = 3, 4, ["simulated"], ["DPSEP"]
    rows = []
    for name, driver, epsilon in itertools.product(sets, drivers, args.epsilons):
        if name == "adult" and driver == "DPSEP":
            continue  # 36,000 sites of 96 by 96 entries a step
        try:
            rows.append(compare(name, driver, epsilon, runs, simulations))
        except DatasetNotFoundError as problem:
            print(f"{name}: left out, {problem}")
        jax.clear_caches()
    save(args, rows=rows)


if __name__ == "__main__":
    main()
