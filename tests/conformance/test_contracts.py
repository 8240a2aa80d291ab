"""What every mechanism, sampler, accountant, fold and driver must do; each test names its row."""

import inspect
import math
import pickle

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from dp_accounting import GaussianDpEvent, NonPrivateDpEvent
from dp_accounting.dp_event import DpEvent
from flat import grouped
from hypothesis import strategies as st
from jax.flatten_util import ravel_pytree
from numpyro.infer.autoguide import AutoDiagonalNormal
from scipy import stats

from numpyro_dp import DPSVI, SEP, BudgetError, Privacy, PrivacyBudget, PrivacyReport, secret_key
from numpyro_dp.accounting import UnsupportedEventError
from numpyro_dp.core import Estimator, Fold, Mechanism, MechanismState, Sampler
from numpyro_dp.estimators import aligned
from numpyro_dp.mechanisms import GaussianMechanism, LossRelease
from numpyro_dp.privacy.accounting.bounds import Accountant
from numpyro_dp.privacy.mechanism.clip_norm import ClipNorm
from numpyro_dp.privacy.mechanism.gaussian import build_mechanism
from numpyro_dp.run.settings import RunSettings
from numpyro_dp.samplers import FullBatch, Poisson
from numpyro_dp.sums.bounded import bounded_sum

from .references import bounded_sum_by_definition
from .registry import (
    ACCOUNTANTS,
    ALL_IN_FULL,
    DRIVERS,
    ESTIMATORS,
    FOLDS,
    MECHANISMS,
    SAMPLERS,
    by_row,
    pairs_to_run,
    x64,
)
from .scenarios import single
from .test_neighbours import ROUNDING, change, fast, norm, numbers, seeds

KEY = jax.random.key(0)
LIKE = {"a": np.zeros(3, np.float32), "b": np.zeros((), np.float32), "c": np.zeros((2, 2))}
WHOLE = Estimator(lambda *_: (), lambda _, example: example, lambda *_: ())  # the record itself


def mechanism_of(row, noise_multiplier=1.0):
    norm = ClipNorm.of(row.clip_norm)
    return build_mechanism(row.mechanism, norm, noise_multiplier, 10.0)


def run_of(row, **options):
    """A driver whose record's signal is the record, for the rows of mechanisms."""

    def model(x):
        a = numpyro.sample("a", dist.Normal(0, 1))
        b = numpyro.sample("b", dist.Normal(0, 1))
        with numpyro.plate("rows", x.shape[0]):
            numpyro.factor("f", a * x[:, 0] + b * x[:, 1])

    settings = {"budget": PrivacyBudget(2.0, 1e-3), "sampler": FullBatch(), "num_steps": 8}
    return DPSVI(
        model,
        AutoDiagonalNormal(model),
        optax.sgd(0.01),
        **grouped(
            estimator=aligned(),
            clip_norm=row.clip_norm,
            mechanism=row.mechanism,
            **settings | options,
        ),
    )


def renamed(row, entry):
    """The row with a norm for another entry in the place of b."""
    if not isinstance(row.clip_norm, dict):
        return row
    return row._replace(clip_norm={entry if e == "b" else e: n for e, n in row.clip_norm.items()})


X = np.random.default_rng(0).normal(size=(12, 2)).astype(np.float32)


# Mechanisms.


@pytest.mark.every_case
@by_row(MECHANISMS)
def test_a_mechanism_moves_by_at_most_its_sensitivity(row):
    mechanism, largest = mechanism_of(row), 0.0

    @jax.jit
    def total(examples, mask):
        return bounded_sum(WHOLE, mechanism, (), examples, mask)

    @fast
    @hypothesis.example([50.0, -50.0], 0)
    @hypothesis.example([1e3, -1e3], 1)
    @hypothesis.given(st.lists(numbers, min_size=1, max_size=12), seeds)
    def check(values, seed):
        nonlocal largest
        rng = np.random.default_rng(seed)
        drawn = np.asarray(values, np.float32)
        examples = {
            name: rng.choice(drawn, (6, *leaf.shape)).astype(np.float32)
            for name, leaf in LIKE.items()
        }
        every = np.ones(6, bool)
        one_less = every & (np.arange(6) > 0)
        whole, dropped = total(examples, every), total(examples, one_less)
        assert np.isfinite(norm(whole))
        assert change(whole, dropped) <= mechanism.sensitivity * ROUNDING
        largest = max(largest, change(whole, dropped) / mechanism.sensitivity)
        examples["a"][0, 1] = np.nan
        for one, other in zip(
            *map(jax.tree.leaves, (total(examples, every), dropped)), strict=True
        ):
            np.testing.assert_array_equal(one, other)

    check()
    assert largest > 0.97


@pytest.mark.full
@by_row(MECHANISMS)
def test_fast_sums_are_the_definition(row):
    """Norms first, then one weighted product: whatever the factors of the mechanism are."""
    pieces = single("logistic")
    mechanism = mechanism_of(renamed(row, pieces.entries(ESTIMATORS[0])[0]))
    estimator = aligned()(pieces.problem)
    public = estimator.prepare(KEY, pieces.params)
    mask = jnp.ones(pieces.arrays[0].shape[0], bool)
    data = estimator, mechanism, public, pieces.arrays, mask
    found, expected = bounded_sum(*data), bounded_sum_by_definition(*data)
    for one, other in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5 * mechanism.sensitivity)
    assert norm(expected) > 0.1


@pytest.mark.every_case
@by_row(MECHANISMS)
def test_noise_has_the_scale_that_is_stated(row):
    mechanism = mechanism_of(row, 1.7)
    total = {"a": jnp.zeros(20_000), "b": jnp.zeros(()), "c": jnp.zeros((100, 100))}
    clip = ClipNorm.of(row.clip_norm)
    state = MechanismState(clip.as_arrays(), mechanism.init(total))
    total |= {e: jnp.zeros(()) for e in clip.fixed().entries if e not in (*clip.entries, "b")}
    _, state = mechanism.privatise(secret_key(1), total, state)
    noisy, _ = mechanism.privatise(secret_key(2), total, state)  # the memory is in it now
    drawn = np.asarray(ravel_pytree({name: noisy[name] for name in "abc"})[0], np.float64)
    error = drawn.std() / float(mechanism.noise_scale) - 1
    tolerance = 5 / math.sqrt(2 * drawn.size)
    assert abs(error) < tolerance < 0.05  # so 0.9 and 1.1 times the noise are told apart
    assert stats.kstest(drawn / float(mechanism.noise_scale), "norm").pvalue > 1e-3


@by_row(MECHANISMS)
def test_a_mechanism_is_a_value_and_states_its_event(row):
    assert hash(row.mechanism) == hash(pickle.loads(pickle.dumps(row.mechanism)))
    mechanism = mechanism_of(row, 1.5)
    assert isinstance(mechanism, Mechanism)
    assert isinstance(mechanism.event, DpEvent)
    assert mechanism_of(row, 0.0).event == NonPrivateDpEvent()
    traced = jax.jit(
        lambda clip, z: build_mechanism(row.mechanism, clip, z, 10.0).noise_scale * jnp.ones(())
    )(ClipNorm.of(row.clip_norm), 1.5)
    np.testing.assert_allclose(traced, mechanism.noise_scale, rtol=1e-6)


@pytest.mark.extended
@by_row(MECHANISMS)
def test_a_run_of_a_mechanism(row):
    """Plan, loop, resume, update and sweep: nothing outside of the mechanism's file knows it."""
    row = renamed(row, "a")
    svi = run_of(row, secret_key=5, repetition=True)
    whole = svi.run(KEY, 8, X, progress_bar=False)
    assert 1.98 < whole.privacy.epsilon <= 2.0
    half = svi.run(KEY, 4, X, progress_bar=False)
    rest = svi.run(KEY, 4, X, init_state=half.state, progress_bar=False)
    state = svi.init(KEY, X)
    for _ in range(8):
        state, _ = svi.update(state, X)
    for found in (rest.params, svi.get_params(state)):
        for one, other in zip(*map(jax.tree.leaves, (found, whole.params)), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
    swept = svi.sweep(jax.random.split(KEY, 2), 8, X, epsilon=[1.0, 2.0])
    assert [0.98 * e < r.epsilon <= e for e, r in zip((1, 2), swept.privacy[::2], strict=True)]
    released = run_of(row, loss_release=LossRelease(5.0)).run(KEY, 8, X, progress_bar=False)
    assert np.isfinite(released.losses.values).all() and released.privacy.epsilon <= 2.0


@pytest.mark.full
@by_row(MECHANISMS)
def test_a_replaced_record_costs_twice_the_sensitivity(row):
    row = renamed(row, "a")
    noise = [
        run_of(row, budget=PrivacyBudget(2.0, 1e-3, relation))
        .run(KEY, 8, X, progress_bar=False).privacy.noise_multiplier
        for relation in ("add_or_remove_one", "replace_one")
    ]  # fmt: skip
    assert noise[1] == pytest.approx(2 * noise[0], rel=0.01)


@pytest.mark.full
def test_a_state_goes_on_with_its_mechanism_alone():
    first, other = MECHANISMS[0], next(row for row in MECHANISMS if row.name == "automatic")
    half = run_of(first).run(KEY, 4, X, progress_bar=False)
    with pytest.raises(BudgetError, match="mechanism=GaussianMechanism"):
        run_of(other._replace(clip_norm=1.5)).run(
            KEY, 4, X, init_state=half.state, progress_bar=False
        )


@pytest.mark.full
def test_correlated_noise_is_accounted_for_as_a_whole():
    row = next(row for row in MECHANISMS if row.name == "correlated")
    result = run_of(row, budget=None, noise_multiplier=4.0).run(KEY, 8, X, progress_bar=False)
    gain = (1 - 0.5**8) / 0.5 * math.sqrt(8)
    assert result.privacy.event == GaussianDpEvent(4.0 / gain)
    with pytest.raises(ValueError, match=r"Expected sampler=FullBatch\(\)"):
        run_of(row, sampler=Poisson(0.2)).run(KEY, 8, X, progress_bar=False)


def test_a_driver_without_noise_refuses_correlated_noise_too():
    with pytest.raises(ValueError, match=r"mechanism=CorrelatedNoise\(decay=0.5\) adds noise that"):
        SEP(mean_model, privacy=Privacy(mechanism=MECHANISMS[-1].mechanism))


@pytest.mark.parametrize("wrong", [GaussianMechanism, lambda clip_norm, noise: 3, [1], None])
def test_what_makes_no_mechanism_is_refused(wrong):
    # The second text is that of the check of types in tests, which comes first.
    with pytest.raises(TypeError, match="Expected mechanism to be a hashable value|Expected type"):
        run_of(MECHANISMS[0]._replace(mechanism=wrong))


# Samplers.


@pytest.mark.every_case
@by_row(SAMPLERS)
def test_a_sampler_is_a_value_with_a_stable_state(row):
    sampler = row.sampler
    assert isinstance(sampler, Sampler)
    assert hash(sampler) == hash(type(sampler)(**vars(sampler)))
    state = sampler.init(secret_key(1), 40)
    batch, after = sampler.next(state)
    assert jax.tree.structure(state) == jax.tree.structure(after)
    assert after.num_examples == 40
    assert after.key.dtype == state.key.dtype
    jitted, jitted_after = jax.jit(sampler.next)(state)
    for a, b in zip(jax.tree.leaves(batch), jax.tree.leaves(jitted), strict=True):
        np.testing.assert_array_equal(a, b)
        assert a.dtype in (jnp.int32, bool)
    same = jax.random.key_data(after.key) == jax.random.key_data(jitted_after.key)
    assert bool(same.all())


@pytest.mark.full
@by_row(SAMPLERS)
def test_a_sampler_moves_its_key_on_and_draws_side_by_side(row):
    keys = jax.random.split(secret_key(2), 4)

    def draw(key):
        return row.sampler.next(row.sampler.init(key, 40))

    several, states = jax.jit(jax.vmap(draw))(keys)
    for i, key in enumerate(keys):
        batch, state = draw(key)
        for a, b in zip(jax.tree.leaves(batch), jax.tree.leaves(several), strict=True):
            np.testing.assert_array_equal(a, b[i])
        assert (jax.random.key_data(state.key) == jax.random.key_data(states.key[i])).all()
        if row.name != "full batch":  # which draws nothing
            # The key has moved on by a split, so the state does not hold what drew the batch.
            assert not (jax.random.key_data(state.key) == jax.random.key_data(key)).any()


@pytest.mark.full
@by_row(SAMPLERS)
def test_a_sampler_is_compiled_once(row):
    traces = []

    @jax.jit
    def step(state):
        traces.append(1)
        return row.sampler.next(state)

    state = row.sampler.init(secret_key(1), 40)
    for _ in range(4):
        _, state = step(state)
    step(row.sampler.init(secret_key(2), 40))
    assert len(traces) == 1


@pytest.mark.full
@by_row(SAMPLERS)
def test_a_sampler_draws_the_same_in_double_precision(row):
    def draws():
        state, found = row.sampler.init(secret_key(3), 40), []
        for _ in range(5):
            batch, state = row.sampler.next(state)
            found += jax.tree.leaves(batch)
        return found

    plain = draws()
    with x64():
        wide = draws()
    for a, b in zip(plain, wide, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


@pytest.mark.full
@by_row(SAMPLERS)
def test_a_sampler_includes_each_record_as_often_as_it_says(row):
    sampler, steps = row.sampler, 4000

    def step(state, _):
        batch, state = sampler.next(state)
        indices = jnp.arange(40) if batch.indices is None else batch.indices
        mask = jnp.ones(indices.size, bool) if batch.mask is None else batch.mask
        return state, jnp.zeros(40).at[indices].add(mask)

    _, counts = jax.lax.scan(step, sampler.init(secret_key(4), 40), None, steps)
    assert set(np.unique(counts)) <= {0.0, 1.0}  # nobody twice in a batch
    prob = sampler.inclusion_prob(40)
    error = np.abs(np.mean(counts, 0) - prob).max()
    assert error <= 5 * math.sqrt(max(prob * (1 - prob), 1e-12) / steps)


@pytest.mark.every_case
@by_row(SAMPLERS)
def test_what_a_sampler_says_to_the_accountant(row):
    sampler, event = row.sampler, GaussianDpEvent(2.0)
    assert isinstance(sampler.amplify(event, 40), DpEvent)
    assert 1 <= sampler.compositions(40, 10) <= 10
    assert sampler.relation in ("add_or_remove_one", "replace_one")
    assert 0 <= sampler.failure_prob(40) < 1e-6 and 0 <= sampler.total_variation(40) < 1e-6


# Accountants.


@pytest.mark.every_case
@by_row(ACCOUNTANTS)
def test_an_accountant_bounds_what_is_known_exactly(row):
    assert isinstance(row.accountant, Accountant)
    assert hash(row.accountant) == hash(pickle.loads(pickle.dumps(row.accountant)))
    for noise, delta in ((0.7, 1e-5), (3.0, 1e-3), (20.0, 1e-6)):
        bound = row.accountant.epsilon(GaussianDpEvent(noise), delta, "add_or_remove_one")
        # Balle and Wang (2018): the exact delta of the Gaussian mechanism at that epsilon.
        mu, epsilon = 1 / noise, bound.upper
        exact = stats.norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * stats.norm.cdf(
            -mu / 2 - epsilon / mu
        )
        assert exact <= delta * (1 + 1e-6)
        assert bound.estimate is None or bound.estimate <= bound.upper
        assert row.accountant.epsilon(GaussianDpEvent(noise), delta / 10, bound.relation).upper > (
            bound.upper
        )


@by_row(ACCOUNTANTS)
def test_an_accountant_refuses_what_it_cannot_bound(row):
    class Unknown(DpEvent):
        """An event of nobody."""

    with pytest.raises(UnsupportedEventError):
        row.accountant.epsilon(Unknown(), 1e-5, "add_or_remove_one")


# Folds.


@pytest.mark.every_case
@by_row(FOLDS)
def test_a_fold_carries_a_stable_state(row):
    fold = row.fold
    assert isinstance(fold, Fold)
    assert fold.num_steps in (None, 80)
    params = {"loc": jnp.zeros(3), "scale": jnp.ones(())}
    state = jax.tree.map(lambda x: jnp.asarray(x, jnp.result_type(x)), fold.init(params))
    like = jax.tree.map(lambda x: (x.shape, x.dtype), state)
    update = jax.jit(fold.update)
    for step in range(80):
        state = update(state, jax.tree.map(lambda x, step=step: x + step, params))
        assert jax.tree.map(lambda x: (x.shape, x.dtype), state) == like
    assert update._cache_size() == 1
    values = [np.asarray(x) for x in jax.tree.leaves(fold.result(state)) if np.ndim(x)]
    assert values and all(np.isfinite(x).all() for x in values)


# Drivers.


def mean_model(x):
    mean = numpyro.sample("mean", dist.Normal(0, 3))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("x", dist.Normal(mean, 1), obs=x)


def two_latents(x):
    mean = numpyro.sample("mean", dist.Normal(0, 3))
    shift = numpyro.sample("shift", dist.Normal(0, 1))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("x", dist.Normal(mean + shift, 1), obs=x)


def data_of(row):
    x = jnp.linspace(-1.0, 1.0, 40)
    x = x[:, None] if row.columns == 2 else x
    return (x, x[:, 0]) if row.targets else (x,)


def _least(row):
    needed = {"clip_norm": 1.0, "sampler": FullBatch()}
    return {name: value for name, value in needed.items() if name not in row.lacks}


def driver_of(row, **options):
    return row.build(mean_model, **_least(row) | {"noise_multiplier": 3.0} | options)


@pytest.mark.every_case
@by_row(DRIVERS)
def test_a_driver_shows_every_setting_and_takes_it(row):
    driver = driver_of(row, secret_key=3)
    assert "secret" not in repr(driver.settings)
    shown = inspect.signature(type(driver)).parameters
    own = set(inspect.signature(RunSettings).parameters)
    assert set(shown) & own == own - row.lacks
    for name in set(shown) & own - {"clip_norm", "sampler"}:
        assert repr(shown[name].default) == repr(RunSettings.__dataclass_fields__[name].default)
    useless = {
        "mechanism": GaussianMechanism(), "loss_release": LossRelease(1.0, 0.1),
        "public": ["table"], "data_plate": "records", "max_rows_per_unit": 2,
    }  # fmt: skip
    for name in row.lacks - own:
        with pytest.raises(TypeError, match=f"{row.name} has no use for .'{name}'."):
            row.build(mean_model, noise_multiplier=3.0, **{name: useless[name]}, **_least(row))
    with pytest.raises(ValueError, match="Expected a budget or a noise_multiplier, got neither"):
        driver_of(row, noise_multiplier=None)
    if "clip_norm" not in row.lacks:
        with pytest.raises(
            TypeError, match="missing .* required (keyword-only )?argument: 'clip_norm'"
        ):
            row.build(mean_model, sampler=FullBatch())


@by_row(DRIVERS, ALL_IN_FULL)
def test_a_driver_reports_what_it_spent(row):
    settings, data = {"budget": PrivacyBudget(4.0, 1e-3), "noise_multiplier": None}, data_of(row)
    values, report = row.run(driver_of(row, **settings), 8, data)
    assert isinstance(report, PrivacyReport)
    assert 3.9 < report.epsilon <= 4.0 and report.num_steps == row.num_steps
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(values))
    other, _ = row.run(driver_of(row, **settings), 8, data)
    pairs = zip(*map(jax.tree.leaves, (values, other)), strict=True)
    assert any(np.any(a != b) for a, b in pairs)  # noise of its own in each run


@pytest.mark.full
@pytest.mark.parametrize(("row", "each"), pairs_to_run())
def test_a_driver_takes_a_mechanism_or_refuses_it(row, each):
    each, data = renamed(each, row.entry), data_of(row)

    def build(mechanism, clip_norm):
        return row.build(
            two_latents, mechanism=mechanism, clip_norm=clip_norm, sampler=FullBatch(),
            noise_multiplier=3.0, secret_key=9, repetition=True,
        )  # fmt: skip

    if each.name in row.refuses:
        with pytest.raises((TypeError, ValueError), match=row.refuses[each.name]):
            build(each.mechanism, each.clip_norm)
        return
    found, report = row.run(build(each.mechanism, each.clip_norm), 8, data)
    assert report.num_steps == 8 and report.epsilon < math.inf
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(found))
    if each.name == "automatic":  # another factor, the same noise
        plain, _ = row.run(build(GaussianMechanism(), each.clip_norm), 8, data)
        leaves = zip(*map(jax.tree.leaves, (found, plain)), strict=True)
        assert any(np.any(np.abs(a - b) > 1e-4) for a, b in leaves)
