r"""The Fisher information of Gaussian guides, in closed form.

For :math:`q = N(m, LL^\top)` and a change :math:`(dm, dL)` with :math:`\Phi = L^{-1}dL`, the Fisher
information is

.. math:: |L^{-1} dm|^2 + \sum_{i>j}\Phi_{ij}^2 + 2\sum_i \Phi_{ii}^2.

Therefore a gradient :math:`(h_m, H)` with respect to :math:`(m, L)` has the natural direction

.. math:: LL^\top h_m, \qquad L\,(D^{-1} \circ \mathrm{tril}(L^\top H)),

with :math:`D` equal to two on the diagonal and one below it. For a mean-field guide these are
:math:`\sigma^2 h_m` and :math:`\tfrac12 \sigma^2 h_\sigma`. The inverse of the guide's own
transform :math:`T` maps directions to the optimiser's unconstrained coordinates.

Reference:
    Jälkö et al. (2024), DPVIm, Eqs. 13-16, for the mean-field guide; Amari (1998), Neural
    Computation 10, for natural gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from numpyro.distributions import biject_to
from numpyro.distributions.constraints import Constraint
from numpyro.infer import autoguide

from numpyro_dp._compat import latent_sites, unpack_latent
from numpyro_dp.core import PyTree, Values
from numpyro_dp.model.public import UnsupportedModelError, own_constants
from numpyro_dp.model.variational import VariationalProblem, coordinate_sums, guide_kind

_HIGHEST = lax.Precision.HIGHEST


def _same(values: Values, given: PyTree) -> PyTree:
    return given


class Coordinates(NamedTuple):
    """Linear maps into the coordinates of a release and back, at the constrained ``values``.

    Attributes:
        to: ``(values, gradient) -> release``. The gradient is with respect to the packed
            constrained parameters, or to the latents.
        back: ``(values, release) ->`` direction in unconstrained coordinates, or the gradient with
            respect to the latents.
        frame: ``(values, latents) -> latents``. Each of the new coordinates moves one entry of the
            release for each parameter.
        entries: ``(values, packed) -> release``, for the gradient with a 1 in every coordinate of
            ``frame``. ``packed`` belongs to a gradient with a 1 in every coordinate of the draw.
    """

    to: Callable[[Values, PyTree], PyTree]
    back: Callable[[Values, PyTree], PyTree]
    frame: Callable[[Values, PyTree], PyTree] = _same
    entries: Callable[[Values, Values], Values] = _same


class Geometry(NamedTuple):
    """Coordinates of the gradients of a guide.

    Gradients with respect to the constrained parameters of the guide are dicts. The gradient for a
    triangular matrix is a vector of its entries on and below the diagonal.

    Attributes:
        pack: Constrained parameters -> the same without entries that are always zero.
        unpack: The inverse of ``pack``.
        sums: For each parameter, sums a packed array over the entries of each coordinate of
            the draw (see :meth:`~.variational.VariationalProblem.coordinate_sums`).
        constrained: Gradients with respect to the constrained parameters.
        natural: Natural gradients. For a mean-field guide with respect to the unconstrained
            parameters, for a full-rank guide :math:`L^{-1} dm` and the entries of
            :math:`L^{-1} dL`.
        mean: Natural gradients of the mean, for gradients with respect to the latents.
    """

    pack: Callable[[Values], Values]
    unpack: Callable[[Values], Values]
    sums: dict[str, Callable[[Array], PyTree]]
    constrained: Coordinates
    natural: Coordinates
    mean: Coordinates


def gaussian_geometry(problem: VariationalProblem, method: str) -> Geometry:
    """Returns the geometry of a problem's guide.

    Args:
        problem: Model and guide.
        method: Name of the estimator, for the error message.

    Raises:
        UnsupportedModelError: If the guide is not a Gaussian with a known Fisher information, or
            shares a parameter with the model.
    """
    auto = problem.guide.auto
    shared = sorted(problem.guide_params & set(problem.record_params))
    if shared:
        raise UnsupportedModelError(
            f"Guide and model share the parameter {shared[0]!r}, but {method} needs the Fisher "
            "information of the guide alone. Give the guide its own parameter, or use aligned() "
            "or vanilla()."
        )
    kind = guide_kind(auto)
    if kind in (autoguide.AutoDiagonalNormal, autoguide.AutoNormal):
        return _mean_field(auto, joint=kind is autoguide.AutoDiagonalNormal)
    if kind is autoguide.AutoMultivariateNormal:
        return _full_rank(auto)
    name = "a hand-written guide" if auto is None else type(auto).__name__
    raise UnsupportedModelError(
        f"{method} needs a guide with a known Fisher information, got {name}. Use "
        "AutoDiagonalNormal, AutoNormal or AutoMultivariateNormal. For any other guide use "
        "aligned() or vanilla()."
    )


def _mean_field(auto: Any, joint: bool) -> Geometry:
    """Mean-field guide, with a loc and a scale for each site, or for the ``joint`` flat vector."""
    sites = {None: auto.prefix} if joint else {s: f"{s}_{auto.prefix}" for s in latent_sites(auto)}
    names: dict[Any, tuple[str, str]] = {
        site: (f"{name}_loc", f"{name}_scale") for site, name in sites.items()
    }
    scales, constraint = [scale for _, scale in names.values()], auto.scale_constraint

    def by_site(values: Values) -> dict[str, Array]:
        if joint:
            return unpack_latent(auto, values[scales[0]])
        return {site: values[scale] for site, (_, scale) in names.items()}

    def to_unconstrained(values: Values, packed: Values) -> Values:
        return packed | {
            name: _pull(constraint, values[name], packed[name]) for name in scales if name in packed
        }

    def local(values: Values, packed: Values) -> Values:
        result = dict(packed)
        for loc, scale in names.values():
            variance = jnp.square(values[scale])
            result[loc] = variance * packed[loc]
            result[scale] = _push(constraint, values[scale], variance / 2 * packed[scale])
        return result

    def mean_signal(values: Values, latents: PyTree) -> PyTree:
        return jax.tree.map(lambda s, z: jnp.square(s) * z, by_site(values), dict(latents))

    def mean_gradient(values: Values, latents: PyTree) -> PyTree:
        return jax.tree.map(lambda s, z: z / jnp.square(s), by_site(values), dict(latents))

    sums = coordinate_sums(auto) or {}
    natural = Coordinates(local, _same, entries=local)
    mean = Coordinates(mean_signal, mean_gradient)
    return Geometry(dict, dict, sums, Coordinates(_same, to_unconstrained), natural, mean)


def _full_rank(auto: Any) -> Geometry:
    """Cholesky guide: loc and the lower triangular factor of the covariance."""
    dim, constraint = auto.latent_dim, auto.scale_tril_constraint
    loc, tril = f"{auto.prefix}_loc", f"{auto.prefix}_scale_tril"
    # Unsigned, because JAX tests signed indices for negative values and stores a table for that.
    rows, columns = own_constants(*np.asarray(np.tril_indices(dim), np.uint32))
    (weights,) = own_constants(np.where(rows == columns, 0.5, 1.0))

    def square(vector: Array) -> Array:
        return jnp.zeros((dim, dim), vector.dtype).at[rows, columns].set(vector)

    def pack(values: Values) -> Values:
        return values | {tril: values[tril][rows, columns]}

    def unpack(packed: Values) -> Values:
        return packed | {tril: square(packed[tril])}

    def flat(latents: PyTree) -> Array:
        split = functools.partial(unpack_latent, auto)
        dtype = jnp.result_type(*jax.tree.leaves(latents))
        _, transpose = jax.vjp(split, jnp.zeros(dim, dtype))
        return transpose(dict(latents))[0]

    def to_unconstrained(values: Values, packed: Values) -> Values:
        return packed | {tril: _pull(constraint, values[tril], square(packed[tril]))}

    def local(values: Values, packed: Values) -> Values:
        factor = values[tril]
        relative = _product(factor.T, square(packed[tril]))[rows, columns]
        return packed | {
            loc: _product(factor.T, packed[loc]),
            tril: weights.astype(relative.dtype) * relative,
        }

    def from_local(values: Values, given: Values) -> Values:
        factor = values[tril]
        return given | {
            loc: _product(factor, given[loc]),
            tril: _push(constraint, factor, _product(factor, square(given[tril]))),
        }

    def local_entries(values: Values, packed: Values) -> Values:
        # With H = tril(g e^T), (L^T H)_ij = (L^T g)_i e_j on and below the diagonal.
        return packed | {tril: weights.astype(packed[tril].dtype) * packed[tril]}

    def frame(values: Values, latents: PyTree) -> PyTree:
        return unpack_latent(auto, _product(values[tril].T, flat(latents)))

    def mean_gradient(values: Values, latents: PyTree) -> PyTree:
        solved = jax.scipy.linalg.solve_triangular(values[tril], flat(latents), trans=1, lower=True)
        return unpack_latent(auto, solved)

    sums = {
        loc: functools.partial(unpack_latent, auto),
        tril: lambda v: unpack_latent(auto, jax.ops.segment_sum(v, rows, num_segments=dim)),
    }
    constrained = Coordinates(_same, to_unconstrained)
    natural = Coordinates(local, from_local, frame, local_entries)
    return Geometry(pack, unpack, sums, constrained, natural, Coordinates(frame, mean_gradient))


def _pull(constraint: Constraint, value: Array, gradient: Array) -> Array:
    """Gradient with respect to a constrained value -> with respect to the unconstrained one."""
    transform = biject_to(constraint)
    _, vjp = jax.vjp(transform, transform.inv(value))
    return vjp(gradient)[0]


def _push(constraint: Constraint, value: Array, direction: Array) -> Array:
    """Direction at a constrained value -> at the unconstrained one."""
    return jax.jvp(biject_to(constraint).inv, (value,), (direction,))[1]


def _product(left: Array, right: Array) -> Array:
    return jnp.matmul(left, right, precision=_HIGHEST)
