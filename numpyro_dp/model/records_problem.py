"""A problem that is nothing but records: what a session needs where no model is read."""

from __future__ import annotations

from typing import Any, NamedTuple

from jax import Array

from numpyro_dp.model.records import Records, Rows

__all__ = ["RecordsProblem"]


class RecordsProblem(NamedTuple):
    """What a session needs to know of the records.

    Attributes:
        records: How arguments split into records and public values.
        shared: Public arrays; none.
    """

    records: Records
    shared: tuple[Array, ...] = ()

    @property
    def num_examples(self) -> int:
        """Number of records."""
        return self.records.layout.num_examples

    @property
    def numbered(self) -> bool:
        """No record draws for itself."""
        return False

    def at(self, shared: tuple[Array, ...]) -> RecordsProblem:
        """Returns the same with these public arrays."""
        return self._replace(shared=shared)

    def constrain(self, params: dict[str, Array]) -> dict[str, Array]:
        """Returns the parameters as they are published."""
        return params

    def rows(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Rows:
        """Returns the records."""
        return self.records.layout.rows(args, kwargs)

    def blank_example(self) -> tuple[Array, ...]:
        """Returns zeros in the place of a record."""
        return self.records.layout.blank()
