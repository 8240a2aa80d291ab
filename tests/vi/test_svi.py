"""``DPSVI`` in the place of ``SVI``: code written for one runs with the other."""

from __future__ import annotations

import dataclasses
import pickle
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from flat import grouped
from jax.flatten_util import ravel_pytree
from models import given, slopes
from numpyro.infer import Predictive
from numpyro.infer.autoguide import AutoNormal

from numpyro_dp import DPSVI, BudgetError, PrivacyBudget
from numpyro_dp.estimators import aligned
from numpyro_dp.mechanisms import LossRelease
from numpyro_dp.privacy.plan import PrivacyReport
from numpyro_dp.run.results import PrivateLosses
from numpyro_dp.samplers import FullBatch, Poisson

N = 200
KEY = jax.random.key(3)
X = np.random.default_rng(0).normal(size=(N, 2))
Y = X @ np.array([1.0, -0.5]) + np.random.default_rng(1).normal(size=N)
BUDGET = PrivacyBudget(2.0, 1e-5)
TRACES: list[int] = []


def likelihood(x, w, scale):
    TRACES.append(1)
    return dist.Normal(x @ w, scale)


model = given(likelihood, w=slopes(), scale=dist.HalfNormal(1))


def driver(**changes: Any) -> DPSVI:
    options = dict(
        model=model, guide=AutoNormal(model), optim=optax.adam(0.05), estimator=aligned(),
        clip_norm=2.0, sampler=Poisson(0.2), budget=BUDGET, num_steps=60, secret_key=1,
        repetition=True,
    )  # fmt: skip
    return DPSVI(**grouped(**options | changes))


@pytest.fixture(scope="module")
def svi() -> DPSVI:
    """One private driver for all tests, so that it compiles once."""
    return driver()


@pytest.fixture(scope="module")
def result(svi: DPSVI) -> Any:
    return svi.run(KEY, 60, X, Y, progress_bar=False)


def flat(params: dict[str, Any]) -> np.ndarray:
    return np.asarray(ravel_pytree(params)[0])


# What a run returns.


def same(found: Any, expected: Any, rtol: float = 2e-4, atol: float = 2e-5) -> None:
    """Compares parameters; equal numbers if ``rtol`` is 0."""
    atol = atol if rtol else 0
    np.testing.assert_allclose(flat(found), flat(expected), rtol=rtol, atol=atol)


def test_a_run_learns_stays_float32_and_shows_nothing_sensitive(result: Any) -> None:
    np.testing.assert_allclose(result.params["w_auto_loc"], [1.0, -0.5], atol=0.5)
    assert flat(result.params).dtype == np.float32
    params, state, losses = result[:3]  # the order of SVIRunResult
    assert params is result.params and state is result.state and losses is None
    assert "never publish" in repr(state)
    shown = (repr(state) + repr(result.trace)).replace("keys of noise", "")
    assert not any(word in shown for word in ("key", "Array(", "uint32"))


@pytest.mark.full
def test_the_report_says_what_was_spent(result: Any) -> None:
    privacy = result.privacy
    assert isinstance(privacy, PrivacyReport)
    assert 0.95 * 2 < privacy.epsilon <= 2.0
    assert (privacy.delta, privacy.relation, privacy.num_steps) == (1e-5, "add_or_remove_one", 60)
    assert privacy.accountant
    assert privacy.event.count == 60
    assert privacy.event.event.sampling_probability == 0.2
    text = str(privacy)
    for part in ("epsilon <= ", "delta=1e-05", "add_or_remove_one", privacy.accountant):
        assert part in text
    assert "60 steps of Poisson(rate=0.2" in text
    assert "60 x Poisson(0.2, Gaussian(" in text
    assert "NOT PRIVATE" not in text
    assert (warning := f"delta > 1 / {N}") not in text
    bound = dataclasses.replace(privacy.bound, delta=1.01 / N)
    assert warning in str(dataclasses.replace(privacy, bound=bound))


@pytest.mark.full
def test_a_run_without_noise_says_that_it_is_not_private() -> None:
    svi = driver(
        budget=None, noise_multiplier=0.0, sampler=FullBatch(), secret_key=None, repetition=False,
        optim=optax.chain(optax.clip(10.0), optax.adam(0.05)),
    )  # fmt: skip
    result = svi.run(KEY, 2, X, Y, progress_bar=False)
    assert np.isfinite(flat(result.params)).all()
    assert result.privacy.epsilon == np.inf
    assert str(result.privacy).startswith("Guarantee: NOT PRIVATE")
    assert "Reproducible" not in str(result.privacy)


@pytest.mark.full
def test_a_secret_key_reproduces_a_run_and_says_so(svi: DPSVI, result: Any) -> None:
    """With the flag for stable updates and on arrays of JAX, too."""
    for args, options in (((X, Y), {}), ((X, Y), {"stable_update": True}),
                          (tuple(map(jnp.asarray, (X, Y))), {})):  # fmt: skip
        again = svi.run(KEY, 60, *args, progress_bar=False, **options)
        same(again.params, result.params, rtol=0)
    assert again.privacy.reproducible
    assert "Reproducible run" in str(again.privacy)
    assert X.dtype == np.float64 and len(svi._sessions) == 1


@pytest.mark.full
def test_runs_of_different_length_compile_once(svi: DPSVI, result: Any) -> None:
    before = len(TRACES)
    svi.run(KEY, 13, X, Y, progress_bar=False)
    few = len(TRACES) - before  # traces of init, where the shapes are read
    svi.run(KEY, 37, X, Y, progress_bar=False)
    assert len(TRACES) - before == 2 * few
    assert len(svi._sessions) == 1


# Traces.


@pytest.mark.full
@pytest.mark.parametrize(("steps", "size"), [(60, None), (60, 7), (59, 7), (5, 7)])
def test_the_trace_is_thinned_and_ends_with_the_last_iterate(
    svi: DPSVI, result: Any, steps: int, size: int | None
) -> None:
    assert list(result.trace.steps) == list(range(1, 61))
    found = svi.run(KEY, steps, X, Y, progress_bar=False, trace_size=size)
    trace = found.trace
    assert 1 <= len(trace.steps) <= min(steps, size or 1000)
    assert len(trace.steps) >= min(steps, size or 1000) / 2
    assert trace.steps[-1] == steps
    assert len(set(np.diff(trace.steps))) <= 1
    short = int(trace.steps[0])
    for name, value in found.params.items():
        np.testing.assert_allclose(
            trace.params[name][0], result.trace.params[name][short - 1], rtol=1e-5, atol=1e-6
        )
        assert trace.params[name].shape == (len(trace.steps), *value.shape)
        np.testing.assert_allclose(trace.params[name][-1], value, rtol=1e-6)


# Loops written for SVI.


@pytest.mark.full
@pytest.mark.every_case
@pytest.mark.parametrize("name", ["update", "stable_update"])
def test_a_loop_of_jitted_updates_is_the_run(svi: DPSVI, result: Any, name: str) -> None:
    state, update = svi.init(KEY, X, Y), jax.jit(getattr(svi, name))
    for _ in range(60):
        state, loss = update(state, X, Y)
    assert np.isnan(loss)
    same(svi.get_params(state), result.params)


@pytest.mark.full
def test_updates_inside_scan_stop_at_the_budget(svi: DPSVI, result: Any) -> None:
    def body(state, _):
        state, loss = svi.update(state, X, Y)
        return state, (loss, svi.get_params(state)["w_auto_loc"])

    state, (losses, iterates) = jax.lax.scan(body, svi.init(KEY, X, Y), None, length=63)
    assert np.isnan(losses).all()
    assert int(state.step) == 60
    for step in (60, 61, 62):  # steps beyond the budget change nothing
        np.testing.assert_array_equal(iterates[step], iterates[59])
    assert np.abs(iterates[59] - iterates[58]).min() > 0
    np.testing.assert_allclose(iterates[59], result.params["w_auto_loc"], rtol=2e-4, atol=2e-5)
    with pytest.raises(BudgetError, match="60 updates"):
        svi.update(state, X, Y)
    after, _ = jax.jit(svi.update)(state, X, Y)
    equal = jax.tree.map(
        lambda a, b: (jax.random.key_data(a) == jax.random.key_data(b)).all()
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key) else (a == b).all(),
        after, state,
    )  # fmt: skip
    assert all(jax.tree.leaves(equal))


@pytest.mark.full
@pytest.mark.every_case
@pytest.mark.parametrize("another", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_resumed_run_is_one_long_run(svi: DPSVI, result: Any, another: bool) -> None:
    """A state carries its noise and its steps: a driver made later accounts for all of them."""
    first = svi.run(KEY, 25, X, Y, progress_bar=False)
    stored = pickle.loads(pickle.dumps(first.state))
    later = driver() if another else svi
    second = later.run(KEY, 35, X, Y, progress_bar=False, init_state=stored)
    same(second.params, result.params)
    assert list(second.trace.steps) == list(range(26, 61))
    assert first.privacy.epsilon < second.privacy.epsilon
    assert second.privacy.epsilon == pytest.approx(result.privacy.epsilon)
    assert second.privacy.num_steps == 60
    with pytest.raises(BudgetError, match="num_steps <= 0"):
        later.run(KEY, 1, X, Y, progress_bar=False, init_state=second.state)


@pytest.mark.extended
def test_numpyros_optimisers_and_fresh_keys(result: Any) -> None:
    """Without a secret key no two runs are alike; Adam is Adam in both libraries."""
    svi = driver(optim=numpyro.optim.Adam(0.05), secret_key=None, repetition=False, num_steps=60)
    first, second = (svi.run(KEY, 60, X, Y, progress_bar=False) for _ in range(2))
    assert not first.privacy.reproducible
    assert "Reproducible" not in str(first.privacy)
    assert np.abs(flat(first.params) - flat(second.params)).min() > 0
    svi.settings = svi.settings.changed(secret_key=driver().settings.privacy.secret_key)
    again = svi.run(KEY, 60, X, Y, progress_bar=False)
    same(again.params, result.params, rtol=2e-3, atol=2e-4)


@pytest.mark.full
def test_init_params_set_parameters_and_raw_keys_work(svi: DPSVI) -> None:
    start = {"w_auto_loc": jnp.array([5.0, 6.0])}
    state = svi.init(jax.random.PRNGKey(0), X, Y, init_params=start)
    params = svi.get_params(state)
    np.testing.assert_allclose(params["w_auto_loc"], [5.0, 6.0])
    np.testing.assert_allclose(params["w_auto_scale"], 0.5, rtol=1e-5)  # init_scale of DPSVI
    moved = svi.run(KEY, 1, X, Y, progress_bar=False, init_params=start).params["w_auto_loc"]
    assert 0 < np.abs(moved - np.array([5.0, 6.0])).max() < 0.2


@pytest.mark.full
def test_the_posterior_is_used_as_after_svi(svi: DPSVI, result: Any) -> None:
    draws = Predictive(model, guide=svi.guide, params=result.params, num_samples=50)(
        jax.random.key(1), X[:4]
    )
    assert draws["y"].shape == (50, 4)
    samples = Predictive(svi.guide, params=result.params, num_samples=50)(jax.random.key(1), X[:4])
    assert samples["w"].shape == (50, 2)
    posterior = svi.guide.sample_posterior(
        jax.random.key(2), result.params, X, Y, sample_shape=(500,)
    )
    assert posterior["scale"].shape == (500,)
    assert (posterior["scale"] > 0).all()
    np.testing.assert_allclose(posterior["w"].mean(0), result.params["w_auto_loc"], atol=0.1)
    np.testing.assert_allclose(svi.guide.median(result.params)["w"], result.params["w_auto_loc"])


# Progress, losses, states.


@pytest.mark.full
@pytest.mark.parametrize("steps", [60, 7])
def test_the_progress_bar_shows_steps_and_epsilon_and_nothing_else(
    svi: DPSVI, result: Any, steps: int, capfd: pytest.CaptureFixture[str]
) -> None:
    svi.run(KEY, 3, X, Y, progress_bar=False)
    assert capfd.readouterr() == ("", "")
    found = svi.run(KEY, steps, X, Y, progress_bar=True)
    out, err = capfd.readouterr()
    assert out == ""
    shown = re.split(r"[\r\n]+", err.strip())
    assert f"step {steps} of {steps}" in shown[-1]
    assert f"epsilon <= {found.privacy.epsilon:.3g}" in shown[-1]
    for line in shown:
        rest = re.sub(r"epsilon <= [\d.e+-]+( until step \d+)?", "", line)
        rest = re.sub(r"reading the model|compiling the step|step \d+ of \d+| left", "", rest)
        assert not re.search("[a-z]", rest), line
    if steps == 60:
        same(found.params, result.params, rtol=1e-5, atol=1e-6)


@pytest.mark.full
def test_a_released_loss_curve_is_private() -> None:
    options: dict[str, Any] = dict(budget=PrivacyBudget(50.0, 1e-5), sampler=FullBatch())
    svi, plain = driver(**options, loss_release=LossRelease(15.0, share=0.1)), driver(**options)
    released = svi.run(KEY, 60, X, Y, progress_bar=False, trace_size=30)
    assert type(released.losses) is PrivateLosses
    assert "loss curve is part of the release" in str(released.privacy)
    np.testing.assert_array_equal(released.losses.steps, released.trace.steps)
    assert np.isfinite(released.losses.values).all()
    # The whole signal has the sensitivity sqrt(C^2 + C^2 s / (1 - s)) = C / sqrt(1 - s).
    assert released.privacy.epsilon <= 50.0
    same = plain.run(KEY, 60, X, Y, progress_bar=False).privacy.noise_multiplier
    assert released.privacy.noise_multiplier == pytest.approx(same, rel=1e-3)


@pytest.mark.full
def test_results_can_be_stored(result: Any) -> None:
    published = (result.params, result.trace, result.privacy, result.losses)
    params, trace, privacy, losses = pickle.loads(pickle.dumps(published))
    same(params, result.params, rtol=0)
    assert (len(trace.steps), str(privacy), losses) == (60, str(result.privacy), None)
