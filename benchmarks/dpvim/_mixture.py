"""Data sharing: records in categories, the generative model, and the analysis it is judged by.

A record is a vector of categories x and a count y. The model is DPVIm's (section 4.2, appendix
G.1), with the mixture's component summed out of the likelihood of each record:

    x ~ sum_k pi_k prod_j Categorical(theta_jk),    y | x ~ Poisson(exp(design(x) w)),

Dirichlet(1) priors on pi and theta, N(0, I) on w. All cut points are round, public numbers.
"""

import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from datasets import load_doctor_visits, load_rwm5yr
from evaluate import log_predictive_density
from numpyro.distributions import constraints
from numpyro.infer import Predictive, log_likelihood
from scipy.optimize import minimize

NUM_COMPONENTS = 16


class Records(NamedTuple):
    """A data set: categories ``(N, d)``, counts ``(N,)``, levels of each category."""

    name: str
    codes: np.ndarray
    counts: np.ndarray
    levels: tuple[int, ...]
    terms: tuple[str, ...]

    def take(self, rows):
        return self._replace(codes=self.codes[rows], counts=self.counts[rows])

    def num_latents(self):
        return (NUM_COMPONENTS - 1) + (NUM_COMPONENTS + 1) * (len(self.terms) - 1) + 1


def _columns(data):
    return dict(zip(data.feature_names, data.X.T.astype(np.float64), strict=True))


def _records(name, features, counts):
    codes = np.stack([code for code, _ in features.values()], axis=1).astype(np.int32)
    levels = tuple(number for _, number in features.values())
    terms = [f"{key}={level}" for key, (_, n) in features.items() for level in range(1, n)]
    return Records(name, codes, counts.astype(np.int32), levels, ("intercept", *terms))


def doctor_visits():
    """Visits in two weeks of 5,190 persons, seven categories."""
    data = load_doctor_visits()
    c = _columns(data)
    features = {
        "woman": (c["gender"], 2),
        "age": (np.digitize(c["age"], (0.295, 0.595)), 3),
        "insurance": (c["private"] + 2 * c["freepoor"] + 3 * c["freerepat"], 4),
        "illnesses": (np.digitize(c["illness"], (1, 2, 3)), 4),
        "reduced days": (np.digitize(c["reduced"], (1, 8)), 3),
        "health score": (np.digitize(c["health"], (1, 4)), 3),
        "chronic": (c["nchronic"] + 2 * c["lchronic"], 3),
    }
    return _records("doctor_visits", features, data.y)


def rwm5yr():
    """Visits in the first year on record of 6,127 persons, at most 12; seven categories."""
    data = load_rwm5yr()
    c = _columns(data)
    order = np.lexsort((c["year"], data.group))
    rows = order[np.unique(data.group[order], return_index=True)[1]]
    c = {name: column[rows] for name, column in c.items()}
    features = {
        "age": (np.digitize(c["age"], (35, 45, 55)), 4),
        "woman": (c["female"], 2),
        "married": (c["married"], 2),
        "children": (c["kids"], 2),
        "out of work": (c["outwork"], 2),
        "income": (np.digitize(c["hhninc"], (2, 4)), 3),
        "education": (c["edlevel2"] + 2 * c["edlevel3"] + 3 * c["edlevel4"], 4),
    }
    return _records("rwm5yr", features, np.minimum(data.y[rows], 12))


DATA = {"doctor_visits": doctor_visits, "rwm5yr": rwm5yr}


class CategoricalMixture(dist.Distribution):
    """Mixture of products of categorical distributions; the component is summed out.

    ``tables`` holds the probabilities of all levels of all features side by side, ``(K, sum of
    levels)``. (``MixtureSameFamily`` refuses categorical components.)
    """

    support = constraints.independent(constraints.nonnegative_integer, 1)
    pytree_data_fields = ("weights", "tables")
    pytree_aux_fields = ("levels",)

    def __init__(self, weights, tables, levels):
        self.weights, self.tables, self.levels = weights, tables, levels
        super().__init__(event_shape=(len(levels),), validate_args=False)

    def log_prob(self, value):
        ends = np.cumsum((0, *self.levels))
        one_hot = jax.nn.one_hot(value + ends[:-1], ends[-1], dtype=self.tables.dtype).sum(-2)
        joint = one_hot @ jnp.log(self.tables).T + jnp.log(self.weights)
        return jax.nn.logsumexp(joint, axis=-1)

    def sample(self, key, sample_shape=()):
        keys = jax.random.split(key, len(self.levels) + 1)
        which = jax.random.categorical(keys[0], jnp.log(self.weights), shape=sample_shape)
        starts = np.cumsum((0, *self.levels))
        columns = [
            jax.random.categorical(own, jnp.log(self.tables[:, start : start + number])[which])
            for own, start, number in zip(keys[1:], starts, self.levels, strict=False)
        ]
        return jnp.stack(columns, axis=-1)


def design(codes, levels, np=np):
    """Columns of the regression: 1 and the levels of each category but the first."""
    ones = np.ones((*codes.shape[:-1], 1), np.float32)
    hot = [codes[..., j, None] == np.arange(1, n) for j, n in enumerate(levels)]
    return np.concatenate([ones, *(h.astype(np.float32) for h in hot)], axis=-1)


def make_model(levels):
    """The generative model of records with these numbers of levels."""
    number_of = {n: levels.count(n) for n in dict.fromkeys(levels)}

    def model(codes, counts, number=None):
        """Without records, ``number`` says how many to draw."""
        number = number if codes is None else codes.shape[0]
        weights = numpyro.sample("weights", dist.Dirichlet(jnp.ones(NUM_COMPONENTS)))
        blocks = {n: iter(_block(n, many).swapaxes(0, 1)) for n, many in number_of.items()}
        tables = jnp.concatenate([next(blocks[n]) for n in levels], axis=-1)
        width = 1 + sum(levels) - len(levels)
        w = numpyro.sample("coefficients", dist.Normal(0, 1).expand([width]).to_event(1))
        with numpyro.plate("records", number):
            x = numpyro.sample("x", CategoricalMixture(weights, tables, levels), obs=codes)
            numpyro.sample("y", dist.Poisson(jnp.exp(design(x, levels, jnp) @ w)), obs=counts)

    return model


def _block(levels, features):
    """Probability tables of all features of one number of levels: (K, features, levels)."""
    shape = (NUM_COMPONENTS, features, levels)
    return numpyro.sample(f"theta_{levels}", dist.Dirichlet(jnp.ones(shape)).to_event(2))


def held_out_density(model, guide, records, draws=100):
    """Function from parameters to the mean log predictive density of held-out records."""

    @jax.jit
    def densities(params):
        predictive = Predictive(guide, params=params, num_samples=draws)
        latents = predictive(jax.random.key(0), None, None, 1)
        sites = log_likelihood(model, latents, records.codes, records.counts)
        return sites["x"] + sites["y"]

    return lambda params: float(log_predictive_density(np.asarray(densities(params))).mean())


def coefficients_of(params, width):
    """Location and scale of the coefficients, which are the last latent of the model."""
    return tuple(np.asarray(params[k], float)[..., -width:] for k in ("auto_loc", "auto_scale"))


def coefficient_optimum(x, counts):
    """Mean-field optimum of w, exact: for a normal q the expected likelihood has a closed form."""
    x, width = x.astype(float), x.shape[1]
    total = x.T @ counts

    def negative(point):
        loc, scale = point[:width], np.exp(point[width:])
        rate = np.exp(x @ loc + 0.5 * np.square(x) @ np.square(scale))
        value = rate.sum() - total @ loc + 0.5 * (loc @ loc + scale @ scale) - point[width:].sum()
        slope = np.square(scale) * (np.square(x).T @ rate + 1) - 1
        return value, np.concatenate([x.T @ rate - total + loc, slope])

    start = np.concatenate([np.zeros(width), np.full(width, -3.0)])
    found = minimize(negative, start, jac=True, method="BFGS", options={"gtol": 1e-4}).x
    return found[:width], np.exp(found[width:])


def poisson_regression(x, counts, ridge=1e-2):
    """Maximum likelihood by damped Newton steps: estimates and their variances.

    The ridge moves no coefficient of the data here by more than 0.001; it keeps a coefficient
    finite whose level a synthetic set does not have.
    """
    x, beta = x.astype(float), np.zeros(x.shape[1])
    beta[0] = np.log(counts.mean() + 1e-3)

    def value(beta):
        odds = np.minimum(x @ beta, 50)
        return np.exp(odds).sum() - counts @ odds + 0.5 * ridge * beta @ beta

    now = value(beta)
    for _ in range(100):
        rate = np.exp(np.minimum(x @ beta, 50))
        gradient = x.T @ (rate - counts) + ridge * beta
        information = (x * rate[:, None]).T @ x + ridge * np.eye(len(beta))
        step = np.linalg.solve(information, gradient)
        size = 1.0
        while (new := value(beta - size * step)) > now and size > 1e-6:
            size /= 2
        beta, now = beta - size * step, min(new, now)
        if gradient @ step < 1e-8:
            break
    return beta, np.diag(np.linalg.inv(information))


def two_way_distance(codes, others, levels):
    """Mean total variation distance of the tables of all pairs of categories."""
    distances = []
    for i, j in itertools.combinations(range(len(levels)), 2):
        tables = [
            np.bincount(c[:, i] * levels[j] + c[:, j], minlength=levels[i] * levels[j]) / len(c)
            for c in (codes, others)
        ]
        distances.append(0.5 * np.abs(tables[0] - tables[1]).sum())
    return float(np.mean(distances))
