"""Numbers that others released with noise: densities by brute force, and calibrated posteriors."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from scipy import stats
from scipy.integrate import quad

from numpyro_dp import Privatised

RNG = np.random.default_rng(0)


def discrete_gaussian(z, s):
    return np.exp(-((z / s) ** 2) / 2) / np.sum(np.exp(-((np.arange(-200, 201) / s) ** 2) / 2))


NOISES = {
    "gaussian": lambda z, s: stats.norm.pdf(z, 0, s),
    "discrete gaussian": discrete_gaussian,
    "laplace": lambda z, s: stats.laplace.pdf(z, 0, s),
    "geometric": lambda z, s: np.tanh(0.5 / s) * np.exp(-np.abs(z) / s),
}
COUNTS = {
    "poisson": (dist.Poisson(6.0), stats.poisson(6.0)),
    "binomial": (dist.Binomial(20, 0.3), stats.binom(20, 0.3)),
    "negative binomial": (dist.NegativeBinomial2(6.0, 2.0), stats.nbinom(2.0, 0.25)),
}


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("counts", COUNTS)
def test_the_true_count_is_summed_out(noise, counts):
    base, exact = COUNTS[counts]
    found = Privatised(base, noise, 2.5)
    for value in (-4, 0, 7, 30):
        true = np.arange(300)
        density = np.sum(exact.pmf(true) * NOISES[noise](value - true, 2.5))
        assert found.log_prob(value) == pytest.approx(np.log(density), abs=1e-4)


@pytest.mark.parametrize("noise", ["gaussian", "laplace"])
def test_a_mean_with_noise(noise):
    def density(truth, value):
        return stats.norm.pdf(truth, 1, 2) * NOISES[noise](value - truth, 1.5)

    for value in (-4.0, 0.0, 7.0):
        exact = quad(density, -30, 40, (value,), points=[value, 1.0], limit=200)[0]
        found = Privatised(dist.Normal(1.0, 2.0), noise, 1.5).log_prob(value)
        assert found == pytest.approx(np.log(exact), abs=1e-4)


@pytest.mark.full
def test_a_table_keeps_its_exact_total():
    rates, total, value, scale = np.array([2.0, 3.0, 1.5]), 7, np.array([4, -1, 3]), 1.5
    cells = [(a, b, total - a - b) for a in range(total + 1) for b in range(total + 1 - a)]
    density = sum(
        np.prod(stats.poisson.pmf(cell, rates) * discrete_gaussian(value - cell, scale))
        for cell in np.array(cells)
    ) / stats.poisson.pmf(total, rates.sum())  # fmt: skip

    def log(rates):
        found = Privatised(dist.Poisson(rates), "discrete gaussian", scale, total=total)
        return found.log_prob(jnp.asarray(value))

    assert log(rates) == pytest.approx(np.log(density), abs=1e-4)
    # Given the total, only the shares count.
    assert log(3 * rates) == pytest.approx(float(log(rates)), abs=1e-4)
    assert jnp.sum(rates * jax.grad(log)(jnp.asarray(rates))) == pytest.approx(0, abs=1e-4)


@pytest.mark.full
def test_relaxed_counts_are_near_exact_ones():
    base, values = dist.Poisson(400.0), jnp.linspace(360, 440, 9)
    exact, relaxed = (
        Privatised(base, "gaussian", 10.0, relaxed=each).log_prob(values) for each in (False, True)
    )
    assert np.allclose(exact, relaxed, atol=0.03)


@pytest.mark.parametrize("noise", NOISES)
def test_draws_have_the_variance_of_truth_and_noise(noise):
    variance = {"laplace": 2 * 9, "geometric": 0.5 / np.sinh(1 / 6) ** 2}.get(noise, 9)
    drawn = Privatised(dist.Poisson(5.0), noise, 3.0).sample(jax.random.key(0), (20_000,))
    assert np.var(drawn) == pytest.approx(5 + variance, rel=0.06)
    assert np.mean(drawn) == pytest.approx(5, abs=0.15)
    table = Privatised(dist.Poisson(jnp.array([2.0, 6.0])), "geometric", 1.0, total=40)
    drawn = table.sample(jax.random.key(1), (5_000,))
    assert drawn.shape == (5_000, 2) and np.allclose(np.mean(drawn, 0), [10, 30], atol=0.3)


@pytest.mark.slow
@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("total", [None, 60])
def test_simulated_posteriors_are_calibrated(noise, total):
    """The rank of a true slope in its posterior, by a grid, is uniform."""
    number, grid = 400, jnp.linspace(-4, 4, 801)
    columns = jnp.linspace(-1, 1, 5)

    def table(slope):
        return Privatised(dist.Poisson(4 * jnp.exp(slope * columns)), noise, 2.0, total=total)

    def rank(key):
        of_slope, of_table = jax.random.split(key)
        slope = jax.random.normal(of_slope)
        value = table(slope).sample(of_table)
        logs = jax.vmap(lambda s: jnp.sum(table(s).log_prob(value)))(grid) - grid**2 / 2
        return jnp.sum(jax.nn.softmax(logs) * (grid < slope))

    ranks = jax.lax.map(jax.jit(rank), jax.random.split(jax.random.key(3), number), batch_size=20)
    assert stats.kstest(np.asarray(ranks), "uniform").pvalue > 1e-3


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ((dist.Poisson(1.0), "uniform", 1.0), ValueError, "noise"),
        ((dist.Poisson(1.0), "gaussian", -1.0), ValueError, "above 0"),
        ((dist.Gamma(1.0, 1.0), "gaussian", 1.0), TypeError, "counts or Normal"),
        ((dist.Normal(0, 1), "geometric", 1.0), ValueError, "summed out"),
        ((dist.Poisson(1.0), "gaussian", 1e5), ValueError, "relaxed=True"),
    ],
)
def test_arguments_that_make_no_sense(arguments, error, text):
    with pytest.raises(error, match=text):
        Privatised(*arguments)


def test_a_total_needs_rates_of_cells():
    with pytest.raises(ValueError, match="one rate a cell"):
        Privatised(dist.Poisson(1.0), "geometric", 1.0, total=3)
    with pytest.raises(TypeError, match="known numbers"):
        jax.jit(lambda s: Privatised(dist.Poisson(1.0), "geometric", s).log_prob(1))(2.0)
