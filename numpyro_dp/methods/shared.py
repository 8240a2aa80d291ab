"""What several methods share: checks of their arguments, and the result of those not private."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_dp.core import Values
from numpyro_dp.extend import check_real

#: A number, or a function of the step number (a JAX array).
Rate = float | Callable[[Array], Array]


class SensitiveEPResult(NamedTuple):
    """Result of ``EP.run`` and ``PBP.run``. Not private: never publish it.

    Attributes:
        params: Natural parameters of the posterior.
        trace: The same after each sweep, with a leading axis.
    """

    params: dict[str, Array]
    trace: dict[str, Array]

    def __repr__(self) -> str:
        return f"SensitiveEPResult(params of {sorted(self.params)}: not private)"


class SensitiveSites(NamedTuple):
    """The posterior and the site of each record. Sensitive: never publish it.

    Attributes:
        params: Natural parameters of the posterior.
        sites: Natural parameters of each record's site, leading axis ``records``.
    """

    params: dict[str, Array]
    sites: dict[str, Array]


def equal_sites(params: dict[str, Array], extra: dict[str, Array], number: int) -> SensitiveSites:
    """Returns equal sites of records that share what a start has beyond the prior."""
    sites = {n: jnp.broadcast_to(x / number, (number, *x.shape)) for n, x in extra.items()}
    return SensitiveSites(params, sites)


def checked_start(init_params: Values, like: Values, some: bool = False) -> dict[str, np.ndarray]:
    """Returns initial values as float64, or raises ValueError if names or shapes differ.

    Args:
        init_params: The values given.
        like: Values with the names and shapes that are expected.
        some: Whether entries may be missing.
    """
    found = {name: np.asarray(value, np.float64) for name, value in init_params.items()}
    given = {name: value.shape for name, value in found.items()}
    shapes = {name: np.shape(value) for name, value in like.items()}
    if given != {name: shapes.get(name) for name in (given if some else shapes)}:
        among = "shapes among" if some else "the names and shapes"
        raise ValueError(f"Expected init_params with {among} {shapes}, got {given}.")
    return found


def check_probs(value: object, number: int | None = None) -> np.ndarray:
    """Returns weights of components as float64, or raises ValueError.

    Args:
        value: Weights > 0 that add up to 1.
        number: Expected number of weights, by default any.
    """
    try:
        probs = np.asarray(value, np.float64)
    except (TypeError, ValueError):
        probs = np.zeros(0)
    good = probs.ndim == 1 and probs.size > 0 and bool((probs > 0).all())
    if not good or abs(probs.sum() - 1) > 1e-5 or number not in (None, probs.size):
        count = "" if number is None else f"{number} "
        raise ValueError(f"Expected {count}probs > 0 that add up to 1, got {value!r}.")
    return probs


def schedule(name: str, rate: Rate) -> Callable[[Array], Array]:
    """Returns a rate as a function of the step number into [0, 1].

    Args:
        name: Name of the argument.
        rate: A number in (0, 1], or a function of the step number.

    Raises:
        TypeError, ValueError: If the rate is neither.
    """
    if not callable(rate):
        check_real(name, rate, low=0, low_open=True, high=1)
    chosen = rate if callable(rate) else lambda _: jnp.asarray(rate)
    return lambda step: jnp.clip(jnp.asarray(chosen(step), jnp.result_type(float)), 0, 1)
