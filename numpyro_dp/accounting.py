"""Who bounds epsilon, for ``Privacy(accountant=)``."""

from numpyro_dp.privacy.accounting.bounds import UnsupportedEventError
from numpyro_dp.privacy.accounting.gdp import GDP
from numpyro_dp.privacy.accounting.pld import PLD
from numpyro_dp.privacy.accounting.prv import PRV
from numpyro_dp.privacy.accounting.rdp import RDP
from numpyro_dp.privacy.accounting.spent import Best
from numpyro_dp.privacy.calibration import CalibrationError
from numpyro_dp.privacy.statement import Statement

__all__ = [
    "GDP",
    "PLD",
    "PRV",
    "RDP",
    "Best",
    "CalibrationError",
    "Statement",
    "UnsupportedEventError",
]
