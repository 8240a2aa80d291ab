"""The private posterior predictive check: its bound, what it shows, and what it refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from hostile_models import MODELS, hostile_records, ordinary_records, problem_of, with_numbers

import numpyro_dp
from numpyro_dp import Ledger, Privacy, PrivacyBudget, UnsupportedModelError, check
from numpyro_dp.laplace.check import _entries

N, KEY = 4000, jax.random.key(1)
LOUD, QUIET = PrivacyBudget(1.0, 1e-5), PrivacyBudget(200.0, 1e-5)
W = np.array([0.6, -0.4])


def counts(x, y=None):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
    with numpyro.plate("people", x.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(x @ w)), obs=y)


def shares(x, y=None):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
    with numpyro.plate("people", x.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=x @ w), obs=y)


@pytest.fixture(scope="module")
def columns():
    return np.random.default_rng(0).normal(size=(N, 2)).astype(np.float32)


def fitted(model, *args):
    return numpyro_dp.fit(model, *args, epsilon=3.0, rng_key=jax.random.key(0), progress_bar=False)


@pytest.fixture(scope="module")
def counted(columns):
    """A posterior of counts, and the counts."""
    y = np.random.default_rng(1).poisson(np.exp(columns @ W))
    return fitted(counts, columns, y), y


@pytest.mark.parametrize("name", ["bernoulli", "poisson", "linear"])
def test_a_record_adds_one_row_that_sums_to_1_or_nothing(name):
    model, kinds, _ = MODELS[name]
    problem = problem_of(model, ordinary_records(kinds, 20, 0))
    draws = 0.3 * jax.random.normal(KEY, (200, problem.outcomes.size))
    signal, public = _entries(problem.outcomes), (draws, jnp.linspace(-1, 1, 9))
    every = jax.jit(jax.vmap(lambda *row: signal(public, KEY, row)["table"]))
    for records, good in ((ordinary_records, True), (hostile_records, False)):
        tables = np.asarray(every(*with_numbers(problem, records(kinds, 40, 3))))
        assert np.all(tables >= 0) and np.all(np.isfinite(tables))
        rows, sums = np.sum(np.any(tables > 0, axis=2), axis=1), np.sum(tables, axis=(1, 2))
        assert np.all(rows <= 1)
        np.testing.assert_allclose(sums[rows == 1], 1, rtol=1e-5)
        assert good <= bool(np.all(rows == 1))


@pytest.mark.full
def test_residuals_of_two_outcomes_are_shares_minus_predictions(columns):
    rng = np.random.default_rng(1)
    y = (rng.random(N) < 1 / (1 + np.exp(-columns @ W - columns[:, 0] ** 2 + 1))).astype(int)
    posterior = fitted(shares, columns, y)
    found = check(posterior, columns, y, budget=QUIET, rng_key=KEY)
    latents = posterior.sample(jax.random.split(KEY, 3)[0], 200)
    predicted = np.mean(jax.nn.sigmoid(columns @ np.asarray(latents["w"]).T), axis=1)
    rows = np.searchsorted(found.edges, predicted)
    right = [np.mean(y[rows == row] - predicted[rows == row]) for row in range(10)]
    values, errors = found.residuals
    np.testing.assert_allclose(values, right, atol=0.01)
    assert values[0] > 3 * errors[0] and values[5] < -3 * errors[5]  # the missing square
    assert "residual by prediction" in str(found)


def test_ranks_are_even_in_a_right_model_and_not_with_too_little_spread(columns, counted):
    posterior, y = counted
    shares, errors = check(posterior, columns, y, budget=LOUD, rng_key=KEY).ranks
    assert np.sum(((shares - 0.1) / errors) ** 2) < 30
    residuals, errors = check(posterior, columns, y, budget=QUIET, rng_key=KEY).residuals
    assert np.nanmax(np.abs(residuals / errors)) < 4
    rng = np.random.default_rng(2)
    wide = rng.poisson(np.exp(columns @ W) * rng.gamma(1, 1, N))
    found = check(posterior, columns, wide, budget=LOUD, rng_key=KEY)
    shares, errors = found.ranks
    assert np.all(shares[[0, 9]] > 0.1 + 4 * errors[0]) and np.all(shares[4:8] < 0.1)
    pytest.importorskip("matplotlib").use("Agg")
    axes = found.plot()
    assert [ax.get_ylabel() for ax in axes] == ["share of records", "outcomes above prediction"]
    assert all(len(ax.containers) == 1 for ax in axes)


@pytest.mark.full
def test_the_ledger_is_charged_and_the_noise_is_as_stated(columns, counted, tmp_path):
    ledger = Ledger(tmp_path / "ledger", PrivacyBudget(10.0, 1e-4))
    tables, missing = [], np.full(N, np.nan, np.float32)  # adds 0, so the table is noise
    for seed in (1, 2):
        found = check(
            counted[0], columns, missing, budget=ledger.budget(1.0, purpose="check"),
            rng_key=KEY, privacy=Privacy(secret_key=seed),
        )  # fmt: skip
        tables.append(found.table)
    assert len(ledger.entries) == 2
    assert np.std(tables) == pytest.approx(found.noise, rel=0.2)


@pytest.mark.full
def test_several_outcomes_are_refused(columns):
    def two(x, y=None):
        w = numpyro.sample("w", dist.Normal(0, 1))
        with numpyro.plate("people", x.shape[0]):
            numpyro.sample("y", dist.Normal(w, 1.0).expand([2]).to_event(1), obs=y)

    with pytest.raises(UnsupportedModelError, match="several outcomes a record"):
        check(fitted(two, columns, columns), columns, columns, budget=LOUD, rng_key=KEY)


@pytest.mark.full
def test_sure_and_masked_outcomes(columns):
    """Outcomes that the posterior holds for impossible count, and masked ones do not."""

    def steep(x, seen, y=None):
        w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
        with numpyro.plate("people", x.shape[0]):
            numpyro.sample("y", dist.Bernoulli(logits=40 * x @ w).mask(seen), obs=y)

    y, seen = (columns[:, 0] > 0).astype(int), np.arange(N) % 2 == 0
    posterior = fitted(steep, columns, seen, y)
    found = check(posterior, columns, seen, 1 - y, budget=QUIET, rng_key=KEY)
    np.testing.assert_allclose(found.table.sum(), N / 2, rtol=0.02)
    assert np.all(np.abs(found.ranks[0][[0, 9]] - 0.25) < 0.06)
