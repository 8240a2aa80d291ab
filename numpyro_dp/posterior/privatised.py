r"""``Privatised``: a NumPyro distribution for a number that somebody else released with noise.

Statistical offices and other tools publish counts and means with noise of known scale. A model that
takes them as exact is too sure. With a true count k and a noise mass or density g, the released
number y has the density

.. math:: p(y \mid \theta) = \sum_k p(k \mid \theta)\, g(y - k),

summed over all k near y. For a table of Poisson counts with an exact total N it is

.. math:: p(y \mid \theta, N) = \frac{1}{p(N \mid \theta)}
    \sum_{k_1 + \dots + k_C = N}\; \prod_c p(k_c \mid \theta)\, g(y_c - k_c),

a convolution over the cells, which a Fourier transform computes.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array
from jax.scipy.special import logsumexp
from jax.scipy.stats import norm
from jax.typing import ArrayLike
from numpyro.distributions import constraints

from numpyro_dp._compat import is_tracer
from numpyro_dp._validate import check_in, check_int

_NOISES = ("gaussian", "discrete gaussian", "laplace", "geometric")
_GAUSSIAN_TAIL, _LAPLACE_TAIL = 9.0, 27.0  # scales, with a mass below 3e-12 beyond
_MOST_COUNTS = 20_001  # summed out for one number
_TILTS = 12  # Newton steps to the mean of a table


class Privatised(dist.Distribution):
    r"""A number that was released with noise of a known scale, given the distribution of the truth.

    Args:
        base: Distribution of the true value: counts (``Poisson``, ``Binomial`` and others on the
            integers), or ``Normal`` for a mean.
        noise: ``"gaussian"``, ``"discrete gaussian"``, ``"laplace"`` or ``"geometric"`` (discrete
            Laplace, with mass proportional to :math:`e^{-|z| / s}`).
        scale: Scale s of the noise, a number or one for each value. For Gaussian noise it is the
            standard deviation. It must not depend on latents.
        total: The exact sum of the counts of a table. ``base`` is then ``Poisson`` with one
            rate a cell, along the last axis of its batch.
        relaxed: Uses a normal distribution with the mean and variance v of a count, for counts and
            scales too large to sum over. For Poisson and binomial counts the distribution function
            is off by at most :math:`0.48 / \sqrt{v}` (Berry-Esseen). For ``"gaussian"`` and
            ``"laplace"``. In single precision, also take it for counts above 100,000.

    Raises:
        TypeError, ValueError: If an argument is none of these, or too many counts had to be summed.

    Example:
        >>> import jax, numpyro
        >>> import numpyro.distributions as dist
        >>> from numpyro_dp import Privatised
        >>> def model(noisy):
        ...     rate = numpyro.sample("rate", dist.Gamma(2.0, 0.1))
        ...     count = Privatised(dist.Poisson(rate), "discrete gaussian", scale=5.0)
        ...     with numpyro.plate("cells", len(noisy)):
        ...         numpyro.sample("noisy", count, obs=noisy)
        >>> count = Privatised(dist.Poisson(3.0), "geometric", scale=2.0)
        >>> bool(count.log_prob(3) > count.log_prob(10))
        True

    Guarantee:
        A function of released numbers. It reads no record and spends no budget.

    Reference:
        I. Shevtsova, "On the absolute constants in the Berry-Esseen type inequalities",
        arXiv:1111.6554, for the bound of ``relaxed``.
    """

    arg_constraints: dict[str, Any] = {}  # noqa: RUF012 - as in NumPyro
    pytree_data_fields: tuple[str, ...] = ("base", "scale")
    pytree_aux_fields: tuple[str, ...] = ("noise", "total", "relaxed", "discrete", "_radius")
    base: Any
    noise: str
    scale: Array
    total: int | None
    relaxed: bool
    discrete: bool

    def __init__(
        self,
        base: Any,
        noise: str,
        scale: ArrayLike,
        *,
        total: int | None = None,
        relaxed: bool = False,
        validate_args: bool | None = None,
    ) -> None:
        check_in("noise", noise, _NOISES)
        if is_tracer(scale):
            raise TypeError("Expected scale= as known numbers, got values that JAX traces.")
        scales = np.asarray(scale, np.float64)
        if not np.all(np.isfinite(scales) & (scales > 0)):
            raise ValueError(f"Expected scale= as numbers above 0, got {scale!r}.")
        self.discrete = base.support.is_discrete
        smooth = noise in ("gaussian", "laplace")
        if base.event_shape or not (self.discrete or isinstance(base, dist.Normal)):
            raise TypeError(
                f"Expected base as a distribution of counts or Normal, got {type(base).__name__}. "
                "Give a table one Poisson rate a cell, and its exact sum as total=."
            )
        if not smooth and (relaxed or not self.discrete):
            raise ValueError(
                f'Noise "{noise}" is for counts that are summed out. For means and relaxed=True '
                'use "gaussian" or "laplace".'
            )
        tail = _GAUSSIAN_TAIL if "gaussian" in noise else _LAPLACE_TAIL
        radius = math.ceil(tail * float(scales.max())) + 1
        self._radius = radius if self.discrete and not relaxed else 0
        if 2 * self._radius + 1 > _MOST_COUNTS:
            raise ValueError(
                f"A scale of {scales.max():g} needs {2 * radius + 1} counts for each number, more "
                f"than {_MOST_COUNTS}. Use relaxed=True."
            )
        if total is not None:
            check_int("total", total, low=0)
            if not isinstance(base, dist.Poisson) or not base.batch_shape or relaxed:
                raise ValueError(
                    "total= needs base=Poisson(rates) with one rate a cell, and not relaxed."
                )
        self.base = base
        self.noise, self.total, self.relaxed = noise, total, relaxed
        self.scale = jnp.asarray(scales, jnp.result_type(float))
        shape = jnp.broadcast_shapes(base.batch_shape, scales.shape)
        split = len(shape) - (total is not None)
        super().__init__(shape[:split], shape[split:], validate_args=validate_args)

    @property
    def support(self) -> Any:  # type: ignore[override]
        """All real numbers, because noise may be negative and validation is not of the counts."""
        return constraints.real if self.total is None else constraints.real_vector

    def sample(self, key: Array, sample_shape: tuple[int, ...] = ()) -> Array:
        """Draws true values and adds noise."""
        of_truth, of_noise = jax.random.split(key)
        shape = (*sample_shape, *self.batch_shape, *self.event_shape)
        if self.total is None:
            base = self.base.expand(self.batch_shape)
            truth = base.sample(of_truth, sample_shape)
        else:
            rates = jnp.broadcast_to(self.base.rate, self.batch_shape + self.event_shape)
            shares = rates / rates.sum(-1, keepdims=True)
            truth = dist.Multinomial(self.total, shares).sample(of_truth, sample_shape)
        return jnp.asarray(truth + self._noise(of_noise, shape))

    def _noise(self, key: Array, shape: tuple[int, ...]) -> Array:
        if self.noise == "gaussian":
            return jax.random.normal(key, shape) * self.scale
        if self.noise == "laplace":
            return jax.random.laplace(key, shape) * self.scale
        logits = jnp.moveaxis(self._log_noise(self._near), 0, -1)
        logits = jnp.broadcast_to(logits, (*shape, logits.shape[-1]))
        return jax.random.categorical(key, logits) - self._radius

    def log_prob(self, value: ArrayLike) -> Array:
        """Log density of a released number, or of a table with a total."""
        value = jnp.asarray(value, jnp.result_type(float))
        if not self.discrete or self.relaxed:
            return self._log_of_normal(value)
        # The first axis lists counts near the value, so that it broadcasts against any base.
        offsets = jnp.arange(2 * self._radius + 1).reshape(-1, *(1,) * value.ndim)
        start = jnp.floor(value).astype(int) - self._radius
        counts = start + offsets
        support: Any = self.base.support
        possible = support(counts)
        counts = jnp.where(possible, counts, support.feasible_like(counts))
        logs = jnp.where(possible, self.base.log_prob(counts), -jnp.inf)
        logs += self._log_noise(value - start - offsets)
        if self.total is None:
            return logsumexp(logs, axis=0)
        place = jnp.asarray(self.total - start.sum(-1), value.dtype)
        found = _log_convolved(jnp.moveaxis(logs, 0, -1), place)
        return found - dist.Poisson(self.base.rate.sum(-1)).log_prob(self.total)

    def _log_noise(self, away: Array) -> Array:
        """Log mass or density of the noise."""
        scale = self.scale
        if self.noise == "laplace":
            return -jnp.abs(away) / scale - jnp.log(2 * scale)
        if self.noise == "geometric":
            return -jnp.abs(away) / scale + jnp.log(jnp.tanh(0.5 / scale))
        squares = -((away / scale) ** 2) / 2
        if self.noise == "gaussian":
            return squares - jnp.log(scale) - 0.5 * math.log(2 * math.pi)
        return squares - logsumexp(-((self._near / scale) ** 2) / 2, axis=0)

    @property
    def _near(self) -> Array:
        """Values of discrete noise, along the first axis."""
        near = jnp.arange(-self._radius, self._radius + 1)
        return near.reshape(-1, *(1,) * self.scale.ndim)

    def _log_of_normal(self, value: Array) -> Array:
        mean, scale = self.base.mean, self.scale
        if self.noise == "gaussian":
            return norm.logpdf(value, mean, jnp.sqrt(self.base.variance + scale**2))
        # Normal plus Laplace.
        sd = jnp.sqrt(self.base.variance)
        away, ratio = (value - mean) / sd, sd / scale
        sides = [side * ratio * away + norm.logcdf(-side * away - ratio) for side in (1, -1)]
        return jnp.logaddexp(*sides) + ratio**2 / 2 - jnp.log(2 * scale)


def _log_convolved(logs: Array, place: Array) -> Array:
    """Log of one entry of the convolution of all cells.

    The terms are tilted by a factor exp(t k), which brings the mean of the convolution to the
    entry. A Fourier transform is exact there, and rounding would hide entries far from the mean.

    Args:
        logs: Log terms (..., cells, counts).
        place: The entry, counted from the sum of the first counts (...).
    """
    cells, counts = logs.shape[-2:]
    index, length = jnp.arange(counts), 1 << (cells * (counts - 1)).bit_length()

    def moments(tilt: Array) -> tuple[Array, Array]:
        weights = jax.nn.softmax(logs + tilt[..., None, None] * index, axis=-1)
        mean = jnp.sum(weights * index, axis=-1)
        variance = jnp.sum(weights * (index - mean[..., None]) ** 2, axis=-1)
        return mean.sum(-1), variance.sum(-1)

    def step(_: int, tilt: Array) -> Array:
        mean, variance = moments(tilt)
        return tilt + jnp.clip((place - mean) / jnp.maximum(variance, 1e-6), -0.5, 0.5)

    tilt = jax.lax.stop_gradient(jax.lax.fori_loop(0, _TILTS, step, jnp.zeros_like(place)))
    tilted = logs + tilt[..., None, None] * index
    sizes = logsumexp(tilted, axis=-1, keepdims=True)
    transforms = jnp.fft.rfft(jnp.exp(tilted - sizes), length, axis=-1)
    whole = jnp.fft.irfft(jnp.prod(transforms, axis=-2), length, axis=-1)
    target = jnp.clip(place, 0, length - 1).astype(int)
    entry = jnp.take_along_axis(whole, target[..., None], axis=-1)[..., 0]
    found = jnp.log(jnp.maximum(entry, 1e-30)) + sizes.sum((-1, -2)) - tilt * place
    possible = (place >= 0) & (place <= cells * (counts - 1))
    return jnp.where(possible, found, -jnp.inf)
