"""Products of families over named sites."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from numpyro_dp.ep.families.base import Family, Natural, Number

__all__ = ["product"]


def product(**families: Family) -> Family:
    r"""Returns the family of independent sites, each with its own family.

    Natural parameters, mean parameters and statistics have the names ``{site}_{statistic}``. Values
    and distributions are dicts by site. :math:`A` and :math:`\log h` are sums over the sites.
    ``project`` uses the same floor at all sites.

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

    Reference:
        Wainwright, Jordan (2008), section 3.
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
        log_partition=lambda natural: sum(map_sites("log_partition", natural).values()),
        statistics=lambda z: join({site: f.statistics(z[site]) for site, f in families.items()}),
        log_base=lambda z: sum(f.log_base(z[site]) for site, f in families.items()),
        to_mean=lambda natural: join(map_sites("to_mean", natural)),
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
