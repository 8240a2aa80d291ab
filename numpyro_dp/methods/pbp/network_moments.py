r"""Moments of a network's output under independent normal weights, and their slopes.

A layer has n inputs with mean z and variance s. The last input is the bias: it is always 1.
With weights of mean M and variance V, its values before the activation have moments

.. math::
    a = \frac{M^\top z}{\sqrt n}, \qquad
    v = \frac{(M^2)^\top s + V^\top (z^2 + s)}{n},

and a unit :math:`\max(0, t)` of :math:`t \sim N(a, v)`, with :math:`\alpha = a/\sqrt v`,

.. math::
    E = a\,\Phi(\alpha) + \sqrt v\,\varphi(\alpha), \qquad
    \mathrm{Var} = v\,\big(\Phi + \alpha^2\,\Phi\bar\Phi + \alpha\varphi\,(\bar\Phi - \Phi)
        - \varphi^2\big), \qquad \bar\Phi = 1 - \Phi,

which equals the second moment minus the squared mean but does not cancel for large a. The slopes
are

.. math::
    \frac{\partial E}{\partial a} = \Phi, \quad
    \frac{\partial E}{\partial v} = \frac{\varphi}{2\sqrt v}, \quad
    \frac{\partial\mathrm{Var}}{\partial a} = 2 E\,\bar\Phi, \quad
    \frac{\partial\mathrm{Var}}{\partial v} = \Phi - \frac{E\,\varphi}{\sqrt v}.

Units of a layer are treated as independent normals. One record's log evidence is
:math:`\log Z = \log N(y; f, s_f + E[1/\gamma])`. With :math:`\delta_a` and :math:`\delta_v` its
slopes at each layer's a and v, the slopes in the weights are outer products,

.. math::
    \frac{\partial\log Z}{\partial M} = \frac{z\,\delta_a^\top}{\sqrt n}
        + \frac{2 M \odot s\,\delta_v^\top}{n}, \qquad
    \frac{\partial\log Z}{\partial V} = \frac{(z^2 + s)\,\delta_v^\top}{n},

so differentiation needs no array of shape (records, weights).

Reference:
    Hernández-Lobato, Adams (2015), Probabilistic backpropagation for scalable learning of Bayesian
    neural networks, ICML.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

_Pairs = list[tuple[Array, Array]]


class Layers(NamedTuple):
    """Where the weights of each layer are in the vector of all weights.

    Attributes:
        shapes: Shape of each layer: (inputs and bias, outputs).
    """

    shapes: tuple[tuple[int, int], ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of weights of each layer."""
        return tuple(rows * cols for rows, cols in self.shapes)

    def split(self, weights: Float[Array, " weights"]) -> list[Array]:
        """Returns the matrix of each layer."""
        parts = jnp.split(weights, list(itertools.accumulate(self.sizes))[:-1])
        return [part.reshape(shape) for part, shape in zip(parts, self.shapes, strict=True)]

    def means(self, weights: Float[Array, " weights"]) -> Float[Array, " layers"]:
        """Returns the mean of each layer."""
        return jnp.stack([jnp.mean(layer) for layer in self.split(weights)])

    def repeat(self, numbers: Float[Array, " layers"]) -> Float[Array, " weights"]:
        """Gives each weight of a layer the number of its layer."""
        return self.join([jnp.full(*each) for each in zip(self.sizes, numbers, strict=True)])

    def join(self, layers: Sequence[Array]) -> Float[Array, " weights"]:
        """The inverse of ``split``."""
        return jnp.concatenate([layer.reshape(-1) for layer in layers])


class Slopes(NamedTuple):
    """Slopes of one record's log evidence log Z.

    Attributes:
        mean: Slope in the mean of each weight.
        variance: Slope in the variance of each weight.
        output: Mean of the network's output.
        spread: Variance of the network's output.
    """

    mean: Float[Array, " weights"]
    variance: Float[Array, " weights"]
    output: Float[Array, ""]
    spread: Float[Array, ""]


def layout_of(num_inputs: int, hidden: Sequence[int]) -> Layers:
    """Returns the layout of a network with one output."""
    sizes = [num_inputs, *hidden, 1]
    return Layers(tuple((rows + 1, cols) for rows, cols in itertools.pairwise(sizes)))


def output_moments(
    layout: Layers, mean: Float[Array, " weights"], variance: Float[Array, " weights"], x: Array
) -> tuple[Array, Array]:
    """Returns mean and variance of the output for one input of shape (num_inputs,)."""
    output, spread, _ = _forward(layout.split(mean), layout.split(variance), x, None)
    return output, spread


def record_slopes(
    layout: Layers,
    mean: Float[Array, " weights"],
    variance: Float[Array, " weights"],
    noise: Float[Array, ""],
    x: Float[Array, " inputs"],
    y: Float[Array, ""],
) -> Slopes:
    r"""Returns the slopes of one record's log evidence.

    Args:
        layout: Layers of the weights.
        mean: Mean of each weight.
        variance: Variance of each weight. Weights are independent.
        noise: :math:`E[1/\gamma]`, the variance of y around the output.
        x: Inputs.
        y: Target.
    """
    means, variances = layout.split(mean), layout.split(variance)

    def log_evidence(shifts: _Pairs) -> tuple[Array, tuple[Array, Array, _Pairs]]:
        output, spread, inputs = _forward(means, variances, x, shifts)
        total = spread + noise
        return -((y - output) ** 2 / total + jnp.log(total)) / 2, (output, spread, inputs)

    zeros = [(jnp.zeros(cols), jnp.zeros(cols)) for _, cols in layout.shapes]
    slopes, (output, spread, inputs) = jax.grad(log_evidence, has_aux=True)(zeros)
    in_mean, in_variance = [], []
    for (at_mean, at_variance), (z, s), weights in zip(slopes, inputs, means, strict=True):
        n = len(z)
        direct = jnp.outer(z, at_mean) / math.sqrt(n)
        in_mean.append(direct + 2 * weights * jnp.outer(s, at_variance) / n)
        in_variance.append(jnp.outer(z**2 + s, at_variance) / n)
    return Slopes(layout.join(in_mean), layout.join(in_variance), output, spread)


def _forward(
    means: list[Array], variances: list[Array], x: Array, shifts: _Pairs | None
) -> tuple[Array, Array, _Pairs]:
    """Moments of the output, and of the inputs of each layer with its bias.

    ``shifts`` are added to a and v of each layer.
    """
    z, s = _with_bias(x, jnp.zeros_like(x))
    inputs = []
    for number, (weights, variance) in enumerate(zip(means, variances, strict=True)):
        inputs.append((z, s))
        a = z @ weights / math.sqrt(len(z))
        v = (s @ weights**2 + (z**2 + s) @ variance) / len(z)
        if shifts is not None:
            a, v = a + shifts[number][0], v + shifts[number][1]
        if number < len(means) - 1:
            z, s = _with_bias(*_rectified(a, v))
    return a[0], v[0], inputs


def _with_bias(z: Array, s: Array) -> tuple[Array, Array]:
    return jnp.append(z, 1.0), jnp.append(s, 0.0)


@jax.custom_jvp
def _rectified(a: Array, v: Array) -> tuple[Array, Array]:
    """Moments of max(0, t), t ~ N(a, v)."""
    return _rectified_parts(a, v)[:2]


@_rectified.defjvp
def _(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> Any:
    """Slopes in closed form, from the terms that the moments are made of."""
    mean, variance, above, below, ratio_density = _rectified_parts(*primals)
    in_a, in_v = tangents
    in_mean = above * in_a + ratio_density / 2 * in_v
    in_variance = 2 * mean * below * in_a + (above - mean * ratio_density) * in_v
    return (mean, variance), (in_mean, in_variance)


def _rectified_parts(a: Array, v: Array) -> tuple[Array, Array, Array, Array, Array]:
    """The two moments, the two tail probabilities, and the density divided by sqrt(v)."""
    sd = jnp.sqrt(jnp.maximum(v, jnp.finfo(v.dtype).tiny))
    ratio = a / sd
    smaller = jax.lax.erfc(jnp.abs(ratio) * math.sqrt(0.5)) / 2
    above = jnp.where(ratio >= 0, 1 - smaller, smaller)
    below = jnp.where(ratio >= 0, smaller, 1 - smaller)
    density = jnp.exp(-(ratio**2) / 2) / math.sqrt(2 * math.pi)
    share = above + ratio**2 * above * below + ratio * density * (below - above) - density**2
    moments = a * above + sd * density, v * jnp.maximum(share, 1e-10)
    return *moments, above, below, density / sd
