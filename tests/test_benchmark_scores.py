"""Scores of the benchmarks against numbers found by hand, and the tempering of probabilities."""

import importlib.util
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flat import dpsvi
from scipy import stats

from numpyro_dp import PrivacyBudget
from numpyro_dp.estimators import vanilla


def _loaded(name):
    path = pathlib.Path(__file__).parents[1] / "benchmarks" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


evaluate, tempering = _loaded("evaluate"), _loaded("dp_bnn/tempering")

DRAWS = np.array([[[0.8, 0.2, 0.0], [0.1, 0.6, 0.3]], [[0.4, 0.6, 0.0], [0.3, 0.2, 0.5]]])
LABELS = np.array([0, 2])


def test_scores_of_draws_are_those_of_their_mean():
    mean = np.array([[0.6, 0.4, 0.0], [0.2, 0.4, 0.4]])
    for each in (DRAWS, mean):
        assert evaluate.accuracy(each, LABELS) == 0.5  # the first of equal classes wins
        assert evaluate.log_score(each, LABELS) == pytest.approx((np.log(0.6) + np.log(0.4)) / 2)
        assert evaluate.brier_score(each, LABELS) == pytest.approx((0.32 + 0.04 + 0.16 + 0.36) / 2)
    assert evaluate.log_score(mean, np.array([2, 0])) == -np.inf
    with pytest.raises(ValueError, match="sum to 1"):
        evaluate.brier_score(2 * mean, LABELS)


def test_calibration_error_by_hand():
    p, y = np.array([0.01, 0.02, 0.03, 0.99]), np.array([0, 0, 1, 1])
    wide = 0.75 * (1 / 3 - 0.02) + 0.25 * 0.01, 1 / 3 - 0.02
    assert evaluate.calibration_error(p, y, bins=2) == pytest.approx(wide)
    assert len(evaluate.reliability(p, y, bins=100)[2]) == 4  # empty bins are left out
    assert evaluate.calibration_error(np.ones(2), np.array([1, 0]), bins=10) == (0.5, 0.5)


def test_predictive_density_of_a_conjugate_model():
    rng = np.random.default_rng(0)
    means, x = rng.normal(1, 0.5, size=100_000), np.array([-1.0, 0.0, 2.0])
    found = evaluate.log_predictive_density(stats.norm(means[:, None], 1).logpdf(x))
    np.testing.assert_allclose(found, stats.norm(1, np.sqrt(1.25)).logpdf(x), atol=0.02)


@pytest.mark.extended
def test_the_temperature_of_the_labels_is_found():
    rng = np.random.default_rng(3)
    logits = 2 * rng.normal(size=(20_000, 10))
    true = jax.nn.softmax(logits)
    labels = (rng.random((20_000, 1)) > np.cumsum(true, axis=1)).sum(1).clip(0, 9)
    before = jax.nn.log_softmax(2 * jnp.asarray(logits))
    svi = dpsvi(tempering.tempering_model, tempering.tempering_guide,
                optax.adam(optax.cosine_decay_schedule(0.3, 40), b1=0.5), estimator=vanilla(),
                budget=PrivacyBudget(0.3, 1e-5), secret_key=7)  # fmt: skip
    found = svi.run(jax.random.key(0), 40, before, labels, progress_bar=False)
    after = tempering.tempered(before, found.params["coefficients"])
    np.testing.assert_array_equal(after.argmax(1), before.argmax(1))

    def error(log_probabilities):
        p = np.exp(np.asarray(log_probabilities, float))
        return evaluate.calibration_error(p.max(1), p.argmax(1) == labels)[0]

    assert error(after) < 0.015
    assert error(before) > 3 * error(after)


def test_slopes_are_seldom_above_a_clip_norm_of_one():
    rng = np.random.default_rng(0)

    def loss(coefficients, log_probabilities, label):
        p = jnp.exp(tempering.tempered(log_probabilities, coefficients))
        return jnp.sum((p - jax.nn.one_hot(label, p.size)) ** 2)

    slope = jax.jit(jax.vmap(jax.grad(loss), (None, 0, 0)))
    log_probabilities = jax.nn.log_softmax(3 * rng.normal(size=(20_000, 10)))
    labels = (rng.random((20_000, 1)) > np.cumsum(jnp.exp(log_probabilities), 1)).sum(1).clip(0, 9)
    norms = np.linalg.norm(slope(jnp.zeros(3), log_probabilities, labels), axis=1)
    assert np.mean(norms > 1) < 0.1
    nought = jnp.array([[0.0, -jnp.inf]])
    assert np.isfinite(slope(jnp.zeros(3), nought, jnp.array([1]))).all()
