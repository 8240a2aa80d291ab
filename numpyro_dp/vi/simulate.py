r"""Finds a clip norm on simulated records, which reads no private data and costs no budget.

The model draws records :math:`\hat x_i` from its prior predictive, with public or invented
covariates. The method runs on them without clip and noise. The norm is a quantile of the norms of
their signals at the last iterate :math:`\varphi`,

.. math::
    Q_\gamma\big\{\, \lVert s(\varphi, \eta_k, \hat x_i) \rVert
        \;:\; i \le n,\; k \le K \,\big\},

over K draws :math:`\eta_k` of the guide. The result is the median over several simulated sets.

The norm is as good as the prior. If the prior allows records on a very different scale than the
real ones, use :class:`~numpyro_dp.mechanisms.AdaptiveClip`, perhaps with this norm as ``initial``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from numpyro import handlers

from numpyro_dp._compat import make_program
from numpyro_dp._tree import squared_norm
from numpyro_dp._validate import check_int, check_real
from numpyro_dp.core import Estimator
from numpyro_dp.model.public import UnsupportedModelError
from numpyro_dp.model.records import check_arrays, split_arrays
from numpyro_dp.run import checks
from numpyro_dp.vi.svi import DPSVI

__all__ = ["simulated_clip_norm"]

_AT_ONCE = 256  # records whose signals are in memory together


def simulated_clip_norm(
    svi: DPSVI,
    rng_key: Array,
    num_steps: int,
    *args: Any,
    quantile: float = 0.5,
    num_sets: int = 5,
    num_draws: int = 10,
    **kwargs: Any,
) -> float:
    """Returns a clip norm found on records simulated from the model.

    The estimator, optimiser and sampler of ``svi`` run on each of ``num_sets`` simulated sets,
    without clip and noise. The norm is a quantile of the norms of the signals at the end.

    Args:
        svi: A driver like the one of the private run. Its clip norm, noise and budget are ignored.
        rng_key: Key of all draws. It need not be secret.
        num_steps: Steps on each simulated set, enough to converge without noise.
        *args: *Stand-in* arguments of the model: public or invented covariates, with any number of
            rows. Only the shape and dtype of an observed array (``obs=y``) matter.
        quantile: Fraction of the signals that the norm should not clip, in (0, 1).
        num_sets: Number of simulated sets.
        num_draws: Draws of the guide at the last iterate.
        **kwargs: Stand-in keyword arguments of the model.

    Raises:
        TypeError, ValueError: Name the value, the range and the remedy.
        UnsupportedModelError: If the value of an observed site is not itself an argument, or the
            model cannot draw from a prior.

    Example:
        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist, optax
        >>> from numpyro.infer.autoguide import AutoDiagonalNormal
        >>> from numpyro_dp import DPSVI
        >>> from numpyro_dp.estimators import aligned
        >>> from numpyro_dp.mechanisms import simulated_clip_norm
        >>> from numpyro_dp.samplers import FullBatch
        >>> def model(x):
        ...     mean = numpyro.sample("mean", dist.Normal(0, 1))
        ...     with numpyro.plate("records", x.shape[0]):
        ...         numpyro.sample("x", dist.Normal(mean, 2), obs=x)
        >>> draft = DPSVI(model, AutoDiagonalNormal(model), optax.adam(0.1), estimator=aligned(),
        ...               clip_norm=1.0, sampler=FullBatch(), noise_multiplier=1.0)
        >>> norm = simulated_clip_norm(draft, jax.random.key(0), 50, jnp.zeros(300))
        >>> abs(norm - 0.6745 / 2) < 0.05  # the median of |x - mean| / 2^2
        True

    Guarantee:
        Reads no private record *if no argument holds one*, and then costs no budget. Arguments that
        are not observed influence the norm, so they must be public.
    """
    _check(svi, rng_key, num_steps, quantile, num_sets, num_draws)
    first, rest = jax.random.split(rng_key)
    driver, simulate = _without_privacy(svi, first), _simulator(svi, args, kwargs)
    norms = _norms(driver, simulate, jax.random.split(rest, (num_sets, 3)), num_steps, num_draws)
    return _checked(float(np.median([_quantile(each, quantile) for each in norms])))


def _check(svi: Any, rng_key: Any, num_steps: Any, quantile: Any, *numbers: Any) -> None:
    if not isinstance(svi, DPSVI):
        raise TypeError(
            f"Expected svi to be a DPSVI, got {type(svi).__name__}. Its clip_norm is ignored: pass "
            "clip_norm=1.0 for now."
        )
    checks.check_rng_key(rng_key)
    checks.check_num_steps(num_steps, np.iinfo(np.int32).max - 1)
    check_real("quantile", quantile, low=0, high=1, low_open=True, high_open=True,
               remedy="It is the fraction of the records that should not be clipped.")  # fmt: skip
    for name, number in zip(("num_sets", "num_draws"), numbers, strict=True):
        check_int(name, number, low=1)


def _without_privacy(svi: DPSVI, key: Array) -> DPSVI:
    """Returns the same driver without clip and noise. ``key`` decides its batches."""
    secret = np.asarray(jax.random.bits(key, (8,), jnp.uint32)).tobytes()
    return DPSVI(
        svi.model, svi.guide, svi.optim, svi.loss, estimator=svi.method.estimator,
        clip_norm=math.inf, sampler=svi.settings.sampler, noise_multiplier=0.0, secret_key=secret,
        data_plate=svi._frontend.given.data_plate, public=svi.settings.public, **svi.static_kwargs,
    )  # fmt: skip


def _simulator(svi: DPSVI, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any]:
    """Returns ``key -> (args, kwargs)`` with observed arrays from the prior predictive."""
    check_arrays(args, kwargs)
    found, fill = split_arrays((args, kwargs))
    arrays = [jnp.asarray(array) for array in found]

    def trace(model: Callable[..., Any], key: Array, values: Any) -> dict[str, Any]:
        args, kwargs = fill(values)
        run = handlers.trace(handlers.seed(model, key))
        try:
            return run.get_trace(*args, **kwargs, **svi.static_kwargs)
        except NotImplementedError as error:
            raise UnsupportedModelError(
                "The model has a distribution that cannot be drawn from, such as ImproperUniform, "
                "so it cannot simulate records. Use a proper prior, or "
                "clip_norm=AdaptiveClip(...)."
            ) from error

    sites = svi.structure(*fill(arrays)).likelihood
    observed = _observed_arguments(functools.partial(trace, svi.model), sites, arrays)

    hidden = set(observed.values())

    def draw(key: Array, values: list[Array]) -> list[Array]:
        # Ones, so that nothing but the shape of an observed argument can reach the norm.
        values = [jnp.ones_like(v) if n in hidden else v for n, v in enumerate(values)]
        sampled, drawn = trace(handlers.uncondition(svi.model), key, values), list(values)
        for name, number in observed.items():
            value = jnp.broadcast_to(sampled[name]["value"], values[number].shape)
            drawn[number] = value.astype(values[number].dtype)
        return drawn

    compiled = jax.jit(draw)
    return lambda key: fill(compiled(key, arrays))


def _observed_arguments(
    traced: Callable[..., dict[str, Any]], sites: tuple[str, ...], arrays: list[Array]
) -> dict[str, int]:
    """Finds from shapes alone which argument is the value of each observed site."""

    def values(*arrays: Array) -> list[Any]:
        trace = traced(jax.random.key(0), arrays)
        return [trace[name]["value"] for name in sites]

    program, _ = make_program(values, *arrays)
    observed: dict[str, int] = {}
    for name, value in zip(sites, program.outputs, strict=True):
        number = next((n for n, var in enumerate(program.inputs) if var is value), None)
        if number is None or number in observed.values():
            raise UnsupportedModelError(
                f"Expected the value of observed site {name!r} to be an argument of the model "
                "itself (obs=y), and of no other site. Otherwise simulated values cannot replace "
                "it. Compute it before the call, or use clip_norm=AdaptiveClip(...)."
            )
        observed[name] = number
    return observed


def _norms(
    driver: DPSVI, simulate: Callable[[Array], Any], keys: Array, num_steps: int, num_draws: int
) -> Iterator[np.ndarray]:
    """Yields the norms of the signals of each set, for several draws of the guide."""
    signal_norms = None
    for data_key, run_key, draw_key in keys:
        args, kwargs = simulate(data_key)
        result = driver.run(run_key, num_steps, *args, progress_bar=False, trace_size=1, **kwargs)
        session = driver._session(args, kwargs)  # all sets have one shape, so they share a session
        signal_norms = signal_norms or _signal_norms(driver.method.estimator(session.problem))
        params = driver.optim.get_params(result.state.optim_state)
        draws = jax.random.split(draw_key, num_draws)
        yield np.asarray(signal_norms(params, draws, session.rows(args, kwargs).arrays))


def _signal_norms(estimator: Estimator) -> Callable[..., Array]:
    """Returns ``(params, keys, arrays) -> norms``, compiled."""

    def norms(params: dict[str, Any], keys: Array, arrays: tuple[Array, ...]) -> Array:
        def of_draw(key: Array) -> Array:
            public = estimator.prepare(key, params)

            def one(example: tuple[Array, ...]) -> Array:
                return jnp.sqrt(squared_norm(estimator.signal(public, example)))

            return lax.map(one, arrays, batch_size=_AT_ONCE)

        return lax.map(of_draw, keys)

    return jax.jit(norms)


def _quantile(norms: np.ndarray, quantile: float) -> float:
    """Takes the finite norms only: a run counts other records as 0."""
    finite = norms[np.isfinite(norms)]
    return float(np.quantile(finite, quantile)) if finite.size else math.nan


def _checked(norm: float) -> float:
    if not 0 < norm < math.inf:
        raise ValueError(
            f"Expected signals of finite norms > 0 on simulated records, got {norm}. Priors may be "
            "too wide, or steps too large. Make them smaller, or use clip_norm=AdaptiveClip(...)."
        )
    return norm
