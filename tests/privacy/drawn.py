"""Batches that a sampler draws."""

import jax
import numpy as np
from jax import lax

from numpyro_dp.privacy.keys import secret_key


def batches(sampler, num_examples, steps, seed=0):
    """Indices and masks of consecutive steps, from one compiled scan."""

    def step(state, _):
        batch, state = sampler.next(state)
        return state, batch

    state = sampler.init(secret_key(seed), num_examples)
    _, (indices, mask) = jax.jit(lambda s: lax.scan(step, s, None, length=steps))(state)
    return np.asarray(indices), np.asarray(mask)


def membership(indices, mask, num_examples):
    """0/1 matrix (steps, records); fails if a record is twice in a batch."""
    counts = np.zeros((len(indices), num_examples), np.int32)
    rows = np.broadcast_to(np.arange(len(indices))[:, None], indices.shape)
    np.add.at(counts, (rows[mask], indices[mask]), 1)
    assert counts.max() <= 1
    return counts
