"""MNIST with an MLP and a CNN: SGLD, Bayes by backprop, MC dropout, a point estimate, DP and not.

Tables 1, 2 and 4 and Figures 3 and 7 of Zhang et al. (2021): accuracy and calibration, with a
normal prior, a Laplace prior and none. epsilon = 1.19, delta = 1e-5, add or remove one image, by
the accountant of a run (PRV). Batches have 1,024 images, expected. Settings were chosen by the log
score of the last 10,000 training images (`--tune` does it again and prints it; no budget has it);
reported are the 10,000 test images after training on all 60,000. Secret keys are the seeds.

    NUMPYRO_DP_DATA=... python benchmarks/dp_bnn/mnist.py --json mnist.json --figure docs/mnist.png
"""

import itertools
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

from common import average_row, experiment_parser, panels, save
from images import CNN, MLP, model_of

from numpyro_dp import (
    DPMCMC,
    DPSVI,
    SGLD,
    Poisson,
    PrivacyBudget,
    aligned,
    compare_accountants,
    posterior_samples,
    secret_key,
)
from numpyro_dp.datasets import load_mnist
from numpyro_dp.evaluate import (
    accuracy,
    brier_score,
    calibration_error,
    log_score,
    plot_class_probabilities,
    plot_reliability,
)

BUDGET = PrivacyBudget(1.19, 1e-5)
BATCH, DRAWS, HELD = 1024, 30, 10_000
NETWORKS = {"MLP": MLP, "CNN": CNN}


def load():
    """Training and test images, centred and scaled by constants in common use, with labels."""
    data = load_mnist()

    def scaled(images):
        return ((images.reshape(len(images), -1) / 255 - 0.1307) / 0.3081).astype(np.float32)

    return (scaled(data.X_train), data.y_train), (scaled(data.X_test), data.y_test)


def common_options(private, seed, number):
    noise = {"budget": BUDGET} if private else {"noise_multiplier": 0.0}
    return noise | {"sampler": Poisson(BATCH / number), "secret_key": secret_key(seed)}


def langevin(model, setting, private, steps, seed, train):
    """Weights of the last third of a chain."""
    clip_norm, temperature, size = setting
    apart = max(1, steps // 3 // DRAWS)
    kept = apart * min(DRAWS, steps // 3)
    mcmc = DPMCMC(
        SGLD(model, size and size / len(train[0]), temperature, init_strategy=init_to_sample),
        num_warmup=steps - kept, num_samples=kept, thinning=apart, clip_norm=clip_norm,
        progress_bar=False, **common_options(private, seed, len(train[0])),
    )  # fmt: skip
    mcmc.run(jax.random.key(seed), *train)
    return mcmc.get_samples(), mcmc.privacy


def variational(guide_type, draws):
    """Bayes by backprop with a normal guide; a point estimate, or MC dropout, with AutoDelta."""

    def fit(model, setting, private, steps, seed, train):
        clip_norm, size = setting
        scale = {} if guide_type is AutoDelta else {"init_scale": 0.01}
        guide = guide_type(model, init_loc_fn=init_to_sample, **scale)
        schedule = optax.cosine_decay_schedule(size / len(train[0]), steps)
        svi = DPSVI(
            model, guide, optax.sgd(schedule, momentum=0.9), estimator=aligned(),
            clip_norm=clip_norm, **common_options(private, seed, len(train[0])),
        )  # fmt: skip
        result = svi.run(jax.random.key(seed), steps, *train, progress_bar=False)
        return posterior_samples(jax.random.key(1), guide, result.params, draws), result.privacy

    return fit


FITS = {  # how, dropout
    "SGLD": (langevin, 0.0),
    "BBP": (variational(AutoDiagonalNormal, DRAWS), 0.0),
    "MC dropout": (variational(AutoDelta, DRAWS), 0.2),
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


def scores(probabilities, labels):
    top = probabilities.mean(0)
    ece, mce = calibration_error(top.max(1), top.argmax(1) == labels)
    return {
        "accuracy": accuracy(probabilities, labels), "log score": log_score(probabilities, labels),
        "Brier": brier_score(probabilities, labels), "ECE": ece, "MCE": mce,
    }  # fmt: skip
