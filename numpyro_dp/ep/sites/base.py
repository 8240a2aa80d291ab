"""The protocol of sites: how one record's likelihood is approximated, seen from a cavity."""

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
        prepare: ``(rng_key, cavity) -> public``, from the cavity's natural parameters. Sees no
            data.
        approximate: ``(public, example) -> site``: the natural parameters of the projected tilted
            distribution over the cavity. Where the family is normal they are centred at the
            cavity's mean. Sees one example.
    """

    prepare: Callable[[Array, Natural], Any]
    approximate: Callable[[Any, tuple[Array, ...]], Natural]


class SiteBuilder(NamedTuple):
    """A kind of site, before the model is known.

    Attributes:
        build: Problem -> site; may be traced.
        check: Problem -> nothing: raises ``UnsupportedModelError`` where the kind does not suit
            the model. Reads no record.
    """

    build: Callable[[EPProblem], Site]
    check: Callable[[EPProblem], None]
