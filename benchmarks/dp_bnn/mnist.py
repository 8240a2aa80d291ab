"""MNIST with an MLP and a CNN: SGLD, Bayes by backprop, MC dropout, a point estimate, DP and not.

Tables 1, 2 and 4 and Figures 3 and 7 of Zhang et al. (2021): accuracy and calibration, with a
normal prior, a Laplace prior and none. epsilon = 1.19, delta = 1e-5, add or remove one image, by
the accountant of a run (PRV). Batches have 1,024 images, expected. Settings were chosen by the log
score of the last 10,000 training images (a choice in no budget); reported are the 10,000 test
images after training on all 60,000. Secret keys are the seeds. The temperature of SGLD is part of
its setting.

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


# Settings: (clip norm, temperature, step size times N or None for that of the noise) of SGLD,
# (clip norm, largest step size times N) of the others.
PRIVATE = {
    "SGLD": [(c, t, None) for c in (2.0, 4.0) for t in (0.05, 0.3)],
    "BBP": [(c, 1.0) for c in (2.0, 4.0)],
    "MC dropout": [(c, 1.0) for c in (1.0, 2.0)],
    "SGD": [(c, 1.0) for c in (1.0, 2.0)],
}
PLAIN = {
    "SGLD": [(float("inf"), t, size) for t in (0.05, 0.3, 1.0) for size in (0.03, 0.1)],
    "BBP": [(float("inf"), size) for size in (0.03, 0.1)],
    "MC dropout": [(float("inf"), size) for size in (0.1, 0.3)],
    "SGD": [(float("inf"), size) for size in (0.1, 0.3)],
}


def chosen(name, model, settings, private, steps, train):
    """The setting with the best log score of the last training images."""
    part, valid = [a[:-HELD] for a in train], [a[-HELD:] for a in train]

    def score(setting):
        draws, _ = FITS[name][0](model, setting, private, steps, 100, part)
        found = log_score(predict(model, draws, valid[0]), valid[1])
        print(f"  {name} {setting}: {found:.4f}", flush=True)
        return found if np.isfinite(found) else -np.inf

    return settings[0] if len(settings) == 1 else max(settings, key=score)


def main():
    parser = experiment_parser(__doc__, "the MLP, one epoch, one seed, one setting")
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS), choices=list(NETWORKS))
    parser.add_argument("--methods", nargs="+", default=list(FITS), choices=list(FITS))
    parser.add_argument("--priors", nargs="+", default=["normal", "Laplace", "flat"])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--only-private", action="store_true")
    args = parser.parse_args()
    if args.quick:
        args.networks, args.priors, args.seeds, args.epochs = ["MLP"], ["normal"], 1, 1
    train, test = load()
    steps, rows, shown = args.epochs * len(train[0]) // BATCH, [], {}
    cases = itertools.product(args.networks, args.methods, args.priors, (True, False))
    for network, name, prior, private in cases:
        if args.only_private and not private:
            continue
        fit, dropout = FITS[name]
        model = model_of(NETWORKS[network], prior, dropout)
        begin, settings = time.perf_counter(), (PRIVATE if private else PLAIN)[name]
        settings = settings[:1] if args.quick else settings
        setting, found = chosen(name, model, settings, private, steps, train), []
        for seed in range(args.seeds):
            draws, privacy = fit(model, setting, private, steps, seed, train)
            probabilities = predict(model, draws, test[0])
            found.append(scores(probabilities, test[1]))
        row = {"network": network, "method": ("DP-" if private else "") + name, "prior": prior}
        rows.append(row | average_row(found) | {"setting": setting})
        rows[-1]["seconds"] = time.perf_counter() - begin
        print_row(rows[-1])
        if network == args.networks[0] and prior == args.priors[0]:
            shown[row["method"]] = probabilities
        if private and len(rows) == 1:
            print(f"{privacy}\n{compare_accountants(privacy)}")
        save(args, rows=rows)
    if args.figure:
        draw(args.figure, f"{args.networks[0]}, {args.priors[0]} prior", shown, test[1])


def print_row(row):
    numbers = "  ".join(
        f"{name} {row[name]:.4f}" + (f" ({row[name + ' se']:.4f})" if row[name + " se"] else "")
        for name in ("accuracy", "log score", "Brier", "ECE", "MCE")
    )
    print(
        f"{row['network']:4} {row['method']:14} {row['prior']:8} {numbers}  {row['setting']}"
        f"  {row['seconds']:.0f} s",
        flush=True,
    )


def draw(path, title, shown, labels):
    """Reliability of each method; below, one doubtful image over draws."""
    doubtful = int(next(iter(shown.values())).mean(0).max(1).argmin())
    with panels(path, len(shown), 2, (3.2 * len(shown), 6.2)) as axes:
        for column, (method, p) in enumerate(shown.items()):
            axis = plot_reliability(axes[0][column], p, labels, bins=10)
            axis.set_title(f"{method}\n{title}\n{axis.get_title()}")
            plot_class_probabilities(axes[1][column], p[:, doubtful], label=int(labels[doubtful]))
            axes[1][column].set_title("one image, true class red")


if __name__ == "__main__":
    main()
