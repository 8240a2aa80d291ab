"""Reads a NumPyro guide and checks that it can be private.

Errors name the site or parameter and the remedy, and are raised before any budget is spent. The
checks do not read records.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jax import Array
from numpyro.distributions import biject_to
from numpyro.infer import autoguide, init_to_uniform

from numpyro_dp._compat import guide_functions, init_scale, make_program, setup_of
from numpyro_dp.core import Arrays, Kwargs, NumPyroFn, PyTree, Site, Sites, Values
from numpyro_dp.model.additivity import is_sum
from numpyro_dp.model.density import Model
from numpyro_dp.model.dependence import depends_on_inputs, entries_read
from numpyro_dp.model.guide import Guide, auto_parts, guide_trace
from numpyro_dp.model.held import held_by_function, held_by_program
from numpyro_dp.model.locals import is_local
from numpyro_dp.model.public import UnsupportedModelError
from numpyro_dp.model.records import Arguments, ModelStructure
from numpyro_dp.model.separation import check_one_row, log_density, traced

_REFUSED = {
    "AutoDAIS": "its sampler evaluates the likelihood of all records",
    "AutoSurrogateLikelihoodDAIS": "its sampler evaluates a likelihood of records",
    "AutoSemiDAIS": "its sampler evaluates the likelihood of all records",
    "AutoLaplaceApproximation": "its covariance is a Hessian over all records",
}
_PUBLISHED = (
    "which becomes an initial value and is published without noise. If it comes from no record, "
    "pass it as init_params= of run or init, or name it in public=[array] of fit or Privacy."
)


def read_guide(
    fn: NumPyroFn,
    auto: object,
    model: Model,
    params: Values,
    shared: Arrays,
    public: Values | None = None,
) -> Guide:
    """Checks a guide against its model.

    Args:
        fn: The guide with its static keywords filled in.
        auto: The guide object itself.
        model: The model.
        params: Initial values of the constrained parameters.
        shared: Public arrays among the model's arguments.
        public: The guide's static keywords.

    Raises:
        UnsupportedModelError: If the guide cannot be private, or does not fit the model.
    """
    known = auto if isinstance(auto, autoguide.AutoGuide) else None
    guide = Guide(fn, known, model, public=public or {})
    _check_reads_no_records(guide, shared)
    _check_parameter_shapes(guide, shared)
    trace: Sites = {}
    jax.eval_shape(lambda p: trace.update(guide_trace(guide, p, jax.random.key(0), shared)), params)
    read = frozenset(name for name, site in trace.items() if site["type"] == "param")
    guide = guide._replace(params=read)
    _check_fixed_supports(guide, params, shared)
    plate, local = model.structure.data_plate, model.structure.local_latents
    latents = model.structure.latents + local
    found = {name: site for name, site in trace.items() if site["type"] == "sample"}
    missing = [name for name in latents if name not in found]
    if missing:
        raise UnsupportedModelError(
            f"The guide does not draw the latent sites {missing} of the model. Add them to the "
            "guide, or give them a value with numpyro.handlers.substitute."
        )
    for name, site in found.items():
        auxiliary = site["infer"].get("is_auxiliary", False)
        if name not in latents and not auxiliary and not site["is_observed"]:
            raise UnsupportedModelError(
                f"Guide site {name!r} is not one of the model's latent sites {list(latents)}. "
                "Remove it, or mark it with infer={'is_auxiliary': True}."
            )
        if auxiliary and local and known is None and not is_local(site, plate):
            raise UnsupportedModelError(
                f"Auxiliary guide site {name!r} is outside plate {plate!r}, and the guide draws "
                "local latents, so each record would redraw it. Remove the site, and draw the "
                "latents with numpyro.distributions.TransformedDistribution instead."
            )
        if not site["fn"].has_rsample:
            kind = type(getattr(site["fn"], "base_dist", site["fn"])).__name__
            raise UnsupportedModelError(
                f"Guide site {name!r} has the distribution {kind}, which has no reparameterised "
                "sampler, so the loss has no gradient. Use Normal, Gamma, Beta or LogNormal, say."
            )
    _check_captures(guide, params, shared)
    return _with_local_params(guide, params, shared) if local else guide


def _with_local_params(guide: Guide, params: Values, shared: Arrays) -> Guide:
    """Finds which parameters the local latents depend on, and which the global latents."""
    structure = guide.model.structure
    key, alone = jax.random.key(0), structure.layout.placeholder(shared)
    latents, _ = jax.eval_shape(lambda: guide.draw(params, key, shared))
    latents = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), latents)

    prior = guide.model.trace_prior(latents, params, shared)
    values = params | {name: prior[name]["value"] for name in latents}

    def local(given: Values) -> PyTree:
        found = guide.local_sites(latents, params | given, alone, shared, key)
        for site in structure.local_latents:
            if site not in found:
                raise UnsupportedModelError(
                    f"Guide site {site!r} is outside plate {structure.data_plate!r}, but inside it "
                    "in the model. Draw it inside numpyro.plate over the records."
                )
            check_one_row("Guide", site, found[site], structure.data_plate)
        sites = [site for site in found.values() if site["type"] == "sample"]
        return [[site["value"], log_density(site)] for site in sites]

    given = {name: params[name] for name in guide.params}
    own = entries_read(local, given)
    number = structure.layout.num_examples
    for name in own:
        if any(1 < number in leaf.shape for leaf in jax.tree.leaves(params[name])):
            raise UnsupportedModelError(
                f"Parameter {name!r} of the guide has an entry for each of the {number} records, "
                "and draws their latents. Releasing it would release the records. Use parameters "
                "of another shape."
            )
    _check_one_by_one(guide, params, values, shared)
    read = entries_read(lambda given: guide.draw(params | given, key, shared), given)
    return guide._replace(params=read, local_params=own)


def _check_one_by_one(guide: Guide, params: Values, values: Values, shared: Arrays) -> None:
    """Raises if an encoder gives other densities for single records than for several at once."""
    structure = guide.model.structure
    layout, plate = structure.layout, structure.data_plate

    def density(rows: Arrays) -> float:
        arguments = layout.arguments(rows, shared)
        trace = traced(guide.fn, plate, arguments, values, num_rows=len(rows[0]))
        total = 0.0
        for name in structure.local_latents:
            fn = trace[name]["fn"]
            transform = biject_to(fn.support)
            middle = transform(jnp.zeros(transform.inverse_shape(fn.shape())))
            total += float(jnp.sum(fn.log_prob(middle)))
        return total

    for rows in layout.invented(3) if layout.num_examples > 1 else ():
        try:
            together = density(rows)
        except (TypeError, ValueError, IndexError):
            continue  # the guide needs its own number of rows
        each = [density(tuple(leaf[i : i + 1] for leaf in rows)) for i in range(3)]
        if not is_sum(together, each):
            raise UnsupportedModelError(
                f"Guide sites {list(structure.local_latents)} depend on the number of records that "
                "the guide gets at once: it mixes records, or reads x.shape[0]. Draw each "
                "record's latents from that record alone. Pass public scales as static keywords."
            )


def check_supported(
    guide: NumPyroFn, structure: ModelStructure, shared: Arrays, static: Kwargs
) -> None:
    """Raises for automatic guides that read records, or have parameters for each record."""
    for part in auto_parts(guide):
        if structure.local_latents and not isinstance(part, autoguide.AutoGuideList):
            _check_global(part, structure, shared, static)
        for cls in type(part).__mro__:
            if cls.__name__ in _REFUSED:
                raise UnsupportedModelError(
                    f"{type(part).__name__} cannot be private, because {_REFUSED[cls.__name__]}. "
                    "Use AutoDiagonalNormal, AutoMultivariateNormal, "
                    "AutoLowRankMultivariateNormal, AutoIAFNormal, AutoBNAFNormal, AutoNormal or "
                    "AutoDelta."
                )


def _check_global(
    part: autoguide.AutoGuide, structure: ModelStructure, shared: Arrays, static: Kwargs
) -> None:
    """Raises if an automatic guide covers latent sites in the data plate."""
    model = functools.partial(part.model, **static)
    sites = traced(model, structure.data_plate, structure.layout.placeholder(shared))
    for name in structure.local_latents:
        if name in sites:
            raise UnsupportedModelError(
                f"Latent site {name!r} is inside the data plate {structure.data_plate!r}, so "
                f"{type(part).__name__} would hold one parameter per record. Releasing it would "
                "release the record. Integrate the site out of the likelihood, move it out of the "
                "plate, or write a guide that draws it from the record with shared parameters (an "
                "encoder)."
            )


def _check_fixed_supports(guide: Guide, params: Values, shared: Arrays) -> None:
    """Raises for automatic guides of sites whose support depends on other sites.

    NumPyro's automatic guides use the initial support during the fit, but the current one when they
    sample the posterior. The samples would not come from the fitted distribution.
    """
    if guide.auto is None:
        return
    key = jax.random.key(0)
    draws, _ = jax.eval_shape(lambda params: guide.draw(params, key, shared), params)

    def images(latents: Values) -> dict[str, Array]:
        trace = guide.model.trace_prior(latents, params, shared)
        return {
            name: biject_to(trace[name]["fn"].support)(jnp.zeros(draw.shape, draw.dtype))
            for name, draw in draws.items()
        }

    for name in depends_on_inputs(images, draws):
        raise UnsupportedModelError(
            f"The support of latent site {name!r} depends on other latent sites, but "
            f"{type(guide.auto).__name__} keeps the support that the site had at first. Sample a "
            "fraction of the range, Uniform(0, 1), and scale it, or write the guide by hand."
        )


def _check_reads_no_records(guide: Guide, shared: Arrays) -> None:
    structure, layout = guide.model.structure, guide.model.structure.layout

    def values(*arrays: Array) -> Values:
        return _drawn_values(guide, layout.arguments(arrays, shared))

    reading = depends_on_inputs(values, *layout.one_row())
    for name in (name for name in reading if name not in structure.local_latents):
        raise UnsupportedModelError(
            f"Guide site {name!r} depends on the records, so its value would release them without "
            "noise. Let the guide read parameters and public arguments only."
        )


def _drawn_values(guide: Guide, arguments: Arguments) -> Values:
    """What a guide draws, and the first values of its parameters."""
    trace = traced(guide.fn, guide.model.structure.data_plate, arguments)
    return {n: s["value"] for n, s in trace.items() if s["type"] in ("sample", "param")}


def _check_captures(guide: Guide, params: Values, shared: Arrays) -> None:
    """Raises if a guide captures arrays that are not public. NumPyro's own guides capture none.

    The check covers initial values, and the derivative of the draw, because rules of
    ``jax.custom_jvp`` may hold other arrays.
    """
    structure, public = guide.model.structure, guide.model.structure.public

    def drawn(params: Values) -> PyTree:
        return guide.draw(params, jax.random.key(0), shared)

    if guide.auto is not None and all(
        _is_numpyros_own(type(part)) for part in auto_parts(guide.auto)
    ):
        lists = (p for p in auto_parts(guide.auto) if isinstance(p, autoguide.AutoGuideList))
        if all(isinstance(part, autoguide.AutoGuide) for parts in lists for part in parts):
            # For example, masks of autoregressive networks.
            public.trust(held_by_program(make_program(drawn, params)[0]))
            return

    def derivative(params: Values) -> PyTree:
        draws, back = jax.vjp(drawn, params)
        return back(jax.tree.map(jnp.ones_like, draws))

    public.check("guide", lambda: _drawn_values(guide, structure.layout.placeholder(shared)))
    public.check("guide", derivative, params)


def check_first_values(
    guide: NumPyroFn, model: NumPyroFn, structure: ModelStructure, shared: Arrays
) -> None:
    """Raises if the initial values of automatic guides come from undeclared arrays.

    Args:
        guide: The guide object.
        model: The model, static keywords filled in.
        structure: Structure of the model.
        shared: Public arrays among its arguments.

    Raises:
        TypeError: If ``init_to_value`` has a value that is not an array or a number.
        UnsupportedModelError: If an initial value could come from records.
    """
    what, public = "initialiser (init_loc_fn, init_strategy)", structure.public
    plate, key = structure.data_plate, jax.random.key(0)
    for part in auto_parts(guide):
        setup = setup_of(part)
        if not _is_numpyros_own(setup):
            raise UnsupportedModelError(
                f"{type(part).__name__} overrides _setup_prototype, which could compute initial "
                "values from records. Initial values are published without noise. Remove the "
                "method, and pass initial values as init_params= of run or init."
            )
        if isinstance(part, autoguide.AutoGuideList):
            continue
        for fn in guide_functions(part):
            public.take("guide", held_by_function(fn))
        _check_values(part.init_loc_fn)
        held = held_by_function(part.init_loc_fn)
        public.take(what, [*held, *held_by_function(init_scale(part))], no_new=_PUBLISHED)
        own = bool(held) or not _is_numpyros_own(part.init_loc_fn)

        def values(first: Callable[[Site], object] = part.init_loc_fn) -> list[PyTree]:
            arguments = structure.layout.placeholder(shared)
            trace = traced(model, plate, arguments, start=first, rng_key=key)
            return [trace[name]["value"] for name in structure.latents]

        # NumPyro's own initialisers read the model alone, whose small arrays may be public.
        public.check(what, values, no_new=_PUBLISHED if own else "")


def _check_values(init_loc_fn: Callable[..., object]) -> None:
    """Raises for a list in ``init_to_value``: NumPyro passes it to the model as it is."""
    values = init_loc_fn.keywords.get("values") if hasattr(init_loc_fn, "keywords") else None
    for name, value in values.items() if isinstance(values, Mapping) else ():
        if isinstance(value, list | tuple | str):
            raise TypeError(
                f"init_to_value(values=...) has a {type(value).__name__} for site {name!r}, but "
                "the model computes with that value as an array. Convert it with jnp.asarray, and "
                "list the array in public= of Privacy if it comes from no record."
            )


def _is_numpyros_own(of: object) -> bool:
    """Whether a guide's class, or a function, is one of NumPyro."""
    of = of.func if isinstance(of, functools.partial) else of
    return (getattr(of, "__module__", None) or "").startswith("numpyro.")


def _check_parameter_shapes(guide: Guide, shared: Arrays) -> None:
    """Raises if the shape of a parameter of model or guide depends on the number of records."""
    layout, plate = guide.model.structure.layout, guide.model.structure.data_plate

    def shapes(fn: NumPyroFn, rows: int) -> Values:
        arguments = layout.placeholder(shared, rows)

        def params() -> Values:
            trace = traced(fn, plate, arguments, start=init_to_uniform(), num_rows=rows)
            return {n: s["value"] for n, s in trace.items() if s["type"] == "param"}

        found = jax.eval_shape(params)
        return {n: [x.shape for x in jax.tree.leaves(value)] for n, value in found.items()}

    for fn in (guide.fn, guide.model.fn):
        alone, two = shapes(fn, 1), shapes(fn, 2)
        for name, shape in alone.items():
            if two.get(name) != shape:
                raise UnsupportedModelError(
                    f"Parameter {name!r} has one entry per record (shapes {shape} for 1 record, "
                    f"{two.get(name)} for 2). Releasing it would release the records. Use "
                    "parameters of fixed shape."
                )
