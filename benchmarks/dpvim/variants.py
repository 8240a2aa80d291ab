"""Which gradient variant gets closest to the optimum? DPVIm's Fig. 5a on Adult, all five variants.

Bayesian logistic regression with a mean-field guide; add or remove one, delta = 1/N, 400 epochs of
Poisson batches at rate 0.01. Clip norm and step size of each variant are chosen on a tenth of the
training records at epsilon 1: by the evidence lower bound per record whose likelihood is that of
the tenth. The test records and the optimum take no part in the choice.

    NUMPYRO_DP_DATA=... python benchmarks/dpvim/variants.py --json out.json --figure out.png
"""

import itertools
import pathlib
import sys
import time

import jax
import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from common import average_row, experiment_parser, legend_below, log_ticks, panels, save
from datasets import load_adult_or_bundled
from dpvim.adult import adult_svi, mean_field_optimum, score

from numpyro_dp.estimators import aligned, aligned_natural, natural, preconditioned, vanilla

STEPS = (1e-3, 2e-3, 4e-3, 8e-3)
# Variant -> estimator, clip norms to choose from. Natural signals are in units of the latents.
VARIANTS = {
    "vanilla": (vanilla, (1.0, 2.0, 4.0)),
    "preconditioned": (preconditioned, (1.0, 2.0, 4.0)),
    "natural": (natural, (0.03, 0.1, 0.3, 1.0)),
    "aligned": (aligned, (1.0, 2.0, 4.0)),
    "aligned natural": (aligned_natural, (0.01, 0.03, 0.1, 0.3)),
}


def fits(svi, features, label, args, seeds):
    """Posterior parameters of several seeds."""
    num_steps = round(args.epochs / args.rate)
    return [
        svi.run(jax.random.key(s), num_steps, features, label, progress_bar=False).params
        for s in seeds
    ]


def held_out_elbo(params, features, label, num_examples):
    """Evidence lower bound per record, with the mean log likelihood of held-out records."""
    loc, scale = (np.asarray(params[name], np.float64) for name in ("auto_loc", "auto_scale"))
    nodes, weights = np.polynomial.hermite_e.hermegauss(32)
    mean, sd = features @ loc, np.sqrt(np.square(features) @ np.square(scale))
    odds = (2.0 * label - 1)[:, None] * (mean[:, None] + sd[:, None] * nodes)
    log_likelihood = -np.logaddexp(0, -odds) @ (weights / weights.sum())
    divergence = 0.5 * np.sum(scale**2 + loc**2 - 1 - 2 * np.log(scale))
    return float(log_likelihood.mean() - divergence / num_examples)


def choose(data, args):
    """Clip norm and step size of each variant, by the validation tenth."""
    order = np.random.default_rng(0).permutation(len(data.y_train))
    held, rest = np.split(order, [len(order) // 10])
    features, label = np.asarray(data.X_train), np.asarray(data.y_train)
    chosen, tried = {}, []
    for variant in args.variants:
        best = -np.inf
        for clip_norm, step_size in itertools.product(VARIANTS[variant][1], args.step_sizes):
            estimator = VARIANTS[variant][0]()
            svi = adult_svi(estimator, clip_norm, step_size, len(rest), rate=args.rate)
            (params,) = fits(svi, features[rest], label[rest], args, [1000])
            value = held_out_elbo(params, features[held], label[held], len(rest))
            row = {"variant": variant, "clip": clip_norm, "step": step_size, "elbo": value}
            tried.append(row)
            print(f"validation: {row}", flush=True)
            if value > best:
                best, chosen[variant] = value, (clip_norm, step_size)
    return chosen, tried


def experiment(data, chosen, args):
    """Scores of every variant and epsilon."""
    optimum = mean_field_optimum(data.X_train, data.y_train)
    rows = []
    for variant, epsilon in itertools.product(args.variants, args.epsilon):
        clip_norm, step_size = chosen[variant]
        estimator, number = VARIANTS[variant][0](), len(data.y_train)
        svi = adult_svi(estimator, clip_norm, step_size, number, epsilon, args.rate)
        start = time.perf_counter()
        found = fits(svi, data.X_train, data.y_train, args, range(args.seeds))
        row = {"variant": variant, "epsilon": epsilon, "clip": clip_norm, "step": step_size}
        row |= average_row([score(params, data, optimum) for params in found])
        rows.append(row | {"seconds": (time.perf_counter() - start) / args.seeds})
        print({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
    return rows


def draw(rows, path):
    """Errors of location and scale against epsilon."""
    with panels(path, columns=2, size=(8.4, 3.6)) as (axes,):
        for axis, name in zip(axes, ("loc_error", "scale_error"), strict=True):
            for variant in dict.fromkeys(row["variant"] for row in rows):
                some = [row for row in rows if row["variant"] == variant]
                values, errors = ([row[key] for row in some] for key in (name, f"{name} se"))
                axis.errorbar(
                    [row["epsilon"] for row in some], values, errors, label=variant,
                    marker="o", markersize=3, capsize=2,
                )  # fmt: skip
            log_ticks(axis, sorted({row["epsilon"] for row in rows}))
            which = {"loc_error": "locations", "scale_error": "scales"}[name]
            axis.set(xlabel="epsilon", ylabel=f"l2 error of {which}", ylim=(0, None))
        legend_below(axes[0], 5)


def main():
    parser = experiment_parser(__doc__, quick="40 epochs, 2 seeds, one step size")
    parser.add_argument("--epsilon", type=float, nargs="+", default=[1.0, 2.0, 4.0, 10.0])
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--epochs", type=float, default=400)
    parser.add_argument("--rate", type=float, default=0.01)
    parser.add_argument("--step-sizes", type=float, nargs="+", default=list(STEPS))
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    args = parser.parse_args()
    if args.quick:
        args.epochs, args.seeds, args.step_sizes, args.epsilon = 40, 2, [2e-3], [1.0]
    data = load_adult_or_bundled()
    print(data.source)
    chosen, tried = choose(data, args)
    rows = experiment(data, chosen, args)
    if args.figure:
        draw(rows, args.figure)
    save(args, validation=tried, rows=rows)


if __name__ == "__main__":
    main()
