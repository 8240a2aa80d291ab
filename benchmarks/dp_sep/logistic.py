"""Private logistic regression: DP-SEP against aligned DPSVI at the same budget.

Simulated records with independent unit normal columns, d = 5 and 20, weights N(0, 5 / d), prior
N(0, 1); N = 5,000 to train on, 1,000 to choose settings by, 10,000 to test; epsilon = 1,
delta = 1e-5, add or remove one. Every setting of a grid is run on five data sets with noise of its
own; for each data set the one with the best validation log predictive density is reported on the
test records (that choice is in no budget, of either method). Errors are distances to a long NUTS
run: of the mean in posterior standard deviations (root mean square over coordinates), and of log
standard deviations; lost density is that of the NUTS draws' normal less that of the method, on the
same test records. "Worst" is the largest of any setting and data set. Noise and batches come from
secret keys by data set, so that a run can be repeated.

    python benchmarks/dp_sep/logistic.py --json logistic.json --figure docs/logistic.png
"""

import itertools
import pathlib
import sys
import time

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from numpyro.infer import MCMC, NUTS
from numpyro.infer.autoguide import AutoDiagonalNormal, AutoMultivariateNormal
from numpyro.infer.initialization import init_to_feasible

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from common import average_row, experiment_parser, panels, save

from numpyro_dp import DPSEP, DPSVI, SEP, PrivacyBudget, secret_key
from numpyro_dp.estimators import aligned
from numpyro_dp.methods.ep.families import diagonal_normal, normal
from numpyro_dp.posterior import tail_average
from numpyro_dp.samplers import FullBatch, Poisson

BUDGET = PrivacyBudget(1.0, 1e-5)
TRAIN, VALID, TEST = 5_000, 1_000, 10_000
NUM_STEPS = 2_000  # of DPSVI


def model(x, y):
    weights = numpyro.sample("w", dist.Normal(0, 1).expand([x.shape[1]]).to_event(1))
    with numpyro.plate("records", x.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=x @ weights), obs=y)


def simulate(dim, seed):
    """Training, validation and test records."""
    rng = np.random.default_rng([dim, seed])
    x = rng.normal(size=(TRAIN + VALID + TEST, dim)).astype(np.float32)
    weights = rng.normal(size=dim) / np.sqrt(dim / 5)
    y = (rng.random(len(x)) < 1 / (1 + np.exp(-x @ weights))).astype(np.int32)
    edges = TRAIN, TRAIN + VALID
    return list(zip(np.split(x, edges), np.split(y, edges), strict=True))


def truth(x, y, draws):
    mcmc = MCMC(NUTS(model), num_warmup=300, num_samples=draws, progress_bar=False)
    mcmc.run(jax.random.key(1), x, y)
    found = np.asarray(mcmc.get_samples()["w"], np.float64)
    return found.mean(0), np.cov(found.T)


def density(posterior, x, y):
    """Mean log predictive density, by 1,000 draws from a normal posterior."""
    mean, covariance = posterior
    normals = np.random.default_rng(0).normal(size=(1000, len(mean)))
    logits = x @ (mean + normals @ np.linalg.cholesky(covariance).T).T
    each = -np.logaddexp(0, np.where(y[:, None] == 1, -logits, logits))
    return float(np.mean(np.logaddexp.reduce(each, axis=1) - np.log(1000)))


def from_natural(params):
    precision = np.asarray(params["auto_precision"], np.float64)
    covariance = np.linalg.inv(precision if precision.ndim == 2 else np.diag(precision))
    return covariance @ np.asarray(params["auto_linear"], np.float64), covariance


def from_guide(params):
    mean = np.asarray(params["auto_loc"], np.float64)
    if "auto_scale" in params:
        return mean, np.diag(np.asarray(params["auto_scale"], np.float64) ** 2)
    factor = np.asarray(params["auto_scale_tril"], np.float64)
    return mean, factor @ factor.T


def sep_runs(family, quick):
    """Setting -> run of DP-SEP."""
    norms, moves = ((2.0,), ((0.5, 8),)) if quick else ((1.0, 2.0, 4.0), ((0.5, 8), (0.2, 25)))
    for clip_norm, (damping, num_steps) in itertools.product(norms, moves):
        driver = DPSEP(
            model,
            family,
            clip_norm=clip_norm,
            damping=damping,
            precision_weight=0.5,
            shared_precision=True,
            sampler=FullBatch(),
            unbiased_clipping=False,  # as in the paper
            budget=BUDGET,
        )

        def run(x, y, seed, driver=driver, num_steps=num_steps):
            driver.settings = driver.settings.changed(secret_key=secret_key(seed), repetition=True)
            result = driver.run(jax.random.key(seed), num_steps, x, y, progress_bar=False)
            return from_natural(result.params)

        yield {"clip norm": clip_norm, "damping": damping, "steps": num_steps}, run


def svi_runs(guide, quick):
    """Setting -> run of aligned DPSVI, its last quarter averaged."""
    norms, sizes = ((2.0,), (1e-2,)) if quick else ((1.0, 2.0, 4.0), (4e-3, 1e-2, 2.5e-2))
    for clip_norm, step_size in itertools.product(norms, sizes):
        driver = DPSVI(
            model,
            guide(model, init_loc_fn=init_to_feasible),
            optax.adam(step_size),
            estimator=aligned(),
            clip_norm=clip_norm,
            sampler=Poisson(0.05),
            budget=BUDGET,
        )

        def run(x, y, seed, driver=driver):
            driver.settings = driver.settings.changed(secret_key=secret_key(seed), repetition=True)
            fold = tail_average(NUM_STEPS, 0.25)
            result = driver.run(
                jax.random.key(seed), NUM_STEPS, x, y, progress_bar=False, fold=fold
            )
            return from_guide(result.folded.params)

        yield {"clip norm": clip_norm, "step size": step_size}, run


def methods(quick):
    yield "DP-SEP, one precision", sep_runs(normal, quick)
    yield "DP-SEP, diagonal", sep_runs(diagonal_normal, quick)
    yield "aligned DPSVI, mean-field", svi_runs(AutoDiagonalNormal, quick)
    yield "aligned DPSVI, full-rank", svi_runs(AutoMultivariateNormal, quick)


def scores(posterior, expected, test):
    """Distances to the truth: moments, and test log density of it (a pair for each data set)."""
    spread = np.sqrt(np.diag(expected[1]))
    off = (posterior[0] - expected[0]) / spread
    widths = np.log(np.sqrt(np.diag(posterior[1])) / spread)
    return {
        "error of mean": float(np.sqrt(np.mean(off**2))),
        "error of log sd": float(np.sqrt(np.mean(widths**2))),
        "test density": density(posterior, *test),
        "lost density": density(expected, *test) - density(posterior, *test),
    }


def main():
    args = experiment_parser(__doc__, "one data set and one setting, d = 5").parse_args()
    rows, number = [], 1 if args.quick else 5
    for dim in (5,) if args.quick else (5, 20):
        cases = [simulate(dim, seed) for seed in range(number)]
        expected = [truth(*case[0], 500 if args.quick else 4000) for case in cases]
        plain = [
            SEP(model).run(jax.random.key(0), 20, *case[0], progress_bar=False) for case in cases
        ]
        for method, found in (("NUTS", expected), ("SEP", [from_natural(r.params) for r in plain])):
            each = zip(found, expected, cases, strict=True)
            errors = [scores(p, e, case[2]) for p, e, case in each]
            rows.append({"method": method, "d": dim} | average_row(errors))
        for method, runs in methods(args.quick):
            begin, best, worst = time.perf_counter(), [(-np.inf, None, None)] * number, [0.0, 0.0]
            for setting, run in runs:
                for seed, case in enumerate(cases):
                    posterior = run(*case[0], 1000 + seed)
                    valid = density(posterior, *case[1])
                    own = scores(posterior, expected[seed], case[2])
                    worst = np.maximum(worst, [own["error of mean"], own["lost density"]])
                    if valid > best[seed][0]:
                        best[seed] = valid, posterior, setting
            found = [
                scores(posterior, each, case[2])
                for (_, posterior, _), each, case in zip(best, expected, cases, strict=True)
            ]
            row = {"method": method, "d": dim} | average_row(found)
            row |= {"worst error": float(worst[0]), "worst lost density": float(worst[1])}
            row["chosen"] = [setting for *_, setting in best]
            row["seconds"] = time.perf_counter() - begin
            rows.append(row)
        for row in rows[-6:]:
            print(
                f"d = {dim:2}  {row['method']:26} mean {row['error of mean']:6.3f} sd  log sd "
                f"{row['error of log sd']:6.3f}  lost density {row['lost density']:8.5f} "
                f"({row['lost density se'] or 0:.5f})  worst "
                f"{row.get('worst error', 0):6.2f} {row.get('worst lost density', 0):8.4f}",
                flush=True,
            )
    if args.figure:
        draw(args.figure, rows)
    save(args, rows=rows)


def draw(path, rows):
    """Error of the mean, and what is lost in test density, by method."""
    dims = sorted({row["d"] for row in rows})
    with panels(path, 2, 1, (10, 3.4), sharey=True) as axes:
        for shift, dim in enumerate(dims):
            own = [row for row in rows if row["d"] == dim]
            shown = own[2:]
            at = np.arange(len(shown)) + 0.18 * (2 * shift - 1)
            for axis, name in ((axes[0, 0], "error of mean"), (axes[0, 1], "lost density")):
                unit = 1000 if name == "lost density" else 1
                values = [unit * row[name] for row in shown]
                errors = [unit * (row[f"{name} se"] or 0.0) for row in shown]
                axis.errorbar(values, at, xerr=errors, fmt="o", capsize=2, label=f"d = {dim}")
                axis.set_yticks(range(len(shown)), [row["method"] for row in shown])
        axes[0, 0].set_xlabel("error of the mean, posterior sd")
        axes[0, 1].set_xlabel("test log density below that of NUTS, nats x 1000")
        axes[0, 0].legend()
        for axis in axes[0]:
            axis.axvline(0, color="0.7", linewidth=0.8, zorder=0)
        axes[0, 0].invert_yaxis()


if __name__ == "__main__":
    main()
