"""Generalised linear models against NUTS: breast cancer and doctor visits.

Breast cancer (569 records, 31 coefficients, columns standardised, prior N(0, 1)): EP and SEP of
probit and logistic regression. Doctor visits (5,190 records, 12 coefficients, prior N(0, 1),
columns divided by the upper ends of their scales): EP, SEP, DP-SEP, DPSVI and DPLaplace of Poisson
regression, epsilon = 1 and 4, delta = 1e-5, add or remove one. Errors in means are in standard
deviations of NUTS, and in their own, those in variances relative; the largest over coefficients,
and the root mean square. Private rows: mean (standard error) of 10 noise draws of
`result.posterior`, and the share of them that `diagnose()` warns of. Settings are chosen on records
simulated from assumptions (uniform columns; 0.3 visits a record, about the published mean), by the
distance of the private mean to SEP's, three noise draws each; 6 settings of DP-SEP, 9 of DPSVI.

    NUMPYRO_DP_DATA=... python benchmarks/dp_sep/glm.py --json glm.json
"""

import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from numpyro.infer import MCMC, NUTS
from numpyro.infer.autoguide import AutoMultivariateNormal
from numpyro.infer.initialization import init_to_feasible
from sklearn.datasets import load_breast_cancer

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from common import average_row, experiment_parser, save
from datasets import load_doctor_visits
from logistic import from_natural

from numpyro_dp import DPSEP, DPSVI, EP, SEP, DPLaplace, Privacy, PrivacyBudget, secret_key
from numpyro_dp.methods.ep.families import diagonal_normal, normal
from numpyro_dp.samplers import FullBatch, Poisson

LIKELIHOODS = {
    "logistic": lambda eta: dist.Bernoulli(logits=eta),
    "probit": lambda eta: dist.Bernoulli(jax.scipy.stats.norm.cdf(eta)),
    "Poisson": lambda eta: dist.Poisson(jnp.exp(eta)),
}
# Upper ends: ages of 72 coded as 0.72, incomes of 1.5, 5 illnesses, 14 days, scores of 12.
UPPER = {"age": 0.72, "income": 1.5, "illness": 5.0, "reduced": 14.0, "health": 12.0}


def model_of(name):
    def model(x, y):
        weights = numpyro.sample("w", dist.Normal(0, 1).expand([x.shape[1]]).to_event(1))
        with numpyro.plate("records", x.shape[0]):
            numpyro.sample("y", LIKELIHOODS[name](x @ weights), obs=y)

    return model


POISSON, DRAWS = model_of("Poisson"), 4000


def breast_cancer():
    x, y = load_breast_cancer(return_X_y=True)
    x = (x - x.mean(0)) / x.std(0)
    return np.column_stack([x, np.ones(len(x))]).astype(np.float32), y.astype(np.int32)


def doctor_visits():
    data = load_doctor_visits()
    upper = np.array([UPPER.get(name, 1.0) for name in data.feature_names])
    x = np.column_stack([data.X / upper, np.ones(len(data.X))])
    return x.astype(np.float32), data.y.astype(np.int32)


def truth(model, x, y, draws):
    mcmc = MCMC(NUTS(model), num_warmup=500, num_samples=draws, progress_bar=False)
    mcmc.run(jax.random.key(1), x, y)
    found = np.asarray(mcmc.get_samples()["w"], np.float64)
    return found.mean(0), found.var(0)


def errors(posterior, expected):
    mean, variance = posterior[0], np.diag(posterior[1])
    off = np.abs(mean - expected[0]) / np.sqrt(expected[1])
    wide = np.abs(variance / expected[1] - 1)
    own = (mean - expected[0]) / np.sqrt(variance)
    found = {
        "largest in mean": off.max(), "largest in variance": wide.max(),
        "mean, rms": np.sqrt(np.mean(off**2)), "variance, rms": np.sqrt(np.mean(wide**2)),
        "mean in own sd, rms": np.sqrt(np.mean(own**2)),
    }  # fmt: skip
    if len(posterior) > 2:
        found["warned of"] = float(posterior[2])
    return found


def plain(model, x, y, quick):
    sweeps = 5 if quick else 100
    yield "EP", EP(model).run(jax.random.key(0), sweeps, x, y).params
    found = SEP(model).run(jax.random.key(0), sweeps, x, y, progress_bar=False)
    yield "SEP", found.params


def sep_run(setting, budget, seed, quick, x, y):
    family, clip_norm, damping, steps = setting
    driver = DPSEP(
        POISSON, family, clip_norm=clip_norm, damping=damping, sampler=FullBatch(),
        budget=budget, privacy=Privacy(secret_key=secret_key(seed), repetition=True),
    )  # fmt: skip
    result = driver.run(jax.random.key(seed), 5 if quick else steps, x, y, progress_bar=False)
    return moments(result.posterior)


def svi_run(setting, budget, seed, quick, x, y):
    clip_norm, size = setting
    steps = 200 if quick else 2000
    svi = DPSVI(
        POISSON, AutoMultivariateNormal(POISSON, init_loc_fn=init_to_feasible), optax.adam(size),
        clip_norm=clip_norm, sampler=Poisson(0.05), budget=budget,
        privacy=Privacy(secret_key=secret_key(seed), repetition=True),
    )  # fmt: skip
    result = svi.run(jax.random.key(seed), steps, x, y, progress_bar=False)
    return moments(result.posterior)


def laplace_run(setting, budget, seed, quick, x, y):
    laplace = DPLaplace(
        POISSON, budget=budget, privacy=Privacy(secret_key=secret_key(seed), repetition=True)
    )
    return moments(laplace.run(jax.random.key(seed), x, y, progress_bar=False))


def moments(posterior):
    draws = np.asarray(posterior.sample(jax.random.key(2), DRAWS)["w"], np.float64)
    return draws.mean(0), np.cov(draws.T), bool(posterior.diagnose().bad)


CLIPS, MOVES = (2.0, 4.0, 8.0), ((0.5, 8), (0.2, 25))
METHODS = {
    "DP-SEP, diagonal": (sep_run, [(diagonal_normal, c, *m) for c in CLIPS for m in MOVES]),
    "DP-SEP, full precision": (sep_run, [(normal, c, *m) for c in CLIPS for m in MOVES]),
    "DPSVI, full-rank": (svi_run, [(c, size) for c in CLIPS for size in (4e-3, 1e-2, 2.5e-2)]),
    "DPLaplace": (laplace_run, [()]),
}  # fmt: skip


def simulated():
    """As many records and columns as doctor visits has, and about as many visits."""
    rng = np.random.default_rng(0)
    x = np.column_stack([rng.random((5190, 11)), np.ones(5190)])
    weights = np.append(rng.normal(0, 0.5, 11), 0.0)
    weights[-1] = np.log(0.3) - np.log(np.mean(np.exp(x @ weights)))
    return x.astype(np.float32), rng.poisson(np.exp(x @ weights)).astype(np.int32)


def chosen(run, settings, budget, quick):
    """The setting whose private means are closest to those of SEP on simulated records."""
    if len(settings) == 1:
        return settings[0]
    x, y = simulated()
    expected = from_natural(
        SEP(POISSON).run(jax.random.key(0), 60, x, y, progress_bar=False).params
    )
    target = expected[0], np.diag(expected[1])

    def error(setting):
        runs = [run(setting, budget, 100 + seed, quick, x, y) for seed in range(1 if quick else 3)]
        found = np.mean([errors(posterior, target)["mean, rms"] for posterior in runs])
        return found if np.isfinite(found) else np.inf

    return min(settings[:2] if quick else settings, key=error)


def main():
    args = experiment_parser(__doc__, "short chains and runs, two noise draws").parse_args()
    draws, rows = 200 if args.quick else 6000, []
    cases = [("breast cancer", name, breast_cancer) for name in ("logistic", "probit")]
    for data, name, records in (*cases, ("doctor visits", "Poisson", doctor_visits)):
        model, (x, y) = POISSON if name == "Poisson" else model_of(name), records()
        expected = truth(model, x, y, draws)
        for method, params in plain(model, x, y, args.quick):
            rows.append({"data": data, "model": name, "method": method})
            rows[-1] |= average_row([errors(from_natural(params), expected)])
            print_row(rows[-1])
        for epsilon in (1.0, 4.0) if data == "doctor visits" else ():
            budget = PrivacyBudget(epsilon, 1e-5)
            for method, (run, settings) in METHODS.items():
                setting = chosen(run, settings, budget, args.quick)
                found = [
                    errors(run(setting, budget, seed, args.quick, x, y), expected)
                    for seed in range(2 if args.quick else 10)
                ]
                row = {"data": data, "model": name, "method": f"{method}, epsilon = {epsilon:g}"}
                rows.append(row | average_row(found) | {"setting": describe(setting)})
                print_row(rows[-1])
    save(args, rows=rows)


def describe(setting):
    return ", ".join(f"{getattr(part, '__name__', part)}" for part in setting)


def print_row(row):
    names = [name for name in row if f"{name} se" in row]
    numbers = "  ".join(f"{name} {row[name]:7.3f}" for name in names)
    setting = row.get("setting", "")
    print(f"{row['data']:14} {row['model']:9} {row['method']:38} {numbers}  {setting}", flush=True)


if __name__ == "__main__":
    main()
