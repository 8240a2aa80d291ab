"""A model or guide for each row of docs/numpyro.md, under its name."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from flax import nnx
from hostile import Call, svi
from numpyro import handlers
from numpyro.contrib import control_flow, module
from numpyro.distributions import constraints
from numpyro.infer import autoguide, elbo
from numpyro.infer.reparam import LocScaleReparam

N, D = 12, 2
RNG = np.random.default_rng(0)
X = RNG.normal(size=(N, D)).astype(np.float32)
Y = RNG.normal(size=N).astype(np.float32)
SERIES = RNG.normal(size=(N, 4)).astype(np.float32)
KNOWN = np.arange(N) % 3 > 0
CASES: dict[str, Case] = {}


class Case(NamedTuple):
    """A call, and what an error must say of it where it is refused."""

    build: Callable[[], Call]
    parts: tuple[str, ...]


def case(name: str, *parts: str) -> Callable[[Callable[[], Call]], Callable[[], Call]]:
    """Adds the case of a row."""

    def add(build: Callable[[], Call]) -> Callable[[], Call]:
        CASES[name] = Case(build, parts)
        return build

    return add


def weights() -> Any:
    return numpyro.sample("w", dist.Normal(0, 1).expand([D]).to_event(1))


def outcome(loc: Any, y: Any) -> None:
    """An outcome of each record."""
    with numpyro.plate("records", loc.shape[0]):
        numpyro.sample("y", dist.Normal(loc, 1), obs=y)


def regression(x, y=None):
    outcome(x @ weights(), y)


def own_slope(x, y=None):
    outcome(x @ (weights() + numpyro.param("slope", jnp.ones(D))), y)


# Automatic guides.


class Shifted(autoguide.AutoContinuous):
    """A guide of a user's own: a normal of fixed scale."""

    def _get_posterior(self):
        loc = numpyro.param("loc", self._init_latent)
        return dist.Normal(loc, 0.1).to_event(1)


def guide_list(model):
    parts = autoguide.AutoGuideList(model)
    parts.append(autoguide.AutoNormal(handlers.block(model, hide=["w"])))
    parts.append(autoguide.AutoDelta(handlers.block(model, expose=["w"])))
    return parts


def with_scale(x, y=None):
    scale = numpyro.sample("scale", dist.LogNormal(0, 1))
    outcome(x @ weights() * scale, y)


def batched(x, y=None):
    with numpyro.plate("columns", D):
        w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
    outcome(x @ w.sum(-1), y)


GUIDES = {
    "AutoNormal": (), "AutoDiagonalNormal": (), "AutoMultivariateNormal": (),
    "AutoLowRankMultivariateNormal": (), "AutoIAFNormal": (), "AutoBNAFNormal": (),
    "AutoDelta": (),
    "AutoLaplaceApproximation": ("AutoLaplaceApproximation", "Hessian over all records"),
    "AutoDAIS": ("AutoDAIS", "all records"),
}  # fmt: skip
for _name, _parts in GUIDES.items():
    _guide = getattr(autoguide, _name)
    CASES[_name] = Case(lambda g=_guide: svi(regression, X, Y, guide=g(regression)), _parts)

for _name in ("AutoBatchedMultivariateNormal", "AutoBatchedLowRankMultivariateNormal"):
    _guide = getattr(autoguide, _name)
    CASES[_name] = Case(lambda g=_guide: svi(batched, X, Y, guide=g(batched, batch_ndim=1)), ())


@case("AutoContinuous")
def a_subclass_of_autocontinuous():
    return svi(regression, X, Y, guide=Shifted(regression))


@case("AutoGuideList")
def a_list_of_guides():
    return svi(with_scale, X, Y, guide=guide_list(with_scale))


@case("AutoSemiDAIS", "AutoSemiDAIS", "all records")
def autosemidais():
    base = autoguide.AutoNormal(regression)
    return svi(regression, X, Y, guide=autoguide.AutoSemiDAIS(regression, regression, base))


@case("AutoSurrogateLikelihoodDAIS", "AutoSurrogateLikelihoodDAIS", "likelihood of records")
def autosurrogatelikelihooddais():
    guide = autoguide.AutoSurrogateLikelihoodDAIS(regression, regression)
    return svi(regression, X, Y, guide=guide)


@case("a guide by hand")
def a_guide_by_hand():
    def guide(x, y=None):
        scale = numpyro.param("scale", 0.1, constraint=constraints.positive)
        numpyro.sample("w", dist.Normal(numpyro.param("loc", jnp.zeros(D)), scale).to_event(1))

    return svi(regression, X, Y, guide=guide)


# Losses.

LOSSES: dict[str, tuple[Any, tuple[str, ...]]] = {
    "Trace_ELBO()": (elbo.Trace_ELBO(), ()),
    "Trace_ELBO(num_particles=2)": (elbo.Trace_ELBO(num_particles=2), ()),
    "TraceMeanField_ELBO()": (elbo.TraceMeanField_ELBO(), ()),
    "Trace_ELBO(multi_sample_guide=True)": (
        elbo.Trace_ELBO(multi_sample_guide=True), ("several samples", "sum over records")
    ),
    "ELBO()": (elbo.ELBO(), ("got ELBO",)),
    "RenyiELBO()": (elbo.RenyiELBO(alpha=0.5), ("got RenyiELBO", "sum over records")),
    "TraceGraph_ELBO()": (elbo.TraceGraph_ELBO(), ("got TraceGraph_ELBO",)),
    "TraceEnum_ELBO()": (elbo.TraceEnum_ELBO(), ("got TraceEnum_ELBO",)),
}  # fmt: skip
for _name, (_loss, _parts) in LOSSES.items():
    CASES[_name] = Case(lambda loss=_loss: svi(regression, X, Y, loss=loss), _parts)


# Handlers.

CENTRED = {"w": LocScaleReparam(0)}
HANDLED: dict[str, tuple[Any, tuple[str, ...]]] = {
    "block": (handlers.block(regression, hide=["nothing"]), ()),
    "condition": (handlers.condition(with_scale, data={"scale": 2.0}), ()),
    "condition on records": (
        handlers.condition(functools.partial(regression, y=None), data={"y": Y}),
        ("'y'", "argument"),
    ),
    "do": (handlers.do(with_scale, data={"scale": 2.0}), ()),
    "infer_config": (handlers.infer_config(regression, config_fn=lambda site: {}), ()),
    "lift": (handlers.lift(own_slope, prior={"slope": dist.Normal(0, 1).expand([D])}), ()),
    "reparam": (handlers.reparam(regression, config=CENTRED), ()),
    "scope": (handlers.scope(regression, prefix="own"), ()),
    "seed": (handlers.seed(regression, 0), ()),
    "substitute": (handlers.substitute(with_scale, data={"scale": 2.0}), ()),
    "trace": (handlers.trace(regression), ()),
    "uncondition": (handlers.uncondition(regression), ("observed site",)),
}
for _name, (_model, _parts) in HANDLED.items():
    _args = (X,) if _name == "condition on records" else (X, Y)
    CASES[_name] = Case(lambda m=_model, args=_args: svi(m, *args), _parts)


@case("mask")
def mask():
    def model(x, known, y):
        loc = x @ weights()
        with handlers.mask(mask=known):
            outcome(loc, y)

    return svi(model, X, KNOWN, Y)


@case("scale")
def scale():
    def model(x, weight, y):
        loc = x @ weights()
        with handlers.scale(scale=weight):
            outcome(loc, y)

    return svi(model, X, np.exp(Y), Y)


@case("replay")
def replay():
    fixed = handlers.seed(lambda: numpyro.sample("scale", dist.LogNormal(0, 1)), 0)
    return svi(handlers.replay(with_scale, handlers.trace(fixed).get_trace()), X, Y)


# Plates, loops and branches.


@case("plate")
def plate():
    return svi(regression, X, Y)


@case("plate, a second one of records")
def a_plate_of_latents():
    def model(x, y):
        with numpyro.plate("columns", D):
            w = numpyro.sample("w", dist.Normal(0, 1))
        outcome(x @ w, y)

    return svi(model, X, Y)


@case("plate(subsample_size=)")
def a_subsample():
    def model(x, y):
        w = weights()
        with numpyro.plate("records", N, subsample_size=4) as rows:
            numpyro.sample("y", dist.Normal(x[rows] @ w, 1), obs=y[rows])

    return svi(model, X, Y)


@case("subsample")
def subsample():
    def model(x, y):
        w = weights()
        with numpyro.plate("records", N, subsample_size=4):
            rows = numpyro.subsample(x, event_dim=1), numpyro.subsample(y, event_dim=0)
            numpyro.sample("y", dist.Normal(rows[0] @ w, 1), obs=rows[1])

    return svi(model, X, Y)


@case("plate_stack", "which plate counts records", "data_plate=")
def stacked_plates():
    return svi(questions, SERIES)


@case("plate_stack, data_plate=")
def stacked_plates_with_a_name():
    return svi(questions, SERIES, data_plate="p_1")


def questions(y):
    skill = numpyro.sample("skill", dist.Normal(0, 1))
    with numpyro.plate_stack("p", y.shape):
        numpyro.sample("y", dist.Normal(skill, 1), obs=y)


@case("no plate", "in no plate", "numpyro.plate")
def no_plate():
    def model(x, y):
        numpyro.sample("y", dist.Normal(x @ weights(), 1), obs=y)

    return svi(model, X, Y)


@case("contrib.control_flow.scan, latents in it", "'state'", "jax.lax.scan")
def latents_in_a_scan():
    def model(y):
        def step(state, _):
            state = numpyro.sample("state", dist.Normal(state, 1))
            return state, state

        _, states = control_flow.scan(step, 0.0, None, length=y.shape[1])
        series(states, y)

    return svi(model, SERIES)


@case("contrib.control_flow.scan, the plate in it", "'y'", "whole series")
def a_plate_in_a_scan():
    def model(y):
        slope = numpyro.sample("slope", dist.Normal(0, 1))

        def step(before, now):
            with numpyro.plate("records", now.shape[0]):
                return numpyro.sample("y", dist.Normal(slope * before, 1), obs=now), None

        control_flow.scan(step, jnp.zeros(y.shape[0]), y.T)

    return svi(model, SERIES)


@case("contrib.control_flow.scan, no site in it")
def a_scan_without_sites():
    def model(y):
        rate = numpyro.sample("rate", dist.Normal(0, 1))
        _, states = control_flow.scan(lambda s, _: (s * rate, s), 1.0, None, length=y.shape[1])
        series(states, y)

    return svi(model, SERIES)


@case("jax.lax.scan")
def a_scan_of_jax():
    """What a refused scan of NumPyro becomes: the noise of all steps is drawn outside."""

    def model(y):
        noise = numpyro.sample("noise", dist.Normal(0, 1).expand([4]).to_event(1))
        _, states = jax.lax.scan(lambda s, e: (s + e, s + e), 0.0, noise)
        series(states, y)

    return svi(model, SERIES)


@case("jax.lax.scan, of a record's series")
def a_scan_of_a_series():
    def model(y):
        slope = numpyro.sample("slope", dist.Normal(0, 1))
        _, before = jax.lax.scan(lambda s, now: (now, s), jnp.zeros(y.shape[0]), y.T)
        series(slope * before.T, y)

    return svi(model, SERIES)


def series(loc: Any, y: Any) -> None:
    """The series of each record, as one observation."""
    with numpyro.plate("records", y.shape[0]):
        numpyro.sample("y", dist.Normal(loc, 1).to_event(1), obs=y)


@case("contrib.control_flow.cond, no site in it")
def a_cond_without_sites():
    def model(x, y):
        w = weights()
        sign = control_flow.cond(w[0] > 0, lambda _: 1.0, lambda _: -1.0, None)
        outcome(x @ w * sign, y)

    return svi(model, X, Y)


@case("contrib.control_flow.cond, latents in it", "'w'", "cond", "jnp.where")
def a_cond_with_latents():
    def model(x, y):
        flag = numpyro.sample("flag", dist.Normal(0, 1))

        def draw(size):
            return numpyro.sample("w", dist.Normal(0, size).expand([D]).to_event(1))

        outcome(x @ control_flow.cond(flag > 0, draw, draw, 1.0), y)

    return svi(model, X, Y)


@case("jax.lax.cond, jax.lax.fori_loop, jax.vmap")
def loops_of_jax():
    def model(x, y):
        w = weights()
        w = jax.lax.cond(w[0] > 0, lambda: w, lambda: -w)
        w = jax.lax.fori_loop(0, 2, lambda _, s: s / 2, w)
        outcome(jax.vmap(lambda row: row @ w)(x), y)

    return svi(model, X, Y)


# What a model consists of.


@case("factor in the plate")
def a_factor():
    def model(x, y):
        loc = x @ weights()
        with numpyro.plate("records", x.shape[0]):
            numpyro.factor("y", -jnp.square(y - loc) / 2)

    return svi(model, X, Y)


@case("factor outside, of latents")
def a_factor_of_latents():
    def model(x, y):
        w = weights()
        numpyro.factor("penalty", -jnp.abs(w).sum())
        outcome(x @ w, y)

    return svi(model, X, Y)


@case("factor outside, of records", "'penalty'", "outside the data plate")
def a_factor_of_records():
    def model(x, y):
        w = weights()
        numpyro.factor("penalty", -jnp.square(x @ w).sum())
        outcome(x @ w, y)

    return svi(model, X, Y)


@case("deterministic")
def a_deterministic():
    def model(x, y):
        outcome(numpyro.deterministic("eta", x @ weights()), y)

    return svi(model, X, Y)


@case("param")
def a_param():
    return svi(own_slope, X, Y)


@case("param of the records", "depends on the records")
def a_param_of_records():
    def model(x, y):
        outcome(x @ (weights() + numpyro.param("shift", x.mean(0))), y)

    return svi(model, X, Y)


@case("prng_key")
def a_key_of_the_model():
    def model(x, y):
        kept = jax.random.bernoulli(numpyro.prng_key(), 0.5, x.shape)
        outcome((x * kept) @ weights(), y)

    return svi(model, X, Y)


@case("sample(obs_mask=)", "'y_unobserved'", "one parameter per record")
def an_observation_with_a_mask():
    def model(x, known, y):
        loc = x @ weights()
        with numpyro.plate("records", x.shape[0]):
            numpyro.sample("y", dist.Normal(loc, 1), obs=y, obs_mask=known)

    return svi(model, X, KNOWN, Y)


@case("distribution.mask")
def a_masked_distribution():
    def model(x, known, y):
        loc = x @ weights()
        with numpyro.plate("records", x.shape[0]):
            numpyro.sample("y", dist.Normal(loc, 1).mask(known), obs=y)

    return svi(model, X, KNOWN, Y)


def two_groups(y):
    mean = numpyro.sample("mean", dist.Normal(0, 3).expand([2]).to_event(1))
    with numpyro.plate("records", y.shape[0]):
        which = numpyro.sample("which", dist.Bernoulli(0.5), infer={"enumerate": "parallel"})
        numpyro.sample("y", dist.Normal(mean[which], 1), obs=y)


@case("a discrete latent in the plate")
def a_discrete_latent():
    return svi(two_groups, Y)


@case("a discrete latent outside", "'which'", "is discrete", "MixtureSameFamily")
def a_discrete_latent_outside():
    def model(x, y):
        outcome(x @ weights() + numpyro.sample("which", dist.Bernoulli(0.5)), y)

    return svi(model, X, Y)


def coded(y):
    v = numpyro.sample("v", dist.Normal(0, 1))
    with numpyro.plate("records", y.shape[0]):
        code = numpyro.sample("code", dist.Normal(0, 1))
        numpyro.sample("y", dist.Normal(code * v, 1), obs=y)


@case("a continuous latent in the plate", "'code'", "encoder")
def a_continuous_latent():
    return svi(coded, Y)


@case("a continuous latent in the plate, and an encoder")
def an_encoder():
    def guide(y):
        numpyro.sample("v", dist.Normal(numpyro.param("loc", 0.0), 0.1))
        rate = numpyro.param("rate", 0.1)
        with numpyro.plate("records", y.shape[0]):
            numpyro.sample("code", dist.Normal(rate * y, 0.5))

    return svi(coded, Y, guide=guide)


# Networks.

PRIOR = dist.Normal(0, 1)


class Norm(nn.Module):
    """A network that keeps averages over a batch."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(1)(nn.BatchNorm(use_running_average=False)(x))


def dense() -> Any:
    return nnx.Linear(D, 1, rngs=nnx.Rngs(0))


NETWORKS: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "flax_module": (
        lambda: module.flax_module("net", nn.Dense(1), input_shape=(1, D)), ()
    ),
    "random_flax_module": (
        lambda: module.random_flax_module("net", nn.Dense(1), PRIOR, input_shape=(1, D)), ()
    ),
    "flax_module with batch norm": (
        lambda: module.flax_module("net", Norm(), mutable=["batch_stats"], input_shape=(1, D)),
        ("Mutable state", "group or layer norm"),
    ),
    "nnx_module": (lambda: module.nnx_module("net", dense()), ()),
    "random_nnx_module": (lambda: module.random_nnx_module("net", dense(), PRIOR), ()),
    "eqx_module": (
        lambda: jax.vmap(module.eqx_module("net", eqx.nn.Linear(D, 1, key=jax.random.key(0)))), ()
    ),
    "random_eqx_module": (
        lambda: jax.vmap(
            module.random_eqx_module("net", eqx.nn.Linear(D, 1, key=jax.random.key(0)), PRIOR)
        ),
        (),
    ),
}  # fmt: skip
for _name, (_net, _parts) in NETWORKS.items():

    def _network(x, y, net=_net):
        numpyro.sample("level", dist.Normal(0, 1))
        outcome(net()(x)[:, 0], y)

    CASES[_name] = Case(functools.partial(svi, _network, X, Y), _parts)
