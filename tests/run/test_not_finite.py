"""What a record that is not finite adds to a sum."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import optax
import pytest
from flat import dpsvi
from models import given, logistic, slopes
from numpyro.infer.autoguide import AutoDelta

from numpyro_dp.methods.normal import Cavity
from numpyro_dp.methods.pbp.model import RegressionNetwork
from numpyro_dp.methods.pbp.network_moments import record_slopes
from numpyro_dp.methods.pbp.network_sites import NetworkCavity, network_site

KEY = jax.random.key(0)
X = np.random.default_rng(0).normal(size=(8, 2)).astype(np.float32)
Y = np.array([0, 1, 1, 0, 1, 0, 1, 1], np.float32)

model = logistic("rows")

# Its outcomes have no support that could be checked.
linear = given(lambda x, w: dist.Normal(x @ w, 1.0), "rows", w=slopes())


def total(x, y, model=model):
    """The noise-free sum of centred scores in one step, at weights where all are clipped."""
    svi = dpsvi(model, AutoDelta, optax.sgd(1.0), estimator=None, clip_norm=0.1,
                noise_multiplier=0.0, secret_key=4, repetition=True)  # fmt: skip
    start = {"w_auto_loc": jnp.array([0.4, -0.3])}
    return svi.run(KEY, 1, x, y, init_params=start, progress_bar=False).params["w_auto_loc"]


@pytest.mark.full
@pytest.mark.table
@pytest.mark.parametrize("model", [linear, model])
def test_a_record_without_an_outcome_adds_no_other_outcome(model):
    kept = np.arange(8) != 3
    with_it = total(X, np.where(kept, Y, np.nan), model)
    without = total(np.where(kept[:, None], X, np.nan), Y, model)
    np.testing.assert_allclose(with_it, without, rtol=1e-4)


@pytest.mark.full
def test_the_noise_of_a_network_is_half_a_squared_residual():
    layout = RegressionNetwork((3,)).layout(2)
    size = sum(layout.sizes)
    mean = jnp.asarray(np.random.default_rng(1).normal(size=size), jnp.float32)
    cavity = NetworkCavity(Cavity(mean, jnp.full(size, 1e-8)), jnp.asarray(0.1))
    x = jnp.array([0.3, -0.2])
    output = record_slopes(layout, *cavity.weights, cavity.noise, x, jnp.zeros(())).output
    site = network_site(layout, cavity, x, output + 2.0)
    assert float(site["rate"]) == pytest.approx(2.0, rel=1e-3)
