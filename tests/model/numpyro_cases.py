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
from hostile import (
    PANEL,
    Call,
    D,
    N,
    X,
    Y,
    drawn,
    factor_in_the_plate,
    listed_guides,
    located,
    regression,
    subsampled_by_index,
    svi,
    weights,
)
from numpyro import handlers
from numpyro.contrib import control_flow, module
from numpyro.infer import autoguide, elbo
from numpyro.infer.reparam import LocScaleReparam

KNOWN = np.arange(N) % 3 > 0


class Case(NamedTuple):
    """A call, and what an error must say of it where it is refused."""

    build: Callable[[], Call]
    parts: tuple[str, ...] = ()


def outcome(loc: Any, y: Any) -> None:
    """An outcome of each record."""
    with numpyro.plate("records", loc.shape[0]):
        numpyro.sample("y", dist.Normal(loc, 1), obs=y)


def series(loc: Callable[[Any], Any]) -> Callable[..., None]:
    """The series of each record, as one observation with mean ``loc(y)``."""

    def model(y):
        mean = loc(y)
        with numpyro.plate("records", y.shape[0]):
            numpyro.sample("y", dist.Normal(mean, 1).to_event(1), obs=y)

    return model


def of(model: Any, *args: Any, **options: Any) -> Callable[[], Call]:
    """A call with a regression's records, or with others."""
    return lambda: svi(model, *(args or (X, Y)), **options)


own_slope = located(lambda x, w: x @ (w + numpyro.param("slope", jnp.ones(D))))
with_scale = located(lambda x, w: x @ w * numpyro.sample("scale", dist.LogNormal(0, 1)))


class Shifted(autoguide.AutoContinuous):
    """A guide of a user's own: a normal of fixed scale."""

    def _get_posterior(self):
        loc = numpyro.param("loc", self._init_latent)
        return dist.Normal(loc, 0.1).to_event(1)


def batched(x, y=None):
    with numpyro.plate("columns", D):
        w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
    outcome(x @ w.sum(-1), y)


def guided(name: str, *parts: str) -> Case:
    return Case(lambda: svi(regression, X, Y, guide=getattr(autoguide, name)(regression)), parts)


def in_batches(name: str) -> Case:
    return Case(lambda: svi(batched, X, Y, guide=getattr(autoguide, name)(batched, batch_ndim=1)))


GUIDES = {
    **{name: guided(name) for name in (
    "AutoNormal", "AutoDiagonalNormal", "AutoMultivariateNormal",
    "AutoLowRankMultivariateNormal", "AutoIAFNormal", "AutoBNAFNormal", "AutoDelta",
    )},
    "AutoLaplaceApproximation": guided("AutoLaplaceApproximation", "AutoLaplaceApproximation",
        "Hessian over all records"),
    "AutoDAIS": guided("AutoDAIS", "AutoDAIS", "all records"),
    **{name: in_batches(name) for name in (
    "AutoBatchedMultivariateNormal", "AutoBatchedLowRankMultivariateNormal"
    )},
    "AutoContinuous": Case(lambda: svi(regression, X, Y, guide=Shifted(regression))),
    "AutoGuideList": Case(lambda: svi(with_scale, X, Y, guide=listed_guides(
        with_scale, autoguide.AutoNormal(handlers.block(with_scale, hide=["w"])),
        autoguide.AutoDelta(handlers.block(with_scale, expose=["w"])),
    ))),
    "AutoSemiDAIS": Case(
        lambda: svi(regression, X, Y, guide=autoguide.AutoSemiDAIS(
            regression, regression, autoguide.AutoNormal(regression)
        )), ("AutoSemiDAIS", "all records"),
    ),
    "AutoSurrogateLikelihoodDAIS": Case(
        lambda: svi(
            regression, X, Y, guide=autoguide.AutoSurrogateLikelihoodDAIS(regression, regression)
        ), ("AutoSurrogateLikelihoodDAIS", "likelihood of records"),
    ),
    "a guide by hand": Case(
        of(regression, guide=drawn(lambda x: numpyro.param("loc", jnp.zeros(D))))
    ),
}  # fmt: skip


LOSSES = {
    name: Case(of(regression, loss=loss), parts)
    for name, loss, parts in (
        ("Trace_ELBO()", elbo.Trace_ELBO(), ()),
        ("Trace_ELBO(num_particles=2)", elbo.Trace_ELBO(num_particles=2), ()),
        ("TraceMeanField_ELBO()", elbo.TraceMeanField_ELBO(), ()),
        ("Trace_ELBO(multi_sample_guide=True)", elbo.Trace_ELBO(multi_sample_guide=True),
         ("several samples", "sum over records")),
        ("ELBO()", elbo.ELBO(), ("got ELBO",)),
        ("RenyiELBO()", elbo.RenyiELBO(alpha=0.5), ("got RenyiELBO", "sum over records")),
        ("TraceGraph_ELBO()", elbo.TraceGraph_ELBO(), ("got TraceGraph_ELBO",)),
        ("TraceEnum_ELBO()", elbo.TraceEnum_ELBO(), ("got TraceEnum_ELBO",)),
    )
}  # fmt: skip


def under(handler: Callable[[Any], Any]) -> Callable[..., None]:
    """A regression with a handler of a column around its outcome."""

    def model(x, column, y):
        loc = x @ weights()
        with handler(column):
            outcome(loc, y)

    return model


def replayed() -> Call:
    fixed = handlers.seed(lambda: numpyro.sample("scale", dist.LogNormal(0, 1)), 0)
    return svi(handlers.replay(with_scale, handlers.trace(fixed).get_trace()), X, Y)


HANDLERS = {
    "block": Case(of(handlers.block(regression, hide=["nothing"]))),
    "condition": Case(of(handlers.condition(with_scale, data={"scale": 2.0}))),
    "condition on records": Case(
        of(handlers.condition(functools.partial(regression, y=None), data={"y": Y}), X),
        ("'y'", "argument"),
    ),
    "do": Case(of(handlers.do(with_scale, data={"scale": 2.0}))),
    "infer_config": Case(of(handlers.infer_config(regression, config_fn=lambda site: {}))),
    "lift": Case(of(handlers.lift(own_slope, prior={"slope": dist.Normal(0, 1).expand([D])}))),
    "reparam": Case(of(handlers.reparam(regression, config={"w": LocScaleReparam(0)}))),
    "scope": Case(of(handlers.scope(regression, prefix="own"))),
    "seed": Case(of(handlers.seed(regression, 0))),
    "substitute": Case(of(handlers.substitute(with_scale, data={"scale": 2.0}))),
    "trace": Case(of(handlers.trace(regression))),
    "uncondition": Case(of(handlers.uncondition(regression)), ("observed site",)),
    "mask": Case(of(under(lambda known: handlers.mask(mask=known)), X, KNOWN, Y)),
    "scale": Case(of(under(lambda weight: handlers.scale(scale=weight)), X, np.exp(Y), Y)),
    "replay": Case(replayed),
}  # fmt: skip


def plate_of_latents() -> Any:
    with numpyro.plate("columns", D):
        return numpyro.sample("w", dist.Normal(0, 1))


def subsampled(x, y):
    w = weights()
    with numpyro.plate("records", N, subsample_size=4):
        rows = numpyro.subsample(x, event_dim=1), numpyro.subsample(y, event_dim=0)
        numpyro.sample("y", dist.Normal(rows[0] @ w, 1), obs=rows[1])


def questions(y):
    skill = numpyro.sample("skill", dist.Normal(0, 1))
    with numpyro.plate_stack("p", y.shape):
        numpyro.sample("y", dist.Normal(skill, 1), obs=y)


def latents_in_a_scan(y):
    def step(state, _):
        state = numpyro.sample("state", dist.Normal(state, 1))
        return state, state

    return control_flow.scan(step, 0.0, None, length=y.shape[1])[1]


def plate_in_a_scan(y):
    slope = numpyro.sample("slope", dist.Normal(0, 1))

    def step(before, now):
        with numpyro.plate("records", now.shape[0]):
            return numpyro.sample("y", dist.Normal(slope * before, 1), obs=now), None

    control_flow.scan(step, jnp.zeros(y.shape[0]), y.T)


def scan_without_sites(y):
    rate = numpyro.sample("rate", dist.Normal(0, 1))
    return control_flow.scan(lambda s, _: (s * rate, s), 1.0, None, length=y.shape[1])[1]


def scan_of_jax(y):
    """What a refused scan of NumPyro becomes: the noise of all steps is drawn outside."""
    noise = numpyro.sample("noise", dist.Normal(0, 1).expand([4]).to_event(1))
    return jax.lax.scan(lambda s, e: (s + e, s + e), 0.0, noise)[1]


def scan_of_a_series(y):
    slope = numpyro.sample("slope", dist.Normal(0, 1))
    return slope * jax.lax.scan(lambda s, now: (now, s), jnp.zeros(y.shape[0]), y.T)[1].T


def cond_with_latents(x, y):
    flag = numpyro.sample("flag", dist.Normal(0, 1))

    def draw(size):
        return numpyro.sample("w", dist.Normal(0, size).expand([D]).to_event(1))

    outcome(x @ control_flow.cond(flag > 0, draw, draw, 1.0), y)


def loops_of_jax(x, w):
    w = jax.lax.cond(w[0] > 0, lambda: w, lambda: -w)
    w = jax.lax.fori_loop(0, 2, lambda _, s: s / 2, w)
    return jax.vmap(lambda row: row @ w)(x)


PLATES = {
    "plate": Case(of(regression)),
    "plate, a second one of records": Case(
        of(lambda x, y: outcome(x @ plate_of_latents(), y))
    ),
    "plate(subsample_size=)": Case(of(subsampled_by_index)),
    "subsample": Case(of(subsampled)),
    "plate_stack": Case(of(questions, PANEL), ("which plate counts records", "data_plate=")),
    "plate_stack, data_plate=": Case(of(questions, PANEL, data_plate="p_1")),
    "no plate": Case(of(lambda x, y: numpyro.sample("y", dist.Normal(x @ weights(), 1), obs=y)),
        ("in no plate", "numpyro.plate")),
    "contrib.control_flow.scan, latents in it": Case(of(series(latents_in_a_scan), PANEL),
        ("'state'", "jax.lax.scan")),
    "contrib.control_flow.scan, the plate in it": Case(of(plate_in_a_scan, PANEL),
        ("'y'", "whole series")),
    "contrib.control_flow.scan, no site in it": Case(of(series(scan_without_sites), PANEL)),
    "jax.lax.scan": Case(of(series(scan_of_jax), PANEL)),
    "jax.lax.scan, of a record's series": Case(of(series(scan_of_a_series), PANEL)),
    "contrib.control_flow.cond, no site in it": Case(of(located(
        lambda x, w: x @ w * control_flow.cond(w[0] > 0, lambda _: 1.0, lambda _: -1.0, None)
    ))),
    "contrib.control_flow.cond, latents in it": Case(of(cond_with_latents),
        ("'w'", "cond", "jnp.where")),
    "jax.lax.cond, jax.lax.fori_loop, jax.vmap": Case(of(located(loops_of_jax))),
}  # fmt: skip


def penalised(penalty: Callable[[Any, Any], Any]) -> Callable[..., None]:
    def loc(x, w):
        numpyro.factor("penalty", penalty(x, w))
        return x @ w

    return located(loc)


def observed(x, known, y, masked=False):
    """Outcomes that are not known of all records."""
    normal = dist.Normal(x @ weights(), 1)
    with numpyro.plate("records", x.shape[0]):
        if masked:
            numpyro.sample("y", normal.mask(known), obs=y)
        else:
            numpyro.sample("y", normal, obs=y, obs_mask=known)


def two_groups(y):
    mean = numpyro.sample("mean", dist.Normal(0, 3).expand([2]).to_event(1))
    with numpyro.plate("records", y.shape[0]):
        which = numpyro.sample("which", dist.Bernoulli(0.5), infer={"enumerate": "parallel"})
        numpyro.sample("y", dist.Normal(mean[which], 1), obs=y)


def coded(y):
    v = numpyro.sample("v", dist.Normal(0, 1))
    with numpyro.plate("records", y.shape[0]):
        code = numpyro.sample("code", dist.Normal(0, 1))
        numpyro.sample("y", dist.Normal(code * v, 1), obs=y)


def encoder(y):
    numpyro.sample("v", dist.Normal(numpyro.param("loc", 0.0), 0.1))
    rate = numpyro.param("rate", 0.1)
    with numpyro.plate("records", y.shape[0]):
        numpyro.sample("code", dist.Normal(rate * y, 0.5))


PARTS = {
    "factor in the plate": Case(of(factor_in_the_plate)),
    "factor outside, of latents": Case(of(penalised(lambda x, w: -jnp.abs(w).sum()))),
    "factor outside, of records": Case(of(penalised(lambda x, w: -jnp.square(x @ w).sum())),
        ("'penalty'", "outside the data plate")),
    "deterministic": Case(of(located(lambda x, w: numpyro.deterministic("eta", x @ w)))),
    "param": Case(of(own_slope)),
    "param of the records": Case(
        of(located(lambda x, w: x @ (w + numpyro.param("shift", x.mean(0))))),
        ("depends on the records",),
    ),
    "prng_key": Case(of(located(
        lambda x, w: (x * jax.random.bernoulli(numpyro.prng_key(), 0.5, x.shape)) @ w
    ))),
    "sample(obs_mask=)": Case(of(observed, X, KNOWN, Y),
        ("'y_unobserved'", "one parameter per record")),
    "distribution.mask": Case(of(observed, X, KNOWN, Y, True)),
    "a discrete latent in the plate": Case(of(two_groups, Y)),
    "a discrete latent outside": Case(
        of(located(lambda x, w: x @ w + numpyro.sample("which", dist.Bernoulli(0.5)))),
        ("'which'", "is discrete", "MixtureSameFamily"),
    ),
    "a continuous latent in the plate": Case(of(coded, Y), ("'code'", "encoder")),
    "a continuous latent in the plate, and an encoder": Case(of(coded, Y, guide=encoder)),
}  # fmt: skip


PRIOR = dist.Normal(0, 1)


class Norm(nn.Module):
    """A network that keeps averages over a batch."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(1)(nn.BatchNorm(use_running_average=False)(x))


def dense() -> Any:
    return nnx.Linear(D, 1, rngs=nnx.Rngs(0))


def linear() -> Any:
    return eqx.nn.Linear(D, 1, key=jax.random.key(0))


def of_network(net: Callable[[], Any]) -> Callable[[], Call]:
    def model(x, y):
        numpyro.sample("level", dist.Normal(0, 1))
        outcome(net()(x)[:, 0], y)

    return of(model)


NETWORKS = {
    "flax_module": Case(of_network(
        lambda: module.flax_module("net", nn.Dense(1), input_shape=(1, D))
    )),
    "random_flax_module": Case(of_network(
        lambda: module.random_flax_module("net", nn.Dense(1), PRIOR, input_shape=(1, D))
    )),
    "flax_module with batch norm": Case(of_network(
        lambda: module.flax_module("net", Norm(), mutable=["batch_stats"], input_shape=(1, D))
    ), ("Mutable state", "group or layer norm")),
    "nnx_module": Case(of_network(lambda: module.nnx_module("net", dense()))),
    "random_nnx_module": Case(of_network(lambda: module.random_nnx_module("net", dense(), PRIOR))),
    "eqx_module": Case(of_network(lambda: jax.vmap(module.eqx_module("net", linear())))),
    "random_eqx_module": Case(of_network(
        lambda: jax.vmap(module.random_eqx_module("net", linear(), PRIOR))
    )),
}  # fmt: skip

CASES: dict[str, Case] = GUIDES | LOSSES | HANDLERS | PLATES | PARTS | NETWORKS
