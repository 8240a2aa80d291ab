"""Who sees a doctor? A private logistic regression in one call, next to NUTS without privacy.

The data are the RAND Health Insurance Experiment, which statsmodels ships: 20,190 rows, each one
person's year. A record is one row, so the guarantee protects a year, not a person: the table does
not say which rows belong to one person. Columns are divided by constants that follow from their
definitions and not from the records.

    python examples/quickstart.py                 # a table, and quickstart.png
    python examples/quickstart.py --quick         # 5,000 rows and fewer draws of NUTS
"""

import argparse

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


def draw(draws, title, path):
    fig, ax = plt.subplots(figsize=(6, 4.5), layout="constrained")
    place = -np.arange(len(SCALES) + 1)
    for shift, (label, sites) in zip((0.15, -0.15), draws.items(), strict=True):
        low, middle, high = np.quantile(sites["w"], [0.05, 0.5, 0.95], axis=0)
        ax.errorbar(middle, place + shift, xerr=[middle - low, high - middle], fmt="o", label=label)
    names = [f"{name} / {scale}" if scale > 1 else name for name, scale in SCALES.items()]
    ax.set(yticks=place, yticklabels=["intercept", *names], ylabel="column of X", title=title)
    ax.set_xlabel("coefficient w in log odds of a visit: median and 90 % interval")
    fig.legend(loc="outside lower center", ncols=2)
    fig.savefig(path, dpi=200)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epsilon", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0, help="seed of the draws, not of the noise")
    parser.add_argument("--out", default="quickstart.png", help="where the picture goes")
    parser.add_argument("--quick", action="store_true", help="5,000 rows and fewer draws of NUTS")
    args = parser.parse_args()
    size, warmup, kept = (5000, 200, 300) if args.quick else (20190, 500, 1000)
    fit_key, draw_key, nuts_key = jax.random.split(jax.random.key(args.seed), 3)
    rows = randhie.load_pandas().data.sample(size, random_state=0)
    columns = [np.ones(size), *(rows[name] / scale for name, scale in SCALES.items())]
    X, y = np.stack(columns, axis=1, dtype=np.float32), rows.mdvis.to_numpy() > 0
    posterior = fit(model, X, y, epsilon=args.epsilon, rng_key=fit_key)
    print(posterior)
    mcmc = MCMC(NUTS(model), num_warmup=warmup, num_samples=kept, progress_bar=False)
    mcmc.run(nuts_key, X, y)
    spent = f"{size:,} rows, ε = {args.epsilon:g}, δ = {posterior.privacy.bound.delta:.2g}"
    draws = {"private": posterior.sample(draw_key, 4000), "NUTS, not private": mcmc.get_samples()}
    draw(draws, f"{spent}, seed {args.seed}", args.out)


if __name__ == "__main__":
    main()
