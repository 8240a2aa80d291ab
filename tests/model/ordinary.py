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
    logistic,
    mcmc,
    one_mean,
    regression,
    sep,
    svi,
    visits,
    weights,
    with_intercept,
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
    slow: bool


def model_of(likelihood: Callable[..., Any], *sites: Callable[[], Any]) -> Callable[..., None]:
    """A model of columns. The last column is the outcome.

    ``sites`` sample what the likelihood needs besides: it gets the first column, the values of the
    sites and the other columns.
    """

    def model(*columns):
        values = [sample() for sample in sites]
        with numpyro.plate("records", len(columns[-1])):
            found = likelihood(*columns[:-1][:1], *values, *columns[1:-1])
            numpyro.sample("y", found, obs=columns[-1])

    return model


def outcome(likelihood: Callable[..., Any], *sites: Callable[[], Any]) -> Callable[..., None]:
    """A generalised linear model."""
    return model_of(lambda x, w, *others: likelihood(x @ w, *others), weights, *sites)


def factor_of(density: Callable[..., Any], *sites: Callable[[], Any]) -> Callable[..., None]:
    """A model whose log-likelihood is computed from the values of the sites and all columns."""

    def model(*columns):
        values = [sample() for sample in sites]
        with numpyro.plate("records", len(columns[0])):
            numpyro.factor("y", density(*values, *columns))

    return model


def site(name: str, prior: Any, *shape: int) -> Callable[[], Any]:
    """A latent site."""
    prior = prior.expand(shape).to_event(len(shape)) if shape else prior
    return lambda: numpyro.sample(name, prior)


def positive(name: str, scale: float = 1) -> Callable[[], Any]:
    """A site with a log-normal prior."""
    return site(name, dist.LogNormal(0, scale))


def in_plate(name: str, number: int, sample: Callable[[], Any]) -> Callable[[], Any]:
    """A site in a plate of its own."""

    def inside() -> Any:
        with numpyro.plate(name, number):
            return sample()

    return inside


STANDARD = dist.Normal(0, 1)
SLOW = {
    "shares", "categories", "grades_with_cut_points", "outcomes_of_several_numbers",
    "correlated_outcomes", "a_missing_label_that_is_summed_out", "an_encoder_of_each_record",
    "a_slope_for_each_group_by_a_static_number", "games_between_two_teams",
    "answers_by_ability_and_difficulty", "captured_nodes_of_a_quadrature",
    "a_seasonal_basis_of_a_column", "a_smoother_with_inducing_points", "a_full_guide",
    "a_random_walk_over_months", "a_start_at_means", "a_sampler_for_a_hierarchy",
    "message_passing_for_counts_with_exposure",
}  # fmt: skip


# Outcomes.


def with_cut_points():
    """An ordered outcome."""
    ordered = dist.transforms.OrderedTransform()
    prior = dist.TransformedDistribution(STANDARD.expand([3]).to_event(1), ordered)
    return outcome(dist.OrderedLogistic, site("cuts", prior))


def share_of(eta, size):
    """A beta distribution by its mean."""
    mean = jax.nn.sigmoid(eta)
    return dist.Beta(mean * size, (1 - mean) * size)


def several_outcomes(x, y, z, count):
    """A number, a label and a count of each record."""
    w = weights()
    with numpyro.plate("records", x.shape[0]):
        numpyro.sample("y", dist.Normal(x @ w, 1), obs=y)
        numpyro.sample("z", dist.Bernoulli(logits=x @ w), obs=z)
        numpyro.sample("count", dist.Poisson(jnp.exp(x @ w)), obs=count)


def correlated(chol, scale):
    """A normal distribution by its correlations."""
    return dist.MultivariateNormal(jnp.zeros(4), scale_tril=scale[:, None] * chol)


OUTCOMES: dict[str, Callable[[], Call]] = {
    "normal_outcomes": lambda: svi(outcome(dist.Normal, positive("scale")), X, Y),
    "binary_outcomes": lambda: svi(logistic, X, LABELS),
    "counts": lambda: svi(outcome(lambda eta: dist.Poisson(jnp.exp(eta))), X, COUNTS),
    "counts_with_a_spread": lambda: svi(
        outcome(lambda eta, r: dist.NegativeBinomial2(jnp.exp(eta), r), positive("r")), X, COUNTS
    ),
    "counts_with_many_zeros": lambda: svi(outcome(
        lambda eta, gate: dist.ZeroInflatedPoisson(gate, jnp.exp(eta)),
        site("gate", dist.Beta(1.0, 1.0)),
    ), X, COUNTS),
    "shares": lambda: svi(outcome(share_of, positive("size")), X, SHARES),
    "positive_outcomes": lambda: svi(
        outcome(lambda eta, a: dist.Gamma(a, a * jnp.exp(-eta)), positive("a")), X, POSITIVE
    ),
    "outcomes_with_heavy_tails": lambda: svi(
        outcome(lambda eta, s: dist.StudentT(4.0, eta, s), positive("scale")), X, Y
    ),
    "categories": lambda: svi(
        model_of(lambda x, w: dist.Categorical(logits=x @ w), site("w", STANDARD, D, 4)), X, GRADES
    ),
    "grades_with_cut_points": lambda: svi(with_cut_points(), X, GRADES),
    "several_outcomes": lambda: svi(several_outcomes, X, Y, LABELS, COUNTS),
    "outcomes_of_several_numbers": lambda: svi(model_of(
        lambda x, w, scale: dist.Normal(x @ w, scale).to_event(1), site("w", STANDARD, D, 4),
        site("scale", dist.HalfNormal(1), 4),
    ), X, PANEL),
    "correlated_outcomes": lambda: svi(model_of(
        correlated, site("chol", dist.LKJCholesky(4, 2.0)), site("scale", dist.LogNormal(0, 0.5), 4)
    ), PANEL),
    "binomial_outcomes_with_totals": lambda: svi(
        outcome(lambda eta, total: dist.Binomial(total, logits=eta)), X, COUNTS + 3, COUNTS
    ),
}  # fmt: skip


# What a record brings along.


def weibull_or_later(w, shape, x, time, seen):
    """Times. Some are only known to be longer."""
    weibull = dist.Weibull(jnp.exp(x @ w), shape)
    late = jnp.log1p(-jnp.clip(weibull.cdf(time), 0, 1 - 1e-6))
    return jnp.where(seen, weibull.log_prob(time), late)


EDGES = np.array([0.5, 1.0, 2.0], np.float32)


def by_pieces(w, level, x, time, seen):
    """Survival with a hazard that is constant in each of four pieces."""
    starts = jnp.concatenate([jnp.zeros(1), jnp.asarray(EDGES)])
    ends = jnp.append(jnp.asarray(EDGES), jnp.inf)
    spent = jnp.clip(jnp.minimum(time[:, None], ends) - starts, 0)
    hazard = jnp.exp(level + (x @ w)[:, None])
    last = jnp.searchsorted(jnp.asarray(EDGES), time)
    own = jnp.take_along_axis(jnp.log(hazard), last[:, None], 1)[:, 0]
    return seen * own - (spent * hazard).sum(1)


def summed_out(w, share, x, known, label, y):
    """A label that is not known of all records."""
    each = dist.Normal((x @ w)[:, None] + jnp.arange(2.0), 1).log_prob(y[:, None])
    joint = each + jnp.stack([jnp.log1p(-share), jnp.log(share)])
    own = jnp.take_along_axis(joint, label[:, None], 1)[:, 0]
    return jnp.where(known, own, jax.nn.logsumexp(joint, 1))


def by_keyword(x, y=None, offset=0.0):
    """An offset that has a default."""
    located(lambda x, w: x @ w + offset)(x, y)


def weighted(x, weight, y):
    """A weight of each record."""
    w = weights()
    with numpyro.plate("records", x.shape[0]), handlers.scale(scale=weight):
        numpyro.sample("y", dist.Normal(x @ w, 1), obs=y)


def masked(x, known, y):
    """Outcomes that are not known of all records."""
    w = weights()
    with numpyro.plate("records", x.shape[0]), handlers.mask(mask=known):
        numpyro.sample("y", dist.Normal(x @ w, 1), obs=y)


def coded(y):
    """A latent code of each record."""
    v = numpyro.sample("v", dist.Normal(0, 1).expand([4]).to_event(1))
    with numpyro.plate("records", y.shape[0]):
        code = numpyro.sample("code", dist.Normal(0, 1))
        numpyro.sample("y", dist.Normal(code[..., None] * v, 1).to_event(1), obs=y)


def encoder(y):
    """A guide of the codes."""
    loc = numpyro.param("loc", jnp.zeros(4))
    numpyro.sample("v", dist.Normal(loc, 0.1).to_event(1))
    rates = numpyro.param("encoder", 0.1 * jnp.ones(4))
    with numpyro.plate("records", y.shape[0]):
        numpyro.sample("code", dist.Normal(y @ rates, 0.5))


OF_A_RECORD: dict[str, Callable[[], Call]] = {
    "an_exposure_in_each_record": lambda: svi(
        outcome(lambda eta, exposure: dist.Poisson(exposure * jnp.exp(eta))), X, EXPOSURE, COUNTS
    ),
    "an_offset_by_keyword": lambda: svi(by_keyword, X)._replace(
        kwargs={"y": Y, "offset": EXPOSURE}
    ),
    "censored_times": lambda: svi(factor_of(weibull_or_later, weights, positive("shape", 0.5)), X,
        POSITIVE, LABELS > 0),
    "survival_by_pieces": lambda: svi(factor_of(by_pieces, weights, site("level", STANDARD, 4)), X,
        POSITIVE, LABELS),
    "weights_by_scale": lambda: svi(weighted, X, EXPOSURE, Y),
    "missing_outcomes_by_mask": lambda: svi(masked, X, LABELS > 0, Y),
    "missing_features_at_a_learned_value": lambda: svi(model_of(
        lambda x, w, usual, known: dist.Normal(jnp.where(known, x, usual) @ w, 1), weights,
        site("usual", STANDARD, D),
    ), X, X > -1, Y),
    "a_missing_label_that_is_summed_out": lambda: svi(
        factor_of(summed_out, weights, site("share", dist.Beta(2.0, 2.0))),
        X, POSITIVE > 1, LABELS, Y,
    ),
    "a_column_of_times": lambda: svi(model_of(
        lambda time, level, slope: dist.Normal(level + slope * time / 30, 1),
        site("level", STANDARD), site("slope", STANDARD),
    ), np.arange(N, dtype=np.float32), Y),
    "an_encoder_of_each_record": lambda: svi(coded, PANEL, guide=encoder),
}  # fmt: skip


# Groups, mixtures and plates.


def with_levels(x, group, y, reparam=None):
    """A level for each group."""
    w, spread = weights(), numpyro.sample("spread", dist.HalfNormal(1))
    with numpyro.plate("groups", 5), handlers.reparam(config=reparam or {}):
        level = numpyro.sample("level", dist.Normal(0.0, spread))
    with numpyro.plate("records", x.shape[0]):
        numpyro.sample("y", dist.Normal(x @ w + level[group], 1), obs=y)


def with_slopes(x, group, y, num_groups):
    """A slope for each group."""
    with numpyro.plate("groups", num_groups):
        w = numpyro.sample("w", dist.Normal(0, 1).expand([D]).to_event(1))
    with numpyro.plate("records", x.shape[0]):
        numpyro.sample("y", dist.Normal((x * w[group]).sum(-1), 1), obs=y)


def labelled(y):
    """A mixture with a discrete latent."""
    share = numpyro.sample("share", dist.Dirichlet(jnp.ones(3)))
    mean = numpyro.sample("mean", dist.Normal(0, 3).expand([3]).to_event(1))
    with numpyro.plate("records", y.shape[0]):
        which = numpyro.sample("which", dist.Categorical(share))
        numpyro.sample("y", dist.Normal(mean[which], 1), obs=y)


def questionnaire(y):
    """Several answers of each person."""
    skill = numpyro.sample("skill", dist.Normal(0, 1).expand([4]).to_event(1))
    people = numpyro.plate("people", y.shape[0], dim=-2)
    with people, numpyro.plate("questions", y.shape[1], dim=-1):
        numpyro.sample("y", dist.Normal(skill, 1), obs=y)


def with_own_batches(x, y):
    """A plate that draws batches."""
    w = weights()
    with numpyro.plate("records", x.shape[0], subsample_size=16) as index:
        numpyro.sample("y", dist.Normal(x[index] @ w, 1), obs=y[index])


def some(high):
    """Numbers of teams, people or items."""
    return np.random.default_rng(high).integers(0, high, N)


GROUPS: dict[str, Callable[[], Call]] = {
    "a_level_for_each_group": lambda: svi(with_levels, X, GROUP, Y),
    "a_slope_for_each_group_by_a_static_number": lambda: svi(
        with_slopes, X, GROUP, Y, num_groups=5
    ),
    "a_mixture": lambda: svi(model_of(
        lambda share, mean: dist.MixtureSameFamily(dist.Categorical(share), dist.Normal(mean, 1)),
        site("share", dist.Dirichlet(jnp.ones(3))), site("mean", dist.Normal(0, 3), 3),
    ), Y),
    "a_mixture_whose_labels_are_summed_out": lambda: svi(labelled, Y),
    "several_answers_of_each_person": lambda: svi(questionnaire, PANEL, data_plate="people"),
    "a_plate_around_latents_and_another_around_records": lambda: svi(model_of(
        lambda x, w: dist.Normal(x @ w, 1), in_plate("columns", D, site("w", dist.Laplace(0, 1)))
    ), X, Y),
    "a_plate_with_batches_of_its_own": lambda: svi(with_own_batches, X, Y),
    "games_between_two_teams": lambda: svi(model_of(
        lambda home, skill, away: dist.Bernoulli(logits=skill[home] - skill[away]),
        site("skill", STANDARD, 8),
    ), some(8), some(8)[::-1], LABELS),
    "answers_by_ability_and_difficulty": lambda: svi(model_of(
        lambda person, ability, difficulty, slope, item: dist.Bernoulli(
            logits=slope[item] * (ability[person] - difficulty[item])
        ),
        site("ability", STANDARD, 20), site("difficulty", STANDARD, 10),
        site("slope", dist.LogNormal(0, 0.3), 10),
    ), some(20), some(10), LABELS),
}  # fmt: skip


# Small public values.

TABLE = np.linspace(-1, 1, 15, dtype=np.float32).reshape(3, 5)
MATRIX = jnp.eye(D) + 0.1
NODES, SHARE_OF_NODE = (
    values.astype(np.float32) for values in np.polynomial.hermite_e.hermegauss(12)
)
KNOTS = np.linspace(-2, 2, 8).astype(np.float32)
SINES = np.sin(np.arange(12)).astype(np.float32)
SHIFT, SCALE = np.float32([0.1, 0.2, 0.3]), np.float32([1.0, 2.0, 3.0])
COARSE, FINE = jnp.linspace(-3, 3, 7), jnp.linspace(-3, 3, N)
POINTS, GRID = (np.linspace(-2, 2, number).astype(np.float32) for number in (9, 7))
RATES = jnp.asarray([0.5, 0.25, 0.125])
PAIRS = jnp.linspace(-1, 1, 400).reshape(200, 2)


def random_intercepts(w, spread, x, y):
    """Labels with an intercept that is integrated out."""
    eta = (x @ w)[:, None] + spread * jnp.asarray(NODES)
    each = dist.Bernoulli(logits=eta).log_prob(y[:, None])
    return jax.nn.logsumexp(each + jnp.log(jnp.asarray(SHARE_OF_NODE)), -1)


def seasonal(day, w):
    """Sines and cosines of a column."""
    angle = 2 * jnp.pi * day[:, None] / 365.25 * jnp.arange(1, 4)
    return dist.Normal(jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], -1) @ w, 1)


def sparse_process(x, length, noise):
    """NumPy subtracts the inducing points from each other before JAX sees them."""
    prior = jnp.exp(-0.5 * jnp.square((POINTS[:, None] - POINTS[None]) / length))
    chol = jnp.linalg.cholesky(prior + 1e-3 * jnp.eye(9))
    cross = jnp.exp(-0.5 * jnp.square((x[:, :1] - POINTS) / length))
    return dist.Normal(cross @ jax.scipy.linalg.cho_solve((chol, True), chol @ noise), 1)


def hilbert_space_process(x, y):
    """Some initial values make its spectral density 0 in float32, and the gradient NaN."""
    length = numpyro.sample("length", dist.InverseGamma(5.0, 5.0))
    with numpyro.handlers.scope(prefix="gp"):
        f = hsgp_squared_exponential(x=x, alpha=1.0, length=length, ell=1.5, m=20)
    with numpyro.plate("records", x.shape[0]):
        numpyro.sample("y", dist.Normal(f, 1), obs=y)


def smoother(x, u):
    """A smooth function by its values at a grid."""

    def kernel(a, b):
        return jnp.exp(-0.5 * jnp.square(a[:, None] - b))

    chol = jnp.linalg.cholesky(kernel(GRID, GRID) + 1e-3 * jnp.eye(7))
    solved = jax.scipy.linalg.solve_triangular(chol.T, u, lower=False)
    return dist.Normal(kernel(x[:, 0], GRID) @ solved, 1)


def with_options(x, y=None, link="identity", intercept=True, prior=None, size=1):
    """Arguments that are no arrays."""
    w = weights()
    b = numpyro.sample("b", dist.Normal(0, size)) if intercept else 0.0
    eta = x @ w + b if link == "identity" and prior is None else x @ w
    with numpyro.plate("records", x.shape[0]):
        numpyro.sample("y", dist.Normal(eta, 1), obs=y)


def with_tables(x, y, tables):
    """A prior of tables in a dict."""
    located(prior=lambda: dist.Normal(tables["mean"], tables["sd"]))(x, y)


def with_grid(x, y, grid):
    """A prior around the mean of a table."""
    located(prior=lambda: dist.Normal(grid.mean(), 1).expand([D]))(x, y)


PUBLIC: dict[str, Callable[[], Call]] = {
    "a_captured_table_of_a_quarter_of_the_records": lambda: svi(located(
        lambda x, w: x @ w + (jnp.tanh(x @ jnp.ones((D, 3))) @ jnp.asarray(TABLE)).mean(-1)
    ), X, Y),
    "a_captured_table_of_jax": lambda: svi(located(lambda x, w: x @ MATRIX @ w), X, Y),
    "captured_nodes_of_a_quadrature": lambda: svi(
        factor_of(random_intercepts, weights, site("spread", dist.HalfNormal(1))), X, LABELS,
        public="captured",
    ),
    "knots_of_a_spline": lambda: svi(
        located(lambda x, w: jax.nn.relu(x[:, :1] - jnp.asarray(KNOTS)) @ w, 8), X, Y
    ),
    "a_table_by_month": lambda: svi(located(lambda x, w, month: x @ w + jnp.asarray(SINES)[month]),
        X, Y, MONTH),
    "a_seasonal_basis_of_a_column": lambda: svi(model_of(seasonal, site("w", STANDARD, 6)),
        np.arange(N, dtype=np.float32), Y),
    "a_jitted_polynomial": lambda: svi(located(
        jax.jit(lambda x, w: jnp.stack([x[:, 0] ** k for k in range(4)], -1) @ w), 4
    ), X, Y),
    "a_jitted_helper_with_small_constants": lambda: svi(located(
        lambda x, w: jax.jit(lambda x: (x - SHIFT) / SCALE)(x) @ w
    ), X, Y),
    "interpolation_on_a_captured_grid": lambda: svi(
        located(lambda x, w: jnp.interp(x[:, 0], COARSE, jnp.tanh(COARSE)) * w[0]), X, Y
    ),
    "a_captured_grid_with_as_many_points_as_records": lambda: svi(
        located(lambda x, w: jnp.interp(x[:, 0], FINE, FINE) * w[0]), X, Y, public=[FINE]
    ),
    "a_sparse_gaussian_process_with_inducing_points_of_numpy": lambda: svi(
        model_of(sparse_process, positive("length", 0.3), site("noise", STANDARD, 9)), X, Y,
        public="captured",
    ),
    "a_gaussian_process_by_hilbert_space_bases": lambda: svi(hilbert_space_process, X[:, 0], Y),
    "a_smoother_with_inducing_points": lambda: svi(model_of(smoother, site("u", STANDARD, 7)), X, Y,
        public="captured"),
    "a_loop_over_small_constants": lambda: svi(located(
        lambda x, w: jax.lax.scan(lambda s, rate: (s * rate + x @ w, None), x @ w, RATES)[0]
    ), X, Y),
    "scalars_as_arguments": lambda: svi(
        located(lambda x, w, scale, shift, degree: (x**degree @ w + shift) / scale),
        X, Y, np.float32(2.0), jnp.asarray(0.5), 1,
    ),
    "static_keywords_that_are_no_arrays": lambda: svi(with_options, X, Y, link="identity",
        intercept=True, prior=None, size=2),
    "arguments_that_are_no_arrays": lambda: svi(with_options, X, Y, "identity")._replace(
        kwargs={"intercept": True, "prior": None}
    ),
    "a_static_table": lambda: svi(located(lambda x, w, table: x @ w + jnp.mean(table)), X, Y,
        table=np.ones((N, 2), np.float32)),
    "a_public_table": lambda: svi(visits, X, Y, PATIENTS, PATIENT_OF, public=["patients"]),
    "a_public_table_by_keyword": lambda: svi(visits, X, Y, public=("patients",))._replace(
        kwargs={"patients": PATIENTS, "patient_of": PATIENT_OF}
    ),
    "public_tables_in_a_dict": lambda: svi(with_tables, X, Y,
        {"mean": np.zeros(D, np.float32), "sd": np.ones(D, np.float32)}, public=["tables"]),
    "a_public_table_with_as_many_rows_as_records": lambda: svi(with_grid, X, Y,
        np.linspace(0, 1, N, dtype=np.float32), public=["grid"]),
    "a_captured_table_declared_public": lambda: svi(located(
        lambda x, w: jax.jit(lambda x: jnp.interp(x, PAIRS[:, 0], PAIRS[:, 1]))(x) @ w
    ), X, Y, public=[PAIRS]),
}  # fmt: skip


# Priors, transformations, sites and networks.


def horseshoe(x, w, tau, local):
    """Weights with scales of their own."""
    return dist.Normal(x @ (w * tau * local), 1)


def transformed():
    """A prior that is reparameterised."""
    affine = dist.transforms.AffineTransform(1.0, 2.0)
    with handlers.reparam(config={"b": TransformReparam()}):
        return numpyro.sample("b", dist.TransformedDistribution(dist.Normal(0, 1), affine))


def deterministic_sites(x, y):
    """One of the latents, and one of each record."""
    w = weights()
    numpyro.deterministic("size", jnp.linalg.norm(w))
    with numpyro.plate("records", x.shape[0]):
        mean = numpyro.deterministic("mean", x @ w)
        numpyro.sample("y", dist.Normal(mean, 1), obs=y)


def random_walk(month, y):
    """A level that moves from month to month."""
    step, moves = site("step", dist.HalfNormal(0.5))(), site("moves", STANDARD, 12)()
    level = numpyro.deterministic("level", jnp.cumsum(step * moves))
    with numpyro.plate("records", month.shape[0]):
        numpyro.sample("y", dist.Normal(level[month], 1), obs=y)


class Network(nn.Module):
    """Two layers."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(1)(nn.tanh(nn.Dense(4)(x)))[..., 0]


def plain_network():
    """A network whose weights are parameters."""
    return flax_module("net", Network(), input_shape=(1, D))


def bayesian_network():
    """A network with a prior."""
    return random_flax_module("net", Network(), dist.Normal(0, 1), input_shape=(1, D))


PRIORS: dict[str, Callable[[], Call]] = {
    "a_horseshoe": lambda: svi(model_of(
        horseshoe, weights, site("tau", dist.HalfCauchy(1)), site("local", dist.HalfCauchy(1), D)
    ), X, Y),
    "a_model_that_is_not_centred": lambda: svi(
        lambda x, group, y: with_levels(x, group, y, {"level": LocScaleReparam(0)}), X, GROUP, Y
    ),
    "a_transformed_prior": lambda: svi(
        model_of(lambda x, b: dist.Normal(x[:, 0] * b, 1), transformed), X, Y
    ),
    "deterministic_sites": lambda: svi(deterministic_sites, X, Y),
    "a_likelihood_by_factor": lambda: svi(
        factor_of(lambda w, x, y: -jnp.abs(y - x @ w), weights), X, Y
    ),
    "a_constraint_by_factor": lambda: svi(located(
        outside=lambda w, *_: numpyro.factor("sum_to_one", -50 * jnp.square(w.sum() - 1))
    ), X, Y),
    "a_random_walk_over_months": lambda: svi(random_walk, MONTH, Y),
    "an_optimised_scale": lambda: svi(outcome(
        dist.Normal, lambda: numpyro.param("scale", 1.0, constraint=constraints.positive)
    ), X, Y),
    "a_partial_model_with_numbers": lambda: svi(functools.partial(
        lambda degree, scale, x, y: located(lambda x, w: x**degree @ w / scale)(x, y), 1, 2.0
    ), X, Y),
    "a_network": lambda: svi(model_of(
        lambda x, net, scale: dist.Normal(net(x), scale), plain_network, positive("scale")
    ), X, Y),
    "a_bayesian_network": lambda: svi(
        model_of(lambda x, net: dist.Normal(net(x), 1), bayesian_network), X, Y
    ),
}  # fmt: skip


# Guides and where they start.


def two_guides() -> AutoGuideList:
    """A list of guides."""
    guide = AutoGuideList(with_intercept)
    guide.append(AutoDelta(handlers.block(with_intercept, hide=["w"])))
    guide.append(AutoDiagonalNormal(handlers.block(with_intercept, hide=["b"])))
    return guide


def by_hand(start: Any = None) -> Callable[..., None]:
    """A guide by hand."""

    def guide(x, y=None):
        loc = numpyro.param("loc", jnp.zeros(D) if start is None else jnp.asarray(start))
        scale = numpyro.param("scale", 0.1 * jnp.ones(D), constraint=constraints.positive)
        numpyro.sample("w", dist.Normal(loc, scale).to_event(1))

    return guide


def starting(strategy: Any, guide: Any = AutoNormal) -> Callable[[], Call]:
    """A model with two sites whose guide starts as ``strategy`` says."""
    model = outcome(dist.Normal, positive("scale"))
    return lambda: svi(model, X, Y, guide=guide(model, init_loc_fn=strategy))


GUIDES: dict[str, Callable[[], Call]] = {
    "a_full_guide": lambda: svi(regression, X, Y, guide=AutoMultivariateNormal),
    "a_low_rank_guide": lambda: svi(regression, X, Y,
        guide=AutoLowRankMultivariateNormal(regression, rank=2)),
    "a_list_of_guides": lambda: svi(with_intercept, X, Y, guide=two_guides()),
    "a_guide_by_hand": lambda: svi(regression, X, Y, guide=by_hand()),
    "a_guide_by_hand_with_small_constants": lambda: svi(regression, X, Y, guide=by_hand(SHIFT)),
    "a_start_at_medians": starting(init_to_median(num_samples=5)),
    "a_start_at_feasible_values": starting(init_to_feasible),
    "a_start_at_draws": starting(init_to_sample, AutoDelta),
    "a_start_at_means": starting(init_to_mean, AutoDiagonalNormal),
    "a_start_at_uniform_draws": starting(init_to_uniform(radius=1)),
    "a_start_at_python_numbers": starting(init_to_value(values={"scale": 0.5})),
    "a_start_at_a_public_array": lambda: svi(regression, X, Y, public=[SHIFT],
        guide=AutoNormal(regression, init_loc_fn=init_to_value(values={"w": SHIFT}))),
    "a_start_by_init_params": lambda: svi(regression, X, Y)._replace(
        run={"init_params": {"w_auto_loc": jnp.asarray(SHIFT)}}
    ),
}  # fmt: skip


# Other samplers, folds and drivers.

DRIVERS: dict[str, Callable[[], Call]] = {
    "poisson_batches": lambda: svi(regression, X, Y, sampler=Poisson(0.2)),
    "batches_of_fixed_size": lambda: svi(regression, X, Y, sampler=FixedSize(16)),
    "a_tail_average": lambda: svi(regression, X, Y)._replace(
        run={"fold": tail_average(2, last=1.0, num_batches=2)}
    ),
    "message_passing_for_binary_outcomes": lambda: sep(logistic, X, LABELS, site=quadrature()),
    "message_passing_for_counts_with_exposure": lambda: sep(
        outcome(lambda eta, exposure: dist.Poisson(exposure * jnp.exp(eta))), X, EXPOSURE, COUNTS,
        site=quadrature(),
    ),
    "message_passing_with_a_small_table": lambda: sep(
        outcome(lambda eta, month: dist.Bernoulli(logits=eta + jnp.asarray(SINES)[month])),
        X, MONTH, LABELS, site=quadrature(),
    ),
    "message_passing_with_a_public_table": lambda: sep(visits, X, Y, PATIENTS, PATIENT_OF,
        public=["patients"]),
    "a_sampler_for_a_hierarchy": lambda: mcmc(SGLD(with_levels, 1e-3), X, GROUP, Y),
    "a_sampler_with_falling_steps": lambda: mcmc(
        SGLD(regression, lambda t: 1e-3 / (1 + t / 100) ** 0.55), X, Y
    ),
    "a_sampler_with_a_start_at_python_numbers": lambda: mcmc(
        SGHMC(one_mean, 1e-3, init_strategy=init_to_value(values={"mean": 0.5})), Y
    ),
    "a_sampler_with_momentum": lambda: mcmc(SGHMC(regression, 1e-3, init_strategy=init_to_uniform),
        X, Y),
}  # fmt: skip

ALL = OUTCOMES | OF_A_RECORD | GROUPS | PUBLIC | PRIORS | GUIDES | DRIVERS
ORDINARY = [Row(name, build, name in SLOW) for name, build in ALL.items()]
