"""``regression``: intervals in the variables' units, the same fit as by hand, persons, effects."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_dp import DPLaplace, Ledger, Privacy, PrivacyBudget, regression
from numpyro_dp.formulas.outcome_families import FAMILIES

N = 3000
CODEBOOK = {
    "age": (18, 90), "sex": ["f", "m"], "region": list("abcd"), "visits": (0, 60), "ill": (0, 1),
    "time": (0, 60), "event": (0, 1), "grade": ["low", "mid", "high"], "cost": (0, 4000),
    "tries": (0, 12), "hits": (0, 12), "person": (0, N),
}  # fmt: skip
QUIET = {"budget": PrivacyBudget(200.0, 1e-4), "progress_bar": False}


@pytest.fixture(scope="module")
def frame():
    rng = np.random.default_rng(0)
    found = {"age": rng.uniform(20, 80, N), "sex": rng.choice(["f", "m"], N)}
    found["region"] = rng.choice(list("abcd"), N)
    male = found["sex"] == "m"
    eta = 0.02 * (found["age"] - 54) + 0.5 * male
    eta += np.array([{"a": -0.3, "b": 0.2, "c": 0.0, "d": 0.3}[r] for r in found["region"]])
    found["visits"] = rng.poisson(np.exp(eta))
    found["ill"] = rng.random(N) < 1 / (1 + np.exp(-eta))
    found["cost"] = 2000 + 400 * (eta + rng.normal(size=N))
    found["tries"] = rng.integers(4, 12, N)
    found["hits"] = rng.binomial(found["tries"], 1 / (1 + np.exp(-eta)))
    found["grade"] = np.array(["low", "mid", "high"])[
        np.searchsorted([-0.7, 0.8], eta + rng.logistic(size=N))
    ]
    time, until = 5 * np.exp(eta) * rng.weibull(1.5, N), rng.exponential(20, N)
    found["time"], found["event"] = np.minimum(time, until) + 1e-3, (time <= until).astype(int)
    return found


def test_coefficients_are_those_of_the_model_by_hand(frame):
    """With other names and units, and the same noise."""

    def model(X, y=None):
        first = numpyro.sample("first", dist.Normal(0, 2.5))
        w = [numpyro.sample(name, dist.Normal(0, 1)) for name in ("u", "v")]
        with numpyro.plate("records", X.shape[0]):
            rate = jnp.exp(first + w[0] * X[:, 0] + w[1] * X[:, 1])
            numpyro.sample("y", dist.Poisson(rate), obs=y)

    found = regression("visits ~ age + sex", frame, CODEBOOK, family="poisson", **QUIET)
    X = np.column_stack([(frame["age"] - 54) / 36, (frame["sex"] == "m") - 0.5])
    laplace = DPLaplace(model, budget=QUIET["budget"], privacy=Privacy())
    own = laplace.run(jax.random.key(0), X.astype("f4"), frame["visits"], progress_bar=False)
    summary = own.summary()
    rows = {row["term"]: row for row in found.table()}
    for term, name, unit in (("age", "u", 36), ("sex=m", "v", 1)):
        mean, sd = float(summary[name]["mean"]) / unit, float(summary[name]["sd"]) / unit
        assert rows[term]["estimate"] == pytest.approx(mean, abs=0.4 * sd)
        assert rows[term]["sd"] == pytest.approx(sd, rel=0.1)
    first, u, v = (float(summary[name]["mean"]) for name in ("first", "u", "v"))
    zero = first - 54 / 36 * u - v / 2
    assert rows["Intercept"]["estimate"] == pytest.approx(zero, abs=0.4 * rows["Intercept"]["sd"])
    text = str(found)
    assert "rate ratio" in text and "age" in text and "epsilon <= 19" in text
    assert rows["sex=m"]["rate ratio"] == pytest.approx(np.exp(rows["sex=m"]["estimate"]))
    effects = found.effects("age")
    np.testing.assert_allclose(
        effects["mean"],
        np.exp(rows["Intercept"]["estimate"] + rows["age"]["estimate"] * effects["value"]),
        rtol=0.02,
    )  # fmt: skip
    assert found.effects("sex")["value"].tolist() == ["f", "m"]
    new = {"age": np.array([54.0]), "sex": np.array(["m"])}
    drawn = found.predict(new, num_samples=4000)
    assert drawn.shape == (4000, 1)
    assert drawn.mean() == pytest.approx(found.effects("sex")["mean"][1], rel=0.05)


@pytest.mark.full
@pytest.mark.table
@pytest.mark.parametrize(("text", "family", "term", "truth"), [
    ("visits ~ age + sex + (1 | region)", "negative binomial", "age", 0.02),
    ("Surv(time, event) ~ age + sex + region", "weibull", "age", 0.02),
    ("ill ~ age + sex + region", "bernoulli", "age", 0.02),
    ("cbind(hits, tries) ~ age + sex + region", "binomial", "sex=m", 0.5),
    ("cost ~ age + sex + (1 | region)", "normal", "age", 8.0),
    ("cost ~ age + sex + region", "student", "sex=m", 200.0),
    ("grade ~ age + sex + region", "ordinal", "sex=m", 0.5),
])  # fmt: skip
def test_families_find_the_truth(text, family, term, truth, frame):
    found = regression(text, frame, CODEBOOK, family=family, **QUIET)
    (row,) = [row for row in found.table() if row["term"] == term]
    assert abs(row["estimate"] - truth) < 4 * row["sd"] < 1.3 * abs(truth)
    assert np.all(np.isfinite(found.effects("age")["mean"]))
    assert np.isfinite(found.predict(frame | {}, num_samples=2)).all()
    assert FAMILIES[family].link in str(found)
    terms = [row["term"] for row in found.table(groups=True)]
    assert ("(1 | region)" in text) == ("1|region=c" in terms)


@pytest.mark.full
def test_persons_and_a_ledger(frame, tmp_path):
    ledger = Ledger(tmp_path / "ledger", PrivacyBudget(3.0, 1e-5))
    rows = {name: values[:600] for name, values in frame.items()}
    rows["person"] = np.arange(600) // 3
    found = regression(
        "visits ~ age", rows, CODEBOOK, family="poisson", unit="person", max_rows_per_unit=3,
        budget=ledger.budget(1.0, purpose="visits"), progress_bar=False,
    )  # fmt: skip
    assert found.posterior.privacy.max_rows == 3 and len(ledger.entries) == 1
    assert found.posterior.privacy.plan.num_examples == 200
    assert "unit" in str(found.statement())
