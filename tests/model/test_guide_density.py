"""The density of a guide at given latents, against NumPyro's own distributions."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from flat import dpsvi
from jax.flatten_util import ravel_pytree
from numpyro.infer import autoguide

from numpyro_dp import UnsupportedModelError

X = jnp.linspace(0.5, 2.0, 12)


def model(x):
    mean = numpyro.sample("mean", dist.Normal(0, 1))
    scale = numpyro.sample("scale", dist.LogNormal(0, 1).expand([2]).to_event(1))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("x", dist.Normal(mean, scale.sum()), obs=x)


def by_hand(x):
    loc = numpyro.param("loc", 0.3)
    mean = numpyro.sample("mean", dist.Normal(loc, 0.5))
    rate = numpyro.param("rate", jnp.array([1.0, 2.0]), constraint=dist.constraints.positive)
    numpyro.sample("scale", dist.Gamma(2.0 + jnp.square(mean), rate).to_event(1))


def problem_of(guide):
    svi = dpsvi(model, guide, optax.sgd(0.1))
    state = svi.init(jax.random.key(0), X)
    return svi._session((X,), {}).problem, svi.optim.get_params(state.optim_state)


LATENTS = {"mean": jnp.asarray(0.4), "scale": jnp.array([0.2, -0.7])}


@pytest.mark.full
@pytest.mark.parametrize("kind", [
    autoguide.AutoDiagonalNormal, autoguide.AutoMultivariateNormal,
    autoguide.AutoLowRankMultivariateNormal, autoguide.AutoIAFNormal, autoguide.AutoNormal,
])  # fmt: skip
def test_automatic_guides(kind):
    guide = kind(model)
    problem, params = problem_of(guide)
    values = problem.constrain(params)
    if kind is autoguide.AutoIAFNormal:
        latents, entropy = problem.draw(params, jax.random.key(3))
        expected = -entropy  # of this draw, along the flow; below it is inverted
    else:
        latents = LATENTS
        if kind is autoguide.AutoNormal:
            expected = sum(
                dist.Normal(values[f"{s}_auto_loc"], values[f"{s}_auto_scale"]).log_prob(z).sum()
                for s, z in latents.items()
            )
        else:
            expected = guide.get_posterior(values).log_prob(ravel_pytree(latents)[0]).sum()
    found = problem.log_density(latents, params)
    np.testing.assert_allclose(found, expected, rtol=2e-5)
    slope = jax.grad(problem.log_density)(latents, params)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(slope))


@pytest.mark.full
def test_a_guide_by_hand():
    problem, params = problem_of(by_hand)
    scale = np.exp(LATENTS["scale"])  # the Jacobian of exp joins the density
    gamma = dist.Gamma(2.0 + 0.16, jnp.array([1.0, 2.0]))
    expected = dist.Normal(0.3, 0.5).log_prob(0.4) + jnp.sum(gamma.log_prob(scale) + jnp.log(scale))
    np.testing.assert_allclose(problem.log_density(LATENTS, params), expected, rtol=1e-5)


@pytest.mark.extended
def test_a_flow_without_an_inverse_is_refused():
    problem, params = problem_of(autoguide.AutoBNAFNormal(model, hidden_factors=[2]))
    latents, _ = problem.draw(params, jax.random.key(0))
    with pytest.raises(UnsupportedModelError, match="Use AutoIAFNormal"):
        problem.log_density(latents, params)
