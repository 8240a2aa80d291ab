"""Checks of static arguments. Each error names the value, the range and the remedy."""

from __future__ import annotations

import math
import numbers

import numpy as np


def check_real(
    name: str,
    value: object,
    *,
    low: float = -math.inf,
    high: float = math.inf,
    low_open: bool = False,
    high_open: bool = False,
    remedy: str = "",
) -> float:
    """Returns ``value`` as a float if it is in the interval, or raises.

    Raises:
        TypeError: If the value is not a real number.
        ValueError: If the value is NaN or outside the interval.

    Example:
        >>> check_real("rate", 0.5, low=0, low_open=True, high=1)
        0.5
    """
    expected = _interval(low, high, low_open, high_open)
    # NumPy scalars are registered as numbers.Real. So are booleans, which must not pass.
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(_message(f"{name}={value!r}", f"a real number {expected}", remedy))
    number = float(value)
    below = number <= low if low_open else number < low
    above = number >= high if high_open else number > high
    if math.isnan(number) or below or above:
        raise ValueError(_message(f"{name}={value!r}", f"a number {expected}", remedy))
    return number


def check_int(
    name: str, value: object, *, low: int, high: int | None = None, remedy: str = ""
) -> int:
    """Returns ``value`` as an int with ``low <= value <= high``, or raises.

    Raises:
        TypeError: If the value is not an integer.
        ValueError: If the value is outside the range.

    Example:
        >>> check_int("num_steps", 100, low=1)
        100
    """
    expected = f"an integer >= {low}" if high is None else f"an integer in [{low}, {high}]"
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(_message(f"{name}={value!r}", expected, remedy))
    number = int(value)
    if number < low or (high is not None and number > high):
        raise ValueError(_message(f"{name}={value!r}", expected, remedy))
    return number


def check_in(name: str, value: object, allowed: tuple[object, ...], *, remedy: str = "") -> object:
    """Returns ``value`` if it is one of ``allowed``, or raises ValueError with the list."""
    if value not in allowed:
        choices = ", ".join(repr(item) for item in allowed)
        raise ValueError(_message(f"{name}={value!r}", f"one of {choices}", remedy))
    return value


def _interval(low: float, high: float, low_open: bool, high_open: bool) -> str:
    if low == -math.inf and high == math.inf:
        return "in (-inf, inf)"
    if high == math.inf:
        return f"> {low:g}" if low_open else f">= {low:g}"
    return f"in {'(' if low_open else '['}{low:g}, {high:g}{')' if high_open else ']'}"


def _message(got: str, expected: str, remedy: str) -> str:
    return f"Expected {expected}, got {got}. {remedy}".rstrip()


def check_callable(name: str, value: object) -> None:
    """Raises TypeError unless a model or guide can be called."""
    if not callable(value):
        raise TypeError(
            f"Expected {name} to be a function with NumPyro primitives, got "
            f"{type(value).__name__}. Pass arguments in the order DPSVI(model, guide, optim, ...)."
        )


def check_num_steps(num_steps: int, most: int) -> int:
    """Returns the number of steps. The error does not print an array: it may hold records."""
    if np.ndim(num_steps):
        raise TypeError(
            f"Expected num_steps to be an integer >= 1, got an array of shape "
            f"{np.shape(num_steps)}. Call run(rng_key, num_steps, *args)."
        )
    return check_int("num_steps", num_steps, low=1, high=most)


def check_sizes(**sizes: int | None) -> None:
    """Raises unless each value is None or an integer >= 1."""
    for name, value in sizes.items():
        if value is not None:
            check_int(name, value, low=1)
