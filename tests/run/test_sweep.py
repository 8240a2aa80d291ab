"""Sweeps: every run is the run that `run` makes, in one compiled call."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from flat import dpsvi
from numpyro.infer.autoguide import AutoDiagonalNormal, AutoMultivariateNormal

from numpyro_dp import BudgetError, PrivacyBudget, secret_key
from numpyro_dp.estimators import aligned, vanilla
from numpyro_dp.mechanisms import LossRelease
from numpyro_dp.run import sweep as sweep_module
from numpyro_dp.run.session import Session
from numpyro_dp.samplers import FixedSize, FullBatch, Poisson

NUMBER, STEPS = 300, 25


TRACES = []


def model(x):
    TRACES.append(1)
    mean = numpyro.sample("mean", dist.Normal(0, 3).expand([2]).to_event(1))
    with numpyro.plate("records", x.shape[0]):
        numpyro.sample("x", dist.Normal(mean, 1).to_event(1), obs=x)


X = 1 + jax.random.normal(jax.random.key(3), (NUMBER, 2))


def driver(fitted=model, guide=AutoDiagonalNormal, optim=None, **changes):
    settings = {"clip_norm": 1.5, "sampler": Poisson(0.2), "secret_key": 5, "repetition": True}
    noise = {} if "noise_multiplier" in changes else {"budget": PrivacyBudget(1.0, 1e-5)}
    return dpsvi(fitted, guide, optim or optax.adam(0.05), **settings | noise | changes)


KEYS = jax.random.split(jax.random.key(0), 2)


CASES = [
    pytest.param(*case, marks=pytest.mark.extended if number else ())
    for number, case in enumerate(
        itertools.product((aligned, vanilla), (Poisson(0.2), FixedSize(30), FullBatch()))
    )
]


@pytest.mark.full
@pytest.mark.parametrize(("estimator", "sampler"), CASES)
def test_each_run_is_the_run_of_its_settings(sampler, estimator):
    settings = {"sampler": sampler, "estimator": estimator()}
    found = driver(noise_multiplier=1.0, **settings).sweep(
        KEYS, STEPS, X, noise_multiplier=[0.5, 2.0], clip_norm=[1.0, 4.0]
    )
    assert found.params["auto_loc"].shape == (8, 2)
    for index in (0, 3, 6):
        label = {name: values[index] for name, values in found.labels.items()}
        alone = driver(
            **settings,
            noise_multiplier=float(label["noise_multiplier"]),
            clip_norm=float(label["clip_norm"]),
            secret_key=jax.random.fold_in(secret_key(5), index),
        ).run(KEYS[label["seed"]], STEPS, X, progress_bar=False)
        one = found.one(index)
        assert one.privacy.epsilon == pytest.approx(alone.privacy.epsilon)
        np.testing.assert_array_equal(one.trace.steps, alone.trace.steps)
        for name in ("auto_loc", "auto_scale"):
            np.testing.assert_allclose(one.params[name], alone.params[name], rtol=2e-5)
            np.testing.assert_allclose(
                one.trace.params[name], alone.trace.params[name], rtol=2e-5, atol=1e-6
            )


@pytest.mark.full
def test_labels_and_reports():
    found = driver().sweep(KEYS, STEPS, X, epsilon=[0.5, 1.0, 3.0], clip_norm=[1.0, 2.0])
    labels = found.labels
    np.testing.assert_array_equal(labels["seed"], [0, 1] * 6)
    np.testing.assert_array_equal(labels["epsilon"], np.tile(np.repeat([0.5, 1, 3], 2), 2))
    np.testing.assert_array_equal(labels["clip_norm"], np.repeat([1.0, 2.0], 6))
    assert (np.diff(labels["noise_multiplier"][[0, 2, 4]]) < 0).all()
    for asked, report in zip(labels["epsilon"], found.privacy, strict=True):
        assert 0.99 * asked < report.epsilon <= asked
    assert found.privacy[6].plan.sensitivity == 2.0
    assert "together spend at most epsilon" in repr(found)


@pytest.mark.full
def test_no_two_runs_share_noise_or_batches(monkeypatch):
    seen, many = [], Session.run_many

    def kept(self, rows, begun):
        seen.append(begun[1].carry.state)
        return many(self, rows, begun)

    monkeypatch.setattr(Session, "run_many", kept)
    svi = driver(secret_key=None, repetition=False)
    found = svi.sweep(KEYS[:1], 5, X, clip_norm=[1.0, 1.0, 1.0], chunk_size=2)
    assert len(np.unique(found.params["auto_loc"][:, 0])) == 3
    keys = [
        np.asarray(jax.random.key_data(leaf))
        for states in seen
        for leaf in jax.tree.leaves((states.secret_key, states.sampler_state))
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    ]
    assert len(keys) == 4  # of noise and of batches, in two chunks, of which one repeats a run
    assert len(np.unique(np.concatenate(keys), axis=0)) == 6


@pytest.mark.full
def test_chunks_change_nothing():
    whole = driver().sweep(KEYS, STEPS, X, epsilon=[0.5, 1.0, 3.0], trace_size=5)
    parts = driver().sweep(KEYS, STEPS, X, epsilon=[0.5, 1.0, 3.0], trace_size=5, chunk_size=4)
    assert whole.trace.params["auto_loc"].shape == (6, 5, 2)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6),
        (whole.params, whole.trace),
        (parts.params, parts.trace),
    )


@pytest.mark.full
def test_losses_and_blocks():
    found = driver(loss_release=LossRelease(10.0, 0.1), clip_norm={"mean": 1.0}).sweep(
        KEYS, STEPS, X, clip_norm=[{"mean": 1.0}, {"mean": 2.0}]
    )
    assert found.losses.values.shape == (4, STEPS)
    np.testing.assert_array_equal(found.labels["clip_norm"], [0, 0, 1, 1])
    assert found.one(2).losses.values.shape == (STEPS,)


@pytest.mark.extended
def test_one_compilation_for_all_noise_and_clip_norms():
    svi, counts = driver(), []
    for num_steps, settings in ((STEPS, {}), (STEPS + 7, {}), (STEPS, {"clip_norm": [3.0]})):
        before = len(TRACES)
        svi.sweep(KEYS, num_steps, X, epsilon=[0.5, 1.0], **settings)
        counts.append(len(TRACES) - before)
    assert counts[0] > counts[1] == counts[2]  # what is left is init, where shapes are read


@pytest.mark.parametrize(("settings", "error", "match"), [
    ({"epsilon": 1.0}, TypeError, r"sequence.*epsilon=1.0"),
    ({"epsilon": []}, ValueError, "at least one.*epsilon"),
    ({"epsilon": [1.0, -1.0]}, ValueError, "epsilon=-1.0"),
    ({"epsilon": [1.0], "noise_multiplier": [1.0]}, ValueError, "got both"),
    ({"noise_multiplier": [-1.0]}, ValueError, "noise_multiplier=-1.0"),
    ({"noise_multiplier": [0.3]}, BudgetError, "at most epsilon"),
    ({"clip_norm": 2.0}, TypeError, "sequence.*clip_norm=2.0"),
    ({"clip_norm": [2.0, -2.0]}, ValueError, "clip_norm=-2.0"),
    ({"clip_norm": [{"mean": 1.0}]}, ValueError, "form of"),
    ({"clip_norm": [float("inf")]}, BudgetError, "finite clip_norm"),
    ({"chunk_size": 0}, ValueError, "chunk_size=0"),
    ({"learning_rate": [0.1]}, ValueError, "inject_hyperparams"),
    ({"learning_rate": [-0.1]}, ValueError, "learning_rate=-0.1"),
])  # fmt: skip
def test_wrong_input(settings, error, match):
    with pytest.raises(error, match=match):
        driver().sweep(KEYS, STEPS, X, **settings)


def test_wrong_keys_and_settings_that_do_not_fit():
    for wrong in (jax.random.key(0), jnp.zeros(2), 3):
        with pytest.raises((TypeError, ValueError), match="rng_keys"):
            driver().sweep(wrong, STEPS, X)
    with pytest.raises(ValueError, match="needs a driver with a budget"):
        driver(noise_multiplier=1.0).sweep(KEYS, STEPS, X, epsilon=[1.0])
    for usual, given in ((np.inf, 1.0), (1.0, np.inf)):
        svi = driver(clip_norm=usual, noise_multiplier=0.0)
        with pytest.raises(ValueError, match="all finite or all infinite"):
            svi.sweep(KEYS, 3, X, clip_norm=[given], noise_multiplier=[0.0])


@pytest.mark.full
def test_learning_rates_are_swept():
    adam = optax.inject_hyperparams(optax.adam)(learning_rate=0.5)
    swept = driver(optim=adam, noise_multiplier=1.0).sweep(
        KEYS, STEPS, X, learning_rate=[0.01, 0.05], clip_norm=[1.0, 1.5]
    )
    assert swept.labels["learning_rate"].tolist() == [0.01, 0.01, 0.05, 0.05] * 2
    assert swept.labels["seed"].tolist() == [0, 1] * 4
    alone = driver(noise_multiplier=1.0, secret_key=jax.random.fold_in(secret_key(5), 7))
    alone = alone.run(KEYS[1], STEPS, X, progress_bar=False)
    np.testing.assert_allclose(swept.params["auto_loc"][7], alone.params["auto_loc"], rtol=1e-4)


@pytest.mark.full
def test_a_folder_knows_its_records_and_not_the_day(tmp_path, monkeypatch):
    folder = tmp_path / "found"

    def sweep(records):
        return driver(secret_key=3).sweep(KEYS[:1], 2, records, checkpoint=folder)

    one = sweep(X)
    monkeypatch.setattr("numpyro_dp.privacy.plan._today", lambda: "2030-01-01")
    other = sweep(X)
    np.testing.assert_array_equal(*(x.params["auto_loc"] for x in (one, other)))
    changed = np.array(X)
    changed.flat[7] += 1e-3
    with pytest.raises(ValueError, match="run on other records"):
        sweep(changed)


@pytest.mark.extended
def test_a_folder_of_another_sweep_is_refused(tmp_path):
    def sweep(chunk_size=2, guide=AutoDiagonalNormal, rate=0.05, init=0.1, **changes):
        settings = {"clip_norm": {...: 1.5}, "noise_multiplier": 1.0, "repetition": False} | changes
        svi = driver(model, guide(model, init_scale=init), optax.adam(rate), **settings)
        return svi.sweep(KEYS, 3, X, chunk_size=chunk_size, checkpoint=tmp_path / "found")

    one, other = sweep(), sweep()
    np.testing.assert_array_equal(one.params["auto_loc"], other.params["auto_loc"])
    for changes, named in [
        ({"chunk_size": 1}, "chunk_size=2 instead of 1"),
        ({"secret_key": 6}, "secret_key="),
        ({"guide": AutoMultivariateNormal}, "program="),
        ({"rate": 0.01}, "program="),
        ({"estimator": vanilla()}, "program="),
        ({"init": 0.2}, "program="),
        ({"clip_norm": {"mean": 1.5}}, r"clip_norm=\[1.5"),
    ]:
        with pytest.raises(ValueError, match=named):
            sweep(**changes)


@pytest.mark.extended
def test_a_folder_knows_arrays_that_a_model_captured(tmp_path):
    def sweep(scales):
        def captured(x):
            mean = numpyro.sample("mean", dist.Normal(0, scales).to_event(1))
            with numpyro.plate("records", x.shape[0]):
                numpyro.sample("x", dist.Normal(mean, 1).to_event(1), obs=x)

        svi = driver(captured, noise_multiplier=1.0)
        return svi.sweep(KEYS, 3, X, checkpoint=tmp_path / "found")

    for kind in (np, jnp):
        sweep(kind.array([1.0, 2.0], np.float32))
        with pytest.raises(ValueError, match="program="):
            sweep(kind.array([1.0, 2.5], np.float32))


@pytest.mark.extended
def test_chunks_fit_the_memory(monkeypatch):
    calls, many = [], Session.run_many
    monkeypatch.setattr(Session, "run_many", lambda *args: calls.append(1) or many(*args))
    whole = driver().sweep(KEYS, STEPS, X, epsilon=[0.5, 1.0, 2.0])
    assert len(calls) == 1
    monkeypatch.setattr(sweep_module, "_memory", lambda device: 120_000)
    small = driver().sweep(KEYS, STEPS, X, epsilon=[0.5, 1.0, 2.0])
    assert 2 < len(calls) < 7
    np.testing.assert_allclose(small.params["auto_loc"], whole.params["auto_loc"], rtol=1e-5)
