"""The protocol of sites: how one record's likelihood is approximated, given a cavity."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from jax import Array

from numpyro_dp.ep.problem import EPProblem

__all__ = ["Site", "SiteBuilder"]

Natural = dict[str, Array]


class Site(NamedTuple):
    """Approximates the likelihood of one record by a member of the family.

    Attributes:
        prepare: ``(rng_key, cavity) -> public``, from the cavity's natural parameters. Reads no
            record.
        approximate: ``(public, example) -> site``, the natural parameters of the projected tilted
            distribution divided by the cavity. For normal families they are centred at the
            cavity's mean. Reads one record.
    """

    prepare: Callable[[Array, Natural], Any]
    approximate: Callable[[Any, tuple[Array, ...]], Natural]


class SiteBuilder(NamedTuple):
    """A kind of site, before the model is known.

    Attributes:
        build: Problem -> site. May be traced.
        check: Problem -> ``None``. Raises ``UnsupportedModelError`` if the kind does not fit the
            model. Reads no record.
    """

    build: Callable[[EPProblem], Site]
    check: Callable[[EPProblem], None]
