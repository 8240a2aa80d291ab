"""Posterior draws."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer import Predictive
from numpyro.infer.autoguide import (
    AutoDelta,
    AutoDiagonalNormal,
    AutoGuideList,
    AutoIAFNormal,
    AutoMultivariateNormal,
    AutoNormal,
)

from numpyro_dp.posterior import posterior_samples

KEY = jax.random.key(0)
X = jnp.zeros((4, 2))


def model(x, y=None):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
    scale = numpyro.sample("scale", dist.HalfNormal(1))
    numpyro.deterministic("double", 2 * w)
    with numpyro.plate("records", x.shape[0]):
        numpyro.sample("y", dist.Normal(x @ w, scale), obs=y)


def set_up(guide):
    """Its initial parameters, as a run would have found them."""
    with numpyro.handlers.trace() as trace, numpyro.handlers.seed(rng_seed=0):
        guide(X, jnp.zeros(4))
    return {name: site["value"] for name, site in trace.items() if site["type"] == "param"}


def in_parts(model):
    guide = AutoGuideList(model)
    guide.append(AutoNormal(numpyro.handlers.block(model, hide=["scale", "double"])))
    guide.append(AutoNormal(numpyro.handlers.block(model, hide=["w", "double"])))
    return guide


@pytest.mark.full
@pytest.mark.parametrize(
    "build",
    [in_parts, AutoDelta, AutoDiagonalNormal, AutoIAFNormal, AutoMultivariateNormal, AutoNormal],
)
def test_draws_are_those_of_the_latent_sites_alone(build):
    guide = build(model)
    draws = posterior_samples(KEY, guide, set_up(guide), 4000)
    assert {name: value.shape for name, value in draws.items()} == {
        "w": (4000, 2), "scale": (4000,)
    }  # fmt: skip
    assert (draws["scale"] > 0).all()
    predict = Predictive(model, posterior_samples=draws)
    assert predict(KEY, X)["y"].shape == (4000, 4)
    if build is in_parts:  # AutoGuideList.sample_posterior gives all parts one key
        correlation = np.corrcoef(np.log(draws["scale"]), draws["w"][:, 0])[0, 1]
        assert abs(correlation) < 4 / np.sqrt(4000)


def test_draws_follow_the_parameters():
    guide = AutoDiagonalNormal(model)
    set_up(guide)
    params = {"auto_loc": jnp.array([3.0, -1.0, 0.0]), "auto_scale": jnp.array([0.1, 0.2, 0.5])}
    draws = posterior_samples(KEY, guide, params, 4000)
    np.testing.assert_allclose(draws["w"].mean(0), [3, -1], atol=0.015)
    np.testing.assert_allclose(jnp.log(draws["scale"]).std(), 0.5, rtol=0.05)


def test_hand_written_guides_take_their_arguments():
    def guide(x, y=None):
        loc = numpyro.param("loc", jnp.zeros(2))
        joint = numpyro.sample(
            "joint", dist.Normal(loc, 0.1).to_event(1), infer={"is_auxiliary": True}
        )
        numpyro.sample("w", dist.Delta(joint).to_event(1))
        numpyro.sample("scale", dist.LogNormal(0, 0.1))

    draws = posterior_samples(KEY, guide, {"loc": jnp.array([5.0, 6.0])}, 30, X)
    assert set(draws) == {"w", "scale"}
    np.testing.assert_allclose(draws["w"].mean(0), [5, 6], atol=0.1)


@pytest.mark.every_case
@pytest.mark.parametrize(("guide", "params", "number", "words"), [
    (AutoNormal, {}, 10, "AutoNormal has not been set up.*guide of the run"),
    (AutoDiagonalNormal, {}, 10, "lacks .'auto_loc', 'auto_scale'.*never trained"),
    (AutoDiagonalNormal, {"auto_loc": jnp.zeros(3), "w_auto_loc": X}, 10, "lacks .'auto_scale'"),
    (AutoDiagonalNormal, {"auto_loc": jnp.zeros(2), "auto_scale": jnp.ones(3)}, 10,
     "'auto_loc' has arrays of shapes .*3.*2"),
    (AutoNormal, {}, 0, "num_samples=0"),
])  # fmt: skip
def test_wrong_draws(guide, params, number, words):
    guide = guide(model)
    if isinstance(guide, AutoDiagonalNormal):
        set_up(guide)
    with pytest.raises(ValueError, match=words):
        posterior_samples(KEY, guide, params, number, X)
