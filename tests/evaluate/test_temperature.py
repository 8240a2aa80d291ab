"""Learning how sure predictions should be."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from numpyro_dp import DPSVI, FullBatch, PrivacyBudget, vanilla
from numpyro_dp.evaluate import calibration_error, tempered, tempering_guide, tempering_model

NUMBER = 20_000


def drawn(sharpening, classes=10):
    """Log probabilities that are sharper than those that the labels have."""
    rng = np.random.default_rng(3)
    logits = 2 * rng.normal(size=(NUMBER, classes))
    true = jax.nn.softmax(logits)
    labels = (rng.random((NUMBER, 1)) > np.cumsum(true, axis=1)).sum(1).clip(0, classes - 1)
    return jax.nn.log_softmax(sharpening * jnp.asarray(logits)), labels


def fit(log_probabilities, labels, **noise):
    svi = DPSVI(
        tempering_model, tempering_guide, optax.adam(optax.cosine_decay_schedule(0.3, 40), b1=0.5),
        estimator=vanilla(), clip_norm=1.0, sampler=FullBatch(), **noise,
    )  # fmt: skip
    result = svi.run(jax.random.key(0), 40, log_probabilities, labels, progress_bar=False)
    return float(result.params["inverse_temperature"])


@pytest.mark.parametrize("sharpening", [0.5, 1.0, 2.0])
def test_the_temperature_of_the_labels_is_found(sharpening):
    log_probabilities, labels = drawn(sharpening)
    scale = fit(log_probabilities, labels, budget=PrivacyBudget(0.3, 1e-5), secret_key=7)
    assert scale == pytest.approx(1 / sharpening, rel=0.08)
    error = calibration_error(*top(tempered(log_probabilities, scale), labels))[0]
    assert error < 0.015
    if sharpening != 1.0:
        assert calibration_error(*top(log_probabilities, labels))[0] > 3 * error


def top(log_probabilities, labels):
    p = np.exp(np.asarray(log_probabilities, float))
    return p.max(1), p.argmax(1) == labels


def test_slopes_stay_below_a_clip_norm_of_one():
    rng = np.random.default_rng(0)

    def loss(log_scale, log_probabilities, label):
        p = jnp.exp(tempered(log_probabilities, jnp.exp(log_scale)))
        return jnp.sum((p - jax.nn.one_hot(label, p.size)) ** 2)

    slope = jax.jit(jax.vmap(jax.grad(loss), (None, 0, 0)))
    largest = 0.0
    for classes in (2, 3, 10):
        for size in (0.3, 1.0, 3.0, 10.0):
            found = slope(
                0.0, size * rng.normal(size=(20_000, classes)), rng.integers(classes, size=20_000)
            )
            largest = max(largest, float(jnp.abs(found).max()))
    assert 0.7 < largest < 1.1  # a few of the worst invented records are clipped, by a tenth


def test_a_record_moves_the_sum_by_the_clip_norm_at_most():
    log_probabilities, labels = drawn(2.0)
    worst = jnp.asarray([[300.0] + [0.0] * 9, [jnp.nan] * 10])
    with_worst = jnp.concatenate([log_probabilities[:-2], worst])
    plain = fit(log_probabilities, labels, noise_multiplier=0.0)
    assert fit(with_worst, labels, noise_multiplier=0.0) == pytest.approx(plain, rel=1e-2)
