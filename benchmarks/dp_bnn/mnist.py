"""MNIST with an MLP, a CNN and a linear layer on scattering features, private and not.

SGLD, Bayes by backprop, MC dropout and a point estimate: Tables 1, 2 and 4 and Figures 3 and 7 of
Zhang et al. (2021), accuracy and calibration, with a normal prior, a Laplace prior and none.
epsilon = 1.19 (3 for the linear layer), delta = 1e-5, add or remove one image, by the smaller of
what PLD and PRV bound; that is for the weights and for the temperatures that are learnt from the
training images after them (columns "tempered"), which have what 97 % of epsilon leaves. Settings
were chosen by the log score of the last 10,000 training images (a choice in no budget); reported
are the 10,000 test images after training on all 60,000. Pixels are scaled by constants in common
use, which are those of these very images. Secret keys are made from the seeds. The temperature of
SGLD is part of its setting.

    NUMPYRO_DP_DATA=... python benchmarks/dp_bnn/mnist.py --json mnist.json
"""

import functools
import itertools
import pathlib
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from numpyro.infer import Predictive
from numpyro.infer.autoguide import AutoDelta, AutoDiagonalNormal
from numpyro.infer.initialization import init_to_sample, init_to_uniform

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from common import average_row, experiment_parser, save
from datasets import load_mnist
from evaluate import (
    accuracy,
    brier_score,
    calibration_error,
    log_score,
)
from images import CNN, MLP, linear_model, model_of
from scattering import scattering
from tempering import tempered, tempering_guide, tempering_model

from numpyro_dp import DPMCMC, DPSVI, SGLD, Privacy, PrivacyBudget, secret_key
from numpyro_dp.estimators import aligned, vanilla
from numpyro_dp.posterior import posterior_samples
from numpyro_dp.samplers import FullBatch, Poisson

EPSILON, DELTA = {"MLP": 1.19, "CNN": 1.19, "linear": 3.0}, 1e-5
SHARE = 0.97  # of epsilon, for the weights
LENGTH = {"MLP": (10, 1024), "CNN": (10, 1024), "linear": (30, 4096)}  # epochs, images in a batch
DRAWS, HELD = 30, 10_000
MODULES = {"MLP": MLP, "CNN": CNN}


class Case(NamedTuple):
    """A network with its prior, and how long it is trained under which budget, if any."""

    network: str
    model: Callable[..., None]
    epochs: int
    batch: int
    budget: PrivacyBudget | None

    def steps(self, number):
        return self.epochs * number // self.batch

    def options(self, seed, number):
        budget, noise = self.budget, 0.0
        if budget is not None:
            budget, noise = PrivacyBudget(SHARE * budget.epsilon, budget.delta), None
        privacy = Privacy(noise_multiplier=noise, secret_key=secret_key(seed), repetition=True)
        return {"budget": budget, "sampler": Poisson(self.batch / number), "privacy": privacy}


@functools.cache
def load(network):
    """Training and test images (or their features), scaled; labels."""
    data = load_mnist()

    def scaled(images):
        images = ((images.reshape(len(images), -1) / 255 - 0.1307) / 0.3081).astype(np.float32)
        return scattering(images) if network == "linear" else images

    return (scaled(data.X_train), data.y_train), (scaled(data.X_test), data.y_test)


def langevin(case, setting, seed, train):
    """Weights of the last third of a chain."""
    clip_norm, temperature, size = setting
    steps = case.steps(len(train[0]))
    apart = max(1, steps // 3 // DRAWS)
    kept = apart * min(DRAWS, steps // 3)
    mcmc = DPMCMC(
        SGLD(case.model, size and size / len(train[0]), temperature, init_strategy=init_to_sample),
        num_warmup=steps - kept, num_samples=kept, thinning=apart, clip_norm=clip_norm,
        progress_bar=False, **case.options(seed, len(train[0])),
    )  # fmt: skip
    mcmc.run(jax.random.key(seed), *train)
    return mcmc.get_samples(), mcmc.privacy


def variational(guide_type, draws):
    """Bayes by backprop with a normal guide; a point estimate, or MC dropout, with AutoDelta."""

    def fit(case, setting, seed, train):
        (clip_norm, size), model = setting, case.model
        steps = case.steps(len(train[0]))
        scale = {} if guide_type is AutoDelta else {"init_scale": 0.01}
        start = init_to_uniform(radius=0) if case.network == "linear" else init_to_sample
        guide = guide_type(model, init_loc_fn=start, **scale)
        schedule = optax.cosine_decay_schedule(size / len(train[0]), steps)
        svi = DPSVI(
            model, guide, optax.sgd(schedule, momentum=0.9), estimator=aligned(),
            clip_norm=clip_norm, **case.options(seed, len(train[0])),
        )  # fmt: skip
        result = svi.run(jax.random.key(seed), steps, *train, progress_bar=False)
        return posterior_samples(jax.random.key(1), guide, result.params, draws), result.privacy

    return fit


FITS = {  # how, dropout
    "SGLD": (langevin, 0.0),
    "BBP": (variational(AutoDiagonalNormal, DRAWS), 0.0),
    "MC dropout": (variational(AutoDelta, DRAWS), 0.1),
    "SGD": (variational(AutoDelta, 1), 0.0),
}


def predict(model, draws, images):
    """Probabilities of shape (draws, images, classes), some images at a time."""

    @jax.jit
    def part(images):
        site = "log_probabilities"
        found = Predictive(model, draws, return_sites=[site], batch_ndims=1)
        return found(jax.random.key(2), images)[site]

    parts = [part(images[at : at + 1000]) for at in range(0, len(images), 1000)]
    return np.exp(np.concatenate([np.asarray(each, np.float64) for each in parts], axis=1))


def recalibrated(case, privacy, draws, train, probabilities, seed):
    """Probabilities after tempering on the training images, with what is left of the budget."""
    seen = jnp.asarray(np.log(predict(case.model, draws, train[0]).mean(0) + 1e-30), jnp.float32)
    svi = DPSVI(
        tempering_model, tempering_guide, optax.adam(optax.cosine_decay_schedule(0.3, 40), b1=0.5),
        estimator=vanilla(), clip_norm=1.0, sampler=FullBatch(),
        budget=case.budget.after(privacy),
        privacy=Privacy(secret_key=secret_key(1000 + seed), repetition=True),
    )  # fmt: skip
    result = svi.run(jax.random.key(seed), 40, seen, jnp.asarray(train[1]), progress_bar=False)
    log_mean = jnp.log(jnp.asarray(probabilities.mean(0) + 1e-30))
    found = np.exp(np.asarray(tempered(log_mean, result.params["coefficients"]), np.float64))
    return found[None], result.privacy


def scores(probabilities, labels, after=""):
    top = probabilities.mean(0)
    ece, mce = calibration_error(top.max(1), top.argmax(1) == labels)
    found = {
        "accuracy": accuracy(probabilities, labels), "log score": log_score(probabilities, labels),
        "Brier": brier_score(probabilities, labels), "ECE": ece, "MCE": mce,
    }  # fmt: skip
    return {name + after: value for name, value in found.items()}


# Settings: (clip norm, temperature, step size times N or None for that of the noise) of SGLD,
# (clip norm, largest step size times N) of the others.
PRIVATE = {
    "SGLD": [(2.0, 0.3, None), (4.0, 0.05, None)],
    "BBP": [(c, 0.3) for c in (2.0, 4.0)],
    "MC dropout": [(1.0, size) for size in (0.2, 0.4)],
    "SGD": [(1.0, size) for size in (0.2, 0.4)],
}
PLAIN = {
    "SGLD": [(float("inf"), t, 0.1) for t in (0.05, 0.3)],
    "BBP": [(float("inf"), size) for size in (0.03, 0.1)],
    "MC dropout": [(float("inf"), size) for size in (0.1, 0.3)],
    "SGD": [(float("inf"), size) for size in (0.1, 0.3)],
}
LINEAR = {"BBP": [(2.0, size) for size in (0.4, 0.8)]}  # with and without privacy


def chosen(name, case, settings, train):
    """The setting with the best log score of the last training images."""
    part, valid = [a[:-HELD] for a in train], [a[-HELD:] for a in train]

    def score(setting):
        draws, _ = FITS[name][0](case, setting, 100, part)
        found = log_score(predict(case.model, draws, valid[0]), valid[1])
        print(f"  {name} {setting}: {found:.4f}", flush=True)
        return found if np.isfinite(found) else -np.inf

    return settings[0] if len(settings) == 1 else max(settings, key=score)


def cases(args):
    """(name of the method, its settings, prior, case), of all that is asked for."""
    for network in args.networks:
        epochs, batch = LENGTH[network]
        linear = network == "linear"
        methods = {"BBP"} & set(args.methods) if linear else args.methods
        for name, prior, kind in itertools.product(methods, args.priors, args.kinds):
            if linear and prior != "normal":
                continue
            private = kind == "private"
            dropout = FITS[name][1]
            model = linear_model if linear else model_of(MODULES[network], prior, dropout)
            settings = (LINEAR if linear else PRIVATE if private else PLAIN)[name]
            budget = PrivacyBudget(EPSILON[network], DELTA) if private else None
            yield name, settings, prior, Case(network, model, args.epochs or epochs, batch, budget)


def main():
    parser = experiment_parser(__doc__, "the MLP, one epoch, one seed, one setting")
    parser.add_argument("--networks", nargs="+", default=list(LENGTH), choices=list(LENGTH))
    parser.add_argument("--methods", nargs="+", default=list(FITS), choices=list(FITS))
    parser.add_argument("--priors", nargs="+", default=["normal", "Laplace", "flat"])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, help="instead of 10, of the linear layer 30")
    kinds = ["private", "plain"]
    parser.add_argument("--kinds", nargs="+", default=kinds, choices=kinds)
    args = parser.parse_args()
    if args.quick:
        args.networks, args.priors, args.seeds, args.epochs = ["MLP"], ["normal"], 1, 1
    rows = []
    for name, settings, prior, case in cases(args):
        begin, private, (train, test) = time.perf_counter(), case.budget, load(case.network)
        setting, found = chosen(name, case, settings[: 1 if args.quick else None], train), []
        for seed in range(args.seeds):
            draws, privacy = FITS[name][0](case, setting, seed, train)
            probabilities = predict(case.model, draws, test[0])
            found.append(scores(probabilities, test[1]))
            if private:
                after, privacy = recalibrated(case, privacy, draws, train, probabilities, seed)
                found[-1] |= scores(after, test[1], " tempered")
        row = {"network": case.network, "method": ("DP-" if private else "") + name}
        row |= {"prior": prior, "setting": setting, "epsilon": privacy.epsilon} | average_row(found)
        rows.append(row | {"seconds": time.perf_counter() - begin})
        print_row(rows[-1])
        if private and len(rows) == 1:
            print(privacy)
        save(args, rows=rows)


def print_row(row):
    names = ["accuracy", "log score", "Brier", "ECE", "MCE", "ECE tempered", "log score tempered"]
    numbers = "  ".join(
        f"{name} {row[name]:.4f}" + (f" ({row[name + ' se']:.4f})" if row[name + " se"] else "")
        for name in names
        if name in row
    )
    print(
        f"{row['network']:6} {row['method']:14} {row['prior']:8} {numbers}  {row['setting']}"
        f"  {row['seconds']:.0f} s",
        flush=True,
    )


if __name__ == "__main__":
    main()
