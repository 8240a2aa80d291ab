"""Records and guides made to break the sum by rounding: the sensitivity must hold all the same."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.infer.autoguide import AutoDiagonalNormal

from numpyro_dp import DPSVI, FullBatch
from numpyro_dp.aggregate import bounded_sum
from numpyro_dp.privacy.mechanism import gaussian

from .registry import ESTIMATORS


def change_by_one(model, guide, args, row):
    """Change of the sum, clipped to 1, when the first record is dropped."""
    svi = DPSVI(model, guide, optax.adam(0.1), estimator=row.build(), clip_norm=1.0,
                noise_multiplier=0.0, sampler=FullBatch())  # fmt: skip
    params = svi.optim.get_params(svi.init(jax.random.key(0), *args).optim_state)
    estimator = row.build()(svi._session(args, {}).problem)

    @jax.jit
    def total(arrays, mask):
        public = estimator.prepare(jax.random.key(1), params)
        return bounded_sum(estimator, gaussian(1.0, 0.0), public, arrays, mask)

    every = jnp.ones(args[0].shape[0], bool)
    sums = [total(args, every), total(args, every.at[0].set(False))]
    leaves = zip(*map(jax.tree.leaves, sums), strict=True)
    return np.sqrt(sum(float(jnp.sum((a - b) ** 2)) for a, b in leaves)), sums[1]


@pytest.mark.parametrize("row", ESTIMATORS, ids=lambda row: row.name)
def test_contributions_of_one_record_that_cancel(row):
    def model(x, w):
        z = numpyro.sample("z", dist.Normal(0, 1))
        with numpyro.plate("rows", x.shape[0]):
            numpyro.sample("y", dist.Bernoulli(logits=x * z - w * z), obs=jnp.ones(x.shape[0]))

    x, w = jnp.full(1000, -100.0).at[0].set(1e18), jnp.zeros(1000).at[0].set(1e18)
    change, _ = change_by_one(model, AutoDiagonalNormal(model), (x, w), row)
    assert change <= 1 + 1e-5  # 999 where the paths are summed apart


@pytest.mark.parametrize("row", ESTIMATORS, ids=lambda row: row.name)
def test_a_model_that_computes_in_half_precision(row):
    def model(x):
        z = numpyro.sample("z", dist.Normal(0, 1))
        with numpyro.plate("rows", x.shape[0]):
            logits = x * z.astype(x.dtype)
            numpyro.sample("y", dist.Bernoulli(logits=logits), obs=jnp.ones(x.shape[0]))

    for size in (3001, 3002, 3003):  # a sum in bfloat16 moves in steps of 16 here
        x = jnp.full(size, 2.0, jnp.bfloat16)
        change, rest = change_by_one(model, AutoDiagonalNormal(model), (x,), row)
        assert change <= 1 + 1e-3  # sums of 3000 terms, in float32
        assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(rest))
        assert change > 0.1


@pytest.mark.parametrize("row", ESTIMATORS, ids=lambda row: row.name)
def test_a_guide_that_is_nearly_degenerate(row):
    basis = np.linalg.qr(np.random.default_rng(0).normal(size=(3, 3)))[0]
    mixing = jnp.asarray(basis * [1.0, 1e-2, 1e-4])

    def model(x):
        z = numpyro.sample("z", dist.Normal(0, 1).expand([3]).to_event(1))
        with numpyro.plate("rows", x.shape[0]):
            numpyro.sample("y", dist.Normal(x @ z, 1), obs=jnp.zeros(x.shape[0]))

    def guide(x):
        loc = numpyro.param("loc", jnp.ones(3))
        base = dist.Normal(loc, 1.0).to_event(1)
        e = numpyro.sample("e", base, infer={"is_auxiliary": True})
        numpyro.sample("z", dist.Delta(mixing @ e, event_dim=1))

    x = jnp.asarray(np.tile(basis[:, 2] * 1e7, (2, 1)))
    change, _ = change_by_one(model, guide, (x,), row)
    assert 0.9 < change <= 1 + 1e-5  # 1.0145 from g^T (J J^T) g
