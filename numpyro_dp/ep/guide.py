"""The posterior of message passing as a NumPyro guide, for ``Predictive``, summaries and ArviZ."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from jax import Array

from numpyro_dp.ep.problem import PREFIX, EPProblem

__all__ = ["PosteriorGuide"]


class PosteriorGuide:
    """Draws the model's latent sites from the family at given natural parameters.

    After a run, ``Predictive(model, guide=guide, params=result.params, ...)`` works as with an
    automatic guide.

    Attributes:
        prototype_trace: The problem of the last run, ``None`` before the first run.
    """

    def __init__(self) -> None:
        self.prototype_trace: EPProblem | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, Array]:
        """Draws the latent sites. Ignores the arguments."""
        problem = self.prototype_trace
        if problem is None:
            raise ValueError(
                "The guide does not know the latent sites before the first run. Call run first."
            )
        natural = {}
        for name, value in problem.prior.items():
            natural[name] = numpyro.param(PREFIX + name, value)
            if jnp.shape(natural[name]) != jnp.shape(value):
                raise ValueError(
                    f"Expected {PREFIX + name} of shape {jnp.shape(value)}, as in the last run of "
                    f"the driver, got {jnp.shape(natural[name])}. Use one driver per data set."
                )
        found = problem.latents.family.to_dist(natural)
        if not problem.latents.is_normal:
            return {name: numpyro.sample(name, each) for name, each in found.items()}
        joint = numpyro.sample("_joint_latent", found, infer={"is_auxiliary": True})
        values = problem.latents.constrain(joint)
        events = {name: value.ndim for name, value in values.items()}
        return {
            name: numpyro.sample(name, dist.Delta(value, event_dim=events[name]))
            for name, value in values.items()
        }
