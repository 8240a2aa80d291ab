r"""Three numbers that make class probabilities neither too sure nor too doubtful, learnt privately.

Predictions :math:`\bar p` of a record become :math:`p(k) \propto \bar p(k)^\beta`, the more
doubtful the smaller :math:`\beta`, which follows from the margin m between the two largest log
probabilities:

.. math:: \log\beta = c_0 + c_1 u + c_2 u^2, \quad u = \tfrac12 \log m \in [-1, 1]

(clipped). The order of the classes stays. Clipped gradients leave a network too sure of itself:
records that it gets wrong have the largest gradients, and weigh less than they should; and noise in
its weights does more to small margins than to large ones. Held-out records that would tell are
seldom at hand, but three numbers learnt from the training records themselves are cheap, and a
private network may not know those by heart. They minimise the mean Brier score, which is proper, so
that probabilities that are right stay so but for noise, and whose slope is bounded,

.. math:: \frac{\partial}{\partial \log\beta} \sum_k (p(k) - [y = k])^2
    = 2 \sum_k p(k)\, (p(k) - [y = k])\, \beta\, \Big(\log\bar p(k)
    - \sum_j p(j) \log\bar p(j)\Big),

so that a clip norm of 1 leaves nearly all records alone where classes are few (of ten; with a
thousand the slopes are up to four). Noise and the number of records decide what it is worth: with
noise of 80 in 40 steps, predictions that were right have an ECE of 0.02 to 0.05 afterwards at 1,000
records, of 0.01 at 10,000; have noise multiplier / N well below 1/500. A record that is predicted
with certainty has no slope, right or wrong: such predictions this leaves as they are.

Reference:
    Guo, Pleiss, Sun, Weinberger (2017), On calibration of modern neural networks, ICML (one
    temperature, by the log score of held-out records); Brier (1950).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpyro
from jax import Array
from jaxtyping import Float, Integer

__all__ = ["tempered", "tempering_guide", "tempering_model"]


def tempered(
    log_probabilities: Float[Array, "*records classes"], coefficients: Float[Array, " orders"]
) -> Float[Array, "*records classes"]:
    r"""Returns log probabilities times :math:`\beta`, normalised.

    Args:
        log_probabilities: Of each class; below -80 they are taken for -80.
        coefficients: :math:`c_0, c_1, \dots`; one alone is the log of an inverse temperature.

    Raises:
        ValueError: If there is one class.

    Example:
        >>> import jax.numpy as jnp
        >>> log_p = jnp.log(jnp.array([0.9, 0.1]))
        >>> jnp.exp(tempered(log_p, jnp.log(jnp.array([0.5])))).round(2)
        Array([0.75, 0.25], dtype=float32)
    """
    log_probabilities = jnp.maximum(jnp.asarray(log_probabilities), -80.0)  # 0 has no slope
    if log_probabilities.shape[-1] < 2:
        raise ValueError(
            f"Expected log probabilities of two classes or more along the last axis, got shape "
            f"{log_probabilities.shape}. For one outcome stack log(1 - p) and log(p)."
        )
    largest, _ = jax.lax.top_k(log_probabilities, 2)
    margin = jnp.maximum(largest[..., 0] - largest[..., 1], 1e-3)
    u = jnp.clip(jnp.log(margin) / 2, -1.0, 1.0)
    beta = jnp.exp(jnp.polyval(jnp.asarray(coefficients)[::-1], u))
    return jax.nn.log_softmax(beta[..., None] * log_probabilities, axis=-1)


def tempering_model(
    log_probabilities: Float[Array, "records classes"], labels: Integer[Array, " records"]
) -> None:
    """A model whose one parameter, ``coefficients``, minimises the Brier score.

    Args:
        log_probabilities: Of each class for each record, by what is published: the log of mean
            probabilities over draws of a private posterior.
        labels: Class of each record.

    Example:
        >>> import jax, jax.numpy as jnp, optax
        >>> from numpyro_dp import DPSVI, FullBatch, PrivacyBudget, vanilla
        >>> labels = (jax.random.uniform(jax.random.key(0), (5000,)) < 0.75).astype(int)
        >>> sure = jnp.log(jnp.broadcast_to(jnp.array([0.1, 0.9]), (5000, 2)))
        >>> svi = DPSVI(
        ...     tempering_model, tempering_guide,
        ...     optax.adam(optax.cosine_decay_schedule(0.3, 40), b1=0.5), estimator=vanilla(),
        ...     clip_norm=1.0, sampler=FullBatch(), budget=PrivacyBudget(0.2, 1e-5),
        ... )
        >>> found = svi.run(jax.random.key(1), 40, sure, labels, progress_bar=False)
        >>> bool(abs(jnp.exp(tempered(sure[0], found.params["coefficients"]))[1] - 0.75) < 0.03)
        True

    Guarantee:
        That of the run; ``log_probabilities`` must come row by row from published weights: where a
        network draws masks in prediction, one for all rows (``nn.Dropout(broadcast_dims=(0,))``),
        or that of a row depends on how many come before it. Give that run
        ``budget.after(result.privacy)`` of the one that fitted the weights.
    """
    coefficients = numpyro.param("coefficients", jnp.zeros(3))
    with numpyro.plate("records", labels.shape[0]):
        p = jnp.exp(tempered(log_probabilities, coefficients))
        right = jax.nn.one_hot(labels, p.shape[-1])
        numpyro.factor("brier", -jnp.sum((p - right) ** 2, axis=-1))


def tempering_guide(log_probabilities: Array, labels: Array) -> None:
    """The guide of :func:`tempering_model`, which has no latent.

    Args:
        log_probabilities: As there.
        labels: As there.

    Example:
        >>> tempering_guide(None, None)
    """
