"""Private Bayesian logistic regression on Adult: who earns more than 50,000 dollars a year?

Compares non-private SVI with DPSVI, vanilla and aligned, at chosen epsilon. The reference is the
mean-field optimum itself, found without sampling: under a mean-field normal the log odds of one
record are normal, so the evidence lower bound is a one-dimensional integral per record.

    python benchmarks/dpvim/adult.py                 # epsilon 1, 400 epochs, one seed
    python benchmarks/dpvim/adult.py --seeds 5 --epsilon 1 10
    python benchmarks/dpvim/adult.py --quick         # fewer epochs, part of the test

Without the Adult data (NUMPYRO_DP_DATA names their folder), a data set bundled with scikit-learn
takes its place, and the script says so.
"""

import argparse
import json
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
    return svi.run(
        jax.random.key(seed), num_steps, data.X_train, data.y_train, progress_bar=args.progress
    )


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


def summarise(rows):
    """Mean and standard error over seeds of each score."""
    out = {}
    for key in rows[0]:
        values = np.array([row[key] for row in rows])
        error = values.std(ddof=1) / np.sqrt(len(values)) if len(values) > 1 else float("nan")
        out[key] = (float(values.mean()), float(error))
    return out


def experiment(data, args):
    """Runs every method; returns rows of (method, epsilon, scores, seconds, privacy)."""
    optimum = mean_field_optimum(data.X_train, data.y_train)
    table = [("mean-field optimum", None, summarise([score(optimum, data, optimum)]), 0.0, None)]
    num_steps = round(args.epochs / args.rate)
    start = time.perf_counter()
    rows = [
        score(run_svi(data, s, num_steps, args.learning_rate, args.rate), data, optimum)
        for s in range(args.seeds)
    ]
    table.append(("SVI", None, summarise(rows), (time.perf_counter() - start) / args.seeds, None))
    params = {"optimum": optimum}
    for epsilon in args.epsilon:
        for name in args.estimators:
            start = time.perf_counter()
            results = [run_private(data, name, epsilon, s, args) for s in range(args.seeds)]
            seconds = (time.perf_counter() - start) / args.seeds
            scores = summarise([score(r.params, data, optimum) for r in results])
            table.append((name, epsilon, scores, seconds, results[-1].privacy))
            params[f"{name}, epsilon {epsilon:g}"] = results[-1].params
    return table, params


def cell(mean, error):
    """Mean and, with several seeds, its standard error."""
    return f"{mean:.4f}" if np.isnan(error) else f"{mean:.4f} ({error:.4f})"


def show(table, data, args):
    """Prints the table."""
    print(data.source)
    print(
        f"{data.X_train.shape[0]} records, {data.X_train.shape[1]} features; {args.epochs} epochs "
        f"at sampling rate {args.rate}, clip norm {args.clip_norm}, {args.seeds} seed(s)"
        + ("; mean (standard error)" if args.seeds > 1 else "")
    )
    columns = ("log_likelihood", "accuracy", "loc_error", "scale_error")
    print(f"{'method':20s}{'epsilon':>9s}" + "".join(f"{c:>20s}" for c in columns) + "   seconds")
    for name, epsilon, scores, seconds, _ in table:
        cells = "".join(cell(*scores[column]).rjust(20) for column in columns)
        budget = "-" if epsilon is None else f"{epsilon:g}"
        print(f"{name:20s}{budget:>9s}{cells}{seconds:>10.1f}")
    for name, epsilon, _, _, privacy in table:
        if privacy is not None:
            print(f"\n{name}, epsilon {epsilon:g}:\n{privacy}")


def draw(params, path):
    """Scatter plots of private against optimal location and scale."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = [name for name in params if name != "optimum"]
    figure, axes = plt.subplots(2, len(names), figsize=(3.4 * len(names), 6.4), squeeze=False)
    titles = {"auto_loc": "posterior mean", "auto_scale": "posterior sd"}
    for column, name in enumerate(names):
        for row, (entry, title) in enumerate(titles.items()):
            axis = axes[row, column]
            x, y = np.asarray(params["optimum"][entry]), np.asarray(params[name][entry])
            low, high = min(x.min(), y.min()), max(x.max(), y.max())
            axis.plot([low, high], [low, high], color="0.6", linewidth=1)
            axis.scatter(x, y, s=9, alpha=0.7)
            axis.set(xlabel=f"{title}, optimum", ylabel=f"{title}, private", title=name)
    figure.tight_layout()
    figure.savefig(path, dpi=200)
    print(f"\nfigure: {path}")


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epsilon", type=float, nargs="+", default=[1.0])
    parser.add_argument("--epochs", type=float, default=400)
    parser.add_argument("--rate", type=float, default=0.01, help="sampling rate per step")
    parser.add_argument("--clip-norm", type=float, default=2.0)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument(
        "--estimators", nargs="+", choices=list(ESTIMATORS), default=list(ESTIMATORS)
    )
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--design", choices=("public", "paper"), default="public")
    parser.add_argument("--figure", default="adult.png")
    parser.add_argument("--json", help="also write the table to this file")
    parser.add_argument("--progress", action="store_true", help="show a progress bar")
    parser.add_argument("--quick", action="store_true", help="40 epochs and one seed")
    args = parser.parse_args()
    if args.quick:
        args.epochs, args.seeds = 40, 1
    return args


def main():
    args = parse_args()
    data = load_adult("paper") if args.design == "paper" else load_adult_or_bundled()
    table, params = experiment(data, args)
    show(table, data, args)
    draw(params, args.figure)
    if args.json:
        rows = [
            {"method": n, "epsilon": e, "scores": s, "seconds": t, "spent": p and p.epsilon}
            for n, e, s, t, p in table
        ]
        settings = {
            key: value for key, value in vars(args).items() if key not in ("figure", "json")
        }
        pathlib.Path(args.json).write_text(
            json.dumps({"settings": settings, "rows": rows}, indent=1)
        )


if __name__ == "__main__":
    main()
