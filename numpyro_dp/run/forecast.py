r"""How far the noise of privacy will move a posterior, before the run.

A clipped score has norm at most C. So the records have at most the information :math:`N C^2` about
all d latents together, in the sum over orthogonal directions. With inclusion probability q, the
mean score of T steps has noise of standard deviation :math:`\sigma C / (q \sqrt T)` in a direction.
Without the prior, the noise moves the optimum in a direction of information I by
:math:`\sigma C / (q \sqrt T I)`, and its standard deviation without noise is :math:`I^{-1/2}`. The
root mean square of the ratios is at least

.. math:: r = \sigma \sqrt{d / (q^2 T N)},

whatever the clip norm. It is reached if all directions have the same information, all scores have
the clip norm, and the curvature is known. :func:`~numpyro_dp.posterior.rehearse` shows what a run
really gives.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from numpyro_dp.privacy.plan import Plan

__all__ = ["Forecast", "forecast"]


class Forecast(NamedTuple):
    """What the noise of a run will do at best. It prints as a few lines.

    Attributes:
        num_examples: Number of records N.
        num_latents: Number of latents d, in unconstrained coordinates.
        noise_multiplier: Standard deviation of the noise of a step, over the sensitivity.
        noise: How far the noise moves a latent, in standard deviations of the posterior without
            noise. A root mean square, and the smallest one that is possible.

    Example:
        >>> Forecast(num_examples=1000, num_latents=2, noise_multiplier=5.0, noise=0.75).width
        1.25
    """

    num_examples: int
    num_latents: int
    noise_multiplier: float
    noise: float

    @property
    def width(self) -> float:
        """Standard deviation of the posterior with noise over the one without, at best."""
        return math.sqrt(1 + self.noise**2)

    def __str__(self) -> str:
        """The figures, and what they mean."""
        if self.noise < 0.5:
            verdict = "The noise matters less than the number of records."
        elif self.noise < 3:
            verdict = "The noise matters as much as the number of records."
        else:
            verdict = (
                "The noise decides. Expect wide intervals, or the prior. More records, a larger "
                "epsilon or fewer latents would tell more."
            )
        return (
            f"{self.num_latents} latents, {self.num_examples} records, noise multiplier "
            f"{self.noise_multiplier:.4g}.\nAt best, the noise moves a latent by {self.noise:.2g} "
            f"posterior standard deviations, and intervals are {self.width:.2f} times as wide as "
            f"without privacy.\n{verdict}"
        )

    __repr__ = __str__


def forecast(plan: Plan, num_latents: int, counted_steps: float) -> Forecast:
    """Returns the forecast of a run in which ``counted_steps`` steps decide the posterior."""
    number, noise = plan.num_examples, plan.noise_multiplier
    prob = plan.sampler.inclusion_prob(number)
    moved = noise * math.sqrt(num_latents / (counted_steps * number)) / prob
    return Forecast(number, num_latents, noise, moved)
