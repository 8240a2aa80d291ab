"""The Gaussian mechanism on clipped signals: bounds, blocks, events, dtypes."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dp_accounting.dp_event import GaussianDpEvent, NonPrivateDpEvent
from gaussian import gaussian

from numpyro_dp._tree import squared_norm
from numpyro_dp.core import Estimator, MechanismState
from numpyro_dp.mechanisms import AdaptiveClip, GaussianMechanism
from numpyro_dp.privacy.keys import secret_key
from numpyro_dp.privacy.mechanism.clip_norm import ClipNorm
from numpyro_dp.sums.bounded import bounded_sum

STATE = MechanismState(())


def signal(scale=1.0, dtype="float32"):
    return {
        "a": jnp.asarray([3.0, 0.0], dtype) * scale,
        "b": jnp.asarray(4.0, dtype) * scale,
        "c": {"inner": jnp.asarray([[12.0]], dtype) * scale},
    }


def norm(tree):
    return math.sqrt(
        sum(float(np.sum(np.asarray(x, np.float64) ** 2)) for x in jax.tree.leaves(tree))
    )


def bounded(mechanism, one):
    """What a batch of one record adds up to: the sum is the only code that applies a bound."""
    estimator = Estimator(lambda *_: (), lambda _, example: example, lambda *_: ())
    batch = jax.tree.map(lambda leaf: leaf[None], one)
    found = bounded_sum(estimator, mechanism, (), batch, jnp.ones(1, bool))
    return {name: found[name] for name in one}


@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1.0, 1e6, 1e15])
def test_one_norm(scale):
    mechanism = gaussian(2.0, 1.0)
    found = bounded(mechanism, signal(scale))
    assert norm(found) <= 2.0
    assert norm(found) == pytest.approx(min(2.0, 13 * scale), rel=1e-5, abs=1e-6)
    if scale < 1:  # exact sums have a grid, in units of the clip norm
        return
    ratio = np.asarray(found["b"]) / np.asarray(found["a"])[0]
    assert ratio == pytest.approx(4 / 3, rel=1e-5)  # the direction stays


def test_a_signal_inside_the_ball_is_left_alone():
    for clip, scale in ((14.0, 1.0), (math.inf, 1e15)):
        found = bounded(gaussian(clip, 0.0), signal(scale))
        for name, leaf in signal(scale).items():
            np.testing.assert_allclose(*jax.tree.leaves((found[name], leaf)), rtol=1e-6)


def test_norms_by_entry():
    mechanism = gaussian({"b": 0.5, ...: 2.0}, 1.0)
    found = bounded(mechanism, signal())
    assert norm(found["b"]) == pytest.approx(0.5, rel=1e-5)
    rest = {"a": found["a"], "c": found["c"]}
    assert norm(rest) == pytest.approx(2.0, rel=1e-5)
    assert norm(found) <= mechanism.sensitivity == pytest.approx(math.sqrt(4.25))
    assert mechanism.blocks(("a", "b", "c")) == (("b",), ("a", "c"))


@pytest.mark.parametrize("clip", [2.0, {"a": 1.0, ...: 2.0}], ids=["one norm", "by entry"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e30])
@pytest.mark.parametrize("name", ["a", "b"])
def test_a_signal_that_is_not_finite_counts_as_nothing(clip, bad, name):
    spoilt = signal() | {name: signal()[name].at[...].set(bad)}  # 1e30: the norm overflows
    assert (
        norm(bounded(gaussian(clip, 1.0), spoilt)) == 0.0
    )  # every entry of the record, whatever its block


@pytest.mark.parametrize("clip", [1.0, 0.7, 3e-3, {"a": 0.7, ...: 1.1}], ids=str)
@pytest.mark.parametrize("traced", [False, True], ids=["numbers", "traced"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_no_clipped_signal_is_longer_than_its_norm_by_rounding(clip, traced, dtype):
    """Norms are taken in higher precision: a factor that is 8 eps too large fails here.

    In a sum of few records the margin of :func:`clip_margin` would hide it.
    """
    wide = jax.enable_x64 if hasattr(jax, "enable_x64") else jax.experimental.enable_x64
    rng = np.random.default_rng(0)
    with wide(dtype == "float64"):
        names = ("a", "b")
        norms = ClipNorm.of(clip).fixed()
        limits = np.asarray(norms.of_blocks(names), np.longdouble)
        mechanism = GaussianMechanism()(norms.as_arrays() if traced else norms, 1.0)
        signals, squares = [], []
        for limit in limits:
            rows = rng.normal(size=(4000, 4)).astype(dtype)
            rows /= np.linalg.norm(rows, axis=1, keepdims=True)
            # Within 32 eps of the norm, a little above it, and far above it.
            near = 1 + np.finfo(dtype).eps * rng.uniform(-32, 32, 2000)
            above = 10.0 ** np.concatenate([rng.uniform(-6, 0, 1000), rng.uniform(0, 15, 1000)])
            size = np.concatenate([near, 1 + above])
            signals.append((rows * (float(limit) * size)[:, None]).astype(dtype))
            squares.append(jax.vmap(squared_norm)(signals[-1]))
        factors = jax.jit(lambda squares: mechanism.scales(names, squares))(tuple(squares))
        largest = []
        for limit, rows, factor in zip(limits, signals, factors, strict=True):
            # As the exact product, and as each number is rounded.
            rounded = rows * np.asarray(factor)[:, None]
            product = rows.astype(np.longdouble) * np.asarray(factor, np.longdouble)[:, None]
            for clipped in (rounded.astype(np.longdouble), product):
                lengths = np.sqrt((clipped**2).sum(1))
                assert (lengths <= limit).all()
                largest.append(float(lengths.max() / limit))
    assert min(largest) > 1 - 20 * np.finfo(dtype).eps  # the bound is reached


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_bounds_and_noise_have_at_least_single_precision(dtype):
    mechanism = gaussian(2.0, 1.0)
    found = bounded(mechanism, signal(100.0, dtype))
    released, state = mechanism.privatise(secret_key(0), signal(1.0, dtype), STATE)
    leaves = jax.tree.leaves((found, released))
    assert {leaf.dtype for leaf in leaves} == {jnp.dtype("float32")}
    assert norm(found) <= 2.0
    assert state == STATE
    assert mechanism.init(found) == ()
    assert jax.tree.structure(released) == jax.tree.structure(signal())


def test_without_noise_the_total_is_released_as_it_is():
    for clip in (2.0, math.inf):
        released, _ = gaussian(clip, 0.0).privatise(secret_key(0), signal(), STATE)
        assert jax.tree.all(jax.tree.map(jnp.array_equal, released, signal()))


def test_noise_of_leaves_of_two_precisions():
    """One draw for all coordinates, of one standard deviation; precisions stay as they are."""
    with jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64():
        total = {"a": jnp.zeros((300, 10), jnp.float32), "b": jnp.zeros(3000, jnp.float64)}
        mechanism = gaussian({"a": 3.0, "b": 4.0}, 2.0)
        noisy, _ = mechanism.privatise(secret_key(0), total, STATE)
        assert {name: leaf.dtype.name for name, leaf in noisy.items()} == {
            "a": "float32",
            "b": "float64",
        }
        a, b = np.asarray(noisy["a"], np.float64).ravel(), np.asarray(noisy["b"])
        for noise in (a, b):
            assert noise.std() == pytest.approx(2 * 5, rel=0.06)  # sensitivity 5
        assert abs(np.corrcoef(a, b)[0, 1]) < 0.08


def test_it_states_its_event_and_sensitivity():
    assert gaussian(2.0, 1.5).event == GaussianDpEvent(1.5)
    assert gaussian(2.0, 0.0).event == NonPrivateDpEvent()
    assert gaussian(math.inf, 1.0).event == NonPrivateDpEvent()
    assert gaussian(3.0, 1.5).sensitivity == 3.0
    both = gaussian({"a": 3.0, ...: 4.0}, 1.5)
    assert (both.sensitivity, both.noise_scale) == (5.0, 7.5)
    assert gaussian(math.inf, 0.0).noise_scale == 0.0


def test_traced_norms_and_multipliers_give_the_same():
    def both(clip, noise):
        mechanism = GaussianMechanism()(clip, noise)
        assert mechanism.event is None or not isinstance(noise, jax.core.Tracer)
        return bounded(mechanism, signal()), mechanism.privatise(secret_key(1), signal(), STATE)[0]

    clip = ClipNorm.of({"a": 0.5, ...: 1.0})
    eager, traced = both(clip, 1.5), jax.jit(both)(clip, 1.5)
    for a, b in zip(jax.tree.leaves(eager), jax.tree.leaves(traced), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_constants_captured_by_a_compiled_function():
    noise = jnp.asarray(1.5)  # an array, as in the state of a run
    released = jax.jit(lambda key: gaussian(0.5, noise).privatise(key, signal(), STATE)[0])
    expected, _ = gaussian(0.5, 1.5).privatise(secret_key(1), signal(), STATE)
    np.testing.assert_allclose(released(secret_key(1))["a"], expected["a"], rtol=1e-5)


@pytest.mark.extended
def test_an_adaptive_norm_is_a_norm_with_a_coordinate_of_its_own():
    clip = {"b": AdaptiveClip(0.5, share=0.2), ...: 2.0}
    mechanism = gaussian(clip, 0.0, batch_size=10.0)
    assert mechanism.sensitivity == pytest.approx(math.sqrt(0.25 / 0.8 + 4))
    assert mechanism.event == NonPrivateDpEvent()
    assert gaussian(clip, 1.5).event == GaussianDpEvent(1.5)
    assert norm(bounded(mechanism, signal())["b"]) == pytest.approx(0.5, rel=1e-5)
    squares = (jnp.asarray([0.2, 0.3, jnp.nan]), jnp.asarray([1.0, 9.0, 1.0]))
    ((entry, (numbers, size)),) = mechanism.extras(("b", "a"), squares, 1.0).items()
    np.testing.assert_allclose(numbers, [0.25, -0.25, 0.0], rtol=2e-6)
    assert size == pytest.approx(0.25)  # 0.5 sqrt(0.2 / 0.8)
    # All of ten records are below: the norm of the next step is smaller.
    total = signal() | {entry: jnp.asarray(10 * 0.25)}
    state = MechanismState(ClipNorm.of(clip).as_arrays())
    released, after = mechanism.privatise(secret_key(0), total, state)
    assert set(released) == set(signal())
    assert after.clip_norm.by_entry["b"].initial == pytest.approx(0.5 * math.exp(-0.2 * 0.1))
    assert after.clip_norm.by_entry[...] == 2.0
    assert jax.tree.structure(after) == jax.tree.structure(state)
    assert gaussian(2.0, 1.0).extras is None


@pytest.mark.parametrize(("clip", "error", "words"), [
    (0.0, ValueError, "clip_norm=0.0"),
    (-1.0, ValueError, "clip_norm=-1.0"),
    (math.nan, ValueError, "clip_norm=nan"),
    ("1", TypeError, "clip_norm='1'"),
    (True, TypeError, "clip_norm=True"),
    ({}, ValueError, "empty"),
    ({"a": -2.0}, ValueError, r"clip_norm\['a'\]=-2.0"),
])  # fmt: skip
def test_wrong_norms_are_refused(clip, error, words):
    with pytest.raises(error, match=words):
        ClipNorm.of(clip)


@pytest.mark.parametrize("clip", [{"a": 1.0}, {"a": 1.0, "d": 1.0, ...: 1.0}, {"d": 1.0, ...: 1.0}])
def test_norms_must_fit_the_entries(clip):
    with pytest.raises(ValueError, match="one norm for each"):
        ClipNorm.of(clip).check_entries(("a", "b"))
    ClipNorm.of({"a": 1.0, ...: 2.0}).check_entries(("a", "b"))
    with pytest.raises(ValueError, match="one norm for each"):
        ClipNorm.of({"a": 1.0, "b": 1.0, ...: 2.0}).check_entries(
            ("a", "b")
        )  # nothing is left for "..."


def test_a_copy_with_another_privatise_gets_no_integers():
    """It would read the parts of an integer as numbers of its own."""
    mechanism = gaussian(1.0, 2.0)
    assert mechanism.takes_whole
    assert not mechanism._replace(privatise=lambda *args: mechanism.privatise(*args)).takes_whole
    assert not mechanism._replace(extras=lambda *_: {}).takes_whole
