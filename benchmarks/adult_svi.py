"""`DPSVI` on the logistic regression of `benchmarks/dpvim/adult.py`, for several benchmarks."""

import pathlib
import sys

import optax

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "examples"))

from adult import make_guide, mean_field_optimum, model, score, summarise

from numpyro_dp import DPSVI, PrivacyBudget
from numpyro_dp.samplers import Poisson

__all__ = ["adult_svi", "mean_field_optimum", "score", "summarise"]


def adult_svi(estimator, clip_norm, step_size, num_examples, epsilon=1.0, rate=0.01):
    """Adam on Poisson batches, delta = 1/N, add or remove one."""
    return DPSVI(
        model,
        make_guide(),
        optax.adam(step_size),
        estimator=estimator,
        clip_norm=clip_norm,
        sampler=Poisson(rate),
        budget=PrivacyBudget(epsilon=epsilon, delta=1 / num_examples),
    )
