"""Models and guides through the front end, against NumPyro's own density and its own runs."""

from __future__ import annotations

import types
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
from hostile import listed_guides
from jax.flatten_util import ravel_pytree
from models import given, of, slopes
from numpyro import handlers
from numpyro.distributions import constraints
from numpyro.infer import SVI, Trace_ELBO, init_to_median, init_to_uniform, init_to_value
from numpyro.infer.autoguide import (
    AutoDelta,
    AutoDiagonalNormal,
    AutoIAFNormal,
    AutoLowRankMultivariateNormal,
    AutoMultivariateNormal,
    AutoNormal,
)
from numpyro.infer.reparam import LocScaleReparam, TransformReparam
from numpyro.infer.util import log_density, potential_energy

from numpyro_dp.model.density import Model
from numpyro_dp.model.public import declare
from numpyro_dp.model.structure import read_model

N, D = 12, 3
KEY = jax.random.key(4)
X = np.random.default_rng(0).normal(size=(N, D))
Y = np.random.default_rng(1).normal(size=N)
BINARY = np.random.default_rng(2).integers(0, 2, size=N)


@pytest.fixture(autouse=True)
def _settings():
    """Double precision, and quick compilation of what runs for an instant."""
    jax.config.update("jax_disable_most_optimizations", True)
    x64 = jax.enable_x64 if hasattr(jax, "enable_x64") else jax.experimental.enable_x64
    with x64(True):
        yield
    jax.config.update("jax_disable_most_optimizations", False)


class Case(NamedTuple):
    """A model, its arguments and a guide, if there is a run to compare.

    NumPyro has the model ``reference`` without the last argument, if it is given.
    """

    model: Callable[..., Any]
    args: tuple[Any, ...] = ()
    guide: Callable[[Callable[..., Any]], Any] | None = None
    kwargs: dict[str, Any] = {}
    static: dict[str, Any] = {}
    reference: Callable[..., Any] | None = None
    init_params: dict[str, Any] | None = None
    num_particles: int = 1
    public: Any = ()
    data_plate: str | None = None

    def of_numpyro(self) -> tuple[Any, Any, Any]:
        """Model and arguments."""
        args = self.args if self.reference is None else self.args[:-1]
        arrays = jax.tree.map(
            lambda leaf: jnp.asarray(leaf) if isinstance(leaf, np.ndarray) else leaf,
            (args, self.kwargs),
        )
        return self.reference or self.model, *arrays


def w() -> Any:
    return numpyro.sample("w", dist.Normal(0, 1).expand([D]).to_event(1))


def indexed(x, y, subsample_size=None):
    slope = w()
    with numpyro.plate("records", N, subsample_size=subsample_size) as index:
        numpyro.sample("y", dist.Normal(x[index] @ slope, 1), obs=y[index])


def subsampled(x, y, subsample_size=None):
    slope = w()
    with numpyro.plate("records", x.shape[0], subsample_size=subsample_size):
        rows = numpyro.subsample(x, event_dim=1)
        numpyro.sample("y", dist.Normal(rows @ slope, 1), obs=numpyro.subsample(y, event_dim=0))


def two_sites(x, y, count):
    slope, scale = w(), numpyro.sample("scale", dist.HalfNormal(1))
    with numpyro.plate("records", x.shape[0]):
        mean = numpyro.deterministic("mean", x @ slope)
        numpyro.sample("y", dist.Normal(mean, scale), obs=y)
        with handlers.scale(scale=0.3):
            numpyro.sample("count", dist.Poisson(jnp.exp(mean)), obs=count)


def handled(handler: Callable[[Any], Any]) -> Callable[..., None]:
    """A regression with a handler of a column inside its plate."""

    def model(x, y, column):
        slope = w()
        with numpyro.plate("records", x.shape[0]), handler(column):
            numpyro.sample("y", dist.Normal(x @ slope, 1), obs=y)

    return model


def masked_likelihood(y, mask):
    mean = numpyro.sample("mean", dist.Normal(0, 1))
    with numpyro.plate("records", y.shape[0]):
        numpyro.sample("y", dist.Normal(mean, 1).mask(mask), obs=y)


def nested(x):
    features = numpyro.plate("features", D, dim=-1)
    with features:
        mean = numpyro.sample("mean", dist.Normal(0, 3))
        scale = numpyro.sample("scale", dist.LogNormal(0, 1))
    with numpyro.plate("records", N, dim=-2), features:  # hard-coded size
        numpyro.sample("x", dist.Normal(mean, scale), obs=x)


def records_inside(x):
    """Records along the last axis of the plates, though along the first of the argument."""
    with numpyro.plate("features", D, dim=-2):
        mean = numpyro.sample("mean", dist.Normal(0, 3))
        with numpyro.plate("records", x.shape[0], dim=-1):
            numpyro.sample("x", dist.Normal(mean, 1), obs=x.T)


def factors(x, y):
    with numpyro.plate("features", D):
        slope = numpyro.sample("w", dist.Normal(0, 1))
        numpyro.factor("penalty of each", -jnp.abs(slope))
    numpyro.factor("penalty", -jnp.sum(slope**4))
    with numpyro.plate("records", x.shape[0]):
        numpyro.factor("huber", -jnp.sqrt(1 + (y - x @ slope) ** 2))


def supports(x, y):
    fraction = numpyro.sample("fraction", dist.Beta(2, 3))
    weights = numpyro.sample("weights", dist.Dirichlet(jnp.ones(D)))
    flat = numpyro.sample("flat", dist.ImproperUniform(constraints.positive, (), ()))
    chol = numpyro.sample("chol", dist.LKJCholesky(D, 1.5))
    interval = numpyro.sample("interval", dist.Uniform(-2.0, 3.0))
    with numpyro.plate("records", x.shape[0]):
        mean = x @ chol @ weights + interval + flat
        numpyro.sample("y", dist.Normal(mean, 1 + fraction), obs=y)


def dynamic_support(y):
    top = numpyro.sample("top", dist.LogNormal(0, 1))
    width = numpyro.sample("width", dist.Uniform(0, top))
    with numpyro.plate("records", y.shape[0]):
        numpyro.sample("y", dist.Normal(0, width), obs=y)


def with_auxiliary_site(y):
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
    with handlers.reparam(config={"w": LocScaleReparam(centered=0.3), "s": TransformReparam()}):
        scale = numpyro.sample("scale", dist.HalfCauchy(1))
        slope = numpyro.sample("w", dist.Normal(0, scale).expand([D]).to_event(1))
        exp = dist.transforms.ExpTransform()
        s = numpyro.sample("s", dist.TransformedDistribution(dist.Normal(0, 1), exp))
    with numpyro.plate("records", x.shape[0]):
        numpyro.sample("y", dist.Normal(x @ slope, s), obs=y)


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
    slope = w()
    with numpyro.plate("records", data["y"].shape[0]):
        mean = data["design"]["x"] @ slope + offset.sum()
        numpyro.sample("count", dist.Poisson(jnp.exp(mean)), obs=data["count"])
        numpyro.sample("y", noise(mean, 1), obs=data["y"])


def own_parameters(x, y):
    scale = numpyro.param("noise", 0.7, constraint=constraints.positive)
    mean = x @ w() + numpyro.sample("b", dist.Normal(numpyro.param("prior_mean", 0.2), 1))
    with numpyro.plate("records", x.shape[0]):
        numpyro.sample("y", dist.Normal(mean, scale), obs=y)


def group_levels(y, group):
    with numpyro.plate("groups", 4):
        level = numpyro.sample("level", dist.Normal(0, 1))
    with numpyro.plate("records", y.shape[0]):
        numpyro.sample("y", dist.Normal(level[group], 1), obs=y)


def of_three_parts(model):
    def rest(*args):
        base = dist.Normal(numpyro.param("weights_loc", jnp.zeros(1)), 0.2).to_event(1)
        transform = dist.transforms.StickBreakingTransform()
        return {"weights": numpyro.sample("weights", dist.TransformedDistribution(base, transform))}

    parts = (
        handlers.block(model, hide=["means", "weights"]),
        handlers.block(model, expose=["means"]),
    )
    return listed_guides(model, AutoNormal(parts[0]), AutoDelta(parts[1]), rest)


def at_value(model):
    values = {"w": jnp.arange(3.0), "scale": 0.5}
    return AutoNormal(model, init_loc_fn=init_to_value(values=values))


regression = given(
    lambda x, w, scale: dist.Normal(x @ w, scale), w=slopes(), scale=dist.HalfNormal(1)
)
student = of(lambda mean: dist.StudentT(4.0, mean, 1), mean=dist.Normal(0, 5))
DATA = {"y": Y, "count": BINARY * 2, "design": {"x": X}}

CASES: dict[str, Case] = {
    "index": Case(indexed, (X, Y, 5), AutoNormal, reference=indexed),
    "subsample": Case(subsampled, (X, Y, 5), AutoNormal, reference=subsampled),
    "two sites, one scaled": Case(two_sites, (X, Y, BINARY)),
    "model scaled": Case(handlers.scale(student, 0.25), (Y,)),
    "scaled by record": Case(handled(lambda c: handlers.scale(scale=c)), (X, Y, Y**2)),
    "mask handler": Case(handled(lambda c: handlers.mask(mask=c)), (X, Y, BINARY == 1)),
    "masked likelihood": Case(masked_likelihood, (Y, BINARY == 1)),
    "nested plates": Case(nested, (X,), AutoNormal, data_plate="records"),
    "records in the inner plate": Case(records_inside, (X,), data_plate="records"),
    "factors": Case(factors, (X, Y), AutoNormal),
    "groups": Case(group_levels, (Y, BINARY * 3)),
    "supports": Case(supports, (X, Y), AutoDiagonalNormal),
    "supports, AutoDelta": Case(supports, (X, Y), AutoDelta),
    "reparam": Case(reparametrised, (X, Y), AutoMultivariateNormal),
    "mixture, AutoLowRank": Case(mixture, (Y,),
        lambda m: AutoLowRankMultivariateNormal(m, rank=2, init_loc_fn=init_to_median)),
    "mixture, AutoGuideList": Case(mixture, (Y,), of_three_parts),
    "AutoIAFNormal, particles": Case(regression, (X, Y),
        lambda m: AutoIAFNormal(m, hidden_dims=[4]), num_particles=2),
    "hand-written, auxiliary, dynamic support": Case(dynamic_support, (Y,),
        lambda m: with_auxiliary_site),
    "hand-written, constrained": Case(regression, (X, Y), lambda m: constrained_guide,
        init_params={"a": 4.0}),
    "own parameters": Case(own_parameters, (X, Y), AutoDiagonalNormal),
    "pytree": Case(pytree, (DATA,), AutoNormal, {"offset": np.array([0.5, 0.25]), "missing": None},
        {"family": "laplace"}, public=["offset"]),
    "keywords, init_to_value": Case(regression, (), at_value, {"y": Y, "x": X},
        public=[np.arange(3.0)]),
}  # fmt: skip
SLOW = {"mixture, AutoGuideList", "reparam", "hand-written, constrained"}


@pytest.mark.full
@pytest.mark.parametrize("name", CASES)
def test_prior_plus_likelihood_of_each_record_is_the_log_density(name: str) -> None:
    case = CASES[name]
    reference, reference_args, reference_kwargs = case.of_numpyro()
    kwargs = case.kwargs | case.static
    structure = read_model(case.model, case.args, kwargs, case.data_plate, declare(case.public))
    assert structure.data_plate == "records"
    assert structure.layout.num_examples == N
    rows, shared, _ = structure.layout.rows(case.args, kwargs)
    model = Model(case.model, structure)
    params = {"noise": jnp.asarray(0.4), "prior_mean": jnp.asarray(-0.3)}
    params = {key: value for key, value in params.items() if key in structure.params}
    reference = handlers.substitute(reference, data=params)
    reference_kwargs |= case.static

    def latents() -> dict[str, jax.Array]:
        """In unconstrained coordinates of the site's own support."""
        seeded = handlers.seed(reference, jax.random.key(3))
        started = handlers.substitute(seeded, substitute_fn=init_to_uniform())
        trace = handlers.trace(started).get_trace(*reference_args, **reference_kwargs)
        return {
            name: dist.biject_to(site["fn"].support).inv(site["value"])
            for name, site in trace.items()
            if site["type"] == "sample" and not site["is_observed"]
        }

    @jax.jit
    def values(rows: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        found = latents()
        assert set(found) == set(structure.latents)
        likelihood = jax.vmap(lambda row: model.log_likelihood(found, params, row, shared))(rows)
        expected = -potential_energy(reference, reference_args, reference_kwargs, found)
        return model.log_prior(found, params, shared), likelihood, expected

    prior, likelihood, expected = values(rows)
    assert likelihood.shape == (N,)
    assert likelihood.dtype == jnp.float64
    np.testing.assert_allclose(prior + likelihood.sum(), expected, rtol=0, atol=1e-10)
    assert abs(float(likelihood.sum())) > 1e-3  # the likelihood is not in the prior


@pytest.mark.full
def test_the_likelihood_of_a_record_is_the_density_of_a_data_set_of_one_row() -> None:
    model = Model(two_sites, read_model(two_sites, (X, Y, BINARY), {}))
    latents = {"w": jnp.asarray([0.3, -0.2, 0.9]), "scale": jnp.asarray(-0.4)}
    arguments = (X[7:8], Y[7:8], BINARY[7:8])
    _, trace = log_density(two_sites, arguments, {}, latents | {"scale": jnp.exp(-0.4)})
    expected = trace["y"]["fn"].log_prob(trace["y"]["value"]).sum()
    expected += 0.3 * trace["count"]["fn"].log_prob(trace["count"]["value"]).sum()
    found = model.log_likelihood(latents, {}, tuple(jnp.asarray(a[0]) for a in arguments), ())
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)


@pytest.mark.full
def test_reading_a_model_looks_at_no_number() -> None:
    """Records of NaN give the same structure as the records."""
    structure = read_model(factors, (X, Y), {})
    assert read_model(factors, (X * np.nan, Y * np.nan), {}) == structure
    assert structure.likelihood == ("huber",)
    assert set(structure.prior_factors) == {"penalty", "penalty of each"}
    assert structure.layout.shapes == (((D,), "float64"), ((), "float64"))


@pytest.mark.extended
@pytest.mark.parametrize("name", [
    pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW))
    for name, case in CASES.items() if case.guide is not None
])  # fmt: skip
def test_without_clip_and_noise_the_run_is_that_of_svi(name: str) -> None:
    """The sampler draws batches: the model's own subsampling changes nothing."""
    case = CASES[name]
    model, args, kwargs = case.of_numpyro()
    optim, loss = optax.sgd(1e-5), Trace_ELBO(num_particles=case.num_particles)
    settings = {"progress_bar": False, "init_params": case.init_params}
    svi = SVI(model, case.guide(model), optim, loss, **case.static)
    expected = svi.run(KEY, 3, *args, **settings, **kwargs).params
    private = dpsvi(case.model, case.guide(case.model), optim, loss, clip_norm=jnp.inf,
                    noise_multiplier=0.0, public=case.public, data_plate=case.data_plate,
                    **case.static)  # fmt: skip
    found = private.run(KEY, 3, *case.args, **settings, **case.kwargs).params
    assert found.keys() == expected.keys()
    found, expected = ravel_pytree(found)[0], ravel_pytree(expected)[0]
    assert found.dtype == jnp.float64
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.full
def test_public_arguments_may_change_between_runs() -> None:
    """A shared array is an argument of the compiled step, not a constant in it."""
    traces = []

    def model(y, public):
        traces.append(1)
        mean = numpyro.sample("mean", dist.Normal(public.sum(), 1))
        with numpyro.plate("records", y.shape[0]):
            numpyro.sample("y", dist.Normal(mean + public[0], 1), obs=y)

    def driver():
        return dpsvi(model, AutoNormal, optax.sgd(1e-2), clip_norm=5.0, noise_multiplier=0.5,
                     secret_key=1, repetition=True, public=["public"])  # fmt: skip

    def end(svi, public):
        return svi.run(KEY, 20, Y, public, progress_bar=False).params["mean_auto_loc"]

    svi, two = driver(), np.array([-3.0, 4.0])
    first = end(svi, np.array([0.5, 1.0]))
    compiled = len(traces)
    second = end(svi, two)
    assert len(traces) < 2 * compiled
    np.testing.assert_allclose(second, end(driver(), two), rtol=1e-5)
    assert abs(second - first) > 0.05


PARTS = (
    "__defaults__", "__kwdefaults__", "__self__", "__func__", "__wrapped__", "func", "args",
    "keywords", "__dict__",
)  # fmt: skip


def _reachable(root: Any) -> list[Any]:
    """Every array that can be reached from an object, through closures too."""
    seen, found, stack = set(), [], [root]
    while stack:
        item = stack.pop()
        if id(item) in seen or isinstance(item, type | types.ModuleType):
            continue
        seen.add(id(item))
        if isinstance(item, jax.Array | np.ndarray):
            found.append(item)
        elif isinstance(item, dict):
            stack += [*item.keys(), *item.values()]
        elif isinstance(item, list | tuple | set | frozenset):
            stack += list(item)
        elif not isinstance(item, str | bytes | int | float):
            stack += [cell.cell_contents for cell in getattr(item, "__closure__", None) or ()]
            stack += [getattr(item, name, None) for name in PARTS]
    return found


@pytest.mark.full
@pytest.mark.parametrize("make", [AutoNormal, lambda model: listed_guides(
    model, AutoDiagonalNormal(handlers.block(model, hide=["scale"])),
    AutoDelta(handlers.block(model, expose=["scale"])),
)])  # fmt: skip
def test_the_guide_holds_no_record_after_a_run(make: Callable[..., Any]) -> None:
    secret = np.ones(3)
    holder = types.SimpleNamespace(value=secret)
    for root in (lambda: secret, jax.tree_util.Partial(max, secret), {"a": [holder.__eq__]}):
        assert any(found is secret for found in _reachable(root)), "the walk is blind"
    guide = make(regression)
    svi = dpsvi(regression, guide, optax.adam(1e-2))
    svi.run(KEY, 2, X, Y, progress_bar=False)
    arrays = _reachable(guide.__dict__)
    assert arrays, "the walk found nothing"
    records = np.concatenate([X.ravel(), Y])
    for array in arrays:
        if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
            continue
        assert array.shape[:1] != (N,)
        assert not np.isin(np.ravel(array), records).any()
    assert svi._sessions
    assert not any(array.shape[:1] == (N,) for array in _reachable(svi.__dict__))
