r"""Finds the parameters that enter a scalar through a single product with the record.

Let :math:`f(\theta, x)` with :math:`\theta = (w, v)` read :math:`w` only through
:math:`\eta = x \cdot w`. Then each coordinate of the gradient is one product,

.. math:: \nabla_w f = r\, x, \qquad r = \partial f/\partial\eta.

A sum :math:`\sum_i c_i r_i x_i` is then one matrix-vector product, without an array of (records,
parameters). No term of a record can be larger than its gradient.

A coordinate may also be a *sum* of products, because w is used twice or a record has several rows
of x. Huge terms of one record may then cancel in its gradient but not in the sum over records, and
rounding would move the sum by more than the clip norm. Such parameters are not split. Their
gradients are computed record by record.

The record's factor may be any function of the record alone. It may be its entries, moved or
converted. It may also be features made of them (scaled columns, an intercept, products), which are
marked as derived. On request it may depend on other parameters too, like the input of a layer of a
network. The gradient :math:`r\,x^\top` of the weights then needs that input and the slope at the
layer's output.

The kernel of a convolution meets a record in many places, so its gradient is a sum,

.. math:: \nabla_K f = \sum_p r_p\, x_p^\top

over the patches :math:`x_p` of the input. It is computed record by record, as one product of
matrices.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from numpyro_dp._compat import MOVES, ShapedArray
from numpyro_dp._program import (
    Constant,
    Op,
    ScalarProgram,
    evaluate,
    needed,
    trace_scalar,
    value_of,
)
from numpyro_dp.core import PyTree


class Contraction(NamedTuple):
    """A leaf of the point that enters through one product.

    Attributes:
        leaf: Number of the leaf among the leaves of the point.
        op: Number of the operation that forms the product.
        factor: Number of the value that the leaf is multiplied with.
        product: ``(leaf value, the record's factor) -> product`` of one record, linear in both.
        record: ``example leaves -> the record's factor``, if it depends on the record alone. Else
            it cannot be called, and the factor comes from ``Split.with_factors``.
        derived: Whether the factor is computed, not just moved. Two programs may round it
            differently, so it must be computed once.
        outer: Whether the gradient is an outer product, of norm ``|r| |record|``.
        struct: The product, for its shape and dtype.
        gradient: ``(leaf value, factor, r) -> gradient`` of a convolution, a sum of products. Else
            ``None``.
    """

    leaf: int
    op: int
    factor: int
    product: Callable[[Array, Array], Array]
    record: Callable[[Sequence[Array]], Array]
    derived: bool
    outer: bool
    struct: ShapedArray
    gradient: Callable[[Array, Array, Array], Array] | None = None


class Split(NamedTuple):
    """A scalar function, cut at its contractions.

    Attributes:
        contractions: The leaves that enter through one product.
        rest: Numbers of the other leaves.
        with_factors: Like :meth:`scalar`. It also returns the factor of each derived contraction
            from the same evaluation (``None`` for the others).
    """

    contractions: tuple[Contraction, ...]
    rest: tuple[int, ...]
    with_factors: Callable[..., tuple[Array, list[Array | None]]]

    def scalar(self, *arguments: PyTree) -> Array:
        """``(shifts, rest values, all leaves, example leaves) -> scalar``.

        The shifts are added to the products.
        """
        return self.with_factors(*arguments)[0]


def split_scalar(
    scalar: Callable[[PyTree, PyTree], Array], point: PyTree, example: PyTree, layers: bool = False,
    own: int | None = None,
) -> Split:  # fmt: skip
    """Cuts a scalar at the single products of its parameters with the record.

    ``point`` and ``example`` may be shapes. With ``layers``, a factor may depend on other
    parameters, and convolutions count. With ``own``, the record is only the first leaves of the
    example, this many. The others, such as an outcome that it could have had, are in no factor.

    Returns:
        The split, without contractions if none is recognised.

    Example:
        >>> split = split_scalar(lambda w, x: jnp.tanh(x @ w), jnp.ones(3), jnp.ones(3))
        >>> len(split.contractions)
        1
    """
    program = trace_scalar(scalar, point, example)
    # The program is read, not the model's source: a model may write X @ w, einsum or vmap of a dot.
    by_op: dict[int, Contraction] = {}
    for leaf in range(len(program.point)):
        if (found := _contraction(program, leaf, layers, own)) is not None:
            # Two leaves may meet in one product, which is linear in one of them at a time. The
            # other leaf joins `rest`.
            by_op.setdefault(found.op, found)
    contractions, cuts = tuple(by_op.values()), {op: number for number, op in enumerate(by_op)}
    kept = {contraction.leaf for contraction in contractions}
    rest = tuple(leaf for leaf in range(len(program.point)) if leaf not in kept)

    def shifted(
        shifts: PyTree, rest_values: PyTree, leaves: PyTree, example_leaves: PyTree
    ) -> tuple[Array, list[Array | None]]:
        values = list(leaves)
        for leaf, value in zip(rest, rest_values, strict=True):
            values[leaf] = value
        inputs = (*zip(program.point, values, strict=True),
                  *zip(program.example, example_leaves, strict=True))  # fmt: skip
        # The gradient with respect to a shift of 0 is the slope r at that product.
        environment = evaluate(program.ops, dict(inputs), lambda op, value: (
            value + shifts[cuts[op]] if op in cuts else value
        ))  # fmt: skip
        # From this evaluation, since a second one could round a derived factor in another way.
        factors = [environment[c.factor] if c.derived else None for c in contractions]
        return value_of(environment, program.output), factors

    return Split(contractions, rest, shifted)


def _contraction(
    program: ScalarProgram, leaf: int, layers: bool, own: int | None
) -> Contraction | None:
    """Follows a leaf through operations that only move it to one product with the record."""
    alone = _of_the_record(program, own)
    # Only moves may come before the product: arithmetic would add a factor to the norm |r| |x|.
    current, chain = program.point[leaf], []
    while True:
        users = [number for number, op in enumerate(program.ops) if current in op.inputs]
        # With two users the gradient would be a sum of products.
        if len(users) != 1 or program.output == current:
            return None
        op = program.ops[users[0]]
        chain.append(users[0])
        if op.primitive.name == "dot_general":
            return _product(program, leaf, chain, current, alone, layers)
        if op.primitive.name == "conv_general_dilated":
            return _convolution(program, leaf, chain, current) if layers else None
        if not _moves(program, op):
            return None
        (current,) = op.outputs


def _product(
    program: ScalarProgram, leaf: int, chain: list[int], current: int, alone: dict[int, bool],
    layers: bool,
) -> Contraction | None:  # fmt: skip
    op = program.ops[chain[-1]]
    left, right = op.inputs
    others = {left, right} - {current}
    # A product of the leaf with itself is not linear, and one with a constant has no record.
    if left == right or any(isinstance(value, Constant) for value in others):
        return None
    if not layers and others - set(alone):
        return None
    side = 1 if left == current else 0  # the operand with the record
    contracted, batch = op.params["dimension_numbers"]
    shape = program.shapes[op.inputs[side]].shape
    summed = {*contracted[side], *batch[side]}
    # Axes that the operation sums over, or that it runs over in step with the leaf.
    free = math.prod(size for axis, size in enumerate(shape) if axis not in summed)
    out = program.shapes[op.outputs[0]]
    # Axes of the record that stay free would make the gradient a sum over them. In half precision
    # products would be rounded by more than the margin of the clip norm covers.
    numbers = (program.point[leaf], left, right, *op.outputs)
    wide = all(
        jnp.finfo(program.shapes[number].dtype).bits >= 32 for number in numbers
        if jnp.issubdtype(program.shapes[number].dtype, jnp.floating)
    )  # fmt: skip
    if free != 1 or not wide or not jnp.issubdtype(out.dtype, jnp.floating):
        return None
    factor = op.inputs[side]
    # In full precision, because accelerators may round the factors of a product by default.
    *moves, dot = (program.ops[number] for number in chain)
    exact = {"precision": (lax.Precision.HIGHEST, lax.Precision.HIGHEST)}
    functions = _functions(program, leaf, factor, (*moves, dot._replace(params=dot.params | exact)))
    derived = not alone.get(factor, False)
    # With batch axes each entry of the leaf meets some entries of the record only. The norm of the
    # gradient is then not |r| |x|.
    return Contraction(leaf, chain[-1], factor, *functions, derived, not batch[side], out)


def _functions(
    program: ScalarProgram, leaf: int, factor: int, steps: Sequence[Op]
) -> tuple[Callable[[Array, Array], Array], Callable[[Sequence[Array]], Array]]:
    """Returns ``product`` and ``record`` of a contraction, whose product is the last of steps."""
    made = needed(program, factor)

    def product(value: Array, record_value: Array) -> Array:
        inputs = {program.point[leaf]: value, factor: record_value}
        return evaluate(steps, inputs)[steps[-1].outputs[0]]

    def record(example_leaves: Sequence[Array]) -> Array:
        inputs = dict(zip(program.example, example_leaves, strict=True))
        return evaluate(made, inputs)[factor]

    return product, record


def _convolution(
    program: ScalarProgram, leaf: int, chain: list[int], current: int
) -> Contraction | None:
    """The kernel of a convolution without groups or dilated input."""
    op = program.ops[chain[-1]]
    factor, kernel = op.inputs
    # Other kinds would need other patches than `_kernel_gradient` takes.
    groups = op.params["feature_group_count"], op.params["batch_group_count"]
    numbers = program.point[leaf], *op.outputs
    plain = groups == (1, 1) and all(step == 1 for step in op.params["lhs_dilation"])
    wide = all(program.shapes[number].dtype in (jnp.float32, jnp.float64) for number in numbers)
    # The leaf must be the kernel alone: a convolution with itself is not linear.
    apart = kernel == current and kernel != factor
    if not (plain and wide and apart) or isinstance(factor, Constant):
        return None
    moves = tuple(program.ops[number] for number in chain[:-1])

    def moved(value: Array) -> Array:
        inputs = {program.point[leaf]: value}
        return evaluate(moves, inputs)[kernel]

    def gradient(value: Array, factor_value: Array, slope: Array) -> Array:
        # The leaf may be moved before it is the kernel: its gradient is moved back.
        like, pull = jax.vjp(moved, value)
        return pull(_kernel_gradient(op.params, factor_value, slope, like))[0]

    struct = program.shapes[op.outputs[0]]
    # Neither a product nor an outer product: the patches of one record overlap.
    functions = _functions(program, leaf, factor, (*moves, op))
    return Contraction(leaf, chain[-1], factor, *functions, True, False, struct, gradient)


def _kernel_gradient(params: dict[str, Any], x: Array, slope: Array, kernel: Array) -> Array:
    """Sum over places of slope times patch, as a product of matrices.

    Under ``vmap`` JAX's own gradient would be a convolution with a group for each record.
    """
    numbers = params["dimension_numbers"]
    edges = [(low, high, 0) for low, high in params["padding"]]
    x = lax.pad(
        x.transpose(numbers.lhs_spec), jnp.zeros((), x.dtype), [(0, 0, 0), (0, 0, 0), *edges]
    )
    slope = slope.transpose(numbers.out_spec)
    kernel_shape = kernel.transpose(numbers.rhs_spec).shape
    strides, places = params["window_strides"], slope.shape[2:]

    # For each entry of the kernel, the entries of the input that it is multiplied with.
    def patch(offset: tuple[int, ...]) -> Array:
        start = [at * step for at, step in zip(offset, params["rhs_dilation"], strict=True)]
        stop = [a + (n - 1) * s + 1 for a, n, s in zip(start, places, strides, strict=True)]
        return lax.slice(x, (0, 0, *start), (*x.shape[:2], *stop), (1, 1, *strides))

    offsets = itertools.product(*(range(size) for size in kernel_shape[2:]))
    patches = jnp.stack([patch(offset) for offset in offsets])  # (offsets, 1, inputs, places)
    patches = patches.reshape(*patches.shape[:3], -1)
    flat = slope.reshape(*slope.shape[:2], -1)
    exact = lax.Precision.HIGHEST
    found = jnp.einsum("knip,nop->oik", patches, flat, precision=exact).reshape(kernel_shape)
    return found.transpose([numbers.rhs_spec.index(axis) for axis in range(found.ndim)])


def _of_the_record(program: ScalarProgram, first: int | None) -> dict[int, bool]:
    """Values that depend on the record alone -> whether they are just its entries, moved."""
    alone = dict.fromkeys(program.example[:first], True)
    # Values from constants alone do not make a factor depend on more than the record: x * scale.
    public: set[int] = set()
    for op in program.ops:
        own = [number for number in op.inputs if not isinstance(number, Constant)]
        own = [number for number in own if number not in public]
        if not own:
            public |= set(op.outputs)
        elif all(number in alone for number in own):
            moved = _moves(program, op) and alone[own[0]]
            alone |= dict.fromkeys(op.outputs, moved)
    return alone


def _moves(program: ScalarProgram, op: Op) -> bool:
    """Whether an operation has one input and keeps each of its entries once."""
    if len(op.inputs) != 1 or len(op.outputs) != 1 or isinstance(op.inputs[0], Constant):
        return False
    source, target = program.shapes[op.inputs[0]], program.shapes[op.outputs[0]]
    if op.primitive.name == "convert_element_type":
        # A cast to half precision rounds by more than the margin of the clip norm covers.
        return jnp.issubdtype(target.dtype, jnp.floating) and jnp.finfo(target.dtype).bits >= 32
    # The same number of entries: an operation that repeats or drops entries changes the norm.
    return op.primitive.name in MOVES and math.prod(source.shape) == math.prod(target.shape)
