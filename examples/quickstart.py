"""Who sees a doctor? A private posterior in one call, next to NUTS without privacy.

A row is one person's year, and the guarantee protects a year. --quick takes a quarter of the rows.
"""

import sys

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS
from statsmodels.datasets import randhie

from numpyro_dp import fit, plots

SCALES = dict(lncoins=2, idp=1, lpi=5, fmde=5, physlm=1, disea=10, hlthg=1, hlthf=1, hlthp=1)


def model(X, y=None):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("years", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)


rows = randhie.load_pandas().data[:: 4 if "--quick" in sys.argv else 1]
X = np.column_stack([np.ones(len(rows)), rows[list(SCALES)] / list(SCALES.values())])
X, y = X.astype("float32"), rows.mdvis.to_numpy() > 0
print(posterior := fit(model, X, y, epsilon=1.0, rng_key=jax.random.key(0)))
mcmc = MCMC(NUTS(model), num_warmup=500, num_samples=1000, progress_bar=False)
mcmc.run(jax.random.key(1), X, y)
names = ["intercept", *(f"{name} / {scale}" for name, scale in SCALES.items())]
axes = plots.forest({"private, ε = 1": posterior, "NUTS": mcmc}, "w", labels=names)
axes.set_xlabel(f"log odds of a visit: mean, 90 % interval ({len(y):,} rows)")
axes.figure.savefig("quickstart.png", dpi=200, bbox_inches="tight")
