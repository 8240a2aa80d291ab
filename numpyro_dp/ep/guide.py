"""The posterior of message passing as a NumPyro guide: for ``Predictive``, summaries and ArviZ."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from jax import Array

from numpyro_dp.ep.problem import PREFIX, EPProblem

__all__ = ["PosteriorGuide"]


class PosteriorGuide:
    """Draws the model's latent sites from the family, at natural parameters given by name.

    A run sets it up; then ``Predictive(model, guide=guide, params=result.params, ...)`` works as
    with an automatic guide.

    Attributes:
        prototype_trace: The problem of the last run, ``None`` before.
    """

    def __init__(self) -> None:
        self.prototype_trace: EPProblem | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, Array]:
        """Draws the latent sites; the arguments play no part."""
        problem = self.prototype_trace
        if problem is None:
            raise ValueError(
                "Expected run to have been called before the guide: it does not know the model."
            )
        natural = {}
        for name, value in problem.prior.items():
            natural[name] = numpyro.param(PREFIX + name, value)
            if jnp.shape(natural[name]) != jnp.shape(value):
                raise ValueError(
                    f"Expected {PREFIX + name} of shape {jnp.shape(value)}, that of the driver's "
                    f"last run, got {jnp.shape(natural[name])}. Use a driver for each data set."
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
