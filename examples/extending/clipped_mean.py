"""A driver of your own: the mean of columns, by noisy steps towards it.

Each step releases the sum of the clipped distances x_i - m over a batch. Then m moves a part of the
way. So records that are far from the first guess are clipped in the first steps alone.

    python examples/extending/clipped_mean.py
    python examples/extending/clipped_mean.py --quick
"""

import sys

import jax
import jax.numpy as jnp
import numpyro

from numpyro_dp import PrivacyBudget
from numpyro_dp.core import Estimator
from numpyro_dp.extend import Driver, Method, Prepared, RecordsProblem, RunSettings, read_records
from numpyro_dp.samplers import Poisson


def distance(problem):
    """The signal of one record is its distance from the mean so far; ``pull_back`` reads none."""

    def signal(mean, example):
        return {"mean": example[0] - mean["mean"]}

    def pull_back(mean, released):
        # An optimiser descends: it takes the slope of the squared distance to all records.
        return {"mean": -released.total["mean"] / problem.num_examples}

    return Estimator(lambda rng_key, params: params, signal, pull_back)


class ClippedMean(Driver):
    """Finds the mean of the columns of an array of shape (records, columns).

    Guarantee:
        Each step is the Gaussian mechanism on a sum of clipped distances of one record each.
        Everything else reads what was released before. The number of records is public.
    """

    def __init__(self, step_size, **settings):
        # A clip norm, a sampler and a budget, and privacy= and execution= as for all drivers.
        method = Method(distance, numpyro.optim.SGD(step_size))
        super().__init__(method, RunSettings(**settings))

    def structure(self, args, kwargs):
        (x,) = args
        return read_records(lambda x: None, args, kwargs, len(x))

    def prepare(self, structure, rng_key, call):
        columns = structure.layout.shapes[0][0]
        first = call.init_params or {"mean": jnp.zeros(columns)}
        return Prepared(RecordsProblem(structure), self.method.optim.init(first), rng_key)


def main():
    number = 2_000 if "--quick" in sys.argv else 50_000
    x = jnp.array([1.0, -2.0]) + jax.random.normal(jax.random.key(1), (number, 2))
    driver = ClippedMean(0.2, clip_norm=3.0, sampler=Poisson(0.2), budget=PrivacyBudget(1.0))
    result = driver.run(jax.random.key(0), 100, x, progress_bar=False)
    print(result.privacy)
    print("private mean:", result.params["mean"], "mean:", x.mean(0))
    assert jnp.abs(result.params["mean"] - x.mean(0)).max() < 0.2


if __name__ == "__main__":
    main()
