"""The private choice of a model: halves, bounds, what it finds, costs and refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from scipy.special import logsumexp
from scipy.stats import norm

from numpyro_dp import Ledger, Privacy, PrivacyBudget, UnsupportedModelError, select
from numpyro_dp.laplace import select as selecting
from numpyro_dp.laplace.select import _HALVES, _classes, _halves, _longest, _moments
from numpyro_dp.privacy.keys import as_secret_key, keys_of_run

N, KEY = 2000, jax.random.key(1)
QUIET = PrivacyBudget(1e4, 1e-3)


def small(x, y=None):
    w = numpyro.sample("w", dist.Normal(0, 1))
    with numpyro.plate("people", x.shape[0]):
        numpyro.sample("y", dist.Normal(w * x[:, 0], 1.0), obs=y)


def large(x, y=None):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
    with numpyro.plate("people", x.shape[0]):
        numpyro.sample("y", dist.Normal(x @ w, 1.0), obs=y)


def halves_of(records, secret):
    """The halves of a call with this secret key."""
    structure = Privacy().given_model(large, {}).structure(records, {})
    key = jax.random.fold_in(keys_of_run(as_secret_key(secret), ())[0], _HALVES)
    return [args for args, _ in _halves(structure, records, {}, key)]


@pytest.fixture(scope="module")
def records():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(N, 2)).astype("f4")
    return x, (x @ [0.5, 0.2] + rng.normal(size=N)).astype("f4")


@pytest.mark.parametrize("size", [2, 3, 4, 7])
def test_a_record_adds_at_most_1(size):
    rng, longest = np.random.default_rng(size), 0.0
    for _ in range(300):
        regrets = rng.exponential(size=size) * 10.0 ** rng.integers(-3, 4)
        if rng.random() < 0.5:  # some very bad models
            regrets = np.where(rng.random(size) < 0.5, np.inf, regrets)
        regrets = jnp.asarray(regrets - np.min(regrets[np.isfinite(regrets)], initial=0))
        regrets = regrets.at[rng.integers(size)].set(0.0)
        entries = _moments(regrets, jnp.float32(2.0))
        length = np.sqrt(sum(np.sum(np.square(x)) for x in entries.values()))
        assert np.isfinite(length) and length <= 1 + 1e-5
        longest = max(longest, length)
        assert float(np.linalg.norm(_classes(regrets)["counts"])) == 1.0
    assert longest > 0.99
    assert _longest(size) == pytest.approx(np.sqrt(size // 2 * (size - size // 2) / size))


def test_halves_keep_units_together_whoever_else_is_there():
    layout = Privacy(max_rows_per_unit=3).given_model(large, {})
    ids = np.repeat(np.arange(300), 3)
    x, y = np.random.default_rng(0).normal(size=(900, 2)), np.zeros(900)

    def units(rows):
        structure = layout.structure((x[rows], y[rows]), {"unit": ids[rows]})
        halves = _halves(structure, (x[rows], y[rows]), {"unit": ids[rows]}, KEY)
        return [set(kwargs["unit"].tolist()) for _, kwargs in halves]

    one, other = units(np.arange(900))
    assert not one & other and one | other == set(range(300))
    assert 100 < len(one) < 200
    fewer = units(np.flatnonzero(ids != 7))
    assert fewer == [one - {7}, other - {7}]


@pytest.mark.full
def test_scores_are_those_of_the_held_out_half(records):
    x, y = records
    found = select(
        {"large": large, "small": small}, x, y, budget=QUIET, rng_key=KEY,
        privacy=Privacy(secret_key=5),
    )  # fmt: skip
    assert found.best == "large" and found.records == N // 2
    _, (x, y) = halves_of(records, 5)
    scores = {}
    for name, posterior in found.posteriors.items():
        w = np.asarray(posterior.sample(jax.random.key(7), 2000)["w"])
        centre = x @ w.T if name == "large" else x[:, :1] * w
        scores[name] = logsumexp(norm.logpdf(y[:, None], centre, 1.0), axis=1) - np.log(2000)
    lower = scores["small"] - scores["large"]
    assert np.max(np.abs(lower)) < found.clip
    assert found.scores["small"] == pytest.approx(lower.sum(), abs=0.3)
    assert found.errors["small"] == pytest.approx(np.sqrt(N / 2) * lower.std(), rel=0.05)
    assert "large  best" in str(found) and "may be as good" not in str(found)


@pytest.mark.full
def test_it_is_charged_once_and_each_half_spends_all(records, tmp_path, monkeypatch):
    ledger, noises = Ledger(tmp_path / "ledger", PrivacyBudget(2.0, 1e-4)), []
    for name in ("DPLaplace", "OneSum"):
        made = getattr(selecting, name)

        def watched(*args, made=made, **kwargs):
            driver = made(*args, **kwargs)
            noises.append(driver.settings.privacy.noise_multiplier)
            return driver

        monkeypatch.setattr(selecting, name, watched)
    bad = np.array(records[1])
    bad[: N // 3] = np.nan
    found = select(
        [small, large], records[0], bad, budget=ledger.budget(1.0, purpose="choice"), rng_key=KEY
    )
    (row,) = ledger.table()
    assert row["purpose"] == "choice" and 0.95 < row["epsilon"] <= 1.0
    assert found.privacy.epsilon <= 1.0 and found.privacy.in_ledger
    for half in (noises[:2], noises[2:]):
        together = sum(noise**-2 for noise in half) ** -0.5
        assert together == pytest.approx(found.privacy.noise_multiplier, rel=1e-5)
    assert all(each.privacy is found.privacy for each in found.posteriors.values())
    assert all(np.isfinite(list(found.scores.values())))


@pytest.mark.full
def test_persons_public_arguments_and_a_named_plate(records, tmp_path):
    def shifted(x, table, y=None):
        small(x, None if y is None else y - table[0])

    def other(x, table, y=None):
        large(x, None if y is None else y - table[0])

    ledger = Ledger(tmp_path / "ledger", PrivacyBudget(2.0, 1e-4))
    privacy = Privacy(public=["table"], data_plate="people", max_rows_per_unit=2, secret_key=1)
    found = select(
        [shifted, other], records[0], np.zeros(30, "f4"), records[1], unit=np.arange(N) // 2,
        budget=ledger.budget(1.0, purpose="choice"), rng_key=KEY, privacy=privacy,
    )  # fmt: skip
    assert found.best == "other" and 400 < found.records < 600
    assert found.privacy.max_rows == 2 and len(ledger.entries) == 1
    assert [each.place for each in found.privacy.public if "table" in each.place]


@pytest.mark.full
def test_a_held_out_record_does_not_touch_the_fits(records):
    _, (_, held) = halves_of((records[0], np.arange(N, dtype="f4")), 11)
    found = []
    for changed in (False, True):
        y = np.array(records[1])
        y[int(held[0])] = np.nan if changed else y[int(held[0])]
        found.append(
            select(
                [small, large], records[0], y, budget=PrivacyBudget(1.0, 1e-5), rng_key=KEY,
                privacy=Privacy(secret_key=11, repetition=True),
            )
        )  # fmt: skip
    one, other = found
    for name in one.posteriors:
        draws = [each.posteriors[name].sample(KEY, 5)["w"] for each in found]
        np.testing.assert_array_equal(*draws)
    assert one.scores != other.scores


def test_refusals_come_before_the_charge(records, tmp_path):
    ledger = Ledger(tmp_path / "ledger", PrivacyBudget(2.0, 1e-4))
    given = {"budget": ledger.budget(1.0, purpose="choice"), "rng_key": KEY}

    def local(x, y=None):
        with numpyro.plate("people", x.shape[0]):
            b = numpyro.sample("b", dist.Normal(0, 1))
            numpyro.sample("y", dist.Normal(b, 1.0), obs=y)

    def in_cents(x, y=None):
        small(x, None if y is None else 100 * y)

    with pytest.raises(ValueError, match="observes other values"):
        select([small, in_cents], *records, **given)
    with pytest.raises(ValueError, match="at least 100 records"):
        select([small, large], records[0][:99], records[1][:99], **given)
    with pytest.raises(TypeError, match="2 to 10 NumPyro models"):
        select({1: small, "1": large}, *records, **given)
    with pytest.raises(UnsupportedModelError):
        select([small, local], *records, **given)
    with pytest.raises(TypeError, match="2 to 10 NumPyro models"):
        select([small], *records, **given)
    with pytest.raises(TypeError, match="Expected budget"):
        select([small, large], *records, budget=1.0, rng_key=KEY)
    with pytest.raises(TypeError, match="noise_multiplier"):
        select([small, large], *records, **given, privacy=Privacy(noise_multiplier=1.0))
    assert not ledger.entries
