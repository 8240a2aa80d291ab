"""What invented records tell before and between releases."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from hostile_models import problem_of
from models import given, slopes

from numpyro_dp.laplace.guess import first_guess
from numpyro_dp.posterior.prior import read_prior

RNG = np.random.default_rng(0)
X = RNG.normal(size=(400, 5)).astype(np.float32)


# The scale "a" is the first of the latents.
linear = given(lambda x, w, a: dist.Normal(x @ w, a), w=slopes(), a=dist.HalfNormal(1.0))
wide = given(lambda x, w: dist.Poisson(jnp.exp(x @ w)), w=slopes(30))


def guessed(model, y):
    prior = read_prior(problem_of(model, (X, y)).outcomes, jax.random.key(0))
    return first_guess(prior, {}, jax.random.key(0)), prior.decoded


@pytest.mark.full
def test_errors_of_weights_blur_a_residual_scale_and_nothing_else():
    """A residual of variance s^2 + x'Vx has the score x'Vx / s^2 in log s: one time tr(H V).

    This holds whether the draw is where outcomes come from or where the score is.
    """
    guess, prior = guessed(linear, X[:, 0])
    for size in (1e-3, 1.0):
        covariance = np.diag([1e-9, *size * RNG.uniform(0.5, 2, 5)])
        ratios = guess.blurred(prior.mean, covariance)
        np.testing.assert_allclose(ratios[:, 0], 1, atol=0.3)
        np.testing.assert_array_equal(ratios[:, 1:], 0)


@pytest.mark.full
def test_draws_from_a_wide_prior_are_narrowed_until_scores_keep_their_size():
    guess, prior = guessed(wide, np.ones(len(X), np.int32))
    share, _ = guess.near(prior.mean, prior.covariance)
    assert share <= 0.25**4  # rates of exp(30) tell nothing
    assert guess.near(prior.mean, 1e-3 * np.eye(5))[0] == 1
