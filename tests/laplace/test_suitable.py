"""Models that DPLaplace does not take: each is told why, before anything is spent."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from flat import grouped
from models import given, of, slopes
from models import logistic as logistic_model

from numpyro_dp import DPLaplace, NoiseReuseError, PrivacyBudget, UnsupportedModelError
from numpyro_dp.run import driver as drivers
from numpyro_dp.run.session import Session
from numpyro_dp.samplers import FullBatch

KEY = jax.random.key(0)
N = 400
RNG = np.random.default_rng(0)
X = RNG.normal(size=(N, 3)).astype(np.float32)
Y = (RNG.random(N) < 1 / (1 + np.exp(-X[:, 0]))).astype(np.int32)
GROUP = np.arange(N, dtype=np.int32) % 7
BUDGET = PrivacyBudget(1.0, 1e-5)


logistic = logistic_model("rows")
with_parameter = given(
    lambda x, b: dist.Bernoulli(logits=x @ numpyro.param("w", jnp.zeros(3)) + b),
    b=dist.Normal(0, 1),
)
with_local_latent = given(
    lambda x, w: dist.Bernoulli(logits=x @ w + numpyro.sample("own", dist.Normal(0, 1))),
    w=slopes(),
)
censored = given(
    lambda x, w: dist.RightCensoredDistribution(dist.Gamma(2.0, jnp.exp(x @ w)), x[:, 0] > 0),
    w=slopes(),
)
censored_on_both_sides = given(
    lambda x, w: dist.IntervalCensoredDistribution(dist.Normal(x @ w, 1.0), *(x[:, :2].T > 0)),
    w=slopes(),
)
network = given(
    lambda x, first, last, bias: dist.Bernoulli(logits=jnp.tanh(x @ first) @ last + bias),
    first=dist.Normal(0, 1).expand([3, 4]).to_event(2),
    last=dist.Normal(0, 1).expand([4]).to_event(1), bias=dist.Normal(0, 1),
)  # fmt: skip
up_to_a_latent = of(lambda high: dist.Uniform(0, high), high=dist.LogNormal(0, 1))
improper = given(
    lambda x, w: dist.Bernoulli(logits=x @ w),
    w=dist.ImproperUniform(dist.constraints.real_vector, (), (3,)),
)
never_finite = given(lambda x, w: dist.Bernoulli(logits=jnp.sqrt(0 * (x @ w))), w=slopes())
without_latents_in_sight = given(lambda x, w: dist.Bernoulli(logits=x[:, 0]), w=dist.Normal(0, 1))


def with_factor(x, y):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.factor("y", y * jax.nn.log_sigmoid(x @ w))


def non_centred(x, y, group):
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    with numpyro.plate("groups", 7):
        effect = numpyro.sample("effect", dist.Normal(0, 1))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=scale * effect[group]), obs=y)


MODELS = {
    "a parameter": (with_parameter, (X, Y), ["['w']", "no prior", "DPSVI"]),
    "a local latent": (with_local_latent, (X, Y), ["['own']", "data plate", "encoder"]),
    "a factor": (with_factor, (X, Y), ["factor 'y'", "obs=y", "DPSVI"]),
    "a censored site without quantiles": (
        censored, (X, abs(X[:, 0])), ["quantiles", "Gamma", "Weibull"],
    ),
    "censoring from both sides": (
        censored_on_both_sides, (X, X[:, :2]), ["from one side", "IntervalCensored", "DPSVI"],
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
    model = given(lambda x, w: likelihood(x @ w), w=slopes())
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


@pytest.mark.every_case
@pytest.mark.parametrize(("options", "error", "text"), [
    ({"scales": {"z": 1.0}}, ValueError, r"\['x', 'y'\], got \['z'\]"),
    ({"scales": {"x": [1.0, 2.0]}}, ValueError, r"'x'.*columns \(3,\), got \[1.0, 2.0\]"),
    ({"scales": {"x": [1.0, 0.0, 1.0]}}, ValueError, "positive numbers"),
    ({"scales": {"x": np.nan}}, ValueError, "positive numbers"),
    ({"scales": {"x": np.inf}}, ValueError, "positive numbers"),
    ({"scales": {"x": -1.0}}, ValueError, "positive numbers"),
    ({"scales": [1.0, 2.0, 3.0]}, TypeError, "Expected scales= as a dict"),
    ({"scales": {"x": "wide"}}, (TypeError, ValueError), "'x'.*'wide'"),
    ({"budget": None, "noise_multiplier": 0.0}, ValueError, "DPLaplace needs privacy noise"),
    ({"sampler": FullBatch()}, TypeError, "sampler"),
    ({"clip_norm": 1.0}, TypeError, "clip_norm"),
])  # fmt: skip
def test_bad_settings(options, error, text, nothing_runs):
    with pytest.raises(error, match=text):
        DPLaplace(logistic, **grouped(**{"budget": BUDGET} | options)).run(KEY, X, Y)


@pytest.mark.every_case
@pytest.mark.parametrize("transform", [jax.jit, jax.vmap], ids=["jit", "vmap"])
def test_under_a_transformation(transform, nothing_runs):
    laplace = DPLaplace(logistic, budget=BUDGET)

    def call(scale):
        laplace.run(KEY, X * scale, Y)
        return scale

    with pytest.raises(NoiseReuseError, match=r"DPLaplace\.run outside"):
        transform(call)(jnp.ones((2, N, 1)) if transform is jax.vmap else 1.0)
