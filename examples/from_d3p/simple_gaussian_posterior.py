"""d3p's simple Gaussian posterior: the mean of 10,000 records in 4 dimensions, batches of 100.

What differs from d3p: its guide starts from the exact posterior of the records, which would give
them away and is refused here: a guide sees no record. Ours starts at 0; the exact
posterior is for comparison alone.

    python examples/from_d3p/simple_gaussian_posterior.py [--quick]
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from numpyro.distributions import constraints

from numpyro_dp import DPSVI, Privacy, PrivacyBudget, secret_key
from numpyro_dp.estimators import aligned
from numpyro_dp.samplers import Poisson

SCALE = 0.1  # of the records


def model(x):
    mean = numpyro.sample("mu", dist.Normal(0, 1).expand([x.shape[1]]).to_event(1))
    with numpyro.plate("records", x.shape[0]):
        numpyro.sample("x", dist.Normal(mean, SCALE).to_event(1), obs=x)


def guide(x):
    loc = numpyro.param("mu_loc", jnp.zeros(x.shape[1]))
    scale = numpyro.param("mu_scale", jnp.full(x.shape[1], 0.02), constraint=constraints.positive)
    numpyro.sample("mu", dist.Normal(loc, scale).to_event(1))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="500 steps")
    steps = 500 if parser.parse_args().quick else 4_000
    x = 1 + SCALE * np.random.default_rng(54795).normal(size=(10_000, 4))
    svi = DPSVI(
        model, guide, optax.adam(optax.exponential_decay(0.1, steps, 1e-3)), estimator=aligned(),
        clip_norm=20.0, sampler=Poisson(100 / len(x)), budget=PrivacyBudget(1.0, 1e-5),
        privacy=Privacy(secret_key=secret_key(1)),  # to repeat it; not for real records
    )  # fmt: skip
    result = svi.run(jax.random.key(1234), steps, jnp.asarray(x), progress_bar=False)
    precision = 1 + len(x) / SCALE**2
    exact = x.sum(0) / SCALE**2 / precision
    print(result.privacy)
    np.set_printoptions(precision=5, suppress=True)
    print("private: mean", result.params["mu_loc"], "sd", result.params["mu_scale"])
    print("exact:   mean", exact, f"sd {precision**-0.5:.5f}")


if __name__ == "__main__":
    main()
