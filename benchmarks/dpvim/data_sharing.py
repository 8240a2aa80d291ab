"""May synthetic data stand in for the records? DPVIm's Figs. 1-4 on open health data.

A mixture of 16 products of categoricals with a Poisson response (section 4.2) is fitted to records
of doctor visits with a mean-field guide, its mean started at random; add or remove one, delta =
1/N, 160 epochs of Poisson batches at rate 0.02. Does the initial scale of the guide matter, do
longer runs help, and does averaging iterates? And does a Poisson regression on 100 synthetic sets,
combined by Rubin's rules, find the coefficients of the same regression on the records?

Clip norm and step size of each method are chosen at epsilon 1 by the log predictive density of a
tenth of the records, which is held out throughout (the step size on the first data set); the other
nine tenths are what is shared. Neither regression nor optimum takes part in the choice.

    NUMPYRO_DP_DATA=... python benchmarks/dpvim/data_sharing.py --json out.json --figure out.png
"""

import itertools
import pathlib
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from numpyro.infer import Predictive
from numpyro.infer.autoguide import AutoDiagonalNormal

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from common import experiment_parser, legend_below, log_ticks, panels, save
from dpvim._mixture import (
    DATA,
    coefficient_optimum,
    coefficients_of,
    design,
    held_out_density,
    make_model,
    poisson_regression,
    two_way_distance,
)

from numpyro_dp import DPSVI, Privacy, PrivacyBudget
from numpyro_dp.estimators import aligned, vanilla
from numpyro_dp.posterior import average, combine, noise_aware
from numpyro_dp.samplers import Poisson

METHODS = {"vanilla": vanilla, "aligned": aligned}
CLIP_NORMS = (1.0, 2.0, 4.0, 8.0, 16.0)
TRACE = 500  # iterates kept of a run
WINDOWS = (50, 100, 200, 400)  # of them


class Fitter:
    """Private runs of one method and step size on one data set, compiled once."""

    def __init__(self, method, step_size, records, args, private=True):
        self.records, self.args, self.step_size = records, args, step_size
        self.model = make_model(records.levels)
        self.guide = AutoDiagonalNormal(self.model)
        budget = PrivacyBudget(epsilon=1.0, delta=1 / len(records.counts))
        self.svi = DPSVI(
            self.model,
            self.guide,
            optax.adam(step_size, b2=0.999 if private else 0.99),  # unclipped, it starts huge
            estimator=METHODS[method](),
            clip_norm=1.0,
            sampler=Poisson(args.rate),
            budget=budget if private else None,
            privacy=Privacy(noise_multiplier=None if private else 0.0),
        )

        self.draw = jax.jit(self._draw)  # compiled once: every call would be compiled again

    def _draw(self, key, params):
        number = len(self.records.counts)
        keys = jax.random.split(key)
        latents = Predictive(self.guide, params=params, num_samples=self.args.sets)(keys[0])
        return Predictive(self.model, latents)(keys[1], None, None, number=number)

    def runs(self, clip_norms, epsilons, seeds, steps=None, sigma=None):
        """Runs, seeds varying fastest and clip norms slowest, from the initial scale ``sigma``."""
        scale = jnp.full(self.records.num_latents(), sigma or self.args.sigma)
        found = self.svi.sweep(
            jnp.stack([jax.random.key(seed) for seed in seeds]),
            steps or self.args.steps,
            self.records.codes,
            self.records.counts,
            epsilon=epsilons,
            clip_norm=clip_norms,
            init_params={"auto_scale": scale},
            trace_size=TRACE,
            chunk_size=self.args.chunk,
        )
        return [found.one(index) for index in range(len(found.privacy))]

    def start(self, seed):
        """Initial parameters, which read no record."""
        records = self.records
        state = self.svi.init(jax.random.key(seed), records.codes, records.counts)
        return self.svi.get_params(state)


def choose(rest, held, step_sizes, args):
    """The fitter and clip norm of each method, by records that were held out."""
    chosen, tried = {}, []
    for method in args.methods:
        best = -np.inf
        for step_size in step_sizes[method]:
            fitter = Fitter(method, step_size, rest, args)
            runs = fitter.runs(args.clip_norms, [1.0], [1000])
            density = held_out_density(fitter.model, fitter.guide, held)
            for clip_norm, run in zip(args.clip_norms, runs, strict=True):
                value = density(run.params)
                row = {"data": rest.name, "method": method, "clip": clip_norm, "step": step_size}
                tried.append(row | {"density": value})
                print(f"validation: {tried[-1]}", flush=True)
                if value > best:
                    best, chosen[method] = value, (fitter, clip_norm)
    return chosen, tried


def proportional_absolute_error(found, optimum, start):
    """Distance to the optimum over that of the start, both summed over coordinates."""
    return float(np.abs(found - optimum).sum() / np.abs(start - optimum).sum())


class Judge:
    """What the runs on one data set are compared with: the optimum, and the original analysis."""

    def __init__(self, free, args):
        records = free.records
        self.records, self.args = records, args
        x = design(records.codes, records.levels)
        self.loc, self.scale = coefficient_optimum(x, records.counts)
        self.estimate, self.variance = poisson_regression(x, records.counts)
        width = len(self.loc)
        self.starts = [coefficients_of(free.start(s), width)[0] for s in range(args.seeds)]

    def parameters(self, run, seed, sigma):
        """Errors of the variational parameters of the coefficients, and the paper's, made robust.

        In locations: in standard deviations of the optimum; in scales: of their logarithm.
        """
        loc, scale = coefficients_of(run.params, len(self.loc))
        first = np.full_like(scale, sigma)
        return {
            "loc_error": float(np.sqrt(np.mean(((loc - self.loc) / self.scale) ** 2))),
            "scale_error": float(np.mean(np.abs(np.log(scale / self.scale)))),
            "loc_pae": proportional_absolute_error(loc, self.loc, self.starts[seed]),
            "scale_pae": proportional_absolute_error(scale, self.scale, first),
        }

    def downstream(self, fitter, params, seed):
        """The analysis of synthetic sets against that of the records."""
        records = self.records
        made = fitter.draw(jax.random.key(seed), params)
        codes, counts = np.asarray(made["x"]), np.asarray(made["y"])
        pairs = [
            poisson_regression(design(x, records.levels), y)
            for x, y in zip(codes, counts, strict=True)
        ]
        found = combine(*(np.stack(part) for part in zip(*pairs, strict=True)))
        low, high = found.interval(0.95)
        tables = [two_way_distance(records.codes, x, records.levels) for x in codes[:5]]
        return {
            "rmse": float(np.sqrt(np.mean((found.estimate - self.estimate) ** 2))),
            "coverage": float(np.mean((low <= self.estimate) & (self.estimate <= high))),
            "sd_ratio": float(np.median(found.sd / np.sqrt(self.variance))),
            "tables": float(np.mean(tables)),
        }


def summarise(rows):
    """Mean and standard error of each score over seeds."""
    values = {key: np.array([row[key] for row in rows]) for key in rows[0]}
    error = np.sqrt(max(len(rows), 2))
    return {k: (float(v.mean()), float(v.std(ddof=len(v) > 1) / error)) for k, v in values.items()}


def shown(row):
    pairs = {k: f"{v[0]:.3f} ({v[1]:.3f})" if isinstance(v, tuple) else v for k, v in row.items()}
    print(pairs, flush=True)
    return row


def sharing(fitter, judge, label, runs, seeds, windows=False):
    """Rows of Figs. 3 and 4: what is shared is drawn from the last iterate, or an average."""
    makers = {
        "last iterate": lambda run: run.params,
        "noise-aware": lambda run: noise_aware(run, fitter.guide).params,
    }
    if windows:
        makers["averaged"] = lambda run: average(run.trace).params
        for size in WINDOWS:
            makers[size] = lambda run, size=size: average(run.trace, window=size).params
    rows = []
    for name, make in makers.items():
        pairs = zip(runs, seeds, strict=True)
        found = [judge.downstream(fitter, make(run), seed) for run, seed in pairs]
        rows.append(shown(label | {"shared": name} | summarise(found)))
    return rows


def convergence(judge, run):
    """Part of the coefficients whose location the check calls converged."""
    width = len(judge.loc)
    return {"converged": float(np.mean(average(run.trace).converged["auto_loc"][-width:]))}


def method_rows(method, chosen, judge, args, further):
    """All rows of one method: downstream by epsilon; by initial scale and length if ``further``."""
    (fitter, clip_norm), seeds = chosen, range(args.seeds)
    base = {"data": judge.records.name, "method": method}
    base |= {"clip": clip_norm, "step": fitter.step_size}
    parameters, downstream = [], []

    def judged(runs, epsilon, sigma, steps):
        scores = [
            judge.parameters(run, seed, sigma) | convergence(judge, run)
            for run, seed in zip(runs, seeds, strict=True)
        ]
        label = base | {"epsilon": epsilon, "sigma": sigma, "steps": steps}
        parameters.append(shown(label | summarise(scores)))

    start = time.perf_counter()
    runs = fitter.runs([clip_norm], args.epsilon, seeds)
    seconds = (time.perf_counter() - start) / len(runs)
    for number, epsilon in enumerate(args.epsilon):
        some = runs[number * args.seeds : (number + 1) * args.seeds]
        judged(some, epsilon, args.sigma, args.steps)
        windows = further and epsilon == 1.0 and method == "aligned"
        label = base | {"epsilon": epsilon, "seconds": round(seconds, 2)}
        downstream += sharing(fitter, judge, label, some, seeds, windows)
    for sigma in args.sigmas if further else ():
        judged(fitter.runs([clip_norm], [1.0], seeds, sigma=sigma), 1.0, sigma, args.steps)
    for steps in args.lengths if further else ():
        judged(fitter.runs([clip_norm], [1.0], seeds, steps=steps), 1.0, args.sigma, steps)
    return parameters, downstream


def not_private(fitter, judge, args):
    """The same fits without noise, and with a clip norm that records reach at the start only."""
    seeds = range(args.seeds)
    runs = fitter.runs([100.0], None, seeds)
    scores = [
        judge.parameters(run, seed, args.sigma) | convergence(judge, run)
        for run, seed in zip(runs, seeds, strict=True)
    ]
    base = {"data": judge.records.name, "method": "not private"}
    base |= {"epsilon": None, "step": fitter.step_size}
    row = shown(base | {"sigma": args.sigma, "steps": args.steps} | summarise(scores))
    return [row], sharing(fitter, judge, base, runs, seeds)


def experiment(records, step_sizes, further, args):
    """All rows of one data set, and the step sizes chosen."""
    order = np.random.default_rng(0).permutation(len(records.counts))
    held, rest = (records.take(rows) for rows in np.split(order, [len(order) // 10]))
    print(f"{records.name}: {rest.codes.shape} records, levels {records.levels}", flush=True)
    chosen, tried = choose(rest, held, step_sizes, args)
    step_sizes = {method: [fitter.step_size] for method, (fitter, _) in chosen.items()}
    free = Fitter(args.methods[-1], step_sizes[args.methods[-1]][0], rest, args, private=False)
    judge = Judge(free, args)
    found = [not_private(free, judge, args)]
    found += [method_rows(m, chosen[m], judge, args, further) for m in args.methods]
    parameters, downstream = (list(itertools.chain(*part)) for part in zip(*found, strict=True))
    rows = {"validation": tried, "parameters": parameters, "downstream": downstream}
    return rows, step_sizes


def draw(report, args):
    """Errors by initial scale and length; downstream errors by window and epsilon."""
    first = [row for row in report["parameters"] if row["data"] == args.data[0]]
    shared = [row for row in report["downstream"] if row["data"] == args.data[0]]

    def line(axis, rows, x, y, label):
        rows = sorted(rows, key=lambda row: row[x])
        values = np.array([row[y] for row in rows])
        axis.errorbar(
            [row[x] for row in rows], values[:, 0], values[:, 1],
            label=label, marker="o", markersize=3, capsize=2,
        )  # fmt: skip

    with panels(args.figure, columns=3, rows=2, size=(10.4, 6.2)) as axes:
        for method in args.methods:
            own = [row for row in first if row["method"] == method and row["epsilon"] == 1.0]
            for axis, y in zip(axes[:, 0], ("loc_error", "scale_error"), strict=True):
                line(axis, [r for r in own if r["steps"] == args.steps], "sigma", y, method)
            for axis, y in zip(axes[:, 1], ("loc_error", "scale_error"), strict=True):
                line(axis, [r for r in own if r["sigma"] == args.sigma], "steps", y, method)
        for method, name in [(m, n) for m in args.methods for n in ("last iterate", "noise-aware")]:
            own = [r for r in shared if r["method"] == method and r["shared"] == name]
            for axis, y in zip(axes[:, 2], ("rmse", "coverage"), strict=True):
                line(axis, own, "epsilon", y, f"{method}, {name}")
        (free,) = [
            r for r in shared if (r["method"], r["shared"]) == ("not private", "last iterate")
        ]
        for axis, y in zip(axes[:, 2], ("rmse", "coverage"), strict=True):
            axis.axhline(free[y][0], color="grey", linestyle=":", label="not private")
        ticks = ([*args.sigmas, args.sigma], [*args.lengths, args.steps], args.epsilon)
        for column, name in enumerate(("initial scale", "steps", "epsilon")):
            for axis in axes[:, column]:
                log_ticks(axis, ticks[column])
            axes[1, column].set_xlabel(name)
        for column in (0, 1):
            axes[0, column].set_ylabel("error of locations, in sd")
            axes[1, column].set_ylabel("error of log scales")
            axes[0, column].set_ylim(bottom=0)
            axes[1, column].set_ylim(bottom=0)
        axes[0, 2].set(ylabel="RMSE of coefficients", ylim=(0, None))
        axes[1, 2].set(ylabel="coverage of 95 % intervals", ylim=(0, 1.03))
        axes[0, 0].legend()
        legend_below(axes[0, 2], 5)


def main():
    parser = experiment_parser(__doc__, quick="one data set, 1,000 steps, 2 seeds")
    parser.add_argument("--data", nargs="+", choices=list(DATA), default=list(DATA))
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--epsilon", type=float, nargs="+", default=[0.5, 1.0, 2.0, 4.0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8_000)
    parser.add_argument("--rate", type=float, default=0.02)
    parser.add_argument("--sigma", type=float, default=1.0, help="initial scale of the guide")
    parser.add_argument("--sigmas", type=float, nargs="+", default=[0.01, 0.1, 0.3])
    parser.add_argument("--lengths", type=int, nargs="+", default=[2_000, 4_000, 16_000])
    parser.add_argument("--step-sizes", type=float, nargs="+", default=[0.01, 0.02])
    parser.add_argument("--clip-norms", type=float, nargs="+", default=list(CLIP_NORMS))
    parser.add_argument("--sets", type=int, default=100, help="synthetic sets of a posterior")
    parser.add_argument("--chunk", type=int, default=5, help="runs in lockstep")
    args = parser.parse_args()
    if args.quick:
        args.data, args.steps, args.seeds, args.chunk = args.data[:1], 1_000, 2, 2
        args.step_sizes, args.clip_norms, args.epsilon = [0.02], [1.0, 2.0], [1.0]
        args.sigmas, args.lengths, args.sets = [0.1], [2_000], 20
    report = {}
    start = time.process_time()
    step_sizes = dict.fromkeys(args.methods, args.step_sizes)
    for name in args.data:
        found, step_sizes = experiment(DATA[name](), step_sizes, name == args.data[0], args)
        report |= {key: report.get(key, []) + rows for key, rows in found.items()}
        report["cpu_seconds"] = round(time.process_time() - start)
        save(args, **report)
        if args.figure:
            draw(report, args)


if __name__ == "__main__":
    main()
