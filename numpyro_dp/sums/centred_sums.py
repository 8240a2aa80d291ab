r"""Clipped signals minus their expectation under the model, so that clipping does not bias a fit.

Clipping moves the root of a sum of scores: the mean of a clipped score is not 0 at the truth. Let s
be the score of a record, and let f(s) be the factor that clips s to the norm C.

**Listed outcomes.** Let :math:`s_1, \dots, s_K` be the scores of all outcomes that the record could
have had. They have probabilities :math:`p_k` under the model at the public draw of the step.
Scores have mean 0 under the model. So the mean of clipped scores is that of
:math:`(f(s_k) - 1)\,s_k`. A record contributes

.. math::
    w \Big(f(s)\,s + \sum_k p_k (1 - f(s_k))\,s_k\Big), \qquad
    w = \frac{C}{C + \sum_k p_k |1 - f(s_k)|\,|s_k|},

which has norm at most C. The weight w does not see the outcome of the record, so it biases nothing.
A record that is not clipped, nor would be with other outcomes, contributes its plain score. A
second form without a bias is the score times the smallest of all factors:

.. math:: \min_k f(s_k)\; s.

The score counts with the information :math:`\sum_k p_k f_k |s_k|^2 / \sum_k p_k |s_k|^2` times w in
the first form, and with the smallest factor in the second. Each record takes the form in which it
counts more, which does not see its outcome either. If all outcomes have scores of one length, the
first form counts with the square of f, and the second with f.

**Drawn outcomes.** If outcomes cannot be listed, the model draws K + 1 of them for the record, with
scores :math:`t_j`. The record contributes

.. math:: \frac{1}{K + 1} \sum_j f(s - t_j)\,(s - t_j),

the mean of clipped differences, of norm at most C. At the truth s and :math:`t_j` have the same
distribution. Their difference is then symmetric about 0, and so is its clipped value: the mean is
exactly 0 for every clip norm.

Each of the K + 1 terms is a row of the record. A difference of scores is the score of a difference
of log likelihoods. So all ways to sum signals serve here too. The rows are weighted and added up
first. If their scores are multiples of one vector, as in a generalised linear model, only these
multiples are added, and the sum over records reads its columns once.

Reference:
    The project's own method. Weights that do not see the outcome: Künsch, Stefanski, Carroll
    (1989), Conditionally unbiased bounded-influence estimation in general regression models, JASA.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_dp._tree import squared_norm
from numpyro_dp.core import Centring, Mechanism, PyTree


def with_rows(centring: Centring | None, public: PyTree, examples: PyTree, seeds: Any) -> PyTree:
    """Returns the records, followed by what differs between their rows, of axes (K + 1, batch)."""
    if centring is None:
        return examples
    each = jax.vmap(functools.partial(centring.row, public), (0, 0, None))
    # Records come last, so that arithmetic on rows is arithmetic on long vectors.
    return (
        examples,
        *jax.vmap(each, (None, None, 0))(examples, seeds, jnp.arange(centring.number + 1)),
    )


def row_of(centring: Centring | None, public: PyTree, record: PyTree) -> PyTree:
    """Returns the shapes of a row by those of a record."""
    if centring is None:
        return record
    seed, number = jax.ShapeDtypeStruct((), jnp.uint32), jax.ShapeDtypeStruct((), jnp.int32)
    return (record, *jax.eval_shape(centring.row, public, record, seed, number))


def over_rows(of_row: Callable[[Any], PyTree], centred: bool) -> Callable[[Any], PyTree]:
    """Maps a function of one row over the result of :func:`with_rows`."""
    each = jax.vmap(lambda record, *row: of_row((record, *row)))

    def several(examples: PyTree) -> PyTree:
        return jax.vmap(each, (None, *[0] * (len(examples) - 1)))(*examples)

    return several if centred else jax.vmap(of_row)


def row_norms(tree: PyTree, centred: bool) -> Array:
    """Squared norms of the rows of a batch, (batch,) or (K + 1, batch)."""
    norms = jax.vmap(squared_norm)
    return (jax.vmap(norms) if centred else norms)(tree)


def sum_of_rows(tree: PyTree, weights: Array) -> PyTree:
    """The weighted sum over the rows of each record, of leaves and weights (K + 1, batch, ...).

    A row of weight 0 does not count, even if it is not finite.
    """

    def summed(leaf: Array) -> Array:
        own = weights.reshape(*weights.shape, *[1] * (leaf.ndim - 2))
        return _total(jnp.where(jnp.abs(own) > 0, leaf, 0) * own)

    return jax.lax.optimization_barrier(jax.tree.map(summed, tree))


def _total(rows: Array) -> Array:
    """The sum over a short leading axis. XLA fuses it with what makes the rows, unlike a sum."""
    return functools.reduce(jnp.add, rows)


def counted_records(weights: Array) -> Array:
    """1 for each record that has a row with a weight, else 0."""
    return jnp.any(jnp.abs(weights) > 0, axis=0).astype(weights.dtype)


def centred_mechanism(mechanism: Mechanism, centring: Centring) -> Mechanism:
    """Returns a mechanism for squared norms (K + 1, batch), of all rows of each record.

    Its ``scales`` takes the probabilities of the rows as one more argument, and has the same shape.
    The probability of a record's own outcome is not read.

    Guarantee:
        The rows of a record add up to a norm of at most the clip norm of each block, rounding of
        all rows included. If a row of a record is not finite, all of its rows count as 0.
    """

    def scales(
        names: tuple[str, ...], squares: tuple[Array, ...], margin: float, probs: Array
    ) -> tuple[Array, ...]:
        # The margin has room for the roundings of all rows. A few units more, because the norms of
        # a record's rows are added.
        room = margin * (1 - 8 * (centring.number + 1) * float(jnp.finfo(squares[0].dtype).eps))
        probs = probs.astype(squares[0].dtype)
        if centring.listed:  # the sum is at most 1, whatever values the record holds
            probs = probs / jnp.maximum(_total(probs[1:]), 1)
        finite = jnp.all(jnp.stack([jnp.isfinite(square) for square in squares]), axis=0)
        whole = jnp.all(finite, axis=0)
        each = mechanism.scales(names, tuple(square.reshape(-1) for square in squares), room)
        factors = [factor.reshape(finite.shape) for factor in each]
        if not centring.listed:
            # The probabilities are 1 / (K + 1). The mean of clipped rows is within the clip norm,
            # as each of them is.
            return tuple(jnp.where(whole, factor * probs, 0) for factor in factors)
        norms, found = mechanism.norms(names), []
        for at, factor in enumerate(factors):
            sizes = jnp.sqrt(jnp.where(finite, squares[at], 0))
            own, others = factor[:1], factor[1:]
            rest = probs[1:] * (1 - others)
            # The correction is at most this long, by the triangle inequality.
            added = _total(jnp.abs(rest) * sizes[1:])
            # Without a clip norm nothing is clipped, so nothing is added.
            limit = 1.0 if norms is None else room * jnp.asarray(norms[at], added.dtype)
            # The own row has at most the norm `limit`, and the correction `added`. The quotient
            # brings their sum back to `limit`.
            scales = limit / (limit + added) * jnp.concatenate([own, rest])
            # The own outcome is one of those listed, so this minimum does not tell which one it is.
            least = functools.reduce(jnp.minimum, factor)
            sole = jnp.concatenate([least[None], jnp.zeros_like(rest)])
            informed = probs[1:] * sizes[1:] ** 2
            counted = limit / (limit + added) * _total(informed * others)
            better = counted > least * _total(informed)
            scales = jnp.where(better & (not centring.scaled), scales, sole)
            found.append(jnp.where(whole, scales, 0))
        return tuple(found)

    return mechanism._replace(scales=scales)
