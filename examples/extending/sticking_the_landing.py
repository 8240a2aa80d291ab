"""Sticking the landing: aligned gradients of less variance at the optimum (Roeder et al. 2017).

The gradient of the evidence lower bound at a draw z(phi) has two parts: one through the draw, and
the score of q at a fixed z, whose mean is 0. The estimator leaves the second part out:

    d/dphi [log p(x, z(phi)) - log q(z(phi); phi held fixed)].

Where q is the posterior itself, this gradient is 0 for every draw. The records enter as in
``aligned``: each sends its gradient with respect to z, so privacy costs the same.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from numpyro_dp.core import Estimator, Released
from numpyro_dp.estimators import aligned


def sticking_the_landing():
    """Returns what ``DPSVI(estimator=...)`` takes; for every guide whose density can be found.

    Guarantee:
        The signal is that of ``aligned``; ``pull_back`` reads no record.
    """

    def build(problem) -> Estimator:
        base = aligned()(problem)

        def pull_back(public, released: Released):
            # The slope of log q along the draw takes the place of the entropy.
            slope = jax.grad(problem.log_density)(public.latents, public.params)
            along = {site: released.total[site] - slope[site] for site in slope}
            gradient = base.pull_back(public, released._replace(total=released.total | along))
            still = jax.tree.map(jnp.zeros_like, public.latents)
            (entropy,) = public.vjp((still, jnp.ones_like(public.entropy)))
            return jax.tree.map(jnp.add, gradient, entropy)

        return base._replace(pull_back=pull_back)

    return build
