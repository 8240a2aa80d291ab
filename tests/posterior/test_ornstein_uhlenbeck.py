"""The closed forms against simulation, and against private runs."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.infer.autoguide import AutoDiagonalNormal, AutoIAFNormal, AutoMultivariateNormal

from numpyro_dp import DPSVI, FullBatch, aligned
from numpyro_dp.posterior import averaged_covariance, guide_curvature, stationary_covariance

A = np.array([[3.0, 1.0], [1.0, 2.0]])
Z = np.array([[1.0, -0.4], [-0.4, 0.5]])


@pytest.fixture(scope="module")
def simulated():
    """4000 chains of 200 iterates of the linear recursion, after warm-up."""
    rng, root, step = np.random.default_rng(0), np.linalg.cholesky(Z), 0.1
    state, kept = np.zeros((4000, 2)), []
    for number in range(400):
        state = state - step * (state @ A + rng.normal(size=state.shape) @ root.T)
        kept += [state] if number >= 200 else []
    return np.asarray(kept)


def test_stationary_covariance(simulated):
    found = np.mean([np.cov(values.T) for values in simulated], axis=0)
    np.testing.assert_allclose(found, stationary_covariance(A, Z, 0.1), rtol=0.03, atol=5e-4)


@pytest.mark.parametrize("number", [1, 7, 200])
def test_covariance_of_means(simulated, number):
    found = np.cov(simulated[-number:].mean(0).T)
    expected = averaged_covariance(A, Z, 0.1, number)
    np.testing.assert_allclose(found, expected, rtol=0.1, atol=0.03 * np.abs(expected).max())


def test_long_means_do_not_depend_on_the_step():
    limit = np.linalg.inv(A) @ Z @ np.linalg.inv(A)
    for step in (0.01, 0.3):
        found = 10**6 * averaged_covariance(A, Z, step, 10**6)
        np.testing.assert_allclose(found, limit, rtol=2e-3)


def test_small_steps_give_the_lyapunov_equation_of_the_paper():
    step = 1e-5
    found = stationary_covariance(A, Z, step)
    np.testing.assert_allclose(A @ found + found @ A, step * Z, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.extended
def test_private_runs_spread_as_predicted():
    """Full batch and plain steps: the privacy noise is all the noise in the location."""

    def model(x):
        mean = numpyro.sample("mean", dist.Normal(0, 10).expand([3]).to_event(1))
        with numpyro.plate("records", x.shape[0]):
            numpyro.sample("x", dist.Normal(mean, jnp.array([1.0, 2.0, 3.0])).to_event(1), obs=x)

    number, step, noise = 100, 5e-4, 20.0
    x = 1 + jax.random.normal(jax.random.key(3), (number, 3))
    guide = AutoDiagonalNormal(model)
    svi = DPSVI(model, guide, optax.sgd(step), estimator=aligned(), clip_norm=8.0,
                sampler=FullBatch(), noise_multiplier=noise)  # fmt: skip
    sd = np.array([1.0, 2.0, 3.0]) / np.sqrt(number)
    start = {"auto_loc": jnp.asarray(x.mean(0)), "auto_scale": jnp.asarray(sd, jnp.float32)}
    found = svi.sweep(jax.random.split(jax.random.key(0), 150), 1000, x, init_params=start,
                      trace_size=1000)  # fmt: skip
    curvature = guide_curvature({"auto_scale": sd}, guide)
    # The draw from the guide adds its own noise, A sd: small beside 160 in every coordinate.
    covariance = np.eye(3) * (noise * 8.0) ** 2 + np.diag(1 / sd**2)
    predicted = np.sqrt(np.diag(stationary_covariance(curvature, covariance, step)))
    actual = found.params["auto_loc"].std(0, ddof=1)
    np.testing.assert_allclose(actual, predicted, rtol=0.15)  # standard error 6 %
    mean = found.trace.params["auto_loc"][:, 500:].mean(1)
    predicted = np.sqrt(np.diag(averaged_covariance(curvature, covariance, step, 500)))
    np.testing.assert_allclose(mean.std(0, ddof=1), predicted, rtol=0.15)


def test_curvature_of_guides():
    factor = np.array([[0.5, 0.0], [0.2, 0.1]])
    full = guide_curvature({"auto_scale_tril": factor}, AutoMultivariateNormal(lambda: None))
    np.testing.assert_allclose(full @ factor @ factor.T, np.eye(2), atol=1e-9)
    with pytest.raises(TypeError, match="AutoIAFNormal"):
        guide_curvature({}, AutoIAFNormal(lambda: None))


def test_wrong_input():
    with pytest.raises(ValueError, match=r"step_size=0.8.*diverges"):
        stationary_covariance(A, Z, 0.8)
    with pytest.raises(ValueError, match="num_steps=0"):
        averaged_covariance(A, Z, 0.1, 0)
