"""DP-SEP as printed: what its damping does, its sensitivity, and what it refuses."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from gaussian import gaussian

from numpyro_dp import DPSEP, SEP, AdaptiveClip, FixedSize, FullBatch, PrivacyBudget
from numpyro_dp.ep.families import beta, normal
from numpyro_dp.ep.paper_form import paper_form
from numpyro_dp.ep.problem import make_problem, read_conjugate_model
from numpyro_dp.ep.sites import quadrature
from numpyro_dp.sums.bounded import bounded_sum

KEY = jax.random.key(0)
REPLACE = PrivacyBudget(1.0, 1e-5, "replace_one")
NUMBER = 60


def logistic(x, y):
    weights = numpyro.sample("w", dist.Normal(0, 1).expand([x.shape[1]]).to_event(1))
    with numpyro.plate("records", x.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=x @ weights), obs=y)


def coin(x):
    p = numpyro.sample("p", dist.Beta(1.0, 1.0))
    with numpyro.plate("records", x.shape[0]):
        numpyro.sample("x", dist.Bernoulli(p), obs=x)


def binary_data():
    rng = np.random.default_rng(1)
    x = rng.normal(size=(NUMBER, 3)).astype(np.float32)
    return x, (rng.random(NUMBER) < 1 / (1 + np.exp(-x @ np.ones(3)))).astype(np.int32)


def moved(gamma, steps=1, **form):
    """Natural parameters before and after steps on one record each."""
    sep = SEP(logistic, sampler=FixedSize(1), damping=gamma, secret_key=5, **form)
    state = sep.init(KEY, *binary_data())
    before = sep.get_params(state)
    for _ in range(steps):
        state, _ = sep.update(state, *binary_data())
    return before, sep.get_params(state)


@pytest.mark.extended
def test_the_printed_update_with_gamma_n_is_that_of_sep():
    before, printed = moved(float(NUMBER), 5, as_printed=True)
    _, expected = moved(1 / NUMBER, 5)
    for name in before:
        assert np.abs(np.asarray(expected[name] - before[name])).max() > 0.05
        np.testing.assert_allclose(printed[name], expected[name], rtol=1e-4, atol=1e-5)


@pytest.mark.extended
def test_the_printed_update_with_gamma_one_moves_by_a_part_of_it():
    before, after = moved(1.0, as_printed=True)
    _, whole = moved(float(NUMBER), as_printed=True)
    for name in before:
        part, all_of_it = after[name] - before[name], whole[name] - before[name]
        np.testing.assert_allclose(NUMBER * part, all_of_it, rtol=1e-2, atol=1e-4)


@pytest.mark.full
def test_one_record_moves_the_sum_by_at_most_the_clip_norm():
    x, y = (jnp.asarray(array) for array in binary_data())
    structure = read_conjugate_model(logistic, (x, y), {}, None)
    problem = make_problem(logistic, structure, normal, (), KEY)
    estimator = paper_form(1.0, FullBatch())(problem._replace(site=quadrature()))

    @jax.jit
    def total(x, mask):
        params = {name: 1.5 * value for name, value in problem.prior.items()}
        public = estimator.prepare(KEY, params)
        return bounded_sum(estimator, gaussian(0.2, 1.0), public, (x, y), mask)

    rng, full, changes = np.random.default_rng(2), jnp.ones(NUMBER, bool), []
    for _ in range(10):
        heavy = [0.0, 1.0, -1e3, 1e6, 3e19, 1e30, math.nan, math.inf, -math.inf]
        rows = jnp.where(rng.random(x.shape) < 0.3, rng.choice(heavy, x.shape), x).astype(x.dtype)
        everything = total(rows, full)
        for out in (0, 7):
            rest = total(rows, full.at[out].set(False))
            parts = [np.asarray(everything[n], float) - np.asarray(rest[n], float) for n in rest]
            assert all(np.isfinite(part).all() for part in parts)
            changes.append(math.sqrt(sum((part**2).sum() for part in parts)))
    assert 0.19 < max(changes) <= 0.2 * (1 + 1e-5)


@pytest.mark.extended
def test_a_private_run_keeps_the_mean_site_bounded_and_is_accounted_for():
    sep = DPSEP(logistic, as_printed=True, clip_norm=0.05, damping=float(NUMBER),
                sampler=FixedSize(1), budget=REPLACE, secret_key=2, repetition=True)  # fmt: skip
    result = sep.run(KEY, 3 * NUMBER, *binary_data(), progress_bar=False)
    assert result.privacy.epsilon <= 1.0 and result.privacy.relation == "replace_one"
    linear = np.asarray(result.trace.params["auto_linear"])
    precision = np.asarray(result.trace.params["auto_precision"]) - np.eye(3)
    norms = np.sqrt((linear**2).sum(-1) + (precision**2).sum((-1, -2))) / NUMBER
    assert norms.max() <= 0.05 * (1 + 1e-4) and norms.max() > 0.049
    assert np.linalg.eigvalsh(np.asarray(result.trace.params["auto_precision"])).min() > 0


@pytest.mark.extended
def test_other_families_have_the_printed_form_too():
    ones = (jnp.arange(200) % 4 == 0).astype(jnp.int32)
    sep = SEP(coin, {"p": beta()}, as_printed=True, damping=200.0)
    found = sep.run(KEY, 1, ones, progress_bar=False).params
    assert float(found["auto_p_log"]) == pytest.approx(50, rel=1e-3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision_weight": 2.0}, "Leave them out"),
        ({"shared_precision": True}, "Leave them out"),
        ({"floor": 1.0}, "Leave them out"),
        ({"clip_norm": AdaptiveClip()}, "one number"),
        ({"damping": 0.0}, "gamma"),
        ({"damping": lambda step: 1.0}, "damping"),
    ],
)
def test_what_has_no_place_in_the_printed_form_is_refused(options, message):
    usual = {"as_printed": True, "clip_norm": 1.0, "sampler": FixedSize(1), "budget": REPLACE}
    with pytest.raises((TypeError, ValueError), match=message):
        DPSEP(logistic, **usual | options)


def test_a_sweep_over_norms_is_refused_where_the_mean_site_is_bounded():
    sep = DPSEP(logistic, as_printed=True, clip_norm=1.0, damping=1.0, sampler=FixedSize(1),
                budget=REPLACE)  # fmt: skip
    with pytest.raises(ValueError, match="clip_norm in a sweep"):
        sep.sweep(jax.random.split(KEY, 2), 2, *binary_data(), clip_norm=[1.0, 2.0])
