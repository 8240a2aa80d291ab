"""A problem that is nothing but records: what a session needs where no family is read."""

from __future__ import annotations

from typing import Any, NamedTuple

from jax import Array

from numpyro_dp.model.density import Model
from numpyro_dp.model.records import Rows

__all__ = ["RecordsProblem"]


class RecordsProblem(NamedTuple):
    """What a session needs to know of the records.

    Attributes:
        model: A model over them, of which the layout counts.
        num_examples: Number of records.
        shared: Public arrays; none.
    """

    model: Model
    num_examples: int
    shared: tuple[Array, ...] = ()

    @property
    def numbered(self) -> bool:
        """No record draws for itself."""
        return False

    def at(self, shared: tuple[Array, ...]) -> RecordsProblem:
        """The same with these public arrays."""
        return self._replace(shared=shared)

    def constrain(self, params: dict[str, Array]) -> dict[str, Array]:
        """Returns the parameters as they are published."""
        return params

    def rows(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Rows:
        """Returns the records."""
        return self.model.structure.layout.rows(args, kwargs)

    def blank_example(self) -> tuple[Array, ...]:
        """Returns zeros in the place of a record."""
        return self.model.structure.layout.blank()
