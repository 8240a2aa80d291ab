"""Models and calls by which records would get around their argument rows, and safe look-alikes.

A record is a row of an argument; everything else is public because somebody said so or because it
is small. A row of ``HOSTILE`` is a name, a function that builds the call, and the fragments that
the refusal must have; ``None`` for a call that is accepted and must be safe: no record may move the
sum that is released by more than the clip norm.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from flat import grouped
from jax.experimental import io_callback
from numpyro import handlers
from numpyro.infer.autoguide import AutoDelta, AutoDiagonalNormal, AutoGuideList, AutoNormal
from numpyro.infer.initialization import init_to_median, init_to_value

from numpyro_dp import (
    DPEM,
    DPMCMC,
    DPPBP,
    DPSEP,
    DPSVI,
    SGHMC,
    SGLD,
    PrivacyBudget,
    RegressionNetwork,
)
from numpyro_dp.core import Fold
from numpyro_dp.estimators import aligned
from numpyro_dp.methods.ep.families import beta
from numpyro_dp.samplers import FullBatch

N, D = 60, 3
RNG = np.random.default_rng(0)
X = RNG.normal(size=(N, D)).astype(np.float32)
Y = RNG.normal(size=N).astype(np.float32)
LABELS = RNG.integers(0, 2, N).astype(np.int32)
PANEL = RNG.normal(size=(N, 4)).astype(np.float32)
GRAM = X @ X.T
PATIENTS = RNG.normal(size=(25, 2)).astype(np.float32)
PATIENT_OF = RNG.integers(0, 25, N).astype(np.int32)
LONG = RNG.normal(size=1003).astype(np.float32)
KEY = jax.random.key(0)


class Call(NamedTuple):
    """A driver and a call of it.

    Attributes:
        driver: Its class.
        options: Arguments of the constructor.
        args: Positional arguments of the model.
        kwargs: Keyword arguments of the model.
        run: Further keywords of ``run``.
        records: Which of ``args`` are records.
    """

    driver: Callable[..., Any]
    options: dict[str, Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = {}
    run: dict[str, Any] = {}
    records: tuple[int, ...] = (0, 1)

    def make(self) -> Any:
        """Returns the driver."""
        return self.driver(**grouped(**self.options))

    def initialise(self) -> None:
        """Goes as far as a call can go without spending anything, or as far as it must."""
        if self.run or self.driver is DPMCMC:
            self.steps(2)
        else:
            self.make().init(KEY, *self.args, **self.kwargs)

    def steps(self, number: int, driver: Any = None) -> dict[str, Any]:
        """Takes steps, of a driver that is made here or given; returns what they lead to."""
        driver = self.make() if driver is None else driver
        if self.driver is DPMCMC:
            driver.run(KEY, *self.args, **self.kwargs, **self.run)
            return driver.get_samples()
        keywords = {"progress_bar": False} | self.run | self.kwargs
        return driver.run(KEY, number, *self.args, **keywords).params

    def report(self) -> Any:
        """Takes a step; returns its privacy report."""
        driver = self.make()
        if self.driver is DPMCMC:
            driver.run(KEY, *self.args, **self.kwargs)
            return driver.privacy
        return driver.run(KEY, 1, *self.args, progress_bar=False, **self.kwargs).privacy


class Row(NamedTuple):
    """A row of the table."""

    name: str
    build: Callable[[], Call]
    parts: list[str] | None


HOSTILE: list[Row] = []


def refused(*parts: str) -> Callable[[Callable[[], Call]], Callable[[], Call]]:
    """Adds a row that is refused with these fragments."""

    def add(build: Callable[[], Call]) -> Callable[[], Call]:
        HOSTILE.append(Row(build.__name__, build, list(parts)))
        return build

    return add


def accepted(build: Callable[[], Call]) -> Callable[[], Call]:
    """Adds a row that is accepted, and must be safe."""
    HOSTILE.append(Row(build.__name__, build, None))
    return build


def svi(model: Any, *args: Any, guide: Any = AutoNormal, **options: Any) -> Call:
    """``DPSVI`` with its default gradients; ``guide`` is a class, or a guide as it is."""
    guide = guide(model) if isinstance(guide, type) else guide
    settings = {
        "model": model, "guide": guide, "optim": optax.adam(0.1), "estimator": None,
        "clip_norm": 1.0, "sampler": FullBatch(), "noise_multiplier": 1.0,
    }  # fmt: skip
    return Call(DPSVI, settings | options, args)


def delta(model: Any, *args: Any, **options: Any) -> Call:
    """The same with point estimates: a step of rate 1 moves them by what is released."""
    return svi(model, *args, guide=AutoDelta, **options)


def sep(model: Any, *args: Any, **options: Any) -> Call:
    """``DPSEP``."""
    settings = {"clip_norm": 1.0, "sampler": FullBatch(), "noise_multiplier": 1.0}
    return Call(DPSEP, {"model": model} | settings | options, args)


def mcmc(kernel: Any, *args: Any, **options: Any) -> Call:
    """``DPMCMC`` with one sample."""
    settings = {
        "num_warmup": 0, "num_samples": 1, "clip_norm": 1.0, "sampler": FullBatch(),
        "noise_multiplier": 1.0, "progress_bar": False,
    }  # fmt: skip
    return Call(DPMCMC, {"kernel": kernel} | settings | options, args)


def weights(size: int = D) -> Any:
    """Samples weights with a standard normal prior."""
    return numpyro.sample("w", dist.Normal(0, 1).expand([size]).to_event(1))


def regression(x, y=None):
    """A linear regression."""
    w = weights()
    with numpyro.plate("records", x.shape[0]):
        numpyro.sample("y", dist.Normal(x @ w, 1), obs=y)


def logistic(x, y=None):
    """A logistic regression."""
    w = weights()
    with numpyro.plate("records", x.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=x @ w), obs=y)


def located(loc: Callable[[Any, Any], Any], size: int = D) -> Callable[..., None]:
    """A regression with mean ``loc(x, w)``."""

    def model(x, y=None):
        w = weights(size)
        with numpyro.plate("records", x.shape[0]):
            numpyro.sample("y", dist.Normal(loc(x, w), 1), obs=y)

    return model


def guided(shift: Callable[[], Any]) -> Callable[..., dict[str, Any]]:
    """A hand-written guide around ``loc + shift()``."""

    def guide(x, y=None):
        loc = numpyro.param("loc", jnp.zeros(D)) + shift()
        return {"w": numpyro.sample("w", dist.Normal(loc, 0.1).to_event(1))}

    return guide


@jax.jit
def column_means() -> Any:
    """Means of the records' columns, in a program of its own."""
    return jnp.mean(jnp.asarray(X), 0)


# What the model holds.


@refused("(60, 3)", "public=")
def a_jitted_helper_standardises():
    @jax.jit
    def standardise(x):
        table = jnp.asarray(X)
        return (x - table.mean(0)) / table.std(0)

    return svi(located(lambda x, w: standardise(x) @ w), X, Y)


@refused("(60, 3)", "public=")
def a_jitted_helper_two_levels_down():
    @jax.jit
    def outer(x):
        return x - jax.jit(lambda: column_means())()

    return svi(located(lambda x, w: outer(x) @ w), X, Y)


@refused("60")
def a_basis_centred_at_every_record():
    def basis(x, w):
        distance = jnp.square(x[:, None] - jnp.asarray(X)).sum(-1)
        return jnp.exp(-0.5 * distance) @ w

    return svi(located(basis, N), X, Y)


@refused("(40, 3)", "public=")
def a_basis_centred_at_forty_records():
    def basis(x, w):
        return jnp.exp(-0.5 * jnp.square(x[:, None] - jnp.asarray(X[:40])).sum(-1)) @ w

    return svi(located(basis, 40), X, Y)


@refused("(60,)", "public=")
def a_vectorised_helper():
    fn = jnp.vectorize(lambda row, w: row @ w + jnp.asarray(Y).mean(), signature="(d),(d)->()")
    return svi(located(fn), X, Y)


@refused("(60, 3)", "public=")
def a_custom_derivative():
    @jax.custom_jvp
    def fn(x, w):
        return (x - jnp.asarray(X).mean(0)) @ w

    fn.defjvp(lambda primals, tangents: (fn(*primals), primals[0] @ tangents[1]))
    return svi(located(fn), X, Y)


@refused("(60, 3)", "public=")
def the_rule_of_a_custom_derivative():
    @jax.custom_jvp
    def fn(x, w):
        return x @ w

    @fn.defjvp
    def rule(primals, tangents):
        return fn(*primals), (primals[0] + jnp.asarray(X).mean(0)) @ tangents[1]

    return svi(located(fn), X, Y)


@refused("(60, 3)", "public=")
def the_backward_rule_of_a_custom_derivative():
    @jax.custom_vjp
    def fn(x, w):
        return x @ w

    def backward(x, cotangent):
        return jnp.zeros_like(x), cotangent @ x + jnp.asarray(X).mean(0)

    fn.defvjp(lambda x, w: (x @ w, x), backward)
    return svi(located(fn), X, Y)


@refused("(60, 3)", "public=")
def the_forward_rule_of_a_custom_derivative():
    @jax.custom_vjp
    def fn(x, w):
        return x @ w

    fn.defvjp(
        lambda x, w: (x @ w + jnp.asarray(X).mean(), x),
        lambda x, cotangent: (jnp.zeros_like(x), cotangent @ x),
    )
    return svi(located(fn), X, Y)


@refused("(60, 3)", "public=")
def a_scan_over_the_records():
    def loc(x, w):
        total, _ = jax.lax.scan(lambda s, row: (s + row @ w, None), 0.0, jnp.asarray(X))
        return x @ w - total / N

    return svi(located(loc), X, Y)


@refused("(60, 3)", "public=")
def the_body_of_a_scan():
    def loc(x, w):
        def body(carry, _):
            return carry + jnp.asarray(X).mean(), None

        return x @ w + jax.lax.scan(body, 0.0, None, 2)[0]

    return svi(located(loc), X, Y)


@refused("(60, 3)", "public=")
def a_branch_of_cond():
    def loc(x, w):
        shift = jax.lax.cond(w[0] > 0, lambda: jnp.asarray(X).mean(), lambda: 0.0)
        return x @ w + shift

    return svi(located(loc), X, Y)


@refused("(60,)", "public=")
def a_branch_of_switch():
    def loc(x, w):
        branches = [lambda: 0.0, lambda: jnp.asarray(Y).mean(), lambda: 1.0]
        return x @ w + jax.lax.switch(jnp.int32(w[0] > 0), branches)

    return svi(located(loc), X, Y)


@refused("(60,)", "public=")
def the_body_of_a_while_loop():
    def loc(x, w):
        def body(state):
            return state[0] + 1, state[1] + jnp.asarray(Y)[state[0]]

        return x @ w + jax.lax.while_loop(lambda state: state[0] < N, body, (0, 0.0))[1]

    return svi(located(loc), X, Y)


@refused("(60,)", "public=")
def the_condition_of_a_while_loop():
    def loc(x, w):
        def condition(state):
            return state < 10 * jnp.abs(jnp.asarray(Y)).max()

        return x @ w + jax.lax.while_loop(condition, lambda state: state + 1.0, 0.0)

    return svi(located(loc), X, Y)


@refused("(60,)", "public=")
def the_body_of_a_counted_loop():
    def loc(x, w):
        return x @ w + jax.lax.fori_loop(0, N, lambda i, s: s + jnp.asarray(Y)[i], 0.0)

    return svi(located(loc), X, Y)


@refused("(60, 3)", "public=")
def a_mapped_helper():
    def loc(x, w):
        return jax.vmap(lambda row: (row - jnp.asarray(X).mean(0)) @ w)(x)

    return svi(located(loc), X, Y)


@refused("(60, 3)", "public=")
def a_checkpointed_helper():
    loc = jax.checkpoint(lambda x, w: (x - jnp.asarray(X).mean(0)) @ w)
    return svi(located(loc), X, Y)


@refused("(60, 3)", "public=")
def a_jitted_branch_in_a_scan_in_a_checkpoint():
    @jax.checkpoint
    def loc(x, w):
        def body(carry, _):
            return carry + jax.lax.cond(w[0] > 0, column_means, lambda: jnp.zeros(D)), None

        return (x - jax.lax.scan(body, jnp.zeros(D), None, 2)[0]) @ w

    return svi(located(loc), X, Y)


@refused("(60, 3)", "public=")
def an_iterative_solver():
    def loc(x, w):
        def matvec(v):
            return jnp.asarray(X).T @ (jnp.asarray(X) @ v) + v

        return x @ jax.scipy.sparse.linalg.cg(matvec, w)[0]

    return svi(located(loc), X, Y)


@refused("vmap")
def a_rule_for_batches_that_mixes_records():
    @jax.custom_batching.custom_vmap
    def centred(x):
        return x

    centred.def_vmap(lambda size, batched, x: (x - 50 * x[..., 0].mean(), True))
    return svi(located(lambda x, w: centred(x) @ w), X, Y)


@refused("vmap")
def a_rule_for_batches_that_holds_records():
    @jax.custom_batching.custom_vmap
    def centred(x):
        return x

    centred.def_vmap(lambda size, batched, x: (x - jnp.asarray(X).mean(0), True))
    return svi(located(lambda x, w: centred(x) @ w), X, Y)


@refused("(60, 3)", "public=")
def a_partial_model():
    def model(x, y, table):
        w = weights()
        with numpyro.plate("records", x.shape[0]):
            numpyro.sample("y", dist.Normal((x - jnp.asarray(table).mean(0)) @ w, 1), obs=y)

    return svi(functools.partial(model, table=X), X, Y)


@refused("(60, 3)", "public=")
def a_partial_tree():
    def model(table, x, y=None):
        w = weights()
        with numpyro.plate("records", x.shape[0]):
            numpyro.sample("y", dist.Normal((x - jnp.asarray(table).mean(0)) @ w, 1), obs=y)

    return svi(jax.tree_util.Partial(model, X), X, Y)


@refused("(60, 3)", "public=")
def a_callable_object():
    class Model:
        def __init__(self, table):
            self.table = table

        def __call__(self, x, y=None):
            w = weights()
            with numpyro.plate("records", x.shape[0]):
                numpyro.sample("y", dist.Normal((x - jnp.mean(self.table, 0)) @ w, 1), obs=y)

    return svi(Model(jnp.asarray(X)), X, Y)


@refused("(60, 3)", "public=")
def a_default_argument():
    def model(x, y=None, table=X):
        w = weights()
        with numpyro.plate("records", x.shape[0]):
            numpyro.sample("y", dist.Normal((x - jnp.mean(table, 0)) @ w, 1), obs=y)

    return svi(model, X, Y)


@refused("(60, 3)", "public=")
def a_remembered_helper():
    @functools.lru_cache
    def table():
        return jnp.asarray(X)

    table()
    return svi(located(lambda x, w: (x - table().mean(0)) @ w), X, Y)


@refused("60")
def records_by_condition():
    return svi(handlers.condition(regression, {"y": jnp.asarray(Y)}), X)


@refused("(60, 3)")
def records_by_substitute():
    def model(x, y):
        w, table = weights(), numpyro.param("table", jnp.zeros((1, D)))
        with numpyro.plate("records", x.shape[0]):
            numpyro.sample("y", dist.Normal((x - table.mean(0)) @ w, 1), obs=y)

    return svi(handlers.substitute(model, {"table": jnp.asarray(X)}), X, Y)


@refused("60")
def weights_of_the_records_by_scale():
    return svi(handlers.scale(regression, jnp.abs(jnp.asarray(Y))), X, Y)


@refused("60")
def a_mask_of_the_records():
    return svi(handlers.mask(regression, mask=jnp.asarray(Y) > 0), X, Y)


@refused("60")
def a_prior_at_every_record():
    prior = dist.Normal(jnp.asarray(Y), 1).to_event(1)

    def model(x, y):
        w = numpyro.sample("w", prior)
        with numpyro.plate("records", x.shape[0]):
            numpyro.sample("y", dist.Normal(w.mean(), 1), obs=y)

    return svi(model, X, Y)


@refused("(60, 3)")
def a_parameter_that_starts_at_the_records():
    def model(x, y):
        w, table = weights(), numpyro.param("table", jnp.asarray(X))
        with numpyro.plate("records", x.shape[0]):
            numpyro.sample("y", dist.Normal((x - table.mean(0)) @ w, 1), obs=y)

    return svi(model, X, Y)


@refused("60")
def a_subsample_of_captured_records():
    def model(x, y):
        w = weights()
        with numpyro.plate("records", x.shape[0], subsample_size=10):
            rows = numpyro.subsample(jnp.asarray(X), event_dim=1)
            outcome = numpyro.subsample(y, event_dim=0)
            numpyro.sample("y", dist.Normal(rows @ w, 1), obs=outcome)

    return svi(model, X, Y)


@refused("(60, 3)", "public=")
def an_argument_that_is_captured_too():
    return svi(located(lambda x, w: (x - jnp.asarray(X).mean(0)) @ w), X, Y)


@refused("(59, 3)", "public=")
def a_captured_copy_without_one_record():
    return svi(located(lambda x, w: (x - jnp.asarray(X[1:]).mean(0)) @ w), X, Y)


@refused("(64, 3)", "public=")
def a_captured_copy_with_padding():
    padded = np.pad(X, ((0, 4), (0, 0)))
    return svi(located(lambda x, w: (x - jnp.asarray(padded).mean(0)) @ w), X, Y)


@refused("(3, 60)", "public=")
def a_captured_copy_transposed():
    return svi(located(lambda x, w: (x - jnp.asarray(X.T).mean(1)) @ w), X, Y)


@refused("(180,)", "public=")
def a_captured_copy_flattened():
    return svi(located(lambda x, w: x @ w + jnp.asarray(X.ravel()).mean()), X, Y)


@refused("(30, 6)", "public=")
def a_captured_copy_reshaped():
    return svi(located(lambda x, w: x @ w + jnp.asarray(X.reshape(30, 6)).mean()), X, Y)


@refused("(5,)", "20 entries", "At most 15", "public=")
def many_small_captured_arrays():
    tables = [jnp.asarray(X.ravel()[5 * i : 5 * i + 5]) for i in range(12)]
    return svi(located(lambda x, w: x @ w + sum(table.mean() for table in tables)), X, Y)


def many_records(number):
    rng = np.random.default_rng(1)
    return [rng.normal(size=shape).astype(np.float32) for shape in ((number, D), number)]


@refused("(100, 3)", "300 entries", "At most 100", "public=")
def inducing_points_that_are_every_fourth_record():
    x, y = many_records(400)
    points = jnp.asarray(x[::4])
    return svi(
        located(lambda x, w: jnp.exp(-jnp.square(x[:, None] - points).sum(-1)).sum(-1) * w[0]), x, y
    )


@refused("(100, 2)", "200 entries", "public=")
def a_column_reshaped_among_few_records():
    x, y = many_records(200)
    table = jnp.asarray(y.reshape(100, 2))
    return svi(located(lambda x, w: x @ w + table.mean()), x, y)


def summed(arrays):
    """A model that holds a list of arrays."""
    return svi(located(lambda x, w: x @ w + sum(array.sum() for array in arrays)), X, Y)


@refused("()", "16 entries", "public=")
def a_column_as_arrays_without_an_axis():
    return summed([jnp.asarray(value) for value in Y])


@refused("(2,)", "16 entries", "public=")
def a_column_as_arrays_of_equal_entries():
    return summed([jnp.full(2, value) for value in Y])


@refused("(2,)", "16 entries", "public=")
def a_column_of_two_values_as_many_arrays():
    """Arrays of equal values are counted one by one."""
    return summed([jnp.full(2, int(label)) for label in LABELS])


@refused("(2,)", "16 entries", "public=")
def a_column_of_two_values_as_many_arrays_of_numpy():
    tables = [np.full(2, label) for label in LABELS]
    return svi(
        located(lambda x, w: x @ w + sum(jnp.sum(jnp.asarray(each)) for each in tables)), X, Y
    )


@refused("(2, 2)", "16 entries", "public=")
def a_column_as_scaled_identities():
    return summed([value * jnp.eye(2) for value in Y])


@refused("(60,)", "60 entries", "public=")
def a_column_of_records_that_are_all_alike():
    """What is accepted must not depend on whether they are."""
    return summed([jnp.ones(N)])


@refused("(60,)", "60 entries", "public=")
def a_column_of_zeros_of_numpy():
    zeros = np.zeros(N, np.float32)
    return svi(located(lambda x, w: x @ w + jnp.asarray(zeros).mean()), X, Y)


@refused("(60,)", "60 entries", "public=")
def numbers_of_the_records():
    order = np.arange(N)
    return svi(located(lambda x, w: x @ w + jnp.asarray(order).mean()), X, Y)


@refused("(60", "public=")
def a_factor_outside_the_plate_that_holds_records():
    def model(x, y):
        w = weights()
        numpyro.factor("prior", -jnp.sum((jnp.asarray(Y) - jnp.asarray(X) @ w) ** 2))
        with numpyro.plate("records", x.shape[0]):
            numpyro.sample("y", dist.Normal(x @ w, 1), obs=y)

    return svi(model, X, Y)


@refused("(60, 3)", "public=")
def a_prior_at_captured_means():
    def model(x, y):
        w = numpyro.sample("w", dist.Normal(column_means(), 1).to_event(1))
        with numpyro.plate("records", x.shape[0]):
            numpyro.sample("y", dist.Normal(x @ w, 1), obs=y)

    return svi(model, X, Y)


# Calls of the host.


@refused("callback")
def a_pure_callback_in_the_model():
    def loc(x, w):
        shift = jax.ShapeDtypeStruct((), jnp.float32)
        return x @ w + jax.pure_callback(lambda: X.mean(), shift, vmap_method="sequential")

    return svi(located(loc), X, Y)


@refused("callback")
def an_io_callback_in_the_model():
    def loc(x, w):
        return x @ w + io_callback(lambda: X.mean(), jax.ShapeDtypeStruct((), jnp.float32))

    return svi(located(loc), X, Y)


@refused("callback")
def a_record_shown_by_a_callback():
    seen = []

    def loc(x, w):
        jax.debug.callback(seen.append, x[0])
        return x @ w

    return svi(located(loc), X, Y)


@refused("callback")
def a_record_printed():
    def loc(x, w):
        jax.debug.print("{}", x[0])
        return x @ w

    return svi(located(loc), X, Y)


@refused("callback")
def a_callback_in_a_jitted_scan():
    @jax.jit
    def loc(x, w):
        def body(carry, _):
            jax.debug.callback(lambda value: None, x[0])
            return carry, None

        return x @ w + jax.lax.scan(body, 0.0, None, 2)[0]

    return svi(located(loc), X, Y)


@refused("callback")
def a_callback_in_the_guide():
    def shift():
        return jax.pure_callback(
            lambda: X.mean(0), jax.ShapeDtypeStruct((D,), jnp.float32), vmap_method="sequential"
        )

    return svi(regression, X, Y, guide=guided(shift))


# What the guide holds.


@refused("(60, 3)", "public=")
def a_jitted_helper_of_the_guide():
    return svi(regression, X, Y, guide=guided(column_means))


@refused("(60, 3)", "public=")
def the_body_of_a_scan_of_the_guide():
    def shift():
        def body(carry, _):
            return carry + jnp.asarray(X).mean(0), None

        return jax.lax.scan(body, jnp.zeros(D), None, 1)[0]

    return svi(regression, X, Y, guide=guided(shift))


@refused("'w'", "depends on the records")
def a_guide_that_publishes_column_means():
    def guide(x, y=None):
        numpyro.sample("w", dist.Normal(x.mean(0), numpyro.param("scale", 1.0)).to_event(1))

    budget = PrivacyBudget(0.01, 1e-5)
    options = {"budget": budget, "noise_multiplier": None, "num_steps": 2}
    return svi(regression, X, Y, guide=guide, **options)


@refused("(60, 3)", "public=")
def a_guide_that_publishes_captured_means():
    budget = PrivacyBudget(0.01, 1e-5)
    options = {"budget": budget, "noise_multiplier": None, "num_steps": 2}
    return svi(regression, X, Y, guide=guided(column_means), **options)


@refused("(60, 3)")
def a_parameter_of_the_guide_that_starts_at_the_records():
    def guide(x, y=None):
        table = numpyro.param("table", jnp.asarray(X))
        numpyro.sample("w", dist.Normal(table.mean(0), 1).to_event(1))

    return svi(regression, X, Y, guide=guide)


@refused("(60, 3)", "public=")
def a_partial_guide():
    def guide(x, y=None, table=None):
        loc = numpyro.param("loc", jnp.zeros(D)) + jnp.mean(table, 0)
        numpyro.sample("w", dist.Normal(loc, 0.1).to_event(1))

    return svi(regression, X, Y, guide=functools.partial(guide, table=jnp.asarray(X)))


@refused("(60, 3)", "public=")
def a_subclass_of_an_automatic_guide_that_shifts_its_posterior():
    class Shifted(AutoDiagonalNormal):
        def _get_posterior(self):
            posterior = super()._get_posterior()
            return dist.Normal(posterior.loc + column_means(), posterior.scale)

    return svi(regression, X, Y, guide=Shifted)


@refused("(60, 3)")
def a_subclass_of_an_automatic_guide_that_adds_a_parameter():
    class Publishing(AutoNormal):
        def __call__(self, *args, **kwargs):
            numpyro.param("table", jnp.asarray(X))
            return super().__call__(*args, **kwargs)

    return svi(regression, X, Y, guide=Publishing)


@refused("(60, 3)", "public=")
def a_hand_written_part_of_a_list():
    def model(x, y=None):
        w, b = weights(), numpyro.sample("b", dist.Normal(0, 1))
        with numpyro.plate("records", x.shape[0]):
            numpyro.sample("y", dist.Normal(x @ w + b, 1), obs=y)

    guide = AutoGuideList(model)
    guide.append(AutoNormal(handlers.block(model, hide=["w"])))
    guide.append(guided(column_means))
    return svi(model, X, Y, guide=guide)


# Where a run starts.


def starting_at(value: Callable[[], Any]) -> Callable[..., Any]:
    """A strategy that starts the latent sites at ``value()``."""

    def start(site=None):
        if site is None:
            return functools.partial(start)
        if site["type"] == "sample" and not site["is_observed"]:
            return value()
        return init_to_median(site)

    return start


@refused("init_params=")
def a_start_at_the_means():
    start = init_to_value(values={"w": X.mean(0)})
    return svi(regression, X, Y, guide=AutoNormal(regression, init_loc_fn=start))


@refused("init_params=")
def a_start_at_the_means_as_arrays_of_jax():
    start = functools.partial(init_to_value, values={"w": jnp.asarray(X).mean(0)})
    return svi(regression, X, Y, guide=AutoDiagonalNormal(regression, init_loc_fn=start))


@refused("init_params=")
def a_start_in_a_closure():
    means = jnp.asarray(X).mean(0)

    start = starting_at(lambda: means)
    return svi(regression, X, Y, guide=AutoNormal(regression, init_loc_fn=start))


@refused("init_params=")
def a_start_in_an_object():
    class Start:
        def __init__(self, means):
            self.means = means

        def __call__(self, site=None):
            if site is None:
                return functools.partial(self)
            if site["type"] == "sample" and not site["is_observed"]:
                return self.means
            return init_to_median(site)

    start = Start(X.mean(0))
    return svi(regression, X, Y, guide=AutoNormal(regression, init_loc_fn=start))


@refused("init_params=")
def a_start_in_the_attribute_of_a_class():
    class Study:
        means = X.mean(0)

    start = starting_at(lambda: Study.means)
    return svi(regression, X, Y, guide=AutoNormal(regression, init_loc_fn=start))


@refused("init_params=")
def a_start_in_a_module():
    study = types.ModuleType("study")
    study.means = X.mean(0)

    start = starting_at(lambda: study.means)
    return svi(regression, X, Y, guide=AutoNormal(regression, init_loc_fn=start))


@refused("init_params=")
def a_subclass_of_an_automatic_guide_that_starts_at_the_means():
    class Starting(AutoDiagonalNormal):
        def _setup_prototype(self, *args, **kwargs):
            super()._setup_prototype(*args, **kwargs)
            self._init_latent = jnp.asarray(X).mean(0)

    return svi(regression, X, Y, guide=Starting)


@refused("init_params=")
def a_start_in_a_part_of_a_list():
    guide = AutoGuideList(regression)
    start = init_to_value(values={"w": X.mean(0)})
    guide.append(AutoNormal(regression, init_loc_fn=start))
    return svi(regression, X, Y, guide=guide)


@refused("init_params=")
def a_start_at_one_number_in_an_array():
    def model(x):
        mean = numpyro.sample("mean", dist.Normal(0, 1))
        with numpyro.plate("records", x.shape[0]):
            numpyro.sample("x", dist.Normal(mean, 1), obs=x)

    start = init_to_value(values={"mean": jnp.asarray(Y).mean()})
    return svi(model, Y, guide=AutoNormal(model, init_loc_fn=start))


@refused("init_params=")
def a_chain_that_starts_at_the_means():
    start = init_to_value(values={"w": X.mean(0)})
    return mcmc(SGLD(regression, 1e-3, init_strategy=start), X, Y)


@refused("init_params=")
def a_chain_with_momentum_that_starts_in_a_closure():
    means = jnp.asarray(X).mean(0)

    start = starting_at(lambda: means)
    return mcmc(SGHMC(regression, 1e-3, init_strategy=start), X, Y)


# Folds, optimisers and estimators.


def folded(fold: Fold) -> Call:
    """A regression whose iterates are folded."""
    return svi(regression, X, Y)._replace(run={"fold": fold})


@refused("fold", "(60, 3)")
def a_fold_that_adds_records():
    return folded(
        Fold(lambda params: jnp.zeros(D), lambda s, params: s + jnp.asarray(X).mean(0), lambda s: s)
    )


@refused("fold", "(60, 3)")
def a_fold_with_a_jitted_helper():
    return folded(
        Fold(lambda params: jnp.zeros(D), lambda s, params: s + column_means(), lambda s: s)
    )


@refused("fold", "(60, 3)")
def a_fold_that_starts_at_the_records():
    return folded(Fold(lambda params: jnp.asarray(X), lambda s, params: s, lambda s: s))


@refused("fold", "(60, 3)")
def a_fold_that_ends_with_the_records():
    return folded(
        Fold(lambda params: jnp.zeros(D), lambda s, params: s, lambda s: (s, jnp.asarray(X)))
    )


@refused("callback")
def a_fold_that_asks_the_host():
    def update(state, params):
        return state + jax.pure_callback(lambda: X.mean(0), jax.ShapeDtypeStruct((D,), jnp.float32))

    return folded(Fold(lambda params: jnp.zeros(D), update, lambda s: s))


@refused("(60, 3)")
def an_optimiser_that_adds_records():
    def update(updates, state, params=None):
        return jax.tree.map(lambda leaf: -leaf + jnp.asarray(X).mean(), updates), state

    optim = optax.GradientTransformation(lambda params: (), update)
    return svi(regression, X, Y, optim=optim)


@refused("(60, 3)")
def an_optimiser_that_starts_with_records():
    optim = optax.GradientTransformation(
        lambda params: jnp.asarray(X), lambda updates, state, params=None: (updates, state)
    )
    return svi(regression, X, Y, optim=optim)


@refused("(60,)")
def a_step_size_looked_up_in_records():
    table = jnp.asarray(Y)
    return svi(regression, X, Y, optim=optax.sgd(lambda step: table[step]))


@refused("(60,)")
def a_step_size_of_a_sampler_looked_up_in_records():
    table = 1e-3 * jnp.abs(jnp.asarray(Y))
    return mcmc(SGLD(regression, lambda step: table[step]), X, Y)


@refused("(60,)")
def a_damping_looked_up_in_records():
    table = jax.nn.sigmoid(jnp.asarray(Y))
    return sep(logistic, X, LABELS, damping=lambda step: table[step])


@refused("(60, 3)")
def an_estimator_that_adds_records_afterwards():
    def build(problem):
        plain = aligned()(problem)

        def pull_back(public, released):
            shift = jnp.asarray(X).mean()
            return jax.tree.map(lambda leaf: leaf + shift, plain.pull_back(public, released))

        return plain._replace(pull_back=pull_back)

    return svi(regression, X, Y, estimator=build)


# Arguments.


def listed(x, y=None):
    """A regression on a list of rows."""
    w = weights()
    with numpyro.plate("records", len(x)):
        numpyro.sample("y", dist.Normal(jnp.stack(list(x)) @ w, 1), obs=y)


@refused("args[0]", "(3,)")
def a_list_of_rows():
    return svi(listed, [jnp.asarray(row) for row in X], Y)


@refused("args[0]", "(3,)")
def a_tuple_of_rows():
    return svi(listed, tuple(X), Y)


@refused("args[0]", "(3,)")
def a_dict_of_rows():
    def model(rows, y):
        listed(rows.values(), y)

    return svi(model, {f"person {i}": row for i, row in enumerate(X)}, Y)


@refused("60")
def a_list_of_single_numbers():
    def model(x, y):
        slope = numpyro.sample("slope", dist.Normal(0, 1))
        with numpyro.plate("records", len(x)):
            numpyro.sample("y", dist.Normal(slope * jnp.stack(x), 1), obs=y)

    return svi(model, [jnp.asarray(value) for value in Y], Y)


@refused("60 Python numbers")
def a_list_of_python_numbers():
    def model(x, y):
        slope = numpyro.sample("slope", dist.Normal(0, 1))
        with numpyro.plate("records", len(x)):
            numpyro.sample("y", dist.Normal(slope * jnp.asarray(x), 1), obs=y)

    return svi(model, Y.tolist(), Y)


def visits(x, y, patients, patient_of):
    """Outcomes of visits, with a table of the patients."""
    w, v = weights(), numpyro.sample("v", dist.Normal(0, 1).expand([2]).to_event(1))
    with numpyro.plate("visits", x.shape[0]):
        numpyro.sample("y", dist.Normal(x @ w + patients[patient_of] @ v, 1), obs=y)


@refused("args[2]", "(25, 2)", "public=", "record")
def a_table_of_patients():
    return svi(visits, X, Y, PATIENTS, PATIENT_OF)


@refused("kwargs['patients']", "(25, 2)", "public=", "record")
def a_table_of_patients_by_keyword():
    call = svi(visits, X, Y)
    return call._replace(kwargs={"patients": PATIENTS, "patient_of": PATIENT_OF})


@refused("args[2]", "(25, 2)", "public=")
def a_table_of_patients_in_a_dict():
    def model(x, y, tables):
        visits(x, y, tables["patients"], tables["patient_of"])

    return svi(model, X, Y, {"patients": PATIENTS, "patient_of": PATIENT_OF})


def with_second_table(x, y, other):
    """A second table in a factor outside the plate."""
    w = weights()
    numpyro.factor("other", -0.5 * jnp.sum((other @ w[:2]) ** 2))
    with numpyro.plate("records", x.shape[0]):
        numpyro.sample("y", dist.Normal(x @ w, 1), obs=y)


@refused("args[2]", "(25, 2)", "public=")
def a_second_table_in_a_factor_outside():
    return svi(with_second_table, X, Y, PATIENTS)


@refused("'other'", "outside the data plate")
def the_records_in_a_factor_outside():
    return svi(with_second_table, X, Y, X[:, :2])


@refused("'first'", "outside the data plate")
def a_record_observed_outside():
    def model(x, y):
        w = weights()
        with numpyro.plate("columns", D):
            numpyro.sample("first", dist.Normal(w, 1), obs=x[0])
        with numpyro.plate("records", x.shape[0]):
            numpyro.sample("y", dist.Normal(x @ w, 1), obs=y)

    return svi(model, X, Y, data_plate="records")


def with_summary(x, y, other):
    """A second argument that is summarised."""
    w = weights()
    with numpyro.plate("records", x.shape[0]):
        numpyro.sample("y", dist.Normal(x @ w + other.mean(), 1), obs=y)


@refused("args[2]", "(59, 3)", "public=")
def a_copy_without_one_record():
    return svi(with_summary, X, Y, X[1:])


@refused("args[2]", "(61, 3)", "public=")
def a_copy_with_padding():
    return svi(with_summary, X, Y, np.pad(X, ((0, 1), (0, 0))))


@refused("args[2]", "(30, 6)", "public=")
def a_copy_reshaped():
    return svi(with_summary, X, Y, X.reshape(30, 6))


@refused("args[2]", "(180,)", "public=")
def a_copy_flattened():
    return svi(with_summary, X, Y, X.ravel())


@refused("args[2]", "(3, 60)", "public=")
def a_copy_transposed():
    return svi(with_summary, X, Y, X.T)


@refused("args[2]", "(3,)", "public=")
def column_means_as_an_argument():
    return svi(with_summary, X, Y, X.mean(0))


@refused("(60, 3)", "public=")
def an_object_that_holds_records():
    class Study:
        def __init__(self, table):
            self.table = table

    def model(x, y, study):
        w = weights()
        with numpyro.plate("records", x.shape[0]):
            numpyro.sample("y", dist.Normal((x - jnp.mean(study.table, 0)) @ w, 1), obs=y)

    return svi(model, X, Y, Study(X))


def kernel_regression(k, y):
    """A slope in the mean of each row of a matrix."""
    slope = numpyro.sample("slope", dist.Normal(0, 1))
    with numpyro.plate("records", y.shape[0]):
        numpyro.sample("y", dist.Normal(slope * k.reshape(k.shape[0], -1).mean(-1), 1), obs=y)


@refused("args[0]", "(60, 60)", "data_plate=", "public=")
def a_gram_matrix():
    return svi(kernel_regression, GRAM, Y)


@refused("args[0]", "(60, 4, 60)", "data_plate=", "public=")
def a_stack_of_gram_matrices():
    return svi(kernel_regression, np.stack([GRAM] * 4, 1), Y)


def panel(people: int, times: int, people_dim: int) -> Callable[..., None]:
    """Outcomes of people over time, in two plates."""

    def model(y):
        level = numpyro.sample("level", dist.Normal(0, 1))
        with (
            numpyro.plate("people", people, dim=people_dim),
            numpyro.plate("time", times, dim=-3 - people_dim),
        ):
            numpyro.sample("y", dist.Normal(level, 1), obs=y)

    return model


@refused("data_plate=")
def a_panel_with_time_first():
    return svi(panel(N, 12, -1), np.tile(Y, (12, 1)))


@refused("data_plate=")
def a_panel_with_people_first():
    return svi(panel(N, 4, -2), PANEL)


@refused("args[0]", "(12, 60)")
def a_panel_with_time_first_whose_records_are_people():
    return svi(panel(N, 12, -1), np.tile(Y, (12, 1)), data_plate="people")


@refused("args[0]", "(1003,)", "public=")
def a_long_table_read_through_an_index():
    def model(values, first, x):
        level = numpyro.sample("level", dist.Normal(0, 1))
        with numpyro.plate("people", x.shape[0]):
            rows = jax.vmap(lambda at: jax.lax.dynamic_slice(values, (at,), (5,)))(first)
            numpyro.factor("y", dist.Normal(level, 1).log_prob(rows).sum(-1))

    rng = np.random.default_rng(2)
    return svi(model, LONG, np.arange(200) * 5, rng.normal(size=200).astype(np.float32))


@refused("args[0]", "(1003,)", "public=")
def a_long_table_summed_by_person():
    def model(values, people, x):
        level = numpyro.sample("level", dist.Normal(0, 1))
        each = dist.Normal(level, 1).log_prob(values)
        total = jax.ops.segment_sum(each, people, 200)
        with numpyro.plate("people", 200) as index:
            numpyro.factor("y", total[index] + 0 * x)

    rng = np.random.default_rng(2)
    people = rng.integers(0, 200, 1003)
    return svi(model, LONG, people, rng.normal(size=200).astype(np.float32))


# Other drivers.


@refused("(60, 3)", "public=")
def a_jitted_helper_under_message_passing():
    def model(x, y):
        w = weights()
        with numpyro.plate("records", x.shape[0]):
            numpyro.sample("y", dist.Bernoulli(logits=(x - column_means()) @ w), obs=y)

    return sep(model, X, LABELS)


@refused("args[2]", "(25, 2)", "public=")
def a_table_of_patients_under_message_passing():
    return sep(visits, X, Y, PATIENTS, PATIENT_OF)


@refused("args[0]", "(60, 60)", "data_plate=", "public=")
def a_gram_matrix_under_message_passing():
    return sep(kernel_regression, GRAM, Y)


@refused("callback")
def a_callback_under_message_passing():
    def loc(x, w):
        jax.debug.callback(lambda value: None, x[0])
        return x @ w

    return sep(located(loc), X, Y)


@refused("(60, 3)", "public=")
def a_scan_in_a_sampler():
    def loc(x, w):
        total, _ = jax.lax.scan(lambda s, row: (s + row @ w, None), 0.0, jnp.asarray(X))
        return x @ w - total / N

    return mcmc(SGLD(located(loc), 1e-3), X, Y)


@refused("args[2]", "(25, 2)", "public=")
def a_table_of_patients_in_a_sampler():
    return mcmc(SGLD(visits, 1e-3), X, Y, PATIENTS, PATIENT_OF)


@refused("callback")
def a_callback_in_a_sampler():
    def loc(x, w):
        jax.debug.print("{}", x[0])
        return x @ w

    return mcmc(SGHMC(located(loc), 1e-3), X, Y)


@refused("data_plate=")
def a_panel_in_a_sampler():
    return mcmc(SGLD(panel(N, 4, -2), 1e-3), PANEL)


def components(*args: Any, **kwargs: Any) -> Call:
    """``DPEM``."""
    options = {"num_components": 2, "clip_norm": 1.0, "sampler": FullBatch()}
    return Call(DPEM, options | {"noise_multiplier": 1.0}, args, kwargs)


@refused("one array")
def a_second_table_beside_a_mixture():
    return components(X, PATIENTS)


@refused("one array")
def a_list_of_rows_for_a_mixture():
    return components(list(X))


def network(*args: Any, **kwargs: Any) -> Call:
    """``DPPBP``."""
    options = {"network": RegressionNetwork((4,)), "clip_norm": 1.0, "sampler": FullBatch()}
    return Call(DPPBP, options | {"noise_multiplier": 1.0}, args, kwargs)


@refused("(59,)")
def a_network_with_too_few_outcomes():
    return network(X, Y[1:])


@refused("")
def a_network_with_a_third_table():
    return network(X, Y, PATIENTS)


@refused("")
def a_network_with_a_list_of_rows():
    return network(list(X), Y)


# Accepted, and safe.


@accepted
def a_deterministic_site_in_the_plate():
    def model(x, y):
        w = weights()
        with numpyro.plate("records", x.shape[0]):
            mean = numpyro.deterministic("mean", x @ w)
            numpyro.sample("y", dist.Normal(mean, 1), obs=y)

    return delta(model, X, Y)


@accepted
def a_deterministic_site_of_all_records():
    def model(x, y):
        w = weights()
        mean = numpyro.deterministic("mean", x @ w)
        with numpyro.plate("records", x.shape[0]):
            numpyro.sample("y", dist.Normal(mean, 1), obs=y)

    return delta(model, X, Y)


@accepted
def a_factor_in_the_plate():
    def model(x, y):
        w = weights()
        with numpyro.plate("records", x.shape[0]):
            numpyro.factor("y", -0.5 * jnp.square(y - x @ w))

    return delta(model, X, Y)


@accepted
def a_subsample_by_index():
    def model(x, y):
        w = weights()
        with numpyro.plate("records", x.shape[0], subsample_size=10) as index:
            numpyro.sample("y", dist.Normal(x[index] @ w, 1), obs=y[index])

    return delta(model, X, Y)


@accepted
def a_panel_whose_records_are_people():
    return delta(panel(N, 4, -2), PANEL, data_plate="people")._replace(records=(0,))


@accepted
def a_panel_whose_records_are_times():
    call = delta(panel(N, 12, -1), np.tile(Y, (12, 1)), data_plate="time")
    return call._replace(records=(0,))


@accepted
def a_gram_matrix_by_rows():
    return delta(kernel_regression, GRAM, Y, data_plate="records")


@accepted
def a_public_matrix_with_rows_and_columns_of_records():
    def model(x, y, k):
        w = numpyro.sample("w", dist.Normal(0, 1 + jnp.trace(k)).expand([D]).to_event(1))
        with numpyro.plate("records", x.shape[0]):
            numpyro.sample("y", dist.Normal(x @ w, 1), obs=y)

    return delta(model, X, Y, np.eye(N, dtype=np.float32), public=["k"])


@accepted
def a_public_table_of_patients():
    call = delta(visits, X, Y, PATIENTS, PATIENT_OF, public=["patients"])
    return call._replace(records=(0, 1, 3))


@accepted
def a_public_table_in_a_factor_outside():
    return delta(with_second_table, X, Y, PATIENTS, public=["other"])


@accepted
def a_public_table_observed_outside():
    def model(x, y, earlier):
        w = weights()
        with numpyro.plate("earlier", earlier.shape[0]):
            numpyro.sample("earlier_y", dist.Normal(w[0], 1), obs=earlier)
        with numpyro.plate("records", x.shape[0]):
            numpyro.sample("y", dist.Normal(x @ w, 1), obs=y)

    return delta(model, X, Y, LONG[:9], public=["earlier"], data_plate="records")


@accepted
def a_static_table():
    def model(x, y, table):
        w = weights()
        with numpyro.plate("records", x.shape[0]):
            numpyro.sample("y", dist.Normal((x - jnp.mean(table, 0)) @ w, 1), obs=y)

    return delta(model, X, Y, table=X.copy())


@accepted
def a_soft_constraint_outside():
    def model(x, y):
        w = weights()
        numpyro.factor("near_one", -50 * jnp.square(w.sum() - 1))
        with numpyro.plate("records", x.shape[0]):
            numpyro.sample("y", dist.Normal(x @ w, 1), obs=y)

    return delta(model, X, Y)


@accepted
def a_small_table_looked_up_by_a_column():
    table = np.linspace(-1, 1, 12).astype(np.float32)

    def model(x, y, month):
        w = weights()
        with numpyro.plate("records", x.shape[0]):
            numpyro.sample("y", dist.Normal(x @ w + jnp.asarray(table)[month], 1), obs=y)

    return delta(model, X, Y, np.arange(N) % 12)._replace(records=(0, 1, 2))


@accepted
def several_observed_sites():
    def model(x, y, z):
        w = weights()
        with numpyro.plate("records", x.shape[0]):
            numpyro.sample("y", dist.Normal(x @ w, 1), obs=y)
            numpyro.sample("z", dist.Bernoulli(logits=x @ w), obs=z)

    return delta(model, X, Y, LABELS)._replace(records=(0, 1, 2))


@accepted
def a_weight_and_a_mask_in_each_record():
    def model(x, y, weight, known):
        w = weights()
        with numpyro.plate("records", x.shape[0]), handlers.scale(scale=weight):
            numpyro.sample("y", dist.Normal(x @ w, 1).mask(known), obs=y)

    call = delta(model, X, Y, np.abs(Y), LABELS > 0)
    return call._replace(records=(0, 1, 2, 3))


@accepted
def a_dict_of_columns():
    def model(columns):
        w = weights()
        with numpyro.plate("records", columns["y"].shape[0]):
            numpyro.sample("y", dist.Normal(columns["x"] @ w, 1), obs=columns["y"])

    call = delta(model, {"x": X, "y": Y, "not read": np.zeros((N, 2, 5), np.float32)})
    return call._replace(records=(0,))


@accepted
def parameters_of_the_model():
    def model(x, y):
        w = numpyro.param("w", jnp.zeros(D))
        with numpyro.plate("records", x.shape[0]):
            numpyro.sample("y", dist.Normal(x @ w, 1), obs=y)

    return svi(model, X, Y, guide=lambda x, y=None: None)


@accepted
def a_helper_whose_rule_holds_little():
    @jax.custom_jvp
    def fn(x, w):
        return x @ w

    @fn.defjvp
    def rule(primals, tangents):
        return fn(*primals), primals[0] @ tangents[1] * jnp.asarray([2.0])[0]

    return delta(located(fn), X, Y)


@accepted
def a_sampler_with_a_public_table():
    call = mcmc(SGLD(visits, 1.0), X, Y, PATIENTS, PATIENT_OF, public=["patients"])
    return call._replace(records=(0, 1, 3))


@accepted
def a_sampler_of_a_panel():
    call = mcmc(SGLD(panel(N, 4, -2), 1.0), PANEL, data_plate="people")
    return call._replace(records=(0,))


@accepted
def message_passing_with_a_static_offset():
    def model(x, y, offset):
        w = weights()
        with numpyro.plate("records", x.shape[0]):
            numpyro.sample("y", dist.Bernoulli(logits=x @ w + jnp.mean(offset)), obs=y)

    return sep(model, X, LABELS, offset=np.ones(2, np.float32))


@accepted
def message_passing_of_counts():
    def model(x):
        p = numpyro.sample("p", dist.Beta(1.0, 1.0))
        with numpyro.plate("records", x.shape[0]):
            numpyro.sample("x", dist.Bernoulli(p), obs=x)

    return sep(model, LABELS, family={"p": beta()})._replace(records=(0,))


@refused("single numbers in its program", "At most 25 are allowed", "public=[array]")
def records_written_out_by_a_loop_over_a_list():
    numbers = [float(number) for number in np.concatenate([Y, X[:, 0]])]

    def model(x, y):
        w = weights()
        total = sum(jnp.cos(w[0]) * number for number in numbers)
        with numpyro.plate("records", x.shape[0]):
            numpyro.sample("y", dist.Normal(x @ w + total, 1), obs=y)

    return svi(model, X, Y)


@refused("single numbers in its program")
def records_returned_by_branches():
    values = [float(number) for number in np.concatenate([Y, X[:, 0]])]
    branches = [lambda number=number: number for number in values]

    def loc(x, w):
        return x @ w + jax.lax.switch(x[:, 0].astype(int)[0], branches)

    return svi(located(loc), X, Y)


@refused("(60,)", "public=")
def a_support_that_holds_a_column():
    """Densities read it where NumPyro validates."""
    column = jnp.asarray(Y)

    class Above(dist.constraints.Constraint):
        event_dim = 0

        def __call__(self, x):
            return x > column.min()

    class Shifted(dist.Normal):
        support = Above()

    def model(x, y):
        w = weights()
        with numpyro.plate("records", x.shape[0]):
            numpyro.sample("y", Shifted(x @ w, 1), obs=y)

    return svi(model, X, Y)


@refused("single numbers in its program")
def records_written_out_by_a_loop_in_a_compiled_helper():
    numbers = [float(number) for number in np.concatenate([Y, X[:, 0]])]

    @jax.jit
    def helper(w):
        return sum(jnp.cos(w) * number for number in numbers)

    def model(x, y):
        w = weights()
        with numpyro.plate("records", x.shape[0]):
            numpyro.sample("y", dist.Normal(x @ w + helper(w[0]), 1), obs=y)

    return svi(model, X, Y)
