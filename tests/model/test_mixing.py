"""A model whose likelihood depends on how many records it sees is refused."""

import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_dp import DPLaplace, PrivacyBudget, UnsupportedModelError


def test_a_likelihood_scaled_by_the_number_of_records():
    def model(x):
        mean = numpyro.sample("mean", dist.Normal(0, 1))
        with numpyro.plate("rows", len(x)), numpyro.handlers.scale(scale=1 / len(x)):
            numpyro.sample("x", dist.Normal(mean, 1), obs=x)

    with pytest.raises(UnsupportedModelError, match="depends on the number of records"):
        DPLaplace(model, budget=PrivacyBudget(1.0, 1e-5)).plan(jnp.ones(50))
