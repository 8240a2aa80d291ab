"""Latent sites of a record: drawn by a shared encoder, or summed out."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from flat import dpsvi
from gaussian import gaussian
from hostile import listed_guides
from jax.flatten_util import ravel_pytree
from jax.scipy.special import logsumexp
from numpyro import handlers
from numpyro.infer import SVI, Predictive, Trace_ELBO
from numpyro.infer.autoguide import AutoDiagonalNormal, AutoNormal

from numpyro_dp import DPSVI, UnsupportedModelError
from numpyro_dp.core import Released
from numpyro_dp.estimators import aligned, vanilla
from numpyro_dp.model.frontend import Call, Frontend, GivenModel
from numpyro_dp.model.variational import likelihood_key
from numpyro_dp.samplers import Poisson
from numpyro_dp.sums.bounded import bounded_sum

N, D = 40, 3
KEY = jax.random.key(3)
X = np.asarray(jax.random.normal(jax.random.key(0), (N, D))) + np.arange(N)[:, None] % 2


def decoder(x, shift=lambda code: 0.0):
    """Probabilistic PCA with a global mean, a weight parameter and one local latent."""
    mean = numpyro.sample("mean", dist.Normal(0, 1).expand([D]).to_event(1))
    weight = numpyro.param("weight", 0.5 * jnp.ones(D))
    with numpyro.plate("records", x.shape[0]):
        code = numpyro.sample("code", dist.Normal(0, 1))
        loc = mean + (code - shift(code))[:, None] * weight
        numpyro.sample("x", dist.Normal(loc, 1).to_event(1), obs=x)


def guided(part: Callable[[Any], Any], shift: Callable[[Any], Any] = lambda x: 0.0) -> Any:
    """A guide of the decoder. ``part`` draws the codes."""

    def guide(x):
        loc = numpyro.param("loc", jnp.zeros(D)) + shift(x)
        numpyro.sample("mean", dist.Normal(loc, 0.1).to_event(1))
        part(x)

    return guide


def local(x):
    slope = numpyro.param("slope", 0.3 * jnp.ones(D))
    width = numpyro.param("width", 0.5, constraint=dist.constraints.positive)
    with numpyro.plate("records", x.shape[0]):
        return {"code": numpyro.sample("code", dist.Normal(x @ slope, width))}


encoder = guided(local)


def in_two_parts(part: Callable[..., Any] = local, model: Any = decoder) -> Any:
    return listed_guides(model, AutoDiagonalNormal(handlers.block(model, hide=["code"])), part)


def mixture(x, by_hand=False):
    means = numpyro.sample("means", dist.Normal(0, 2).expand([2, D]).to_event(2))
    share = numpyro.sample("share", dist.Beta(2, 2))
    with numpyro.plate("records", x.shape[0]):
        if by_hand:
            parts = dist.Normal(means, 1).to_event(1).log_prob(x[:, None])
            shares = jnp.log(jnp.stack([1 - share, share]))
            numpyro.factor("x", logsumexp(parts + shares, axis=1))
        else:
            which = numpyro.sample("which", dist.Bernoulli(share))
            numpyro.sample("x", dist.Normal(means[which], 1).to_event(1), obs=x)


def nested(x):
    """Two discrete sites, one of them with an entry per column."""
    means = numpyro.sample("means", dist.Normal(0, 2).expand([3]).to_event(1))
    with numpyro.plate("records", x.shape[0], dim=-2):
        shift = numpyro.sample("shift", dist.Bernoulli(0.3))
        with numpyro.plate("columns", D, dim=-1):
            which = numpyro.sample("which", dist.Categorical(jnp.array([0.2, 0.3, 0.5])))
            numpyro.sample("x", dist.Normal(means[which] + shift, 1), obs=x)


def driver(model: Any, guide: Any, **changes: Any) -> DPSVI:
    return dpsvi(model, guide, optax.adam(0.05), **changes)


def problem_of(model: Any, guide: Any, loss: Any = None) -> tuple[Any, Any]:
    svi = SVI(model, guide, optax.adam(0.05), loss or Trace_ELBO())
    frontend = Frontend(GivenModel(model, {}, "records"), svi)
    prepared = frontend.prepare(frontend.given.structure((X,), {}), KEY, Call((X,), {}))
    return prepared.problem, svi.optim.get_params(prepared.optim_state)


def gradient(build: Any, problem: Any, params: Any) -> Any:
    """The estimator's gradient without clip and noise, over all records."""
    estimator = build()(problem)
    public = estimator.prepare(KEY, params)
    rows = problem.rows((X,), {})
    total = bounded_sum(estimator, gaussian(jnp.inf, 0.0), public, rows.arrays, jnp.ones(N, bool))
    return estimator.pull_back(public, Released(total, 0.0))


@pytest.mark.parametrize("guide", [
    pytest.param(lambda: encoder, id="by hand", marks=pytest.mark.extended),
    pytest.param(in_two_parts, id="list", marks=pytest.mark.extended),
])  # fmt: skip
def test_a_record_s_part_is_its_evidence_lower_bound(guide: Any) -> None:
    problem, params = problem_of(decoder, guide())
    assert set(problem.record_params) == {"weight", "slope", "width"}
    assert not problem.guide_params & {"weight", "slope", "width"}
    latents, _ = problem.draw(params, KEY)
    arrays = problem.rows((X,), {}).arrays

    def by_hand(key: Any) -> Any:
        values = problem.constrain(params)
        found = jax.vmap(lambda *example: problem.log_likelihood(latents, params, example, key))(
            *arrays[:-1], arrays[-1]
        )
        # The bound over the noise has a closed form: a Gaussian with a Gaussian encoder.
        code, width = jnp.asarray(X) @ values["slope"], values["width"]
        rest = X - latents["mean"] if "mean" in latents else X
        weight = values["weight"]
        expected = -0.5 * jnp.sum((rest - code[:, None] * weight) ** 2, 1)
        expected += -0.5 * width**2 * weight @ weight - D / 2 * jnp.log(2 * jnp.pi)
        expected += -0.5 * (code**2 + width**2) + 0.5 + jnp.log(width)
        return found, expected

    draws = jax.vmap(lambda key: by_hand(key)[0])(jax.random.split(jax.random.key(8), 4_000))
    expected = by_hand(KEY)[1]
    error = draws.std(0) / np.sqrt(len(draws))
    assert np.all(np.abs(draws.mean(0) - expected) < 5 * error)
    # Noise of different records is independent.
    residual = np.asarray((draws - draws.mean(0)) / draws.std(0))
    correlation = residual.T @ residual / len(draws) - np.eye(N)
    assert np.abs(correlation).max() < 6 / np.sqrt(len(draws))


@pytest.mark.extended
@pytest.mark.parametrize("build", [aligned, vanilla], ids=["aligned", "vanilla"])
def test_the_gradient_is_that_of_the_whole_bound(build: Any) -> None:
    problem, params = problem_of(decoder, encoder)

    def loss(params: Any) -> Any:
        latents, entropy = problem.draw(params, KEY)
        key = likelihood_key(KEY)
        arrays = problem.rows((X,), {}).arrays
        parts = jax.vmap(lambda *row: problem.log_likelihood(latents, params, row, key))(*arrays)
        return -(parts.sum() + problem.log_prior(latents, params) + entropy)

    expected, found = jax.grad(loss)(params), gradient(build, problem, params)
    assert set(found) == set(expected) == {"loc", "slope", "weight", "width"}
    for name in expected:
        np.testing.assert_allclose(found[name], expected[name], rtol=2e-4, atol=2e-4)


@pytest.mark.extended
def test_summing_out_is_the_mixture() -> None:
    problem, params = problem_of(mixture, AutoDiagonalNormal(mixture))
    by_hand = functools.partial(mixture, by_hand=True)
    other, other_params = problem_of(by_hand, AutoDiagonalNormal(by_hand))
    assert problem.rows((X,), {}).arrays[-1].shape == (N, D)  # no record is numbered
    np.testing.assert_array_equal(ravel_pytree(params)[0], ravel_pytree(other_params)[0])
    found, expected = (gradient(aligned, each, params) for each in (problem, other))
    for name in expected:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-4, atol=1e-4)


@pytest.mark.extended
def test_every_combination_is_summed() -> None:
    problem, params = problem_of(nested, AutoNormal(nested))
    assert {k: v.shape for k, v in problem.model.structure.summed.items()} == {
        "shift": (54, 1), "which": (54, 3),
    }  # fmt: skip
    latents, _ = problem.draw(params, KEY)
    found = problem.log_likelihood(latents, params, (jnp.asarray(X[0]),), KEY)
    log = np.log(np.array([0.2, 0.3, 0.5]))
    mean, parts = np.asarray(latents["means"]), []
    for shift, share in ((0, 0.7), (1, 0.3)):
        each = log + np.asarray(dist.Normal(mean + shift, 1).log_prob(X[0][:, None]))
        parts.append(np.log(share) + logsumexp(each, axis=1).sum())
    np.testing.assert_allclose(found, logsumexp(np.array(parts)), rtol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize(
    ("model", "guide"), [(decoder, lambda: encoder), (mixture, lambda: AutoNormal(mixture))],
    ids=["encoder", "mixture"],
)  # fmt: skip
def test_a_record_moves_the_sum_by_the_clip_norm_at_most(model: Any, guide: Any) -> None:
    problem, params = problem_of(model, guide())
    rows = problem.rows((X * np.where(np.arange(N) % 5, 1, 1e6)[:, None],), {})
    for build in (aligned, vanilla):
        estimator = build()(problem)
        public = estimator.prepare(KEY, params)

        @jax.jit
        def total(mask: Any, estimator: Any = estimator, public: Any = public) -> Any:
            found = bounded_sum(estimator, gaussian(0.5, 1.0), public, rows.arrays, mask)
            return ravel_pytree(found)[0]

        whole = np.asarray(total(jnp.ones(N, bool)), np.float64)
        moves = [np.linalg.norm(whole - total(jnp.arange(N) != i)) for i in range(0, N, 4)]
        assert max(moves) <= 0.5
        assert max(moves) > 0.25  # it is not all zero


@pytest.mark.extended
@pytest.mark.parametrize(
    "loss",
    [pytest.param(Trace_ELBO(), marks=pytest.mark.extended), Trace_ELBO(num_particles=3)],
    ids=["1", "3"],
)
def test_an_encoder_learns(loss: Any) -> None:
    noise = jax.random.normal(jax.random.key(9), (2000, D))
    data = np.asarray(2 * jax.random.normal(KEY, (2000, 1)) + noise)
    svi = driver(decoder, encoder, loss=loss, clip_norm=20.0, noise_multiplier=0.5)
    result = svi.run(jax.random.key(0), 400, data, progress_bar=False)
    # The records have the weight 2 in every column, and the posterior of a code is linear.
    np.testing.assert_allclose(result.params["weight"], 2, rtol=0.1)
    np.testing.assert_allclose(result.params["slope"], 2 / 13, rtol=0.2)
    np.testing.assert_allclose(result.params["width"], 1 / np.sqrt(13), rtol=0.2)


def normal_at(z: Any, share: Any) -> Any:
    return dist.Normal(z[:, None], 1)


def of_site(site: Any, outcome: Any = normal_at, outside: Any = None, scale: Any = None) -> Any:
    """A model with a site of each record, whose outcome may be read outside or scaled."""

    def model(x):
        share = numpyro.sample("share", dist.Beta(2, 2))
        with numpyro.plate("records", x.shape[0]), handlers.scale(scale=scale(x) if scale else 1.0):
            found = numpyro.sample("which", site(x, share))
            numpyro.sample("x", outcome(found, share).expand([x.shape[0], D]).to_event(1), obs=x)
        if outside:
            numpyro.sample("top", dist.Normal(outside(found), 1))

    return model


def bernoulli(x, share):
    return dist.Bernoulli(share)


def too_many_in_plates(x):
    share = numpyro.sample("share", dist.Beta(2, 2))
    with numpyro.plate("records", x.shape[0], dim=-2), numpyro.plate("entries", 13, dim=-1):
        which = numpyro.sample("which", dist.Bernoulli(share))
        numpyro.sample("x", dist.Normal(which.sum(-1, keepdims=True), 1), obs=x[:, :1])


def code_of(fn: Callable[[Any, Any], Any]) -> Callable[[Any], Any]:
    """A part of a guide that draws the code from ``fn(x, index)``."""

    def part(x):
        with numpyro.plate("records", x.shape[0]) as index:
            return {"code": numpyro.sample("code", fn(x, index))}

    return part


def draws_outside_the_plate(x):
    numpyro.sample("code", dist.Normal(numpyro.param("m", 0.0), 1).expand([x.shape[0]]))


def auxiliary(x):
    kind = {"is_auxiliary": True}
    more = numpyro.sample("more", dist.Normal(numpyro.param("m", 0.0), 1), infer=kind)
    numpyro.sample("mean", dist.Normal(numpyro.param("loc", jnp.zeros(D)) + more, 1).to_event(1))
    code_of(lambda x, _: dist.Normal(x @ numpyro.param("slope", jnp.ones(D)) + more, 1))(x)


HELD = jnp.asarray(X)
MIXES = ["depends on the number of records", "mixes records"]
REFUSED: dict[str, tuple[Any, Any, list[str]]] = {
    "no encoder": (decoder, AutoNormal,
        ["'code'", "AutoNormal would hold one parameter per record", "encoder"]),
    "scaled": (of_site(bernoulli, scale=lambda x: 0.5), AutoNormal,
        ["Site 'x' is scaled", "numpyro.factor"]),
    "scaled by record": (of_site(bernoulli, scale=lambda x: jnp.abs(x[:, 0])), AutoNormal,
        ["is scaled", "numpyro.factor"]),
    "unlisted": (
        of_site(
            lambda x, share: dist.Multinomial(3, jnp.stack([share, 1 - share])),
            lambda z, _: dist.Normal(z[:, :1], 1),
        ), AutoNormal, ["'which' is discrete", "numpyro.factor"],
    ),
    "too many in plates": (too_many_in_plates, AutoNormal, ["8192 combinations", "at most 4096"]),
    "read outside": (of_site(lambda x, _: dist.Normal(0, 1), outside=jnp.mean), AutoNormal,
        ["'top'", "outside the data plate", "'which'"]),
    "a count that is read outside": (of_site(bernoulli, outside=jnp.sum), AutoNormal,
        ["'top'", "outside the data plate", "'which'"]),
    "centred codes": (lambda x: decoder(x, jnp.mean), encoder, MIXES),
    "centred groups": (
        of_site(bernoulli, lambda z, _: dist.Normal((z - z.mean(0))[:, None], 1)), AutoNormal, MIXES
    ),
    "an impossible value": (
        of_site(bernoulli, lambda z, share: dist.Poisson(share * z[:, None])), AutoNormal,
        ["finite gradient", "1e-6"],
    ),
    "trials by record": (
        of_site(lambda x, share: dist.Binomial(x[:, 0].astype(int), share)), AutoNormal,
        ["'which'", "depends on the records"],
    ),
    "drawn outside the plate": (decoder, guided(draws_outside_the_plate),
        ["'code'", "outside plate 'records'"]),
    "one parameter each": (
        decoder,
        guided(code_of(lambda _, at: dist.Normal(numpyro.param("rows", jnp.zeros(N))[at], 1))),
        ["'rows'", "each of the 40 records"],
    ),
    "a guide that holds records": (
        decoder,
        in_two_parts(code_of(
            lambda _, index: dist.Normal(HELD[index] @ numpyro.param("slope", jnp.ones(D)), 1)
        )), ["guide holds an array of shape (40, 3)"],
    ),
    "a guide that centres": (decoder, guided(lambda x: local(x - x.mean(0))),
        ["'code'", "guide gets at once", "mixes records"]),
    "an auxiliary site": (decoder, auxiliary, ["'more'", "redraw it"]),
    "a guide that leaks": (decoder, guided(local, lambda x: x.mean(0)),
        ["Guide site 'mean' depends on the records"]),
    "a discrete guide": (
        decoder, guided(code_of(lambda *_: dist.Poisson(jnp.exp(numpyro.param("m", 0.0))))),
        ["'code'", "Poisson", "reparameterised"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_record_s_latent_that_cannot_be_private(name: str) -> None:
    model, guide, parts = REFUSED[name]
    with pytest.raises(UnsupportedModelError) as error:
        driver(model, guide, data_plate="records").init(jax.random.key(0), X)
    for part in parts:
        assert part in str(error.value)


@pytest.mark.full
def test_a_masked_entry_is_counted_once() -> None:
    def partly(x):
        share = numpyro.sample("share", dist.Beta(2, 2))
        with numpyro.plate("records", x.shape[0]):
            seen = x[:, 0] > 0
            value = (x[:, 1] > 0).astype(int)
            numpyro.sample("flag", dist.Bernoulli(share), obs=value, obs_mask=seen)

    problem, params = problem_of(partly, AutoNormal(partly))
    latents, _ = problem.draw(params, KEY)
    share = jax.nn.sigmoid(latents["share"])
    for record, expected in ((jnp.array([1.0, 1.0, 0.0]), jnp.log(share)), (-jnp.ones(D), 0.0)):
        found = problem.log_likelihood(latents, params, (record,), KEY)
        np.testing.assert_allclose(found, expected, atol=1e-6)


@pytest.mark.full
def test_static_keywords_reach_every_part_of_a_guide() -> None:
    def model(x, dim):
        mean = numpyro.sample("mean", dist.Normal(0, 1).expand([dim]).to_event(1))
        with numpyro.plate("records", x.shape[0]):
            code = numpyro.sample("code", dist.Normal(0, 1))
            numpyro.sample("x", dist.Normal(mean + code[:, None], 1).to_event(1), obs=x)

    guide = in_two_parts(lambda x, dim: local(x), model)
    driver(model, guide, dim=D).init(jax.random.key(0), X)


@pytest.mark.extended
def test_a_mixture_runs_as_any_model_does() -> None:
    guide = AutoDiagonalNormal(mixture)
    svi = driver(mixture, guide, sampler=Poisson(0.5), num_steps=5)
    result = svi.run(jax.random.key(0), 5, X, progress_bar=False)
    draws = Predictive(mixture, guide=guide, params=result.params, num_samples=4)(KEY, X)
    assert draws["which"].shape == (4, N)
    state = svi.init(jax.random.key(0), X)
    state, _ = jax.jit(svi.update)(state, X)
    assert np.isfinite(ravel_pytree(svi.get_params(state))[0]).all()
    swept = svi.sweep(jax.random.split(KEY, 2), 5, X, noise_multiplier=[1.0])
    assert swept.params["auto_loc"].shape == (2, 2 * D + 1)
