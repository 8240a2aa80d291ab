"""What an estimator must equal without clip and noise, from NumPyro and autodiff alone."""

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax import lax
from jax.flatten_util import ravel_pytree
from numpyro import handlers
from numpyro.infer.autoguide import AutoNormal
from numpyro.infer.util import log_density

from numpyro_dp.core import Released
from numpyro_dp.estimators import aligned, centred
from numpyro_dp.sums.bounded import bounded_sum
from numpyro_dp.sums.centred_sums import with_rows

__all__ = ["bounded_sum_by_definition", "elbo", "less_simulated", "natural", "path_derivative"]


def bounded_sum_by_definition(estimator, *data, **options):
    """The same sum, one signal at a time."""
    plain = estimator._replace(factored=None)
    if (centring := estimator.centring) is not None:
        each = centring.estimator._replace(factored=None)
        plain = plain._replace(centring=centring._replace(estimator=each))
    return bounded_sum(plain, *data, **options)


def elbo(pieces, key, gradient):
    """The gradient of NumPyro's loss itself."""
    return gradient


def natural(pieces, key, gradient):
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


def less_simulated(pieces, key, gradient):
    """The gradient, less the mean of those whose outcomes the model draws, but for the prior's."""
    estimator = centred(aligned())(pieces.problem)
    if estimator.centring.listed:  # the mean of their scores is 0
        return gradient
    public = estimator.prepare(key, pieces.params)
    seeds = jnp.arange(len(pieces.arrays[0]), dtype=jnp.uint32)
    _, outcomes, probs = with_rows(estimator.centring, public, pieces.arrays, seeds)
    zeros = jax.eval_shape(
        aligned()(pieces.problem).signal, public, tuple(a[0] for a in pieces.arrays)
    )
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), zeros)
    rest = estimator.pull_back(public, Released(zeros, 0.0))  # of prior and guide
    number = len(probs)
    model = pieces.scenario.reference or pieces.scenario.model

    def drawn(j):
        given = {n: jnp.concatenate(y[j]) for n, y in outcomes.items()}
        scenario = pieces.scenario._replace(reference=handlers.substitute(model, given))
        return pieces._replace(scenario=scenario).elbo_gradient(key)

    return jax.tree.map(
        lambda own, prior, *others: own + prior - sum(others) / number,
        gradient, rest, *map(drawn, range(number)),
    )  # fmt: skip


def path_derivative(pieces, key, gradient):
    """The gradient of log q - log p along the draw, the parameters of q held fixed."""
    model = pieces.scenario.reference or pieces.scenario.model
    args, kwargs, number = pieces.args, pieces.kwargs, pieces.scenario.particles

    def loss(params, key):
        values = pieces.problem.constrain(params)
        seed = jax.random.split(key)[1]  # NumPyro splits into the seeds of model and guide
        guide = handlers.substitute(handlers.seed(pieces.guide, seed), data=values)
        trace = handlers.trace(guide).get_trace(*args, **kwargs)
        latents = {name: s["value"] for name, s in trace.items() if s["type"] == "sample"}
        seeded = handlers.seed(model, 0)
        log_p, _ = log_density(seeded, args, kwargs, values | latents)
        fixed = lax.stop_gradient(values) | latents
        log_q, _ = log_density(handlers.seed(pieces.guide, seed), args, kwargs, fixed)
        return log_q - log_p

    def mean(params):
        if number == 1:
            return loss(params, key)
        return jnp.mean(jax.vmap(loss, (None, 0))(params, jax.random.split(key, number)))

    return jax.jit(jax.grad(mean))(pieces.params)
