"""Are bad fits warned of, and good ones not? Twelve of each, beside NUTS on the same records.

"distance" is the root mean square distance of the private mean from that of NUTS in standard
deviations of the private posterior, so about 1 or less is honest. "width" is the geometric mean of
the ratios of standard deviations, private over NUTS. Both are of unconstrained latents. "warned" is
what a user is told: the names of the findings that are bad.

    python benchmarks/believe/zoo.py --json zoo.json
"""

import functools
import pathlib
import sys
import warnings

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from common import experiment_parser, save
from coverage import DELTA, columns, linear, logistic, poisson, unconstrained
from numpyro.infer import MCMC, NUTS
from numpyro.infer.autoguide import AutoDiagonalNormal
from real import split

from numpyro_dp import DPMCMC, DPSEP, DPSVI, SGLD, DPLaplace, PrivacyBudget
from numpyro_dp.estimators import aligned
from numpyro_dp.posterior import PosteriorWarning
from numpyro_dp.samplers import FullBatch, Poisson

RNG = np.random.default_rng(0)


def known_noise(x, y=None):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([x.shape[1]]).to_event(1))
    with numpyro.plate("records", x.shape[0]):
        numpyro.sample("y", dist.Normal(x @ w, 1.0), obs=y)


def groups(x, y=None, number=20):
    """The first column has the group."""
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    with numpyro.plate("groups", number):
        effect = numpyro.sample("effect", dist.Normal(0, scale))
    with numpyro.plate("records", x.shape[0]):
        group = x[:, 0].astype(int)
        numpyro.sample("y", dist.Bernoulli(logits=effect[group] + x[:, 1]), obs=y)


def data(model, x, seed=0):
    """The columns, and outcomes of the model at a draw from its prior."""
    with numpyro.handlers.seed(rng_seed=seed), numpyro.handlers.trace() as trace:
        model(x)
    return model, x, trace["y"]["value"]


def plain(model, number=5000, dim=5, correlation=0.0):
    return data(model, columns(number, dim, correlation, np.random.default_rng(1)))


def grouped(number, size):
    x = np.column_stack([np.arange(number * size) % number, RNG.normal(size=number * size)])
    model = functools.partial(groups, number=number)
    return data(model, jnp.asarray(x, jnp.float32))


def separable():
    x = columns(1000, 3, 0.0, np.random.default_rng(1))
    return logistic, x, (x[:, 0] > 0).astype(int)


def overdispersed():
    model, x, _ = plain(poisson)
    w = np.array([0.5, -0.5, 0.2, 0.0, 0.3])
    rate = np.exp(np.asarray(x) @ w) * RNG.gamma(0.3, 1 / 0.3, size=len(x))
    return model, x, jnp.asarray(RNG.poisson(rate))


def heavy_tails():
    model, x, _ = plain(known_noise)
    y = np.asarray(x) @ np.array([0.5, -0.5, 0.2, 0.0, 0.3]) + RNG.standard_cauchy(len(x))
    return model, x, jnp.asarray(y, jnp.float32)


def scaled(factor):
    model, x, y = plain(logistic)
    return model, factor * x, y


def rand_hie():
    model, train, _ = split("rand_hie")
    return model, *train


def by_laplace(model, x, y, epsilon=1.0):
    return DPLaplace(model, budget=PrivacyBudget(epsilon, DELTA)).run(jax.random.key(0), x, y)


def by_svi(model, x, y, epsilon=1.0, rate=5e-3, steps=2000, **settings):
    sampler = Poisson(1000 / len(x)) if len(x) > 1000 else FullBatch()
    settings = {"clip_norm": 1.0, "sampler": sampler} | settings
    svi = DPSVI(model, AutoDiagonalNormal(model), optax.adam(rate),
                budget=PrivacyBudget(epsilon, DELTA), **settings)  # fmt: skip
    return svi.run(jax.random.key(0), steps, x, y, progress_bar=False).posterior


def by_message_passing(model, x, y, epsilon=1.0, steps=20):
    sep = DPSEP(model, clip_norm=2.0, sampler=FullBatch(), budget=PrivacyBudget(epsilon, DELTA))
    return sep.run(jax.random.key(0), steps, x, y, progress_bar=False).posterior


def by_chain(model, x, y, epsilon=1.0, samples=2000):
    mcmc = DPMCMC(SGLD(model), num_warmup=samples // 2, num_samples=samples, clip_norm=1.0,
                  sampler=FullBatch(), budget=PrivacyBudget(epsilon, DELTA),
                  progress_bar=False)  # fmt: skip
    mcmc.run(jax.random.key(0), x, y)
    return mcmc.posterior


GOOD = {
    "logistic": (lambda: plain(logistic), by_laplace, {}),
    "logistic, SVI": (lambda: plain(logistic), by_svi, {}),
    "logistic, message passing": (lambda: plain(logistic), by_message_passing, {}),
    "logistic, chain": (lambda: plain(logistic, dim=3), by_chain, {"epsilon": 3.0}),
    "Poisson": (lambda: plain(poisson), by_laplace, {}),
    "Poisson, SVI": (lambda: plain(poisson), by_svi, {"epsilon": 3.0}),
    "linear, unknown noise": (lambda: plain(linear), by_laplace, {}),
    "linear, message passing": (lambda: plain(known_noise), by_message_passing, {}),
    "correlated, SVI": (lambda: plain(logistic, correlation=0.5), by_svi, {"epsilon": 3.0}),
    "20 groups": (lambda: grouped(20, 1000), by_laplace, {"epsilon": 3.0}),
    "RAND HIE": (rand_hie, by_laplace, {}),
    "RAND HIE, message passing": (rand_hie, by_message_passing, {"epsilon": 3.0}),
}
BAD = {
    "clip norm too small": (
        lambda: plain(logistic), by_svi, {"clip_norm": 0.01, "estimator": aligned()}
    ),
    "steps too large": (lambda: plain(logistic), by_svi, {"rate": 10.0}),
    "too few steps": (lambda: plain(logistic), by_svi, {"steps": 20}),
    "too many steps": (lambda: plain(logistic), by_chain, {"epsilon": 0.3, "samples": 20_000}),
    "separable": (separable, by_laplace, {"epsilon": 3.0}),
    "misspecified": (overdispersed, by_laplace, {}),
    "40 records": (lambda: plain(logistic, number=40), by_laplace, {}),
    "epsilon 0.005": (lambda: plain(logistic), by_message_passing, {"epsilon": 0.005}),
    "heavy tails": (heavy_tails, by_laplace, {}),
    "correlated columns": (lambda: plain(logistic, dim=10, correlation=0.999), by_svi, {}),
    "groups of 4": (lambda: grouped(50, 4), by_laplace, {}),
    "columns times 1000": (lambda: scaled(1000.0), by_svi, {}),
}  # fmt: skip


def by_nuts(model, x, y):
    mcmc = MCMC(NUTS(model), num_warmup=500, num_samples=1000, progress_bar=False)
    mcmc.run(jax.random.key(0), x, y)
    return unconstrained(model, mcmc.get_samples(), x)


def look(kind, name, fit):
    """One row: what a user sees, and NUTS beside it."""
    make, driver, settings = fit
    model, x, y = make()
    posterior = driver(model, x, y, **settings)
    found = unconstrained(model, posterior.sample(jax.random.key(1), 2000), x)
    exact = by_nuts(model, x, y)
    off, sd = found.mean(0) - exact.mean(0), found.std(0)
    bad = [finding.name for finding in posterior.diagnose().bad]
    row = {
        "kind": kind, "fit": name, "distance": float(np.sqrt(np.mean((off / sd) ** 2))),
        "width": float(np.exp(np.mean(np.log(sd / exact.std(0))))), "warned": bad,
        "print": str(posterior).splitlines()[-1],
    }  # fmt: skip
    print(f"{kind:5s}{name:28s}distance {row['distance']:5.2f}  width {row['width']:8.2f}  "
          f"{', '.join(bad) or '-':24s} | {row['print']}", flush=True)  # fmt: skip
    return row


def main():
    args = experiment_parser(__doc__, "three fits of each kind").parse_args()
    warnings.simplefilter("ignore", PosteriorWarning)
    rows = []
    for kind, fits in (("good", GOOD), ("bad", BAD)):
        for name, fit in list(fits.items())[: 3 if args.quick else None]:
            rows.append(look(kind, name, fit))
            jax.clear_caches()
    for kind in ("good", "bad"):
        each = [bool(row["warned"]) for row in rows if row["kind"] == kind]
        print(f"{sum(each)} of {len(each)} {kind} fits are warned of.")
    save(args, rows=rows)


if __name__ == "__main__":
    main()
