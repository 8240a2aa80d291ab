"""A public keyword of the constructor cannot be given to a call too."""

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from flat import grouped
from numpyro.infer.autoguide import AutoNormal

from numpyro_dp import DPMCMC, DPSEP, DPSVI, SGLD, DPLaplace, PrivacyBudget
from numpyro_dp.samplers import FullBatch


def model(x, scale=1.0):
    mean = numpyro.sample("mean", dist.Normal(0, scale))
    with numpyro.plate("records", x.shape[0]):
        numpyro.sample("x", dist.Normal(mean, 1.0), obs=x)


BUDGET = PrivacyBudget(1.0, 1e-3)
SHARED = {"clip_norm": 1.0, "sampler": FullBatch(), "budget": BUDGET, "scale": 2.0}
DRIVERS = {
    "DPSVI": (lambda: DPSVI(model, AutoNormal(model), optax.adam(0.1), **grouped(**SHARED)), (3,)),
    "DPSEP": (lambda: DPSEP(model, **grouped(**SHARED)), (3,)),
    "DPMCMC": (lambda: DPMCMC(SGLD(model), **grouped(num_warmup=1, num_samples=2, **SHARED)), ()),
    "DPLaplace": (lambda: DPLaplace(model, budget=BUDGET, scale=2.0), ()),
}


@pytest.mark.every_case
@pytest.mark.parametrize("name", DRIVERS)
def test_a_static_keyword_is_given_once(name):
    make, steps = DRIVERS[name]
    with pytest.raises(TypeError, match="'scale'.*given twice"):
        make().run(jax.random.key(0), *steps, jnp.ones(50), scale=3.0)
