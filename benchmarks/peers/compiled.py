"""What the peers on JAX share."""

import jax
import jax.numpy as jnp
from worker import logistic_records

__all__ = ["arrays", "one_step"]


def arrays(number, dim):
    """The records of a case."""
    return tuple(jnp.asarray(array) for array in logistic_records(number, dim))


def one_step(update, state, data):
    """The task of one compiled update: what XLA plans for temporaries, and its repetition.

    The update returns the next state, which the next step takes, and what else it finds.
    """
    compiled = jax.jit(update).lower(state, *data).compile()

    def repeat(count):
        now = state
        for _ in range(count):
            now, *others = compiled(now, *data)
        jax.block_until_ready((now, others))

    return {"MB": compiled.memory_analysis().temp_size_in_bytes / 1e6}, repeat
