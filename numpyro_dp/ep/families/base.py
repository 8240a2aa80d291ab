r"""Exponential families, and operations on their natural parameters.

.. math:: p(z \mid \theta) = \exp(\theta \cdot s(z) - A(\theta)).

Natural parameters :math:`\theta`, mean parameters :math:`\mu = E\,s(z) = \nabla A(\theta)` and
statistics :math:`s(z)` are flat dicts of arrays with the same names and shapes. Sums of natural
parameters give products of densities, up to the constant :math:`A`.

Reference:
    Wainwright, Jordan (2008), Graphical Models, Exponential Families, and Variational Inference,
    Foundations and Trends in Machine Learning 1, section 3; Minka (2001), Expectation Propagation
    for Approximate Bayesian Inference, UAI.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float
from numpyro.distributions import Distribution, ExpandedDistribution, Independent

__all__ = ["Family", "Natural", "damp", "divide", "multiply", "power", "product", "sample"]

Natural = dict[str, Array]
Number = float | Float[Array, ""]


class Family(NamedTuple):
    r"""An exponential family. Its functions take one member and work under ``jit`` and ``vmap``.

    Functions work in the precision of their inputs. If ``is_valid`` is false, the results of the
    other functions have no meaning. For means that no member has, ``to_natural`` returns NaN or
    natural parameters that are not valid, up to rounding.

    Attributes:
        name: Constructor and size.
        unit: Natural parameters of the constant function 1, all zeros. Shows names and shapes.
        statistics: One value -> :math:`s(z)`. A value of a product is a dict by site.
        to_natural: Mean parameters -> natural parameters. The means of a concentrated member lose
            digits to cancellation, which limits the accuracy.
        is_valid: Natural parameters -> whether finite and inside the domain.
        project: ``(natural, floor)`` -> natural parameters inside the domain, at least ``floor``
            > 0 away from its boundary. Each constructor defines this distance. Parameters that
            are far enough from the boundary do not change.
        to_dist: Natural parameters -> NumPyro distribution, or a dict by site for a product.
        from_dist: The inverse of ``to_dist``. Raises TypeError for a distribution of another class,
            and ValueError for another shape.
    """

    name: str
    unit: Natural
    statistics: Callable[[Any], Natural]
    to_natural: Callable[[Natural], Natural]
    is_valid: Callable[[Natural], Bool[Array, ""]]
    project: Callable[[Natural, Number], Natural]
    to_dist: Callable[[Natural], Any]
    from_dist: Callable[[Any], Natural]


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


def damp(old: Natural, new: Natural, rate: Number) -> Natural:
    r"""Returns the damped update :math:`(1 - \rho)\,\theta_{old} + \rho\,\theta_{new}`.

    Args:
        old: Natural parameters before the update.
        new: Natural parameters of the full update.
        rate: :math:`\rho`, 1 for the full update.

    Example:
        >>> damp({"log": 1.0, "rate": 2.0}, {"log": 3.0, "rate": 2.0}, 0.5)
        {'log': 2.0, 'rate': 2.0}

    Reference:
        Minka, Lafferty (2002), Expectation-Propagation for the Generative Aspect Model, UAI.
    """
    return jax.tree.map(lambda x, y: (1 - rate) * x + rate * y, old, new)


def sample(
    family: Family, rng_key: Any, natural: Natural, sample_shape: tuple[int, ...] = ()
) -> Any:
    """Returns draws from a member: an array, or for a product family a dict by site.

    Args:
        family: The family.
        rng_key: A JAX key. It is split between the sites of a product.
        natural: Natural parameters of one member.
        sample_shape: Leading axes of the draws, in front of the shape of one value.

    Example:
        >>> import jax
        >>> from numpyro_dp.ep.families import diagonal_normal
        >>> natural = {"linear": jax.numpy.ones(3), "precision": jax.numpy.ones(3)}
        >>> sample(diagonal_normal(3), jax.random.key(0), natural, (5,)).shape
        (5, 3)
    """
    dists, tree = jax.tree.flatten(
        family.to_dist(natural), is_leaf=lambda node: isinstance(node, Distribution)
    )
    keys = jax.random.split(rng_key, len(dists))
    draws = [dist.sample(key, sample_shape) for dist, key in zip(dists, keys, strict=True)]
    return jax.tree.unflatten(tree, draws)


def product(**families: Family) -> Family:
    r"""Returns the family of independent sites, each with its own family.

    Natural parameters, mean parameters and statistics have the names ``{site}_{statistic}``. Values
    and distributions are dicts by site. ``project`` uses the same floor at all sites.

    Args:
        **families: A family for each site. It may be a product.

    Raises:
        TypeError: If a value is not a Family.
        ValueError: If there is no site, or the same name results from two sites.

    Example:
        >>> from numpyro_dp.ep.families import gamma, normal
        >>> family = product(weights=normal(2), noise=gamma())
        >>> list(family.unit)
        ['weights_linear', 'weights_precision', 'noise_log', 'noise_rate']
    """
    names = _names(families)

    def join(parts: dict[str, Natural]) -> Natural:
        return _join(names, parts)

    def map_sites(field: str, natural: Natural, *args: Any) -> dict[str, Any]:
        parts = _split(names, natural)
        return {site: getattr(f, field)(parts[site], *args) for site, f in families.items()}

    def is_valid(natural: Natural) -> Any:
        return jnp.all(jnp.array(list(map_sites("is_valid", natural).values())))

    def project(natural: Natural, floor: Number) -> Natural:
        return join(map_sites("project", natural, floor))

    def from_dist(dists: dict[str, Any]) -> Natural:
        _check_sites(families, dists)
        return join({site: f.from_dist(dists[site]) for site, f in families.items()})

    return Family(
        name=f"product({', '.join(f'{site}={f.name}' for site, f in families.items())})",
        unit=join({site: f.unit for site, f in families.items()}),
        statistics=lambda z: join({site: f.statistics(z[site]) for site, f in families.items()}),
        to_natural=lambda mean: join(map_sites("to_natural", mean)),
        is_valid=is_valid,
        project=project,
        to_dist=lambda natural: map_sites("to_dist", natural),
        from_dist=from_dist,
    )


def _split(names: dict[str, dict[str, str]], natural: Natural) -> dict[str, Natural]:
    return {
        site: {statistic: natural[name] for statistic, name in own.items()}
        for site, own in names.items()
    }


def _join(names: dict[str, dict[str, str]], parts: dict[str, Natural]) -> Natural:
    return {
        names[site][statistic]: value
        for site, part in parts.items()
        for statistic, value in part.items()
    }


def _names(families: dict[str, Family]) -> dict[str, dict[str, str]]:
    """Names in the product, by site and statistic."""
    if not families:
        raise ValueError("product() needs at least one site, such as product(z=normal(2)).")
    seen: dict[str, str] = {}
    for site, family in families.items():
        if not isinstance(family, Family):
            raise TypeError(
                f"Expected a Family for site {site!r}, got {type(family).__name__}. Call a "
                "constructor, such as normal(2) or gamma()."
            )
        for statistic in family.unit:
            name = f"{site}_{statistic}"
            if name in seen:
                raise ValueError(
                    f"Names must differ, but the sites {seen[name]!r} and {site!r} both have "
                    f"{name!r}. Rename one of the sites."
                )
            seen[name] = site
    return {
        site: {statistic: f"{site}_{statistic}" for statistic in family.unit}
        for site, family in families.items()
    }


def _check_sites(families: dict[str, Family], dists: Any) -> None:
    if not isinstance(dists, dict):
        raise TypeError(
            f"Expected a dict of distributions by site, got {type(dists).__name__}. Use the sites "
            f"{sorted(families)} as keys."
        )
    if set(dists) != set(families):
        raise ValueError(
            f"Expected distributions for the sites {sorted(families)}, got {sorted(dists)}. Pass "
            "one for each site."
        )


def unit(**shapes: tuple[int, ...]) -> Natural:
    """Returns the natural parameters of the constant function 1."""
    return {name: jnp.zeros(shape) for name, shape in shapes.items()}


def full(value: Any, shape: tuple[int, ...]) -> Array:
    """Returns a parameter of a distribution as a floating-point array of the given shape."""
    typed = lax.convert_element_type(value, jnp.result_type(value, float))
    return jnp.broadcast_to(typed, shape)


def all_finite(natural: Natural) -> Bool[Array, ""]:
    """Returns whether all entries are finite."""
    return jnp.all(jnp.array([jnp.all(jnp.isfinite(x)) for x in natural.values()]))


def least_log(natural: Array, floor: Number) -> Array:
    """Returns ``max(natural, floor - 1)``: the shape, ``natural + 1``, is then >= ``floor``.

    The floor is at least the machine epsilon. For a smaller shape, ``natural`` would round to -1.
    """
    smallest = jnp.maximum(jnp.asarray(floor, natural.dtype), jnp.finfo(natural.dtype).eps)
    return jnp.maximum(natural, smallest - 1)


def unwrap(
    family: str, dist: Any, accepted: tuple[type[Distribution], ...], shape: tuple[int, ...]
) -> Any:
    """Returns the distribution without ``expand`` and ``to_event``, after checks.

    Args:
        family: Name of the family, for the error messages.
        dist: A NumPyro distribution.
        accepted: Allowed classes.
        shape: Shape of one value, batch and event dimensions together.

    Raises:
        TypeError: If the class is not allowed.
        ValueError: If values have another shape.
    """
    base = dist
    while isinstance(base, (ExpandedDistribution, Independent)):
        base = base.base_dist
    if not isinstance(base, accepted):
        names = ", ".join(cls.__name__ for cls in accepted)
        raise TypeError(
            f"Expected for {family} a distribution of class {names}, with or without expand() and "
            f"to_event(), got {type(base).__name__}. Use an allowed class, or another family."
        )
    if dist.shape() != shape:
        raise ValueError(
            f"Expected for {family} a distribution over values of shape {shape}, got shape "
            f"{dist.shape()}. Use expand(), or a family of that size."
        )
    return base
