r"""Finds the few values through which a likelihood depends on its latents.

For :math:`f(z, x) = h(\eta(z, x), x)` with :math:`\eta = J(x) z + a(x)`, affine in z,

.. math:: \nabla_z f = J^\top \nabla_\eta h,

and J does not depend on z. Gradients at many z, and for many outcomes, then differ in a few values
only. In a generalised linear model :math:`\eta` is the linear predictor and J a row of the design.
If the program has no such waist, :math:`\eta` is z itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_dp._compat import MOVES
from numpyro_dp._program import Constant, Op, ScalarProgram, evaluate, trace_scalar
from numpyro_dp.core import PyTree

# Operations that are linear in all inputs together, and those that are linear in the first one.
_LINEAR = {
    "add", "add_any", "sub", "neg", "reduce_sum", "concatenate", "split", "cumsum", "rev",
    *MOVES,
}  # fmt: skip
_IN_THE_FIRST = {"div", "gather", "dynamic_slice"}
_FREE, _AFFINE, _BENT = 0, 1, 2


class Waist(NamedTuple):
    """A scalar function, cut where few values pass.

    Attributes:
        size: Number of values that pass the cut.
        values: ``(z, example) -> eta``, shape (size,), affine in z.
        rest: ``(eta, example) -> scalar``.
    """

    size: int
    values: Callable[[Array, PyTree], Array]
    rest: Callable[[Array, PyTree], Array]


def find_waist(scalar: Callable[[Array, PyTree], Array], point: PyTree, example: PyTree) -> Waist:
    """Cuts a scalar function of a vector and a record after its affine part in the vector.

    ``scalar(z, example)`` has z of shape (d,). ``point`` and ``example`` may be shapes.
    """
    program = trace_scalar(scalar, point, example)
    (start,), whole = program.point, Waist(point.size, lambda z, _: z, scalar)
    degree = _degrees(program)
    cut = _narrowed(program, degree, _frontier(program, degree))
    floats = all(jnp.issubdtype(program.shapes[v].dtype, jnp.floating) for v in cut)
    size = sum(math.prod(program.shapes[v].shape) for v in cut)
    # A cut as wide as z saves nothing. Integers have no gradient.
    if not cut or start in cut or size >= point.size or not floats:
        return whole
    before, after = _slice(program, cut, {start}), _slice(program, {program.output}, set(cut))
    # If the rest read z past the cut, its gradient would miss that path.
    if before is None or after is None or any(start in op.inputs for op in after):
        return whole
    order = sorted(cut)
    shapes = [program.shapes[value] for value in order]

    def values(z: Array, example: PyTree) -> Array:
        inputs = {start: z} | dict(zip(program.example, jax.tree.leaves(example), strict=True))
        found = evaluate(before, inputs)
        return jnp.concatenate([found[value].reshape(-1) for value in order])

    def rest(eta: Array, example: PyTree) -> Array:
        inputs = dict(zip(program.example, jax.tree.leaves(example), strict=True))
        ends = np.cumsum([math.prod(shape.shape) for shape in shapes])
        for value, shape, part in zip(order, shapes, jnp.split(eta, ends[:-1]), strict=True):
            # Joining the values gave all of them one type.
            inputs[value] = part.reshape(shape.shape).astype(shape.dtype)
        return evaluate(after, inputs)[program.output]

    return Waist(size, values, rest)


def _degrees(program: ScalarProgram) -> dict[int, int]:
    """For each value whether it is free of z, affine in it, or neither."""
    degree = dict.fromkeys(program.example, _FREE) | dict.fromkeys(program.point, _AFFINE)
    for op in program.ops:
        own = [_FREE if isinstance(v, Constant) else degree[v] for v in op.inputs]
        degree |= dict.fromkeys(op.outputs, _degree(program, op, own))
    return degree


def _degree(program: ScalarProgram, op: Op, own: list[int]) -> int:
    name, moving = op.primitive.name, [at for at, each in enumerate(own) if each]
    if not moving:
        return _FREE
    if _BENT in own:
        return _BENT
    # A cast to an integer rounds, so it is not affine.
    if name == "convert_element_type":
        target = program.shapes[op.outputs[0]].dtype
        return _AFFINE if jnp.issubdtype(target, jnp.floating) else _BENT
    if name in _LINEAR:
        return _AFFINE
    # A product of two values that move with z is quadratic in z.
    if name in ("mul", "dot_general") and len(moving) == 1:
        return _AFFINE
    if name in _IN_THE_FIRST and moving == [0]:
        return _AFFINE
    # A choice that depends on z has jumps. A choice by the record alone is affine.
    if name == "select_n" and 0 not in moving:
        return _AFFINE
    return _BENT


def _frontier(program: ScalarProgram, degree: dict[int, int]) -> set[int]:
    """Affine values that an operation reads whose result is not affine."""
    found = {program.output} if degree.get(program.output) == _AFFINE else set()
    for op in program.ops:
        if any(degree[out] == _BENT for out in op.outputs):
            found |= {v for v in op.inputs if not isinstance(v, Constant) and degree[v] == _AFFINE}
    return found


def _narrowed(program: ScalarProgram, degree: dict[int, int], cut: set[int]) -> set[int]:
    """Moves the cut towards z past operations on one affine value that do not make it smaller.

    Copies, multiples and negatives of one linear predictor then become that predictor.
    """
    maker = {out: op for op in program.ops for out in op.outputs}
    moved = True
    while moved:
        moved = False
        for value in sorted(cut, reverse=True):
            if value not in maker:
                continue
            inputs = maker[value].inputs
            own = {v for v in inputs if not isinstance(v, Constant) and degree[v] == _AFFINE}
            # Inputs that are in the cut already make it no wider.
            size = sum(math.prod(program.shapes[v].shape) for v in own - cut)
            if size <= math.prod(program.shapes[value].shape) and (len(own) == 1 or own <= cut):
                cut, moved = (cut - {value}) | own, True
                break
    return cut


def _slice(program: ScalarProgram, wanted: set[int], known: set[int]) -> tuple[Op, ...] | None:
    """The operations that compute wanted values from known ones and the record, if possible."""
    needed, kept = set(wanted) - known, []
    for op in reversed(program.ops):
        if needed & set(op.outputs):
            inputs = {v for v in op.inputs if not isinstance(v, Constant)}
            needed = (needed - set(op.outputs)) | (inputs - known)
            kept.append(op)
    return tuple(reversed(kept)) if needed <= set(program.example) else None
