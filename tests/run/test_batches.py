"""A step adds up the rows that its sampler drew, each once, and divides by a public constant."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flat import dpsvi
from models import mean_of
from numpyro.infer.autoguide import AutoDelta

from numpyro_dp import secret_key
from numpyro_dp.run.step import _numbers
from numpyro_dp.samplers import FixedSize, Permutation, Poisson

N, CLIP, START = 30, 0.5, 0.3
X = np.random.default_rng(0).normal(size=N).astype(np.float32)

model = mean_of(plate="rows")


@pytest.mark.table
@pytest.mark.parametrize("sampler", [Poisson(0.3), FixedSize(5), Permutation(8)])
def test_the_sum_of_a_step_is_that_of_the_rows_drawn(sampler):
    svi = dpsvi(model, AutoDelta, optax.sgd(1.0), clip_norm=CLIP, sampler=sampler,
                noise_multiplier=0.0)  # fmt: skip
    state = svi.init(jax.random.key(0), X, init_params={"mean_auto_loc": START}).opened
    session = svi._session((X,), {})
    rows, step = session.rows((X,), {}), jax.jit(session._step)
    sizes = set()
    for seed in range(8):
        state = state._replace(sampler_state=sampler.init(secret_key(seed), N))
        batch, _ = sampler.next(state.sampler_state)
        drawn = np.asarray(batch.indices)[np.asarray(batch.mask)]
        assert len(set(drawn)) == len(drawn)
        sizes.add(len(drawn))
        total = np.sum(np.clip(X[drawn] - START, -CLIP, CLIP))
        released = float(step(state, rows)[1].released.total["mean"])
        assert released == pytest.approx(total / sampler.inclusion_prob(N), rel=1e-3, abs=1e-4)
    # Some places of a batch hold no record, unless its size is fixed.
    assert len(batch.mask) > min(sizes) or isinstance(sampler, FixedSize)


def test_seeds_of_records_are_not_those_of_noise():
    secret = secret_key(3)
    others = [secret, *jax.random.split(secret), *jax.random.split(secret, 3)[:2]]
    seeds = np.asarray(_numbers(secret, 8))
    for key in others:
        assert not np.isin(seeds, np.asarray(jax.random.bits(key, (8,), jnp.uint32))).any()
