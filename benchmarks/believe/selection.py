"""Does a private log score find the right model?

Each set has records of one of two models, and ``select`` compares them. "right" is how often it
chooses the model that the records come from, and "told" how often the interval of the difference
is below 0 for the other one. "without privacy" is the share of right choices on the same halves by
posteriors with next to no noise. Coverage is that of the expected difference of the same
posteriors, with the same clip, from 50,000 further records, by 90 % intervals.

    python benchmarks/believe/selection.py --json selection.json
"""

import pathlib
import sys
import warnings

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from common import experiment_parser, save

from numpyro_dp import PrivacyBudget, select

FURTHER = 50_000


def latents(number):
    return numpyro.sample("w", dist.Normal(0, 1).expand([number]).to_event(1))


def observed(likelihood, x, y):
    with numpyro.plate("records", x.shape[0]):
        numpyro.sample("y", likelihood, obs=y)


def poisson(x, y=None):
    observed(dist.Poisson(jnp.exp(x @ latents(4))), x, y)


def negative_binomial(x, y=None):
    rate, k = jnp.exp(x @ latents(4)), numpyro.sample("k", dist.Gamma(2, 0.5))
    observed(dist.NegativeBinomial2(rate, k), x, y)


def straight(x, y=None):
    observed(dist.Normal(x @ latents(4), numpyro.sample("s", dist.HalfNormal(2))), x, y)


def curved(x, y=None):
    centre = jnp.column_stack([x, x[:, 1] ** 2]) @ latents(5)
    observed(dist.Normal(centre, numpyro.sample("s", dist.HalfNormal(2))), x, y)


def heavy(x, y=None):
    scale = numpyro.sample("s", dist.HalfNormal(2))
    observed(dist.StudentT(4.0, x @ latents(4), scale), x, y)


def alone(x, y=None):
    observed(dist.Bernoulli(logits=x @ latents(4)), x, y)


def together(x, y=None):
    logits = jnp.column_stack([x, x[:, 1] * x[:, 2]]) @ latents(5)
    observed(dist.Bernoulli(logits=logits), x, y)


W = [0.3, 0.3, -0.2, 0.1]
# The right model, the other one, and true latents.
CELLS = [
    (negative_binomial, poisson, {"w": W, "k": 3.0}),
    (poisson, negative_binomial, {"w": W}),
    (curved, straight, {"w": [*W, 0.15], "s": 1.0}),
    (heavy, straight, {"w": W, "s": 1.0}),
    (straight, heavy, {"w": W, "s": 1.0}),
    (together, alone, {"w": [*W, 0.4]}),
]


def drawn(model, truth, number, seed):
    """Columns and outcomes of a model with these latents."""
    x = np.random.default_rng(seed).normal(size=(number, 4)).astype("f4")
    x[:, 0] = 1.0
    given = {name: jnp.asarray(value) for name, value in truth.items()}
    fixed = numpyro.handlers.seed(numpyro.handlers.substitute(model, given), jax.random.key(seed))
    return x, np.asarray(numpyro.handlers.trace(fixed).get_trace(x)["y"]["value"])


def log_scores(model, posterior, args):
    """Log score of each record, by draws from a posterior."""

    def one(draw):
        fixed = numpyro.handlers.substitute(model, draw)
        site = numpyro.handlers.trace(fixed).get_trace(*args)["y"]
        return site["fn"].log_prob(site["value"])

    draws = posterior.sample(jax.random.key(9), 100)
    return np.asarray(jax.nn.logsumexp(jax.lax.map(one, draws), axis=0)) - np.log(100)


def one(right, other, truth, number, epsilon, seed):
    args = drawn(right, truth, number, seed)
    models = {each.__name__: each for each in (right, other)}
    budget = PrivacyBudget(epsilon, number**-1.1)
    found = select(models, *args, budget=budget, rng_key=jax.random.key(seed))
    loud = select(models, *args, budget=PrivacyBudget(1e4, 1e-2), rng_key=jax.random.key(seed))
    further = drawn(right, truth, FURTHER, 1000 + seed)
    left = [log_scores(m, found.posteriors[n], further) for n, m in models.items()]
    score, error = found.scores[other.__name__], found.errors[other.__name__]
    best = found.best == right.__name__
    if not best:  # as the difference of the right model from the other
        score, error = -found.scores[right.__name__], found.errors[right.__name__]
    expected = found.records * np.mean(np.clip(left[1] - left[0], -found.clip, found.clip))
    return {
        "right": best, "told": score + 1.645 * error < 0, "clip": found.clip,
        "without privacy": loud.best == right.__name__, "difference": -score, "error": error,
        "coverage": abs(score - expected) < 1.645 * error,
    }  # fmt: skip


def main():
    parser = experiment_parser(__doc__, "2 cells, 1 set")
    parser.add_argument("--sets", type=int, default=20)
    parser.add_argument("--records", type=int, default=5000)
    parser.add_argument("--epsilons", nargs="*", type=float, default=[1.0])
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    rows = []
    for right, other, truth in CELLS[:2] if args.quick else CELLS:
        for epsilon in args.epsilons:
            seeds = range(1 if args.quick else args.sets)
            sets = [one(right, other, truth, args.records, epsilon, seed) for seed in seeds]
            row = {"right model": right.__name__, "other model": other.__name__}
            row |= {"records": args.records, "epsilon": epsilon, "sets": len(sets)}
            row |= {name: float(np.mean([each[name] for each in sets])) for name in sets[0]}
            rows.append(row)
            print(row, flush=True)
    save(args, rows=rows)


if __name__ == "__main__":
    main()
