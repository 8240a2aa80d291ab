r"""A reparameterised guide as one public function: ``draw``.

From the guide's parameters and a key it gives the latents :math:`u` in unconstrained coordinates
and an estimate of :math:`-\log q(u)` whose gradient is that of the entropy: the entropy itself for
Gaussian guides, a single draw otherwise (where the draw is an invertible map of as many normals,
both have the same gradient, exactly; a low-rank guide is not such, and takes the single draw).
Guides run on a placeholder for the records.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from numpyro import handlers
from numpyro.distributions import LowRankMultivariateNormal, biject_to
from numpyro.infer import autoguide
from numpyro.infer.initialization import init_to_uniform

from numpyro_dp.model.density import Model
from numpyro_dp.model.dependence import depends_on_inputs
from numpyro_dp.model.separation import (
    UnsupportedModelError,
    check_captured,
    one_record,
)

__all__ = ["Guide", "prototype_without_records", "read_guide"]

_REFUSED = {
    "AutoDAIS": "its sampler evaluates the likelihood of all records",
    "AutoSurrogateLikelihoodDAIS": "its sampler evaluates a likelihood of records",
    "AutoSemiDAIS": "its sampler evaluates the likelihood of all records",
    "AutoLaplaceApproximation": "its covariance is a Hessian over all records",
}


class Guide(NamedTuple):
    """A guide that has been checked against a model.

    Attributes:
        fn: The NumPyro guide, static keywords filled in.
        auto: The ``AutoGuide`` behind ``fn``, or ``None`` for a hand-written guide.
        model: The model.
        params: Names of the guide's parameters.
        public: Static keywords that the guide has been given.
    """

    fn: Callable[..., Any]
    auto: autoguide.AutoGuide | None
    model: Model
    params: frozenset[str] = frozenset()
    public: dict[str, Any] = {}  # noqa: RUF012 - never written to

    def draw(
        self, params: dict[str, Any], rng_key: Array, shared: tuple[Array, ...]
    ) -> tuple[dict[str, Array], Array]:
        """Draws latents, differentiably in the parameters.

        Args:
            params: Constrained parameters.
            rng_key: A NumPyro key; the draw is the one that ``numpyro.infer.SVI`` makes with it.
            shared: Public arrays among the model's arguments.

        Returns:
            The unconstrained latents by site, and a scalar whose gradient is the entropy's.

        Guarantee: reads no record.
        """
        trace = _guide_trace(self, params, rng_key, shared)
        if self.auto is None:
            return _generic_draw(self, trace, params, shared, self.model.structure.latents)
        return _auto_draw(self, self.auto, trace, params, shared)


def read_guide(
    fn: Callable[..., Any],
    auto: Any,
    model: Model,
    params: dict[str, Any],
    shared: tuple[Array, ...],
    public: dict[str, Any] | None = None,
) -> Guide:
    """Checks a guide against its model.

    Args:
        fn: The guide as it is called, static keywords filled in.
        auto: The guide object itself.
        model: The model.
        params: Constrained parameters, as initialised.
        shared: Public arrays among the model's arguments.
        public: Static keywords that the guide has been given.

    Raises:
        UnsupportedModelError: Names the site or parameter and the remedy.
    """
    known = auto if isinstance(auto, autoguide.AutoGuide) else None
    guide = Guide(fn, known, model, public=public or {})
    _check_reads_no_records(guide, params, shared)
    _check_parameter_shapes(guide, shared)
    trace = _guide_trace(guide, params, jax.random.key(0), shared)
    guide = guide._replace(
        params=frozenset(name for name, site in trace.items() if site["type"] == "param")
    )
    _check_fixed_supports(guide, params, shared)
    latents = model.structure.latents
    found = {name: site for name, site in trace.items() if site["type"] == "sample"}
    missing = [name for name in latents if name not in found]
    if missing:
        raise UnsupportedModelError(
            f"Latent sites {missing} of the model are not in the guide. Add them to the guide, or "
            "give them a value with numpyro.handlers.substitute."
        )
    for name, site in found.items():
        auxiliary = site["infer"].get("is_auxiliary", False)
        if name not in latents and not auxiliary and not site["is_observed"]:
            raise UnsupportedModelError(
                f"Guide site {name!r} is not a latent site of the model {list(latents)}. Remove it "
                "or mark it with infer={'is_auxiliary': True}."
            )
        if not site["fn"].has_rsample:
            raise UnsupportedModelError(
                f"Guide site {name!r} has a {type(site['fn']).__name__} distribution without a "
                "reparameterised sampler. Use one that has (Normal, Gamma, Beta, LogNormal, ...)."
            )
    return guide


@contextlib.contextmanager
def prototype_without_records(guide: Any, plate: str) -> Iterator[None]:
    """Lets automatic guides set themselves up on a model whose likelihood is hidden.

    ``AutoGuide`` looks for initial values of finite potential, which would be a choice made by
    looking at the records, and keeps the arguments it was set up with. Inside this context the
    guide's model has one record (the placeholder) and no observed sites.
    """
    parts = list(_auto_parts(guide))
    originals = [part.model for part in parts]
    for part in parts:
        part.model = hide_likelihood(part.model, plate)
        part.prototype_trace = None
    try:
        yield
    finally:
        for part, original in zip(parts, originals, strict=True):
            part.model = original


def hide_likelihood(model: Callable[..., Any], plate: str) -> Callable[..., Any]:
    """Hides the observed sites of a model from the handlers around it."""
    return handlers.block(one_record(model, plate), hide_fn=_is_observed)


def check_supported(guide: Any) -> None:
    """Refuses the automatic guides that read records when they draw."""
    for part in _auto_parts(guide):
        for cls in type(part).__mro__:
            if cls.__name__ in _REFUSED:
                raise UnsupportedModelError(
                    f"{type(part).__name__} cannot be private: {_REFUSED[cls.__name__]}. Use "
                    "AutoDiagonalNormal, AutoMultivariateNormal, AutoLowRankMultivariateNormal, "
                    "AutoIAFNormal, AutoBNAFNormal, AutoNormal or AutoDelta."
                )


def _auto_parts(guide: Any) -> Iterator[Any]:
    if isinstance(guide, autoguide.AutoGuide):
        yield guide
        if isinstance(guide, autoguide.AutoGuideList):
            for part in guide:
                yield from _auto_parts(part)


def _is_observed(site: dict[str, Any]) -> bool:
    return site["type"] == "sample" and bool(site.get("is_observed"))


def _guide_trace(
    guide: Guide, params: dict[str, Any], rng_key: Array, shared: tuple[Array, ...]
) -> dict[str, Any]:
    structure = guide.model.structure
    seeded = handlers.seed(one_record(guide.fn, structure.data_plate), rng_key)
    substituted = handlers.substitute(seeded, data=params)
    return structure.layout.placeholder(shared).call(handlers.trace(substituted).get_trace)


def _auto_draw(
    guide: Guide, auto: Any, trace: dict[str, Any], params: Any, shared: Any
) -> tuple[dict[str, Array], Array]:
    """Reads the unconstrained latents of an automatic guide off its trace."""
    if isinstance(auto, autoguide.AutoGuideList):
        latents, entropy = {}, jnp.zeros(())
        for part in auto:
            if isinstance(part, autoguide.AutoGuide):
                values, part_entropy = _auto_draw(guide, part, trace, params, shared)
            else:
                names = set(_part_sites(part, guide, params, shared))
                sites = {name: site for name, site in trace.items() if name in names}
                known = [name for name in guide.model.structure.latents if name in names]
                values, part_entropy = _generic_draw(guide, sites, params, shared, known, trace)
            latents |= values
            entropy += part_entropy
        return latents, entropy
    if isinstance(auto, autoguide.AutoContinuous):
        site = trace[f"_{auto.prefix}_latent"]
        return dict(auto._unpack_latent(site["value"])), _entropy(site)
    names = [
        name
        for name, site in auto.prototype_trace.items()
        if site["type"] == "sample" and not site["is_observed"]
    ]
    if isinstance(auto, autoguide.AutoNormal):
        latents = {name: _base_value(trace[name]) for name in names}
        scales = [jnp.log(params[f"{name}_{auto.prefix}_scale"]) for name in names]
        size = sum(scale.size for scale in scales)
        return latents, sum(map(jnp.sum, scales)) + 0.5 * size * math.log(2 * math.pi * math.e)
    sites = {name: trace[name] for name in names}
    return _generic_draw(guide, sites, params, shared, names, trace)


def _generic_draw(
    guide: Guide, sites: Any, params: Any, shared: Any, names: Any, trace: Any = None
) -> tuple[dict[str, Array], Array]:
    """Maps constrained draws to unconstrained ones with the model's own supports."""
    structure = guide.model.structure
    replayed = handlers.replay(one_record(guide.model.fn, structure.data_plate), trace or sites)
    substituted = handlers.substitute(handlers.seed(replayed, jax.random.key(0)), data=params)
    model_trace = structure.layout.placeholder(shared).call(handlers.trace(substituted).get_trace)
    log_density = sum(
        (_log_density(site) for site in sites.values() if _is_draw(site)), start=jnp.zeros(())
    )
    latents = {}
    for name in names:
        transform = biject_to(model_trace[name]["fn"].support)
        value = sites[name]["value"]
        latents[name] = transform.inv(value)
        log_density += jnp.sum(transform.log_abs_det_jacobian(latents[name], value))
    return latents, -log_density


def _part_sites(part: Any, guide: Guide, params: Any, shared: Any) -> list[str]:
    sub = Guide(part, None, guide.model)
    trace = _guide_trace(sub, params, jax.random.key(0), shared)
    return [name for name, site in trace.items() if site["type"] == "sample"]


def _is_draw(site: dict[str, Any]) -> bool:
    return site["type"] == "sample" and not site["is_observed"]


def _log_density(site: dict[str, Any]) -> Array:
    intermediates = [site["intermediates"]] if site["intermediates"] else []
    value = site["fn"].log_prob(site["value"], *intermediates)
    return jnp.sum(value if site["scale"] is None else value * site["scale"])


def _base_value(site: dict[str, Any]) -> Array:
    """Unconstrained draw behind an AutoNormal site."""
    return site["intermediates"][0][0] if site["intermediates"] else site["value"]


def _entropy(site: dict[str, Any]) -> Array:
    """Entropy of a guide's joint latent where it has a closed form, else -log q of the draw.

    A low-rank normal has more noise than latents: there -log q of the draw depends on the noise,
    and the loss that NumPyro differentiates is that, not the entropy.
    """
    if isinstance(site["fn"], LowRankMultivariateNormal):
        return -_log_density(site)
    try:
        return jnp.sum(site["fn"].entropy())
    except NotImplementedError:
        return -_log_density(site)


def _check_fixed_supports(guide: Guide, params: dict[str, Any], shared: tuple[Array, ...]) -> None:
    """Refuses automatic guides for sites whose support depends on other sites.

    NumPyro's automatic guides fix the support at its initial value when they draw, and not when
    they sample the posterior: what is fitted would not be what is drawn.
    """
    if guide.auto is None:
        return
    draws, _ = jax.eval_shape(lambda key: guide.draw(params, key, shared), jax.random.key(0))

    def images(latents: dict[str, Array]) -> dict[str, Array]:
        trace = guide.model.trace_prior(latents, params, shared)
        return {
            name: biject_to(trace[name]["fn"].support)(jnp.zeros(draw.shape, draw.dtype))
            for name, draw in draws.items()
        }

    for name, depends in depends_on_inputs(images, draws).items():
        if depends:
            raise UnsupportedModelError(
                f"The support of latent site {name!r} depends on other latent sites, which "
                f"{type(guide.auto).__name__} cannot follow: it draws from the support that the "
                "site had at first. Sample a fraction of the range, Uniform(0, 1), and scale it, "
                "or write the guide by hand."
            )


def _check_reads_no_records(
    guide: Guide, params: dict[str, Any], shared: tuple[Array, ...]
) -> None:
    structure = guide.model.structure
    layout = structure.layout

    def values(*arrays: Array) -> dict[str, Any]:
        seeded = handlers.seed(one_record(guide.fn, structure.data_plate), jax.random.key(0))
        trace = layout.arguments(arrays, shared).call(handlers.trace(seeded).get_trace)
        return {
            name: site["value"]
            for name, site in trace.items()
            if site["type"] in ("sample", "param")
        }

    rows = [jax.ShapeDtypeStruct((1, *shape), dtype) for shape, dtype in layout.shapes]
    if guide.auto is None:
        check_captured("guide", values, layout, structure.data_plate, guide.public, *rows)
    for name, depends in depends_on_inputs(values, *rows).items():
        if depends:
            raise UnsupportedModelError(
                f"Guide site {name!r} depends on the records: its value would release them outside "
                "the mechanism. Let the guide read parameters and public arguments only."
            )


def _check_parameter_shapes(guide: Guide, shared: tuple[Array, ...]) -> None:
    """Refuses parameters of the model or guide whose shape grows with the number of records."""
    layout, plate = guide.model.structure.layout, guide.model.structure.data_plate
    for fn in (guide.fn, guide.model.fn):
        shapes = []
        for num_rows in (1, 2):
            arguments = layout.placeholder(shared, num_rows)

            def params(fn: Any = fn, arguments: Any = arguments, rows: int = num_rows) -> Any:
                run = handlers.seed(one_record(fn, plate, rows), jax.random.key(0))
                run = handlers.substitute(run, substitute_fn=init_to_uniform())
                trace = arguments.call(handlers.trace(run).get_trace)
                return {n: s["value"] for n, s in trace.items() if s["type"] == "param"}

            found = jax.eval_shape(params)
            shapes.append({n: [x.shape for x in jax.tree.leaves(v)] for n, v in found.items()})
        for name, shape in shapes[0].items():
            if shapes[1].get(name) != shape:
                raise UnsupportedModelError(
                    f"Parameter {name!r} has one entry per record (shapes {shape} for 1 record, "
                    f"{shapes[1].get(name)} for 2): releasing it would release the records. Use "
                    "parameters of fixed shape."
                )
