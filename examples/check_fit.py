"""How often do people see a doctor? A private choice of a model of counts, and a check of each.

A row is one person's year, and the guarantee protects a year. --quick takes a quarter of the rows.
"""

import sys
import warnings

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
from statsmodels.datasets import randhie

from numpyro_dp import PrivacyBudget, check, fit, select

SCALES = dict(lncoins=2, idp=1, lpi=5, fmde=5, physlm=1, disea=10, hlthg=1, hlthf=1, hlthp=1)


def poisson(X, y=None):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("years", X.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(X @ w)), obs=y)


def negative_binomial(X, y=None):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    shape = numpyro.sample("shape", dist.Exponential(1.0))
    with numpyro.plate("years", X.shape[0]):
        numpyro.sample("y", dist.NegativeBinomial2(jnp.exp(X @ w), shape), obs=y)


rows = randhie.load_pandas().data[:: 4 if "--quick" in sys.argv else 1]
X = np.column_stack([np.ones(len(rows)), rows[list(SCALES)] / list(SCALES.values())])
X, y = X.astype("float32"), rows.mdvis.to_numpy().astype(int)
figure, axes = plt.subplots(2, 2, figsize=(9, 6), layout="constrained")
for row, model in zip(axes, (poisson, negative_binomial), strict=True):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the Poisson model does not fit
        posterior = fit(model, X, y, epsilon=1.0, rng_key=jax.random.key(0))
    budget = PrivacyBudget(0.3, posterior.privacy.delta)
    found = check(posterior, X, y, budget=budget, rng_key=jax.random.key(1))
    print(model.__name__, found, sep="\n")
    for ax in found.plot(row):
        ax.set_title(model.__name__.replace("_", " "))
figure.savefig("check_fit.png", dpi=200)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    budget = PrivacyBudget(1.0, posterior.privacy.delta)
    print(select([poisson, negative_binomial], X, y, budget=budget, rng_key=jax.random.key(2)))
