"""A private variational auto-encoder of handwritten digits.

The encoder's weights are shared by all records, so they join the signal of a record beside the
decoder's; nothing is kept for any one image. The global bias image has a prior and a posterior.
Reported is the evidence lower bound per held-out image, in nats, against that of independent
pixels with the held-out data's own means (which no private method may use: a yardstick).

    python examples/from_d3p/vae.py           # MNIST if NUMPYRO_DP_DATA has it, 20 epochs
    python examples/from_d3p/vae.py --quick   # scikit-learn's small digits, 2 epochs
"""

import argparse
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from numpyro.infer import SVI, Trace_ELBO
from sklearn.datasets import load_digits

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "benchmarks"))

from datasets import DatasetNotFoundError, load_mnist

from numpyro_dp import DPSVI, PrivacyBudget
from numpyro_dp.estimators import aligned
from numpyro_dp.samplers import Poisson

CODES = 8


def layer(name, inputs, outputs):
    """A dense layer of parameters, started at random."""
    bound = 1 / np.sqrt(inputs)
    weight = numpyro.param(
        f"{name}_weight",
        lambda key: jax.random.uniform(key, (inputs, outputs), minval=-bound, maxval=bound),
    )
    bias = numpyro.param(f"{name}_bias", jnp.zeros(outputs))
    return lambda x: x @ weight + bias


def model(images, hidden=64):
    """Binary images given codes; the mean image is a global latent."""
    pixels = images.shape[1]
    mean = numpyro.sample("mean", dist.Normal(-2, 1).expand([pixels]).to_event(1))
    first, last = layer("decoder_1", CODES, hidden), layer("decoder_2", hidden, pixels)
    with numpyro.plate("images", images.shape[0]):
        code = numpyro.sample("code", dist.Normal(0, 1).expand([CODES]).to_event(1))
        logits = mean + last(jax.nn.softplus(first(code)))
        numpyro.sample("image", dist.Bernoulli(logits=logits).to_event(1), obs=images)


def guide(images, hidden=64):
    """A normal for the mean image; an encoder for the codes."""
    pixels = images.shape[1]
    loc = numpyro.param("mean_loc", jnp.full(pixels, -2.0))
    scale = numpyro.param("mean_scale", jnp.full(pixels, 0.1), constraint=dist.constraints.positive)
    numpyro.sample("mean", dist.Normal(loc, scale).to_event(1))
    first, last = layer("encoder_1", pixels, hidden), layer("encoder_2", hidden, 2 * CODES)
    with numpyro.plate("images", images.shape[0]):
        moments = last(jax.nn.softplus(first(images)))
        spread = jax.nn.softplus(moments[:, CODES:])
        numpyro.sample("code", dist.Normal(moments[:, :CODES], spread).to_event(1))


def load(quick):
    """Binary images for training and test, one a row."""
    try:
        data = None if quick else load_mnist()
    except DatasetNotFoundError:
        data = None
    if data:
        name, parts = "MNIST", [x.reshape(len(x), -1) / 255 for x in (data.X_train, data.X_test)]
    else:
        pixels = load_digits().data / 16
        order = np.random.default_rng(0).permutation(len(pixels))
        held, rest = np.sort(order[: len(order) // 5]), np.sort(order[len(order) // 5 :])
        name, parts = "Digits of scikit-learn", [pixels[rest], pixels[held]]
    print(f"{name}: {len(parts[0])} images of {parts[0].shape[1]} pixels")
    return [(x > 0.5).astype(np.float32) for x in parts]


def bound(params, images):
    """Evidence lower bound per image; the mean image's divergence from the prior is left out."""
    values = {"mean_scale": jnp.full_like(params["mean_scale"], 1e-6)}
    loss = Trace_ELBO(num_particles=10)
    value = loss.loss(jax.random.key(7), params | values, model, guide, images)
    scale, loc = values["mean_scale"], params["mean_loc"]
    divergence = dist.kl_divergence(dist.Normal(loc, scale), dist.Normal(-2, 1)).sum()
    return float(-(value - divergence) / len(images))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epsilon", type=float, default=4.0)
    parser.add_argument("--epochs", type=float, default=20)
    parser.add_argument("--clip-norm", type=float, default=20.0)
    parser.add_argument("--quick", action="store_true", help="small digits, 2 epochs")
    args = parser.parse_args()
    train, test = load(args.quick)
    rate = min(0.1, 512 / len(train))
    num_steps = round((2 if args.quick else args.epochs) / rate)
    optim = optax.adam(2e-3)
    svi = DPSVI(
        model,
        guide,
        optim,
        estimator=aligned(),
        clip_norm=args.clip_norm,
        sampler=Poisson(rate),
        budget=PrivacyBudget(epsilon=args.epsilon, delta=1e-5),
    )
    result = svi.run(jax.random.key(0), num_steps, train)
    print(result.privacy)

    plain = SVI(model, guide, optim, Trace_ELBO())
    batches = np.random.default_rng(0)
    state = plain.init(jax.random.key(0), train[: round(rate * len(train))])
    untrained = plain.get_params(state)
    update = jax.jit(plain.update)
    for _ in range(num_steps):
        rows = batches.choice(len(train), round(rate * len(train)), replace=False)
        state, _ = update(state, train[rows])

    means = test.mean(0).clip(1e-3, 1 - 1e-3)
    pixels = (test * np.log(means) + (1 - test) * np.log1p(-means)).sum(1).mean()
    print(f"independent pixels, their own means    {pixels:9.2f} nats an image")
    print(f"untrained                              {bound(untrained, test):9.2f}")
    print(
        f"DPSVI, epsilon {result.privacy.epsilon:<6.3g}                  "
        f"{bound(result.params, test):9.2f}"
    )
    print(f"SVI on batches, not private            {bound(plain.get_params(state), test):9.2f}")


if __name__ == "__main__":
    main()
