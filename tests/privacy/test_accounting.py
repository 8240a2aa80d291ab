"""Accounting: bounds against closed forms, published values and other libraries."""

import math
import pickle
import re

import dp_accounting as dpa
import numpy as np
import pytest
from dp_accounting import rdp as library_rdp
from dp_accounting.pld import PLDAccountant
from dp_accounting.pld import privacy_loss_distribution as library
from privacy.events import ADD, REPLACE, gaussian_event, poisson, without_replacement
from scipy import optimize, stats

from numpyro_dp.accounting import GDP, PLD, PRV, RDP, Best, UnsupportedEventError
from numpyro_dp.privacy.accounting import pld, prv
from numpyro_dp.privacy.accounting.bounds import (
    EpsilonBound,
    TotalVariationError,
    UnreliableBoundError,
    describe_event,
    gaussian_steps,
)
from numpyro_dp.privacy.accounting.gdp import gaussian_epsilon, gaussian_log_delta
from numpyro_dp.privacy.accounting.pld import _rounding
from numpyro_dp.privacy.accounting.spent import epsilon_spent
from numpyro_dp.privacy.budget import PrivacyBudget, neighboring_relation
from numpyro_dp.privacy.calibration import calibrate_noise

# --- Values in closed form or in print -----------------------------------------------------------


@pytest.mark.parametrize("mu", [0.003, 0.1, 1.0, 4.0, 9.0])
@pytest.mark.parametrize("epsilon", [0.01, 1.0, 6.0, 50.0])
def test_gaussian_delta_is_the_formula(mu, epsilon):
    # Balle, Wang (2018), Theorem 8, evaluated literally, where that is accurate.
    above, below = (stats.norm.cdf(-epsilon / mu + sign * mu / 2) for sign in (1, -1))
    got = math.exp(gaussian_log_delta(epsilon, mu))
    assert got == pytest.approx(above - math.exp(epsilon) * below, rel=1e-6, abs=1e-14)


@pytest.mark.parametrize("delta", [0.3, 1e-5, 1e-12, 1e-40, 1e-200])
@pytest.mark.parametrize("mu", [1e-3, 0.05, 1.0, 7.0, 40.0])
def test_gaussian_epsilon_inverts_delta(mu, delta):
    epsilon = gaussian_epsilon(mu, delta)
    assert gaussian_log_delta(epsilon, mu) <= math.log(delta) + 1e-9
    if epsilon > 0.0:
        assert gaussian_log_delta(epsilon * (1 - 1e-6), mu) > math.log(delta)


@pytest.mark.parametrize(("rate", "noise", "steps", "printed"), [
    # TF-Privacy tutorial and README, MNIST, batch 256 of 60000, delta 1e-5 (moments accountant
    # with the conversion rdp + log(1/delta) / (order - 1)).
    (256 / 60000, 1.12, 14063, 2.92),
    (256 / 60000, 1.3, 3516, 1.19),
    (256 / 60000, 1.1, 14063, 3.01),
    (256 / 60000, 0.7, 10547, 7.10),
    # Abadi et al. (2016), section 3.2: q = 0.01, sigma = 4, 10000 steps.
    (0.01, 4.0, 10000, 1.26),
])  # fmt: skip
def test_published_dpsgd_values(rate, noise, steps, printed):
    event = poisson(rate, noise, steps)
    orders = np.array([1 + x / 10 for x in range(1, 100)] + list(range(12, 64)))
    divergence = library_rdp.RdpAccountant(orders).compose(event).rdp
    # The printed value is reproduced by the method of its day ...
    assert np.min(divergence + np.log(1e5) / (orders - 1)) == pytest.approx(printed, abs=0.005)
    # ... and ours are between the tight value and it.
    tight = PLD().epsilon(event, 1e-5, ADD).epsilon
    assert 0.7 * printed < tight < RDP().epsilon(event, 1e-5, ADD).epsilon < printed


@pytest.mark.parametrize("accountant", [GDP(), RDP(), PLD(), Best()])
@pytest.mark.parametrize("relation", [ADD, REPLACE])
def test_gaussians_compose_to_one_and_a_sample_of_everybody_is_the_full_batch(accountant, relation):
    many = dpa.SelfComposedDpEvent(dpa.GaussianDpEvent(6.0), 9)
    one = accountant.epsilon(dpa.GaussianDpEvent(2.0), 1e-6, relation).epsilon
    full = accountant.epsilon(many, 1e-6, relation).epsilon
    assert full == pytest.approx(one, rel=1e-9)
    for event in (poisson(1.0, 6.0, 9), without_replacement(50, 50, 6.0, 9)):
        if relation == REPLACE:
            assert accountant.epsilon(event, 1e-6, relation).epsilon == full


def test_rdp_is_mironovs_formula():
    # Mironov (2017), Corollary 3: order / (2 sigma^2), converted as in the module's docstring.
    orders, delta = (4.0, 9.0), 1e-6
    expected = min(
        5 * a / 18 + math.log((a - 1) / a) - math.log(delta * a) / (a - 1) for a in orders
    )
    event = dpa.SelfComposedDpEvent(dpa.GaussianDpEvent(3.0), 5)
    assert RDP(orders).epsilon(event, delta, ADD).epsilon == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("delta", [1e-3, 1e-6, 1e-10])
@pytest.mark.parametrize(("rate", "noise"), [(0.5, 3.0), (0.1, 0.7), (0.01, 1.0), (0.001, 0.5)])
def test_one_sampled_step_in_closed_form(rate, noise, delta):
    # Balle, Barthe, Gaboardi (2018), Theorem 8: delta' = q delta at log(1 + q (e^eps - 1)).
    plain = gaussian_epsilon(1 / noise, min(delta / rate, 0.999))
    expected = math.log1p(rate * math.expm1(plain))
    got = PLD().epsilon(poisson(rate, noise, 1), delta, ADD).epsilon
    assert expected * (1 - 1e-9) <= got <= expected * 1.003 + 1e-5


@pytest.mark.parametrize("rate", [0.3, 0.01])
def test_replace_one_step_in_closed_form(rate):
    # The pair ((1-q) N(0) + q N(1), (1-q) N(0) + q N(-1)) by brute-force quadrature.
    noise, delta = 1.6, 1e-5
    x = np.linspace(-16 * noise, 16 * noise, 400_001)
    still, up, down = (stats.norm.pdf(x, mean, noise) for mean in (0.0, 1.0, -1.0))
    top, base = ((1 - rate) * still + rate * moved for moved in (up, down))
    got = PLD().epsilon(poisson(rate, noise / 2, 1), delta, REPLACE).epsilon
    exact = [np.sum(np.maximum(top - math.exp(e) * base, 0)) * (x[1] - x[0])
             for e in (got, got * 0.995)]  # fmt: skip
    assert exact[0] <= delta * (1 + 1e-6) < exact[1]


def test_replace_one_pair_dominates_other_replacements():
    # No pair of records of norm <= 1, in the plane, exceeds the one of opposite records.
    noise, rate = 0.8, 0.2
    axis, space = np.linspace(-8, 8, 401, retstep=True)
    u, v = np.meshgrid(axis, axis)

    def output(radius, angle):
        centre = (radius * math.cos(angle), radius * math.sin(angle))
        moved = np.exp(-((u - centre[0]) ** 2 + (v - centre[1]) ** 2) / (2 * noise**2))
        still = np.exp(-(u**2 + v**2) / (2 * noise**2))
        return ((1 - rate) * still + rate * moved) / (2 * math.pi * noise**2)

    def delta(top, base, epsilon):
        return np.sum(np.maximum(top - math.exp(epsilon) * base, 0)) * space**2

    one = output(1, 0)
    others = [output(radius, angle) for radius in (0.0, 0.5, 1.0) for angle in (0.0, 1.0, 2.0, 3.0)]
    for epsilon in (0.0, 0.3, 1.0):
        worst = delta(one, output(1, math.pi), epsilon) + 1e-6
        assert all(delta(one, other, epsilon) <= worst for other in others)
        assert all(delta(other, one, epsilon) <= worst for other in others)


# --- Against the libraries ------------------------------------------------------------------------


GRID = [(0.01, 1.0, 1000), (0.1, 2.0, 200), (0.5, 10.0, 50), (0.002, 0.6, 500), (0.9, 5.0, 20)]


@pytest.mark.parametrize(("rate", "noise", "steps"), GRID)
@pytest.mark.parametrize("relation", [ADD, REPLACE])
def test_pld_agrees_with_the_library_and_is_within_prvs_bounds(rate, noise, steps, relation):
    got = PLD().epsilon(poisson(rate, noise, steps), 1e-6, relation)
    # Its multiplier under replace-one is relative to one record's norm.
    event = poisson(rate, noise * (2.0 if relation == REPLACE else 1.0), steps)
    library_pld = PLDAccountant(neighboring_relation(relation), 1e-4)
    want = library_pld.compose(event).get_epsilon(1e-6)
    # The library's is pessimistic too, so the truth may be a little below it.
    assert want * (1 - 5e-4) - 1e-4 <= got.epsilon <= want * 1.002 + 1e-4
    assert got.estimate == pytest.approx(want, rel=2e-3, abs=2e-4)
    if relation == ADD:
        bound, pld = (each.epsilon(event, 1e-5, ADD) for each in (PRV(), PLD()))
        assert bound.lower <= bound.estimate <= bound.upper
        assert bound.lower <= pld.epsilon <= bound.upper
        assert bound.estimate == pytest.approx(pld.epsilon, rel=5e-3, abs=2e-3)


@pytest.mark.full
def test_add_direction_of_prv_is_not_the_remove_direction():
    steps = gaussian_steps(poisson(0.4, 1.0, 4))
    remove, add = (prv._directed(steps, 1e-5, direction) for direction in (False, True))
    assert add[1] < remove[1] - 0.1  # here remove is the worse one
    # and the add direction is right on its own: the library's PLD of the pair in that order.
    whole = library.from_gaussian_mechanism(1.0, sampling_prob=0.4).self_compose(4)
    assert add[1] == pytest.approx(whole._pmf_add.get_epsilon_for_delta(1e-5), rel=5e-3)


# Of sampled Gaussians removing a record is the worse direction wherever one looks: no event shows
# that the other one is left out. So the directions are exchanged, or given epsilons, here.
STEP = dpa.PoissonSampledDpEvent(0.3, dpa.GaussianDpEvent(1.0))
DIRECTED = {
    "sampled": dpa.SelfComposedDpEvent(STEP, 5),
    "with a full batch": dpa.ComposedDpEvent([dpa.GaussianDpEvent(2.0), STEP]),
}


@pytest.mark.parametrize("event", DIRECTED.values(), ids=DIRECTED)
def test_pld_and_prv_take_the_worse_direction(monkeypatch, event):
    found = PLD().epsilon(event, 1e-5, ADD).upper
    made = library.from_gaussian_mechanism

    def exchanged(*args, **kwargs):
        one = made(*args, **kwargs)
        return library.PrivacyLossDistribution(one._pmf_add, one._pmf_remove)

    monkeypatch.setattr(library, "from_gaussian_mechanism", exchanged)
    assert PLD().epsilon(event, 1e-5, ADD).upper == found
    for worse in (False, True):

        def of_prv(steps, delta, add, worse=worse):
            upper = 2.0 if add == worse else 1.0
            return upper - 0.5, upper - 0.25, upper

        monkeypatch.setattr(prv, "_directed", of_prv)
        bound = PRV().epsilon(event, 1e-5, ADD)
        assert (bound.estimate, bound.upper) == (1.75, 2.0)


@pytest.mark.parametrize("delta", [1e-3, 1e-5, 1e-7])
@pytest.mark.parametrize("noise", [0.2, 1.0, 10.0, 100.0])
def test_pld_is_above_exact_gaussian(noise, delta):
    # A thousand unsampled steps, composed on the grid, against the closed form.
    step = gaussian_steps(dpa.GaussianDpEvent(math.sqrt(1000) * noise))[0]._replace(count=1000)
    _, estimate, got = PLD()._bounds((step,), delta, ADD)
    exact = gaussian_epsilon(1 / noise, delta)
    assert exact <= got <= exact * 1.002 + 1e-4
    assert 2 * estimate - got <= exact + 1e-6


@pytest.mark.parametrize("delta", [1e-3, 1e-6, 1e-9])
def test_composition_against_direct_convolution(delta):
    """Sums of positive numbers have no cancellation: direct convolution is right at any delta."""
    one = library.from_gaussian_mechanism(
        1.5, sampling_prob=0.2, value_discretization_interval=0.02, log_mass_truncation_bound=-60
    )
    pmf = one._pmf_remove.to_dense_pmf()
    probs, infinity = np.asarray(pmf._probs), -math.expm1(8 * math.log1p(-pmf._infinity_mass))
    for _ in range(3):
        probs = np.convolve(probs, probs)
    losses = (8 * pmf._lower_loss + np.arange(probs.size)) * 0.02
    whole = one.self_compose(8, 1e-6 * delta)
    error = max(_rounding(each, 8) for each in (whole._pmf_remove, whole._pmf_add))

    def exact(at):
        epsilon = whole._pmf_remove.get_epsilon_for_delta(at)
        above = losses > epsilon
        return infinity + float(np.dot(probs[above], -np.expm1(epsilon - losses[above])))

    assert error < 0.1 * delta
    assert exact(delta - error) <= delta
    # The library alone is wrong by less than what is charged, and what it cuts off.
    assert abs(exact(delta) / delta - 1) < error / delta + 3e-6


def test_rounding_is_charged_to_delta(monkeypatch):
    def upper(delta=1e-5):
        return PLD().epsilon(poisson(0.1, 1.0, 20), delta, ADD).upper

    before, wanted = upper(), upper(1e-5 - 9e-7)
    monkeypatch.setattr(pld, "_rounding", lambda pmf, total: 9e-7)
    assert upper() > before * (1 + 1e-3)
    assert upper() == pytest.approx(wanted, rel=1e-3)
    monkeypatch.setattr(pld, "_rounding", lambda pmf, total: 0.11 * 1e-5)
    with pytest.raises(UnreliableBoundError, match="ten times its rounding error"):
        upper()


@pytest.mark.full
def test_heterogeneous_grids_are_composed():
    events = [poisson(0.01, 1.0, 300), poisson(0.1, 5.0, 40), dpa.GaussianDpEvent(4.0)]
    event = dpa.ComposedDpEvent([*events, dpa.NoOpDpEvent()])
    bound = PLD().epsilon(event, 1e-6, ADD)
    want = PLDAccountant().compose(event).get_epsilon(1e-6)
    assert bound.epsilon == pytest.approx(want, rel=2e-3)
    other = PRV().epsilon(event, 1e-6, ADD)
    assert other.lower <= bound.epsilon <= other.upper
    assert all(PLD().epsilon(part, 1e-6, ADD).epsilon < bound.epsilon for part in events)


def test_tiny_rates_do_not_round_to_zero():
    # dp_accounting turns a divergence that rounds to a negative number into epsilon 0.
    event = poisson(1e-7, 5.0, 10**5)
    tight = PLD().epsilon(event, 1e-6, ADD)
    assert 0.0 < tight.epsilon <= RDP().epsilon(event, 1e-6, ADD).epsilon


def test_grid_limit_loosens_but_stays_valid():
    event = poisson(0.01, 1.0, 4000)
    fine, coarse = (PLD(max_points=n).epsilon(event, 1e-6, ADD) for n in (1 << 17, 1 << 10))
    assert fine.epsilon < coarse.epsilon
    assert coarse.epsilon - coarse.estimate > fine.epsilon - fine.estimate
    assert coarse.estimate < fine.epsilon * 1.05


# --- Conventions, special events and errors -------------------------------------------------------


def test_replace_one_doubles_the_sensitivity_once():
    event = gaussian_event(4.0, REPLACE)
    one, ours = (each.epsilon(event, 1e-5, REPLACE).epsilon for each in (GDP(), RDP()))
    assert one == pytest.approx(gaussian_epsilon(0.5, 1e-5))
    assert one < ours
    # dp_accounting takes noise / norm of one record in its PLD, noise / sensitivity in its RDP.
    for accountant, noise, known in (
        (PLDAccountant, 4.0, one),
        (library_rdp.RdpAccountant, 2.0, ours),
    ):
        found = accountant(neighboring_relation=dpa.NeighboringRelation.REPLACE_ONE)
        found.compose(dpa.GaussianDpEvent(noise))
        assert found.get_epsilon(1e-5) == pytest.approx(known, rel=0.02 if known == ours else 1e-3)


@pytest.mark.parametrize("relation", [ADD, REPLACE])
@pytest.mark.parametrize("accountant", [GDP(), PLD(), PRV(), RDP(), Best()])
def test_nothing_and_everything(accountant, relation):
    full, public = dpa.GaussianDpEvent(1.0), dpa.NonPrivateDpEvent()
    for event in (dpa.NoOpDpEvent(), dpa.ComposedDpEvent([]), dpa.SelfComposedDpEvent(full, 0)):
        assert accountant.epsilon(event, 1e-5, relation).epsilon == 0.0
    mixed = dpa.ComposedDpEvent([full, dpa.SelfComposedDpEvent(public, 2)])
    for event in (public, dpa.GaussianDpEvent(0.0), mixed, poisson(0.5, 0.0, 3)):
        assert accountant.epsilon(event, 1e-5, relation).epsilon == math.inf


@pytest.mark.full
def test_fixed_size_samples_need_replace_one():
    event = without_replacement(10, 1000, 1.0, 100)
    bound = RDP().epsilon(event, 1e-5, REPLACE)
    library = library_rdp.RdpAccountant(neighboring_relation=dpa.NeighboringRelation.REPLACE_ONE)
    assert bound.epsilon == pytest.approx(library.compose(event).get_epsilon(1e-5), rel=1e-6)
    assert Best().epsilon(event, 1e-5, REPLACE).accountant == "PLD"
    words = f"{re.escape(describe_event(event))}.*{ADD}.*GDP:.*PLD:.*under replace_one alone.*RDP:"
    with pytest.raises(UnsupportedEventError, match=f"(?s){words}") as caught:
        Best().epsilon(event, 1e-5, ADD)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


@pytest.mark.table
@pytest.mark.parametrize(
    ("size", "total", "noise", "delta"),
    [(4, 8, 1.0, 1e-2), (10, 1000, 1.0, 1e-5), (1, 10_000, 0.5, 1e-8), (500, 1000, 5.0, 1e-6)],
)
def test_one_sample_of_a_fixed_size_has_the_delta_of_the_theorem(size, total, noise, delta):
    """Balle, Barthe, Gaboardi (2018), Theorem 9, inverted by a search."""
    q = size / total

    def excess(epsilon):
        inner = math.log1p(math.expm1(epsilon) / q)
        above, below = (stats.norm.cdf(s / (2 * noise) - inner * noise) for s in (1, -1))
        return q * (above - math.exp(inner) * below) - delta

    exact = optimize.brentq(excess, 0.0, 30.0, xtol=1e-12)
    bound = PLD().epsilon(without_replacement(size, total, noise), delta, REPLACE)
    assert exact <= bound.upper * (1 + 1e-7)
    assert bound.upper == pytest.approx(exact, rel=2e-3)


@pytest.mark.full
@pytest.mark.table
@pytest.mark.parametrize(
    ("size", "total", "noise", "steps", "delta"),
    [(10, 1000, 1.0, 100, 1e-5), (200, 1000, 5.0, 500, 1e-6), (2, 4, 3.0, 20, 1e-4)],
)
def test_samples_of_a_fixed_size_are_between_data_that_occur_and_renyi(
    size, total, noise, steps, delta
):
    """If all other records are alike, a step is a mixture with and without a shift of 1."""
    bound = PLD().epsilon(without_replacement(size, total, noise, steps), delta, REPLACE)
    occurs = PLD().epsilon(poisson(size / total, noise, steps), delta, ADD)
    apart = PLD().epsilon(poisson(size / total, noise, steps), delta, REPLACE)
    renyi = RDP().epsilon(without_replacement(size, total, noise, steps), delta, REPLACE)
    assert max(occurs.estimate, apart.estimate) <= bound.upper < 1.2 * occurs.upper
    assert bound.upper < 0.8 * renyi.upper


@pytest.mark.parametrize(("accountant", "event", "relation", "told"), [
    (GDP(), poisson(0.1, 1.0, 2), ADD, "full batches only"),
    (PLD(), without_replacement(2, 9, 1.0), ADD, "under replace_one alone"),
    (PLD(), dpa.ComposedDpEvent([without_replacement(2, 9, 1.0), poisson(0.1, 1.0, 1)]), REPLACE,
        "fixed-size and Poisson samples together"),
    (PRV(), poisson(0.1, 1.0, 2), REPLACE, "add_or_remove_one"),
    (RDP(), poisson(0.1, 1.0, 2), REPLACE, "no Renyi divergence for poisson samples"),
    (PLD(), dpa.LaplaceDpEvent(1.0), ADD, "not a .sampled. Gaussian"),
    (Best(), dpa.UnsupportedDpEvent(), ADD, "GDP: .*PLD: .*RDP: .*Best()"),
    (PLD(), dpa.PoissonSampledDpEvent(0.5, poisson(0.5, 1.0, 1)), ADD, "samples from a sample"),
])  # fmt: skip
def test_unsupported_events(accountant, event, relation, told):
    with pytest.raises(UnsupportedEventError, match=told) as caught:
        accountant.epsilon(event, 1e-5, relation)
    assert describe_event(event) in str(caught.value)


def test_prv_refuses_deltas_below_its_rounding():
    event = poisson(0.01, 22.0, 400_000)
    with pytest.raises(UnreliableBoundError, match="at delta=1e-12: delta is too small"):
        PRV().epsilon(event, 1e-12, ADD)
    with pytest.raises(UnreliableBoundError, match="PRV: prv_accountant has no bound"):
        Best((GDP(), PRV())).epsilon(event, 1e-12, ADD)
    assert Best((PRV(), RDP())).epsilon(event, 1e-12, ADD).accountant == "RDP"


@pytest.mark.parametrize(("event", "delta", "words"), [
    (poisson(0.01, 1e-4, 3), 1e-5, "the noise multiplier 0.0001 protects nothing"),
    (poisson(0.01, 1.0, 3), 1e-300, "ten times its rounding error"),
    (poisson(0.02, 3.456, 2000), 1e-10, r"Expected delta >= \d\.\d+e-10 .* Use RDP\(\)"),
])  # fmt: skip
def test_pld_refuses_what_doubles_cannot_resolve(event, delta, words):
    with pytest.raises(UnreliableBoundError, match=words):
        PLD().epsilon(event, delta, ADD)
    if delta == 1e-10:
        assert Best().epsilon(event, delta, ADD).accountant == "RDP"


@pytest.mark.full
def test_total_variation_is_paid_for():
    event, delta, tau = poisson(0.01, 1.2, 1000), 1e-5, 3e-7
    ideal = PLD().epsilon(event, delta, ADD)
    real = epsilon_spent(event, delta, ADD, total_variation=tau)
    assert real.delta == delta
    assert real.lower is None
    assert ideal.epsilon < real.epsilon < 1.1 * ideal.epsilon
    # Definition: the ideal run is (epsilon, d)-private with d + (1 + e^epsilon) tau <= delta.
    left = delta - (1 + math.exp(real.epsilon)) * tau
    assert PLD().epsilon(event, left, ADD).epsilon <= real.epsilon * (1 + 1e-9)
    small = epsilon_spent(event, delta, ADD, total_variation=1e-12)
    other = PLD().epsilon(event, delta - 1e-9, ADD).epsilon
    assert small.epsilon == pytest.approx(other, rel=1e-6)
    with pytest.raises(TotalVariationError, match=r"total_variation <= [0-9.e-]+ is enough"):
        epsilon_spent(event, delta, ADD, total_variation=1e-5)


def test_failures_are_paid_for():
    event, delta = poisson(0.01, 1.2, 1000), 1e-5
    # To rounding of delta, by which the grid follows too.
    for options, left in (({"accountant": PLD()}, 7e-6), ({"total_variation": 1e-12}, 7e-6 - 1e-9)):
        real = epsilon_spent(event, delta, ADD, failure_prob=3e-6, **options)
        assert real.epsilon == pytest.approx(PLD().epsilon(event, left, ADD).epsilon, rel=1e-6)
        assert real.delta == delta
    with pytest.raises(TotalVariationError, match=r"failure_prob=1e-05 < delta=1e-05"):
        epsilon_spent(event, delta, ADD, failure_prob=1e-5)


def test_bounds_print_themselves():
    bound = EpsilonBound(0.9, 0.95, 1.0, 1e-5, ADD, dpa.GaussianDpEvent(2.0), "PRV")
    assert str(bound) == "epsilon <= 1 (in [0.9, 1]) at delta=1e-05 under add_or_remove_one, by PRV"
    assert bound.epsilon == bound.upper
    assert "\n" not in str(PLD().epsilon(poisson(0.1, 1.0, 3), 1e-5, REPLACE))
    assert str(PrivacyBudget(1.0, 1e-5)) == "(epsilon=1, delta=1e-05) under add_or_remove_one"
    # Several Gaussians on one sample are one.
    inner = dpa.SelfComposedDpEvent(dpa.GaussianDpEvent(4.0), 4)
    nested = dpa.SelfComposedDpEvent(dpa.PoissonSampledDpEvent(0.1, inner), 10)
    assert gaussian_steps(nested) == gaussian_steps(poisson(0.1, 2.0, 10))


@pytest.mark.full
def test_best_takes_the_smallest_and_stops_when_nobody_can_improve():
    class Untouchable:
        name = "untouchable"

        def epsilon(self, event, delta, relation):
            raise RuntimeError("asked")

    event, everyone = poisson(0.05, 1.0, 50), Best((RDP(), PRV(), PLD()))
    bound = everyone.epsilon(event, 1e-5, ADD)
    assert bound == PLD().epsilon(event, 1e-5, ADD)
    assert (bound.accountant, everyone.name) == ("PLD", "Best(RDP, PRV, PLD)")
    for each in (dpa.GaussianDpEvent(1.0), event):
        assert Best((GDP(), PLD(), Untouchable())).epsilon(each, 1e-5, ADD).epsilon > 0.0
    with pytest.raises(RuntimeError, match="asked"):
        Best((RDP(), Untouchable())).epsilon(event, 1e-5, ADD)


EVENT, BUDGET = dpa.GaussianDpEvent(1.0), PrivacyBudget(1.0, 1e-5)


@pytest.mark.parametrize(("build", "error", "told"), [
    (lambda: PrivacyBudget(math.nan, 1e-5), ValueError, "epsilon=nan"),
    (lambda: PLD(relative_gap=0.0), ValueError, "relative_gap"),
    (lambda: PLD(max_points=10), ValueError, "max_points"),
    (lambda: RDP(orders=(1.0,)), ValueError, "orders"),
    (lambda: epsilon_spent(EVENT, 0.0), ValueError, "delta"),
    (lambda: epsilon_spent(EVENT, 1e-5, "swap"), ValueError, "relation"),
    (lambda: epsilon_spent(EVENT, 1e-5, total_variation=1.5), ValueError, "total_variation"),
    (lambda: calibrate_noise(gaussian_event, BUDGET, total_variation=-0.1), ValueError,
        "total_variation"),
    (lambda: calibrate_noise(gaussian_event, BUDGET, total_variation=1.0), ValueError,
        "total_variation"),
    (lambda: gaussian_steps(poisson(1.5, 1.0, 2)), ValueError, "sampling rate"),
    (lambda: gaussian_steps(dpa.GaussianDpEvent(-1.0)), ValueError, "noise_multiplier"),
])  # fmt: skip
def test_argument_errors(build, error, told):
    with pytest.raises(error, match=told):
        build()
