"""Models and guides through the front end: a run without clip and noise is NumPyro's own run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from flat import dpsvi
from jax.flatten_util import ravel_pytree
from models import given, slopes
from numpyro import handlers
from numpyro.contrib.module import flax_module
from numpyro.distributions import constraints
from numpyro.infer import SVI, Trace_ELBO, init_to_median, init_to_value
from numpyro.infer.autoguide import (
    AutoDelta,
    AutoDiagonalNormal,
    AutoGuideList,
    AutoIAFNormal,
    AutoLowRankMultivariateNormal,
    AutoMultivariateNormal,
    AutoNormal,
)
from numpyro.infer.reparam import LocScaleReparam

from numpyro_dp import DPSVI, Privacy
from numpyro_dp.estimators import aligned
from numpyro_dp.samplers import FullBatch, Poisson

N, D = 20, 3
KEY = jax.random.key(4)


def x64() -> Any:
    """Double precision, in the oldest and the newest jax."""
    return jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64()


class Case(NamedTuple):
    """A model, a guide for it, and how both are called."""

    model: Callable[..., Any]
    guide: Callable[[Callable[..., Any]], Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = {}
    static: dict[str, Any] = {}
    init_params: dict[str, Any] | None = None
    num_particles: int = 1
    options: dict[str, Any] = {}


def _x() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(N, D))


def _y() -> np.ndarray:
    return np.random.default_rng(1).normal(size=N)


def _binary() -> np.ndarray:
    return np.random.default_rng(2).integers(0, 2, size=N)


regression = given(
    lambda x, w, scale: dist.Normal(x @ w, scale), w=slopes(), scale=dist.HalfNormal(1)
)


def nested(x):
    features = numpyro.plate("features", D, dim=-1)
    with features:
        mean = numpyro.sample("mean", dist.Normal(0, 3))
        scale = numpyro.sample("scale", dist.LogNormal(0, 1))
    with numpyro.plate("records", N, dim=-2), features:  # hard-coded size
        numpyro.sample("x", dist.Normal(mean, scale), obs=x)


def supports(x, y):
    fraction = numpyro.sample("fraction", dist.Beta(2, 3))
    weights = numpyro.sample("weights", dist.Dirichlet(jnp.ones(D)))
    flat = numpyro.sample("flat", dist.ImproperUniform(constraints.real, (), ()))
    interval = numpyro.sample("interval", dist.Uniform(-2.0, 3.0))
    with numpyro.plate("records", x.shape[0]):
        mean = x @ weights + interval + flat
        numpyro.sample("y", dist.Normal(mean, 1 + fraction), obs=y)


def dynamic_support(y):
    top = numpyro.sample("top", dist.LogNormal(0, 1))
    width = numpyro.sample("width", dist.Uniform(0, top))
    with numpyro.plate("records", y.shape[0]):
        numpyro.sample("y", dist.Normal(0, width), obs=y)


def guide_with_auxiliary_site(y):
    """Follows the support of ``width``, and draws both from an auxiliary site."""
    loc = numpyro.param("loc", jnp.zeros(2))
    scale = numpyro.param("scale", jnp.full(2, 0.1), constraint=constraints.positive)
    u = numpyro.sample("u", dist.Normal(loc, scale).to_event(1), infer={"is_auxiliary": True})
    top = jnp.exp(u[0])
    numpyro.sample("top", dist.Delta(top, log_density=-u[0]))
    sigmoid = jax.nn.sigmoid(u[1])
    jacobian = jnp.log(top) + jnp.log(sigmoid) + jnp.log1p(-sigmoid)
    numpyro.sample("width", dist.Delta(top * sigmoid, log_density=-jacobian))


def constrained_guide(x, y):
    """Draws in the constrained space, with distributions that have a reparameterised sampler."""
    a = numpyro.param("a", 2.0, constraint=constraints.positive)
    loc = numpyro.param("loc", lambda key: 0.1 * jax.random.normal(key, (D,)))
    numpyro.sample("scale", dist.Gamma(a, 3.0))
    numpyro.sample("w", dist.Normal(loc, 0.2).to_event(1))


def reparametrised(x, y):
    with handlers.reparam(config={"w": LocScaleReparam(centered=0.3)}):
        scale = numpyro.sample("scale", dist.HalfNormal(1))
        w = numpyro.sample("w", dist.Normal(0, scale).expand([D]).to_event(1))
    with numpyro.plate("records", x.shape[0]):
        mean = numpyro.deterministic("mean", x @ w)
        numpyro.sample("y", dist.Bernoulli(logits=mean), obs=y)


def mixture(y):
    weights = numpyro.sample("weights", dist.Dirichlet(jnp.ones(2)))
    means = numpyro.sample("means", dist.Normal(0, 3).expand([2]).to_event(1))
    scale = numpyro.sample("scale", dist.HalfNormal(1))
    with numpyro.plate("records", y.shape[0]), handlers.scale(scale=0.5):
        parts = dist.Normal(means, scale)
        numpyro.sample("y", dist.MixtureSameFamily(dist.Categorical(probs=weights), parts), obs=y)


def pytree(data, *, offset, family, missing=None):
    assert missing is None
    noise = {"normal": dist.Normal, "laplace": dist.Laplace}[family]
    w = numpyro.sample("w", dist.Normal(0, 1).expand([D]).to_event(1))
    numpyro.factor("penalty", -jnp.sum(w**4))
    with numpyro.plate("records", data["y"].shape[0]):
        mean = data["design"]["x"] @ w + offset.sum()
        numpyro.sample("count", dist.Poisson(jnp.exp(mean)), obs=data["count"])
        numpyro.sample("y", noise(mean, 1), obs=data["y"])


def own_parameters(x, y):
    w = numpyro.sample("w", dist.Normal(numpyro.param("prior", 0.2), 1).expand([D]).to_event(1))
    scale = numpyro.param("noise", 0.7, constraint=constraints.positive)
    with numpyro.plate("records", x.shape[0]):
        numpyro.sample("y", dist.Normal(x @ w, scale), obs=y)


def guide_list(model):
    guide = AutoGuideList(model)
    guide.append(AutoNormal(handlers.block(model, hide=["means", "weights"])))
    guide.append(AutoDelta(handlers.block(model, expose=["means"])))

    def rest(*args, **kwargs):
        base = dist.Normal(numpyro.param("weights_loc", jnp.zeros(1)), 0.2).to_event(1)
        transform = dist.transforms.StickBreakingTransform()
        return {"weights": numpyro.sample("weights", dist.TransformedDistribution(base, transform))}

    guide.append(rest)
    return guide


def at_value(model):
    values = {"w": jnp.arange(3.0), "scale": 0.5}
    return AutoNormal(model, init_loc_fn=init_to_value(values=values))


CASES: dict[str, Callable[[], Case]] = {
    "AutoNormal, nested plates": lambda: Case(nested, AutoNormal, (_x(),),
        options={"data_plate": "records"}),
    "AutoDiagonalNormal, supports": lambda: Case(supports, AutoDiagonalNormal, (_x(), _y())),
    "AutoDelta, supports": lambda: Case(supports, AutoDelta, (_x(), _y())),
    "AutoGuideList": lambda: Case(mixture, guide_list, (_y(),)),
    "AutoMultivariateNormal, reparam": lambda: Case(reparametrised, AutoMultivariateNormal,
        (_x(), _binary())),
    "AutoLowRank, mixture": lambda: Case(mixture,
        lambda m: AutoLowRankMultivariateNormal(m, rank=2, init_loc_fn=init_to_median), (_y(),)),
    "AutoIAFNormal, particles": lambda: Case(regression,
        lambda m: AutoIAFNormal(m, hidden_dims=[4]), (_x(), _y()), num_particles=2),
    "hand-written, auxiliary, dynamic support": lambda: Case(dynamic_support,
        lambda m: guide_with_auxiliary_site, (_y(),)),
    "hand-written, constrained": lambda: Case(regression, lambda m: constrained_guide, (_x(), _y()),
        init_params={"a": 4.0}),
    "own parameters": lambda: Case(own_parameters, AutoDiagonalNormal, (_x(), _y())),
    "pytree": lambda: Case(
        pytree,
        AutoNormal,
        ({"y": _y(), "count": _binary() * 2, "design": {"x": _x()}},),
        {"offset": np.array([0.5, 0.25]), "missing": None},
        {"family": "laplace"},
        options={"public": ["offset"]},
    ),
    "init_to_value, keywords": lambda: Case(regression, at_value, (), {"y": _y(), "x": _x()},
        options={"public": [np.arange(3.0)]}),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _settings():
    """Double precision, and quick compilation of what runs for an instant."""
    jax.config.update("jax_disable_most_optimizations", True)
    with x64():
        yield
    jax.config.update("jax_disable_most_optimizations", False)


SLOW = {"AutoGuideList", "AutoMultivariateNormal, reparam", "hand-written, constrained"}
EXTENDED = {
    "AutoDelta, supports", "AutoGuideList", "AutoMultivariateNormal, reparam",
    "AutoDiagonalNormal, supports", "AutoIAFNormal, particles", "AutoLowRank, mixture",
}  # fmt: skip


def _marks(name: str) -> list[Any]:
    return [pytest.mark.slow] * (name in SLOW) + [pytest.mark.extended] * (name in EXTENDED)


@pytest.mark.extended
@pytest.mark.parametrize("name", [pytest.param(name, marks=_marks(name)) for name in CASES])
def test_without_clip_and_noise_the_run_is_that_of_svi(name: str) -> None:
    with x64():
        case = CASES[name]()
        optim, loss = optax.sgd(1e-5), Trace_ELBO(num_particles=case.num_particles)
        svi = SVI(case.model, case.guide(case.model), optim, loss, **case.static)
        args, kwargs = jax.tree.map(
            lambda leaf: jnp.asarray(leaf) if isinstance(leaf, np.ndarray) else leaf,
            (case.args, case.kwargs),
        )
        expected = svi.run(
            KEY, 3, *args, progress_bar=False, init_params=case.init_params, **kwargs
        ).params
        private = dpsvi(case.model, case.guide(case.model), optim, loss, clip_norm=jnp.inf,
                        noise_multiplier=0.0, **case.options, **case.static)  # fmt: skip
        result = private.run(
            KEY, 3, *case.args, progress_bar=False, init_params=case.init_params, **case.kwargs
        )
        assert result.params.keys() == expected.keys()
        found, expected = ravel_pytree(result.params)[0], ravel_pytree(expected)[0]
        assert found.dtype == jnp.float64
        np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-11)


def _run(model: Any, guide: Any, *args: Any, steps: int = 5, **kwargs: Any) -> dict[str, Any]:
    svi = dpsvi(model, guide, optax.sgd(1e-2), clip_norm=5.0, sampler=Poisson(0.4),
                noise_multiplier=0.5, secret_key=1, repetition=True)  # fmt: skip
    return svi.run(KEY, steps, *args, progress_bar=False, **kwargs).params


@pytest.mark.extended
def test_a_subsampled_plate_gives_the_run_of_the_full_plate() -> None:
    """Batches are drawn by the sampler: the model's own subsampling changes nothing."""

    def model(x, y, subsample_size=None):
        w = numpyro.sample("w", dist.Normal(0, 1).expand([D]).to_event(1))
        with numpyro.plate("records", N, subsample_size=subsample_size) as index:
            rows = numpyro.subsample(x, event_dim=1)
            numpyro.sample("y", dist.Normal(rows @ w, 1), obs=y[index])

    x, y = jnp.asarray(_x(), jnp.float32), jnp.asarray(_y(), jnp.float32)
    full, subsampled = (_run(model, AutoNormal(model), x, y, size) for size in (None, 5))
    for name, value in full.items():
        np.testing.assert_allclose(subsampled[name], value, rtol=1e-5, err_msg=name)


@pytest.mark.full
def test_public_arguments_may_change_between_runs() -> None:
    """A shared array is an argument of the compiled step, not a constant in it."""

    def offset(y, public):
        mean = numpyro.sample("mean", dist.Normal(public.sum(), 1))
        with numpyro.plate("records", y.shape[0]):
            numpyro.sample("y", dist.Normal(mean + public[0], 1), obs=y)

    traces = []

    def counted(y, public):
        traces.append(1)
        offset(y, public)

    guide = AutoNormal(counted)
    svi = dpsvi(counted, guide, optax.sgd(1e-2), clip_norm=5.0, noise_multiplier=0.5, secret_key=1,
                repetition=True, public=["public"])  # fmt: skip
    y, one, two = _y().astype(np.float32), np.array([0.5, 1.0]), np.array([-3.0, 4.0])
    first = svi.run(KEY, 20, y, one, progress_bar=False).params["mean_auto_loc"]
    compiled = len(traces)
    second = svi.run(KEY, 20, y, two, progress_bar=False).params["mean_auto_loc"]
    assert len(traces) < 2 * compiled
    alone = DPSVI(
        offset, AutoNormal(offset), optax.sgd(1e-2), estimator=aligned(), clip_norm=5.0,
        sampler=FullBatch(),
        privacy=Privacy(noise_multiplier=0.5, secret_key=1, repetition=True, public=["public"]),
    ).run(KEY, 20, y, two, progress_bar=False).params["mean_auto_loc"]  # fmt: skip
    np.testing.assert_allclose(second, alone, rtol=1e-5)
    assert abs(second - first) > 0.05


@pytest.mark.extended
def test_a_flax_module_with_parameters_in_the_signal() -> None:
    nn = pytest.importorskip("flax.linen", reason="flax is not installed")

    def network(x, y):
        net = flax_module("net", nn.Dense(1), input_shape=(1, D))
        scale = numpyro.sample("scale", dist.HalfNormal(1))
        with numpyro.plate("records", x.shape[0]):
            numpyro.sample("y", dist.Normal(net(x)[:, 0], scale), obs=y)

    params = _run(network, AutoNormal(network), jnp.asarray(_x()), jnp.asarray(_y()))
    assert params["net$params"]["kernel"].shape == (D, 1)


def _reachable(root: Any) -> list[Any]:
    """Every array that can be reached from an object, through closures too."""
    seen, found, stack = set(), [], [root]
    while stack:
        item = stack.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, jax.Array | np.ndarray):
            found.append(item)
        elif isinstance(item, dict):
            stack += [*item.keys(), *item.values()]
        elif isinstance(item, list | tuple | set | frozenset):
            stack += list(item)
        elif not isinstance(item, str | bytes | int | float | type | type(np)):
            stack += [cell.cell_contents for cell in getattr(item, "__closure__", None) or ()]
            stack += list(getattr(item, "__defaults__", None) or ())
            stack += list((getattr(item, "__kwdefaults__", None) or {}).values())
            stack += [getattr(item, name, None) for name in ("__self__", "__func__", "__wrapped__")]
            stack += [getattr(item, name, None) for name in ("func", "args", "keywords")]
            stack += list(getattr(item, "__dict__", {}).values())
    return found


def test_the_walk_finds_records_in_closures_and_partials() -> None:
    secret = np.arange(7.0)

    class Holder:
        def method(self):
            return self.value

    holder = Holder()
    holder.value = secret
    for root in (lambda: secret, jax.tree_util.Partial(max, secret), {"a": [holder.method]}):
        assert any(found is secret for found in _reachable(root))


def _list(model):
    guide = AutoGuideList(model)
    guide.append(AutoDiagonalNormal(handlers.block(model, hide=["scale"])))
    guide.append(AutoDelta(handlers.block(model, expose=["scale"])))
    return guide


@pytest.mark.full
@pytest.mark.parametrize("make", [AutoNormal, _list])
def test_the_guide_holds_no_record_after_a_run(make: Callable[..., Any]) -> None:
    x, y = _x().astype(np.float32), _y().astype(np.float32)
    guide = make(regression)
    svi = dpsvi(regression, guide, optax.adam(1e-2))
    svi.run(KEY, 2, x, y, progress_bar=False)
    arrays = _reachable(guide.__dict__)
    assert arrays, "the walk found nothing"
    records = np.concatenate([x.ravel(), y])
    for array in arrays:
        if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
            continue
        assert array.shape[:1] != (N,)
        assert not np.isin(np.ravel(array), records).any()
    assert svi._sessions
    assert not any(array.shape[:1] == (N,) for array in _reachable(svi.__dict__))
