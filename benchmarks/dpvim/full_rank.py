"""Does aligning pay for a full-rank posterior? DPVIm's Fig. 6, simulated linear regression.

N = 10,000 records of d columns, y ~ N(x w, s^2), w ~ N(0, I), s ~ Gamma(0.1, 0.1); a Cholesky
guide for (w, log s); add or remove one, epsilon = 1, delta = 1/N, Poisson batches at rate 0.01.
Correlations are those of the paper's Algorithm J.1: a part ("density") of the off-diagonal entries
is +-Beta(8, 10), the others are zero. That matrix is not positive definite, so the nearest
correlation matrix with eigenvalues of at least 0.01 is taken instead (Higham 2002).

"paper" is the paper's setting (clip norm 0.2, Adam with step 1e-3); "tuned" has clip norm and step
size of each estimator chosen, for each d, on one simulated data set that is not reported: fitted
to its training records, judged by its held-out ones. Every repetition has data of its own.

    python benchmarks/dpvim/full_rank.py --json out.json --figure out.png
"""

import functools
import itertools
import pathlib
import sys

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from numpyro.infer.autoguide import AutoMultivariateNormal
from scipy import stats

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from common import experiment_parser, legend_below, panels, save
from evaluate import log_predictive_density

from numpyro_dp import DPSVI, PrivacyBudget
from numpyro_dp.estimators import aligned, vanilla
from numpyro_dp.posterior import average
from numpyro_dp.samplers import Poisson

NUMBER, RATE, FLOOR, NODES, TRACE = 10_000, 0.01, 0.01, 32, 400
ESTIMATORS = {"vanilla": vanilla, "aligned": aligned}
PAPER = (0.2, 1e-3)


def model(x, y):
    noise = numpyro.sample("noise", dist.Gamma(0.1, 0.1))
    weights = numpyro.sample("w", dist.Normal(0, 1).expand([x.shape[1]]).to_event(1))
    with numpyro.plate("records", x.shape[0]):
        numpyro.sample("y", dist.Normal(x @ weights, noise), obs=y)


def nearest_correlation(matrix, floor, rounds=2000, tolerance=1e-7):
    """Nearest correlation matrix with eigenvalues of at least ``floor`` (Higham 2002)."""
    found, change = matrix, np.zeros_like(matrix)
    for _ in range(rounds):
        values, vectors = np.linalg.eigh(found - change)
        definite = (vectors * np.maximum(values, floor)) @ vectors.T
        change = definite - (found - change)
        last, found = found, definite.copy()
        np.fill_diagonal(found, 1.0)
        if np.linalg.norm(found - last) < tolerance * np.linalg.norm(found):
            break
    return (found + found.T) / 2


def correlation_matrix(rng, dim, density):
    """Algorithm J.1, and a correlation matrix near it."""
    rows, columns = np.tril_indices(dim, -1)
    chosen = rng.choice(len(rows), round(density * len(rows)), replace=False)
    matrix = np.eye(dim)
    values = rng.beta(8, 10, len(chosen)) * rng.choice([-1, 1], len(chosen))
    matrix[rows[chosen], columns[chosen]] = matrix[columns[chosen], rows[chosen]] = values
    matrix = nearest_correlation(matrix, FLOOR)
    lowest = np.linalg.eigvalsh(matrix)[0]
    if not (lowest > FLOOR / 2 and np.abs(matrix).max() <= 1 and (np.diag(matrix) == 1).all()):
        raise ValueError(f"Not a correlation matrix: smallest eigenvalue {lowest}.")
    return matrix


def simulate(dim, density, seed):
    """Training and held-out records."""
    rng = np.random.default_rng([dim, round(100 * density), seed])
    sd = np.exp(0.2 * rng.normal(size=dim))
    factor = sd[:, None] * np.linalg.cholesky(correlation_matrix(rng, dim, density))
    weights = rng.normal(size=dim)
    parts = []
    for _ in range(2):
        x = rng.normal(size=(NUMBER, dim)) @ factor.T
        y = x @ weights + rng.normal(size=NUMBER)
        parts.append((x.astype(np.float32), y.astype(np.float32)))
    return parts


def exact_posterior(x, y):
    """Noise at equally probable values, and mean and covariance of the weights given each."""
    x, y = x.astype(np.float64), y.astype(np.float64)
    values, vectors = np.linalg.eigh(x.T @ x)
    cross = vectors.T @ (x.T @ y)
    rough = np.sqrt((y @ y - cross**2 @ (1 / values)) / (len(y) - len(values)))
    grid = rough * np.linspace(0.9, 1.1, 2001)
    spread = values + grid[:, None] ** 2  # of w: precision times the noise variance
    log_density = stats.gamma(0.1, scale=10).logpdf(grid) - 0.5 * np.log(spread).sum(1)
    log_density -= (len(y) - len(values)) * np.log(grid)
    log_density -= 0.5 * (y @ y - (cross**2 / spread).sum(1)) / grid**2
    below = np.cumsum(np.exp(log_density - log_density.max()))
    noise = np.interp((np.arange(NODES) + 0.5) / NODES * below[-1], below, grid)
    precision = values + noise[:, None] ** 2
    means = (cross / precision) @ vectors.T
    factors = vectors * (noise[:, None, None] / np.sqrt(precision)[:, None, :])
    return noise, means, factors


def of_guide(params):
    """The same of a guide; its coordinates are log noise, then the weights."""
    loc, factor = (np.asarray(params[f"auto_{n}"], np.float64) for n in ("loc", "scale_tril"))
    deviation = stats.norm.ppf((np.arange(NODES) + 0.5) / NODES)
    noise = np.exp(loc[0] + factor[0, 0] * deviation)
    return noise, loc[1:] + deviation[:, None] * factor[1:, 0], factor[None, 1:, 1:]


def score(posterior, x, y):
    """Log predictive density and expected log likelihood of held-out records, per record."""
    noise, means, factors = posterior
    squares = np.square(y[:, None] - x @ means.T).T
    variance = np.stack([np.square(x @ factor).sum(1) for factor in factors])
    total = variance + noise[:, None] ** 2
    predictive = -0.5 * (np.log(2 * np.pi * total) + squares / total)
    expected = -0.5 * (np.log(2 * np.pi) + (squares + variance) / noise[:, None] ** 2)
    return {
        "log_density": float(log_predictive_density(predictive).mean()),
        "expected": float((expected - np.log(noise)[:, None]).mean()),
        "error": float(squares.mean()),
        "spread": float(variance.mean()),
        "noise": float(np.median(noise)),
    }


@functools.cache
def driver(estimator, clip_norm, step_size, epsilon, num_steps):
    """DPSVI of one setting; kept, so that it is compiled once for all data sets."""
    return DPSVI(
        model,
        AutoMultivariateNormal(model),
        optax.adam(step_size),
        estimator=ESTIMATORS[estimator](),
        clip_norm=clip_norm,
        sampler=Poisson(RATE),
        budget=PrivacyBudget(epsilon=epsilon, delta=1 / NUMBER),
        num_steps=num_steps,
    )


def both(run, held_out):
    """Scores of the last iterate and of the averaged one, and how much of it had converged."""
    mean = average(run.trace)
    scores = {"last": score(of_guide(run.params), *held_out)}
    scores["averaged"] = score(of_guide(mean.params), *held_out)
    scores["averaged"]["converged"] = float(mean.converged["auto_loc"].mean())
    return scores


def choose(dim, args):
    """Clip norm and step size of each estimator, by held-out records of a data set of its own."""
    train, held_out = simulate(dim, 0.5, seed=1000)
    chosen, tried = {}, []
    for estimator in ESTIMATORS:
        for step_size in args.step_sizes:
            svi = driver(estimator, args.clip_norms[0], step_size, args.epsilon, args.steps)
            keys = jax.random.key(1000)[None]
            found = svi.sweep(keys, args.steps, *train, clip_norm=args.clip_norms, trace_size=TRACE)
            for index, clip_norm in enumerate(args.clip_norms):
                scores = both(found.one(index), held_out)
                row = {"dim": dim, "estimator": estimator, "clip": clip_norm, "step": step_size}
                row |= {name: scores[name]["log_density"] for name in scores}
                tried.append(row)
                print(f"validation: {row}", flush=True)
        best = max(
            (row for row in tried if row["estimator"] == estimator),
            key=lambda row: max(row["last"], row["averaged"]),
        )
        chosen[estimator] = best["clip"], best["step"]
    return chosen, tried


def repetition(dim, density, seed, chosen, args):
    """Scores of everything on one data set: (method, setting, estimate) -> scores."""
    train, test = simulate(dim, density, seed)
    prior = stats.gamma(0.1, scale=10).ppf((np.arange(NODES) + 0.5) / NODES)
    scores = {("exact", "", ""): score(exact_posterior(*train), *test)}
    scores["prior", "", ""] = score((prior, np.zeros((NODES, dim)), np.eye(dim)[None]), *test)
    key = jax.random.key(seed)
    for (estimator, setting), values in settings_of(chosen).items():
        svi = driver(estimator, *values, args.epsilon, args.steps)
        start = svi.get_params(svi.init(key, *train))
        scores["initial guide", "", ""] = score(of_guide(start), *test)
        run = svi.run(key, args.steps, *train, progress_bar=False, trace_size=TRACE)
        for estimate, found in both(run, test).items():
            scores[estimator, setting, estimate] = found
    shown = {" ".join(name).strip(): round(scores[name]["log_density"], 4) for name in scores}
    print(f"d {dim} density {density} seed {seed}: {shown}", flush=True)
    return scores


def settings_of(chosen):
    """(estimator, name of the setting) -> clip norm and step size, the same ones only once."""
    settings = {(estimator, "paper"): PAPER for estimator in ESTIMATORS}
    settings |= {(estimator, "tuned"): chosen[estimator] for estimator in ESTIMATORS}
    if chosen["vanilla"] != chosen["aligned"]:
        settings["vanilla", "tuned for aligned"] = chosen["aligned"]
    return settings


def summarise(dim, density, found, chosen):
    """Mean and standard error over repetitions."""
    rows = []
    for name in found[0]:
        row = {"dim": dim, "density": density, "repetitions": len(found)}
        row |= dict(zip(("method", "setting", "estimate"), name, strict=True))
        values = settings_of(chosen).get(name[:2])
        row |= {"clip": values[0], "step": values[1]} if values else {}
        for key in found[0][name]:
            each = np.array([scores[name][key] for scores in found])
            error = each.std(ddof=1) / np.sqrt(len(each)) if len(each) > 1 else np.nan
            row[key] = float(each.mean()), float(error)
        row["each"] = [scores[name]["log_density"] for scores in found]
        rows.append(row)
    return rows


def draw(rows, path):
    """Log predictive density of every repetition, one panel for each density."""
    shown = {
        ("vanilla", "paper", "last"): ("vanilla, paper", "C1", "o"),
        ("aligned", "paper", "last"): ("aligned, paper", "C0", "o"),
        ("vanilla", "tuned", "averaged"): ("vanilla, tuned", "C1", "^"),
        ("aligned", "tuned", "averaged"): ("aligned, tuned", "C0", "^"),
        ("vanilla", "tuned for aligned", "averaged"): ("vanilla, as aligned", "C1", "s"),
    }
    densities = sorted({row["density"] for row in rows})
    dims = sorted({row["dim"] for row in rows})
    layout = dict(columns=len(densities), size=(8.4, 3.8), sharey=True)
    with panels(path, **layout) as (axes,):
        for axis, density in zip(axes, densities, strict=True):
            for row in (row for row in rows if row["density"] == density):
                name = row["method"], row["setting"], row["estimate"]
                place = dims.index(row["dim"])
                if row["method"] in ("exact", "prior"):
                    style = {"exact": "-", "prior": ":"}[row["method"]]
                    axis.hlines(row["log_density"][0], place - 0.4, place + 0.4, "grey", style)
                elif name in shown:
                    label, color, marker = shown[name]
                    where = place + 0.16 * (list(shown).index(name) - 2)
                    label = label if place == 0 else None
                    axis.plot(
                        [where] * len(row["each"]), row["each"], marker, color=color, markersize=4,
                        alpha=0.7, label=label,
                    )  # fmt: skip
            axis.set_xticks(range(len(dims)), [f"d = {dim}" for dim in dims])
            axis.set_title(f"density {density:g}")
        axes[0].set_ylabel("held-out log predictive density")
        legend_below(axes[0], 5)


def main():
    parser = experiment_parser(__doc__, quick="d = 100, 2,000 steps, 2 repetitions")
    parser.add_argument("--epsilon", type=float, default=1.0)
    parser.add_argument("--dims", type=int, nargs="+", default=[100, 200])
    parser.add_argument("--densities", type=float, nargs="+", default=[0.2, 0.8])
    parser.add_argument("--seeds", type=int, nargs="+", default=[5, 3], help="for each d")
    parser.add_argument("--steps", type=int, default=40_000)
    parser.add_argument("--clip-norms", type=float, nargs="+", default=[2.0, 8.0, 16.0])
    parser.add_argument("--step-sizes", type=float, nargs="+", default=[4e-3, 1.2e-2, 3e-2])
    args = parser.parse_args()
    if args.quick:
        args.dims, args.seeds, args.steps, args.step_sizes = [100], [2], 2_000, [4e-3]
    found, chosen, tried = {}, {}, []
    for dim, seeds in zip(args.dims, args.seeds, strict=True):
        chosen[dim], more = choose(dim, args)
        tried += more
        print(f"chosen at d = {dim}: {chosen[dim]}", flush=True)
        for seed, density in itertools.product(range(seeds), args.densities):
            scores = repetition(dim, density, seed, chosen[dim], args)
            found.setdefault((dim, density), []).append(scores)
            rows = [r for cell in found for r in summarise(*cell, found[cell], chosen[cell[0]])]
            save(args, validation=tried, rows=rows)
    if args.figure:
        draw(rows, args.figure)


if __name__ == "__main__":
    main()
