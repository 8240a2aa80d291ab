r"""How the norms of scores are distributed, next to what the model says.

In two late stages each record sends one more entry of 7 numbers. Six say in which class the norm of
its observed score lies. The last one says how far out it is: with the norm n in units of the
smallest clip norm, it is :math:`\min(1, (n / 3.5)^4)`. From all of them, their expectations in the
model are subtracted. Their weights bring the entry's norm to at most 1. The sum over records is
close to 0 in a correct model. A few records far out show in the last number alone, because it has
less noise than six.

In a wrong model, clipped scores are not centred. At the optimum of all scores, the clipped ones
then have a sum of norm B, the bias. A larger clip norm lowers B, but the noise grows with it. So
the last stages release scores in shells (:mod:`numpyro_dp.laplace.shells`).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_dp.model.outcomes import Outcomes
from numpyro_dp.model.public import own_constants

# Bounds of the classes, in units of the smallest clip norm. Scores in a model have norms near .5.
# Few classes, because each adds noise of the same size to a test over all of them.
_EDGES = np.array([0.5, 1.0, 2.2, 5.0, 11.0])
_CLASSES = len(_EDGES) + 1
_FAR, SIZES = 3.5, _CLASSES + 1
# Two probability vectors differ by a norm of root 2 at most, and two shares by 1.
_WEIGHTS = np.sqrt(np.append(np.full(_CLASSES, 1 / 6), 2 / 3))
_FIRST = 2  # class of the first scores that are longer than the smallest clip norm
_MIDDLE = np.append(np.sqrt(_EDGES[_FIRST - 1 : -1] * _EDGES[_FIRST:]), 1.5 * _EDGES[-1])
# Most of the records that a class holds. Scores have a mean square, so Chebyshev bounds their tail.
_SHARE = np.append([0.5, 0.5], np.minimum(0.1, 0.3 / _EDGES[_FIRST - 1 :] ** 2))
_SHARE = np.append(_SHARE, 0.1 / _FAR**2)
# Invented records tell more, but real columns may have longer tails than theirs.
_OF_INVENTED, _AT_LEAST = 3.0, 5e-4
_OF_DOUBT = np.append(np.full(_CLASSES, 0.5), 0.1)  # few records of a right model are far out
_SURE = 18.5  # of a chi-square variable of 6 degrees of freedom, exceeded in 1 of 200 cases
# Errors of the classes that two usual kinds of wrong models make. A model with a scale of its own
# meets heavy tails: more records are in the middle, and some far from it. A model without one, such
# as a Poisson model, meets larger scores. The shapes are rounded from Student-t noise and negative
# binomial counts. A test along a shape has less noise than one over all classes.
_HEAVY = np.array([0.61, -0.76, -0.12, 0.15, 0.05, 0.0])
_LARGE = np.array([-0.85, 0.16, 0.43, 0.24, 0.05, 0.0])
_SHAPE_SURE = 2.6  # standard errors, exceeded in 1 of 200 cases
_CLASS_SURE = 3.0  # standard errors
_FAR_SURE = 2.4  # standard errors
# The norm of the classes' errors, over the number of records that are far out.
_OF_FAR = 1.5
# Where records that are far out lie, among the three highest classes, until their counts tell: the
# means, and a standard deviation. All are parts of the number of such records.
_LIE, _LIE_SD = np.array([0.8, 0.17, 0.03]), 0.5
# The bias of the sum at the smallest clip norm, over the number of misplaced records, and the power
# with which it falls with the clip norm. They are rounded from negative binomial counts in a
# Poisson model, from Student-t noise in a normal model and from data sets of textbooks
# (benchmarks/believe/published.py), of which amounts with long tails have more.
_BIAS, _BIAS_OF_SCALE, _POWER = 0.6, 0.8, 0.8


def sizes(norm: Array, unit: Array) -> Array:
    """What a record sends of its norms, shape (7,). The smallest clip norm is ``unit``.

    Two such vectors differ by a norm of 1 at most.
    """
    edges, weights = own_constants(_EDGES.astype(np.float32), _WEIGHTS.astype(np.float32))
    below = jnp.mean(norm[..., None] < unit * edges, axis=range(norm.ndim))
    shares = jnp.diff(below, prepend=0.0, append=1.0)
    far = jnp.mean(jnp.minimum(1, norm / (_FAR * unit)) ** 4)
    return jnp.append(shares, far) * jnp.asarray(weights)


def has_tail(outcomes: Outcomes) -> bool:
    """Whether clipping sees outcomes, so that it may cause a bias in a wrong model."""
    return not outcomes.number and not outcomes.censored


class Tail(NamedTuple):
    """Numbers of records by class and of those far out, minus what the model says, plus noise.

    Attributes:
        counts: The numbers (7,).
        noise: Variances of their noise (7,).
        own: Variances without noise in a correct model (7,).
        found: Whether an earlier release was sure that the model is wrong.
    """

    counts: np.ndarray
    noise: np.ndarray
    own: np.ndarray
    found: bool = False

    @classmethod
    def read(
        cls, total: np.ndarray, noise: float, number: int, doubt: float, norms: np.ndarray
    ) -> Tail:
        """Returns the tail of one release.

        Args:
            total: The sum of the records' entries, plus noise (7,).
            noise: Standard deviation of that noise.
            number: Number of records N.
            doubt: N times the variance that uncertain latents add to a score, relative to its own.
            norms: Norms of scores of invented records, in units of the smallest clip norm.
        """
        counted = np.searchsorted(_EDGES, norms, side="right")
        invented = np.bincount(counted, minlength=_CLASSES) / len(norms)
        # The square of the last entry, which bounds its variance.
        invented = np.append(invented, np.mean(np.minimum(1, norms / _FAR) ** 8))
        share = np.minimum(_SHARE, _OF_INVENTED * invented + _AT_LEAST)
        own = number * share * (1 - share) + (doubt * _OF_DOUBT) ** 2
        return cls(total / _WEIGHTS, (noise / _WEIGHTS) ** 2, own)

    def joined(self, other: Tail | None) -> Tail:
        """Returns the mean of two tails of the same records, weighted by their precisions."""
        if other is None:
            return self
        part = other.variances / (self.variances + other.variances)
        counts = part * self.counts + (1 - part) * other.counts
        own = (part * np.sqrt(self.own) + (1 - part) * np.sqrt(other.own)) ** 2  # same records
        noise = part**2 * self.noise + (1 - part) ** 2 * other.noise
        # Once the clip norm is larger and the mean moves, classes may look right again.
        return Tail(counts, noise, own, other.sure)

    @property
    def variances(self) -> np.ndarray:
        """Variances of the counts in a correct model (7,)."""
        return self.noise + self.own

    @property
    def far(self) -> float:
        """Records far out, beyond those that the model says, or 0 if that may be noise."""
        known = self.found or self.counts[-1] > _FAR_SURE * math.sqrt(self.variances[-1])
        return max(0.0, float(self.counts[-1])) if known else 0.0

    @property
    def sure(self) -> bool:
        """Whether records are in other classes than the model says, or too many are far out."""
        squares = (self.counts**2 / self.variances)[:_CLASSES]
        shaped = bool(self._shapes)
        return self.found or self.far > 0 or shaped or bool(np.sum(squares) > _SURE)

    @property
    def _shapes(self) -> list[float]:
        """The sizes of the usual errors that are sure."""
        found = [self._along(shape) for shape in (_HEAVY, _LARGE)]
        return [size for size, errors in found if errors > _SHAPE_SURE]

    def _along(self, shape: np.ndarray) -> tuple[float, float]:
        """The size of a shape in the errors, by least squares, and that in standard errors."""
        weights = shape / self.variances[:_CLASSES]
        told, root = float(weights @ self.counts[:_CLASSES]), math.sqrt(float(weights @ shape))
        return told / root**2, told / root

    @property
    def misplaced(self) -> float:
        """Number of records in other classes than the model says, or 0 if that may be noise."""
        if not self.sure:
            return 0.0
        # Noise alone would give a sum of squares too, so its mean is subtracted.
        excess = float(np.sum((self.counts**2 - self.variances)[:_CLASSES]))
        return max(math.sqrt(max(0.0, excess)), _OF_FAR * self.far, *self._shapes)

    @property
    def of_scale(self) -> bool:
        """Whether the errors look like those of a model that has a scale of its own."""
        return self._along(_HEAVY)[1] > self._along(_LARGE)[1]

    @property
    def unseen(self) -> Tail:
        """The tail with as many records far out as would just pass for noise."""
        far = np.zeros(SIZES)
        far[-1] = _FAR_SURE * math.sqrt(self.variances[-1])
        return self._replace(counts=far, found=True)

    def bias(self, clip: float, size: int, number: int) -> float:
        """The norm of the sum of clipped, whitened scores at the optimum of the others.

        Args:
            clip: The clip norm, in units of the smallest one.
            size: Number of latents d.
            number: Number of records N.
        """
        if not self.misplaced:
            return 0.0
        typical = math.sqrt(size / number)
        part = _BIAS_OF_SCALE if self.of_scale else _BIAS
        usual = part * self.misplaced * typical * clip**-_POWER
        high = self.counts[_FIRST:_CLASSES]
        sure = high > _CLASS_SURE * np.sqrt(self.variances[_FIRST:_CLASSES])
        # What a clip at this norm takes away from the scores of the high classes.
        seen = typical * np.sum(np.where(sure, high, 0) * np.maximum(0, _MIDDLE - clip))
        if self._shapes or not self.far:
            return max(usual, float(seen), typical * self.far * max(0.0, _FAR - clip))
        # Few records that are far out, and no usual shape: they may be very far.
        lie, noise = self.far * _LIE, self.variances[-4:-1]
        lie = lie + (self.counts[-4:-1] - lie) / (1 + noise / (self.far * _LIE_SD) ** 2)
        far = typical * np.sum(np.maximum(lie, 0) * np.maximum(0, _MIDDLE[-3:] - clip))
        return max(usual, float(seen), float(far))
