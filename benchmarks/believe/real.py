"""Real outcomes: how far are private posteriors from NUTS without privacy?

Regressions of real sets: logistic, and a negative binomial for the number of visits. "distance" is
the root mean square error of the private mean in standard deviations of NUTS's draws, "width" the
geometric mean of the ratios of standard deviations, both of unconstrained latents. "joint" is the
distance in the metric of the Hessian of the negative log posterior at NUTS's mean. The held-out
log-likelihood is a mean over a fifth of the records, by draws of the posterior; the base rate's is
that of a model without columns. Drivers other than DPLaplace have the settings that DRIVERS shows.

    python benchmarks/believe/real.py --json real.json

RAND HIE comes with statsmodels. The others are read from the folder that NUMPYRO_DP_DATA names.
"""

import functools
import itertools
import pathlib
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from common import average_row, experiment_parser, logistic_model, save
from coverage import unconstrained
from datasets import (
    DatasetNotFoundError,
    load_adult,
    load_contraception,
    load_doctor_visits,
    load_rwm5yr,
)
from jax.flatten_util import ravel_pytree
from jax.scipy.special import logsumexp
from numpyro.infer import MCMC, NUTS, init_to_value, log_likelihood
from numpyro.infer.autoguide import AutoDiagonalNormal
from numpyro.infer.util import initialize_model, potential_energy

from numpyro_dp import (
    DPMCMC,
    DPSEP,
    DPSVI,
    SGLD,
    DPLaplace,
    Privacy,
    PrivacyBudget,
    UnsupportedModelError,
)
from numpyro_dp.samplers import FullBatch, Poisson

DRAWS = 1000


def visits_model(features, label):
    weights = numpyro.sample("w", dist.Normal(0, 1).expand([features.shape[1]]).to_event(1))
    concentration = numpyro.sample("concentration", dist.LogNormal(0, 1))
    with numpyro.plate("records", features.shape[0]):
        mean = jnp.exp(features @ weights)
        numpyro.sample("label", dist.NegativeBinomial2(mean, concentration), obs=label)


def with_intercept(data, scales, start=()):
    """Columns less public constants and over others, by name, after an intercept."""
    scale = np.array([scales.get(name, 1) for name in data.feature_names])
    zero = np.array([dict(start).get(name, 0) for name in data.feature_names])
    return np.column_stack([np.ones(len(data.y)), (np.asarray(data.X, float) - zero) / scale])


def rand_hie():
    from statsmodels.datasets import randhie

    data = randhie.load_pandas().data
    columns = data.drop(columns="mdvis").to_numpy(float) / [2, 1, 2, 3, 1, 10, 1, 1, 1]
    return np.column_stack([np.ones(len(data)), columns]), data["mdvis"].to_numpy()


def adult():
    data = load_adult()
    x, y = np.concatenate([data.X_train, data.X_test]), np.concatenate([data.y_train, data.y_test])
    return x.astype(float), y > 0


def doctor_visits():
    data = load_doctor_visits()
    return with_intercept(data, {"illness": 5, "health": 12}), data.y  # by the survey's questions


def contraception():
    data = load_contraception()
    return with_intercept(data, {"age": 10}), data.y


def rwm5yr():
    data = load_rwm5yr()
    scales = {"year": 2, "age": 50, "hhninc": 5, "educ": 10}
    return with_intercept(data, scales, {"year": 1986}), data.y


SETS = {
    "rand_hie": (rand_hie, logistic_model),
    "doctor_visits": (doctor_visits, logistic_model),
    "contraception": (contraception, logistic_model),
    "rwm5yr": (rwm5yr, logistic_model),
    "adult": (adult, logistic_model),
    "adult, own split": (adult, logistic_model),
    "rand_hie, number": (rand_hie, visits_model),
    "rwm5yr, number": (rwm5yr, visits_model),
}


def sampler(number):
    return Poisson(1000 / number) if number > 1000 else FullBatch()


def by_laplace(model, key, data, number, **own):
    return DPLaplace(model, **own).run(key, *data[0], **data[1]).sample(jax.random.key(1), DRAWS)


def by_svi(model, key, data, number, **own):
    guide = AutoDiagonalNormal(model)
    svi = DPSVI(model, guide, optax.adam(5e-3), clip_norm=1.0, sampler=sampler(number), **own)
    result = svi.run(key, 2000, *data[0], progress_bar=False, **data[1])
    return result.posterior.sample(jax.random.key(1), DRAWS)


def by_message_passing(model, key, data, number, **own):
    sep = DPSEP(model, clip_norm=2.0, sampler=FullBatch(), **own)
    result = sep.run(key, 20, *data[0], progress_bar=False, **data[1])
    return result.posterior.sample(jax.random.key(1), DRAWS)


def by_sampling(model, key, data, number, **own):
    mcmc = DPMCMC(SGLD(model), num_warmup=500, num_samples=DRAWS, clip_norm=1.0,
                  sampler=sampler(number), progress_bar=False, **own)  # fmt: skip
    mcmc.run(key, *data[0], **data[1])
    return mcmc.posterior.sample(jax.random.key(1), DRAWS)


DRIVERS = {
    "DPLaplace": by_laplace, "DPSVI": by_svi, "DPSEP": by_message_passing, "DPMCMC": by_sampling,
}  # fmt: skip


def optimum(model, x, y, steps=3000):
    """A start for NUTS: the mode, roughly."""
    from numpyro.infer import SVI, Trace_ELBO
    from numpyro.infer.autoguide import AutoDelta

    guide = AutoDelta(model)
    svi = SVI(model, guide, optax.adam(1e-2), Trace_ELBO())
    found = svi.run(jax.random.key(0), steps, x, y, progress_bar=False)
    return guide.median(found.params)


def by_nuts(model, x, y):
    kernel = NUTS(model, init_strategy=init_to_value(values=optimum(model, x, y)))
    mcmc = MCMC(kernel, num_warmup=500, num_samples=DRAWS, progress_bar=False)
    mcmc.run(jax.random.key(0), x, y)
    return mcmc.get_samples()


def hessian(model, flat, x, y):
    """Hessian of the negative log posterior at unconstrained latents, sites in alphabetical order.

    The inverse covariance of a thousand correlated draws would be too large.
    """
    sites = initialize_model(jax.random.key(0), model, model_args=(x, y)).param_info.z
    _, unravel = ravel_pytree(sites)
    found = jax.hessian(lambda z: potential_energy(model, (x, y), {}, unravel(z)))
    return np.asarray(found(jnp.asarray(flat, jnp.float32)), np.float64)


@functools.partial(jax.jit, static_argnums=0)
def held_out(model, draws, x, y):
    """Mean log predictive density over draws."""
    each = log_likelihood(model, draws, x, y, parallel=False)["label"]
    return jnp.mean(logsumexp(each, axis=0) - jnp.log(len(each)))


def base_rate(y_train, y_test):
    """Held-out log-likelihood of the empirical distribution, smoothed by one count."""
    counts = np.bincount(y_train, minlength=y_test.max() + 1) + 1.0
    return float(np.mean(np.log(counts / counts.sum())[y_test]))


def persons(name):
    """The person of each row, in sets where persons have several rows."""
    if name == "rwm5yr":
        return load_rwm5yr().group
    from statsmodels.datasets import randhie

    source = pathlib.Path(randhie.__file__).parent / "src" / "randhie.csv"
    return np.genfromtxt(source, delimiter=",", names=True, usecols="zper").astype(int)


def split(name):
    """Model, training part and test part of a set; a fifth is held out."""
    load, model = SETS[name]
    x, y = load()
    y = np.asarray(y).astype(int) if model is visits_model else (np.asarray(y) > 0).astype(int)
    parts = parts_of(name, len(y))
    return model, *((jnp.asarray(x[p], jnp.float32), jnp.asarray(y[p], jnp.int32)) for p in parts)


def parts_of(name, number):
    """Rows of the training part and of the test part."""
    if name == "adult, own split":
        cut = len(load_adult().y_train)
        return np.arange(cut), np.arange(cut, number)
    order = np.random.default_rng(0).permutation(number)
    return order[number // 5 :], order[: number // 5]


def compare(name, epsilons, seeds, drivers, by_person=False):
    """Rows of one set: NUTS, and each driver at each budget."""
    model, train, test = split(name)
    units = [("row", {}, {}, len(train[1]))]
    if by_person:
        ids = persons(name)
        ids = ids[parts_of(name, len(ids))[0]]
        number, most = len(np.unique(ids)), int(np.unique(ids, return_counts=True)[1].max())
        units.append(
            ("person", {"unit": ids}, {"privacy": Privacy(max_rows_per_unit=most)}, number)
        )
    start = time.perf_counter()
    exact = by_nuts(model, *train)
    flat = unconstrained(model, {n: np.asarray(v) for n, v in exact.items()}, train[0])
    mean, sd = flat.mean(0), flat.std(0)
    precision = hessian(model, mean, *train)
    known = {"set": name, "N": len(train[1]), "d": len(mean)}
    base = base_rate(np.asarray(train[1]), np.asarray(test[1]))
    rows = [known | {
        "driver": "NUTS", "epsilon": "not private", "base rate": base,
        "held out": float(held_out(model, exact, *test)), "seconds": time.perf_counter() - start,
    }]  # fmt: skip
    print(rows[-1], flush=True)
    for driver in drivers:
        for epsilon, (unit, further, own, number) in itertools.product(epsilons, units):
            found = []
            for seed in range(seeds):
                start = time.perf_counter()
                try:
                    budget = PrivacyBudget(epsilon, 1e-5)
                    key, data = jax.random.key(seed), (train, further)
                    draws = DRIVERS[driver](model, key, data, number, budget=budget, **own)
                except UnsupportedModelError as error:
                    print(f"{name}, {driver}: {error}", flush=True)
                    break
                seconds = time.perf_counter() - start
                w = unconstrained(model, {n: np.asarray(v) for n, v in draws.items()}, train[0])
                off = w.mean(0) - mean
                found.append({
                    "joint": float(np.sqrt(off @ precision @ off)),
                    "distance": float(np.sqrt(np.mean((off / sd) ** 2))),
                    "width": float(np.exp(np.mean(np.log(w.std(0) / sd)))),
                    "held out": float(held_out(model, draws, *test)),
                    "seconds": seconds,
                })  # fmt: skip
            if found:
                row = known | {"driver": driver, "epsilon": epsilon, "unit": unit}
                row |= average_row(found)
                row["worst distance"] = max(each["distance"] for each in found)
                rows.append(row)
                shown = {k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}
                print(shown, flush=True)
    return rows


def main():
    parser = experiment_parser(__doc__, "RAND HIE alone, DPLaplace, 2 seeds")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--sets", nargs="*", default=list(SETS))
    parser.add_argument("--drivers", nargs="*", default=list(DRIVERS))
    parser.add_argument("--by-person", action="store_true", help="persons as records, too")
    parser.add_argument("--epsilons", nargs="*", type=float, default=[0.3, 1.0, 3.0, 10.0])
    args = parser.parse_args()
    seeds, sets, drivers = args.seeds, args.sets, args.drivers
    if args.quick:
        seeds, sets, drivers = 2, args.sets[:1], args.drivers[:1]
    rows = []
    for name in sets:
        try:
            rows += compare(name, args.epsilons, seeds, drivers, args.by_person)
        except DatasetNotFoundError as error:
            print(f"{name}: left out, {error}")
        jax.clear_caches()
    save(args, rows=rows)


if __name__ == "__main__":
    main()
