"""Reads a NumPyro model: its data plate, latent sites, likelihood sites and parameters.

Whatever cannot be private is refused here, with the name of the site and the remedy, before any
budget is spent. Models are traced on shapes alone; no record is looked at.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import numpyro
from numpyro import handlers
from numpyro.infer.initialization import init_to_uniform

from numpyro_dp.model.dependence import depends_on_inputs
from numpyro_dp.model.records import Arguments, Layout, array_shapes, split_arguments

__all__ = ["ModelStructure", "UnsupportedModelError", "find_data_plate", "read_model"]


class UnsupportedModelError(ValueError):
    """A model or guide that cannot be made private as it is written."""


class Site(NamedTuple):
    """What is kept of a sample site of a model's trace.

    Attributes:
        name: Name of the site.
        observed: Whether it has an observed value.
        plates: Names of the plates that it is in.
        discrete: Whether its support is discrete.
        factor: Whether it stems from ``numpyro.factor``.
    """

    name: str
    observed: bool
    plates: tuple[str, ...]
    discrete: bool
    factor: bool


class ModelStructure(NamedTuple):
    """Static facts about a model.

    Attributes:
        data_plate: Name of the plate over records.
        layout: How arguments split into records and public values.
        latents: Names of the (global) latent sites.
        likelihood: Names of the observed sites in the data plate.
        prior_factors: Names of data-free factors outside the data plate.
        params: Names of the model's own ``numpyro.param`` sites.
    """

    data_plate: str
    layout: Layout
    latents: tuple[str, ...]
    likelihood: tuple[str, ...]
    prior_factors: tuple[str, ...]
    params: tuple[str, ...]


def find_data_plate(
    model: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    data_plate: str | None = None,
) -> tuple[str, int]:
    """Finds the plate that all observed sites share, and its full size.

    Args:
        model: A NumPyro model.
        args: Its positional arguments, with the whole data set.
        kwargs: Its keyword arguments.
        data_plate: Name of the plate, where several would do.

    Raises:
        UnsupportedModelError: If there is no such plate, or more than one.
    """
    sites, plates, _ = _abstract_sites(model, args, kwargs)
    observed = [site for site in sites if site.observed and not (site.factor and not site.plates)]
    if not observed:
        raise UnsupportedModelError(
            "Expected a model with an observed site, got none among "
            f"{[site.name for site in sites]}. Pass the data so that obs= is not None."
        )
    for site in observed:
        if not site.plates:
            raise UnsupportedModelError(_outside_message(site.name, data_plate))
    if data_plate is not None:
        if data_plate not in plates:
            raise UnsupportedModelError(
                f"Expected data_plate to be one of {sorted(plates)}, got {data_plate!r}."
            )
        return data_plate, plates[data_plate]
    shared = set(observed[0].plates).intersection(*(site.plates for site in observed))
    if len(shared) > 1:
        rows = {shape[0] for _, shape in array_shapes(args, kwargs) if shape}
        shared = {name for name in shared if plates[name] in rows} or shared
    if len(shared) != 1:
        listing = {site.name: site.plates for site in observed}
        raise UnsupportedModelError(
            "Expected exactly one plate that all observed sites share, got sites in plates "
            f"{listing}. Put every observed site into one plate over records, or name it with "
            "data_plate=."
        )
    name = shared.pop()
    return name, plates[name]


def read_model(
    model: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    data_plate: str | None = None,
) -> ModelStructure:
    """Reads the structure of a model, refusing what cannot be private.

    Args:
        model: A NumPyro model.
        args: Its positional arguments, with the whole data set.
        kwargs: Its keyword arguments.
        data_plate: Name of the plate over records; found in the trace if ``None``.

    Raises:
        UnsupportedModelError: Names the site and the remedy.
    """
    plate, num_examples = find_data_plate(model, args, kwargs, data_plate)
    layout, rows, shared = split_arguments(args, kwargs, num_examples)

    def at(*arrays: Any) -> dict[str, Any]:
        return _sites_of(model, layout.arguments(arrays, shared))[3]

    depends = depends_on_inputs(at, *_structs(rows))
    sites, _, others = _abstract_sites(model, args, kwargs)
    _check_others(others, depends)
    latents, likelihood, prior_factors = [], [], []
    for site in sites:
        reads_data = depends[site.name]
        if site.observed and plate in site.plates:
            likelihood.append(site.name)
        elif site.observed and site.factor and not reads_data:
            prior_factors.append(site.name)
        elif site.observed:
            raise UnsupportedModelError(_outside_message(site.name, plate))
        else:
            _check_latent(site, plate, reads_data)
            latents.append(site.name)
    if not latents and not others.get("param"):
        raise UnsupportedModelError("Expected a model with a latent site or a parameter, got none.")
    return ModelStructure(
        plate,
        layout,
        tuple(latents),
        tuple(likelihood),
        tuple(prior_factors),
        tuple(others.get("param", ())),
    )


def _check_latent(site: Site, plate: str, reads_data: bool) -> None:
    if site.discrete:
        raise UnsupportedModelError(
            f"Latent site {site.name!r} is discrete and has no reparameterised gradient. "
            "Marginalise it, for example with numpyro.distributions.MixtureSameFamily or "
            "numpyro.factor of a log-sum-exp inside the data plate."
        )
    if plate in site.plates:
        raise UnsupportedModelError(
            f"Latent site {site.name!r} is inside the data plate {plate!r}: a guide would hold one "
            "parameter per record, and releasing it would release the record. Integrate the site "
            "out of the likelihood, or make it global (move it out of the plate)."
        )
    if reads_data:
        raise UnsupportedModelError(
            f"The prior of latent site {site.name!r} depends on the records, which would release "
            "them outside the mechanism. Compute it from public values and pass those as static "
            "keywords of the constructor."
        )


def _check_others(others: dict[str, list[str]], depends: dict[str, bool]) -> None:
    for name in others.get("param", ()):
        if depends[name]:
            raise UnsupportedModelError(
                f"The initial value of parameter {name!r} depends on the records, which would "
                "release them outside the mechanism. Initialise it from public values."
            )
    if others.get("mutable"):
        raise UnsupportedModelError(
            f"Mutable state at {others['mutable']} (batch norm, say) mixes records and is released "
            "without noise. Use group or layer norm, or freeze the state."
        )


def _outside_message(name: str, plate: str | None) -> str:
    where = "in no plate" if plate is None else f"outside the data plate {plate!r}"
    return (
        f"Observed site {name!r} is {where}, so that its records cannot be told apart. Put it "
        "inside numpyro.plate over the records (a factor that reads no data may stay outside)."
    )


def _abstract_sites(
    model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[Site], dict[str, int], dict[str, list[str]]]:
    """Traces the model on the shapes of its array arguments."""
    leaves, treedef = jax.tree.flatten((args, kwargs))
    slots = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array | np.ndarray)]
    found: list[Any] = []

    def run(arrays: list[Any]) -> None:
        filled = list(leaves)
        for slot, array in zip(slots, arrays, strict=True):
            filled[slot] = array
        run_args, run_kwargs = jax.tree.unflatten(treedef, filled)
        found.append(_sites_of(model, Arguments(run_args, run_kwargs))[:3])

    jax.eval_shape(run, _structs([leaves[i] for i in slots]))
    return found[-1]


def _sites_of(model: Callable[..., Any], arguments: Arguments) -> tuple[Any, ...]:
    """Runs the model from its prior; returns sites, plate sizes, other names, log densities."""
    seeded = handlers.seed(model, jax.random.key(0))
    trace = arguments.call(
        handlers.trace(handlers.substitute(seeded, substitute_fn=init_to_uniform())).get_trace
    )
    sites, plates, others, densities = [], {}, {}, {}
    for name, site in trace.items():
        if site["type"] == "plate":
            plates[name] = site["args"][0]
        elif site["type"] == "sample":
            fn = site["fn"]
            sites.append(
                Site(
                    name,
                    bool(site["is_observed"]),
                    tuple(frame.name for frame in site["cond_indep_stack"]),
                    bool(fn.support.is_discrete),
                    isinstance(_innermost(fn), numpyro.distributions.Unit),
                )
            )
            densities[name] = [fn.log_prob(site["value"]), site["scale"]]
        else:
            others.setdefault(site["type"], []).append(name)
            if site["type"] == "param":
                densities[name] = [site["value"]]
    return sites, plates, others, densities


def _innermost(fn: Any) -> Any:
    while not isinstance(fn, numpyro.distributions.Unit) and hasattr(fn, "base_dist"):
        fn = fn.base_dist
    return fn


def _structs(arrays: Any) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(np.shape(a), jax.dtypes.canonicalize_dtype(a.dtype)) for a in arrays]

