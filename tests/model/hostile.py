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
from jax import lax
from jax.experimental import io_callback
from models import mean_of, of
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
    """A driver and a call of it."""

    driver: Callable[..., Any]
    options: dict[str, Any]  # of the constructor
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = {}
    run: dict[str, Any] = {}  # further keywords of ``run``
    records: tuple[int, ...] = (0, 1)  # which of ``args`` are records

    def make(self) -> Any:
        return self.driver(**grouped(**self.options))

    def initialise(self) -> None:
        """Goes as far as a call can go without spending anything, or as far as it must."""
        if self.run or self.driver is DPMCMC:
            self.steps(2)
        else:
            self.make().init(KEY, *self.args, **self.kwargs)

    def _after(self, number: int, driver: Any) -> Any:
        if self.driver is DPMCMC:
            driver.run(KEY, *self.args, **self.kwargs, **self.run)
            return driver
        keywords = {"progress_bar": False} | self.run | self.kwargs
        return driver.run(KEY, number, *self.args, **keywords)

    def steps(self, number: int, driver: Any = None) -> dict[str, Any]:
        """Takes steps, of a driver that is made here or given; returns what they lead to."""
        found = self._after(number, driver or self.make())
        return found.get_samples() if self.driver is DPMCMC else found.params

    def report(self) -> Any:
        """The privacy report of one step."""
        return self._after(1, self.make()).privacy


class Row(NamedTuple):
    name: str
    build: Callable[[], Call]
    parts: list[str] | None


HOSTILE: list[Row] = []
NOISY = {"clip_norm": 1.0, "sampler": FullBatch(), "noise_multiplier": 1.0}


def refuse(builds: dict[str, Callable[[], Call]], *parts: str) -> None:
    HOSTILE.extend(Row(name, build, list(parts)) for name, build in builds.items())


def svi(model: Any, *args: Any, guide: Any = AutoNormal, **options: Any) -> Call:
    guide = guide(model) if isinstance(guide, type) else guide
    settings = {"model": model, "guide": guide, "optim": optax.adam(0.1), "estimator": None}
    return Call(DPSVI, settings | NOISY | options, args)


def delta(model: Any, *args: Any, **options: Any) -> Call:
    """With point estimates: a step of rate 1 moves them by what is released."""
    return svi(model, *args, guide=AutoDelta, **options)


def sep(model: Any, *args: Any, **options: Any) -> Call:
    return Call(DPSEP, {"model": model} | NOISY | options, args)


def mcmc(kernel: Any, *args: Any, **options: Any) -> Call:
    counts = {"num_warmup": 0, "num_samples": 1, "progress_bar": False}
    return Call(DPMCMC, {"kernel": kernel} | counts | NOISY | options, args)


def weights(size: int = D) -> Any:
    return numpyro.sample("w", dist.Normal(0, 1).expand([size]).to_event(1))


def dot(x: Any, w: Any) -> Any:
    return x @ w


def normal(mean: Any) -> Any:
    return dist.Normal(mean, 1)


def bernoulli(eta: Any) -> Any:
    return dist.Bernoulli(logits=eta)


def located(
    loc: Callable[..., Any] = dot, size: int = D, *, prior: Callable[[], Any] | None = None,
    outside: Callable[..., Any] | None = None, likelihood: Callable[..., Any] = normal,
) -> Callable[..., None]:  # fmt: skip
    """A regression with mean ``loc(x, w, *others)`` and, before it, what stands outside its plate.

    ``loc`` is called outside the plate too, so it may have sites.
    """

    def model(x, y=None, *others, **static):
        w = weights(size) if prior is None else numpyro.sample("w", prior().to_event(1))
        if outside is not None:
            outside(w, x, y, *others)
        mean = loc(x, w, *others, **static)
        with numpyro.plate("records", len(x)):
            numpyro.sample("y", likelihood(mean), obs=y)

    return model


regression = located()
one_mean = mean_of()
logistic = located(likelihood=bernoulli)


def guided(shift: Callable[[], Any]) -> Callable[..., dict[str, Any]]:
    def guide(x, y=None):
        loc = numpyro.param("loc", jnp.zeros(D)) + shift()
        return {"w": numpyro.sample("w", dist.Normal(loc, 0.1).to_event(1))}

    return guide


def drawn(loc: Callable[..., Any]) -> Callable[..., None]:
    def guide(x, y=None, **static):
        scale = numpyro.param("scale", 1.0)
        numpyro.sample("w", dist.Normal(loc(x, **static), scale).to_event(1))

    return guide


@jax.jit
def column_means() -> Any:
    return jnp.mean(jnp.asarray(X), 0)


def held() -> Any:
    return jnp.asarray(X)


def means() -> Any:
    return jnp.asarray(X).mean(0)


def outcomes() -> Any:
    return jnp.asarray(Y)


# What the model holds.


def with_slope(fn: Any, slope: Callable[[Any], Any]) -> Any:
    fn = jax.custom_jvp(fn)
    fn.defjvp(lambda primals, tangents: (fn(*primals), slope(primals[0]) @ tangents[1]))
    return fn


def with_passes(forward: Any, backward: Any) -> Any:
    fn = jax.custom_vjp(dot)
    fn.defvjp(forward, backward)
    return fn


def with_rule_for_batches(rule: Callable[[Any], Any]) -> Any:
    centred = jax.custom_batching.custom_vmap(lambda x: x)
    centred.def_vmap(lambda size, batched, x: (rule(x), True))
    return lambda x, w: centred(x) @ w


def asked(fn: Callable[[], Any], *shape: int) -> Any:
    struct = jax.ShapeDtypeStruct(shape, jnp.float32)
    return jax.pure_callback(fn, struct, vmap_method="sequential")


def shown(show: Callable[[Any], Any]) -> Callable[..., Any]:
    return lambda x, w: (show(x[0]), x @ w)[1]


remembered = functools.lru_cache(held)
remembered()
SEEN: list[Any] = []
ORDER = np.arange(N)
ZEROS = np.zeros(N, np.float32)
NUMBERS = [float(number) for number in np.concatenate([Y, X[:, 0]])]
ONE_BY_ONE = "single numbers in its program"


def cosines(w: Any) -> Any:
    return sum(jnp.cos(w) * number for number in NUMBERS)


def scan_over_records(x: Any, w: Any) -> Any:
    return x @ w - lax.scan(lambda s, row: (s + row @ w, None), 0.0, held())[0] / N


def jitted_branch_in_a_scan(x: Any, w: Any) -> Any:
    def body(carry, _):
        return carry + lax.cond(w[0] > 0, column_means, lambda: jnp.zeros(D)), None

    return (x - lax.scan(body, jnp.zeros(D), None, 2)[0]) @ w


def basis(points: Any) -> Callable[..., Any]:
    return lambda x, w: jnp.exp(-0.5 * jnp.square(x[:, None] - jnp.asarray(points)).sum(-1)) @ w


PROGRAMS: dict[tuple[str, ...], dict[str, Callable[..., Any]]] = {
    ("(60, 3)", "public="): {
        "a_jitted_helper_standardises": lambda x, w: (
            jax.jit(lambda x: (x - means()) / held().std(0))(x) @ w
        ),
        "a_jitted_helper_two_levels_down": lambda x, w: (
            jax.jit(lambda x: x - jax.jit(lambda: column_means())())(x) @ w
        ),
        "a_custom_derivative": with_slope(lambda x, w: (x - means()) @ w, lambda x: x),
        "the_rule_of_a_custom_derivative": with_slope(dot, lambda x: x + means()),
        "the_backward_rule_of_a_custom_derivative": with_passes(lambda x, w: (x @ w, x),
            lambda x, slope: (jnp.zeros_like(x), slope @ x + means())),
        "the_forward_rule_of_a_custom_derivative": with_passes(
            lambda x, w: (x @ w + held().mean(), x), lambda x, slope: (jnp.zeros_like(x), slope @ x)
        ),
        "a_scan_over_the_records": scan_over_records,
        "the_body_of_a_scan": lambda x, w: (
            x @ w + lax.scan(lambda s, _: (s + held().mean(), None), 0.0, None, 2)[0]
        ),
        "a_branch_of_cond": lambda x, w: (
            x @ w + lax.cond(w[0] > 0, lambda: held().mean(), lambda: 0.0)
        ),
        "a_mapped_helper": lambda x, w: jax.vmap(lambda row: (row - means()) @ w)(x),
        "a_checkpointed_helper": jax.checkpoint(lambda x, w: (x - means()) @ w),
        "a_jitted_branch_in_a_scan_in_a_checkpoint": jax.checkpoint(jitted_branch_in_a_scan),
        "an_iterative_solver": lambda x, w: (
            x @ jax.scipy.sparse.linalg.cg(lambda v: held().T @ (held() @ v) + v, w)[0]
        ),
        "a_remembered_helper": lambda x, w: (x - remembered().mean(0)) @ w,
        "an_argument_that_is_captured_too": lambda x, w: (x - means()) @ w,
    },
    ("(60,)", "public="): {
        "a_vectorised_helper": jnp.vectorize(lambda row, w: row @ w + outcomes().mean(),
            signature="(d),(d)->()"),
        "a_branch_of_switch": lambda x, w: x @ w + lax.switch(
            jnp.int32(w[0] > 0), [lambda: 0.0, lambda: outcomes().mean(), lambda: 1.0]
        ),
        "the_body_of_a_while_loop": lambda x, w: x @ w + lax.while_loop(
            lambda s: s[0] < N, lambda s: (s[0] + 1, s[1] + outcomes()[s[0]]), (0, 0.0)
        )[1],
        "the_condition_of_a_while_loop": lambda x, w: x @ w + lax.while_loop(
            lambda s: s < 10 * jnp.abs(outcomes()).max(), lambda s: s + 1.0, 0.0
        ),
        "the_body_of_a_counted_loop": lambda x, w: (
            x @ w + lax.fori_loop(0, N, lambda i, s: s + outcomes()[i], 0.0)
        ),
    },
    ("(60,)", "60 entries", "public="): {
        "a_column_of_zeros_of_numpy": lambda x, w: x @ w + jnp.asarray(ZEROS).mean(),
        "numbers_of_the_records": lambda x, w: x @ w + jnp.asarray(ORDER).mean(),
    },
    ("vmap",): {
        "a_rule_for_batches_that_mixes_records": with_rule_for_batches(
            lambda x: x - 50 * x[..., 0].mean()
        ),
        "a_rule_for_batches_that_holds_records": with_rule_for_batches(lambda x: x - means()),
    },
    ("callback",): {
        "a_pure_callback_in_the_model": lambda x, w: x @ w + asked(lambda: X.mean()),
        "an_io_callback_in_the_model": lambda x, w: (
            x @ w + io_callback(lambda: X.mean(), jax.ShapeDtypeStruct((), jnp.float32))
        ),
        "a_record_shown_by_a_callback": shown(lambda row: jax.debug.callback(SEEN.append, row)),
        "a_record_printed": shown(lambda row: jax.debug.print("{}", row)),
        "a_callback_in_a_jitted_scan": jax.jit(lambda x, w: x @ w + lax.scan(
            lambda s, _: (s, jax.debug.callback(lambda value: None, x[0])), 0.0, None, 2
        )[0]),
    },
    (ONE_BY_ONE, "At most 25 are allowed", "public=[array]"): {
        "records_written_out_by_a_loop_over_a_list": lambda x, w: x @ w + cosines(w[0]),
    },
    (ONE_BY_ONE,): {
        "records_returned_by_branches": lambda x, w: x @ w + lax.switch(
            x[:, 0].astype(int)[0], [lambda number=number: number for number in NUMBERS]
        ),
        "records_written_out_by_a_loop_in_a_compiled_helper": lambda x, w: (
            x @ w + jax.jit(cosines)(w[0])
        ),
    },
}  # fmt: skip
for _parts, _locs in PROGRAMS.items():
    refuse({name: lambda loc=loc: svi(located(loc), X, Y) for name, loc in _locs.items()}, *_parts)

COPIES = {
    "without_one_record": X[1:], "with_padding": np.pad(X, ((0, 4), (0, 0))), "transposed": X.T,
    "flattened": X.ravel(), "reshaped": X.reshape(30, 6),
}  # fmt: skip
with_summary = located(lambda x, w, other: x @ w + jnp.asarray(other).mean())
for _name, _copy in COPIES.items():
    refuse({f"a_captured_copy_{_name}": lambda copy=_copy: svi(
        located(lambda x, w: x @ w + jnp.asarray(copy).mean()), X, Y
    )}, str(_copy.shape), "public=")  # fmt: skip
    refuse({f"a_copy_{_name}": lambda copy=_copy: svi(with_summary, X, Y, copy)},
           "args[2]", str(_copy.shape), "public=")  # fmt: skip

with_table = located(lambda x, w, table: (x - jnp.asarray(table).mean(0)) @ w)


class Holder:
    def __init__(self, table):
        self.table = table

    def __call__(self, x, y=None):
        with_table(x, y, self.table)


def subsampled(x, y):
    w = weights()
    with numpyro.plate("records", x.shape[0], subsample_size=10):
        rows, own = numpyro.subsample(held(), event_dim=1), numpyro.subsample(y, event_dim=0)
        numpyro.sample("y", dist.Normal(rows @ w, 1), obs=own)


PRIOR = dist.Normal(outcomes(), 1)


class Above(dist.constraints.Constraint):
    """A support above the least outcome: densities read it where NumPyro validates."""

    event_dim = 0

    def __init__(self, column):
        self.column = column

    def __call__(self, x):
        return x > self.column.min()

    def tree_flatten(self):  # older NumPyro has no default
        return (self.column,), (("column",), {})


class Bounded(dist.Normal):
    support = Above(outcomes())


refuse({
    "a_partial_model": lambda: svi(functools.partial(with_table, table=X), X, Y),
    "a_partial_tree": lambda: svi(
        jax.tree_util.Partial(lambda table, x, y=None: with_table(x, y, table), X), X, Y
    ),
    "a_callable_object": lambda: svi(Holder(held()), X, Y),
    "a_default_argument": lambda: svi(lambda x, y=None, table=X: with_table(x, y, table), X, Y),
    "a_prior_at_captured_means": lambda: svi(located(prior=lambda: dist.Normal(column_means(), 1)),
        X, Y),
    "an_object_that_holds_records": lambda: svi(
        located(lambda x, w, study: (x - jnp.mean(study.table, 0)) @ w), X, Y, Holder(X)
    ),
}, "(60, 3)", "public=")  # fmt: skip
refuse({
    "records_by_substitute": lambda: svi(
        handlers.substitute(
            located(lambda x, w: (x - numpyro.param("table", jnp.zeros((1, D))).mean(0)) @ w),
            {"table": held()},
        ), X, Y
    ),
    "a_parameter_that_starts_at_the_records": lambda: svi(
        located(lambda x, w: (x - numpyro.param("table", held()).mean(0)) @ w), X, Y
    ),
}, "(60, 3)")  # fmt: skip
refuse({
    "a_basis_centred_at_every_record": lambda: svi(located(basis(X), N), X, Y),
    "records_by_condition": lambda: svi(handlers.condition(regression, {"y": outcomes()}), X),
    "weights_of_the_records_by_scale": lambda: svi(handlers.scale(regression, jnp.abs(outcomes())),
        X, Y),
    "a_mask_of_the_records": lambda: svi(handlers.mask(regression, mask=outcomes() > 0), X, Y),
    "a_prior_at_every_record": lambda: svi(located(lambda x, w: w.mean(), prior=lambda: PRIOR), X,
        Y),
    "a_subsample_of_captured_records": lambda: svi(subsampled, X, Y),
}, "60")  # fmt: skip
refuse({"a_basis_centred_at_forty_records": lambda: svi(located(basis(X[:40]), 40), X, Y)},
       "(40, 3)", "public=")  # fmt: skip
refuse(
    {"a_support_that_holds_a_column": lambda: svi(
        located(likelihood=lambda eta: Bounded(eta, 1)), X, Y
    )}, "(60,)", "public=",
)  # fmt: skip
refuse(
    {"a_factor_outside_the_plate_that_holds_records": lambda: svi(located(
        outside=lambda w, *_: numpyro.factor("prior", -jnp.sum((outcomes() - held() @ w) ** 2))
    ), X, Y)}, "(60", "public=",
)  # fmt: skip


def summed(arrays: Any, x: Any = X, y: Any = Y) -> Call:
    return svi(located(lambda x, w: x @ w + sum(jnp.asarray(a).sum() for a in arrays)), x, y)


def larger(number: int) -> Any:
    rng = np.random.default_rng(1)
    return [rng.normal(size=shape).astype(np.float32) for shape in ((number, D), number)]


FEW, MANY = larger(200), larger(400)
# Arrays of equal values are counted one by one, and whether records are all alike does not matter.
SUMMED: dict[tuple[str, ...], dict[str, Callable[[], Any]]] = {
    ("(5,)", "20 entries", "At most 15"): {
        "many_small_captured_arrays": lambda: [*held()[:20].reshape(12, 5)],
    },
    ("()", "16 entries"): {
        "a_column_as_arrays_without_an_axis": lambda: [jnp.asarray(value) for value in Y],
    },
    ("(2,)", "16 entries"): {
        "a_column_as_arrays_of_equal_entries": lambda: [jnp.full(2, value) for value in Y],
        "a_column_of_two_values_as_many_arrays": lambda: [
            jnp.full(2, int(label)) for label in LABELS
        ],
        "a_column_of_two_values_as_many_arrays_of_numpy": lambda: [np.full(2, i) for i in LABELS],
    },
    ("(2, 2)", "16 entries"): {
        "a_column_as_scaled_identities": lambda: [value * jnp.eye(2) for value in Y],
    },
    ("(60,)", "60 entries"): {"a_column_of_records_that_are_all_alike": lambda: [jnp.ones(N)]},
}
for _parts, _arrays in SUMMED.items():
    _rows = {name: lambda make=make: summed(make()) for name, make in _arrays.items()}
    refuse(_rows, *_parts, "public=")
refuse(
    {"inducing_points_that_are_every_fourth_record": lambda: svi(
        located(basis(MANY[0][::4]), 100), *MANY
    )},
    "(100, 3)", "300 entries", "At most 100", "public=",
)  # fmt: skip
refuse(
    {"a_column_reshaped_among_few_records": lambda: summed([FEW[1].reshape(100, 2)], *FEW)},
    "(100, 2)", "200 entries", "public=",
)  # fmt: skip


# What the guide holds.


class Shifted(AutoDiagonalNormal):
    def _get_posterior(self):
        posterior = super()._get_posterior()
        return dist.Normal(posterior.loc + column_means(), posterior.scale)


class Publishing(AutoNormal):
    def __call__(self, *args, **kwargs):
        numpyro.param("table", held())
        return super().__call__(*args, **kwargs)


with_intercept = located(lambda x, w: x @ w + numpyro.sample("b", dist.Normal(0, 1)))


def listed_guides(model: Any, *parts: Any) -> AutoGuideList:
    guide = AutoGuideList(model)
    for part in parts:
        guide.append(part)
    return guide


def by_guide(guide: Any, **options: Any) -> Callable[[], Call]:
    return lambda: svi(regression, X, Y, guide=guide, **options)


BUDGET = {"budget": PrivacyBudget(0.01, 1e-5), "noise_multiplier": None, "num_steps": 2}
refuse({
    "a_jitted_helper_of_the_guide": by_guide(guided(column_means)),
    "the_body_of_a_scan_of_the_guide": by_guide(guided(
        lambda: lax.scan(lambda s, _: (s + means(), None), jnp.zeros(D), None, 1)[0]
    )),
    "a_guide_that_publishes_captured_means": by_guide(guided(column_means), **BUDGET),
    "a_partial_guide": by_guide(functools.partial(
        drawn(lambda x, table: numpyro.param("loc", jnp.zeros(D)) + table.mean(0)), table=held()
    )),
    "a_subclass_of_an_automatic_guide_that_shifts_its_posterior": by_guide(Shifted),
    "a_hand_written_part_of_a_list": lambda: svi(with_intercept, X, Y, guide=listed_guides(
        with_intercept, AutoNormal(handlers.block(with_intercept, hide=["w"])),
        guided(column_means),
    )),
}, "(60, 3)", "public=")  # fmt: skip
refuse({
    "a_parameter_of_the_guide_that_starts_at_the_records": by_guide(
        drawn(lambda x: numpyro.param("table", held()).mean(0))
    ),
    "a_subclass_of_an_automatic_guide_that_adds_a_parameter": by_guide(Publishing),
}, "(60, 3)")  # fmt: skip
refuse(
    {"a_callback_in_the_guide": by_guide(guided(lambda: asked(lambda: X.mean(0), D)))}, "callback"
)
refuse(
    {"a_guide_that_publishes_column_means": by_guide(drawn(lambda x: x.mean(0)), **BUDGET)},
    "'w'", "depends on the records",
)  # fmt: skip


# Where a run starts.


def starting_at(value: Callable[[], Any]) -> Callable[..., Any]:
    def start(site=None):
        if site is None:
            return functools.partial(start)
        if site["type"] == "sample" and not site["is_observed"]:
            return value()
        return init_to_median(site)

    return start


class Start:
    def __init__(self, means):
        self.means = means

    def __call__(self, site=None):
        return functools.partial(self) if site is None else starting_at(lambda: self.means)(site)


class Study:
    means = X.mean(0)


class Starting(AutoDiagonalNormal):
    def _setup_prototype(self, *args, **kwargs):
        super()._setup_prototype(*args, **kwargs)
        self._init_latent = means()


STUDY = types.ModuleType("study")
STUDY.means = X.mean(0)
IN_CLOSURE = (lambda found: starting_at(lambda: found))(means())
AT_MEANS = init_to_value(values={"w": X.mean(0)})


def started(strategy: Any, guide: Any = AutoNormal, model: Any = regression) -> Callable[[], Call]:
    args = (X, Y) if model is regression else (Y,)
    return lambda: svi(model, *args, guide=guide(model, init_loc_fn=strategy))


refuse({
    "a_start_at_the_means": started(AT_MEANS),
    "a_start_at_the_means_as_arrays_of_jax": started(
        functools.partial(init_to_value, values={"w": means()}), AutoDiagonalNormal
    ),
    "a_start_in_a_closure": started(IN_CLOSURE),
    "a_start_in_an_object": started(Start(X.mean(0))),
    "a_start_in_the_attribute_of_a_class": started(starting_at(lambda: Study.means)),
    "a_start_in_a_module": started(starting_at(lambda: STUDY.means)),
    "a_subclass_of_an_automatic_guide_that_starts_at_the_means": by_guide(Starting),
    "a_start_in_a_part_of_a_list": lambda: svi(regression, X, Y,
        guide=listed_guides(regression, AutoNormal(regression, init_loc_fn=AT_MEANS))),
    "a_start_at_one_number_in_an_array": started(init_to_value(values={"mean": outcomes().mean()}),
        model=one_mean),
    "a_chain_that_starts_at_the_means": lambda: mcmc(SGLD(regression, 1e-3, init_strategy=AT_MEANS),
        X, Y),
    "a_chain_with_momentum_that_starts_in_a_closure": lambda: mcmc(
        SGHMC(regression, 1e-3, init_strategy=IN_CLOSURE), X, Y
    ),
}, "init_params=")  # fmt: skip


# Folds, optimisers and estimators.


RATES = jax.nn.sigmoid(outcomes())


def folded(
    update: Any = lambda s, params: s, init: Any = lambda params: jnp.zeros(D),
    final: Any = lambda s: s,
) -> Callable[[], Call]:  # fmt: skip
    return lambda: svi(regression, X, Y)._replace(run={"fold": Fold(init, update, final)})


def add_records(updates, state, params=None):
    return jax.tree.map(lambda leaf: -leaf + held().mean(), updates), state


def adds_afterwards(problem):
    plain = aligned()(problem)

    def pull_back(public, released):
        shift = held().mean()
        return jax.tree.map(lambda leaf: leaf + shift, plain.pull_back(public, released))

    return plain._replace(pull_back=pull_back)


refuse({
    "a_fold_that_adds_records": folded(lambda s, params: s + means()),
    "a_fold_with_a_jitted_helper": folded(lambda s, params: s + column_means()),
    "a_fold_that_starts_at_the_records": folded(init=lambda params: held()),
    "a_fold_that_ends_with_the_records": folded(final=lambda s: (s, held())),
}, "fold", "(60, 3)")  # fmt: skip
refuse({"a_fold_that_asks_the_host": folded(
    lambda s, params: s + jax.pure_callback(
        lambda: X.mean(0), jax.ShapeDtypeStruct((D,), jnp.float32)
    )
)}, "callback")  # fmt: skip
refuse({
    "an_optimiser_that_adds_records": lambda: svi(regression, X, Y,
        optim=optax.GradientTransformation(lambda params: (), add_records)),
    "an_optimiser_that_starts_with_records": lambda: svi(
        regression, X, Y, optim=optax.GradientTransformation(
            lambda params: held(), lambda updates, state, params=None: (updates, state)
        ),
    ),
    "an_estimator_that_adds_records_afterwards": lambda: svi(regression, X, Y,
        estimator=adds_afterwards),
}, "(60, 3)")  # fmt: skip
refuse({
    "a_step_size_looked_up_in_records": lambda: svi(regression, X, Y,
        optim=optax.sgd(lambda step: RATES[step])),
    "a_step_size_of_a_sampler_looked_up_in_records": lambda: mcmc(
        SGLD(regression, lambda step: 1e-3 * RATES[step]), X, Y
    ),
    "a_damping_looked_up_in_records": lambda: sep(logistic, X, LABELS,
        damping=lambda step: RATES[step]),
}, "(60,)")  # fmt: skip


# Arguments.

listed = located(lambda x, w: jnp.stack(list(x)) @ w)  # a list of rows
slope_of_numbers = located(lambda x, w: w * jnp.asarray(x), 1)


def visits(x, y, patients, patient_of):
    w, v = weights(), numpyro.sample("v", dist.Normal(0, 1).expand([2]).to_event(1))
    with numpyro.plate("visits", x.shape[0]):
        numpyro.sample("y", dist.Normal(x @ w + patients[patient_of] @ v, 1), obs=y)


BY_PATIENT = {"patients": PATIENTS, "patient_of": PATIENT_OF}


def with_second_table(x, y, other):
    factor = located(outside=lambda w, *_: numpyro.factor("other", -jnp.sum((other @ w[:2]) ** 2)))
    factor(x, y)


kernel_regression = located(lambda k, w: w * k.reshape(k.shape[0], -1).mean(-1), 1)


def panel(people: int, times: int, people_dim: int) -> Callable[..., None]:
    def model(y):
        level = numpyro.sample("level", dist.Normal(0, 1))
        with (
            numpyro.plate("people", people, dim=people_dim),
            numpyro.plate("time", times, dim=-3 - people_dim),
        ):
            numpyro.sample("y", dist.Normal(level, 1), obs=y)

    return model


TIME_FIRST = np.tile(Y, (12, 1))


def read_through_an_index(values, first, x):
    level = numpyro.sample("level", dist.Normal(0, 1))
    with numpyro.plate("people", x.shape[0]):
        rows = jax.vmap(lambda at: lax.dynamic_slice(values, (at,), (5,)))(first)
        numpyro.factor("y", dist.Normal(level, 1).log_prob(rows).sum(-1))


def summed_by_person(values, people, x):
    level = numpyro.sample("level", dist.Normal(0, 1))
    total = jax.ops.segment_sum(dist.Normal(level, 1).log_prob(values), people, 200)
    with numpyro.plate("people", 200) as index:
        numpyro.factor("y", total[index] + 0 * x)


SHORT = np.random.default_rng(2).normal(size=200).astype(np.float32)
refuse({
    "a_list_of_rows": lambda: svi(listed, [jnp.asarray(row) for row in X], Y),
    "a_tuple_of_rows": lambda: svi(listed, tuple(X), Y),
    "a_dict_of_rows": lambda: svi(lambda rows, y: listed(list(rows.values()), y),
        {f"person {i}": row for i, row in enumerate(X)}, Y),
}, "args[0]", "(3,)")  # fmt: skip
refuse({"a_list_of_single_numbers": lambda: svi(slope_of_numbers, [*outcomes()], Y)}, "60")
refuse({"a_list_of_python_numbers": lambda: svi(slope_of_numbers, Y.tolist(), Y)},
       "60 Python numbers")  # fmt: skip
refuse({"a_table_of_patients": lambda: svi(visits, X, Y, PATIENTS, PATIENT_OF)},
       "args[2]", "(25, 2)", "public=", "record")  # fmt: skip
refuse({"a_table_of_patients_by_keyword": lambda: svi(visits, X, Y)._replace(kwargs=BY_PATIENT)},
       "kwargs['patients']", "(25, 2)", "public=", "record")  # fmt: skip
refuse({
    "a_table_of_patients_in_a_dict": lambda: svi(
        lambda x, y, tables: visits(x, y, **tables), X, Y, BY_PATIENT
    ),
    "a_second_table_in_a_factor_outside": lambda: svi(with_second_table, X, Y, PATIENTS),
}, "args[2]", "(25, 2)", "public=")  # fmt: skip
refuse({"the_records_in_a_factor_outside": lambda: svi(with_second_table, X, Y, X[:, :2])},
       "'other'", "outside the data plate")  # fmt: skip
refuse({"a_record_observed_outside": lambda: svi(
    located(outside=lambda w, x, y: numpyro.sample("first", dist.Normal(w[0], 1), obs=y[0])), X, Y,
    data_plate="records",
)}, "'first'", "outside the data plate")  # fmt: skip
refuse({"column_means_as_an_argument": lambda: svi(with_summary, X, Y, X.mean(0))},
       "args[2]", "(3,)", "public=")  # fmt: skip
refuse({"a_gram_matrix": lambda: svi(kernel_regression, GRAM, Y)},
       "args[0]", "(60, 60)", "data_plate=", "public=")  # fmt: skip
refuse({"a_stack_of_gram_matrices": lambda: svi(kernel_regression, np.stack([GRAM] * 4, 1), Y)},
       "args[0]", "(60, 4, 60)", "data_plate=", "public=")  # fmt: skip
refuse({
    "a_panel_with_time_first": lambda: svi(panel(N, 12, -1), TIME_FIRST),
    "a_panel_with_people_first": lambda: svi(panel(N, 4, -2), PANEL),
}, "data_plate=")  # fmt: skip
refuse({"a_panel_with_time_first_whose_records_are_people": lambda: svi(
    panel(N, 12, -1), TIME_FIRST, data_plate="people"
)}, "args[0]", "(12, 60)")  # fmt: skip
refuse({
    "a_long_table_read_through_an_index": lambda: svi(read_through_an_index, LONG,
        np.arange(200) * 5, SHORT),
    "a_long_table_summed_by_person": lambda: svi(summed_by_person, LONG,
        np.random.default_rng(2).integers(0, 200, 1003), SHORT),
}, "args[0]", "(1003,)", "public=")  # fmt: skip


# Other drivers.


def components(*args: Any, **kwargs: Any) -> Call:
    return Call(DPEM, {"num_components": 2} | NOISY, args, kwargs)


def network(*args: Any, **kwargs: Any) -> Call:
    return Call(DPPBP, {"network": RegressionNetwork((4,))} | NOISY, args, kwargs)


refuse({
    "a_jitted_helper_under_message_passing": lambda: sep(
        located(lambda x, w: (x - column_means()) @ w, likelihood=bernoulli), X, LABELS
    ),
    "a_scan_in_a_sampler": lambda: mcmc(SGLD(located(scan_over_records), 1e-3), X, Y),
}, "(60, 3)", "public=")  # fmt: skip
refuse({
    "a_table_of_patients_under_message_passing": lambda: sep(visits, X, Y, PATIENTS, PATIENT_OF),
    "a_table_of_patients_in_a_sampler": lambda: mcmc(SGLD(visits, 1e-3), X, Y, PATIENTS,
        PATIENT_OF),
}, "args[2]", "(25, 2)", "public=")  # fmt: skip
refuse({"a_gram_matrix_under_message_passing": lambda: sep(kernel_regression, GRAM, Y)},
       "args[0]", "(60, 60)", "data_plate=", "public=")  # fmt: skip
refuse({
    "a_callback_under_message_passing": lambda: sep(
        located(shown(lambda row: jax.debug.callback(lambda value: None, row))), X, Y
    ),
    "a_callback_in_a_sampler": lambda: mcmc(
        SGHMC(located(shown(lambda row: jax.debug.print("{}", row))), 1e-3), X, Y
    ),
}, "callback")  # fmt: skip
refuse({"a_panel_in_a_sampler": lambda: mcmc(SGLD(panel(N, 4, -2), 1e-3), PANEL)}, "data_plate=")
refuse({
    "a_second_table_beside_a_mixture": lambda: components(X, PATIENTS),
    "a_list_of_rows_for_a_mixture": lambda: components(list(X)),
}, "one array")  # fmt: skip
refuse({"a_network_with_too_few_outcomes": lambda: network(X, Y[1:])}, "(59,)")
refuse({
    "a_network_with_a_third_table": lambda: network(X, Y, PATIENTS),
    "a_network_with_a_list_of_rows": lambda: network(list(X), Y),
})  # fmt: skip


# Accepted, and safe.


def in_plate(add: Callable[..., Any]) -> Callable[..., None]:
    """A regression whose plate has what ``add(mean, *columns)`` adds."""

    def model(x, *columns):
        w = weights()
        with numpyro.plate("records", x.shape[0]):
            add(x @ w, *columns)

    return model


factor_in_the_plate = in_plate(lambda mean, y: numpyro.factor("y", -0.5 * jnp.square(y - mean)))


def subsampled_by_index(x, y):
    w = weights()
    with numpyro.plate("records", x.shape[0], subsample_size=10) as index:
        numpyro.sample("y", dist.Normal(x[index] @ w, 1), obs=y[index])


def with_matrix(x, y, k):
    located(prior=lambda: dist.Normal(0, 1 + jnp.trace(k)).expand([D]))(x, y)


def with_earlier(x, y, earlier):
    w = weights()
    with numpyro.plate("earlier", earlier.shape[0]):
        numpyro.sample("earlier_y", dist.Normal(w[0], 1), obs=earlier)
    with numpyro.plate("records", x.shape[0]):
        numpyro.sample("y", dist.Normal(x @ w, 1), obs=y)


def two_outcomes(mean, y, z):
    numpyro.sample("y", normal(mean), obs=y)
    numpyro.sample("z", bernoulli(mean), obs=z)


def weighted_and_masked(mean, y, weight, known):
    with handlers.scale(scale=weight):
        numpyro.sample("y", normal(mean).mask(known), obs=y)


def optimised(x, y):
    w = numpyro.param("w", jnp.zeros(D))
    with numpyro.plate("records", x.shape[0]):
        numpyro.sample("y", dist.Normal(x @ w, 1), obs=y)


coins = of(dist.Bernoulli, probs=dist.Beta(1.0, 1.0))
BY_MONTH = np.linspace(-1, 1, 12).astype(np.float32)
EYE = np.eye(N, dtype=np.float32)
COLUMNS = {"x": X, "y": Y, "not read": np.zeros((N, 2, 5), np.float32)}
SAFE: dict[str, Callable[[], Call]] = {
    "a_deterministic_site_in_the_plate": lambda: delta(
        located(likelihood=lambda eta: normal(numpyro.deterministic("mean", eta))), X, Y
    ),
    "a_deterministic_site_of_all_records": lambda: delta(
        located(lambda x, w: numpyro.deterministic("mean", x @ w)), X, Y
    ),
    "a_factor_in_the_plate": lambda: delta(factor_in_the_plate, X, Y),
    "a_subsample_by_index": lambda: delta(subsampled_by_index, X, Y),
    "a_panel_whose_records_are_people": lambda: of_records((0,),
        delta(panel(N, 4, -2), PANEL, data_plate="people")),
    "a_panel_whose_records_are_times": lambda: of_records((0,),
        delta(panel(N, 12, -1), TIME_FIRST, data_plate="time")),
    "a_gram_matrix_by_rows": lambda: delta(kernel_regression, GRAM, Y, data_plate="records"),
    "a_public_matrix_with_rows_and_columns_of_records": lambda: delta(with_matrix, X, Y, EYE,
        public=["k"]),
    "a_public_table_of_patients": lambda: of_records((0, 1, 3),
        delta(visits, X, Y, PATIENTS, PATIENT_OF, public=["patients"])),
    "a_public_table_in_a_factor_outside": lambda: delta(with_second_table, X, Y, PATIENTS,
        public=["other"]),
    "a_public_table_observed_outside": lambda: delta(with_earlier, X, Y, LONG[:9],
        public=["earlier"], data_plate="records"),
    "a_static_table": lambda: delta(with_table, X, Y, table=X.copy()),
    "a_soft_constraint_outside": lambda: delta(
        located(outside=lambda w, *_: numpyro.factor("one", -50 * jnp.square(w.sum() - 1))), X, Y
    ),
    "a_small_table_looked_up_by_a_column": lambda: of_records((0, 1, 2),
        delta(located(lambda x, w, month: x @ w + jnp.asarray(BY_MONTH)[month]), X, Y, ORDER % 12)),
    "several_observed_sites": lambda: of_records((0, 1, 2),
        delta(in_plate(two_outcomes), X, Y, LABELS)),
    "a_weight_and_a_mask_in_each_record": lambda: of_records((0, 1, 2, 3),
        delta(in_plate(weighted_and_masked), X, Y, np.abs(Y), LABELS > 0)),
    "a_dict_of_columns": lambda: of_records((0,),
        delta(lambda columns: regression(columns["x"], columns["y"]), COLUMNS)),
    "parameters_of_the_model": lambda: svi(optimised, X, Y, guide=lambda x, y=None: None),
    "a_helper_whose_rule_holds_little": lambda: delta(
        located(with_slope(dot, lambda x: x * jnp.asarray([2.0])[0])), X, Y
    ),
    "a_sampler_with_a_public_table": lambda: of_records((0, 1, 3),
        mcmc(SGLD(visits, 1.0), X, Y, PATIENTS, PATIENT_OF, public=["patients"])),
    "a_sampler_of_a_panel": lambda: of_records((0,),
        mcmc(SGLD(panel(N, 4, -2), 1.0), PANEL, data_plate="people")),
    "message_passing_with_a_static_offset": lambda: sep(
        located(lambda x, w, offset: x @ w + jnp.mean(offset), likelihood=bernoulli),
        X, LABELS, offset=np.ones(2, np.float32),
    ),
    "message_passing_of_counts": lambda: of_records((0,),
        sep(coins, LABELS, family={"probs": beta()})),
}  # fmt: skip


def of_records(places: tuple[int, ...], call: Call) -> Call:
    return call._replace(records=places)


HOSTILE.extend(Row(name, build, None) for name, build in SAFE.items())
