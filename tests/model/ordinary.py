"""Ordinary models and calls: none of them may be refused.

A row of ``ORDINARY`` is a name and a function that builds the call; two steps of it must run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from hostile import (
    LABELS,
    PANEL,
    PATIENT_OF,
    PATIENTS,
    Call,
    D,
    N,
    X,
    Y,
    located,
    mcmc,
    regression,
    sep,
    svi,
    visits,
    weights,
)
from numpyro import handlers
from numpyro.contrib.hsgp.approximation import hsgp_squared_exponential
from numpyro.contrib.module import flax_module, random_flax_module
from numpyro.distributions import constraints
from numpyro.infer.autoguide import (
    AutoDelta,
    AutoDiagonalNormal,
    AutoGuideList,
    AutoLowRankMultivariateNormal,
    AutoMultivariateNormal,
    AutoNormal,
)
from numpyro.infer.initialization import (
    init_to_feasible,
    init_to_mean,
    init_to_median,
    init_to_sample,
    init_to_uniform,
    init_to_value,
)
from numpyro.infer.reparam import LocScaleReparam, TransformReparam

from numpyro_dp import SGHMC, SGLD
from numpyro_dp.methods.ep.sites import quadrature
from numpyro_dp.posterior import tail_average
from numpyro_dp.samplers import FixedSize, Poisson

RNG = np.random.default_rng(7)
GROUP = RNG.integers(0, 5, N).astype(np.int32)
COUNTS = RNG.poisson(2.0, N).astype(np.int32)
POSITIVE = np.exp(Y).astype(np.float32)
SHARES = (1 / (1 + np.exp(-Y))).astype(np.float32)
GRADES = RNG.integers(0, 4, N).astype(np.int32)
MONTH = (np.arange(N) % 12).astype(np.int32)
EXPOSURE = RNG.uniform(0.5, 2, N).astype(np.float32)


class Row(NamedTuple):
    """A row of the table; slow ones take seconds to be read."""

    name: str
    build: Callable[[], Call]
    slow: bool = False


ORDINARY: list[Row] = []


def ordinary(build: Callable[[], Call]) -> Callable[[], Call]:
    """Adds a row."""
    ORDINARY.append(Row(build.__name__, build))
    return build


def slow(build: Callable[[], Call]) -> Callable[[], Call]:
    """Adds a slow row."""
    ORDINARY.append(Row(build.__name__, build, slow=True))
    return build


def outcome(likelihood: Callable[..., Any], *extra: Callable[[], Any]) -> Callable[..., None]:
    """A generalised linear model; ``extra`` sample what its likelihood needs besides."""

    def model(x, y=None):
        w = weights()
        others = [sample() for sample in extra]
        with numpyro.plate("records", x.shape[0]):
            numpyro.sample("y", likelihood(x @ w, *others), obs=y)

    return model


def positive(name: str) -> Callable[[], Any]:
    """A site with a log-normal prior."""
    return lambda: numpyro.sample(name, dist.LogNormal(0, 1))


# Outcomes.


@ordinary
def normal_outcomes():
    return svi(outcome(dist.Normal, positive("scale")), X, Y)


@ordinary
def binary_outcomes():
    return svi(outcome(lambda eta: dist.Bernoulli(logits=eta)), X, LABELS)


@ordinary
def counts():
    return svi(outcome(lambda eta: dist.Poisson(jnp.exp(eta))), X, COUNTS)


@ordinary
def counts_with_a_spread():
    model = outcome(lambda eta, r: dist.NegativeBinomial2(jnp.exp(eta), r), positive("r"))
    return svi(model, X, COUNTS)


@ordinary
def counts_with_many_zeros():
    def gate():
        return numpyro.sample("gate", dist.Beta(1.0, 1.0))

    model = outcome(lambda eta, gate: dist.ZeroInflatedPoisson(gate, jnp.exp(eta)), gate)
    return svi(model, X, COUNTS)


@slow
def shares():
    def likelihood(eta, size):
        mean = jax.nn.sigmoid(eta)
        return dist.Beta(mean * size, (1 - mean) * size)

    return svi(outcome(likelihood, positive("size")), X, SHARES)


@ordinary
def positive_outcomes():
    return svi(outcome(lambda eta, a: dist.Gamma(a, a * jnp.exp(-eta)), positive("a")), X, POSITIVE)


@ordinary
def outcomes_with_heavy_tails():
    return svi(outcome(lambda eta, s: dist.StudentT(4.0, eta, s), positive("scale")), X, Y)


@slow
def categories():
    def model(x, y):
        w = numpyro.sample("w", dist.Normal(0, 1).expand([D, 4]).to_event(2))
        with numpyro.plate("records", x.shape[0]):
            numpyro.sample("y", dist.Categorical(logits=x @ w), obs=y)

    return svi(model, X, GRADES)


@slow
def grades_with_cut_points():
    def model(x, y):
        w = weights()
        prior = dist.TransformedDistribution(
            dist.Normal(0, 1).expand([3]).to_event(1), dist.transforms.OrderedTransform()
        )
        cuts = numpyro.sample("cuts", prior)
        with numpyro.plate("records", x.shape[0]):
            numpyro.sample("y", dist.OrderedLogistic(x @ w, cuts), obs=y)

    return svi(model, X, GRADES)


@ordinary
def several_outcomes():
    def model(x, y, z, count):
        w = weights()
        with numpyro.plate("records", x.shape[0]):
            numpyro.sample("y", dist.Normal(x @ w, 1), obs=y)
            numpyro.sample("z", dist.Bernoulli(logits=x @ w), obs=z)
            numpyro.sample("count", dist.Poisson(jnp.exp(x @ w)), obs=count)

    return svi(model, X, Y, LABELS, COUNTS)


@slow
def outcomes_of_several_numbers():
    def model(x, y):
        w = numpyro.sample("w", dist.Normal(0, 1).expand([D, 4]).to_event(2))
        scale = numpyro.sample("scale", dist.HalfNormal(1).expand([4]).to_event(1))
        with numpyro.plate("records", x.shape[0]):
            numpyro.sample("y", dist.Normal(x @ w, scale).to_event(1), obs=y)

    return svi(model, X, PANEL)


@slow
def correlated_outcomes():
    def model(y):
        chol = numpyro.sample("chol", dist.LKJCholesky(4, 2.0))
        scale = numpyro.sample("scale", dist.LogNormal(0, 0.5).expand([4]).to_event(1))
        with numpyro.plate("records", y.shape[0]):
            normal = dist.MultivariateNormal(jnp.zeros(4), scale_tril=scale[:, None] * chol)
            numpyro.sample("y", normal, obs=y)

    return svi(model, PANEL)


@ordinary
def binomial_outcomes_with_totals():
    def model(x, total, y):
        w = weights()
        with numpyro.plate("records", x.shape[0]):
            numpyro.sample("y", dist.Binomial(total, logits=x @ w), obs=y)

    return svi(model, X, COUNTS + 3, COUNTS)


# What a record brings along.


@ordinary
def an_exposure_in_each_record():
    def model(x, exposure, y):
        w = weights()
        with numpyro.plate("records", x.shape[0]):
            numpyro.sample("y", dist.Poisson(exposure * jnp.exp(x @ w)), obs=y)

    return svi(model, X, EXPOSURE, COUNTS)


@ordinary
def an_offset_by_keyword():
    def model(x, y=None, offset=0.0):
        w = weights()
        with numpyro.plate("records", x.shape[0]):
            numpyro.sample("y", dist.Normal(x @ w + offset, 1), obs=y)

    return svi(model, X)._replace(kwargs={"y": Y, "offset": EXPOSURE})


@ordinary
def censored_times():
    def model(x, time, seen):
        w, shape = weights(), numpyro.sample("shape", dist.LogNormal(0, 0.5))
        with numpyro.plate("records", x.shape[0]):
            weibull = dist.Weibull(jnp.exp(x @ w), shape)
            late = jnp.log1p(-jnp.clip(weibull.cdf(time), 0, 1 - 1e-6))
            numpyro.factor("time", jnp.where(seen, weibull.log_prob(time), late))

    return svi(model, X, POSITIVE, LABELS > 0)


@ordinary
def survival_by_pieces():
    edges = np.array([0.5, 1.0, 2.0], np.float32)

    def model(x, time, seen):
        w = weights()
        level = numpyro.sample("level", dist.Normal(0, 1).expand([4]).to_event(1))
        with numpyro.plate("records", x.shape[0]):
            starts = jnp.concatenate([jnp.zeros(1), jnp.asarray(edges)])
            ends = jnp.append(jnp.asarray(edges), jnp.inf)
            spent = jnp.clip(jnp.minimum(time[:, None], ends) - starts, 0)
            hazard = jnp.exp(level + (x @ w)[:, None])
            last = jnp.searchsorted(jnp.asarray(edges), time)
            own = jnp.take_along_axis(jnp.log(hazard), last[:, None], 1)[:, 0]
            numpyro.factor("time", seen * own - (spent * hazard).sum(1))

    return svi(model, X, POSITIVE, LABELS)


@ordinary
def weights_by_scale():
    def model(x, weight, y):
        w = weights()
        with numpyro.plate("records", x.shape[0]), handlers.scale(scale=weight):
            numpyro.sample("y", dist.Normal(x @ w, 1), obs=y)

    return svi(model, X, EXPOSURE, Y)


@ordinary
def missing_outcomes_by_mask():
    def model(x, known, y):
        w = weights()
        with numpyro.plate("records", x.shape[0]), handlers.mask(mask=known):
            numpyro.sample("y", dist.Normal(x @ w, 1), obs=y)

    return svi(model, X, LABELS > 0, Y)


@ordinary
def missing_features_at_a_learned_value():
    def model(x, known, y):
        w, usual = weights(), numpyro.sample("usual", dist.Normal(0, 1).expand([D]).to_event(1))
        with numpyro.plate("records", x.shape[0]):
            numpyro.sample("y", dist.Normal(jnp.where(known, x, usual) @ w, 1), obs=y)

    return svi(model, X, X > -1, Y)


@slow
def a_missing_label_that_is_summed_out():
    def model(x, known, label, y):
        w, share = weights(), numpyro.sample("share", dist.Beta(2.0, 2.0))
        with numpyro.plate("records", x.shape[0]):
            values = jnp.arange(2.0)
            each = dist.Normal((x @ w)[:, None] + values, 1).log_prob(y[:, None])
            prior = jnp.stack([jnp.log1p(-share), jnp.log(share)])
            joint = each + prior
            own = jnp.take_along_axis(joint, label[:, None], 1)[:, 0]
            numpyro.factor("y", jnp.where(known, own, jax.nn.logsumexp(joint, 1)))

    return svi(model, X, POSITIVE > 1, LABELS, Y)


@ordinary
def a_column_of_times():
    def model(time, y):
        level = numpyro.sample("level", dist.Normal(0, 1))
        slope = numpyro.sample("slope", dist.Normal(0, 1))
        with numpyro.plate("days", time.shape[0]):
            numpyro.sample("y", dist.Normal(level + slope * time / 30, 1), obs=y)

    return svi(model, np.arange(N, dtype=np.float32), Y)


@slow
def an_encoder_of_each_record():
    def model(y):
        v = numpyro.sample("v", dist.Normal(0, 1).expand([4]).to_event(1))
        with numpyro.plate("records", y.shape[0]):
            code = numpyro.sample("code", dist.Normal(0, 1))
            numpyro.sample("y", dist.Normal(code[..., None] * v, 1).to_event(1), obs=y)

    def guide(y):
        loc = numpyro.param("loc", jnp.zeros(4))
        numpyro.sample("v", dist.Normal(loc, 0.1).to_event(1))
        encoder = numpyro.param("encoder", 0.1 * jnp.ones(4))
        with numpyro.plate("records", y.shape[0]):
            numpyro.sample("code", dist.Normal(y @ encoder, 0.5))

    return svi(model, PANEL, guide=guide)


# Groups, mixtures and plates.


@ordinary
def a_level_for_each_group():
    def model(x, group, y):
        w = weights()
        spread = numpyro.sample("spread", dist.HalfNormal(1))
        with numpyro.plate("groups", 5):
            level = numpyro.sample("level", dist.Normal(0, spread))
        with numpyro.plate("records", x.shape[0]):
            numpyro.sample("y", dist.Normal(x @ w + level[group], 1), obs=y)

    return svi(model, X, GROUP, Y)


@slow
def a_slope_for_each_group_by_a_static_number():
    def model(x, group, y, num_groups):
        with numpyro.plate("groups", num_groups):
            w = numpyro.sample("w", dist.Normal(0, 1).expand([D]).to_event(1))
        with numpyro.plate("records", x.shape[0]):
            numpyro.sample("y", dist.Normal((x * w[group]).sum(-1), 1), obs=y)

    return svi(model, X, GROUP, Y, num_groups=5)


@ordinary
def a_mixture():
    def model(y):
        share = numpyro.sample("share", dist.Dirichlet(jnp.ones(3)))
        mean = numpyro.sample("mean", dist.Normal(0, 3).expand([3]).to_event(1))
        with numpyro.plate("records", y.shape[0]):
            parts = dist.Normal(mean, 1)
            numpyro.sample("y", dist.MixtureSameFamily(dist.Categorical(share), parts), obs=y)

    return svi(model, Y)


@ordinary
def a_mixture_whose_labels_are_summed_out():
    def model(y):
        share = numpyro.sample("share", dist.Dirichlet(jnp.ones(3)))
        mean = numpyro.sample("mean", dist.Normal(0, 3).expand([3]).to_event(1))
        with numpyro.plate("records", y.shape[0]):
            which = numpyro.sample("which", dist.Categorical(share))
            numpyro.sample("y", dist.Normal(mean[which], 1), obs=y)

    return svi(model, Y)


@ordinary
def several_answers_of_each_person():
    def model(y):
        skill = numpyro.sample("skill", dist.Normal(0, 1).expand([4]).to_event(1))
        with (
            numpyro.plate("people", y.shape[0], dim=-2),
            numpyro.plate("questions", y.shape[1], dim=-1),
        ):
            numpyro.sample("y", dist.Normal(skill, 1), obs=y)

    return svi(model, PANEL, data_plate="people")


@ordinary
def a_plate_around_latents_and_another_around_records():
    def model(x, y):
        with numpyro.plate("columns", x.shape[1]):
            w = numpyro.sample("w", dist.Laplace(0, 1))
        with numpyro.plate("records", x.shape[0]):
            numpyro.sample("y", dist.Normal(x @ w, 1), obs=y)

    return svi(model, X, Y)


@ordinary
def a_plate_with_batches_of_its_own():
    def model(x, y):
        w = weights()
        with numpyro.plate("records", x.shape[0], subsample_size=16) as index:
            numpyro.sample("y", dist.Normal(x[index] @ w, 1), obs=y[index])

    return svi(model, X, Y)


@slow
def games_between_two_teams():
    def model(home, away, won):
        skill = numpyro.sample("skill", dist.Normal(0, 1).expand([8]).to_event(1))
        with numpyro.plate("games", won.shape[0]):
            numpyro.sample("won", dist.Bernoulli(logits=skill[home] - skill[away]), obs=won)

    rng = np.random.default_rng(3)
    return svi(model, rng.integers(0, 8, N), rng.integers(0, 8, N), LABELS)


@slow
def answers_by_ability_and_difficulty():
    def model(person, item, correct):
        ability = numpyro.sample("ability", dist.Normal(0, 1).expand([20]).to_event(1))
        difficulty = numpyro.sample("difficulty", dist.Normal(0, 1).expand([10]).to_event(1))
        slope = numpyro.sample("slope", dist.LogNormal(0, 0.3).expand([10]).to_event(1))
        with numpyro.plate("answers", correct.shape[0]):
            eta = slope[item] * (ability[person] - difficulty[item])
            numpyro.sample("correct", dist.Bernoulli(logits=eta), obs=correct)

    rng = np.random.default_rng(3)
    return svi(model, rng.integers(0, 20, N), rng.integers(0, 10, N), LABELS)


# Small public values.


@ordinary
def a_captured_table_of_a_quarter_of_the_records():
    table = np.linspace(-1, 1, 15, dtype=np.float32).reshape(3, 5)

    def loc(x, w):
        return x @ w + (jnp.tanh(x @ jnp.ones((D, 3))) @ jnp.asarray(table)).mean(-1)

    return svi(located(loc), X, Y)


@ordinary
def a_captured_table_of_jax():
    table = jnp.eye(D) + 0.1
    return svi(located(lambda x, w: x @ table @ w), X, Y)


@slow
def captured_nodes_of_a_quadrature():
    nodes, shares = np.polynomial.hermite_e.hermegauss(12)
    nodes, shares = nodes.astype(np.float32), np.log(shares / shares.sum()).astype(np.float32)

    def model(x, y):
        w, spread = weights(), numpyro.sample("spread", dist.HalfNormal(1))
        with numpyro.plate("records", x.shape[0]):
            eta = (x @ w)[:, None] + spread * jnp.asarray(nodes)
            each = dist.Bernoulli(logits=eta).log_prob(y[:, None])
            numpyro.factor("y", jax.nn.logsumexp(each + jnp.asarray(shares), -1))

    return svi(model, X, LABELS, public="captured")


@ordinary
def knots_of_a_spline():
    knots = np.linspace(-2, 2, 8).astype(np.float32)

    def loc(x, w):
        return jax.nn.relu(x[:, :1] - jnp.asarray(knots)) @ w

    return svi(located(loc, 8), X, Y)


@ordinary
def a_table_by_month():
    table = np.sin(np.arange(12)).astype(np.float32)

    def model(x, month, y):
        w = weights()
        with numpyro.plate("records", x.shape[0]):
            numpyro.sample("y", dist.Normal(x @ w + jnp.asarray(table)[month], 1), obs=y)

    return svi(model, X, MONTH, Y)


@slow
def a_seasonal_basis_of_a_column():
    def model(day, y):
        w = numpyro.sample("w", dist.Normal(0, 1).expand([6]).to_event(1))
        with numpyro.plate("records", day.shape[0]):
            angle = 2 * jnp.pi * day[:, None] / 365.25 * jnp.arange(1, 4)
            basis = jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], -1)
            numpyro.sample("y", dist.Normal(basis @ w, 1), obs=y)

    return svi(model, np.arange(N, dtype=np.float32), Y)


@ordinary
def a_jitted_polynomial():
    @jax.jit
    def powers(x):
        return jnp.stack([x[:, 0] ** k for k in range(4)], -1)

    return svi(located(lambda x, w: powers(x) @ w, 4), X, Y)


@ordinary
def a_jitted_helper_with_small_constants():
    shift, scale = np.float32([0.1, 0.2, 0.3]), np.float32([1.0, 2.0, 3.0])
    standardise = jax.jit(lambda x: (x - shift) / scale)
    return svi(located(lambda x, w: standardise(x) @ w), X, Y)


@ordinary
def interpolation_on_a_captured_grid():
    grid = jnp.linspace(-3, 3, 7)
    values = jnp.tanh(grid)
    return svi(located(lambda x, w: jnp.interp(x[:, 0], grid, values) * w[0]), X, Y)


@ordinary
def a_captured_grid_with_as_many_points_as_records():
    grid = jnp.linspace(-3, 3, N)
    return svi(located(lambda x, w: jnp.interp(x[:, 0], grid, grid) * w[0]), X, Y, public=[grid])


@ordinary
def a_sparse_gaussian_process_with_inducing_points_of_numpy():
    """NumPy subtracts the points from each other before JAX sees them."""
    points = np.linspace(-2, 2, 9).astype(np.float32)

    def model(x, y):
        length = numpyro.sample("length", dist.LogNormal(0, 0.3))
        prior = jnp.exp(-0.5 * jnp.square((points[:, None] - points[None]) / length))
        chol = jnp.linalg.cholesky(prior + 1e-3 * jnp.eye(9))
        noise = numpyro.sample("noise", dist.Normal(0, 1).expand([9]).to_event(1))
        cross = jnp.exp(-0.5 * jnp.square((x[:, :1] - points) / length))
        weights = jax.scipy.linalg.cho_solve((chol, True), chol @ noise)
        with numpyro.plate("records", x.shape[0]):
            numpyro.sample("y", dist.Normal(cross @ weights, 1), obs=y)

    return svi(model, X, Y, public="captured")


@ordinary
def a_gaussian_process_by_hilbert_space_bases():
    """Some initial values make its spectral density 0 in float32, and the gradient NaN."""

    def model(x, y):
        length = numpyro.sample("length", dist.InverseGamma(5.0, 5.0))
        with numpyro.handlers.scope(prefix="gp"):
            f = hsgp_squared_exponential(x=x, alpha=1.0, length=length, ell=1.5, m=20)
        with numpyro.plate("records", x.shape[0]):
            numpyro.sample("y", dist.Normal(f, 1), obs=y)

    return svi(model, X[:, 0], Y)


@slow
def a_smoother_with_inducing_points():
    grid = np.linspace(-2, 2, 7).astype(np.float32)

    def kernel(a, b):
        return jnp.exp(-0.5 * jnp.square(a[:, None] - b))

    def model(x, y):
        u = numpyro.sample("u", dist.Normal(0, 1).expand([7]).to_event(1))
        chol = jnp.linalg.cholesky(kernel(grid, grid) + 1e-3 * jnp.eye(7))
        solved = jax.scipy.linalg.solve_triangular(chol.T, u, lower=False)
        with numpyro.plate("records", x.shape[0]):
            numpyro.sample("y", dist.Normal(kernel(x[:, 0], grid) @ solved, 1), obs=y)

    return svi(model, X, Y, public="captured")


@ordinary
def a_loop_over_small_constants():
    rates = jnp.asarray([0.5, 0.25, 0.125])

    def loc(x, w):
        total, _ = jax.lax.scan(lambda s, rate: (s * rate + x @ w, None), x @ w, rates)
        return total

    return svi(located(loc), X, Y)


@ordinary
def scalars_as_arguments():
    def model(x, y, scale, shift, degree):
        w = weights()
        with numpyro.plate("records", x.shape[0]):
            numpyro.sample("y", dist.Normal(x**degree @ w + shift, scale), obs=y)

    return svi(model, X, Y, np.float32(2.0), jnp.asarray(0.5), 1)


@ordinary
def static_keywords_that_are_no_arrays():
    def model(x, y, link, intercept, prior, size):
        w = weights()
        b = numpyro.sample("b", dist.Normal(0, size)) if intercept else 0.0
        eta = x @ w + b if link == "identity" and prior is None else x @ w
        with numpyro.plate("records", x.shape[0]):
            numpyro.sample("y", dist.Normal(eta, 1), obs=y)

    return svi(model, X, Y, link="identity", intercept=True, prior=None, size=2)


@ordinary
def arguments_that_are_no_arrays():
    def model(x, y=None, link="identity", intercept=True, prior=None):
        w = weights()
        b = numpyro.sample("b", dist.Normal(0, 1)) if intercept else 0.0
        with numpyro.plate("records", x.shape[0]):
            numpyro.sample("y", dist.Normal(x @ w + b, 1), obs=y)

    return svi(model, X, Y, "identity")._replace(kwargs={"intercept": True, "prior": None})


@ordinary
def a_static_table():
    def model(x, y, table):
        w = weights()
        with numpyro.plate("records", x.shape[0]):
            numpyro.sample("y", dist.Normal(x @ w + jnp.mean(table), 1), obs=y)

    return svi(model, X, Y, table=np.ones((N, 2), np.float32))


@ordinary
def a_public_table():
    return svi(visits, X, Y, PATIENTS, PATIENT_OF, public=["patients"])


@ordinary
def a_public_table_by_keyword():
    call = svi(visits, X, Y, public=("patients",))
    return call._replace(kwargs={"patients": PATIENTS, "patient_of": PATIENT_OF})


@ordinary
def public_tables_in_a_dict():
    def model(x, y, tables):
        w = numpyro.sample("w", dist.Normal(tables["mean"], tables["sd"]).to_event(1))
        with numpyro.plate("records", x.shape[0]):
            numpyro.sample("y", dist.Normal(x @ w, 1), obs=y)

    tables = {"mean": np.zeros(D, np.float32), "sd": np.ones(D, np.float32)}
    return svi(model, X, Y, tables, public=["tables"])


@ordinary
def a_public_table_with_as_many_rows_as_records():
    def model(x, y, grid):
        w = numpyro.sample("w", dist.Normal(grid.mean(), 1).expand([D]).to_event(1))
        with numpyro.plate("records", x.shape[0]):
            numpyro.sample("y", dist.Normal(x @ w, 1), obs=y)

    return svi(model, X, Y, np.linspace(0, 1, N, dtype=np.float32), public=["grid"])


@ordinary
def a_captured_table_declared_public():
    table = jnp.linspace(-1, 1, 400).reshape(200, 2)
    helper = jax.jit(lambda x: jnp.interp(x, table[:, 0], table[:, 1]))
    return svi(located(lambda x, w: helper(x) @ w), X, Y, public=[table])


# Priors, transformations and sites.


@ordinary
def a_horseshoe():
    def model(x, y):
        tau = numpyro.sample("tau", dist.HalfCauchy(1))
        local = numpyro.sample("local", dist.HalfCauchy(1).expand([D]).to_event(1))
        w = numpyro.sample("w", dist.Normal(0, 1).expand([D]).to_event(1)) * tau * local
        with numpyro.plate("records", x.shape[0]):
            numpyro.sample("y", dist.Normal(x @ w, 1), obs=y)

    return svi(model, X, Y)


@ordinary
def a_model_that_is_not_centred():
    def model(x, group, y):
        w, spread = weights(), numpyro.sample("spread", dist.HalfNormal(1))
        with numpyro.plate("groups", 5), handlers.reparam(config={"level": LocScaleReparam(0)}):
            level = numpyro.sample("level", dist.Normal(0.0, spread))
        with numpyro.plate("records", x.shape[0]):
            numpyro.sample("y", dist.Normal(x @ w + level[group], 1), obs=y)

    return svi(model, X, GROUP, Y)


@ordinary
def a_transformed_prior():
    def model(x, y):
        prior = dist.TransformedDistribution(
            dist.Normal(0, 1), dist.transforms.AffineTransform(1.0, 2.0)
        )
        with handlers.reparam(config={"b": TransformReparam()}):
            b = numpyro.sample("b", prior)
        with numpyro.plate("records", x.shape[0]):
            numpyro.sample("y", dist.Normal(x[:, 0] * b, 1), obs=y)

    return svi(model, X, Y)


@ordinary
def deterministic_sites():
    def model(x, y):
        w = weights()
        numpyro.deterministic("size", jnp.linalg.norm(w))
        with numpyro.plate("records", x.shape[0]):
            mean = numpyro.deterministic("mean", x @ w)
            numpyro.sample("y", dist.Normal(mean, 1), obs=y)

    return svi(model, X, Y)


@ordinary
def a_likelihood_by_factor():
    def model(x, y):
        w = weights()
        with numpyro.plate("records", x.shape[0]):
            numpyro.factor("y", -jnp.abs(y - x @ w))

    return svi(model, X, Y)


@ordinary
def a_constraint_by_factor():
    def model(x, y):
        w = weights()
        numpyro.factor("sum_to_one", -50 * jnp.square(w.sum() - 1))
        with numpyro.plate("records", x.shape[0]):
            numpyro.sample("y", dist.Normal(x @ w, 1), obs=y)

    return svi(model, X, Y)


@slow
def a_random_walk_over_months():
    def model(month, y):
        step = numpyro.sample("step", dist.HalfNormal(0.5))
        moves = numpyro.sample("moves", dist.Normal(0, 1).expand([12]).to_event(1))
        level = numpyro.deterministic("level", jnp.cumsum(step * moves))
        with numpyro.plate("records", month.shape[0]):
            numpyro.sample("y", dist.Normal(level[month], 1), obs=y)

    return svi(model, MONTH, Y)


@ordinary
def an_optimised_scale():
    def model(x, y):
        w = weights()
        scale = numpyro.param("scale", 1.0, constraint=constraints.positive)
        with numpyro.plate("records", x.shape[0]):
            numpyro.sample("y", dist.Normal(x @ w, scale), obs=y)

    return svi(model, X, Y)


@ordinary
def a_partial_model_with_numbers():
    def model(degree, scale, x, y):
        w = weights()
        with numpyro.plate("records", x.shape[0]):
            numpyro.sample("y", dist.Normal(x**degree @ w, scale), obs=y)

    return svi(functools.partial(model, 1, 2.0), X, Y)


# Networks.


class Network(nn.Module):
    """Two layers."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(1)(nn.tanh(nn.Dense(4)(x)))[..., 0]


@ordinary
def a_network():
    def model(x, y):
        net = flax_module("net", Network(), input_shape=(1, D))
        scale = numpyro.sample("scale", dist.LogNormal(0, 1))
        with numpyro.plate("records", x.shape[0]):
            numpyro.sample("y", dist.Normal(net(x), scale), obs=y)

    return svi(model, X, Y)


@ordinary
def a_bayesian_network():
    def model(x, y):
        net = random_flax_module("net", Network(), dist.Normal(0, 1), input_shape=(1, D))
        with numpyro.plate("records", x.shape[0]):
            numpyro.sample("y", dist.Normal(net(x), 1), obs=y)

    return svi(model, X, Y)


# Guides and where they start.


@slow
def a_full_guide():
    return svi(regression, X, Y, guide=AutoMultivariateNormal)


@ordinary
def a_low_rank_guide():
    return svi(regression, X, Y, guide=AutoLowRankMultivariateNormal(regression, rank=2))


@ordinary
def a_list_of_guides():
    def model(x, y=None):
        w, b = weights(), numpyro.sample("b", dist.Normal(0, 1))
        with numpyro.plate("records", x.shape[0]):
            numpyro.sample("y", dist.Normal(x @ w + b, 1), obs=y)

    guide = AutoGuideList(model)
    guide.append(AutoDelta(handlers.block(model, hide=["w"])))
    guide.append(AutoDiagonalNormal(handlers.block(model, hide=["b"])))
    return svi(model, X, Y, guide=guide)


@ordinary
def a_guide_by_hand():
    def guide(x, y=None):
        loc = numpyro.param("loc", jnp.zeros(D))
        scale = numpyro.param("scale", 0.1 * jnp.ones(D), constraint=constraints.positive)
        numpyro.sample("w", dist.Normal(loc, scale).to_event(1))

    return svi(regression, X, Y, guide=guide)


@ordinary
def a_guide_by_hand_with_small_constants():
    start = np.float32([0.1, 0.2, 0.3])

    def guide(x, y=None):
        loc = numpyro.param("loc", jnp.asarray(start))
        numpyro.sample("w", dist.Normal(loc, 0.1).to_event(1))

    return svi(regression, X, Y, guide=guide)


def starting(strategy: Any, guide: Any = AutoNormal) -> Call:
    """A model with two sites whose guide starts as ``strategy`` says."""

    def model(x, y):
        w, scale = weights(), numpyro.sample("scale", dist.LogNormal(0, 1))
        with numpyro.plate("records", x.shape[0]):
            numpyro.sample("y", dist.Normal(x @ w, scale), obs=y)

    return svi(model, X, Y, guide=guide(model, init_loc_fn=strategy))


@ordinary
def a_start_at_medians():
    return starting(init_to_median(num_samples=5))


@ordinary
def a_start_at_feasible_values():
    return starting(init_to_feasible)


@ordinary
def a_start_at_draws():
    return starting(init_to_sample, AutoDelta)


@slow
def a_start_at_means():
    return starting(init_to_mean, AutoDiagonalNormal)


@ordinary
def a_start_at_uniform_draws():
    return starting(init_to_uniform(radius=1))


@ordinary
def a_start_at_python_numbers():
    return starting(init_to_value(values={"scale": 0.5}))


@ordinary
def a_start_at_a_public_array():
    start = np.float32([0.1, 0.2, 0.3])
    guide = AutoNormal(regression, init_loc_fn=init_to_value(values={"w": start}))
    return svi(regression, X, Y, guide=guide, public=[start])


@ordinary
def a_start_by_init_params():
    call = svi(regression, X, Y)
    return call._replace(run={"init_params": {"w_auto_loc": jnp.asarray([0.1, 0.2, 0.3])}})


# Other samplers, folds and drivers.


@ordinary
def poisson_batches():
    return svi(regression, X, Y, sampler=Poisson(0.2))


@ordinary
def batches_of_fixed_size():
    return svi(regression, X, Y, sampler=FixedSize(16))


@ordinary
def a_tail_average():
    fold = tail_average(2, last=1.0, num_batches=2)
    return svi(regression, X, Y)._replace(run={"fold": fold})


@ordinary
def message_passing_for_binary_outcomes():
    return sep(outcome(lambda eta: dist.Bernoulli(logits=eta)), X, LABELS, site=quadrature())


@slow
def message_passing_for_counts_with_exposure():
    def model(x, exposure, y):
        w = weights()
        with numpyro.plate("records", x.shape[0]):
            numpyro.sample("y", dist.Poisson(exposure * jnp.exp(x @ w)), obs=y)

    return sep(model, X, EXPOSURE, COUNTS, site=quadrature())


@ordinary
def message_passing_with_a_small_table():
    table = np.sin(np.arange(12)).astype(np.float32)

    def model(x, month, y):
        w = weights()
        with numpyro.plate("records", x.shape[0]):
            eta = x @ w + jnp.asarray(table)[month]
            numpyro.sample("y", dist.Bernoulli(logits=eta), obs=y)

    return sep(model, X, MONTH, LABELS, site=quadrature())


@ordinary
def message_passing_with_a_public_table():
    return sep(visits, X, Y, PATIENTS, PATIENT_OF, public=["patients"])


@slow
def a_sampler_for_a_hierarchy():
    def model(x, group, y):
        w, spread = weights(), numpyro.sample("spread", dist.LogNormal(0, 0.5))
        with numpyro.plate("groups", 5):
            level = numpyro.sample("level", dist.Normal(0, spread))
        with numpyro.plate("records", x.shape[0]):
            numpyro.sample("y", dist.Normal(x @ w + level[group], 1), obs=y)

    return mcmc(SGLD(model, 1e-3), X, GROUP, Y)


@ordinary
def a_sampler_with_falling_steps():
    return mcmc(SGLD(regression, lambda t: 1e-3 / (1 + t / 100) ** 0.55), X, Y)


@ordinary
def a_sampler_with_a_start_at_python_numbers():
    def model(x):
        mean = numpyro.sample("mean", dist.Normal(0, 1))
        with numpyro.plate("records", x.shape[0]):
            numpyro.sample("x", dist.Normal(mean, 1), obs=x)

    start = init_to_value(values={"mean": 0.5})
    return mcmc(SGHMC(model, 1e-3, init_strategy=start), Y)


@ordinary
def a_sampler_with_momentum():
    return mcmc(SGHMC(regression, 1e-3, init_strategy=init_to_uniform), X, Y)
