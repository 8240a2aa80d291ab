"""The loss of each step of a run on full batches, which no driver shows."""

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_dp.model.variational import likelihood_key

__all__ = ["exact_losses"]


def exact_losses(svi, rng_key, num_steps, *args, init_params=None):
    """Minus the evidence lower bound on all records at the iterate and draw of each step."""
    state = svi._init(rng_key, num_steps, args, {}, init_params).opened
    session = svi._session(args, {})
    rows = session.rows(args, {})
    problem = session.problem.at(rows.shared)

    @jax.jit
    def step(state):
        new, taken = session._step(state, rows)
        latents, entropy = problem.draw(taken.params, taken.rng_key)

        def of_record(example):
            return problem.log_likelihood(
                latents, taken.params, example, likelihood_key(taken.rng_key)
            )

        total = jnp.sum(jax.vmap(of_record)(rows.arrays))
        return new, -(total + problem.log_prior(latents, taken.params) + entropy)

    found = []
    for _ in range(num_steps):
        state, loss = step(state)
        found.append(float(loss))
    return np.array(found)
