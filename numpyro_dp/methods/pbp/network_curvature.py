r"""The curvature that a network has for invented inputs, and coordinates in which it is 1.

With f the mean of the output, :math:`s_f` its variance, r a ridge and random inputs that do not
depend on records,

.. math::
    K = (\lambda_0 + r) I + N\, E_{x \sim N(0, I)}\Big[
    \frac{1}{s_f + E[1/\gamma]}\, \frac{\partial f}{\partial m}\frac{\partial f}{\partial m}^\top
    \Big] = L L^\top.

A slope g of one record is released as :math:`L^{-1} g`. Let :math:`\nu_j` be the eigenvalues of
the second term. Consider all linear maps A with noise of equal size in each coordinate of A g.
:math:`A = L^{-1}` makes the expected error of the network's output after the step smallest. This
error is proportional to

.. math::
    N E\lVert A g\rVert^2\;
    \mathrm{tr}\big(\mathrm{Cov}(K^{-1} A^{-1} \xi)\, (K - (\lambda_0 + r) I)\big) \ge d^2,
    \qquad d = \sum_j \frac{\nu_j}{\nu_j + \lambda_0 + r},

by Cauchy and Schwarz, with equality at :math:`A = L^{-1}` (up to a rotation and a factor). d counts
the directions that the records determine. The bound assumes that inputs and residuals have the
distribution of the invented ones, so :math:`E\,g g^\top` is the expectation above. It holds for
mean squares, not for norms after clipping. The mean squared norm of :math:`\sqrt{N/d}\,L^{-1} g` is
then that of the standardised residual. r includes a millionth of the trace of the second term, to
keep the Cholesky factorisation stable.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_dp.methods.pbp.model import RegressionNetwork
from numpyro_dp.methods.pbp.network_moments import output_moments

_INVENTED = 1000  # inputs
_EXACT = jax.lax.Precision.HIGHEST  # by default, accelerators round products to ten bits


class Curvature(NamedTuple):
    """The curvature, factorised.

    Attributes:
        unit: The expectation above, the expected curvature of one record.
        inverse: Inverse of the lower Cholesky factor L of K.
        scale: Square root of N / d.
        predicted: Mean of s_f + E[1/gamma] for the invented inputs.
    """

    unit: Array
    inverse: Array
    scale: Array
    predicted: Array

    def whiten(self, slope: Array) -> Array:
        """Returns the slope of one record in coordinates of unit curvature and size."""
        return self.scale * jnp.matmul(self.inverse, slope, precision=_EXACT)

    def direction(self, whitened: Array) -> Array:
        """Returns K^-1 g from the whitened g, shortened to one predictive standard deviation."""
        found = jnp.matmul(self.inverse.T, whitened, precision=_EXACT) / self.scale
        change = jnp.sqrt(jnp.maximum(found @ self.unit @ found, 0))
        shorter = found / jnp.maximum(change, 1)
        return jnp.where(jnp.all(jnp.isfinite(shorter)), shorter, 0)


def network_curvature(
    network: RegressionNetwork,
    num_inputs: int,
    num_examples: int,
    params: dict[str, Array],
    ridge: float,
) -> Curvature:
    """Returns the curvature at the given natural parameters. Reads no record."""
    layout = network.layout(num_inputs)
    mean = params["weights_linear"] / params["weights_precision"]
    variance = 1 / params["weights_precision"]
    noise = params["noise_rate"] / (params["noise_concentration"] - 1)
    inputs = jax.random.normal(jax.random.key(0), (_INVENTED, num_inputs), mean.dtype)

    def weighted_slope(x: Array) -> tuple[Array, Array]:
        output = jax.value_and_grad(lambda m: output_moments(layout, m, variance, x), has_aux=True)
        (_, spread), slope = output(mean)
        return slope / jnp.sqrt(spread + noise), spread + noise

    slopes, predicted = jax.vmap(weighted_slope)(inputs)
    unit = jnp.matmul(slopes.T, slopes, precision=_EXACT) / _INVENTED
    least = network.prior_precision(params) + ridge + 1e-6 * num_examples * jnp.trace(unit)
    eye = jnp.eye(mean.size, dtype=mean.dtype)
    factor = jnp.linalg.cholesky(num_examples * unit + least * eye)
    inverse = jax.scipy.linalg.solve_triangular(factor, eye, lower=True)
    directions = num_examples * jnp.sum((inverse @ unit) * inverse)
    directions = jnp.maximum(directions, 1e-6)  # d is near 0 if the ridge is far above the rest
    scale = math.sqrt(num_examples) / jnp.sqrt(directions)
    return Curvature(unit, inverse, scale, jnp.mean(predicted))
