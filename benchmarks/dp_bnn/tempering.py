r"""Three numbers that make class probabilities neither too sure nor too doubtful, learnt privately.

Predictions :math:`\bar p` of a record become :math:`p(k) \propto \bar p(k)^\beta`. The exponent
follows from the margin m between the two largest log probabilities:

.. math:: \log\beta = c_0 + c_1 u + c_2 u^2, \quad u = \tfrac12 \log m \in [-1, 1]

(clipped). The order of the classes stays. The numbers are learnt from the training records, which
a private network does not know by heart. They minimise the Brier score, which is proper. Its slope
in :math:`\log\beta` is bounded, so a clip norm of 1 leaves nearly all records alone where classes
are few. A record that is predicted with certainty has no slope.

The log probabilities must come row by row from published weights. Where a network draws masks in
prediction, draw one for all rows. Give the run ``budget.after(result.privacy)`` of the one that
fitted the weights.

Guo, Pleiss, Sun, Weinberger (2017), On calibration of modern neural networks, ICML, have one
temperature, by the log score of held-out records.
"""

import jax
import jax.numpy as jnp
import numpyro


def tempered(log_probabilities, coefficients):
    """Log probabilities (of the last axis) times beta, normalised; those below -80 count as -80."""
    log_probabilities = jnp.maximum(jnp.asarray(log_probabilities), -80.0)  # 0 has no slope
    largest, _ = jax.lax.top_k(log_probabilities, 2)
    margin = jnp.maximum(largest[..., 0] - largest[..., 1], 1e-3)
    u = jnp.clip(jnp.log(margin) / 2, -1.0, 1.0)
    beta = jnp.exp(jnp.polyval(jnp.asarray(coefficients)[::-1], u))
    return jax.nn.log_softmax(beta[..., None] * log_probabilities, axis=-1)


def tempering_model(log_probabilities, labels):
    """A model whose one parameter, ``coefficients``, minimises the Brier score."""
    coefficients = numpyro.param("coefficients", jnp.zeros(3))
    with numpyro.plate("records", labels.shape[0]):
        p = jnp.exp(tempered(log_probabilities, coefficients))
        right = jax.nn.one_hot(labels, p.shape[-1])
        numpyro.factor("brier", -jnp.sum((p - right) ** 2, axis=-1))


def tempering_guide(log_probabilities, labels):
    """The guide of the model, which has no latent."""
