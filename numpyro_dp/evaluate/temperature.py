r"""One number that makes class probabilities neither too sure nor too doubtful, learnt privately.

Predictions :math:`\bar p` become :math:`p_\beta(k) \propto \bar p(k)^\beta`. Clipped gradients leave
a network too sure of itself: records that it gets wrong have the largest gradients, and weigh less
than they should. Held-out records that would tell are seldom at hand; but one number learnt from
the training records themselves is cheap. What it minimises is the mean Brier score, which is
proper, so that calibrated probabilities keep :math:`\beta = 1`, and whose slope is bounded,

.. math:: \frac{\partial}{\partial \log\beta} \sum_k (p_\beta(k) - [y = k])^2
    = 2 \sum_k p_\beta(k)\, (p_\beta(k) - [y = k])\, \beta\, \Big(\log\bar p(k)
    - \sum_j p_\beta(j) \log\bar p(j)\Big),

so that a clip norm of 1 leaves nearly all records alone: it adds no bias of its own kind. A private
network's errors on its training records are about those on others: it may not know them by heart.

Reference:
    Guo, Pleiss, Sun, Weinberger (2017), On calibration of modern neural networks, ICML (with
    the log score of held-out records); Brier (1950).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpyro
from jax import Array
from jaxtyping import Float, Integer
from numpyro.distributions import constraints

__all__ = ["tempered", "tempering_guide", "tempering_model"]


def tempered(
    log_probabilities: Float[Array, "*records classes"],
    inverse_temperature: float | Float[Array, ""],
) -> Float[Array, "*records classes"]:
    r"""Returns :math:`\log p_\beta`: the log probabilities times beta, normalised.

    Args:
        log_probabilities: Of each class.
        inverse_temperature: beta, positive; below 1 predictions become less sure.

    Example:
        >>> import jax.numpy as jnp
        >>> jnp.exp(tempered(jnp.log(jnp.array([0.9, 0.1])), 0.5)).round(2)
        Array([0.75, 0.25], dtype=float32)
    """
    return jax.nn.log_softmax(inverse_temperature * jnp.asarray(log_probabilities), axis=-1)


def tempering_model(
    log_probabilities: Float[Array, "records classes"], labels: Integer[Array, " records"]
) -> None:
    """A model whose one parameter, ``inverse_temperature``, minimises the Brier score.

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
        ...     clip_norm=1.0, sampler=FullBatch(), budget=PrivacyBudget(0.2, 1e-5), secret_key=1,
        ... )
        >>> found = svi.run(jax.random.key(1), 40, sure, labels, progress_bar=False)
        >>> bool(abs(found.params["inverse_temperature"] - 0.5) < 0.05)
        True

    Guarantee:
        That of the run; ``log_probabilities`` must come row by row from published weights. Give
        that run ``budget.after(result.privacy)`` of the one that fitted the weights.
    """
    scale = numpyro.param("inverse_temperature", 1.0, constraint=constraints.positive)
    with numpyro.plate("records", labels.shape[0]):
        p = jnp.exp(tempered(log_probabilities, scale))
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
