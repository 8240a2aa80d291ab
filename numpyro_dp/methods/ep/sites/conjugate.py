r"""Sites of conjugate likelihoods, which are members of the family and exact for every cavity.

For a normal family the log likelihood is quadratic, and its derivatives at any point are the site.
For other families :math:`\log p(x \mid z) = \theta\cdot s(z) + c`. Its values at a few public
points z give linear equations for :math:`\theta`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.flatten_util import ravel_pytree

from numpyro_dp.core import Arrays, PyTree
from numpyro_dp.extend import UnsupportedModelError, own_constants
from numpyro_dp.methods.ep.families import Natural, sample
from numpyro_dp.methods.ep.problem import EPProblem, Site, SiteBuilder
from numpyro_dp.methods.normal import cavity_of

_TOLERANCE = 1e-3


def conjugate() -> SiteBuilder:
    """Exact sites, for likelihoods that are conjugate to the family.

    Raises:
        UnsupportedModelError: When the run is prepared, if the likelihood is not conjugate.
    """

    def check(problem: EPProblem) -> None:
        if not is_conjugate(problem):
            raise UnsupportedModelError(
                f"The likelihood is not conjugate to the family {problem.latents.family.name}, but "
                "conjugate() needs this. A check on invented records found it. Use a "
                "normal family with site=quadrature() or importance(), or DPSVI."
            )

    def build(problem: EPProblem) -> Site:
        return _normal_site(problem) if problem.latents.is_normal else _linear_site(problem)

    return SiteBuilder(build, check, reads_likelihood=True)


def is_conjugate(problem: EPProblem) -> bool:
    """Whether the likelihood of each invented record is a member of the family."""
    return holds(problem, (_quadratic if problem.latents.is_normal else _in_statistics)(problem))


def holds(problem: EPProblem, of_record: Callable[[Arrays], bool | None]) -> bool:
    """Whether a test holds for all invented records that can show it. Others give ``None``."""
    found = [of_record(example) for example in problem.invented()]
    return True in found and False not in found


def _normal_site(problem: EPProblem) -> Site:
    def approximate(mean: Array, example: tuple[Array, ...]) -> dict[str, Array]:
        slope = jax.grad(problem.log_likelihood)
        precision = -jax.jacfwd(slope)(mean, example)
        if problem.prior["precision"].ndim < 2:
            precision = jnp.diag(precision)
        return {"linear": slope(mean, example), "precision": precision}

    return Site(lambda _, cavity: cavity_of(cavity).mean, approximate)


def _quadratic(problem: EPProblem) -> Callable[[Arrays], bool | None]:
    """Whether a record's log likelihood is quadratic, ``None`` if this record cannot show it."""

    @jax.jit
    def derivatives(example: PyTree) -> tuple[Array, Array]:
        points = 2 * jax.random.normal(jax.random.key(0), (3, problem.latents.dim))
        log_likelihood = partial(problem.log_likelihood, example=example)
        slopes, found = (jax.vmap(f(log_likelihood)) for f in (jax.grad, jax.hessian))
        return slopes(points), found(points)

    def is_member(example: PyTree) -> bool | None:
        slopes, found = (np.asarray(each, np.float64) for each in derivatives(example))
        if not np.isfinite(found).all() or not np.abs(slopes).max() > 0:
            return None
        off = found[0] - np.diag(np.diag(found[0]))
        scale = max(np.abs(found).max(), 1e-12)
        if problem.prior["precision"].ndim < 2 and np.abs(off).max() > _TOLERANCE * scale:
            return False
        return bool(np.abs(found - found[0]).max() <= _TOLERANCE * scale)

    return is_member


def _linear_site(problem: EPProblem) -> Site:
    points, solve, unravel, _ = _equations(problem)

    def approximate(_: object, example: tuple[Array, ...]) -> dict[str, Array]:
        values = jax.vmap(problem.log_likelihood, in_axes=(0, None))(points, example)
        return unravel((solve @ values)[:-1])

    return Site(lambda *_: None, approximate)


def _equations(problem: EPProblem) -> tuple[PyTree, Array, Callable[[Array], Natural], np.ndarray]:
    """Points z, the pseudo-inverse of their equations, what names its solution, the equations."""
    family = problem.latents.family
    with jax.ensure_compile_time_eval():
        unit, unravel = ravel_pytree(family.unit)
        points = sample(family, jax.random.key(3), problem.prior, (4 * unit.size + 4,))
        statistics = jax.vmap(lambda z: ravel_pytree(family.statistics(z))[0])(points)
    matrix = np.column_stack([np.asarray(statistics, np.float64), np.ones(len(statistics))])
    scale = np.abs(matrix).max(0)
    solve = (np.linalg.pinv(matrix / scale) / scale[:, None]).astype(unit.dtype)
    own_constants(solve, *jax.tree.leaves(points))
    return points, jnp.asarray(solve), unravel, matrix


def _in_statistics(problem: EPProblem) -> Callable[[Arrays], bool | None]:
    """Whether the log likelihood of a record is linear in the statistics of the family."""
    points, solve, _, matrix = _equations(problem)
    likelihoods = jax.jit(jax.vmap(problem.log_likelihood, in_axes=(0, None)))
    fit = matrix @ np.asarray(solve)

    def is_member(example: PyTree) -> bool | None:
        values = np.asarray(likelihoods(points, example))
        if not np.isfinite(values).all() or np.ptp(values) == 0:
            return None
        return bool(np.abs(fit @ values - values).max() <= _TOLERANCE * np.ptp(values))

    return is_member
