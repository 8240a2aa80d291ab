"""Private Bayesian logistic regression on Adult: who earns more than 50,000 dollars a year?

Compares non-private SVI with DPSVI, vanilla and aligned, at chosen epsilon. The reference is the
mean-field optimum itself, found without sampling: under a mean-field normal the log odds of one
record are normal, so the evidence lower bound is a one-dimensional integral per record.

    python benchmarks/dpvim/adult.py                 # epsilon 1, 400 epochs, one seed
    python benchmarks/dpvim/adult.py --seeds 5 --epsilon 1 10
    python benchmarks/dpvim/adult.py --quick         # fewer epochs

Without the Adult data (NUMPYRO_DP_DATA names their folder), a data set bundled with scikit-learn
takes its place, and the script says so.
"""

import pathlib
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoDiagonalNormal
from numpyro.infer.initialization import init_to_mean
from scipy.optimize import minimize

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from common import average_row, experiment_parser, panels, save
from datasets import load_adult, load_adult_or_bundled

from numpyro_dp import DPSVI, PrivacyBudget
from numpyro_dp.estimators import aligned, vanilla
from numpyro_dp.samplers import Poisson

ESTIMATORS = {"vanilla": vanilla, "aligned": aligned}


def model(features, label=None):
    """Logistic regression with a standard normal prior (Jälkö et al. 2024, appendix G.2)."""
    weights = numpyro.sample("w", dist.Normal(0, 1).expand([features.shape[1]]).to_event(1))
    with numpyro.plate("records", features.shape[0]):
        numpyro.sample("label", dist.Bernoulli(logits=features @ weights), obs=label)


def make_guide():
    """A mean-field normal guide that starts at the prior's mean and standard deviation."""
    return AutoDiagonalNormal(model, init_loc_fn=init_to_mean, init_scale=1.0)


def mean_field_optimum(features, label):
    """Location and scale of the mean-field optimum, by Gauss-Hermite quadrature and L-BFGS."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(32)
    nodes, weights = jnp.asarray(nodes), jnp.asarray(weights / weights.sum())
    sign = jnp.asarray(2.0 * label - 1)
    dim = features.shape[1]

    @jax.jit
    def negative_elbo(flat):
        loc, log_scale = flat[:dim], flat[dim:]
        variance = jnp.exp(2 * log_scale)
        mean, sd = features @ loc, jnp.sqrt(jnp.square(features) @ variance)
        log_likelihood = jax.nn.log_sigmoid(sign[:, None] * (mean[:, None] + sd[:, None] * nodes))
        prior = -0.5 * jnp.sum(jnp.square(loc) + variance)
        return -(jnp.sum(log_likelihood @ weights) + prior + jnp.sum(log_scale))

    grad = jax.jit(jax.value_and_grad(negative_elbo))

    def objective(flat):
        value, gradient = grad(jnp.asarray(flat, jnp.float32))
        return float(value), np.asarray(gradient, np.float64)

    start = np.concatenate([np.zeros(dim), np.full(dim, -2.0)])
    options = {"maxiter": 500, "ftol": 1e-10, "gtol": 1e-3}
    best = minimize(objective, start, jac=True, method="L-BFGS-B", options=options).x
    return {"auto_loc": best[:dim], "auto_scale": np.exp(best[dim:])}


def run_svi(data, seed, num_steps, learning_rate, rate):
    """Non-private SVI on minibatches, in one compiled scan."""
    features, label = data.X_train, data.y_train
    num_examples = features.shape[0]

    def batch_model(x, y):
        weights = numpyro.sample("w", dist.Normal(0, 1).expand([x.shape[1]]).to_event(1))
        with numpyro.plate("records", num_examples, subsample_size=x.shape[0]):
            numpyro.sample("label", dist.Bernoulli(logits=x @ weights), obs=y)

    svi = SVI(batch_model, make_guide(), optax.adam(learning_rate), Trace_ELBO())
    size = max(1, round(rate * num_examples))
    state = svi.init(jax.random.key(seed), features[:size], label[:size])

    @jax.jit
    def train(state, features, label):
        def step(state, key):
            rows = jax.random.randint(key, (size,), 0, num_examples)
            return svi.update(state, features[rows], label[rows])[0], None

        return jax.lax.scan(step, state, jax.random.split(jax.random.key(seed), num_steps))[0]

    return svi.get_params(train(state, jnp.asarray(features), jnp.asarray(label)))


def adult_svi(estimator, clip_norm, step_size, num_examples, epsilon=1.0, rate=0.01):
    """DPSVI with Adam on Poisson batches and delta = 1 / N, for several benchmarks."""
    return DPSVI(
        model,
        make_guide(),
        optax.adam(step_size),
        estimator=estimator,
        clip_norm=clip_norm,
        sampler=Poisson(rate),
        budget=PrivacyBudget(epsilon=epsilon, delta=1 / num_examples),
    )


def run_private(data, name, epsilon, seed, args):
    """DPSVI; returns the result of the run."""
    num_examples = data.X_train.shape[0]
    svi = adult_svi(
        ESTIMATORS[name](), args.clip_norm, args.learning_rate, num_examples, epsilon, args.rate
    )
    num_steps = round(args.epochs / args.rate)
    features, label = data.X_train, data.y_train
    return svi.run(jax.random.key(seed), num_steps, features, label, progress_bar=False)


def score(params, data, optimum):
    """Held-out log-likelihood and accuracy of the predictive, and distances to the optimum."""
    loc, scale = (np.asarray(params[name], np.float64) for name in ("auto_loc", "auto_scale"))
    features, label = np.asarray(data.X_test, np.float64), np.asarray(data.y_test)
    nodes, weights = np.polynomial.hermite_e.hermegauss(32)
    mean, sd = features @ loc, np.sqrt(features**2 @ scale**2)
    odds = mean[:, None] + sd[:, None] * nodes
    prob = (1 / (1 + np.exp(-odds))) @ (weights / weights.sum())
    prob = np.clip(prob, 1e-12, 1 - 1e-12)
    return {
        "log_likelihood": float(np.mean(np.where(label == 1, np.log(prob), np.log1p(-prob)))),
        "accuracy": float(np.mean((prob > 0.5) == (label == 1))),
        "loc_error": float(np.linalg.norm(loc - optimum["auto_loc"])),
        "scale_error": float(np.linalg.norm(scale - optimum["auto_scale"])),
    }


def experiment(data, args):
    """Runs every method: a row for each, and the parameters of the last seed."""
    optimum = mean_field_optimum(data.X_train, data.y_train)
    num_steps = round(args.epochs / args.rate)
    rows, params = [], {"optimum": optimum}

    def add(name, epsilon, seeds, run):
        start = time.perf_counter()
        found = [run(seed) for seed in range(seeds)]
        seconds = (time.perf_counter() - start) / seeds
        row = {"method": name, "epsilon": epsilon, "seconds": seconds}
        row |= average_row([score(each, data, optimum) for each in found])
        rows.append(row)
        print({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
        return found[-1]

    add("mean-field optimum", "not private", 1, lambda _: optimum)
    add(
        "SVI, minibatches", "not private", args.seeds,
        lambda seed: run_svi(data, seed, num_steps, args.learning_rate, args.rate),
    )  # fmt: skip
    for epsilon in args.epsilon:
        for name in args.estimators:
            label = f"{name}, epsilon {epsilon:g}"
            params[label] = add(
                name, epsilon, args.seeds,
                lambda seed, name=name, epsilon=epsilon: run_private(
                    data, name, epsilon, seed, args
                ).params,
            )  # fmt: skip
    return rows, params


def draw(params, path):
    """Private against optimal means and standard deviations, a column for each run."""
    names = [name for name in params if name != "optimum"]
    size = (3.4 * len(names), 6.4)
    with panels(path, len(names), 2, size, sharex="row", sharey="row") as axes:
        titles = {"auto_loc": "posterior mean", "auto_scale": "posterior sd"}
        for row, (entry, title) in zip(axes, titles.items(), strict=True):
            for axis, name in zip(row, names, strict=True):
                x, y = np.asarray(params["optimum"][entry]), np.asarray(params[name][entry])
                axis.axline((0, 0), slope=1, color="0.6", linewidth=1)
                axis.scatter(x, y, s=9, alpha=0.7)
                axis.set(xlabel=f"{title}, optimum", ylabel=f"{title}, private", title=name)


def main():
    parser = experiment_parser(__doc__, "40 epochs and one seed")
    parser.add_argument("--epsilon", type=float, nargs="+", default=[1.0])
    parser.add_argument("--epochs", type=float, default=400)
    parser.add_argument("--rate", type=float, default=0.01, help="sampling rate per step")
    parser.add_argument("--clip-norm", type=float, default=2.0)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--estimators", nargs="+", choices=ESTIMATORS, default=list(ESTIMATORS))
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--design", choices=("public", "paper"), default="public")
    args = parser.parse_args()
    if args.quick:
        args.epochs, args.seeds = 40, 1
    data = load_adult("paper") if args.design == "paper" else load_adult_or_bundled()
    print(f"{data.source}: {data.X_train.shape[0]} records, {data.X_train.shape[1]} columns")
    rows, params = experiment(data, args)
    if args.figure:
        draw(params, args.figure)
    save(args, source=data.source, rows=rows)


if __name__ == "__main__":
    main()
