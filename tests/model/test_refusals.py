"""What cannot be private is refused, with the name of the site and the remedy."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from flat import grouped
from hostile import drawn, weights
from numpyro import infer
from numpyro.contrib.control_flow import scan
from numpyro.distributions import constraints
from numpyro.infer.autoguide import (
    AutoDAIS,
    AutoDelta,
    AutoDiagonalNormal,
    AutoGuideList,
    AutoLaplaceApproximation,
    AutoNormal,
    AutoSemiDAIS,
)
from numpyro.primitives import mutable

from numpyro_dp import DPSVI, UnsupportedModelError
from numpyro_dp.estimators import aligned
from numpyro_dp.samplers import FullBatch

N, D = 12, 3
X = np.random.default_rng(0).normal(size=(N, D)).astype(np.float32)
Y = np.random.default_rng(1).normal(size=N).astype(np.float32)


def model_of(draw: Callable[..., Any], likelihood: Any = None) -> Callable[..., None]:
    """A model of ``draw(x, y)`` before the plate, and ``likelihood(x, drawn, index)`` inside it."""

    def model(x, y):
        found = draw(x, y)
        with numpyro.plate("records", x.shape[0]) as index:
            fn = likelihood(x, found, index) if likelihood else dist.Normal(x @ found, 1)
            numpyro.sample("y", fn, obs=y)

    return model


def prior_of(prior: Callable[[Any], Any]) -> Callable[..., Any]:
    return lambda x, y: numpyro.sample("w", prior(y).expand([D]).to_event(1))


def after(outside: Callable[..., Any]) -> Callable[..., None]:
    """A regression with something before its plate."""

    def draw(x, y):
        w = weights()
        outside(w, x, y)
        return w

    return model_of(draw)


def effects(number: int) -> Any:
    return numpyro.sample("effect", dist.Normal(0, 1).expand([number]).to_event(1))


def normal(name: str) -> Any:
    return numpyro.sample(name, dist.Normal(0, 1))


good = model_of(lambda x, y: weights())
scalar_mean = model_of(lambda x, y: normal("mean"), lambda x, mean, _: dist.Normal(mean, 1))


def sum_of_squares(w, x, y):
    numpyro.factor("sum_of_squares", -jnp.sum((y - x @ w) ** 2))


def observed_columns(w, x, y):
    with numpyro.plate("columns", D):
        numpyro.sample("mean", dist.Normal(w, 1), obs=x.mean(0))


def indexed_closure(x, y=None):
    w = weights()
    with numpyro.plate("records", x.shape[0]) as index:
        numpyro.sample("y", dist.Normal(x @ w, 1), obs=jnp.asarray(Y)[index])


def batch_norm(x, y):
    mean = mutable("running_mean", {"value": jnp.zeros(D)})
    mean["value"] = 0.9 * mean["value"] + 0.1 * x.mean(0)
    good(x - mean["value"], y)


def two_plates(x, y):
    w = weights()
    for plate, name in (("first", "y"), ("second", "z")):
        with numpyro.plate(plate, x.shape[0]):
            numpyro.sample(name, dist.Normal(x @ w, 1), obs=y)


def unobserved(x, y):
    w = weights()
    with numpyro.plate("records", x.shape[0]):
        numpyro.deterministic("y", x @ w)


def later_axis(x, y):
    w = weights()
    with numpyro.plate("records", y.shape[0]):
        numpyro.sample("y", dist.Normal(w @ x, 1), obs=y)


def with_batches(*columns):
    mean = normal("mean")
    with numpyro.plate("records", N, subsample_size=4):
        numpyro.sample("y", dist.Normal(mean, 1), obs=columns[-1])


def dynamic_support(x, y):
    top = numpyro.sample("top", dist.LogNormal(0, 1))
    return numpyro.sample("width", dist.Uniform(0, top))


def guide_with_unknown_site(x, y):
    numpyro.sample("v", dist.Normal(numpyro.param("loc", 0.0), 1.0))
    numpyro.sample("w", dist.Normal(jnp.zeros(D), 1.0).to_event(1))


def guide_not_reparameterised(x, y):
    p = numpyro.param("p", 0.5, constraint=constraints.unit_interval)
    flip = numpyro.sample("flip", dist.Bernoulli(p), infer={"is_auxiliary": True})
    numpyro.sample("w", dist.Normal(flip * jnp.ones(D), 1.0).to_event(1))


def guide_with_mutable(x, y):
    count = mutable("count", {"value": jnp.zeros(())})
    count["value"] = count["value"] + 1
    numpyro.sample("w", dist.Normal(numpyro.param("loc", jnp.zeros(D)), 1.0).to_event(1))


def driver(model: Any, guide: Any = None, loss: Any = None, **options: Any) -> DPSVI:
    settings = dict(estimator=aligned(), clip_norm=1.0, sampler=FullBatch(), noise_multiplier=1.0)
    guide = AutoNormal(model) if guide is None else guide
    return DPSVI(model, guide, optax.adam(0.1), loss, **grouped(**settings | options))


def start(*args: Any, data: Any = (X, Y), **options: Any) -> Any:
    return driver(*args, **options).init(jax.random.key(0), *data)


MODELS: dict[str, tuple[Callable[..., Any], list[str]]] = {
    "observed_outside": (
        after(lambda w, x, y: numpyro.sample("first", dist.Normal(w[0], 1), obs=y[0])),
        ["'first'", "outside the data plate", "Put it inside numpyro.plate"],
    ),
    "observed_in_another_plate": (after(observed_columns),
        ["'mean': ('columns',)", "Put every observed site into one plate"]),
    "factor_outside": (after(sum_of_squares),
        ["'sum_of_squares'", "outside the data plate", "Put it inside"]),
    "only_a_factor_outside": (lambda x, y: sum_of_squares(weights(), x, y),
        ["'sum_of_squares'", "in no plate", "Put it inside numpyro.plate"]),
    "data_dependent_prior": (model_of(prior_of(lambda y: dist.Normal(y.mean(), 1))),
        ["prior of latent site 'w'", "static keywords"]),
    "data_dependent_support": (
        model_of(
            lambda x, y: numpyro.sample("top", dist.Uniform(0, jnp.abs(y).max())),
            lambda x, top, _: dist.Normal(0, top),
        ), ["prior of latent site 'top'", "static keywords"],
    ),
    "data_dependent_parameter": (model_of(lambda x, y: numpyro.param("w", jnp.ones(D) * y.mean())),
        ["parameter 'w'", "public values"]),
    "local_latent": (
        model_of(
            lambda x, y: weights(), lambda x, w, _: dist.Normal(x @ w + normal("error"), 1)
        ), ["'error'", "one parameter per record", "Integrate the site out"],
    ),
    "one_latent_per_record": (
        model_of(lambda x, y: effects(x.shape[0]), lambda x, effect, _: dist.Normal(effect, 1)),
        ["'effect'", "one parameter per record", "integrate it out"],
    ),
    "hard_coded_latents": (
        model_of(lambda x, y: effects(N), lambda x, effect, _: dist.Normal(effect, 1)),
        ["'y' has 12 values", "one entry per record"],
    ),
    "looked_up_latents": (
        model_of(lambda x, y: effects(N), lambda x, effect, index: dist.Normal(effect[index], 1)),
        ["'y' looks up", "index of plate 'records'", "column of the data"],
    ),
    "looked_up_parameter": (
        model_of(
            lambda x, y: (normal("w"), numpyro.param("effect", jnp.zeros(N))),
            lambda x, found, index: dist.Normal(found[0] + found[1][index], 1),
        ), ["'y' looks up", "index of plate 'records'", "column of the data"],
    ),
    "parameter_per_record": (
        model_of(
            lambda x, y: normal("w") + numpyro.param("effect", jnp.zeros(x.shape[0])),
            lambda x, mean, _: dist.Normal(mean, 1),
        ), ["'effect'", "one entry per record", "parameters of fixed shape"],
    ),
    "closure": (lambda x, y=None: good(x, Y),
        ["'y' has 12 values", "as an argument array with one row per record"]),
    "indexed_closure": (indexed_closure, ["'y' looks up", "Pass records as arguments"]),
    "summarised_closure": (
        model_of(
            lambda x, y: weights(), lambda x, w, _: dist.Normal(x @ w + jnp.asarray(Y).mean(), 1)
        ), ["array of shape (12,)", "Pass records as arguments", "static keyword"],
    ),
    "batch_norm": (batch_norm, ["'running_mean'", "group or layer norm"]),
    "discrete": (model_of(lambda x, y: weights() * numpyro.sample("sign", dist.Bernoulli(0.5))),
        ["'sign' is discrete", "MixtureSameFamily"]),
    "discrete_in_plate": (
        model_of(
            lambda x, y: weights(),
            lambda x, w, _: dist.Normal(w[numpyro.sample("which", dist.Poisson(0.5))], 1),
        ), ["'which' is discrete", "MixtureSameFamily"],
    ),
    "no_plate": (lambda x, y: numpyro.sample("y", dist.Normal(x @ weights(), 1).to_event(1), obs=y),
        ["'y' is in no plate", "Put it inside numpyro.plate"]),
    "two_plates": (two_plates, ["'y': ('first',)", "'z': ('second',)", "data_plate="]),
    "unobserved": (unobserved, ["observed site", "Pass the data so that obs= is not None"]),
    "not_indexed": (with_batches, ["'y' has 12 rows in plate 'records' of size 4", "index"]),
    "dynamic_support": (model_of(dynamic_support, lambda x, width, _: dist.Normal(0, width)),
        ["support of latent site 'width'", "Uniform(0, 1)", "by hand"]),
}  # fmt: skip

GUIDES: dict[str, tuple[Callable[..., Any], list[str]]] = {
    "guide_per_record": (
        drawn(lambda x: numpyro.param("rows", jnp.zeros(x.shape[0])).mean() + jnp.zeros(D)),
        ["Parameter 'rows'", "one entry per record", "parameters of fixed shape"],
    ),
    "guide_reads_data": (drawn(lambda x: x.mean(0)),
        ["Guide site 'w' depends on the records", "public arguments only"]),
    "guide_starts_at_data": (drawn(lambda x: numpyro.param("loc", x.mean(0))),
        ["'loc' depends on the records", "public arguments only"]),
    "guide_holds_data": (
        drawn(lambda x: numpyro.param("loc", jnp.zeros(D)) + jnp.asarray(X).mean(0)),
        ["guide holds an array of shape (12, 3)", "static keyword"],
    ),
    "guide_without_latent": (lambda x, y: numpyro.param("loc", jnp.zeros(D)),
        ["['w']", "Add them to the guide"]),
    "guide_with_unknown_site": (guide_with_unknown_site, ["'v'", "is_auxiliary"]),
    "guide_not_reparameterised": (guide_not_reparameterised,
        ["'flip'", "Bernoulli", "reparameterised"]),
    "guide_with_mutable": (guide_with_mutable, ["'count'", "group or layer norm"]),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_cannot_be_private(name: str) -> None:
    model, parts = MODELS[name]
    with pytest.raises(UnsupportedModelError) as error:
        start(model)
    for part in parts:
        assert part in str(error.value)


@pytest.mark.parametrize("name", GUIDES)
def test_a_guide_that_cannot_be_private(name: str) -> None:
    guide, parts = GUIDES[name]
    with pytest.raises(UnsupportedModelError) as error:
        start(good, guide)
    for part in parts:
        assert part in str(error.value)


def in_a_list(guide: Any) -> AutoGuideList:
    parts = AutoGuideList(good)
    parts.append(guide)
    return parts


@pytest.mark.every_case
@pytest.mark.parametrize(("guide", "name"), [
    (AutoDAIS(good), "AutoDAIS"),
    (AutoLaplaceApproximation(good), "AutoLaplaceApproximation"),
    (AutoSemiDAIS(good, good, {"w": 1}), "AutoSemiDAIS"),
    (in_a_list(AutoLaplaceApproximation(good)), "AutoLaplaceApproximation"),
], ids=lambda value: value if isinstance(value, str) else type(value).__name__)  # fmt: skip
def test_an_automatic_guide_that_reads_records(guide: Any, name: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"{name} cannot be private"):
        start(good, guide)


@pytest.mark.parametrize(
    "loss",
    [
        infer.RenyiELBO(), infer.TraceGraph_ELBO(), infer.TraceEnum_ELBO(),
        infer.Trace_ELBO(multi_sample_guide=True), infer.TraceMeanField_ELBO(sum_sites=False),
    ],
    ids=lambda loss: type(loss).__name__,
)  # fmt: skip
def test_a_bound_that_does_not_split_into_records(loss: Any) -> None:
    with pytest.raises(UnsupportedModelError, match=r"Expected loss=Trace_ELBO\(num_particles=K\)"):
        driver(good, loss=loss)


def latents_in_a_scan(x):
    def step(state, _):
        state = numpyro.sample("state", dist.Normal(state, 1.0))
        return state, state

    _, states = scan(step, jnp.zeros(()), None, length=x.shape[1])
    with numpyro.plate("records", x.shape[0]):
        numpyro.sample("x", dist.Normal(states, 1.0).to_event(1), obs=x)


def plate_in_a_scan(x):
    slope = normal("slope")

    def step(before, now):
        with numpyro.plate("records", x.shape[0]):
            return numpyro.sample("x", dist.Normal(slope * before, 1.0), obs=now), None

    scan(step, jnp.zeros(x.shape[0]), x.T)


@dataclasses.dataclass
class Settings:
    scale: float = 1.0


def with_more(x, y, missing):
    scalar_mean(x, y)


AT_LIST = AutoNormal(good, init_loc_fn=infer.init_to_value(values={"w": [0.0] * D}))
CALLS = {
    "latents inside a scan of NumPyro": (lambda: start(latents_in_a_scan, data=(X,)),
        UnsupportedModelError,
        "Site 'state' is inside scan or cond of numpyro.contrib.control_flow.*jax.lax.scan"),
    "a plate inside a scan of NumPyro": (lambda: start(plate_in_a_scan, data=(X,)),
        UnsupportedModelError,
        "Site 'x' is inside scan or cond of numpyro.contrib.*observe the whole series"),
    "a data plate that is not there": (lambda: start(good, data_plate="rows"),
        UnsupportedModelError, r"\['records'\], got 'rows'.*leave data_plate"),
    "a data plate that sites are not in": (lambda: start(two_plates, data_plate="first"),
        UnsupportedModelError, "'z' is outside the data plate 'first'"),
    "records along a later axis": (lambda: start(later_axis, data=(X.T, Y)), ValueError,
        r"args\[0\].*shape \(3, 12\).*Transpose it"),
    "one array with too few rows": (lambda: start(scalar_mean, data=(X, Y[:-1])), ValueError,
        r"y \(args\[1\]\) of shape \(11,\).*public=\['y'\]"),
    "indices of records are not offered as public": (
        lambda: start(with_more, data=(X, Y, np.array([3, 5]))), ValueError,
        "missing rows, say.*do not declare it public.*a mask",
    ),
    "an object that is neither an array nor hashable": (
        lambda: start(with_more, data=(X, Y, Settings())), TypeError,
        "is a Settings, which is neither.*static keyword.*frozen dataclass.*register_dataclass",
    ),
    "a list in init_to_value": (lambda: start(good, AT_LIST), TypeError,
        "has a list for site 'w'.*jnp.asarray"),
    "no array with the plate's rows": (lambda: start(with_batches, data=(Y[:4],)), ValueError,
        r"with 12 rows.*got \[\('args\[0\]', \(4,\)\)\].*whole"),
    "a list of labels would be public constants": (
        lambda: start(
            lambda x, y: scalar_mean(x, jnp.asarray(y)), data=(X, Y.tolist())
        ), TypeError, r"12 Python numbers.*Convert lists of records",
    ),
}  # fmt: skip


@pytest.mark.every_case
@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_is_refused_says_what_to_change(name: str) -> None:
    call, error, match = CALLS[name]
    with pytest.raises(error, match=match):
        call()


@pytest.mark.full
def test_a_public_array_with_as_many_rows_as_records_is_a_static_keyword() -> None:
    """The remedy that the message names works."""

    def model(y, grid):
        mean = numpyro.sample("mean", dist.Normal(jnp.asarray(grid).mean(), 1))
        with numpyro.plate("records", y.shape[0]):
            numpyro.sample("y", dist.Normal(mean, 1), obs=y)

    grid = np.linspace(0.0, 1.0, N)
    state = start(model, AutoDelta(model), data=(Y,), grid=grid)
    assert int(state.step) == 0


@pytest.mark.full
def test_refusals_look_at_no_record() -> None:
    """Shapes decide: records of NaN give the same message, and good models pass."""
    nan = np.full_like(X, np.nan), np.full_like(Y, np.nan)
    with pytest.raises(UnsupportedModelError, match="prior of latent site 'w'"):
        start(MODELS["data_dependent_prior"][0], data=nan)
    state = start(good, AutoDiagonalNormal(good), data=nan)
    assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(state.optim_state))
