"""What every mechanism, sampler, accountant, fold and driver must do; each test names its row."""

import functools
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
from flat import dpsvi
from hypothesis import strategies as st
from jax.flatten_util import ravel_pytree
from models import mean_of, of, scored
from numpyro.infer.autoguide import AutoDiagonalNormal
from scipy import stats

from numpyro_dp import SEP, BudgetError, Privacy, PrivacyBudget, PrivacyReport, secret_key
from numpyro_dp.accounting import UnsupportedEventError
from numpyro_dp.core import Estimator, Fold, Mechanism, MechanismState, Problem, Sampler
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
SHAPES = {"a": (3,), "b": (), "c": (2, 2)}
WHOLE = Estimator(lambda *_: (), lambda _, example: example, lambda *_: ())  # the record itself


def check_leaves(check, one, other, **options):
    for pair in zip(*map(jax.tree.leaves, (one, other)), strict=True):
        check(*pair, **options)


def mechanism_of(row, noise_multiplier=1.0):
    norm = ClipNorm.of(row.clip_norm)
    return build_mechanism(row.mechanism, norm, noise_multiplier, 10.0)


unit = dist.Normal(0, 1)
product = scored(lambda x, a, b: a * x[:, 0] + b * x[:, 1], "rows", a=unit, b=unit)


def run_of(row, **options):
    """A driver whose record's signal is the record, for the rows of mechanisms."""
    settings = {"budget": PrivacyBudget(2.0, 1e-3), "num_steps": 8, "mechanism": row.mechanism}
    return dpsvi(product, AutoDiagonalNormal, optax.sgd(0.01), clip_norm=row.clip_norm,
                 **settings | options)  # fmt: skip


def result_of(row, num_steps=8, init_state=None, **options):
    svi = run_of(row, **options)
    return svi.run(KEY, num_steps, X, init_state=init_state, progress_bar=False)


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
        rng, drawn = np.random.default_rng(seed), np.asarray(values, np.float32)
        examples = {name: rng.choice(drawn, (6, *shape)) for name, shape in SHAPES.items()}
        every = np.ones(6, bool)
        one_less = every & (np.arange(6) > 0)
        whole, dropped = total(examples, every), total(examples, one_less)
        assert np.isfinite(norm(whole))
        assert change(whole, dropped) <= mechanism.sensitivity * ROUNDING
        largest = max(largest, change(whole, dropped) / mechanism.sensitivity)
        examples["a"][0, 1] = np.nan
        check_leaves(np.testing.assert_array_equal, total(examples, every), dropped)

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
    check_leaves(np.testing.assert_allclose, found, expected, atol=2e-5 * mechanism.sensitivity)
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
    noise = float(whole.state.noise_multiplier)
    assert noise == pytest.approx(whole.privacy.noise_multiplier)
    half = svi.run(KEY, 4, X, progress_bar=False)
    rest = svi.run(KEY, 4, X, init_state=half.state, progress_bar=False)
    state = svi.init(KEY, X)
    for _ in range(8):
        state, _ = svi.update(state, X)
    for found in (rest.params, svi.get_params(state)):
        check_leaves(np.testing.assert_allclose, found, whole.params, rtol=1e-4, atol=1e-5)
    swept = svi.sweep(jax.random.split(KEY, 2), 8, X, epsilon=[1.0, 2.0])
    assert [0.98 * e < r.epsilon <= e for e, r in zip((1, 2), swept.privacy[::2], strict=True)]
    released = result_of(row, loss_release=LossRelease(5.0))
    assert np.isfinite(released.losses.values).all() and released.privacy.epsilon <= 2.0


@pytest.mark.full
@by_row(MECHANISMS)
def test_a_replaced_record_costs_twice_the_sensitivity(row):
    noise = [
        result_of(
            renamed(row, "a"), budget=PrivacyBudget(2.0, 1e-3, relation)
        ).privacy.noise_multiplier
        for relation in ("add_or_remove_one", "replace_one")
    ]
    assert noise[1] == pytest.approx(2 * noise[0], rel=0.01)


@pytest.mark.full
def test_a_state_goes_on_with_its_mechanism_alone():
    first, other = MECHANISMS[0], next(row for row in MECHANISMS if row.name == "automatic")
    half = result_of(first, 4)
    with pytest.raises(BudgetError, match="mechanism=GaussianMechanism"):
        result_of(other._replace(clip_norm=1.5), 4, half.state)


@pytest.mark.full
def test_correlated_noise_is_accounted_for_as_a_whole():
    row = next(row for row in MECHANISMS if row.name == "correlated")
    result = result_of(row, budget=None, noise_multiplier=4.0)
    gain = (1 - 0.5**8) / 0.5 * math.sqrt(8)
    assert result.privacy.event == GaussianDpEvent(4.0 / gain)
    with pytest.raises(ValueError, match=r"Expected sampler=FullBatch\(\)"):
        result_of(row, sampler=Poisson(0.2))
    with pytest.raises(ValueError, match=r"mechanism=CorrelatedNoise\(decay=0.5\) adds noise that"):
        SEP(mean_model, privacy=Privacy(mechanism=row.mechanism))


@pytest.mark.parametrize("wrong", [GaussianMechanism, lambda clip_norm, noise: 3, [1], None])
def test_what_makes_no_mechanism_is_refused(wrong):
    # The second text is that of the check of types in tests, which comes first.
    with pytest.raises(TypeError, match="Expected mechanism to be a hashable value|Expected type"):
        run_of(MECHANISMS[0]._replace(mechanism=wrong))


# Samplers.


@pytest.mark.every_case
@by_row(SAMPLERS)
def test_a_sampler_is_a_value_with_a_stable_state(row):
    sampler, event, traces = row.value, GaussianDpEvent(2.0), []
    assert isinstance(sampler, Sampler)
    assert hash(sampler) == hash(type(sampler)(**vars(sampler)))

    @jax.jit
    def step(state):
        traces.append(1)
        return sampler.next(state)

    state = sampler.init(secret_key(1), 40)
    batch, after = sampler.next(state)
    assert jax.tree.structure(state) == jax.tree.structure(after)
    assert after.num_examples == 40
    assert after.key.dtype == state.key.dtype
    jitted, jitted_after = step(state)
    check_leaves(np.testing.assert_array_equal, batch, jitted)
    assert all(leaf.dtype in (jnp.int32, bool) for leaf in jax.tree.leaves(batch))
    assert (jax.random.key_data(after.key) == jax.random.key_data(jitted_after.key)).all()
    for each in (jitted_after, sampler.init(secret_key(2), 40)):
        step(each)
    assert len(traces) == 1  # compiled once
    # What it says to the accountant.
    assert isinstance(sampler.amplify(event, 40), DpEvent)
    assert 1 <= sampler.compositions(40, 10) <= 10
    assert sampler.relation in ("add_or_remove_one", "replace_one")
    assert 0 <= sampler.failure_prob(40) < 1e-6 and 0 <= sampler.total_variation(40) < 1e-6


@pytest.mark.full
@by_row(SAMPLERS)
def test_a_sampler_moves_its_key_on_and_draws_side_by_side(row):
    keys = jax.random.split(secret_key(2), 4)

    def draw(key):
        return row.value.next(row.value.init(key, 40))

    several, states = jax.jit(jax.vmap(draw))(keys)
    for i, key in enumerate(keys):
        batch, state = draw(key)
        check_leaves(lambda a, b, i=i: np.testing.assert_array_equal(a, b[i]), batch, several)
        assert (jax.random.key_data(state.key) == jax.random.key_data(states.key[i])).all()
        if row.name != "FullBatch":  # which draws nothing
            # The key has moved on by a split, so the state does not hold what drew the batch.
            assert not (jax.random.key_data(state.key) == jax.random.key_data(key)).any()


@pytest.mark.full
@by_row(SAMPLERS)
def test_a_sampler_draws_the_same_in_double_precision(row):
    def draws():
        state, found = row.value.init(secret_key(3), 40), []
        for _ in range(5):
            batch, state = row.value.next(state)
            found.append(batch)
        return found

    plain = draws()
    with x64():
        wide = draws()
    check_leaves(functools.partial(np.testing.assert_array_equal, strict=True), plain, wide)


@pytest.mark.full
@by_row(SAMPLERS)
def test_a_sampler_includes_each_record_as_often_as_it_says(row):
    sampler, steps = row.value, 4000

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


# Accountants.


class Unknown(DpEvent):
    """An event of nobody."""


@pytest.mark.every_case
@by_row(ACCOUNTANTS)
def test_an_accountant_bounds_what_is_known_exactly(row):
    assert isinstance(row.value, Accountant)
    assert hash(row.value) == hash(pickle.loads(pickle.dumps(row.value)))
    for noise, delta in ((0.7, 1e-5), (3.0, 1e-3), (20.0, 1e-6)):
        bound = row.value.epsilon(GaussianDpEvent(noise), delta, "add_or_remove_one")
        # Balle and Wang (2018): the exact delta of the Gaussian mechanism at that epsilon.
        mu, epsilon = 1 / noise, bound.upper
        exact = stats.norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * stats.norm.cdf(
            -mu / 2 - epsilon / mu
        )
        assert exact <= delta * (1 + 1e-6)
        assert bound.estimate is None or bound.estimate <= bound.upper
        assert row.value.epsilon(GaussianDpEvent(noise), delta / 10, bound.relation).upper > (
            bound.upper
        )
    with pytest.raises(UnsupportedEventError):
        row.value.epsilon(Unknown(), 1e-5, "add_or_remove_one")


# Folds.


@pytest.mark.every_case
@by_row(FOLDS)
def test_a_fold_carries_a_stable_state(row):
    fold = row.value
    assert isinstance(fold, Fold)
    assert fold.num_steps in (None, 80)
    params = {"loc": jnp.zeros(3), "scale": jnp.ones(())}
    state = jax.tree.map(lambda x: jnp.asarray(x, jnp.result_type(x)), fold.init(params))
    like = jax.eval_shape(lambda: state)
    update = jax.jit(fold.update)
    for step in range(80):
        state = update(state, jax.tree.map(lambda x, step=step: x + step, params))
        assert jax.eval_shape(lambda state=state: state) == like
    assert update._cache_size() == 1
    values = [np.asarray(x) for x in jax.tree.leaves(fold.result(state)) if np.ndim(x)]
    assert values and all(np.isfinite(x).all() for x in values)


# Drivers.


mean_model = mean_of(3)
two_latents = of(
    lambda mean, shift: dist.Normal(mean + shift, 1), mean=dist.Normal(0, 3),
    shift=dist.Normal(0, 1),
)  # fmt: skip


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
        with pytest.raises(TypeError, match="missing .* required .*argument: 'clip_norm'"):
            row.build(mean_model, sampler=FullBatch())


@pytest.mark.every_case
@by_row(DRIVERS)
def test_every_method_fits_a_problem(row):
    data = data_of(row)
    driver, _ = row.begin(driver_of(row), data)
    problem = driver._session(data, {}).problem
    assert isinstance(problem, Problem)
    assert problem.num_examples == 40
    blank, rows = problem.blank_example(), problem.rows(data, {})
    assert [leaf.shape for leaf in blank] == [leaf.shape[1:] for leaf in rows.arrays]
    assert problem.numbered == (len(blank) > len(data))
    assert isinstance(problem.at(rows.shared), Problem)


@pytest.mark.every_case
@by_row([row for row in DRIVERS if row.columns == 1])
def test_a_keyword_of_the_constructor_is_not_given_to_a_call_too(row):
    def scaled(x, scale=1.0):
        mean = numpyro.sample("mean", dist.Normal(0, scale))
        with numpyro.plate("records", x.shape[0]):
            numpyro.sample("x", dist.Normal(mean, 1.0), obs=x)

    driver = row.build(scaled, **_least(row), noise_multiplier=3.0, scale=2.0)
    steps = () if row.name in ("DPLaplace", "DPMCMC") else (3,)
    with pytest.raises(TypeError, match="'scale'.*given twice"):
        driver.run(KEY, *steps, *data_of(row), scale=3.0)


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
