"""Clip norms from simulated records: the right scale, from no value of an observed argument."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.infer.autoguide import AutoDiagonalNormal

from numpyro_dp import DPSVI, PrivacyBudget, UnsupportedModelError
from numpyro_dp.estimators import aligned, vanilla
from numpyro_dp.mechanisms import simulated_clip_norm
from numpyro_dp.samplers import FullBatch, Poisson

KEY = jax.random.key(0)
SIGMA = 3.0


def gaussian(x, sigma):
    mean = numpyro.sample("mean", dist.Normal(0, 5))
    with numpyro.plate("records", x.shape[0]):
        numpyro.sample("x", dist.Normal(mean, sigma), obs=x)


def two_sites(data, *, keep):
    w = numpyro.sample("w", dist.Normal(0, 0.5).expand([2]).to_event(1))
    with numpyro.plate("records", keep.shape[0]):
        logits = data["x"] @ w
        numpyro.sample("keep", dist.Bernoulli(logits=logits), obs=keep)
        numpyro.sample("y", dist.Normal(logits, 1), obs=jnp.asarray(data["y"]))


def driver(model=gaussian, **options):
    settings = {"estimator": aligned(), "clip_norm": 7.0, "sampler": FullBatch(),
                "noise_multiplier": 1.0} | options  # fmt: skip
    return DPSVI(model, AutoDiagonalNormal(model), optax.adam(0.1), **settings)


def norm(model=gaussian, *args, key=KEY, steps=150, quantile=0.5, svi=None, **kwargs):
    svi = svi or driver(model, sigma=SIGMA)
    return simulated_clip_norm(
        svi, key, steps, *(args or (np.zeros(500),)), quantile=quantile, num_sets=3, **kwargs
    )


@pytest.mark.full
def test_the_scale_of_a_gaussian_mean():
    """At the posterior the norms are |x - mean| / sigma^2, half-normal with scale 1 / sigma."""
    assert norm(quantile=0.9) == pytest.approx(1.6449 / SIGMA, rel=0.1)


@pytest.mark.extended
def test_it_follows_from_the_key_and_reads_no_observed_value():
    svi = driver(sigma=SIGMA, sampler=Poisson(0.5), estimator=vanilla(), noise_multiplier=None,
                 budget=PrivacyBudget(1.0, 1e-5))  # fmt: skip
    first = norm(svi=svi, steps=20)
    again = norm(gaussian, np.full(500, np.nan), svi=svi, steps=20)
    assert type(first) is float and first == again
    assert svi.settings.clip_norm.given == 7.0 and svi._sessions == {}


@pytest.mark.extended
def test_covariates_and_several_observed_sites_of_any_dtype():
    x = np.random.default_rng(0).normal(size=(80, 2))
    keep, y = np.ones(80, bool), np.zeros(80, np.float64)
    assert 0.1 < norm(two_sites, {"x": x, "y": y}, keep=keep, svi=driver(two_sites), steps=10) < 10
    with pytest.raises(ValueError, match=r"finite norms > 0.*got 0\.0.*AdaptiveClip"):
        norm(two_sites, {"x": 0 * x, "y": y}, keep=keep, svi=driver(two_sites), steps=2)


def half_observed(x, y):
    mean = numpyro.sample("mean", dist.Normal(0, 5))
    with numpyro.plate("records", x.shape[0]):
        numpyro.sample("y", dist.Normal(mean, 1), obs=y - x)


def factor(x):
    mean = numpyro.sample("mean", dist.Normal(0, 5))
    with numpyro.plate("records", x.shape[0]):
        numpyro.factor("f", -((x - mean) ** 2))


def twice(x):
    mean = numpyro.sample("mean", dist.Normal(0, 5))
    with numpyro.plate("records", x.shape[0]):
        numpyro.sample("first", dist.Normal(mean, 1), obs=x)
        numpyro.sample("second", dist.Normal(mean, 2), obs=x)


def improper(x):
    real = dist.constraints.real
    mean = numpyro.sample("mean", dist.ImproperUniform(real, (), ()))
    with numpyro.plate("records", x.shape[0]):
        numpyro.sample("x", dist.Normal(mean, 1), obs=x)


ZEROS = jnp.zeros(50)


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: norm(half_observed, ZEROS, ZEROS, svi=driver(half_observed)),
         UnsupportedModelError, r"site 'y' to be an argument.*obs=y.*AdaptiveClip"),
        (lambda: norm(factor, ZEROS, svi=driver(factor)),
         UnsupportedModelError, r"site 'f' to be an argument.*AdaptiveClip"),
        (lambda: norm(twice, ZEROS, svi=driver(twice)),
         UnsupportedModelError, r"'second'.* no other site"),
        (lambda: norm(improper, ZEROS, svi=driver(improper)),
         UnsupportedModelError, r"drawn from.*proper prior.*AdaptiveClip"),
        (lambda: norm(svi=gaussian), TypeError, r"DPSVI, got function.*clip_norm=1.0"),
        (lambda: norm(quantile=1.0), ValueError, r"\(0, 1\), got quantile=1.0"),
        (lambda: norm(steps=0), ValueError, "num_steps=0"),
        (lambda: norm(num_draws=0), ValueError, "num_draws=0"),
        (lambda: norm(key=0), TypeError, "rng_key"),
    ],
)  # fmt: skip
def test_what_cannot_be_simulated_is_named_with_a_remedy(call, error, match):
    with pytest.raises(error, match=match):
        call()
