r"""Latent sites inside the data plate: values that belong to one record.

With a local latent :math:`l_i` the record's part of the evidence lower bound at global latents z is

.. math::
    \log p(x_i, l_i \mid z) - \log q(l_i \mid x_i), \qquad l_i = l(x_i, \varphi, \eta_i),

where the guide draws :math:`l_i` from the record by shared parameters :math:`\varphi` (an encoder).
It is a function of one record, so its gradient in :math:`(z, \varphi)` joins the signal. Noise
:math:`\eta_i` is drawn for each record from a key of its row number: it does not move when another
record leaves. Discrete local latents are summed out instead,

.. math:: \log \sum_k p(x_i, k \mid z),

over all combinations of their values.

Reference:
    D. P. Kingma, M. Welling, "Auto-encoding variational Bayes", ICLR 2014.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpyro import handlers
from numpyro.distributions import biject_to
from numpyro.infer.initialization import init_to_uniform
from numpyro.primitives import Messenger

from numpyro_dp.model.dependence import depends_on_inputs
from numpyro_dp.model.records import Arguments
from numpyro_dp.model.separation import UnsupportedModelError, one_record

__all__ = ["fill_locals", "is_local", "read_locals", "start"]

_MOST = 4096


def start(site: dict[str, Any]) -> Any:
    """An initial value for sites that have none."""
    return init_to_uniform()(site) if site["value"] is None else None


def is_local(site: dict[str, Any], plate: str) -> bool:
    """Whether a site is an unobserved sample site inside a plate."""
    inside = any(frame.name == plate for frame in site.get("cond_indep_stack", ()))
    return site["type"] == "sample" and not site["is_observed"] and inside


class fill_locals(Messenger):  # noqa: N801 - a NumPyro handler, named like its peers
    """Gives the latent sites inside a plate values, so that nothing is drawn for them.

    Args:
        fn: The model.
        plate: Name of the plate.
        values: Values of continuous sites; the image of 0 elsewhere.
        choice: Numbers of the values of discrete sites among their support, flat; the first
            elsewhere.
        discrete_only: Leaves continuous sites alone.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        plate: str,
        values: Mapping[str, Array] | None = None,
        choice: Mapping[str, Array] | None = None,
        discrete_only: bool = False,
    ) -> None:
        self.plate = plate
        self.values = values or {}
        self.choice = choice or {}
        self.discrete_only = discrete_only
        super().__init__(fn)

    def process_message(self, msg: dict[str, Any]) -> None:
        """Sets the value of a latent site that has none."""
        if msg["type"] != "sample" or msg["value"] is not None or not is_local(msg, self.plate):
            return
        name, fn = msg["name"], msg["fn"]
        if fn.support.is_discrete:
            number = math.prod(fn.batch_shape)
            chosen = self.choice.get(name, jnp.zeros(number, int))
            msg["value"] = _support(fn)[chosen].reshape(fn.shape())
        elif name in self.values:
            msg["value"] = self.values[name]
        elif not self.discrete_only:
            transform = biject_to(fn.support)
            msg["value"] = transform(jnp.zeros(transform.inverse_shape(fn.shape())))


def read_locals(
    model: Callable[..., Any],
    plate: str,
    alone: Arguments,
    inside: tuple[str, ...],
    outside: tuple[str, ...],
    discrete: tuple[str, ...],
) -> dict[str, np.ndarray]:
    """Checks a model with latent sites inside its data plate.

    Args:
        model: The model, static keywords filled in.
        plate: Name of the data plate.
        alone: Arguments with a placeholder for one record.
        inside: Names of the sites in the data plate.
        outside: Names of the other latent sites, and of factors.
        discrete: Names of the discrete latent sites in the data plate.

    Returns:
        For each discrete site the numbers of its values in each combination, shape
        ``(combinations, entries of the site)``.

    Raises:
        UnsupportedModelError: If there are more than 4096 combinations, a site in the plate is
            scaled, or a site outside reads one inside.
    """

    def trace(values: dict[str, Array]) -> dict[str, Any]:
        filled = fill_locals(one_record(model, plate), plate, values)
        run = handlers.substitute(handlers.seed(filled, jax.random.key(0)), substitute_fn=start)
        return alone.call(handlers.trace(run).get_trace)

    sites = trace({})

    def densities(values: dict[str, Array]) -> dict[str, Any]:
        found = trace(values)
        return {name: found[name]["fn"].log_prob(found[name]["value"]) for name in outside}

    latent = {name: sites[name]["value"] for name in inside if is_local(sites[name], plate)}
    floats = {name: value for name, value in latent.items() if name not in discrete}
    for name, depends in depends_on_inputs(densities, floats).items():
        if depends:
            raise UnsupportedModelError(
                f"Site {name!r} outside the data plate {plate!r} reads a latent value of a record "
                f"(one of {sorted(floats)}). Move it into the plate."
            )
    size = sites[plate]["args"][0]
    for name in inside if discrete else ():
        scale = sites[name]["scale"]
        if scale is not None and (isinstance(scale, jax.core.Tracer) or np.any(scale != size)):
            raise UnsupportedModelError(
                f"Site {name!r} is scaled, and the model has discrete latent sites "
                f"{list(discrete)}, which are summed out: the scale of a sum is not that of its "
                "terms. Sum them out in the model, with numpyro.factor inside the data plate."
            )
    return _combinations({name: sites[name]["fn"] for name in discrete})


def _support(fn: Any) -> Array:
    """The values of a discrete distribution of one event, shape ``(number, *event_shape)``."""
    support = fn.enumerate_support(expand=False)
    return support.reshape(support.shape[0], *fn.event_shape)


def _combinations(sites: Mapping[str, Any]) -> dict[str, np.ndarray]:
    sizes = {
        name: [_support(fn).shape[0]] * math.prod(fn.batch_shape) for name, fn in sites.items()
    }
    every = [size for each in sizes.values() for size in each]
    number = math.prod(every)
    if number > _MOST:
        raise UnsupportedModelError(
            f"Discrete sites {sorted(sizes)} have {number} combinations of values for one record; "
            f"at most {_MOST} are summed. Integrate them out by their structure (a forward "
            "recursion, say) with numpyro.factor inside the data plate."
        )
    grid = np.stack([axis.reshape(-1) for axis in np.indices(every)], -1) if every else np.zeros(0)
    found, first = {}, 0
    for name, each in sizes.items():
        found[name] = grid[:, first : first + len(each)]
        first += len(each)
    return found
