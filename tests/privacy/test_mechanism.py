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
from numpyro_dp.mechanisms import GaussianMechanism
from numpyro_dp.privacy.keys import secret_key
from numpyro_dp.privacy.mechanism.clip_norm import ClipNorm
from numpyro_dp.sums.bounded import bounded_sum

STATE = MechanismState(())
wide = jax.enable_x64 if hasattr(jax, "enable_x64") else jax.experimental.enable_x64


def signal(scale=1.0, dtype="float32"):
    a, b, c = (jnp.asarray(x, dtype) * scale for x in ([3.0, 0.0], 4.0, [[12.0]]))
    return {"a": a, "b": b, "c": {"inner": c}}


def norm(tree):
    return math.sqrt(sum(np.sum(np.asarray(x, np.float64) ** 2) for x in jax.tree.leaves(tree)))


def bounded(mechanism, one):
    """What a batch of one record adds up to: the sum is the only code that applies a bound."""
    estimator = Estimator(lambda *_: (), lambda _, example: example, lambda *_: ())
    batch = jax.tree.map(lambda leaf: leaf[None], one)
    found = bounded_sum(estimator, mechanism, (), batch, jnp.ones(1, bool))
    return {name: found[name] for name in one}


@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1.0, 1e6, 1e15])
def test_one_norm(scale):
    found = bounded(gaussian(2.0, 1.0), signal(scale))
    assert norm(found) <= 2.0
    assert norm(found) == pytest.approx(min(2.0, 13 * scale), rel=1e-5, abs=1e-6)
    if scale >= 1:  # exact sums have a grid, in units of the clip norm
        ratio = np.asarray(found["b"]) / np.asarray(found["a"])[0]
        assert ratio == pytest.approx(4 / 3, rel=1e-5)  # the direction stays


@pytest.mark.parametrize(("clip", "scale"), [(14.0, 1.0), (math.inf, 1e15)])
def test_a_signal_inside_the_ball_is_left_alone_and_so_is_a_total_without_noise(clip, scale):
    mechanism = gaussian(clip, 0.0)
    for name, leaf in bounded(mechanism, signal(scale)).items():
        np.testing.assert_allclose(*jax.tree.leaves((leaf, signal(scale)[name])), rtol=1e-6)
    released, _ = mechanism.privatise(secret_key(0), signal(100.0), STATE)
    assert jax.tree.all(jax.tree.map(jnp.array_equal, released, signal(100.0)))


def test_norms_by_entry_and_what_a_mechanism_states():
    mechanism = gaussian({"b": 3.0, ...: 4.0}, 1.5)
    found = bounded(mechanism, signal(100.0))
    assert norm(found["b"]) == pytest.approx(3.0, rel=1e-5)
    assert norm([found["a"], found["c"]]) == pytest.approx(4.0, rel=1e-5)
    assert norm(found) <= mechanism.sensitivity == 5.0
    assert mechanism.blocks(("a", "b", "c")) == (("b",), ("a", "c"))
    assert (mechanism.noise_scale, mechanism.event) == (7.5, GaussianDpEvent(1.5))
    assert gaussian(3.0, 1.5).sensitivity == 3.0
    for clip, noise in ((2.0, 0.0), (math.inf, 1.0), (math.inf, 0.0)):
        assert gaussian(clip, noise).event == NonPrivateDpEvent()
    assert gaussian(math.inf, 0.0).noise_scale == 0.0
    # A copy with another privatise would read the parts of an integer as numbers of its own.
    assert mechanism.takes_whole
    assert not mechanism._replace(privatise=lambda *args: mechanism.privatise(*args)).takes_whole
    assert not mechanism._replace(extras=lambda *_: {}).takes_whole


@pytest.mark.parametrize("clip", [2.0, {"a": 1.0, ...: 2.0}], ids=["one norm", "by entry"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e30])
@pytest.mark.parametrize("name", ["a", "b"])
def test_a_signal_that_is_not_finite_counts_as_nothing(clip, bad, name):
    spoilt = signal() | {name: signal()[name].at[...].set(bad)}  # 1e30: the norm overflows
    assert norm(bounded(gaussian(clip, 1.0), spoilt)) == 0.0  # every entry, whatever its block


@pytest.mark.parametrize("clip", [1.0, 0.7, 3e-3, {"a": 0.7, ...: 1.1}], ids=str)
@pytest.mark.parametrize("traced", [False, True], ids=["numbers", "traced"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_no_clipped_signal_is_longer_than_its_norm_by_rounding(clip, traced, dtype):
    """Norms are taken in higher precision: a factor that is 8 eps too large fails here.

    In a sum of few records the margin of :func:`clip_margin` would hide it.
    """
    rng, names, eps = np.random.default_rng(0), ("a", "b"), np.finfo(dtype).eps
    norms = ClipNorm.of(clip).fixed()
    limits = np.asarray(norms.of_blocks(names), np.longdouble)
    signals = []
    for limit in limits:
        rows = rng.normal(size=(4000, 4)).astype(dtype)
        rows /= np.linalg.norm(rows, axis=1, keepdims=True)
        # Within 32 eps of the norm, a little above it, and far above it.
        above = 10.0 ** np.concatenate([rng.uniform(-6, 0, 1000), rng.uniform(0, 15, 1000)])
        size = np.concatenate([1 + eps * rng.uniform(-32, 32, 2000), 1 + above])
        signals.append((rows * (float(limit) * size)[:, None]).astype(dtype))
    with wide(dtype == "float64"):
        mechanism = GaussianMechanism()(norms.as_arrays() if traced else norms, 1.0)
        squares = tuple(jax.vmap(squared_norm)(rows) for rows in signals)
        factors = jax.jit(lambda squares: mechanism.scales(names, squares))(squares)
    for limit, rows, factor in zip(limits, signals, factors, strict=True):
        # As the exact product, and as each number is rounded.
        factor = np.asarray(factor)[:, None]
        for clipped in (rows * factor, rows.astype(np.longdouble) * factor.astype(np.longdouble)):
            lengths = np.sqrt((clipped.astype(np.longdouble) ** 2).sum(1))
            assert (lengths <= limit).all()
            assert lengths.max() / limit > 1 - 20 * eps  # the bound is reached


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_bounds_and_noise_have_at_least_single_precision(dtype):
    mechanism = gaussian(2.0, 1.0)
    found = bounded(mechanism, signal(100.0, dtype))
    released, state = mechanism.privatise(secret_key(0), signal(1.0, dtype), STATE)
    assert {leaf.dtype.name for leaf in jax.tree.leaves((found, released))} == {"float32"}
    assert norm(found) <= 2.0
    assert state == STATE and mechanism.init(found) == ()
    assert jax.tree.structure(released) == jax.tree.structure(signal())


@pytest.mark.full
def test_noise_of_leaves_of_two_precisions():
    """One draw for all coordinates, of one standard deviation; precisions stay as they are."""
    with wide(True):
        total = {"a": jnp.zeros((300, 10), jnp.float32), "b": jnp.zeros(3000, jnp.float64)}
        mechanism = gaussian({"a": 3.0, "b": 4.0}, 2.0)  # sensitivity 5
        noisy, _ = mechanism.privatise(secret_key(0), total, STATE)
        assert [noisy[name].dtype.name for name in "ab"] == ["float32", "float64"]
        both = np.stack([np.asarray(noisy[name], np.float64).ravel() for name in "ab"])
    np.testing.assert_allclose(both.std(1), 2 * 5, rtol=0.06)
    assert abs(np.corrcoef(both)[0, 1]) < 0.08


def test_traced_norms_and_multipliers_give_the_same():
    def both(clip, noise):
        mechanism = GaussianMechanism()(clip, noise)
        assert mechanism.event is None or not isinstance(noise, jax.core.Tracer)
        return bounded(mechanism, signal()), mechanism.privatise(secret_key(1), signal(), STATE)[0]

    clip, held = ClipNorm.of({"a": 0.5, ...: 1.0}), jnp.asarray(1.5)
    eager = both(clip, 1.5)
    for traced in (jax.jit(both)(clip, 1.5), jax.jit(lambda: both(clip, held))()):
        for a, b in zip(jax.tree.leaves(eager), jax.tree.leaves(traced), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("clip", [
    {"a": 1.0}, {"a": 1.0, "d": 1.0, ...: 1.0}, {"d": 1.0, ...: 1.0},
    {"a": 1.0, "b": 1.0, ...: 2.0},  # nothing is left for "..."
])  # fmt: skip
def test_norms_must_fit_the_entries(clip):
    with pytest.raises(ValueError, match="one norm for each"):
        ClipNorm.of(clip).check_entries(("a", "b"))
    ClipNorm.of({"a": 1.0, ...: 2.0}).check_entries(("a", "b"))
    for wrong in ("1", True):
        with pytest.raises(TypeError, match=f"clip_norm={wrong!r}"):
            ClipNorm.of(wrong)
