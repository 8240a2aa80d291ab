r"""Exponential families, and operations on their natural parameters.

.. math:: p(z \mid \theta) = \exp(\theta \cdot s(z) - A(\theta)).

A member of a family is a flat dict of arrays, its natural parameters :math:`\theta`. Statistics
:math:`s(z)` have the same names and shapes. Sums of natural parameters give products of densities,
up to the constant :math:`A`. Each constructor returns a :class:`Family`.

The coefficients of logarithms are shapes and concentrations minus 1, so the natural parameters of
the constant function are zeros. For a shape below about 0.01 in single precision, the natural
parameter is close to -1 and holds fewer than 5 digits of the shape.

Reference:
    Wainwright, Jordan (2008), Graphical Models, Exponential Families, and Variational Inference,
    Foundations and Trends in Machine Learning 1, section 3; Minka (2001), Expectation Propagation
    for Approximate Bayesian Inference, UAI.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax import Array, lax
from jax.scipy.linalg import cho_solve
from jax.typing import ArrayLike
from jaxtyping import Bool, Float

from numpyro_dp.core import PyTree, Values
from numpyro_dp.extend import check_int
from numpyro_dp.methods.normal import inverse_and_log_det

Natural = dict[str, Array]
Number = float | Float[Array, ""]
# A distribution, and a function that gives its parameters their full shape -> natural parameters.
_Read = Callable[[Any, Callable[[ArrayLike], Array]], Natural]


class Family(NamedTuple):
    r"""An exponential family. Its functions take one member and work under ``jit`` and ``vmap``.

    Attributes:
        name: Constructor and size.
        unit: Natural parameters of the constant function 1, all zeros. Shows names and shapes.
        lowest: For each natural parameter, the number that all of its entries exceed.
        statistics: One value -> :math:`s(z)`. A value of a product is a dict by site.
        to_dist: Natural parameters -> NumPyro distribution, or a dict by site for a product.
        from_dist: The inverse of ``to_dist``. Raises TypeError for a distribution of another class,
            and ValueError for another shape.
    """

    name: str
    unit: Natural
    lowest: dict[str, float]
    statistics: Callable[[PyTree], Natural]
    to_dist: Callable[[Natural], PyTree]
    from_dist: Callable[[PyTree], Natural]

    def is_valid(self, natural: Natural) -> Bool[Array, ""]:
        """Whether natural parameters are finite and inside the domain."""
        found = [
            jnp.all(jnp.isfinite(value) & (value > self.lowest[name]))
            for name, value in natural.items()
        ]
        # Only a precision matrix has two axes. It has to be positive definite.
        found += [inverse_and_log_det(v)[1] for v in natural.values() if v.ndim == 2]
        return jnp.all(jnp.stack(found))

    def project(self, natural: Natural, floor: Number) -> Natural:
        """Raises entries to ``floor`` > 0 above their lowest value. Not for precision matrices."""

        def raised(value: Array, lowest: float) -> Array:
            # A smaller floor than the machine epsilon would round to the lowest value.
            least = jnp.maximum(jnp.asarray(floor, value.dtype), jnp.finfo(value.dtype).eps)
            return jnp.maximum(value, least + lowest)

        return {name: raised(value, self.lowest[name]) for name, value in natural.items()}


def multiply(a: Natural, b: Natural) -> Natural:
    r"""Returns the product of two functions, :math:`\theta_a + \theta_b`.

    Example:
        >>> multiply({"log": 1.0, "rate": 2.0}, {"log": 0.5, "rate": 1.0})
        {'log': 1.5, 'rate': 3.0}
    """
    return jax.tree.map(lambda x, y: x + y, a, b)


def divide(a: Natural, b: Natural) -> Natural:
    r"""Returns the quotient of two functions, :math:`\theta_a - \theta_b`, which may be improper.

    Example:
        >>> divide({"log": 1.0, "rate": 2.0}, {"log": 0.5, "rate": 3.0})
        {'log': 0.5, 'rate': -1.0}
    """
    return jax.tree.map(lambda x, y: x - y, a, b)


def power(a: Natural, exponent: Number) -> Natural:
    r"""Returns a power of a function, :math:`c\,\theta`.

    Example:
        >>> power({"log": 1.0, "rate": 2.0}, 0.5)
        {'log': 0.5, 'rate': 1.0}
    """
    return jax.tree.map(lambda x: exponent * x, a)


def sample(
    family: Family, rng_key: Array, natural: Natural, sample_shape: tuple[int, ...] = ()
) -> PyTree:
    """Returns draws from a member: an array, or for a product family a dict by site.

    Args:
        family: The family.
        rng_key: A JAX key. It is split between the sites of a product.
        natural: Natural parameters of one member.
        sample_shape: Leading axes of the draws, in front of the shape of one value.

    Example:
        >>> import jax
        >>> from numpyro_dp.methods.ep.families import diagonal_normal
        >>> natural = {"linear": jax.numpy.ones(3), "precision": jax.numpy.ones(3)}
        >>> sample(diagonal_normal(3), jax.random.key(0), natural, (5,)).shape
        (5, 3)
    """
    dists, tree = jax.tree.flatten(
        family.to_dist(natural), is_leaf=lambda node: isinstance(node, dist.Distribution)
    )
    keys = jax.random.split(rng_key, len(dists))
    draws = [each.sample(key, sample_shape) for each, key in zip(dists, keys, strict=True)]
    return jax.tree.unflatten(tree, draws)


def product(**families: Family) -> Family:
    r"""Returns the family of independent sites, each with its own family.

    Natural parameters and statistics have the names ``{site}_{statistic}``. Values and
    distributions are dicts by site.

    Args:
        **families: A family for each site, and no product.

    Raises:
        TypeError: If a value is not a Family.
        ValueError: If there is no site.

    Example:
        >>> from numpyro_dp.methods.ep.families import diagonal_normal, gamma
        >>> family = product(weights=diagonal_normal(2), noise=gamma())
        >>> list(family.unit)
        ['weights_linear', 'weights_precision', 'noise_log', 'noise_rate']
    """
    if not families:
        raise ValueError("product() needs at least one site, such as product(z=gamma()).")
    for site, family in families.items():
        if not isinstance(family, Family):
            raise TypeError(
                f"Expected a Family for site {site!r}, got {type(family).__name__}. Call a "
                "constructor, such as diagonal_normal(2) or gamma()."
            )

    def joined(part: Callable[[str, Family], Values]) -> Values:
        return {f"{s}_{n}": value for s, f in families.items() for n, value in part(s, f).items()}

    def to_dist(natural: Natural) -> Values:
        return {
            site: f.to_dist({n: natural[f"{site}_{n}"] for n in f.unit})
            for site, f in families.items()
        }

    return Family(
        name=f"product({', '.join(f'{site}={f.name}' for site, f in families.items())})",
        unit=joined(lambda _, f: f.unit),
        lowest=joined(lambda _, f: f.lowest),
        statistics=lambda z: joined(lambda site, f: f.statistics(z[site])),
        to_dist=to_dist,
        from_dist=lambda d: joined(lambda site, f: f.from_dist(d[site])),
    )


def gamma(shape: tuple[int, ...] = ()) -> Family:
    r"""Returns the family of independent gamma distributions.

    The natural parameters are ``log`` :math:`a - 1` and ``rate`` :math:`b`, both with this shape.
    The statistics are :math:`(\log z, -z)`. ``from_dist`` takes Gamma and Exponential.

    Args:
        shape: Shape of one value.

    Example:
        >>> import jax.numpy as jnp
        >>> natural = {"log": jnp.array(1.0), "rate": jnp.array(4.0)}
        >>> float(gamma().to_dist(natural).mean)
        0.5
    """
    statistics = {"log": jnp.log, "rate": jnp.negative}
    attributes = {"log": "concentration", "rate": "rate"}
    name = f"gamma({_checked(shape)})"
    return _positive(name, shape, dist.Gamma, attributes, statistics, dist.Exponential)


def beta(shape: tuple[int, ...] = ()) -> Family:
    r"""Returns the family of independent beta distributions.

    The natural parameters are ``log`` :math:`\alpha - 1` and ``log_complement`` :math:`\beta - 1`,
    both with this shape. The statistics are :math:`(\log z, \log(1 - z))`. ``from_dist`` takes
    Beta.

    Args:
        shape: Shape of one value.

    Example:
        >>> import jax.numpy as jnp
        >>> natural = {"log": jnp.array(0.0), "log_complement": jnp.array(2.0)}
        >>> float(beta().to_dist(natural).mean)
        0.25
    """
    statistics = {"log": jnp.log, "log_complement": lambda z: jnp.log1p(-z)}
    attributes = {"log": "concentration1", "log_complement": "concentration0"}
    return _positive(f"beta({_checked(shape)})", shape, dist.Beta, attributes, statistics)


def dirichlet(size: int) -> Family:
    r"""Returns the family of Dirichlet distributions.

    The natural parameter is ``log`` :math:`\alpha - 1` of shape ``(size,)``. The statistic is
    :math:`\log z`. ``from_dist`` takes Dirichlet.

    Args:
        size: Number of proportions, at least 2.

    Example:
        >>> import jax.numpy as jnp
        >>> dirichlet(3).to_dist({"log": jnp.array([0.0, 1.0, 0.0])}).mean
        Array([0.25, 0.5 , 0.25], dtype=float32)
    """
    check_int("size", size, low=2, remedy="The number of proportions.")
    attributes = {"log": "concentration"}
    return _positive(f"dirichlet({size})", (size,), dist.Dirichlet, attributes, {"log": jnp.log})


def normal(dim: int) -> Family:
    r"""Returns the family of multivariate normal distributions.

    The natural parameters are ``linear`` :math:`\eta = \Sigma^{-1}m` of shape ``(dim,)`` and
    ``precision`` :math:`\Lambda = \Sigma^{-1}` of shape ``(dim, dim)``. Only the symmetric part of
    the precision matters. The statistics are :math:`(z, -zz^\top/2)`. ``from_dist`` takes
    MultivariateNormal and Normal.

    Args:
        dim: Number of coordinates, at least 1.

    Example:
        >>> import jax.numpy as jnp
        >>> natural = {"linear": jnp.array([1.0, 2.0]), "precision": jnp.diag(jnp.array([1.0, 2]))}
        >>> normal(2).to_dist(natural).mean.round(3)
        Array([1., 1.], dtype=float32)
    """
    check_int("dim", dim, low=1, remedy="The number of coordinates.")

    def to_dist(natural: Natural) -> dist.Distribution:
        precision = natural["precision"]
        loc = cho_solve((jnp.linalg.cholesky(precision), True), natural["linear"])
        return dist.MultivariateNormal(loc, precision_matrix=(precision + precision.T) / 2)

    def joint(base: Any, full: Callable[[ArrayLike], Array]) -> Natural:
        loc = full(base.loc)
        precision = base.precision_matrix.astype(loc.dtype)
        # GPUs may multiply in fewer digits by default.
        linear = jnp.matmul(precision, loc, precision=lax.Precision.HIGHEST)
        return {"linear": linear, "precision": precision}

    def apart(base: dist.Normal, full: Callable[[ArrayLike], Array]) -> Natural:
        natural = _coordinates(base, full)
        return {"linear": natural["linear"], "precision": jnp.diag(natural["precision"])}

    name = f"normal({dim})"
    return Family(
        name,
        {"linear": jnp.zeros(dim), "precision": jnp.zeros((dim, dim))},
        {"linear": -math.inf, "precision": -math.inf},
        lambda z: {"linear": z, "precision": -jnp.outer(z, z) / 2},
        to_dist,
        _reader(name, (dim,), {dist.MultivariateNormal: joint, dist.Normal: apart}),
    )


def diagonal_normal(dim: int) -> Family:
    r"""Returns the family of normal distributions of independent coordinates.

    The natural parameters are ``linear`` :math:`m/\sigma^2` and ``precision`` :math:`1/\sigma^2`,
    both of shape ``(dim,)``. The statistics are :math:`(z, -z^2/2)`. ``from_dist`` takes Normal.

    Args:
        dim: Number of coordinates, at least 1.

    Example:
        >>> import numpyro.distributions as dist
        >>> natural = diagonal_normal(2).from_dist(dist.Normal(3.0, 0.5).expand([2]).to_event())
        >>> natural["linear"], natural["precision"]
        (Array([12., 12.], dtype=float32), Array([4., 4.], dtype=float32))
    """
    check_int("dim", dim, low=1, remedy="The number of coordinates.")

    def to_dist(natural: Natural) -> dist.Distribution:
        loc = natural["linear"] / natural["precision"]
        return dist.Normal(loc, 1 / jnp.sqrt(natural["precision"])).to_event(1)

    name = f"diagonal_normal({dim})"
    return Family(
        name,
        {"linear": jnp.zeros(dim), "precision": jnp.zeros(dim)},
        {"linear": -math.inf, "precision": 0.0},
        lambda z: {"linear": z, "precision": -jnp.square(z) / 2},
        to_dist,
        _reader(name, (dim,), {dist.Normal: _coordinates}),
    )


def _coordinates(base: Any, full: Callable[[ArrayLike], Array]) -> Natural:
    precision = 1 / jnp.square(full(base.scale))
    return {"linear": precision * full(base.loc), "precision": precision}


def _positive(
    name: str,
    shape: tuple[int, ...],
    kind: Any,
    attributes: dict[str, str],
    statistics: Mapping[str, Callable[[Array], Array]],
    *special: type[dist.Exponential],
) -> Family:
    """A family with positive parameters. The natural parameter of a concentration a is a - 1.

    Args:
        name: Constructor and size.
        shape: Shape of one value.
        kind: The class of NumPyro.
        attributes: Natural parameter -> parameter of the class.
        statistics: Natural parameter -> its statistic.
        *special: Classes of distributions with concentration 1.
    """
    lowest = {n: -1.0 if each.startswith("conc") else 0.0 for n, each in attributes.items()}

    def to_dist(natural: Natural) -> dist.Distribution:
        given = kind(**{each: natural[n] - lowest[n] for n, each in attributes.items()})
        return given.to_event(len(given.batch_shape))

    def read(base: Any, full: Callable[[ArrayLike], Array]) -> Natural:
        if isinstance(base, special):
            base = kind(jnp.ones_like(base.rate), base.rate)
        return {n: full(getattr(base, each)) + lowest[n] for n, each in attributes.items()}

    return Family(
        name,
        {n: jnp.zeros(shape) for n in attributes},
        lowest,
        lambda z: {n: each(z) for n, each in statistics.items()},
        to_dist,
        _reader(name, shape, dict.fromkeys((kind, *special), read)),
    )


def _checked(shape: tuple[int, ...]) -> tuple[int, ...]:
    if not isinstance(shape, tuple):
        raise TypeError(
            f"Expected a tuple of sizes, got shape={shape!r}. Write shape=(3,), or omit shape."
        )
    return tuple(check_int("size", n, low=1, remedy="It counts entries.") for n in shape)


def _reader(
    name: str, shape: tuple[int, ...], known: dict[type, _Read]
) -> Callable[[PyTree], Natural]:
    """Returns ``from_dist``. It looks through ``expand`` and ``to_event``."""

    def full(value: ArrayLike) -> Array:
        typed = lax.convert_element_type(value, jnp.result_type(value, float))
        return jnp.broadcast_to(typed, shape)

    def from_dist(given: PyTree) -> Natural:
        base = given
        while isinstance(base, (dist.ExpandedDistribution, dist.Independent)):
            base = base.base_dist
        read = next((read for kind, read in known.items() if isinstance(base, kind)), None)
        if read is None:
            raise TypeError(
                f"Expected for {name} a distribution of class "
                f"{', '.join(kind.__name__ for kind in known)}, with or without expand() and "
                f"to_event(), got {type(base).__name__}. Use an allowed class, or another family."
            )
        if given.shape() != shape:
            raise ValueError(
                f"Expected for {name} a distribution over values of shape {shape}, got shape "
                f"{given.shape()}. Use expand(), or a family of that size."
            )
        return read(base, full)

    return from_dist
