"""d3p's logistic regression: 10,000 records of 4 features, batches of 200, a guide by hand.

What differs from d3p: no batches are fetched (the driver draws them), the plate has the size of
the data, the guide's scales have a constraint instead of an exponential, and the budget is given
instead of the noise. The step size is larger than there: 3,000 steps instead of 30,000.

    python examples/from_d3p/logistic_regression.py [--quick]
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from numpyro.distributions import constraints
from numpyro.infer import Predictive

from numpyro_dp import DPSVI, Privacy, PrivacyBudget, secret_key
from numpyro_dp.estimators import aligned
from numpyro_dp.samplers import Poisson


def model(features, label=None):
    weights = numpyro.sample("w", dist.Normal(0, 1).expand([features.shape[1]]).to_event(1))
    intercept = numpyro.sample("intercept", dist.Normal(0, 1))
    with numpyro.plate("records", features.shape[0]):
        logits = features @ weights + intercept
        numpyro.sample("label", dist.Bernoulli(logits=logits), obs=label)


def guide(features, label=None):
    dim = features.shape[1]
    for name, shape in (("w", (dim,)), ("intercept", ())):
        loc = numpyro.param(f"{name}_loc", jnp.zeros(shape))
        scale = numpyro.param(f"{name}_scale", jnp.ones(shape), constraint=constraints.positive)
        numpyro.sample(name, dist.Normal(loc, scale).to_event(len(shape)))


def invented(number, dim):
    rng = np.random.default_rng(123)
    weights, intercept = rng.normal(size=dim), rng.normal()
    features = rng.normal(size=(number, dim))
    label = rng.random(number) < 1 / (1 + np.exp(-(features @ weights + intercept)))
    return jnp.asarray(features), jnp.asarray(label.astype(int)), weights, intercept


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="300 steps")
    steps = 300 if parser.parse_args().quick else 3_000
    features, label, weights, intercept = invented(10_000, 4)
    svi = DPSVI(
        model, guide, optax.adam(optax.cosine_decay_schedule(0.05, steps)), estimator=aligned(),
        clip_norm=3.0, sampler=Poisson(200 / len(label)), budget=PrivacyBudget(1.0, 1e-5),
        privacy=Privacy(secret_key=secret_key(1)),  # to repeat it; not for real records
    )  # fmt: skip
    result = svi.run(jax.random.key(123), steps, features, label, progress_bar=False)
    params = result.params
    print(result.privacy)
    np.set_printoptions(precision=2, suppress=True)
    print("w", params["w_loc"], "true", weights)
    print(f"intercept {params['intercept_loc']:.2f} true {intercept:.2f}")
    draws = Predictive(model, guide=guide, params=params, num_samples=100)(
        jax.random.key(1), features
    )
    own = {"w": jnp.asarray(weights), "intercept": jnp.asarray(intercept)}
    best = Predictive(model, {k: v[None] for k, v in own.items()})(jax.random.key(2), features)
    print(f"accuracy of draws: {np.mean(draws['label'] == label):.3f}, with the true parameters "
          f"{np.mean(best['label'] == label):.3f}")  # fmt: skip


if __name__ == "__main__":
    main()
