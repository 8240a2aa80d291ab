r"""The network as a NumPyro model, and its posterior as a guide."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Float

from numpyro_dp.extend import check_int, check_real
from numpyro_dp.methods.pbp.network_moments import Layers, layout_of, output_moments

Params = dict[str, Array]


def natural_of(mean: Array, precision: Array, concentration: ArrayLike, rate: ArrayLike) -> Params:
    """Returns the natural parameters of independent normal weights and a gamma noise precision."""
    return {
        "weights_linear": mean * precision,
        "weights_precision": precision,
        "noise_concentration": jnp.asarray(concentration),
        "noise_rate": jnp.asarray(rate),
    }


class RegressionNetwork:
    r"""A NumPyro model: a network with ReLU layers, normal weights and normal noise.

    .. math::
        w \sim N(0, \lambda^{-1} I), \quad \gamma \sim \mathrm{Gamma}(a_0, b_0), \quad
        y \sim N(f(x, w), \gamma^{-1}), \quad
        f = \frac{W_L^\top}{\sqrt{n_L}} \max\Big(0, \frac{W_{L-1}^\top}{\sqrt{n_{L-1}}} \dots\Big),

    each layer with a bias. Sites: ``weights`` (one vector), ``noise_precision``, and
    ``weight_precision`` if :math:`\lambda` has a prior.

    Args:
        hidden: Number of units of each hidden layer.
        weight_precision: :math:`\lambda`, > 0, or ``None`` for a Gamma(6, 6) prior.
        noise_prior: :math:`a_0 > 1` and :math:`b_0 > 0`, for y of about unit variance.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from numpyro.infer import Predictive
        >>> from numpyro_dp import RegressionNetwork
        >>> network = RegressionNetwork((20, 10))
        >>> draws = Predictive(network, num_samples=3)(jax.random.key(0), jnp.ones((5, 4)))
        >>> draws["y"].shape, draws["weights"].shape
        ((3, 5), (3, 321))

    Reference:
        Hernández-Lobato, Adams (2015), Probabilistic backpropagation for scalable learning of
        Bayesian neural networks, ICML.
    """

    hidden: tuple[int, ...]
    weight_precision: float | None
    noise_prior: tuple[float, float]

    def __init__(
        self,
        hidden: Sequence[int] = (50,),
        *,
        weight_precision: float | None = 1.0,
        noise_prior: tuple[float, float] = (6.0, 6.0),
    ) -> None:
        if not isinstance(hidden, Sequence) or not isinstance(noise_prior, Sequence):
            raise TypeError(
                f"Expected hidden and noise_prior as tuples, got {hidden!r} and {noise_prior!r}. "
                "Write hidden=(50,), noise_prior=(6.0, 6.0)."
            )
        if len(noise_prior) != 2:
            raise ValueError(f"Expected noise_prior=(concentration, rate), got {noise_prior!r}.")
        self.hidden = tuple(check_int("units of a hidden layer", h, low=1) for h in hidden)
        if not self.hidden:
            raise ValueError("The network needs at least one hidden layer, such as hidden=(50,).")
        if weight_precision is not None:
            check_real("weight_precision", weight_precision, low=0, low_open=True)
        concentration, rate = noise_prior
        check_real("concentration of the noise precision", concentration, low=1, low_open=True)
        check_real("rate of the noise precision", rate, low=0, low_open=True)
        self.weight_precision, self.noise_prior = weight_precision, (concentration, rate)

    def __call__(self, x: Float[Array, "records inputs"], y: ArrayLike | None = None) -> ArrayLike:
        """The model: x of shape (records, inputs), y of shape (records,)."""
        precision = self.weight_precision
        if precision is None:
            precision = numpyro.sample("weight_precision", dist.Gamma(6.0, 6.0))
        size = sum(self.layout(x.shape[-1]).sizes)
        prior = dist.Normal(0.0, jnp.sqrt(1 / jnp.asarray(precision))).expand([size]).to_event(1)
        weights = jnp.asarray(numpyro.sample("weights", prior))
        noise = numpyro.sample("noise_precision", dist.Gamma(*self.noise_prior))
        output = self.apply(weights, x)
        with numpyro.plate("records", x.shape[0]):
            return numpyro.sample("y", dist.Normal(output, 1 / jnp.sqrt(noise)), obs=y)

    def __repr__(self) -> str:
        return (
            f"RegressionNetwork({self.hidden}, weight_precision={self.weight_precision}, "
            f"noise_prior={self.noise_prior})"
        )

    def layout(self, num_inputs: int) -> Layers:
        """Returns where the weights of each layer are in ``weights``."""
        return layout_of(num_inputs, self.hidden)

    def apply(
        self, weights: Float[Array, " weights"], x: Float[Array, "records inputs"]
    ) -> Float[Array, " records"]:
        """Returns the output of the network, shape (records,)."""
        layers = self.layout(x.shape[-1]).split(weights)
        for number, layer in enumerate(layers):
            x = jnp.concatenate([x, jnp.ones_like(x[..., :1])], -1) @ layer / math.sqrt(len(layer))
            x = jax.nn.relu(x) if number < len(layers) - 1 else x
        return x[..., 0]

    def predict(
        self, params: Params, x: Float[Array, "records inputs"]
    ) -> tuple[Float[Array, " records"], Float[Array, " records"]]:
        """Returns mean and variance of y, computed from moments without draws.

        Args:
            params: ``result.params`` of ``DPPBP`` or ``PBP``.
            x: Inputs, scaled as in the run.
        """
        variance = 1 / params["weights_precision"]
        weights = params["weights_linear"] * variance, variance
        moments = functools.partial(output_moments, self.layout(x.shape[-1]), *weights)
        mean, spread = jax.vmap(moments)(x)
        return mean, spread + params["noise_rate"] / (params["noise_concentration"] - 1)

    def prior_precision(self, params: Params) -> Float[Array, ""]:
        r"""Returns :math:`\lambda`, or its mean given the posterior of weights if it has a prior.

        .. math:: E\lambda = \frac{6 + P/2}{6 + \sum_j (m_j^2 + v_j)/2}

        for P weights. It reads only released values.
        """
        if self.weight_precision is not None:
            return jnp.asarray(self.weight_precision)
        variance = 1 / params["weights_precision"]
        squares = jnp.sum((params["weights_linear"] * variance) ** 2 + variance)
        return (6 + variance.size / 2) / (6 + squares / 2)

    def beyond_prior(self, params: Params) -> Params:
        """Returns what the posterior of weights and noise has beyond the prior, for the records."""
        return {
            "linear": params["weights_linear"],
            "precision": params["weights_precision"] - self.prior_precision(params),
            "rate": params["noise_rate"] - self.noise_prior[1],
        }


class NetworkGuide:
    """The posterior of a network for ``Predictive``, at ``result.params``."""

    def __init__(self, network: RegressionNetwork) -> None:
        self.network = network

    def __call__(self, x: Array, y: ArrayLike | None = None) -> None:
        """Draws the latent sites. Ignores y."""
        size = sum(self.network.layout(x.shape[-1]).sizes)
        start = natural_of(jnp.zeros(size), jnp.ones(size), *self.network.noise_prior)
        params = {n: jnp.asarray(numpyro.param(n, value)) for n, value in start.items()}
        variance = 1 / params["weights_precision"]
        mean = params["weights_linear"] * variance
        numpyro.sample("weights", dist.Normal(mean, jnp.sqrt(variance)).to_event(1))
        noise = dist.Gamma(params["noise_concentration"], params["noise_rate"])
        numpyro.sample("noise_precision", noise)
        if self.network.weight_precision is None:
            numpyro.sample("weight_precision", dist.Delta(self.network.prior_precision(params)))
