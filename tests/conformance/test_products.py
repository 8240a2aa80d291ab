"""Weights of layers are summed as products of matrices: the sum, its bound, its memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from flat import dpsvi
from gaussian import gaussian
from jax import lax
from numpyro.infer.autoguide import AutoDelta, AutoDiagonalNormal

from numpyro_dp.core import Estimator, FactoredSignal
from numpyro_dp.estimators import aligned, vanilla
from numpyro_dp.sums.bounded import bounded_sum
from numpyro_dp.sums.contraction import split_scalar
from numpyro_dp.sums.microbatches import Compensated, Shards, over_microbatches
from numpyro_dp.sums.products import longest_product, product_error, product_sum

from .references import bounded_sum_by_definition
from .registry import x64

KEY = jax.random.key(0)


def layer(name, *shape):
    return numpyro.sample(name, dist.Normal(0, 1).expand(shape).to_event(len(shape)))


def dense(x, y):
    first, bias, second = layer("first", 24, 16), layer("bias", 16), layer("second", 16, 12)
    last = layer("last", 12)
    with numpyro.plate("records", len(x)):
        hidden = jnp.tanh(jnp.tanh(x @ first + bias) @ second)
        numpyro.sample("y", dist.Normal(hidden @ last, 1), obs=y)


def convolutional(x, y):
    kernel, second = layer("kernel", 3, 2, 1, 4), layer("second", 5, 4, 3, 2)
    last = layer("last", 60)
    with numpyro.plate("records", len(x)):
        seen = lax.conv_general_dilated(
            x.reshape(-1, 6, 4, 1), kernel, (2, 1), [(1, 1), (0, 2)], rhs_dilation=(1, 2),
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )  # fmt: skip
        seen = jnp.tanh(seen).transpose(0, 3, 1, 2)
        seen = lax.conv_general_dilated(
            seen, second, (1, 1), "SAME", dimension_numbers=("NCHW", "OIHW", "NCHW")
        )
        numpyro.sample("y", dist.Normal(jnp.tanh(seen).reshape(-1, 60) @ last, 1), obs=y)


def wide(x, y):
    first, last = layer("first", 24, 2_000), layer("last", 2_000)
    with numpyro.plate("records", len(x)):
        numpyro.sample("y", dist.Normal(jnp.tanh(x @ first) @ last, 1), obs=y)


def wide_params(x, y):
    first = numpyro.param("first", lambda key: jax.random.normal(key, (24, 2_000)) / 5)
    last = numpyro.param("last", lambda key: jax.random.normal(key, (2_000,)) / 50)
    with numpyro.plate("records", len(x)):
        numpyro.sample("y", dist.Normal(jnp.tanh(x @ first) @ last, 1), obs=y)


def data(number):
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(number, 24)), rng.normal(size=number)
    return jnp.asarray(x.astype(np.float32)), jnp.asarray(y.astype(np.float32))


def total_of(model, number, norm, size=None, guide=AutoDelta, build=aligned, sum_of=bounded_sum):
    """The compiled sum of records and a mask, at a draw from the prior."""
    svi = dpsvi(model, guide, optax.sgd(0.1), secret_key=1, repetition=True)
    state = svi.init(KEY, *data(number))
    estimator = build()(svi._session(data(number), {}).problem)
    public = estimator.prepare(KEY, svi.optim.get_params(state.optim_state))
    return jax.jit(functools.partial(sum_of, estimator, gaussian(norm, 1.0), public, rows=size))


SUMS = bounded_sum, bounded_sum_by_definition


@pytest.mark.full
@pytest.mark.parametrize("model", [dense, convolutional])
@pytest.mark.parametrize("size", [None, 7])
@pytest.mark.parametrize(("number", "norm", "bad"), [(30, np.inf, False), (400, 1e-3, True)])
def test_the_sum_is_the_definition(model, number, norm, bad, size):
    x, y = data(number)
    x = x.at[3].set(jnp.nan).at[5].set(jnp.inf) if bad else x
    mask = jnp.arange(number) % 7 != 3
    found, expected = (
        total_of(model, number, norm, size, sum_of=each)((x, y), mask) for each in SUMS
    )
    assert set(found) == set(expected)
    # Where all are clipped, they are shorter by the margin for rounding.
    shorter = model is dense and norm < np.inf
    ratio = 1 - product_error(number, jnp.float32) if shorter else 1.0
    for name in expected:
        scale = np.abs(expected[name]).max()
        np.testing.assert_allclose(found[name] / scale, ratio * expected[name] / scale, atol=2e-5)


def multiply(s, f):
    return jnp.einsum("ni,nj->ij", f, s, precision=lax.Precision.HIGHEST)


def test_layers_are_recognised():
    def two_layers(weights, x):
        return jnp.sum(jnp.tanh(x @ weights["a"]) @ weights["b"])

    weights = {"a": jnp.ones((3, 4)), "b": jnp.ones((4, 2))}
    assert [c.leaf for c in split_scalar(two_layers, weights, jnp.ones(3)).contractions] == [0]
    split = split_scalar(two_layers, weights, jnp.ones(3), layers=True)
    assert [(c.leaf, c.derived, c.outer) for c in split.contractions] == [
        (0, False, True), (1, True, True),
    ]  # fmt: skip

    # The factors of one product: one of them is a parameter like others.
    def own_product(w, x):
        return jnp.sum(jnp.exp(x) * (w["a"][:, 0] @ w["a"][:, 1]))

    def product(w, x):
        return x[0] * (w["c"] @ w["d"])

    assert split_scalar(own_product, weights, jnp.ones(3), layers=True).contractions == ()
    vectors = {"c": jnp.ones(2), "d": jnp.ones(2)}
    split = split_scalar(product, vectors, jnp.ones(3), layers=True)
    assert [c.leaf for c in split.contractions] == [0] and split.rest == (1,)


@pytest.mark.parametrize("number", [1, 63, 64, 200, 1_000, 5_000])
def test_rounding_is_within_its_bound(number):
    rng = np.random.default_rng(number)
    sizes = 10.0 ** rng.integers(-3, 4, (number, 1))
    slopes = (rng.normal(size=(number, 3)) * sizes).astype(np.float32)
    factors = rng.normal(size=(number, 5)).astype(np.float32)
    norms = np.linalg.norm(slopes, axis=1) * np.linalg.norm(factors, axis=1)
    weights = (1 / norms).astype(np.float32)
    weights[::11] = 0
    slopes[::11] = np.nan

    longest = longest_product(number, jnp.float32)
    found = jax.jit(lambda *a: sum(product_sum(multiply, *a, longest)))(slopes, factors, weights)
    terms = np.where(weights[:, None] > 0, slopes, 0).astype(np.float64) * weights[:, None]
    expected = factors.astype(np.float64).T @ terms
    assert np.linalg.norm(found - expected) <= product_error(number, jnp.float32) / 2
    assert product_error(number, jnp.float32) < 0.011


@pytest.mark.parametrize("rows", [1, 7, 5_000])
def test_what_rounding_loses_is_carried_along(rows):
    """Terms of one sign, which would be off by n times as much if they were just added up."""
    rng, number = np.random.default_rng(1), 5_000
    slopes, factors = rng.uniform(0.5, 1, (2, number, 4)).astype(np.float32)
    weights = 1 / (np.linalg.norm(slopes, axis=1) * np.linalg.norm(factors, axis=1))

    def of_rows(data, mask):
        s, f, w = data
        longest = longest_product(number, jnp.float32)
        return product_sum(multiply, s, f, jnp.where(mask, w, 0), longest), ()

    data = slopes, factors, weights.astype(np.float32)
    mask = jnp.ones(number, bool)
    found = jax.jit(lambda data: sum(over_microbatches(of_rows, data, mask, rows)[0]))(data)
    expected = factors.astype(np.float64).T @ (slopes * data[2][:, None].astype(np.float64))
    assert np.linalg.norm(found - expected) < 2 * number * 2.0**-24


@pytest.mark.full
@pytest.mark.parametrize("devices", [2, 7, 64])
def test_devices_add_up_without_an_order(devices):
    rng = np.random.default_rng(devices)
    shape = devices, 1_000
    total = (rng.normal(size=shape) * 10.0 ** rng.uniform(-30, 3, shape)).astype(np.float32)
    lost = (total * rng.uniform(-1e-4, 1e-4, shape)).astype(np.float32)
    total[:, :3] = [[1024.0001, 1023.9999, -0.0]]

    def added(total, lost):
        each = Shards(devices, ("devices",)).add
        found = jax.vmap(lambda *both: each(Compensated(*both)), axis_name="devices")(total, lost)
        for every in found:  # alike on all devices
            np.testing.assert_array_equal(every, np.broadcast_to(every[0], every.shape))
        return found.total[0], found.lost[0]

    found = added(total, lost)
    order = rng.permutation(devices)
    for one, other in zip(found, added(total[order], lost[order]), strict=True):
        np.testing.assert_array_equal(one, other)
    alike = rng.uniform(0.95, 1, shape).astype(np.float32)  # none is rounded by another's size
    ulps = (rng.uniform(-1, 1, shape) * 2.0**-25).astype(np.float32)
    for given, part in (((total, lost), 2.0**-50), ((alike, ulps), 2.0**-48)):
        expected = sum(np.float64(each) for each in given).sum(0)
        precise = sum(np.asarray(each, np.float64) for each in added(*given))
        largest = np.abs(given[0]).max()
        assert np.abs(precise - expected).max() < devices**2 * largest * part
    for bad in (np.inf, np.nan):
        total[devices // 2, 5] = bad
        assert np.isnan(added(total, lost)[0]).all()
    assert (added(0 * lost, 0 * lost)[0] == 0).all()


def norm_of(tree):
    return np.sqrt(sum(np.square(np.asarray(leaf, np.float64)).sum() for leaf in tree.values()))


@pytest.mark.full
@pytest.mark.parametrize("size", [None, 64])
@pytest.mark.parametrize("model", [dense, convolutional])
def test_a_record_moves_the_sum_by_the_clip_norm_at_most(model, size):
    x, y = data(300)
    total, sizes = total_of(model, 300, 1.0, size), []
    for row, value in enumerate([1.0, 100.0, 1e18, 1e30, -1e38, 1e-30, 0.0, np.nan, np.inf]):
        for target in (0.0, 1.0, 1e30, np.nan):
            rows = (100 * x).at[row].multiply(value / 100), y.at[row].set(target)
            with_it = total(rows, jnp.ones(300, bool))
            without = total(rows, jnp.arange(300) != row)
            sizes.append(norm_of({n: np.float64(with_it[n]) - without[n] for n in with_it}))
    assert max(sizes) <= 1 and np.isfinite(sizes).all()
    assert max(sizes) > 0.98


@pytest.mark.full
@pytest.mark.parametrize(("number", "double"), [
    (1_000, False), (20_000, False), pytest.param(20_000, True, marks=pytest.mark.extended),
])  # fmt: skip
@pytest.mark.every_case
def test_the_room_for_rounding_is_left(number, double):
    """One clipped record alone: what it adds is shorter than the clip norm by the bound.

    A batch for which the room would be large is summed record by record.
    """
    with x64(double):
        rows = data(number)
        assert rows[0].dtype == jnp.float32
        size = 1e3 * norm_of(total_of(dense, number, 1e-3)(rows, jnp.arange(number) == 7))
    if number > 1_000:
        assert 0.985 < size < 1
    else:
        error = product_error(number, jnp.float32)
        assert 0.005 < error < 0.01
        assert 1 - 1.2 * error < size < 1 - 0.9 * error


@pytest.mark.full
@pytest.mark.every_case
@pytest.mark.parametrize("leaf", [jnp.float32, jnp.float64])
def test_single_precision_leaves_in_double_precision_mode(leaf):
    def scalar(_, point, row):
        return jnp.sum(jnp.tanh(row[0] @ point["w"].astype(jnp.float32)))

    factored = FactoredSignal(
        lambda public: public, scalar, lambda _, gradient, names: {n: gradient[n] for n in names},
        lambda _, tree, names: tree, selects=True,
    )  # fmt: skip
    signal = functools.partial(jax.grad(scalar, 1), None)
    estimator = Estimator(None, signal, None, factored)
    with x64():
        weights, every = {"w": jnp.ones((24, 16), leaf) / 7}, jnp.ones(200, bool)
        rows = (data(200)[0],)
        sum_of = functools.partial(bounded_sum, estimator, gaussian(1e-3, 1.0), weights, rows)
        total = jax.jit(lambda mask: sum_of(mask)["w"])
        whole = np.float64(total(every))
        without = [total(every.at[row].set(False)) for row in range(0, 200, 20)]
        assert 0.98 < 1e3 * max(np.linalg.norm(whole - each) for each in without) <= 1


GRADIENTS = 256 * 50_000 * 4  # bytes


def planned(total):
    plan = total.lower(data(256), jnp.ones(256, bool)).compile().memory_analysis()
    return plan.temp_size_in_bytes


@pytest.mark.extended
def test_memory_does_not_hold_a_gradient_for_each_record():
    whole, parts, uneven = (planned(total_of(wide, 256, 1.0, size)) for size in (None, 32, 33))
    assert whole < 0.3 * GRADIENTS
    assert parts < 0.7 * whole
    assert uneven < 0.75 * whole  # 256 is no multiple
    one_by_one, two = (
        planned(total_of(wide, 256, 1.0, size, sum_of=bounded_sum_by_definition))
        for size in (None, 2)
    )
    assert one_by_one < 0.3 * GRADIENTS  # by microbatches
    assert two < 0.3 * one_by_one


@pytest.mark.full
@pytest.mark.every_case
@pytest.mark.parametrize(
    ("model", "guide"), [(wide_params, lambda *_: None), (wide, AutoDiagonalNormal)]
)
def test_vanilla_gradients_of_a_network_need_no_more_memory(model, guide):
    own = {"guide": guide, "build": vanilla}
    found, expected = (total_of(model, 256, 1.0, sum_of=each, **own) for each in SUMS)
    assert planned(found) < 0.3 * GRADIENTS
    found, expected = (each(data(256), jnp.ones(256, bool)) for each in (found, expected))
    for name in expected:
        scale = np.abs(expected[name]).max()
        np.testing.assert_allclose(found[name] / scale, expected[name] / scale, atol=0.01)
