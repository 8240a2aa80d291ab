"""Mechanisms of one's own that do not do what they state: `check_mechanism` finds each."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest
from correlated import CorrelatedNoise
from dp_accounting.dp_event import GaussianDpEvent, LaplaceDpEvent

from numpyro_dp.extend import check_mechanism
from numpyro_dp.mechanisms import AdaptiveClip, GaussianMechanism
from numpyro_dp.privacy.mechanism.clip_norm import ClipNorm


@dataclasses.dataclass(frozen=True)
class Changed:
    """The Gaussian mechanism with some fields replaced by ``change(base, noise multiplier)``."""

    change: Callable

    def __call__(self, clip_norm, noise_multiplier):
        base = GaussianMechanism()(clip_norm, noise_multiplier)
        return base._replace(**self.change(base, noise_multiplier))


def scaled_by(factor):
    """Returns ``scales`` that multiplies the factors of the base."""

    def change(base, _):
        return {"scales": lambda *args: tuple(factor(f) for f in base.scales(*args))}

    return change


def no_clipping(base, _):
    def scales(*args):
        return tuple(jnp.where(f > 0, 1.0, 0.0) for f in base.scales(*args))

    return {"scales": scales}


def keeps_nan(base, _):
    def scales(names, squares, margin):
        norms = zip(base.norms(names), squares, strict=True)
        return tuple(jnp.minimum(1.0, c * margin / jnp.sqrt(s + 1e-12)) for c, s in norms)

    return {"scales": scales}


def one_block_alone(base, _):
    """Only the block that is not finite itself counts as 0."""

    def scales(names, squares, margin):
        each = [base.scales(names, (s,) * len(squares), margin) for s in squares]
        return tuple(found[i] for i, found in enumerate(each))

    return {"scales": scales}


def no_margin(base, _):
    return {"scales": lambda names, squares, margin: base.scales(names, squares, 1.0)}


def noise_times(part):
    def change(base, _):
        def privatise(key, total, state):
            noisy, state = base.privatise(key, total, state)
            return jax.tree.map(lambda x, y: x + part(x) * (y - x), total, noisy), state

        return {"privatise": privatise}

    return change


def same_key(base, _):
    return {"privatise": lambda key, *rest: base.privatise(jax.random.key(3), *rest)}


def same_in_each_entry(base, _):
    def privatise(key, total, state):
        noisy = {n: base.privatise(key, {n: x}, state)[0][n] for n, x in total.items()}
        return noisy, state

    return {"privatise": privatise}


def forgotten_entry(base, _):
    def privatise(key, total, state):
        return base.privatise(key, total, state)[0] | {"a": total["a"]}, state

    return {"privatise": privatise}


def hidden_memory(base, noise_multiplier):
    found = CorrelatedNoise(0.5)(ClipNorm.of(1.5), noise_multiplier)
    return {"init": found.init, "privatise": found.privatise}


def fixed_noise(base, _):
    other = GaussianMechanism()(ClipNorm.of(1.5), 1.0)
    return {"privatise": other.privatise, "noise_scale": other.noise_scale}


LIES = {
    "no clipping": (no_clipping, "scales left a record of norm"),
    "twice the clip norm": (scaled_by(lambda f: 2 * f), "scales left a record of norm"),
    "no margin": (no_margin, "scales left a record of norm"),
    "NaN kept": (keeps_nan, "scales returned the factors"),
    "NaN kept by other blocks": (one_block_alone, "scales returned the factors"),
    "negative factors": (scaled_by(lambda f: -f), "scales returned the factors"),
    "sensitivity of one block": (
        lambda base, _: {"sensitivity": 1.0, "noise_scale": base.noise_scale},
        "scales left a record of norm",
    ),
    "no noise": (noise_times(lambda _: 0.0), "noise of standard deviation 0, where"),
    "half the noise": (noise_times(lambda _: 0.5), "standard deviation .* means"),
    "NaN as noise": (noise_times(lambda _: jnp.nan), "standard deviation nan, where"),
    "one entry without noise": (forgotten_entry, "standard deviation 0, where"),
    "noise of another multiplier": (fixed_noise, "standard deviation .* means"),
    "event of more noise": (lambda base, z: {"event": GaussianDpEvent(2.0 * z)}, "means"),
    "no noise for another event": (
        lambda base, z: noise_times(lambda _: 0.0)(base, z) | {"event": LaplaceDpEvent(z)},
        "standard deviation 0, where",
    ),
    "noise_scale misstated": (lambda base, _: {"noise_scale": 1.2 * base.noise_scale},
        "where noise_scale is"),
    "noise scaled by the total": (noise_times(lambda x: 1 + abs(x) / 100),
        "other noise to another sum"),
    "half the total": (
        lambda base, _: {
            "privatise": lambda key, total, state: base.privatise(
                key, jax.tree.map(lambda x: x / 2, total), state
            )
        },
        "other noise to another sum",
    ),
    "the same noise for every key": (same_key, "correlation of 1 between two keys"),
    "the same noise in each entry": (same_in_each_entry, "correlation of 1 between two keys"),
    "noise of earlier steps": (hidden_memory, "compose is None"),
    "a noise scale for each block": (lambda *_: {"noise_scale": {"a": 1.0}}, "noise_scale is {'a'"),
}  # fmt: skip


@pytest.mark.parametrize("name", LIES)
def test_a_lie_is_found(name):
    change, message = LIES[name]
    with pytest.raises(ValueError, match=f"does not do what it states.*{message}"):
        check_mechanism(Changed(change), {"a": 0.9, ...: 1.2})


@pytest.mark.parametrize("clip_norm", [1e-9, 1.5, 1e9, {"a": 0.5, ...: 2.0}])
@pytest.mark.parametrize("mechanism", [Changed(lambda *_: {}), CorrelatedNoise(0.5)])
def test_a_mechanism_that_does_what_it_states_is_taken(mechanism, clip_norm):
    check_mechanism(mechanism, clip_norm)


def test_noise_of_another_event():
    def laplace(base, z):
        scale = z * base.sensitivity

        def privatise(key, total, state):
            keys = dict(zip(total, jax.random.split(key, len(total)), strict=True))
            add = {n: scale * jax.random.laplace(keys[n], x.shape) for n, x in total.items()}
            return jax.tree.map(jnp.add, total, add), state

        return {"privatise": privatise, "event": LaplaceDpEvent(z), "noise_scale": 2**0.5 * scale}

    def half(base, z):
        return laplace(base, z) | {"event": LaplaceDpEvent(2 * z)}

    def gaussian(base, z):
        return laplace(base, z) | {"event": GaussianDpEvent(2**0.5 * z)}

    check_mechanism(Changed(laplace), 1.5)
    for wrong in (half, gaussian):
        with pytest.raises(ValueError, match="standard deviation .* means"):
            check_mechanism(Changed(wrong), 1.5)


@pytest.mark.full
def test_an_adaptive_norm_is_tried_too():
    norm = AdaptiveClip(1.5, share=0.1)
    check_mechanism(Changed(lambda *_: {}), norm)
    with pytest.raises(ValueError, match="scales left a record"):
        check_mechanism(Changed(no_clipping), norm)


def test_an_event_for_another_sampler_is_no_reason_to_refuse():
    def change(base, _):
        def compose(sampler, num_examples, num_steps):
            raise TypeError(sampler)

        return {"compose": compose}

    check_mechanism(Changed(change), 1.5)
