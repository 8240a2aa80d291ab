"""Can the noise of the last iterate be read off one run's trace? DPVIm's Fig. 5b on Adult.

Bayesian logistic regression, mean-field guide, aligned natural gradients, 400 epochs of Poisson
batches at rate 0.01, clip norm 0.1 and step 2e-3 (chosen on a validation part by variants.py). For
each run the standard deviation of the private iterates over the last half, corrected for its
autocorrelation, predicts that of the last iterate over runs. The mean squared error is taken over
coordinates of the location that pass a check; the baseline predicts no noise at all. Checks: the
paper's slope below 0.05, and this package's slope within its own standard error.

    NUMPYRO_DP_DATA=... python benchmarks/dpvim/noise_recovery.py --json out.json --figure out.png
"""

import pathlib
import sys
import time

import jax
import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from common import experiment_parser, log_ticks, panels, save
from datasets import load_adult_or_bundled
from dpvim.adult import adult_svi

from numpyro_dp.estimators import aligned_natural
from numpyro_dp.posterior import drift_check
from numpyro_dp.posterior.averaging import fit_ar1


def slope_check(window):
    """The paper's: the slope over the window, scaled to [0, 1], in units of the parameter."""
    time = np.linspace(0, 1, len(window)) - 0.5
    return np.abs(time @ (window - window.mean(0)) / (time @ time)) <= 0.05


CHECKS = {"slope below 0.05": slope_check, "drift check": drift_check()}


def runs(data, args):
    """All seeds and epsilons in one compiled call."""
    svi = adult_svi(aligned_natural(), 0.1, 2e-3, len(data.y_train))
    keys = jax.random.split(jax.random.key(0), args.seeds)
    records = (data.X_train, data.y_train)
    return svi.sweep(keys, round(args.epochs / 0.01), *records, epsilon=args.epsilon,
                     chunk_size=args.chunk)  # fmt: skip


def assess(found, chosen, name):
    """Mean squared error of the predicted standard deviations, by run."""
    trace = found.trace.params["auto_loc"][chosen]
    actual = found.params["auto_loc"][chosen].std(0, ddof=1)
    errors, passed = [], []
    for iterates in trace:
        window = iterates[len(iterates) // 2 :].astype(float)
        good = CHECKS[name](window)
        passed.append(good.mean())
        if good.any():
            predicted = np.sqrt(fit_ar1(window).variance)[good]
            errors.append([np.mean((predicted - actual[good]) ** 2), np.mean(actual[good] ** 2)])
    errors = np.array(errors).reshape(-1, 2)
    return {
        "converged": float(np.mean(passed)),
        "mse": float(errors[:, 0].mean()) if len(errors) else None,
        "mse_sd": float(errors[:, 0].std(ddof=1)) if len(errors) > 1 else None,
        "baseline": float(errors[:, 1].mean()) if len(errors) else None,
    }


def experiment(args):
    data = load_adult_or_bundled()
    print(data.source)
    start = time.perf_counter()
    found = runs(data, args)
    print(f"{len(found.privacy)} runs in {time.perf_counter() - start:.0f} s", flush=True)
    rows = []
    for epsilon in args.epsilon:
        chosen = np.flatnonzero(found.labels["epsilon"] == epsilon)
        for name in CHECKS:
            rows.append({"epsilon": epsilon, "check": name} | assess(found, chosen, name))
            print(rows[-1], flush=True)
    return rows


def draw(rows, path):
    """Errors against epsilon, with the baseline."""
    with panels(path) as ((axis,),):
        for name in CHECKS:
            some = [row for row in rows if row["check"] == name and row["mse"] is not None]
            if not some:  # nothing passed
                continue
            epsilon = [row["epsilon"] for row in some]
            (line,) = axis.plot(epsilon, [row["mse"] for row in some], marker="o", label=name)
            axis.plot(epsilon, [row["baseline"] for row in some], ":", color=line.get_color(),
                      label=f"{name}: no noise predicted")  # fmt: skip
        log_ticks(axis, sorted({row["epsilon"] for row in rows}))
        axis.set(xlabel="epsilon", ylabel="mean squared error of the sd", ylim=(0, None))
        axis.legend()


def main():
    parser = experiment_parser(__doc__, quick="4 seeds, 20 epochs, epsilon 1")
    parser.add_argument("--epsilon", type=float, nargs="+", default=[1.0, 2.0, 4.0, 10.0])
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--epochs", type=float, default=400)
    parser.add_argument("--chunk", type=int, default=40, help="runs in lockstep")
    args = parser.parse_args()
    if args.quick:
        args.seeds, args.epochs, args.epsilon = 4, 20, [1.0]
    rows = experiment(args)
    if args.figure:
        draw(rows, args.figure)
    save(args, rows=rows)


if __name__ == "__main__":
    main()
