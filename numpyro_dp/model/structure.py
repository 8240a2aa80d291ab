"""Reads a NumPyro model: its data plate, latent sites, likelihood sites and parameters.

Models that cannot be private raise an error here, before any budget is spent. It names the site and
the remedy. Models are traced on shapes only, so no record is read.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import numpy as np
from jax import Array
from numpyro import handlers
from numpyro.infer import init_to_uniform

from numpyro_dp._compat import in_control_flow
from numpyro_dp.core import Args, Kwargs, NumPyroFn, PyTree, Values
from numpyro_dp.model.additivity import check_additive
from numpyro_dp.model.dependence import depends_on_inputs
from numpyro_dp.model.draw_checks import check_draws
from numpyro_dp.model.impossible import with_checks
from numpyro_dp.model.locals import read_locals
from numpyro_dp.model.public import Declared, PublicValues, UnsupportedModelError
from numpyro_dp.model.records import (
    Arguments,
    ModelStructure,
    array_shapes,
    check_arrays,
    split_arguments,
    split_arrays,
)
from numpyro_dp.model.separation import altered, check_separable, is_factor, one_record, rows_along

# Sample sites, sizes of plates by name, and names of other sites by type.
_Found = tuple["list[SampleSite]", dict[str, int], dict[str, list[str]]]


class SampleSite(NamedTuple):
    """Facts about a sample site in a model's trace.

    Attributes:
        name: Name of the site.
        observed: Whether the site has an observed value.
        plates: Name and number of indices of each plate around the site.
        discrete: Whether the support is discrete.
        finite: Whether the values can be listed.
        factor: Whether the site comes from ``numpyro.factor``.
        rows: Number of entries along each plate.
        shape: Shape of the value.
    """

    name: str
    observed: bool
    plates: dict[str, int]
    discrete: bool
    finite: bool
    factor: bool
    rows: dict[str, int]
    shape: tuple[int, ...]


def find_data_plate(
    model: NumPyroFn, args: Args, kwargs: Kwargs, data_plate: str | None = None
) -> tuple[str, int]:
    """Finds the plate that all observed sites share, and its full size.

    Args:
        model: A NumPyro model.
        args: Its positional arguments, with the whole data set.
        kwargs: Its keyword arguments.
        data_plate: Name of the plate. Needed if all observed sites share several plates.

    Raises:
        UnsupportedModelError: If there is no such plate, or if there are several.
    """
    check_arrays(args, kwargs)
    sites, plates, _ = _abstract_sites(model, Arguments(args, kwargs))
    if data_plate is not None:
        if data_plate not in plates:
            raise UnsupportedModelError(
                f"Expected data_plate to be one of the model's plates {sorted(plates)}, got "
                f"{data_plate!r}. Name the plate over records, or leave data_plate out."
            )
        return data_plate, plates[data_plate]
    observed = _likelihood_candidates(sites)
    rows = {shape[0] for _, shape in array_shapes(args, kwargs) if shape}
    over_rows = {name for name, size in plates.items() if size in rows}
    if all(site.factor for site in observed):  # a factor in another plate may be a prior
        observed = [site for site in observed if over_rows & set(site.plates)] or observed
    shared = set(observed[0].plates).intersection(*(site.plates for site in observed))
    listing = {site.name: tuple(site.plates) for site in observed}
    if not shared:
        raise UnsupportedModelError(
            "The observed sites do not share exactly one plate, so records cannot be found. Their "
            f"plates are {listing}. Put every observed site into one plate over records, or name "
            "that plate with Privacy(data_plate=). Observed sites outside it may read public "
            "values only."
        )
    if len(shared) > 1:
        sizes = {name: plates[name] for name in sorted(shared)}
        largest = max(sizes, key=lambda name: (name in over_rows, sizes[name]))
        raise UnsupportedModelError(
            f"Cannot tell which plate counts records: the observed sites are in the plates "
            f"{listing}, of sizes {sizes}. Each index of that plate is one protected record. Name "
            f"the plate, for example Privacy(data_plate={largest!r})."
        )
    name = shared.pop()
    return name, plates[name]


def read_model(
    model: NumPyroFn,
    args: Args,
    kwargs: Kwargs,
    data_plate: str | None = None,
    declared: Declared = Declared(),  # noqa: B008 - never written to
    num_records: int | None = None,
) -> ModelStructure:
    """Reads the structure of a model, and raises if the model cannot be private.

    Args:
        model: A NumPyro model.
        args: Its positional arguments, with the whole data set.
        kwargs: Its keyword arguments.
        data_plate: Name of the plate over records. Found in the trace if ``None``.
        declared: What the user declared public.
        num_records: Number of records, if they are units of several rows. It limits how much may
            be public because it is small.

    Raises:
        UnsupportedModelError: If the model cannot be private.
    """
    plate, num_examples = find_data_plate(model, args, kwargs, data_plate)
    layout = split_arguments(
        args, kwargs, num_examples, model, plate, declared, data_plate is not None, num_records
    )
    rows, shared, _ = layout.rows(args, kwargs)
    public = PublicValues(declared, plate, num_records or num_examples, layout.public)
    public.trust(shared)  # listed as arguments

    sites, _, others = _abstract_sites(model, Arguments(args, kwargs))
    alone = layout.placeholder(shared)
    shapes = {s.name: s.shape for s in _abstract_sites(one_record(model, plate), alone)[0]}
    for site in sites:
        _check_rows(site, plate, shapes.get(site.name))

    def densities(*arrays: Array) -> Values:
        trace = layout.arguments(arrays, shared).trace(_initialised(model))
        drawn = {n: site for n, site in trace.items() if site["type"] == "sample"}
        found = {n: [s["fn"].log_prob(s["value"]), s["scale"]] for n, s in drawn.items()}
        return found | {n: [s["value"]] for n, s in trace.items() if s["type"] == "param"}

    depends = depends_on_inputs(densities, *_structs(rows))
    _check_others(others, depends)
    kinds = _classify(sites, plate, depends)
    if not kinds["latent"] and not others.get("param"):
        raise UnsupportedModelError(
            "The model has no latent site and no parameter, so there is nothing to fit. Draw the "
            "unknown quantities with numpyro.sample."
        )
    structure = ModelStructure(
        plate, layout, kinds["latent"], kinds["likelihood"], kinds["prior"],
        tuple(others.get("param", ())), kinds["local"],
        dict.fromkeys(kinds["summed"], np.zeros(0)), public=public,
    )  # fmt: skip
    half = check_separable(model, structure, shared)
    if structure.local_latents or structure.summed:
        structure = structure._replace(summed=read_locals(model, structure, shared))
        public.trust(structure.summed.values())
    structure = structure._replace(draws=_draws_keys(one_record(model, plate), alone))
    check_draws(model, structure, shared)
    check_additive(model, structure, shared, half)
    return with_checks(model, structure, shared)


def _classify(
    sites: list[SampleSite], plate: str, depends: list[str]
) -> dict[str, tuple[str, ...]]:
    """Returns the names of sites by kind."""
    kinds: dict[str, tuple[str, ...]] = dict.fromkeys(
        ("latent", "local", "summed", "likelihood", "prior"), ()
    )
    for site in sites:
        if not site.observed:
            kind = _kind_of_latent(site, plate, site.name in depends)
        elif plate in site.plates:
            kind = "likelihood"
        elif site.name not in depends:
            kind = "prior"
        else:
            raise UnsupportedModelError(_outside_message(site.name, plate))
        kinds[kind] += (site.name,)
    return kinds


def _likelihood_candidates(sites: list[SampleSite]) -> list[SampleSite]:
    """The observed sites in plates. Factors count only if no other site is observed in a plate."""
    observed = [site for site in sites if site.observed]
    inside = [site for site in observed if site.plates]
    values = [site for site in inside if not site.factor]
    if inside:
        return values or inside
    if observed:
        raise UnsupportedModelError(_outside_message(observed[0].name, None))
    raise UnsupportedModelError(
        "The model has no observed site, so it has no likelihood. Its sites are "
        f"{[site.name for site in sites]}. Pass the data so that obs= is not None."
    )


def _check_rows(site: SampleSite, plate: str, shape_alone: tuple[int, ...] | None) -> None:
    """Raises for sites whose shape does not fit the plate, or outside it depends on the records."""
    if site.observed and site.rows.get(plate) != site.plates.get(plate):
        raise UnsupportedModelError(
            f"Observed site {site.name!r} has {site.rows[plate]} rows in plate {plate!r} of size "
            f"{site.plates[plate]}. Pass arrays with one row per record. With subsample_size, "
            "index each of them by the plate's indices."
        )
    if not site.observed and plate not in site.plates and site.shape != shape_alone:
        raise UnsupportedModelError(
            f"Latent site {site.name!r} has one entry per record (shape {site.shape}, or "
            f"{shape_alone} for one record). A guide would hold one parameter per record, and "
            "releasing it would release the record. Give the site a fixed shape, or integrate it "
            "out."
        )


def _kind_of_latent(site: SampleSite, plate: str, reads_data: bool) -> str:
    if plate in site.plates and (site.finite or not site.discrete):
        return "summed" if site.discrete else "local"
    if site.discrete:
        raise UnsupportedModelError(
            f"Latent site {site.name!r} is discrete, so it has no reparameterised gradient. "
            "Marginalise it, for example with numpyro.distributions.MixtureSameFamily or "
            "numpyro.factor of a log-sum-exp inside the data plate."
        )
    if reads_data:
        raise UnsupportedModelError(
            f"The prior of latent site {site.name!r} depends on the records, which would release "
            "them without noise. Compute the prior from public values, and pass those as static "
            "keywords of the constructor."
        )
    return "latent"


def _check_others(others: dict[str, list[str]], depends: list[str]) -> None:
    for name in others.get("param", ()):
        if name in depends:
            raise UnsupportedModelError(
                f"The initial value of parameter {name!r} depends on the records, which would "
                "release them without noise. Initialise it from public values."
            )
    if others.get("mutable"):
        raise UnsupportedModelError(
            f"Mutable state at {others['mutable']} (batch norm, say) mixes records and would be "
            "released without noise. Use group or layer norm, or freeze the state. For "
            "nnx.Dropout, pass the key in the call: rngs=nnx.Rngs(dropout=numpyro.prng_key())."
        )


def _outside_message(name: str, plate: str | None) -> str:
    where = "in no plate" if plate is None else f"outside the data plate {plate!r}"
    return (
        f"Observed site {name!r} is {where}, so its records cannot be distinguished. Put it inside "
        "numpyro.plate over the records. Only a site that reads no record may stay outside."
    )


def _abstract_sites(model: NumPyroFn, arguments: Arguments) -> _Found:
    """Traces the model on the shapes of its array arguments."""
    arrays, fill = split_arrays(arguments)
    found: list[_Found] = []
    try:
        jax.eval_shape(lambda a: found.append(_sites_of(model, fill(a))), _structs(arrays))
    except (jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError) as error:
        raise UnsupportedModelError(
            "The model reads values of its arguments to choose a shape or a branch, for example "
            "with int(), if or len(np.unique()). These values would be public. Pass such numbers "
            "as static keywords of the constructor, DPSVI(..., num_groups=5), or use jnp.where."
        ) from error
    return found[-1]


def _sites_of(model: NumPyroFn, arguments: Arguments) -> _Found:
    """Runs the model."""
    trace = arguments.trace(_initialised(model))
    sites, plates, others = [], {}, {}
    for name, site in trace.items():
        if site["type"] == "plate":
            plates[name] = site["args"][0]
        elif site["type"] == "sample":
            fn, stack = site["fn"], site["cond_indep_stack"]
            if in_control_flow(site):
                raise UnsupportedModelError(_in_scan_message(name, bool(site["is_observed"])))
            sites.append(
                SampleSite(
                    name,
                    bool(site["is_observed"]),
                    {frame.name: frame.size for frame in stack},
                    bool(fn.support.is_discrete),
                    bool(fn.has_enumerate_support),
                    is_factor(fn),
                    {frame.name: rows_along(site, frame) for frame in stack},
                    np.shape(site["value"]),
                )
            )
        else:
            others.setdefault(site["type"], []).append(name)
    return sites, plates, others


def _initialised(model: NumPyroFn) -> NumPyroFn:
    seeded = handlers.seed(model, jax.random.key(0))
    return handlers.substitute(seeded, substitute_fn=init_to_uniform())


def _draws_keys(model: NumPyroFn, arguments: Arguments) -> bool:
    """Whether a model calls ``numpyro.prng_key`` once its parameters have values (dropout).

    Keys that initialise parameters, as in ``flax_module``, do not count.
    """
    arrays, fill = split_arrays(arguments)
    asked: list[str] = []

    def run(arrays: list[Array]) -> None:
        filled, seeded = fill(arrays), _initialised(model)
        trace = filled.trace(seeded)
        params = {name: site["value"] for name, site in trace.items() if site["type"] == "param"}
        # With values for all parameters, no key of an initialiser is counted.
        with altered(None, lambda msg: asked.append(msg["type"])):
            filled.call(handlers.substitute(seeded, data=params))

    jax.eval_shape(run, arrays)
    return "prng_key" in asked


def _in_scan_message(name: str, observed: bool) -> str:
    remedy = (
        "Compute the states with jax.lax.scan, and observe the whole series of a record at once: "
        "with numpyro.plate('people', N): sample(name, Normal(states, 1).to_event(1), obs=y)"
        if observed
        else "Draw the noise of all steps outside, numpyro.sample(name, Normal(0, 1).expand([T])"
        ".to_event(1)), and compute the states from it with jax.lax.scan. For cond, draw the "
        "latents of both branches outside, and choose with jnp.where"
    )
    return (
        f"Site {name!r} is inside scan or cond of numpyro.contrib.control_flow. Such sites cannot "
        f"be evaluated one record at a time. {remedy}."
    )


def _structs(arrays: PyTree) -> list[jax.ShapeDtypeStruct]:
    return [
        jax.ShapeDtypeStruct(np.shape(a), jax.dtypes.canonicalize_dtype(a.dtype)) for a in arrays
    ]
