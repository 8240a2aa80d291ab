"""A sampled step has two directions, and epsilon is the larger of theirs.

Of sampled Gaussians removing a record is the worse direction wherever one looks: no event shows
that the other one is left out. So the directions are exchanged, or given epsilons, here.
"""

import dp_accounting as dpa
import pytest
from dp_accounting.pld import privacy_loss_distribution as library

from numpyro_dp.privacy.accounting import prv
from numpyro_dp.privacy.accounting.pld import PLD
from numpyro_dp.privacy.accounting.prv import PRV

STEP = dpa.PoissonSampledDpEvent(0.3, dpa.GaussianDpEvent(1.0))
EVENTS = {
    "sampled": dpa.SelfComposedDpEvent(STEP, 5),
    "with a full batch": dpa.ComposedDpEvent([dpa.GaussianDpEvent(2.0), STEP]),
}


@pytest.mark.parametrize("event", EVENTS.values(), ids=EVENTS)
def test_pld_takes_the_worse_direction(monkeypatch, event):
    found = [PLD().epsilon(event, 1e-5, "add_or_remove_one").upper]
    made = library.from_gaussian_mechanism

    def exchanged(*args, **kwargs):
        one = made(*args, **kwargs)
        return library.PrivacyLossDistribution(one._pmf_add, one._pmf_remove)

    monkeypatch.setattr(library, "from_gaussian_mechanism", exchanged)
    found.append(PLD().epsilon(event, 1e-5, "add_or_remove_one").upper)
    assert found[0] == found[1]


@pytest.mark.parametrize("worse", ["remove", "add"])
@pytest.mark.parametrize("event", EVENTS.values(), ids=EVENTS)
def test_prv_takes_the_worse_direction(monkeypatch, event, worse):
    def of_prv(steps, delta, add):
        upper = 2.0 if add == (worse == "add") else 1.0
        return upper - 0.5, upper - 0.25, upper

    monkeypatch.setattr(prv, "_directed", of_prv)
    bound = PRV().epsilon(event, 1e-5, "add_or_remove_one")
    assert (bound.estimate, bound.upper) == (1.75, 2.0)
