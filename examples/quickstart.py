"""Who sees a doctor? A private posterior in one call, next to NUTS without privacy.

A row is one person's year, and the guarantee protects a year. --quick takes a quarter of the rows.
"""

import sys

import jax
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS
from statsmodels.datasets import randhie

from numpyro_dp import fit

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
draws = {"private": posterior.sample(jax.random.key(2), 4000), "NUTS": mcmc.get_samples()}
for shift, (label, sites) in zip((0.15, -0.15), draws.items(), strict=True):
    low, mid, high = np.quantile(sites["w"], [0.05, 0.5, 0.95], axis=0)
    plt.errorbar(mid, shift - np.arange(10), xerr=[mid - low, high - mid], fmt="o", label=label)
plt.yticks(-np.arange(10), ["intercept", *(f"{name} / {s}" for name, s in SCALES.items())])
plt.xlabel(f"log odds of a visit: median, 90 % interval ({len(y):,} rows, ε = 1)")
plt.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=2)
plt.savefig("quickstart.png", dpi=150, bbox_inches="tight")
