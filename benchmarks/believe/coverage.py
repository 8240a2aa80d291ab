"""Do intervals of DPLaplace hold the true parameter as often as they say, at every budget?

For each cell, parameters are drawn from the prior, records from the model, and a posterior from the
records; a nominal 90 % interval should hold the parameter in 90 % of cases. Columns are normal with
standard deviation 2 / sqrt(d) and the given correlation. "not private" is the normal approximation
at the mode of the same records. Figures are means over sets and coordinates, with standard errors
over sets. DPSVI has its default estimator, clip norm 1, 2,000 steps on batches of 1,000 on average.
DPSEP has clip norm 2 and 20 steps, DPMCMC (SGLD) clip norm 1, 1,000 steps of warmup and 2,000 more;
both have full batches. "plain" are the same runs without the noise of privacy in their posteriors.

    python benchmarks/believe/coverage.py --json coverage.json
    python benchmarks/believe/coverage.py --models logistic --sets 40 --dims 5 20 \
        --numbers 1000 5000 --correlations 0 0.5 --drivers DPLaplace DPSVI DPSEP DPMCMC
"""

import pathlib
import sys
import time
import warnings

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from common import average_row, experiment_parser, save
from jax.flatten_util import ravel_pytree
from numpyro.infer.autoguide import AutoDiagonalNormal
from numpyro.infer.util import initialize_model

from numpyro_dp import DPMCMC, DPSEP, DPSVI, SGLD, DPLaplace, PrivacyBudget
from numpyro_dp.posterior import PosteriorWarning
from numpyro_dp.samplers import FullBatch, Poisson

DELTA = 1e-5
Z50, Z90 = 0.6744898, 1.6448536


def weights(dim, scale=1.0):
    return numpyro.sample("w", dist.Normal(0, scale).expand([dim]).to_event(1))


def logistic(x, y=None):
    w = weights(x.shape[1])
    with numpyro.plate("records", x.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=x @ w), obs=y)


def poisson(x, y=None):
    w = weights(x.shape[1], 0.5)
    with numpyro.plate("records", x.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(x @ w)), obs=y)


def linear(x, y=None):
    w = weights(x.shape[1])
    noise = numpyro.sample("noise", dist.LogNormal(0, 0.5))
    with numpyro.plate("records", x.shape[0]):
        numpyro.sample("y", dist.Normal(x @ w, noise), obs=y)


def categorical(x, y=None):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([x.shape[1], 3]).to_event(2))
    with numpyro.plate("records", x.shape[0]):
        numpyro.sample("y", dist.Categorical(logits=x @ w), obs=y)


def mixture(x, y=None):
    """Of the columns only their number of rows is used."""
    share = numpyro.sample("share", dist.TransformedDistribution(
        dist.Normal(0, 0.8), dist.transforms.SigmoidTransform()))  # fmt: skip
    low = numpyro.sample("low", dist.Normal(-1, 0.5))
    gap = numpyro.sample("gap", dist.LogNormal(1.1, 0.25))
    noise = numpyro.sample("noise", dist.LogNormal(0, 0.3))
    with numpyro.plate("records", x.shape[0]):
        parts = dist.Normal(jnp.stack([low, low + gap]), noise)
        mixing = dist.Categorical(probs=jnp.stack([1 - share, share]))
        numpyro.sample("y", dist.MixtureSameFamily(mixing, parts), obs=y)


def survival(x, y=None):
    """Weibull times; y has the time, and 1 where it is the end of observation."""
    w = weights(x.shape[1], 0.5)
    shape = numpyro.sample("shape", dist.LogNormal(0, 0.3))
    time, late = (None, False) if y is None else (y[:, 0], y[:, 1] > 0)
    with numpyro.plate("records", x.shape[0]):
        times = dist.RightCensoredDistribution(dist.Weibull(jnp.exp(x @ w), shape), late)
        numpyro.sample("y", times, obs=time)


def intercepts(x, y=None):
    """Of 30 groups, beside the columns; a record's group is made of its last column."""
    w = weights(x.shape[1] - 1)
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    with numpyro.plate("groups", 30):
        effect = numpyro.sample("effect", dist.Normal(0, scale))
    with numpyro.plate("records", x.shape[0]):
        group = jnp.clip(30 * jax.scipy.stats.norm.cdf(x[:, -1] * x.shape[1] ** 0.5 / 2), 0, 29)
        logits = x[:, :-1] @ w + effect[group.astype(int)]
        numpyro.sample("y", dist.Bernoulli(logits=logits), obs=y)


MODELS = {
    f.__name__: f
    for f in (logistic, poisson, linear, categorical, mixture, survival, intercepts)
}  # fmt: skip


def columns(number, dim, correlation, rng):
    covariance = correlation * np.ones((dim, dim)) + (1 - correlation) * np.eye(dim)
    found = rng.normal(size=(number, dim)) @ np.linalg.cholesky(covariance).T
    return jnp.asarray(found * 2 / np.sqrt(dim), jnp.float32)


def unconstrained(model, draws, x):
    """Draws by site -> vectors of unconstrained numbers, sites in alphabetical order."""
    with numpyro.handlers.seed(rng_seed=0), numpyro.handlers.trace() as trace:
        model(x[:2], None)
    parts = []
    for name in sorted(draws):
        transform = dist.biject_to(trace[name]["fn"].support)
        value = np.asarray(transform.inv(jnp.asarray(draws[name])), np.float64)
        parts.append(value.reshape(len(value), -1))
    return np.concatenate(parts, axis=1)


def truth_of(model, x, rng_key):
    """A draw from the prior and records from it."""
    with numpyro.handlers.seed(rng_seed=rng_key), numpyro.handlers.trace() as trace:
        model(x)
    latents = {n: s["value"] for n, s in trace.items() if s["type"] == "sample" and n != "y"}
    y = trace["y"]["value"]
    if model is survival:  # about a third is still observed at the end
        end = 1.5 * jax.random.exponential(jax.random.fold_in(rng_key, 1), y.shape)
        y = jnp.stack([jnp.minimum(y, end), y > end], axis=-1)
    return latents, y


def figures(truth, mean, sd):
    z = np.abs(truth - mean) / sd
    score = np.mean(-0.5 * z**2 - np.log(sd) - 0.5 * np.log(2 * np.pi))
    return {
        "cover 50": np.mean(z < Z50), "cover 90": np.mean(z < Z90), "log score": score,
        "squared error": np.mean((truth - mean) ** 2), "sd": np.mean(sd),
    }  # fmt: skip


def normal_at_the_mode(model, x, y, start):
    """Mean and standard deviations of the normal approximation of the exact posterior."""
    info = initialize_model(jax.random.key(0), model, model_args=(x, y), validate_grad=False)
    zero, unravel = ravel_pytree({n: info.param_info.z[n] for n in sorted(info.param_info.z)})

    def value(flat):
        return info.potential_fn(unravel(flat))

    at, hessian = mode_of(value, jnp.asarray(start, zero.dtype))
    covariance = np.linalg.inv(hessian)
    return np.asarray(at, np.float64), np.sqrt(np.diag(covariance))


def mode_of(value, at):
    """The minimum of a function, by damped Newton steps from a point, and its Hessian there."""
    return newton(jax.jit(jax.grad(value)), jax.jit(jax.hessian(value)), at)


def newton(gradient, hessian, at):
    """As :func:`mode_of`, from the two derivatives."""
    for _ in range(40):
        bend = np.asarray(hessian(at), np.float64)
        bend += max(0.0, 1e-3 - np.linalg.eigvalsh(bend).min()) * np.eye(len(at))
        step = np.linalg.solve(bend, np.asarray(gradient(at), np.float64))
        at = at - jnp.asarray(step * min(1.0, 1 / np.abs(step).max()), at.dtype)
        if np.abs(step).max() < 1e-4:
            break
    return at, np.asarray(hessian(at), np.float64)


def laplace(model, budget, number):
    """A function (rng_key, x, y) -> draws by name of the driver."""
    driver = DPLaplace(model, budget=budget)

    def run(key, x, y):
        return {"DPLaplace": driver.run(key, x, y).sample(jax.random.key(1), 4000)}

    return run


def with_and_without_noise(driver, name, steps):
    """As :func:`laplace`, with and without the noise of privacy in the posterior."""

    def run(key, x, y):
        result = driver.run(key, steps, x, y, progress_bar=False)
        posteriors = {name: result.posterior, f"{name}, plain": result.plain_posterior}
        return {n: each.sample(jax.random.key(1), 4000) for n, each in posteriors.items()}

    return run


def svi(model, budget, number):
    sampler = Poisson(1000 / number) if number > 1000 else FullBatch()
    driver = DPSVI(model, AutoDiagonalNormal(model), optax.adam(5e-3), clip_norm=1.0,
                   sampler=sampler, budget=budget)  # fmt: skip
    return with_and_without_noise(driver, "DPSVI", 2000)


def sep(model, budget, number):
    driver = DPSEP(model, clip_norm=2.0, sampler=FullBatch(), budget=budget)
    return with_and_without_noise(driver, "DPSEP", 20)


def chain(model, budget, number):
    driver = DPMCMC(SGLD(model), num_warmup=1000, num_samples=2000, clip_norm=1.0,
                    sampler=FullBatch(), budget=budget, progress_bar=False)  # fmt: skip

    def run(key, x, y):
        driver.run(key, x, y)
        draws = driver.posterior.sample(jax.random.key(1), 4000)
        return {"DPMCMC": draws, "DPMCMC, plain": driver.get_samples()}

    return run


DRIVERS = {"DPLaplace": laplace, "DPSVI": svi, "DPSEP": sep, "DPMCMC": chain}


def cell(name, dim, number, correlation, epsilons, sets, drivers, exact=True):
    """Rows of one cell: one for each driver and budget, and one without privacy."""
    model, found = MODELS[name], {}
    runs = [(e, DRIVERS[d](model, PrivacyBudget(e, DELTA), number))
            for d in drivers for e in epsilons]  # fmt: skip
    for seed in range(sets):
        rng = np.random.default_rng([seed, dim, number])
        x = columns(number, dim, correlation, rng)
        latents, y = truth_of(model, x, jax.random.key(rng.integers(2**31)))
        truth = unconstrained(model, jax.tree.map(lambda v: v[None], latents), x)[0]
        for epsilon, run in runs:
            start = time.perf_counter()
            for driver, draws in run(jax.random.key(seed), x, y).items():
                flat = unconstrained(model, draws, x)
                row = figures(truth, flat.mean(0), flat.std(0))
                row["seconds"] = time.perf_counter() - start
                found.setdefault((driver, epsilon), []).append(row)
        if exact and model is not intercepts:  # whose mode has a scale of 0
            found.setdefault(("not private", ""), []).append(
                figures(truth, *normal_at_the_mode(model, x, y, truth)))  # fmt: skip
    rows = []
    for (driver, epsilon), each in found.items():
        row = {"model": name, "d": dim, "N": number, "correlation": correlation,
               "driver": driver, "epsilon": epsilon, **average_row(each)}  # fmt: skip
        row["rmse"] = row["squared error"] ** 0.5
        show(row)
        rows.append(row)
    return rows


def show(row):
    cover = [f"{row[f'cover {p}']:.3f} ({row[f'cover {p} se'] or 0:.3f})" for p in (50, 90)]
    print(
        f"{row['model']:12s} d {row['d']:3d} N {row['N']:6d} corr {row['correlation']:.1f} "
        f"{row['driver']:18s} eps {row['epsilon']!s:4s} cover 50 {cover[0]}  cover 90 {cover[1]}  "
        f"log score {row['log score']:.2f}  rmse {row['rmse']:.3f}  sd {row['sd']:.3f}",
        flush=True,
    )


def over_cells(rows):
    """Means over dimensions and correlations, with the least and the largest coverage of a cell."""
    cells = {}
    for row in rows:
        name = tuple(row[key] for key in ("model", "N", "driver", "epsilon"))
        cells.setdefault(name, []).append(row)
    averaged = ("cover 50", "cover 90", "log score", "rmse")
    return [
        dict(zip(("model", "N", "driver", "epsilon"), name, strict=True))
        | {key: float(np.mean([row[key] for row in each])) for key in averaged}
        | {
            "cells": len(each),
            "least": min(row["cover 90"] for row in each),
            "most": max(row["cover 90"] for row in each),
        }
        for name, each in cells.items()
    ]


def middle(values):
    """The middle one of three, or all."""
    return values[1:2] or values


def main():
    warnings.simplefilter("ignore", PosteriorWarning)
    parser = experiment_parser(__doc__, "one cell of each model, 5 sets")
    parser.add_argument("--sets", type=int, default=20, help="data sets in a cell")
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    parser.add_argument("--drivers", nargs="*", default=["DPLaplace", "DPSVI"])
    parser.add_argument("--epsilons", nargs="*", type=float, default=[0.2, 1.0, 3.0])
    parser.add_argument("--dims", nargs="*", type=int, default=[5, 12, 20])
    parser.add_argument("--numbers", nargs="*", type=int, default=[1000, 3000, 30000])
    parser.add_argument("--correlations", nargs="*", type=float, default=[0.0, 0.5, 0.8])
    args = parser.parse_args()
    sets, rows = 5 if args.quick else args.sets, []
    for name in args.models:
        grid = name == "logistic" and not args.quick
        for dim in args.dims if grid else middle(args.dims):
            for number in args.numbers if grid else middle(args.numbers):
                for correlation in args.correlations if grid else middle(args.correlations):
                    rows += cell(name, dim, number, correlation, args.epsilons, sets, args.drivers)
                jax.clear_caches()
                save(args, rows=rows, over_cells=over_cells(rows))  # what has been found so far


if __name__ == "__main__":
    main()
