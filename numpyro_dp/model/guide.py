r"""A reparameterised guide as one public function: ``draw``.

``draw`` takes the guide's parameters and a key. It returns the latents :math:`u` in unconstrained
coordinates, and an estimate of the entropy. For Gaussian guides the estimate is the entropy itself,
for other guides :math:`-\log q(u)` at the draw. Both have exactly the same gradient if the draw
is an invertible map of as many normals. For a low-rank guide it is not, so ``draw`` takes
:math:`-\log q(u)`. Guides run on a placeholder for the records.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpyro import handlers
from numpyro.distributions import LowRankMultivariateNormal, biject_to
from numpyro.infer import autoguide

from numpyro_dp._compat import (
    flat_latent,
    forget_prototype,
    prototype_sites,
    setup_of,
    unpack_latent,
)
from numpyro_dp.core import Arrays, Kwargs, NumPyroFn, PyTree, Site, Sites, Values
from numpyro_dp.model.density import Model
from numpyro_dp.model.locals import fill_locals, is_local
from numpyro_dp.model.public import UnsupportedModelError, own_constants
from numpyro_dp.model.records import Arguments
from numpyro_dp.model.separation import log_density, one_record, traced


class Guide(NamedTuple):
    """A guide that has been checked against a model.

    Attributes:
        fn: The NumPyro guide, static keywords filled in.
        auto: The ``AutoGuide`` behind ``fn``, or ``None`` for a hand-written guide.
        model: The model.
        params: Names of the parameters that the draw of the global latents reads.
        public: The guide's static keywords.
        local_params: Names of the parameters of the encoder, which draws a record's own latents.
            ``None`` if the model has no local latents.
    """

    fn: NumPyroFn
    auto: autoguide.AutoGuide | None
    model: Model
    params: frozenset[str] = frozenset()
    public: Values = {}  # noqa: RUF012 - never written to
    local_params: frozenset[str] | None = None

    def draw(
        self, params: Values, rng_key: Array, shared: Arrays
    ) -> tuple[dict[str, Array], Array]:
        """Draws latents, differentiably in the parameters.

        Args:
            params: Constrained parameters.
            rng_key: A NumPyro key. ``numpyro.infer.SVI`` makes the same draw with it.
            shared: Public arrays among the model's arguments.

        Returns:
            The unconstrained latents by site, and a scalar that estimates the entropy.

        Guarantee: reads no record.
        """
        trace = guide_trace(self, params, rng_key, shared)
        if self.auto is None:
            return _generic_draw(self, trace, params, shared, self.model.structure.latents)
        return _auto_draw(self, self.auto, trace, params, shared)

    def log_density(self, params: Values, latents: Values, shared: Arrays = ()) -> Array:
        r"""Returns :math:`\log q(u)` of global latents in unconstrained coordinates.

        Args:
            params: Constrained parameters.
            latents: Unconstrained latents by site, such as :meth:`draw` returns.
            shared: Public arrays among the model's arguments.

        Raises:
            UnsupportedModelError: If the guide has latents that the model does not have, or a flow
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
                continue  # its density is part of the density of the flat latent
            if name not in flat and name not in latents:
                raise UnsupportedModelError(
                    f"log_density does not support the auxiliary latent {name!r} of the guide, "
                    "because the density of the other latents is an integral over it. Remove it."
                )
            try:
                total += log_density(site)
            except NotImplementedError as error:
                raise UnsupportedModelError(
                    f"The guide has no density in closed form, because {site['fn']} cannot be "
                    "inverted. Use AutoIAFNormal or a normal guide."
                ) from error
            if name in latents:
                transform = biject_to(prior[name]["fn"].support)
                total += jnp.sum(transform.log_abs_det_jacobian(latents[name], values[name]))
        return total

    def local_bound(
        self, latents: Values, params: Values, example: Arrays, shared: Arrays, rng_key: Array
    ) -> Array:
        """One record's part of the evidence lower bound, at one draw of that record's latents.

        Args:
            latents: Unconstrained global latents.
            params: Constrained parameters.
            example: One row of each record array.
            shared: Public arrays among the model's arguments.
            rng_key: Key of the draw. Each record has its own.

        Guarantee: a function of one record and public values only.
        """
        guide_key, model_key = jax.random.split(rng_key)
        arguments = self.model.structure.layout.example(example, shared)
        found = self.local_sites(latents, params, arguments, shared, guide_key)
        values = {name: found[name]["value"] for name in self.model.structure.local_latents}
        density = self.model.log_likelihood(latents, params, example, shared, model_key, values)
        size = found[self.model.structure.data_plate]["args"][0]
        own = (log_density(site) for site in found.values() if site["type"] == "sample")
        # A plate of constant size N scales these sites by N, as it does in the likelihood.
        return density - sum(own) / size

    def local_sites(
        self, latents: Values, params: Values, arguments: Arguments, shared: Arrays, rng_key: Array
    ) -> Sites:
        """The trace of the guide's plate and local sites for given global latents."""
        plate = self.model.structure.data_plate
        prior = self.model.trace_prior(latents, params, shared)
        values = params | {name: prior[name]["value"] for name in latents}
        trace = traced(self.fn, plate, arguments, values, rng_key=rng_key)
        return {n: s for n, s in trace.items() if n == plate or is_local(s, plate)}


@contextlib.contextmanager
def prototype_without_records(guide: object, plate: str) -> Iterator[None]:
    """Lets automatic guides set themselves up on a model whose likelihood is hidden.

    ``AutoGuide`` searches for initial values with a finite potential, which would read the records.
    It also stores the arguments of its setup. Inside this context the guide's model has one record
    (the placeholder) and no observed sites.
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


def set_up(
    guide: NumPyroFn, rng_key: Array, placeholder: Arguments, params: PyTree, static: Kwargs
) -> bool:
    """Sets up an automatic guide of NumPyro, as the first call of ``SVI.init(rng_key)`` would.

    Returns:
        Whether the guide is set up. Its parameters can then be initialised in compiled code, where
        any other guide, or a model with ``params``, would keep values that exist there alone. Not
        compiled, NumPyro compiles a hundred operations one by one.
    """
    plain = type(guide).__module__ == autoguide.__name__
    if params or not plain or isinstance(guide, autoguide.AutoGuideList):
        return False
    # The third key is the guide's in SVI.init.
    with handlers.seed(rng_seed=jax.random.split(rng_key, 3)[2]):
        placeholder.call(functools.partial(setup_of(guide), guide, **static))
    return True


def hide_likelihood(model: NumPyroFn, plate: str) -> NumPyroFn:
    """Hides observed sites and discrete local latents from outer handlers."""

    def hidden(site: Site) -> bool:
        if is_local(site, plate):
            return site["fn"].support.is_discrete
        return site["type"] == "sample" and bool(site.get("is_observed"))

    filled = fill_locals(one_record(model, plate), plate, discrete_only=True)
    return handlers.block(filled, hide_fn=hidden)


def auto_parts(guide: object) -> Iterator[Any]:
    """All automatic guides inside a guide, including ``AutoGuideList`` and its parts."""
    if isinstance(guide, autoguide.AutoGuide):
        yield guide
        if isinstance(guide, autoguide.AutoGuideList):
            for part in guide:
                yield from auto_parts(part)


def guide_trace(guide: Guide, params: Values, rng_key: Array, shared: Arrays) -> Sites:
    """NumPyro's trace of the guide on a placeholder for the records."""
    structure = guide.model.structure
    arguments = structure.layout.placeholder(shared)
    return traced(guide.fn, structure.data_plate, arguments, params, rng_key=rng_key)


def _auto_draw(
    guide: Guide, auto: autoguide.AutoGuide, trace: Sites, params: PyTree, shared: PyTree
) -> tuple[dict[str, Array], Array]:
    """Reads the unconstrained latents of an automatic guide from its trace."""
    if isinstance(auto, autoguide.AutoGuideList):
        latents, entropy = {}, jnp.zeros(())
        for part in auto:
            if isinstance(part, autoguide.AutoGuide):
                values, part_entropy = _auto_draw(guide, part, trace, params, shared)
            else:
                # Traced alone, to learn which sites of the whole trace are its own.
                alone = Guide(functools.partial(part, **guide.public), None, guide.model)
                own = guide_trace(alone, params, jax.random.key(0), shared)
                names = {name for name, site in own.items() if site["type"] == "sample"}
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
        entropy = sum(map(jnp.sum, scales)) + 0.5 * size * math.log(2 * math.pi * math.e)
        return latents, jnp.asarray(entropy)
    sites = {name: trace[name] for name in names}
    return _generic_draw(guide, sites, params, shared, names, trace)


def _unpacked(auto: autoguide.AutoContinuous, flat: Array) -> dict[str, Array]:
    """Splits a guide's flat draw into latents by site.

    If the sites follow each other, ``split`` is used, because its gradient is one concatenation.
    The gradient of NumPyro's slices adds up a full-length vector for each site.
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


def _packed(auto: autoguide.AutoContinuous, latents: Values) -> Array:
    """Joins latents into a guide's flat draw: the inverse of :func:`_unpacked`."""
    places = dict(unpack_latent(auto, np.arange(auto.latent_dim)))
    values = jnp.concatenate([jnp.ravel(latents[name]) for name in places])
    order = np.concatenate([np.ravel(place) for place in places.values()])
    # Unsigned, because JAX tests signed indices for negative values and stores a table for that.
    (order,) = own_constants(order.astype(np.uint32))
    return jnp.zeros_like(values).at[order].set(values)


def _generic_draw(
    guide: Guide,
    sites: Any,
    params: Values,
    shared: Arrays,
    names: Iterable[str],
    trace: Any = None,
) -> tuple[dict[str, Array], Array]:
    """Maps constrained draws to unconstrained coordinates with the model's supports."""
    layout, plate = guide.model.structure.layout, guide.model.structure.data_plate
    replayed = handlers.replay(guide.model.fn, trace or sites)
    model_trace = traced(replayed, plate, layout.placeholder(shared), params)
    draws = [site for site in sites.values() if _is_draw(site) and not is_local(site, plate)]
    total = sum(map(log_density, draws), start=jnp.zeros(()))
    latents = {}
    for name in names:
        transform = biject_to(model_trace[name]["fn"].support)
        value = sites[name]["value"]
        latents[name] = transform.inv(value)
        # log q(u) is log q(z) plus the log Jacobian of z = T(u).
        total += jnp.sum(transform.log_abs_det_jacobian(latents[name], value))
    return latents, -total


def _is_draw(site: Site) -> bool:
    return site["type"] == "sample" and not site["is_observed"]


def _base_value(site: Site) -> Array:
    """The unconstrained draw of an AutoNormal site."""
    return site["intermediates"][0][0] if site["intermediates"] else site["value"]


def _entropy(site: Site) -> Array:
    """Entropy of a guide's joint latent in closed form if there is one, else -log q of the draw.

    A low-rank normal has more noise variables than latents, so the gradients of entropy and
    -log q differ. NumPyro differentiates -log q, and this function returns the same.
    """
    if isinstance(site["fn"], LowRankMultivariateNormal):
        return -log_density(site)
    try:
        return jnp.sum(site["fn"].entropy())
    except NotImplementedError:
        return -log_density(site)
