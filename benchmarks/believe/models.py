"""`fit` on models as users write them: which driver takes each, and is its posterior any use?

Parameters are drawn from the prior of each model, and records from the model. "gain" is the mean
log-likelihood of held-out records less that of the base rate, a distribution of the outcome without
columns. A posterior that does harm has a gain below 0. At epsilon 0.001 the posterior should be the
prior: "mean" is the root mean square of its means in standard deviations of the prior, "sd" the
mean ratio of standard deviations, both in unconstrained coordinates.

    python benchmarks/believe/models.py --json models.json

Models whose name starts with an asterisk are written after examples and tutorials of NumPyro.
"""

import pathlib
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import scipy.stats
from common import experiment_parser, save
from jax.scipy.special import logsumexp
from numpyro.contrib.hsgp.approximation import hsgp_squared_exponential
from numpyro.distributions import biject_to, constraints, transforms
from numpyro.infer import Predictive, log_likelihood

from numpyro_dp import UnsupportedModelError, fit

DRAWS, HELD_OUT, GROUPS = 500, 1000, 12
CASES = {}


def case(name, columns=None):
    """Adds a model; ``columns(rng, number)`` makes its arguments, by default four columns."""

    def add(model):
        CASES[name] = (model, columns or (lambda rng, number: (rng.normal(size=(number, 4)),)))
        return model

    return add


def weights(dim, scale=1.0, name="w"):
    return numpyro.sample(name, dist.Normal(0, scale).expand([dim]).to_event(1))


def grouped(rng, number):
    return rng.normal(size=(number, 2)), rng.integers(GROUPS, size=number)


def with_another(dim, low, high):
    """Columns and one more, uniform."""
    return lambda rng, number: (rng.normal(size=(number, dim)), rng.uniform(low, high, size=number))


@case("* logistic regression")
def covtype(X, y=None):
    coefs = numpyro.sample("coefs", dist.Normal(jnp.zeros(X.shape[1]), jnp.ones(X.shape[1])))
    with numpyro.plate("N", X.shape[0]):
        numpyro.sample("obs", dist.Bernoulli(logits=X @ coefs), obs=y)


@case("* linear regression", lambda rng, number: tuple(rng.normal(size=(2, number))))
def divorce(marriage, age, y=None):
    a = numpyro.sample("a", dist.Normal(0.0, 0.2))
    m = numpyro.sample("bM", dist.Normal(0.0, 0.5))
    b = numpyro.sample("bA", dist.Normal(0.0, 0.5))
    sigma = numpyro.sample("sigma", dist.Exponential(1.0))
    with numpyro.plate("states", len(marriage)):
        numpyro.sample("obs", dist.Normal(a + m * marriage + b * age, sigma), obs=y)


@case("* varying intercepts and slopes", grouped)
def patients(X, group, y=None):
    mu_a = numpyro.sample("mu_a", dist.Normal(0.0, 1.0))
    sigma_a = numpyro.sample("sigma_a", dist.HalfNormal(1.0))
    mu_b = numpyro.sample("mu_b", dist.Normal(0.0, 1.0))
    sigma_b = numpyro.sample("sigma_b", dist.HalfNormal(1.0))
    with numpyro.plate("patients", GROUPS):
        a = numpyro.sample("a", dist.Normal(mu_a, sigma_a))
        b = numpyro.sample("b", dist.Normal(mu_b, sigma_b))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
    with numpyro.plate("data", len(group)):
        numpyro.sample("obs", dist.Normal(a[group] + b[group] * X[:, 0], sigma), obs=y)


@case("* zero-inflated Poisson")
def fishing(X, y=None):
    b1 = weights(X.shape[1], 0.5, "b1")
    b2 = weights(X.shape[1], 0.5, "b2")
    with numpyro.plate("N", X.shape[0]):
        rate, gate = jnp.exp(X @ b1), jax.nn.sigmoid(X @ b2)
        numpyro.sample("obs", dist.ZeroInflatedPoisson(gate, rate), obs=y)


@case("* ordinal regression")
def ordinal(X, y=None):
    b = weights(X.shape[1], 0.5)
    cuts = numpyro.sample("cuts", dist.TransformedDistribution(
        dist.Normal(0.0, 1.0).expand([3]).to_event(1), transforms.OrderedTransform()))  # fmt: skip
    with numpyro.plate("obs", X.shape[0]):
        numpyro.sample("Y", dist.OrderedLogistic(X @ b, cuts), obs=y)


@case("* batting, pooled", lambda rng, number: (rng.integers(20, 60, size=number),))
def baseball(at_bats, y=None):
    phi = numpyro.sample("phi", dist.Uniform(0.0, 1.0))
    with numpyro.plate("players", len(at_bats)):
        numpyro.sample("obs", dist.Binomial(at_bats, probs=phi), obs=y)


@case("* horseshoe regression")
def horseshoe(X, y=None):
    lambdas = numpyro.sample("lambdas", dist.HalfCauchy(jnp.ones(X.shape[1])))
    tau = numpyro.sample("tau", dist.HalfCauchy(jnp.ones(1)))
    unscaled = numpyro.sample("unscaled", dist.Normal(0.0, jnp.ones(X.shape[1])))
    with numpyro.plate("N", X.shape[0]):
        logits = X @ (tau * lambdas * unscaled)
        numpyro.sample("Y", dist.Bernoulli(logits=logits), obs=y)


@case("* Bayesian network")
def bnn(X, y=None):
    w1 = numpyro.sample("w1", dist.Normal(jnp.zeros((X.shape[1], 5)), jnp.ones((X.shape[1], 5))))
    w2 = numpyro.sample("w2", dist.Normal(jnp.zeros((5, 1)), jnp.ones((5, 1))))
    prec = numpyro.sample("prec_obs", dist.Gamma(3.0, 1.0))
    with numpyro.plate("data", X.shape[0]):
        loc = (jnp.tanh(X @ w1) @ w2)[:, 0]
        numpyro.sample("Y", dist.Normal(loc, 1 / jnp.sqrt(prec)), obs=y)


@case("* Gaussian process by bases", lambda rng, number: (rng.uniform(-1, 1, size=number),))
def hsgp(x, y=None):
    alpha = numpyro.sample("alpha", dist.LogNormal(-0.7, 0.3))
    length = numpyro.sample("length", dist.LogNormal(-1.0, 0.3))
    noise = numpyro.sample("noise", dist.LogNormal(-1.0, 0.5))
    f = hsgp_squared_exponential(
        x=x, alpha=alpha, length=length, ell=1.5, m=8, non_centered=False)  # fmt: skip
    with numpyro.plate("N", x.shape[0]):
        numpyro.sample("obs", dist.Normal(f, noise), obs=y)


@case("* Gaussian mixture", lambda rng, number: (np.zeros(number),))
def mixture(x, y=None):
    weights_ = numpyro.sample("weights", dist.Dirichlet(2 * jnp.ones(2)))
    low = numpyro.sample("low", dist.Normal(-2.0, 0.5))
    gap = numpyro.sample("gap", dist.LogNormal(1.2, 0.3))
    scale = numpyro.sample("scale", dist.LogNormal(0.0, 0.3))
    with numpyro.plate("N", x.shape[0]):
        parts = dist.Normal(jnp.stack([low, low + gap]), scale)
        numpyro.sample("obs", dist.MixtureSameFamily(dist.Categorical(weights_), parts), obs=y)


@case("Poisson with exposure", with_another(3, 0.1, 2.0))
def visits(X, years, y=None):
    a = numpyro.sample("a", dist.Normal(0, 1))
    w = weights(X.shape[1], 0.5)
    with numpyro.plate("people", X.shape[0]):
        numpyro.sample("y", dist.Poisson(years * jnp.exp(a + X @ w)), obs=y)


@case("negative binomial")
def overdispersed(X, y=None):
    w = weights(X.shape[1], 0.5)
    concentration = numpyro.sample("concentration", dist.LogNormal(0, 1))
    with numpyro.plate("people", X.shape[0]):
        numpyro.sample("y", dist.NegativeBinomial2(jnp.exp(X @ w), concentration), obs=y)


@case("heavy tails")
def robust(X, y=None):
    w = weights(X.shape[1])
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    df = numpyro.sample("df", dist.Gamma(5.0, 1.0))
    with numpyro.plate("people", X.shape[0]):
        numpyro.sample("y", dist.StudentT(df, X @ w, scale), obs=y)


@case("Gamma, log link")
def costs(X, y=None):
    w = weights(X.shape[1], 0.5)
    shape = numpyro.sample("shape", dist.LogNormal(0.5, 0.5))
    with numpyro.plate("people", X.shape[0]):
        numpyro.sample("y", dist.Gamma(shape, shape * jnp.exp(-(X @ w))), obs=y)


@case("Beta, logit link")
def shares(X, y=None):
    w = weights(X.shape[1], 0.5)
    precision = numpyro.sample("precision", dist.LogNormal(1.5, 0.5))
    with numpyro.plate("people", X.shape[0]):
        mean = jnp.clip(jax.nn.sigmoid(X @ w), 0.001, 0.999)
        numpyro.sample("y", dist.Beta(mean * precision, (1 - mean) * precision), obs=y)


@case("three categories")
def categories(X, y=None):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([X.shape[1], 3]).to_event(2))
    with numpyro.plate("people", X.shape[0]):
        numpyro.sample("y", dist.Categorical(logits=X @ w), obs=y)


@case("logistic with group effects", grouped)
def intercepts(X, group, y=None):
    w = weights(X.shape[1])
    sd = numpyro.sample("sd", dist.HalfNormal(1.0))
    with numpyro.plate("hospitals", GROUPS):
        effect = numpyro.sample("effect", dist.Normal(0, sd))
    with numpyro.plate("people", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=X @ w + effect[group]), obs=y)


@case("games between two teams",
      lambda rng, number: (rng.integers(8, size=number), rng.integers(8, size=number)))  # fmt: skip
def games(home, away, y=None):
    skill = weights(8, name="skill")
    with numpyro.plate("games", len(home)):
        numpyro.sample("y", dist.Bernoulli(logits=skill[home] - skill[away]), obs=y)


@case("two outcomes a record")
def two(X, y=None):
    w, v = weights(X.shape[1]), weights(X.shape[1], 0.5, "v")
    noise = numpyro.sample("noise", dist.HalfNormal(1.0))
    first, second = (None, None) if y is None else (y[:, 0], y[:, 1])
    with numpyro.plate("people", X.shape[0]):
        numpyro.sample("pressure", dist.Normal(X @ w, noise), obs=first)
        numpyro.sample("pulse", dist.Normal(X @ v, 1.0), obs=second)


@case("survey weights", with_another(4, 0.5, 1.5))
def weighted(X, weight, y=None):
    w = weights(X.shape[1])
    with numpyro.plate("people", X.shape[0]), numpyro.handlers.scale(scale=weight):
        numpyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)


@case("probit, an intercept and an offset", with_another(3, -1.5, 1.5))
def probit(X, offset, y=None):
    a = numpyro.sample("a", dist.Normal(0, 1))
    w = weights(X.shape[1], 0.5)
    with numpyro.plate("people", X.shape[0]):
        p = jnp.clip(jax.scipy.stats.norm.cdf(a + X @ w + offset), 1e-4, 1 - 1e-4)
        numpyro.sample("y", dist.Bernoulli(p), obs=y)


@case("times to an event", lambda rng, number: (rng.normal(size=(number, 3)),))
def times(X, y=None):
    w = weights(X.shape[1], 0.5)
    shape = numpyro.sample("shape", dist.LogNormal(0, 0.3))
    with numpyro.plate("people", X.shape[0]):
        numpyro.sample("y", dist.Weibull(jnp.exp(X @ w), shape), obs=y)


@case("an effect for each record")
def local(X, y=None):
    w = weights(X.shape[1])
    sd = numpyro.sample("sd", dist.HalfNormal(1.0))
    with numpyro.plate("people", X.shape[0]):
        effect = numpyro.sample("effect", dist.Normal(0, sd))
        numpyro.sample("y", dist.Poisson(jnp.exp(jnp.clip(X @ w + effect, -5, 5))), obs=y)


@case("a parameter to optimise")
def optimised(X, y=None):
    w = weights(X.shape[1])
    noise = numpyro.param("noise", 1.0, constraint=constraints.positive)
    with numpyro.plate("people", X.shape[0]):
        numpyro.sample("y", dist.Normal(X @ w, noise), obs=y)


def simulated(model, columns, number, seed):
    """Arguments of train and test records, their outcomes, and how a site is called."""
    rng = np.random.default_rng(seed)
    x = tuple(as_jax(c) for c in columns(rng, number + HELD_OUT))
    seeded = numpyro.handlers.seed(model, jax.random.key(int(rng.integers(2**31))))
    sites = numpyro.handlers.trace(seeded).get_trace(*x)
    found = [s["value"] for s in sites.values() if s["type"] == "sample" and is_outcome(s, x)]
    y = jnp.stack(found, axis=-1) if len(found) > 1 else found[0]
    parts = slice(number), slice(number, None)
    return [(tuple(c[p] for c in x), y[p]) for p in parts]


def as_jax(column):
    return jnp.asarray(column, jnp.int32 if column.dtype.kind == "i" else jnp.float32)


def is_outcome(site, x):
    """Whether a site was drawn to be observed: the model gives ``obs=None``, so by its plate."""
    frames = site["cond_indep_stack"]
    return any(f.size == len(x[0]) for f in frames) and site["name"] != "effect"


def base_rate(train, test):
    """Held-out mean log-likelihood of the best distribution without columns."""
    train, test = np.asarray(train, float), np.asarray(test, float)
    if train.ndim == 2:
        return sum(base_rate(a, b) for a, b in zip(train.T, test.T, strict=True))
    if np.all(train == np.round(train)):
        counts = np.bincount(train.astype(int), minlength=int(max(train.max(), test.max())) + 1) + 1
        return float(np.mean(np.log(counts / counts.sum())[test.astype(int)]))
    laws = [scipy.stats.norm(train.mean(), train.std())]
    if train.min() > 0:
        log = np.log(train)
        laws.append(scipy.stats.lognorm(log.std(), scale=np.exp(log.mean())))
        laws.append(scipy.stats.gamma(*scipy.stats.gamma.fit(train, floc=0)))
    if train.min() > 0 and train.max() < 1:
        laws.append(scipy.stats.beta(*scipy.stats.beta.fit(train, floc=0, fscale=1)))
    return max(float(np.mean(law.logpdf(test))) for law in laws)


def held_out(model, draws, x, y):
    """Mean log predictive density over draws, all outcomes of a record together."""
    each = sum(log_likelihood(model, draws, *x, y, parallel=False).values())
    return float(jnp.mean(logsumexp(each, axis=0) - jnp.log(len(each))))


def prior_figures(model, draws, x):
    """How far the posterior is from the prior, in unconstrained coordinates."""
    seeded = numpyro.handlers.seed(model, jax.random.key(0))
    sites = numpyro.handlers.trace(seeded).get_trace(*x)
    prior = Predictive(model, num_samples=4000)(jax.random.key(0), *x)
    found = []
    for name, values in draws.items():
        if name not in prior or sites[name]["type"] != "sample":
            continue
        inverse = biject_to(sites[name]["fn"].support).inv
        flat = [np.asarray(inverse(v), float).reshape(len(v), -1) for v in (values, prior[name])]
        found.append([(f.mean(0), f.std(0)) for f in flat])
    means = np.concatenate([(a[0] - b[0]) / b[1] for a, b in found])
    ratios = np.concatenate([a[1] / b[1] for a, b in found])
    return {
        "mean": float(np.sqrt(np.mean(means**2))), "largest mean": float(np.abs(means).max()),
        "sd": float(ratios.mean()), "smallest sd": float(ratios.min()),
        "largest sd": float(ratios.max()),
    }  # fmt: skip


def one(name, number, epsilon, seed):
    """Figures of one run."""
    model, columns = CASES[name]
    train, test = simulated(model, columns, number, seed)
    start = time.perf_counter()
    try:
        posterior = fit(model, *train[0], train[1], epsilon=epsilon, rng_key=jax.random.key(seed))
    except UnsupportedModelError as error:
        return {"driver": "refused", "why": str(error)}
    row = {"driver": posterior.method.split(",")[0], "notes": list(posterior.notes)}
    draws = posterior.sample(jax.random.key(1), 4000)
    row["seconds"] = time.perf_counter() - start
    try:
        few = {n: v[:DRAWS] for n, v in draws.items()}
        row["gain"] = held_out(model, few, *test) - base_rate(train[1], test[1])
    except (KeyError, ValueError, TypeError) as error:
        row["gain"] = None
        row["why"] = str(error)
    return row | prior_figures(model, draws, train[0])


def show(row):
    """Prints one run in one line."""
    numbers = {k: v for k, v in row.items() if isinstance(v, float) and k != "epsilon"}
    print(
        f"{row['model']:36s} N {row['N']:5d} eps {row['epsilon']:<5} {row['driver']:12.12s}",
        "  ".join(f"{k} {v:.3f}" for k, v in numbers.items()),
        flush=True,
    )


def main():
    parser = experiment_parser(__doc__, "three models, one seed")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--numbers", nargs="*", type=int, default=[500, 5000])
    parser.add_argument("--epsilons", nargs="*", type=float, default=[0.001, 0.5, 1.0])
    parser.add_argument("--cases", nargs="*", default=list(CASES))
    args = parser.parse_args()
    names, seeds = (args.cases[:3], 1) if args.quick else (args.cases, args.seeds)
    rows = []
    for name in names:
        for number in args.numbers:
            for epsilon in args.epsilons:
                for seed in range(seeds):
                    found = one(name, number, epsilon, seed)
                    rows.append({"model": name, "N": number, "epsilon": epsilon, **found})
                    show(rows[-1])
        jax.clear_caches()
    save(args, rows=rows)


if __name__ == "__main__":
    main()
