"""Accountants: from an event to the epsilon it spends, always by an upper bound.

=====================  ========================  ==================================================
accountant             what it supports          tightness
=====================  ========================  ==================================================
:class:`GDP`           full batch                exact
:class:`PLD`           full batch, Poisson       0.05 % of epsilon, any delta
:class:`RDP`           full batch, Poisson (*),  3 to 15 %
                       fixed size (**)
:class:`Best`          all of the above          smallest of their upper bounds; the default
:class:`PRV`           full batch, Poisson (*)   lower and upper bound; for comparison
=====================  ========================  ==================================================

(*) under ``add_or_remove_one`` only. (**) without replacement, under ``replace_one`` only.
"""

from numpyro_dp.privacy.accounting.best import Best
from numpyro_dp.privacy.accounting.bounds import (
    Accountant,
    EpsilonBound,
    TotalVariationError,
    UnreliableBoundError,
    UnsupportedEventError,
    describe_event,
    supported_by,
)
from numpyro_dp.privacy.accounting.gdp import GDP
from numpyro_dp.privacy.accounting.pld import PLD
from numpyro_dp.privacy.accounting.prv import PRV
from numpyro_dp.privacy.accounting.rdp import RDP
from numpyro_dp.privacy.accounting.spent import epsilon_spent

__all__ = [
    "GDP",
    "PLD",
    "PRV",
    "RDP",
    "Accountant",
    "Best",
    "EpsilonBound",
    "TotalVariationError",
    "UnreliableBoundError",
    "UnsupportedEventError",
    "describe_event",
    "epsilon_spent",
    "supported_by",
]
