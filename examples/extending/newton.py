"""A driver of your own that reads a NumPyro model and ends in a posterior: noisy Newton steps.

Each step releases the sum of the records' scores and curvatures at the same point. The sums say
where to go next, and all of them together say how sure that is.

    python examples/extending/newton.py
    python examples/extending/newton.py --quick
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax.flatten_util import ravel_pytree
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoDelta

from numpyro_dp import Privacy, PrivacyBudget
from numpyro_dp.core import Estimator, Observation
from numpyro_dp.extend import (
    Driver,
    Frontend,
    Method,
    ModelSource,
    OutcomeModel,
    RunSettings,
    centring,
    posterior_of_scores,
    read_outcomes,
)
from numpyro_dp.samplers import FullBatch


def newton(problem):
    """Score and curvature of a record. ``problem`` is an ``extend.VariationalProblem``."""
    outcomes = read_outcomes(problem.model, problem.shared)
    rows, columns = np.triu_indices(outcomes.size)
    # Of a symmetric matrix the upper triangle is enough. With these weights its norm is the same.
    weights = np.where(rows == columns, 1.0, np.sqrt(2.0)).astype("f4")

    def prepare(rng_key, params):  # reads no record
        point, _ = problem.draw(params, rng_key)  # of AutoDelta: the latents, unconstrained
        return point

    def signal_of(model):
        def signal(point, example):  # one record
            flat, unravel = ravel_pytree(point)

            def log_likelihood(z):
                return model.log_likelihood(unravel(z), {}, example, problem.shared)

            curvature = -jax.hessian(log_likelihood)(flat)
            return {
                "score": jax.grad(log_likelihood)(flat),
                "curvature": weights * curvature[rows, columns],
            }

        return signal

    def curvature_of(released):
        half = jnp.zeros((outcomes.size,) * 2)
        half = half.at[rows, columns].set(released.total["curvature"] / weights)
        return half + jnp.triu(half, 1).T

    def pull_back(point, released):  # no record; the optimiser subtracts what this returns
        flat, unravel = ravel_pytree(point)

        def log_prior(z):
            return problem.log_prior(unravel(z), {})

        values, axes = jnp.linalg.eigh(curvature_of(released) - jax.hessian(log_prior)(flat))
        values = jnp.maximum(values, 5 * released.noise_scale)  # noise has negative ones
        slope = released.total["score"] + jax.grad(log_prior)(flat)
        step = axes @ ((axes.T @ slope) / values)
        return {f"{name}_auto_loc": -part for name, part in unravel(step).items()}

    def observe(point, released):  # no record; from this the posterior is decoded
        flat, _ = ravel_pytree(point)
        noise = released.noise_scale
        score, curvature = released.total["score"], curvature_of(released)
        return Observation(flat, None, score, noise * jnp.ones(flat.size), curvature, noise)

    plain = Estimator(prepare, signal_of(problem.model), pull_back, observe=observe)
    # With the other outcomes that a record could have had, clipping does not bias the fit.
    other = plain._replace(signal=signal_of(OutcomeModel(problem.model)))
    return plain._replace(
        centring=centring(outcomes, other, lambda point: point)._replace(scaled=True)
    )


class PrivateNewton(Driver):
    """Newton steps for a model with discrete outcomes, such as classes or yes and no.

    Guarantee:
        Each step is the Gaussian mechanism on a sum of clipped signals of one record each. Points,
        steps and the posterior read what was released before.
    """

    def __init__(self, model, privacy=None, **settings):
        privacy = privacy or Privacy()
        optim = numpyro.optim.SGD(0.5)
        svi = SVI(model, AutoDelta(model), optim, Trace_ELBO())
        self._frontend = Frontend(privacy.given_model(model, {}), svi)
        super().__init__(Method(newton, optim), RunSettings(privacy=privacy, **settings))

    def structure(self, args, kwargs):  # which arguments hold records
        return self._frontend.given.structure(args, kwargs)

    def prepare(self, structure, rng_key, call):  # the problem, and first values
        return self._frontend.prepare(structure, rng_key, call)

    def posterior_of(self, problem, result, plain):
        if plain:
            raise ValueError("PrivateNewton has no posterior without the noise. Use `posterior`.")
        source = ModelSource.of(problem.model, problem.shared, {})
        return posterior_of_scores(source, problem, result, "Newton steps", unbiased=True)


def model(x, y=None):
    w = numpyro.sample("w", dist.Normal(0, 2).expand([3]).to_event(1))
    with numpyro.plate("records", x.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=x @ w), obs=y)


def main():
    number = 3_000 if "--quick" in sys.argv else 30_000
    x = jax.random.normal(jax.random.key(1), (number, 3))
    truth = jnp.array([1.0, -0.7, 0.2])
    y = jax.random.bernoulli(jax.random.key(2), jax.nn.sigmoid(x @ truth)) * 1
    driver = PrivateNewton(
        model, clip_norm=1.0, sampler=FullBatch(), budget=PrivacyBudget(1.0, 1e-6)
    )
    result = driver.run(jax.random.key(0), 40, x, y, progress_bar=False)
    print(result.posterior)
    found = result.posterior.summary(prob=0.99)["w"]
    assert np.all((found["lower"] < truth) & (truth < found["upper"]))


if __name__ == "__main__":
    main()
