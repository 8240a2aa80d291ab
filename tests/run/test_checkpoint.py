"""Checkpoints: a run that was stopped goes on, with its own records and settings only."""

import functools
import os
import pathlib
import shutil
import signal
import stat
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import optax
import pytest
from flat import dpmcmc, dpsep, dpsvi, grouped
from models import given, mean_of
from numpyro.infer.autoguide import AutoDiagonalNormal

from numpyro_dp import (
    SGLD,
    DPLaplace,
    Ledger,
    LedgerError,
    NoiseReuseError,
    PrivacyBudget,
    RunInterrupted,
    fit,
)
from numpyro_dp.core import Fold
from numpyro_dp.mechanisms import LossRelease
from numpyro_dp.privacy import once
from numpyro_dp.run.checkpoint import Checkpoint
from numpyro_dp.samplers import FullBatch, Poisson

KEY, X = jax.random.key(0), jnp.asarray(np.random.default_rng(0).normal(1, 1, 60), jnp.float32)
FOLD = Fold(
    lambda params: jnp.zeros_like(params["auto_loc"]),
    lambda total, params: total + params["auto_loc"],
    lambda total: total,
)
REPEATED = {"secret_key": 3, "repetition": True}


model = mean_of(plate="rows")
logistic = given(lambda x, mean: dist.Bernoulli(logits=mean), mean=dist.Normal(0, 1))


@functools.cache
def svi(**changes):
    settings = {"noise_multiplier": 5.0, "sampler": Poisson(0.2), "estimator": None} | changes
    return dpsvi(model, AutoDiagonalNormal, optax.adam(0.1), **settings)


def run(folder=None, x=X, *, every=5, key=KEY, num_steps=23, **changes):
    kept = {} if folder is None else {"checkpoint": folder, "every": every}
    call = {"fold": FOLD, "trace_size": 6, "progress_bar": False} | {
        name: changes.pop(name) for name in ("fold", "trace_size", "stream") if name in changes
    }
    return svi(**changes).run(key, num_steps, x, **call, **kept)


def numbers(result):
    state = result.state.opened
    return [
        result.params, result.trace, result.folded, result.scores,
        jax.random.key_data(state.secret_key), state.optim_state,
    ]  # fmt: skip


def check_equal(one, other):
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    assert all(np.array_equal(*pair) for pair in pairs)


@pytest.fixture
def stopped(monkeypatch):
    """Calls a function whose n-th checkpoint stops it, before or after it is written."""

    def call_and_stop(number, call, after=True):
        save, left = Checkpoint.save, iter(range(number))

        def stopping(self, *args):
            last = next(left, None) is None
            if not last or after:
                save(self, *args)
            if last:
                raise KeyboardInterrupt

        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(Checkpoint, "save", stopping)
            call()

    return call_and_stop


@pytest.mark.full
@pytest.mark.parametrize("after", [True, False])
@pytest.mark.parametrize("number", [0, 1, 3])
def test_a_run_that_stopped_goes_on(number, after, tmp_path, stopped):
    stopped(number, lambda: run(tmp_path / "a", **REPEATED), after)
    check_equal(numbers(run(tmp_path / "a", **REPEATED)), numbers(run(**REPEATED)))


@pytest.mark.full
def test_it_goes_on_with_the_keys_of_the_folder(tmp_path, stopped):
    stopped(2, lambda: run(tmp_path / "a"))
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    found = run(tmp_path / "a")
    with pytest.raises(NoiseReuseError):
        run(tmp_path / "b")
    once._used.clear()  # as another process
    check_equal(numbers(found), numbers(run(tmp_path / "b", every=None)))
    # A finished run gives its result again, and a state of it does not repeat its noise.
    again = run(tmp_path / "a")
    check_equal(numbers(found), numbers(again))
    assert str(again.privacy) == str(found.privacy)
    assert again.privacy.run == found.privacy.run
    assert not np.array_equal(run(tmp_path / "c").params["auto_loc"], found.params["auto_loc"])
    for path in (tmp_path / "a", *(tmp_path / "a").iterdir()):
        assert not stat.S_IMODE(path.stat().st_mode) & 0o077, path  # only the owner reads it
    # After its state has gone on, too.
    svi(num_steps=40).run(KEY, 2, X, init_state=again.state, progress_bar=False)
    check_equal(run(tmp_path / "a").params, found.params)


@pytest.mark.full
def test_other_records_and_settings_are_refused(tmp_path, stopped):
    stopped(1, lambda: run(tmp_path / "a"))
    start = FOLD._replace(init=lambda params: 100 + jnp.zeros_like(params["auto_loc"]))
    for changes, field in (
        ({"x": X + 1}, "other records"),
        ({"x": X.at[7].add(1e-6)}, "other records"),
        ({"x": X[:50]}, "another run"),
        ({"noise_multiplier": 6.0}, "report="),
        ({"clip_norm": 2.0}, "clip_norm="),
        ({"sampler": Poisson(0.1)}, "another run"),
        ({"num_steps": 24}, "another run"),
        ({"key": jax.random.key(1)}, "another run"),
        ({"secret_key": 9}, "another run"),
        ({"fold": None}, "program="),
        ({"fold": start}, "program="),
        ({"trace_size": 5}, "another run"),
    ):
        with pytest.raises(ValueError, match=field):
            run(tmp_path / "a", **changes)
    run(tmp_path / "a")


@pytest.mark.full
def test_a_damaged_file_is_refused(tmp_path, stopped):
    stopped(1, lambda: run(tmp_path / "a"))
    path = tmp_path / "a" / "SENSITIVE_checkpoint"
    content = path.read_bytes()
    rng = np.random.default_rng(0)
    changed = [content[: rng.integers(len(content))] for _ in range(4)]
    for place in (*rng.integers(len(content), size=8), 0, len(content) - 1):
        one = bytearray(content)
        one[place] ^= 1 << int(rng.integers(8))
        changed.append(bytes(one))
    for each in changed:
        path.write_bytes(each)
        with pytest.raises(ValueError, match="is damaged"):
            run(tmp_path / "a")
    path.write_bytes(content)
    run(tmp_path / "a")


@pytest.mark.full
@pytest.mark.parametrize("epsilon", [0.5, None])
def test_it_is_charged_once(epsilon, tmp_path, stopped):
    ledger = Ledger(tmp_path / "ledger", PrivacyBudget(1.0, 1e-5))

    def charged(folder):
        budget = ledger.budget(epsilon, purpose="test")
        return run(tmp_path / folder, noise_multiplier=None, budget=budget)

    for number in (0, 2, 1):
        stopped(number, lambda: charged("a"))
    found = charged("a")
    assert [row["run"] for row in ledger.table()] == [found.privacy.run]
    assert found.privacy.epsilon <= (epsilon or 1.0)
    ledger.take_back(found.privacy.run)
    if epsilon:
        with pytest.raises(LedgerError, match="released nothing"):
            charged("a")
    charged("b")


@pytest.fixture
def control_c(monkeypatch, tmp_path):
    """Runs into a folder, where the n-th checkpoint comes with presses of Ctrl-C."""

    # Commands that a script starts with & ignore SIGINT, and so do their children.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    def press(number, error, presses=1, folder="a"):
        save, left = Checkpoint.save, iter(range(number))

        def pressed(self, *args):
            save(self, *args)
            if next(left, None) is None:
                for _ in range(presses):
                    os.kill(os.getpid(), signal.SIGINT)

        with monkeypatch.context() as patched, pytest.raises(error) as stopped:
            patched.setattr(Checkpoint, "save", pressed)
            run(tmp_path / folder, trace_size=23)
        return stopped.value

    yield press
    signal.signal(signal.SIGINT, before)


@pytest.mark.full
def test_control_c_ends_with_what_is_there(control_c, tmp_path, capsys):
    stopped = control_c(3, RunInterrupted)
    assert "after 15 steps of 23" in str(stopped)
    assert "Press Ctrl-C again" in capsys.readouterr().err
    result = stopped.result
    assert result.privacy.num_steps == len(result.trace.steps) == int(result.state.step) == 15
    result.posterior.sample(KEY, 10)
    whole = run(tmp_path / "a", trace_size=23)
    np.testing.assert_array_equal(
        whole.trace.params["auto_loc"][:15], result.trace.params["auto_loc"]
    )
    # The folder has gone on: its noise is used up, so the state cannot go on as well.
    with pytest.raises(NoiseReuseError):
        svi().run(KEY, 8, X, init_state=result.state, progress_bar=False)


@pytest.mark.full
def test_a_stopped_run_goes_on_from_its_state(control_c, tmp_path):
    state = control_c(3, RunInterrupted).result.state
    svi().run(KEY, 8, X, init_state=state, progress_bar=False)
    with pytest.raises(NoiseReuseError):
        run(tmp_path / "a", trace_size=23)


@pytest.mark.full
def test_control_c_twice_and_in_the_last_part(control_c, tmp_path):
    assert not isinstance(control_c(1, KeyboardInterrupt, presses=2), RunInterrupted)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    result = control_c(5, RunInterrupted, folder="b").result
    assert result.privacy.num_steps == 23
    check_equal(run(tmp_path / "b", trace_size=23).params, result.params)


def chain(kept, x=X, **settings):
    mcmc = dpmcmc(SGLD(model), **settings)
    mcmc.run(KEY, x, **kept)
    return mcmc.get_samples()


@pytest.mark.full
@pytest.mark.parametrize("case", ["stream", "state", "sep", "chain", "chains", "laplace", "sweep"])
def test_every_driver(case, tmp_path, stopped):
    own = {"noise_multiplier": 5.0} | REPEATED

    def call(folder=None):
        kept = {} if folder is None else {"checkpoint": folder}
        if case == "stream":
            return numbers(run(folder, stream=True, **REPEATED))
        if case == "state":
            state = svi(**REPEATED).run(KEY, 4, X, progress_bar=False).state
            found = svi(**REPEATED).run(KEY, 9, X, init_state=state, progress_bar=False, **kept)
            return numbers(found)
        if case == "sweep":
            driver = svi(loss_release=LossRelease(10.0, 0.1), **REPEATED)
            found = driver.sweep(KEY[None], 5, X, noise_multiplier=[4.0] * 4, chunk_size=1, **kept)
            return found[:3]
        if case == "sep":
            data = X, (X > 0) * 1
            found = dpsep(logistic, **own).run(KEY, 25, *data, progress_bar=False, **kept)
            return found.params, found.trace
        if case == "laplace":
            return DPLaplace(model, **grouped(**own)).run(KEY, X, **kept).sample(KEY, 5)
        sizes = {"num_warmup": 11, "num_samples": 12, "thinning": 3}
        return chain(kept, num_chains=1 + (case == "chains"), **sizes, **own)

    whole = call()
    stopped(3, lambda: call(tmp_path / "a"))
    for _ in range(2):
        check_equal(call(tmp_path / "a"), whole)


@pytest.mark.full
def test_fit_has_checkpoints(tmp_path):
    def call():
        found = fit(model, X, epsilon=1.0, rng_key=KEY, checkpoint=tmp_path / "a")
        return found.sample(KEY, 3)["mean"], found.privacy.run

    one, other = call(), call()
    assert one[1] == other[1]
    np.testing.assert_array_equal(one[0], other[0])


@pytest.mark.full
def test_a_sweep_goes_on_with_its_own_noise(tmp_path, stopped, monkeypatch):
    keys, keys_of_sweeps, save = jax.random.split(KEY, 3), [], Checkpoint.save

    def sweep(folder):
        return svi().sweep(keys, 5, X, chunk_size=1, checkpoint=folder)

    stopped(1, lambda: sweep(tmp_path / "a"))
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    with monkeypatch.context() as patched:

        def seen(self, progress):
            keys_of_sweeps.append(np.array(progress.secret))
            save(self, progress)

        patched.setattr(Checkpoint, "save", seen)
        found = sweep(tmp_path / "a")
    once._used.clear()  # as another process
    check_equal(found[:2], sweep(tmp_path / "b")[:2])
    # The key of noise that is released now is gone.
    assert list(keys_of_sweeps[-1]) == [0] * 8 != list(keys_of_sweeps[0])
    check_equal(found[:2], sweep(tmp_path / "a")[:2])


def with_used_key(kind, x, folder=None):
    """A run of some driver whose key another run had."""
    kept = {} if folder is None else {"checkpoint": folder}
    own = {"noise_multiplier": 5.0, "secret_key": 6}
    if kind == "laplace":
        return DPLaplace(model, **grouped(**own)).run(KEY, x, **kept).sample(KEY, 3)
    if kind == "svi":
        settings = own | {"sampler": FullBatch()}
        return svi.__wrapped__(**settings).run(KEY, 4, x, progress_bar=False, **kept).params
    return chain(kept, x, num_warmup=0, num_samples=3, num_chains=int(kind), **own)


@pytest.mark.full
@pytest.mark.table
@pytest.mark.parametrize("kind", ["svi", "laplace", "1", "2"])
def test_a_refused_call_is_refused_again(kind, tmp_path):
    with_used_key(kind, X)
    for _ in range(3):
        with pytest.raises(NoiseReuseError):
            with_used_key(kind, X + 1, tmp_path / "a")
    assert not (tmp_path / "a" / "SENSITIVE_checkpoint").exists()


@pytest.mark.full
@pytest.mark.parametrize("kind", ["laplace", "1"])
def test_noise_of_a_killed_run_that_was_used_elsewhere(kind, tmp_path, stopped):
    stopped(1, lambda: with_used_key(kind, X, tmp_path / "a"))
    with_used_key(kind, X + 1, tmp_path / "b")
    with pytest.raises(NoiseReuseError):
        with_used_key(kind, X, tmp_path / "a")


@pytest.mark.full
def test_updates_use_up_the_key_of_a_new_folder(tmp_path):
    driver = svi(secret_key=11)
    driver.init(KEY, X)
    for _ in range(2):
        with pytest.raises(NoiseReuseError):
            driver.run(KEY, 3, X + 1, progress_bar=False, checkpoint=tmp_path / "a")


@pytest.mark.full
def test_a_run_that_is_refused_leaves_its_folder_free(tmp_path):
    ledger = Ledger(tmp_path / "ledger", PrivacyBudget(0.5, 1e-5))

    def charged(epsilon, steps=5):
        driver = svi(noise_multiplier=None, budget=ledger.budget(epsilon, purpose="test"))
        return driver.run(KEY, steps, X, progress_bar=False, checkpoint=tmp_path / "a")

    with pytest.raises(LedgerError):
        charged(0.9)
    charged(0.1)
    driver = svi(noise_multiplier=None, budget=ledger.budget(purpose="the rest"))
    earlier = driver.settings.budget.earlier
    with pytest.raises(ValueError, match="another run"):
        driver.run(KEY, 9, X, progress_bar=False, checkpoint=tmp_path / "a")
    assert driver.settings.budget.earlier == earlier
    driver.run(KEY, 9, X, progress_bar=False, checkpoint=tmp_path / "b")


@pytest.mark.full
def test_paths_and_modes(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="cannot be a folder"):
        run(tmp_path / "file")
    (tmp_path / "a" / "SENSITIVE_checkpoint").mkdir(parents=True)
    with pytest.raises(ValueError, match="cannot be read"):
        run(tmp_path / "a")
    with pytest.raises(TypeError, match="path of a folder"):
        run(True)
    with pytest.raises(ValueError, match="every="):
        svi().run(KEY, 2, X, every=1)
    (tmp_path / "b").mkdir()
    begun = tmp_path / "b" / "SENSITIVE_checkpoint.begun"
    begun.touch(0o666)
    begun.chmod(0o666)
    run(tmp_path / "b")
    assert stat.S_IMODE((tmp_path / "b" / "SENSITIVE_checkpoint").stat().st_mode) == 0o600
    # Two runs cannot share a folder.
    with Checkpoint(tmp_path / "c", None, {}, ()):
        for call in (run, lambda folder: svi().sweep(KEY[None], 2, X, checkpoint=folder)):
            with pytest.raises(ValueError, match="Another run uses"):
                call(tmp_path / "c")
    run(tmp_path / "c")


@pytest.mark.slow
@pytest.mark.extended  # tests/run/test_devices.py kills processes, too
def test_killed_processes_go_on():
    program = pathlib.Path(__file__).parents[2] / "benchmarks" / "kills.py"
    cases = ["--cases", "DPLaplace"]  # all nine with 200 kills by that command alone
    subprocess.run([sys.executable, program, "--kills", "2", *cases], check=True, timeout=500)
