"""A sampled step has two directions, and epsilon is the larger of theirs.

Of sampled Gaussians removing a record is the worse direction wherever one looks: no event shows
that the other one is left out. So the directions are given epsilons here.
"""

import dp_accounting as dpa
import pytest

from numpyro_dp.privacy.accounting import PLD, PRV

STEP = dpa.PoissonSampledDpEvent(0.3, dpa.GaussianDpEvent(1.0))
EVENTS = {
    "sampled": dpa.SelfComposedDpEvent(STEP, 5),
    "with a full batch": dpa.ComposedDpEvent([dpa.GaussianDpEvent(2.0), STEP]),
}


@pytest.mark.parametrize("worse", ["remove", "add"])
@pytest.mark.parametrize("event", EVENTS.values(), ids=EVENTS)
def test_epsilon_is_that_of_the_worse_direction(monkeypatch, event, worse):
    def of_pld(self, steps, direction, delta, known):
        return (2.0 if direction == worse else 1.0), 0.25

    def of_prv(self, steps, delta, add):
        upper = 2.0 if add == (worse == "add") else 1.0
        return upper - 0.5, upper - 0.25, upper

    monkeypatch.setattr(PLD, "_directed", of_pld)
    monkeypatch.setattr(PRV, "_directed", of_prv)
    for accountant in (PLD(), PRV()):
        bound = accountant.epsilon(event, 1e-5, "add_or_remove_one")
        assert (bound.estimate, bound.upper) == (1.75, 2.0)
