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


def factors(change):
    """Replaces the factors of each record by ``change`` of them."""
    return lambda base, _: {"scales": lambda *args: tuple(map(change, base.scales(*args)))}


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


def privatised(change):
    """Replaces ``privatise`` by ``change(base's privatise, key, total, state) -> noisy total``."""

    def changed(base, _):
        def privatise(key, total, state):
            return change(base.privatise, key, total, state), state

        return {"privatise": privatise}

    return changed


def noise_times(part):
    return privatised(
        lambda privatise, key, total, state: jax.tree.map(
            lambda x, y: x + part(x) * (y - x), total, privatise(key, total, state)[0]
        )
    )


@privatised
def same_in_each_entry(privatise, key, total, state):
    return {n: privatise(key, {n: x}, state)[0][n] for n, x in total.items()}


@privatised
def forgotten_entry(privatise, key, total, state):
    return privatise(key, total, state)[0] | {"a": total["a"]}


@privatised
def half_the_total(privatise, key, total, state):
    return privatise(key, jax.tree.map(lambda x: x / 2, total), state)[0]


def hidden_memory(base, noise_multiplier):
    found = CorrelatedNoise(0.5)(ClipNorm.of(1.5), noise_multiplier)
    return {"init": found.init, "privatise": found.privatise}


def fixed_noise(base, _):
    other = GaussianMechanism()(ClipNorm.of(1.5), 1.0)
    return {"privatise": other.privatise, "noise_scale": other.noise_scale}


no_clipping = factors(lambda f: jnp.where(f > 0, 1.0, 0.0))
TOO_LONG, FACTORS = "scales left a record of norm", "scales returned the factors"
NONE, WRONG = "standard deviation 0, where", "standard deviation .* means"
OTHER, SAME = "other noise to another sum", "correlation of 1 between two keys"

LIES = {
    "no clipping": (no_clipping, TOO_LONG),
    "twice the clip norm": (factors(lambda f: 2 * f), TOO_LONG),
    "no margin": (
        lambda base, _: {"scales": lambda names, squares, _: base.scales(names, squares, 1.0)},
        TOO_LONG,
    ),
    "NaN kept": (keeps_nan, FACTORS),
    "NaN kept by other blocks": (one_block_alone, FACTORS),
    "negative factors": (factors(lambda f: -f), FACTORS),
    "sensitivity of one block": (
        lambda base, _: {"sensitivity": 1.0, "noise_scale": base.noise_scale}, TOO_LONG,
    ),
    "no noise": (noise_times(lambda _: 0.0), NONE),
    "half the noise": (noise_times(lambda _: 0.5), WRONG),
    "NaN as noise": (noise_times(lambda _: jnp.nan), "standard deviation nan, where"),
    "one entry without noise": (forgotten_entry, NONE),
    "noise of another multiplier": (fixed_noise, WRONG),
    "event of more noise": (lambda base, z: {"event": GaussianDpEvent(2.0 * z)}, "means"),
    "no noise for another event": (
        lambda base, z: noise_times(lambda _: 0.0)(base, z) | {"event": LaplaceDpEvent(z)}, NONE,
    ),
    "noise_scale misstated": (
        lambda base, _: {"noise_scale": 1.2 * base.noise_scale}, "where noise_scale is",
    ),
    "noise scaled by the total": (noise_times(lambda x: 1 + abs(x) / 100), OTHER),
    "half the total": (half_the_total, OTHER),
    "the same noise for every key": (
        privatised(lambda privatise, _, *rest: privatise(jax.random.key(3), *rest)[0]), SAME,
    ),
    "the same noise in each entry": (same_in_each_entry, SAME),
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


def test_an_event_for_another_sampler_is_no_reason_to_refuse():
    def compose(sampler, num_examples, num_steps):
        raise TypeError(sampler)

    check_mechanism(Changed(lambda *_: {"compose": compose}), 1.5)


@pytest.mark.full
def test_an_adaptive_norm_is_tried_too():
    norm = AdaptiveClip(1.5, share=0.1)
    check_mechanism(Changed(lambda *_: {}), norm)
    with pytest.raises(ValueError, match="scales left a record"):
        check_mechanism(Changed(no_clipping), norm)
