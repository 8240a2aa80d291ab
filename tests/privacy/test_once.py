"""No two runs share noise, however they are started: keys under transformations, states, copies."""

from __future__ import annotations

import copy
import itertools
import os
import pickle
import subprocess
import sys
import textwrap
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from flat import grouped
from numpyro.infer.autoguide import AutoDiagonalNormal

from numpyro_dp import (
    DPEM,
    DPMCMC,
    DPPBP,
    DPSEP,
    DPSVI,
    SGLD,
    NoiseReuseError,
    RegressionNetwork,
    secret_key,
)
from numpyro_dp.estimators import aligned
from numpyro_dp.privacy import keys, once
from numpyro_dp.privacy.keys import keys_of_run
from numpyro_dp.samplers import FullBatch, Permutation, Poisson

KEY = jax.random.key(0)
N = 12
X = jnp.linspace(-1.0, 1.0, N)
TABLE = X[:, None]
NOISE = {"clip_norm": 1.0, "sampler": FullBatch(), "noise_multiplier": 1.0}


def model(x):
    mean = numpyro.sample("mean", dist.Normal(0, 1))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("x", dist.Normal(mean, 1), obs=x)


def svi(optim=optax.sgd(0.1), guide=None, **changes):  # noqa: B008
    settings = grouped(estimator=aligned(), **NOISE | changes)
    return DPSVI(model, guide or AutoDiagonalNormal(model), optim, **settings)


def mcmc(**changes):
    settings = {"num_warmup": 0, "num_samples": 2, "progress_bar": False} | NOISE | changes
    return DPMCMC(SGLD(model, step_size=0.01), **grouped(**settings))


DRIVERS = {
    "DPSVI": (svi, (X,)),
    "DPSEP": (lambda **changes: DPSEP(model, **grouped(**NOISE | changes)), (X,)),
    "DPEM": (lambda **changes: DPEM(2, **grouped(**NOISE | changes)), (TABLE,)),
    "DPPBP": (lambda **changes: DPPBP(RegressionNetwork((2,)), **grouped(**NOISE | changes)),
        (TABLE, X)),
}  # fmt: skip
run = {"progress_bar": False}


def words_of(key):
    return np.asarray(jax.random.key_data(key))


def assert_all_differ(values, number):
    """Rounding apart; ``values`` are so many rows."""
    values = np.asarray(values).reshape(number, -1)
    values = values.round(5) if values.dtype.kind == "f" else values
    assert len(np.unique(values, axis=0)) == number


def with_shard_map(fn):
    mesh = jax.make_mesh((1,), ("r",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec()
    return jax.shard_map(fn, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)(1.0)


TRANSFORMS = {
    "jit": lambda fn: jax.jit(fn)(1.0),
    "vmap": lambda fn: jax.vmap(fn)(jnp.ones(2)),
    "vmap with a name": lambda fn: jax.vmap(fn, axis_name="lane")(jnp.ones(2)),
    "pmap": lambda fn: jax.pmap(fn)(jnp.ones(1)),
    "shard_map": with_shard_map,
    "scan": lambda fn: jax.lax.scan(lambda _, x: (None, fn(x)), None, jnp.ones(2)),
    "eval_shape": lambda fn: jax.eval_shape(fn, 1.0),
    "grad": lambda fn: jax.grad(fn)(1.0),
    "checkpoint": lambda fn: jax.checkpoint(fn)(1.0),
    "compile-time evaluation": lambda fn: jax.jit(at_compile_time(fn))(1.0),
}


def at_compile_time(fn):
    def inner(x):
        with jax.ensure_compile_time_eval():
            return fn(x)

    return inner


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("given", [None, 7], ids=["fresh key", "given key"])
@pytest.mark.parametrize("name", [*DRIVERS, "DPMCMC"])
def test_no_run_starts_while_a_function_is_traced(name, given, transform):
    if name == "DPMCMC":
        calls = {"run": lambda: mcmc(secret_key=given).run(KEY, X)}
    else:
        make, args = DRIVERS[name]
        driver = make(secret_key=given, num_steps=2)
        calls = {
            "init": lambda: driver.init(KEY, *args),
            "run": lambda: driver.run(KEY, 2, *args, **run),
            "sweep": lambda: driver.sweep(KEY[None], 2, *args),
        }
    for call, start in calls.items():

        def traced(x, start=start):
            start()
            return x

        with pytest.raises(NoiseReuseError, match=rf"{name}\.{call} outside of jit.*use sweep"):
            TRANSFORMS[transform](traced)


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_no_secret_key_is_made_while_a_function_is_traced(transform):
    def traced(x):
        secret_key()
        return x

    with pytest.raises(NoiseReuseError, match=r"secret_key\(\) outside of jit"):
        TRANSFORMS[transform](traced)


@pytest.mark.full
def test_two_runs_share_no_noise_however_they_are_started():
    """Every public way to start a run, at one public key and on the same records: all differ."""
    starts = {}
    driver = svi(num_steps=10)
    starts["run"] = driver.run(KEY, 2, X, **run).params
    starts["the same driver again"] = driver.run(KEY, 2, X, **run).params
    starts["streamed"] = svi(sampler=Poisson(0.99)).run(KEY, 2, X, stream=True, **run).params
    for name in ("init and update", "again"):
        state = driver.init(KEY, X)
        for _ in range(2):
            state, _ = driver.update(state, X)
        starts[name] = driver.get_params(state)
    step = jax.jit(driver.update)
    state = driver.init(KEY, X)
    starts["compiled updates"] = driver.get_params(step(step(state, X)[0], X)[0])
    state = driver.init(KEY, X)
    starts["scan"] = driver.get_params(
        jax.lax.scan(lambda s, _: (driver.update(s, X)[0], None), state, None, length=2)[0]
    )
    starts["init_state"] = driver.run(KEY, 2, X, init_state=driver.init(KEY, X), **run).params
    for given in (5, secret_key(6)):
        starts[f"secret key {type(given)}"] = svi(secret_key=given).run(KEY, 2, X, **run).params
    state = driver.init(KEY, X)
    for name, copied in (("pickle", pickle.loads(pickle.dumps(state))), ("copy", copy.copy(state)),
                         ("deepcopy", copy.deepcopy(state))):  # fmt: skip
        starts[name] = driver.get_params(step(step(copied, X)[0], X)[0])
    swept = driver.sweep(jnp.stack([KEY, KEY]), 2, X)
    lanes = driver.init(KEY, X)
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), lanes)
    mapped = jax.vmap(driver.update, in_axes=(0, None))(stacked, X)[0]
    mapped = jax.vmap(driver.update, in_axes=(0, None))(mapped, X)[0]
    for lane in (0, 1):
        starts[f"sweep {lane}"] = swept.one(lane).params
        one = jax.tree.map(lambda leaf, lane=lane: leaf[lane], mapped)
        starts[f"vmap of update {lane}"] = driver.get_params(one)
    values = {name: float(params["auto_loc"][0]) for name, params in starts.items()}
    for (a, x), (b, y) in itertools.combinations(values.items(), 2):
        assert abs(x - y) > 1e-4, (a, b)


@pytest.mark.full
def test_every_step_has_noise_of_its_own():
    """The noise is 10,000 times the signal and steps are small, so all moves are its noise."""
    driver = svi(optax.sgd(1e-6), num_steps=4, noise_multiplier=1e4)
    kept = driver.run(KEY, 4, X, **run).trace.params["auto_loc"][:, 0]
    state = driver.init(KEY, X)
    looped = [driver.get_params(state)["auto_loc"][0]]
    for _ in range(3):
        state, _ = driver.update(state, X)
        looped.append(driver.get_params(state)["auto_loc"][0])
    for values in (np.asarray(kept), np.asarray(looped)):
        moves = np.diff(values)
        assert 1e-6 < np.abs(moves).min() < np.abs(moves).max() < 0.1
        for one, other in itertools.combinations(moves, 2):
            assert abs(one - other) > 1e-3 * abs(one)


@pytest.mark.full
def test_chains_share_no_noise_among_them_or_with_another_sampler():
    samples = []
    for _ in range(2):
        sampler = mcmc(num_chains=2)
        sampler.run(KEY, X)
        samples.append(np.asarray(sampler.get_samples(group_by_chain=True)["mean"]))
    chains = np.concatenate(samples)
    assert len(np.unique(chains.round(4), axis=0)) == 4


@pytest.mark.parametrize("name", [*DRIVERS, "DPMCMC"])
def test_a_given_key_starts_one_run(name):
    again = [lambda **changes: mcmc(**changes).run(KEY, X)]
    if name != "DPMCMC":
        make, args = DRIVERS[name]
        again = [
            lambda **changes: make(**changes).run(KEY, 2, *args, **run),
            lambda **changes: make(num_steps=2, **changes).init(KEY, *args),
        ]
    again[0](secret_key=3)
    for other in again:
        with pytest.raises(NoiseReuseError, match="already used for a run.*repetition=True"):
            other(secret_key=3)
        other(secret_key=3, repetition=True)
        other(secret_key=4 + len(again) + again.index(other))


def test_a_start_registers_its_key():
    """Also before its first update: both states would have the noise of the key."""
    svi(secret_key=9, num_steps=2).init(KEY, X)
    for start in (
        lambda: svi(secret_key=9, num_steps=2).init(KEY, X),
        lambda: svi(secret_key=9).run(KEY, 2, X, **run),
    ):
        with pytest.raises(NoiseReuseError, match="already used for a run"):
            start()


@pytest.mark.full
def test_a_sweep_and_the_run_that_it_equals_share_a_key():
    driver = svi(secret_key=3)
    driver.sweep(KEY[None], 2, X, noise_multiplier=[1.0, 2.0])
    with pytest.raises(NoiseReuseError, match="already used for a run"):
        driver.sweep(KEY[None], 2, X)
    own = jax.random.fold_in(driver.settings.privacy.secret_key, 1)
    with pytest.raises(NoiseReuseError, match="already used for a run"):
        svi(secret_key=own).run(KEY, 2, X, **run)


@pytest.mark.full
def test_a_sweep_that_failed_uses_up_no_key(monkeypatch):
    driver = svi(secret_key=3)
    session = driver._session((X,), {})
    run_many = session.run_many
    for chunks in (0, 1):
        left = iter(range(chunks))
        monkeypatch.setattr(
            session, "run_many", lambda *args, left=left: run_many(*args) if [*left] else 1 / 0
        )
        with pytest.raises(ZeroDivisionError):
            driver.sweep(jnp.stack([KEY, KEY]), 2, X, chunk_size=1)
    monkeypatch.undo()
    driver.sweep(jnp.stack([KEY, KEY]), 2, X, chunk_size=1)


@pytest.mark.full
def test_a_repetition_is_a_function_of_its_key():
    found = [svi(secret_key=3, repetition=True).run(KEY, 2, X, **run) for _ in range(2)]
    np.testing.assert_array_equal(*(each.params["auto_loc"] for each in found))
    assert "another run may have the same noise" in str(found[0].privacy)
    with pytest.raises(ValueError, match="secret_key together with repetition=True"):
        svi(repetition=True)
    with pytest.raises(TypeError, match="True or False, got 'yes'|type: <class 'bool'>"):
        svi(secret_key=1, repetition="yes")


@pytest.mark.parametrize("changed", ["nothing", "learning rate", "records"])
def test_a_state_is_resumed_once(changed):
    driver = svi(num_steps=10)
    state = driver.run(KEY, 2, X, **run).state
    other, records = driver, X
    if changed == "learning rate":
        other = svi(optax.sgd(0.5), driver.guide, num_steps=10)
        other.init(KEY, X)
    if changed == "records":
        records = X + 1
    driver.run(KEY, 2, X, init_state=state, **run)
    match = "state of step 2|from step 2 of a run.*up to 4"
    if changed == "records":
        match = "not the records of the run"
    with pytest.raises(ValueError, match=match):  # a NoiseReuseError is one
        other.run(KEY, 2, records, init_state=state, **run)
    with pytest.raises(NoiseReuseError, match="from step 2 of a run"):
        other.update(state, records)


@pytest.mark.full
def test_a_state_is_updated_once():
    driver = svi()
    state = driver.init(KEY, X)
    new, _ = driver.update(state, X)
    with pytest.raises(NoiseReuseError, match="from step 0 of a run whose steps up to 1"):
        driver.update(state, X + 1)
    with pytest.raises(NoiseReuseError, match="from step 0"):
        driver.run(KEY, 2, X, init_state=state, **run)
    driver.update(new, X)


@pytest.mark.full
def test_a_copy_of_a_used_state_is_used():
    driver = svi()
    state = driver.init(KEY, X)
    stored = pickle.dumps(state)
    driver.update(state, X)
    for other in (pickle.loads(stored), copy.deepcopy(state), jax.tree.map(jnp.copy, state)):
        with pytest.raises(NoiseReuseError, match="from step 0"):
            driver.update(other, X)


@pytest.mark.full
def test_a_run_that_failed_gives_its_noise_back(monkeypatch):
    driver = svi(secret_key=3)
    session = driver._session((X,), {})
    monkeypatch.setattr(session, "run", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        driver.run(KEY, 2, X, **run)
    monkeypatch.undo()
    state = driver.run(KEY, 2, X, **run).state
    monkeypatch.setattr(session, "run", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        driver.run(KEY, 2, X, init_state=state, **run)
    monkeypatch.undo()
    driver.run(KEY, 2, X, init_state=state, **run)


def test_a_state_that_a_transformed_function_holds_is_refused():
    driver = svi()
    state = driver.init(KEY, X)
    several = jnp.stack([X, X + 1])
    held = {
        "compiled": lambda: jax.jit(lambda: driver.update(state, X))(),
        "lanes": lambda: jax.vmap(lambda x: driver.update(state, x))(several),
        "no lane of states": lambda: jax.vmap(driver.update, in_axes=(None, 0))(state, several),
        "scan": lambda: jax.lax.scan(lambda _, x: (None, driver.update(state, x)), None, several),
        "compiled scan": lambda: jax.jit(
            lambda s, xs: jax.lax.scan(lambda _, x: (None, driver.update(s, x)[0]), None, xs)
        )(state, several),
        "branches": lambda: jax.jit(
            lambda s, p: jax.lax.cond(p, lambda: driver.update(s, X)[0], lambda: s)
        )(state, True),
        "gradient": lambda: jax.grad(lambda x: driver.get_params(
            driver.update(state, X * x)[0])["auto_loc"][0])(1.0),
    }  # fmt: skip
    for name, call in held.items():
        with pytest.raises(NoiseReuseError, match="to be an argument of the function"):
            call()
            pytest.fail(name)
    with pytest.raises(NoiseReuseError, match="the same state in two calls"):
        jax.jit(lambda s: (driver.update(s, X), driver.update(s, X + 1)))(state)
    with pytest.raises(NoiseReuseError, match="every device would add the same noise.*mesh="):
        with_shard_map(lambda x: driver.update(state, X * x)[1])
    with pytest.raises(NoiseReuseError, match="every device would add the same noise"):
        jax.pmap(driver.update, in_axes=(None, 0))(state, X[None])


@pytest.mark.full
def test_lanes_that_share_a_state_have_noise_of_their_own():
    driver = svi(sampler=Permutation(4))
    state = driver.init(KEY, X)
    several = jnp.stack([X, X, X])
    step = jax.jit(jax.vmap(jax.vmap(driver.update, in_axes=(0, 0)), in_axes=(0, 0)))
    stacked = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (2, 3, *leaf.shape)), state)
    found = step(stacked, jnp.stack([several, several]))[0]
    assert_all_differ(jax.tree.leaves(found.optim_state)[1], 6)
    assert_all_differ(words_of(found.secret_key), 6)


def broadcast(state):
    return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (3, *leaf.shape)), state)


# Ways to give three lanes one state whose keys nothing else distinguishes.
LANES = {
    # Of a compiled update, whose program has the state as an argument of its own.
    "in_axes=None": lambda update, state, xs: jax.jit(jax.vmap(jax.jit(update), in_axes=(None, 0)))(
        state, xs
    ),
    "equal copies": lambda update, state, xs: jax.jit(jax.vmap(update))(broadcast(state), xs),
}


@pytest.mark.parametrize("lanes", LANES.values(), ids=LANES)
def test_lanes_with_one_state_and_a_given_key_have_noise_of_their_own(lanes):
    """A given key has no nonce, so only the number of the lane can make the noise differ."""
    driver = svi(secret_key=3)
    state = driver.init(KEY, X)
    assert state.nonce is None
    found, _ = lanes(driver.update, state, jnp.stack([X, X, X]))
    assert_all_differ(driver.get_params(found)["auto_loc"], 3)
    for own in (found.secret_key, found.sampler_state.key):
        assert_all_differ(words_of(own), 3)


@pytest.mark.full
def test_transformed_updates_that_pass_the_state_work():
    driver = svi()
    for transform in (jax.jit, jax.checkpoint):
        assert int(transform(driver.update)(driver.init(KEY, X), X)[0].step) == 1
    assert jax.eval_shape(driver.update, driver.init(KEY, X), X)[0].step.ndim == 0


def noise_of(driver, states):
    """The iterates after one step each from the same state: they differ by their noise alone."""
    return np.concatenate([driver.get_params(state)["auto_loc"] for state in states])


def twice_compiled(update, state):
    step = jax.jit(update)
    return [step(state, X)[0] for _ in range(3)]


def twice_in_one_function(update, state):
    step = jax.jit(update)
    return jax.jit(lambda state: [step(state, X)[0] for _ in range(3)])(state)


def of_copies(update, state):
    step = jax.jit(update)
    return [step(jax.tree.map(lambda leaf: leaf, state), X)[0] for _ in range(3)]


def transformed(transform):
    def states(update, state):
        step = transform(update)
        return [step(state, X)[0] for _ in range(3)]

    return states


def lanes_twice(update, state):
    step = jax.vmap(update, in_axes=(0, None))
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), state)
    found = [step(stacked, X)[0] for _ in range(2)]
    return [jax.tree.map(lambda leaf, i=i: leaf[i], each) for each in found for i in (0, 1)]


def mapped_over_states(update, state):
    """Each of the stacked states was read by itself."""
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), state, state, state)
    found = jax.lax.map(lambda one: update(one, X)[0], stacked)
    return [jax.tree.map(lambda leaf, i=i: leaf[i], found) for i in range(3)]


COMPILED = {
    "jit": twice_compiled,
    "in one function": twice_in_one_function,
    "copies": of_copies,
    "checkpoint": transformed(jax.checkpoint),
    "compiled ahead": lambda update, state: [
        jax.jit(update).lower(state, X).compile()(state, X)[0] for _ in range(3)
    ],
    "lanes": lanes_twice,
    "lax.map": mapped_over_states,
}


@pytest.mark.parametrize("calls", COMPILED.values(), ids=COMPILED)
@pytest.mark.parametrize("sampler", [FullBatch(), Poisson(0.5)], ids=["full", "poisson"])
def test_a_compiled_update_that_is_given_one_state_twice_draws_other_noise(calls, sampler):
    driver = svi(sampler=sampler)
    state = driver.init(KEY, X)
    found = calls(driver.update, state)
    assert_all_differ(noise_of(driver, found), len(found))
    assert_all_differ([words_of(each.secret_key) for each in found], len(found))
    if hasattr(state.sampler_state, "key"):  # batches differ too
        assert_all_differ([words_of(each.sampler_state.key) for each in found], len(found))


@pytest.mark.full
def test_a_compiled_update_cannot_be_called_with_a_state_that_a_function_holds():
    driver = svi()
    state = driver.init(KEY, X)
    step = jax.jit(driver.update)
    step(driver.init(KEY, X), X)  # it is compiled: no Python of the driver runs
    several = jnp.stack([X, X + 1])
    calls = {
        "jit": lambda: jax.jit(lambda x: step(state, x))(X),
        "vmap": lambda: jax.vmap(lambda x: step(state, x))(several),
        "scan": lambda: jax.lax.scan(lambda _, x: (None, step(state, x)[0]), None, several),
        "map": lambda: jax.lax.map(lambda x: step(state, x)[0], several),
        "checkpoint": lambda: jax.lax.map(
            lambda x: jax.checkpoint(driver.update)(state, x)[0], several
        ),
    }
    for name, call in calls.items():
        with pytest.raises(NoiseReuseError, match="to be an argument of the function"):
            call()
            pytest.fail(name)


@pytest.mark.full
def test_a_given_key_makes_the_same_noise_in_compiled_updates():
    """It is reproducible: the loop of compiled updates is the run."""
    driver = svi(secret_key=3, num_steps=3)
    state, step = driver.init(KEY, X), jax.jit(driver.update)
    for _ in range(3):
        state, _ = step(state, X)
    other = svi(secret_key=3, repetition=True).run(KEY, 3, X, **run)
    np.testing.assert_allclose(
        driver.get_params(state)["auto_loc"], other.params["auto_loc"], rtol=1e-5
    )


@pytest.mark.parametrize("given", [None, 11], ids=["fresh key", "given key"])
def test_copies_from_a_pickle_have_keys_and_noise_of_their_own(given):
    driver = svi(secret_key=given, num_steps=4)
    state = driver.init(KEY, X)
    states = [state, *(pickle.loads(pickle.dumps(state)) for _ in range(2))]
    for read in (lambda s: s.secret_key, lambda s: s.sampler_state.key):
        assert_all_differ([words_of(read(each)) for each in states], 3)
    step = jax.jit(driver.update)
    compiled = [step(each, X)[0] for each in states]
    resumed = []
    for each in states:
        once._used.clear()  # each run in a process of its own: nothing else distinguishes them
        resumed.append(driver.run(KEY, 1, X, init_state=each, **run).state)
    assert_all_differ(noise_of(driver, compiled + resumed), 6)


HEAD = """
import pickle, sys, jax, jax.numpy as jnp, numpy as np
from privacy.test_once import KEY, X, svi, words_of
"""


def in_new_process(code, *paths, **environment):
    command = [sys.executable, "-c", HEAD + textwrap.dedent(code), *map(str, paths)]
    environment = os.environ | environment
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


RESUMED = """
    driver = svi()
    state = pickle.loads(open(sys.argv[1], "rb").read())
    driver.init(KEY, X)
    for again in range(2):
        new, _ = driver.update(pickle.loads(open(sys.argv[1], "rb").read()), X) if again else (
            driver.run(KEY, 1, X, init_state=state, progress_bar=False).state, None)
        print(float(driver.get_params(new)["auto_loc"][0]))
        if not again:
            from numpyro_dp.privacy import once
            once._used.clear()  # as in a further process
"""


@pytest.mark.slow
@pytest.mark.operating_system_keys
@pytest.mark.parametrize("given", [None, 11], ids=["fresh key", "given key"])
def test_processes_that_resume_one_state_share_no_noise(tmp_path, given):
    driver = svi(secret_key=given)
    state = driver.run(KEY, 2, X, **run).state
    path = tmp_path / "state"
    path.write_bytes(pickle.dumps(state))
    found = [*in_new_process(RESUMED, path), *in_new_process(RESUMED, path)]
    found.append(driver.run(KEY, 1, X, init_state=state, **run).params["auto_loc"][0])
    values = np.asarray(found, float)
    assert np.diff(np.sort(values)).min() > 2e-6  # equal noise differs by rounding alone


@pytest.mark.extended
def test_a_persistent_cache_of_programs_holds_no_key(tmp_path):
    """Another key leads to the very same programs; a constant in one would make another program."""
    code = """
        import os
        def entries():
            return {name for name in os.listdir(sys.argv[1]) if name.endswith("cache")}
        def run(seed):
            jax.clear_caches()
            driver = svi(secret_key=seed, num_steps=9)
            state = driver.run(KEY, 2, X, progress_bar=False).state
            state, _ = jax.jit(driver.update)(driver.update(state, X)[0], X)
            driver.run(KEY, 2, X, init_state=state, progress_bar=False)
            held = words_of(state.secret_key)
            return lambda: jax.jit(lambda x: x ^ jnp.asarray(held))(jnp.zeros(8, jnp.uint32))
        run(1)
        first = entries()
        hold = run(2)
        print(len(first), len(entries() - first))
        before = entries()
        hold()
        print(len(entries() - before))
    """
    first, further, of_a_constant = in_new_process(
        code, tmp_path, JAX_COMPILATION_CACHE_DIR=str(tmp_path),
        JAX_ENABLE_COMPILATION_CACHE="true", JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0",
        JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES="-1",
    )  # fmt: skip
    assert int(first) > 5
    assert int(further) == 0
    assert int(of_a_constant) >= 1


@pytest.mark.full
def test_a_pickled_result_holds_no_key():
    result = svi(secret_key=bytes(range(32))).run(KEY, 2, X, **run)
    words = words_of(result.state.secret_key).tobytes()
    stored = pickle.dumps(result)
    assert words not in stored
    assert words[:8] not in stored
    found = pickle.loads(stored)
    assert found.state is None
    assert found.privacy.epsilon == result.privacy.epsilon
    np.testing.assert_array_equal(found.params["auto_loc"], result.params["auto_loc"])
    with pytest.raises(TypeError, match=r"got None.*Pickle result\.state by itself"):
        svi().update(found.state, X)
    assert copy.copy(result).state is result.state
    assert copy.deepcopy(result).state is result.state


@pytest.mark.parametrize("sampler", [FullBatch(), Poisson(0.5), Permutation(5)], ids=repr)
def test_what_is_printed_shows_no_key(sampler):
    state = svi(sampler=sampler).init(KEY, X)
    words = words_of(state.secret_key).tolist()
    words += words_of(state.sampler_state.key).tolist()
    for shown in (state, state.sampler_state, state.opened.sampler_state):
        for text in (repr(shown), str(shown), f"{shown}"):
            assert not any(str(word) in text for word in words)


@pytest.mark.full
def test_another_drivers_state_is_not_accounted_for():
    state = svi(clip_norm=1.0).run(KEY, 2, X, **run).state
    for other in (svi(clip_norm=2.0), svi(sampler=Poisson(1e-6))):
        with pytest.raises(ValueError, match="The state's steps were taken"):
            other.privacy(state)
    make, args = DRIVERS["DPEM"]
    other = make().run(KEY, 2, *args, **run).state
    with pytest.raises(ValueError, match="The state's steps were taken"):
        svi().privacy(other)


@pytest.mark.full
def test_a_driver_without_noise_or_of_repetitions_does_not_reuse_the_noise_of_a_state():
    state = svi().run(KEY, 2, X, **run).state
    for other in (0.0, 0.5):
        with pytest.raises(ValueError, match=f"has noise_multiplier=1, .* driver has {other:g}"):
            svi(noise_multiplier=other).run(KEY, 1, X, init_state=state, **run)
    svi().run(KEY, 1, X, init_state=state, **run)  # those had used nothing
    with pytest.raises(NoiseReuseError, match="from step 2"):
        svi().run(KEY, 1, X, init_state=state, **run)
    state = svi().run(KEY, 2, X, **run).state
    repeating = svi(secret_key=5, repetition=True)
    repeating.run(KEY, 1, X, init_state=state, **run)
    with pytest.raises(NoiseReuseError, match="from step 2"):
        repeating.run(KEY, 1, X, init_state=state, **run)
    quiet = svi(noise_multiplier=0.0, secret_key=77)
    quiet.sweep(KEY[None], 2, X, noise_multiplier=[1.0])
    with pytest.raises(NoiseReuseError, match="already used for a run"):
        quiet.sweep(KEY[None], 2, X, noise_multiplier=[1.0])


@pytest.mark.full
def test_a_sampler_that_is_refused_keeps_its_samples_and_shows_no_key():
    sampler = mcmc(secret_key=3)
    sampler.run(KEY, X)
    before = sampler.get_samples()["mean"]
    with pytest.raises(NoiseReuseError, match="already used for a run"):
        sampler.run(KEY, X)
    np.testing.assert_array_equal(sampler.get_samples()["mean"], before)
    words = words_of(sampler.settings.privacy.secret_key).tolist()
    assert not any(str(word) in repr(sampler.settings) for word in words)


def test_a_state_on_the_host_draws_other_noise_in_each_compiled_update():
    driver = svi()
    host = jax.device_get(driver.init(KEY, X))
    step = jax.jit(driver.update)
    assert_all_differ(noise_of(driver, [step(host, X)[0] for _ in range(3)]), 3)


def test_a_state_with_another_field_is_known_by_its_keys():
    driver = svi()
    state = driver.init(KEY, X)

    def twice(state, x):
        other = state._replace(rng_key=jax.random.key(5))
        return driver.update(state, x)[0], driver.update(other, x + 1)[0]

    with pytest.raises(NoiseReuseError, match="the same state in two calls"):
        jax.jit(twice)(state, X)
    with pytest.raises(NoiseReuseError, match="to be an argument of the function"):
        jax.jit(lambda noise: driver.update(state._replace(noise_multiplier=noise), X))(1.0)


@pytest.mark.full
def test_stacked_states_may_be_copied():
    driver = svi()
    states = [driver.init(KEY, X) for _ in range(3)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)
    for copied in (copy.deepcopy(stacked), stacked._replace(step=stacked.step + 0)):
        found = jax.vmap(driver.update, in_axes=(0, None))(copied, X)[0]
        assert found.step.tolist() == [1, 1, 1]
    assert "key" in repr(stacked.opened) and not any(map(str.isdigit, repr(stacked.opened)))


def test_a_scan_that_keeps_its_state_has_other_noise_in_each_step():
    driver = svi()

    def body(state, _):
        return state, driver.update(state, X)[0].optim_state

    _, found = jax.lax.scan(body, driver.init(KEY, X), None, length=4)
    assert_all_differ(jax.tree.leaves(found)[1], 4)


def test_a_state_that_two_forks_continue_gets_other_keys_in_each(monkeypatch):
    driver = svi()
    state = driver.run(KEY, 2, X, **run).state
    found = []
    for _ in range(2):
        monkeypatch.setattr(once, "_used", {})  # a forked child forgets all runs
        found.append(driver.run(KEY, 2, X, init_state=state, **run).params["auto_loc"])
    assert not np.array_equal(*found)


def test_a_forked_child_forgets_runs_and_nonces():
    once._used[b"run"] = 3
    keys._nonces.append(np.zeros(8))
    with warnings.catch_warnings():  # JAX has threads, which the child does not use
        warnings.simplefilter("ignore")
        child = os.fork()
    if not child:
        os._exit(len(once._used) + len(keys._nonces))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert once._used and keys._nonces


def test_keys_of_a_run_differ():
    noise, batches = keys_of_run(secret_key(1), ())
    assert not np.array_equal(words_of(noise), words_of(batches))
