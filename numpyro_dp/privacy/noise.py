r"""Gaussian noise of integers on a grid, so that the guarantee is that of the program.

The proof of the Gaussian mechanism is for real numbers. Floating-point noise has gaps: the low
bits of a released number can tell which sum it was added to (Mironov 2012). Here sum and noise are
integers. With a grid of spacing g, the release of d numbers :math:`x` is

.. math:: g\,(\mathrm{round}(x / g) + Z), \qquad
    Z_j = A_{j0} + K A_{j1} + K^2 A_{j2}, \qquad P(A = a) \propto e^{-a^2 / 2 s^2},

with s = 1120 and K = 320. All A are independent, so Z has the variance
:math:`S^2 = s^2 (1 + K^2 + K^4)`, about :math:`(1.1 \cdot 10^8)^2`. The spacing g is chosen so
that S g is the wanted standard deviation. Conversion to floating point comes last. It is a function
of the integer :math:`\mathrm{round}(x / g) + Z` alone.

**Guarantee.** Let sums of neighbours differ by at most C in Euclidean norm, and
:math:`S' = \sqrt{S^2 - 6}`. The release satisfies every bound of the Gaussian mechanism on real
numbers with noise multiplier m, up to a total variation of at most ``TOTAL_VARIATION``:

1. *Sensitivity.* Rounding moves each number by at most 1/2. So the integers of neighbours differ by
   at most :math:`C / g + \sqrt d`, which is at most S'/m for
   :math:`g = m C / (S' - m \sqrt d)`. A sum of float32 that comes as an integer is never rounded
   before this (:func:`whole_on_grid`), so it may have any number of records.
2. *Rounded real noise.* Let G be real, N(0, S'^2), and R(y) the integer k drawn with probability
   proportional to :math:`e^{-(k - y)^2 / 12}`. For an integer M, M + R(G) is R(M + G), a function
   of the release of the Gaussian mechanism. R(G) = k has the probability of the discrete Gaussian
   of variance :math:`S^2`, except for the normaliser of R. Its relative error is at most
   :math:`\theta(\sqrt 6)` with :math:`\theta(h) = 2.1\, e^{-2 \pi^2 h^2}` (Poisson's summation),
   so the distance is at most :math:`2\,\theta(\sqrt 6)`.
3. *Sums.* For A, B discrete Gaussian with standard deviations a, b, the sum A + K B is discrete
   Gaussian of variance :math:`a^2 + K^2 b^2`, up to a distance of :math:`2\,\theta(h)` with
   :math:`h = a b / \sqrt{a^2 + K^2 b^2}`. Both sums in Z have :math:`h > 3.4`.
4. *Table.* A is drawn from 160 random bits by Walker's method. The table has 16,384 probabilities
   in units of :math:`2^{-159}`, and leaves out values beyond 14.6 s.

One number is within :math:`2^{-144}` in total (``tests/privacy/test_noise_on_grid.py`` computes
this with exact numbers). A release has at most :math:`2^{24}` numbers. Delta includes the sum over
all steps.

Reference:
    C. Canonne, G. Kamath, T. Steinke, "The discrete Gaussian for differential privacy", NeurIPS
    2020. D. Micciancio, M. Walter, "Gaussian sampling over the integers", CRYPTO 2017 (sums).
    I. Mironov, "On significance of the least significant bits for differential privacy", CCS 2012.
    A. J. Walker, "An efficient method for generating discrete random variables with general
    distributions", ACM TOMS 1977.
"""

from __future__ import annotations

import decimal
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import DTypeLike
from jaxtyping import Int

from numpyro_dp.core import Number, Whole
from numpyro_dp.privacy.random import check_typed_key

_WIDTH, _FACTOR = 1120, 320  # s and K
_LOG = 14  # 16,384 values in the table, whose first words fit a near cache of a CPU
_BITS = 145  # of a threshold. With 14 for the place and 1 for the sign they fill five words.
_WORDS = 5
_STRETCH = 4096  # values drawn at once: their bits stay in a near cache

STD = _WIDTH * math.sqrt(1 + _FACTOR**2 + _FACTOR**4)
MOST = 2**24
TOTAL_VARIATION = MOST * 2.0**-144
_REAL_STD = math.sqrt(STD**2 - 6)
_UP = 1 + 2.0**-18  # keeps the spacing in single precision at least as wide as the proof needs
_FINEST = 2.0**-60  # smallest spacing in units of C, so that x / g stays finite


def discrete_gaussian(key: Array, size: int) -> Int[Array, " size"]:
    """Draws independent integers of mean 0 and standard deviation ``STD``, int32.

    Args:
        key: A scalar typed key. The result is as unpredictable as the key's generator.
        size: How many.

    Raises:
        TypeError, ValueError: If ``key`` is not a scalar typed key.

    Example:
        >>> from numpyro_dp.privacy.keys import secret_key
        >>> noise = discrete_gaussian(secret_key(0), 100_000)
        >>> bool(0.97 < noise.std() / STD < 1.03)
        True
    """
    check_typed_key(key)
    if size <= _STRETCH:
        return _drawn(key, size)
    keys = jax.random.split(key, -(-size // _STRETCH))
    draw = functools.partial(_drawn, size=_STRETCH)
    drawn = lax.platform_dependent(
        keys, cpu=functools.partial(lax.map, draw), default=jax.vmap(draw)
    )
    return drawn.reshape(-1)[:size]


def spacing_of(
    sensitivity: Number, noise_multiplier: Number, size: int, dtype: DTypeLike
) -> tuple[Array, ...]:
    """Returns the spacing of the grid, and whether a sum can be told from noise at all.

    The noise on this grid has standard deviation ``sensitivity * noise_multiplier / (1 - part)``,
    where rounding ``size`` numbers takes ``part = noise_multiplier * sqrt(size) / 1.1e8``. If that
    exceeds 1/2, the second value is false, and the release must be noise alone.
    """
    noise_multiplier = jnp.asarray(noise_multiplier, dtype)
    sensitivity = jnp.asarray(sensitivity, dtype)
    left = _REAL_STD - noise_multiplier * (math.sqrt(size) * _UP)
    told = (left > _REAL_STD / 2) & (noise_multiplier > 0)
    # If the sum cannot be told from noise, any positive spacing will do.
    spacing = _UP * noise_multiplier * sensitivity / jnp.where(told, left, _REAL_STD)
    return jnp.maximum(spacing, _FINEST * sensitivity), told


def on_grid(total: Array, noise: Int[Array, ...], spacing: Array, told: Array) -> Array:
    """Returns a sum plus noise, both as integers of a grid.

    Args:
        total: The sum, a floating-point array.
        noise: Integers of its shape.
        spacing: Spacing of the grid, from :func:`spacing_of` with ``told``.
        told: Whether the release contains the sum.

    Guarantee:
        The result is a function of the integer round(total / spacing) + noise.
    """
    # Multiplied, not divided: the error of 1 / spacing is the same for all sums.
    steps = jnp.round(total * (1 / spacing).astype(total.dtype))
    # A NaN or an infinity would pass through the noise unchanged, so it becomes 0.
    steps = jnp.where(told & jnp.isfinite(steps), steps, 0)
    # steps = high 2^16 + low, exactly. The carry makes low one of 0 ... 2^16 - 1 again, so the
    # pair depends on the sum of the integers alone. `high` may be too large for an int32.
    high = jnp.floor(steps * 2.0**-16)
    low = (steps - high * 2.0**16).astype(jnp.int32) + noise
    carry, low = low >> 16, low & 0xFFFF
    high = high + carry.astype(total.dtype)
    return (high * 2.0**16 + low.astype(total.dtype)) * spacing.astype(total.dtype)


def whole_on_grid(total: Whole, noise: Int[Array, ...], spacing: Array, told: Array) -> Array:
    r"""Returns the same release of a sum that is exact, :class:`~numpyro_dp.core.Whole`.

    With T the integer of the sum and :math:`\rho` the ratio of its grid's spacing to the wanted
    one, the release is :math:`g' (\lfloor T p\, 2^{-s} + 1/2 \rfloor + Z)`. Here p has 16 bits,
    :math:`p\, 2^{-s} \le \rho`, and :math:`g'` is the spacing of T's grid times :math:`2^s / p`.
    So the noise is wider than asked for by a part of at most :math:`2^{-15}`. No step rounds but
    the one to an integer, so the sum may have any size.

    Args:
        total: The sum, with its spacing.
        noise: Integers of its shape.
        spacing: Wanted spacing of the grid, from :func:`spacing_of` with ``told``.
        told: Whether the release contains the sum.

    Guarantee:
        The result is a function of the integer above.
    """
    # Made smaller by more than the rounding of the division. A ratio that is too large would give a
    # finer grid, and so too little noise.
    ratio = (total.spacing / spacing) * (1 - 2.0**-20)
    part, exponent = jnp.frexp(ratio)
    shift, large = 16 - exponent, exponent > 16
    told = told & (shift < 48)  # else the sum is far below the noise
    # A ratio beyond 2^16 is noise below a thousandth of the sensitivity. It becomes a thousandth.
    factor = jnp.where(large, 65535.0, jnp.floor(part * 2.0**16))
    shift = jnp.clip(shift, 0, 47)
    own = jnp.where(told, jnp.ldexp(total.spacing, shift) / factor, spacing)
    high, low = _shifted(*_product(total, factor.astype(jnp.uint32)), shift.astype(jnp.uint32))
    high, low = _plus(jnp.where(told, high, 0), jnp.where(told, low, 0), noise)
    # The sign is split off, so that small numbers keep their digits.
    negative = high < 0
    low = jnp.where(negative, -low, low)  # modulo 2^32
    high = jnp.where(negative, ~high + (low == 0), high)
    size = (high.astype(jnp.float32) * 2.0**32 + low.astype(jnp.float32)) * own
    return jnp.where(negative, -size, size)


def _product(total: Whole, factor: Array) -> tuple[Array, Array]:
    """Integer of a sum times a number below 2^16, as int32 * 2^32 + uint32."""
    # Parts of 16 bits, so that no product with the factor exceeds 32 bits.
    top = total.high >> 16
    middle, low = ((x & 0xFFFF).astype(jnp.uint32) for x in (total.high, total.low))
    low, middle = low * factor, middle * factor
    carried = (middle & 0xFFFF) + (low >> 16)
    high = top * factor.astype(jnp.int32) + ((middle >> 16) + (carried >> 16)).astype(jnp.int32)
    return high, (carried << 16) | (low & 0xFFFF)


def _shifted(high: Array, low: Array, shift: Array) -> tuple[Array, Array]:
    """The number divided by 2^shift and rounded to an integer, half of the way up."""

    def right(by: Array) -> tuple[Array, Array]:
        # First a whole word, then the rest: each shift of a word stays below 32, its width.
        whole, by = by >= 32, by & 31
        top = jnp.where(whole, high >> 31, high)
        bottom = jnp.where(whole, high.astype(jnp.uint32), low)
        carried = jnp.where(by > 0, top.astype(jnp.uint32) << (32 - jnp.maximum(by, 1)), 0)
        return top >> by.astype(jnp.int32), (bottom >> by) | carried

    found = right(shift)
    half = jnp.where(shift > 0, right(jnp.maximum(shift, 1) - 1)[1] & 1, 0)
    return _plus(*found, half.astype(jnp.int32))


def _plus(high: Array, low: Array, small: Array) -> tuple[Array, Array]:
    """The number plus an int32."""
    total = low + small.astype(jnp.uint32)
    return high + (small >> 31) + (total < low).astype(jnp.int32), total


def _drawn(key: Array, size: int) -> Array:
    words = jax.random.bits(key, (3, size), jnp.uint32)
    place = words >> (32 - _LOG)
    first = _entries(0, place)
    # A first word has 14 bits of place, the sign, and 17 bits of the uniform number. An entry has
    # 15 bits of alias and 17 bits of the threshold.
    left = 31 - _LOG  # bits of the first word after the place and the sign
    here, limit = words & (2**left - 1), first & (2**left - 1)
    below = (here < limit) | _decided(key, place, here == limit)
    magnitude = jnp.where(below, place, first >> left).astype(jnp.int32)
    fine, middle, coarse = jnp.where((words >> left) & 1, -magnitude, magnitude)
    return fine + _FACTOR * (middle + _FACTOR * coarse)


def _decided(key: Array, place: Array, tied: Array) -> Array:
    """Whether numbers whose first words tied are below their thresholds.

    A first word ties with probability 2^-17, and each later one with 2^-32. So a stretch needs one
    more word in a tenth of all cases, and hardly ever two. How many it needs depends on noise
    alone. The loop compiles one draw for all words.
    """

    def undecided(state: tuple[Array, Array, Array]) -> Array:
        word, _, tied = state
        return (word < _WORDS) & tied.any()

    def next_word(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        word, below, tied = state
        own = jax.random.bits(jax.random.fold_in(key, word), place.shape, jnp.uint32)
        limit = _entries(word, place)
        return word + 1, below | (tied & (own < limit)), tied & (own == limit)

    start = jnp.asarray(1, jnp.int32), jnp.zeros_like(tied), tied
    return lax.while_loop(undecided, next_word, start)[1]


def tables() -> tuple[np.ndarray, ...]:
    """All arrays that programs with this noise hold. They are constants of this package."""
    return (_table(),)


def _entries(word: Array | int, place: Array) -> Array:
    return jnp.asarray(_table()).at[word, place].get(mode="promise_in_bounds")


def _probabilities() -> list[int]:
    """P(abs(A) = a) for a = 0, 1, ..., in units of 2^-159. They sum to 1 exactly."""
    one, unit = 2**256, 2 ** (_LOG + _BITS)
    with decimal.localcontext(prec=90):
        ratio, change = (
            int((-decimal.Decimal(part) / (2 * _WIDTH**2)).exp() * one) for part in (1, 2)
        )
    weights = [one // 2]  # half of the weight of 0, because 0 and -0 are the same
    weight = one
    for _ in range(2**_LOG - 1):
        # exp(-(a + 1)^2 / 2 s^2) from the value at a. The ratio of two values is geometric in a.
        weight, ratio = weight * ratio // one, ratio * change // one
        weights.append(weight)
    total = sum(weights)
    found = [(2 * unit * each + total) // (2 * total) for each in weights]
    found[0] += unit - sum(found)
    return found


@functools.cache
def _table() -> np.ndarray:
    """Walker's table: columns of five words have a threshold of 145 bits after an alias.

    It is stored by words, because most draws read first words alone.
    """
    unit, rest = 2**_BITS, _probabilities()
    aliases, thresholds = list(range(2**_LOG)), [0] * 2**_LOG
    small = [place for place, each in enumerate(rest) if each < unit]
    large = [place for place, each in enumerate(rest) if each >= unit]
    while small:
        # The rest of a place with less than a unit is filled from one with more.
        place, giver = small.pop(), large[-1]
        thresholds[place], aliases[place] = rest[place], giver
        rest[giver] -= unit - rest[place]
        if rest[giver] < unit:
            small.append(large.pop())
    rows = b"".join(
        (alias << _BITS | threshold).to_bytes(20)
        for alias, threshold in zip(aliases, thresholds, strict=True)
    )
    return np.ascontiguousarray(np.frombuffer(rows, ">u4").reshape(-1, 5).T, np.uint32)
