"""Regression networks: VI, ADF, EP, SEP, clipped SEP, DP-SEP, DP-VI and point estimates.

One hidden layer of 50 ReLU units on kin8nm, power-plant and protein (Tables 3 to 5, 8 and 9 of
Vinaroz and Park 2022); standard 90/10 splits; epsilon = 1, delta = 1e-5, add or remove one. Inputs
and targets are scaled by published ranges, so no record has a part in it; protein has none: its
first 400 training records are taken as public, give percentiles and are not fitted. For each
split, settings are chosen by the log density of a fifth of the training records (a choice that is
in no budget, of any method) and fitted to all training records anew. DP-SEP at each clip norm, all
else at one setting, shows what the norm does. Noise and batches come from secret keys by split, so
that a run can be repeated; ``--beside`` adds rows of an earlier one.

    NUMPYRO_DP_DATA=... python benchmarks/dp_sep/networks.py --json networks.json
"""

import json
import math
import pathlib
import sys
import time

import jax
import numpy as np
import optax
from numpyro.infer import Predictive
from numpyro.infer.autoguide import AutoDelta, AutoDiagonalNormal
from numpyro.infer.initialization import init_to_sample

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from common import average_row, experiment_parser, save
from datasets import load_kin8nm, load_power_plant, load_protein

from numpyro_dp import DPPBP, DPSVI, PBP, Privacy, PrivacyBudget, RegressionNetwork, secret_key
from numpyro_dp.estimators import aligned, vanilla
from numpyro_dp.samplers import Poisson

BUDGET = PrivacyBudget(1.0, 1e-5)
BATCH = 1024  # expected
NETWORK = RegressionNetwork((50,))
CLIPS = (0.3, 0.5, 0.7, 1.0, 2.0)  # in predictive standard deviations of a residual

# Lowest and highest value of each input and of the target, as their sources state them: angles are
# uniform on [-pi/2, pi/2], eight links of the arm reach at most 1.5; ranges of the plant as on the
# page of the UCI repository.
RANGES = {
    "kin8nm": (load_kin8nm, [(-np.pi / 2, np.pi / 2)] * 8, (0.0, 1.5)),
    "power-plant": (
        load_power_plant,
        [(1.81, 37.11), (25.36, 81.56), (992.89, 1033.30), (25.56, 100.16)],
        (420.26, 495.76),
    ),
    "protein": (load_protein, None, None),
}
PUBLIC = 400  # records that give the ranges where none are published


def load(name, split):
    """Training and test records, scaled to the middle and a quarter of public ranges."""
    loader, inputs, target = RANGES[name]
    data, first = loader(split=split), 0
    if inputs is None:
        first = PUBLIC
        inputs = np.percentile(data.X_train[:first], [1, 99], axis=0).T
        target = np.percentile(data.y_train[:first], [1, 99])
    low, high = np.array(inputs).T
    middle, quarter = (high + low) / 2, (high - low) / 4
    unit = (target[1] - target[0]) / (6 if name == "kin8nm" else 4)

    def scaled(x, y):
        y = (y - sum(target) / 2) / unit
        x = np.clip((x - middle) / quarter, -4, 4)  # inside them but for protein's outliers
        return x.astype(np.float32), y.astype(np.float32)

    train = data.X_train[first:], data.y_train[first:]
    return scaled(*train), scaled(data.X_test, data.y_test), unit


def decay(first, last, steps):
    return lambda step: first * (last / first) ** (step / steps)


def scores(predict, test, unit):
    """RMSE and mean log density of the test records, in the units of the target."""
    x, y = test
    mean, log_density = predict(x, y)
    return {
        "rmse": float(np.sqrt(np.mean((mean - y) ** 2)) * unit),
        "log density": float(np.mean(log_density) - np.log(unit)),
    }


def by_moments(params):
    def predict(x, y):
        mean, variance = (np.asarray(part, np.float64) for part in NETWORK.predict(params, x))
        return mean, -((y - mean) ** 2 / variance + np.log(2 * np.pi * variance)) / 2

    return predict


def by_draws(guide, params, number=200):
    draws = Predictive(guide, params=params, num_samples=number)(jax.random.key(9))

    def predict(x, y):
        outputs = np.asarray(jax.vmap(lambda w: NETWORK.apply(w, x))(draws["weights"]), np.float64)
        precision = np.asarray(draws["noise_precision"], np.float64)[:, None]
        each = (np.log(precision / (2 * np.pi)) - precision * (y - outputs) ** 2) / 2
        return outputs.mean(0), np.logaddexp.reduce(each, axis=0) - np.log(len(each))

    return predict


def poisson(x):
    return Poisson(min(BATCH / len(x), 0.9))


def spending(budget, seed):
    """Options of a run with a budget, or of one without privacy."""
    noise = 0.0 if budget is None else None
    privacy = Privacy(noise_multiplier=noise, secret_key=secret_key(seed), repetition=True)
    return {"budget": budget, "privacy": privacy}


def sep(clip_norm, budget, sampler, steps, seed, x, y, **options):
    driver = DPPBP(
        NETWORK, clip_norm=clip_norm, sampler=sampler,
        **spending(budget, seed), **options,
    )  # fmt: skip
    return by_moments(driver.run(jax.random.key(seed), steps, x, y, progress_bar=False).params)


def plain_sep(setting, seed, x, y):
    """SEP, clipped or not, with a precision of each weight."""
    clip_norm, damping, steps = setting
    return sep(
        clip_norm, None, poisson(x), steps, seed, x, y, damping=damping, precision_per_weight=True
    )


def private_sep(setting, seed, x, y):
    """DP-SEP in coordinates of the curvature for invented inputs.

    Slopes have a norm of their own: clipped together with them, a large residual would tell less
    of the noise than it should.
    """
    clip_norm, ridge, steps, last = setting
    return sep(
        {"linear": clip_norm, ...: 0.2}, BUDGET, poisson(x), steps, seed, x, y,
        ridge=ridge, damping=0.03, step_size=decay(1.0, last, steps), noise_weight=0.03,
    )  # fmt: skip


def printed_step(setting, seed, x, y):
    """DP-SEP with the mean moved by the posterior's own precision, as SEP has it."""
    clip_norm, damping, steps = setting
    return sep(clip_norm, BUDGET, poisson(x), steps, seed, x, y, damping=damping)


def filtering(sweeps, seed, x, y):
    return by_moments(PBP(NETWORK).run(jax.random.key(seed), sweeps, x, y).params)


def per_record(setting, seed, x, y):
    damping, updates = setting
    sweeps = -(-updates // len(x))
    driver = PBP(NETWORK, keep_sites=True, damping=damping)
    return by_moments(driver.run(jax.random.key(seed), sweeps, x, y).params)


def variational(guide_type, estimator, budget):
    def fit(setting, seed, x, y):
        clip_norm, size, steps = setting
        options = {} if guide_type is AutoDelta else {"init_scale": 0.1}
        guide = guide_type(NETWORK, init_loc_fn=init_to_sample, **options)
        svi = DPSVI(
            NETWORK, guide, optax.adam(optax.cosine_decay_schedule(size, steps)),
            estimator=estimator, clip_norm=clip_norm, sampler=poisson(x),
            **spending(budget, seed),
        )  # fmt: skip
        result = svi.run(jax.random.key(seed), steps, x, y, progress_bar=False)
        return by_draws(guide, result.params, 1 if guide_type is AutoDelta else 200)

    return fit


def methods(quick):
    """Name -> (fit, settings)."""
    free, private = None, BUDGET
    steps = 20 if quick else 1500
    long = 50 if quick else 4000
    all_ = {
        "VI": (variational(AutoDiagonalNormal, aligned(), free),
               [(math.inf, size, long) for size in (3e-3, 1e-2)]),
        "ADF (PBP)": (filtering, [2 if quick else 40]),
        "EP": (per_record, [(damping, 2_000 if quick else 2_200_000) for damping in (0.02, 0.05)]),
        "SEP": (plain_sep, [(math.inf, damping, steps) for damping in (0.005, 0.02, 0.05)]),
        "SEP clipped": (plain_sep, [(clip, 0.03, steps) for clip in (0.5, 2.0)]),
        "point estimate": (variational(AutoDelta, vanilla(), free), [(math.inf, 1e-2, long)]),
        "DP-SEP": (private_sep, [
            (clip, ridge, 12 if quick else count, last) for clip, ridge, count, last in (
                (0.7, 20.0, 250, 0.03), (0.7, 200.0, 600, 0.02), (0.7, 300.0, 800, 0.02),
            )
        ]),
        "DP-SEP, step of SEP": (printed_step, [
            (0.2, 0.05, 300), (0.5, 0.05, 300), (0.5, 0.1, 100), (1.0, 0.1, 100),
        ]),
        "DP-VI, aligned": (variational(AutoDiagonalNormal, aligned(), private), [
            (clip, size, long // 4) for clip in (4.0, 16.0) for size in (1e-2, 3e-2)
        ]),
        "DP-VI, vanilla": (variational(AutoDiagonalNormal, vanilla(), private), [
            (clip, size, long // 4) for clip in (4.0, 16.0) for size in (1e-2, 3e-2)
        ]),
        "DP point estimate": (variational(AutoDelta, vanilla(), private), [
            (clip, size, long // 4) for clip in (4.0, 16.0) for size in (1e-2, 3e-2)
        ]),
    }  # fmt: skip
    if quick:
        return {name: (fit, settings[:1]) for name, (fit, settings) in all_.items()}
    return all_


def chosen(fit, settings, seed, train, unit):
    """The setting with the largest log density on a fifth of the training records."""
    if len(settings) == 1:
        return settings[0]
    order = np.random.default_rng(seed).permutation(len(train[0]))
    rest, held = np.split(order, [4 * len(order) // 5])
    part, valid = (tuple(array[rows] for array in train) for rows in (rest, held))

    def density(setting):
        found = scores(fit(setting, 100 + seed, *part), valid, unit)["log density"]
        return found if np.isfinite(found) else -np.inf

    return max(settings, key=density)


def main():
    parser = experiment_parser(__doc__, "kin8nm, one split, 1,000 records, few steps")
    parser.add_argument("--sets", nargs="+", default=list(RANGES), choices=list(RANGES))
    names = [*methods(False), "clip norms"]
    parser.add_argument("--methods", nargs="*", default=names, choices=names)
    parser.add_argument("--splits", type=int, default=5)
    parser.add_argument("--beside", nargs="*", default=[], help="JSON of runs to add rows from")
    args = parser.parse_args()
    before = [json.loads(pathlib.Path(path).read_text()) for path in args.beside]
    rows, clips, asked = [], [], args.methods
    for name in args.sets[:1] if args.quick else args.sets:
        cases = [load(name, split) for split in range(1 if args.quick else args.splits)]
        if args.quick:
            cases = [(tuple(a[:1000] for a in tr), te, unit) for tr, te, unit in cases]
        for method, (fit, settings) in methods(args.quick).items():
            if method not in asked:
                continue
            begin, found, picks = time.perf_counter(), [], []
            for seed, (train, test, unit) in enumerate(cases):
                setting = chosen(fit, settings, seed, train, unit)
                found.append(scores(fit(setting, seed, *train), test, unit))
                picks.append(setting)
            row = {"set": name, "method": method} | average_row(found)
            rows.append(row | {"chosen": picks, "seconds": time.perf_counter() - begin})
            print_row(rows[-1])
            save(args, rows=rows, clips=clips)  # what has been found so far
        norms = CLIPS[:1] if args.quick else CLIPS
        for clip_norm in norms if "clip norms" in asked else ():
            found = [
                scores(
                    private_sep((clip_norm, 100.0, 12 if args.quick else 400, 0.02), seed, *train),
                    test,
                    unit,
                )
                for seed, (train, test, unit) in enumerate(cases)
            ]
            clips.append({"set": name, "method": f"clip norm {clip_norm}", "clip norm": clip_norm})
            clips[-1] |= average_row(found)
            print_row(clips[-1])
            save(args, rows=rows, clips=clips)
    rows, clips = (
        earlier([old[kind] for old in before], new)
        for kind, new in (("rows", rows), ("clips", clips))
    )
    save(args, rows=rows, clips=clips)


def earlier(before, rows):
    """Rows of this run, and before them those that only earlier runs have."""
    found = {(row["set"], row["method"]): row for part in (*before, rows) for row in part}
    order = [*RANGES, *methods(False)]
    place = {name: at for at, name in enumerate(order)}
    return sorted(
        found.values(), key=lambda row: (place[row["set"]], place.get(row["method"], len(order)))
    )


def print_row(row):
    print(
        f"{row['set']:12} {row['method']:22} RMSE {row['rmse']:8.4f}  log density "
        f"{row['log density']:8.4f}  {row.get('seconds', 0):5.0f} s",
        flush=True,
    )


if __name__ == "__main__":
    main()
