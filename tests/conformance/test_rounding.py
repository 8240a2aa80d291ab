"""Records and guides made to break the sum by rounding: the sensitivity must hold all the same."""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from compiled import program_of
from flat import dpsvi
from gaussian import gaussian
from models import given, scored, slopes
from numpyro.infer.autoguide import AutoDelta, AutoDiagonalNormal, AutoMultivariateNormal

from numpyro_dp.sums.bounded import bounded_sum

from .registry import rows_to_run
from .scenarios import row_numbers


class Case(NamedTuple):
    """A model with records that break a naive sum, and between what the change must be."""

    model: Callable[..., Any]
    args: tuple[Any, ...]
    guide: Any = AutoDiagonalNormal
    start: dict[str, Any] | None = None
    least: float = 0.0
    most: float = 1.0


ALONE = {"simulated": False}  # a model that cannot simulate outcomes
BASIS = np.linalg.qr(np.random.default_rng(0).normal(size=(3, 3)))[0]
NARROW = np.linalg.qr(np.random.default_rng(0).normal(size=(8, 8)))[0]


def ones(x):
    return jnp.ones(len(x))


def slope(x, w):
    z = numpyro.sample("z", dist.Normal(0, 1))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=x * z - w * z), obs=ones(x))


def half(x):
    z = numpyro.sample("z", dist.Normal(0, 1))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=x * z.astype(x.dtype)), obs=ones(x))


def plane(x):
    z = numpyro.sample("z", dist.Normal(0, 1).expand([3]).to_event(1))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Normal(x @ z, 1), obs=0 * ones(x))


def degenerate(x):
    loc = numpyro.param("loc", jnp.ones(3))
    e = numpyro.sample("e", dist.Normal(loc, 1.0).to_event(1), infer={"is_auxiliary": True})
    mixing = jnp.asarray(BASIS * [1.0, 1e-2, 1e-4])
    numpyro.sample("z", dist.Delta(mixing @ e, event_dim=1))


def several(x, y):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
    b = numpyro.sample("b", dist.Normal(0, 1))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Normal(b + x @ w, 1).to_event(1), obs=y)


@jax.checkpoint
def length(w, r):
    return jnp.sqrt(jnp.sum(r**2 * w**2))


def parameter(x):
    w = numpyro.param("own", jnp.zeros(2, jnp.bfloat16))
    b = numpyro.sample("b", dist.Normal(0, 1))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.factor("y", 1e3 * (x @ w.astype(jnp.float32) + b))


def latent(x):
    one = jnp.ones(2, jnp.bfloat16)
    w = numpyro.sample("w", dist.Normal(0 * one, one).to_event(1))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.factor("y", 1e3 * (x * w).sum(-1))


def half_guide(x):
    loc = numpyro.param("loc", jnp.zeros(2, jnp.bfloat16))
    numpyro.sample("w", dist.Normal(loc, jnp.full(2, 0.1, jnp.bfloat16)).to_event(1))


def cancelling():
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(1000, 8, 2)), jnp.float32)
    y = jnp.asarray(rng.normal(size=(1000, 8)), jnp.float32)
    return several, (x, y.at[0, 2].set(1e15).at[0, 5].set(-1e15))


def ladder(size):
    """Half of the records climb just above 2^k; what the others add depends on whether they did."""
    top = int(np.floor(np.log2(0.55 * size)))
    x = np.zeros((size, 8), np.float32)
    x[: 2**top + 2, 0] = 1e6
    x[2**top + 2 :, 0] = -0.4 * 2.0 ** (top - 23)
    return linear, (jnp.asarray(x),)


def start_of(loc, basis, scales):
    tril = np.linalg.cholesky((basis * scales) @ basis.T)
    return {"auto_loc": loc, "auto_scale_tril": jnp.asarray(tril, jnp.float32)}


def at_edge(prior):
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
    return Case(model, (x,), AutoDelta, {"w_auto_loc": edge}, 0.5)


GUIDES = {"guides_only": True}
linear = scored(lambda x, w: x @ w, "rows", w=slopes())
far = jnp.asarray(np.tile(BASIS[:, 2] * 1e7, (2, 1)))
CASES = {
    # 999 where the paths are summed apart.
    "contributions that cancel": lambda: Case(
        slope, (jnp.full(1000, -100.0).at[0].set(1e18), jnp.zeros(1000).at[0].set(1e18))
    ),
    # A sum in bfloat16 moves in steps of 16 here. Natural gradients are not clipped.
    **{
        f"a model in half precision, {size} records": lambda size=size: Case(
            half, (jnp.full(size, 2.0, jnp.bfloat16),), least=5e-3
        )
        for size in (3001, 3002, 3003)
    },
    # A full covariance times g is hardly known in float32.
    "a covariance that is nearly singular": lambda: Case(
        plane, (far,), AutoMultivariateNormal, start_of(jnp.ones(3), BASIS, [1.0, 1e-4, 1e-8]), 1e-3
    ),
    # 1.0145 from g^T (J J^T) g.
    "a guide that is nearly degenerate": lambda: Case(
        plane, (far,), lambda _: degenerate, least=0.9
    ),
    # Gradients of 1e8.
    "squares that vanish": lambda: Case(
        given(lambda x, w: dist.Normal(x @ w, 1e-10), "rows", w=slopes()),
        (jnp.full((2, 4), 1e-22), jnp.full(2, 1e10)),
    ),
    "several observations of one record that cancel": lambda: Case(*cancelling()),
    "a likelihood that recomputes its backward pass": lambda: Case(
        scored(lambda x, w: -jax.vmap(length, (None, 0))(w, x), "rows", w=slopes()),
        (jnp.ones((5, 2)).at[0].set(jnp.nan),), most=0.0,
    ),
    "partial sums about a small power of two": lambda: Case(*ladder(464), least=0.9),
    # 14 where floats are added up.
    "partial sums about a power of two": lambda: Case(*ladder(30_000), least=0.9),
    # 9.1 from the covariance times the sum, which is much larger than the signal.
    "many signals along a narrow direction": lambda: Case(
        linear, (jnp.asarray(np.tile(NARROW[:, 1] * 1e6, (3000, 1)), jnp.float32),),
        AutoMultivariateNormal, start_of(jnp.zeros(8), NARROW, [1.0] + [1e-5] * 7), 0.9,
    ),
    # 4 where the sum is in the dtype of the parameter.
    "a parameter of half precision": lambda: Case(
        parameter, (jnp.ones((3001, 2)) * jnp.asarray([1.0, 0.3]),), least=0.9
    ),
    "a latent of half precision": lambda: Case(
        latent, (jnp.ones((3001, 2)) * jnp.asarray([1.0, 0.3]),), lambda _: half_guide, least=0.9,
    ),
    "the edge of the simplex": lambda: at_edge(dist.Dirichlet(jnp.ones(4))),
    "the edge of Cholesky factors": lambda: at_edge(dist.LKJCholesky(4)),
}  # fmt: skip
# Which rows of the registry take a case. Stated here, because building a case takes long.
_MADE = "the edge of the simplex", "the edge of Cholesky factors", "a latent of half precision"
ROWS = {
    **dict.fromkeys(_MADE, ALONE | GUIDES),
    "a guide that is nearly degenerate": GUIDES,
    "a likelihood that recomputes its backward pass": ALONE,
    "partial sums about a small power of two": ALONE,
    "partial sums about a power of two": ALONE,
    "many signals along a narrow direction": ALONE,
    "a parameter of half precision": ALONE,
}
FURTHER = {"partial sums about a small power of two", "the edge of Cholesky factors"}


def pairs():
    """Every case with the first estimator, and others as the registry marks them."""
    for name in CASES:
        for number, each in enumerate(rows_to_run(**ROWS.get(name, {}))):
            marks = each.marks or (pytest.mark.extended if number else pytest.mark.every_case)
            marks = pytest.mark.extended if name in FURTHER else marks
            yield pytest.param(name, *each.values, id=f"{name}-{each.id}", marks=marks)


@pytest.mark.full
@pytest.mark.parametrize(("name", "row"), list(pairs()))
def test_one_record_changes_the_sum_by_at_most_the_clip_norm(name, row):
    """Clipped to 1, when the first record is dropped."""
    case = CASES[name]()
    svi = dpsvi(case.model, case.guide(case.model), optax.adam(0.1), estimator=row.build(),
                noise_multiplier=0.0, public="captured")  # fmt: skip
    state = svi.init(jax.random.key(0), *case.args, init_params=case.start)
    params = svi.optim.get_params(state.optim_state)
    estimator = row.build()(svi._session(case.args, {}).problem)

    @jax.jit
    def total(arrays, mask):
        public = estimator.prepare(jax.random.key(1), params)
        seeds = row_numbers(mask.size)
        return bounded_sum(estimator, gaussian(1.0, 0.0), public, arrays, mask, seeds=seeds)

    every = jnp.ones(len(case.args[0]), bool)
    sums = [total(case.args, every), total(case.args, every.at[0].set(False))]
    leaves = list(zip(*map(jax.tree.leaves, sums), strict=True))
    change = np.sqrt(sum(float(jnp.sum((a - b) ** 2)) for a, b in leaves))
    assert case.least <= change <= case.most
    assert all(b.dtype == jnp.float32 and jnp.isfinite(b).all() for _, b in leaves)


@pytest.mark.full
@pytest.mark.parametrize("form", ["update", "updates", "loop", "sweep"])
def test_what_is_added_up_is_what_was_measured_and_not_computed_again(form):
    def model(x, y, u):
        z = numpyro.sample("z", dist.Normal(0, 1))
        with numpyro.plate("rows", x.shape[0]):
            numpyro.factor("near", -jnp.square(y * u - x * z) / 2)

    text = program_of(
        dpsvi(model, AutoDiagonalNormal, optax.adam(0.1)), tuple(jnp.ones((3, 37))), form
    )
    assert len(re.findall(r"f32\[(?:2,)?37,1\]\S* subtract\(", text)) == 1  # y u - x z


@pytest.mark.full
def test_a_state_that_a_compiled_function_holds_is_refused():
    x = jnp.ones((5, 3))
    svi = dpsvi(linear, AutoDiagonalNormal, optax.adam(0.1))
    state = svi.init(jax.random.key(0), x)
    with pytest.raises(ValueError, match="to be an argument"):
        jax.jit(lambda x: svi.update(state, x))(x)
    with pytest.raises(ValueError, match="shapes"):
        svi.update(state, jnp.ones((5, 2)))
