"""Private runs start with wide draws, and only they do."""

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from flat import grouped
from numpyro.infer.autoguide import AutoDiagonalNormal, AutoMultivariateNormal, AutoNormal

from numpyro_dp import DPSVI
from numpyro_dp.samplers import FullBatch

X = np.ones((20, 2), np.float32)


def model(x, y=None):
    tight = numpyro.sample("a", dist.Normal(0, 0.1))
    wide = numpyro.sample("b", dist.Normal(0, 10.0))
    with numpyro.plate("records", x.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=x @ jax.numpy.stack([tight, wide])), obs=y)


def first(guide, init_params=None, noise=1.0, **settings):
    svi = DPSVI(
        model,
        guide,
        optax.adam(0.01),
        **grouped(clip_norm=1.0, sampler=FullBatch(), noise_multiplier=noise, **settings),
    )
    state = svi.init(jax.random.key(0), X, np.zeros(20, int), init_params=init_params)
    return svi.get_params(state)


@pytest.mark.full
@pytest.mark.table
@pytest.mark.parametrize(("kind", "read"), [
    (AutoDiagonalNormal, lambda p: p["auto_scale"]),
    (AutoMultivariateNormal, lambda p: np.diag(p["auto_scale_tril"])),
    (AutoNormal, lambda p: [p["a_auto_scale"], p["b_auto_scale"]]),
])  # fmt: skip
def test_widths_are_half_a_prior_sd_and_at_most_half_a_unit(kind, read):
    np.testing.assert_allclose(read(first(kind(model))), [0.05, 0.5], rtol=1e-3)
    np.testing.assert_allclose(read(first(kind(model), init_scale=0.2)), [0.02, 0.2], rtol=1e-3)


@pytest.mark.full
def test_what_a_user_gives_is_kept():
    keep = [0.1, 0.1]
    found = first(AutoDiagonalNormal(model), noise=0.0)["auto_scale"]
    np.testing.assert_allclose(found, keep, rtol=1e-5)
    found = first(AutoDiagonalNormal(model), init_scale=None)["auto_scale"]
    np.testing.assert_allclose(found, keep, rtol=1e-5)
    found = first(AutoDiagonalNormal(model, init_scale=0.3))["auto_scale"]
    np.testing.assert_allclose(found, [0.3, 0.3], rtol=1e-5)
    given = np.array([0.7, 0.8], np.float32)
    found = first(AutoDiagonalNormal(model), {"auto_scale": given})["auto_scale"]
    np.testing.assert_allclose(found, given, rtol=1e-5)
