"""Private runs start with wide draws, and only they do."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import optax
import pytest
from flat import dpsvi
from models import given
from numpyro.infer.autoguide import AutoDiagonalNormal, AutoMultivariateNormal, AutoNormal

X = np.ones((20, 2), np.float32)
GIVEN = np.array([0.7, 0.8], np.float32)

model = given(
    lambda x, a, b: dist.Bernoulli(logits=x @ jnp.stack([a, b])),
    a=dist.Normal(0, 0.1), b=dist.Normal(0, 10.0),
)  # fmt: skip


@pytest.mark.full
@pytest.mark.every_case
@pytest.mark.parametrize(("guide", "settings", "init_params", "widths"), [
    # Half a standard deviation of the prior, and at most half a unit.
    (AutoDiagonalNormal(model), {}, None, [0.05, 0.5]),
    (AutoMultivariateNormal(model), {}, None, [0.05, 0.5]),
    (AutoNormal(model), {}, None, [0.05, 0.5]),
    (AutoDiagonalNormal(model), {"init_scale": 0.2}, None, [0.02, 0.2]),
    # What a user gives is kept.
    (AutoDiagonalNormal(model), {"noise_multiplier": 0.0}, None, [0.1, 0.1]),
    (AutoDiagonalNormal(model), {"init_scale": None}, None, [0.1, 0.1]),
    (AutoDiagonalNormal(model, init_scale=0.3), {}, None, [0.3, 0.3]),
    (AutoDiagonalNormal(model), {}, {"auto_scale": GIVEN}, GIVEN),
])  # fmt: skip
def test_first_widths(guide, settings, init_params, widths):
    svi = dpsvi(model, guide, optax.adam(0.01), **settings)
    state = svi.init(jax.random.key(0), X, np.zeros(20, int), init_params=init_params)
    found = svi.get_params(state)
    if isinstance(guide, AutoNormal):
        found = [found["a_auto_scale"], found["b_auto_scale"]]
    else:
        found = found.get("auto_scale", np.diag(found.get("auto_scale_tril", np.eye(2))))
    np.testing.assert_allclose(found, widths, rtol=1e-3 if widths[0] < 0.06 else 1e-5)
