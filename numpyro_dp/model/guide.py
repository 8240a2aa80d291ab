r"""A reparameterised guide as one public function: ``draw``.

From the guide's parameters and a key it gives the latents :math:`u` in unconstrained coordinates
and an estimate of :math:`-\log q(u)` whose gradient is that of the entropy: the entropy itself for
Gaussian guides, a single draw otherwise (where the draw is an invertible map of as many normals,
both have the same gradient, exactly; a low-rank guide is not such, and takes the single draw).
Guides run on a placeholder for the records.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpyro import handlers
from numpyro.distributions import LowRankMultivariateNormal, biject_to
from numpyro.infer import autoguide

from numpyro_dp._compat import flat_latent, forget_prototype, prototype_sites, unpack_latent
from numpyro_dp.model.density import Model
from numpyro_dp.model.locals import fill_locals, is_local
from numpyro_dp.model.public import UnsupportedModelError, own_constants
from numpyro_dp.model.records import Arguments
from numpyro_dp.model.separation import (
    one_record,
)

__all__ = [
    "Guide",
    "auto_parts",
    "guide_trace",
    "hide_likelihood",
    "log_density",
    "prototype_without_records",
]


class Guide(NamedTuple):
    """A guide that has been checked against a model.

    Attributes:
        fn: The NumPyro guide, static keywords filled in.
        auto: The ``AutoGuide`` behind ``fn``, or ``None`` for a hand-written guide.
        model: The model.
        params: Names of the parameters that the draw of the global latents reads.
        public: Static keywords that the guide has been given.
        local_params: Names of the parameters that draw a record's own latents from it; ``None``
            where the model has none.
    """

    fn: Callable[..., Any]
    auto: autoguide.AutoGuide | None
    model: Model
    params: frozenset[str] = frozenset()
    public: dict[str, Any] = {}  # noqa: RUF012 - never written to
    local_params: frozenset[str] | None = None

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
        trace = guide_trace(self, params, rng_key, shared)
        if self.auto is None:
            return _generic_draw(self, trace, params, shared, self.model.structure.latents)
        return _auto_draw(self, self.auto, trace, params, shared)

    def log_density(
        self, params: dict[str, Any], latents: dict[str, Array], shared: tuple[Array, ...] = ()
    ) -> Array:
        r"""Returns :math:`\log q(u)` of global latents in unconstrained coordinates.

        Args:
            params: Constrained parameters.
            latents: Unconstrained latents by site, such as :meth:`draw` returns.
            shared: Public arrays among the model's arguments.

        Raises:
            UnsupportedModelError: If the guide has latents besides those of the model, or a flow
                that cannot be inverted (``AutoBNAFNormal``).

        Guarantee: reads no record.
        """
        prior = self.model.trace_prior(latents, params, shared)
        values = {name: prior[name]["value"] for name in latents}
        flat, parts = {}, {}
        for part in auto_parts(self.auto):
            if isinstance(part, autoguide.AutoContinuous):
                names = unpack_latent(part, np.arange(part.latent_dim))
                parts |= dict.fromkeys(names, part)
                flat[flat_latent(part)] = _packed(part, latents)
        trace = guide_trace(self, params | values | flat, jax.random.key(0), shared)
        plate = self.model.structure.data_plate
        total = jnp.zeros(())
        for name, site in trace.items():
            if not _is_draw(site) or is_local(site, plate) or name in parts:
                continue  # the sites of a flat latent are its entries
            if name not in flat and name not in latents:
                raise UnsupportedModelError(
                    f"Expected a guide without auxiliary latents for log_density, got {name!r}: "
                    "the density of the others is an integral over it. Leave it out."
                )
            try:
                total += log_density(site)
            except NotImplementedError as error:
                raise UnsupportedModelError(
                    f"Expected a guide whose density has a closed form, got {site['fn']}, which "
                    "cannot be inverted. Use AutoIAFNormal or a normal guide."
                ) from error
            if name in latents:
                transform = biject_to(prior[name]["fn"].support)
                total += jnp.sum(transform.log_abs_det_jacobian(latents[name], values[name]))
        return total

    def local_bound(
        self,
        latents: dict[str, Array],
        params: dict[str, Any],
        example: tuple[Array, ...],
        shared: tuple[Array, ...],
        rng_key: Array,
    ) -> Array:
        """One record's part of the evidence lower bound, at one draw of its own latents.

        Args:
            latents: Unconstrained global latents.
            params: Constrained parameters.
            example: One row of each record array.
            shared: Public arrays among the model's arguments.
            rng_key: Of the draw; a key of its own for each record.

        Guarantee: a function of one record and public values only.
        """
        guide_key, model_key = jax.random.split(rng_key)
        arguments = self.model.structure.layout.example(example, shared)
        found = self.local_sites(latents, params, arguments, shared, guide_key)
        values = {name: found[name]["value"] for name in self.model.structure.local_latents}
        density = self.model.log_likelihood(latents, params, example, shared, model_key, values)
        size = found[self.model.structure.data_plate]["args"][0]
        own = (log_density(site) for site in found.values() if site["type"] == "sample")
        return density - sum(own) / size

    def local_sites(
        self,
        latents: dict[str, Array],
        params: dict[str, Any],
        arguments: Arguments,
        shared: tuple[Array, ...],
        rng_key: Array,
    ) -> dict[str, Any]:
        """The guide's plate and sites of a record, given the global latents."""
        plate = self.model.structure.data_plate
        prior = self.model.trace_prior(latents, params, shared)
        values = params | {name: prior[name]["value"] for name in latents}
        seeded = handlers.seed(one_record(self.fn, plate), rng_key)
        trace = arguments.call(handlers.trace(handlers.substitute(seeded, data=values)).get_trace)
        return {n: s for n, s in trace.items() if n == plate or is_local(s, plate)}


@contextlib.contextmanager
def prototype_without_records(guide: Any, plate: str) -> Iterator[None]:
    """Lets automatic guides set themselves up on a model whose likelihood is hidden.

    ``AutoGuide`` looks for initial values of finite potential, which would be a choice made by
    looking at the records, and keeps the arguments it was set up with. Inside this context the
    guide's model has one record (the placeholder) and no observed sites.
    """
    parts = list(auto_parts(guide))
    originals = [part.model for part in parts]
    for part in parts:
        part.model = hide_likelihood(part.model, plate)
        forget_prototype(part)
    try:
        yield
    finally:
        for part, original in zip(parts, originals, strict=True):
            part.model = original


def hide_likelihood(model: Callable[..., Any], plate: str) -> Callable[..., Any]:
    """Hides the observed sites, and the discrete ones of a record, from the handlers around."""

    def hidden(site: dict[str, Any]) -> bool:
        return _is_observed(site) or (is_local(site, plate) and site["fn"].support.is_discrete)

    filled = fill_locals(one_record(model, plate), plate, discrete_only=True)
    return handlers.block(filled, hide_fn=hidden)


def auto_parts(guide: Any) -> Iterator[Any]:
    """The automatic guides that a guide consists of, lists of them included."""
    if isinstance(guide, autoguide.AutoGuide):
        yield guide
        if isinstance(guide, autoguide.AutoGuideList):
            for part in guide:
                yield from auto_parts(part)


def _is_observed(site: dict[str, Any]) -> bool:
    return site["type"] == "sample" and bool(site.get("is_observed"))


def guide_trace(
    guide: Guide, params: dict[str, Any], rng_key: Array, shared: tuple[Array, ...]
) -> dict[str, Any]:
    """NumPyro's trace of the guide on a placeholder for the records."""
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
        site = trace[flat_latent(auto)]
        return _unpacked(auto, site["value"]), _entropy(site)
    names = prototype_sites(auto)
    if isinstance(auto, autoguide.AutoNormal):
        latents = {name: _base_value(trace[name]) for name in names}
        scales = [jnp.log(params[f"{name}_{auto.prefix}_scale"]) for name in names]
        size = sum(scale.size for scale in scales)
        return latents, sum(map(jnp.sum, scales)) + 0.5 * size * math.log(2 * math.pi * math.e)
    sites = {name: trace[name] for name in names}
    return _generic_draw(guide, sites, params, shared, names, trace)


def _unpacked(auto: Any, flat: Array) -> dict[str, Array]:
    """The latents of a guide's flat draw.

    Where they follow each other, their gradient is joined in one piece; that of slices, as NumPyro
    takes them, adds up a vector of the whole length for each site.
    """
    order = np.arange(flat.size)
    places = dict(unpack_latent(auto, order))
    if not np.array_equal(np.concatenate([np.ravel(p) for p in places.values()]), order):
        return dict(unpack_latent(auto, flat))
    parts = jnp.split(flat, np.cumsum([np.size(place) for place in places.values()])[:-1])
    return {
        name: part.reshape(np.shape(place))
        for (name, place), part in zip(places.items(), parts, strict=True)
    }


def _packed(auto: Any, latents: dict[str, Array]) -> Array:
    """The flat latent of an automatic guide: the reverse of :func:`_unpacked`."""
    places = dict(unpack_latent(auto, np.arange(auto.latent_dim)))
    values = jnp.concatenate([jnp.ravel(latents[name]) for name in places])
    order = np.concatenate([np.ravel(place) for place in places.values()])
    # JAX checks signed indices for negative ones, and would keep a table of that.
    (order,) = own_constants(order.astype(np.uint32))
    return jnp.zeros_like(values).at[order].set(values)


def _generic_draw(
    guide: Guide, sites: Any, params: Any, shared: Any, names: Any, trace: Any = None
) -> tuple[dict[str, Array], Array]:
    """Maps constrained draws to unconstrained ones with the model's own supports."""
    structure = guide.model.structure
    replayed = handlers.replay(one_record(guide.model.fn, structure.data_plate), trace or sites)
    substituted = handlers.substitute(handlers.seed(replayed, jax.random.key(0)), data=params)
    model_trace = structure.layout.placeholder(shared).call(handlers.trace(substituted).get_trace)
    plate = structure.data_plate
    draws = [site for site in sites.values() if _is_draw(site) and not is_local(site, plate)]
    total = sum(map(log_density, draws), start=jnp.zeros(()))
    latents = {}
    for name in names:
        transform = biject_to(model_trace[name]["fn"].support)
        value = sites[name]["value"]
        latents[name] = transform.inv(value)
        total += jnp.sum(transform.log_abs_det_jacobian(latents[name], value))
    return latents, -total


def _part_sites(part: Any, guide: Guide, params: Any, shared: Any) -> list[str]:
    sub = Guide(functools.partial(part, **guide.public), None, guide.model)
    trace = guide_trace(sub, params, jax.random.key(0), shared)
    return [name for name, site in trace.items() if site["type"] == "sample"]


def _is_draw(site: dict[str, Any]) -> bool:
    return site["type"] == "sample" and not site["is_observed"]


def log_density(site: dict[str, Any]) -> Array:
    """Log density of a site of a guide, with its scale."""
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
        return -log_density(site)
    try:
        return jnp.sum(site["fn"].entropy())
    except NotImplementedError:
        return -log_density(site)
