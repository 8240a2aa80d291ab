"""Whether a model asks for random keys inside its likelihood, for example for dropout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from numpyro import handlers
from numpyro.infer import init_to_uniform

from numpyro_dp._compat import Messenger
from numpyro_dp.model.records import Arguments

__all__ = ["draws_keys"]


def draws_keys(model: Callable[..., Any], arguments: Arguments) -> bool:
    """Returns whether a model calls ``numpyro.prng_key`` once its parameters have values.

    Keys that initialise parameters, as in ``flax_module``, do not count.

    Args:
        model: The model, static keywords filled in.
        arguments: Invented arguments. Only their shapes matter.
    """
    leaves, treedef = jax.tree.flatten((arguments.args, arguments.kwargs))
    slots = [place for place, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)]
    counter = _Counter()

    def run(arrays: list[Any]) -> None:
        filled = list(leaves)
        for slot, array in zip(slots, arrays, strict=True):
            filled[slot] = array
        args, kwargs = jax.tree.unflatten(treedef, filled)
        seeded = handlers.substitute(
            handlers.seed(model, jax.random.key(0)), substitute_fn=init_to_uniform()
        )
        trace = handlers.trace(seeded).get_trace(*args, **kwargs)
        params = {name: site["value"] for name, site in trace.items() if site["type"] == "param"}
        # With values for all parameters, no key of an initialiser is counted.
        with counter:
            handlers.substitute(seeded, data=params)(*args, **kwargs)

    jax.eval_shape(run, [leaves[slot] for slot in slots])
    return counter.number > 0


class _Counter(Messenger):
    """Counts calls of ``numpyro.prng_key``."""

    def __init__(self) -> None:
        self.number = 0
        super().__init__()

    def process_message(self, msg: dict[str, Any]) -> None:
        self.number += msg["type"] == "prng_key"
