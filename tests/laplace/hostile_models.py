"""Models with outcomes of every kind, and records that no model would make."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro import handlers

from numpyro_dp.laplace.schedule import Kind
from numpyro_dp.laplace.shells import SHELLS
from numpyro_dp.laplace.signal import LaplaceProblem, Request, staged_scores
from numpyro_dp.model.density import Model
from numpyro_dp.model.outcomes import read_outcomes
from numpyro_dp.model.public import declare
from numpyro_dp.model.structure import read_model

D = 3
KEY = jax.random.key(5)


def normal(name, *shape):
    return numpyro.sample(name, dist.Normal(0, 1).expand(shape).to_event(len(shape)))


def observed(likelihood, *latents, shape=(D,), around=None, rows=None):
    """A model with weights w and the likelihood ``(x, w, *latents) -> distribution``.

    Arrays after y go to ``around``, which makes a handler, or to the likelihood.
    """

    def model(x, y, *others):
        values = normal("w", *shape), *[latent() for latent in latents]
        handler = around(*others) if around else contextlib.nullcontext()
        with numpyro.plate("rows", rows or x.shape[0]), handler:
            numpyro.sample("y", likelihood(x, *values, *(() if around else others)), obs=y)

    return model


def latent(name, prior):
    return lambda: numpyro.sample(name, prior)


def weights(weight):
    return handlers.scale(scale=jnp.abs(weight))


noise = latent("noise", dist.LogNormal(0, 0.5))
concentration = latent("concentration", dist.Gamma(2, 1))


def cuts():
    return numpyro.sample("cuts", dist.TransformedDistribution(
        dist.Normal(0, 1).expand([3]).to_event(1), dist.transforms.OrderedTransform()
    ))  # fmt: skip


def logits(x, w):
    return dist.Bernoulli(logits=x @ w)


def rates(x, w):
    return dist.Poisson(jnp.exp(x @ w))


def with_noise(x, w, s):
    return dist.Normal(x @ w, s)


def two_normals(x, w, s, p):
    weights = dist.Categorical(probs=jnp.stack([p, 1 - p]))
    return dist.MixtureSameFamily(weights, dist.Normal(w + x[:, :1], s))


def two_sites(x, y, count):
    w, s = normal("w", D), noise()
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Normal(x @ w, s), obs=y)
        numpyro.sample("count", dist.Poisson(jnp.exp(x[:, 0] * w[1] + w[0])), obs=count)


def summed_out(x, y):
    loc, p = normal("loc", 2), numpyro.sample("p", dist.Dirichlet(jnp.ones(2)))
    with numpyro.plate("rows", x.shape[0]):
        part = numpyro.sample("part", dist.Categorical(p), infer={"enumerate": "parallel"})
        numpyro.sample("y", dist.Normal(loc[part] + x[:, 0], 1.0), obs=y)


# name: (model, kinds of the arrays after x, whether outcomes are listed)
MODELS = {
    "bernoulli": (observed(logits), "i", True),
    "poisson": (observed(rates), "i", False),
    "linear": (observed(with_noise, noise), "f", False),
    "categorical": (
        observed(lambda x, w: dist.Categorical(logits=x @ w), shape=(D, 4)), "i", True,
    ),
    "ordered": (observed(lambda x, w, cuts: dist.OrderedLogistic(x @ w, cuts), cuts), "i", True),
    "binomial": (observed(lambda x, w: dist.Binomial(5, logits=x @ w)), "i", True),
    "negative binomial": (
        observed(lambda x, w, c: dist.NegativeBinomial2(jnp.exp(x @ w), c), concentration),
        "i", False,
    ),
    "gamma": (
        observed(lambda x, w, c: dist.Gamma(c, c * jnp.exp(-x @ w)), concentration), "f", False,
    ),
    "student": (observed(lambda x, w, s: dist.StudentT(4.0, x @ w, s), noise), "f", False),
    "two sites": (two_sites, "fi", False),
    "mixture": (
        observed(two_normals, noise, latent("p", dist.Beta(2, 2)), shape=(2,)), "f", False,
    ),
    "summed out": (summed_out, "f", False),
    "weighted": (observed(logits, around=weights), "if", True),
    "weighted, known size": (observed(logits, around=weights, rows=20), "if", True),
    "weighted poisson": (observed(rates, around=weights), "if", False),
    "masked": (
        observed(with_noise, noise, around=lambda w: handlers.mask(mask=w > 0)), "ff", False,
    ),
    "censored, Weibull": (
        observed(lambda x, w, s, late: dist.RightCensoredDistribution(
            dist.Weibull(jnp.exp(x @ w), s), late > 0), noise), "fi", False,
    ),
    "censored, log-normal": (
        observed(lambda x, w, s, late: dist.RightCensoredDistribution(
            dist.LogNormal(x @ w, s), late > 0), noise), "fi", False,
    ),
    "censored from the left": (
        observed(lambda x, w, s, low: dist.LeftCensoredDistribution(
            dist.Normal(x @ w, s), low > 0), noise), "fi", False,
    ),
}  # fmt: skip


def hostile_records(kinds, number, seed):
    """Heavy-tailed rows, 1e30, infinity and NaN; outcomes inside and outside the support."""
    rng = np.random.default_rng(seed)

    def floats(*shape):
        values = rng.standard_cauchy(shape) * 10.0 ** rng.integers(-3, 5, (number, 1)[: len(shape)])
        bad = rng.choice([np.nan, np.inf, -np.inf, 1e30, -1e30, 1e18, 1e-30, 0.0], shape)
        with np.errstate(over="ignore"):
            return np.where(rng.random(shape) < 0.06, bad, values).astype(np.float32)

    def integers(*shape):
        odd = rng.choice([-1, 7, 77, 2**30, -(2**31)], shape)
        return np.where(rng.random(shape) < 0.2, odd, rng.integers(0, 4, shape)).astype(np.int32)

    return floats(number, D), *({"f": floats, "i": integers}[kind](number) for kind in kinds)


def ordinary_records(kinds, number, seed):
    rng = np.random.default_rng(seed)
    made = {"f": lambda: rng.gamma(2.0, size=number), "i": lambda: rng.integers(0, 2, number)}
    floats = [made[kind]().astype({"f": "float32", "i": "int32"}[kind]) for kind in kinds]
    return rng.normal(size=(number, D)).astype(np.float32), *floats


def problem_of(model, args):
    structure = read_model(model, args, {}, None, declare())
    rows = structure.layout.rows(args, {})
    return LaplaceProblem(read_outcomes(Model(model, structure), rows.shared))


def rooted(rng, size, spread):
    """A symmetric, positive definite matrix whose coordinates have different scales."""
    root = rng.normal(size=(size, size)) * np.exp(spread * rng.normal(size=size))
    values, vectors = np.linalg.eigh(root @ root.T + 1e-3 * np.eye(size))
    return (vectors * np.sqrt(values)) @ vectors.T


def request_of(size, *, kind=Kind.STAGE, mean=None, factor=None, whitening=None, clips=(1, 1, 1),
               weights=(0.6, 0.6, 0.4, 0.2, 0.2, 0.1, 0.15), shells=None):  # fmt: skip
    one_part = np.full(SHELLS + 1, clips[0]), np.eye(SHELLS + 1)[0]
    arrays = (
        np.zeros(size) if mean is None else mean,
        np.zeros((size, size)) if factor is None else factor,
        np.eye(size) if whitening is None else whitening,
        clips, weights, one_part if shells is None else shells,
    )  # fmt: skip
    return Request(jnp.asarray(int(kind)), *(jnp.asarray(array, jnp.float32) for array in arrays))


def random_request(size, kind, rng):
    weights = np.sqrt(rng.dirichlet(np.ones(7)))
    if kind is Kind.SCALES:
        weights = np.append(np.sqrt(rng.dirichlet(np.ones(2))), [0, 0, 0, 0, 0])
    clips, shells = np.exp(rng.normal(size=3) * (2, 5, 2)), None
    if kind is Kind.STAGE and rng.random() < 0.7:
        norms = clips[0] * np.cumsum(rng.dirichlet(np.ones(SHELLS + 1)))
        shells = norms, np.sqrt(rng.dirichlet(np.ones(SHELLS + 1)))
        clips[0] = norms[-1]
    return request_of(
        size, kind=kind, mean=rng.normal(size=size),
        factor=np.linalg.cholesky(rooted(rng, size, 1)) * np.exp(rng.normal()),
        whitening=rooted(rng, size, 2), clips=clips, weights=weights, shells=shells,
    )  # fmt: skip


def signals(problem, pairs):
    """Compiled ``(request, key, record arrays) -> signal of each record``."""
    estimator = staged_scores(problem.outcomes, pairs, robust=True)(problem)

    @jax.jit
    def all_records(request, key, arrays):
        public = estimator.prepare(key, request)
        return jax.vmap(estimator.signal, (None, 0))(public, arrays)

    return all_records


def norms(signal):
    """Of each record's signal, in double precision."""
    leaves = [np.asarray(leaf, np.float64) for leaf in signal.values()]
    return np.sqrt(sum((leaf.reshape(len(leaf), -1) ** 2).sum(1) for leaf in leaves))


def with_numbers(problem, arrays, seed=0):
    """Record arrays, with the secret number of each record where it has one."""
    if not problem.numbered:
        return arrays
    numbers = np.random.default_rng(seed).integers(0, 2**32, len(arrays[0]), dtype=np.uint32)
    return (*arrays, numbers)
