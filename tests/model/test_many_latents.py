"""No driver refuses this package's own tables, or NumPyro's, for a model with many latents.

Sizes are those at which a table would look like records: as many latents as records, and a number
of entries of a triangle that is a multiple of the number of records.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from flat import dpmcmc, dpsep, dpsvi, grouped
from models import given, of, slopes
from numpyro.infer.autoguide import (
    AutoDiagonalNormal,
    AutoIAFNormal,
    AutoLowRankMultivariateNormal,
    AutoMultivariateNormal,
    AutoNormal,
)
from numpyro.infer.initialization import init_to_feasible

from numpyro_dp import DPEM, DPPBP, SGLD, RegressionNetwork
from numpyro_dp.estimators import aligned, aligned_natural, natural, preconditioned, vanilla
from numpyro_dp.mechanisms import AdaptiveClip, LossRelease
from numpyro_dp.methods.ep.families import diagonal_normal, dirichlet, normal
from numpyro_dp.methods.ep.sites import importance
from numpyro_dp.samplers import FullBatch

KEY = jax.random.key(0)
RNG = np.random.default_rng(0)
SQUARE = RNG.normal(size=(60, 60)).astype(np.float32)
WIDE = RNG.normal(size=(100, 200)).astype(np.float32)
PRIVATE = {"clip_norm": 1.0, "sampler": FullBatch(), "noise_multiplier": 1.0}
NAMED = {"data_plate": "records"}  # a square matrix has two axes of the number of records
GAUSSIAN = AutoNormal, AutoDiagonalNormal, AutoMultivariateNormal
ANY = *GAUSSIAN, AutoLowRankMultivariateNormal, AutoIAFNormal
FITS = {
    vanilla: ANY, aligned: ANY,
    preconditioned: GAUSSIAN, natural: GAUSSIAN, aligned_natural: GAUSSIAN,
}  # fmt: skip


def labels(x: np.ndarray) -> np.ndarray:
    return (x[:, 0] > 0).astype(np.int32)


logistic = given(lambda x, w: dist.Bernoulli(logits=x @ w), w=slopes())


def begin(x: np.ndarray, guide: Any, estimator: Any, **options: Any) -> None:
    """Goes as far as all checks."""
    svi = dpsvi(logistic, guide, optax.adam(0.1), estimator=estimator, **NAMED, **options)
    svi.init(KEY, x, labels(x))


@pytest.mark.full
@pytest.mark.parametrize(
    ("estimator", "guide"),
    [pytest.param(e, g, id=f"{e.__name__}, {g.__name__}") for e in FITS for g in FITS[e]],
)
def test_every_estimator_takes_as_many_latents_as_records(estimator: Any, guide: Any) -> None:
    begin(SQUARE, guide, estimator())
    if guide is AutoMultivariateNormal:  # a triangle of 20,100 entries, 201 for each of 100 records
        begin(WIDE, guide, estimator())


@pytest.mark.extended
def test_other_mechanisms_take_as_many_latents_as_records() -> None:
    begin(SQUARE, AutoMultivariateNormal, natural(), clip_norm=AdaptiveClip(1.0))
    begin(SQUARE, AutoMultivariateNormal, natural(), loss_release=LossRelease(2.0))


def correlated(x):
    size = x.shape[1]
    chol = numpyro.sample("chol", dist.LKJCholesky(size, 1.0))
    with numpyro.plate("records", x.shape[0]):
        numpyro.sample("x", dist.MultivariateNormal(jnp.zeros(size), scale_tril=chol), obs=x)


shares = of(dist.Categorical, probs=lambda x: dist.Dirichlet(jnp.ones(60)))


def sep(model: Any, *args: Any, **options: Any) -> None:
    dpsep(model, **options, **NAMED).init(KEY, *args)


def network(**options: Any) -> None:
    DPPBP(RegressionNetwork((50,)), **grouped(**options, **PRIVATE)).init(KEY, SQUARE, SQUARE[:, 0])


DRIVERS: dict[str, Callable[[], Any]] = {
    "DPEM": lambda: DPEM(3, **grouped(**PRIVATE)).init(KEY, SQUARE),
    "DPEM, 200 columns": lambda: DPEM(3, **grouped(**PRIVATE)).init(KEY, WIDE),
    "DPPBP": network,
    "DPPBP by curvature": lambda: network(ridge=1.0, step_size=0.1),
    "DPSEP": lambda: sep(logistic, SQUARE, labels(SQUARE), family=normal),
    "DPSEP, diagonal": lambda: sep(logistic, SQUARE, labels(SQUARE), family=diagonal_normal),
    "DPSEP, draws": lambda: sep(logistic, SQUARE, labels(SQUARE), family=normal, site=importance()),
    "DPSEP, Dirichlet": lambda: sep(shares, labels(SQUARE), family={"probs": dirichlet(60)}),
    "DPMCMC": lambda: dpmcmc(
        SGLD(logistic, step_size=1e-3), num_warmup=0, num_samples=1, **NAMED
    ).run(KEY, SQUARE, labels(SQUARE)),
    "a triangle of NumPyro": lambda: dpsvi(
        correlated,
        AutoDiagonalNormal(correlated, init_loc_fn=init_to_feasible),
        optax.adam(0.1),
        estimator=None,
        **NAMED,
    ).init(KEY, SQUARE),
}


@pytest.mark.full
@pytest.mark.parametrize("name", DRIVERS)
def test_every_driver_takes_many_latents(name: str) -> None:
    DRIVERS[name]()
