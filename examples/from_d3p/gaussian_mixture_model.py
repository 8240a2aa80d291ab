"""d3p's mixture of three normals in two dimensions: 2,048 records, batches of 32.

What differs from d3p: the component of a record is a plain discrete latent, which is summed out
for you; there, model and guide compute its posterior themselves. Scales have a prior that has a
density at every positive number. Started from the prior, components may share a cluster, as in
d3p; means are started apart here, by public numbers.

    python examples/from_d3p/gaussian_mixture_model.py [--quick]
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from numpyro.infer.autoguide import AutoDiagonalNormal
from numpyro.infer.initialization import init_to_value

from numpyro_dp import DPSVI, Privacy, PrivacyBudget, secret_key
from numpyro_dp.estimators import aligned
from numpyro_dp.posterior import posterior_samples
from numpyro_dp.samplers import Poisson


def model(x, components=3):
    dim = x.shape[1]
    shares = numpyro.sample("shares", dist.Dirichlet(jnp.full(components, 0.3)))
    means = numpyro.sample("means", dist.Normal(0, 10).expand([components, dim]).to_event(2))
    scales = numpyro.sample("scales", dist.LogNormal(0, 1).expand([components]).to_event(1))
    with numpyro.plate("records", x.shape[0]):
        which = numpyro.sample("which", dist.Categorical(shares), infer={"enumerate": "parallel"})
        normal = dist.Normal(means[which], scales[which][..., None]).to_event(1)
        numpyro.sample("x", normal, obs=x)


def invented(number):
    """Three clusters; the last has twice as many records as each of the others."""
    rng = np.random.default_rng(122)
    which = np.minimum(rng.integers(0, 4, number), 2)
    means = np.array([-10.0, 10.0, -2.0])[which][:, None]
    return means + np.array([0.1**0.5, 1.0, 0.1**0.5])[which][:, None] * rng.normal(
        size=(number, 2)
    ), which


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="500 steps")
    steps = 500 if parser.parse_args().quick else 4_000
    x, which = invented(2_048)
    apart = jnp.array([[-5.0, -5.0], [5.0, 5.0], [0.0, 0.0]])
    start = init_to_value(values={"means": apart, "shares": jnp.ones(3) / 3, "scales": jnp.ones(3)})
    guide = AutoDiagonalNormal(model, init_loc_fn=start, init_scale=0.05)
    svi = DPSVI(
        model, guide, optax.adam(optax.cosine_decay_schedule(0.05, steps)), estimator=aligned(),
        clip_norm=5.0, sampler=Poisson(32 / len(x)), budget=PrivacyBudget(2.0, 1e-4),
        # First values read no record. A key of one's own repeats the run: not for real records.
        privacy=Privacy(public=[start], secret_key=secret_key(1)),
    )  # fmt: skip
    result = svi.run(jax.random.key(123), steps, jnp.asarray(x), progress_bar=False)
    draws = posterior_samples(jax.random.key(0), guide, result.params, 500)
    print(result.privacy)
    means, scales, shares = (np.mean(draws[k], axis=0) for k in ("means", "scales", "shares"))
    np.set_printoptions(precision=2, suppress=True)
    for k in range(3):
        print(f"share {shares[k]:.2f}, mean {means[k]}, sd {scales[k]:.2f}")
    distance = ((x[:, None] - means) ** 2).sum(-1)
    log_density = np.log(shares) - 2 * np.log(scales) - distance / (2 * scales**2)
    print(f"records in the right component: {np.mean(log_density.argmax(1) == which):.3f}")


if __name__ == "__main__":
    main()
