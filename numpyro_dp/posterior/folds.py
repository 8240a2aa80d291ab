r"""Streaming averages of every private iterate, for models that are too large for a trace.

The compiled loop of ``svi.run(..., fold=...)`` hands a fold the constrained parameters after each
step.

**Tail average.** The last n iterates are split into b batches of equal length, so n is a multiple
of b. With the means :math:`m_j` of the batches,

.. math::
    \bar x = \frac1b \sum_j m_j, \qquad
    \widehat{\mathrm{Var}}(\bar x) = \frac{1}{b (b - 1)} \sum_j (m_j - \bar x)^2.

The variance estimate is unbiased for independent batch means. So each batch must hold many
autocorrelation times. Sums run over deviations from the mean of the earlier batches, in at least
float32. Long runs then do not lose digits.

Reference:
    Polyak, Juditsky (1992), SIAM J. Control Optim. 30; for batch means Flegal, Jones (2010), Ann.
    Statist. 38.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_dp._tree import widen
from numpyro_dp._validate import check_int, check_real
from numpyro_dp.core import Fold, PyTree, Values

_MOST_STEPS = np.iinfo(np.int32).max


class TailAverage(NamedTuple):
    r"""Mean of the last iterates of a run. It may be published.

    Attributes:
        params: Mean of the constrained parameters. Pass it to
            ``Predictive(model, guide=guide, params=...)``.
        dp_sd: Standard deviation of that mean around the optimum, caused by the noise and the
            batches of the run. It is itself known up to a factor of
            :math:`1 \pm 1/\sqrt{2(b-1)}`. It is meaningless if the run had not converged.
        num_iterates: Number of iterates in the average.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from numpyro_dp.posterior import tail_average
        >>> fold = tail_average(1000)
        >>> iterates = {"loc": 3 + jax.random.normal(jax.random.key(0), (1000,))}
        >>> step = lambda state, params: (fold.update(state, params), None)  # as a run does it
        >>> state, _ = jax.lax.scan(step, fold.init({"loc": jnp.zeros(())}), iterates)
        >>> mean = fold.result(state)
        >>> int(mean.num_iterates), bool(abs(mean.params["loc"] - 3) < 4 * mean.dp_sd["loc"])
        (480, True)
    """

    params: Values
    dp_sd: Values
    num_iterates: Array


class _Tail(NamedTuple):
    """State of a tail average.

    Attributes:
        count: Number of iterates in the tail. Negative before it begins.
        length: Length of a batch.
        mean: Mean of the closed batches. Before the first one closes, the first iterate.
        total: Sum of the deviations from ``mean`` in the open batch.
        squares: Sum of the squared deviations of closed batches from their mean, times length.
    """

    count: Array
    length: Array
    mean: PyTree
    total: PyTree
    squares: PyTree


def tail_average(num_steps: int, last: float = 0.5, num_batches: int = 32) -> Fold:
    r"""Averages every iterate in the last part of a run without storing them.

    The fold needs three times the memory of the parameters. Unlike
    :func:`~numpyro_dp.posterior.average`, it does not check convergence: you choose the share of
    the steps before the run. The average is taken over constrained parameters. So it meets convex
    constraints, such as positive scales and Cholesky factors.

    Args:
        num_steps: Number of steps of the run.
        last: Share of the steps to average, in (0, 1], rounded down to whole batches.
        num_batches: Number of batches b for the standard deviation. Each should hold many
            autocorrelation times of the iterates.

    Returns:
        A fold whose result is a :class:`TailAverage`.

    Raises:
        ValueError: If a value is outside its range, or there are fewer iterates than batches.

    Example:
        >>> import jax, numpyro, numpyro.distributions as dist, optax
        >>> from numpyro.infer.autoguide import AutoDiagonalNormal
        >>> from numpyro_dp import DPSVI, PrivacyBudget
        >>> from numpyro_dp.estimators import aligned
        >>> from numpyro_dp.posterior import tail_average
        >>> from numpyro_dp.samplers import FullBatch
        >>> def model(x):
        ...     mean = numpyro.sample("mean", dist.Normal(0, 10))
        ...     with numpyro.plate("records", x.shape[0]):
        ...         numpyro.sample("x", dist.Normal(mean, 1), obs=x)
        >>> x = 3 + jax.random.normal(jax.random.key(1), (1000,))
        >>> svi = DPSVI(model, AutoDiagonalNormal(model), optax.adam(0.02), estimator=aligned(),
        ...             clip_norm=2.0, sampler=FullBatch(), budget=PrivacyBudget(1.0, 1e-5))
        >>> result = svi.run(jax.random.key(0), 3000, x, progress_bar=False,
        ...                  fold=tail_average(3000))
        >>> int(result.folded.num_iterates), abs(result.folded.params["auto_loc"][0] - 3) < 0.5
        (1472, Array(True, dtype=bool))

    Guarantee:
        Reads only the private iterates. This is post-processing and has no privacy cost.
    """
    check_int("num_steps", num_steps, low=1, high=_MOST_STEPS)
    check_real("last", last, low=0, high=1, low_open=True, remedy="It is a share of the steps.")
    check_int("num_batches", num_batches, low=2)
    number = max(1, round(last * num_steps))
    check_int(
        "number of iterates averaged", number, low=num_batches,
        remedy="Each batch needs one. Take more steps, increase last=, or decrease num_batches.",
    )  # fmt: skip
    length = number // num_batches
    # The steps that whole batches leave over are at the beginning, before the tail.
    before = num_steps - length * num_batches

    def init(params: PyTree) -> _Tail:
        zeros = jax.tree.map(jnp.zeros_like, widen(params))
        return _Tail(*(jnp.asarray(each, jnp.int32) for each in (-before, length)), *([zeros] * 3))

    return Fold(init, _update_tail, _tail_average, num_steps)


def _update_tail(state: _Tail, params: PyTree) -> _Tail:
    count = state.count + 1
    closed, place = jnp.divmod(count - 1, state.length)
    inside, active = place + 1, count > 0
    closes = active & (inside == state.length)

    # The batch form of Welford's update, which loses no digits by cancellation.
    def update(x: Array, mean: Array, total: Array, squares: Array) -> tuple[Array, ...]:
        x, size = x.astype(mean.dtype), inside.astype(mean.dtype)
        # The share of the first batch is 1. So it sets the mean and adds no square.
        share = 1 / (closed + 1).astype(mean.dtype)
        # Deviations from the first iterate are small, so that sums keep their digits.
        mean = jnp.where(count == 1, x, mean)
        total = jnp.where(active, total + (x - mean), total)
        deviation = total / size
        return (
            jnp.where(closes, mean + share * deviation, mean),
            jnp.where(closes, 0, total),
            jnp.where(closes, squares + size * (1 - share) * jnp.square(deviation), squares),
        )

    leaves, treedef = jax.tree.flatten(params)
    sums = (jax.tree.leaves(tree) for tree in (state.mean, state.total, state.squares))
    updated = zip(*(update(*each) for each in zip(leaves, *sums, strict=True)), strict=True)
    return _Tail(count, state.length, *map(treedef.unflatten, updated))


def _tail_average(state: _Tail) -> TailAverage:
    number = jnp.maximum(state.count, 0)
    mean = jax.tree.map(lambda mean, total: mean + total / number, state.mean, state.total)
    batches = number // state.length
    freedom = (batches - 1).astype(float) * batches * state.length
    sd = jax.tree.map(lambda squares: jnp.sqrt(squares / freedom), state.squares)
    return TailAverage(mean, sd, number)
