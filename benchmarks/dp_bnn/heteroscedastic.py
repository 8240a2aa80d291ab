"""Heteroscedastic regression by DP-SGLD, DP Bayes by backprop and DP MC dropout.

Figure 4 and Table 3 of Zhang et al. (2021): 250 records, full batches, 200 steps, epsilon = 4.21,
delta = 1/250. The paper does not print its data; here y is a draw of a Gaussian process (squared
exponential, length 1, variance 1) at uniform x in [-1.9, 1.9], plus normal noise of standard
deviation 0.3 (x + 2), of mean square 0.47. Errors are those of the predictive mean at 250 further
records of the same function. A network of 50 tanh units has mean and log sd for outputs. Settings
are chosen on three draws of their own; the reported ones are 20 others. Secret keys are the seeds.

    python benchmarks/dp_bnn/heteroscedastic.py --json het.json --figure docs/heteroscedastic.png
"""

import functools
import itertools
import math
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from numpyro.infer import Predictive
from numpyro.infer.autoguide import AutoDelta, AutoDiagonalNormal
from numpyro.infer.initialization import init_to_sample

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from common import average_row, experiment_parser, panels, save

from numpyro_dp import DPMCMC, DPSVI, SGLD, Privacy, PrivacyBudget, secret_key
from numpyro_dp.estimators import aligned
from numpyro_dp.posterior import posterior_samples
from numpyro_dp.samplers import FullBatch

NUMBER, HIDDEN, STEPS, DRAWS = 250, 50, 200, 200
FREE_STEPS = 4000  # of a chain without privacy: nothing there pays for steps
BUDGET = PrivacyBudget(4.21, 1 / NUMBER)


def data(seed):
    """Training and test records of one function."""
    rng = np.random.default_rng(seed)
    x = rng.uniform(-1.9, 1.9, 2 * NUMBER)
    covariance = np.exp(-((x[:, None] - x) ** 2) / 2) + 1e-8 * np.eye(2 * NUMBER)
    f = np.linalg.cholesky(covariance) @ rng.normal(size=2 * NUMBER)
    y = f + 0.3 * (x + 2) * rng.normal(size=2 * NUMBER)
    rows = np.stack([x, y], 1).astype(np.float32)
    return rows[:NUMBER], rows[NUMBER:]


def model(records, dropout=0.0):
    """Mean and log sd of y by a network of x."""
    x, number = records[:, :1], records.shape[0]

    def weights(name, *shape, scale=1.0):
        prior = dist.Normal(0, scale).expand(shape)
        return numpyro.sample(name, prior.to_event(len(shape)))

    first, bias = weights("first", 1, HIDDEN), weights("bias", HIDDEN)
    last, level = weights("last", HIDDEN, 2, scale=2 / math.sqrt(HIDDEN)), weights("level", 2)
    with numpyro.plate("records", number):
        units = jnp.tanh(2 * x @ first + 2 * bias)
        if dropout:
            keep = jax.random.bernoulli(numpyro.prng_key(), 1 - dropout, units.shape)
            units = units * keep / (1 - dropout)
        out = units @ last + level
        mean = numpyro.deterministic("mean", out[:, 0])
        sd = numpyro.deterministic("sd", jax.nn.softplus(out[:, 1]) + 0.05)
        numpyro.sample("y", dist.Normal(mean, sd), obs=records[:, 1])


def sgld(setting, private):
    """A chain, the later half of its positions kept."""
    clip_norm, step_size, temperature = setting
    budget, noise = (BUDGET, None) if private else (None, 0.0)
    steps = STEPS if private else FREE_STEPS

    def fit(seed, train):
        mcmc = DPMCMC(
            SGLD(model, step_size, temperature, init_strategy=init_to_sample),
            num_warmup=steps // 2, num_samples=steps // 2, thinning=steps // STEPS,
            clip_norm=clip_norm, sampler=FullBatch(), progress_bar=False, budget=budget,
            privacy=Privacy(noise_multiplier=noise, secret_key=secret_key(seed), repetition=True),
        )  # fmt: skip
        mcmc.run(jax.random.key(seed), train)
        return mcmc.get_samples(), {}

    return fit


@functools.cache  # one driver, and one compilation, for all draws of the data
def variational(guide_type, dropout, setting, private):
    """Bayes by backprop, or weights at a point with dropout."""
    clip_norm, size = setting
    budget, noise = (BUDGET, None) if private else (None, 0.0)
    scale = {} if guide_type is AutoDelta else {"init_scale": 0.05}
    guide = guide_type(model, init_loc_fn=init_to_sample, **scale)
    svi = DPSVI(
        model, guide, optax.adam(optax.cosine_decay_schedule(size, STEPS)), estimator=aligned(),
        clip_norm=clip_norm, sampler=FullBatch(), dropout=dropout, budget=budget,
        privacy=Privacy(noise_multiplier=noise),
    )  # fmt: skip

    def fit(seed, train):
        svi.settings = svi.settings.changed(secret_key=secret_key(seed), repetition=True)
        result = svi.run(jax.random.key(seed), STEPS, train, progress_bar=False)
        draws = posterior_samples(jax.random.key(1), guide, result.params, DRAWS)
        return draws, {"dropout": dropout}

    return fit


CLIPS, SIZES = (5.0, 10.0, 20.0), (0.03, 0.1)
PRIVATE, FREE = list(itertools.product(CLIPS, SIZES)), [(math.inf, size) for size in SIZES]
METHODS = {  # how, and the settings with and without privacy
    "SGLD": (sgld, {
        True: list(itertools.product(CLIPS, (None,), (0.5, 1.0))),
        False: [(50.0, size, 1.0) for size in (3e-5, 1e-4)],  # unclipped chains can diverge
    }),
    "BBP": (functools.partial(variational, AutoDiagonalNormal, 0.0), {True: PRIVATE, False: FREE}),
    "MC dropout": (functools.partial(variational, AutoDelta, 0.1), {True: PRIVATE, False: FREE}),
}  # fmt: skip


def predictions(draws, options, records):
    """Mean and sd of y for each record under each draw."""
    predictive = Predictive(model, draws, return_sites=["mean", "sd"])
    found = predictive(jax.random.key(2), records, **options)
    return {name: np.asarray(value, np.float64) for name, value in found.items()}


def scores(method, setting, private, seed, split):
    train, test = split
    found = predictions(*METHODS[method][0](setting, private)(seed, train), test)
    mean, sd = found["mean"], found["sd"]
    noise = np.random.default_rng(0).normal(size=mean.shape)
    low, high = np.quantile(mean + sd * noise, [0.05, 0.95], axis=0)
    return {
        "mse": np.mean((mean.mean(0) - test[:, 1]) ** 2),
        "coverage": np.mean((low < test[:, 1]) & (test[:, 1] < high)),
        "epistemic sd": np.sqrt(mean.var(axis=0).mean()),
        "aleatoric sd": np.sqrt(np.mean(sd**2)),
    }


def chosen(method, private, tuning):
    """The setting with the least mean square error over draws that are not reported."""
    settings = METHODS[method][1][private]

    def error(setting):
        each = [scores(method, setting, private, s, split)["mse"] for s, split in enumerate(tuning)]
        return np.median(np.nan_to_num(each, nan=np.inf))

    return min(settings, key=error)


def main():
    args = experiment_parser(__doc__, "one draw to choose by, two to report").parse_args()
    tuning = [data(1000 + seed) for seed in range(1 if args.quick else 3)]
    reported = [data(seed) for seed in range(2 if args.quick else 20)]
    rows, picks = [], {}
    for method in METHODS:
        for private in (True, False):
            setting = picks[method, private] = chosen(method, private, tuning)
            found = [scores(method, setting, private, s, split) for s, split in enumerate(reported)]
            row = {"method": ("DP-" if private else "") + method, "setting": setting}
            row |= {"median mse": float(np.median([each["mse"] for each in found]))}
            rows.append(row | average_row(found))
            print({k: round(v, 4) if isinstance(v, float) else v for k, v in rows[-1].items()},
                  flush=True)  # fmt: skip
    save(args, rows=rows)
    if args.figure:
        draw(args.figure, picks, reported[0])


def draw(path, picks, split):
    train, _ = split
    x = np.linspace(-1.9, 1.9, 100, dtype=np.float32)
    with panels(path, len(METHODS), 2, (12, 6), sharex=True, sharey=True) as axes:
        for column, (method, (build, _)) in enumerate(METHODS.items()):
            for row, private in enumerate((False, True)):
                axis = axes[row][column]
                draws = build(picks[method, private], private)(0, train)
                found = predictions(*draws, np.stack([x, x], 1))
                axis.plot(*train.T, ".", color="grey", markersize=3)
                whole = found["mean"] + found["sd"] * np.random.default_rng(0).normal(
                    size=found["mean"].shape
                )
                for each in (whole, found["mean"]):
                    low, high = np.quantile(each, [0.05, 0.95], axis=0)
                    axis.fill_between(x, low, high, color="C0", alpha=0.25, linewidth=0)
                axis.plot(x, found["mean"].mean(axis=0), color="C0")
                axis.set(title=("DP-" if private else "") + method, ylim=(-4, 4))
        for axis in axes[1]:
            axis.set_xlabel("x")
        for axis in axes[:, 0]:
            axis.set_ylabel("y")


if __name__ == "__main__":
    main()
