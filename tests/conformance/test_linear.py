"""A declared product with the record changes nothing but the way to the sum."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from gaussian import gaussian
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoDiagonalNormal

from numpyro_dp import DPSVI, FullBatch, aligned, linear, vanilla
from numpyro_dp.model.frontend import Frontend
from numpyro_dp.sums.bounded import bounded_sum
from numpyro_dp.sums.factored import record_lengths

D, N = 3, 12
X = jax.random.normal(jax.random.key(0), (N, D))
Y = (X[:, 0] > 0).astype(float)


def model(x, y):
    """No product that tracing could find."""
    w = numpyro.sample("w", dist.Normal(0, 1).expand([D]).to_event(1))
    bias = numpyro.sample("bias", dist.Normal(0, 1))
    noise = numpyro.param("noise", 0.7, constraint=dist.constraints.positive)
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Normal(jnp.sum(x * w, -1) + bias, noise), obs=y)


def features(x, y):
    return x[0]


@pytest.fixture(scope="module")
def prepared() -> Any:
    svi = SVI(model, AutoDiagonalNormal(model), optax.adam(0.1), Trace_ELBO())
    frontend = Frontend(model, svi.guide, svi, {}, None)
    found = frontend.prepare(frontend.structure((X, Y), {}), jax.random.key(1), (X, Y), {}, None)
    return found.problem, svi.optim.get_params(found.optim_state)


@pytest.mark.extended
@pytest.mark.parametrize("build", [aligned, vanilla], ids=["aligned", "vanilla"])
def test_the_sum_is_the_same(prepared: Any, build: Any) -> None:
    problem, params = prepared
    sums = []
    for estimator in (build()(problem), linear(build(), {"w": features})(problem)):
        public = estimator.prepare(jax.random.key(2), params)
        lengths = record_lengths(estimator, public, (X, Y))
        mask = jnp.arange(N) != 4
        sums.append(bounded_sum(estimator, gaussian(0.8, 0.0), public, (X, Y), mask, lengths))
    assert len(lengths) == 1  # of the declared one; the plain model has none
    for name in sums[0]:
        np.testing.assert_allclose(sums[1][name], sums[0][name], rtol=1e-5, atol=1e-5)


def driver(declared: Any, **changes: Any) -> DPSVI:
    return DPSVI(
        model, AutoDiagonalNormal(model), optax.adam(0.1), estimator=linear(aligned(), declared),
        clip_norm=1.0, sampler=FullBatch(), noise_multiplier=1.0, **changes,
    )  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize(
    ("declared", "error", "parts"),
    [
        (
            {"w": lambda x, y: x[0] ** 2},
            ValueError,
            ["'w' only through", "no multiple", "linear()"],
        ),
        ({"w": lambda x, y: x[0, :2]}, ValueError, ["shape (3,) of the site", "X[0]"]),
        ({"v": features}, ValueError, ["['w', 'bias']", "'v'"]),
    ],
    ids=["wrong features", "wrong shape", "no site"],
)
def test_a_wrong_declaration_is_refused(declared: Any, error: Any, parts: Any) -> None:
    with pytest.raises(error) as caught:
        driver(declared).init(jax.random.key(0), X, Y)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.full
def test_a_right_declaration_runs() -> None:
    result = driver({"w": features}).run(jax.random.key(0), 3, X, Y, progress_bar=False)
    assert np.isfinite(result.params["auto_loc"]).all()


@pytest.mark.full
def test_several_draws_are_refused() -> None:
    with pytest.raises(ValueError, match="num_particles=2"):
        driver({"w": features}, loss=Trace_ELBO(num_particles=2)).init(jax.random.key(0), X, Y)


@pytest.mark.full
def test_what_cannot_be_verified_is_refused() -> None:
    def silent(x, y):
        w = numpyro.sample("w", dist.Normal(0, 1).expand([D]).to_event(1))
        with numpyro.plate("rows", x.shape[0]):
            numpyro.factor("f", jnp.where(y == 0, -((x * w).sum(-1) ** 2), 0.0))

    svi = DPSVI(
        silent, AutoDiagonalNormal(silent), optax.adam(0.1),
        estimator=linear(aligned(), {"w": features}), clip_norm=1.0, sampler=FullBatch(),
        noise_multiplier=1.0,
    )  # fmt: skip
    with pytest.raises(ValueError, match="cannot be verified"):
        svi.init(jax.random.key(0), X, Y.astype(int))
