"""Which guide at epsilon 1? Gaussian and flow guides, vanilla against aligned gradients.

Two models with correlated posteriors: simulated logistic regression, N = 6,000, d = 16, columns of
correlation 0.9; and contraceptive use of women in 60 districts (N = 1,355 to train on), with an
intercept for each district and a prior on their scale, 67 latents. Add or remove one,
delta = 1e-5, Poisson batches, 2,000 and 1,000 steps of Adam with one draw each. Step size and clip
norm of each guide and method are chosen out of one grid on validation records, by the evidence
lower bound with their mean log likelihood in the place of the training records'. Neither validation
nor test records are trained on, and test records take no part in the choice. Reported of each
posterior, by 1,000 draws from it:

- the evidence lower bound on the training records, in nats. It is no private value: shown since
  one data set is simulated and the other public;
- the log predictive density per test record.

"untrained" is the guide that a run starts from, "non-private" plain SVI on full batches.

    NUMPYRO_DP_DATA=... python benchmarks/dpvim/guides.py --json out.json --figure out.png
"""

import itertools
import pathlib
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from numpyro import handlers
from numpyro.infer import SVI, Trace_ELBO, autoguide
from numpyro.infer.initialization import init_to_feasible
from numpyro.infer.util import log_density

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from common import experiment_parser, legend_below, panels, save
from datasets import load_contraception
from evaluate import log_predictive_density

from numpyro_dp import DPSVI, PrivacyBudget
from numpyro_dp.estimators import aligned, vanilla
from numpyro_dp.samplers import Poisson

DIM, CORRELATION, DISTRICTS = 16, 0.9, 60
# Step sizes, and clip norms in units of the problem's: a flow has gradients of larger norm.
GRID = (4e-3, 1e-2, 2.5e-2), (1, 2, 4)
GRID_IAF = (1.5e-3, 4e-3, 1e-2), (2, 4, 8, 16)
METHODS = {"vanilla": vanilla, "aligned": aligned}
# The Gaussian guides start at 0 with the default scale, 0.1; the flows start near a unit normal.
GUIDES = {
    "diagonal": lambda m: autoguide.AutoDiagonalNormal(m, init_loc_fn=init_to_feasible),
    "full": lambda m: autoguide.AutoMultivariateNormal(m, init_loc_fn=init_to_feasible),
    "low-rank": lambda m: autoguide.AutoLowRankMultivariateNormal(m, init_loc_fn=init_to_feasible),
    "IAF": lambda m: autoguide.AutoIAFNormal(m, num_flows=2, init_loc_fn=init_to_feasible),
    "BNAF": lambda m: autoguide.AutoBNAFNormal(m, hidden_factors=[2], init_loc_fn=init_to_feasible),
}


class Problem(NamedTuple):
    """A model and its records: training, validation, test, in this order."""

    model: Callable
    records: tuple
    sizes: tuple
    rate: float
    steps: int
    clip_norm: float

    @property
    def train(self):
        return tuple(part[: self.sizes[0]] for part in self.records)


def logistic(x, y):
    weights = numpyro.sample("w", dist.Normal(0, 1).expand([DIM]).to_event(1))
    with numpyro.plate("records", x.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=x @ weights), obs=y)


def hierarchical(x, district, y):
    weights = numpyro.sample("w", dist.Normal(0, 1).expand([x.shape[1]]).to_event(1))
    scale = numpyro.sample("scale", dist.HalfNormal(1))
    effects = numpyro.sample("effects", dist.Normal(0, 1).expand([DISTRICTS]).to_event(1))
    with numpyro.plate("women", x.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=x @ weights + scale * effects[district]), obs=y)


def simulated():
    """Equicorrelated columns: the weights of the posterior are correlated the other way."""
    rng = np.random.default_rng(0)
    sizes = (6_000, 1_000, 3_000)
    covariance = np.full((DIM, DIM), CORRELATION) + (1 - CORRELATION) * np.eye(DIM)
    x = rng.normal(size=(sum(sizes), DIM)) @ np.linalg.cholesky(covariance).T
    y = rng.random(len(x)) < 1 / (1 + np.exp(-x @ rng.normal(size=DIM)))
    x, y = x.astype(np.float32), y.astype(np.int32)
    return Problem(logistic, (x, y), sizes, rate=0.02, steps=2_000, clip_norm=1.0)


def districts():
    """Age in tens of years, and a column of ones; 70, 10 and 20 % of the women."""
    data = load_contraception()
    order = np.random.default_rng(0).permutation(len(data.y))
    validation, test = len(order) // 10, len(order) // 5
    sizes = (len(order) - validation - test, validation, test)
    x = np.column_stack([data.X[:, 0] / 10, data.X[:, 1:], np.ones(len(order), np.float32)])
    records = x[order], data.group[order], data.y[order]
    return Problem(hierarchical, records, sizes, rate=0.05, steps=1_000, clip_norm=0.5)


PROBLEMS = {"logistic": simulated, "districts": districts}


def driver(problem, guide, method, clip_norm, args):
    return DPSVI(
        problem.model,
        guide,
        optax.inject_hyperparams(optax.adam)(1e-3),
        estimator=METHODS[method](),
        clip_norm=clip_norm,
        sampler=Poisson(problem.rate),
        budget=PrivacyBudget(epsilon=args.epsilon, delta=1e-5),
        num_steps=problem.steps,
    )


def fit(svi, step_size, seed, problem):
    """Parameters after a run; the step size is in the state, so that it compiles nothing anew."""
    state = svi.init(jax.random.key(seed), *problem.train)
    optim_state = optax.tree_utils.tree_set(state.optim_state, learning_rate=step_size)
    state = state._replace(optim_state=optim_state)
    run = dict(init_state=state, trace_size=1, progress_bar=False)
    return svi.run(jax.random.key(seed), problem.steps, *problem.train, **run).params


def scorer(problem, guide, num_draws):
    """Function of parameters: bound in training, the same by validation, test log predictive."""
    model, records = problem.model, problem.records
    train, validation, _ = np.split(np.arange(sum(problem.sizes)), np.cumsum(problem.sizes[:2]))

    def one(params, key):
        log_q, drawn = log_density(handlers.seed(guide, key), records, {}, params)
        replayed = handlers.replay(handlers.seed(model, key), drawn)
        sites = handlers.trace(replayed).get_trace(*records)
        each = sites.pop("y")["fn"].log_prob(records[-1])
        latents = [site for site in sites.values() if site["type"] == "sample"]
        divergence = log_q - sum(jnp.sum(site["fn"].log_prob(site["value"])) for site in latents)
        held_out = each[validation].mean() * len(train)
        return each[train].sum() - divergence, held_out - divergence, each[len(train) :]

    keys = jax.random.split(jax.random.key(7), num_draws)
    draws = jax.jit(lambda params: jax.vmap(lambda key: one(params, key))(keys))

    def score(params):
        bound, held_out, rest = (np.asarray(value, np.float64) for value in draws(params))
        predictive = log_predictive_density(rest[:, len(validation) :]).mean()
        return {
            "elbo": float(bound.mean()),
            "validation": float(held_out.mean()),
            "test": float(predictive),
        }

    return score


def choose(problem, guide, method, grid, score, args):
    """Driver and step size with the best bound by the validation records, and all tried."""
    best, chosen, tried = -np.inf, None, []
    for clip_norm in grid[1]:
        svi = driver(problem, guide, method, clip_norm, args)
        for step_size in grid[0]:
            runs = [fit(svi, step_size, 1000 + seed, problem) for seed in range(args.tuning_seeds)]
            value = float(np.mean([score(params)["validation"] for params in runs]))
            tried.append({"clip": clip_norm, "step": step_size, "validation": value})
            if value > best:  # never of a run that ended in nan
                best, chosen = value, (svi, step_size)
    return *chosen, tried


def non_private(problem, guide):
    """Plain SVI on full batches, with a step size that falls to 0."""
    optim = optax.adam(optax.cosine_decay_schedule(1e-2, 2 * problem.steps))
    svi = SVI(problem.model, guide, optim, Trace_ELBO())
    return svi.run(jax.random.key(0), 2 * problem.steps, *problem.train, progress_bar=False).params


def summarise(found):
    """Mean and standard error over seeds of each score."""
    values = {name: np.array([score[name] for score in found]) for name in ("elbo", "test")}
    return {
        name: (float(value.mean()), float(value.std(ddof=1) / np.sqrt(len(value))))
        for name, value in values.items()
    }


def cell(problem, name, args):
    """All of one guide on one problem: untrained, non-private, and both methods."""
    guide = GUIDES[name](problem.model)
    score = scorer(problem, guide, args.draws)
    step_sizes, units = GRID_IAF if name == "IAF" else GRID
    grid = args.step_sizes or step_sizes, [problem.clip_norm * unit for unit in units]
    start = time.perf_counter()
    first = driver(problem, guide, "aligned", 1.0, args)
    seeds = [jax.random.key(seed) for seed in range(args.seeds)]
    starts = [first.get_params(first.init(key, *problem.train)) for key in seeds]
    row = {"parameters": sum(np.size(leaf) for leaf in jax.tree.leaves(starts[0]))}
    runs = {"untrained": [score(params) for params in starts]}
    row["non-private"] = score(non_private(problem, guide))
    for method in METHODS:
        svi, step_size, tried = choose(problem, guide, method, grid, score, args)
        row[f"{method} chosen"] = {
            "clip": svi.settings.clip_norm.given,
            "step": step_size,
            "tried": tried,
        }
        found = [fit(svi, step_size, seed, problem) for seed in range(args.seeds)]
        runs[method] = [score(params) for params in found]
    gaps = [
        {k: after[k] - before[k] for k in after}
        for before, after in zip(runs["vanilla"], runs["aligned"], strict=True)
    ]
    row |= {which: summarise(found) for which, found in (runs | {"gap": gaps}).items()}
    return row | {"runs": runs, "seconds": time.perf_counter() - start}


def draw(rows, path):
    """Nats between the best non-private bound of a problem and each other."""
    problems = list(dict.fromkeys(row["problem"] for row in rows))
    styles = {"untrained": "x", "vanilla": "s", "aligned": "o"}
    with panels(path, len(problems), size=(4.2 * len(problems), 3.6)) as (axes,):
        for axis, problem in zip(axes, problems, strict=True):
            some = [row for row in rows if row["problem"] == problem]
            best = max(row["non-private"]["elbo"] for row in some)
            places = np.arange(len(some))
            gaps = [best - row["non-private"]["elbo"] for row in some]
            axis.plot(places, gaps, "_", color="black", label="non-private")
            for which, marker in styles.items():
                values = np.array([row[which]["elbo"] for row in some])
                axis.errorbar(
                    places, best - values[:, 0], values[:, 1],
                    label=which, fmt=marker, markersize=5, capsize=2,
                )  # fmt: skip
            axis.set_yscale("symlog", linthresh=10)
            axis.set(title=problem, ylabel="nats below the best non-private bound", ylim=(-1, None))
            axis.set_xticks(
                places,
                [row["guide"] for row in some],
            )
        legend_below(axes[0], 4)


def parse():
    parser = experiment_parser(__doc__, quick="200 steps, 2 seeds, one step size")
    parser.add_argument("--epsilon", type=float, default=1.0)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--tuning-seeds", type=int, default=2)
    parser.add_argument("--steps", type=int, help="2,000 (logistic), 1,000 (districts)")
    parser.add_argument("--draws", type=int, default=1_000)
    parser.add_argument("--step-sizes", type=float, nargs="+", help="by default of each guide")
    parser.add_argument("--problems", nargs="+", choices=list(PROBLEMS), default=list(PROBLEMS))
    parser.add_argument("--guides", nargs="+", choices=list(GUIDES), default=list(GUIDES))
    args = parser.parse_args()
    if args.quick:
        args.steps, args.seeds, args.tuning_seeds, args.draws = 200, 2, 1, 200
        args.step_sizes = [1e-2]
    return args


def main():
    args = parse()
    rows = []
    for name, guide in itertools.product(args.problems, args.guides):
        problem = PROBLEMS[name]()
        problem = problem._replace(steps=args.steps or problem.steps)
        row = {"problem": name, "guide": guide} | cell(problem, guide, args)
        rows.append(row)
        print({k: v for k, v in row.items() if k != "runs"}, flush=True)
        save(args, rows=rows)  # after each, since all of it takes long
    if args.figure:
        draw(rows, args.figure)


if __name__ == "__main__":
    main()
