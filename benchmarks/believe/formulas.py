"""Are private coefficients of a formula those of statsmodels?

Each run fits a formula by ``regression`` at epsilon = 1, and compares with statsmodels on the same
records without privacy. Coverage is how often a private 95 % interval holds the exact estimate, and
width the median of its length over that of statsmodels. "lost" is the share of coefficients that
are significant without privacy and whose private interval has 0, and "wrong" counts private
intervals that exclude 0 with another sign. Data other than RAND HIE are read from NUMPYRO_DP_DATA.

    python benchmarks/believe/formulas.py --json formulas.json
"""

import pathlib
import sys
import warnings

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import jax
import numpy as np
import pandas as pd
import statsmodels.formula.api as smf
from common import experiment_parser, save
from datasets import _columns
from statsmodels.datasets import randhie

from numpyro_dp import regression

_YES = {"yes": 1.0, "no": 0.0, "Y": 1.0, "N": 0.0, "female": 1.0, "male": 0.0}


def frame_of(name):
    """The columns of a data set, as numbers where they are."""
    if name == "rand_hie":
        found = randhie.load_pandas().data
        return found.assign(any=(found.mdvis > 0).astype(int))
    found = {}
    for column, cells in _columns(name).items():
        try:
            found[column] = np.array([_YES.get(cell, cell) for cell in cells], float)
        except ValueError:
            found[column] = cells
    found = pd.DataFrame(found)
    if name == "rwm5yr":
        found = found.assign(any=(found.docvis > 0).astype(int))
    return found


# The ranges are those of the surveys, rounded. Of a category the first is the reference.
RAND = {
    "any": (0, 1), "mdvis": (0, 100), "lncoins": (0, 5), "idp": (0, 1), "lpi": (0, 8),
    "fmde": (0, 9), "physlm": (0, 1), "disea": (0, 60), "hlthg": (0, 1), "hlthf": (0, 1),
    "hlthp": (0, 1),
}  # fmt: skip
HEALTH = "lncoins + idp + lpi + fmde + physlm + disea + hlthg + hlthf + hlthp"
CELLS = [
    ("rand_hie", f"any ~ {HEALTH}", "bernoulli", RAND),
    ("rand_hie", f"mdvis ~ {HEALTH}", "negative binomial", RAND),
    ("contraception", "use ~ age + I(age**2) + urban + livch", "bernoulli", {
        "use": (0, 1), "age": (-15, 20), "urban": (0, 1), "livch": ["0", "1", "2", "3+"]}),
    ("rwm5yr", "any ~ age * female + outwork + married + kids + hhninc + educ", "bernoulli", {
        "any": (0, 1), "age": (25, 65), "female": (0, 1), "outwork": (0, 1), "married": (0, 1),
        "kids": (0, 1), "hhninc": (0, 20), "educ": (7, 18)}),
    ("doctor_visits", "visits ~ gender * age + income + illness + health", "negative binomial", {
        "visits": (0, 20), "gender": (0, 1), "age": (0.15, 0.75), "income": (0, 1.5),
        "illness": (0, 5), "health": (0, 12)}),
]  # fmt: skip


def exact_of(formula, frame, family):
    """Estimates and standard errors of statsmodels, with our names."""
    fit = smf.logit if family == "bernoulli" else smf.negativebinomial
    found = fit(formula, frame).fit(disp=0, maxiter=200)
    names = [
        name.replace("[T.", "=").replace("]", "").replace(" ", "") for name in found.params.index
    ]
    return {n: (p, s) for n, p, s in zip(names, found.params, found.bse, strict=True)}


def one(formula, frame, family, codebook, exact, seed):
    found = regression(
        formula, frame, codebook, family=family, epsilon=1.0, rng_key=jax.random.key(seed),
        progress_bar=False,
    )  # fmt: skip
    rows = []
    for row in found.table(prob=0.95):
        value, error = exact[row["term"].replace(" ", "")]
        low, high = row["lower"], row["upper"]
        sure = abs(value) > 1.96 * error
        rows.append({
            "coverage": low < value < high, "width": (high - low) / (2 * 1.96 * error),
            "significant": sure, "lost": sure and low < 0 < high,
            "wrong": (low > 0 or high < 0) and np.sign(low) != np.sign(value),
        })  # fmt: skip
    return rows, bool(found.posterior.diagnose().bad)


def main():
    parser = experiment_parser(__doc__, "RAND HIE, 1 run")
    parser.add_argument("--runs", type=int, default=10)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    table = []
    for name, formula, family, codebook in CELLS[:1] if args.quick else CELLS:
        frame = frame_of(name)
        exact = exact_of(formula, frame, family)
        runs = [one(formula, frame, family, codebook, exact, seed)
                for seed in range(1 if args.quick else args.runs)]  # fmt: skip
        rows = [row for of_run, _ in runs for row in of_run]
        of = {key: np.array([row[key] for row in rows], float) for key in rows[0]}
        table.append({
            "set": name, "formula": formula, "family": family, "N": len(frame),
            "coefficients": len(runs[0][0]), "runs": len(runs),
            "coverage": of["coverage"].mean(), "width": np.median(of["width"]),
            "lost": of["lost"].sum() / max(1, of["significant"].sum()),
            "wrong": int(of["wrong"].sum()), "warned": sum(bad for _, bad in runs),
        })  # fmt: skip
        print(table[-1], flush=True)
    save(args, rows=table)


if __name__ == "__main__":
    main()
