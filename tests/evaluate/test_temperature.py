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
    return result.params["coefficients"]


@pytest.mark.extended
@pytest.mark.parametrize("sharpening", [0.5, 1.0, 2.0])
def test_the_temperature_of_the_labels_is_found(sharpening):
    log_probabilities, labels = drawn(sharpening)
    found = fit(log_probabilities, labels, budget=PrivacyBudget(0.3, 1e-5), secret_key=7)
    after = tempered(log_probabilities, found)
    np.testing.assert_array_equal(after.argmax(1), log_probabilities.argmax(1))
    error = calibration_error(*top(after, labels))[0]
    assert error < 0.015
    if sharpening != 1.0:
        assert calibration_error(*top(log_probabilities, labels))[0] > 3 * error


@pytest.mark.extended
def test_doubt_in_small_margins_alone_is_found():
    log_probabilities, labels = drawn(1.0)
    crooked = tempered(log_probabilities, jnp.array([0.6, -0.5, 0.0]))
    single = fit_one(crooked, labels)
    several = calibration_error(*top(tempered(crooked, fit(crooked, labels,
                                noise_multiplier=10.0, secret_key=7)), labels))  # fmt: skip
    assert several[0] < 0.015
    assert calibration_error(*top(tempered(crooked, single), labels))[0] > 1.5 * several[0]


def fit_one(log_probabilities, labels):
    """One temperature, without noise, by search."""
    scales = jnp.linspace(-1.5, 1.0, 101)
    right = jax.nn.one_hot(labels, log_probabilities.shape[1])

    def loss(scale):
        p = jnp.exp(tempered(log_probabilities, scale[None]))
        return jnp.mean(jnp.sum((p - right) ** 2, axis=1))

    return scales[jnp.argmin(jax.lax.map(loss, scales))][None]


def top(log_probabilities, labels):
    p = np.exp(np.asarray(log_probabilities, float))
    return p.max(1), p.argmax(1) == labels


@pytest.mark.full
def test_slopes_are_seldom_above_a_clip_norm_of_one():
    rng = np.random.default_rng(0)

    def loss(coefficients, log_probabilities, label):
        p = jnp.exp(tempered(log_probabilities, coefficients))
        return jnp.sum((p - jax.nn.one_hot(label, p.size)) ** 2)

    slope = jax.jit(jax.vmap(jax.grad(loss), (None, 0, 0)))
    for classes in (2, 3, 10):
        for size in (0.3, 1.0, 3.0, 10.0, 100.0):
            logits = size * rng.normal(size=(20_000, classes))
            log_probabilities = jax.nn.log_softmax(logits)
            found = slope(jnp.zeros(3), log_probabilities, rng.integers(classes, size=20_000))
            norms = np.asarray(jnp.linalg.norm(found, axis=1))
            assert norms.max() < 1.6
            labels = (rng.random((20_000, 1)) > np.cumsum(jnp.exp(log_probabilities), 1)).sum(1)
            found = slope(jnp.zeros(3), log_probabilities, labels.clip(0, classes - 1))
            norms = np.asarray(jnp.linalg.norm(found, axis=1))
            assert np.mean(norms > 1) < 0.1  # of labels as likely as predicted


@pytest.mark.full
def test_a_record_of_impossible_numbers_changes_little():
    log_probabilities, labels = drawn(2.0)
    worst = jnp.asarray([[300.0] + [0.0] * 9, [jnp.nan] * 10])
    with_worst = jnp.concatenate([log_probabilities[:-2], worst])
    plain = fit(log_probabilities, labels, noise_multiplier=0.0)
    found = fit(with_worst, labels, noise_multiplier=0.0)
    np.testing.assert_allclose(found, plain, atol=5e-3)


@pytest.mark.extended
def test_probabilities_of_nought_count_as_very_small_ones():
    log_probabilities, labels = drawn(2.0)
    small = log_probabilities.at[::2, 1:].set(-80.0)
    nought = log_probabilities.at[::2, 1:].set(-jnp.inf)
    one, other = (fit(each, labels, noise_multiplier=0.0) for each in (small, nought))
    np.testing.assert_array_equal(one, other)
    slope = jax.grad(lambda c: jnp.sum(jnp.exp(tempered(nought[0], c))[:2] ** 2))
    assert np.isfinite(slope(jnp.zeros(3))).all()


def test_one_class_is_refused():
    with pytest.raises(ValueError, match="two classes or more"):
        tempered(jnp.zeros((3, 1)), jnp.zeros(3))
