"""Without clip and noise, estimators give the ELBO's gradient, or its natural gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from gaussian import gaussian
from jax.flatten_util import ravel_pytree
from numpyro.infer.autoguide import AutoNormal

from numpyro_dp.core import Released
from numpyro_dp.sums.bounded import bounded_sum

from .registry import ESTIMATORS, x64
from .scenarios import bench, by_name, fast_where, rows_for, single

EVERY_GUIDE = tuple(row for row in ESTIMATORS if row.guides is None)
FAST = (
    "diagonal", "multivariate", "lowrank", "iaf", "normal", "delta", "guide_list", "by_hand",
    "simplex_param", "exp",
)  # fmt: skip
FAST_DOUBLE = ("diagonal",)


def relative(found, expected):
    """Largest difference over the largest entry, of trees with equal structure and shapes."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    pairs = list(zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True))
    assert all(a.shape == b.shape and a.dtype == b.dtype for a, b in pairs)
    size = max(float(jnp.max(jnp.abs(b))) for _, b in pairs)
    assert np.isfinite(size) and size > 0.01
    return max(float(jnp.max(jnp.abs(a - b))) for a, b in pairs) / size


def gradient_errors(pieces):
    """Error of each estimator against ``jax.grad`` of NumPyro's loss with the same draw."""
    step_key = jax.random.split(jax.random.key(3))[1]  # what SVI.update hands to the loss
    rows = rows_for(pieces)

    @jax.jit
    def gradients(params, arrays):
        found = {}
        for row in rows:
            estimator = row.build()(pieces.problem)
            mask = jnp.ones(arrays[0].shape[0], bool)
            public = estimator.prepare(step_key, params)
            mechanism = gaussian(np.inf, 0.0)
            total = bounded_sum(estimator, mechanism, public, arrays, mask)
            noisy, _ = mechanism.privatise(jax.random.key(0), total, ())
            found[row.name] = estimator.pull_back(public, Released(noisy, 0.0))
        return found

    expected = pieces.elbo_gradient(step_key)
    found = gradients(pieces.params, pieces.arrays)
    natural = natural_gradient(pieces, expected) if len(rows) > len(EVERY_GUIDE) else None
    return {
        row.name: relative(found[row.name], expected if row.equals_elbo else natural)
        for row in rows
    }


def natural_gradient(pieces, gradient):
    """The gradient times the inverse Fisher information: the Hessian of KL(q || q')."""
    guide, params = pieces.guide, pieces.params
    own = set(pieces.problem.record_params)
    flat, unravel = ravel_pytree({name: params[name] for name in params if name not in own})

    def posterior(flat):
        values = pieces.problem.constrain(params | unravel(flat))
        if isinstance(guide, AutoNormal):
            sites = [(values[f"{s}_auto_loc"], values[f"{s}_auto_scale"]) for s in guide._init_locs]
            columns = zip(*sites, strict=True)
            loc, scale = (jnp.concatenate([jnp.ravel(v) for v in vs]) for vs in columns)
            return dist.Normal(loc, scale)
        return guide.get_posterior(values)

    def divergence(other):
        return jnp.sum(dist.kl_divergence(posterior(flat), posterior(other)))

    fisher = jax.jit(jax.hessian(divergence))(flat)
    rest = {name: gradient[name] for name in gradient if name not in own}
    found = jnp.linalg.solve(fisher, ravel_pytree(rest)[0])
    return gradient | unravel(found)


@pytest.mark.parametrize("name", fast_where(FAST))
def test_gradient_is_the_elbo_gradient(name):
    errors = gradient_errors(single(name))
    assert max(errors.values()) < 1e-5, errors


@pytest.mark.parametrize("name", fast_where(FAST_DOUBLE))
def test_gradient_is_the_elbo_gradient_in_double_precision(name):
    with x64():
        errors = gradient_errors(bench(by_name(name)))
        assert max(errors.values()) < 1e-10, errors
