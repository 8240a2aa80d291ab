"""No two runs share noise, however they are started: keys under transformations, states, copies."""

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
import optax
import pytest
from flat import dpmcmc, dpsep, dpsvi, grouped
from models import mean_of
from numpyro.infer.autoguide import AutoDiagonalNormal

from numpyro_dp import DPEM, DPPBP, SGLD, NoiseReuseError, RegressionNetwork, secret_key
from numpyro_dp.privacy import keys, once
from numpyro_dp.privacy.keys import keys_of_run
from numpyro_dp.samplers import FullBatch, Permutation, Poisson

KEY = jax.random.key(0)
N = 12
X = jnp.linspace(-1.0, 1.0, N)
TABLE = X[:, None]
NOISE = {"clip_norm": 1.0, "sampler": FullBatch(), "noise_multiplier": 1.0}
model = mean_of()


def svi(optim=optax.sgd(0.1), guide=AutoDiagonalNormal, **changes):  # noqa: B008
    return dpsvi(model, guide, optim, **changes)


def mcmc(**changes):
    return dpmcmc(SGLD(model, step_size=0.01), num_warmup=0, num_samples=2, **changes)


DRIVERS = {
    "DPSVI": (svi, (X,)),
    "DPSEP": (lambda **changes: dpsep(model, **changes), (X,)),
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


def at_compile_time(fn):
    def inner(x):
        with jax.ensure_compile_time_eval():
            return fn(x)

    return jax.jit(inner)(1.0)


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
    "compile-time evaluation": at_compile_time,
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("given", [None, 7], ids=["fresh key", "given key"])
@pytest.mark.parametrize("name", [*DRIVERS, "DPMCMC"])
def test_no_run_starts_and_no_key_is_made_while_a_function_is_traced(name, given, transform):
    calls = {r"secret_key\(\)": secret_key}
    if name == "DPMCMC":
        calls["DPMCMC.run"] = lambda: mcmc(secret_key=given).run(KEY, X)
    else:
        make, args = DRIVERS[name]
        driver = make(secret_key=given, num_steps=2)
        calls[f"{name}.init"] = lambda: driver.init(KEY, *args)
        calls[f"{name}.run"] = lambda: driver.run(KEY, 2, *args, **run)
        calls[f"{name}.sweep"] = lambda: driver.sweep(KEY[None], 2, *args)
    for call, start in calls.items():

        def traced(x, start=start):
            start()
            return x

        with pytest.raises(NoiseReuseError, match=f"{call} outside of jit"):
            TRANSFORMS[transform](traced)


def unstacked(tree, number):
    return [jax.tree.map(lambda leaf, i=i: leaf[i], tree) for i in range(number)]


@pytest.mark.full
def test_two_runs_share_no_noise_however_they_are_started():
    """At one public key and on the same records."""
    driver = svi(num_steps=10)
    starts = {
        "run": driver.run(KEY, 2, X, **run).params,
        "the same driver again": driver.run(KEY, 2, X, **run).params,
        "streamed": svi(sampler=Poisson(0.99)).run(KEY, 2, X, stream=True, **run).params,
        "init_state": driver.run(KEY, 2, X, init_state=driver.init(KEY, X), **run).params,
        "an integer": svi(secret_key=5).run(KEY, 2, X, **run).params,
        "a secret key": svi(secret_key=secret_key(6)).run(KEY, 2, X, **run).params,
    }
    for name in ("init and update", "again"):
        end = driver.update(driver.update(driver.init(KEY, X), X)[0], X)[0]
        starts[name] = driver.get_params(end)
    swept = driver.sweep(jnp.stack([KEY, KEY]), 2, X)
    starts |= {f"sweep {lane}": swept.one(lane).params for lane in (0, 1)}
    values = {name: float(params["auto_loc"][0]) for name, params in starts.items()}
    for (a, x), (b, y) in itertools.combinations(values.items(), 2):
        assert abs(x - y) > 1e-4, (a, b)
    chains = []
    for _ in range(2):
        sampler = mcmc(num_chains=2)
        sampler.run(KEY, X)
        chains.append(np.asarray(sampler.get_samples(group_by_chain=True)["mean"]))
    assert len(np.unique(np.concatenate(chains).round(4), axis=0)) == 4


@pytest.mark.full
def test_every_step_has_noise_of_its_own():
    """The noise is 10,000 times the signal and steps are small, so all moves are its noise."""
    driver = svi(optax.sgd(1e-6), num_steps=4, noise_multiplier=1e4)
    kept = driver.run(KEY, 4, X, **run).trace.params["auto_loc"][:, 0]
    states = [driver.init(KEY, X)]
    for _ in range(3):
        states.append(driver.update(states[-1], X)[0])
    for values in (np.asarray(kept), noise_of(driver, states)):
        moves = np.diff(values)
        assert 1e-6 < np.abs(moves).min() < np.abs(moves).max() < 0.1
        for one, other in itertools.combinations(moves, 2):
            assert abs(one - other) > 1e-3 * abs(one)


@pytest.mark.parametrize("name", [*DRIVERS, "DPMCMC"])
def test_a_given_key_starts_one_run(name):
    """Whether it starts with a call of run, or with a state that is not yet updated."""
    starts = [lambda **changes: mcmc(**changes).run(KEY, X)]
    if name != "DPMCMC":
        make, args = DRIVERS[name]
        starts = [
            lambda **changes: make(**changes).run(KEY, 2, *args, **run),
            lambda **changes: make(num_steps=2, **changes).init(KEY, *args),
        ]
    for key, first in enumerate(starts):
        first(secret_key=key)
        for other in starts:
            with pytest.raises(NoiseReuseError, match="already used for a run.*repetition=True"):
                other(secret_key=key)
            other(secret_key=key, repetition=True)


@pytest.mark.full
@pytest.mark.parametrize("noise", [1.0, 0.0])
def test_a_sweep_and_the_run_that_it_equals_share_a_key(noise):
    driver = svi(secret_key=3, noise_multiplier=noise)
    driver.sweep(KEY[None], 2, X, noise_multiplier=[1.0, 2.0])
    own = jax.random.fold_in(driver.settings.privacy.secret_key, 1)
    for again in (
        lambda: driver.sweep(KEY[None], 2, X, noise_multiplier=[1.0]),
        lambda: svi(secret_key=own).run(KEY, 2, X, **run),
    ):
        with pytest.raises(NoiseReuseError, match="already used for a run"):
            again()


@pytest.mark.full
def test_a_repetition_is_a_function_of_its_key():
    driver = svi(secret_key=3, repetition=True)
    found = [driver.run(KEY, 2, X, **run) for _ in range(2)]
    np.testing.assert_array_equal(*(each.params["auto_loc"] for each in found))
    step, state = jax.jit(driver.update), driver.init(KEY, X)
    looped = driver.get_params(step(step(state, X)[0], X)[0])["auto_loc"]
    np.testing.assert_allclose(looped, found[0].params["auto_loc"], rtol=1e-5)
    assert "another run may have the same noise" in str(found[0].privacy)
    with pytest.raises(ValueError, match="secret_key together with repetition=True"):
        svi(repetition=True)
    with pytest.raises(TypeError, match="True or False, got 'yes'|type: <class 'bool'>"):
        svi(secret_key=1, repetition="yes")


@pytest.mark.parametrize("changed", ["nothing", "learning rate", "records"])
def test_a_state_is_resumed_once(changed):
    driver = svi(num_steps=10)
    state = driver.run(KEY, 2, X, **run).state
    other, records = driver, X + (changed == "records")
    if changed == "learning rate":
        other = svi(optax.sgd(0.5), driver.guide, num_steps=10)
        other.init(KEY, X)
    driver.run(KEY, 2, X, init_state=state, **run)
    match = "state of step 2|from step 2 of a run.*up to 4"
    if changed == "records":
        match = "not the records of the run"
    with pytest.raises(ValueError, match=match):  # a NoiseReuseError is one
        other.run(KEY, 2, records, init_state=state, **run)
    with pytest.raises(NoiseReuseError, match="from step 2 of a run"):
        other.update(state, records)


@pytest.mark.full
def test_a_state_and_its_copies_are_updated_once():
    driver = svi()
    state = driver.init(KEY, X)
    stored = pickle.dumps(state)
    new, _ = driver.update(state, X)
    copies = pickle.loads(stored), copy.deepcopy(state), jax.tree.map(jnp.copy, state)
    for other in (state, *copies):
        with pytest.raises(NoiseReuseError, match="from step 0 of a run whose steps up to 1"):
            driver.update(other, X + 1)
    with pytest.raises(NoiseReuseError, match="from step 0"):
        driver.run(KEY, 2, X, init_state=state, **run)
    driver.update(new, X)


@pytest.mark.full
def test_runs_and_sweeps_that_failed_give_their_noise_back(monkeypatch):
    driver, keys = svi(secret_key=3), jnp.stack([KEY, KEY])
    session = driver._session((X,), {})

    def after_a_failure(name, call, done=0):
        left, usual = iter(range(done)), getattr(session, name)
        with monkeypatch.context() as patched, pytest.raises(ZeroDivisionError):
            patched.setattr(
                session, name, lambda *args, **kwargs: usual(*args, **kwargs) if [*left] else 1 / 0
            )
            call()
        return call

    state = after_a_failure("run", lambda: driver.run(KEY, 2, X, **run))().state
    after_a_failure("run", lambda: driver.run(KEY, 2, X, init_state=state, **run))()
    once._used.clear()
    for done in (0, 1):  # in the first chunk, and in the second one
        sweep = after_a_failure(
            "run_many", lambda: driver.sweep(keys, 2, X, chunk_size=1), done=done
        )
    sweep()


@pytest.mark.parametrize("compiled", [False, True], ids=["update", "compiled"])
def test_a_state_that_a_transformed_function_holds_is_refused(compiled):
    driver = svi()
    state, several = driver.init(KEY, X), jnp.stack([X, X + 1])
    update = driver.update
    if compiled:  # once it is, no Python of the driver runs
        update = jax.jit(update)
        update(driver.init(KEY, X), X)
    scan = jax.lax.scan
    held = {
        "jit": lambda: jax.jit(lambda x: update(state, x))(X),
        "lanes": lambda: jax.vmap(lambda x: update(state, x))(several),
        "scan": lambda: scan(lambda _, x: (None, update(state, x)[0]), None, several),
        "map": lambda: jax.lax.map(lambda x: update(state, x)[0], several),
        "checkpoint": lambda: jax.lax.map(lambda x: jax.checkpoint(update)(state, x)[0], several),
        "gradient": lambda: jax.grad(
            lambda x: driver.get_params(update(state, X * x)[0])["auto_loc"][0])(1.0),
        "another field": lambda: jax.jit(
            lambda noise: update(state._replace(noise_multiplier=noise), X))(1.0),
    }  # fmt: skip
    if not compiled:
        held |= {
            "no lane of states": lambda: jax.vmap(update, in_axes=(None, 0))(state, several),
            "compiled scan": lambda: jax.jit(
                lambda s, xs: scan(lambda _, x: (None, update(s, x)[0]), None, xs))(state, several),
            "branches": lambda: jax.jit(
                lambda s, p: jax.lax.cond(p, lambda: update(s, X)[0], lambda: s))(state, True),
        }  # fmt: skip
    for name, call in held.items():
        with pytest.raises(NoiseReuseError, match="to be an argument of the function"):
            call()
            pytest.fail(name)


def test_one_state_in_two_calls_or_on_two_devices_is_refused():
    driver = svi()
    state = driver.init(KEY, X)
    for change in ({}, {"rng_key": jax.random.key(5)}):

        def twice(state, change=change):
            other = state._replace(**change)
            return driver.update(state, X)[0], driver.update(other, X + 1)[0]

        with pytest.raises(NoiseReuseError, match="the same state in two calls"):
            jax.jit(twice)(state)
    with pytest.raises(NoiseReuseError, match="every device would add the same noise.*mesh="):
        with_shard_map(lambda x: driver.update(state, X * x)[1])
    with pytest.raises(NoiseReuseError, match="every device would add the same noise"):
        jax.pmap(driver.update, in_axes=(None, 0))(state, X[None])


# Ways to give lanes one state whose keys nothing else distinguishes.
LANES = {
    # Of a compiled update, whose program has the state as an argument of its own.
    "in_axes=None": lambda update, state, xs: jax.jit(jax.vmap(jax.jit(update), in_axes=(None, 0)))(
        state, xs
    ),
    "equal copies": lambda update, state, xs: jax.jit(jax.vmap(update))(
        jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (3, *leaf.shape)), state), xs
    ),
    "lanes of lanes": lambda update, state, xs: jax.jit(jax.vmap(jax.vmap(update)))(
        jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (2, 3, *leaf.shape)), state),
        jnp.stack([xs, xs]),
    ),
}


@pytest.mark.parametrize("given", [3, None], ids=["given key", "fresh key"])
@pytest.mark.parametrize("lanes", LANES.values(), ids=LANES)
def test_lanes_with_one_state_have_noise_of_their_own(lanes, given):
    """A given key has no nonce, so only the number of the lane can make the noise differ."""
    driver = svi(secret_key=given)
    state = driver.init(KEY, X)
    assert (state.nonce is None) == (given is not None)
    found, _ = lanes(driver.update, state, jnp.stack([X, X, X]))
    number = found.step.size
    assert_all_differ(driver.get_params(found)["auto_loc"], number)
    for own in (found.secret_key, found.sampler_state.key):
        assert_all_differ(words_of(own), number)


def noise_of(driver, states):
    """The iterates after one step each from the same state: they differ by their noise alone."""
    return np.concatenate([driver.get_params(state)["auto_loc"] for state in states])


def thrice(transform, change=lambda state: state):
    def states(update, state):
        step = transform(update)
        return [step(change(state), X)[0] for _ in range(3)]

    return states


def in_one_function(update, state):
    step = jax.jit(update)
    return jax.jit(lambda state: [step(state, X)[0] for _ in range(3)])(state)


def lanes_twice(update, state):
    step = jax.vmap(update, in_axes=(0, None))
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), state)
    return [one for _ in range(2) for one in unstacked(step(stacked, X)[0], 2)]


def mapped_over_states(update, state):
    """Each of the stacked states was read by itself."""
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), state, state, state)
    stacked = copy.deepcopy(stacked)
    assert "key" in repr(stacked.opened) and not any(map(str.isdigit, repr(stacked.opened)))
    return unstacked(jax.lax.map(lambda one: update(one, X)[0], stacked), 3)


def kept_by_a_scan(update, state):
    found = jax.lax.scan(lambda s, _: (s, update(s, X)[0]), state, None, length=4)[1]
    return unstacked(found, 4)


COMPILED = {
    "jit": thrice(jax.jit),
    "in one function": in_one_function,
    "copies": thrice(jax.jit, lambda state: jax.tree.map(lambda leaf: leaf, state)),
    "on the host": thrice(jax.jit, jax.device_get),
    "checkpoint": thrice(jax.checkpoint),
    "compiled ahead": lambda update, state: thrice(
        lambda update: jax.jit(update).lower(state, X).compile()
    )(update, state),
    "lanes": lanes_twice,
    "lax.map": mapped_over_states,
    "scan": kept_by_a_scan,
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


@pytest.mark.parametrize("given", [None, 11], ids=["fresh key", "given key"])
def test_copies_from_a_pickle_and_runs_that_go_on_have_noise_of_their_own(given):
    driver = svi(secret_key=given, num_steps=4)
    state = driver.init(KEY, X)
    states = [state, *(pickle.loads(pickle.dumps(state)) for _ in range(2))]
    for read in (lambda s: s.secret_key, lambda s: s.sampler_state.key):
        assert_all_differ([words_of(read(each)) for each in states], 3)
    step = jax.jit(driver.update)
    found = [step(each, X)[0] for each in states]
    for each in (*states, state):  # the last one as two forks continue it
        once._used.clear()  # each run in a process of its own: nothing else distinguishes them
        found.append(driver.run(KEY, 1, X, init_state=each, **run).state)
    assert_all_differ(noise_of(driver, found), 7)


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
    from numpyro_dp.privacy import once
    driver = svi()
    driver.init(KEY, X)
    stored = open(sys.argv[1], "rb").read()
    state = driver.run(KEY, 1, X, init_state=pickle.loads(stored), progress_bar=False).state
    once._used.clear()  # as in a further process
    for new in (state, driver.update(pickle.loads(stored), X)[0]):
        print(float(driver.get_params(new)["auto_loc"][0]))
"""


@pytest.mark.slow
@pytest.mark.operating_system_keys
@pytest.mark.parametrize("given", [
    pytest.param(None, id="fresh key"),
    pytest.param(11, id="given key", marks=pytest.mark.extended),
])  # fmt: skip
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
        def held(seed):
            jax.clear_caches()
            driver = svi(secret_key=seed, num_steps=9)
            state = driver.run(KEY, 2, X, progress_bar=False).state
            state, _ = jax.jit(driver.update)(driver.update(state, X)[0], X)
            driver.run(KEY, 2, X, init_state=state, progress_bar=False)
            return words_of(state.secret_key)
        held(1)
        first = entries()
        key = held(2)
        then = entries()
        jax.jit(lambda x: x ^ jnp.asarray(key))(jnp.zeros(8, jnp.uint32))
        print(len(first), len(then - first), len(entries() - then))
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
    assert words[:8] not in stored
    found = pickle.loads(stored)
    assert found.state is None and found.privacy.epsilon == result.privacy.epsilon
    np.testing.assert_array_equal(found.params["auto_loc"], result.params["auto_loc"])
    with pytest.raises(TypeError, match=r"got None.*Pickle result\.state by itself"):
        svi().update(found.state, X)
    assert copy.copy(result).state is copy.deepcopy(result).state is result.state


@pytest.mark.parametrize("sampler", [FullBatch(), Poisson(0.5), Permutation(5)], ids=repr)
def test_what_is_printed_shows_no_key(sampler):
    driver = svi(sampler=sampler, secret_key=3)
    state = driver.init(KEY, X)
    given = driver.settings.privacy.secret_key
    found = [words_of(key) for key in (state.secret_key, state.sampler_state.key, given)]
    for shown in (state, state.sampler_state, state.opened.sampler_state, driver.settings):
        text = f"{shown!r} {shown!s} {shown}"
        assert not any(str(word) in text for words in found for word in words)


@pytest.mark.full
def test_another_drivers_state_is_not_accounted_for():
    make, args = DRIVERS["DPEM"]
    state, of_em = svi().run(KEY, 2, X, **run).state, make().run(KEY, 2, *args, **run).state
    for other, given in ((svi(clip_norm=2.0), state), (svi(sampler=Poisson(1e-6)), state),
                         (svi(), of_em)):  # fmt: skip
        with pytest.raises(ValueError, match="The state's steps were taken"):
            other.privacy(given)


@pytest.mark.full
def test_a_driver_without_noise_or_of_repetitions_does_not_reuse_the_noise_of_a_state():
    for last in (svi(), svi(secret_key=5, repetition=True)):
        state = svi().run(KEY, 2, X, **run).state
        for other in (0.0, 0.5):
            match = f"has noise_multiplier=1, .* driver has {other:g}"
            with pytest.raises(ValueError, match=match):
                svi(noise_multiplier=other).run(KEY, 1, X, init_state=state, **run)
        last.run(KEY, 1, X, init_state=state, **run)  # those had used nothing
        with pytest.raises(NoiseReuseError, match="from step 2"):
            last.run(KEY, 1, X, init_state=state, **run)


@pytest.mark.full
def test_a_sampler_that_is_refused_keeps_its_samples():
    sampler = mcmc(secret_key=3)
    sampler.run(KEY, X)
    before = sampler.get_samples()["mean"]
    with pytest.raises(NoiseReuseError, match="already used for a run"):
        sampler.run(KEY, X)
    np.testing.assert_array_equal(sampler.get_samples()["mean"], before)


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
