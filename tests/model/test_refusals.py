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


def good(x, y):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([D]).to_event(1))
    with numpyro.plate("records", x.shape[0]):
        numpyro.sample("y", dist.Normal(x @ w, 1), obs=y)


def observed_outside(x, y):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([D]).to_event(1))
    numpyro.sample("first", dist.Normal(w[0], 1), obs=y[0])
    with numpyro.plate("records", x.shape[0]):
        numpyro.sample("y", dist.Normal(x @ w, 1), obs=y)


def observed_in_another_plate(x, y):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([D]).to_event(1))
    with numpyro.plate("columns", D):
        numpyro.sample("mean", dist.Normal(w, 1), obs=x.mean(0))
    with numpyro.plate("records", x.shape[0]):
        numpyro.sample("y", dist.Normal(x @ w, 1), obs=y)


def factor_outside(x, y):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([D]).to_event(1))
    numpyro.factor("sum_of_squares", -jnp.sum((y - x @ w) ** 2))
    with numpyro.plate("records", x.shape[0]):
        numpyro.sample("y", dist.Normal(x @ w, 1), obs=y)


def only_a_factor_outside(x, y):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([D]).to_event(1))
    numpyro.factor("sum_of_squares", -jnp.sum((y - x @ w) ** 2))


def data_dependent_prior(x, y):
    w = numpyro.sample("w", dist.Normal(y.mean(), 1).expand([D]).to_event(1))
    with numpyro.plate("records", x.shape[0]):
        numpyro.sample("y", dist.Normal(x @ w, 1), obs=y)


def data_dependent_support(x, y):
    top = numpyro.sample("top", dist.Uniform(0, jnp.abs(y).max()))
    with numpyro.plate("records", x.shape[0]):
        numpyro.sample("y", dist.Normal(0, top), obs=y)


def data_dependent_parameter(x, y):
    w = numpyro.param("w", jnp.ones(D) * y.mean())
    with numpyro.plate("records", x.shape[0]):
        numpyro.sample("y", dist.Normal(x @ w, 1), obs=y)


def local_latent(x, y):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([D]).to_event(1))
    with numpyro.plate("records", x.shape[0]):
        error = numpyro.sample("error", dist.Normal(0, 1))
        numpyro.sample("y", dist.Normal(x @ w + error, 1), obs=y)


def one_latent_per_record(x, y):
    effect = numpyro.sample("effect", dist.Normal(0, 1).expand([x.shape[0]]).to_event(1))
    with numpyro.plate("records", x.shape[0]):
        numpyro.sample("y", dist.Normal(effect, 1), obs=y)


def hard_coded_latents(x, y):
    effect = numpyro.sample("effect", dist.Normal(0, 1).expand([N]).to_event(1))
    with numpyro.plate("records", x.shape[0]):
        numpyro.sample("y", dist.Normal(effect, 1), obs=y)


def looked_up_latents(x, y):
    effect = numpyro.sample("effect", dist.Normal(0, 1).expand([N]).to_event(1))
    with numpyro.plate("records", x.shape[0]) as index:
        numpyro.sample("y", dist.Normal(effect[index], 1), obs=y)


def looked_up_parameter(x, y):
    w = numpyro.sample("w", dist.Normal(0, 1))
    effect = numpyro.param("effect", jnp.zeros(N))
    with numpyro.plate("records", x.shape[0]) as index:
        numpyro.sample("y", dist.Normal(w + effect[index], 1), obs=y)


def parameter_per_record(x, y):
    w = numpyro.sample("w", dist.Normal(0, 1))
    effect = numpyro.param("effect", jnp.zeros(x.shape[0]))
    with numpyro.plate("records", x.shape[0]):
        numpyro.sample("y", dist.Normal(w + effect, 1), obs=y)


def closure(x, y=None):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([D]).to_event(1))
    with numpyro.plate("records", x.shape[0]):
        numpyro.sample("y", dist.Normal(x @ w, 1), obs=Y)


def indexed_closure(x, y=None):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([D]).to_event(1))
    with numpyro.plate("records", x.shape[0]) as index:
        numpyro.sample("y", dist.Normal(x @ w, 1), obs=jnp.asarray(Y)[index])


def summarised_closure(x, y):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([D]).to_event(1))
    with numpyro.plate("records", x.shape[0]):
        numpyro.sample("y", dist.Normal(x @ w + jnp.asarray(Y).mean(), 1), obs=y)


def batch_norm(x, y):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([D]).to_event(1))
    mean = mutable("running_mean", {"value": jnp.zeros(D)})
    mean["value"] = 0.9 * mean["value"] + 0.1 * x.mean(0)
    with numpyro.plate("records", x.shape[0]):
        numpyro.sample("y", dist.Normal((x - mean["value"]) @ w, 1), obs=y)


def discrete(x, y):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([D]).to_event(1))
    sign = numpyro.sample("sign", dist.Bernoulli(0.5))
    with numpyro.plate("records", x.shape[0]):
        numpyro.sample("y", dist.Normal(x @ w * (2 * sign - 1), 1), obs=y)


def discrete_in_plate(x, y):
    means = numpyro.sample("means", dist.Normal(0, 1).expand([2]).to_event(1))
    with numpyro.plate("records", x.shape[0]):
        which = numpyro.sample("which", dist.Poisson(0.5))
        numpyro.sample("y", dist.Normal(means[which], 1), obs=y)


def no_plate(x, y):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([D]).to_event(1))
    numpyro.sample("y", dist.Normal(x @ w, 1).to_event(1), obs=y)


def two_plates(x, y):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([D]).to_event(1))
    with numpyro.plate("first", x.shape[0]):
        numpyro.sample("y", dist.Normal(x @ w, 1), obs=y)
    with numpyro.plate("second", x.shape[0]):
        numpyro.sample("z", dist.Normal(x @ w, 1), obs=y)


def unobserved(x, y):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([D]).to_event(1))
    with numpyro.plate("records", x.shape[0]):
        numpyro.deterministic("y", x @ w)


def later_axis(x, y):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([D]).to_event(1))
    with numpyro.plate("records", y.shape[0]):
        numpyro.sample("y", dist.Normal(w @ x, 1), obs=y)


def scalar_mean(x, y):
    mean = numpyro.sample("mean", dist.Normal(0, 1))
    with numpyro.plate("records", x.shape[0]):
        numpyro.sample("y", dist.Normal(mean, 1), obs=y)


def not_indexed(x, y):
    mean = numpyro.sample("mean", dist.Normal(0, 1))
    with numpyro.plate("records", x.shape[0], subsample_size=4):
        numpyro.sample("y", dist.Normal(mean, 1), obs=y)


def dynamic_support(x, y):
    top = numpyro.sample("top", dist.LogNormal(0, 1))
    width = numpyro.sample("width", dist.Uniform(0, top))
    with numpyro.plate("records", x.shape[0]):
        numpyro.sample("y", dist.Normal(0, width), obs=y)


def guide_per_record(x, y):
    rows = numpyro.param("rows", jnp.zeros(x.shape[0]))
    numpyro.sample("w", dist.Normal(rows.mean() + jnp.zeros(D), 1).to_event(1))


def guide_reads_data(x, y):
    numpyro.sample("w", dist.Normal(x.mean(0), numpyro.param("s", 1.0)).to_event(1))


def guide_starts_at_data(x, y):
    loc = numpyro.param("loc", x.mean(0))
    numpyro.sample("w", dist.Normal(loc, 1.0).to_event(1))


def guide_holds_data(x, y):
    loc = numpyro.param("loc", jnp.zeros(D)) + jnp.asarray(X).mean(0)
    numpyro.sample("w", dist.Normal(loc, 1.0).to_event(1))


def guide_without_latent(x, y):
    numpyro.param("loc", jnp.zeros(D))


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


def driver(model: Any, guide: Any, loss: Any = None, **options: Any) -> DPSVI:
    return DPSVI(
        model,
        guide,
        optax.adam(0.1),
        loss,
        **grouped(
            estimator=aligned(), clip_norm=1.0, sampler=FullBatch(), noise_multiplier=1.0, **options
        ),
    )


MODELS: list[tuple[Callable[..., Any], list[str]]] = [
    (observed_outside, ["'first'", "outside the data plate", "Put it inside numpyro.plate"]),
    (observed_in_another_plate, ["'mean': ('columns',)", "Put every observed site into one plate"]),
    (factor_outside, ["'sum_of_squares'", "outside the data plate", "Put it inside"]),
    (only_a_factor_outside, ["'sum_of_squares'", "in no plate", "Put it inside numpyro.plate"]),
    (data_dependent_prior, ["prior of latent site 'w'", "static keywords"]),
    (data_dependent_support, ["prior of latent site 'top'", "static keywords"]),
    (data_dependent_parameter, ["parameter 'w'", "public values"]),
    (local_latent, ["'error'", "one parameter per record", "Integrate the site out"]),
    (one_latent_per_record, ["'effect'", "one parameter per record", "integrate it out"]),
    (hard_coded_latents, ["'y' has 12 values", "one entry per record"]),
    (looked_up_latents, ["'y' looks up", "index of plate 'records'", "column of the data"]),
    (looked_up_parameter, ["'y' looks up", "index of plate 'records'", "column of the data"]),
    (parameter_per_record, ["'effect'", "one entry per record", "parameters of fixed shape"]),
    (closure, ["'y' has 12 values", "as an argument array with one row per record"]),
    (indexed_closure, ["'y' looks up", "Pass records as arguments"]),
    (summarised_closure, ["array of shape (12,)", "Pass records as arguments", "static keyword"]),
    (batch_norm, ["'running_mean'", "group or layer norm"]),
    (discrete, ["'sign' is discrete", "MixtureSameFamily"]),
    (discrete_in_plate, ["'which' is discrete", "MixtureSameFamily"]),
    (no_plate, ["'y' is in no plate", "Put it inside numpyro.plate"]),
    (two_plates, ["'y': ('first',)", "'z': ('second',)", "data_plate="]),
    (unobserved, ["observed site", "Pass the data so that obs= is not None"]),
    (not_indexed, ["'y' has 12 rows in plate 'records' of size 4", "index"]),
    (dynamic_support, ["support of latent site 'width'", "Uniform(0, 1)", "by hand"]),
]

GUIDES: list[tuple[Callable[..., Any], list[str]]] = [
    (guide_per_record, ["Parameter 'rows'", "one entry per record", "parameters of fixed shape"]),
    (guide_reads_data, ["Guide site 'w' depends on the records", "public arguments only"]),
    (guide_starts_at_data, ["'loc' depends on the records", "public arguments only"]),
    (guide_holds_data, ["guide holds an array of shape (12, 3)", "static keyword"]),
    (guide_without_latent, ["['w']", "Add them to the guide"]),
    (guide_with_unknown_site, ["'v'", "is_auxiliary"]),
    (guide_not_reparameterised, ["'flip'", "Bernoulli", "reparameterised"]),
    (guide_with_mutable, ["'count'", "group or layer norm"]),
]


@pytest.mark.parametrize(("model", "parts"), MODELS, ids=[case[0].__name__ for case in MODELS])
def test_a_model_that_cannot_be_private(model: Any, parts: list[str]) -> None:
    with pytest.raises(UnsupportedModelError) as error:
        driver(model, AutoNormal(model)).init(jax.random.key(0), X, Y)
    for part in parts:
        assert part in str(error.value)


@pytest.mark.parametrize(("guide", "parts"), GUIDES, ids=[case[0].__name__ for case in GUIDES])
def test_a_guide_that_cannot_be_private(guide: Any, parts: list[str]) -> None:
    with pytest.raises(UnsupportedModelError) as error:
        driver(good, guide).init(jax.random.key(0), X, Y)
    for part in parts:
        assert part in str(error.value)


@pytest.mark.parametrize(
    "guide", [AutoDAIS(good), AutoLaplaceApproximation(good), AutoSemiDAIS(good, good, {"w": 1})],
    ids=lambda guide: type(guide).__name__,
)  # fmt: skip
def test_an_automatic_guide_that_reads_records(guide: Any) -> None:
    with pytest.raises(UnsupportedModelError, match=f"{type(guide).__name__} cannot be private"):
        driver(good, guide).init(jax.random.key(0), X, Y)


def test_a_guide_that_reads_records_inside_a_list() -> None:
    guide = AutoGuideList(good)
    guide.append(AutoLaplaceApproximation(good))
    with pytest.raises(UnsupportedModelError, match="AutoLaplaceApproximation cannot be private"):
        driver(good, guide).init(jax.random.key(0), X, Y)


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
        driver(good, AutoNormal(good), loss)


def test_latents_inside_a_scan_of_numpyro() -> None:
    def model(x):
        scale = numpyro.sample("scale", dist.HalfNormal(1.0))

        def step(state, _):
            state = numpyro.sample("state", dist.Normal(state, scale))
            return state, state

        _, states = scan(step, jnp.zeros(()), None, length=x.shape[1])
        with numpyro.plate("records", x.shape[0]):
            numpyro.sample("x", dist.Normal(states, 1.0).to_event(1), obs=x)

    match = "Site 'state' is inside scan or cond of numpyro.contrib.control_flow.*jax.lax.scan"
    with pytest.raises(UnsupportedModelError, match=match):
        driver(model, AutoNormal(model)).init(jax.random.key(0), X)


def test_a_plate_inside_a_scan_of_numpyro() -> None:
    def model(x):
        slope = numpyro.sample("slope", dist.Normal(0, 1))

        def step(before, now):
            with numpyro.plate("records", x.shape[0]):
                return numpyro.sample("x", dist.Normal(slope * before, 1.0), obs=now), None

        scan(step, jnp.zeros(x.shape[0]), x.T)

    match = "Site 'x' is inside scan or cond of numpyro.contrib.*observe the whole series"
    with pytest.raises(UnsupportedModelError, match=match):
        driver(model, AutoNormal(model)).init(jax.random.key(0), X)


def test_a_data_plate_that_is_not_there() -> None:
    with pytest.raises(UnsupportedModelError, match=r"\['records'\], got 'rows'.*leave data_plate"):
        driver(good, AutoNormal(good), data_plate="rows").init(jax.random.key(0), X, Y)


def test_a_data_plate_that_sites_are_not_in() -> None:
    with pytest.raises(UnsupportedModelError, match="'z' is outside the data plate 'first'"):
        driver(two_plates, AutoNormal(two_plates), data_plate="first").init(jax.random.key(0), X, Y)


def test_records_along_a_later_axis() -> None:
    with pytest.raises(ValueError, match=r"args\[0\].*shape \(3, 12\).*Transpose it"):
        driver(later_axis, AutoNormal(later_axis)).init(jax.random.key(0), X.T, Y)


def test_one_array_with_too_few_rows() -> None:
    with pytest.raises(ValueError, match=r"y \(args\[1\]\) of shape \(11,\).*public=\['y'\]"):
        driver(scalar_mean, AutoNormal(scalar_mean)).init(jax.random.key(0), X, Y[:-1])


def test_indices_of_records_are_not_offered_as_public() -> None:
    def model(x, y, missing):
        scalar_mean(x, y)

    with pytest.raises(ValueError, match="missing rows, say.*do not declare it public.*a mask"):
        driver(model, AutoNormal(model)).init(jax.random.key(0), X, Y, np.array([3, 5]))


def test_an_object_that_is_neither_an_array_nor_hashable() -> None:
    @dataclasses.dataclass
    class Settings:
        scale: float = 1.0

    def model(x, y, settings):
        scalar_mean(x, y)

    match = "is a Settings, which is neither.*static keyword.*frozen dataclass.*register_dataclass"
    with pytest.raises(TypeError, match=match):
        driver(model, AutoNormal(model)).init(jax.random.key(0), X, Y, Settings())


def test_a_list_in_init_to_value() -> None:
    guide = AutoNormal(good, init_loc_fn=infer.init_to_value(values={"w": [0.0] * D}))
    with pytest.raises(TypeError, match="has a list for site 'w'.*jnp.asarray"):
        driver(good, guide).init(jax.random.key(0), X, Y)


def test_no_array_with_the_plates_rows() -> None:
    def model(y):
        mean = numpyro.sample("mean", dist.Normal(0, 1))
        with numpyro.plate("records", N, subsample_size=4):
            numpyro.sample("y", dist.Normal(mean, 1), obs=y)

    with pytest.raises(ValueError, match=r"with 12 rows.*got \[\('args\[0\]', \(4,\)\)\].*whole"):
        driver(model, AutoNormal(model)).init(jax.random.key(0), Y[:4])


def test_a_list_of_labels_would_be_public_constants() -> None:
    def model(x, y):
        mean = numpyro.sample("mean", dist.Normal(0, 1))
        with numpyro.plate("records", x.shape[0]):
            numpyro.sample("y", dist.Normal(mean, 1), obs=jnp.asarray(y))

    with pytest.raises(TypeError, match=r"12 Python numbers.*Convert lists of records"):
        driver(model, AutoNormal(model)).init(jax.random.key(0), X, Y.tolist())


@pytest.mark.full
def test_a_public_array_with_as_many_rows_as_records_is_a_static_keyword() -> None:
    """The remedy that the message names works."""

    def model(y, grid):
        mean = numpyro.sample("mean", dist.Normal(jnp.asarray(grid).mean(), 1))
        with numpyro.plate("records", y.shape[0]):
            numpyro.sample("y", dist.Normal(mean, 1), obs=y)

    grid = np.linspace(0.0, 1.0, N)
    state = driver(model, AutoDelta(model), grid=grid).init(jax.random.key(0), Y)
    assert int(state.step) == 0


@pytest.mark.full
def test_refusals_look_at_no_record() -> None:
    """Shapes decide: records of NaN give the same message, and good models pass."""
    nan = np.full_like(X, np.nan), np.full_like(Y, np.nan)
    with pytest.raises(UnsupportedModelError, match="prior of latent site 'w'"):
        driver(data_dependent_prior, AutoNormal(good)).init(jax.random.key(0), *nan)
    state = driver(good, AutoDiagonalNormal(good)).init(jax.random.key(0), *nan)
    assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(state.optim_state))
