r"""Latent sites inside the data plate: values that belong to one record.

With a local latent :math:`l_i` the record's part of the evidence lower bound at global latents z is

.. math::
    \log p(x_i, l_i \mid z) - \log q(l_i \mid x_i), \qquad l_i = l(x_i, \varphi, \eta_i),

The guide draws :math:`l_i` from the record with shared parameters :math:`\varphi` (an encoder). The
term is a function of one record, so its gradient in :math:`(z, \varphi)` is part of the signal. The
noise :math:`\eta_i` comes from a secret number, which every step draws for each record. These
numbers are i.i.d. across records, so removing one record does not change the distribution of the
others. Discrete local latents are summed out over all combinations of their values,

.. math:: \log \sum_k p(x_i, k \mid z).

Reference:
    D. P. Kingma, M. Welling, "Auto-encoding variational Bayes", ICLR 2014.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpyro.distributions import Distribution, MaskedDistribution, biject_to
from numpyro.infer import init_to_uniform

from numpyro_dp._compat import Messenger, mask_of
from numpyro_dp.core import Arrays, NumPyroFn, Site, Sites, Values
from numpyro_dp.model.dependence import depends_on_inputs
from numpyro_dp.model.public import UnsupportedModelError
from numpyro_dp.model.records import ModelStructure
from numpyro_dp.model.separation import layers, traced

_MOST = 4096


def start(site: Site) -> object:
    """An initial value for a site that has no value."""
    return init_to_uniform(site) if site["value"] is None else None


def is_local(site: Site, plate: str) -> bool:
    """Whether a site is an unobserved sample site inside a plate."""
    return site["type"] == "sample" and not site["is_observed"] and in_plate(site, plate)


def in_plate(site: Site, plate: str) -> bool:
    """Whether a site is inside a plate."""
    return any(frame.name == plate for frame in site["cond_indep_stack"])


class fill_locals(Messenger):  # noqa: N801 - a NumPyro handler, named like its peers
    """Sets the latent sites inside a plate, instead of drawing them.

    Args:
        fn: The model.
        plate: Name of the plate.
        values: Values of continuous sites. Default: the image of 0.
        choice: Flat indices of values in the support of discrete sites. Default: the first value.
        discrete_only: Leaves continuous sites unchanged.
        rows: Indices of the records. Each index gets other default values.
    """

    def __init__(
        self,
        fn: NumPyroFn,
        plate: str,
        values: Mapping[str, Array] | None = None,
        choice: Mapping[str, Array] | None = None,
        discrete_only: bool = False,
        rows: Array | None = None,
    ) -> None:
        self.plate = plate
        self.values: Mapping[str, Array] = values or {}
        self.choice: Mapping[str, Array] = choice or {}
        self.discrete_only = discrete_only
        self.rows: Array = jnp.zeros(1, int) if rows is None else rows
        super().__init__(fn)

    def process_message(self, msg: Site) -> None:
        """Sets the value of a latent site that has none."""
        if msg["type"] != "sample" or msg["value"] is not None or not is_local(msg, self.plate):
            return
        name, fn = msg["name"], msg["fn"]
        if name in self.values:
            msg["value"] = self.values[name]
        elif fn.support.is_discrete:
            support = _support(name, fn)
            chosen = self.choice.get(name, self._row(msg).reshape(-1) % len(support))
            msg["value"] = support[chosen].reshape(fn.shape())
        elif not self.discrete_only:
            transform = biject_to(fn.support)
            shape = transform.inverse_shape(fn.shape())
            row = self._row(msg).reshape(fn.batch_shape + (1,) * (len(shape) - len(fn.batch_shape)))
            # Another value for each record, so that check_additive notices if a model mixes them.
            msg["value"] = transform(jnp.broadcast_to(jnp.sin(2.0 * row), shape))

    def _row(self, msg: Site) -> Array:
        """The record index of each entry in a site's batch."""
        (frame,) = (frame for frame in msg["cond_indep_stack"] if frame.name == self.plate)
        batch = msg["fn"].batch_shape
        axes = [1] * len(batch)
        axes[frame.dim] = -1
        return jnp.broadcast_to(self.rows.reshape(axes), batch)


def read_locals(
    model: NumPyroFn, structure: ModelStructure, shared: Arrays
) -> dict[str, np.ndarray]:
    """Checks a model with latent sites inside its data plate.

    Args:
        model: The model, static keywords filled in.
        structure: Its structure. ``summed`` has the names of the discrete latent sites in the
            data plate.
        shared: Public arrays among the model's arguments.

    Returns:
        For each discrete site the indices of its values in each combination, shape
        ``(combinations, entries of the site)``.

    Raises:
        UnsupportedModelError: If there are more than 4096 combinations, if a site in the plate is
            scaled, or if a site outside the plate reads a site inside.
    """
    plate, layout = structure.data_plate, structure.layout

    def trace(values: dict[str, Array], *rows: Array) -> Sites:
        arguments = layout.arguments(rows, shared) if rows else layout.placeholder(shared)
        return traced(fill_locals(model, plate, values), plate, arguments, start=start)

    def densities(values: dict[str, Array]) -> Values:
        found = trace(values)
        return {n: found[n]["fn"].log_prob(found[n]["value"]) for n in structure.outside}

    def scales(*rows: Array) -> Values:
        found = trace({}, *rows)
        return {n: [s for s in [found[n]["scale"]] if s is not None] for n in structure.inside}

    sites = trace({})
    latent = {n: sites[n]["value"] for n in structure.inside if is_local(sites[n], plate)}
    for name in depends_on_inputs(densities, latent):
        raise UnsupportedModelError(
            f"Site {name!r} outside the data plate {plate!r} reads a latent value of a record (one "
            f"of {sorted(latent)}). Move it into the plate."
        )
    reading = depends_on_inputs(scales, *layout.one_row()) if structure.summed else []
    for name in structure.inside if structure.summed else ():
        scale, size = sites[name]["scale"], sites[plate]["args"][0]
        if name in reading or (scale is not None and np.any(scale != size)):
            raise UnsupportedModelError(
                f"Site {name!r} is scaled, but the model has discrete latent sites, which are "
                "summed out. Scaling the terms of that sum is not the same as scaling the sum. Sum "
                "the sites out in the model, with numpyro.factor inside the data plate."
            )
    fns = {name: sites[name]["fn"] for name in structure.summed}
    sizes = {n: [len(_support(n, fn))] * math.prod(fn.batch_shape) for n, fn in fns.items()}
    every = [size for each in sizes.values() for size in each]
    number = math.prod(every)
    if number > _MOST:
        raise UnsupportedModelError(
            f"The discrete sites {sorted(sizes)} have {number} combinations of values for one "
            f"record, but at most {_MOST} are summed. Sum them out with an algorithm that uses "
            "their structure, such as a forward recursion, and pass the result to numpyro.factor "
            "inside the data plate."
        )
    grid = np.stack([axis.reshape(-1) for axis in np.indices(every)], -1) if every else np.zeros(0)
    ends = np.cumsum([len(each) for each in sizes.values()])
    return dict(zip(sizes, np.split(grid, ends[:-1], axis=-1), strict=True)) if sizes else {}


def masked_away(name: str, fn: Any) -> Array:
    """Log of the number of times that the sum counts a masked entry: once for each value."""
    for masked in layers(fn):
        if isinstance(masked, MaskedDistribution):
            hidden = ~jnp.broadcast_to(jnp.asarray(mask_of(masked), bool), masked.batch_shape)
            return jnp.sum(hidden) * math.log(len(_support(name, masked)))
    return jnp.zeros(())


def _support(name: str, fn: Distribution) -> Array:
    """The support of a discrete distribution, shape ``(number of values, *event_shape)``."""
    try:
        support = fn.enumerate_support(expand=False)
    except jax.errors.ConcretizationTypeError as error:
        raise UnsupportedModelError(
            f"The support of latent site {name!r} depends on the records or on other latents, so "
            "its values cannot be listed. Sum it out in the model, with numpyro.factor inside the "
            "data plate."
        ) from error
    return support.reshape(support.shape[0], *fn.event_shape)
