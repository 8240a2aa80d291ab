"""Models, guides and records that every estimator must handle."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from flat import grouped
from gaussian import gaussian
from models import given, slopes
from numpyro import handlers
from numpyro.contrib.module import random_flax_module
from numpyro.distributions import constraints
from numpyro.infer import SVI, Trace_ELBO, autoguide

from numpyro_dp import DPSVI
from numpyro_dp._tree import filled
from numpyro_dp.model.variational import VariationalProblem
from numpyro_dp.samplers import FullBatch
from numpyro_dp.sums.bounded import bounded_sum

from .registry import ESTIMATORS, EstimatorRow, x64

__all__ = [
    "NAMES", "SCENARIOS", "Bench", "Scenario", "bench", "by_name", "fast_where", "reference_svi",
    "row_numbers", "rows_for", "single",
]  # fmt: skip

ROWS, DIM = 10, 2


class Scenario(NamedTuple):
    """A model with its guide.

    Attributes:
        guide: Model -> guide.
        args: Random generator -> positional arguments.
        kwargs: Random generator -> keyword arguments.
        particles: Draws per step.
        reference: The same model in a form whose evidence lower bound NumPyro computes with the
            same draws, where that is another one.
        public: Names of public arguments, or what the guide and model hold.
        simulated: Whether ``centred`` can simulate outcomes of the model.
    """

    name: str
    model: Callable[..., Any]
    guide: Callable[..., Any]
    args: Callable[[Any], tuple[Any, ...]]
    kwargs: Callable[[Any], dict[str, Any]] = lambda rng: {}
    particles: int = 1
    reference: Callable[..., Any] | None = None
    public: Any = "captured"
    simulated: bool = True


#: A vector, a scalar and a positive latent.
regression = given(
    lambda x, coef, bias, scale: dist.Normal(x @ coef + bias, scale), "rows",
    coef=slopes(), bias=dist.Normal(0.5, 2), scale=dist.HalfNormal(2),
)  # fmt: skip
#: No constrained site: the paper's example.
logistic = given(lambda x, coef: dist.Bernoulli(logits=x @ coef), "rows", coef=slopes())


def subsampled(x, y):
    """``regression`` with a plate that subsamples: the whole data set's likelihood is meant."""
    coef = numpyro.sample("coef", dist.Normal(0, 1).expand([DIM]).to_event(1))
    bias = numpyro.sample("bias", dist.Normal(0.5, 2))
    scale = numpyro.sample("scale", dist.HalfNormal(2))
    with numpyro.plate("rows", x.shape[0], subsample_size=4) as rows:
        numpyro.sample("y", dist.Normal(x[rows] @ coef + bias, scale), obs=y[rows])


def constrained(x):
    """Priors on the simplex, on correlation matrices, on (0, 1) and on (0, inf)."""
    weights = numpyro.sample("weights", dist.Dirichlet(jnp.array([1.0, 2.0, 3.0])))
    corr = numpyro.sample("corr", dist.LKJCholesky(2, 1.5))
    share = numpyro.sample("share", dist.Beta(2.0, 3.0))
    scale = numpyro.sample("scale", dist.HalfNormal(1.0).expand([2]).to_event(1))
    tril = scale[:, None] * corr
    with numpyro.plate("rows", x.shape[0]):
        loc = jnp.stack([weights[0] + share, weights[1] - weights[2]])
        numpyro.sample("x", dist.MultivariateNormal(loc, scale_tril=tril), obs=x)


def own_params(x, y):
    """Parameters of the model itself, in the likelihood and in the prior."""
    noise = numpyro.param("noise", 0.7, constraint=constraints.positive)
    width = numpyro.param("width", 1.3, constraint=constraints.positive)
    coef = numpyro.sample("coef", dist.Normal(0, width).expand([DIM]).to_event(1))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Normal(x @ coef, noise), obs=y)


def simplex_param(x, y):
    """A parameter of the model with fewer unconstrained entries than constrained ones."""
    share = numpyro.param("share", jnp.array([0.6, 0.4]), constraint=constraints.simplex)
    coef = numpyro.sample("coef", dist.Normal(0, 1).expand([DIM]).to_event(1))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Normal((x * share) @ coef, 0.7), obs=y)


class ExpNormal(autoguide.AutoDiagonalNormal):
    """T = exp, the other transform of the paper."""

    scale_constraint = constraints.positive


class PlainCholesky(autoguide.AutoMultivariateNormal):
    """Without the scaling of NumPyro's default."""

    scale_tril_constraint = constraints.lower_cholesky


def only_params(x, y):
    """Maximum likelihood: no latent site at all."""
    coef = numpyro.param("coef", jnp.zeros(DIM))
    noise = numpyro.param("noise", 0.7, constraint=constraints.positive)
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Normal(x @ coef, noise), obs=y)


def two_sites(data, *, counts, keep, offset, link):
    """Two observed sites, scale, mask, integers, a pytree, keywords, a public array, a constant."""
    with handlers.scale(scale=0.5):
        coef = numpyro.sample("coef", dist.Normal(0, 1).expand([DIM]).to_event(1))
    rate = numpyro.sample("rate", dist.Gamma(2.0, 1.0))
    numpyro.factor("ridge", -0.1 * jnp.sum(coef**2))
    with numpyro.plate("rows", counts.shape[0]), handlers.scale(scale=2.5):
        mean = numpyro.deterministic("mean", data["x"] @ coef + offset.sum())
        numpyro.sample("y", dist.StudentT(4.0, mean, 1.0).mask(keep), obs=data["y"])
        assert link == "log"
        numpyro.sample("counts", dist.Poisson(rate * jnp.exp(0.3 * mean)), obs=counts)


class Network(nn.Module):
    """One hidden layer."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(1)(jnp.tanh(nn.Dense(3)(x)))[..., 0]


def network(x, y):
    """Bayes by backprop: a prior for each weight."""
    net = random_flax_module("net", Network(), dist.Normal(0, 1), input_shape=(1, DIM))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Normal(net(x), 0.5), obs=y)


def by_hand(x, y):
    """Dense normal, and a log-normal for the positive latent."""
    loc = numpyro.param("loc", 0.1 * jnp.arange(DIM + 1.0))
    tril = numpyro.param(
        "tril", jnp.tril(0.3 * jnp.eye(DIM + 1) + 0.05), constraint=constraints.lower_cholesky
    )
    joint = numpyro.sample(
        "joint", dist.MultivariateNormal(loc, scale_tril=tril), infer={"is_auxiliary": True}
    )
    numpyro.sample("coef", dist.Delta(joint[:DIM], event_dim=1))
    numpyro.sample("bias", dist.Delta(joint[DIM]))
    mu = numpyro.param("mu", jnp.array(-0.2))
    sd = numpyro.param("sd", jnp.array(0.2), constraint=constraints.positive)
    numpyro.sample("scale", dist.LogNormal(mu, sd))


def by_hand_gamma(x, y):
    """A Gamma guide: reparameterised implicitly."""
    loc = numpyro.param("loc", 0.1 * jnp.ones(DIM))
    sd = numpyro.param("sd", 0.2 * jnp.ones(DIM + 1), constraint=constraints.positive)
    coef = numpyro.sample("coef", dist.Normal(loc, sd[:DIM]).to_event(1))
    numpyro.sample("bias", dist.Normal(coef.sum(), sd[DIM]))  # depends on another site
    shape = numpyro.param("shape", 4.0, constraint=constraints.positive)
    numpyro.sample("scale", dist.Gamma(shape, 4.0))


def by_hand_constrained(x):
    """Guides whose support is constrained itself: Dirichlet and Beta."""
    strength = numpyro.param("strength", 3.0 * jnp.ones(3), constraint=constraints.positive)
    numpyro.sample("weights", dist.Dirichlet(strength))
    a = numpyro.param("a", 2.5, constraint=constraints.positive)
    numpyro.sample("share", dist.Beta(a, 3.0))
    angle = numpyro.param("angle", 0.2)
    sd = numpyro.param("sd", 0.3, constraint=constraints.positive)
    base = dist.Normal(angle * jnp.ones(1), sd).to_event(1)
    numpyro.sample(
        "corr", dist.TransformedDistribution(base, dist.transforms.CorrCholeskyTransform())
    )
    mu = numpyro.param("mu", jnp.zeros(2))
    numpyro.sample("scale", dist.LogNormal(mu, 0.2).to_event(1))


def shares_width(x, y):
    """A guide that reads a parameter of the model."""
    width = numpyro.param("width", 1.3, constraint=constraints.positive)
    loc = numpyro.param("loc", jnp.zeros(DIM))
    numpyro.sample("coef", dist.Normal(loc, 0.3 * width).to_event(1))


def no_sites(x, y):
    """The guide of a model without latents."""


def guide_list(model):
    """One automatic part for each kind, and a function."""
    guide = autoguide.AutoGuideList(model)
    guide.append(autoguide.AutoMultivariateNormal(handlers.block(model, expose=["coef"])))
    guide.append(autoguide.AutoDelta(handlers.block(model, expose=["bias"])))

    def scale_guide(x, y):
        mu = numpyro.param("mu", -0.2)
        return {"scale": numpyro.sample("scale", dist.LogNormal(mu, 0.2))}

    guide.append(scale_guide)
    return guide


def nested_list(model):
    """Automatic parts alone, one of them mean-field by site."""
    guide = autoguide.AutoGuideList(model)
    guide.append(autoguide.AutoNormal(handlers.block(model, hide=["coef"])))
    guide.append(autoguide.AutoDiagonalNormal(handlers.block(model, expose=["coef"])))
    return guide


def _xy(rng):
    x = rng.normal(size=(ROWS, DIM))
    return jnp.asarray(x), jnp.asarray(x @ [1.0, -0.5] + 0.4 * rng.normal(size=ROWS))


def _labels(rng):
    x = rng.normal(size=(ROWS, DIM))
    return jnp.asarray(x), jnp.asarray(rng.integers(0, 2, ROWS))


def _points(rng):
    return (jnp.asarray(rng.normal(size=(ROWS, 2))),)


def _tree(rng):
    x, y = _xy(rng)
    return ({"x": x, "y": y},)


def _keywords(rng):
    return {
        "counts": jnp.asarray(rng.poisson(2.0, ROWS)),
        "keep": jnp.asarray(rng.integers(0, 2, ROWS).astype(bool)),
        "offset": jnp.asarray([0.1, -0.2, 0.3]),
        "link": "log",
    }


_with = functools.partial
SCENARIOS: tuple[Scenario, ...] = (
    Scenario("diagonal", regression, autoguide.AutoDiagonalNormal, _xy),
    Scenario("multivariate", regression, autoguide.AutoMultivariateNormal, _xy),
    Scenario("lowrank", regression, _with(autoguide.AutoLowRankMultivariateNormal, rank=2), _xy),
    Scenario("iaf", regression, _with(autoguide.AutoIAFNormal, num_flows=2, hidden_dims=[4, 4]),
        _xy),
    Scenario("bnaf", regression, _with(autoguide.AutoBNAFNormal, hidden_factors=[2, 2]), _xy),
    Scenario("normal", regression, autoguide.AutoNormal, _xy),
    Scenario("delta", regression, autoguide.AutoDelta, _xy),
    Scenario("guide_list", regression, guide_list, _xy),
    Scenario("nested_list", regression, nested_list, _xy),
    Scenario("by_hand", regression, lambda _: by_hand, _xy),
    Scenario("by_hand_gamma", regression, lambda _: by_hand_gamma, _xy),
    Scenario("diagonal_3", regression, autoguide.AutoDiagonalNormal, _xy, particles=3,
             simulated=False),
    Scenario("gamma_3", regression, lambda _: by_hand_gamma, _xy, particles=3, simulated=False),
    Scenario("logistic", logistic, autoguide.AutoDiagonalNormal, _labels),
    Scenario("constrained", constrained, autoguide.AutoNormal, _points),
    Scenario("constrained_by_hand", constrained, lambda _: by_hand_constrained, _points),
    Scenario("own_params", own_params, autoguide.AutoDiagonalNormal, _xy),
    Scenario("own_params_3", own_params, autoguide.AutoMultivariateNormal, _xy, particles=3,
             simulated=False),
    Scenario("simplex_param", simplex_param, autoguide.AutoDiagonalNormal, _xy),
    Scenario("exp", regression, ExpNormal, _xy),
    Scenario("plain_cholesky", regression, PlainCholesky, _xy),
    Scenario("shared_param", own_params, lambda _: shares_width, _xy),
    Scenario("only_params", only_params, lambda _: no_sites, _xy, simulated=False),
    Scenario("two_sites", two_sites, autoguide.AutoNormal, _tree, _keywords, public=("offset",)),
    Scenario("network", network, autoguide.AutoDiagonalNormal, _xy),
    Scenario("subsampled", subsampled, autoguide.AutoDiagonalNormal, _xy, reference=regression),
)  # fmt: skip


NAMES = tuple(scenario.name for scenario in SCENARIOS)


def fast_where(names: Any) -> list[Any]:
    """All scenarios for ``parametrize``, those not among ``names`` marked slow."""
    assert set(names) <= set(NAMES)
    return [n if n in names else pytest.param(n, marks=pytest.mark.extended) for n in NAMES]


def by_name(name: str) -> Scenario:
    """Returns a scenario."""
    return next(scenario for scenario in SCENARIOS if scenario.name == name)


class Bench(NamedTuple):
    """A scenario made concrete, in the precision that was on when :func:`bench` was called.

    The driver has no clip, noise or sampling, and the parameters are away from where they start.
    """

    scenario: Scenario
    dpsvi: DPSVI
    guide: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    problem: VariationalProblem
    arrays: tuple[Any, ...]
    params: dict[str, Any]

    def elbo_gradient(self, key):
        """Gradient of NumPyro's own loss, every record in it."""
        model = self.scenario.reference or self.scenario.model

        def loss(params):
            elbo = Trace_ELBO(num_particles=self.scenario.particles)
            params = self.problem.constrain(params)
            return elbo.loss(key, params, model, self.guide, *self.args, **self.kwargs)

        return jax.jit(jax.grad(loss))(self.params)

    def total(self, row):
        """Returns ``(clip_norm, params, key, arrays, mask, seeds) -> bounded sum``."""
        estimator = row.build()(self.problem) if isinstance(row, EstimatorRow) else row

        def total(clip_norm, params, key, arrays, mask, seeds=None):
            mechanism = gaussian(clip_norm, 0.0)
            public = estimator.prepare(key, params)
            seeds = row_numbers(mask.size) if seeds is None else seeds
            return bounded_sum(estimator, mechanism, public, arrays, mask, seeds=seeds)

        return total

    def entries(self, row) -> tuple[str, ...]:
        """Names of the entries of the signal that have numbers."""
        estimator = row.build()(self.problem)

        def signal(params, arrays):
            public = estimator.prepare(jax.random.key(0), params)
            return estimator.signal(public, jax.tree.map(lambda leaf: leaf[0], arrays))

        return filled(jax.eval_shape(signal, self.params, self.arrays))


def row_numbers(size: int) -> Any:
    """Seeds of the outcomes that are simulated for each record."""
    return jnp.arange(size, dtype=jnp.uint32)


def rows_for(pieces: Bench, losses: bool = False) -> tuple[EstimatorRow, ...]:
    """The estimators that are for the guide of a scenario, and release losses if asked for."""
    kinds = {kind.__name__ for kind in type(pieces.guide).__mro__}
    kinds.add(getattr(pieces.guide, "__name__", ""))
    apart = not pieces.problem.guide_params & set(pieces.problem.record_params)
    return tuple(
        row
        for row in ESTIMATORS
        if not kinds & set(row.without)
        and not (row.simulates and (losses or not pieces.scenario.simulated))
        and (row.guides is None or (kinds & set(row.guides) and apart))
    )


@functools.cache
def single(name: str) -> Bench:
    """The scenario in single precision, built once for all tests."""
    with x64(False):
        return bench(by_name(name))


def bench(scenario: Scenario, row: EstimatorRow = ESTIMATORS[0], **options: Any) -> Bench:
    """Builds a scenario for an estimator; ``options`` go to the driver."""
    rng = np.random.default_rng(7)
    args, kwargs = scenario.args(rng), scenario.kwargs(rng)
    guide = scenario.guide(scenario.model)
    settings = {"clip_norm": np.inf, "noise_multiplier": 0.0, "sampler": FullBatch()} | options
    dpsvi = DPSVI(
        scenario.model,
        guide,
        optax.adam(0.02),
        Trace_ELBO(num_particles=scenario.particles),
        **grouped(estimator=row.build(), public=scenario.public, **settings),
    )
    state = dpsvi.init(jax.random.key(1), *args, **kwargs)
    problem = dpsvi._session(args, kwargs).problem
    params = dpsvi.optim.get_params(state.optim_state)
    params = jax.tree.map(
        lambda p: p + 0.1 * jnp.asarray(rng.normal(size=p.shape), p.dtype), params
    )
    arrays = problem.model.structure.layout.rows(args, kwargs).arrays
    return Bench(scenario, dpsvi, guide, args, kwargs, problem, arrays, params)


def reference_svi(scenario: Scenario) -> SVI:
    """NumPyro's own driver, with a guide of its own."""
    model = scenario.reference or scenario.model
    guide = scenario.guide(model)
    return SVI(model, guide, optax.adam(0.02), Trace_ELBO(num_particles=scenario.particles))
