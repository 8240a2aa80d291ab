"""Rows or persons? One model with a guarantee for a person's year, and with one for a person.

The RAND Health Insurance Experiment followed families for three or five years, so a person has up
to five rows. A guarantee for one row says little to a person whose other rows are in the data too.
With `unit=` all rows of a person are one record. Rows of a person are alike, which the model does
not say: the warning that would come is printed as a diagnosis. --quick takes a quarter of the rows.
"""

import pathlib
import sys
import warnings

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
from statsmodels.datasets import randhie

from numpyro_dp import design, fit
from numpyro_dp.posterior import PosteriorWarning

RANGES = {"linc": (0, 12), "coins": (0, 100), "xage": (0, 65), "disea": (0, 60), "female": [0, 1]}


def model(X, y=None):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("years", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)


# The file from which statsmodels made its table names the person of each row.
source = pathlib.Path(randhie.__file__).parent / "src" / "randhie.csv"
rows = pd.read_csv(source, usecols=["zper", "mdvis", *RANGES]).dropna()
if "--quick" in sys.argv:
    rows = rows[rows.zper % 4 == 0]
X, names = design(rows, RANGES)
y, key = (rows.mdvis > 0).astype(int), jax.random.key(0)
warnings.simplefilter("ignore", PosteriorWarning)
posteriors = {
    "row": fit(model, X, y, epsilon=1.0, rng_key=key),
    "person": fit(model, X, y, epsilon=1.0, rng_key=key, unit=rows.zper, max_rows_per_unit=5),
}
for unit, posterior in posteriors.items():
    print(f"A record is a {unit}: one of {posterior.privacy.plan.num_examples}.")
    draws = posterior.sample(jax.random.key(1), 4000)["w"]
    for name, values in zip(names, np.asarray(draws).T, strict=True):
        low, high = np.quantile(values, [0.05, 0.95])
        print(f"  {name:10} {values.mean():6.2f}   90 % interval {low:6.2f} to {high:6.2f}")
    print(posterior.diagnose(), "\n")
