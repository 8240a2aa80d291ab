"""Checks that the likelihood of one record reads that record only.

The model sees one row at a time, and does not know its index. Two kinds of model are refused:

* A model that captures records in a closure or a list. The likelihood of every record would read
  them, and clipping would not limit their effect.
* A model that looks up a parameter by the row's index. Every record would get the first entry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpyro import handlers
from numpyro.distributions import Unit
from numpyro.infer import init_to_uniform

from numpyro_dp._compat import Messenger, is_tracer
from numpyro_dp.core import Arrays, NumPyroFn, PyTree, Site, Values
from numpyro_dp.model.dependence import looks_up
from numpyro_dp.model.held import computes_in_half, held_by_function
from numpyro_dp.model.public import UnsupportedModelError
from numpyro_dp.model.records import Arguments, ModelStructure


class one_record(Messenger):  # noqa: N801 - a NumPyro handler, named like its peers
    """Shows a model its data plate with a single index, as for a data set of one row."""

    def __init__(
        self, fn: NumPyroFn, plate: str, num_rows: int = 1, index: Array | None = None
    ) -> None:
        self.plate = plate
        self.num_rows = num_rows
        self.index = index
        super().__init__(fn)

    def process_message(self, msg: Site) -> None:
        """Replaces the plate's indices by ``[0]``, whatever its size or subsample size."""
        if msg["type"] == "plate" and msg["name"] == self.plate:
            msg["value"] = jnp.arange(self.num_rows) if self.index is None else self.index
            msg["args"] = (msg["args"][0], None)
        elif msg["type"] == "subsample" and self.num_rows > 1:
            msg["kwargs"] = {}  # a plate of constant size would raise for two rows


class altered(Messenger):  # noqa: N801
    """Runs a function, and changes each of its messages first."""

    def __init__(self, fn: NumPyroFn | None, change: Callable[[Site], object]) -> None:
        self.change = change
        super().__init__(fn)

    def process_message(self, msg: Site) -> None:
        """Changes a message."""
        self.change(msg)


def traced(
    fn: NumPyroFn,
    plate: str,
    arguments: Arguments,
    values: Values | None = None,
    *,
    start: Callable[[Site], object] | None = None,
    rng_key: Array | None = None,
    **rows: PyTree,
) -> Values:
    """NumPyro's trace of a model or guide that sees one record.

    Args:
        fn: The model or guide.
        plate: Name of the data plate.
        arguments: Its arguments.
        values: Values of sites.
        start: Gives values to sites instead.
        rng_key: Seeds random draws. A fixed key if ``None``.
        **rows: As for :class:`one_record`.
    """
    # A model that draws, for example for dropout, cannot be traced without a key.
    key = jax.random.key(0) if rng_key is None else rng_key
    run = handlers.seed(one_record(fn, plate, **rows), key)
    if values is not None or start is not None:
        run = handlers.substitute(run, values, start)
    return arguments.trace(run)


def check_separable(model: NumPyroFn, structure: ModelStructure, shared: Arrays) -> bool:
    """Raises if the likelihood of one record reads more than its record and public values.

    Args:
        model: The model, static keywords filled in.
        structure: Its structure. Arrays that the model captures are added to its public values.
        shared: Public arrays among the arguments.

    Returns:
        Whether the model computes in half precision.

    Raises:
        UnsupportedModelError: If a site looks up a value by the plate's index, has several rows
            for one record, or reads an array that is not public.
    """
    plate, layout, public = structure.data_plate, structure.layout, structure.public
    number, inside = layout.num_examples, structure.inside
    supports: list[object] = []

    def densities(index: Array, *rows: Array) -> Values:
        arguments = layout.arguments(rows, shared)
        trace = traced(model, plate, arguments, start=init_to_uniform(), index=index)
        for name in inside:
            check_one_row("Observed", name, trace[name], plate)
        # A list, because supports are no arrays and cannot be outputs of the traced function.
        supports.extend(trace[name]["fn"].support for name in inside)
        # With the scales, because a weight may read a captured array as a density may.
        return {n: [trace[n]["fn"].log_prob(trace[n]["value"]), trace[n]["scale"]] for n in inside}

    index = jax.ShapeDtypeStruct((1,), jnp.result_type(int))
    program, found = looks_up(densities, number, index, *layout.one_row())
    # With a single record, the first entry of a table is its own.
    if found and number > 1:
        raise UnsupportedModelError(
            f"Site {found[0]!r} looks up a value by the index of plate {plate!r} in an array of "
            f"{number} entries that is not an argument, so every record would get the first "
            "entry. Pass records as arguments. Let latents and parameters be the same for all "
            "records, or index them by a column of the data."
        )
    public.check_program("model", program, once=True)
    # Validation by NumPyro reads the supports, but is off in that program.
    held = (array for support in supports for array in held_by_function(support))
    public.take("model", (array for array in held if not is_tracer(array) and np.ndim(array)))
    return computes_in_half(program)


def rows_along(site: Site, frame: Any) -> int:
    """Number of entries of a site along a plate. If a size does not fit the plate, that size."""
    fn, dim = site["fn"], frame.dim
    shapes = [fn.batch_shape]
    if not is_factor(fn):
        shapes.append(np.shape(site["value"])[: max(np.ndim(site["value"]) - fn.event_dim, 0)])
    sizes = [shape[dim] for shape in shapes if len(shape) >= -dim]
    odd = [size for size in sizes if size not in (1, frame.size)]
    return odd[0] if odd else max(sizes, default=1)


def is_factor(fn: Any) -> bool:
    """Whether a distribution comes from ``numpyro.factor``, possibly masked or expanded."""
    return any(isinstance(each, Unit) for each in layers(fn))


def layers(fn: Any) -> Iterator[Any]:
    """A distribution, and those inside it: without its mask, its expansion and the like."""
    while fn is not None:
        yield fn
        fn = getattr(fn, "base_dist", None)


def log_density(site: Site) -> Array:
    """Log density of a site, times its scale."""
    intermediates = [site["intermediates"]] if site["intermediates"] else []
    value = site["fn"].log_prob(site["value"], *intermediates)
    return jnp.sum(value if site["scale"] is None else value * site["scale"])


def check_one_row(kind: str, name: str, site: Site, plate: str) -> None:
    """Raises if a site has several rows when the model sees one record."""
    for frame in site["cond_indep_stack"]:
        rows = rows_along(site, frame)
        if frame.name == plate and rows != 1:
            raise UnsupportedModelError(
                f"{kind} site {name!r} has {rows} values in plate {plate!r} when the model sees "
                "one record, so it reads other values than the record's row. Pass its data as an "
                "argument array with one row per record, not as a list, a closure or a static "
                "keyword. Nothing else may have one entry per record."
            )
