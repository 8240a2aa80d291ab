"""The Gaussian mechanism on clipped signals: bounds, blocks, events, dtypes."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dp_accounting.dp_event import GaussianDpEvent, NonPrivateDpEvent

from numpyro_dp.privacy.adaptive import AdaptiveClip
from numpyro_dp.privacy.mechanism import (
    check_blocks,
    check_clip_norm,
    clip_sensitivity,
    gaussian,
)
from numpyro_dp.privacy.random import secret_key


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


@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1.0, 1e6, 1e15])
def test_one_norm(scale):
    mechanism = gaussian(2.0, 1.0)
    bounded, found = mechanism.bound(signal(scale))
    assert float(found) == pytest.approx(13 * scale, rel=1e-5, abs=1e-18)
    assert norm(bounded) <= 2.0
    assert norm(bounded) == pytest.approx(min(2.0, 13 * scale), rel=1e-5)
    ratio = np.asarray(bounded["b"]) / np.asarray(bounded["a"])[0]
    assert ratio == pytest.approx(4 / 3, rel=1e-5)  # the direction stays


def test_a_signal_inside_the_ball_is_left_alone():
    bounded, _ = gaussian(14.0, 1.0).bound(signal())
    assert jax.tree.all(jax.tree.map(jnp.array_equal, bounded, signal()))
    bounded, _ = gaussian(math.inf, 0.0).bound(signal(1e15))
    assert jax.tree.all(jax.tree.map(jnp.array_equal, bounded, signal(1e15)))


def test_norms_by_entry():
    mechanism = gaussian({"b": 0.5, ...: 2.0}, 1.0)
    bounded, _ = mechanism.bound(signal())
    assert norm(bounded["b"]) == pytest.approx(0.5, rel=1e-5)
    rest = {"a": bounded["a"], "c": bounded["c"]}
    assert norm(rest) == pytest.approx(2.0, rel=1e-5)
    assert norm(bounded) <= mechanism.sensitivity == pytest.approx(math.sqrt(4.25))
    assert mechanism.blocks(("a", "b", "c")) == (("b",), ("a", "c"))


@pytest.mark.parametrize("clip", [2.0, {"a": 1.0, ...: 2.0}], ids=["one norm", "by entry"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e30])
@pytest.mark.parametrize("name", ["a", "b"])
def test_a_signal_that_is_not_finite_counts_as_nothing(clip, bad, name):
    spoilt = signal() | {name: signal()[name].at[...].set(bad)}  # 1e30: the norm overflows
    bounded, _ = gaussian(clip, 1.0).bound(spoilt)
    assert norm(bounded) == 0.0  # every entry of the record, whatever its block


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_bounds_and_noise_have_at_least_single_precision(dtype):
    mechanism = gaussian(2.0, 1.0)
    bounded, found = mechanism.bound(signal(100.0, dtype))
    released, state = mechanism.privatise(secret_key(0), signal(1.0, dtype), mechanism.init())
    leaves = jax.tree.leaves((bounded, found, released))
    assert {leaf.dtype for leaf in leaves} == {jnp.dtype("float32")}
    assert norm(bounded) <= 2.0
    assert state == mechanism.init() == (2.0,)
    assert jax.tree.structure(released) == jax.tree.structure(signal())


def test_without_noise_the_total_is_released_as_it_is():
    for clip in (2.0, math.inf):
        released, _ = gaussian(clip, 0.0).privatise(secret_key(0), signal(), ())
        assert jax.tree.all(jax.tree.map(jnp.array_equal, released, signal()))


def test_noise_of_leaves_of_two_precisions():
    """One draw for all coordinates, of one standard deviation; precisions stay as they are."""
    with jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64():
        total = {"a": jnp.zeros((300, 10), jnp.float32), "b": jnp.zeros(3000, jnp.float64)}
        mechanism = gaussian({"a": 3.0, "b": 4.0}, 2.0)
        noisy, _ = mechanism.privatise(secret_key(0), total, mechanism.init())
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
    assert clip_sensitivity(3.0) == 3.0
    assert clip_sensitivity({"a": 3.0, ...: 4.0}) == 5.0


def test_traced_norms_and_multipliers_give_the_same():
    def both(clip, noise):
        mechanism = gaussian({"a": clip, ...: 1.0}, noise)
        assert mechanism.event is None or not isinstance(clip, jax.core.Tracer)
        return mechanism.bound(signal())[0], mechanism.privatise(secret_key(1), signal(), ())[0]

    eager, traced = both(0.5, 1.5), jax.jit(both)(0.5, 1.5)
    for a, b in zip(jax.tree.leaves(eager), jax.tree.leaves(traced), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_constants_captured_by_a_compiled_function():
    noise = jnp.asarray(1.5)  # an array, as in the state of a run
    released = jax.jit(lambda key: gaussian(0.5, noise).privatise(key, signal(), ())[0])
    expected, _ = gaussian(0.5, 1.5).privatise(secret_key(1), signal(), ())
    np.testing.assert_allclose(released(secret_key(1))["a"], expected["a"], rtol=1e-5)


def test_an_adaptive_norm_is_a_norm_with_a_coordinate_of_its_own():
    clip = {"b": AdaptiveClip(0.5, share=0.2), ...: 2.0}
    mechanism = gaussian(clip, 0.0, batch_size=10.0)
    assert mechanism.sensitivity == pytest.approx(math.sqrt(0.25 / 0.8 + 4))
    assert mechanism.event == NonPrivateDpEvent()
    assert gaussian(clip, 1.5).event == GaussianDpEvent(1.5)
    bounded, _ = mechanism.bound(signal())
    assert norm(bounded["b"]) == pytest.approx(0.5, rel=1e-5)
    squares = (jnp.asarray([0.2, 0.3, jnp.nan]), jnp.asarray([1.0, 9.0, 1.0]))
    ((entry, (numbers, size)),) = mechanism.extras(("b", "a"), squares, 1.0).items()
    np.testing.assert_allclose(numbers, [0.25, -0.25, 0.0], rtol=2e-6)
    assert size == pytest.approx(0.25)  # 0.5 sqrt(0.2 / 0.8)
    # All of ten records are below: the norm of the next step is smaller.
    total = signal() | {entry: jnp.asarray(10 * 0.25)}
    released, after = mechanism.privatise(secret_key(0), total, mechanism.init())
    assert set(released) == set(signal())
    assert after[0].initial == pytest.approx(0.5 * math.exp(-0.2 * 0.5))
    assert after[1] == 2.0
    assert jax.tree.structure(after) == jax.tree.structure(mechanism.init())
    assert gaussian(2.0, 1.0).extras is None


@pytest.mark.parametrize(
    ("clip", "error", "words"),
    [
        (0.0, ValueError, "clip_norm=0.0"),
        (-1.0, ValueError, "clip_norm=-1.0"),
        (math.nan, ValueError, "clip_norm=nan"),
        ("1", TypeError, "clip_norm='1'"),
        (True, TypeError, "clip_norm=True"),
        ({}, ValueError, "empty"),
        ({"a": -2.0}, ValueError, r"clip_norm\['a'\]=-2.0"),
    ],
)
def test_wrong_norms_are_refused(clip, error, words):
    with pytest.raises(error, match=words):
        check_clip_norm(clip)


@pytest.mark.parametrize("clip", [{"a": 1.0}, {"a": 1.0, "d": 1.0, ...: 1.0}, {"d": 1.0, ...: 1.0}])
def test_norms_must_fit_the_entries(clip):
    with pytest.raises(ValueError, match="one norm for each"):
        check_blocks(clip, ("a", "b"))
    check_blocks({"a": 1.0, ...: 2.0}, ("a", "b"))
    with pytest.raises(ValueError, match="one norm for each"):
        check_blocks({"a": 1.0, "b": 1.0, ...: 2.0}, ("a", "b"))  # nothing is left for "..."
