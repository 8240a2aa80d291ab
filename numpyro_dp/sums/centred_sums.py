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

Each of the K + 1 terms is a row of its own in the sum. A difference of scores is the score of a
difference of log likelihoods. So all ways to sum signals serve here too.

Reference:
    The project's own method. Weights that do not see the outcome: Künsch, Stefanski, Carroll
    (1989), Conditionally unbiased bounded-influence estimation in general regression models, JASA.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool

from numpyro_dp.core import Centring, Mechanism, PyTree


def with_partners(
    centring: Centring, public: PyTree, examples: PyTree, mask: Bool[Array, " batch"],
    seeds: Array | None,
) -> tuple[PyTree, Bool[Array, " rows"]]:  # fmt: skip
    """Returns the K + 1 rows of each record."""
    rows = jax.vmap(lambda example, seed: centring.rows(public, example, seed))(examples, seeds)
    flat = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), rows)
    return flat, jnp.repeat(mask, centring.number + 1)


def centred_mechanism(mechanism: Mechanism, centring: Centring) -> Mechanism:
    """Returns a mechanism for rows that come in groups, one group for a record.

    Its ``scales`` takes the probability of each row as one more argument. The probability of a
    record's own row is not read.

    Guarantee:
        The rows of a record add up to a norm of at most the clip norm of each block, rounding of
        all rows included. If a row of a record is not finite, all of its rows count as 0.
    """
    number = centring.number

    def grouped(leaf: Array) -> Array:
        return leaf.reshape(-1, number + 1)

    def scales(
        names: tuple[str, ...], squares: tuple[Array, ...], margin: float, probs: Array
    ) -> tuple[Array, ...]:
        # The margin has room for the roundings of all rows. A few units more, because the norms of
        # a record's rows are added.
        room = margin * (1 - 8 * (number + 1) * float(jnp.finfo(squares[0].dtype).eps))
        chance = probs.astype(squares[0].dtype)
        probs = grouped(chance)[:, 1:]
        finite = jnp.all(jnp.stack([jnp.isfinite(square) for square in squares]), axis=0)
        whole = jnp.all(grouped(finite), axis=1, keepdims=True)
        norms, found = mechanism.norms(names), []
        if not centring.listed:
            # `chance` is 1 / (K + 1). The mean of clipped rows is within the clip norm, as each of
            # them is.
            return tuple(
                jnp.where(whole, grouped(each * chance), 0).reshape(-1)
                for each in mechanism.scales(names, squares, room)
            )
        for at, factor in enumerate(mechanism.scales(names, squares, room)):
            sizes = grouped(jnp.sqrt(jnp.where(finite, squares[at], 0)))
            own, others = jnp.split(grouped(factor), [1], axis=1)
            rest = probs * (1 - others)
            # The correction is at most this long, by the triangle inequality.
            added = jnp.sum(jnp.abs(rest) * sizes[:, 1:], axis=1, keepdims=True)
            # Without a clip norm nothing is clipped, so nothing is added.
            limit = 1.0 if norms is None else room * jnp.asarray(norms[at], added.dtype)
            # The own row has at most the norm `limit`, and the correction `added`. The quotient
            # brings their sum back to `limit`.
            scales = limit / (limit + added) * jnp.concatenate([own, rest], axis=1)
            # The own outcome is one of those listed, so this minimum does not tell which one it is.
            least = jnp.min(grouped(factor), axis=1, keepdims=True)
            sole = jnp.zeros_like(scales).at[:, :1].set(least)
            informed = probs * sizes[:, 1:] ** 2
            counted = limit / (limit + added) * jnp.sum(informed * others, 1, keepdims=True)
            better = counted > least * jnp.sum(informed, 1, keepdims=True)
            scales = jnp.where(better & (not centring.scaled), scales, sole)
            found.append(jnp.where(whole, scales, 0).reshape(-1))
        return tuple(found)

    of_records = mechanism.extras
    if of_records is None:
        return mechanism._replace(scales=scales)

    def extras(
        names: tuple[str, ...], squares: tuple[Array, ...], margin: float = 1.0
    ) -> dict[str, tuple[Array, Array | float]]:
        own = tuple(grouped(square)[:, 0] for square in squares)  # or the first difference
        found = {}
        for name, (values, norm) in of_records(names, own, margin).items():
            # A record adds its value once, at its first row. Its other rows add 0.
            wide = jnp.zeros((len(values), number + 1), values.dtype)
            found[name] = wide.at[:, 0].set(values).reshape(-1), norm
        return found

    return mechanism._replace(scales=scales, extras=extras)
