"""Models that DPLaplace does not take: each is told why, before anything is spent."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from flat import grouped

from numpyro_dp import DPLaplace, NoiseReuseError, PrivacyBudget, UnsupportedModelError
from numpyro_dp.run import driver as drivers
from numpyro_dp.run.session import Session
from numpyro_dp.samplers import FullBatch

KEY = jax.random.key(0)
N = 400
X = jax.random.normal(jax.random.key(1), (N, 3))
Y = (jax.random.uniform(jax.random.key(2), (N,)) < jax.nn.sigmoid(X[:, 0])).astype(int)
GROUP = jnp.arange(N) % 7
BUDGET = PrivacyBudget(1.0, 1e-5)


def logistic(x, y):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([x.shape[-1]]).to_event(1))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=x @ w), obs=y)


def with_parameter(x, y):
    w = numpyro.param("w", jnp.zeros(3))
    b = numpyro.sample("b", dist.Normal(0, 1))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=x @ w + b), obs=y)


def with_local_latent(x, y):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))
    with numpyro.plate("rows", x.shape[0]):
        own = numpyro.sample("own", dist.Normal(0, 1))
        numpyro.sample("y", dist.Bernoulli(logits=x @ w + own), obs=y)


def with_factor(x, y):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.factor("y", y * jax.nn.log_sigmoid(x @ w))


def censored(x, y):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))
    with numpyro.plate("rows", x.shape[0]):
        base = dist.Gamma(2.0, jnp.exp(x @ w))
        numpyro.sample("time", dist.RightCensoredDistribution(base, y), obs=jnp.abs(x[:, 0]) + 0.1)


def censored_on_both_sides(x, y):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))
    with numpyro.plate("rows", x.shape[0]):
        fn = dist.IntervalCensoredDistribution(dist.Normal(x @ w, 1.0), y, y)
        numpyro.sample("time", fn, obs=jnp.stack([x[:, 0], x[:, 0] + 1], axis=-1))


def non_centred(x, y, group):
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    with numpyro.plate("groups", 7):
        effect = numpyro.sample("effect", dist.Normal(0, 1))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=scale * effect[group]), obs=y)


def network(x, y):
    first = numpyro.sample("first", dist.Normal(0, 1).expand([3, 4]).to_event(2))
    last = numpyro.sample("last", dist.Normal(0, 1).expand([4]).to_event(1))
    bias = numpyro.sample("bias", dist.Normal(0, 1))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=jnp.tanh(x @ first) @ last + bias), obs=y)


def up_to_a_latent(y):
    high = numpyro.sample("high", dist.LogNormal(0, 1))
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Uniform(0, high), obs=y)


def improper(x, y):
    support = dist.constraints.real_vector
    w = numpyro.sample("w", dist.ImproperUniform(support, (), (3,)))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=x @ w), obs=y)


def never_finite(x, y):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=jnp.sqrt(0 * (x @ w))), obs=y)


def without_latents_in_sight(x, y):
    numpyro.sample("w", dist.Normal(0, 1))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=x[:, 0]), obs=y)


MODELS = {
    "a parameter": (with_parameter, (X, Y), ["['w']", "no prior", "DPSVI"]),
    "a local latent": (with_local_latent, (X, Y), ["['own']", "data plate", "encoder"]),
    "a factor": (with_factor, (X, Y), ["factor 'y'", "obs=y", "DPSVI"]),
    "a censored site without quantiles": (censored, (X, Y), ["quantiles", "Gamma", "Weibull"]),
    "censoring from both sides": (
        censored_on_both_sides, (X, Y), ["from one side", "IntervalCensored", "DPSVI"],
    ),
    "effects that are not centred": (
        non_centred, (X, Y, GROUP), ["'effect' multiplied by 'scale'", "reparam", "DPSVI"],
    ),
    "a network": (network, (X, Y), ["neural network", "many modes", "DPSVI"]),
    "a support that moves": (up_to_a_latent, (Y,), ["support", "depends on latents", "DPSVI"]),
    "an improper prior": (improper, (X, Y), ["has no sampler", "proper prior"]),
    "301 latents": (logistic, (jnp.ones((N, 301)), Y), ["at most 300", "301 and 301", "aligned()"]),
    "gradients of NaN": (never_finite, (X, Y), ["no finite gradient", "sqrt"]),
    "no latent in sight": (without_latents_in_sight, (X, Y), ["No latent site changes"]),
}  # fmt: skip


@pytest.fixture
def nothing_runs(monkeypatch):
    """Fails a test that reads records or registers noise."""

    def fail(*_, **__):
        pytest.fail("a run has begun")

    monkeypatch.setattr(Session, "run", fail)
    monkeypatch.setattr("numpyro_dp.laplace.dplaplace.started", fail)
    monkeypatch.setattr(drivers, "started", fail)


@pytest.mark.table
@pytest.mark.parametrize("name", MODELS)
def test_what_no_normal_posterior_fits_is_refused(name, nothing_runs):
    model, args, parts = MODELS[name]
    with pytest.raises(UnsupportedModelError) as error:
        DPLaplace(model, budget=BUDGET).run(KEY, *args)
    for part in parts:
        assert part in str(error.value)


@pytest.mark.full
@pytest.mark.parametrize("likelihood", [
    lambda eta: dist.Poisson(jnp.exp(eta)), lambda eta: dist.Gamma(2.0, 2 * jnp.exp(-eta)),
], ids=["counts", "times"])  # fmt: skip
def test_many_weights_under_a_log_link_are_no_network(likelihood, nothing_runs):
    def model(x, y=None):
        w = numpyro.sample("w", dist.Normal(0, 1).expand([x.shape[1]]).to_event(1))
        with numpyro.plate("rows", x.shape[0]):
            numpyro.sample("y", likelihood(x @ w), obs=y)

    DPLaplace(model, budget=BUDGET).plan(jnp.ones((N, 20)), jnp.ones(N))


def test_a_constant_outcome_is_read(nothing_runs):
    def model(x, y):
        w = numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))
        with numpyro.plate("rows", x.shape[0]):
            numpyro.sample("residual", dist.Normal(y - x @ w, 1.0), obs=0.0)

    DPLaplace(model, budget=BUDGET).plan(X, Y)


def test_refusals_look_at_no_record(nothing_runs):
    """Shapes decide: records of NaN give the same message."""
    messages = []
    for x in (X, jnp.full_like(X, jnp.nan)):
        with pytest.raises(UnsupportedModelError) as error:
            DPLaplace(never_finite, budget=BUDGET).run(KEY, x, Y)
        messages.append(str(error.value))
    assert messages[0] == messages[1]


SCALES = {
    "an unknown argument": ({"z": 1.0}, ValueError, r"\['x', 'y'\], got \['z'\]"),
    "too many": ({"x": [1.0, 2.0]}, ValueError, r"'x'.*columns \(3,\), got \[1.0, 2.0\]"),
    "zero": ({"x": [1.0, 0.0, 1.0]}, ValueError, "positive numbers"),
    "NaN": ({"x": np.nan}, ValueError, "positive numbers"),
    "infinity": ({"x": np.inf}, ValueError, "positive numbers"),
    "negative": ({"x": -1.0}, ValueError, "positive numbers"),
}


@pytest.mark.every_case
@pytest.mark.parametrize("name", SCALES)
def test_bad_scales(name, nothing_runs):
    scales, kind, text = SCALES[name]
    with pytest.raises(kind, match=text):
        DPLaplace(logistic, budget=BUDGET, scales=scales).run(KEY, X, Y)


def test_scales_of_another_type():
    with pytest.raises(TypeError, match="Expected scales= as a dict"):
        DPLaplace(logistic, budget=BUDGET, scales=[1.0, 2.0, 3.0])
    with pytest.raises((TypeError, ValueError), match="'x'.*'wide'"):
        DPLaplace(logistic, budget=BUDGET, scales={"x": "wide"}).run(KEY, X, Y)


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "Expected a budget or a noise_multiplier"),
        ({"noise_multiplier": 0.0}, "DPLaplace needs privacy noise"),
        ({"budget": BUDGET, "sampler": FullBatch()}, "sampler"),
        ({"budget": BUDGET, "clip_norm": 1.0}, "clip_norm"),
    ],
    ids=["no budget", "no noise", "a sampler", "a clip norm"],
)
def test_bad_settings(options, text):
    with pytest.raises((TypeError, ValueError), match=text):
        DPLaplace(logistic, **grouped(**options)).run(KEY, X, Y)


@pytest.mark.every_case
@pytest.mark.parametrize("transform", [jax.jit, jax.vmap], ids=["jit", "vmap"])
def test_under_a_transformation(transform, nothing_runs):
    laplace = DPLaplace(logistic, budget=BUDGET)

    def call(scale):
        laplace.run(KEY, X * scale, Y)
        return scale

    with pytest.raises(NoiseReuseError, match=r"DPLaplace\.run outside"):
        transform(call)(jnp.ones((2, N, 1)) if transform is jax.vmap else 1.0)
