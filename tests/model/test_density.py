"""A model split into prior and likelihood of each record, against NumPyro's own density."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers
from numpyro.infer import init_to_uniform
from numpyro.infer.reparam import LocScaleReparam, TransformReparam
from numpyro.infer.util import log_density, potential_energy

from numpyro_dp.model.density import Model
from numpyro_dp.model.structure import read_model

N, D = 12, 3


def x64() -> Any:
    """Double precision, in the oldest and the newest jax."""
    return jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64()


class Case(NamedTuple):
    """A model with its arguments; the reference sees the same without subsampling."""

    model: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    reference: Callable[..., Any] | None = None
    data_plate: str | None = None


def _x() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(N, D))


def _y() -> np.ndarray:
    return np.random.default_rng(1).normal(size=N)


def _binary() -> np.ndarray:
    return np.random.default_rng(2).integers(0, 2, size=N)


def indexed(x, y, subsample_size=None):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([D]).to_event(1))
    with numpyro.plate("records", N, subsample_size=subsample_size) as index:
        numpyro.sample("y", dist.Normal(x[index] @ w, 1), obs=y[index])


def subsampled(x, y, subsample_size=None):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([D]).to_event(1))
    with numpyro.plate("records", x.shape[0], subsample_size=subsample_size):
        rows = numpyro.subsample(x, event_dim=1)
        numpyro.sample("y", dist.Normal(rows @ w, 1), obs=numpyro.subsample(y, event_dim=0))


def hard_coded_size(y):
    mean = numpyro.sample("mean", dist.Normal(0, 5))
    with numpyro.plate("records", N):
        numpyro.sample("y", dist.StudentT(4.0, mean, 1), obs=y)


def two_sites(x, y, count):
    w = numpyro.sample("w", dist.Laplace(0, 1).expand([D]).to_event(1))
    scale = numpyro.sample("scale", dist.HalfNormal(1))
    with numpyro.plate("records", x.shape[0]):
        mean = numpyro.deterministic("mean", x @ w)
        numpyro.sample("y", dist.Normal(mean, scale), obs=y)
        with handlers.scale(scale=0.3):
            numpyro.sample("count", dist.Poisson(jnp.exp(mean)), obs=count)


def weighted(x, y, weight):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([D]).to_event(1))
    with numpyro.plate("records", x.shape[0]), handlers.scale(scale=weight):
        numpyro.sample("y", dist.Normal(x @ w, 1), obs=y)


def nested(x):
    mean = numpyro.sample("mean", dist.Normal(0, 3).expand([D]).to_event(1))
    features = numpyro.plate("features", D, dim=-1)
    with features:
        scale = numpyro.sample("scale", dist.LogNormal(0, 1))
    with numpyro.plate("records", x.shape[0], dim=-2), features:
        numpyro.sample("x", dist.Normal(mean, scale), obs=x)


def records_inside(x):
    """Records along the last axis of the plates, though along the first of the argument."""
    with numpyro.plate("features", D, dim=-2):
        mean = numpyro.sample("mean", dist.Normal(0, 3))
        with numpyro.plate("records", x.shape[0], dim=-1):
            numpyro.sample("x", dist.Normal(mean, 1), obs=x.T)


def masked(y, mask):
    mean = numpyro.sample("mean", dist.Normal(0, 1))
    with numpyro.plate("records", y.shape[0]), handlers.mask(mask=mask):
        numpyro.sample("y", dist.Normal(mean, 1), obs=y)


def masked_likelihood(y, mask):
    mean = numpyro.sample("mean", dist.Normal(0, 1))
    with numpyro.plate("records", y.shape[0]):
        numpyro.sample("y", dist.Normal(mean, 1).mask(mask), obs=y)


def custom_likelihood(x, y):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([D]).to_event(1))
    numpyro.factor("penalty", -jnp.sum(w**4))
    with numpyro.plate("records", x.shape[0]):
        numpyro.factor("huber", -jnp.sqrt(1 + (y - x @ w) ** 2))


def factor_in_another_plate(x, y):
    with numpyro.plate("features", D):
        w = numpyro.sample("w", dist.Normal(0, 1))
        numpyro.factor("penalty", -jnp.abs(w))
    with numpyro.plate("records", x.shape[0]):
        numpyro.sample("y", dist.Normal(x @ w, 1), obs=y)


def constrained(x, y):
    numpyro.sample("beta", dist.Beta(2, 3))
    weights = numpyro.sample("weights", dist.Dirichlet(jnp.ones(D)))
    low = numpyro.sample("low", dist.LogNormal(0, 1))
    width = numpyro.sample("width", dist.Uniform(0, low))  # support depends on another site
    flat = numpyro.sample("flat", dist.ImproperUniform(dist.constraints.positive, (), ()))
    scale = numpyro.sample("scale", dist.HalfNormal(2))
    chol = numpyro.sample("chol", dist.LKJCholesky(D, 1.5))
    interval = numpyro.sample("interval", dist.Uniform(-2.0, 3.0))
    with numpyro.plate("records", x.shape[0]):
        numpyro.sample("y", dist.Normal(x @ chol @ weights + interval, scale + width), obs=y)
        numpyro.factor("flat_factor", -flat * y**2)


def reparametrised(x, y):
    config = {"w": LocScaleReparam(centered=0.3), "s": TransformReparam()}
    with handlers.reparam(config=config):
        scale = numpyro.sample("scale", dist.HalfCauchy(1))
        w = numpyro.sample("w", dist.Normal(0, scale).expand([D]).to_event(1))
        s = numpyro.sample(
            "s", dist.TransformedDistribution(dist.Normal(0, 1), dist.transforms.ExpTransform())
        )
    with numpyro.plate("records", x.shape[0]):
        numpyro.sample("y", dist.Normal(x @ w, s), obs=y)


def mixture(y):
    weights = numpyro.sample("weights", dist.Dirichlet(jnp.ones(2)))
    means = numpyro.sample("means", dist.Normal(0, 3).expand([2]).to_event(1))
    with numpyro.plate("records", y.shape[0]):
        components = dist.Normal(means, 1.0)
        numpyro.sample(
            "y", dist.MixtureSameFamily(dist.Categorical(probs=weights), components), obs=y
        )


def pytree(data, *, offset):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([D]).to_event(1))
    with numpyro.plate("records", data["y"].shape[0]):
        mean = data["design"]["x"] @ w + offset
        numpyro.sample("y", dist.Bernoulli(logits=mean), obs=data["y"])


def with_options(x, y, family, degree=1, missing=None):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([D]).to_event(1))
    noise = {"normal": dist.Normal, "laplace": dist.Laplace}[family]
    assert missing is None
    with numpyro.plate("records", x.shape[0]):
        numpyro.sample("y", noise(x**degree @ w, 1), obs=y)


def own_parameter(x, y):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([D]).to_event(1))
    scale = numpyro.param("noise", 0.7, constraint=dist.constraints.positive)
    prior = numpyro.param("prior_mean", 0.2)
    b = numpyro.sample("b", dist.Normal(prior, 1))
    with numpyro.plate("records", x.shape[0]):
        numpyro.sample("y", dist.Normal(x @ w + b, scale), obs=y)


def group_levels(y, group):
    with numpyro.plate("groups", 4):
        level = numpyro.sample("level", dist.Normal(0, 1))
    with numpyro.plate("records", y.shape[0]):
        numpyro.sample("y", dist.Normal(level[group], 1), obs=y)


def nested_plates_share(x, y):
    with numpyro.plate("outputs", 2, dim=-1):
        mean = numpyro.sample("mean", dist.Normal(0, 1))
    with numpyro.plate("records", y.shape[0], dim=-2), numpyro.plate("outputs", 2, dim=-1):
        numpyro.sample("y", dist.Normal(mean + x.sum(-1, keepdims=True), 1), obs=y)


CASES: dict[str, Callable[[], Case]] = {
    "index, full": lambda: Case(indexed, (_x(), _y())),
    "index, subsampled": lambda: Case(indexed, (_x(), _y(), 5), reference=indexed),
    "subsample, full": lambda: Case(subsampled, (_x(), _y())),
    "subsample, subsampled": lambda: Case(subsampled, (_x(), _y(), 5), reference=subsampled),
    "hard-coded size": lambda: Case(hard_coded_size, (_y(),)),
    "two sites, one scaled": lambda: Case(two_sites, (_x(), _y(), _binary())),
    "model scaled": lambda: Case(handlers.scale(hard_coded_size, 0.25), (_y(),)),
    "scaled by record": lambda: Case(weighted, (_x(), _y(), _y() ** 2)),
    "nested": lambda: Case(nested, (_x(),), data_plate="records"),
    "records in the inner plate": lambda: Case(records_inside, (_x(),), data_plate="records"),
    "outputs": lambda: Case(nested_plates_share, (_x(), _x()[:, :2]), data_plate="records"),
    "named plate": lambda: Case(nested, (_x(),), data_plate="records"),
    "mask handler": lambda: Case(masked, (_y(), _binary() == 1)),
    "masked likelihood": lambda: Case(masked_likelihood, (_y(), _binary() == 1)),
    "factor": lambda: Case(custom_likelihood, (_x(), _y())),
    "factor in another plate": lambda: Case(factor_in_another_plate, (_x(), _y())),
    "constrained": lambda: Case(constrained, (_x(), _y())),
    "reparam": lambda: Case(reparametrised, (_x(), _y())),
    "mixture": lambda: Case(mixture, (_y(),)),
    "pytree": lambda: Case(pytree, ({"design": {"x": _x()}, "y": _binary()},),
        {"offset": np.float64(0.5)}),
    "keyword data": lambda: Case(pytree, (), {"data": {"design": {"x": _x()}, "y": _binary()},
                                              "offset": 0.25}),
    "options": lambda: Case(with_options, (_x(), _y(), "laplace"), {"degree": 2, "missing": None}),
    "own parameter": lambda: Case(own_parameter, (_x(), _y())),
    "groups": lambda: Case(group_levels, (_y(), _binary() * 3)),
}  # fmt: skip


def unconstrained(model: Callable[..., Any], case: Case, seed: int) -> dict[str, jax.Array]:
    """Values of the latent sites, in unconstrained coordinates of the site's own support."""
    seeded = handlers.seed(model, jax.random.key(seed))
    trace = handlers.trace(handlers.substitute(seeded, substitute_fn=init_to_uniform())).get_trace(
        *case.args, **case.kwargs
    )
    return {
        name: dist.biject_to(site["fn"].support).inv(site["value"])
        for name, site in trace.items()
        if site["type"] == "sample" and not site["is_observed"]
    }


@pytest.fixture(autouse=True)
def _quick_compilation():
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.mark.full
@pytest.mark.parametrize("name", CASES)
def test_prior_plus_likelihood_of_each_record_is_the_log_density(name: str) -> None:
    with x64():
        case = CASES[name]()
        args, kwargs = jax.tree.map(
            lambda leaf: jnp.asarray(leaf) if isinstance(leaf, np.ndarray) else leaf,
            (case.args, case.kwargs),
        )
        case = case._replace(args=args, kwargs=kwargs)
        structure = read_model(case.model, case.args, case.kwargs, case.data_plate)
        assert structure.data_plate == "records"
        assert structure.layout.num_examples == N
        rows, shared, _ = structure.layout.rows(case.args, case.kwargs)
        model = Model(case.model, structure)
        params = {"noise": jnp.asarray(0.4), "prior_mean": jnp.asarray(-0.3)}
        params = {key: value for key, value in params.items() if key in structure.params}
        full = case if case.reference is None else Case(case.reference, case.args[:-1], case.kwargs)

        @jax.jit
        def values(rows: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            latents = unconstrained(case.model, case, seed=3)
            assert set(latents) == set(structure.latents)
            prior = model.log_prior(latents, params, shared)
            likelihood = jax.vmap(
                lambda example: model.log_likelihood(latents, params, example, shared)
            )(rows)
            reference = handlers.substitute(full.model, data=params)
            return prior, likelihood, -potential_energy(reference, full.args, full.kwargs, latents)

        prior, likelihood, expected = values(rows)
        assert likelihood.shape == (N,)
        assert likelihood.dtype == jnp.float64
        np.testing.assert_allclose(prior + likelihood.sum(), expected, rtol=0, atol=1e-10)
        assert abs(float(likelihood.sum())) > 1e-3  # the likelihood is not in the prior


@pytest.mark.full
def test_the_likelihood_of_a_record_is_the_density_of_a_data_set_of_one_row() -> None:
    with x64():
        x, y = _x(), _y()
        structure = read_model(two_sites, (x, y, _binary()), {})
        model = Model(two_sites, structure)
        latents = {"w": jnp.asarray([0.3, -0.2, 0.9]), "scale": jnp.asarray(-0.4)}
        scale = {"w": latents["w"], "scale": jnp.exp(latents["scale"])}
        arguments = (x[7:8], y[7:8], _binary()[7:8])
        _, trace = log_density(two_sites, arguments, {}, scale)
        expected = trace["y"]["fn"].log_prob(trace["y"]["value"]).sum()
        expected += 0.3 * trace["count"]["fn"].log_prob(trace["count"]["value"]).sum()
        example = tuple(jnp.asarray(a[0]) for a in arguments)
        found = model.log_likelihood(latents, {}, example, ())
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)


@pytest.mark.full
def test_the_structure_names_what_it_found() -> None:
    structure = read_model(custom_likelihood, (_x(), _y()), {})
    assert structure.latents == ("w",)
    assert structure.likelihood == ("huber",)
    assert structure.prior_factors == ("penalty",)
    structure = read_model(own_parameter, (_x(), _y()), {})
    assert set(structure.params) == {"noise", "prior_mean"}
    assert structure.layout.shapes == (((D,), "float32"), ((), "float32"))


@pytest.mark.full
def test_reading_a_model_looks_at_no_number() -> None:
    """Records of NaN, and shapes alone, give the same structure as the records."""
    x, y = _x(), _y()
    structure = read_model(two_sites, (x, y, _binary()), {})
    assert read_model(two_sites, (x * np.nan, y * np.nan, _binary()), {}) == structure
