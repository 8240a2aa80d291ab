r"""Langevin dynamics in which the privacy noise is the thermal noise.

With :math:`\tilde g` the released score, s the standard deviation of the privacy noise in each of
its coordinates, step size :math:`\eta`, temperature T and standard normal draws :math:`\xi`,

.. math::
    u &\leftarrow u + \eta\,\tilde g + \sqrt{2\eta T - \eta^2 s^2}\;\xi
        && \text{SGLD,} \\
    u &\leftarrow u + \eta G\,\tilde g + \sqrt{2\eta G T - (\eta G s)^2}\;\xi
        && \text{preconditioned,} \\
    v &\leftarrow (1 - a) v + \eta\,\tilde g + \sqrt{2 a \eta T - \eta^2 s^2}\;\xi, \quad
        u \leftarrow u + v && \text{SGHMC, friction a,}

in which privacy noise and draws together have the variance of the dynamics at temperature T.
At the **largest step size**, :math:`2T/s^2` (SGHMC: :math:`2aT/s^2`), no draw is needed. This is
the default. With a larger step the privacy noise alone would heat the chain above T, and ``DPMCMC``
raises an error. With noise multiplier :math:`\sigma`, clip norm C and inclusion probability q,

.. math:: \tilde g = \frac{\tilde s}{q} + \nabla_u \log p(u), \qquad s = \frac{\sigma C}{q},

for the released sum :math:`\tilde s` of the signals :math:`\nabla_u \log p(x_i \mid u)`, with u the
latents in unconstrained coordinates. It estimates the slope of the log posterior of the whole data
set, not of a mean loss. Budget, clip norm and number of steps determine :math:`\sigma`, and so the
largest step size.

SGLD is a sub-class of DP-SGD (Theorem 1 of Zhang et al.). With n records and expected batches of B,
SGLD with step size :math:`\eta` takes the steps of DP-SGD on the *mean* loss with learning rate
:math:`n\eta` and noise multiplier :math:`B\sqrt{2T} / (n \sqrt\eta\, C)`. At T = 1/2 this is the
paper's :math:`|B| / (n \sqrt\eta\, C)`.

With T = 1 the target is the posterior as the step size goes to 0. T = 1/2 is the update as printed
by Zhang et al., :math:`w - \eta\nabla U + N(0, \eta)`. Subsampling adds further noise in every such
sampler, and full batches have none. Clipping adds bias. Signals are therefore centred if the model
can simulate an outcome and has at most 300 latents (:mod:`numpyro_dp.sums.centred_sums`).

Reference:
    Welling, Teh (2011), Bayesian learning via stochastic gradient Langevin dynamics, ICML; Li,
    Chen, Carlson, Carin (2016), Preconditioned stochastic gradient Langevin dynamics, AAAI (without
    its term :math:`\Gamma`, as there); Chen, Fox, Guestrin (2014), Stochastic gradient Hamiltonian
    Monte Carlo, ICML, Eq. 15; Zhang, Bu, Chen, Long (2021), Differentially private Bayesian neural
    networks on accuracy, privacy and reliability, Algorithm 2, Theorem 1 and appendix D. Their
    accountant, a central limit theorem for Gaussian differential privacy, is an approximation and
    not a bound. It is not used here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.flatten_util import ravel_pytree
from numpyro.infer import init_to_median

from numpyro_dp.core import Estimator, Number, PyTree, Released
from numpyro_dp.extend import centred_if_possible, check_real

POINT_SUFFIX = "_auto_loc"  # NumPyro's suffix of the parameters of AutoDelta
_LARGEST = 1e12

StepSize = float | Callable[[Array], Array] | None
Parts = tuple[Array, ...]  # state of a kernel. The first array is the position
_State = tuple[Array, tuple[PyTree, ...]]


@dataclasses.dataclass(frozen=True, eq=False)
class SGLD:
    """Stochastic gradient Langevin dynamics.

    Args:
        model: A NumPyro model with a plate over records.
        step_size: A number, or a function of the step number (a JAX array). By default the largest
            that the privacy noise allows.
        temperature: T > 0.
        init_strategy: One of NumPyro's strategies for initial values. It sees no record.

    Example:
        >>> import numpyro, numpyro.distributions as dist
        >>> from numpyro_dp import SGLD
        >>> def model(x):
        ...     mean = numpyro.sample("mean", dist.Normal(0, 10))
        ...     with numpyro.plate("records", x.shape[0]):
        ...         numpyro.sample("x", dist.Normal(mean, 1), obs=x)
        >>> kernel = SGLD(model, step_size=lambda t: 1e-3 / (1 + t / 100) ** 0.55)
    """

    model: Callable[..., object]
    step_size: StepSize = None
    temperature: float = 1.0
    init_strategy: Callable[..., object] = dataclasses.field(default=init_to_median, kw_only=True)

    def __post_init__(self) -> None:
        if not callable(self.model):
            raise TypeError(
                f"Expected model to be a NumPyro model, got {type(self.model).__name__}."
            )
        if self.step_size is not None and not callable(self.step_size):
            check_real("step_size", self.step_size, low=0, low_open=True, high=_LARGEST)
        check_real("temperature", self.temperature, low=0, low_open=True, high=_LARGEST)

    @property
    def draws(self) -> bool:
        """Whether the kernel adds noise to the privacy noise."""
        return self.step_size is not None

    def start(self, position: Array) -> Parts:
        """Returns the initial state. Its first entry is the position."""
        return (position,)

    def largest_step_size(self, noise_scale: Number) -> Any:
        """Returns the step size at which privacy noise is all the noise."""
        return 2 * self.temperature / noise_scale**2  # where 2 eta T = (eta s)^2

    def step_sizes(self, num_steps: int) -> np.ndarray | None:
        """Returns the step size of each step, or ``None`` for the largest.

        Raises:
            ValueError: If they are not finite numbers > 0.
        """
        size = self.step_size
        if size is None:
            return None
        if not callable(size):
            return np.asarray([size], np.float64)
        sizes = jax.vmap(lambda step: jnp.asarray(size(step), float))(jnp.arange(num_steps))
        sizes = np.asarray(sizes, np.float64)
        if not (np.isfinite(sizes).all() and (sizes > 0).all()):
            raise ValueError(
                f"Expected step_size to return finite numbers > 0, got {sizes.min()} to "
                f"{sizes.max()} in {num_steps} steps. Set a positive lower limit."
            )
        return sizes

    def move(self, step: Array, score: Array, noise: Array, draw: Array, state: Parts) -> Parts:
        """Takes a step. ``noise`` is s, and ``draw`` is standard normal."""
        (position,) = state
        return (position + self._change(self._rate(step, noise), score, noise, draw),)

    def _rate(self, step: Array, noise: Array) -> Array:
        if self.step_size is None:
            return self.largest_step_size(noise)
        return jnp.asarray(self.step_size(step) if callable(self.step_size) else self.step_size)

    def _change(
        self, rate: Array, score: Array, noise: Array, draw: Array, friction: float = 1.0
    ) -> Array:
        wanted = 2 * friction * rate * self.temperature
        rest = wanted - (rate * noise) ** 2
        # A difference within rounding error counts as 0.
        rest = jnp.where(rest > 8 * jnp.finfo(rest.dtype).eps * wanted, rest, 0)
        return rate * score + jnp.sqrt(rest) * draw


@dataclasses.dataclass(frozen=True, eq=False)
class PreconditionedSGLD(SGLD):
    r"""SGLD with RMSprop's preconditioner, computed from released scores only.

    .. math:: V \leftarrow \beta V + (1 - \beta)\,\tilde g^2, \qquad
        G = \frac{\lambda + \sqrt{\min V}}{\lambda + \sqrt V},

    with :math:`\lambda` a fraction of :math:`\sqrt{\mathrm{mean}\,V}`. V comes from earlier steps,
    so G does not depend on the noise that it multiplies. Coordinates with large scores take smaller
    steps than in SGLD. None takes a larger step. If the privacy noise dominates, all V are alike,
    and so are the steps. The term of the dynamics with the divergence of G is left out, as in the
    paper's code.

    Args:
        model: See :class:`SGLD`.
        step_size: Step size of the coordinate with the smallest scores. See :class:`SGLD`.
        temperature: T > 0.
        decay: beta in [0, 1).
        damping: lambda as a fraction of the square root of V's mean, > 0.
        init_strategy: See :class:`SGLD`.

    Example:
        >>> import numpyro, numpyro.distributions as dist
        >>> from numpyro_dp import PreconditionedSGLD
        >>> def model(x):
        ...     mean = numpyro.sample("mean", dist.Normal(0, 10).expand([2]).to_event(1))
        ...     with numpyro.plate("records", x.shape[0]):
        ...         numpyro.sample("x", dist.Normal(mean[0] + 9 * mean[1], 1), obs=x)
        >>> kernel = PreconditionedSGLD(model, decay=0.999)
    """

    decay: float = 0.99
    damping: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_real("decay", self.decay, low=0, high=1, high_open=True)
        check_real("damping", self.damping, low=0, low_open=True)

    @property
    def draws(self) -> bool:
        """True: coordinates with smaller steps need more noise than the privacy noise."""
        return True

    def start(self, position: Array) -> Parts:
        """Returns the initial state: position and mean square."""
        return position, jnp.zeros_like(position)

    def move(self, step: Array, score: Array, noise: Array, draw: Array, state: Parts) -> Parts:
        """Takes a step."""
        position, squares = state
        seen = squares / jnp.maximum(1 - self.decay**step, 1e-30)  # Adam's bias correction
        least = self.damping * jnp.sqrt(jnp.mean(seen)) + jnp.finfo(position.dtype).tiny
        scale = (least + jnp.sqrt(jnp.min(seen))) / (least + jnp.sqrt(seen))
        rate = scale * self._rate(step, noise)
        squares = self.decay * squares + (1 - self.decay) * score**2
        return position + self._change(rate, score, noise, draw), squares


@dataclasses.dataclass(frozen=True, eq=False)
class SGHMC(SGLD):
    """Stochastic gradient Hamiltonian Monte Carlo with friction.

    Args:
        model: See :class:`SGLD`.
        step_size: Learning rate in the momentum form. SGLD moves at the same long-run pace with
            this step size divided by the friction. See :class:`SGLD`.
        temperature: T > 0.
        friction: Fraction of the momentum that a step loses, in (0, 1].
        init_strategy: See :class:`SGLD`.

    Example:
        >>> import numpyro, numpyro.distributions as dist
        >>> from numpyro_dp import SGHMC
        >>> def model(x):
        ...     mean = numpyro.sample("mean", dist.Normal(0, 10))
        ...     with numpyro.plate("records", x.shape[0]):
        ...         numpyro.sample("x", dist.Normal(mean, 1), obs=x)
        >>> kernel = SGHMC(model, friction=0.2)
    """

    friction: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_real("friction", self.friction, low=0, low_open=True, high=1)

    def start(self, position: Array) -> Parts:
        """Returns the initial state: position and momentum."""
        return position, jnp.zeros_like(position)

    def largest_step_size(self, noise_scale: Number) -> Any:
        """Returns the step size at which privacy noise is all the noise."""
        return self.friction * super().largest_step_size(noise_scale)

    def move(self, step: Array, score: Array, noise: Array, draw: Array, state: Parts) -> Parts:
        """Takes a step."""
        position, momentum = state
        kick = self._change(self._rate(step, noise), score, noise, draw, self.friction)
        momentum = (1 - self.friction) * momentum + kick
        return position + momentum, momentum


class Score(NamedTuple):
    """Input of a sampler's step.

    Attributes:
        gradient: Estimate of the score, by parameter of the point guide.
        noise_scale: Standard deviation of the privacy noise in each coordinate of the score.
        rng_key: Key of the sampler's own draws. It is not secret.
    """

    gradient: dict[str, Array]
    noise_scale: Number
    rng_key: Array


def langevin(problem: Any) -> Estimator:
    """The estimator of samplers, for a point guide. The guide's parameters are the position.

    Guarantee:
        The signal reads one record. ``prepare`` and ``pull_back`` read none.
    """
    base = centred_if_possible(problem)

    def pull_back(public: PyTree, released: Released) -> Score:
        prior = jax.grad(problem.log_prior)(public.latents, public.params)
        gradient = {
            f"{site}{POINT_SUFFIX}": slope + released.total[site].astype(slope.dtype)
            for site, slope in prior.items()
        }
        # Parameters without entries: all their entries became latent sites.
        gradient |= {name: public.params[name] for name in problem.record_params}
        key = jax.random.fold_in(public.rng_key, 1)  # child 0 is for draws of records
        return Score(gradient, released.noise_scale, key)

    # A regression on the positions of a chain would be biased: they follow earlier noise.
    return base._replace(pull_back=pull_back, observe=None)


class LangevinSteps:
    """A kernel as an optimiser with NumPyro's ``init``, ``get_params`` and ``update``.

    Its state has the number of steps taken and the parts of the kernel's state.

    Args:
        kernel: The kernel.
    """

    def __init__(self, kernel: SGLD) -> None:
        self._kernel = kernel

    def init(self, params: dict[str, Array]) -> _State:
        """Returns the initial state."""
        flat, unravel = ravel_pytree(params)
        return jnp.zeros((), jnp.int32), tuple(unravel(part) for part in self._kernel.start(flat))

    def get_params(self, state: _State) -> dict[str, Array]:
        """Returns the position."""
        return state[1][0]

    def update(self, score: Score, state: _State, **_: object) -> _State:
        """Takes a step."""
        (step, parts), kernel = state, self._kernel
        gradient, unravel = ravel_pytree(score.gradient)
        noise = jnp.asarray(score.noise_scale, gradient.dtype)
        draw = jnp.zeros_like(gradient)
        if kernel.draws:
            draw = jax.random.normal(score.rng_key, gradient.shape, gradient.dtype)
        flat = tuple(ravel_pytree(part)[0] for part in parts)
        moved = kernel.move(step, gradient, noise, draw, flat)
        return step + 1, tuple(unravel(part) for part in moved)
