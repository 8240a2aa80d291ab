"""Records and guides made to break the sum by rounding: the sensitivity must hold all the same."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from compiled import program_of
from gaussian import gaussian
from numpyro.infer.autoguide import AutoDelta, AutoDiagonalNormal, AutoMultivariateNormal

from numpyro_dp import DPSVI, Privacy
from numpyro_dp.estimators import aligned
from numpyro_dp.samplers import FullBatch
from numpyro_dp.sums.bounded import bounded_sum

from .registry import rows_to_run
from .scenarios import row_numbers


def change_by_one(model, guide, args, row, init_params=None):
    """Change of the sum, clipped to 1, when the first record is dropped."""
    svi = DPSVI(model, guide, optax.adam(0.1), estimator=row.build(), clip_norm=1.0,
                privacy=Privacy(noise_multiplier=0.0, public="captured"),
                sampler=FullBatch())  # fmt: skip
    state = svi.init(jax.random.key(0), *args, init_params=init_params)
    params = svi.optim.get_params(state.optim_state)
    estimator = row.build()(svi._session(args, {}).problem)

    @jax.jit
    def total(arrays, mask):
        public = estimator.prepare(jax.random.key(1), params)
        seeds = row_numbers(mask.size)
        return bounded_sum(estimator, gaussian(1.0, 0.0), public, arrays, mask, seeds=seeds)

    every = jnp.ones(args[0].shape[0], bool)
    sums = [total(args, every), total(args, every.at[0].set(False))]
    leaves = zip(*map(jax.tree.leaves, sums), strict=True)
    return np.sqrt(sum(float(jnp.sum((a - b) ** 2)) for a, b in leaves)), sums[1]


@pytest.mark.full
@pytest.mark.parametrize("row", rows_to_run())
def test_contributions_of_one_record_that_cancel(row):
    def model(x, w):
        z = numpyro.sample("z", dist.Normal(0, 1))
        with numpyro.plate("rows", x.shape[0]):
            numpyro.sample("y", dist.Bernoulli(logits=x * z - w * z), obs=jnp.ones(x.shape[0]))

    x, w = jnp.full(1000, -100.0).at[0].set(1e18), jnp.zeros(1000).at[0].set(1e18)
    change, _ = change_by_one(model, AutoDiagonalNormal(model), (x, w), row)
    assert change <= 1  # 999 where the paths are summed apart


@pytest.mark.full
@pytest.mark.parametrize("row", rows_to_run())
def test_a_model_that_computes_in_half_precision(row):
    def model(x):
        z = numpyro.sample("z", dist.Normal(0, 1))
        with numpyro.plate("rows", x.shape[0]):
            logits = x * z.astype(x.dtype)
            numpyro.sample("y", dist.Bernoulli(logits=logits), obs=jnp.ones(x.shape[0]))

    for size in (3001, 3002, 3003):  # a sum in bfloat16 moves in steps of 16 here
        x = jnp.full(size, 2.0, jnp.bfloat16)
        change, rest = change_by_one(model, AutoDiagonalNormal(model), (x,), row)
        assert change <= 1
        assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(rest))
        assert change > 5e-3  # natural gradients are not clipped here


BASIS = np.linalg.qr(np.random.default_rng(0).normal(size=(3, 3)))[0]


def plane(x):
    z = numpyro.sample("z", dist.Normal(0, 1).expand([3]).to_event(1))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Normal(x @ z, 1), obs=jnp.zeros(x.shape[0]))


@pytest.mark.full
@pytest.mark.parametrize("row", rows_to_run())
def test_a_covariance_that_is_nearly_singular(row):
    guide = AutoMultivariateNormal(plane)
    covariance = (BASIS * [1.0, 1e-4, 1e-8]) @ BASIS.T
    start = {
        "auto_loc": jnp.ones(3),
        "auto_scale_tril": jnp.asarray(np.linalg.cholesky(covariance), jnp.float32),
    }
    x = jnp.asarray(np.tile(BASIS[:, 2] * 1e7, (2, 1)))
    change, _ = change_by_one(plane, guide, (x,), row, start)
    assert 1e-3 < change <= 1  # a full covariance times g is hardly known in float32


@pytest.mark.full
@pytest.mark.parametrize("row", rows_to_run(guides_only=True))
def test_a_guide_that_is_nearly_degenerate(row):
    mixing = jnp.asarray(BASIS * [1.0, 1e-2, 1e-4])

    def guide(x):
        loc = numpyro.param("loc", jnp.ones(3))
        base = dist.Normal(loc, 1.0).to_event(1)
        e = numpyro.sample("e", base, infer={"is_auxiliary": True})
        numpyro.sample("z", dist.Delta(mixing @ e, event_dim=1))

    x = jnp.asarray(np.tile(BASIS[:, 2] * 1e7, (2, 1)))
    change, _ = change_by_one(plane, guide, (x,), row)
    assert 0.9 < change <= 1  # 1.0145 from g^T (J J^T) g


@pytest.mark.full
@pytest.mark.parametrize("row", rows_to_run())
def test_records_whose_squares_vanish(row):
    def model(x, y):
        w = numpyro.sample("w", dist.Normal(0, 1).expand([4]).to_event(1))
        with numpyro.plate("rows", x.shape[0]):
            numpyro.sample("y", dist.Normal(x @ w, 1e-10), obs=y)

    x, y = jnp.full((2, 4), 1e-22), jnp.full(2, 1e10)  # gradients of 1e8
    change, _ = change_by_one(model, AutoDiagonalNormal(model), (x, y), row)
    assert change <= 1


@pytest.mark.full
@pytest.mark.parametrize("row", rows_to_run())
def test_several_observations_of_one_record_that_cancel(row):
    def model(x, y):
        w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
        b = numpyro.sample("b", dist.Normal(0, 1))
        with numpyro.plate("rows", x.shape[0]):
            numpyro.sample("y", dist.Normal(b + x @ w, 1).to_event(1), obs=y)

    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(1000, 8, 2)), jnp.float32)
    y = jnp.asarray(rng.normal(size=(1000, 8)), jnp.float32).at[0, 2].set(1e15).at[0, 5].set(-1e15)
    change, _ = change_by_one(model, AutoDiagonalNormal(model), (x, y), row)
    assert change <= 1


@pytest.mark.full
@pytest.mark.parametrize("row", rows_to_run(simulated=False))
def test_a_likelihood_that_recomputes_its_backward_pass(row):
    length = jax.checkpoint(lambda w, r: jnp.sqrt(jnp.sum(r**2 * w**2)))

    def model(x):
        w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
        with numpyro.plate("rows", x.shape[0]):
            numpyro.factor("y", -jax.vmap(length, (None, 0))(w, x))

    x = jnp.ones((5, 2)).at[0].set(jnp.nan)
    change, rest = change_by_one(model, AutoDiagonalNormal(model), (x,), row)
    assert change == 0
    assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(rest))


def linear(x):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([x.shape[1]]).to_event(1))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.factor("y", x @ w)


@pytest.mark.full
@pytest.mark.parametrize("row", rows_to_run(simulated=False))
@pytest.mark.parametrize(
    "size", [pytest.param(464, marks=pytest.mark.extended), 30_000], ids=["small", "large"]
)
def test_partial_sums_about_a_power_of_two(row, size):
    """Half of the records climb just above 2^k; what the others add depends on whether they did."""
    top = int(np.floor(np.log2(0.55 * size)))
    x = np.zeros((size, 8), np.float32)
    x[: 2**top + 2, 0] = 1e6
    x[2**top + 2 :, 0] = -0.4 * 2.0 ** (top - 23)
    change, _ = change_by_one(linear, AutoDiagonalNormal(linear), (jnp.asarray(x),), row)
    assert 0.9 < change <= 1  # 14 for 30,000 records where floats are added up


@pytest.mark.full
@pytest.mark.parametrize("row", rows_to_run(simulated=False))
def test_many_signals_along_a_narrow_direction(row):
    """What maps the gradient to the signal must not act on a sum that is much larger than it."""
    basis = np.linalg.qr(np.random.default_rng(0).normal(size=(8, 8)))[0]
    covariance = (basis * ([1.0] + [1e-5] * 7)) @ basis.T
    start = {
        "auto_loc": jnp.zeros(8),
        "auto_scale_tril": jnp.asarray(np.linalg.cholesky(covariance), jnp.float32),
    }
    x = jnp.asarray(np.tile(basis[:, 1] * 1e6, (3000, 1)), jnp.float32)
    change, _ = change_by_one(linear, AutoMultivariateNormal(linear), (x,), row, start)
    assert 0.9 < change <= 1  # 9.1 from the covariance times the sum


@pytest.mark.full
@pytest.mark.parametrize("row", rows_to_run(simulated=False))
def test_parameters_and_latents_of_half_precision(row):
    def parameter(x):
        w = numpyro.param("own", jnp.zeros(2, jnp.bfloat16))
        b = numpyro.sample("b", dist.Normal(0, 1))
        with numpyro.plate("rows", x.shape[0]):
            numpyro.factor("y", 1e3 * (x @ w.astype(jnp.float32) + b))

    x = jnp.ones((3001, 2)) * jnp.asarray([1.0, 0.3])
    change, _ = change_by_one(parameter, AutoDiagonalNormal(parameter), (x,), row)
    assert 0.9 < change <= 1  # 4 where the sum is in the dtype of the parameter

    def latent(x):
        half = jnp.ones(2, jnp.bfloat16)
        w = numpyro.sample("w", dist.Normal(0 * half, half).to_event(1))
        with numpyro.plate("rows", x.shape[0]):
            numpyro.factor("y", 1e3 * (x * w).sum(-1))

    def guide(x):
        loc = numpyro.param("loc", jnp.zeros(2, jnp.bfloat16))
        numpyro.sample("w", dist.Normal(loc, jnp.full(2, 0.1, jnp.bfloat16)).to_event(1))

    if row.guides is None:
        change, _ = change_by_one(latent, guide, (x,), row)
        assert 0.9 < change <= 1


@pytest.mark.full
@pytest.mark.parametrize("prior", [
    pytest.param(dist.Dirichlet(jnp.ones(4)), id="simplex"),
    pytest.param(dist.LKJCholesky(4), id="cholesky", marks=pytest.mark.extended),
])  # fmt: skip
@pytest.mark.parametrize("row", rows_to_run(guides_only=True, simulated=False))
def test_a_point_at_the_edge_of_its_support(row, prior):
    """The guide's transform and its inverse are no identity there, in floating point."""

    def model(x):
        w = numpyro.sample("w", prior)
        with numpyro.plate("rows", x.shape[0]):
            numpyro.factor("y", (x * w.reshape(-1)).sum(-1))

    rng = np.random.default_rng(0)
    size = int(np.prod(prior.shape()))
    x = jnp.asarray(100 * rng.normal(size=(5, size)), jnp.float32)
    transform = dist.biject_to(prior.support)
    free = transform.inv(prior.sample(jax.random.key(0))).shape
    edge = transform(3 * jnp.asarray(rng.normal(size=free), jnp.float32))
    change, _ = change_by_one(model, AutoDelta(model), (x,), row, {"w_auto_loc": edge})
    assert 0.5 < change <= 1


@pytest.mark.full
@pytest.mark.parametrize("form", ["update", "updates", "loop", "sweep"])
def test_what_is_added_up_is_what_was_measured_and_not_computed_again(form):
    def model(x, y, u):
        z = numpyro.sample("z", dist.Normal(0, 1))
        with numpyro.plate("rows", x.shape[0]):
            numpyro.factor("near", -jnp.square(y * u - x * z) / 2)

    args = tuple(jnp.ones((3, 37)))
    svi = DPSVI(model, AutoDiagonalNormal(model), optax.adam(0.1), estimator=aligned(),
                clip_norm=1.0,
                privacy=Privacy(noise_multiplier=1.0), sampler=FullBatch())  # fmt: skip
    text = program_of(svi, args, form)
    assert len(re.findall(r"f32\[(?:2,)?37,1\]\S* subtract\(", text)) == 1  # y u - x z


@pytest.mark.full
def test_a_state_that_a_compiled_function_holds_is_refused():
    def model(x):
        z = numpyro.sample("z", dist.Normal(0, 1).expand([x.shape[1]]).to_event(1))
        with numpyro.plate("rows", x.shape[0]):
            numpyro.sample("y", dist.Normal(x @ z, 1), obs=jnp.zeros(x.shape[0]))

    x = jnp.ones((5, 3))
    svi = DPSVI(model, AutoDiagonalNormal(model), optax.adam(0.1), estimator=aligned(),
                clip_norm=1.0,
                privacy=Privacy(noise_multiplier=1.0), sampler=FullBatch())  # fmt: skip
    state = svi.init(jax.random.key(0), x)
    with pytest.raises(ValueError, match="to be an argument"):
        jax.jit(lambda x: svi.update(state, x))(x)
    with pytest.raises(ValueError, match="shapes"):
        svi.update(state, jnp.ones((5, 2)))
