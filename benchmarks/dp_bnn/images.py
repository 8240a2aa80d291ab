"""The image networks that the benchmarks here share, as NumPyro models."""

import math

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.contrib.module import flax_module, random_flax_module
from numpyro.handlers import mask

__all__ = ["CNN", "MLP", "Wide", "linear_model", "model_of", "random_images"]


def dropped(probability):
    """Dropout with one mask for all images of a call; in training each is a call of its own."""
    return nn.Dropout(probability, broadcast_dims=(0,), deterministic=not probability)


class MLP(nn.Module):
    """One hidden layer."""

    dropout: float = 0.0
    activation: str = "tanh"
    units: int = 128

    @nn.compact
    def __call__(self, x):
        x = getattr(nn, self.activation)(nn.Dense(self.units)(x))
        x = dropped(self.dropout)(x)
        return nn.Dense(10)(x)


class CNN(nn.Module):
    """That of Zhang et al. (2021): 16 kernels of 8 x 8, 32 of 4 x 4, 32 units."""

    dropout: float = 0.0
    activation: str = "tanh"

    @nn.compact
    def __call__(self, x):
        activation = getattr(nn, self.activation)
        x = x.reshape(*x.shape[:-1], 28, 28, 1)
        x = activation(nn.Conv(16, (8, 8), (2, 2), padding=2)(x))
        x = nn.max_pool(x, (2, 2), (1, 1))
        x = activation(nn.Conv(32, (4, 4), (2, 2), padding="VALID")(x))
        x = nn.max_pool(x, (2, 2), (1, 1)).reshape(*x.shape[:-3], -1)
        x = activation(nn.Dense(32)(x))
        x = dropped(self.dropout)(x)
        return nn.Dense(10)(x)


class Wide(nn.Module):
    """Hidden layers of 3,000 and 2,500 units: ten million weights."""

    dropout: float = 0.0
    activation: str = "tanh"

    @nn.compact
    def __call__(self, x):
        for units in (3000, 2500):
            x = getattr(nn, self.activation)(nn.Dense(units)(x))
        x = dropped(self.dropout)(x)
        return nn.Dense(10)(x)


def prior_of(kind):
    """Of variance 1 / (inputs of the unit) for a weight, 1 for a bias."""

    def prior(name, shape):
        scale = 1.0 if name.endswith("bias") else 1 / math.sqrt(math.prod(shape[:-1]))
        if kind == "Laplace":
            return dist.Laplace(0, scale / math.sqrt(2))
        return dist.Normal(0, scale)

    return prior


def model_of(network, prior="parameters", dropout=0.0, activation="tanh"):
    """The class of each image, by logits of a network.

    Args:
        network: ``MLP`` or ``CNN``.
        prior: ``"normal"``, ``"Laplace"``, ``"flat"`` (whose draws are normal, for a start, and
            whose density is 1), or ``"parameters"`` for a network without latents.
        dropout: Probability that an image loses a hidden unit.
        activation: Name of a function in ``flax.linen``.
    """

    def model(images, labels=None):
        net = network(dropout, activation)
        options = {"input_shape": (1, 784)} | ({"apply_rng": ["dropout"]} if dropout else {})
        if prior == "parameters":
            apply = flax_module("net", net, **options)
        elif prior == "flat":
            with mask(mask=False):
                apply = random_flax_module("net", net, prior_of("normal"), **options)
        else:
            apply = random_flax_module("net", net, prior_of(prior), **options)
        rngs = {"rngs": {"dropout": numpyro.prng_key()}} if dropout else {}
        with numpyro.plate("images", images.shape[0]):
            logits = apply(images, **rngs)
            numpyro.deterministic("log_probabilities", nn.log_softmax(logits))
            numpyro.sample("label", dist.Categorical(logits=logits), obs=labels)

    return model


def linear_model(features, labels=None):
    """The class of each image, by a linear layer on its features, with normal weights."""
    number = features.shape[1]
    prior = dist.Normal(0, 0.1).expand([number, 10]).to_event(2)
    weights = numpyro.sample("weights", prior)
    levels = numpyro.sample("levels", dist.Normal(jnp.zeros(10), 1).to_event(1))
    with numpyro.plate("images", features.shape[0]):
        logits = features @ weights + levels
        numpyro.deterministic("log_probabilities", nn.log_softmax(logits))
        numpyro.sample("label", dist.Categorical(logits=logits), obs=labels)


def random_images(number):
    """Pixels and labels at random, for timing: no time depends on them."""
    rng = np.random.default_rng(0)
    pixels = rng.uniform(size=(number, 784)).astype(np.float32)
    return jnp.asarray(pixels), jnp.asarray(rng.integers(0, 10, number))
