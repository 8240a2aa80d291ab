"""Private Bayesian networks of handwritten digits, and how far their probabilities can be trusted.

A network of 32 tanh units on scikit-learn's 8 x 8 digits, epsilon = 4, delta = 1e-4, add or remove
one image, by four methods of the same budget: Langevin dynamics, whose noise is that of privacy;
Bayes by backprop with aligned gradients; dropout that stays on in prediction; and a point estimate.
Reported are scores on held-out images. Step sizes and clip norms were chosen on a fifth of the
training images (`--tune` does it again, without cost to the budget named here, and prints it).

    python benchmarks/dp_bnn/digits.py
    python benchmarks/dp_bnn/digits.py --quick
"""

import argparse
import math

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from numpyro.infer import Predictive
from numpyro.infer.autoguide import AutoDelta, AutoDiagonalNormal
from numpyro.infer.initialization import init_to_sample
from scipy.special import entr
from sklearn.datasets import load_digits
from sklearn.metrics import accuracy_score

from numpyro_dp import DPMCMC, DPSVI, SGLD, PrivacyBudget
from numpyro_dp.estimators import aligned
from numpyro_dp.posterior import posterior_samples
from numpyro_dp.samplers import Poisson

BUDGET = PrivacyBudget(epsilon=4.0, delta=1e-4)
HIDDEN, DRAWS = 32, 100


def model(images, labels=None, dropout=0.0):
    """Class logits of each image; with dropout each image loses units of its own."""
    number, pixels = images.shape

    def layer(name, inputs, outputs):
        prior = dist.Normal(0, 1 / math.sqrt(inputs)).expand([inputs, outputs]).to_event(2)
        weight = numpyro.sample(f"{name}_weight", prior)
        return weight, numpyro.sample(
            f"{name}_bias", dist.Normal(0, 1).expand([outputs]).to_event(1)
        )

    first, last = layer("first", pixels, HIDDEN), layer("last", HIDDEN, 10)
    with numpyro.plate("images", number):
        units = jnp.tanh(images @ first[0] + first[1])
        if dropout:
            keep = jax.random.bernoulli(numpyro.prng_key(), 1 - dropout, units.shape)
            units = units * keep / (1 - dropout)
        logits = units @ last[0] + last[1]
        numpyro.deterministic("probabilities", jax.nn.softmax(logits))
        numpyro.sample("label", dist.Categorical(logits=logits), obs=labels)


def langevin(setting, steps, train):
    """Weights of a chain's second half."""
    clip_norm, temperature = setting
    mcmc = DPMCMC(
        SGLD(model, temperature=temperature, init_strategy=init_to_sample),
        num_warmup=steps - steps // 2, num_samples=steps // 2, clip_norm=clip_norm,
        sampler=Poisson(0.2), budget=BUDGET, progress_bar=False,
    )  # fmt: skip
    mcmc.run(jax.random.key(0), *train)
    keep = max(1, steps // 2 // DRAWS)
    return {name: value[::keep] for name, value in mcmc.get_samples().items()}, mcmc.privacy


def variational(guide_type, dropout=0.0):
    """Bayes by backprop with a normal guide; a point estimate, or MC dropout, with AutoDelta."""

    def fit(setting, steps, train):
        clip_norm, size = setting
        scale = {} if guide_type is AutoDelta else {"init_scale": 0.02}
        guide = guide_type(model, init_loc_fn=init_to_sample, **scale)
        svi = DPSVI(
            model, guide, optax.adam(optax.cosine_decay_schedule(size, steps)),
            estimator=aligned(), clip_norm=clip_norm, sampler=Poisson(0.2), budget=BUDGET,
            dropout=dropout,
        )  # fmt: skip
        result = svi.run(jax.random.key(0), steps, *train, progress_bar=False)
        draws = DRAWS if dropout or guide_type is not AutoDelta else 1
        return posterior_samples(jax.random.key(1), guide, result.params, draws), result.privacy

    return fit


METHODS = {  # how, dropout in prediction, (clip norm, temperature or step size), alternatives
    "SGLD": (langevin, 0.0, (4.0, 0.3),
             [(c, t) for c in (2.0, 4.0, 8.0) for t in (0.1, 0.3)]),
    "Bayes by backprop": (variational(AutoDiagonalNormal), 0.0, (8.0, 0.03),
                          [(c, s) for c in (2.0, 4.0, 8.0) for s in (0.03, 0.1)]),
    "MC dropout": (variational(AutoDelta, 0.2), 0.2, (8.0, 0.1),
                   [(c, s) for c in (2.0, 4.0, 8.0) for s in (0.03, 0.1)]),
    "point estimate": (variational(AutoDelta), 0.0, (8.0, 0.1),
                       [(c, s) for c in (2.0, 4.0, 8.0) for s in (0.03, 0.1)]),
}  # fmt: skip


def predict(draws, dropout, images):
    """Probabilities of shape (draws, images, classes)."""
    predictive = Predictive(model, draws, return_sites=["probabilities"], batch_ndims=1)
    found = predictive(jax.random.key(2), images, dropout=dropout)["probabilities"]
    return np.asarray(found, np.float64)


def log_score(p, labels):
    """Mean log probability of the label."""
    return np.log(p[np.arange(len(labels)), labels]).mean()


def tuned(name, steps, train):
    """The setting with the best log score on a fifth of the training images."""
    fit, dropout, _, settings = METHODS[name]
    held = len(train[0]) // 5
    part, valid = [a[held:] for a in train], [a[:held] for a in train]

    def score(setting):
        p = predict(fit(setting, steps, part)[0], dropout, valid[0]).mean(0)
        return log_score(p, valid[1])

    found = {setting: score(setting) for setting in settings}
    print(f"{name}: { ({k: round(float(v), 3) for k, v in found.items()}) }", flush=True)
    return max(found, key=found.get)


def reliability(p, labels, bins):
    """Confidence, accuracy and number of images in each bin of the largest probability."""
    top, right = p.max(1), p.argmax(1) == labels
    place = np.minimum((top * bins).astype(int), bins - 1)
    count = np.bincount(place, minlength=bins)
    held = count > 0
    sums = [np.bincount(place, each, minlength=bins)[held] for each in (top, right)]
    return sums[0] / count[held], sums[1] / count[held], count[held]


def calibration_error(p, labels, bins=15):
    """Expected and largest difference of accuracy and confidence over bins."""
    confidence, accuracy, count = reliability(p, labels, bins)
    gaps = np.abs(accuracy - confidence)
    return gaps @ count / count.sum(), gaps.max()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="30 steps instead of 300")
    parser.add_argument("--tune", action="store_true", help="choose settings anew")
    args = parser.parse_args()
    steps = 30 if args.quick else 300
    pixels, digits = load_digits(return_X_y=True)
    images, labels = (pixels / 8 - 1).astype(np.float32), digits.astype(np.int32)
    order = np.random.default_rng(0).permutation(len(labels))
    held, rest = np.sort(order[: len(order) // 5]), np.sort(order[len(order) // 5 :])
    train, test = (images[rest], labels[rest]), (images[held], labels[held])
    print(f"Digits of scikit-learn: {len(train[0])} images for training, {len(test[0])} held out")
    print(f"\n{'method':18} accuracy  log score  Brier    ECE    MCE  of the entropy, epistemic")
    found = {}
    for name, (fit, dropout, setting, _) in METHODS.items():
        if args.tune:
            setting = tuned(name, steps, train)
        draws, privacy = fit(setting, steps, train)
        p = found[name] = predict(draws, dropout, test[0])
        top = p.mean(0)
        errors = calibration_error(top, test[1])
        share = 1 - entr(p).sum((1, 2)).mean() / entr(top).sum()  # mutual information over entropy
        brier = np.mean(np.sum((top - np.eye(10)[test[1]]) ** 2, axis=1))
        print(
            f"{name:18} {accuracy_score(test[1], top.argmax(1)):8.3f}"
            f"  {log_score(top, test[1]):9.3f}"
            f"  {brier:.3f}  {errors[0]:.3f}  {errors[1]:.3f}  {share:.0%}",
            flush=True,
        )
    print(f"\nEach has spent:\n{privacy}")


if __name__ == "__main__":
    main()
