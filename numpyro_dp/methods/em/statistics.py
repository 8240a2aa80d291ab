r"""Expectation maximisation for mixtures of normals, in the form of a private step.

With responsibilities :math:`r_{ij} \propto \pi_j N(x_i; \mu_j, \Sigma_j)`, a step needs the sum
over records of the statistics

.. math:: u_i = \big(r_i,\; r_{ij} x_i,\; r_{ij}\,\mathrm{svec}(x_i x_i^\top)\big),

in which svec multiplies off-diagonal entries by :math:`\sqrt 2`. The run clips each record's
statistics and adds noise to their sum. The M step reads only this released sum.

Reference:
    Park, Foulds, Chaudhuri, Welling (2017), DP-EM: Differentially private expectation maximization,
    AISTATS. The paper scales data to norm 1 and adds separate noise to each moment. Cappé,
    Moulines (2009), On-line expectation-maximization algorithm for latent data models, JRSS B, has
    the damped form.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float

from numpyro_dp.core import Estimator, Released
from numpyro_dp.extend import RecordsProblem, own_constants
from numpyro_dp.methods.normal import inverse_and_log_det
from numpyro_dp.methods.shared import schedule

Params = dict[str, Array]
_Components = tuple[Array, Array, Array]  # means, inverse covariances, logarithms of weights


def expected_statistics(with_squares: bool) -> Callable[[RecordsProblem], Estimator]:
    """Builds the estimator.

    Args:
        with_squares: Whether to release second moments also. Known covariances need none.

    Guarantee:
        The signal reads one record. ``prepare`` and ``pull_back`` read none.
    """

    def build(problem: RecordsProblem) -> Estimator:
        (size,) = problem.records.layout.shapes[0][0]
        # Unsigned: JAX tests signed indices for negative values and keeps the result as a constant.
        rows, cols = own_constants(*np.asarray(np.triu_indices(size), np.uint32))
        (weight,) = own_constants(np.where(rows == cols, 1.0, math.sqrt(2)))

        def prepare(_: Array, params: Params) -> _Components:
            inverse, _, log_det = jax.vmap(inverse_and_log_det)(params["covariances"])
            return params["means"], inverse, jnp.log(params["probs"]) - log_det / 2

        def signal(public: _Components, example: tuple[Array, ...]) -> dict[str, Array]:
            means, inverse, log_weight = public
            x = example[0].astype(means.dtype)
            distance = x - means
            squared = jnp.einsum("jd,jde,je->j", distance, inverse, distance)
            share = jax.nn.softmax(log_weight - squared / 2)
            found = {"counts": share, "sums": share[:, None] * x}
            if with_squares:
                found["squares"] = share[:, None] * (jnp.outer(x, x)[rows, cols] * weight)
            return found

        def pull_back(_: _Components, released: Released) -> Released:
            if not with_squares:
                return released
            squares = released.total["squares"] / weight
            upper = jnp.zeros((len(squares), size, size)).at[:, rows, cols].set(squares)
            whole = {"squares": upper + jnp.triu(upper, 1).swapaxes(1, 2)}
            return released._replace(total=released.total | whole)

        return Estimator(prepare, signal, pull_back)

    return build


class MStepState(NamedTuple):
    """State of :class:`MStep`. All of it may be published.

    Attributes:
        step: Number of steps taken.
        params: ``probs``, ``means`` and ``covariances``.
        sums: Damped statistics.
        noise: Variance of the noise in each entry of ``sums``.
    """

    step: Array
    params: Params
    sums: dict[str, Array]
    noise: Array


class MStep:
    """The M step, as an optimiser with NumPyro's ``init``, ``get_params`` and ``update``.

    Args:
        damping: Fraction of the statistics that a step replaces: a number, or a function of the
            step.
        scale: Standard deviation of every component in every direction, if it is known.
        probs: Weights, if they are known.
        smallest_variance: Floor of the eigenvalues of an estimated covariance.
    """

    def __init__(
        self,
        damping: float | Callable[[Array], Array],
        scale: float | None,
        probs: np.ndarray | None,
        smallest_variance: float,
    ) -> None:
        self._rate, self._floor = schedule("damping", damping), smallest_variance
        self._scale, self._probs = scale, probs

    def init(self, params: Params) -> MStepState:
        """Returns the initial state. Known parameters replace those given."""
        params = params | self._known(params["means"])
        sums = {"counts": jnp.zeros_like(params["probs"]), "sums": jnp.zeros_like(params["means"])}
        if self._scale is None:
            sums["squares"] = jnp.zeros_like(params["covariances"])
        return MStepState(jnp.zeros((), jnp.int32), params, sums, jnp.zeros(()))

    def _known(self, means: Array) -> Params:
        number, size = means.shape
        known = {}
        if self._scale is not None:
            known["covariances"] = jnp.tile(self._scale**2 * jnp.eye(size), (number, 1, 1))
        if self._probs is not None:
            known["probs"] = jnp.asarray(self._probs, means.dtype)
        return known

    def get_params(self, state: MStepState) -> Params:
        """Returns the parameters."""
        return state.params

    def update(self, statistics: Released, state: MStepState, **_: object) -> MStepState:
        """Takes a step. Counts are floored at 1 and at twice the standard deviation of noise."""
        # The initial sums are zeros, not statistics.
        rate = jnp.where(state.step == 0, 1.0, self._rate(state.step))
        sums = jax.tree.map(lambda old, new: old + rate * (new - old), state.sums, statistics.total)
        noise = (1 - rate) ** 2 * state.noise + (rate * statistics.noise_scale) ** 2
        # Noise can make the count of a rare component negative, or its mean arbitrarily large.
        counts = jnp.maximum(sums["counts"], jnp.maximum(1.0, 2 * jnp.sqrt(noise)))
        means = sums["sums"] / counts[:, None]
        params = {"probs": counts / jnp.sum(counts), "means": means}
        if "squares" in sums:
            second = sums["squares"] / counts[:, None, None]
            covariances = second - means[:, :, None] * means[:, None, :]
            raised = functools.partial(raise_eigenvalues, floor=self._floor)
            params["covariances"] = lax.map(raised, covariances)
        return MStepState(state.step + 1, params | self._known(means), sums, noise)


def raise_eigenvalues(matrix: Float[Array, "d d"], floor: float) -> Float[Array, "d d"]:
    """Returns the symmetric part with eigenvalues of at least ``floor``.

    One whose eigenvalues are so already does not change. The floor is at least the rounding error
    of the largest eigenvalue, so that the result has a Cholesky factor.
    """
    matrix = (matrix + matrix.T) / 2
    values, vectors = jnp.linalg.eigh(matrix)
    rounding = 2 * values.size * jnp.finfo(values.dtype).eps * jnp.max(jnp.abs(values))
    least = jnp.maximum(jnp.asarray(floor, values.dtype), rounding)
    raised = jnp.matmul(
        vectors * jnp.maximum(values, least), vectors.T, precision=lax.Precision.HIGHEST
    )
    return jnp.where(jnp.min(values) >= least, matrix, (raised + raised.T) / 2)
